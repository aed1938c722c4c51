"""Slices: groups of requests with a budget of their own, from the spec over evidence and stops to certificates."""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet import BACKBONE, MANIFEST, RAMP_SET, Fleet, changed, pool  # type: ignore[import-not-found]
from metering import PLAN, looked
from scipy.stats import binom

from offramp_core.control.objects import Measured, SliceUse
from offramp_core.control.spec import SliceObjective, parse_spec
from offramp_core.control.tuning.tuner import TunerView, tune_or_wait
from offramp_core.errors import InvalidSpecError
from offramp_core.evidence.meter import HoldbackMeter
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import slice_number
from offramp_core.records import Records
from offramp_core.tuning import Proposed, TuningRequest, tune

NIGHT = {"name": "night", "maxDisagreement": "0.03"}


def manifest(*slices: dict[str, Any]) -> dict[str, Any]:
    accuracy = {"maxDisagreement": "0.02", "slices": list(slices)}
    return {**MANIFEST, "objective": {"latency": {"threshold": "100ms"}, "accuracy": accuracy}}


# --- intent ----------------------------------------------------------------------------------------


def test_slices_are_read_and_belong_to_what_a_plan_is_tuned_for() -> None:
    spec = parse_spec(manifest(NIGHT, {"name": "vip-1", "maxDisagreement": "0.001"}))
    assert spec.slices == (SliceObjective("night", 0.03), SliceObjective("vip-1", 0.001))
    keys = {parse_spec(manifest(*s)).objective_key for s in ((), (NIGHT,), ({**NIGHT, "maxDisagreement": "0.04"},))}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        ([NIGHT, NIGHT], "named twice"),
        ([{"name": "Night", "maxDisagreement": "0.1"}], "slices[0].name"),
        ([{"name": "n", "maxDisagreement": "0"}], "slices[0].maxDisagreement"),
        ([{"name": "n"}], "slices[0].maxDisagreement"),
        ([{"name": f"s{i}", "maxDisagreement": "0.1"} for i in range(9)], "at most 8"),
    ],
)
def test_a_bad_slice_is_refused_by_its_path(slices: list[Any], complaint: str) -> None:
    with pytest.raises(InvalidSpecError, match=complaint.replace("[", r"\[")):
        parse_spec(manifest(*slices))


def test_a_name_has_the_same_number_everywhere_and_none_is_zero() -> None:
    assert slice_number("night") == zlib.crc32(b"night") % 2**31
    assert slice_number("") == 0
    assert len({slice_number(f"s{i}") for i in range(1000)}) == 1000


# --- evidence --------------------------------------------------------------------------------------


def audited(*counts: tuple[str, int, int]) -> HoldbackMeter:
    meter = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0)
    for name, n, k in counts:
        meter.count_audits(name, audited=n, disagreements=k)
    return meter


def uses(meter: HoldbackMeter, *, before: Measured | None = None, **budgets: float) -> dict[str, SliceUse]:
    asked = [SliceObjective(name, budget) for name, budget in budgets.items()]
    seen = looked(meter, slices=asked, **({} if before is None else {"before": before}))
    return {use.name: use for use in seen.slices}


def test_the_slice_that_is_surely_over_its_budget_is_stopped_and_the_others_are_not() -> None:
    found = uses(audited(("night", 300, 30), ("day", 3000, 30)), night=0.02, day=0.02, unheard=0.02)
    assert {name: use.stopped for name, use in found.items()} == {"night": True, "day": False, "unheard": False}
    assert (found["night"].audited, found["night"].disagreements) == (300, 30)


