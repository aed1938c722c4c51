"""Services that share pools: what a worker of a full pool is worth, and who gets it.

Dantzig-Wolfe decomposition: the services are priced one by one, exactly, at the pools' prices; a linear program over
the choices found so far says the prices of the next round. Each round gives Lagrange's lower bound of the cost of any
plan. In the end an integer program picks one choice for each service, so that what comes out fits by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offramp_core.fleet.exact import (
    EXACT,
    Choice,
    Demand,
    Floats,
    Ints,
    cheapest,
    choice,
    least_short,
    missed_cost,
    most_answered,
    nothing,
    reach,
)

ROUNDS = 12
GAP = 0.005  # of the cost, at which prices are good enough
NODES = 500  # of the last program; what it has by then is taken

Priced = Callable[[Demand, Floats], Choice | None]


@dataclass(frozen=True, slots=True)
class Shared:
    """A choice for each service; no plan's cost is below ``bound`` (per hour), and ``worth`` (P,) is what one more
    worker of each pool would save (per hour)."""

    choices: tuple[Choice, ...]
    bound: float
    worth: tuple[float, ...]


def share(demands: Sequence[Demand], *, cost: Floats, room: Ints) -> Shared | None:
    """The cheapest plan that answers every demand; None where none was found.

    Parameters
    ----------
    cost, room : (P,)
        Of one worker per hour, and how many workers there are.
    """
    return _Market(demands, cost, room, lambda demand, prices: cheapest(demand, prices=prices, room=room)).settle()


def share_shortage(demands: Sequence[Demand], *, cost: Floats, room: Ints) -> tuple[Choice, ...]:
    """What leaves little unanswered where the pools do not suffice, the first parts of every demand first, and what is
    to spare last.

    A service is asked for no more than all pools could answer: shares of more than that would all be alike.
    """
    asked = demands
    demands = [_within(d, max(reach(d, room), EXACT * d.rate)) for d in asked]
    market = _Market(
        demands, cost, room, lambda demand, prices: least_short(demand, prices=prices, room=room, cost=cost)
    )
    market.let_go()
    settled = market.settle()
    chosen = list(settled.choices) if settled is not None else [nothing(demand, len(cost)) for demand in demands]
    without_spare = [replace(d, rate=d.rate - d.spare, spare=0.0) for d in demands]
    for wanted in (without_spare, demands):  # what is asked of everybody before what anybody has to spare
        _hand_out_left(chosen, wanted, demands, cost=cost, room=room)
    beyond = [before.rate - after.rate for before, after in zip(asked, demands, strict=True)]
    return tuple(replace(c, unmet=c.unmet + more) for c, more in zip(chosen, beyond, strict=True))


def _hand_out_left(
    chosen: list[Choice], wanted: Sequence[Demand], demands: Sequence[Demand], *, cost: Floats, room: Ints
) -> None:
    """Give workers that nobody has to services that lack some of what is ``wanted``: first to where most more would be
    answered, whatever the order of services. Changes ``chosen``, the choices for whole ``demands``."""
    left = room - workers_used(chosen, len(cost))

    def more(i: int) -> tuple[float, Choice]:
        """Requests per second that the workers left over would answer for one service, and its choice with them."""
        lacks = choice(wanted[i], np.array(chosen[i].counts), len(cost)).unmet
        if lacks <= 0 or not (left > 0)[wanted[i].pool].any():
            return 0.0, chosen[i]
        better = most_answered(wanted[i], prices=cost, room=left + np.array(chosen[i].used))
        return lacks - better.unmet, better

    gains = [more(i)[0] for i in range(len(chosen))]
    for i in sorted((i for i, gain in enumerate(gains) if gain > 0), key=lambda i: -gains[i]):
        gain, better = more(i)  # others may have taken some since
        if gain > 0:
            left = left + np.array(chosen[i].used) - np.array(better.used)
            chosen[i] = choice(demands[i], np.array(better.counts), len(cost))


def _within(demand: Demand, most: float) -> Demand:
    """The same asking for no more than so many requests per second."""
    part = min(1.0, most / demand.rate)
    return replace(demand, rate=demand.rate * part, spare=demand.spare * part)


def workers_used(choices: Sequence[Choice], pools: int) -> Ints:
    """(P,) workers of all choices together."""
    used: Ints = np.array([c.used for c in choices], dtype=np.int64).reshape(len(choices), pools)
    return np.asarray(used.sum(axis=0), dtype=np.int64)


class _Market:
    """The choices found so far. The cost of what is unanswered counts as part of a choice's cost."""

    def __init__(self, demands: Sequence[Demand], cost: Floats, room: Ints, priced: Priced) -> None:
        self._demands, self._cost, self._room, self._priced = demands, cost, room, priced
        self._menus: list[list[Choice]] = [[] for _ in demands]
        self._bound = 0.0

    def let_go(self) -> None:
        """Every service may get nothing."""
        for menu, demand in zip(self._menus, self._demands, strict=True):
            menu.append(nothing(demand, len(self._cost)))

    def settle(self) -> Shared | None:
        """Rounds of prices, then one choice for each service."""
        worth = np.zeros(len(self._cost))
        first = self._ask(worth)
        if first is None:
            return None
        used = workers_used(first, len(worth))
        if (used <= self._room).all():
            return Shared(tuple(first), self._bound, tuple(map(float, worth)))
        for pool in np.flatnonzero(used > self._room):  # so that the first program has something to choose from
            self._ask(np.where(np.arange(len(worth)) == pool, self._cost.max(), 0.0))
        for _ in range(ROUNDS):
            priced = self._prices()
            if priced is None:
                break
            worth, value, fits = priced
            before = sum(map(len, self._menus))
            if self._ask(worth) is None or sum(map(len, self._menus)) == before:
                break
            if fits and value <= self._bound * (1 + GAP):
                break
        chosen = self._pick()
        return None if chosen is None else Shared(tuple(chosen), self._bound, tuple(map(float, worth)))

    def _ask(self, worth: Floats) -> list[Choice] | None:
        """Each service's choice at these prices, added to its menu; None where one has none."""
        found: list[Choice] = []
        reduced = 0.0
        for demand, menu in zip(self._demands, self._menus, strict=True):
            one = self._priced(demand, self._cost + worth)
            if one is None:
                return None
            reduced += self._costs(demand, one) + float(worth @ np.array(one.used))
            found.append(one)
            if one not in menu:
                menu.append(one)
        self._bound = max(self._bound, reduced - float(worth @ self._room))
        return found

    def _costs(self, demand: Demand, found: Choice) -> float:
        missed = missed_cost(demand, found.unmet, cost=self._cost, room=self._room)
        return float(self._cost @ found.used) + float(missed)

    def _table(self) -> tuple[Floats, Floats, Ints]:
        """(n,) costs, (n, P) workers and (n,) services of all choices."""
        rows = [(s, c) for s, menu in enumerate(self._menus) for c in menu]
        costs = np.array([self._costs(self._demands[s], c) for s, c in rows])
        return costs, np.array([c.used for _, c in rows], dtype=float), np.array([s for s, _ in rows])

    def _prices(self) -> tuple[Floats, float, bool] | None:
        """The linear program's worth of a worker of each pool, its value, and whether it needs no room beyond; None
        where the figures are too far apart for the solver."""
        from scipy.optimize import linprog

        costs, used, service = self._table()
        pools, n = len(self._cost), len(costs)
        beyond = 10 * float(costs.max())  # per worker that the pools do not have, while choices that fit are missing
        each = (service[None, :] == np.arange(len(self._menus))[:, None]).astype(float)
        result = linprog(
            np.r_[costs, np.full(pools, beyond)],
            A_ub=np.hstack([used.T, -np.eye(pools)]),
            b_ub=self._room.astype(float),
            A_eq=np.hstack([each, np.zeros((len(each), pools))]),
            b_eq=np.ones(len(each)),
            method="highs",
        )
        if result.x is None:
            return None
        worth = np.maximum(-np.asarray(result.ineqlin.marginals, dtype=np.float64), 0.0)
        return worth, float(result.fun or 0.0), bool(np.asarray(result.x)[n:].sum() < 1e-7)

    def _pick(self) -> list[Choice] | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        costs, used, service = self._table()
        each = (service[None, :] == np.arange(len(self._menus))[:, None]).astype(float)
        result = milp(
            costs / costs.max(),
            constraints=[LinearConstraint(used.T, -np.inf, self._room.astype(float)), LinearConstraint(each, 1, 1)],
            integrality=np.ones(len(costs), dtype=np.int64),
            bounds=Bounds(0, 1),
            options={"node_limit": NODES, "mip_rel_gap": GAP / 5},
        )
        if result.x is None:
            return None
        starts = np.flatnonzero(np.diff(np.r_[-1, service]))
        best = [
            int(start + np.argmax(part)) for start, part in zip(starts, np.split(result.x, starts[1:]), strict=True)
        ]
        flat = [c for menu in self._menus for c in menu]
        return [flat[i] for i in best]
