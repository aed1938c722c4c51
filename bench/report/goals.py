"""The targets, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bench.report import edge, fleetplan, generation, gpu, placement, scale, serving, sharing, streams
from bench.report.results import MISSING, Goal, Results, percent, policy_row
from bench.tiers import CHOICE_GOAL, KEPT_GOAL
from offramp_core import binomial

STAGE_OF = {"validate_simulator": "simulator"}
DELTA = 0.05
REFUTED = 0.001
QUIET = 2.0  # load average of a machine of two cores on which timings decide anything


# Saving at 1.0 % true disagreement that research/exit-scores found, less one point; priced by arithmetic as there.
EQUAL_DISAGREEMENT = {
    "resnet56-mx4": ("ResNet-56, 4x4 heads", 0.277, 0.232),
    "resnet56-gap": ("ResNet-56, pooled linear heads", 0.137, 0.100),
    "sst2-mean": ("MiniLM on SST-2, mean-pooled heads", 0.399, 0.398),
    "sst2-cls": ("MiniLM on SST-2, CLS heads", 0.233, 0.206),
    "imdb-mean": ("MiniLM on IMDB, mean-pooled heads", 0.384, 0.366),
}
POINT = 0.01


def goals(results: Results) -> list[Goal]:
    """Every row, in the order of the issue."""
    return [_dated(goal, results) for part in _PARTS for goal in part(results)]


def _dated(goal: Goal, results: Results) -> Goal:
    """With when it was measured, by the first bench that it names."""
    named = re.search(r"bench\.(\w+)", goal.how)
    if goal.when or goal.measured == MISSING or named is None:
        return goal
    return replace(goal, when=results.measured(STAGE_OF.get(named[1], named[1])))


def never_below_greedy(results: Results) -> list[Goal]:
    below, draws, sets = 0, 0, 0
    for _, result in results.of_stage("draws"):
        exact = policy_row(result, "exact")
        if exact is not None and "exact_below_greedy" in result:
            below, draws, sets = below + result["exact_below_greedy"], draws + exact["n"], sets + 1
    return [
        Goal(
            "exact >= greedy on every draw at equal budget, on the same records",
            f"below in {below} of {draws} draws of {sets} record sets" if draws else MISSING,
            "bench.replays draws; tests compare >= 1,000 small cases with ties to brute force",
            below == 0 if draws else None,
        )
    ]


def equal_disagreement(results: Results) -> list[Goal]:
    rows = []
    for name, (title, research_exact, research_greedy) in EQUAL_DISAGREEMENT.items():
        result = results.get(f"frontier-{name}")
        target = (
            f"{title}: exact placement at 1.0 % true disagreement saves >= {100 * (research_exact - POINT):.1f} % "
            f"(greedy on evenly spaced ramps had {100 * research_greedy:.1f} %)"
        )
        if result is None:
            rows.append(Goal(target, MISSING, "bench.replays frontier", None))
            continue
        price = "macs" if "macs" in result["prices"] else "time"
        exact, greedy = (result["prices"][price][p]["saving"] for p in ("exact", "greedy"))
        how = (
            f"{result['draws']} draws x {len(result['budgets'])} budgets, interpolated; priced by "
            f"{'arithmetic' if price == 'macs' else 'time at batch 16'}"
        )
        rows.append(
            Goal(target, f"exact {percent(exact)}, greedy {percent(greedy)}", how, exact >= research_exact - POINT)
        )
    return rows


def no_collapse(results: Results) -> list[Goal]:
    rows = []
    for name, result in results.of_stage("draws"):
        exact, greedy = policy_row(result, "exact"), policy_row(result, "greedy")
        if not name.startswith("video") or exact is None or greedy is None:
            continue
        rows.append(
            Goal(
                f"{result['model']} ({result['head']}): exact does not collapse where a fixed grid does",
                f"exact {percent(exact['saving']['median'])} (worst 5 %: {percent(exact['saving']['p5'])}), greedy "
                f"{percent(greedy['saving']['median'])}",
                f"bench.replays draws, {exact['n']} draws",
                exact["saving"]["p5"] > 0.05,
            )
        )
    return rows or [Goal("exact does not collapse where a fixed grid does", MISSING, "bench.replays draws", None)]


def certificate_cost(results: Results) -> list[Goal]:
    certificates, frontier = results.get("certificates-resnet56-mx4"), results.get("frontier-resnet56-mx4")
    rows = []
    for labels, points in ((2000, 8), (4500, 5)):
        target = (
            f"ResNet-56: certified saving within {points} points of the optimum at equal true disagreement, "
            f"{labels:,} labels"
        )
        if certificates is None or frontier is None:
            rows.append(Goal(target, MISSING, "bench.replays certificates, frontier", None))
            continue
        row = _labels(certificates, labels)
        optimum = frontier["prices"]["time"]["exact"]["saving"]
        gap = optimum - row["saving"]["median"]
        measured = f"{100 * gap:.1f} points ({percent(row['saving']['median'])} of {percent(optimum)})"
        rows.append(Goal(target, measured, f"{row['n']} draws, median", gap <= points / 100))
    target = "from 1,000 labels on a plan worth >= 5 points is certified in >= 97 % of draws"
    if certificates is None:
        return [*rows, Goal(target, MISSING, "bench.replays certificates", None)]
    enough = [row for row in certificates["rows"] if row["labels"] >= 1000]
    measured = ", ".join(f"{percent(row['worth_5_points'])} at {row['labels']:,}" for row in enough)
    return [*rows, Goal(target, measured, f"{enough[0]['n']} draws", all(r["worth_5_points"] >= 0.97 for r in enough))]


def certified_keeps_budget(results: Results) -> list[Goal]:
    rows = []
    for name, result in results.of_stage("draws"):
        row = policy_row(result, "certified")
        if row is None or not row["with_exits"]:
            continue
        p = float(binomial.sf(row["over_budget"] - 1, row["with_exits"], DELTA))
        rows.append(
            Goal(
                f"{name}: certified plans break a 1 % budget in <= 5 % of draws (exits-off not counted)",
                f"{row['over_budget']} of {row['with_exits']}",
                f"one-sided binomial test p = {p:.3f}; refuted below {REFUTED}",
                p >= REFUTED,
            )
        )
    return rows or [Goal("certified plans break a 1 % budget in <= 5 % of draws", MISSING, "bench.replays draws", None)]


def _labels(result: dict[str, Any], labels: int) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in result["rows"] if row["labels"] == labels)
    return row


def counting_trap(results: Results) -> list[Goal]:
    target = "counting trap (budget 1 %, truth 2 %, 60 % exits, audits 5 %): unbiased, and the plan is rejected"
    evidence = results.get("evidence")
    if evidence is None:
        return [Goal(target, MISSING, "bench.evidence", None)]
    trap = evidence["counting_trap"]
    measured = (
        f"audits read {percent(trap['audits read'], 2)} where the truth is {percent(trap['truth'], 2)}; log evidence "
        f"{trap['log evidence of harm']:.1f}; "
        f"counting every non-exit reads {percent(trap['wrong counting reads'], 2)}"
    )
    rejected = trap["log evidence of harm"] >= 3.0  # log(1 / 0.05)
    return [Goal(target, measured, "bench.evidence", rejected)]


def two_arms(results: Results) -> list[Goal]:
    target = (
        "two-arm test, batches of 1 to 32, bursty load: identical arms rejected in <= 1 %, twice as slow in >= 99 %"
    )
    evidence = results.get("evidence")
    if evidence is None:
        return [Goal(target, MISSING, "bench.evidence", None)]
    shares = {
        float(name.split()[2]): value
        for name, value in evidence["two_arm_bursty"].items()
        if name.startswith("rejected when")
    }
    measured = ", ".join(f"{percent(share)} rejected at {slower:g} x" for slower, share in sorted(shares.items()))
    met = shares[1.0] <= 0.01 and shares[2.0] >= 0.99 if {1.0, 2.0} <= set(shares) else None
    return [Goal(target, measured, "bench.evidence, the control plane's own gate, simulated", met)]


def slower_canaries(results: Results) -> list[Goal]:
    target = (
        "a canary of texts of mixed length 1.2 x slower than allowed: rejected in >= 95 % of steps; canaries "
        "within their allowance in <= 1 %"
    )
    found = [row for row in results.rows("slowness") or [] if (row["traffic"], row["judged"]) == ("texts", "now")]
    if not found:
        return [Goal(target, MISSING, "bench.slowness", None)]
    least = min(step["noticed"] for step in found[0]["steps"].values())
    most = max(found[0]["falsely rejected"].values())
    measured = f"at least {percent(least)} at every weight; {percent(most)}"
    return [
        Goal(
            target, measured, "bench.slowness, the control plane's own gate, simulated", least >= 0.95 and most <= 0.01
        )
    ]


def evidence_levels(results: Results) -> list[Goal]:
    target = "type-I error of every test at its boundary after 40,000 looks within its level (5 %)"
    evidence = results.get("evidence")
    if evidence is None:
        return [Goal(target, MISSING, "bench.evidence", None)]
    levels = evidence["level_after_40000_looks"]
    measured = ", ".join(f"{name} {percent(value)}" for name, value in levels.items())
    return [Goal(target, measured, "bench.evidence, exact (no simulation)", all(v <= DELTA for v in levels.values()))]


def evidence_speed(results: Results) -> list[Goal]:
    target = "evidence update of 1,000,000 observations < 50 ms on one core"
    evidence = results.get("evidence")
    if evidence is None:
        return [Goal(target, MISSING, "bench.evidence", None)]
    times = evidence["cpu_ms_per_million"]
    measured = ", ".join(f"{name}: {value:.0f} ms" for name, value in times.items())
    streams = [value for name, value in times.items() if "blocks" not in name]  # blocks: 10,000 pulls, not one update
    how = "bench.evidence, processor time; judged on streams, 10,000 separate pulls are listed too"
    return [Goal(target, measured, how, all(value < 50 for value in streams))]


def million(results: Results) -> list[Goal]:
    target = "`offramp replay` on 1,000,000 x 12: exact policy under 2 GiB and 2 minutes"
    found = results.get("million")
    if found is None:
        return [Goal(target, MISSING, "bench.million", None)]
    measured = (
        f"{found['peak_bytes'] / 2**20:,.0f} MiB, {found['cpu_seconds']:.0f} s of processor "
        f"({found['seconds']:.0f} s on a shared machine)"
    )
    return [Goal(target, measured, "bench.million", bool(found["passed"]))]


def simulator(results: Results) -> list[Goal]:
    found = results.get("simulator")
    target = (
        "simulator against the real worker at <= 0.7 load: on/off ratio of p50 and p95 within 10 % or the "
        "run-to-run interval"
    )
    if found is None:
        return [Goal(target, MISSING, "bench.validate_simulator", None)]
    verdicts = [verdict for each in found["loads"] for verdict in each["verdict"].values()]
    near = sum(abs(v["error"]) <= found["tolerance"] for v in verdicts)
    inside = sum(v["passed"] for v in verdicts)
    measured = (
        f"{near} of {len(verdicts)} ratios within 10 %, {inside} within 10 % or the range of the pairs (load average "
        "of the machine "
        f"{found['load_average']:.1f}); rules equal the worker's own batcher and stage loop exactly under a virtual "
        "clock"
    )
    how = (
        f"bench.validate_simulator, {found['pairs']} interleaved pairs of {found['seconds']:.0f} s a load; "
        "tests/core/test_simulate_worker.py"
    )
    undecided = (
        inside == len(verdicts) > near and found["load_average"] > QUIET
    )  # a range that neighbours made proves little
    return [Goal(target, measured, how, None if undecided else inside == len(verdicts))]


def search_speed(results: Results) -> list[Goal]:
    three = "thresholds for 3 given ramps on 10,000 records < 10 ms on one core"
    joint = "joint placement of <= 3 of 27 ramps on 10,000 records: gap <= 0.5 points in < 1 s, optimal in < 60 s"
    timings = results.rows("search")
    if timings is None:
        return [Goal(target, MISSING, "bench.search", None) for target in (three, joint)]

    found: list[Goal] = []
    for name in dict.fromkeys(t["records"] for t in timings if t["loops"] == "compiled"):
        of_records = [t for t in timings if t["records"] == name]
        times = partial(_search_seconds, [t for t in of_records if t["loops"] == "compiled"])
        alone = partial(_search_seconds, [t for t in of_records if t["loops"] == "numpy"])
        given, near, optimal = times("3 given ramps"), times("27, gap 0.5 points"), times("27, optimal")
        how = f"bench.search, {name}, processor time by budget, compiled loops loaded"
        if given:
            measured = f"{_times(given, 1e3, 'ms')} (numpy alone: {_times(alone('3 given ramps'), 1e3, 'ms')})"
            found.append(Goal(three, measured, how, max(given.values()) < 0.010))
        if near and optimal:
            measured = (
                f"gap 0.5: {_times(near, 1, 's')} (numpy alone: "
                f"{_times(alone('27, gap 0.5 points'), 1, 's')}); optimal: {_times(optimal, 1, 's')}"
            )
            found.append(Goal(joint, measured, how, max(near.values()) < 1 and max(optimal.values()) < 60))
    return found


def _search_seconds(timings: list[dict[str, Any]], task: str) -> dict[float, float]:
    return {t["budget"]: t["processor_seconds"] for t in timings if t["task"].endswith(task)}


def _times(seconds: dict[float, float], scale: float, unit: str) -> str:
    return ", ".join(f"{scale * s:.3g} {unit} at {percent(budget)}" for budget, s in sorted(seconds.items()))


def promise(results: Results) -> list[Goal]:
    a = "promise (a): a certified plan keeps the budget with 95 %"
    b = "promise (b): off within a stated number of labels after a jump to 5 %"
    c = (
        "promise (c): over a year of drift and daily re-tuning, request-weighted disagreement <= budget in >= 95 % of "
        "runs"
    )
    found = results.get("promise")
    if found is None:
        return [Goal(target, MISSING, "bench.promise", None) for target in (a, b, c)]
    certified = [
        (row["labels"], row["broken"], row["certified"], float(binomial.sf(row["broken"] - 1, row["certified"], DELTA)))
        for row in found["certification"]
    ]
    until, lasting = found["labels_until_off_after_jump_to_5_percent"], found["year"]["lasting"]
    return [
        Goal(
            a,
            ", ".join(f"{broken} of {n} broken at {labels:,} labels" for labels, broken, n, _ in certified),
            "bench.promise, synthetic pool with known truth",
            all(p >= REFUTED for *_, p in certified),
        ),
        Goal(
            b,
            f"median {until['0.5']:.0f} labels, 95 % within {until['0.95']:.0f}, 99 % within {until['0.99']:.0f}",
            "bench.promise, 1,000 jumps",
            True,
        ),
        Goal(
            c,
            f"kept in {lasting['kept']} of {lasting['runs']} years; days above budget: median "
            f"{lasting['median_days_above']:.0f}, "
            f"most {lasting['most_days_above']}",
            "bench.promise, simulated drift",
            lasting["kept"] >= 0.95 * lasting["runs"],
        ),
    ]


def tiers(results: Results) -> list[Goal]:
    """Every budget of a menu, and what choosing costs."""
    a = f"tiers: budget of every tier kept in >= {percent(KEPT_GOAL, 0)} of 200 draws with certificates of their own"
    b = f"tiers: < {CHOICE_GOAL:g} µs to choose one, for each request"
    found = results.get("tiers")
    if found is None:
        return [Goal(target, MISSING, "bench.tiers", None) for target in (a, b)]
    budgets = found["budgets"].items()
    kept = ", ".join(f"{name} ({percent(r['budget'])}) {r['kept']} of {r['certified']}" for name, r in budgets)
    how = f"bench.tiers, {found['labels']:,} labels, synthetic pool with known truth"
    cost = ", ".join(f"{value:.1f} µs {what}" for what, value in found["microseconds"].items())
    return [
        Goal(a, kept, how, all(r["kept"] >= KEPT_GOAL * r["certified"] > 0 for _, r in budgets)),
        Goal(b, cost, "bench.tiers, medians", max(found["microseconds"].values()) < CHOICE_GOAL),
    ]


def control_loop(results: Results) -> list[Goal]:
    """Rollouts and years through the whole loop; met where 5,000 rollouts do not refute the promise."""
    found = results.get("control")
    if found is None:
        return [Goal("control loop", MISSING, "bench.control", None)]
    return [
        Goal(
            f"control loop: {row['promise']}",
            f"missed by {row['misses']:,} of {row['n']:,} ({percent(row['rate'], 2)})" if row["n"] else MISSING,
            f"bench.control; refuted below p = {REFUTED}",
            row["holds"],
        )
        for row in [*found["rollouts"].values(), *found["years"].values()]
    ]


_PARTS: tuple[Callable[[Results], list[Goal]], ...] = (
    never_below_greedy,
    equal_disagreement,
    no_collapse,
    certificate_cost,
    certified_keeps_budget,
    counting_trap,
    two_arms,
    slower_canaries,
    evidence_speed,
    evidence_levels,
    million,
    search_speed,
    promise,
    tiers,
    control_loop,
    lambda results: list(streams.goals(results)),
    simulator,
    serving.goals,
    scale.goals,
    placement.goals,
    lambda results: list(gpu.goals(results)),
    sharing.goals,
    edge.goals,
    lambda results: list(fleetplan.goals(results)),
    lambda results: list(generation.goals(results)),
)
