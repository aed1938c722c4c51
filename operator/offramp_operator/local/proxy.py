"""The front's process: one TCP port before all workers. ``python -m offramp_operator.local.proxy LISTENING_FD``.

It runs apart from the control loop, so that a search for thresholds never delays a request. It does not read
HTTP; it only tells from who spoke last whether a client waits for something. Between two requests a client's
connection can therefore be given to another worker without the client noticing, which is how workers are
replaced and how one that died is survived.

Orders come as JSON lines on stdin: ``{"backends": {name: [host, port]}}``, ``{"drain": name}``, ``{"stop": seconds}``.
Answers go to stdout: ``{"drained": name}``. The end of stdin ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

CHUNK_BYTES = 1 << 18
QUIET_SECONDS = 1.0  # a reply that has begun and then pauses this long has ended
MAX_REPLAY_BYTES = 8 << 20
NO_BACKEND_PATIENCE_SECONDS = 5.0
CONNECT_SECONDS = 2.0
_TICK_SECONDS = 0.1
_NOBODY = b'{"error":"no worker is ready to serve; look at the log of `offramp up`"}'
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_NOBODY)).encode() + b"\r\n\r\n" + _NOBODY
)


@dataclass(slots=True, eq=False)
class Link:
    """A connection to a worker."""

    backend: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True, eq=False)
class Session:
    """A client's connection. ``unanswered`` is what it sent since the worker last spoke; ``replayable`` while all of
    that is kept."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    link: Link | None = None
    unanswered: bytearray = field(default_factory=bytearray)
    replayable: bool = True
    replays: int = 0
    spoke_at: float = 0.0
    replying: bool = False
    linking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def between_requests(self) -> bool:
        """Whether the client waits for nothing."""
        quiet = time.monotonic() - self.spoke_at >= QUIET_SECONDS
        return self.replayable and not self.unanswered and not self.replying and quiet


