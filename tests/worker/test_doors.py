"""What a client may do to the ports of a worker: ask for another protocol, dispute where a body ends, send much, or
send nothing."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import fuzz
import grpc
import numpy as np
import pytest
import uvicorn
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import TOKEN, WorkerProcess, eventually

from offramp_core.bundle import TensorSpec
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.grpc.health import HEALTH_SERVICE, NOT_SERVING, SERVING
from offramp_worker.grpc.messages import SERVICE
from offramp_worker.http.budget import RESERVE_BYTES, ByteBudget
from offramp_worker.http.connection import Connection, Exchange
from offramp_worker.http.large import parse_large
from offramp_worker.http.packed import UnpackedTooLargeError, unpack
from offramp_worker.http.tensors import BadRequestError, parse_request

ASKS = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n"


@pytest.fixture(scope="module")
def process(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(bundle_dir, control_plane=False, env={"OFFRAMP_GRPC_PORT": "0"}) as process:
        yield process


@pytest.fixture(scope="module")
def pool(sessions: Sessions) -> fuzz.Pool:
    return fuzz.Pool(bundles.inputs(8, seed=11), lambda x: (sessions.exact(x), "final"))


def connect(process: WorkerProcess, port: str = "public") -> socket.socket:
    return socket.create_connection(("127.0.0.1", process.port(port)), timeout=60)


def asking(pool: fuzz.Pool, row: int, *, name: str, asks: tuple[str, ...] = ASKS) -> bytes:
    """A good request that asks for an upgrade."""
    x = pool.x[row : row + 1]
    body, length = fuzz.binary(fuzz.tensor(x), x.tobytes(), id=name, outputs=[{"name": "logits"}])
    return fuzz.http(body, length, *asks)


def check(pool: fuzz.Pool, reply: tuple[int, bytes], row: int, *, name: str) -> None:
    status, body = reply
    told = json.loads(body)
    assert (status, told.get("id")) == (200, name)
    np.testing.assert_allclose(told["outputs"][0]["data"], pool.logits[row], rtol=1e-4, atol=1e-4)


def silent(connection: socket.socket) -> bool:
    """Whether nothing more comes."""
    connection.settimeout(0.3)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return True


@pytest.mark.slow
class TestAnotherProtocol:
    def test_a_request_that_asks_for_an_upgrade_keeps_its_body_and_gets_one_answer(
        self, process: WorkerProcess, pool: fuzz.Pool
    ) -> None:
        with connect(process) as connection:
            connection.sendall(asking(pool, 0, name="a"))
            check(pool, fuzz.read_response(connection), 0, name="a")
            assert silent(connection)
            connection.settimeout(60)
            connection.sendall(fuzz.valid(pool, 1, name="b"))  # the connection goes on
            check(pool, fuzz.read_response(connection), 1, name="b")

    @pytest.mark.parametrize("at", ["head", "behind-head", "body"])
    def test_however_it_arrives(self, process: WorkerProcess, pool: fuzz.Pool, at: str) -> None:
        whole = asking(pool, 2, name="c")
        head = whole.index(b"\r\n\r\n") + 4
        cut = {"head": head - 2, "behind-head": head, "body": head + 700}[at]
        with connect(process) as connection:
            connection.sendall(whole[:cut])
            time.sleep(0.1)
            connection.sendall(whole[cut:])
            check(pool, fuzz.read_response(connection), 2, name="c")
            assert silent(connection)

    def test_pipelined_ones_are_answered_in_order(self, process: WorkerProcess, pool: fuzz.Pool) -> None:
        rows = [i % len(pool.x) for i in range(40)]
        get = b"GET /v2/health/ready HTTP/1.1\r\nHost: t\r\n" + "\r\n".join(ASKS).encode() + b"\r\n\r\n"
        with connect(process) as connection:
            connection.sendall(b"".join(asking(pool, row, name=str(i)) for i, row in enumerate(rows)) + get + GET)
            for i, row in enumerate(rows):
                check(pool, fuzz.read_response(connection), row, name=str(i))
            assert [fuzz.read_response(connection)[0] for _ in range(2)] == [200, 200]

    def test_a_chunked_body_and_expect_100_are_kept_as_well(self, process: WorkerProcess, pool: fuzz.Pool) -> None:
        x = pool.x[:1]
        body, length = fuzz.binary(fuzz.tensor(x), x.tobytes(), id="d", outputs=[{"name": "logits"}])
        head = "\r\n".join(
            [
                f"POST {fuzz.PATH} HTTP/1.1",
                "Host: t",
                "Transfer-Encoding: chunked",
                length,
                *ASKS,
                "Expect: 100-continue",
            ]
        )
        with connect(process) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n")
            assert connection.recv(64) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            check(pool, fuzz.read_response(connection), 0, name="d")

    @pytest.mark.parametrize(
        "asks",
        [
            ("Connection: keep-alive, Upgrade", "Upgrade: websocket"),
            ("Connection: upgrade", "Connection: close", "Upgrade: x"),
        ],
    )
    def test_whatever_is_asked_for(self, process: WorkerProcess, pool: fuzz.Pool, asks: tuple[str, ...]) -> None:
        with connect(process) as connection:
            connection.sendall(asking(pool, 3, name="e", asks=asks))
            check(pool, fuzz.read_response(connection), 3, name="e")
            if "Connection: close" in asks:
                assert connection.recv(1) == b""

    def test_the_admin_port_takes_such_requests_too(self, bundle_dir: Path) -> None:
        with WorkerProcess(bundle_dir) as worker, connect(worker, "admin") as connection:
            asks = "\r\n".join(ASKS).encode()
            connection.sendall(
                b"POST /v1/config HTTP/1.1\r\nHost: t\r\nContent-Length: 44\r\n" + asks + b"\r\n\r\n" + GET
            )
            assert fuzz.read_response(connection)[0] == 401  # and the body was no request
            assert silent(connection)

    def test_a_tunnel_is_refused_and_the_connection_ends(self, process: WorkerProcess) -> None:
        with connect(process) as connection:
            connection.sendall(b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n" + GET)
            assert fuzz.read_response(connection)[0] == 405
            assert connection.recv(1) == b""


@pytest.mark.slow
def test_what_follows_a_chunked_body_is_no_header_and_other_codings_are_501(
    process: WorkerProcess, pool: fuzz.Pool
) -> None:
    x = pool.x[:1]
    body, length = fuzz.binary(fuzz.tensor(x), x.tobytes(), id="t", outputs=[{"name": "logits"}])
    head = f"POST {fuzz.PATH} HTTP/1.1\r\nHost: t\r\n{length}\r\nTransfer-Encoding: ".encode()
    with connect(process) as connection:
        connection.sendall(head + b"chunked\r\n\r\n%x\r\n%b\r\n0\r\nContent-Encoding: br\r\n\r\n" % (len(body), body))
        check(pool, fuzz.read_response(connection), 0, name="t")
        connection.sendall(head + b"gzip, chunked\r\n\r\n0\r\n\r\n" + GET)
        assert fuzz.read_response(connection)[0] == 501
        assert connection.recv(1) == b""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_where_a_proxy_might_see_another_end_of_the_body_one_refusal_ends_the_connection(
    process: WorkerProcess, seed: int
) -> None:
    case = fuzz.disputed_length(np.random.default_rng(seed))
    with connect(process) as connection:
        connection.sendall(case.pieces[0])
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert re.findall(rb"HTTP/1.1 (\d+)", received) in ([b"400"], [b"501"])


class TestBodies:
    def test_tiny_pieces_cost_no_more_than_the_body(self) -> None:
        exchange = Exchange(path="", headers=[], limit=0, keep_alive=True, expect_100_continue=False)
        pieces = [bytes([i % 256]) for i in range(256)] * 1024
        tracemalloc.start()
        try:
            for piece in pieces:
                exchange.add(piece)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2.5 * len(pieces)
        assert exchange.take_body() == b"".join(pieces)

    def test_a_full_budget_waits_and_lets_on_whoever_came_first(self) -> None:
        budget, told = ByteBudget(100), list[str]()
        budget.take(60)
        budget.take(70)
        assert budget.full and budget.fits(RESERVE_BYTES - 30) and not budget.fits(RESERVE_BYTES)
        for who in ("a", "b"):
            budget.wait(who, lambda who=who: (told.append(who), budget.take(50)))
        budget.wait("c", lambda: told.append("c"))
        budget.give_up("c")
        budget.give(60)
        assert told == ["a"] and budget.full
        budget.give(70)
        assert told == ["a", "b"]

    @pytest.mark.slow
    def test_unfinished_bodies_fill_no_more_memory_than_stated_and_good_requests_are_answered_meanwhile(
        self, bundle_dir: Path, pool: fuzz.Pool
    ) -> None:
        """Thirty bodies of 12 MB, in pieces, never ended: 128 MiB are kept, the others are told to come again."""
        with WorkerProcess(bundle_dir, control_plane=False) as worker:
            before = resident(worker)
            held = [connect(worker) for _ in range(30)]
            size = 12_000_000
            refused, most = 0, before
            try:
                for connection in held:
                    connection.settimeout(5)
                    connection.sendall(fuzz.http(b"", length=size))
                piece = b" " * 1_000_000
                for _ in range(11):
                    for connection in held:
                        try:
                            connection.sendall(piece)
                        except OSError:
                            refused += 1
                    most = max(most, resident(worker))
                with connect(worker) as good:
                    good.sendall(fuzz.valid(pool, 0, name="g"))
                    status, _ = fuzz.read_response(good)
                assert status in (
                    200,
                    503,
                )  # what was begun may have filled the budget; it is answered once that has room
            finally:
                for connection in held:
                    connection.close()
            assert refused > 0
            assert most - before < (128 + 16 + 64) * 2**20

            def answers() -> bool:
                with connect(worker) as good:
                    good.sendall(fuzz.valid(pool, 0, name="g"))
                    return fuzz.read_response(good)[0] == 200

            eventually(answers, what="room for bodies")

    @pytest.mark.slow
    def test_clients_that_send_large_bodies_and_leave_take_no_memory_with_them(self, bundle_dir: Path) -> None:
        count = 1024 * int(np.prod(fuzz.ROW_SHAPE))
        start = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1024,3,14,14],"data":['
        body = fuzz.http(start + b"0.1234567890123456789012," * (count - 1) + b"0.5]}]}")
        with WorkerProcess(bundle_dir, control_plane=False) as worker:
            most = before = resident(worker)
            for _ in range(60):
                try:
                    with connect(worker) as connection:
                        connection.sendall(body)
                except OSError:
                    pass  # told to come again
                most = max(most, resident(worker))
            assert most - before < (128 + 16 + 128) * 2**20

    @pytest.mark.slow
    @pytest.mark.parametrize("path", ["/inference.GRPCInferenceService/ServerLive", f"/{HEALTH_SERVICE}/Check"])
    def test_large_messages_to_any_grpc_method_are_read_a_few_at_a_time(self, bundle_dir: Path, path: str) -> None:
        message = b"\x0a" + b"\xff" * (40 << 20)
        with WorkerProcess(bundle_dir, control_plane=False, env={"OFFRAMP_GRPC_PORT": "0"}) as worker:
            alone = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.insecure_channel(f"127.0.0.1:{worker.port('grpc')}", options=alone) for _ in range(12)]
            most = before = resident(worker)
            calls = [channel.unary_unary(path).future(message, timeout=60) for channel in channels]
            while not all(call.done() for call in calls):
                most = max(most, resident(worker))
                time.sleep(0.01)
            for channel in channels:
                channel.close()
            assert most - before < 400 * 2**20

    @pytest.mark.slow
    def test_a_body_larger_than_the_model_can_use_is_413_and_says_the_limit(self, process: WorkerProcess) -> None:
        with connect(process) as connection:
            connection.sendall(fuzz.http(b"", length=40_000_000))
            status, body = fuzz.read_response(connection)
        limit = re.search(r"larger than (\d+) bytes", json.loads(body)["error"])
        assert status == 413 and limit is not None
        assert int(limit[1]) == 26 * 1024 * int(np.prod(fuzz.ROW_SHAPE)) + 256 * 1024

    @pytest.mark.slow
    def test_millions_of_json_numbers_are_read_beside_the_loop_and_in_little_memory(
        self, bundle_dir: Path, pool: fuzz.Pool
    ) -> None:
        with WorkerProcess(bundle_dir, control_plane=False) as worker:
            rows = 1024
            count = rows * int(np.prod(fuzz.ROW_SHAPE))
            good = {"name": "x", "datatype": "FP32", "shape": [rows, *fuzz.ROW_SHAPE], "data": [0.25] * count}
            text = json.dumps({"inputs": [good]}).encode()
            bad = json.dumps({"inputs": [good | {"data": [0] * (count + 5)}]}).encode()
            before, most = resident(worker), 0
            for body, right in (
                (bad, 400),
                (text, 200),
                (b"[" * 14_000_000, 400),
                (b'{"inputs":[' + b"{}," * 5_000_000, 400),
            ):
                with connect(worker) as connection, connect(worker) as other:
                    connection.sendall(fuzz.http(body))
                    other.sendall(fuzz.valid(pool, 0, name="o"))
                    assert fuzz.read_response(other)[0] in (200, 429)
                    assert fuzz.read_response(connection)[0] == right
                    most = max(most, resident(worker))
            assert most - before < 160 * 2**20


def resident(worker: WorkerProcess) -> int:
    """Bytes of memory that a worker has."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


