"""What a step's slowness gate is judged by, frozen when the step begins: limits, how many batches it waits for, and
what these exclude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offramp_core.control.rollouts.gates import HARMFUL_SLOWDOWN, POWER
from offramp_core.evidence.exposure import LARGEST_BATCH_EXPOSURE, judged_batches_needed, noticed_slowdown
from offramp_core.evidence.slow import BatchShape, SlowLimits, judged, mean_rows, slow_limits
from offramp_core.sketch import SecondsSketch

# Where batches are many, waiting for more of them is cheap: what a minute brings, up to a number that a lull does not
# turn into hours.
CHEAP_SECONDS = 60.0
LARGEST_CHEAP_EXPOSURE = 3 * LARGEST_BATCH_EXPOSURE


@dataclass(frozen=True, slots=True)
class SlownessBasis:
    """``needed`` judged batches are waited for; ``excluded`` is the least slowdown that they exclude: 0 where none is,
    None where nothing is compared."""

    limits: SlowLimits
    needed: int
    excluded: float | None


def slowness_basis(
    execution: Mapping[BatchShape, SecondsSketch], *, request_rate: float, weight: int, level: float
) -> SlownessBasis:
    """The basis of a step.

    Parameters
    ----------
    execution : mapping
        What batches of the stable plan took, each counted under one shape.
    request_rate : float
        Requests a second that the fleet answers.
    weight, level : int, float
        Percent of batches that the canary gets, and what the gate may spend.
    """
    limits = slow_limits(execution)
    if weight >= 100:
        return SlownessBasis(limits, 0, None)
    stable, most = judged(execution, limits), most_judged(request_rate=request_rate, mean_rows=mean_rows(execution))
    needed = judged_batches_needed(
        stable, weight=weight, slowdown=HARMFUL_SLOWDOWN, alpha=level, power=POWER, limit=most
    )
    if needed < most:
        return SlownessBasis(limits, needed, HARMFUL_SLOWDOWN)
    noticed = noticed_slowdown(stable, batches=needed, weight=weight, alpha=level, power=POWER)
    return SlownessBasis(limits, needed, noticed or 0.0)


def most_judged(*, request_rate: float, mean_rows: float) -> int:
    """Judged batches beyond which no step waits for its slowness gate, at so many requests a second in batches of so
    many rows.

    Examples
    --------
    >>> most_judged(request_rate=50.0, mean_rows=4.0), most_judged(request_rate=400.0, mean_rows=4.0)
    (2000, 6000)
    """
    cheap = CHEAP_SECONDS * request_rate / mean_rows if mean_rows > 0 else 0.0
    return max(LARGEST_BATCH_EXPOSURE, min(LARGEST_CHEAP_EXPOSURE, int(cheap)))
