"""Models that generate: equality, time per token, and what certifies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from bench.provenance import words
from bench.report.results import MISSING, Goal, Results, measured_line, percent, table

HOW = "bench.generate"
NO_DRAFT = "fp32"
ANSWERS = {"stories/stories": 10_000, "smollm2/gsm8k": 500}
MOST_TIME, MOST_SLOWER, MOST_BEHIND, MOST_OFF, SOLD_AT, SOLD_TIME, DELTA = 0.72, 0.02, 0.05, 50, 0.05, 0.5, 0.05
BEST = "best escalation: loss, time"
MODELS = {"smollm2": "SmolLM2", "stories": "stories260K"}


def goals(results: Results) -> Iterator[Goal]:
    """What was asked of models that generate."""
    found = results.get("generate") or {}
    for name, n in ANSWERS.items():
        target = f"{n:,} greedy answers with drafts are those without ({name}): no differences beyond ties"
        yield _goal(target, found.get("equality", {}).get(name), lambda run, n=n: _of_equality(run, n))
    for name, run in sorted(found.get("speed", {}).items()):
        if name.startswith("smollm2/") and name.endswith("/1") and _lossless(run):
            target = f"time per token with the best lossless draft <= {MOST_TIME} of fp32's at batch 1 ({name[:-2]})"
            yield _goal(target, run, _of_speed)
    for name, called in MODELS.items():
        auto, mixed = found.get("auto", {}).get(name), found.get("mixed", {}).get(name)
        slower = f"{called}, drafts chosen by measurement: at most {percent(MOST_SLOWER, 0)} slower than none"
        yield _goal(f"{slower} at 1, 2, 4, 8 at once", auto, _of_loads)
        yield _goal(f"{called}: no draft that costs serves {MOST_OFF} requests after content changed", auto, _of_change)
        behind = f"{called}, prose and code by turns: within {percent(MOST_BEHIND, 0)} of the best setting for each"
        yield _goal(behind, mixed, _of_classes)
    exact = next((run for name, run in found.get("rivals", {}).items() if name.endswith(", float32")), None)
    yield _goal("float32 without drafts within 5 % of onnxruntime-genai at 1, 2, 4, 8 at once", exact, _of_peer)
    yield _goal("the same, ahead of transformers", exact, _of_transformers)
    lossy = found.get("lossy", {})
    yield from (
        _goal(f"plans certified on whole answers break their budget in <= 5 % of draws ({name})", run, _of_budgets)
        for name, run in sorted(lossy.items())
    )
    sold = f"a plan certified at a loss of {percent(SOLD_AT, 0)} takes <= {SOLD_TIME} of fp32's time per token"
    yield from (
        _goal(f"{sold} ({name})", run, _of_sale) for name, run in sorted(lossy.items()) if name == "smollm2/sst2"
    )


def _goal(target: str, run: dict[str, Any] | None, judge: Callable[[dict[str, Any]], tuple[str, bool | None]]) -> Goal:
    if run is None:
        return Goal(target, MISSING, HOW, None)
    measured, met = judge(run)
    return Goal(target, measured, HOW, met, words(run.get("measured")))


def _of_equality(run: dict[str, Any], n: int) -> tuple[str, bool]:
    told = f"{run['different']} of {run['requests']:,} differ, {run['ties']} tied"
    return told, run["different"] == 0 and run["requests"] >= n


def _lossless(run: dict[str, Any]) -> dict[str, float]:
    return {name: row["ratio"] for name, row in run["routes"].items() if name.startswith("fp32+")}


def _of_speed(run: dict[str, Any]) -> tuple[str, bool]:
    route, ratio = min(_lossless(run).items(), key=lambda item: item[1])
    return f"{route}: {ratio:.2f}", ratio <= MOST_TIME


def _of_loads(run: dict[str, Any]) -> tuple[str, bool | None]:
    told = ", ".join(f"{_surely(row)} at {row['at_once']}" for row in run["loads"])
    again = [row["again"]["high"] - row["again"]["low"] for row in run["loads"] if "low" in row["again"]]
    itself = f"; no draft against itself is known to within {max(again) / 2:.3f}" if again else ""
    return told + itself, _within(run["loads"], 1 + MOST_SLOWER)


def _within(rows: Sequence[dict[str, Any]], most: float) -> bool | None:
    """Whether every ratio is within a bound, by its interval where it has one; None where that cannot be told."""
    if any(row.get("low", row["ratio"]) > most for row in rows):
        return False
    return True if all(row.get("high", row["ratio"]) <= most for row in rows) else None


def _surely(row: dict[str, Any]) -> str:
    """A ratio with its interval, where it was measured with one."""
    return f"{row['ratio']:.3f}" + (f" ({row['low']:.3f} to {row['high']:.3f})" if "low" in row else "")


def _of_change(run: dict[str, Any]) -> tuple[str, bool | None]:
    moved = run["hostile"]
    if moved["served"] == NO_DRAFT:
        return f"no draft served after {moved['calm']} usual prompts: there was none to end", None
    costs = ", ".join(f"{name} {cost:.2f}" for name, cost in moved["costs"].items())
    where = f"{moved['served']} takes of none's time: {costs}; {moved['content']}: "
    if moved["off_after"]:
        return f"{where}off after {moved['off_after']}", moved["off_after"] <= MOST_OFF
    return f"{where}{moved['serves']} serves in the end, at {moved['ratio']:.2f}", moved["ratio"] <= 1 + MOST_SLOWER


def _of_classes(run: dict[str, Any]) -> tuple[str, bool | None]:
    told = ", ".join(f"{row['class']} {_surely(row['against'])}{_repeated(row)}" for row in run["classes"])
    met = _within([row["against"] for row in run["classes"]], 1 + MOST_BEHIND)
    return f"{told} after {run['learned']} of each", met


def _repeated(row: dict[str, Any]) -> str:
    each = row["each"]
    return f", median {median(each):.3f}, worst {max(each):.3f} of {len(each)}" if len(each) > 1 else ""


def _of_peer(run: dict[str, Any]) -> tuple[str, bool]:
    return _of_rival(run, "onnxruntime-genai fp32", least=1 - MOST_BEHIND)


def _of_transformers(run: dict[str, Any]) -> tuple[str, bool]:
    return _of_rival(run, "transformers fp32", least=1.0)


def _of_rival(run: dict[str, Any], engine: str, *, least: float) -> tuple[str, bool]:
    if engine not in run["engines"]:
        return f"left out: {run['left_out'].get(engine, 'not installed')}", False
    rows = run["engines"][engine]
    told = ", ".join(f"{row['ratio']:.2f} at {n}" for n, row in rows.items())
    return f"its time per token over ours {told}", all(row["ratio"] >= least for row in rows.values())


def _of_budgets(run: dict[str, Any]) -> tuple[str, bool | None]:
    if not any(row["certified"] for row in run["rows"]):
        return f"none certified with {run['rows'][0]['labels']:,} labels", None
    worst = max(run["rows"], key=lambda row: row["broken"] / row["draws"])
    return f"at most {worst['broken']} of {worst['draws']}", worst["broken"] <= DELTA * worst["draws"]


def _of_sale(run: dict[str, Any]) -> tuple[str, bool]:
    rows = [row for row in run["rows"] if row["budget"] == SOLD_AT and 2 * row["certified"] > row["draws"]]
    if not rows:
        return "none certifies in half of the draws", False
    best = min(rows, key=lambda row: row["time"])
    told = f"{best['usual_plan']}: {best['time']:.2f}, {best['certified']} of {best['draws']} ({best['output']})"
    return f"{told}; whole answers, prompts included: {best['answer_time']:.2f}", best["time"] <= SOLD_TIME


def section(results: Results) -> list[str]:
    """All of it, model by model."""
    found = results.get("generate") or {}
    return [
        "## Models that generate",
        "",
        "One thread. *Time per token* is a ratio to the reference (fp32, no draft) in the same run: every prompt is "
        "answered by each route, in turns, and the median over prompts stands here. A route is",
        "a variant, or the reference with a draft and its number of tokens; what has a draft loses nothing.",
        "",
        *_equality(found.get("equality", {})),
        *_speed(found.get("speed", {})),
        *_auto(found.get("auto", {})),
        *_mixed(found.get("mixed", {})),
        *_rivals(found.get("rivals", {})),
        *_exits(found.get("exits", {})),
        *_tokens(found.get("tokens", {})),
        *_lossy(found.get("lossy", {})),
    ]


def _equality(found: dict[str, Any]) -> list[str]:
    body = [
        [
            name,
            f"{row['requests']:,}",
            f"{row['equal']:,}",
            str(row["ties"]),
            str(row["different"]),
            percent(row["accepted"] / row["proposed"]) if row["proposed"] else "",
        ]
        for name, row in found.items()
    ]
    return [
        "*Greedy answers with drafts against those without*, all settings of the bundle in turn. *Ties* differ first "
        "at a token whose logit leads by less than 0.001.",
        "",
        *table(["model, prompts", "answers", "equal", "ties", "different", "accepted"], body),
        *_when(found),
    ]


def _speed(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        rows = sorted(run["routes"].items(), key=lambda item: item[1]["ratio"])
        body = [
            [route, f"{row['ratio']:.2f}", "" if row["acceptance"] is None else f"{row['acceptance']:.2f}"]
            for route, row in rows
        ]
        model, prompts, n = name.rsplit("/", 2)
        head = (
            f"{model} on {prompts}, {n} at a time: {run['prompts']} prompts, {run['tokens']} tokens, the reference "
            f"takes {1e3 * run['reference_seconds']:.1f} ms a token"
        )
        lines += [
            f"*{head}*",
            "",
            *table([f"route ({model}, {prompts}, {n})", "time per token", "accepted"], body),
            *_when({name: run}),
        ]
    return lines


def _auto(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        loads = [
            [
                str(row["at_once"]),
                str(row["requests"]),
                _surely(row),
                _surely(row["again"]),
                _several(row["routes"]),
                row["serves"],
            ]
            for row in run["loads"]
        ]
        moved = run["hostile"]
        lines += [
            f"*Drafts chosen by measurement on {name}* (decisions 105, 106 and 155): a worker's desk that chooses "
            f"among {', '.join(run['settings'])} against the same desk with one setting for all requests, answers of "
            f"up to {run['tokens']} tokens, in turns in one run; ratios of the",
            "processor's seconds of whole answers, prompts included, all of them over all, and their middle 95 % where "
            "single turns are drawn again. First from the first request on, against no draft; *no draft again* is the "
            f"same against itself. {_changed(moved)}",
            "",
            *table(
                [f"{name}, at once", "requests", "time", "no draft again", "answers by route", "serves in the end"],
                loads,
            ),
            *_when({name: run}),
        ]
    return lines


def _changed(moved: dict[str, Any]) -> str:
    costs = ", ".join(f"{kind} {cost:.2f}" for kind, cost in moved["costs"].items())
    off = (
        f"no draft serves after {moved['off_after']}" if moved["off_after"] else f"{moved['serves']} serves in the end"
    )
    return (
        f"After {moved['calm']} usual prompts {moved['served']} serves one request at a time; on others it takes of no "
        f"draft's time: {costs}. Then come {moved['requests']} of the kind on which it costs most, {moved['content']}: "
        f"{off}, and all of them take {moved['ratio']:.2f}."
    )


def _mixed(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        body = [
            [
                row["class"],
                *("" if part is None else f"{part:.2f}" for part in row["learning"]),
                f"{row['best']}: {row['ratios'][row['best']]:.2f}",
                f"{row['ratios']['auto']:.2f}",
                f"**{_surely(row['against'])}**{_repeated(row)}",
                _several(row["routes"]),
            ]
            for row in run["classes"]
        ]
        quarter = run["learned"] // len(run["classes"][0]["learning"])
        lines += [
            f"*Two classes by turns on {name}* (decisions 103, 107 and 155), one request at a time, answers of up to "
            f"{run['tokens']} tokens, choosing among {', '.join(run['settings'])}: {run['learned']} requests of each "
            f"to learn from, then {run['classes'][0]['requests']} prompts{_so_often(run)}",
            "of each that every setting answers too, in turns. Times are ratios of the processor's seconds of whole "
            "answers, prompts included: what learning took, by its quarters, over the best setting; the best setting "
            "over no draft; and what was",
            "learned, over no draft and over the best setting.",
            "",
            *table(
                [
                    f"{name}, class",
                    *(f"{quarter * k + 1} to {quarter * (k + 1)}" for k in range(len(run["classes"][0]["learning"]))),
                    "best setting",
                    "learned",
                    "against the best",
                    "answers by route",
                ],
                body,
            ),
            *_when({name: run}),
        ]
    return lines


def _so_often(run: dict[str, Any]) -> str:
    many = run["repeats"]
    return f" ({many} times, each from nothing; intervals are over these)" if many > 1 else ""


def _several(routes: dict[str, int]) -> str:
    ordered = sorted(routes.items(), key=lambda item: -item[1])
    return ", ".join(f"{route} {n}" for route, n in ordered)


def _rivals(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        numbers = list(next(iter(run["engines"].values())))
        body = [[engine, *(_cell(of[n]) for n in numbers), _equal(of)] for engine, of in run["engines"].items()]
        body += [[engine, f"left out: {why}", *[""] * len(numbers)] for engine, why in run["left_out"].items()]
        paces = ", ".join(f"{1e3 * row['seconds']:.1f} ms at {n}" for n, row in run["engines"]["Offramp fp32"].items())
        versions = ", ".join(sorted({f"{engine.split()[0]} {version}" for engine, version in run["versions"].items()}))
        lines += [
            f"*Engines side by side on {name}*: {run['rounds']} groups of each number of prompts at once, answers of "
            f"up to {run['tokens']} tokens, one thread each, in turns in one run ({versions}). Seconds are the "
            "processor's, of each engine's process. Time per token once all prompts are read, and in",
            "brackets tokens per second with the reading of prompts, both of Offramp's fp32 without a draft; medians "
            f"(it takes {paces}). *Equal*: answers that are the same tokens.",
            "Offramp computes the next tokens of answers without a draft in one pass where the kernels compute each as "
            "alone (decision 101), drafts with their verification one after the other, and has its weights in large "
            "pages (decision 102).",
            "",
            *table([f"engine ({name})", *(f"{n} at once" for n in numbers), "equal"], body),
            *_when({name: run}),
        ]
    return lines


def _cell(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['throughput']:.2f})" if row["ratio"] is not None else ""


def _equal(of: dict[str, Any]) -> str:
    return f"{sum(row['equal'] for row in of.values())} of {sum(row['answers'] for row in of.values())}"


def _exits(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        body = [
            [
                f"before layer {row['layers']} of {run['layers']}",
                f"{row['affine']:.2f}",
                f"{row['acceptance']:.2f}",
                f"{row['ratio']:.2f}",
                str(row["draft_tokens"]),
            ]
            for row in run["rows"]
        ]
        minutes = sum(row["train_seconds"] for row in run["rows"]) / 60
        lines += [
            f"*Exit drafts of {name}* (decision 100): heads of {run['words']:,} words trained for {minutes:.0f} min in "
            f"all on {run['places']:,} places of the model's own texts; accepted of {run['unseen_tokens']:,} unseen "
            "tokens; time per token by arithmetic on measured passes.",
            "",
            *table([f"draft ({name})", "affine alone", "accepted", "time per token", "at draft tokens"], body),
            *_when({name: run}),
        ]
    return lines


def _tokens(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        first = run["rows"][0]
        rules = [policy["name"] for policy in first["policies"] if policy["name"] != "exits-off"]
        body = [
            [row["loss"], percent(row["budget"], 0), *(_rule(p) for p in row["policies"] if p["name"] in rules)]
            for row in run["rows"]
        ]
        lines += [
            f"*Exits of single tokens on {name}*: rules of papers on recorded scores ({first['answers']} answers, "
            f"{first['tokens']:,} tokens, heads trained for {run['minutes']:.0f} min in all), calibrated at 95 % on "
            "one half of the answers: the threshold, what it saves",
            "on the other half (below zero: exits take longer than they save) and of how many calibrations, drawn from "
            "all answers, the loss over all of them exceeds the budget. An *answer* is lost where one of its tokens "
            "differs; *tokens* is the share that does.",
            "",
            *table([f"loss of ({name})", "budget", *rules], body),
            *_when({name: run}),
        ]
    return lines


def _rule(policy: dict[str, Any]) -> str:
    of = policy["draws"]
    if policy["threshold"] is None and not of["over_budget"]:
        return "off"
    threshold = "off" if policy["threshold"] is None else f"{policy['threshold']:.2f}"
    return f"{threshold}: {percent(policy['saving'])}, {of['over_budget']} of {of['count']}"


def _lossy(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        means = "; ".join(
            f"{output}: " + ", ".join(f"{variant} {percent(loss)}" for variant, loss in of.items())
            for output, of in run["mean_loss"].items()
        )
        body = [
            [
                row["output"],
                percent(row["budget"], 0),
                f"{row['certified']} of {row['draws']}",
                str(row["broken"]),
                f"{row['time']:.2f} ({row['answer_time']:.2f})" if row["certified"] else _none(row),
                row["usual_plan"],
                _escalation(row["escalation"]),
            ]
            for row in run["rows"]
        ]
        lines += [
            f"*What certifies on {name}*: {run['prompts']} prompts, answers of up to {run['tokens']} tokens; mean "
            f"loss {means}. {_whole(run)}{_matched(run)}Samples of {run['rows'][0]['labels']:,} audited answers are "
            "drawn with",
            "replacement, a plan is found and certified at 95 % on each; *over budget* counts those whose loss over "
            "all answers exceeds it. Times are those of tokens, and in brackets of whole answers, prompts included. "
            "*Best escalation*: a variant first and fp32 again",
            "where it is unsure, with the threshold of all that keeps the budget on these very answers in the shortest "
            "time: what no number of labels could beat.",
            "",
            *table(
                [f"output ({name})", "budget", "certified", "over budget", "time, median", "usual plan", BEST], body
            ),
            *_when({name: run}),
        ]
    return lines


def _none(row: dict[str, Any]) -> str:
    return f"cannot be told: {row['needed']:,} are needed" if 2 * row["untold"] > row["draws"] else "none certifies"


def _escalation(best: dict[str, Any]) -> str:
    if not best["variant"]:
        return "none is shorter"
    return f"{best['variant']}: loses {percent(best['loss'])}, {best['time']:.2f} ({best['answer_time']:.2f})"


def _matched(run: dict[str, Any]) -> str:
    """How many answers have what ExactAnswer compares; one that has it not counts as a whole."""
    if not run["matched"]:
        return ""
    shares = ", ".join(f"{variant} {percent(share, 0)}" for variant, share in run["matched"].items())
    return f"ExactAnswer compares what `{run['pattern']}` finds, in so many answers: {shares}. "


def _whole(run: dict[str, Any]) -> str:
    """What variants take of the reference's time for an answer, its prompt included."""
    took = run.get("answer_seconds") or {}
    shares = ", ".join(f"{name} {s / took['fp32']:.2f}" for name, s in took.items() if name != "fp32")
    return f"Time per answer, prompt included, of fp32's: {shares}. " if shares else ""


def _when(found: dict[str, Any]) -> list[str]:
    told = {words(row.get("measured")) for row in found.values()} - {""}
    return measured_line("; ".join(sorted(told)))
