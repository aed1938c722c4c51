"""The pools of a service, as pure functions: its Deployments, and which of them may be changed now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from offramp_core.control.objects import Service
from offramp_core.control.spec import POOL_OWN
from offramp_operator.kube.kinds import Object


def in_pools(service: Service) -> tuple[Service, ...]:
    """The service as the workers of each pool are made; itself where it has none."""
    spec = service.spec
    if not spec.pools:
        return (service,)
    return tuple(
        replace(
            service,
            spec=replace(spec, worker=pool.worker, replicas=pool.replicas, pools=(), in_pool=pool.name),
        )
        for pool in spec.pools
    )


def in_words_of(message: str, index: int) -> str:
    """What keeps a worker of a pool from running, with the pool's fields for those of all workers."""
    for name in POOL_OWN:
        message = message.replace(f"spec.worker.{name}", f"spec.pools[{index}].{name}")
    return message.replace("spec.replicas", f"spec.pools[{index}].replicas")


def has_followed(deployment: Object) -> bool:
    """Whether no pod of an earlier template is left, so that the next pool may be changed."""
    meta, status = deployment["metadata"], deployment.get("status") or {}
    seen = int(status.get("observedGeneration") or 0) >= int(meta.get("generation") or 0)
    return seen and int(status.get("updatedReplicas") or 0) == int(status.get("replicas") or 0)


def serves(deployment: Object) -> bool:
    """Whether any of its pods is ready."""
    return _count(deployment, "readyReplicas") > 0


def take_over(wanted: Iterable[Object | None], left: Iterable[Object]) -> bool:
    """Whether the workers that the spec asks for can do without those that are ``left`` of an earlier one: all of them
    are available, or as many as the others have ready."""
    found = list(wanted)
    asked = sum(int((d["spec"] or {}).get("replicas", 1)) for d in found if d is not None)
    available = sum(_count(d, "availableReplicas") for d in found if d is not None)
    if any(d is None or not _is_observed(d) for d in found):
        return False
    return available >= min(asked, sum(_count(d, "readyReplicas") for d in left))


def _is_observed(deployment: Object) -> bool:
    seen = int((deployment.get("status") or {}).get("observedGeneration") or 0)
    return seen >= int(deployment["metadata"].get("generation") or 0)


def _count(deployment: Object, name: str) -> int:
    return int((deployment.get("status") or {}).get(name) or 0)
