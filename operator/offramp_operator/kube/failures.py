"""Why a worker's pod does not run: one sentence that ends with what to do next.

Kubernetes says it in several places and in many words. The patterns here are the texts of Kubernetes 1.36 (kubelet
``images``, ``eviction``, ``lifecycle``; scheduler ``FitError``; admission ``resourcequota``, ``limitranger``) and of
containerd 2; what none of them matches is passed on unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from offramp_core.reasons import AnyReason, MaybeReason, Reason, parse_reason
from offramp_operator.kube.devices import requested, shortage
from offramp_operator.kube.kinds import Object, name_of
from offramp_operator.kube.manifests import CONTAINER, FETCH_CONTAINER

MESSAGE_LIMIT = 1000
LAST_LINES = 5  # the kubelet hands over up to 80 lines of log; the cause stands at their end
STARTING = {"ContainerCreating", "PodInitializing"}
CLAIMS_MADE_WITHIN, CLAIMS_PREPARED_WITHIN = timedelta(seconds=10), timedelta(minutes=1)
IMAGE_REASONS = {
    Reason.ERR_IMAGE_PULL,
    Reason.IMAGE_PULL_BACK_OFF,
    Reason.REGISTRY_UNAVAILABLE,
    Reason.SIGNATURE_VALIDATION_FAILED,
    Reason.ERR_IMAGE_NEVER_PULL,
    Reason.IMAGE_INSPECT_ERROR,
    Reason.INVALID_IMAGE_NAME,
}
BY_KUBELET = "Pod was rejected: "  # whatever its reason (the kubelet's ``rejectPod``)
NO_SPACE = "no space left on device"


@dataclass(frozen=True, slots=True)
class Advice:
    """``pattern`` in a message of Kubernetes; ``cause`` and ``remedy`` may use its named groups and the names of the
    pod."""

    pattern: str
    cause: str
    remedy: str
    reason: Reason | Literal[""] = ""

    def of(self, text: str, **names: str) -> tuple[MaybeReason, str] | None:
        """(reason, sentence), or None where the pattern does not match. An empty reason keeps the one Kubernetes
        gave."""
        found = re.search(self.pattern, text, re.IGNORECASE | re.DOTALL)
        if found is None:
            return None
        groups = names | {name: value or "" for name, value in found.groupdict().items()}
        return self.reason, f"{self.cause.format(**groups)}; {self.remedy.format(**groups)}"


# {image} is the image's role and reference, {field} where it is asked for, {node} the pod's node.
IMAGES = (
    Advice(NO_SPACE, "{node} has no space left for {image}", "free disk space there or add a node", Reason.DISK_FULL),
    Advice(
        r"unexpected commit digest (?P<got>\S+), expected (?P<wanted>[^\s:]+:\w+)",
        "{image} does not have the digest it is asked for (got {got}, expected {wanted})",
        "push it again or correct {field}",
        Reason.DIGEST_MISMATCH,
    ),
    Advice(
        r"\b401\b|\b403\b|unauthorized|forbidden|access denied|authorization failed|insufficient_scope|no basic auth",
        "the registry of {image} refuses this cluster",
        "name credentials for it in spec.worker.imagePullSecrets, and check that it exists",
    ),
    Advice(
        r"not found|manifest unknown|name unknown|repository does not exist",
        "{image} is not in its registry",
        "push it or correct {field}",
    ),
    Advice(
        r"signature validation failed",
        "the signature of {image} is not accepted on {node}",
        "sign it with a key that the node's policy trusts",
    ),
    Advice(
        r"no such host|timeout|timed out|connection refused|connection reset|network is unreachable|no route to host|"
        r"deadline exceeded|TLS handshake|x509|registry is unavailable|server misbehaving|\b50[0234]\b|EOF",
        "the registry of {image} cannot be reached from {node}",
        "check the registry's name in {field}, the node's network and the registry itself",
    ),
    Advice(
        r"pull policy of Never",
        "{image} is not on {node}, and its pull policy Never forbids to fetch it",
        "load it there or change spec.worker.imagePullPolicy",
    ),
    Advice(
        r"couldn't parse image|InvalidImageName|invalid reference format|Failed to apply default image tag",
        "{image} is no valid image reference",
        "correct {field}",
    ),
)
# The last words of `offramp-worker fetch`, which knows the cause and the next step itself.
FETCHES = tuple(
    Advice(rf"^{reason}: (?P<what>.+); (?P<next>.+)", "{what}", "{next}", reason) for reason in Reason.at("fetch")
)
CONTAINERS = (
    Advice(  # NVIDIA's container toolkit, of what the image says in NVIDIA_REQUIRE_CUDA
        r"unsatisfied condition: cuda\s*>=\s*(?P<cuda>[\d.]*\d)",
        "the GPU driver of {node} is too old for the worker image, which needs one for CUDA {cuda}",
        "update the driver there, or keep these workers to nodes that have one (spec.worker.nodeSelector or the "
        "WorkerClass)",
    ),
    Advice(
        NO_SPACE,
        "{node} has no disk space left for the worker",
        "free disk space there or add a node",
        Reason.DISK_FULL,
    ),
    Advice(
        r"ImageVolumeMountFailed|image volume|mount_option.*image",
        "{node} cannot mount the bundle's image as a volume",
        "its container runtime must support image volumes (containerd 2.1 or CRI-O 1.33, and newer)",
    ),
    Advice(
        r"subPath",
        "the claim in spec.model.uri has no such folder",
        "put the bundle there or correct spec.model.uri",
        Reason.INVALID_BUNDLE,
    ),
    Advice(
        r"executable file not found|no such file or directory",
        "the worker image has no program offramp-worker",
        "name an image of Offramp's in spec.worker.image",
    ),
)
EVICTIONS = (
    Advice(
        r"low on resource: (?P<what>ephemeral-storage|inodes|nodefs\S*|imagefs\S*)",
        "{node} evicted {pod} because its disk is full ({what})",
        "free disk space there or add a node; a replacement is started by itself",
        Reason.DISK_FULL,
    ),
    Advice(
        r"low on resource: (?P<what>[\w-]+)",
        "{node} evicted {pod} because it ran out of {what}",
        "set spec.worker.resources.requests.{what} to what a worker uses, or add a node",
    ),
    Advice(
        r'EmptyDir volume "(?P<volume>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"',
        "{pod} was evicted because it wrote more than {limit} to its folder {volume}",
        "a replacement is started by itself; report it as a fault of the worker image if it comes back",
        Reason.DISK_FULL,
    ),
    Advice(
        r"ephemeral storage|ephemeral local storage",
        "{pod} was evicted because it wrote more than its limit of ephemeral storage",
        "raise spec.worker.resources.limits.ephemeral-storage",
        Reason.DISK_FULL,
    ),
    Advice(  # NVIDIA's device plugin, of a GPU that it divides by time or with MPS
        r"request for [\"'](?P<what>[\w./-]+).* maximum request size for shared resources is 1",
        "{node} refused {pod}, since its device plugin gives a worker no more than one share of a GPU as {what}",
        "ask for 1 in resources.limits of spec.worker or of the WorkerClass, or for whole GPUs on other nodes",
    ),
    Advice(
        r"devices unavailable for (?P<what>[\w./-]+?)\. Requested: (?P<n>\d+), Available: (?P<m>\d+)",
        "{node} promised {n} of {what} and has {m}",
        "check the device plugin and the devices of that node; a replacement is started by itself",
    ),
    Advice(
        r"enough resource: (?P<what>[\w./-]+), requested: (?P<n>\d+), used: (?P<used>\d+), capacity: (?P<m>\d+)",
        "{node} refused {pod} because {what} was taken meanwhile ({used} of {m} used)",
        "a replacement is started by itself; add a node if it comes back",
    ),
    Advice(
        r"node shutdown|shutting down",
        "{node} is shutting down and ended {pod}",
        "a replacement is started by itself on another node; add one if none has room",
    ),
)
LABELS = Advice(
    r"node affinity/selector",
    "no suitable node has the labels that workers ask for",
    "label one, or change spec.worker.nodeSelector or spec.worker.affinity",
)
# Each cause that the scheduler counts, in the order in which it is most likely to be the one to mend.
SCHEDULING = (
    Advice(
        r"cannot allocate all claims",
        "no node has free devices for {claims}",
        "end a pod that uses one, add a node with one and its driver, or change resourceClaims in spec.worker or the "
        "WorkerClass",
    ),
    Advice(
        r"device class (?P<what>\S+) does not exist",
        "there is no DeviceClass {what}, which {claims} asks for",
        "install the driver that brings it, or correct the claim's template",
    ),
    Advice(
        r"Insufficient (?P<what>ephemeral-storage|cpu|memory)",
        "no node has enough {what} left",
        "add a node, or lower spec.worker.resources.requests or spec.replicas",
    ),
    Advice(
        r'persistentvolumeclaim "(?P<what>[^"]+)" (?:not found|is being deleted)',
        "there is no PersistentVolumeClaim {what} in this namespace",
        "create it or correct spec.model.uri",
    ),
    Advice(
        r"unbound immediate PersistentVolumeClaims",
        "the claim in spec.model.uri is bound to no volume",
        "see the events of the PersistentVolumeClaim",
    ),
    Advice(
        r"volume node affinity conflict",
        "no node that has room can reach the volume of the claim in spec.model.uri",
        "add a node in the volume's zone, or use a volume that every node can mount read-only",
    ),
    Advice(r"Too many pods", "every node holds as many pods as it may", "add a node, or lower spec.replicas"),
    LABELS,
    Advice(r"taint", "nodes are tainted against these workers", "add the toleration to spec.worker.tolerations"),
    Advice(
        r"topology spread",
        "no node keeps workers as spread as they ask",
        "add a node in another domain, or change spec.worker.topologySpreadConstraints",
    ),
    Advice(
        r"anti-affinity|pod affinity",
        "no node agrees with the affinity between pods",
        "add a node, or change spec.worker.affinity",
    ),
    Advice(
        r"scheduling gates",
        "the pod is held by a scheduling gate",
        "whoever set it (a queue such as Kueue) must admit the pod",
    ),
    Advice(r"were unschedulable", "nodes are cordoned", "uncordon one or add a node"),
    Advice(r"no nodes available", "the cluster has no node", "add one"),
)
_AFTER_COUNTS = r"\.\s+(?:no new claims to deallocate|still not schedulable|preemption:)"
CREATION = (
    Advice(
        r"exceeded quota: (?P<quota>[^,\s]+), requested: (?P<asked>.+?), used: (?P<used>.+?), limited: (?P<limited>.+)",
        "the namespace's quota {quota} is used up (requested {asked}; used {used}; limit {limited})",
        "raise the quota, free some of it, or lower spec.worker.resources or spec.replicas",
        Reason.QUOTA_EXCEEDED,
    ),
    Advice(
        r"failed quota: (?P<quota>[^:\s]+): must specify (?P<what>.+)$",
        "the namespace's quota {quota} wants workers to say {what}",
        "set it in spec.worker.resources",
        Reason.QUOTA_EXCEEDED,
    ),
    Advice(
        r"(?P<rule>(?:maximum|minimum) \S+ usage per \S+ is [^.\]]+)",
        "the namespace's LimitRange refuses workers ({rule})",
        "change spec.worker.resources",
        Reason.LIMIT_RANGE,
    ),
    Advice(
        r"no PriorityClass with name (?P<what>\S+) was found",
        "there is no PriorityClass {what}",
        "create it or correct spec.worker.priorityClassName",
    ),
    Advice(
        r'RuntimeClass \\?"(?P<what>[^"\\]+)\\?" not found',
        "there is no RuntimeClass {what}",
        "create it or correct spec.worker.runtimeClassName",
    ),
    Advice(
        r'violates PodSecurity "(?P<level>[^"]+)": (?P<what>.+)',
        "the namespace's pod security ({level}) refuses workers ({what})",
        "workers ask for nothing but what restricted allows: look for a webhook that changes pods",
    ),
    Advice(
        r'admission webhook "(?P<hook>[^"]+)" denied the request: (?P<what>.+)',
        "the admission webhook {hook} refuses workers ({what})",
        "ask whoever runs that webhook",
    ),
)


def failure(pod: Object, *, now: datetime | None = None) -> tuple[MaybeReason, str]:
    """(reason, sentence) of what keeps a pod from running: the fetching one's, the worker container's, else the
    scheduler's; or empty."""
    if (pod.get("status") or {}).get("phase") == "Failed":
        return _ended(pod)
    found = _fetch_failure(pod)
    for status in containers(pod):
        found = found or _container_failure(pod, status)
    if found is not None:
        return found
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(pod, reason_of(scheduled, Reason.UNSCHEDULABLE), str(scheduled.get("message") or ""))
    now = datetime.now(UTC) if now is None else now
    return _unprepared(pod, now) if scheduled else _without_claim(pod, now)


