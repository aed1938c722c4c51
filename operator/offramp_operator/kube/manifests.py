"""What a service's workers look like in a cluster: pure builders of Deployment, Service, PodDisruptionBudget,
NetworkPolicy and HTTPRoute.

Of the user's object only ``spec`` is read: no label or annotation of it is copied to a child (GitOps tools prune
what carries their marks), and of ``spec.worker`` only the fields listed here get through.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import Service, UpdateStrategy
from offramp_core.control.snapshot import TrainingOrder
from offramp_core.control.spec import EDGES, Autoscaling, Route, parse_duration
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.kinds import (
    AUTOSCALER,
    CLASS_LABEL,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    GROUP,
    HTTP_ROUTE,
    JOB,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    ON_TRIAL,
    OWN_BUNDLE_ANNOTATION,
    POOL_LABEL,
    SERVICE,
    SERVICE_LABEL,
    TEMPLATE_ANNOTATION,
    VERSION_LABEL,
    WORKER_POOL_LABEL,
    Kind,
    Object,
    made,
    owner_reference,
)
from offramp_operator.shell.platform import WorkerIdentity
from offramp_operator.shell.variables import option_variables

WORKER_NAME = "offramp-worker"
EDGE_NAME = "offramp-edge"  # of workers at the edge: no Service of others finds them, whatever pool was one before
EDGE_SUFFIX = ".edge"  # of their Deployments: no other's name has a dot, so none changes into one of theirs
CONTAINER = "worker"
PORT = 8080
ADMIN_PORT = 8081
HTTP_PORT = 80  # of the Service
API_PATH = "/v2"  # what a Gateway passes on: the Open Inference Protocol, and not the workers' metrics
GRPC_PORT = 8001  # of pod and Service; what clients of Triton expect
BUNDLE_PATH = "/bundle"
PLAN_FOLDER = "/etc/offramp/plan"
PLAN_KEY = "plan.json"
STATE_PATH = "/var/lib/offramp"
NOBODY = 65532
DRAIN_SECONDS = 5  # until every node has stopped sending to an ending pod
CONTENT = "content"  # of a volume that a bundle was fetched to: it appears when it is complete
CREDENTIALS_PATH = "/etc/offramp/credentials"
CREDENTIAL_KEYS = (
    "host",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "username",
    "password",
    "bearerToken",
    "ca.crt",
)
FETCH_CONTAINER = "fetch-bundle"
FETCH_VARIABLES = (
    "OFFRAMP_ADMIN_PORT",
    "OFFRAMP_SERVICE",
    "OFFRAMP_SERVICE_UID",
    "OFFRAMP_PUBLIC_KEY",
    "OFFRAMP_TOKEN_SHA256",
    "OFFRAMP_MODEL_DIGEST",
    "OFFRAMP_UID",
)
TRAINER_NAME = "offramp-trainer"
TRAIN_CONTAINER = "train"
TRAIN_COMMAND = ("python3", "-m", "offramp_worker.prepare.captured")
TRAIN_SECONDS = 3600  # a training that takes longer is ended
TRAINED_SECONDS = 3600  # for so long a Job that has ended can be looked at
TRAIN_RESOURCES: Object = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "4Gi"}}
RAMP_SETS_PATH = "/ramp-sets"
CAPTURES_PATH = "/captures"
STORE_FOLDER = "offramp"  # in the claim; below it each service has a folder of its name
FETCHED_RESOURCES = ("cpu", "memory", "ephemeral-storage")  # a device is of no use to a download
LAST_WORDS = "/dev/termination-log"
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8")
PRIVATE_6 = ("fc00::/7",)
LINK_LOCAL = ("169.254.0.0/16",)
LINK_LOCAL_6 = ("fe80::/10",)
# Ready for so long under traffic before the next worker is replaced: a bundle may fail at its first batches.
PROVEN_SECONDS = 5
# A large bundle is compiled and warmed before the worker is ready; spec.worker.startupDeadline says otherwise.
START_SECONDS = 600
MEASURE_SECONDS = 0.5  # of whole batches in a worker of a pool: a processor limit shows over several of its 100 ms
PROBE_SECONDS = 2  # between two probes of a starting worker
TMP_SIZE = "64Mi"  # what libraries write besides; spec.worker.tmp says otherwise
IN_FLIGHT_METRIC = "earlyexit_inflight"  # of the workers' /metrics; an adapter serves it as a metric of pods
POD_FIELDS = (
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "resourceClaims",
)
DEVICE_FIELDS = (
    "nodeSelector",
    "affinity",
    "runtimeClassName",
    "schedulerName",
    "resourceClaims",
)  # what may lead a worker to its device
PLAIN_SELECTORS = (
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
)
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - of a container, and its own
CONFINED: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_DEFAULTS: Object = {
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": NOBODY,
        "runAsGroup": NOBODY,
        "fsGroup": NOBODY,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}


@dataclass(frozen=True, slots=True)
class OperatorPods:
    """How a NetworkPolicy knows the operator's pods: their namespace and their labels."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """What may be fetched. ``size_bytes`` bounds an archive, and once more what it unpacks to."""

    allow_private_networks: bool = False
    size_bytes: int = 16 * 2**30
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the operator's administrator decides about workers.

    ``admin_from`` are the pods that alone may reach admin ports; None makes no NetworkPolicy. With ``allow_egress`` the
    policy leaves alone what workers connect to. ``image`` fetches bundles even where a service runs another one: only
    the administrator's own program sees credentials and decides on addresses. ``pull_secrets`` are for services that
    name none themselves, ``service_account`` is what a WorkerClass gives to pods; without one they have the namespace's
    default.
    """

    image: str
    admin_from: OperatorPods | None = None
    allow_egress: bool = False
    delivery: DeliverySettings = DeliverySettings()
    pull_secrets: tuple[str, ...] = ()
    service_account: str = ""


def model_name(service: str) -> str:
    """Name of the ConfigMap that carries the digests of proven bundles."""
    return f"{service}-model"


def plan_name(service: str) -> str:
    """Name of the ConfigMap that carries the signed plan."""
    return f"{service}-plan"


def training_name(service: str, since: float) -> str:
    """Name of the Job that trains on the sample which began at ``since``; no two samples of a service begin in the same
    second."""
    return f"{service}-train-{since:.0f}"


def trial_name(service: str) -> str:
    """Name of the Deployment of workers whose model is on trial, and of their Service where a Gateway needs one."""
    return f"{service}-{ON_TRIAL}"


def pool_name(service: str, pool: str) -> str:
    """Name of the Deployment of workers in one pool, and of their Service where a Gateway needs one."""
    return f"{service}-{pool}"


def workers_name(service: Service, *, trial: bool = False) -> str:
    """Name of the Deployment of the main workers, of those on ``trial``, or of those in the pool that the service is
    made for."""
    if service.spec.in_pool:
        name = pool_name(service.name, service.spec.in_pool)
        return f"{name}{EDGE_SUFFIX}" if service.spec.is_edge else name
    return trial_name(service.name) if trial else service.name


def edges_name(service: str) -> str:
    """Name of the Service of workers at the edge, of their disruption budget, and of the NetworkPolicy that lets them
    reach their core."""
    return f"{service}-{EDGES}"


def is_of_edges(deployment: str) -> bool:
    """Whether a Deployment of a service, by its name, is one of workers at the edge."""
    return deployment.endswith(EDGE_SUFFIX)


def main_name(service: str) -> str:
    """Name of the Service of the main workers alone, where a Gateway needs one."""
    return f"{service}-main"


def network_policy_name(service: str) -> str:
    """Name of the NetworkPolicy; not the service's own, which a policy of the user's may well have."""
    return f"{service}-workers"


def service_url(service: Service) -> str:
    return f"http://{service.name}.{service.namespace}.svc"


def labels(service: Service) -> dict[str, str]:
    """The fixed label set of every child."""
    return {**selector(service), SERVICE_LABEL: service.name}


def selector(service: Service, *, trial: bool = False) -> dict[str, str]:
    """Labels by which the main workers are found, those on ``trial``, or those of a pool. Immutable in a Deployment, so
    never changed either.

    A pool's instance has a dot, which no service's name has: nobody is found as the workers of another service.
    """
    pool = service.spec.in_pool
    return {
        "app.kubernetes.io/name": EDGE_NAME if service.spec.is_edge else WORKER_NAME,
        "app.kubernetes.io/instance": f"{service.name}.{pool}" if pool else workers_name(service, trial=trial),
        MANAGED_BY_LABEL: MANAGED_BY,
        **({VERSION_LABEL: ON_TRIAL} if trial else {}),
        **({POOL_LABEL: pool} if pool else {}),
    }


def everybody(service: Service) -> dict[str, str]:
    """Labels by which all workers of a service are found that its Service sends requests to, whatever version they
    run."""
    return {"app.kubernetes.io/name": WORKER_NAME, MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: service.name}


def everybody_at_edge(service: Service) -> dict[str, str]:
    """Labels by which all workers of a service at the edge are found, whatever pool they are in."""
    return {**everybody(service), "app.kubernetes.io/name": EDGE_NAME}


def child(
    kind: Kind, service: Service, name: str, *, marks: Mapping[str, str] | None = None, **content: Object
) -> Object:
    """An object of the service, with its labels or others (``marks``). It goes when the service goes, which therefore
    needs no finalizer."""
    owner = owner_reference(SERVICE, service.name, service.uid)
    own = labels(service) if marks is None else marks
    about = {"name": name, "namespace": service.namespace, "labels": own, "ownerReferences": [owner]}
    return made(kind, metadata=about, **content)


def check_bundle(service: Service) -> None:
    """Raises :class:`InvalidSpecError` for a bundle that no pod can be given: a path means nothing on a node that the
    scheduler picks."""
    uri = service.spec.model_uri
    if uri.startswith("file://"):
        raise InvalidSpecError(
            "spec.model.uri",
            f"{uri!r} cannot be mounted in a cluster; push the bundle as an image and write oci://IMAGE, or name a "
            "claim with pvc://CLAIM/PATH",
        )


def template_digest(service: Service, settings: WorkerSettings, *, trial: bool = False) -> str:
    """What the spec makes of the pods, in 16 hex digits: a pod that carries another digest runs an older spec."""
    blank = WorkerIdentity(public_key="", token_sha256="")
    pod_metadata = _pod_metadata(service, trial=trial)
    content = json.dumps(pod_spec(service, blank, settings, trial=trial) | {"metadata": pod_metadata}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def deployment(
    service: Service,
    identity: WorkerIdentity,
    settings: WorkerSettings,
    *,
    replicas: int | None,
    strategy: UpdateStrategy = "Surge",
    trial: bool = False,
) -> Object:
    """The workers. Whatever the strategy, no more old pods go than new ones serve, but for one in place.

    ``replicas`` None leaves their number to an autoscaler. Workers on ``trial`` have a Deployment of their own and
    labels that tell them apart: the Service and everything else that selects all workers of the service finds them as
    well, and shares requests among all.
    """
    pod_metadata = _pod_metadata(service, trial=trial)
    fetch_seconds = int(settings.delivery.seconds) if service.spec.is_fetched else 0
    template = template_digest(service, settings, trial=trial)
    annotations = {**pod_metadata.get("annotations", {}), TEMPLATE_ANNOTATION: template}
    spec = {
        **({} if replicas is None else {"replicas": replicas}),
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": _start_seconds(service) + 60 + fetch_seconds,
        "minReadySeconds": PROVEN_SECONDS,
        "selector": {"matchLabels": selector(service, trial=trial)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(service, strategy)},
        "template": {
            "metadata": pod_metadata | {"annotations": annotations},
            "spec": pod_spec(service, identity, settings, trial=trial),
        },
    }
    return child(DEPLOYMENT, service, workers_name(service, trial=trial), spec=spec)


def _rolling_update(service: Service, strategy: UpdateStrategy) -> Object:
    """One ahead, or as many as the user wants; in place never more than one at a time, which serves nobody until it is
    replaced."""
    if strategy == "Surge":
        return {"maxSurge": service.spec.update_policy.max_surge, "maxUnavailable": 0}
    return {"maxSurge": 0, "maxUnavailable": 1}


def pods_of(replica_set: Object) -> Object:
    """The pods that a ReplicaSet was made for, as its Deployment had them: asking for them once more makes it the
    newest again."""
    template = replica_set["spec"]["template"]
    meta = {key: value for key, value in template["metadata"].items() if key in ("labels", "annotations")}
    marks = {key: value for key, value in meta.get("labels", {}).items() if key != "pod-template-hash"}
    return {"metadata": meta | {"labels": marks}, "spec": template["spec"]}


def network_service(service: Service) -> Object:
    """Where clients send requests. The admin port is not part of it."""
    return _network_service(service, service.name, holders(service) if service.spec.shared_pool else everybody(service))


def edges_service(service: Service) -> Object:
    """Where clients near the edge send requests."""
    return _network_service(service, edges_name(service.name), everybody_at_edge(service))


def holders(service: Service) -> dict[str, str]:
    """Labels by which the workers of a WorkerPool are found that hold the service; the operator sets the last one."""
    return {
        "app.kubernetes.io/name": WORKER_NAME,
        MANAGED_BY_LABEL: MANAGED_BY,
        WORKER_POOL_LABEL: service.spec.shared_pool,
        holds_label(service.name): service.uid,
    }


def holds_label(service: str) -> str:
    """Label of a pool's worker that requests for a service are sent to; its value is the service's uid."""
    return f"{GROUP}/holds-{service}"


def version_service(service: Service, *, trial: bool) -> Object:
    """One version, or one pool, alone, for a route that shares requests by weight."""
    name = workers_name(service, trial=trial) if trial or service.spec.in_pool else main_name(service.name)
    return service_of(service, name, selector(service, trial=trial))


def service_of(service: Service, name: str, chosen: Mapping[str, str]) -> Object:
    """The Service of the workers of one Deployment, which ``chosen`` selects. No other service's: one may be named as
    a pool of this one is."""
    return _network_service(service, name, {**chosen, SERVICE_LABEL: service.name})


def _network_service(service: Service, name: str, chosen: dict[str, str]) -> Object:
    grpc = {
        "name": "grpc",
        "port": GRPC_PORT,
        "targetPort": "grpc",
        "protocol": "TCP",
        "appProtocol": "kubernetes.io/h2c",
    }
    spec = {
        "type": "ClusterIP",
        "selector": chosen,
        "ports": [
            {"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"},
            *([grpc] if "GRPC" in service.spec.protocols else []),
        ],
    }
    return child(NETWORK_SERVICE, service, name, spec=spec)


def version_weights(service: Service, *, share: int) -> dict[str, int]:
    """``share`` percent of the requests for the version on trial, the others for the main workers, by Service.

    Both versions always stand there, so that a trial changes nothing but two numbers.
    """
    return {main_name(service.name): 100 - share, trial_name(service.name): share}


def http_route(service: Service, route: Route, *, weights: Mapping[str, int]) -> Object:
    """Requests through a Gateway, shared among Services by ``weights``."""
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": API_PATH}}],
        "backendRefs": [{"name": name, "port": HTTP_PORT, "weight": weight} for name, weight in weights.items()],
    }
    spec = {
        "parentRefs": [dict(parent) for parent in route.parents],
        **({"hostnames": list(route.hostnames)} if route.hostnames else {}),
        "rules": [rule],
    }
    return child(HTTP_ROUTE, service, service.name, spec=spec)


def disruption_budget(service: Service, *, edges: bool = False) -> Object:
    """A drain takes one worker at a time, or as many as the user allows; a single worker may go, because nothing can be
    promised for it. Workers at the edge have one of their own: a site that is offline must not hold up the core."""
    allowed = str((service.spec.worker.get("disruptionBudget") or {}).get("maxUnavailable", 1))
    spec = {
        "maxUnavailable": allowed if allowed.endswith("%") else int(allowed),
        "selector": {"matchLabels": everybody_at_edge(service) if edges else everybody(service)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child(DISRUPTION_BUDGET, service, edges_name(service.name) if edges else service.name, spec=spec)


def network_policy(
    service: Service, operator: OperatorPods, *, allow_egress: bool, delivery: DeliverySettings = DeliverySettings()
) -> Object:
    """Everybody may ask the workers; only the operator reaches their admin ports, and they connect to nothing but where
    a bundle is fetched.

    The admin port's token is the lock: this is the fence around it, and not every network enforces it.
    """
    fetched = service.spec.fetches and not allow_egress
    public = [{"port": "http", "protocol": "TCP"}]
    if "GRPC" in service.spec.protocols:
        public.append({"port": "grpc", "protocol": "TCP"})
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator.namespace}},
        "podSelector": {"matchLabels": dict(operator.labels)},
    }
    spec = {
        "podSelector": _guarded(service),
        "policyTypes": ["Ingress"] if allow_egress else ["Ingress", "Egress"],
        "ingress": [{"ports": public}, {"from": [peer], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]}],
        **({"egress": _fetch_egress(delivery)} if fetched else {}),
    }
    return child(NETWORK_POLICY, service, network_policy_name(service.name), spec=spec)


def _guarded(service: Service) -> Object:
    """The workers, whether or not any are at the edge by now; with live training also the pod that trains, on whose
    ports nobody listens."""
    chosen = everybody(service)
    trainer = [TRAINER_NAME] if service.spec.training == "LiveTraffic" else []
    named = [chosen.pop("app.kubernetes.io/name"), EDGE_NAME, *trainer]
    names = {"key": "app.kubernetes.io/name", "operator": "In", "values": named}
    return {"matchLabels": chosen, "matchExpressions": [names]}


def edges_network_policy(service: Service) -> Object:
    """Workers at the edge reach their core, besides what the policy of all workers allows."""
    core = {
        "to": [{"podSelector": {"matchLabels": everybody(service)}}],
        "ports": [{"port": "http", "protocol": "TCP"}],
    }
    spec = {
        "podSelector": {"matchLabels": everybody_at_edge(service)},
        "policyTypes": ["Egress"],
        "egress": [{"ports": _dns()}, core],
    }
    return child(NETWORK_POLICY, service, edges_name(service.name), spec=spec)


def _dns() -> list[Object]:
    return [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]


def _fetch_egress(delivery: DeliverySettings) -> list[Object]:
    """To names, and to addresses that a bundle may come from. Ports are left open: a redirect may name another one."""
    never = {4: LINK_LOCAL, 6: LINK_LOCAL_6}
    private = {4: PRIVATE, 6: PRIVATE_6}
    everywhere = {4: "0.0.0.0/0", 6: "::/0"}
    blocks = [
        {"cidr": everywhere[v], "except": [*never[v], *([] if delivery.allow_private_networks else private[v])]}
        for v in (4, 6)
    ]
    return [{"ports": _dns()}, {"to": [{"ipBlock": block} for block in blocks]}]


def model_config_map(service: Service) -> Object | None:
    """The digests that bundles of this service were proven with, for workers to come. None before the first.

    Not part of the pod template, which would have all workers replaced once the first one has proven the bundle.
    """
    if not service.status.models:
        return None
    digests = {_uri_key(model.uri): model.digest for model in service.status.models}
    return child(CONFIG_MAP, service, model_name(service.name), data=digests)


def _uri_key(uri: str) -> str:
    return f"digest-{hashlib.sha256(uri.encode()).hexdigest()[:16]}"


def autoscaler(service: Service, wanted: Autoscaling, *, fewest: int, frozen: bool) -> Object:
    """Keeps the in-flight work of each worker near its target, and at least ``fewest`` of them. ``frozen`` forbids it
    to take workers away."""
    metric = {
        "type": "Pods",
        "pods": {
            "metric": {"name": IN_FLIGHT_METRIC},
            "target": {"type": "AverageValue", "averageValue": str(wanted.target_in_flight)},
        },
    }
    spec = {
        "scaleTargetRef": made(DEPLOYMENT, name=service.name),
        "minReplicas": fewest,
        "maxReplicas": wanted.max_replicas,
        "metrics": [metric],
        "behavior": {"scaleDown": {"selectPolicy": "Disabled" if frozen else "Max"}},
    }
    return child(AUTOSCALER, service, service.name, spec=spec)


def plan_config_map(service: Service, *, document: str, epoch: int) -> Object:
    """The signed plan as workers read it, and its epoch for people."""
    return child(CONFIG_MAP, service, plan_name(service.name), data={PLAN_KEY: document, "epoch": str(epoch)})


def training_job(service: Service, order: TrainingOrder, settings: WorkerSettings) -> Object:
    """Trains ramps on what the workers captured, once, in a pod like theirs that nobody can reach.

    Raises
    ------
    InvalidSpecError
        There is no store, or no pod can be given the bundle.
    """
    own = {**labels(service), "app.kubernetes.io/name": TRAINER_NAME}  # not the selector's: no request may get here
    spec = {
        "backoffLimit": 0,  # the next attempt is a decision, on inputs captured anew
        "activeDeadlineSeconds": TRAIN_SECONDS,
        "ttlSecondsAfterFinished": TRAINED_SECONDS,
        # A drained node is no failure; the captures are still there.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": own}, "spec": _training_pod(service, order, settings)},
    }
    return child(JOB, service, training_name(service.name, order.since), marks=own, spec=spec)


def _training_pod(service: Service, order: TrainingOrder, settings: WorkerSettings) -> Object:
    spec, nobody = service.spec, WorkerIdentity(public_key="", token_sha256="")  # it takes no plan and answers nobody
    bundle = f"{BUNDLE_PATH}/{CONTENT}" if spec.is_fetched else BUNDLE_PATH
    options = {
        "--bundle": bundle,
        "--captures": CAPTURES_PATH,
        "--store": RAMP_SETS_PATH,
        "--result": LAST_WORDS,
        "--from": order.ramp_set_digest,
        "--budget": repr(order.max_disagreement),
        "--keep": ",".join(order.keep),
        "--seed": str(order.attempt),
    }
    threads = [{"name": name, "value": "1"} for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")]
    sets, captures = _store_mounts(service)
    container = {
        **_pull_policy(service),
        "name": TRAIN_CONTAINER,
        "image": settings.image,
        "command": [*TRAIN_COMMAND, *(part for option in options.items() for part in option)],
        "env": threads,
        "resources": _fetch_resources(spec.worker.get("resources") or {}) or TRAIN_RESOURCES,
        "terminationMessagePath": LAST_WORDS,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONFINED,
        "volumeMounts": [
            _bundle_mount(service),
            sets,
            captures,
            TMP_MOUNT,
        ],
    }
    return {
        **_trainer_given(service, settings),
        **POD_DEFAULTS,
        "restartPolicy": "Never",
        **({"initContainers": [_fetch_container(service, nobody, settings)]} if spec.is_fetched else {}),
        "containers": [container],
        "volumes": [
            *_bundle_volumes(service, settings),
            _store_volume(service),
            # The inputs, and a bundle that is put together anew.
            {"name": "tmp", "emptyDir": {"sizeLimit": f"{2 * settings.delivery.size_bytes // 2**20 + 1024}Mi"}},
        ],
    }


def _store_volume(service: Service) -> Object:
    """The ramp-set store. Read-only in workers by each mount: a volume that is read-only as a whole could not be given
    its folders."""
    if service.spec.store_claim is None:
        raise InvalidSpecError("spec.ramps.store", "is not set; name a PersistentVolumeClaim in its claimName")
    return {"name": "store", "persistentVolumeClaim": {"claimName": service.spec.store_claim}}


def _store_mounts(service: Service) -> tuple[Object, Object]:
    """Where the store's ramp sets are, and its captures."""
    folder = f"{STORE_FOLDER}/{service.name}"
    return (
        {"name": "store", "mountPath": RAMP_SETS_PATH, "subPath": f"{folder}/ramp-sets"},
        {"name": "store", "mountPath": CAPTURES_PATH, "subPath": f"{folder}/captures"},
    )


