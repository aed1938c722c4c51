"""What pods say about workers, as pure functions.

Pods are found along owner references (service → Deployment → ReplicaSet → Pod). A label is never enough, because
anyone who may create pods may label them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from offramp_operator.kube.kinds import TEMPLATE_ANNOTATION, Object, name_of, owner_of, uid_of
from offramp_operator.kube.manifests import ADMIN_PORT, CONTAINER
from offramp_operator.shell.platform import WorkerEndpoint

REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
STARTING = {"ContainerCreating", "PodInitializing"}
MESSAGE_LIMIT = 1000
LAST_LINES = 5  # the kubelet hands over up to 80 lines of log; the cause stands at their end


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
    found = [
        endpoint(pod, current=replica_set is newest and template is not None and _template(pod) == template)
        for replica_set in replica_sets
        for pod in pods.get(uid_of(replica_set), ())
        if _phase(pod) not in ("Succeeded", "Failed")
    ]
    refused = _replica_failure(deployment)
    return tuple(sorted(found, key=lambda worker: worker.name)) + ((refused,) if refused else ())


def endpoint(pod: Object, *, current: bool) -> WorkerEndpoint:
    """One pod as a worker."""
    ending = bool(pod["metadata"].get("deletionTimestamp"))
    reason, message = ("", "") if ending else failure(pod)
    return WorkerEndpoint(
        name=name_of(pod),
        uid=uid_of(pod),
        ready=not ending and _condition(pod, "Ready").get("status") == "True",
        current=current,
        restarts=sum(int(status.get("restartCount", 0)) for status in _containers(pod)),
        failure=message,
        failure_reason=reason,
        admin_url=admin_url(pod),
    )


def admin_url(pod: Object) -> str | None:
    """Where the worker's admin port answers; None while the pod has no address."""
    text = (pod.get("status") or {}).get("podIP")
    if not text:
        return None
    address = ipaddress.ip_address(text)
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{ADMIN_PORT}"


def failure(pod: Object) -> tuple[str, str]:
    """(reason, message) of what keeps the pod from running: the first failing container's, else the scheduler's; or empty."""
    for status in _containers(pod):
        found = _container_failure(status)
        if found is not None:
            return found
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", _short(scheduled.get("message") or "no node has room for the pod")
    return "", ""


def revision(replica_set: Object) -> int:
    """Which of its Deployment's templates a ReplicaSet stands for; the highest is the newest."""
    text = (replica_set["metadata"].get("annotations") or {}).get(REVISION_ANNOTATION, "0")
    return int(text) if text.isdigit() else 0


def _container_failure(status: Object) -> tuple[str, str] | None:
    state = status.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if waiting.get("reason") and waiting["reason"] not in STARTING:
        # In a crash loop the wait only says how long it is; the last run says why.
        last = (status.get("lastState") or {}).get("terminated") or {}
        return str(waiting["reason"]), _short(
            _last_words(last) if last else waiting.get("message") or waiting["reason"]
        )
    if ended and ended.get("exitCode"):
        return str(ended.get("reason") or "Error"), _short(_last_words(ended))
    return None


def _last_words(ended: Object) -> str:
    text = "\n".join((ended.get("message") or "").strip().splitlines()[-LAST_LINES:])
    code = f"exit code {ended.get('exitCode')}"
    head = f"{ended.get('reason') or 'ended'} with {code}"
    return f"{head}: {text}" if text else head


def _replica_failure(deployment: Object) -> WorkerEndpoint | None:
    """A quota or an admission rule keeps pods from being created, so there is none that could tell."""
    condition = _condition(deployment, "ReplicaFailure")
    if condition.get("status") != "True":
        return None
    reason, message = (
        str(condition.get("reason") or "FailedCreate"),
        _short(condition.get("message") or "pods cannot be created"),
    )
    return WorkerEndpoint(
        f"deployment {name_of(deployment)}",
        uid_of(deployment),
        ready=False,
        current=False,
        failure=message,
        failure_reason=reason,
    )


def _containers(pod: Object) -> list[Object]:
    """The worker's own container first: it is the one whose failure tells most."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return sorted(statuses, key=lambda status: status.get("name") != CONTAINER)


def _condition(obj: Object, kind: str) -> Object:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((dict(c) for c in conditions if c.get("type") == kind), {})


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _template(pod: Object) -> str | None:
    return (pod["metadata"].get("annotations") or {}).get(TEMPLATE_ANNOTATION)


def _short(message: str) -> str:
    """The end of a long message: the cause of an error stands in its last lines."""
    text = str(message).strip()
    return text if len(text) <= MESSAGE_LIMIT else "…" + text[-MESSAGE_LIMIT:]


def controls(owner_uid: str, obj: Object) -> bool:
    """Whether the owner controls the object."""
    owner = owner_of(obj)
    return owner is not None and owner["uid"] == owner_uid
