"""The public port of a worker that generates: OpenAI's paths, Triton's, health and ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from offramp_worker.generate.doors.forms import FormOfReplies, OpenAI, Triton, model, models
from offramp_worker.generate.doors.streams import Door
from offramp_worker.generate.requests import Wanted, read_chat, read_completion, read_triton
from offramp_worker.http.bodies import App, Receive, Scope, Send
from offramp_worker.http.health import add_health
from offramp_worker.http.methods import with_methods
from offramp_worker.http.tensors import MAX_SHOWN, VERSION

if TYPE_CHECKING:
    from offramp_worker.generate.worker import GenerationWorker


class _Answered(Response):
    """A reply that the door writes by itself."""

    def __init__(self, door: Door, *, form: FormOfReplies, read: Callable[[bytes], Wanted], model: str | None) -> None:
        super().__init__()
        self._answer = partial(door.answer, form=form, read=read, model=model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def generation_app(worker: GenerationWorker, door: Door) -> App:
    """The ASGI application of the public port."""
    app = FastAPI(title="Offramp worker", openapi_url=None, redirect_slashes=False)
    add_health(app, worker, metrics_text=worker.metrics.text)
    _add_openai(app, worker, door)
    _add_triton(app, worker, door)

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> Response:
        return _missing(request.url.path, f"{request.url.path[:MAX_SHOWN]} is unknown; see docs/protocol.md")

    @app.exception_handler(405)
    async def method(request: Request, _: Exception) -> Response:
        message = f"{request.method} is not what {request.url.path[:MAX_SHOWN]} takes; OPTIONS tells what is"
        return _missing(request.url.path, message, status=405)

    return with_methods(app)


def _add_openai(app: FastAPI, worker: GenerationWorker, door: Door) -> None:
    @app.get("/v1/models")
    async def listed() -> Response:
        return JSONResponse(models({worker.bundle.name: worker.bundle.created} if worker.bundle else {}))

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> Response:
        if worker.bundle is None or name != worker.bundle.name:
            return _missing(
                "/v1",
                f"model: {name[:MAX_SHOWN]!r} is unknown; see GET /v1/models",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(model(worker.bundle.name, worker.bundle.created))

    @app.post("/v1/completions")
    async def completions() -> Response:
        return _Answered(door, form=OpenAI(), read=read_completion, model=None)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        return _Answered(door, form=OpenAI(), read=read_chat, model=None)


def _add_triton(app: FastAPI, worker: GenerationWorker, door: Door) -> None:
    def reading(name: str, *, stream: bool) -> Response:
        return _Answered(door, form=Triton(), read=partial(read_triton, model=name, stream=stream), model=name)

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def metadata(name: str, version: str = VERSION) -> Response:
        return _known(worker, name, version) or JSONResponse(_metadata(name))

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> Response:
        if (unknown := _known(worker, name, version)) is not None:
            return unknown
        return PlainTextResponse("", 200) if worker.ready else PlainTextResponse(worker.reason, 503)

    @app.post("/v2/models/{name}/generate")
    @app.post("/v2/models/{name}/versions/{version}/generate")
    async def generate(name: str, version: str = VERSION) -> Response:
        return _known(worker, name, version) or reading(name, stream=False)

    @app.post("/v2/models/{name}/generate_stream")
    @app.post("/v2/models/{name}/versions/{version}/generate_stream")
    async def generate_stream(name: str, version: str = VERSION) -> Response:
        return _known(worker, name, version) or reading(name, stream=True)


def _known(worker: GenerationWorker, name: str, version: str) -> Response | None:
    """None where this version of a model is served, else the reply that says it is not."""
    if worker.bundle is None:
        return JSONResponse({"error": worker.reason}, 503, {"retry-after": "1"})
    if name != worker.bundle.name or version != VERSION:
        message = (
            f"version {version[:MAX_SHOWN]!r} of model {name[:MAX_SHOWN]!r} is unknown; this worker serves "
            f"{VERSION!r} of {worker.bundle.name!r}"
        )
        return JSONResponse({"error": message}, 404)
    return None


def _metadata(name: str) -> dict[str, Any]:
    """Triton's description of a model that takes text and gives text."""
    text = {"datatype": "BYTES", "shape": [1]}
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "offramp_generate",
        "inputs": [{"name": "text_input", **text}],
        "outputs": [{"name": "text_output", **text}],
    }


def _missing(
    path: str, message: str, *, status: int = 404, param: str | None = None, code: str | None = None
) -> Response:
    """An error in the shape of the protocol that the path belongs to."""
    form: FormOfReplies = OpenAI() if path.startswith("/v1") else Triton()
    return Response(form.error(message, status=status, param=param, code=code), status, media_type="application/json")
