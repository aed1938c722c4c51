"""What an answer takes of an engine that batches by itself: the seconds that the engine, full, would need for it.

Its wall time is nothing of the kind. Answers that are computed side by side share that time, and an engine with few of
them could do more: where a step takes as long for one as for eight, one alone fills an eighth. How long a token takes
beside how many is measured as answers end. Until that is known a step's time counts as its answers', which is how it is
where they are computed one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offramp_core.admission import WEIGHT

FIRST_SPREAD = 0.1  # what the prior weighs: less than one answer beside twice as many as usual
MOST_SPREAD = 4.0  # about eight answers where one to eight are written side by side
MOST_OFF = math.log(2)  # beyond what any growth explains: that tells nothing of growth


@dataclass(frozen=True, slots=True)
class EvenShares:
    """Seconds that ``each`` answer has had by the time ``at``, were the engine divided evenly among the ``running``.
    Between two moments it grows by what one that ran meanwhile has had.

    Examples
    --------
    >>> EvenShares(at=1.0).changed(by=2, now=1.0).changed(by=-1, now=3.0).until(4.0).each
    2.0
    """

    running: int = 0
    each: float = 0.0
    at: float = 0.0

    def until(self, now: float) -> EvenShares:
        return replace(self, each=self.each + (now - self.at) / max(1, self.running), at=now)

    def changed(self, *, by: int, now: float) -> EvenShares:
        """So many more run from ``now`` on."""
        return replace(self.until(now), running=self.running + by)


@dataclass(frozen=True, slots=True)
class Growth:
    """How seconds per token grow with the answers written side by side: by what part of a percent for each percent
    more, from 0, where more cost nothing, to 1, where they are computed one after the other. It is the slope of a line
    through logarithms, so that a machine that becomes slower does not change it, and a prior of one until more is
    known.

    ``beside`` and ``seconds`` are means of logarithms of the newest answers. Of ``spread`` and ``rise``, whose quotient
    is the slope, and of ``about``, the mean that it was learned at, only as much is forgotten as newer answers tell:
    nothing while the load does not vary.
    """

    beside: float
    seconds: float
    about: float
    spread: float = FIRST_SPREAD
    rise: float = FIRST_SPREAD

    def after(self, *, beside: float, seconds: float) -> Growth:
        """After an answer whose tokens took ``seconds`` each, as one of ``beside`` on average."""
        more, longer = math.log(beside) - self.beside, math.log(seconds) - self.seconds
        if longer < min(0.0, more) - MOST_OFF:  # what was measured before was stalled
            return replace(self, beside=self.beside + more, seconds=self.seconds + longer)
        if longer > max(0.0, more) + MOST_OFF:  # this one is; or the machine is slower now, which the level follows
            return replace(self, seconds=self.seconds + WEIGHT * MOST_OFF)
        spread = self.spread + more**2
        rise = min(spread, max(0.0, self.rise + more * longer))
        kept = min(1.0, MOST_SPREAD / spread)
        return Growth(
            self.beside + WEIGHT * more,
            self.seconds + WEIGHT * longer,
            self.about + more**2 / spread * (self.beside - self.about),
            kept * spread,
            kept * rise,
        )

    def relative(self, beside: float) -> float:
        """What a token takes, to what it takes where the slope was learned: a part that is the step's own, and one for
        each answer."""
        slope = self.rise / self.spread
        return 1 - slope + slope * beside / math.exp(self.about)


def measured(growth: Growth | None, *, beside: float, seconds: float) -> Growth:
    """As :meth:`Growth.after`, of the first answer too."""
    if growth is None:
        return Growth(math.log(beside), math.log(seconds), math.log(beside))
    return growth.after(beside=beside, seconds=seconds)


def part_of_full(growth: Growth | None, *, beside: float, most: float) -> float:
    """What an engine does in a second that writes ``beside`` answers, as a share of what it does with ``most``.

    Examples
    --------
    >>> as_long_for_eight = Growth(beside=1.0, seconds=-4.0, about=1.0, spread=4.0, rise=0.0)
    >>> part_of_full(as_long_for_eight, beside=2, most=8), part_of_full(None, beside=2, most=8)
    (0.25, 1.0)
    """
    if growth is None or beside >= most:
        return 1.0
    return beside / growth.relative(beside) * growth.relative(most) / most
