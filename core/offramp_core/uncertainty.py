"""From a head's logits to the uncertainty that a threshold is compared with.

The raw score is the log odds against the predicted class, ``logsumexp(other logits) - max logit``: monotone
in ``1 - max softmax`` but with full resolution where a confident head lives (``1 - max softmax`` rounds to a
handful of float32 values there). A stored monotone table then maps it to [0, 1] so that six decimals have
resolution where the traffic is: ``quantiles[i]`` is the raw score at level ``i / (len - 1)`` of the inputs
that made the table, so uncertainty 0.25 reads "more certain than all but a quarter of them".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


RawScore = Callable[[npt.NDArray[np.floating[Any]]], npt.NDArray[np.float64]]


def uncertainty(
    logits: npt.NDArray[np.floating[Any]], quantiles: npt.NDArray[np.floating[Any]], *, score: RawScore = raw_score
) -> FloatArray:
    """Uncertainty in [0, 1] on the six-decimal grid, float32.

    ``score`` is how the task reads what a head says (:meth:`offramp_core.task.Task.raw_score`). ``quantiles`` is the
    ramp's stored table, (TABLE_SIZE,) float64, not decreasing. Scores beyond its ends map to 0 and 1. A row that is not
    finite gets 1, which no threshold below or equal to 1 lets leave.
    """
    table = np.asarray(quantiles, dtype=np.float64)
    level = np.interp(score(logits), table, np.linspace(0.0, 1.0, len(table)))
    return (np.rint(level * STEPS) / STEPS).astype(np.float32)


def quantile_table(raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Make a ramp's table from the raw scores of many inputs, (n,) → (TABLE_SIZE,)."""
    finite = raw[np.isfinite(raw)]
    return np.asarray(np.quantile(finite, np.linspace(0.0, 1.0, TABLE_SIZE)), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class ExitTest:
    """Which rows leave at a ramp: those with :func:`uncertainty` below a threshold, told from the head's confidence.

    Confidence falls as uncertainty rises, and a session computes it along with the logits: of a top label the largest
    softmax probability, and always 1 / (1 + exp(raw score)). It settles
    all rows but those within rounding of the threshold, and these are looked up. So the answer is the definition's for
    every row.
    """

    #: A row leaves when its uncertainty is strictly below; compared in float32, as plans store it.
    threshold: float
    #: (TABLE_SIZE,) float64. The ramp's table.
    quantiles: npt.NDArray[np.float64]
    #: leave_above and stay_below: rows of a confidence above the first leave for sure, below the second they stay. Both
    #: in [0, 1] or beyond its ends.
    leave_above: float
    stay_below: float
    #: From what the head says to the raw score, as in :func:`uncertainty`.
    score: RawScore = raw_score

    def leaves(
        self, logits: npt.NDArray[np.floating[Any]], confidence: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.bool_] | None:
        """Which rows leave.

        Parameters
        ----------
        logits : (n, n_classes), n >= 1
            The ramp's.
        confidence : (n,) float64
            Of each row, computed in float64.

        Returns
        -------
        (n,) bool or None
            None for nobody. A row that is not finite never leaves.
        """
        if max(confidence.tolist()) < self.stay_below:  # the usual case, on the path of every batch
            return None
        found: npt.NDArray[np.bool_] = confidence > self.leave_above
        unsure = ~(found | (confidence < self.stay_below))  # within rounding of the threshold, or NaN
        if np.count_nonzero(unsure):
            found[unsure] = uncertainty(logits[unsure], self.quantiles, score=self.score) < np.float32(self.threshold)
        if not np.isfinite(np.add.reduce(logits, axis=None)):  # a logit of -inf leaves the confidence finite
            found &= np.isfinite(logits).all(axis=1)
        return found


LEVEL_ROUNDING = 1e-12  # of a level in [0, 1]: thousands of times what interpolation in float64 rounds off
CONFIDENCE_ROUNDING = 1e-12  # likewise of a probability: exp, a sum over classes, a division


def exit_test(threshold: float, quantiles: npt.NDArray[np.float64], *, score: RawScore = raw_score) -> ExitTest:
    """Prepare the comparison of a ramp's uncertainty with a threshold in [0, 1]."""
    limit = np.float32(threshold)
    grid = np.arange(round(threshold * STEPS) - 1, round(threshold * STEPS) + 2)
    below = grid[(grid / STEPS).astype(np.float32) < limit]
    last = below.max() if len(below) else grid[0]  # the last step of the grid that is below the threshold
    edge = (last + 0.5) / STEPS  # levels under it round to that step or an earlier one
    levels = np.linspace(0.0, 1.0, len(quantiles))
    raw = np.interp([edge - LEVEL_ROUNDING, edge + LEVEL_ROUNDING], levels, quantiles)
    with np.errstate(over="ignore"):
        above, beneath = 1 / (1 + np.exp(raw))
    never = edge < 0  # not even the lowest level is below the threshold
    return ExitTest(
        threshold=threshold,
        quantiles=np.asarray(quantiles, dtype=np.float64),
        leave_above=np.inf if never else float(above) + CONFIDENCE_ROUNDING,
        stay_below=np.inf if never else float(beneath) - CONFIDENCE_ROUNDING,
        score=score,
    )
