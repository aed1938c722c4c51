"""The user's intent: ``EarlyExitService.spec``, parsed once into typed values.

The CRD refuses the same mistakes at the API server; this parser is the door of the embedded shell and the
second lock of the operator. Shares, probabilities and seconds are plain floats from here on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any, Literal, TypeVar, cast, get_args

from offramp_core.edge import OFFLINE, RESIDUES, Offline, Residue
from offramp_core.edge_settings import bytes_per_second
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.generation.losses import Output as Generated
from offramp_core.generation.losses import answer_pattern
from offramp_core.plan import MAX_ACTIVE_RAMPS, MAX_TIERS, Execution, RampThreshold
from offramp_core.precision import EXACT, Precision, check_precision
from offramp_core.protocol import DEFAULT_TIER, OVERLOAD, TimeName, class_of, class_slice, slice_number, tier_slice
from offramp_core.task import TASKS, Output

Mode = Literal["Auto", "Recommend", "Pinned", "Disabled"]
Promotion = Literal["Automatic", "Manual"]
OnInconclusive = Literal["Abort", "Hold"]
AllowedPrecision = Literal["Auto", "Exact"]
Training = Literal["Prepared", "LiveTraffic"]
BatchingPolicy = Literal["Offramp", "TFServing", "Clockwork"]
DeadlineAnswers = Literal["OnRequest", "Always"]
Protocol = Literal["HTTP", "GRPC"]
UpdateType = Literal["Auto", "Availability", "ResourceAware", "Recreate"]
NoExitFloor = Literal["Reserve", "PreScale", "None"]
SampledAnswers = Literal["Exact", "Lossy"]
Judged = Output | Literal["ExactAnswer", "TokenF1", "RougeL"]
W = TypeVar("W", bound=str)
GENERATED = tuple(str(output) for output in Generated)  # outputs that are about generated answers

_PART = r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h)"
_DURATION = re.compile(rf"^(?:{_PART})+$")
_DURATION_PART = re.compile(_PART)
_UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
FETCHED = ("https://", "s3://")
MODEL_FIELDS = {"uri", "digest", "archiveDigest", "endpoint", "region", "secretRef"}
_LATENCY_FIELDS = {"percentile", "threshold", "timeToFirstToken", "timePerToken"}
_ACCURACY_FIELDS = {"maxDisagreement", "maxLoss", "confidence", "output", "answerPattern", "sampledAnswers"}
_ACCURACY_FIELDS |= {"slices", "classes", "everyClass"}
_SPEC_FIELDS = {
    "model",
    "objective",
    "ramps",
    "execution",
    "batching",
    "deadlineAnswers",
    "predictionCache",
    "feedback",
    "protocols",
    "rollout",
    "route",
    "updatePolicy",
    "replicas",
    "autoscaling",
    "suspend",
    "worker",
    "pools",
    "edge",
    "poolPlan",
    "sharing",
}
_RAMPS_FIELDS = {"mode", "maxOverhead", "maxActive", "holdback", "precision", "training", "store", "pin"}
_ROLLOUT_FIELDS = {"promotion", "onInconclusive", "confidence", "stepDeadline", "cooldown"}
_ROLLOUT_FIELDS |= {"rollbackWindow", "historyLimit", "steps"}
LEAST_UNLOAD_SECONDS, MOST_UNLOAD_SECONDS = 10, 604_800  # a week
_OBJECT_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
_NAMESPACE = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_URI = re.compile(
    r"^(oci://\S+|file://.+|pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/\S*)?|https://[^\s/?#@]+/[^\s#]+|s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]/\S+)$"
)
_LEADS_OUT = re.compile(r"/\.\.(/|$)")
_ENDPOINT = re.compile(r"^https?://[^\s/?#@]+/?$")
_REGION = re.compile(r"^[a-z0-9][-a-z0-9]{0,62}$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SLICE = re.compile(r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$")
_TIER = re.compile(r"^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$")
_NUMBER_OR_SHARE = re.compile(r"^([1-9][0-9]{0,2}|1000|([1-9][0-9]?|100)%)$")
_PERCENTILE = re.compile(r"^[5-9][0-9](\.[0-9]{1,3})?$")
_DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_SIZE = re.compile(r"^([1-9][0-9]{0,11})(Ki|Mi|Gi)?$")
_UNIT_BYTES = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
MAX_NAME_LENGTH = 40
MAX_CACHE_BYTES = 2**40
MAX_FEEDBACK_ANSWERS = 1_000_000
MAX_STEPS = 12
MAX_SLICES = 8
MAX_CLASSES = 8  # with a budget of their own
MAX_EVERY_CLASS = 32
MAX_CLASS = 99_999
MAX_REPLICAS = 1000
MAX_IN_FLIGHT = 100_000
MAX_TRIAL_WEIGHT = 50  # percent of the workers; the version that serves keeps half of them at least
MAX_PARENTS = 8
MAX_POOLS = 8
OLD_ROUTE = "updatePolicy.sideBySide.gateway"
_ROUTE_FIELDS = {"parentRefs", "hostnames"}
MAX_HOSTNAMES = 16  # an HTTPRoute's own limit
_POOL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?$")
TAKEN_POOLS = ("main", "next")  # Services of these names share a route with a version on trial
EDGES = "edges"  # what the Service of workers at the edge is called after its service
_POOL_NUMBERS = ("replicas", "costPerHour", "minWorkers", "maxWorkers")
#: In the place of spec.worker's.
POOL_OWN = ("className", "image", "nodeSelector", "tolerations", "resources", "resourceClaims")
_HOSTNAME = re.compile(r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_API_GROUP = re.compile(r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_KIND = re.compile(r"^[a-zA-Z]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$")


@dataclass(frozen=True, slots=True)
class Step:
    """One canary step: the share of batches in percent, and how long to stay at least."""

    weight: int
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """How plans are canaried.

    ``confidence`` is that of all gates of one rollout together but accuracy, which has its budget's. A plan among the
    newest ``rollback_window`` promoted ones comes back by the last step alone. ``history_limit`` finished rollouts are
    kept.
    """

    promotion: Promotion = "Automatic"
    on_inconclusive: OnInconclusive = "Abort"
    confidence: float = 0.99
    step_deadline_seconds: float = 3600.0
    cooldown_seconds: float = 3600.0
    rollback_window: int = 3
    history_limit: int = 10
    steps: tuple[Step, ...] = (Step(5), Step(25), Step(50))


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests come in through a Gateway: Gateway API's ``parentRefs`` and ``hostnames``, as the user wrote them.

    Each parent is the pairs of one reference, sorted by name.
    """

    parents: tuple[tuple[tuple[str, str | int], ...], ...]
    hostnames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A changed model is tried beside the one that serves, by ``weight`` percent of the workers, for ``pause_seconds``
    at least.

    Its workers must be ready within ``deadline_seconds``, and be proven as long after the pause, or it is rejected.
    Requests that come through the service's route are shared by exactly ``weight``.
    """

    weight: int = 20
    pause_seconds: float = 600.0
    promotion: Promotion = "Automatic"
    deadline_seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class UpdatePolicy:
    """How workers of a changed bundle or image replace the old ones.

    ``Auto`` starts one more than wanted and, where there has been no room for it for ``surge_deadline_seconds``,
    replaces in place with two workers or more. ``Availability`` never takes a serving worker away first;
    ``ResourceAware`` never asks for one more where there are two. ``Recreate`` never does: where there is one, it goes
    first, and comes back as it was where its successor is not ready within ``recreate_deadline_seconds``. ``max_surge``
    (a number, or a share such as ``10%``) start ahead at a time. ``side_by_side`` None replaces workers without a trial
    of the new model.
    """

    type: UpdateType = "Auto"
    surge_deadline_seconds: float = 300.0
    recreate_deadline_seconds: float = 600.0
    side_by_side: SideBySide | None = None
    max_surge: int | str = 1


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """As many workers as keep about ``target_in_flight`` requests admitted and unanswered in each, within the limits.

    ``no_exit_floor`` says when there are never fewer than the demand needs with exits off: always, while exits may soon
    go off, or never.
    """

    max_replicas: int
    target_in_flight: int
    min_replicas: int = 1
    no_exit_floor: NoExitFloor = "Reserve"


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Workers on one kind of nodes. ``worker`` is ``spec.worker`` as it is for them: what the pool says stands in the
    place of what is said of all.

    Where ``fixed`` is False the operator decides on ``replicas``, between ``min_workers`` and ``max_workers``, by what
    a worker costs an hour; with both, it only recommends. ``bundle`` is where its own bundle is (fields of
    :class:`ServiceSpec`), the same model and exits measured on the pool's device; empty where it serves the spec's.
    """

    name: str
    replicas: int
    worker: Mapping[str, Any]
    fixed: bool = True
    cost_per_hour: float | None = None
    min_workers: int = 0
    max_workers: int | None = None
    bundle: Mapping[str, Any] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Workers that there may be."""
        return self.replicas if self.max_workers is None else self.max_workers

    @property
    def class_name(self) -> str:
        """The WorkerClass of its workers: its own, or that of all; empty without one."""
        return str(self.worker.get("className") or "")


@dataclass(frozen=True, slots=True)
class Edge:
    """The ``pool`` whose workers are at the edge, what they send to the others (their core) of a row that leaves at no
    exit, and what it gets while that is out of reach. ``uplink`` is a rate such as ``10Mbit``; empty where they measure
    it."""

    pool: str
    uplink: str = ""
    residue: Residue = "Auto"
    offline: Offline = "Refuse"


@dataclass(frozen=True, slots=True)
class Pin:
    """The user's own thresholds, in the order given, and the precision they are for; optionally tied to one ramp
    set."""

    ramps: tuple[RampThreshold, ...]
    ramp_set_digest: str | None = None
    precision: Precision = EXACT


@dataclass(frozen=True, slots=True)
class SliceObjective:
    """Requests with the parameter ``slice: name``, or the answers that name a class (``class/3``), and their own
    accuracy budget."""

    name: str
    max_disagreement: float

    @property
    def predicted(self) -> int | None:
        """The class that the answers name; None for a slice of requests."""
        return class_of(self.name)


@dataclass(frozen=True, slots=True)
class TierObjective:
    """A smaller budget that a request may ask for, with the parameter ``tier: name``."""

    name: str
    max_disagreement: float


@dataclass(frozen=True, slots=True)
class TimeGoal:
    """One time of the latency objective. ``counted_as`` is the histogram of
    :class:`offramp_core.protocol.ArmCounts` that it is held against, ``of`` its name for people; empty for the whole
    reply."""

    seconds: float
    counted_as: TimeName = "latency"
    of: str = ""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A parsed ``EarlyExitService.spec``. ``worker`` is the allow-listed template, for the shell that renders it.

    ``store_claim`` is the PersistentVolumeClaim of the ramp-set store in a cluster; ``offramp up`` has a store of its
    own. ``cache_bytes`` of 0 is no prediction cache, ``feedback_answers`` of 0 no answers kept for true labels.
    ``holdback`` is the share of batches that run with exits off under any plan, to be compared with.
    ``latency_seconds`` limits the whole reply, ``first_token_seconds`` and ``token_seconds`` the time to the first
    token of a generated answer and that of each later one; None where nothing is promised. One of the three is given.
    """

    model_uri: str
    latency_seconds: float | None
    max_disagreement: float
    model_digest: str | None = None
    archive_digest: str | None = None
    model_endpoint: str | None = None
    model_region: str | None = None
    model_secret: str | None = None
    latency_percentile: float = 95
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    confidence: float = 0.95
    output: Judged = "Top1"
    answer_pattern: str = ""
    sampled_answers: SampledAnswers = "Exact"
    slices: tuple[SliceObjective, ...] = ()
    tiers: tuple[TierObjective, ...] = ()
    #: The larger budget of requests that could not be answered in time otherwise; None where nothing is given up.
    overload: float | None = None
    mode: Mode = "Auto"
    max_overhead: float = 0.05
    max_active: int = 3
    holdback: float = 0.02
    precision: AllowedPrecision = "Auto"
    training: Training = "Prepared"
    store_claim: str | None = None
    pin: Pin | None = None
    execution: Execution = "Auto"
    deadline_answers: DeadlineAnswers = "OnRequest"
    cache_bytes: int = 0
    feedback_answers: int = 0
    protocols: tuple[Protocol, ...] = ("HTTP",)
    rollout: RolloutPolicy = RolloutPolicy()
    update_policy: UpdatePolicy = UpdatePolicy()
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    suspend: bool = False
    worker: Mapping[str, Any] = field(default_factory=dict)
    #: Without any, all workers are alike, and ``replicas`` of them; else ``replicas`` is the sum of the pools'.
    pools: tuple[WorkerPool, ...] = ()
    #: Workers of planned pools are counted with what the plan that serves saves, and not with exits off.
    counts_exits: bool = False
    #: The pool that this is the spec of, where a shell has made it of one of ``pools``; no user writes it.
    in_pool: str = ""
    #: The URI whose model a pool's own bundle must have; empty where workers serve the spec's bundle. As ``in_pool``.
    like_uri: str = ""
    #: None where all workers answer everything themselves.
    edge: Edge | None = None
    route: Route | None = None
    #: The WorkerPool whose workers serve it beside other services; empty where it has workers of its own.
    shared_pool: str = ""
    #: Seconds without a request after which those let its bundle go until the next one; None: it stays in memory.
    unload_after_seconds: int | None = None
    #: What the next release will not read: one sentence each, with what to write instead.
    deprecated: tuple[str, ...] = ()
    #: Why exits stay off whatever the mode is, empty otherwise. No user writes it: a pass does, where the workers serve
    #: something else than is asked for.
    no_exits_because: str = ""

    @property
    def is_fetched(self) -> bool:
        """Whether the bundle is fetched by each worker's own start, rather than mounted or lying there."""
        return self.model_uri.startswith(FETCHED)

    @property
    def fetches(self) -> bool:
        """Whether workers of any pool fetch their bundle."""
        own = (pool.bundle["model_uri"] for pool in self.pools if pool.bundle)
        return self.is_fetched or any(uri.startswith(FETCHED) for uri in own)

    @property
    def latency_share(self) -> float:
        """Share of the requests that must keep each of the objective's times."""
        return round(self.latency_percentile / 100, 8)  # else 99.9 % of 1,000 requests are all of them

    @property
    def time_goals(self) -> tuple[TimeGoal, ...]:
        """What the latency objective names; at least one."""
        named: tuple[tuple[float | None, TimeName, str], ...] = (
            (self.latency_seconds, "latency", ""),
            (self.first_token_seconds, "first_token", "time to first token"),
            (self.token_seconds, "per_token", "time per token"),
        )
        return tuple(TimeGoal(seconds, counted_as, of) for seconds, counted_as, of in named if seconds is not None)

    @property
    def generates(self) -> bool:
        """Whether the model writes answers: it has variants and drafts, and no exits."""
        return self.output in GENERATED

    @property
    def off(self) -> str:
        """What serves where no plan saves anything, in words."""
        return "the model alone" if self.generates else "exits off"

    @property
    def off_now(self) -> str:
        """The same as a sentence, for what has just happened."""
        return "the model answers alone" if self.generates else "exits are off"

    @property
    def class_name(self) -> str:
        """The WorkerClass that workers are made of; empty without one."""
        return str(self.worker.get("className") or "")

    def at_edge(self, pool: str) -> bool:
        """Whether the workers of a pool are at the edge."""
        return self.edge is not None and self.edge.pool == pool

    @property
    def edge_replicas(self) -> int:
        """How many workers the pool at the edge is to have."""
        return sum(pool.replicas for pool in self.pools if self.at_edge(pool.name))

    @property
    def is_edge(self) -> bool:
        """Whether this is the spec of workers at the edge, made of one of ``pools``."""
        return self.at_edge(self.in_pool)

    @property
    def may_move(self) -> bool:
        """Whether another bundle may lie at the URI tomorrow and nothing in the spec would notice."""
        return (
            self.model_digest is None and "@sha256:" not in self.model_uri and not self.model_uri.startswith("file://")
        )

    @property
    def finds_model_out(self) -> bool:
        """Whether it takes a worker with the spec's bundle to know the model that all others must have."""
        own_bundles = bool(self.like_uri) or any(pool.bundle for pool in self.pools)
        return self.may_move or (own_bundles and self.model_digest is None)

    @property
    def objective_key(self) -> str:
        """What a certified plan was tuned for; a plan proposed under another key is not comparable."""
        key = f"{self.max_disagreement:g}/{self.confidence:g}/{self.max_overhead:g}/{self.max_active}/{self.execution}"
        key = key if self.precision == "Auto" else f"{key}/{self.precision}"
        key = key if self.output == "Top1" else f"{key}/{self.output}"
        key = f"{key}/{self.answer_pattern}" if self.answer_pattern else key
        return key + "".join(f"/{s.name}={s.max_disagreement:g}" for s in self.watched)

    @property
    def menu(self) -> tuple[TierObjective, ...]:
        """Every budget that has thresholds of its own beside everybody's: the tiers', and that of overload."""
        return self.tiers if self.overload is None else (*self.tiers, TierObjective(OVERLOAD, self.overload))

    @property
    def watched(self) -> tuple[SliceObjective, ...]:
        """Everything whose audits are counted apart: slices, and the requests of each tier."""
        return (*self.slices, *(SliceObjective(tier_slice(t.name), t.max_disagreement) for t in self.menu))

    @property
    def precisions(self) -> tuple[Precision, ...] | None:
        """Precisions of the backbone that a plan may run at; None: any that the bundle has."""
        return None if self.precision == "Auto" else (EXACT,)


