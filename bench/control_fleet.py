"""A simulated fleet under the real control loop: every pull is a pass of :func:`offramp_core.control.decide.decide`.

Workers draw batches by the worker's own hash, count in the worker's own counters, watch with its own breaker, audit
every request with the published rate, answer audits a little later, take new documents after a delay, and are sometimes
not reached by a pull.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.control_shell import MemoryShell
from bench.control_world import MAX_BATCH, RAMP_SET, Floats, Ints, Served, Stretch, Traffic, World
from offramp_core.control.decide import decide
from offramp_core.control.objects import Config, ConfigStatus, Rollout, Service, ServiceStatus
from offramp_core.control.snapshot import (
    Decision,
    Gathered,
    Load,
    Observed,
    RecordStore,
    Snapshot,
    Worker,
    WorkerEndpoint,
)
from offramp_core.control.spec import ServiceSpec, parse_spec
from offramp_core.plan import Plan
from offramp_core.protocol import Arm as ArmName
from offramp_core.protocol import ArmCounts, ArmPlan, Observations, PlanDocument, RecordBlock
from offramp_core.sketch import bucket_index
from offramp_core.tuning import TuningOutcome
from offramp_worker.engine.accounts.counters import KEPT_EPOCHS, ArmCounter
from offramp_worker.engine.arms.arms import canary_drawn
from offramp_worker.engine.arms.breaker import Breaker

PULL_SECONDS = 1.0  # between two passes while a rollout is under way
QUIET_PULL_SECONDS = 10.0
AUDIT_SECONDS = 0.2  # from a reply to the answer of its audit, on average
LOST_POKE = 0.1  # of pokes come late or never; the shell pokes again after the next pull
LOST_PULL = 0.005
FAILING = 0.001  # share of batches that fail, in both arms alike

MANIFEST: dict[str, Any] = {
    "model": {"uri": "file:///model"},
    "objective": {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.01"}},
    "replicas": 4,
}


def service_of(manifest: Mapping[str, Any], *, stable: str = "") -> Service:
    """A service that serves the plan ``stable`` already (empty: none yet)."""
    spec: ServiceSpec = parse_spec(manifest)
    return Service("default", "sim", "uid", 1, spec, ServiceStatus(stable_config=stable))


@dataclass(slots=True)
class Arm:
    """One arm of one document, ready to count."""

    served: Served
    counter: ArmCounter
    audit_rate: float
    slow_above: Floats  # [MAX_BATCH + 1] seconds by size; NaN where a size is not judged
    slowdown: float = 1.0
    breaker: Breaker | None = None

    def count(self, size: Ints, seconds: Floats, failed: npt.NDArray[np.bool_], leaves: Ints, drawn: Ints) -> None:
        """Batches that ended, as the worker's engine counts them one by one; a failed one is neither timed nor
        answered."""
        counter = self.counter
        counter.batches += len(size)
        counter.failed_batches += int(failed.sum())
        counter.busy_seconds += float(seconds.sum())
        size, seconds, leaves, drawn = (x[~failed] for x in (size, seconds, leaves, drawn))
        limit = self.slow_above[size]
        counter.judged_batches += int(np.isfinite(limit).sum())
        counter.slow_batches += int((seconds > limit).sum())
        counter.requests += int(size.sum())
        counter.drawn += int(drawn.sum())
        for name, left in zip(self.served.exit_names, leaves.sum(axis=0).tolist(), strict=False):
            counter.exits[name] = counter.exits.get(name, 0) + left
        buckets = [bucket_index(s) for s in seconds.tolist()]
        for n, bucket in zip(size.tolist(), buckets, strict=True):
            histogram = counter.execution.setdefault(n, {})
            histogram[bucket] = histogram.get(bucket, 0) + 1
            counter.latency[bucket] = counter.latency.get(bucket, 0) + n

    def answer(self, audited: int, disagreements: int) -> None:
        """Drawn requests were compared with the reference."""
        self.counter.count_audits(audited=audited, disagreements=disagreements)
        if self.breaker is not None:
            self.breaker.update(audited=audited, disagreements=disagreements)


@dataclass(slots=True)
class Audits:
    """Audits of one batch that are still to be answered."""

    due: float
    arm: Arm
    audited: int
    disagreements: int


@dataclass
class SimWorker:
    """One worker process."""

    world: World
    uid: str
    slowdown: float  # of canary batches
    document: PlanDocument | None = None
    coming: list[tuple[float, PlanDocument]] = field(default_factory=list)
    pending: list[Audits] = field(default_factory=list)
    batches: int = 0

    def __post_init__(self) -> None:
        self.counters: list[ArmCounter] = []
        self.frozen: dict[int, tuple[tuple[int, int], ArmCounts]] = {}
        off = self.world.served(self.world.exits_off)
        self.off = Arm(off, self._open(0, "stable", off.hash), 1.0, np.full(MAX_BATCH + 1, np.nan))
        self.stable, self.canary = self.off, None
        self.seen: Worker | None = None

    stable: Arm = field(init=False)
    canary: Arm | None = field(init=False)

    def configure(self, document: PlanDocument) -> None:
        """Take a document, unless it is old."""
        if self.document is not None and document.epoch <= self.document.epoch:
            return
        limits = np.full(MAX_BATCH + 1, np.nan)
        for size, seconds in document.slow_seconds.items():
            limits[int(size)] = seconds
        breaker = self.stable.breaker if self.stable.served.plan.to_mapping() == document.stable.plan else None
        self.stable = self._arm(document.epoch, "stable", document.stable, limits)
        if not self.stable.served.plan.exits_off:
            fresh = Breaker(accuracy_budget=document.accuracy_budget, run_length=document.breaker_run_length)
            self.stable.breaker = breaker or fresh
        self.off.audit_rate, self.canary = document.stable.audit_rate, None
        if document.canary is not None:
            self.canary = self._arm(document.epoch, "canary", document.canary, limits * (1 + document.max_overhead))
            self.canary.slowdown = self.slowdown
        self.document = document

    def _arm(self, epoch: int, name: ArmName, asked: ArmPlan, limits: Floats) -> Arm:
        served = self.world.served(Plan.from_mapping(asked.plan))
        return Arm(served, self._open(epoch, name, served.hash), asked.audit_rate, limits)

    def _open(self, epoch: int, name: ArmName, plan_hash: str) -> ArmCounter:
        """A new counter; those of old epochs are forgotten, as in the worker."""
        self.counters.append(ArmCounter(epoch, name, plan_hash))
        kept = sorted({c.epoch for c in self.counters} - {0})[-KEPT_EPOCHS:]
        self.counters = [c for c in self.counters if c.epoch in (0, *kept)]
        return self.counters[-1]

    def _counts(self) -> tuple[ArmCounts, ...]:
        """All counters; one that stood still since the last pull is not frozen again."""
        for c in self.counters:
            mark = (c.batches, c.audited)
            if id(c) not in self.frozen or self.frozen[id(c)][0] != mark:
                self.frozen[id(c)] = (mark, c.freeze())
        return tuple(self.frozen[id(c)][1] for c in self.counters)

    def next_arm(self) -> Arm:
        """What the next batch runs under."""
        self.batches += 1
        document = self.document
        if document is None or self.breaker_open:
            return self.off
        if self.canary is not None and canary_drawn(
            salt=document.salt, uid=self.uid, batch_number=self.batches, weight_percent=document.weight_percent
        ):
            return self.canary
        return self.stable

    @property
    def breaker_open(self) -> bool:
        return self.stable.breaker is not None and self.stable.breaker.is_open

    def answer_audits(self, now: float) -> None:
        for audits in self.pending:
            if audits.due <= now:
                audits.arm.answer(audits.audited, audits.disagreements)
        self.pending = [audits for audits in self.pending if audits.due > now]

    def receive(self, now: float) -> None:
        """Documents that have arrived by now."""
        for due, document in self.coming:
            if due <= now:
                self.configure(document)
        self.coming = [(due, document) for due, document in self.coming if due > now]

    def report(self, now: float) -> Worker:
        document = self.document
        state = self.world.state(
            self.uid,
            document,
            stable_hash=self.stable.served.hash if document else "",
            canary_hash=self.canary.served.hash if self.canary else "",
            breaker_open=self.breaker_open,
        )
        seen = Observations(self.uid, state.boot_id, now, self._counts(), RecordBlock(0, 0, RAMP_SET))
        self.seen = Worker(WorkerEndpoint(self.uid, self.uid, True), state, seen)
        return self.seen


class Fleet(MemoryShell):
    """Workers, traffic and shell of one service."""

    def __init__(
        self, world: World, service: Service, *, seed: int, rate: float, utilisation: float, slowdown: float = 1.0
    ) -> None:
        super().__init__(service)
        self.world, self.rng = world, np.random.default_rng(seed)
        self.rate, self.utilisation = rate, utilisation
        n = service.spec.replicas
        self.workers = [SimWorker(world, f"{seed}-w{i}", slowdown) for i in range(n)]
        self.traffic = Traffic(world, self.rng, rate=rate, utilisation=utilisation, workers=n, now=self.now)
        self.records: RecordStore | None = None
        self.outcome: TuningOutcome | None = None

    def add_config(self, plan: Plan) -> Config:
        """A plan with a certificate for the service's budget."""
        certificate = {"budget": self.service.spec.max_disagreement}
        config = Config(
            plan.name(self.service.name), plan, ConfigStatus("Tuned", "Certified", (certificate,)), self.now
        )
        self.configs[config.name] = config
        return config

    def begin(self, config: Config) -> None:
        """A rollout to ``config``, as the tuner would create it."""
        name = f"{self.service.name}-1"
        stable = self.service.status.stable_config
        self.rollouts[name] = Rollout(name, stable, config.name, "Tuned", self.service.generation, created_at=self.now)

    def step(self, seconds: float = PULL_SECONDS) -> Decision:
        """Traffic for so long, then a pull and a pass."""
        self.now += seconds
        for worker in self.workers:
            worker.receive(self.now - seconds)
        for worker in self.workers:
            worker.answer_audits(self.now)
        self._serve(self.traffic.until(self.now))
        return self.reconcile()

    def reconcile(self) -> Decision:
        outcome, self.outcome = self.outcome, None
        workers = tuple(
            w.seen if w.seen is not None and lost else w.report(self.now)
            for w, lost in zip(self.workers, self.rng.random(len(self.workers)) < LOST_PULL, strict=True)
        )
        snapshot = Snapshot(
            Gathered(self.service, dict(self.configs), tuple(self.rollouts.values()), published=self.published),
            Observed(workers, self.records, load=Load(self.rate, self.utilisation)),
            outcome,
            watch=self.watch,
        )
        decision = decide(snapshot, self.now)
        self.store(decision)
        if decision.publish is not None:
            self._deliver(decision.publish)
        return decision

    def _deliver(self, document: PlanDocument) -> None:
        for worker in self.workers:
            lost = self.rng.geometric(1 - LOST_POKE) - 1
            worker.coming.append((self.now + PULL_SECONDS * lost, document))

    def _serve(self, batches: Stretch) -> None:
        """All batches of a stretch at once: draws and counts are vectors, arms and seconds go batch by batch."""
        n = len(batches.size)
        if n == 0:
            return
        arms = [self.workers[w].next_arm() for w in batches.worker.tolist()]
        leaves, drawn, wrong = self._draw(batches, arms)
        failed = self.rng.random(n) < FAILING
        seconds = batches.slowness * [
            arm.served.stages.run(tuple(left[: len(arm.served.exit_names)]), carry_on=False)[1] * arm.slowdown
            for arm, left in zip(arms, leaves.tolist(), strict=True)
        ]
        by_arm: dict[int, list[int]] = {}
        for b, arm in enumerate(arms):
            by_arm.setdefault(id(arm), []).append(b)
        for rows in by_arm.values():
            mine = np.asarray(rows)
            arms[rows[0]].count(batches.size[mine], seconds[mine], failed[mine], leaves[mine], drawn[mine])
        due = batches.end + self.rng.exponential(AUDIT_SECONDS, n)
        late = due > self.now
        for rows in by_arm.values():
            mine = np.asarray(rows)
            answered = mine[~late[mine] & ~failed[mine]]
            arms[rows[0]].answer(int(drawn[answered].sum()), int(wrong[answered].sum()))
        for b in np.flatnonzero((drawn > 0) & ~failed & late).tolist():
            audits = Audits(float(due[b]), arms[b], int(drawn[b]), int(wrong[b]))
            self.workers[int(batches.worker[b])].pending.append(audits)

    def _draw(self, batches: Stretch, arms: list[Arm]) -> tuple[Ints, Ints, Ints]:
        """Per batch: rows that leave at each stage, rows drawn for audit, and how many of these are answered
        wrongly."""
        plans = {arm.served.hash: arm.served for arm in arms}
        index = {key: i for i, key in enumerate(plans)}
        left = np.stack([served.left for served in plans.values()])
        wrong = np.stack([served.wrong for served in plans.values()])
        n, batch = len(arms), np.repeat(np.arange(len(arms)), batches.size)
        plan = np.array([index[arm.served.hash] for arm in arms])[batch]
        rate = np.array([arm.audit_rate for arm in arms])[batch]
        rows = self.world.draw(self.rng, len(batch))
        drawn = self.rng.random(len(batch)) < rate
        stages = max(len(served.stages.seconds) for served in plans.values())
        leaves = np.bincount(batch * stages + left[plan, rows], minlength=n * stages).reshape(n, stages)
        wrong_drawn = drawn & wrong[plan, rows]
        return (leaves, np.bincount(batch[drawn], minlength=n), np.bincount(batch[wrong_drawn], minlength=n))
