"""The user's intent: ``EarlyExitService.spec``, parsed once into typed values.

The CRD refuses the same mistakes at the API server; this parser is the door of the embedded shell and the
second lock of the operator. Shares, probabilities and seconds are plain floats from here on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any, Literal, cast, get_args

from offramp_core.columns import EXACT
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.plan import MAX_ACTIVE_RAMPS, PRECISIONS, Execution, Precision, RampThreshold

Mode = Literal["Auto", "Recommend", "Pinned", "Disabled"]
Promotion = Literal["Automatic", "Manual"]
OnInconclusive = Literal["Abort", "Hold"]
AllowedPrecision = Literal["Auto", "Exact"]
BatchingPolicy = Literal["Offramp", "TFServing", "Clockwork"]
DeadlineAnswers = Literal["OnRequest", "Always"]
Protocol = Literal["HTTP", "GRPC"]

_DURATION = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h)$")
_UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_SIZE = re.compile(r"^([1-9][0-9]{0,11})(Ki|Mi|Gi)?$")
_UNIT_BYTES = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
MAX_NAME_LENGTH = 40
MAX_CACHE_BYTES = 2**40
MAX_STEPS = 12


@dataclass(frozen=True, slots=True)
class Step:
    """One canary step: the share of batches in percent, and how long to stay at least."""

    weight: int
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """How plans are canaried.

    ``confidence`` is that of all gates of one rollout together but accuracy, which has its budget's. A plan among the newest
    ``rollback_window`` promoted ones comes back by the last step alone. ``history_limit`` finished rollouts are kept.
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
class Pin:
    """The user's own thresholds, in the order given, and the precision they are for; optionally tied to one ramp set."""

    ramps: tuple[RampThreshold, ...]
    ramp_set_digest: str | None = None
    precision: Precision = EXACT


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A parsed ``EarlyExitService.spec``. ``worker`` is the allow-listed template, for the shell that renders it.

    ``cache_bytes`` of 0 is no prediction cache.
    """

    model_uri: str
    latency_seconds: float
    max_disagreement: float
    model_digest: str | None = None
    latency_percentile: int = 95
    confidence: float = 0.95
    mode: Mode = "Auto"
    max_overhead: float = 0.05
    max_active: int = 3
    precision: AllowedPrecision = "Auto"
    pin: Pin | None = None
    execution: Execution = "Auto"
    batching: BatchingPolicy = "Offramp"
    deadline_answers: DeadlineAnswers = "OnRequest"
    cache_bytes: int = 0
    protocols: tuple[Protocol, ...] = ("HTTP",)
    rollout: RolloutPolicy = RolloutPolicy()
    replicas: int = 1
    suspend: bool = False
    worker: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective_key(self) -> str:
        """What a certified plan was tuned for; a plan proposed under another key is not comparable."""
        key = f"{self.max_disagreement:g}/{self.confidence:g}/{self.max_overhead:g}/{self.max_active}/{self.execution}"
        return key if self.precision == "Auto" else f"{key}/{self.precision}"

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions of the backbone that a plan may run at."""
        return PRECISIONS if self.precision == "Auto" else (EXACT,)


