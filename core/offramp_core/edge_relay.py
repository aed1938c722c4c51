"""Edge and core: whether a request is answered at the edge, with its exits, or handed to the core as it came.

Pure. Both ways are measured from end to end, so what a slow processor, its queue and its own forwarding cost is in the
figures, whatever causes it. The slower way is tried again once it has been avoided for so long that trying it costs
only :data:`EXPLORING` of all time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from offramp_core.edge import Uplink

#: Who answers a request: the edge, which may send rows on behind its exits, or the core.
By = Literal["Edge", "Core"]

WEIGHT = 0.03  # of the newest measurement: one row in five takes several times as long as the others
FIRST = 4  # measurements, of which the shortest counts: connections open, and caches fill
AGAIN_WEIGHT = 0.3  # of a measurement of the way that is not in use, which is rare
LONGEST = 3.0  # times the mean: what a longer measurement counts as
EXPLORING = 0.005  # of all time goes to trying the slower way


@dataclass(frozen=True, slots=True)
class Mean:
    """Of measurements in seconds, ``n`` of them."""

    value: float = 0.0
    n: int = 0

    @property
    def known(self) -> bool:
        return self.n >= FIRST

    def after(self, seconds: float, *, weight: float = WEIGHT) -> Mean:
        """With one more, of this weight or, while there are few, as one of them."""
        if not self.known:
            return Mean(seconds if not self.n else min(self.value, seconds), self.n + 1)
        weight = max(weight, 1.0 / (self.n + 1))
        return Mean(self.value + weight * (min(seconds, LONGEST * self.value) - self.value), self.n + 1)


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

    edge: Mean = field(default_factory=Mean)
    core: Mean = field(default_factory=Mean)
    #: Requests since the way that is not in use was tried.
    avoided: int = 0

    def by(self, size: int, waiting: Waiting, uplink: Uplink) -> By:
        """Who answers a request of so many bytes."""
        if not self.edge.known:
            return "Edge"
        least = uplink.round_trip + _sending(size, waiting, uplink)
        here, there = self._seconds(size, waiting, uplink)
        if not self.core.known:
            return "Core" if least < here else "Edge"
        best: By = "Core" if there < here else "Edge"
        lost = abs(there - here)
        if self.avoided * EXPLORING * min(there, here) < lost or (best == "Edge" and least >= here):
            return best
        return "Edge" if best == "Core" else "Core"

    def after(self, by: By, seconds: float, *, size: int, waiting: Waiting, uplink: Uplink) -> Ways:
        """With the seconds that one request took; ``waiting`` is what was in line when it came."""
        here, there = self._seconds(size, waiting, uplink)
        usual: By = "Core" if self.core.known and there < here else "Edge"
        weight = WEIGHT if by == usual else AGAIN_WEIGHT
        avoided = self.avoided + 1 if by == usual else 0
        if by == "Edge":
            return replace(
                self, edge=self.edge.after(seconds / (1.0 + waiting.at_edge), weight=weight), avoided=avoided
            )
        beyond = max(0.0, seconds - _sending(size, waiting, uplink))
        return replace(self, core=self.core.after(beyond, weight=weight), avoided=avoided)

    def _seconds(self, size: int, waiting: Waiting, uplink: Uplink) -> tuple[float, float]:
        """By the edge and by the core."""
        return self.edge.value * (1.0 + waiting.at_edge), self.core.value + _sending(size, waiting, uplink)


def _sending(size: int, waiting: Waiting, uplink: Uplink) -> float:
    return (size + waiting.on_uplink) / uplink.bytes_per_second
