"""The wire between control plane and worker: what the operator publishes and what workers report.

Downwards goes one signed :class:`PlanDocument` per service (ConfigMap or file, plus a poke of the admin
port). Upwards come :class:`WorkerState` (``GET /v1/state``) and :class:`Observations`
(``GET /v1/observations?after=N``). All are JSON with the field names below; shells do the (de)serialisation.

Counters are cumulative since the worker process started and belong to one (epoch, arm). A process is known
by its ``boot_id``, so a restart can never be mistaken for a counter that went backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Arm = Literal["stable", "canary"]

# --- downwards -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """A plan and what is measured while it serves.

    ``plan`` is :meth:`offramp_core.plan.Plan.to_mapping`. ``audit_rate`` is π: each request is audited with this probability, drawn
    once at admission, whether or not it leaves early; constant within an epoch so that counts are binomial.
    """

    plan: dict[str, Any]
    audit_rate: float


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """What every worker of a service should run from ``epoch`` on.

    A batch runs under ``canary`` when ``hash(salt, worker uid, batch number)`` falls below ``weight_percent``.
    ``slow_seconds`` maps a batch size (as text) to the stable arm's p90 of execution seconds, frozen when the step began: a stable batch
    is slow above it, a canary batch above (1 + ``max_overhead``) times it. A canary ends by itself ``canary_lease_seconds`` after the last authenticated
    pull; stable exits end after ``stable_lease_seconds``. ``accuracy_budget`` and ``breaker_run_length`` arm the worker's own detector: a
    quiet stable plan alarms at most about once in that many audited requests.
    """

    service: str
    service_uid: str
    epoch: int
    stable: ArmPlan
    canary: ArmPlan | None
    weight_percent: int
    salt: str
    accuracy_budget: float
    slow_seconds: dict[str, float] = field(default_factory=dict)
    max_overhead: float = 0.0
    canary_lease_seconds: float = 60.0
    stable_lease_seconds: float = 86_400.0
    breaker_run_length: float = 1_000_000.0


@dataclass(frozen=True, slots=True)
class SignedDocument:
    """``payload`` is the exact JSON text of a :class:`PlanDocument`; ``signature`` its Ed25519 signature, base64."""

    payload: str
    signature: str


# --- upwards ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a worker did not take a document (see :class:`offramp_core.errors.PlanRefusedError`)."""

    epoch: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class RampInfo:
    """A column of the records: a ramp the loaded bundle offers, or (head ``final``) what another precision's whole backbone answers.

    ``precision`` names the graph of the backbone that feeds it; empty where it reads the input, which all of them share. See
    :mod:`offramp_core.columns`.
    """

    id: str
    position: int
    depth: float
    head: str
    precision: str = ""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker as it sees itself.

    ``epoch`` is the one in force (0: none yet, exits off). ``breaker_open`` says that the worker switched the exits of ``epoch`` off
    because its own detector alarmed; ``crashed_epoch`` that an earlier process of this worker died while executing a canary batch of
    that epoch. ``ramps`` are the columns of its records. ``costs`` has the per-batch cost arrays of a records file as nested lists.
    """

    uid: str
    boot_id: str
    service_uid: str
    model: str
    ready: bool
    backbone_digest: str
    ramp_set_digest: str
    ramps: tuple[RampInfo, ...]
    costs: dict[str, list[Any]]
    epoch: int = 0
    stable_hash: str = ""
    canary_hash: str = ""
    refused: Refusal | None = None
    breaker_open: bool = False
    crashed_epoch: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """Counters of one (epoch, arm) since the process started.

    ``drawn`` requests were drawn for audit, ``audited`` of them have been compared, ``disagreements`` differed. ``judged_batches`` had a
    size listed in ``slow_seconds``; ``slow_batches`` of them exceeded it. ``execution`` maps a batch size (text) to sketch counts (bucket
    index as text → count, see :mod:`offramp_core.sketch`), ``latency`` is the same over requests, from admission to reply.
    """

    epoch: int
    arm: Arm
    plan_hash: str
    requests: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    drawn: int = 0
    audited: int = 0
    disagreements: int = 0
    batches: int = 0
    judged_batches: int = 0
    slow_batches: int = 0
    failed_batches: int = 0
    busy_seconds: float = 0.0
    execution: dict[str, dict[str, int]] = field(default_factory=dict)
    latency: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Equal-weight records, columns as base64 little-endian arrays, rows in order of completion.

    ``time`` float64 [n] (worker's clock, seconds since the epoch, at admission), ``uncertainty`` float32 [n, R], ``prediction`` int32
    [n, R], ``final`` int32 [n] (what the served executor says at the end), ``reference`` int32 [n]. R and the order of columns are those of
    the worker's state at ``ramp_set_digest``. ``first`` is the sequence number of row 0, ``next`` the one to ask for
    next; a gap between what was asked and ``first`` means that older records were dropped from the ring.
    """

    first: int
    next: int
    ramp_set_digest: str
    time: str = ""
    uncertainty: str = ""
    prediction: str = ""
    final: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Observations:
    """One pull: counters of the recent epochs, and records since ``after``."""

    uid: str
    boot_id: str
    now: float
    counts: tuple[ArmCounts, ...]
    records: RecordBlock
