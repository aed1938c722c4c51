"""Apparate as its public artifact runs it, in both of its hand-tuned variants.

Source: github.com/dywsjtu/apparate at 64f4a76 (2024), `Controller.check_signals_cv` and `check_signals_nlp` and
`tune_threshold`; the rules, including those that look like oversights, are kept, as its published figures come from
them. Three things are ours: the budget scales its constants (it tunes to a hundredth of the accuracy loss that it calls
a violation, 0.0001 of 0.01), ``max_ramps`` replaces its 3 or 2 ramps, and a ramp is only added within ``max_overhead``,
which it checks at the start alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from offramp_core.records import BoolArray, IndexArray, Records, SecondsArray
from offramp_lab.policies.base import Objective, Trace
from offramp_lab.policies.climb import Climbed, Climbing, climb
from offramp_lab.policies.online import ServedStream
from offramp_lab.policies.planned import affordable

CLIMBING = Climbing(step=0.01, smallest_step=0.001, below=True, trusts_final=True)
TUNING_SHARE = 0.01  # of the budget, when thresholds are tuned
HISTORY_BATCHES = 4
UTILITY_BATCHES = 20
ENOUGH_EXITS = 0.9  # with so many leaving at the ramps that stay no new one is tried


@dataclass(frozen=True, slots=True)
class Variant:
    """Constants in which the artifact's two control loops differ."""

    #: Batches between two adjustments of the ramps.
    period: int
    #: Percentage points of time that new thresholds must save to be kept instead of removing a ramp.
    worth_points: float
    #: Threshold of a ramp that was just added.
    first_threshold: float


CV = Variant(period=30, worth_points=2.0, first_threshold=0.0)
NLP = Variant(period=100, worth_points=5.0, first_threshold=0.01)
NLP_TUNES_AT = 40  # batches after an adjustment
NLP_SHARE = 0.6  # of the remembered batches in which a ramp must lose (pay) to count as losing (paying)


def vision_loop(_tune: Records, stream: Records, objective: Objective) -> Trace:
    """The artifact's loop for vision: retune on any bad batch, switch off what errs after a second one, adjust ramps
    every 30 batches."""
    return _VisionLoop(stream, objective, CV).run()


def text_loop(_tune: Records, stream: Records, objective: Objective) -> Trace:
    """The artifact's loop for text: retune only ramps that erred, damp them after a second bad batch, adjust ramps
    every 100 batches."""
    return _TextLoop(stream, objective, NLP).run()


