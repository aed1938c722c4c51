"""What requests of a named stream are worth where it has too few mistakes to say whether these come together.

A certificate is given exactly where the sample lacks a camera's bad scenes. Its mistakes then say nothing of them, but
its *scores* do: frames of a scene have the same. So the rows of each stream are compared with each other: by the
mistakes of ramps where the stream was wrong often enough at separate times, otherwise by the ranks of their
uncertainties within the stream. Rows that resemble each other strongly up to some distance are a scene,

    L = 1 + (2 / n) x sum over pairs within a scene of their correlation

of them are worth one, and a stream that is shorter than a few scenes is one.

A stream that matters too little to break a budget does not count: the effect is the largest L of streams that together
are more than a small part of it. So that no single noisy L decides, streams that resemble themselves are measured
together, and apart from these only those whose scenes are clearly longer.

Slight correlations are a change of difficulty, as in :mod:`~offramp_core.certify.dependence`.
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
    Rows,
    distances,
    lagged_products,
    products_within,
    runs_of,
    separate_times,
)
from offramp_core.records import Records

LITTLE = 0.25  # of the budget: streams with so few rows may all be wrong
MOST_RAMPS = 6  # looked at, evenly over the network
STRONG = 0.25  # correlation of rows of a scene; a change of difficulty leaves less
SURE = 4.0  # standard errors; many streams are looked at
FEWEST_OWN = 20  # rows of a stream that can be compared with their own mean
LASTING = 0.5  # of the records' time: a stream that is there for less may be a scene itself, such as a conversation
ONE_SCENE = 0.75  # of the rows of a stream that are equal in all scores
SEPARATE = 10  # times that a stream must have been wrong before its mistakes say whether they come together
SHORTEST_RUN = 6  # scenes that a stream must have, or it is taken for one; streams that a pool must have


def strongest_resemblance(records: Records, *, budget: float) -> float:
    """How many rows are worth one in those named streams that could break the budget by themselves; at least 1."""
    if records.stream is None or records.n_ramps == 0:
        return 1.0
    runs = [run for run in runs_of(records.stream) if len(run) > 1 and records.stream[run[0]] != 0]
    least = LITTLE * budget * len(records)
    if sum(len(run) for run in runs) < least:
        return 1.0
    rows = _Rows.of(records)
    own = [one for run in runs if len(run) >= FEWEST_OWN and (one := _Alike.of(rows, run)) is not None]
    found = [length for n, length in _scenes(own) if n >= least]
    passing = [run for run in runs if len(run) >= FEWEST_OWN and run[-1] - run[0] < LASTING * len(records)]
    passing.extend(_short(runs))
    found.extend(length for n, length in (*_passing(rows, passing), *_alone(runs)) if n >= least)
    return max([1.0, *found])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Uncertainties and losses (n, ramps) of those ramps that are looked at."""

    uncertainty: npt.NDArray[np.float32]
    loss: npt.NDArray[np.float32]

    @classmethod
    def of(cls, records: Records) -> _Rows:
        ramps = np.unique(np.linspace(0, records.n_ramps - 1, min(MOST_RAMPS, records.n_ramps)).astype(int))
        return cls(records.uncertainty[:, ramps], records.losses()[0][:, ramps])

    def compared(self, rows: Rows, begins: Rows) -> Floats:
        """What ``rows`` are compared by, standardized, (rows, kinds); ``begins`` says which of them begin a stream.

        Where nearly all rows are equal they are ones: a single scene, which their own mean would hide.
        """
        loss = self.loss[rows]
        separate = separate_times(loss > 0, begins)
        if np.median(separate) >= SEPARATE:
            values = loss[:, separate >= SEPARATE].astype(np.float64)
        else:
            ranked = [_ranks(column) for column in self.uncertainty[rows].T]
            if np.mean(np.logical_and.reduce([commonest for _, commonest in ranked])) > ONE_SCENE:
                return np.ones((len(rows), 1))
            values = np.stack([ranks for ranks, _ in ranked], axis=1)
        spread = values.std(axis=0)
        varied = spread > 1e-9
        return np.asarray((values - values.mean(axis=0))[:, varied] / spread[varied])


