"""The pools of a service: how many workers each has, and what they can do, in words."""

from __future__ import annotations

from typing import Any

from offramp_core.control.codec import to_json
from offramp_core.control.conditions import format_rate
from offramp_core.control.objects import StartUpTimes
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
    return [*facts, *_plan(family)]


def _startup(times: StartUpTimes) -> str:
    """How long a burst waits for a new worker."""
    if not times.seconds:
        return ""
    steps = (
        (times.placed_seconds, "to a node"),
        (times.fetched_seconds, "for its bundle"),
        (times.started_seconds, "for its container"),
        (times.ready_seconds, "to load and warm up"),
    )
    parts = ", ".join(f"{seconds:.0f} s {what}" for seconds, what in steps if seconds >= 1)
    return f"a new one answers after about {times.seconds:.0f} s ({parts})"


def _plan(family: Family) -> list[str]:
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
