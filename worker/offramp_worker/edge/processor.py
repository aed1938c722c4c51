"""How long a thread waited for a processor, as Linux counts it.

A process with a limit is stopped once it has had its share of a period. What comes in meanwhile is read late, which no
clock of the process shows: neither before it has read it nor behind that.
"""

from __future__ import annotations

import os
from pathlib import Path

OWN = Path("/proc/thread-self/schedstat")  # nanoseconds that it ran, and that it waited to run


class ProcessorWait:
    """Of the thread that calls it. Where the system does not count, nobody waits."""

    def __init__(self, counted: Path = OWN) -> None:
        self._counted = counted
        self._file: int | None = None
        self._before = 0

    def __call__(self) -> float:
        """Seconds since the last call; 0 at first."""
        try:
            if self._file is None:
                self._file = os.open(self._counted, os.O_RDONLY | os.O_CLOEXEC)
                self._before = self._so_far(self._file)
            before, self._before = self._before, self._so_far(self._file)
        except (OSError, ValueError, IndexError):
            return 0.0
        return 1e-9 * (self._before - before)

    @staticmethod
    def _so_far(file: int) -> int:
        return int(os.pread(file, 64, 0).split()[1])
