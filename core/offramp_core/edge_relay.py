"""Edge and core: whether a request is answered at the edge, with its exits, or handed to the core as it came.

Pure. Both ways are measured from end to end, so what a slow processor, its queue and its own forwarding cost is in the
figures, whatever causes it. The slower way is tried again once it has been avoided for so long that trying it costs
only :data:`EXPLORING` of all time.

A processor limit lets a request run beyond its share, and stops the process after it for up to :data:`PERIOD`: the next
request waits before anybody reads it. Whoever measures adds that to what the request before took, since it has caused
it. Such a stop counts in full, however rare: it is what its way costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from offramp_core.edge import Uplink

#: Who answers a request: the edge, which may send rows on behind its exits, or the core.
By = Literal["Edge", "Core"]

WEIGHT = 0.03  # of the newest measurement: one row in five takes several times as long as the others
FIRST = 4  # measurements, of which the shortest counts: connections open, and caches fill
FIRST_HERE, SETTLED = 10, 0.5  # of the edge, or seconds: a box is held up at its start, and once left tried again late
CONNECTS = 2  # measurements of the core, before ones that take several times as long as the edge count as a way known
AGAIN_WEIGHT = 0.1  # of a measurement of the way that is not in use, which is rare and may have run beyond its share
PERIOD = 0.1  # seconds: of processor limits, if nobody says otherwise
LONGEST = 3.0  # times what was expected: what is beyond it has the least weight, and beyond a period none
HELD_UP, FACTOR = 3, 2.0  # longer ones in a row; to the weight with each more, which no hold-up explains
FLOOR = 1e-4  # seconds, of what is expected: a mean of nothing could not rise
EXPLORING = 0.005  # of all time goes to trying the slower way
SOON, SOON_TRIES = 4, 6  # requests until a box that was held up is tried again, twice as many each time; so often
START_TRIES, START_FACTOR = 3, 4.0  # of one that may have been held up from its start; first after SOON times its own
#: While one way takes so many times as long as the other one, so many requests go the sooner one without asking, and
#: one in so many of them is learned from.
FAR, UNASKED, LEARNED = 1.1, 32, 8
#: Those that take unusually long are all learned from, with so much of the weight: else the mean would be too high.
UNUSUAL = 1.0 / LEARNED
LEFT: tuple[By, By] = ("Edge", "Core")
MOST_LOST = 2.0  # seconds that a try is taken to cost and to owe: 800 s of the other way at most go by before one


@dataclass(frozen=True, slots=True)
class Mean:
    """Of measurements in seconds, ``n`` of them."""

    value: float = 0.0
    n: int = 0
    #: The last ones in a row that were longer than they may count as.
    longer: int = 0
    #: How many there must be, if they are short, before it is known.
    first: int = FIRST

    @property
    def known(self) -> bool:
        return self.n >= self.first or (self.n >= FIRST and self.n * self.value >= SETTLED)

    def after(self, seconds: float, *, weight: float = WEIGHT, beside: float = 0.0, share: float = 1.0) -> Mean:
        """With one more, of this weight or, while there are few, as one of them; of a ``share`` of that, unless it is
        one of many longer ones in a row. ``beside`` is what else was expected of the request."""
        if not self.known:
            return replace(self, value=min(self.value, seconds) if self.n else seconds, n=self.n + 1)
        usual = LONGEST * max(FLOOR, self.value + beside) - beside
        most = max(PERIOD, usual)
        longer = self.longer + 1 if seconds > most else 0
        faster = share if longer <= HELD_UP else FACTOR ** (longer - HELD_UP)
        weight, of_rest = (min(1.0, each * faster) for each in (max(weight, 1.0 / (self.n + 1)), WEIGHT))
        value = self.value + weight * (min(seconds, usual) - self.value)
        value += of_rest * max(0.0, min(seconds, most) - usual)
        return replace(self, value=value, n=self.n + 1, longer=longer)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is in line before a request: its multiple in rows at the edge, and bytes on the uplink."""

    at_edge: float = 0.0
    on_uplink: int = 0


