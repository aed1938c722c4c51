"""What one pass sees, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from offramp_core.control.objects import (
    Cause,
    Config,
    ConfigStatus,
    Rollout,
    RolloutStatus,
    Service,
    ServiceStatus,
    StartUpTimes,
)
from offramp_core.control.stable.watch import Watch
from offramp_core.errors import of_all_pools
from offramp_core.fleet import Window
from offramp_core.plan import Plan
from offramp_core.protocol import Observations, PlanDocument, WorkerState
from offramp_core.reasons import AnyReason, MaybeReason, Reason
from offramp_core.records import Records
from offramp_core.tuning import TuningOutcome, TuningRequest


@dataclass(frozen=True, slots=True)
class StartUp:
    """How one worker came to answer: when it was made, and the seconds of each step (see
    :class:`offramp_core.control.objects.StartUpTimes`)."""

    created_at: float
    times: StartUpTimes


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One worker as the platform reports it.

    ``ready`` is the platform's readiness (pod condition, process health). ``current`` says that it runs the template
    the spec asks for now; ``trial`` that it serves the version on trial, beside those of the other one; ``pool`` names
    the one that it runs in, which the spec has at ``pool_field``; ``own_bundle`` says that it was made with a bundle
    of that pool's own, whatever the spec says now; ``at_edge`` says that it has others as its core. ``ending`` says
    that it is on its way out.
    ``failure`` is why the platform cannot run it, in one sentence; ``no_room`` that another worker's leaving may cure
    it, unless what it asks for is ``offered_nowhere``. ``template`` is the digest of what it was made of. ``admin_url``
    is None while it has no address. ``devices`` names what it asks for beside processors and memory, None where the
    platform hands out nothing; ``unhealthy`` says which of them the platform reports as that. ``node`` is the machine
    that it runs on, where the platform has several. ``loads_in`` says that the bundle is out of memory until a request
    comes, and how many seconds the last load took (0 before there was one). ``startup`` is None where the platform does
    not tell how long it took. ``held_until`` is when the next one is asked for, where this one stands for those that
    nodes rejected.
    """

    name: str
    uid: str
    ready: bool
    current: bool = True
    restarts: int = 0
    failure: str = ""
    failure_reason: MaybeReason = ""
    no_room: bool = False
    offered_nowhere: bool = False
    ending: bool = False
    trial: bool = False
    pool: str = ""
    pool_field: str = ""
    own_bundle: bool = False
    at_edge: bool = False
    template: str = ""
    admin_url: str | None = None
    devices: tuple[str, ...] | None = None
    unhealthy: str = ""
    node: str = ""
    loads_in: float | None = None
    startup: StartUp | None = None
    held_until: float | None = None

    @property
    def finds_no_place(self) -> bool:
        """Whether nothing but a node, or what a quota allows, is lacking."""
        waits = self.no_room or self.offered_nowhere or self.failure_reason == Reason.UNSCHEDULABLE
        return waits and not self.ready and not self.ending


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the platform and the worker itself report it.

    ``state`` and ``observations`` are the last successful pull, or None. ``distrusted`` says why nothing this process
    reports is believed until it restarts; empty where it is.
    """

    endpoint: WorkerEndpoint
    state: WorkerState | None = None
    observations: Observations | None = None
    distrusted: str = ""

    @property
    def trouble(self) -> tuple[MaybeReason, str]:
        """(reason, message) of what keeps it from serving, or empty."""
        if self.endpoint.ready:
            return "", ""
        if self.endpoint.failure:
            return self.endpoint.failure_reason or Reason.WORKER_FAILED, self.endpoint.failure
        if self.state is not None and self.state.failing:
            return Reason.EXECUTOR_FAILING, self.state.failing
        if self.state is not None and not self.state.ready and self.state.message:
            return Reason.INVALID_BUNDLE, self._in_words_of_its_pool(self._lack_of_a_device + self.state.message)
        return "", ""

    def _in_words_of_its_pool(self, message: str) -> str:
        """What a worker says of its bundle names the fields of its pool where these are to be changed."""
        field = self.endpoint.pool_field
        if not field or self.state is None:
            return message
        if self.endpoint.own_bundle or self.state.missing_device:
            message = message.replace("in spec.model.uri", f"in {field}.model.uri")
        message = message.replace("spec.worker.resources", f"{field}.resources")
        return f"{field}.model.uri: {of_all_pools(message)}" if self.endpoint.own_bundle else message

    @property
    def _lack_of_a_device(self) -> str:
        """Where the bundle's device is not here: that nobody asked for one, else the node that gave none of use."""
        if self.state is None or not self.state.missing_device or self.endpoint.devices is None:
            return ""
        if self.endpoint.devices:
            return f"on node {self.endpoint.node}: " if self.endpoint.node else ""
        return (
            f"the bundle was prepared for {self.state.missing_device}, and workers ask for no device: name one in "
            "spec.worker.resources.limits, such as nvidia.com/gpu, or in a WorkerClass, which may have a claim; "
        )


