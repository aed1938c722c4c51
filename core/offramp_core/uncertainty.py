"""From a head's logits to the uncertainty that a threshold is compared with.

The raw score is the log odds against the predicted class, ``logsumexp(other logits) - max logit``: monotone
in ``1 - max softmax`` but with full resolution where a confident head lives (``1 - max softmax`` rounds to a
handful of float32 values there). A stored monotone table then maps it to [0, 1] so that six decimals have
resolution where the traffic is: ``quantiles[i]`` is the raw score at level ``i / (len - 1)`` of the inputs
that made the table, so uncertainty 0.25 reads "more certain than all but a quarter of them".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
TABLE_SIZE = 1025
STEPS = 1_000_000  # uncertainties live on the grid of a plan's six decimals


def raw_score(logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Log odds against the predicted class.

    Parameters
    ----------
    logits : (n, n_classes)
        A head's outputs.

    Returns
    -------
    (n,) float64
        Lower is more certain; +inf for a row that is not finite (it can never leave).
    """
    z = np.asarray(logits, dtype=np.float64)
    rows = np.arange(z.shape[0])
    finite = np.asarray(np.isfinite(z).all(axis=1))
    z = np.where(finite[:, None], z, 0.0)
    top = z.argmax(axis=1)
    best = z[rows, top]
    rest = np.exp(z - best[:, None])
    rest[rows, top] = 0.0
    with np.errstate(divide="ignore"):
        score = np.log(rest.sum(axis=1))
    return np.where(finite, score, np.inf)


def uncertainty(logits: npt.NDArray[np.floating[Any]], quantiles: npt.NDArray[np.floating[Any]]) -> FloatArray:
    """Uncertainty in [0, 1] on the six-decimal grid, float32.

    ``quantiles`` is the ramp's stored table, (TABLE_SIZE,) float64, not decreasing. Scores beyond its ends map to 0 and 1. A row that
    is not finite gets 1, which no threshold below or equal to 1 lets leave.
    """
    table = np.asarray(quantiles, dtype=np.float64)
    level = np.interp(raw_score(logits), table, np.linspace(0.0, 1.0, len(table)))
    return (np.rint(level * STEPS) / STEPS).astype(np.float32)


def quantile_table(raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Make a ramp's table from the raw scores of many inputs, (n,) → (TABLE_SIZE,)."""
    finite = raw[np.isfinite(raw)]
    return np.asarray(np.quantile(finite, np.linspace(0.0, 1.0, TABLE_SIZE)), dtype=np.float64)
