"""Answers of several processes of vLLM's, as one engine: a route's variant says which process writes.

vLLM batches by itself, so every sequence is asked for when it starts, and a step only collects what has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.occupancy import EvenShares, Growth, measured, part_of_full
from offramp_worker.generate.seam import (
    REFERENCE,
    AwayError,
    CacheMemory,
    DecodingRoute,
    GenerationBundle,
    NoRoomError,
    Sampling,
    SequenceProgress,
    Token,
)
from offramp_worker.generate.vllm.process import VllmProcess
from offramp_worker.generate.vllm.stream import AnswerStream, body_of

STEP_SECONDS = 1.0  # a step waits so long at most for something to come
PROBE_SECONDS = 30.0


@dataclass(slots=True)
class _Sequence:
    process: VllmProcess
    stream: AnswerStream
    cache_bytes: int
    prompt: int
    #: When it began, when its time was counted last, and when all of it had come.
    began: EvenShares
    counted: EvenShares
    whole: EvenShares | None = None
    tokens: int = 0


class VllmEngine:
    """See :class:`offramp_worker.generate.seam.GenerationEngine`."""

    def __init__(
        self,
        bundle: GenerationBundle,
        processes: Mapping[str, VllmProcess],
        *,
        cache_bytes: int,
        running: int,
        closed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``processes`` by variant, all started; each has caches of ``cache_bytes``. ``running`` answers are computed
        side by side at most, by all of them together. ``closed`` is called at the end."""
        self._bundle, self._processes, self._cache_bytes, self._closed = bundle, dict(processes), cache_bytes, closed
        self._running, self._clock = running, clock
        self._shares = EvenShares(at=clock())
        self._growth: dict[str, Growth] = {}  # of seconds per token with how many are written, of each process
        self._changed = threading.Condition()
        self._arrivals = self._seen = 0
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = 0

    @property
    def bundle(self) -> GenerationBundle:
        return self._bundle

    @property
    def version(self) -> str:
        """Of vLLM, as it says itself."""
        return self._processes[REFERENCE].version

    def cache_bytes(self, tokens: int, *, route: DecodingRoute) -> int:  # noqa: ARG002 - drafts keep theirs apart
        return tokens * self._bundle.cache_bytes_per_token

    def memory(self) -> CacheMemory:
        """Of the process whose caches are the fullest."""
        by_process = dict.fromkeys(self._processes, 0)
        for sequence in tuple(self._sequences.values()):
            by_process[sequence.process.name] += sequence.cache_bytes
        return CacheMemory(max(by_process.values()), self._cache_bytes)

    def fault(self) -> str:
        return self._processes[REFERENCE].trouble

    def available(self, variant: str) -> bool:
        process = self._processes.get(variant)
        return process is not None and process.up

    def wake(self) -> None:
        with self._changed:
            self._arrivals += 1
            self._changed.notify_all()

    def start(self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling, route: DecodingRoute) -> int:
        process = self._processes.get(route.variant)
        if process is None or route.draft:
            raise InvalidArgumentError(
                f"the route names {route.variant!r} with draft {route.draft!r}; a bundle for vLLM has configurations "
                f"{', '.join(self._processes)}, drafts are parts of these"
            )
        if not all(0 <= token < self._bundle.vocabulary for token in prompt):
            raise InvalidArgumentError("prompt: a token is outside of the vocabulary")
        needs = self.cache_bytes(len(prompt) + max_tokens, route=route)
        used = sum(s.cache_bytes for s in self._sequences.values() if s.process is process)
        if not process.up:
            raise AwayError(process.trouble or f"{process.name} is starting")
        if used + needs > self._cache_bytes:
            raise NoRoomError(f"caches of {route.variant} have {self._cache_bytes - used} bytes left of {needs}")
        most = min(max_tokens, self._bundle.context_length - len(prompt))
        body = body_of(prompt, max_tokens=most, sampling=sampling, end_tokens=self._bundle.end_tokens)
        self._numbers += 1
        self._shares = self._shares.changed(by=1, now=self._clock())
        stream = AnswerStream(process.at, body, top=sampling.top_logprobs, arrived=self.wake)
        self._sequences[self._numbers] = _Sequence(process, stream, needs, len(prompt), self._shares, self._shares)
        return self._numbers

    def step(self, sequences: Sequence[int], *, prompt_tokens: int) -> list[SequenceProgress]:  # noqa: ARG002
        """vLLM reads prompts by itself: none is left after the first step."""
        known = [self._sequences[number] for number in sequences]
        if not any(one.prompt for one in known):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._arrivals != self._seen or any(one.stream.has_news for one in known), STEP_SECONDS
                )
                self._seen = self._arrivals
        self._note_ends()
        return [self._progress(number, one) for number, one in zip(sequences, known, strict=True)]

    def _progress(self, number: int, one: _Sequence) -> SequenceProgress:
        tokens, ended, error = one.stream.take()
        one.prompt = 0
        one.tokens += len(tokens)
        seconds, busy = self._times(one)
        proposed = accepted = 0
        if ended:
            proposed, accepted = one.process.take_drafts()
            self._gone(number)
        error = self._blamed(one, tokens, error)
        return SequenceProgress(
            number,
            tokens,
            ended=ended,
            proposed=proposed,
            accepted=accepted,
            summed=True,
            error=error,
            seconds=seconds,
            busy=busy,
        )

    def _note_ends(self) -> None:
        """An answer that is whole takes nothing any more, whenever somebody collects it."""
        for one in self._sequences.values():
            if one.whole is None and one.stream.ended:
                one.whole = self._shares = self._shares.changed(by=-1, now=self._clock())

    def _times(self, one: _Sequence) -> tuple[float, float]:
        """The seconds since it was counted last, and what it took of the engine in them."""
        before, now = one.counted, one.whole or self._shares.until(self._clock())
        one.counted = now
        seconds, even = max(now.at - before.at, 1e-9), max(now.each - before.each, 1e-9)
        most = max(1.0, min(self._running, self._cache_bytes / max(1, one.cache_bytes)))
        return seconds, even * part_of_full(self._growth.get(one.process.name), beside=seconds / even, most=most)

    def _gone(self, number: int) -> _Sequence | None:
        """It takes nothing any more; what its tokens took is learned."""
        one = self._sequences.pop(number, None)
        if one is None:
            return None
        if one.whole is None:
            one.whole = self._shares = self._shares.changed(by=-1, now=self._clock())
        seconds, even = one.whole.at - one.began.at, one.whole.each - one.began.each
        if one.tokens and even > 0:
            name = one.process.name
            self._growth[name] = measured(self._growth.get(name), beside=seconds / even, seconds=seconds / one.tokens)
        return one

    def _blamed(self, one: _Sequence, tokens: Sequence[Token], error: str) -> str:
        """Why an answer could not go on, if so."""
        if not error and any(not 0 <= t.id < self._bundle.vocabulary for t in tokens):
            return f"{one.process.name} wrote a token outside of the vocabulary"
        return error and f"{one.process.name}: {error}"

    def cancel(self, sequence: int) -> None:
        one = self._gone(sequence)
        if one is not None:
            one.stream.cancel()

    def probe(self) -> None:
        reference = self._processes[REFERENCE]
        status, _ = reference.ask("/health", seconds=PROBE_SECONDS)
        if status != 200 or not reference.up:
            raise RuntimeError(reference.trouble or f"vLLM's /health answered {status}")

    def close(self) -> None:
        for number in tuple(self._sequences):
            self.cancel(number)
        for process in self._processes.values():
            process.let_go()
        for process in self._processes.values():
            process.close()
        self._closed()
