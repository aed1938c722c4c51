"""Inference over REST: from a request's headers and body to a response, knowing nothing of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote
from weakref import ref

import orjson

from offramp_core.reasons import RequestOutcome
from offramp_worker.edge.handed import handed_on
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.queue.tickets import EXPIRED, OverloadedError, Ticket, UnableError
from offramp_worker.front import Front
from offramp_worker.http.bodies import Headers
from offramp_worker.http.large import LARGE_BYTES, is_large, most_values, parse_large
from offramp_worker.http.packed import UnpackedTooLargeError, unpack
from offramp_worker.http.refusals import JSON_TYPE, Refusals, Response
from offramp_worker.http.tensors import (
    MAX_TIER_LENGTH,
    VERSION,
    BadRequestError,
    InferRequest,
    parse_request,
    response_body,
    shown,
)
from offramp_worker.logs import log_event
from offramp_worker.tracing import context_of
from offramp_worker.worker import InferenceWorker

PREFIX, SUFFIX = b"/v2/models/", b"/infer"
JSON_VALUE_BYTES = 26  # of the longest numbers: "-1.2345678901234567e-100, "
TIER = b"offramp-tier"
BINARY_TYPE = (b"content-type", b"application/octet-stream")


Reply = Callable[[Response], None]


class UnsupportedEncodingError(BadRequestError):
    """A Content-Encoding that is not understood here."""


class _Form(NamedTuple):
    """What the headers say of a body."""

    header_length: int | None
    packed: bool
    tier: str


@dataclass(slots=True)
class PendingRequest:
    """A request whose ``body`` waits for a thread that reads it; later its ticket."""

    body: bytes | bytearray
    job: Future[InferRequest] | None = None
    cancelled: bool = False
    ticket: Ticket | None = None

    def take_body(self) -> bytes | bytearray:
        """The body; it is not kept here."""
        body, self.body = self.body, b""
        return body


Pending = Ticket | PendingRequest


def is_inference(method: bytes, url: bytes) -> bool:
    """Whether a request is for :class:`Inference`."""
    return method == b"POST" and url.startswith(PREFIX) and url.partition(b"?")[0].endswith(SUFFIX)


class Answering(Protocol):
    """What answers inference requests of a port. ``refusals`` says what a connection itself refuses, and a body may
    have ``max_body_bytes``."""

    refusals: Refusals

    @property
    def max_body_bytes(self) -> int: ...

    def answer(self, path: str, headers: Headers, body: bytes | bytearray, reply: Reply) -> Any | None: ...

    def cancel(self, pending: Any, *, gone: Callable[[], None]) -> None: ...


class Inference:
    """``POST /v2/models/{name}[/versions/{version}]/infer``."""

    def __init__(self, worker: InferenceWorker, front: Front) -> None:
        self._worker, self._front = worker, front
        self._readers = ThreadPoolExecutor(
            1, thread_name_prefix="bodies"
        )  # one at a time: each needs memory beside its body
        self._limit: tuple[Callable[[], Engine | None], int] = (lambda: None, worker.settings.max_body_bytes)
        self.refusals = Refusals(self._count)

    @property
    def max_body_bytes(self) -> int:
        """The largest body: what the most rows that a request may have take as JSON, and never more than the
        setting."""
        engine = self._worker.engine
        if engine is not None and engine is not self._limit[0]():
            settings, bundle = self._worker.settings, engine.bundle
            values = most_values(bundle.manifest.inputs[0])
            as_json = JSON_VALUE_BYTES * settings.max_queue_rows * values + LARGE_BYTES
            most = settings.max_body_bytes
            self._limit = ref(engine), min(most, as_json) if bundle.encoded is None else most
        return self._limit[1]

    def answer(self, path: str, headers: Headers, body: bytes | bytearray, reply: Reply) -> Pending | None:
        """Answer one request: ``reply`` is called when what is returned is done, or now, when it is refused (None)."""
        engine = self._worker.engine
        if engine is None:
            refusal = self.refusals.refusal(503, self._worker.reason, outcome=RequestOutcome.REJECTED, retry_after=1)
            self._refuse(refusal, headers, reply)
            return None
        try:
            model = unquote(path.partition("?")[0])[len(PREFIX) : -len(SUFFIX)]
            if model != engine.bundle.manifest.name and not self._names(engine, model):
                self._refuse(self.refusals.refusal(404, _unknown(model, engine)), headers, reply)
                return None
            handed = handed_on(headers) if self._worker.settings.takes_edges else None
            if handed is not None:
                if odd := handed.unlike(engine.bundle.manifest):
                    self._refuse(self.refusals.refusal(409, odd), headers, reply)
                    return None
                reply = handed.signed(reply)
            form = _form(headers)
            beside = form.packed or engine.bundle.encoded is not None
            if beside or is_large(body, header_length=form.header_length):
                return self._read_beside(engine, form, body, headers, reply)
            request = parse_request(
                body,
                header_length=form.header_length,
                spec=engine.bundle.asks_for,
                max_rows=engine.max_rows,
                names=engine.outputs,
            )
            return self._submit(engine, _of_tier(request, form.tier), headers, reply)
        except (BadRequestError, OverloadedError) as error:
            self._refuse(self._refusal_of(error), headers, reply)
        return None

    def _submit(self, engine: Engine, request: InferRequest, headers: Headers, reply: Reply) -> Ticket:
        request = self._front.named(request)
        handed = handed_on(headers) if self._worker.settings.takes_edges else None
        if handed is not None:
            request = handed.allowed(request, engine)
        done = partial(self._reply, request=request, model=engine.bundle.manifest.name, reply=reply, headers=headers)
        return self._front.submit(engine, request, done=done)

    def _read_beside(
        self, engine: Engine, form: _Form, body: bytes | bytearray, headers: Headers, reply: Reply
    ) -> PendingRequest:
        """Read a large or packed body, or images and texts, in a thread, so that the loop goes on; then it is a request
        like any other."""
        reading = PendingRequest(body)
        reading.job = self._readers.submit(self._read, engine, form, reading)
        read = asyncio.wrap_future(reading.job)
        read.add_done_callback(partial(self._was_read, reading, engine, headers, reply))
        return reading

    def _read(self, engine: Engine, form: _Form, reading: PendingRequest) -> InferRequest:
        limit, body = self.max_body_bytes, reading.take_body()
        if form.packed:
            body = unpack(body, limit=limit)
        request = parse_large(
            body,
            header_length=form.header_length,
            spec=engine.bundle.asks_for,
            max_rows=engine.max_rows,
            names=engine.outputs,
            encoded=engine.bundle.encoded,
        )
        return _of_tier(request, form.tier)

    def _was_read(
        self,
        reading: PendingRequest,
        engine: Engine,
        headers: Headers,
        reply: Reply,
        future: asyncio.Future[InferRequest],
    ) -> None:
        if reading.cancelled or future.cancelled():
            return
        try:
            reading.ticket = self._submit(engine, future.result(), headers, reply)
        except (BadRequestError, OverloadedError, UnpackedTooLargeError) as error:
            self._refuse(self._refusal_of(error), headers, reply)
        except Exception as error:  # memory may not suffice; whoever waits gets an error, and others go on
            log_event("reading-failed", level="error", error=repr(error))
            refusal = self.refusals.refusal(500, "the request cannot be read", outcome=RequestOutcome.FAILED)
            self._refuse(refusal, headers, reply)

    def _refusal_of(self, error: Exception) -> Response:
        if isinstance(error, UnpackedTooLargeError):
            return self.refusals.body_too_large(self.max_body_bytes)
        if isinstance(error, UnsupportedEncodingError):
            return self.refusals.refusal(415, str(error), headers=[(b"accept-encoding", b"gzip, identity")])
        if isinstance(error, OverloadedError):
            status, after = 503 if isinstance(error, UnableError) else 429, error.retry_after_seconds
            return self.refusals.refusal(status, str(error), outcome=RequestOutcome.REJECTED, retry_after=after)
        return self.refusals.refusal(400, str(error))

    def cancel(self, pending: Pending, *, gone: Callable[[], None]) -> None:
        """The client has gone away; ``gone`` is called once nothing of its body is read any more."""
        if isinstance(pending, PendingRequest) and pending.ticket is None:
            pending.cancelled, job = True, pending.job
            self._worker.metrics.requests[RequestOutcome.CANCELLED].inc()
            if job is not None and not job.cancel():  # it is being read
                loop = asyncio.get_running_loop()
                job.add_done_callback(lambda _: loop.call_soon_threadsafe(gone))
                return
            pending.take_body()  # the thread's queue keeps what was cancelled until it gets there
        else:
            ticket = pending.ticket if isinstance(pending, PendingRequest) else pending
            if self._worker.engine is not None and ticket is not None:
                self._front.cancel(self._worker.engine, ticket)
        gone()

    def _count(self, outcome: RequestOutcome, status: int) -> None:
        self._worker.metrics.requests[outcome].inc()
        self._worker.metrics.responses("rest", str(status)).inc()

    def _refuse(self, response: Response, headers: Headers, reply: Reply) -> None:
        reply(response)
        if self._worker.tracing is not None:
            self._worker.tracing.refused(context=context_of(headers), code=str(response.status))

    def _reply(self, ticket: Ticket, *, request: InferRequest, model: str, reply: Reply, headers: Headers) -> None:
        response = _finished(ticket, request, model=model)
        self._worker.metrics.responses("rest", str(response.status)).inc()
        reply(response)
        if self._worker.tracing is not None:
            self._worker.tracing.answered(
                ticket,
                context=context_of(headers),
                model=model,
                code=str(response.status),
                error=response.status >= 400,
            )

    def _names(self, engine: Engine, path: str) -> bool:
        """Whether ``NAME/versions/VERSION`` is the model served."""
        name, _, version = path.partition("/versions/")
        return name == engine.bundle.manifest.name and version == VERSION


def _form(headers: Headers) -> _Form:
    """How a body is to be read.

    Raises
    ------
    BadRequestError
        A header makes no sense.
    UnsupportedEncodingError
        The body is packed in a way that is not known here.
    """
    length, packed, tier = None, False, ""
    for name, value in headers:
        if name == b"inference-header-content-length":
            length = _header_length(value)
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            if packed or value.strip().lower() not in (b"gzip", b"x-gzip"):
                raise UnsupportedEncodingError(
                    f"Content-Encoding: {shown(value.decode('latin-1'))} is not supported; send gzip, or the body as "
                    "it is"
                )
            packed = True
        elif name == TIER:
            if tier or not 0 < len(value) <= MAX_TIER_LENGTH:
                raise BadRequestError(
                    f"Offramp-Tier: is {shown(value.decode('latin-1'))}; send it once, with at most {MAX_TIER_LENGTH} "
                    "characters"
                )
            tier = value.decode("latin-1")
    return _Form(length, packed, tier)


def _of_tier(request: InferRequest, tier: str) -> InferRequest:
    """The request with the tier that a header names, such as a gateway sets for a route: a client behind it can name no
    other."""
    if tier and (request.tier or request.max_disagreement is not None):
        field = "tier" if request.tier else "max_disagreement"
        raise BadRequestError(f"parameters.{field}: comes with the header Offramp-Tier; send one of them")
    return replace(request, tier=tier) if tier else request


def _header_length(value: bytes) -> int:
    if not value.isdigit():
        raise BadRequestError(
            f"Inference-Header-Content-Length: is {shown(value.decode('latin-1'))}; it must be a whole number"
        )
    return int(value[:18])


def _unknown(model: str, engine: Engine) -> str:
    return f"model {shown(model)} is unknown; this worker serves {engine.bundle.manifest.name!r}"


def _finished(ticket: Ticket, request: InferRequest, *, model: str) -> Response:
    if ticket.expired:
        return Response(504, orjson.dumps({"error": EXPIRED}), [JSON_TYPE])
    if ticket.unable:
        return Response(503, orjson.dumps({"error": ticket.unable}), [JSON_TYPE, (b"retry-after", b"1")])
    if ticket.error is not None:
        return Response(500, orjson.dumps({"error": ticket.error}), [JSON_TYPE])
    body, header_length = response_body(ticket, request, model=model)
    headers: list[Any] = [JSON_TYPE]
    if header_length is not None:
        headers = [BINARY_TYPE, (b"inference-header-content-length", str(header_length).encode())]
    return Response(200, body, headers)
