"""Offramp's engine and others answer the same prompts in turns, several at once, in one run and on one thread each.

Seconds are the processor's, of each engine's process: on one thread they are what an idle machine would take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bench.generate.rivals.engines import RIVALS, Answering, Answers, EngineFailedError, Model, Rival, child_of
from bench.generate.writing import encoded, loaded, write
from bench.peers.environments import NotInstalledError, install
from offramp_worker.generate.llama.manifest import PROFILE_FILE
from offramp_worker.generate.routes import text_of
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, Loaded

AT_ONCE = (1, 2, 4, 8)
FIRST_TOKENS = 4  # whatever an engine does once is done with these
OURS = "Offramp"
EXACT = ("fp32", "f32")  # how engines call it
YARDSTICK = f"{OURS} {REFERENCE}"
LOGS = Path("build/generate/rivals/logs")


def compared(
    folder: Path,
    model: Model,
    prompts: Sequence[str],
    *,
    rounds: int,
    tokens: int,
    tick: Callable[[], None],
    exact: bool = False,
) -> dict[str, Any]:
    """Figures of each engine by how many prompts are asked at once, as ratios to Offramp's reference; and why an engine
    is left out. ``exact``: of float32 without drafts alone."""
    bundle = loaded(folder)
    routes = [DecodingRoute(v.name) for v in bundle.bundle.variants if v.name == REFERENCE or not exact]
    routes += [] if exact else best_draft(folder)
    ids = [encoded(bundle, prompt) for prompt in prompts]
    with ExitStack() as stack:
        stack.callback(bundle.engine.close)
        rivals = [rival for rival in RIVALS if rival.name.lower().endswith(EXACT) or not exact]
        engines = _own(bundle, routes, ids[:1])
        others, versions, left_out = _others(rivals, model, ids[:1], end=bundle.bundle.end_tokens, stack=stack)
        engines |= others
        found = in_turns(engines, ids, rounds=rounds, tokens=tokens, tick=tick)
    return {
        "rounds": rounds,
        "tokens": tokens,
        "versions": versions,
        "left_out": left_out,
        "engines": {name: figures(found, name) for name in engines},
    }


def best_draft(folder: Path) -> list[DecodingRoute]:
    """The reference with the draft that took least time when the bundle was prepared; none where it has no drafts."""
    drafts = json.loads((folder / PROFILE_FILE).read_text())["drafts"]
    found = [
        (of["time_ratio"], draft, int(length)) for draft, lengths in drafts.items() for length, of in lengths.items()
    ]
    return [DecodingRoute(REFERENCE, *min(found)[1:])] if found else []


def in_turns(
    engines: Mapping[str, Answering],
    prompts: Sequence[Sequence[int]],
    *,
    rounds: int,
    tokens: int,
    tick: Callable[[], None],
    at_once: Sequence[int] = AT_ONCE,
) -> dict[int, list[dict[str, Answers]]]:
    """Answers by how many prompts are asked at once, round and engine. Nobody is always first; prompts that are used up
    begin again."""
    names, found, next_prompt = list(engines), {n: list[dict[str, Answers]]() for n in at_once}, 0
    for k in range(rounds):
        for n in at_once:
            group = [prompts[(next_prompt + i) % len(prompts)] for i in range(n)]
            next_prompt += n
            each: dict[str, Answers] = {}
            for name in names[k % len(names) :] + names[: k % len(names)]:
                each[name] = engines[name](group, tokens)
                tick()
            found[n].append(each)
    return found


def figures(found: Mapping[int, Sequence[Mapping[str, Answers]]], name: str) -> dict[str, Any]:
    """Of one engine, by how many prompts were asked at once: medians over rounds of its time per token and of its
    tokens per second, prompts included, over those of Offramp's reference; and how many answers equal the
    reference's."""
    out: dict[str, Any] = {}
    for n, rounds in found.items():
        pairs = [(writing_seconds(r[name]), writing_seconds(r[YARDSTICK])) for r in rounds]
        rates = [(rate(r[name]), rate(r[YARDSTICK])) for r in rounds]
        known = [(own, base) for own, base in pairs if own is not None and base is not None]
        answers = [pair for r in rounds for pair in zip(r[name].tokens, r[YARDSTICK].tokens, strict=True)]
        out[str(n)] = {
            "seconds": _median([own for own, _ in known]),
            "ratio": _median([own / base for own, base in known]),
            "throughput": _median([own / base for own, base in rates if base]),
            "equal": sum(own == base for own, base in answers),
            "answers": len(answers),
        }
    return out


def writing_seconds(answers: Answers) -> float | None:
    """Seconds per token once every prompt of a group has been read, all answers together; None where nothing was
    written then."""
    last_prompt = max((times[0] for times in answers.times if times), default=0.0)
    written = [t for times in answers.times for t in times if t > last_prompt]
    return (max(written) - last_prompt) / len(written) if written else None


def rate(answers: Answers) -> float:
    """Tokens per second of a group, prompts included."""
    ended = max((times[-1] for times in answers.times if times), default=0.0)
    return sum(map(len, answers.tokens)) / ended if ended else 0.0


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _own(bundle: Loaded, routes: Sequence[DecodingRoute], first: Sequence[Sequence[int]]) -> dict[str, Answering]:
    """Offramp's, which have answered once."""
    engines: dict[str, Answering] = {f"{OURS} {text_of(route)}": _ours(bundle, route) for route in routes}
    for answer in engines.values():
        answer(first, FIRST_TOKENS)
    return engines


def _others(
    rivals: Sequence[Rival], model: Model, first: Sequence[Sequence[int]], *, end: Sequence[int], stack: ExitStack
) -> tuple[dict[str, Answering], dict[str, str], dict[str, str]]:
    """Engines that have answered once, their versions, and why some are left out."""
    engines, versions, left_out = dict[str, Answering](), dict[str, str](), dict[str, str]()
    for rival in rivals:
        try:
            install(rival.peer, onnxruntime=onnxruntime.__version__)
            child = child_of(rival, model, end=end, logs=LOGS)
            stack.callback(child.close)
            child(first, FIRST_TOKENS)
        except (NotInstalledError, EngineFailedError) as error:
            left_out[rival.name] = str(error)
            continue
        engines[rival.name], versions[rival.name] = child, child.version
    return engines, versions, left_out


def _ours(bundle: Loaded, route: DecodingRoute) -> Answering:
    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
        began = time.process_time()
        written, _ = write(bundle, prompts, route, tokens=tokens)
        tokens_of = [[t.id for t in a.tokens if t.id not in bundle.bundle.end_tokens] for a in written]
        return Answers(tokens_of, [[t - began for t in a.times] for a in written])

    return answer