SPEC = TensorSpec("x", "FP32", (3, 4))
WHOLE = TensorSpec("x", "INT64", (3, 4))


class TestLargeJson:
    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.integers(1, 6),
        nested=st.booleans(),
        spaces=st.sampled_from([None, 1, (", ", " : ")]),
        whole=st.booleans(),
        seed=st.integers(0, 1000),
        name=st.sampled_from([None, "plain", 'with "data": [1,2] inside']),
    )
    def test_it_means_what_it_means_in_one_piece(
        self, *, rows: int, nested: bool, spaces: Any, whole: bool, seed: int, name: str | None
    ) -> None:
        rng, spec = np.random.default_rng(seed), WHOLE if whole else SPEC
        x = rng.integers(-5, 5, (rows, 3, 4)) if whole else rng.normal(size=(rows, 3, 4))
        data = x.tolist() if nested else x.reshape(-1).tolist()
        value = {
            "id": name,
            "inputs": [{"name": "x", "shape": [rows, 3, 4], "datatype": spec.datatype, "data": data, "parameters": {}}],
            "outputs": [{"name": "label"}],
        }
        form = {"separators": spaces} if isinstance(spaces, tuple) else {"indent": spaces}
        body = json.dumps({k: v for k, v in value.items() if v is not None}, **form).encode()
        small = parse_request(body, header_length=None, spec=spec, max_rows=8)
        large = parse_large(bytearray(body), header_length=None, spec=spec, max_rows=8)
        np.testing.assert_array_equal(small.x, large.x)
        assert (small.id, small.outputs, small.x.dtype) == (large.id, large.outputs, large.x.dtype)

    @settings(max_examples=150, deadline=None)
    @given(seed=st.integers(0, 100_000))
    @example(seed=797)  # a digit behind a bracket
    def test_what_is_refused_in_one_piece_is_refused_in_many(self, seed: int) -> None:
        """A few bytes changed: whatever one reader makes of it, the other makes the same of it, or both refuse."""
        rng = np.random.default_rng(seed)
        data = np.round(rng.normal(size=(2, 3, 4)), 2).tolist()
        body = bytearray(
            json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3, 4], "data": data}]}).encode()
        )
        for at in rng.integers(len(body), size=int(rng.integers(1, 4))):
            body[at] = int(rng.choice(np.frombuffer(b'0123456789.,[]{}" eE+-nult:\x00\xff', dtype=np.uint8)))
        seen: list[Any] = []
        for read in (parse_request, parse_large):
            try:
                seen.append(read(bytes(body), header_length=None, spec=SPEC, max_rows=8).x)
            except BadRequestError as error:
                seen.append(str(error))
        if isinstance(seen[0], str) or isinstance(seen[1], str):
            assert isinstance(seen[0], str) and isinstance(seen[1], str), seen
        else:
            np.testing.assert_array_equal(seen[0], seen[1])

    @pytest.mark.parametrize(
        "body",
        [
            b'{"parameters":{"data":[]},"inputs":[{"data":[' + b"1," * 200_000 + b"1]}]}",
            b"[" * 400_000,
            b'{"inputs":' + b" " * 400_000 + b"[]}",
        ],
        ids=["two-of-the-name", "brackets", "spaces"],
    )
    def test_large_json_that_cannot_be_cut_is_refused_unread(self, body: bytes) -> None:
        with pytest.raises(BadRequestError, match="body: has"):
            parse_large(body, header_length=None, spec=SPEC, max_rows=1024)
        with pytest.raises(BadRequestError, match="body: has"):
            parse_large(body, header_length=len(body), spec=SPEC, max_rows=1024)

    def test_pieces_end_between_numbers(self) -> None:
        spec = TensorSpec("x", "FP32", (100,))
        x = np.random.default_rng(1).normal(size=(3000, 100)).astype(np.float32)
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3000, 100], "data": x.tolist()}]}
        ).encode()
        np.testing.assert_array_equal(parse_large(body, header_length=None, spec=spec, max_rows=3000).x, x)


