"""Is a service healthy? The same answer for people, for exit codes and for pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from offramp_core.control.objects import Condition
from offramp_core.reasons import ConditionType, Reason
from offramp_operator.explain.capacity import capacity_data
from offramp_operator.explain.family import Family
from offramp_operator.explain.pools import pool_data
from offramp_operator.explain.savings import savings_data

Verdict = Literal["Healthy", "Progressing", "Degraded"]
# What a service is called that nobody answers for, where that is no failure.
_NOT_READY: dict[str, Verdict] = {Reason.STARTING: "Progressing", Reason.SCALED_TO_ZERO: "Healthy"}


@dataclass(frozen=True, slots=True)
class Health:
    """``Progressing`` may become healthy by waiting; ``final`` says that waiting will not help."""

    verdict: Verdict
    message: str
    final: bool = False


def health(family: Family) -> Health:
    """kstatus first (generation, Stalled, Reconciling, Ready), then the promises."""
    status, service = family.service.status, family.service
    if family.note:
        return Health("Degraded", family.note)
    if status.observed_generation != service.generation:
        return Health("Progressing", f"generation {service.generation} has not been seen yet; does the operator run?")
    by_type: dict[str, Condition] = {c.type: c for c in status.conditions}
    for kind, verdict in ((ConditionType.STALLED, "Degraded"), (ConditionType.RECONCILING, "Progressing")):
        condition = by_type.get(kind)
        if condition is not None and condition.status == "True":
            reason = f"{condition.reason}: " if condition.reason != verdict else ""
            return Health(verdict, reason + condition.message, final=kind is ConditionType.STALLED)  # type: ignore[arg-type]
    ready = by_type.get(ConditionType.READY)
    if ready is None or ready.status != "True":
        return _not_ready(ready)
    broken = [c for c in status.conditions if c.status == "False" and _degrades(c.type)]
    if broken:
        return Health("Degraded", "; ".join(f"{c.type} is False: {c.message}" for c in broken))
    return Health("Healthy", ready.message)


def _degrades(kind: str) -> bool:
    """Whether a condition that is False is a promise that is not kept; of one that a newer operator has it is not
    known."""
    known = ConditionType.of(kind)
    return known is None or known.degrades


def _not_ready(ready: Condition | None) -> Health:
    if ready is None:
        return Health("Progressing", "no condition Ready yet")
    return Health(_NOT_READY.get(ready.reason, "Degraded"), f"{ready.reason}: {ready.message}")


def health_data(family: Family) -> dict[str, Any]:
    """The same for machines."""
    found = health(family)
    conditions = [
        {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message}
        for c in family.service.status.conditions
    ]
    return {
        "name": family.name,
        "namespace": family.service.namespace,
        "verdict": found.verdict,
        "message": found.message,
        "conditions": conditions,
        "savings": savings_data(family),
        "capacity": capacity_data(family),
        "pools": pool_data(family),
    }
