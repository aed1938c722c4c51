"""One connection of the public port: uvicorn's HTTP/1.1, with a short way for inference and limits on what a client may
hold.

uvicorn parses, keeps alive, pipelines and drains, and everything but inference goes to the ASGI application. A request
for inference is answered from here in one write: a task, its events and two checked messages would cost more
than reading its tensors. Measured figures: docs/decisions/0020.

A client may ask for another protocol (``Connection: Upgrade``, ``Upgrade: h2c``, as Java's does by default). There is
none here, so the request is taken as one without these headers (RFC 9110, section 7.8): with its body, which the parser
would otherwise take for the next request.

What is overridden of uvicorn has no promise of staying. The versions that work are pinned in ``pyproject.toml``, and a
test runs on each.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from offramp_worker.http.bodies import Headers
from offramp_worker.http.budget import ByteBudget
from offramp_worker.http.inference import Answering, is_inference
from offramp_worker.http.refusals import Refusals, Response

MAX_HEAD_BYTES = 64 * 1024
SEND_SECONDS = 30.0  # for a client to take in its replies
STARVED_SECONDS = 2.0  # for room in the budget of all bodies
_OF_UPGRADES = (b"upgrade", b"http2-settings")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange(RequestResponseCycle):
    """An inference request and its reply: what uvicorn's protocol asks of its own kind of exchange, and the body as it
    came."""

    _NOBODY_WAITS = asyncio.Event()

    def __init__(
        self, *, path: str, headers: Headers, limit: int, keep_alive: bool, expect_100_continue: bool
    ) -> None:  # not super's
        """``limit``: bytes that the body may have."""
        self.path, self.headers, self.limit = path, headers, limit
        self.keep_alive, self.waiting_for_100_continue = keep_alive, expect_100_continue
        self.message_event = self._NOBODY_WAITS
        self.more_body, self.response_complete, self.disconnected = True, False, False
        self.size = 0
        self._body: bytes | bytearray = b""

    def add(self, chunk: bytes) -> None:
        """Pieces grow into one buffer: kept apart, small ones would cost many times their size."""
        if not self.size:
            self._body = chunk
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += chunk
        self.size += len(chunk)

    def take_body(self) -> bytes | bytearray:
        """The whole body; it is not kept here."""
        body, self._body = self._body, b""
        return body


class Connection(HttpToolsProtocol):
    """See the module. A request may take ``receive_seconds`` from its first byte to its last, without the time in which
    nothing is read here.

    ``expire`` is to be called about once a second.
    """

    def __init__(
        self,
        *,
        inference: Answering | None,
        refusals: Refusals,
        budget: ByteBudget,
        idle_seconds: float,
        receive_seconds: float,
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self._inference, self._refusals = inference, refusals
        self._idle_seconds, self._receive_seconds = idle_seconds, receive_seconds
        self._budget, self._held = budget, 0  # bytes of the bodies that wait here or are being answered
        self._starved_since: float | None = None  # for room in the budget
        self._exchange: Exchange | None = None  # the inference request that is first in line
        self._pending: Any = None
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
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self.send_400_response("the request is no HTTP/1.1")
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._fail(self._refusals.head_too_large(MAX_HEAD_BYTES))

    def _feed(self, data: bytes) -> None:
        """Parse what has arrived. Where the parser stops behind the head of a request that asks for an upgrade, it goes
        on with that request as if it had not asked: each turn takes one such request."""
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as stopped:
                if self.transport.is_closing() or self._last is not None:
                    return
                head = _plain_head(self.parser, self.url, self.headers)
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + data[stopped.args[0] :]
            else:
                return

    @property
    def _upgrading(self) -> bool:
        """Whether the parser is about to stop behind this head."""
        return bool(self.parser.should_upgrade())

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._waits_since = self.loop.time()

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and _size(self.headers) + len(self.url) > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # ends parsing; send_400_response says why
        self._head_bytes = 0
        if self.parser.get_method() == b"CONNECT":
            self._fail(self._refusals.no_tunnel())
            return
        if self._upgrading:
            return
        if not _is_plain(self.headers):
            self._fail(self._refusals.unknown_transfer_coding())
            return
        if self._inference is not None and is_inference(self.parser.get_method(), self.url):
            self._line_up()
            self.headers = []  # what follows a chunked body is no header
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # the ASGI scope
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        self.headers = []

    def _line_up(self) -> None:
        """The head of an inference request is complete."""
        previous = self.cycle
        self.cycle = exchange = Exchange(
            path=self.url.decode("latin-1"),
            headers=self.headers,
            limit=self._inference.max_body_bytes if self._inference is not None else 0,
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
        if self._last is not None:
            return
        if not isinstance(exchange, Exchange):
            super().on_body(body)
        elif not exchange.response_complete:
            self._keep(exchange, body)

    def _keep(self, exchange: Exchange, body: bytes) -> None:
        """A piece of a body, as far as the budget of all connections has room."""
        if exchange.size + len(body) > exchange.limit:
            self._fail(self._refusals.body_too_large(exchange.limit))
        elif not self._budget.fits(len(body)):
            self._fail(self._refusals.no_memory())
        else:
            exchange.add(body)
            self._budget.take(len(body))
            self._held += len(body)
            if self._budget.full and self._starved_since is None:
                self._starved_since = self.loop.time()
                self.flow.pause_reading()
                self._budget.wait(self, self._fed)

    def _fed(self) -> None:
        """There is room again."""
        self._starved_since = None
        if not self.pipeline and not self.flow.write_paused and not self.transport.is_closing():
            self.flow.resume_reading()

    def _release(self, size: int) -> None:
        self._held -= size
        self._stop_starving()
        self._budget.give(size)

    def _stop_starving(self) -> None:
        """Nothing waits for room any more: the body is complete, or gone."""
        if self._starved_since is not None:
            self._starved_since = None
            self._budget.give_up(self)

    def on_message_complete(self) -> None:
        if self._upgrading or self._last is not None:
            return
        self._waits_since = None
        self._stop_starving()
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
        if _announced(exchange.headers) > exchange.limit:
            self._reply(self._refusals.body_too_large(exchange.limit))
        elif not exchange.more_body:
            self.loop.call_soon(self._answer, exchange)  # not here: each pipelined request would deepen the stack
        elif exchange.waiting_for_100_continue:
            self.transport.write(CONTINUE)

    def send_400_response(self, msg: str) -> None:
        """What has just arrived cannot be parsed."""
        too_large = self._head_bytes > MAX_HEAD_BYTES
        self._fail(self._refusals.head_too_large(MAX_HEAD_BYTES) if too_large else self._refusals.unreadable(msg))

    # --- answering --------------------------------------------------------------------------------

    def _answer(self, exchange: Exchange) -> None:
        if self._inference is not None and not self.transport.is_closing():
            self._pending = self._inference.answer(exchange.path, exchange.headers, exchange.take_body(), self._reply)

    def _reply(self, response: Response) -> None:
        """Answer the exchange."""
        exchange, self._exchange, self._pending = self._exchange, None, None
        if exchange is None or self.transport.is_closing():
            return
        if exchange.size:
            self._release(exchange.size)
        exchange.response_complete = True
        self._send(response, keep_alive=exchange.keep_alive and not response.close)
        self.on_response_complete()

    def _fail(self, response: Response) -> None:
        """Nothing more can be read here: answer the complete requests in flight, then send this and close."""
        if self._last is not None:
            return
        newest = self.cycle
        incomplete = newest is not None and newest.more_body and not newest.response_complete
        in_flight = bool(self.pipeline) or not (newest is None or newest.response_complete or incomplete)
        if self.pipeline and incomplete:
            self.pipeline.popleft()
        self._last = response
        if isinstance(newest, Exchange) and incomplete and newest.size:
            newest.take_body()
            self._release(newest.size)
            newest.size = 0
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
        if self._starved_since is not None and stood_still:
            self._starved_since = now
        if self._starved_since is not None and now - self._starved_since > STARVED_SECONDS:
            self._fail(self._refusals.no_memory())
            return
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
            self._fail(self._refusals.too_slow(self._receive_seconds))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        held, self._held = self._held, 0
        give = partial(self._budget.give, held)  # called once nothing of the bodies is in memory any more
        if self._pending is not None and self._inference is not None:
            self._inference.cancel(self._pending, gone=give)
            self._pending = None
        elif held:
            give()
        self._stop_starving()


def _plain_head(parser: HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """The head of the request that asked for an upgrade, without that."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    for name, value in headers:
        if name == b"connection":
            value = b",".join(t for t in value.split(b",") if t.strip().lower() != b"upgrade")  # noqa: PLW2901
        if name not in _OF_UPGRADES and not (name == b"connection" and not value):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _announced(headers: Headers) -> int:
    """Content-Length; the parser has checked that it is a number."""
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


def _is_plain(headers: Headers) -> bool:
    """Whether a body comes as it is, or in chunks and nothing else."""
    return all(name != b"transfer-encoding" or value.strip().lower() == b"chunked" for name, value in headers)


def _size(headers: Headers) -> int:
    return sum(len(name) + len(value) for name, value in headers)
