"""Search: never over budget, never worse than trying everything."""

from __future__ import annotations

import itertools
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scores import recorded, small
from search_oracle import least

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import evaluate, evaluate_plan
from offramp_core.plan import Plan, RampThreshold
from offramp_core.records import ExitCosts, Records
from offramp_core.search.grid import leave_keys, threshold_of
from offramp_core.search.objective import price
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import best_thresholds, error_budget
from offramp_lab.policies import Objective, policy

SAME_EXAMPLES = settings(max_examples=60, derandomize=True)
SEEDS = st.integers(0, 10_000)


def brute_force(records: Records, active: tuple[int, ...], errors: int) -> float | None:
    """Least mean seconds over every combination of distinguishable thresholds; None if none fits."""
    return least(records, [active], price(records), lambda wrong: wrong.sum(axis=1) <= errors)


def assert_thresholds_are_optimal(records: Records, errors: int) -> None:
    active = tuple(range(records.n_ramps))
    least = brute_force(records, active, errors)
    plan = best_thresholds(records, active, max_errors=errors)
    if least is None:
        assert plan.active == ()
    else:
        assert plan.active == active
        assert plan.errors <= errors
        assert plan.evaluation.mean_seconds == pytest.approx(least, abs=1e-12)


def assert_placement_is_optimal(records: Records, errors: int, max_overhead: float) -> None:
    best = 0.0
    for size in range(1, 4):
        for active in itertools.combinations(range(records.n_ramps), size):
            if records.costs.overhead(active) <= max_overhead:
                least = brute_force(records, active, errors)
                best = max(best, 1 - least / records.costs.total_seconds if least is not None else 0.0)
    result = best_plan(records, max_errors=errors, max_overhead=max_overhead)
    assert result.plan.saving == pytest.approx(best, abs=1e-9)
    assert result.optimal
    assert result.plan.active == () or result.plan.errors <= errors
    assert records.costs.overhead(result.plan.active) <= max_overhead + 1e-12


class TestAgainstTryingEverything:
    @pytest.mark.parametrize("block", range(10))
    def test_thresholds_of_given_ramps_are_optimal(self, block: int) -> None:
        for seed in range(block * 40, block * 40 + 40):
            assert_thresholds_are_optimal(small(seed), errors=seed % 4)

    @pytest.mark.slow
    @pytest.mark.parametrize("n_ramps", [4, 5])
    def test_more_than_three_ramps_are_optimal_as_well(self, n_ramps: int) -> None:
        for seed in range(30):
            assert_thresholds_are_optimal(small(seed, max_rows=4, n_ramps=n_ramps), errors=seed % 3)

    @pytest.mark.parametrize("block", range(4))
    def test_placement_over_all_subsets_is_optimal(self, block: int) -> None:
        for seed in range(block * 20, block * 20 + 20):
            assert_placement_is_optimal(small(seed, max_rows=6, n_ramps=4), errors=seed % 3, max_overhead=0.03)

    @pytest.mark.usefixtures("coarse_boxes")
    def test_bounds_of_many_plans_lose_none(self) -> None:
        for seed in range(120):
            assert_thresholds_are_optimal(small(seed, max_rows=12), errors=seed % 5)

    @pytest.mark.slow
    @pytest.mark.usefixtures("boxes")
    def test_a_thousand_more_cases_are_optimal(self) -> None:
        for seed in range(1000, 2200):
            assert_thresholds_are_optimal(small(seed, max_rows=9), errors=seed % 5)
        for seed in range(1000, 1200):
            assert_placement_is_optimal(small(seed, max_rows=6, n_ramps=5), errors=seed % 4, max_overhead=0.05)


