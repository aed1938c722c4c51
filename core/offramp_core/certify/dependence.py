"""How many labels there really are, where requests resemble their neighbors.

A camera sends a hundred frames of one scene. If an exit is wrong about one of them it is wrong about most, so a hundred labels say little
more than one. Counted as a hundred they make certificates that are wrong far more often than they may be.

What matters is whether *mistakes* come together, so the mistakes of the ramps are looked at, at several shares of wrong answers above the
budget (at the budget itself there are too few to see). Their correlation is summed over pairs of records at the same distance, by
distance: in the order of time, and within each stream where requests name theirs. Mistakes that are correlated up to a distance of a
*block* inflate the variance of a count of n labels by the *design effect*

    d = 1 + (2 / n) x sum over pairs within a block of their correlation,

so that n labels are worth n / d. For copies this is the length of a scene; for scenes that only resemble themselves it is less, and one
label from each block would throw the difference away.

A slow change of difficulty, as between day and night, barely makes mistakes come together. It is no dependence in this sense: a
count is then about the average over the time that it covers, and the detector watches for what comes after.

Source: design effect, Kish (1965), Survey Sampling; exact binomial limits with an effective sample size, Korn and Graubard (1998);
variance of sample autocorrelations, Bartlett (1946).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import check_design_effect, check_rate
from offramp_core.records import IndexArray, Records

Floats = npt.NDArray[np.float64]

RATES = (2.0, 5.0, 10.0)  # shares of wrong answers that are looked at, as multiples of the budget
FEWEST_MISTAKES = 5  # of a ramp at a rate; fewer do not show whether they come together
MOST_RAMPS = 12  # looked at, evenly over the network: neighbors say the same
GROWTH = 1.41  # from one distance that is looked at to the next
SURE = 3.0  # standard errors at one distance that nobody sees by chance
SUSPECT = 2.0  # over all distances up to one: averaged over ramps, so that independent records hardly ever get there
SLIGHTEST = 0.01  # correlation; less is a change of difficulty
MARGIN = 1.0  # standard errors that are added to the sum of correlations
SHORT = 64  # records of a run that are compared distance by distance; longer ones by Fourier transforms
SHORTEST_RUN = 6  # blocks that a run of records must have: a longer block cannot be told from a change of the inputs


@dataclass(frozen=True, slots=True)
class Dependence:
    """``block`` records, of a stream where these are named, may share a mistake; ``design_effect`` labels are worth one."""

    block: int = 1
    design_effect: float = 1.0

    def __post_init__(self) -> None:
        check_design_effect(self.design_effect)
        if self.block < 1:
            raise InvalidArgumentError(f"block is {self.block}; it must be at least 1")

    def effective(self, n: int) -> int:
        """How many independent labels ``n`` labels are worth."""
        return int(n / self.design_effect)


INDEPENDENT = Dependence()


def dependence(records: Records, *, budget: float) -> Dependence | None:
    """How far, and by how much, mistakes come together in records.

    Parameters
    ----------
    records : Records
        In the order of time. All of them may be given, those of a later test included: see Notes.
    budget : float
        Allowed disagreement, in (0, 1).

    Returns
    -------
    Dependence or None
        None where mistakes come together over so large a part of the records that these cannot say how far.

    Notes
    -----
    Records with few mistakes, and records in random order, are taken for independent; so are the scenes of many unnamed sources that take
    turns in a short sample. Naming streams helps there.
    """
    check_rate("budget", budget)
    kinds = tuple(_mistakes(records, budget))
    if not kinds:
        return INDEPENDENT
    mistakes = np.stack(kinds, axis=1)
    streams = [np.zeros(len(records), dtype=np.int64)]
    if records.stream is not None:
        streams.append(records.stream)
    found = [_Pairs.of(mistakes, stream).dependence(n=len(records)) for stream in streams]
    if None in found:
        return None
    known = [one for one in found if one is not None]
    return Dependence(max(d.block for d in known), max(d.design_effect for d in known))


def _mistakes(records: Records, budget: float) -> Iterator[Floats]:
    """Which records a ramp would get wrong, standardized, (n,): for some ramps, at thresholds where so many are wrong."""
    n = len(records)
    for chain in (records, *records.others.values()):
        ramps = np.unique(np.linspace(0, chain.n_ramps - 1, min(MOST_RAMPS, chain.n_ramps)).astype(int))
        for ramp in ramps:
            order = np.argsort(chain.uncertainty[:, ramp], kind="stable")
            wrong = ~chain.agrees[order, ramp]
            so_far = np.cumsum(wrong)
            for rate in RATES:
                wanted = int(rate * budget * n)
                if FEWEST_MISTAKES <= wanted <= so_far[-1]:
                    leave = int(np.searchsorted(so_far, wanted)) + 1
                    yield _standardized(order[:leave][wrong[:leave]], n)
        if not chain.final_agrees.all() and np.count_nonzero(~chain.final_agrees) >= FEWEST_MISTAKES:
            yield _standardized(np.flatnonzero(~chain.final_agrees), n)


def _standardized(rows: IndexArray, n: int) -> Floats:
    happened = np.zeros(n)
    happened[rows] = 1.0
    rate = len(rows) / n
    return np.asarray((happened - rate) / np.sqrt(rate * (1 - rate))) if rate < 1 else np.zeros(n)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """``products`` [distance - 1]: sum over pairs of records at a distance of the product of their standardized mistakes, averaged over
    the kinds of mistakes. ``pairs``: how many pairs there are. ``longest`` is the length of the longest run of records."""

    products: Floats
    pairs: Floats
    longest: int

    @classmethod
    def of(cls, mistakes: Floats, stream: npt.NDArray[np.int64]) -> _Pairs:
        """``mistakes`` (n, kinds) in the order of time; pairs are of records of the same ``stream`` (n,)."""
        order = np.argsort(stream, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(stream[order])) + 1)
        longest = max(len(run) for run in runs)
        most = max(1, longest // 2)
        products, pairs = np.zeros(most), np.zeros(most)
        short = np.concatenate([run for run in runs if len(run) <= SHORT] or [np.empty(0, dtype=np.intp)])
        for distance in range(1, min(most, SHORT - 1, len(short) - 1) + 1):
            first, second = short[:-distance], short[distance:]
            same = stream[first] == stream[second]
            pairs[distance - 1] += np.count_nonzero(same)
            products[distance - 1] += float((mistakes[first[same]] * mistakes[second[same]]).sum()) / mistakes.shape[1]
        for run in (run for run in runs if len(run) > SHORT):
            reach = min(most, len(run) - 1)
            pairs[:reach] += len(run) - np.arange(1, reach + 1)
            products[:reach] += _lagged_products(mistakes[run], reach)
        return cls(products, pairs, longest)

    def dependence(self, *, n: int) -> Dependence | None:
        reach = self._reach()
        if reach == 0:
            return INDEPENDENT
        if reach * SHORTEST_RUN > self.longest:
            return None
        block = next(distance for distance in _distances(self.longest) if distance > reach)
        total = float(self.products[:block].sum()) + MARGIN * math.sqrt(self._variance(0, block, known=block))
        return Dependence(block, max(1.0, 1 + 2 * total / n))

    def _reach(self) -> int:
        """The largest distance at which mistakes come together; 0 where they do at none."""
        reach, best, before = 0, 0.0, 0
        for distance in _distances(len(self.products)):
            here = float(self.products[before:distance].sum())
            count = float(self.pairs[before:distance].sum())
            if count == 0:
                break
            if here >= max(SLIGHTEST * count, SURE * math.sqrt(self._variance(before, distance, known=before))):
                reach = max(reach, distance)
            so_far, pairs = float(self.products[:distance].sum()), float(self.pairs[:distance].sum())
            up_to = so_far / math.sqrt(pairs)
            if so_far >= SLIGHTEST * pairs and up_to >= SUSPECT and up_to > best:
                best, reach = up_to, max(reach, distance)
            before = distance
        return reach

    def _variance(self, start: int, end: int, *, known: int) -> float:
        """Of the sum of products from one distance to another, where correlation is known up to ``known`` (Bartlett)."""
        correlation = self.products[:known] / np.maximum(self.pairs[:known], 1)
        return float(self.pairs[start:end].sum()) * (1 + 2 * float(np.sum(np.clip(correlation, 0, None) ** 2)))


def _lagged_products(mistakes: Floats, reach: int) -> Floats:
    """Sums of products at distances 1 to ``reach`` within a run, averaged over kinds of mistakes, (reach,)."""
    size = 1 << (len(mistakes) + reach).bit_length()
    spectrum = np.fft.rfft(mistakes, size, axis=0)
    power = (spectrum * spectrum.conj()).real.mean(axis=1)
    return np.asarray(np.fft.irfft(power, size)[1 : reach + 1])


def _distances(most: int) -> Iterator[int]:
    """Distances that are looked at: 1, 2, 3, 4, 6, 8, ... and one beyond ``most``."""
    distance = 1
    while distance <= most:
        yield distance
        distance = max(distance + 1, round(GROWTH * distance))
    yield distance
