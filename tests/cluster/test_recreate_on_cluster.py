"""A single worker that has all there is of a device: how it is updated, and what happens where that fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import pytest
from kube import Namespace, infer, manifest, ready, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

DEVICE = "example.com/gpu"


@pytest.fixture(scope="session")
def better(release: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return release(bundles.write_bundle(tmp_path_factory.mktemp("better") / "bundle", seed=2), "tiny-better")


@pytest.fixture
def device(kubeconfig: None) -> Iterator[None]:
    """One device on the one node, as "Advertise Extended Resources for a Node" of the Kubernetes documentation has
    it."""

    def patch(operation: dict[str, str]) -> None:
        path = {"path": f"/status/capacity/{DEVICE.replace('/', '~1')}"}
        node = json.loads(run("kubectl", "get", "nodes", "-o", "json"))["items"][0]["metadata"]["name"]
        run(
            "kubectl",
            "patch",
            "node",
            node,
            "--subresource=status",
            "--type=json",
            "-p",
            json.dumps([operation | path]),
        )

    patch({"op": "add", "value": "1"})
    yield
    patch({"op": "remove"})


def on_device(image: str, **policy: Any) -> dict[str, Any]:
    made = manifest(image, updatePolicy={"surgeDeadline": "5s", **policy})
    made["spec"]["worker"]["resources"]["limits"][DEVICE] = "1"
    return made


def test_the_only_worker_on_the_only_device_is_updated_where_the_user_allows_the_interruption(
    namespace: Namespace, device: None, good: str, better: str, broken: str
) -> None:
    def updating() -> tuple[str, str]:
        told = namespace.condition("tiny", "WorkersUpdating")
        return told.get("status", ""), told.get("reason", "")

    namespace.apply(on_device(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert infer(namespace) == ["200"]

    namespace.apply(on_device(better))
    namespace.eventually("the hold", lambda: updating() == ("True", "NoRoomToSurge"))
    assert DEVICE in namespace.condition("tiny", "Stalled")["message"]
    assert infer(namespace) == ["200"]

    namespace.apply(on_device(better, type="Recreate"))
    namespace.eventually("the update", lambda: ready(namespace) and updating() == ("False", "Recreated"))
    assert "no request was answered for about" in namespace.condition("tiny", "WorkersUpdating")["message"]
    assert infer(namespace) == ["200"]

    namespace.apply(on_device(broken, type="Recreate"))
    namespace.eventually("the broken one to be given up", lambda: updating() == ("True", "RecreateFailed"))
    namespace.eventually("what served before", lambda: namespace.condition("tiny", "Ready").get("status") == "True")
    assert "ramps.safetensors" in namespace.condition("tiny", "Stalled")["message"]
    assert infer(namespace) == ["200"]
    pods = json.loads(run("kubectl", "get", "pods", "-n", namespace.name, "-o", "json"))["items"]
    living = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    images = [v["image"]["reference"] for pod in living for v in pod["spec"]["volumes"] if "image" in v]
    assert images == [better]
