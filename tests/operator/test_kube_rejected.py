"""Pods that the kubelet rejects at admission, as Kubernetes 1.36 leaves them behind (``rejectPod``)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.failures import failure
from offramp_operator.kube.kinds import POD, REJECTIONS_OVER_ANNOTATION, TEMPLATE_ANNOTATION, Object
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.pods import endpoints
from offramp_operator.kube.rejected import Rejections, note, rejections
from offramp_operator.kube.trim import trim

GPU = "nvidia.com/gpu"
OLD, NEW = "1111", "2222"
NOON = datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()
REFUSED = (
    "Pod was rejected: Allocate failed due to rpc error: code = Unknown desc = no device of that kind today, which is "
    "unexpected"
)


def pod(name: str, *, template: str = NEW, node: str = "n1", second: int = -3600, **status: Any) -> Object:
    """As the operator keeps it."""
    meta = {"name": name, "namespace": "a", "uid": f"uid-{name}", "resourceVersion": "1"}
    meta |= {"creationTimestamp": at(second), "annotations": {TEMPLATE_ANNOTATION: template}}
    worker = {"name": "worker", "image": "w", "resources": {"limits": {GPU: "2"}}}
    return trim(POD, {"metadata": meta, "spec": {"nodeName": node, "containers": [worker]}, "status": status})


def at(second: int) -> str:
    return f"{datetime.fromtimestamp(NOON + second, UTC):%Y-%m-%dT%H:%M:%SZ}"


def rejected(
    name: str, *, second: int = 0, message: str = REFUSED, template: str = NEW, clock_ahead: int = 0
) -> Object:
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
    return pod(name, template=template, second=second, startTime=at(second + clock_ahead), **status)


def serving(name: str, *, template: str = NEW) -> Object:
    return pod(name, template=template, phase="Running", conditions=[{"type": "Ready", "status": "True"}])


def pending(name: str, *, node: str = "", scheduled: str = "") -> Object:
    """``scheduled`` as the scheduler says; empty where it has not looked yet."""
    conditions = [{"type": "PodScheduled", "status": scheduled}] if scheduled else []
    return pod(name, node=node, second=2, phase="Pending", conditions=conditions)


WAITING = pod("waits", phase="Pending")
ROW = tuple(rejected(f"w-{number}", second=number) for number in range(3))


def found(*pods: Object, seconds: float = 3.0, over: str | None = None) -> Rejections:
    """What is known so many seconds past noon; ``over`` is what the Deployment says."""
    notes = {} if over is None else {REJECTIONS_OVER_ANNOTATION: over}
    deployment = {"metadata": {"name": "digits", "annotations": notes}}
    return rejections(deployment, pods, template=NEW, now=NOON + seconds)


def noted(seen: Rejections) -> str | None:
    """What the Deployment says from then on."""
    deployment: Object = {"metadata": {"name": "digits"}}
    note(deployment, seen)
    return deployment["metadata"].get("annotations", {}).get(REJECTIONS_OVER_ANNOTATION)


def told(seen: Rejections, *, wanted: int = 1) -> WorkerEndpoint | None:
    return seen.endpoint(wanted=wanted, held=seen.holds)


def test_a_rejected_pod_names_its_node_its_device_the_kubelets_words_and_the_next_step() -> None:
    assert failure(rejected("w-0")) == (
        "UnexpectedAdmissionError",
        f"node n1 rejected w-0, which asks for {GPU}, as UnexpectedAdmissionError (Allocate failed due to rpc error: "
        "code = Unknown desc = no device of that kind today, which is unexpected); see that node's device plugin, and "
        "what it takes",
    )


def test_a_cause_that_is_known_is_told_with_the_kubelets_words_and_when_the_next_pod_is_made() -> None:
    words = f"request for '{GPU}: 2' too large: maximum request size for shared resources is 1"
    pods = (rejected(f"w-{n}", second=n, message=f"Pod was rejected: {words}") for n in range(3))
    worker = told(found(*pods))
    assert worker is not None and (worker.name, worker.failure_reason) == ("w-2", "RejectedByNode")
    assert worker.failure == (
        "node n1 refused w-2, since its device plugin gives a worker no more than one share of a GPU as "
        f"{GPU}; ask for 1 in resources.limits of spec.worker or of the WorkerClass, or for whole GPUs on other nodes "
        f"(the kubelet: {words}); 3 pods were rejected, so the next one is made at 2026-11-27T12:00:12Z, or as soon as "
        "the spec changes or these pods are deleted"
    )


def test_one_or_two_are_told_and_hold_nothing_up() -> None:
    worker = told(found(*ROW[:2]))
    assert worker is not None and worker.held_until is None and "the next one" not in worker.failure


@pytest.mark.parametrize(
    ("pods", "wanted", "is_told"),
    [
        ((*ROW, WAITING), 1, True),
        ((*ROW, serving("a")), 2, True),
        ((*ROW, serving("a")), 1, False),
        ((*ROW, serving("a", template=OLD)), 1, True),
    ],
    ids=["one waits", "another one serves", "as many as wanted", "only those of before serve"],
)
def test_they_are_told_as_long_as_nodes_have_taken_too_few(
    pods: tuple[Object, ...], wanted: int, is_told: bool
) -> None:
    assert (told(found(*pods), wanted=wanted) is not None) is is_told


def test_a_pod_that_waits_does_not_tell_what_others_were_rejected_for() -> None:
    replica_set = {"metadata": {"name": "rs", "uid": "rs"}}
    deployment = {"metadata": {"name": "digits", "uid": "d"}}
    (worker,) = endpoints(deployment, [replica_set], {"rs": [*ROW, WAITING]}, template=NEW)
    assert (worker.name, worker.failure) == ("waits", "")


def test_the_next_one_is_made_after_the_pause_and_then_tells_of_itself() -> None:
    assert [found(*ROW, seconds=seconds).holds for seconds in (2.0, 11.0, 12.0)] == [True, True, False]
    assert told(found(*ROW, seconds=30.0)) is not None and told(found(*ROW, seconds=80.0)) is None


@pytest.mark.parametrize("days", [1, -1])
def test_a_kubelets_own_clock_does_not_matter(days: int) -> None:
    row = (rejected(f"w-{n}", second=n, clock_ahead=days * 86400) for n in range(3))
    assert found(*row).until == NOON + 12.0


@pytest.mark.parametrize(("seconds", "holds"), [(-500.0, True), (-7200.0, False)])
def test_a_pause_that_lies_hours_ahead_is_a_wrong_clock_and_no_pause(seconds: float, holds: bool) -> None:
    assert found(*ROW, seconds=seconds).holds is holds


def test_pods_of_a_clock_that_was_days_ahead_end_no_series_to_come() -> None:
    days = 2 * 86400
    ahead = (rejected("ahead", second=days), pod("took", second=days + 5, phase="Running"))
    assert noted(found(*ahead, seconds=days + 6)) is not None and noted(found(*ahead)) is None
    assert found(*ahead, *ROW).holds


@pytest.mark.parametrize(
    "over",
    [
        "2026-11-27T12:10:04+00:00",
        "2099-01-01T00:00:00+00:00",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01T00:00:00+23:59",
        "0001-01-01",
        "9999-12-31",
        "garbage",
        "",
    ],
)
def test_a_note_that_can_not_be_true_counts_for_nothing_and_is_written_anew(over: str) -> None:
    """Anybody who may edit a Deployment may have written it."""
    alone = found(*ROW, over=over)
    assert alone.holds and noted(alone) is None
    assert noted(found(*ROW, pod("took", second=2, phase="Running"), over=over)) == "2026-11-27T12:00:02+00:00"


def test_rejections_before_a_pod_that_a_node_took_hold_nothing_up() -> None:
    took = pod("took", second=30, phase="Running")
    again = (*ROW, rejected("once", second=900))
    assert not found(*again, took, seconds=901.0).holds
    assert found(*again, seconds=901.0).holds


def test_a_pod_that_waited_for_a_node_ends_a_series_when_it_is_placed() -> None:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(5)}
    assert not found(*ROW, pod("waited", phase="Running", conditions=[placed]), seconds=6.0).holds


def test_a_series_stays_ended_once_the_pod_that_ended_it_is_gone() -> None:
    """With a node that was drained, three rejections of a quarter of an hour before held up all workers for ten
    minutes."""
    over = noted(found(*ROW, pod("took", second=30, phase="Running"), seconds=31.0))
    again = [*ROW, rejected("once", second=900)]
    seen = found(*again, seconds=901.0, over=over)
    assert not seen.holds
    assert noted(seen) == over, "nothing new is to be written"
    again += [rejected("twice", second=901), rejected("thrice", second=902)]
    assert found(*again, seconds=903.0, over=over).holds


@pytest.mark.parametrize("behind", [0.0, 300.0])
def test_a_leader_whose_clock_is_minutes_behind_keeps_that_a_series_is_over(behind: float) -> None:
    """It took the note for made up, wrote none in its place, and the next rejection held up all workers."""
    took = pod("took", second=30, phase="Running")
    over = noted(found(*ROW, took, seconds=31.0))
    assert noted(found(*ROW, seconds=100.0 - behind, over=over)) == over
    assert not found(*ROW, took, seconds=32.0 - behind, over=over).holds


def test_a_pod_of_a_minute_in_which_the_clock_was_ahead_does_not_end_what_is_rejected_after_it() -> None:
    """For nine minutes every rejection was over at once: a node was given 488 pods."""
    took = pod("took", second=540, phase="Running")
    assert found(took, *ROW, seconds=3.0).holds and noted(found(took, *ROW, seconds=3.0)) is None


@pytest.mark.parametrize("spec", [{"replicas": 4}, {}], ids=["ours", "an autoscaler's"])
def test_a_series_stays_ended_while_another_spec_is_tried(spec: Object) -> None:
    """What the body leaves out goes with it, and with the old spec back one rejection took all workers."""
    over = noted(found(*ROW, pod("took", second=30, phase="Running"), seconds=31.0))
    live = {"metadata": {"name": "digits", "uid": "d", "annotations": {REJECTIONS_OVER_ANNOTATION: over}}}
    other: Object = {"metadata": {"name": "digits"}, "spec": spec}
    asyncio.run(Holds(cast(Any, None), ObjectCache(), clock=lambda: NOON + 500).hold(live, other))
    assert other["metadata"]["annotations"] == {REJECTIONS_OVER_ANNOTATION: over}


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (pending("bound", node="n7", scheduled="True"), 2),
        (pending("waits-for-room", scheduled="False"), 2),
        (pending("doomed", node="n1", scheduled="True"), 1),
        (pending("just-made"), 1),
    ],
    ids=["on a node that rejected none", "waits for room", "on the node that rejects", "made for the last rejected"],
)
def test_pods_that_are_on_their_way_are_kept_in_a_pause(other: Object, kept: int) -> None:
    assert found(*ROW, serving("a"), other).kept == kept


def test_pods_of_another_spec_hold_nothing_up() -> None:
    others = found(*(rejected(f"w-{n}", second=n, template=OLD) for n in range(3)), serving("a"))
    assert not others.holds and told(others, wanted=2) is None


def test_nothing_is_held_up_where_that_would_take_pods_that_serve() -> None:
    both = found(*ROW, serving("a"), serving("b", template=OLD))
    assert not both.holds
    assert found(*ROW, serving("b", template=OLD)).holds
