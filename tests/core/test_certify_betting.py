"""Tests by betting: valid for records drawn with unequal probabilities and for losses, and as costly as the docs say
where counts would do."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from offramp_core.certify import largest_passing_count, p_value
from offramp_core.certify.betting import STAKES, betting_p_value, log_capital
from offramp_core.errors import InvalidArgumentError
from offramp_core.evidence.one_arm import log_e_value

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
BUDGET, LEAST = 0.02, 0.1


def kept(rng: np.random.Generator, *, rate: float, admitted: int, hard_first: bool) -> tuple[Bools, Floats]:
    """Errors happen on hard requests only (a fifth of all); the design keeps either those or the others nine times as
    often."""
    hard = rng.random(admitted) < 0.2
    wrong = hard & (rng.random(admitted) < rate / 0.2)
    inclusion = np.where(hard == hard_first, 0.9, LEAST)
    taken = rng.random(admitted) < inclusion
    return wrong[taken], inclusion[taken]


def beyond(wrong: Bools, inclusion: Floats, *, budget: float = BUDGET) -> Floats:
    """Errors beyond the budget, weighted by the inverse of what records were kept with."""
    return np.asarray((wrong - budget) / inclusion)


def bet(wrong: Bools, inclusion: Floats) -> float:
    return betting_p_value(beyond(wrong, inclusion), most=(1 - BUDGET) / LEAST)


class TestTheLevel:
    @pytest.mark.parametrize("hard_first", [True, False])
    def test_a_plan_exactly_at_its_budget_passes_no_more_often_than_the_level(self, hard_first: bool) -> None:
        rng, runs, level = np.random.default_rng(3), 2000, 0.05
        passed = sum(bet(*kept(rng, rate=BUDGET, admitted=3000, hard_first=hard_first)) <= level for _ in range(runs))
        assert stats.binom.sf(passed - 1, runs, level) > 0.001, f"{passed} of {runs} passed"

    def test_counting_them_as_if_they_were_equal_would_certify_a_plan_at_twice_its_budget(self) -> None:
        rng = np.random.default_rng(4)
        fooled = honest = 0
        for _ in range(200):
            wrong, inclusion = kept(rng, rate=2 * BUDGET, admitted=3000, hard_first=False)
            fooled += p_value(int(wrong.sum()), len(wrong), budget=BUDGET) <= 0.05
            honest += bet(wrong, inclusion) <= 0.05
        assert fooled > 190
        assert honest == 0

    @given(
        budget=st.floats(0.005, 0.3),
        least=st.floats(0.02, 1.0),
        tilt=st.floats(0.0, 1.0),
        share=st.floats(0.05, 0.95),
        stake=st.sampled_from(STAKES),
    )
    def test_a_bet_on_one_kept_record_is_fair_at_the_budget(
        self, budget: float, least: float, tilt: float, share: float, stake: float
    ) -> None:
        """By enumeration: two kinds of request, one kept with probability ``least`` and one always, any split of the
        errors."""
        rates = (budget * tilt / share, budget * (1 - tilt) / (1 - share))
        if max(rates) > 1:
            return
        expected = weight = 0.0
        for size, rate, inclusion in ((share, rates[0], least), (1 - share, rates[1], 1.0)):
            for wrong, chance in ((1, rate), (0, 1 - rate)):
                y = (wrong - budget) / inclusion
                factor = 1 - stake * least / (1 - budget) * y
                assert factor > 0
                expected += size * inclusion * chance * factor
                weight += size * inclusion * chance
        assert expected / weight == pytest.approx(1.0, abs=1e-9)


class TestPower:
    @pytest.mark.parametrize("hard_first", [True, False])
    def test_a_clean_plan_passes(self, hard_first: bool) -> None:
        rng = np.random.default_rng(5)
        passed = sum(bet(*kept(rng, rate=0.002, admitted=6000, hard_first=hard_first)) <= 0.05 for _ in range(100))
        assert passed >= 80

    def test_equal_weights_give_the_one_arm_mixture(self) -> None:
        wrong = np.zeros(900, dtype=bool)
        wrong[:4] = True
        got = log_capital(beyond(wrong, np.full(900, 0.3), budget=0.01), most=0.99 / 0.3)
        assert got == pytest.approx(log_e_value(4, 900, p0=0.01, alternative="less"))

    @pytest.mark.parametrize(("n", "binomial", "betting"), [(740, 2, 1), (1480, 7, 5), (3330, 22, 17)])
    def test_equal_weights_are_better_counted(self, n: int, binomial: int, betting: int) -> None:
        """The figures of docs/decisions/0010: largest counts that pass at the first test's level."""
        level = 0.05 * 6 / math.pi**2
        passing = [k for k in range(40) if betting_p_value((np.arange(n) < k) - 0.01, most=0.99) <= level]
        assert largest_passing_count(n, budget=0.01, level=level) == binomial
        assert max(passing) == betting

    def test_the_order_of_the_records_does_not_matter(self) -> None:
        rng = np.random.default_rng(6)
        wrong, inclusion = kept(rng, rate=0.01, admitted=2000, hard_first=True)
        order = rng.permutation(len(wrong))
        excess, most = beyond(wrong, inclusion), (1 - BUDGET) / LEAST
        assert log_capital(excess[order], most=most) == pytest.approx(log_capital(excess, most=most))

    def test_half_losses_count_half(self) -> None:
        """A plan that loses half an answer on every fiftieth request keeps 2 %, as one that loses a whole answer on
        every hundredth does."""
        half, whole = np.where(np.arange(6000) % 50 == 0, 0.5, 0.0), np.where(np.arange(6000) % 100 == 0, 1.0, 0.0)
        assert betting_p_value(half - BUDGET, most=1 - BUDGET) < betting_p_value(whole - BUDGET, most=1 - BUDGET) < 0.05

    def test_no_records_are_no_evidence(self) -> None:
        assert betting_p_value(np.zeros(0), most=0.99) == 1.0


class TestBadInput:
    @pytest.mark.parametrize(
        ("excess", "message"),
        [
            ([0.5, math.nan, 0.5], r"excess\[1\] is nan"),
            ([0.5, 0.5, -math.inf], r"excess\[2\] is -inf"),
            ([1.5, 0.5, 0.5], r"excess\[0\] is 1.5; it must be finite and at most 0.99"),
        ],
    )
    def test_values_that_no_design_can_have_name_the_row(self, excess: list[float], message: str) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            betting_p_value(np.array(excess), most=0.99)

    @pytest.mark.parametrize("most", [0.0, -1.0, math.inf, math.nan])
    def test_what_a_value_can_reach_is_checked(self, most: float) -> None:
        with pytest.raises(InvalidArgumentError, match="most is"):
            betting_p_value(np.zeros(3), most=most)
