"""The pools of a service: how many workers each has, and what they can do, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offramp_core.control.codec import to_json
from offramp_core.control.conditions import format_rate
from offramp_core.control.objects import PoolStatus, StartUpTimes
from offramp_core.control.spec import WorkerPool
from offramp_core.control.workers.capacity import workers_for
from offramp_core.control.workers.pool_plan import CAUTION, with_exits
from offramp_operator.explain.family import Family


def pool_facts(family: Family) -> list[str]:
    """A sentence about each pool; nothing without pools."""
    alone = "with the model alone" if family.service.spec.generates else "without exits"
    costs = {p.name: f"{p.cost_per_hour:g} an hour each" for p in family.service.spec.pools if p.cost_per_hour}
    facts = []
    for pool in family.service.status.pools:
        able = f"each answers about {format_rate(pool.worker_rate)} requests/s {alone}"
        parts = [
            f"{pool.ready} of {pool.desired} workers ready"
            + (", at the edge" if family.service.spec.at_edge(pool.name) else ""),
            able if pool.worker_rate else "not measured yet",
            costs.get(pool.name, ""),
            _startup(pool.startup),
            pool.message,
        ]
        facts.append(f"pool {pool.name}: {'; '.join(filter(None, parts))}")
    return [*facts, *plan_facts(family)]


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool in a table: its workers, what the plan has, what it takes ``alone``, and why. Empty where nothing is
    known or planned."""

    name: str
    workers: str
    planned: str
    rate: str
    price: str
    alone: str
    startup: str
    why: str


def pool_rows(family: Family) -> list[PoolRow]:
    """What the plan of pools considered, by its status; of pools whose numbers the spec has, how they are."""
    return [_row(family, pool, status) for pool, status in zip(*_both(family), strict=True)]


def _both(family: Family) -> tuple[list[WorkerPool], list[PoolStatus]]:
    """Pools of the spec that the status knows, and what it says of them."""
    known = {pool.name: pool for pool in family.service.status.pools}
    pools = [pool for pool in family.service.spec.pools if pool.name in known]
    return pools, [known[pool.name] for pool in pools]


def _row(family: Family, pool: WorkerPool, status: PoolStatus) -> PoolRow:
    plan, (counted,) = family.service.status.pool_plan, with_exits([status], family.service.status.pool_plan.saving)
    alone = workers_for(plan.demand * (1 + CAUTION.spare), counted.worker_rate) if plan.reason else 0
    cost = alone * (pool.cost_per_hour or 0.0)
    edge = ", at the edge" if family.service.spec.at_edge(pool.name) else ""
    return PoolRow(
        name=pool.name,
        workers=f"{status.ready} of {status.desired} ready{edge}",
        planned=str(status.planned) if plan.reason else "",
        rate=format_rate(counted.worker_rate) if status.worker_rate else "",
        price="" if pool.cost_per_hour is None else f"{pool.cost_per_hour:g}",
        alone=f"{alone} for {cost:g} an hour" if alone else "",
        startup=f"{status.startup.seconds:.0f} s ({_steps(status.startup)})" if status.startup.seconds else "",
        why=status.message or _why(family, pool, status, alone=alone, cost=cost),
    )


def _why(family: Family, pool: WorkerPool, status: PoolStatus, *, alone: int, cost: float) -> str:
    """Why the plan has so many workers of a pool."""
    plan, latency = family.service.status.pool_plan, family.service.spec.latency_seconds or 0.0
    everywhere = sum(other.planned for other in family.service.status.pools)
    dear = f"alone it would cost {cost:g} an hour, what is chosen {plan.cost_per_hour:g}"
    reasons = (
        (not status.worker_rate, "not measured yet"),
        (not plan.reason, ""),
        (status.wanted, f"needs {status.wanted}; other services have the rest of its WorkerClass"),
        (
            0 < latency <= 2 * status.batch_seconds,
            f"two batches take {2 * status.batch_seconds:g} s of the objective of {latency:g} s",
        ),
        (status.planned > pool.min_workers or 0 < status.planned == alone == everywhere, "chosen"),
        (status.planned, "its minWorkers"),
        (plan.demand <= 0, "nothing is asked"),
        (alone > (pool.max_workers or alone), f"has {pool.max_workers} at most; alone {alone} would be needed"),
        (cost >= plan.cost_per_hour, dear),
        (True, "cheaper alone; a change has to pay for itself, with more demand as well"),
    )
    return next(reason for holds, reason in reasons if holds)


def _startup(times: StartUpTimes) -> str:
    """How long a burst waits for a new worker."""
    return f"a new one answers after about {times.seconds:.0f} s ({_steps(times)})" if times.seconds else ""


def _steps(times: StartUpTimes) -> str:
    steps = (
        (times.placed_seconds, "to a node"),
        (times.fetched_seconds, "for its bundle"),
        (times.started_seconds, "for its container"),
        (times.ready_seconds, "to load and warm up"),
    )
    return ", ".join(f"{seconds:.0f} s {what}" for seconds, what in steps if seconds >= 1)


def plan_facts(family: Family) -> list[str]:
    """The numbers that are planned, or recommended where the spec has its own."""
    plan, pools = family.service.status.pool_plan, family.service.status.pools
    if not plan.reason:
        return []
    numbers = ", ".join(f"{pool.name} {pool.planned}" for pool in pools)
    verb = "recommended" if family.service.spec.pools and family.service.spec.pools[0].fixed else "planned"
    asked = f"for {format_rate(plan.demand)} requests/s: {plan.reason}"
    counted = f" with exits that save {plan.saving:.0%}" if plan.saving else ""
    return [f"workers {verb}: {numbers}{counted}; {plan.cost_per_hour:g} an hour, {asked}"]


def pool_data(family: Family) -> list[Any]:
    """The same for machines."""
    return [to_json(pool) for pool in family.service.status.pools]