def parse_duration(text: Any, field_name: str) -> float:
    """``40ms``, ``1.5s``, ``1h30m`` → seconds."""
    if not isinstance(text, str) or not _DURATION.fullmatch(text):
        raise InvalidSpecError(field_name, f"{text!r} is not a duration; write for example 40ms, 1.5s or 1h30m")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def parse_size(text: Any, field_name: str) -> int:
    """``256Mi`` → bytes."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = int(match[1]) * _UNIT_BYTES[match[2]] if match else 0
    if not 0 < size <= MAX_CACHE_BYTES:
        raise InvalidSpecError(
            field_name,
            f"must be a whole number from 1 on with no unit or Ki, Mi or Gi, at most 1Ti, such as 256Mi; got {text!r}",
        )
    return size


def check_name(name: Any) -> str:
    """A service name: DNS-1035, at most 40 characters, because child names append a hash."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise InvalidSpecError(
            "metadata.name",
            f"{name!r} must be lower-case letters, digits and '-', start with a letter, at most {MAX_NAME_LENGTH} long",
        )
    return name


def _budget(accuracy: _Reader, output: Judged) -> float:
    """The largest share of answers that may differ, or of generated ones the largest mean loss."""
    name, other = ("maxLoss", "maxDisagreement") if output in GENERATED else ("maxDisagreement", "maxLoss")
    if other in accuracy.value:
        raise InvalidSpecError(accuracy.path(other), f"is not the budget of output {output}; set {name}")
    return accuracy.decimal(name, None, low="0", high="0.5", exclude_low=True)


