"""The kinds of object the operator reads and writes, and the names it gives its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

GROUP = "earlyexit.dev"
VERSION = "v1alpha1"
FIELD_MANAGER = "offramp-operator"
HANDOVER_MANAGER = "offramp-handover"  # holds what the operator gives away until another takes it

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "offramp"
SERVICE_LABEL = f"{GROUP}/service"
MANAGED_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
CLASS_LABEL = f"{GROUP}/worker-class"
VERSION_LABEL = f"{GROUP}/version"
POOL_LABEL = f"{GROUP}/pool"
WORKER_POOL_LABEL = f"{GROUP}/worker-pool"
ON_TRIAL = "next"  # value of the label of workers whose model is on trial
TEMPLATE_ANNOTATION = f"{GROUP}/template"
OWN_BUNDLE_ANNOTATION = f"{GROUP}/own-bundle"
APPLIED_ANNOTATION = f"{GROUP}/applied"
REJECTIONS_OVER_ANNOTATION = f"{GROUP}/rejections-over-until"

Object = dict[str, Any]
"""A Kubernetes object as plain JSON values."""


@dataclass(frozen=True, slots=True, eq=False)  # each is there once, and looked up by all the time
class Kind:
    """One kind. ``selector`` is the label selector with which it is watched and listed; an ``optional`` one is not in
    every cluster.

    What is ``cluster_scoped`` belongs to no namespace, and is watched once whatever namespaces there are.
    """

    group: str
    version: str
    name: str
    plural: str
    selector: str = ""
    optional: bool = False
    cluster_scoped: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        return self.plural


SERVICE = Kind(GROUP, VERSION, "EarlyExitService", "earlyexitservices")
CONFIG = Kind(GROUP, VERSION, "RampConfig", "rampconfigs")
ROLLOUT = Kind(GROUP, VERSION, "RampRollout", "ramprollouts")
WORKER_POOL = Kind(GROUP, VERSION, "WorkerPool", "workerpools")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments", MANAGED_SELECTOR)
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets", MANAGED_SELECTOR)
POD = Kind("", "v1", "Pod", "pods", MANAGED_SELECTOR)
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps", MANAGED_SELECTOR)
NETWORK_SERVICE = Kind("", "v1", "Service", "services", MANAGED_SELECTOR)
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", MANAGED_SELECTOR)
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", MANAGED_SELECTOR)
# Without selector: a user's own carries no label of ours.
AUTOSCALER = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
JOB = Kind("batch", "v1", "Job", "jobs", MANAGED_SELECTOR)
HTTP_ROUTE = Kind("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes", MANAGED_SELECTOR, optional=True)
# Optional: read where the operator may, which one that is limited to namespaces may not unless it is allowed to.
WORKER_CLASS = Kind(GROUP, VERSION, "WorkerClass", "workerclasses", optional=True, cluster_scoped=True)
EVENT = Kind("events.k8s.io", "v1", "Event", "events")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

OWN = (SERVICE, CONFIG, ROLLOUT, WORKER_POOL)
CHILDREN = (
    DEPLOYMENT,
    REPLICA_SET,
    POD,
    CONFIG_MAP,
    NETWORK_SERVICE,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    AUTOSCALER,
    JOB,
    HTTP_ROUTE,
    WORKER_CLASS,
)
WATCHED = (*OWN, *CHILDREN)


def made(kind: Kind, **content: Any) -> Object:
    """An object of a kind, or a reference to one."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **content}


def owner_reference(kind: Kind, name: str, uid: str) -> Object:
    """What the metadata of a child says of the object that it goes with."""
    return made(kind, name=name, uid=uid, controller=True, blockOwnerDeletion=False)


def uid_of(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Object) -> str:
    return str(obj["metadata"].get("namespace", ""))


def version_of(obj: Object) -> int:
    """The resource version. Within one kind they are ordered (Kubernetes 1.35 made official what etcd always did)."""
    return int(obj["metadata"]["resourceVersion"])


def scale_target(autoscaler: Object) -> str:
    """Name of the Deployment that an autoscaler scales; empty where it scales something else."""
    target = (autoscaler.get("spec") or {}).get("scaleTargetRef") or {}
    of_deployments = (target.get("kind"), target.get("apiVersion", "apps/").partition("/")[0]) == ("Deployment", "apps")
    return str(target.get("name", "")) if of_deployments else ""


def class_of(obj: Object) -> str:
    """Name of the WorkerClass that a service, or a WorkerPool, asks for in ``spec.worker``; empty where it asks for
    none."""
    return _class_name((obj.get("spec") or {}).get("worker"))


def classes_of(service: Object) -> tuple[str, ...]:
    """Names of all WorkerClasses that a service asks for, those of its pools included."""
    spec = service.get("spec") or {}
    pools = spec.get("pools")
    names = (class_of(service), *map(_class_name, pools if isinstance(pools, list) else ()))
    return tuple(dict.fromkeys(name for name in names if name))


def _class_name(worker: Any) -> str:
    return str(worker.get("className") or "") if isinstance(worker, dict) else ""


def shared_pool_of(service: Object) -> str:
    """Name of the WorkerPool that serves a service; empty where it has workers of its own."""
    sharing = (service.get("spec") or {}).get("sharing") or {}
    return str(sharing.get("pool") or "") if isinstance(sharing, dict) else ""


def owner_of(obj: Object) -> Object | None:
    """The controlling owner reference."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return cast(Object, reference)
    return None
