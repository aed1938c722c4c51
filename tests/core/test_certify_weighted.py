"""Weighted records: counts mean nothing there, betting does; and it costs what the docs say where weights are equal."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scores import recorded

from offramp_core.certify import (
    WEIGHTED_METHOD,
    Certificate,
    Certified,
    Subject,
    Weights,
    betting_p_value,
    largest_passing_count,
    p_value,
    rank_path_certificate,
    verify_certificate,
)
from offramp_core.certify.betting import STAKES, log_capital
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.records import Records
from offramp_core.search.placement import best_plan

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
BUDGET, LEAST = 0.02, 0.1


def kept(rng: np.random.Generator, *, rate: float, admitted: int, hard_first: bool) -> tuple[Bools, Floats]:
    """Errors happen on hard requests only (a fifth of all); the design keeps either those or the others nine times as often."""
    hard = rng.random(admitted) < 0.2
    wrong = hard & (rng.random(admitted) < rate / 0.2)
    inclusion = np.where(hard == hard_first, 0.9, LEAST)
    taken = rng.random(admitted) < inclusion
    return wrong[taken], inclusion[taken]


class TestTheLevel:
    @pytest.mark.parametrize("hard_first", [True, False])
    def test_a_plan_exactly_at_its_budget_passes_no_more_often_than_the_level(self, hard_first: bool) -> None:
        rng, runs, level = np.random.default_rng(3), 2000, 0.05
        passed = sum(
            betting_p_value(
                *kept(rng, rate=BUDGET, admitted=3000, hard_first=hard_first), least_inclusion=LEAST, budget=BUDGET
            )
            <= level
            for _ in range(runs)
        )
        assert stats.binom.sf(passed - 1, runs, level) > 0.001, f"{passed} of {runs} passed"

    def test_counting_them_as_if_they_were_equal_would_certify_a_plan_at_twice_its_budget(self) -> None:
        rng = np.random.default_rng(4)
        fooled = honest = 0
        for _ in range(200):
            wrong, inclusion = kept(rng, rate=2 * BUDGET, admitted=3000, hard_first=False)
            fooled += p_value(int(wrong.sum()), len(wrong), budget=BUDGET) <= 0.05
            honest += betting_p_value(wrong, inclusion, least_inclusion=LEAST, budget=BUDGET) <= 0.05
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
        """By enumeration: two kinds of request, one kept with probability ``least`` and one always, any split of the errors."""
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
        passed = sum(
            betting_p_value(
                *kept(rng, rate=0.002, admitted=6000, hard_first=hard_first), least_inclusion=LEAST, budget=BUDGET
            )
            <= 0.05
            for _ in range(100)
        )
        assert passed >= 80

    def test_equal_weights_give_the_one_arm_mixture(self) -> None:
        wrong = np.zeros(900, dtype=bool)
        wrong[:4] = True
        got = log_capital(wrong, np.full(900, 0.3), least_inclusion=0.3, budget=0.01)
        assert got == pytest.approx(log_e_value(4, 900, p0=0.01, alternative="less"))

    @pytest.mark.parametrize(("n", "binomial", "betting"), [(740, 2, 1), (1480, 7, 5), (3330, 22, 17)])
    def test_equal_weights_are_better_counted(self, n: int, binomial: int, betting: int) -> None:
        """The figures of docs/decisions/0010: largest counts that pass at the first test's level."""
        level = 0.05 * 6 / math.pi**2
        passing = [
            k
            for k in range(40)
            if betting_p_value(np.arange(n) < k, np.ones(n), least_inclusion=1.0, budget=0.01) <= level
        ]
        assert largest_passing_count(n, budget=0.01, level=level) == binomial
        assert max(passing) == betting

    def test_the_order_of_the_records_does_not_matter(self) -> None:
        rng = np.random.default_rng(6)
        wrong, inclusion = kept(rng, rate=0.01, admitted=2000, hard_first=True)
        order = rng.permutation(len(wrong))
        a = log_capital(wrong, inclusion, least_inclusion=LEAST, budget=BUDGET)
        assert log_capital(wrong[order], inclusion[order], least_inclusion=LEAST, budget=BUDGET) == pytest.approx(a)

    def test_no_records_are_no_evidence(self) -> None:
        assert betting_p_value(np.zeros(0, bool), np.zeros(0), least_inclusion=0.1, budget=0.01) == 1.0


