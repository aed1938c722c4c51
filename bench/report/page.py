"""The page itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import edge, fleetplan, generation, gpu, labels, placement, scale, serving, sharing, streams
from bench.report.goals import goals
from bench.report.papers import rows
from bench.report.results import MISSING, Results, holds, percent, policy_row, spread, table

HEAD = """<!-- Made by `make bench` (python -m bench.report) from the JSON files under build/bench. Do not edit. -->
# Benchmarks

All figures come from JSON files that `make bench` leaves under `build/bench`; `python -m bench.report` makes this page again from
them, and keeps what it says of anything that has no file there. The recorded scores of real models (`python -m bench.record`) are the population: calibration sets and streams are drawn from
them with replacement, and a plan's *true* saving and disagreement are those on all records. Figures are medians over draws with the
range of the middle 90 %. Exits are priced at batch size 16 unless a row says otherwise, and savings of replays are without audits. *Disagreement* is the share of all requests
answered otherwise than the full model answers.
"""

SHOWN_LOAD = 0.5

LIMITS = """## Limits

- One machine, two shared cores, other work beside it: times are ratios of interleaved runs or processor time, never absolute promises.
- Records were made with one checkpoint and one head-training seed per task; video is one scene.
- Savings that are replayed or timed by the engine alone are without audits, which take 2-4 % of the fp32 time where 2 % of requests are audited and more with
  int8 (5.5 % for ResNet-56). `offramp replay` says how much for a file of records. What is measured *through HTTP* has them in its times.
- The simulator knows no audits and no neighbours. Its latencies begin at the worker's door.
- Draws are exchangeable by construction. Streams that drift are the matter of `bench.promise` and of the simulated years of
  `bench.control`; requests that resemble each other that of `bench.streams`.
"""


def make_page(results: Results, pictures: dict[str, Path], page: Path) -> str:
    """Markdown; links are relative to the page's folder."""
    links = {name: path.relative_to(page.parent).as_posix() for name, path in pictures.items()}
    parts = [
        HEAD.splitlines(),
        _sets(results),
        _goals(results),
        _policies(results, links),
        _certificates(results, links),
        _targets(results),
        _queues(results, links),
        _simulator(results, links),
        serving.engine(results, links),
        serving.served(results, links),
        serving.peers(results, links),
        serving.foreign(results),
        serving.soak(results, links),
        gpu.section(results),
        scale.section(results),
        placement.section(results),
        sharing.section(results),
        edge.section(results),
        fleetplan.section(results, links),
        _papers(results),
        _power(results),
        _slowness(results),
        labels.section(results),
        streams.section(results),
        generation.section(results),
        _control(results, links),
        _search(results),
        LIMITS.splitlines(),
    ]
    return "\n".join(line for part in parts for line in [*part, ""]).rstrip() + "\n"


def _sets(results: Results) -> list[str]:
    """What was recorded."""
    body = [
        [name, str(each["model"]), str(each["head"]), f"{each['records']:,}", str(each["ramps"])]
        for name, each in results.sets().items()
    ]
    return ["## Records", "", *table(["set", "model and data", "heads", "rows", "ramps"], body)]


def _goals(results: Results) -> list[str]:
    body = [
        [goal.target, goal.measured, goal.mark, f"{goal.how}; {goal.when}" if goal.when else goal.how]
        for goal in goals(results)
    ]
    return [
        "## Targets",
        "",
        *table(["target", "measured", "", "how"], body),
        "*How* ends with the day, the commit and the processor (int8 is fast where it has VNNI); rows without them "
        "are older than such notes. Measured ratios have a tolerance of 5 %; what is met with it only says so.",
    ]


