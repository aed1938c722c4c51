"""Policies that choose one plan from the tuning records and keep it."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from offramp_core.certify import Certified, Subject, rank_path_certificate
from offramp_core.evaluate import Evaluation, evaluate
from offramp_core.policies.base import Objective, Trace, constant
from offramp_core.records import Records
from offramp_core.search.grid import cautious_threshold
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import ThresholdPlan, error_budget
from offramp_core.tuning import split_rows

SINGLE_THRESHOLD_STEPS = 1000
GREEDY_STEP, GREEDY_SMALLEST_STEP = 0.01, 0.001
_EVALUATION_LIMIT = 20_000  # the hill-climb ends long before; a guard against cycling on degenerate records


def exact(tune: Records, report: Records, objective: Objective) -> Trace:
    """The plan that saves most on the tuning records within the budget, over thresholds and placement, uncertified.

    Source: this project, docs/decisions/0004. Tuned to the budget on its own records it breaks it about as often as not.
    """
    plan = _search(tune, objective)
    return constant(report, plan.active, plan.thresholds)


def certified(tune: Records, report: Records, objective: Objective) -> Trace:
    """The exact plan of the oldest quarter, scaled and tested on the rest of the tuning records; exits off if nothing passes.

    Source: this project; fixed-sequence Learn-then-Test, Angelopoulos et al. (2021), arXiv:2110.01052.
    """
    a_end, b_start = split_rows(len(tune))
    a, b = tune.take(slice(a_end)), tune.take(slice(b_start, None))
    if not len(a) or not len(b):
        return exits_off(tune, report, objective)
    plan = _search(a, objective)
    names = tuple(f"r{i:02d}" for i in range(tune.n_ramps))
    result = rank_path_certificate(
        a,
        b,
        active=plan.active,
        thresholds=plan.thresholds,
        subject=Subject(names, "", ""),
        budget=objective.budget,
        delta=1 - objective.confidence,
    )
    if not isinstance(result, Certified):
        return exits_off(tune, report, objective)
    active = tuple(names.index(ramp.id) for ramp in result.plan.ramps)
    return constant(report, active, tuple(ramp.threshold for ramp in result.plan.ramps), result.certificate)


def greedy(tune: Records, report: Records, objective: Objective) -> Trace:
    """Hill-climb on evenly spaced ramps, thresholds from 0.

    Each round tries every ramp one step up and takes, among those that stay strictly under the budget, the one that loses least agreement
    per second gained; its step doubles, and so do the steps of ramps whose move changed nothing. When none is left all steps halve, down
    to the smallest. Source: Apparate (SOSP 2024), arXiv:2312.05385 section 3.2, with the constants of its public artifact
    (github.com/dywsjtu/apparate, `tune_threshold`). Its tiny tuning window is not part of this policy: it sees all tuning records.
    """
    ramps = evenly_spaced(tune, objective)
    return constant(report, ramps, _Climb(tune, ramps, objective.budget).run())


def single_threshold(tune: Records, report: Records, objective: Objective) -> Trace:
    """One threshold for all of the evenly spaced ramps: the one that saves most within the budget.

    Source: BranchyNet (Teerapittayanon, McDanel and Kung, ICPR 2016, arXiv:1709.01686) with a common threshold as in Apparate's
    evaluation; candidates are the per-mille quantiles of the ramps' scores instead of a fixed grid, which only helps it.
    """
    ramps = evenly_spaced(tune, objective)
    if not ramps:
        return exits_off(tune, report, objective)
    errors = error_budget(len(tune), max_disagreement=objective.budget)
    levels = np.quantile(tune.uncertainty[:, ramps], np.linspace(0, 1, SINGLE_THRESHOLD_STEPS + 1))
    best, best_saving = Decimal(0), 0.0
    for threshold in sorted({cautious_threshold(float(level)) for level in levels}):
        seen = evaluate(tune, ramps, (threshold,) * len(ramps))
        if seen.disagreements <= errors and seen.saving > best_saving:
            best, best_saving = threshold, seen.saving
    return constant(report, ramps, (best,) * len(ramps)) if best else exits_off(tune, report, objective)


def exits_off(_tune: Records, report: Records, _objective: Objective) -> Trace:
    """No ramps: the model as it was given. Source: the vanilla baseline of every paper."""
    return constant(report, (), ())


def evenly_spaced(records: Records, objective: Objective) -> tuple[int, ...]:
    """As many ramps as allowed, spread evenly over the network; fewer where together they would break the overhead bound."""
    n = records.n_ramps
    for count in range(min(objective.max_ramps, n), 0, -1):
        ramps = tuple(int((i + 1) * n / (count + 1)) for i in range(count))
        if len(set(ramps)) == count and records.costs.overhead(ramps) <= objective.max_overhead * (1 + 1e-12):
            return ramps
    return ()


class _Climb:
    """State of one hill-climb."""

    def __init__(self, records: Records, ramps: tuple[int, ...], budget: float) -> None:
        self._records, self._ramps, self._budget = records, ramps, budget
        self._thresholds = [0.0] * len(ramps)
        self._steps = [GREEDY_STEP] * len(ramps)
        self._evaluations = 0

    def run(self) -> tuple[Decimal, ...]:
        now = self._try(self._thresholds)
        while self._evaluations < _EVALUATION_LIMIT:
            chosen, idle = self._best_move(now)
            if chosen is not None and self._thresholds[chosen[0]] <= 1:
                ramp, now = chosen
                self._thresholds = self._moved(ramp)
                for k in {ramp, *idle}:
                    self._steps[k] *= 2
            elif not self._halve():
                break
        return tuple(Decimal(str(min(1.0, t))) for t in self._thresholds)

    def _best_move(self, now: Evaluation) -> tuple[tuple[int, Evaluation] | None, list[int]]:
        """The best feasible move, and the ramps whose move changes cost or agreement not at all."""
        best: tuple[int, Evaluation] | None = None
        best_score, idle = np.inf, []
        for k in range(len(self._ramps)):
            seen = self._try(self._moved(k))
            if seen.disagreement >= self._budget:
                continue
            gained, lost = abs(seen.mean_seconds - now.mean_seconds), abs(seen.disagreements - now.disagreements)
            if gained > 0 and lost / gained < best_score:
                best, best_score = (k, seen), lost / gained
            if gained == 0 or lost == 0:
                idle.append(k)
        if best is None and idle and any(self._thresholds[k] + self._steps[k] <= 1 for k in idle):
            k = next(k for k in idle if self._thresholds[k] + self._steps[k] <= 1)
            best = (k, self._try(self._moved(k)))
        return best, idle

    def _moved(self, ramp: int) -> list[float]:
        moved = list(self._thresholds)
        moved[ramp] = round(moved[ramp] + self._steps[ramp], 4)
        return moved

    def _halve(self) -> bool:
        """Halve every step that is not the smallest yet; False when all are."""
        wide = [
            k
            for k, step in enumerate(self._steps)
            if round(step, 4) > GREEDY_SMALLEST_STEP and self._thresholds[k] <= 1
        ]
        for k in wide:
            self._steps[k] /= 2
        return bool(wide)

    def _try(self, thresholds: list[float]) -> Evaluation:
        self._evaluations += 1
        return evaluate(self._records, self._ramps, [min(1.0, t) for t in thresholds])


def _search(records: Records, objective: Objective) -> ThresholdPlan:
    return best_plan(
        records,
        max_disagreement=objective.budget,
        max_ramps=objective.max_ramps,
        max_overhead=objective.max_overhead,
    ).plan
