"""Binomial tails against scipy.stats, the second implementation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from offramp_core import binomial

rates = st.floats(1e-4, 0.999)


@given(st.integers(1, 20_000), st.data(), rates)
def test_tails_agree_with_scipy_stats_on_and_beyond_the_support(n: int, data: st.DataObject, p: float) -> None:
    k = data.draw(st.integers(-2, n + 2))
    assert float(binomial.cdf(k, n, p)) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-7, abs=1e-12)
    assert float(binomial.sf(k, n, p)) == pytest.approx(stats.binom.sf(k, n, p), rel=1e-7, abs=1e-12)


@given(st.integers(1, 5_000), rates, st.floats(1e-6, 0.5))
def test_isf_is_the_smallest_count_whose_tail_is_within_alpha(n: int, p: float, alpha: float) -> None:
    k = binomial.isf(alpha, n, p)
    assert binomial.sf(k, n, p) <= alpha
    assert k == 0 or binomial.sf(k - 1, n, p) > alpha


@given(n=st.integers(1, 3000), seen=st.integers(1, 3000), share=st.floats(0, 1), at=st.floats(0, 1))
def test_what_to_expect_of_further_ones_is_a_beta_binomial(n: int, seen: int, share: float, at: float) -> None:
    lost, k = round(share * seen), round(at * n)
    exact = float(stats.betabinom.cdf(k, n, lost + 0.5, seen - lost + 0.5))
    assert binomial.predictive_cdf(k, n, lost=lost, seen=seen) == pytest.approx(exact, abs=0.03)


@given(st.integers(1, 20_000), st.floats(0, 0.5), st.floats(0, 0.1))
def test_tails_that_are_summed_up_agree_with_scipy_stats(n: int, p: float, share: float) -> None:
    most = int(share * n)
    assert binomial.lower_tails(n, p, most) == pytest.approx(
        stats.binom.cdf(range(most + 1), n, p), rel=1e-7, abs=1e-12
    )
