"""What a route says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_operator.kube.kinds import HTTP_ROUTE
from offramp_operator.kube.routes import has_let_go, trouble
from offramp_operator.kube.trim import trim

NEXT = "digits-next"


def route(*parents: list[tuple[str, str, int]], weight: int | None = 0, generation: int = 3) -> dict[str, Any]:
    """``parents`` are conditions as (type, status, observed generation)."""
    weighted = {} if weight is None else {"weight": weight}
    told = [
        {
            "parentRef": {"kind": "Gateway", "name": f"public-{i}"},
            "controllerName": "example.dev/gateway",
            "conditions": [
                {"type": t, "status": s, "reason": "Because", "message": "it says so", "observedGeneration": seen}
                for t, s, seen in conditions
            ],
        }
        for i, conditions in enumerate(parents)
    ]
    return trim(
        HTTP_ROUTE,
        {
            "metadata": {"name": "digits", "namespace": "default", "generation": generation},
            "spec": {"rules": [{"backendRefs": [{"name": "digits-main", "weight": 100}, {"name": NEXT, **weighted}]}]},
            "status": {"parents": told},
        },
    )


SEEN = [("Accepted", "True", 3), ("ResolvedRefs", "True", 3)]
BEHIND = [("Accepted", "True", 2), ("ResolvedRefs", "True", 2)]


def test_workers_are_let_go_once_every_gateway_has_seen_that_their_weight_is_zero() -> None:
    assert has_let_go(route(SEEN), NEXT)
    assert not has_let_go(route(SEEN, BEHIND), NEXT)
    assert has_let_go(route(), NEXT), "nobody serves the route"


@pytest.mark.parametrize("weight", [1, None])
def test_workers_with_a_weight_are_not_let_go(weight: int | None) -> None:
    assert not has_let_go(route(SEEN, weight=weight), NEXT), "a backend without a weight has weight 1"


def test_a_gateway_that_does_not_say_what_it_has_seen_is_not_waited_for() -> None:
    assert has_let_go(route([("Accepted", "True", 0)]), NEXT)


def test_a_route_that_every_gateway_serves_is_no_trouble() -> None:
    assert trouble(route(SEEN)) is None
    assert trouble(route(BEHIND)) is None, "it is being taken in"


@pytest.mark.parametrize("kind", ["Accepted", "ResolvedRefs"])
def test_what_a_gateway_refuses_is_told_in_its_words(kind: str) -> None:
    found = trouble(route(SEEN, [(kind, "False", 3)]))
    assert found is not None and found.reason == "RouteNotAccepted"
    assert found.message == "HTTPRoute digits: Gateway public-1: Because: it says so"


def test_a_route_that_nobody_has_taken_names_the_next_step() -> None:
    found = trouble(route())
    assert found is not None and "no Gateway has taken it" in found.message and "parentRefs" in found.message
