"""Search by trying everything: a second implementation, slow and plain, that the real one must equal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from offramp_core.plan import floor_threshold
from offramp_core.records import Records
from offramp_core.search.objective import Charges, Pricing

Left = npt.NDArray[np.intp]


def every_plan(records: Records, active: tuple[int, ...]) -> Left:
    """Where each input leaves, as a position in ``active``, under every combination of distinguishable thresholds:
    (plans, n)."""
    choices = []
    for ramp in active:
        column = sorted({float(u) for u in records.uncertainty[:, ramp]})
        above = {float(floor_threshold(u)) + 1e-6 for u in column} | {float(floor_threshold(u)) for u in column}
        choices.append(sorted(t for t in above | {0.0, 1.0} if t <= 1))
    grid = np.array(list(itertools.product(*choices)), dtype=np.float64).round(6).astype(np.float32)
    left = np.full((len(grid), len(records)), len(active), dtype=np.intp)
    for j in range(len(active) - 1, -1, -1):
        left[records.uncertainty[:, active[j]][None, :] < grid[:, j, None]] = j
    return left


def wrong(records: Records, active: tuple[int, ...], left: Left) -> npt.NDArray[np.bool_]:
    """Which answers differ from the reference's, (plans, n)."""
    answers = np.column_stack([*(records.agrees[:, ramp] for ramp in active), records.final_agrees])
    return ~answers[np.arange(len(records)), left]


def seconds(charges: Charges, active: tuple[int, ...]) -> list[float]:
    """What leaving at each ramp costs, and last what taking no exit costs."""
    out = []
    for depth in (*active, len(charges.ramp)):
        reached = [ramp for ramp in active if ramp <= depth]
        out.append(
            charges.base
            + sum(charges.segment[: depth + 1])
            + sum(charges.ramp[ramp] for ramp in reached)
            + sum(charges.always[ramp] for ramp in active)
        )
    return out


def worth(pricing: Pricing, active: tuple[int, ...], left: Left) -> npt.NDArray[np.float64]:
    """Weighted seconds per request under each plan: mean and tail of the time to answer, and busy time."""
    w, n = pricing.weights, left.shape[1]
    time, busy = (np.array(seconds(c, active))[left] for c in (pricing.time, pricing.busy))
    tail = np.sort(time, axis=1)[:, math.ceil(round(w.percentile * n, 9)) - 1]
    return np.asarray(w.mean * time.mean(axis=1) + w.tail * tail + w.busy * busy.mean(axis=1))


def least(
    records: Records,
    sets: Iterable[tuple[int, ...]],
    pricing: Pricing,
    fits: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.bool_]],
) -> float | None:
    """Least weighted seconds of any plan of these ramps; ``fits`` says of (plans, n) errors which plans keep the
    limits."""
    best = None
    for active in sets:
        left = every_plan(records, active)
        found = worth(pricing, active, left)[fits(wrong(records, active, left))]
        if len(found):
            best = float(found.min()) if best is None else min(best, float(found.min()))
    return best
