"""Budgets of the answers that name a class, from the spec over certificates to stops."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, pool  # type: ignore[import-not-found]
from scipy.stats import binom
from scores import IDS, REQUEST, recorded

from offramp_core.certify import (
    Certificate,
    Certified,
    NotCertified,
    SliceBudget,
    Subject,
    allowance,
    verify_certificate,
)
from offramp_core.certify import test_path as try_path
from offramp_core.control.spec import SliceObjective, parse_spec
from offramp_core.control.tuning.tuner import TunerView, tune_or_wait
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError, InvalidSpecError
from offramp_core.plan import Plan, RampThreshold, floor_threshold
from offramp_core.protocol import class_of, class_slice, slice_number
from offramp_core.records import ExitCosts, Records, records_from_arrays
from offramp_core.tuning import NoGain, Proposed, tune
from offramp_core.tuning import testable_slices as judged

SUBJECT = Subject(IDS, "b", "r")
COMMON, CONFUSED, RARE = 0, 1, 2
OTHERS = {"delta": 0.05, "test_index": 1, "consumed_through": None}


def classed(n: int, *, seed: int) -> Records:
    """Three classes; a ramp that is wrong mostly says CONFUSED, so that its answers are the worst."""
    rng = np.random.default_rng(seed + 77)
    records = recorded(n, 6, seed=seed)
    final = rng.choice(3, size=n, p=[0.5, 0.47, 0.03])
    other = np.where(final[:, None] == CONFUSED, COMMON, np.where(rng.random((n, 6)) < 0.95, CONFUSED, RARE))
    said = np.where(records.agrees, final[:, None], other)
    return replace(records, prediction=said, agrees=said == final[:, None], final=final)


def plan(*thresholds: float) -> Plan:
    return SUBJECT.plan(range(len(thresholds)), [floor_threshold(t) for t in thresholds])


PATH = [plan(*(t,) * 6) for t in np.linspace(0.02, 0.4, 30)]


def examined(b: Records, *slices: SliceBudget, **options: Any) -> Certified | NotCertified:
    return try_path(
        PATH, b, ramp_ids=IDS, **{"budget": 0.05, "delta": 0.05, "slices": slices, "stops": False, **options}
    )


def of(number: int, budget: float) -> SliceBudget:
    return SliceBudget(number, budget, "Answer")


def answered(records: Records, made: Plan) -> np.ndarray:
    """What a plan says to each row, one row after another."""
    assert records.prediction is not None and records.final is not None
    said = []
    for row in range(len(records)):
        label = records.final[row]
        for ramp in made.ramps:
            if records.uncertainty[row, IDS.index(ramp.id)] < np.float32(float(ramp.threshold)):
                label = records.prediction[row, IDS.index(ramp.id)]
                break
        said.append(int(label))
    return np.array(said)


# --- intent ----------------------------------------------------------------------------------------


def spec_of(**accuracy: Any) -> Any:
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.02", **accuracy}}
    return parse_spec({**MANIFEST, "objective": objective})


def test_classes_become_slices_and_one_with_its_own_budget_keeps_it() -> None:
    spec = spec_of(
        slices=[{"name": "night", "maxDisagreement": "0.03"}],
        classes=[{"class": 7, "maxDisagreement": "0.001"}, {"class": 1, "maxDisagreement": "0.002"}],
        everyClass={"count": 3, "maxDisagreement": "0.05"},
    )
    assert spec.slices == (
        SliceObjective("night", 0.03),
        *(SliceObjective(class_slice(c), b) for c, b in ((0, 0.05), (1, 0.002), (2, 0.05), (7, 0.001))),
    )
    assert [s.predicted for s in spec.slices] == [None, 0, 1, 2, 7]
    assert spec.objective_key != spec_of(slices=[{"name": "night", "maxDisagreement": "0.03"}]).objective_key


@pytest.mark.parametrize(
    ("accuracy", "complaint"),
    [
        ({"classes": [{"class": 1, "maxDisagreement": "0.1"}] * 2}, "classes: a class is named twice"),
        ({"classes": [{"class": -1, "maxDisagreement": "0.1"}]}, r"classes\[0\].class"),
        ({"classes": [{"class": "cat", "maxDisagreement": "0.1"}]}, r"classes\[0\].class"),
        ({"classes": [{"class": 1, "maxDisagreement": "0.6"}]}, r"classes\[0\].maxDisagreement"),
        ({"classes": [{"class": i, "maxDisagreement": "0.1"} for i in range(9)]}, "at most 8 classes"),
        ({"everyClass": {"count": 33, "maxDisagreement": "0.1"}}, "everyClass.count"),
        ({"everyClass": {"count": 3}}, "everyClass.maxDisagreement"),
        ({"slices": [{"name": "class/3", "maxDisagreement": "0.1"}]}, r"slices\[0\].name"),
    ],
)
def test_a_bad_class_is_refused_by_its_path(accuracy: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidSpecError, match=complaint):
        spec_of(**accuracy)


def test_the_name_of_a_slice_says_whether_it_is_a_class() -> None:
    assert [class_of(class_slice(n)) for n in (0, 3, 99_999)] == [0, 3, 99_999]
    assert [class_of(name) for name in ("night", "", "class/", "class/x", "class/-1", "class-3", "class/²")] == [
        None
    ] * 7
    assert slice_number(class_slice(3)) != 0


# --- certificates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out() -> Records:
    return classed(6000, seed=2)


@pytest.fixture(scope="module")
def proven(held_out: Records) -> Certified:
    result = examined(held_out, of(COMMON, 0.05), of(CONFUSED, 0.03))
    assert isinstance(result, Certified)
    return result


def test_a_class_is_counted_by_what_the_plan_itself_answers(held_out: Records, proven: Certified) -> None:
    said = answered(held_out, proven.plan)
    for found in proven.certificate.slices:
        mine = said == found.slice_id
        assert (found.n, found.k) == (int(mine.sum()), int((held_out.final[mine] != said[mine]).sum()))
        assert found.certified and found.p_value <= found.level
    confused = proven.certificate.slices[1]
    assert confused.n != int((held_out.final == CONFUSED).sum()), "or the reference's class would do as well"


def test_a_class_with_a_tight_budget_holds_the_plan_back(held_out: Records, proven: Certified) -> None:
    free = examined(held_out)
    assert isinstance(free, Certified)
    assert 0 < proven.on_test.saving < free.on_test.saving - 0.02
    mine = answered(held_out, free.plan) == CONFUSED
    assert np.mean(held_out.final[mine] != CONFUSED) > 0.03, "the free plan breaks it"


def test_all_promises_together_spend_no_more_than_the_test_may(proven: Certified) -> None:
    spent = proven.certificate.level + sum(s.level for s in proven.certificate.slices)
    assert spent == pytest.approx(allowance(0.05, 1))


def test_a_request_slice_and_a_class_of_one_number_are_two_things(held_out: Records) -> None:
    b = replace(held_out, slice_id=np.where(np.arange(len(held_out)) % 2, CONFUSED, 5))
    result = examined(b, SliceBudget(CONFUSED, 0.05), of(CONFUSED, 0.05))
    assert isinstance(result, Certified)
    request, answer = result.certificate.slices
    assert (request.n, request.title, answer.title) == (3000, "slice 1", "class 1")
    assert answer.n != request.n


def test_a_certificate_with_classes_is_verified_from_its_records(held_out: Records, proven: Certified) -> None:
    again = Certificate.from_mapping(json.loads(json.dumps(proven.certificate.to_mapping())))
    assert verify_certificate(again, proven.plan, records=held_out) is None
    swapped = replace(held_out, prediction=np.where(held_out.prediction == RARE, COMMON, held_out.prediction))
    assert verify_certificate(again, proven.plan, records=swapped) == "these are not the records it was made from"
    lied = replace(again, slices=(replace(again.slices[0], n=again.slices[0].n + 1), again.slices[1]))
    assert "class 0: " in (verify_certificate(lied, proven.plan, records=held_out) or "")


@pytest.mark.parametrize("missing", ["prediction", "final"])
def test_records_that_do_not_say_what_was_answered_certify_no_class(held_out: Records, missing: str) -> None:
    with pytest.raises(InvalidRecordsError, match="prediction or final is missing"):
        examined(replace(held_out, **{missing: None}), of(COMMON, 0.05))
    with pytest.raises(InvalidArgumentError, match="name each once"):
        examined(held_out, of(COMMON, 0.05), of(COMMON, 0.06))


@pytest.mark.slow
def test_a_class_beyond_its_budget_is_hardly_ever_certified() -> None:
    """The first plan keeps the budget of the class and the second just breaks it, with other answers that name it."""
    rng, runs, broken, n = np.random.default_rng(5), 2000, 0, 800
    budget, level = 0.04, allowance(0.5, 1) / 2
    path = [SUBJECT.plan((0,), [floor_threshold(0.2)]), SUBJECT.plan((0,), [floor_threshold(0.9)])]
    costs = ExitCosts(np.array([0.2] + [0.8 / 6] * 6), np.full(6, 0.001))
    for _ in range(runs):
        final, score = rng.integers(0, 2, n), rng.random((n, 6)).astype(np.float32)
        # Of the answers 1 a plan gives, 0.9 come from the exit under the bold one: 4.5 % of these are wrong, 4.05 % of
        # all.
        wrong = (rng.random(n) < 0.045)[:, None]
        said = np.where(wrong, 1 - final[:, None], final[:, None]) * np.ones((1, 6), dtype=np.int64)
        b = Records(score, ~np.repeat(wrong, 6, axis=1), np.ones(n, dtype=bool), costs, prediction=said, final=final)
        result = try_path(path, b, ramp_ids=IDS, budget=0.2, delta=0.5, slices=[of(1, budget)], stops=False)
        broken += isinstance(result, Certified) and result.plan == path[1]
    assert broken <= int(binom.isf(1e-3, runs, level))
    assert broken > 0.5 * runs * level, "or the test would be idle"


# --- tuning ----------------------------------------------------------------------------------------


def test_what_is_tuned_is_certified_for_the_classes_asked_for(held_out: Records) -> None:
    asked = judged(held_out, [of(CONFUSED, 0.03), of(RARE, 0.03), of(9, 0.03)], **OTHERS)
    assert asked == (of(CONFUSED, 0.03),), "the others are too rare, and are watched instead"
    outcome = tune(held_out, replace(REQUEST, max_disagreement=0.03, slices=asked))
    assert isinstance(outcome, Proposed)
    assert [(s.title, s.certified) for s in outcome.certificate.slices] == [("class 1", True)]


def test_which_classes_are_tested_does_not_hang_on_the_records_that_test_them(held_out: Records) -> None:
    later = np.arange(len(held_out)) > 0.2 * len(held_out)
    turned = replace(held_out, final=np.where(later, RARE, held_out.final))
    wanted = [of(CONFUSED, 0.03), of(RARE, 0.03)]
    assert judged(turned, wanted, **OTHERS) == judged(held_out, wanted, **OTHERS)


def test_another_precision_answers_with_its_own_backbone_at_the_end() -> None:
    n, rng = 40, np.random.default_rng(1)
    reference, lower = rng.integers(0, 3, n), rng.integers(0, 3, n)
    arrays = {
        "uncertainty": np.full((n, 3), 0.9, dtype=np.float32),
        "prediction": np.stack([reference, reference, lower], axis=1),
        "final": lower,
        "reference": reference,
        "ramp_id": np.array(["r00", "int8/r00", "int8/final"]),
        "ramp_precision": np.array(["fp32", "int8", "int8"]),
        "segment_seconds": np.ones(2),
        "ramp_seconds": np.array([0.1]),
        "int8_segment_seconds": np.full(2, 0.5),
        "int8_ramp_seconds": np.array([0.1]),
    }
    records = records_from_arrays(arrays)
    np.testing.assert_array_equal(records.final, reference)
    view = records.at("int8")
    np.testing.assert_array_equal(view.final, lower)
    made = Plan("b", "r", (RampThreshold("int8/r00", floor_threshold(0.1)),), precision="int8")
    result = try_path([made], view, ramp_ids=view.ramp_ids, budget=0.9, delta=0.9, slices=[of(1, 0.9)])
    assert isinstance(result, Certified)
    mine = lower == 1
    assert [(s.n, s.k) for s in result.certificate.slices] == [(int(mine.sum()), int((reference[mine] != 1).sum()))]


# --- the loop --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_class_over_its_budget_is_stopped_and_people_are_told_what_that_means() -> None:
    accuracy = {"maxDisagreement": "0.02", "classes": [{"class": 3, "maxDisagreement": "0.03"}]}
    fleet = Fleet(
        pool(4000, seed=1), {**MANIFEST, "objective": {"latency": {"threshold": "100ms"}, "accuracy": accuracy}}
    )
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    name = fleet.status.stable_config
    assert fleet.published is not None and fleet.published.slices == ("class/3",)
    for worker in fleet.workers:
        worker.night_wrong = 0.2
    fleet.run(lambda f: f.published is not None and f.published.stopped_slices == ("class/3",), limit=300)
    assert fleet.status.stable_config == name and not fleet.stable.exits_off
    told = [e.message for e in fleet.events if e.reason == "SliceStopped"]
    assert len(told) == 1 and "slice class/3 disagreed; its budget is 3.00%, so no exit gives such an answer" in told[0]


def test_a_class_whose_budget_no_plan_keeps_is_named(held_out: Records) -> None:
    refused = examined(held_out, of(COMMON, 0.2), of(CONFUSED, 0.0005))
    assert isinstance(refused, NotCertified) and refused.slices == (of(CONFUSED, 0.0005),)
    accuracy = {"maxDisagreement": "0.02", "classes": [{"class": 1, "maxDisagreement": "0.0005"}]}
    fleet = Fleet(
        pool(400, seed=1), {**MANIFEST, "objective": {"latency": {"threshold": "100ms"}, "accuracy": accuracy}}
    )
    fleet.run(lambda f: bool(f.status.stable_config), limit=20)
    outcome = NoGain("OverBudget", 0.1, 1000, 1, fleet.now, slices=refused.slices)
    snapshot = replace(fleet.snapshot(), tuning_outcome=outcome)
    view = TunerView(snapshot, fleet.status.tuning, fleet.configs[fleet.status.stable_config], None, fleet.now)
    view = replace(view, status=replace(view.status, requested_for=view.objective))
    assert tune_or_wait(view).status.message == "no plan could be certified within the budget of class/1"
