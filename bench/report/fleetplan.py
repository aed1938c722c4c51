"""The fleet planner beside named policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.fleetplan.forecasts import RECENT, relative_costs
from bench.fleetplan.judged import COST_GOAL, KEPT_GOAL, ahead, verdicts
from bench.fleetplan.planning import BOUND_GOAL, SECONDS_GOAL
from bench.fleetplan.runs import LARGEST, MOST_MISSED, OURS
from bench.fleetplan.scenes import CPU_STARTUP, GPU_STARTUP, SCENES
from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

HOW = "bench.fleetplan"


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of the planner, for every scene that was played."""
    found = results.get("fleetplan") or {}
    asked = (
        f"fleet planner on real traces: cost <= {COST_GOAL:.2f} of the largest variant alone, never above the best "
        f"single certified one; misses <= {percent(MOST_MISSED, 0)}"
    )
    for name in SCENES:
        scene = found.get("scenes", {}).get(name)
        if scene is None:
            yield Goal(f"{asked}: {name}", MISSING, HOW, None)
            continue
        by_name = {row["policy"]: row for row in scene["rows"]}
        ours = by_name[OURS]
        measured = (
            f"{ours['cost'] / by_name[LARGEST]['cost']:.2f} of the largest variant's cost, "
            f"{percent(ours['missed'], 2)} missed"
        )
        broken = [what for what, met in verdicts(scene["rows"]).items() if not met]
        measured += f"; not: {', '.join(broken)}" if broken else ""
        yield Goal(f"{asked}: {name}", measured, HOW, not broken, words(scene["measured"]))
    asked = f"fleet planner: budget kept in >= {percent(KEPT_GOAL, 0)} of 200 replays with certificates of their own"
    replays = found.get("replays")
    if replays is None:
        yield Goal(asked, MISSING, HOW, None)
    else:
        yield _kept(asked, replays)
    yield from _planning(found.get("planning"))
    yield _noise(found.get("noise"))


def _kept(asked: str, replays: dict[str, Any]) -> Goal:
    ours = next(row for row in replays["rows"] if row["policy"] == OURS)
    others = ", ".join(f"{r['policy']} {r['kept']}" for r in replays["rows"] if r["policy"] != OURS)
    measured = f"kept in {ours['kept']} of {ours['runs']}; without certificates: {others}"
    return Goal(asked, measured, HOW, ours["kept"] >= KEPT_GOAL * ours["runs"], words(replays["measured"]))


def _planning(found: dict[str, Any] | None) -> Iterator[Goal]:
    """What was asked of the planner alone."""
    asked = (
        f"fleet planner: 200 services in < {SECONDS_GOAL:g} s on one core",
        f"fleet planner: with a scarce pool at most {percent(BOUND_GOAL - 1, 0)} above the bound",
    )
    if found is None:
        yield from (Goal(each, MISSING, HOW, None) for each in asked)
        return
    seconds, over = found["seconds"], found["over_bound"]
    when = words(found["measured"])
    measured = ", ".join(f"{what} {value:.2f} s" for what, value in seconds.items())
    yield Goal(asked[0], measured, HOW, max(seconds.values()) < SECONDS_GOAL, when)
    yield Goal(asked[1], percent(max(over - 1, 0.0), 2), HOW, over <= BOUND_GOAL, when)


def _noise(found: dict[str, Any] | None) -> Goal:
    asked = "fleet planner: +-10 % of noise changes no workers over ten windows, a pool scarce"
    if found is None:
        return Goal(asked, MISSING, HOW, None)
    changed, services = found["changed"], found["services"]
    measured = (
        f"of {services} services none in {changed.count(0)} of {len(changed)} fleets, {max(changed)} at most; "
        f"{percent(sum(changed) / len(changed) / services, 3)} of all"
    )
    return Goal(asked, measured, HOW, not any(changed), words(found["measured"]))


