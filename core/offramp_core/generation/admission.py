"""Which requests for generation are let in: what they ask for is bounded, and so is what waits.

Memory is promised at admission, so nothing has to be taken back later: caches of keys and values by what prompt and
answer may have in tokens, replies by what they may have in bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.turns import take_next

TOKEN_BYTES = 64  # of a reply, kept until its client has taken it
LOGPROB_BYTES = 256  # of one token with its log probability
MAX_RETRY_SECONDS = 60
FORECAST_SHARE = 0.8  # of the objective that a forecast may fill: it is a mean, and objectives are about the slowest
WEIGHT = 0.05  # of the newest measurement in a moving average


class Closed(StrEnum):
    """Why a request is turned away now; the value is the label of the metric."""

    QUEUE = "queue"
    WAIT = "wait"
    CACHES = "caches"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a label
    REPLIES = "replies"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Of one worker.

    ``waiting`` answers may wait for a turn, ``running`` are computed side by side, ``reply_bytes`` hold the replies of
    all that are open. ``patience_seconds`` is how long one may be expected to wait for its turn.
    ``first_token_seconds`` and ``token_seconds`` are the objective's times, None where it has none: who would see the
    first token later is turned away, and no more answers are written at once than keep the time per token.
    """

    waiting: int = 64
    running: int = 8
    reply_bytes: int = 64 * 2**20
    patience_seconds: float = 30.0
    first_token_seconds: float | None = None
    token_seconds: float | None = None

    def __post_init__(self) -> None:
        seconds = (self.patience_seconds, self.first_token_seconds, self.token_seconds)
        if min(self.waiting, self.running, self.reply_bytes) < 1 or not all(s is None or s > 0 for s in seconds):
            raise InvalidArgumentError(f"{self!r}: each limit must be positive")


@dataclass(frozen=True, slots=True)
class GenerationPace:
    """What computing takes on this machine of late: seconds per token of a prompt, to start reading one, per token of
    an answer, and how much of ``max_tokens`` answers use. Nothing is known at first, and nobody is refused for it."""

    reading: float = 0.0
    starting: float = 0.0
    writing: float = 0.0
    used: float = 1.0
    #: Moving averages over pieces of prompts: tokens, their square, seconds, and seconds times tokens.
    pieces: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)

    def read(self, tokens: int, seconds: float) -> GenerationPace:
        """After a piece of a prompt. The line of least squares through pieces of late: a piece of one token, or one
        whose beginning was computed for another prompt, says what a step takes, and little of what a token does."""
        newest = (tokens, tokens**2, seconds, seconds * tokens)
        mean, square, took, both = pieces = tuple(map(_moved, self.pieces, newest))
        ratio, variance = took / mean, square - mean**2
        slope = (both - took * mean) / variance if variance > 1e-6 * square else ratio
        reading = min(max(slope, 0.0), ratio)
        return replace(self, reading=reading, starting=took - reading * mean, pieces=pieces)

    def prompt_seconds(self, tokens: int) -> float:
        """What reading so many tokens takes."""
        return self.starting + tokens * self.reading if tokens else 0.0

    def wrote(self, tokens: int, seconds: float) -> GenerationPace:
        """After a round in which answers got so many tokens in all."""
        return replace(self, writing=_moved(self.writing, seconds / tokens))

    def ended(self, *, tokens: int, max_tokens: int) -> GenerationPace:
        """After an answer has ended by itself."""
        return replace(self, used=(1 - WEIGHT) * self.used + WEIGHT * tokens / max_tokens)

    def seconds(self, *, prompt: int, max_tokens: int) -> float:
        """What a request is expected to take of the engine that has so much of its prompt and its answer left."""
        return self.prompt_seconds(prompt) + self.used * max_tokens * self.writing


def side_by_side(limits: AdmissionLimits, pace: GenerationPace) -> int:
    """How many answers may have turns at once: as many as keep the objective's time per token, one at least.

    Examples
    --------
    >>> side_by_side(Limits(token_seconds=0.1), Pace(writing=0.03)), side_by_side(Limits(), Pace(writing=0.03))
    (3, 8)
    """
    if limits.token_seconds is None or pace.writing <= 0:
        return limits.running
    return max(1, int(min(limits.running, limits.token_seconds / pace.writing)))


@dataclass(slots=True)
class Work:
    """What an answer still needs: ``seconds`` of the engine, and ``cache_bytes`` until it has ended. ``passed``: how
    often others passed it in line."""

    seconds: float
    cache_bytes: int = 0
    passed: int = 0


class Wait(NamedTuple):
    """Seconds until a turn, and those of them in which the engine had a place and the caches no room."""

    seconds: float
    for_room: float


