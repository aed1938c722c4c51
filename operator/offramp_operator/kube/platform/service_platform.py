"""A cluster as the platform of services: the rooms of this package, behind one seam."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from offramp_core.control.objects import ConfigStatus, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Event, Gathered, NewConfig, NewRollout, TrainingOrder, WorkerEndpoint
from offramp_core.control.workers.pace import Member, Standing
from offramp_core.control.workers.pools import with_numbers
from offramp_core.errors import InvalidSpecError
from offramp_core.protocol import PlanDocument, SignedDocument
from offramp_operator.kube import manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import CONFIG, ROLLOUT, SERVICE, Kind, Object, name_of, uid_of
from offramp_operator.kube.platform.children import Children, version_text
from offramp_operator.kube.platform.classes import Classes
from offramp_operator.kube.platform.events import EventPoster
from offramp_operator.kube.platform.fleet import FleetReader
from offramp_operator.kube.platform.gateway import GatewayRoutes
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.platform.memory import Memories, Memory
from offramp_operator.kube.platform.plan_store import PlanStore
from offramp_operator.kube.platform.shares import ClassShares
from offramp_operator.kube.platform.statuses import Statuses
from offramp_operator.kube.platform.templates import Templates
from offramp_operator.kube.platform.trainings import Trainings
from offramp_operator.kube.platform.workers import Workers
from offramp_operator.kube.turns import TurnKeeper
from offramp_operator.kube.watch import class_users, service_key
from offramp_operator.shell.manifests import config_from_manifest, rollout_from_manifest, service_from_manifest
from offramp_operator.shell.platform import ServiceKey, WorkerIdentity


class KubePlatform:
    """Implements :class:`offramp_operator.shell.platform.Platform` on a cluster.

    Parameters
    ----------
    client, cache
        The API server, and what the watches know of it; answers to writes go straight to the cache.
    workers : WorkerSettings
        What the administrator decided about workers.
    instance : str
        Name of this process in Events.
    shards : callable
        The shards that this process holds, and how many there are.
    clock, monotonic : callable
        Seconds since the epoch; seconds that never jump.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        *,
        workers: manifests.WorkerSettings,
        instance: str,
        shards: Callable[[], tuple[frozenset[int], int]] = lambda: (frozenset({0}), 1),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self._memories = Memories()
        self._changes: dict[ServiceKey, int] = {}
        self._turns = TurnKeeper(clock=clock, monotonic=monotonic)
        children = Children(client, cache)
        self._classes = Classes(cache)
        self._shares = ClassShares(cache, shards=shards)
        self._templates = Templates(cache, workers, self._turns)
        holds = Holds(client, cache, clock=clock)
        self._fleet = FleetReader(cache, self._templates, holds, monotonic=monotonic)
        self._routes = GatewayRoutes(cache, children, monotonic=monotonic)
        self._trainings = Trainings(client, cache, children, clock=clock)
        self._workers = Workers(
            cache,
            children,
            settings=workers,
            templates=self._templates,
            fleet=self._fleet,
            routes=self._routes,
            trainings=self._trainings,
            holds=holds,
            monotonic=monotonic,
        )
        self._statuses = Statuses(client, cache, children, self._memories, clock=clock)
        self._plans = PlanStore(client, cache, children)
        self._events = EventPoster(client, cache, instance=instance, clock=clock)
        self._children = children
        cache.subscribe(self._note)

    def _note(self, obj: Object) -> None:
        key = service_key(obj)
        for changed in (key,) if key is not None else class_users(obj, self.cache):
            self._changes[changed] = self._changes.get(changed, 0) + 1

    # --- reading -----------------------------------------------------------------------------------

    def changes(self, key: ServiceKey) -> int:
        """How many changes of objects that belong to a service have been seen."""
        return self._changes.get(key, 0)

    async def gather(self, key: ServiceKey) -> Gathered | None:
        """Read from the cache. A service that is being deleted counts as gone: nothing may be made for it any more."""
        obj = self.cache.get(SERVICE, key.namespace, key.name)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        memory = self._memories.of(key, uid_of(obj))
        memory.versions = {(SERVICE, key.name): version_text(obj)}
        self._turns.note(key, Member(counts=False))  # one that cannot be read must not keep the others waiting
        try:
            service = service_from_manifest(obj)
        except InvalidSpecError as error:
            await self._statuses.report_invalid_spec(obj, error)
            raise
        service = self._classes.applied(service, memory)
        shares = self._shares.of(service)
        if shares:
            service = with_numbers(service, shares)
            self._shares.ask(service, {pool.name: pool.replicas for pool in service.spec.pools})
        turn = self._templates.turn(key, service, memory)
        configs = self._owned(memory, CONFIG)
        rollouts = tuple(rollout_from_manifest(child) for child in self._owned(memory, ROLLOUT))
        return Gathered(
            service=service,
            configs={name_of(child): config_from_manifest(child) for child in configs},
            rollouts=rollouts,
            workers=self.endpoints(service, memory),
            published=self._plans.published(service),
            url=manifests.service_url(service),
            scaling=self._fleet.scaling(service, memory),
            can_train=service.spec.store_claim is not None,
            training=self._trainings.report(service, memory),
            route=self._routes.trouble(service, memory),
            template=self._templates.wanted(service, memory, trial=False) or "",
            worker_class=_class_in_use(service, memory),
            class_trouble=memory.class_trouble,
            shares=shares,
            turn=turn,
        )

    def endpoints(self, service: Service, memory: Memory) -> tuple[WorkerEndpoint, ...]:
        """The workers; where pods are simulated, a test has others."""
        return self._fleet.endpoints(service, memory)

    def _owned(self, memory: Memory, kind: Kind) -> list[Object]:
        found = [obj for obj in self.cache.owned(kind, memory.uid) if not obj["metadata"].get("deletionTimestamp")]
        memory.versions.update({(kind, name_of(obj)): version_text(obj) for obj in found})
        return found

    # --- whose turn it is to be changed by the administrator ---------------------------------------------

    def take_turns(self) -> frozenset[ServiceKey]:
        """See whose turn it is, and what each may have of the classes that others use too; returns the services that
        are to be woken for it."""
        woken = frozenset(self._shares.woken())
        if self._turns.standing("Waiting"):
            woken |= self._turns.woken(services=len(self.cache.names(SERVICE)))
        for key in woken:
            self._changes[key] = self._changes.get(key, 0) + 1
        return woken

    def standing(self, how: Standing) -> int:
        """How many services stand in one way with what the administrator asks for."""
        return self._turns.standing(how)

    # --- writing -----------------------------------------------------------------------------------

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        await self._workers.ensure(self._memories.of_service(service), service, identity)

    async def create_config(self, service: Service, config: NewConfig) -> None:
        await self._statuses.create_config(service, config)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        await self._statuses.create_rollout(service, rollout)

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None:
        await self._statuses.write(service, CONFIG, name, status)

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None:
        await self._statuses.write(service, ROLLOUT, name, status)

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None:
        self._shares.ask(service, {pool.name: pool.desired for pool in status.pools})
        url = status.url or manifests.service_url(service)
        await self._statuses.write(service, SERVICE, service.name, replace(status, url=url))

    async def delete_config(self, service: Service, name: str) -> None:
        await self._children.delete(service, CONFIG, name)

    async def delete_rollout(self, service: Service, name: str) -> None:
        await self._children.delete(service, ROLLOUT, name)

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        await self._plans.publish(service, document, signed, previous_epoch=previous_epoch)

    async def train(self, service: Service, order: TrainingOrder) -> None:
        memory = self._memories.of_service(service)
        await self._trainings.begin(service, memory, order, self._templates.settings(memory))

    async def emit(self, service: Service, event: Event) -> None:
        await self._events.emit(service, event)

    def _forget(self, key: ServiceKey) -> None:
        self._memories.forget(key)
        self._turns.forget(key)
        self._changes.pop(key, None)


def _class_in_use(service: Service, memory: Memory) -> str:
    """The class that workers are made of; while the one that the spec names cannot be used, the last one."""
    return service.status.workers.class_name if memory.class_trouble is not None else service.spec.class_name
