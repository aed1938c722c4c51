"""What a plan may get wrong: errors over all requests, and over the requests of single slices.

An error of request i counts ``weight[i]``, 1 unless told otherwise; a limit is an allowed share of requests times
their number. Weights are whole thousandths and are summed as integers, so that a plan exactly at its limit is
within it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.records import BoolArray, IndexArray, LabelArray, Records

WEIGHT_STEPS = 1000  # per unit of weight
HEAVIEST = 1_000_000.0

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Error limits of a search.

    Attributes
    ----------
    most : (1 + S,) int64
        Allowed errors in all, then in each limited slice, in units of weight.
    weight : (n,) int64, optional
        Units an error of each request counts; None where all count 1.
    group : (n,) int64, optional
        Which of ``most`` besides the first a request counts for; 0 where none. None without slice limits.
    counts : (n,) bool
        Whether an error of the request counts at all.
    """

    most: Ints
    weight: Ints | None
    group: LabelArray | None
    counts: BoolArray

    @property
    def most_errors(self) -> int:
        """As many errors as any plan within the limits can have, whatever their weights."""
        if self.weight is None:
            return int(self.most[0])
        rising = np.cumsum(np.sort(self.weight[self.counts]))
        return int(np.searchsorted(rising, self.most[0], side="right"))

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
        weight = np.ones(len(rows), dtype=np.int64) if self.weight is None else self.weight[rows]
        if counted is not None:
            weight = weight * counted
        first = _first_over(weight, ends, int(self.most[0]))
        if self.group is not None:
            group = self.group[rows]
            for number, most in enumerate(self.most[1:].tolist(), start=1):
                first = np.minimum(first, _first_over(weight * (group == number), ends, most))
        return first

    def charge(self, rows: IndexArray) -> Ints:
        """Units these erroneous rows count, by limit: (1 + S,)."""
        weight = np.ones(len(rows), dtype=np.int64) if self.weight is None else self.weight[rows]
        out = np.zeros(len(self.most), dtype=np.int64)
        if self.group is not None:
            np.add.at(out, self.group[rows], weight)
        out[0] = weight.sum()
        return out

    def tabulate(self, rows: IndexArray, code: IndexArray, size: int) -> Floats:
        """Units these erroneous rows count, by limit and code, (1 + S, size); ``code`` is below ``size``.

        Whole numbers as floats, exact up to 2**53: what is done with them next is matrix products.
        """
        weight = None if self.weight is None else self.weight[rows].astype(np.float64)
        table: Floats = np.bincount(code, weight, minlength=size).astype(np.float64, copy=False)
        if self.group is None:
            return table[None]
        grouped = np.bincount(code + size * self.group[rows], weight, minlength=size * len(self.most))
        out: Floats = grouped.astype(np.float64, copy=False).reshape(-1, size)
        out[0] = table
        return out


def _first_over(weight: Ints, ends: IndexArray, most: int) -> IndexArray:
    total = np.cumsum(weight)
    before = np.append(0, total)[np.append(0, ends[:-1])]
    return np.asarray(np.minimum(np.searchsorted(total, before + most, side="right"), ends))


def make_limits(
    records: Records,
    *,
    max_disagreement: float | None = None,
    max_errors: int | None = None,
    slice_budgets: Mapping[int, float] | None = None,
    error_weights: npt.ArrayLike | None = None,
) -> Limits:
    """Check budgets and weights and turn them into whole numbers.

    Raises
    ------
    InvalidArgumentError
        Names the argument, and the slice or row at fault.
    """
    n = len(records)
    weight = None if error_weights is None else _units(error_weights, n)
    unit = 1 if weight is None else WEIGHT_STEPS
    most = [error_budget(n, max_disagreement=max_disagreement, max_errors=max_errors, unit=unit)]
    group = None
    if slice_budgets:
        group, slices = _groups(records, slice_budgets)
        for number, (label, share) in enumerate(slices, start=1):
            size = int(np.count_nonzero(group == number))
            most.append(_allowed(f"slice_budgets[{label}]", share, size, unit))
    counts = np.ones(n, dtype=bool) if weight is None else weight > 0
    return Limits(np.array(most, dtype=np.int64), weight, group, counts)


def error_budget(n: int, *, max_disagreement: float | None = None, max_errors: int | None = None, unit: int = 1) -> int:
    """The largest number of errors k, in ``unit``-ths, with k / n <= max_disagreement.

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
        return max_errors * unit if unit > 1 else min(max_errors, n)
    assert max_disagreement is not None
    return _allowed("max_disagreement", max_disagreement, n, unit)


def _allowed(name: str, share: float, n: int, unit: int) -> int:
    if not 0 <= share <= 1:
        raise InvalidArgumentError(f"{name} is {share}; it must lie in [0, 1]")
    total = n * unit
    k = int(share * total)
    # The product may have been rounded across an integer in either direction.
    return k + 1 if k < total and (k + 1) / total <= share else k - 1 if total and k / total > share else k


def _units(error_weights: npt.ArrayLike, n: int) -> Ints:
    weights = np.asarray(error_weights)
    if weights.shape != (n,) or weights.dtype.kind not in "fiub":
        raise InvalidArgumentError(
            f"error_weights has shape {weights.shape} and dtype {weights.dtype}; give one number for each of {n} records"
        )
    weights = weights.astype(np.float64)
    units = np.rint(weights * WEIGHT_STEPS)
    good = (weights >= 0) & (weights <= HEAVIEST) & (np.abs(units / WEIGHT_STEPS - weights) <= 1e-9)  # NaN is not good
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InvalidArgumentError(
            f"error_weights[{row}] is {weights[row]}; weights are multiples of {1 / WEIGHT_STEPS} from 0 to {HEAVIEST:.0f}"
        )
    return np.asarray(units, dtype=np.int64)


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


def weights_by_class(
    classes: npt.ArrayLike, weights: Mapping[int, float], *, default: float = 1.0
) -> npt.NDArray[np.float64]:
    """Error weights (n,) of requests whose reference answers are ``classes`` (n,); classes not named weigh ``default``."""
    labels = np.asarray(classes)
    out = np.full(labels.shape, default, dtype=np.float64)
    for label, weight in weights.items():
        out[labels == label] = weight
    return out
