"""The public port: Open Inference Protocol v2 over REST, and ``/metrics``.

Everything but inference is a FastAPI application; inference is answered before it on bare ASGI, because routing and
request objects cost more there than parsing does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import offramp_worker
from offramp_worker.engine.batcher import OverloadedError, Ticket
from offramp_worker.engine.engine import Engine
from offramp_worker.http.bodies import (
    App,
    DisconnectedError,
    Receive,
    Scope,
    Send,
    TooLargeError,
    header,
    read_body,
    send_bytes,
    send_json,
)
from offramp_worker.http.tensors import DATATYPES, BadRequestError, InferRequest, parse_request, response_body
from offramp_worker.worker import Worker

PREFIX, SUFFIX = "/v2/models/", "/infer"
JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


class Replies:
    """Carries finished tickets from the engine's thread to the event loop that waits for them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    def deliver(self, tickets: list[Ticket]) -> None:
        """Called by the engine."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._resolve, tickets)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def waiter(self, ticket: Ticket) -> asyncio.Future[None]:
        """A future that ends when the ticket is done. Call it in the step of the event loop that submitted the ticket."""
        self._loop = self._loop or asyncio.get_running_loop()
        future = self._loop.create_future()
        self._waiting[ticket] = future
        return future

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _resolve(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)


def public_app(worker: Worker, replies: Replies) -> App:
    """The ASGI application of the public port."""
    rest = _rest(worker)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.startswith(PREFIX) and path.endswith(SUFFIX):
                await _infer(worker, replies, scope, receive, send)
                return
        await rest(scope, receive, send)

    return app


async def _infer(worker: Worker, replies: Replies, scope: Scope, receive: Receive, send: Send) -> None:
    engine, model = worker.engine, scope["path"][len(PREFIX) : -len(SUFFIX)]
    if engine is None:
        await _refuse(worker, send, 503, worker.reason, outcome="rejected", retry_after=1)
        return
    if model.partition("/versions/")[0] != engine.bundle.manifest.name:
        await _refuse(
            worker, send, 404, f"model {model!r} is unknown; this worker serves {engine.bundle.manifest.name!r}"
        )
        return
    try:
        request = await _read(worker, engine, scope, receive)
        ticket = engine.submit(request.x, never_exit=request.never_exit, deadline_seconds=request.deadline_seconds)
    except TooLargeError:
        await _refuse(worker, send, 413, f"body: is larger than the limit of {worker.settings.max_body_bytes} bytes")
    except BadRequestError as error:
        await _refuse(worker, send, 400, str(error))
    except OverloadedError as error:
        await _refuse(worker, send, 503, str(error), outcome="rejected", retry_after=error.retry_after_seconds)
    except DisconnectedError:
        return
    else:
        await replies.waiter(ticket)
        await _reply(send, ticket, request, engine.bundle.manifest.name)


async def _read(worker: Worker, engine: Engine, scope: Scope, receive: Receive) -> InferRequest:
    encoding = header(scope, b"content-encoding")
    if encoding not in (None, b"identity"):
        raise BadRequestError(
            f"Content-Encoding: {encoding.decode('latin-1')!r} is not supported; send the body as it is"
        )
    length = header(scope, b"inference-header-content-length")
    if length is not None and not length.isdigit():
        raise BadRequestError(
            f"Inference-Header-Content-Length: is {length.decode('latin-1')!r}; it must be a whole number"
        )
    body = await read_body(scope, receive, limit=worker.settings.max_body_bytes)
    return parse_request(
        body,
        header_length=None if length is None else int(length[:18]),
        spec=engine.bundle.manifest.inputs[0],
        max_rows=worker.settings.max_queue_rows,
    )


async def _reply(send: Send, ticket: Ticket, request: InferRequest, model: str) -> None:
    if ticket.error is not None:
        await send_json(send, 500, {"error": ticket.error})
        return
    body, header_length = response_body(ticket, request, model=model)
    if header_length is None:
        await send_bytes(send, 200, body, [JSON_TYPE])
    else:
        await send_bytes(
            send, 200, body, [BINARY_TYPE, (b"inference-header-content-length", str(header_length).encode())]
        )


async def _refuse(
    worker: Worker, send: Send, status: int, error: str, *, outcome: str = "invalid", retry_after: int | None = None
) -> None:
    worker.metrics.requests("", "", outcome).inc()
    headers = [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send_json(send, status, {"error": error}, headers)


def _rest(worker: Worker) -> FastAPI:
    app = FastAPI(title="Offramp worker", openapi_url=None)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "offramp", "version": offramp_worker.__version__, "extensions": ["binary_tensor_data"]}

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
    async def metadata(name: str) -> Response:
        engine = _engine(worker, name)
        return engine if isinstance(engine, Response) else JSONResponse(_metadata(engine))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str) -> Response:
        engine = _engine(worker, name)
        if isinstance(engine, Response):
            return engine
        return PlainTextResponse("", 200) if worker.ready else PlainTextResponse(worker.reason, 503)

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> Response:
        return JSONResponse({"error": f"{request.url.path} is unknown; see GET /v2"}, 404)

    return app


def _engine(worker: Worker, name: str) -> Engine | Response:
    """The engine if it serves model ``name``, else the reply that says why not."""
    engine = worker.engine
    if engine is None:
        return JSONResponse({"error": worker.reason}, 503)
    if name != engine.bundle.manifest.name:
        return JSONResponse(
            {"error": f"model {name!r} is unknown; this worker serves {engine.bundle.manifest.name!r}"}, 404
        )
    return engine


def _metadata(engine: Engine) -> dict[str, Any]:
    manifest = engine.bundle.manifest
    shapes = {"logits": [-1, manifest.n_classes], "label": [-1]}
    return {
        "name": manifest.name,
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": t.name, "datatype": t.datatype, "shape": [-1, *t.shape]} for t in manifest.inputs],
        "outputs": [{"name": name, "datatype": DATATYPES[name], "shape": shape} for name, shape in shapes.items()],
    }
