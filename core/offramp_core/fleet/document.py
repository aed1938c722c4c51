"""Pools and services as people write them down, for ``offramp plan``: read with bounds, refused with the field and the
next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offramp_core.control.spec import parse_duration, parse_size
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.fleet.days import Usual, expected_rate
from offramp_core.fleet.forecast import DAYS, often
from offramp_core.fleet.parts import (
    LEAST_COST,
    LEAST_LATE,
    MOST_COST,
    MOST_RATE,
    MOST_VARIATION,
    MOST_WORKERS,
    Column,
    Key,
    Pool,
    Service,
    Workers,
)

MOST_POOLS, MOST_SERVICES, MOST_TIERS, MOST_PLANS, MOST_BATCHES = 32, 1000, 8, 64, 16
# Of one service: its integer program takes seconds with so many, and minutes with four times as many.
MOST_COLUMNS = 128
LARGEST_BATCH, SHORTEST_BATCH_SECONDS = 65536, 1e-9
ANY_MEMORY = 1 << 62  # of a worker whose pool does not say
STARTUP_SECONDS = 30.0
SHARES_OFF = 1e-6

BatchSeconds = Mapping[int, float]
#: (file, precision; empty for the reference's) -> seconds of a whole batch by its size; raises InvalidArgumentError.
ProfileReader = Callable[[str, str], BatchSeconds]


@dataclass(frozen=True, slots=True)
class FleetDocument:
    """What is planned; tiers of a service are services of their own, named ``service/tier``. ``usual`` is what came on
    earlier days, of services that are planned for more because of it."""

    pools: tuple[Pool, ...]
    services: tuple[Service, ...]
    current: Mapping[str, tuple[Workers, ...]]
    usual: Mapping[str, Usual] = field(default_factory=dict)


def parse_fleet(value: Any, *, profile: ProfileReader) -> FleetDocument:
    """Read a document.

    Parameters
    ----------
    value : mapping
        ``pools`` and ``services``, as docs/how-to/plan.md shows them.

    Raises
    ------
    InvalidSpecError
        Something is missing, unknown or contradicts itself; the message begins with the field and ends with what to do.
    """
    top = _Fields(value, "", ("pools", "services"))
    pools = [_pool(fields) for fields in top.each("pools", _POOL, most=MOST_POOLS)]
    _refuse_twice([pool.name for pool in pools], "pools")
    services: list[Service] = []
    current: dict[str, tuple[Workers, ...]] = {}
    usual: dict[str, Usual] = {}
    for fields in top.each("services", _SERVICE, most=MOST_SERVICES):
        demand = _demand(fields.inner("demand", ("rate", "predictedRate", "earlierDays", "variation")))
        tiers = _tiers(fields, demand, {pool.name for pool in pools}, profile)
        services += tiers
        if demand.usual is not None:
            usual |= dict.fromkeys((tier.name for tier in tiers), demand.usual)
        if workers := _workers(fields, tiers):
            current[tiers[0].name] = workers
    _refuse_twice([service.name for service in services], "services")
    return FleetDocument(tuple(pools), tuple(services), current, usual)


_POOL = ("name", "costPerHour", "maxWorkers", "workerMemory")
_SERVICE = ("name", "demand", "objective", "plans", "tiers", "workers")
_ON = ("batches", "profile", "precision", "saving", "startup", "memory")


@dataclass(frozen=True, slots=True)
class _Promise:
    """latency, percentile as a share that may be late, disagreement."""

    latency_seconds: float
    late_share: float
    max_disagreement: float


def _pool(fields: _Fields) -> Pool:
    workers = fields.whole("maxWorkers", most=MOST_WORKERS)
    if workers == 0:
        raise fields.wrong("maxWorkers", "is 0; leave out a pool without workers, or say how many it has for all")
    memory = fields.get("workerMemory")
    return Pool(
        name=fields.text("name"),
        cost_per_hour=fields.number("costPerHour", least=LEAST_COST, most=MOST_COST),
        max_workers=workers,
        worker_memory_bytes=ANY_MEMORY if memory is None else parse_size(memory, fields.path("workerMemory")),
    )


@dataclass(frozen=True, slots=True)
class _Demand:
    """``usual`` is None where earlier days lead to no larger plan."""

    rate: float
    predicted_rate: float
    variation: float
    usual: Usual | None


def _demand(fields: _Fields) -> _Demand:
    """What is asked now and expected: as the operator does it, a rise that came on several earlier days counts."""
    rate = fields.number("rate", least=0, most=MOST_RATE)
    later = fields.number("predictedRate", least=0, most=MOST_RATE, default=rate)
    variation = fields.number("variation", least=0, most=MOST_VARIATION, default=1.0)
    days = fields.get("earlierDays")
    if days is None:
        return _Demand(rate, later, variation, None)
    if not isinstance(days, list) or not 0 < len(days) <= DAYS:
        raise fields.wrong("earlierDays", f"must be a list of 1 to {DAYS} rates, one for each earlier day")
    each = _Fields({f"earlierDays[{i}]": day for i, day in enumerate(days)}, fields.where, None)
    rates = [each.number(i, least=0, most=MOST_RATE) for i in each.value]
    usual, recent = Usual(often(rates), len(rates)), max(rate, later)
    expected = expected_rate(recent, usual)
    return _Demand(rate, max(later, expected), variation, usual if expected > recent else None)


def _tiers(fields: _Fields, demand: _Demand, pools: set[str], profile: ProfileReader) -> list[Service]:
    """A service, or one for each of its tiers."""
    name = fields.text("name")
    if "/" in name:
        raise fields.wrong("name", f"is {name!r}; write it without '/', which stands before a tier's name")
    promise = _promise(fields.inner("objective", ("latency", "accuracy")))
    columns = _columns(fields, pools, profile)

    def service(named: str, share: float, kept: _Promise) -> Service:
        return Service(
            name=named,
            rate=share * demand.rate,
            predicted_rate=share * demand.predicted_rate,
            arrival_variation=demand.variation,
            latency_seconds=kept.latency_seconds,
            late_share=kept.late_share,
            max_disagreement=kept.max_disagreement,
            columns=columns,
        )

    if fields.get("tiers") is None:
        return [service(name, 1.0, promise)]
    tiers = fields.each("tiers", ("name", "share", "latency", "maxDisagreement"), most=MOST_TIERS)
    found = [(tier.text("name"), tier.number("share", least=0, most=1), _tightened(tier, promise)) for tier in tiers]
    _check_tiers(found, fields.path("tiers"))
    return [service(f"{name}/{tier}", share, kept) for tier, share, kept in found]


def _tightened(tier: _Fields, promise: _Promise) -> _Promise:
    """A tier's own promise: never looser than the service's."""
    latency = promise.latency_seconds
    if tier.get("latency") is not None:
        latency = tier.seconds("latency")
        if latency > promise.latency_seconds:
            raise tier.wrong(
                "latency",
                f"is {latency:g} s and the service's objective {promise.latency_seconds:g} s; a tier may only be "
                f"stricter: lower it, or raise objective.latency.threshold",
            )
    budget = tier.number("maxDisagreement", least=0, most=0.5, default=promise.max_disagreement)
    if budget > promise.max_disagreement:
        raise tier.wrong(
            "maxDisagreement",
            f"is {budget:g} and the service's budget {promise.max_disagreement:g}; a tier may only be stricter: lower "
            f"it, or raise objective.accuracy.maxDisagreement",
        )
    return _Promise(latency, promise.late_share, budget)


def _check_tiers(found: Sequence[tuple[str, float, _Promise]], where: str) -> None:
    _refuse_twice([name for name, _, _ in found], where)
    total = sum(share for _, share, _ in found)
    if abs(total - 1) > SHARES_OFF:
        raise InvalidSpecError(where, f"shares come to {total:g}; every request has one tier: make them come to 1")
    for i, (name, _, promise) in enumerate(found):
        for other, _, theirs in found[:i]:
            if promise == theirs:
                raise InvalidSpecError(
                    f"{where}[{i}]",
                    f"{name} promises what {other} promises; make one of them stricter, or leave it out",
                )


def _promise(objective: _Fields) -> _Promise:
    latency = objective.inner("latency", ("threshold", "percentile"))
    accuracy = objective.inner("accuracy", ("maxDisagreement",))
    percentile = latency.number("percentile", above=0, below=100, default=99.0)
    late = round(1 - percentile / 100, 8)
    if late >= 1:
        raise latency.wrong("percentile", f"is {percentile:g}; nearly every request may be late then: raise it")
    if late < LEAST_LATE:
        raise latency.wrong("percentile", f"is {percentile:g}; more than 99.9999 cannot be planned for: lower it")
    return _Promise(latency.seconds("threshold"), late, accuracy.number("maxDisagreement", least=0, most=0.5))


# --- plans -----------------------------------------------------------------------------------------


def _columns(fields: _Fields, pools: set[str], profile: ProfileReader) -> tuple[Column, ...]:
    found: list[Column] = []
    plans = fields.each("plans", ("name", "disagreement", "pools"), most=MOST_PLANS)
    _refuse_twice([plan.text("name") for plan in plans], fields.path("plans"))
    for plan in plans:
        disagreement = plan.number("disagreement", least=0, most=1)
        on = plan.inner("pools", None)
        if not on.value:
            raise plan.wrong("pools", "names no pool; say where the plan was measured, or leave the plan out")
        for pool in on.value:
            if pool not in pools:
                known = ", ".join(sorted(pools))
                raise plan.wrong("pools", f"names {pool!r}, which is not among the pools of the file: {known}")
            found += _measured(plan.text("name"), str(pool), disagreement, on.inner(str(pool), _ON), profile)
    if len(found) > MOST_COLUMNS:
        raise fields.wrong(
            "plans",
            f"have {len(found)} batch sizes on all pools; leave out those that pay least, down to {MOST_COLUMNS}",
        )
    return tuple(found)


def _measured(plan: str, pool: str, disagreement: float, on: _Fields, profile: ProfileReader) -> list[Column]:
    startup = on.get("startup")
    memory = on.get("memory")
    return [
        Column(
            key=Key(plan=plan, pool=pool, batch_size=size),
            batch_seconds=seconds,
            worker_rate=size / seconds,
            certified_disagreement=disagreement,
            memory_bytes=0 if memory is None else parse_size(memory, on.path("memory")),
            startup_seconds=STARTUP_SECONDS if startup is None else on.seconds("startup"),
        )
        for size, seconds in _times(on, profile).items()
    ]


def _times(on: _Fields, profile: ProfileReader) -> BatchSeconds:
    """Seconds of a batch by its size: declared, or those of a bundle's profile less what the plan saves."""
    declared, file = on.get("batches"), on.get("profile")
    if (declared is None) == (file is None):
        raise InvalidSpecError(on.where, "needs either batches (size: seconds) or profile (a bundle's profile.json)")
    if file is None:
        for needless in ("saving", "precision"):
            if on.get(needless) is not None:
                raise on.wrong(needless, "belongs to profile; times under batches are those of the plan as it runs")
        batches = on.inner("batches", None)
        if not 0 < len(batches.value) <= MOST_BATCHES:
            raise on.wrong("batches", f"has {len(batches.value)} sizes; write 1 to {MOST_BATCHES}, such as 4: 11ms")
        sizes = {key: _size(key, batches) for key in batches.value}
        _refuse_twice([str(size) for size in sizes.values()], on.path("batches"))
        return _long_enough({size: batches.seconds(key) for key, size in sizes.items()}, on.path("batches"))
    saving = on.number("saving", least=0, below=1, default=0.0)
    precision = "" if on.get("precision") is None else on.text("precision")
    try:
        times = profile(on.text("profile"), precision)
    except InvalidArgumentError as error:
        raise on.wrong("profile", str(error)) from error
    return _long_enough({size: seconds * (1 - saving) for size, seconds in times.items()}, on.path("profile"))


