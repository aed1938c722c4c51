"""What plans could save on a new bundle's records: the exact optimum in hindsight, by budget and batch size.

An outlook and no promise: thresholds are fitted to the rows they are judged on. What a service will save is what the
tuner certifies on its own traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from offramp_core.records import records_from_arrays
from offramp_core.search.placement import best_plan
from offramp_worker.prepare.selection import BUDGETS

USUAL_BATCH = 16
USUAL_OVERHEAD, ANY_OVERHEAD = 0.05, 1.0  # the default of spec.ramps.maxOverhead; no limit to speak of
NODE_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Outlook:
    """The best plan of at most three ramps that together add at most ``max_overhead`` in the worst case, at any batch size.

    ``saving`` is a share of the backbone's time at ``batch_size``, ``ramps`` are ids.
    """

    budget: float
    batch_size: int
    max_overhead: float
    saving: float
    ramps: tuple[str, ...]

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "budget": self.budget,
            "batch_size": self.batch_size,
            "max_overhead": self.max_overhead,
            "saving": round(self.saving, 4),
            "ramps": list(self.ramps),
        }


def outlooks(arrays: Mapping[str, npt.NDArray[Any]], ids: Sequence[str]) -> tuple[Outlook, ...]:
    """The outlook at every budget of the report, at the smallest batch size and about 16, within the usual overhead and without a limit.

    Parameters
    ----------
    arrays : mapping
        A records file with costs by batch size.
    ids : sequence of str
        Names of its columns.
    """
    found = []
    sizes = [int(size) for size in arrays["batch_size"]]
    for size in dict.fromkeys((min(sizes), min(sizes, key=lambda size: abs(size - USUAL_BATCH)))):
        records = records_from_arrays(arrays, batch_size=size)
        for overhead in (USUAL_OVERHEAD, ANY_OVERHEAD):
            for budget in BUDGETS:
                plan = best_plan(records, max_disagreement=budget, max_overhead=overhead, node_limit=NODE_LIMIT).plan
                active = tuple(ids[index] for index in plan.active)
                found.append(Outlook(budget, size, overhead, plan.saving, active))
    return tuple(found)