def _worker_store_mounts(service: Service) -> list[Object]:
    """Ramp sets to be read, and with live training a folder for captures, where workers write and never read."""
    if service.spec.store_claim is None:
        return []
    sets, captures = _store_mounts(service)
    return [sets | {"readOnly": True}, *([captures] if service.spec.training == "LiveTraffic" else [])]


# --- the pod ---------------------------------------------------------------------------------------


def _pod_metadata(service: Service, *, trial: bool) -> Object:
    worker = service.spec.worker
    own = labels(service) | selector(service, trial=trial)
    if service.spec.class_name:
        own[CLASS_LABEL] = service.spec.class_name
    result: Object = {"labels": {**_texts(worker.get("labels")), **own}}
    annotations = {k: v for k, v in _texts(worker.get("annotations")).items() if k != OWN_BUNDLE_ANNOTATION}
    if service.spec.like_uri:
        annotations[OWN_BUNDLE_ANNOTATION] = "true"
    if annotations:
        result["annotations"] = annotations
    return result


def pod_spec(service: Service, identity: WorkerIdentity, settings: WorkerSettings, *, trial: bool) -> Object:
    worker = service.spec.worker
    given = _given(service, settings)
    if worker.get("topologySpreadConstraints"):
        own = {"labelSelector": {"matchLabels": selector(service, trial=trial)}}
        given["topologySpreadConstraints"] = [
            {**constraint, **own} for constraint in worker["topologySpreadConstraints"]
        ]
    return {
        **given,
        **POD_DEFAULTS,
        "terminationGracePeriodSeconds": 30 + DRAIN_SECONDS,
        **({"initContainers": [_fetch_container(service, identity, settings)]} if service.spec.is_fetched else {}),
        "containers": [_container(service, identity, settings)],
        "volumes": [
            *_bundle_volumes(service, settings),
            # Optional: a worker starts before the first plan, exits off.
            {"name": "plan", "configMap": {"name": plan_name(service.name), "optional": True}},
            {"name": "state", "emptyDir": {"sizeLimit": "64Mi"}},
            *_scratch_volumes(service),
            *([_store_volume(service)] if service.spec.store_claim is not None else []),
        ],
    }