def parse_duration(text: Any, field_name: str) -> float:
    """``40ms``, ``1.5s``, ``2h`` → seconds."""
    match = _DURATION.match(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidSpecError(field_name, f"{text!r} is not a duration; write for example 40ms, 1.5s or 2h")
    return float(match[1]) * _UNIT_SECONDS[match[2]]


def check_name(name: Any) -> str:
    """A service name: DNS-1035, at most 40 characters, because child names append a hash."""
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > MAX_NAME_LENGTH:
        raise InvalidSpecError(
            "metadata.name",
            f"{name!r} must be lower-case letters, digits and '-', start with a letter, at most {MAX_NAME_LENGTH} long",
        )
    return name


def parse_spec(value: Any) -> ServiceSpec:
    """Parse and check ``EarlyExitService.spec``.

    Raises
    ------
    InvalidSpecError
        ``field`` is the JSON path of the first mistake.
    """
    spec = _Reader(
        value, "spec",
        {"model", "objective", "ramps", "execution", "batching", "deadlineAnswers", "predictionCache", "protocols", "rollout", "replicas", "suspend", "worker"},
    )  # fmt: skip
    model = spec.section("model", {"uri", "digest"}, required=True)
    objective = spec.section("objective", {"latency", "accuracy"}, required=True)
    latency = objective.section("latency", {"percentile", "threshold"}, required=True)
    accuracy = objective.section("accuracy", {"maxDisagreement", "confidence", "output"}, required=True)
    accuracy.choice("output", ("Top1",), "Top1")
    ramps = spec.section("ramps", {"mode", "maxOverhead", "maxActive", "precision", "pin"})
    mode = cast(Mode, ramps.choice("mode", get_args(Mode), "Auto"))
    precision = cast(AllowedPrecision, ramps.choice("precision", get_args(AllowedPrecision), "Auto"))
    execution = cast(Execution, spec.choice("execution", get_args(Execution), "Auto"))
    return ServiceSpec(
        model_uri=model.text("uri", r"^(oci|file)://.+", "start it with oci:// or file://"),
        model_digest=model.optional_text("digest", _DIGEST.pattern, "write sha256: and 64 hex digits"),
        latency_percentile=latency.integer("percentile", 95, low=50, high=99),
        latency_seconds=_positive(
            parse_duration(latency.get("threshold"), latency.path("threshold")), latency.path("threshold")
        ),
        max_disagreement=accuracy.decimal("maxDisagreement", None, low="0", high="0.5", exclude_low=True),
        confidence=accuracy.decimal("confidence", "0.95", low="0.5", high="1", exclude_low=True, exclude_high=True),
        mode=mode,
        max_overhead=ramps.decimal("maxOverhead", "0.05", low="0", high="1", exclude_low=True),
        max_active=ramps.integer("maxActive", 3, low=1, high=MAX_ACTIVE_RAMPS),
        precision=precision,
        pin=_pin(ramps, mode, precision),
        execution=execution,
        batching=cast(
            BatchingPolicy, spec.section("batching", {"policy"}).choice("policy", get_args(BatchingPolicy), "Offramp")
        ),
        deadline_answers=_deadline_answers(spec, execution),
        cache_bytes=_cache_bytes(spec, execution),
        protocols=_protocols(spec),
        rollout=_rollout(
            spec.section(
                "rollout",
                {
                    "promotion",
                    "onInconclusive",
                    "confidence",
                    "stepDeadline",
                    "cooldown",
                    "rollbackWindow",
                    "historyLimit",
                    "steps",
                },
            )
        ),
        replicas=spec.integer("replicas", 1, low=0, high=1000),
        suspend=spec.boolean("suspend", default=False),
        worker=spec.mapping("worker"),
    )


def _pin(ramps: _Reader, mode: Mode, allowed: AllowedPrecision) -> Pin | None:
    if ("pin" in ramps.value) != (mode == "Pinned"):
        raise InvalidSpecError(
            "spec.ramps.pin", "ramps.pin and ramps.mode: Pinned need each other; set both or neither"
        )
    if mode != "Pinned":
        return None
    pin = ramps.section("pin", {"ramps", "rampSetDigest", "precision"})
    precision = cast(Precision, pin.choice("precision", PRECISIONS, EXACT))
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


def _deadline_answers(spec: _Reader, execution: Execution) -> DeadlineAnswers:
    answers = cast(DeadlineAnswers, spec.choice("deadlineAnswers", get_args(DeadlineAnswers), "OnRequest"))
    if answers == "Always" and execution == "ResultsOnly":
        raise InvalidSpecError(
            spec.path("deadlineAnswers"),
            "Always is of no use with execution ResultsOnly, which audits every request; change one of them",
        )
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
    text = cache.get("sizeLimit")
    match = _SIZE.match(text) if isinstance(text, str) else None
    size = int(match[1]) * _UNIT_BYTES[match[2]] if match else 0
    if not 0 < size <= MAX_CACHE_BYTES:
        raise InvalidSpecError(
            cache.path("sizeLimit"),
            f"must be a whole number from 1 on with no unit or Ki, Mi or Gi, at most 1Ti, such as 256Mi; got {text!r}",
        )
    return size


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
        entries = reader.get("steps")
        if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_STEPS:
            raise InvalidSpecError(
                reader.path("steps"),
                f"list between 1 and {MAX_STEPS} steps, for example [{{weight: 5}}, {{weight: 50}}]",
            )
        steps = tuple(
            _step(_Reader(entry, f"{reader.path('steps')}[{i}]", {"weight", "pause"}))
            for i, entry in enumerate(entries)
        )
    weights = [step.weight for step in steps]
    if any(b <= a for a, b in pairwise(weights)):
        raise InvalidSpecError(reader.path("steps"), f"weights must rise from step to step; got {weights}")
    return RolloutPolicy(
        promotion=cast(Promotion, reader.choice("promotion", get_args(Promotion), default.promotion)),
        on_inconclusive=cast(
            OnInconclusive, reader.choice("onInconclusive", get_args(OnInconclusive), default.on_inconclusive)
        ),
        confidence=reader.decimal("confidence", "0.99", low="0.5", high="1", exclude_low=True, exclude_high=True),
        step_deadline_seconds=_positive(
            parse_duration(reader.get("stepDeadline", "1h"), reader.path("stepDeadline")), reader.path("stepDeadline")
        ),
        cooldown_seconds=parse_duration(reader.get("cooldown", "1h"), reader.path("cooldown")),
        rollback_window=reader.integer("rollbackWindow", default.rollback_window, low=0, high=20),
        history_limit=reader.integer("historyLimit", default.history_limit, low=1, high=100),
        steps=steps,
    )


def _step(reader: _Reader) -> Step:
    pause = 0.0
    if "pause" in reader.value:
        pause = _positive(parse_duration(reader.get("pause"), reader.path("pause")), reader.path("pause"))
    return Step(reader.integer("weight", None, low=1, high=100), pause)


def _positive(seconds: float, field_name: str) -> float:
    if seconds <= 0:
        raise InvalidSpecError(field_name, "must be longer than 0")
    return seconds


class _Reader:
    """Reads one JSON object; every complaint carries the full path."""

    def __init__(self, value: Any, where: str, known: set[str]) -> None:
        if not isinstance(value, Mapping):
            raise InvalidSpecError(where, f"must be an object, got {value!r}")
        unknown = sorted(set(value) - known)
        if unknown:
            raise InvalidSpecError(f"{where}.{unknown[0]}", f"unknown field; known are {', '.join(sorted(known))}")
        self.value, self.where = value, where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        return self.value.get(name, default)

    def section(self, name: str, known: set[str], *, required: bool = False) -> _Reader:
        if name not in self.value and required:
            raise InvalidSpecError(self.path(name), "required")
        return _Reader(self.value.get(name, {}), self.path(name), known)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.value.get(name, {})
        if not isinstance(value, Mapping):
            raise InvalidSpecError(self.path(name), f"must be an object, got {value!r}")
        return value

    def text(self, name: str, pattern: str, hint: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not re.match(pattern, value):
            raise InvalidSpecError(self.path(name), f"{hint}; got {value!r}")
        return value

    def optional_text(self, name: str, pattern: str, hint: str) -> str | None:
        return self.text(name, pattern, hint) if name in self.value else None

    def choice(self, name: str, options: tuple[str, ...], default: str) -> str:
        value = self.value.get(name, default)
        if value not in options:
            raise InvalidSpecError(self.path(name), f"must be one of {', '.join(options)}; got {value!r}")
        return str(value)

    def integer(self, name: str, default: int | None, *, low: int, high: int) -> int:
        value = self.value.get(name, default)
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
        try:
            value = Decimal(text) if isinstance(text, str) else None
        except InvalidOperation:
            value = None
        below = (
            value is None or not value.is_finite() or value < Decimal(low) or (exclude_low and value == Decimal(low))
        )
        if below or value > Decimal(high) or (exclude_high and value == Decimal(high)):  # type: ignore[operator]
            left, right = "(" if exclude_low else "[", ")" if exclude_high else "]"
            raise InvalidSpecError(
                self.path(name),
                f'must be a decimal string in {left}{low}, {high}{right}, for example "0.01"; got {text!r}',
            )
        return float(cast(Decimal, value))
