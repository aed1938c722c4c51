"""What every public port says beside inference: the server's metadata, health and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from offramp_worker.http.tensors import server_metadata


class Healthy(Protocol):
    """What serves, one model or several."""

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


def add_health(
    app: FastAPI,
    host: Healthy,
    *,
    metrics_text: Callable[[], bytes],
    metadata: Callable[[], dict[str, Any]] = server_metadata,
    stopped: str = "the engine has stopped",
) -> None:
    """Add ``/v2``, health and ``/metrics``; ``stopped`` is what a ``host`` that is not alive answers."""

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return metadata()

    @app.get("/v2/health/live")
    async def live() -> Response:
        return PlainTextResponse("", 200) if host.alive else PlainTextResponse(stopped, 500)

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return PlainTextResponse("", 200) if host.ready else PlainTextResponse(host.reason, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")
