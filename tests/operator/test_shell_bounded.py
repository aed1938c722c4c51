"""What the operator reads of a worker's answers, against a real server."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_operator.shell.bounded import MAX_ANSWER_BYTES, AnswerRefusedError
from offramp_operator.shell.observe import Observer


class Worker(BaseHTTPRequestHandler):
    """Answers as its path says."""

    def do_GET(self) -> None:
        kind = self.path.strip("/?")
        body = gzip.compress(b"x" * 100_000) if kind == "compressed" else b"fine"
        self.send_response(200)
        if kind == "compressed":
            self.send_header("Content-Encoding", "gzip")
        if kind != "endless":
            length = MAX_ANSWER_BYTES + 1 if kind == "huge" else len(body)
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, kind: str) -> bytes:
    async def story() -> bytes:
        observer = Observer()
        try:
            worker = WorkerEndpoint("digits-0", "uid", ready=True, admin_url=url)
            return await observer._get(worker, f"/{kind}", "token", {})
        finally:
            await observer.close()

    return asyncio.run(story())


def test_an_answer_of_a_known_and_bearable_length_is_read(url: str) -> None:
    assert get(url, "fine") == b"fine"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("huge", "33554433 bytes; at most 33554432 are read"),
        ("endless", "a body of unknown length"),
        ("compressed", "compressed"),
    ],
)
def test_an_answer_that_could_fill_the_memory_is_not_read(url: str, kind: str, said: str) -> None:
    with pytest.raises(AnswerRefusedError, match=said):
        get(url, kind)
