"""The exact optimum over the thresholds of given ramps, within error limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from offramp_core.evaluate import Evaluation, check_active, evaluate
from offramp_core.records import Records
from offramp_core.search.branch import BranchAndBound, Choice
from offramp_core.search.grid import threshold_of
from offramp_core.search.limits import error_budget, make_limits
from offramp_core.search.objective import Figures, Pricing, price
from offramp_core.search.space import SearchSpace

__all__ = ["SearchResult", "ThresholdPlan", "as_plan", "best_thresholds", "error_budget"]

NODE_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class ThresholdPlan:
    """Ramps and thresholds as a plan stores them, and what they do on the records they were found on."""

    active: tuple[int, ...]
    thresholds: tuple[Decimal, ...]
    evaluation: Evaluation

    @property
    def saving(self) -> float:
        return self.evaluation.saving

    @property
    def disagreement(self) -> float:
        return self.evaluation.disagreement

    @property
    def errors(self) -> int:
        return self.evaluation.disagreements


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan found and a proof of how good it is."""

    plan: ThresholdPlan
    #: A value that no plan in the space searched exceeds.
    bound: float
    #: Sets of ramps bounded and boxes divided.
    nodes: int
    #: What the plan saves of the objective, as a share of what the backbone costs; its mean saving unless other weights
    #: were given.
    value: float
    #: Mean, tail and busy time of the plan.
    figures: Figures

    @property
    def gap(self) -> float:
        """Value that may have been missed; 0 when the plan is optimal."""
        return max(0.0, self.bound - self.value)

    @property
    def optimal(self) -> bool:
        return self.gap <= 1e-9


def best_thresholds(
    records: Records,
    active: Sequence[int],
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
    slice_budgets: Mapping[int, float] | None = None,
    pricing: Pricing | None = None,
) -> ThresholdPlan:
    """Thresholds of given ramps that save most within a budget, proven optimal.

    All requests count: leavers with the ramp's answer, the others with the final answer. Inputs whose scores no stored
    threshold can separate leave together. Between thresholds that do the same on the records the lowest is returned.

    Parameters
    ----------
    records : Records
    active : sequence of int
        Strictly increasing ramp indices; all are paid for, whatever their thresholds.
    max_disagreement, max_errors, slice_budgets, pricing
        As in :func:`offramp_core.search.placement.best_plan`.

    Returns
    -------
    ThresholdPlan
        Exits off (no ramps) when no thresholds on these ramps keep the limits, which happens only where final answers
        are wrong.

    Raises
    ------
    InvalidArgumentError
        Ramps or limits outside their range.
    """
    ramps = check_active(records, active)
    limits = make_limits(records, max_disagreement=max_disagreement, max_errors=max_errors, slice_budgets=slice_budgets)
    space = SearchSpace(records, limits)
    pricing = price(records) if pricing is None else pricing
    search = BranchAndBound(space, pricing, best=None, node_limit=NODE_LIMIT)
    if ramps:
        search.add(ramps)
        search.run()
    return as_plan(space, search.best)


def as_plan(space: SearchSpace, choice: Choice | None, *, drop_idle: bool = False) -> ThresholdPlan:
    """A search's choice as thresholds, evaluated anew. ``drop_idle`` leaves out ramps at which nothing leaves."""
    pairs = [] if choice is None else list(zip(choice.active, space.keys_of(choice.active, choice.cuts), strict=True))
    if drop_idle:
        pairs = [(ramp, key) for ramp, key in pairs if key > 0]
    active = tuple(ramp for ramp, _ in pairs)
    thresholds = tuple(threshold_of(key) for _, key in pairs)
    return ThresholdPlan(active, thresholds, evaluate(space.records, active, thresholds))
