"""Requests that an edge hands to its core as they came: the core answers them as anybody's, if both run one plan.

The core believes nothing here either: who asks says which plan's exits will do, and gets no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offramp_core.bundle import Manifest
from offramp_core.protocol import DEFAULT_TIER
from offramp_worker.edge.wire import DIGEST_HEADER, PLAN_HEADER, RAMPS_HEADER
from offramp_worker.engine.engine import Engine
from offramp_worker.http.bodies import Headers
from offramp_worker.http.refusals import Response
from offramp_worker.http.tensors import InferRequest, shown

DIGEST, RAMPS, PLAN = DIGEST_HEADER.encode(), RAMPS_HEADER.encode(), PLAN_HEADER.encode()


@dataclass(frozen=True, slots=True)
class HandedOn:
    """What an edge says of a request: its digests, and the plan whose exits may answer."""

    backbone: bytes
    ramps: bytes
    plan: bytes

    def unlike(self, manifest: Manifest) -> str:
        """What differs from a core with this bundle, in words; empty where nothing does."""
        for field, theirs, mine in (
            (DIGEST_HEADER, self.backbone, manifest.backbone_digest),
            (RAMPS_HEADER, self.ramps, manifest.ramp_set_digest),
        ):
            if theirs != mine.encode():
                got = shown(theirs.decode("latin-1"))
                return f"{field}: is {got}; this core serves {mine}: serve the same bundle"
        return ""

    def allowed(self, request: InferRequest, engine: Engine) -> InferRequest:
        """The request, for the model itself where the core's exits are not those of the edge: another plan serves, or
        a canary beside it, now or when it runs. Neither the larger budget that the core may have under overload nor its
        deadline for everybody is the edge's."""
        active = engine.active
        runtime = engine.arms.without_canary(active)
        same = active.canary is None and runtime.plan.content_hash.encode() == self.plan
        return replace(
            request,
            never_exit=request.never_exit or not same,
            tier=request.tier or DEFAULT_TIER,
            plan=self.plan.decode("latin-1") if same else "",
        )

    def signed(self, reply: Callable[[Response], None]) -> Callable[[Response], None]:
        """The reply repeats the digests."""
        names = [(DIGEST, self.backbone), (RAMPS, self.ramps)]
        return lambda response: reply(replace(response, headers=[*response.headers, *names]))


def handed_on(headers: Headers) -> HandedOn | None:
    """What an edge says of a request; None of anybody else's."""
    found = {name: value for name, value in headers if name in (DIGEST, RAMPS, PLAN)}
    if PLAN not in found:
        return None
    return HandedOn(found.get(DIGEST, b""), found.get(RAMPS, b""), found[PLAN])
