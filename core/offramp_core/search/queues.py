"""Records arranged for search: per ramp, the inputs in the order in which a rising threshold lets them leave.

Where to put a threshold. Fix the earlier ramps. Raising this ramp's threshold past an input that the ramp
answers correctly moves it to a cheaper exit, adds no error here and only removes inputs from later ramps. So
some optimum has every threshold just below an erroneous survivor: a *cut*. A plan is then an allocation of the
error budget to its ramps, and the last ramp takes whatever is left of it.

Source of the dominance argument: ours, see docs/decisions/0004.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.records import BoolArray, Records
from offramp_core.search.grid import NEVER, KeyArray, leave_keys

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Queue:
    """Inputs that can still leave at one ramp, most certain first.

    Attributes
    ----------
    rows : (m,) int32
        Row numbers by rising key.
    bad : (e,) int64
        Positions in ``rows`` of inputs the ramp answers wrongly, rising.
    start : (e,) int64
        Position where the ties of each of those begin: a threshold that keeps it keeps all from there on.
    """

    rows: Rows
    bad: Ints
    start: Ints

    def cuts(self, errors: int) -> tuple[Ints, Ints]:
        """All undominated numbers of leavers with at most ``errors`` errors, rising, and the errors among them."""
        blocking = self.start[: errors + 1]
        sizes = np.unique(blocking)
        if len(self.bad) <= errors:
            sizes = np.append(sizes, len(self.rows))
            if len(sizes) > 1 and sizes[-2] == sizes[-1]:
                sizes = sizes[:-1]
        return sizes, np.searchsorted(self.bad, sizes)

    def without(self, alive: BoolArray) -> Queue:
        """The queue of the inputs in ``alive`` (n,) only."""
        keep = alive[self.rows]
        before = np.zeros(len(keep) + 1, dtype=np.int64)
        np.cumsum(keep, out=before[1:])
        kept_bad = keep[self.bad]
        return Queue(self.rows[keep], before[self.bad[kept_bad]], before[self.start[kept_bad]])


class SearchSpace:
    """Everything about the records that search needs, computed once: keys (n, R), a queue per ramp, and costs."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.n = len(records)
        self.keys: KeyArray = leave_keys(records.uncertainty)
        self.final_wrong: BoolArray | None = None if records.final_agrees.all() else ~records.final_agrees
        self.behind = records.costs.total_seconds - np.cumsum(records.costs.segment_seconds)[:-1]
        self.ramp_seconds = records.costs.ramp_seconds
        self._queues: dict[int, Queue] = {}

    def queue(self, ramp: int) -> Queue:
        """All inputs that any threshold lets leave at a ramp."""
        if ramp not in self._queues:
            self._queues[ramp] = self._make_queue(ramp)
        return self._queues[ramp]

    def _make_queue(self, ramp: int) -> Queue:
        keys = self.keys[:, ramp]
        order = np.argsort(keys, kind="stable").astype(np.int32)
        ordered = keys[order]
        order = order[: np.searchsorted(ordered, NEVER)]
        bad = np.flatnonzero(~self.records.agrees[order, ramp])
        return Queue(order, bad, np.searchsorted(ordered, ordered[bad], side="left"))

    def final_errors(self, rows: Rows) -> int:
        """Inputs among ``rows`` whose final answer is wrong."""
        return 0 if self.final_wrong is None else int(self.final_wrong[rows].sum())
