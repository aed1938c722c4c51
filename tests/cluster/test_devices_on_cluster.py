"""Workers on GPUs of a real kubelet, which a device plugin advertises: given, in use, sick, gone, or never there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import pytest
import yaml
from device_plugin import DevicePlugin
from kube import ROOT, Namespace, infer, manifest, ready, run, says

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

MOST_IN_VAIN = 20  # pods that are made before the operator has seen three of them end
GPU, MIG, NO_MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"


def node() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("kubectl", "get", "nodes", "-o", "json"))["items"][0]
    return found


def offered(resource: str) -> str:
    return str(node()["status"]["allocatable"].get(resource, "0"))


def plugins_folder() -> Path:
    """Where the first node's kubelet has its sockets, as this machine sees it."""
    local = Path(ROOT) / "build" / "cluster" / "node1" / "kubelet"
    if local.exists():
        return local / "device-plugins"
    pid = run("docker", "inspect", "--format", "{{.State.Pid}}", node()["metadata"]["name"]).strip()
    return Path(f"/proc/{pid}/root/var/lib/kubelet/device-plugins")


@contextmanager
def plugged_in(namespace: Namespace, resource: str, device: str) -> Iterator[DevicePlugin]:
    """A node that has the only device of its kind in the cluster."""
    plugin = DevicePlugin(plugins_folder(), resource, device)
    try:
        namespace.eventually(f"the node to offer {device}", lambda: offered(resource) == "1")
        yield plugin
    finally:
        plugin.end()


@pytest.fixture
def gpu(namespace: Namespace) -> Iterator[DevicePlugin]:
    with plugged_in(namespace, GPU, "gpu-0") as plugin:
        yield plugin


@pytest.fixture
def mig(namespace: Namespace) -> Iterator[DevicePlugin]:
    with plugged_in(namespace, MIG, "MIG-0") as plugin:
        yield plugin


@pytest.fixture
def one_gpu(namespace: Namespace) -> Iterator[str]:
    """A WorkerClass that asks for one GPU."""
    name = f"gpu-{namespace.name}"
    made = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "WorkerClass",
        "metadata": {"name": name},
        "spec": {"resources": {"limits": {GPU: "1"}}},
    }
    run("kubectl", "apply", "-f", "-", stdin=yaml.safe_dump(made))
    yield name
    run("kubectl", "delete", "workerclass", name)


def service(image: str, *, name: str = "tiny", worker: dict[str, Any], **spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = manifest(image, **spec)
    made["metadata"]["name"] = name
    own = made["spec"]["worker"]
    own["resources"]["limits"] |= worker.get("limits", {})
    own |= {key: value for key, value in worker.items() if key != "limits"}
    return made


def test_a_service_gets_the_only_gpu_keeps_it_through_an_update_and_serves_when_it_is_sick(
    namespace: Namespace, gpu: DevicePlugin, one_gpu: str, good: str
) -> None:
    recreate: dict[str, Any] = {"updatePolicy": {"type": "Recreate"}}
    namespace.apply(service(good, worker={"className": one_gpu}, **recreate))
    namespace.eventually("the first service to be ready", lambda: ready(namespace))
    assert (gpu.allocated, infer(namespace)) == (["gpu-0"], ["200"])

    namespace.apply(service(good, name="second", worker={"className": one_gpu}))
    waits = says(
        namespace,
        "second",
        "Ready",
        f"no node has a free {GPU}, since other pods use those of 1 node",
        "end one of those pods",
        f"resources.limits of WorkerClass {one_gpu}",
    )
    print(namespace.eventually("the second to say what it waits for", waits))
    assert ready(namespace) and infer(namespace) == ["200"]
    run("kubectl", "delete", "earlyexitservice", "second", "-n", namespace.name)

    namespace.apply(service(good, worker={"className": one_gpu, "env": [{"name": "LOOK", "value": "new"}]}, **recreate))
    updated = ("False", "Recreated")
    namespace.eventually(
        "the update",
        lambda: (
            ready(namespace)
            and updated
            == tuple(namespace.condition("tiny", "WorkersUpdating").get(key) for key in ("status", "reason"))
        ),
    )
    assert (gpu.allocated, infer(namespace)) == (["gpu-0", "gpu-0"], ["200"])

    gpu.report("gpu-0", healthy=False)
    where = f"device gpu-0 of {GPU} on node {node()['metadata']['name']}"
    sick = says(namespace, "tiny", "DevicesHealthy", f" serves with {where}")
    print(namespace.eventually("the sick device to be told", sick))
    assert namespace.condition("tiny", "Ready")["status"] == "True" and infer(namespace) == ["200"]
    gpu.report("gpu-0", healthy=True)
    namespace.eventually("the device to be well", lambda: not namespace.condition("tiny", "DevicesHealthy"))

    gpu.end()
    namespace.eventually("the node to offer no GPU", lambda: offered(GPU) == "0")
    assert ready(namespace) and infer(namespace) == ["200"]


def test_a_device_that_is_refused_and_a_profile_that_no_node_offers_are_told_while_what_serves_goes_on(
    namespace: Namespace, mig: DevicePlugin, good: str
) -> None:
    mig.refuses = "no slices today"
    namespace.apply(service(good, worker={"limits": {MIG: "1"}}))
    where = f"node {node()['metadata']['name']} rejected tiny-"
    told = says(namespace, "tiny", "Ready", where, MIG, "no slices today", "so the next one is made at")
    print(namespace.eventually("the refusal to be told", told))
    assert namespace.condition("tiny", "Ready")["reason"] == "RejectedByNode"
    in_vain = ("pods", "-n", namespace.name, "--field-selector", "status.phase=Failed")
    assert len(run("kubectl", "get", *in_vain, "-o", "name").split()) <= MOST_IN_VAIN
    mig.refuses = ""
    run("kubectl", "delete", *in_vain)
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert mig.allocated == ["MIG-0"]
    namespace.apply(service(good, worker={"limits": {NO_MIG: "1"}}, updatePolicy={"surgeDeadline": "5s"}))
    told = says(
        namespace, "tiny", "Stalled", f"no node offers {NO_MIG}", "spec.worker.resources.limits what nodes do offer"
    )
    print(namespace.eventually("the profile to be told", told))
    assert namespace.condition("tiny", "Ready")["status"] == "True" and infer(namespace) == ["200"]


def test_a_bundle_for_a_gpu_whose_workers_ask_for_none_says_so(
    namespace: Namespace, release: Callable[[Path, str], str], tmp_path: Path
) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle", executor="onnxruntime-cuda")
    namespace.apply(manifest(release(folder, "tiny-cuda")))
    told = says(
        namespace,
        "tiny",
        "Ready",
        "the bundle was prepared for cuda, and workers ask for no device",
        "spec.worker.resources.limits, such as nvidia.com/gpu",
        "or in a WorkerClass",
    )
    print(namespace.eventually("the bundle to be told", told))
    assert namespace.condition("tiny", "Stalled")["reason"] == "InvalidBundle"
