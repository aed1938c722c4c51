"""What all policies that learn while they serve have in common: a plan in force, batches, and rows already served.

Results-only execution runs every input to the end, so after a batch the score and the agreement of every *active* ramp
are known for all of its requests, and nothing about the others. Policies here look at active columns of served rows
only.
"""

from __future__ import annotations

import numpy as np

from offramp_core.records import BoolArray, IndexArray, Records
from offramp_lab.policies.base import NO_EXIT, Objective, PlanInForce, Trace, serve

AHEAD = 256  # rows served at once


class ServedStream:
    """A stream served plan by plan, some way ahead of the decisions about it: a new plan takes back what lies behind
    it."""

    def __init__(self, stream: Records, objective: Objective, active: tuple[int, ...]) -> None:
        self.stream, self.batch_size = stream, objective.batch_size
        self.active, self.thresholds = active, (0.0,) * len(active)
        self.left: IndexArray = np.full(len(stream), NO_EXIT, dtype=np.intp)
        self._agrees: BoolArray = np.ones(len(stream), dtype=np.bool_)
        self._plans = [PlanInForce(0, self.active, self.thresholds)]
        self._ahead = 0

    def serve(self, end: int) -> None:
        """Make sure that all rows up to one are served, those not served yet under the plan in force."""
        if end > self._ahead:
            rows = slice(self._ahead, min(len(self.stream), max(end, self._ahead + AHEAD)))
            self.left[rows], self._agrees[rows] = serve(self.stream.take(rows), self.active, self.thresholds)
            self._ahead = rows.stop

    def switch(self, row: int, active: tuple[int, ...], thresholds: tuple[float, ...]) -> None:
        """Put a plan in force from a row on."""
        if (active, thresholds) == (self.active, self.thresholds):
            return
        self.active, self.thresholds = active, thresholds
        self._ahead = min(self._ahead, row)
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
