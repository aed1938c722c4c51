"""The workers of a service as the cluster has them: pods, who scales them, and what keeps them from being made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Scaling, WorkerEndpoint
from offramp_core.control.workers.versions import Split, split_in_force
from offramp_core.errors import InvalidSpecError
from offramp_core.reasons import AnyReason, Reason
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import DEPLOYMENT, POD, REPLICA_SET, Object, name_of, uid_of
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.platform.templates import Templates
from offramp_operator.kube.pools import in_pools, in_words_of
from offramp_operator.kube.scaling import Scalers, scalers, scaling
from offramp_operator.kube.shared.holders import holders

SCALER_GONE_SECONDS = 60.0  # a user's autoscaler that is replaced must not cost workers in between


class FleetReader:
    """Reads from the cache; writes nothing."""

    def __init__(
        self, cache: ObjectCache, templates: Templates, holds: Holds, *, monotonic: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._templates = templates
        self._holds = holds
        self._monotonic = monotonic

    def endpoints(self, service: Service, memory: Memory) -> tuple[WorkerEndpoint, ...]:
        """Every worker, those on trial included, and one more that stands for what keeps workers from being made."""
        if service.spec.shared_pool:
            return holders(self._cache, service)
        found: tuple[WorkerEndpoint, ...] = ()
        made = {manifests.workers_name(each): each for each in in_pools(service)}
        for deployment in self._cache.owned(DEPLOYMENT, service.uid):
            trial = name_of(deployment) == manifests.trial_name(service.name)
            of = service if trial else made.get(name_of(deployment))
            template = None if of is None else self._templates.wanted(of, memory, trial=trial)
            at_edge = manifests.is_of_edges(name_of(deployment))
            seen = tuple(replace(e, at_edge=at_edge) for e in self._of(deployment, template))
            if of is not None and (rejected := self._rejected(service, of, deployment, memory)) is not None:
                seen = (*seen, rejected)
            found += tuple(replace(endpoint, trial=True) for endpoint in seen) if trial else _of_pool(service, of, seen)
        problem = _problem(service, memory)
        return found if problem is None else (*found, problem)

    def _of(self, deployment: Object, template: str | None) -> tuple[WorkerEndpoint, ...]:
        replica_sets = self._cache.owned(REPLICA_SET, uid_of(deployment))
        by_owner = {uid_of(rs): self._cache.owned(POD, uid_of(rs)) for rs in replica_sets}
        return pods.endpoints(deployment, replica_sets, by_owner, template=template)

    def _rejected(self, service: Service, of: Service, deployment: Object, memory: Memory) -> WorkerEndpoint | None:
        """What stands for pods that nodes rejected. ``of`` is what the Deployment is made of."""
        trial = name_of(deployment) == manifests.trial_name(service.name)
        template = self._templates.wanted(of, memory, trial=trial)
        decides, _, split = self.split(service, memory)
        wanted = split.n_trial if trial else of.spec.replicas if service.spec.pools else split.n_main
        holds = trial or bool(service.spec.pools) or decides is None
        return self._holds.endpoint(deployment, template, wanted=wanted, holds=holds)

    def scalers(self, service: Service) -> Scalers:
        return scalers(service, self._cache.autoscalers(service.namespace, service.name))

    def scaling(self, service: Service, memory: Memory) -> Scaling | None:
        """What decides on the number of workers. A user's autoscaler that has just gone may be on its way back."""
        found = self.scalers(service)
        owned = self._cache.owned(DEPLOYMENT, service.uid)
        decides = scaling(service, found, next((obj for obj in owned if name_of(obj) == service.name), None))
        if found.others:
            memory.scaler, memory.scaler_seen_at = decides, self._monotonic()
        elif decides is None and memory.scaler is not None:
            if self._monotonic() - memory.scaler_seen_at < SCALER_GONE_SECONDS:
                return memory.scaler
            memory.scaler = None
        return decides

    def split(self, service: Service, memory: Memory) -> tuple[Scaling | None, int, Split]:
        """What decides on the number of workers, how many it wants, and how they are shared between two versions."""
        decides = self.scaling(service, memory)
        desired = service.spec.replicas if decides is None else decides.desired
        return decides, desired, split_in_force(service, desired, scaled=decides is not None)


def _of_pool(service: Service, of: Service | None, seen: tuple[WorkerEndpoint, ...]) -> tuple[WorkerEndpoint, ...]:
    """The workers of a Deployment, with the pool that they are in."""
    names = [pool.name for pool in service.spec.pools]
    if of is None or of.spec.in_pool not in names:
        return seen
    pool, index = of.spec.in_pool, names.index(of.spec.in_pool)
    return tuple(
        replace(
            e,
            pool=pool,
            pool_field=f"spec.pools[{index}]",
            failure=in_words_of(e.failure, index, own_bundle=e.own_bundle),
        )
        for e in seen
    )


def _problem(service: Service, memory: Memory) -> WorkerEndpoint | None:
    """What keeps workers from being made at all, as a worker that does not come."""
    try:
        manifests.check_bundle(service)
    except InvalidSpecError as error:
        return _failed_endpoint(service, Reason.INVALID_MODEL, str(error))
    if (trouble := memory.class_trouble) is not None:
        return _failed_endpoint(service, trouble.reason, trouble.message)
    problem = memory.problem
    if problem is None or problem.generation != service.generation:
        return None
    return _failed_endpoint(service, problem.reason, problem.message)


def _failed_endpoint(service: Service, reason: AnyReason, message: str) -> WorkerEndpoint:
    return WorkerEndpoint(
        f"deployment {service.name}", service.uid, ready=False, current=False, failure=message, failure_reason=reason
    )
