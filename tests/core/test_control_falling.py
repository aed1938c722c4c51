"""Why a stable plan falls: each rule alone, and which of two speaks."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from fleet import BACKBONE, MANIFEST, RAMP_SET, Fleet, SimWorker, pool

from offramp_core.control.objects import Config, ConfigStatus, Measured, RampSetStatus, Saving, Service
from offramp_core.control.served import served_by
from offramp_core.control.spec import parse_spec
from offramp_core.control.stable import falling
from offramp_core.control.stable.falling import RULES, Fall, StableView
from offramp_core.control.stable.watch import Watch
from offramp_core.evidence import detector
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import PlanDocument, Refusal, Withdrawn
from offramp_core.reasons import Reason

PLAN = Plan(BACKBONE, RAMP_SET, (RampThreshold("r00-grid", Decimal("0.1")),))
OTHER_SET = "sha256:" + "c" * 64
PROVEN = ConfigStatus(state="Stable", certificates=({"budget": "0.02", "delta": "0.05"},))
LOSES = Measured(PLAN.content_hash, answer_time=Saving(-0.5, -0.6, -0.4))
LOUD = Watch(PLAN.content_hash, 0.02, detector.update(detector.init(), 1000, 1000, p0=0.02))


def view(**changes: Any) -> StableView:
    """A proven plan that serves, with nothing to say against it."""
    document = published(PLAN)
    worker = SimWorker("w0", 0)
    worker.configure(document)
    workers = (worker.view(),)
    served = served_by(workers, document)
    assert served is not None
    service = Service("default", "sim", "uid", 1, parse_spec(MANIFEST))
    quiet = StableView(
        stable=Config("plan", PLAN, PROVEN),
        service=service,
        workers=workers,
        published=document,
        served=served,
        ramp_sets=RampSetStatus(),
        fits=True,
        measured=Measured(),
        watch=Watch(),
    )
    return replace(quiet, **changes)


def published(plan: Plan, **changes: Any) -> PlanDocument:
    fleet = Fleet(pool(10, seed=0))
    fleet.step()
    assert fleet.published is not None
    document = fleet.published
    return replace(document, epoch=7, stable=replace(document.stable, plan=plan.to_mapping()), **changes)


def alarmed() -> StableView:
    quiet = view()
    worker = quiet.workers[0]
    assert worker.state is not None
    return replace(quiet, workers=(replace(worker, state=replace(worker.state, breaker_open=True)),))


def unloadable() -> StableView:
    quiet = view()
    worker = quiet.workers[0]
    assert worker.state is not None
    refused = replace(worker.state, refused=Refusal(7, Reason.RAMP_SET_NOT_HELD, "the store has none"))
    return replace(quiet, workers=(replace(worker, state=refused),))


def forgotten() -> StableView:
    """Workers run without the plan, and the document says why."""
    note = Withdrawn("plan", Reason.DRIFT_DETECTED, "the inputs changed")
    return view(published=published(Plan(BACKBONE, RAMP_SET), withdrawn=(note,)))


CASES = {
    "another model": (view(fits=False), falling.another_model_is_served, Reason.MODEL_CHANGED),
    "switched off before": (forgotten(), falling.switched_off_already, Reason.DRIFT_DETECTED),
    "its ramp set is gone": (unloadable(), falling.ramp_set_is_gone, Reason.MODEL_CHANGED),
    "not certified": (
        view(stable=Config("plan", PLAN, replace(PROVEN, certificates=()))),
        falling.no_longer_allowed,
        Reason.NEWER_INTENT,
    ),
    "a worker's alarm": (alarmed(), falling.a_detector_alarms, Reason.DRIFT_DETECTED),
    "the fleet's alarm": (view(watch=LOUD), falling.the_fleet_is_over_budget, Reason.DRIFT_DETECTED),
    "it loses time": (view(measured=LOSES), falling.it_costs_time, Reason.EXITS_COST_TIME),
}


def test_a_plan_with_nothing_against_it_stays() -> None:
    assert [rule(view()) for rule in RULES] == [None] * len(RULES)


@pytest.mark.parametrize(("seen", "rule", "reason"), CASES.values(), ids=CASES)
def test_each_reason_is_found_by_one_rule_alone(seen: StableView, rule: falling.Rule, reason: Reason) -> None:
    found = {other: fall for other in RULES if (fall := other(seen)) is not None}

    assert list(found) == [rule]
    assert found[rule].reason == reason
    assert found[rule].message


def test_every_rule_is_tried() -> None:
    assert {rule for _, rule, _ in CASES.values()} == set(RULES)


def test_a_plan_without_exits_falls_for_another_model_alone() -> None:
    off = Config("baseline", Plan(BACKBONE, RAMP_SET), ConfigStatus("Baseline", "Certified"))
    for seen, rule, _ in CASES.values():
        expected = Fall if rule is falling.another_model_is_served else type(None)
        assert isinstance(rule(replace(seen, stable=off)), expected)


def test_the_set_goes_with_a_plan_whose_set_is_gone() -> None:
    fall = falling.ramp_set_is_gone(unloadable())

    assert fall is not None
    assert fall.set_is_gone
    assert fall.event is not None
    assert fall.event.warning


def test_a_set_that_is_on_trial_is_not_given_up() -> None:
    assert falling.ramp_set_is_gone(replace(unloadable(), ramp_sets=RampSetStatus(candidate=OTHER_SET))) is None


@pytest.mark.parametrize("seen", [unloadable(), alarmed(), view(watch=LOUD), view(measured=LOSES)])
def test_of_a_model_that_generates_no_message_speaks_of_exits(seen: StableView) -> None:
    writes = replace(seen.service.spec, output="TokenF1")
    fallen = [
        next(fall for rule in RULES if (fall := rule(each)) is not None)
        for each in (seen, replace(seen, service=replace(seen.service, spec=writes)))
    ]
    told = [f"{fall.message}; {fall.event.message if fall.event is not None else ''}" for fall in fallen]
    assert "exits are off" in told[0] and "exit" not in told[1]
    assert "the model answers alone" in told[1]
