"""Evidence from weighted audits: is their average above the budget?

Where requests are audited with different probabilities, an audited disagreement counts 1 / probability and everything
else 0. The average of these weights is unbiased, but they are no coin flips, so tests on counts do not apply. A bet
does: wealth grows by the factor 1 + b (weight - budget), is never negative, and while the average weight is at most
the budget it does not grow in expectation, whatever the distribution (Waudby-Smith and Ramdas, 2024,
arXiv:2010.09686). Several fixed bets are kept side by side and averaged; for weights that are all equal this is exactly
the test on counts. Since every bet is a product over observations, pooling workers is adding logarithms.

Bets that adapt to the past (predictable plug-in) were measured and not taken: see docs/decisions/0011.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.intervals import check_values
from offramp_core.evidence.one_arm import Alternative, alternatives, check_design_effect, check_rate


@dataclass(frozen=True, slots=True)
class BetState:
    """Log wealth of every bet after ``n`` observations, for one budget ``p0``, weights up to ``highest``, and one
    direction."""

    p0: float
    highest: float
    alternative: Alternative
    log_wealth: tuple[float, ...]
    n: int = 0

    def __post_init__(self) -> None:
        bets = _bets(self.p0, self.highest, self.alternative)
        if self.n < 0 or len(self.log_wealth) != len(bets) or not all(map(math.isfinite, self.log_wealth)):
            raise InvalidArgumentError(f"bet state is {self!r}; n must be >= 0 with {len(bets)} finite log wealths")


def init(*, p0: float, highest: float, alternative: Alternative = "greater") -> BetState:
    """Nothing seen.

    Parameters
    ----------
    p0 : float
        Budgeted rate in (0, 1).
    highest : float
        Largest possible weight: 1 / the smallest audit probability, at least 1.
    alternative : {"greater", "less"}
        As in :func:`offramp_core.evidence.one_arm.log_e_value`.

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.
    """
    return BetState(p0, highest, alternative, (0.0,) * len(_bets(p0, highest, alternative)))


def update(state: BetState, weights: npt.ArrayLike) -> BetState:
    """Add one value per request [n]: 1 / probability for an audited disagreement, else 0. Order does not matter, up to
    rounding.

    Raises
    ------
    InvalidArgumentError
        A weight is NaN or outside [0, highest]; names the row.
    """
    w = check_values("weights", weights, low=0.0, high=state.highest)
    bets = np.asarray(_bets(state.p0, state.highest, state.alternative))
    some = w[w > 0]
    grown = np.log1p(np.multiply.outer(bets, some - state.p0)).sum(axis=1) + (len(w) - len(some)) * np.log1p(
        -bets * state.p0
    )
    wealth = tuple(float(x) for x in np.asarray(state.log_wealth) + grown)
    return BetState(state.p0, state.highest, state.alternative, wealth, state.n + len(w))


def log_e_value(state: BetState, *, design_effect: float = 1.0) -> float:
    """Log evidence against the budget, valid at every stopping time; reject at level alpha once it reaches log(1 /
    alpha).

    ``design_effect`` observations are worth one, as in :func:`offramp_core.evidence.one_arm.log_e_value`.
    """
    check_design_effect(design_effect)
    terms = [wealth / design_effect for wealth in state.log_wealth]
    highest = max(terms)
    return highest + math.log(sum(math.exp(x - highest) for x in terms) / len(terms))


@lru_cache(maxsize=256)
def _bets(p0: float, highest: float, alternative: Alternative) -> tuple[float, ...]:
    """Stakes per unit of weight above the budget: those that make a weight of 0 or ``highest`` a likelihood ratio."""
    check_rate("p0", p0)
    if not 1 <= highest < math.inf:
        raise InvalidArgumentError(f"highest is {highest}; the largest weight must be finite and >= 1")
    m = p0 / highest
    return tuple((q - m) / (m * (1 - m)) / highest for q in alternatives(m, alternative))
