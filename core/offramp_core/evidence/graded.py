"""Graded losses as errors that can be counted.

Gates, the detector, the breaker, acceptance and the watch over slices count errors among audits. An answer that lost w
of 1 counts as an error with probability w: errors then have the mean of the losses, each audit is one trial as before,
and every test of counts is one of the mean loss at its stated level, over workers and restarts. What is lost is that
many small losses are less uncertain than a few whole ones (docs/decisions/0085 has what it costs).

The probability is that of a hash of the number that was drawn when the request was admitted, which nobody outside can
choose and records keep: whoever counts again counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# The finalizer of SplitMix64: Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators".
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST, _KEPT = np.uint64(31), np.uint64(11)  # 53 bits are left, which a float holds
_BEGIN = np.uint64(0x9E3779B97F4A7C15)


def coins(draws: Sequence[float] | npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each request, (n,), from what was drawn for it (float32, as records keep it)."""
    mixed = np.asarray(draws, dtype=np.float32).view(np.uint32).astype(np.uint64) + _BEGIN
    for shift, factor in _STEPS:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return np.asarray(((mixed ^ (mixed >> _LAST)) >> _KEPT).astype(np.float64) / 2**53)


def counted_errors(
    losses: npt.NDArray[np.floating], draws: Sequence[float] | npt.NDArray[np.floating]
) -> npt.NDArray[np.bool_]:
    """Which of n answers count as errors: all that lost everything, none that lost nothing.

    Examples
    --------
    >>> import numpy as np
    >>> counted_errors(np.array([0.0, 1.0]), [0.25, 0.25]).tolist()
    [False, True]
    """
    return np.asarray(losses > coins(draws))
