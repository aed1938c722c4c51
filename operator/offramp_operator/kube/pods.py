"""What pods say about workers, as pure functions.

Pods are found along owner references (service → Deployment → ReplicaSet → Pod). A label is never enough, because
anyone who may create pods may label them.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import pairwise

from offramp_core.control.objects import StartUpTimes
from offramp_core.control.snapshot import StartUp, WorkerEndpoint
from offramp_core.reasons import MaybeReason, Reason
from offramp_operator.kube.devices import requested, shortage, unhealthy
from offramp_operator.kube.failures import condition, containers, creation_failure, failure, reason_of, was_rejected
from offramp_operator.kube.kinds import (
    OWN_BUNDLE_ANNOTATION,
    TEMPLATE_ANNOTATION,
    Object,
    name_of,
    owner_of,
    uid_of,
)
from offramp_operator.kube.manifests import ADMIN_PORT, CONTAINER

REPLACED_SECONDS = 60.0  # how far apart the end of a pod and the start of its replacement may be
REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
# What the scheduler says where another pod's leaving would make room; it also names selectors, taints and volumes,
# which it would not cure.
CROWDED = (
    "Insufficient ",
    "Too many pods",
    "anti-affinity",
    "topology spread",
    "free ports",
    "cannot allocate all claims",
)
QUOTA_GATES = ("kueue.x-k8s.io/admission",)


def endpoints(
    deployment: Object, replica_sets: Iterable[Object], pods: Mapping[str, Iterable[Object]], *, template: str | None
) -> tuple[WorkerEndpoint, ...]:
    """The workers of one Deployment.

    Parameters
    ----------
    replica_sets : iterable of objects
        Those the Deployment controls.
    pods : mapping
        Pods by the uid of the ReplicaSet that controls them.
    template : str or None
        Digest of the pods that the spec asks for now; None when it asks for none that can exist.

    Returns
    -------
    tuple of WorkerEndpoint
        One per pod that runs or may yet run; another one without address where the Deployment cannot create pods.
    """
    replica_sets = list(replica_sets)
    newest = max(replica_sets, key=revision, default=None)
    found = []
    for replica_set in replica_sets:
        own = list(pods.get(uid_of(replica_set), ()))
        ended = [pod for pod in own if _phase(pod) == "Failed" and not was_rejected(pod)]  # those tell it themselves
        found += [
            endpoint(
                pod, current=replica_set is newest and template is not None and _template(pod) == template, ended=ended
            )
            for pod in own
            if _phase(pod) not in ("Succeeded", "Failed")
        ]
    refused = _replica_failure(deployment)
    return tuple(sorted(found, key=lambda worker: worker.name)) + ((refused,) if refused else ())


def endpoint(pod: Object, *, current: bool, ended: Iterable[Object] = ()) -> WorkerEndpoint:
    """One pod as a worker; ``ended`` are failed pods of its ReplicaSet, which linger: one that it replaces says why it
    had to come."""
    ending = bool(pod["metadata"].get("deletionTimestamp"))
    ready = not ending and condition(pod, "Ready").get("status") == "True"
    nothing: tuple[MaybeReason, str] = ("", "")
    reason, message = nothing if ending else failure(pod)
    if not (ready or ending or message):
        reason, message = next((failure(old) for old in ended if _replaces(pod, old)), nothing)
    return WorkerEndpoint(
        name=name_of(pod),
        uid=uid_of(pod),
        ready=ready,
        current=current,
        restarts=sum(int(status.get("restartCount", 0)) for status in containers(pod)),
        failure=message,
        failure_reason=reason,
        no_room=not ending and crowded_out(pod),
        offered_nowhere=not ending and offered_nowhere(pod),
        ending=ending,
        own_bundle=OWN_BUNDLE_ANNOTATION in (pod["metadata"].get("annotations") or {}),
        template=_template(pod) or "",
        admin_url=admin_url(pod),
        devices=requested(pod),
        unhealthy="" if ending else unhealthy(pod),
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        startup=startup(pod) if ready else None,
    )


def startup(pod: Object) -> StartUp | None:
    """How long each step took until the worker was ready; None of one that began anew, or does not say. Kubernetes
    tells whole seconds, and only when a pod last became ready: beyond the deadline of its start that was not the first
    time."""
    worker = next(iter(containers(pod)), {})
    running = (worker.get("state") or {}).get("running") or {}
    moments = [
        _time(pod["metadata"].get("creationTimestamp")),
        _time(condition(pod, "PodScheduled").get("lastTransitionTime")),
        _time(condition(pod, "Initialized").get("lastTransitionTime")),
        _time(running.get("startedAt")),
        _time(condition(pod, "Ready").get("lastTransitionTime")),
    ]
    known = [moment.timestamp() for moment in moments if moment is not None]
    if len(known) < len(moments) or worker.get("restartCount") or known != sorted(known):
        return None
    if known[-1] - known[-2] > _start_deadline(pod):
        return None
    return StartUp(known[0], StartUpTimes(*(after - before for before, after in pairwise(known))))


def _start_deadline(pod: Object) -> float:
    """Seconds within which its worker has to start, or is started anew."""
    specs = (pod.get("spec") or {}).get("containers") or ()
    probe = next((spec.get("startupProbe") or {} for spec in specs if spec.get("name") == CONTAINER), {})
    return probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0) or math.inf


def admin_url(pod: Object) -> str | None:
    """Where the worker's admin port answers; None while the pod has no address."""
    text = (pod.get("status") or {}).get("podIP")
    if not text:
        return None
    address = ipaddress.ip_address(text)
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{ADMIN_PORT}"


