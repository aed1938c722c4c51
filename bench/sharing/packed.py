"""How many workers a packing needs: ours against first fit, one for each model, and the fewest possible."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from offramp_core.sharing.packing import Demand, Packing, Size, pack

SIZE = Size(busy=0.6, bytes=1000, min_workers=0, max_workers=50)
CASES = 500
#: Models of a worker, its time and its memory.
Bin = tuple[frozenset[str], float, int]


def compared(cases: int = CASES) -> dict[str, int]:
    """Workers of all cases together."""
    total = {"ours": 0, "first fit": 0, "one for each": 0, "fewest": 0}
    for demands in drawn(cases):
        total["ours"] += needed(pack(demands, SIZE))
        total["first fit"] += first_fit(demands, SIZE)
        total["one for each"] += sum(copies_of(demand, SIZE) for demand in demands)
        total["fewest"] += fewest(demands, SIZE)
    return total


def drawn(cases: int) -> Iterator[list[Demand]]:
    """A few models of unlike sizes and loads; the same ones each time."""
    rng = random.Random(0)
    for _ in range(cases):
        yield [
            Demand(
                f"m{i}",
                rng.choice([rng.uniform(0, 0.3), rng.uniform(0, 0.05), rng.uniform(0.2, 0.9)]),
                rng.choice([rng.randint(50, 600), rng.randint(20, 200)]),
                rng.choice([1, 1, 1, 2]),
            )
            for i in range(rng.randint(3, 9))
        ]


def needed(packing: Packing) -> int:
    """How many workers hold something."""
    return sum(map(bool, packing.workers))


def copies_of(demand: Demand, size: Size) -> int:
    """How many workers a model needs."""
    return min(max(demand.copies, math.ceil(demand.busy / size.busy - 1e-9)), max(1, size.max_workers))


def first_fit(demands: Sequence[Demand], size: Size) -> int:
    """Each copy into the first worker that has the room, in the order in which they come."""
    workers: list[Bin] = []
    for copy in _copies(demands, size):
        at = next((i for i, worker in enumerate(workers) if _fits(worker, copy, size)), None)
        if at is None:
            workers.append(copy)
        else:
            workers[at] = _with(workers[at], copy)
    return len(workers)


def fewest(demands: Sequence[Demand], size: Size) -> int:
    """By trying every way to place every copy."""
    copies = sorted(_copies(demands, size), key=lambda copy: -max(copy[1] / size.busy, copy[2] / size.bytes))
    found = len(copies)

    def place(k: int, workers: list[Bin]) -> None:
        nonlocal found
        if len(workers) >= found:
            return
        if k == len(copies):
            found = len(workers)
            return
        for i, worker in enumerate(workers):
            if _fits(worker, copies[k], size):
                place(k + 1, [*workers[:i], _with(worker, copies[k]), *workers[i + 1 :]])
        place(k + 1, [*workers, copies[k]])

    place(0, [])
    return found


def _copies(demands: Sequence[Demand], size: Size) -> list[Bin]:
    return [
        (frozenset({demand.name}), demand.busy / copies_of(demand, size), demand.bytes)
        for demand in demands
        for _ in range(copies_of(demand, size))
    ]


def _fits(worker: Bin, copy: Bin, size: Size) -> bool:
    return not worker[0] & copy[0] and worker[1] + copy[1] <= size.busy + 1e-9 and worker[2] + copy[2] <= size.bytes


def _with(worker: Bin, copy: Bin) -> Bin:
    return worker[0] | copy[0], worker[1] + copy[1], worker[2] + copy[2]
