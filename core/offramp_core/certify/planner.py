"""How many labels a certificate takes, so that waiting can be announced in advance.

Exact for the binomial test. Of ``graded`` losses nobody knows in advance how they are distributed, so they are taken
for the hardest of their mean, which are 0 or 1: on those the bets of :mod:`offramp_core.certify.betting` are the
mixture of :mod:`offramp_core.evidence.one_arm`.
"""

from __future__ import annotations

import math

import numpy as np

from offramp_core import binomial
from offramp_core.evidence.one_arm import check_rate, log_e_value

#: Counts: the labels that are waited for are found without scipy, which an idle operator has no use for.
_SUMMED = 10_000


def fewest_labels(budget: float, level: float, *, graded: bool = False) -> int:
    """Held-out labels below which not even a plan without a single disagreement passes."""
    check_rate("budget", budget)
    check_rate("level", level)
    if graded:
        return fewest_for_count(0, budget=budget, level=level, graded=True)
    return math.ceil(math.log(level) / math.log1p(-budget) - 1e-9)


def labels_for(rate: float, *, budget: float, level: float, power: float = 0.9, graded: bool = False) -> int | None:
    """Held-out labels with which a plan of true disagreement ``rate`` passes with ``power``; None when it never does.

    The power saws a little with n, so this is an n that suffices and not always the very first.
    """
    if rate >= budget:
        return None
    low = fewest_labels(budget, level, graded=graded) - 1
    high = low + 1
    while _pass_probability(high, rate, budget=budget, level=level, graded=graded) < power:
        low, high = high, high * 2
        if high > 100_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _pass_probability(middle, rate, budget=budget, level=level, graded=graded) >= power:
            high = middle
        else:
            low = middle
    return high


def more_labels(k: int, n: int, *, budget: float, level: float, design_effect: float = 1.0) -> int | None:
    """About how many more labels a plan with ``k`` of ``n`` needs to pass if it goes on like that; None if it would
    not.

    ``design_effect`` labels are worth one.
    """
    # Only failed tests ask, and those have seen more than their share: no correction is added on top of that.
    needed = labels_for(k / max(1, n), budget=budget, level=level, power=0.5)
    return None if needed is None else max(1, math.ceil(design_effect * needed) - n)


def largest_passing_count(n: int, *, budget: float, level: float, graded: bool = False) -> int:
    """Most disagreements among ``n`` labels that still pass; -1 when none does."""
    if graded:
        low, high = -1, n + 1  # the evidence falls with k
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _passes(middle, n, budget=budget, level=level, graded=True) else (low, middle)
        return low
    k = int(binomial.ppf(level, n, budget))  # smallest k with cdf >= level
    while k >= 0 and binomial.cdf(k, n, budget) > level:
        k -= 1
    return k


def _pass_probability(n: int, rate: float, *, budget: float, level: float, graded: bool) -> float:
    most = math.ceil(n * budget)  # P(X <= most) is a half or more
    if not graded and level < 0.5 and most <= _SUMMED:
        passing = int(np.searchsorted(binomial.lower_tails(n, budget, most), level, side="right"))
        return float(binomial.lower_tails(n, rate, most)[passing - 1]) if passing else 0.0
    k = largest_passing_count(n, budget=budget, level=level, graded=graded)
    return float(binomial.cdf(k, n, rate)) if k >= 0 else 0.0


def fewest_for_count(k: int, *, budget: float, level: float, graded: bool = False) -> int:
    """Fewest labels with which ``k`` disagreements still pass."""
    low, high = k, max(2 * k, fewest_labels(budget, level))
    while not _passes(k, high, budget=budget, level=level, graded=graded):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _passes(k, middle, budget=budget, level=level, graded=graded) else (middle, high)
    return high


def _passes(k: int, n: int, *, budget: float, level: float, graded: bool) -> bool:
    if graded:
        return log_e_value(k, n, p0=budget, alternative="less") >= -math.log(level)
    return bool(binomial.cdf(k, n, budget) <= level)