def until_turn(
    running: Sequence[Work],
    waiting: Sequence[Work],
    *,
    at_once: int,
    own_bytes: int = 0,
    free_bytes: float = math.inf,
    audit: Work | None = None,
) -> Wait:
    """How long one who comes now waits for a turn behind those who ``waiting`` has in their order, where ``at_once``
    answers share the engine evenly and :func:`~offramp_core.generation.turns.take_next` says who is next as one ends.

    Parameters
    ----------
    own_bytes : int
        Of its caches.
    free_bytes : float
        For caches, now.
    audit : Work, optional
        Has room in the caches, and the engine once nobody else runs; the little that it gets before is left out.

    Examples
    --------
    >>> long, short = Work(3.0, 500), Work(1.0, 100)
    >>> until_turn([long], [], at_once=2).seconds, until_turn([long, short], [], at_once=2).seconds
    (0.0, 2.0)
    >>> until_turn([long, short], [Work(9.0)], at_once=2).seconds
    6.0
    >>> until_turn([long, short], [Work(9.0, 500)], at_once=9, own_bytes=400, free_bytes=300)
    Wait(seconds=2.0, for_room=2.0)
    """
    # Everybody has had the same part of the engine, `each`, so who runs ends in the order of what is left at the start.
    ends, each, now, for_room = [(w.seconds, w.cache_bytes) for w in running], 0.0, 0.0, 0.0
    own = Work(0.0, own_bytes)
    line = [*(Work(w.seconds, w.cache_bytes, w.passed) for w in waiting), own]
    smallest = min(w.cache_bytes for w in line)  # of all, so that most looks at a long line are spared
    heapq.heapify(ends)
    while True:
        while len(ends) < at_once and free_bytes >= smallest and (begins := take_next(line, free_bytes=free_bytes)):
            if begins is own:
                return Wait(now, for_room)
            free_bytes -= begins.cache_bytes
            heapq.heappush(ends, (each + begins.seconds, begins.cache_bytes))
        lacks_room = len(ends) < at_once
        if ends:
            end, given_back = heapq.heappop(ends)
            took, each = (end - each) * (len(ends) + 1), end
        elif audit is not None:
            took, given_back, audit = audit.seconds, audit.cache_bytes, None
        else:
            return Wait(now, for_room)
        free_bytes += given_back
        now += took
        for_room += took if lacks_room else 0.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker has taken on; ``wait_seconds`` until one who comes now has a turn, ``reading_seconds`` from then
    until its prompt is read; ``caches_full`` where it waits for memory more than for the engine."""

    waiting: int = 0
    running: int = 0
    reply_bytes: int = 0
    wait_seconds: float = 0.0
    reading_seconds: float = 0.0
    caches_full: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A request comes at a bad time. ``retry_after_seconds`` is when there should be room, a whole number."""

    why: Closed
    message: str
    retry_after_seconds: int


def reply_bytes(*, max_tokens: int, logprobs: bool, top_logprobs: int) -> int:
    """What a reply may take until its client has it, by estimate."""
    return max_tokens * (TOKEN_BYTES + (LOGPROB_BYTES * (1 + top_logprobs) if logprobs else 0))


def admit(load: WorkerLoad, limits: AdmissionLimits, *, answers: int, reply: int) -> Refused | None:
    """None where a request for so many ``answers``, with a ``reply`` of so many bytes, is let in.

    One that finds nobody before it is always let in: what could never be served is refused where its fields are read.

    Examples
    --------
    >>> admit(Load(waiting=64, running=8), Limits(), answers=1, reply=0).why
    <Closed.QUEUE: 'queue'>
    """
    if load.waiting == 0 and load.running == 0 and load.reply_bytes == 0:
        return None
    after = max(1, min(MAX_RETRY_SECONDS, math.ceil(load.wait_seconds)))
    if load.waiting + answers > limits.waiting + max(0, limits.running - load.running):
        return Refused(Closed.QUEUE, f"{load.waiting} requests wait already; at most {limits.waiting} may", after)
    if load.wait_seconds > limits.patience_seconds:
        what = "room for its keys and values beside those of other answers" if load.caches_full else "its turn"
        message = (
            f"a request would wait {load.wait_seconds:.0f} s for {what}, longer than {limits.patience_seconds:g} s"
        )
        return Refused(Closed.CACHES if load.caches_full else Closed.WAIT, message, after)
    if (late := _late(load, limits)) is not None:
        return late
    if load.reply_bytes + reply > limits.reply_bytes:
        message = "replies that their clients have not taken yet fill the memory that there is for them"
        return Refused(Closed.REPLIES, f"{message}; ask for fewer tokens or log probabilities, or come again", after)
    return None


def _late(load: WorkerLoad, limits: AdmissionLimits) -> Refused | None:
    """Where the first token cannot be expected in time. Who is late by the length of its own prompt is not refused for
    that: it may join a line that is itself short, as nothing would be better for it later."""
    objective = limits.first_token_seconds
    if objective is None:
        return None
    allowed, own = FORECAST_SHARE * objective, load.reading_seconds
    room = allowed if own > objective else max(0.0, allowed - own)
    if load.wait_seconds <= room:
        return None
    seconds = load.wait_seconds + own
    message = f"the first token would take about {seconds:.2g} s, too close to the objective of {objective:g} s"
    after = max(1, min(MAX_RETRY_SECONDS, math.ceil(load.wait_seconds - room)))
    return Refused(Closed.FIRST_TOKEN, message, after)


def _moved(average: float, newest: float) -> float:
    return newest if average == 0 else (1 - WEIGHT) * average + WEIGHT * newest
