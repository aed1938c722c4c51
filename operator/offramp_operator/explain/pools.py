"""The pools of a service: how many workers each has, and what they can do, in words."""

from __future__ import annotations

from typing import Any

from offramp_core.control.codec import to_json
from offramp_core.control.conditions import format_rate
from offramp_operator.explain.family import Family


def pool_facts(family: Family) -> list[str]:
    """A sentence about each pool; nothing without pools."""
    alone = "with the model alone" if family.service.spec.generates else "without exits"
    facts = []
    for pool in family.service.status.pools:
        able = f"each answers about {format_rate(pool.worker_rate)} requests/s {alone}"
        parts = [
            f"{pool.ready} of {pool.desired} workers ready",
            able if pool.worker_rate else "not measured yet",
            pool.message,
        ]
        facts.append(f"pool {pool.name}: {'; '.join(filter(None, parts))}")
    return facts


def pool_data(family: Family) -> list[Any]:
    """The same for machines."""
    return [to_json(pool) for pool in family.service.status.pools]
