"""Which models which workers of a shared pool hold: few workers, few moves, and a reason for whatever finds no place.

A model takes memory of every worker that holds it and a part of the executor's time there. Memory is a hard bound:
what does not fit is not loaded. Time is not: a worker that is asked for more than it should be answers later and
refuses what cannot be answered in time, and that is better than a model that nobody holds.

Vector packing is hard; what is done is best fit in several orders, and then to empty workers one by one. Models stay
where they are unless a worker is asked for too much, or unless fewer workers do with a fifth of their time to spare:
noise of a tenth in what is measured then moves nothing to and fro.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from offramp_core.errors import InvalidArgumentError

#: Of a worker's time, what must be left where fewer workers or copies are to do.
TO_SPARE = 0.2


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model needs of the workers that hold it."""

    name: str
    #: Seconds of one executor a second, for all its requests with its plan.
    busy: float
    #: In memory, of every worker that holds it.
    bytes: int
    #: At least so many workers hold it; more do where one has not the time.
    copies: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.busy < math.inf or self.bytes < 0 or self.copies < 1:
            raise InvalidArgumentError(
                f"{self.name!r} needs {self.busy} of a worker's time, {self.bytes} bytes and {self.copies} copies; "
                f"time and bytes must be 0 or more, copies 1 or more"
            )


@dataclass(frozen=True, slots=True)
class Size:
    """What a worker of the pool has for models, and how many workers there may be."""

    #: Seconds of its executor a second that may be asked for, below 1 so that requests need not wait long.
    busy: float
    bytes: int
    min_workers: int
    max_workers: int

    def __post_init__(self) -> None:
        if not 0 < self.busy < math.inf or self.bytes <= 0 or not 0 <= self.min_workers <= self.max_workers:
            raise InvalidArgumentError(
                f"a pool of {self.min_workers} to {self.max_workers} workers with {self.busy} of their time and "
                f"{self.bytes} bytes for models cannot be packed; sizes must be above 0, and the largest number of "
                f"workers not below the smallest"
            )


@dataclass(frozen=True, slots=True)
class Packing:
    """Who holds what."""

    #: Worker i continues the i-th that was given, further ones are new; empty ones are not needed.
    workers: tuple[frozenset[str], ...]
    #: Copies that a worker holds now and did not before, those of models new to the pool included.
    moves: int
    #: Models that no worker, or too few of them, can hold, and why.
    unplaced: Mapping[str, str] = field(default_factory=dict)
    #: Workers that are asked for more of their time than they should be.
    crowded: tuple[int, ...] = ()


def pack(demands: Sequence[Demand], size: Size, *, held: Sequence[frozenset[str]] = ()) -> Packing:
    """Place models into the workers of a pool, starting from who ``held`` what.

    Examples
    --------
    >>> size = Size(busy=0.6, bytes=100, min_workers=1, max_workers=4)
    >>> pack([Demand("a", 0.3, 60), Demand("b", 0.2, 50), Demand("c", 0.1, 40)], size).workers
    (frozenset({...}), frozenset({'b'}))
    """
    _refuse_twins(demands)
    holders = Counter(name for names in held for name in names)
    items = [_Item.of(demand, size, held=holders[demand.name]) for demand in sorted(demands, key=lambda d: d.name)]
    if any(held):
        like, sparing = (_Bin(size.busy * part, size.bytes) for part in (1, 1 - TO_SPARE))
        stays = _stays(items, like, held, most=size.max_workers)
        stayed = _settled(stays, items, size, like=like, spread=size.min_workers)
        bins = _emptied(stayed, sparing, at_least=size.min_workers)
        anew = _anew(items, size, sparing)
        if _needed(anew) < _needed(bins) and _placed(anew) >= _placed(bins):
            bins = _matched(anew, held)
    else:
        bins = _anew(items, size, _Bin(size.busy, size.bytes))
    return _packing(bins, items, size, held)


def _refuse_twins(demands: Sequence[Demand]) -> None:
    names = [demand.name for demand in demands]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"two models of the pool are called {name!r}; give one another name")


@dataclass(frozen=True, slots=True)
class _Item:
    """A model by what one copy takes."""

    name: str
    busy: float
    bytes: int
    copies: int

    @classmethod
    def of(cls, demand: Demand, size: Size, *, held: int) -> _Item:
        """With as many copies as it needs; one that is ``held`` goes only if the others have time to spare."""
        needed, with_room = (
            max(demand.copies, math.ceil(demand.busy / (size.busy * part) - 1e-9)) for part in (1, 1 - TO_SPARE)
        )
        copies = min(max(needed, min(held, with_room)), max(1, size.max_workers))
        return cls(demand.name, demand.busy / copies, demand.bytes, copies)


