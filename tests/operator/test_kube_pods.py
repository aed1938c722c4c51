"""What pods say about workers."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_operator.kube.kinds import TEMPLATE_ANNOTATION
from offramp_operator.kube.pods import admin_url, endpoints, failure

OLD, NEW = "1111", "2222"


def _meta(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "uid": f"uid-{name}", "namespace": "default", **fields}


def _pod(
    name: str, *, template: str = NEW, ready: bool = True, phase: str = "Running", **status: Any
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}, *status.pop("conditions", [])]
    return {
        "metadata": _meta(name, annotations={TEMPLATE_ANNOTATION: template}),
        "status": {"phase": phase, "podIP": "10.0.0.7", "conditions": conditions, **status},
    }


def _replica_set(name: str, revision: int) -> dict[str, Any]:
    return {"metadata": _meta(name, annotations={"deployment.kubernetes.io/revision": str(revision)})}


def _container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "worker", "restartCount": 2, **state}]


DEPLOYMENT = {"metadata": _meta("digits"), "status": {}}


def test_only_pods_of_the_newest_template_are_current() -> None:
    old, new = _replica_set("old", 9), _replica_set("new", 10)
    pods = {"uid-old": [_pod("a", template=OLD)], "uid-new": [_pod("b"), _pod("c", template=OLD)]}
    found = endpoints(DEPLOYMENT, [old, new], pods, template=NEW)
    assert [(w.name, w.current) for w in found] == [("a", False), ("b", True), ("c", False)]


def test_a_spec_that_was_changed_back_makes_the_newest_replica_set_current_again() -> None:
    """The Deployment controller reuses the old ReplicaSet under a new revision."""
    first, second = _replica_set("first", 3), _replica_set("second", 2)
    pods = {"uid-first": [_pod("a")], "uid-second": [_pod("b", template=OLD)]}
    found = endpoints(DEPLOYMENT, [first, second], pods, template=NEW)
    assert [(w.name, w.current) for w in found] == [("a", True), ("b", False)]


def test_pods_that_have_ended_are_no_workers_and_ending_ones_are_not_ready() -> None:
    ending = _pod("ending")
    ending["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    pods = {"uid-new": [_pod("evicted", phase="Failed"), ending, _pod("well")]}
    found = endpoints(DEPLOYMENT, [_replica_set("new", 1)], pods, template=NEW)
    assert [(w.name, w.ready) for w in found] == [("ending", False), ("well", True)]


def test_a_deployment_that_cannot_make_pods_says_why() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: cpu"}
    deployment = {"metadata": _meta("digits"), "status": {"conditions": [condition]}}
    (worker,) = endpoints(deployment, [], {}, template=NEW)
    assert (worker.ready, worker.failure_reason, worker.failure) == (False, "FailedCreate", "exceeded quota: cpu")
    assert worker.admin_url is None


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param({}, ("", ""), id="well"),
        pytest.param({"containerStatuses": _container(state={"waiting": {"reason": "ContainerCreating"}})}, ("", ""), id="starting"),
        pytest.param(
            {"containerStatuses": _container(state={"waiting": {"reason": "ErrImagePull", "message": "not found"}})},
            ("ErrImagePull", "not found"), id="image missing",
        ),
        pytest.param(
            {"containerStatuses": _container(
                state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                lastState={"terminated": {"reason": "Error", "exitCode": 3, "message": "manifest.json: digest differs\n"}},
            )},
            ("CrashLoopBackOff", "Error with exit code 3: manifest.json: digest differs"), id="crash loop",
        ),
        pytest.param(
            {"containerStatuses": _container(state={"terminated": {"reason": "OOMKilled", "exitCode": 137}})},
            ("OOMKilled", "OOMKilled with exit code 137"), id="out of memory",
        ),
        pytest.param(
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}]},
            ("Unschedulable", "0/1 nodes: cpu"), id="no room",
        ),
    ],
)  # fmt: skip
def test_the_first_thing_that_keeps_a_pod_from_running_is_told(status: Any, expected: tuple[str, str]) -> None:
    assert failure(_pod("a", ready=False, **status)) == expected


def test_of_a_long_message_the_end_is_kept() -> None:
    last = {"terminated": {"reason": "Error", "exitCode": 1, "message": "x" * 5000 + " the cause"}}
    status = _container(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last)
    _, message = failure(_pod("a", containerStatuses=status))
    assert message.endswith("the cause") and len(message) < 1100


def test_restarts_of_the_pod_are_counted() -> None:
    pods = {"uid-new": [_pod("a", containerStatuses=_container(state={"running": {}}))]}
    (worker,) = endpoints(DEPLOYMENT, [_replica_set("new", 1)], pods, template=NEW)
    assert worker.restarts == 2


@pytest.mark.parametrize(
    ("ip", "url"), [("10.1.2.3", "http://10.1.2.3:8081"), ("fd00::1", "http://[fd00::1]:8081"), ("", None)]
)
def test_the_admin_port_is_reached_by_address(ip: str, url: str | None) -> None:
    assert admin_url({"metadata": _meta("a"), "status": {"podIP": ip}}) == url
