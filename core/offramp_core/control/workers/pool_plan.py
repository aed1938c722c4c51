"""How many workers each pool of a service is to have: the cheapest that answer what is asked, by the fleet's planner.

Figures are those with exits off, so that a plan may be taken back at any moment, unless the user has exits counted
(:func:`with_exits`). A worker behind a Service has a queue
of its own; the room that independent users take of one is in its rate already. Where requests are shared by numbers of
workers, each worker of the pools that serve together gets as many, so that none of them counts for more than the
slowest of them can do: every set of the fastest pools is planned, and the cheapest taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import Config, PoolPlanStatus, PoolStatus, Saving, Service
from offramp_core.control.snapshot import ClassShare, Event, Load
from offramp_core.control.spec import ServiceSpec, WorkerPool
from offramp_core.control.workers.pool_demand import Foreseen, foreseen
from offramp_core.fleet import (
    Caution,
    Column,
    Key,
    Pool,
    Present,
    ServicePlan,
    Workers,
    next_steps,
    plan_fleet,
)
from offramp_core.fleet import Service as Planned
from offramp_core.reasons import Reason

NAME = "service"  # each service is planned alone: its pools are its own
STARTUP_SECONDS = 30.0  # from the decision to the first answer, where it was not measured
LEAST_RATE = 1e-3  # of a service that nobody asks: one worker stays, or nobody would notice that it is asked again
WATCHED_SECONDS = 120.0  # of requests that this process must have seen before it takes workers away
CAUTION = Caution()
TINY = 1e-9
MOST_SAVING = 0.9  # of the engine's time that exits are counted on for
MOST_REASON = 1024  # characters that a status may hold


@dataclass(frozen=True, slots=True)
class PoolsView:
    """What the plan may look at. ``known`` has the figures of now, and what was planned and asked for before.

    ``demand`` is requests per second, ``late_share`` of which may be late; ``by_weight`` says that they are shared by
    what workers can do. ``may_lower`` is False while too little was seen to take workers away. ``placed`` has, by pool,
    the workers that answer or start; ``answered`` is what the plan of before answers, with the model of then
    and the exits of now.
    ``shares`` has, by pool, what other services leave of its WorkerClass.
    """

    pools: tuple[WorkerPool, ...]
    known: tuple[PoolStatus, ...]
    demand: float
    latency_seconds: float
    late_share: float
    by_weight: bool
    may_lower: bool = True
    placed: Mapping[str, int] = field(default_factory=dict)
    answered: float = 0.0
    shares: Mapping[str, ClassShare] = field(default_factory=dict)

    def most(self, pool: WorkerPool) -> int:
        """Workers that a pool may have in a plan."""
        share = self.shares.get(pool.name)
        return pool.most if share is None else min(pool.most, share.most)

    def with_place(self, known: PoolStatus) -> int:
        """Those of the workers that a pool asks for that answer or start."""
        return max(known.ready, min(self.placed.get(known.name, 0), known.desired))


@dataclass(frozen=True, slots=True)
class PoolsPlan:
    """``planned`` workers of each pool, what they cost an hour and answer, and why; empty where nothing could be
    planned."""

    planned: Mapping[str, int] = field(default_factory=dict)
    cost_per_hour: float = 0.0
    answered: float = 0.0
    reason: str = ""


def plan_pools(view: PoolsView) -> PoolsPlan:
    """The cheapest workers that answer the demand with room to spare; those of before, while a change would not pay.

    No pool is asked for more workers than it has a place for, and none for fewer than its floor. One that was not
    measured yet takes no part.
    """
    one = _Planner(view)
    if not one.usable:
        return PoolsPlan(reason=one.nothing_usable())
    if model_on_its_way(view.known):
        return one.added()
    best = one.best()
    planned = best.planned
    reason = best.reason
    if not view.may_lower:
        raised = {name: max(n, one.present[name]) for name, n in planned.items()}
        if raised != planned:
            planned, reason = raised, "too little was seen since the operator started to take workers away"
    cost = sum(n * one.cost[name] for name, n in planned.items())
    return PoolsPlan(planned, cost, best.answered, reason)


def model_on_its_way(known: Iterable[PoolStatus]) -> bool:
    """Whether workers serve of which nobody knows what they do with the model of now."""
    return any(pool.planned and pool.ready and not pool.worker_rate for pool in known)


def next_numbers(view: PoolsView, planned: Mapping[str, int]) -> dict[str, int]:
    """How many workers each pool is to ask for now, on the way to the plan: new ones answer before old ones go.

    A pool without a place for all its workers asks for one more than have one: when that one starts, there is a place
    again. A pool that was not measured has one worker that does it, and nobody waits for that. What other services have
    of a pool's WorkerClass is waited for.
    """
    asked = _asked(view, planned)
    known = {pool.name: pool for pool in view.known}
    most = {name: share.limit(known[name].desired) for name, share in view.shares.items()}
    waits = any(n > most.get(name, n) for name, n in asked.items())
    asked = {name: min(n, most.get(name, n)) for name, n in asked.items()}
    if waits:  # and who waits for each other's workers makes way, one at a time
        for name, share in view.shares.items():
            if share.waited_for and asked[name] > planned.get(name, asked[name]):
                asked[name] -= 1
                break
    return asked


def _asked(view: PoolsView, planned: Mapping[str, int]) -> dict[str, int]:
    """The same where nobody else has what is planned."""
    asked, room = dict[str, int](), list[Pool]()
    ready, starting, wanted = list[Workers](), list[Workers](), list[Workers]()
    for pool, known in zip(view.pools, view.known, strict=True):
        limit = view.most(pool)
        key, n = _key(pool.name), max(planned.get(pool.name, known.desired), min(pool.min_workers, limit))
        most = max(limit, known.desired)  # those above a maximum that was lowered go when others answer
        room.append(Pool(name=pool.name, cost_per_hour=1.0, max_workers=most, worker_memory_bytes=1))
        if known.message and known.ready <= limit:
            placed = view.with_place(known)
            asked[pool.name] = min(limit, max(n, placed + 1))
            waited_for = _workers(key, max(0, min(n, placed, limit) - known.ready))
            starting += waited_for
            wanted += waited_for
            continue
        if not known.worker_rate:
            n = max(n, 1)
            if not known.ready:
                asked[pool.name] = min(n, limit)
                continue
        asked[pool.name] = known.desired
        ready += _workers(key, min(known.ready, known.desired))
        starting += _workers(key, max(0, known.desired - known.ready))
        wanted += _workers(key, min(n, limit))
    present = Present(ready=tuple(ready), starting=tuple(starting))
    step = next_steps({NAME: present}, {NAME: wanted}, room)[NAME]
    for w in step.start:
        asked[w.key.pool] += w.count
    for w in (*step.stop, *step.stop_starting):
        asked[w.key.pool] -= w.count
    return asked


def with_plan(
    service: Service,
    known: tuple[PoolStatus, ...],
    load: Load,
    *,
    placed: Mapping[str, int],
    shares: Mapping[str, ClassShare],
    now: float,
    watched_since: float,
    saving: float = 0.0,
) -> tuple[tuple[PoolStatus, ...], PoolPlanStatus]:
    """How each pool stands with what is planned for it now, and the plan. Where the spec says how many workers there
    are, the plan is told and changes nothing. ``saving`` is the share of the engine's time that exits are counted on
    for at most."""
    spec, before = service.spec, service.status.pool_plan
    if not spec.pools or spec.pools[0].max_workers is None:
        return known, PoolPlanStatus()
    saving, off_at = _steady_saving(before, saving, now=now) if spec.counts_exits else (saving, None)
    if moving := model_on_its_way(known):  # then nobody is pressed by the share of another one
        has = {pool.name: pool.desired for pool in known}
        shares = {name: replace(share, most=max(share.most, has[name])) for name, share in shares.items()}
    seen = foreseen(service, load, now=now, lead_seconds=max(map(startup_seconds, known)))
    view = replace(
        view_of(service, known, seen.rate, saving=saving),
        may_lower=now - watched_since >= WATCHED_SECONDS,
        placed=placed,
        answered=before.answered * ((1 - before.saving) / (1 - saving)),
        shares=shares,
    )
    draft = _asked_and_expected(before, seen, steady=bool(shares), may_lower=view.may_lower)
    draft = replace(draft, answered=view.answered, saving=saving, exits_off_at=off_at)
    plan = plan_pools(view)
    short = plan.answered < draft.demand * (1 - TINY) or not plan.planned
    numbers = next_numbers(view, plan.planned)
    pools = []
    for pool, status in zip(spec.pools, known, strict=True):
        share = shares.get(pool.name)
        n = plan.planned.get(pool.name, min(status.planned, view.most(pool)))
        desired = status.desired if pool.fixed else numbers[pool.name]
        lacks = share is not None and share.wanted > share.most and (short or n < pool.min_workers)
        wanted = share.wanted if lacks and share is not None else 0
        pools.append(replace(status, planned=n, desired=desired, wanted=wanted))
    if not plan.planned:
        return tuple(pools), _without_plan(draft, plan.reason, in_short(service, pools, shares), moving=moving)
    same = all((a.planned, a.wanted) == (b.planned, b.wanted) for a, b in zip(pools, known, strict=True))
    steady = (draft.demand, draft.asked) == (before.demand, before.asked) if shares else True
    same = same and (saving, off_at) == (before.saving, before.exits_off_at)
    if before.reason and same and steady and seen.expected == (before.expected > 0):
        return tuple(pools), before
    reason = _joined([plan.reason, seen.reason, *in_short(service, pools, shares)])
    cost = round(plan.cost_per_hour, 6)
    return tuple(pools), replace(draft, answered=_digits(plan.answered), cost_per_hour=cost, reason=reason)


def _asked_and_expected(before: PoolPlanStatus, seen: Foreseen, *, steady: bool, may_lower: bool) -> PoolPlanStatus:
    """The plan of before for what is foreseen now; ``steady`` where other services' shares follow from it."""

    def rounded(earlier: float, rate: float) -> float:
        return steady_demand(earlier, rate, may_lower=may_lower) if steady else _digits(rate)

    demand = rounded(before.demand, seen.rate)
    if not seen.expected:
        return replace(before, demand=demand, asked=0.0, expected=0.0)
    asked = rounded(before.asked if before.expected else before.demand, seen.recent)
    return replace(before, demand=demand, asked=asked, expected=_digits(seen.rate))


