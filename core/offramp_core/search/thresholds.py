"""The exact minimum of mean cost over the thresholds of given ramps, within an error budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import Evaluation, check_active, evaluate
from offramp_core.records import Records
from offramp_core.search.branch import BranchAndBound, Choice
from offramp_core.search.grid import threshold_of
from offramp_core.search.queues import SearchSpace

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
    """The best plan found and a proof of how good it is.

    ``bound`` is a saving that no plan in the space searched exceeds; ``nodes`` counts bounded or solved pairs of ramps.
    """

    plan: ThresholdPlan
    bound: float
    nodes: int

    @property
    def gap(self) -> float:
        """Saving that may have been missed, as a share of the backbone's time; 0 when the plan is optimal."""
        return max(0.0, self.bound - self.plan.saving)

    @property
    def optimal(self) -> bool:
        return self.gap <= 1e-9


def best_thresholds(
    records: Records,
    active: Sequence[int],
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
) -> ThresholdPlan:
    """Thresholds of given ramps that save most within a budget, proven optimal.

    All requests count: leavers with the ramp's answer, the others with the final answer. Inputs whose scores no stored threshold can
    separate leave together. Between thresholds that do the same on the records the lowest is returned.

    Parameters
    ----------
    records : Records
    active : sequence of int
        Strictly increasing ramp indices; all are paid for, whatever their thresholds.
    max_disagreement : float, optional
        Allowed share of disagreements over all requests, in [0, 1].
    max_errors : int, optional
        The same as a count; give one of the two.

    Returns
    -------
    ThresholdPlan
        Exits off (no ramps) when no thresholds on these ramps keep the budget, which happens only where final answers are wrong.

    Raises
    ------
    InvalidArgumentError
        Ramps or budget outside their range.
    """
    ramps = check_active(records, active)
    errors = error_budget(len(records), max_disagreement=max_disagreement, max_errors=max_errors)
    if not ramps:
        return as_plan(records, None)
    search = BranchAndBound(SearchSpace(records), errors=errors, best=None, node_limit=NODE_LIMIT)
    if len(ramps) == 1:
        search.single(ramps[0])
    else:
        search.multi(ramps[:-2], [(ramps[-2], ramps[-1])])
        search.run()
    return as_plan(records, search.best)


def error_budget(n: int, *, max_disagreement: float | None = None, max_errors: int | None = None) -> int:
    """The largest number of errors k with k / n <= max_disagreement.

    Raises
    ------
    InvalidArgumentError
        Not exactly one budget is given, or it is out of range, or there are no records.
    """
    if n == 0:
        raise InvalidArgumentError("records are empty; a search needs at least one")
    if (max_disagreement is None) == (max_errors is None):
        raise InvalidArgumentError("give either max_disagreement (a share) or max_errors (a count)")
    if max_errors is not None:
        if max_errors < 0:
            raise InvalidArgumentError(f"max_errors is {max_errors}; it must be >= 0")
        return min(max_errors, n)
    assert max_disagreement is not None
    if not 0 <= max_disagreement <= 1:
        raise InvalidArgumentError(f"max_disagreement is {max_disagreement}; it must lie in [0, 1]")
    k = int(max_disagreement * n)
    # The product may have been rounded across an integer in either direction.
    return k + 1 if k < n and (k + 1) / n <= max_disagreement else k - 1 if k / n > max_disagreement else k


def as_plan(records: Records, choice: Choice | None, *, drop_idle: bool = False) -> ThresholdPlan:
    """A search's choice as thresholds, evaluated anew. ``drop_idle`` leaves out ramps at which nothing leaves."""
    pairs = [] if choice is None else list(zip(choice.active, choice.keys, strict=True))
    if drop_idle:
        pairs = [(ramp, key) for ramp, key in pairs if key > 0]
    active = tuple(ramp for ramp, _ in pairs)
    thresholds = tuple(threshold_of(key) for _, key in pairs)
    return ThresholdPlan(active, thresholds, evaluate(records, active, thresholds))
