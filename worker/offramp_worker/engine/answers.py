"""From logits to an answer, and when two answers agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LabelArray = npt.NDArray[np.int64]
NO_ANSWER = -1


def labels(logits: npt.NDArray[np.floating[Any]]) -> LabelArray:
    """Index of the largest logit of each row, (n, n_classes) → (n,); ``NO_ANSWER`` where a logit is NaN."""
    top = logits.argmax(axis=1)  # NumPy's argmax stops at a NaN, so looking at the winner finds it
    best = logits[np.arange(len(top)), top]
    return np.where(np.isnan(best), NO_ANSWER, top).astype(np.int64)