def test_a_stop_lasts_while_the_plan_serves_and_ends_with_a_larger_budget() -> None:
    asked = [SliceObjective("night", 0.02)]
    first = looked(audited(("night", 300, 30)), slices=asked)
    later = audited(("night", 30_000, 30))  # since it is stopped, nothing disagrees any more
    assert looked(later, before=first, slices=asked).slices[0].stopped
    tighter = looked(later, before=first, slices=[SliceObjective("night", 0.01)])
    assert stopped(tighter), "whoever broke 2 % broke 1 %"
    assert stopped(looked(later, before=tighter, slices=asked)), "back at 2 %"
    relaxed = looked(later, before=first, slices=[SliceObjective("night", 0.2)]).slices[0]
    assert (relaxed.budget, relaxed.stopped) == (0.2, False)
    assert looked(later, before=first, slices=[]).slices == ()


def stopped(measured: Measured) -> bool:
    return measured.slices[0].stopped


def test_a_stop_outlasts_an_edit_of_the_holdback_which_begins_measuring_anew() -> None:
    asked = [SliceObjective("night", 0.02)]
    first = looked(audited(("night", 300, 30)), slices=asked)
    for share in (0.05, 0.0, 0.02):
        first = looked(before=first, slices=asked, share=share)
        assert stopped(first) and first.slices[0].audited == 0


def test_a_stop_comes_back_with_its_plan_and_its_slice_but_not_on_other_inputs() -> None:
    asked, other = [SliceObjective("night", 0.02)], replace(PLAN, ramps=PLAN.ramps[:1])
    first = looked(audited(("night", 300, 30)), slices=asked)
    assert stopped(looked(before=looked(before=first), slices=asked)), "taken from the spec and declared again"
    for away in (other, exits_off_plan(backbone_digest=BACKBONE, ramp_set_digest=RAMP_SET)):
        meanwhile = looked(before=first, slices=asked, plan=away)
        assert not any(use.stopped for use in meanwhile.slices)
        assert stopped(looked(before=meanwhile, slices=asked))
        assert not stopped(looked(before=meanwhile.after_change(away), slices=asked))
    assert stopped(first.after_change(PLAN)), "what serves goes on as it is"


def test_a_status_of_an_operator_that_knew_stops_in_slices_alone_stops_no_less() -> None:
    asked = [SliceObjective("night", 0.02)]
    first = replace(looked(audited(("night", 300, 30)), slices=asked), stops=())
    assert stopped(looked(before=first, slices=asked, share=0.3))


@pytest.mark.slow
def test_slices_at_their_budget_are_hardly_ever_stopped() -> None:
    """Three slices, looked at with every new disagreement, at 95 % together."""
    rng, runs, stopped = np.random.default_rng(1), 400, 0
    asked = [SliceObjective(name, 0.02) for name in "abc"]
    for _ in range(runs):
        meter, seen = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0), Measured()
        for _ in range(20):
            for name in "abc":
                meter.count_audits(name, audited=50, disagreements=int(rng.binomial(50, 0.02)))
            seen = looked(meter, before=seen, slices=asked, slice_alpha=0.05)
        stopped += any(use.stopped for use in seen.slices)
    assert stopped <= int(binom.isf(1e-3, runs, 0.05))


# --- the loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Fleet:
    fleet = Fleet(pool(4000, seed=1), manifest(NIGHT))
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


@pytest.fixture
def fleet(served: Fleet) -> Fleet:
    return copy.deepcopy(served)


@pytest.mark.slow
def test_a_slice_over_its_budget_stops_leaving_early_while_the_rest_goes_on(fleet: Fleet) -> None:
    name = fleet.status.stable_config
    assert fleet.published is not None and fleet.published.slices == ("night",)
    for worker in fleet.workers:
        worker.night_wrong = 0.2
    fleet.run(lambda f: f.published is not None and f.published.stopped_slices == ("night",), limit=300)
    epoch = fleet.published.epoch
    for _ in range(20):
        fleet.step()
    assert fleet.status.stable_config == name and not fleet.stable.exits_off
    assert fleet.published.epoch == epoch, "one stop is one epoch"
    events = [e for e in fleet.events if e.reason == "SliceStopped"]
    assert len(events) == 1 and "slice night disagreed; its budget is 3.00%" in events[0].message
    assert all(w.document is not None and w.document.stopped_slices == ("night",) for w in fleet.workers)