def _long_enough(times: BatchSeconds, where: str) -> BatchSeconds:
    for size, seconds in times.items():
        if not SHORTEST_BATCH_SECONDS <= seconds < math.inf:
            raise InvalidSpecError(where, f"has a batch of {size} in {seconds:g} s; write what was measured")
    return times


def _size(key: Any, batches: _Fields) -> int:
    text = str(key)
    short = text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST_BATCH))
    if not short or not 0 < int(text) <= LARGEST_BATCH:
        raise batches.wrong(text[:20], f"is no batch size; write a whole number of rows from 1 to {LARGEST_BATCH}")
    return int(text)


def _workers(fields: _Fields, tiers: Sequence[Service]) -> tuple[Workers, ...]:
    """What serves now."""
    if fields.get("workers") is None:
        return ()
    if len(tiers) > 1:
        raise fields.wrong("workers", "does not say of which tier; leave it out where there are tiers")
    known = {column.key for column in tiers[0].columns}
    found: list[Workers] = []
    for one in fields.each("workers", ("plan", "pool", "batchSize", "count"), most=MOST_PLANS * MOST_POOLS):
        key = Key(plan=one.text("plan"), pool=one.text("pool"), batch_size=one.whole("batchSize", least=1))
        if key not in known:
            raise InvalidSpecError(one.where, f"{key} stands in none of plans; name one that does")
        if any(key == other.key for other in found):
            raise InvalidSpecError(one.where, f"{key} stands there before; write all of them as one count")
        found.append(Workers(key=key, count=one.whole("count", least=1, most=MOST_WORKERS)))
    return tuple(found)


