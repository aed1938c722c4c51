"""What a pool's workers look like in a cluster: those of a service, but for whose they are and what they are told."""

from __future__ import annotations

import hashlib
import json

from offramp_operator.kube import manifests
from offramp_operator.kube.kinds import (
    CLASS_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    TEMPLATE_ANNOTATION,
    WORKER_POOL,
    WORKER_POOL_LABEL,
    Object,
    owner_reference,
)
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.shell.platform import WorkerIdentity

READY_SECONDS = 10  # before an old worker goes for a new one: requests must have been turned to the latter
OF_ONE_SERVICE = (
    "OFFRAMP_BUNDLE",
    "OFFRAMP_SERVICE",
    "OFFRAMP_SERVICE_UID",
    "OFFRAMP_PLAN_FILE",
    "OFFRAMP_MODEL_DIGEST",
)


def workers_name(pool: str) -> str:
    """Name of the Deployment, and of what stands beside it."""
    return f"{pool}-workers"


def selector(pool: SharedPool) -> dict[str, str]:
    """Labels by which the workers are found; those of no service have the last one."""
    return {
        "app.kubernetes.io/name": manifests.WORKER_NAME,
        "app.kubernetes.io/instance": f"{pool.name}.shared",
        MANAGED_BY_LABEL: MANAGED_BY,
        WORKER_POOL_LABEL: pool.name,
    }


def deployment(pool: SharedPool, identity: WorkerIdentity, settings: WorkerSettings, *, replicas: int) -> Object:
    """The workers. A new one serves before an old one goes."""
    made = manifests.deployment(pool.as_service, identity, settings, replicas=replicas)
    template = _template(pool, made["spec"]["template"]["spec"])
    return made | {
        "metadata": _metadata(pool),
        "spec": made["spec"]
        | {"minReadySeconds": READY_SECONDS, "selector": {"matchLabels": selector(pool)}, "template": template},
    }


def disruption_budget(pool: SharedPool) -> Object:
    """A drain takes one worker at a time, or as many as the user allows."""
    made = manifests.disruption_budget(pool.as_service)
    chosen = {"selector": {"matchLabels": selector(pool)}}
    return made | {"metadata": _metadata(pool), "spec": made["spec"] | chosen}


def network_policy(pool: SharedPool, settings: WorkerSettings) -> Object | None:
    """As that of a service: the admin port is for the operator alone. None where nobody wants one."""
    if settings.admin_from is None:
        return None
    made = manifests.network_policy(pool.as_service, settings.admin_from, allow_egress=settings.allow_egress)
    chosen = {"podSelector": {"matchLabels": selector(pool)}}
    return made | {"metadata": _metadata(pool), "spec": made["spec"] | chosen}


def _metadata(pool: SharedPool) -> Object:
    return {
        "name": workers_name(pool.name),
        "namespace": pool.namespace,
        "labels": selector(pool),
        "ownerReferences": [owner_reference(WORKER_POOL, pool.name, pool.uid)],
    }


def _template(pool: SharedPool, pod: Object) -> Object:
    """The pod of a service, made a pool's: no plan is mounted, and its list of models is brought to it."""
    [container] = pod["containers"]
    env = [entry for entry in container["env"] if entry["name"] not in OF_ONE_SERVICE]
    own = {
        "OFFRAMP_POOL_UID": pool.uid,
        "OFFRAMP_BUNDLES": manifests.BUNDLE_PATH,
        "OFFRAMP_MODELS_BYTES": str(pool.spec.memory_bytes),
    }
    env += [{"name": name, "value": value} for name, value in own.items()]
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] != "plan"]
    pod = pod | {
        "containers": [container | {"env": env, "volumeMounts": mounts}],
        "volumes": [volume for volume in pod["volumes"] if volume["name"] != "plan"],
    }
    if spread := pod.get("topologySpreadConstraints"):
        chosen = {"labelSelector": {"matchLabels": selector(pool)}}
        pod["topologySpreadConstraints"] = [constraint | chosen for constraint in spread]
    worker = pool.spec.worker
    marks = {CLASS_LABEL: str(worker["className"])} if worker.get("className") else {}
    about: Object = {"labels": {**(worker.get("labels") or {}), **marks, **selector(pool)}}
    notes = dict(worker.get("annotations") or {})
    digest = hashlib.sha256(json.dumps([about, notes, pod], sort_keys=True).encode()).hexdigest()[:16]
    return {"metadata": about | {"annotations": notes | {TEMPLATE_ANNOTATION: digest}}, "spec": pod}
