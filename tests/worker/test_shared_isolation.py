"""What happens to one model of a shared worker costs the others nothing: each a story with a real process."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bundles
import httpx
import numpy as np
import pytest
from processes import document, eventually, infer_bytes, infer_json, plan_for
from shared import SharedProcess, shared, write_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "c")):
        bundles.write_bundle(folder / name, seed=seed)
    return folder


def listed(folder: Path, *names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": name, "bundle": str(folder / name), **fields} for name in names]


@contextmanager
def steady(worker: SharedProcess, model: str) -> Iterator[list[int]]:
    """A client that asks a model one request after the other; the status of each."""
    statuses: list[int] = []
    stop, began = threading.Event(), threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=worker.public.base_url, timeout=60) as client:
            while not stop.is_set():
                reply = client.post(f"/v2/models/{model}/infer", json=infer_json(bundles.inputs(2)))
                statuses.append(reply.status_code)
                began.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(60)
    try:
        yield statuses
    finally:
        more = len(statuses) + 5  # what comes afterwards is answered as well
        eventually(lambda: len(statuses) >= more or not thread.is_alive(), what="requests after the story")
        stop.set()
        thread.join()


def test_a_corrupt_bundle_is_refused_alone_and_loaded_once_it_is_mended(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder / "b", tmp_path / "b"))
    good = (broken / "ramps.safetensors").read_bytes()
    (broken / "ramps.safetensors").write_bytes(good[:-1] + b"?")
    file = write_models(tmp_path, [*listed(folder, "a"), *listed(tmp_path, "b")])
    with shared(file) as worker, steady(worker, "a") as statuses:
        refused = worker.ask("b", bundles.inputs(1))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "ramps.safetensors: its SHA-256 is not the one in manifest.json" in refused.json()["error"]
        assert worker.index()["b"]["state"] == "UNAVAILABLE"
        again = worker.load("b")
        assert again.status_code == 400 and "ramps.safetensors" in again.json()["error"]
        (broken / "ramps.safetensors").write_bytes(good)
        worker.load("b").raise_for_status()
        worker.answer("b", bundles.inputs(1))
    assert set(statuses) == {200}


def test_a_worker_whose_every_bundle_is_broken_is_not_ready_and_says_why(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, listed(tmp_path, "a", "b"))
    with shared(file, wait_ready=False) as worker:
        eventually(lambda: worker.events("models-loaded"), what="the end of loading")
        reply = worker.public.get("/v2/health/ready")
        assert reply.status_code == 503 and "manifest.json: cannot be read" in reply.text
        assert worker.public.get("/v2/health/live").status_code == 200


def test_answers_that_are_no_numbers_are_that_models_alone(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, listed(folder, "a", "b", serviceUid="uid"))
    x = bundles.inputs(4)
    with shared(file) as worker, steady(worker, "a") as statuses:
        expected = worker.answer("a", x)
        worker.deliver_to("b", document(plan_for(folder / "b", {"r00-grid": "0.5"}), service_uid="uid", audit_rate=1.0))
        huge = np.full_like(x, 3e38)
        for _ in range(5):
            reply = worker.ask("b", huge)
            assert reply.status_code == 200 and reply.json()["outputs"][0]["data"][0] is None
        assert worker.metric("earlyexit_failed_batches_total", model="a", arm="stable") == 0
        np.testing.assert_allclose(worker.answer("a", x)["logits"], expected["logits"], rtol=1e-5)
        assert worker.answer("b", x)["label"].shape == (4,)
    assert set(statuses) == {200}


def test_a_flood_of_one_model_turns_away_its_own_requests_alone(folder: Path, tmp_path: Path) -> None:
    file = write_models(tmp_path, listed(folder, "a", "b", "c"))
    body, headers = infer_bytes(bundles.inputs(512))  # numbers as text take a worker longer to read than to answer
    statuses: list[int] = []
    with shared(file) as worker:
        stop = threading.Event()

        def flood() -> None:
            with httpx.Client(base_url=worker.public.base_url, timeout=60) as client:
                while not stop.is_set():
                    statuses.append(client.post("/v2/models/a/infer", content=body, headers=headers).status_code)

        with ThreadPoolExecutor(8) as clients:
            for _ in range(8):
                clients.submit(flood)
            try:
                eventually(lambda: 429 in statuses, what="a flood that fills the queue of its model")
                with steady(worker, "b") as of_b, steady(worker, "c") as of_c:
                    pass
            finally:
                stop.set()
        assert set(of_b) == set(of_c) == {200}
        assert 200 in statuses, "it keeps its own share"
        for name in ("b", "c"):
            assert worker.metric("earlyexit_requests_total", model=name, outcome="rejected") == 0


def test_a_canary_that_kills_the_process_is_known_of_its_model_alone(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    file = write_models(tmp_path, listed(folder, "a", "b", serviceUid="uid"))
    env = {"OFFRAMP_STATE_DIR": str(state)}
    stable = {name: plan_for(folder / name) for name in ("a", "b")}
    canary = {name: plan_for(folder / name, {"r00-grid": "0.5"}, execution="ResultsOnly") for name in ("a", "b")}

    def with_canary(name: str) -> Any:
        return document(stable[name], canary=canary[name], weight=100, epoch=4, accuracy_budget=0.9, service_uid="uid")

    with shared(file, env=env) as worker:
        for name in ("a", "b"):
            worker.deliver_to(name, with_canary(name)).raise_for_status()
        stop = threading.Event()

        def load() -> None:
            body = infer_json(bundles.inputs(500))
            with httpx.Client(base_url=worker.public.base_url, timeout=60) as client:
                while not stop.is_set():
                    try:
                        client.post("/v2/models/a/infer", json=body)
                    except httpx.TransportError:
                        return

        thread = threading.Thread(target=load)
        thread.start()

        def caught_in_a_batch() -> bool:
            worker.process.send_signal(signal.SIGSTOP)
            status = Path(f"/proc/{worker.process.pid}/status")
            eventually(lambda: "State:\tT" in status.read_text(), what="a stopped process")
            if (state / "a" / "crash-marker").read_bytes()[:20].endswith(b"4"):
                worker.process.kill()
                return True
            worker.process.send_signal(signal.SIGCONT)
            return False

        eventually(caught_in_a_batch, what="a canary batch of a in execution")
        stop.set()
        thread.join()
    with shared(file, env=env) as worker:
        assert (worker.state_of("a").crashed_epoch, worker.state_of("b").crashed_epoch) == (4, None)
        for name, arm in (("a", "stable"), ("b", "canary")):
            worker.deliver_to(name, with_canary(name)).raise_for_status()
            assert worker.answer(name, bundles.inputs(1))["parameters"]["arm"] == arm
