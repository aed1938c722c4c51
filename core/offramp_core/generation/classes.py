"""Which classes of requests are decided about by themselves. Clients name them, so names must cost nothing until they
carry traffic.

A name is only counted at first, among the newest such names; with enough requests it becomes known. There is room for
so many known ones, and one takes another's place only with more requests of late. So names that come once change
nothing, however many there are, and whoever wants to displace a class must send more than that class has.

Counts are halved every so many requests, which makes them of late; admission by comparing frequencies is TinyLFU's
(Einziger, Friedman and Manes, 2017, arXiv:1512.00727), with exact counts where that has a sketch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT_CLASSES = 16
NEW_NAMES = 64  # that are counted before they are known
KNOWN_AFTER = 8  # requests
HALVED_AFTER = 2048  # requests of all classes


@dataclass(slots=True)
class Classes:
    """Counts names; see the module. Requests that name none, or one that is not known, are one class of their own."""

    _known: dict[str, int] = field(default_factory=dict)
    _new: dict[str, int] = field(default_factory=dict)  # the one seen last at the end
    _requests: int = 0

    def __contains__(self, name: str) -> bool:
        """Whether it is known."""
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    def count(self, name: str) -> str:
        """A request names a class. The name of one that had to go for it, empty in general."""
        self._requests += 1
        if self._requests % HALVED_AFTER == 0:
            self._known = {each: n // 2 for each, n in self._known.items()}
            self._new = {each: n // 2 for each, n in self._new.items() if n > 1}
        if not name:
            return ""
        if name in self._known:
            self._known[name] += 1
            return ""
        seen = self._new.pop(name, 0) + 1
        gone = self._displaced(seen) if seen >= KNOWN_AFTER else None
        if gone is None:
            self._new[name] = seen
            if len(self._new) > NEW_NAMES:
                del self._new[next(iter(self._new))]
            return ""
        self._known.pop(gone, None)
        self._known[name] = seen
        return gone

    def _displaced(self, seen: int) -> str | None:
        """Who goes for one with so many requests: nobody (empty) where there is room, None where all have as many."""
        if len(self._known) < KEPT_CLASSES:
            return ""
        least = min(self._known, key=lambda each: self._known[each])
        return least if self._known[least] < seen else None
