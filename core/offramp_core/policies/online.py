"""What all policies that learn while they serve have in common: a plan in force, batches, and rows already served.

Results-only execution runs every input to the end, so after a batch the score and the agreement of every *active* ramp are known for all
of its requests, and nothing about the others. Policies here look at active columns of served rows only.
"""

from __future__ import annotations

import numpy as np

from offramp_core.policies.base import NO_EXIT, Objective, PlanInForce, Trace, serve
from offramp_core.records import BoolArray, IndexArray, Records


class Served:
    """A stream served plan by plan. Serving ahead of a decision is allowed; :meth:`switch` takes it back from its row on."""

    def __init__(self, stream: Records, objective: Objective, active: tuple[int, ...]) -> None:
        self.stream, self.batch_size = stream, objective.batch_size
        self.active, self.thresholds = active, (0.0,) * len(active)
        self.left: IndexArray = np.full(len(stream), NO_EXIT, dtype=np.intp)
        self._agrees: BoolArray = np.ones(len(stream), dtype=np.bool_)
        self._plans = [PlanInForce(0, self.active, self.thresholds)]

    def serve(self, start: int, end: int) -> None:
        """Serve some rows under the plan in force."""
        rows = slice(start, end)
        self.left[rows], self._agrees[rows] = serve(self.stream.take(rows), self.active, self.thresholds)

    def switch(self, row: int, active: tuple[int, ...], thresholds: tuple[float, ...]) -> None:
        """Put a plan in force from a row on; what was served from there on has to be served again."""
        if (active, thresholds) == (self.active, self.thresholds):
            return
        self.active, self.thresholds = active, thresholds
        if self._plans[-1].since == row:
            self._plans.pop()
        self._plans.append(PlanInForce(row, active, thresholds))

    def wrong(self, start: int, end: int) -> BoolArray:
        """Requests that left with a wrong answer; what ran to the output is right by these systems' own measure."""
        wrong: BoolArray = (self.left[start:end] != NO_EXIT) & ~self._agrees[start:end]
        return wrong

    def batch_ends(self, start: int, end: int) -> IndexArray:
        """Ends of the batches in a span that begins with a batch; the last may be short."""
        return np.append(np.arange(start + self.batch_size, end, self.batch_size), end)

    def trace(self) -> Trace:
        """Everything served so far."""
        plans = [plan for plan in self._plans if plan.since < len(self.stream)]
        return Trace(self.left, tuple(plans), self._agrees)
