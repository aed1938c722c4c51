"""What exits save, measured: a small share of batches runs with exits off, drawn by a hash, for ever.

Each batch tells what it cost in one of two ways, with exits or without; the other stays unknown. Weighted by the
probability of the way it was drawn for, the difference to a forecast made before the batch began is an unbiased
estimate of what that one batch saved, so the running average estimates the average saving of *all* batches. Bursts,
drift and day and night need no model: they are the same for both ways of a batch, and the coin knows nothing of them.

Source: randomisation inference with empirical Bernstein confidence sequences, Howard, Ramdas, McAuliffe and Sekhon
(2021), arXiv:1810.08240, section 4.2; the forecast is the augmentation of Robins, Rotnitzky and Zhao (1994).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.intervals import BLOCK, Interval, add_surprises, check_values, deviation
from offramp_core.evidence.one_arm import as_outcomes


@dataclass(frozen=True, slots=True)
class SavingsState:
    """Sums over batches for a holdback of ``share`` and costs in [0, ``bound``] seconds.

    ``saved`` totals the estimates of what each batch saved, ``spent`` of what each costs with exits on; the surprises
    are the squared differences of both from their running means.
    """

    share: float
    bound: float
    n: int = 0
    saved: float = 0.0
    saved_surprise: float = 0.0
    spent: float = 0.0
    spent_surprise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 0.5:
            raise InvalidArgumentError(f"share is {self.share}; the holdback's share of batches must lie in (0, 0.5]")
        if not 0 < self.bound < math.inf:
            raise InvalidArgumentError(f"bound is {self.bound}; it must be positive and finite")
        sums = (self.saved, self.spent, self.saved_surprise, self.spent_surprise)
        if self.n < 0 or not all(map(math.isfinite, sums)) or min(self.saved_surprise, self.spent_surprise) < 0:
            raise InvalidArgumentError(f"savings state is {self!r}; n and surprises must be >= 0 and all sums finite")


@dataclass(frozen=True, slots=True)
class Savings:
    """Average seconds saved per batch unit, and as a share of the cost without exits; each interval holds at all
    times."""

    seconds: Interval
    share: Interval


def init(*, share: float, bound: float) -> SavingsState:
    """No batches yet. Costs above ``bound`` seconds are to be cut off by the caller: what is then estimated is the
    cut-off cost."""
    return SavingsState(share, bound)


def update(
    state: SavingsState, seconds: npt.ArrayLike, held_back: npt.ArrayLike, *, forecast: npt.ArrayLike
) -> SavingsState:
    """Add batches in their order; all at once or one by one gives the same state, bit for bit.

    Parameters
    ----------
    seconds : [n] float
        What the batches cost, for example execution seconds per request, in [0, bound].
    held_back : [n] bool
        Whether the batch was drawn to run with exits off.
    forecast : [n] float
        What was expected of each before it began, in [0, bound], without regard to its arm: the profile's time for its
        size, say. A bad forecast widens the interval and never biases it.

    Raises
    ------
    InvalidArgumentError
        Shapes differ, or a value is NaN or out of range; names the row.
    """
    x = check_values("seconds", seconds, low=0.0, high=state.bound)
    f = check_values("forecast", forecast, low=0.0, high=state.bound)
    off = as_outcomes(held_back)
    if not len(x) == len(f) == len(off):
        raise InvalidArgumentError(f"seconds, forecast and held_back have {len(x)}, {len(f)} and {len(off)} batches")
    for block in range(0, len(x), BLOCK):
        part = slice(block, block + BLOCK)
        state = _add(state, x[part], off[part], f[part])
    return state


def estimate(state: SavingsState, *, alpha: float) -> Savings:
    """What exits save on average, at all times with probability 1 - ``alpha``; half of it is spent on either figure.

    Raises
    ------
    InvalidArgumentError
        ``alpha`` is not in (0, 1).
    """
    n, bound, share = max(state.n, 1), state.bound, state.share
    # How far one value can be from its prediction: the weighted miss of the forecast, plus the guess itself.
    saved_around = deviation(state.saved_surprise, reach=bound * (1 / share + 1), alpha=alpha / 2) / n
    spent_around = deviation(state.spent_surprise, reach=bound * (1 / (1 - share) + 1), alpha=alpha / 2) / n
    saved, spent = state.saved / n, state.spent / n
    seconds = Interval(max(-bound, saved - saved_around), min(bound, saved + saved_around))
    least, most = max(0.0, spent - spent_around), min(bound, spent + spent_around)
    return Savings(seconds, Interval(_share(seconds.low, least, most), _share(seconds.high, most, least)))


def _add(
    state: SavingsState, x: npt.NDArray[np.float64], off: npt.NDArray[np.bool_], f: npt.NDArray[np.float64]
) -> SavingsState:
    share, bound = state.share, state.bound
    weighted = (x - f) * np.where(off, 1 / share, -1 / (1 - share))
    saved, saved_surprise = add_surprises(weighted, state.n, state.saved, state.saved_surprise, guess=(-bound, bound))
    with_exits = f - np.where(off, 0.0, weighted)
    spent, spent_surprise = add_surprises(with_exits, state.n, state.spent, state.spent_surprise, guess=(0.0, bound))
    return SavingsState(share, bound, state.n + len(x), saved, saved_surprise, spent, spent_surprise)


def _share(saved: float, spent_if_negative: float, spent: float) -> float:
    """Saved seconds as a share of what it would cost without exits; the ``spent`` that makes the bound hold depends on
    the sign."""
    spent = spent if saved > 0 else spent_if_negative
    return saved / (spent + saved) if spent + saved > 0 else -math.inf
