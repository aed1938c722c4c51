"""The HTTPRoute that shares a service's requests between two versions, and the Services that it names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Trouble
from offramp_core.control.workers.versions import request_share
from offramp_core.reasons import Reason
from offramp_operator.kube import manifests, pods, routes
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, GoneError
from offramp_operator.kube.kinds import DEPLOYMENT, HTTP_ROUTE, NETWORK_SERVICE, Object
from offramp_operator.kube.platform import memory as memories
from offramp_operator.kube.platform.children import Children, NameTakenError
from offramp_operator.kube.platform.memory import Memory, Problem, key_of
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
            for trial in (False, True):
                version = manifests.version_service(service, trial=trial)
                await self._children.ensure(memory, NETWORK_SERVICE, version)
            route = manifests.http_route(service, asked, share=self._share(service))
            await self._children.ensure(memory, HTTP_ROUTE, route)
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
        """Whether a Gateway may still send requests to the workers on trial, as far as that is worth waiting for."""
        route = self._route(service)
        if route is None or self._cache.get(DEPLOYMENT, service.namespace, name) is None:
            memory.leaving_since = None
            return False
        if memory.leaving_since is None:
            memory.leaving_since = self._monotonic()
        waited = self._monotonic() - memory.leaving_since
        return waited < LET_GO_SECONDS and not routes.has_let_go(route, name)

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
        for name in (manifests.main_name(service.name), manifests.trial_name(service.name)):
            await self._children.delete(service, NETWORK_SERVICE, name)

    def _is_too_early(self, problem: Problem, service: Service) -> bool:
        """Whether trying again would meet the same problem."""
        unreadable = self._cache.unreadable(HTTP_ROUTE, service.namespace)
        same = (problem.generation, problem.unreadable) == (service.generation, unreadable)
        return same and self._monotonic() < problem.retry_at

    def _share(self, service: Service) -> int:
        return request_share(
            service,
            main_ready=self._answers(service, service.name, "readyReplicas"),
            # Ready for some seconds, until every Gateway knows the pods' addresses.
            trial_ready=self._answers(service, manifests.trial_name(service.name), "availableReplicas"),
        )

    def _answers(self, service: Service, name: str, counted: str) -> bool:
        """Whether a Deployment of the service has pods that answer, by a count in its status."""
        live = self._cache.get(DEPLOYMENT, service.namespace, name)
        return live is not None and pods.controls(service.uid, live) and bool((live.get("status") or {}).get(counted))

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
