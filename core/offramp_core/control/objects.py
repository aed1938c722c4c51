"""The objects of the control plane: what a user wrote, and what Offramp owns, with their statuses.

Statuses are what survives a restart: everything a later pass needs must be in one of them. Times are
seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from offramp_core.control.spec import ServiceSpec
from offramp_core.evidence.detector import DetectorState
from offramp_core.plan import Plan

Phase = Literal[
    "Pending", "Progressing", "Paused", "AwaitingPromotion", "Promoting", "RollingBack",
    "Succeeded", "RolledBack", "Aborted", "Superseded",
]  # fmt: skip
FINISHED: frozenset[str] = frozenset({"Succeeded", "RolledBack", "Aborted", "Superseded"})
ConditionStatus = Literal["True", "False", "Unknown"]
Cause = Literal["Tuned", "Pinned"]
ConfigState = Literal["Proposed", "Certified", "Canary", "Stable", "Superseded", "Rejected"]
Source = Literal["Tuned", "Pinned", "Baseline"]


# --- evidence --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmTally:
    """What one arm did since the step began; every field only grows."""

    requests: int = 0
    drawn: int = 0
    audited: int = 0
    disagreements: int = 0
    batches: int = 0
    judged: int = 0
    slow: int = 0
    failed: int = 0

    def __add__(self, other: ArmTally) -> ArmTally:
        return ArmTally(
            self.requests + other.requests, self.drawn + other.drawn, self.audited + other.audited,
            self.disagreements + other.disagreements, self.batches + other.batches, self.judged + other.judged,
            self.slow + other.slow, self.failed + other.failed,
        )  # fmt: skip

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
        return all(getattr(self, name) >= getattr(other, name) for name in ArmTally.__dataclass_fields__)

    @property
    def with_lost_audits(self) -> ArmTally:
        """A vanished worker's tally: audits it drew and never reported count as disagreements."""
        lost = self.drawn - self.audited
        return replace(self, audited=self.drawn, disagreements=self.disagreements + lost)


@dataclass(frozen=True, slots=True)
class BothArms:
    """Canary and stable tallies of the same epoch."""

    canary: ArmTally = ArmTally()
    stable: ArmTally = ArmTally()

    def __add__(self, other: BothArms) -> BothArms:
        return BothArms(self.canary + other.canary, self.stable + other.stable)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The fleet's counts for one epoch: live worker processes by boot id, and the sum of those that are gone.

    A boot id listed in ``quarantined`` reported something impossible; nothing it says is pooled any more.
    """

    epoch: int = 0
    live: dict[str, BothArms] = field(default_factory=dict)
    retired: BothArms = BothArms()
    quarantined: tuple[str, ...] = ()

    @property
    def total(self) -> BothArms:
        return sum(self.live.values(), self.retired)


# --- rollout ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateStatus:
    """One gate's reading. ``k`` of ``n`` events against ``bound``; it rejects once ``log_e_value >= log_limit``.

    ``needed`` is the minimum exposure; below it the gate is Undecided, never a pass.
    """

    name: str
    state: Literal["Clear", "Undecided", "Rejected", "NotApplicable"]
    n: int = 0
    k: int = 0
    bound: float = 0.0
    log_e_value: float = 0.0
    log_limit: float = 0.0
    needed: int = 0
    message: str = ""


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

    ``slow_seconds``, ``slow_needed``, ``audit_rate`` and ``restarts`` (per worker uid) are frozen when a step begins. ``step`` counts the
    steps that began before this one. ``objective`` is the intent for which the rollout was begun; ``outcome`` is the verdict that
    RollingBack is heading for. ``returns_to`` is the promoted rollout of the same plan, where the rollback window spares the first steps.
    ``watch`` is the restarting detector over the canary's audits.
    """

    phase: Phase = "Pending"
    step: int = 0
    weight: int = 0
    verdict: str = ""
    outcome: str = ""
    objective: str = ""
    returns_to: str = ""
    reason: str = ""
    message: str = ""
    started_at: float | None = None
    step_started_at: float | None = None
    phase_started_at: float | None = None
    finished_at: float | None = None
    audit_rate: float = 0.0
    slow_seconds: dict[str, float] = field(default_factory=dict)
    slow_needed: int = 0
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
        """(n, k): audits and disagreements of the canary over all steps."""
        now = self.ledger.total.canary
        return now.audited + sum(s.n for s in self.history), now.disagreements + sum(s.k for s in self.history)


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
        """Which attempt of its service this is: what its name ends in. Creation times have whole seconds only, so they may tie."""
        tail = self.name.rsplit("-", 1)[-1]
        return int(tail) if tail.isdecimal() else 0


# --- config ----------------------------------------------------------------------------------------

_TINY = 1e-12  # budgets and confidences are decimals; their floats may differ in the last bit


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan promises on the records that certified it, as fractions."""

    saving: float = 0.0
    disagreement: float = 0.0


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
        """Whether a certificate covers ``budget`` with ``confidence``, or the plan needs none because its exits are off.

        ``since`` is when the inputs last changed: an older certificate is about other inputs.
        """
        return self.plan.exits_off or any(
            float(c["budget"]) <= budget + _TINY
            and float(c.get("delta", 0.0)) <= 1 - confidence + _TINY
            and (since is None or float(c.get("recordsThrough") or since) >= since)
            for c in self.status.certificates
        )


# --- service ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """A Kubernetes condition (kstatus style)."""

    type: str
    status: ConditionStatus
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TuningStatus:
    """What the tuner must remember: tests are counted for good, and a record serves in one test only.

    ``consumed_through_at`` is the time of the newest record a test has used; ``records_since_at`` discards what is older (an alarm said
    that the inputs changed). ``tuned_for`` is the objective of the last conclusive attempt,
    ``requested_for`` that of the one under way. ``handled_request`` is the last of the user's requests that was answered.
    """

    state: str = ""
    message: str = ""
    tests_run: int = 0
    consumed_through_at: float | None = None
    records_since_at: float | None = None
    tuned_for: str = ""
    requested_for: str = ""
    next_attempt_at: float | None = None
    labels: int = 0
    labels_needed: int = 0
    failures: int = 0
    handled_request: str = ""
    audit: Literal["", "Off", "Quiet", "Eager"] = ""
    audit_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class PinStatus:
    """The verdict on the pin of one generation; ``intent`` is what was judged, so that other edits leave the verdict alone."""

    generation: int = 0
    verdict: Literal["", "Accepted", "Rejected"] = ""
    message: str = ""
    intent: str = ""


@dataclass(frozen=True, slots=True)
class WorkersStatus:
    desired: int = 0
    ready: int = 0
    acked: int = 0
    summary: str = ""
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    name: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """Rounded figures of the stable plan in the present epoch, for people; texts, so that they do not flicker."""

    p50: str = ""
    p95: str = ""
    agreement: str = ""
    exit_rate: str = ""
    savings: str = ""
    samples: int = 0
    taken_at: float | None = None


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """``EarlyExitService.status``."""

    observed_generation: int = 0
    settled_generation: int = 0
    phase: str = ""
    message: str = ""
    stable_config: str = ""
    candidate_config: str = ""
    url: str = ""
    rollout: RolloutSummary = RolloutSummary()
    workers: WorkersStatus = WorkersStatus()
    observed: Observed = Observed()
    tuning: TuningStatus = TuningStatus()
    pin: PinStatus = PinStatus()
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
