"""From logits to an answer, and when two answers agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LabelArray = npt.NDArray[np.int64]
NO_ANSWER = -1


def labels(logits: npt.NDArray[np.floating[Any]]) -> LabelArray:
    """Index of the largest logit of each row, (n, n_classes) → (n,), n >= 0; ``NO_ANSWER`` where a logit is NaN."""
    top: LabelArray = logits.argmax(axis=1).astype(np.int64, copy=False)
    if len(top) and np.isnan(logits.max()):  # the maximum is NaN if any logit is, so one number clears the usual batch
        top[np.isnan(logits).any(axis=1)] = NO_ANSWER
    return top
