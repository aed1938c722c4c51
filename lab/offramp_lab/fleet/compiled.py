"""The queue of a column's workers, one stretch of time after the other; compiled by numba where that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., Any])
ANSWERED, MISSED, BUSY, SOJOURN, FIGURES = range(5)  # of the sums; the last is how many there are


def _compiled(function: F) -> F:
    if find_spec("numba") is None:
        return function
    from numba import njit

    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # no folder to keep the machine code in
        made = njit(function)
    return cast(F, made)


@_compiled
def serve_until(  # noqa: PLR0917
    arrivals: Floats,
    free: Floats,
    start: int,
    first_seconds: float,
    more_seconds: float,
    batch_size: int,
    latency: float,
    sums: Floats,
) -> int:
    """Let workers answer for as many seconds from ``start`` on as ``sums`` has rows; how many of ``arrivals`` were
    answered or given up.

    A worker that is free takes what waits, up to ``batch_size``, the oldest first; what such a batch would answer too
    late is given up, as a door that turns away what cannot be in time would have done. ``free`` (in place) is when each
    worker is, ``sums`` (in place; (seconds, FIGURES)) what came of it, in the second in which a batch began.
    """
    i, n, end = 0, len(arrivals), start + len(sums)
    while i < n and len(free) > 0:
        w = 0
        for j in range(1, len(free)):
            if free[j] < free[w]:
                w = j
        begin = max(free[w], arrivals[i])
        if begin >= end:
            break
        second = max(int(begin) - start, 0)
        taken = 1
        while i + taken < n and taken < batch_size and arrivals[i + taken] <= begin:
            taken += 1
        seconds = first_seconds + more_seconds * (taken - 1)
        if begin + seconds > arrivals[i] + latency:
            sums[second, MISSED] += 1
            sums[second, SOJOURN] += latency
            i += 1
            continue
        done = begin + seconds
        for j in range(i, i + taken):
            if done > arrivals[j] + latency:
                sums[second, MISSED] += 1
            sums[second, ANSWERED] += 1
            sums[second, SOJOURN] += done - arrivals[j]
        sums[second, BUSY] += seconds
        free[w] = done
        i += taken
    return i
