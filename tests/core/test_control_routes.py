"""Tokens per second by route, as people read them: sums over workers, and nothing that cannot be true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.routes import MAX_ROUTES, MIN_TOKENS, alone, pooled, rate, route_uses
from offramp_core.protocol import RouteCounts

DRAFT = "fp32+int8:3"


def test_what_workers_wrote_by_each_route_is_added_up_and_told_with_the_model_alone_beside_it() -> None:
    one = [RouteCounts("fp32", 300, 10.0), RouteCounts(DRAFT, 500, 10.0, 400, 380)]
    other = [RouteCounts("fp32", 300, 10.0), RouteCounts(DRAFT, 1000, 20.0, 800, 700)]
    routes = pooled([*one, *other])
    assert [(u.name, u.share, u.tokens_per_second, u.accepted) for u in route_uses(routes)] == [
        (DRAFT, "71%", "50", "90%"),
        ("fp32", "29%", "30", ""),
    ]
    assert (rate(routes), alone(routes)) == ("42", "30")


def test_no_rate_is_told_of_a_few_tokens() -> None:
    routes = pooled([RouteCounts("fp32", MIN_TOKENS - 1, 1.0)])
    assert (rate(routes), alone(routes), route_uses(routes)[0].tokens_per_second) == ("", "", "")
    assert rate(()) == alone(()) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        RouteCounts("", 500, 1.0),
        RouteCounts("x" * 129, 500, 1.0),
        RouteCounts("fp32", -500, 1.0),
        RouteCounts("fp32", 500, -1.0),
        RouteCounts("fp32", 500, 0.0),
        RouteCounts("fp32", 500, 1.0, 5, 6),
        RouteCounts("fp32", 500, 1.0, -1, -1),
        RouteCounts("fp32", 10**400, 1.0),
        RouteCounts("fp32", 500, 5e-324),
        RouteCounts("fp32", 500, float("inf")),
        RouteCounts("fp32\x1b[2J", 500, 1.0),
    ],
)
def test_what_cannot_be_true_is_left_out(wrong: RouteCounts) -> None:
    assert pooled([wrong]) == ()


@given(
    st.lists(
        st.builds(
            RouteCounts,
            st.text(max_size=200),
            st.integers(-5, 10**18),
            st.floats(allow_nan=True),
            st.integers(-5, 10**6),
            st.integers(-5, 10**6),
        ),
        max_size=24,
    )
)
def test_whatever_workers_say_the_figures_are_bounded_and_finite(reports: list[RouteCounts]) -> None:
    routes = pooled(reports)
    uses = route_uses(routes)
    assert len(uses) <= MAX_ROUTES
    for use in uses:
        assert all(len(text) <= 32 and "nan" not in text and "inf" not in text for text in (use.share, use.accepted))
        assert len(use.tokens_per_second) <= 32 and use.tokens_per_second not in ("nan", "inf")
