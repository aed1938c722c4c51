"""Policies that keep a ramp at every place of the network and choose only when an input may leave.

They pay for all of their ramps, even where that costs more than it saves: neither ``max_ramps`` nor ``max_overhead``
binds, as in their papers. Each sees all tuning records, where Apparate's comparison (arXiv:2312.05385 section 5.3) gave
them the first tenth of a stream; that only helps them.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidRecordsError
from offramp_core.records import IndexArray, Records
from offramp_core.search.thresholds import error_budget
from offramp_lab.policies.base import (
    NO_EXIT,
    Objective,
    PlanInForce,
    StreamPolicy,
    Trace,
    answers,
    constant,
    without_ramps,
)
from offramp_lab.policies.climb import Climbing, climb
from offramp_lab.policies.common_threshold import common_thresholds

Places = Callable[[Records], tuple[int, ...]]
_PER_RAMP = Climbing(below=False)


def all_ramps(records: Records) -> tuple[int, ...]:
    """Every recorded ramp."""
    return tuple(range(records.n_ramps))


def costliest_heads(records: Records) -> tuple[int, ...]:
    """One ramp per place, the one whose head costs most: between ramps of one place the backbone takes no time."""
    starts = np.append(True, records.costs.segment_seconds[1:-1] > 0)
    place = np.cumsum(starts) - 1
    cost = records.costs.ramp_seconds
    return tuple(int(max(np.flatnonzero(place == p), key=lambda r: cost[r])) for p in range(place[-1] + 1))


def with_one_threshold(places: Places) -> StreamPolicy:
    """One threshold for all ramps, tuned once: the one that saves most within the budget on the tuning records.

    Source: BranchyNet (Teerapittayanon, McDanel and Kung, ICPR 2016), arXiv:1709.01686; DeeBERT (Xin et al., ACL 2020),
    arXiv:2004.12993. Their score is the entropy of a ramp's answer; here it is the recorded uncertainty.
    """

    def run(tune: Records, stream: Records, objective: Objective) -> Trace:
        return _one_threshold(tune, stream, places(tune), objective)

    return run


def with_a_threshold_each(places: Places) -> StreamPolicy:
    """A threshold per ramp, tuned once on the tuning records by hill-climb.

    Source: the "+" variants of Apparate's comparison, arXiv:2312.05385 section 5.3.
    """

    def run(tune: Records, stream: Records, objective: Objective) -> Trace:
        return _threshold_each(tune, stream, places(tune), objective)

    return run


def tuned_in_hindsight(places: Places) -> StreamPolicy:
    """Thresholds tuned on the very stream they are judged on: the better of a common one and one per ramp.

    Source: the "-opt" variants of Apparate's comparison, arXiv:2312.05385 section 5.3.
    """

    def run(_tune: Records, stream: Records, objective: Objective) -> Trace:
        ramps = places(stream)
        found = (_threshold_each(stream, stream, ramps, objective), _one_threshold(stream, stream, ramps, objective))
        return max(found, key=lambda trace: trace.saving(stream))

    return run


def patience(tune: Records, stream: Records, objective: Objective) -> Trace:
    """An input leaves once t ramps in a row have said the same as the ramp before them; t is tuned on the tuning
    records.

    All ramps are active. The patience that saves most within the budget is taken. Source: PABEE (Zhou et al., NeurIPS
    2020), arXiv:2006.04152.

    Raises
    ------
    InvalidRecordsError
        The ramps' predictions were not recorded.
    """
    reason = without_predictions(tune) or without_predictions(stream)
    if reason:
        raise InvalidRecordsError(reason)
    limit = error_budget(len(tune), max_disagreement=objective.budget)
    kept = {tune.n_ramps: -np.inf}  # a patience that never ends
    for t in range(1, tune.n_ramps):
        trace = _patient(tune, t)
        if np.count_nonzero(~trace.agrees) <= limit:
            kept[t] = trace.saving(tune)
    return _patient(stream, max(kept, key=lambda t: kept[t]))


def without_predictions(records: Records) -> str | None:
    """Why patience cannot be shown on these records, in one line; None where it can."""
    if records.prediction is None:
        return "prediction is missing; patience compares what neighbouring ramps predict"
    return without_ramps(records)


def _one_threshold(tune: Records, stream: Records, ramps: tuple[int, ...], objective: Objective) -> Trace:
    threshold, _ = common_thresholds(tune, ramps).best(error_budget(len(tune), max_disagreement=objective.budget))
    return constant(stream, ramps, (threshold,) * len(ramps))


def _threshold_each(tune: Records, stream: Records, ramps: tuple[int, ...], objective: Objective) -> Trace:
    climbed = climb(tune, ramps, objective.budget, _PER_RAMP)
    return constant(stream, ramps, tuple(Decimal(str(t)) for t in climbed.thresholds))


def _patient(records: Records, t: int) -> Trace:
    enough = _agreeing_in_a_row(records) >= t
    left: IndexArray = np.where(enough.any(axis=1), enough.argmax(axis=1), NO_EXIT)
    ramps = all_ramps(records)
    return Trace(left, (PlanInForce(0, ramps, (Decimal(0),) * len(ramps)),), answers(records, left))


def _agreeing_in_a_row(records: Records) -> npt.NDArray[np.int16]:
    """How many ramps up to each, in a row, predict what the ramp before them does: (n, R)."""
    assert records.prediction is not None
    same = records.prediction[:, 1:] == records.prediction[:, :-1]
    streak = np.zeros(records.prediction.shape, dtype=np.int16)
    for j in range(1, records.n_ramps):
        streak[:, j] = np.where(same[:, j - 1], streak[:, j - 1] + 1, 0)
    return streak
