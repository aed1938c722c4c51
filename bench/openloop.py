"""A lean open-loop HTTP client: Poisson arrivals drawn beforehand, latency from the *intended* send time.

One thread, one poll, prepared bytes: about 60 µs of a core per request, so the client can sit on a core of its own and
a server of 2 ms per request is the bottleneck. No request waits for another one's answer (coordinated omission): where
all connections are busy, another one is opened. ``bench.load`` is the asyncio twin that drifts its inputs while the
demo runs.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.load import encode

SPIN_SECONDS = 0.0015  # epoll wakes by milliseconds; the rest of a wait is spun
DRAIN_SECONDS = 10.0
MAX_CONNECTIONS = 4096
RECEIVE_BYTES = 1 << 18
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)

NO_REPLY = 0  # status of a request that was never answered


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it is, the whole HTTP request of every input, and how a reply's body is read."""

    name: str
    port: int
    requests: Sequence[bytes]
    label: Callable[[bytes], int]
    host: str = "127.0.0.1"
    #: Of each request, where not all go to ``port``.
    ports: Sequence[int] = ()

    def port_of(self, row: int) -> int:
        """Where a request goes."""
        return self.ports[row] if self.ports else self.port


@dataclass(frozen=True, slots=True)
class Trial:
    """What came back, one entry per request in the order of sending: when it was due (seconds from the first one's),
    seconds from then on (infinite without a reply), HTTP status (0 without a reply), the input's row and the label
    answered (-1 unless status 200)."""

    rate: float
    due: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    status: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.status == 200)

    def percentile_ms(self, q: float) -> float:
        """Over *all* requests: a refused or lost one counts as infinitely late."""
        return float(np.percentile(np.where(self.ok, self.seconds, np.inf), q, method="higher")) * 1e3

    def goodput(self, slo_seconds: float) -> float:
        """Requests a second answered within the objective, of those offered at ``rate``."""
        return self.rate * float((self.ok & (self.seconds <= slo_seconds)).mean())


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    port: int
    request: int = -1  # index of the request in flight; -1 when idle
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)
    needed: int = 0  # bytes of the whole response, once its header is there
    answers: int = 0


