"""The program that runs before a worker: what it tells while it fetches, and what it leaves behind."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from processes import KEY, SERVICE_UID, TOKEN, eventually
from stores import Behaviour, Store

from offramp_core.protocol import FetchProgress, Observations
from offramp_operator.kube.failures import failure
from offramp_operator.shell.wire import decode
from offramp_worker.bundle.load import load_bundle

pytestmark = pytest.mark.slow  # each test starts a process
SECRET = "hunter2-not-for-logs"


@pytest.fixture(scope="module")
def archive(bundle_dir: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(bundle_dir, arcname=".")
    return buffer.getvalue()


@contextmanager
def fetching(folder: Path, uri: str, *options: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The program as a pod runs it; what it writes to stderr goes to a file, as the kubelet does."""
    public = base64.b64encode(KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()
    known = {k: v for k, v in os.environ.items() if not k.startswith("OFFRAMP_")} | {
        "OFFRAMP_HOST": "127.0.0.1",
        "OFFRAMP_ADMIN_PORT": "0",
        "OFFRAMP_SERVICE_UID": SERVICE_UID,
        "OFFRAMP_UID": "pod-1",
        "OFFRAMP_PUBLIC_KEY": public,
        "OFFRAMP_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
    }
    command = [sys.executable, "-m", "offramp_worker.main", "fetch", "--to", str(folder / "content")]
    (folder / "last-words").touch()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--last-words", str(folder / "last-words"), *options, "--", uri],
            env=known | env,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def trusting(store: Store, folder: Path, **keys: str) -> str:
    """A Secret's folder, with the store's authority."""
    secret = folder / "secret"
    secret.mkdir()
    for name, text in {"host": f"localhost:{store.port}", **keys}.items():
        (secret / name).write_text(text)
    store.ca.cert_pem.write_to_path(str(secret / "ca.crt"))
    return str(secret)


def logged(folder: Path, event: str) -> dict[str, Any]:
    whole, _, _ = (folder / "log").read_text().rpartition("\n")  # the last line may be only half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return next((line for line in lines if line["event"] == event), {})


def test_progress_is_told_on_the_admin_port_to_who_has_the_token(archive: bytes, tmp_path: Path) -> None:
    hold = threading.Event()
    with Store({"/b.tar": archive}, behaviour=Behaviour(authorization=f"Bearer {SECRET}", hold=hold)) as store:
        secret = trusting(store, tmp_path, bearerToken=SECRET)
        uri = f"https://localhost:{store.port}/b.tar"
        with fetching(tmp_path, uri, "--credentials", secret, "--allow-private-networks") as process:
            port = eventually(lambda: logged(tmp_path, "listening"), what="the admin port", deadline=120)["port"]
            url = f"http://127.0.0.1:{port}/v1/observations"

            def progress() -> FetchProgress | None:
                bearer = {"Authorization": f"Bearer {TOKEN}"}
                answer = httpx.get(url, params={"after": "0", "state": "1"}, headers=bearer, timeout=60)
                told = decode(answer.content, Observations)
                assert told.uid == "pod-1" and told.state is not None and not told.state.ready
                return told.state.fetching if told.state.fetching and told.state.fetching.done_bytes else None

            seen = eventually(progress, what="the first half")
            assert (seen.phase, seen.total_bytes) == ("downloading", len(archive))
            assert 0 < seen.done_bytes <= len(archive) // 2 + 1
            assert httpx.get(url, timeout=60).status_code == 401
            hold.set()
            assert process.wait(60) == 0
    assert load_bundle(tmp_path / "content").manifest.name
    assert logged(tmp_path, "fetched")
    assert SECRET not in (tmp_path / "log").read_text()
    assert (tmp_path / "last-words").read_text() == ""


@pytest.mark.parametrize(
    ("options", "behaviour", "reason", "said"),
    [
        ((), Behaviour(), "AddressRefused", "localhost is"),
        (("--allow-private-networks",), Behaviour(statuses=[403]), "FetchRefused", "403 Forbidden"),
        (
            ("--allow-private-networks", "--archive-digest", "sha256:" + "0" * 64),
            Behaviour(),
            "DigestMismatch",
            "has digest",
        ),
        (("--allow-private-networks", "--max-bytes", "1000"), Behaviour(), "BundleTooLarge", "more than the"),
    ],
    ids=["address", "refused", "digest", "size"],
)
def test_its_last_words_are_what_the_operator_tells(
    archive: bytes, tmp_path: Path, *, options: tuple[str, ...], behaviour: Behaviour, reason: str, said: str
) -> None:
    with Store({"/b.tar": archive}, behaviour=behaviour) as store:
        secret = trusting(store, tmp_path, username="me", password=SECRET)
        uri = f"https://localhost:{store.port}/b.tar?token={SECRET}"
        with fetching(tmp_path, uri, "--credentials", secret, *options) as process:
            assert process.wait(120) == 1
    words = (tmp_path / "last-words").read_text()
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}
    pod = {"metadata": {"name": "p"}, "status": {"initContainerStatuses": [{"name": "fetch-bundle", "state": ended}]}}
    assert failure(pod)[0] == reason and said in failure(pod)[1]
    assert SECRET not in words + (tmp_path / "log").read_text()
    assert not (tmp_path / "content").exists()


def test_it_ends_at_once_when_its_pod_is_deleted(archive: bytes, tmp_path: Path) -> None:
    with Store({"/b.tar": archive}, behaviour=Behaviour(hold=threading.Event())) as store:
        secret = trusting(store, tmp_path, bearerToken=SECRET)
        uri = f"https://localhost:{store.port}/b.tar"
        with fetching(tmp_path, uri, "--credentials", secret, "--allow-private-networks") as process:
            eventually(lambda: store.requests, what="the request", deadline=120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
