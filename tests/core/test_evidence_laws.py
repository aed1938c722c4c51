"""Laws that every piece of evidence obeys: fair under the null, mergeable, indifferent to restarts and to how
observations are grouped."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence import betting, detector, intervals, one_arm, savings
from offramp_core.evidence.one_arm import Alternative
from offramp_core.evidence.two_arm import log_e_share

SAME_EXAMPLES = settings(max_examples=60, derandomize=True)

RATES = st.floats(0.002, 0.7)
SIDES = st.sampled_from(["greater", "less"])
BOUND = 2.0


def outcomes(seed: int, n: int, rate: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.random.default_rng(seed).random(n) < rate


def through_json(state: detector.DetectorState) -> detector.DetectorState:
    return detector.DetectorState.from_mapping(json.loads(json.dumps(asdict(state))))


class TestFairUnderTheNull:
    """Expectations by enumeration of every possible count: exact, no simulation."""

    @SAME_EXAMPLES
    @given(n=st.integers(1, 120), p0=RATES, side=SIDES)
    def test_an_e_value_is_one_on_average_at_the_budget(self, n: int, p0: float, side: Alternative) -> None:
        assert expectation(n, p0, lambda k: math.exp(one_arm.log_e_value(k, n, p0=p0, alternative=side))) == (
            pytest.approx(1, rel=1e-9)
        )

    @SAME_EXAMPLES
    @given(n=st.integers(1, 120), p0=RATES, side=SIDES, part=st.floats(0, 1))
    def test_and_at_most_one_anywhere_within_the_null(self, n: int, p0: float, side: Alternative, part: float) -> None:
        rate = p0 * part if side == "greater" else p0 + (1 - p0) * part
        assert expectation(n, rate, lambda k: math.exp(one_arm.log_e_value(k, n, p0=p0, alternative=side))) < 1 + 1e-9

    @SAME_EXAMPLES
    @given(n=st.integers(1, 100), share=st.floats(0.01, 0.9))
    def test_alike_arms_give_one_on_average(self, n: int, share: float) -> None:
        assert expectation(n, share, lambda k: math.exp(log_e_share(k, n, share=share))) == pytest.approx(1, rel=1e-9)

    @SAME_EXAMPLES
    @given(n=st.integers(1, 120), p0=RATES, quiet=st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), max_size=4))
    def test_a_detector_gains_as_much_as_it_sees_whatever_the_block(
        self, n: int, p0: float, quiet: list[tuple[int, float]]
    ) -> None:
        """M - n is a martingale at block ends, hence an alarm at M >= L comes after L observations on average, or
        later."""
        before = detector.init()
        for size, part in quiet:
            before = detector.update(before, size, int(size * part), p0=p0)
        gained = expectation(n, p0, lambda k: detector.statistic(detector.update(before, n, k, p0=p0)))
        assert gained == pytest.approx(detector.statistic(before) + n, rel=1e-8)

    @SAME_EXAMPLES
    @given(
        p0=st.floats(0.001, 0.4),
        highest=st.floats(1, 50),
        side=SIDES,
        points=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    )
    def test_a_bet_gains_nothing_while_the_average_weight_is_the_budget(
        self, p0: float, highest: float, side: Alternative, points: list[float]
    ) -> None:
        """Any two weights around the budget, mixed so that their mean is the budget."""
        low, high = min(points) * p0, p0 + max(points) * (highest - p0)
        if high - low < 1e-9:
            return
        on_high = (p0 - low) / (high - low)
        start = betting.init(p0=p0, highest=highest, alternative=side)
        wealth = [math.exp(betting.log_e_value(betting.update(start, [w]))) for w in (low, high)]
        assert (1 - on_high) * wealth[0] + on_high * wealth[1] == pytest.approx(1, rel=1e-6)


def expectation(n: int, rate: float, value: Any) -> float:
    weights = stats.binom.pmf(np.arange(n + 1), n, rate)
    return float(sum(w * value(k) for k, w in enumerate(weights.tolist()) if w > 0))


SPLITS = st.lists(st.integers(0, 400), min_size=0, max_size=5)
SEEDS = st.integers(0, 10_000)


def parts_of(n: int, cuts: list[int]) -> list[slice]:
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


class TestPooling:
    @SAME_EXAMPLES
    @given(cuts=SPLITS, seed=SEEDS)
    def test_counts_of_workers_in_any_order_are_the_counts_of_the_fleet(self, cuts: list[int], seed: int) -> None:
        x = outcomes(seed, 400, 0.03)
        parts = [(len(x[part]), int(np.sum(x[part]))) for part in parts_of(400, cuts)]
        np.random.default_rng(seed).shuffle(parts)
        pooled = one_arm.init()
        for n, k in parts:
            pooled = one_arm.update(pooled, n, k)
        assert pooled == one_arm.Counts(400, int(x.sum()))


class TestRestartsAndGrouping:
    @SAME_EXAMPLES
    @given(cuts=SPLITS, seed=SEEDS)
    def test_a_restart_anywhere_changes_nothing(self, cuts: list[int], seed: int) -> None:
        happened = outcomes(seed, 400, 0.03)
        whole = stored = detector.init()
        for part in parts_of(400, cuts):
            n, k = len(happened[part]), int(np.sum(happened[part]))
            whole = detector.update(whole, n, k, p0=0.02)
            stored = detector.update(through_json(stored), n, k, p0=0.02)
        assert stored == whole

    @SAME_EXAMPLES
    @given(cuts=SPLITS, seed=SEEDS)
    def test_savings_are_the_same_bit_for_bit_however_values_are_grouped(self, cuts: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, off, forecast = rng.random(400), rng.random(400) < 0.1, np.full(400, 0.4)
        start = savings.init(share=0.1, bound=BOUND)
        grouped = start
        for part in parts_of(400, cuts):
            grouped = savings.update(grouped, x[part], off[part], forecast=forecast[part])
        assert grouped == savings.update(start, x, off, forecast=forecast)

    @pytest.mark.slow
    @SAME_EXAMPLES
    @given(
        seed=SEEDS, n=st.integers(0, 3000), rate=st.floats(0, 0.3), p0=st.floats(0.002, 0.3), length=st.floats(20, 1e5)
    )
    def test_a_million_outcomes_at_once_are_followed_like_one_after_the_other(
        self, seed: int, n: int, rate: float, p0: float, length: float
    ) -> None:
        x = outcomes(seed, n, rate)
        slow, first = detector.init(), None
        for i, happened in enumerate(x.tolist(), start=1):
            slow = detector.update(slow, 1, int(happened), p0=p0)
            if first is None and detector.statistic(slow) >= length * (1 + 1e-9):
                first = i
        fast = detector.watch(detector.init(), x, p0=p0, run_length=length)
        assert fast.state.n == slow.n
        assert fast.state.m == pytest.approx(slow.m, rel=1e-7)
        assert fast.alarm_after == first
        begun = detector.watch(detector.init(), x[: n // 3], p0=p0, run_length=length)
        ended = detector.watch(begun.state, x[n // 3 :], p0=p0, run_length=length)
        assert ended.state.m == pytest.approx(slow.m, rel=1e-7)

    def test_a_detector_that_screams_stays_finite(self) -> None:
        seen = detector.watch(detector.init(), np.ones(10_000, dtype=bool), p0=0.01, run_length=1e6)
        assert all(map(math.isfinite, seen.state.m))
        assert seen.alarm_after is not None
        assert seen.alarm_after < 20


class TestByHand:
    """The same in plain loops, from the definitions."""

    @SAME_EXAMPLES
    @given(values=st.lists(st.floats(0, BOUND), min_size=1, max_size=40), alpha=st.floats(0.001, 0.5))
    def test_how_far_a_sum_may_be_from_its_conditional_means(self, values: list[float], alpha: float) -> None:
        got = intervals.add_surprises(np.array(values), 0, 0.0, 0.0, guess=(0.0, BOUND))
        seen, surprise = [BOUND / 2], 0.0  # the middle of the range stands for one value
        for x in values:
            surprise += (x - sum(seen[1:], seen[0]) / len(seen)) ** 2
            seen.append(x)
        assert got == pytest.approx((sum(values), surprise), abs=1e-9)
        u = intervals.deviation(surprise, reach=BOUND, alpha=alpha) / BOUND
        tilts = np.geomspace(1e-4, 0.9, 28)
        cost = (-np.log(1 - tilts) - tilts) * surprise / BOUND**2
        assert np.exp(tilts * u - cost).mean() == pytest.approx(2 / alpha, rel=1e-6)

    @SAME_EXAMPLES
    @given(
        p=st.floats(0.01, 0.99), tilt=st.floats(0.001, 0.95), guess=st.floats(0, 1), sign=st.sampled_from([-1.0, 1.0])
    )
    def test_no_tilt_gains_whatever_was_guessed(self, p: float, tilt: float, guess: float, sign: float) -> None:
        """One step of the process behind it, on the hardest values of a given mean: those at the ends of the range."""
        cost = -math.log(1 - tilt) - tilt
        factors = [math.exp(sign * tilt * (x - p) - cost * (x - guess) ** 2) for x in (0.0, 1.0)]
        assert (1 - p) * factors[0] + p * factors[1] <= 1 + 1e-12

    @SAME_EXAMPLES
    @given(
        batches=st.lists(st.tuples(*[st.floats(0, BOUND)] * 3), min_size=1, max_size=7),
        share=st.sampled_from([0.1, 0.5]),
    )
    def test_savings_are_unbiased_over_every_way_the_coins_may_fall(
        self, batches: list[tuple[float, float, float]], share: float
    ) -> None:
        without, with_exits, forecast = np.array(batches).T
        saved = spent = 0.0
        for arms in itertools.product([False, True], repeat=len(batches)):
            off = np.array(arms)
            weight = float(np.where(off, share, 1 - share).prod())
            state = savings.update(
                savings.init(share=share, bound=BOUND), np.where(off, without, with_exits), off, forecast=forecast
            )
            saved, spent = saved + weight * state.saved, spent + weight * state.spent
        assert saved == pytest.approx(float((without - with_exits).sum()), abs=1e-9)
        assert spent == pytest.approx(float(with_exits.sum()), abs=1e-9)

    def test_no_value_of_a_holdback_lies_beyond_its_reach(self) -> None:
        """The interval holds for any costs up to the bound only if each one's surprise does."""
        for arms, costs in itertools.product(
            ([0, 1], [1, 0], [1, 1], [0, 0]), ([0, BOUND], [BOUND, 0], [BOUND, BOUND])
        ):
            for forecast in ([0.0, 0.0], [BOUND, BOUND], [BOUND, 0.0]):
                before = savings.update(
                    savings.init(share=0.05, bound=BOUND), costs[:1], arms[:1], forecast=forecast[:1]
                )
                after = savings.update(before, costs[1:], arms[1:], forecast=forecast[1:])
                assert math.sqrt(after.saved_surprise - before.saved_surprise) <= BOUND * (1 / 0.05 + 1) + 1e-9
                assert math.sqrt(after.spent_surprise - before.spent_surprise) <= BOUND * (1 / 0.95 + 1) + 1e-9


