"""One connection of the public port: uvicorn's HTTP/1.1, with a short way for inference and limits on what a client may hold.

uvicorn parses, keeps alive, pipelines and drains, and everything but inference goes to the ASGI application. A request for
:class:`Inference` is answered from here in one write: a task, its events and two checked messages would cost more than reading
its tensors. Measured figures: docs/decisions/0020.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from offramp_worker.engine.tickets import Ticket
from offramp_worker.http.bodies import Headers
from offramp_worker.http.inference import Inference, Response, is_inference

MAX_HEAD_BYTES = 64 * 1024
SEND_SECONDS = 30.0  # for a client to take in its replies
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange(RequestResponseCycle):
    """An inference request and its reply: what uvicorn's protocol asks of its own kind of exchange, and the body as it came."""

    _NOBODY_WAITS = asyncio.Event()

    def __init__(
        self, *, path: str, headers: Headers, keep_alive: bool, expect_100_continue: bool
    ) -> None:  # not super's
        self.path, self.headers = path, headers
        self.keep_alive, self.waiting_for_100_continue = keep_alive, expect_100_continue
        self.message_event = self._NOBODY_WAITS
        self.more_body, self.response_complete, self.disconnected = True, False, False
        self.size = 0
        self._chunks: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk)

    def take_body(self) -> bytes:
        """The whole body; it is not kept here."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class Connection(HttpToolsProtocol):
    """See the module. A request may take ``receive_seconds`` from its first byte to its last, without the time in which nothing is read here.

    ``expire`` is to be called about once a second.
    """

    def __init__(self, *, inference: Inference, idle_seconds: float, receive_seconds: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._inference, self._idle_seconds, self._receive_seconds = inference, idle_seconds, receive_seconds
        self._exchange: Exchange | None = None  # the inference request that is first in line
        self._ticket: Ticket | None = None
        self._head_bytes = 0  # of a head that is still incomplete
        self._waits_since: float | None = self.loop.time()  # for the rest of a request, at first for any
        self._unsent_since: float | None = None
        self._last: Response | None = None  # sent after the requests in flight: nothing behind them can be read

    # --- reading ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvloop then sends at once: a reply must not wait for an engine that goes on working in this thread.
        transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._fail(self._inference.head_too_large(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._waits_since = self.loop.time()

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and _size(self.headers) + len(self.url) > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # ends parsing; send_400_response says why
        self._head_bytes = 0
        if is_inference(self.parser.get_method(), self.url):
            self._line_up()
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # the ASGI scope
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def _line_up(self) -> None:
        """The head of an inference request is complete."""
        previous = self.cycle
        self.cycle = exchange = Exchange(
            path=self.url.decode("latin-1"),
            headers=self.headers,
            keep_alive=self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0",
            expect_100_continue=self.expect_100_continue,
        )
        if previous is None or previous.response_complete:
            self._start(exchange)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_body(body)
        elif not exchange.response_complete:
            exchange.add(body)
            if exchange.size > self._inference.max_body_bytes:
                self._fail(self._inference.body_too_large())

    def on_message_complete(self) -> None:
        self._waits_since = None
        exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif not exchange.response_complete:
            exchange.more_body = False
            if exchange is self._exchange:
                self._answer(exchange)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """A request is first in line."""
        if isinstance(cycle, Exchange):
            self._start(cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self, exchange: Exchange) -> None:
        """An inference request is first in line: its head is complete, and of a pipelined one perhaps the body."""
        self._exchange = exchange
        if _announced(exchange.headers) > self._inference.max_body_bytes:
            self._reply(self._inference.body_too_large())
        elif not exchange.more_body:
            self.loop.call_soon(self._answer, exchange)  # not here: each pipelined request would deepen the stack
        elif exchange.waiting_for_100_continue:
            self.transport.write(CONTINUE)

    def send_400_response(self, msg: str) -> None:
        """What has just arrived cannot be parsed."""
        too_large = self._head_bytes > MAX_HEAD_BYTES
        self._fail(self._inference.head_too_large(MAX_HEAD_BYTES) if too_large else self._inference.unreadable(msg))

    # --- answering --------------------------------------------------------------------------------

    def _answer(self, exchange: Exchange) -> None:
        if not self.transport.is_closing():
            self._ticket = self._inference.answer(exchange.path, exchange.headers, exchange.take_body(), self._reply)

    def _reply(self, response: Response) -> None:
        """Answer the exchange."""
        exchange, self._exchange, self._ticket = self._exchange, None, None
        if exchange is None or self.transport.is_closing():
            return
        exchange.response_complete = True
        self._send(response, keep_alive=exchange.keep_alive and not response.close)
        self.on_response_complete()

    def _fail(self, response: Response) -> None:
        """Nothing more can be read here: answer the complete requests in flight, then send this and close."""
        newest = self.cycle
        incomplete = newest is not None and newest.more_body and not newest.response_complete
        in_flight = bool(self.pipeline) or not (newest is None or newest.response_complete or incomplete)
        if self.pipeline and incomplete:
            self.pipeline.popleft()
        self._last = response
        if not in_flight:
            self._exchange = None
            self._send_last()

    def _send_last(self) -> None:
        if self._last is not None and not self.transport.is_closing():
            self._send(self._last, keep_alive=False)

    def _send(self, response: Response, *, keep_alive: bool) -> None:
        head = [STATUS_LINE[response.status], b"content-length: ", str(len(response.body)).encode(), b"\r\n"]
        for name, value in response.headers:
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
        self.transport.write(b"".join((*head, response.body)))
        if not keep_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        others = bool(self.pipeline)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline or self.flow.write_paused:
            self.flow.pause_reading()  # a client that sends and does not read gets no more into memory
        if not others:
            self._send_last()

    # --- limits -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent_since = None
        if not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()

    def expire(self, now: float, *, stood_still: bool) -> None:
        """End what keeps us waiting too long: a request that does not arrive, replies that are not read.

        A wait begins again while it is we who do not read: on purpose, or because the loop ``stood_still``.
        """
        if self._waits_since is not None and (stood_still or self.flow.read_paused):
            self._waits_since = now
        if self._unsent_since is not None and stood_still:
            self._unsent_since = now
        if self._unsent_since is not None and now - self._unsent_since > SEND_SECONDS:
            self.transport.abort()
        elif self._waits_since is None or self.transport.is_closing():
            return
        elif self.cycle is None and not self._head_bytes:
            if now - self._waits_since > self._idle_seconds:
                self.transport.close()
        elif now - self._waits_since > self._receive_seconds:
            self._fail(self._inference.too_slow(self._receive_seconds))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._ticket is not None:
            self._inference.cancel(self._ticket)
            self._ticket = None


def _announced(headers: Headers) -> int:
    """Content-Length; the parser has checked that it is a number."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)
