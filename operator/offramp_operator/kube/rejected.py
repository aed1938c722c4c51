"""Pods that the kubelet rejected: what says so of a Deployment, and how many pods may be asked for meanwhile.

They stay in the cluster as Failed; whoever deletes them has the next one made at once. That a node took a pod after
them is kept with the Deployment, as that pod may go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_core.control.workers.rejected import LONGEST_PAUSE_SECONDS, next_worker_at
from offramp_core.reasons import Reason
from offramp_operator.kube.devices import requested
from offramp_operator.kube.failures import BY_KUBELET, condition, failure, one_line, shortened, was_rejected
from offramp_operator.kube.kinds import REJECTIONS_OVER_ANNOTATION, TEMPLATE_ANNOTATION, Object, name_of, uid_of

REPORTED_SECONDS = 60.0  # within which the next pod is there, and tells of itself


@dataclass(frozen=True, slots=True)
class Rejections:
    """Pods of one Deployment that are as the spec asks for: those that were ``rejected``, the latest last, those that
    nodes have ``taken``, and how many are ``coming``, which no node is known to reject. ``served`` is the digest of the
    template of others that nodes have; empty where there are none. ``over`` is what was known as :attr:`over_until`
    before. ``now`` is the operator's own time, which may be behind by as much as a pause: what was noted or rejected
    further ahead was stamped by a clock that is wrong. A pod that was taken at all ahead of it ends nothing yet."""

    rejected: tuple[Object, ...]
    taken: tuple[Object, ...]
    coming: int
    served: str
    over: float
    now: float

    @property
    def over_until(self) -> float:
        """When the last one was rejected before a node took another; infinitely long ago without."""
        last_taken = max((at for at in map(placed_at, self.taken) if at <= self.now), default=-math.inf)
        return max([self.over, *(at for at in map(placed_at, self.rejected) if at <= last_taken)])

    @property
    def kept(self) -> int:
        """How many pods there may be while no further one is asked for."""
        return len(self.taken) + self.coming

    @property
    def until(self) -> float | None:
        """When the next pod may be asked for."""
        over, latest = self.over_until, _latest(self.now)
        return next_worker_at(at for at in map(placed_at, self.rejected) if over < at <= latest)

    @property
    def holds(self) -> bool:
        """Whether no further pod is to be asked for. Where nodes have pods of both templates, each way to that would
        take one that may serve."""
        until = self.until
        return until is not None and self.now < until and not (self.taken and self.served)

    def endpoint(self, *, wanted: int, held: bool) -> WorkerEndpoint | None:
        """A worker that stands for them, as long as workers are lacking and the next one does not tell of itself."""
        if not self.rejected or len(self.taken) >= wanted:
            return None
        last, until = self.rejected[-1], self.until if held else None
        if self.now > (until or placed_at(last)) + REPORTED_SECONDS:
            return None
        sentence, words = failure(last)[1], one_line(str(last["status"]["message"]).removeprefix(BY_KUBELET))
        message = sentence if words in sentence else f"{sentence} (the kubelet: {words})"
        return WorkerEndpoint(
            name_of(last),
            uid_of(last),
            ready=False,
            failure=shortened(message) + _what_follows(len(self.rejected), until),
            failure_reason=Reason.REJECTED_BY_NODE,
            template=template_of(last),
            devices=requested(last),
            node=node_of(last),
            held_until=until,
        )


def _what_follows(n: int, until: float | None) -> str:
    if until is None:
        return ""
    then = f"{datetime.fromtimestamp(until, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return (
        f"; {n} pods were rejected, so the next one is made at {then}, or as soon as the spec changes or these pods "
        "are deleted"
    )


def rejections(deployment: Object, pods: Iterable[Object], *, template: str | None, now: float) -> Rejections:
    """What nodes rejected of the pods of a Deployment that are as the spec asks for."""
    pods = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    rejected = [pod for pod in pods if was_rejected(pod) and template_of(pod) == template]
    taken = [pod for pod in pods if _taken(pod)]
    reject = {node_of(pod) for pod in rejected}
    return Rejections(
        tuple(sorted(rejected, key=lambda pod: (placed_at(pod), name_of(pod)))),
        taken=tuple(pod for pod in taken if template_of(pod) == template),
        coming=sum(template_of(pod) == template and _is_coming(pod, reject) for pod in pods),
        served=next((digest for pod in taken if (digest := template_of(pod)) != template), ""),
        over=_noted(deployment, now=now),
        now=now,
    )


def note(deployment: Object, found: Rejections) -> None:
    """Keep with a Deployment that is to be applied which rejections are over: what is left out there is lost. Others
    than before are written only once there are further ones."""
    if found.over_until > -math.inf:
        over = datetime.fromtimestamp(found.over_until, UTC).isoformat()
        deployment["metadata"].setdefault("annotations", {})[REJECTIONS_OVER_ANNOTATION] = over


def _noted(deployment: Object, *, now: float) -> float:
    """What an earlier pass kept; anybody may have changed it."""
    notes = deployment["metadata"].get("annotations") or {}
    try:
        at = datetime.fromisoformat(notes[REJECTIONS_OVER_ANNOTATION]).timestamp()
    except (KeyError, ValueError, OverflowError):
        return -math.inf
    return at if 0 <= at <= _latest(now) else -math.inf


def _latest(now: float) -> float:
    """What may have been stamped by now, by a clock that is right."""
    return now + LONGEST_PAUSE_SECONDS


def placed_at(pod: Object) -> float:
    """When a pod was placed on a node, where that is known, else when it was made: as good as when a node takes or
    rejects it, and by the API server's clock, where each kubelet has its own."""
    placed = condition(pod, "PodScheduled")
    known = placed.get("lastTransitionTime") if placed.get("status") == "True" else None
    return datetime.fromisoformat(str(known or pod["metadata"]["creationTimestamp"])).timestamp()


def node_of(pod: Object) -> str:
    """The node that a pod was placed on; empty where it waits for one."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def template_of(pod: Object) -> str:
    """The digest that a pod carries; empty where it has none."""
    return str((pod["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION) or "")


def _taken(pod: Object) -> bool:
    """Whether a kubelet runs the pod or is about to."""
    status = pod.get("status") or {}
    begun = status.get("containerStatuses") or status.get("initContainerStatuses")
    return status.get("phase") == "Running" or bool(status.get("phase") == "Pending" and begun)


def _is_coming(pod: Object, reject: Collection[str]) -> bool:
    """Whether a pod waits for room, or for a node that has rejected none. One that the scheduler has not looked at yet
    is the one that was made for the last rejected."""
    if (pod.get("status") or {}).get("phase") != "Pending" or _taken(pod):
        return False
    node = node_of(pod)
    return node not in reject if node else condition(pod, "PodScheduled").get("status") == "False"
