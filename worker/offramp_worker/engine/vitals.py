"""Whether the executor still works. One whose every run fails answers sooner than any other, and would attract all
traffic.

Batches fail for three causes: a request that the model cannot run, which fails alone; a plan, which gates and the
breaker judge; and a device, a driver or memory that is gone. So a few failures in a row prove nothing: then the exact
executor runs the bundle's probe. If that fails too, the worker takes no requests until it passes again, and is given up
when it does not: a new process begins with a new device context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from offramp_worker.logs import log_event

FAILED_IN_A_ROW = 3
# Between a probe that passed and the next: requests that fail by themselves must not cost the others more than that.
QUIET_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 16.0
SOUND_SECONDS = 60.0  # an executor that fails again sooner than this is asked as seldom as before
GIVE_UP_SECONDS = 60.0


class Vitals:
    """Called after every batch by who ran it; asks on a thread of its own, which lives only while something is wrong.

    Attributes
    ----------
    trouble : str
        Why no requests are taken by what was seen of their runs, in one sentence; empty where they are.
    """

    def __init__(
        self,
        *,
        probe: Callable[[int], None],
        recovered: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda _: None,
        fault: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``probe`` runs the exact executor on so many rows of the bundle's probe, and raises unless it answers as it
        should. ``fault`` is what an executor that watches itself says."""
        self.trouble, self._fault = "", fault
        self._probe, self._recovered, self._lost, self._clock = probe, recovered, lost, clock
        self._failed = 0
        self._asking = False
        self._not_before = float("-inf")
        self._pause, self._well_since = FIRST_PAUSE_SECONDS, float("-inf")
        self._closed = threading.Event()

    @property
    def refuses(self) -> str:
        """Why no requests are taken, by what was seen here or by what the executor says itself; empty where they
        are."""
        return self.trouble or self._fault()

    def ended(self, rows: int, *, failed: bool) -> None:
        """A batch of so many rows has ended."""
        if not failed:
            self._failed = 0
            return
        self._failed += 1
        if self._failed < FAILED_IN_A_ROW or self._asking or self.trouble or self._clock() < self._not_before:
            return
        self._failed, self._asking = 0, True
        threading.Thread(target=self._ask, args=(rows,), name="vitals", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self, rows: int) -> None:
        try:
            if error := self._fails(rows):
                self._wait(rows, error)
        finally:
            self._not_before, self._asking = self._clock() + QUIET_SECONDS, False

    def _wait(self, rows: int, error: str) -> None:
        """Take no requests until the probe passes, or for good."""
        began = self._clock()
        self.trouble = f"every run fails, the bundle's own probe included: {error}"
        log_event("executor-failing", level="error", error=error)
        if began - self._well_since > SOUND_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        while not self._closed.wait(self._pause):
            error = self._fails(rows)
            if not error:
                self._failed, self._well_since, self.trouble = 0, self._clock(), ""
                log_event("executor-recovered", level="warning", seconds=round(self._well_since - began, 1))
                self._recovered()
                return
            self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause)
            if self._clock() - began >= GIVE_UP_SECONDS:
                self._lost(
                    f"every run has failed for {self._clock() - began:.0f} s, the bundle's own probe included: {error}"
                )
                return

    def _fails(self, rows: int) -> str:
        """What is wrong with the executor, or empty."""
        try:
            self._probe(rows)
        except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
            return str(error).partition("\n")[0] or type(error).__name__
        return ""