@dataclass(frozen=True, slots=True)
class Ways:
    """What requests of about one size take.

    ``edge`` is seconds of one that finds nobody in line. ``core`` is seconds beyond the bytes' own: round trip, the
    core's queue and its computing.
    """

    edge: Mean = field(default_factory=lambda: Mean(first=FIRST_HERE))
    core: Mean = field(default_factory=Mean)
    #: Seconds of the way in use since the other one was tried; below 0 while what that took is not earned yet.
    avoided: float = 0.0
    #: How often the edge, which was left since it was held up, or may have been from its start, may still be tried
    #: soon; and what is to be avoided until then.
    soon: int = 0
    pause: float = 0.0

    def by(self, size: int, waiting: Waiting, uplink: Uplink) -> By:
        """Who answers a request of so many bytes."""
        if not self.edge.known:
            return "Edge"
        least = self._least(size, waiting, uplink)
        here, there = self._seconds(size, waiting, uplink)
        if not self.core.known and (self.core.n < CONNECTS or there < LONGEST * here):
            return "Core" if least < here else "Edge"
        best = self._usual(here, there)
        if not self._due(here, there, waiting) or (best == "Edge" and least >= here):
            return best
        return "Edge" if best == "Core" else "Core"

    def settled(self, by: By, size: int, uplink: Uplink) -> float | None:
        """Whether the next requests of this size, with nobody in line, may go the same way without asking again, since
        the other one takes :data:`FAR` times as long: seconds below which one of them says nothing new, else None."""
        known = self.edge.known and (by == "Edge" or self.core.known)
        if not known or by != self.by(size, Waiting(), uplink):
            return None
        here, there = self._seconds(size, Waiting(), uplink)
        if self.core.n < CONNECTS:  # what the uplink alone takes would be more
            return LONGEST * max(FLOOR, here) if self._least(size, Waiting(), uplink) >= here else None
        mine, other = (here, there) if by == "Edge" else (there, here)
        return LONGEST * max(FLOOR, mine) if other >= FAR * mine else None

    def after(
        self,
        by: By,
        seconds: float,
        *,
        size: int,
        waiting: Waiting,
        uplink: Uplink,
        requests: int = 1,
        share: float = 1.0,
    ) -> Ways:
        """With the seconds that one request took, and the next one had to wait for it; ``waiting`` is what was in line
        when it came. It stands for so many ``requests``, and has a ``share`` of the weight of others."""
        here, there = self._seconds(size, waiting, uplink)
        usual = self._usual(here, there)
        weight = WEIGHT if by == usual else AGAIN_WEIGHT
        much_sooner = seconds < (here if by == "Edge" else there) / LONGEST  # than it was: the next one tries it again
        earned = requests * min(here, there)
        avoided = self.avoided + earned if by == usual else self.avoided if much_sooner else 0.0
        if by == "Core" != usual and self.core.known:
            avoided -= _owed(seconds - there)
        tried = by == "Edge" and usual == "Core" and self.soon > 0
        if tried and seconds >= here:  # it is still held up: nothing new; or it was in line when the box was left
            return self._later() if self._due(here, there, waiting) else self
        edge, core, sending = self.edge, self.core, _sending(size, waiting, uplink)
        if by == "Edge":
            edge = edge.after(seconds / (1.0 + waiting.at_edge), weight=weight, share=share)
        else:
            core = core.after(max(0.0, seconds - sending), weight=weight, beside=sending, share=share)
        now = Ways(edge, core, avoided, self.soon, self.pause)
        if tried and not (much_sooner or self.edge.longer):
            now = now._later()
        seen, idle = now._seconds(size, Waiting(), uplink), self._seconds(size, Waiting(), uplink)
        if now.edge.known and (self._usual(*idle), now._usual(*seen)) == LEFT:
            return now._left(*seen, first=not self.core.known)
        return now

    def without_longer(self, by: By) -> Ways:
        """With a usual request that is not learned from: longer ones of its way are not in a row any more."""
        if by == "Edge":
            return replace(self, edge=replace(self.edge, longer=0)) if self.edge.longer else self
        return replace(self, core=replace(self.core, longer=0)) if self.core.longer else self

    def at_least(self, by: By, seconds: float, *, size: int, waiting: Waiting, uplink: Uplink) -> Ways:
        """With one that had no answer after so many seconds. That says something where an answer was expected before,
        of a way that is not known yet by the other one."""
        here = self._seconds(size, waiting, uplink)[0] if self.edge.known else self._least(size, waiting, uplink)
        expected = here if by == "Edge" else self.by_core(size, waiting, uplink)
        return self.after(by, seconds, size=size, waiting=waiting, uplink=uplink) if seconds > expected else self

    def by_core(self, size: int, waiting: Waiting, uplink: Uplink) -> float:
        """Seconds within which the core is expected to answer; of one that is not known yet, within which it is of
        use."""
        here, there = self._seconds(size, waiting, uplink)
        return there if self.core.known else max(here, self._least(size, waiting, uplink))

    def _left(self, here: float, there: float, *, first: bool) -> Ways:
        """The edge is left. What holds a box up often ends soon."""
        if self.edge.longer:
            return replace(self, avoided=0.0, soon=SOON_TRIES, pause=SOON * there)
        return replace(self, avoided=0.0, soon=START_TRIES if first else 0, pause=SOON * here)

    def _later(self) -> Ways:
        """The edge was tried, and is still held up."""
        factor = FACTOR if self.edge.longer else START_FACTOR
        return replace(self, avoided=0.0, soon=self.soon - 1, pause=self.pause * factor)

    def _due(self, here: float, there: float, waiting: Waiting) -> bool:
        """Whether the way that is not in use may be tried again."""
        if self.soon and there < here and not waiting.at_edge and self.avoided >= self.pause:
            return True
        return self.avoided * EXPLORING >= min(MOST_LOST, abs(there - here))

    def _usual(self, here: float, there: float) -> By:
        return "Core" if self.core.known and there < here else "Edge"

    def _least(self, size: int, waiting: Waiting, uplink: Uplink) -> float:
        return uplink.round_trip + _sending(size, waiting, uplink)

    def _seconds(self, size: int, waiting: Waiting, uplink: Uplink) -> tuple[float, float]:
        """By the edge and by the core."""
        return self.edge.value * (1.0 + waiting.at_edge), self.core.value + _sending(size, waiting, uplink)


def _sending(size: int, waiting: Waiting, uplink: Uplink) -> float:
    return (size + waiting.on_uplink) / uplink.bytes_per_second


def _owed(lost: float) -> float:
    """Seconds of the way in use that earn what a try has lost beyond what it was expected to: an uplink that is slower
    than it looked stays so."""
    return min(MOST_LOST, max(0.0, lost)) / EXPLORING
