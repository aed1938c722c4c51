"""Evidence: wrong no more often than promised however often one looks, and quick where there is something to see.

Statistical bounds hold when a one-sided binomial test at 0.1 % does not refute them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence import detector, exposure, one_arm
from offramp_core.evidence.one_arm import Alternative, alternatives, log_e_value, log_mixture
from offramp_core.evidence.slow import Judged
from offramp_core.evidence.two_arm import harmful_shares, log_e_share, share_under_ratio
from offramp_core.sketch import SecondsSketch, bucket_index

SAME_EXAMPLES = settings(max_examples=60, derandomize=True)

ALPHA = 0.05


def at_most(events: int, runs: int, level: float) -> bool:
    """Whether ``events`` of ``runs`` do not refute, at 0.1 %, that their rate is at most ``level``."""
    return bool(stats.binom.sf(events - 1, runs, level) > 0.001)


def at_least(events: int, runs: int, level: float) -> bool:
    return bool(stats.binom.cdf(events, runs, level) > 0.001)


def stopping_times(
    rate: float, *, p0: float, grid: tuple[float, ...], runs: int, looks: int, alpha: float = ALPHA, seed: int = 0
) -> npt.NDArray[np.int64]:
    """First look, after every single observation, at which the evidence crosses; 0 where it never does."""
    rng = np.random.default_rng(seed)
    stopped, k = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=np.int64)
    for begin in range(0, looks, 1000):
        open_runs = np.flatnonzero(stopped == 0)
        outcomes = rng.random((len(open_runs), min(1000, looks - begin))) < rate
        counts = k[open_runs, None] + outcomes.cumsum(axis=1)
        n = np.arange(begin + 1, begin + outcomes.shape[1] + 1)
        crossed = log_mixture(counts, np.broadcast_to(n, counts.shape), p0=p0, grid=grid) >= math.log(1 / alpha)
        hit = crossed.any(axis=1)
        stopped[open_runs[hit]] = n[crossed.argmax(axis=1)[hit]]
        k[open_runs] = counts[:, -1]
    return stopped


class TestOneArm:
    @SAME_EXAMPLES
    @given(
        n=st.integers(0, 300),
        share=st.floats(0, 1),
        p0=st.floats(0.001, 0.6),
        side=st.sampled_from(["greater", "less"]),
    )
    def test_it_is_the_average_of_likelihood_ratios(self, n: int, share: float, p0: float, side: Alternative) -> None:
        k = int(share * n)
        ratios = [(q / p0) ** k * ((1 - q) / (1 - p0)) ** (n - k) for q in alternatives(p0, side)]
        plain = sum(ratios) / len(ratios)
        if 1e-200 < plain < 1e200:
            assert log_e_value(k, n, p0=p0, alternative=side) == pytest.approx(math.log(plain), abs=1e-9)

    @SAME_EXAMPLES
    @given(n=st.integers(1, 10**9), p0=st.floats(0.0001, 0.9))
    def test_counts_of_any_size_give_a_finite_number(self, n: int, p0: float) -> None:
        for k in (0, n // 2, n):
            assert math.isfinite(log_e_value(k, n, p0=p0))

    @pytest.mark.parametrize("p0", [pytest.param(0.01, marks=pytest.mark.slow), 0.05])
    @pytest.mark.parametrize("side", ["greater", "less"])
    def test_a_plan_exactly_at_its_budget_is_rarely_judged_however_often_one_looks(
        self, p0: float, side: Alternative
    ) -> None:
        stopped = stopping_times(p0, p0=p0, grid=alternatives(p0, side), runs=400, looks=4000)
        assert at_most(int((stopped > 0).sum()), 400, ALPHA)

    def test_workers_pool_by_adding_counts_in_any_order(self) -> None:
        blocks = [(100, 3), (50, 0), (7, 7)]
        forward, backward = one_arm.init(), one_arm.init()
        for n, k in blocks:
            forward = one_arm.update(forward, n, k)
        for n, k in reversed(blocks):
            backward = one_arm.update(backward, n, k)
        assert forward == backward == one_arm.Counts(157, 10)

    @pytest.mark.parametrize(
        "bad",
        [
            (5, 4, 0.1),
            (-1, 4, 0.1),
            (0.5, 4, 0.1),
            (1, 4.5, 0.1),
            (1, math.inf, 0.1),
            (math.nan, 4, 0.1),
            (1, 4, 0.0),
            (1, 4, 1.0),
            (1, 4, math.nan),
            (1, 4, -0.1),
        ],
    )
    def test_impossible_counts_and_rates_are_refused_in_one_line(self, bad: tuple[Any, Any, float]) -> None:
        for refuse in (
            lambda: log_e_value(bad[0], bad[1], p0=bad[2]),
            lambda: log_e_share(bad[0], bad[1], share=bad[2]),
            lambda: detector.update(detector.init(), bad[1], bad[0], p0=bad[2]),
        ):
            with pytest.raises(InvalidArgumentError, match=r"^[^\n]+(must be|must satisfy)[^\n]+$"):
                refuse()

    def test_outcomes_are_read_and_anything_but_zero_and_one_is_named(self) -> None:
        assert one_arm.as_outcomes([0, 1, 1.0, True, False]).tolist() == [False, True, True, True, False]
        assert one_arm.as_outcomes([]).tolist() == []
        with pytest.raises(InvalidArgumentError, match=r"outcomes\[2\] is nan"):
            one_arm.as_outcomes([0.0, 1.0, math.nan])
        with pytest.raises(InvalidArgumentError, match=r"outcomes\[1\] is 2"):
            one_arm.as_outcomes([0, 2])
        with pytest.raises(InvalidArgumentError, match="shape"):
            one_arm.as_outcomes([[0, 1]])


class TestTwoArms:
    @pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
    def test_alike_arms_are_rarely_judged_apart_however_often_one_looks(self, share: float) -> None:
        stopped = stopping_times(share, p0=share, grid=harmful_shares(share), runs=400, looks=3000, alpha=0.01)
        assert at_most(int((stopped > 0).sum()), 400, 0.01)

    def test_shares_follow_from_how_much_riskier_a_canary_batch_is(self) -> None:
        assert share_under_ratio(0.5, 3.0) == pytest.approx(0.75)
        assert share_under_ratio(0.1, 1.0) == pytest.approx(0.1)


class TestExposure:
    def test_a_harmful_plan_is_found_with_the_promised_power(self) -> None:
        alpha = 0.01
        n = exposure.audits_needed(budget=0.02, harmful=0.06, alpha=alpha, power=0.95)
        stopped = stopping_times(0.06, p0=0.02, grid=alternatives(0.02), runs=800, looks=n, alpha=alpha)
        assert at_least(int((stopped > 0).sum()), 800, 0.95)
        half = stopping_times(0.06, p0=0.02, grid=alternatives(0.02), runs=800, looks=n // 2, alpha=alpha)
        assert (half > 0).mean() < 0.95  # and the number is not needlessly large

    @SAME_EXAMPLES
    @given(n=st.integers(1, 5000), p0=st.floats(0.002, 0.5))
    def test_the_rejection_count_is_the_first_that_crosses(self, n: int, p0: float) -> None:
        k = int(exposure.rejection_count(np.array([n]), p0=p0, alpha=0.01, grid=alternatives(p0))[0])
        assert exposure.rejects_from(n, p0=p0, alpha=0.01, grid=alternatives(p0)) == k
        if k <= n:
            assert log_e_value(k, n, p0=p0) >= math.log(100) - 1e-9
        if k > 0:
            assert log_e_value(min(k, n + 1) - 1, n, p0=p0) < math.log(100) + 1e-9

    def test_more_harm_and_less_certainty_need_less(self) -> None:
        needs = [exposure.audits_needed(budget=0.01, harmful=h, alpha=0.01) for h in (0.02, 0.03, 0.05)]
        assert needs == sorted(needs, reverse=True)
        assert exposure.audits_needed(budget=0.01, harmful=0.03, alpha=0.1) < needs[1]

    def test_a_large_budget_has_no_triple_but_still_an_answer(self) -> None:
        assert exposure.audits_needed(budget=0.5, harmful=1.5, alpha=0.01) < 200

    @pytest.mark.parametrize("weight", [5, 25, 50])
    def test_enough_judged_batches_find_a_canary_slower_than_allowed(self, weight: int) -> None:
        rng = np.random.default_rng(weight)
        stable = rng.lognormal(-4, 0.2, 20_000)
        sketch = sketch_of(stable)
        needed = exposure.judged_batches_needed([by_p90(sketch)], weight=weight, slowdown=1.2, alpha=0.01, limit=20_000)
        limit = sketch.quantile(0.9) or 0.0
        found = 0
        for _ in range(200):
            canary = rng.random(needed) < weight / 100
            seconds = rng.lognormal(-4, 0.2, needed) * np.where(canary, 1.05 * 1.2, 1.0)
            slow = seconds > limit * np.where(canary, 1.05, 1.0)
            found += log_e_share(int((slow & canary).sum()), int(slow.sum()), share=weight / 100) >= math.log(100)
        assert at_least(found, 200, 0.95)
        assert needed < 20_000

    def test_a_canary_that_takes_just_its_allowed_overhead_longer_is_not_rejected(self) -> None:
        rng = np.random.default_rng(3)
        limit, rejected = float(np.quantile(rng.lognormal(-4, 0.05, 20_000), 0.9)), 0
        for _ in range(400):
            canary = rng.random(4_000) < 0.3
            seconds = rng.lognormal(-4, 0.05, 4_000) * np.where(canary, 1.1, 1.0)
            slow = seconds > limit * np.where(canary, 1.1, 1.0)
            looks = range(100, 4_001, 100)
            rejected += any(
                log_e_share(int((slow & canary)[:n].sum()), int(slow[:n].sum()), share=0.3) >= math.log(100)
                for n in looks
            )
        assert at_most(rejected, 400, 0.01)

    def test_times_too_scattered_to_tell_give_the_limit_and_no_endless_search(self) -> None:
        scattered = sketch_of(np.random.default_rng(0).lognormal(-4, 5, 20_000))
        assert exposure.judged_batches_needed([by_p90(scattered)], weight=10, alpha=0.01, limit=5000) == 5000
        assert exposure.judged_batches_needed([], weight=10, alpha=0.01, limit=5000) == 5000

    def test_at_full_weight_there_is_nothing_to_compare(self) -> None:
        assert exposure.judged_batches_needed([by_p90(SecondsSketch({1: 10}))], weight=100, alpha=0.01) == 0

    @pytest.mark.parametrize("bad", [{"budget": 0.0}, {"harmful": 0.01}, {"alpha": 0.0}, {"power": 1.0}])
    def test_arguments_out_of_range_are_refused(self, bad: dict[str, float]) -> None:
        with pytest.raises(InvalidArgumentError):
            exposure.audits_needed(**{"budget": 0.01, "harmful": 0.03, "alpha": 0.01, "power": 0.9, **bad})


def sketch_of(seconds: npt.NDArray[np.float64]) -> SecondsSketch:
    values, counts = np.unique([bucket_index(float(s)) for s in seconds], return_counts=True)
    return SecondsSketch({int(v): int(c) for v, c in zip(values, counts, strict=True)})


def by_p90(seconds: SecondsSketch) -> Judged:
    """Batches of one kind, held against their 90th percentile."""
    return Judged(seconds, seconds.quantile(0.9) or 0.0)


def run_detector(
    rng: np.random.Generator, rates: npt.NDArray[np.float64], *, p0: float, run_length: float, block: int = 1
) -> int:
    """Observations until the alarm; 0 if there is none."""
    state = detector.init()
    outcomes = rng.random(len(rates)) < rates
    for begin in range(0, len(rates), block):
        part = outcomes[begin : begin + block]
        state = detector.update(state, len(part), int(part.sum()), p0=p0)
        if detector.alarm(state, run_length=run_length):
            return state.n
    return 0


class TestDetector:
    @pytest.mark.parametrize("block", [1, 20])
    def test_a_plan_within_budget_runs_for_the_promised_length_on_average(self, block: int) -> None:
        rng, length, horizon = np.random.default_rng(3), 200.0, 1500
        runs = [
            run_detector(rng, np.full(horizon, 0.05), p0=0.05, run_length=length, block=block) or horizon
            for _ in range(120)
        ]
        # Runs are cut at the horizon, which only shortens the mean.
        assert np.mean(runs) + 3.1 * np.std(runs) / math.sqrt(len(runs)) >= length

    def test_a_jump_to_five_percent_is_noticed_soon_even_after_a_long_quiet_time(self) -> None:
        rng, delays = np.random.default_rng(4), []
        for _ in range(40):
            state = detector.init()
            for k in rng.binomial(50, 0.002, 100):
                state = detector.update(state, 50, int(k), p0=0.01)
                assert not detector.alarm(state, run_length=100_000.0)
            while not detector.alarm(state, run_length=100_000.0):
                state = detector.update(state, 1, int(rng.random() < 0.05), p0=0.01)
            delays.append(state.n - 5000)
        assert np.quantile(delays, 0.9) < 700

    def test_accumulated_evidence_alone_would_be_blind_there(self) -> None:
        k_quiet, n_quiet, k_after, n_after = 10, 5000, 35, 700
        assert log_e_value(k_quiet + k_after, n_quiet + n_after, p0=0.01) < math.log(20)

    def test_single_outcomes_follow_the_textbook_recursion(self) -> None:
        p0, grid = 0.02, alternatives(0.02)
        m, state = [0.0] * len(grid), detector.init()
        for x in (0, 1, 0, 0, 1, 1):
            ratios = [q / p0 if x else (1 - q) / (1 - p0) for q in grid]
            m = [(before + 1) * ratio for before, ratio in zip(m, ratios, strict=True)]
            state = detector.update(state, 1, x, p0=p0)
        assert detector.statistic(state) == pytest.approx(sum(m) / len(m))

    def test_a_restart_loses_nothing(self) -> None:
        rng = np.random.default_rng(5)
        through = stored = detector.init()
        for _ in range(50):
            n = int(rng.integers(0, 40))
            k = int(rng.binomial(n, 0.03))
            through = detector.update(through, n, k, p0=0.02)
            stored = detector.update(
                detector.DetectorState.from_mapping(json.loads(json.dumps(asdict(stored)))), n, k, p0=0.02
            )
        assert stored == through

    def test_its_state_stays_small_and_finite_for_ever(self) -> None:
        state = detector.init()
        for _ in range(200):
            state = detector.update(state, 10_000, 10_000, p0=0.01)
        assert len(state.m) <= 6
        assert all(math.isfinite(m) for m in state.m)

    @pytest.mark.parametrize(
        "value", [{"m": [-1.0], "n": 1}, {"m": [1.0] * 9, "n": 1}, {"m": [float("inf")], "n": 1}, {"m": [], "n": -1}]
    )
    def test_a_broken_stored_state_is_refused(self, value: dict[str, object]) -> None:
        with pytest.raises(InvalidArgumentError):
            detector.DetectorState.from_mapping(value)
