"""A generative model's variants as columns of records, and what a plan makes of them.

The model at lower precision is a cheaper way to the whole answer. There are two ways to use it, and records price both:

    escalation   the variant answers first, the reference again where the answer's own uncertainty is not below a
                 threshold: an exit at the level of the request. A column at the input, named as the variant is.
    precision    the variant answers everything. The final column of its chain, ``<variant>/final``.

Search, certificates and gates know columns, losses and costs only, so a plan of a classifier and one of a generative
model are the same object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offramp_core.columns import FINAL_HEAD, final_id
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.protocol import RampInfo

WHOLE = "model"  # the head of a column in which a whole variant answers


@dataclass(frozen=True, slots=True)
class VariantStep:
    """One variant's turn at a request. Its answer is the reply where its uncertainty is below ``leave_below``, else the
    next step's is.

    ``exit`` is what counters call it: the ramp's id, or ``final`` for the plan's last word.
    """

    variant: str
    exit: str = FINAL_HEAD
    leave_below: float = math.inf


def answer_uncertainty(logprobs: Sequence[float]) -> float:
    """How unsure a model is of an answer it gave, in [0, 1]: 1 less the geometric mean of its tokens' probabilities; 1
    for no tokens.

    Parameters
    ----------
    logprobs : sequence of float
        Natural logarithms of the probabilities of the tokens that were chosen, at temperature 1. One that is no number
        counts as impossible.

    Examples
    --------
    >>> round(answer_uncertainty([-0.1, -0.3]), 3), answer_uncertainty([]), answer_uncertainty([float("nan")])
    (0.181, 1.0, 1.0)
    """
    if not logprobs or any(math.isnan(value) for value in logprobs):
        return 1.0
    return min(1.0, max(0.0, 1.0 - math.exp(sum(logprobs) / len(logprobs))))


def variant_columns(seconds: Mapping[str, float]) -> tuple[RampInfo, ...]:
    """Columns of a bundle's records. ``seconds`` has each variant's time per token, the reference's included, in the
    bundle's order.

    Cheaper variants come first at the input: a plan that asks several asks those first.
    """
    lossy = [name for name in seconds if name != EXACT]
    cheapest_first = sorted(lossy, key=lambda name: seconds[name])
    return (
        *(RampInfo(name, 0, 0.0, WHOLE) for name in cheapest_first),
        *(RampInfo(final_id(name), 1, 1.0, FINAL_HEAD, name) for name in lossy),
    )


def variant_costs(seconds: Mapping[str, float]) -> dict[str, list[Any]]:
    """The cost arrays of a records file, for one token of an answer: the reference's chain and that of each other
    variant."""
    lossy = [name for name in seconds if name != EXACT]
    asked_first = [seconds[name] for name in sorted(lossy, key=lambda name: seconds[name])]
    none = [0.0] * len(lossy)
    costs: dict[str, list[Any]] = {
        "batch_size": [1.0],
        "segment_seconds": [[*none, seconds[EXACT]]],
        "ramp_seconds": [asked_first],
        "regroup_seconds": [0.0],
    }
    for name in lossy:
        costs |= {f"{name}_segment_seconds": [[*none, seconds[name]]], f"{name}_ramp_seconds": [asked_first]}
    return costs


def steps_of(plan: Plan, columns: Sequence[RampInfo]) -> tuple[VariantStep, ...]:
    """Which variants are asked under a plan, in their order; the last one answers what no other did. Ramps with
    threshold 0 are left out."""
    thresholds = {ramp.id: float(ramp.threshold) for ramp in plan.ramps if ramp.threshold > 0}
    first = [VariantStep(c.id, c.id, thresholds[c.id]) for c in columns if not c.precision and c.id in thresholds]
    return (*first, VariantStep(plan.precision))
