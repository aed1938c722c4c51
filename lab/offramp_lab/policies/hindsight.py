"""Ceilings: what could have been saved by one who knew the stream in advance."""

from __future__ import annotations

import numpy as np

from offramp_core.records import Records
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import error_budget
from offramp_lab.policies.base import NO_EXIT, Objective, PlanInForce, Trace, constant, serve
from offramp_lab.policies.planned import best_of_precisions

WINDOW = 1024  # requests a plan of `online_optimal` serves: 10 errors at a budget of 1 %


def oracle(_tune: Records, stream: Records, _objective: Objective) -> Trace:
    """Each input leaves at the cheapest ramp that answers it correctly and pays for that ramp alone; nothing disagrees.

    No plan can do this: it has no thresholds, and its saving is a ceiling. Source: the per-sample optimum of Apparate
    (SOSP 2024), arXiv:2312.05385 section 4.
    """
    costs = stream.costs
    at_ramp = np.cumsum(costs.segment_seconds)[:-1] + costs.ramp_seconds
    seconds = np.where(stream.agrees, at_ramp, np.inf)
    best = seconds.argmin(axis=1)
    pays = seconds[np.arange(len(stream)), best] < costs.total_seconds
    left = np.where(pays, best, NO_EXIT)
    return Trace(left, (PlanInForce(0, (), ()),), np.ones(len(stream), dtype=np.bool_))


def offline_optimal(_tune: Records, stream: Records, objective: Objective) -> Trace:
    """The plan that saves most within the budget on the very stream it is judged on, kept all along.

    Source: the offline optimum of Apparate's evaluation, arXiv:2312.05385 section 5.4, found by exact search instead of
    a grid.
    """
    precision, plan = best_of_precisions(stream, objective)
    return constant(stream, plan.active, plan.thresholds, precision=precision)


def online_optimal(_tune: Records, stream: Records, objective: Objective) -> Trace:
    """For every ``WINDOW`` requests the plan that saves most on these very requests, within the budget of the stream so
    far.

    Budget a window leaves unspent is there for the next one, so the whole stream keeps it. Source: the online optimum
    of Apparate's evaluation, arXiv:2312.05385 section 5.4; its window is not stated in what is known of it here.
    """
    left = np.full(len(stream), NO_EXIT, dtype=np.intp)
    agrees = np.ones(len(stream), dtype=np.bool_)
    plans: list[PlanInForce] = []
    for start in range(0, len(stream), WINDOW):
        end = min(start + WINDOW, len(stream))
        spent = int(np.count_nonzero(~agrees[:start]))
        window = stream.take(slice(start, end))
        plan = best_plan(
            window,
            max_errors=max(0, error_budget(end, max_disagreement=objective.budget) - spent),
            max_ramps=objective.max_ramps,
            max_overhead=objective.max_overhead,
        ).plan
        left[start:end], agrees[start:end] = serve(window, plan.active, plan.thresholds)
        if not plans or (plans[-1].active, plans[-1].thresholds) != (plan.active, plan.thresholds):
            plans.append(PlanInForce(start, plan.active, plan.thresholds))
    return Trace(left, tuple(plans), agrees)
