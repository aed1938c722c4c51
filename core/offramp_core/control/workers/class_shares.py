"""What each service may have of a WorkerClass that limits the workers of all services that name it.

Everything follows from the class and from the statuses of the services: what each asks for (steady under noise, see
:func:`offramp_core.control.workers.pool_plan.steady_demand`), what its workers can do, and how many it has. While the
class has room for all, each plans what it likes. Where it has not, :func:`offramp_core.fleet.divide` says who plans how
many; and nobody starts a worker in the place of one that is still there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from offramp_core.control.objects import PoolStatus, Service
from offramp_core.control.snapshot import ClassShare
from offramp_core.control.spec import WorkerPool
from offramp_core.control.workers.pool_plan import (
    CAUTION,
    LEAST_RATE,
    model_on_its_way,
    plan_pools,
    view_of,
    with_exits,
)
from offramp_core.fleet import Claim, divide


@dataclass(frozen=True, slots=True)
class ClassUse:
    """How one service uses a class: the workers that it ``holds``, and what it would do with others; None of those
    where a person decides how many there are."""

    name: str
    holds: int
    claim: Claim | None = None

    @property
    def taken(self) -> int:
        """What it has, or would have if it were alone."""
        return self.holds if self.claim is None else max(self.holds, self.claim.most)


def next_shares(class_name: str, max_workers: int, uses: Iterable[ClassUse]) -> dict[str, ClassShare]:
    """The share of every service whose workers are planned, by its name; the same whatever their order."""
    uses = tuple(uses)
    room = max(0, max_workers - sum(use.holds for use in uses if use.claim is None))
    planned = [(use, use.claim) for use in uses if use.claim is not None]
    held, taken = sum(use.holds for use, _ in planned), sum(use.taken for use, _ in planned)
    tight = taken > room
    divided = divide([claim for _, claim in planned], room) if tight else {}
    most = {use.name: divided.get(use.name, room - (taken - use.taken)) for use, _ in planned}
    waiting = {use.name for use, _ in planned if tight and use.holds < most[use.name] and held >= room}
    return {
        use.name: ClassShare(
            class_name=class_name,
            max_workers=max_workers,
            wanted=claim.most,
            most=most[use.name],
            now=max(0, room - (held - use.holds)),
            waited_for=bool(waiting - {use.name}),
        )
        for use, claim in planned
    }


def uses_of(service: Service, *, holds: Mapping[str, int], limited: Collection[str]) -> dict[str, ClassUse]:
    """How a service uses the classes that limit the workers of all services, by the class.

    Parameters
    ----------
    holds : mapping
        Workers that it has or asks for, by pool; "" for those of no pool.
    limited : collection of str
        Names of such classes.
    """
    spec, name, uses = service.spec, f"{service.namespace}/{service.name}", dict[str, ClassUse]()
    if not spec.pools:
        return {spec.class_name: ClassUse(name, holds.get("", 0))} if spec.class_name in limited else {}
    for pool in (pool for pool in spec.pools if pool.class_name in limited):
        before = uses.get(pool.class_name)
        if before is not None or pool.fixed:
            has = holds.get(pool.name, 0) + (0 if before is None else before.holds)
            uses[pool.class_name] = ClassUse(name, has)
        else:
            claim = _claim(service, pool, name=name, holds=holds.get(pool.name, 0), limited=limited)
            others = [p for p in spec.pools if p is not pool]
            if claim.answers and not claim.most and not any(holds.get(p.name) for p in others):
                # None of another class: better one than nothing.
                claim = replace(claim, most=int(_serves(service, pool)))
            uses[pool.class_name] = ClassUse(name, holds.get(pool.name, 0), claim)
    return uses


def _serves(service: Service, pool: WorkerPool) -> bool:
    """Whether a service could be answered from one of its pools alone."""
    known = tuple(replace(p, planned=0, desired=0) for p in service.status.pools if p.name == pool.name)
    view = view_of(
        service, known, max(service.status.pool_plan.demand, LEAST_RATE), saving=service.status.pool_plan.saving
    )
    return bool(known) and bool(plan_pools(replace(view, pools=(pool,))).planned)


def _claim(service: Service, pool: WorkerPool, *, name: str, holds: int, limited: Collection[str]) -> Claim:
    """What a service would do with workers of a pool, by its status."""
    spec, status = service.spec, {known.name: known for known in service.status.pools}
    known = {p.name: replace(status.get(p.name, PoolStatus(p.name)), planned=0, desired=0) for p in spec.pools}
    plan = service.status.pool_plan
    demand = max(plan.demand, LEAST_RATE)
    expected = max(0.0, demand - plan.asked) if plan.expected else 0.0
    spare, least = demand * CAUTION.spare, pool.min_workers
    planned = plan_pools(view_of(service, tuple(known.values()), demand, saving=plan.saving)).planned
    rates = {p.name: p.worker_rate for p in with_exits(known.values(), plan.saving)}
    if spec.route is None:  # requests are shared by numbers: the slowest of those that serve counts for all
        slowest = min((rates[p] for p, n in planned.items() if n), default=0.0)
        rates = {p: min(rate, slowest) if rate >= slowest else 0.0 for p, rate in rates.items()}
    open_to_all = [p for p in spec.pools if p.class_name not in limited]
    answers = demand - expected > LEAST_RATE and not any(p.name in status and status[p.name].ready for p in open_to_all)
    if model_on_its_way(status.values()):  # all that there are stay until it is known what they do
        least = max(least, min(holds, pool.most))
    claim = Claim(
        name=name,
        present=holds,
        least=least,
        most=max(planned.get(pool.name, 0), least),
        worker_rate=rates[pool.name],
        demand=demand,
        spare=spare,
        expected=expected,
        answers=answers,
    )
    if not known[pool.name].worker_rate and pool.name in status and status[pool.name].planned and holds:
        return replace(claim, most=max(claim.most, 1), worker_rate=(demand + spare) / holds)  # they answer together
    if not known[pool.name].worker_rate:  # one worker finds out what all do; where nobody serves, before anything else
        measured = any(rates.values())
        most = max(1, least, holds)
        return replace(claim, most=most, worker_rate=demand + spare, elsewhere=(demand + spare) * measured)
    # What it could have of other limited classes, others may have as well.
    others = [p for p in open_to_all if p is not pool and rates[p.name]]
    able = {p.name: min(p.most, known[p.name].ready) if known[p.name].message else p.most for p in others}
    dear = [(p.cost_per_hour or 0.0) / rates[p.name] for p in others if able[p.name]]
    saving = min(dear, default=0.0) * rates[pool.name] - (pool.cost_per_hour or 0.0) if dear else 0.0
    return replace(claim, elsewhere=sum(able[p.name] * rates[p.name] for p in others), saving=saving)
