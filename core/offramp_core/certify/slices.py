"""Groups of requests with a promise of their own.

A slice has a budget and must be certified by itself: a plan that is right for everybody on average may fail the few. A slice that does
not pass does not take the plan from the others; its requests must not leave early (a *slice stop*). Stopping a slice can only lower
the disagreement over all requests, because the exact executor answers it, so the certificate of the plan stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evidence.one_arm import check_rate
from offramp_core.records import BoolArray, Records


@dataclass(frozen=True, slots=True)
class SliceBudget:
    """Allowed disagreement, in (0, 1), among the requests whose records have ``slice_id``."""

    slice_id: int
    budget: float

    def __post_init__(self) -> None:
        check_rate(f"budget of slice {self.slice_id}", self.budget)


@dataclass(frozen=True, slots=True)
class SliceResult:
    """One slice on the held-out records: ``k`` of ``n`` disagreed, tested against ``budget`` at ``level``.

    Uncertified slices must be stopped. ``needed_more`` labels of the slice would probably change that; None when more of the same would
    not, or when nothing is missing.
    """

    slice_id: int
    budget: float
    level: float
    n: int
    k: int
    p_value: float
    certified: bool
    needed_more: int | None = None

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number."""
        return {
            "slice": self.slice_id, "budget": repr(self.budget), "level": repr(self.level), "n": self.n, "k": self.k,
            "pValue": repr(self.p_value), "certified": self.certified,
        }  # fmt: skip

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> SliceResult:
        return cls(
            int(value["slice"]), float(value["budget"]), float(value["level"]), int(value["n"]), int(value["k"]),
            float(value["pValue"]), bool(value["certified"]),
        )  # fmt: skip


def slice_rows(records: Records, slices: Sequence[SliceBudget]) -> list[BoolArray]:
    """Rows of each slice, (n,) each.

    Raises
    ------
    InvalidRecordsError
        The records name no slices.
    InvalidArgumentError
        A slice is named twice.
    """
    if not slices:
        return []
    if records.slice_id is None:
        raise InvalidRecordsError("slice is missing; without it a slice cannot be certified by itself")
    ids = [s.slice_id for s in slices]
    if len(set(ids)) != len(ids):
        raise InvalidArgumentError(f"slices are {ids}; name each once")
    return [np.asarray(records.slice_id == i) for i in ids]
