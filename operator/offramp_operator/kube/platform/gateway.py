"""The HTTPRoute that shares a service's requests between two versions, or among its pools, and the Services that it
names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import msgspec

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Trouble
from offramp_core.control.workers.pools import request_weights
from offramp_core.control.workers.versions import request_share
from offramp_core.reasons import Reason
from offramp_operator.kube import manifests, pods, routes
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, GoneError
from offramp_operator.kube.kinds import DEPLOYMENT, HTTP_ROUTE, NETWORK_SERVICE, Object, name_of
from offramp_operator.kube.platform import memory as memories
from offramp_operator.kube.platform.children import Children, NameTakenError
from offramp_operator.kube.platform.handover import has_edges, left_to_route
from offramp_operator.kube.platform.memory import Memory, Problem, key_of
from offramp_operator.kube.pools import count, in_pools
from offramp_operator.kube.trim import content
from offramp_operator.shell.log import log_event

LET_GO_SECONDS = 30.0  # a Gateway that has not taken in a route after so long is not waited for


class GatewayRoutes:
    """Routes through a Gateway. What keeps one from being made keeps nobody from serving."""

    def __init__(self, cache: ObjectCache, children: Children, *, monotonic: Callable[[], float]) -> None:
        self._cache = cache
        self._children = children
        self._monotonic = monotonic

    async def ensure(self, memory: Memory, service: Service) -> None:
        """Share the requests. Before anything happens to workers: requests leave those that are to go, and then these
        go."""
        asked = service.spec.route
        if asked is None:
            await self._remove(memory, service)
            return
        problem = memory.route_problem
        if problem is not None and self._is_too_early(problem, service):
            return
        memory.route_problem = None
        try:
            left = left_to_route(self._cache, service)
            for each in (*_sharers(service), *(_of_before(service, obj) for obj in left)):
                await self._children.ensure(memory, NETWORK_SERVICE, each)
            weights = self._weights(service, left)
            await self._children.ensure(memory, HTTP_ROUTE, manifests.http_route(service, asked, weights=weights))
            await self._remove_services(service, but=weights.keys())
        except NameTakenError as error:
            self._remember(memory, service, Reason.ROUTE_NAME_TAKEN, str(error), before=problem)
        except GoneError:
            what = (
                f"the cluster has no HTTPRoute of {HTTP_ROUTE.api_version}: install Gateway API, or remove spec.route"
            )
            self._remember(memory, service, Reason.NO_GATEWAY_API, what, before=problem)
        except ApiError as error:
            self._remember(memory, service, Reason.ROUTE_REFUSED, error.message, before=problem)

    def still_sends(self, memory: Memory, service: Service, name: str) -> bool:
        """Whether a Gateway may still send requests to the workers of a Deployment that are to go, as far as that is
        worth waiting for."""
        route = self._route(service)
        if route is None or self._cache.get(DEPLOYMENT, service.namespace, name) is None:
            memory.leaving_since.pop(name, None)
            return False
        waited = self._monotonic() - memory.leaving_since.setdefault(name, self._monotonic())
        return waited < LET_GO_SECONDS and not routes.has_let_go(route, _backend(service, name))

    def trouble(self, service: Service, memory: Memory) -> Trouble | None:
        """What keeps requests from being shared as the spec asks; None where nothing does."""
        if service.spec.route is None:
            return None
        problem, route = memory.route_problem, self._route(service)
        if problem is not None:
            return Trouble(problem.reason, problem.message)
        if route is None:
            return None
        if unreadable := self._cache.unreadable(HTTP_ROUTE, service.namespace):
            why = f"HTTPRoutes cannot be read, so nobody knows what Gateways make of {service.name}: {unreadable}"
            return Trouble(Reason.ROUTES_UNREADABLE, why)
        return routes.trouble(route)

    async def _remove(self, memory: Memory, service: Service) -> None:
        memory.route_problem = None
        await self._children.delete(service, HTTP_ROUTE, service.name)
        await self._remove_services(service, but=frozenset())

    async def _remove_services(self, service: Service, *, but: Set[str]) -> None:
        """Those that no route names any more, once their workers are gone. The service's own is for everybody."""
        apart = [manifests.edges_name(service.name)] if has_edges(self._cache, service) else []
        for obj in self._cache.owned(NETWORK_SERVICE, service.uid):
            name = name_of(obj)
            deployment = service.name if name == manifests.main_name(service.name) else name
            routed = but and self._cache.get(DEPLOYMENT, service.namespace, deployment) is not None
            if name not in {service.name, *but, *apart} and not routed:
                await self._children.remove(NETWORK_SERVICE, obj)

    def _is_too_early(self, problem: Problem, service: Service) -> bool:
        """Whether trying again would meet the same problem."""
        unreadable = self._cache.unreadable(HTTP_ROUTE, service.namespace)
        same = (problem.generation, problem.unreadable) == (service.generation, unreadable)
        return same and self._monotonic() < problem.retry_at

    def _weights(self, service: Service, left: Sequence[Object]) -> dict[str, int]:
        """Of the Services that a route names. Workers of before that are ``left`` get their part until the others can
        do without them."""
        spec, share = service.spec, 0 if service.spec.pools else self._share(service)
        if not spec.pools and not left:
            return manifests.version_weights(service, share=share)
        if spec.pools:
            sources = {name: name for name in map(manifests.workers_name, _shared_among(service))}
        else:
            trial = manifests.trial_name(service.name)
            sources = {manifests.main_name(service.name): service.name, trial: trial if share else ""}
        sources |= {_backend(service, name): name for name in map(name_of, left)}
        counts = dict[str, int]()
        for counted in ("availableReplicas", "readyReplicas"):
            if not any(counts.values()):
                counts = {backend: self._count(service, name, counted) for backend, name in sources.items()}
        measured = (replace(p, name=manifests.pool_name(service.name, p.name)) for p in service.status.pools)
        return request_weights(measured, counts)

    def _share(self, service: Service) -> int:
        return request_share(
            service,
            main_ready=self._answers(service, service.name, "readyReplicas"),
            # Ready for some seconds, until every Gateway knows the pods' addresses.
            trial_ready=self._answers(service, manifests.trial_name(service.name), "availableReplicas"),
        )

    def _answers(self, service: Service, name: str, counted: str) -> bool:
        """Whether a Deployment of the service has pods that answer, by a count in its status."""
        return self._count(service, name, counted) > 0

    def _count(self, service: Service, name: str, counted: str) -> int:
        live = self._cache.get(DEPLOYMENT, service.namespace, name)
        if live is None or not pods.controls(service.uid, live):
            return 0
        return count(live, counted)

    def _route(self, service: Service) -> Object | None:
        obj = self._cache.get(HTTP_ROUTE, service.namespace, service.name)
        return obj if obj is not None and pods.controls(service.uid, obj) else None

    def _remember(
        self, memory: Memory, service: Service, reason: Reason, message: str, *, before: Problem | None
    ) -> None:
        if before is None or before.message != message:
            key = str(key_of(service))
            log_event("route-refused", f"{key}: {message}", level=logging.WARNING, service=key, reason=reason)
        unreadable = self._cache.unreadable(HTTP_ROUTE, service.namespace)
        retry_at = self._monotonic() + memories.REFUSED_RETRY_SECONDS
        memory.route_problem = Problem(service.generation, reason, message, retry_at, unreadable)


def _sharers(service: Service) -> list[Object]:
    """The Services that a route shares requests among: one for each pool, or for each version of the model."""
    if service.spec.pools:
        return [manifests.version_service(each, trial=False) for each in _shared_among(service)]
    return [manifests.version_service(service, trial=trial) for trial in (False, True)]


def _shared_among(service: Service) -> list[Service]:
    """The pools that requests are shared among. Workers at the edge get those that are sent there."""
    return [each for each in in_pools(service) if not each.spec.is_edge]


def _backend(service: Service, deployment: str) -> str:
    """The Service of the workers of one Deployment alone."""
    return manifests.main_name(service.name) if deployment == service.name else deployment


def _of_before(service: Service, deployment: Object) -> Object:
    """The Service of workers that the spec does not ask for any more."""
    selector = msgspec.json.decode(content(deployment))["selector"]["matchLabels"]
    return manifests.service_of(service, _backend(service, name_of(deployment)), selector)