@dataclass(frozen=True, slots=True)
class _Alike:
    """A stream of ``n`` rows; ``products`` [distance - 1] is the sum over its pairs at a distance of the product of
    what they are compared by, averaged over ramps."""

    n: int
    products: Floats

    @classmethod
    def of(cls, rows: _Rows, run: Rows) -> _Alike | None:
        """None where not even rows next to each other resemble each other, as in most streams."""
        values = rows.compared(run, ONE_RUN)
        kinds = values.shape[1]
        if not cls(len(run), np.array([np.vdot(values[1:], values[:-1]) / kinds])).resembles(0, 1, known=1.0):
            return None
        return cls(len(run), lagged_products(values, np.full((kinds, 1), 1 / kinds), len(run) // 2)[:, 0])

    def resembles(self, start: int, end: int, *, known: float) -> bool:
        """Whether rows from one distance to another resemble each other clearly; ``known`` is the variance inflation of
        what is nearer."""
        seen = self.products[start:end]
        pairs = float(np.sum(self.n - 1.0 - np.arange(start, start + len(seen))))
        least = max(STRONG, SURE * math.sqrt(known / self.n)) * pairs
        return pairs > 0 and float(seen.sum()) >= least


def _scenes(streams: Sequence[_Alike]) -> Iterator[tuple[int, float]]:
    """Rows of streams that resemble themselves, and how many of these are worth one; then of those among them whose
    scenes are clearly longer, and so on."""
    reach, known = 0, 1.0
    while streams := [s for s in streams if s.resembles(reach, max(1, 2 * reach), known=known)]:
        rows, squares = sum(s.n for s in streams), sum(s.n * s.n for s in streams)
        products, pairs = _together(streams)
        before = 0
        for distance in distances(len(products)):
            stretch = slice(before, distance)
            if float(products[stretch].sum()) < STRONG * float(pairs[stretch].sum()) or before >= len(products):
                break
            before = distance
        block = next(d for d in distances(2 * before) if d > before)
        whole = squares / rows
        if block * SHORTEST_RUN > whole:
            yield rows, whole
        else:
            within = block / whole * (2 - block / whole)  # each stream's own mean takes so much of the correlation away
            length = (1 + 2 * float(products[:block].sum()) / rows) / (1 - within)
            yield rows, min(whole, length)
        reach = max(before, reach + 1)
        known = 1 + 2 * float(np.sum(np.clip(products[:block] / np.maximum(pairs[:block], 1), 0, None) ** 2))


def _together(streams: Sequence[_Alike]) -> tuple[Floats, Floats]:
    """Sums of products, and numbers of pairs, by distance."""
    most = max(len(s.products) for s in streams)
    products, pairs = np.zeros(most), np.zeros(most)
    for s in streams:
        products[: len(s.products)] += s.products
        pairs[: len(s.products)] += s.n - 1.0 - np.arange(len(s.products))
    return products, pairs


def _passing(rows: _Rows, runs: Sequence[Rows]) -> Iterator[tuple[int, float]]:
    """The same of streams that pass, each of which may be one scene: rows of all that have at least so many, and how
    many of these are worth one."""
    least = 2
    while runs := [run for run in runs if len(run) >= least]:
        sizes = np.array([len(run) for run in runs])
        n, squares = int(sizes.sum()), float(sizes @ sizes)
        if n * n < SHORTEST_RUN * squares:
            return
        begins = np.cumsum(sizes) - sizes
        products = float(products_within(rows.compared(np.concatenate(runs), begins), begins).mean())
        pairs = (squares - n) / 2
        if products >= max(STRONG, SURE / math.sqrt(pairs)) * pairs:
            yield n, 1 + 2 * products / n
        least *= 2


def _short(runs: Sequence[Rows]) -> Sequence[Rows]:
    """Streams that are too short to be compared with themselves; with the next longer ones, where it takes these to
    compare them with each other."""
    by_length = sorted(runs, key=len)
    short = sum(len(run) < FEWEST_OWN for run in runs)
    return by_length[: max(short, SHORTEST_RUN)] if short else ()


def _alone(runs: Sequence[Rows]) -> Iterator[tuple[int, float]]:
    """The same of short streams where there are too few to compare them with: each may be one scene."""
    sizes = [len(run) for run in runs if len(run) < FEWEST_OWN]
    if sizes and len(runs) < SHORTEST_RUN:
        yield sum(sizes), sum(size * size for size in sizes) / sum(sizes)


def _ranks(values: npt.NDArray[np.float32]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Ranks, equal values share the middle of theirs; and which values are the commonest one."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - counts / 2)[which]), np.asarray(which == counts.argmax())
