"""Policies that choose one plan from the tuning records and keep it."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from offramp_core import tuning
from offramp_core.certify import largest_passing_count
from offramp_core.errors import InvalidRecordsError
from offramp_core.evaluate import evaluate, plan_columns
from offramp_core.precision import EXACT, Precision
from offramp_core.records import Records
from offramp_core.search.grid import STEPS, threshold_of
from offramp_core.search.objective import Pricing, Weights, price
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import ThresholdPlan, error_budget
from offramp_lab.policies.base import Goal, Objective, PlanInForce, Trace, answers, constant
from offramp_lab.policies.climb import Climbing, climb
from offramp_lab.policies.common_threshold import common_thresholds

GOALS: dict[Goal, Weights] = {"mean": Weights(), "p95": Weights(mean=0, tail=1), "busy": Weights(mean=0, busy=1)}
RISK_GRID = STEPS // 1000  # fast-yet-safe tries thresholds 0.001, 0.002, ..., 1


def exact(tune: Records, stream: Records, objective: Objective) -> Trace:
    """The plan that saves most on the tuning records within the budget, over precisions, placement and thresholds,
    uncertified.

    Source: this project, docs/decisions/0004. Tuned to the budget on its own records it breaks it about as often as
    not.
    """
    precision, plan = best_of_precisions(tune, objective)
    return constant(stream, plan.active, plan.thresholds, precision=precision)


def certified(tune: Records, stream: Records, objective: Objective) -> Trace:
    """What the product proposes: a smoothed path of plans from the oldest records, tested on the rest; exits off if
    nothing passes.

    Source: this project, docs/decisions/0010; fixed-sequence Learn-then-Test, Angelopoulos et al. (2021),
    arXiv:2110.01052.
    """
    names = tuple(f"r{i:02d}" for i in range(tune.n_ramps))
    request = tuning.TuningRequest(
        max_disagreement=objective.budget,
        delta=1 - objective.confidence,
        test_index=1,
        ramp_ids=names,
        backbone_digest="",
        ramp_set_digest="",
        max_overhead=objective.max_overhead,
        max_ramps=objective.max_ramps,
        precisions=objective.precisions,
        slices=objective.slices,
    )
    proposed = tuning.tune(tune, request)
    if not isinstance(proposed, tuning.Proposed):
        return exits_off(tune, stream, objective)
    active, thresholds = plan_columns(proposed.plan, proposed.certificate.ramp_ids)
    return constant(stream, active, thresholds, proposed.certificate, precision=proposed.plan.precision)


def lower_precision(tune: Records, stream: Records, objective: Objective) -> Trace:
    """The backbone at the precision that saves most on the tuning records within the budget, without exits.

    Source: this project; what a plan with exits has to beat where a lower precision was recorded.

    Raises
    ------
    InvalidRecordsError
        Only one precision was recorded.
    """
    reason = without_other_precisions(tune)
    if reason:
        raise InvalidRecordsError(reason)
    found = [(evaluate(tune.at(p), (), ()), p) for p in tune.others if objective.allows(p)]
    kept = [(seen.saving, p) for seen, p in found if seen.disagreement <= objective.budget and seen.saving > 0]
    return constant(stream, (), (), precision=max(kept)[1]) if kept else exits_off(tune, stream, objective)


def greedy(tune: Records, stream: Records, objective: Objective) -> Trace:
    """Apparate's hill-climb on evenly spaced ramps, with all tuning records for its window.

    Source: Apparate (SOSP 2024), arXiv:2312.05385 section 3.2, with the constants of its public artifact;
    see :mod:`.climb`. It shows what the search itself is worth; the loop around it is `apparate`.
    """
    ramps = evenly_spaced(tune, objective)
    climbed = climb(tune, ramps, objective.budget, Climbing())
    return constant(stream, ramps, tuple(Decimal(str(t)) for t in climbed.thresholds))


def single_threshold(tune: Records, stream: Records, objective: Objective) -> Trace:
    """One threshold for all of the evenly spaced ramps: the one that saves most within the budget on the tuning
    records.

    Source: the common threshold of BranchyNet (arXiv:1709.01686) on Apparate's few ramps, found exactly.
    """
    ramps = evenly_spaced(tune, objective)
    if not ramps:
        return exits_off(tune, stream, objective)
    threshold, saving = common_thresholds(tune, ramps).best(error_budget(len(tune), max_disagreement=objective.budget))
    return constant(stream, ramps, (threshold,) * len(ramps)) if saving > 0 else exits_off(tune, stream, objective)


def fast_yet_safe(tune: Records, stream: Records, objective: Objective) -> Trace:
    """One threshold for evenly spaced ramps, raised as long as a test on all tuning records proves the budget for it.

    The grid is fixed in advance and tested from the safest threshold on, each with an exact binomial test at 1 -
    confidence, until the first failure: with that confidence the threshold taken keeps the budget, whatever the shape
    of the risk. Of those that passed the one that saves most is taken. Source: Jazbec et al. (2024), "Fast yet Safe",
    arXiv:2405.20915 (risk: disagreement with the full model; Learn-then-Test variant); the tests are binomial because
    the loss is 0 or 1, which only helps it.
    """
    ramps = evenly_spaced(tune, objective)
    if not ramps:
        return exits_off(tune, stream, objective)
    curve = common_thresholds(tune, ramps)
    grid = np.arange(RISK_GRID, STEPS + 1, RISK_GRID)
    at = np.searchsorted(curve.keys, grid, side="right") - 1
    passing = largest_passing_count(len(tune), budget=objective.budget, level=1 - objective.confidence)
    failed = np.flatnonzero(curve.errors[at] > passing)
    proven = at[: failed[0]] if len(failed) else at
    if not len(proven) or curve.saving[proven].max() <= 0:
        return exits_off(tune, stream, objective)
    threshold = threshold_of(int(grid[curve.saving[proven].argmax()]))
    return constant(stream, ramps, (threshold,) * len(ramps))


def two_layer(tune: Records, stream: Records, objective: Objective) -> Trace:
    """A fixed pair: one early answerer with one threshold before the full model, chosen once on the tuning records.

    Source: the two-layer inference that Apparate (SOSP 2024), arXiv:2312.05385 section 5.3, is compared with. A small
    model recorded at the input is among the candidates; as it may cost what it wants, ``max_overhead`` does not bind.
    """
    plan = best_plan(tune, max_disagreement=objective.budget, max_ramps=1, max_overhead=np.inf).plan
    return constant(stream, plan.active, plan.thresholds)


def static_small(tune: Records, stream: Records, _objective: Objective) -> Trace:
    """A smaller model instead of this one: every input gets the answer of a model recorded at the input.

    Of several the one that agrees most often on the tuning records. Source: the static alternative every early-exit
    paper is measured against, e.g. arXiv:2312.05385 section 2.

    Raises
    ------
    InvalidRecordsError
        No ramp sits at the input.
    """
    reason = without_small_model(tune)
    if reason:
        raise InvalidRecordsError(reason)
    candidates = _at_input(tune)
    ramp = int(candidates[tune.agrees[:, candidates].sum(axis=0).argmax()])
    left = np.full(len(stream), ramp, dtype=np.intp)
    return Trace(left, (PlanInForce(0, (ramp,), (Decimal(1),)),), answers(stream, left))


def exits_off(_tune: Records, stream: Records, _objective: Objective) -> Trace:
    """No ramps: the model as it was given. Source: the vanilla baseline of every paper."""
    return constant(stream, (), ())


def without_small_model(records: Records) -> str | None:
    """Why no smaller model can stand in for this one, in one line; None where one was recorded."""
    if len(_at_input(records)):
        return None
    return (
        "segment_seconds[0] is not 0; static-small needs a model recorded at the input, a ramp with no backbone "
        "before it"
    )


def without_other_precisions(records: Records) -> str | None:
    """Why there is no lower precision to serve, in one line; None where one was recorded."""
    return None if records.others else "ramp_precision names no other precision; lower-precision needs one recorded"


def evenly_spaced(records: Records, objective: Objective) -> tuple[int, ...]:
    """As many ramps as allowed, spread evenly over the network; fewer where together they would break the overhead
    bound."""
    n = records.n_ramps
    for count in range(min(objective.max_ramps, n), 0, -1):
        ramps = tuple(int((i + 1) * n / (count + 1)) for i in range(count))
        if len(set(ramps)) == count and affordable(records, ramps, objective):
            return ramps
    return ()


def affordable(records: Records, ramps: tuple[int, ...], objective: Objective) -> bool:
    """Whether so many ramps are allowed, and their worst-case overhead is."""
    return len(ramps) <= objective.max_ramps and records.costs.overhead(ramps) <= objective.max_overhead * (1 + 1e-12)


def best_of_precisions(records: Records, objective: Objective) -> tuple[Precision, ThresholdPlan]:
    """The exact search at every precision allowed, and the plan that saves most within the budget.

    Objectives other than the mean, and slices, are those of fp32: what a lower precision's own answers do to them is
    not searched.
    """
    if objective.goal != "mean" or objective.slices:
        return EXACT, searched(records, objective)
    found = {p: searched(records.at(p), objective) for p in (records.precision, *records.others) if objective.allows(p)}
    kept = [(plan.saving, p) for p, plan in found.items() if p == EXACT or plan.disagreement <= objective.budget]
    precision = max(kept, key=lambda pair: pair[0])[1]
    return precision, found[precision]


def searched(records: Records, objective: Objective) -> ThresholdPlan:
    """The exact search under an objective; without any ramps there is one plan."""
    if not records.n_ramps:
        return ThresholdPlan((), (), evaluate(records, (), ()))
    return best_plan(
        records,
        max_disagreement=objective.budget,
        max_ramps=objective.max_ramps,
        max_overhead=objective.max_overhead,
        slice_budgets={s.slice_id: s.budget for s in objective.slices},
        pricing=pricing_of(records, objective),
    ).plan


def pricing_of(records: Records, objective: Objective) -> Pricing:
    """What is saved under an objective, at its batch size.

    Raises
    ------
    InvalidRecordsError
        Busy time is asked for, and no costs by batch size were recorded.
    """
    if objective.goal == "mean":
        return price(records)
    if objective.goal == "busy" and records.profile is None:
        raise InvalidRecordsError("batch_size is missing; busy time needs costs by batch size")
    batch_size = None if records.profile is None else objective.batch_size
    return price(records, weights=GOALS[objective.goal], batch_size=batch_size)


def _at_input(records: Records) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.flatnonzero(np.cumsum(records.costs.segment_seconds)[:-1] == 0)