IDS = tuple(f"r{i:02d}" for i in range(6))


@pytest.fixture(scope="module")
def weighted() -> tuple[Records, Weights, Certified]:
    """Held-out records of which the easy half was kept a third as often."""
    b = recorded(6000, 6, seed=2)
    rng = np.random.default_rng(8)
    inclusion = np.where(b.uncertainty[:, 0] < np.median(b.uncertainty[:, 0]), 0.3, 0.9)
    rows = np.flatnonzero(rng.random(len(b)) < inclusion)
    b, weights = b.take(rows), Weights(inclusion[rows], least=0.3)
    a = recorded(500, 6, seed=1)
    found = best_plan(a, max_disagreement=0.02).plan
    result = rank_path_certificate(
        a, b, active=found.active, thresholds=found.thresholds, subject=Subject(IDS, "b", "r"), budget=0.02, delta=0.05,
        weights=weights,
    )  # fmt: skip
    assert isinstance(result, Certified)
    return b, weights, result


class TestCertificates:
    def test_a_weighted_certificate_says_so_and_survives_json(
        self, weighted: tuple[Records, Weights, Certified]
    ) -> None:
        certificate = weighted[2].certificate
        assert certificate.method == WEIGHTED_METHOD
        assert Certificate.from_mapping(json.loads(json.dumps(certificate.to_mapping()))) == certificate

    def test_it_is_verified_from_records_and_weights(self, weighted: tuple[Records, Weights, Certified]) -> None:
        b, weights, proven = weighted
        assert verify_certificate(proven.certificate, proven.plan, records=b, inclusion=weights.inclusion) is None

    def test_other_weights_are_found_out(self, weighted: tuple[Records, Weights, Certified]) -> None:
        b, weights, proven = weighted
        reason = verify_certificate(proven.certificate, proven.plan, records=b, inclusion=weights.inclusion * 0.999)
        assert reason == "these are not the records it was made from"

    def test_a_p_value_that_its_records_do_not_give_is_found_out(
        self, weighted: tuple[Records, Weights, Certified]
    ) -> None:
        b, weights, proven = weighted
        forged = replace(proven.certificate, p_value=1e-9)
        assert "p_value" in (verify_certificate(forged, proven.plan, records=b, inclusion=weights.inclusion) or "")


class TestBadInput:
    @pytest.mark.parametrize(
        ("inclusion", "least", "message"),
        [
            (np.array([0.5, math.nan, 0.5]), 0.1, r"inclusion\[1\] is nan"),
            (np.array([0.5, 0.5, 0.05]), 0.1, r"inclusion\[2\] is 0.05; it must lie in \[0.1, 1\]"),
            (np.array([0.5, 1.5, 0.5]), 0.1, r"inclusion\[1\] is 1.5"),
            (np.array([0.5, 0.5]), 0.1, r"inclusion has shape \(2,\); it needs \(3,\)"),
        ],
    )
    def test_probabilities_no_design_can_have_name_array_and_row(
        self, inclusion: Floats, least: float, message: str
    ) -> None:
        with pytest.raises(InvalidRecordsError, match=message):
            betting_p_value(np.zeros(3, bool), inclusion, least_inclusion=least, budget=0.01)

    @pytest.mark.parametrize("least", [0.0, -1.0, 1.5, math.nan])
    def test_the_least_probability_is_checked(self, least: float) -> None:
        with pytest.raises(InvalidArgumentError, match="least_inclusion"):
            betting_p_value(np.zeros(3, bool), np.ones(3), least_inclusion=least, budget=0.01)
