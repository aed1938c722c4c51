"""What a threshold vector does on recorded traffic.

An input leaves at the first active ramp where ``float32(uncertainty) < float32(threshold)``. Threshold 0 lets
nothing leave. Disagreement is counted over all requests: an input that leaves counts the ramp's answer, one
that stays counts the served executor's final answer. Savings are against the fp32 backbone, at any precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

import numpy as np

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.records import BoolArray, ExitCosts, IndexArray, LabelArray, Records, SecondsArray

Threshold = Decimal | float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A threshold vector on ``n`` records."""

    #: Ramp indices in network order; all per-ramp tuples below follow it.
    active: tuple[int, ...]
    thresholds: tuple[float, ...]
    #: n and disagreements: requests, and those answered differently from the reference.
    n: int
    disagreements: int
    #: What all answers lose against the reference's; equal to ``disagreements`` unless losses are graded.
    lost: float
    #: Per request, ramps paid for.
    mean_seconds: float
    #: Share of the fp32 backbone's time saved; negative when the ramps cost more than they save.
    saving: float
    #: Requests that left at each active ramp.
    exits: tuple[int, ...]
    #: Per request: seconds saved by inputs that leave at the ramp (the backbone behind it, less the ramp itself), minus
    #: seconds the ramp costs the inputs that pass it. They add up to the seconds the ramps save, against this chain's
    #: backbone.
    utility_seconds: tuple[float, ...]

    @property
    def disagreement(self) -> float:
        """Mean loss against the reference: the share of all requests answered differently, unless losses are graded."""
        return self.lost / self.n

    @property
    def exit_shares(self) -> tuple[float, ...]:
        """Share of all requests that left at each active ramp."""
        return tuple(count / self.n for count in self.exits)


def evaluate(records: Records, active: Sequence[int], thresholds: Sequence[Threshold]) -> Evaluation:
    """Replay a threshold vector.

    At fp32 no active ramps means exits off: the exact executor answers, so nothing is saved and nothing disagrees. At
    another precision its own backbone answers then.

    Parameters
    ----------
    records : Records
    active : sequence of int
        Strictly increasing ramp indices.
    thresholds : sequence of Decimal or float
        One in [0, 1] per active ramp.

    Raises
    ------
    InvalidArgumentError
        Empty records, ramps out of order or unknown, or thresholds that do not match.
    """
    n = len(records)
    if n == 0:
        raise InvalidArgumentError("records are empty; a plan needs at least one record to be evaluated on")
    ramps = check_active(records, active)
    left = leave_position(records, ramps, thresholds)
    losses = served_losses(records, ramps, left)
    counts = np.bincount(left, minlength=len(ramps) + 1)
    mean_seconds = float(counts @ records.costs.leave_seconds(ramps)) / n if ramps else records.costs.total_seconds
    return Evaluation(
        active=ramps,
        thresholds=tuple(float(t) for t in thresholds),
        n=n,
        disagreements=int(np.count_nonzero(losses)),
        lost=float(losses.sum()),
        mean_seconds=mean_seconds,
        saving=1.0 - mean_seconds / records.costs.baseline_seconds,
        exits=tuple(int(c) for c in counts[:-1]),
        utility_seconds=utilities(records.costs, ramps, counts.tolist()),
    )


def evaluate_plan(records: Records, plan: Plan, ramp_ids: Sequence[str]) -> Evaluation:
    """Replay a plan in the chain of its precision; ``ramp_ids`` names the columns of the records given.

    A plan whose thresholds are all 0 has no exits and is evaluated as such.
    """
    records, ramp_ids = chain_of(records, plan, ramp_ids)
    active, thresholds = plan_columns(plan, ramp_ids)
    return evaluate(records, active, thresholds)


def chain_of(records: Records, plan: Plan, ramp_ids: Sequence[str]) -> tuple[Records, Sequence[str]]:
    """The records of the chain that a plan runs in and the names of its columns; those given where that is their
    own."""
    if plan.precision == records.precision:
        return records, ramp_ids
    view = records.at(plan.precision)
    return view, view.ramp_ids


