"""Pods that the kubelet rejected: what says so of a Deployment, and how many pods may be asked for meanwhile.

They stay in the cluster as Failed, so they are all that has to be remembered; whoever deletes them has the next one
made at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from offramp_core.control.snapshot import WorkerEndpoint
from offramp_core.control.workers.rejected import next_worker_at
from offramp_core.reasons import Reason
from offramp_operator.kube.devices import requested
from offramp_operator.kube.failures import BY_KUBELET, failure, one_line, shortened, was_rejected
from offramp_operator.kube.kinds import TEMPLATE_ANNOTATION, Object, name_of, uid_of

REPORTED_SECONDS = 60.0  # within which the next pod is there, and tells of itself


@dataclass(frozen=True, slots=True)
class Rejections:
    """Pods of one Deployment that are as the spec asks for: those that were ``rejected``, the latest last, and how many
    nodes have ``taken``. ``served`` is the template's digest of others that nodes have; empty where there are none."""

    rejected: tuple[Object, ...]
    taken: int
    served: str

    @property
    def until(self) -> float | None:
        """When the next pod may be asked for."""
        return next_worker_at(ended_at(pod) for pod in self.rejected)

    def holds(self, now: float) -> bool:
        """Whether no further pod is to be asked for. Where nodes have pods of both templates, each way to that would
        take one that may serve."""
        return self.until is not None and now < self.until and not (self.taken and self.served)

    def endpoint(self, *, wanted: int, held: bool, now: float) -> WorkerEndpoint | None:
        """A worker that stands for them, as long as workers are lacking and the next one does not tell of itself."""
        last, until = self.rejected[-1], self.until if held else None
        if self.taken >= wanted or now > (until or ended_at(last)) + REPORTED_SECONDS:
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
            node=str((last.get("spec") or {}).get("nodeName") or ""),
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


def rejections(pods: Iterable[Object], *, template: str | None) -> Rejections | None:
    """What nodes rejected of the pods that the spec asks for; None where that is nothing."""
    pods = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    rejected = [pod for pod in pods if was_rejected(pod) and template_of(pod) == template]
    if not rejected:
        return None
    taken = [template_of(pod) for pod in pods if _taken(pod)]
    return Rejections(
        tuple(sorted(rejected, key=lambda pod: (ended_at(pod), name_of(pod)))),
        taken=sum(digest == template for digest in taken),
        served=next((digest for digest in taken if digest != template), ""),
    )


def ended_at(pod: Object) -> float:
    """When something was last heard of a pod that has ended; the kubelet notes the start of one that it rejects as the
    moment of that."""
    status = pod.get("status") or {}
    texts = [pod["metadata"].get("creationTimestamp"), status.get("startTime")]
    texts += [each.get("lastTransitionTime") for each in status.get("conditions") or ()]
    known = [datetime.fromisoformat(str(text)) for text in texts if text]
    return max((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() for at in known) if known else 0.0


def template_of(pod: Object) -> str:
    """The digest that a pod carries; empty where it has none."""
    return str((pod["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION) or "")


def _taken(pod: Object) -> bool:
    """Whether a kubelet runs the pod or is about to."""
    status = pod.get("status") or {}
    begun = status.get("containerStatuses") or status.get("initContainerStatuses")
    return status.get("phase") == "Running" or bool(status.get("phase") == "Pending" and begun)
