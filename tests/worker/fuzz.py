"""Hostile and broken requests, over HTTP and gRPC, for a worker of :mod:`bundles`, and clients that send them between
valid ones.

Every case says which replies are right. A valid request interleaved with them must get its own right answer, always.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bundles
import grpc
import numpy as np
from grpc import StatusCode

from offramp_worker.grpc import messages

PATH = "/v2/models/tiny/infer"
ROW_SHAPE = (bundles.CHANNELS, bundles.SIZE, bundles.SIZE)
ROW_BYTES = 4 * int(np.prod(ROW_SHAPE))
GOOD = frozenset({200, 429, 503})
REFUSED = frozenset({400, 404, 405, 408, 413, 415, 417, 422, 429, 431, 501, 503})
CLOSED = 0  # the server closed without a reply: right only where nothing complete was sent
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes to send, in ``pieces`` with pauses between them, and the statuses that are right. Afterwards the connection
    is closed."""

    name: str
    pieces: tuple[bytes, ...]
    right: frozenset[int]
    pause_seconds: float = 0.0
    hang_up: bool = False  # close without waiting for the reply


@dataclass
class Tally:
    """What came of them. ``refused`` valid requests were told to come again later, ``early`` ones left at a ramp."""

    sent: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    early: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Pool:
    """Inputs with the answers that they get alone, and where they leave."""

    def __init__(self, x: Any, answer: Callable[[Any], tuple[Any, str]]) -> None:
        """``answer`` gives one row's logits and its exit."""
        self.x = x
        answers = [answer(row[None]) for row in x]
        self.logits, self.exits = np.concatenate([logits for logits, _ in answers]), [where for _, where in answers]


def http(body: bytes, *headers: str, path: str = PATH, method: str = "POST", length: int | None = None) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: t",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def tensor(x: Any, **fields: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": x.nbytes},
    } | fields


def binary(tensor: dict[str, Any], values: bytes, **extra: Any) -> tuple[bytes, str]:
    """Body and length header of a binary request."""
    head = json.dumps({"inputs": [tensor], **extra}).encode()
    return head + values, f"Inference-Header-Content-Length: {len(head)}"


def valid(pool: Pool, row: int, *, name: str) -> bytes:
    """A good binary request for one row; ``name`` comes back as its id."""
    x = pool.x[row : row + 1]
    body, length = binary(tensor(x), x.tobytes(), id=name, outputs=[{"name": "logits"}])
    return http(body, length)


# --- cases ---------------------------------------------------------------------------------------------


def wrong_size(rng: Rng) -> Case:
    x = bundles.inputs(1)
    size = int(rng.choice([0, 1, 3, ROW_BYTES - 1, ROW_BYTES + 1, 2 * ROW_BYTES, int(rng.integers(0, 4 * ROW_BYTES))]))
    size += size == ROW_BYTES
    body, length = binary(tensor(x), b"\x7f" * size)
    return Case("wrong-size", (http(body, length),), frozenset({400}))


def wrong_declared_size(rng: Rng) -> Case:
    x = bundles.inputs(1)
    odd: Any = rng.choice(np.array([-1, 0, 2**63, "12", None, 1.5, True, [], ROW_BYTES - 4], dtype=object))
    body, length = binary(tensor(x, parameters={"binary_data_size": odd}), x.tobytes())
    return Case("wrong-declared-size", (http(body, length),), frozenset({400}))


def truncated_body(rng: Rng) -> Case:
    x = bundles.inputs(1)
    whole = http(*binary(tensor(x), x.tobytes()))
    return Case("truncated-body", (whole[: int(rng.integers(1, len(whole)))],), frozenset({CLOSED}), hang_up=True)


def truncated_in_its_length(rng: Rng) -> Case:
    """The HTTP body is complete, but not the request in it."""
    x = bundles.inputs(1)
    body, length = binary(tensor(x), x.tobytes())
    return Case("truncated-request", (http(body[: int(rng.integers(0, len(body)))], length),), frozenset({400}))


