"""Slices: each has its own promise; one that fails is stopped and leaves the plan to the others."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scores import recorded

from offramp_core.certify import (
    Certificate,
    Certified,
    NotCertified,
    SliceBudget,
    Subject,
    allowance,
    rank_path,
    verify_certificate,
)
from offramp_core.certify import test_path as try_path
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.plan import Plan, RampThreshold, floor_threshold
from offramp_core.records import ExitCosts, Records
from offramp_core.search.placement import best_plan

IDS = tuple(f"r{i:02d}" for i in range(6))
SUBJECT = Subject(IDS, "b", "r")
EASY, HARD, RARE = 0, 1, 2


def sliced(n: int, *, seed: int) -> Records:
    """60 % easy requests, 38 % on which the ramps err far more often, and a slice of 2 % too rare to judge."""
    slice_id = np.random.default_rng(seed).choice(3, size=n, p=[0.6, 0.38, 0.02])
    easy, hard = recorded(n, 6, seed=seed), recorded(n, 6, seed=seed + 1000, harder=6.0)
    pick = slice_id == HARD
    return replace(
        easy,
        uncertainty=np.where(pick[:, None], hard.uncertainty, easy.uncertainty),
        agrees=np.where(pick[:, None], hard.agrees, easy.agrees),
        slice_id=slice_id,
    )


def certified(b: Records, *slices: SliceBudget, budget: float = 0.05) -> Certified | NotCertified:
    a = sliced(600, seed=1)
    found = best_plan(a, max_disagreement=budget).plan
    path = [SUBJECT.plan(found.active, step) for step in rank_path(a, found.active, found.thresholds)]
    return try_path(path, b, ramp_ids=IDS, budget=budget, delta=0.05, slices=slices)


@pytest.fixture(scope="module")
def proven() -> Certified:
    result = certified(sliced(4000, seed=2), *(SliceBudget(i, 0.02) for i in (EASY, HARD, RARE)))
    assert isinstance(result, Certified)
    return result


class TestStops:
    def test_a_slice_that_fails_is_stopped_and_the_plan_stays(self, proven: Certified) -> None:
        assert set(proven.stopped_slices) == {HARD, RARE}
        assert proven.on_test.saving > 0.05

    def test_a_slice_too_rare_to_judge_says_how_many_labels_it_needs(self, proven: Certified) -> None:
        rare = proven.certificate.slices[RARE]
        assert rare.n < 200
        assert rare.needed_more is not None
        assert 0 < rare.needed_more < 5000

    def test_all_promises_together_spend_no_more_than_the_test_may(self, proven: Certified) -> None:
        certificate = proven.certificate
        spent = certificate.level + sum(s.level for s in certificate.slices)
        assert spent == pytest.approx(allowance(0.05, 1))
        for s in certificate.slices:
            assert s.certified == (s.p_value <= s.level)

    def test_without_slices_the_whole_level_is_the_plans(self) -> None:
        result = certified(sliced(4000, seed=2))
        assert isinstance(result, Certified)
        assert result.certificate.level == allowance(0.05, 1)
        assert result.stopped_slices == ()


class TestChecks:
    def test_a_certificate_with_slices_is_verified_from_its_records(self, proven: Certified) -> None:
        b = sliced(4000, seed=2)
        again = Certificate.from_mapping(json.loads(json.dumps(proven.certificate.to_mapping())))
        assert verify_certificate(again, proven.plan, records=b) is None

    def test_a_slice_declared_certified_is_found_out(self, proven: Certified) -> None:
        slices = tuple(replace(s, certified=True) for s in proven.certificate.slices)
        reason = verify_certificate(replace(proven.certificate, slices=slices), proven.plan)
        assert reason is not None
        assert "slice" in reason
        assert "above the level" in reason

    def test_records_without_slices_cannot_certify_one(self) -> None:
        with pytest.raises(InvalidRecordsError, match="slice is missing"):
            certified(replace(sliced(4000, seed=2), slice_id=None), SliceBudget(EASY, 0.02))

    def test_a_slice_named_twice_is_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="name each once"):
            certified(sliced(4000, seed=2), SliceBudget(EASY, 0.02), SliceBudget(EASY, 0.03))

    @pytest.mark.parametrize("budget", [0.0, 1.0, float("nan")])
    def test_a_slice_budget_out_of_range_is_refused(self, budget: float) -> None:
        with pytest.raises(InvalidArgumentError, match="budget of slice 3"):
            SliceBudget(3, budget)


class TestTheLevel:
    @pytest.mark.slow
    def test_all_promises_hold_together_when_every_one_is_at_its_boundary(self) -> None:
        """One ramp that errs in 2 % of each slice, just at every budget: whatever passes is a false certificate."""
        rng, runs, n = np.random.default_rng(9), 2000, 600
        plan = Plan("b", "r", (RampThreshold("r00", floor_threshold(0.5)),))
        costs = ExitCosts(np.ones(2), np.zeros(1))
        slices = [SliceBudget(i, 0.02) for i in range(3)]
        false = 0
        for _ in range(runs):
            b = Records(
                np.full((n, 1), 0.1, dtype=np.float32),
                rng.random((n, 1)) >= 0.02,
                np.ones(n, dtype=bool),
                costs,
                slice_id=rng.integers(0, 3, n),
            )
            result = try_path([plan], b, ramp_ids=("r00",), budget=0.02, delta=0.05, slices=slices)
            false += isinstance(
                result, Certified
            )  # any slice that passed while the plan did not is no certificate either
        assert stats.binom.sf(false - 1, runs, 0.05) > 0.001
