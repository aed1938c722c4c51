"""The statistical suite: wrong no more often than promised after 40,000 looks, and quick where there is something to
see.

Levels and power of tests on counts are exact, from the walk of the counts; the control plane's own gates, the detector
and the intervals are simulated with fixed seeds and hold unless a one-sided binomial test at 0.1 % refutes them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bench import evidence as bench
from scipy import stats

from offramp_core.control.objects import ArmTally, BothArms
from offramp_core.control.rollouts.gates import GateInput, accuracy
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence import betting, detector, intervals, savings
from offramp_core.evidence.one_arm import Alternative, alternatives, log_e_value, log_mixture
from offramp_lab.stopping import corridor, stopping_time

LOOKS = 40_000


def at_most(events: int, runs: int, level: float) -> bool:
    """Whether ``events`` of ``runs`` do not refute, at 0.1 %, that their rate is at most ``level``."""
    return bool(stats.binom.sf(events - 1, runs, level) > 0.001)


def at_least(events: int, runs: int, level: float) -> bool:
    return bool(stats.binom.cdf(events, runs, level) > 0.001)


class TestStoppingTimes:
    """The exact recursion, against enumeration and simulation."""

    def test_it_equals_the_enumeration_of_every_sequence(self) -> None:
        rate, looks = 0.3, 10
        upper, lower = np.array([9, 2, 3, 3, 3, 4, 4, 4, 5, 5]), np.array([-1, -1, -1, -1, 0, 0, 0, 1, 1, 1])
        expected = np.zeros(looks)
        for code in range(2**looks):
            x = np.array([(code >> i) & 1 for i in range(looks)])
            k = x.cumsum()
            out = np.flatnonzero((k >= upper) | (k <= lower))
            if len(out):
                expected[out[0]] += rate ** x.sum() * (1 - rate) ** (looks - x.sum())
        assert corridor(rate, lower=lower, upper=upper).at == pytest.approx(expected, abs=1e-12)

    @pytest.mark.slow
    @pytest.mark.parametrize(("rate", "side"), [(0.04, "greater"), (0.003, "less")])
    def test_it_agrees_with_simulated_tests(self, rate: float, side: Alternative) -> None:
        looks, runs = 800, 2000
        exact = stopping_time(rate, p0=0.01, alpha=0.05, looks=looks, alternative=side)
        k = (np.random.default_rng(0).random((runs, looks)) < rate).cumsum(axis=1)
        n = np.broadcast_to(np.arange(1, looks + 1), k.shape)
        crossed = log_mixture(k, n, p0=0.01, grid=alternatives(0.01, side)) >= math.log(20)
        for look in (100, 400, 800):
            seen, p = int(crossed[:, :look].any(axis=1).sum()), exact.within(look)
            assert at_most(seen, runs, p)
            assert at_least(seen, runs, p)

    def test_certain_and_impossible_events(self) -> None:
        assert corridor(1.0, upper=np.array([2, 2, 2])).at.tolist() == [0, 1, 0]
        assert corridor(0.0, lower=np.array([-1, -1, 0])).at.tolist() == [0, 0, 1]
        assert stopping_time(0.0, p0=0.01, alpha=0.05, looks=500).ever == 0
        assert stopping_time(0.0, p0=0.01, alpha=0.05, looks=500).quantile(0.5) is None

    @pytest.mark.parametrize("bad", [{"rate": 1.5}, {"rate": math.nan}, {"alpha": 0.0}, {"p0": 1.0}])
    def test_arguments_out_of_range_are_refused(self, bad: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgumentError, match="must"):
            stopping_time(**{"rate": 0.1, "p0": 0.1, "alpha": 0.1, "looks": 10, **bad})
        with pytest.raises(InvalidArgumentError, match="corridor needs"):
            corridor(0.5)


class TestLevels:
    @pytest.mark.slow
    @pytest.mark.parametrize("side", ["greater", "less"])
    @pytest.mark.parametrize(("p0", "alpha"), [(0.01, 0.05), (0.01, 0.01 / 9), (0.05, 0.05)])
    def test_a_plan_at_its_budget_is_judged_within_the_level_after_forty_thousand_looks(
        self, side: Alternative, p0: float, alpha: float
    ) -> None:
        assert 0.3 * alpha < stopping_time(p0, p0=p0, alpha=alpha, looks=LOOKS, alternative=side).ever < alpha

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
    def test_alike_arms_are_told_apart_within_the_level_after_ten_thousand_bad_batches(self, share: float) -> None:
        assert 0.003 < bench.two_arm_level(share, alpha=0.01) < 0.01

    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [0.002, 0.01, 0.05])
    def test_the_interval_of_a_rate_misses_it_within_the_level_after_forty_thousand_looks(self, rate: float) -> None:
        n = np.arange(1, LOOKS + 1)
        limit = math.log(2 / 0.05)
        above = first_count(lambda k: intervals.log_evidence_above(k, n, rate=rate) >= limit, n)
        below = n - first_count(lambda k: intervals.log_evidence_above(k, n, rate=1 - rate) >= limit, n)
        assert 0.005 < corridor(rate, lower=below, upper=above).ever < 0.05

    @pytest.mark.slow
    def test_bets_on_weighted_audits_keep_their_level(self) -> None:
        """Three ramps audited with 2 %, 20 % and always, disagreement exactly at the budget."""
        rng, runs, looks = np.random.default_rng(1), 200, 40_000
        rejected = 0
        for _ in range(runs):
            state, peak = betting.init(p0=0.05, highest=50), -math.inf
            weights = weighted_audits(rng, looks, rate=0.05)
            for block in np.split(weights, 100):
                state = betting.update(state, block)
                peak = max(peak, betting.log_e_value(state))
            rejected += peak >= math.log(20)
        assert at_most(rejected, runs, 0.05)

    @pytest.mark.slow
    def test_bets_find_a_plan_at_three_budgets_through_weighted_audits(self) -> None:
        rng, runs, found = np.random.default_rng(2), 200, 0
        for _ in range(runs):
            state = betting.update(betting.init(p0=0.05, highest=50), weighted_audits(rng, 10_000, rate=0.15))
            found += betting.log_e_value(state) >= math.log(20)
        assert at_least(found, runs, 0.99)

    def test_bets_on_equal_weights_are_the_test_on_counts(self) -> None:
        for side in ("greater", "less"):
            state = betting.init(p0=0.01, highest=1.0, alternative=side)  # type: ignore[arg-type]
            state = betting.update(state, np.arange(500) % 40 == 0)
            assert betting.log_e_value(state) == pytest.approx(
                log_e_value(13, 500, p0=0.01, alternative=side)  # type: ignore[arg-type]
            )


def first_count(reached: Any, n: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Smallest k in 0..n at which evidence that grows with k is reached; n + 1 where it never is."""
    low, high = np.full_like(n, -1), n + 1
    while np.any(high - low > 1):
        middle = np.clip((low + high) // 2, 0, n)
        ok, wide = reached(middle), high - low > 1
        low, high = np.where(wide & ~ok, middle, low), np.where(wide & ok, middle, high)
    return high


def weighted_audits(rng: np.random.Generator, n: int, *, rate: float) -> npt.NDArray[np.float64]:
    probability = rng.choice([0.02, 0.2, 1.0], n, p=[0.6, 0.3, 0.1])
    return np.where((rng.random(n) < rate) & (rng.random(n) < probability), 1 / probability, 0.0)


class TestIntervals:
    @pytest.mark.slow
    def test_a_drifting_rate_is_covered_at_every_look(self) -> None:
        """The average of the conditional rates, while they wander over the day and jump, and depend on what has
        happened."""
        rng, runs, n = np.random.default_rng(3), 250, 10_000
        limit, missed = math.log(2 / 0.05), 0
        trials = np.arange(1, n + 1)
        for _ in range(runs):
            day = 0.01 + 0.009 * np.sin(np.linspace(0, rng.uniform(2, 40), n) + rng.uniform(0, 6))
            rates = np.where(trials > rng.integers(n), 0.05, day)
            k, average = (rng.random(n) < rates).cumsum(), rates.cumsum() / trials
            looks = np.unique(np.geomspace(1, n, 150).astype(int)) - 1
            missed += any(
                intervals.log_evidence_above(k[i], trials[i], rate=average[i]) >= limit
                or intervals.log_evidence_above(trials[i] - k[i], trials[i], rate=1 - average[i]) >= limit
                for i in looks
            )
        assert at_most(missed, runs, 0.05)

    def test_a_rate_s_interval_is_where_its_evidence_crosses(self) -> None:
        for k, n in ((0, 10), (1, 30), (20, 1000), (500, 1000), (10, 10)):
            got = intervals.rate_interval(k, n, alpha=0.05)
            assert k / n in got
            for end, events in ((got.low, k), (1 - got.high, n - k)):
                if end > 0:
                    at = intervals.log_evidence_above(np.array([events]), np.array([n]), rate=end)[0]
                    assert at == pytest.approx(math.log(40), abs=1e-6)
        assert intervals.rate_interval(0, 0, alpha=0.05) == intervals.Interval(0.0, 1.0)

    def test_it_costs_less_than_twice_the_width_of_an_interval_that_may_be_read_once(self) -> None:
        for n in (1000, 30_000, 1_000_000):
            k = n // 50
            got = intervals.rate_interval(k, n, alpha=0.05)
            once = 2 * 1.96 * math.sqrt(0.02 * 0.98 / n)
            assert once < got.high - got.low < 2 * once


class TestSavings:
    @pytest.mark.slow
    def test_what_a_holdback_measures_covers_the_truth_at_every_look_in_bursts_and_drift(self) -> None:
        rng, runs, n, missed = np.random.default_rng(7), 150, 20_000, 0
        for _ in range(runs):
            ran = bench.bursty_batches(rng, n)
            without = np.minimum(ran.seconds / ran.size, 0.02)
            fraction = np.linspace(0.6, rng.uniform(0.6, 1.1), n)  # exits lose their worth over time, or even cost
            with_exits = np.minimum(without * fraction, 0.02)
            off = rng.random(n) < 0.05
            state, begin = savings.init(share=0.05, bound=0.02), 0
            forecast = np.minimum((0.004 + 0.0008 * ran.size) / ran.size, 0.02)
            x = np.where(off, without, with_exits)
            for look in np.unique(np.geomspace(10, n, 25).astype(int)):
                part = slice(begin, int(look))
                state, begin = savings.update(state, x[part], off[part], forecast=forecast[part]), int(look)
                got = savings.estimate(state, alpha=0.05)
                seconds = float((without - with_exits)[:look].mean())
                if seconds not in got.seconds or seconds / float(without[:look].mean()) not in got.share:
                    missed += 1
                    break
        assert at_most(missed, runs, 0.05)

    def test_a_real_saving_is_told_from_none_and_its_share_narrows(self) -> None:
        rng, n = np.random.default_rng(8), 100_000
        off = rng.random(n) < 0.02
        x = np.clip(rng.normal(0.3, 0.05, n), 0, 1) * np.where(off, 1.0, 0.7)
        state = savings.init(share=0.02, bound=1.0)
        assert savings.estimate(state, alpha=0.05).seconds == intervals.Interval(-1.0, 1.0)
        state = savings.update(state, x, off, forecast=np.full(n, 0.3))
        got = savings.estimate(state, alpha=0.05)
        assert 0.3 in got.share
        assert got.share.low > 0.25
        assert got.share.high < 0.35
        assert 0.09 in got.seconds

    def test_a_loss_is_a_negative_saving(self) -> None:
        rng, n = np.random.default_rng(9), 200_000
        off = rng.random(n) < 0.1
        x = np.clip(rng.normal(0.3, 0.02, n), 0, 0.5) * np.where(off, 1.0, 1.3)
        state = savings.update(savings.init(share=0.1, bound=1.0), x, off, forecast=np.full(n, 0.3))
        got = savings.estimate(state, alpha=0.05)
        assert -0.3 in got.share
        assert got.share.high < 0


class TestTheGatesOwnRule:
    def test_a_plan_at_five_budgets_is_stopped_within_225_audits_at_the_ninetieth_percentile(self) -> None:
        rng, runs, within = np.random.default_rng(10), 600, 0
        for _ in range(runs):
            k = (rng.random(225) < 0.05).cumsum()
            within += any(
                accuracy(gate_input(n, int(k[n - 1]))).state == "Rejected"
                for n in (np.flatnonzero(np.diff(k, prepend=0)) + 1).tolist()
            )
        assert at_least(within, runs, 0.9)
        assert stopping_time(0.05, p0=0.01, alpha=0.05, looks=225).ever >= 0.9

    def test_a_plan_at_half_its_budget_is_rolled_back_in_far_less_than_one_percent(self) -> None:
        assert stopping_time(0.005, p0=0.01, alpha=0.05, looks=20_000).ever < 0.002
        assert accuracy(gate_input(100, 0)).log_limit == pytest.approx(math.log(20), abs=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("slowdown", [1.0, 1.05])
    def test_a_canary_within_its_allowed_overhead_is_falsely_rejected_in_at_most_one_percent(
        self, slowdown: float
    ) -> None:
        """Batches of 1 to 32, bursts, stalls and wandering pace, a look after every batch of three long steps."""
        rng, runs = np.random.default_rng(11), 300
        steps = dict.fromkeys(bench.WEIGHTS, 4000)
        false = sum(bench.slowness_rejects(rng, slowdown=slowdown, batches_per_step=steps) for _ in range(runs))
        assert at_most(false, runs, 0.01)

    @pytest.mark.slow
    def test_a_canary_twice_as_slow_is_rejected_in_ninety_nine_percent(self) -> None:
        """Within the batches that each step waits for anyway."""
        rng, runs = np.random.default_rng(12), 400
        needed = bench.exposures(np.random.default_rng(13))
        assert max(needed.values()) < 5000
        found = sum(bench.slowness_rejects(rng, slowdown=2.0, batches_per_step=needed) for _ in range(runs))
        assert at_least(found, runs, 0.99)

    def test_counting_unaudited_non_exits_as_agreements_would_hide_what_audits_find(self) -> None:
        """Budget 1 %, truth 2 %, 60 % exits, audits 5 %."""
        found = bench.counting_trap(np.random.default_rng(7), requests=1_000_000)
        audits = 50_000
        assert abs(found["audits read"] - 0.02) < 3.3 * math.sqrt(0.02 * 0.98 / audits)
        assert found["log evidence of harm"] > math.log(1000)
        assert found["wrong counting reads"] == pytest.approx(0.0023, abs=0.0002)
        assert found["its log evidence of harm"] < 0
        assert found["its log evidence of being within budget"] > math.log(1000)


def gate_input(n: int, k: int) -> GateInput:
    """A step that has seen ``n`` audits with ``k`` disagreements."""
    return GateInput(BothArms(ArmTally(audited=n, disagreements=k)), 25, 0.01, 0.99, 3, 500, certified=True)


class TestDetectorRuns:
    @pytest.mark.slow
    @pytest.mark.parametrize(("p0", "length"), [(0.01, 2000.0), (0.05, 1000.0)])
    def test_a_plan_at_its_budget_runs_for_the_stated_length_on_average(self, p0: float, length: float) -> None:
        runs = bench.run_lengths(
            np.random.default_rng(14), rate=p0, p0=p0, run_length=length, runs=250, horizon=int(8 * length)
        )
        # Runs are cut at the horizon, which only shortens the mean.
        assert runs.mean() + 3.1 * runs.std() / math.sqrt(len(runs)) >= length
        assert runs.mean() < 4 * length  # and the statement is not an empty one

    @pytest.mark.slow
    def test_blocks_of_any_size_never_shorten_it(self) -> None:
        rng, length, lengths = np.random.default_rng(15), 500.0, []
        for _ in range(200):
            state = detector.init()
            while not detector.alarm(state, run_length=length) and state.n < 20 * length:
                n = int(rng.integers(1, 200))
                state = detector.update(state, n, int(rng.binomial(n, 0.05)), p0=0.05)
            lengths.append(state.n)
        assert np.mean(lengths) + 3.1 * np.std(lengths) / math.sqrt(len(lengths)) >= length

    @pytest.mark.slow
    def test_after_any_quiet_time_a_jump_to_five_budgets_is_noticed_within_450_labels(self) -> None:
        """The breaker's own run length of a million: the number that clause (b) of the promise states."""
        late = bench.delays(np.random.default_rng(16), quiet=0.005, jump=0.05, p0=0.01, run_length=1e6, runs=300)
        assert at_least(int((late <= 450).sum()), len(late), 0.9)
        assert np.quantile(late, 0.9) < 450

    def test_rounds_of_a_fleet_are_blocks_in_any_order_of_workers(self) -> None:
        rounds = [[(20, 1), (30, 0), (5, 2)], [(11, 0), (40, 3)]]
        one = other = detector.init()
        for workers in rounds:
            one = detector.update(one, sum(n for n, _ in workers), sum(k for _, k in workers), p0=0.01)
            workers.reverse()
            other = detector.update(other, sum(n for n, _ in workers), sum(k for _, k in workers), p0=0.01)
        assert one == other
