"""Plans of least *expected* cost, from cautious to bold: a path for small samples.

A search that counts the errors on A fits their noise: a 1 % budget on 250 records is two errors, and which ramps and
thresholds look best around two errors says little about the next thousand records. Here each ramp's chance of a wrong
answer is first smoothed over its scores, by logistic regression on their log odds (Cox, 1958), as in Platt (1999).
Plans then minimise

    mean seconds + price x mean expected disagreement

over ramps and thresholds, for a falling price of a disagreement: a high price gives a cautious plan, a low one a bold
one (the Lagrangian of "least seconds within a budget", Everett 1963). The sum is improved ramp by ramp, each step exact
for its ramp: the inputs sorted by score, the best cut is the maximum of a cumulative sum. Ramps join, leave and change
places as long as that pays.

None of this is trusted. The path is made from A alone and then tested on B (:mod:`offramp_core.certify.rank_path`), so
a wrong model costs saving and never the promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from offramp_core.precision import EXACT
from offramp_core.records import BoolArray, Records
from offramp_core.search.grid import NEVER, STEPS, leave_keys, threshold_of

Floats = npt.NDArray[np.float64]

# The price of one disagreement, in runs of the fp32 backbone, from "hardly ever worth it" down to "almost free".
PRICES = tuple(float(p) for p in np.geomspace(1000.0, 0.5, 40))
# Expected disagreement of the steps, in budgets. Wide, because the model may be off by as much; fine, because the last
# accepted step counts.
LEVELS = tuple(float(f) for f in np.geomspace(0.005, 4.0, 80))
MOST_ROWS = 5_000  # more do not change a smooth curve, only the time to use it
_RIDGE = 0.1
_PRIOR_WRONG = 0.5
_ROUNDS = 8
_HALVINGS = 10
_EDGE = 1e-4  # uncertainty is clipped to [edge, 1 - edge] before its log odds are taken


def expected_path(
    records: Records,
    *,
    max_disagreement: float,
    max_ramps: int,
    max_overhead: float = 1.0,
    stay: float = 0.0,
    should_stop: Callable[[], bool] | None = None,
) -> list[PathStep]:
    """Plans from cautious to bold, without repeats. At another precision than fp32 the first one has no ramps. What
    leaves at no ramp costs ``stay`` runs of the fp32 backbone on top, where somebody else computes it again.

    The plans of falling prices jump where a ramp joins. Between two of them the path goes on in small steps of expected
    disagreement: either the plan before, its thresholds scaled up together in rank space, or the one behind, scaled
    down, whichever is cheaper.
    """
    kept = records.take(slice(max(0, len(records) - MOST_ROWS), None))
    search = _Descent(kept, max_ramps=max_ramps, max_overhead=max_overhead, stay=stay)
    path: dict[tuple[tuple[int, ...], tuple[Decimal, ...]], PathStep] = {}
    start = 0.0
    if records.precision != EXACT:
        start = search.expected_disagreement({})
        path[((), ())] = PathStep((), (), start)
    levels = [start + f * max_disagreement for f in LEVELS]
    anchors = _anchors(search, upto=levels[-1], should_stop=should_stop)
    for level in levels:
        around = [a for a in anchors if a.expected <= level][-1:] + [a for a in anchors if a.expected > level][:1]
        scaled = [keys for keys in (search.scaled(anchor.keys, level) for anchor in around) if keys]
        if scaled:
            keys = min(scaled, key=search.mean_seconds)
            ramps = tuple(sorted(keys))
            thresholds = tuple(threshold_of(keys[ramp]) for ramp in ramps)
            path.setdefault((ramps, thresholds), PathStep(ramps, thresholds, search.expected_disagreement(keys)))
    return sorted(path.values(), key=lambda step: step.expected_disagreement) if start else list(path.values())


@dataclass(frozen=True, slots=True)
class PathStep:
    """A plan of the path: ramp columns, thresholds, and how often it disagrees as far as the model can tell."""

    active: tuple[int, ...]
    thresholds: tuple[Decimal, ...]
    expected_disagreement: float


Keys = dict[int, int]


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A plan of least cost at some price: threshold keys by ramp, and its expected disagreement."""

    keys: Keys
    expected: float


def _anchors(search: _Descent, *, upto: float, should_stop: Callable[[], bool] | None) -> list[_Anchor]:
    anchors: list[_Anchor] = []
    for price in PRICES:
        if should_stop is not None and should_stop():
            break
        keys = search.descend(price)
        expected = search.expected_disagreement(keys)
        if keys and (not anchors or expected > anchors[-1].expected):
            anchors.append(_Anchor(keys, expected))
        if expected > upto:
            break
    return anchors


def error_curves(records: Records) -> Floats:
    """Chance that each ramp's answer to each record is wrong, or what it is expected to lose, smoothed over the ramp's
    scores: (n, R)."""
    x, (lost, _) = _log_odds(records.uncertainty), records.losses()
    out = np.empty(x.shape)
    for j in range(records.n_ramps):
        out[:, j] = _logistic(x[:, j], lost[:, j].astype(np.float64))
    return out