class _Bin:
    """A worker while it is filled."""

    __slots__ = ("busy", "bytes", "items", "room", "room_bytes")

    def __init__(self, room: float, room_bytes: int, items: Iterable[_Item] = ()) -> None:
        self.room, self.room_bytes = room, room_bytes
        self.items: dict[str, _Item] = {}
        self.busy, self.bytes = 0.0, 0
        for item in items:
            self.take(item)

    def take(self, item: _Item) -> None:
        """Hold one more."""
        self.items[item.name] = item
        self.busy += item.busy
        self.bytes += item.bytes

    def without(self, *names: str) -> _Bin:
        """A worker like this that holds the others."""
        return _Bin(self.room, self.room_bytes, [i for i in self.items.values() if i.name not in names])

    def holds(self, item: _Item) -> bool:
        """Whether it has the memory for one more."""
        return item.name not in self.items and self.bytes + item.bytes <= self.room_bytes

    def fits(self, item: _Item) -> bool:
        """Whether it has the memory and the time for one more."""
        return self.holds(item) and self.busy + item.busy <= self.room + 1e-9

    def left_with(self, item: _Item) -> float:
        """What would be left of both, as a length in shares of a worker."""
        time = (self.room - self.busy - item.busy) / self.room
        memory = (self.room_bytes - self.bytes - item.bytes) / self.room_bytes
        return math.hypot(time, memory)

    @property
    def too_full(self) -> bool:
        """Whether it is asked for more time or memory than it has."""
        return self.bytes > self.room_bytes or self.busy > self.room + 1e-9


def _bin(like: _Bin, items: Iterable[_Item] = ()) -> _Bin:
    return _Bin(like.room, like.room_bytes, items)


def _largest(item: _Item, like: _Bin) -> float:
    """The larger of the two shares of a worker that it takes."""
    return max(item.busy / like.room, item.bytes / like.room_bytes)


def _anew(items: Sequence[_Item], size: Size, like: _Bin) -> list[_Bin]:
    """The fewest workers found from nothing."""
    orders: tuple[Callable[[_Item], float], ...] = (
        lambda item: _largest(item, like),
        lambda item: item.busy / like.room + item.bytes / like.room_bytes,
        lambda item: item.bytes,
        lambda item: item.busy,
    )
    found = []
    for order in orders:
        ordered = sorted(items, key=lambda item: (-item.copies, -order(item), item.name))
        for spread in (size.min_workers, 0):
            bins = _settled([], ordered, size, like=like, spread=spread)
            found.append(_emptied(bins, like, at_least=size.min_workers))
    return min(
        found, key=lambda bins: (-_placed(bins), _crowding(bins), max(_needed(bins), size.min_workers), _busiest(bins))
    )


def _stays(items: Sequence[_Item], like: _Bin, held: Sequence[frozenset[str]], *, most: int) -> list[_Bin]:
    """The workers, ``most`` of them, with what they may go on holding."""
    known = {item.name: item for item in items}
    bins = [_bin(like, (known[name] for name in sorted(names) if name in known)) for names in held]
    in_use = sorted((i for i, worker in enumerate(bins) if worker.items), key=lambda i: -len(bins[i].items))
    for i in in_use[most:]:
        bins[i] = _bin(like)
    for item in items:
        holders = [i for i, worker in enumerate(bins) if item.name in worker.items]
        surplus = max(0, len(holders) - item.copies)
        for i in sorted(holders, key=lambda i: (len(bins[i].items), -bins[i].busy, i))[:surplus]:
            bins[i] = bins[i].without(item.name)
    return [_relieved(worker) for worker in bins]


def _relieved(worker: _Bin) -> _Bin:
    """Without what is too much for it: one model where that suffices, the one with the fewest bytes."""
    while worker.too_full and len(worker.items) > 1:
        rest = {name: worker.without(name) for name in worker.items}
        enough = [worker.items[name] for name, left in rest.items() if not left.too_full]
        if enough:
            leaves = min(enough, key=lambda item: (item.bytes, item.name))
        else:
            leaves = max(worker.items.values(), key=lambda item: (item.busy, item.bytes, item.name))
        worker = rest[leaves.name]
    return _bin(worker) if worker.bytes > worker.room_bytes else worker


def _settled(bins: list[_Bin], items: Sequence[_Item], size: Size, *, like: _Bin, spread: int) -> list[_Bin]:
    """With every missing copy placed, where there is a place; evenly while ``spread`` workers at most are in use."""
    for item in items:
        for _ in range(item.copies - sum(item.name in worker.items for worker in bins)):
            if (worker := _place(bins, item, size, like=like, spread=spread)) is None:
                break
            worker.take(item)
    return bins


