"""The public port without inference (:mod:`offramp_worker.http.inference`): health, metadata, feedback and
``/metrics``."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from offramp_core.task import Task
from offramp_worker.engine.engine import Engine
from offramp_worker.front import Front
from offramp_worker.http.bodies import App, BodyTooLargeError, DisconnectedError, read_body
from offramp_worker.http.health import add_health
from offramp_worker.http.methods import with_methods
from offramp_worker.http.tensors import MAX_SHOWN, VERSION, BadRequestError, model_metadata, shown
from offramp_worker.worker import InferenceWorker

MAX_FEEDBACK_BYTES = 64 * 1024


def public_app(worker: InferenceWorker, front: Front) -> App:
    """The ASGI application of the public port."""
    app = FastAPI(title="Offramp worker", openapi_url=None, redirect_slashes=False)

    def metrics_text() -> bytes:  # FastAPI never forgets a handler: one that held the metrics would keep them
        return worker.metrics.text()

    add_health(app, worker, metrics_text=metrics_text)

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

    @app.post("/v2/models/{name}/feedback")
    async def feedback(name: str, request: Request) -> Response:
        return await _feedback(worker, front, name, request)

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> Response:
        return JSONResponse({"error": f"{request.url.path[:MAX_SHOWN]} is unknown; see GET /v2"}, 404)

    @app.post("/v2/models/{name}/infer")
    @app.post("/v2/models/{name}/versions/{version}/infer")
    async def infer() -> Response:
        """The connection answers these itself. This tells which method they take, and takes those whose path is spelled
        in another way."""
        return JSONResponse({"error": "spell the path as in GET /v2/models/NAME: /v2/models/NAME/infer"}, 404)

    return with_methods(app)


async def _feedback(worker: InferenceWorker, front: Front, name: str, request: Request) -> Response:
    engine = _engine(worker, name, VERSION)
    if isinstance(engine, Response):
        return engine
    if front.feedback is None:
        return JSONResponse(
            {"error": "feedback is off; set spec.feedback.maxAnswers (OFFRAMP_FEEDBACK_ROWS of a single worker)"}, 404
        )
    status, reply = 200, dict[str, Any]()
    try:
        body = await read_body(request.scope, request.receive, limit=MAX_FEEDBACK_BYTES)
        request_id, labels = read_feedback(body, task=engine.task)
        verdict = front.feedback.judge(request_id, labels)
        if verdict is None:
            status, reply = 404, {"error": f"id: {shown(request_id)} is no recent reply that awaits its label"}
        else:
            reply = {"id": verdict.id, "right": verdict.right, "wrong": verdict.wrong}
    except BodyTooLargeError:
        status, reply = 413, {"error": f"body: is larger than {MAX_FEEDBACK_BYTES} bytes"}
    except (BadRequestError, DisconnectedError) as error:
        status, reply = 400, {"error": str(error)}
    return JSONResponse(reply, status)


def read_feedback(body: bytes, *, task: Task) -> tuple[str, list[int]]:
    """Parse ``{"id": ID OF THE REPLY, "label": TRUE LABEL}``; a list of labels for a reply of several rows.

    Raises
    ------
    BadRequestError
        Names the field.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"body: is no JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise BadRequestError("id: must be the id of a reply")
    if task.label_shape != ():
        raise BadRequestError(
            f"label: this model answers with {task.title}; true labels are compared where an answer is one label"
        )
    label, n_classes = value.get("label"), max(2, task.width)
    labels: list[Any] = label if isinstance(label, list) else [label]
    for one in labels:
        if type(one) is not int or not 0 <= one < n_classes:
            raise BadRequestError(f"label: is {shown(one)}; it must be a whole number from 0 to {n_classes - 1}")
    return value["id"], labels


def _engine(worker: InferenceWorker, name: str, version: str) -> Engine | Response:
    """The engine if it serves this version of model ``name``, else the reply that says why not."""
    engine = worker.engine
    if engine is None:
        return JSONResponse({"error": worker.reason}, 503)
    if name != engine.bundle.manifest.name:
        return JSONResponse(
            {"error": f"model {shown(name)} is unknown; this worker serves {engine.bundle.manifest.name!r}"}, 404
        )
    if version != VERSION:
        return JSONResponse(
            {"error": f"version {shown(version)} of model {shown(name)} is unknown; there is {VERSION!r}"}, 404
        )
    return engine
