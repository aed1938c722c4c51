"""What a plan may get wrong: errors over all requests, and over the requests of single slices.

A limit is an allowed share of requests times their number, a whole number: a plan exactly at its limit is within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.records import BoolArray, IndexArray, LabelArray, Records

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ErrorLimits:
    """Error limits of a search."""

    #: (1 + S,) int64. Allowed errors in all, then in each limited slice.
    most: Ints
    #: (n,) int64, optional. Which of ``most`` besides the first a request counts for; 0 where none. None without slice
    #: limits.
    group: LabelArray | None

    @property
    def most_errors(self) -> int:
        """As many errors as any plan within the limits can have."""
        return int(self.most[0])

    def first_over(self, rows: IndexArray, ends: IndexArray, counted: BoolArray | None) -> IndexArray:
        """Of several lists of erroneous rows, laid end to end, where each first breaks a limit.

        Parameters
        ----------
        rows : (m,) intp
        ends : (L,) intp
            Where each list ends, rising.
        counted : (m,) bool, optional
            Which rows count; default all.

        Returns
        -------
        (L,) intp
            Positions in ``rows``; the end of a list where it keeps all limits.
        """
        wrong = np.ones(len(rows), dtype=np.bool_) if counted is None else counted
        first = _first_over(wrong, ends, int(self.most[0]))
        if self.group is not None:
            group = self.group[rows]
            for number, most in enumerate(self.most[1:].tolist(), start=1):
                first = np.minimum(first, _first_over(wrong & (group == number), ends, most))
        return first

    def charge(self, rows: IndexArray) -> Ints:
        """How many of these erroneous rows there are, by limit: (1 + S,)."""
        out = np.zeros(len(self.most), dtype=np.int64)
        if self.group is not None:
            out += np.bincount(self.group[rows], minlength=len(out))
        out[0] = len(rows)
        return out

    def tabulate(self, rows: IndexArray, code: IndexArray, size: int) -> Floats:
        """How many of these erroneous rows there are, by limit and code, (1 + S, size); ``code`` is below ``size``.

        Whole numbers as floats, exact up to 2**53: what is done with them next is matrix products.
        """
        table: Floats = np.bincount(code, minlength=size).astype(np.float64)
        if self.group is None:
            return table[None]
        grouped = np.bincount(code + size * self.group[rows], minlength=size * len(self.most))
        out: Floats = grouped.astype(np.float64).reshape(-1, size)
        out[0] = table
        return out


def _first_over(wrong: BoolArray, ends: IndexArray, most: int) -> IndexArray:
    total = np.cumsum(wrong)
    before = np.append(0, total)[np.append(0, ends[:-1])]
    return np.asarray(np.minimum(np.searchsorted(total, before + most, side="right"), ends))


def make_limits(
    records: Records,
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
    slice_budgets: Mapping[int, float] | None = None,
) -> ErrorLimits:
    """Check budgets and turn them into whole numbers.

    Raises
    ------
    InvalidArgumentError
        Names the argument, and the slice at fault.
    """
    n = len(records)
    most = [error_budget(n, max_disagreement=max_disagreement, max_errors=max_errors)]
    group = None
    if slice_budgets:
        group, slices = _groups(records, slice_budgets)
        for number, (label, share) in enumerate(slices, start=1):
            size = int(np.count_nonzero(group == number))
            most.append(_allowed(f"slice_budgets[{label}]", share, size))
    return ErrorLimits(np.array(most, dtype=np.int64), group)


def error_budget(n: int, *, max_disagreement: float | None = None, max_errors: int | None = None) -> int:
    """The largest number of errors k with k / n <= max_disagreement.

    Raises
    ------
    InvalidArgumentError
        Not exactly one budget is given, or it is out of range, or there are no records.
    """
    if n == 0:
        raise InvalidArgumentError("records are empty; a search needs at least one")
    if (max_disagreement is None) == (max_errors is None):
        raise InvalidArgumentError("give either max_disagreement (a share) or max_errors (a count)")
    if max_errors is not None:
        if max_errors < 0:
            raise InvalidArgumentError(f"max_errors is {max_errors}; it must be >= 0")
        return min(max_errors, n)
    assert max_disagreement is not None
    return _allowed("max_disagreement", max_disagreement, n)


def _allowed(name: str, share: float, total: int) -> int:
    if not 0 <= share <= 1:
        raise InvalidArgumentError(f"{name} is {share}; it must lie in [0, 1]")
    k = int(share * total)
    # The product may have been rounded across an integer in either direction.
    return k + 1 if k < total and (k + 1) / total <= share else k - 1 if total and k / total > share else k


def _groups(records: Records, budgets: Mapping[int, float]) -> tuple[LabelArray, list[tuple[int, float]]]:
    if records.slice_id is None:
        raise InvalidArgumentError("slice_budgets are given but the records have no slice array")
    slices = sorted((int(label), share) for label, share in budgets.items())
    group = np.zeros(len(records), dtype=np.int64)
    for number, (label, _) in enumerate(slices, start=1):
        mine = records.slice_id == label
        if not mine.any():
            raise InvalidArgumentError(f"slice_budgets names slice {label}, which no record belongs to")
        group[mine] = number
    return group, slices
