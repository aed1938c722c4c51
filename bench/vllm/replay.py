"""In the place of a Python that has vLLM: records what the real one says, or says it again.

    replay.py record FILE PYTHON ARGUMENT...     start the real vLLM, pass everything through, and keep it in FILE
    replay.py play FILE [--version V] ARGUMENT...  answer as recorded; what was never asked is refused

The arguments are those that :mod:`offramp_worker.generate.vllm` gives to a Python: ``-c`` asks whether it has vLLM,
``-m`` starts the server. Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import http.client
import json
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

NAMED = "/v1/completions"
GETS = ("/health", "/version", "/metrics")
Recording = dict[str, Any]  # by configuration: its options, replies to GETs, and streams by request


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=300)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    recording: Recording
    behind: str = ""  # the real one's socket; empty: play
    version: str = ""
    completed = False


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.behind:
            status, body = _get(self.server.behind, self.path)
            when = "after" if self.server.completed else "before"
            if status == 200:
                self.server.recording["gets"].setdefault(self.path, {})[when] = body
        else:
            known = self.server.recording["gets"].get(self.path, {})
            body = known.get("after" if self.server.completed else "before", known.get("before", ""))
            status = 200 if known else 404
            if self.path == "/version" and self.server.version:
                body = json.dumps({"version": self.server.version})
        self._whole(status, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key, self.server.completed = _key(body), True
        if not self.server.behind:
            lines = self.server.recording["streams"].get(key)
            if lines is None:
                self._whole(400, json.dumps({"error": {"message": f"never recorded: {key[:300]}"}}))
                return
            if body.get("stream"):
                self._stream(lines)
            else:
                self._whole(200, lines[0])
        else:
            connection = _Unix(self.server.behind)
            connection.request("POST", self.path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                self._whole(reply.status, reply.read().decode())
                return
            if not body.get("stream"):
                text = reply.read().decode()
                self.server.recording["streams"][key] = [text]
                self._whole(200, text)
                return
            kept = [line.decode() for line in reply if line.strip()]
            self.server.recording["streams"][key] = kept  # before it is passed on: who has read enough may go
            self._stream(kept)

    def _stream(self, lines: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            if line.strip():
                data = f"{line.strip()}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(b"0\r\n\r\n")

    def _whole(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _key(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _get(path: str, what: str) -> tuple[int, str]:
    try:
        connection = _Unix(path)
        connection.request("GET", what)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException):
        return 503, ""


def configuration_of(options: dict[str, str]) -> str:
    """What of vLLM's options tells the configurations of one bundle apart; paths do not."""
    draft = json.loads(options.get("speculative-config", "{}"))
    return json.dumps(
        [options.get("dtype"), options.get("quantization"), {k: v for k, v in draft.items() if k != "model"}]
    )


def _options(arguments: list[str]) -> dict[str, str]:
    """``-m MODULE --name value --flag ...``."""
    found, rest = dict[str, str](), arguments[2:]
    for i, one in enumerate(rest):
        if one.startswith("--"):
            following = rest[i + 1] if i + 1 < len(rest) else "--"
            found[one[2:]] = "" if following.startswith("--") else following
    return found


def read(file: Path) -> Recording:
    if not file.is_file():
        return {}
    with gzip.open(file, "rt") as stream:
        found: Recording = json.load(stream)
    return found


def _merge(file: Path, name: str, own: Recording) -> None:
    """Several configurations record into one file."""
    with (Path(tempfile.gettempdir()) / f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = read(file)
        before = whole.get(name, own)
        whole[name] = {**own, "streams": before["streams"] | own["streams"]}
        text = json.dumps(whole, sort_keys=True, indent=0).encode()
        file.write_bytes(gzip.compress(text, mtime=0))


def _record(file: Path, python: str, arguments: list[str]) -> int:
    if arguments[0] == "-c":
        return subprocess.run([python, *arguments], check=False).returncode
    options = _options(arguments)
    at, behind = options["uds"], f"{options['uds']}.real"
    child = subprocess.Popen([python, *(behind if part == at else part for part in arguments)])
    recording: Recording = {"options": sorted(options), "gets": {}, "streams": {}}
    server = _Server(at, _Handler)
    server.recording, server.behind = recording, behind
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def keep(*_: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, keep)
    code = child.wait()
    _merge(file, configuration_of(options), recording)
    return max(code, 0)


def _play(file: Path, version: str, arguments: list[str]) -> int:
    if arguments[0] == "-c":
        return 0
    options = _options(arguments)
    recording = read(file).get(configuration_of(options))
    if recording is None:
        print(f"ValueError: never recorded: {configuration_of(options)}", file=sys.stderr)
        return 1
    if unknown := sorted(options.keys() - set(recording["options"])):
        print(f"api_server.py: error: unrecognized arguments: --{unknown[0]}", file=sys.stderr)
        return 2
    server = _Server(options["uds"], _Handler)
    server.recording, server.version = recording, version
    server.serve_forever()
    return 0


def main() -> int:
    mode, file, *rest = sys.argv[1:]
    if mode == "record":
        return _record(Path(file), rest[0], rest[1:])
    version = ""
    if rest[:1] == ["--version"]:
        version, rest = rest[1], rest[2:]
    return _play(Path(file), version, rest)


if __name__ == "__main__":
    sys.exit(main())
