"""``plan``: what was considered for each service, what it costs, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from offramp_cli.show.lines import Cell, table
from offramp_core.fleet import OFTEN, Considered, FleetDocument, FleetPlan, ServicePlan, Usual, Workers

POOLS = ("POOL", "WORKERS", "COST/H", "ONE MORE SAVES")
CONSIDERED = ("PLAN", "POOL", "BATCH", "DISAGREES", "ALONE", "COST/H", "WORKERS", "WHY")


def fleet_lines(document: FleetDocument, plan: FleetPlan, saved: Mapping[str, float]) -> list[Text]:
    """Pools with what one more worker of each would have ``saved``, then a table for each service."""
    rows: list[list[Cell]] = []
    for pool in document.pools:
        used = plan.workers_by_pool[pool.name]
        worth = saved.get(pool.name)
        rows.append(
            [
                pool.name,
                f"{used} of {pool.max_workers}",
                f"{used * pool.cost_per_hour:.4g}",
                "-" if worth is None else f"{worth:.3g}/h",
            ]
        )
    lines = table(POOLS, rows)
    for service in plan.services:
        lines += [Text(), _head(service, document.usual.get(service.service)), *_considered(service)]
    return [*lines, Text(), _total(plan)]


def _head(service: ServicePlan, usual: Usual | None) -> Text:
    """``usual`` is given where earlier days ask for more than the recent past does."""
    head = Text(f"{service.service}: ", style="bold")
    asked = "asked"
    if usual is not None:
        asked = f"expected, as came at this time on {OFTEN} of {usual.days} earlier days"
    head.append(
        f"{service.demand:.4g}/s {asked}, {service.answered_rate:.4g}/s can be answered in time, "
        f"{service.cost_per_hour:.4g} an hour; {service.reason}",
        style="yellow" if service.unmet_rate else "",
    )
    return head


def _considered(service: ServicePlan) -> list[Text]:
    rows: list[list[Cell]] = []
    order = sorted(service.considered, key=lambda row: (row.workers == 0, row.cost_alone is None, row.cost_alone or 0))
    for row in order:
        style = "" if row.workers else "dim"
        rows.append([Text(cell, style=style) for cell in _cells(row)])
    return table(CONSIDERED, rows)


def _cells(row: Considered) -> Sequence[str]:
    return (
        row.key.plan,
        row.key.pool,
        str(row.key.batch_size),
        f"{row.certified_disagreement:.2%}",
        "-" if row.workers_alone is None else str(row.workers_alone),
        "-" if row.cost_alone is None else f"{row.cost_alone:.4g}",
        str(row.workers),
        row.reason,
    )


def _total(plan: FleetPlan) -> Text:
    unmet = f"; {plan.unmet_rate:.4g} requests a second stay unanswered" if plan.unmet_rate else ""
    least = plan.bound_per_hour
    bound = "" if least is None else f" (no plan with as much to spare is below {least:.4g})"
    return Text(f"all services: {plan.cost_per_hour:.4g} an hour{bound}{unmet}", style="bold")


def fleet_data(document: FleetDocument, plan: FleetPlan, saved: Mapping[str, float]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "costPerHour": plan.cost_per_hour,
        "boundPerHour": plan.bound_per_hour,
        "unmetRate": plan.unmet_rate,
        "pools": [
            {
                "name": pool.name,
                "workers": plan.workers_by_pool[pool.name],
                "maxWorkers": pool.max_workers,
                "costPerHour": plan.workers_by_pool[pool.name] * pool.cost_per_hour,
                "oneMoreSavesPerHour": saved.get(pool.name),
            }
            for pool in document.pools
        ],
        "services": [
            _service_data(service) | ({"expectedFromDays": usual.days} if usual else {})
            for service in plan.services
            for usual in (document.usual.get(service.service),)
        ],
    }


def _service_data(service: ServicePlan) -> dict[str, Any]:
    return {
        "name": service.service,
        "workers": [_workers_data(w) for w in service.workers],
        "costPerHour": service.cost_per_hour,
        "demand": service.demand,
        "answeredRate": service.answered_rate,
        "unmetRate": service.unmet_rate,
        "headroomRate": service.headroom_rate,
        "changed": service.changed,
        "reason": service.reason,
        "considered": [
            {
                "plan": row.key.plan,
                "pool": row.key.pool,
                "batchSize": row.key.batch_size,
                "disagreement": row.certified_disagreement,
                "headroomRate": row.headroom_rate,
                "workersAlone": row.workers_alone,
                "costAlone": row.cost_alone,
                "workers": row.workers,
                "reason": row.reason,
            }
            for row in service.considered
        ],
    }


def _workers_data(workers: Workers) -> dict[str, Any]:
    key = workers.key
    return {"plan": key.plan, "pool": key.pool, "batchSize": key.batch_size, "count": workers.count}
