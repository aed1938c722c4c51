"""Minimum exposure: how much a gate must have seen before its silence means anything.

A gate that has not rejected says little while a harmful plan could still hide. The exposure is the number of
observations at which a plan of a stated harm would have been rejected with a stated power, computed from the
very e-values the gates use: at n observations the evidence crosses the limit from k(n) events on, and the
power is the binomial tail there. Looking earlier as well only adds power, so the number errs to the long side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import alternatives, check_rate, log_average_ratio, log_mixture
from offramp_core.evidence.slow import Judged
from offramp_core.evidence.two_arm import harmful_shares

LARGEST_EXPOSURE = 10_000_000
LARGEST_BATCH_EXPOSURE = 2_000
# Slowdowns that a cut-off exposure may still exclude: close enough to say what is known, few enough to try them all.
SLOWDOWNS = (1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)


def reached(seen: float, needed: float) -> float | None:
    """Share of a minimum exposure that has been seen, rounded down to four digits: 1 only once all of it has; None
    where none is asked for.

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


def audits_to_earn(n: int, k: int, *, budget: float, log_limit: float, design_effect: float) -> int:
    """Audits, those ``n`` included, after which a plan of which as many disagree as ``k`` of these has shown that it is
    below its budget; 0 where it would take more than :data:`LARGEST_EXPOSURE`.

    Examples
    --------
    >>> audits_to_earn(300, 3, budget=0.02, log_limit=3.0, design_effect=10.0)
    13244
    """
    check_rate("budget", budget)
    grid = alternatives(budget, "less")

    def earned(audits: int) -> bool:
        wrong = math.ceil(audits * k / max(n, 1))
        return log_average_ratio(wrong, audits, p0=budget, grid=grid, design_effect=design_effect) >= log_limit

    high = max(n, 1)
    while not earned(high):
        high *= 2
        if high >= LARGEST_EXPOSURE:
            return 0
    low = n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if earned(middle) else (middle, high)
    return high


def judged_batches_needed(
    stable: Iterable[Judged],
    *,
    weight: float,
    slowdown: float = 1.2,
    alpha: float,
    power: float = 0.95,
    limit: int = LARGEST_BATCH_EXPOSURE,
) -> int:
    """Judged batches, of both arms, after which a slow canary would have been rejected.

    A stable batch is slow above its limit, a canary batch above (1 + max_overhead) times that: a canary that takes
    exactly its allowed overhead longer has the same share of slow batches, ``q0``. ``q1`` is the share when it takes (1
    + max_overhead) x ``slowdown`` times as long.

    Parameters
    ----------
    stable : iterable of Judged
        Execution seconds of the stable arm's batches, by the limit that they are held against.
    weight : float
        The canary's weight in percent.
    slowdown : float
        Harm to notice, beyond the overhead.
    alpha, power : float
        Level of the gate, and the probability to notice.
    limit : int
        The answer where the stable arm's times are unknown, or scatter so widely that telling such a slowdown takes
        more; :func:`noticed_slowdown` says which one it is enough for. The gate stays armed after the step.

    Returns
    -------
    int
        0 at weight 100, where there is no stable arm to compare with.
    """
    check_weight(weight)
    if weight == 100:
        return 0
    harm = _Slowdown.of(tuple(stable), share=weight / 100, slowdown=slowdown)
    if harm is None:
        return limit
    # Two things must go well, each with the square root of the power: enough slow batches, and a rejection from them.
    each = math.sqrt(power)
    slow = harmful_exposure(harm.share, harm.harmful, alpha, each, grid=harmful_shares(harm.share), largest=limit)
    if slow >= limit:
        return limit
    return min(limit, _trials_for(slow, rate=harm.slow_rate, power=each))


def noticed_slowdown(
    stable: Iterable[Judged], *, batches: int, weight: float, alpha: float, power: float = 0.95
) -> float | None:
    """The least of :data:`SLOWDOWNS` with which a canary would have been rejected after so many judged batches; None
    for none of them.

    Parameters are those of :func:`judged_batches_needed`.
    """
    check_weight(weight)
    stable, each, share = tuple(stable), math.sqrt(power), weight / 100
    if weight == 100:
        return None
    for slowdown in SLOWDOWNS:
        harm = _Slowdown.of(stable, share=share, slowdown=slowdown)
        if harm is None:
            continue
        slow = _events_in(batches, rate=harm.slow_rate, power=each)
        if slow and _power(slow, share, harm.harmful, alpha, harmful_shares(share)) >= each:
            return slowdown
    return None


def check_weight(weight: float) -> None:
    """Raises :class:`InvalidArgumentError` for what is no canary's weight in percent."""
    if not 0 < weight <= 100:
        raise InvalidArgumentError(f"weight is {weight}; it must lie in (0, 100] percent")


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
    while _power(high, p0, harmful, alpha, grid) < power:
        high *= 2
        if high >= largest:
            return largest
    # The power saws up and down by a little as k(n) jumps, so bisection finds an n that suffices, not always the very
    # first.
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if _power(middle, p0, harmful, alpha, grid) >= power:
            high = middle
        else:
            low = middle
    return high


def rejection_count(
    n: npt.NDArray[np.int64], *, p0: float, alpha: float, grid: tuple[float, ...]
) -> npt.NDArray[np.int64]:
    """Smallest k whose evidence reaches log(1/alpha) at each n; n + 1 where none does. Bisection: evidence grows with
    k."""
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


def rejects_from(n: int, *, p0: float, alpha: float, grid: tuple[float, ...]) -> int:
    """:func:`rejection_count` of one n, without arrays: the exposure of a step asks it some hundred times."""
    low, high, limit = -1, n + 1, math.log(1 / alpha)
    while high - low > 1:
        middle = (low + high) // 2
        crosses = log_average_ratio(middle, n, p0=p0, grid=grid) >= limit
        low, high = (low, middle) if crosses else (middle, high)
    return high


def _power(n: int, p0: float, harmful: float, alpha: float, grid: tuple[float, ...]) -> float:
    return float(binomial.sf(rejects_from(n, p0=p0, alpha=alpha, grid=grid) - 1, n, harmful))


@dataclass(frozen=True, slots=True)
class _Slowdown:
    """A canary of weight ``share`` that is so much slower: ``slow_rate`` of all judged batches are slow, and of these
    ``harmful`` are its own."""

    share: float
    slow_rate: float
    harmful: float

    @classmethod
    def of(cls, stable: tuple[Judged, ...], *, share: float, slowdown: float) -> _Slowdown | None:
        """None where it would not have more slow batches than the stable arm."""
        q0, q1 = _slow_shares(stable, slowdown=slowdown)
        if not q1 > q0:
            return None
        slow_rate = share * q1 + (1 - share) * q0
        return cls(share, slow_rate, min(share * q1 / slow_rate, 1 - 1e-9))


def _slow_shares(stable: tuple[Judged, ...], *, slowdown: float) -> tuple[float, float]:
    slow, slow_if_harmful, total = 0.0, 0.0, 0
    for seconds, limit in stable:
        slow += seconds.n * (seconds.share_above(limit) or 0.0)
        slow_if_harmful += seconds.n * (seconds.share_above(limit / slowdown) or 0.0)
        total += seconds.n
    return (slow / total, slow_if_harmful / total) if total else (0.0, 0.0)


def _events_in(trials: int, *, rate: float, power: float) -> int:
    """The most events that ``trials`` have with probability ``power``: the inverse of :func:`_trials_for`."""
    low, high = 0, trials + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if binomial.sf(middle - 1, trials, rate) >= power else (low, middle)
    return low


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
