"""Services in the worker of one pool, on a real node, each at its own address: one has a corrupt bundle, one has its
plan refused, one leaves memory and is removed, and the others lose nothing; another worker takes them over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import pytest
from kube import Clients, Namespace, manifest, resources, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200, func_only=True)]

NAMES, CORRUPT = ("one", "two", "three"), "corrupt"


def write_bundle(folder: Path, name: str, *, seed: int) -> None:
    made = bundles.write_bundle(folder / name, seed=seed)
    written = json.loads((made / "manifest.json").read_bytes())
    (made / "manifest.json").write_text(json.dumps(written | {"name": name}))


@pytest.fixture
def claim(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A claim with the bundles of all services."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o755)
    for seed, name in enumerate((*NAMES, CORRUPT)):
        write_bundle(folder, name, seed=seed)
    (folder / CORRUPT / "ramps.safetensors").write_bytes(b"something else")
    volume = f"bundles-{namespace.name}"
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    spec = common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder), "type": "Directory"}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    asked = common | {"volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "bundles"}, "spec": asked}
    )
    yield "bundles"
    run("kubectl", "delete", "persistentvolume", volume, "--wait=false")
    shutil.rmtree(folder)


def pool() -> dict[str, Any]:
    worker = {"imagePullPolicy": "Never", "resources": resources("500m", "768Mi")}
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "WorkerPool",
        "metadata": {"name": "shared"},
        "spec": {"memory": "512Mi", "bundles": {"claimName": "bundles"}, "worker": worker},
    }


def shared(name: str, *, sharing: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    made = manifest("unused", **spec)
    made["metadata"]["name"] = name
    made["spec"] |= {"model": {"uri": f"pvc://bundles/{name}"}, "sharing": {"pool": "shared", **(sharing or {})}}
    del made["spec"]["worker"]
    return made


def is_ready(namespace: Namespace, name: str) -> bool:
    return bool(
        namespace.condition(name, "Ready").get("status") == "True" and not namespace.condition(name, "Reconciling")
    )


def serving_as(namespace: Namespace, name: str, reason: str) -> dict[str, Any]:
    """What Ready says, if it says so for this reason."""
    told = namespace.condition(name, "Ready")
    return told if told.get("reason") == reason else {}


def restarts(namespace: Namespace) -> list[int]:
    pods = json.loads(run("kubectl", "get", "pods", "-n", namespace.name, "-o", "json"))["items"]
    return [status["restartCount"] for pod in pods for status in pod["status"].get("containerStatuses", ())]


def test_services_share_a_worker_and_what_happens_to_one_is_its_own(namespace: Namespace, claim: str) -> None:
    namespace.apply(pool())
    for name in ("one", "two", CORRUPT):
        namespace.apply(shared(name))
    namespace.apply(shared("three", sharing={"unloadAfterSeconds": 10}))
    namespace.eventually("the services to be ready", lambda: all(is_ready(namespace, name) for name in NAMES))
    refused = namespace.eventually("the corrupt one to be told", lambda: namespace.condition(CORRUPT, "Stalled"))
    assert refused["reason"] == "InvalidBundle" and "ramps.safetensors" in refused["message"]
    assert namespace.list("deployments") == ["deployment.apps/shared-workers"]
    assert restarts(namespace) == [0]
    for name in NAMES:
        assert Clients(namespace, 0, service=name, model=name).end() == ["200"]

    clients = Clients(namespace, 600, service="one", model="one")
    try:
        reckless = [{"id": "r00-linear", "threshold": "1"}]
        namespace.apply(shared("two", ramps={"mode": "Pinned", "maxOverhead": "1", "pin": {"ramps": reckless}}))
        driving = Clients(namespace, 600, service="two", model="two")
        try:
            namespace.eventually(
                "the reckless plan to be refused",
                lambda: namespace.condition("two", "Stalled").get("reason") == "PinRejected",
            )
        finally:
            answers_of_two = driving.stop()
        assert set(answers_of_two) == {"200"}
        told = namespace.eventually("three out of memory", lambda: serving_as(namespace, "three", "Unloaded"))
        assert told["status"] == "True"
        assert Clients(namespace, 0, service="three", model="three").end() == ["200"]
        namespace.eventually("three in memory again", lambda: serving_as(namespace, "three", "Serving"))
        run("kubectl", "delete", "earlyexitservice", "three", "-n", namespace.name, "--timeout=60s")
        namespace.eventually(
            "three to have left the pool",
            lambda: "three" not in json.dumps(namespace.get("workerpool", "shared")["status"]),
        )
        assert Clients(namespace, 0, service="two", model="two").end() == ["200"]
    finally:
        answers = clients.stop()
    assert set(answers) == {"200"} and len(answers) > 100
    assert restarts(namespace) == [0]

    run("kubectl", "delete", "pods", "-l", "earlyexit.dev/worker-pool=shared", "-n", namespace.name, "--timeout=60s")
    namespace.eventually("another worker with both", lambda: is_ready(namespace, "one") and is_ready(namespace, "two"))
    for name in ("one", "two"):
        assert Clients(namespace, 0, service=name, model=name).end() == ["200"]