class TestBudget:
    @SAME_EXAMPLES
    @given(seed=SEEDS, errors=st.integers(0, 6))
    def test_a_plan_never_exceeds_its_budget_on_the_records(self, seed: int, errors: int) -> None:
        plan = best_plan(small(seed, max_rows=30), max_errors=errors).plan
        assert plan.errors <= errors

    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(seed=SEEDS, errors=st.integers(0, 5))
    def test_more_budget_never_saves_less(self, seed: int, errors: int) -> None:
        records = small(seed, max_rows=30)
        assert (
            best_plan(records, max_errors=errors + 1).plan.saving
            >= best_plan(records, max_errors=errors).plan.saving - 1e-12
        )

    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(seed=SEEDS)
    def test_exits_off_is_always_feasible_so_nothing_is_ever_lost(self, seed: int) -> None:
        assert best_plan(small(seed), max_errors=0).plan.saving >= 0

    def test_nothing_that_costs_more_than_it_saves_is_placed(self) -> None:
        records = recorded(200, 3, seed=0, ramp_seconds=10.0)
        assert best_plan(records, max_disagreement=0.01, max_overhead=1e9).plan.active == ()

    @pytest.mark.parametrize(
        ("n", "share", "errors"),
        [(100, 0.29, 29), (100, 0.07, 7), (1000, 0.0, 0), (99, 0.01, 0), (7, 1.0, 7), (200, 0.005, 1)],
    )
    def test_a_share_allows_every_count_that_does_not_exceed_it(self, n: int, share: float, errors: int) -> None:
        assert error_budget(n, max_disagreement=share) == errors
        assert errors / n <= share
        assert errors == n or (errors + 1) / n > share

    @pytest.mark.parametrize(
        "given_budget", [{}, {"max_errors": 1, "max_disagreement": 0.1}, {"max_errors": -1}, {"max_disagreement": 1.5}]
    )
    def test_an_unclear_budget_is_refused(self, given_budget: dict[str, float]) -> None:
        with pytest.raises(InvalidArgumentError):
            best_plan(recorded(10, 2, seed=0), **given_budget)  # type: ignore[arg-type]


class TestStoredThresholds:
    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(seed=SEEDS)
    def test_a_plan_does_the_same_after_it_was_stored_as_text(self, seed: int) -> None:
        records = small(seed, max_rows=20)
        found = best_plan(records, max_errors=2).plan
        ids = [f"r{i:02d}-linear" for i in range(records.n_ramps)]
        plan = Plan(
            "b", "r", tuple(RampThreshold(ids[i], t) for i, t in zip(found.active, found.thresholds, strict=True))
        )
        again = evaluate_plan(records, Plan.from_mapping(plan.to_mapping()), ids)
        assert (again.disagreements, again.mean_seconds) == (found.errors, found.evaluation.mean_seconds)

    @SAME_EXAMPLES
    @given(st.floats(0, 1, width=32))
    def test_a_key_is_the_lowest_threshold_that_lets_an_input_leave(self, score: float) -> None:
        u = np.float32(score)
        key = int(leave_keys(np.array([u]))[0])
        assert not u < np.float32(float(threshold_of(key - 1)))
        assert key > 1_000_000 or u < np.float32(float(threshold_of(key)))

    def test_scores_closer_than_a_step_leave_together_or_not_at_all(self) -> None:
        below, above = np.float32(0.3000001), np.float32(0.3000002)
        records = Records(
            np.array([[below], [above]], dtype=np.float32),
            np.array([[True], [False]]),
            np.ones(2, dtype=bool),
            ExitCosts(np.ones(2), np.zeros(1)),
        )
        assert best_thresholds(records, (0,), max_errors=0).evaluation.exits == (0,)
        assert best_thresholds(records, (0,), max_errors=1).evaluation.exits == (2,)

    def test_the_lowest_of_equal_thresholds_is_chosen(self) -> None:
        records = Records(
            np.array([[0.2], [0.9]], dtype=np.float32),
            np.array([[True], [False]]),
            np.ones(2, dtype=bool),
            ExitCosts(np.ones(2), np.zeros(1)),
        )
        assert best_thresholds(records, (0,), max_errors=0).thresholds == (Decimal("0.200001"),)


