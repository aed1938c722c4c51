"""The test: plans from cautious to bold, tried in this order on held-out records until one fails.

The older records (A) find a plan; its thresholds, scaled together in A's own rank space, make a path; the newer ones
(B) test the path step by step at the full level each and stop at the first failure. Testing in a fixed order costs
nothing: let m be the first step whose true disagreement exceeds the budget. To accept any such step the procedure must
pass m, which a test of level alpha does with probability at most alpha. So with probability at least 1 - alpha *every*
accepted plan keeps the budget, and the one that saves most may be taken (fixed-sequence Learn-then-Test: Angelopoulos,
Bates, Candès, Jordan and Lei, 2021, arXiv:2110.01052). The argument needs no more of the path than that B had no part
in making it.

Plans are tested as they will be served: with thresholds rounded down to the six decimals a plan stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from offramp_core.certify.certificate import (
    METHOD,
    METHOD_LOSSES,
    Answers,
    Certificate,
    allowance,
    answers,
    records_digest,
)
from offramp_core.certify.means import Losses, passing_steps
from offramp_core.certify.planner import fewest_labels
from offramp_core.certify.slices import SliceBudget, SliceResult, check_slices, in_slice
from offramp_core.certify.tiers import TierBudget, TierResult
from offramp_core.evaluate import Evaluation, evaluate_plan
from offramp_core.plan import Execution, Plan, RampThreshold, TierRamps
from offramp_core.precision import EXACT, Precision
from offramp_core.records import BoolArray, Records
from offramp_core.search.grid import cautious_threshold

# How far the thresholds of the plan found on A are scaled: from a tenth of their ranks to half as bold again.
PATH_SCALES = tuple(float(g) for g in np.linspace(0.1, 1.5, 36))
# For a budget that is larger than the one the plan was found for: on to where nearly everybody leaves.
BOLD_SCALES = (*PATH_SCALES, *(float(g) for g in np.geomspace(1.6, 50.0, 20)))

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

    ``on_test`` counts every record, those of slices that must be stopped included; ``tier_savings`` is what each tier's
    own plan saved on them.
    """

    plan: Plan
    certificate: Certificate
    on_test: Evaluation
    tier_savings: Mapping[str, float] = field(default_factory=dict)

    @property
    def stopped_slices(self) -> tuple[int, ...]:
        """Slices with a budget of their own that the plan may not serve: their requests must not leave early."""
        return tuple(s.slice_id for s in self.certificate.slices if not s.certified)


