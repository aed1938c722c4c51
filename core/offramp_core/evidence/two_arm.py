"""Evidence from two arms: does the canary have more than its share of bad batches?

A batch runs under the canary with probability ``share``, decided by a hash before anything is known about
it. Whatever makes batches slow or failing (bursts, noisy neighbours, sizes) therefore strikes the canary in
that share, if the arms are alike: each bad batch is a coin flip with probability ``share``. The unit is the
batch, because the requests of one batch are slow together.
"""

from __future__ import annotations

from functools import lru_cache

from offramp_core.evidence.one_arm import check_counts, check_rate, log_average_ratio

# How many times more often a canary batch may be bad than a stable one, under the alternatives; equally weighted.
RISK_RATIOS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


def log_e_share(k_canary: int, k_total: int, *, share: float) -> float:
    """Log evidence that the canary has more bad batches than its weight explains.

    Parameters
    ----------
    k_canary, k_total : int
        Bad batches of the canary, and of both arms together; 0 <= k_canary <= k_total.
    share : float
        The canary's weight as a fraction in (0, 1), constant since the counts began.

    Returns
    -------
    float
        Natural log; reject "the arms are alike" at level alpha once it reaches log(1 / alpha). Constant time in the
        counts.

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.

    Examples
    --------
    >>> log_e_share(12, 40, share=0.05) > 5 > log_e_share(3, 40, share=0.05)
    True
    """
    check_counts(k_canary, k_total)
    return log_average_ratio(k_canary, k_total, p0=share, grid=harmful_shares(share))


@lru_cache(maxsize=256)
def harmful_shares(share: float) -> tuple[float, ...]:
    """Shares of bad batches under the alternatives."""
    check_rate("share", share)
    return tuple(share_under_ratio(share, ratio) for ratio in RISK_RATIOS)


def share_under_ratio(share: float, ratio: float) -> float:
    """The canary's share of bad batches when one of its batches is bad ``ratio`` times as often as a stable one."""
    return share * ratio / (share * ratio + 1 - share)
