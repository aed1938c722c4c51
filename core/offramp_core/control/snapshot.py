"""What one pass sees, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offramp_core.control.objects import Cause, Config, ConfigStatus, Rollout, RolloutStatus, Service, ServiceStatus
from offramp_core.plan import Plan
from offramp_core.protocol import Observations, PlanDocument, WorkerState
from offramp_core.records import Records
from offramp_core.tuning import TuningOutcome, TuningRequest


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the platform and the worker itself report it.

    ``ready`` is the platform's readiness (pod condition, process health). ``current`` says that it runs the template the spec asks for
    now. ``failure`` is why the platform cannot run it, in one sentence. ``state`` and ``observations`` are the last successful pull, or None.
    """

    name: str
    uid: str
    ready: bool
    current: bool = True
    restarts: int = 0
    failure: str = ""
    failure_reason: str = ""
    state: WorkerState | None = None
    observations: Observations | None = None


@dataclass(frozen=True, slots=True)
class RecordStore:
    """The fleet's records of one ramp set, oldest first (``records.time`` is set), and whose they are; ``ramp_ids`` names their columns."""

    records: Records
    ramp_ids: tuple[str, ...]
    backbone_digest: str
    ramp_set_digest: str


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the fleet was between the last pulls: requests per second, and busy share of all workers in [0, 1]."""

    request_rate: float = 0.0
    utilisation: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one decision may look at. ``watched_since`` is when this process began to look at the service, by its own clock."""

    service: Service
    configs: Mapping[str, Config] = field(default_factory=dict)
    rollouts: tuple[Rollout, ...] = ()
    workers: tuple[Worker, ...] = ()
    published: PlanDocument | None = None
    records: RecordStore | None = None
    load: Load = Load()
    tuning_outcome: TuningOutcome | None = None
    tuning_running: bool = False
    watched_since: float = 0.0


@dataclass(frozen=True, slots=True)
class NewConfig:
    """Create a ``RampConfig`` unless it exists."""

    name: str
    plan: Plan
    status: ConfigStatus


@dataclass(frozen=True, slots=True)
class NewRollout:
    """Create a ``RampRollout``."""

    name: str
    from_config: str
    to_config: str
    cause: Cause
    generation: int


@dataclass(frozen=True, slots=True)
class Event:
    """One Kubernetes Event on the service: a transition worth telling."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, in the order the shell must do it.

    1. create configs, then write config statuses; 2. create the rollout; 3. write rollout statuses: evidence is persisted before it is
    acted on; 4. write the service status; 5. delete what history no longer needs; 6. publish the document with a compare-and-swap on its
    epoch, then poke workers; 7. start the tuning; 8. emit events.
    """

    status: ServiceStatus
    new_configs: tuple[NewConfig, ...] = ()
    config_statuses: Mapping[str, ConfigStatus] = field(default_factory=dict)
    new_rollout: NewRollout | None = None
    rollout_statuses: Mapping[str, RolloutStatus] = field(default_factory=dict)
    delete_configs: tuple[str, ...] = ()
    delete_rollouts: tuple[str, ...] = ()
    publish: PlanDocument | None = None
    tune: TuningRequest | None = None
    events: tuple[Event, ...] = ()
    requeue_after_seconds: float = 30.0
