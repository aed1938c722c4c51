"""When a batch counts as slow: limits by what determines how long a batch may take, its rows and, for texts, their
length.

A limit is the 90th percentile of what batches of the stable plan took. Where lengths differ and only the sizes are told
apart, that percentile belongs to the long texts: of the other batches none is ever slow, and a canary a fifth slower
hides among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from offramp_core.sketch import SecondsSketch, merge_reports, merge_sketches

SLOW_QUANTILE = 0.90
MIN_BATCHES = 20  # of a shape, before its pace is known well enough to judge by
MAX_LIMITS = 256  # that a document carries, of either kind
SHORTEST_LENGTH = 16
BUCKET = re.compile("-?[0-9]{1,4}")

Key = TypeVar("Key", int, "BatchShape")


class BatchShape(NamedTuple):
    """Rows of a batch, and the class of the length that they were filled up to: 0 where all inputs are alike, or nobody
    said it."""

    rows: int
    length: int = 0

    def __str__(self) -> str:
        """As it is told between workers and control plane.

        >>> str(BatchShape(4)), str(BatchShape(4, 128))
        ('4', '4x128')
        """
        return f"{self.rows}x{self.length}" if self.length else str(self.rows)


def length_class(length: int) -> int:
    """The power of two, at least 16, that lengths up to it are counted under: so few that each has batches enough to
    know its pace.

    >>> length_class(1), length_class(100), length_class(128), length_class(1536)
    (16, 128, 128, 2048)
    """
    return max(SHORTEST_LENGTH, 1 << (length - 1).bit_length())


def shape_of(text: str) -> BatchShape | None:
    """What :meth:`BatchShape.__str__` wrote; None for any other text.

    >>> shape_of("4x128"), shape_of("4"), shape_of("4x"), shape_of("many")
    (BatchShape(rows=4, length=128), BatchShape(rows=4, length=0), None, None)
    """
    rows, by, length = text.partition("x")
    numbers = (rows, length) if by else (rows,)
    if not all(number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers):
        return None
    return BatchShape(*map(int, numbers))


class Judged(NamedTuple):
    """Batches of the stable plan that are held against one limit: their execution seconds, and the limit."""

    seconds: SecondsSketch
    limit: float


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """Execution seconds above which a stable batch is slow: by its shape where that is listed, else by its rows."""

    by_rows: Mapping[int, float] = field(default_factory=dict)
    by_shape: Mapping[BatchShape, float] = field(default_factory=dict)

    def of(self, shape: BatchShape) -> float | None:
        """The limit for a batch; None where batches of so many rows are not judged."""
        return self.by_shape.get(shape, self.by_rows.get(shape.rows))


def slow_limits(execution: Mapping[BatchShape, SecondsSketch]) -> SlowLimits:
    """Limits from what batches of the stable plan took, each batch counted under one shape.

    Rows and shapes whose pace is hardly known are left out; rows are all taken where none is known.
    """
    rows: dict[int, list[SecondsSketch]] = {}
    for shape, seconds in execution.items():
        rows.setdefault(shape.rows, []).append(seconds)
    merged = {n: merge_sketches(sketches) for n, sketches in rows.items()}
    known = {n: seconds for n, seconds in merged.items() if seconds.n >= MIN_BATCHES} or merged
    shapes = {shape: seconds for shape, seconds in execution.items() if shape.length and seconds.n >= MIN_BATCHES}
    return SlowLimits(_limits(known), _limits(shapes))


def parse_limits(by_rows: Mapping[str, float], by_shape: Mapping[str, float]) -> SlowLimits:
    """Limits as a document carries them; what names no shape is left out."""
    shapes = {shape_of(text): seconds for text, seconds in by_shape.items()}
    rows = {shape.rows: seconds for text, seconds in by_rows.items() if (shape := shape_of(text))}
    return SlowLimits(rows, {shape: seconds for shape, seconds in shapes.items() if shape is not None})


def judged(execution: Mapping[BatchShape, SecondsSketch], limits: SlowLimits) -> tuple[Judged, ...]:
    """The batches that have a limit, and it."""
    found = ((seconds, limits.of(shape)) for shape, seconds in execution.items())
    return tuple(Judged(seconds, limit) for seconds, limit in found if limit is not None)


def mean_rows(execution: Mapping[BatchShape, SecondsSketch]) -> float:
    """Rows of a batch on average; 0 without batches."""
    batches = sum(seconds.n for seconds in execution.values())
    return sum(shape.rows * seconds.n for shape, seconds in execution.items()) / batches if batches else 0.0


def by_shape(reported: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[BatchShape, SecondsSketch]:
    """Sketches that workers report, merged by shape. What names no shape, and buckets without a number, are left
    out."""
    found: dict[BatchShape, dict[str, int]] = {}
    for sketches in reported:
        for text, buckets in sketches.items():
            shape = shape_of(text)
            if shape is not None:
                counts = found.setdefault(shape, {})
                for i, n in buckets.items():
                    if n > 0:
                        counts[i] = counts.get(i, 0) + n
    return {
        shape: merge_reports([{i: n for i, n in counts.items() if BUCKET.fullmatch(i)}])
        for shape, counts in found.items()
    }


def _limits(known: Mapping[Key, SecondsSketch]) -> dict[Key, float]:
    """Limits of what most batches are of."""
    listed = sorted(known, key=lambda key: (-known[key].n, key))[:MAX_LIMITS]
    return {key: round(known[key].quantile(SLOW_QUANTILE) or 0.0, 9) for key in sorted(listed)}
