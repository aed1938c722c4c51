"""The control plane at scale: from a verdict to the last batch, and one operator for thousands of services."""

from __future__ import annotations

from typing import Any

from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

VERDICT_GOAL_SECONDS, VERDICT_WORKERS = 2.0, 20
RESTART_GOAL_SECONDS, SHARE_GOAL, MEMORY_GOAL_MIB, SERVICES_GOAL = 9.0, 0.02, 260, 2000
SOAK_SECONDS = 600
MIB = 2**20


def section(results: Results) -> list[str]:
    """Both measurements in full."""
    lines = [
        "## The control plane at scale",
        "",
        "*Verdict to last batch*: `offramp up` with real workers on one machine; a plan with a lying certificate is "
        "canaried at half of the batches, the accuracy gate rejects it, and the",
        "rollback is timed from the persisted verdict to the moment when the last worker can begin no batch under it, "
        "and to the last reply that a client got from it; seconds.",
        "",
    ]
    verdict, fleet = results.get("verdict"), results.get("fleet")
    body = [
        [
            str(i),
            *(f"{r[name]:.2f}" for name in ("published", "in_force_first", "in_force_last", "last_reply")),
            str(r["canary_replies"]),
        ]
        for i, r in enumerate((verdict or {"rounds": []})["rounds"], 1)
    ]
    lines += table(
        ["round", "plan published", "first worker", "last worker", "last reply", "canary replies before"], body
    )
    lines += measured_line(results.measured("verdict")) if verdict else []
    lines += [
        "*Fleet*: the operator's process on a real API server and etcd that hold every object, with one process for "
        "all controllers and workers. *Restart* is from the start of the",
        "process, on objects that are all as they should be, to the first pass over every service; *steady* a stretch "
        "in which nothing happens. A pull is one worker asked once.",
        "",
    ]
    return [
        *lines,
        *table(["", "wall seconds", "processor seconds", "writes", "resident MiB", "of a core"], _rows(fleet)),
        *(measured_line(results.measured("fleet")) if fleet else []),
    ]


def _rows(fleet: dict[str, Any] | None) -> list[list[str]]:
    if fleet is None:
        return []
    cold, restart, steady = fleet["cold"], fleet["restart"], fleet["steady"]
    n = f"{fleet['services']:,} services, {fleet['workers']:,} workers"
    return [
        [f"cold start, {n}", f"{cold['seconds']:.0f}", f"{cold['cpu_seconds']:.1f}", f"{cold['writes']:,.0f}", "", ""],
        [
            "restart",
            f"{restart['seconds']:.1f} (listed after {restart['listed_seconds']:.1f})",
            f"{restart['cpu_seconds']:.1f}",
            f"{restart['writes']:.0f}",
            f"{restart['memory']['peak'] / MIB:.0f} at most",
            "",
        ],
        [
            f"steady, {steady['pulls'] / steady['seconds']:.0f} pulls a second",
            f"{steady['seconds']:.0f}",
            f"{steady['cpu_share'] * steady['seconds']:.1f}",
            f"{steady['writes']:.0f}",
            f"{steady['memory']['now'] / MIB:.0f}",
            f"{percent(steady['cpu_share'])}, of it pulls {percent(steady['pulls_share'])}",
        ],
    ]


def goals(results: Results) -> list[Goal]:
    """What the issue asks."""
    return [_verdict(results.get("verdict")), *_fleet(results.get("fleet")), _tuning(results.get("soak_control"))]


def _tuning(found: dict[str, Any] | None) -> Goal:
    target = (
        "ten minutes of tuning without rest on a real Kubernetes: `Ready` and `kubectl diff` do not move, no "
        "request fails"
    )
    if found is None:
        return Goal(target, MISSING, "make soak-control", None)
    measured = (
        f"{found['seconds']} s, {found['asked']} tunings asked for, {found['promoted']} plans rolled out, "
        f"{found['falls']} taken back as inputs changed, "
        f"{found['diffs']} diffs clean ({found['races']} while the status was written), {found['failed']} of "
        f"{found['requests']:,} requests failed"
    )
    met = found["failed"] == 0 and found["promoted"] > 0
    return Goal(target, measured, "make soak-control", met if found["seconds"] >= SOAK_SECONDS else None)


def _verdict(found: dict[str, Any] | None) -> Goal:
    target = f"verdict to the last batch under the bad plan, {VERDICT_WORKERS} workers: < {VERDICT_GOAL_SECONDS:g} s"
    if found is None:
        return Goal(target, MISSING, "bench.verdict", None)
    last = found["last_batch"]
    measured = (
        f"median {last['median']:.2f} s, worst {last['worst']:.2f} s over {found['workers']} workers; "
        f"{found['failed']} of {found['requests']} requests failed"
    )
    how = f"bench.verdict, {len(found['rounds'])} rounds on two cores; load average {found['load_average']:.1f}"
    met = last["worst"] < VERDICT_GOAL_SECONDS if found["workers"] >= VERDICT_WORKERS else None
    return Goal(target, measured, how, met)


def _fleet(found: dict[str, Any] | None) -> list[Goal]:
    head = f"{SERVICES_GOAL:,} services, {2 * SERVICES_GOAL:,} workers"
    asked = (
        f"{head}: restart to every service reconciled < {RESTART_GOAL_SECONDS:g} s, no writes",
        f"{head}, steady state: no writes, < {percent(SHARE_GOAL, 0)} of a core beyond the pulls",
        f"{head}: < {MEMORY_GOAL_MIB} MiB",
    )
    if found is None:
        return [Goal(target, MISSING, "bench.fleet", None) for target in asked]
    restart, steady, large = found["restart"], found["steady"], found["services"] >= SERVICES_GOAL
    size = "" if large else f"{found['services']:,} services only: "
    how = f"bench.fleet; load average {found['load_average']:.1f}"
    cells = (
        (
            f"{restart['seconds']:.1f} s, {restart['cpu_seconds']:.1f} s of processor, {restart['writes']:.0f} writes",
            restart["seconds"] < RESTART_GOAL_SECONDS and restart["writes"] == 0,
        ),
        (
            f"{steady['writes']:.0f} writes, {percent(max(0.0, steady['beyond_pulls_share']))} beyond the pulls "
            f"({percent(steady['pulls_share'])})",
            steady["writes"] == 0 and steady["beyond_pulls_share"] < SHARE_GOAL,
        ),
        (f"{steady['memory']['now'] / MIB:.0f} MiB", steady["memory"]["now"] < MEMORY_GOAL_MIB * MIB),
    )
    return [
        Goal(target, size + measured, how, met if large else None)
        for target, (measured, met) in zip(asked, cells, strict=True)
    ]