def _generated(accuracy: _Reader, output: Judged) -> dict[str, Any]:
    """What only a budget of generated answers says."""
    for name in ("answerPattern", "sampledAnswers"):
        if name in accuracy.value and output not in GENERATED:
            raise InvalidSpecError(
                accuracy.path(name), f"is about generated answers, and output is {output}; remove it"
            )
    pattern = accuracy.get("answerPattern") or ""
    if pattern and output != "ExactAnswer":
        raise InvalidSpecError(accuracy.path("answerPattern"), f"needs output ExactAnswer, and output is {output}")
    if pattern:
        try:
            answer_pattern(str(pattern))
        except InvalidArgumentError as error:
            raise InvalidSpecError(accuracy.path("answerPattern"), str(error)) from error
    sampled = accuracy.choice("sampledAnswers", get_args(SampledAnswers), "Exact")
    return {"answer_pattern": str(pattern), "sampled_answers": sampled}


def parse_spec(value: Any) -> ServiceSpec:
    """Parse and check ``EarlyExitService.spec``.

    Raises
    ------
    InvalidSpecError
        ``field`` is the JSON path of the first mistake.
    """
    spec = _Reader(value, "spec", _SPEC_FIELDS)
    model = _model(spec.section("model", MODEL_FIELDS, required=True))
    objective = _objective(spec.section("objective", {"latency", "accuracy", "tiers", "overload"}, required=True))
    ramps = _ramps(spec.section("ramps", _RAMPS_FIELDS))
    execution = _execution(spec, objective)
    worker = _worker(spec)
    pools = _pools(spec, worker, objective)
    return ServiceSpec(
        **model,
        **objective,
        **ramps,
        execution=execution,
        deadline_answers=_deadline_answers(spec, execution, latency_seconds=objective["latency_seconds"]),
        cache_bytes=_cache_bytes(spec, execution),
        feedback_answers=_feedback_answers(spec),
        protocols=_protocols(spec),
        rollout=_rollout(spec.section("rollout", _ROLLOUT_FIELDS)),
        update_policy=_update_policy(
            spec.section("updatePolicy", {"type", "maxSurge", "surgeDeadline", "recreateDeadline", "sideBySide"})
        ),
        **_numbers(spec, pools),
        suspend=spec.boolean("suspend", default=False),
        worker=worker,
        pools=pools,
        **_sharing(spec, model, objective),
        edge=_edge(spec, pools, objective),
        route=_route(spec),
        deprecated=_deprecated(spec),
    )


