"""What a service's workers look like in a cluster: pure builders of Deployment, Service and PodDisruptionBudget.

Of the user's object only ``spec`` is read: no label or annotation of it is copied to a child (GitOps tools prune
what carries their marks), and of ``spec.worker`` only the fields listed here get through.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import Service
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.kinds import (
    GROUP_VERSION,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    SERVICE,
    SERVICE_LABEL,
    TEMPLATE_ANNOTATION,
    Object,
)
from offramp_operator.shell.platform import WorkerIdentity
from offramp_operator.shell.variables import option_variables

WORKER_NAME = "offramp-worker"
CONTAINER = "worker"
PORT = 8080
ADMIN_PORT = 8081
GRPC_PORT = 8001  # of pod and Service; what clients of Triton expect
BUNDLE_PATH = "/bundle"
PLAN_FOLDER = "/etc/offramp/plan"
PLAN_KEY = "plan.json"
STATE_PATH = "/var/lib/offramp"
NOBODY = 65532
DRAIN_SECONDS = 5  # until every node has stopped sending to an ending pod
START_SECONDS = 600  # a large bundle is compiled and warmed before the worker is ready
POD_FIELDS = (
    "imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName", "schedulerName",
)  # fmt: skip
CONTAINER_FIELDS = ("imagePullPolicy", "resources")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the operator's administrator decides about workers."""

    image: str


def plan_name(service: str) -> str:
    """Name of the ConfigMap that carries the signed plan."""
    return f"{service}-plan"


def service_url(service: Service) -> str:
    return f"http://{service.name}.{service.namespace}.svc"


def labels(service: Service) -> dict[str, str]:
    """The fixed label set of every child."""
    return {**selector(service), SERVICE_LABEL: service.name}


def selector(service: Service) -> dict[str, str]:
    """Labels by which the children find the pods. Immutable in a Deployment, so never changed either."""
    return {
        "app.kubernetes.io/name": WORKER_NAME,
        "app.kubernetes.io/instance": service.name,
        MANAGED_BY_LABEL: MANAGED_BY,
    }


def metadata(service: Service, name: str) -> Object:
    """Metadata of a child. It goes when the service goes, which therefore needs no finalizer."""
    owner = {
        "apiVersion": GROUP_VERSION,
        "kind": SERVICE.name,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {"name": name, "namespace": service.namespace, "labels": labels(service), "ownerReferences": [owner]}


def bundle_image(service: Service) -> str:
    """Reference of the image that holds the bundle.

    Raises
    ------
    InvalidSpecError
        The model is not an OCI image. A path means nothing on a node that the scheduler picks.
    """
    uri = service.spec.model_uri
    if not uri.startswith("oci://"):
        raise InvalidSpecError(
            "spec.model.uri",
            f"{uri!r} cannot be mounted in a cluster; push the bundle as an image and write oci://IMAGE",
        )
    return uri.removeprefix("oci://")


def template_digest(service: Service, settings: WorkerSettings) -> str:
    """What the spec makes of the pods, in 16 hex digits: a pod that carries another digest runs an older spec."""
    blank = WorkerIdentity(public_key="", token_sha256="")
    content = json.dumps(_pod_spec(service, blank, settings) | {"metadata": _pod_metadata(service)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def deployment(service: Service, identity: WorkerIdentity, settings: WorkerSettings) -> Object:
    """The workers. One new pod is ready before any old one goes, so an update never sheds capacity."""
    pod_metadata = _pod_metadata(service)
    annotations = {**pod_metadata.get("annotations", {}), TEMPLATE_ANNOTATION: template_digest(service, settings)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, service.name),
        "spec": {
            "replicas": service.spec.replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": START_SECONDS + 60,
            "selector": {"matchLabels": selector(service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": pod_metadata | {"annotations": annotations},
                "spec": _pod_spec(service, identity, settings),
            },
        },
    }


def network_service(service: Service) -> Object:
    """Where clients send requests. The admin port is not part of it."""
    grpc = {
        "name": "grpc",
        "port": GRPC_PORT,
        "targetPort": "grpc",
        "protocol": "TCP",
        "appProtocol": "kubernetes.io/h2c",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, service.name),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(service),
            "ports": [
                {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"},
                *([grpc] if "GRPC" in service.spec.protocols else []),
            ],
        },
    }


def disruption_budget(service: Service) -> Object:
    """A drain takes one worker at a time; a single worker may go, because nothing can be promised for it."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, service.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def plan_config_map(service: Service, *, document: str, epoch: int) -> Object:
    """The signed plan as workers read it, and its epoch for people."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, plan_name(service.name)),
        "data": {PLAN_KEY: document, "epoch": str(epoch)},
    }


# --- the pod ---------------------------------------------------------------------------------------


def _pod_metadata(service: Service) -> Object:
    worker = service.spec.worker
    result: Object = {"labels": {**_texts(worker.get("labels")), **labels(service)}}
    if annotations := _texts(worker.get("annotations")):
        result["annotations"] = annotations
    return result


def _pod_spec(service: Service, identity: WorkerIdentity, settings: WorkerSettings) -> Object:
    worker = service.spec.worker
    given = {name: worker[name] for name in POD_FIELDS if worker.get(name)}
    if worker.get("topologySpreadConstraints"):
        own = {"labelSelector": {"matchLabels": selector(service)}}
        given["topologySpreadConstraints"] = [
            {**constraint, **own} for constraint in worker["topologySpreadConstraints"]
        ]
    return {
        **given,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30 + DRAIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "runAsGroup": NOBODY,
            "fsGroup": NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(service, identity, settings)],
        "volumes": [
            {"name": "bundle", "image": {"reference": bundle_image(service), "pullPolicy": "IfNotPresent"}},
            # Optional: a worker starts before the first plan, exits off.
            {"name": "plan", "configMap": {"name": plan_name(service.name), "optional": True}},
            {"name": "state", "emptyDir": {"sizeLimit": "64Mi"}},
        ],
    }