class TestSearchItself:
    @pytest.mark.slow
    def test_it_never_loses_to_the_hill_climb_on_the_same_records(self) -> None:
        for seed in range(20):
            records = recorded(600, 6, seed=seed)
            climbed = policy("greedy")(records, records, Objective(0.02))
            assert best_plan(records, max_disagreement=0.02).plan.saving >= climbed.saving - 1e-12
            assert best_thresholds(records, climbed.active, max_disagreement=0.02).saving >= climbed.saving - 1e-12

    @pytest.mark.parametrize("limit", [1, 10, 40])
    def test_a_search_cut_short_reports_a_gap_that_holds(self, limit: int) -> None:
        records = recorded(800, 8, seed=3)
        full = best_plan(records, max_disagreement=0.02)
        short = best_plan(records, max_disagreement=0.02, node_limit=limit)
        assert full.optimal
        assert short.bound >= full.plan.saving - 1e-12
        assert short.plan.saving <= full.plan.saving + 1e-12
        assert short.plan.errors <= 16

    @pytest.mark.parametrize("tolerance", [1e-4, 0.002, 0.02])
    def test_a_coarse_search_keeps_the_budget_and_reports_a_gap_that_holds(self, tolerance: float) -> None:
        for seed in range(8):
            records = recorded(800, 5, seed=seed)
            if seed % 2:
                records = replace(records, final_agrees=np.random.default_rng(seed).random(800) < 0.99)
            full = best_plan(records, max_disagreement=0.04)
            coarse = best_plan(records, max_disagreement=0.04, tolerance=tolerance)
            assert coarse.plan.errors <= 32
            assert coarse.plan.saving <= full.plan.saving + 1e-12
            assert coarse.bound >= full.plan.saving - 1e-12
            assert coarse.gap <= tolerance + 1e-12

    @pytest.mark.parametrize("max_gap", [0.001, 0.01, 0.1])
    def test_it_stops_at_the_gap_asked_for(self, max_gap: float) -> None:
        for seed in range(4):
            records = recorded(800, 7, seed=seed)
            full = best_plan(records, max_disagreement=0.02)
            early = best_plan(records, max_disagreement=0.02, max_gap=max_gap)
            assert early.gap <= max_gap
            assert early.bound >= full.plan.saving - 1e-12
            assert early.nodes <= full.nodes

    def test_it_stops_when_asked(self) -> None:
        asked = []
        result = best_plan(recorded(800, 8, seed=3), max_disagreement=0.02, should_stop=lambda: asked.append(1) is None)
        assert asked
        assert not result.optimal

    def test_it_asks_between_small_pieces_of_work(self) -> None:
        """Pieces are counted, not timed: columns, prefixes with their last ramps, and boxes."""
        asked: list[int] = []
        result = best_plan(recorded(800, 8, seed=3), max_disagreement=0.02, should_stop=lambda: bool(asked.append(1)))
        assert result.optimal
        assert len(asked) >= 8 + 8 + 28  # every ramp sorted, every prefix of one and of two ramps

    @pytest.mark.parametrize("questions", [0, 3, 8, 9, 15, 30, 60, 100])
    def test_stopped_anywhere_it_has_a_plan_and_a_gap_that_holds(self, questions: int) -> None:
        records = recorded(800, 8, seed=5)
        full = best_plan(records, max_disagreement=0.02)
        asked: list[int] = []
        short = best_plan(
            records, max_disagreement=0.02, should_stop=lambda: len(asked) >= questions or bool(asked.append(1))
        )
        assert short.plan.errors <= 16
        assert full.plan.saving - 1e-12 <= short.bound < 1

    @pytest.mark.slow
    def test_six_of_forty_ramps_give_a_plan_and_a_proven_gap_within_a_node_limit(self) -> None:
        records = recorded(1500, 40, seed=0, ramp_seconds=0.002)
        two = best_plan(records, max_disagreement=0.01, max_ramps=2, node_limit=4_000)
        six = best_plan(records, max_disagreement=0.01, max_ramps=6, max_gap=0.01, node_limit=4_000)
        assert six.nodes <= 4_000
        assert two.optimal
        assert two.plan.saving < six.plan.saving <= six.bound < 1
        assert 2 < len(six.plan.active) <= 6

    def test_it_is_deterministic_and_leaves_the_records_alone(self) -> None:
        records = recorded(500, 5, seed=1)
        before = (records.uncertainty.copy(), records.agrees.copy())
        first, second = (best_plan(records, max_disagreement=0.02) for _ in range(2))
        assert first == second
        assert np.array_equal(before[0], records.uncertainty)
        assert np.array_equal(before[1], records.agrees)

    def test_at_most_the_allowed_number_of_ramps_is_placed(self) -> None:
        records = recorded(2000, 8, seed=2, ramp_seconds=0.0)
        savings = [best_plan(records, max_disagreement=0.02, max_ramps=k).plan for k in range(4)]
        assert [len(p.active) <= k for k, p in enumerate(savings)] == [True] * 4
        assert [p.saving for p in savings] == sorted(p.saving for p in savings)

    @pytest.mark.parametrize(
        "bad", [{"tolerance": -1}, {"max_gap": -1}, {"max_ramps": -1}, {"max_ramps": 7}, {"max_overhead": -0.1}]
    )
    def test_arguments_out_of_range_are_refused(self, bad: dict[str, float]) -> None:
        with pytest.raises(InvalidArgumentError):
            best_plan(recorded(10, 2, seed=0), max_errors=1, **bad)  # type: ignore[arg-type]


