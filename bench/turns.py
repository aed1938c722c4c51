"""Arms that take turns in blocks of a few requests, and how their means compare.

What a machine does beside a bench changes within seconds; blocks are short, so that it meets all arms alike, and long
enough that a limited process goes on paying for the requests before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 20  # requests in a row of one arm
FEW, SELDOM = 6, 10  # rounds of all arms; and rounds of those by then far from the best, each of so many
FAR = 1.5  # times the best
RESAMPLED = 4000
Array = npt.NDArray[np.float64]

#: Milliseconds of each request, in order, of the block that begins at a row.
Block = Callable[[int], list[float]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two means, with the interval that holds 95 % of what rounds drawn again say."""

    of_means: float
    median: float
    low: float
    high: float


def in_turns(arms: Mapping[str, Block], *, rounds: int, judged: str, seed: int = 0) -> dict[str, Array]:
    """Means of blocks by arm and round, each round in an order of its own; NaN where an arm sat out. ``judged`` never
    does."""
    order, names = np.random.default_rng(seed), list(arms)
    means = {name: np.full(rounds, np.nan) for name in names}
    for number in range(rounds):
        for name in order.permutation(names):
            if name == judged or number % SELDOM == 0 or not _far(means, name, number):
                means[name][number] = np.mean(arms[name](number * BLOCK))
    return means


def _far(means: Mapping[str, Array], name: str, number: int) -> bool:
    if number < FEW:
        return False
    so_far = {each: float(np.nanmean(of[:number])) for each, of in means.items()}
    return so_far[name] > FAR * min(so_far.values())


def compared(means: Mapping[str, Array], judged: str, others: tuple[str, ...], *, seed: int = 0) -> Ratio:
    """The mean of ``judged`` over that of the best of ``others``, which all rounds together name. Rounds are drawn, as
    all arms of one meet the same rows and the same machine."""
    best = min(others, key=lambda name: float(np.nanmean(means[name])))
    mine, theirs = means[judged], means[best]
    drawn = np.random.default_rng(seed).integers(0, len(mine), (RESAMPLED, len(mine)))
    ratios = np.nanmean(mine[drawn], axis=1) / np.nanmean(theirs[drawn], axis=1)
    low, median, high = np.quantile(ratios, (0.025, 0.5, 0.975))
    whole: Any = np.nanmean(mine) / np.nanmean(theirs)
    return Ratio(float(whole), float(median), float(low), float(high))