def _container(service: Service, identity: WorkerIdentity, settings: WorkerSettings) -> Object:
    worker = service.spec.worker
    grpc = {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"}
    return {
        **{name: worker[name] for name in CONTAINER_FIELDS if worker.get(name)},
        "name": CONTAINER,
        "image": worker.get("image") or settings.image,
        "command": [WORKER_NAME],
        "env": _environment(service, identity),
        "ports": [
            {"name": "http", "containerPort": PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
            *([grpc] if "GRPC" in service.spec.protocols else []),
        ],
        "startupProbe": _probe("/v2/health/live", period=2, failures=START_SECONDS // 2),
        "readinessProbe": _probe("/v2/health/ready", period=2, failures=2),
        "livenessProbe": _probe("/v2/health/live", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
        # The last lines of a worker that dies become the message of the service's condition.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "bundle", "mountPath": BUNDLE_PATH, "readOnly": True},
            # A folder, not a subPath: files below a subPath are never updated.
            {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
            {"name": "state", "mountPath": STATE_PATH},
        ],
    }


def _environment(service: Service, identity: WorkerIdentity) -> list[Object]:
    """The operator's variables; the user's come first and cannot override them, because the last of a name wins."""
    spec = service.spec
    given = [{"name": str(entry["name"]), "value": str(entry["value"])} for entry in spec.worker.get("env") or ()]
    own: dict[str, str] = {
        "OFFRAMP_BUNDLE": BUNDLE_PATH,
        "OFFRAMP_PORT": str(PORT),
        "OFFRAMP_ADMIN_PORT": str(ADMIN_PORT),
        "OFFRAMP_SERVICE": service.name,
        "OFFRAMP_SERVICE_UID": service.uid,
        "OFFRAMP_PLAN_FILE": f"{PLAN_FOLDER}/{PLAN_KEY}",
        "OFFRAMP_PUBLIC_KEY": identity.public_key,
        "OFFRAMP_TOKEN_SHA256": identity.token_sha256,
        "OFFRAMP_STATE_DIR": STATE_PATH,
        "OFFRAMP_LATENCY_SECONDS": f"{spec.latency_seconds:g}",
        **({"OFFRAMP_MODEL_DIGEST": spec.model_digest} if spec.model_digest else {}),
        **({"OFFRAMP_GRPC_PORT": str(GRPC_PORT)} if "GRPC" in spec.protocols else {}),
        **option_variables(spec),
    }
    return [
        *(entry for entry in given if not entry["name"].startswith("OFFRAMP_")),
        *({"name": name, "value": value} for name, value in own.items()),
        {"name": "OFFRAMP_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        # A container sees all processors of its node; without this a CPU limit would be spent on waiting threads.
        {
            "name": "OFFRAMP_THREADS",
            "valueFrom": {"resourceFieldRef": {"containerName": CONTAINER, "resource": "limits.cpu"}},
        },
    ]


def _probe(path: str, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in (value or {}).items()}
