"""What clients see of the queue, on real workers: priorities, timeouts, refusals, disconnects, the cache, and draining
under load."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
from processes import WorkerProcess, decoded, document, eventually, infer_json, plan_for

from offramp_core.bundle import Profile
from offramp_core.errors import InvalidArgumentError
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.settings import settings_from_env

pytestmark = pytest.mark.slow  # real workers


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose profile promises a thousandth of the time that batches take, so that what is admitted can be
    late."""
    folder = bundles.write_bundle(tmp_path_factory.mktemp("hasty"))
    profile = msgspec.json.decode((folder / "profile.json").read_bytes())
    for batch in profile["batches"]:
        batch["exact_seconds"] *= 1e-3
    (folder / "profile.json").write_bytes(msgspec.json.encode(msgspec.convert(profile, Profile)))
    bundles.write_manifest(folder)
    return folder


@pytest.fixture(scope="module")
def plain(hasty: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(hasty, control_plane=False) as process:
        yield process


@pytest.fixture(scope="module")
def full(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """A worker with an objective, a cache and a control plane; the last test of this file drains it."""
    env = {"OFFRAMP_LATENCY_SECONDS": "0.1", "OFFRAMP_CACHE_BYTES": "1000000"}
    with WorkerProcess(bundle_dir, env=env) as process:
        yield process


def binary(x: np.ndarray[Any, Any], **parameters: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return header + x.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def ask(process: WorkerProcess, x: np.ndarray[Any, Any], **parameters: Any) -> httpx.Response:
    content, headers = binary(x, **parameters)
    with httpx.Client(base_url=f"http://{process.address}", timeout=60) as client:
        return client.post("/v2/models/tiny/infer", content=content, headers=headers)


@contextlib.contextmanager
def busy(process: WorkerProcess) -> Iterator[None]:
    """A queue that is never empty: clients that send many rows at the highest priority, over and over."""
    stop = threading.Event()
    content, headers = binary(bundles.inputs(250))

    def loop() -> None:
        with httpx.Client(base_url=f"http://{process.address}", timeout=60) as client:
            while not stop.is_set():
                assert client.post("/v2/models/tiny/infer", content=content, headers=headers).status_code == 200

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: _sample(process, "earlyexit_inflight") >= 250, what="a queue")
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- priority and timeout --------------------------------------------------------------------------


def test_tritonclient_sends_priority_and_timeout(plain: WorkerProcess, sessions: Sessions) -> None:
    x = bundles.inputs(2)
    with triton.InferenceServerClient(plain.address) as client:
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        result = client.infer("tiny", [tensor], priority=3, timeout=10_000_000)
    np.testing.assert_array_equal(result.as_numpy("logits"), sessions.exact(x))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"priority": -1}, "parameters.priority: is -1; it must be a whole number from 0 to"),
        ({"priority": "high"}, "parameters.priority: is 'high';"),
        ({"priority": True}, "parameters.priority: is True;"),
        ({"priority": 10**30}, "parameters.priority: is 1"),
        ({"timeout": 0.5}, "parameters.timeout: is 0.5; it must be a whole number from 0 to"),
        ({"timeout": [1]}, "parameters.timeout: is [1];"),
    ],
    ids=str,
)
def test_a_priority_or_timeout_that_is_none_gets_a_400(
    plain: WorkerProcess, parameters: dict[str, Any], message: str
) -> None:
    reply = ask(plain, bundles.inputs(1), **parameters)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(message)


def test_zero_is_the_default_of_both(plain: WorkerProcess) -> None:
    assert ask(plain, bundles.inputs(1), priority=0, timeout=0).status_code == 200


def test_a_request_whose_time_runs_out_in_the_queue_gets_a_504(plain: WorkerProcess) -> None:
    timeouts = itertools.cycle(
        (20_000, 100_000, 500_000, 2_000_000)
    )  # long enough to be admitted, too short for what comes

    def expired() -> Any:
        reply = ask(plain, bundles.inputs(1), priority=2, timeout=next(timeouts))
        return reply.status_code == 504 and reply

    with busy(plain):
        reply = eventually(expired, what="a request that is too late")
    assert reply.json()["error"].startswith("parameters.timeout: the time ran out")
    assert _rows(plain, outcome="expired") == 1


def test_a_timeout_below_the_models_own_time_gets_a_503_without_retry_after(plain: WorkerProcess) -> None:
    reply = ask(plain, bundles.inputs(32), timeout=10)
    assert (reply.status_code, reply.headers.get("Retry-After")) == (503, None)
    assert reply.json()["error"].startswith("parameters.timeout: is 10 us; this worker needs about ")


# --- refusals and disconnects ----------------------------------------------------------------------


