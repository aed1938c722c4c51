"""What pods say about workers."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_core.control.objects import StartUpTimes
from offramp_operator.kube.kinds import TEMPLATE_ANNOTATION, Object
from offramp_operator.kube.pods import admin_url, endpoint, endpoints

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
    assert [(w.name, w.ready, w.ending) for w in found] == [("ending", False, True), ("well", True, False)]


def test_a_deployment_that_cannot_make_pods_says_why() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "no more"}
    deployment = {"metadata": _meta("digits"), "status": {"conditions": [condition]}}
    (worker,) = endpoints(deployment, [], {}, template=NEW)
    assert (worker.ready, worker.failure_reason) == (False, "FailedCreate")
    assert worker.failure == "pods cannot be created (no more); see the events of the workers' ReplicaSet"
    assert worker.admin_url is None


QUOTA = 'pods "digits-1" is forbidden: exceeded quota: two, requested: pods=1, used: pods=2, limited: pods=2'


@pytest.mark.parametrize(
    ("message", "no_room"), [(QUOTA, True), ('violates PodSecurity "restricted:latest": x', False)]
)
def test_of_what_refuses_new_pods_only_a_quota_is_cured_by_an_old_pods_leaving(message: str, no_room: bool) -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    deployment = {"metadata": _meta("digits"), "status": {"conditions": [condition]}}
    (worker,) = endpoints(deployment, [], {}, template=NEW)
    assert worker.no_room == no_room


@pytest.mark.parametrize(
    ("message", "cured"),
    [
        (
            "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available: 2 No "
            "preemption victims",
            True,
        ),
        ("0/3 nodes are available: 1 node(s) had untolerated taint {a: b}, 2 Insufficient cpu.", True),
        ("0/1 nodes are available: 1 Too many pods.", True),
        ("0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.", True),
        ("0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints.", True),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", False),
        ("0/2 nodes are available: 2 node(s) had untolerated taint {gpu: yes}.", False),
        ('0/2 nodes are available: persistentvolumeclaim "x" not found.', False),
    ],
)
def test_only_a_lack_of_room_is_cured_by_another_pods_leaving(message: str, cured: bool) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pods = {"uid-new": [_pod("a", ready=False, phase="Pending", conditions=[condition])]}
    (worker,) = endpoints(DEPLOYMENT, [_replica_set("new", 1)], pods, template=NEW)
    assert worker.no_room == cured and worker.failure


def test_a_pod_that_a_queue_holds_back_is_short_of_room_and_says_so() -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked",
    }
    pod = _pod("a", ready=False, phase="Pending", conditions=[condition])
    pod["spec"] = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    (worker,) = endpoints(DEPLOYMENT, [_replica_set("new", 1)], {"uid-new": [pod]}, template=NEW)
    assert (worker.no_room, worker.failure_reason) == (True, "SchedulingGated")


@pytest.mark.parametrize(
    ("created", "told"), [("2026-11-21T12:00:01Z", True), ("2026-11-21T15:00:00Z", False)], ids=["its", "a later one"]
)
def test_a_starting_pod_tells_why_the_one_that_it_replaces_was_evicted(created: str, told: bool) -> None:
    """Evicted pods linger for days; only the pod that came in its place may speak of one."""
    ended = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2026-11-21T12:00:00Z"}]
    message = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi. "
    evicted = _pod("old", phase="Failed", ready=False, reason="Evicted", message=message, conditions=ended)
    evicted["spec"] = {"nodeName": "n1"}
    starting, serving = _pod("new", ready=False), _pod("other")
    starting["metadata"]["creationTimestamp"] = created
    found = endpoints(DEPLOYMENT, [_replica_set("new", 1)], {"uid-new": [evicted, starting, serving]}, template=NEW)
    assert [(w.name, w.ready, w.failure_reason) for w in found] == [
        ("new", False, "DiskFull" if told else ""),
        ("other", True, ""),
    ]
    assert ("node n1 evicted old because its disk is full" in found[0].failure) is told


def test_restarts_of_the_pod_are_counted() -> None:
    pods = {"uid-new": [_pod("a", containerStatuses=_container(state={"running": {}}))]}
    (worker,) = endpoints(DEPLOYMENT, [_replica_set("new", 1)], pods, template=NEW)
    assert worker.restarts == 2


@pytest.mark.parametrize(
    ("ip", "url"), [("10.1.2.3", "http://10.1.2.3:8081"), ("fd00::1", "http://[fd00::1]:8081"), ("", None)]
)
def test_the_admin_port_is_reached_by_address(ip: str, url: str | None) -> None:
    assert admin_url({"metadata": _meta("a"), "status": {"podIP": ip}}) == url


def started(restarts: int = 0, **seconds: int) -> Object:
    """A pod by the seconds after its creation at which each step was done."""
    at = {name: f"2026-06-01T12:00:{second:02d}Z" for name, second in seconds.items()}
    names = {"placed": "PodScheduled", "fetched": "Initialized", "ready": "Ready"}
    conditions = [
        {"type": names[step], "status": "True", "lastTransitionTime": moment}
        for step, moment in at.items()
        if step in names
    ]
    running = {"running": {"startedAt": at["started"]}} if "started" in at else {}
    worker = {"name": "worker", "restartCount": restarts, "state": running}
    metadata = {"name": "p", "uid": "u", "creationTimestamp": "2026-06-01T12:00:00Z"}
    return {"metadata": metadata, "status": {"conditions": conditions, "containerStatuses": [worker]}}


def test_a_pod_tells_how_long_each_step_of_its_start_took() -> None:
    found = endpoint(started(placed=2, fetched=9, started=10, ready=25), current=True).startup
    assert found is not None and (found.times, found.times.seconds) == (StartUpTimes(2.0, 7.0, 1.0, 15.0), 25.0)


def test_a_pod_that_began_anew_or_does_not_say_tells_nothing() -> None:
    for pod in (
        started(restarts=1, placed=2, fetched=9, started=10, ready=25),
        started(placed=2, fetched=9, ready=25),
        started(placed=2, fetched=9, started=30, ready=25),
    ):
        assert endpoint(pod, current=True).startup is None
    assert endpoint(started(placed=2, fetched=9, started=10), current=True).startup is None


def test_a_pod_that_was_not_ready_for_a_moment_long_after_its_start_tells_nothing() -> None:
    pod = started(placed=2, fetched=9, started=10, ready=51)
    found = []
    for failures in (20, 21):
        probe = {"periodSeconds": 2, "failureThreshold": failures}
        found.append(
            endpoint({**pod, "spec": {"containers": [{"name": "worker", "startupProbe": probe}]}}, current=True)
        )
    assert [worker.startup is not None for worker in found] == [False, True]
