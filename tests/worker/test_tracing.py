"""Traces: spans of real requests at a real OTLP endpoint; nothing of it without being asked for, and a clear refusal
where it cannot work."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import bundles
import pytest
from processes import WorkerProcess, document, eventually, plan_for

from offramp_worker.tracing import context_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    outer.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
                    outer.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.slow
def test_a_request_leaves_a_span_below_its_clients_with_queue_and_execution(
    bundle_dir: Path, collector: Collector
) -> None:
    host, port = collector.server.server_address[:2]
    env = {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OFFRAMP_SERVICE": "digits",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{host!s}:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with WorkerProcess(bundle_dir, env=env) as worker:
        worker.deliver(document(plan_for(bundle_dir, {"r00-grid": "1"}))).raise_for_status()
        worker.public.headers["traceparent"] = TRACEPARENT
        replies = [worker.infer(x[None]) for x in bundles.inputs(5)]
        worker.public.post("/v2/models/tiny/infer", json={"inputs": []})
        eventually(lambda: len(collector.named("infer tiny")) == 5 and collector.named("infer"), what="spans")
    spans = collector.named("infer tiny")
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.parent_span_id.hex() for span in spans} == {PARENT}
    assert sorted(attributes(s)["offramp.exit"] for s in spans) == sorted(r["parameters"]["exit"] for r in replies)
    for span in spans:
        queue, execute = (
            next(s for s in collector.named(name) if s.parent_span_id == span.span_id) for name in ("queue", "execute")
        )
        assert attributes(execute)["offramp.batch.rows"] == 1
        assert span.start_time_unix_nano <= queue.start_time_unix_nano <= queue.end_time_unix_nano
        assert queue.end_time_unix_nano <= execute.end_time_unix_nano <= span.end_time_unix_nano + 1
    (refused,) = collector.named("infer")
    assert attributes(refused)["offramp.status"] == "400" and refused.status.code == 2
    assert collector.resources[0]["service.name"] == "digits"


@pytest.mark.slow
def test_traces_that_are_asked_for_without_their_packages_are_refused(bundle_dir: Path) -> None:
    hide = "import sys; sys.modules['opentelemetry.sdk'] = None; from offramp_worker.main import main; main()"
    env = {"OFFRAMP_BUNDLE": str(bundle_dir), "OFFRAMP_PORT": "0", "OTEL_TRACES_EXPORTER": "otlp", "PATH": "/usr/bin"}
    paths = [str(Path(__file__).parents[2] / name) for name in ("core", "worker")]
    done = subprocess.run(
        [sys.executable, "-c", hide],
        env=env | {"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "offramp[tracing]" in done.stderr


@pytest.mark.slow
def test_a_worker_that_makes_no_traces_never_loads_them() -> None:
    code = (
        "import sys, offramp_worker.main; print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [b"\xff", b"0" * 600])
def test_a_context_that_is_no_text_is_left_out(value: bytes) -> None:
    assert context_of([(b"traceparent", value), (b"tracestate", b"a=b"), (b"cookie", b"x")]) == {"tracestate": "a=b"}
