"""The smoothed path: made from few records, cautious first, and honest however wrong its model is."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scores import recorded

from offramp_core.certify import Certified, Subject, expected_path, rank_path
from offramp_core.certify import test_path as try_path
from offramp_core.certify.expected import error_curves
from offramp_core.evaluate import evaluate, evaluate_plan
from offramp_core.plan import Plan
from offramp_core.records import ExitCosts, Records
from offramp_core.search.placement import best_plan

IDS = tuple(f"r{i:02d}" for i in range(12))
SUBJECT = Subject(IDS, "b", "r")


def path_of(a: Records, *, budget: float = 0.01, max_ramps: int = 3) -> list[Plan]:
    subject = Subject(IDS[: a.n_ramps], "b", "r")
    return [
        subject.plan(s.active, s.thresholds) for s in expected_path(a, max_disagreement=budget, max_ramps=max_ramps)
    ]


class TestThePath:
    def test_it_goes_from_cautious_to_bold(self) -> None:
        a, unseen = recorded(250, 12, seed=1), recorded(20_000, 12, seed=2)
        steps = expected_path(a, max_disagreement=0.01, max_ramps=3)
        assert all(x.expected_disagreement <= y.expected_disagreement + 1e-9 for x, y in pairwise(steps))
        rates = [evaluate(unseen, s.active, s.thresholds).disagreement for s in steps]
        assert rates[0] < 0.003
        assert rates[-1] > 0.01
        assert stats.spearmanr(rates, range(len(rates))).statistic > 0.95

    def test_neighbouring_steps_are_close_so_that_the_last_one_to_pass_wastes_little(self) -> None:
        unseen = recorded(20_000, 12, seed=2)
        rates = [evaluate_plan(unseen, p, IDS).disagreement for p in path_of(recorded(250, 12, seed=1))]
        assert max(b - a for a, b in pairwise(rates) if a < 0.01) < 0.003

    def test_it_keeps_the_number_of_ramps_and_the_overhead(self) -> None:
        a = recorded(300, 12, seed=3, ramp_seconds=0.02)
        steps = expected_path(a, max_disagreement=0.01, max_ramps=3, max_overhead=0.05)
        assert steps
        assert max(len(s.active) for s in steps) <= 2  # each ramp takes 2 % of the model's time

    def test_where_no_ramp_pays_there_is_no_path(self) -> None:
        assert expected_path(recorded(300, 6, seed=3, ramp_seconds=5.0), max_disagreement=0.01, max_ramps=3) == []
        assert expected_path(recorded(300, 6, seed=3), max_disagreement=0.01, max_ramps=0) == []

    def test_ramps_that_are_always_or_never_right_do_not_upset_the_model(self) -> None:
        a = recorded(200, 3, seed=4)
        agrees = a.agrees.copy()
        agrees[:, 0], agrees[:, 1] = True, False
        curves = error_curves(replace(a, agrees=agrees))
        assert np.isfinite(curves).all()
        assert curves[:, 0].max() < 0.05
        assert curves[:, 1].min() > 0.9

    def test_inputs_that_no_threshold_can_separate_leave_together(self) -> None:
        a = recorded(300, 4, seed=5)
        tied = replace(a, uncertainty=np.round(a.uncertainty, 1).astype(np.float32))
        for step in expected_path(tied, max_disagreement=0.05, max_ramps=2):
            seen = evaluate(tied, step.active, step.thresholds)
            assert seen.disagreement <= 4 * step.expected_disagreement + 0.05

    def test_a_search_that_is_stopped_ends_with_what_it_has(self) -> None:
        assert (
            expected_path(recorded(300, 6, seed=3), max_disagreement=0.01, max_ramps=3, should_stop=lambda: True) == []
        )

    def test_equal_records_give_equal_paths(self) -> None:
        a = recorded(300, 6, seed=3)
        assert path_of(a) == path_of(replace(a))

    @pytest.mark.slow
    def test_from_few_records_it_certifies_more_than_the_exact_plan_scaled(self) -> None:
        pool = recorded(20_000, 8, seed=11)
        smoothed, scaled = [], []
        for seed in range(14):
            sample = pool.take(np.random.default_rng(seed).integers(0, len(pool), 1000))
            a, b = sample.take(slice(150)), sample.take(slice(154, None))
            found = best_plan(a, max_disagreement=0.01, node_limit=2000).plan
            subject = Subject(IDS[:8], "b", "r")
            scaled_path = [subject.plan(found.active, t) for t in rank_path(a, found.active, found.thresholds)]
            results = (
                try_path(path_of(a), b, ramp_ids=IDS[:8], budget=0.01, delta=0.05),
                try_path(scaled_path, b, ramp_ids=IDS[:8], budget=0.01, delta=0.05),
            )
            for result, savings in zip(results, (smoothed, scaled), strict=True):
                proven = isinstance(result, Certified)
                savings.append(evaluate_plan(pool, result.plan, IDS[:8]).saving if proven else 0.0)  # type: ignore[union-attr]
        assert float(np.mean(smoothed)) > float(np.mean(scaled)) + 0.01


class TestTheLevel:
    """The pool is the population, drawn from with replacement; the truth is a plan's rate on all of it."""

    @staticmethod
    def broken(pool: Records, path: list[Plan], *, draws: int, n: int, seed: int) -> tuple[int, int]:
        """(false certificates, certificates) over draws of B."""
        rng, ids = np.random.default_rng(seed), IDS[: pool.n_ramps]
        truth = {plan.content_hash: evaluate_plan(pool, plan, ids).disagreement for plan in path}
        false = some = 0
        for _ in range(draws):
            b = pool.take(rng.integers(0, len(pool), n))
            result = try_path(path, b, ramp_ids=ids, budget=0.01, delta=0.05)
            if isinstance(result, Certified):
                some += 1
                false += truth[result.plan.content_hash] > 0.01
        return false, some

    @pytest.mark.slow
    def test_certified_plans_break_the_budget_in_at_most_delta_of_draws(self) -> None:
        pool = recorded(30_000, 4, seed=12)
        false = some = 0
        for seed in range(20):
            a = pool.take(np.random.default_rng(seed).integers(0, len(pool), 200))
            more = self.broken(pool, path_of(a, max_ramps=2), draws=100, n=846, seed=seed)
            false, some = false + more[0], some + more[1]
        assert some > 1900  # exits off is no success
        assert stats.binom.sf(false - 1, 2000, 0.05) > 0.001, f"{false} of 2000"

    @pytest.mark.slow
    def test_also_where_the_boldest_plans_sit_just_above_the_budget(self) -> None:
        """The hardest pool: everything from the third step on saves most and truly disagrees in 1.02 %."""
        n = 50_000
        uncertainty = np.full((n, 1), 0.9, dtype=np.float32)
        uncertainty[: n // 5], uncertainty[n // 5 : n // 2] = 0.1, 0.3
        agrees = np.ones((n, 1), dtype=bool)
        agrees[n // 5 : n // 5 + 510] = False
        pool = Records(uncertainty, agrees, np.ones(n, dtype=bool), ExitCosts(np.ones(2), np.zeros(1)))
        path = [SUBJECT.plan((0,), (threshold,)) for threshold in map(Decimal, ("0.15", "0.2", "0.35", "0.4", "0.5"))]
        false, some = self.broken(pool, path, draws=2000, n=1537, seed=1)
        assert some == 2000
        assert stats.binom.sf(false - 1, 2000, 0.05) > 0.001
        assert false > 10  # so that the test would notice a level twice as large