def _policies(results: Results, links: dict[str, str]) -> list[str]:
    lines = [
        "## Policies on the same draws",
        "",
        "Budget 1 %. *Over budget* counts draws whose true disagreement exceeds it; *with exits* are the draws in "
        "which the policy let anything",
        "leave. Hindsight policies see the stream they are judged on: ceilings, not rivals.",
        "",
    ]
    for name, result in results.of_stage("draws"):
        body = [
            [
                row["name"] + (" (hindsight)" if row["hindsight"] else ""),
                spread(row["saving"]),
                spread(row["disagreement"], 2),
                f"{row['over_budget']} of {row['n']}",
                f"{row['with_exits']}",
            ]
            for row in result["policies"]
        ]
        lines += [
            f"### {result['model']}, {result['head']} heads ({name})",
            "",
            f"{result['tune_rows']:,} rows to tune on; online policies serve {result['stream_rows']:,} requests, "
            f"{result['batch_size']} at a time.",
            "",
            *table(["policy", "true saving", "true disagreement", "over budget", "with exits"], body),
        ]
        if f"policies-{name}" in links:
            lines += [f"![saving against disagreement, {name}]({links[f'policies-{name}']})", ""]
    return lines


def _certificates(results: Results, links: dict[str, str]) -> list[str]:
    lines = ["## What a certificate costs", ""]
    body = []
    for name, result in results.of_stage("certificates"):
        frontier = results.get(f"frontier-{name}")
        optimum = None if frontier is None else frontier["prices"]["time"]["exact"]["saving"]
        body += [
            [
                name,
                f"{row['labels']:,}",
                spread(row["saving"]),
                percent(optimum),
                spread(row["disagreement"], 2),
                f"{row['over_budget']} of {row['with_exits']}",
                percent(row["worth_5_points"]),
                str(row["n"]),
            ]
            for row in result["rows"]
        ]
    lines += table(
        [
            "set",
            "labels",
            "certified saving",
            "best at 1 % true",
            "true disagreement",
            "over budget",
            "worth >= 5 points",
            "draws",
        ],
        body,
    )
    return [
        *lines,
        *([f"![certified saving by labels]({links['certificates']})", ""] if "certificates" in links else []),
    ]


def _targets(results: Results) -> list[str]:
    lines = ["## Accuracy targets and ramp budgets", ""]
    by_budget, by_ramps = [], []
    for name, result in results.of_stage("targets"):
        for row in result["budgets"]:
            cells = [spread(row[policy]["saving"]) for policy in ("exact", "certified", "greedy")]
            by_budget.append([name, percent(row["budget"]), *cells, str(row["exact"]["n"])])
        for row in result["ramp_budgets"]:
            cells = [spread(row[policy]["saving"]) for policy in ("exact", "greedy")]
            by_ramps.append([name, percent(row["max_overhead"], 0), *cells, str(row["exact"]["n"])])
    lines += table(["set", "allowed disagreement", "exact", "certified", "greedy", "draws"], by_budget)
    lines += table(["set", "time all ramps may add", "exact", "greedy", "draws"], by_ramps)
    return lines


def _queues(results: Results, links: dict[str, str]) -> list[str]:
    lines = [
        "## Behind a queue (simulated)",
        "",
        "The newer half of the records arrives at one worker, at half of what it can do without exits; plans were "
        "tuned on the older half.",
        "Ramps and regrouping are paid inside the queue. p50 / p95 against exits off under the same arrivals, then "
        "dropped requests.",
        "",
    ]
    for name, result in results.of_stage("serving"):
        each = min(result["loads"], key=lambda at: abs(at["load"] - SHOWN_LOAD))
        queues = [
            (s["arrivals"], s["batching"])
            for s in each["policies"][0]["serving"]
            if s["batching"] == "offramp" or s["arrivals"] == "poisson"
        ]
        names = [row["name"] for row in each["policies"] if row["name"] != "exits-off"]
        body = [
            [arrivals, batching, *(_queue_cell(policy_row(each, policy), arrivals, batching) for policy in names)]
            for arrivals, batching in queues
        ]
        lines += [f"### {result['model']}, {result['head']} heads ({name}), load {each['load']}", ""]
        lines += table(["arrivals", "batching", *names], body)
        if result["missing"]:
            lines += [f"Traces {MISSING}: {len(result['missing'])}.", ""]
        if f"queue-{name}" in links:
            lines += [f"![latency by load, {name}]({links[f'queue-{name}']})", ""]
    return lines


