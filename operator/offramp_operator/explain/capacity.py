"""What the workers of a service answer with exits off, against what is asked of them."""

from __future__ import annotations

from typing import Any

from offramp_core.control.codec import to_json
from offramp_core.control.workers.capacity import headroom
from offramp_core.reasons import ConditionType
from offramp_operator.explain.family import Family


def headroom_text(family: Family) -> str:
    """``1.8x``: what the ready workers answer with exits off, in times of the peak of the last hour; empty where it is
    not known."""
    ratio = headroom(family.service.spec, family.service.status)
    return "" if ratio is None else f"{ratio:.1f}x"


def capacity_facts(family: Family) -> list[str]:
    """The sentence of the condition, and what follows from it for an autoscaler; nothing where nothing is known."""
    capacity, condition = family.service.status.capacity, family.condition(ConditionType.NO_EXIT_CAPACITY)
    if condition is None or condition.status == "Unknown":
        return []
    scaled = family.service.spec.autoscaling
    floor = (
        f"autoscaling.noExitFloor {scaled.no_exit_floor}: at least {capacity.floor} workers now"
        if scaled is not None and capacity.floor
        else ""
    )
    return [f"without exits {condition.message}", *([floor] if floor else [])]


def capacity_data(family: Family) -> dict[str, Any]:
    """The same for machines."""
    ratio = headroom(family.service.spec, family.service.status)
    stored: dict[str, Any] = to_json(family.service.status.capacity)
    return stored if ratio is None else {**stored, "headroom": round(ratio, 2)}
