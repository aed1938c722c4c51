"""What one connection may do to a worker: pipelining, half requests, and clients that do not read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import bundles
import fuzz
import numpy as np
import pytest
from processes import WorkerProcess, eventually

from offramp_worker.engine.execution.sessions import Sessions

pytestmark = pytest.mark.slow  # real workers


@pytest.fixture(scope="module")
def process(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        yield process


@pytest.fixture(scope="module")
def pool(sessions: Sessions) -> fuzz.Pool:
    return fuzz.Pool(bundles.inputs(64, seed=11), lambda x: (sessions.exact(x), "final"))


@pytest.fixture
def connection(process: WorkerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", process.port("public")), timeout=60) as connection:
        yield connection


def test_a_thousand_pipelined_requests_are_answered_in_order(connection: socket.socket, pool: fuzz.Pool) -> None:
    rows = [i % len(pool.x) for i in range(1000)]
    connection.sendall(b"".join(fuzz.valid(pool, row, name=str(i)) for i, row in enumerate(rows[:50])))
    connection.sendall(fuzz.http(b"{}") * 900)  # each refused at once: must not deepen any stack
    connection.sendall(b"".join(fuzz.valid(pool, row, name=str(i + 950)) for i, row in enumerate(rows[950:])))
    replies = [fuzz.read_response(connection) for _ in range(1000)]
    assert [status for status, _ in replies] == [200] * 50 + [400] * 900 + [200] * 50
    for i in (*range(50), *range(950, 1000)):
        reply = json.loads(replies[i][1])
        assert reply["id"] == str(i)
        np.testing.assert_allclose(reply["outputs"][0]["data"], pool.logits[rows[i]], rtol=1e-4, atol=1e-4)


def test_requests_of_both_kinds_may_share_a_pipeline(connection: socket.socket, pool: fuzz.Pool) -> None:
    get = b"GET /v2/health/ready HTTP/1.1\r\nHost: t\r\n\r\n"
    connection.sendall(get + fuzz.valid(pool, 0, name="a") + get + get + fuzz.valid(pool, 1, name="b"))
    replies = [fuzz.read_response(connection) for _ in range(5)]
    assert [status for status, _ in replies] == [200] * 5
    assert [json.loads(replies[i][1])["id"] for i in (1, 4)] == ["a", "b"]


def test_rubbish_behind_a_request_is_refused_after_its_answer(connection: socket.socket, pool: fuzz.Pool) -> None:
    chunks = b"POST /v2/models/tiny/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
    connection.sendall(fuzz.valid(pool, 3, name="first") + chunks)
    status, body = fuzz.read_response(connection)
    assert (status, json.loads(body)["id"]) == (200, "first")
    assert fuzz.read_response(connection)[0] == 400
    assert connection.recv(1) == b""


@pytest.fixture(scope="module")
def impatient(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """The others may take longer: their client, too, runs on a machine that may be busy."""
    with WorkerProcess(bundle_dir, control_plane=False, env={"OFFRAMP_RECEIVE_SECONDS": "3"}) as process:
        yield process


@pytest.mark.parametrize("share", [0.02, 0.5], ids=["in-its-head", "in-its-body"])
def test_a_request_that_does_not_arrive_gets_408(impatient: WorkerProcess, pool: fuzz.Pool, share: float) -> None:
    whole = fuzz.valid(pool, 0, name="slow")
    with socket.create_connection(("127.0.0.1", impatient.port("public")), timeout=60) as connection:
        connection.sendall(whole[: int(share * len(whole))])
        status, body = fuzz.read_response(connection)
        assert (status, json.loads(body)["error"]) == (408, "the request did not arrive within 3 s")
        assert connection.recv(1) == b""


def test_a_request_with_expect_100_is_asked_for_its_body(connection: socket.socket, pool: fuzz.Pool) -> None:
    head, _, body = fuzz.valid(pool, 0, name="asked").partition(b"\r\n\r\n")
    connection.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert fuzz.read_response(connection)[0] == 100
    connection.sendall(body)
    assert fuzz.read_response(connection)[0] == 200


@pytest.mark.parametrize(
    ("head", "closes"),
    [(b"HTTP/1.1\r\nConnection: close", True), (b"HTTP/1.0", True), (b"HTTP/1.1", False)],
    ids=["close", "http-1.0", "keep-alive"],
)
def test_the_connection_closes_when_the_client_asks_for_it(
    connection: socket.socket, pool: fuzz.Pool, head: bytes, closes: bool
) -> None:
    connection.sendall(fuzz.valid(pool, 0, name="x").replace(b"HTTP/1.1", head, 1))
    assert fuzz.read_response(connection)[0] == 200
    if closes:
        assert connection.recv(1) == b""
    else:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_client_that_does_not_read_its_replies_gets_no_memory(process: WorkerProcess, pool: fuzz.Pool) -> None:
    """It sends until the worker stops reading; what is parsed and answered by then is bounded by socket buffers."""
    before = _resident_kib(process)
    request = fuzz.http(json.dumps({"id": "x" * 3000}).encode()) * 50  # the replies are short, the requests are not
    with socket.create_connection(("127.0.0.1", process.port("public"))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 400_000_000:
                sent += connection.send(request)
        assert process.is_ready()
        assert _resident_kib(process) - before < 60_000


def test_a_client_that_goes_away_leaves_nothing_behind(process: WorkerProcess, pool: fuzz.Pool) -> None:
    x = bundles.inputs(200)
    body, length = fuzz.binary(fuzz.tensor(x), x.tobytes())
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", process.port("public"))) as connection:
            connection.sendall(fuzz.http(body, length))
            time.sleep(0.001)

    def settled() -> bool:
        return "earlyexit_inflight 0.0" in process.public.get("/metrics").text

    eventually(settled, what="an empty queue")
    assert not process.events("reply-failed")


def _resident_kib(process: WorkerProcess) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