def test_what_cannot_meet_the_objective_gets_a_429_with_the_seconds_to_wait(full: WorkerProcess) -> None:
    replies: list[httpx.Response] = []
    seeds = itertools.count(100)

    def refused() -> list[httpx.Response]:
        # by the profile one alone takes three times the objective: it may join a short queue, and the next one may not
        inputs = [bundles.inputs(300, seed=next(seeds)) for _ in range(3)]  # 900 of 1,024 places
        threads = [threading.Thread(target=lambda x=x: replies.append(ask(full, x))) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [reply for reply in replies if reply.status_code != 200]

    reply = eventually(refused, what="a refusal")[0]
    assert reply.status_code == 429
    assert reply.json()["error"].endswith("the latency objective of 0.1 s; retry later")
    assert int(reply.headers["Retry-After"]) >= 1
    assert full.is_ready()  # it has enough to do; that is no reason to send it nothing


def test_a_client_that_hangs_up_leaves_the_queue(plain: WorkerProcess) -> None:
    host, _, port = plain.address.partition(":")
    content, headers = binary(bundles.inputs(1), priority=9)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(content)}\r\n\r\n"

    def hang_up() -> bool:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + content)
            time.sleep(0.1)  # it waits in the queue by now, or was answered already and the next one may wait
        return _rows(plain, outcome="cancelled") > 0

    with busy(plain):
        eventually(hang_up, what="the end of a request that nobody waits for")
    eventually(lambda: _sample(plain, "earlyexit_inflight") == 0, what="nothing in flight")
    assert ask(plain, bundles.inputs(1)).status_code == 200


# --- settings, the cache ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OFFRAMP_BATCHING": "fifo"}, "OFFRAMP_BATCHING is 'fifo'; choose from offramp, tf-serving, clockwork, none"),
        ({"OFFRAMP_BATCHING": "clockwork"}, "OFFRAMP_BATCHING is 'clockwork', which needs OFFRAMP_LATENCY_SECONDS"),
        ({"OFFRAMP_CACHE_BYTES": "1 MB"}, "OFFRAMP_CACHE_BYTES is '1 MB'; it must be a whole number"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(bundle_dir: Path, env: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        settings_from_env({"OFFRAMP_BUNDLE": str(bundle_dir), **env})


def test_a_cached_reply_says_so_and_a_new_plan_ends_it(full: WorkerProcess, bundle_dir: Path) -> None:
    x = bundles.inputs(1)
    first, second = full.infer(x), full.infer(x)
    assert "cached" not in first["parameters"]
    assert second["parameters"] == {**first["parameters"], "cached": True}
    np.testing.assert_array_equal(first["logits"], second["logits"])
    full.deliver(document(plan_for(bundle_dir, {"r00-grid": "1"}))).raise_for_status()
    after = full.infer(x)["parameters"]
    assert (after["exit"], "cached" in after) == ("r00-grid", False)
    assert _sample(full, "earlyexit_cache_bytes") > 0


# --- draining --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_admitted_request_is_lost_when_a_loaded_worker_drains(
    full: WorkerProcess, bundle_dir: Path, sessions: Sessions
) -> None:
    """Clients on kept connections, as fast as they can, over a SIGTERM; the worker's own count of answers must be
    theirs."""
    full.deliver(document(plan_for(bundle_dir), epoch=2)).raise_for_status()
    x = bundles.inputs(8 * 500, seed=9)
    expected = sessions.exact(x).argmax(axis=1)
    before = _rows(full, outcome="ok")
    seen: Counter[str] = Counter()
    lock = threading.Lock()

    def client(first: int) -> None:
        with httpx.Client(base_url=f"http://{full.address}", timeout=30) as http:
            for row in range(first, len(x)):
                try:
                    reply = http.post("/v2/models/tiny/infer", json=infer_json(x[row][None]))
                except httpx.TransportError:  # the listener is closed, or this idle connection was
                    return
                outcome = str(reply.status_code)
                if reply.status_code == 200 and decoded(reply.json())["label"][0] != expected[row]:
                    outcome = "wrong"
                with lock:
                    seen[outcome] += 1

    clients = [threading.Thread(target=client, args=(500 * i,)) for i in range(8)]
    for thread in clients:
        thread.start()
    eventually(lambda: seen["200"] > 100, what="load")
    full.process.send_signal(signal.SIGTERM)
    assert full.process.wait(30) == 0
    for thread in clients:
        thread.join(30)
    rows = eventually(lambda: full.events("stopped"), what="the last word")[0]["rows"]
    assert set(seen) <= {"200", "429", "503"}
    assert rows["ok"] - before == seen["200"] > 100, (rows, seen)
    assert rows["unanswered"] == 0


def _sample(process: WorkerProcess, name: str) -> float:
    text = process.public.get("/metrics").raise_for_status().text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def _rows(process: WorkerProcess, *, outcome: str) -> float:
    text = process.public.get("/metrics").raise_for_status().text
    wanted = f'outcome="{outcome}"'
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("earlyexit_rows_total") and wanted in line
    )
