"""Apparate as published: a tiny window for thresholds, a slower loop for ramps, both on live traffic.

Source: Dai, Pan, Iyer, Li and Netravali, "Apparate: Rethinking Early Exits to Tame Latency-Throughput Tensions in ML
Serving" (SOSP 2024), arXiv:2312.05385, sections 3.2 and 3.3. Where what is known of the paper leaves a rule open, the
choice made is marked "Open:".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offramp_core.records import IndexArray, Records, SecondsArray
from offramp_lab.policies.base import Objective, Trace
from offramp_lab.policies.climb import Climbing, climb
from offramp_lab.policies.online import ServedStream
from offramp_lab.policies.planned import affordable, evenly_spaced

WINDOW = 16
ADJUST_EVERY = 128
CLIMBING = Climbing(step=0.1, smallest_step=0.01, below=False, idle_moves=False, trusts_final=True)


def published(_tune: Records, stream: Records, objective: Objective) -> Trace:
    """Serve a stream as the paper describes: evenly spaced ramps and thresholds 0 to begin with, then only what the
    stream teaches.

    Thresholds are climbed anew on the last 16 requests whenever the agreement of their answers falls below the target.
    Open: also as soon as the first 16 requests under a set of ramps are in, for at thresholds 0 agreement never falls;
    and answers given under thresholds that were replaced do not count against the new ones. Every 128 requests ramps
    are adjusted.
    """
    return _Apparate(stream, objective).run()


@dataclass(frozen=True, slots=True)
class _Period:
    """What the active ramps did since the last adjustment.

    ``utility`` is the seconds saved by inputs that left at a ramp less those it cost inputs that passed it, per
    request: (k,).
    """

    exits: SecondsArray
    utility: SecondsArray


class _Apparate:
    def __init__(self, stream: Records, objective: Objective) -> None:
        self._stream, self._objective = stream, objective
        self._served = ServedStream(stream, objective, evenly_spaced(stream, objective))
        self._ramps_since = 0  # scores of the present ramps are known from this row on
        self._untuned = True
        self._tuned_at = 0

    def run(self) -> Trace:
        row, n, size = 0, len(self._stream), self._objective.batch_size
        period = -(-ADJUST_EVERY // size) * size  # whole batches
        while row < n:
            end = min(row + period, n)
            self._serve_period(row, end)
            if end < n:
                self._adjust(row, end)
            row = end
        return self._served.trace()

    def _serve_period(self, row: int, end: int) -> None:
        while row < end:
            self._served.serve(end)
            row, due = self._first_trigger(row, end)
            if due:
                self._tune(row)

    def _first_trigger(self, start: int, end: int) -> tuple[int, bool]:
        """The first batch end at which thresholds are to be tuned; ``end`` and False when none is."""
        ends = self._served.batch_ends(start, end)
        first = max(self._tuned_at, start - WINDOW)
        wrong = np.append(0, np.cumsum(self._served.wrong(first, end)))
        begins = np.maximum(ends - WINDOW, self._tuned_at)
        share = (wrong[ends - first] - wrong[begins - first]) / (ends - begins)
        due = share > self._objective.budget
        if self._untuned:
            due |= ends - self._ramps_since >= WINDOW
        return int(ends[due.argmax()]) if due.any() else end, bool(due.any())

    def _tune(self, row: int) -> None:
        self._served.switch(row, self._served.active, self._climbed(row))
        self._tuned_at = row
        self._untuned = self._untuned and row - self._ramps_since < WINDOW

    def _climbed(self, row: int) -> tuple[float, ...]:
        window = self._stream.take(slice(max(row - WINDOW, self._ramps_since), row))
        return climb(window, self._served.active, self._objective.budget, CLIMBING).thresholds

    # --- ramps ---------------------------------------------------------------------------------------

    def _adjust(self, start: int, row: int) -> None:
        """Deactivate ramps that do not pay and try better places; where all pay, try an earlier place."""
        active, thresholds = self._served.active, self._served.thresholds
        seen = self._period(start, row, active, self._served.left[start:row])
        if not active or (seen.utility < 0).any():
            if active and self._rescued(start, row, seen):
                return
            keep = seen.utility >= 0
            new = _candidate(self._stream, active, keep, seen.exits, self._objective)
            kept = [(r, t) for r, t, k in zip(active, thresholds, keep, strict=True) if k]
        else:
            new, kept = _earlier(self._stream, active, thresholds, seen.utility, self._objective)
        self._install(row, kept if new is None else [*kept, (new, 0.0)])

    def _rescued(self, start: int, row: int, seen: _Period) -> bool:
        """Whether new thresholds alone make every ramp pay without saving less."""
        thresholds = self._climbed(row)
        period = self._stream.take(slice(start, row))
        trial = ServedStream(period, self._objective, self._served.active)
        trial.switch(0, self._served.active, thresholds)
        trial.serve(len(period))
        after = self._period(start, row, self._served.active, trial.left)
        if (after.utility < 0).any() or after.utility.sum() < seen.utility.sum():
            return False
        self._served.switch(row, self._served.active, thresholds)
        self._tuned_at = row
        return True

    def _period(self, start: int, row: int, active: tuple[int, ...], left: IndexArray) -> _Period:
        exits = np.array([np.count_nonzero(left == ramp) for ramp in active], dtype=np.float64) / (row - start)
        passed = 1.0 - np.cumsum(exits)
        return _Period(exits, _utility(self._stream, np.asarray(active, dtype=np.intp), exits, passed))

    def _install(self, row: int, pairs: list[tuple[int, float]]) -> None:
        pairs = sorted(pairs)
        active = tuple(ramp for ramp, _ in pairs)
        if set(active) - set(self._served.active):
            self._ramps_since, self._untuned = row, True
        self._served.switch(row, active, tuple(t for _, t in pairs))


def _utility(records: Records, ramps: IndexArray, exits: SecondsArray, passed: SecondsArray) -> SecondsArray:
    """Seconds per request that leavers save (the backbone behind the ramp), less what inputs that pass the ramp pay for
    it."""
    costs = records.costs
    behind = costs.total_seconds - np.cumsum(costs.segment_seconds)[:-1]
    utility: SecondsArray = exits * behind[ramps] - passed * costs.ramp_seconds[ramps]
    return utility


def _candidate(
    records: Records, active: tuple[int, ...], keep: np.ndarray, exits: SecondsArray, objective: Objective
) -> int | None:
    """The place that promises most after the latest ramp that pays; None when none promises anything.

    Ramps deactivated now cut the places behind the latest ramp that pays into intervals. The middle of each is a
    candidate. Its exit rate is at most that of the next later deactivated ramp and of all earlier ones together. Open:
    behind the last deactivated ramp, all that is left may leave. When no candidate promises a gain, the middles of what
    is left behind the candidates are tried.
    """
    kept = tuple(r for r, k in zip(active, keep, strict=True) if k)
    first = max(kept) + 1 if kept else 0
    dropped = [(r, float(e)) for r, k, e in zip(active, keep, exits, strict=True) if not k and r >= first]
    left_by_kept = float(exits[keep].sum())
    edges = [first - 1, *(r for r, _ in dropped), records.n_ramps]
    spans = [(a + 1, b - 1) for a, b in pairwise(edges)]
    while spans := [(low, high) for low, high in spans if low <= high]:
        middles = np.array([(low + high) // 2 for low, high in spans], dtype=np.intp)
        bound = np.array([_most_exits(int(m), dropped, 1.0 - left_by_kept) for m in middles])
        promise = _utility(records, middles, bound, 1.0 - left_by_kept - bound)
        for i in np.argsort(-promise, kind="stable"):
            if promise[i] > 0 and affordable(records, tuple(sorted((*kept, int(middles[i])))), objective):
                return int(middles[i])
        spans = [(int(m) + 1, high) for m, (_, high) in zip(middles, spans, strict=True)]
    return None


def _most_exits(place: int, dropped: list[tuple[int, float]], rest: float) -> float:
    """Upper bound on the share of requests that would leave at a place."""
    if not any(ramp > place for ramp, _ in dropped):
        return rest
    later = next(i for i, (ramp, _) in enumerate(dropped) if ramp > place)
    return min(rest, sum(share for _, share in dropped[: later + 1]))


def _earlier(
    records: Records,
    active: tuple[int, ...],
    thresholds: tuple[float, ...],
    utility: SecondsArray,
    objective: Objective,
) -> tuple[int | None, list[tuple[int, float]]]:
    """A place to probe and the ramps to keep: just before the best ramp where another is allowed, else the worst ramp
    moves one forward."""
    pairs = list(zip(active, thresholds, strict=True))
    before_best = active[int(utility.argmax())] - 1
    if before_best >= 0 and before_best not in active and affordable(records, (*active, before_best), objective):
        return before_best, pairs
    if len(active) < objective.max_ramps:
        return None, pairs
    worst = int(utility.argmin())
    moved = active[worst] - 1
    rest = pairs[:worst] + pairs[worst + 1 :]
    return (moved, rest) if moved >= 0 and moved not in active else (None, pairs)
