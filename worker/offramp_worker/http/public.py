"""The public port without inference (:mod:`offramp_worker.http.inference`): health, metadata and ``/metrics``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from offramp_worker.engine.engine import Engine
from offramp_worker.http.tensors import VERSION, model_metadata, server_metadata
from offramp_worker.worker import Worker


def public_app(worker: Worker) -> FastAPI:
    """The ASGI application of the public port."""
    app = FastAPI(title="Offramp worker", openapi_url=None)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return server_metadata()

    @app.get("/v2/health/live")
    async def live() -> Response:
        return PlainTextResponse("", 200) if worker.alive else PlainTextResponse("the engine has stopped", 500)

    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return PlainTextResponse("", 200) if worker.ready else PlainTextResponse(worker.reason, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def metadata(name: str, version: str = VERSION) -> Response:
        engine = _engine(worker, name, version)
        return engine if isinstance(engine, Response) else JSONResponse(model_metadata(engine.bundle.manifest))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> Response:
        engine = _engine(worker, name, version)
        if isinstance(engine, Response):
            return engine
        return PlainTextResponse("", 200) if worker.ready else PlainTextResponse(worker.reason, 503)

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> Response:
        return JSONResponse({"error": f"{request.url.path} is unknown; see GET /v2"}, 404)

    return app


def _engine(worker: Worker, name: str, version: str) -> Engine | Response:
    """The engine if it serves this version of model ``name``, else the reply that says why not."""
    engine = worker.engine
    if engine is None:
        return JSONResponse({"error": worker.reason}, 503)
    if name != engine.bundle.manifest.name:
        return JSONResponse(
            {"error": f"model {name!r} is unknown; this worker serves {engine.bundle.manifest.name!r}"}, 404
        )
    if version != VERSION:
        return JSONResponse({"error": f"version {version!r} of model {name!r} is unknown; there is {VERSION!r}"}, 404)
    return engine
