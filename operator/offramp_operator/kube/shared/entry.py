"""WorkerPools as a managed kind."""

from __future__ import annotations

from collections.abc import Iterable

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD,
    REPLICA_SET,
    SERVICE,
    WORKER_CLASS,
    WORKER_POOL,
    WORKER_POOL_LABEL,
    Object,
    class_of,
    name_of,
    namespace_of,
    shared_pool_of,
)
from offramp_operator.kube.managed import Managed, ObjectKey, Reconcile, Right, Seat
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.shared.calls import Calls
from offramp_operator.kube.shared.reconcile import PoolReconciler
from offramp_operator.shell.signing import SigningKey

READ, CHANGE = "get list watch", "create delete get list patch watch"
RIGHTS = (
    Right(WORKER_POOL, READ),
    Right(WORKER_POOL, "get patch update", "status"),
    Right(SERVICE, READ),
    *(Right(kind, CHANGE) for kind in (DEPLOYMENT, DISRUPTION_BUDGET, NETWORK_POLICY)),
    *(Right(kind, READ) for kind in (REPLICA_SET, WORKER_CLASS)),
    Right(POD, f"{READ} patch"),
)


def worker_pools(workers: WorkerSettings, key: SigningKey) -> Managed:
    """The entry of pools; ``workers`` is what the administrator decided, ``key`` signs lists of models."""

    def begin(seat: Seat) -> Reconcile:
        calls = Calls()
        seat.closing.push_async_callback(calls.close)
        return PoolReconciler(seat.client, seat.cache, key, workers=workers, calls=calls).reconcile

    children = (DEPLOYMENT, REPLICA_SET, POD, DISRUPTION_BUDGET, NETWORK_POLICY, WORKER_CLASS)
    return Managed(WORKER_POOL, begin, RIGHTS, own=(SERVICE,), children=children, belongs=_pool_of, users=_users)


def _pool_of(obj: Object) -> ObjectKey | None:
    """A service is kept by whoever has its pool. Everything of a pool belongs to nobody else's part of the services, so
    that all operators know it: each has services that the pool may serve."""
    name = shared_pool_of(obj) if obj.get("kind") == SERVICE.name else ""
    return ObjectKey(namespace_of(obj), name) if name else None


def _users(obj: Object, cache: ObjectCache) -> Iterable[ObjectKey]:
    """The pool itself, that of one of its children, or all that use a class."""
    if obj.get("kind") == WORKER_CLASS.name:
        return [
            ObjectKey(namespace_of(pool), name_of(pool))
            for pool in cache.all(WORKER_POOL)
            if class_of(pool) == name_of(obj)
        ]
    name = name_of(obj) if obj.get("kind") == WORKER_POOL.name else ""
    name = name or (obj["metadata"].get("labels") or {}).get(WORKER_POOL_LABEL, "")
    return [ObjectKey(namespace_of(obj), name)] if name else []
