"""Workers are brought to what the spec asks for: Deployments, and everything that stands beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from offramp_core.control.objects import Service
from offramp_core.control.workers.capacity import floor_in_force
from offramp_core.control.workers.update import brought_back, strategy_in_force
from offramp_core.control.workers.versions import Split
from offramp_core.errors import InvalidSpecError
from offramp_core.reasons import AnyReason, Reason, parse_reason
from offramp_operator.kube import manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, InvalidObjectError
from offramp_operator.kube.kinds import (
    AUTOSCALER,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    Kind,
    Object,
    name_of,
)
from offramp_operator.kube.platform import memory as memories
from offramp_operator.kube.platform.children import Children, NameTakenError, check_owner
from offramp_operator.kube.platform.fleet import FleetReader
from offramp_operator.kube.platform.gateway import GatewayRoutes
from offramp_operator.kube.platform.handover import has_edges
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.platform.memory import Memory, Problem, key_of
from offramp_operator.kube.platform.pools import Pools, on_probation
from offramp_operator.kube.platform.templates import Templates, changes_pods, template_mark
from offramp_operator.kube.platform.trainings import Trainings
from offramp_operator.kube.pools import replicas_of
from offramp_operator.kube.scaling import handed_over
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import WorkerIdentity


class Workers:
    """Applies the children of a service where they differ.

    A spec that cannot be carried out is no error here: it is remembered, and reported as a worker that cannot run; the
    workers of the last good spec stay.
    """

    def __init__(
        self,
        cache: ObjectCache,
        children: Children,
        *,
        settings: manifests.WorkerSettings,
        templates: Templates,
        fleet: FleetReader,
        routes: GatewayRoutes,
        trainings: Trainings,
        holds: Holds,
        monotonic: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._children = children
        self._settings = settings
        self._templates = templates
        self._fleet = fleet
        self._routes = routes
        self._trainings = trainings
        self._holds = holds
        self._monotonic = monotonic
        self._pools = Pools(cache, children, templates, routes, holds, monotonic=monotonic)

    async def ensure(self, memory: Memory, service: Service, identity: WorkerIdentity) -> None:
        """Apply Deployment, Service, PodDisruptionBudget, NetworkPolicy and autoscaler."""
        await self._routes.ensure(memory, service)
        problem = memory.problem
        if problem is not None and problem.generation == service.generation and self._monotonic() < problem.retry_at:
            return
        try:
            await self._trainings.end_unwanted(service)
            await self._children.ensure(memory, NETWORK_SERVICE, manifests.network_service(service))
            if service.spec.shared_pool:  # everything else is the pool's
                memory.problem = None
                return
            await self._children.ensure(memory, DISRUPTION_BUDGET, manifests.disruption_budget(service))
            await self._ensure_network_policy(memory, service)
            taken = await self._ensure_edges(memory, service)
            await self._ensure_digests(memory, service)
            if memory.class_trouble is None:  # else the pods, and their number, stay as they are
                await self._ensure_trial(memory, service, identity)
                if service.spec.pools:
                    await self._pools.ensure(memory, service, identity)
                else:
                    await self._ensure_scaled(memory, service, identity)
                await self._pools.remove_others(memory, service)
        except InvalidSpecError as error:
            self._remember(memory, service, Reason.INVALID_MODEL, str(error))
        except NameTakenError as error:
            self._remember(memory, service, Reason.NAME_TAKEN, str(error))
        except InvalidObjectError as error:
            self._remember(memory, service, Reason.INVALID_SPEC, error.message)
        except ApiError as error:
            self._remember(
                memory, service, parse_reason(error.reason) if error.reason else Reason.REFUSED, error.message
            )
        else:
            if taken:  # which kept no worker from being changed
                self._remember(memory, service, Reason.NAME_TAKEN, "; ".join(taken))
            else:
                memory.problem = None

    async def _ensure_network_policy(self, memory: Memory, service: Service) -> None:
        operator = self._settings.admin_from
        if operator is None:
            # One that was made while they were wanted.
            await self._children.delete(service, NETWORK_POLICY, manifests.network_policy_name(service.name))
            return
        policy = manifests.network_policy(
            service, operator, allow_egress=self._settings.allow_egress, delivery=self._settings.delivery
        )
        await self._children.ensure(memory, NETWORK_POLICY, policy)

    async def _ensure_edges(self, memory: Memory, service: Service) -> list[str]:
        """What stands beside workers at the edge, as long as there are any. Returns what somebody else has the name
        of."""
        name, taken, wanted = manifests.edges_name(service.name), list[str](), dict[Kind, Object]()
        if has_edges(self._cache, service):
            wanted[NETWORK_SERVICE] = manifests.edges_service(service)
            wanted[DISRUPTION_BUDGET] = manifests.disruption_budget(service, edges=True)
            if self._settings.admin_from and not self._settings.allow_egress:
                wanted[NETWORK_POLICY] = manifests.edges_network_policy(service)
        for kind in (NETWORK_SERVICE, DISRUPTION_BUDGET, NETWORK_POLICY):
            try:
                if kind in wanted:
                    await self._children.ensure(memory, kind, wanted[kind])
                elif kind is not NETWORK_SERVICE:  # that may be the one of a pool, and routes remove it
                    await self._children.delete(service, kind, name)
            except NameTakenError as error:
                taken.append(str(error))
        return taken

    async def _ensure_digests(self, memory: Memory, service: Service) -> None:
        """Hand the digest that the bundle was proven with to workers to come. Before the Deployment, which may then
        have more of them."""
        desired = manifests.model_config_map(service)
        if desired is None or not service.spec.finds_model_out:
            return
        live = await self._children.live(CONFIG_MAP, service.namespace, name_of(desired))
        if live is not None:
            check_owner(live, memory.uid, CONFIG_MAP)
            if desired["data"].items() <= (live.get("data") or {}).items():
                return
        await self._children.create_or_change(CONFIG_MAP, desired, live)

    async def _ensure_trial(self, memory: Memory, service: Service, identity: WorkerIdentity) -> None:
        """Workers whose model is on trial. Before the others, so that those of a rejected model are gone when their
        room is asked for."""
        n = self._fleet.split(service, memory)[2].n_trial
        name = manifests.trial_name(service.name)
        if n == 0:
            if not self._routes.still_sends(memory, service, name):
                await self._children.delete(service, DEPLOYMENT, name)
            return
        memory.leaving_since.pop(name, None)
        live = await self._children.live(DEPLOYMENT, service.namespace, name)
        if service.spec.may_move and service.proven_digest is None:
            n = min(n, max(1, replicas_of(live)))
        body = manifests.deployment(service, identity, self._templates.settings(memory), replicas=n, trial=True)
        await self._holds.hold(live, body)
        await self._children.ensure(memory, DEPLOYMENT, body)

    async def _ensure_scaled(self, memory: Memory, service: Service, identity: WorkerIdentity) -> None:
        """The Deployment, and who scales it: the number of workers is applied only where no autoscaler decides on
        it."""
        found, wanted = self._fleet.scalers(service), service.spec.autoscaling
        if wanted is None or found.others:
            for obj in self._cache.owned(AUTOSCALER, service.uid):
                await self._children.remove(AUTOSCALER, obj)
        decides, desired, split = self._fleet.split(service, memory)
        live = await self._children.live(DEPLOYMENT, service.namespace, service.name)
        # Workers that started together could find different bundles at a URI without a digest: the first one goes ahead
        # alone.
        unproven = split.main.spec.may_move and split.main.proven_digest is None
        at_most = max(1, replicas_of(live)) if unproven else desired
        body = manifests.deployment(
            split.main,
            identity,
            self._templates.settings(memory),
            replicas=min(split.n_main, at_most) if decides is None or live is None else None,
            strategy=strategy_in_force(service, desired),
        )
        kept = memory.kept.get("")
        if kept is not None and template_mark(body["spec"]) != kept:
            return  # more than the image differs, such as what another release makes of a spec
        await self._bring_back(memory, service, live, body)
        await self._holds.hold(live, body)
        changes = live is not None and changes_pods(live, body)
        if live is not None and changes and on_probation(live):
            return
        given = None if decides is None else handed_over(service, desired, found.others)
        own = None
        if not found.others and not unproven:
            own = _own_autoscaler(service, split, changes=changes)
        if own is not None and changes and found.own is not None:  # before the first worker is replaced
            await self._children.ensure(memory, AUTOSCALER, own)
        await self._children.ensure(memory, DEPLOYMENT, body, hands_over=given)
        if own is not None:
            await self._children.ensure(memory, AUTOSCALER, own)

    async def _bring_back(self, memory: Memory, service: Service, live: Object | None, body: Object) -> None:
        """Put the pods that served before into the Deployment where those that the spec asks for failed. Kubernetes
        keeps them in a ReplicaSet."""
        wanted = brought_back(service, self._templates.wanted(service, memory, trial=False) or "")
        if not wanted or live is None:
            memory.earlier = None
            return
        if memory.earlier is None or memory.earlier[0] != wanted:
            earlier = await self._holds.earlier_pods(live, wanted)
            memory.earlier = None if earlier is None else (wanted, earlier)
        if memory.earlier is not None:
            body["spec"]["template"] = memory.earlier[1]

    def _remember(self, memory: Memory, service: Service, reason: AnyReason, message: str) -> None:
        if memory.problem is None or memory.problem.message != message:
            key = str(key_of(service))
            log_event("workers-refused", f"{key}: {message}", level=logging.WARNING, service=key, reason=reason)
        retry_at = self._monotonic() + memories.REFUSED_RETRY_SECONDS
        memory.problem = Problem(service.generation, reason, message, retry_at)


def _own_autoscaler(service: Service, split: Split, *, changes: bool) -> Object | None:
    """The autoscaler that the spec asks for. While workers are replaced it takes none away."""
    wanted = service.spec.autoscaling
    if wanted is None:
        return None
    frozen = changes or service.status.update.strategy != "" or split.n_trial > 0
    return manifests.autoscaler(service, wanted, fewest=floor_in_force(wanted, service.status.capacity), frozen=frozen)