def _queue_cell(row: dict[str, Any] | None, arrivals: str, batching: str) -> str:
    if row is None:
        return "–"
    serving = next(s for s in row["serving"] if (s["arrivals"], s["batching"]) == (arrivals, batching))
    lost = serving["dropped"] + serving["rejected"]
    ratios = " / ".join("–" if serving[key] is None else f"{serving[key]:.2f}" for key in ("p50_ratio", "p95_ratio"))
    return ratios + (f", {lost:,} dropped" if lost else "")


def _simulator(results: Results, links: dict[str, str]) -> list[str]:
    lines = ["## The simulator against a real worker", ""]
    found = results.get("simulator")
    if found is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = [
        [
            f"{each['load']}",
            q,
            f"{v['measured']:.3f} ({v['measured_low']:.3f} to {v['measured_high']:.3f})",
            f"{v['simulated']:.3f}",
            f"{100 * v['error']:+.1f} %",
            "yes" if v["passed"] else "**no**",
        ]
        for each in found["loads"]
        for q, v in each["verdict"].items()
    ]
    first = found["loads"][0]["pairs"][0]["on"]
    lines += [
        f"One worker with the `{found['bundle']}` bundle (capacity {found['capacity']:.0f} requests a second), "
        f"{'results only' if found['carries_on'] else 'compute saving'}, {percent(first['left_early'], 0)} leave "
        "early; "
        f"{found['pairs']} interleaved pairs of {found['seconds']:.0f} s a load, both runs of a pair with the same "
        "arrivals and inputs. The simulator "
        "gets those arrivals, the exits taken and the bundle's profile, and two constants from exits-off runs alone: "
        "a request spends "
        f"{1e3 * found['front_seconds']:.2f} ms outside the engine, and batches take {found['slowdown']:.2f} x the "
        "profile's times (median of pairs). "
        f"Load average of the machine at the end: {found['load_average']:.1f}; above 2, neighbours decide about "
        "single ratios. The rules "
        "themselves are compared without a machine: tests/core/test_simulate_worker.py runs the worker's own batcher "
        "and stage loop under a "
        f"virtual clock, and every answer's time is equal.",
        "",
        *table(["load", "", "on/off, worker (range of pairs)", "simulated", "error", "within 10 % or the range"], body),
    ]
    return [*lines, *([f"![simulator against worker]({links['simulator']})", ""] if "simulator" in links else [])]


def _papers(results: Results) -> list[str]:
    body = [[row.what, row.theirs, row.ours(results), row.comparable] for row in rows()]
    return [
        "## Beside the papers",
        "",
        "Figures of Apparate (SOSP 2024, arXiv:2312.05385, its slides and its artifact) beside ours. Models, data and "
        "machines differ; the last",
        "column says what can be compared.",
        "",
        *table(["", "theirs", "ours", "comparable?"], body),
    ]


def _power(results: Results) -> list[str]:
    evidence = results.get("evidence")
    lines = ["## Power of the evidence", ""]
    if evidence is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = [
        [
            "promote" if row["test"] == "less" else "roll back",
            percent(row["rate"]),
            _when(row["median"]),
            _when(row["p90"]),
        ]
        for row in evidence["power"]
    ]
    return [
        *lines,
        "Budget 1 %, level 5 %: audited requests until the one-arm test decides (exact, one look after every request).",
        "",
        *table(["decision", "true rate", "median", "90th percentile"], body),
    ]


