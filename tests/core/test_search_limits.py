"""Budgets per slice: kept to the last error, and never at the cost of a better plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scores import recorded, small
from search_oracle import every_plan, least, wrong

from offramp_core.errors import InvalidArgumentError
from offramp_core.records import Records
from offramp_core.search.limits import make_limits
from offramp_core.search.objective import price
from offramp_core.search.placement import best_plan
from offramp_core.search.thresholds import best_thresholds

SAME_EXAMPLES = settings(max_examples=60, derandomize=True)
SEEDS = st.integers(0, 10_000)


def limited(seed: int, *, n_ramps: int | None = None) -> tuple[Records, dict[str, Any]]:
    """A small case with ties, wrong final answers and slices, and limits on it."""
    rng = np.random.default_rng(seed + 77)
    records = small(seed, max_rows=9, n_ramps=n_ramps)
    n = len(records)
    records = replace(records, slice_id=rng.integers(0, 3, n))
    limits: dict[str, Any] = {"max_disagreement": float(rng.choice([0.0, 0.2, 0.3, 0.5, 1.0]))}
    if seed % 3 != 1:
        assert records.slice_id is not None
        named = [s for s in np.unique(records.slice_id).tolist() if rng.random() < 0.7]
        limits["slice_budgets"] = {s: float(rng.choice([0.0, 0.25, 0.5, 1.0])) for s in named}
    return records, limits


def fits(records: Records, limits: dict[str, Any], mistakes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whether plans keep the limits, counted by hand."""
    out = mistakes.sum(axis=1) <= round(limits["max_disagreement"] * len(records), 6)
    for label, share in limits.get("slice_budgets", {}).items():
        mine = records.slice_id == label
        out &= (mistakes * mine).sum(axis=1) <= round(share * mine.sum(), 6)
    return np.asarray(out)


def assert_thresholds_are_optimal(seed: int) -> None:
    records, limits = limited(seed)
    active = tuple(range(records.n_ramps))
    best = least(records, [active], price(records), lambda mistakes: fits(records, limits, mistakes))
    plan = best_thresholds(records, active, **limits)
    if best is None:
        assert plan.active == ()
        return
    assert plan.active == active
    assert plan.evaluation.mean_seconds == pytest.approx(best, abs=1e-12)
    assert keeps(records, limits, plan.active, [float(t) for t in plan.thresholds])


def assert_placement_is_optimal(seed: int) -> None:
    records, limits = limited(seed, n_ramps=4)
    sets = [s for size in (1, 2, 3) for s in itertools.combinations(range(4), size)]
    best = least(records, sets, price(records), lambda mistakes: fits(records, limits, mistakes))
    total = records.costs.total_seconds
    result = best_plan(records, **limits)
    assert result.optimal
    assert result.plan.evaluation.mean_seconds == pytest.approx(min(total, best or total), abs=1e-12)


def keeps(records: Records, limits: dict[str, Any], active: tuple[int, ...], thresholds: list[float]) -> bool:
    left = np.full((1, len(records)), len(active), dtype=np.intp)
    for j in range(len(active) - 1, -1, -1):
        left[0, records.uncertainty[:, active[j]] < np.float32(thresholds[j])] = j
    return bool(fits(records, limits, wrong(records, active, left))[0])


class TestAgainstTryingEverything:
    @pytest.mark.parametrize("block", range(5))
    def test_thresholds_within_slices_are_optimal(self, block: int) -> None:
        for seed in range(block * 40, block * 40 + 40):
            assert_thresholds_are_optimal(seed)

    @pytest.mark.slow
    def test_placement_within_slices_is_optimal(self) -> None:
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

    def test_the_limits_of_the_cases_decide_something(self) -> None:
        bound = 0
        for seed in range(40):
            records, limits = limited(seed)
            mistakes = wrong(records, (0,), every_plan(records, (0,)))
            bound += not fits(records, limits, mistakes).all()
        assert bound >= 12


class TestSlices:
    def test_each_slice_keeps_its_own_budget(self) -> None:
        records = recorded(3000, 5, seed=4)
        records = replace(records, slice_id=(np.arange(3000) % 3).astype(np.int64))
        free = best_plan(records, max_disagreement=0.02)
        kept = best_plan(records, max_disagreement=0.02, slice_budgets={0: 0.002, 2: 0.0})
        left = np.array(
            [
                u < np.float32(float(t))
                for u, t in zip(records.uncertainty[:, kept.plan.active].T, kept.plan.thresholds, strict=True)
            ]
        )
        first = np.where(left.any(axis=0), left.argmax(axis=0), 0)
        mistakes = left.any(axis=0) & ~records.agrees[np.arange(3000), np.array(kept.plan.active)[first]]
        assert [int(mistakes[i::3].sum()) <= most for i, most in ((0, 2), (2, 0))] == [True, True]
        assert 0 < kept.plan.saving < free.plan.saving
        assert kept.optimal

    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(seed=SEEDS)
    def test_a_budget_of_everything_for_a_slice_changes_nothing(self, seed: int) -> None:
        records = replace(small(seed, max_rows=25), slice_id=np.zeros(0, dtype=np.int64))
        records = replace(records, slice_id=np.arange(len(records)) % 2)
        plain = best_plan(records, max_errors=2)
        assert best_plan(records, max_errors=2, slice_budgets={0: 1.0}).plan.saving == plain.plan.saving

    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(seed=SEEDS)
    def test_all_requests_in_one_slice_are_the_budget_over_all(self, seed: int) -> None:
        records = small(seed, max_rows=25)
        records = replace(records, slice_id=np.full(len(records), 7))
        assert (
            best_plan(records, max_errors=len(records), slice_budgets={7: 0.1}).plan.saving
            == best_plan(records, max_disagreement=0.1).plan.saving
        )


class TestRefused:
    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            ({"slice_budgets": {5: 0.1}}, "slice 5, which no record belongs to"),
            ({"slice_budgets": {0: 1.5}}, r"slice_budgets\[0\] is 1.5"),
            ({"slice_budgets": {0: float("nan")}}, r"slice_budgets\[0\] is nan"),
        ],
        ids=lambda value: None,
    )
    def test_a_limit_that_makes_no_sense_is_refused_in_one_line(self, bad: dict[str, Any], says: str) -> None:
        records = replace(recorded(4, 2, seed=0), slice_id=np.zeros(4, dtype=np.int64))
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            best_plan(records, max_errors=1, **bad)
        assert "\n" not in str(caught.value)

    def test_slice_budgets_without_slices_are_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="no slice array"):
            make_limits(recorded(4, 2, seed=0), max_errors=1, slice_budgets={0: 0.1})
