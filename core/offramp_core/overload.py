"""When a worker answers by its thresholds for overload: a pure value of its own queue and of what batches took here.

It begins when a request that may have the larger budget would itself have to wait nearly as long as the door admits, so
before it is refused, and no operator has to hear of it first. It is for requests no more urgent than those that had to
wait. While it lasts, the queue empties faster than requests come; an empty queue therefore
says nothing. It ends when the work that comes would leave everybody's plan room to spare, by what batches of that plan
took, and the queue is short. What they took may be out of date: after :data:`LONGEST_SECONDS` everybody's plan is tried
anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offramp_core.admission import SURGE, WEIGHT, Pace

NEARLY = 0.8  # of what a request may wait: overload begins
SHORT = 0.4  # of the same: the queue is short
SPARE_LOAD = 0.75  # of the engine's time under everybody's plan: it has room to spare
LEAST_SECONDS = 1.0  # overload lasts
LONGEST_SECONDS = 30.0  # without another look at what everybody's plan takes
MEMORY_SECONDS = 1.0  # after which the work that came counts a third
FITS = 0.2  # of what the line expects of a batch: the mean error up to which it says what batches take
MOST_ERROR = 0.5  # of the same: what one batch counts at most, however long a stall was


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of batches by their rows, fitted to the newest ones by least squares: most of what a batch takes that
    nearly everybody leaves early may be its own, and not its rows'. ``rows`` and ``seconds`` are means, and so is
    ``error``, how far batches were from what it expected, as a fraction of that and :data:`MOST_ERROR` at most."""

    rows: float
    seconds: float
    variance: float
    covariance: float
    error: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it says what batches take. It does not where rows are of several sizes, as texts are: batches of
        long ones have fewer rows and take longer."""
        return self.error <= FITS

    @property
    def _each(self) -> float:
        return self.seconds / self.rows

    @property
    def _slope(self) -> float:
        """Where all had about as many rows, their time is the rows'."""
        return (self.covariance + self._each) / (self.variance + 1.0)

    @classmethod
    def through(cls, seconds: Sequence[float]) -> Line:
        """The smallest batch and the largest one, before any was measured."""
        half = (len(seconds) - 2) / 2
        rise = (seconds[-1] - seconds[1]) / 2
        return cls(1 + half, seconds[1] + rise, half**2, half * rise)

    def after(self, *, rows: int, seconds: float) -> Line:
        more, longer = rows - self.rows, seconds - self.seconds
        expected = self.predicted(rows)
        error = min(MOST_ERROR, abs(seconds - expected) / expected) if expected > 0 else MOST_ERROR
        return Line(
            self.rows + WEIGHT * more,
            self.seconds + WEIGHT * longer,
            (1 - WEIGHT) * (self.variance + WEIGHT * more**2),
            (1 - WEIGHT) * (self.covariance + WEIGHT * more * longer),
            self.error + WEIGHT * (error - self.error),
        )

    def predicted(self, rows: int) -> float:
        """Neither rows nor batches take less than nothing."""
        return self.seconds + min(self._each, max(0.0, self._slope)) * (rows - self.rows)


@dataclass(frozen=True, slots=True)
class Overload:
    """``pace`` is what batches under the thresholds for overload take; it is measured, and before that nothing is
    expected of them. ``since`` is when overload began or ended last."""

    pace: Pace
    #: By the rows of batches alone, and by a line; ``pace`` is by the line where that fits.
    by_rows: Pace | None = None
    line: Line | None = None
    on: bool = False
    since: float = -math.inf
    #: Engine seconds of everybody's plan that the requests of the last second or so would take, at the time ``at``.
    work: float = 0.0
    at: float = 0.0
    #: The most urgent priority that had to wait; lower numbers are more urgent.
    priority: int = 1

    def came(self, seconds: float, *, now: float) -> Overload:
        """A request came that everybody's plan would take so long for."""
        return replace(self, work=self.load(now) * MEMORY_SECONDS + seconds, at=now)

    def load(self, now: float) -> float:
        """Share of the engine's time that what comes would take under everybody's plan; above 1 it cannot."""
        return self.work / MEMORY_SECONDS * math.exp(-max(0.0, now - self.at) / MEMORY_SECONDS)

    def asked(self, *, wait: float, room: float, priority: int, now: float) -> Overload:
        """A request that may have the larger budget would ``wait`` so long by the worst case of everybody's plan, of
        the ``room`` that the door gives an ordinary one; where that is none, any wait is too long."""
        if wait <= 0 or wait < NEARLY * room:
            return self
        if not self.on:
            return replace(self, on=True, since=now, priority=priority)
        return replace(self, priority=min(self.priority, priority))

    def judged(self, *, wait: float, room: float, now: float) -> Overload:
        """After a look at the queue: a request of its ``priority`` would ``wait`` so long of the same ``room``."""
        lasted = now - self.since
        if not self.on or lasted < LEAST_SECONDS or (wait > 0 and wait >= SHORT * room):
            return self
        if self.load(now) >= SPARE_LOAD and lasted < LONGEST_SECONDS:
            return self
        return replace(self, on=False, since=now)

    def after(self, *, rows: int, seconds: float) -> Overload:
        """Once a batch of ``rows`` rows under the thresholds for overload kept the engine for ``seconds``."""
        taken = min(seconds, SURGE * self.pace.seconds[rows])
        by_rows = (self.by_rows or self.pace).after(rows=rows, seconds=taken)
        line = (self.line or Line.through(self.pace.seconds)).after(rows=rows, seconds=taken)
        fitted = (0.0, *(line.predicted(n) for n in range(1, len(self.pace.seconds))))
        return replace(self, by_rows=by_rows, line=line, pace=Pace(fitted, least=0.0) if line.fits else by_rows)
