"""What plans could save on a new bundle's records: the exact optimum in hindsight, by budget and batch size.

An outlook and no promise: thresholds are fitted to the rows they are judged on. What a service will save is what the
tuner certifies on its own traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from offramp_core.precision import EXACT, Precision
from offramp_core.records import Records, records_from_arrays
from offramp_core.search.placement import best_plan
from offramp_worker.prepare.heads.selection import BUDGETS

USUAL_BATCH = 16
USUAL_OVERHEAD, ANY_OVERHEAD = 0.05, 1.0  # the default of spec.ramps.maxOverhead; no limit to speak of
NODE_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Outlook:
    """The best plan, at any precision, of at most three ramps that together add at most ``max_overhead`` in the worst
    case.

    ``saving`` is a share of the exact backbone's time at ``batch_size``, ``ramps`` are ids; none at a lower precision
    means that its whole backbone answers everything.
    """

    budget: float
    batch_size: int
    max_overhead: float
    saving: float
    ramps: tuple[str, ...]
    precision: Precision = EXACT

    def to_mapping(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "budget": self.budget,
            "batch_size": self.batch_size,
            "max_overhead": self.max_overhead,
            "saving": round(self.saving, 4),
            "precision": self.precision,
            "ramps": list(self.ramps),
        }


def outlooks(arrays: Mapping[str, npt.NDArray[Any]], ids: Sequence[str]) -> tuple[Outlook, ...]:
    """The outlook at every budget of the report, at the smallest batch size and about 16, within the usual overhead and
    without a limit.

    Parameters
    ----------
    arrays : mapping
        A records file with costs by batch size.
    ids : sequence of str
        Names of its columns, or of the first of them: those that are not of another precision.
    """
    sizes = [int(size) for size in arrays["batch_size"]]
    found = []
    for size in dict.fromkeys((min(sizes), min(sizes, key=lambda size: abs(size - USUAL_BATCH)))):
        records = records_from_arrays(arrays, batch_size=size)
        for overhead in (USUAL_OVERHEAD, ANY_OVERHEAD):
            for budget in BUDGETS:
                plans = [
                    _best(records.at(precision), ids, Outlook(budget, size, overhead, 0.0, (), precision))
                    for precision in (EXACT, *records.others)
                ]
                found.append(max(plans, key=lambda plan: plan.saving))  # the first, fp32, where they are equal
    return tuple(found)


def _best(records: Records, ids: Sequence[str], limits: Outlook) -> Outlook:
    """The best plan of one chain; nothing saved where even its whole backbone is over the budget."""
    plan = best_plan(
        records, max_disagreement=limits.budget, max_overhead=limits.max_overhead, node_limit=NODE_LIMIT
    ).plan
    if plan.disagreement > limits.budget:
        return replace(limits, saving=0.0)
    names = records.ramp_ids or tuple(ids)
    return replace(limits, saving=plan.saving, ramps=tuple(names[index] for index in plan.active))