def _percentile(latency: _Reader) -> float:
    """A whole number, or a quoted decimal as all decimals are."""
    value = latency.get("percentile", 95)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str) or not _PERCENTILE.fullmatch(str(value)):
        hint = f'must be a whole number or a quoted decimal from 50 to 99.999, such as 95 or "99.9"; got {value!r}'
        raise InvalidSpecError(latency.path("percentile"), hint)
    return float(value)


def _times(latency: _Reader, output: Judged) -> dict[str, Any]:
    """What the objective says of the whole reply, of the first token, and of each later one."""
    of_tokens = [name for name in ("timeToFirstToken", "timePerToken") if latency.get(name) is not None]
    if of_tokens and output not in GENERATED:
        raise InvalidSpecError(
            latency.path(of_tokens[0]), f"is about generated answers, and output is {output}; set threshold instead"
        )
    if not of_tokens and latency.get("threshold") is None:
        other = ", or timeToFirstToken or timePerToken" if output in GENERATED else ""
        raise InvalidSpecError(latency.path("threshold"), f"is required{other}, such as 40ms")

    return {
        "latency_percentile": _percentile(latency),
        "latency_seconds": latency.seconds("threshold", above_zero=True),
        "first_token_seconds": latency.seconds("timeToFirstToken", above_zero=True),
        "token_seconds": latency.seconds("timePerToken", above_zero=True),
    }


def _objective(objective: _Reader) -> dict[str, Any]:
    """How fast and how right: latency, budgets, and what an answer is."""
    latency = objective.section("latency", _LATENCY_FIELDS, required=True)
    accuracy = objective.section("accuracy", _ACCURACY_FIELDS, required=True)
    output = cast(Judged, accuracy.choice("output", (*TASKS, *GENERATED), "Top1"))
    slices = (*_slices(accuracy), *_classes(accuracy))
    if output != "Top1" and any(s.predicted is not None for s in slices):
        field_name = accuracy.path("everyClass" if "everyClass" in accuracy.value else "classes")
        raise InvalidSpecError(field_name, f"is of answers that name a class, and output is {output}; remove it")
    budget = _budget(accuracy, output)
    return {
        **_times(latency, output),
        "max_disagreement": budget,
        "tiers": (tiers := _tiers(objective, output, most=budget)),
        "overload": _overload(objective, output, least=budget, tiers=tiers),
        "confidence": accuracy.decimal("confidence", "0.95", low="0.5", high="1", exclude_low=True, exclude_high=True),
        "output": output,
        "slices": slices,
        **_generated(accuracy, output),
    }


def _ramps(ramps: _Reader) -> dict[str, Any]:
    """How exits are chosen, and what a plan may cost."""
    mode: Mode = ramps.choice("mode", get_args(Mode), "Auto")
    precision: AllowedPrecision = ramps.choice("precision", get_args(AllowedPrecision), "Auto")
    return {
        "mode": mode,
        "max_overhead": ramps.decimal("maxOverhead", "0.05", low="0", high="1", exclude_low=True),
        "max_active": ramps.integer("maxActive", 3, low=1, high=MAX_ACTIVE_RAMPS),
        "holdback": ramps.decimal("holdback", "0.02", low="0", high="0.5"),
        "precision": precision,
        "training": ramps.choice("training", get_args(Training), "Prepared"),
        "store_claim": _store_claim(ramps),
        "pin": _pin(ramps, mode, precision),
    }


def _model(model: _Reader) -> dict[str, Any]:
    """Where the bundle is, and what belongs to it."""
    return {
        **_source(model),
        "model_digest": model.optional_text("digest", _DIGEST.pattern, "write sha256: and 64 hex digits"),
    }


def _source(model: _Reader) -> dict[str, Any]:
    """Where a bundle is, and how it is fetched."""
    uri = model.text(
        "uri", _URI.pattern, "write oci://IMAGE, pvc://CLAIM/PATH, https://HOST/PATH, s3://BUCKET/KEY or file://PATH"
    )
    scheme = uri.partition("://")[0]
    if _LEADS_OUT.search(uri) and scheme == "pvc":
        raise InvalidSpecError(model.path("uri"), f"must name a folder of the claim, without '..'; got {uri!r}")
    for name in ("secretRef", "archiveDigest"):
        if name in model.value and not uri.startswith(FETCHED):
            raise InvalidSpecError(model.path(name), f"is for https:// and s3://; a {scheme}:// bundle is not fetched")
    for name in ("endpoint", "region"):
        if name in model.value and scheme != "s3":
            raise InvalidSpecError(model.path(name), "is for s3://; remove it")
    endpoint = model.optional_text("endpoint", _ENDPOINT.pattern, "write https://HOST or https://HOST:PORT")
    archive = model.optional_text("archiveDigest", _DIGEST.pattern, "write sha256: and 64 hex digits")
    if endpoint is not None and endpoint.startswith("http:") and archive is None:
        raise InvalidSpecError(model.path("endpoint"), "is not encrypted, which needs spec.model.archiveDigest")
    secret = model.section("secretRef", {"name"}) if "secretRef" in model.value else None
    return {
        "model_uri": uri,
        "archive_digest": archive,
        "model_endpoint": endpoint,
        "model_region": model.optional_text("region", _REGION.pattern, "write a region such as eu-central-1"),
        "model_secret": secret.text("name", _OBJECT_NAME.pattern, "name a Secret") if secret is not None else None,
    }


def _slices(accuracy: _Reader) -> tuple[SliceObjective, ...]:
    what = "slices with name and maxDisagreement"
    readers = accuracy.entries("slices", {"name", "maxDisagreement"}, most=MAX_SLICES, of=what)
    hint = "write lower-case letters, digits and '-', at most 32"
    slices = tuple(SliceObjective(r.text("name", _SLICE.pattern, hint), r.budget()) for r in readers)
    if len({slice_number(s.name) for s in slices}) != len(slices):
        raise InvalidSpecError(accuracy.path("slices"), "a slice is named twice")
    return slices