class History:
    """Rows that thresholds are tuned on: ``first`` up to ``end``, those of the last four batches.

    After ramps changed they are the last batch alone: the artifact empties what it remembers but goes on dropping a
    batch for each that comes.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self._sizes: deque[int] = deque()

    def push(self, size: int) -> None:
        """Another batch."""
        self.end += size
        self._sizes.append(size)
        if len(self._sizes) > HISTORY_BATCHES:
            dropped = self._sizes.popleft()
            self.first += dropped if self.end - self.first > dropped else 0

    def forget(self) -> None:
        """Ramps changed: earlier rows say nothing about the new ones."""
        self.first = self.end


class _Loop:
    """State that both loops keep. A batch is *bad* when its agreement is below the target."""

    def __init__(self, stream: Records, objective: Objective, variant: Variant) -> None:
        self._stream, self._objective, self._variant = stream, objective, variant
        self._last_place = _last_paying_place(stream)
        self._served = ServedStream(stream, objective, _evenly_up_to(stream, self._last_place, objective))
        self._set = _Set.of(stream, self._served.active)
        self._quota = 0  # ramps that were removed and may be added elsewhere
        self._adjusted = False
        self._bad_batches = self._wrong = self._asked = 0
        self._history = History()
        self._utility: dict[int, deque[float]] = {}
        self._shares: deque[tuple[SecondsArray, int]] = deque(maxlen=UTILITY_BATCHES)

    def run(self) -> Trace:
        row, n, size = 0, len(self._stream), self._objective.batch_size
        for batch in range(1, -(-n // size) + 1):
            if not self._served.active:
                break  # nothing is recorded any more, so nothing changes
            end = min(row + size, n)
            self._served.serve(end)
            self._check(batch, self._remember(row, end), end)
            row = end
        self._served.serve(n)
        return self._served.trace()

    def _check(self, batch: int, seen: Batch, end: int) -> None:
        raise NotImplementedError

    # --- what a batch leaves behind ---------------------------------------------------------------------

    def _remember(self, row: int, end: int) -> Batch:
        if self._set.active != self._served.active:
            self._set = _Set.of(self._stream, self._served.active)
        seen = self._set.batch(self._served.left[row:end], self._served.wrong(row, end), self._objective.budget)
        self._asked += end - row
        self._wrong += seen.wrong
        self._bad_batches += seen.bad
        for ramp, utility in zip(self._served.active, seen.utility.tolist(), strict=True):
            self._utility.setdefault(ramp, deque(maxlen=UTILITY_BATCHES)).append(utility)
        self._shares.append((seen.shares, end - row))
        self._history.push(end - row)
        return seen

    def _forget(self) -> None:
        self._history.forget()
        self._utility.clear()

    # --- thresholds -----------------------------------------------------------------------------------

    def _tuned(self, kept: BoolArray | None = None) -> Climbed:
        """Thresholds climbed on the remembered rows; ``kept`` ramps stay as they are."""
        start = None if kept is None else np.where(kept, self._served.thresholds, 0.0)
        window = self._stream.take(slice(self._history.first, self._history.end))
        budget = self._objective.budget * TUNING_SHARE
        return climb(window, self._served.active, budget, CLIMBING, start=start, frozen=kept)

    def _scale(self, end: int, erring: BoolArray, factor: float) -> None:
        pairs = zip(self._served.thresholds, erring.tolist(), strict=True)
        self._served.switch(end, self._served.active, tuple(t * factor if errs else t for t, errs in pairs))

    def _retuned_instead(self, seen: Batch, end: int) -> bool:
        """Keep all ramps if new thresholds alone would save clearly more than the last batch did."""
        tuned = self._tuned()
        if (tuned.saving - seen.saving) * 100 <= self._variant.worth_points:
            return False
        self._served.switch(end, self._served.active, tuned.thresholds)
        return True

    # --- ramps ----------------------------------------------------------------------------------------

    def _replace(self, losing: list[int], end: int) -> bool:
        """Remove losing ramps and try the middle of the network behind the last ramp; whether anything changed."""
        active, thresholds = self._served.active, self._served.thresholds
        if self._last_place in losing and len(losing) == len(active):
            self._quota += len(losing) - 1
            self._served.switch(end, active[-1:], thresholds[-1:])
            return len(active) > 1
        self._quota += len(losing)
        stay = np.array([ramp not in losing for ramp in active])
        low, high = active[-1] + 1, self._last_place
        kept = [(r, t) for r, t, s in zip(active, thresholds, stay, strict=True) if s]
        if self._mean_shares()[stay].sum() <= ENOUGH_EXITS and low <= high:
            self._add(kept, (low + high) // 2, end)
        else:
            self._install(kept, end)
        return True

    def _probe_earlier(self, end: int) -> bool:
        """Add a ramp half-way before the first one; without quota it takes the place of the ramp that saves most."""
        active = self._served.active
        if active[0] < 2:
            return False
        kept = list(zip(active, self._served.thresholds, strict=True))
        if self._quota == 0:
            means = [float(np.mean(self._utility[ramp])) for ramp in active]
            kept.pop(max(range(len(active)), key=lambda k: (means[k], k)))
            self._quota = 1
        return self._add(kept, (active[0] - 1) // 2, end)

    def _add(self, kept: list[tuple[int, float]], ramp: int, end: int) -> bool:
        pairs = sorted([*kept, (ramp, self._variant.first_threshold)])
        if not affordable(self._stream, tuple(r for r, _ in pairs), self._objective):
            self._install(kept, end)
            return False
        self._quota -= 1
        self._forget()
        self._install(pairs, end)
        return True

    def _install(self, pairs: list[tuple[int, float]], end: int) -> None:
        self._served.switch(end, tuple(r for r, _ in pairs), tuple(t for _, t in pairs))

    def _mean_shares(self) -> SecondsArray:
        """Share of recent requests that left at each active ramp: (k,)."""
        weights = np.array([size for _, size in self._shares], dtype=np.float64)
        mean: SecondsArray = weights @ np.array([shares for shares, _ in self._shares]) / weights.sum()
        return mean


class _VisionLoop(_Loop):
    def _check(self, batch: int, seen: Batch, end: int) -> None:
        if self._bad_batches >= 2 or self._wrong > self._objective.budget * self._asked:
            self._scale(end, seen.erring, 0.0)
        elif seen.bad or self._adjusted or batch == 1:
            self._served.switch(end, self._served.active, self._tuned().thresholds)
            self._adjusted = False
        if batch % self._variant.period == 0:
            self._bad_batches = 0
            self._adjust(seen, end)

    def _adjust(self, seen: Batch, end: int) -> None:
        losing = [ramp for ramp in self._served.active if all(u <= 0 for u in self._utility[ramp])]
        if not losing:
            self._adjusted = self._probe_earlier(end)
        elif not self._retuned_instead(seen, end):
            self._adjusted = self._replace(losing, end)


class _TextLoop(_Loop):
    def __init__(self, stream: Records, objective: Objective, variant: Variant) -> None:
        super().__init__(stream, objective, variant)
        self._sets = [self._served.active]  # ramps after each adjustment
        self._paying_share = NLP_SHARE

    def _check(self, batch: int, seen: Batch, end: int) -> None:
        period = self._variant.period
        all_anew = self._adjusted and batch % period == NLP_TUNES_AT
        if seen.bad or all_anew or batch == 1:
            kept = None if all_anew else ~seen.erring
            self._served.switch(end, self._served.active, self._tuned(kept).thresholds)
            self._adjusted = False
        if self._bad_batches >= 2:
            self._scale(end, seen.erring, 0.1)
        if batch % period == 0:
            self._bad_batches, self._adjusted = 0, True
            self._adjust(seen, end)
            self._sets.append(self._served.active)

    def _adjust(self, seen: Batch, end: int) -> None:
        active = self._served.active
        losing = [ramp for ramp in active if np.mean(np.less(self._utility[ramp], 0)) > NLP_SHARE]
        pays = any(np.mean(np.greater_equal(self._utility[ramp], 0)) > self._paying_share for ramp in active)
        if len(self._sets) > 4 and len(set(self._sets[-5:])) == 1:
            self._paying_share = NLP_SHARE
        if len(active) == 1 and (not losing or active[0] == self._last_place):
            losing, pays = [], True
        if losing:
            self._demand_all_paying(len(self._sets) > 1 and active < self._sets[-2])
            if not self._retuned_instead(seen, end):
                self._replace(losing, end)
        elif pays:
            self._demand_all_paying(len(self._sets) > 1 and self._sets[-2] < active)
            self._probe_earlier(end)

    def _demand_all_paying(self, reversed_course: bool) -> None:
        """After ramps went back and forth, ask that a ramp never loses before probing again."""
        if reversed_course:
            self._paying_share = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch did: (k,) per active ramp, ``shares`` of its requests that left there."""

    wrong: int
    bad: bool
    saving: float
    shares: SecondsArray
    utility: SecondsArray
    erring: BoolArray