def _given(service: Service, settings: WorkerSettings) -> Object:
    """What the spec says of pods, and the administrator where it says nothing."""
    secrets: Object = {"imagePullSecrets": [{"name": name} for name in settings.pull_secrets]}
    worker = service.spec.worker
    given = (secrets if settings.pull_secrets else {}) | {name: worker[name] for name in POD_FIELDS if worker.get(name)}
    return given | ({"serviceAccountName": settings.service_account} if settings.service_account else {})


def _trainer_given(service: Service, settings: WorkerSettings) -> Object:
    """The same for the pod that trains, which has the administrator's image and no device: it goes wherever that runs.

    What leads workers to their devices is left out, and stays where they have none: then it may say anything.
    Tolerations force nothing, and a store that one node alone can mount may be with the workers.
    """
    given = _given(service, settings)
    if not _devices(service):
        return given
    kept = {key: value for key, value in given.get("nodeSelector", {}).items() if key in PLAIN_SELECTORS}
    given = {name: value for name, value in given.items() if name not in DEVICE_FIELDS}
    return given | ({"nodeSelector": kept} if kept else {})


def _scratch_volumes(service: Service) -> list[Object]:
    """A place for temporary files, as the root is read-only; and /dev/shm where the runtime's own is too small."""
    worker = service.spec.worker
    tmp: Object = {"name": "tmp", "emptyDir": {"sizeLimit": (worker.get("tmp") or {}).get("sizeLimit", TMP_SIZE)}}
    shared = worker.get("sharedMemory")
    if not shared:
        return [tmp]
    return [tmp, {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared["sizeLimit"]}}]