class OpenLoopClient:
    """Keeps its connections between trials."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: dict[int, list[_Connection]] = {}  # by port
        self._rows = np.empty(0, np.int64)

    def __enter__(self) -> OpenLoopClient:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._poll.close()

    def one_by_one(self, n: int, *, pause_seconds: float = 0.002, seed: int = 0) -> Trial:
        """``n`` requests, each sent a pause after the answer to the one before: the idle server."""
        rows = np.random.default_rng(seed).integers(len(self.target.requests), size=n)
        parts = []
        for row in rows:
            if pause_seconds:
                time.sleep(pause_seconds)
            parts.append(self._send(np.zeros(1), rows=np.array([row]), rate=0.0))
        columns = ("due", "seconds", "status", "row", "label")
        return Trial(0.0, *(np.concatenate([getattr(p, c) for p in parts]) for c in columns))

    def run(
        self, *, rate: float, seconds: float, seed: int = 0, weights: npt.NDArray[np.float64] | None = None
    ) -> Trial:
        """Poisson arrivals of ``rate`` a second for ``seconds``; returns when all are answered or 10 s later.
        ``weights``, which add up to 1, say how often each request is drawn; without them all are as often."""
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1 / rate, size=max(1, round(rate * seconds)))
        rows = rng.choice(len(self.target.requests), size=len(gaps), p=weights)
        return self._send(np.cumsum(gaps), rows=rows, rate=rate)

    def _send(self, due: npt.NDArray[np.float64], *, rows: npt.NDArray[np.int64], rate: float) -> Trial:
        n = len(due)
        self._rows = rows
        trial = Trial(rate, due - due[0], np.full(n, np.inf), np.zeros(n, np.int64), rows, np.full(n, -1, np.int64))
        began = time.perf_counter()
        times = (due + began).tolist()
        next_one, open_requests, deadline = 0, 0, times[-1] + DRAIN_SECONDS
        while next_one < n or open_requests:
            now = time.perf_counter()
            while next_one < n and times[next_one] <= now:
                self._start(next_one)
                next_one, open_requests = next_one + 1, open_requests + 1
            if now > deadline:
                self._abandon()
                break
            wait = (times[next_one] if next_one < n else deadline) - now
            for number, events in self._poll.poll(max(0.0, wait - SPIN_SECONDS)):
                connection = self._connections[number]
                if events & select.EPOLLOUT:
                    self._flush(connection)
                if events & ~select.EPOLLOUT:
                    open_requests -= self._receive(connection, trial, times)
        return trial

    def _start(self, index: int) -> None:
        row = int(self._rows[index])
        port = self.target.port_of(row)
        idle = self._idle.setdefault(port, [])
        connection = idle.pop() if idle else self._open(port)
        connection.request, connection.out = index, memoryview(self.target.requests[row])
        self._flush(connection)

    def _open(self, port: int) -> _Connection:
        if len(self._connections) >= MAX_CONNECTIONS:
            raise RuntimeError(
                f"{self.target.name}: {MAX_CONNECTIONS} requests are open; the rate is far beyond capacity"
            )
        connection = _Connection(socket.create_connection((self.target.host, port), timeout=10), port)
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.socket.setblocking(False)
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket, select.EPOLLIN)
        return connection

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.out:
                connection.out = connection.out[connection.socket.send(connection.out) :]
        except BlockingIOError:
            self._poll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            connection.out = memoryview(b"")  # the server closed; receiving tells the rest
        else:
            self._poll.modify(connection.socket, select.EPOLLIN)

    def _receive(self, connection: _Connection, trial: Trial, times: list[float]) -> int:
        """Read what is there; 1 when it ended the request in flight."""
        try:
            chunk = connection.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            chunk = b""
        if not chunk:
            return self._lost(connection)
        connection.received += chunk
        if not connection.needed:
            connection.needed = _response_length(connection.received)
        if not connection.needed or len(connection.received) < connection.needed:
            return 0
        index, response = connection.request, bytes(connection.received[: connection.needed])
        trial.seconds[index] = time.perf_counter() - times[index]
        trial.status[index] = int(response[9:12])
        if trial.status[index] == 200:
            trial.label[index] = self.target.label(_body(response))
        del connection.received[: connection.needed]
        connection.request, connection.needed, connection.answers = -1, 0, connection.answers + 1
        self._idle[connection.port].append(connection)
        return 1

    def _lost(self, connection: _Connection) -> int:
        """The server closed a connection; 1 if that lost a request. A kept one may close while idle: then it is sent
        anew."""
        self._poll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        idle = self._idle.get(connection.port, [])
        if connection in idle:
            idle.remove(connection)
        if connection.request < 0:
            return 0
        if connection.answers == 0 or connection.received:
            return 1
        self._start(connection.request)
        return 0

    def _abandon(self) -> None:
        for connection in [c for c in self._connections.values() if c.request >= 0]:
            connection.answers = 0
            self._lost(connection)


def _response_length(received: bytearray) -> int:
    """Bytes of the response, or 0 while that cannot be told yet."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return 0
    header = bytes(received[: end + 2])
    length = LENGTH.search(header)
    if length is not None:
        return end + 4 + int(length[1])
    if CHUNKED.search(header):
        last = received.find(b"0\r\n\r\n", end + 4)
        return 0 if last < 0 else last + 5
    return end + 4


def _body(response: bytes) -> bytes:
    header, _, body = response.partition(b"\r\n\r\n")
    if not CHUNKED.search(header + b"\r\n"):
        return body
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def infer(x: npt.NDArray[Any], *, model: str, input_name: str) -> bytes:
    """The bytes of an Open Inference Protocol request for rows ``x`` (n, ...), as a binary tensor."""
    body, header = encode(x, input_name)
    return post(f"/v2/models/{model}/infer", body, headers={"Inference-Header-Content-Length": str(header)})


def post(path: str, body: bytes, *, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a keep-alive POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
