"""What a user of the real cluster lives through when something is wrong with what they asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import pytest
from kube import ROOT, Namespace, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

Load = Callable[[Path, str], str]


def manifest(image: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"oci://{image}"},
            "objective": {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.05"}},
            "worker": {"imagePullPolicy": "Never", "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}}},
            **spec,
        },
    }


@pytest.fixture(scope="session")
def good(release: Load, tmp_path_factory: pytest.TempPathFactory) -> str:
    return release(bundles.write_bundle(tmp_path_factory.mktemp("good") / "bundle"), "tiny-good")


@pytest.fixture(scope="session")
def broken(release: Load, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same bundle with one byte of its ramps changed after it was written."""
    folder = bundles.write_bundle(tmp_path_factory.mktemp("broken") / "bundle", seed=1)
    ramps = folder / "ramps.safetensors"
    content = bytearray(ramps.read_bytes())
    content[-1] ^= 1
    ramps.write_bytes(bytes(content))
    return release(folder, "tiny-broken")


def ready(namespace: Namespace) -> bool:
    return bool(
        namespace.condition("tiny", "Ready").get("status") == "True" and not namespace.condition("tiny", "Reconciling")
    )


def infer(namespace: Namespace, *, seconds: float = 0.0) -> list[str]:
    """Send requests from inside the cluster's network; what each was answered with."""
    command = [
        "cluster/exec-in-node",
        sys.executable,
        "tests/cluster/traffic.py",
        f"http://tiny.{namespace.name}.svc.cluster.local",
        str(seconds),
    ]
    return run(*command).split()


@pytest.fixture
def traffic(namespace: Namespace) -> Iterator[None]:
    """Requests for as long as the test lasts, at most ten minutes."""
    command = [
        "cluster/exec-in-node",
        sys.executable,
        "tests/cluster/traffic.py",
        f"http://tiny.{namespace.name}.svc.cluster.local",
        "600",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    yield
    process.terminate()
    process.wait(90)


def test_a_tampered_bundle_is_named_in_the_condition_while_the_older_one_goes_on_serving(
    namespace: Namespace, good: str, broken: str
) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert infer(namespace) == ["200"]
    namespace.apply(manifest(broken))
    stalled = namespace.eventually("the tampered bundle to be reported", lambda: namespace.condition("tiny", "Stalled"))
    assert stalled["reason"] == "InvalidBundle"
    assert "ramps.safetensors" in stalled["message"]
    assert namespace.condition("tiny", "Ready")["status"] == "True"
    assert infer(namespace) == ["200"]
    namespace.apply(manifest(good))
    namespace.eventually(
        "the service to settle again", lambda: ready(namespace) and not namespace.condition("tiny", "Stalled")
    )


def test_a_plan_of_an_unknown_ramp_is_refused_by_workers_and_rolled_back(
    namespace: Namespace, good: str, traffic: None
) -> None:
    namespace.apply(manifest(good, ramps={"mode": "Disabled"}))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    namespace.apply(
        manifest(good, ramps={"mode": "Pinned", "pin": {"ramps": [{"id": "r99-grid", "threshold": "0.1"}]}})
    )
    stalled = namespace.eventually("the pin to be refused", lambda: namespace.condition("tiny", "Stalled"))
    assert stalled["reason"] == "PinRejected"
    assert "r99-grid" in stalled["message"]
    rollout = namespace.get("ramprollouts", "tiny-1")["status"]
    assert (rollout["verdict"], rollout["reason"]) == ("RolledBack", "UnknownRamp")
    assert namespace.condition("tiny", "Ready")["status"] == "True"


def test_deleting_a_service_leaves_no_child(namespace: Namespace, good: str) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    run("kubectl", "delete", "earlyexitservice", "tiny", "-n", namespace.name)
    children = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,rampconfigs,ramprollouts"
    namespace.eventually("all children to go", lambda: namespace.list(children) == ["configmap/kube-root-ca.crt"])
