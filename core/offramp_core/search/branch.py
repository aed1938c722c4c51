"""Branch and bound over ramps and over how the error budget is split between them.

A node fixes the first ramps of a plan (all but the last two, which `pairs` solves at once) and, for one of
them, a range of cuts [lo, hi]. Its bound removes everything the boldest cut of the range lets leave but charges
only the errors of the most cautious: whatever plan the range holds, its leavers here are among those removed,
what it leaves is no larger a problem, and its remaining budget no larger a budget. A range of one cut is exact.
Nodes are taken in order of their bound, so stopping at any moment leaves a proven gap. Where the budget is
large, pairs lay out only some of their cuts; each then stands for a range in the same way.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from offramp_core.records import BoolArray, IndexArray
from offramp_core.search.pairs import Groups, PairChoice, choose_second, make_groups
from offramp_core.search.queues import Cuts, SearchSpace

UNTHINNED = sys.maxsize
_COARSE_TOLERANCE = 5e-4  # of the backbone's time; a search over thinned cuts has about this error anyway
_LAST = -1  # as the end of a range: the boldest cut, whichever that is
_Pairs = tuple[tuple[float, int, int], ...]  # (bound, ramp, ramp)


@dataclass(frozen=True, slots=True)
class Choice:
    """Ramps, their grid keys, and the seconds they save over all records against no ramps."""

    gain: float
    active: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """What is left after cuts at the first ramps.

    ``left`` inputs are gone and have gained ``gain`` seconds, ramps after these not yet counted; ``errors`` of the budget are spent.
    """

    alive: BoolArray
    left: int = 0
    gain: float = 0.0
    errors: int = 0
    keys: tuple[int, ...] = ()


@dataclass(order=True, slots=True)
class _Node:
    negative_bound: float
    number: int
    prefix: tuple[int, ...] = field(compare=False)
    fixed: tuple[int, ...] = field(compare=False)
    lo: int = field(compare=False)
    hi: int = field(compare=False)
    pairs: _Pairs = field(compare=False)


class BranchAndBound:
    """The search for one error budget; create, feed it with :meth:`single` and :meth:`multi`, then :meth:`run`."""

    def __init__(
        self,
        space: SearchSpace,
        *,
        errors: int,
        best: Choice | None,
        node_limit: int,
        most_cuts: int = UNTHINNED,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.space = space
        self.errors = errors
        self.best = best
        self.nodes = 0
        self.cut_short = False
        self._node_limit = node_limit
        self._should_stop = should_stop
        self._heap: list[_Node] = []
        self._numbers = count()
        self._most_cuts = most_cuts
        self._dropped = -np.inf  # highest bound of what was given up although it might still win by a little
        tolerance = _COARSE_TOLERANCE if errors >= most_cuts else 1e-12
        self._tolerance = tolerance * space.n * space.records.costs.total_seconds
        self._everyone = np.ones(space.n, dtype=bool)
        self._cuts: dict[int, Cuts] = {}

    @property
    def bound(self) -> float:
        """No plan among those fed gains more than this many seconds."""
        top = -self._heap[0].negative_bound if self._heap else -np.inf
        return float(max(top, self._dropped, self.best_gain))

    @property
    def best_gain(self) -> float:
        return self.best.gain if self.best is not None else -np.inf

    def single(self, ramp: int) -> None:
        """Solve a plan of one ramp."""
        self.nodes += 1
        cuts = self._first_cuts(ramp)
        sizes = cuts.sizes
        wrong = self.space.final_wrong
        if wrong is not None:
            left = np.count_nonzero(wrong) - np.concatenate(([0], np.cumsum(wrong[cuts.rows])))[sizes]
            sizes = sizes[cuts.errors + left <= self.errors]
        if len(sizes):
            gain = float(sizes[-1] * self.space.behind[ramp] - self.space.n * self.space.ramp_seconds[ramp])
            self._offer(gain, (ramp,), lambda: (self._lowest_key(ramp, cuts.rows[: sizes[-1]]),))

    def multi(self, prefix: tuple[int, ...], pairs: Iterable[tuple[int, int]]) -> None:
        """Add all plans of the ramps ``prefix`` plus one of ``pairs`` (each deeper than the prefix)."""
        self._visit(prefix, (), 0, _LAST, tuple((np.inf, a, b) for a, b in pairs))

    def run(self) -> None:
        """Until nothing can beat the best plan, or a limit is reached."""
        while self._heap and self._may_win(-self._heap[0].negative_bound):
            if self.stopped():
                return
            node = heapq.heappop(self._heap)
            if node.lo == node.hi:
                self._visit(node.prefix, (*node.fixed, node.lo), 0, _LAST, node.pairs)
                continue
            middle = (node.lo + node.hi) // 2
            self._visit(node.prefix, node.fixed, node.lo, middle, node.pairs)
            self._visit(node.prefix, node.fixed, middle + 1, node.hi, node.pairs)

    def clear(self) -> None:
        """Forget the nodes left over."""
        self._heap.clear()

    def stopped(self) -> bool:
        """Whether a limit was reached; remembered."""
        if not self.cut_short:
            self.cut_short = self.nodes >= self._node_limit or (self._should_stop is not None and self._should_stop())
        return self.cut_short

    def _visit(self, prefix: tuple[int, ...], fixed: tuple[int, ...], lo: int, hi: int, pairs: _Pairs) -> None:
        """Bound a node on every pair that can still win; exact ones are offered, others queued."""
        view, hi, exact = self._descend(prefix, fixed, lo, hi)
        spare = self.errors - view.errors
        groups: dict[int, Groups] = {}
        kept: list[tuple[float, int, int]] = []
        for parent_bound, a, b in pairs:
            if not self._may_win(parent_bound):
                continue
            if a not in groups:
                groups = {
                    a: make_groups(
                        self.space.queue(a), spare, view.alive, self.space.final_wrong, most_cuts=self._most_cuts
                    )
                }
            bound = min(parent_bound, self._bound(view, (*prefix, a, b), groups[a], exact=exact))
            if exact:
                self._dropped = max(self._dropped, bound)
            elif self._may_win(bound):
                kept.append((bound, a, b))
        if kept:
            top = max(bound for bound, _, _ in kept)
            heapq.heappush(self._heap, _Node(-top, next(self._numbers), prefix, fixed, lo, hi, tuple(kept)))

    def _may_win(self, bound: float) -> bool:
        """Whether a node is worth opening; one that is not but might win by less than the tolerance counts in the gap."""
        if bound > self.best_gain + self._tolerance:
            return True
        self._dropped = max(self._dropped, bound)
        return False

    def _bound(self, view: _View, active: tuple[int, ...], groups: Groups, *, exact: bool) -> float:
        """Bound a view on one pair, offering the best plan where the view is exact."""
        thinned = groups.cuts.least_errors is not groups.cuts.errors
        bound = self._pair(view, active, groups, exact=exact and not thinned, optimistic=True)
        if exact and thinned:
            self._pair(view, active, groups, exact=True, optimistic=False)
        return bound

    def _descend(self, prefix: tuple[int, ...], fixed: tuple[int, ...], lo: int, hi: int) -> tuple[_View, int, bool]:
        """Take the node's cuts; the view, the range's end as a number, and whether the node is a single plan prefix."""
        view = _View(self._everyone)
        for level, ramp in enumerate(prefix):
            cuts = (
                self._first_cuts(ramp)
                if level == 0
                else self.space.queue(ramp).cuts(view.alive, self.errors - view.errors)
            )
            last = len(cuts.sizes) - 1
            if level < len(fixed):
                cut, charged = fixed[level], fixed[level]
            elif level == len(fixed):
                hi = last if hi == _LAST else hi
                cut, charged = hi, lo
            else:
                cut, charged = last, 0
            later = float(self.space.ramp_seconds[list(prefix[level + 1 :])].sum())
            leavers = cuts.rows[: cuts.sizes[cut]]
            view = self._leave(view, ramp, leavers, errors=int(cuts.errors[charged]), later_seconds=later)
        return view, hi, not prefix or (len(fixed) == len(prefix) - 1 and lo == hi)

    def _first_cuts(self, ramp: int) -> Cuts:
        if ramp not in self._cuts:
            self._cuts[ramp] = self.space.queue(ramp).cuts(self._everyone, self.errors)
        return self._cuts[ramp]

    def _leave(self, view: _View, ramp: int, leavers: IndexArray, *, errors: int, later_seconds: float) -> _View:
        alive = view.alive.copy()
        alive[leavers] = False
        return _View(
            alive,
            view.left + len(leavers),
            view.gain + len(leavers) * (float(self.space.behind[ramp]) + later_seconds),
            view.errors + errors,
            (*view.keys, self._lowest_key(ramp, leavers)),
        )

    def _pair(self, view: _View, active: tuple[int, ...], groups: Groups, *, exact: bool, optimistic: bool) -> float:
        """Most seconds saved with the last two of ``active`` after the view's cuts; offered as a plan where the view is exact."""
        space, seconds = self.space, self.space.ramp_seconds
        a, b = active[-2:]
        self.nodes += 1
        choice = choose_second(
            groups, space.queue(b), self.errors - view.errors, space.final_wrong, optimistic=optimistic
        )
        paid = float(seconds[list(active)].sum())
        base = view.gain + view.left * float(seconds[a] + seconds[b]) - space.n * paid
        gains = base + groups.cuts.sizes * (space.behind[a] + seconds[b]) + choice.leaving * space.behind[b]
        gains = np.where(choice.position >= 0, gains, -np.inf)
        cut = int(gains.argmax())
        gain = float(gains[cut])
        if exact:
            self._offer(gain, active, lambda: (*view.keys, *self._pair_keys(groups, choice, cut, (a, b))))
        return gain

    def _pair_keys(self, groups: Groups, choice: PairChoice, cut: int, ramps: tuple[int, int]) -> tuple[int, int]:
        a, b = ramps
        rows = self.space.queue(b).rows[: choice.position[cut]]
        return (
            self._lowest_key(a, groups.cuts.rows[: groups.cuts.sizes[cut]]),
            self._lowest_key(b, rows[groups.of_row[rows] > cut]),
        )

    def _lowest_key(self, ramp: int, leavers: IndexArray) -> int:
        """The lowest grid threshold that lets these leave, given in order: the cautious end of all that do the same."""
        return int(self.space.keys(ramp)[leavers[-1]]) if len(leavers) else 0

    def _offer(self, gain: float, active: tuple[int, ...], keys: Callable[[], tuple[int, ...]]) -> None:
        if gain > -np.inf and gain > self.best_gain + self._tolerance:
            self.best = Choice(gain, active, keys())
