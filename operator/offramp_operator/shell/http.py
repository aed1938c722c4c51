"""Just enough of HTTP/1.1 to ask workers: one request at a time on a connection, answers of a bearable length that they tell first.

A general client spends several times as long on a request (redirects, cookies, proxies, encodings, chunks), and nothing of that may come from a
worker's admin port anyway: see :mod:`offramp_operator.shell.bounded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import quote, urlencode, urlsplit

from offramp_core.errors import UnavailableError
from offramp_operator.shell.bounded import refuse_unbounded

MAX_HEAD_BYTES = 16 * 1024
MAX_KEPT = 256  # connections without a request: more workers than that are connected to anew each time
KEEP_ALIVE_SECONDS = (
    4.0  # workers close idle connections after 5 s; one that closes while a request is on its way fails it
)

Address = tuple[str, int]


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: bytes


class HungUpError(UnavailableError):
    """The other side closed the connection before its answer was complete."""

    def __init__(self, message: str, *, unheard: bool = False) -> None:
        super().__init__(message)
        self.unheard = unheard  # not a byte of an answer has come


class WorkerClient:
    """Asks workers. Deadlines are the caller's: a request that is cancelled closes its connection. :meth:`close` it on the loop that used it."""

    def __init__(self) -> None:
        self._kept: dict[Address, list[_Connection]] = {}
        self._n_kept = 0

    def close(self) -> None:
        """Close all connections that carry no request."""
        for connection in [c for kept in self._kept.values() for c in kept]:
            connection.close()

    async def get(self, url: str, *, query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        return await self._ask("GET", url, query, headers, b"")

    async def post(self, url: str, *, body: bytes, headers: Mapping[str, str]) -> Answer:
        return await self._ask("POST", url, {}, {**headers, "Content-Length": str(len(body))}, body)

    async def _ask(
        self, method: str, url: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """Raises :class:`AnswerRefusedError`, :class:`HungUpError`, or OSError where nobody listens."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a worker")
        address = parts.hostname, parts.port or 80
        target = quote(parts.path or "/", safe="/%") + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join([*lines, "", ""]).encode("ascii") + body
        while (kept := self._take(address)) is not None:
            try:
                return await self._exchange(kept, url, request)
            except HungUpError as error:  # it closed an idle connection just now
                if not error.unheard:
                    raise
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self, address), *address)
        return await self._exchange(connection, url, request)

    @staticmethod
    async def _exchange(connection: _Connection, url: str, request: bytes) -> Answer:
        try:
            return await connection.ask(url, request)
        except BaseException:
            connection.close()
            raise

    # --- connections without a request -------------------------------------------------------------

    def _take(self, address: Address) -> _Connection | None:
        kept = self._kept.get(address)
        if not kept:
            return None
        connection = kept[-1]
        self.drop(address, connection)
        return connection

    def keep(self, address: Address, connection: _Connection) -> bool:
        """Keep a connection for the next request; whether there is room."""
        if self._n_kept >= MAX_KEPT:
            return False
        self._kept.setdefault(address, []).append(connection)
        self._n_kept += 1
        return True

    def drop(self, address: Address, connection: _Connection) -> None:
        """Keep a connection no longer."""
        kept = self._kept.get(address, [])
        if connection in kept:
            kept.remove(connection)
            self._n_kept -= 1
            if not kept:
                del self._kept[address]


class _Connection(asyncio.Protocol):
    """One connection. Whatever comes that was not asked for, or cannot be read, ends it."""

    def __init__(self, client: WorkerClient, address: Address) -> None:
        self._client, self._address = client, address
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._url = ""
        self._received = bytearray()
        self._status, self._body_from, self._length = 0, 0, 0
        self._stays = False
        self._expiry: asyncio.TimerHandle | None = None

    async def ask(self, url: str, request: bytes) -> Answer:
        """One request and its answer."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._transport is None or self._transport.is_closing():
            raise HungUpError(f"{url} hung up", unheard=True)
        self._url, self._body_from = url, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Close at once, whatever is under way."""
        self._client.drop(self._address, self)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.drop(self._address, self)
        said = f": {exc}" if exc is not None else ""
        self._fail(HungUpError(f"{self._url} hung up before its answer was complete{said}", unheard=not self._received))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()
            return
        self._received += data
        try:
            if not self._body_from and not self._read_head():
                return
        except (UnavailableError, ValueError) as error:
            self._fail(error)
            self.close()
            return
        if len(self._received) >= self._body_from + self._length:
            self._complete(self._answer)

    def _read_head(self) -> bool:
        """Whether the head has come. Raises what the caller is told where its like is not read."""
        end = self._received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._received) >= MAX_HEAD_BYTES:
                raise ValueError(f"{self._url} answers with an endless head")
            return False
        first, *lines = bytes(self._received[:end]).decode("latin-1").split("\r\n")
        version, status, *_ = [*first.split(" ", 2), ""]
        if not version.startswith("HTTP/1.") or len(status) != 3 or not status.isdecimal():
            raise ValueError(f"{self._url} does not speak HTTP: {first[:100]!r}")
        headers = _headers(lines)
        refuse_unbounded(self._url, headers)
        self._status, self._length, self._body_from = int(status), int(headers["content-length"]), end + 4
        self._stays = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return True

    def _complete(self, answer: asyncio.Future[Answer]) -> None:
        more = len(self._received) > self._body_from + self._length
        body = bytes(self._received[self._body_from : self._body_from + self._length])
        answer.set_result(Answer(self._status, body))
        self._received = bytearray()
        if more or not self._stays or not self._client.keep(self._address, self):
            self.close()
        else:
            self._expiry = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self.close)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _headers(lines: list[str]) -> dict[str, str]:
    """Headers by their names in lower case. Of a name that comes twice both values stay, which makes no number of two lengths."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise ValueError(f"a header cannot be read: {line[:100]!r}")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    return headers
