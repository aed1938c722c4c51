"""The search's inner loops, compiled by numba; loaded where that pays (:mod:`pace`).

They answer for the plain problem (one limit, errors that all count 1, right final answers, no tail in the objective)
what :mod:`boxes` and :mod:`sweep` compute with numpy, to the last bit: the sums are made in the same order, so the plan
found does not depend on what is installed. An input's codes, its errors and the counts are made in one pass over the
rows instead of a dozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    try:
        made = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep the machine code in
        made = njit(nogil=True)(function)
    return cast(F, made)


@_compiled
def _running_sums(table: Floats, sizes: Ints) -> None:
    """Along every axis of a flat table, in place."""
    stride = sizes[-1]
    for start in range(0, len(table), stride):
        total = 0.0
        for i in range(start, start + stride):
            total += table[i]
            table[i] = total
    for axis in range(len(sizes) - 2, -1, -1):
        block = stride * sizes[axis]
        for start in range(0, len(table), block):
            for at in range(start + stride, start + block, stride):
                one, following = table[at - stride : at], table[at : at + stride]
                for i in range(stride):
                    following[i] += one[i]
        stride = block


@_compiled
def _parts_by_rank(upper: Ints, parts: int, out: Ints) -> None:
    """As :func:`offramp_core.search.boxes.code_table`, into the front of ``out``."""
    rank = 0
    for p in range(parts):
        while rank <= upper[p] and rank < len(out):
            out[rank] = parts - p
            rank += 1
    out[rank:] = 0


@_compiled
def settle(ranks: Ints, bad: Bools, low: Ints, high: Ints, still_in: Floats, charged: Ints) -> Ints:
    """Positions of the inputs whose fate depends on the plan, (k,); the others are added to ``still_in`` and
    ``charged``.

    ``ranks`` and ``bad`` are (d, m); see :func:`offramp_core.search.boxes.settle`.
    """
    d, m = ranks.shape
    kept, n_kept = np.empty(m, dtype=np.int64), 0
    left = np.zeros(d + 1, dtype=np.int64)  # of the settled, by the ramp at which they leave
    for i in range(m):
        level = 0
        while level < d and ranks[level, i] > high[level]:
            level += 1
        if level < d and ranks[level, i] > low[level]:
            kept[n_kept] = i
            n_kept += 1
            continue
        left[level] += 1
        if level < d and bad[level, i]:
            charged[0] += 1
    for level in range(d + 1):
        still_in[: level + 1] += left[level]
    return kept[:n_kept].copy()


@_compiled
def bound_cells(
    ranks: Ints, bad: Bools, kept: Ints, edges: Ints, parts: Ints, settled: Floats, values: Floats, spare: float
) -> tuple[Floats, Floats]:
    """Bounds and corner gains of all cells of a box, both (P1 * ... * Pd,):
    see :func:`offramp_core.search.boxes.divide`.

    Parameters
    ----------
    ranks, bad : (d, m)
        Of inputs at each ramp.
    kept : (k,) int64
        Positions of the open inputs among them.
    edges : (d, >= P + 1) int64
    parts : (d,) int64
    settled : (d + 1,) float64
        Settled inputs still in before each ramp and at the end.
    values : (d + 1,) float64
    spare : float
        Errors that the open inputs may make.
    """
    counts, at_bold, at_cautious = _tables(ranks, bad, kept, edges, parts)
    gain, worst, least = _cells(counts, at_bold, at_cautious, parts, settled, values)
    bound, corner = np.full(len(gain), -np.inf), np.full(len(gain), -np.inf)
    beyond = np.zeros(len(gain))
    over_bold, over_cautious = worst[0] - spare, worst[-1] - spare
    if over_bold > max(0.0, over_cautious):
        price = (gain[0] - gain[-1]) / (over_bold - over_cautious)
        for c in range(len(gain)):
            beyond[c] = -price * (worst[c] - spare)
        _add_what_lower_cuts_bring(beyond, ranks, bad, kept, edges, parts, values, price)
    for c in range(len(gain)):
        if least[c] <= spare:
            bound[c] = min(gain[c], gain[c] + beyond[c])
        if worst[c] <= spare:
            corner[c] = gain[c]
    return bound, corner


@_compiled
def _tables(ranks: Ints, bad: Bools, kept: Ints, edges: Ints, parts: Ints) -> tuple[Floats, Floats, Floats]:
    """Inputs still in by code; and errors at each ramp by code, at its parts' boldest and most cautious cuts, one table
    after the other."""
    sizes, d = parts + 1, len(parts)
    ends = np.cumsum(np.cumprod(sizes))
    n_ranks = 2 + edges.max()  # every later cut counts as never
    bold, cautious = np.empty((d, n_ranks), dtype=np.int64), np.empty((d, n_ranks), dtype=np.int64)
    for k in range(d):
        _parts_by_rank(edges[k, 1:], parts[k], bold[k])
        _parts_by_rank(edges[k, :-1] + 1, parts[k], cautious[k])
    counts = np.zeros(np.prod(sizes))
    at_bold, at_cautious = np.zeros(ends[-1]), np.zeros(ends[-1])
    for i in kept:
        code, first = 0, 0
        for k in range(d):
            rank = min(ranks[k, i], n_ranks - 1)
            code *= sizes[k]
            if bad[k, i]:
                at_bold[first + code + bold[k, rank]] += 1.0
                at_cautious[first + code + cautious[k, rank]] += 1.0
            code += bold[k, rank]
            first = ends[k]
        counts[code] += 1.0
    _running_sums(counts, sizes)
    first = 0
    for k in range(d):
        _running_sums(at_bold[first : ends[k]], sizes[: k + 1])
        _running_sums(at_cautious[first : ends[k]], sizes[: k + 1])
        first = ends[k]
    return counts, at_bold, at_cautious


@_compiled
def _cells(
    counts: Floats, at_bold: Floats, at_cautious: Floats, parts: Ints, settled: Floats, values: Floats
) -> tuple[Floats, Floats, Floats]:
    """Gain and errors of each cell's boldest corner, and the least errors of its plans; the cells of some ramps become
    those of one more."""
    rest, width, first = len(counts), 1, 0
    gain = np.full(1, values[0] * (counts[-1] + settled[0]))
    worst, least, code = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64)
    for k in range(len(parts)):
        p, size = parts[k], parts[k] + 1
        rest, width = rest // size, width * size
        gain_before, worst_before, least_before, code_before = gain, worst, least, code
        n = len(gain_before) * p
        gain, worst, least, code = np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64)
        step = values[k + 1] - values[k]
        for c in range(len(gain_before)):
            base = code_before[c] * size
            end = first + base + p
            for j in range(p):
                at = c * p + j
                code[at] = base + j
                gain[at] = gain_before[c] + step * (counts[(base + j + 1) * rest - 1] + settled[k + 1])
                worst[at] = worst_before[c] + (at_bold[end] - at_bold[first + base + j])
                least[at] = least_before[c] + (at_cautious[end] - at_cautious[first + base + j])
        first += width
    return gain, worst, least


@_compiled
def _add_what_lower_cuts_bring(
    beyond: Floats, ranks: Ints, bad: Bools, kept: Ints, edges: Ints, parts: Ints, values: Floats, price: float
) -> None:
    """The sum over ramps of Lagrange's relaxation, by cell: see ``_Counter.relaxed`` of :mod:`boxes`."""
    sure = np.ones(ranks.shape[1], dtype=np.bool_)
    stride = len(beyond)
    for k in range(len(parts)):
        p = parts[k]
        low, high = edges[k, 0], edges[k, p]
        step = values[k] - values[k + 1]
        above = np.zeros(high - low + 1)
        for i in kept:
            rank = ranks[k, i]
            if low + 1 < rank <= high:
                charge = price * bad[k, i]
                above[rank - low - 2] += max(charge - step, 0.0) if charge > 0 else -step * sure[i]
            sure[i] &= rank > high
        for cut in range(high - low - 2, -1, -1):
            above[cut] += above[cut + 1]
        stride //= p
        most = np.empty(p)
        for j in range(p):  # from the most cautious part
            start, end = edges[k, j] - low, edges[k, j + 1] - low
            most[p - 1 - j] = above[start:end].max() - above[end - 1]
        for block in range(0, len(beyond), stride * p):
            for j in range(p):
                cells = beyond[block + j * stride : block + (j + 1) * stride]
                for c in range(stride):
                    cells[c] += most[j]


