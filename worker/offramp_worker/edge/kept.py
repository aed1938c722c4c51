"""Kept connections to a core.

What a general client does for a request costs a slow box several times as much as the request itself; the parser is
that of the public port.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

KEEP_ALIVE_SECONDS = 60.0  # shorter than the core keeps them
HEAD_BYTES = 65536  # of a reply


@dataclass(slots=True)
class Answered:
    """A whole reply; names of headers are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class TooLarge(str):
    """Why there is no reply, which says nothing of whether the core is there."""

    __slots__ = ()


#: Gets a reply, or in words why there is none.
Done = Callable[[Answered | str], None]


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, free: Callable[[_Connection], None], lost: Callable[[_Connection], None]) -> None:
        self._free, self._lost = free, lost
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._reply, self._most, self._read = Answered(), 0, 0
        self._done: Done | None = None
        self._messages, self._whole, self._goes_on = 0, False, False  # replies begun; whether it is there; keeps open
        self.freed_at = 0.0
        #: Whether it was lost before anything of a reply had come.
        self.stale = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, *, most: int, done: Done) -> None:
        """``done`` is called once, not before this returns."""
        self._parser, self._reply = HttpResponseParser(self), Answered()
        self._most, self._read, self._done = most, 0, done
        self._messages, self._whole = 0, False
        if self._transport is None or self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self.end, "the connection is closed")
        else:
            self._transport.write(request)

    def end(self, why: str) -> None:
        """Whoever waits for a reply hears that there is none."""
        if self._transport is not None:
            self._transport.abort()
        self._tell(why)

    def _tell(self, reply: Answered | str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(reply)

    # --- of asyncio and the parser ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # uvloop then sends at once, as on the public port

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)
        self.stale = self._done is not None and not self._read
        self._tell(f"the connection was lost{'' if exc is None else f': {exc}'}")

    def eof_received(self) -> None:
        """The other side has closed the connection."""

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        try:
            if self._done is None:
                self.end("")  # nobody has asked for this
            elif self._read > self._most + HEAD_BYTES:
                self.end(TooLarge(f"the core's reply is larger than {self._most} bytes"))
            else:
                self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.end(f"the core's reply is no HTTP/1.1: {error}")
        if self._whole and self._done is not None:
            self._finish()

    def _finish(self) -> None:
        """A reply is all there. Bytes behind it would be taken for that of the next request."""
        if len(self._reply.body) > self._most:
            self.end(TooLarge(f"the core's reply is larger than {self._most} bytes"))
        elif self._messages > 1:
            self.end("the core's reply is no HTTP/1.1: more comes behind its end")
        else:
            if self._goes_on:
                self.freed_at = asyncio.get_running_loop().time()
                self._free(self)
            elif self._transport is not None:
                self._transport.close()
            self._tell(self._reply)

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._reply.body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._whole:
            return
        if status < HTTPStatus.OK:  # word of what comes, and no reply
            self._messages, self._reply = self._messages - 1, Answered()
        else:
            self._reply.status, self._whole, self._goes_on = status, True, self._parser.should_keep_alive()


class KeptConnections:
    """To one address, ``http://HOST:PORT`` or https. It belongs to one event loop."""

    def __init__(self, address: str, *, most: int) -> None:
        """At most so many requests are on their way at once."""
        parts = urlsplit(address)
        secure = parts.scheme == "https"
        self._host, self._name, self._most = parts.netloc, parts.hostname or "", most
        self._port = parts.port or (443 if secure else 80)
        self._secure = ssl.create_default_context() if secure else None
        self._idle, self._open = list[_Connection](), set[_Connection]()
        self._tasks = set[asyncio.Task[None]]()

    @property
    def room(self) -> bool:
        """Whether one more request may be sent now."""
        return len(self._open) - len(self._idle) + len(self._tasks) < self._most

    def head(self, path: str, headers: Mapping[str, str], *, length: int) -> bytes:
        """Of a POST with a body of so many bytes."""
        lines = [f"POST {path} HTTP/1.1", f"host: {self._host}", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def send(self, request: bytes, *, most: int, seconds: float, done: Done) -> None:
        """Send a whole request; ``done`` gets the reply of at most so many bytes or, after so many seconds, why there
        is none; never before this returns."""
        loop = asyncio.get_running_loop()
        connection = self._kept()
        if connection is None:
            self._begin(request, most, seconds, done)
            return
        timer = loop.call_later(seconds, connection.end, f"no answer within {seconds:.1f} s")

        def answered(reply: Answered | str) -> None:
            timer.cancel()
            if connection.stale:
                self._begin(request, most, seconds, done)
            else:
                done(reply)

        connection.send(request, most=most, done=answered)

    def _begin(self, request: bytes, most: int, seconds: float, done: Done) -> None:
        task = asyncio.get_running_loop().create_task(self._sent(request, most, seconds, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sent(self, request: bytes, most: int, seconds: float, done: Done) -> None:
        try:
            async with asyncio.timeout(seconds):
                reply: Answered | str = await self.post(request, most=most)
        except TimeoutError:
            reply = f"no answer within {seconds:.1f} s"
        except OSError as error:
            large = [why for why in error.args if isinstance(why, TooLarge)]
            reply = large[0] if large else str(error) or type(error).__name__
        done(reply)

    async def post(self, request: bytes, *, most: int) -> Answered:
        """The reply to a whole request, of at most so many bytes.

        Raises
        ------
        OSError
            There is none.
        """
        kept = self._kept()
        connection = await self._connected() if kept is None else kept
        reply = await self._exchanged(connection, request, most)
        if connection is kept and kept.stale:  # the other side has just closed it
            reply = await self._exchanged(await self._connected(), request, most)
        if isinstance(reply, str):
            raise ConnectionError(reply)
        return reply

    async def _connected(self) -> _Connection:
        make, loop = partial(_Connection, self._idle.append, self._forget), asyncio.get_running_loop()
        _, connection = await loop.create_connection(make, self._name, self._port, ssl=self._secure)
        self._open.add(connection)
        return connection

    async def _exchanged(self, connection: _Connection, request: bytes, most: int) -> Answered | str:
        outcome: asyncio.Future[Answered | str] = asyncio.get_running_loop().create_future()
        connection.send(request, most=most, done=lambda reply: None if outcome.done() else outcome.set_result(reply))
        try:
            return await outcome
        except asyncio.CancelledError:
            connection.end("")
            raise

    def _kept(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.freed_at < KEEP_ALIVE_SECONDS:
                return connection
            connection.end("")
        return None

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Whoever waits hears that there is no reply."""
        for connection in tuple(self._open):
            connection.end("the connection is closed")