def was_rejected(pod: Object) -> bool:
    """Whether the kubelet did not admit the pod to its node."""
    status = pod.get("status") or {}
    return status.get("phase") == "Failed" and str(status.get("message") or "").startswith(BY_KUBELET)


def creation_failure(message: str, *, reason: AnyReason) -> tuple[AnyReason, str]:
    """(reason, sentence) of what keeps pods from being created at all: a quota, a limit, an admission rule."""
    return _first(CREATION, message, reason) or (
        reason,
        shortened(f"pods cannot be created ({one_line(message)}); see the events of the workers' ReplicaSet"),
    )


def reason_of(obj: Object, otherwise: Reason) -> AnyReason:
    """Kubernetes' own reason, where it gives one."""
    return parse_reason(str(obj["reason"])) if obj.get("reason") else otherwise


def condition(obj: Object, kind: str) -> Object:
    """One of an object's conditions; empty where it has none of that type."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((dict(c) for c in conditions if c.get("type") == kind), {})


def containers(pod: Object) -> list[Object]:
    """Container statuses, the worker's own first: it is the one whose failure tells most."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return sorted(statuses, key=lambda status: status.get("name") != CONTAINER)


def _fetch_failure(pod: Object) -> tuple[AnyReason, str] | None:
    """Why the bundle was not fetched. The last attempt's message stands until one succeeds, also while the next one
    runs."""
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    status = next((status for status in statuses if status.get("name") == FETCH_CONTAINER), None)
    if status is None:
        return None
    state = status.get("state") or {}
    if (state.get("terminated") or {}).get("exitCode") == 0:
        return None
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    found = _first(FETCHES, str(ended.get("message") or ""), Reason.FETCH_FAILED) if ended.get("exitCode") else None
    return found or _container_failure(pod, status)


