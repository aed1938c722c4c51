"""Ranges of activations for static int8: what 255 levels must span, found on rows of the data.

ONNX Runtime's own calibrators run the graph unoptimised once per method, and its entropy method, with as many bins as
levels, never clips anything. Here two passes over the rows give a fine histogram of every activation, and all three
methods read their ranges off it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.graph import tensor_values, with_outputs
from offramp_worker.bundle.lengths import by_length, pad_rows
from offramp_worker.devices import open_session

RangeMethod = Literal["minmax", "percentile", "entropy"]
RANGE_METHODS: tuple[RangeMethod, ...] = get_args(RangeMethod)

BINS = 16_384
MAGNITUDE_BINS = 2_048  # of absolute values; coarser than BINS, so that none is empty by chance
LEVELS = 256
TAIL = 1e-4  # share of the values that a percentile range leaves out at either end
CANDIDATES = 96  # clipping points tried per activation
CHUNK_BYTES = 128 * 2**20  # of activations held at a time
MAX_CHUNK_ROWS = 32

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often an activation's values fall into ``counts`` equal bins over [``low``, ``high``]; both ends occur."""

    counts: Counts
    low: float
    high: float

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """(bins + 1,)."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)


def collect_histograms(
    model: onnx.ModelProto, tensors: Sequence[str], x: Array, spec: TensorSpec, *, threads: int
) -> dict[str, Histogram]:
    """Histograms of the named float32 activations (the model's input may be among them) over rows ``x`` (n, ...).

    ``spec`` is the model's input: rows of tokens are run with rows of about their length.
    """
    session = open_session(with_outputs(model, tensors), threads=threads)

    def values(rows: Array) -> Mapping[str, Array]:
        return tensor_values(session, tensors, rows, entry=spec.name)

    step = rows_at_once(values(x[:1]))
    chunks = [pad_rows([x[rows]], spec) for rows in by_length(x, spec, size=step)]
    ends = {name: (np.inf, -np.inf) for name in tensors}
    for rows in chunks:
        for name, value in values(rows).items():
            low, high = ends[name]
            ends[name] = min(low, float(value.min())), max(high, float(value.max()))
    counts = {name: np.zeros(BINS, dtype=np.int64) for name in tensors}
    for rows in chunks:
        for name, value in values(rows).items():
            counts[name] += np.histogram(value, BINS, range=ends[name])[0]
    return {name: Histogram(counts[name], *ends[name]) for name in tensors}


def rows_at_once(of_one: Mapping[str, Array]) -> int:
    """How many rows to hold the activations of, by those of one."""
    size = sum(value.nbytes for value in of_one.values())
    return max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // max(1, size)))


def value_range(histogram: Histogram, method: RangeMethod) -> tuple[float, float]:
    """The range that int8 spans: what lies outside is clipped. Never wider than the values that occurred."""
    if method == "minmax" or histogram.high <= histogram.low:
        return histogram.low, histogram.high
    return _percentile_range(histogram) if method == "percentile" else _entropy_range(histogram)


def _percentile_range(histogram: Histogram) -> tuple[float, float]:
    below = np.cumsum(histogram.counts) / histogram.counts.sum()
    first = int(np.searchsorted(below, TAIL, side="right"))
    last = int(np.searchsorted(below, 1 - TAIL, side="left"))
    return float(histogram.edges[first]), float(histogram.edges[min(last, len(histogram.counts) - 1) + 1])


def _entropy_range(histogram: Histogram) -> tuple[float, float]:
    """Clip at the magnitude that loses least information (Kullback-Leibler) between the clipped values and their
    levels.

    Source: Migacz (2017), "8-bit inference with TensorRT". One side of the range has half of the levels where values
    have both signs.
    """
    centres = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    limit = max(abs(histogram.low), abs(histogram.high))
    magnitudes, _ = np.histogram(np.abs(centres), MAGNITUDE_BINS, range=(0.0, limit), weights=histogram.counts)
    magnitudes[0] = magnitudes[1]  # zeros cost nothing at any range; many of them would outweigh all that is clipped
    levels = LEVELS // 2 if histogram.low < 0 < histogram.high else LEVELS
    ends = np.unique(np.linspace(levels, MAGNITUDE_BINS, CANDIDATES).round().astype(int))
    best = min(ends, key=lambda end: _divergence(magnitudes, int(end), levels=levels))
    clip = limit * best / MAGNITUDE_BINS
    return max(histogram.low, float(-clip)), min(histogram.high, float(clip))


def _divergence(magnitudes: npt.NDArray[np.float64], end: int, *, levels: int) -> float:
    """Divergence of the first ``end`` bins, the rest clipped into the last, from the same bins after rounding to
    levels."""
    clipped = magnitudes[:end].copy()
    clipped[-1] += magnitudes[end:].sum()
    level = np.arange(end) * levels // end
    occupied = magnitudes[:end] > 0
    mass = np.bincount(level, weights=magnitudes[:end], minlength=levels)
    spread = np.bincount(level, weights=occupied, minlength=levels)
    rounded = np.where(occupied, mass[level] / np.maximum(spread[level], 1), 0.0)
    p, q = clipped / clipped.sum(), rounded / max(rounded.sum(), 1.0)
    smallest = 1e-9  # clipped mass in a bin that rounding leaves empty is a finite loss, not an infinite one
    shown = p > 0
    return float((p[shown] * np.log(p[shown] / np.maximum(q[shown], smallest))).sum())
