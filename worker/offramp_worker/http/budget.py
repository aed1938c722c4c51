"""One bound for what all clients together may have in this process's memory: bytes of bodies that arrive, are unpacked
or wait for answers.

At the limit nothing more is read. Bodies that have begun wait for room; what would need yet more is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable

RESERVE_BYTES = 16 * 2**20  # beyond the limit, for what sockets had read when it was reached


class ByteBudget:
    """Not safe for threads: it belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.taken = limit, 0, 0  # in all
        self._waiting: dict[object, Callable[[], None]] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more should be read."""
        return self.used > self.limit

    def fits(self, size: int) -> bool:
        """Whether so many bytes can be taken at all."""
        return self.used + size <= self.limit + RESERVE_BYTES

    def take(self, size: int) -> None:
        self.used += size
        self.taken += size

    def give(self, size: int) -> None:
        """Bytes are gone. Whoever waits may read again once there is room."""
        self.used -= size
        while self._waiting and not self.full:
            self._waiting.pop(next(iter(self._waiting)))()

    def wait(self, who: object, again: Callable[[], None]) -> None:
        """Call ``again`` once there is room, unless ``who`` gives up before."""
        self._waiting[who] = again

    def give_up(self, who: object) -> None:
        self._waiting.pop(who, None)