@dataclass(frozen=True, slots=True)
class RecordStore:
    """The fleet's records of one ramp set, oldest first (``records.time`` is set), and whose they are; ``ramp_ids``
    names their columns.

    ``ahead`` are the processes whose clocks ran ahead, with the number of each one's next record.
    """

    records: Records
    ramp_ids: tuple[str, ...]
    backbone_digest: str
    ramp_set_digest: str
    ahead: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the fleet was between the last pulls: requests per second, and busy share of all workers in [0, 1], of
    the busier side where some are at the edge of the others.

    ``peak_rate`` is the most requests per second that came, refused ones included, in the part of the last hour that
    this process saw.
    """

    request_rate: float = 0.0
    utilisation: float = 0.0
    peak_rate: float = 0.0
    #: Requests that came, refused ones included, in each ten seconds of the last hour that this process saw.
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True)
class Scaling:
    """Who decides how many workers there are, and how many that is now (``by`` is for people). ``failure`` is why it
    cannot decide, in one sentence."""

    by: str
    desired: int
    failure: str = ""
    failure_reason: MaybeReason = ""


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """Train ramps on what workers have captured, once for each ``attempt`` on the sample that began at ``since``.

    ``ramp_set_digest`` is the set whose heads are trained further, ``max_disagreement`` the budget for which savings
    are told. Sets that are not in ``keep`` may be removed from the store; the new one stays.
    """

    attempt: int
    ramp_set_digest: str
    max_disagreement: float
    keep: tuple[str, ...] = ()
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What the platform tells of the last training: the set it made and, on ``rows`` inputs of which some trained
    nothing, what plans could save.

    ``attempt`` and ``since`` are the order's. Of one that is Running, ``message`` says what keeps it from doing so.
    """

    attempt: int
    state: Literal["Running", "Succeeded", "Failed"]
    ramp_set_digest: str = ""
    rows: int = 0
    saving_before: float = 0.0
    saving_after: float = 0.0
    message: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps something that the spec asks for from being had: the reason of a condition, and a sentence."""

    reason: AnyReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """What the plan of a service may have of a WorkerClass whose workers are limited, while other services use it."""

    class_name: str
    #: Workers that all services together may have.
    max_workers: int
    #: Workers that this service would plan if it were alone, and that it may plan.
    wanted: int
    most: int
    #: Workers that it may ask for at this moment: the others have the rest.
    now: int
    #: Whether another service waits for a worker of the class.
    waited_for: bool = False

    def limit(self, desired: int) -> int:
        """Workers that it may go on to ask for, who asks for ``desired`` by now: none of them is taken back here."""
        return max(self.now, desired)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A service and everything that belongs to it, as the platform has it, read once per pass."""

    service: Service
    configs: Mapping[str, Config] = field(default_factory=dict)
    rollouts: tuple[Rollout, ...] = ()
    workers: tuple[WorkerEndpoint, ...] = ()
    #: The document in force (ConfigMap, file), with its epoch; None before the first.
    published: PlanDocument | None = None
    url: str = ""
    #: None where ``spec.replicas`` says how many workers there are.
    scaling: Scaling | None = None
    #: Whether the platform has a ramp-set store and trains.
    can_train: bool = False
    #: What became of the last training.
    training: TrainingReport | None = None
    #: What is wrong with a route through a Gateway that the spec asks for.
    route: Trouble | None = None
    #: The WorkerClass that workers are made of, or were while ``class_trouble`` keeps the one that the spec names from
    #: being used.
    worker_class: str = ""
    class_trouble: Trouble | None = None
    #: Of the pools whose WorkerClass limits the workers of all services.
    shares: Mapping[str, ClassShare] = field(default_factory=dict)
    #: Digest of the workers that the spec asks for now; empty where there can be none.
    template: str = ""
    #: Why the workers are not yet what the administrator asks for.
    turn: Trouble | None = None

    @property
    def desired(self) -> int:
        """How many workers there should be."""
        return self.service.spec.replicas if self.scaling is None else self.scaling.desired


