"""Command line of :mod:`bench.generate`."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.generate.auto import auto, mixed
from bench.generate.equality import equal_answers
from bench.generate.prepared import BUILD, mixed_prompts, model_of, prompts_of, smollm2_bundle, stories_bundle
from bench.generate.recorded import BUDGETS, certified, escalation, recorded_answers
from bench.generate.rivals.compared import AT_ONCE, compared
from bench.generate.rivals.engines import Model
from bench.generate.speed import paces
from bench.provenance import provenance
from offramp_core.generation.losses import Output
from offramp_worker.prepare.generation.sources import read_checkpoint

OUT = Path("build/bench/generate.json")
CALM = {"stories": ["stories"], "smollm2": ["gsm8k", "wikitext"]}
OTHERS = {"stories": ["noise", "code", "wikitext"], "smollm2": ["noise", "code", "xquad"]}
CLASSES = {  # of requests, and their prompts
    "stories": {"prose": "stories", "code": "code"},
    "smollm2": {"prose": "wikitext", "code": "code"},
}
BUNDLES = {"stories": stories_bundle, "smollm2": smollm2_bundle}
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"  # the last one: SmolLM2 ends three of eight answers with #### as it is shown
PATTERNS = {"gsm8k-shots": NUMBER, "sst2": r"(positive|negative)"}  # of what is compared in an answer
STOPS = {"gsm8k-shots": "\n\n"}  # before the next question


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.generate",
        description="figures of models that generate",
        epilog="examples: python -m bench.generate equality --model stories --n 10000\n          python -m "
        "bench.generate speed --model smollm2 --prompts gsm8k --n 12",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "part", choices=["equality", "speed", "auto", "mixed", "rivals", "lossy", "exits", "tokens", "prepare"]
    )
    parser.add_argument("--model", choices=list(BUNDLES), default="smollm2")
    parser.add_argument(
        "--prompts", choices=["gsm8k", "gsm8k-shots", "xquad", "wikitext", "stories", "sst2"], default=None
    )
    parser.add_argument("--n", type=int, default=16, help="prompts")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument("--side-by-side", type=int, default=1, help="speed: answers at a time")
    parser.add_argument("--rounds", type=int, default=4, help="rivals: groups of 1, 2, 4 and 8 prompts each")
    parser.add_argument("--exact", action="store_true", help="rivals: float32 without drafts alone")
    parser.add_argument("--no-drafts", action="store_true", help="speed: variants alone")
    parser.add_argument("--drafts", default="", help="auto: the only kind of drafts, such as ngram")
    parser.add_argument("--learn", type=int, default=64, help="mixed: requests of each class before they are compared")
    parser.add_argument("--repeats", type=int, default=1, help="mixed: of all that, each from nothing")
    parser.add_argument("--draws", type=int, default=200, help="lossy: samples to tune on")
    parser.add_argument(
        "--labels", type=int, default=0, help="lossy: answers of a sample; default: as many as there are prompts"
    )
    parser.add_argument("--minutes", type=float, default=10, help="exits, tokens: of training, all heads together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.part == "exits":
        return _exits(options)
    if options.part == "tokens":
        return _tokens(options)
    folder = BUNDLES[options.model]()
    if options.part == "prepare":
        print(folder)
        return 0
    data = options.prompts or ("stories" if options.model == "stories" else "gsm8k")
    key, found = _measured(options, folder, data)
    _keep(options.part, key, found)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(options.part, found)
    return 0


def _exits(options: argparse.Namespace) -> int:
    from bench.generate.exits import exit_drafts  # torch takes seconds to import

    held_out = mixed_prompts(options.model, 24, skip=0)
    train = mixed_prompts(options.model, options.n, skip=24)
    with Progress(disable=options.json) as progress:
        tasks = {what: progress.add_task(what, total=None) for what in ("texts", "heads")}
        found = exit_drafts(
            read_checkpoint(model_of(options.model)),
            train,
            held_out,
            tokens=options.tokens,
            minutes=options.minutes,
            tick=lambda what: progress.advance(tasks.get(what, tasks["heads"])),
        )
    _keep("exits", options.model, found)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print("exits", found)
    return 0


def _tokens(options: argparse.Namespace) -> int:
    from bench.generate.tokens import judged_tokens, recorded_tokens  # torch takes seconds to import

    train = mixed_prompts(options.model, 96, skip=0)
    with Progress(disable=options.json) as progress:
        tasks = {what: progress.add_task(what, total=None) for what in ("texts", "heads")}
        arrays = recorded_tokens(
            read_checkpoint(model_of(options.model)),
            train,
            mixed_prompts(options.model, options.n, skip=96),
            tokens=options.tokens,
            minutes=options.minutes,
            tick=lambda what: progress.advance(tasks.get(what, tasks["heads"])),
        )
    file = BUILD / f"tokens-{options.model}.npz"
    np.savez(file, **arrays)
    found = {"file": str(file), "minutes": options.minutes, "rows": judged_tokens(file, draws=options.draws)}
    _keep("tokens", options.model, found)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"offramp replay {file} --budget 0.05 --draws {options.draws}")
    return 0


def _measured(options: argparse.Namespace, folder: Path, data: str) -> tuple[str, dict[str, Any]]:
    prompts = prompts_of(data, options.n)
    key = f"{options.model}/{data}"
    with Progress(disable=options.json) as progress:
        if options.part == "equality":
            tick = _ticks(progress, "answers", len(prompts))
            return key, equal_answers(folder, prompts, tokens=options.tokens, tick=tick)
        if options.part == "speed":
            tick = _ticks(progress, "answers", None)
            found = paces(
                folder,
                prompts,
                tokens=options.tokens,
                side_by_side=options.side_by_side,
                tick=tick,
                drafts=not options.no_drafts,
            )
            return f"{key}/{options.side_by_side}", found
        if options.part == "auto":
            calm = [p for data in CALM[options.model] for p in prompts_of(data, options.n)]
            random.Random(0).shuffle(calm)
            name = f"{options.model}, {options.drafts} alone" if options.drafts else options.model
            return name, auto(
                folder,
                calm=calm,
                others={name: prompts_of(name, 400) for name in OTHERS[options.model]},
                n=options.n,
                tokens=options.tokens,
                tick=_ticks(progress, "requests", None),
                drafts=options.drafts,
            )
        if options.part == "mixed":
            many = options.repeats * (options.learn + options.n)
            asked = {of: prompts_of(data, many) for of, data in CLASSES[options.model].items()}
            tick = _ticks(progress, "requests", None)
            return options.model, mixed(
                folder,
                asked,
                learn=options.learn,
                n=options.n,
                repeats=options.repeats,
                tokens=options.tokens,
                tick=tick,
            )
        if options.part == "rivals":
            model = Model(read_checkpoint(model_of(options.model)), Path(model_of(options.model)))
            tick = _ticks(progress, "groups of answers", None)
            found = compared(
                folder,
                model,
                prompts,
                rounds=options.rounds,
                tokens=options.tokens,
                tick=tick,
                exact=options.exact,
            )
            return f"{key}, float32" if options.exact else key, found
        return key, _lossy(options, folder, data, progress)


def _lossy(options: argparse.Namespace, folder: Path, data: str, progress: Progress) -> dict[str, Any]:
    prompts = prompts_of(data, options.n)
    answers = recorded_answers(
        folder,
        prompts,
        tokens=options.tokens,
        tick=_ticks(progress, "prompts", len(prompts)),
        pattern=PATTERNS.get(data, ""),
        stop=STOPS.get(data, ""),
    )
    tick, rows = _ticks(progress, "settings", len(Output) * len(BUDGETS)), []
    for output in Output:
        for budget in BUDGETS:
            labels = options.labels or len(prompts)
            found = certified(answers, output, budget, labels=labels, draws=options.draws)
            rows.append({"output": output, **found, "escalation": escalation(answers, output, budget)})
            tick()
    return {
        "prompts": len(prompts),
        "tokens": options.tokens,
        "seconds": answers["seconds"],
        "answer_seconds": {v: float(np.median(took)) for v, took in answers["took"].items()},
        "pattern": PATTERNS.get(data, ""),
        "matched": answers["matched"],
        "mean_loss": {o: {v: sum(ls) / len(ls) for v, ls in of.items()} for o, of in answers["losses"].items()},
        "rows": rows,
    }


def _ticks(progress: Progress, what: str, total: int | None) -> Callable[[], None]:
    task = progress.add_task(what, total=total)
    return lambda: progress.advance(task)


def _keep(part: str, key: str, found: dict[str, Any]) -> None:
    """Beside what was measured before of other models and prompts."""
    kept = json.loads(OUT.read_text()) if OUT.is_file() else {}
    kept.setdefault(part, {})[key] = {**found, "measured": provenance()}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(kept, indent=1))


def _print(part: str, found: dict[str, Any]) -> None:
    console = Console()
    if part == "equality":
        console.print({k: v for k, v in found.items() if k != "by_route"})
        return
    if part in ("auto", "mixed"):
        console.print_json(data=found)
        return
    if part == "exits":
        table = Table("layers", "affine alone", "accepted", "time per token", "at draft tokens")
        for row in found["rows"]:
            table.add_row(
                f"{row['layers']} of {found['layers']}",
                f"{row['affine']:.2f}",
                f"{row['acceptance']:.2f}",
                f"{row['ratio']:.2f}",
                str(row["draft_tokens"]),
            )
        console.print(table)
        return
    if part == "rivals":
        console.print({"versions": found["versions"], "left out": found["left_out"]})
        table = Table("engine", *(f"{n} at once: time per token, tokens/s, equal" for n in AT_ONCE))
        for name, of in found["engines"].items():
            cells = [
                f"{row['ratio'] or math.nan:.2f} {row['throughput']:.2f} {row['equal']}/{row['answers']}"
                for row in of.values()
            ]
            table.add_row(name, *cells)
        console.print(table)
        return
    table = Table(
        *(
            ["route", "time per token", "acceptance"]
            if part == "speed"
            else ["output", "budget", "certified", "over budget", "time per token", "usual plan"]
        )
    )
    if part == "speed":
        for name, row in sorted(found["routes"].items(), key=lambda item: item[1]["ratio"]):
            taken = row["acceptance"]
            table.add_row(name, f"{row['ratio']:.3f}", "" if taken is None else f"{taken:.2f}")
    else:
        for row in found["rows"]:
            table.add_row(
                row["output"],
                f"{row['budget']:.0%}",
                f"{row['certified']} of {row['draws']}",
                str(row["broken"]),
                f"{row['time']:.2f}",
                row["usual_plan"],
            )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
