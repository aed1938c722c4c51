"""Bounds on many ranges of cuts at once.

A *box* is a range of cuts per active ramp. Each range is divided into a few parts, and an input is coded by the
first part at which it leaves each ramp; one histogram of these codes and a running sum per axis then tell, for
every cell (one part per ramp), how many inputs are still in after each ramp. Gain rises with every threshold
and a ramp's errors fall with the thresholds before it, so for all plans of a cell

    gain   <= gain of its boldest corner,
    errors >= per ramp, errors of its most cautious cut among the inputs that the boldest cuts before leave in.

Cells whose errors cannot keep the limits hold no plan. A cell that holds plans although its boldest corner has too many
errors is bounded more tightly by Lagrange's relaxation (Everett, 1963): such a plan has lower cuts, so it sheds errors
and moves other inputs to later exits. At any price per error it gains at most the corner's gain, less the price of the
errors that are too many, plus the most that lower cuts can bring at that price. Per ramp that is a maximum of a running
sum, when all errors may be shed but only inputs that no earlier ramp can take are sure to be moved. The corners
themselves are plans, and where every part is a single cut the bound is exact. Inputs that do the same under every plan
of a box are settled: they are counted once and left out of the histograms of all boxes inside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import numpy.typing as npt

from offramp_core.records import BoolArray, IndexArray
from offramp_core.search.pace import PACE
from offramp_core.search.space import Ints, SearchSpace

Floats = npt.NDArray[np.float64]
_LONG_AXIS = 32


@dataclass(frozen=True, slots=True)
class Open:
    """The inputs of a box whose fate depends on the plan, and the count of the others."""

    #: (m,) intp, optional. Row numbers; None for all.
    rows: IndexArray | None
    #: (d + 1,) float64. Settled inputs still in before each ramp and at the end.
    still_in: Floats
    #: (1 + S,) int64. Errors among the settled inputs, by limit.
    charged: Ints


@dataclass(frozen=True, slots=True)
class Box:
    """Ranges of cuts, ends included, of the ramps ``active``; ``inside`` holds at least its open inputs."""

    active: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    inside: Open


@dataclass(frozen=True, slots=True)
class Cells:
    """A box's cells, boldest first along every axis."""

    #: (P1, ..., Pd) float64. No plan of the cell gains more; -inf where none keeps the limits.
    bound: Floats
    #: (P1, ..., Pd) float64. What the cell's boldest corner gains; -inf where it does not keep the limits.
    corner: Floats
    #: tuple of (P + 1,) intp. Per ramp, rising: part p, counted from the most cautious, has the cuts edges[p] + 1 ...
    #: edges[p + 1].
    edges: tuple[IndexArray, ...]

    def cuts(self, cell: Sequence[int]) -> tuple[int, ...]:
        """The boldest corner of a cell."""
        return tuple(int(e[len(e) - 1 - i]) for e, i in zip(self.edges, cell, strict=True))

    def low(self, cell: Sequence[int]) -> tuple[int, ...]:
        """The most cautious cuts of a cell."""
        return tuple(int(e[len(e) - 2 - i]) + 1 for e, i in zip(self.edges, cell, strict=True))


def whole(space: SearchSpace, active: tuple[int, ...]) -> Box:
    """The box of all plans of some ramps."""
    nothing = Open(None, np.zeros(len(active) + 1), np.zeros(len(space.limits.most), dtype=np.int64))
    return Box(active, (0,) * len(active), space.boldest(active), nothing)