EDITS = {"more": {"holdback": "0.1"}, "none": {"holdback": "0"}}


@pytest.mark.slow
@pytest.mark.parametrize("ramps", EDITS.values(), ids=EDITS)
def test_an_edited_holdback_opens_no_stopped_slice(fleet: Fleet, ramps: dict[str, str]) -> None:
    for worker in fleet.workers:
        worker.night_wrong = 0.2
    fleet.run(lambda f: f.published is not None and f.published.stopped_slices == ("night",), limit=300)
    plan = fleet.status.stable_config
    fleet.edit(ramps=ramps)
    for _ in range(40):
        fleet.step()
        assert fleet.published is not None and fleet.published.stopped_slices == ("night",)
    assert fleet.status.stable_config == plan
    assert fleet.published.holdback_share == float(ramps["holdback"])
    assert sum(e.reason == "SliceStopped" for e in fleet.events) == 1


def test_a_plan_that_comes_back_after_disabled_finds_its_slice_stopped(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.night_wrong = 0.2
    fleet.run(lambda f: f.published is not None and f.published.stopped_slices == ("night",), limit=300)
    plan = fleet.status.stable_config
    fleet.edit(ramps={"mode": "Disabled"})
    fleet.run(lambda f: f.stable.exits_off, limit=5)
    fleet.edit(ramps={"mode": "Auto"})
    while fleet.status.stable_config != plan:
        fleet.step()
    assert fleet.published is not None and fleet.published.stopped_slices == ("night",)


def test_another_plan_begins_without_stops(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.night_wrong = 0.2
    fleet.run(lambda f: f.published is not None and f.published.stopped_slices == ("night",), limit=300)
    fleet.edit(ramps={"mode": "Disabled"})
    fleet.run(lambda f: f.stable.exits_off, limit=5)
    fleet.step()
    assert fleet.published is not None and (fleet.published.slices, fleet.published.stopped_slices) == ((), ())


# --- tuning ----------------------------------------------------------------------------------------


def request(fleet: Fleet, slice_id: np.ndarray | None) -> tuple[Records, TuningRequest]:
    """What a first tuning on the fleet's records asks for."""
    store = fleet._store()
    assert store is not None
    store = replace(store, records=replace(store.records, slice_id=slice_id))
    status = replace(
        fleet.status.tuning, tuned_for="", labels_needed=0, next_attempt_at=None, consumed_through_at=None, tests_run=0
    )
    stable = fleet.configs[fleet.status.stable_config]
    asked = tune_or_wait(TunerView(changed(fleet.snapshot(), records=store), status, stable, None, fleet.now)).request
    assert asked is not None
    return store.records, replace(asked, current=None, min_gain=0.0)


def labelled(fleet: Fleet) -> int:
    store = fleet._store()
    assert store is not None
    return len(store.records)


def test_what_is_tuned_is_certified_for_every_slice_that_has_labels(fleet: Fleet) -> None:
    number = slice_number("night")
    records, asked = request(fleet, np.where(np.arange(labelled(fleet)) % 2, number, 0))
    assert [(s.slice_id, s.budget) for s in asked.slices] == [(number, 0.03)]
    outcome = tune(records, asked)
    assert isinstance(outcome, Proposed)
    assert [(s.slice_id, s.certified) for s in outcome.certificate.slices] == [(number, True)]


def test_a_slice_that_is_too_rare_for_a_certificate_keeps_nobody_from_theirs(fleet: Fleet) -> None:
    rare = np.where(np.arange(labelled(fleet)) < 40, slice_number("night"), 0)
    records, asked = request(fleet, rare)
    assert asked.slices == ()
    assert isinstance(tune(records, asked), Proposed)


def test_records_of_workers_that_know_no_slices_are_tuned_without(fleet: Fleet) -> None:
    assert request(fleet, None)[1].slices == ()