class TestPacked:
    def test_a_body_of_several_members_is_one_body(self) -> None:
        assert unpack(gzip.compress(b"ab") + gzip.compress(b"cd"), limit=4) == b"abcd"

    def test_a_bomb_is_stopped_before_it_is_made(self) -> None:
        bomb = gzip.compress(b"\0" * 50_000_000)
        tracemalloc.start()
        try:
            with pytest.raises(UnpackedTooLargeError):
                unpack(bomb, limit=1_000_000)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4_000_000

    @pytest.mark.parametrize(
        "body",
        [b"", b"x", gzip.compress(b"ab")[:-1], gzip.compress(b"ab") + b"x", gzip.compress(b"a") * 100],
        ids=["nothing", "no-gzip", "cut-off", "something-behind-it", "too-many-members"],
    )
    def test_what_is_no_gzip_is_named(self, body: bytes) -> None:
        with pytest.raises(BadRequestError, match="Content-Encoding"):
            unpack(body, limit=1000)

    @pytest.mark.slow
    def test_packed_requests_are_answered_as_others_and_what_is_unknown_is_415(
        self, process: WorkerProcess, pool: fuzz.Pool
    ) -> None:
        x = pool.x[:1]
        body, length = fuzz.binary(fuzz.tensor(x), x.tobytes(), id="z", outputs=[{"name": "logits"}])
        as_json = json.dumps(
            {
                "id": "z",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.reshape(-1).tolist()}],
                "outputs": [{"name": "logits"}],
            }
        )
        with connect(process) as connection:
            for sent, headers in ((body, (length,)), (as_json.encode(), ())):
                connection.sendall(fuzz.http(gzip.compress(sent), *headers, "Content-Encoding: gzip"))
                check(pool, fuzz.read_response(connection), 0, name="z")
            connection.sendall(fuzz.http(b"x", "Content-Encoding: br"))
            status, told = fuzz.read_response(connection)
            assert status == 415 and "send gzip" in json.loads(told)["error"]
            connection.sendall(fuzz.http(gzip.compress(b" " * 40_000_000), "Content-Encoding: gzip"))
            assert fuzz.read_response(connection)[0] == 413


