"""Answers of an engine, several at a time, and what they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offramp_worker.generate.load import load_generation
from offramp_worker.generate.seam import DecodingRoute, Loaded, Sampling, Token

CACHE_BYTES = 2**30


@dataclass(slots=True)
class Written:
    """One answer: its tokens, the processor's seconds of this process when each was there, and seconds of the engine
    behind its prompt. ``proposed`` tokens of a draft were verified, ``accepted`` kept."""

    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    proposed: int = 0
    accepted: int = 0

    def add(self, tokens: Sequence[Token]) -> None:
        """What is there now."""
        self.tokens += tokens
        self.times += [time.process_time()] * len(tokens)


def loaded(folder: Path) -> Loaded:
    """A bundle on one thread."""
    return load_generation(folder, threads=1, cache_bytes=CACHE_BYTES)


def encoded(bundle: Loaded, prompt: str) -> list[int]:
    """Tokens of a prompt as a worker reads it."""
    return [*bundle.bundle.begin_tokens, *bundle.tokenizer.encode(prompt)]


def text_of(bundle: Loaded, tokens: Sequence[Token]) -> str:
    """An answer as a client sees it."""
    decoder = bundle.tokenizer.decoder()
    ends = bundle.bundle.end_tokens
    return "".join(decoder.add(t.id) for t in tokens if t.id not in ends) + decoder.finish()


def write(
    bundle: Loaded,
    prompts: Sequence[Sequence[int]],
    route: DecodingRoute,
    *,
    tokens: int,
    sampling: Sampling | None = None,
    stop: str = "",
) -> tuple[list[Written], float]:
    """Answers to prompts that are computed side by side, each until it has the text ``stop`` where one is given, and
    the processor's seconds of this process from the last prompt read to the last token.

    The engine computes prompts one after the other and then takes turns, so that the time is of writing alone.
    """
    engine, chosen = bundle.engine, sampling or Sampling()
    answers = {engine.start(p, max_tokens=tokens, sampling=chosen, route=route): Written() for p in prompts}
    left = {number: True for number in answers}  # whose prompt is still read
    for number in list(answers):
        while left[number]:
            (progress,) = engine.step([number], prompt_tokens=512)
            if progress.error:
                raise RuntimeError(progress.error)
            left[number] = not progress.tokens and bool(progress.prompt_left)
            answers[number].add(progress.tokens)
            if progress.ended:
                left[number] = False
    running = [n for n, answer in answers.items() if not _ended(answer, tokens, bundle)]
    began = time.process_time()
    while running:
        for progress in engine.step(running, prompt_tokens=512):
            answer = answers[progress.sequence]
            answer.add(progress.tokens)
            answer.proposed += progress.proposed
            answer.accepted += progress.accepted
            answer.seconds += progress.seconds
            stopped = bool(stop) and stop in text_of(bundle, answer.tokens)
            if stopped and not progress.ended:
                engine.cancel(progress.sequence)
            if stopped or progress.ended:
                running.remove(progress.sequence)
    return list(answers.values()), time.process_time() - began


def _ended(answer: Written, tokens: int, bundle: Loaded) -> bool:
    return len(answer.tokens) >= tokens or bool(answer.tokens and answer.tokens[-1].id in bundle.bundle.end_tokens)
