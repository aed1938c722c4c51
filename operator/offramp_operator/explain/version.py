"""Two versions of the model side by side: where the trial stands, in words."""

from __future__ import annotations

from typing import Any

from offramp_core.control.objects import GateStatus
from offramp_core.evidence.words import e_value
from offramp_operator.explain.family import Family
from offramp_operator.explain.words import duration


def version_facts(family: Family, now: float) -> list[str]:
    """The trial and what is held against the new version; empty without one."""
    status = family.service.status.version
    if not status.phase:
        return []
    since = f" for {duration(now - status.phase_started_at)}" if status.phase_started_at is not None else ""
    lines = [f"{status.candidate.uri} beside {status.serving.uri}: {status.phase}{since}"]
    if status.message:
        lines.append(f"{status.reason}: {status.message}" if status.reason else status.message)
    for gate in status.gates:
        limit = f"e-value {e_value(gate.log_e_value)} of {e_value(gate.log_limit)}"
        waits = f"; {gate.n} of {gate.needed} with which harm would show" if gate.state == "Undecided" else ""
        lines.append(f"{gate.name} {gate.state}: {gate.message} ({limit}){waits}")
    return lines


def version_data(family: Family) -> dict[str, Any] | None:
    """The same for machines."""
    status = family.service.status.version
    if not status.phase:
        return None
    return {
        "serving": status.serving.uri,
        "candidate": status.candidate.uri,
        "phase": status.phase,
        "reason": status.reason,
        "message": status.message,
        "gates": [gate_data(gate) for gate in status.gates],
    }


def gate_data(gate: GateStatus) -> dict[str, Any]:
    """The figures of a gate, of a version's trial or of a rollout, for machines."""
    return {
        "name": gate.name,
        "state": gate.state,
        "n": gate.n,
        "k": gate.k,
        "bound": gate.bound,
        "logEValue": gate.log_e_value,
        "logLimit": gate.log_limit,
        "needed": gate.needed,
        "exposure": gate.exposure,
    }
