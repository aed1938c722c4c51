"""The pools of a service, as pure functions: its Deployments, and which of them may be changed now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from offramp_core.control.objects import Service
from offramp_core.control.spec import POOL_OWN
from offramp_core.errors import InvalidSpecError, of_all_pools
from offramp_operator.kube.kinds import Object


def in_pools(service: Service) -> tuple[Service, ...]:
    """The service as the workers of each pool are made; itself where it has none. Those with the spec's bundle come
    first: what they serve is what other bundles must be. Those at the edge come last."""
    spec = service.spec
    if not spec.pools:
        return (service,)
    return tuple(
        replace(
            service,
            spec=replace(
                spec,
                worker=pool.worker,
                replicas=pool.replicas,
                pools=(),
                in_pool=pool.name,
                **({**pool.bundle, "like_uri": spec.model_uri} if pool.bundle else {}),
            ),
        )
        for pool in sorted(spec.pools, key=lambda pool: (spec.at_edge(pool.name), bool(pool.bundle)))
    )


def in_words_of(message: str, index: int, *, own_bundle: bool) -> str:
    """What keeps a worker of a pool from running, with the pool's fields for those of all workers."""
    if own_bundle:
        message = of_all_pools(re.sub(r"\bspec\.model\.(?!digest\b)", f"spec.pools[{index}].model.", message))
    for name in POOL_OWN:
        message = re.sub(rf"\bspec\.worker\.{name}\b", f"spec.pools[{index}].{name}", message)
    return message.replace("spec.replicas", f"spec.pools[{index}].replicas")


def check_found_out(pools: Iterable[Service]) -> None:
    """Refuse pools of which none finds out the model that their own bundles must have. A worker at the edge is not
    ready before its core is.

    Raises
    ------
    InvalidSpecError
        If no pool of the core has a worker with the spec's bundle.
    """
    if not any(each.spec.replicas and not each.spec.like_uri and not each.spec.is_edge for each in pools):
        why = "have no worker of spec.model outside the edge, to tell the model that bundles of pools must have"
        raise InvalidSpecError("spec.pools", f"{why}; give a pool without model a worker, or write spec.model.digest")


def has_followed(deployment: Object) -> bool:
    """Whether no pod of an earlier template is left, so that the next pool may be changed."""
    return _is_observed(deployment) and count(deployment, "updatedReplicas") == count(deployment, "replicas")


def serves(deployment: Object) -> bool:
    """Whether any of its pods is ready."""
    return count(deployment, "readyReplicas") > 0


def take_over(service: Service, wanted: Mapping[str, Object | None], trial: Object | None) -> bool:
    """Whether the workers that the spec or the plan asks for can do without those of an earlier spec: as many as are
    asked for in all are available, and at least one.

    What counts is what is asked for now, and not what Deployments ask for, which may have to wait for their turn.

    Parameters
    ----------
    wanted : mapping
        Deployments by pool; the main one by "".
    trial : object or None
        The Deployment of workers on trial, which may stand in the place of main ones.
    """
    spec = service.spec
    asked = _asked_of_pools(service) if spec.pools else {"": _asked_of_main(service, wanted[""])}
    total = sum(asked.values())
    if not total and all(pool.fixed for pool in spec.pools):
        return True
    measured = {pool.name for pool in service.status.pools if pool.worker_rate > 0}
    known = {name for name in asked if not spec.pools or spec.pools[0].fixed or name in measured}
    available = sum(min(asked[name], _available(wanted[name])) for name in known) + _available(trial)
    return available >= max(1, total)


def _asked_of_pools(service: Service) -> dict[str, int]:
    """Workers that each pool is to have. Where the operator plans, a pool without a place counts with what is planned
    there: the one that waits is in nobody's plan, and the others have its share."""
    known, asked = {pool.name: pool for pool in service.status.pools}, dict[str, int]()
    for pool in service.spec.pools:
        status = known.get(pool.name)
        asked[pool.name] = pool.replicas
        if status is not None and not pool.fixed:
            asked[pool.name] = status.planned if status.message else max(pool.replicas, status.planned)
    return asked


def _asked_of_main(service: Service, live: Object | None) -> int:
    scaled = service.spec.autoscaling
    return max(service.spec.replicas if scaled is None else scaled.min_replicas, replicas_of(live))


def replicas_of(deployment: Object | None) -> int:
    """How many workers a Deployment asks for; 0 where there is none."""
    return 0 if deployment is None else int((deployment.get("spec") or {}).get("replicas", 1))


def _available(deployment: Object | None) -> int:
    """Its available workers, once its controller has seen what it is asked for."""
    return 0 if deployment is None or not _is_observed(deployment) else count(deployment, "availableReplicas")


def _is_observed(deployment: Object) -> bool:
    return count(deployment, "observedGeneration") >= int(deployment["metadata"].get("generation") or 0)


def count(deployment: Object, name: str) -> int:
    """A number in a Deployment's status, such as ``readyReplicas``."""
    return int((deployment.get("status") or {}).get(name) or 0)
