"""Is the mean loss of a plan within its budget? One question, two tests.

Losses of 0 and 1 are counted, and counts have the exact binomial test, which no other is better than. A *graded* loss
may lie between, as the share of labels that differ or 1 - F1 of a text; its mean is bet on
(:mod:`offramp_core.certify.betting`), which assumes nothing of how losses are distributed and gains by all that is
known of them: many small losses are less uncertain than a few whole ones of the same mean.

Which of the two applies is declared by the task, never read off the records: a test that is chosen by what it tests has
not the level of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.certify.betting import betting_p_value, log_gains
from offramp_core.certify.planner import more_labels
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence import betting
from offramp_core.evidence.intervals import check_values
from offramp_core.evidence.one_arm import check_counts, check_design_effect, check_rate
from offramp_core.records import SecondsArray


@dataclass(frozen=True, slots=True)
class Losses:
    """What each of n requests lost under a plan, ``values`` (n,) in [0, 1]. Not ``graded``: 0 or 1 each.

    Examples
    --------
    >>> import numpy as np
    >>> mild = Losses(np.full(300, 0.02), graded=True)
    >>> mild.p_value(budget=0.05) < 0.001 < mild.p_value(budget=0.021)
    True
    """

    values: SecondsArray
    graded: bool

    @classmethod
    def of(cls, values: npt.ArrayLike, *, graded: bool = True) -> Losses:
        """Checked losses.

        Raises
        ------
        InvalidArgumentError
            A value is outside [0, 1], or is neither 0 nor 1 where losses are not graded; names the row.
        """
        losses = check_values("loss", values, low=0.0, high=1.0)
        between = np.flatnonzero((losses > 0) & (losses < 1))
        if len(between) and not graded:
            row = int(between[0])
            raise InvalidArgumentError(f"loss[{row}] is {losses[row]}; it must be 0 or 1 where losses are not graded")
        return cls(losses, graded)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def count(self) -> int:
        """How many lost anything."""
        return int(np.count_nonzero(self.values))

    @property
    def total(self) -> float:
        """Their sum."""
        return float(self.values.sum())

    def take(self, rows: npt.NDArray[np.bool_]) -> Losses:
        return Losses(self.values[rows], self.graded)

    def p_value(self, *, budget: float, design_effect: float = 1.0) -> float:
        """Of H0, the mean loss is at least the budget; ``design_effect`` labels are worth one."""
        if not self.graded:
            return p_value(self.count, len(self), budget=budget, design_effect=design_effect)
        check_rate("budget", budget)
        return betting_p_value(self.values - budget, most=1 - budget, design_effect=design_effect)

    def harm(self, *, budget: float, design_effect: float = 1.0) -> float:
        """p-value of the other H0: the mean loss is at most the budget."""
        if not self.graded:
            k, n = self.count / design_effect, len(self) / design_effect
            exact = design_effect == 1
            return (
                float(binomial.sf(self.count - 1, len(self), budget))
                if exact
                else binomial.continued_tail(k, n, budget)
            )
        bets = betting.update(betting.init(p0=budget, highest=1.0), self.values)
        return math.exp(-max(0.0, betting.log_e_value(bets, design_effect=design_effect)))

    def more(self, *, budget: float, level: float, design_effect: float = 1.0) -> int | None:
        """About how many more labels it takes to pass if losses go on like that; None if they would not."""
        if not self.graded:
            return more_labels(self.count, len(self), budget=budget, level=level, design_effect=design_effect)
        gains = [gain / design_effect for gain in log_gains(self.values - budget, most=1 - budget)]
        wanted = -math.log(level)
        if max(gains, default=0.0) <= 0:
            return None

        def capital(times: float) -> float:
            return float(np.logaddexp.reduce([times * gain for gain in gains])) - math.log(len(gains))

        low, high = 0.0, 1.0
        while capital(high) < wanted:
            low, high = high, 2 * high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if capital(middle) < wanted else (low, middle)
        return max(1, math.ceil(high * len(self)) - len(self))


def passing_steps(steps: Iterable[Losses], *, budget: float, level: float, design_effect: float = 1.0) -> int:
    """How many plans of a fixed order pass before the first that does not, by what each lost on the same held-out
    requests.

    With probability 1 - level the mean loss of every one of them is within the budget (fixed-sequence Learn-then-Test,
    see :mod:`offramp_core.certify.rank_path`); the order must not depend on these requests.

    Parameters
    ----------
    steps : iterable of Losses
        From cautious to bold; those behind the first that fails are not asked for.
    budget, level : float
        Allowed mean loss, and the probability with which the promise may fail.

    Examples
    --------
    >>> import numpy as np
    >>> columns = np.full((400, 3), [0.0, 0.02, 0.2])
    >>> passing_steps((Losses.of(c) for c in columns.T), budget=0.05, level=0.03)
    2
    """
    check_rate("level", level)
    passed = 0
    for losses in steps:
        if math.isinf(design_effect) or losses.p_value(budget=budget, design_effect=design_effect) > level:
            break
        passed += 1
    return passed


def p_value(k: int, n: int, *, budget: float, design_effect: float = 1.0) -> float:
    """P(Bin(n, budget) <= k): how often a plan exactly at its budget would look this good.

    Where ``design_effect`` labels are worth one, both counts are divided by it and the binomial is continued between
    whole numbers (Korn and Graubard, 1998).
    """
    check_counts(k, n)
    check_rate("budget", budget)
    check_design_effect(design_effect)
    if design_effect == 1:
        return float(binomial.cdf(k, n, budget))
    return binomial.continued_cdf(k / design_effect, n / design_effect, budget)


def least_p_value(total: float, n: int, *, budget: float, design_effect: float = 1.0) -> float:
    """Below which no graded losses of ``n`` requests with this sum come: that of losses that are all alike, since
    logarithms are concave."""
    if not 0 <= total <= n:
        raise InvalidArgumentError(f"losses sum to {total}; {n} of them sum to 0 to {n}")
    return Losses(np.full(n, total / max(1, n)), graded=True).p_value(budget=budget, design_effect=design_effect)