def _tiers(objective: _Reader, output: Judged, *, most: float) -> tuple[TierObjective, ...]:
    """The menu beside the budget of everybody, which no tier exceeds."""
    path, what = objective.path("tiers"), "tiers with name and maxDisagreement"
    readers = objective.entries("tiers", {"name", "maxDisagreement"}, most=MAX_TIERS, of=what)
    if readers and output in GENERATED:
        raise InvalidSpecError(path, f"is of models with exits, and output is {output}; remove it")
    hint = "write a label's name: letters, digits, '-', '_' and '.', at most 63"
    tiers = tuple(TierObjective(r.text("name", _TIER.pattern, hint), r.budget()) for r in readers)
    names = [t.name for t in tiers]
    if len(set(names)) != len(names):
        raise InvalidSpecError(path, "a tier is named twice")
    for reader, tier in zip(readers, tiers, strict=True):
        if tier.name == DEFAULT_TIER:
            raise InvalidSpecError(reader.path("name"), f"{DEFAULT_TIER} is the budget in accuracy; use another name")
        if tier.name == OVERLOAD:
            raise InvalidSpecError(
                reader.path("name"), f"{OVERLOAD} is the budget in objective.overload; use another name"
            )
        if tier.max_disagreement > most:
            raise InvalidSpecError(
                reader.path("maxDisagreement"),
                f"{tier.max_disagreement:g} is above accuracy.maxDisagreement {most:g}; a tier only tightens",
            )
    return tiers


def _execution(spec: _Reader, objective: Mapping[str, Any]) -> Execution:
    """Results-only execution spares nothing, so no budget for overload goes with it."""
    execution: Execution = spec.choice("execution", get_args(Execution), "Auto")
    if objective["overload"] is not None and execution == "ResultsOnly":
        raise InvalidSpecError(
            "spec.objective.overload", "spares nothing with execution ResultsOnly; remove it, or set execution to Auto"
        )
    return execution


def _overload(objective: _Reader, output: Judged, *, least: float, tiers: Sequence[TierObjective]) -> float | None:
    """The budget of requests that could not be answered in time otherwise, which is above everybody's."""
    if objective.get("overload") is None:
        return None
    reader = objective.section("overload", {"maxDisagreement"})
    if output in GENERATED:
        raise InvalidSpecError(
            objective.path("overload"), f"is of models with exits, and output is {output}; remove it"
        )
    budget = reader.budget()
    if budget <= least:
        raise InvalidSpecError(
            reader.path("maxDisagreement"),
            f"{budget:g} is not above accuracy.maxDisagreement {least:g}, which requests have at any time; raise it",
        )
    if len(tiers) >= MAX_TIERS:
        raise InvalidSpecError(objective.path("tiers"), f"list at most {MAX_TIERS - 1} tiers beside overload")
    return budget


def _store_claim(ramps: _Reader) -> str | None:
    if "store" not in ramps.value:
        return None
    store = ramps.section("store", {"claimName"})
    return store.text("claimName", _OBJECT_NAME.pattern, "name a PersistentVolumeClaim of the service's namespace")


def _classes(accuracy: _Reader) -> tuple[SliceObjective, ...]:
    """Slices of the answers that name a class, lowest class first; a class that has a budget of its own keeps it beside
    ``everyClass``."""
    what = "classes with class and maxDisagreement"
    readers = accuracy.entries("classes", {"class", "maxDisagreement"}, most=MAX_CLASSES, of=what)
    budgets: dict[int, float] = {}
    if "everyClass" in accuracy.value:
        every = accuracy.section("everyClass", {"count", "maxDisagreement"})
        budgets = dict.fromkeys(range(every.integer("count", None, low=2, high=MAX_EVERY_CLASS)), every.budget())
    own = [(r.integer("class", None, low=0, high=MAX_CLASS), r.budget()) for r in readers]
    if len(dict(own)) != len(own):
        raise InvalidSpecError(accuracy.path("classes"), "a class is named twice")
    budgets.update(own)
    return tuple(SliceObjective(class_slice(number), budgets[number]) for number in sorted(budgets))


def _pin(ramps: _Reader, mode: Mode, allowed: AllowedPrecision) -> Pin | None:
    if ("pin" in ramps.value) != (mode == "Pinned"):
        raise InvalidSpecError(
            "spec.ramps.pin", "ramps.pin and ramps.mode: Pinned need each other; set both or neither"
        )
    if mode != "Pinned":
        return None
    pin = ramps.section("pin", {"ramps", "rampSetDigest", "precision"})
    try:
        precision = check_precision(pin.get("precision", EXACT))
    except InvalidArgumentError as error:
        raise InvalidSpecError(pin.path("precision"), str(error)) from error
    if precision != EXACT and allowed == "Exact":
        raise InvalidSpecError(pin.path("precision"), f"is {precision}; ramps.precision Exact allows {EXACT} alone")
    entries, fewest = pin.get("ramps"), 1 if precision == EXACT else 0
    if not isinstance(entries, list) or not fewest <= len(entries) <= MAX_ACTIVE_RAMPS:
        raise InvalidSpecError(
            pin.path("ramps"), f"list between {fewest} and {MAX_ACTIVE_RAMPS} ramps with id and threshold"
        )
    thresholds = []
    for index, entry in enumerate(entries):
        reader = _Reader(entry, f"{pin.path('ramps')}[{index}]", {"id", "threshold"})
        ramp_id = reader.text("id", r"^.{1,64}$", "give the ramp's id as `offramp prepare` printed it")
        try:
            thresholds.append(RampThreshold(ramp_id, Decimal(str(reader.get("threshold")))))
        except (InvalidOperation, InvalidArgumentError) as error:
            raise InvalidSpecError(
                reader.path("threshold"), f"write a decimal in [0, 1] with at most 6 decimals ({error})"
            ) from error
    if len({ramp.id for ramp in thresholds}) != len(thresholds):
        raise InvalidSpecError(pin.path("ramps"), "a ramp is named twice")
    digest = pin.optional_text("rampSetDigest", _DIGEST.pattern, "write sha256: and 64 hex digits")
    return Pin(tuple(thresholds), digest, precision)


def _deadline_answers(spec: _Reader, execution: Execution, *, latency_seconds: float | None) -> DeadlineAnswers:
    answers: DeadlineAnswers = spec.choice("deadlineAnswers", get_args(DeadlineAnswers), "OnRequest")
    if answers == "Always" and execution == "ResultsOnly":
        raise InvalidSpecError(
            spec.path("deadlineAnswers"),
            "Always is of no use with execution ResultsOnly, which audits every request; change one of them",
        )
    if answers == "Always" and latency_seconds is None:
        raise InvalidSpecError(spec.path("deadlineAnswers"), "Always needs objective.latency.threshold; name one")
    return answers


def _cache_bytes(spec: _Reader, execution: Execution) -> int:
    if "predictionCache" not in spec.value:
        return 0
    if execution == "ResultsOnly":
        raise InvalidSpecError(
            spec.path("predictionCache"),
            "is of no use with execution ResultsOnly, which runs and compares every request; change one of them",
        )
    cache = spec.section("predictionCache", {"sizeLimit"})
    return parse_size(cache.get("sizeLimit"), cache.path("sizeLimit"))


def _feedback_answers(spec: _Reader) -> int:
    if "feedback" not in spec.value:
        return 0
    return spec.section("feedback", {"maxAnswers"}).integer("maxAnswers", None, low=1, high=MAX_FEEDBACK_ANSWERS)


