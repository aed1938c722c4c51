"""A core that says what a test wants, on a real socket."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import orjson

from offramp_core.bundle import Manifest
from offramp_worker.edge.wire import BOOT_HEADER, DIGEST_HEADER, LENGTH_HEADER, RAMPS_HEADER


class ScriptedCore:
    """``says`` has what it answers by path: ``""`` for who it is, ``rows``, ``features``, ``scores``, ``infer`` for
    requests as they came; or ``HANGS``, or ``DRIPS`` for a byte now and then. Both go on until the test is over."""

    HANGS, DRIPS = "hangs", "drips"

    def __init__(self, manifest: Manifest) -> None:
        self.over = threading.Event()
        self.asked: list[str] = []
        self.me = (
            200,
            json.dumps(
                {
                    "model": manifest.name,
                    "backbone_digest": manifest.backbone_digest,
                    "ramp_set_digest": manifest.ramp_set_digest,
                    "boot": "scripted",
                }
            ).encode(),
        )
        self._names = {
            DIGEST_HEADER: manifest.backbone_digest,
            RAMPS_HEADER: manifest.ramp_set_digest,
            BOOT_HEADER: "scripted",
        }
        self.says: dict[str, Any] = {"": self.me}
        core = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Quiet."""

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                what = self.path.partition("/edge")[2].strip("/").partition("/")[0]
                what = "infer" if self.path.endswith("/infer") else what
                core.asked.append(what)
                with contextlib.suppress(OSError):  # the edge has gone
                    core._answer(self, core.says.get(what, core.HANGS))

        class Server(ThreadingHTTPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> ScriptedCore:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, to: BaseHTTPRequestHandler, said: Any) -> None:
        if said == self.HANGS:
            self.over.wait()
        elif said == self.DRIPS:
            to.send_response(200)
            to.end_headers()
            while not self.over.wait(0.01):
                to.wfile.write(b"x")
        else:
            status, body = said
            to.send_response(status)
            for name, value in self._names.items():
                to.send_header(name, value)
            to.send_header("content-length", str(len(body)))
            to.send_header(LENGTH_HEADER, str(body.rfind(b"}") + 1))
            to.end_headers()
            to.wfile.write(body)


def scalar_reply(*names: str) -> tuple[int, bytes]:
    """Tensors without any dimension."""
    outputs = [{"name": name, "datatype": "FP32", "shape": []} for name in names]
    return 200, orjson.dumps({"outputs": outputs}) + bytes(4 * len(names))
