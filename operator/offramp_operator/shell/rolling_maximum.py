"""The highest of many readings of the last hour, in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from offramp_core.control.workers.capacity import PEAK_SECONDS

SLOTS = 12


@dataclass(slots=True)
class RollingMaximum:
    """One maximum for each twelfth of an hour; what it returns may be as much older than an hour."""

    slots: list[tuple[int, float]] = field(default_factory=list)

    def note(self, value: float, now: float) -> None:
        """Add a reading, of a time (seconds that never jump) that does not fall."""
        slot = math.floor(now * SLOTS / PEAK_SECONDS)
        if self.slots and self.slots[-1][0] == slot:
            self.slots[-1] = (slot, max(value, self.slots[-1][1]))
        else:
            self.slots.append((slot, value))
        self._forget(slot)

    def highest(self, now: float) -> float:
        """The highest reading; 0 where there is none."""
        self._forget(math.floor(now * SLOTS / PEAK_SECONDS))
        return max((value for _, value in self.slots), default=0.0)

    def _forget(self, slot: int) -> None:
        while self.slots and self.slots[0][0] < slot - SLOTS:
            del self.slots[0]
