"""Certificates: a plan that holds one keeps its budget, as often as promised, and anybody can check it again."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scores import recorded

from offramp_core.certify import (
    Certificate,
    Certified,
    NotCertified,
    Subject,
    allowance,
    fewest_labels,
    labels_for,
    largest_passing_count,
    more_labels,
    p_value,
    rank_path,
    verify_certificate,
)
from offramp_core.certify import test_path as try_path
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import evaluate_plan
from offramp_core.records import Records
from offramp_core.search.placement import best_plan

SAME_EXAMPLES = settings(max_examples=60, derandomize=True)

IDS = tuple(f"r{i:02d}-linear" for i in range(6))
SUBJECT = Subject(IDS, "sha256:b", "sha256:r")


def certified_on(
    a: Records, b: Records, *, budget: float = 0.02, delta: float = 0.05, test_index: int = 1
) -> Certified | NotCertified:
    found = best_plan(a, max_disagreement=budget).plan
    path = [SUBJECT.plan(found.active, step) for step in rank_path(a, found.active, found.thresholds)]
    return try_path(path, b, ramp_ids=IDS, budget=budget, delta=delta, test_index=test_index)


@pytest.fixture(scope="module")
def held_out() -> Records:
    return recorded(1500, 6, seed=2)


@pytest.fixture(scope="module")
def proven(held_out: Records) -> Certified:
    result = certified_on(recorded(500, 6, seed=1), held_out)
    assert isinstance(result, Certified)
    return result


class TestTheTest:
    def test_it_certifies_a_plan_that_saves_time(self, proven: Certified) -> None:
        certificate = proven.certificate
        assert proven.on_test.saving > 0.05
        assert certificate.p_value == pytest.approx(stats.binom.cdf(certificate.k, 1500, 0.02))
        assert certificate.p_value <= certificate.level == allowance(0.05, 1)
        assert certificate.plan_hash == proven.plan.content_hash

    def test_counts_are_those_of_the_plan_as_it_is_stored(self, proven: Certified, held_out: Records) -> None:
        stored = type(proven.plan).from_mapping(json.loads(json.dumps(proven.plan.to_mapping())))
        again = evaluate_plan(held_out, stored, IDS)
        assert (again.n, again.disagreements) == (proven.certificate.n, proven.certificate.k)

    def test_wrong_final_answers_of_inputs_that_stay_count(self, held_out: Records) -> None:
        final = np.ones(1500, dtype=bool)
        final[::20] = False  # 5 % of all, far over a budget of 2 %
        result = certified_on(recorded(500, 6, seed=1), replace(held_out, final_agrees=final))
        assert result == NotCertified("OverBudget", None)

    def test_the_path_goes_from_cautious_to_bold_in_the_ranks_of_a(self) -> None:
        a = recorded(400, 6, seed=1)
        found = best_plan(a, max_disagreement=0.02).plan
        path = rank_path(a, found.active, found.thresholds)
        for earlier, later in pairwise(path):
            assert all(x <= y for x, y in zip(earlier, later, strict=True))
        ranks = [
            [
                float((a.uncertainty[:, r] < np.float32(float(t))).mean())
                for r, t in zip(found.active, step, strict=True)
            ]
            for step in (path[0], found.thresholds)
        ]
        assert ranks[0] == pytest.approx([0.1 * x for x in ranks[1]], abs=0.005)
        assert all(t == t.quantize(Decimal("0.000001")) for step in path for t in step)

    def test_a_plan_without_ramps_has_nothing_to_certify(self, held_out: Records) -> None:
        assert rank_path(held_out, (), ()) == []
        assert try_path([], held_out, ramp_ids=IDS, budget=0.01, delta=0.05) == NotCertified("NothingSaves")

    def test_later_tests_are_stricter_and_all_together_spend_delta(self) -> None:
        levels = [allowance(0.05, j) for j in range(1, 20_000)]
        assert levels == sorted(levels, reverse=True)
        assert 0.0499 < sum(levels) <= 0.05

    @pytest.mark.parametrize(("delta", "index"), [(0.0, 1), (1.0, 1), (0.05, 0)])
    def test_an_allowance_out_of_range_is_refused(self, delta: float, index: int) -> None:
        with pytest.raises(InvalidArgumentError):
            allowance(delta, index)


class TestThePromise:
    @staticmethod
    def draw(seed: int, pool: Records, *, n: int, budget: float) -> Certified | NotCertified:
        rows = np.random.default_rng(seed).integers(0, len(pool), n)
        sample = pool.take(rows)
        return certified_on(sample.take(slice(n // 4)), sample.take(slice(n // 4, None)), budget=budget)

    def check(self, *, runs: int, n: int, budget: float) -> None:
        """The pool is the population: the truth is the plan's rate on all of it."""
        pool = recorded(30_000, 6, seed=11)
        broken = some = 0
        for seed in range(runs):
            result = self.draw(seed, pool, n=n, budget=budget)
            if isinstance(result, Certified):
                some += 1
                broken += evaluate_plan(pool, result.plan, IDS).disagreement > budget
        assert stats.binom.sf(broken - 1, runs, 0.05) > 0.001, f"{broken} of {runs} draws broke the budget"
        assert some >= 0.9 * runs, f"only {some} of {runs} draws certified anything"

    @pytest.mark.slow
    def test_certified_plans_break_the_budget_no_more_often_than_delta(self) -> None:
        self.check(runs=40, n=1000, budget=0.02)

    @pytest.mark.slow
    @pytest.mark.parametrize(("n", "budget"), [(1000, 0.02), (2000, 0.01)])
    def test_the_same_over_many_draws(self, n: int, budget: float) -> None:
        self.check(runs=300, n=n, budget=budget)