class Proxy:
    """Balances connections over backends: fewest connections first, in turn where equal."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], None]) -> None:
        self._answer = answer
        self._backends: dict[str, Address] = {}
        self._sessions: set[Session] = set()
        self._turn = itertools.count()
        self._changed = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()

    def set_backends(self, backends: Mapping[str, Address]) -> None:
        """From now on, new work goes to these."""
        self._backends = dict(backends)
        self._changed.set()

    async def drain(self, name: str) -> None:
        """Move everything off a backend as it comes to rest, and answer when that is done."""
        self._backends.pop(name, None)
        while any(session.link is not None and session.link.backend == name for session in self._sessions):
            for session in self._sessions:
                if session.link is not None and session.link.backend == name and session.between_requests:
                    self._release(session)
            await asyncio.sleep(_TICK_SECONDS)
        self._answer({"drained": name})

    async def drain_clients(self, grace_seconds: float) -> None:
        """Close every client's connection when it waits for nothing, and all of them after ``grace_seconds``."""
        deadline = time.monotonic() + grace_seconds
        while self._sessions:
            late = time.monotonic() > deadline
            for session in list(self._sessions):
                if late or session.between_requests:
                    session.writer.close()
            if late:
                return
            await asyncio.sleep(_TICK_SECONDS)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it or its worker is done."""
        session = Session(reader, writer, spoke_at=time.monotonic())
        _no_delay(writer)
        self._sessions.add(session)
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._forward(session, data)
            await self._finish(session)
        except OSError:
            pass  # the client or its last worker is gone; both ends are closed below
        finally:
            self._sessions.discard(session)
            self._release(session)
            await _close(writer)

    # --- towards the worker ------------------------------------------------------------------------

    async def _forward(self, session: Session, data: bytes) -> None:
        async with session.linking:
            self._remember(session, data)
            if session.link is None:
                await self._connect(session)
                data = bytes(session.unanswered) or data  # with what a lost worker left unanswered
            assert session.link is not None
            with contextlib.suppress(ConnectionError):  # the pump sees the same end and decides what it means
                session.link.writer.write(data)
                await session.link.writer.drain()

    def _remember(self, session: Session, data: bytes) -> None:
        if not session.unanswered and session.replayable:
            session.replays = 0
        if session.replayable and len(session.unanswered) + len(data) <= MAX_REPLAY_BYTES:
            session.unanswered += data
        else:
            session.replayable = False
            session.unanswered.clear()

    async def _connect(self, session: Session) -> None:
        """Give the session a worker; the client gets 503 when there is none for a while."""
        deadline = time.monotonic() + NO_BACKEND_PATIENCE_SECONDS
        while True:
            for name, address in self._by_load():
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        reader, writer = await asyncio.open_connection(*address)
                except OSError:
                    continue
                _no_delay(writer)
                session.link = Link(name, reader, writer)
                pump = asyncio.create_task(self._pump(session, session.link))
                self._pumps.add(pump)
                pump.add_done_callback(self._pumps.discard)
                return
            if time.monotonic() > deadline:
                session.writer.write(UNAVAILABLE)
                raise ConnectionError("no worker")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK_SECONDS)

    def _by_load(self) -> list[tuple[str, Address]]:
        used = {name: 0 for name in self._backends}
        for session in self._sessions:
            if session.link is not None and session.link.backend in used:
                used[session.link.backend] += 1
        names = list(self._backends)
        turn = next(self._turn) % len(names) if names else 0
        order = sorted(names[turn:] + names[:turn], key=lambda name: used[name])
        return [(name, self._backends[name]) for name in order]

    async def _finish(self, session: Session) -> None:
        """The client sends no more; let the worker finish its answer."""
        if session.link is None or session.between_requests:
            return
        with contextlib.suppress(OSError, RuntimeError):
            session.link.writer.write_eof()
        while not session.writer.is_closing() and (session.unanswered or session.link is not None):
            await asyncio.sleep(_TICK_SECONDS)

    # --- towards the client ------------------------------------------------------------------------

    async def _pump(self, session: Session, link: Link) -> None:
        try:
            while data := await link.reader.read(CHUNK_BYTES):
                session.unanswered.clear()
                session.replayable = True
                session.replying = True
                session.writer.write(data)
                await session.writer.drain()
                session.replying = False
                session.spoke_at = time.monotonic()
        except OSError:
            pass
        async with session.linking:
            if session.link is not link:
                return
            unsure = session.replayable and not session.unanswered and not session.between_requests
            if unsure:
                self._release(session)
            else:
                await self._lost(session)
        if unsure:
            await self._close_unless_spoken_to(session)

    async def _close_unless_spoken_to(self, session: Session) -> None:
        """The worker closed after it spoke: its answer is whole, or it broke off and the client would wait for ever.

        A client that sends its next request has the answer; a worker that is replaced under steady traffic ends like
        that, and to close the client's connection just then would fail the request that is on its way.
        """
        await asyncio.sleep(QUIET_SECONDS)
        async with session.linking:
            if session.link is None and not session.unanswered:
                session.writer.close()

    async def _lost(self, session: Session) -> None:
        """The worker closed the connection. The client need not know if it waits for nothing, or if its request can be
        sent again."""
        idle, again = session.between_requests, bool(session.unanswered) and session.replayable and session.replays == 0
        self._release(session)
        if idle:
            return
        try:
            if not again:
                raise ConnectionError("the answer broke off")
            session.replays += 1
            await self._connect(session)
            assert session.link is not None
            session.link.writer.write(bytes(session.unanswered))
            await session.link.writer.drain()
        except OSError:
            session.writer.close()

    def _release(self, session: Session) -> None:
        link, session.link = session.link, None
        if link is not None:
            link.writer.close()


def _no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()


async def obey(listener: socket.socket) -> None:
    """Serve until asked to stop or until nobody gives orders any more."""
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    proxy = Proxy(lambda facts: print(json.dumps(facts), flush=True))
    server = await asyncio.start_server(proxy.accept, sock=listener, limit=CHUNK_BYTES)
    drains = set()
    while line := await orders.readline():
        order = json.loads(line)
        if "backends" in order:
            proxy.set_backends({name: (host, port) for name, (host, port) in order["backends"].items()})
        elif "drain" in order:
            drains.add(asyncio.create_task(proxy.drain(order["drain"])))
        elif "stop" in order:
            server.close()
            await proxy.drain_clients(order["stop"])
            return


def main() -> None:
    """Run on the listening socket whose descriptor is the first argument."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(obey(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
