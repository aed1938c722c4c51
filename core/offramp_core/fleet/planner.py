"""How many workers of which column every service gets, what that costs, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet.exact import EXACT, Choice, Demand, Floats, Ints, alone, answered, cheapest
from offramp_core.fleet.parts import Caution, Column, Key, Pool, Service, Workers, refuse_twice
from offramp_core.fleet.queueing import headroom_rate
from offramp_core.fleet.shared import share, share_shortage

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One column as the planner saw it.

    ``workers_alone`` and ``cost_alone`` (per hour) are what it would take without any other and with as much to spare,
    None where it may not serve; ``headroom_rate`` what its workers must be able to answer beyond the demand.
    """

    key: Key
    certified_disagreement: float
    headroom_rate: float | None
    workers_alone: int | None
    cost_alone: float | None
    workers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """The workers of one service."""

    service: str
    workers: tuple[Workers, ...]
    cost_per_hour: float
    #: demand, answered_rate, unmet_rate and headroom_rate: requests per second: asked for; answered in time by these
    #: workers; the demand beyond that; and what the workers can do beyond ``answered_rate``, kept free so that the
    #: objective holds.
    demand: float
    answered_rate: float
    unmet_rate: float
    headroom_rate: float
    #: Whether these are not the workers that serve now.
    changed: bool
    reason: str
    considered: tuple[Considered, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """All services. ``bound_per_hour`` is what no plan that answers every demand with its spare can be cheaper than,
    None where there is no such plan; ``worth_per_hour`` the price beyond its cost at which a worker of each pool is
    shared (Lagrange's; a whole worker may save more or less, see :func:`saved_by_one_more`)."""

    services: tuple[ServicePlan, ...]
    cost_per_hour: float
    bound_per_hour: float | None
    workers_by_pool: Mapping[str, int]
    worth_per_hour: Mapping[str, float]

    @property
    def unmet_rate(self) -> float:
        """Requests per second of all services that no worker answers in time."""
        return sum(service.unmet_rate for service in self.services)


def plan_fleet(
    services: Sequence[Service],
    pools: Sequence[Pool],
    *,
    current: Mapping[str, Sequence[Workers]] | None = None,
    caution: Caution | None = None,
) -> FleetPlan:
    """Plan all services at once.

    No pool is ever asked for more workers than it has, no worker for more memory; where that does not suffice, the plan
    says what stays unanswered. A service keeps its workers while they answer its demand, unless a change pays.

    Parameters
    ----------
    current : mapping
        The workers of each service now, by its name; services that are not there have none.

    Raises
    ------
    InvalidArgumentError
        A name stands twice, or a column or ``current`` names what is not there; the message names the field.
    """
    current, caution = current or {}, caution or Caution()
    _check(services, pools, current)
    planners = [_One(service, pools, tuple(current.get(service.name, ())), caution) for service in services]
    room = np.array([pool.max_workers for pool in pools], dtype=np.int64)
    cost = np.array([pool.cost_per_hour for pool in pools])
    asked = [one for one in planners if one.service.demand > 0 and one.usable]
    fresh = share([one.demand(caution.spare) for one in asked], cost=cost, room=room)
    if fresh is None:
        choices = share_shortage([one.demand(caution.spare) for one in asked], cost=cost, room=room)
    else:
        choices = fresh.choices
    chosen = {one.service.name: found for one, found in zip(asked, choices, strict=True)}
    nothing = Choice((), (0,) * len(pools))
    offers = [chosen.get(one.service.name, nothing) for one in planners]
    prices = cost if fresh is None else cost + np.array(fresh.worth)
    keeps = [one.keeps(offer, prices) for one, offer in zip(planners, offers, strict=True)]
    kept = _worth_making_room(keeps, planners, offers, room)
    plans = [
        one.plan(offer, keep, scarce=fresh is None) for one, offer, keep in zip(planners, offers, kept, strict=True)
    ]
    used = np.sum([_used(plan.workers, pools) for plan in plans] or [_used((), pools)], axis=0)
    complete = fresh is not None and len(asked) == sum(one.service.demand > 0 for one in planners)
    return FleetPlan(
        services=tuple(plans),
        cost_per_hour=float(sum(plan.cost_per_hour for plan in plans)),
        bound_per_hour=fresh.bound if fresh is not None and complete else None,
        workers_by_pool={pool.name: int(n) for pool, n in zip(pools, used, strict=True)},
        worth_per_hour={p.name: w for p, w in zip(pools, fresh.worth, strict=True)} if fresh is not None else {},
    )


def saved_by_one_more(
    planned: FleetPlan,
    services: Sequence[Service],
    pools: Sequence[Pool],
    *,
    current: Mapping[str, Sequence[Workers]] | None = None,
) -> dict[str, float]:
    """What the plan would cost less per hour if a pool had one more worker, by the pool's name: planned again for each.

    Empty where something stays unanswered: another worker then answers more and saves nothing.
    """
    if planned.unmet_rate:
        return {}
    saved = {}
    for pool in pools:
        larger = [replace(p, max_workers=p.max_workers + 1) if p is pool else p for p in pools]
        again = plan_fleet(services, larger, current=current)
        saved[pool.name] = max(0.0, planned.cost_per_hour - again.cost_per_hour)
    return saved


def _check(services: Sequence[Service], pools: Sequence[Pool], current: Mapping[str, Sequence[Workers]]) -> None:
    refuse_twice("services", (service.name for service in services))
    refuse_twice("pools", (pool.name for pool in pools))
    names = {pool.name for pool in pools}
    for service in services:
        for column in service.columns:
            if column.key.pool not in names:
                raise InvalidArgumentError(
                    f"services['{service.name}'].columns names the pool '{column.key.pool}', which is not in pools"
                )
    for name, workers in current.items():
        if name not in {service.name for service in services}:
            raise InvalidArgumentError(f"current names the service '{name}', which is not in services")
        for one in workers:
            if not isinstance(one, Workers):
                raise InvalidArgumentError(f"current['{name}'] has {one!r}; it must have Workers only")
        refuse_twice(f"current['{name}']", (w.key for w in workers))


def _used(workers: Sequence[Workers], pools: Sequence[Pool]) -> list[int]:
    return [sum(w.count for w in workers if w.key.pool == pool.name) for pool in pools]


def _worth_making_room(
    keeps: list[str | None], planners: Sequence[_One], offers: Sequence[Choice], room: Ints
) -> list[str | None]:
    """Why the workers of now stay, of those that stay. Where others would have to make room for changes that only
    save, these are made if together with those of the same full pools they earn more than they cost."""
    moved = _fitting(keeps, planners, offers, room)
    if moved == keeps:
        return moved
    wait = "others would have to make room, and pay more for it"
    stay = [keep or (wait if one.suffices else None) for keep, one in zip(keeps, planners, strict=True)]
    stay = _filling(_fitting(stay, planners, offers, room), keeps, planners, offers, room)
    for group in _competing(moved, stay, planners, offers, room):
        if sum(planners[i].earned(offers[i]) * (1 if stay[i] else -1) for i in group) > 0:
            for i in group:
                stay[i] = moved[i]
    return stay


def _in_use(kept: Sequence[str | None], planners: Sequence[_One], offers: Sequence[Choice], room: Ints) -> Ints:
    """(S, P) workers of each service."""
    used = [one.used if keep else offer.used for one, offer, keep in zip(planners, offers, kept, strict=True)]
    return np.array(used, dtype=np.int64).reshape(len(used), len(room))


def _filling(
    kept: list[str | None], keeps: list[str | None], planners: Sequence[_One], offers: Sequence[Choice], room: Ints
) -> list[str | None]:
    """Make those changes too for which nobody has to make room, those first that earn most."""
    kept = list(kept)
    more = _in_use([None] * len(kept), planners, offers, room) - _in_use(["now"] * len(kept), planners, offers, room)
    left = room - _in_use(kept, planners, offers, room).sum(axis=0)
    held = [i for i, keep in enumerate(kept) if keep and keeps[i] is None]
    held.sort(key=lambda i: -planners[i].earned(offers[i]))
    while (i := next((i for i in held if (more[i] <= left).all()), None)) is not None:
        kept[i], left = None, left - more[i]
        held.remove(i)
    return kept


def _competing(
    moved: list[str | None], stay: list[str | None], planners: Sequence[_One], offers: Sequence[Choice], room: Ints
) -> list[list[int]]:
    """The services that differ, in groups: those of two groups have no pool in common that is too full for any of both
    ways, so that each group may go its own."""
    differ = [i for i in range(len(stay)) if (moved[i] is None) != (stay[i] is None)]
    if not differ:
        return []
    from scipy.sparse.csgraph import connected_components

    new, now = (_in_use(kept, planners, offers, room) for kept in (moved, stay))
    full = np.maximum(new, now).sum(axis=0) > room
    shares = ((new != now) & full).astype(np.int64)
    _, labels = connected_components(shares @ shares.T, directed=False)
    return [[i for i in differ if labels[i] == label] for label in {int(labels[i]) for i in differ}]


def _fitting(
    kept: list[str | None], planners: Sequence[_One], offers: Sequence[Choice], room: Ints
) -> list[str | None]:
    """Take the new workers of services that would keep theirs, those first that free most of a pool that is too full:
    the new ones of all of them fit together."""
    while True:
        over = _in_use(kept, planners, offers, room).sum(axis=0) - room
        if (over <= 0).all():
            return kept
        pool = int(np.argmax(over))
        freed = [
            one.used[pool] - offer.used[pool] if keep else 0
            for one, offer, keep in zip(planners, offers, kept, strict=True)
        ]
        kept = [None if i == int(np.argmax(freed)) else keep for i, keep in enumerate(kept)]


class _One:
    """One service: which columns may serve, what its workers answer now, and whether a change pays."""

    def __init__(self, service: Service, pools: Sequence[Pool], current: tuple[Workers, ...], caution: Caution) -> None:
        self.service, self._pools, self._current, self._caution = service, pools, current, caution
        self._by_name = {pool.name: pool for pool in pools}
        self._refused = {column.key: self._refusal(column) for column in service.columns}
        allowed = [column for column in service.columns if self._refused[column.key] is None]
        self._beaten = self._dominated(allowed)
        self.usable = [column for column in allowed if column.key not in self._beaten]
        self._known = {column.key: column for column in allowed}
        self.used = tuple(_used(current, pools))

    def demand(self, more: float) -> Demand:
        """Of the usable columns, with a fraction more than is asked for."""
        asked = self.service.demand
        return self._demand(self.usable, asked * (1 + more), spare=asked * more)

    def _demand(self, columns: Sequence[Column], rate: float, *, spare: float = 0.0) -> Demand:
        order = [pool.name for pool in self._pools]
        return Demand(
            rate=rate,
            spare=spare,
            worker_rate=np.array([column.worker_rate for column in columns]),
            headroom=np.array([headroom_rate(self.service, column) for column in columns]),
            pool=np.array([order.index(column.key.pool) for column in columns], dtype=np.int64),
        )

    def _refusal(self, column: Column) -> str | None:
        service, pool = self.service, self._by_name[column.key.pool]
        if column.certified_disagreement > service.max_disagreement:
            return (
                f"disagreement {column.certified_disagreement:.3g} is above the budget {service.max_disagreement:.3g}"
            )
        if column.memory_bytes > pool.worker_memory_bytes:
            return f"needs {column.memory_bytes} bytes, a worker of {pool.name} has {pool.worker_memory_bytes}"
        if pool.max_workers == 0:
            return f"{pool.name} has no workers"
        if not isfinite(headroom_rate(service, column)):
            return (
                f"two batches take {2 * column.batch_seconds:.3g} s of the objective of {service.latency_seconds:.3g} s"
            )
        return None

    def _dominated(self, columns: Sequence[Column]) -> dict[Key, str]:
        """Columns that another one of the pool beats in rate and head-room; of equals the more accurate one stays."""
        found: dict[Key, str] = {}
        places = {column.key: self._rank(column) for column in columns}
        for column in columns:
            rate, head, *rest = places[column.key]
            for other in columns:
                theirs, less, *more = places[other.key]
                if other.key.pool == column.key.pool and other is not column and other.key not in found:
                    equal = (rate, head) == (theirs, less)
                    if theirs >= rate and less <= head and (not equal or more <= rest):
                        found[column.key] = f"{other.key} answers as much or more with as little head-room"
                        break
        return found

    def _rank(self, column: Column) -> tuple[float, float, float, float]:
        head = headroom_rate(self.service, column)
        return column.worker_rate, head, column.certified_disagreement, column.startup_seconds

    def keeps(self, offer: Choice, prices: Floats) -> str | None:
        """Why the workers of now stay; None where they go. Of a pool that is shared a worker counts as much as another
        service would pay, or the last ones of it would go to and fro."""
        if not self._current or any(w.key not in self._known for w in self._current):
            return None
        demand, now = self.service.demand, self._answered(self._current)
        workers = self._workers(offer)
        offered = self._answered(workers)
        if now < demand * (1 - EXACT):
            return "the pools have none that answer more" if offered <= now * (1 + EXACT) else None
        shared = float(prices @ (np.array(self.used) - _used(workers, self._pools)))
        saved = min(self._cost(self._current) - self._cost(workers), shared)
        if set(workers) == set(self._current) or saved <= 0 or offered < demand * (1 - 2 * EXACT):
            return "they answer the demand, and none that answer more of it are cheaper"
        return self._not_worth_it(workers, saved, prices)

    @property
    def suffices(self) -> bool:
        """Whether the workers of now may stay and answer what is asked."""
        if not self._current or any(w.key not in self._known for w in self._current):
            return False
        return self._answered(self._current) >= self.service.demand * (1 - EXACT)

    def earned(self, offer: Choice) -> float:
        """What a change to the offered workers saves until it has to have paid, less what it costs itself."""
        workers = self._workers(offer)
        saved = self._cost(self._current) - self._cost(workers)
        return saved * self._caution.horizon_seconds / HOUR - self._change_cost(workers)

    def _not_worth_it(self, workers: Sequence[Workers], saved: float, prices: Floats) -> str | None:
        """Why cheaper workers that answer the demand are not worth the change; None where they are."""
        caution = self._caution
        if self._price_with_slack(prices) >= float(prices @ np.array(self.used)) * (1 - 1e-9):
            return f"with {caution.slack:.0%} more demand nothing would be cheaper"
        change, earned = self._change_cost(workers), saved * caution.horizon_seconds / HOUR
        if earned <= change:
            return f"a change would cost {change:.3g} and save {earned:.3g} in {caution.horizon_seconds:g} s"
        return None

    def _price_with_slack(self, prices: Floats) -> float:
        """Of the cheapest workers."""
        if self.service.demand <= 0 or not self.usable:
            return 0.0
        room = np.array([pool.max_workers for pool in self._pools], dtype=np.int64)
        found = cheapest(self.demand(self._caution.slack), prices=prices, room=room)
        return float("inf") if found is None else float(prices @ np.array(found.used))

    def _change_cost(self, workers: Sequence[Workers]) -> float:
        """Of starting what is new, and of starting again what is stopped. Another plan on the same hardware is a switch
        and starts nothing."""
        total = 0.0
        for pool, before, after in zip(self._pools, self.used, _used(workers, self._pools), strict=True):
            involved = [w.key for w in (*self._current, *workers) if w.key.pool == pool.name]
            seconds = max((self._known[key].startup_seconds for key in involved), default=0.0)
            total += abs(after - before) * pool.cost_per_hour * seconds / HOUR
        return total

    def _answered(self, workers: Sequence[Workers]) -> float:
        columns = [self._known[w.key] for w in workers]
        return answered(self._demand(columns, 1.0), np.array([w.count for w in workers])) if workers else 0.0

    def _cost(self, workers: Sequence[Workers]) -> float:
        return float(sum(w.count * self._by_name[w.key.pool].cost_per_hour for w in workers))

    def _workers(self, offer: Choice) -> tuple[Workers, ...]:
        pairs = zip(self.usable, offer.counts, strict=True) if offer.counts else ()
        return tuple(Workers(key=column.key, count=count) for column, count in pairs if count)

    def plan(self, offer: Choice, kept: str | None, *, scarce: bool) -> ServicePlan:
        """The workers, old or new, and what speaks for them. ``scarce`` says that not everyone could have spare."""
        workers = self._current if kept else self._workers(offer)
        demand, rate = self.service.demand, self._answered(workers)
        unmet = demand - rate if rate < demand * (1 - 2 * EXACT) else 0.0
        able = sum(self._known[w.key].worker_rate * w.count for w in workers)
        spared = rate >= demand * (1 + self._caution.spare) * (1 - 2 * EXACT)
        return ServicePlan(
            service=self.service.name,
            workers=workers,
            cost_per_hour=self._cost(workers),
            demand=demand,
            answered_rate=rate,
            unmet_rate=unmet,
            headroom_rate=able - rate,
            changed=set(workers) != set(self._current),
            reason=self._reason(kept, unmet, scarce=scarce and not spared),
            considered=tuple(self._all_considered(workers)),
        )

    def _reason(self, kept: str | None, unmet: float, *, scarce: bool) -> str:
        if self.service.demand <= 0 and not kept:
            return "nothing is asked"
        if not self.usable:
            return "no column may serve; the rows say why"
        short = f"; {unmet:.3g} of {self.service.demand:.3g} requests a second stay unanswered" if unmet else ""
        if kept:
            return f"these workers stay: {kept}{short}"
        if short:
            return f"the pools have no more{short}"
        if scarce:
            return "they answer what is asked; the pools have no room for every service's spare"
        return f"the cheapest that answer {self._caution.spare:.0%} more than is asked"

    def _all_considered(self, workers: Sequence[Workers]) -> Iterator[Considered]:
        counts, chosen = {w.key: w.count for w in workers}, self._cost(workers)
        needed = dict.fromkeys(self._known, 0)
        if self.service.demand > 0 and needed:
            asked = self.service.demand * (1 + self._caution.spare)
            needed = dict(zip(needed, alone(self._demand(list(self._known.values()), asked)).tolist(), strict=True))
        for column in self.service.columns:
            yield self._considered(column, counts.get(column.key, 0), needed.get(column.key), chosen=chosen)

    def _considered(self, column: Column, count: int, needed: int | None, *, chosen: float) -> Considered:
        head, pool = headroom_rate(self.service, column), self._by_name[column.key.pool]
        row = Considered(
            key=column.key,
            certified_disagreement=column.certified_disagreement,
            headroom_rate=head if isfinite(head) else None,
            workers_alone=needed,
            cost_alone=None if needed is None else needed * pool.cost_per_hour,
            workers=count,
            reason="",
        )
        refused = self._refused[column.key]
        if refused:
            return replace(row, reason=f"stays: {refused}" if count else refused)
        return replace(row, reason=self._why(row, pool, chosen=chosen))

    def _why(self, row: Considered, pool: Pool, *, chosen: float) -> str:
        if row.key in self._beaten:
            return f"stays: {self._beaten[row.key]}" if row.workers else self._beaten[row.key]
        if row.workers:
            return "chosen"
        if row.workers_alone is not None and row.workers_alone > pool.max_workers:
            return f"{pool.name} has {pool.max_workers} workers for all services"
        if row.cost_alone is not None and row.cost_alone >= chosen * (1 - 1e-9):
            return f"alone it would cost {row.cost_alone:.4g} an hour, what is chosen {chosen:.4g}"
        return f"cheaper alone; {pool.name} is shared, or the change would not pay"
