"""Bundles fetched from an S3 server that others wrote: Versity's gateway checks signatures and answers ranges by its
own code."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.ports import free_port
from httpx_auth import AWS4Auth
from stores import HOST, authority
from test_fetch import Ticking, packed, refused, secret

from offramp_worker.bundle.load import load_bundle
from offramp_worker.fetch.fetch import fetch
from offramp_worker.fetch.network import client
from offramp_worker.fetch.source import Source, source

pytestmark = pytest.mark.slow  # a server of its own

ROOT = Path(__file__).parents[2]
KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "s3cr3t/+key"}
REGION = "eu-test-1"


class Relay(socketserver.ThreadingTCPServer):
    """A way to a server that breaks: each of ``cuts`` ends a connection after so many bytes of answers."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, upstream: int) -> None:
        self.upstream, self.cuts, self.answered = upstream, list[int](), 0
        super().__init__(("127.0.0.1", 0), _Link)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.server_address[1]}"


class _Link(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        room = self.server.cuts.pop(0) if self.server.cuts else None
        with socket.create_connection(("127.0.0.1", self.server.upstream)) as upstream:
            threading.Thread(target=self._ask, args=(upstream,), daemon=True).start()
            with contextlib.suppress(OSError):
                while (room is None or room > 0) and (piece := upstream.recv(4096)):
                    self.request.sendall(piece)
                    self.server.answered += len(piece)
                    room = None if room is None else room - len(piece)

    def _ask(self, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := self.request.recv(4096):
                upstream.sendall(piece)


@dataclass
class Bucket:
    """The bucket ``models`` of a running server, reached through ``relay``."""

    relay: Relay
    http: httpx.Client
    folder: Path

    def put(self, key: str, content: bytes) -> None:
        auth = AWS4Auth(
            access_id=KEYS["AWS_ACCESS_KEY_ID"], secret_key=KEYS["AWS_SECRET_ACCESS_KEY"], region=REGION, service="s3"
        )
        url = httpx.URL(f"https://localhost:{self.relay.upstream}").join(f"/models/{key}")
        trusted = ssl.create_default_context(cafile=self.folder / "ca.pem")
        answer = httpx.put(url, content=content, auth=auth, verify=trusted, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text

    def source(self, key: str, *, region: str = REGION, **keys: str) -> Source:
        folder = secret(
            self.folder / f"secret-{len(list(self.folder.iterdir()))}",
            host=f"{HOST}:{self.relay.server_address[1]}",
            **KEYS | keys,
        )
        return source(f"s3://models/{key}", endpoint=self.relay.url, region=region, credentials=folder)

    def fetch(self, wanted: Source, into: Path, *, ticking: Ticking | None = None, **options: Any) -> Path:
        return fetch(wanted, into / "bundle", client=self.http, clock=(ticking or Ticking()).clock, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the server."""
    tools = subprocess.run([ROOT / "cluster" / "tools", "s3"], check=True, stdout=subprocess.PIPE, text=True)
    folder, port = tmp_path_factory.mktemp("s3"), free_port()
    (folder / "data" / "models").mkdir(parents=True)
    _, certificate = authority()
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    command: list[Any] = [
        Path(tools.stdout.strip()) / "versitygw",
        "--port",
        f"127.0.0.1:{port}",
        "--access",
        KEYS["AWS_ACCESS_KEY_ID"],
        "--secret",
        KEYS["AWS_SECRET_ACCESS_KEY"],
        "--region",
        REGION,
        "--cert",
        folder / "cert.pem",
        "--key",
        folder / "key.pem",
        "--quiet",
        "posix",
        "--sidecar",
        folder / "meta",
        folder / "data",
    ]
    (folder / "meta").mkdir()
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def bucket(server: int, tmp_path: Path) -> Iterator[Bucket]:
    ca, _ = authority()
    folder = tmp_path / "bucket"
    folder.mkdir()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    options: dict[str, Any] = {
        "allow_private": True,
        "ca_file": folder / "ca.pem",
        "resolver": lambda host, port: ["127.0.0.1"],
    }
    with Relay(server) as relay, client(**options) as http:
        yield Bucket(relay, http, folder)
        relay.shutdown()


@pytest.fixture(scope="session")
def archive(bundle_dir: Path) -> bytes:
    return packed(bundle_dir)


@pytest.mark.parametrize("key", ["digits.tar", "v1.2/digits (new) +ä=~.tar"])
def test_the_server_accepts_the_signature_of_a_fetch(bucket: Bucket, archive: bytes, tmp_path: Path, key: str) -> None:
    bucket.put(key, archive)
    assert load_bundle(bucket.fetch(bucket.source(key), tmp_path)).manifest.name


def test_the_server_refuses_another_secret_and_another_region(bucket: Bucket, archive: bytes, tmp_path: Path) -> None:
    bucket.put("digits.tar", archive)
    wrong = bucket.source("digits.tar", AWS_SECRET_ACCESS_KEY="another")
    assert "403" in refused(lambda: bucket.fetch(wrong, tmp_path), "FetchRefused")
    elsewhere = bucket.source("digits.tar", region="us-east-1")
    refused(lambda: bucket.fetch(elsewhere, tmp_path), "FetchRefused")
    absent = bucket.source("absent.tar")
    assert "404" in refused(lambda: bucket.fetch(absent, tmp_path), "FetchRefused")


def test_a_broken_download_goes_on_where_it_broke(bucket: Bucket, archive: bytes, tmp_path: Path) -> None:
    bucket.put("digits.tar", archive)
    before, third = bucket.relay.answered, len(archive) // 3
    bucket.relay.cuts = [third, third]
    assert load_bundle(bucket.fetch(bucket.source("digits.tar"), tmp_path))
    assert bucket.relay.answered - before < 1.4 * len(archive), "what had arrived was sent again"


def test_an_object_that_changed_meanwhile_is_never_mixed_with_the_old_one(
    bucket: Bucket, archive: bytes, bundle_dir: Path, tmp_path: Path
) -> None:
    other = packed(bundle_dir, inside="other")
    bucket.put("digits.tar", archive)
    bucket.relay.cuts = [len(archive) // 2]
    ticking = Ticking()

    def change(seconds: float) -> None:
        bucket.put("digits.tar", other)

    ticking.sleep = change  # type: ignore[method-assign]
    digest = "sha256:" + hashlib.sha256(other).hexdigest()
    assert load_bundle(bucket.fetch(bucket.source("digits.tar"), tmp_path, ticking=ticking, archive_digest=digest))
