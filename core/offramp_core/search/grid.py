"""The grid of thresholds a plan can store.

A served threshold is a multiple of 1e-6, compared as float32. Search therefore does not look for real
thresholds and round them afterwards, which could let an input that was meant to leave go on to a later, wrong
ramp. It works on *keys*: an input leaves under grid threshold g exactly when its key is at most g. Inputs with
equal keys cannot be told apart by any plan and leave together; that is the whole tie rule.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import numpy.typing as npt

from offramp_core.records import FloatArray

STEPS = 1_000_000
NEVER = STEPS + 1  # key of an input that no threshold lets leave

KeyArray = npt.NDArray[np.int32]


def leave_keys(uncertainty: FloatArray) -> KeyArray:
    """Smallest g with uncertainty < float32(g / 1e6), per element; ``NEVER`` at 1.

    Parameters
    ----------
    uncertainty : (...) float32 in [0, 1]
    """
    u = np.asarray(uncertainty, dtype=np.float32)
    nearest = np.rint(u.astype(np.float64) * STEPS)
    # The nearest grid value is half a step away at most and float32 spacing is far below that, so only it is in doubt.
    return nearest.astype(np.int32) + ((nearest / STEPS).astype(np.float32) <= u)


def threshold_of(key: int) -> Decimal:
    """The threshold of a grid step."""
    return Decimal(int(key)).scaleb(-6)


def cautious_threshold(score: float) -> Decimal:
    """Largest storable threshold under which an input with exactly this (float32) uncertainty does not leave."""
    return threshold_of(int(leave_keys(np.asarray([score], dtype=np.float32))[0]) - 1)
