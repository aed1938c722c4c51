"""A mergeable histogram of positive seconds with bounded relative error.

Buckets are logarithmic, so a quantile is off by at most ``RELATIVE_ERROR`` of itself whatever the
distribution, and merging sketches of many workers is adding counts (the idea of DDSketch: Masson, Rim and
Lee, VLDB 2019, arXiv:1908.10693).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offramp_core.errors import InvalidArgumentError

RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
SMALLEST_SECONDS = 1e-7


@dataclass(frozen=True, slots=True)
class SecondsSketch:
    """``counts[i]`` observations fell into (γ^(i-1), γ^i] seconds."""

    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return sum(self.counts.values())

    def quantile(self, q: float) -> float | None:
        """The q-quantile in seconds, or None without observations."""
        if not 0 <= q <= 1:
            raise InvalidArgumentError(f"quantile q is {q}; it must lie in [0, 1]")
        total = self.n
        if total == 0:
            return None
        rank, seen = max(1, math.ceil(q * total)), 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= rank:
                return bucket_seconds(index)
        raise AssertionError("ranks end within the counts")

    def share_above(self, seconds: float) -> float | None:
        """Share of observations in buckets above the one holding ``seconds``; None without observations."""
        total, limit = self.n, bucket_index(seconds)
        return sum(c for i, c in self.counts.items() if i > limit) / total if total else None

    def mean(self) -> float | None:
        """Mean seconds (bucket midpoints), or None without observations."""
        total = self.n
        return sum(bucket_seconds(i) * c for i, c in self.counts.items()) / total if total else None


def bucket_index(seconds: float) -> int:
    """Index of the bucket that holds ``seconds``."""
    if not 0 <= seconds < math.inf:
        raise InvalidArgumentError(f"seconds is {seconds}; it must be finite and >= 0")
    return math.ceil(math.log(seconds if seconds > SMALLEST_SECONDS else SMALLEST_SECONDS) / _LOG_GAMMA)


def bucket_seconds(index: int) -> float:
    """The value a bucket stands for: within ``RELATIVE_ERROR`` of everything in it."""
    return 2 * math.exp(index * _LOG_GAMMA) / (_GAMMA + 1)


def merge_sketches(sketches: Iterable[SecondsSketch]) -> SecondsSketch:
    """One sketch of all observations."""
    counts: dict[int, int] = {}
    for sketch in sketches:
        for index, count in sketch.counts.items():
            counts[index] = counts.get(index, 0) + count
    return SecondsSketch(counts)


def merge_reports(reported: Iterable[Mapping[str, int]]) -> SecondsSketch:
    """One sketch of all observations in sketches as processes report them: buckets by their numbers as text."""
    counts: dict[str, int] = {}
    for buckets in reported:
        for text, count in buckets.items():
            counts[text] = counts.get(text, 0) + count
    merged: dict[int, int] = {}
    for text, count in counts.items():  # each number is read once: a service has few buckets and many counters
        merged[int(text)] = merged.get(int(text), 0) + count
    return SecondsSketch(merged)
