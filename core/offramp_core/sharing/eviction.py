"""Which models leave memory for another one: those whose absence costs least by the byte.

A model that is not in memory costs the first request that comes for it a reload. So what its bytes are worth is how
often requests come after it has been away, times the seconds of its reload, by byte. How often is a moving rate: a
count would keep what was popular long ago, and the last use alone says nothing of how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HALF_LIFE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Popularity:
    """Requests of late: ``count`` decays by half in ``HALF_LIFE_SECONDS``, and was right at ``at``."""

    count: float = 0.0
    at: float = 0.0

    def after(self, now: float, *, requests: int = 1) -> Popularity:
        """With requests that come ``now``."""
        return Popularity(self._decayed(now) + requests, max(now, self.at))

    def rate(self, now: float) -> float:
        """Requests a second, by the requests of late."""
        return self._decayed(now) * math.log(2) / HALF_LIFE_SECONDS

    def _decayed(self, now: float) -> float:
        return float(self.count * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_SECONDS))


@dataclass(frozen=True, slots=True)
class Held:
    """A model in memory. One that is ``kept`` (its floor, or because it is busy being loaded) never leaves for
    another."""

    name: str
    size_bytes: int
    reload_seconds: float
    #: Requests a second.
    rate: float
    kept: bool = False

    @property
    def worth(self) -> float:
        """Seconds of reloads a second that a byte of it spares."""
        return self.rate * self.reload_seconds / max(1, self.size_bytes)


def evicted(held: Sequence[Held], *, needed_bytes: int) -> tuple[str, ...] | None:
    """The models that leave so that ``needed_bytes`` become free, empty where none are needed; None where even all
    that may leave do not suffice.

    The least worth goes first; one that turns out not to be needed, since a larger one had to go too, stays.

    Examples
    --------
    >>> small = Held("small", size_bytes=10, reload_seconds=1.0, rate=0.1)
    >>> large = Held("large", size_bytes=100, reload_seconds=2.0, rate=2.0)
    >>> evicted([small, large], needed_bytes=8), evicted([small, large], needed_bytes=50)
    (('small',), ('large',))
    """
    leaving: list[Held] = []
    freed = 0
    for model in sorted((m for m in held if not m.kept), key=lambda m: (m.worth, m.name)):
        if freed >= needed_bytes:
            break
        leaving.append(model)
        freed += model.size_bytes
    if freed < needed_bytes:
        return None
    for model in sorted(leaving, key=lambda m: (-m.worth, m.name)):
        if freed - model.size_bytes >= needed_bytes:
            leaving.remove(model)
            freed -= model.size_bytes
    return tuple(model.name for model in leaving)
