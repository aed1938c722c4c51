"""The last two ramps, solved at once for every allocation of the error budget between them.

Instead of recursing once per allocation, all cuts of the first ramp are laid out along one axis. Each input
knows the first cut at which it is gone (its *group*); counting inputs by group and by position at the second
ramp in a small two-dimensional histogram then tells, for every cut, how many are left to leave at the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.records import BoolArray, IndexArray
from offramp_core.search.queues import Cuts, Ints, Queue

Floats = npt.NDArray[np.float64]
GONE = -1  # group of an input that left before the pair


@dataclass(frozen=True, slots=True)
class Groups:
    """The first ramp's cuts, seen from the inputs.

    ``of_row`` (n,) is the first cut at which an input leaves, the number of cuts where it never does, ``GONE`` where it already has.
    ``final_wrong_left`` counts, after each cut, inputs still in whose final answer is wrong; None where no final answer is.
    """

    cuts: Cuts
    of_row: IndexArray
    final_wrong_left: Ints | None


@dataclass(frozen=True, slots=True)
class PairChoice:
    """For every cut of the first ramp the best cut of the second: how many leave there, and up to which position of its queue.

    ``position`` is -1 where the budget cannot be met.
    """

    leaving: Ints
    position: Ints


def make_groups(
    first: Queue, errors: int, alive: BoolArray, final_wrong: BoolArray | None, *, most_cuts: int
) -> Groups:
    """Lay out the cuts of a pair's first ramp, at most ``most_cuts``; ``errors`` is the budget of the pair."""
    cuts = first.cuts(alive, errors).thinned(most_cuts)
    n_cuts = len(cuts.sizes)
    of_row = np.where(alive, n_cuts, GONE)
    of_row[cuts.rows] = np.repeat(np.arange(n_cuts), steps(cuts.sizes))
    left = None
    if final_wrong is not None:
        gone = np.concatenate(([0], np.cumsum(final_wrong[cuts.rows])))[cuts.sizes]
        left = np.count_nonzero(final_wrong & alive) - gone
    return Groups(cuts, of_row, left)


def choose_second(
    groups: Groups, second: Queue, errors: int, final_wrong: BoolArray | None, *, optimistic: bool
) -> PairChoice:
    """The last ramp takes all the budget left: for each cut of the first, its largest number of leavers within it.

    ``optimistic`` charges thinned cuts only the errors of the most cautious one they stand for. What comes out is then no plan but a bound
    on all of those: they let fewer leave at the first ramp, and leave the second no more budget for no fewer inputs.
    """
    spare = errors - (groups.cuts.least_errors if optimistic else groups.cuts.errors)
    group_of_bad = groups.of_row[second.bad_rows]
    still_in = np.flatnonzero(group_of_bad != GONE)
    blocking, shown = _blocking_error(group_of_bad[still_in], spare)
    start = np.append(second.start[still_in[:shown]], len(second.rows))
    if groups.final_wrong_left is not None and final_wrong is not None:
        edges = start if shown == len(still_in) else start[:-1]
        return _choose_with_final(groups, second, spare, edges, final_wrong)
    position = start[blocking]
    return PairChoice(_count_before(groups, second, position), position)


def steps(rising: Ints) -> Ints:
    """Differences from one to the next, the first from 0."""
    out = rising.copy()
    out[1:] -= rising[:-1]
    return out


def _blocking_error(group_of_bad: IndexArray, spare: Ints) -> tuple[Ints, int]:
    """For each cut of the first ramp the error of the second's queue that its budget cannot take any more.

    Returns their indices, (cuts,), the number of errors shown where nothing blocks; and how many errors had to be laid out. Few of a
    queue's errors ever matter, so a short stretch is tried first.
    """
    total, shown = len(group_of_bad), 2 * (int(spare.max(initial=0)) + 4)
    cuts = np.arange(len(spare))
    while True:
        shown = min(shown, total)
        survives = np.flatnonzero(group_of_bad[:shown] > cuts[:, None])
        first = np.searchsorted(survives, np.append(cuts, len(cuts)) * shown)
        blocked = first[1:] - first[:-1] > spare
        if shown == total or blocked.all():
            blocking = np.full(len(spare), shown)
            blocking[blocked] = survives[(first[:-1] + spare)[blocked]] - (cuts * shown)[blocked]
            return blocking, shown
        shown *= 2


def _count_before(groups: Groups, second: Queue, position: Ints) -> Ints:
    """For cut c, the inputs before ``position[c]`` of the second queue that are still in after it."""
    order = position.argsort(kind="stable")
    table = _table(groups, second.rows, position[order])
    later = np.arange(table.shape[1]) > order[:, None] + 1
    count = np.empty_like(position)
    count[order] = (table * later).sum(axis=1)
    return count


def _choose_with_final(groups: Groups, second: Queue, spare: Ints, start: Ints, final_wrong: BoolArray) -> PairChoice:
    """As above where some final answers are wrong: letting such an input leave may even repair an error."""
    assert groups.final_wrong_left is not None
    n_cuts = len(spare)
    errors = np.zeros(len(groups.of_row), dtype=bool)
    errors[second.bad_rows] = True
    wrong = _after_each_cut(_table(groups, second.rows, start, errors), n_cuts)
    repaired = _after_each_cut(_table(groups, second.rows, start, final_wrong), n_cuts)
    feasible = wrong + groups.final_wrong_left[:, None] - repaired <= spare[:, None]
    last = feasible.shape[1] - 1 - feasible[:, ::-1].argmax(axis=1)
    position = np.where(feasible.any(axis=1), start[last], -1)
    return PairChoice(_count_before(groups, second, np.maximum(position, 0)), position)


def _table(groups: Groups, rows: IndexArray, edges: Ints, marked: BoolArray | None = None) -> Ints:
    """(Marked) inputs before each of the rising ``edges``, by group: (edges, cuts + 2), columns GONE, each cut, never."""
    width = len(groups.cuts.sizes) + 2
    rows = rows[: edges[-1]]
    code = np.repeat(np.arange(1, len(edges) * width, width), steps(edges))
    code += groups.of_row[rows]
    if marked is not None:
        code = code[marked[rows]]
    table = np.bincount(code, minlength=len(edges) * width).reshape(len(edges), width)
    return np.asarray(np.cumsum(table, axis=0, out=table))


def _after_each_cut(table: Ints, n_cuts: int) -> Ints:
    """Of a table, the inputs still in after each cut: (cuts, edges)."""
    later = table[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.asarray(later[:, 2 : n_cuts + 2].T)
