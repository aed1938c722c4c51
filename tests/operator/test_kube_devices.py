"""What is read of devices from pods, in the words of Kubernetes 1.36: the scheduler's ``FitError`` and preemption, and
the health that the kubelet writes into a container's status."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_operator.kube.devices import requested, shortage, unhealthy
from offramp_operator.kube.kinds import CLASS_LABEL, POD
from offramp_operator.kube.pods import endpoint
from offramp_operator.kube.trim import trim

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-2g.20gb"
NOT_HELPFUL, NO_VICTIMS = "Preemption is not helpful for scheduling", "No preemption victims found for incoming pod"


def pod(*, asked: str = "1", what: str = GPU, labels: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    """As the operator keeps it."""
    worker = {"name": "worker", "image": "w", "resources": {"limits": {"cpu": "1", what: asked}}}
    meta = {"name": "digits-1", "namespace": "a", "uid": "u", "resourceVersion": "1", "labels": labels or {}}
    return trim(POD, {"metadata": meta, "spec": {"nodeName": "n1", "containers": [worker]}, "status": status})


def fit_error(n: int, counted: str, *preemption: str) -> str:
    after = f" preemption: 0/{n} nodes are available: {', '.join(preemption)}." if preemption else ""
    return f"0/{n} nodes are available: {counted}. no new claims to deallocate,{after}"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        pytest.param(
            fit_error(1, f"1 Insufficient {GPU}", f"1 {NO_VICTIMS}"),
            f"no node has a free {GPU}, since other pods use those of 1 node",
            id="other pods have the only one",
        ),
        pytest.param(
            fit_error(1, f"1 Insufficient {GPU}", f"1 {NOT_HELPFUL}"), f"no node offers {GPU}", id="no node has any"
        ),
        pytest.param(
            fit_error(5, f"5 Insufficient {GPU}", f"2 {NO_VICTIMS}", f"3 {NOT_HELPFUL}"),
            f"no node has a free {GPU}, since other pods use those of 2 nodes",
            id="some have it",
        ),
        pytest.param(
            fit_error(3, f"1 node(s) had untolerated taint(s), 2 Insufficient {GPU}", f"3 {NOT_HELPFUL}"),
            f"no node that takes these workers offers {GPU}",
            id="one that may have it is tainted",
        ),
        pytest.param(
            fit_error(3, f"1 node(s) were unschedulable, 2 Insufficient {GPU}", f"1 {NO_VICTIMS}", f"2 {NOT_HELPFUL}"),
            f"no node has a free {GPU}, since other pods use those of 1 node",
            id="one is cordoned",
        ),
        pytest.param(
            fit_error(2, f"1 Insufficient cpu, 2 Insufficient {GPU}", f"1 {NO_VICTIMS}", f"1 {NOT_HELPFUL}"),
            f"no node has a free {GPU}",
            id="which of two resources a node lacks is not told",
        ),
        pytest.param(
            fit_error(2, f"1 node(s) didn't match pod anti-affinity rules, 1 Insufficient {GPU}", f"2 {NOT_HELPFUL}"),
            f"no node has a free {GPU}",
            id="nor what pods that leave would change",
        ),
        pytest.param(
            f"0/2 nodes are available: 2 Insufficient {GPU}.", f"no node has a free {GPU}", id="no preemption"
        ),
        pytest.param(
            f"0/2 nodes are available: 2 Insufficient {GPU}. preemption: not eligible due to preemptionPolicy=Never.",
            f"no node has a free {GPU}",
            id="nobody may be preempted",
        ),
    ],
)
def test_whether_devices_are_in_use_or_not_there_is_read_from_what_preemption_would_help(
    message: str, cause: str
) -> None:
    found = shortage(pod(), message)
    assert found is not None and found.cause == cause


def test_a_shortage_of_several_says_how_many_and_what_of_a_class_where_to_change_it() -> None:
    taken = shortage(
        pod(asked="2", labels={CLASS_LABEL: "l4"}), fit_error(1, f"1 Insufficient {GPU}", f"1 {NO_VICTIMS}")
    )
    assert taken is not None
    assert taken.cause == f"no node has 2 free {GPU}, since other pods use those of 1 node"
    assert "end one of those pods" in taken.remedy and "resources.limits of WorkerClass l4" in taken.remedy
    absent = shortage(pod(asked="2", what=MIG), fit_error(1, f"1 Insufficient {MIG}", f"1 {NOT_HELPFUL}"))
    assert absent is not None and absent.cause == f"no node offers 2 {MIG}"
    assert "spec.worker.resources.limits what nodes do offer" in absent.remedy and "WorkerClass" not in absent.remedy


def test_a_proxy_that_others_put_before_the_worker_says_nothing_of_its_devices() -> None:
    worker = {"name": "worker", "image": "w", "resources": {"limits": {GPU: "4"}}}
    injected = {"name": "proxy", "image": "p", "resources": {"limits": {"cpu": "1"}}}
    meta = {"name": "digits-1", "namespace": "a", "uid": "u", "resourceVersion": "1"}
    found = trim(POD, {"metadata": meta, "spec": {"containers": [injected, worker]}, "status": {}})
    assert requested(found) == (GPU,)
    short = shortage(found, fit_error(1, f"1 Insufficient {GPU}", f"1 {NOT_HELPFUL}"))
    assert short is not None and short.cause == f"no node offers 4 {GPU}"


def test_a_lack_of_processors_is_no_shortage_of_devices() -> None:
    assert shortage(pod(), fit_error(1, "1 Insufficient cpu", f"1 {NO_VICTIMS}")) is None


@pytest.mark.parametrize(("preemption", "nowhere"), [(NO_VICTIMS, False), (NOT_HELPFUL, True)])
def test_a_worker_says_whether_another_ones_leaving_would_give_it_a_device(preemption: str, nowhere: bool) -> None:
    message = fit_error(1, f"1 Insufficient {GPU}", f"1 {preemption}")
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    found = endpoint(pod(phase="Pending", conditions=[waiting]), current=True)
    assert (found.no_room, found.offered_nowhere) == (True, nowhere)


def test_extended_resources_and_claims_are_devices_that_a_worker_asks_for() -> None:
    asked = pod()
    asked["spec"]["containers"][0]["resources"]["claims"] = [{"name": "gpu"}]
    assert requested(asked) == (GPU, "claim gpu")
    asked["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}}
    assert requested(asked) == ()


def allocated(*devices: tuple[str, str], name: str = GPU, message: str = "") -> dict[str, Any]:
    told = {"message": message} if message else {}
    health = [{"resourceID": device, "health": state} | told for device, state in devices]
    return {
        "containerStatuses": [{"name": "worker", "allocatedResourcesStatus": [{"name": name, "resources": health}]}]
    }


def test_devices_that_the_node_reports_as_unhealthy_are_named_with_their_resource_and_node() -> None:
    assert (
        unhealthy(pod(**allocated(("gpu-1", "Healthy"), ("gpu-0", "Unhealthy")))) == f"device gpu-0 of {GPU} on node n1"
    )
    claimed = allocated(("gpu-7", "Unhealthy"), name="claim:gpu/one", message="ECC error")
    assert unhealthy(pod(**claimed)) == "device gpu-7 of claim:gpu/one (ECC error) on node n1"


def test_what_is_healthy_unknown_or_on_its_way_out_is_not_told() -> None:
    assert not unhealthy(pod(**allocated(("gpu-0", "Healthy"), ("gpu-1", "Unknown"))))
    ending = pod(**allocated(("gpu-0", "Unhealthy")))
    assert endpoint(ending, current=True).unhealthy
    ending["metadata"]["deletionTimestamp"] = "2026-11-26T05:00:00Z"
    assert not endpoint(ending, current=True).unhealthy
