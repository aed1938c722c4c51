"""What an edge takes as evidence and as answers while its core fails, says nonsense or is another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bundles
import httpx
import numpy as np
import pytest
from edges import THRESHOLDS, answer, ask, columns, core_of, edge_of, exits, metric, url
from processes import WorkerProcess, document, eventually, plan_for

from offramp_core.edge_settings import EdgeSettings
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.link import Link
from offramp_worker.edge.wire import (
    BOOT_HEADER,
    DIGEST_HEADER,
    LENGTH_HEADER,
    RAMPS_HEADER,
    SECONDS_HEADER,
    Reply,
    read_reply,
    reply_body,
)
from offramp_worker.metrics import Metrics

pytestmark = pytest.mark.slow  # real workers

OURS = (DIGEST_HEADER, RAMPS_HEADER, BOOT_HEADER, LENGTH_HEADER, SECONDS_HEADER)
Change = Callable[[httpx.Response], httpx.Response]


@dataclass
class Between:
    """What stands between an edge and its core, and may change what either says, by path."""

    core: str
    request: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    reply: dict[str, Change] = field(default_factory=dict)
    url: str = ""

    def passed(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        what = path.partition("/edge")[2].strip("/").partition("/")[0]
        body = self.request.get(what, bytes)(body)
        reply = httpx.post(self.core + path, content=body, headers=headers, timeout=30, trust_env=False)
        return self.reply.get(what, lambda same: same)(reply)


@pytest.fixture(scope="module")
def core(bundle_dir: Path) -> Iterator[WorkerProcess]:
    with core_of(bundle_dir) as process:
        yield process


@pytest.fixture
def between(core: WorkerProcess) -> Iterator[Between]:
    mine = Between(url(core).rstrip("/"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            reply = mine.passed(self.path, body, {name: self.headers[name] for name in OURS if name in self.headers})
            self.send_response(reply.status_code)
            for name in (name for name in OURS if name in reply.headers):
                self.send_header(name, reply.headers[name])
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    mine.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield mine
    server.shutdown()
    server.server_close()


def says(change: Callable[[dict[str, np.ndarray]], None], reply: httpx.Response) -> httpx.Response:
    """A reply with other tensors."""
    arrays = {name: array.copy() for name, array in read_reply(reply.content, reply.headers[LENGTH_HEADER]).items()}
    change(arrays)
    body, length = reply_body(arrays)
    headers = {name: reply.headers[name] for name in OURS if name in reply.headers} | {LENGTH_HEADER: str(length)}
    return httpx.Response(reply.status_code, headers=headers, content=body)


def recorded(edge: WorkerProcess, rows: int) -> bool:
    return edge.observations().records.next == rows


def nothing(arrays: dict[str, np.ndarray]) -> None:
    arrays["logits"][:] = np.nan


def unlikely(arrays: dict[str, np.ndarray]) -> None:
    arrays["prediction"][:] = 7777


def test_rows_that_a_core_fails_to_answer_count_with_the_others_and_nonsense_is_no_answer_and_no_record(
    between: Between, bundle_dir: Path
) -> None:
    """A request each, so that a batch of easy rows does not share its fate with hard ones."""
    plan, x = plan_for(bundle_dir, THRESHOLDS), bundles.inputs(24, seed=3)
    env = {"OFFRAMP_CORE": between.url, "OFFRAMP_RESIDUE": "Input", "OFFRAMP_OFFLINE": "Answer"}
    with WorkerProcess(bundle_dir, env=env) as edge:
        assert edge.deliver(document(plan, audit_rate=1.0, accuracy_budget=0.9)).status_code == 200
        told = exits(edge.infer(x), 24)
        assert 0 < told.count("final") < 24
        eventually(partial(recorded, edge, 24), what="records of a sound core")
        sound = next(c for c in edge.observations().counts if c.epoch == 1)

        between.reply["rows"] = lambda _: httpx.Response(429, json={"error": "busy"})
        for i in range(24):
            eventually(lambda: metric(edge, "core_reachable"), what="a core that is not away, only slow")
            assert answer(edge, x[i : i + 1])["parameters"].get("offline", False) == (told[i] == "final")
        eventually(partial(recorded, edge, 48), what="records of rows that were not answered")

        between.reply = {"rows": partial(says, nothing), "scores": partial(says, unlikely)}
        for i in range(24):
            eventually(lambda: metric(edge, "core_reachable"), what="a core that is not away, only slow")
            assert answer(edge, x[i : i + 1])["parameters"].get("offline", False) == (told[i] == "final")
        eventually(partial(recorded, edge, 72), what="records that the edge makes itself")

        found = edge.observations()
        counts = next(c for c in found.counts if c.epoch == 1)
        assert (counts.requests, counts.drawn, counts.audited) == (72, 72, 72)
        assert counts.exits == {name: 3 * n for name, n in sound.exits.items()}
        assert counts.disagreements == 3 * sound.disagreements
        for values in columns(found.records):
            np.testing.assert_allclose(values[0::3], values[2::3], atol=1e-5)
        assert edge.events("core-refused")


def test_features_are_proven_again_when_another_process_answers_and_what_it_said_meanwhile_is_no_answer(
    between: Between, bundle_dir: Path, tmp_path: Path
) -> None:
    """It takes the same features otherwise, as another processor would."""
    x = bundles.inputs(24, seed=3)

    def other(body: bytes) -> bytes:
        header, end, numbers = body.partition(b"}]}")
        return header + end + np.frombuffer(numbers, "<f4")[::-1].tobytes()

    def renamed(reply: httpx.Response) -> httpx.Response:
        reply.headers[BOOT_HEADER] = "another"
        return reply

    with edge_of(bundle_dir, between.url, tmp_path, OFFRAMP_RESIDUE="Features") as edge:

        def sent() -> float:
            answer(edge, x[:4])
            return metric(edge, "forwarded_rows_total", sent="features")

        eventually(sent, what="rows that are sent as features")
        expected = answer(edge, x)
        between.request["features"] = other
        between.reply = {"features": renamed, "rows": renamed}
        reply = answer(edge, x)
        assert "final" in exits(reply, 24)
        np.testing.assert_allclose(reply["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        eventually(lambda: ask(edge, x[:4]) and edge.events("features-unlike"), what="the proof that fails")


@pytest.mark.parametrize(("header", "said"), [(RAMPS_HEADER, "ramp_set_digest"), (DIGEST_HEADER, "backbone_digest")])
def test_a_reply_of_another_model_or_other_ramps_is_none(
    between: Between, bundle: Bundle, header: str, said: str
) -> None:
    def other(reply: httpx.Response) -> httpx.Response:
        reply.headers[header] = "sha256:" + "0" * 64
        return reply

    link, came, got = Link(EdgeSettings(between.url), bundle, metrics=Metrics()), threading.Event(), []

    def answered(reply: Reply | None) -> None:
        got.append(reply)
        came.set()

    link.open()
    assert not link.away
    between.reply["scores"] = other
    link.send("scores", "x", bundles.inputs(2), sent="Nothing", within=30.0, answered=answered)
    assert came.wait(60)
    link.close()
    assert got == [None] and said in link.away
