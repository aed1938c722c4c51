"""Losses between 0 and 1: certificates keep the budget of the mean, anybody can check them, pins are judged by them,
and workers count them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scores import IDS, REQUEST, recorded

from offramp_core.certify import (
    METHOD,
    METHOD_LOSSES,
    Certificate,
    Certified,
    Losses,
    NotCertified,
    SliceBudget,
    Subject,
    allowance,
    dependence,
    expected_path,
    fewest_labels,
    labels_for,
    p_value,
    passing_steps,
    verify_certificate,
)
from offramp_core.certify import test_path as try_path
from offramp_core.certify.means import least_p_value
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evaluate import evaluate, evaluate_plan
from offramp_core.evidence.graded import coins, counted_errors
from offramp_core.plan import Plan
from offramp_core.records import Records, records_from_arrays
from offramp_core.tuning import NoGain, PinCheck, Proposed, check_pin, tune

Floats = npt.NDArray[np.float64]
SUBJECT = Subject(IDS, REQUEST.backbone_digest, REQUEST.ramp_set_digest)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=60).map(np.array)
budgets = st.floats(0.005, 0.4)


def graded(n: int, *, seed: int, mild: float = 0.2) -> Records:
    """Records in which an answer that differs loses about ``mild`` of it, now and then all."""
    plain = recorded(n, len(IDS), seed=seed)
    rng = np.random.default_rng(seed + 1)
    amount = np.where(
        rng.random(plain.agrees.shape) < 0.05, 1.0, rng.uniform(0.5 * mild, 1.5 * mild, plain.agrees.shape)
    )
    loss = np.where(plain.agrees, 0.0, amount).astype(np.float32)
    return replace(plain, loss=loss, final_loss=np.zeros(n, dtype=np.float32), graded=True)


POOL = graded(40_000, seed=7)


def path_of(a: Records, *, budget: float) -> list[Plan]:
    return [SUBJECT.plan(s.active, s.thresholds) for s in expected_path(a, max_disagreement=budget, max_ramps=2)]


def drawn(n: int, seed: int) -> Records:
    rows = np.random.default_rng(seed).integers(0, len(POOL), n)
    return replace(POOL.take(rows), time=np.arange(float(n)))


def certified(seed: int = 1, *, budget: float = 0.02) -> tuple[Certified, Records]:
    b = drawn(1500, seed)
    result = try_path(path_of(drawn(300, seed + 100), budget=budget), b, ramp_ids=IDS, budget=budget, delta=0.05)
    assert isinstance(result, Certified)
    return result, b


class TestTheTestOfAMean:
    @given(values=shares, budget=budgets)
    def test_losses_of_the_same_sum_are_surest_where_they_are_alike(self, values: Floats, budget: float) -> None:
        losses = Losses.of(values)
        least = least_p_value(losses.total, len(losses), budget=budget)
        assert least <= losses.p_value(budget=budget) * (1 + 1e-9)

    @given(k=st.integers(0, 40), n=st.integers(1, 2000), budget=budgets)
    def test_of_whole_losses_a_bet_never_claims_more_than_counting(self, k: int, n: int, budget: float) -> None:
        k = min(k, n)
        whole = Losses.of(np.arange(n) < k)
        assert whole.p_value(budget=budget) >= p_value(k, n, budget=budget) * (1 - 1e-9)

    @given(values=shares, worse=shares, budget=budgets)
    def test_who_loses_more_is_never_surer(self, values: Floats, worse: Floats, budget: float) -> None:
        n = min(len(values), len(worse))
        more = np.maximum(values[:n], worse[:n])
        assert Losses.of(values[:n]).p_value(budget=budget) <= Losses.of(more).p_value(budget=budget) * (1 + 1e-9)
        assert Losses.of(values[:n]).harm(budget=budget) >= Losses.of(more).harm(budget=budget) * (1 - 1e-9)

    @given(values=shares, budget=budgets, copies=st.integers(2, 9))
    def test_copies_prove_what_one_of_each_does(self, values: Floats, budget: float, copies: int) -> None:
        alone, many = Losses.of(values), Losses.of(np.repeat(values, copies))
        for test in (Losses.p_value, Losses.harm):
            assert test(many, budget=budget, design_effect=copies) == pytest.approx(
                test(alone, budget=budget), rel=1e-6
            )

    @given(values=shares, budget=budgets)
    def test_a_plan_is_never_proven_good_and_bad_at_once(self, values: Floats, budget: float) -> None:
        losses = Losses.of(np.tile(values, 20))
        assert max(losses.p_value(budget=budget), losses.harm(budget=budget)) > 0.05

    @pytest.mark.slow
    @pytest.mark.parametrize("budget", [0.01, 0.1])
    def test_the_level_holds_at_the_budget_for_few_whole_and_many_small_losses(self, budget: float) -> None:
        rng, runs, level = np.random.default_rng(3), 2000, 0.05
        for size in (1.0, 0.3, 2 * budget):
            losses = np.where(rng.random((runs, 700)) < budget / size, size, 0.0)
            good = sum(Losses(row, graded=True).p_value(budget=budget) <= level for row in losses)
            bad = sum(Losses(row, graded=True).harm(budget=budget) <= level for row in losses)
            assert stats.binom.sf(max(good, bad) - 1, runs, level) > 0.001, (size, good, bad)

    def test_labels_that_are_announced_suffice_for_the_hardest_losses(self) -> None:
        level = allowance(0.05, 1)
        n = labels_for(0.004, budget=0.02, level=level, power=0.8, graded=True)
        assert n is not None
        rng = np.random.default_rng(5)
        passed = sum(Losses.of(rng.random(n) < 0.004).p_value(budget=0.02) <= level for _ in range(300))
        assert stats.binom.cdf(passed, 300, 0.8) > 0.001
        fewest = fewest_labels(0.02, level, graded=True)
        assert [Losses.of(np.zeros(m)).p_value(budget=0.02) <= level for m in (fewest - 1, fewest)] == [False, True]

    @given(values=shares, budget=budgets)
    def test_as_many_more_of_the_same_as_it_says_would_pass(self, values: Floats, budget: float) -> None:
        losses, level = Losses.of(values), 0.03
        more = losses.more(budget=budget, level=level)
        if more is None:
            assert Losses.of(np.tile(values, 50)).p_value(budget=budget) > level
        elif more < 5000:
            times = math.ceil(1 + more / len(values))
            assert Losses.of(np.tile(values, times)).p_value(budget=budget) <= level

    @pytest.mark.parametrize(
        ("values", "graded", "message"),
        [
            ([0.1, math.nan], True, r"loss\[1\] is nan"),
            ([0.1, -0.1], True, r"loss\[1\] is -0.1"),
            ([1.5], True, r"loss\[0\] is 1.5; it must lie in \[0, 1\]"),
            ([0.0, 0.5], False, r"loss\[1\] is 0.5; it must be 0 or 1"),
            ([[0.5]], True, "one-dimensional"),
        ],
    )
    def test_what_is_no_loss_is_refused_with_its_row(self, values: list[Any], graded: bool, message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            Losses.of(np.array(values), graded=graded)


class TestPlansInOrder:
    @given(columns=st.integers(1, 6), seed=st.integers(0, 10_000), budget=budgets)
    def test_they_pass_until_the_first_that_does_not(self, columns: int, seed: int, budget: float) -> None:
        rng = np.random.default_rng(seed)
        losses = rng.random((200, columns)) * rng.random(columns) * budget * 2
        expected = 0
        for column in losses.T:  # one by one, by the definition of the capital
            stakes = [1 - f for f in (0.1, 0.2, 0.35, 0.5, 0.7, 0.85)]
            capital = np.mean([np.prod(1 - s * (column - budget) / (1 - budget)) for s in stakes])
            if capital < 1 / 0.05:
                break
            expected += 1
        assert passing_steps((Losses.of(c) for c in losses.T), budget=budget, level=0.05) == expected

    def test_none_behind_the_first_that_fails_is_asked_for(self) -> None:
        steps = iter([Losses.of(np.zeros(500)), Losses.of(np.full(500, 0.2)), Losses.of(np.zeros(500))])
        assert passing_steps(steps, budget=0.05, level=0.03) == 1
        assert len(next(steps)) == 500

    @pytest.mark.slow
    @pytest.mark.parametrize("budget", [0.01, 0.02, 0.05, 0.1])
    def test_answers_of_a_cheaper_variant_break_the_budget_in_at_most_delta_of_draws(self, budget: float) -> None:
        """As a generative model's: a request escalates where the variant is unsure; columns are thresholds, the last
        ones over the budget."""
        rng = np.random.default_rng(11)
        unsure = rng.random(50_000)
        lost = np.where(rng.random(50_000) < unsure**2, rng.beta(1, 3, 50_000), 0.0)
        thresholds = np.linspace(0.05, 1, 60)
        truth = np.array([lost[unsure < t].sum() / len(lost) for t in thresholds])
        false = some = 0
        for _ in range(200):
            rows = rng.integers(0, len(lost), 600)
            steps = (Losses.of(np.where(unsure[rows] < t, lost[rows], 0.0)) for t in thresholds)
            reach = passing_steps(steps, budget=budget, level=0.05)
            some += reach > 0
            false += reach > 0 and truth[reach - 1] > budget
        assert some > 150
        assert truth[-1] > budget or budget == 0.1
        assert stats.binom.sf(false - 1, 200, 0.05) > 0.001, f"{false} of 200"


class TestCertificates:
    def test_one_of_graded_losses_is_of_its_own_kind_and_about_the_mean(self) -> None:
        result, b = certified()
        proof = result.certificate
        assert proof.method == METHOD_LOSSES
        assert proof.lost == pytest.approx(evaluate_plan(b, result.plan, IDS).disagreement * len(b))
        assert proof.k > 0.02 * len(b) > proof.lost  # more answers differ than the budget allows, and lose less than it
        assert verify_certificate(proof, result.plan, records=b) is None
        again = Certificate.from_mapping(json.loads(json.dumps(proof.to_mapping())))
        assert again == proof

    def test_whole_losses_are_counted_as_ever(self) -> None:
        plain = replace(POOL, loss=None, final_loss=None, graded=False)
        rows = np.random.default_rng(1).integers(0, len(POOL), 1500)
        a, b = plain.take(rows[:300]), plain.take(rows[300:])
        result = try_path(path_of(a, budget=0.05), b, ramp_ids=IDS, budget=0.05, delta=0.05)
        assert isinstance(result, Certified)
        assert result.certificate.method == METHOD
        assert "lost" not in result.certificate.to_mapping()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"lost": 1.0}, "the records give losses of"),
            ({"lost": 60.0}, "have p="),
            ({"lost": 5000.0}, "cannot have lost"),
            ({"p_value": 1e-30}, "have p="),
            ({"p_value": 0.9}, "above the level"),
            ({"method": METHOD}, "lost belongs to rank-path-losses"),
            ({"lost": None}, "lost belongs to rank-path-losses"),
            ({"k": 3000}, "cannot have lost"),
            ({"level": 0.5}, "exceeds the allowance"),
            ({"method": "trust-me"}, "unknown"),
        ],
    )
    def test_what_it_claims_is_checked(self, change: dict[str, Any], reason: str) -> None:
        result, b = certified()
        found = verify_certificate(replace(result.certificate, **change), result.plan, records=b)
        assert found is not None
        assert reason in found

    def test_a_p_value_that_the_losses_do_not_give_is_found_with_the_records(self) -> None:
        result, b = certified()
        forged = replace(result.certificate, p_value=result.certificate.p_value * 1.01)
        assert verify_certificate(forged, result.plan) is None
        assert "not that of its losses" in str(verify_certificate(forged, result.plan, records=b))

    def test_other_losses_are_other_records(self) -> None:
        result, b = certified()
        assert b.loss is not None
        other = replace(b, loss=(b.loss * 0.9).astype(np.float32))
        assert verify_certificate(result.certificate, result.plan, records=other) is not None

    def test_a_slice_has_a_mean_of_its_own(self) -> None:
        b = drawn(4000, 3)
        group = (np.arange(4000) % 2).astype(np.int64)
        assert b.loss is not None
        b = replace(b, slice_id=group, loss=np.where((group == 1)[:, None], np.float32(0.3), 0.5 * b.loss))
        result = try_path(
            path_of(drawn(300, 103), budget=0.02),
            b,
            ramp_ids=IDS,
            budget=0.02,
            delta=0.05,
            slices=(SliceBudget(0, 0.02), SliceBudget(1, 0.02)),
        )
        assert isinstance(result, Certified)
        kept, stopped = result.certificate.slices
        assert kept.certified and kept.lost is not None and kept.lost / kept.n < 0.02
        assert not stopped.certified and result.stopped_slices == (1,)
        assert verify_certificate(result.certificate, result.plan, records=b) is None
        forged = replace(result.certificate, slices=(kept, replace(stopped, lost=0.9 * (stopped.lost or 0))))
        assert "slice 1" in str(verify_certificate(forged, result.plan, records=b))

    def test_a_path_over_the_budget_says_how_many_more_labels_would_do_or_that_none_would(self) -> None:
        bold = [SUBJECT.plan((5,), (Decimal("0.9"),))]
        assert try_path(bold, drawn(800, 2), ramp_ids=IDS, budget=0.001, delta=0.05) == NotCertified(
            "TooFewLabels", fewest_labels(0.001, allowance(0.05, 1), graded=True) - 800
        )
        assert try_path(bold, drawn(8000, 2), ramp_ids=IDS, budget=0.001, delta=0.05) == NotCertified("OverBudget")

    @pytest.mark.slow
    @pytest.mark.parametrize("budget", [0.01, 0.02, 0.05, 0.1])
    def test_certified_plans_lose_more_than_the_budget_in_at_most_delta_of_draws(self, budget: float) -> None:
        false = some = 0
        for seed in range(20):
            path = path_of(drawn(200, 500 + seed), budget=budget)
            for draw in range(10):
                b = drawn(900, 1000 * seed + draw)
                result = try_path(path, b, ramp_ids=IDS, budget=budget, delta=0.05)
                if isinstance(result, Certified):
                    some += 1
                    false += evaluate_plan(POOL, result.plan, IDS).disagreement > budget
        assert some > 150
        assert stats.binom.sf(false - 1, 200, 0.05) > 0.001, f"{false} of 200"


class TestRecords:
    ARRAYS: dict[str, npt.NDArray[Any]] = {  # noqa: RUF012 - read only
        "uncertainty": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
        "segment_seconds": np.ones(3),
        "ramp_seconds": np.zeros(2),
    }

    def test_losses_of_whole_numbers_are_counted_and_others_are_graded(self) -> None:
        whole = records_from_arrays({**self.ARRAYS, "loss": np.array([[0, 1], [0, 0], [1, 0]])})
        assert not whole.graded
        part = records_from_arrays({**self.ARRAYS, "loss": np.array([[0, 1.0], [0, 0], [1, 0]])})
        assert part.graded

    def test_a_fraction_beside_whole_numbers_is_refused(self) -> None:
        arrays = {**self.ARRAYS, "loss": np.zeros((3, 2), np.uint8), "final_loss": np.array([0, 0.5, 0])}
        with pytest.raises(InvalidRecordsError, match=r"final_loss\[1\] is 0.5"):
            records_from_arrays(arrays)

    def test_the_chain_of_a_variant_loses_what_its_final_column_does(self) -> None:
        """As a generative model's records are laid out: the variant's answers as an exit, and as the last word of its
        own chain."""
        loss = np.array([[0.25, 0.25], [0.0, 0.0], [1.0, 1.0]], dtype=np.float32)
        records = records_from_arrays(
            {
                **self.ARRAYS,
                "loss": loss,
                "ramp_id": np.array(["int4", "int4/final"]),
                "ramp_precision": np.array(["", "int4"]),
                "segment_seconds": np.array([0.0, 1.0]),
                "ramp_seconds": np.array([0.4]),
                "int4_segment_seconds": np.array([0.0, 0.4]),
                "int4_ramp_seconds": np.array([0.4]),
            }
        )
        assert evaluate(records, (), ()).disagreement == 0
        assert evaluate(records.at("int4"), (), ()).disagreement == pytest.approx(1.25 / 3)
        assert evaluate(records, (0,), (0.4,)).lost == pytest.approx(0.25)

    @given(seed=st.integers(0, 1000), low=st.floats(0, 1), high=st.floats(0, 1))
    def test_a_plan_loses_what_its_rows_lose_one_by_one(self, seed: int, low: float, high: float) -> None:
        records = graded(40, seed=seed)
        assert records.loss is not None and records.final_loss is not None
        lost = 0.0
        for row in range(len(records)):
            for ramp, threshold in ((1, low), (4, high)):
                if records.uncertainty[row, ramp] < np.float32(threshold):
                    lost += float(records.loss[row, ramp])
                    break
            else:
                lost += float(records.final_loss[row])
        assert evaluate(records, (1, 4), (low, high)).lost == pytest.approx(lost)


class TestTuning:
    def test_it_finds_and_certifies_plans_by_what_they_lose(self) -> None:
        outcome = tune(drawn(2500, 1), replace(REQUEST, max_disagreement=0.01))
        assert isinstance(outcome, Proposed)
        assert outcome.certificate.method == METHOD_LOSSES
        assert evaluate_plan(POOL, outcome.plan, IDS).disagreement <= 0.01
        whole = replace(drawn(2500, 1), graded=False, loss=None, final_loss=None)
        counted = tune(whole, replace(REQUEST, max_disagreement=0.01))
        assert outcome.predicted.saving > (counted.predicted.saving if isinstance(counted, Proposed) else 0) + 0.05

    def test_where_every_exit_loses_much_nothing_is_worth_proposing(self) -> None:
        records = drawn(2500, 1)
        hopeless = replace(records, loss=np.full_like(records.loss, 0.9), agrees=np.zeros_like(records.agrees))
        assert isinstance(tune(hopeless, replace(REQUEST, max_disagreement=0.01, min_gain=0.02)), NoGain)

    def test_a_pin_is_judged_by_its_mean_loss(self) -> None:
        plan = SUBJECT.plan((3,), (Decimal("0.9"),))
        mean = evaluate_plan(POOL, plan, IDS).disagreement
        fine, reckless = (
            check_pin(drawn(3000, 4), plan, IDS, budget=1.2 * mean),
            check_pin(drawn(3000, 4), plan, IDS, budget=0.6 * mean),
        )
        assert isinstance(fine, PinCheck) and isinstance(reckless, PinCheck)
        assert not fine.refused
        assert reckless.refused
        assert reckless.words == f"answers would have lost {reckless.lost / 3000:.1%} on average"

    @pytest.mark.slow
    def test_a_pin_at_its_budget_is_refused_no_more_often_than_alpha(self) -> None:
        plan = SUBJECT.plan((3,), (Decimal("0.9"),))
        budget = evaluate_plan(POOL, plan, IDS).disagreement
        checks = [check_pin(drawn(1000, seed), plan, IDS, budget=budget) for seed in range(200)]
        refused = sum(isinstance(c, PinCheck) and c.refused for c in checks)
        assert stats.binom.sf(refused - 1, 200, 0.05) > 0.001

    @pytest.mark.parametrize("scene", [2, 10])
    def test_copies_are_worth_one_label_a_scene(self, scene: int) -> None:
        for seed in range(5):
            b = drawn(2000, seed)
            copies = replace(b.take(np.arange(2000) // scene), time=np.arange(2000.0))
            seen = dependence(copies, budget=0.01)
            assert seen is not None
            assert 0.8 * scene <= seen.design_effect <= 1.8 * scene

    def test_independent_requests_are_worth_one_label_each(self) -> None:
        effects = [dependence(drawn(2000, seed), budget=0.01) for seed in range(20)]
        assert sum(e is not None and e.design_effect == 1 for e in effects) >= 19


class TestCounting:
    @given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50))
    def test_all_or_nothing_is_counted_as_it_is_and_the_same_each_time(self, draws: list[float]) -> None:
        n = len(draws)
        assert not counted_errors(np.zeros(n), draws).any()
        assert counted_errors(np.ones(n), draws).all()
        half = np.full(n, 0.5)
        once = counted_errors(half, draws)
        assert (once == counted_errors(half, np.array(draws, dtype=np.float32))).all()

    def test_errors_have_the_mean_of_losses_whatever_share_is_audited(self) -> None:
        rng = np.random.default_rng(2)
        for audited in (1.0, 0.02):
            draws = rng.random(200_000) * audited
            assert stats.kstest(coins(draws), "uniform").pvalue > 0.001
            for loss in (0.01, 0.3):
                errors = int(counted_errors(np.full(len(draws), loss), draws).sum())
                assert stats.binomtest(errors, len(draws), loss).pvalue > 0.001

    def test_neighbouring_draws_tell_nothing_of_each_other(self) -> None:
        near = np.nextafter(np.float32(0.01), np.float32(1))
        grid = np.linspace(np.float32(0.01), near + np.float32(1e-5), 5000, dtype=np.float32)
        flips = coins(grid)
        assert abs(float(np.corrcoef(flips[:-1], flips[1:])[0, 1])) < 0.06
