"""Records arranged for search: per ramp, the inputs in the order in which a rising threshold lets them leave.

Where to put a threshold. Fix the earlier ramps. Raising this ramp's threshold past an input that the ramp
answers correctly moves it to a cheaper exit, adds no error here and only removes inputs from later ramps. So
some optimum has every threshold just below an erroneous survivor: a *cut*. A plan is then an allocation of the
error budget to its ramps, and the last ramp takes whatever is left of it (docs/decisions/0004).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.records import BoolArray, IndexArray, Records
from offramp_core.search.grid import NEVER, KeyArray, leave_keys

Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The undominated thresholds of one ramp for the inputs still in.

    Attributes
    ----------
    rows : (m,) intp
        Inputs that leave at the boldest cut, most certain first.
    sizes : (c,) intp
        How many of them leave at each cut, rising.
    errors : (c,) intp
        Errors among those.
    least_errors : (c,) intp
        Errors among the leavers of the most cautious cut that this one stands for; equal to ``errors`` unless the cuts were thinned.
    """

    rows: IndexArray
    sizes: Ints
    errors: Ints
    least_errors: Ints

    def thinned(self, most: int) -> Cuts:
        """At most ``most`` of the cuts, evenly spread, each standing for those between the one before and itself."""
        if len(self.sizes) <= most:
            return self
        kept = np.linspace(0, len(self.sizes) - 1, most).astype(np.intp)
        first = np.concatenate(([0], kept[:-1] + 1))
        return Cuts(self.rows, self.sizes[kept], self.errors[kept], self.least_errors[first])


@dataclass(frozen=True, slots=True)
class Queue:
    """Inputs that some threshold lets leave at one ramp, most certain first.

    Attributes
    ----------
    rows : (m,) intp
        Row numbers by rising key.
    bad : (e,) intp
        Positions in ``rows`` of inputs the ramp answers wrongly, rising.
    bad_rows : (e,) intp
        Their row numbers.
    start : (e,) intp
        Position where the ties of each of those begin: a threshold that keeps it keeps all from there on.
    """

    rows: IndexArray
    bad: Ints
    bad_rows: IndexArray
    start: Ints

    def cuts(self, alive: BoolArray, errors: int) -> Cuts:
        """Cuts with at most ``errors`` errors among the inputs in ``alive`` (n,)."""
        kept = np.flatnonzero(alive[self.bad_rows])
        blocking = self.start[kept[: errors + 1]]
        if len(kept) <= errors:
            blocking = np.append(blocking, len(self.rows))
        rows = self.rows[: blocking[-1]]
        keep = np.flatnonzero(alive[rows])
        sizes = np.searchsorted(keep, blocking)
        distinct = np.append(sizes[1:] > sizes[:-1], True)  # of cuts that let the same inputs leave one is enough
        errors_at = np.searchsorted(self.bad[kept[: errors + 1]], blocking[distinct])
        return Cuts(rows[keep], sizes[distinct], errors_at, errors_at)


class SearchSpace:
    """Everything about the records that search needs, computed once and on demand: keys and a queue per ramp, and costs."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.n = len(records)
        self.final_wrong: BoolArray | None = None if records.final_agrees.all() else ~records.final_agrees
        self.behind = records.costs.total_seconds - np.cumsum(records.costs.segment_seconds)[:-1]
        self.ramp_seconds = records.costs.ramp_seconds
        self._keys: dict[int, KeyArray] = {}
        self._queues: dict[int, Queue] = {}

    def keys(self, ramp: int) -> KeyArray:
        """Leave keys of a ramp, (n,)."""
        if ramp not in self._keys:
            self._keys[ramp] = leave_keys(self.records.uncertainty[:, ramp])
        return self._keys[ramp]

    def queue(self, ramp: int) -> Queue:
        """All inputs that any threshold lets leave at a ramp."""
        if ramp not in self._queues:
            self._queues[ramp] = self._make_queue(ramp)
        return self._queues[ramp]

    def _make_queue(self, ramp: int) -> Queue:
        keys = self.keys(ramp)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        order = order[: np.searchsorted(ordered, NEVER)]
        bad = np.flatnonzero(~self.records.agrees[order, ramp])
        return Queue(order, bad, order[bad], np.searchsorted(ordered, ordered[bad], side="left"))
