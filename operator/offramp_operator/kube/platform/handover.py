"""Deployments of a service that its spec does not ask for any more, and whether the others can do without them."""

from __future__ import annotations

from offramp_core.control.objects import Service
from offramp_core.control.spec import EDGES
from offramp_operator.kube import manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import DEPLOYMENT, Object, name_of
from offramp_operator.kube.manifests import edges_name, is_of_edges
from offramp_operator.kube.pools import in_pools, take_over


def left_over(cache: ObjectCache, service: Service) -> list[Object]:
    """Workers of a pool that the spec does not name any more, or of the time before or after pools."""
    spared = {manifests.trial_name(service.name), *(manifests.workers_name(each) for each in in_pools(service))}
    return [obj for obj in cache.owned(DEPLOYMENT, service.uid) if name_of(obj) not in spared]


def must_stay(cache: ObjectCache, service: Service) -> list[Object]:
    """Those that the others cannot do without yet."""
    left = left_over(cache, service)
    if not left:
        return []
    owned = {name_of(obj): obj for obj in cache.owned(DEPLOYMENT, service.uid)}
    wanted = {each.spec.in_pool: owned.get(manifests.workers_name(each)) for each in in_pools(service)}
    return [] if take_over(service, wanted, owned.get(manifests.trial_name(service.name))) else left


def has_edges(cache: ObjectCache, service: Service) -> bool:
    """Whether workers are at the edge, or are to be. Those of before keep what stands beside them, unless a pool has
    the name of their Service by now."""
    owned = cache.owned(DEPLOYMENT, service.uid)
    left = EDGES not in (pool.name for pool in service.spec.pools) and any(is_of_edges(name_of(o)) for o in owned)
    return service.spec.edge is not None or left


def left_to_route(cache: ObjectCache, service: Service) -> list[Object]:
    """Workers of before that must stay and get their part of the requests: those at the edge get what is sent there,
    and a pool with the name of their Service what comes without a Gateway."""
    edges = edges_name(service.name) if has_edges(cache, service) else ""
    return [o for o in must_stay(cache, service) if not is_of_edges(name_of(o)) and name_of(o) != edges]
