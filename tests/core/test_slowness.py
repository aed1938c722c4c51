"""The slowness gate: a canary slower than allowed is noticed, whatever the lengths of texts; and where it need not be,
the gate says so.

Statistical bounds hold when a one-sided binomial test at 0.1 % does not refute them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench import slowness as bench
from bench.slowness import BEFORE, Judge, noticed, rejects, texts, wide
from fleet import Fleet, SimWorker, pool  # type: ignore[import-not-found]
from test_control_stories import canary_serves  # type: ignore[import-not-found]
from test_evidence import at_least, at_most

from offramp_core.control.codec import from_json, to_json
from offramp_core.control.objects import ArmTally, BothArms, GateStatus, RolloutStatus
from offramp_core.control.rollouts.gates import GateInput, slowness
from offramp_core.control.rollouts.slowness import LARGEST_CHEAP_EXPOSURE, most_judged
from offramp_core.evidence.exposure import LARGEST_BATCH_EXPOSURE, noticed_slowdown
from offramp_core.evidence.slow import MAX_LIMITS, BatchShape, Judged, by_shape, parse_limits, shape_of, slow_limits
from offramp_core.sketch import SecondsSketch

NOW = Judge(by_length=True, request_rate=100.0)
RUNS = 120


# --- what is noticed -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_canary_of_mixed_texts_a_fifth_slower_than_allowed_is_noticed() -> None:
    """In the step of the smallest weight, which has the least to go by, and by the time it may pass."""
    found = noticed(np.random.default_rng(1), texts, NOW, weight=5, runs=RUNS)
    assert at_least(round(found["noticed"] * RUNS), RUNS, 0.95), found
    assert found["waited"] < LARGEST_BATCH_EXPOSURE and found["excluded"] == pytest.approx(1.2)
    hidden = noticed(np.random.default_rng(1), texts, BEFORE, weight=5, runs=RUNS)
    assert hidden["noticed"] < 0.5, "limits by size alone are those of the longest texts"


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", [1.0, 1.05])
def test_a_canary_of_mixed_texts_within_its_allowance_is_rejected_in_at_most_one_percent(slowdown: float) -> None:
    rejected = bench.falsely_rejected(np.random.default_rng(2), texts, NOW, runs=60, slowdown=slowdown)
    assert at_most(rejected, 60, 0.01)


@pytest.mark.slow
def test_what_a_capped_step_says_to_exclude_is_noticed() -> None:
    rng, found = np.random.default_rng(3), 0
    for _ in range(RUNS):
        basis = NOW.basis(wide(rng, bench.SEEN_BEFORE), weight=25)
        assert basis.excluded is not None and basis.excluded > 1.2
        slower = (1 + bench.MAX_OVERHEAD) * basis.excluded
        found += rejects(rng, wide, NOW, basis=basis, weight=25, n=basis.needed, slowdown=slower)
    assert at_least(found, RUNS, 0.95)


def test_times_too_scattered_for_any_slowdown_exclude_none() -> None:
    rng = np.random.default_rng(4)
    anything = Judged(SecondsSketch({int(i): 1 for i in rng.integers(-3000, 3000, 500)}), 0.02)
    assert noticed_slowdown([anything], batches=200, weight=5, alpha=0.001) is None
    assert noticed_slowdown([], batches=200, weight=5, alpha=0.001) is None


def test_many_batches_a_second_are_waited_for_a_minute_and_few_no_longer_than_before() -> None:
    assert most_judged(request_rate=1.0, mean_rows=1.0) == LARGEST_BATCH_EXPOSURE
    assert most_judged(request_rate=0.0, mean_rows=0.0) == LARGEST_BATCH_EXPOSURE
    assert most_judged(request_rate=100.0, mean_rows=2.0) == 3_000
    assert most_judged(request_rate=1e6, mean_rows=1.0) == LARGEST_CHEAP_EXPOSURE


# --- what is said ----------------------------------------------------------------------------------


def reading(judged: int, *, excluded: float | None, needed: int = 2000) -> GateStatus:
    """The gate after so many batches, a tenth of each arm's slow."""
    tally = BothArms(
        ArmTally(judged=judged // 4, slow=judged // 40), ArmTally(judged=3 * judged // 4, slow=3 * judged // 40)
    )
    return slowness(GateInput(tally, 25, 0.01, 0.99, 3, needed, certified=True, slow_excluded=excluded))


def test_a_gate_that_passes_at_the_cap_says_what_it_does_not_exclude_and_what_it_does() -> None:
    capped = reading(2000, excluded=1.75)
    assert capped.state == "Clear"
    assert capped.message.endswith("cap of 2,000 batches reached: 1.2 x slower is not excluded, 1.75 x is")
    assert reading(2000, excluded=0.0).message.endswith("1.2 x slower is not excluded, nor is any other slowdown")
    ahead = reading(1200, excluded=1.75)
    assert ahead.state == "Undecided" and ahead.message.endswith("1.2 x slower will not be excluded, 1.75 x will")


@pytest.mark.parametrize("excluded", [1.2, None])
def test_a_gate_whose_exposure_was_not_cut_off_says_nothing_of_a_cap(excluded: float | None) -> None:
    """None is a step that an operator of before began."""
    assert "cap" not in reading(2000, excluded=excluded).message


def test_what_is_excluded_survives_storage() -> None:
    status = RolloutStatus(
        slow_excluded=0.0, slow_seconds_by_length={"4x128": 0.25}, gates=(reading(2000, excluded=0.0),)
    )
    assert from_json(RolloutStatus, to_json(status)) == status


# --- limits ----------------------------------------------------------------------------------------


def test_a_shape_that_is_hardly_known_has_the_limit_of_its_rows() -> None:
    limits = slow_limits({BatchShape(4, 16): SecondsSketch({-300: 80}), BatchShape(4, 512): SecondsSketch({-100: 19})})
    assert set(limits.by_shape) == {BatchShape(4, 16)}
    assert limits.of(BatchShape(4, 512)) == limits.by_rows[4] == pytest.approx(0.1353, rel=0.02)
    assert limits.of(BatchShape(4, 16)) == pytest.approx(0.00248, rel=0.02)
    assert limits.of(BatchShape(5, 16)) is None


def test_a_document_carries_the_limits_of_the_shapes_that_most_batches_have_and_no_more() -> None:
    execution = {BatchShape(n, 2**k): SecondsSketch({-200: 20 + n}) for n in range(1, 33) for k in range(4, 14)}
    listed = slow_limits(execution).by_shape
    assert len(listed) == MAX_LIMITS and BatchShape(32, 16) in listed and BatchShape(1, 16) not in listed


def test_limits_are_read_as_they_are_written() -> None:
    limits = slow_limits({BatchShape(4, 16): SecondsSketch({-300: 80}), BatchShape(2): SecondsSketch({-100: 30})})
    by_rows = {str(rows): seconds for rows, seconds in limits.by_rows.items()}
    assert parse_limits(by_rows, {str(shape): seconds for shape, seconds in limits.by_shape.items()}) == limits


@pytest.mark.parametrize("text", ["", "x", "4x", "x16", "4x16x2", "-4x16", "4 x 16", "٤x16", "1" * 30])
def test_what_names_no_shape_is_left_out_of_what_a_worker_reports(text: str) -> None:
    assert shape_of(text) is None
    assert by_shape([{text: {"-200": 3}, "2x16": {"-200": 4}}]) == {BatchShape(2, 16): SecondsSketch({-200: 4})}


# --- through an upgrade ----------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", ["", "many", "1.5", "9" * 400, "-", "٣"])
def test_a_bucket_that_is_no_number_takes_no_others_along(bucket: str) -> None:
    found = by_shape([{"4": {"-80": 3, bucket: 5, "-81": -2}}])
    assert {shape.rows: seconds.n for shape, seconds in found.items()} == {4: 3}
    assert slow_limits(found).of(BatchShape(4)) is not None


def test_workers_that_tell_no_lengths_are_judged_by_size_beside_others_that_tell_them() -> None:
    fleet = Fleet(pool(3000, seed=1))
    old, new = fleet.workers
    old.lengths = new.lengths = (16, 128)
    old.tells_lengths = False
    fleet.run(canary_serves)
    fleet.run(lambda f: all(judged_by(w) > 50 for w in f.workers), limit=60)
    document = fleet.published
    assert document is not None and set(document.slow_seconds) == {"1", "2", "3", "4"}
    assert {"4x16", "4x128"} <= set(document.slow_seconds_by_length)
    assert document.slow_seconds_by_length["4x16"] < document.slow_seconds["4"]
    fleet.run(lambda f: f.verdicts()[0] != "", limit=200)
    assert fleet.verdicts()[0] == "Succeeded"


def test_the_document_of_an_operator_that_knows_no_lengths_goes_on_as_it_is() -> None:
    """A new operator finds a step that the old one began: nothing is published anew, and nothing begins again."""
    fleet = Fleet(pool(3000, seed=1))
    for worker in fleet.workers:
        worker.lengths = (16, 128)
    fleet.run(canary_serves)
    name, rollout = next(iter(fleet.rollouts.items()))
    assert fleet.published is not None
    fleet.rollouts[name] = replace(
        rollout, status=replace(rollout.status, slow_seconds_by_length={}, slow_excluded=None)
    )
    fleet.published = replace(fleet.published, slow_seconds_by_length={})
    epoch = fleet.published.epoch
    fleet.step()
    assert fleet.published.epoch == epoch and fleet.rollouts[name].status.step == rollout.status.step


def judged_by(worker: SimWorker) -> int:
    """Batches that a worker has judged in the canary's epoch."""
    return sum(c["judged"] for (epoch, _), c in worker.counts.items() if epoch == worker.newest and "judged" in c)