@dataclass(frozen=True, slots=True)
class Observed:
    """What one round of pulls gives. ``records`` are scored by the bundle's own ramp set, ``more_records`` by others,
    by digest."""

    workers: tuple[Worker, ...] = ()
    records: RecordStore | None = None
    more_records: Mapping[str, RecordStore] = field(default_factory=dict)
    load: Load = Load()


def seconds_since(moment: float | None, *, now: float, watched_since: float) -> float:
    """Seconds since a moment that another operator's clock may have given: one that lies ahead counts from when this
    process began to look. 0 where there is none."""
    if moment is None:
        return 0.0
    return now - moment if moment <= now else max(0.0, now - watched_since)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one decision may look at. ``watched_since`` is when this process began to look at the service, by its
    own clock.

    ``watch`` is what the last decision of this process returned, None at its first.
    """

    gathered: Gathered
    observed: Observed = Observed()
    tuning_outcome: TuningOutcome | None = None
    tuning_running: bool = False
    watched_since: float = 0.0
    watch: Watch | None = None

    @property
    def service(self) -> Service:
        return self.gathered.service

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.observed.workers

    @property
    def has_edges(self) -> bool:
        """Whether some workers have a core for what leaves at no exit. Where the spec says so, plans do not change with
        who answers just now."""
        reported = (worker.state is not None and worker.state.at_edge for worker in self.workers)
        return self.service.spec.edge is not None or any(reported)

    def with_workers(self, workers: tuple[Worker, ...]) -> Snapshot:
        """The same, of some of the workers."""
        return replace(self, observed=replace(self.observed, workers=workers))


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
    """One Kubernetes Event on the service: a transition worth telling. ``rollout`` is the one that it happened to, if
    it did."""

    reason: AnyReason
    message: str
    warning: bool = False
    rollout: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, in the order the shell must do it.

    1. create configs, then write config statuses; 2. create the rollout; 3. write rollout statuses: evidence is
       persisted before it is
    acted on; 4. write the service status; 5. delete what history no longer needs; 6. publish the document with a
    compare-and-swap on its epoch, then poke workers; 7. start the tuning and the training; 8. emit events. A document
    that only takes exits away (see :func:`offramp_core.control.document.only_takes_away`) comes before all of that: it
    carries a note of why, and a store that takes no writes must not keep a harmful plan in force.

    ``watch`` is for the snapshot of this process's next decision, also where one of these steps fails.
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
    train: TrainingOrder | None = None
    events: tuple[Event, ...] = ()
    requeue_after_seconds: float = 30.0
    watch: Watch | None = None