def settle(space: SearchSpace, box: Box) -> tuple[Box, list[IndexArray]]:
    """Take the inputs out of a box that do the same under all its plans; also the ranks at each ramp of those left."""
    rows = box.inside.rows
    still_in, charged = box.inside.still_in.copy(), box.inside.charged.copy()
    columns = [space.column(ramp) for ramp in box.active]
    ranks = [c.rank if rows is None else c.rank.take(rows) for c in columns]
    undecided: BoolArray | None = None
    unsettled = np.zeros(len(ranks[0]), dtype=bool)
    for level, (column, rank) in enumerate(zip(columns, ranks, strict=True)):
        passes = rank > box.low[level]
        stays = rank > box.high[level]
        if undecided is not None:
            passes |= ~undecided
            stays &= undecided
        gone = (~passes).nonzero()[0]
        if len(gone):
            still_in[: level + 1] += len(gone)
            _charge(space, charged, gone if rows is None else rows.take(gone), column.bad)
        unsettled |= passes & ~stays if undecided is None else passes & undecided & ~stays
        undecided = stays
    assert undecided is not None
    left = undecided.nonzero()[0]
    still_in += len(left)
    if space.final_bad is not None:
        _charge(space, charged, left if rows is None else rows.take(left), space.final_bad)
    kept = unsettled.nonzero()[0]
    inside = Open(kept if rows is None else rows.take(kept), still_in, charged)
    return Box(box.active, box.low, box.high, inside), [rank.take(kept) for rank in ranks]


def _charge(space: SearchSpace, charged: Ints, rows: IndexArray, bad: BoolArray) -> None:
    charged += space.limits.charge(rows[bad.take(rows)])


def gain_of(still_in: Sequence[Floats | Ints], values: Floats, tails: Floats | None, need: int) -> Floats:
    """Gains from the inputs still in before each ramp and at the end.

    Parameters
    ----------
    still_in : sequence of d + 1 arrays that broadcast
    values : (..., d + 1) float64
        Gain of an input that leaves at each ramp, and of one that takes no exit. Leading axes are those of
        ``still_in``.
    tails : (..., d + 1) float64, optional
        Gain of a plan under which at least ``need`` inputs have left by each ramp (or not before the end).
    """

    def wide(column: Floats, like: Floats | Ints) -> Floats:
        return column.reshape(column.shape + (1,) * (like.ndim - column.ndim))

    n = still_in[0]
    gain = wide(values[..., 0], n) * n
    for level, left in enumerate(still_in[1:], start=1):
        gain = gain + wide(values[..., level] - values[..., level - 1], left) * left
    if tails is not None:
        tail = wide(tails[..., -1], n)
        for level in range(len(still_in) - 2, -1, -1):
            tail = np.where(n - still_in[level + 1] >= need, wide(tails[..., level], n), tail)
        gain = gain + tail
    return gain


def divide(
    space: SearchSpace, box: Box, *, parts: int, values: Floats, tails: Floats | None = None, need: int = 0
) -> tuple[Cells, Open]:
    """Bound all cells of a box whose ranges are cut into at most ``parts`` each; also the inputs that are open in it.

    The gains are those of :func:`gain_of`.
    """
    edges = tuple(_edges(low, high, parts) for low, high in zip(box.low, box.high, strict=True))
    n_cells = math.prod(len(e) - 1 for e in edges)
    n_rows = space.n if box.inside.rows is None else len(box.inside.rows)
    if space.plain and tails is None and PACE.compiled(n_rows + n_cells):
        return _divide_plain(space, box, edges, values)
    box, ranks = settle(space, box)
    counter = _Counter(space, box, edges, ranks)
    gain = gain_of(counter.still_in(), values, tails, need)
    spare: Floats | Ints = (space.limits.most - box.inside.charged).reshape((-1,) + (1,) * len(edges))
    if space.final_bad is not None:
        spare = spare - counter.stays(space.final_bad)
    errors = counter.errors(0)
    for level in range(1, len(edges)):
        errors = errors + counter.errors(level)
    within: BoolArray = np.all(errors <= spare, axis=1)
    bound = np.minimum(gain, gain + counter.relaxed(gain, errors[1, 0] - spare[0], values))
    return Cells(np.where(within[0], bound, -np.inf), np.where(within[1], gain, -np.inf), edges), box.inside


