"""Workers that claim devices (dynamic resource allocation): Kubernetes' own controllers make the claims and its
scheduler gives devices to them; what drivers would publish of two nodes' devices is written by the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import BETTER, GOOD, Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

RESOURCES = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.example.com"
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-l4"}
WORKER: dict[str, Any] = {"resources": {}, "resourceClaims": [CLAIM]}


def write(f: Fleet, path: str, manifest: dict[str, Any]) -> None:
    answer = f.api.request("POST", f"{RESOURCES}/{path}", {"apiVersion": "resource.k8s.io/v1", **manifest})
    assert answer.status_code == 201, answer.text


def device_class(f: Fleet) -> str:
    """A class of the devices that the test's nodes have; nobody else's."""
    name = f"l4-{f.namespace}"
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].of == '{f.namespace}'"
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    write(f, "deviceclasses", {"kind": "DeviceClass", "metadata": {"name": name}, "spec": spec})
    return name


def offer(f: Fleet, node: str, *devices: str) -> None:
    """What a driver publishes of a node's devices."""
    listed = [{"name": d, "attributes": {"of": {"string": f.namespace}, "model": {"string": "L4"}}} for d in devices]
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool(node), "devices": listed}
    write(f, "resourceslices", {"kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})


def pool(node: str) -> dict[str, Any]:
    return {"name": node, "generation": 1, "resourceSliceCount": 1}


def template(f: Fleet, device_class: str, name: str = "one-l4") -> None:
    request = {"name": "gpu", "exactly": {"deviceClassName": device_class}}
    write(
        f,
        f"namespaces/{f.namespace}/resourceclaimtemplates",
        {
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name, "namespace": f.namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )


def claim(f: Fleet, device_class: str, name: str) -> None:
    """One that whoever names it shares."""
    request = {"name": "gpu", "exactly": {"deviceClassName": device_class}}
    made = {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": f.namespace}}
    spec = {"devices": {"requests": [request]}}
    write(f, f"namespaces/{f.namespace}/resourceclaims", made | {"spec": spec})


def given(f: Fleet) -> list[tuple[str, str]]:
    """Node and device of every claim that has one."""
    claims = f.api.request("GET", f"{RESOURCES}/namespaces/{f.namespace}/resourceclaims").json()["items"]
    results = [(c.get("status") or {}).get("allocation", {}).get("devices", {}).get("results", []) for c in claims]
    return sorted((r["pool"], r["device"]) for found in results for r in found)


def test_a_worker_gets_the_device_that_it_claims_and_where_all_are_in_use_the_condition_says_which_and_what_next(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes=2, replicas=1, worker=WORKER) as f:
            template(f, device_class(f))
            offer(f, f"{f.namespace}-0", "gpu-0")
            await f.serve(GOOD)
            assert given(f) == [(f"{f.namespace}-0", "gpu-0")]
            await f.edit(replicas=2)
            full = "no node has free devices for claim gpu of ResourceClaimTemplate one-l4 (0/2 nodes are available"
            await f.until(lambda: full in f.message("Ready"), what="the reason")
            assert "end a pod that uses one, add a node with one and its driver" in f.message("Ready")
            assert await f.bundles() == [GOOD.removeprefix("oci://")], "what serves goes on"
            offer(f, f"{f.namespace}-1", "gpu-0")
            await f.serve(GOOD, GOOD)
            assert given(f) == [(f"{f.namespace}-{i}", "gpu-0") for i in range(2)]

    tools.run(story())


def test_a_class_or_a_template_that_is_not_there_is_told_by_name_and_the_worker_comes_once_it_is(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes=1, replicas=1, worker=WORKER) as f:
            offer(f, f"{f.namespace}-0", "gpu-0")
            waits = "the scheduler waits for claim gpu of ResourceClaimTemplate one-l4; see that it exists"
            await f.until(lambda: waits in f.message("Ready"), what="the missing template")
            assert f.told()["Ready"] == ("False", "Unschedulable")
            template(f, f"l4-{f.namespace}")
            lacks = (
                f"there is no DeviceClass l4-{f.namespace}, which claim gpu of ResourceClaimTemplate one-l4 asks for"
            )
            await f.until(lambda: lacks in f.message("Ready"), what="the missing class")
            device_class(f)
            await f.serve(GOOD)
            assert given(f) == [(f"{f.namespace}-0", "gpu-0")]

    tools.run(story())


def test_workers_that_name_one_claim_share_its_device(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        shared = {"name": "gpu", "resourceClaimName": "shared"}
        async with fleet(nodes=1, replicas=2, worker=WORKER | {"resourceClaims": [shared]}) as f:
            waits = "the scheduler waits for claim gpu, ResourceClaim shared; see that it exists"
            await f.until(lambda: waits in f.message("Ready"), what="the missing claim")
            offer(f, f"{f.namespace}-0", "gpu-0")
            claim(f, device_class(f), "shared")
            await f.serve(GOOD, GOOD)
            assert given(f) == [(f"{f.namespace}-0", "gpu-0")]

    tools.run(story())


def test_an_update_on_the_only_device_waits_and_then_replaces_its_worker(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        policy = {"type": "Recreate"}
        async with fleet(nodes=1, replicas=1, worker=WORKER, updatePolicy=policy) as f:
            template(f, device_class(f))
            offer(f, f"{f.namespace}-0", "gpu-0")
            await f.serve(GOOD)
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, recreated=True)
            assert given(f) == [(f"{f.namespace}-0", "gpu-0")]

    tools.run(story())


def test_a_device_that_its_driver_takes_back_leaves_the_worker_serving_and_the_next_one_waiting(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes=1, replicas=1, worker=WORKER) as f:
            template(f, device_class(f))
            offer(f, f"{f.namespace}-0", "gpu-0", "gpu-1")
            await f.serve(GOOD)
            answer = f.api.request("DELETE", f"{RESOURCES}/resourceslices/{f.namespace}-0")
            assert answer.status_code == 200, answer.text
            await f.edit(replicas=2)
            await f.until(lambda: "no node has free devices for claim gpu" in f.message("Ready"), what="the reason")
            assert await f.bundles() == [GOOD.removeprefix("oci://")]

    tools.run(story())