def _protocols(spec: _Reader) -> tuple[Protocol, ...]:
    given = spec.get("protocols", ["HTTP"])
    known = get_args(Protocol)
    if not isinstance(given, list) or any(p not in known for p in given) or len(set(given)) != len(given):
        raise InvalidSpecError(spec.path("protocols"), f"list each of {', '.join(known)} at most once; got {given!r}")
    if "HTTP" not in given:
        raise InvalidSpecError(spec.path("protocols"), "must contain HTTP, which the probes of the workers use")
    return tuple(cast(Protocol, p) for p in known if p in given)


def _rollout(reader: _Reader) -> RolloutPolicy:
    default = RolloutPolicy()
    steps = default.steps
    if "steps" in reader.value:
        what = "steps, for example [{weight: 5}, {weight: 50}]"
        steps = tuple(
            Step(r.integer("weight", None, low=1, high=100), r.seconds("pause", above_zero=True) or 0.0)
            for r in reader.entries("steps", {"weight", "pause"}, most=MAX_STEPS, fewest=1, of=what)
        )
    weights = [step.weight for step in steps]
    if any(b <= a for a, b in pairwise(weights)):
        raise InvalidSpecError(reader.path("steps"), f"weights must rise from step to step; got {weights}")
    return RolloutPolicy(
        promotion=reader.choice("promotion", get_args(Promotion), default.promotion),
        on_inconclusive=reader.choice("onInconclusive", get_args(OnInconclusive), default.on_inconclusive),
        confidence=reader.decimal("confidence", "0.99", low="0.5", high="1", exclude_low=True, exclude_high=True),
        step_deadline_seconds=reader.seconds("stepDeadline", "1h", above_zero=True),
        cooldown_seconds=reader.seconds("cooldown", "1h"),
        rollback_window=reader.integer("rollbackWindow", default.rollback_window, low=0, high=20),
        history_limit=reader.integer("historyLimit", default.history_limit, low=1, high=100),
        steps=steps,
    )


def _update_policy(reader: _Reader) -> UpdatePolicy:
    kind: UpdateType = reader.choice("type", get_args(UpdateType), "Auto")
    if kind == "Recreate" and "sideBySide" in reader.value:
        raise InvalidSpecError(
            reader.path("sideBySide"), "serves two models at a time, type Recreate has room for one; remove one of them"
        )
    return UpdatePolicy(
        type=kind,
        max_surge=_number_or_share(reader, "maxSurge"),
        surge_deadline_seconds=reader.seconds("surgeDeadline", "5m"),
        recreate_deadline_seconds=reader.seconds("recreateDeadline", "10m", above_zero=True),
        side_by_side=_side_by_side(reader) if "sideBySide" in reader.value else None,
    )


def _number_or_share(reader: _Reader, name: str) -> int | str:
    """Of workers, from 1 on; 1 where nothing is said."""
    value = reader.get(name, 1)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str) or not _NUMBER_OR_SHARE.fullmatch(str(value)):
        hint = (
            f"must be a whole number from 1 to {MAX_REPLICAS} or a share from 1% to 100%, such as 2 or 10%; got "
            f"{value!r}"
        )
        raise InvalidSpecError(reader.path(name), hint)
    return value if str(value).endswith("%") else int(value)


def _side_by_side(policy: _Reader) -> SideBySide:
    reader = policy.section("sideBySide", {"weight", "pause", "promotion", "deadline", "gateway"})
    default = SideBySide()
    return SideBySide(
        weight=reader.integer("weight", default.weight, low=1, high=MAX_TRIAL_WEIGHT),
        pause_seconds=reader.seconds("pause", "10m"),
        promotion=reader.choice("promotion", get_args(Promotion), default.promotion),
        deadline_seconds=reader.seconds("deadline", "1h", above_zero=True),
    )


def _route(spec: _Reader) -> Route | None:
    """``spec.route``; until the next release also where it stood before."""
    old = spec.mapping("updatePolicy").get("sideBySide")
    old = old if isinstance(old, Mapping) and old.get("gateway") is not None else None
    if "route" in spec.value:
        if old is not None:
            hint = "takes the place of updatePolicy.sideBySide.gateway; remove the latter"
            raise InvalidSpecError(spec.path("route"), hint)
        return _gateways(spec.section("route", _ROUTE_FIELDS))
    return None if old is None else _gateways(_Reader(old["gateway"], f"spec.{OLD_ROUTE}", _ROUTE_FIELDS))


def _deprecated(spec: _Reader) -> tuple[str, ...]:
    """What the spec says that the next release will not read: one sentence each, with what to write instead."""
    found = []
    policy = spec.section("batching", {"policy"}).choice("policy", get_args(BatchingPolicy), "Offramp")
    if policy != "Offramp":
        found.append(f"spec.batching.policy {policy} was for experiments and changes nothing any more; remove batching")
    side = spec.mapping("updatePolicy").get("sideBySide")
    if isinstance(side, Mapping) and side.get("gateway") is not None:
        found.append(f"spec.{OLD_ROUTE} is called spec.route now; move it there")
    return tuple(found)


def _gateways(reader: _Reader) -> Route:
    what, names = "Gateways, for example [{name: public}]", reader.get("hostnames", [])
    known = {"group", "kind", "namespace", "name", "sectionName", "port"}
    parents = tuple(map(_parent, reader.entries("parentRefs", known, most=MAX_PARENTS, fewest=1, of=what)))
    if len(set(parents)) != len(parents):
        raise InvalidSpecError(reader.path("parentRefs"), "a parent is named twice")
    good = isinstance(names, list) and all(
        isinstance(n, str) and _HOSTNAME.fullmatch(n) and len(n) <= 253 for n in names
    )
    good = good and len(set(names)) == len(names)
    if not good or len(names) > MAX_HOSTNAMES:
        hint = "host names, each once and in lower case, such as models.example.com or *.example.com"
        raise InvalidSpecError(reader.path("hostnames"), f"list at most {MAX_HOSTNAMES} {hint}; got {names!r}")
    return Route(parents, tuple(names))


def _parent(reader: _Reader) -> tuple[tuple[str, str | int], ...]:
    reader.text("name", _OBJECT_NAME.pattern, "name a Gateway")
    reader.optional_text("namespace", _NAMESPACE.pattern, "name a namespace")
    reader.optional_text("sectionName", _OBJECT_NAME.pattern, "name a listener of the Gateway")
    reader.optional_text("group", _API_GROUP.pattern, "write an API group, or '' for that of Services")
    reader.optional_text("kind", _KIND.pattern, "write a kind, such as Gateway or Service")
    if "port" in reader.value:
        reader.integer("port", None, low=1, high=65535)
    return tuple(sorted(reader.value.items()))


def _worker(spec: _Reader) -> Mapping[str, Any]:
    worker = spec.mapping("worker")
    _class_name(worker.get("className"), spec.path("worker.className"))
    if worker.get("disruptionBudget") is not None:
        budget = _Reader(worker["disruptionBudget"], spec.path("worker.disruptionBudget"), {"maxUnavailable"})
        _number_or_share(budget, "maxUnavailable")
    return worker


def _class_name(value: Any, path: str) -> None:
    if value is not None and not (isinstance(value, str) and _OBJECT_NAME.fullmatch(value)):
        raise InvalidSpecError(path, f"must name a WorkerClass; got {value!r}")