def _joined(parts: Iterable[str]) -> str:
    """Sentences as one text that a status can hold."""
    text = "; ".join(part for part in parts if part)
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def _without_plan(draft: PoolPlanStatus, reason: str, lacking: Sequence[str], *, moving: bool) -> PoolPlanStatus:
    """What is told while nothing can be planned. Where other services have all workers, nothing is answered; what is
    asked of a class that others use too is told in any case, as their shares follow from it."""
    if lacking and not moving:
        return replace(draft, answered=0.0, cost_per_hour=0.0, reason=_joined(lacking))
    return replace(draft, reason=_joined([reason or draft.reason]))


def view_of(service: Service, known: tuple[PoolStatus, ...], demand: float, *, saving: float) -> PoolsView:
    """What a plan for a demand looks at, with nothing known of other services and of pods."""
    spec, known = service.spec, with_exits(known, saving)
    latency, late_share = spec.latency_seconds or 0.0, 1 - spec.latency_share
    return PoolsView(spec.pools, known, demand, latency, late_share, by_weight=spec.route is not None)


def with_exits(known: Iterable[PoolStatus], saving: float) -> tuple[PoolStatus, ...]:
    """What workers carry while their plan saves so much of the engine's time. Whether they answer in time is told
    with exits off: else nobody would answer in time once exits go off, until others have started.

    Examples
    --------
    >>> [pool.worker_rate for pool in with_exits([PoolStatus("a", worker_rate=60.0, batch_seconds=0.1)], 0.5)]
    [120.0]
    """
    left = 1 - min(saving, MOST_SAVING)
    return tuple(replace(p, worker_rate=p.worker_rate / left) for p in known)