def _divide_plain(space: SearchSpace, box: Box, edges: tuple[IndexArray, ...], values: Floats) -> tuple[Cells, Open]:
    """The same by compiled loops."""
    from offramp_core.search import compiled

    rows, columns = box.inside.rows, [space.column(ramp) for ramp in box.active]
    ranks = np.stack([c.rank if rows is None else c.rank.take(rows) for c in columns])
    bad = np.stack([c.bad if rows is None else c.bad.take(rows) for c in columns])
    still_in, charged = box.inside.still_in.copy(), box.inside.charged.copy()
    kept = compiled.settle(ranks, bad, np.array(box.low), np.array(box.high), still_in, charged)
    inside = Open(kept if rows is None else rows.take(kept), still_in, charged)
    parts = np.array([len(e) - 1 for e in edges])
    padded = np.zeros((len(edges), int(parts.max()) + 1), dtype=np.int64)
    for row, e in zip(padded, edges, strict=True):
        row[: len(e)] = e
    spare = float(space.limits.most[0] - charged[0])
    bound, corner = compiled.bound_cells(ranks, bad, kept, padded, parts, still_in, values, spare)
    return Cells(bound.reshape(parts), corner.reshape(parts), edges), inside


def _edges(low: int, high: int, parts: int) -> IndexArray:
    parts = min(parts, high - low + 1)
    return np.arange(parts + 1) * (high - low + 1) // parts + (low - 1)


def running_sums(table: Floats, *, first: int = 0) -> Floats:
    """Along every axis from ``first`` on; ``table`` is overwritten.

    numpy's own running sum starts anew at each row, and rows are short: products with a triangle of ones and sums of
    whole slices are faster.
    """
    for axis in range(first, table.ndim):
        size = table.shape[axis]
        if size > _LONG_AXIS:
            table.cumsum(axis=axis, out=table)
        elif axis == table.ndim - 1:
            table = table @ _triangle(size)
        elif axis == table.ndim - 2:
            table = _triangle(size).T @ table
        else:
            for one, following in pairwise(table.swapaxes(0, axis)):
                np.add(following, one, out=following)
    return table


@cache
def _triangle(size: int) -> Floats:
    """Ones on and above the diagonal: x @ triangle is the running sum of x."""
    return np.triu(np.ones((size, size)))


