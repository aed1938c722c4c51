"""A worker on loopback that does what a test tells it: both ports, no model. Runs in a thread, or as a process (see
``main``)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np

from offramp_core.protocol import (
    ArmCounts,
    Observations,
    PlanDocument,
    RampInfo,
    RecordBlock,
    Refusal,
    SignedDocument,
    WorkerState,
)

DIGEST_A, DIGEST_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
RAMPS = (RampInfo("r00-linear", 0, 0.3, "pooled-linear"), RampInfo("r01-linear", 1, 0.6, "pooled-linear"))
COSTS: dict[str, list[Any]] = {
    "batch_size": [1.0],
    "segment_seconds": [[0.001, 0.001, 0.001]],
    "ramp_seconds": [[0.0001, 0.0001]],
    "regroup_seconds": [0.0],
}


def block(
    first: int, n: int, *, time_from: float = 1000.0, ramp_set: str = DIGEST_B, seed: int = 0, n_ramps: int = len(RAMPS)
) -> RecordBlock:
    """``n`` records with sequence numbers from ``first`` on, one per second."""
    rng = np.random.default_rng([seed, first])

    def column(values: Any, dtype: str) -> str:
        return base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode()

    return RecordBlock(
        first=first,
        next=first + n,
        ramp_set_digest=ramp_set,
        time=column(time_from + first + np.arange(n), "<f8"),
        uncertainty=column(rng.random((n, n_ramps)), "<f4"),
        prediction=column(rng.integers(0, 5, (n, n_ramps)), "<i4"),
        final=column(rng.integers(0, 5, n), "<i4"),
        reference=column(rng.integers(0, 5, n), "<i4"),
    )


def state(uid: str, *, ready: bool = True, message: str = "") -> WorkerState:
    return WorkerState(
        uid=uid,
        boot_id=f"boot-of-{uid}",
        service_uid="service-1",
        model="stub",
        ready=ready,
        backbone_digest=DIGEST_A,
        ramp_set_digest=DIGEST_B,
        ramps=RAMPS,
        costs=COSTS,
        message=message,
    )


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is part of many tests; a traceback printed from a thread at any later time is not."""