def counted_saving(spec: ServiceSpec, stable: Config, measured: Saving | None) -> float:
    """What the plan that serves is counted on to save of the engine's time, where the user has exits counted: what its
    certificate promises once audits are paid for, of the tier that saves least, as all requests may name that one; or
    less where the batches that are held back say that it surely is. Nothing of the batches that are held back, and
    nothing of a plan without a certificate. Rounded down."""
    promised = stable.status.prediction
    if not spec.counts_exits or stable.plan.exits_off or promised is None:
        return 0.0
    least = min([promised.saving, *(promised.tiers.get(tier.name, 0.0) for tier in spec.tiers)]) - promised.audits
    surely = least if measured is None else min(least, measured.high)
    return min(max(0.0, math.floor(100 * surely * (1 - spec.holdback)) / 100), MOST_SAVING)


def _steady_saving(before: PoolPlanStatus, saving: float, *, now: float) -> tuple[float, float | None]:
    """The saving to count, and when exits were last off that had been counted. What goes off may soon go off again: it
    counts anew after as long as a change of workers has to pay."""
    off_at, horizon = before.exits_off_at, CAUTION.horizon_seconds
    lasted = None if off_at is None or now < off_at else now - off_at
    if saving:
        return (saving, None) if lasted is None or lasted >= horizon else (0.0, off_at)
    renewed = before.saving > 0 or (lasted is not None and lasted >= horizon / 2)  # seldom, as it is written
    return 0.0, now if renewed else off_at


