"""How many requests will come by the time a worker that is started now answers: a pure function of counts and time.

What lasts is told from what is noise by how far the newest windows stand from those before. Beside the recent past
stands what came at the same time of earlier days, and how far demand rose in the same minutes of earlier hours: much of
what machines ask for comes by the clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from offramp_core.errors import InvalidArgumentError

RECENT = 10  # windows whose mean is the level
NEWEST = ((1, 0.30), (3, 0.15))  # windows, and by what fraction their mean must be off to be the level at once
DEVIATIONS = 4.0  # of chance arrivals, which they must be off by as well
DAY_SECONDS, DAYS = 86400.0, 7
HOUR_SECONDS, HOURS = 3600.0, 24
OFTEN = 3  # of so many hours: a rise that came as often is expected
RISE = 1.30  # from which on it is one, and no noise
WARM = 0.01  # of the last hour's mean, which is expected of a service that is silent


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
    """The recent level, what usually comes in the next ``lead_seconds`` at this time of day, or the level with the rise
    that has to be expected; the largest of them.

    Parameters
    ----------
    history : sequence of Window
        In any order; those that end after ``now`` are not looked at. Of the last 24 hours, and of the same time of
        seven days, as far as there are any.
    lead_seconds : float
        From the decision to a worker's first answer; >= 0.

    Returns
    -------
    float
        Requests per second; 0 without history, and after an hour of silence. What usually comes is the median over up
        to seven earlier days of the highest window that overlaps the same seconds of that day: one special day moves
        nothing. A rise has to be expected where demand rose as far, from one lead to the next, three times in the last
        hour, or at this minute of three of the last 24.
    """
    if not 0 <= lead_seconds < math.inf:
        raise InvalidArgumentError(f"lead_seconds is {lead_seconds!r}; it must be a finite number >= 0")
    past = _Past(sorted((w for w in history if w.ended_at <= now), key=lambda w: w.ended_at))
    step = max(lead_seconds, past.window_seconds)
    lately = [now - i * step for i in range(1, int(HOUR_SECONDS / step) + 1)]
    by_the_clock = [now - hour * HOUR_SECONDS for hour in range(1, HOURS + 1)]
    level = past.level(now)
    by_now, by_clock = past.rises(lately, step), past.rises(by_the_clock, lead_seconds)
    clock = min(level * often(f for f, _ in by_clock), often(rate for _, rate in by_clock))
    risen = max(often(rate for _, rate in by_now), clock, past.onward(lead_seconds))
    usual = [past.highest(now - day * DAY_SECONDS, lead_seconds) for day in range(1, DAYS + 1)]
    days = [rate for rate in usual if rate is not None]
    return max(level, risen, median(days) if days else 0.0, WARM * past.mean(now - HOUR_SECONDS))


class _Past:
    """Windows by when they ended, with sums so that a level takes no loop."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows, self._ends = windows, [w.ended_at for w in windows]
        self._rates = [0.0, *accumulate(w.rate for w in windows)]
        self._seconds = [0.0, *accumulate(w.seconds for w in windows)]

    @property
    def window_seconds(self) -> float:
        """Of the newest window; a minute without any."""
        return self._windows[-1].seconds if self._windows else 60.0

    def level(self, moment: float) -> float:
        """What lasts, as the windows that had ended by then tell."""
        end = bisect_right(self._ends, moment)
        begin = max(end - RECENT, 0)
        for count, fraction in NEWEST:
            cut = end - count
            if cut <= begin:
                continue
            before, after = self._mean(begin, cut), self._mean(cut, end)
            chance = DEVIATIONS * math.sqrt(before / (self._seconds[end] - self._seconds[cut]))
            if abs(after - before) > max(fraction * before, chance):
                return after
        return self._mean(begin, end) if end > begin else 0.0

    def _mean(self, begin: int, end: int) -> float:
        return max(self._rates[end] - self._rates[begin], 0.0) / (end - begin)

    def highest(self, moment: float, seconds: float) -> float | None:
        """The highest window that overlaps the seconds after a moment."""
        found = None
        for i in range(bisect_right(self._ends, moment), len(self._windows)):
            window = self._windows[i]
            if window.ended_at - window.seconds >= moment + seconds:
                break
            found = window.rate if found is None else max(found, window.rate)
        return found

    def mean(self, moment: float) -> float:
        """Of the windows that ended after a moment."""
        begin, end = bisect_right(self._ends, moment), len(self._ends)
        return self._mean(begin, end) if end > begin else 0.0

    def onward(self, seconds: float) -> float:
        """Where demand that jumps comes to if it goes on so, and no further than it ever came."""
        if len(self._windows) < 2:
            return 0.0
        before, newest = self._windows[-2], self._windows[-1]
        if self.level(newest.ended_at) != newest.rate or newest.rate <= RISE * before.rate:
            return 0.0
        on = newest.rate + (newest.rate - before.rate) * seconds / newest.seconds
        return min(on, max(w.rate for w in self._windows))

    def rises(self, moments: Iterable[float], seconds: float) -> list[tuple[float, float]]:
        """How many times the level before each moment the highest window after it was, and that window's rate, of
        those where demand rose."""
        return [rise for rise in (self._rise(moment, seconds) for moment in moments) if rise is not None]

    def _rise(self, moment: float, seconds: float) -> tuple[float, float] | None:
        """None where it did not, where that may have been chance, and where nobody knows."""
        end = bisect_right(self._ends, moment)
        after = self.highest(moment, seconds)
        if after is None or end == 0 or self._ends[end - 1] < moment - 2 * self._windows[end - 1].seconds:
            return None
        level = self.level(moment)
        chance = DEVIATIONS * math.sqrt(level / self._windows[end - 1].seconds)
        return (after / level, after) if level > 0 and after > max(RISE * level, level + chance) else None


def often(values: Iterable[float]) -> float:
    """What was reached as often as has to be expected; 0 where nothing was."""
    found = sorted(values, reverse=True)
    return found[OFTEN - 1] if len(found) >= OFTEN else 0.0
