"""The promise in its three clauses, on a world whose truth is a formula (bench/promise.py prints the figures)."""

from __future__ import annotations

import numpy as np
import pytest
from bench.promise import (
    BUDGET,
    CUTS,
    RUN_LENGTH,
    Drift,
    certification,
    labels_until_off,
    one_ramp_pool,
    sample,
    true_rates,
    year,
)
from scipy import stats

from offramp_core.evaluate import evaluate
from offramp_core.evidence import detector

OFF_WITHIN = 600  # labels; docs/decisions/0010


class TestTheWorld:
    def test_its_formula_is_what_its_records_do(self) -> None:
        pool, truth = one_ramp_pool(200_000, seed=3), true_rates(0.0)
        for i in (20, 37, 45, 59):
            seen = evaluate(pool, (0,), (float(CUTS[i]),)).disagreement
            assert seen == pytest.approx(truth[i], abs=4 * float(np.sqrt(truth[i] / 200_000)) + 1e-4)

    def test_its_samples_have_the_rates_of_the_formula(self) -> None:
        drawn = sample(np.random.default_rng(1), 0.5, 1_000_000) / 1_000_000
        assert drawn == pytest.approx(true_rates(0.5), abs=2e-3)
        assert (np.diff(drawn) >= 0).all()


@pytest.mark.slow
class TestWhenCertified:
    def test_a_certificate_is_wrong_in_at_most_delta_of_draws(self) -> None:
        seen = certification(one_ramp_pool(50_000, seed=1), labels=900, draws=100)
        assert seen.certified > 90  # exits off is no success
        assert stats.binom.sf(seen.broken - 1, seen.draws, 0.05) > 0.001


class TestAfterAJump:
    @pytest.mark.slow
    def test_exits_are_off_within_the_stated_labels_after_a_jump_to_five_percent(self) -> None:
        until = np.array([labels_until_off(0.05, seed=seed) for seed in range(300)])
        late = int((until > OFF_WITHIN).sum())
        assert stats.binom.sf(late - 1, 300, 0.02) > 0.001, f"{late} of 300 took longer"
        assert np.median(until) < OFF_WITHIN / 2

    def test_a_plan_within_its_budget_is_left_alone(self) -> None:
        outcomes = np.random.default_rng(5).random(50_000) < 0.6 * BUDGET
        seen = detector.watch(detector.init(), outcomes, p0=BUDGET, run_length=RUN_LENGTH)
        assert seen.alarm_after is None


@pytest.mark.slow
class TestOverAYear:
    def test_the_budget_is_kept_in_nineteen_of_twenty_years_of_drift_and_daily_tuning(self) -> None:
        seen = [year(seed) for seed in range(40)]
        broken = sum(y.disagreement > BUDGET for y in seen)
        assert stats.binom.sf(broken - 1, 40, 0.05) > 0.001
        assert np.median([y.saving for y in seen]) > 0.15  # by plans, not by exits off

    def test_it_is_the_detector_that_keeps_it_when_inputs_only_get_harder(self) -> None:
        harder = Drift(walk=0.0, season=1.2, jumps_per_year=6.0, jump=2.0)
        watched = [year(seed, drift=harder) for seed in range(15)]
        blind = [year(seed, drift=harder, watched=False) for seed in range(15)]
        assert sum(y.disagreement > BUDGET for y in watched) <= 3
        assert sum(y.disagreement > BUDGET for y in blind) >= 8
