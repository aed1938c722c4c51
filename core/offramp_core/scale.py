"""What the numbers of an answer mean: logits, probabilities, logarithms of probabilities, or a probability for each
label on its own.

A ramp decides by logits of its own, whatever the model ends in. What it answers is said in the model's scale, so that a
client reads one meaning wherever a row left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ScaleKind = Literal["logits", "log-probabilities", "probabilities", "independent-probabilities"]
SMALLEST = float(np.finfo(np.float32).tiny)  # a probability of 0 has no logarithm


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a model's answers, (n, n_classes). ``total`` is what a row of probabilities adds up to: 100 for
    percentages.

    Logits mean what their softmax says, so that logarithms of probabilities are logits too; those of independent labels
    what the logistic function says of each.
    """

    kind: ScaleKind = "logits"
    total: float = 1.0

    def from_logits(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
        """A ramp's logits as the model would have said it; the order of a row's classes stays. A row that is not finite
        becomes NaN.

        Examples
        --------
        >>> Scale("probabilities").from_logits(np.array([[0.0, 0.0]], dtype=np.float32)).tolist()
        [[0.5, 0.5]]
        """
        if self.kind == "logits":
            return logits
        if self.kind == "independent-probabilities":
            with np.errstate(over="ignore"):
                return np.asarray(1 / (1 + np.exp(-logits)))
        with np.errstate(invalid="ignore"):  # a row of -inf alone, which only a deadline lets out
            z = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
            weights = np.exp(z)
            sums = np.add.reduce(weights, axis=1, keepdims=True)
            if self.kind == "log-probabilities":
                return np.asarray(z - np.log(sums))
            probabilities: npt.NDArray[np.floating[Any]] = weights * (self.total / sums)
        return probabilities

    def to_logits(self, answers: FloatArray) -> FloatArray:
        """The model's answers as logits with the same softmax, or the same logistic function."""
        if self.kind == "independent-probabilities":
            sure = np.clip(answers.astype(np.float64), SMALLEST, 1 - np.finfo(np.float64).eps)
            return (np.log(sure) - np.log1p(-sure)).astype(np.float32)
        if self.kind != "probabilities":
            return answers
        return np.log(np.maximum(answers, np.float32(SMALLEST)))


LOGITS = Scale()
