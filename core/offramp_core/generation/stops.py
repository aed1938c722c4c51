"""Stop strings in text that comes in pieces: also across pieces, with nothing shown that may still become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StopScanner:
    """Holds back the end of a text as long as a stop string may begin there.

    The text ends before the stop string that is whole first; of several that become whole at one character, the longest
    one. ``add`` takes pieces of any length, and what it answers does not depend on how the text was cut.
    """

    stops: tuple[str, ...]
    #: A stop string came; nothing more is to be added.
    stopped: bool = False
    _held: str = ""

    def add(self, piece: str) -> str:
        """What of the text so far can be shown now."""
        if self.stopped or not piece:
            return ""
        text = self._held + piece
        if not self.stops:
            return text
        found = self._first(text)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        kept = self._kept(text)
        self._held = text[len(text) - kept :] if kept else ""
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The rest: the text has ended and no stop string came."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _first(self, text: str) -> int | None:
        """Where the stop string begins that is whole first."""
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def _kept(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self.stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self.stops):
                return size
        return 0


def clean_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Without repetitions, in order."""
    return tuple(dict.fromkeys(stops))