class TestBadInput:
    @pytest.mark.parametrize("value", [math.nan, -0.1, 2.1, math.inf])
    def test_a_value_out_of_range_is_named_with_its_row(self, value: float) -> None:
        good, bad = [0.5, 0.5], [0.5, value]
        holdback = savings.init(share=0.1, bound=BOUND)
        for name, refuse in (
            ("weights", lambda: betting.update(betting.init(p0=0.1, highest=BOUND), bad)),
            ("seconds", lambda: savings.update(holdback, bad, [0, 1], forecast=good)),
            ("forecast", lambda: savings.update(holdback, good, [0, 1], forecast=bad)),
        ):
            with pytest.raises(InvalidArgumentError, match=rf"^{name}\[1\] is [^\n]*must lie in \[0, 2\]$"):
                refuse()

    def test_arms_that_are_no_arms_and_lengths_that_differ_are_refused(self) -> None:
        holdback = savings.init(share=0.1, bound=BOUND)
        with pytest.raises(InvalidArgumentError, match=r"outcomes\[1\] is nan"):
            savings.update(holdback, [0.5, 0.5], [0, math.nan], forecast=[0.5, 0.5])
        with pytest.raises(InvalidArgumentError, match="2, 1 and 2 batches"):
            savings.update(holdback, [0.5, 0.5], [0, 1], forecast=[0.5])
        with pytest.raises(InvalidArgumentError, match="one-dimensional"):
            betting.update(betting.init(p0=0.1, highest=BOUND), [[0.5]])

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: intervals.rate_interval(3, 2, alpha=0.05), "counts are"),
            (lambda: intervals.rate_interval(1, 2, alpha=1.0), "alpha is"),
            (lambda: savings.init(share=0.1, bound=0), "bound is 0"),
            (lambda: betting.init(p0=1.0, highest=2), "p0 is"),
            (lambda: betting.init(p0=0.1, highest=0.5), "highest is"),
            (lambda: betting.init(p0=0.1, highest=2, alternative="other"), "alternative is"),  # type: ignore[arg-type]
            (lambda: betting.BetState(0.1, 2.0, "greater", (0.0,)), "finite log wealths"),
            (lambda: savings.init(share=0.6, bound=1), "share is 0.6"),
            (lambda: savings.init(share=0.1, bound=math.inf), "bound is inf"),
            (lambda: savings.SavingsState(0.1, 1.0, 5, math.nan), "all sums finite"),
            (lambda: detector.watch(detector.init(), [0], p0=0.0, run_length=100), "p0 is"),
            (lambda: detector.watch(detector.init(), [0], p0=0.1, run_length=1), "run_length is"),
            (lambda: detector.watch(detector.init(), [0.5], p0=0.1, run_length=9), r"outcomes\[0\] is 0.5"),
        ],
    )
    def test_states_and_settings_that_cannot_be_are_refused_in_one_line(self, make: Any, message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=rf"^[^\n]*{message}[^\n]*$"):
            make()
