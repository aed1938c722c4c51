"""What a fleet is planned from: pools, services, and per service the columns that may serve it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from offramp_core.errors import InvalidArgumentError

MOST_WORKERS, MOST_RATE, MOST_VARIATION = 100_000, 1e9, 1e6  # beyond which figures are wrong, and programs slow
LEAST_COST, MOST_COST, LEAST_LATE = 1e-4, 1e5, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One kind of hardware."""

    name: str
    #: Of one worker, 0.0001 to 100,000.
    cost_per_hour: float
    #: Of all services together; 0 for a pool that is gone.
    max_workers: int
    #: What one worker may take.
    worker_memory_bytes: int

    def __post_init__(self) -> None:
        _named(self, "name")
        _number(self, "cost_per_hour", least=LEAST_COST, most=MOST_COST)
        _whole(self, "max_workers", least=0, most=MOST_WORKERS)
        _whole(self, "worker_memory_bytes", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Which column: a certified plan on a pool, in batches of up to so many rows."""

    plan: str
    pool: str
    batch_size: int

    def __post_init__(self) -> None:
        _named(self, "plan")
        _named(self, "pool")
        _whole(self, "batch_size", least=1)

    def __str__(self) -> str:
        return f"{self.plan} on {self.pool}, batches of {self.batch_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What one worker does under a certified plan on a pool, as measured there."""

    key: Key
    #: One full batch.
    batch_seconds: float
    #: Requests per second that a worker answers when it never waits; at most ``batch_size / batch_seconds``.
    worker_rate: float
    #: Of this plan alone, a fraction: a mixture's average proves nothing where the choice depends on the input.
    certified_disagreement: float
    memory_bytes: int
    #: From the decision to the first answer.
    startup_seconds: float
    #: Squared coefficient of variation of a batch's seconds; 0 for batches that always take as long.
    batch_variation: float = 0.0

    def __post_init__(self) -> None:
        _number(self, "batch_seconds", above=0)
        _number(self, "worker_rate", above=0)
        _number(self, "certified_disagreement", least=0, most=1)
        _whole(self, "memory_bytes", least=0)
        _number(self, "startup_seconds", least=0)
        _number(self, "batch_variation", least=0)
        most = self.key.batch_size / self.batch_seconds
        if self.worker_rate > most * (1 + 1e-9):
            raise InvalidArgumentError(
                f"Column.worker_rate is {self.worker_rate:g}; batches of {self.key.batch_size} in "
                f"{self.batch_seconds:g} s answer at most {most:g} a second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is asked of a service, what was promised, and what may serve it."""

    name: str
    #: rate and predicted_rate: requests per second now, and at the time by which a worker that is started now would
    #: answer; see :func:`offramp_core.fleet.predicted_rate`.
    rate: float
    predicted_rate: float
    #: Variance of the number of arrivals in a window divided by its mean, as measured (1: Poisson).
    arrival_variation: float
    #: latency_seconds and late_share: at most this share of the requests may take longer than so.
    latency_seconds: float
    #: The budget that every column must keep by itself.
    max_disagreement: float
    columns: tuple[Column, ...]
    late_share: float = 0.01

    def __post_init__(self) -> None:
        _named(self, "name")
        _number(self, "rate", least=0, most=MOST_RATE)
        _number(self, "predicted_rate", least=0, most=MOST_RATE)
        _number(self, "arrival_variation", least=0, most=MOST_VARIATION)
        _number(self, "latency_seconds", above=0)
        _number(self, "max_disagreement", least=0, most=1)
        _number(self, "late_share", least=LEAST_LATE, below=1)
        refuse_twice("Service.columns", (column.key for column in self.columns))

    @property
    def demand(self) -> float:
        """Requests per second that workers have to answer."""
        return max(self.rate, self.predicted_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """So many workers of a column."""

    key: Key
    count: int

    def __post_init__(self) -> None:
        _whole(self, "count", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """When a plan that serves is left for another one."""

    #: A new plan answers so much more than the demand, as a fraction of it.
    spare: float = 0.10
    #: A plan that answers the demand is left only where answering the demand with this fraction more would be cheaper.
    slack: float = 0.25
    #: In which a change must earn what starting its workers, and later those that it stops, costs.
    horizon_seconds: float = 600.0

    def __post_init__(self) -> None:
        _number(self, "spare", least=0)
        _number(self, "slack", least=0)
        _number(self, "horizon_seconds", above=0)
        if self.slack < self.spare:
            raise InvalidArgumentError(f"Caution.slack is {self.slack:g}; it must not be below spare, {self.spare:g}")


def refuse_twice(field: str, names: Iterable[object]) -> None:
    """Raise where a name stands twice."""
    seen: set[object] = set()
    for name in names:
        if name in seen:
            raise InvalidArgumentError(f"{field} names {name} twice")
        seen.add(name)


def _named(part: object, field: str) -> None:
    if not isinstance(getattr(part, field), str) or not getattr(part, field):
        raise InvalidArgumentError(f"{type(part).__name__}.{field} must be a name")


def _whole(part: object, field: str, *, least: int, most: int | None = None) -> None:
    value = getattr(part, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        words = f"a whole number >= {least}" + ("" if most is None else f" and <= {most}")
        raise InvalidArgumentError(f"{type(part).__name__}.{field} is {value!r}; it must be {words}")


def _number(
    part: object,
    field: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    value = getattr(part, field)
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not known or not (least <= value <= most and above < value < below):
        limits = {">=": least, ">": above, "<=": most, "<": below}
        words = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit))
        raise InvalidArgumentError(f"{type(part).__name__}.{field} is {value!r}; it must be a finite number {words}")