def steady_demand(before: float, demand: float, *, may_lower: bool) -> float:
    """What a service asks of the workers that others use too: the same until its plan would be another one, so that
    nobody's share moves for noise."""
    answered = demand <= before * (1 + CAUTION.spare) * (1 + TINY)
    falls = demand * (1 + CAUTION.slack) < before * (1 - TINY) and may_lower
    return before if before > 0 and answered and not falls else _digits(demand)


def in_short(service: Service, pools: Sequence[PoolStatus], shares: Mapping[str, ClassShare]) -> list[str]:
    """Of each pool that has fewer workers than the service needs because others have them, a sentence."""
    index = {pool.name: i for i, pool in enumerate(service.spec.pools)}
    return [
        f"spec.pools[{index[pool.name]}] ({pool.name}) has {pool.planned} of the {pool.wanted} workers that it needs: "
        f"WorkerClass {share.class_name} has {share.max_workers} for all services; raise its spec.maxWorkers, or give "
        "this service another pool"
        for pool in pools
        if pool.wanted and (share := shares.get(pool.name)) is not None
    ]


def plan_event(
    service: Service, pools: Sequence[PoolStatus], plan: PoolPlanStatus, shares: Mapping[str, ClassShare]
) -> Event | None:
    """What people are told where the plan is another one than before, or other services have what it needs."""
    earlier = service.status.pool_plan.reason
    before = {pool.name: pool.planned if earlier else pool.desired for pool in service.status.pools}
    known = {pool.name: pool for pool in service.status.pools}
    lost = service.status.pool_plan.answered > 0 and not plan.answered  # the last worker, though it lacked some before
    short = any(pool.wanted and (lost or not (pool.name in known and known[pool.name].wanted)) for pool in pools)
    if short and not plan.reason:  # nothing was measured yet
        return Event(Reason.WORKER_CLASS_FULL, "; ".join(in_short(service, pools, shares)), warning=True)
    if plan == service.status.pool_plan or not plan.reason:
        return None
    if earlier and all(p.name in known and (p.planned, 0) == (known[p.name].planned, p.wanted) for p in pools):
        return None  # another demand, and nobody lacks a worker
    now = ", ".join(
        f"{pool.name} {pool.planned}" + (f" (was {was})" if (was := before.get(pool.name, 0)) != pool.planned else "")
        for pool in pools
    )
    cost = service.status.pool_plan.cost_per_hour
    dear = f"{plan.cost_per_hour:g} an hour" + (f" (was {cost:g})" if cost else "")
    fixed = service.spec.pools[0].fixed
    verb = "expected" if plan.expected else "asked for"
    message = (
        f"workers {'recommended' if fixed else 'planned'}: {now}; {dear}; {plan.demand:g} requests/s are {verb}, "
        f"these answer {plan.answered:g} with exits {_exits(plan)}; {plan.reason}{_until_then(service, pools, plan)}"
    )
    reason = Reason.POOLS_RECOMMENDED if fixed else Reason.WORKER_CLASS_FULL if short else Reason.POOLS_PLANNED
    return Event(reason, message, warning=short and not fixed)


def _exits(plan: PoolPlanStatus) -> str:
    return f"that save {plan.saving:.0%}" if plan.saving else "off"


