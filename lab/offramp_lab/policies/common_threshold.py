"""One threshold for several ramps: everything it could do on recorded traffic, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from offramp_core.records import IndexArray, Records, SecondsArray
from offramp_core.search.grid import NEVER, leave_keys, threshold_of


@dataclass(frozen=True, slots=True)
class CommonThresholds:
    """What each common threshold does, by rising threshold; between two entries nothing changes."""

    #: (m,) int. Thresholds in grid steps, the first 0: nothing leaves.
    keys: npt.NDArray[np.int64]
    #: (m,) int. Disagreements.
    errors: npt.NDArray[np.int64]
    #: (m,) float64. Share of the backbone's time.
    saving: SecondsArray

    def best(self, max_errors: int) -> tuple[Decimal, float]:
        """The threshold that saves most within a number of errors, and what it saves; 0 where none keeps it."""
        saving = np.where(self.errors <= max_errors, self.saving, -np.inf)
        at = int(saving.argmax())
        return threshold_of(int(self.keys[at])), float(self.saving[at])

    def at(self, keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Errors under given thresholds (grid steps)."""
        return self.errors[np.searchsorted(self.keys, np.asarray(keys), side="right") - 1]


def common_thresholds(records: Records, active: Sequence[int]) -> CommonThresholds:
    """Every effect a common threshold can have on these ramps.

    As the threshold rises an input leaves at ever earlier ramps: those where the running minimum of its scores falls.
    Each such step changes its cost and its agreement once, so sorting the steps of all inputs gives the whole curve.
    """
    ramps = list(active)
    keys = leave_keys(records.uncertainty[:, ramps])
    cost = records.costs.leave_seconds(ramps)
    wrong = ~records.agrees[:, ramps]
    later_cost, later_wrong = np.full(len(records), cost[-1]), (~records.final_agrees).astype(np.int8)
    first_errors, first_seconds = int(later_wrong.sum()), float(cost[-1]) * len(records)
    before = np.minimum.accumulate(np.column_stack([np.full(len(records), NEVER, keys.dtype), keys]), axis=1)[:, :-1]
    at, errors, seconds = [], [], []
    for j in range(len(ramps) - 1, -1, -1):  # backwards: what an input does next when this ramp no longer takes it
        falls = np.flatnonzero(keys[:, j] < before[:, j])
        at.append(keys[falls, j])
        errors.append(wrong[falls, j] - later_wrong[falls])
        seconds.append(cost[j] - later_cost[falls])
        later_cost[falls], later_wrong[falls] = cost[j], wrong[falls, j]
    order, levels = _sorted_steps(np.concatenate(at))
    after = first_seconds + np.cumsum(np.concatenate(seconds)[order])[levels]
    return CommonThresholds(
        np.append(0, np.concatenate(at)[order][levels]).astype(np.int64),
        np.append(first_errors, first_errors + np.cumsum(np.concatenate(errors)[order], dtype=np.int64)[levels]),
        1.0 - np.append(first_seconds, after) / (len(records) * records.costs.total_seconds),
    )


def _sorted_steps(at: npt.NDArray[np.int32]) -> tuple[IndexArray, IndexArray]:
    """Steps by rising threshold, and where the last step of each threshold comes in that order."""
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    return order, np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)[: len(at)])
