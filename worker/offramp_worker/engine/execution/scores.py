"""Uncertainty of many heads at once: what :func:`offramp_core.uncertainty.uncertainty` computes, bit for bit, at a
fraction of the calls.

The tapped model has dozens of heads, and a call per head would take longer than a small backbone. A property test holds
the two definitions together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.uncertainty import STEPS, RawScore, raw_score

FloatArray = npt.NDArray[np.float32]


class ScoreTables:
    """The quantile tables (R, TABLE_SIZE) of a bundle's ramps, ready to be looked up."""

    def __init__(self, quantiles: npt.NDArray[np.float64], *, score: RawScore = raw_score) -> None:
        """``score`` is how the task reads what a head says."""
        self._score = score
        self._tables = list(np.ascontiguousarray(quantiles))
        self._levels = np.linspace(0.0, 1.0, quantiles.shape[1])

    def uncertainty(self, ramps: Sequence[int], logits: Sequence[npt.NDArray[np.floating[Any]]]) -> FloatArray:
        """What some ramps say, (n, head_width) each (indices) → their uncertainty (n, len(ramps)), float32 on the
        six-decimal grid."""
        if not ramps:
            return np.empty((0, 0), dtype=np.float32)
        raw = self._score(np.concatenate(logits) if len(logits) > 1 else logits[0]).reshape(len(ramps), -1)
        level = np.empty(raw.shape[::-1])
        for k, ramp in enumerate(ramps):
            level[:, k] = np.interp(raw[k], self._tables[ramp], self._levels)
        on_grid: FloatArray = (np.rint(level * STEPS) / STEPS).astype(np.float32)
        return on_grid