def shortened(message: str) -> str:
    """The beginning and the end of a long message: what it is about, and the cause that stands in its last words."""
    text = message.strip()
    half = MESSAGE_LIMIT // 2
    return text if len(text) <= MESSAGE_LIMIT else f"{text[:half]} … {text[-half:]}"


def one_line(message: str) -> str:
    """A message without line breaks and without its final stop, to stand inside a sentence."""
    return "; ".join(line.strip() for line in message.strip().splitlines() if line.strip()).rstrip(".")


def _ended(pod: Object) -> tuple[AnyReason, str]:
    status = pod["status"]
    reason, message = reason_of(status, Reason.FAILED), str(status.get("message") or "")
    found = _first(EVICTIONS, message, reason, node=_node(pod), pod=name_of(pod))
    if found is None and was_rejected(pod):
        devices = " and ".join(requested(pod))
        what = f"{name_of(pod)}, which asks for {devices}," if devices else name_of(pod)
        words = one_line(message.removeprefix(BY_KUBELET))
        see = "that node's device plugin, and what it takes" if devices else "what that node takes"
        found = reason, shortened(f"{_node(pod)} rejected {what} as {reason} ({words}); see {see}")
    detail = f" ({one_line(message)})" if message else ""
    return found or (reason, shortened(f"{name_of(pod)} ended as {reason}{detail}; a replacement is started by itself"))