def _scratch_mounts(service: Service) -> list[Object]:
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108
    return [TMP_MOUNT, *([shared] if service.spec.worker.get("sharedMemory") else [])]


def _devices(service: Service) -> bool:
    """Whether workers ask for what only some nodes have."""
    if service.spec.worker.get("resourceClaims"):
        return True
    resources = service.spec.worker.get("resources") or {}
    named = {name for kind in ("requests", "limits") for name in resources.get(kind) or {}}
    return any(name not in FETCHED_RESOURCES and not name.startswith("hugepages-") for name in named)


def _bundle_volumes(service: Service, settings: WorkerSettings) -> list[Object]:
    """The volume ``bundle``, and the credentials to fill it with."""
    check_bundle(service)
    spec = service.spec
    scheme, _, rest = spec.model_uri.partition("://")
    if scheme == "oci":
        return [{"name": "bundle", "image": {"reference": rest, "pullPolicy": "IfNotPresent"}}]
    if scheme == "pvc":
        claim = {"claimName": rest.partition("/")[0], "readOnly": True}
        return [{"name": "bundle", "persistentVolumeClaim": claim}]
    # The archive and what it unpacks to lie beside each other for a while. The program's own limits lie below this one.
    mebibytes = 2 * settings.delivery.size_bytes // 2**20 + 64
    volumes: list[Object] = [{"name": "bundle", "emptyDir": {"sizeLimit": f"{mebibytes}Mi"}}]
    if spec.model_secret is not None:
        items = [{"key": key, "path": key} for key in CREDENTIAL_KEYS]
        # Optional, so that what is missing is reported in a sentence rather than by a pod that never starts.
        secret = {"secretName": spec.model_secret, "items": items, "optional": True, "defaultMode": 0o440}
        volumes.append({"name": "credentials", "secret": secret})
    return volumes


