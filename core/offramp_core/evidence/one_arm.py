"""Evidence from one arm: are its disagreements above, or below, the budget?

The e-value is a mixture of likelihood ratios over a small grid of alternatives. Under the null hypothesis its
expectation never exceeds 1, at any stopping time, so it may be looked at after every request: rejecting once
it reaches 1/alpha is wrong at most a share alpha of the time (Ville's inequality). It depends on the counts
(n, k) alone, which makes pooling over workers and restarts a matter of adding integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError

Alternative = Literal["greater", "less"]
LogArray = npt.NDArray[np.float64]

# Alternatives as multiples of the budgeted rate, equally weighted: close ones see a slow leak, far ones stop a disaster
# early.
HARM_FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
BENEFIT_FACTORS = (0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
_MOST_COUNTS = 2**53  # beyond it floating point no longer tells neighbouring counts apart


@dataclass(frozen=True, slots=True)
class Counts:
    """``k`` events in ``n`` trials; the whole state of a one-arm or two-arm test."""

    n: int = 0
    k: int = 0


def init() -> Counts:
    """No observations yet."""
    return Counts()


def update(state: Counts, n: int, k: int) -> Counts:
    """Add ``k`` events in ``n`` trials. Order never matters, so merging workers is ``update`` as well."""
    check_counts(k, n)
    return Counts(state.n + n, state.k + k)


def log_e_value(
    k: int, n: int, *, p0: float, alternative: Alternative = "greater", design_effect: float = 1.0
) -> float:
    """Log evidence against H0, valid at every stopping time.

    Parameters
    ----------
    k, n : int
        Disagreements and audited requests so far; 0 <= k <= n.
    p0 : float
        Budgeted rate, a fraction in (0, 1).
    alternative : {"greater", "less"}
        ``greater`` is evidence of harm (H0: rate <= p0), ``less`` earns acceptance (H0: rate >= p0).
    design_effect : float
        So many labels are worth one (:mod:`offramp_core.certify.dependence`): each likelihood ratio is taken to the
        power of its inverse, so that as many copies of an observation count as one.

    Returns
    -------
    float
        Natural log. Reject H0 at level alpha once it reaches log(1 / alpha).

    Raises
    ------
    InvalidArgumentError
        A value lies outside its range.

    Notes
    -----
    Assumes P(disagree | past) <= p0 (or >= p0) under H0; independence is not needed. Constant time in n.
    Source: mixture likelihood ratios, Wald (1945); Ville (1939); Waudby-Smith and Ramdas (2024), arXiv:2010.09686.

    Examples
    --------
    >>> round(log_e_value(6, 200, p0=0.01), 3)
    1.745
    """
    check_counts(k, n)
    return log_average_ratio(k, n, p0=p0, grid=alternatives(p0, alternative), design_effect=design_effect)


@lru_cache(maxsize=256)
def alternatives(
    p0: float, alternative: Alternative = "greater", *, harm_factors: tuple[float, ...] = HARM_FACTORS
) -> tuple[float, ...]:
    """The grid of alternative rates for a budgeted rate; ``harm_factors`` are multiples of it that count as harm."""
    check_rate("p0", p0)
    if alternative == "less":
        return tuple(p0 * f for f in BENEFIT_FACTORS)
    if alternative != "greater":
        raise InvalidArgumentError(f"alternative is {alternative!r}; use 'greater' or 'less'")
    # A multiple at or above 1 is no rate; halfway between p0 and 1 stands in for all of those.
    return tuple(sorted({min(p0 * f, (1 + p0) / 2) for f in harm_factors}))


def log_mixture(k: npt.NDArray[np.int64], n: npt.NDArray[np.int64], *, p0: float, grid: tuple[float, ...]) -> LogArray:
    """Log of the average likelihood ratio of the grid's rates against p0, elementwise over counts."""
    q = np.asarray(grid)
    gain, loss = np.log(q / p0), np.log1p(-q) - math.log1p(-p0)
    terms = np.multiply.outer(k, gain) + np.multiply.outer(n - k, loss)
    return np.asarray(np.logaddexp.reduce(terms, axis=-1) - math.log(len(q)))


def log_average_ratio(k: int, n: int, *, p0: float, grid: tuple[float, ...], design_effect: float = 1.0) -> float:
    """:func:`log_mixture` of one pair of counts, without arrays: a control plane asks it some thousand times per
    round."""
    check_design_effect(design_effect)
    terms = [(k * gain + (n - k) * loss) / design_effect for gain, loss in log_ratios(p0, grid)]
    highest = max(terms)
    return highest + math.log(sum(math.exp(term - highest) for term in terms) / len(terms))


@lru_cache(maxsize=512)
def log_ratios(p0: float, grid: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Per alternative: what an event and what a non-event add to the log likelihood ratio against p0."""
    return tuple((math.log(q / p0), math.log1p(-q) - math.log1p(-p0)) for q in grid)


def as_outcomes(outcomes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Single outcomes as booleans [n]; anything that is not 0 or 1 is refused."""
    given = np.asarray(outcomes)
    if given.ndim != 1:
        raise InvalidArgumentError(f"outcomes have shape {given.shape}; they must be one-dimensional")
    if given.dtype == np.bool_:
        return np.asarray(given, dtype=np.bool_)
    bad = np.flatnonzero((given != 0) & (given != 1))
    if len(bad):
        raise InvalidArgumentError(f"outcomes[{bad[0]}] is {given[bad[0]]}; every outcome must be 0 or 1")
    return np.asarray(given != 0)


def check_counts(k: int, n: int) -> None:
    """Refuse counts that no experiment can have."""
    if not (0 <= k <= n < _MOST_COUNTS and k == int(k) and n == int(n)):
        raise InvalidArgumentError(f"counts are k={k}, n={n}; they must be whole numbers with 0 <= k <= n")


def check_design_effect(value: float) -> None:
    """Refuse a design effect below 1: labels are never worth more than independent ones here."""
    if not 1 <= value < math.inf:
        raise InvalidArgumentError(f"design_effect is {value}; it must be a finite number of at least 1")


def check_rate(name: str, value: float) -> None:
    """Refuse a rate outside (0, 1)."""
    if not 0 < value < 1:
        raise InvalidArgumentError(f"{name} is {value}; it must be a fraction in (0, 1)")
