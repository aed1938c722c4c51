"""Which requests for generation are let in: what they ask for is bounded, and so is what waits.

Memory is promised at admission, so nothing has to be taken back later: caches of keys and values by what prompt and answer may have in tokens,
replies by what they may have in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from offramp_core.errors import InvalidArgumentError

TOKEN_BYTES = 64  # of a reply, kept until its client has taken it
LOGPROB_BYTES = 256  # of one token with its log probability
MAX_RETRY_SECONDS = 60


class Closed(StrEnum):
    """Why a request is turned away now; the value is the label of the metric."""

    QUEUE = "queue"
    WAIT = "wait"
    REPLIES = "replies"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker.

    ``waiting`` requests may wait for a turn, ``running`` are computed side by side, ``reply_bytes`` hold the replies of all that are open.
    ``patience_seconds`` is how long one may be expected to wait until its first token.
    """

    waiting: int = 64
    running: int = 8
    reply_bytes: int = 64 * 2**20
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.waiting, self.running, self.reply_bytes) < 1 or not self.patience_seconds > 0:
            raise InvalidArgumentError(f"{self!r}: each limit must be positive")


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has taken on. ``seconds_per_token`` of the engine, of late; 0 where it is not known."""

    waiting: int = 0
    running: int = 0
    reply_bytes: int = 0
    tokens_ahead: int = 0
    seconds_per_token: float = 0.0

    @property
    def wait_seconds(self) -> float:
        """When one who comes now is expected to begin."""
        return self.tokens_ahead * self.seconds_per_token


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
    """
    idle = load.waiting == 0 and load.running == 0 and load.reply_bytes == 0
    if idle:
        return None
    after = max(1, min(MAX_RETRY_SECONDS, math.ceil(load.wait_seconds)))
    if load.waiting + answers > limits.waiting + max(0, limits.running - load.running):
        return Refused(Closed.QUEUE, f"{load.waiting} requests wait already, of at most {limits.waiting}", after)
    if load.wait_seconds > limits.patience_seconds:
        message = f"a request would wait about {load.wait_seconds:.0f} s for its turn, more than {limits.patience_seconds:g} s"
        return Refused(Closed.WAIT, message, after)
    if load.reply_bytes + reply > limits.reply_bytes:
        message = "replies that clients have not taken yet fill the memory that there is for them"
        return Refused(Closed.REPLIES, f"{message}; ask for fewer tokens or log probabilities, or come again", after)
    return None
