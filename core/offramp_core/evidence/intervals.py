"""Intervals that hold at every moment at once: a rate from counts, a sum of bounded values.

An ordinary 95 % interval is right at one sample size fixed beforehand; on a dashboard that people watch it is wrong
sooner or later. A *confidence sequence* covers the truth at all times simultaneously with probability 1 - alpha, so it
may be read, and acted on, whenever one likes. What is covered is the average so far of the (conditional) rates or
means, hence nothing needs to be stationary or independent.

Both are built from one idea. For a fixed tilt t the product of exp(t X) over its largest possible expectation is a
supermartingale; the average over a grid of tilts is one as well, and depends on sums alone. Pooling workers is adding.

Sources: Ville (1939); Howard, Ramdas, McAuliffe and Sekhon (2021), "Time-uniform, nonparametric, nonasymptotic
confidence sequences", arXiv:1810.08240 (empirical Bernstein: theorem 4); Waudby-Smith and Ramdas (2024),
arXiv:2010.09686; the inequality behind it: Fan, Grama and Liu (2015), EJP 20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import check_counts, check_rate

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Tilts, equally weighted. The best tilt falls with the square root of the information seen, so they are spread
# evenly in the logarithm: from what a handful of observations needs to what a hundred million do.
_RATE_TILTS = np.geomspace(2e-3, 8.0, 28)
_MEAN_TILTS = np.geomspace(1e-4, 0.9, 28)
_BISECTIONS = 45
BLOCK = 8192  # values that stay in the cache while they are added


@dataclass(frozen=True, slots=True)
class Interval:
    """``low <= truth <= high`` at all times, with the probability asked for."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def rate_interval(k: int, n: int, *, alpha: float) -> Interval:
    """Where the average rate so far lies, given ``k`` events in ``n`` trials.

    Parameters
    ----------
    k, n : int
        0 <= k <= n.
    alpha : float
        Probability to be wrong at any time ever, in (0, 1); each end has half of it.

    Returns
    -------
    Interval
        [0, 1] without observations. It covers the average of P(event | past) over the n trials, drifting or not.

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.

    Examples
    --------
    >>> i = rate_interval(20, 1000, alpha=0.05)
    >>> 0.008 < i.low < 0.02 < i.high < 0.04
    True
    """
    check_counts(k, n)
    check_rate("alpha", alpha)
    return Interval(_lowest_rate(k, n, alpha), 1 - _lowest_rate(n - k, n, alpha))


def log_evidence_above(k: Counts, n: Counts, *, rate: float) -> Floats:
    """Log evidence that the average rate exceeds ``rate``, elementwise over counts; an interval's low end is where it
    is log(2/alpha)."""
    cost = np.log1p(rate * np.expm1(_RATE_TILTS))
    terms = np.multiply.outer(k, _RATE_TILTS) - np.multiply.outer(n, cost)
    return np.asarray(np.logaddexp.reduce(terms, axis=-1) - math.log(len(_RATE_TILTS)))


def deviation(surprise: float, *, reach: float, alpha: float) -> float:
    """How far, in either direction, the sum of values may be from the sum of their conditional means, at any time.

    ``surprise`` is the sum of squared differences between values and their predictions, each of which is at most
    ``reach``.
    """
    check_rate("alpha", alpha)
    limit = math.log(2 / alpha) + math.log(len(_MEAN_TILTS))
    costs = (-np.log1p(-_MEAN_TILTS) - _MEAN_TILTS) * (surprise / reach**2)

    def too_far(u: float) -> bool:
        return float(np.logaddexp.reduce(_MEAN_TILTS * u - costs)) >= limit

    # One tilt alone already crosses at the high end, so all of them together do.
    return reach * _first(too_far, high=float(np.min((limit + costs) / _MEAN_TILTS)))


def add_surprises(
    x: Floats, n: int, total: float, surprise: float, *, guess: tuple[float, float]
) -> tuple[float, float]:
    """(total, surprise) after more values; each is predicted by the mean before it, kept inside ``guess``.

    Running sums keep the order of addition, so that blocks and single values round alike.
    """
    low, high = guess
    middle = (low + high) / 2  # counts as one value, as long as there is no other
    for part in np.split(x, range(BLOCK, len(x), BLOCK)):
        totals = np.cumsum(np.concatenate(([total], part)))
        before = (totals[:-1] + middle) / np.arange(n + 1.0, n + 1.0 + len(part))
        missed = part - np.minimum(np.maximum(before, low), high)
        missed *= missed
        n, total = n + len(part), float(totals[-1])
        surprise = float(np.cumsum(np.concatenate(([surprise], missed)))[-1])
    return total, surprise


def check_values(name: str, values: npt.ArrayLike, *, low: float, high: float) -> Floats:
    """Values as float64 [n]; refuses NaN and whatever lies outside [low, high]."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise InvalidArgumentError(f"{name} have shape {x.shape}; they must be one-dimensional")
    if len(x) and not (x.min() >= low and x.max() <= high):  # NaN compares false
        bad = np.flatnonzero(~((x >= low) & (x <= high)))
        raise InvalidArgumentError(f"{name}[{bad[0]}] is {x[bad[0]]}; it must lie in [{low:g}, {high:g}]")
    return x


def _lowest_rate(k: int, n: int, alpha: float) -> float:
    """Smallest rate that the counts do not exclude as too low."""
    if k == 0:
        return 0.0
    limit = math.log(2 / alpha)
    counts, trials = np.asarray(k), np.asarray(n)
    return _first(lambda rate: float(log_evidence_above(counts, trials, rate=rate)) < limit, high=k / n)


def _first(holds: Callable[[float], bool], *, high: float) -> float:
    """Smallest value in [0, high] from which on ``holds``, by bisection."""
    low = 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
