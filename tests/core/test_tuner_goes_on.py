"""A tuner that is asked for ever goes on: no number of tests, no budget and no pool ends it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, changed, pool  # type: ignore[import-not-found]

from offramp_core import tuning
from offramp_core.certify import allowance
from offramp_core.control.objects import TuningStatus
from offramp_core.control.snapshot import RecordStore
from offramp_core.control.tuning.tuner import MOST_LABELS, Tuned, TunerView, after_alarm, labels_awaited, tune_or_wait
from offramp_core.records import UNKNOWN_REPEATS, Records
from offramp_core.tuning import NeedsLabels

TEN_YEARS_OF_HOURS = 10 * 365 * 24
CLEAN = pool(4000, seed=1)


def settled(budget: str = "0.01") -> Fleet:
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": budget}}
    fleet = Fleet(CLEAN, {**MANIFEST, "objective": objective})
    for _ in range(3):
        fleet.step()
    return fleet


def view(fleet: Fleet, *, rows: int, fresh: int, status: TuningStatus) -> TunerView:
    """A pool of ``rows`` records, of which the newest ``fresh`` ones have been in no test."""
    snapshot = fleet.snapshot()
    base = pool(rows, seed=3)
    records: Records = replace(base, time=fleet.now - rows + np.arange(float(rows)))
    assert records.time is not None
    store = snapshot.observed.records
    assert store is not None
    store = RecordStore(records, store.backbone_digest, store.ramp_set_digest, store.ramp_ids)
    used = replace(status, consumed_through_at=float(records.time[-fresh - 1]))
    stable = fleet.configs[fleet.status.stable_config]
    return TunerView(
        changed(snapshot, records=store, tuning_running=False, tuning_outcome=None), used, stable, None, fleet.now
    )


def asked(told: Tuned) -> bool:
    return told.request is not None


def test_the_tenth_test_is_run_although_nine_have_used_most_of_a_full_pool() -> None:
    """Absolute counts asked for 20,723 labels of a pool that holds 20,000: no edit and no request to tune ever ended
    that."""
    fleet = settled()
    waiting = TuningStatus(state="CollectingLabels", tests_run=9, labels_needed=20_723)
    now = view(fleet, rows=20_000, fresh=4_000, status=waiting)
    assert asked(tune_or_wait(now))


def test_where_few_labels_are_awaited_their_number_is_told_ten_times_on_the_way() -> None:
    """In steps of 100 "0 of 100 labels" stood there until there were enough."""
    fleet = settled("0.05")
    told = [tune_or_wait(view(fleet, rows=2_000, fresh=n, status=TuningStatus())).status for n in (9, 55, 99)]
    needed = told[0].labels_needed
    assert 100 < needed < 200 and [status.labels for status in told] == [0, 52, 91]
    assert told[1].message.startswith(f"52 of {needed} labels; ")


def test_fresh_labels_are_what_is_counted_and_awaited() -> None:
    fleet = settled()
    now = view(fleet, rows=20_000, fresh=400, status=TuningStatus(tests_run=9))
    told = tune_or_wait(now)
    assert not asked(told)
    assert told.status.labels == 400
    assert 400 < told.status.labels_needed < 3_000
    assert told.status.message.startswith(f"400 of {told.status.labels_needed} labels")


@pytest.mark.parametrize(("budget", "labels"), [("0.01", 1_000), ("0.05", 300), ("0.1", 300), ("0.35", 100)])
def test_a_first_attempt_waits_for_fewer_labels_where_the_budget_is_that_of_whole_answers(
    budget: str, labels: int
) -> None:
    fleet = settled(budget)
    now = view(fleet, rows=2_000, fresh=50, status=TuningStatus())
    assert labels_awaited(replace(now, status=replace(now.status, consumed_through_at=None))) == labels


def test_what_a_plan_near_its_budget_asks_for_does_not_outlive_the_objective_nor_patience() -> None:
    fleet = settled()
    now = view(fleet, rows=6_000, fresh=5_000, status=TuningStatus(tests_run=2))
    for objective, most in (("another", 1.0), (now.objective, 4.0)):
        status = replace(now.status, labels_needed=1_000_000, requested_for=objective)
        worth = tuning.testable_labels(0.01, allowance(0.05, 3))
        assert labels_awaited(replace(now, status=status)) <= most * worth


def test_labels_that_are_worth_less_are_awaited_in_proportion() -> None:
    fleet = settled()
    now = view(fleet, rows=6_000, fresh=100, status=TuningStatus(tests_run=3))
    alike = replace(now, status=replace(now.status, design_effect=10.0))
    assert labels_awaited(alike) == pytest.approx(10 * labels_awaited(now), rel=0.01)


@pytest.mark.parametrize("budget", [0.05, 0.01, 0.002, 0.001, 0.0005])
def test_a_test_every_hour_for_ten_years_never_asks_for_more_than_is_kept(budget: float) -> None:
    """Each test is stricter than the last; the labels that it is worth grow with the logarithm of how many there
    were."""
    first = tuning.testable_labels(budget, allowance(0.05, 1))
    last = tuning.testable_labels(budget, allowance(0.05, TEN_YEARS_OF_HOURS))
    assert last <= min(MOST_LABELS, 9 * first)


def test_a_budget_that_no_sample_proves_is_said_and_audits_stay_few() -> None:
    fleet = settled("0.00001")
    told = tune_or_wait(view(fleet, rows=6_000, fresh=5_000, status=TuningStatus()))
    assert not asked(told)
    assert told.status.state == "Idle"
    assert "at most 200000 are kept" in told.status.message and "maxDisagreement" in told.status.message
    for _ in range(5):
        fleet.step()
    assert fleet.status.tuning.audit == "Quiet"


def test_where_mistakes_come_together_too_far_the_streams_are_asked_for() -> None:
    fleet = settled()
    before = view(fleet, rows=6_000, fresh=5_000, status=TuningStatus(tests_run=1))
    status = replace(before.status, requested_for=before.objective)
    outcome = NeedsLabels(5_000, 10_000, design_effect=None)
    told = tune_or_wait(replace(before, status=status, snapshot=replace(before.snapshot, tuning_outcome=outcome)))
    assert told.status.state == "CollectingLabels"
    assert "name the streams" in told.status.message


def without_names(now: TunerView) -> TunerView:
    store = now.snapshot.observed.records
    assert store is not None
    unnamed = replace(store, records=replace(store.records, stream=None))
    return replace(now, snapshot=changed(now.snapshot, records=unnamed))


def test_without_names_a_certificate_waits_until_scenes_of_many_sources_would_show() -> None:
    """Of first certificates from 1,000 labels of 64 sources without names, in scenes of 30, 22 of 40 were over
    budget."""
    fleet = settled()
    now = view(fleet, rows=2_000, fresh=1_990, status=TuningStatus())
    assert asked(tune_or_wait(now))
    told = tune_or_wait(without_names(now))
    assert not asked(told)
    assert told.status.labels_needed == 5_000
    assert f"{labels_awaited(now)} where requests name their sources" in told.status.message
    more = tune_or_wait(without_names(view(fleet, rows=5_000, fresh=1_200, status=TuningStatus(tests_run=1))))
    assert more.request is not None and more.request.scene_rows == 20_000 and more.request.wary
    many = tune_or_wait(without_names(view(fleet, rows=20_000, fresh=1_200, status=TuningStatus(tests_run=1))))
    assert many.request is not None and not many.request.wary


def test_one_name_of_a_gateway_is_no_name() -> None:
    fleet = settled()
    now = view(fleet, rows=2_000, fresh=1_990, status=TuningStatus())
    store = now.snapshot.observed.records
    assert store is not None
    gateway = replace(store, records=replace(store.records, stream=np.ones(len(store.records), dtype=np.int64)))
    assert not asked(tune_or_wait(replace(now, snapshot=changed(now.snapshot, records=gateway))))


@pytest.mark.parametrize(
    ("kind", "believed"),
    [
        ("renamed every 300", False),
        ("most of all", False),
        ("four, one at a time", False),
        ("four, one at a time, rows in pairs", False),
        ("four, one at a time, 2 % recorded", False),
        ("four, one at a time, eight requests each, 2 % recorded", False),
        ("four, one at a time, 2 % recorded, most by workers of the release before", False),
        ("four, interleaved, 2 % recorded, most by workers of the release before", True),
        ("four, interleaved", True),
        ("four, interleaved, 2 % recorded", True),
        ("sixteen, requests of 20 rows", True),
        ("users, many of them once", True),
        ("users, many of them once, often twice in a row, 2 % recorded", True),
        ("cameras, three requests at a time, 2 % recorded", True),
        ("cameras, three requests at a time", True),
    ],
)
def test_a_name_that_most_requests_have_while_it_is_there_is_that_of_a_gateway(kind: str, believed: bool) -> None:
    """Of first certificates of 64 sources behind a gateway that was renamed every 300 requests 25 of 40 were over
    budget, 17 of 40 where 88 % of the requests came from one and the others from three clients, and 28 of 40 where four
    took turns of 50 requests."""
    fleet, i, rng = settled(), np.arange(2_000), np.random.default_rng(4)
    now = view(fleet, rows=2_000, fresh=1_990, status=TuningStatus())
    stream = {
        "renamed every 300": i // 300 + 1,
        "most of all": rng.choice(4, size=2_000, p=[0.88, 0.04, 0.04, 0.04]) + 1,
        "four, one at a time": i // 50 % 4 + 1,
        "four, one at a time, rows in pairs": i // 50 % 4 + 1,
        "four, one at a time, 2 % recorded": rng.integers(1, 5, 2_000),
        "four, one at a time, eight requests each, 2 % recorded": rng.integers(1, 5, 2_000),
        "four, one at a time, 2 % recorded, most by workers of the release before": rng.integers(1, 5, 2_000),
        "four, interleaved, 2 % recorded, most by workers of the release before": rng.integers(1, 5, 2_000),
        "four, interleaved": rng.integers(1, 5, 2_000),
        "four, interleaved, 2 % recorded": rng.integers(1, 5, 2_000),
        "sixteen, requests of 20 rows": rng.integers(1, 17, 100).repeat(20),
        "users, many of them once": rng.geometric(0.003, 2_000),
        "users, many of them once, often twice in a row, 2 % recorded": rng.geometric(0.003, 2_000),
        "cameras, three requests at a time, 2 % recorded": rng.integers(1, 65, 2_000),
        "cameras, three requests at a time": rng.integers(1, 65, 667).repeat(3)[:2_000],
    }[kind]
    store = now.snapshot.observed.records
    assert store is not None
    rows = 20 if "20 rows" in kind else 2 if "pairs" in kind else 1
    time = fleet.now - 2_000 + np.repeat(np.arange(2_000 // rows) * float(rows), rows)
    follow = {"one at a time": 0.7, "eight": 0.47, "in a row": 0.06, "three requests": 0.02}
    repeats = rng.random(2_000) < next((share for words, share in reversed(follow.items()) if words in kind), 0.01)
    told = (
        np.where("before" in kind and rng.random(2_000) < 0.75, UNKNOWN_REPEATS, repeats)
        if "recorded" in kind
        else None
    )
    named = replace(store, records=replace(store.records, stream=stream.astype(np.int64), time=time, repeats=told))
    status = replace(now.status, consumed_through_at=None)
    told = tune_or_wait(replace(now, status=status, snapshot=changed(now.snapshot, records=named)))
    assert asked(told) == believed


def test_dense_records_of_the_night_are_counted_as_those_of_the_day_are() -> None:
    """Taken as they were, 19,000 of the night let 1,200 of the day be tested, of which 380 more were looked at: 7 and 9
    of 20 certificates were over budget."""
    fleet = settled()
    now = without_names(view(fleet, rows=20_000, fresh=1_200, status=TuningStatus(tests_run=1)))
    store = now.snapshot.observed.records
    assert store is not None
    rate = np.where(np.arange(20_000) < 18_800, 1.0, 0.02).astype(np.float32)
    draw = (np.random.default_rng(1).random(20_000) * rate).astype(np.float32)
    night = replace(store, records=replace(store.records, draw=draw, audit_rate=rate))
    told = tune_or_wait(replace(now, snapshot=changed(now.snapshot, records=night)))
    assert not asked(told) and told.status.labels_needed == pytest.approx(4_700, abs=100)


def test_records_from_before_an_alarm_thin_out_none_of_those_after_it() -> None:
    fleet = settled()
    now = without_names(view(fleet, rows=8_000, fresh=7_990, status=TuningStatus(tests_run=1)))
    store = now.snapshot.observed.records
    assert store is not None
    rate = np.where(np.arange(8_000) < 2_000, 0.02, 1.0).astype(np.float32)
    draw = (np.random.default_rng(1).random(8_000) * rate).astype(np.float32)
    quiet = changed(now.snapshot, records=replace(store, records=replace(store.records, draw=draw, audit_rate=rate)))
    assert not asked(tune_or_wait(replace(now, snapshot=quiet)))
    alarmed = replace(now.status, records_since_at=fleet.now - 6_000)
    assert asked(tune_or_wait(replace(now, snapshot=quiet, status=alarmed)))


def test_thin_records_of_a_quiet_time_show_no_scenes_of_a_dense_one() -> None:
    """13 of 150 certificates were over budget where 19,000 records of quiet audits lay beside 1,200 dense ones."""
    fleet = settled()
    now = without_names(view(fleet, rows=20_000, fresh=1_200, status=TuningStatus(tests_run=1)))
    store = now.snapshot.observed.records
    assert store is not None
    assert asked(tune_or_wait(now))
    rate = np.where(np.arange(20_000) < 18_800, 0.02, 1.0).astype(np.float32)
    draw = (np.random.default_rng(1).random(20_000) * rate).astype(np.float32)
    thinned = replace(store, records=replace(store.records, draw=draw, audit_rate=rate))
    told = tune_or_wait(replace(now, snapshot=changed(now.snapshot, records=thinned)))
    assert not asked(told) and told.status.labels_needed == 5_000


def test_after_an_alarm_records_of_before_show_no_scenes_of_the_new_inputs() -> None:
    fleet = settled()
    now = without_names(view(fleet, rows=20_000, fresh=5_000, status=TuningStatus(tests_run=1)))
    assert asked(tune_or_wait(now))
    alarmed = replace(now, status=replace(now.status, records_since_at=fleet.now - 3_000))
    assert not asked(tune_or_wait(alarmed))


def told_of(fleet: Fleet, outcome: NeedsLabels, status: TuningStatus, *, fresh: int) -> tuple[TunerView, Tuned]:
    before = view(fleet, rows=fresh + 10, fresh=fresh, status=status)
    own = replace(before.status, requested_for=before.objective)
    now = replace(before, status=own)
    return now, tune_or_wait(replace(now, snapshot=replace(now.snapshot, tuning_outcome=outcome)))


def test_what_few_labels_seem_worth_is_measured_again_before_a_proof_would_take_that_many() -> None:
    """The light changed once within the first labels of a camera: 880 of them seemed to be worth one, and nobody ever
    looked again."""
    fleet = settled()
    outcome = NeedsLabels(1_000, 600_000, design_effect=880.0)
    now, told = told_of(fleet, outcome, TuningStatus(), fresh=1_000)
    assert told.status.state == "Idle" and "measured again at 2000" in told.status.message
    waiting = replace(now, status=replace(told.status, consumed_through_at=now.status.consumed_through_at))
    assert not asked(tune_or_wait(waiting))
    more = view(fleet, rows=2_100, fresh=2_050, status=told.status)
    assert asked(tune_or_wait(more))
    next_day = replace(waiting, now=waiting.now + 86_401)
    assert asked(tune_or_wait(next_day)), "where load follows the day no pool may ever hold twice the labels"


def test_without_names_a_day_alone_is_no_reason_to_measure_again() -> None:
    """One of many looks at as few labels shows no scenes: within a year of daily ones at 5,400 labels of 64 sources
    without names, in scenes of 100 to 300, 21 to 28 of 30 to 40 first certificates were over budget."""
    fleet = settled()
    outcome = NeedsLabels(5_400, 40_000, design_effect=20.0)
    now, told = told_of(fleet, outcome, TuningStatus(), fresh=5_400)
    next_day = replace(now, now=now.now + 86_401, status=replace(told.status, consumed_through_at=None))
    assert "or in a day" in told.status.message and asked(tune_or_wait(next_day))
    waits = tune_or_wait(without_names(next_day))
    assert not asked(waits) and waits.status.labels_needed == 10_800
    unnamed = tune_or_wait(without_names(replace(now, snapshot=replace(now.snapshot, tuning_outcome=outcome))))
    assert "10800" in unnamed.status.message and "day" not in unnamed.status.message
    twice = without_names(view(fleet, rows=10_900, fresh=10_850, status=told.status))
    assert asked(tune_or_wait(twice))


def test_a_clock_that_was_a_year_ahead_postpones_a_measurement_by_a_day() -> None:
    fleet = settled()
    now, told = told_of(fleet, NeedsLabels(1_000, 600_000, design_effect=880.0), TuningStatus(), fresh=1_000)
    ahead = replace(told.status, remeasure_by_at=now.now + 366 * 86_400, consumed_through_at=None)
    seen = tune_or_wait(replace(now, status=ahead))
    assert not asked(seen) and seen.status.remeasure_by_at == now.now + 86_400
    assert asked(tune_or_wait(replace(now, status=seen.status, now=now.now + 86_401)))


def test_an_alarm_and_another_objective_end_what_labels_seemed_to_be_worth() -> None:
    fleet = settled()
    hopeless = TuningStatus(design_effect=880.0, labels_needed=2_000, remeasure_at=2_000, requested_for="another")
    now = view(fleet, rows=2_000, fresh=1_500, status=hopeless)
    alarmed = after_alarm(replace(now.status, requested_for=now.objective), now=0.0)
    assert asked(tune_or_wait(now)) and asked(tune_or_wait(replace(now, status=alarmed)))


@pytest.mark.parametrize("effect", [None, 20.0])
def test_a_tuning_that_cannot_say_what_labels_are_worth_is_not_begun_again_at_once(effect: float | None) -> None:
    """From 2,780 labels on one followed the other in every pass."""
    fleet = settled()
    now, told = told_of(fleet, NeedsLabels(3_000, 14_000, design_effect=effect), TuningStatus(), fresh=3_000)
    status = replace(told.status, consumed_through_at=now.status.consumed_through_at)
    assert not asked(tune_or_wait(replace(now, status=status)))
    assert status.labels_needed == status.remeasure_at == 6_000


def test_with_as_many_labels_as_are_ever_kept_it_is_measured_again_once_a_day() -> None:
    fleet = settled()
    outcome = NeedsLabels(MOST_LABELS, 600_000, design_effect=880.0)
    now, told = told_of(fleet, outcome, TuningStatus(), fresh=4_000)
    assert told.status.state == "Idle" and "at most 200000 are kept" in told.status.message
    later = replace(now, status=replace(told.status, consumed_through_at=now.status.consumed_through_at))
    assert not asked(tune_or_wait(later))
    eager = replace(now.status, eager_since_at=now.now - 20 * 86_400, audit_rate=1.0)
    again = replace(now, status=eager, snapshot=replace(now.snapshot, tuning_outcome=outcome))
    assert tune_or_wait(again).status.next_attempt_at == now.now + 86_400, "however long audits were many for it"
    assert asked(tune_or_wait(replace(later, now=now.now + 86_401)))


def test_a_few_rows_of_a_quiet_while_do_not_thin_out_those_of_an_eager_one() -> None:
    """With them only two of a hundred eager rows would count, and a tuning that had its labels in seconds waited for
    minutes."""
    fleet = settled()
    now = view(fleet, rows=2_500, fresh=1_500, status=TuningStatus(tests_run=1))
    store = now.snapshot.observed.records
    assert store is not None and store.records.time is not None
    rate = np.where(np.arange(2_500) < 1_100, 0.02, 1.0).astype(np.float32)
    draw = (np.random.default_rng(1).random(2_500) * rate).astype(np.float32)
    records = replace(store.records, draw=draw, audit_rate=rate)
    eager = replace(now.status, eager_since_at=float(store.records.time[1_100]) - 0.5)
    thinned = replace(now, snapshot=changed(now.snapshot, records=replace(store, records=records)))
    assert tune_or_wait(thinned).status.labels < 200
    told = tune_or_wait(replace(thinned, status=eager))
    assert told.request is not None and told.status.labels == 1_400
    assert told.request.consumed_through == eager.eager_since_at


@pytest.mark.parametrize(("named", "told"), [("each", True), ("cameras", False), ("nobody", False)])
def test_a_stream_for_each_request_is_told_of_at_every_attempt(named: str, told: bool) -> None:
    fleet = settled()
    before = view(fleet, rows=2_000, fresh=1_000, status=TuningStatus(tests_run=1))
    store = before.snapshot.observed.records
    assert store is not None
    stream = {"each": np.arange(1, 2_001), "cameras": np.arange(2_000) % 8 + 1, "nobody": np.zeros(2_000)}[named]
    records = replace(store.records, stream=stream.astype(np.int64))
    snapshot = changed(before.snapshot, records=replace(store, records=records), tuning_outcome=NeedsLabels(900, 1_200))
    status = replace(before.status, requested_for=before.objective)
    seen = tune_or_wait(replace(before, status=status, snapshot=snapshot))
    assert ("StreamsAllDiffer" in [event.reason for event in seen.events]) == told
