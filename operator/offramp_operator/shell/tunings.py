"""Tunings run in threads beside the passes; what one found stays until it is stored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from offramp_core.records import Records
from offramp_core.tuning import TuningOutcome, TuningRequest
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

TUNING_CRASH_BACKOFF_SECONDS = 60.0
MAX_TUNING_CRASH_DOUBLINGS = 6

Tune = Callable[[Records, TuningRequest], TuningOutcome]


@dataclass(slots=True)
class Tuning:
    """A tuning of one service: under way, finished and not yet decided upon, or none. ``not_before`` follows a
    crash."""

    running: Future[TuningOutcome] | None = None
    outcome: TuningOutcome | None = None
    crashes: int = 0
    not_before: float = 0.0


class Tunings:
    """The tunings of all services."""

    def __init__(self, tune: Tune, clock: Callable[[], float]) -> None:
        self._tune = tune
        self._clock = clock
        self._by_key: dict[ServiceKey, Tuning] = {}

    def of(self, key: ServiceKey) -> Tuning:
        return self._by_key.setdefault(key, Tuning())

    def start(self, key: ServiceKey, records: Records, request: TuningRequest) -> None:
        """Begin one, unless one is under way, waits to be decided upon, or has crashed short ago."""
        tuning = self.of(key)
        if tuning.running is not None or tuning.outcome is not None or self._clock() < tuning.not_before:
            return
        log_event("tuning-started", f"{len(records)} records", service=str(key), records=len(records))
        tuning.running = _in_daemon_thread(lambda: self._tune(records, request), name=f"tune-{key.name}")

    def collect(self, key: ServiceKey) -> Tuning:
        """Take the outcome of a tuning that has ended."""
        tuning = self.of(key)
        if tuning.running is None or not tuning.running.done():
            return tuning
        finished, tuning.running = tuning.running, None
        error = finished.exception()
        if error is None:
            tuning.outcome, tuning.crashes = finished.result(), 0
            log_event("tuning-finished", type(tuning.outcome).__name__, service=str(key))
            return tuning
        # The decision asks again at its next pass; without a pause a broken tuner would keep a core busy for nothing.
        pause = TUNING_CRASH_BACKOFF_SECONDS * 2.0 ** min(tuning.crashes, MAX_TUNING_CRASH_DOUBLINGS)
        tuning.crashes, tuning.not_before = tuning.crashes + 1, self._clock() + pause
        log_event("tuning-crashed", f"{error!r}; next attempt in {pause:.0f} s", level=logging.ERROR, service=str(key))
        return tuning

    def digested(self, key: ServiceKey) -> None:
        """Forget the outcome, now that what was learned from it is stored, and not before: tests that ran must be
        counted.

        A decision that uses it always changes the tuning status; one that cannot (no worker answers) leaves it alone.
        """
        self.of(key).outcome = None

    def forget(self, key: ServiceKey) -> None:
        """A thread ends by itself, and its outcome goes nowhere."""
        self._by_key.pop(key, None)


def _in_daemon_thread(work: Callable[[], TuningOutcome], *, name: str) -> Future[TuningOutcome]:
    """Run in a thread that does not hold up the end of the process, as an executor's would."""
    future: Future[TuningOutcome] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