def _until_then(service: Service, pools: Sequence[PoolStatus], plan: PoolPlanStatus) -> str:
    """How long it hurts that more is asked than the workers of before answer."""
    before, known = service.status.pool_plan, {pool.name: pool.planned for pool in service.status.pools}
    new = [startup_seconds(pool) for pool in pools if pool.planned > known.get(pool.name, 0)]
    if not new or not before.reason or plan.demand <= before.answered or service.spec.pools[0].fixed:
        return ""
    return f"; new workers answer after about {max(new):.0f} s, and until then those of before {before.answered:g}"


def startup_seconds(pool: PoolStatus) -> float:
    """From the decision to the first answer of a new worker."""
    return pool.startup.seconds or STARTUP_SECONDS


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, slots=True)
class _Offer:
    """A plan for some of the pools, their floors included."""

    planned: Mapping[str, int]
    cost: float
    answered: float
    unmet: float
    spared: bool
    changed: bool
    reason: str


class _Planner:
    def __init__(self, view: PoolsView) -> None:
        self.view = view
        known = {pool.name: pool for pool in view.known}
        self.cost = {pool.name: pool.cost_per_hour or 0.0 for pool in view.pools}
        self.rate = {pool.name: known[pool.name].worker_rate for pool in view.pools}
        self.room = {p.name: _room(p, known[p.name], view) for p in view.pools}
        self.floor = {p.name: min(p.min_workers, self.room[p.name]) for p in view.pools}
        self.before = {p.name: min(known[p.name].planned, self.room[p.name]) for p in view.pools}
        self.present = {p.name: min(known[p.name].desired, self.room[p.name]) for p in view.pools}
        self.startup = {name: startup_seconds(pool) for name, pool in known.items()}
        self.batch = {name: (pool.batch_size, pool.batch_seconds) for name, pool in known.items()}
        self.usable = [
            name
            for name, rate in self.rate.items()
            if rate > 0 and self.room[name] > 0 and 2 * self.batch[name][1] < view.latency_seconds
        ]

    def nothing_usable(self) -> str:
        """Why no pool may serve, where they were measured."""
        slow = [name for name, rate in self.rate.items() if rate > 0 and self.room[name] > 0]
        if not slow:
            return ""
        fastest = min(self.batch[name][1] for name in slow)
        return f"no pool answers in time: two batches take {2 * fastest:g} s of {self.view.latency_seconds:g} s"

    def added(self) -> PoolsPlan:
        """Workers for what is asked beyond what the plan of before answers, in pools that were measured; all that there
        are stay, as nobody knows what some of them do."""
        known = {pool.name: pool for pool in self.view.known}
        lost = sum(max(0, known[name].planned - self.room[name]) * rate for name, rate in self.rate.items())
        answered = max(0.0, self.view.answered - lost)
        missing = self.view.demand - answered
        if missing <= LEAST_RATE:
            return PoolsPlan()
        stay = {
            p.name: max(p.min_workers, self.present[p.name] if known[p.name].planned else 0) for p in self.view.pools
        }
        serving = {name: self.rate[name] for name in self.usable if stay[name]}
        slowest = min(serving.values(), default=0.0)
        stands = sum(stay[name] * (rate if self.view.by_weight else slowest) for name, rate in serving.items())
        pools = tuple(replace(p, min_workers=stay[p.name]) for p in self.view.pools)
        best = _Planner(replace(self.view, pools=pools, demand=stands + missing)).best()
        unknown = ", ".join(n for n, pool in known.items() if pool.planned and pool.ready and not self.rate[n])
        reason = f"workers are added and none taken away while those of {unknown} serve and are not measured"
        return PoolsPlan(best.planned, best.cost, answered + max(0.0, best.answered - stands), reason)

    def best(self) -> _Offer:
        """Of all sets of the fastest pools; of all pools alike where requests are shared by what they can do."""
        if self.view.by_weight:
            return self._offer(self.usable, self.view.demand, keep=True)
        sets = self._sets()
        now = next((s for s in sets if all(n in s for n, count in self.before.items() if count)), sets[-1])
        kept = self._offer(now, self.view.demand, keep=True)
        fresh = min((self._offer(s, self.view.demand) for s in sets), key=_order)
        if kept.changed or kept.unmet:
            return min((kept, fresh), key=_order)
        return fresh if self._pays(kept, fresh, sets) else kept

    def _sets(self) -> list[list[str]]:
        """Those of the fastest pools, smallest first; workers of a floor are there whatever is planned."""
        slowest = [self.rate[name] for name in self.usable if self.floor[name]]
        rates = sorted({self.rate[name] for name in self.usable}, reverse=True)
        rates = [rate for rate in rates if not slowest or rate <= min(slowest)]
        return [[name for name in self.usable if self.rate[name] >= rate] for rate in rates]

    def _pays(self, kept: _Offer, fresh: _Offer, sets: Sequence[list[str]]) -> bool:
        """Whether going over to another set earns what the change costs, and would with more demand as well."""
        more = self.view.demand * (1 + CAUTION.slack) / (1 + CAUTION.spare)
        dear = min((self._offer(s, more) for s in sets), key=_order)
        moved = {name: abs(n - kept.planned[name]) * self.cost[name] for name, n in fresh.planned.items()}
        change = sum(cost * self.startup[name] for name, cost in moved.items())
        earned = (kept.cost - fresh.cost) * CAUTION.horizon_seconds
        return not dear.unmet and dear.cost < kept.cost and earned > change

    def _offer(self, names: Iterable[str], demand: float, *, keep: bool = False) -> _Offer:
        names = list(names)
        by_rate = {name: self.rate[name] for name in names}
        if not self.view.by_weight:
            by_rate = dict.fromkeys(names, min(by_rate.values()))
        floors = sum(self.floor[name] * rate for name, rate in by_rate.items())
        rest = demand - floors
        if rest < LEAST_RATE:
            rest = 0.0 if any(self.floor[name] for name in names) else LEAST_RATE
        service = self._service(by_rate, rest)
        extra = {n: self.before[n] - self.floor[n] for n in names if self.before[n] > self.floor[n]}
        now = [w for name, count in extra.items() for w in _workers(self._column(name, by_rate[name]).key, count)]
        pools = [self._pool(name) for name in names]
        (plan,) = plan_fleet([service], pools, current={NAME: now} if keep and now else None).services
        return self._with_floors(plan, floors, demand)

    def _with_floors(self, plan: ServicePlan, floors: float, demand: float) -> _Offer:
        planned = dict(self.floor)
        for w in plan.workers:
            planned[w.key.pool] += w.count
        cost = sum(n * self.cost[name] for name, n in planned.items())
        reason = plan.reason if plan.workers else "the fewest that each pool keeps answer what is asked"
        answered = plan.answered_rate + floors
        spared = answered >= demand * (1 + CAUTION.spare) * (1 - TINY)
        return _Offer(planned, cost, answered, plan.unmet_rate, spared, planned != self.before, reason)

    def _service(self, by_rate: Mapping[str, float], rate: float) -> Planned:
        return Planned(
            name=NAME,
            rate=rate,
            predicted_rate=rate,
            arrival_variation=0.0,  # of independent users is in the rate of each worker
            latency_seconds=self.view.latency_seconds,
            late_share=self.view.late_share,
            max_disagreement=0.0,
            columns=tuple(self._column(name, each) for name, each in by_rate.items()),
        )

    def _column(self, name: str, rate: float) -> Column:
        size, seconds = self.batch[name]
        return Column(
            key=replace(_key(name), batch_size=size),
            batch_seconds=min(seconds, size / rate),  # with exits that are counted; who is usable was told without
            worker_rate=rate,
            certified_disagreement=0.0,
            memory_bytes=0,
            startup_seconds=self.startup[name],
        )

    def _pool(self, name: str) -> Pool:
        n = self.room[name] - self.floor[name]
        return Pool(name=name, cost_per_hour=self.cost[name], max_workers=n, worker_memory_bytes=1)


def _order(offer: _Offer) -> tuple[float, bool, float]:
    return offer.unmet, not offer.spared, offer.cost


def _room(pool: WorkerPool, known: PoolStatus, view: PoolsView) -> int:
    """Workers that there is a place for, as far as is known."""
    most = view.most(pool)
    return min(most, view.with_place(known)) if known.message else most


def _key(pool: str) -> Key:
    return Key(plan="exits off", pool=pool, batch_size=1)


def _workers(key: Key, count: int) -> list[Workers]:
    return [Workers(key=key, count=count)] if count else []
