"""From heads' logits to the arrays and facts of a record set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import RampSpec
from offramp_core.task import task_of
from offramp_core.uncertainty import raw_score, uncertainty
from offramp_worker.prepare.heads.selection import BUDGETS, exit_share
from offramp_worker.prepare.pipeline import score_table

FloatArray = npt.NDArray[np.float32]
LabelArray = npt.NDArray[np.int64]

UNCERTAINTY = (
    "1 - max softmax as log odds, mapped by the ramp's quantile table (offramp_core.uncertainty) made from the "
    "validation rows, "
    "which are not in the pool; the six-decimal grid of plans. one_minus_max is the same score before the table."
)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A recorded ramp: what it is, its logits on the pool, and its logits on the rows that make its quantile table."""

    spec: RampSpec
    pool: FloatArray
    validation: FloatArray


def record_arrays(ramps: Sequence[Ramp], reference: FloatArray) -> dict[str, npt.NDArray[Any]]:
    """Scores and answers of ramps in network order; ``reference`` (n, n_classes) are the full model's logits on the
    pool."""
    answers = reference.argmax(axis=1).astype(np.int64)
    task = task_of(None, width=reference.shape[1])
    columns = [uncertainty(ramp.pool, score_table(task, ramp.validation)) for ramp in ramps]
    return {
        "uncertainty": np.stack(columns, axis=1),
        "one_minus_max": np.stack([one_minus_max(ramp.pool) for ramp in ramps], axis=1),
        "prediction": np.stack([ramp.pool.argmax(axis=1) for ramp in ramps], axis=1).astype(np.int64),
        "final": answers,
        "reference": answers,
    }


def one_minus_max(logits: FloatArray) -> FloatArray:
    """1 - max softmax, (n, n_classes) -> (n,), with the resolution float32 has near 0."""
    odds = np.exp(raw_score(logits))
    return np.asarray(odds / (1 + odds), dtype=np.float32)


def ramp_facts(
    ramps: Sequence[Ramp], reference: FloatArray, *, macs: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Per ramp: where it is and who could leave there alone.

    ``macs`` maps ramp id to the share of the model's multiplications up to it, and the head's own.
    """
    answers = reference.argmax(axis=1)
    return [
        {
            "id": ramp.spec.id,
            "place": ramp.spec.position,
            "macs_depth": round(macs[ramp.spec.id][0], 5),
            "macs_cost": round(macs[ramp.spec.id][1], 5),
            **judged(ramp.pool, answers),
        }
        for ramp in ramps
    ]


def judged(logits: FloatArray, answers: npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Agreement with the reference's answers and exits in hindsight by budget, rounded for reading."""
    agrees = logits.argmax(axis=1) == answers
    score = raw_score(logits)
    exits: Mapping[str, float] = {str(b): round(exit_share(score, agrees, budget=b), 4) for b in BUDGETS}
    return {"agreement": round(float(agrees.mean()), 4), "exits": exits}


def accuracy(reference: FloatArray, labels: LabelArray) -> float:
    """Share of the reference's answers that are the true label."""
    return round(float((reference.argmax(axis=1) == labels).mean()), 4)