@dataclass(frozen=True, slots=True)
class _Set:
    """Active ramps and their costs."""

    active: tuple[int, ...]
    ramps: IndexArray
    seconds: SecondsArray
    total: float
    steps: SecondsArray
    own: SecondsArray

    @classmethod
    def of(cls, records: Records, active: tuple[int, ...]) -> _Set:
        ramps, costs = np.asarray(active, dtype=np.intp), records.costs
        seconds = costs.leave_seconds(ramps)
        return cls(active, ramps, seconds, costs.total_seconds, np.diff(seconds), costs.ramp_seconds[ramps])

    def batch(self, left: IndexArray, wrong: BoolArray, budget: float) -> Batch:
        """What a batch did whose requests left at given ramps."""
        size, leaves = len(left), left[:, None] == self.ramps
        exits, errors = leaves.sum(axis=0), (leaves & wrong[:, None]).sum(axis=0)
        shares = exits / size
        passed = 1.0 - shares.cumsum()
        saving = 1.0 - float(shares @ self.seconds[:-1] + passed[-1] * self.seconds[-1]) / self.total
        n_wrong = int(np.count_nonzero(wrong))
        utility = shares * self.steps - passed * self.own
        return Batch(n_wrong, n_wrong > budget * size, saving, shares, utility, errors > budget * exits)


def _last_paying_place(records: Records) -> int:
    """The last ramp that, alone, answers no later than the model itself; the search ends at the first that does not."""
    costs = records.costs
    late = np.cumsum(costs.segment_seconds)[:-1] + costs.ramp_seconds > costs.total_seconds
    return max(0, int(late.argmax()) - 1) if late.any() else records.n_ramps - 1


def _evenly_up_to(records: Records, last: int, objective: Objective) -> tuple[int, ...]:
    """Ramps spread evenly before the last place that pays, as many as are allowed."""
    for count in range(objective.max_ramps, 0, -1):
        ramps = tuple(int(i) for i in np.linspace(0, last, count + 2, dtype=int)[1:-1])
        if len(set(ramps)) == count and affordable(records, ramps, objective):
            return ramps
    return ()