def _pools(spec: _Reader, worker: Mapping[str, Any], objective: Mapping[str, Any]) -> tuple[WorkerPool, ...]:
    """The kinds of nodes that workers run on, each with workers of its own."""
    if "pools" not in spec.value:
        return ()
    entries, path = spec.get("pools"), spec.path("pools")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_POOLS:
        raise InvalidSpecError(path, f"list between 1 and {MAX_POOLS} pools with name and replicas, or with maxWorkers")
    for other in ("replicas", "autoscaling"):
        if other in spec.value:
            raise InvalidSpecError(path, f"say how many workers there are; remove spec.{other}")
    policy = spec.mapping("updatePolicy")
    if policy.get("sideBySide") is not None or policy.get("type") == "Recreate":
        what = "sideBySide" if policy.get("sideBySide") is not None else "type Recreate"
        raise InvalidSpecError(path, f"cannot be together with updatePolicy.{what}; remove one of them")
    found = tuple(
        _pool(_Reader(e, f"{path}[{i}]", {"name", "model", *_POOL_NUMBERS, *POOL_OWN}), worker)
        for i, e in enumerate(entries)
    )
    if len({pool.name for pool in found}) != len(found):
        raise InvalidSpecError(path, "a pool is named twice")
    classes = [e["className"] for e in entries if e.get("className")]
    if len(set(classes)) != len(classes):
        raise InvalidSpecError(path, "two name one className; give each a WorkerClass of its own, or make one of them")
    if sum(max(pool.replicas, pool.most) for pool in found) > MAX_REPLICAS:
        raise InvalidSpecError(path, f"ask for more than {MAX_REPLICAS} workers")
    for name, given in (("replicas", {p.fixed for p in found}), ("maxWorkers", {p.max_workers is None for p in found})):
        if len(given) > 1:
            raise InvalidSpecError(path, f"some have {name} and others not; write it for all of them, or for none")
    if found[0].max_workers is not None and (objective["latency_seconds"] is None or objective["output"] in GENERATED):
        raise InvalidSpecError(path, "are planned by latency.threshold of whole replies; write replicas of each pool")
    _check_own_bundles(found, path, generates=objective["output"] in GENERATED)
    return found


def _check_own_bundles(pools: Sequence[WorkerPool], path: str, *, generates: bool) -> None:
    own = [i for i, pool in enumerate(pools) if pool.bundle]
    if own and generates:
        raise InvalidSpecError(f"{path}[{own[0]}].model", "is of models with exits; one that generates has one bundle")
    if len(own) == len(pools):
        raise InvalidSpecError(path, "have a model each; leave it out of the pool that serves spec.model")


def _numbers(spec: _Reader, pools: Sequence[WorkerPool]) -> dict[str, Any]:
    """How many workers there are, or who decides on that and by which figures."""
    replicas = sum(p.replicas for p in pools) if pools else spec.integer("replicas", 1, low=0, high=MAX_REPLICAS)
    return {"replicas": replicas, "autoscaling": _autoscaling(spec), "counts_exits": _counts_exits(spec, pools)}


def _counts_exits(spec: _Reader, pools: Sequence[WorkerPool]) -> bool:
    """Whether planned workers need not suffice with exits off."""
    if "poolPlan" not in spec.value:
        return False
    if not pools or pools[0].max_workers is None:
        raise InvalidSpecError(
            spec.path("poolPlan"), "is about pools with costPerHour and maxWorkers; give them these, or remove it"
        )
    plan = spec.section("poolPlan", {"noExitFloor"})
    counts = plan.choice("noExitFloor", ("Reserve", "None"), "Reserve") == "None"
    if counts and any(pool.bundle for pool in pools):
        why = "None counts on what exits save, which is certified for spec.model's device alone; write Reserve"
        raise InvalidSpecError(plan.path("noExitFloor"), why)
    return counts


def _sharing(spec: _Reader, model: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, Any]:
    """The pool that serves it, whose workers are the pool's to describe, and when those let it go from memory."""
    if "sharing" not in spec.value:
        return {}
    sharing = spec.section("sharing", {"pool", "unloadAfterSeconds"})
    name = sharing.text("pool", _OBJECT_NAME.pattern, "name a WorkerPool of the service's namespace")
    for other in ("worker", "pools", "edge", "autoscaling", "route"):
        if other in spec.value:
            why = f"is about workers of the service's own, and those of WorkerPool {name} serve it; remove it"
            raise InvalidSpecError(spec.path(other), why)
    policy = spec.mapping("updatePolicy")
    if policy.get("sideBySide") is not None or policy.get("type") == "Recreate":
        what = "sideBySide" if policy.get("sideBySide") is not None else "type"
        raise InvalidSpecError(spec.path(f"updatePolicy.{what}"), "needs workers of the service's own; remove it")
    if spec.mapping("ramps").get("store") is not None:
        raise InvalidSpecError(spec.path("ramps.store"), "needs workers of the service's own; remove it, or sharing")
    if objective["output"] in GENERATED:
        raise InvalidSpecError(spec.path("sharing"), "is of models with exits; one that generates is served alone")
    if not model["model_uri"].startswith("pvc://"):
        raise InvalidSpecError(
            spec.path("model.uri"), "must be pvc://CLAIM/PATH with sharing: a worker that serves mounts nothing new"
        )
    after = None
    if "unloadAfterSeconds" in sharing.value:
        after = sharing.integer("unloadAfterSeconds", None, low=LEAST_UNLOAD_SECONDS, high=MOST_UNLOAD_SECONDS)
    return {"shared_pool": name, "unload_after_seconds": after}


def _edge(spec: _Reader, pools: Sequence[WorkerPool], objective: Mapping[str, Any]) -> Edge | None:
    """Which workers are at the edge. The others are their core."""
    if "edge" not in spec.value:
        return None
    edge = spec.section("edge", {"pool", "uplink", "residue", "offline"})
    name = edge.text("pool", _POOL.pattern, "name one of spec.pools")
    names = [pool.name for pool in pools]
    if name not in names:
        there = f"it has {', '.join(names)}" if names else "there are none"
        raise InvalidSpecError(edge.path("pool"), f"names no pool of spec.pools ({there}); add {name} there")
    if len(names) == 1:
        raise InvalidSpecError(edge.path("pool"), "is the only pool; add another one, whose workers are the core")
    if EDGES in names:
        raise InvalidSpecError(
            spec.path("pools"), f"{EDGES} names the Service of the workers at the edge; use another name"
        )
    if any(pool.max_workers is not None for pool in pools):
        raise InvalidSpecError(spec.path("edge"), "is for pools with replicas; remove costPerHour and maxWorkers there")
    if objective["output"] in GENERATED:
        raise InvalidSpecError(spec.path("edge"), "is of models with exits; one that generates has none, remove it")
    uplink = edge.get("uplink", "")
    if "uplink" in edge.value and not (isinstance(uplink, str) and bytes_per_second(uplink) > 0):
        hint = f"must be a rate above 0 such as 500kbit or 10Mbit, or left out to be measured; got {uplink!r}"
        raise InvalidSpecError(edge.path("uplink"), hint)
    residue: Residue = edge.choice("residue", RESIDUES, "Auto")
    return Edge(name, uplink, residue, edge.choice("offline", OFFLINE, "Refuse"))