class TestTooLittleData:
    @SAME_EXAMPLES
    @given(budget=st.floats(0.002, 0.3), level=st.floats(0.001, 0.2))
    def test_the_fewest_labels_are_exactly_those_that_can_pass(self, budget: float, level: float) -> None:
        n = fewest_labels(budget, level)
        assert p_value(0, n, budget=budget) <= level * (1 + 1e-9)
        assert n == 1 or p_value(0, n - 1, budget=budget) > level * (1 - 1e-9)

    def test_it_says_how_many_more_would_do(self) -> None:
        result = certified_on(recorded(500, 6, seed=1), recorded(100, 6, seed=2))
        assert isinstance(result, NotCertified)
        assert result.reason == "TooFewLabels"
        assert 100 + (result.needed_more or 0) == fewest_labels(0.02, allowance(0.05, 1))

    @SAME_EXAMPLES
    @given(rate=st.sampled_from([0.0, 0.001, 0.003, 0.006]), level=st.sampled_from([0.05, 0.03, 0.005]))
    def test_the_planner_gives_the_power_it_promises(self, rate: float, level: float) -> None:
        n = labels_for(rate, budget=0.01, level=level, power=0.9)
        assert n is not None
        assert stats.binom.cdf(largest_passing_count(n, budget=0.01, level=level), n, rate) >= 0.9

    @SAME_EXAMPLES
    @given(n=st.integers(1, 3000), budget=st.floats(0.005, 0.2), level=st.floats(0.001, 0.2))
    def test_the_largest_passing_count_is_the_last_that_passes(self, n: int, budget: float, level: float) -> None:
        k = largest_passing_count(n, budget=budget, level=level)
        assert k == -1 or p_value(k, n, budget=budget) <= level
        assert p_value(k + 1, n, budget=budget) > level

    def test_labels_to_wait_for_are_told_without_scipy(self) -> None:
        """Every service without a plan waits for some: the import took 13 MiB of an idle operator."""
        code = "import sys; from offramp_core.tuning import testable_labels as told; print(told(0.02, 0.005))"
        code += "; sys.exit('scipy.special' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_no_number_of_labels_helps_a_plan_over_budget(self) -> None:
        assert labels_for(0.02, budget=0.01, level=0.05) is None
        assert more_labels(30, 1000, budget=0.01, level=0.05) is None
        assert (more_labels(4, 600, budget=0.01, level=0.05) or 0) > 0


class TestVerification:
    def test_it_survives_json(self, proven: Certified) -> None:
        text = json.dumps(proven.certificate.to_mapping())
        assert Certificate.from_mapping(json.loads(text)) == proven.certificate

    def test_it_holds_on_the_records_it_was_made_from(self, proven: Certified, held_out: Records) -> None:
        assert verify_certificate(proven.certificate, proven.plan) is None
        assert verify_certificate(proven.certificate, proven.plan, records=held_out, ramp_ids=IDS) is None

    @pytest.mark.parametrize(
        ("field", "value", "word"),
        [
            ("plan_hash", "00", "belongs to plan"),
            ("k", 0, "p_value"),
            ("k", 900, "above the level"),
            ("n", -1, "counts"),
            ("level", 0.9, "allowance"),
            ("test_index", 0, "test_index"),
            ("test_index", 50, "allowance"),
            ("budget", 1.5, "budget"),
            ("method", "trust-me", "unknown"),
            ("ramp_set_digest", "sha256:other", "digests"),
        ],
    )
    def test_a_changed_certificate_is_found_out(self, proven: Certified, field: str, value: object, word: str) -> None:
        reason = verify_certificate(replace(proven.certificate, **{field: value}), proven.plan)  # type: ignore[arg-type]
        assert reason is not None
        assert word in reason

    def test_other_records_are_found_out(self, proven: Certified, held_out: Records) -> None:
        uncertainty = held_out.uncertainty.copy()
        uncertainty[7, 3] = 0.5
        reason = verify_certificate(
            proven.certificate, proven.plan, records=replace(held_out, uncertainty=uncertainty), ramp_ids=IDS
        )
        assert reason == "these are not the records it was made from"

    @pytest.mark.parametrize("value", [{}, {"method": "rank-path"}, "text", None])
    def test_what_is_no_certificate_is_refused(self, value: object) -> None:
        with pytest.raises(InvalidArgumentError):
            Certificate.from_mapping(value)  # type: ignore[arg-type]