def rank_path(
    records_a: Records,
    active: Sequence[int],
    thresholds: Sequence[Decimal],
    *,
    scales: Sequence[float] = PATH_SCALES,
) -> list[tuple[Decimal, ...]]:
    """The plan's thresholds scaled together in A's rank space, cautious first, rounded down, without repeats.

    A threshold's rank is the number of records of A below it at that ramp, leavers at earlier ramps included.
    """
    sorted_scores = [np.sort(records_a.uncertainty[:, i]) for i in active]
    ranks = [int(np.searchsorted(s, np.float32(float(t)))) for s, t in zip(sorted_scores, thresholds, strict=True)]
    path: list[tuple[Decimal, ...]] = []
    for scale in scales:
        step = tuple(
            cautious_threshold(float(s[min(len(s) - 1, int(scale * rank))])) if rank else Decimal(0)
            for s, rank in zip(sorted_scores, ranks, strict=True)
        )
        if any(step) and step not in path:
            path.append(step)
    return path


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
    menu: Menu | None = None,
) -> Certified | NotCertified:
    """Test plans from cautious to bold; B must have had no part in making the path. Too little data is a value.

    Parameters
    ----------
    records_b : Records
        Of the chain that the plans run in, with columns ``ramp_ids``; newer than A, unused by any earlier test.
    budget, delta : float
        Allowed disagreement over all requests, and the probability with which the promise may fail.
    slices : sequence of SliceBudget
        Groups with a promise of their own. The level is divided evenly, and each walks the path by itself, so that all
        promises hold together (Bonferroni). One that fails is stopped; without ``stops`` the plan fails with it.
    effects, menu
        How many labels are worth one; tiers to be tested besides, from whose share nobody else gains.
    """
    level = allowance(delta, test_index) / (1 + len(slices) + (len(menu.tiers) if menu else 0))
    if not path:
        return NotCertified("NothingSaves")
    fewest = math.ceil(effects.of(None) * fewest_labels(budget, level, graded=records_b.graded))
    if len(records_b) < fewest:
        return NotCertified("TooFewLabels", fewest - len(records_b))
    check_slices(records_b, slices)
    steps = _Steps(path, records_b, ramp_ids=ramp_ids, slices=slices, effects=effects)
    reach = steps.walk(None, budget=budget, level=level)
    reaches = {s: steps.walk(s, budget=s.budget, level=level) for s in slices}
    everybody = reach if stops else min([reach, *reaches.values()])
    if everybody == 0:
        failed = tuple(s for s, to in reaches.items() if to == 0)
        needed = [] if reach else [steps.more_for(None, budget=budget, level=level)]
        needed += [] if stops else [steps.more_for(s, budget=s.budget, level=level) for s in failed]
        return NotCertified("OverBudget", None if None in needed else max(n for n in needed if n is not None), failed)
    chosen, saving = max(
        ((m, steps.saving(m, [s for s, to in reaches.items() if to <= m])) for m in range(everybody)),
        key=lambda pair: pair[1],
    )
    if saving <= 0:
        return NotCertified("NothingSaves")
    served: list[_Served] = []
    if menu:
        served = menu.on(path[chosen], records_b, saving=saving, ramp_ids=ramp_ids, level=level, effects=effects)
    plan = replace(path[chosen], tiers=tuple(sorted((s.ramps for s in served), key=lambda tier: tier.name)))
    certificate = Certificate(
        **steps.claim(chosen, plan=plan, budget=budget, delta=delta, test_index=test_index, level=level),
        slices=tuple(steps.slice_result(chosen, s, level=level, certified=chosen < to) for s, to in reaches.items()),
        tiers=tuple(s.result for s in served),
    )
    savings = {s.ramps.name: s.saving for s in served}
    return Certified(plan, certificate, evaluate_plan(records_b, path[chosen], ramp_ids), savings)


@dataclass(frozen=True, slots=True)
class _Served:
    """A tier that passed: its thresholds, the claim, and what it saves."""

    ramps: TierRamps
    result: TierResult
    saving: float


@dataclass(frozen=True, slots=True)
class Menu:
    """Tiers to be tested, and the plans they may get, from cautious to bold; B must have had no part in making these
    either."""

    tiers: tuple[TierBudget, ...]
    path: tuple[Plan, ...]

    def on(
        self,
        plan: Plan,
        records_b: Records,
        *,
        saving: float,
        ramp_ids: tuple[str, ...],
        level: float,
        effects: DesignEffects,
    ) -> list[_Served]:
        """Those tiers that some plan of the path passes and saves time for, at ramps of the ``plan`` that was certified
        and has its own ``saving``."""
        steps = _Steps(self.path, records_b, ramp_ids=ramp_ids, slices=(), effects=effects)
        fits = _within(plan)
        served = []
        for tier in self.tiers:
            reach = steps.walk(None, budget=tier.budget, level=level)
            saved = [(steps.saving(m, ()), m) for m in range(reach) if {r.id for r in self.path[m].ramps} <= fits]
            mine, chosen = max(saved, default=(0.0, 0))
            if mine > (saving if tier.loosens else 0.0):
                result = steps.tier_result(chosen, tier, level=level)
                served.append(_Served(TierRamps(tier.name, self.path[chosen].ramps), result, mine))
        return served


