"""The objects of the control plane: what a user wrote, and what Offramp owns, with their statuses.

Statuses are what survives a restart: everything a later pass needs must be in one of them. Times are
seconds since the epoch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from offramp_core.control.spec import ServiceSpec
from offramp_core.evidence.detector import DetectorState
from offramp_core.evidence.one_arm import Counts
from offramp_core.fleet.days import EarlierDays
from offramp_core.plan import Plan
from offramp_core.protocol import OVERLOAD, ArmCounts, PlanCounts, class_of, tier_of
from offramp_core.reasons import ConditionType, MaybeReason, PassedOn

Phase = Literal[
    "Pending",
    "Progressing",
    "Paused",
    "AwaitingPromotion",
    "Promoting",
    "RollingBack",
    "Succeeded",
    "RolledBack",
    "Aborted",
    "Superseded",
]
FINISHED: frozenset[str] = frozenset({"Succeeded", "RolledBack", "Aborted", "Superseded"})
Ending = Literal["RolledBack", "Aborted", "Superseded"]
ConditionStatus = Literal["True", "False", "Unknown"]
Cause = Literal["Tuned", "Pinned"]
ConfigState = Literal["Proposed", "Certified", "Canary", "Stable", "Superseded", "Rejected"]
Source = Literal["Tuned", "Pinned", "Baseline"]
GateState = Literal["Clear", "Undecided", "Rejected", "NotApplicable"]
UpdateStrategy = Literal["Surge", "Replace"]
VersionPhase = Literal["", "Starting", "Comparing", "AwaitingPromotion", "Promoting", "Rejected"]


# --- evidence --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmTally:
    """What one arm did since the step began, summed over processes; every field only grows.

    Each is a count of :class:`offramp_core.protocol.ArmCounts`, of the same name unless ``count`` names it.
    """

    requests: int = 0
    drawn: int = 0
    audited: int = 0
    disagreements: int = 0
    batches: int = 0
    judged: int = field(default=0, metadata={"count": "judged_batches"})
    slow: int = field(default=0, metadata={"count": "slow_batches"})
    failed: int = field(default=0, metadata={"count": "failed_batches"})

    @classmethod
    def of(cls, counts: ArmCounts) -> ArmTally:
        """What one process reports."""
        return cls(*_COUNTS_OF_TALLY(counts))

    def __add__(self, other: ArmTally) -> ArmTally:
        return ArmTally(*map(operator.add, _TALLY(self), _TALLY(other)))

    @property
    def possible(self) -> bool:
        """Whether these counts can have happened."""
        return (
            0 <= self.disagreements <= self.audited <= self.drawn <= self.requests
            and 0 <= self.slow <= self.judged <= self.batches
            and 0 <= self.failed <= self.batches
        )

    def at_least(self, other: ArmTally) -> bool:
        """Whether nothing went backwards since ``other``."""
        return all(map(operator.ge, _TALLY(self), _TALLY(other)))

    @property
    def with_lost_audits(self) -> ArmTally:
        """A vanished worker's tally: audits it drew and never reported count as disagreements."""
        lost = self.drawn - self.audited
        return replace(self, audited=self.drawn, disagreements=self.disagreements + lost)


_TALLY = operator.attrgetter(*ArmTally.__dataclass_fields__)
_COUNTS_OF_TALLY = operator.attrgetter(*(f.metadata.get("count", f.name) for f in fields(ArmTally)))


@dataclass(frozen=True, slots=True)
class TierTally:
    """Audits of a tier's requests under the canary since the step began."""

    audited: int = 0
    disagreements: int = 0

    def __add__(self, other: TierTally) -> TierTally:
        return TierTally(self.audited + other.audited, self.disagreements + other.disagreements)

    def at_least(self, other: TierTally) -> bool:
        """Whether nothing went backwards since ``other``."""
        return self.audited >= other.audited and self.disagreements >= other.disagreements


@dataclass(frozen=True, slots=True)
class BothArms:
    """Canary and stable tallies of the same epoch; ``tiers`` are those of the canary, by name."""

    canary: ArmTally = ArmTally()
    stable: ArmTally = ArmTally()
    tiers: dict[str, TierTally] = field(default_factory=dict)

    def __add__(self, other: BothArms) -> BothArms:
        return BothArms(self.canary + other.canary, self.stable + other.stable, summed_tiers(self.tiers, other.tiers))