@_compiled
def bound_set(
    code: Ints,
    kept: Ints,
    width: int,
    parts: int,
    depth: int,
    order: Ints,
    ends: Ints,
    bad_rows: Ints,
    bad_ends: Ints,
    still_in: Floats,
    errors: Floats,
    values: Floats,
    most: float,
) -> float:
    """A gain that no plan of some ramps and one last ramp exceeds, -inf where none keeps the limit:
    see :class:`sweep.Sweep`.

    Parameters
    ----------
    code : (n,) int64
        Of each input at the ramps before the last.
    kept : (cells,) int64
        Codes of the cells of these ramps; all codes are below ``width``.
    parts, depth : int
        Parts of each ramp; number of ramps before the last.
    order, ends, bad_rows, bad_ends
        Inputs, and errors, that may leave at the last ramp, in order of the parts that ``ends`` (P + 1,) and
        ``bad_ends`` close.
    still_in : (depth + 1, cells) float64
    errors : (cells,) float64
    values : (depth + 2,) float64
    """
    sizes = np.full(depth + 1, parts + 1)
    sizes[depth] = parts
    left, wrong = np.zeros(width * parts), np.zeros(width * parts)
    for p in range(parts):
        for i in range(ends[p], ends[p + 1]):
            left[code[order[i]] * parts + p] += 1.0
        for i in range(bad_ends[p], bad_ends[p + 1]):
            wrong[code[bad_rows[i]] * parts + p] += 1.0
    _running_sums(left, sizes)
    _running_sums(wrong, sizes)
    best = -np.inf
    step = values[depth + 1] - values[depth]
    for c in range(len(kept)):
        gain = values[0] * still_in[0, c]
        for k in range(depth):
            gain += (values[k + 1] - values[k]) * still_in[k + 1, c]
        for p in range(parts):
            at = kept[c] * parts + p
            if errors[c] + wrong[at] <= most:
                best = max(best, gain + step * (still_in[depth, c] - left[at]))
    return best
