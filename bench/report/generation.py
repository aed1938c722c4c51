"""Models that generate: equality, time per token, and what certifies."""

from __future__ import annotations

from typing import Any

from bench.provenance import words
from bench.report.results import Results, measured_line, percent, table


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
                f"{row['ratio']:.3f}",
                _several(row["routes"]),
                row["serves"],
            ]
            for row in run["loads"]
        ]
        moved = run["hostile"]
        off = f"no draft serves after {moved['off_after']} of them" if moved["off_after"] else "it stays"
        lines += [
            f"*Drafts chosen by measurement on {name}* (decisions 105 and 106): a worker's desk that chooses among "
            f"{', '.join(run['settings'])} against the same desk with one setting for all requests, answers of up to "
            f"{run['tokens']} tokens, in turns in one run; ratios of the",
            "processor's seconds of whole answers, prompts included. First from the first request on, against no "
            "draft:",
            "",
            *table([f"{name}, at once", "requests", "time", "answers by route", "serves in the end"], loads),
            f"After {run['requests']} usual prompts {moved['served']} serves one request at a time; then come "
            f"{moved['requests']} of random characters, for which it would take {moved['served_ratio']:.2f} of no "
            f"draft's time (every fourth was asked so): {off}, and all of them take {moved['ratio']:.2f}.",
            "",
            *_when({name: run}),
        ]
    return lines


def _mixed(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, run in found.items():
        body = [
            [
                row["class"],
                *("" if part is None else f"{part:.2f}" for part in row["learning"]),
                f"{row['best']}: {row['ratios'][row['best']]:.2f}",
                f"{row['ratios']['auto']:.2f}",
                f"**{row['against_best']:.2f}**",
                _several(row["routes"]),
            ]
            for row in run["classes"]
        ]
        quarter = run["learned"] // len(run["classes"][0]["learning"])
        lines += [
            f"*Two classes by turns on {name}* (decisions 103 and 107), one request at a time, answers of up to "
            f"{run['tokens']} tokens, choosing among {', '.join(run['settings'])}: {run['learned']} requests of each "
            f"to learn from, then {run['classes'][0]['requests']} prompts",
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
                f"{row['time']:.2f}" if row["certified"] else "none certifies",
                row["usual_plan"],
            ]
            for row in run["rows"]
        ]
        lines += [
            f"*What certifies on {name}*: {run['prompts']} prompts, answers of up to {run['tokens']} tokens; mean "
            f"loss {means}. {_whole(run)}Samples of {run['rows'][0]['labels']} audited answers are drawn with",
            "replacement, a plan is found and certified at 95 % on each; *over budget* counts those whose loss over "
            "all answers exceeds it.",
            "",
            *table(
                [f"output ({name})", "budget", "certified", "over budget", "time per token, median", "usual plan"], body
            ),
            *_when({name: run}),
        ]
    return lines


def _whole(run: dict[str, Any]) -> str:
    """What variants take of the reference's time for an answer, its prompt included."""
    took = run.get("answer_seconds") or {}
    shares = ", ".join(f"{name} {s / took['fp32']:.2f}" for name, s in took.items() if name != "fp32")
    return f"Time per answer, prompt included, of fp32's: {shares}. " if shares else ""


def _when(found: dict[str, Any]) -> list[str]:
    told = {words(row.get("measured")) for row in found.values()} - {""}
    return measured_line("; ".join(sorted(told)))