def _place(bins: list[_Bin], item: _Item, size: Size, *, like: _Bin, spread: int) -> _Bin | None:
    """The best fit, a new worker, or the least busy one that has the memory."""
    used = [worker for worker in bins if worker.items]
    fitting = [worker for worker in used if worker.fits(item)]
    if fitting and len(used) >= spread:
        choose = max if len(used) == spread else min
        return choose(fitting, key=lambda worker: worker.left_with(item))
    if len(used) < size.max_workers and like.holds(item):
        if len(used) == len(bins):
            bins.append(_bin(like))
        return next(worker for worker in bins if not worker.items)
    return min((worker for worker in used if worker.holds(item)), key=lambda worker: worker.busy, default=None)


def _emptied(bins: list[_Bin], like: _Bin, *, at_least: int) -> list[_Bin]:
    """With workers emptied whose models all fit elsewhere, by the size ``like``."""
    while _needed(bins) > max(at_least, 1):
        in_use = [i for i, worker in enumerate(bins) if worker.items]
        emptiest = sorted(in_use, key=lambda i: bins[i].bytes / like.room_bytes + bins[i].busy / like.room)
        fewer = next((after for i in emptiest if (after := _without(bins, i, like))), None)
        if fewer is None:
            break
        bins = fewer
    return bins


def _without(bins: Sequence[_Bin], leaving: int, like: _Bin) -> list[_Bin] | None:
    """The workers with everything of one of them on the others; None where that does not fit."""
    after = [_bin(like, worker.items.values()) for worker in bins]
    after[leaving] = _bin(like)
    others = [worker for i, worker in enumerate(after) if i != leaving and worker.items]
    for item in sorted(bins[leaving].items.values(), key=lambda item: (-_largest(item, like), item.name)):
        fitting = [worker for worker in others if worker.fits(item)]
        if not fitting:
            return None
        min(fitting, key=lambda worker: worker.left_with(item)).take(item)
    return after


def _matched(bins: Sequence[_Bin], held: Sequence[frozenset[str]]) -> list[_Bin]:
    """In the order of those who held what, so that the most bytes stay where they are."""
    from scipy.optimize import linear_sum_assignment  # 50 MiB of an operator that packs nothing

    bins = [worker for worker in bins if worker.items]
    stays = np.array([[sum(b.items[n].bytes + 1 for n in names if n in b.items) for b in bins] for names in held])
    olds, news = linear_sum_assignment(stays, maximize=True)
    ordered = [_bin(bins[0]) for _ in held]
    for old, new in zip(olds, news, strict=True):
        ordered[old] = bins[new]
    return [*ordered, *(bins[i] for i in range(len(bins)) if i not in set(news.tolist()))]


def _needed(bins: Iterable[_Bin]) -> int:
    return sum(bool(worker.items) for worker in bins)


def _placed(bins: Iterable[_Bin]) -> int:
    return sum(len(worker.items) for worker in bins)


def _busiest(bins: Iterable[_Bin]) -> float:
    return max((worker.busy for worker in bins), default=0.0)


def _crowding(bins: Iterable[_Bin]) -> float:
    return sum(max(0.0, worker.busy - worker.room) for worker in bins)


def _packing(bins: Sequence[_Bin], items: Sequence[_Item], size: Size, held: Sequence[frozenset[str]]) -> Packing:
    count = max(len(bins), len(held))
    workers = _padded([frozenset(worker.items) for worker in bins], count)
    before = _padded(held, count)
    return Packing(
        workers,
        moves=sum(len(now - then) for now, then in zip(workers, before, strict=True)),
        unplaced={item.name: why for item in items if (why := _why_not(item, workers, size))},
        crowded=tuple(i for i, worker in enumerate(bins) if worker.busy > size.busy + 1e-9),
    )


def _padded(workers: Sequence[frozenset[str]], count: int) -> tuple[frozenset[str], ...]:
    return (*workers, *[frozenset[str]()] * (count - len(workers)))


def _why_not(item: _Item, workers: Sequence[frozenset[str]], size: Size) -> str:
    copies = sum(item.name in names for names in workers)
    if item.bytes > size.bytes:
        return f"it takes {item.bytes} bytes, and a worker has {size.bytes} for models; give the pool's workers more"
    if copies < item.copies:
        return (
            f"{copies} of {item.copies} workers hold it: none of the pool's {size.max_workers} has {item.bytes} bytes "
            f"left; raise maxWorkers or the memory for models"
        )
    return ""
