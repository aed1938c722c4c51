"""The workers of a service that a pool serves, as the pool's status and their pods tell of them."""

from __future__ import annotations

from dataclasses import replace

from offramp_core.control.objects import Service
from offramp_core.control.shared_pool import MOST_SERVICES, HeldService, SharedPoolStatus
from offramp_core.control.snapshot import WorkerEndpoint
from offramp_core.reasons import Reason
from offramp_operator.kube import pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import DEPLOYMENT, POD, REPLICA_SET, WORKER_POOL, Object, uid_of
from offramp_operator.kube.shared.members import mark_of
from offramp_operator.shell.manifests import status_from_manifest


def holders(cache: ObjectCache, service: Service) -> tuple[WorkerEndpoint, ...]:
    """Every worker that holds the service, and one more that stands for what keeps it from a place.

    A restart of a shared worker is no sign of this service's plan: its own crash marker is.
    """
    name = service.spec.shared_pool
    pool = cache.get(WORKER_POOL, service.namespace, name)
    if pool is None:
        message = f"spec.sharing.pool: there is no WorkerPool {name} in namespace {service.namespace}; make it"
        return (_missing(service, Reason.WORKER_POOL_NOT_FOUND, message),)
    status, running = status_from_manifest(SharedPoolStatus, pool), pods_of(cache, uid_of(pool))
    lacking = next((known.message for known in status.services if known.uid == service.uid and known.message), "")
    found = [
        _endpoint(service, running[worker.uid], held, lacking=bool(lacking))
        for worker in status.workers
        for held in worker.services
        if held.uid == service.uid and worker.uid in running
    ]
    if len(status.services) >= MOST_SERVICES and all(known.uid != service.uid for known in status.services):
        full = f"it takes {MOST_SERVICES} services, and that many are older; use another pool"
        return (_missing(service, Reason.NO_PLACE_IN_POOL, full),)
    return (*found, _missing(service, Reason.NO_PLACE_IN_POOL, lacking)) if lacking else tuple(found)


def pods_of(cache: ObjectCache, pool_uid: str) -> dict[str, WorkerEndpoint]:
    """The pods of a pool that run or may yet run, by uid; found along owner references."""
    found: dict[str, WorkerEndpoint] = {}
    for deployment in cache.owned(DEPLOYMENT, pool_uid):
        sets: list[Object] = cache.owned(REPLICA_SET, uid_of(deployment))
        newest = max(sets, key=pods.revision, default=None)
        for replica_set in sets:
            for pod in cache.owned(POD, uid_of(replica_set)):
                if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                    found[uid_of(pod)] = pods.endpoint(pod, current=replica_set is newest)
    return found


def _endpoint(service: Service, pod: WorkerEndpoint, held: HeldService, *, lacking: bool) -> WorkerEndpoint:
    """``lacking``: no worker has room for it."""
    failed = held.standing == "Failed" or (bool(held.message) and held.mark != mark_of(service))
    url = f"{pod.admin_url}/models/{held.model}" if pod.admin_url is not None and held.mark else None
    return replace(
        pod,
        ready=pod.ready and (held.standing == "Serving" or (held.standing == "Unloaded" and not lacking)),
        current=held.mark == mark_of(service),
        restarts=0,
        failure=f"{pod.name}: {held.message}" if failed else pod.failure,
        failure_reason=Reason.INVALID_BUNDLE if failed else pod.failure_reason,
        no_room=False,
        template=held.mark,
        loads_in=held.load_millis / 1000 if held.standing == "Unloaded" else None,
        admin_url=url,
    )


def _missing(service: Service, reason: Reason, message: str) -> WorkerEndpoint:
    return WorkerEndpoint(
        f"pool {service.spec.shared_pool}",
        service.uid,
        ready=False,
        current=False,
        failure=message,
        failure_reason=reason,
    )
