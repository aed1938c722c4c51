"""A thousand GPUs of several kinds on paper, and twice as many services."""

from __future__ import annotations

from typing import Any

from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

GPUS, SERVICES = 1000, 2000
HOW = "bench.placement"


def section(results: Results) -> list[str]:
    """Who was placed and what the others were told."""
    found = results.get("placement")
    lines = [
        "## Placement on GPUs of several kinds (on paper)",
        "",
        "Kubernetes' own API server, controllers and scheduler; kwok plays the kubelets of nodes that exist on paper, "
        "the operator is the real process, and each service names a WorkerClass and has one worker. *Serve* are those "
        "whose worker runs and has its plan; *wait* are those whose condition Ready says what for and what to do next. "
        "Whether a pod waits although a node that it may go to has what it asks for is counted without the scheduler.",
        "",
    ]
    if found is None:
        return lines
    placed, moved, steady = found["placed"], found["moved"], found["steady"]
    body = [
        [
            a["name"],
            f"{a['each']} {a['resource']}",
            a["product"] or "any",
            str(a["services"]),
            *_counts(found, a["name"]),
        ]
        for a in found["asked"]
    ]
    head = ["class", "asks for", "product", "services", "serve", "wait", "serve after some were deleted"]
    said = (
        f"{found['gpus']:,} GPUs on {found['nodes']:,} nodes. From the operator's start until all "
        f"{placed['services']:,} services served or said why not: {placed['seconds']:.0f} s, "
        f"{placed['cpu_seconds']:.0f} s of its processor time. Then, in {steady['seconds']:.0f} s, "
        f"{steady['writes']:.0f} writes by the operator and {percent(steady['cpu_share'])} of a core. "
        f"{moved['deleted']} services that served were deleted; {moved['seconds']:.0f} s later others had what they "
        "left."
    )
    return [*lines, *table(head, body), said, "", *measured_line(results.measured("placement"))]


def _counts(found: dict[str, Any], name: str) -> list[str]:
    placed, moved = found["placed"], found["moved"]
    return [str(counts.get(name, 0)) for counts in (placed["placed"], placed["waiting"], moved["placed"])]


def goals(results: Results) -> list[Goal]:
    """What the issue asks."""
    target = (
        f"{GPUS:,} GPUs of six kinds, {SERVICES:,} services: all that fit serve, the others say what they wait for, "
        "nobody is stuck, no writes in steady state"
    )
    found = results.get("placement")
    if found is None:
        return [Goal(target, MISSING, HOW, None)]
    placed = found["placed"]
    serve, wait = (sum(placed[name].values()) for name in ("placed", "waiting"))
    measured = (
        f"{serve:,} serve, {wait:,} say what they wait for, {len(placed['could_be_placed'])} stuck, "
        f"{found['steady']['writes']:.0f} writes in {found['steady']['seconds']:.0f} s"
    )
    how = f"{HOW}; load average {found['load_average']:.1f}"
    large = found["gpus"] >= GPUS and placed["services"] >= SERVICES
    return [Goal(target, measured, how, all(found["passed"].values()) if large else None)]