@pytest.mark.slow
class TestMethods:
    @pytest.mark.parametrize(
        "path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny", "/v2/models/tiny/ready", "/metrics"]
    )
    def test_head_is_get_without_a_body(self, process: WorkerProcess, path: str) -> None:
        reply = process.public.head(path)
        assert (reply.status_code, reply.content) == (200, b"")

    @pytest.mark.parametrize(
        ("path", "allowed"),
        [
            ("/v2/health/live", "GET, HEAD, OPTIONS"),
            ("/v2/models/tiny/infer", "OPTIONS, POST"),
            ("/v2/models/tiny", "GET, HEAD, OPTIONS"),
        ],
    )
    def test_options_tells_what_a_path_takes(self, process: WorkerProcess, path: str, allowed: str) -> None:
        reply = process.public.options(path)
        assert (reply.status_code, reply.headers["allow"]) == (204, allowed)

    def test_another_method_is_405_with_those_that_are_taken(self, process: WorkerProcess) -> None:
        for method, path, allowed in (("GET", "/v2/models/tiny/infer", "POST"), ("POST", "/v2/health/ready", "GET")):
            reply = process.public.request(method, path)
            assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        assert process.public.options("/v3").status_code == 404
        assert process.public.post("/v2/models/tiny/%69nfer").status_code == 404


