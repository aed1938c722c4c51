"""The engine and the worker: what exits save alone, through HTTP, beside other servers, and under overload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.provenance import words
from bench.report.results import MISSING, TOLERANCE, Goal, Results, measured_line, percent, table

TITLES = {
    "resnet56": "ResNet-56",
    "minilm-sst2": "MiniLM on SST-2",
    "sst2": "MiniLM on SST-2",
    "video": "surveillance video",
}
ENGINE_SUBJECTS, SERVED_SUBJECTS = ("resnet56", "minilm-sst2", "video"), ("resnet56", "sst2")
BUDGET, SLACK = 0.01, 1 + TOLERANCE
MAX_RESIDENT_MIB = 200
MIN_FOREIGN_SAVING, MAX_REFUSED_SAVING = 0.10, 0.03
# Most of the exact executor's time that a plan may take, at batch size 1 and above it.
ENGINE_TARGETS = {
    ("resnet56", "fp32 uncertified"): (0.90, 0.82),
    ("resnet56", "fp32 certified"): (0.92, 0.87),
    ("resnet56", "any uncertified"): (0.40, 0.40),
    ("minilm-sst2", "fp32 uncertified"): (0.66, 0.66),
    ("minilm-sst2", "any uncertified"): (0.50, 0.50),
    ("video", "any uncertified"): (0.40, 0.40),
}
BELOW_EXIT_FREE = 0.8  # of the best exit-free plan of the same budget
WORST = 1.05
MAX_REFUSED = 0.01  # of the requests at a load below capacity
SERVED_TARGETS = {
    "fp32": {"mean": 0.9, "p95": 1.05},
    "fp32-uncertified": {"mean": 0.9, "p95": 1.05},
    "any": {"p50": 0.6, "p95": 0.85},
    "any-uncertified": {"p50": 0.6, "p95": 0.85},
}
CAPACITY_TARGETS = {"fp32": 1.2, "fp32-uncertified": 1.2, "any": 2.0, "any-uncertified": 2.0}


def engine(results: Results, links: dict[str, str]) -> list[str]:
    """Every plan at every batch size."""
    lines = [
        "## The engine alone",
        "",
        "Time of a plan, without audits, over that of the fastest exact executor without exits at fp32: the same "
        "batches in turn, one thread, processor time; median and range of interleaved",
        "pairs. *Worst* is a batch that no row leaves. Plans come from one half of rows that `prepare` has not seen, "
        "disagreement from the other half. *Exit-free* is a lower",
        "precision alone. *Certified* plans passed the held-out test that a service asks for; *uncertified* ones are "
        "the best within 1 % in hindsight of the second half.",
        "Few labels prove less than the budget (*What a certificate costs*): a lower precision that differs by more "
        "than they can prove is left out of certified plans, whatever it saves.",
        "The product serves one plan at all batch sizes, priced at size 1: *of batch 1* is that plan where a size's "
        "own is another one.",
        "",
    ]
    found = results.get("engine") or {}
    for name in dict.fromkeys([*ENGINE_SUBJECTS, *found]):
        body = [
            [str(row["batch"]), row["plan"], *([row["none"], "", "", "", ""] if "none" in row else _engine_cells(row))]
            for row in found.get(name, {}).get("plans", [])
        ]
        lines += [f"### {TITLES.get(name, name)}", ""]
        lines += table(["batch", "plan", "time (range)", "worst", "disagreement", "precision", "ramps"], body)
        lines += measured_line(results.measured("engine", name)) if body else []
        lines += _picture("time by batch size", f"engine-{name}", links)
    return lines


def _picture(says: str, name: str, links: dict[str, str]) -> list[str]:
    return [f"![{says}]({links[name]})", ""] if name in links else []


def _engine_cells(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    return [
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        f"{row['worst']['median']:.3f}",
        percent(row["disagreement"], 2),
        row["precision"],
        ", ".join(ramp["id"] for ramp in row["ramps"]) or "–",
    ]


def served(results: Results, links: dict[str, str]) -> list[str]:
    """Through HTTP."""
    lines = [
        "## Through HTTP, exits on against off",
        "",
        "One worker on one core, an open-loop client on another one, Poisson arrivals, latency from the intended send "
        "time; the arms take turns under the same arrivals. Loads are",
        "shares of what exits off can do (the highest rate with its p95, refused requests included, within the "
        "objective). The mean is that of the answered requests. Plans are audited at 2 %, and certified but for the "
        "uncertified ones: the boldest that hold the budget on the inputs that are sent.",
        "",
    ]
    found = results.get("served") or {}
    for name in dict.fromkeys([*SERVED_SUBJECTS, *found]):
        lines += [f"### {TITLES.get(name, name)}", ""]
        if name not in found:
            lines += table([], [])
            continue
        result, body = found[name], []
        for arm, row in result["arms"].items():
            capacity = [_capacity(row[kind], result["arms"]["off"][kind]) for kind in ("capacity", "tight_capacity")]
            for load, figures in row["loads"].items():
                cells = [_figure(figures[name], arm) for name in ("mean", "p50", "p95")]
                refused = percent(figures["refused"], 2) if "refused" in figures else "–"
                body.append([arm, load, *cells, refused, *capacity, percent(row["disagreement"], 2)])
        within = [f"capacity within {result[ms]:.0f} ms" for ms in ("objective_ms", "tight_ms")]
        lines += table(["exits", "load", "mean", "p50", "p95", "refused", *within, "disagreement"], body)
        length = f"{result['model_ms']:.1f} ms a row, {result['rounds']} rounds of {result['seconds']:g} s a load"
        lines += measured_line(results.measured("served", name), length)
        lines += _picture("latency against exits off by load", f"served-{name}", links)
    return lines


def _capacity(rate: float, off: float) -> str:
    return f"{rate:.0f}/s" + (f" ({rate / off:.2f} x)" if off else "")


def _figure(figure: dict[str, float | None], arm: str) -> str:
    ms, ratio, low, high = (figure[key] for key in ("ms", "ratio", "low", "high"))
    if ms is None:
        return "refused"
    if arm == "off" or ratio is None:
        return f"{ms:.1f} ms"
    return f"{ms:.1f} ms, {ratio:.2f} x ({low:.2f} to {high:.2f})"


def peers(results: Results, links: dict[str, str]) -> list[str]:
    """Beside a bare handler and other servers."""
    lines = [
        "## Beside other servers",
        "",
        "One model, one core, single images, exits off. The yardstick of every pair is a bare FastAPI handler on raw "
        "bytes (1.00). *Idle* is the latency of an idle server over the model's own time.",
        "",
    ]
    runs = {**({"offramp": front} if (front := results.get("front")) else {}), **(results.get("peers") or {})}
    body, skipped = [], []
    for name, run in runs.items():
        if "skipped" in run:
            skipped.append(f"{name}: {run['skipped']}")
            continue
        for objective in ("loose", "tight"):
            for server, row in run[objective]["servers"].items():
                body.append(
                    [
                        f"{name} run" if server == "bare" else name,
                        server,
                        f"{run[objective]['objective_ms']:.0f} ms",
                        f"{row['idle_over_model_ms']:.2f} ms",
                        _number(row["p95_at_0.6_ratio"]),
                        _number(row["capacity_ratio"]),
                        f"{row['goodput_at_twice']:.0f}/s",
                        f"{row['resident_mib']:.0f} MiB",
                    ]
                )
    head = [
        "pair",
        "server",
        "objective",
        "idle over the model",
        "p95 at 0.6 load",
        "capacity",
        "in time at twice the load",
        "resident",
    ]
    measured = "; ".join(_front_run(name, run) for name, run in runs.items() if "skipped" not in run)
    left_out = [f"Left out: {'; '.join(skipped)}.", ""] if skipped else []
    return [
        *lines,
        *table(head, body),
        *measured_line(measured),
        *_picture("capacity by server", "servers", links),
        *left_out,
    ]


def _front_run(name: str, run: dict[str, Any]) -> str:
    length = f"{run['rounds']} rounds of {run['seconds']:g} s"
    return f"{name}: " + ", ".join(part for part in (words(run.get("measured")), length) if part)


def foreign(results: Results) -> list[str]:
    """Models that nobody tuned for."""
    lines = [
        "## Architectures nobody tuned for",
        "",
        "Each model is given to `offramp prepare` as a file with 2,000 unlabelled inputs and no option, then to "
        "`offramp serve`. The best plan at 1 % on the bundle's records, the one that a",
        "certificate allows, and the optimum in hindsight are judged on inputs that neither a head nor a plan has "
        "seen. *Served* is through HTTP, one request at a time; with exits off",
        "every answer has to be the model's own. For a model that is refused the optimum is over all heads tried.",
        "",
    ]
    head = [
        "model",
        "ramps",
        "saving, disagreement",
        "certified",
        "hindsight",
        "served: differ off, latency and disagreement on",
        "measured",
    ]
    return [*lines, *table(head, [_foreign_row(row) for row in results.rows("foreign") or []])]


def _foreign_row(row: dict[str, Any]) -> list[str]:
    when, hindsight = words(row.get("measured")), row["hindsight_saving"]
    if "error" in row:
        return [row["model"], f"refused: {row['error']}", "–", "–", _optimum(row), "–", when]
    certified, on = row["certified"], row["exits_on"]
    return [
        row["model"],
        ", ".join(row["ramps"]) or "–",
        f"{percent(row['saving'])}, {percent(row['disagreement'], 2)}",
        f"{percent(certified['saving'])}, {percent(certified['disagreement'], 2)}" if certified else "none",
        percent(hindsight),
        f"{row['labels_differ']}; {on['latency_ratio']:.2f} x, {percent(on['disagreement'], 2)}",
        when,
    ]


def _optimum(row: dict[str, Any]) -> str:
    """Of a refused model, over all heads that were tried."""
    best = row["hindsight_saving"]
    return "unknown: no place for a head" if best is None else f"{percent(best)} over {row['heads_tried']} heads"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def soak(results: Results, links: dict[str, str]) -> list[str]:
    """Overload."""
    lines = ["## Ten minutes at twice the capacity", ""]
    found = results.get("soak")
    if found is None:
        return [*lines, f"*{MISSING}.*", ""]
    body = [
        [
            "on" if s["exits"] else "off",
            f"{s['requests']:,}",
            percent(s["accepted_share"], 0),
            str(s["wrong"]),
            _milliseconds(s["accepted_ms"]),
            _milliseconds(s["refused_ms"]),
        ]
        for s in found["stretches"]
    ]
    return [
        *lines,
        f"Objective {found['slo_ms']:.0f} ms, {found['overload']:g} x {found['capacity']:.0f} requests a second, "
        f"{found['seconds']:.0f} s; memory grew by "
        f"{percent(found['memory']['growth'])}.",
        "",
        *table(["exits", "requests", "accepted", "wrong", "accepted p50 / p95 / p99", "refused p50 / p95 / p99"], body),
        *measured_line(results.measured("soak")),
        *_picture("latency and memory under overload", "soak", links),
    ]


def _milliseconds(values: dict[str, float | None]) -> str:
    return " / ".join("–" if v is None else f"{v:.1f}" for v in values.values()) + " ms"


# --- targets ---------------------------------------------------------------------------------------


def goals(results: Results) -> list[Goal]:
    """Every row."""
    return [
        *_engine_goals(results),
        *_served_goals(results),
        *_front_goals(results),
        *_foreign_goals(results),
        *_soak_goals(results),
    ]


def judged(goal: Goal, *pairs: tuple[float | None, float], also: bool = True) -> Goal:
    """The goal, whose figures may be at most their limits; the tolerance is for ratios, what must hold ``also`` gets
    none."""
    held = also and all(value is not None and value <= limit * SLACK for value, limit in pairs)
    strictly = held and all(value is not None and value <= limit for value, limit in pairs)
    return replace(goal, met=held, tolerated=held and not strictly)


def _at_least(value: float | None, least: float) -> tuple[float, float]:
    """The pair for :func:`judged` of a figure that has to reach its limit."""
    return (least / value if value else float("inf")), 1.0


def _engine_goals(results: Results) -> Iterator[Goal]:
    found = results.get("engine") or {}
    for (name, plan), (single, above) in ENGINE_TARGETS.items():
        limits = f"<= {single:.2f}" + ("" if single == above else f" at batch 1, <= {above:.2f} above")
        target = f"engine alone, {TITLES[name]}, {plan}: {limits} of the exact executor's time, disagreement <= 1 %"
        rows = [row for row in found.get(name, {}).get("plans", []) if row["plan"] == plan]
        if not rows:
            yield Goal(target, MISSING, "bench.engine", None)
            continue
        timed = [row for row in rows if "none" not in row]
        measured = ", ".join(
            f"{row['batch']}: " + ("none" if "none" in row else f"{row['ratio']['median']:.3f}") for row in rows
        )
        worst = max((row["disagreement"] for row in timed), default=0.0)
        how = (
            f"bench.engine, median of {min((row['ratio'].get('pairs', 0) for row in timed), default=0)} interleaved "
            "pairs"
        )
        goal = Goal(
            target, f"{measured}; disagreement at most {percent(worst, 2)}", how, None, results.measured("engine", name)
        )
        yield judged(
            goal,
            *((row["ratio"]["median"], single if row["batch"] == 1 else above) for row in timed),
            also=len(timed) == len(rows) and worst <= BUDGET,
        )
    for name, result in found.items():
        for goal in _derived_goals(TITLES.get(name, name), result["plans"]):
            yield replace(goal, when=results.measured("engine", name))


def _derived_goals(title: str, plans: list[dict[str, Any]]) -> Iterator[Goal]:
    """Against the best exit-free plan, and the worst case."""
    times = {(row["batch"], row["plan"]): row["ratio"]["median"] for row in plans if "none" not in row}
    shares = {
        batch: times[batch, "any uncertified"] / value
        for (batch, plan), value in times.items()
        if plan.endswith("exit-free") and (batch, "any uncertified") in times
    }
    if shares:
        measured = ", ".join(f"{batch}: {share:.2f}" for batch, share in shares.items())
        goal = Goal(
            f"engine alone, {title}: every approximation at least 20 % below the best exit-free plan",
            measured,
            "bench.engine",
            None,
        )
        yield judged(goal, *((share, BELOW_EXIT_FREE) for share in shares.values()))
    worst = [(row["batch"], row["plan"], row["worst"]["median"]) for row in plans if "worst" in row]
    if worst:
        batch, plan, most = max(worst, key=lambda each: each[2])
        target = f"engine alone, {title}: an input that takes no exit costs at most {100 * (WORST - 1):.0f} % more"
        measured = f"at most {most:.3f} (batch {batch}, {plan})"
        yield judged(Goal(target, measured, "bench.engine, over all plans and batch sizes", None), (most, WORST))


def _served_goals(results: Results) -> Iterator[Goal]:
    found = results.get("served") or {}
    for name in SERVED_SUBJECTS:
        when = results.measured("served", name)
        for arm, limits in SERVED_TARGETS.items():
            words = " and ".join(f"{figure} <= {limit:g}" for figure, limit in limits.items())
            target = f"through HTTP at 0.3, 0.6, 0.9 of capacity, {TITLES[name]}, exits {arm}: {words} of exits off"
            capacity = f"capacity with exits {arm}, {TITLES[name]}: >= {CAPACITY_TARGETS[arm]:g} x"
            row = found.get(name, {}).get("arms", {}).get(arm)
            if row is None:
                yield Goal(target, MISSING, "bench.served", None)
                yield Goal(capacity, MISSING, "bench.served", None)
                continue
            ratios = {(load, f): figures[f]["ratio"] for load, figures in row["loads"].items() for f in limits}
            measured = ", ".join(f"{f} at {load}: {_number(ratio)}" for (load, f), ratio in ratios.items())
            refused = max(figures.get("refused", 0.0) for figures in row["loads"].values())
            if refused > MAX_REFUSED:  # a mean of what was answered says little then
                measured = f"{measured}; refused {percent(refused)}"
            agrees = row["disagreement"] <= BUDGET
            measured = f"{measured}; disagreement {percent(row['disagreement'], 2)}"
            how = "bench.served, " + _length("median of ", found[name])
            goal = Goal(target, measured, how, None, when)
            yield judged(
                goal, *((ratio, limits[f]) for (_, f), ratio in ratios.items()), also=agrees and refused <= MAX_REFUSED
            )
            goal = Goal(capacity, f"{row['capacity_ratio'] or 0.0:.2f} x", "bench.served", None, when)
            yield judged(goal, _at_least(row["capacity_ratio"], CAPACITY_TARGETS[arm]), also=agrees)


def _length(before: str, run: dict[str, Any]) -> str:
    """How long a run was: few and short trials say less."""
    return f"{before}{run['rounds']} rounds of {run['seconds']:g} s"


def _front_goals(results: Results) -> Iterator[Goal]:
    targets = {
        "loose": "beside a bare FastAPI handler, exits off, p95 <= 50 ms: capacity >= 1.0, idle overhead <= 0.6 ms, "
        "p95 at 0.6 load no worse",
        "tight": "the same at an objective of 4 x the model's time: capacity >= 1.5",
    }
    memory = f"resident memory of a worker <= {MAX_RESIDENT_MIB} MiB"
    front, arms = results.get("front"), (results.get("served") or {}).get("resnet56", {}).get("arms")
    for objective, kind, least in (("loose", "capacity", 2.0), ("tight", "tight_capacity", 1.5)):
        target = f"the same with every approximation (ResNet-56), {objective} objective: capacity >= {least:g}"
        if front is None or arms is None or not arms["off"][kind]:
            yield Goal(target, MISSING, "bench.front x bench.served", None)
            continue
        own = front[objective]["servers"]["offramp"]["capacity_ratio"] or 0.0
        ratios = {arm: own * arms[arm][kind] / arms["off"][kind] for arm in ("any", "any-uncertified") if arm in arms}
        measured = ", ".join(f"{arm}: {ratio:.2f}" for arm, ratio in ratios.items())
        goal = Goal(target, measured, "bench.front x bench.served", None)
        yield judged(goal, _at_least(max(ratios.values(), default=0.0), least))
    if front is None:
        yield from (Goal(target, MISSING, "bench.front", None) for target in (*targets.values(), memory))
        return
    how = "bench.front, " + _length("", front)
    for objective, target in targets.items():
        row = front[objective]["servers"]["offramp"]
        capacity, idle, p95 = row["capacity_ratio"] or 0.0, row["idle_over_model_ms"], row["p95_at_0.6_ratio"]
        goal = Goal(target, f"capacity {capacity:.2f}, idle {idle:.2f} ms, p95 {_number(p95)}", how, None)
        if objective == "loose":
            yield judged(goal, _at_least(capacity, 1.0), (idle, 0.6), (p95, 1.0))
        else:
            yield judged(goal, _at_least(capacity, 1.5))
    resident = max(front[objective]["servers"]["offramp"]["resident_mib"] for objective in targets)
    yield Goal(memory, f"{resident:.0f} MiB, after the load", how, resident <= MAX_RESIDENT_MIB)


def _foreign_goals(results: Results) -> Iterator[Goal]:
    target = (
        "architectures nobody tuned for: prepared and served unchanged, two of three save >= 10 % at 1 %; one is "
        "refused only with an optimum < 3 %"
    )
    rows = results.rows("foreign") or []
    if not rows:
        yield Goal(target, MISSING, "bench.foreign", None)
        return
    saved = {row["model"]: 0.0 if "error" in row else _foreign_saving(row) for row in rows}
    refusals = [row for row in rows if "error" in row]
    right = all(row["labels_differ"] == 0 for row in rows if "error" not in row)
    fair = all(row["hindsight_saving"] is not None and row["hindsight_saving"] < MAX_REFUSED_SAVING for row in refusals)
    measured = ", ".join(f"{name}: {percent(saving)}" for name, saving in saved.items())
    refused = [f"{row['model']} refused, optimum {_optimum(row)}" for row in refusals]
    enough = sum(saving >= MIN_FOREIGN_SAVING for saving in saved.values()) >= 2
    yield Goal(
        target,
        "; ".join([measured, *refused, *([] if right else ["answers differ with exits off"])]),
        "bench.foreign, priced by the bundle's profile, on inputs that no plan has seen",
        enough and right and fair and len(refusals) <= 1,
        words(rows[0].get("measured")),
    )


def _foreign_saving(row: dict[str, Any]) -> float:
    """Of the better of the plans that kept the budget."""
    plans = [row, *([row["certified"]] if row["certified"] else [])]
    return max((plan["saving"] for plan in plans if plan["disagreement"] <= BUDGET), default=0.0)


def _soak_goals(results: Results) -> Iterator[Goal]:
    target = (
        "ten minutes at twice the capacity: right answers, p95 within the objective, the rest refused at once, "
        "memory flat"
    )
    found = results.get("soak")
    if found is None:
        yield Goal(target, MISSING, "make soak", None)
        return
    failed = [asked for asked, held in found["passed"].items() if not held]
    yield Goal(
        target,
        f"did not hold: {', '.join(failed)}" if failed else "all held",
        "make soak",
        not failed,
        results.measured("soak"),
    )
