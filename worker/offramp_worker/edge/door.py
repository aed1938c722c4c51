"""The core's door for edges: rows, features and audits, for who asks with the model's digest.

Whoever may send inference requests may come here as well, so nothing is believed: a body has the size that its model
and its largest request allow, shapes and types are checked, and numbers that are not finite are refused. Features and
audits run on one thread beside the engine, and few wait for it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np
import numpy.typing as npt

from offramp_core.bundle import TensorSpec
from offramp_core.errors import OfframpError
from offramp_core.precision import EXACT
from offramp_worker.bundle.load import row_bytes
from offramp_worker.edge.desk import as_arrays
from offramp_worker.edge.wire import (
    BOOT_HEADER,
    DATATYPES,
    DIGEST_HEADER,
    FEATURES,
    LENGTH_HEADER,
    RAMPS_HEADER,
    SECONDS_HEADER,
    UPLINK_BYTES,
    Core,
    reply_body,
)
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.ramp_sets import HeldSet
from offramp_worker.engine.execution.sessions import Scores
from offramp_worker.engine.queue.tickets import OverloadedError, Ticket, UnableError
from offramp_worker.front import Front
from offramp_worker.http.bodies import (
    App,
    BodyTooLargeError,
    DisconnectedError,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_bytes,
    send_json,
)
from offramp_worker.http.tensors import BadRequestError, InferRequest, parse_request, shown
from offramp_worker.worker import InferenceWorker

Array = npt.NDArray[Any]
PREFIX = "/v2/models/"
MOST_WAITING = 32
HEADER_BYTES = 65536  # of JSON before the tensor
KEPT = 4  # pieces of the model that begin at a ramp
LONGEST_SECONDS = 60.0


class EdgeRefusedError(OfframpError):
    """With a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EdgeDoor:
    """An ASGI application that takes what is under ``/v2/models/NAME/edge``, before the ``rest`` of the public port."""

    def __init__(self, worker: InferenceWorker, front: Front, rest: App) -> None:
        self._worker, self._front, self._rest = worker, front, rest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edges")
        self._waiting, self._boot = 0, secrets.token_hex(16)
        self._pieces = _Pieces()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        name, found, what = path[len(PREFIX) :].partition("/edge")
        ours = path.startswith(PREFIX) and found and "/" not in name and what[:1] in ("", "/")
        if scope["type"] != "http" or scope.get("method") != "POST" or not ours:
            await self._rest(scope, receive, send)
            return
        try:
            await self._answer(name, what.strip("/"), scope, receive, send)
        except EdgeRefusedError as error:
            again = [(b"retry-after", b"1")] if error.status in (429, 503) else []
            await send_json(send, error.status, {"error": str(error)}, again)
        except OverloadedError as error:
            status = 503 if isinstance(error, UnableError) else 429
            await send_json(send, status, {"error": str(error)}, [(b"retry-after", b"1")])
        except (BadRequestError, DisconnectedError) as error:
            await send_json(send, 400, {"error": str(error)})
        except BodyTooLargeError:
            await send_json(send, 413, {"error": "body: is larger than this model's largest request"})

    async def _answer(self, name: str, what: str, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine(name, scope)
        manifest = engine.bundle.manifest
        core = Core(manifest.name, manifest.backbone_digest, manifest.ramp_set_digest, self._boot)
        if not what:
            await read_body(scope, receive, limit=UPLINK_BYTES)
            await send_bytes(send, 200, msgspec.json.encode(core), [(b"content-type", b"application/json")])
            return
        seconds = _seconds(scope)
        if what == "rows":
            arrays = await self._rows(engine, seconds, scope, receive)
        elif what == "scores":
            request = await self._read(engine, engine.bundle.manifest.inputs[0], scope, receive)
            arrays = await self._beside(seconds, lambda: as_arrays(_scores(engine, request.x)))
        elif what.startswith("features/"):
            arrays = await self._features(engine, unquote(what.removeprefix("features/")), seconds, scope, receive)
        else:
            raise EdgeRefusedError(404, f"{shown(scope['path'])} is unknown; see docs/how-to/edge.md")
        body, length = reply_body(arrays)
        names = {
            "content-type": "application/octet-stream",
            LENGTH_HEADER: str(length),
            DIGEST_HEADER: core.backbone_digest,
            RAMPS_HEADER: core.ramp_set_digest,
            BOOT_HEADER: core.boot,
        }
        await send_bytes(send, 200, body, [(name.encode(), value.encode()) for name, value in names.items()])

    def _engine(self, name: str, scope: Scope) -> Engine:
        engine = self._worker.engine
        if engine is None or not self._worker.ready:
            raise EdgeRefusedError(503, self._worker.reason)
        mine = engine.bundle.manifest
        if name != mine.name:
            raise EdgeRefusedError(404, f"model {shown(name)} is unknown; this worker serves {mine.name!r}")
        if scope["path"].rstrip("/").endswith("/edge"):
            return engine  # who asks who this is knows it then
        for field, digest in ((DIGEST_HEADER, mine.backbone_digest), (RAMPS_HEADER, mine.ramp_set_digest)):
            asked = (header(scope, field.encode()) or b"").decode("latin-1")
            if asked != digest:
                raise EdgeRefusedError(
                    409, f"{field}: is {shown(asked)}; this core serves {digest}: serve the same bundle"
                )
        return engine

    async def _read(self, engine: Engine, spec: TensorSpec, scope: Scope, receive: Receive) -> InferRequest:
        limit = min(self._worker.settings.max_body_bytes, HEADER_BYTES + engine.max_rows * row_bytes(spec))
        length = header(scope, LENGTH_HEADER.encode()) or b""
        if not length.isdigit() or len(length) > 18:
            raise BadRequestError(f"{LENGTH_HEADER}: is {shown(length.decode('latin-1'))}; it must be a whole number")
        body = await read_body(scope, receive, limit=limit)
        return parse_request(body, header_length=int(length), spec=spec, max_rows=engine.max_rows, names=engine.outputs)

    async def _rows(self, engine: Engine, seconds: float, scope: Scope, receive: Receive) -> Mapping[str, Array]:
        """The engine answers rows of edges like those of any request that takes no exits."""
        request = await self._read(engine, engine.bundle.manifest.inputs[0], scope, receive)
        answered: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()

        def done(ticket: Ticket) -> None:
            if not answered.done():
                answered.set_result(ticket)

        ticket = self._front.submit(engine, _exactly(request, seconds), done=done)
        try:
            await answered
        except asyncio.CancelledError:
            self._front.cancel(engine, ticket)
            raise
        if ticket.expired:
            raise EdgeRefusedError(504, "the time ran out before the rows could run")
        if ticket.error is not None:
            raise EdgeRefusedError(500, ticket.error)
        return {"logits": ticket.logits}

    async def _features(
        self, engine: Engine, ramp: str, seconds: float, scope: Scope, receive: Receive
    ) -> Mapping[str, Array]:
        known = self._pieces.known(ramp)
        spec = known or await self._beside(seconds, lambda: self._pieces.spec(engine, ramp))
        request = await self._read(engine, spec, scope, receive)
        if request.x.dtype.kind == "f" and not np.isfinite(request.x).all():
            raise BadRequestError(f"{FEATURES}: not all are finite numbers")

        def run() -> Array:
            began = time.monotonic()
            logits = self._pieces.run(engine, ramp, request.x)
            engine.accounts.count_other(time.monotonic() - began)
            return logits

        return {"logits": await self._beside(seconds, run)}

    async def _beside(self, seconds: float, job: Callable[[], Any]) -> Any:
        """Run a job on the thread, unless too many wait or its time runs out before."""
        if self._waiting >= MOST_WAITING:
            raise EdgeRefusedError(429, f"{self._waiting} requests of edges wait; come again")
        until = time.monotonic() + seconds

        def run() -> Any:
            if time.monotonic() > until:
                raise EdgeRefusedError(504, "the time ran out before the request could run")
            return job()

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        finally:
            self._waiting -= 1


class _Pieces:
    """The pieces of the model behind ramps that edges send features of. It belongs to one thread.

    What comes in behind a ramp is remembered for all of them, so that a request that is none builds a piece once."""

    def __init__(self) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self._known: dict[str, Runnable] = {}

    def spec(self, engine: Engine, ramp: str) -> TensorSpec:
        """What comes in behind a ramp."""
        if ramp not in self._specs:
            self._at(engine, ramp)
        return self._specs[ramp]

    def known(self, ramp: str) -> TensorSpec | None:
        """As :meth:`spec` where it is known already; from any thread."""
        return self._specs.get(ramp)

    def run(self, engine: Engine, ramp: str, features: Array) -> Array:
        """The model's own logits."""
        rows = np.arange(len(features))  # all: copied to where the piece reads, which it would be bound to anew
        return np.array(self._at(engine, ramp).run(features, features, rows)[0])

    def _at(self, engine: Engine, ramp: str) -> Runnable:
        piece = self._known.pop(ramp, None)
        if piece is None:
            exact = {c.id: j for j, c in enumerate(engine.bundle.columns) if (c.precision or EXACT) == EXACT}
            if ramp not in exact:
                raise EdgeRefusedError(404, f"features: {shown(ramp)} is no exact ramp of this bundle; send the input")
            piece = self._make(engine, ramp, exact[ramp])
        self._known[ramp] = piece  # the newest one
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return piece

    def _make(self, engine: Engine, ramp: str, index: int) -> Runnable:
        bundle = engine.bundle
        if not bundle.device.is_cpu or bundle.manifest.inputs[0].varies:
            raise EdgeRefusedError(
                404, "features: this core takes none, by its device or since lengths vary; send the input"
            )
        *before, rest = _own_set(engine, FEATURES).sessions.cut_at(index)
        features = x = bundle.probe_x
        for stage in before:
            features, _ = stage.run(features, x)
        features = np.asarray(features)
        if rest.reads_input or not before:
            raise EdgeRefusedError(
                404, f"features: behind {shown(ramp)} the model reads its input as well; send the input"
            )
        self._specs[ramp] = TensorSpec(FEATURES, DATATYPES[features.dtype], features.shape[1:])
        return rest


def _scores(engine: Engine, x: Array) -> Scores:
    """What the model and the columns of the bundle's own heads say."""
    return _own_set(engine, "scores").sessions.tapped(x)


def _own_set(engine: Engine, what: str) -> HeldSet:
    for held in engine.sets.held:
        if held.digest == engine.sets.own_digest:
            return held
    raise EdgeRefusedError(404, f"{what}: this core holds other ramps by now")


def _exactly(request: InferRequest, seconds: float) -> InferRequest:
    """For the model itself, and of use for so long."""
    return InferRequest(request.x, None, True, math.inf, (), timeout_seconds=seconds)


def _seconds(scope: Scope) -> float:
    text = (header(scope, SECONDS_HEADER.encode()) or b"").decode("latin-1")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        raise BadRequestError(
            f"{SECONDS_HEADER}: is {shown(text)}; it must be a number above 0, at most {LONGEST_SECONDS:g}"
        )
    return seconds
