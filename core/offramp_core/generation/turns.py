"""Who computes next among answers that are being written and prompts that are being read.

Every answer that is being written takes a turn in each round. Beside them one prompt is read, in pieces, so that a long
prompt delays nobody's next token by more than a piece. Of several prompts the one with the least left goes first, less
what it has waited: a short one passes a long one, and none waits for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

SMALLEST_PIECE, LARGEST_PIECE = 16, 512
PROMPT_SHARE = 0.5  # of a round's time, where answers are being written
WAITED = 32  # tokens that a round of waiting is worth
PASSED_AT_MOST = 8  # times that a request which waits for room is passed by smaller ones


@dataclass(frozen=True, slots=True)
class PromptReading:
    """A prompt with ``left`` tokens to read, that has not had a turn for ``waited`` rounds."""

    number: int
    left: int
    waited: int


class Waits(Protocol):
    """A request that has not begun: the bytes its caches need, and how often it was passed."""

    passed: int

    @property
    def cache_bytes(self) -> int: ...


W = TypeVar("W", bound=Waits)


def next_prompt(prompts: Sequence[PromptReading]) -> int | None:
    """The number of the prompt whose turn it is; the earlier one of equals.

    A prompt with n tokens left waits at most about n / WAITED rounds longer than one that has just come with nothing
    left.

    Examples
    --------
    >>> next_prompt([Reading(1, 900, 0), Reading(2, 40, 0)]), next_prompt([Reading(1, 900, 30), Reading(2, 40, 0)])
    (2, 1)
    """
    if not prompts:
        return None
    return min(prompts, key=lambda p: p.left - WAITED * p.waited).number


def piece(*, writing_seconds: float, seconds_per_token: float) -> int:
    """How many tokens of a prompt are read in a round.

    As many as take ``PROMPT_SHARE`` of a round, where writing takes ``writing_seconds`` and one token of a prompt
    ``seconds_per_token`` (0: not known yet). All that fit the largest piece where nobody writes.
    """
    if writing_seconds <= 0 or seconds_per_token <= 0:
        return LARGEST_PIECE if writing_seconds <= 0 else SMALLEST_PIECE
    fits = writing_seconds * PROMPT_SHARE / (1 - PROMPT_SHARE) / seconds_per_token
    return max(SMALLEST_PIECE, min(LARGEST_PIECE, int(fits)))


def take_next(line: list[W], *, free_bytes: float) -> W | None:
    """Take the first request out of the line that fits, and count that it passed those before it. None where nobody
    fits, or one before it has been passed often enough: then all wait for room for that one."""
    for at, one in enumerate(line):
        if one.cache_bytes <= free_bytes:
            for i in range(at):
                line[i].passed += 1
            return line.pop(at)
        if one.passed >= PASSED_AT_MOST:
            return None
    return None
