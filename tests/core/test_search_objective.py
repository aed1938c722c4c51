"""What a plan is worth: mean, tail and busy time, by batch size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scores import recorded, small
from search_oracle import least, seconds

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import evaluate
from offramp_core.records import Records
from offramp_core.search.objective import Charges, Pricing, Weights, price
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import best_thresholds

# One ramp in the middle. A batch takes 1 + b seconds before it and 2 + 3b behind; the ramp 0.1 + 0.05b, regrouping 0.2.
AFFINE = Profile(
    "by hand",
    1,
    tuple(BatchProfile(b, 3.0 + 4 * b, (1.0 + b, 2.0 + 3 * b), (0.1 + 0.05 * b,), 0.2) for b in (1, 2, 4, 8)),
)


def affine(n: int = 10) -> Records:
    return replace(recorded(n, 1, seed=0), profile=AFFINE)


def priced(seed: int, *, n_ramps: int | None = None) -> tuple[Records, Pricing]:
    """A small case with ties and a random price list, some of it free."""
    rng = np.random.default_rng(seed + 5)
    records = small(seed, max_rows=8, n_ramps=n_ramps)
    r = records.n_ramps

    def charges() -> Charges:
        return Charges(
            rng.random(r + 1) * (rng.random(r + 1) < 0.8) + 1e-3,
            rng.random(r) * 0.05,
            rng.random(r) * 0.05 * (rng.random() < 0.5),
            float(rng.random()) * 0.3,
        )

    mean, tail, busy = rng.random(3) * (rng.random(3) < 0.6)
    percentile = float(rng.choice([0.2, 0.5, 0.75, 0.95, 1.0]))
    weights = Weights(float(mean), float(tail) if mean + tail + busy else 1.0, float(busy), percentile)
    return records, Pricing(charges(), charges(), weights)


def assert_thresholds_are_optimal(seed: int) -> None:
    records, pricing = priced(seed)
    active, errors = tuple(range(records.n_ramps)), seed % 4
    best = least(records, [active], pricing, lambda mistakes: mistakes.sum(axis=1) <= errors)
    plan = best_thresholds(records, active, max_errors=errors, pricing=pricing)
    if best is None:
        assert plan.active == ()
    else:
        spent = (1 - pricing.saving(pricing.figures(plan.evaluation))) * pricing.scale
        assert spent == pytest.approx(best, abs=1e-12)


def assert_placement_is_optimal(seed: int) -> None:
    records, pricing = priced(seed, n_ramps=4)
    sets = [s for size in (1, 2, 3) for s in itertools.combinations(range(4), size)]
    best = least(records, sets, pricing, lambda mistakes: mistakes.sum(axis=1) <= seed % 4)
    result = best_plan(records, max_errors=seed % 4, pricing=pricing)
    assert result.optimal
    off = pricing.scale
    assert (1 - result.value) * off == pytest.approx(min(off, best or off), abs=1e-12)


class TestAgainstTryingEverything:
    @pytest.mark.parametrize("block", range(5))
    def test_thresholds_for_any_objective_are_optimal(self, block: int) -> None:
        for seed in range(block * 40, block * 40 + 40):
            assert_thresholds_are_optimal(seed)

    @pytest.mark.slow
    def test_placement_for_any_objective_is_optimal(self) -> None:
        for seed in range(40):
            assert_placement_is_optimal(seed)

    @pytest.mark.usefixtures("coarse_boxes")
    def test_bounds_of_many_plans_lose_none(self) -> None:
        for seed in range(80):
            assert_thresholds_are_optimal(seed)

    @pytest.mark.slow
    @pytest.mark.usefixtures("boxes")
    def test_a_thousand_more_cases_are_optimal(self) -> None:
        for seed in range(1000, 2000):
            assert_thresholds_are_optimal(seed)
        for seed in range(1000, 1150):
            assert_placement_is_optimal(seed)


class TestPrices:
    def test_the_default_is_the_mean_time_of_the_records_costs(self) -> None:
        records = recorded(50, 3, seed=1)
        pricing = price(records)
        assert np.array_equal(pricing.time.leave_seconds((0, 2)), records.costs.leave_seconds((0, 2)))
        seen = evaluate(records, (0, 2), (0.3, 0.4))
        assert pricing.figures(seen).mean_seconds == pytest.approx(seen.mean_seconds)
        assert pricing.saving(pricing.figures(seen)) == pytest.approx(seen.saving)

    def test_a_batch_answers_its_leavers_after_the_whole_batch_came_so_far(self) -> None:
        assert price(affine(), batch_size=4).time.leave_seconds((0,)) == pytest.approx([5.5, 19.5])  # and regroups

    def test_a_leaver_saves_its_rows_slope_and_no_more(self) -> None:
        pricing = price(affine(), batch_size=4)
        leaves, stays = pricing.busy.leave_seconds((0,))
        assert stays == pytest.approx(19.0 / 4 + (0.3 + 0.2) / 4)
        assert stays - leaves == pytest.approx(3.0)

    def test_a_batch_of_one_ends_when_its_request_leaves_and_never_regroups(self) -> None:
        pricing = price(affine(), batch_size=1)
        assert pricing.busy.leave_seconds((0,)) == pytest.approx([2.15, 7.15])
        assert pricing.time.leave_seconds((0,)) == pytest.approx([2.15, 7.15])

    def test_a_batch_size_that_was_not_measured_is_interpolated(self) -> None:
        pricing = price(affine(), batch_size=3)
        assert (pricing.time.total, pricing.busy.total) == pytest.approx((15, 15 / 3))

    def test_prices_equal_those_added_up_by_hand(self) -> None:
        for seed in range(50):
            records, pricing = priced(seed)
            active = tuple(range(records.n_ramps))
            for charges in (pricing.time, pricing.busy):
                assert charges.leave_seconds(active) == pytest.approx(seconds(charges, active))
                assert charges.leave_seconds(()) == pytest.approx([charges.total])

    def test_busy_time_never_rises_when_a_request_leaves_earlier(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(50):
            batches = tuple(
                BatchProfile(
                    b, 1.0, tuple(rng.random(4).tolist()), tuple((rng.random(3) * 0.1).tolist()), rng.random() * 0.1
                )
                for b in (1, 4, 16)
            )
            records = replace(recorded(10, 3, seed=0), profile=Profile("noise", 1, batches))
            for size in (1, 2, 16):
                pricing = price(records, batch_size=size)
                for charges in (pricing.time, pricing.busy):
                    assert (np.diff(charges.leave_seconds((0, 1, 2))) >= -1e-12).all()


class TestFigures:
    def test_the_p95_is_the_time_by_which_95_of_100_requests_are_answered(self) -> None:
        records = recorded(100, 2, seed=0)
        records = replace(records, uncertainty=np.linspace(0, 0.99, 200).astype(np.float32).reshape(100, 2))
        pricing = price(records)
        time = records.costs.leave_seconds((0,))
        for exits, position in ((95, 0), (94, 1)):
            threshold = float(records.uncertainty[exits, 0])
            seen = evaluate(records, (0,), (threshold,))
            assert seen.exits == (exits,)
            assert pricing.figures(seen).p95_seconds == time[position]

    def test_exits_off_costs_the_backbone(self) -> None:
        records = recorded(20, 2, seed=0, ramp_seconds=5.0)
        result = best_plan(records, max_errors=1)
        assert (result.figures.mean_seconds, result.figures.p95_seconds, result.figures.busy_seconds) == (1.0, 1.0, 1.0)
        assert result.value == 0.0

    def test_a_tail_objective_finds_a_shorter_tail_than_the_mean_does(self) -> None:
        records = recorded(3000, 5, seed=2)
        weights = {"mean": Weights(), "tail": Weights(mean=1e-3, tail=1.0, percentile=0.6)}
        found = {
            k: best_plan(records, max_disagreement=0.1, pricing=price(records, weights=w)) for k, w in weights.items()
        }
        mean = price(records, weights=weights["tail"]).figures(found["mean"].plan.evaluation)
        assert found["tail"].figures.p95_seconds < mean.p95_seconds
        assert found["tail"].figures.mean_seconds > mean.mean_seconds

    def test_busy_time_is_saved_in_batches_as_well(self) -> None:
        records = replace(recorded(500, 1, seed=2), profile=AFFINE)
        pricing = price(records, weights=Weights(mean=0.0, busy=1.0), batch_size=8)
        saving = best_plan(records, max_disagreement=0.05, pricing=pricing)
        assert saving.plan.active == (0,)
        assert saving.value > 0


class TestOverhead:
    def test_it_holds_at_the_worst_batch_size(self) -> None:
        batches = tuple(BatchProfile(b, 2.0, (1.0, 1.0), (share * 2.0,), 0.0) for b, share in ((1, 0.01), (8, 0.04)))
        records = replace(recorded(500, 1, seed=3), profile=Profile("by hand", 1, batches))
        assert best_plan(records, max_disagreement=0.05, max_overhead=0.04).plan.active == (0,)
        assert best_plan(records, max_disagreement=0.05, max_overhead=0.039).plan.active == ()


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: Weights(mean=-1), "mean weight is -1"),
            (lambda: Weights(tail=float("nan")), "tail weight is nan"),
            (lambda: Weights(mean=0), "all weights are 0"),
            (lambda: Weights(percentile=0), "percentile is 0"),
            (lambda: price(affine(), batch_size=0), "batch_size is 0"),
            (lambda: price(recorded(5, 1, seed=0), batch_size=1), "no costs by batch size"),
        ],
        ids=lambda value: None,
    )
    def test_what_makes_no_sense_is_refused_in_one_line(self, make: Any, says: str) -> None:
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            make()
        assert "\n" not in str(caught.value)
