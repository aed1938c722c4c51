"""The last two ramps, solved at once for every allocation of the error budget between them.

Instead of recursing once per allocation, all cuts of the first ramp are laid out along one axis. Each input
knows the first cut at which it is gone (its *group*); counting pairs (group, position at the second ramp) in a
small two-dimensional histogram then tells, for every cut, how many are left to leave at the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.records import BoolArray
from offramp_core.search.queues import Ints, Queue

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Groups:
    """The first ramp's cuts: how many leave at each and with how many errors; ``of_row`` (n,) is the first cut an input leaves at."""

    sizes: Ints
    errors: Ints
    of_row: npt.NDArray[np.int32]
    final_wrong_left: Ints | None  # after each cut, inputs still in whose final answer is wrong


@dataclass(frozen=True, slots=True)
class PairChoice:
    """For every cut of the first ramp the best cut of the second: how many leave there, and up to which position of its queue.

    ``position`` is -1 where the budget cannot be met.
    """

    leaving: Ints
    position: Ints


def make_groups(first: Queue, errors: int, alive: BoolArray, final_wrong: BoolArray | None) -> Groups:
    """Lay out the cuts of a pair's first ramp; ``errors`` is the budget of the pair."""
    sizes, errs = first.cuts(errors)
    of_row = np.full(len(alive), len(sizes), dtype=np.int32)
    of_row[first.rows[: sizes[-1]]] = np.repeat(np.arange(len(sizes), dtype=np.int32), np.diff(sizes, prepend=0))
    left = None
    if final_wrong is not None:
        gone = np.concatenate(([0], np.cumsum(final_wrong[first.rows])))[sizes]
        left = int((final_wrong & alive).sum()) - gone
    return Groups(sizes, errs, of_row, left)


def choose_second(groups: Groups, second: Queue, errors: int, final_wrong: BoolArray | None) -> PairChoice:
    """The last ramp takes all the budget left: for each cut of the first, its largest number of leavers within it."""
    group = groups.of_row[second.rows]
    spare = errors - groups.errors
    if groups.final_wrong_left is not None and final_wrong is not None:
        return _choose_with_final(groups, second, group, spare, final_wrong)
    blocked = _survivors(group, second, spare) <= spare[:, None]
    at = blocked.sum(axis=1)  # index of the error that blocks; all errors fit where there is none
    position = np.append(second.start, len(second.rows))[np.where(at < len(second.bad), at, len(second.bad))]
    return PairChoice(_count_before(group, position, len(groups.sizes)), position)


def _survivors(group: npt.NDArray[np.int32], second: Queue, spare: Ints) -> Ints:
    """Errors of the second ramp's queue that survive each cut, counted up to and with each error: (cuts, errors).

    Only as many errors are laid out as the budget can reach past; few of a queue's errors ever matter.
    """
    total, shown = len(second.bad), 2 * (int(spare.max(initial=0)) + 4)
    cuts = np.arange(len(spare), dtype=np.int32)[:, None]
    while True:
        shown = min(shown, total)
        count = np.cumsum(group[second.bad[:shown]] > cuts, axis=1, dtype=np.int64)
        if shown == total or bool((count[:, -1] > spare).all()):
            return count
        shown *= 2


def _count_before(group: npt.NDArray[np.int32], position: Ints, n_cuts: int) -> Ints:
    """For cut c, the inputs before ``position[c]`` that are still in after it (group > c)."""
    edges, which = np.unique(position, return_inverse=True)
    segment = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
    code = segment * (n_cuts + 1) + group[: edges[-1]]
    table = np.bincount(code, minlength=len(edges) * (n_cuts + 1)).reshape(len(edges), n_cuts + 1)
    table = table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]  # before the edge, and in this group or a later one
    return np.asarray(table[which, np.arange(n_cuts) + 1], dtype=np.int64)


def _choose_with_final(
    groups: Groups, second: Queue, group: npt.NDArray[np.int32], spare: Ints, final_wrong: BoolArray
) -> PairChoice:
    """As above where some final answers are wrong: letting such an input leave may even repair an error."""
    assert groups.final_wrong_left is not None
    n_cuts = len(groups.sizes)
    # Errors among leavers never come back, so cuts of the second ramp beyond the budget stay out of reach here as well.
    shown = _survivors(group, second, spare).shape[1]
    edges = np.unique(
        np.append(second.start[:shown], len(second.rows) if shown == len(second.bad) else second.start[:shown][-1:])
    )
    at = np.broadcast_to(edges, (n_cuts, len(edges)))
    rows = second.rows
    wrong = np.zeros(len(rows), dtype=bool)
    wrong[second.bad] = True
    errors = _table_before(group, edges, n_cuts, wrong)
    repaired = _table_before(group, edges, n_cuts, final_wrong[rows])
    feasible = errors + groups.final_wrong_left[:, None] - repaired <= spare[:, None]
    last = feasible.shape[1] - 1 - feasible[:, ::-1].argmax(axis=1)
    position = np.where(feasible.any(axis=1), at[np.arange(n_cuts), last], -1)
    return PairChoice(_count_before(group, np.maximum(position, 0), n_cuts), position)


def _table_before(group: npt.NDArray[np.int32], edges: Ints, n_cuts: int, marked: BoolArray) -> Ints:
    """Marked inputs before each edge that are still in after each cut: (cuts, edges)."""
    segment = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
    code = (segment * (n_cuts + 1) + group[: len(segment)])[marked[: len(segment)]]
    table = np.bincount(code, minlength=len(edges) * (n_cuts + 1)).reshape(len(edges), n_cuts + 1)
    table = table.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.asarray(table[:, 1:].T, dtype=np.int64)
