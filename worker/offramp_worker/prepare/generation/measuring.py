"""What variants and drafts do on prompts: how often they agree, and how long they take. Rivals take turns, so that what
else the machine does meets all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp_worker.generate.audits import equality
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.graph import matrix_inputs
from offramp_worker.generate.seam import DecodingRoute, GenerationEngine, Sampling, Token
from offramp_worker.prepare.generation.checkpoint import FloatArray

PIECE = 64
AT_ONCE = (1, 2, 3, 4, 5, 8, 16)
LEAST_SECONDS = 0.2  # of measuring one number
PLAIN = Sampling()
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """One answer: its tokens, seconds from the first token to the last, and what was proposed and accepted."""

    tokens: list[Token]
    seconds: float
    proposed: int
    accepted: int


@dataclass(slots=True)
class Tally:
    """What a route did on all prompts. ``different`` answers differ from the reference's beyond ties."""

    seconds: float = 0.0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    ties: int = 0
    different: int = 0
    answers: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def token_seconds(self) -> float:
        return self.seconds / max(self.tokens, 1)


def written(
    engine: GenerationEngine, prompt: Sequence[int], *, most: int, route: DecodingRoute, sampling: Sampling = PLAIN
) -> Written:
    """A greedy answer. The first token, which the prompt's last piece gives, is in no time per token."""
    sequence = engine.start(prompt, max_tokens=most, sampling=sampling, route=route)
    tokens, proposed, accepted, began = list[Token](), 0, 0, 0.0
    while True:
        (one,) = engine.step([sequence], prompt_tokens=PIECE)
        if one.error:
            raise RuntimeError(one.error)
        if not tokens:
            began = time.perf_counter()
        tokens += one.tokens
        proposed, accepted = proposed + one.proposed, accepted + one.accepted
        if one.ended:
            return Written(tokens, time.perf_counter() - began, proposed, accepted)


def compare(
    engine: GenerationEngine,
    prompts: Sequence[Sequence[int]],
    routes: Sequence[DecodingRoute],
    *,
    most: int,
    advance: Advance,
) -> dict[DecodingRoute, Tally]:
    """Every route on every prompt, in turns; the reference first."""
    tallies = {route: Tally() for route in (DecodingRoute(), *routes)}
    for prompt in prompts:
        exact: list[Token] = []
        for route, tally in tallies.items():
            one = written(engine, prompt, most=most, route=route)
            exact = exact or one.tokens
            verdict = equality([t.id for t in one.tokens], exact)
            tally.seconds += one.seconds
            tally.tokens += len(one.tokens) - 1
            tally.proposed, tally.accepted = tally.proposed + one.proposed, tally.accepted + one.accepted
            tally.ties, tally.different = tally.ties + (verdict == "tie"), tally.different + (verdict == "different")
            tally.answers += 1
            advance(1)
    return tallies


def seconds_at_once(decoders: Mapping[str, Decoder], *, start: int, token: int) -> dict[str, dict[str, float]]:
    """Seconds of one pass by variant and by number of tokens computed at once, behind ``start`` tokens: the medians of
    rounds in turns."""
    caches = {name: Cache.of(d.architecture, start + max(AT_ONCE)) for name, d in decoders.items()}
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for name in decoders for n in AT_ONCE}
    for name, decoder in decoders.items():
        decoder.run(caches[name], [token] * start, start=0, rows=[])
    began = time.perf_counter()
    while time.perf_counter() - began < LEAST_SECONDS * len(taken) or len(taken[next(iter(taken))]) < 3:
        for (name, n), seconds in taken.items():
            before = time.perf_counter()
            decoders[name].run(caches[name], [token] * n, start=start, rows=range(n))
            seconds.append(time.perf_counter() - before)
    found: dict[str, dict[str, float]] = {name: {} for name in decoders}
    for (name, n), seconds in taken.items():
        found[name][str(n)] = float(np.median(seconds))
    return found


def importance(decoder: Decoder, texts: Sequence[Sequence[int]]) -> dict[str, FloatArray]:
    """By matrix the mean square of each of its inputs over these texts; ``decoder`` has taps."""
    sums: dict[str, Any] = {}
    for text in texts:
        cache = Cache.of(decoder.architecture, len(text))
        decoder.run(cache, text, start=0, rows=range(len(text)))
        read = cache.binding(decoder).tapped()
        for matrix, name in matrix_inputs(decoder.architecture).items():
            sums[matrix] = sums.get(matrix, 0.0) + np.square(read[name].astype(np.float64)).sum(axis=0)
    tokens = max(1, sum(map(len, texts)))
    return {name: (total / tokens).astype(np.float32) for name, total in sums.items()}


def agreement(decoder: Decoder, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Share of answers' tokens that a variant would write too behind the same text. ``texts`` are prompts with the
    reference's answers."""
    same = total = 0
    for prompt, answer in texts:
        text, rows = [*prompt, *answer[:-1]], range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        logits = decoder.run(Cache.of(decoder.architecture, len(text)), text, start=0, rows=rows)
        same += int((logits.argmax(axis=1) == np.array(answer)).sum())
        total += len(answer)
    return same / max(total, 1)