def _container_failure(pod: Object, status: Object) -> tuple[AnyReason, str] | None:
    state = status.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    reason, message = parse_reason(str(waiting.get("reason") or "")), str(waiting.get("message") or "")
    if reason in IMAGE_REASONS:
        return _image_failure(pod, reason, message)
    if reason == Reason.CRASH_LOOP_BACK_OFF:
        # The wait only says how long it is; the last run says why.
        ended = (status.get("lastState") or {}).get("terminated") or {}
        return _last_run(pod, reason, ended) if ended else (reason, f"the worker keeps ending; {_logs(pod)}")
    if reason and reason not in STARTING:
        found = _first(CONTAINERS, message, reason, node=_node(pod))
        detail = one_line(message) or reason
        return found or (reason, shortened(f"the worker's container cannot be started ({detail}); see spec.worker"))
    if ended and ended.get("exitCode"):
        return _last_run(pod, reason_of(ended, Reason.ERROR), ended)
    return None


def _last_run(pod: Object, reason: AnyReason, ended: Object) -> tuple[AnyReason, str]:
    if ended.get("reason") == Reason.OOM_KILLED:
        limit = _memory_limit(pod)
        than = f"its limit of {limit} of memory" if limit else "the node's memory"
        return (
            Reason.OOM_KILLED,
            f"the worker was ended because it used more than {than}; raise spec.worker.resources.limits.memory",
        )
    words = one_line("\n".join(str(ended.get("message") or "").strip().splitlines()[-LAST_LINES:]))
    found = _first(CONTAINERS, words, reason, node=_node(pod))
    if found is not None:
        return found
    detail = f": {words}" if words else ""
    return reason, shortened(f"the worker ended with exit code {ended.get('exitCode')}{detail}") + f"; {_logs(pod)}"


