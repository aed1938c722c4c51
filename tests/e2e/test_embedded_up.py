"""``offramp up`` from the outside: starting, editing, mistakes, two at once, the end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow  # real workers for every test; tests/operator has the shell with stand-ins

Up = Any
MakeUp = Callable[..., Up]


def test_up_serves_the_model_at_one_address_and_ends_cleanly(up: MakeUp, tools: Any) -> None:
    service = up()
    service.start()
    service.await_ready(2)
    reply = service.infer(tools.inputs(4))
    outputs = {o["name"]: o for o in reply["outputs"]}
    assert outputs["logits"]["shape"] == [4, tools.n_classes]
    assert reply["parameters"]["exit"] == "final,final,final,final"
    assert service.condition("WorkersAvailable")["status"] == "True"
    pids = service.worker_pids()
    assert len(pids) == 2 and all(tools.alive(pid) for pid in pids)

    page = service.events("web")[-1]["url"]

    def healthy() -> Any:  # both workers serve before the next pass says so on the page
        seen = httpx.get(f"{page}/api/v1/services/default/tiny", trust_env=False, timeout=20).json()
        return seen["row"]["verdict"] == "Healthy" and seen

    seen = tools.eventually(healthy, what="a healthy service on the page", state=service.tail)
    assert {w["kind"] for w in seen["workers"]} == {"process"}
    assert [n["role"] for n in seen["networks"]] == ["stable"] and len(seen["networks"][0]["ramps"]) > 0
    assert httpx.get(page, headers={"Host": "evil.example"}, trust_env=False, timeout=20).status_code == 421

    second = subprocess.run(
        [sys.executable, "-m", "offramp_cli", "up", str(service.file), "--state", str(service.state), "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2
    assert f"process {service.process.pid}" in second.stderr

    assert service.stop(signal.SIGINT) == 0
    assert not any(tools.alive(pid) for pid in pids)
    assert service.events("stopped")


def test_a_killed_shell_leaves_no_worker_behind_and_the_next_one_serves(up: MakeUp, tools: Any) -> None:
    service = up(replicas=1)
    service.start()
    service.await_ready(1)
    uid = service.service()["metadata"]["uid"]
    pids = service.worker_pids()
    assert service.stop(signal.SIGKILL) == -signal.SIGKILL
    tools.eventually(lambda: not any(tools.alive(pid) for pid in pids), what="the end of the workers")
    service.start()
    service.await_ready(1)
    service.infer(tools.inputs(1))
    assert service.service()["metadata"]["uid"] == uid
    assert service.service()["metadata"]["generation"] == 1


def test_edits_are_applied_and_wrong_ones_are_told_and_change_nothing(up: MakeUp, tools: Any) -> None:
    service = up(replicas=1)
    service.start()
    service.await_ready(1)
    spec = service.service()["spec"]

    service.write({**spec, "replicas": -1})
    refused = tools.eventually(lambda: service.events("manifest-refused"), what="the complaint", state=service.tail)
    assert "spec.replicas" in refused[-1]["message"]
    service.file.write_text("kind: [")
    tools.eventually(
        lambda: len(service.events("manifest-refused")) == 2, what="the second complaint", state=service.tail
    )
    assert service.service()["spec"] == spec
    assert service.service()["metadata"]["generation"] == 1

    service.write({**spec, "replicas": 2})
    service.await_ready(2)
    assert service.service()["metadata"]["generation"] == 2
    tools.eventually(
        lambda: service.status()["observedGeneration"] == 2, what="the new generation", state=service.status
    )


def test_a_broken_bundle_is_told_while_the_old_one_serves(up: MakeUp, tools: Any, bundle: Path, tmp_path: Path) -> None:
    service = up(replicas=1)
    service.start()
    service.await_ready(1)
    spec, uid = service.service()["spec"], json.loads((service.state / "workers.json").read_text())["workers"][0]["uid"]
    broken = shutil.copytree(bundle, tmp_path / "broken")
    (broken / "backbone.onnx").write_bytes(b"tampered")
    service.write({**spec, "model": {"uri": f"file://{broken}"}})

    def told() -> bool:
        return "backbone.onnx" in json.dumps(service.status().get("conditions", []))

    tools.eventually(told, what="the reason in a condition", state=lambda: (service.status(), service.tail()))
    assert service.condition("Ready")["status"] == "True"
    service.infer(tools.inputs(1))
    workers = json.loads((service.state / "workers.json").read_text())["workers"]
    assert uid in {w["uid"] for w in workers}

    service.write(spec)  # and back
    tools.eventually(
        lambda: [w["uid"] for w in json.loads((service.state / "workers.json").read_text())["workers"]] == [uid],
        what="the old worker alone",
        state=service.tail,
    )
    service.infer(tools.inputs(1))


def test_with_recreate_a_broken_bundle_gives_way_to_the_one_before_and_there_is_never_a_second_process(
    up: MakeUp, tools: Any, bundle: Path, tmp_path: Path
) -> None:
    service = up(replicas=1, updatePolicy={"type": "Recreate", "recreateDeadline": "60s"})
    service.start()
    service.await_ready(1)
    tools.eventually(lambda: service.status().get("update"), what="what serves being noted", state=service.status)
    (before,) = service.worker_pids()
    spec = service.service()["spec"]
    broken = shutil.copytree(bundle, tmp_path / "broken")
    (broken / "backbone.onnx").write_bytes(b"tampered")
    service.write({**spec, "model": {"uri": f"file://{broken}"}})
    seen: set[int] = set()

    def brought_back() -> bool:
        living = [pid for pid in service.worker_pids() if tools.alive(pid)]
        seen.update(living)
        assert len(living) <= 1, "the old one ends first"
        told = service.condition("WorkersUpdating") or {}
        return told.get("reason") == "RecreateFailed" and "was answered for about" in told["message"]

    tools.eventually(brought_back, what="the return", state=lambda: (service.status(), service.tail()))
    assert "backbone.onnx" in service.condition("Stalled")["message"]
    assert service.condition("Ready")["status"] == "True"
    assert len(seen - {before}) == 2, "the broken one, and the one that is as before"
    service.infer(tools.inputs(1))

    service.stop()
    service.start()
    service.await_ready(1)
    assert service.condition("WorkersUpdating")["reason"] == "RecreateFailed", "a restart tries nothing anew"
    other = tools.write_bundle(tmp_path / "other", seed=3)
    service.write({**spec, "model": {"uri": f"file://{other}"}})
    tools.eventually(
        lambda: (service.condition("WorkersUpdating") or {}).get("reason") == "Recreated",
        what="the end",
        state=service.tail,
    )
    service.infer(tools.inputs(1))


def test_a_model_change_replaces_the_workers_without_a_failed_request(up: MakeUp, tools: Any, tmp_path: Path) -> None:
    service = up(replicas=1)
    service.start()
    service.await_ready(1)
    rows = tools.inputs(16)
    truth = tools.answers(Path(service.service()["spec"]["model"]["uri"].removeprefix("file://")), rows)
    traffic = tools.Traffic(lambda: service.url, rows, truth, rate=20.0, clients=2)
    traffic.start()
    before = json.loads((service.state / "workers.json").read_text())["workers"][0]["uid"]
    other = tools.write_bundle(tmp_path / "other", seed=3)
    service.write({**service.service()["spec"], "model": {"uri": f"file://{other}"}})
    tools.eventually(
        lambda: before not in (service.state / "workers.json").read_text(), what="the replacement", state=service.tail
    )
    service.await_ready(1)
    traffic.stop()
    assert traffic.failures == []
    assert traffic.answered > 0


def test_a_fresh_state_folder_is_a_new_service(up: MakeUp, tools: Any) -> None:
    service = up(replicas=0)
    service.start()
    first = tools.eventually(service.service, what="the service")["metadata"]["uid"]
    assert service.stop() == 0
    shutil.rmtree(service.state)
    service.start()
    assert service.service()["metadata"]["uid"] != first
    assert (service.state / "signing-key").stat().st_mode & 0o077 == 0


def test_a_page_port_that_is_taken_is_told_with_what_to_do(up: MakeUp, tools: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = up(replicas=1)
        refused = subprocess.run(
            [
                sys.executable,
                "-m",
                "offramp_cli",
                "up",
                str(service.file),
                "--state",
                str(service.state),
                "--port",
                "0",
                "--web-port",
                str(port),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert refused.returncode == 2
        assert f"port {port}" in refused.stderr and "--web-port" in refused.stderr
