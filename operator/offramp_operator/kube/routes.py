"""What an HTTPRoute says of itself: how it shares requests, whether its Gateways know, and what keeps them from it.
Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from offramp_core.control.snapshot import Trouble
from offramp_core.reasons import Reason
from offramp_operator.kube.kinds import Object, name_of
from offramp_operator.kube.trim import content

NEEDED = ("Accepted", "ResolvedRefs")


def has_let_go(route: Object, backend: str) -> bool:
    """Whether no Gateway passes requests on to a backend any more: its weight is 0, and whoever serves the route has
    seen that."""
    if any(ref.get("name") == backend and ref.get("weight", 1) for ref in _references(route)):
        return False
    generation = int(route["metadata"].get("generation") or 0)
    # One that does not say what it has seen is not waited for.
    return all(int(c.get("observedGeneration") or generation) >= generation for _, c in _conditions(route))


def backends(route: Object) -> frozenset[str]:
    """Names of the Services that a route names."""
    return frozenset(str(ref.get("name")) for ref in _references(route))


def _references(route: Object) -> list[Object]:
    spec = msgspec.json.decode(content(route))
    return [ref for rule in spec.get("rules") or () for ref in rule.get("backendRefs") or ()]


def trouble(route: Object) -> Trouble | None:
    """Why no request comes along the route, as its Gateways say; None where nothing is wrong."""
    refused = [
        f"{parent}: {c.get('reason')}: {c.get('message') or 'no message'}"
        for parent, c in _conditions(route)
        if c.get("type") in NEEDED and c.get("status") == "False"
    ]
    if refused:
        return Trouble(Reason.ROUTE_NOT_ACCEPTED, f"HTTPRoute {name_of(route)}: " + "; ".join(refused))
    if not any(c.get("type") == "Accepted" for _, c in _conditions(route)):
        cause = (
            "no Gateway has taken it; is there one of the name in spec.route.parentRefs, with a controller that runs?"
        )
        return Trouble(Reason.ROUTE_NOT_ACCEPTED, f"HTTPRoute {name_of(route)}: {cause}")
    return None


def _conditions(route: Object) -> Iterator[tuple[str, Object]]:
    """Each condition with the parent that it is about."""
    for parent in (route.get("status") or {}).get("parents") or ():
        reference = parent.get("parentRef") or {}
        about = f"{reference.get('kind', 'Gateway')} {reference.get('name', '')}"
        for condition in parent.get("conditions") or ():
            yield about, condition
