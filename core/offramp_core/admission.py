"""Which requests can still be answered in time: one code for worker and simulator. Times are those of batches that
nobody leaves early.

So a promise made at admission holds whether or not exits fire; where they do, the queue drains faster and more is
admitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from offramp_core.errors import InvalidArgumentError

ENGINE_SHARE = 0.9  # of the objective; the rest is for receiving and replying
LARGEST_SHARE, SMALLEST_SHARE = 0.8, 0.1  # of the objective that a forecast may fill
LATE = 0.03  # of the requests admitted; objectives are about the slowest twentieth
GAIN = 0.01  # of that step, by request
LENIENT_WAIT = 10.0  # objectives that a forecast may fill while there is credit
LARGEST_CREDIT, EARNED = 200.0, 0.01  # requests; credit earned with each request answered
WEIGHT = 0.1  # of the newest batch in the moving average
PATIENCE_SECONDS = 10.0  # when a request without a deadline is due: late, but not after everything that comes with one
APART = 2.0  # objectives between stalls at least
SURGE = 4.0  # times the average; one stall must not close the door for long


@dataclass(frozen=True)
class Pace:
    """Seconds of batches on this machine now: a profile's, times a moving average of what batches took compared with
    it.

    The factor usually never falls below 1. Batches that rows leave early are shorter, and the next ones need not be.
    """

    #: By rows, 0 to the largest batch; see :func:`offramp_core.batching.exact_seconds`.
    profile_seconds: tuple[float, ...]
    #: Of the ratio of measured to profiled seconds.
    average: float = 1.0
    #: What the factor never falls below.
    least: float = 1.0

    def __post_init__(self) -> None:
        if len(self.profile_seconds) < 2 or not all(0 <= s < math.inf for s in self.profile_seconds):
            raise InvalidArgumentError("profile_seconds must hold finite seconds >= 0 for batches of 0, 1, ... rows")

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds of one batch, by rows."""
        factor = max(self.least, self.average)
        return tuple(factor * s for s in self.profile_seconds)

    def left(self, rows: int, *, began: float, now: float) -> float:
        """Seconds left of a batch of ``rows`` rows that began at ``began``; 0 when it should have ended."""
        return max(0.0, began + self.seconds[rows] - now)

    def queue(self, rows: int, *, batch_rows: int) -> float:
        """Seconds of ``rows`` rows in batches of ``batch_rows``."""
        whole, rest = divmod(rows, batch_rows)
        return whole * self.seconds[batch_rows] + self.seconds[rest]

    def after(self, *, rows: int, seconds: float) -> Pace:
        """The pace once a batch of ``rows`` rows took ``seconds``, everything included that happened before the next
        one could begin."""
        expected = self.profile_seconds[rows]
        if not expected > 0:
            return self
        ratio = min(seconds / expected, SURGE * max(1.0, self.average))
        return replace(self, average=self.average + WEIGHT * (ratio - self.average))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What awaits a request: seconds until its first row can run, and seconds its own rows take."""

    wait: float
    own: float

    @property
    def total(self) -> float:
        return self.wait + self.own


def forecast(pace: Pace, *, running: float, ahead: int, rows: int, batch_rows: int) -> Forecast:
    """For a request of ``rows`` rows with ``ahead`` rows before it in the queue and ``running`` seconds left of the
    batch that runs."""
    alone = pace.queue(rows, batch_rows=batch_rows)
    total = running + pace.queue(ahead + rows, batch_rows=batch_rows)
    return Forecast(max(0.0, total - alone), alone)


class Entry(Enum):
    """How a request comes in, if it does."""

    IN_TIME = "in time"
    ON_CREDIT = "on credit"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class QueueAdmission:
    """Who may join the queue: those for whom the forecast fits into a share of the latency objective, and a few for
    whom it does not.

    Forecasts are means, and the objective is about the slowest few; so the share follows what became of the requests
    admitted. It shrinks with every late one and grows back when fewer than ``LATE`` of them are late (a Robbins-Monro
    step towards that quantile).

    A late answer is worth more than a refusal as long as few are late. So there is a token bucket of requests that may
    join though they will be late: a stall, or a burst, spends some of it and nobody is refused; overload soon spends
    all of it, and then the share decides.
    """

    #: None admits everybody.
    objective_seconds: float | None
    pace: Pace
    #: Of the objective, from ``SMALLEST_SHARE`` to ``LARGEST_SHARE``.
    share: float = LARGEST_SHARE
    #: Requests that may still join late.
    credit: float = LARGEST_CREDIT
    #: When the last batch ended that took longer than the objective allows, and when the last one that was a stall did.
    long_until: float = -math.inf
    stalled_until: float = -math.inf

    def entry(self, seen: Forecast) -> Entry:
        """Whether a request may join. On an idle worker it always may.

        One that is too large to meet the objective by itself is not refused for its size: it may join a queue that is
        itself short.
        """
        objective = self.objective_seconds
        if objective is None or seen.wait <= self.room(seen.own):
            return Entry.IN_TIME
        return Entry.ON_CREDIT if self.credit > 0 and seen.wait <= LENIENT_WAIT * objective else Entry.REFUSED

    def room(self, own: float) -> float:
        """How long a request may wait that takes ``own`` seconds itself."""
        if self.objective_seconds is None:
            return math.inf
        allowed = self.share * self.objective_seconds
        return allowed if own > self.objective_seconds else max(0.0, allowed - own)

    def promises(self, entry: Entry, seen: Forecast) -> bool:
        """Whether a request that came in so should be answered in time: none on credit, and none too large for the
        objective."""
        return entry is Entry.IN_TIME and (self.objective_seconds is None or seen.own <= self.objective_seconds)

    def spent(self, rows: int) -> QueueAdmission:
        """The door once a request of ``rows`` rows joined on credit."""
        return replace(self, credit=self.credit - rows)

    def late(self, came: float, *, now: float) -> bool:
        """Whether a request that came then leaves the engine too late for the objective now. Of those that waited for a
        stall none counts: it holds up whoever is there, however few were let in."""
        return came > self.stalled_until and self._beyond(now - came)

    def stalled(self, seconds: float, *, now: float) -> QueueAdmission:
        """The door once a batch kept the engine for so long. Of two long ones soon after each other neither is a stall:
        the engine is slow, and fewer are to be let in."""
        if self.objective_seconds is None or not self._beyond(seconds):
            return self
        alone = now - seconds - self.long_until > APART * self.objective_seconds
        return replace(self, long_until=now, stalled_until=now if alone else -math.inf)

    def _beyond(self, seconds: float) -> bool:
        return self.objective_seconds is not None and seconds > ENGINE_SHARE * self.objective_seconds

    def after(self, *, rows: int, seconds: float, late: int) -> QueueAdmission:
        """The door once a batch of ``rows`` rows took ``seconds`` (see :meth:`Pace.after`).

        ``late`` of them were late at its end; those that joined on credit do not count.
        """
        step = math.exp(-GAIN * (late - LATE * rows))
        share = min(LARGEST_SHARE, max(SMALLEST_SHARE, self.share * max(0.5, step)))
        credit = min(LARGEST_CREDIT, self.credit + EARNED * rows)
        return replace(self, pace=self.pace.after(rows=rows, seconds=seconds), share=share, credit=credit)


def due_after(own_seconds: float, *, objective_seconds: float | None, wish_seconds: float = math.inf) -> float:
    """Seconds from admission within which a request should be answered; what is due first runs first.

    The earlier of what it asks for and the objective; a request too large for the objective has twice its own time
    instead, so that small ones go before it and it still gets its turn.
    """
    due = PATIENCE_SECONDS if objective_seconds is None else max(objective_seconds, 2 * own_seconds)
    return min(due, wish_seconds)