def final_errors(records: Records) -> Floats:
    """Chance that the chain's own backbone answers each record wrongly, (n,): smoothed over its scores where they are
    known."""
    lost = records.losses()[1].astype(np.float64)
    if records.final_uncertainty is None or not lost.any():
        return np.full(len(records), lost.mean())
    return _logistic(_log_odds(records.final_uncertainty), lost)


def _log_odds(uncertainty: npt.NDArray[np.float32]) -> Floats:
    u = np.clip(uncertainty.astype(np.float64), _EDGE, 1 - _EDGE)
    return np.asarray(np.log(u) - np.log1p(-u))


def _logistic(x: Floats, y: Floats) -> Floats:
    """Fitted means of ``y`` in [0, 1] that do not fall with ``x``, (n,), by Newton's method.

    One more record, half wrong and spread over all scores, is added: a ramp without errors in A is then no more trusted
    than so few records allow, and separable data stay finite (Clogg et al., 1991).
    """
    target = (y + _PRIOR_WRONG / len(y)) / (1 + 2 * _PRIOR_WRONG / len(y))
    z = np.column_stack([np.ones(len(x)), (x - x.mean()) / (x.std() + 1e-9)])
    rate = float(target.mean())
    w = np.array([np.log(rate / (1 - rate)), 0.0])
    penalty = np.array([0.0, _RIDGE])
    for _ in range(25):
        p = _sigmoid(z @ w)
        hessian = (z * (p * (1 - p))[:, None]).T @ z + np.diag(penalty)
        step = np.linalg.solve(hessian, z.T @ (target - p) - penalty * w)
        w = w + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-6:
            break
    w[1] = max(w[1], 0.0)
    return _sigmoid(z @ w)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A ramp's best threshold key given the others, and by how much it lowers the sum; key 0: better without the
    ramp."""

    ramp: int
    key: int
    gain: float


class _Descent:
    """The sum and its state: a threshold key per active ramp."""

    def __init__(self, records: Records, *, max_ramps: int, max_overhead: float, stay: float = 0.0) -> None:
        costs, unit = records.costs, records.costs.baseline_seconds
        self._n, self._max_ramps = len(records), max_ramps
        self._allowed = max_overhead * (1 + 1e-12) + costs.head_start
        self._reached = np.cumsum(costs.segment_seconds)[:-1] / unit
        self._ramp = costs.ramp_seconds / unit
        self._whole = costs.total_seconds / unit + stay
        # Everything below reads a ramp's column: in Fortran order it lies in one piece.
        self._wrong = np.asfortranarray(error_curves(records))
        self._final_wrong = final_errors(records)
        self._keys = np.asfortranarray(leave_keys(records.uncertainty))
        self._order = np.argsort(self._keys, axis=0, kind="stable")
        sorted_keys = np.take_along_axis(self._keys, self._order, axis=0)
        last_of_ties = np.vstack([sorted_keys[1:] > sorted_keys[:-1], np.ones((1, records.n_ramps), dtype=bool)])
        self._cut_here = last_of_ties & (sorted_keys < NEVER)
        self._sorted_keys = sorted_keys
        self._active: Keys = {}
        self._price = 0.0
        self._expected: dict[tuple[tuple[int, int], ...], float] = {}  # by keys: scaled plans meet again and again
        self._scaled: dict[tuple[tuple[int, int], ...], dict[float, float]] = {}  # the same by plan and its scale

    def descend(self, price: float) -> Keys:
        """Lower the sum at this price until nothing pays any more, from where the last price ended."""
        self._price = price
        for _ in range(_ROUNDS):
            if not (self._refit() | self._join() or self._swap()):
                break
        return dict(self._active)

    def expected_disagreement(self, keys: Keys) -> float:
        """Mean chance of a wrong answer."""
        known = tuple(sorted(keys.items()))
        if known not in self._expected:
            self._expected[known] = self._mean_wrong(keys)
        return self._expected[known]

    def _mean_wrong(self, keys: Keys) -> float:
        wrong = self._final_wrong.copy()
        for ramp in sorted(keys, reverse=True):
            np.copyto(wrong, self._wrong[:, ramp], where=self._leaves(ramp, keys))
        return float(wrong.mean())

    def mean_seconds(self, keys: Keys) -> float:
        """Mean time, in runs of the fp32 backbone."""
        ramps = sorted(keys)
        paid = np.cumsum(self._ramp[ramps]).tolist()
        seconds = np.full(self._n, self._whole + (paid[-1] if ramps else 0.0))
        for ramp, cost in zip(reversed(ramps), reversed(paid), strict=True):
            np.copyto(seconds, self._reached[ramp] + cost, where=self._leaves(ramp, keys))
        return float(seconds.mean())

    def scaled(self, keys: Keys, level: float) -> Keys:
        """The thresholds scaled together in rank space until the expected disagreement is just within ``level``."""
        ranks = {r: int(np.searchsorted(self._sorted_keys[:, r], k, side="right")) for r, k in keys.items()}
        low, high = 0.0, self._n / max(1, min(ranks.values()))
        known = self._scaled.setdefault(tuple(ranks.items()), {})  # every level begins with the same halvings
        for _ in range(_HALVINGS):
            middle = math.sqrt(max(low, 1e-3) * high)
            if middle not in known:
                known[middle] = self.expected_disagreement(self._at_ranks(ranks, middle))
            if known[middle] <= level:
                low = middle
            else:
                high = middle
        return self._at_ranks(ranks, low)

    def _at_ranks(self, ranks: dict[int, int], scale: float) -> Keys:
        """Keys under which the scaled rank's number of inputs, or with ties fewer, are certain enough to leave."""
        keys = {}
        for ramp, rank in ranks.items():
            at = min(self._n - 1, int(scale * rank))
            keys[ramp] = min(STEPS, int(self._sorted_keys[at, ramp]) - 1) if scale * rank >= 1 else 0
        return {ramp: key for ramp, key in keys.items() if key > 0}

    def _refit(self) -> bool:
        """Give each active ramp its best threshold given the others; drop those better left out."""
        moved = False
        for ramp in sorted(self._active):
            before = self._active.pop(ramp)
            best = self._best_cut(ramp, self._active)
            if best.gain > 0:
                self._active[ramp] = best.key
            moved |= self._active.get(ramp, 0) != before
        return moved

    def _join(self) -> bool:
        """Add the ramp that helps most, where one still may."""
        if len(self._active) >= self._max_ramps:
            return False
        best = self._best_newcomer(self._active)
        if best is None:
            return False
        self._active[best.ramp] = best.key
        return True

    def _swap(self) -> bool:
        """Replace an active ramp by the one that is better in its place."""
        for ramp in sorted(self._active):
            others = {r: k for r, k in self._active.items() if r != ramp}
            best = self._best_newcomer(others)
            if best is not None and best.ramp != ramp and best.gain > self._best_cut(ramp, others).gain * (1 + 1e-6):
                self._active = {**others, best.ramp: best.key}
                return True
        return False

    def _best_newcomer(self, active: Keys) -> _Cut | None:
        free = self._allowed - float(self._ramp[list(active)].sum())
        seconds, wrong, left = self._leave(active)
        value = seconds + self._price * wrong
        best: _Cut | None = None
        for ramp in range(len(self._ramp)):
            if ramp not in active and self._ramp[ramp] <= free:
                cut = self._cut(ramp, active, value, left)
                if cut.gain > 1e-12 and (best is None or cut.gain > best.gain):
                    best = cut
        return best

    def _best_cut(self, ramp: int, others: Keys) -> _Cut:
        seconds, wrong, left = self._leave(others)
        return self._cut(ramp, others, seconds + self._price * wrong, left)

    def _cut(self, ramp: int, others: Keys, value: Floats, left: npt.NDArray[np.intp]) -> _Cut:
        """Inputs that got past the earlier ramps pay for this one; those that leave here save what they would cost
        behind it."""
        reach = left > ramp
        paid = sum(float(self._ramp[r]) for r in others if r < ramp)
        saved = value - self._price * self._wrong[:, ramp] - (self._reached[ramp] + paid)
        total = np.cumsum(np.where(reach, saved, 0.0)[self._order[:, ramp]])
        total = np.where(self._cut_here[:, ramp], total, -np.inf)
        at = int(np.argmax(total))
        gain = (float(total[at]) - float(self._ramp[ramp]) * int(reach.sum())) / self._n
        return _Cut(ramp, int(self._sorted_keys[at, ramp]), gain) if gain > 0 else _Cut(ramp, 0, 0.0)

    def _leave(self, active: Keys) -> tuple[Floats, Floats, npt.NDArray[np.intp]]:
        """Seconds, chance of a wrong answer and the ramp each input leaves at (R where it stays): (n,) each."""
        ramps = sorted(active)
        paid = np.cumsum(self._ramp[ramps])
        seconds = np.full(self._n, self._whole + (float(paid[-1]) if ramps else 0.0))
        wrong = self._final_wrong.copy()
        left = np.full(self._n, len(self._ramp), dtype=np.intp)
        for position in range(len(ramps) - 1, -1, -1):
            ramp = ramps[position]
            leaves = self._leaves(ramp, active)
            np.copyto(seconds, self._reached[ramp] + paid[position], where=leaves)
            np.copyto(wrong, self._wrong[:, ramp], where=leaves)
            np.copyto(left, ramp, where=leaves)
        return seconds, wrong, left

    def _leaves(self, ramp: int, active: Keys) -> BoolArray:
        """Inputs that are certain enough for this ramp, (n,)."""
        return np.asarray(self._keys[:, ramp] <= active[ramp])
