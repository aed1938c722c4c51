"""A year of drift and daily re-tuning through the real control loop, on recorded scores: `python -m bench.control`.

What drifts is how often hard inputs come: rows of the pool are drawn with weight exp(hardness x how many of their ramps
are wrong), so that the true disagreement and saving of every plan on every day are sums over the pool. Between two
passes a worker may serve for a whole day; its own breaker follows every audited request all the same, and the pass that
finds it open comes ten seconds after. While a rollout is under way or labels are missing a pass comes every 30 seconds,
which is later than in the product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.control_fleet import MANIFEST, QUIET_PULL_SECONDS, service_of
from bench.control_records import NewestRecords
from bench.control_shell import MemoryShell
from bench.control_world import BACKBONE, BUDGET, RAMP_SET, Floats, World
from bench.promise import Drift, hardness_by_day, traffic_by_day
from offramp_core.control.decide import decide
from offramp_core.control.objects import RolloutStatus
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
from offramp_core.evidence import detector
from offramp_core.plan import Plan
from offramp_core.protocol import Arm, ArmCounts, ArmPlan, Observations, PlanDocument, RecordBlock
from offramp_core.sketch import bucket_index, bucket_seconds
from offramp_core.tuning import TuningOutcome, tune
from offramp_worker.engine.accounts.counters import KEPT_EPOCHS, ArmCounter

Outcomes = npt.NDArray[np.bool_]

DAY = 86_400.0
BUSY_SECONDS = 30.0
KEPT_RECORDS = 20_000  # as the operator keeps
RAMPS = 6  # evenly spaced ones of the pool's; a search over all of them takes ten times as long and finds little more
BATCH_SECONDS: Floats = 0.01 * np.array([0.9, 1.0, 1.1, 1.3, 2.0])
BATCH_SHARES = (0.3, 0.4, 0.15, 0.1, 0.05)
_BUCKETS = [bucket_index(s) for s in BATCH_SECONDS.tolist()]


@dataclass(frozen=True, slots=True)
class YearScenario:
    """``request_rate`` is that of the quietest day, over the fleet; ``days`` is how long it lasts. Without ``watched``
    the workers have no breakers."""

    name: str
    promise: str
    drift: Drift = field(default_factory=Drift)
    request_rate: float = 20.0
    watched: bool = True
    days: int = 365


YEARS = (
    YearScenario("year", "a year of daily drift and re-tuning keeps the promise in >= 95 % of runs"),
    YearScenario(
        "harder",
        "the same when inputs only drift strongly: a season three times as deep, six jumps of twice the size",
        Drift(walk=0.0, season=1.2, jumps_per_year=6.0, jump=2.0),
    ),
)


@dataclass(frozen=True, slots=True)
class Year:
    """One simulated year; ``disagreement`` and ``saving`` are weighted by requests, ``by_day`` is the disagreement of
    each day."""

    disagreement: float
    saving: float
    days_above: int
    days_off: float
    tests: int
    alarms: int
    rollouts: int
    rolled_back: int
    verdicts: tuple[str, ...]
    by_day: tuple[float, ...]


def year(world: World, scenario: YearScenario, seed: int) -> Year:
    """Live through one year."""
    life = Life(world.narrowed(RAMPS), scenario, seed)
    life.reconcile()
    while life.day < scenario.days:
        life.step()
    return life.year()


@dataclass
class DayWorker:
    """One worker's counters and breaker, which a whole day may pass at once; :class:`bench.control_fleet.SimWorker`
    counts batches."""

    uid: str
    document: PlanDocument | None = None
    open: bool = False
    state: detector.DetectorState = field(default_factory=detector.init)
    counters: list[ArmCounter] = field(default_factory=list)
    frozen: dict[tuple[int, Arm], ArmCounts] = field(default_factory=dict)  # counters that stood still

    def configure(self, document: PlanDocument) -> None:
        if self.document is None or self.document.stable.plan != document.stable.plan:
            self.open, self.state = False, detector.init()
        self.document = document
        self.counters = [c for c in self.counters if c.epoch > document.epoch - KEPT_EPOCHS]
        self.frozen = {
            (c.epoch, c.arm): self.frozen[c.epoch, c.arm] for c in self.counters if (c.epoch, c.arm) in self.frozen
        }

    def counter(self, arm: Arm) -> ArmCounter:
        """The one of an arm of the document in force."""
        document = self.document
        assert document is not None
        for known in self.counters:
            if (known.epoch, known.arm) == (document.epoch, arm):
                return known
        asked = document.canary if arm == "canary" and document.canary is not None else document.stable
        self.counters.append(ArmCounter(document.epoch, arm, Plan.from_mapping(asked.plan).content_hash))
        return self.counters[-1]

    def counts(self) -> tuple[ArmCounts, ...]:
        """All counters."""
        for c in self.counters:
            if (c.epoch, c.arm) not in self.frozen:
                self.frozen[c.epoch, c.arm] = c.freeze()
        return tuple(self.frozen[c.epoch, c.arm] for c in self.counters)


class Life(MemoryShell):
    """The service and its fleet over a year."""

    def __init__(self, world: World, scenario: YearScenario, seed: int) -> None:
        super().__init__(service_of(MANIFEST), now=0.0)
        self.world, self.scenario, self.rng = world, scenario, np.random.default_rng([seed, 3])
        self.hardness, self.traffic = hardness_by_day(self.rng, scenario.drift), traffic_by_day()
        self.workers = [DayWorker(f"w{i}") for i in range(self.service.spec.replicas)]
        self.requests, self.wrong, self.saved, self.off = (np.zeros(scenario.days) for _ in range(4))
        self.kept = NewestRecords(world.records)
        self.outcome: TuningOutcome | None = None
        self.decision: Decision | None = None
        self.ended: dict[str, RolloutStatus] = {}
        self.alarms = 0
        self._plans: dict[int, tuple[ArmPlan, Plan]] = {}
        self._weights: tuple[tuple[int, ...], Floats] = ((), np.zeros(0))
        self._rates: dict[tuple[tuple[int, ...], str], tuple[float, float]] = {}

    @property
    def day(self) -> int:
        return int(self.now // DAY)

    @property
    def moment(self) -> tuple[int, ...]:
        """What tells times of different inputs apart."""
        return (self.day,)

    @property
    def next_change(self) -> float:
        """When other inputs come."""
        return (self.day + 1) * DAY

    @property
    def load(self) -> Load:
        return Load(self.rate, 0.3)

    @property
    def rate(self) -> float:
        return self.scenario.request_rate * float(self.traffic[self.day])

    # --- the inputs of a day -----------------------------------------------------------------------

    def weights(self) -> Floats:
        """Of the pool's rows, now."""
        if self._weights[0] != self.moment:
            weights = np.exp(self.difficulty * self.world.hardness)
            self._weights = (self.moment, weights / weights.sum())
        return self._weights[1]

    @property
    def difficulty(self) -> float:
        return float(self.hardness[self.day])

    def truth(self, plan: Plan) -> tuple[float, float]:
        """Disagreement and saving of a plan now."""
        served = self.world.served(plan)
        key = (self.moment, served.hash)
        if key not in self._rates:
            weights = self.weights()
            self._rates[key] = (float(weights @ served.wrong), float(weights @ self.world.savings(plan)))
        return self._rates[key]

    # --- a step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Serve until something happens, then one pass."""
        planned = min(self._pause(), self.next_change - self.now)
        outcomes = [self._outcomes(worker, planned) for worker in self.workers]
        watched = [self._breaker(worker, seen) for worker, seen in zip(self.workers, outcomes, strict=True)]
        opened = [
            w.alarm_after if w is not None and seen.any() else None for w, seen in zip(watched, outcomes, strict=True)
        ]
        share = min((after / len(seen) for after, seen in zip(opened, outcomes, strict=True) if after), default=1.0)
        seconds = min(planned, share * planned + QUIET_PULL_SECONDS) if share < 1 else planned
        for worker, seen, w, after in zip(self.workers, outcomes, watched, opened, strict=True):
            kept = seen[: round(len(seen) * seconds / planned)]
            self._serve(worker, kept, seconds, after, w if len(kept) == len(seen) else self._breaker(worker, kept))
        self.now += seconds
        if self.day < self.scenario.days:
            self.reconcile()

    def _pause(self) -> float:
        """Seconds to the next pass; a quiet day is one stretch."""
        decision = self.decision
        assert decision is not None
        if self.outcome is not None or decision.publish is not None or decision.new_rollout is not None:
            return 1.0
        live = any(not r.status.finished for r in self.rollouts.values())
        return BUSY_SECONDS if live or decision.status.tuning.state == "CollectingLabels" else DAY

    def _outcomes(self, worker: DayWorker, seconds: float) -> Outcomes:
        """Audited requests of the stable arm in the order they come, True where they disagree."""
        document = worker.document
        if document is None or worker.open:
            return np.zeros(0, dtype=np.bool_)
        share = 1 - _weight(document)
        audited = self.rng.poisson(self.rate / len(self.workers) * seconds * share * document.stable.audit_rate)
        plan = self._plan(document.stable)
        return np.asarray(self.rng.random(audited) < (0.0 if plan.exits_off else self.truth(plan)[0]))

    def _plan(self, asked: ArmPlan) -> Plan:
        """The plan of an arm; every document in force is asked for its own many times."""
        known = self._plans.get(id(asked))
        if known is None or known[0] is not asked:
            known = self._plans[id(asked)] = asked, Plan.from_mapping(asked.plan)
        return known[1]

    def _breaker(self, worker: DayWorker, outcomes: Outcomes) -> detector.Watched | None:
        """The worker's breaker after these audits, where it has one and something to watch."""
        document = worker.document
        if not self.scenario.watched or document is None or not len(outcomes):
            return None
        return self._watched(document, worker.state, outcomes)

    def _watched(self, document: PlanDocument, state: detector.DetectorState, outcomes: Outcomes) -> detector.Watched:
        """The breaker after these audits."""
        return detector.watch(state, outcomes, p0=document.accuracy_budget, run_length=document.breaker_run_length)

    def _serve(
        self,
        worker: DayWorker,
        outcomes: Outcomes,
        seconds: float,
        opened: int | None,
        watched: detector.Watched | None,
    ) -> None:
        """Count what a worker did in a stretch, and account for what its users got."""
        document = worker.document
        if document is None:
            self._account(self.world.exits_off, self.rate / len(self.workers) * seconds, seconds)
            return
        plan = self._plan(document.stable)
        if opened is not None and opened <= len(outcomes):
            on = seconds * opened / len(outcomes)
            outcomes, worker.open, self.alarms = outcomes[:opened], True, self.alarms + 1
        else:
            on = 0.0 if worker.open else seconds
            worker.state = watched.state if watched is not None else worker.state
        requests = self.rate / len(self.workers) * on
        weight = _weight(document)
        if on:
            self._count(worker, "stable", requests=round(requests * (1 - weight)), outcomes=outcomes)
        if on and document.canary is not None:
            canary = self._plan(document.canary)
            ran = int(self.rng.poisson(requests * weight))
            audited = int(self.rng.binomial(ran, document.canary.audit_rate))
            disagreed = self.rng.random(audited) < self.truth(canary)[0]
            self._count(worker, "canary", requests=ran, outcomes=np.asarray(disagreed))
            self._account(canary, requests * weight, on * weight)
        self._account(plan, requests * (1 - weight), on * (1 - weight))
        self._account(self.world.exits_off, self.rate / len(self.workers) * (seconds - on), seconds - on)
        self._record(worker, seconds, document.stable.audit_rate)

    def _account(self, plan: Plan, requests: float, seconds: float) -> None:
        day = self.day
        wrong, saving = (0.0, 0.0) if plan.exits_off else self.truth(plan)
        self.requests[day] += requests
        self.wrong[day] += requests * wrong
        self.saved[day] += requests * saving
        self.off[day] += seconds / (DAY * len(self.workers)) if plan.exits_off else 0.0

    def _count(self, worker: DayWorker, arm: Arm, *, requests: int, outcomes: Outcomes) -> None:
        """Batches of one request, of the same times in both arms."""
        document = worker.document
        assert document is not None
        counter = worker.counter(arm)
        worker.frozen.pop((counter.epoch, arm), None)
        audited = len(outcomes)
        requests = max(requests, audited)
        counter.requests += requests
        counter.drawn += audited
        counter.audited += audited
        counter.disagreements += int(np.count_nonzero(outcomes))
        counter.batches += requests
        histogram = counter.execution.setdefault(1, {})
        limit = document.slow_seconds.get("1")
        if limit is not None and arm == "canary":
            limit *= 1 + document.max_overhead
        for bucket, n in zip(_BUCKETS, self.rng.multinomial(requests, BATCH_SHARES).tolist(), strict=True):
            histogram[bucket] = histogram.get(bucket, 0) + n
            counter.judged_batches += n if limit is not None else 0
            counter.slow_batches += n if limit is not None and bucket_seconds(bucket) > limit else 0

    def _record(self, worker: DayWorker, seconds: float, audit_rate: float) -> None:  # noqa: ARG002 - others ask which
        """Equal-weight records of a worker's stretch; only the newest are kept."""
        n = min(round(self.rate / len(self.workers) * seconds * audit_rate), KEPT_RECORDS)
        rows = np.searchsorted(np.cumsum(self.weights()), self.rng.random(n) * (1 - 1e-12))
        self.kept.append(rows, time=self.now + np.sort(self.rng.uniform(0.0, seconds, n)))

    # --- a pass ------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        self.kept.settle(self.most_kept)
        outcome, self.outcome = self.outcome, None
        records = RecordStore(self.kept.records(), self.world.ramp_ids, BACKBONE, RAMP_SET) if len(self.kept) else None
        snapshot = Snapshot(
            Gathered(self.service, dict(self.configs), tuple(self.rollouts.values()), published=self.published),
            Observed(tuple(self._report(w) for w in self.workers), records, load=self.load),
            outcome,
            watch=self.watch,
        )
        self.decision = decision = decide(snapshot, self.now)
        self.store(decision)
        self.ended.update({name: r.status for name, r in self.rollouts.items() if r.status.finished})
        if decision.publish is not None:
            for worker in self.workers:
                worker.configure(decision.publish)
        if decision.tune is not None and records is not None:
            self.outcome = tune(records.records, decision.tune)

    @property
    def most_kept(self) -> int:
        """Records, of which the newest are kept."""
        return KEPT_RECORDS

    def _report(self, worker: DayWorker) -> Worker:
        document = worker.document
        canary = document.canary if document is not None else None
        state = self.world.state(
            worker.uid,
            document,
            stable_hash=self._plan(document.stable).content_hash if document else "",
            canary_hash=self._plan(canary).content_hash if canary else "",
            breaker_open=worker.open,
        )
        seen = Observations(worker.uid, state.boot_id, self.now, worker.counts(), RecordBlock(0, 0, RAMP_SET))
        return Worker(WorkerEndpoint(worker.uid, worker.uid, True), state, seen)

    def year(self) -> Year:
        """What the year came to."""
        total, by_day = float(self.requests.sum()), self.wrong / self.requests
        verdicts = tuple(f"{status.verdict} {status.reason}".strip() for status in self.ended.values())
        return Year(
            disagreement=float(self.wrong.sum()) / total,
            saving=float(self.saved.sum()) / total,
            days_above=int((by_day > BUDGET).sum()),
            days_off=float(self.off.sum()),
            tests=self.service.status.tuning.tests_run,
            alarms=self.alarms,
            rollouts=len(verdicts),
            rolled_back=sum(v.startswith("RolledBack") for v in verdicts),
            verdicts=verdicts,
            by_day=tuple(np.round(by_day, 6).tolist()),
        )


def _weight(document: PlanDocument) -> float:
    return document.weight_percent / 100 if document.canary is not None else 0.0
