"""The load client against real sockets: what it says about latency, refusals and connections that close."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from bench.openloop import OpenLoopClient, Target, post

pytestmark = pytest.mark.slow

ROWS = 5


@contextmanager
def server(answer: Callable[[socketserver.StreamRequestHandler, int], bool]) -> Iterator[Target]:
    """``answer(connection, row)`` replies; False closes the connection after it."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                length = 0
                while (header := self.rfile.readline()) not in (b"\r\n", b""):
                    if header.lower().startswith(b"content-length"):
                        length = int(header.split(b":")[1])
                row = int(self.rfile.read(length) or line.split(b"/")[1].split()[0])
                if not answer(self, row):
                    return

    class Threads(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address, request_queue_size = True, True, 100

    with Threads(("127.0.0.1", 0), Handler) as threads:
        threading.Thread(target=threads.serve_forever, daemon=True).start()
        requests = [post("/", str(row).encode()) for row in range(ROWS)]
        yield Target("test", threads.server_address[1], requests, int)
        threads.shutdown()


def reply(connection: socketserver.StreamRequestHandler, body: bytes, *, status: str = "200 OK") -> None:
    connection.wfile.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body))


def in_chunks(connection: socketserver.StreamRequestHandler, body: bytes) -> None:
    connection.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n%s\r\n0\r\n\r\n" % body)


@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "in-chunks"])
def test_every_request_gets_its_own_answer(chunked: bool) -> None:
    def answer(connection: socketserver.StreamRequestHandler, row: int) -> bool:
        (in_chunks if chunked else reply)(connection, str(row).encode())
        return True

    with server(answer) as target, OpenLoopClient(target) as client:
        for trial in (client.run(rate=500, seconds=0.4), client.one_by_one(20)):
            assert trial.ok.all()
            np.testing.assert_array_equal(trial.label, trial.row)


def test_latency_counts_from_the_intended_time_when_the_server_stalls() -> None:
    lock, free_at = threading.Lock(), [0.0]

    def answer(connection: socketserver.StreamRequestHandler, row: int) -> bool:
        with lock:  # in order of arrival, 20 ms each: at 100 a second half of the requests find a growing queue
            done_at = free_at[0] = max(free_at[0], time.monotonic()) + 0.02
        time.sleep(max(0.0, done_at - time.monotonic()))
        reply(connection, str(row).encode())
        return True

    with server(answer) as target, OpenLoopClient(target) as client:
        trial = client.run(rate=100, seconds=0.5)
    assert trial.ok.all()
    assert np.median(trial.seconds[-10:]) > 5 * 0.02


def test_a_refusal_counts_as_late_and_a_closed_connection_is_opened_again() -> None:
    def answer(connection: socketserver.StreamRequestHandler, row: int) -> bool:
        reply(connection, str(row).encode(), status="503 Busy" if row == 0 else "200 OK")
        return row != 1

    with server(answer) as target, OpenLoopClient(target) as client:
        trial = client.one_by_one(60)
    assert set(trial.status[trial.row == 0]) == {503}
    assert trial.ok[trial.row != 0].all()
    assert trial.percentile_ms(100) == np.inf
    assert trial.goodput(10.0) == 0.0  # of a rate of zero


def test_requests_go_to_their_own_servers_as_often_as_they_are_drawn() -> None:
    def as_itself(connection: socketserver.StreamRequestHandler, row: int) -> bool:
        reply(connection, str(row).encode())
        return True

    def one_more(connection: socketserver.StreamRequestHandler, row: int) -> bool:
        reply(connection, str(row + 1).encode())
        return True

    with server(as_itself) as first, server(one_more) as second:
        ports = [first.port, second.port, first.port, second.port, first.port]
        with OpenLoopClient(replace(first, ports=ports)) as client:
            trial = client.run(rate=500, seconds=0.4, weights=np.array([0.5, 0.5, 0.0, 0.0, 0.0]))
    assert trial.ok.all()
    assert set(trial.row.tolist()) == {0, 1}
    assert (trial.label == trial.row + (trial.row == 1)).all()
