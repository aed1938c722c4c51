"""A program in vLLM's place that hangs, dies, or replies what vLLM never would."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import eventually

from offramp_core.errors import InvalidBundleError
from offramp_worker.generate.vllm import process as vllm_process
from offramp_worker.generate.vllm.process import VllmProcess
from offramp_worker.generate.vllm.stream import AnswerStream

pytestmark = pytest.mark.slow  # each test starts processes

PROGRAM = """
import pathlib, socketserver, subprocess, sys, time
from http.server import BaseHTTPRequestHandler

folder = pathlib.Path(__file__).parent
engine = subprocess.Popen(["sleep", "600"])
(folder / "engine").write_text(str(engine.pid))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        mode = (folder / "mode").read_text()
        if mode == "hang" and self.path == "/health":
            time.sleep(600)
        replies = {
            "/version": b"[]" if mode == "version" else b'{"version": "0.32.0"}',
            "/metrics": b"vllm:spec_decode_num_draft_tokens_total " + (b"1e999" if mode == "metrics" else b"7"),
        }
        self.reply(replies.get(self.path, b""))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(b"{}")

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

Server(sys.argv[1], Handler).serve_forever()
"""


class Played:
    """The process and what the program does: ``mode`` is read at every request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        self.become("")
        self.process = VllmProcess(
            "x",
            [sys.executable, str(folder / "program.py"), str(folder / "at")],
            environment=dict(os.environ),
            at=folder / "at",
        )

    def become(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    @property
    def engine(self) -> int:
        """What the program started itself."""
        return int((self.folder / "engine").read_text())

    @property
    def keeper(self) -> int:
        (found,) = [pid for pid in _children(os.getpid()) if str(self.folder).encode() in _command(pid)]
        return found

    @property
    def child(self) -> int:
        return _children(self.keeper)[0]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(vllm_process, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(vllm_process, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(vllm_process, "STARTED_POLL_SECONDS", 0.05)
    monkeypatch.setitem(VllmProcess.ask.__kwdefaults__, "seconds", 0.3)
    one = Played(tmp_path)
    try:
        yield one
    finally:
        one.become("")
        one.process.close()


def test_one_that_hangs_is_ended_and_started_again(played: Played) -> None:
    played.process.start(seconds=60)
    played.become("hang")
    eventually(lambda: not played.process.up, what="the end of one that hangs")
    played.become("")
    eventually(lambda: played.process.up, what="its return")
    assert played.process.restarts >= 1


def test_what_a_killed_keeper_leaves_behind_ends_and_it_is_started_again(played: Played) -> None:
    played.process.start(seconds=60)
    engine = played.engine
    os.kill(played.keeper, signal.SIGKILL)
    eventually(lambda: not _lives(engine), what="the end of what vLLM had started")
    eventually(lambda: played.process.up and played.process.restarts >= 1, what="its return")


def test_signals_to_the_workers_group_reach_neither_keeper_nor_vllm(played: Played) -> None:
    played.process.start(seconds=60)
    keeper, child = played.keeper, played.child
    assert len({os.getsid(pid) for pid in (os.getpid(), keeper, child)}) == 3
    assert _ignored(keeper) >= {signal.SIGINT, signal.SIGTERM}
    assert not _ignored(child) & {signal.SIGINT, signal.SIGTERM}, "vLLM itself must end when it is asked to"


def test_replies_that_cannot_be_read_end_no_watch(played: Played, capfd: pytest.CaptureFixture[str]) -> None:
    played.process.start(seconds=60)
    logged = ""

    def told(event: str) -> bool:
        nonlocal logged
        logged += "".join(capfd.readouterr())
        return event in logged

    played.become("metrics")
    eventually(lambda: told("vllm-metrics-unread"), what="word of metrics that cannot be read")
    played.become("version")
    os.kill(played.child, signal.SIGKILL)
    eventually(lambda: told("vllm-not-started"), what="word of a version that cannot be read")
    played.become("")
    eventually(lambda: played.process.up, what="its return")
    eventually(lambda: played.process.take_drafts() == (7, 0), what="metrics")


def test_a_version_that_cannot_be_read_is_a_refusal(played: Played) -> None:
    played.become("version")
    with pytest.raises(InvalidBundleError, match="'x': vLLM cannot be started"):
        played.process.start(seconds=60)
    assert not _lives(played.engine)


# --- answers --------------------------------------------------------------------------------------


def _piece(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


GOOD, END = _piece(token_ids=[1, 2]), _piece(token_ids=[3], finish_reason="stop") + b"data: [DONE]\n\n"
BAD = {
    "deep": b"data: " + b"[" * 200_000 + b"\n\n",
    "huge": _piece(token_ids=[3], logprobs={"token_logprobs": [10**400], "top_logprobs": [{"token_id:3": -1}]}),
    "text": _piece(token_ids=["x"]),
    "cut": b"",
}


@contextmanager
def answering(at: Path, body: bytes) -> Iterator[None]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(at))
    listener.listen()

    def reply() -> None:
        connection, _ = listener.accept()
        with connection:
            asked = b""
            while not asked.endswith(b"{}"):
                asked += connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)

    thread = threading.Thread(target=reply)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


def read(at: Path, body: bytes) -> tuple[list[int], str]:
    with answering(at, body):
        arrived = threading.Event()
        stream = AnswerStream(at, {}, top=0, arrived=arrived.set)
        found: list[int] = []
        ended, error = False, ""
        while not ended:
            assert arrived.wait(30)
            arrived.clear()
            tokens, ended, error = stream.take()
            found += [token.id for token in tokens]
        return found, error


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_cannot_be_read_to_its_end_is_no_whole_one(kind: str, tmp_path: Path) -> None:
    tokens, error = read(tmp_path / "at", GOOD + BAD[kind])
    assert tokens == [1, 2]
    assert error.startswith("vLLM broke off")


def test_an_answer_that_is_read_to_its_end_is_whole(tmp_path: Path) -> None:
    assert read(tmp_path / "at", GOOD + END) == ([1, 2, 3], "")


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in threads for child in file.read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ignored(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigIgn:")).split()[1], 16)
    return {n for n in range(1, 65) if mask >> (n - 1) & 1}