def _image_failure(pod: Object, reason: AnyReason, message: str) -> tuple[AnyReason, str]:
    """Whose image it is shows in the message alone: bundle and worker are pulled on behalf of the same container."""
    spec = pod.get("spec") or {}
    volumes = (str((v.get("image") or {}).get("reference") or "") for v in spec.get("volumes") or ())
    bundle = next((reference for reference in volumes if reference), "")
    own = str((spec.get("containers") or [{}])[0].get("image") or "")
    if bundle and _names(message, bundle) and not (_names(message, own) and len(own) > len(bundle)):
        image, field = f"the bundle {bundle}", "spec.model.uri"
    else:
        image, field = f"the worker image {own}".strip(), "spec.worker.image (or the chart's workerImage)"
    # The name of an image may hold words such as "timeout" itself.
    cause = message
    for reference in (bundle, own):
        cause = cause.replace(reference, "") if reference else cause
    found = _first(IMAGES, f"{reason} {cause}", reason, image=image, field=field, node=_node(pod))
    detail = one_line(message) or reason
    return found or (reason, shortened(f"{image} cannot be pulled ({detail}); check {field} and its registry"))


def _names(message: str, reference: str) -> bool:
    """Whether a message speaks of an image; the runtime may have put its default registry in front and its default tag
    behind."""
    return bool(reference) and re.search(rf"(?<![\w.-]){re.escape(reference)}(?![\w.-])", message) is not None


