"""How much demand varies, and how much of it a plan is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet import burst_variation, variation_to_plan_for


def test_independent_users_vary_as_much_as_their_number() -> None:
    counts = np.random.default_rng(1).poisson(200, 3000)
    assert burst_variation(counts) == pytest.approx(1.0, abs=0.2)


def test_crowds_of_eight_vary_eight_times_as_much() -> None:
    counts = 8 * np.random.default_rng(1).poisson(25, 3000)
    assert burst_variation(counts) == pytest.approx(8.0, rel=0.2)


def test_what_changes_over_minutes_is_no_burst() -> None:
    rng = np.random.default_rng(1)
    slow = 200 + 150 * np.sin(np.arange(3000) / 300)
    assert burst_variation(rng.poisson(slow)) < 2


@given(st.lists(st.integers(0, 1000), max_size=29))
def test_of_a_few_seconds_or_of_silence_nothing_is_claimed(counts: list[int]) -> None:
    assert burst_variation(counts) == burst_variation([0] * 150) == 1


@pytest.mark.parametrize("counts", [[-1.0] * 60, [float("nan")] * 60, [float("inf")] * 60, [[1.0] * 60]])
def test_counts_that_are_none_are_refused(counts: list[float]) -> None:
    with pytest.raises(InvalidArgumentError, match="by_second"):
        burst_variation(counts)


@given(calm=st.floats(0, 50), bursts=st.floats(0, 50), late=st.floats(0, 1e4), requests=st.integers(0, 100_000))
def test_bursts_are_paid_for_as_far_as_requests_were_late(
    calm: float, bursts: float, late: float, requests: float
) -> None:
    def planned(late: float) -> float:
        return variation_to_plan_for(calm=calm, bursts=bursts, late=late, requests=requests, late_share=0.01)

    assert calm <= planned(late) <= max(calm, bursts)
    assert planned(late) <= planned(late + 1)
    assert planned(0) == calm
    if requests:
        assert planned(0.01 * requests) == pytest.approx(max(calm, bursts))


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_an_objective_that_allows_nothing_or_everything_is_refused(share: float) -> None:
    with pytest.raises(InvalidArgumentError, match="late_share"):
        variation_to_plan_for(calm=1, bursts=2, late=0, requests=1, late_share=share)
