"""By which route a request is computed. Without a plan, by the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from offramp_core.errors import InvalidArgumentError
from offramp_core.protocol import Arm
from offramp_worker.generate.seam import REFERENCE, GenerationBundle, Route

_ROUTE = re.compile(r"(?P<variant>[a-z0-9.-]+)(\+(?P<draft>[a-z0-9./-]+):(?P<tokens>[0-9]{1,2}))?")
EXITS_OFF = "exits-off"


@dataclass(frozen=True, slots=True)
class Assigned:
    """The route of one request, and which plan says so. ``lossy_off``: the plan's lossy parts are not used because the request samples."""

    route: Route
    config: str = EXITS_OFF
    arm: Arm = "stable"
    epoch: int = 0
    lossy_off: bool = False


@dataclass(frozen=True, slots=True)
class Routes:
    """A plan's routes: one for all, others for the classes that are named.

    ``audit_rate`` is the probability with which a request is audited; ``lossy_sampling`` lets lossy parts serve requests with a temperature.
    """

    every: Route = field(default_factory=Route)
    by_class: Mapping[str, Route] = field(default_factory=dict)
    audit_rate: float = 0.0
    lossy_sampling: bool = False
    config: str = EXITS_OFF
    epoch: int = 0
    reference_drafts: frozenset[str] = frozenset()  # that the reference can verify

    def assign(self, *, request_class: str, greedy: bool, never_exit: bool) -> Assigned:
        """The route of a request. Lossless parts keep the distribution of samples; lossy ones do not, and are off for them unless the plan
        says otherwise: the reference then verifies the same draft where it can."""
        if never_exit:
            return Assigned(Route(), EXITS_OFF, "stable", self.epoch)
        route = self.by_class.get(request_class, self.every)
        lossy_off = not greedy and not route.lossless and not self.lossy_sampling
        if lossy_off:
            draft = route.draft if route.draft in self.reference_drafts else ""
            route = Route(REFERENCE, draft, route.draft_tokens if draft else 0)
        return Assigned(route, self.config, "stable", self.epoch, lossy_off)


def parse_route(text: str, bundle: GenerationBundle) -> Route:
    """``fp32``, ``int4``, ``fp32+ngram:4`` (variant, draft, draft tokens).

    Raises
    ------
    InvalidArgumentError
        It is written in another way, or names what the bundle does not have.
    """
    match = _ROUTE.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"the route is {text!r}; write VARIANT or VARIANT+DRAFT:TOKENS, such as fp32+ngram:4"
        )
    route = Route(match["variant"], match["draft"] or "", int(match["tokens"] or 0))
    check_route(route, bundle)
    return route


def check_route(route: Route, bundle: GenerationBundle) -> None:
    """Raises :class:`InvalidArgumentError` where the bundle does not have what the route names."""
    if bundle.variant(route.variant) is None:
        raise InvalidArgumentError(f"the route names variant {route.variant!r}; there are {_names(bundle.variants)}")
    if not route.draft:
        return
    draft = bundle.draft(route.draft)
    if draft is None:
        raise InvalidArgumentError(
            f"the route names draft {route.draft!r}; there are {_names(bundle.drafts) or 'none'}"
        )
    if draft.variants and route.variant not in draft.variants:
        raise InvalidArgumentError(
            f"draft {draft.id!r} is verified by {', '.join(draft.variants)}, not by {route.variant!r}"
        )
    if not route.draft_tokens:
        raise InvalidArgumentError(f"the route proposes 0 tokens of draft {draft.id!r}; it must be at least 1")


def text_of(route: Route) -> str:
    """As :func:`parse_route` reads it."""
    return route.variant + (f"+{route.draft}:{route.draft_tokens}" if route.draft else "")


def _names(specs: object) -> str:
    return ", ".join(getattr(s, "name", None) or s.id for s in specs)  # type: ignore[attr-defined]
