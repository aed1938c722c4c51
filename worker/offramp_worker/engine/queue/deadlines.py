"""Deadlines: by when a row must be answered, and which rows of a batch cannot wait for another stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.queue.batcher import Batch

BoolArray = npt.NDArray[np.bool_]


class BatchDeadlines:
    """Of a batch's rows, against what the stages are known to take."""

    def __init__(
        self, at: npt.NDArray[np.float64], stage_seconds: Sequence[Sequence[float]], clock: Callable[[], float]
    ) -> None:
        """``at`` is when each row (n,) must be answered, infinite for whenever it is done."""
        self._at, self._seconds, self._clock = at, stage_seconds, clock

    def of(self, rows: BoolArray) -> BatchDeadlines:
        """Those of some of the rows."""
        return BatchDeadlines(self._at[rows], self._seconds, self._clock)

    def due(self, stage: int, carried: npt.NDArray[np.intp]) -> BoolArray | None:
        """Which of the ``carried`` rows would be late behind the stage after ``stage``; None for nobody."""
        by_rows = self._seconds[stage + 1]
        found: npt.NDArray[Any] = self._at[carried] < self._clock() + by_rows[min(len(carried), len(by_rows) - 1)]
        return found if found.any() else None


class Deadlines:
    """Says which batches have a deadline to keep, and when; ``everyones`` is that of requests that ask for none, in
    seconds from admission, and not of those with a budget of their own: an answer by a deadline keeps none."""

    def __init__(self, *, everyones: float | None, clock: Callable[[], float]) -> None:
        self._everyones, self._clock = everyones, clock

    def none_in(self, batch: Batch) -> bool:
        """Whether no row of a batch has a deadline, which an exit may have to keep."""
        return self._everyones is None and all(ticket.deadline == math.inf for ticket, _ in batch.owners)

    def of(self, batch: Batch, runtime: Runtime) -> BatchDeadlines | None:
        """When the rows of a batch must be answered, if any must.

        A row drawn for audit is answered like any other, late or cut short: what is compared, after its reply, is a
        uniform draw of what is served.
        """
        everyones = math.inf if runtime.judges_itself or self._everyones is None else self._everyones
        at = [
            ticket.admitted + everyones
            if ticket.deadline == math.inf and not ticket.has_own_budget
            else ticket.deadline
            for ticket, _ in batch.owners
        ]
        if min(at) == math.inf:
            return None
        return BatchDeadlines(np.array(at), runtime.stage_seconds, self._clock)