def not_finite(rng: Rng) -> Case:
    """NaN and infinity are numbers: an answer, or a refusal, but never harm for others."""
    x = bundles.inputs(int(rng.integers(1, 5)))
    x.reshape(-1)[rng.integers(x.size, size=int(rng.integers(1, 50)))] = rng.choice([np.nan, np.inf, -np.inf])
    return Case("not-finite", (http(*binary(tensor(x), x.tobytes())),), frozenset({200, 400, 429, 503}))


def odd_shape(rng: Rng) -> Case:
    shapes: list[Any] = [
        [0, *ROW_SHAPE],
        [2**62, *ROW_SHAPE],
        [-1, *ROW_SHAPE],
        [1, 0, 0, 0],
        [],
        [1],
        [1] * 64,
        [1, 3, 14, 14, 1],
        [1, 3, 14.0, 14],
        [1, 3, None, 14],
        ["1", 3, 14, 14],
        [True, 3, 14, 14],
        {"0": 1},
        7,
        None,
        [2**200, 3, 14, 14],
        [1, 2**31, 2**31, 2**31],
    ]
    x = bundles.inputs(1)
    shape = shapes[int(rng.integers(len(shapes)))]
    return Case("odd-shape", (http(*binary(tensor(x, shape=shape), x.tobytes())),), frozenset({400}))


def odd_datatype(rng: Rng) -> Case:
    kinds: list[Any] = ["FP64", "INT8", "BYTES", "fp32", "", None, 32, ["FP32"], "FP32\0", "X" * 10_000]
    x = bundles.inputs(1)
    kind = kinds[int(rng.integers(len(kinds)))]
    return Case("odd-datatype", (http(*binary(tensor(x, datatype=kind), x.tobytes())),), frozenset({400}))


def mutated_json(rng: Rng) -> Case:
    """One to eight bytes of a good JSON request changed: mostly no JSON any more, sometimes still a good request."""
    x = np.round(bundles.inputs(1), 2)
    values = {
        "name": "x",
        "datatype": "FP32",
        "shape": list(x.shape),
        "data": [round(float(v), 2) for v in x.reshape(-1)],
    }
    body = bytearray(json.dumps({"inputs": [values]}).encode())
    for at in rng.integers(len(body), size=int(rng.integers(1, 9))):
        body[at] = int(rng.integers(256))
    return Case("mutated-json", (http(bytes(body)),), frozenset({200, 400, 429, 503}))


def odd_json(rng: Rng) -> Case:
    bodies = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{}",
        b'{"inputs":[]}',
        b'{"inputs":{}}',
        b'{"inputs":[null]}',
        b"[" * 100_000,
        b'{"inputs":[{"name":"x"}]}',
        b"\xff\xfe",
        b'{"id":' + b"9" * 5000 + b"}",
        b'{"inputs":' + b"[" * 500 + b"]" * 500 + b"}",
    ]
    return Case("odd-json", (http(bodies[int(rng.integers(len(bodies)))]),), frozenset({400}))


def odd_data(rng: Rng) -> Case:
    """JSON data of the wrong length, depth or kind."""
    n = int(np.prod(ROW_SHAPE))
    data: list[Any] = [
        [0.5] * (n - 1),
        [0.5] * (n + 1),
        ["0.5"] * n,
        [None] * n,
        [True] * n,
        [[0.5]] * n,
        [[0.5] * n],
        "0.5",
        {},
        None,
        [{}] * n,
        [[[[0.5] * 14] * 14] * 2],
        [[[[0.5] * 14] * 14] * 4],
    ]
    values = {"name": "x", "datatype": "FP32", "shape": [1, *ROW_SHAPE], "data": data[int(rng.integers(len(data)))]}
    return Case("odd-data", (http(json.dumps({"inputs": [values]}).encode()),), frozenset({400}))


