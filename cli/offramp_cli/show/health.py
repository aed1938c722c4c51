"""Is a service healthy? The same answer for people, for exit codes and for `top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from offramp_cli.show.lines import Cell, ago, columns, heading, state
from offramp_cli.source.family import Family

Verdict = Literal["Healthy", "Progressing", "Degraded"]


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
    by_type = {c.type: c for c in status.conditions}
    for kind, verdict in (("Stalled", "Degraded"), ("Reconciling", "Progressing")):
        condition = by_type.get(kind)
        if condition is not None and condition.status == "True":
            reason = f"{condition.reason}: " if condition.reason != verdict else ""
            return Health(verdict, reason + condition.message, final=kind == "Stalled")  # type: ignore[arg-type]
    ready = by_type.get("Ready")
    if ready is None or ready.status != "True":
        starting = ready is None or ready.reason == "Starting"
        return Health(
            "Progressing" if starting else "Degraded",
            f"{ready.reason}: {ready.message}" if ready is not None else "no condition Ready yet",
        )
    broken = [c for c in status.conditions if c.status == "False"]
    if broken:
        return Health("Degraded", "; ".join(f"{c.type} is False: {c.message}" for c in broken))
    return Health("Healthy", ready.message)


def health_lines(family: Family, now: float) -> list[Text]:
    """The verdict and every condition."""
    found = health(family)
    rows: list[list[Cell]] = [[heading(title) for title in ("CONDITION", "STATUS", "REASON", "FOR", "MESSAGE")]]
    rows += [
        [c.type, Text(c.status, style=_style(c.type, c.status)), c.reason, ago(c.last_transition_at, now), c.message]
        for c in family.service.status.conditions
    ]
    return [
        Text(f"{family.name}: ") + state(found.verdict) + f": {found.message}",
        *(columns(rows) if len(rows) > 1 else []),
    ]


def _style(kind: str, status: str) -> str:
    if status == "Unknown":
        return "dim"
    good = (status == "True") != (kind in ("Stalled", "Reconciling"))
    return "green" if good else "red" if kind != "Reconciling" else "yellow"


def health_data(family: Family) -> dict[str, Any]:
    """The same for machines."""
    found = health(family)
    conditions = [
        {"type": c.type, "status": c.status, "reason": c.reason, "message": c.message}
        for c in family.service.status.conditions
    ]
    return {"name": family.name, "namespace": family.service.namespace, "verdict": found.verdict, "message": found.message, "conditions": conditions}  # fmt: skip
