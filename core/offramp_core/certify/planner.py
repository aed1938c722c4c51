"""How many labels a certificate takes: exact for the binomial test, so that waiting can be announced in advance."""

from __future__ import annotations

import math

from offramp_core import binomial
from offramp_core.evidence.one_arm import check_rate


def fewest_labels(budget: float, level: float) -> int:
    """Held-out labels below which not even a plan without a single disagreement passes."""
    check_rate("budget", budget)
    check_rate("level", level)
    return math.ceil(math.log(level) / math.log1p(-budget) - 1e-9)


def labels_for(rate: float, *, budget: float, level: float, power: float = 0.9) -> int | None:
    """Held-out labels with which a plan of true disagreement ``rate`` passes with ``power``; None when it never does.

    The power saws a little with n, so this is an n that suffices and not always the very first.
    """
    if rate >= budget:
        return None
    low = fewest_labels(budget, level) - 1
    high = low + 1
    while _pass_probability(high, rate, budget=budget, level=level) < power:
        low, high = high, high * 2
        if high > 100_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _pass_probability(middle, rate, budget=budget, level=level) >= power:
            high = middle
        else:
            low = middle
    return high


def more_labels(k: int, n: int, *, budget: float, level: float, design_effect: float = 1.0) -> int | None:
    """About how many more labels a plan with ``k`` of ``n`` needs to pass if it goes on like that; None if it would not.

    ``design_effect`` labels are worth one.
    """
    # Only failed tests ask, and those have seen more than their share: no correction is added on top of that.
    needed = labels_for(k / max(1, n), budget=budget, level=level, power=0.5)
    return None if needed is None else max(1, math.ceil(design_effect * needed) - n)


def largest_passing_count(n: int, *, budget: float, level: float) -> int:
    """Most disagreements among ``n`` labels that still pass; -1 when none does."""
    k = int(binomial.ppf(level, n, budget))  # smallest k with cdf >= level
    while k >= 0 and binomial.cdf(k, n, budget) > level:
        k -= 1
    return k


def _pass_probability(n: int, rate: float, *, budget: float, level: float) -> float:
    k = largest_passing_count(n, budget=budget, level=level)
    return float(binomial.cdf(k, n, rate)) if k >= 0 else 0.0


def fewest_for_count(k: int, *, budget: float, level: float) -> int:
    """Fewest labels with which ``k`` disagreements still pass."""
    low, high = k, max(2 * k, fewest_labels(budget, level))
    while binomial.cdf(k, high, budget) > level:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial.cdf(k, middle, budget) > level else (low, middle)
    return high