def _unscheduled(pod: Object, reason: AnyReason, message: str) -> tuple[AnyReason, str]:
    """The scheduler counts nodes by cause; each cause becomes a clause, and the count stands behind them. A device
    comes first: it is the scarcest."""
    counted = re.split(_AFTER_COUNTS, message, maxsplit=1)[0].strip().rstrip(".")
    short = shortage(pod, message)
    devices = [] if short is None else [(short.cause, "; ", short.remedy)]
    claims = _claims(pod) or "the claims that workers ask for"
    # Nodes that have the device, and the labels, and are full: the others' labels are nothing to mend.
    asked = [advice for advice in SCHEDULING if advice is not LABELS or short is None or not short.offering]
    others = [found[1].partition("; ") for advice in asked if (found := advice.of(counted, claims=claims)) is not None]
    matched = devices + others
    if not matched:
        return reason, shortened(
            f"no node takes the worker ({one_line(counted) or reason}); add a node or see spec.worker"
        )
    causes, remedies = ([part[i] for part in matched] for i in (0, 2))
    return reason, shortened(f"{' and '.join(causes)} ({counted}); {', or '.join(remedies)}")


def _without_claim(pod: Object, now: datetime) -> tuple[MaybeReason, str]:
    """A pod without one of its claims is not looked at by the scheduler, and nothing in the pod says so. Its claims are
    usually made within a second."""
    wanted, created = _claims(pod), (pod.get("metadata") or {}).get("creationTimestamp")
    if not wanted or not created or now - datetime.fromisoformat(str(created)) < CLAIMS_MADE_WITHIN:
        return "", ""
    return Reason.UNSCHEDULABLE, (
        f"the scheduler waits for {wanted}; see that it exists in this namespace, or correct resourceClaims in "
        "spec.worker or the WorkerClass"
    )


def _unprepared(pod: Object, now: datetime) -> tuple[MaybeReason, str]:
    """A node prepares a pod's volumes, its claims and its network before anything of it begins. Which of them lacks
    stands in the pod's events alone."""
    begun, wanted = condition(pod, "PodReadyToStartContainers"), _claims(pod)
    since = begun.get("lastTransitionTime")
    if begun.get("status") != "False" or not wanted or not since:
        return "", ""
    if now - datetime.fromisoformat(str(since)) < CLAIMS_PREPARED_WITHIN:
        return "", ""
    return Reason.WORKER_FAILED, (
        f"{_node(pod)} has begun nothing of {name_of(pod)} for a minute: its volumes, {wanted}, or its network are not "
        f"prepared; see which in the events of kubectl describe pod {name_of(pod)}, and for the claim that the driver "
        "of its devices runs there"
    )


def _claims(pod: Object) -> str:
    """The claims of a pod, in words; of those that are made from templates the ones that are not made yet, where there
    are such."""
    listed = (pod.get("spec") or {}).get("resourceClaims") or ()
    made = {status.get("name") for status in (pod.get("status") or {}).get("resourceClaimStatuses") or ()}
    lacking = [claim for claim in listed if claim.get("resourceClaimTemplateName") and claim["name"] not in made]
    return " and ".join(
        f"claim {claim['name']} of ResourceClaimTemplate {claim['resourceClaimTemplateName']}"
        if claim.get("resourceClaimTemplateName")
        else f"claim {claim['name']}, ResourceClaim {claim.get('resourceClaimName')}"
        for claim in lacking or listed
    )


def _first(table: Iterable[Advice], text: str, reason: AnyReason, **names: str) -> tuple[AnyReason, str] | None:
    for advice in table:
        found = advice.of(one_line(text), **names)
        if found is not None:
            return found[0] or reason, shortened(found[1])
    return None


def _node(pod: Object) -> str:
    name = (pod.get("spec") or {}).get("nodeName")
    return f"node {name}" if name else "the node"


def _memory_limit(pod: Object) -> str:
    first = ((pod.get("spec") or {}).get("containers") or [{}])[0]
    return str(((first.get("resources") or {}).get("limits") or {}).get("memory") or "")


def _logs(pod: Object) -> str:
    return f"see kubectl logs {name_of(pod)} --previous"
