"""A first bound on every set of ramps, all sets that differ in their last ramp at once.

The same cells and bounds as in :mod:`boxes`. What the sets share (the codes of the inputs at the ramps before
the last, the errors there) is made once per prefix, and at the last ramp only inputs are counted that some plan
lets leave there; sorted by threshold they lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offramp_core.records import BoolArray, IndexArray
from offramp_core.search.boxes import Floats, code_table, gain_of, running_sums
from offramp_core.search.pace import PACE
from offramp_core.search.space import SearchSpace

PARTS = {1: 512, 2: 40, 3: 11, 4: 6, 5: 4, 6: 3}  # by number of ramps: a few thousand cells a set
_ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Prefix:
    """All but the last ramp of some sets."""

    ramps: tuple[int, ...]
    #: (n,) intp. One code per input, made of its part at each ramp: 0 where it never leaves, P where even the most
    #: cautious part lets it.
    code: IndexArray
    #: (n,) bool. Inputs that some plan lets leave at one of the ramps.
    gone: BoolArray
    #: list of arrays. Inputs still in before each ramp and after the last, boldest part first along each axis.
    still_in: list[Floats]
    #: errors and stays: (1 + S, P1, ..., Pd) float64; by limit and cell: least errors at these ramps; and what wrong
    #: final answers of the inputs still in would count.
    errors: Floats
    stays: Floats


class Sweep:
    """Bounds sets of ``size`` ramps."""

    def __init__(self, space: SearchSpace, size: int) -> None:
        self.space = space
        self.parts = PARTS[size]
        wrong = np.zeros(0, dtype=np.intp) if space.final_bad is None else np.flatnonzero(space.final_bad)
        self.empty = Prefix(
            ramps=(),
            code=np.zeros(space.n, dtype=np.intp),
            gone=np.zeros(space.n, dtype=bool),
            still_in=[np.array(float(space.n))],
            errors=np.zeros(len(space.limits.most)),
            stays=space.limits.charge(wrong).astype(np.float64),
        )

    def extend(self, prefix: Prefix, ramps: Sequence[int]) -> Iterator[Prefix]:
        """``prefix`` and one more of ``ramps``, for each."""
        for some in self._blocks(len(ramps)):
            edges = self._edges(prefix, ramps[some])
            left, repaired = self._left(prefix, ramps[some], edges)
            errors = self._errors(prefix, ramps[some], edges)
            for i, ramp in enumerate(ramps[some]):
                column = self.space.column(ramp)
                part = code_table(edges[i, 1:], column.last).take(column.rank)
                # The last ramp's axis runs from the most cautious part, all others from the boldest.
                yield Prefix(
                    (*prefix.ramps, ramp),
                    prefix.code * (self.parts + 1) + part,
                    prefix.gone | (part > 0),
                    [*(s[..., None] for s in prefix.still_in), prefix.still_in[-1][..., None] - left[i, ..., ::-1]],
                    prefix.errors[..., None] + errors[i, ..., ::-1],
                    prefix.stays[..., None] - repaired[i if len(repaired) > 1 else 0, ..., ::-1],
                )

    def bounds(self, prefix: Prefix, ramps: Sequence[int], values: Floats, tails: Floats | None, need: int) -> Floats:
        """A gain that no plan of ``prefix`` and each of ``ramps`` exceeds: (len(ramps),); -inf where none keeps the
        limits.

        ``values`` and ``tails`` have a row for each of the ramps; see :func:`gain_of`.
        """
        if self.space.plain and tails is None and PACE.compiled(self.space.n * len(ramps)):
            return self._compiled_bounds(prefix, ramps, values)
        return np.concatenate(
            [
                self._bounds(prefix, ramps[some], values[some], None if tails is None else tails[some], need)
                for some in self._blocks(len(ramps))
            ]
        )

    def _compiled_bounds(self, prefix: Prefix, ramps: Sequence[int], values: Floats) -> Floats:
        from offramp_core.search import compiled

        edges = self._edges(prefix, ramps)
        depth = len(prefix.ramps)
        shape = (self.parts,) * depth
        still_in = np.stack([np.broadcast_to(s, shape).ravel() for s in prefix.still_in])
        kept = np.arange((self.parts + 1) ** depth).reshape((self.parts + 1,) * depth)[(slice(self.parts),) * depth]
        errors, most = prefix.errors[0].ravel(), float(self.space.limits.most[0])
        out = np.empty(len(ramps))
        for i, (ramp, e, worth) in enumerate(zip(ramps, edges, values, strict=True)):
            c, cautious = self.space.column(ramp), _most_cautious(e)
            out[i] = compiled.bound_set(
                prefix.code,
                kept.ravel(),
                (self.parts + 1) ** depth,
                self.parts,
                depth,
                c.order,
                c.end[e + 1],
                c.bad_rows,
                c.bad_end[cautious + 1],
                still_in,
                errors,
                worth,
                most,
            )
        return out

    def _blocks(self, n_sets: int) -> Iterator[slice]:
        step = max(1, _ROWS_AT_ONCE // self.space.n)
        return (slice(start, start + step) for start in range(0, n_sets, step))

    def _bounds(self, prefix: Prefix, ramps: Sequence[int], values: Floats, tails: Floats | None, need: int) -> Floats:
        edges = self._edges(prefix, ramps)
        left, repaired = self._left(prefix, ramps, edges)
        before = [s[None, ..., None] for s in prefix.still_in]
        gain = gain_of([*before, before[-1] - left], values, tails, need)
        errors = self._errors(prefix, ramps, edges) + (prefix.errors + prefix.stays)[..., None] - repaired
        most = self.space.limits.most.reshape(-1, *(1,) * (gain.ndim - 1))
        return np.asarray(np.where((errors <= most).all(axis=1), gain, -np.inf).reshape(len(gain), -1).max(axis=1))

    def _edges(self, prefix: Prefix, ramps: Sequence[int]) -> IndexArray:
        """Parts of all the cuts that matter at each of some last ramps, (C, P + 1); some are empty where there are
        fewer cuts."""
        high = self.space.boldest_after(prefix.gone if prefix.ramps else None, ramps)
        return (high[:, None] + 1) * np.arange(self.parts + 1) // self.parts - 1

    def _left(self, prefix: Prefix, ramps: Sequence[int], edges: IndexArray) -> tuple[Floats, Floats]:
        """Inputs that leave at the last ramp, (C, P1, ..., Pd), and by limit what their wrong final answers would
        count.

        The last ramp's axis runs from the most cautious part, the others from the boldest.
        """
        columns = [self.space.column(ramp) for ramp in ramps]
        ends = np.stack([c.end[e + 1] for c, e in zip(columns, edges, strict=True)])
        rows = np.concatenate([c.order[:e] for c, e in zip(columns, ends[:, -1].tolist(), strict=True)])
        code = self._code(prefix, rows, ends)
        size = len(columns) * self._width(prefix)
        left = self._by_cell(np.bincount(code, minlength=size).astype(np.float64)[None], prefix)[:, 0]
        if self.space.final_bad is None:
            return left, np.zeros((1,) * (left.ndim + 1))
        wrong = self.space.final_bad[rows]
        return left, self._by_cell(self.space.limits.tabulate(rows[wrong], code[wrong], size), prefix)

    def _errors(self, prefix: Prefix, ramps: Sequence[int], edges: IndexArray) -> Floats:
        """Least errors at the last ramp, (C, 1 + S, P1, ..., Pd), axes as above: those of each part's most cautious
        cut."""
        columns = [self.space.column(ramp) for ramp in ramps]
        ends = np.stack([c.bad_end[_most_cautious(e) + 1] for c, e in zip(columns, edges, strict=True)])
        rows = np.concatenate([c.bad_rows[:e] for c, e in zip(columns, ends[:, -1].tolist(), strict=True)])
        code = self._code(prefix, rows, ends)
        table = self.space.limits.tabulate(rows, code, len(columns) * self._width(prefix))
        return self._by_cell(table, prefix)

    def _code(self, prefix: Prefix, rows: IndexArray, ends: IndexArray) -> IndexArray:
        """One number per row from its set, its prefix code and its part at the last ramp; each set's rows are in order
        of part, ``ends`` (C, P + 1)."""
        own = np.arange(len(ends))[:, None] * self._width(prefix) + np.arange(self.parts)
        code = np.repeat(own.ravel(), (ends[:, 1:] - ends[:, :-1]).ravel())
        if prefix.ramps:
            code += prefix.code.take(rows) * self.parts
        return code

    def _width(self, prefix: Prefix) -> int:
        return int(self.parts * (self.parts + 1) ** len(prefix.ramps))

    def _by_cell(self, table: Floats, prefix: Prefix) -> Floats:
        """Running sums over the cells of a table by limit and code: (C, limits, P1, ..., Pd)."""
        depth = len(prefix.ramps)
        table = table.reshape(len(table), -1, *(self.parts + 1,) * depth, self.parts).swapaxes(0, 1)
        table = running_sums(table, first=2)
        return table[(slice(None), slice(None), *(slice(self.parts),) * depth)]


def _most_cautious(edges: IndexArray) -> IndexArray:
    """The cuts at which each part of a last ramp makes least errors, (P + 1,), as ``edges`` are its ends."""
    out = edges.copy()
    out[1:] = np.minimum(edges[:-1] + 1, edges[-1])
    return out
