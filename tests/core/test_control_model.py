"""Everything that can happen to one service, in any order: what must hold all the same.

The model is a store with optimistic concurrency, as the API server has, a few workers that count, a person who edits,
and operators that read late, die between two writes, and have clocks that differ by ten minutes. Tunings end as they
please: what a plan is worth is not the subject here, what is done with it is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from fleet import BACKBONE, RAMP_SET, RAMPS, columns, costs, pool, worker_of  # type: ignore[import-not-found]
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offramp_core.certify import Certificate
from offramp_core.control.codec import from_json, to_json
from offramp_core.control.decide import decide
from offramp_core.control.objects import Config, ConfigStatus, Rollout, RolloutStatus, Service, ServiceStatus
from offramp_core.control.rollouts.rollout import CANARY_SERVES
from offramp_core.control.snapshot import Decision, Gathered, Load, NewRollout, Observed, RecordStore, Snapshot, Worker
from offramp_core.control.spec import parse_spec
from offramp_core.control.stable.watch import Watch
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, Observations, PlanDocument, RecordBlock, Refusal, WorkerState
from offramp_core.sketch import bucket_index
from offramp_core.tuning import NeedsLabels, NoGain, Predicted, Proposed, TuningRequest

RECORDS = pool(600, seed=7)
THRESHOLDS = ("0.02", "0.05", "0.3")
STEPS = (
    [{"weight": 20}, {"weight": 50}],
    [{"weight": 5}],
    [{"weight": 10, "pause": "90s"}, {"weight": 40}, {"weight": 100}],
)
MANIFEST: dict[str, Any] = {
    "model": {"uri": "file:///model"},
    "objective": {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    "rollout": {"steps": STEPS[0], "cooldown": "10m", "stepDeadline": "30m"},
    "replicas": 2,
}
PINS = {
    "Pinned a": {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.02"}]}},
    "Pinned b": {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[0], "threshold": "0.9"}]}},
}
WRITES = 8
Write = Callable[[str, Callable[[], object]], None]
S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus)


class CutError(Exception):
    """The operator died, or somebody else wrote first: the rest of the pass does not happen."""


@dataclass
class Counting:
    """A worker that takes documents and counts; nothing of it runs a model."""

    name: str
    service_uid: str
    boots: int = 0
    ready: bool = True
    document: PlanDocument | None = None
    refused: Refusal | None = None
    refuses: bool = False
    breaker_open: bool = False
    lapsed: bool = False
    crashed_epoch: int | None = None
    lies: bool = False
    counts: dict[tuple[int, str], ArmCounts] = field(default_factory=dict)

    @property
    def boot(self) -> str:
        return f"{self.name}-boot{self.boots}"

    def restart(self) -> None:
        if self.document is not None and self.document.canary is not None:
            self.crashed_epoch = self.document.epoch
        self.boots += 1
        self.document, self.refused, self.breaker_open, self.lapsed, self.lies = None, None, False, False, False
        self.counts = {}

    def take(self, document: PlanDocument) -> None:
        assert document.service_uid == self.service_uid, "a plan of an earlier service of that name"
        if self.document is not None and document.epoch <= self.document.epoch:
            return
        if self.refuses and document.canary is not None:
            self.refused = Refusal(document.epoch, "Unsupported", "no")
            return
        if self.document is None or self.document.stable.plan != document.stable.plan:
            self.breaker_open = False
        self.document, self.refused, self.lapsed = document, None, False

    def serve(self, batches: int, *, wrong: float, slow: float, failing: float) -> None:
        document = self.document
        if document is None:
            return
        canary = batches * document.weight_percent // 100 if document.canary is not None and not self.lapsed else 0
        self._count("stable", batches - canary, wrong=0.001, slow=0.1, failing=0.0)
        self._count("canary", canary, wrong=wrong, slow=slow, failing=failing)

    def _count(self, arm: str, batches: int, *, wrong: float, slow: float, failing: float) -> None:
        assert self.document is not None
        served = self.document.stable if arm == "stable" else self.document.canary
        if served is None or batches <= 0:
            return
        key = (self.document.epoch, arm)
        plan_hash = Plan.from_mapping(served.plan).content_hash
        c = self.counts.get(key, ArmCounts(key[0], arm, plan_hash))  # type: ignore[arg-type]
        audited = int(batches * served.audit_rate)
        judged = batches if "1" in self.document.slow_seconds else 0
        sketch = {str(bucket_index(0.01)): batches + c.batches}
        self.counts[key] = replace(
            c,
            requests=c.requests + batches,
            drawn=c.drawn + audited,
            audited=c.audited + audited,
            disagreements=c.disagreements + int(wrong * audited),
            batches=c.batches + batches,
            judged_batches=c.judged_batches + judged,
            slow_batches=c.slow_batches + int(slow * judged),
            failed_batches=c.failed_batches + int(failing * batches),
            execution={"1": sketch},
            latency=sketch,
        )

    def view(self) -> Worker:
        hashes = [
            Plan.from_mapping(a.plan).content_hash if a else ""
            for a in ((self.document.stable, self.document.canary) if self.document else (None, None))
        ]
        state = WorkerState(
            self.name,
            self.boot,
            self.service_uid,
            "sim",
            True,
            BACKBONE,
            RAMP_SET,
            columns({}),
            costs({}),
            self.document.epoch if self.document else 0,
            hashes[0],
            "" if self.lapsed else hashes[1],
            self.refused,
            self.breaker_open,
            self.crashed_epoch,
        )
        counts = tuple(self.counts.values())
        if self.lies:
            counts = tuple(replace(c, disagreements=c.audited + 1) for c in counts)
        seen = Observations(self.name, self.boot, 0.0, counts, RecordBlock(0, 0, RAMP_SET))
        return worker_of(self.name, ready=self.ready, restarts=self.boots, state=state, observations=seen)


@dataclass(frozen=True)
class Read:
    """What an operator has read: the objects, and their versions."""

    snapshot: Snapshot
    versions: dict[str, int]


def is_proven(config: Config, service: Service) -> bool:
    spec = service.spec
    return config.plan.exits_off or any(
        float(c["budget"]) <= spec.max_disagreement + 1e-9 and float(c["delta"]) <= 1 - spec.confidence + 1e-9
        for c in config.status.certificates
    )


class ControlLoop(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize(mode=st.sampled_from(["Auto", "Recommend"]))
    def born(self, mode: str) -> None:
        self.now, self.skew, self.watched_since = 1_000_000.0, 0.0, 0.0
        self.uids, self.manifest = 0, {**MANIFEST, "ramps": {"mode": mode}}
        self.delivers = True
        self.stale: Read | None = None
        self.create()

    def create(self) -> None:
        self.uids += 1
        self.service = Service("default", "sim", f"uid{self.uids}", 1, parse_spec(self.manifest))
        self.configs: dict[str, Config] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.published: PlanDocument | None = None
        self.versions: dict[str, int] = {}
        self.workers = [Counting(f"w{i}-{self.uids}", self.service.uid) for i in range(2)]
        self.request: TuningRequest | None = None
        self.outcome: Any = None
        self.older: list[PlanDocument] = []
        self.watch: Watch | None = None
        self.stale = None

    # --- the operator ------------------------------------------------------------------------------

    @property
    def clock(self) -> float:
        """What the present operator's clock says."""
        return self.now + self.skew

    def read(self) -> Read:
        store = RecordStore(replace(RECORDS, time=np.full(len(RECORDS), self.now)), RAMPS, BACKBONE, RAMP_SET)
        snapshot = Snapshot(
            Gathered(self.service, dict(self.configs), tuple(self.rollouts.values()), published=self.published),
            Observed(tuple(w.view() for w in self.workers), store, load=Load(100, 0.2)),
            self.outcome,
            self.request is not None and self.outcome is None,
            self.watched_since,
            watch=self.watch,
        )
        return Read(snapshot, dict(self.versions))

    def one_pass(self, read: Read, *, writes: int = 1000) -> Decision:
        """Decide on what was read, and carry it out until the operator dies or somebody else turns out to have
        written."""
        decision = decide(read.snapshot, self.clock)
        self.watch = decision.watch
        self.check(read.snapshot, decision)
        left = [writes]

        def write(what: str, change: Callable[[], object]) -> None:
            if left[0] == 0 or read.versions.get(what, 0) != self.versions.get(what, 0):
                raise CutError
            left[0] -= 1
            change()
            self.versions[what] = self.versions.get(what, 0) + 1
            read.versions[what] = self.versions[what]

        with contextlib.suppress(CutError):
            self.carry_out(read.snapshot, decision, write)
        return decision

    def carry_out(self, seen: Snapshot, decision: Decision, write: Write) -> None:
        """In the order that :class:`Decision` asks for, and only where something differs."""
        for name, put in self.writes_of(seen, decision):
            write(name, put)
        if decision.publish is not None:
            write("plan", lambda: self.put_plan(decision.publish))
        if self.delivers and self.published is not None:
            for worker in self.workers:
                worker.take(self.published)
        if decision.tune is not None and self.request is None:
            self.request = decision.tune

    def writes_of(self, seen: Snapshot, decision: Decision) -> Iterator[tuple[str, Callable[[], object]]]:
        for new in decision.new_configs:
            if new.name not in seen.gathered.configs:
                yield new.name, partial(self.put_config, Config(new.name, new.plan, kept(new.status), self.now))
        for name, status in decision.config_statuses.items():
            yield name, partial(self.put_config_status, name, status)
        if decision.new_rollout is not None:
            yield decision.new_rollout.name, partial(self.put_rollout, decision.new_rollout)
        for name, rollout_status in decision.rollout_statuses.items():
            yield name, partial(self.put_rollout_status, name, rollout_status)
        if decision.status != seen.service.status:
            yield "service", partial(self.put_service, seen, decision.status)
        for name in decision.delete_rollouts:
            yield name, partial(self.rollouts.pop, name)
        for name in decision.delete_configs:
            yield name, partial(self.configs.pop, name)

    def put_config(self, config: Config) -> None:
        self.configs[config.name] = config

    def put_config_status(self, name: str, status: ConfigStatus) -> None:
        self.configs[name] = replace(self.configs[name], status=kept(status))

    def put_rollout(self, new: NewRollout) -> None:
        assert new.name not in self.rollouts and new.from_config != new.to_config
        self.rollouts[new.name] = Rollout(
            new.name, new.from_config, new.to_config, new.cause, new.generation, created_at=self.now
        )

    def put_rollout_status(self, name: str, status: RolloutStatus) -> None:
        before = self.rollouts[name]
        assert not before.status.finished or before.status.phase == status.phase, "a finished rollout started again"
        self.rollouts[name] = replace(before, status=kept(status))

    def put_service(self, seen: Snapshot, status: ServiceStatus) -> None:
        if seen.tuning_outcome is not None and status.tuning != seen.service.status.tuning:
            self.outcome = self.request = None  # what was learned from it is stored
        self.service = replace(self.service, status=kept(status))

    def put_plan(self, document: PlanDocument | None) -> None:
        held = [w.document.epoch for w in self.workers if w.document is not None]
        assert document is not None and document.epoch > max(held, default=0), "a worker would refuse it"
        assert self.published is None or document.epoch > self.published.epoch, "epochs only grow"
        if self.published is not None:
            self.older.append(self.published)
        self.published = document

    def check(self, seen: Snapshot, decision: Decision) -> None:
        """What a single decision must keep to, whatever it was made from."""
        configs = {**seen.gathered.configs}
        for new in decision.new_configs:
            configs[new.name] = Config(new.name, new.plan, new.status)
        for name, status in decision.config_statuses.items():
            configs[name] = replace(configs[name], status=status)
        stable = configs[decision.status.stable_config] if decision.status.stable_config else None
        if stable is not None and decision.status.observed_generation and any(w.endpoint.ready for w in seen.workers):
            assert is_proven(stable, seen.service), "a plan serves that is neither certified nor accepted"
        self.check_that_acceptance_was_earned(seen, decision)
        document = decision.publish
        if document is not None:
            assert document.service_uid == seen.service.uid
            assert stable is not None and stable.plan.to_mapping() == document.stable.plan
            if seen.service.spec.mode == "Disabled":
                assert stable.plan.exits_off and document.canary is None
        if decision.new_rollout is not None and decision.new_rollout.cause == "Tuned":
            config = seen.gathered.configs.get(decision.new_rollout.to_config)
            until = config.status.rejected_until_at if config is not None else None
            assert until is None or until <= self.clock or self.forgiven(decision), "proposed while it cools down"
        for rollout in seen.gathered.rollouts:
            now = decision.rollout_statuses.get(rollout.name, rollout.status)
            begins = rollout.status.phase == "Pending" and now.phase in CANARY_SERVES
            if begins:
                assert not rollout.paused and not seen.service.spec.suspend, "a paused rollout began"
                asked = seen.service.spec.mode == "Recommend" and rollout.cause == "Tuned"
                assert not asked or rollout.decision == "Promote", "a recommendation began by itself"
            if now.phase == "Promoting" and rollout.status.phase != "Promoting":
                assert all(g.state in ("Clear", "NotApplicable") for g in now.gates) and now.gates, (
                    "a gate was overruled"
                )

    def check_that_acceptance_was_earned(self, seen: Snapshot, decision: Decision) -> None:
        """A certificate that a canary earned says what its gate says, and of the budget that the gate asked about."""
        for name, status in decision.config_statuses.items():
            known = seen.gathered.configs[name].status.certificates if name in seen.gathered.configs else ()
            for proof in (c for c in status.certificates if c not in known and c["method"] == "canary-acceptance"):
                gates = [
                    gate
                    for r in seen.gathered.rollouts
                    if r.to_config == name
                    for gate in decision.rollout_statuses.get(r.name, r.status).gates
                    if gate.name == "acceptance" and gate.state == "Clear" and gate.bound == float(proof["budget"])
                ]
                needed = -math.log(float(proof["delta"]))
                assert any(gate.log_e_value >= needed - 1e-9 for gate in gates), "a certificate that nothing proved"

    def forgiven(self, decision: Decision) -> bool:
        assert decision.new_rollout is not None
        status = decision.config_statuses.get(decision.new_rollout.to_config)
        return status is not None and status.rejected_until_at is None

    @rule(writes=st.integers(0, WRITES) | st.just(1000))
    def a_pass(self, writes: int) -> None:
        self.one_pass(self.read(), writes=writes)

    @rule(times=st.integers(2, 6))
    def passes_in_a_row(self, times: int) -> None:
        for _ in range(times):
            self.one_pass(self.read())
            self.now += 1

    @rule(kind=st.sampled_from("abc"))
    def things_go_well_until_the_end(self, kind: str) -> None:
        self.things_go_well_for_a_while(kind, 15)

    @rule(kind=st.sampled_from("abc"), passes=st.integers(3, 12))
    def things_go_well_for_a_while(self, kind: str, passes: int) -> None:
        """Random steps alone rarely get a plan as far as stable; most of what can go wrong begins after that."""
        self.delivers = True
        for worker in self.workers:
            worker.ready, worker.refuses, worker.lies = True, False, False
        for _ in range(passes):
            self.one_pass(self.read())
            self.a_tuning_ends_with(kind, over=False)
            self.traffic_of(20_000, wrong=0.001, slow=0.1, failing=0.0)
            self.now += 1

    @rule()
    def an_operator_reads(self) -> None:
        self.stale = self.read()

    @precondition(lambda self: self.stale is not None)
    @rule()
    def and_acts_late(self) -> None:
        assert self.stale is not None
        if self.stale.snapshot.service.uid == self.service.uid:
            self.one_pass(self.stale)
        self.stale = None

    @rule(skew=st.sampled_from([-600.0, 0.0, 600.0]))
    def another_operator_takes_over(self, skew: float) -> None:
        self.skew = skew
        self.watched_since = self.clock
        self.request = self.outcome = self.watch = None

    # --- the world ---------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 11.0, 130.0, 1000.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        batches=st.sampled_from([20, 400, 20_000]),
        wrong=st.sampled_from([0.001, 0.001, 0.3]),
        slow=st.sampled_from([0.1, 0.1, 0.9]),
        failing=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def traffic(self, batches: int, wrong: float, slow: float, failing: float) -> None:
        self.traffic_of(batches, wrong=wrong, slow=slow, failing=failing)

    def traffic_of(self, batches: int, *, wrong: float, slow: float, failing: float) -> None:
        for worker in self.workers:
            worker.serve(batches, wrong=wrong, slow=slow, failing=failing)

    @rule(
        kind=st.sampled_from(["a", "b", "c", "nothing saves", "not better", "over budget", "labels"]),
        over=st.booleans(),
    )
    def a_tuning_ends(self, kind: str, over: bool) -> None:
        self.a_tuning_ends_with(kind, over=over)

    def a_tuning_ends_with(self, kind: str, *, over: bool) -> None:
        request = self.request
        if request is None or self.outcome is not None:
            return
        if kind in "abc":
            ramp = RampThreshold(RAMPS[1], Decimal(THRESHOLDS["abc".index(kind)]))
            plan = Plan(BACKBONE, RAMP_SET, (ramp,), "fp32", request.execution)
            certificate = Certificate(
                "rank-path",
                plan.content_hash,
                request.max_disagreement,
                request.delta,
                request.test_index,
                request.delta / 2,
                500,
                1,
                0.001,
                BACKBONE,
                RAMP_SET,
                "sha256:" + "c" * 64,
                records_through=self.now,
            )
            self.outcome = Proposed(
                plan, certificate, Predicted(0.3, 0.005, {}), self.now, 500, current_over_budget=over
            )
        elif kind == "labels":
            self.outcome = NeedsLabels(600, 700, current_over_budget=over)
        else:
            reason = {"nothing saves": "NothingSaves", "not better": "NotBetter", "over budget": "OverBudget"}[kind]
            self.outcome = NoGain(reason, 0.0, 600, 1, self.now, over, current_allowed=not over)  # type: ignore[arg-type]

    @rule(
        which=st.integers(0, 1),
        what=st.sampled_from(["restart", "away", "back", "breaker", "lapse", "refuse", "relent", "lie", "take"]),
    )
    def a_worker(self, which: int, what: str) -> None:
        worker = self.workers[which]
        if what == "restart":
            worker.restart()
        elif what in ("away", "back"):
            worker.ready = what == "back"
        elif what == "breaker":
            worker.breaker_open = worker.document is not None and bool(worker.document.stable.plan["ramps"])
        elif what == "lapse":
            worker.lapsed = worker.document is not None and worker.document.canary is not None
        elif what in ("refuse", "relent"):
            worker.refuses = what == "refuse"
        elif what == "lie":
            worker.lies = True
        elif self.published is not None:
            worker.take(self.published)

    @rule(delivers=st.booleans())
    def pokes_are_lost_or_not(self, delivers: bool) -> None:
        self.delivers = delivers

    @rule(older=st.booleans())
    def the_plan_document_is_lost_or_an_older_one_is_put_back(self, older: bool) -> None:
        self.published = self.older[-1] if older and self.older else None
        self.versions["plan"] = self.versions.get("plan", 0) + 1

    # --- people ------------------------------------------------------------------------------------

    @rule(mode=st.sampled_from(["Auto", "Auto", "Recommend", "Disabled", *PINS]))
    def mode(self, mode: str) -> None:
        self.edit(ramps=PINS.get(mode, {"mode": mode}))

    @rule(budget=st.sampled_from(["0.01", "0.02", "0.05"]), confidence=st.sampled_from(["0.95", "0.99"]))
    def budget(self, budget: str, confidence: str) -> None:
        objective = {
            "latency": {"threshold": "100ms"},
            "accuracy": {"maxDisagreement": budget, "confidence": confidence},
        }
        self.edit(objective=objective)

    @rule(
        policy=st.fixed_dictionaries(
            {},
            optional={
                "steps": st.sampled_from(STEPS),
                "promotion": st.sampled_from(["Manual", "Automatic"]),
                "onInconclusive": st.sampled_from(["Hold", "Abort"]),
                "rollbackWindow": st.integers(0, 3),
                "historyLimit": st.integers(1, 3),
                "cooldown": st.sampled_from(["0s", "10m"]),
            },
        )
    )
    def policy(self, policy: dict[str, Any]) -> None:
        self.edit(rollout={**self.manifest["rollout"], **policy})

    @rule(
        change=st.sampled_from(
            [{"suspend": True}, {"suspend": False}, {"execution": "ResultsOnly"}, {"execution": "Auto"}]
        )
    )
    def other(self, change: dict[str, Any]) -> None:
        self.edit(**change)

    def edit(self, **changes: Any) -> None:
        self.manifest = {**self.manifest, **changes}
        self.service = replace(self.service, generation=self.service.generation + 1, spec=parse_spec(self.manifest))
        self.versions["service"] = self.versions.get("service", 0) + 1

    @rule(what=st.sampled_from(["pause", "resume", "Promote", "Abort"]))
    def a_person_at_the_rollout(self, what: str) -> None:
        rollout = next((r for r in self.rollouts.values() if not r.status.finished), None)
        if rollout is None or (what == "Promote" and rollout.decision == "Abort"):
            return
        change = {"paused": what == "pause"} if what in ("pause", "resume") else {"decision": what}
        self.rollouts[rollout.name] = replace(rollout, **change)  # type: ignore[arg-type]
        self.versions[rollout.name] = self.versions.get(rollout.name, 0) + 1

    @rule()
    def delete_and_recreate(self) -> None:
        self.create()

    # --- what always holds -------------------------------------------------------------------------

    @invariant()
    def one_rollout_at_most_is_under_way(self) -> None:
        under_way = [r for r in self.rollouts.values() if not r.status.finished and r.status.phase != "Pending"]
        assert len(under_way) <= 1

    @rule()
    def it_comes_to_rest_and_then_writes_nothing(self) -> None:
        self.delivers = True
        for worker in self.workers:
            worker.ready = True
        for _ in range(25):
            decision = self.one_pass(self.read())
            read = self.read()
            again = decide(read.snapshot, self.clock)
            if not _writes(read.snapshot, again):
                unfinished = [r.name for r in self.rollouts.values() if not r.status.finished]
                assert len(unfinished) <= 1
                return
        raise AssertionError(f"still writing after 25 passes: {decision}")


def _writes(seen: Snapshot, decision: Decision) -> bool:
    return bool(
        decision.status != seen.service.status
        or decision.new_configs
        or decision.config_statuses
        or decision.new_rollout is not None
        or decision.rollout_statuses
        or decision.delete_configs
        or decision.delete_rollouts
        or decision.publish is not None
        or decision.events
    )


def kept(status: S) -> S:
    """A status as the next operator reads it: through JSON, with nothing lost on the way."""
    back = from_json(type(status), to_json(status))
    assert to_json(back) == to_json(status)
    return back


@pytest.mark.slow
class TestControlLoop(ControlLoop.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
