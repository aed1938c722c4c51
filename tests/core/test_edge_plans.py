"""Plans for edges: what stays is computed again by the core, so fewer inputs stay, under the same certificate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, changed, pool  # type: ignore[import-not-found]
from scores import REQUEST, recorded

from offramp_core.control.objects import TuningStatus
from offramp_core.control.tuning.tuner import TunerView, tune_or_wait
from offramp_core.evaluate import Evaluation, evaluate_plan
from offramp_core.plan import Plan
from offramp_core.records import Records
from offramp_core.tuning import NoGain, Proposed, tune


def proposed(records: Records, *, computed_again: bool) -> tuple[Plan, Evaluation]:
    outcome = tune(records, replace(REQUEST, computed_again=computed_again))
    assert isinstance(outcome, Proposed)
    assert outcome.certificate.budget == REQUEST.max_disagreement
    return outcome.plan, evaluate_plan(records, outcome.plan, REQUEST.ramp_ids)


def stay(seen: Evaluation) -> float:
    return 1.0 - sum(seen.exit_shares)


@pytest.mark.parametrize("seed", range(5, 9))
def test_a_core_computes_at_most_two_thirds_and_the_box_hardly_more(seed: int) -> None:
    records = recorded(2000, 6, seed=seed)
    _, alone = proposed(records, computed_again=False)
    plan, edge = proposed(records, computed_again=True)
    assert stay(edge) <= stay(alone) * 2 / 3
    assert edge.saving >= alone.saving - 0.05
    ramps = [REQUEST.ramp_ids.index(ramp.id) for ramp in plan.ramps]
    taken = records.costs.ramp_seconds[ramps].sum()
    assert taken <= REQUEST.max_overhead * records.costs.total_seconds + 1e-12, "the box's own limit holds"


@pytest.mark.parametrize("seed", range(5, 9))
def test_an_edge_that_serves_a_plan_for_single_workers_gets_one_that_leaves_the_core_less(seed: int) -> None:
    records = recorded(2000, 6, seed=seed)
    alone, _ = proposed(records, computed_again=False)
    request = replace(REQUEST, current=alone, min_gain=0.01)
    assert isinstance(tune(records, request), NoGain)
    for_edges = tune(records, replace(request, computed_again=True))
    assert isinstance(for_edges, Proposed)
    again = replace(request, computed_again=True, current=for_edges.plan)
    assert isinstance(tune(records, again), NoGain), "and then it stays"


@pytest.mark.parametrize(("at_edge", "again"), [((True, True), True), ((True, False), True), ((False, False), False)])
def test_plans_are_made_for_edges_where_any_worker_is_one(at_edge: tuple[bool, ...], again: bool) -> None:
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.05"}}
    fleet = Fleet(pool(4000, seed=1), {**MANIFEST, "objective": objective})
    for _ in range(3):
        fleet.step()
    snapshot = fleet.snapshot()
    store = snapshot.observed.records
    assert store is not None
    base = pool(4000, seed=3)
    records = replace(base, time=fleet.now - 4000 + np.arange(4000.0))
    known = [w for w in snapshot.observed.workers if w.state is not None]
    workers = tuple(
        replace(known[0], state=replace(known[0].state, at_edge=each)) for each in at_edge if known[0].state is not None
    )
    observed = changed(
        snapshot, records=replace(store, records=records), workers=workers, tuning_running=False, tuning_outcome=None
    )
    stable = fleet.configs[fleet.status.stable_config]
    request = tune_or_wait(TunerView(observed, TuningStatus(), stable, None, fleet.now)).request
    assert request is not None and request.computed_again == again
