"""Both ports of a worker with several models: what belongs to a model goes to that model's own door."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from offramp_core.errors import PlanRefusedError
from offramp_core.protocol import HeldModels, SignedDocument
from offramp_worker.documents import parse_document
from offramp_worker.http.admin import with_token
from offramp_worker.http.bodies import App, BodyTooLargeError, DisconnectedError, Receive, Scope, Send, read_body
from offramp_worker.http.health import add_health
from offramp_worker.http.methods import with_methods
from offramp_worker.http.tensors import MAX_SHOWN, VERSION, server_metadata
from offramp_worker.shared.delivered import Delivered
from offramp_worker.shared.inference import unknown
from offramp_worker.shared.metrics import metrics_text
from offramp_worker.shared.model import Model
from offramp_worker.shared.repository import Repository, UnavailableError

OF_MODEL = "/v2/models/"
ADMIN_OF_MODEL = "/models/"
MAX_COMMAND_BYTES = 4096
MAX_LIST_BYTES = 2**20
STATES = {"in": "READY", "loading": "LOADING", "leaving": "UNLOADING", "out": "UNAVAILABLE"}


def public_port(repository: Repository) -> App:
    """The ASGI application of the public port."""
    rest = with_methods(_public(repository))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        model = _model(scope, repository, OF_MODEL)
        doors = None if model is None else model.doors  # held until it is answered, also if the model leaves meanwhile
        await (rest if doors is None else doors.public)(scope, receive, send)

    return app


def admin_port(repository: Repository, delivered: Delivered | None = None) -> App:
    """The ASGI application of the admin port: the repository for the worker's token, ``/models/NAME/...`` for the
    model's."""
    own = _admin(repository)
    if delivered is not None:
        _add_delivered(own, delivered)
    rest = with_token(with_methods(own), repository.settings.process.token_sha256)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        model = _model(scope, repository, ADMIN_OF_MODEL)
        if model is None:
            await rest(scope, receive, send)
            return
        path, doors = scope["path"].removeprefix(ADMIN_OF_MODEL + model.name) or "/", model.doors
        await doors.admin({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return app


def _model(scope: Scope, repository: Repository, prefix: str) -> Model | None:
    path = scope.get("path", "")
    return repository.models.get(path[len(prefix) :].partition("/")[0]) if path.startswith(prefix) else None


def _public(repository: Repository) -> FastAPI:
    app = FastAPI(title="Offramp worker", openapi_url=None, redirect_slashes=False)

    def metadata() -> dict[str, Any]:
        plain = server_metadata()
        return {**plain, "extensions": [*plain["extensions"], "model_repository"]}

    add_health(
        app,
        repository,
        metrics_text=lambda: metrics_text(repository),
        metadata=metadata,
        stopped="the engines have stopped",
    )

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> Response:
        path = request.url.path
        if path.startswith(OF_MODEL):
            return JSONResponse({"error": unknown(path[len(OF_MODEL) :].partition("/")[0], repository)}, 404)
        if path.startswith("/v2/repository"):
            return JSONResponse({"error": "the repository is on the admin port, for who has its token"}, 404)
        return JSONResponse({"error": f"{path[:MAX_SHOWN]} is unknown; see GET /v2"}, 404)

    return app


def _admin(repository: Repository) -> FastAPI:
    """The model repository extension of the Open Inference Protocol."""
    app = FastAPI(title="Offramp worker, admin port", openapi_url=None, redirect_slashes=False)

    @app.post("/v2/repository/index")
    async def index(request: Request) -> Response:
        try:
            wish = orjson.loads(await read_body(request.scope, request.receive, limit=MAX_COMMAND_BYTES) or b"{}")
        except (BodyTooLargeError, DisconnectedError, orjson.JSONDecodeError) as error:
            return JSONResponse({"error": f"body: is no JSON of at most {MAX_COMMAND_BYTES} bytes: {error}"}, 400)
        ready = wish.get("ready", False) if isinstance(wish, dict) else None
        if not isinstance(ready, bool):
            return JSONResponse({"error": "ready: must be true or false"}, 400)
        return JSONResponse([entry(model) for model in repository.models.values() if model.ready or not ready])

    @app.post("/v2/repository/models/{name}/load")
    async def load(name: str) -> Response:
        model = repository.models.get(name)
        if model is None:
            return JSONResponse({"error": unknown(name, repository)}, 404)
        try:
            await repository.load(model, by_hand=True)
        except UnavailableError as error:
            return JSONResponse({"error": str(error)}, 400 if model.broken else 503)
        return JSONResponse({})

    @app.post("/v2/repository/models/{name}/unload")
    async def unload(name: str) -> Response:
        model = repository.models.get(name)
        if model is None:
            return JSONResponse({"error": unknown(name, repository)}, 404)
        await repository.unload(model)
        return JSONResponse({})

    return app


def _add_delivered(app: FastAPI, delivered: Delivered) -> None:
    """Of a worker in a pool: the list of its models, and how they stand."""

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(delivered.state())

    @app.post("/v1/models")
    async def deliver(request: Request) -> Response:
        try:
            document = parse_document(
                await read_body(request.scope, request.receive, limit=MAX_LIST_BYTES), SignedDocument
            )
            await delivered.deliver(document)
        except BodyTooLargeError:
            return JSONResponse({"error": f"the document is larger than {MAX_LIST_BYTES} bytes"}, 413)
        except PlanRefusedError as error:
            return JSONResponse({"error": str(error), "reason": error.reason}, 409)
        except ValueError as error:
            return JSONResponse({"error": f"the document does not parse: {error}"}, 400)
        return _json(delivered.state())


def _json(held: HeldModels) -> Response:
    return Response(msgspec.json.encode(held), media_type="application/json")


def entry(model: Model) -> dict[str, Any]:
    """A model in the repository's index; ``parameters`` are beyond the protocol."""
    beyond = {"bytes": model.size_bytes, "load_seconds": round(model.load_seconds, 3)}
    reason = "" if model.ready else model.broken or model.doors.worker.reason
    return {
        "name": model.name,
        "version": VERSION,
        "state": STATES[model.state],
        "reason": "unloaded by hand" if model.dismissed and not model.broken else reason,
        "parameters": beyond,
    }
