"""How much demand varies: from one moment to the next, and in bursts of seconds.

Counts in windows as short as the objective tell how arrivals are spread within a second. They say nothing of seconds
that differ: where a crowd comes for five seconds the queue grows for as long. Head-room for such bursts costs workers
that mostly have nothing to do, so a service pays for it as far as its requests were late: in proportion to what it used
up of the lateness that its objective allows within an hour (the *burn rate* of an error budget [1]_).

References
----------
.. [1] B. Beyer et al. (eds.), "The Site Reliability Workbook" (2018), chapter 5, "Alerting on SLOs".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError

BURST_SECONDS = 15  # within which seconds are compared: what changes more slowly is the forecast's
FEWEST_SECONDS = 2 * BURST_SECONDS


def burst_variation(by_second: npt.ArrayLike) -> float:
    """Variance of the number of arrivals in a second divided by its mean, within each quarter of a minute.

    Parameters
    ----------
    by_second : (n,) array
        Requests in each second, the newest last; what does not fill a quarter of a minute is left out at the old end.

    Returns
    -------
    float
        1 for independent users, and where there are too few seconds or no requests.
    """
    counts = np.asarray(by_second, dtype=np.float64)
    if counts.ndim != 1 or not np.isfinite(counts).all() or (counts < 0).any():
        raise InvalidArgumentError("by_second must be finite numbers >= 0, one for each second")
    whole = len(counts) // BURST_SECONDS * BURST_SECONDS
    if whole < FEWEST_SECONDS:
        return 1.0
    groups = counts[len(counts) - whole :].reshape(-1, BURST_SECONDS)
    mean = float(groups.mean(axis=1).sum())
    return float(groups.var(axis=1, ddof=1).sum()) / mean if mean else 1.0


def variation_to_plan_for(*, calm: float, bursts: float, late: float, requests: float, late_share: float) -> float:
    """The arrival variation of a plan, between that of moments and that of bursts.

    Parameters
    ----------
    calm : float
        Variation in windows as long as the objective (``Service.arrival_variation``'s definition); >= 0.
    bursts : float
        Of :func:`burst_variation`.
    late, requests : float
        Requests of the last hour: those that were late or given up, and all of them. Of a service that has not served
        for an hour ``requests`` is what an hour would bring at its rate: the first seconds are not its whole allowance.
    late_share : float
        Of the requests, which the objective allows to be late; in (0, 1).
    """
    if not 0 < late_share < 1:
        raise InvalidArgumentError(f"late_share is {late_share!r}; it must be between 0 and 1")
    allowed = late_share * requests
    burned = min(1.0, late / allowed) if allowed > 0 else 0.0
    most = max(calm, bursts)
    return min(calm + (most - calm) * burned, most)  # rounding is no reason for more
