"""The admin port of a worker that generates: state and observations for the control plane. Every path needs the bearer token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from offramp_core.reasons import Reason
from offramp_worker.generate.worker import GenerationWorker
from offramp_worker.http.admin import with_token
from offramp_worker.http.bodies import App
from offramp_worker.http.methods import with_methods


def generation_admin_app(worker: GenerationWorker) -> App:
    """The ASGI application of the admin port."""
    app = FastAPI(title="Offramp worker, admin port", openapi_url=None, redirect_slashes=False)

    @app.get("/v1/state")
    async def state() -> Response:
        return _json(worker.state())

    @app.get("/v1/observations")
    async def observations(after: str = "0", boot: str = "") -> Response:
        if not after.isdecimal() or len(after) > 18:
            error = {"error": f"after is {after[:20]!r}; it must be a whole number >= 0", "reason": Reason.MALFORMED}
            return _json(error, 400)
        first = int(after) if boot == worker.boot_id else 0
        return _json(await asyncio.to_thread(worker.observations, after=first, now=time.time()))

    return with_token(with_methods(app), worker.settings.token_sha256)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