class TestBrokenRecords:
    @pytest.mark.parametrize("value", [np.nan, -0.1, 1.5])
    def test_a_score_out_of_range_is_named_with_its_row(self, value: float) -> None:
        records = recorded(10, 3, seed=0)
        records.uncertainty[7, 1] = value
        with pytest.raises(InvalidRecordsError, match=r"uncertainty\[7, 1\]"):
            best_plan(records, max_errors=1)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"agrees": np.ones((10, 2), dtype=bool)}, r"agrees has shape \(10, 2\); it needs \(10, 3\)"),
            ({"final_agrees": np.ones(9, dtype=bool)}, r"final_agrees has shape \(9,\)"),
            ({"slice_id": np.ones(9, dtype=np.int64)}, r"slice has shape \(9,\)"),
            ({"costs": ExitCosts(np.ones(3), np.ones(3))}, r"segment_seconds has shape \(3,\)"),
            ({"costs": ExitCosts(np.ones(4), np.array([0.0, -1.0, 0.0]))}, r"ramp_seconds\[1\] is -1.0"),
            ({"costs": ExitCosts(np.array([1.0, np.inf, 1.0, 1.0]), np.zeros(3))}, r"segment_seconds\[1\] is inf"),
            ({"costs": ExitCosts(np.zeros(4), np.zeros(3))}, "sums to 0"),
        ],
        ids=lambda value: None,
    )
    def test_arrays_that_do_not_fit_are_refused(self, change: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidRecordsError, match=says):
            best_plan(replace(recorded(10, 3, seed=0), **change), max_errors=1)

    def test_empty_records_are_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="records are empty"):
            best_plan(recorded(5, 3, seed=0).take(slice(0, 0)), max_errors=1)


class TestEvaluate:
    RECORDS = Records(
        uncertainty=np.array([[0.1, 0.1], [0.5, 0.2], [0.9, 0.9], [np.nan, 0.3]], dtype=np.float32),
        agrees=np.array([[True, True], [True, False], [True, True], [True, True]]),
        final_agrees=np.array([True, True, False, True]),
        costs=ExitCosts(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.25])),
    )

    def test_a_case_worked_by_hand(self) -> None:
        seen = evaluate(self.RECORDS, (0, 1), (0.5, 0.35))
        assert seen.exits == (1, 2)  # 0.5 is not below 0.5, NaN never is
        assert seen.disagreements == 2  # row 1 at ramp 1, row 2 at the end
        assert seen.mean_seconds == pytest.approx((1.5 + 2 * 3.75 + 6.75) / 4)
        assert seen.saving == pytest.approx(1 - 15.75 / 24)
        assert seen.exit_shares == (0.25, 0.5)

    def test_utilities_add_up_to_what_the_plan_saves(self) -> None:
        seen = evaluate(self.RECORDS, (0, 1), (0.5, 0.35))
        assert sum(seen.utility_seconds) == pytest.approx(6.0 - seen.mean_seconds)
        assert seen.utility_seconds[0] == pytest.approx((5 - 4 * 0.5) / 4)

    def test_a_ramp_where_nothing_leaves_has_negative_utility(self) -> None:
        assert evaluate(self.RECORDS, (0,), (0,)).utility_seconds == (-0.5,)

    def test_exits_off_is_the_exact_executor(self) -> None:
        seen = evaluate(self.RECORDS, (), ())
        assert (seen.saving, seen.disagreements) == (0.0, 0)

    @pytest.mark.parametrize(
        ("active", "thresholds"),
        [((1, 0), (0.1, 0.1)), ((2,), (0.1,)), ((0,), ()), ((0,), (1.5,)), ((0,), (float("nan"),))],
    )
    def test_vectors_that_make_no_sense_are_refused(
        self, active: tuple[int, ...], thresholds: tuple[float, ...]
    ) -> None:
        with pytest.raises(InvalidArgumentError):
            evaluate(self.RECORDS, active, thresholds)
