"""Which ramps to use, and their thresholds, decided together over all recorded ramps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import MAX_ACTIVE_RAMPS
from offramp_core.records import Records, SecondsArray
from offramp_core.search.branch import BranchAndBound, Choice
from offramp_core.search.queues import SearchSpace
from offramp_core.search.thresholds import SearchResult, as_plan, error_budget

NODE_LIMIT = 200_000
MOST_CUTS = 256


def best_plan(
    records: Records,
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
    max_ramps: int = 3,
    max_overhead: float = 1.0,
    node_limit: int = NODE_LIMIT,
    most_cuts: int = MOST_CUTS,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult:
    """The plan of at most ``max_ramps`` of all recorded ramps that saves most within a budget.

    Exits off is always a candidate and wins when nothing saves time. Sizes are searched in rising order, so a search that is cut short
    has finished the smaller plans first; the gap it reports holds for all.

    Parameters
    ----------
    records : Records
    max_disagreement, max_errors
        The budget, as a share of all requests or as a count; give one.
    max_ramps : int
        0 to 6.
    max_overhead : float
        Worst-case time all active ramps together may add, as a share of the backbone's time.
    node_limit : int
        Stop after about so many bounded pairs of ramps. A count and not a clock, so that equal inputs give equal plans.
    most_cuts : int
        Up to this error budget, as a count, the search is exact. Above it the split of errors is tried on a grid of so many steps per
        ramp, which keeps time and memory bounded; the gap then says how much may have been missed (below 0.1 points, as a rule).
    should_stop : callable, optional
        Asked between nodes; True ends the search with the best plan so far.

    Raises
    ------
    InvalidArgumentError
        An argument lies outside its range.
    """
    if not 0 <= max_ramps <= MAX_ACTIVE_RAMPS:
        raise InvalidArgumentError(f"max_ramps is {max_ramps}; it must lie in 0..{MAX_ACTIVE_RAMPS}")
    if most_cuts < 2:
        raise InvalidArgumentError(f"most_cuts is {most_cuts}; it must be at least 2")
    if not max_overhead >= 0:
        raise InvalidArgumentError(f"max_overhead is {max_overhead}; it must be >= 0")
    errors = error_budget(len(records), max_disagreement=max_disagreement, max_errors=max_errors)
    space = SearchSpace(records)
    search = BranchAndBound(
        space,
        errors=errors,
        best=Choice(0.0, (), ()),
        node_limit=node_limit,
        most_cuts=most_cuts,
        should_stop=should_stop,
    )
    allowed = max_overhead * records.costs.total_seconds * (1 + 1e-12)
    bound = -np.inf
    for size in range(1, max_ramps + 1):
        bound = max(bound, _search_size(search, space, size, allowed))
    plan = as_plan(records, search.best, drop_idle=True)
    scale = space.n * records.costs.total_seconds
    return SearchResult(plan, max(plan.saving, bound / scale), search.nodes)


def _search_size(search: BranchAndBound, space: SearchSpace, size: int, allowed: float) -> float:
    """Search all plans of one size; an upper bound on the seconds any of them saves."""
    seconds = space.ramp_seconds
    n_ramps = len(seconds)
    if size == 1:
        for ramp in range(n_ramps):
            if seconds[ramp] <= allowed:
                search.single(ramp)
        return search.best_gain
    for prefix in combinations(range(n_ramps), size - 2):
        pairs = list(_pairs(prefix, seconds, allowed))
        if not pairs:
            continue
        if search.stopped():
            return oracle_gain(space, search.errors)
        search.multi(prefix, pairs)
    search.run()
    bound = search.bound
    search.clear()
    return bound


def _pairs(prefix: tuple[int, ...], seconds: SecondsArray, allowed: float) -> Iterator[tuple[int, int]]:
    paid = seconds[list(prefix)].sum()
    for a, b in combinations(range(prefix[-1] + 1 if prefix else 0, len(seconds)), 2):
        if paid + seconds[a] + seconds[b] <= allowed:
            yield a, b


def oracle_gain(space: SearchSpace, errors: int) -> float:
    """More seconds than any plan can save: every input leaves, for nothing, at the first ramp that answers it correctly.

    The ``errors`` inputs with most to gain from a wrong answer leave at the first ramp of all.
    """
    agrees = space.records.agrees
    first = np.where(agrees.any(axis=1), agrees.argmax(axis=1), agrees.shape[1])
    gains = np.append(space.behind, 0.0)[first]
    missed = np.sort(space.behind[0] - gains)[::-1]
    return float(gains.sum() + missed[:errors].sum())
