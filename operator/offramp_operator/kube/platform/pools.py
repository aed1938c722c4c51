"""One Deployment for each pool of a service, and the end of those that nobody asks for any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from offramp_core.control.objects import Service
from offramp_core.control.workers.update import strategy_in_force
from offramp_operator.kube import manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import DEPLOYMENT, POD, REPLICA_SET, Object, name_of, uid_of
from offramp_operator.kube.platform.children import Children, NameTakenError, check_owner
from offramp_operator.kube.platform.gateway import GatewayRoutes
from offramp_operator.kube.platform.handover import left_over, must_stay
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.platform.templates import Templates, changes_pods, template_mark
from offramp_operator.kube.pods import endpoints
from offramp_operator.kube.pools import check_found_out, count, has_followed, in_pools, replicas_of, serves
from offramp_operator.kube.trim import content
from offramp_operator.shell.platform import WorkerIdentity

ALL_AT_ONCE: Object = {"maxSurge": 0, "maxUnavailable": "100%"}  # where no pod serves that could be missed


class Pools:
    """Applies the Deployments of pools where they differ. A change of their pods goes from pool to pool: what is wrong
    with it shows in one."""

    def __init__(
        self,
        cache: ObjectCache,
        children: Children,
        templates: Templates,
        routes: GatewayRoutes,
        holds: Holds,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._children = children
        self._templates = templates
        self._routes = routes
        self._holds = holds
        self._monotonic = monotonic

    async def ensure(self, memory: Memory, service: Service, identity: WorkerIdentity) -> None:
        """Every pool that the spec names."""
        pools = in_pools(service)
        live, taken = await self._live(memory, pools)
        goes_first = self._goes_first(service, live)
        unknown = service.spec.finds_model_out and service.proven_digest is None
        changing = behind = waiting = False
        holding = {each.spec.in_pool for each in pools if self._holds_up(memory, each, live.get(each.spec.in_pool))}
        # The pool in the middle of a change first, wherever it stands now: no other one begins beside it. The core's
        # pools go before the edge and never wait for it, which may have to wait for them.
        for each in sorted(pools, key=lambda each: (each.spec.is_edge, each.spec.in_pool not in holding)):
            if each.spec.in_pool not in live:
                continue
            known = live[each.spec.in_pool]
            n = each.spec.replicas if goes_first in (None, each.spec.in_pool) else replicas_of(known)
            n = n if goes_first is None else min(n, max(1, replicas_of(known)))
            n = min(n, replicas_of(known)) if unknown and each.spec.like_uri else n
            body = manifests.deployment(
                each,
                identity,
                self._templates.settings(memory),
                replicas=n,
                strategy=strategy_in_force(each, _beside(service, each)),
            )
            asked = template_mark(body["spec"])
            await self._holds.hold(known, body)
            kept = memory.kept.get(each.spec.in_pool)
            if kept is not None and template_mark(body["spec"]) != kept:
                continue
            if each.spec.is_edge and behind and (known is None or changes_pods(known, body)):
                continue
            behind = behind or _is_behind(known, asked)
            if unknown and each.spec.like_uri and (known is None or changes_pods(known, body)):
                waiting = waiting or each.spec.replicas > 0
                continue  # nothing would hold its pods to the model
            if known is not None and changes_pods(known, body):
                if changing or on_probation(known):
                    continue
                changing = serves(known)
            if known is not None and not serves(known) and (changes_pods(known, body) or not has_followed(known)):
                body["spec"]["strategy"]["rollingUpdate"] = ALL_AT_ONCE
            await self._children.ensure(memory, DEPLOYMENT, body)
            changing = changing or each.spec.in_pool in holding
        if taken:  # keeps no other pool from being changed
            raise NameTakenError("; ".join(taken))
        if waiting:
            check_found_out(pools)

    def _goes_first(self, service: Service, live: dict[str, Object | None]) -> str | None:
        """The pool whose one worker finds out which bundle lies at the spec's URI, before any other may start: the
        first that has a place for it. None once that is known, and where no pool with that bundle has workers."""
        if not service.spec.may_move or service.proven_digest is not None:
            return None
        main = {each.spec.in_pool: each.spec.replicas for each in in_pools(service) if not each.spec.like_uri}
        running = [name for name, known in live.items() if name in main and replicas_of(known)]
        able = [*running, *(name for name, n in main.items() if n and name in live and name not in running)]
        placed = (name for name in able if (known := live[name]) is None or not self._lacks_place(known))
        return next(placed, able[0] if able else None)

    async def _live(self, memory: Memory, pools: Iterable[Service]) -> tuple[dict[str, Object | None], list[str]]:
        """The Deployment of each pool, and of which pools somebody else's has the name."""
        live, taken = dict[str, Object | None](), list[str]()
        for each in pools:
            found = await self._children.live(DEPLOYMENT, each.namespace, manifests.workers_name(each))
            try:
                if found is not None:
                    check_owner(found, memory.uid, DEPLOYMENT)
            except NameTakenError as error:
                taken.append(f"pool {each.spec.in_pool}: {error}, or the pool")
            else:
                live[each.spec.in_pool] = found
        return live, taken

    def _holds_up(self, memory: Memory, pool: Service, live: Object | None) -> bool:
        """Whether its pods are being changed, so that those of no other pool may be. Where new ones have found no place
        for as long as an update waits for room, nothing is on its way."""
        name, changing = pool.spec.in_pool, live is not None and serves(live) and not has_followed(live)
        if live is None or not changing or not self._lacks_place(live):
            memory.placeless_since.pop(name, None)
            return changing
        strategy, now = pool.status.update.strategy, self._monotonic()
        if memory.placeless_since.get(name, ("", now))[0] != strategy:  # which may make room
            memory.placeless_since.pop(name, None)
        since = memory.placeless_since.setdefault(name, (strategy, now))[1]
        return now - since < pool.spec.update_policy.surge_deadline_seconds

    def _lacks_place(self, live: Object) -> bool:
        """Whether no new pod is starting, as there is no place for the next one."""
        sets = self._cache.owned(REPLICA_SET, uid_of(live))
        by_owner = {uid_of(rs): self._cache.owned(POD, uid_of(rs)) for rs in sets}
        template = template_mark(msgspec.json.decode(content(live)))
        found = endpoints(live, sets, by_owner, template=template)
        waits = any(e.finds_no_place for e in found) and not any(e.ending for e in found)
        return waits and all(e.ready or e.finds_no_place for e in found if e.current)

    async def remove_others(self, memory: Memory, service: Service) -> None:
        """Workers of a pool that the spec does not name any more, or of the time before or after pools, go once the
        others can do without them."""
        if staying := must_stay(self._cache, service):
            for obj in staying:
                memory.leaving_since.pop(name_of(obj), None)
            return
        for obj in left_over(self._cache, service):
            if not self._routes.still_sends(memory, service, name_of(obj)):
                await self._children.remove(DEPLOYMENT, obj)


def _beside(service: Service, pool: Service) -> int:
    """Workers that may stand in for one of a pool: those at the edge get no requests of the core, nor it theirs."""
    at_edge = service.spec.edge_replicas
    return at_edge if pool.spec.is_edge else service.spec.replicas - at_edge


def _is_behind(live: Object | None, asked: str | None) -> bool:
    """Whether a pool of the core answers with other pods than the spec asks for, whatever keeps it from having
    those."""
    if live is None or not serves(live):
        return False
    return template_mark(msgspec.json.decode(content(live))) != asked or not has_followed(live)


def on_probation(live: Object) -> bool:
    """Whether a pod has become ready just now, for which seconds no other pods must be asked for.

    To Kubernetes such a pod is as unavailable as one that never starts: where an update that hangs gives way to the
    next one, it is taken away with the rest, although it may be all that serves. Source: ``cleanupUnhealthyReplicas``
    of the Deployment controller.
    """
    return count(live, "readyReplicas") > count(live, "availableReplicas")
