"""Runs of records, one for each stream, and sums of products of values within them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

ONE_RUN: Rows = np.zeros(1, dtype=np.intp)  # where it begins
GROWTH = 1.41  # from one distance that is looked at to the next


def runs_of(stream: npt.NDArray[np.int64]) -> list[Rows]:
    """The rows of each stream (n,), in the order of time."""
    order = np.argsort(stream, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(stream[order])) + 1)


def separate_times(wrong: npt.NDArray[np.bool_], begins: Rows) -> npt.NDArray[np.intp]:
    """How many separate times runs were wrong by each column (n, kinds): rows that follow each other are one time.
    ``begins`` are the first rows of the runs."""
    first = wrong.copy()
    first[1:] &= ~wrong[:-1]
    first[begins] = wrong[begins]
    return np.asarray(first.sum(axis=0))


def products_within(values: Floats, begins: Rows) -> Floats:
    """Sums of products of ``values`` (n, kinds) over all pairs of the same run (kinds,); ``begins`` are the first rows
    of the runs."""
    sums = np.add.reduceat(values, begins, axis=0)
    return np.asarray(((sums**2).sum(axis=0) - (values**2).sum(axis=0)) / 2)


def distances(most: int) -> Iterator[int]:
    """Distances that are looked at: 1, 2, 3, 4, 6, 8, ... and one beyond ``most``."""
    distance = 1
    while distance <= most:
        yield distance
        distance = max(distance + 1, round(GROWTH * distance))
    yield distance


def lagged_products(values: Floats, means: Floats, reach: int) -> Floats:
    """Sums of products at distances 1 to ``reach`` within a run of records, in each of the ``means`` (kinds, m) over
    kinds of ``values`` (n, kinds): (reach, m)."""
    size = _padded(len(values) + reach)
    spectrum = np.fft.rfft(np.ascontiguousarray(values.T), size, axis=1)
    power = means.T @ (spectrum.real**2 + spectrum.imag**2)
    return np.asarray(np.fft.irfft(power, size, axis=1)[:, 1 : reach + 1].T)


def _padded(n: int) -> int:
    """The smallest length of at least ``n`` that is 4, 5 or 6 times a power of two, of which transforms are fast."""
    eighth = 1 << max(0, n.bit_length() - 3)
    return next(size for times in (4, 5, 6, 8) if (size := times * eighth) >= n)
