"""A test for records that were not drawn with equal probabilities.

Counts mean nothing there: a record kept with probability 1 % stands for a hundred requests. What holds is that, over the *kept* records,
the mean of Y = (X - budget) / pi has the sign of (true disagreement - budget), X being 1 where the plan's answer was wrong and
pi the probability with which the record was kept, whatever was known when it was drawn: E[Y | kept] = (E X - budget) / P(kept). Betting
against it with a fixed stake, capital = prod(1 - stake Y), can therefore not be expected to gain unless the plan keeps its budget,
and capital / 1 is an e-value; so is the average over several stakes. No order, independence of scores or normal
approximation is assumed, and unequal probabilities cost what they must and no more. Records that were *not* kept need not be known.

Source: betting on bounded means, Waudby-Smith and Ramdas (2024), arXiv:2010.09686, section 4 (capital process) and appendix B.5 (average over
stakes); inverse probability weights in it, Waudby-Smith, Wu, Ramdas, Karampatziakis and Mineiro (2022), arXiv:2210.10768.

For equal weights this is the mixture likelihood ratio of :mod:`offramp_core.evidence.one_arm`, and weaker than the exact binomial test, which
is uniformly most powerful for a given n: see docs/decisions/0010.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evidence.one_arm import BENEFIT_FACTORS, check_rate
from offramp_core.records import BoolArray, SecondsArray

# Shares of the largest stake that can never lose everything. For equal weights share 1 - f is the best bet on a rate of f x budget.
STAKES = tuple(1 - f for f in BENEFIT_FACTORS)


def log_capital(wrong: BoolArray, inclusion: SecondsArray, *, least_inclusion: float, budget: float) -> float:
    """Log e-value against H0: disagreement >= budget.

    Parameters
    ----------
    wrong : (n,) bool
        The plan's answer differs from the reference, per kept record.
    inclusion : (n,) float
        Probability with which each record was kept, fixed before anything was known of its answers; in [least_inclusion, 1].
    least_inclusion : float
        The smallest inclusion probability the sampling design allows. A property of the design, never the smallest one seen: the stakes
        depend on it, and must not depend on the records.
    budget : float
        In (0, 1).

    Raises
    ------
    InvalidArgumentError, InvalidRecordsError
        A value lies outside its range; the message names the array and the row.

    Examples
    --------
    >>> import numpy as np
    >>> round(log_capital(np.zeros(500, bool), np.full(500, 0.5), least_inclusion=0.5, budget=0.01), 2)
    3.54
    """
    check_rate("budget", budget)
    check_inclusion(inclusion, n=len(wrong), least=least_inclusion)
    if len(wrong) == 0:
        return 0.0
    y = (np.asarray(wrong, dtype=np.float64) - budget) / inclusion
    largest = least_inclusion / (1 - budget)  # 1 - stake x Y stays positive below it
    logs = [float(np.log1p(-share * largest * y).sum()) for share in STAKES]
    return float(np.logaddexp.reduce(logs)) - math.log(len(STAKES))


def betting_p_value(
    wrong: BoolArray, inclusion: npt.NDArray[np.float64], *, least_inclusion: float, budget: float
) -> float:
    """min(1, 1 / e-value) of :func:`log_capital`: at most ``level`` with probability at most ``level`` under H0 (Markov's inequality)."""
    return math.exp(-max(0.0, log_capital(wrong, inclusion, least_inclusion=least_inclusion, budget=budget)))


def check_inclusion(inclusion: npt.NDArray[np.float64], *, n: int, least: float) -> None:
    """Refuse probabilities that no sampling design can have."""
    if not 0 < least <= 1:
        raise InvalidArgumentError(f"least_inclusion is {least}; it must lie in (0, 1]")
    if np.shape(inclusion) != (n,):
        raise InvalidRecordsError(f"inclusion has shape {np.shape(inclusion)}; it needs ({n},)")
    bad = np.flatnonzero(~((inclusion >= least) & (inclusion <= 1)))  # NaN compares false, so it is caught here as well
    if len(bad):
        row = int(bad[0])
        raise InvalidRecordsError(f"inclusion[{row}] is {inclusion[row]}; it must lie in [{least}, 1]")