@pytest.mark.slow
def test_the_admin_port_ends_what_is_silent_or_half_sent(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_RECEIVE_SECONDS": "2"}) as worker:
        with connect(worker, "admin") as half:
            half.sendall(b"GET /v1/state HTT")
            assert fuzz.read_response(half)[0] == 408
            assert half.recv(1) == b""
        with connect(worker, "admin") as slow:
            slow.sendall(b"POST /v1/config HTTP/1.1\r\nHost: t\r\nContent-Length: 500\r\n\r\n")
            assert fuzz.read_response(slow)[0] == 401
        with connect(worker, "admin") as unfinished:
            known = f"Authorization: Bearer {TOKEN}".encode()
            unfinished.sendall(b"POST /v1/config HTTP/1.1\r\nHost: t\r\n" + known + b"\r\nContent-Length: 500\r\n\r\n{")
            assert fuzz.read_response(unfinished)[0] == 408
            assert unfinished.recv(1) == b""


@pytest.mark.slow
class TestGrpcHealth:
    @staticmethod
    def call(channel: grpc.Channel, service: str) -> int:
        check = channel.unary_unary(f"/{HEALTH_SERVICE}/Check", StringValue.SerializeToString, Int32Value.FromString)
        return int(check(StringValue(value=service), timeout=30).value)

    def test_the_server_the_service_and_the_model_serve_and_nothing_else(self, process: WorkerProcess) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{process.port('grpc')}") as channel:
            assert [self.call(channel, name) for name in ("", SERVICE, "tiny")] == [SERVING] * 3
            with pytest.raises(grpc.RpcError) as refused:
                self.call(channel, "other")
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    def test_a_watch_tells_the_end(self, bundle_dir: Path) -> None:
        with (
            WorkerProcess(bundle_dir, control_plane=False, env={"OFFRAMP_GRPC_PORT": "0"}) as worker,
            grpc.insecure_channel(f"127.0.0.1:{worker.port('grpc')}") as channel,
        ):
            watch = channel.unary_stream(
                f"/{HEALTH_SERVICE}/Watch", StringValue.SerializeToString, Int32Value.FromString
            )
            told = watch(StringValue(), timeout=60)
            assert next(told).value == SERVING
            worker.process.terminate()
            assert next(told).value == NOT_SERVING


def test_what_is_overridden_of_uvicorn_is_pinned_to_releases_that_are_tested() -> None:
    """Another minor release may rename what :class:`Connection` overrides: then this and the tests above say so before
    anybody installs it."""
    assert uvicorn.__version__.startswith("0.54.")
    base = Connection.__mro__[1]
    for name in (
        "data_received",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "_start_asgi_task",
        "send_400_response",
        "pause_writing",
        "resume_writing",
        "connection_lost",
        "_unset_keepalive_if_required",
    ):
        assert callable(getattr(base, name)), name
    declared = Path("pyproject.toml").read_text(encoding="utf-8")
    assert '"uvicorn==0.54.*"' in declared
