"""Live training on the real cluster: a Job trains ramps on what workers captured, and the new set is certified,
canaried and promoted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube import ROOT, Namespace, manifest, ready, run

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from identity_bundle import write_bundle
from test_embedded_training import with_spoiled_heads

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]


def sender(namespace: Namespace, seconds: float) -> list[str]:
    url = f"http://tiny.{namespace.name}.svc.cluster.local"
    return ["cluster/exec-in-node", sys.executable, "tests/cluster/fresh_traffic.py", url, str(seconds)]


@pytest.fixture
def store(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """The folder behind the claim ``ramps``, which user 65532 may write."""
    folder, volume = tmp_path / "store", f"ramps-{namespace.name}"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and parent != Path("/") and not parent.stat().st_mode & 0o005:
            parent.chmod(0o755)
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    spec = common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder), "type": "Directory"}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    asked = common | {"volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ramps"}, "spec": asked})
    yield folder
    run("kubectl", "delete", "persistentvolume", volume, "--wait=false")


@pytest.fixture
def traffic(namespace: Namespace) -> Iterator[None]:
    process = subprocess.Popen(sender(namespace, 600), cwd=ROOT, stdout=subprocess.DEVNULL)
    yield
    process.terminate()
    process.wait(60)


def counted(namespace: Namespace, *, seconds: float = 2.0) -> dict[str, int]:
    found: dict[str, int] = json.loads(run(*sender(namespace, seconds)))
    return found


def reasons(namespace: Namespace) -> set[str]:
    events = json.loads(run("kubectl", "get", "events", "-n", namespace.name, "-o", "json"))["items"]
    return {str(event["reason"]) for event in events}


def test_ramps_trained_by_a_job_are_promoted_and_leave_no_input_behind(
    namespace: Namespace,
    release: Callable[[Path, str], str],
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    bundle = with_spoiled_heads(write_bundle(tmp_path / "bundle"))
    own = json.loads((bundle / "manifest.json").read_text())["ramp_set_digest"]
    ramps = {"maxOverhead": "0.5", "training": "LiveTraffic", "store": {"claimName": "ramps"}}
    limits = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100m", "memory": "256Mi"}}}
    service = manifest(
        release(bundle, "tiny-spoiled"), ramps=ramps, rollout={"steps": [{"weight": 50}], "cooldown": "20s"}
    )
    service["spec"]["worker"] |= limits
    namespace.apply(service)
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    # One request: with some hundred rows more, even heads that fit hardly anything may have a plan that is proven.
    assert counted(namespace, seconds=0.0)["left"] == 0
    request.getfixturevalue("traffic")

    def status() -> dict[str, Any]:
        found: dict[str, Any] = namespace.get("earlyexitservice", "tiny")["status"]
        return found

    def sets() -> dict[str, Any]:
        return dict(status().get("rampSets", {}))

    (job,) = namespace.eventually("a training to begin", lambda: namespace.list("jobs"))
    new = namespace.eventually("a trained set that serves", lambda: sets().get("current"), seconds=600)
    assert new != own
    told = namespace.get("job", job.partition("/")[2])
    assert told["status"]["succeeded"] == 1 and told["spec"]["ttlSecondsAfterFinished"] > 0
    stable = namespace.get("rampconfig", status()["stableConfig"])
    assert stable["spec"]["rampSetDigest"] == new
    assert stable["status"]["certificates"][0]["rampSetDigest"] == new
    events = {"TrainingStarted", "RampsTrained", "Promoted"}
    # Written after the status that they are about.
    namespace.eventually("their events", lambda: events <= reasons(namespace))
    assert not namespace.condition("tiny", "RampTraining")
    (kept,) = (store / "offramp" / "tiny" / "ramp-sets").iterdir()
    assert kept.name == new.removeprefix("sha256:")

    def share() -> float:
        seen = counted(namespace)
        assert seen["failed"] == 0
        return seen["left"] / seen["answered"]

    namespace.eventually("most inputs to leave early", lambda: share() > 0.3, seconds=180)
    run("kubectl", "delete", "earlyexitservice", "tiny", "-n", namespace.name)
    namespace.eventually("all that it had to go", lambda: namespace.list("jobs,pods,deployments,rampconfigs") == [])
    assert list((store / "offramp" / "tiny" / "captures").rglob("*.npz")) == []
