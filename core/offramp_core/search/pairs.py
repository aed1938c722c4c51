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


def make_groups(first: Queue, errors: int, alive: BoolArray, final_wrong: BoolArray | None) -> Groups:
    """Lay out the cuts of a pair's first ramp; ``errors`` is the budget of the pair."""
    cuts = first.cuts(alive, errors)
    n_cuts = len(cuts.sizes)
    of_row = np.where(alive, n_cuts, GONE)
    of_row[cuts.rows] = np.repeat(np.arange(n_cuts), steps(cuts.sizes))
    left = None
    if final_wrong is not None:
        gone = np.concatenate(([0], np.cumsum(final_wrong[cuts.rows])))[cuts.sizes]
        left = np.count_nonzero(final_wrong & alive) - gone
    return Groups(cuts, of_row, left)


def choose_second(groups: Groups, second: Queue, errors: int, final_wrong: BoolArray | None) -> PairChoice:
    """The last ramp takes all the budget left: for each cut of the first, its largest number of leavers within it."""
    spare = errors - groups.cuts.errors
    group_of_bad = groups.of_row[second.bad_rows]
    alive_bad = np.flatnonzero(group_of_bad != GONE)
    errors_so_far = _errors_so_far(group_of_bad[alive_bad], spare)
    start = second.start[alive_bad[: errors_so_far.shape[1]]]
    if errors_so_far.shape[1] == len(alive_bad):
        start = np.append(start, len(second.rows))  # all its errors may fit
    if groups.final_wrong_left is not None and final_wrong is not None:
        return _choose_with_final(groups, second, spare, start, final_wrong)
    position = start[np.count_nonzero(errors_so_far <= spare[:, None], axis=1)]
    return PairChoice(_count_before(groups, second, position), position)


def steps(rising: Ints) -> Ints:
    """Differences from one to the next, the first from 0."""
    out = rising.copy()
    out[1:] -= rising[:-1]
    return out


def _errors_so_far(group_of_bad: IndexArray, spare: Ints) -> Ints:
    """Errors of the second ramp's queue that survive each cut, counted up to and with each error: (cuts, errors shown).

    Only as many are shown as the budget reaches past; few of a queue's errors ever matter.
    """
    total, shown = len(group_of_bad), 2 * (int(spare.max(initial=0)) + 4)
    cuts = np.arange(len(spare), dtype=np.int32)[:, None]
    while True:
        shown = min(shown, total)
        count = np.cumsum(group_of_bad[:shown].astype(np.int32) > cuts, axis=1, dtype=np.int32)
        if shown == total or bool((count[:, -1] > spare).all()):
            return np.asarray(count)
        shown *= 2


def _count_before(groups: Groups, second: Queue, position: Ints) -> Ints:
    """For cut c, the inputs before ``position[c]`` of the second queue that are still in after it."""
    order = position.argsort(kind="stable")
    table = _table(groups, second.rows, position[order])
    return np.asarray(table[np.arange(len(order)), order + 1][_inverse(order)])


def _choose_with_final(groups: Groups, second: Queue, spare: Ints, start: Ints, final_wrong: BoolArray) -> PairChoice:
    """As above where some final answers are wrong: letting such an input leave may even repair an error."""
    assert groups.final_wrong_left is not None
    n_cuts = len(spare)
    errors = np.zeros(len(groups.of_row), dtype=bool)
    errors[second.bad_rows] = True
    wrong = _table(groups, second.rows, start, errors)[:, 1 : n_cuts + 1].T
    repaired = _table(groups, second.rows, start, final_wrong)[:, 1 : n_cuts + 1].T
    feasible = wrong + groups.final_wrong_left[:, None] - repaired <= spare[:, None]
    last = feasible.shape[1] - 1 - feasible[:, ::-1].argmax(axis=1)
    position = np.where(feasible.any(axis=1), start[last], -1)
    return PairChoice(_count_before(groups, second, np.maximum(position, 0)), position)


def _table(groups: Groups, rows: IndexArray, edges: Ints, marked: BoolArray | None = None) -> Ints:
    """(Marked) inputs before each of the rising ``edges`` whose group is g or later: (edges, cuts + 2), the last column 0."""
    width = len(groups.cuts.sizes) + 2  # GONE first, then the cuts, then never
    rows = rows[: edges[-1]]
    code = np.repeat(np.arange(1, len(edges) * width, width), steps(edges))
    code += groups.of_row[rows]
    if marked is not None:
        code = code[marked[rows]]
    table = np.bincount(code, minlength=len(edges) * width).reshape(len(edges), width)
    later = table[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.asarray(later.cumsum(axis=0)[:, 1:])


def _inverse(order: IndexArray) -> IndexArray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse
