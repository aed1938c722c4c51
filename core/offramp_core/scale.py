"""What the numbers of an answer mean: logits, probabilities, or logarithms of probabilities.

A ramp decides by logits of its own, whatever the model ends in. What it answers is said in the model's scale, so that a client reads one
meaning wherever a row left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ScaleKind = Literal["logits", "log-probabilities", "probabilities"]
SMALLEST = float(np.finfo(np.float32).tiny)  # a probability of 0 has no logarithm


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a model's answers, (n, n_classes). ``total`` is what a row of probabilities adds up to: 100 for percentages.

    Logits mean what their softmax says, so that logarithms of probabilities are logits too.
    """

    kind: ScaleKind = "logits"
    total: float = 1.0

    def from_logits(self, logits: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
        """A ramp's logits as the model would have said it; the order of a row's classes stays. A row that is not finite becomes NaN.

        Examples
        --------
        >>> Scale("probabilities").from_logits(np.array([[0.0, 0.0]], dtype=np.float32)).tolist()
        [[0.5, 0.5]]
        """
        if self.kind == "logits":
            return logits
        with np.errstate(invalid="ignore"):  # a row of -inf alone, which only a deadline lets out
            z = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
            weights = np.exp(z)
            sums = np.add.reduce(weights, axis=1, keepdims=True)
            if self.kind == "log-probabilities":
                return np.asarray(z - np.log(sums))
            probabilities: npt.NDArray[np.floating[Any]] = weights * (self.total / sums)
        return probabilities

    def to_logits(self, answers: FloatArray) -> FloatArray:
        """The model's answers as logits with the same softmax."""
        if self.kind != "probabilities":
            return answers
        return np.log(np.maximum(answers, np.float32(SMALLEST)))


LOGITS = Scale()