def section(results: Results, links: dict[str, str]) -> list[str]:
    """All scenes, the replays, and what earlier days are worth."""
    found = results.get("fleetplan") or {}
    lines = [
        "## A fleet of certified plans (simulated)",
        "",
        "`python -m bench.fleetplan`: the planner of core decides every 15 s from what it could have measured by "
        "then; workers start, switch, stop, answer in batches and cost by the second. Times of plans on one core "
        "are measured ones (this page); the other pools are declared in `bench/fleetplan/scenes.py`. A worker "
        f"starts in {CPU_STARTUP:g} s, as measured on a real cluster, or {GPU_STARTUP:g} s on a GPU, which is "
        "declared (rows from before 2026-11-28: 20 s and 45 s). *Missed* is late or given up. *Ahead* says in which"
        " of cost and misses the planner is not behind. HPA has Kubernetes' defaults and the cheapest certified "
        "plan; Proteus has as many workers as the busiest minute takes, known in advance. INFaaS and Proteus are "
        "written from their papers. Of single variants the row is the cheapest that misses no more than 1 %, else "
        "the one that misses least.",
        "",
    ]
    for name, (says, _) in SCENES.items():
        scene = found.get("scenes", {}).get(name)
        lines += [f"### {says}", "", *table(HEAD, _rows(scene["rows"]) if scene else [])]
        lines += _when(scene)
        if f"fleetplan-{name}" in links:
            lines += [f"![cost, misses and disagreement over time, {name}]({links[f'fleetplan-{name}']})", ""]
    return [*lines, *_replays(found.get("replays")), *_forecasts(found.get("forecasts"))]


HEAD = ["policy", "cost, of the largest variant's", "missed", "disagreement", "budgets", "workers", "ahead in"]


def _rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    by_name = {row["policy"]: row for row in rows}
    return [
        [
            row["policy"] + (f" ({row['said']})" if row["said"] != row["policy"] else ""),
            f"{row['cost'] / by_name[LARGEST]['cost']:.2f}",
            percent(row["missed"], 2),
            percent(row["disagreement"], 2),
            "kept" if row["kept"] else "**broken**",
            f"{row['workers']:.1f}",
            "–" if row["policy"] == OURS else ahead(by_name[OURS], row),
        ]
        for row in rows
    ]


def _replays(found: dict[str, Any] | None) -> list[str]:
    lines = [
        "*Budgets.* Two minutes each, every plan certified on 4,000 fresh labels in each replay (5 % for all plans "
        "together). One plan is truly at 1.1 % where 1 % is allowed. Policies without certificates go by its share "
        "among the same labels.",
        "",
    ]
    body = [
        [
            row["policy"],
            f"{row['kept']} of {row['runs']}",
            f"{row['cost']:.4f}",
            percent(row["missed"], 2),
            f"{percent(row['disagreement'], 2)} / {percent(row['worst'], 2)}",
        ]
        for row in (found or {"rows": []})["rows"]
    ]
    return [
        *lines,
        *table(["policy", "budget kept", "cost", "missed", "disagreement, mean / worst"], body),
        *_when(found),
    ]


def _forecasts(found: dict[str, Any] | None) -> list[str]:
    lines = [
        "*Earlier days.* Twitter again, stretches of three hours spread over two weeks and over the day, each after "
        "seven days of the trace. The operator keeps windows of the last hour, and of earlier days the second highest "
        "rate of each five minutes. More room to spare is the other way to miss less.",
        "",
    ]
    rows = (found or {"rows": []})["rows"]
    costs = relative_costs(rows)
    body = [
        [row["policy"], f"{costs[row['policy']]:.2f}", percent(row["missed"], 2), percent(row["worst"], 2)]
        for row in rows
    ]
    return [
        *lines,
        *table(["planned from", f"cost, of the {RECENT}'s", "missed", "in the worst stretch"], body),
        *_when(found),
    ]


def _when(found: dict[str, Any] | None) -> list[str]:
    return measured_line(words(found["measured"])) if found else []
