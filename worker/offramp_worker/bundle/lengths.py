"""Rows of tokens that differ in length: the lengths that batches are filled up to.

ONNX Runtime plans memory per shape, so that a batch of every length there is would cost an allocation each; with a few
lengths, each of them is warm. Filling up changes no answer: the graph makes its mask of the pad value
(:class:`offramp_core.bundle.TensorSpec`, checked by ``offramp prepare``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec
from offramp_core.evidence.slow import BatchShape, length_class

BUCKETS = (16, 32, 64, 128, 256, 512)
MAX_TYPICAL = 200  # batches looked at

Array = npt.NDArray[Any]
Empty = Callable[[Sequence[int], npt.DTypeLike], Array]  # an array of a shape and a type, its values arbitrary


def bucket_length(length: int, *, longest: int) -> int:
    """The length to fill up to: the smallest bucket that holds ``length``, at most ``longest``.

    >>> bucket_length(17, longest=512), bucket_length(100, longest=120), bucket_length(700, longest=2048)
    (32, 120, 1024)
    """
    bucket = next((size for size in BUCKETS if size >= length), 0) or -(-length // BUCKETS[-1]) * BUCKETS[-1]
    return min(bucket, longest)


def buckets(*, longest: int) -> tuple[int, ...]:
    """Every length that batches of rows up to ``longest`` are filled up to.

    >>> buckets(longest=100), buckets(longest=1500)
    ((16, 32, 64, 100), (16, 32, 64, 128, 256, 512, 1024, 1500))
    """
    sizes = {bucket_length(size, longest=longest) for size in (*BUCKETS, *range(BUCKETS[-1], longest, BUCKETS[-1]))}
    return tuple(sorted(sizes | {longest}))


def used_length(x: Array, *, pad: int) -> int:
    """Tokens up to the last one of (n, length) rows that is no padding; at least 1."""
    return int(np.flatnonzero((x != pad).any(axis=0)).max(initial=0)) + 1


def rows_bucket(x: Array, spec: TensorSpec) -> int:
    """The length that (n, length) rows of an input whose length varies are filled up to when they run alone."""
    assert spec.pad is not None
    return bucket_length(used_length(x, pad=spec.pad), longest=spec.longest)


def pad_rows(parts: Sequence[Array], spec: TensorSpec, *, empty: Empty = np.empty) -> Array:
    """One batch of several requests' rows.

    Parameters
    ----------
    parts : sequence of (n_i, ...)
        Rows that the input takes; where its length varies, each part may have its own.
    spec : TensorSpec
        The model's input.
    empty : callable
        Makes the array of a shape and a type.

    Returns
    -------
    (sum of n_i, ...)
        Filled up with ``spec.pad`` to the smallest bucket that holds the longest row, padding at its end not counted.
        Inputs of one shape are put together as they are, without a copy when there is one part.
    """
    if not spec.varies:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, out=empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype))
    assert spec.pad is not None
    lengths = [used_length(part, pad=spec.pad) for part in parts]
    width = bucket_length(max(lengths), longest=spec.longest)
    if len(parts) == 1 and parts[0].shape[1] == width:
        return parts[0]
    batch = empty((sum(len(part) for part in parts), width), parts[0].dtype)
    batch.fill(spec.pad)
    row = 0
    for part, length in zip(parts, lengths, strict=True):
        batch[row : row + len(part), :length] = part[:, :length]
        row += len(part)
    return batch


def batch_shape(x: Array, spec: TensorSpec) -> BatchShape:
    """What tells how long a batch may take: its rows, and the class of the length they were filled up to where it
    varies."""
    return BatchShape(len(x), length_class(x.shape[1]) if spec.varies else 0)


def by_length(x: Array, spec: TensorSpec, *, size: int) -> Iterator[npt.NDArray[np.intp]]:
    """Row numbers of ``x`` in chunks of up to ``size``; rows of one chunk have about one length where the input's
    varies."""
    order = np.arange(len(x))
    if spec.varies:
        assert spec.pad is not None
        last = np.where(x != spec.pad, np.arange(x.shape[1]), 0).max(axis=1, initial=0)
        order = np.argsort(last, kind="stable")
    for start in range(0, len(x), size):
        yield order[start : start + size]


def typical_batch(x: Array, spec: TensorSpec, *, size: int) -> Array:
    """A batch of ``size`` rows, repeated where there are fewer; of varying length, the median length of such
    batches."""
    if len(x) < size:
        x = np.concatenate([x] * -(-size // len(x)))
    batches = [pad_rows([x[start : start + size]], spec) for start in range(0, len(x) - size + 1, size)][:MAX_TYPICAL]
    return sorted(batches, key=lambda batch: batch.shape[1])[len(batches) // 2] if spec.varies else batches[0]
