"""A test for values that are no counts: losses between 0 and 1, or errors of records drawn with unequal probabilities.

Let every value be how far a loss exceeds the budget, never more than ``most``. While the mean loss is at least the
budget, betting against it with a fixed stake, capital = prod(1 - stake x value), cannot be expected to gain, so capital
is an e-value; so is its average over several stakes. No order, normal approximation or lower bound of the values is
assumed.

Records kept with probability pi, whatever was known when they were drawn, have the values (loss - budget) / pi: their
mean over the *kept* records has the sign of (true loss - budget), since E[value | kept] = (E loss - budget) / P(kept).

Source: betting on bounded means, Waudby-Smith and Ramdas (2024), arXiv:2010.09686, section 4 (capital process) and
appendix B.5 (average over stakes); inverse probability weights in it, Waudby-Smith, Wu, Ramdas, Karampatziakis and
Mineiro (2022), arXiv:2210.10768.

For losses of 0 and 1 this is the mixture likelihood ratio of :mod:`offramp_core.evidence.one_arm`, and weaker than the
exact binomial test, which is uniformly most powerful for a given n: see docs/decisions/0010.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import BENEFIT_FACTORS, check_design_effect
from offramp_core.records import SecondsArray

# Shares of the largest stake that can never lose everything. For losses of 0 and 1, share 1 - f is the best bet on a
# rate of f x budget.
STAKES = tuple(1 - f for f in BENEFIT_FACTORS)


def log_capital(excess: SecondsArray, *, most: float, design_effect: float = 1.0) -> float:
    """Log e-value against H0: the mean of ``excess`` is at least 0.

    Parameters
    ----------
    excess : (n,) float
        Loss beyond the budget, per record.
    most : float
        What ``excess`` can reach: 1 - budget for losses in [0, 1]. A property of the design, never the largest one
        seen: the stakes depend on it, and must not depend on the records.
    design_effect : float
        So many records are worth one: each stake's capital is taken to the power of its inverse, as
        in :func:`offramp_core.evidence.one_arm.log_e_value`.

    Raises
    ------
    InvalidArgumentError
        ``most`` is not positive, or a value is beyond it or not finite; the message names the row.

    Examples
    --------
    >>> import numpy as np
    >>> round(log_capital(np.full(500, -0.01), most=0.99), 2)
    3.54
    """
    if not 0 < most < math.inf:
        raise InvalidArgumentError(f"most is {most}; it must be positive and finite")
    bad = np.flatnonzero(~(np.isfinite(excess) & (excess <= most * (1 + 1e-12))))
    if len(bad):
        raise InvalidArgumentError(f"excess[{bad[0]}] is {excess[bad[0]]}; it must be finite and at most {most}")
    check_design_effect(design_effect)
    if len(excess) == 0:
        return 0.0
    logs = [gain / design_effect for gain in log_gains(excess, most=most)]
    return float(np.logaddexp.reduce(logs)) - math.log(len(STAKES))


def log_gains(excess: SecondsArray, *, most: float) -> list[float]:
    """Log capital of each of the ``STAKES``."""
    return [float(np.log1p(-share / most * excess).sum()) for share in STAKES]


def betting_p_value(excess: npt.NDArray[np.float64], *, most: float, design_effect: float = 1.0) -> float:
    """min(1, 1 / e-value) of :func:`log_capital`: at most ``level`` with probability at most ``level`` under H0
    (Markov's inequality)."""
    return math.exp(-max(0.0, log_capital(excess, most=most, design_effect=design_effect)))
