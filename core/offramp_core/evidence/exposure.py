"""Minimum exposure: how much a gate must have seen before its silence means anything.

A gate that has not rejected says little while a harmful plan could still hide. The exposure is the number of
observations at which a plan of a stated harm would have been rejected with a stated power, computed from the
very e-values the gates use: at n observations the evidence crosses the limit from k(n) events on, and the
power is the binomial tail there. Looking earlier as well only adds power, so the number errs to the long side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import alternatives, check_rate, log_mixture
from offramp_core.evidence.two_arm import harmful_shares
from offramp_core.sketch import SecondsSketch

SLOW_QUANTILE = 0.90
LARGEST_EXPOSURE = 10_000_000
LARGEST_BATCH_EXPOSURE = 2_000


def reached(seen: float, needed: float) -> float | None:
    """Share of a minimum exposure that has been seen, rounded down to four digits: 1 only once all of it has; None where none is asked for.

    Examples
    --------
    >>> reached(1237, 1415), reached(1414.99, 1415), reached(1500, 1415), reached(5, 0)
    (0.8742, 0.9999, 1.0, None)
    """
    if needed <= 0:
        return None
    return math.floor(10_000 * min(1.0, max(0.0, seen) / needed)) / 10_000


def audits_needed(
    *, budget: float, harmful: float, alpha: float, power: float = 0.95, grid: tuple[float, ...] | None = None
) -> int:
    """Audited requests after which a plan with rate ``harmful`` would have been rejected against ``budget``.

    Parameters
    ----------
    budget, harmful : float
        Rates; ``budget`` in (0, 1), ``harmful`` above it (cut off halfway between the budget and 1).
    alpha : float
        Level of the gate.
    power : float
        Probability with which the harmful plan is rejected by then.
    grid : tuple of float, optional
        Alternatives of the gate's e-value; by default those of the one-arm test.

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.

    Examples
    --------
    >>> 300 < audits_needed(budget=0.01, harmful=0.03, alpha=0.05) < 1200
    True
    """
    check_rate("budget", budget)
    return harmful_exposure(budget, min(harmful, (1 + budget) / 2), alpha, power, grid=grid)


def judged_batches_needed(
    sketches: Iterable[SecondsSketch],
    *,
    weight: float,
    slowdown: float = 1.2,
    alpha: float,
    power: float = 0.95,
    limit: int = LARGEST_BATCH_EXPOSURE,
) -> int:
    """Judged batches, of both arms, after which a slow canary would have been rejected.

    A stable batch is slow above the p90 of its size, a canary batch above (1 + max_overhead) times that: a canary that takes exactly its
    allowed overhead longer has the same share of slow batches, ``q0``. ``q1`` is the share when it takes (1 + max_overhead) x ``slowdown`` times as long.

    Parameters
    ----------
    sketches : iterable of SecondsSketch
        Execution seconds of the stable arm, one sketch per batch size.
    weight : float
        The canary's weight in percent.
    slowdown : float
        Harm to notice, beyond the overhead.
    alpha, power : float
        Level of the gate, and the probability to notice.
    limit : int
        The answer where the stable arm's times are unknown, or scatter so widely that telling such a slowdown takes more. By then a
        canary of twice the time has long been rejected, and the gate stays armed after the step.

    Returns
    -------
    int
        0 at weight 100, where there is no stable arm to compare with.
    """
    if not 0 < weight <= 100:
        raise InvalidArgumentError(f"weight is {weight}; it must lie in (0, 100] percent")
    if weight == 100:
        return 0
    q0, q1 = _slow_shares(tuple(sketches), slowdown=slowdown)
    share = weight / 100
    slow_rate = share * q1 + (1 - share) * q0
    if not q1 > q0:
        return limit
    # Two things must go well, each with the square root of the power: enough slow batches, and a rejection from them.
    each = math.sqrt(power)
    harmful = min(share * q1 / slow_rate, 1 - 1e-9)
    slow = harmful_exposure(share, harmful, alpha, each, grid=harmful_shares(share), largest=limit)
    if slow >= limit:
        return limit
    return min(limit, _trials_for(slow, rate=slow_rate, power=each))


@lru_cache(maxsize=1024)
def harmful_exposure(
    p0: float,
    harmful: float,
    alpha: float,
    power: float,
    *,
    grid: tuple[float, ...] | None = None,
    largest: int = LARGEST_EXPOSURE,
) -> int:
    """Observations at which a rate ``harmful`` is rejected against ``p0`` with ``power``; ``largest`` if none below it.

    ``grid`` are the alternatives of the gate's e-value, by default those of the one-arm test.

    Raises
    ------
    InvalidArgumentError
        ``harmful`` does not exceed ``p0``, or a value is not in (0, 1).
    """
    for name, value in (("p0", p0), ("harmful", harmful), ("alpha", alpha), ("power", power)):
        check_rate(name, value)
    if not harmful > p0:
        raise InvalidArgumentError(f"harmful is {harmful}; it must exceed p0={p0}, or there is nothing to notice")
    grid = grid or alternatives(p0, "greater")
    high = 1
    while _power(np.asarray([high]), p0, harmful, alpha, grid)[0] < power:
        high *= 2
        if high >= largest:
            return largest
    # The power saws up and down by a little as k(n) jumps, so bisection finds an n that suffices, not always the very first.
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if _power(np.asarray([middle]), p0, harmful, alpha, grid)[0] >= power:
            high = middle
        else:
            low = middle
    return high


def rejection_count(
    n: npt.NDArray[np.int64], *, p0: float, alpha: float, grid: tuple[float, ...]
) -> npt.NDArray[np.int64]:
    """Smallest k whose evidence reaches log(1/alpha) at each n; n + 1 where none does. Bisection: evidence grows with k."""
    n = np.asarray(n, dtype=np.int64)
    low, high = np.full_like(n, -1), n + 1
    limit = math.log(1 / alpha)
    while np.any(high - low > 1):
        middle = np.clip((low + high) // 2, 0, n)
        reached = log_mixture(middle, n, p0=p0, grid=grid) >= limit
        open_ = high - low > 1
        high = np.where(open_ & reached, middle, high)
        low = np.where(open_ & ~reached, middle, low)
    return high


def _power(
    n: npt.NDArray[np.int64], p0: float, harmful: float, alpha: float, grid: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    k = rejection_count(n, p0=p0, alpha=alpha, grid=grid)
    return np.asarray(binomial.sf(k - 1, n, harmful))


def _slow_shares(sketches: tuple[SecondsSketch, ...], *, slowdown: float) -> tuple[float, float]:
    slow, slow_if_harmful, total = 0.0, 0.0, 0
    for sketch in sketches:
        p90 = sketch.quantile(SLOW_QUANTILE)
        if p90 is None:
            continue
        slow += sketch.n * (sketch.share_above(p90) or 0.0)
        slow_if_harmful += sketch.n * (sketch.share_above(p90 / slowdown) or 0.0)
        total += sketch.n
    return (slow / total, slow_if_harmful / total) if total else (0.0, 0.0)


def _trials_for(events: int, *, rate: float, power: float) -> int:
    """Smallest number of trials that have at least ``events`` events with probability ``power``."""
    low, high = events - 1, max(events, math.ceil(events / rate))
    while binomial.sf(events - 1, high, rate) < power:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if binomial.sf(events - 1, middle, rate) >= power:
            high = middle
        else:
            low = middle
    return high
