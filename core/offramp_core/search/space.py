"""Records arranged for search: per ramp, the thresholds that can matter, and at which of them each input leaves.

Where to put a threshold. Fix the earlier ramps. Raising this ramp's threshold past an input that the ramp
answers correctly moves it to a cheaper exit, adds no error here and only removes inputs from later ramps. So
some optimum has every threshold just below an erroneous input: a *cut*. Cuts are numbered from the most
cautious; at the boldest every input leaves that any threshold lets leave (docs/decisions/0004 and 0009).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidRecordsError
from offramp_core.records import BoolArray, IndexArray, Records
from offramp_core.search.grid import NEVER, KeyArray, leave_keys
from offramp_core.search.limits import ErrorLimits

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """One ramp."""

    #: (n,) int32. Lowest storable threshold that lets each input leave.
    keys: KeyArray
    #: (n,) intp. First cut at which an input leaves; ``last + 1`` where none does.
    rank: IndexArray
    #: The boldest cut.
    last: int
    #: (n,) bool. Whether leaving here counts as an error.
    bad: BoolArray
    #: order and bad_rows: (m,), (e,) intp; inputs, and errors, that some cut lets leave, by rising key.
    order: IndexArray
    bad_rows: IndexArray
    #: end and bad_end: (last + 2,) intp; how many of those leave at each cut; the first entry is 0 and stands for no
    #: cut.
    end: IndexArray
    bad_end: IndexArray


class SearchSpace:
    """Everything about the records and the limits that a search needs, computed once and on demand."""

    def __init__(self, records: Records, limits: ErrorLimits) -> None:
        _check_shapes(records)
        self.records = records
        self.limits = limits
        self.n = len(records)
        wrong = ~records.final_agrees
        self.final_bad: BoolArray | None = wrong if wrong.any() else None
        self._columns: dict[int, Column] = {}
        self._reach: dict[int, int] = {}

    @property
    def plain(self) -> bool:
        """Whether there is one limit, and only exits make errors."""
        return self.final_bad is None and self.limits.group is None

    def column(self, ramp: int) -> Column:
        if ramp not in self._columns:
            self._columns[ramp] = self._make_column(ramp)
        return self._columns[ramp]

    def _make_column(self, ramp: int) -> Column:
        scores = self.records.uncertainty[:, ramp]
        if not (scores.min() >= 0 and scores.max() <= 1):  # NaN is neither
            row = int(np.flatnonzero(~((scores >= 0) & (scores <= 1)))[0])
            raise InvalidRecordsError(f"uncertainty[{row}, {ramp}] is {scores[row]}; every value must lie in [0, 1]")
        keys = leave_keys(scores)
        bad = ~self.records.agrees[:, ramp]
        # Keys and rows in one number: sorting them is several times faster than an indirect sort, and stable.
        order = np.sort((keys.astype(np.int64) << 32) | np.arange(self.n))
        by_key, order = order >> 32, order & 0xFFFFFFFF
        leaving = int(np.searchsorted(by_key, NEVER))
        by_key, order = by_key[:leaving], order[:leaving]
        wrong = bad[order]
        below = by_key[wrong]
        first = np.append(True, below[1:] > below[:-1])[: len(below)]
        end = np.concatenate(([0], np.searchsorted(by_key, below[first]), [leaving]))
        bad_end = np.concatenate(([0], np.flatnonzero(first), [len(below)]))
        rank = np.full(self.n, len(end) - 1)
        rank[order] = np.repeat(np.arange(len(end) - 1), np.diff(end))
        return Column(keys, rank, len(end) - 2, bad, order, order[wrong], end, bad_end)

    def boldest(self, active: tuple[int, ...]) -> tuple[int, ...]:
        """Per ramp the boldest cut of any plan within the limits."""
        gone: BoolArray | None = None
        out = []
        for ramp in active:
            out.append(int(self.boldest_after(gone, [ramp])[0]))
            leaves = self.column(ramp).rank <= out[-1]
            gone = leaves if gone is None else gone | leaves
        return tuple(out)

    def boldest_after(self, gone: BoolArray | None, ramps: Sequence[int]) -> IndexArray:
        """Per ramp its boldest cut, when earlier ramps can take the inputs ``gone`` (n,): errors that they cannot must
        fit."""
        lasts = [min(self._reach.get(ramp, sys.maxsize), self.column(ramp).last) for ramp in ramps]
        columns = [self.column(ramp) for ramp in ramps]
        near = [c.bad_rows[: c.bad_end[last + 1]] for c, last in zip(columns, lasts, strict=True)]
        rows = np.concatenate(near)
        ends = np.cumsum([len(some) for some in near])
        over = self.limits.first_over(rows, ends, None if gone is None else ~gone.take(rows))
        return np.array(
            [
                last if row == end else c.rank[rows[row]] - 1
                for c, last, row, end in zip(columns, lasts, over.tolist(), ends.tolist(), strict=True)
            ]
        )

    def prepare(self) -> None:
        """Find the boldest cut of any ramp in any plan, which spares the search of many sets most of the errors."""
        ramps = tuple(range(self.records.n_ramps))
        self._reach = dict(zip(ramps, self.boldest(ramps), strict=True))

    def keys_of(self, active: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[int, ...]:
        """The lowest thresholds, as keys, under which the same inputs leave as under these cuts; 0 where none
        leaves."""
        alive = np.ones(self.n, dtype=bool)
        keys = []
        for ramp, cut in zip(active, cuts, strict=True):
            column = self.column(ramp)
            leaves = alive & (column.rank <= cut)
            keys.append(int(column.keys[leaves].max(initial=0)))
            alive &= ~leaves
        return tuple(keys)


def _check_shapes(records: Records) -> None:
    n, r = records.uncertainty.shape
    wanted = {
        "agrees": (records.agrees.shape, (n, r)),
        "final_agrees": (records.final_agrees.shape, (n,)),
        "segment_seconds": (records.costs.segment_seconds.shape, (r + 1,)),
        "ramp_seconds": (records.costs.ramp_seconds.shape, (r,)),
        "slice": (None if records.slice_id is None else records.slice_id.shape, (n,)),
    }
    for name, (shape, needed) in wanted.items():
        if shape is not None and shape != needed:
            raise InvalidRecordsError(f"{name} has shape {shape}; it needs {needed}")