def summed_tiers(one: dict[str, TierTally], other: dict[str, TierTally]) -> dict[str, TierTally]:
    """The audits of two places, by tier."""
    names = sorted(one.keys() | other.keys())
    return {name: one.get(name, TierTally()) + other.get(name, TierTally()) for name in names}


@dataclass(frozen=True, slots=True)
class Ledger:
    """The fleet's counts for one epoch: live worker processes by boot id, and the sum of those that are gone.

    A boot id listed in ``quarantined`` reported something impossible; nothing it says is pooled any more. ``due`` has,
    by process, the audits that the canary had drawn when the step had passed but for those, at ``due_since_at``;
    ``overdue`` of them came too late and count as disagreements.
    """

    epoch: int = 0
    live: dict[str, BothArms] = field(default_factory=dict)
    retired: BothArms = BothArms()
    quarantined: tuple[str, ...] = ()
    due: dict[str, int] = field(default_factory=dict)
    due_since_at: float | None = None
    overdue: int = 0

    @property
    def total(self) -> BothArms:
        lost = ArmTally(audited=self.overdue, disagreements=self.overdue)
        return sum(self.live.values(), self.retired + BothArms(canary=lost))

    @property
    def awaited(self) -> int:
        """Audits that are due and were not reported yet."""
        live = {boot: both.canary.audited for boot, both in self.live.items()}
        return sum(max(0, drawn - live[boot]) for boot, drawn in self.due.items() if boot in live)


