"""Which inputs may be answered early: those that are at all like what the heads have seen.

A head is certain of many an input that the model itself has no answer to: NaN, infinity, numbers so large that a layer
behind the head overflows, a text of nothing but padding, whose mean is that of no token. What the model says of such a
row must stay visible, so it runs to the end of the exact executor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

FAR = 1000.0  # times the largest number of the bundle's own inputs


class UsualInputs:
    """Recognized by the model's input and some rows (n, ...) that it was made for."""

    def __init__(self, spec: TensorSpec, known: Array) -> None:
        #: The token that fills rows up; None where there is none.
        self.pad = spec.pad
        #: How large a number may be.
        self.most = FAR * max(1.0, float(np.abs(known).max())) if known.dtype.kind == "f" else np.inf

    def rows(self, x: Array) -> BoolArray | None:
        """Those of (n, ...) rows that may be answered early, (n,); None where all may."""
        if x.dtype.kind != "f":
            return self._texts(x)
        if x.dtype == np.float16:  # its squares overflow, and so may the limit
            x = x.astype(np.float32)
        flat = x.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            # Where the sum is small each of them is, and none is NaN: the quickest way through a batch there is.
            if flat.dot(flat) <= self.most**2:
                return None
            usual = np.asarray((np.abs(x.reshape(len(x), -1)) <= self.most).all(axis=1))
        return None if usual.all() else usual

    def _texts(self, x: Array) -> BoolArray | None:
        if self.pad is None or x.ndim != 2 or (x[:, 0] != self.pad).all():
            return None
        usual = np.asarray((x != self.pad).any(axis=1))
        return None if usual.all() else usual
