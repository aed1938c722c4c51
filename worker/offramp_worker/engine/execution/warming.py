"""The shapes of batches that run once before requests come: the first of a shape costs allocations at every stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.lengths import buckets, typical_batch

Array = npt.NDArray[Any]

SECONDS = 2.0  # about, for what is warmed beyond the usual sizes: a worker that is not ready serves nobody
PROBE_RUNS = 4


def warm_up(
    run: Callable[[Array], None], known: Array, spec: TensorSpec, *, most: int, seconds: float = SECONDS
) -> None:
    """Run batches of up to ``most`` rows like the ``known`` ones (n, ...), the largest first: buffers that grow make
    all bindings anew.

    All powers of two and the limit; then, as far as ``seconds`` reach by the time of one row, one row of every length
    that rows are filled up to, and all other sizes, which batches have when rows left.
    """
    usual = [typical_batch(known, spec, size=size) for size in _usual_sizes(most)]
    per_number = _seconds(run, usual[-1]) / usual[-1].size
    left, more = seconds, []
    for batch in _others(known, spec, most=most):
        left -= 2 * per_number * batch.size  # a shape that is new takes longer
        if left < 0:
            break
        more.append(batch)
    for batch in sorted([*usual, *more], key=lambda each: each.size, reverse=True):
        run(batch)


def _usual_sizes(most: int) -> list[int]:
    return sorted({most, *(2**k for k in range(most.bit_length()) if 2**k <= most)}, reverse=True)


def _others(known: Array, spec: TensorSpec, *, most: int) -> Iterator[Array]:
    if spec.varies:
        for length in buckets(longest=spec.longest):
            yield np.resize(known[0][known[0] != spec.pad], (1, length)).astype(known.dtype)
    for size in sorted(set(range(1, most)) - set(_usual_sizes(most))):
        yield typical_batch(known, spec, size=size)


def _seconds(run: Callable[[Array], None], batch: Array) -> float:
    """Of the quickest of a few runs: the machine may stall, and the first one is not warm."""
    taken = []
    for _ in range(PROBE_RUNS):
        began = time.perf_counter()
        run(batch)
        taken.append(time.perf_counter() - began)
    return min(taken)