# --- rollout ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateStatus:
    """One gate's reading. ``k`` of ``n`` events against ``bound``; it rejects once ``log_e_value >= log_limit``.

    ``needed`` is the minimum exposure; below it the gate is Undecided, never a pass. ``exposure`` is the share of it
    that has been reached, in [0, 1], of observations that need not be the ``n`` of the evidence; for acceptance of the
    evidence that it wants. None where the gate asks for none, and in a status that an operator wrote before there was
    this field.
    """

    name: str
    state: GateState
    n: int = 0
    k: int = 0
    bound: float = 0.0
    log_e_value: float = 0.0
    log_limit: float = 0.0
    needed: int = 0
    message: str = ""
    exposure: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step: its weight, when it ended, and the audits it saw."""

    weight: int
    n: int
    k: int
    finished_at: float


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Everything a restarted operator needs to go on with a rollout.

    ``slow_seconds``, ``slow_seconds_by_length``, ``slow_needed``, ``slow_excluded`` and ``audit_rate`` are frozen when
    a step begins, ``restarts`` (per worker uid) then or when a later worker first was ready. ``slow_excluded`` is the
    least slowdown, beyond the allowed overhead, that ``slow_needed`` judged batches exclude: more than what a step
    looks for where that would have taken too many, 0 where they exclude none, None where nobody says. ``step`` counts
    the steps that began before this one. ``objective`` is the intent for which the rollout was begun; ``outcome`` is
    the verdict that RollingBack is heading for. ``returns_to`` is the promoted rollout of the same plan, where the
    rollback window spares the first steps. ``watch`` is the restarting detector over the canary's audits.
    ``gate_level`` is the share of errors that each gate of this step may make, ``level_spent`` that of the steps
    before. ``acceptance_test`` is the number of the test by which an uncertified plan earns its place, among all tests
    of the service; ``acceptance_clustering`` is the most that any sign of scenes has shown, by which that test alone
    counts. ``lapsed`` are the audits (n, k) of times at whose end the canary's lease had lapsed.
    """

    phase: Phase = "Pending"
    step: int = 0
    weight: int = 0
    verdict: str = ""
    outcome: str = ""
    objective: str = ""
    returns_to: str = ""
    reason: MaybeReason = ""
    message: str = ""
    started_at: float | None = None
    step_started_at: float | None = None
    phase_started_at: float | None = None
    finished_at: float | None = None
    audit_rate: float = 0.0
    slow_seconds: dict[str, float] = field(default_factory=dict)
    slow_seconds_by_length: dict[str, float] = field(default_factory=dict)
    slow_needed: int = 0
    slow_excluded: float | None = None
    gate_level: float = 0.0
    level_spent: float = 0.0
    acceptance_test: int = 0
    acceptance_clustering: float = 0.0
    lapsed: Counts = field(default_factory=Counts)
    restarts: dict[str, int] = field(default_factory=dict)
    renewals: int = 0
    gates: tuple[GateStatus, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    watch: DetectorState = field(default_factory=DetectorState)
    history: tuple[StepRecord, ...] = ()

    @property
    def finished(self) -> bool:
        return self.phase in FINISHED

    @property
    def audited(self) -> tuple[int, int]:
        """(n, k): audits and disagreements of the canary over the whole attempt."""
        now, lapsed = self.ledger.total.canary, self.lapsed
        n, k = now.audited + lapsed.n, now.disagreements + lapsed.k
        return n + sum(s.n for s in self.history), k + sum(s.k for s in self.history)


@dataclass(frozen=True, slots=True)
class Rollout:
    """A ``RampRollout``. ``paused`` and ``decision`` belong to people."""

    name: str
    from_config: str
    to_config: str
    cause: Cause
    generation: int
    paused: bool = False
    decision: Literal["", "Promote", "Abort"] = ""
    created_at: float = 0.0
    status: RolloutStatus = field(default_factory=RolloutStatus)

    @property
    def number(self) -> int:
        """Which attempt of its service this is: what its name ends in. Creation times have whole seconds only, so they
        may tie."""
        tail = self.name.rsplit("-", 1)[-1]
        return int(tail) if tail.isdecimal() else 0


# --- config ----------------------------------------------------------------------------------------

_TINY = 1e-12  # budgets and confidences are decimals; their floats may differ in the last bit


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan promises on the records that certified it, as fractions. ``audits`` is what they are to take of
    ``saving``, at the rate that holds while nothing is being decided; 0 where an operator of before did not say.
    ``tiers`` is what is saved of a request of each, by name."""

    saving: float = 0.0
    disagreement: float = 0.0
    audits: float = 0.0
    tiers: dict[str, float] = field(default_factory=dict)

    @property
    def net(self) -> float:
        """What is left of the saving once audits are paid for."""
        return self.saving - self.audits


@dataclass(frozen=True, slots=True)
class ConfigStatus:
    """``certificates`` are :meth:`Certificate.to_mapping` values, newest last."""

    source: Source = "Tuned"
    state: ConfigState = "Proposed"
    certificates: tuple[Any, ...] = ()
    prediction: Prediction | None = None
    rejections: int = 0
    rejected_until_at: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """A ``RampConfig``: an immutable plan and what is known of it."""

    name: str
    plan: Plan
    status: ConfigStatus = field(default_factory=ConfigStatus)
    created_at: float = 0.0

    def certified_for(self, budget: float, *, confidence: float, since: float | None = None) -> bool:
        """Whether a certificate covers ``budget`` with ``confidence``, or the plan needs none because its exits are
        off.

        ``since`` is when the inputs last changed: an older certificate is about other inputs.
        """
        return self.plan.exits_off or any(
            float(c["budget"]) <= budget + _TINY
            and float(c.get("delta", 0.0)) <= 1 - confidence + _TINY
            and (since is None or float(c.get("recordsThrough") or since) >= since)
            for c in self.status.certificates
        )

    def tiers_for(self, budgets: Mapping[str, float], *, confidence: float) -> tuple[str, ...]:
        """Those tiers of the plan that a certificate covers, as their ``budgets`` are now; a plan that earned its place
        without one, or was certified for larger budgets, has none."""
        proven = {
            tier["tier"]
            for c in self.status.certificates
            if float(c.get("delta", 0.0)) <= 1 - confidence + _TINY
            for tier in c.get("tiers", ())
            if float(tier["budget"]) <= budgets.get(tier["tier"], 0.0) + _TINY
        }
        return tuple(tier.name for tier in self.plan.tiers if tier.name in proven)


# --- service ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """A Kubernetes condition (kstatus style)."""

    type: ConditionType | PassedOn
    status: ConditionStatus
    reason: MaybeReason
    message: str
    observed_generation: int = 0
    last_transition_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TuningStatus:
    """What the tuner must remember: tests are counted for good, and a record serves in one test only.

    ``consumed_through_at`` is the time of the newest record a test has used; ``records_since_at`` discards what is
    older (an alarm said that the inputs changed). ``labels`` are those that no test has used, ``labels_needed`` how
    many of them the next attempt waits for, and ``design_effect`` of them are worth one, as far as the last attempt
    could tell; at ``remeasure_at`` labels, or from ``remeasure_by_at`` on, that is measured again, where a certificate
    seemed to take more than there were. ``clustering`` is by how much that grows with the share of requests that are
    audited. ``eager_since_at`` is when audits became as many as can be. ``unpaying`` is the plan for which a look was
    taken because one of its ramps does not pay. ``tuned_for`` is the objective of the last conclusive attempt,
    ``requested_for`` that of the one under way. ``handled_request`` is the last of the user's requests that was
    answered.

    A worker whose clock runs ahead gives its records times that cannot be, and what they are taken for must not change
    when an operator reads them again. So its records are known by :func:`ring`: those below a number of ``used`` were
    there when a test used records up to ``consumed_through_at``, those below one of ``stale`` before
    ``records_since_at``.
    """

    state: MaybeReason = ""
    message: str = ""
    tests_run: int = 0
    consumed_through_at: float | None = None
    records_since_at: float | None = None
    tuned_for: str = ""
    requested_for: str = ""
    next_attempt_at: float | None = None
    labels: int = 0
    labels_needed: int = 0
    remeasure_at: int = 0
    remeasure_by_at: float | None = None
    design_effect: float = 1.0
    clustering: float = 0.0
    failures: int = 0
    handled_request: str = ""
    unpaying: str = ""
    audit: Literal["", "Off", "Quiet", "Eager"] = ""
    eager_since_at: float | None = None
    audit_rate: float = 0.0
    used: dict[str, int] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)

    def not_younger(self, boot_id: str, ramp_set_digest: str) -> tuple[tuple[int, float], ...]:
        """(number, time) pairs: records of a ring below the number are not younger than the time, whatever they say."""
        key, marks = ring(boot_id, ramp_set_digest), []
        if key in self.used and self.consumed_through_at is not None:
            marks.append((self.used[key], self.consumed_through_at))
        if key in self.stale and self.records_since_at is not None:
            marks.append((self.stale[key], math.nextafter(self.records_since_at, -math.inf)))
        return tuple(marks)


def ring(boot_id: str, ramp_set_digest: str) -> str:
    """What names the ring of records that a process keeps for a ramp set."""
    return f"{boot_id}/{ramp_set_digest[-12:]}"


@dataclass(frozen=True, slots=True)
class PinStatus:
    """The verdict on the pin of one generation; ``intent`` is what was judged, so that other edits leave the verdict
    alone."""

    generation: int = 0
    verdict: Literal["", "Accepted", "Rejected"] = ""
    message: str = ""
    intent: str = ""


@dataclass(frozen=True, slots=True)
class WorkersStatus:
    """``scaled_by`` names what decides on ``desired`` where ``spec.replicas`` does not, ``class_name`` the WorkerClass
    that workers are made of."""

    desired: int = 0
    ready: int = 0
    acked: int = 0
    summary: str = ""
    scaled_by: str = ""
    quarantined: tuple[str, ...] = ()
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class UpdateStatus:
    """How workers are being replaced; empty while all run what the spec asks for, but for ``serving`` and
    ``silent_seconds``.

    ``no_room_at`` is since when one more finds no room. Where the only worker goes before its successor comes
    (``Recreate``), ``serving`` is the digest of the pods that served last, ``asked`` of those that are tried since
    ``tried_at``, or were given up for them (``Return``) for ``failure``. ``silent_at`` is since when nobody answers for
    it, ``silent_seconds`` how long nobody did the last time.
    """

    strategy: Literal["", "Surge", "Replace", "Recreate", "Return"] = ""
    no_room_at: float | None = None
    serving: str = ""
    asked: str = ""
    tried_at: float | None = None
    silent_at: float | None = None
    silent_seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a bundle is and how it is fetched: ``spec.model``, empty where it says nothing."""

    uri: str = ""
    digest: str = ""
    archive_digest: str = ""
    endpoint: str = ""
    region: str = ""
    secret: str = ""

    @classmethod
    def of(cls, spec: ServiceSpec) -> ModelSource:
        """What a spec asks for."""
        return cls(
            spec.model_uri,
            spec.model_digest or "",
            spec.archive_digest or "",
            spec.model_endpoint or "",
            spec.model_region or "",
            spec.model_secret or "",
        )

    def put(self, spec: ServiceSpec) -> ServiceSpec:
        """The spec with this model."""
        return replace(
            spec,
            model_uri=self.uri,
            model_digest=self.digest or None,
            archive_digest=self.archive_digest or None,
            model_endpoint=self.endpoint or None,
            model_region=self.region or None,
            model_secret=self.secret or None,
        )


@dataclass(frozen=True, slots=True)
class VersionTally:
    """What workers did under one version of the model: requests that ``came``, those of them that were refused or late
    (``missed``), batches and those that failed. ``rows`` in batches of known size, and the sum of the squares of these
    sizes."""

    came: int = 0
    missed: int = 0
    batches: int = 0
    failed: int = 0
    rows: int = 0
    squares: int = 0

    def __add__(self, other: VersionTally) -> VersionTally:
        return VersionTally(*(getattr(self, f) + getattr(other, f) for f in VersionTally.__dataclass_fields__))

    def __sub__(self, other: VersionTally) -> VersionTally:
        return VersionTally(*(getattr(self, f) - getattr(other, f) for f in VersionTally.__dataclass_fields__))

    def at_most(self, other: VersionTally) -> VersionTally:
        """No field above the other's: workers forget what they counted long ago."""
        return VersionTally(*(min(getattr(self, f), getattr(other, f)) for f in VersionTally.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """Two versions of the model side by side. All empty where ``spec.updatePolicy.sideBySide`` is not given.

    ``serving`` is the model of the main workers, known since all of them served it; ``candidate`` the one that
    ``phase`` speaks of. ``strategy`` says whether workers of the candidate come besides the others or in place of some,
    ``no_room_at`` since when there is no room for them. ``restarts`` are those of its workers when they first were
    ready, by uid; ``base`` is what worker processes of both versions had done at ``compared_since_at``, by boot id.
    ``gates`` are as they were at ``gates_read_at``. ``reason`` and ``message`` say how it ended, or what it waits for.
    """

    serving: ModelSource = ModelSource()
    candidate: ModelSource = ModelSource()
    phase: VersionPhase = ""
    strategy: Literal["", "Surge", "Replace"] = ""
    started_at: float | None = None
    phase_started_at: float | None = None
    no_room_at: float | None = None
    compared_since_at: float | None = None
    gates_read_at: float | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    base: dict[str, VersionTally] = field(default_factory=dict)
    gates: tuple[GateStatus, ...] = ()
    reason: MaybeReason = ""
    message: str = ""
    handled_request: str = ""


@dataclass(frozen=True, slots=True)
class CapacityStatus:
    """What workers answer with exits off, rounded so that it seldom changes: down what they can, up what is asked of
    them.

    ``worker_rate`` is requests per second of one worker, ``peak_rate`` the most of the last hour, ``needed`` the
    workers that this takes. ``floor`` is the fewest that the autoscaler of the spec may leave (0: it has no say);
    ``quiet_since_at`` since when a proven plan serves and nothing points to its end. 0 where it is not known.
    """

    worker_rate: float = 0.0
    peak_rate: float = 0.0
    needed: int = 0
    floor: int = 0
    quiet_since_at: float | None = None


@dataclass(frozen=True, slots=True)
class StartUpTimes:
    """What passes until a new worker answers: until it has a node, until its bundle is there, until its container runs,
    and until it is ready, in seconds of each; 0 in all where nobody has measured it."""

    placed_seconds: float = 0.0
    fetched_seconds: float = 0.0
    started_seconds: float = 0.0
    ready_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From the decision to the first answer."""
        return self.placed_seconds + self.fetched_seconds + self.started_seconds + self.ready_seconds


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The workers of one of ``spec.pools``. ``worker_rate`` is requests per second that one of them answers within the
    latency objective with exits off in batches of ``batch_size`` in ``batch_seconds``, as measured there with ``model``
    (a backbone's digest) and rounded; 0 before any was. ``planned`` is how many workers the plan has, where there is
    one, and ``wanted`` how many it would have if no other service used the pool's WorkerClass, where what it has does
    not answer what is asked. ``message`` says why workers find no place."""

    name: str = ""
    desired: int = 0
    ready: int = 0
    worker_rate: float = 0.0
    model: str = ""
    message: str = ""
    planned: int = 0
    batch_size: int = 0
    batch_seconds: float = 0.0
    wanted: int = 0
    startup: StartUpTimes = StartUpTimes()


@dataclass(frozen=True, slots=True)
class PoolPlanStatus:
    """The plan of all pools, as it was when it last changed: requests per second that it is for (``demand``) and
    ``answered``, and what the workers cost an hour. While earlier days let expect more than is asked, ``expected`` is
    how much, and ``asked`` what the recent past asks; else both are 0. ``saving`` is the share of the engine's time
    that exits are counted on for, where the spec has them counted; ``exits_off_at`` is when they were last off
    although they had been counted, or up to half a horizon before, for as long as they are not counted again."""

    demand: float = 0.0
    answered: float = 0.0
    cost_per_hour: float = 0.0
    reason: str = ""
    asked: float = 0.0
    expected: float = 0.0
    saving: float = 0.0
    exits_off_at: float | None = None


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    name: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True)
class RouteUse:
    """How generated answers were computed: ``share`` of the tokens, tokens per second of the engine's time, and what of
    its draft was ``accepted``; texts, rounded."""

    name: str
    share: str = ""
    tokens_per_second: str = ""
    accepted: str = ""


@dataclass(frozen=True, slots=True)
class ObservedFigures:
    """Rounded figures of the stable plan in the present epoch, for people; texts, so that they do not flicker. Those of
    tokens are about all that the workers' processes wrote: ``model_tokens_per_second`` by the model alone, ``routes``
    with the most used first."""

    p50: str = ""
    p95: str = ""
    first_token_p50: str = ""
    first_token_p95: str = ""
    per_token_p50: str = ""
    per_token_p95: str = ""
    tokens_per_second: str = ""
    model_tokens_per_second: str = ""
    routes: tuple[RouteUse, ...] = ()
    agreement: str = ""
    exit_rate: str = ""
    savings: str = ""
    audits: str = ""
    samples: int = 0
    taken_at: float | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """A share of what requests would take without exits, rounded: the estimate, and where it lies at all times (``low``
    to ``high``)."""

    share: float = 0.0
    low: float = -1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class RampUse:
    """An active ramp as traffic uses it.

    ``utility_seconds`` per request is what the inputs that leave there save less what it costs those that pass it, at
    the profile's seconds. ``pays`` is False once its exits are, beyond doubt, too few for its cost.
    """

    id: str
    exit_share: float = 0.0
    utility_seconds: float = 0.0
    pays: bool = True


@dataclass(frozen=True, slots=True)
class SliceUse:
    """A slice under the stable plan: ``disagreements`` of ``audited`` against its ``budget``; ``stopped`` once it was
    surely over it."""

    name: str
    budget: float = 0.0
    audited: int = 0
    disagreements: int = 0
    stopped: bool = False
    #: Answered in all, which is told of those under overload alone.
    requests: int = 0

    @property
    def title(self) -> str:
        """What people call it."""
        tier = tier_of(self.name)
        if tier == OVERLOAD:
            return "requests under overload"
        return f"tier {tier}" if tier else f"slice {self.name}"

    @property
    def consequence(self) -> str:
        """What a stop means, in words."""
        if tier_of(self.name) == OVERLOAD:
            return "requests have everybody's budget at any time"
        return "its requests take no exits" if class_of(self.name) is None else "no exit gives such an answer"


TierState = Literal["Waiting", "Exits", "NoPlan", "Stopped"]


@dataclass(frozen=True, slots=True)
class TierUse:
    """A tier under the stable plan. ``Exits`` says that its requests leave early; ``NoPlan`` that no plan of its own
    was certified, ``Stopped`` that its audits were surely over ``budget``, ``Waiting`` that exits are off for all.

    ``saving`` is predicted, on the records of the certificate, where ``certified_k`` of ``certified_n`` answers
    differed; ``disagreements`` of ``audited`` of its own requests did so far.

    Of overload (:data:`offramp_core.protocol.OVERLOAD`) ``requests`` were answered so, and ``workers`` do so now, the
    first of them since ``since_at``; its requests have everybody's budget where it has no plan.
    """

    name: str
    budget: float = 0.0
    state: TierState = "Waiting"
    saving: float = 0.0
    certified_n: int = 0
    certified_k: int = 0
    audited: int = 0
    disagreements: int = 0
    requests: int = 0
    workers: int = 0
    since_at: float | None = None


@dataclass(frozen=True, slots=True)
class SliceStop:
    """A plan was surely over the ``budget`` of the slice ``name``, and so over every smaller one, on the inputs as they
    still are."""

    plan_hash: str
    name: str
    budget: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the stable plan saves, by comparison with the batches that are held back from it (both absent before enough
    of them), and by ramp.

    ``audits`` is what audits take besides, measured, as a share of the time of exits off: held-back batches are audited
    as well, so it is in neither saving. None before enough requests, and while no worker tells.

    The figures speak of what was counted since ``previous_since_at``; that window and the one since ``since_at`` are
    summed apart so that the far past can be forgotten. ``live`` has the counters of worker processes by boot id,
    ``base`` what they were when the window began, ``retired`` the sum of those that are gone. ``stops`` are of this
    plan and of earlier ones, which may come back; the newest last.
    """

    plan_hash: str = ""
    holdback_share: float = 0.0
    requests: int = 0
    batches: int = 0
    held_back: int = 0
    answer_time: Saving | None = None
    engine_time: Saving | None = None
    audits: float | None = None
    ramps: tuple[RampUse, ...] = ()
    slices: tuple[SliceUse, ...] = ()
    previous_since_at: float | None = None
    since_at: float | None = None
    live: dict[str, PlanCounts] = field(default_factory=dict)
    base: dict[str, PlanCounts] = field(default_factory=dict)
    retired: PlanCounts = field(default_factory=PlanCounts)
    previous: PlanCounts = field(default_factory=PlanCounts)
    stops: tuple[SliceStop, ...] = ()

    def of(self, plan: Plan) -> Measured:
        """These figures, if they are of ``plan``; none else, but for the stops."""
        return self if self.plan_hash == plan.content_hash else Measured(stops=self.all_stops)

    @property
    def all_stops(self) -> tuple[SliceStop, ...]:
        """Of the slices of the plan as well: an operator of before told of them there alone."""
        of_slices = (SliceStop(self.plan_hash, use.name, use.budget) for use in self.slices if use.stopped)
        return tuple(dict.fromkeys((*self.stops, *of_slices)))

    def stopped(self, plan_hash: str, name: str, budget: float) -> bool:
        """Whether a plan was surely over a budget of a slice."""
        return any((s.plan_hash, s.name) == (plan_hash, name) and budget <= s.budget for s in self.all_stops)

    def after_change(self, serving: Plan) -> Measured:
        """After the inputs changed: what other plans did on the old ones says nothing any more."""
        return replace(self, stops=tuple(s for s in self.all_stops if s.plan_hash == serving.content_hash))


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The backbone digest that a bundle from ``uri`` was proven with: by a worker that became ready."""

    uri: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RampSetStatus:
    """Ramp sets besides the bundle's own, and the training of the next one.

    ``bundle`` is what they are for. Plans are looked for in ``current`` (empty: the bundle's own) and, while a new set
    is on trial, in ``candidate``. Inputs admitted after ``capture_since_at`` are kept for training ``attempt``, the
    number of the last one. ``failure`` is what keeps ramps from being trained, in one sentence.
    """

    bundle: str = ""
    current: str = ""
    candidate: str = ""
    candidate_since_at: float | None = None
    state: Literal["", "NoRampStore", "Capturing", "Training", "Judging"] = ""
    message: str = ""
    captures: int = 0
    capture_since_at: float | None = None
    attempt: int = 0
    trained_at: float | None = None
    next_attempt_at: float | None = None
    failures: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """``EarlyExitService.status``. ``models`` are the newest first; ``asked`` is what came on earlier days, where
    workers are planned by it."""

    observed_generation: int = 0
    settled_generation: int = 0
    phase: str = ""
    message: str = ""
    stable_config: str = ""
    candidate_config: str = ""
    url: str = ""
    rollout: RolloutSummary = RolloutSummary()
    workers: WorkersStatus = WorkersStatus()
    update: UpdateStatus = UpdateStatus()
    version: VersionStatus = field(default_factory=VersionStatus)
    capacity: CapacityStatus = CapacityStatus()
    pools: tuple[PoolStatus, ...] = ()
    pool_plan: PoolPlanStatus = PoolPlanStatus()
    asked: EarlierDays = field(default_factory=EarlierDays)
    observed: ObservedFigures = ObservedFigures()
    measured: Measured = Measured()
    tiers: tuple[TierUse, ...] = ()
    tuning: TuningStatus = TuningStatus()
    ramp_sets: RampSetStatus = RampSetStatus()
    pin: PinStatus = PinStatus()
    models: tuple[ModelStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """An ``EarlyExitService`` and its last written status.

    ``request`` is what the user asks for once, by annotation: ``tune/TIME``.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: ServiceSpec
    status: ServiceStatus = field(default_factory=ServiceStatus)
    request: str = ""

    @property
    def proven_digest(self) -> str | None:
        """The digest that the bundle at the spec's URI was proven with."""
        return next((m.digest for m in self.status.models if m.uri == self.spec.model_uri), None)
