"""When a test on counts stops: the exact distribution, looked at after every single observation.

A sequential test on (n, k) stops where k leaves a corridor of counts. How likely that is by each n follows from the
walk of k itself, one step per observation, so type-I error and power need no simulation: the figures are exact up to
rounding (the forward recursion of group-sequential analysis: Armitage, McPherson and Rowe 1969, JRSS A 132).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.exposure import rejection_count
from offramp_core.evidence.one_arm import Alternative, alternatives, check_rate

_NEGLIGIBLE = 1e-15  # counts that are reached less often than this are left out
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoppingTime:
    """``at[i]`` is the probability that the test stops exactly at observation ``i + 1``; shape [looks]."""

    at: npt.NDArray[np.float64]

    @property
    def ever(self) -> float:
        """Probability to stop at all within the looks: the type-I error where the null hypothesis holds, else the
        power."""
        return float(self.at.sum())

    def within(self, n: int) -> float:
        """Probability to stop by observation ``n``."""
        return float(self.at[: max(n, 0)].sum())

    def quantile(self, q: float) -> int | None:
        """Observations by which a share ``q`` of runs has stopped; None if fewer do within the looks."""
        check_rate("q", q)
        reached = np.flatnonzero(np.cumsum(self.at) >= q)
        return int(reached[0]) + 1 if len(reached) else None


def stopping_time(
    rate: float,
    *,
    p0: float,
    alpha: float,
    looks: int,
    alternative: Alternative = "greater",
    grid: tuple[float, ...] | None = None,
) -> StoppingTime:
    """When the one-arm test of level ``alpha`` against ``p0`` rejects while events truly come at ``rate``.

    Parameters
    ----------
    rate : float
        True rate in [0, 1] of independent events.
    p0, alpha : float
        Budgeted rate and level of the test, in (0, 1).
    looks : int
        Observations, with a look after each.
    alternative : {"greater", "less"}
        As in :func:`offramp_core.evidence.one_arm.log_e_value`.
    grid : tuple of float, optional
        Alternatives of the e-value; by default those of that function.

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.

    Examples
    --------
    >>> stopping_time(0.01, p0=0.01, alpha=0.05, looks=2000).ever < 0.05
    True
    """
    check_rate("alpha", alpha)
    n = np.arange(1, looks + 1)
    grid = grid or alternatives(p0, alternative)
    if alternative == "greater":
        return corridor(rate, upper=rejection_count(n, p0=p0, alpha=alpha, grid=grid))
    # Few events are many non-events.
    mirrored = rejection_count(n, p0=1 - p0, alpha=alpha, grid=tuple(1 - q for q in grid))
    return corridor(rate, lower=n - mirrored)


def corridor(rate: float, *, lower: IntArray | None = None, upper: IntArray | None = None) -> StoppingTime:
    """When k, that grows by one with probability ``rate``, first satisfies ``k <= lower[i]`` or ``k >= upper[i]`` at n
    = i + 1.

    Raises
    ------
    InvalidArgumentError
        ``rate`` is no fraction, both bounds are missing, or their shapes differ.
    """
    if not 0 <= rate <= 1:
        raise InvalidArgumentError(f"rate is {rate}; it must lie in [0, 1]")
    given = [bound for bound in (lower, upper) if bound is not None]
    if not given or any(bound.shape != given[0].shape for bound in given):
        raise InvalidArgumentError("corridor needs lower, upper or both, of one shape [observations]")
    looks = len(given[0])
    highest = looks if rate == 1 else binomial.isf(_NEGLIGIBLE, looks, rate) if rate else 0
    floor = np.full(looks, -1) if lower is None else np.maximum(lower, -1)
    ceiling = np.minimum(highest + 1, np.full(looks, highest + 1) if upper is None else np.maximum(upper, 0))
    at, alive = np.zeros(looks), np.zeros(highest + 2)
    alive[0] = 1.0
    top = 0  # largest count still alive
    for i in range(looks):
        top = min(top + 1, highest)
        grown = alive[:top] * rate
        alive[: top + 1] *= 1 - rate
        alive[1 : top + 1] += grown
        at[i] = alive[: floor[i] + 1].sum()
        alive[: floor[i] + 1] = 0.0
        if ceiling[i] <= top:
            at[i] += alive[ceiling[i] : top + 1].sum()
            alive[ceiling[i] : top + 1] = 0.0
            top = max(int(ceiling[i]) - 1, 0)
    return StoppingTime(at)
