"""The cheapest workers of one service at given pool prices, exactly: a small integer program for HiGHS.

Each column that is used is a queue of its own, so that it pays its head-room once: with counts n and uses y in {0, 1}

    minimize    sum price[pool] n
    subject to  sum (worker rate n - head-room y) >= demand,    head-room y <= worker rate n,    n <= most y,

and no more workers of a pool than it has. Most services are decided without the program: the best mixture of at most
two columns is found by trying all, and a column leaves once a bound says that no mixture of three with it is cheaper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
EXACT = 1e-6  # of the demand, which a solver may be off by
PAIRS = 2_000_000  # counts of two columns that are tried; more of them are left to the program
BEYOND = 2.0**40  # workers, more than any pool has
SHORT_COST = 10.0  # of a whole demand that is not answered, in times of what all workers of all pools cost
PARTS = (1.0, 2.0, 4.0, 8.0)  # how much equal parts of a demand count while they are unanswered; the last one first
SPARE_PART = 0.25  # and what is to spare: more than any workers cost, less than what anybody asks for
NODES = 2000  # of one service's program; what it has by then is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one service needs, over its J usable columns."""

    #: Requests per second, > 0.
    rate: float
    #: How many of them are not asked for but to spare.
    spare: float = 0.0
    #: worker_rate and headroom: (J,) float64; requests per second.
    worker_rate: Floats
    headroom: Floats
    #: (J,) int64. Of P.
    pool: Ints


@dataclass(frozen=True, slots=True)
class Choice:
    """Workers by column, workers by pool, and the requests per second that stay unanswered."""

    counts: tuple[int, ...]
    used: tuple[int, ...]
    unmet: float = 0.0


def answered(demand: Demand, counts: Ints) -> float:
    """Requests per second that such workers answer in time."""
    return float(np.maximum(demand.worker_rate * counts - demand.headroom, 0.0)[counts > 0].sum())


def alone(demand: Demand) -> Ints:
    """(J,) workers of each column that would answer the demand without any other."""
    needed = np.ceil((demand.rate + demand.headroom) / demand.worker_rate * (1 - EXACT))
    return np.minimum(needed, BEYOND).astype(np.int64)


def cheapest(demand: Demand, *, prices: Floats, room: Ints) -> Choice | None:
    """The workers that answer the whole demand at the lowest price; None where the room does not suffice.

    Parameters
    ----------
    prices : (P,) float64
        Of one worker, > 0.
    room : (P,) int64
        Workers that may be used of each pool.
    """
    if reach(demand, room) < demand.rate * (1 - EXACT):
        return None
    price, needed = prices[demand.pool], alone(demand)
    most = np.minimum(needed, room[demand.pool])
    single = np.where(needed <= most, needed * price, np.inf)
    best = np.zeros(len(price), dtype=np.int64)
    bound = float(single.min())
    if math.isfinite(bound):  # of those that cost as much, what answers most
        able = np.where(single <= bound * (1 + 1e-9), demand.worker_rate * needed - demand.headroom, -np.inf)
        best[int(np.argmax(able))] = needed[int(np.argmax(able))]
    if len(price) > 1 and len(price) ** 2 * most.max() <= PAIRS:
        best, bound = _best_pair(demand, price, most, room, best=best, bound=bound)
        fewest = 3
    else:
        fewest = 2
    mixed = _may_be_mixed(demand, price, bound, columns=fewest) & (most > 0)
    if mixed.sum() >= fewest:
        found = _program(demand, np.flatnonzero(mixed), price=price, room=room)
        if found is not None and found @ price < bound * (1 - 1e-9):
            return choice(demand, found, len(room))
    return choice(demand, best if math.isfinite(bound) else _filled(demand, price, room), len(room))


