"""How long requests took with exits on and with exits off, from what workers counted.

Workers count the seconds from admission to reply per plan. The honest comparison is between the two arms of one epoch:
which batch runs under which is drawn by a hash, so load and inputs are alike. Where no epoch had both, what was counted
at different times is compared and said to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offramp_core.protocol import ArmCounts
from offramp_core.sketch import bucket_seconds, merge_reports

MIN_REQUESTS = 100
QUANTILES = (0.5, 0.9, 0.95, 0.99)
MAX_POINTS = 120

SIDE_BY_SIDE = (
    "Compared side by side: the two arms of the same rollout steps, drawn by batch, so that load and inputs are alike."
)
APART = "Compared over different times, so load and inputs may have differed."


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds from admission to reply. ``points`` are (seconds, share of requests that took no longer), rising in
    both."""

    label: str
    n: int
    points: tuple[tuple[float, float], ...]
    quantiles: tuple[tuple[float, float], ...]

    def at(self, q: float) -> float:
        return dict(self.quantiles)[q]


@dataclass(frozen=True, slots=True)
class LatencyFacts:
    """``on`` or ``off`` is None while fewer than ``MIN_REQUESTS`` were counted; ``how`` says how far they compare, or
    what is missing."""

    slo_seconds: float | None
    percentile: float
    on: Distribution | None
    off: Distribution | None
    how: str


def latency(
    counts: Sequence[ArmCounts],
    *,
    on: Collection[str],
    off: Collection[str],
    slo_seconds: float | None,
    percentile: float,
    names: tuple[str, str] = ("exits on", "exits off"),
) -> LatencyFacts:
    """Compare plans by their hashes: those with exits and those without.

    ``names`` are what they are called. The two arms of shared epochs where there are enough requests of both, else all
    epochs that workers still hold.
    """
    epochs_on, epochs_off = ({c.epoch for c in counts if c.plan_hash in hashes} for hashes in (on, off))
    shared = [c for c in counts if c.epoch in epochs_on & epochs_off]
    beside_on, beside_off = _distribution(names[0], shared, on), _distribution(names[1], shared, off)
    if beside_on is not None and beside_off is not None:
        return LatencyFacts(slo_seconds, percentile, beside_on, beside_off, SIDE_BY_SIDE)
    all_on, all_off = _distribution(names[0], counts, on), _distribution(names[1], counts, off)
    return LatencyFacts(slo_seconds, percentile, all_on, all_off, _note(all_on, all_off, names))


def _note(on: Distribution | None, off: Distribution | None, names: tuple[str, str]) -> str:
    if on is not None and off is not None:
        return APART
    missing = f"with {names[0] if on is None else names[1]}"
    return (
        f"Fewer than {MIN_REQUESTS} requests {missing} are on record; workers keep the counts of the last plans only."
    )


def _distribution(label: str, counts: Iterable[ArmCounts], hashes: Collection[str]) -> Distribution | None:
    sketch = merge_reports(c.latency for c in counts if c.plan_hash in hashes)
    n = sketch.n
    if n < MIN_REQUESTS:
        return None
    seen, points = 0, []
    for index in sorted(sketch.counts):
        seen += sketch.counts[index]
        points.append((bucket_seconds(index), seen / n))
    step = -(-len(points) // MAX_POINTS)
    thinned = [*points[:-1:step], points[-1]]
    return Distribution(label, n, tuple(thinned), tuple((q, sketch.quantile(q) or 0.0) for q in QUANTILES))
