"""How many labels there really are, where requests resemble their neighbors.

A camera sends a hundred frames of one scene. If an exit is wrong about one of them it is wrong about most, so a hundred
labels say little more than one. Counted as a hundred they make certificates that are wrong far more often than they may
be.

What matters is whether *mistakes* come together, so the mistakes of the ramps are looked at, at several shares of wrong
answers above the budget (at the budget itself there are too few to see). Their correlation is summed over pairs of
records at the same distance, by distance: in the order of time, and within each stream where requests name theirs.
Mistakes that are correlated up to a distance of a *block* inflate the variance of a count of n labels by the *design
effect*

    d = 1 + (2 / n) x sum over pairs within a block of their correlation,

so that n labels are worth n / d. For copies this is the length of a scene; for scenes that only resemble themselves it
is less, and one label from each block would throw the difference away.

Where streams are named and short, as conversations are, whole streams may be the blocks; and what a stream is worth
that has too few mistakes of its own is told by its scores (:mod:`~offramp_core.certify.resemblance`).

A slow change of difficulty, as between day and night, barely makes mistakes come together. It is no dependence in this
sense: a count is then about the average over the time that it covers, and the detector watches for what comes after.
Where many sources take turns the correlation of scenes is as slight, but reaches as far. The two are told apart by the
share of mistakes: if their chance changes, mistakes of a share p are correlated in proportion to p; those of copies are
whatever p is. So the correlation at the shares that are looked at is extrapolated to p = 0, where only scenes are left
of it.

Source: design effect, Kish (1965), Survey Sampling; exact binomial limits with an effective sample size, Korn and
Graubard (1998); variance of sample autocorrelations, Bartlett (1946).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.certify.lags import (
    ONE_RUN,
    Floats,
    distances,
    lagged_products,
    products_within,
    runs_of,
    separate_times,
)
from offramp_core.certify.resemblance import SEPARATE, strongest_resemblance
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import check_design_effect, check_rate
from offramp_core.records import Records

RATES = (2.0, 5.0, 10.0)  # shares of wrong answers that are looked at, as multiples of the budget
FEWEST_MISTAKES = 5  # of a ramp at a rate; fewer do not show whether they come together
MOST_RAMPS = 12  # looked at, evenly over the network: neighbors say the same
SURE = 3.0  # standard errors at one distance that nobody sees by chance
SUSPECT = 2.0  # over all distances up to one: averaged over ramps, so that independent records hardly ever get there
SLIGHTEST = 0.01  # correlation; less may be a change of difficulty
# Standard errors of the correlation that is extrapolated to no mistakes; many pairs are needed, and day and night stay
# below.
CLEAR = 7.0
SLIGHTEST_CLEAR = 0.002  # extrapolated; a change of difficulty leaves less
FADED = (
    1 / 8
)  # of the correlation where it is clear: as long as there is more of it farther away, the same scenes go on
FEWEST_COINCIDENCES = 20.0  # of mistakes that chance alone would bring: with fewer a standard error says little
MARGIN = 1.0  # standard errors that are added to the sum of correlations
FEWEST_NAMED, ALL_DIFFER = 300, 0.9  # so many records with names, of which this share are different ones
SHORT = 64  # records of a run that are compared distance by distance; longer ones by Fourier transforms
SHORTEST_RUN = 6  # blocks that a run of records must have: a longer block cannot be told from a change of the inputs


@dataclass(frozen=True, slots=True)
class Dependence:
    """``block`` records, of a stream where these are named, may share a mistake; ``design_effect`` labels are worth
    one."""

    block: int = 1
    design_effect: float = 1.0

    def __post_init__(self) -> None:
        check_design_effect(self.design_effect)
        if self.block < 1:
            raise InvalidArgumentError(f"block is {self.block}; it must be at least 1")


INDEPENDENT = Dependence()


def dependence(records: Records, *, budget: float, wary: bool = False) -> Dependence | None:
    """How far, and by how much, mistakes come together in records.

    Parameters
    ----------
    records : Records
        In the order of time. All of them may be given, those of a later test included: see Notes.
    budget : float
        Allowed disagreement, in (0, 1).
    wary : bool
        Follow every sign, however slight: of scenes of many unnamed sources, and of a change of difficulty too. For
        those to whom waiting costs little, such as the acceptance of a plan that nobody certified.

    Returns
    -------
    Dependence or None
        None where mistakes come together over so large a part of the records that these cannot say how far.

    Notes
    -----
    Records with few mistakes, and records in random order, are taken for independent; so are the scenes of many unnamed
    sources that take turns in a short sample. Naming streams helps there.
    """
    check_rate("budget", budget)
    found = _by_mistakes(records, budget, wary=wary)
    if found is None:
        return None
    scenes = strongest_resemblance(records, budget=budget)
    return _strongest([*found, Dependence(math.ceil(scenes), scenes)])


def _by_mistakes(records: Records, budget: float, *, wary: bool) -> list[Dependence] | None:
    """In the order of time, and within the streams; empty where mistakes are too few, None where nobody can say."""
    kinds = tuple(_mistakes(records, budget))
    if not kinds:
        return []
    mistakes, share = np.stack([k.values for k in kinds], axis=1), np.array([k.share for k in kinds])
    streams = [np.zeros(len(records), dtype=np.int64)]
    if records.stream is not None:
        streams.append(records.stream)
    found = [_Pairs.of(mistakes, share, stream).dependence(n=len(records), wary=wary) for stream in streams]
    return None if None in found else [one for one in found if one is not None]


def _strongest(seen: Sequence[Dependence]) -> Dependence:
    """As far as any of them reaches, and as much as any of them weighs."""
    return Dependence(max((d.block for d in seen), default=1), max((d.design_effect for d in seen), default=1.0))


def all_streams_differ(records: Records) -> bool:
    """Whether nearly every one of many records names a stream of its own, so that names tell nothing."""
    if records.stream is None:
        return False
    named = records.stream[records.stream != 0]
    return len(named) >= FEWEST_NAMED and len(np.unique(named)) > ALL_DIFFER * len(named)


@dataclass(frozen=True, slots=True)
class _Mistakes:
    """What records lose, standardized, ``values`` (n,), and the ``share`` of them that lose it.

    Of graded losses the share is (mean)^2 / mean of squares: where all that lose something lose alike, it is their
    share. A change of difficulty makes them correlated in proportion to it as well.
    """

    values: Floats
    share: float

    @classmethod
    def of(cls, losses: Floats) -> _Mistakes:
        mean, square = float(losses.mean()), float(losses @ losses) / len(losses)
        spread = math.sqrt(max(0.0, square - mean * mean))
        if spread <= 1e-9:
            return cls(np.zeros(len(losses)), 1.0)
        return cls(np.asarray((losses - mean) / spread), mean * mean / square)


def _mistakes(records: Records, budget: float) -> Iterator[_Mistakes]:
    """What a ramp would lose on each record: for some ramps, at thresholds where losses sum to so much."""
    n = len(records)
    for chain in (records, *records.others.values()):
        loss, final_loss = chain.losses()
        ramps = np.unique(np.linspace(0, chain.n_ramps - 1, min(MOST_RAMPS, chain.n_ramps)).astype(int))
        for ramp in ramps:
            order = np.argsort(chain.uncertainty[:, ramp], kind="stable")
            lost = loss[order, ramp].astype(np.float64)
            so_far = np.cumsum(lost)
            for rate in RATES:
                wanted = int(rate * budget * n)
                if FEWEST_MISTAKES <= wanted <= so_far[-1]:
                    leave = int(np.searchsorted(so_far, wanted)) + 1
                    happened = np.zeros(n)
                    happened[order[:leave]] = lost[:leave]
                    yield _Mistakes.of(happened)
        if final_loss.sum() >= FEWEST_MISTAKES:
            yield _Mistakes.of(final_loss.astype(np.float64))


@dataclass(frozen=True, slots=True)
class _Pairs:
    """``products`` [distance - 1]: sum over pairs of records at a distance of the product of their standardized
    mistakes, averaged over the kinds of mistakes; ``extrapolated`` [distance - 1] to a share of none. ``alike`` and
    ``spread`` are the variance of one pair's. ``pairs``: how many pairs there are, ``rarest`` the least share of
    mistakes. ``longest`` is the length of the longest run of records; ``whole`` (2,) are the products over all pairs of
    the same run, and ``runs`` as many runs of equal length would be worth as much."""

    products: Floats
    extrapolated: Floats
    alike: float
    spread: float
    pairs: Floats
    rarest: float
    longest: int
    whole: Floats
    runs: float

    @classmethod
    def of(cls, mistakes: Floats, share: Floats, stream: npt.NDArray[np.int64]) -> _Pairs:
        """``mistakes`` (n, kinds) in the order of time, ``share`` (kinds,) of each; pairs are of records of the same
        ``stream`` (n,)."""
        runs = runs_of(stream)
        longest = max(len(run) for run in runs)
        most = max(1, longest - 1 if longest <= SHORT else longest // 2)
        means = _means(share)
        products, pairs = np.zeros((most, 2)), np.zeros(most)
        short = np.concatenate([run for run in runs if len(run) <= SHORT] or [np.empty(0, dtype=np.intp)])
        for distance in range(1, min(most, SHORT - 1, len(short) - 1) + 1):
            first, second = short[:-distance], short[distance:]
            same = stream[first] == stream[second]
            pairs[distance - 1] += np.count_nonzero(same)
            products[distance - 1] += (mistakes[first[same]] * mistakes[second[same]]).sum(axis=0) @ means
        for run in (run for run in runs if len(run) > SHORT):
            reach = min(most, len(run) - 1)
            pairs[:reach] += len(run) - np.arange(1, reach + 1)
            products[:reach] += lagged_products(_without_own_mean(mistakes[run], alone=len(runs) == 1), means, reach)
        alike = (mistakes.T @ mistakes / len(mistakes)) ** 2
        averaged, extrapolated = (float(weights @ alike @ weights) for weights in means.T)
        sizes = np.array([len(run) for run in runs])
        equal = len(stream) ** 2 / float(sizes @ sizes)
        whole = np.zeros(2)
        if equal >= SHORTEST_RUN:
            whole = products_within(mistakes[np.concatenate(runs)], np.cumsum(sizes) - sizes) @ means
        rarest = float(share.min())
        return cls(products[:, 0], products[:, 1], averaged, extrapolated, pairs, rarest, longest, whole, equal)

    def dependence(self, *, n: int, wary: bool) -> Dependence | None:
        """What ``n`` records of these pairs are worth."""
        found = [(self._reach(), self.products, 1.0), (self._clear_reach(), self.extrapolated, self.spread)]
        if wary:
            found.append((self._slight_reach(), self.products, self.alike))
        reach = max(reach for reach, *_ in found)
        if reach and self._beyond(reach) * SHORTEST_RUN > self.longest:
            return self._runs_as_blocks(n=n) if self.runs >= SHORTEST_RUN else None
        return _strongest([self._effect(*one, n=n) for one in found if one[0]])

    def _effect(self, reach: int, products: Floats, spread: float, *, n: int) -> Dependence:
        block = self._beyond(reach)
        total = float(products[:block].sum()) + MARGIN * math.sqrt(spread * self._variance(0, block, known=block))
        within = (
            block / n * (2 - block / n)
        )  # the mean is that of the same records: all correlations are too small by the effect / n
        return Dependence(block, max(1.0, (1 + 2 * total / n) / (1 - within)))

    def _runs_as_blocks(self, *, n: int) -> Dependence:
        """Mistakes come together over whole runs, of which there are enough: conversations, for instance."""
        most = n / self.runs
        effect = (1 + 2 * float(self.whole.max()) / n) / (1 - 1 / self.runs)
        effect *= 1 + MARGIN * math.sqrt(2 / self.runs)
        return Dependence(self.longest, max(1.0, min(most, effect)))

    def _beyond(self, reach: int) -> int:
        """The next distance that is looked at: mistakes come together up to some distance before it."""
        return next(distance for distance in distances(max(self.longest, reach)) if distance > reach)

    def _clear_reach(self) -> int:
        """How far mistakes come together however rare they are; 0 where they clearly do at no distance.

        As far as is clearest, and on from there while each further stretch shows it too: far ones alone may by chance.
        How much a stretch must show follows from what is clear. Where 64 sources take turns that is hardly more than a
        change of difficulty leaves, and of scenes as long as the sample it fades with the distance: ended where it is
        no longer clear, their block was far too short.
        """
        best, reach, before, slightest = CLEAR, 0, 0, SLIGHTEST_CLEAR
        for distance in distances(len(self.products)):
            if float(self.pairs[:distance].sum()) * self.rarest**2 >= FEWEST_COINCIDENCES:
                so_far = self._errors(0, distance)
                if so_far >= best:
                    best, reach = so_far, distance
                    slightest = min(SLIGHTEST_CLEAR, FADED * self._clear_share(0, distance))
                elif reach == before and self._errors(before, distance, slightest=slightest) >= SURE:
                    reach = distance
            before = distance
        return reach

    def _slight_reach(self) -> int:
        """The distance up to which all pairs together show most clearly that mistakes come together, however slightly;
        0 where they do not."""
        best, reach = SURE, 0
        for distance in distances(len(self.products)):
            pairs = float(self.pairs[:distance].sum())
            if pairs * self.rarest**2 >= FEWEST_COINCIDENCES:
                errors = float(self.products[:distance].sum()) / math.sqrt(self.alike * pairs)
                if errors >= best:
                    best, reach = errors, distance
        return reach

    def _clear_share(self, start: int, end: int) -> float:
        """The extrapolated correlation from one distance to another; 0 where no records are so far apart."""
        pairs = float(self.pairs[start:end].sum())
        return float(self.extrapolated[start:end].sum()) / pairs if pairs else 0.0

    def _errors(self, start: int, end: int, *, slightest: float = SLIGHTEST_CLEAR) -> float:
        """By how many standard errors the extrapolated correlation from one distance to another is above 0; 0 where it
        is slight."""
        if self._clear_share(start, end) <= slightest:
            return 0.0
        total = float(self.extrapolated[start:end].sum())
        return total / math.sqrt(self.spread * self._variance(start, end, known=end))

    def _reach(self) -> int:
        """The largest distance at which mistakes come together; 0 where they do at none."""
        reach, best, before = 0, 0.0, 0
        for distance in distances(len(self.products)):
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
        """Of the sum of products from one distance to another, where correlation is known up to ``known``
        (Bartlett)."""
        correlation = self.products[:known] / np.maximum(self.pairs[:known], 1)
        return float(self.pairs[start:end].sum()) * (1 + 2 * float(np.sum(np.clip(correlation, 0, None) ** 2)))


def _without_own_mean(mistakes: Floats, *, alone: bool) -> Floats:
    """Mistakes (rows, kinds) of a run without its own mean where that is known: a camera that is wrong more often than
    others is no scene. One that was not wrong at many separate times may be in one, which its mean would hide."""
    if alone:
        return mistakes
    known = separate_times(mistakes > 0, ONE_RUN) >= SEPARATE
    return np.where(known, mistakes - mistakes.mean(axis=0), mistakes)


def _means(share: Floats) -> Floats:
    """Weights (kinds, 2) of kinds of mistakes with such shares: for their average, and for the value at a share of 0 of
    a line through them."""
    average = np.full(len(share), 1 / len(share))
    off = share - share.mean()
    spread = float(off @ off)
    line = average - off * share.mean() / spread if spread > 0 else np.zeros(len(share))
    return np.stack([average, line], axis=1)
