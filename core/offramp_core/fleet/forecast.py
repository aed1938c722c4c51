"""How many requests will come by the time a worker that is started now answers: a pure function of counts and time.

What lasts is told from what is noise by how far the newest windows stand from those before. Beside the recent past
stands what came at the same time of earlier days.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from offramp_core.errors import InvalidArgumentError

RECENT = 10  # windows whose mean is the level
NEWEST = ((1, 0.30), (3, 0.15))  # windows, and by what fraction their mean must be off to be the level at once
DEVIATIONS = 4.0  # of chance arrivals, which they must be off by as well
DAY_SECONDS, DAYS = 86400.0, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests per second in the seconds up to ``ended_at``."""

    ended_at: float
    seconds: float
    rate: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.ended_at):
            raise InvalidArgumentError(f"Window.ended_at is {self.ended_at!r}; it must be a finite number")
        if not 0 < self.seconds < math.inf:
            raise InvalidArgumentError(f"Window.seconds is {self.seconds!r}; it must be a finite number > 0")
        if not 0 <= self.rate < math.inf:
            raise InvalidArgumentError(f"Window.rate is {self.rate!r}; it must be a finite number >= 0")


def predicted_rate(history: Sequence[Window], *, now: float, lead_seconds: float) -> float:
    """The larger of the recent level and what usually comes in the next ``lead_seconds`` at this time of day.

    Parameters
    ----------
    history : sequence of Window
        In any order; those that end after ``now`` are not looked at.
    lead_seconds : float
        From the decision to a worker's first answer; >= 0.

    Returns
    -------
    float
        Requests per second; 0 without history. What usually comes is the median over up to seven earlier days of the
        highest window that overlaps the same seconds of that day: one special day moves nothing.
    """
    if not 0 <= lead_seconds < math.inf:
        raise InvalidArgumentError(f"lead_seconds is {lead_seconds!r}; it must be a finite number >= 0")
    past = sorted((w for w in history if w.ended_at <= now), key=lambda w: w.ended_at)
    return max(_level(past[-RECENT:]), _usual(past, now=now, lead_seconds=lead_seconds))


def _level(recent: Sequence[Window]) -> float:
    for count, fraction in NEWEST:
        older, newer = recent[:-count], recent[-count:]
        if not older or not newer:
            continue
        before, after = fmean(w.rate for w in older), fmean(w.rate for w in newer)
        chance = DEVIATIONS * math.sqrt(before / sum(w.seconds for w in newer))
        if abs(after - before) > max(fraction * before, chance):
            return after
    return fmean(w.rate for w in recent) if recent else 0.0


def _usual(past: Sequence[Window], *, now: float, lead_seconds: float) -> float:
    days = []
    for day in range(1, DAYS + 1):
        begin = now - day * DAY_SECONDS
        same = [w.rate for w in past if w.ended_at > begin and w.ended_at - w.seconds < begin + lead_seconds]
        if same:
            days.append(max(same))
    return median(days) if days else 0.0
