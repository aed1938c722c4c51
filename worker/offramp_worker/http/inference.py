"""Inference over REST: from a request's headers and body to a response, knowing nothing of connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson

from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.tickets import EXPIRED, OverloadedError, Ticket, UnableError
from offramp_worker.front import Front
from offramp_worker.http.bodies import Headers
from offramp_worker.http.tensors import VERSION, BadRequestError, InferRequest, parse_request, response_body, shown
from offramp_worker.tracing import context_of
from offramp_worker.worker import Worker

PREFIX, SUFFIX = b"/v2/models/", b"/infer"
JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


@dataclass(frozen=True, slots=True)
class Response:
    """A whole reply. ``close`` ends the connection after it."""

    status: int
    body: bytes
    headers: Headers
    close: bool = False


Reply = Callable[[Response], None]


def is_inference(method: bytes, url: bytes) -> bool:
    """Whether a request is for :class:`Inference`."""
    return method == b"POST" and url.startswith(PREFIX) and url.partition(b"?")[0].endswith(SUFFIX)


class Inference:
    """``POST /v2/models/{name}[/versions/{version}]/infer``."""

    def __init__(self, worker: Worker, front: Front) -> None:
        self._worker, self._front = worker, front
        self.max_body_bytes = worker.settings.max_body_bytes

    def answer(self, path: str, headers: Headers, body: bytes, reply: Reply) -> Ticket | None:
        """Answer one request: ``reply`` is called when the returned ticket is done, or now, when it is refused (None)."""
        engine = self._worker.engine
        if engine is None:
            self._refuse(
                self.refusal(503, self._worker.reason, outcome=RequestOutcome.REJECTED, retry_after=1), headers, reply
            )
            return None
        try:
            model = unquote(path.partition("?")[0])[len(PREFIX) : -len(SUFFIX)]
            if model != engine.bundle.manifest.name and not self._names(engine, model):
                self._refuse(self.refusal(404, _unknown(model, engine)), headers, reply)
                return None
            request = self._front.named(self._read(engine, headers, body))
            done = partial(
                self._reply, request=request, model=engine.bundle.manifest.name, reply=reply, headers=headers
            )
            return self._front.submit(engine, request, done=done)
        except BadRequestError as error:
            self._refuse(self.refusal(400, str(error)), headers, reply)
        except OverloadedError as error:
            status = 503 if isinstance(error, UnableError) else 429
            self._refuse(
                self.refusal(
                    status, str(error), outcome=RequestOutcome.REJECTED, retry_after=error.retry_after_seconds
                ),
                headers,
                reply,
            )
        return None

    def cancel(self, ticket: Ticket) -> None:
        """The client has gone away."""
        if self._worker.engine is not None:
            self._front.cancel(self._worker.engine, ticket)

    def body_too_large(self) -> Response:
        """What is left of the body is not read."""
        return self.refusal(413, f"body: is larger than the limit of {self.max_body_bytes} bytes", close=True)

    def head_too_large(self, limit: int) -> Response:
        return self.refusal(431, f"the headers are larger than the limit of {limit} bytes", close=True)

    def unreadable(self, reason: str) -> Response:
        return self.refusal(400, reason, close=True)

    def too_slow(self, seconds: float) -> Response:
        return self.refusal(408, f"the request did not arrive within {seconds:g} s", close=True)

    def refusal(
        self,
        status: int,
        error: str,
        *,
        outcome: RequestOutcome = RequestOutcome.INVALID,
        retry_after: int | None = None,
        close: bool = False,
    ) -> Response:
        """A counted error reply."""
        self._worker.metrics.requests[outcome].inc()
        self._worker.metrics.responses("rest", str(status)).inc()
        headers = [JSON_TYPE] if retry_after is None else [JSON_TYPE, (b"retry-after", str(retry_after).encode())]
        return Response(status, orjson.dumps({"error": error}), headers, close)

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

    def _read(self, engine: Engine, headers: Headers, body: bytes) -> InferRequest:
        length = None
        for name, value in headers:
            if name == b"inference-header-content-length":
                length = _header_length(value)
            elif name == b"content-encoding" and value != b"identity":
                raise BadRequestError(
                    f"Content-Encoding: {shown(value.decode('latin-1'))} is not supported; send the body as it is"
                )
        return parse_request(
            body,
            header_length=length,
            spec=engine.bundle.manifest.inputs[0],
            max_rows=self._worker.settings.max_queue_rows,
        )


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
    if ticket.error is not None:
        return Response(500, orjson.dumps({"error": ticket.error}), [JSON_TYPE])
    body, header_length = response_body(ticket, request, model=model)
    headers: list[Any] = [JSON_TYPE]
    if header_length is not None:
        headers = [BINARY_TYPE, (b"inference-header-content-length", str(header_length).encode())]
    return Response(200, body, headers)
