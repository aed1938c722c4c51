"""Which ramps to use, and their thresholds, decided together over all recorded ramps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import MAX_ACTIVE_RAMPS
from offramp_core.records import Records
from offramp_core.search.branch import BranchAndBound, Choice
from offramp_core.search.limits import make_limits
from offramp_core.search.objective import Pricing, head_starts, overheads, price
from offramp_core.search.space import SearchSpace
from offramp_core.search.thresholds import SearchResult, as_plan

NODE_LIMIT = 100_000
EXACT_UP_TO = 256  # errors; with more, plans that differ by less than the tolerance are too many to tell apart
COARSE_TOLERANCE = 2e-4  # of the objective
SWEPT_SHARE = 0.25  # of the nodes left, for bounding all sets of one size
QUICK_BOXES = 200  # for a good plan before larger sets are bounded against it


def best_plan(
    records: Records,
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
    max_ramps: int = 3,
    max_overhead: float = 1.0,
    slice_budgets: Mapping[int, float] | None = None,
    pricing: Pricing | None = None,
    max_gap: float = 0.0,
    tolerance: float | None = None,
    node_limit: int = NODE_LIMIT,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult:
    """The plan of at most ``max_ramps`` of all recorded ramps that saves most within its limits.

    Exits off wins when nothing saves. Sets of ramps are bounded, small ones first, as far as the node limit allows;
    larger ones are only tried around the best plan. The gap holds for all of ``max_ramps``.

    Parameters
    ----------
    records : Records
    max_disagreement, max_errors
        The budget, as a share of all requests or as a count; give one.
    max_ramps : int
        0 to 6.
    max_overhead : float
        Worst-case time that all active ramps may add, as a share of the backbone's, at every batch size measured.
    slice_budgets : mapping, optional
        From slice id to the share of its requests that may disagree; slices not named have no budget of their own.
    pricing : Pricing, optional
        What is saved (:func:`offramp_core.search.objective.price`); default the mean answer time at ``records.costs``.
    max_gap : float
        Stop as soon as no plan can be better by more than this share of the objective.
    tolerance : float, optional
        Plans that might be better by less than this share are not looked for; the gap says how much may be missed.
        Default 0 up to a budget of 256 errors and 0.02 % above, where too many plans differ by less.
    node_limit : int
        So many sets of ramps bounded and boxes divided: a count, not a clock, so that equal inputs give equal plans.
    should_stop : callable, optional
        Asked every few milliseconds; True ends the search with the best plan so far.

    Raises
    ------
    InvalidArgumentError
        An argument lies outside its range.
    """
    _check(max_ramps, max_overhead=max_overhead, max_gap=max_gap, tolerance=tolerance or 0.0)
    limits = make_limits(records, max_disagreement=max_disagreement, max_errors=max_errors, slice_budgets=slice_budgets)
    space = SearchSpace(records, limits)
    pricing = price(records) if pricing is None else pricing
    if tolerance is None:
        tolerance = 0.0 if limits.most_errors <= EXACT_UP_TO else COARSE_TOLERANCE
    off = Choice(0.0, (), ())
    search = BranchAndBound(
        space, pricing, best=off, node_limit=node_limit, max_gap=max_gap, tolerance=tolerance, should_stop=should_stop
    )
    bound = _search_all(search, max_ramps=min(max_ramps, records.n_ramps), max_overhead=max_overhead)
    return _result(search, bound)


def _result(search: BranchAndBound, bound: float) -> SearchResult:
    """The best plan of a search that is over; no plan gains more than ``bound`` weighted seconds."""
    plan = as_plan(search.space, search.best, drop_idle=True)
    figures = search.pricing.figures(plan.evaluation)
    value = search.pricing.saving(figures)
    return SearchResult(plan, max(value, bound / search.scale), search.nodes, value, figures)


def _check(max_ramps: int, **at_least_zero: float) -> None:
    if not 0 <= max_ramps <= MAX_ACTIVE_RAMPS:
        raise InvalidArgumentError(f"max_ramps is {max_ramps}; it must lie in 0..{MAX_ACTIVE_RAMPS}")
    for name, value in at_least_zero.items():
        if not value >= 0:
            raise InvalidArgumentError(f"{name} is {value}; it must be >= 0")


def _search_all(search: BranchAndBound, *, max_ramps: int, max_overhead: float) -> float:
    """Search all sets of ramps; an upper bound on what any of them gains.

    Sizes with more sets than there are nodes left to spend are only searched around the best smaller plan.
    """
    added = overheads(search.space.records)
    most = max_overhead * (1 + 1e-12) + head_starts(search.space.records)

    def allowed(active: Sequence[int]) -> bool:
        return bool((added[:, list(active)].sum(axis=1) <= most).all())

    if not search.prepare():
        return search.ceiling
    complete = True
    for size in range(1, max_ramps + 1):
        sweeps = math.comb(search.space.records.n_ramps, size) <= search.nodes_left * SWEPT_SHARE
        if size > 2:
            search.grow(allowed, swap=not sweeps)
        if not sweeps or not search.sweep(size, allowed):
            complete = False
            continue
        search.run(QUICK_BOXES)
    if complete:
        search.run()
        return search.bound
    search.run(QUICK_BOXES)  # more would not lower the ceiling
    return max(search.bound, search.ceiling)
