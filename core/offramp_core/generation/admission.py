"""Which requests for generation are let in: what they ask for is bounded, and so is what waits.

Memory is promised at admission, so nothing has to be taken back later: caches of keys and values by what prompt and
answer may have in tokens, replies by what they may have in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from offramp_core.errors import InvalidArgumentError

TOKEN_BYTES = 64  # of a reply, kept until its client has taken it
LOGPROB_BYTES = 256  # of one token with its log probability
MAX_RETRY_SECONDS = 60
WEIGHT = 0.05  # of the newest measurement in a moving average


class Closed(StrEnum):
    """Why a request is turned away now; the value is the label of the metric."""

    QUEUE = "queue"
    WAIT = "wait"
    REPLIES = "replies"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker.

    ``waiting`` answers may wait for a turn, ``running`` are computed side by side, ``reply_bytes`` hold the replies of
    all that are open. ``patience_seconds`` is how long one may be expected to wait until its prompt is read.
    """

    waiting: int = 64
    running: int = 8
    reply_bytes: int = 64 * 2**20
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.waiting, self.running, self.reply_bytes) < 1 or not self.patience_seconds > 0:
            raise InvalidArgumentError(f"{self!r}: each limit must be positive")


@dataclass(frozen=True, slots=True)
class Pace:
    """What computing takes on this machine of late: seconds per token of a prompt, per token of an answer, and how much
    of ``max_tokens`` answers use. Nothing is known at first, and nobody is refused for it."""

    reading: float = 0.0
    writing: float = 0.0
    used: float = 1.0

    def read(self, tokens: int, seconds: float) -> Pace:
        """After a piece of a prompt."""
        return replace(self, reading=_moved(self.reading, seconds / tokens))

    def wrote(self, tokens: int, seconds: float) -> Pace:
        """After a round in which answers got so many tokens in all."""
        return replace(self, writing=_moved(self.writing, seconds / tokens))

    def ended(self, *, tokens: int, max_tokens: int) -> Pace:
        """After an answer has ended by itself."""
        return replace(self, used=(1 - WEIGHT) * self.used + WEIGHT * tokens / max_tokens)

    def seconds(self, *, prompt: int, max_tokens: int) -> float:
        """What a request is expected to take."""
        return prompt * self.reading + self.used * max_tokens * self.writing


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has taken on; ``wait_seconds`` until one who comes now has a turn."""

    waiting: int = 0
    running: int = 0
    reply_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A request comes at a bad time. ``retry_after_seconds`` is when there should be room, a whole number."""

    why: Closed
    message: str
    retry_after_seconds: int


def reply_bytes(*, max_tokens: int, logprobs: bool, top_logprobs: int) -> int:
    """What a reply may take until its client has it, by estimate."""
    return max_tokens * (TOKEN_BYTES + (LOGPROB_BYTES * (1 + top_logprobs) if logprobs else 0))


def admit(load: Load, limits: Limits, *, answers: int, reply: int) -> Refused | None:
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
        message = (
            f"a request would wait {load.wait_seconds:.0f} s for its turn, longer than {limits.patience_seconds:g} s"
        )
        return Refused(Closed.WAIT, message, after)
    if load.reply_bytes + reply > limits.reply_bytes:
        message = "replies that their clients have not taken yet fill the memory that there is for them"
        return Refused(Closed.REPLIES, f"{message}; ask for fewer tokens or log probabilities, or come again", after)
    return None


def _moved(average: float, newest: float) -> float:
    return newest if average == 0 else (1 - WEIGHT) * average + WEIGHT * newest