def least_short(demand: Demand, *, prices: Floats, room: Ints, cost: Floats) -> Choice:
    """What counts least, with unanswered requests at :func:`missed_cost`: all of the demand, a part of it by one column
    alone, or, where no workers would answer all of it, what the program finds. Where prices are high, less is answered.

    ``cost`` is what workers cost; ``prices`` what they count.
    """
    price = prices[demand.pool]
    whole = cheapest(demand, prices=prices, room=room)
    if whole is None:
        usable = np.flatnonzero(room[demand.pool] > 0)
        short = SHORT_COST * float(cost @ room)
        found = _program(demand, usable, price=price, room=room, missed=short) if len(usable) else None
        return choice(demand, _filled(demand, price, room) if found is None else found, len(room))
    counts = np.arange(0, max(int(np.minimum(alone(demand), room[demand.pool]).max()), 1) + 1)
    able = np.maximum(demand.worker_rate[:, None] * counts - demand.headroom[:, None], 0.0)
    missed = missed_cost(demand, np.maximum(demand.rate - able, 0.0), cost=cost, room=room)
    counted = np.where(counts <= room[demand.pool][:, None], price[:, None] * counts + missed, np.inf)
    column, n = np.unravel_index(int(np.argmin(counted)), counted.shape)
    if counted[column, n] >= prices @ np.array(whole.used):
        return whole
    part = np.zeros(len(price), dtype=np.int64)
    part[column] = counts[n]
    return choice(demand, part, len(room))


def most_answered(demand: Demand, *, prices: Floats, room: Ints) -> Choice:
    """The workers that leave the least unanswered, whatever they cost, then the cheapest of them."""
    whole = cheapest(demand, prices=prices, room=room)
    return choice(demand, _filled(demand, prices[demand.pool], room), len(room)) if whole is None else whole


def nothing(demand: Demand, pools: int) -> Choice:
    """No workers."""
    return choice(demand, np.zeros(len(demand.pool), dtype=np.int64), pools)


def reach(demand: Demand, room: Ints) -> float:
    """Requests per second that all workers of all pools would answer: the best column of each pool, as a second one of
    the pool would be slower and pay a head-room of its own."""
    able = np.maximum(demand.worker_rate * room[demand.pool] - demand.headroom, 0.0)
    best = np.zeros(len(room))
    np.maximum.at(best, demand.pool, able)
    return float(best.sum())


def missed_cost(demand: Demand, unmet: Any, *, cost: Floats, room: Ints) -> Any:
    """What unanswered requests per second (any shape) count.

    It is the share of a service's own demand that counts, and its first parts most: a service that asks for very much
    takes nothing from one that asks for little, what it has to spare included.
    """
    weights, sizes = _parts(demand)
    before = np.cumsum(sizes) - sizes
    shares = sum(w * np.clip(unmet - b, 0.0, size) for w, b, size in zip(weights, before, sizes, strict=True))
    return SHORT_COST * float(cost @ room) * shares / demand.rate


def _parts(demand: Demand) -> tuple[Floats, Floats]:
    """How much the parts of a demand count, and their requests per second; those that stay unanswered first come
    first."""
    asked = (demand.rate - demand.spare) / len(PARTS)
    return np.array([SPARE_PART, *PARTS]), np.array([demand.spare, *[asked] * len(PARTS)])


def _filled(demand: Demand, price: Floats, room: Ints) -> Ints:
    """Workers that answer as much as can be, or all: the best column of each pool, the cheapest pools first; for
    demands beyond :func:`reach`, and for programs that are stopped before they found any."""
    counts = np.zeros(len(price), dtype=np.int64)
    able = np.maximum(demand.worker_rate * room[demand.pool] - demand.headroom, 0.0)
    each = price * room[demand.pool] / np.maximum(able, 1e-9)
    best = [int(np.argmax(np.where(demand.pool == p, able, -1.0))) for p in np.unique(demand.pool)]
    missing = demand.rate
    for j in sorted(best, key=lambda j: float(each[j])):
        if able[j] > 0 and missing > EXACT * demand.rate:
            needed = math.ceil((missing + demand.headroom[j]) / demand.worker_rate[j] * (1 - EXACT))
            counts[j] = min(needed, int(room[demand.pool[j]]))
            missing -= max(demand.worker_rate[j] * counts[j] - demand.headroom[j], 0.0)
    return counts


def choice(demand: Demand, counts: Ints, pools: int) -> Choice:
    """What given counts use and leave."""
    used = np.bincount(demand.pool, weights=counts, minlength=pools).astype(int)
    unmet = demand.rate - answered(demand, counts)
    return Choice(tuple(map(int, counts)), tuple(map(int, used)), unmet if unmet > 2 * EXACT * demand.rate else 0.0)


