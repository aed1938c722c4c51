"""The test: plans from cautious to bold, tried in this order on held-out records until one fails.

The older records (A) find a plan; its thresholds, scaled together in A's own rank space, make a path; the newer ones (B) test the path
step by step at the full level each and stop at the first failure. Testing in a fixed order costs nothing: let m be the first step
whose true disagreement exceeds the budget. To accept any such step the procedure must pass m, which a test of level alpha does with
probability at most alpha. So with probability at least 1 - alpha *every* accepted plan keeps the budget, and the one that saves
most may be taken (fixed-sequence Learn-then-Test: Angelopoulos, Bates, Candès, Jordan and Lei, 2021, arXiv:2110.01052). The
argument needs no more of the path than that B had no part in making it.

Plans are tested as they will be served: with thresholds rounded down to the six decimals a plan stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import numpy as np

from offramp_core.certify.certificate import (
    METHOD,
    Answers,
    Certificate,
    allowance,
    answers,
    p_value,
    records_digest,
)
from offramp_core.certify.planner import fewest_labels, more_labels
from offramp_core.certify.slices import SliceBudget, SliceResult, check_slices, in_slice
from offramp_core.evaluate import Evaluation, evaluate_plan
from offramp_core.plan import Execution, Plan, RampThreshold
from offramp_core.precision import EXACT, Precision
from offramp_core.records import BoolArray, Records
from offramp_core.search.grid import cautious_threshold

# How far the thresholds of the plan found on A are scaled: from a tenth of their ranks to half as bold again.
PATH_SCALES = tuple(float(g) for g in np.linspace(0.1, 1.5, 36))

NotCertifiedReason = Literal["TooFewLabels", "NothingSaves", "OverBudget"]


@dataclass(frozen=True, slots=True)
class NotCertified:
    """No plan passed. ``needed_more`` labels would probably change that; None when more of the same would not.

    ``slices`` are those with whose budgets not even the most cautious plan passed.
    """

    reason: NotCertifiedReason
    needed_more: int | None = None
    slices: tuple[SliceBudget, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """What a certificate is about, besides thresholds: the names and digests that make threshold vectors plans."""

    ramp_ids: tuple[str, ...]
    backbone_digest: str
    ramp_set_digest: str
    execution: Execution = "Auto"
    precision: Precision = EXACT

    def plan(self, active: Sequence[int], thresholds: Sequence[Decimal]) -> Plan:
        """The plan of a threshold vector; ramps that nothing can leave at are left out."""
        ramps = tuple(RampThreshold(self.ramp_ids[i], t) for i, t in zip(active, thresholds, strict=True) if t > 0)
        return Plan(self.backbone_digest, self.ramp_set_digest, ramps, self.precision, self.execution)


@dataclass(frozen=True, slots=True)
class DesignEffects:
    """How many labels are worth one: of all requests, and of the requests of a slice (a slice may be one camera's)."""

    everybody: float = 1.0
    slices: Mapping[SliceBudget, float] = field(default_factory=dict)

    def of(self, wanted: SliceBudget | None) -> float:
        return self.everybody if wanted is None else max(self.everybody, self.slices.get(wanted, 1.0))


INDEPENDENT_LABELS = DesignEffects()


@dataclass(frozen=True, slots=True)
class Certified:
    """A plan, its certificate, and what it did on the records that tested it.

    ``on_test`` counts every record, those of slices that must be stopped included.
    """

    plan: Plan
    certificate: Certificate
    on_test: Evaluation

    @property
    def stopped_slices(self) -> tuple[int, ...]:
        """Slices with a budget of their own that the plan may not serve: their requests must not leave early."""
        return tuple(s.slice_id for s in self.certificate.slices if not s.certified)


def rank_path(records_a: Records, active: Sequence[int], thresholds: Sequence[Decimal]) -> list[tuple[Decimal, ...]]:
    """The plan's thresholds scaled together in A's rank space, cautious first, rounded down, without repeats.

    A threshold's rank is the number of records of A below it at that ramp, leavers at earlier ramps included.
    """
    sorted_scores = [np.sort(records_a.uncertainty[:, i]) for i in active]
    ranks = [int(np.searchsorted(s, np.float32(float(t)))) for s, t in zip(sorted_scores, thresholds, strict=True)]
    path: list[tuple[Decimal, ...]] = []
    for scale in PATH_SCALES:
        step = tuple(
            cautious_threshold(float(s[min(len(s) - 1, int(scale * rank))])) if rank else Decimal(0)
            for s, rank in zip(sorted_scores, ranks, strict=True)
        )
        if any(step) and step not in path:
            path.append(step)
    return path


def rank_path_certificate(
    records_a: Records,
    records_b: Records,
    *,
    active: Sequence[int],
    thresholds: Sequence[Decimal],
    subject: Subject,
    budget: float,
    delta: float,
    test_index: int = 1,
    slices: Sequence[SliceBudget] = (),
) -> Certified | NotCertified:
    """Test the rank path of a plan found on A on the held-out records B.

    Parameters
    ----------
    records_a, records_b : Records
        B must be disjoint from A, newer, and unused by any earlier test.
    active, thresholds
        The plan found on A, ramp columns and thresholds.
    subject : Subject
        Names and digests.
    budget, delta : float
        Allowed disagreement over all requests, and the probability with which the promise may fail.
    test_index : int
        Number of this test for the service, from 1.
    slices : sequence of SliceBudget
        Groups with a promise of their own. The level is divided evenly among all requests and the G slices, each of which walks the
        path by itself with its share, so that all 1 + G promises hold together with probability 1 - level (Bonferroni).
        A slice that fails is reported as stopped and does not take the plan from the others. A class has other rows under each plan of
        the path; each plan's test is a binomial one all the same, given how many of its answers name the class.

    Returns
    -------
    Certified or NotCertified
        Too little data is a value, never an exception.
    """
    path = [subject.plan(active, step) for step in rank_path(records_a, active, thresholds)]
    return test_path(
        path, records_b, ramp_ids=subject.ramp_ids, budget=budget, delta=delta, test_index=test_index,
        slices=slices,
    )  # fmt: skip


def test_path(
    path: Sequence[Plan],
    records_b: Records,
    *,
    ramp_ids: tuple[str, ...],
    budget: float,
    delta: float,
    test_index: int = 1,
    slices: Sequence[SliceBudget] = (),
    stops: bool = True,
    effects: DesignEffects = INDEPENDENT_LABELS,
) -> Certified | NotCertified:
    """Test plans in the order given; parameters as in :func:`rank_path_certificate`. B must have had no part in making the path.

    ``records_b`` are those of the chain that the plans run in, and ``ramp_ids`` its columns.
    Without ``stops`` no slice can be stopped when the plan is served: only plans that every slice passes are then certified.
    ``effects`` says how many labels are worth one.
    """
    total = allowance(delta, test_index)
    level = total / (1 + len(slices))
    if not path:
        return NotCertified("NothingSaves")
    fewest = math.ceil(effects.of(None) * fewest_labels(budget, level))
    if len(records_b) < fewest:
        return NotCertified("TooFewLabels", fewest - len(records_b))
    check_slices(records_b, slices)
    steps = _Steps(path, records_b, ramp_ids=ramp_ids, slices=slices, effects=effects)
    reach = steps.walk(None, budget=budget, level=level)
    reaches = [steps.walk(s, budget=s.budget, level=level) for s in slices]
    everybody = reach if stops else min([reach, *reaches])
    if everybody == 0:
        needed = [] if reach else [steps.more_for(None, budget=budget, level=level)]
        if not stops:
            needed += [
                steps.more_for(s, budget=s.budget, level=level)
                for s, to in zip(slices, reaches, strict=True)
                if to == 0
            ]
        failed = tuple(s for s, to in zip(slices, reaches, strict=True) if to == 0)
        return NotCertified("OverBudget", None if None in needed else max(n for n in needed if n is not None), failed)
    chosen, saving = max(
        ((m, steps.saving(m, [s for s, to in zip(slices, reaches, strict=True) if to <= m])) for m in range(everybody)),
        key=lambda pair: pair[1],
    )
    if saving <= 0:
        return NotCertified("NothingSaves")
    results = tuple(
        steps.slice_result(chosen, s, level=level, certified=chosen < to) for s, to in zip(slices, reaches, strict=True)
    )
    plan, seen = path[chosen], evaluate_plan(records_b, path[chosen], ramp_ids)
    certificate = Certificate(
        method=METHOD,
        plan_hash=plan.content_hash,
        budget=budget,
        delta=delta,
        test_index=test_index,
        level=level,
        n=seen.n,
        k=seen.disagreements,
        p_value=steps.p_value(chosen, None, budget=budget),
        backbone_digest=plan.backbone_digest,
        ramp_set_digest=plan.ramp_set_digest,
        records_digest=records_digest(records_b, slices=slices),
        ramp_ids=ramp_ids,
        records_through=None if records_b.time is None else float(records_b.time.max()),
        slices=results,
        design_effect=effects.of(None),
    )
    return Certified(plan, certificate, seen)


class _Steps:
    """The plans of a path on the held-out records, each replayed once and only when it is asked for."""

    def __init__(
        self,
        path: Sequence[Plan],
        records: Records,
        *,
        ramp_ids: tuple[str, ...],
        slices: Sequence[SliceBudget],
        effects: DesignEffects,
    ) -> None:
        self._path, self._records, self._ramp_ids = path, records, ramp_ids
        self._effects = effects
        self._labels = any(s.of == "Answer" for s in slices)
        self._replayed: dict[int, Answers] = {}

    def wrong(self, step: int) -> BoolArray:
        """Which answers differ from the reference, (n,)."""
        return self._replay(step).wrong

    def rows(self, step: int, of: SliceBudget | None) -> BoolArray:
        """Requests of a slice under a step, (n,); without one all."""
        if of is None:
            return np.ones(len(self._records), dtype=np.bool_)
        return in_slice(of, self._records, self._replay(step).labels)

    def p_value(self, step: int, of: SliceBudget | None, *, budget: float) -> float:
        """Of H0: among the requests of a slice, or all, the step disagrees more often than ``budget``."""
        rows = self.rows(step, of)
        wrong = self.wrong(step)[rows]
        if math.isinf(self._effects.of(of)):
            return 1.0
        return p_value(int(wrong.sum()), len(wrong), budget=budget, design_effect=self._effects.of(of))

    def walk(self, of: SliceBudget | None, *, budget: float, level: float) -> int:
        """How many steps pass before the first that does not."""
        for step in range(len(self._path)):
            if self.p_value(step, of, budget=budget) > level:
                return step
        return len(self._path)

    def saving(self, step: int, stopped: Sequence[SliceBudget]) -> float:
        """Share of the fp32 backbone's time saved when the requests of stopped slices run to its end."""
        seconds, total = self._replay(step).seconds, self._records.costs.baseline_seconds
        if stopped:
            seconds = np.where(np.logical_or.reduce([self.rows(step, s) for s in stopped]), total, seconds)
        return 1.0 - float(np.mean(seconds)) / total

    def slice_result(self, step: int, wanted: SliceBudget, *, level: float, certified: bool) -> SliceResult:
        rows = self.rows(step, wanted)
        n, k = int(rows.sum()), int(self.wrong(step)[rows].sum())
        p = self.p_value(step, wanted, budget=wanted.budget)
        effect = self._effects.of(wanted)
        more = None if certified else more_labels(k, n, budget=wanted.budget, level=level, design_effect=effect)
        return SliceResult(wanted.slice_id, wanted.budget, level, n, k, p, certified, more, wanted.of, effect)

    def more_for(self, of: SliceBudget | None, *, budget: float, level: float) -> int | None:
        """About how many labels of all requests it takes until the most cautious plan passes, for all of them or in a slice; None when more do
        not help."""
        rows = self.rows(0, of)
        n, k = int(rows.sum()), int(self.wrong(0)[rows].sum())
        effect = self._effects.of(of)
        more = None if math.isinf(effect) else more_labels(k, n, budget=budget, level=level, design_effect=effect)
        return None if more is None or n == 0 else math.ceil(more * len(rows) / n)

    def _replay(self, step: int) -> Answers:
        if step not in self._replayed:
            self._replayed[step] = answers(self._records, self._path[step], self._ramp_ids, labels=self._labels)
        return self._replayed[step]
