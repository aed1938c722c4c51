"""What goes wrong with a pod becomes one sentence that ends with the next step.

The statuses are as Kubernetes 1.36 and containerd 2 write them: the formats stand in the kubelet's ``images``,
``eviction`` and ``lifecycle`` packages, the scheduler's ``FitError`` and the admission plugins named in
``kube/failures.py``.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from offramp_core.errors import DeliveryError
from offramp_operator.kube.failures import MESSAGE_LIMIT, creation_failure, failure
from offramp_operator.kube.kinds import POD
from offramp_operator.kube.trim import read_event, trim

BUNDLE, WORKER = "registry.example/digits:1", "registry.example/offramp/worker:1"
GPU = "nvidia.com/gpu"


def _pod(**status: Any) -> dict[str, Any]:
    limits = {"memory": "512Mi"}
    return {
        "metadata": {"name": "digits-6c9f-x2x1z", "uid": "u", "resourceVersion": "7"},
        "spec": {
            "nodeName": "n1",
            "containers": [{"name": "worker", "image": WORKER, "resources": {"limits": limits}}],
            "volumes": [{"name": "bundle", "image": {"reference": BUNDLE}}, {"name": "state", "emptyDir": {}}],
        },
        "status": {"phase": "Pending", **status},
    }


def _waiting(reason: str, message: str = "", last: dict[str, Any] | None = None) -> dict[str, Any]:
    status = {"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"containerStatuses": [status | ({"lastState": {"terminated": last}} if last else {})]}


def _failed(reason: str, message: str) -> dict[str, Any]:
    return {"phase": "Failed", "reason": reason, "message": message}


def _unscheduled(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def _pull(image: str, cause: str) -> str:
    return f'failed to pull and unpack image "{image}": {cause}'


def _resolve(image: str, cause: str) -> str:
    return _pull(image, f'failed to resolve reference "{image}": {cause}')


NO_VICTIMS = "preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
PODS: dict[str, tuple[dict[str, Any], str, str]] = {
    "bundle not in its registry": (
        _waiting("ErrImagePull", _resolve(BUNDLE, f"{BUNDLE}: not found")),
        "ErrImagePull",
        f"the bundle {BUNDLE} is not in its registry; push it or correct spec.model.uri",
    ),
    "bundle still not there": (
        _waiting(
            "ImagePullBackOff",
            f'Back-off pulling image "{BUNDLE}": ErrImagePull: {_resolve(BUNDLE, f"{BUNDLE}: not found")}',
        ),
        "ImagePullBackOff",
        f"the bundle {BUNDLE} is not in its registry; push it or correct spec.model.uri",
    ),
    "bundle's registry out of reach": (
        _waiting(
            "ErrImagePull",
            _resolve(
                BUNDLE,
                'failed to do request: Head "https://registry.example/v2/digits/manifests/1": '
                "dial tcp: lookup registry.example on 10.96.0.10:53: no such host",
            ),
        ),
        "ErrImagePull",
        f"the registry of the bundle {BUNDLE} cannot be reached from node n1; check the registry's name in "
        "spec.model.uri, the "
        "node's network and the registry itself",
    ),
    "registry that is down": (
        _waiting(
            "RegistryUnavailable",
            f"image pull failed for {WORKER} because the registry is unavailable: 503 Service Unavailable",
        ),
        "RegistryUnavailable",
        f"the registry of the worker image {WORKER} cannot be reached from node n1; check the registry's name in "
        "spec.worker.image (or "
        "the chart's workerImage), the node's network and the registry itself",
    ),
    "bundle of another digest": (
        _waiting(
            "ErrImagePull",
            _pull(
                BUNDLE,
                'failed to copy: failed commit on ref "layer-sha256:aa": unexpected commit digest '
                "sha256:bb, expected sha256:aa: failed precondition",
            ),
        ),
        "DigestMismatch",
        f"the bundle {BUNDLE} does not have the digest it is asked for (got sha256:bb, expected sha256:aa); push it "
        "again or correct "
        "spec.model.uri",
    ),
    "no credentials": (
        _waiting(
            "ErrImagePull",
            _resolve(
                BUNDLE,
                "pull access denied, repository does not exist or may require authorization: server "
                "message: insufficient_scope: authorization failed",
            ),
        ),
        "ErrImagePull",
        f"the registry of the bundle {BUNDLE} refuses this cluster; name credentials for it in "
        "spec.worker.imagePullSecrets, and check "
        "that it exists",
    ),
    "full disk while pulling": (
        _waiting(
            "ErrImagePull",
            _pull(
                BUNDLE,
                "failed to extract layer (application/vnd.oci.image.layer.v1.tar+gzip sha256:aa) to "
                'overlayfs as "extract-1": write /var/lib/containerd/x: no space left on device',
            ),
        ),
        "DiskFull",
        f"node n1 has no space left for the bundle {BUNDLE}; free disk space there or add a node",
    ),
    "worker image missing": (
        _waiting("ErrImagePull", _resolve(WORKER, f"{WORKER}: not found")),
        "ErrImagePull",
        f"the worker image {WORKER} is not in its registry; push it or correct spec.worker.image (or the chart's "
        "workerImage)",
    ),
    "never pulled": (
        _waiting("ErrImageNeverPull", f'Container image "{WORKER}" is not present with pull policy of Never'),
        "ErrImageNeverPull",
        f"the worker image {WORKER} is not on node n1, and its pull policy Never forbids to fetch it; load it there "
        "or change "
        "spec.worker.imagePullPolicy",
    ),
    "no image name": (
        _waiting(
            "InvalidImageName",
            f'Failed to apply default image tag "{WORKER}": couldn\'t parse image name "{WORKER}": invalid '
            "reference format",
        ),
        "InvalidImageName",
        f"the worker image {WORKER} is no valid image reference; correct spec.worker.image (or the chart's "
        "workerImage)",
    ),
    "signature refused": (
        _waiting(
            "SignatureValidationFailed",
            f"image pull failed for {BUNDLE} because the signature validation failed: no key",
        ),
        "SignatureValidationFailed",
        f"the signature of the bundle {BUNDLE} is not accepted on node n1; sign it with a key that the node's policy "
        "trusts",
    ),
    "pull that fails for a new reason": (
        _waiting("ErrImagePull", _pull(BUNDLE, "something new")),
        "ErrImagePull",
        f'the bundle {BUNDLE} cannot be pulled (failed to pull and unpack image "{BUNDLE}": something new); check '
        "spec.model.uri and its "
        "registry",
    ),
    "node without image volumes": (
        _waiting("CreateContainerError", "ImageVolumeMountFailed: mount image volume: not supported"),
        "CreateContainerError",
        "node n1 cannot mount the bundle's image as a volume; its container runtime must support image volumes "
        "(containerd 2.1 or "
        "CRI-O 1.33, and newer)",
    ),
    "full disk at the start": (
        _waiting(
            "CreateContainerError",
            "failed to create containerd container: mkdir /var/lib/containerd/1: no space left on device",
        ),
        "DiskFull",
        "node n1 has no disk space left for the worker; free disk space there or add a node",
    ),
    "an image that is no worker": (
        _waiting(
            "RunContainerError",
            'failed to create containerd task: exec: "offramp-worker": executable file not found in $PATH',
        ),
        "RunContainerError",
        "the worker image has no program offramp-worker; name an image of Offramp's in spec.worker.image",
    ),
    "a container that cannot be configured": (
        _waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root."),
        "CreateContainerConfigError",
        "the worker's container cannot be started (container has runAsNonRoot and image will run as root); see "
        "spec.worker",
    ),
    "crash loop": (
        _waiting(
            "CrashLoopBackOff",
            "back-off 40s restarting failed container",
            {"reason": "Error", "exitCode": 3, "message": "starting\nOFFRAMP_PORT is 'x'; it must be a port\n"},
        ),
        "CrashLoopBackOff",
        "the worker ended with exit code 3: starting; OFFRAMP_PORT is 'x'; it must be a port; see kubectl logs "
        "digits-6c9f-x2x1z --previous",
    ),
    "full disk at work": (
        _waiting(
            "CrashLoopBackOff",
            "",
            {"reason": "Error", "exitCode": 1, "message": "OSError: [Errno 28] No space left on device"},
        ),
        "DiskFull",
        "node n1 has no disk space left for the worker; free disk space there or add a node",
    ),
    "out of memory": (
        {"containerStatuses": [{"name": "worker", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
        "OOMKilled",
        "the worker was ended because it used more than its limit of 512Mi of memory; raise "
        "spec.worker.resources.limits.memory",
    ),
    "out of memory again and again": (
        _waiting("CrashLoopBackOff", "back-off", {"reason": "OOMKilled", "exitCode": 137}),
        "OOMKilled",
        "the worker was ended because it used more than its limit of 512Mi of memory; raise "
        "spec.worker.resources.limits.memory",
    ),
    "evicted from a full disk": (
        _failed(
            "Evicted",
            "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi. Container "
            "worker "
            "was using 1Gi, request is 0, has larger consumption of ephemeral-storage. ",
        ),
        "DiskFull",
        "node n1 evicted digits-6c9f-x2x1z because its disk is full (ephemeral-storage); free disk space there or add "
        "a node; a "
        "replacement is started by itself",
    ),
    "evicted for memory": (
        _failed("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. "),
        "Evicted",
        "node n1 evicted digits-6c9f-x2x1z because it ran out of memory; set spec.worker.resources.requests.memory to "
        "what a worker "
        "uses, or add a node",
    ),
    "too much state": (
        _failed("Evicted", 'Usage of EmptyDir volume "state" exceeds the limit "64Mi". '),
        "DiskFull",
        "digits-6c9f-x2x1z was evicted because it wrote more than 64Mi to its folder state; a replacement is started "
        "by itself; report "
        "it as a fault of the worker image if it comes back",
    ),
    "too much ephemeral storage": (
        _failed("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "),
        "DiskFull",
        "digits-6c9f-x2x1z was evicted because it wrote more than its limit of ephemeral storage; raise "
        "spec.worker.resources.limits.ephemeral-storage",
    ),
    "GPU that is gone": (
        _failed(
            "UnexpectedAdmissionError",
            f"Pod was rejected: Allocate failed due to requested number of devices unavailable for {GPU}. "
            "Requested: 1, Available: 0, which is unexpected",
        ),
        "UnexpectedAdmissionError",
        f"node n1 promised 1 of {GPU} and has 0; check the device plugin and the devices of that node; a replacement "
        "is started by itself",
    ),
    "two shares of a GPU": (
        _failed(
            "UnexpectedAdmissionError",
            "Pod was rejected: Allocate failed due to rpc error: code = Unknown desc = invalid allocation request for "
            f'"{GPU}": invalid request: maximum request size for shared resources is 1; found 2, which is unexpected',
        ),
        "UnexpectedAdmissionError",
        "node n1 refused digits-6c9f-x2x1z, since its device plugin gives a worker no more than one share of a GPU as "
        f"{GPU}; ask for 1 in resources.limits of spec.worker or of the WorkerClass, or for whole GPUs on other nodes",
    ),
    "two shares of a GPU, as older plugins say it": (
        _failed(
            "UnexpectedAdmissionError",
            f"Allocate failed due to rpc error: code = Unknown desc = request for '{GPU}: 2' too large: maximum "
            "request size for shared resources is 1, which is unexpected",
        ),
        "UnexpectedAdmissionError",
        "node n1 refused digits-6c9f-x2x1z, since its device plugin gives a worker no more than one share of a GPU as "
        f"{GPU}; ask for 1 in resources.limits of spec.worker or of the WorkerClass, or for whole GPUs on other nodes",
    ),
    "driver that is too old": (
        _waiting(
            "RunContainerError",
            "failed to start containerd task: OCI runtime create failed: runc create failed: unable to start container "
            "process: error during container init: error running prestart hook #0: exit status 1, stdout: , stderr: "
            "Auto-detected mode as 'legacy'\nnvidia-container-cli: requirement error: unsatisfied condition: "
            "cuda>=13.0, please update your driver to a newer version, or use an earlier cuda container",
        ),
        "RunContainerError",
        "the GPU driver of node n1 is too old for the worker image, which needs one for CUDA 13.0; update the driver "
        "there, or keep these workers to nodes that have one (spec.worker.nodeSelector or the WorkerClass)",
    ),
    "room that was taken": (
        _failed(
            "OutOfcpu",
            "Pod was rejected: Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000",
        ),
        "OutOfcpu",
        "node n1 refused digits-6c9f-x2x1z because cpu was taken meanwhile (3000 of 4000 used); a replacement is "
        "started by "
        "itself; add a node if it comes back",
    ),
    "node that is going": (
        _failed("Terminated", "Pod was terminated in response to imminent node shutdown."),
        "Terminated",
        "node n1 is shutting down and ended digits-6c9f-x2x1z; a replacement is started by itself on another node; "
        "add one if none has room",
    ),
    "missing GPU": (
        _unscheduled(f"0/3 nodes are available: 3 Insufficient {GPU}. no new claims to deallocate, {NO_VICTIMS}"),
        "Unschedulable",
        f"no node has a free {GPU}, since other pods use those of 3 nodes (0/3 nodes are available: 3 Insufficient "
        f"{GPU}); end one of those pods, or add a node with one and its device plugin, or change "
        "spec.worker.resources.limits",
    ),
    "missing GPU of a product": (
        _unscheduled(
            f"0/5 nodes are available: 2 Insufficient {GPU}, 3 node(s) didn't match Pod's node affinity/selector. "
            "preemption: 0/5 nodes are available: 2 No preemption victims found for incoming pod, 3 Preemption is not "
            "helpful for scheduling."
        ),
        "Unschedulable",
        f"no node has a free {GPU}, since other pods use those of 2 nodes (0/5 nodes are available: 2 Insufficient "
        f"{GPU}, 3 node(s) didn't match Pod's node affinity/selector); end one of those pods, or add a node with one "
        "and its device plugin, or change spec.worker.resources.limits",
    ),
    "devices of a claim": (
        _unscheduled(f"0/3 nodes are available: 3 cannot allocate all claims. still not schedulable, {NO_VICTIMS}"),
        "Unschedulable",
        "no node has free devices for the claims that workers ask for (0/3 nodes are available: 3 cannot allocate all "
        "claims); end a pod that uses one, add a node with one and its driver, or change resourceClaims in spec.worker "
        "or the WorkerClass",
    ),
    "no room": (
        _unscheduled(f"0/3 nodes are available: 1 Insufficient memory, 3 Insufficient cpu. {NO_VICTIMS}"),
        "Unschedulable",
        "no node has enough memory left (0/3 nodes are available: 1 Insufficient memory, 3 Insufficient cpu); add a "
        "node, or lower "
        "spec.worker.resources.requests or spec.replicas",
    ),
    "GPU nodes that are tainted": (
        _unscheduled(
            f"0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient {GPU}. preemption: 0/3 nodes "
            "are available: 1 Preemption is not helpful for scheduling, 2 No preemption victims found for incoming pod."
        ),
        "Unschedulable",
        f"no node has a free {GPU}, since other pods use those of 2 nodes and nodes are tainted against these "
        "workers (0/3 nodes are available: 1 node(s) had untolerated "
        f"taint(s), 2 Insufficient {GPU}); end one of those pods, or add a node with one and its device plugin, or "
        "change spec.worker.resources.limits, or add the toleration to spec.worker.tolerations",
    ),
    "no such node label": (
        _unscheduled(
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. no new claims to "
            f"deallocate, {NO_VICTIMS}"
        ),
        "Unschedulable",
        "no suitable node has the labels that workers ask for (0/1 nodes are available: 1 node(s) didn't match Pod's "
        "node "
        "affinity/selector); label one, or change spec.worker.nodeSelector or spec.worker.affinity",
    ),
    "spread too far": (
        _unscheduled("0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints."),
        "Unschedulable",
        "no node keeps workers as spread as they ask (0/2 nodes are available: 2 node(s) didn't match pod topology "
        "spread constraints); "
        "add a node in another domain, or change spec.worker.topologySpreadConstraints",
    ),
    "affinity between pods": (
        _unscheduled("0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules."),
        "Unschedulable",
        "no node agrees with the affinity between pods (0/2 nodes are available: 2 node(s) didn't match pod "
        "anti-affinity rules); add a "
        "node, or change spec.worker.affinity",
    ),
    "full nodes": (
        _unscheduled("0/2 nodes are available: 2 Too many pods."),
        "Unschedulable",
        "every node holds as many pods as it may (0/2 nodes are available: 2 Too many pods); add a node, or lower "
        "spec.replicas",
    ),
    "cordoned": (
        _unscheduled("0/1 nodes are available: 1 node(s) were unschedulable."),
        "Unschedulable",
        "nodes are cordoned (0/1 nodes are available: 1 node(s) were unschedulable); uncordon one or add a node",
    ),
    "held by a queue": (
        _unscheduled("Scheduling is blocked due to non-empty scheduling gates", "SchedulingGated"),
        "SchedulingGated",
        "the pod is held by a scheduling gate (Scheduling is blocked due to non-empty scheduling gates); whoever set "
        "it (a queue such as "
        "Kueue) must admit the pod",
    ),
    "an unknown cause": (
        _unscheduled("0/1 nodes are available: 1 node(s) were too far away."),
        "Unschedulable",
        "no node takes the worker (0/1 nodes are available: 1 node(s) were too far away); add a node or see "
        "spec.worker",
    ),
}

FORBIDDEN = 'pods "digits-6c9f-x2x1z" is forbidden: '
CREATIONS: dict[str, tuple[str, str, str]] = {
    "quota used up": (
        FORBIDDEN + "exceeded quota: compute, requested: limits.cpu=2, used: limits.cpu=3, limited: limits.cpu=4",
        "QuotaExceeded",
        "the namespace's quota compute is used up (requested limits.cpu=2; used limits.cpu=3; limit limits.cpu=4); "
        "raise the quota, free "
        "some of it, or lower spec.worker.resources or spec.replicas",
    ),
    "quota on what is not said": (
        FORBIDDEN + "failed quota: compute: must specify limits.cpu for: worker; limits.memory for: worker",
        "QuotaExceeded",
        "the namespace's quota compute wants workers to say limits.cpu for: worker; limits.memory for: worker; set it "
        "in spec.worker.resources",
    ),
    "limit range": (
        FORBIDDEN + "maximum cpu usage per Container is 1, but limit is 2",
        "LimitRange",
        "the namespace's LimitRange refuses workers (maximum cpu usage per Container is 1, but limit is 2); change "
        "spec.worker.resources",
    ),
    "priority class": (
        FORBIDDEN + "no PriorityClass with name high was found",
        "FailedCreate",
        "there is no PriorityClass high; create it or correct spec.worker.priorityClassName",
    ),
    "runtime class": (
        FORBIDDEN + 'pod rejected: RuntimeClass "nvidia" not found',
        "FailedCreate",
        "there is no RuntimeClass nvidia; create it or correct spec.worker.runtimeClassName",
    ),
    "pod security": (
        FORBIDDEN
        + 'violates PodSecurity "restricted:latest": privileged (container "worker" must not set privileged=true)',
        "FailedCreate",
        'the namespace\'s pod security (restricted:latest) refuses workers (privileged (container "worker" must not '
        "set "
        "privileged=true)); workers ask for nothing but what restricted allows: look for a webhook that changes pods",
    ),
    "webhook": (
        'admission webhook "policy.example.com" denied the request: images must be signed',
        "FailedCreate",
        "the admission webhook policy.example.com refuses workers (images must be signed); ask whoever runs that "
        "webhook",
    ),
    "something else": (
        "the server is tired",
        "FailedCreate",
        "pods cannot be created (the server is tired); see the events of the workers' ReplicaSet",
    ),
}


@pytest.mark.parametrize(("status", "reason", "sentence"), PODS.values(), ids=PODS.keys())
def test_what_keeps_a_pod_from_running_is_told(status: dict[str, Any], reason: str, sentence: str) -> None:
    pod = _pod(**status)
    _, watched = read_event(POD, json.dumps({"type": "MODIFIED", "object": pod}).encode())
    # What the cache keeps of a pod is all that there is to tell it from.
    assert failure(pod) == failure(trim(POD, pod)) == failure(watched) == (reason, sentence)


@pytest.mark.parametrize(("message", "reason", "sentence"), CREATIONS.values(), ids=CREATIONS.keys())
def test_what_keeps_pods_from_being_made_is_told(message: str, reason: str, sentence: str) -> None:
    assert creation_failure(message, reason="FailedCreate") == (reason, sentence)


@pytest.mark.parametrize(
    "status",
    [
        {},
        _waiting("ContainerCreating"),
        _waiting("PodInitializing"),
        {"conditions": [{"type": "PodScheduled", "status": "True"}]},
    ],
)
def test_a_pod_that_starts_tells_nothing(status: dict[str, Any]) -> None:
    assert failure(_pod(**status)) == ("", "")


def test_of_a_long_message_beginning_and_end_are_kept() -> None:
    last = {"reason": "Error", "exitCode": 1, "message": "x" * 5000 + " the cause"}
    _, sentence = failure(_pod(**_waiting("CrashLoopBackOff", last=last)))
    assert sentence.startswith("the worker ended with exit code 1: x")
    assert "the cause; see kubectl logs" in sentence
    assert len(sentence) < MESSAGE_LIMIT + 100


def test_a_sentence_never_breaks_the_line() -> None:
    for status, _, _ in PODS.values():
        assert "\n" not in failure(_pod(**status))[1]


def test_the_name_of_an_image_is_no_cause() -> None:
    """`timeout` stands in the name; what failed is something else."""
    pod = _pod(
        **_waiting("ErrImagePull", _resolve("registry.example/timeout:1", "registry.example/timeout:1: not found"))
    )
    pod["spec"]["volumes"][0]["image"]["reference"] = "registry.example/timeout:1"
    assert "is not in its registry" in failure(pod)[1]


# --- fetching --------------------------------------------------------------------------------------

FETCHED = {
    "FetchFailed": DeliveryError(
        "FetchFailed", "https://a.example/b: timed out, 8 times in a row", "it is tried again"
    ),
    "FetchRefused": DeliveryError("FetchRefused", "https://a.example/b answered 403 Forbidden", "check it; and that"),
    "AddressRefused": DeliveryError("AddressRefused", "a.example is 10.0.0.1, a private address", "ask"),
    "BundleTooLarge": DeliveryError(
        "BundleTooLarge", "the bundle unpacks to more than the 1.0 MiB allowed", "raise it"
    ),
    "DigestMismatch": DeliveryError("DigestMismatch", "the archive has digest sha256:1, not sha256:2", "correct it"),
    "InvalidBundle": DeliveryError("InvalidBundle", "the archive is refused: 'a' is in it twice", "pack it again"),
    "DiskFull": DeliveryError("DiskFull", "the node has no disk space left for it", "free some"),
}


def _fetching(**status: Any) -> dict[str, Any]:
    starting = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    return _pod(initContainerStatuses=[{"name": "fetch-bundle", **status}], containerStatuses=[starting])


@pytest.mark.parametrize("reason", FETCHED)
def test_why_a_bundle_was_not_fetched_is_told_in_its_own_words(reason: str) -> None:
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": f"{reason}: {FETCHED[reason]}"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    assert failure(_fetching(state=ended)) == (reason, str(FETCHED[reason]))
    assert failure(_fetching(state=waiting, lastState=ended)) == (reason, str(FETCHED[reason]))
    assert failure(_fetching(state={"running": {}}, lastState=ended)) == (reason, str(FETCHED[reason])), (
        "what went wrong stands until an attempt succeeds"
    )


def test_a_fetch_that_goes_on_or_has_succeeded_is_no_failure() -> None:
    assert failure(_fetching(state={"running": {}})) == ("", "")
    earlier = {"terminated": {"exitCode": 1, "message": "FetchFailed: a; b"}}
    assert failure(_fetching(state={"terminated": {"exitCode": 0}}, lastState=earlier)) == ("", "")


def test_a_fetch_that_ends_without_last_words_is_told_as_any_container() -> None:
    reason, message = failure(_fetching(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}))
    assert reason == "OOMKilled" and "spec.worker.resources.limits.memory" in message
    pull = {"waiting": {"reason": "ErrImagePull", "message": _resolve(WORKER, f"{WORKER}: not found")}}
    assert "is not in its registry" in failure(_fetching(state=pull))[1]


CLAIMS = {
    "absent": (
        _unscheduled('persistentvolumeclaim "models" not found. preemption: not eligible'),
        "there is no PersistentVolumeClaim models",
    ),
    "unbound": (
        _unscheduled("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3"),
        "is bound to no volume",
    ),
    "elsewhere": (
        _unscheduled("0/3 nodes are available: 3 node(s) had volume node affinity conflict. preemption: 0/3"),
        "can reach the volume",
    ),
    "no-folder": (
        _waiting(
            "CreateContainerConfigError",
            'failed to create subPath directory for volumeMount "bundle" of container "worker"',
        ),
        "has no such folder",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_cannot_be_mounted_is_told_with_the_next_step(name: str) -> None:
    status, said = CLAIMS[name]
    _, message = failure(_pod(**status))
    assert said in message and "; " in message


def test_what_explains_a_failure_survives_the_trimming_of_pods() -> None:
    pod = _pod(**_waiting("ErrImagePull", _resolve(BUNDLE, f"{BUNDLE}: not found")))
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    line = msgspec.json.encode({"type": "ADDED", "object": pod})
    for trimmed in (trim(POD, pod), read_event(POD, line)[1]):
        assert failure(trimmed) == failure(pod)
        assert f"the bundle {BUNDLE}" in failure(trimmed)[1]
    dead = _pod(
        containerStatuses=[{"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    )
    assert "its limit of 512Mi" in failure(trim(POD, dead | {"apiVersion": "v1", "kind": "Pod"}))[1]


CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-l4"}
MADE = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "gpu-x"}]}


@pytest.mark.parametrize(
    ("claims", "status", "said"),
    [
        ([CLAIM], {}, "the scheduler waits for claim gpu of ResourceClaimTemplate one-l4; see that it exists"),
        ([CLAIM, CLAIM | {"name": "nic"}], MADE, "the scheduler waits for claim nic of ResourceClaimTemplate one-l4; "),
        ([{"name": "gpu", "resourceClaimName": "shared"}], {}, "waits for claim gpu, ResourceClaim shared; see that"),
        ([], {}, ""),
        ([CLAIM], {"conditions": [{"type": "PodScheduled", "status": "True"}]}, ""),
    ],
)
def test_a_pod_that_the_scheduler_does_not_look_at_says_which_claim_it_waits_for(
    claims: list[dict[str, str]], status: dict[str, Any], said: str
) -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    pod = {
        "metadata": {"name": "a", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"resourceClaims": claims},
        "status": status,
    }
    assert failure(pod, now=created + timedelta(seconds=9)) == ("", "")
    reason, message = failure(pod, now=created + timedelta(seconds=10))
    assert said in message and (reason == "Unschedulable") is bool(said) and bool(message) is bool(said)


@pytest.mark.parametrize(
    ("claims", "begun", "told"),
    [([CLAIM], "False", True), ([CLAIM], "True", False), ([], "False", False)],
    ids=["a claim", "prepared", "no claim"],
)
def test_a_node_that_does_not_prepare_a_claim_is_told_after_a_minute(
    claims: list[dict[str, str]], begun: str, told: bool
) -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "PodReadyToStartContainers", "status": begun, "lastTransitionTime": "2026-01-01T00:00:00Z"},
    ]
    pod = {
        "metadata": {"name": "digits-1"},
        "spec": {"nodeName": "n1", "resourceClaims": claims},
        "status": MADE | {"conditions": conditions},
    }
    assert failure(pod, now=since + timedelta(seconds=59)) == ("", "")
    sentence = (
        "node n1 has begun nothing of digits-1 for a minute: its volumes, claim gpu of ResourceClaimTemplate one-l4, "
        "or its network are not prepared; see which in the events of kubectl describe pod digits-1, and for the claim "
        "that the driver of its devices runs there"
    )
    expected = ("WorkerFailed", sentence) if told else ("", "")
    assert failure(pod, now=since + timedelta(seconds=60)) == expected