class _Counter:
    """Counts the open inputs of a box by their parts: per ramp 0 where it never lets them leave, up to P where even its
    most cautious does.

    One number codes an input's parts at the first k ramps. Running sums over these parts from 0 on are inputs *still
    in* after a cell's boldest cuts.
    """

    def __init__(self, space: SearchSpace, box: Box, edges: tuple[IndexArray, ...], ranks: list[IndexArray]) -> None:
        self._limits = space.limits
        self._settled = box.inside.still_in
        self._rows = box.inside.rows
        self._columns = [space.column(ramp) for ramp in box.active]
        self._edges = edges
        self._ranks = ranks
        self._parts = [len(e) - 1 for e in edges]
        self._sizes = [1, *accumulate((p + 1 for p in self._parts), mul)]
        self._codes: list[IndexArray] = []
        for level, (column, rank) in enumerate(zip(self._columns, ranks, strict=True)):
            part = code_table(edges[level][1:], column.last).take(rank)
            self._codes.append(self._codes[-1] * (self._parts[level] + 1) + part if level else part)

    def still_in(self) -> list[Floats]:
        """Open and settled inputs before each ramp and at the end: (d + 1) arrays that broadcast over the cells."""
        d = len(self._parts)
        counts = np.bincount(self._codes[-1], minlength=self._sizes[-1]).reshape([p + 1 for p in self._parts])
        table = running_sums(counts.astype(np.float64))
        kept = [slice(p) for p in self._parts]
        return [table[(*kept[:k], *(slice(-1, None),) * (d - k))] + self._settled[k] for k in range(d + 1)]

    def errors(self, level: int) -> Floats:
        """Errors at one ramp by limit and cell, (2, 1 + S, P1, ..., P_level, 1, ...): at each part's most cautious cut,
        and at its boldest.

        The ramps before it are at their boldest.
        """
        column, rows, edges = self._columns[level], self._rows, self._edges[level]
        bad = (column.bad if rows is None else column.bad.take(rows)).nonzero()[0]
        rank, size = self._ranks[level].take(bad), self._sizes[level + 1]
        before = self._codes[level - 1].take(bad) * (self._parts[level] + 1) if level else 0
        if rows is not None:
            bad = rows.take(bad)
        table = np.empty((2, len(self._limits.most), size))
        for cuts, counts in zip((edges[:-1] + 1, edges[1:]), table, strict=True):
            counts[:] = self._limits.tabulate(bad, code_table(cuts, column.last).take(rank) + before, size)
        table = running_sums(table.reshape(2, -1, *(p + 1 for p in self._parts[: level + 1])), first=2)
        kept = (slice(None), slice(None), *(slice(p) for p in self._parts[:level]))
        left = table[(*kept, slice(-1, None))] - table[(*kept, slice(self._parts[level]))]
        return left.reshape(left.shape + (1,) * (len(self._parts) - level - 1))

    def relaxed(self, gain: Floats, over: Floats, values: Floats) -> Floats:
        """What any plan of a cell within the first limit can gain beyond the cell's boldest corner, at most (mostly
        negative), by cell.

        Parameters
        ----------
        gain, over : (P1, ..., Pd) float64
            Of the corners; ``over`` is errors beyond the limit.
        values : (d + 1,) float64
            As in :func:`gain_of`.
        """
        boldest, cautious = (0,) * gain.ndim, (-1,) * gain.ndim
        if not over[boldest] > max(0.0, over[cautious]):
            return np.zeros(())
        price = float((gain[boldest] - gain[cautious]) / (over[boldest] - over[cautious]))
        out = -price * over
        sure = np.ones(len(self._ranks[0]), dtype=bool)  # to come to this ramp
        for level, (column, rank, edges) in enumerate(zip(self._columns, self._ranks, self._edges, strict=True)):
            moves = ((rank > edges[0] + 1) & (rank <= edges[-1])).nonzero()[0]
            rows = moves if self._rows is None else self._rows.take(moves)
            charge = price * column.bad.take(rows)
            step = float(values[level] - values[level + 1])
            worth = np.where(charge > 0, np.maximum(charge - step, 0.0), -step * sure.take(moves))
            # What the inputs of all bolder cuts are worth, by cut: the most of each part, over that of its boldest.
            by_cut = np.bincount(rank.take(moves) - (edges[0] + 2), worth, minlength=edges[-1] - edges[0])
            above = by_cut[::-1].cumsum()[::-1]
            ends = edges - edges[0]
            most = np.maximum.reduceat(above, ends[:-1]) - above[ends[1:] - 1]
            out = out + most[::-1].reshape((-1,) + (1,) * (gain.ndim - level - 1))
            sure &= rank > edges[-1]
        return out

    def stays(self, wrong: BoolArray) -> Floats:
        """Wrong final answers of open inputs that take no exit, by limit and cell."""
        rows = self._rows
        found = np.flatnonzero(wrong if rows is None else wrong.take(rows))
        table = self._limits.tabulate(
            found if rows is None else rows.take(found), self._codes[-1].take(found), self._sizes[-1]
        ).reshape(-1, *(p + 1 for p in self._parts))
        return running_sums(table, first=1)[(slice(None), *(slice(p) for p in self._parts))]


def code_table(upper: IndexArray, last: int) -> IndexArray:
    """Codes by rank, (last + 2,): the number of parts whose given cut lets an input of that rank leave."""
    counts = np.empty(len(upper) + 1, dtype=np.intp)
    counts[0], counts[-1] = upper[0] + 1, last + 1 - upper[-1]
    counts[1:-1] = upper[1:] - upper[:-1]
    return np.arange(len(upper), -1, -1).repeat(counts)