def odd_header_length(rng: Rng) -> Case:
    x = bundles.inputs(1)
    body, _ = binary(tensor(x), x.tobytes())
    odd = str(
        rng.choice(
            [
                "-1",
                "0",
                "1",
                "abc",
                "",
                "99999999999999999999",
                "1e3",
                " 12 3",
                "\xff",
                str(len(body) + 1),
                str(len(body)),
            ]
        )
    )
    return Case("odd-header-length", (http(body, f"Inference-Header-Content-Length: {odd}"),), frozenset({400}))


def large_head(rng: Rng) -> Case:
    size = int(rng.choice([70_000, 300_000]))
    kind = int(rng.integers(3))
    if kind == 0:
        whole = http(b"{}", "X-Long: " + "a" * size)
    elif kind == 1:
        whole = http(b"{}", *(f"X-{i}: {'a' * 100}" for i in range(size // 100)))
    else:
        whole = http(b"{}", path="/v2/models/" + "a" * size + "/infer")
    return Case("large-head", (whole,), frozenset({431}))


def large_body(rng: Rng) -> Case:
    """Announced, but not sent."""
    return Case("large-body", (http(b"", length=int(rng.integers(2**27, 2**62))),), frozenset({413}))


def broken_http(rng: Rng) -> Case:
    texts = [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v2/models/tiny/infer HTTP/9.9\r\n\r\n",
        b"\0" * 100,
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        bytes(rng.integers(256, size=200, dtype=np.uint8)) + b"\r\n\r\n",
    ]
    return Case("broken-http", (texts[int(rng.integers(len(texts)))],), REFUSED)


def wrong_place(rng: Rng) -> Case:
    paths = [
        "/",
        "/v2/models/other/infer",
        "/v2/models//infer",
        "/v2/models/tiny/versions/2/infer",
        "/v2/models/tiny/infer/",
        "/v2/models/%00/infer",
        "/v2/models/tiny%2finfer",
        "/v2/../etc/passwd",
        "/v2/models/tiny/versions//infer",
        "/%ff",
        "/v2/models/infer",
    ]
    methods = ["POST", "GET", "PUT", "DELETE", "OPTIONS", "PATCH"]
    path, method = paths[int(rng.integers(len(paths)))], methods[int(rng.integers(len(methods)))]
    return Case("wrong-place", (http(b"{}", path=path, method=method),), REFUSED | {204})


def packed(rng: Rng) -> Case:
    """A good request packed well, badly, or in a way that nobody here knows."""
    x = bundles.inputs(1)
    body, length = binary(tensor(x), x.tobytes())
    whole = gzip.compress(body, 1)
    half = len(body) // 2
    kinds: list[tuple[bytes, str, frozenset[int]]] = [
        (whole, "gzip", GOOD),
        (gzip.compress(body[:half], 1) + gzip.compress(body[half:], 1), "GZIP", GOOD),
        (body, "identity", GOOD),
        (whole, "br", frozenset({415})),
        (whole, "gzip, gzip", frozenset({415})),
        (whole[:-1], "gzip", frozenset({400})),
        (whole + b"x", "gzip", frozenset({400})),
        (b"x" * 20, "gzip", frozenset({400})),
        (b"", "gzip", frozenset({400})),
        (gzip.compress(b" " * 2**25, 1), "gzip", frozenset({413})),
    ]
    sent, encoding, right = kinds[int(rng.integers(len(kinds)))]
    return Case("packed", (http(sent, length, f"Content-Encoding: {encoding}"),), right)


def upgrade(rng: Rng) -> Case:
    """A good request whose client would rather speak another protocol, in a few pieces."""
    x = bundles.inputs(1)
    protocol = str(rng.choice(["h2c", "websocket", "TLS/1.0", "x"]))
    asks = [
        "Connection: Upgrade, HTTP2-Settings",
        f"Upgrade: {protocol}",
        "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA",
    ]
    body, length = binary(tensor(x), x.tobytes())
    whole = http(body, length, *asks)
    cuts = [0, *sorted(rng.integers(1, len(whole), size=int(rng.integers(0, 4))).tolist()), len(whole)]
    return Case("upgrade", tuple(whole[a:b] for a, b in itertools.pairwise(cuts)), GOOD, pause_seconds=0.002)


def disputed_length(rng: Rng) -> Case:
    """Heads of which a proxy may think that the body ends elsewhere: the connection must end with the refusal."""
    head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: t\r\n"
    smuggled = b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n"
    lengths = [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 0x2\r\n",
        b"Content-Length: 2,2\r\n",
        b"Content-Length: 2 3\r\n",
        b"Content-Length : 2\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Content-Length: 2\n",
        b"Content-Length:\r\n 2\r\n",
    ]
    length = lengths[int(rng.integers(len(lengths)))]
    return Case("disputed-length", (head + length + b"\r\n{}" + smuggled,), frozenset({400, 501}))


def tunnel(_: Rng) -> Case:
    return Case("tunnel", (b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n",), frozenset({405}))


def slow_sender(rng: Rng) -> Case:
    """A good request in a few pieces: slow, but in time."""
    x = bundles.inputs(1)
    whole = http(*binary(tensor(x), x.tobytes()))
    cuts = [0, *sorted(rng.integers(1, len(whole), size=3).tolist()), len(whole)]
    pieces = tuple(whole[a:b] for a, b in itertools.pairwise(cuts))
    return Case("slow-sender", pieces, frozenset({200, 429, 503}), pause_seconds=0.002)


def gone_before_the_reply(_: Rng) -> Case:
    x = bundles.inputs(3)
    return Case("gone", (http(*binary(tensor(x), x.tobytes())),), frozenset({CLOSED}), hang_up=True)


def chunked(rng: Rng) -> Case:
    """Good, with a chunked body."""
    x = bundles.inputs(1)
    body, length = binary(tensor(x), x.tobytes())
    size = int(rng.integers(1, 900))
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + size]), body[i : i + size]) for i in range(0, len(body), size)
    )
    head = f"POST {PATH} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n{length}\r\n\r\n".encode()
    return Case("chunked", (head + chunks + b"0\r\n\r\n",), frozenset({200, 429, 503}))


CASES: tuple[Callable[[Rng], Case], ...] = (
    wrong_size,
    wrong_declared_size,
    truncated_body,
    truncated_in_its_length,
    not_finite,
    odd_shape,
    odd_datatype,
    mutated_json,
    odd_json,
    odd_data,
    odd_header_length,
    large_head,
    large_body,
    broken_http,
    wrong_place,
    packed,
    upgrade,
    disputed_length,
    tunnel,
    slow_sender,
    gone_before_the_reply,
    chunked,
)


# --- sending --------------------------------------------------------------------------------------------


def attack(address: tuple[str, int], pool: Pool, *, requests: int, seed: int, threads: int = 4) -> Tally:
    """Send ``requests`` hostile requests from a few threads, each between valid ones on connections of their own."""
    tally = Tally()
    workers = [
        threading.Thread(target=_attacker, args=(address, pool, tally, requests // threads, seed + i))
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tally


def _attacker(*arguments: Any) -> None:
    tally: Tally = arguments[2]
    try:
        _attack(*arguments)
    except Exception as error:  # a thread's own end would go unseen
        tally.wrong.append(f"no reply: {error!r}")
        raise


def _attack(address: tuple[str, int], pool: Pool, tally: Tally, requests: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Neighbour(address, pool, tally) as neighbour:
        for i in range(requests):
            if i % 20 == 19:
                pipelined(address, pool, tally, rng, name=f"{seed}-{i}")
                continue
            case = CASES[int(rng.integers(len(CASES)))](rng)
            neighbour.send(int(rng.integers(len(pool.x))), f"{seed}-{i}")  # in flight while the hostile one is
            status = provoke(address, case)
            with tally.lock:
                tally.sent[case.name] += 1
                tally.statuses[status] += 1
                if status not in case.right:
                    tally.wrong.append(f"{case.name}: {status} for {case.pieces[0][:300]!r}")
            neighbour.check()


class Neighbour:
    """A well-behaved client on one kept connection."""

    def __init__(self, address: tuple[str, int], pool: Pool, tally: Tally) -> None:
        self._pool, self._tally = pool, tally
        self._connection = socket.create_connection(address, timeout=30)
        self._expected: list[tuple[int, str]] = []

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, row: int, name: str) -> None:
        self._expected.append((row, name))
        self._connection.sendall(valid(self._pool, row, name=name))

    def check(self) -> None:
        row, name = self._expected.pop()
        _judge(self._tally, self._pool, read_response(self._connection), row, name)


def provoke(address: tuple[str, int], case: Case) -> int:
    """Send a case; the status of the reply, 0 without one."""
    with socket.create_connection(address, timeout=30) as connection:
        try:
            for i, piece in enumerate(case.pieces):
                if i:
                    time.sleep(case.pause_seconds)
                connection.sendall(piece)
            if case.hang_up:
                return CLOSED
            return read_response(connection)[0]
        except ConnectionError:
            return _status_of_what_is_left(connection)


def pipelined(address: tuple[str, int], pool: Pool, tally: Tally, rng: Rng, *, name: str) -> None:
    """Valid requests in one packet, then rubbish: every valid one gets its own answer, in order, before the refusal."""
    rows = rng.integers(len(pool.x), size=int(rng.integers(2, 9))).tolist()
    rubbish = CASES[int(rng.choice([0, 5, 8, 13]))](rng)
    packet = b"".join(valid(pool, row, name=f"{name}-{i}") for i, row in enumerate(rows)) + rubbish.pieces[0]
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(packet)
        for i, row in enumerate(rows):
            _judge(tally, pool, read_response(connection), row, f"{name}-{i}")
        status = read_response(connection)[0]
    with tally.lock:
        tally.sent["pipelined"] += 1
        tally.statuses[status] += 1
        if status not in rubbish.right:
            tally.wrong.append(f"pipelined {rubbish.name}: {status}")


def _judge(tally: Tally, pool: Pool, response: tuple[int, bytes], row: int, name: str) -> None:
    status, body = response
    if status in (429, 503):
        with tally.lock:
            tally.sent["valid"] += 1
            tally.refused += 1
        return
    reply = json.loads(body) if status == 200 else {}
    right = reply.get("id") == name and reply["parameters"]["exit"] == pool.exits[row]
    right = right and np.allclose(reply["outputs"][0]["data"], pool.logits[row], rtol=1e-4, atol=1e-4)
    with tally.lock:
        tally.sent["valid"] += 1
        tally.early += right and pool.exits[row] != "final"
        if not right:
            tally.wrong.append(f"valid request {name}: {status} {body[:200]!r}")


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next response; (0, b"") when the server closed."""
    head = b""
    while b"\r\n\r\n" not in head:
        byte = connection.recv(1)
        if not byte:
            return CLOSED, b""
        head += byte
    length = int(next(iter(re.findall(rb"(?i)content-length: *(\d+)", head)), b"0"))
    body = b""
    while len(body) < length:
        chunk = connection.recv(length - len(body))
        if not chunk:
            break
        body += chunk
    return int(head[9:12]), body


def _status_of_what_is_left(connection: socket.socket) -> int:
    """The server replied and closed while we still sent."""
    try:
        return read_response(connection)[0]
    except OSError:
        return CLOSED


# --- gRPC ---------------------------------------------------------------------------------------------------

INFER = "/inference.GRPCInferenceService/ModelInfer"
GRPC_REFUSED = frozenset(
    {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.UNAVAILABLE,
        StatusCode.UNIMPLEMENTED,
    }
)


def grpc_request(x: Any, *, raw: bytes | None = None, shape: Any = None, **fields: Any) -> Any:
    request = messages.message("ModelInferRequest")(**{"model_name": "tiny", **fields})
    request.inputs.add(name="x", datatype="FP32", shape=list(x.shape) if shape is None else shape)
    request.raw_input_contents.append(x.tobytes() if raw is None else raw)
    return request


def hostile_message(rng: Rng) -> tuple[bytes, bool]:
    """The bytes of a request, and whether they are a message at all."""
    x = bundles.inputs(1)
    whole = grpc_request(x).SerializeToString()
    kind = int(rng.integers(6))
    if kind == 0:  # mutated: no message any more, a bad one, or still a good one
        body = bytearray(whole)
        for at in rng.integers(60, size=int(rng.integers(1, 9))):
            body[at] = int(rng.integers(256))
        return bytes(body), False
    if kind == 1:
        return whole[: int(rng.integers(len(whole)))], False
    if kind == 2:
        return bytes(rng.integers(256, size=200, dtype=np.uint8)), False
    if kind == 3:
        shapes: list[list[int]] = [
            [0, *ROW_SHAPE],
            [2**62, *ROW_SHAPE],
            [-1, *ROW_SHAPE],
            [],
            [1],
            [1] * 64,
            [1, 2**31, 2**31, 2**31],
        ]
        return grpc_request(x, shape=shapes[int(rng.integers(len(shapes)))]).SerializeToString(), True
    if kind == 4:
        size = int(rng.integers(0, 2 * ROW_BYTES))
        return grpc_request(x, raw=b"\x7f" * (size + (size == ROW_BYTES))).SerializeToString(), True
    names = ["", "other", "x" * 10_000, "\0", "tiny/infer"]
    return grpc_request(x, model_name=names[int(rng.integers(len(names)))]).SerializeToString(), True


def attack_grpc(address: str, pool: Pool, *, requests: int, seed: int) -> Tally:
    """Hostile messages, each beside a valid one that is in flight."""
    tally, rng = Tally(), np.random.default_rng(seed)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER)  # bytes in, bytes out
        for i in range(requests):
            row = int(rng.integers(len(pool.x)))
            good = grpc_request(pool.x[row : row + 1], id=str(i)).SerializeToString()
            neighbour = call.future(good, timeout=30)
            body, is_message = hostile_message(rng)
            status = _status(call.future(body, timeout=30))
            tally.sent["message" if is_message else "bytes"] += 1
            allowed = (
                GRPC_REFUSED if is_message else GRPC_REFUSED | {StatusCode.OK}
            )  # what was changed may still be good
            if status not in allowed:
                tally.wrong.append(f"gRPC: {status} for {body[:200]!r}")
            _judge_grpc(tally, pool, neighbour, row, name=str(i))
    return tally


def _status(call: Any) -> StatusCode:
    return call.code()  # waits for the end


def _judge_grpc(tally: Tally, pool: Pool, call: Any, row: int, *, name: str) -> None:
    tally.sent["valid"] += 1
    status = _status(call)
    if status in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE):
        tally.refused += 1
        return
    if status is not StatusCode.OK:
        tally.wrong.append(f"valid gRPC request {name}: {status}")
        return
    reply = messages.message("ModelInferResponse").FromString(call.result())
    logits = np.array(next(output for output in reply.outputs if output.name == "logits").contents.fp32_contents)
    if reply.raw_output_contents:
        logits = np.frombuffer(reply.raw_output_contents[0], dtype="<f4")
    where = reply.parameters["exit"].string_param
    tally.early += where != "final"
    if reply.id != name or where != pool.exits[row] or not np.allclose(logits, pool.logits[row], rtol=1e-4, atol=1e-4):
        tally.wrong.append(f"valid gRPC request {name}: left at {where}, {logits}")
