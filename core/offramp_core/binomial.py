"""Binomial tails. ``scipy.stats`` has them too, but importing it takes longer than everything else a command does.

Even ``scipy.special`` is a sixth of what an operator's start imports, and 20 MiB, so it is imported when the first tail
is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Number = int | npt.NDArray[Any]

_QUANTILES = 40


def cdf(k: Number, n: Number, p: float) -> npt.NDArray[np.float64]:
    """P(Bin(n, p) <= k); 0 below the support and 1 from n on."""
    from scipy import special

    k, n = np.asarray(k), np.asarray(n)
    inner = special.bdtr(np.clip(k, 0, n).astype(np.float64), n.astype(np.int64), p)
    return np.where(k < 0, 0.0, np.where(k >= n, 1.0, inner))


def lower_tails(n: int, p: float, most: int) -> npt.NDArray[np.float64]:
    """P(Bin(n, p) <= k) of every k from 0 to ``most`` <= n, summed up: where ``most`` is small that needs no scipy."""
    if p == 0.0:
        return np.ones(most + 1)
    k = np.arange(1, most + 1)
    ratios = np.log((n - k + 1) / k) + math.log(p) - math.log1p(-p)
    return np.cumsum(np.exp(n * math.log1p(-p) + np.concatenate([[0.0], np.cumsum(ratios)])))


def continued_cdf(k: float, n: float, p: float) -> float:
    """:func:`cdf` continued to counts between whole numbers, by the regularized incomplete beta function."""
    from scipy import special

    return float(special.betainc(n - k, k + 1, 1 - p)) if k < n else 1.0


def continued_tail(k: float, n: float, p: float) -> float:
    """P(Bin(n, p) >= k), continued likewise."""
    from scipy import special

    return float(special.betainc(k, n - k + 1, p)) if k > 0 else 1.0


def sf(k: Number, n: Number, p: float) -> npt.NDArray[np.float64]:
    """P(Bin(n, p) > k); 1 below the support and 0 from n on."""
    from scipy import special

    k, n = np.asarray(k), np.asarray(n)
    inner = special.bdtrc(np.clip(k, 0, n).astype(np.float64), n.astype(np.int64), p)
    return np.where(k < 0, 1.0, np.where(k >= n, 0.0, inner))


def isf(alpha: float, n: int, p: float) -> int:
    """The smallest k with P(Bin(n, p) > k) <= alpha."""
    from scipy import special

    low, high = -1, n  # the tail falls with k: 1 at -1, 0 at n; :func:`sf` of a single count takes ten times as long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if special.bdtrc(middle, n, p) <= alpha else (middle, high)
    return high


def ppf(q: float, n: int, p: float) -> int:
    """The smallest k with P(Bin(n, p) <= k) >= q."""
    return isf(1 - q, n, p)


def predictive_cdf(k: int, n: int, *, lost: float, seen: float) -> float:
    """P(at most ``k`` of ``n`` further ones) where ``lost`` of ``seen`` were: a Beta-binomial with Jeffreys' prior, by
    the mean over evenly spaced quantiles of the rate. The chance that what looked good once does so again."""
    from scipy import special

    if not 0 <= k < n:
        return float(k >= n)
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    rates = special.betaincinv(lost + 0.5, max(seen - lost, 0.0) + 0.5, at)
    return float(np.mean(special.bdtr(float(k), n, rates)))
