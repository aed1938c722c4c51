"""Workers on devices that they claim (dynamic resource allocation): the scheduler chooses, a driver on a real kubelet
prepares, and the container runtime hands over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from dra_driver import DRIVER, ExampleDriver
from kube import Namespace, infer, manifest, ready, run, says

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

TEMPLATE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "one-gpu"},
    "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}}},
}


@pytest.fixture(scope="module")
def driver(kubeconfig: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleDriver]:
    """A driver that has one GPU on each node."""
    made = ExampleDriver(tmp_path_factory.mktemp("driver"), devices=1)
    yield made
    made.uninstall()


@pytest.fixture
def claiming(namespace: Namespace) -> Iterator[str]:
    """A WorkerClass whose workers claim one GPU, by a template in the namespace."""
    name = f"claim-{namespace.name}"
    made = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "WorkerClass",
        "metadata": {"name": name},
        "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
    }
    namespace.apply(TEMPLATE)
    run("kubectl", "apply", "-f", "-", stdin=yaml.safe_dump(made))
    yield name
    run("kubectl", "delete", "earlyexitservices", "--all", "-n", namespace.name)
    # A pod ends only with the driver that prepared its device, and keeps its share of the node until then.
    namespace.eventually(
        "the workers to end", lambda: not run("kubectl", "get", "pods", "-n", namespace.name, "-o", "name").strip()
    )
    run("kubectl", "delete", "workerclass", name)


def service(name: str, image: str, **worker: Any) -> dict[str, Any]:
    made: dict[str, Any] = manifest(image, updatePolicy={"type": "Recreate"})
    made["metadata"]["name"] = name
    made["spec"]["worker"] |= worker
    return made


def claims(namespace: Namespace) -> list[tuple[str, str, list[str]]]:
    """Of every claim its uid, its devices, and the pods that use it."""
    found = json.loads(run("kubectl", "get", "resourceclaims", "-n", namespace.name, "-o", "json"))["items"]
    return [
        (
            claim["metadata"]["uid"],
            " ".join(given["device"] for given in status["allocation"]["devices"]["results"]),
            [user["name"] for user in status["reservedFor"]],
        )
        for claim in found
        if "allocation" in (status := claim.get("status") or {})
    ]


def published() -> list[str]:
    """The devices that the driver has on all nodes."""
    slices = json.loads(run("kubectl", "get", "resourceslices", "-o", "json"))["items"]
    return [d["name"] for s in slices if s["spec"]["driver"] == DRIVER for d in s["spec"].get("devices") or ()]


def handed_over(namespace: Namespace, pod: str) -> str:
    """What the driver's CDI file puts into the container's environment."""
    return run("kubectl", "exec", pod, "-n", namespace.name, "-c", "worker", "--", "env")


def test_a_service_serves_on_the_device_that_it_claims_and_the_next_one_gets_it_when_it_is_given_back(
    namespace: Namespace, driver: ExampleDriver, claiming: str, good: str
) -> None:
    namespace.apply(service("tiny", good, className=claiming))
    namespace.eventually("the first service to be ready", lambda: ready(namespace))
    ((uid, device, (pod,)),) = claims(namespace)
    assert device == "gpu-0" and f"GPU_DEVICE_GPU_0_RESOURCE_CLAIM={uid}" in handed_over(namespace, pod)
    assert infer(namespace) == ["200"]

    namespace.apply(service("tiny", good, className=claiming, env=[{"name": "LOOK", "value": "new"}]))
    updated = ("False", "Recreated")
    namespace.eventually(
        "the update, which gives the device back and claims it again",
        lambda: (
            ready(namespace)
            and updated
            == tuple(namespace.condition("tiny", "WorkersUpdating").get(key) for key in ("status", "reason"))
        ),
    )
    ((newer, device, (pod,)),) = claims(namespace)
    assert newer != uid and f"GPU_DEVICE_GPU_0_RESOURCE_CLAIM={newer}" in handed_over(namespace, pod)

    namespace.apply(service("second", good, className=claiming))
    waits = says(
        namespace,
        "second",
        "Ready",
        "no node has free devices for claim gpu of ResourceClaimTemplate one-gpu (0/",
        "end a pod that uses one, add a node with one and its driver",
    )
    print(namespace.eventually("the second to say what it waits for", waits))
    assert ready(namespace) and infer(namespace) == ["200"]

    driver.offer(0)
    namespace.eventually("the device to be gone", lambda: not published())
    assert ready(namespace) and infer(namespace) == ["200"], "what serves on a device that its driver lost goes on"
    driver.offer(1)
    namespace.eventually("the device to be back", published)
    assert waits(), "it is in use still"

    run("kubectl", "delete", "earlyexitservice", "tiny", "-n", namespace.name)
    namespace.eventually("the second service to be ready", lambda: ready(namespace, "second"))
    assert infer(namespace, "second") == ["200"]
    assert [device for _, device, _ in claims(namespace)] == ["gpu-0"]