def _bundle_mount(service: Service) -> Object:
    mount: Object = {"name": "bundle", "mountPath": BUNDLE_PATH, "readOnly": True}
    path = service.spec.model_uri.removeprefix("pvc://").partition("/")[2].strip("/")
    return mount | {"subPath": path} if service.spec.model_uri.startswith("pvc://") and path else mount


def _fetch_container(service: Service, identity: WorkerIdentity, settings: WorkerSettings) -> Object:
    """Fetches the bundle before the worker starts, and tells the operator how far it is on the worker's own admin
    port."""
    spec, delivery = service.spec, settings.delivery
    options = {
        "--archive-digest": spec.archive_digest,
        "--endpoint": spec.model_endpoint,
        "--region": spec.model_region,
        "--credentials": CREDENTIALS_PATH if spec.model_secret else None,
        "--max-bytes": str(delivery.size_bytes),
        "--seconds": f"{delivery.seconds:g}",
        "--last-words": LAST_WORDS,
    }
    given = [part for name, value in options.items() if value for part in (name, value)]
    private = ["--allow-private-networks"] if delivery.allow_private_networks else []
    secret = [{"name": "credentials", "mountPath": CREDENTIALS_PATH, "readOnly": True}] if spec.model_secret else []
    return {
        **_pull_policy(service),
        **({"resources": resources} if (resources := _fetch_resources(spec.worker.get("resources") or {})) else {}),
        "name": FETCH_CONTAINER,
        "image": settings.image,
        "command": [WORKER_NAME, "fetch", "--to", f"{BUNDLE_PATH}/{CONTENT}", *given, *private, "--", spec.model_uri],
        "env": [entry for entry in _environment(service, identity) if entry["name"] in FETCH_VARIABLES],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONFINED,
        "volumeMounts": [{"name": "bundle", "mountPath": BUNDLE_PATH}, *secret],
    }


