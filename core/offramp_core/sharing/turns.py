"""Whose batch runs next on an executor that several models share: the earliest due, and who takes too much comes last.

While the executor has time to spare the least slack runs, which keeps most requests in time. Where it has not, somebody
must wait, and the longest queue must not be what decides: the earliest due is the flood's. So what each model has had
of late is compared with the level of max-min fairness: as much as all may have of ``NEARLY_FULL`` of the time, where
who wants less leaves the rest to the others. Who is above that level takes turns after all others, and in short
batches, since a batch that runs is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from offramp_core.batching import thrifty_rows
from offramp_core.errors import InvalidArgumentError

#: How long what a model has had of the executor counts: it decays by 1/e in this time.
WINDOW_SECONDS = 0.5
#: What a share may be. Further apart, the smaller of two would guarantee nothing.
LEAST_SHARE, MOST_SHARE = 0.001, 1000.0
#: Of the executor's time; as long as all together take less, nobody takes too much.
NEARLY_FULL = 0.8
#: Of the executor's time; as long as all together take less, it is mostly idle.
SPARE = 0.5
#: Of the executor's time; others that take less are hardly there.
RARE = 0.02
#: The longest batch that is begun where other models use the executor; what its rows may take, times those of the best
#: batch, so that it is a shorter one; and what they may take at the most, however long the batch is then.
QUANTUM_SECONDS, QUANTUM_DEARER, QUANTUM_DEAREST = 0.02, 1.1, 1.25
#: The same of a model that takes too much.
SURPLUS_SECONDS, SURPLUS_DEARER, SURPLUS_DEAREST = 0.004, 1.2, 1.5
#: How long what waits of a model takes at its rate before its batches are that short too.
LONG_QUEUE_SECONDS = 0.1
_FORGOTTEN_SECONDS = 1e-4


class Turn(Enum):
    """Which batch a model may run now."""

    #: Nobody else uses the executor.
    ALONE = "alone"
    #: Hardly anybody does, and the queue is long: as many rows as make each of them nearly as cheap as it can be.
    THRIFTY = "thrifty"
    #: Others use it.
    QUANTUM = "quantum"
    #: They do, and the model takes too much, or asks for it.
    SURPLUS = "surplus"

    def rows(self, seconds: Sequence[float]) -> int:
        """The most rows, where batches of 0, 1, ... rows take so many ``seconds``. They are never so few that the model
        is much slower by it: its queue would grow, and its batches be short for that again."""
        if self is Turn.ALONE:
            return len(seconds) - 1
        if self is Turn.THRIFTY:
            return thrifty_rows(seconds, dearer=QUANTUM_DEARER)
        most, dearer, dearest = (
            (SURPLUS_SECONDS, SURPLUS_DEARER, SURPLUS_DEAREST)
            if self is Turn.SURPLUS
            else (QUANTUM_SECONDS, QUANTUM_DEARER, QUANTUM_DEAREST)
        )
        within = sum(each <= most for each in seconds[1:])
        return max(thrifty_rows(seconds, dearer=dearest), min(within, thrifty_rows(seconds, dearer=dearer)))


@dataclass(frozen=True, slots=True)
class Claim:
    """A model that has work: ``due`` is when its first request should be answered, infinite for work that nobody waits
    for, ``seconds`` what its first row is expected to take, ``behind`` what all other rows of its queue are that are no
    less urgent, and ``expires`` when the answer is of no use any more."""

    due: float
    seconds: float = 0.0
    behind: float = 0.0
    expires: float = math.inf

    @property
    def first(self) -> float:
        """When the first row should begin at the latest, whatever waits behind it."""
        return self.due - self.seconds

    def last(self, *, rate: float) -> float:
        """Later by what waits ``behind`` it takes at this ``rate``, a part of the executor, but not so late that it is
        of no use."""
        return max(self.first, min(self.first + self.behind / rate, self.expires - self.seconds))


@dataclass(frozen=True, slots=True)
class Shares:
    """``weights`` by model, which need not add up to 1, and what each has ``used`` of the executor, in seconds that
    have decayed until ``at``."""

    weights: Mapping[str, float]
    used: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not LEAST_SHARE <= weight <= MOST_SHARE:
                raise InvalidArgumentError(
                    f"the share of {name!r} is {weight}; it must be a number from {LEAST_SHARE} to {MOST_SHARE:g}"
                )

    def after(self, ran: str, seconds: float, *, now: float) -> Shares:
        """Once ``ran`` has had ``seconds`` on the executor until ``now``."""
        left = self._left(now)
        used = {name: had * left for name, had in self.used.items() if had * left > _FORGOTTEN_SECONDS}
        used[ran] = used.get(ran, 0.0) + seconds
        return Shares(self.weights, used, max(now, self.at))

    def of(self, name: str, *, now: float) -> float:
        """What a model has had of late for one unit of its share, in seconds."""
        return self.used.get(name, 0.0) * self._left(now) / self.weights[name]

    def level(self, *, now: float) -> float:
        """What a model may have had of late for one unit of its share before it takes too much."""
        rest, left = NEARLY_FULL * WINDOW_SECONDS, self._left(now)
        if sum(self.used.values()) * left <= rest:
            return math.inf
        had = sorted((used * left / self.weights[name], self.weights[name]) for name, used in self.used.items())
        weights, level = sum(weight for _, weight in had), math.inf
        for each, own in had:
            level = rest / weights
            if each >= level:
                break
            rest, weights = rest - each * own, weights - own
        return level

    def owed(self, name: str) -> bool:
        """Whether a model has had less of late than it is guaranteed."""
        return self.used.get(name, 0.0) < self._guaranteed(name) * sum(self.used.values())

    def rate(self, name: str, *, now: float) -> float:
        """Half of the executor's part that a model may have: what the others leave of late, or what it is guaranteed.

        Half, since what waits in a queue that is served at all of it has waited as long as what is behind it takes: it
        would be as urgent as what has just come to others.
        """
        return max(self._guaranteed(name), NEARLY_FULL - self._others(name, now=now)) / 2

    def idles(self, *, now: float) -> bool:
        """Whether the executor has mostly been idle of late."""
        return sum(self.used.values()) * self._left(now) <= SPARE * WINDOW_SECONDS

    def turn_of(self, name: str, *, now: float, others_wait: bool, behind: float = 0.0) -> Turn:
        """What a batch of a model may take that has so many seconds of work ``behind`` its first row. Who has used the
        executor of late may come back while the batch runs, and then waits for it."""
        if not (others_wait or self.used.keys() - {name}):
            return Turn.ALONE
        too_much = self.of(name, now=now) > self.level(now=now)
        grows = behind > LONG_QUEUE_SECONDS * self.rate(name, now=now)
        if others_wait or self._others(name, now=now) > RARE:
            return Turn.SURPLUS if too_much or grows else Turn.QUANTUM
        return Turn.THRIFTY if grows else Turn.QUANTUM

    def _others(self, name: str, *, now: float) -> float:
        """The part of the executor that all others have had of late."""
        return (sum(self.used.values()) - self.used.get(name, 0.0)) * self._left(now) / WINDOW_SECONDS

    def _guaranteed(self, name: str) -> float:
        return NEARLY_FULL * self.weights[name] / sum(self.weights.values())

    def _left(self, now: float) -> float:
        return math.exp(-max(0.0, now - self.at) / WINDOW_SECONDS)


def next_turn(claims: Mapping[str, Claim], shares: Shares, *, now: float) -> str:
    """Whose batch runs next, of the models that have work; there must be one.

    Of those that do not take too much the one with the least slack: the earliest due, less the time that it takes, and
    later by the time that what waits behind it takes at half of the rate that the others leave to the model. The first
    of a queue that grows, or stays, comes after what has just come to the others: a flood does not pass them before it
    is known by what it has had. What waits behind does not count against who has had less than it is guaranteed. If all
    take too much, the one that has had the least for its share.

    Examples
    --------
    >>> equal = Shares({"a": 1.0, "b": 1.0})
    >>> next_turn({"a": Claim(due=3.0), "b": Claim(due=2.0)}, equal, now=0.0)
    'b'
    >>> next_turn({"a": Claim(due=3.0), "b": Claim(due=2.0)}, equal.after("b", 0.5, now=0.5), now=0.5)
    'a'
    """
    level = shares.level(now=now)
    had = {name: shares.of(name, now=now) for name in claims}
    within = [name for name in claims if had[name] <= level]
    if not within:
        return min(claims, key=lambda name: (had[name], name))
    last = {name: claims[name].first for name in within}
    for name in within:
        if claims[name].behind and not shares.owed(name):
            last[name] = claims[name].last(rate=shares.rate(name, now=now))
    return min(within, key=lambda name: (last[name], had[name], name))