def crowded_out(pod: Object) -> bool:
    """Whether the pod waits for room that another pod of the service may have."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return False
    gates = {gate.get("name") for gate in (pod.get("spec") or {}).get("schedulingGates") or ()}
    return any(text in scheduled.get("message", "") for text in CROWDED) or not gates.isdisjoint(QUOTA_GATES)


def offered_nowhere(pod: Object) -> bool:
    """Whether the pod waits for a device that no node has, so that room for it is none that another pod could make."""
    short = shortage(pod, str(condition(pod, "PodScheduled").get("message") or ""))
    return short is not None and short.offering == 0


def revision(replica_set: Object) -> int:
    """Which of its Deployment's templates a ReplicaSet stands for; the highest is the newest."""
    text = (replica_set["metadata"].get("annotations") or {}).get(REVISION_ANNOTATION, "0")
    return int(text) if text.isdigit() else 0


def _replica_failure(deployment: Object) -> WorkerEndpoint | None:
    """A quota or an admission rule keeps pods from being created, so there is none that could tell."""
    refused = condition(deployment, "ReplicaFailure")
    if refused.get("status") != "True":
        return None
    reason, message = creation_failure(
        str(refused.get("message") or ""), reason=reason_of(refused, Reason.FAILED_CREATE)
    )
    return WorkerEndpoint(
        f"deployment {name_of(deployment)}",
        uid_of(deployment),
        ready=False,
        failure=message,
        failure_reason=reason,
        no_room="exceeded quota" in str(refused.get("message")),
    )


def _replaces(pod: Object, ended: Object) -> bool:
    """Whether a pod was created when the other one ended."""
    created = _time(pod["metadata"].get("creationTimestamp"))
    conditions = (ended.get("status") or {}).get("conditions") or []
    moments = [_time(c.get("lastTransitionTime")) for c in conditions]
    known = [moment for moment in moments if moment is not None]
    return created is not None and bool(known) and abs((created - max(known)).total_seconds()) <= REPLACED_SECONDS


def _time(text: object) -> datetime | None:
    return datetime.fromisoformat(str(text)) if text else None


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _template(pod: Object) -> str | None:
    return (pod["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION)


def controls(owner_uid: str, obj: Object) -> bool:
    """Whether the owner controls the object."""
    owner = owner_of(obj)
    return owner is not None and owner["uid"] == owner_uid