def _within(plan: Plan) -> set[str]:
    """Ramps that requests may leave at in a batch of this plan."""
    return {ramp.id for ramp in plan.ramps if ramp.threshold > 0}


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
        self._effects, self._slices = effects, tuple(slices)
        self._labels = any(s.of == "Answer" for s in slices)
        self._replayed: dict[int, Answers] = {}

    def losses(self, step: int, of: SliceBudget | None) -> Losses:
        """What the requests of a slice, or all, lose under a step."""
        lost = self._replay(step).losses
        return lost if of is None else lost.take(self.rows(step, of))

    def rows(self, step: int, of: SliceBudget | None) -> BoolArray:
        """Requests of a slice under a step, (n,); without one all."""
        if of is None:
            return np.ones(len(self._records), dtype=np.bool_)
        return in_slice(of, self._records, self._replay(step).labels)

    def walk(self, of: SliceBudget | None, *, budget: float, level: float) -> int:
        """How many steps pass before the first that does not."""
        losses = (self.losses(step, of) for step in range(len(self._path)))
        return passing_steps(losses, budget=budget, level=level, design_effect=self._effects.of(of))

    def saving(self, step: int, stopped: Sequence[SliceBudget]) -> float:
        """Share of the fp32 backbone's time saved when the requests of stopped slices run to its end."""
        seconds, total = self._replay(step).seconds, self._records.costs.baseline_seconds
        if stopped:
            seconds = np.where(np.logical_or.reduce([self.rows(step, s) for s in stopped]), total, seconds)
        return 1.0 - float(np.mean(seconds)) / total

    def claim(
        self, step: int, *, plan: Plan, budget: float, delta: float, test_index: int, level: float
    ) -> dict[str, Any]:
        """The fields of a step's certificate but for its slices and tiers; ``plan`` is the step's with the latter."""
        records = self._records
        seen, effect = self.losses(step, None), self._effects.of(None)
        return {
            "method": METHOD_LOSSES if records.graded else METHOD,
            "plan_hash": plan.content_hash,
            "budget": budget,
            "delta": delta,
            "test_index": test_index,
            "level": level,
            "n": len(seen),
            "k": seen.count,
            "p_value": seen.p_value(budget=budget, design_effect=effect),
            "backbone_digest": plan.backbone_digest,
            "ramp_set_digest": plan.ramp_set_digest,
            "records_digest": records_digest(records, slices=self._slices),
            "ramp_ids": self._ramp_ids,
            "records_through": None if records.time is None else float(records.time.max()),
            "design_effect": effect,
            "lost": seen.total if records.graded else None,
        }

    def slice_result(self, step: int, wanted: SliceBudget, *, level: float, certified: bool) -> SliceResult:
        seen, effect = self.losses(step, wanted), self._effects.of(wanted)
        judged = {"budget": wanted.budget, "design_effect": effect}
        p = 1.0 if math.isinf(effect) else seen.p_value(**judged)
        more = None if certified else seen.more(level=level, **judged)
        lost = seen.total if seen.graded else None
        return SliceResult(
            wanted.slice_id, wanted.budget, level, len(seen), seen.count, p, certified, more, wanted.of, effect, lost
        )

    def tier_result(self, step: int, tier: TierBudget, *, level: float) -> TierResult:
        seen, effect = self.losses(step, None), self._effects.of(None)
        p = seen.p_value(budget=tier.budget, design_effect=effect)
        lost = seen.total if seen.graded else None
        return TierResult(tier.name, tier.budget, level, len(seen), seen.count, p, effect, lost)

    def more_for(self, of: SliceBudget | None, *, budget: float, level: float) -> int | None:
        """About how many labels of all requests it takes until the most cautious plan passes, for all of them or in a
        slice; None when more do not help."""
        seen, effect = self.losses(0, of), self._effects.of(of)
        more = None if math.isinf(effect) else seen.more(budget=budget, level=level, design_effect=effect)
        return None if more is None or len(seen) == 0 else math.ceil(more * len(self._records) / len(seen))

    def _replay(self, step: int) -> Answers:
        if step not in self._replayed:
            self._replayed[step] = answers(self._records, self._path[step], self._ramp_ids, labels=self._labels)
        return self._replayed[step]
