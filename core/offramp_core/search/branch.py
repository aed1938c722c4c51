"""Branch and bound over sets of ramps and over boxes of cuts, best bound first.

Every set of ramps is bounded once (:mod:`sweep`). The most promising set or box is then divided into cells
(:mod:`boxes`); the plans at their corners are tried, cells that cannot beat the best plan are forgotten, and the
others become smaller boxes. What is left in the queue at any moment bounds all plans not yet seen, so the
search may stop at any moment with a proven gap.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from offramp_core.records import IndexArray
from offramp_core.search.boxes import Box, Cells, Floats, divide, whole
from offramp_core.search.objective import Pricing, as_sets
from offramp_core.search.space import SearchSpace
from offramp_core.search.sweep import Prefix, Sweep

PARTS = {1: 4096, 2: 96, 3: 23, 4: 10, 5: 6, 6: 4}  # of each ramp's range, by number of ramps: some 10,000 cells a box
SMALLER = 0.5  # of a box: where what may win fills no more of it, it is divided again as a whole
_GROWN_BOXES = 60
_ROUNDING = 1e-12  # of the backbone's time: a plan must be better by more than the sums' rounding


@dataclass(frozen=True, slots=True)
class Choice:
    """Ramps, their cuts, and the weighted seconds they save over all records against no ramps."""

    gain: float
    active: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(order=True, slots=True)
class _Node:
    """A set of ramps, or a box of its cuts, and what none of its plans exceeds."""

    negative_bound: float
    number: int
    active: tuple[int, ...] = field(compare=False)
    box: Box | None = field(compare=False)


class BranchAndBound:
    """One search; feed it with :meth:`add` or :meth:`sweep`, then :meth:`run`."""

    def __init__(
        self,
        space: SearchSpace,
        pricing: Pricing,
        *,
        best: Choice | None,
        node_limit: int,
        max_gap: float = 0.0,
        tolerance: float = 0.0,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self.space = space
        self.pricing = pricing
        self.best = best
        self.nodes = 0
        self.cut_short = False
        self.ceiling = np.inf
        self.scale = space.n * pricing.scale
        self._node_limit = node_limit
        self._max_gap = max_gap * self.scale
        self._tolerance = max(tolerance, _ROUNDING) * self.scale
        self._should_stop = should_stop
        self._need = pricing.needed(space.n)
        self._heap: list[_Node] = []
        self._numbers = count()
        self._opened: set[tuple[int, ...]] = set()
        self._worths: dict[tuple[int, ...], tuple[Floats, Floats | None]] = {}
        self._dropped = -np.inf  # highest bound of what was given up although it might still win by a little

    @property
    def bound(self) -> float:
        """No plan among those fed gains more than this many weighted seconds."""
        top = -self._heap[0].negative_bound if self._heap else -np.inf
        return float(max(top, self._dropped, self.best_gain))

    @property
    def best_gain(self) -> float:
        return self.best.gain if self.best is not None else -np.inf

    @property
    def nodes_left(self) -> int:
        return max(0, self._node_limit - self.nodes)

    def prepare(self) -> bool:
        """Sort the inputs at every ramp, and bound all plans at once; False when a limit came first."""
        self.ceiling = self.space.n * (_worth_of_leaving(self.pricing)[0] + _worth_of_tail(self.pricing))
        for ramp in range(self.space.records.n_ramps):
            if self.stopped():
                return False
            self.space.column(ramp)
        self.space.prepare()
        self.ceiling = ceiling(self.space, self.pricing)
        return True

    def add(self, active: tuple[int, ...]) -> None:
        """All plans of one set of ramps."""
        self._opened.add(active)
        self._push(self.ceiling, active, None)

    def sweep(self, size: int, allowed: Callable[[Sequence[int]], bool]) -> bool:
        """All plans of all allowed sets of ``size`` ramps; False when a limit came first."""
        sweep = Sweep(self.space, size)
        return self._sweep(sweep, sweep.empty, size, allowed)

    def grow(self, allowed: Callable[[Sequence[int]], bool], *, swap: bool) -> None:
        """Try the ramps of the best plan and one more; with ``swap`` also one of those exchanged for another, until
        nothing improves."""
        if self.best is None:
            return
        every, chosen = range(self.space.records.n_ramps), self.best.active
        self._try([(*chosen, ramp) for ramp in every], allowed)
        while swap and self.best.active != chosen and not self.stopped():
            chosen = self.best.active
            self._try([(*chosen[:i], *chosen[i + 1 :], ramp) for i in range(len(chosen)) for ramp in every], allowed)

    def _try(self, sets: list[tuple[int, ...]], allowed: Callable[[Sequence[int]], bool]) -> None:
        for ramps in sets:
            active = tuple(sorted(set(ramps)))
            if len(active) < len(ramps) or active in self._opened or not allowed(active):
                continue
            if self.stopped():
                return
            self._opened.add(active)
            self._open(active, None, self.ceiling)
        self.run(_GROWN_BOXES)

    def run(self, boxes: int = sys.maxsize) -> None:
        """Until nothing can beat the best plan by more than the gap asked for, so many boxes are divided, or a limit is
        reached."""
        for _ in range(boxes):
            if not self._heap or not self._may_win(-self._heap[0].negative_bound):
                return
            if self.bound <= self.best_gain + self._max_gap or self.stopped():
                return
            node = heapq.heappop(self._heap)
            self._open(node.active, node.box, -node.negative_bound)

    def stopped(self) -> bool:
        """Whether a limit was reached; remembered."""
        if not self.cut_short:
            self.cut_short = self.nodes >= self._node_limit or (self._should_stop is not None and self._should_stop())
        return self.cut_short

    def _sweep(self, sweep: Sweep, prefix: Prefix, more: int, allowed: Callable[[Sequence[int]], bool]) -> bool:
        first = prefix.ramps[-1] + 1 if prefix.ramps else 0
        ramps = [r for r in range(first, self.space.records.n_ramps) if allowed((*prefix.ramps, r))]
        if self.stopped():
            return not ramps
        if more == 1:
            self._bound_sets(sweep, prefix, ramps)
            return True
        return all(self._sweep(sweep, longer, more - 1, allowed) for longer in sweep.extend(prefix, ramps))

    def _bound_sets(self, sweep: Sweep, prefix: Prefix, lasts: list[int]) -> None:
        if not lasts:
            return
        self.nodes += len(lasts)
        sets = as_sets(prefix.ramps, lasts)
        bounds = sweep.bounds(prefix, lasts, self.pricing.values(sets), self._tails(sets), self._need)
        for last, bound in zip(lasts, bounds.tolist(), strict=True):
            if (active := (*prefix.ramps, last)) not in self._opened and self._may_win(bound):
                self._push(bound, active, None)

    def _open(self, active: tuple[int, ...], box: Box | None, bound: float) -> None:
        """Divide a box, try its corners, and keep what may still win."""
        self.nodes += 1
        values, tails = self._worth(active)
        cells, inside = divide(
            self.space,
            whole(self.space, active) if box is None else box,
            parts=PARTS[len(active)],
            values=values,
            tails=tails,
            need=self._need,
        )
        corner = int(cells.corner.argmax())
        if (gain := float(cells.corner.flat[corner])) > self.best_gain + _ROUNDING * self.scale:
            cell = tuple(int(i) for i in np.unravel_index(corner, cells.corner.shape))
            self.best = Choice(gain, active, cells.cuts(cell))
        for low, high, top in self._keep(cells):
            self._push(min(top, bound), active, Box(active, low, high, inside))

    def _keep(self, cells: Cells) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
        """Boxes around the cells that may win, with their bounds: one where that is much smaller than the whole, else
        two."""
        keep = cells.bound > self.best_gain + self._tolerance
        if self._tolerance > _ROUNDING * self.scale:
            self._dropped = max(self._dropped, float(cells.bound.max(initial=-np.inf, where=~keep)))
        kept = np.array(np.unravel_index(keep.ravel().nonzero()[0], keep.shape))
        if not kept.size:
            return
        first, last = kept.min(axis=1), kept.max(axis=1)
        halves = [kept]
        if math.prod((last - first + 1).tolist()) > SMALLER * keep.size:
            widths = [(e[-1] - e[0]) / (len(e) - 1) for e in cells.edges] * (last > first)
            axis = int(np.argmax(widths))
            upper = kept[axis] >= (first[axis] + last[axis] + 1) // 2
            halves = [kept[:, ~upper], kept[:, upper]]
        for half in halves:
            if half.size:
                top = float(cells.bound[tuple(half)].max())
                yield cells.low(half.max(axis=1).tolist()), cells.cuts(half.min(axis=1).tolist()), top

    def _worth(self, active: tuple[int, ...]) -> tuple[Floats, Floats | None]:
        if active not in self._worths:
            self._worths[active] = self.pricing.values(active), self._tails(active)
        return self._worths[active]

    def _tails(self, active: Sequence[int] | IndexArray) -> Floats | None:
        tails = self.pricing.tails(active)
        return None if tails is None else tails * self.space.n

    def _may_win(self, bound: float) -> bool:
        """Whether a node is worth opening; one that is not but might win by less than the tolerance counts in the
        gap."""
        if bound > self.best_gain + self._tolerance:
            return True
        self._dropped = max(self._dropped, bound)
        return False

    def _push(self, bound: float, active: tuple[int, ...], box: Box | None) -> None:
        heapq.heappush(self._heap, _Node(-bound, next(self._numbers), active, box))


def ceiling(space: SearchSpace, pricing: Pricing) -> float:
    """More than any plan can gain: every input leaves, for nothing, at the first ramp that answers it correctly.

    Ramps are closed to inputs so uncertain that no plan within the limits lets them leave there. The inputs with most
    to gain from a wrong answer, as many as the limits allow, leave wherever they can.
    """
    n_ramps = space.records.n_ramps
    worth = _worth_of_leaving(pricing)
    right, wrong = np.zeros(space.n), np.zeros(space.n)
    boldest = space.boldest(tuple(range(n_ramps)))
    for ramp in range(n_ramps - 1, -1, -1):
        column = space.column(ramp)
        leaves = column.rank <= boldest[ramp]
        np.maximum(right, worth[ramp], out=right, where=leaves & ~column.bad)
        np.maximum(wrong, worth[ramp], out=wrong, where=leaves)
    extra = np.sort(np.maximum(wrong - right, 0.0))[::-1]
    return float(right.sum() + extra[: space.limits.most_errors].sum() + space.n * _worth_of_tail(pricing))


def _worth_of_leaving(pricing: Pricing) -> Floats:
    """What a request saves of mean and busy time by leaving at each ramp if ramps cost nothing, (R,)."""
    w = pricing.weights
    time, busy = (c.total - c.base - np.cumsum(c.segment)[:-1] for c in (pricing.time, pricing.busy))
    return np.asarray(w.mean * time + w.busy * busy)


def _worth_of_tail(pricing: Pricing) -> float:
    return float(pricing.weights.tail * pricing.time.segment[1:].sum())