def _fetch_resources(resources: Mapping[str, Any]) -> Object:
    """The worker's own, without devices: a namespace with a quota wants every container to say them."""
    kept = {
        kind: {n: q for n, q in (resources.get(kind) or {}).items() if n in FETCHED_RESOURCES}
        for kind in ("requests", "limits")
    }
    return {kind: quantities for kind, quantities in kept.items() if quantities}


def _container(service: Service, identity: WorkerIdentity, settings: WorkerSettings) -> Object:
    worker = service.spec.worker
    grpc = {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"}
    return {
        **_pull_policy(service),
        **_resources(worker),
        "name": CONTAINER,
        "image": worker.get("image") or settings.image,
        "command": [WORKER_NAME],
        "env": _environment(service, identity),
        "ports": [
            {"name": "http", "containerPort": PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
            *([grpc] if "GRPC" in service.spec.protocols else []),
        ],
        "startupProbe": _probe(
            "/v2/health/live", period=PROBE_SECONDS, failures=math.ceil(_start_seconds(service) / PROBE_SECONDS)
        ),
        "readinessProbe": _probe("/v2/health/ready", period=2, failures=2),
        "livenessProbe": _probe("/v2/health/live", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
        # The last lines of a worker that dies become the message of the service's condition.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONFINED,
        "volumeMounts": [
            _bundle_mount(service),
            # A folder, not a subPath: files below a subPath are never updated.
            {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
            {"name": "state", "mountPath": STATE_PATH},
            *_scratch_mounts(service),
            *_worker_store_mounts(service),
        ],
    }


def _pull_policy(service: Service) -> Object:
    policy = service.spec.worker.get("imagePullPolicy")
    return {"imagePullPolicy": policy} if policy else {}


def _resources(worker: Mapping[str, Any]) -> Object:
    """What the container gets: quantities, and every claim of the pod."""
    claims = [{"name": claim["name"]} for claim in worker.get("resourceClaims") or ()]
    resources = {**(worker.get("resources") or {}), **({"claims": claims} if claims else {})}
    return {"resources": resources} if resources else {}


def _start_seconds(service: Service) -> int:
    text = service.spec.worker.get("startupDeadline")
    return START_SECONDS if text is None else math.ceil(parse_duration(text, "spec.worker.startupDeadline"))


def _environment(service: Service, identity: WorkerIdentity) -> list[Object]:
    """The operator's variables; the user's come first and cannot override them, because the last of a name wins."""
    spec = service.spec
    given = [{"name": str(entry["name"]), "value": str(entry["value"])} for entry in spec.worker.get("env") or ()]
    own: dict[str, str] = {
        "OFFRAMP_BUNDLE": f"{BUNDLE_PATH}/{CONTENT}" if spec.is_fetched else BUNDLE_PATH,
        "OFFRAMP_PORT": str(PORT),
        "OFFRAMP_ADMIN_PORT": str(ADMIN_PORT),
        "OFFRAMP_SERVICE": service.name,
        "OFFRAMP_SERVICE_UID": service.uid,
        "OFFRAMP_PLAN_FILE": f"{PLAN_FOLDER}/{PLAN_KEY}",
        "OFFRAMP_PUBLIC_KEY": identity.public_key,
        "OFFRAMP_TOKEN_SHA256": identity.token_sha256,
        "OFFRAMP_STATE_DIR": STATE_PATH,
        **({"OFFRAMP_LATENCY_SECONDS": f"{spec.latency_seconds:g}"} if spec.latency_seconds else {}),
        **({"OFFRAMP_MODEL_DIGEST": spec.model_digest} if spec.model_digest else {}),
        **({"OFFRAMP_GRPC_PORT": str(GRPC_PORT)} if "GRPC" in spec.protocols else {}),
        **({"OFFRAMP_RAMP_SETS": RAMP_SETS_PATH} if spec.store_claim else {}),
        **({"OFFRAMP_CAPTURE_DIR": CAPTURES_PATH} if spec.store_claim and spec.training == "LiveTraffic" else {}),
        **({"OFFRAMP_MEASURE_SECONDS": f"{MEASURE_SECONDS:g}"} if spec.in_pool else {}),
        **_edge_variables(service),
        **option_variables(spec),
    }
    return [
        *(entry for entry in given if not entry["name"].startswith("OFFRAMP_")),
        *({"name": name, "value": value} for name, value in own.items()),
        *([_proven_digest(service)] if spec.finds_model_out else []),
        {"name": "OFFRAMP_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        # A container sees all processors of its node; without this a CPU limit would be spent on waiting threads.
        {
            "name": "OFFRAMP_THREADS",
            "valueFrom": {"resourceFieldRef": {"containerName": CONTAINER, "resource": _cpus(spec.worker)}},
        },
    ]


def _edge_variables(service: Service) -> dict[str, str]:
    """What a worker at the edge is told of its core, which is everybody else, and what the core is told."""
    edge = service.spec.edge
    if edge is None:
        return {}
    if not service.spec.is_edge:
        return {"OFFRAMP_EDGES": "true"}
    uplink = {"OFFRAMP_UPLINK": edge.uplink} if edge.uplink else {}
    return {
        "OFFRAMP_CORE": service_url(service),
        **uplink,
        "OFFRAMP_RESIDUE": edge.residue,
        "OFFRAMP_OFFLINE": edge.offline,
    }


def _cpus(worker: Mapping[str, Any]) -> str:
    """Which resource says how many threads a worker has: its limit, or what it asks for where it has none.

    A limit that is not set reads as the whole node's processors, or as a LimitRange's; a request that is not set reads
    as 0.
    """
    resources = worker.get("resources") or {}
    limit, request = (str((resources.get(kind) or {}).get("cpu", 0)).strip("0.m") for kind in ("limits", "requests"))
    return "requests.cpu" if request and not limit else "limits.cpu"


def _proven_digest(service: Service) -> Object:
    """The digest that the bundle at this URI was proven with, or at the one whose model a pool's own bundle must have;
    nothing before the first worker has."""
    uri = service.spec.like_uri or service.spec.model_uri
    key = {"name": model_name(service.name), "key": _uri_key(uri), "optional": True}
    return {"name": "OFFRAMP_MODEL_DIGEST", "valueFrom": {"configMapKeyRef": key}}


def _probe(path: str, *, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in (value or {}).items()}
