"""The admin port: state, plans and observations for the control plane. Every path needs the bearer token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import Observations, SignedDocument, WorkerState
from offramp_core.reasons import Reason
from offramp_worker.documents import parse_document
from offramp_worker.engine.execution.ramp_sets import PlanPostponedError
from offramp_worker.http.bodies import App, BodyTooLargeError, Receive, Scope, Send, header, read_body, send_json
from offramp_worker.http.methods import with_methods
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.settings import Settings

MAX_DOCUMENT_BYTES = 1024 * 1024
ALSO = re.compile(r"sha256:[0-9a-f]{64}=[0-9]{1,18}(,sha256:[0-9a-f]{64}=[0-9]{1,18}){0,3}")
BAD_REQUESTS = (
    Reason.MALFORMED,
    Reason.BAD_SIGNATURE,
)  # the others are well-formed and in conflict with what this worker is


class Controlled(Protocol):
    """A worker, whatever it serves, as the control plane knows it. ``plans`` is None before it has a bundle, and
    ``reason`` says why."""

    settings: Settings
    boot_id: str
    plans: PlanDesk | None

    @property
    def reason(self) -> str: ...

    def renew_lease(self) -> None: ...

    def state(self) -> WorkerState: ...

    def observations(self, *, after: int, now: float, also: Mapping[str, int] | None = None) -> Observations: ...


def admin_app(worker: Controlled) -> App:
    """The ASGI application of the admin port."""
    return with_token(with_methods(_rest(worker)), worker.settings.token_sha256)


def with_token(rest: App, token_sha256: str | None) -> App:
    """An application for those who have the bearer token, which is checked before anything of a request is read."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _authorised(scope, token_sha256):
            refusal = {"error": "Authorization: a valid bearer token is needed"}
            await send_json(send, 401, refusal, [(b"www-authenticate", b"Bearer")])
            return
        await rest(scope, receive, send)

    return app


def _authorised(scope: Scope, token_sha256: str | None) -> bool:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    digest = hashlib.sha256(token).hexdigest()
    matches = hmac.compare_digest(digest, token_sha256 or "")
    return matches and scheme.lower() == b"bearer" and token_sha256 is not None


def _rest(worker: Controlled) -> FastAPI:
    app = FastAPI(title="Offramp worker, admin port", openapi_url=None, redirect_slashes=False)

    @app.get("/v1/state")
    async def state() -> Response:
        return _json(worker.state())

    @app.post("/v1/config")
    async def config(request: Request) -> Response:
        worker.renew_lease()
        try:
            body = await read_body(request.scope, request.receive, limit=MAX_DOCUMENT_BYTES)
            document = parse_document(body, SignedDocument)
        except BodyTooLargeError:
            return _error(413, Reason.MALFORMED, f"the document is larger than {MAX_DOCUMENT_BYTES} bytes")
        except ValueError as error:
            return _error(400, Reason.MALFORMED, f"the document does not parse: {error}")
        if worker.plans is None:
            return _error(503, "Loading", worker.reason)
        try:
            await asyncio.to_thread(worker.plans.deliver, document)
        except PlanPostponedError as error:
            return _error(202, error.reason, str(error))
        except PlanRefusedError as error:
            return _error(400 if error.reason in BAD_REQUESTS else 409, error.reason, str(error))
        return _json(worker.state())

    @app.get("/v1/observations")
    async def observations(
        after: str = "0", boot: str = "", state: str = "", also: str = "", renew: str = "1"
    ) -> Response:
        if renew != "0":  # who watches says itself when it could not act on what it sees
            worker.renew_lease()
        if not after.isdecimal() or len(after) > 18:
            return _error(400, Reason.MALFORMED, f"after is {after[:20]!r}; it must be a whole number >= 0")
        if len(also) > 1000 or (also and not ALSO.fullmatch(also)):
            return _error(400, Reason.MALFORMED, "also must be digest=number of ramp sets, separated by commas")
        mine = boot == worker.boot_id
        others = {digest: int(n) for digest, _, n in (part.partition("=") for part in also.split(",")) if mine and n}
        found = await asyncio.to_thread(
            worker.observations, after=int(after) if mine else 0, now=time.time(), also=others
        )
        return _json(replace(found, state=worker.state()) if state == "1" else found)

    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, reason: str, message: str) -> Response:
    return _json({"error": message, "reason": reason}, status)