def _best_pair(
    demand: Demand, price: Floats, most: Ints, room: Ints, *, best: Ints, bound: float
) -> tuple[Ints, float]:
    """The best mixture of two columns where it is below ``bound``: every count of one, and what the other one adds."""
    counts = np.arange(1, max(int(most.max()), 1) + 1)
    rate, head = demand.worker_rate, demand.headroom
    missing = demand.rate + head[:, None, None] + head[None, :, None] - rate[:, None, None] * counts
    other = np.maximum(np.ceil(missing / rate[None, :, None] * (1 - EXACT)), 1.0)
    fits = (counts <= most[:, None, None]) & (other <= most[None, :, None])
    same = demand.pool[:, None] == demand.pool[None, :]
    fits &= ~same[:, :, None] | (counts + other <= room[demand.pool][:, None, None])
    fits &= ~np.eye(len(price), dtype=bool)[:, :, None]
    cost = np.where(fits, price[:, None, None] * counts + price[None, :, None] * other, np.inf)
    a, b, n = np.unravel_index(int(np.argmin(cost)), cost.shape)
    if cost[a, b, n] < bound * (1 - 1e-9):
        best = np.zeros(len(price), dtype=np.int64)
        best[a], best[b] = counts[n], int(other[a, b, n])
        bound = float(cost[a, b, n])
    return best, bound


def _may_be_mixed(demand: Demand, price: Floats, bound: float, *, columns: int) -> npt.NDArray[np.bool_]:
    """Columns that some mixture of at least so many columns may hold whose price is below ``bound``.

    A mixture with a column pays for one worker of it. For the rest of the demand and the head-rooms it pays at least
    the lowest price of any request, and one worker of each other column.
    """
    keep = np.ones(len(price), dtype=bool)
    while math.isfinite(bound) and keep.sum() >= columns:
        lowest = (price / demand.worker_rate)[keep].min()
        heads, prices = np.sort(demand.headroom[keep]), np.sort(price[keep])
        others = heads[: columns - 1].sum()
        rest = np.maximum(demand.rate + demand.headroom + others - demand.worker_rate, 0.0)
        left = keep & (price + np.maximum(lowest * rest, prices[: columns - 1].sum()) < bound * (1 - 1e-9))
        if (left == keep).all():
            break
        keep = left
    return keep


def _program(demand: Demand, columns: Ints, *, price: Floats, room: Ints, missed: float = 0.0) -> Ints | None:
    """Counts of all columns with only ``columns`` used; None where there are none. Where a request may be missed, at
    the price ``missed`` for all of the demand, more variables say how much of each part of it stays unanswered."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rate, headroom = demand.worker_rate[columns], demand.headroom[columns]
    most = np.minimum(alone(demand)[columns], room[demand.pool[columns]])
    weights, sizes = _parts(demand)
    n, parts = len(columns), len(sizes) if missed else 0
    none = np.zeros((n, parts))
    pools = np.array([demand.pool[columns] == p for p in range(len(room))], dtype=float)
    rows = np.vstack(
        [
            np.r_[rate / demand.rate, -headroom / demand.rate, np.ones(parts)][None],
            np.hstack([np.diag(rate / demand.rate), np.diag(-headroom / demand.rate), none]),
            np.hstack([np.diag(-np.ones(n)), np.diag(most.astype(float)), none]),
            np.hstack([pools, np.zeros((len(room), n + parts))]),
        ]
    )
    least = np.r_[1.0, np.zeros(2 * n), np.full(len(room), -np.inf)]
    limit = np.r_[np.full(1 + 2 * n, np.inf), room.astype(float)]
    unit = price.max()
    result = milp(
        np.r_[price[columns] / unit, np.zeros(n), weights[:parts] * missed / unit],
        constraints=LinearConstraint(rows, least, limit),
        integrality=np.r_[np.ones(2 * n), np.zeros(parts)],
        bounds=Bounds(0.0, np.r_[most.astype(float), np.ones(n), sizes[:parts] / demand.rate]),
        options={"node_limit": NODES},
    )
    if result.x is None:
        return None
    counts = np.zeros(len(price), dtype=np.int64)
    counts[columns] = np.round(result.x[:n]).astype(np.int64)
    return counts