def _slowness(results: Results) -> list[str]:
    lines = ["## Canaries that are slower than allowed (simulated)", ""]
    found = results.rows("slowness")
    if found is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = [
        [
            row["traffic"],
            row["judged"],
            f"{weight} %",
            percent(step["noticed"]),
            f"{step['waited']:,}",
            f"{step['excluded']:g} x" if step["excluded"] else "none",
            percent(max(row["falsely rejected"].values()), 2),
        ]
        for row in found
        for weight, step in row["steps"].items()
    ]
    return [
        *lines,
        "A canary 1.2 x slower beyond its allowance: how often a step rejects it by the time it may pass. *Before*: "
        "limits by batch size alone, 2,000 judged batches at",
        "most. The last column is of rollouts whose canary stays within its allowance.",
        "",
        *table(["batch times", "judged", "weight", "noticed", "batches", "excluded", "falsely rejected"], body),
    ]


def _control(results: Results, links: dict[str, str]) -> list[str]:
    lines = ["## The whole control loop (simulated)", ""]
    found = results.get("control")
    if found is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = [
        [
            row["promise"],
            f"{row['n']:,}",
            _missed(row),
            percent(row["allowed"], 0),
            holds(row["holds"]),
            _middle(row["audits"]),
            _middle(row["seconds"]),
        ]
        for row in found["rollouts"].values()
    ]
    years = [
        [
            row["promise"],
            f"{row['n']:,}",
            _missed(row),
            percent(row["allowed"], 0),
            holds(row["holds"]),
            f"{percent(row['disagreement']['p50'], 2)} / {percent(row['disagreement']['max'], 2)}",
            percent(row["saving"]["p50"]),
            f"{row['days_above']['p50']:.0f} / {row['days_above']['max']:.0f}",
            f"{row['days_off']['p50']:.1f}",
            f"{row['tests']['p50']:.0f}, {row['rollouts']['p50']:.0f}, {row['alarms']['p50']:.0f}",
        ]
        for row in found["years"].values()
    ]
    return [
        *lines,
        f"Four simulated workers serve the recorded scores of {found['records']} under bursty load that all share; "
        "the real `decide` is called at every pull,",
        "one second apart. Workers use the real hash, counters and breaker; audits are drawn per request and answered "
        "late, documents and pulls get lost now and",
        "then, one batch in a thousand fails, utilisation is 10 to 65 %. Assumed, not measured: the noise of batch "
        "times (wander with memory, stalls with a Pareto",
        "tail, workers of different speed; `bench/control_world.py`). *Refuted* means a one-sided binomial test at "
        "0.1 %; intervals are 95 %. Seconds are simulated",
        "ones from the rollout's beginning to its verdict.",
        "",
        *table(["promise", "rollouts", "missed", "allowed", "", "audits p50 / p90", "seconds p50 / p90"], body),
        *table(
            [
                "promise",
                "years",
                "broken",
                "allowed",
                "",
                "disagreement p50 / worst",
                "saving",
                "days above budget p50 / most",
                "days off",
                "tests, rollouts, alarms",
            ],
            years,
        ),
        *([f"![evidence of some rollouts; audits to stop]({links['control']})", ""] if "control" in links else []),
    ]


def _missed(row: dict[str, Any]) -> str:
    return "–" if not row["n"] else f"{percent(row['rate'], 2)} ({100 * row['low']:.2f} to {100 * row['high']:.2f})"


def _middle(values: dict[str, float]) -> str:
    return f"{values['p50']:,.0f} / {values['p90']:,.0f}" if values else "–"


def _search(results: Results) -> list[str]:
    timings = results.rows("search")
    body = [
        [
            t["records"],
            t["task"],
            t["loops"],
            percent(t["budget"]),
            f"{1e3 * t['processor_seconds']:,.1f} ms",
            f"{1e3 * t['wall_seconds']:,.1f} ms",
            percent(t["saving"]),
            f"{100 * t['gap']:.2f}",
        ]
        for t in timings or []
    ]
    head = ["records", "search", "loops", "budget", "processor", "wall", "saving", "proven gap, points"]
    return ["## Search", "", *table(head, body)]


def _when(n: int | None) -> str:
    return "> 40,000" if n is None else f"{n:,.0f}"