def _pool(reader: _Reader, worker: Mapping[str, Any]) -> WorkerPool:
    name = reader.text("name", _POOL.pattern, "write lower-case letters, digits and '-', at most 20")
    if name in TAKEN_POOLS:
        raise InvalidSpecError(reader.path("name"), f"{name} names a Service of versions; use another name")
    own = {field_name: reader.get(field_name) for field_name in POOL_OWN if reader.get(field_name)}
    _class_name(own.get("className"), reader.path("className"))
    model = reader.section("model", MODEL_FIELDS - {"digest"}) if "model" in reader.value else None
    bundle = {} if model is None else _source(model)
    if bundle and bundle["model_uri"].startswith("file://"):
        raise InvalidSpecError(reader.path("model.uri"), "must be oci://, pvc://, https:// or s3://, as pods have it")
    return WorkerPool(name, worker={**worker, **own}, **_pool_numbers(reader), bundle=bundle)


def _pool_numbers(reader: _Reader) -> dict[str, Any]:
    """How many workers there are, or between what limits the operator decides on them."""
    given = set(reader.value) & set(_POOL_NUMBERS)
    if not given & {"replicas", "maxWorkers"}:
        raise InvalidSpecError(
            reader.path("replicas"), "say how many workers the pool has, or costPerHour and maxWorkers"
        )
    if ("costPerHour" in given) != ("maxWorkers" in given) or ("minWorkers" in given and "maxWorkers" not in given):
        missing = "costPerHour" if "maxWorkers" in given else "maxWorkers"
        raise InvalidSpecError(reader.path(missing), "is missing; costPerHour and maxWorkers belong together")
    fixed = "replicas" in given
    numbers: dict[str, Any] = {"fixed": fixed}
    numbers["replicas"] = reader.integer("replicas", None, low=0, high=MAX_REPLICAS) if fixed else 0
    if "maxWorkers" not in given:
        return numbers
    fewest = reader.integer("minWorkers", 0, low=0, high=MAX_REPLICAS)
    most = reader.integer("maxWorkers", None, low=max(1, fewest), high=MAX_REPLICAS)
    cost = reader.decimal("costPerHour", None, low="0.0001", high="100000")
    return {**numbers, "cost_per_hour": cost, "min_workers": fewest, "max_workers": most}


def _autoscaling(spec: _Reader) -> Autoscaling | None:
    if "autoscaling" not in spec.value:
        return None
    if "replicas" in spec.value:
        raise InvalidSpecError(spec.path("autoscaling"), "decides on the number of workers; remove spec.replicas")
    reader = spec.section("autoscaling", {"minReplicas", "maxReplicas", "targetInFlight", "noExitFloor"})
    fewest = reader.integer("minReplicas", 1, low=1, high=MAX_REPLICAS)
    return Autoscaling(
        max_replicas=reader.integer("maxReplicas", None, low=fewest, high=MAX_REPLICAS),
        target_in_flight=reader.integer("targetInFlight", None, low=1, high=MAX_IN_FLIGHT),
        min_replicas=fewest,
        no_exit_floor=reader.choice("noExitFloor", get_args(NoExitFloor), "Reserve"),
    )


class _Reader:
    """Reads one JSON object; every complaint carries the full path."""

    def __init__(self, value: Any, where: str, known: set[str]) -> None:
        if not isinstance(value, Mapping):
            raise InvalidSpecError(where, f"must be an object, got {value!r}")
        unknown = sorted(map(str, set(value) - known))
        if unknown:
            raise InvalidSpecError(f"{where}.{unknown[0]}", f"unknown field; known are {', '.join(sorted(known))}")
        # As the API server has it: a field that is null is a field that is not there.
        self.value, self.where = {name: each for name, each in value.items() if each is not None}, where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        return self.value.get(name, default)

    def section(self, name: str, known: set[str], *, required: bool = False) -> _Reader:
        if name not in self.value and required:
            raise InvalidSpecError(self.path(name), "required")
        return _Reader(self.value.get(name, {}), self.path(name), known)

    def entries(self, name: str, known: set[str], *, most: int, fewest: int = 0, of: str) -> list[_Reader]:
        """A list of objects; ``of`` says what belongs there."""
        value, between = self.value.get(name, []), f"between {fewest} and" if fewest else "at most"
        if not isinstance(value, list) or not fewest <= len(value) <= most:
            raise InvalidSpecError(self.path(name), f"list {between} {most} {of}")
        return [_Reader(entry, f"{self.path(name)}[{i}]", known) for i, entry in enumerate(value)]

    def seconds(self, name: str, default: str | None = None, *, above_zero: bool = False) -> Any:
        """A duration; None only where it is not there and has no default."""
        value = self.value.get(name, default)
        if value is None:
            return None
        seconds = parse_duration(value, self.path(name))
        if above_zero and seconds <= 0:
            raise InvalidSpecError(self.path(name), "must be longer than 0")
        return seconds

    def budget(self) -> float:
        """``maxDisagreement``, which has no default."""
        return self.decimal("maxDisagreement", None, low="0", high="0.5", exclude_low=True)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.value.get(name, {})
        if not isinstance(value, Mapping):
            raise InvalidSpecError(self.path(name), f"must be an object, got {value!r}")
        return value

    def text(self, name: str, pattern: str, hint: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise InvalidSpecError(self.path(name), f"{hint}; got {value!r}")
        return value

    def optional_text(self, name: str, pattern: str, hint: str) -> str | None:
        return self.text(name, pattern, hint) if name in self.value else None

    def choice(self, name: str, options: tuple[W, ...], default: W) -> W:
        value = self.value.get(name, default)
        if value not in options:
            raise InvalidSpecError(self.path(name), f"must be one of {', '.join(options)}; got {value!r}")
        return cast(W, value)

    def integer(self, name: str, default: int | None, *, low: int, high: int) -> int:
        value = self.value.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number, and the API server keeps a 2.0 as it came
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidSpecError(self.path(name), f"must be a whole number from {low} to {high}; got {value!r}")
        return value

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.value.get(name, default)
        if not isinstance(value, bool):
            raise InvalidSpecError(self.path(name), f"must be true or false; got {value!r}")
        return value

    def decimal(
        self,
        name: str,
        default: str | None,
        *,
        low: str,
        high: str,
        exclude_low: bool = False,
        exclude_high: bool = False,
    ) -> float:
        text = self.value.get(name, default)
        value = Decimal(text) if isinstance(text, str) and _DECIMAL.fullmatch(text) else None
        below = value is None or value < Decimal(low) or (exclude_low and value == Decimal(low))
        if below or value > Decimal(high) or (exclude_high and value == Decimal(high)):  # type: ignore[operator]
            left, right = "(" if exclude_low else "[", ")" if exclude_high else "]"
            raise InvalidSpecError(
                self.path(name),
                f'must be a decimal string in {left}{low}, {high}{right}, for example "0.01"; got {text!r}',
            )
        return float(cast(Decimal, value))
