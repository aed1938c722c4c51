"""How generated answers were computed, for people: tokens per second by route, and what drafts were accepted.

Which route an answer takes depends on its class and the load, so rates of two routes are about other answers: the
worker, which compares like with like, decides by its own figures (:mod:`offramp_core.generation.drafts`).
"""

from __future__ import annotations

from collections.abc import Iterable

from offramp_core.control.objects import RouteUse
from offramp_core.precision import EXACT
from offramp_core.protocol import RouteCounts

MIN_TOKENS = 200  # of a route, before its rate is told
MAX_ROUTES = 16
MAX_NAME = 128
MOST, LEAST_SECONDS = 2**53, 1e-6  # beyond which no worker can have counted


def pooled(reports: Iterable[RouteCounts]) -> tuple[RouteCounts, ...]:
    """One for each route, that with the most tokens first; what cannot be true is left out."""
    sums: dict[str, RouteCounts] = {}
    for one in reports:
        if not _possible(one):
            continue
        so_far = sums.get(one.route, RouteCounts(one.route))
        sums[one.route] = RouteCounts(
            one.route,
            so_far.tokens + one.tokens,
            so_far.seconds + one.seconds,
            so_far.proposed + one.proposed,
            so_far.accepted + one.accepted,
        )
    return tuple(sorted(sums.values(), key=lambda c: (-c.tokens, c.route))[:MAX_ROUTES])


def route_uses(routes: Iterable[RouteCounts]) -> tuple[RouteUse, ...]:
    """The figures of each, rounded so that they seldom change."""
    known = tuple(routes)
    total = sum(c.tokens for c in known)
    return tuple(
        RouteUse(
            c.route,
            f"{c.tokens / total:.0%}",
            rate((c,)),
            f"{c.accepted / c.proposed:.0%}" if c.proposed else "",
        )
        for c in known
    )


def rate(routes: Iterable[RouteCounts]) -> str:
    """Tokens per second of the engine's time, two digits; empty before there are enough."""
    known = tuple(routes)
    tokens, seconds = sum(c.tokens for c in known), sum(c.seconds for c in known)
    return f"{float(f'{tokens / seconds:.2g}'):g}" if tokens >= MIN_TOKENS and seconds > 0 else ""


def alone(routes: Iterable[RouteCounts]) -> str:
    """The rate of the model without drafts and cheaper variants."""
    return rate(c for c in routes if c.route == EXACT)


def _possible(c: RouteCounts) -> bool:
    named = 0 < len(c.route) <= MAX_NAME and c.route.isprintable()
    return named and 0 < c.tokens < MOST and LEAST_SECONDS < c.seconds < MOST and 0 <= c.accepted <= c.proposed < MOST
