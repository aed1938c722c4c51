"""What came of each request of a simulated stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SecondsArray = npt.NDArray[np.float64]
ANSWERED, DROPPED, REJECTED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Requests in order of arrival, and the server's own account."""

    #: (n,) float64. Seconds from arrival to answer; NaN for requests that got none.
    latency: SecondsArray
    #: (n,) int8; ``ANSWERED``, ``DROPPED`` (given up because its deadline could not be met) or ``REJECTED`` (the queue
    #: was full).
    status: npt.NDArray[np.int8]
    #: busy_seconds and span_seconds: time the server worked, and time from the first arrival to the end of the last
    #: batch.
    busy_seconds: float
    span_seconds: float
    batches: int
    slo_seconds: float | None = None

    @property
    def answered(self) -> int:
        return int((self.status == ANSWERED).sum())

    @property
    def dropped(self) -> int:
        return int((self.status == DROPPED).sum())

    @property
    def rejected(self) -> int:
        return int((self.status == REJECTED).sum())

    @property
    def slo_misses(self) -> int:
        """Requests answered too late or not at all; 0 without an objective."""
        if self.slo_seconds is None:
            return 0
        late = int((self.latency > self.slo_seconds).sum())  # NaN compares false
        return late + self.dropped + self.rejected

    @property
    def busy_share(self) -> float:
        """Share of the time the server worked."""
        return self.busy_seconds / self.span_seconds if self.span_seconds > 0 else 0.0

    @property
    def mean_batch(self) -> float:
        return self.answered / self.batches if self.batches else 0.0

    def quantile(self, q: float) -> float:
        """Latency quantile over answered requests, in seconds; NaN when there are none."""
        answered = self.latency[self.status == ANSWERED]
        return float(np.quantile(answered, q)) if len(answered) else float("nan")

    @property
    def mean_seconds(self) -> float:
        """Mean latency over answered requests; NaN when there are none."""
        answered = self.latency[self.status == ANSWERED]
        return float(answered.mean()) if len(answered) else float("nan")