def plan_columns(plan: Plan, ramp_ids: Sequence[str]) -> tuple[tuple[int, ...], tuple[Decimal, ...]]:
    """Columns of a plan's ramps, in network order, and their thresholds; nothing where no input can leave."""
    if not any(ramp.threshold > 0 for ramp in plan.ramps):
        return (), ()
    index = {name: i for i, name in enumerate(ramp_ids)}
    unknown = [ramp.id for ramp in plan.ramps if ramp.id not in index]
    if unknown:
        raise InvalidArgumentError(f"ramp {unknown[0]!r} was not recorded; the records hold {list(ramp_ids)}")
    pairs = sorted((index[ramp.id], ramp.threshold) for ramp in plan.ramps)
    return tuple(i for i, _ in pairs), tuple(t for _, t in pairs)


def leave_position(records: Records, active: Sequence[int], thresholds: Sequence[Threshold]) -> IndexArray:
    """Position in ``active`` where each input leaves, ``len(active)`` where it stays: (n,)."""
    if len(thresholds) != len(active):
        raise InvalidArgumentError(f"{len(thresholds)} thresholds for {len(active)} active ramps; give one for each")
    values = np.array([float(t) for t in thresholds], dtype=np.float64)
    if not np.all((values >= 0) & (values <= 1)):
        raise InvalidArgumentError(f"thresholds are {values.tolist()}; each must lie in [0, 1]")
    left = np.full(len(records), len(active), dtype=np.intp)
    limits = values.astype(np.float32)
    for j in range(len(active) - 1, -1, -1):  # backwards, so that the earliest ramp has the last word
        np.copyto(left, j, where=records.uncertainty[:, active[j]] < limits[j])
    return left


def answers_agree(records: Records, active: Sequence[int], left: IndexArray) -> BoolArray:
    """Whether each input's answer is the reference's, by the position in ``active`` where it left: (n,).

    Without active ramps at fp32 the exact executor answers, which is the reference.
    """
    if not len(active):
        return np.ones(len(records), dtype=np.bool_) if records.precision == EXACT else records.final_agrees.copy()
    agree = records.final_agrees.copy()
    for j, ramp in enumerate(active):
        np.copyto(agree, records.agrees[:, ramp], where=left == j)
    return agree


def served_losses(records: Records, active: Sequence[int], left: IndexArray) -> SecondsArray:
    """What each input's answer loses against the reference's, by the position in ``active`` where it left: (n,) in [0,
    1]."""
    if not records.graded:
        return np.asarray(~answers_agree(records, active, left), dtype=np.float64)
    loss, final = records.losses()
    if not len(active):
        return np.zeros(len(records)) if records.precision == EXACT else final.astype(np.float64)
    stays = left == len(active)
    ramp = np.asarray(active, dtype=np.intp)[np.where(stays, 0, left)]
    return np.where(stays, final, loss[np.arange(len(records)), ramp]).astype(np.float64)


def answered_labels(records: Records, active: Sequence[int], left: IndexArray) -> LabelArray:
    """What each input is answered, by the position in ``active`` where it left: (n,).

    Raises
    ------
    InvalidRecordsError
        The records do not say what was answered.
    """
    if records.prediction is None or records.final is None:
        raise InvalidRecordsError("prediction or final is missing; without them nobody knows what was answered")
    if not len(active):
        return records.final.astype(np.int64)
    stays = left == len(active)
    ramp = np.asarray(active, dtype=np.intp)[np.where(stays, 0, left)]
    return np.where(stays, records.final, records.prediction[np.arange(len(records)), ramp]).astype(np.int64)


def check_active(records: Records, active: Sequence[int]) -> tuple[int, ...]:
    """Ramp indices as a tuple, or an error that says what is wrong with them."""
    ramps = tuple(int(i) for i in active)
    if any(not 0 <= i < records.n_ramps for i in ramps) or any(b <= a for a, b in pairwise(ramps)):
        raise InvalidArgumentError(
            f"active ramps are {list(ramps)}; give strictly increasing indices from 0 to {records.n_ramps - 1}"
        )
    return ramps


def utilities(costs: ExitCosts, ramps: Sequence[int], counts: Sequence[int]) -> tuple[float, ...]:
    """Utility of each active ramp, in seconds per request; see :attr:`Evaluation.utility_seconds`.

    ``counts`` has one entry per ramp, those that left there, and a last one, those that stayed; their sum is positive.
    """
    behind = costs.total_seconds - np.cumsum(costs.segment_seconds)  # of this chain: what leaving spares
    out, reach = [], sum(counts)
    for j, ramp in enumerate(ramps):
        out.append(float(counts[j] * behind[ramp] - reach * costs.ramp_seconds[ramp]) / sum(counts))
        reach -= counts[j]
    return tuple(out)