# --- fields ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fields:
    """An object of the document, where it stands, and which fields it may have (None: any)."""

    value: Any
    where: str
    known: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if not isinstance(self.value, Mapping):
            raise InvalidSpecError(self.where or "file", f"must be an object with {self._list()}; got {self.value!r}")
        unknown = [key for key in self.value if self.known is not None and key not in self.known]
        if unknown:
            raise self.wrong(str(unknown[0]), f"is unknown; here may stand {self._list()}")

    def _list(self) -> str:
        return ", ".join(self.known or ()) or "names"

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def wrong(self, name: str, message: str) -> InvalidSpecError:
        """An error of a field."""
        return InvalidSpecError(self.path(name), message)

    def get(self, name: Any) -> Any:
        return self.value.get(name)

    def inner(self, name: str, known: tuple[str, ...] | None) -> _Fields:
        """An object within."""
        return _Fields(self.get(name), self.path(name), known)

    def each(self, name: str, known: tuple[str, ...], *, most: int) -> list[_Fields]:
        """A list of objects, one at least."""
        value = self.get(name)
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise self.wrong(name, f"must be a list of 1 to {most} objects with {', '.join(known)}")
        return [_Fields(one, f"{self.path(name)}[{i}]", known) for i, one in enumerate(value)]

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value or len(value) > 253 or not value.isprintable():
            raise self.wrong(name, f"must be a text of 1 to 253 characters; got {value!r}")
        return value

    def seconds(self, name: Any) -> float:
        """A duration above 0."""
        seconds = parse_duration(self.get(name), self.path(str(name)))
        if not 0 < seconds < math.inf:
            raise self.wrong(str(name), f"is {self.get(name)!r}; write a duration above 0, such as 40ms")
        return seconds

    def whole(self, name: str, *, least: int = 0, most: int = LARGEST_BATCH) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"must be a whole number from {least} to {most}; got {value!r}")
        return value

    def number(
        self,
        name: str,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        above: float = -math.inf,
        below: float = math.inf,
        default: float | None = None,
    ) -> float:
        """A number, or a text that is one, as decimals are written in manifests."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        limits = {">=": least, "<=": most, ">": above, "<": below}
        words = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit))
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found) or not (least <= found <= most and above < found < below):
            raise self.wrong(name, f"must be a number {words}; got {value!r}")
        return found


def _refuse_twice(names: Sequence[str], where: str) -> None:
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise InvalidSpecError(where, f"{twice} stands twice; give each a name of its own")
