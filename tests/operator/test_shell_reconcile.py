"""One pass: the order of what is done, what is written, what survives a conflict or a crash."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    Phase,
    Rollout,
    RolloutStatus,
    Service,
    ServiceStatus,
    TuningStatus,
)
from offramp_core.control.snapshot import Decision, Event, Gathered, NewConfig, NewRollout, Snapshot, WorkerEndpoint
from offramp_core.control.spec import parse_spec
from offramp_core.control.stable.watch import Watch
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, ArmPlan, PlanDocument, Refusal, SignedDocument
from offramp_core.reasons import Reason
from offramp_core.records import Records
from offramp_core.tuning import NoGain, TuningOutcome, TuningRequest

sys.path.insert(0, str(Path(__file__).parent))
from stub_worker import DIGEST_A, DIGEST_B, StubWorker

from offramp_operator.shell import observe
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ConflictError, ServiceKey, WorkerIdentity
from offramp_operator.shell.reconcile import REFUSED_POKE_SECONDS, Reconciler
from offramp_operator.shell.signing import SigningKey

KEY = ServiceKey("default", "digits")
SIGNER = SigningKey(bytes(range(32)))
SPEC = parse_spec(
    {
        "model": {"uri": "file:///bundle"},
        "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    }
)
PLAN = Plan(DIGEST_A, DIGEST_B)
REQUEST = TuningRequest(
    max_disagreement=0.02,
    delta=0.05,
    test_index=1,
    max_overhead=0.05,
    max_ramps=3,
    ramp_ids=("r00-linear", "r01-linear"),
    backbone_digest=DIGEST_A,
    ramp_set_digest=DIGEST_B,
    execution="Auto",
    current=PLAN,
)


def document(epoch: int) -> PlanDocument:
    return PlanDocument("digits", "service-1", epoch, ArmPlan(PLAN.to_mapping(), 1.0), None, 0, "s", 0.02)


class MemoryPlatform:
    """A platform in memory that remembers what was done, in order. ``conflict_at`` makes one call lose a race."""

    def __init__(self, *workers: StubWorker) -> None:
        self.service: Service | None = Service("default", "digits", "service-1", 1, SPEC)
        self.configs: dict[str, Config] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.workers = list(workers)
        self.published: PlanDocument | None = None
        self.signed: SignedDocument | None = None
        self.calls: list[str] = []
        self.conflict_at = ""
        self.broken_at = ""
        self.identity: WorkerIdentity | None = None
        self.changed = 0
        self.tells_changes = False
        self.gathers = 0

    def changes(self, key: ServiceKey) -> int:
        self.changed += not self.tells_changes
        return self.changed

    def _call(self, what: str) -> None:
        self.calls.append(what)
        self.changed += what != "workers" and not what.startswith("event")
        if self.conflict_at and what.startswith(self.conflict_at):
            self.conflict_at = ""
            raise ConflictError("somebody was faster")
        if self.broken_at and what.startswith(self.broken_at):
            raise RuntimeError("the platform is broken")

    async def gather(self, key: ServiceKey) -> Gathered | None:
        self.gathers += 1
        if self.service is None:
            return None
        endpoints = tuple(WorkerEndpoint(w.state.uid, w.state.uid, ready=True, admin_url=w.url) for w in self.workers)
        return Gathered(self.service, dict(self.configs), tuple(self.rollouts.values()), endpoints, self.published)

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        self._call("workers")
        self.identity = identity

    async def create_config(self, service: Service, config: NewConfig) -> None:
        self._call(f"create-config {config.name}")
        self.configs[config.name] = Config(config.name, config.plan, config.status)

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None:
        self._call(f"config-status {name}")
        self.configs[name] = replace(self.configs[name], status=status)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        self._call(f"create-rollout {rollout.name}")
        self.rollouts[rollout.name] = Rollout(
            rollout.name, rollout.from_config, rollout.to_config, rollout.cause, rollout.generation
        )

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None:
        self._call(f"rollout-status {name}")
        self.rollouts[name] = replace(self.rollouts[name], status=status)

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None:
        self._call("service-status")
        self.service = replace(service, status=status)

    async def delete_config(self, service: Service, name: str) -> None:
        self._call(f"delete-config {name}")
        self.configs.pop(name, None)

    async def delete_rollout(self, service: Service, name: str) -> None:
        self._call(f"delete-rollout {name}")
        self.rollouts.pop(name, None)

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        self._call(f"publish {document.epoch}")
        assert (self.published.epoch if self.published else 0) == previous_epoch
        self.published, self.signed = document, signed

    async def emit(self, service: Service, event: Event) -> None:
        self._call(f"event {event.reason}")

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return [call for call in calls if call != "workers"]


class Script:
    """A decide that a test writes; keeps the snapshots it was given."""

    def __init__(self, answer: Callable[[Snapshot], Decision]) -> None:
        self.answer = answer
        self.seen: list[Snapshot] = []

    def __call__(self, snapshot: Snapshot, now: float) -> Decision:
        self.seen.append(snapshot)
        return self.answer(snapshot)


def nothing(snapshot: Snapshot) -> Decision:
    return Decision(status=snapshot.service.status)


def records_of(snapshot: Snapshot) -> Records:
    assert snapshot.observed.records is not None
    return snapshot.observed.records.records


def without_pulled(snapshot: Snapshot) -> Snapshot:
    """Without what workers gave, and without when this process began to look."""
    return replace(snapshot, observed=replace(snapshot.observed, workers=(), records=None), watched_since=0.0)


def no_tuning(records: Records, request: TuningRequest) -> TuningOutcome:
    raise AssertionError("nothing was to be tuned")


@asynccontextmanager
async def reconciler(platform: MemoryPlatform, decide: Script, **arguments: Any) -> AsyncIterator[Reconciler]:
    observer = Observer(deadline_seconds=20.0)
    try:
        yield Reconciler(platform, observer, SIGNER, **{"tune": no_tuning, **arguments}, decide=decide)
    finally:
        await observer.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 200))


@pytest.fixture
def worker() -> Any:
    stub = StubWorker("w1", token=SIGNER.admin_token("service-1"))
    yield stub
    stub.close()


EVERYTHING = Decision(
    status=ServiceStatus(phase="Ready"),
    new_configs=(NewConfig("digits-new", PLAN, ConfigStatus()),),
    config_statuses={"digits-old": ConfigStatus(state="Superseded")},
    new_rollout=NewRollout("digits-2", "digits-old", "digits-new", "Tuned", 1),
    rollout_statuses={"digits-1": RolloutStatus(phase="Succeeded"), "digits-2": RolloutStatus(phase="Progressing")},
    delete_configs=("digits-older",),
    delete_rollouts=("digits-0",),
    publish=document(2),
    events=(Event("RampProposed", "x"),),
)


def test_a_decision_is_carried_out_in_the_order_that_persists_evidence_before_acting_on_it(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.configs = {n: Config(n, PLAN) for n in ("digits-old", "digits-older")}
        platform.rollouts = {n: Rollout(n, "a", "b", "Tuned", 1) for n in ("digits-0", "digits-1")}
        platform.published = document(1)
        async with reconciler(platform, Script(lambda _: EVERYTHING)) as made:
            await made.reconcile(KEY)
        assert platform.taken() == [
            "create-config digits-new",
            "config-status digits-old",
            "create-rollout digits-2",
            "rollout-status digits-1",
            "rollout-status digits-2",
            "service-status",
            "delete-rollout digits-0",
            "delete-config digits-older",
            "publish 2",
            "event RampProposed",
        ]
        assert worker.taken == [document(2)], "workers are poked after the document is stored"

    run(story())


@pytest.mark.parametrize(("phase", "kept"), [("Progressing", 400), ("Pending", 100)])
def test_the_canary_of_a_plan_without_a_certificate_has_all_its_records_kept(
    worker: StubWorker, phase: Phase, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "rows_each", lambda *_, **__: 100)
    pinned = replace(PLAN, ramps=(RampThreshold("r00-linear", Decimal("0.2")),))

    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        assert platform.service is not None
        idle = ServiceStatus(tuning=TuningStatus(Reason.IDLE))
        platform.service, worker.rows = replace(platform.service, status=idle), 400
        platform.configs = {"b": Config("b", pinned)}
        platform.rollouts = {"r": Rollout("r", "a", "b", "Pinned", 1, status=RolloutStatus(phase))}
        async with reconciler(platform, script) as made:
            await made.reconcile(KEY)
        assert len(records_of(script.seen[-1])) == kept

    run(story())


def with_canary(epoch: int, weight: int = 20) -> PlanDocument:
    arm = ArmPlan(PLAN.to_mapping(), 1.0)
    return PlanDocument("digits", "service-1", epoch, arm, arm, weight, "digits-1/0/0", 0.02)


def test_what_only_takes_away_is_delivered_before_anything_is_stored(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.published, platform.broken_at = with_canary(1), "service-status"
        decision = Decision(status=ServiceStatus(phase="Ready"), publish=document(2))
        async with reconciler(platform, Script(lambda _: decision)) as made:
            with pytest.raises(RuntimeError, match="broken"):
                await made.reconcile(KEY)
        assert platform.calls == ["publish 2", "workers", "service-status"]
        assert worker.taken == [document(2)]

    run(story())


def test_what_gives_more_is_not_delivered_before_all_is_stored(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.published, platform.broken_at = document(1), "service-status"
        decision = Decision(status=ServiceStatus(phase="Ready"), publish=with_canary(2))
        async with reconciler(platform, Script(lambda _: decision)) as made:
            with pytest.raises(RuntimeError, match="broken"):
                await made.reconcile(KEY)
        assert worker.taken == [] and platform.published == document(1)

    run(story())


def test_workers_that_missed_a_document_are_poked_although_nothing_can_be_stored(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.published, platform.broken_at = document(2), "service-status"
        async with reconciler(platform, Script(lambda _: Decision(status=ServiceStatus(phase="Ready")))) as made:
            with pytest.raises(RuntimeError, match="broken"):
                await made.reconcile(KEY)
        assert worker.taken == [document(2)]

    run(story())


def test_workers_are_brought_to_the_spec_although_no_decision_comes_about(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)

        def broken(_: Snapshot) -> Decision:
            raise RuntimeError("the decision is broken")

        async with reconciler(platform, Script(broken)) as made:
            with pytest.raises(RuntimeError, match="the decision is broken"):
                await made.reconcile(KEY)
        assert platform.calls == ["workers"]

    run(story())


@pytest.mark.parametrize("trouble", ["broken", "conflict"])
def test_only_after_a_pass_that_could_act_does_a_pull_renew_the_workers_leases(
    trouble: str, worker: StubWorker
) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        phases = iter(("One", "Two", "Three", "Four", "Five"))

        async def renews(made: Reconciler) -> bool:
            worker.asked.clear()
            with contextlib.suppress(RuntimeError):
                await made.reconcile(KEY)
            (pull,) = (asked for asked in worker.asked if "/v1/observations" in asked)
            return "renew=0" not in pull

        told = Script(lambda _: Decision(status=ServiceStatus(phase=next(phases))))
        async with reconciler(platform, told) as made:
            assert not await renews(made), "nobody knows yet what this process can do"
            assert await renews(made)
            setattr(platform, f"{trouble}_at", "service-status")
            assert await renews(made), "the pull comes before the write that fails"
            platform.broken_at = ""
            assert not await renews(made)
            assert await renews(made)

    run(story())


def test_what_is_already_so_is_not_written(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.configs = {n: Config(n, PLAN) for n in ("digits-old", "digits-older")}
        platform.rollouts = {n: Rollout(n, "a", "b", "Tuned", 1) for n in ("digits-0", "digits-1")}
        platform.published = document(1)
        done = replace(EVERYTHING, delete_configs=(), delete_rollouts=(), events=())
        async with reconciler(platform, Script(lambda _: done)) as made:
            await made.reconcile(KEY)
            platform.taken()
            await made.reconcile(KEY)
        assert platform.taken() == []

    run(story())


def test_the_snapshot_holds_what_platform_and_workers_say(worker: StubWorker) -> None:
    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        worker.rows = 5
        platform.configs, platform.published = {"c": Config("c", PLAN)}, document(7)
        worker.state = replace(worker.state, epoch=7)
        async with reconciler(platform, script) as made:
            await made.reconcile(KEY)
        seen = script.seen[0]
        assert seen.service == platform.service
        assert (set(seen.gathered.configs), seen.gathered.published) == ({"c"}, document(7))
        assert seen.workers[0].state == worker.state
        assert len(records_of(seen)) == 5
        assert platform.identity == SIGNER.identity("service-1")
        assert worker.taken == [], "a worker that has the epoch is left in peace"

    run(story())


@pytest.mark.parametrize("where", ["workers", "create-config", "rollout-status", "service-status", "publish"])
def test_a_conflict_abandons_the_pass_and_the_next_one_reads_anew(worker: StubWorker, where: str) -> None:
    async def story() -> None:
        def next_document(snapshot: Snapshot) -> Decision:
            published = snapshot.gathered.published
            return replace(EVERYTHING, publish=document((published.epoch if published else 0) + 1))

        platform, script = MemoryPlatform(worker), Script(next_document)
        platform.configs = {n: Config(n, PLAN) for n in ("digits-old", "digits-older")}
        platform.rollouts = {n: Rollout(n, "a", "b", "Tuned", 1) for n in ("digits-0", "digits-1")}
        platform.conflict_at = where
        async with reconciler(platform, script) as made:
            wait = await made.reconcile(KEY)
            assert wait is not None and wait < 1.0
            assert platform.calls[-1].startswith(where), "nothing is done after the conflict"
            assert platform.published is None
            assert worker.taken == []
            await made.reconcile(KEY)
        assert platform.published == document(1)

    run(story())


def test_what_the_fleets_detector_has_seen_is_kept_from_pass_to_pass_also_over_a_conflict(worker: StubWorker) -> None:
    async def story() -> None:
        watches = [Watch(plan_hash=name) for name in "abc"]
        platform, passes = MemoryPlatform(worker), iter(watches)
        script = Script(lambda _: replace(EVERYTHING, watch=next(passes)))
        platform.configs = {n: Config(n, PLAN) for n in ("digits-old", "digits-older")}
        platform.rollouts = {n: Rollout(n, "a", "b", "Tuned", 1) for n in ("digits-0", "digits-1")}
        platform.conflict_at = "service-status"
        async with reconciler(platform, script) as made:
            await made.reconcile(KEY)
            await made.reconcile(KEY)
            made.forget(KEY)
            await made.reconcile(KEY)
        assert [seen.watch for seen in script.seen] == [None, watches[0], None]

    run(story())


def test_the_published_document_is_signed_for_this_service(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        async with reconciler(platform, Script(lambda s: replace(nothing(s), publish=document(1)))) as made:
            await made.reconcile(KEY)
        assert platform.signed == SIGNER.sign(document(1))

    run(story())


def test_a_worker_that_missed_a_poke_is_poked_again_but_one_that_refused_is_not(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.published = document(5)
        async with reconciler(platform, Script(nothing)) as made:
            await made.reconcile(KEY)
            assert worker.taken == [document(5)]
            await made.reconcile(KEY)
            assert worker.taken == [document(5)]
            worker.state = replace(worker.state, epoch=4, refused=Refusal(5, "UnknownRamp", "r77"))
            asked = len([a for a in worker.asked if a.startswith("POST")])
            await made.reconcile(KEY)
            assert len([a for a in worker.asked if a.startswith("POST")]) == asked

    run(story())


def test_a_worker_that_could_not_read_its_ramp_set_is_asked_again_now_and_then(worker: StubWorker) -> None:
    async def story() -> None:
        platform, now = MemoryPlatform(worker), [1000.0]
        platform.published = document(5)
        worker.refuse = Refusal(5, "RampSetNotHeld", "ramps.safetensors: cannot be read")
        worker.state = replace(worker.state, epoch=4, refused=worker.refuse)

        def pokes() -> int:
            return len([a for a in worker.asked if a.startswith("POST")])

        async with reconciler(platform, Script(nothing), clock=lambda: now[0]) as made:
            await made.reconcile(KEY)
            assert pokes() == 1, "an operator that has just started does not know when it was asked last"
            for _ in range(3):
                now[0] += REFUSED_POKE_SECONDS / 4
                await made.reconcile(KEY)
            assert pokes() == 1
            now[0] += REFUSED_POKE_SECONDS / 4
            await made.reconcile(KEY)
            assert pokes() == 2
            worker.refuse = None
            now[0] += REFUSED_POKE_SECONDS
            await made.reconcile(KEY)
        assert worker.taken == [document(5)]

    run(story())


def test_a_new_plan_is_not_poked_twice_at_once_when_it_is_refused(worker: StubWorker) -> None:
    async def story() -> None:
        platform, now = MemoryPlatform(worker), [1000.0]
        worker.refuse = Refusal(1, "RampSetNotHeld", "ramps.safetensors: cannot be read")
        script = Script(lambda s: replace(nothing(s), publish=document(1)))
        async with reconciler(platform, script, clock=lambda: now[0]) as made:
            for _ in range(3):
                await made.reconcile(KEY)
                now[0] += 1.0
        assert len([a for a in worker.asked if a.startswith("POST")]) == 1

    run(story())


def test_workers_that_cannot_be_changed_do_not_stop_the_watch_over_those_that_serve(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.broken_at = "workers"
        script = Script(lambda s: replace(nothing(s), status=ServiceStatus(phase="Ready"), requeue_after_seconds=30.0))
        async with reconciler(platform, script) as made:
            wait = await made.reconcile(KEY)
        assert platform.taken() == ["service-status"]
        assert wait is not None and wait <= 1.0, "it is tried again soon"

    run(story())


def test_a_service_that_is_gone_is_forgotten(worker: StubWorker) -> None:
    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        async with reconciler(platform, script) as made:
            worker.rows = 5
            await made.reconcile(KEY)
            platform.service = None
            assert await made.reconcile(KEY) is None
            assert len(script.seen) == 1

    run(story())


def test_a_service_that_was_made_again_inherits_no_labels_of_the_one_before_it(worker: StubWorker) -> None:
    """Even where no pass fell between the two, so that none saw it gone."""

    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        async with reconciler(platform, script) as made:
            worker.rows = 5
            await made.reconcile(KEY)
            assert platform.service is not None
            platform.service = replace(platform.service, uid="service-2")
            worker.token = SIGNER.admin_token("service-2")
            worker.restart("boot-of-the-next")
            worker.rows = 2
            await made.reconcile(KEY)
        assert [len(records_of(seen)) for seen in script.seen] == [5, 2]

    run(story())


def test_passes_follow_each_other_within_a_second_while_a_rollout_is_active(worker: StubWorker) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        async with reconciler(platform, Script(nothing)) as made:
            assert await made.reconcile(KEY) == 30.0
            platform.rollouts["r"] = Rollout("r", "a", "b", "Tuned", 1, status=RolloutStatus(phase="Paused"))
            assert await made.reconcile(KEY) == 1.0
            platform.rollouts["r"] = Rollout("r", "a", "b", "Tuned", 1, status=RolloutStatus(phase="Aborted"))
            assert await made.reconcile(KEY) == 30.0

    run(story())


# --- tuning ----------------------------------------------------------------------------------------


class Tuner:
    """Holds a tuning until the test lets it end."""

    def __init__(self, outcome: TuningOutcome | Exception) -> None:
        self.outcome = outcome
        self.calls: list[tuple[int, TuningRequest]] = []
        self.go = threading.Event()

    def __call__(self, records: Records, request: TuningRequest) -> TuningOutcome:
        self.calls.append((len(records), request))
        assert self.go.wait(120)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


OUTCOME = NoGain(reason="NotBetter", best_saving=0.0, n=5, tests_run=1, records_through=1004.0)


def tuning_script() -> Script:
    """Asks for a tuning whenever none runs, and counts each outcome it is shown into the status."""

    def answer(snapshot: Snapshot) -> Decision:
        status = snapshot.service.status
        if snapshot.tuning_outcome is not None:
            status = replace(status, tuning=TuningStatus(state="Idle", tests_run=status.tuning.tests_run + 1))
            return Decision(status=status)
        if status.tuning.tests_run:
            return Decision(status=status)
        return Decision(status=replace(status, tuning=TuningStatus(state="Tuning")), tune=REQUEST)

    return Script(answer)


async def until(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)


async def passes_until(made: Reconciler, condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await made.reconcile(KEY)
        await asyncio.sleep(0.01)


def test_a_tuning_runs_beside_the_passes_and_its_outcome_is_shown_once(worker: StubWorker) -> None:
    async def story() -> None:
        platform, script, tuner = MemoryPlatform(worker), tuning_script(), Tuner(OUTCOME)
        worker.rows = 5
        async with reconciler(platform, script, tune=tuner) as made:
            assert await made.reconcile(KEY) == 1.0
            await until(lambda: bool(tuner.calls), what="the start of the tuning")
            for _ in range(3):
                assert await made.reconcile(KEY) == 1.0
            assert tuner.calls == [(5, REQUEST)], "a request while one runs is dropped"
            assert [s.tuning_running for s in script.seen] == [False, True, True, True]
            tuner.go.set()
            await passes_until(made, lambda: script.seen[-1].tuning_outcome is not None, what="the outcome")
            for _ in range(3):
                await made.reconcile(KEY)
        assert [s.tuning_outcome for s in script.seen if s.tuning_outcome is not None] == [OUTCOME]
        assert platform.service is not None and platform.service.status.tuning.tests_run == 1

    run(story())


def test_an_outcome_whose_pass_was_abandoned_is_shown_again_so_that_no_test_goes_uncounted(worker: StubWorker) -> None:
    async def story() -> None:
        platform, script, tuner = MemoryPlatform(worker), tuning_script(), Tuner(OUTCOME)
        worker.rows = 5
        tuner.go.set()
        async with reconciler(platform, script, tune=tuner) as made:
            await made.reconcile(KEY)
            platform.conflict_at = "service-status"
            await passes_until(made, lambda: not platform.conflict_at, what="the conflict")
            assert platform.service is not None and platform.service.status.tuning.tests_run == 0
            await made.reconcile(KEY)
            await made.reconcile(KEY)
        assert platform.service.status.tuning.tests_run == 1
        assert len([s for s in script.seen if s.tuning_outcome is not None]) == 2

    run(story())


def test_a_decision_that_could_not_look_at_the_outcome_gets_it_again(worker: StubWorker) -> None:
    async def story() -> None:
        platform, tuner = MemoryPlatform(worker), Tuner(OUTCOME)
        looking = tuning_script()
        blind = False
        script = Script(lambda s: Decision(status=s.service.status) if blind else looking.answer(s))
        worker.rows = 5
        tuner.go.set()
        async with reconciler(platform, script, tune=tuner) as made:
            await made.reconcile(KEY)
            blind = True
            await passes_until(made, lambda: script.seen[-1].tuning_outcome is not None, what="the outcome")
            blind = False
            await made.reconcile(KEY)
            await made.reconcile(KEY)
        assert platform.service is not None and platform.service.status.tuning.tests_run == 1

    run(story())


def test_a_tuner_that_crashes_is_not_asked_again_at_once(worker: StubWorker) -> None:
    async def story() -> None:
        now = 1000.0
        platform, script, tuner = MemoryPlatform(worker), tuning_script(), Tuner(ValueError("broken"))
        worker.rows = 5
        tuner.go.set()
        async with reconciler(platform, script, tune=tuner, clock=lambda: now) as made:
            await made.reconcile(KEY)
            await passes_until(
                made, lambda: len(script.seen) > 1 and not script.seen[-1].tuning_running, what="the crash"
            )
            for _ in range(3):
                await made.reconcile(KEY)
            assert len(tuner.calls) == 1
            now += 61.0
            await made.reconcile(KEY)
            await until(lambda: len(tuner.calls) == 2, what="the next attempt")

    run(story())


def test_a_restarted_reconciler_decides_on_the_same_facts(worker: StubWorker) -> None:
    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        worker.rows = 5
        platform.rollouts["r"] = Rollout("r", "a", "b", "Tuned", 1, status=RolloutStatus(phase="Progressing", weight=5))
        for _ in range(2):
            async with reconciler(platform, script) as made:
                await made.reconcile(KEY)
        first, second = script.seen
        assert without_pulled(first) == without_pulled(second)
        assert first.watched_since < second.watched_since  # it cannot have seen what came before it
        assert first.workers[0].state == second.workers[0].state
        assert len(records_of(first)) == len(records_of(second)) == 5

    run(story())


# --- idle services ---------------------------------------------------------------------------------


def test_a_service_where_nothing_happens_is_looked_at_more_seldom_and_decided_on_when_something_does(
    worker: Any,
) -> None:
    async def story() -> None:
        platform, script = MemoryPlatform(worker), Script(nothing)
        platform.tells_changes = True
        async with reconciler(platform, script) as made:
            first = await made.reconcile(KEY)
            waits = [await made.reconcile(KEY) for _ in range(3)]
            assert len(script.seen) == 1 and platform.gathers == 1, "nothing has changed since"
            assert first is not None and waits == sorted(waits) and waits[-1] == 30.0
            worker.counts = (ArmCounts(0, "stable", "", requests=5),)
            await made.reconcile(KEY)
            assert len(script.seen) == 2 and script.seen[-1].workers[0].observations.counts[0].requests == 5  # type: ignore[union-attr]
            await made.reconcile(KEY)
            platform.changed += 1
            await made.reconcile(KEY)
            assert len(script.seen) == 3 and platform.gathers == 3

    run(story())


def test_time_alone_brings_a_decision_too(worker: Any) -> None:
    async def story() -> None:
        now = [1_000.0]
        platform, script = MemoryPlatform(worker), Script(nothing)
        platform.tells_changes = True
        async with reconciler(platform, script, clock=lambda: now[0]) as made:
            await made.reconcile(KEY)
            now[0] += 119.0
            await made.reconcile(KEY)
            assert len(script.seen) == 1
            now[0] += 2.0
            await made.reconcile(KEY)
            assert len(script.seen) == 2

    run(story())


@pytest.mark.parametrize(("services", "seconds"), [(500, 120.0), (2_000, 400.0), (100_000, 600.0)])
def test_in_a_large_fleet_time_alone_brings_decisions_more_seldom_but_it_does(
    worker: Any, services: int, seconds: float
) -> None:
    async def story() -> None:
        now = [1_000.0]
        platform, script = MemoryPlatform(worker), Script(nothing)
        platform.tells_changes = True
        async with reconciler(platform, script, clock=lambda: now[0]) as made:
            made._watched_since.update({ServiceKey("others", str(n)): 0.0 for n in range(services - 1)})
            await made.reconcile(KEY)
            now[0] += seconds - 1.0
            await made.reconcile(KEY)
            assert len(script.seen) == 1
            now[0] += 2.0
            await made.reconcile(KEY)
            assert len(script.seen) == 2

    run(story())


@pytest.mark.parametrize("what", ["a rollout", "an event"])
def test_a_service_with_something_to_do_is_never_idle(worker: Any, what: str) -> None:
    async def story() -> None:
        platform = MemoryPlatform(worker)
        platform.tells_changes = True
        event = (Event("Told", "again"),) if what == "an event" else ()
        script = Script(lambda snapshot: replace(nothing(snapshot), events=event))
        if what == "a rollout":
            platform.rollouts["r"] = Rollout("r", "a", "b", "Tuned", 1, status=RolloutStatus(phase="Paused"))
        async with reconciler(platform, script) as made:
            for _ in range(3):
                await made.reconcile(KEY)
            assert len(script.seen) == 3

    run(story())