class StubWorker:
    """Answers on ``url`` from its fields, which a test may change at any time."""

    def __init__(
        self, uid: str, *, token: str | None = None, port: int = 0, admin_port: int | None = None, broken: str = ""
    ) -> None:
        self.token = token
        self.state = state(uid, ready=not broken, message=broken)  # before the first answer
        self.live = True
        self.counts: tuple[ArmCounts, ...] = ()
        self.refused, self.other_seconds = 0, 0.0
        self.now = 100.0
        self.rows = 0
        self.more_rows: dict[str, int] = {}  # of other ramp sets
        self.also = ""
        self.ring_from = 0
        self.page = 5_000
        self.broken_block: RecordBlock | None = None
        self.garbage: bytes | None = None
        self.delay_seconds = 0.0
        self.tells_state = True
        self.taken: list[PlanDocument] = []
        self.refuse: Refusal | None = None
        self.asked: list[str] = []
        self.closed = threading.Event()
        self._servers = [self._serve(port)] + ([self._serve(admin_port)] if admin_port is not None else [])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[-1].server_address[1]}"

    def close(self) -> None:
        """Gone for good, open connections included."""
        self.closed.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def restart(self, boot_id: str) -> None:
        """A new process under the same uid: counters and ring start anew."""
        self.state = replace(self.state, boot_id=boot_id)
        self.counts, self.rows, self.ring_from = (), 0, 0

    # --- answers -----------------------------------------------------------------------------------

    def observations(self, after: int, boot: str) -> Observations:
        first = max(after if boot == self.state.boot_id else 0, self.ring_from)
        n = max(0, min(self.rows - first, self.page))
        seed = int.from_bytes(hashlib.sha256(self.state.uid.encode()).digest()[:4], "big")
        records = self.broken_block or block(first, n, seed=seed, ramp_set=self.state.ramp_set_digest)
        known = {digest: int(n) for digest, _, n in (part.partition("=") for part in self.also.split(",")) if n}
        more = tuple(
            block(known.get(digest, 0), max(0, rows - known.get(digest, 0)), seed=seed, ramp_set=digest)
            for digest, rows in self.more_rows.items()
        )
        return Observations(
            self.state.uid,
            self.state.boot_id,
            self.now,
            self.counts,
            records,
            refused=self.refused,
            other_seconds=self.other_seconds,
            more_records=more,
        )

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.closed.wait(self.delay_seconds)
        if path.startswith("/v2/health/"):
            healthy = {"/v2/health/ready": self.state.ready, "/v2/health/live": self.live}[path]
            return (200 if healthy else 503), b"{}"
        if path == "/who":
            return 200, self.state.uid.encode()
        if self.garbage is not None:
            return 200, self.garbage
        if path == "/v1/state":
            return 200, msgspec.json.encode(self.state)
        if path == "/v1/observations":
            self.also = unquote(query.get("also", ""))
            told = self.observations(int(query["after"]), query.get("boot", ""))
            asked = query.get("state") == "1" and self.tells_state
            return 200, msgspec.json.encode(replace(told, state=self.state) if asked else told)
        return self._configure(body) if method == "POST" else (404, b"{}")

    def _configure(self, body: bytes) -> tuple[int, bytes]:
        document = msgspec.json.decode(msgspec.json.decode(body, type=SignedDocument).payload, type=PlanDocument)
        if self.refuse is not None:
            self.state = replace(self.state, refused=replace(self.refuse, epoch=document.epoch))
            return 409, json.dumps({"error": self.refuse.message, "reason": self.refuse.reason}).encode()
        self.taken.append(document)
        self.state = replace(self.state, epoch=document.epoch)
        return 200, msgspec.json.encode(self.state)

    def _serve(self, port: int | None) -> ThreadingHTTPServer:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                path, _, text = self.path.partition("?")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if worker.closed.is_set():
                    self.close_connection = True
                    return
                worker.asked.append(f"{self.command} {self.path}")
                query = dict(pair.split("=", 1) for pair in text.split("&") if pair)
                authorised = worker.token is None or self.headers.get("Authorization") == f"Bearer {worker.token}"
                code, reply = (
                    worker.answer(self.command, path, query, body) if authorised or path[:4] != "/v1/" else (401, b"{}")
                )
                self.send_response(code)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *args: object) -> None:
                pass

        server = _QuietServer(("127.0.0.1", port or 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server


def main() -> None:
    """As a process, under the environment a worker gets. The bundle folder holds files that say how to behave."""
    env, bundle = os.environ, Path(os.environ["OFFRAMP_BUNDLE"])
    if (bundle / "exit").exists():
        print(json.dumps({"event": "settings-refused", "error": "told to exit"}), file=sys.stderr)
        sys.exit(3)
    stop = threading.Event()
    if not (bundle / "ignore-sigterm").exists():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ports = {"port": int(env["OFFRAMP_PORT"]), "admin_port": int(env["OFFRAMP_ADMIN_PORT"])}
    broken = "manifest.json: file is missing" if (bundle / "broken").exists() else ""
    told = Path(env["OFFRAMP_STATE_DIR"]) / "environment.json"  # whole, and there before anybody is told "ready"
    told.with_suffix(".new").write_text(json.dumps(dict(env)))
    told.with_suffix(".new").replace(told)
    worker = StubWorker(env["OFFRAMP_UID"], **ports, broken=broken)
    while not stop.wait(0.05):
        if (bundle / "die").exists():
            (bundle / "die").unlink(missing_ok=True)
            os._exit(7)
        worker.live = not (bundle / "hung").exists()
        failing = "every run fails" if (bundle / f"failing-{env['OFFRAMP_UID']}").exists() else ""
        ready = worker.live and not failing and not (bundle / "broken").exists()
        worker.state = replace(worker.state, ready=ready, failing=failing)
    worker.close()


if __name__ == "__main__":
    main()
