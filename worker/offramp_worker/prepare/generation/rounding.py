"""Matrices in few bits: blocks of :data:`BLOCK` weights with a scale and a zero point each, as ``MatMulNBits`` reads
them.

The plain way puts the zero point and scale so that the block's smallest and largest weight are both reached. Rounding
errors of the many are usually worth more than reaching the extremes, so narrower ranges are tried and that with the
smallest squared error is kept, each weight's error counted by the mean square of the input that it is multiplied with.
Source: the search of llama.cpp's k-quants with an importance matrix (``make_qkx2_quants``), here over ranges and on a
grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_worker.generate.llama.architecture import BLOCK

FloatArray = npt.NDArray[np.float32]
SHRINKS: Sequence[float] = tuple(np.linspace(1.0, 0.7, 13))
ROWS = 2048  # of a matrix that are rounded at a time, to bound memory


def few_bits(
    matrix: FloatArray, bits: int, *, weight: FloatArray | None = None, shrinks: Sequence[float] = SHRINKS
) -> dict[str, npt.NDArray[Any]]:
    """A matrix (outputs, inputs) in blocks of ``bits``, 4 or 8.

    Parameters
    ----------
    weight : (inputs,), optional
        How much an error of weights that read this input counts. None: all alike.
    shrinks : sequence of float
        Shares of a block's range that are tried, the whole one first.

    Returns
    -------
    mapping
        ``values``, ``scales`` and ``zeros``, of the shapes that the variant calls for.
    """
    parts = [_rounded(matrix[at : at + ROWS], bits, weight, shrinks) for at in range(0, len(matrix), ROWS)]
    values, scales, zeros = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"values": values, "scales": scales.reshape(-1), "zeros": zeros.reshape(-1)}


def _rounded(
    matrix: FloatArray, bits: int, weight: FloatArray | None, shrinks: Sequence[float]
) -> tuple[npt.NDArray[np.uint8], FloatArray, npt.NDArray[np.uint8]]:
    n, k = matrix.shape
    blocks, top = -(-k // BLOCK), 2**bits - 1
    padded = np.zeros((n, blocks * BLOCK), dtype=np.float32)
    padded[:, :k] = matrix
    w = padded.reshape(n, blocks, BLOCK)
    counts = np.zeros(blocks * BLOCK, dtype=np.float32)
    counts[:k] = 1.0 if weight is None else np.maximum(weight, 1e-12) / max(float(np.mean(weight)), 1e-12)
    counts = counts.reshape(1, blocks, BLOCK)
    low, high = np.minimum(w.min(axis=2), 0.0), np.maximum(w.max(axis=2), 0.0)  # zero is a value of every block
    best = _Best(n, blocks)
    for shrink in shrinks:
        scale = np.maximum((high - low) * np.float32(shrink) / top, 1e-12)
        zero = np.clip(np.rint(-low * np.float32(shrink) / scale), 0, top)
        q = np.clip(np.rint(w / scale[..., None] + zero[..., None]), 0, top)
        scale = _fitted(w, q - zero[..., None], counts, scale)
        error = (counts * (w - (q - zero[..., None]) * scale[..., None]) ** 2).sum(axis=2)
        best.take(error, q.astype(np.uint8), scale, zero.astype(np.uint8))
    return _packed(best.q.reshape(n, -1), bits).reshape(n, blocks, -1), best.scale, _packed(best.zero, bits)


def _fitted(w: FloatArray, whole: FloatArray, counts: FloatArray, scale: FloatArray) -> FloatArray:
    """The scale with the smallest error for these whole numbers (weighted least squares)."""
    square = (counts * whole * whole).sum(axis=2)
    product = (counts * whole * w).sum(axis=2)
    return np.where((square > 0) & (product > 0), product / np.maximum(square, 1e-30), scale).astype(np.float32)


class _Best:
    """The best rounding of each block so far."""

    def __init__(self, n: int, blocks: int) -> None:
        self.error = np.full((n, blocks), np.inf, dtype=np.float32)
        self.q = np.zeros((n, blocks, BLOCK), dtype=np.uint8)
        self.scale = np.zeros((n, blocks), dtype=np.float32)
        self.zero = np.zeros((n, blocks), dtype=np.uint8)

    def take(self, error: FloatArray, q: npt.NDArray[np.uint8], scale: FloatArray, zero: npt.NDArray[np.uint8]) -> None:
        better = error < self.error
        self.error[better], self.q[better] = error[better], q[better]
        self.scale[better], self.zero[better] = scale[better], zero[better]


def _packed(x: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Whole numbers (n, m) side by side in bytes, the first one lowest."""
    if bits == 8:
        return x
    if x.shape[1] % 2:
        x = np.pad(x, ((0, 0), (0, 1)))
    return (x[:, ::2] | (x[:, 1::2] << 4)).astype(np.uint8)
