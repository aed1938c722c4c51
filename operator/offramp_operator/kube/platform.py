"""The Kubernetes platform: reads from the cache, writes by server-side apply, and only where something differs."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from offramp_core.control.objects import Condition, ConfigStatus, Rollout, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Event, NewConfig, NewRollout
from offramp_core.errors import InvalidSpecError, OfframpError
from offramp_core.protocol import PlanDocument, SignedDocument
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, GoneError, InvalidObjectError, KubeClient
from offramp_operator.kube.kinds import (
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    FIELD_MANAGER,
    GROUP_VERSION,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    SERVICE_LABEL,
    Kind,
    Object,
    name_of,
    namespace_of,
    owner_of,
    uid_of,
)
from offramp_operator.shell.log import log_event
from offramp_operator.shell.manifests import (
    config_from_manifest,
    rollout_from_manifest,
    rollout_spec,
    same_status,
    service_from_manifest,
    status_from_manifest,
    status_json,
)
from offramp_operator.shell.platform import ConflictError, Gathered, ServiceKey, WorkerEndpoint, WorkerIdentity

REFUSED_RETRY_SECONDS = 30.0
EVENT_MESSAGE_LIMIT = 1024


class NameTakenError(OfframpError):
    """An object of the name that a child needs exists and belongs to somebody else."""


class RolloutObserver(Protocol):
    """Told what people want to see of rollouts and workers; :class:`offramp_operator.metrics.Metrics` is one."""

    def rollouts_seen(self, key: ServiceKey, rollouts: tuple[Rollout, ...]) -> None: ...

    def quarantined_seen(self, key: ServiceKey, workers: int) -> None: ...

    def rollout_finished(self, key: ServiceKey, verdict: str) -> None: ...

    def service_gone(self, key: ServiceKey) -> None: ...


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was last applied to a child, and what the API server made of it."""

    desired: str
    live: str


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why the workers cannot be brought to a generation."""

    generation: int
    reason: str
    message: str
    retry_at: float


@dataclass(slots=True)
class _Memory:
    """What is remembered of one service between passes. All of it can be lost: then everything is applied once more.

    ``versions`` are the resource versions that the present pass decided on; its writes go through only on those.
    """

    uid: str
    applied: dict[str, _Applied] = field(default_factory=dict)
    problem: _Problem | None = None
    versions: dict[tuple[Kind, str], str] = field(default_factory=dict)


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
    observer : RolloutObserver
        Told about rollouts.
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
        observer: RolloutObserver,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._cache = cache
        self._workers = workers
        self._instance = instance
        self._observer = observer
        self._clock = clock
        self._monotonic = monotonic
        self._memories: dict[ServiceKey, _Memory] = {}

    # --- reading -----------------------------------------------------------------------------------

    async def gather(self, key: ServiceKey) -> Gathered | None:
        """Read from the cache. A service that is being deleted counts as gone: nothing may be made for it any more."""
        obj = self._cache.get(SERVICE, key.namespace, key.name)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        memory = self._memory(key, uid_of(obj))
        memory.versions = {(SERVICE, key.name): _version(obj)}
        try:
            service = service_from_manifest(obj)
        except InvalidSpecError as error:
            await self._report_invalid_spec(obj, error)
            raise
        configs = self._children(memory, CONFIG)
        rollouts = tuple(rollout_from_manifest(child) for child in self._children(memory, ROLLOUT))
        self._observer.rollouts_seen(key, rollouts)
        self._observer.quarantined_seen(key, len(service.status.workers.quarantined))
        return Gathered(
            service=service,
            configs={name_of(child): config_from_manifest(child) for child in configs},
            rollouts=rollouts,
            workers=self._endpoints(service, memory),
            published=_document(self._plan(service)),
            url=manifests.service_url(service),
        )

    def _children(self, memory: _Memory, kind: Kind) -> list[Object]:
        found = [obj for obj in self._cache.owned(kind, memory.uid) if not obj["metadata"].get("deletionTimestamp")]
        memory.versions.update({(kind, name_of(obj)): _version(obj) for obj in found})
        return found

    def _plan(self, service: Service) -> Object | None:
        obj = self._cache.get(CONFIG_MAP, service.namespace, manifests.plan_name(service.name))
        return obj if obj is not None and pods.controls(service.uid, obj) else None

    def _endpoints(self, service: Service, memory: _Memory) -> tuple[WorkerEndpoint, ...]:
        found: tuple[WorkerEndpoint, ...] = ()
        for deployment in self._cache.owned(DEPLOYMENT, service.uid):
            replica_sets = self._cache.owned(REPLICA_SET, uid_of(deployment))
            by_owner = {uid_of(rs): self._cache.owned(POD, uid_of(rs)) for rs in replica_sets}
            found += pods.endpoints(deployment, replica_sets, by_owner, template=self._template(service))
        problem = self._problem(service, memory)
        return found if problem is None else (*found, problem)

    def _template(self, service: Service) -> str | None:
        try:
            return manifests.template_digest(service, self._workers)
        except InvalidSpecError:
            return None

    def _problem(self, service: Service, memory: _Memory) -> WorkerEndpoint | None:
        """What keeps workers from being made at all, as a worker that does not come."""
        try:
            manifests.bundle_image(service)
        except InvalidSpecError as error:
            return _failed_endpoint(service, "InvalidModel", str(error))
        problem = memory.problem
        if problem is None or problem.generation != service.generation:
            return None
        return _failed_endpoint(service, problem.reason, problem.message)

    async def _report_invalid_spec(self, obj: Object, error: InvalidSpecError) -> None:
        """Say in the status what the API server let pass; what serves keeps serving."""
        before = status_from_manifest(ServiceStatus, obj)
        status = invalid_spec_status(before, error, generation=int(obj["metadata"]["generation"]), now=self._clock())
        await self._write_status(ServiceKey(namespace_of(obj), name_of(obj)), SERVICE, name_of(obj), status)

    # --- workers -----------------------------------------------------------------------------------

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        """Apply Deployment, Service and PodDisruptionBudget where they differ from the spec.

        A spec that cannot be carried out is no error here: :meth:`gather` reports it as a worker that cannot run,
        and the workers of the last good spec stay.
        """
        key = ServiceKey(service.namespace, service.name)
        memory = self._memory(key, service.uid)
        problem = memory.problem
        if problem is not None and problem.generation == service.generation and self._monotonic() < problem.retry_at:
            return
        try:
            await self._ensure(memory, NETWORK_SERVICE, manifests.network_service(service))
            await self._ensure(memory, DISRUPTION_BUDGET, manifests.disruption_budget(service))
            await self._ensure(memory, DEPLOYMENT, manifests.deployment(service, identity, self._workers))
        except InvalidSpecError as error:
            self._remember(key, service, "InvalidModel", str(error))
        except NameTakenError as error:
            self._remember(key, service, "NameTaken", str(error))
        except InvalidObjectError as error:
            self._remember(key, service, "InvalidSpec", error.message)
        except ApiError as error:
            self._remember(key, service, error.reason or "Refused", error.message)
        else:
            memory.problem = None

    async def _ensure(self, memory: _Memory, kind: Kind, desired: Object) -> None:
        namespace, name = namespace_of(desired), name_of(desired)
        live = self._cache.get(kind, namespace, name)
        if live is None:
            # The cache has only what carries our label; a foreign object of that name must not be taken over.
            live = await self._client.get(kind, namespace, name)
        if live is None:
            written = await self._client.apply(kind, desired, force=False)
        else:
            _check_owner(live, memory.uid, kind)
            known = memory.applied.get(uid_of(live))
            if known == _Applied(_digest(desired), fingerprint(live)):
                return
            pinned = desired | {"metadata": desired["metadata"] | {"uid": uid_of(live)}}
            written = await self._client.apply(kind, pinned)
        self._cache.put(kind, written)
        memory.applied[uid_of(written)] = _Applied(_digest(desired), fingerprint(written))

    def _remember(self, key: ServiceKey, service: Service, reason: str, message: str) -> None:
        memory = self._memory(key, service.uid)
        if memory.problem is None or memory.problem.message != message:
            log_event("workers-refused", f"{key}: {message}", level=logging.WARNING, service=str(key), reason=reason)
        memory.problem = _Problem(service.generation, reason, message, self._monotonic() + REFUSED_RETRY_SECONDS)

    # --- configs, rollouts, statuses ---------------------------------------------------------------

    async def create_config(self, service: Service, config: NewConfig) -> None:
        """Create a RampConfig and say what is known of it; one that exists is the same plan and is left alone."""
        existing = self._cache.get(CONFIG, service.namespace, config.name)
        if existing is None or not pods.controls(service.uid, existing):
            await self._create(service, CONFIG, config.name, config.plan.to_mapping())
        elif not same_status(existing, ConfigStatus()):
            return
        await self.write_config_status(service, config.name, config.status)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        spec = rollout_spec(service.name, rollout)
        await self._create(service, ROLLOUT, rollout.name, spec)

    async def _create(self, service: Service, kind: Kind, name: str, spec: Mapping[str, object]) -> None:
        body = {
            "apiVersion": GROUP_VERSION,
            "kind": kind.name,
            "metadata": manifests.metadata(service, name)
            | {"labels": {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: service.name}},
            "spec": dict(spec),
        }
        # Never an apply: it would take over what an earlier service of that name left behind, with its status.
        try:
            written = await self._client.create(kind, body)
        except ConflictError:
            live = await self._client.get(kind, service.namespace, name)
            if live is not None and pods.controls(service.uid, live):
                self._cache.put(kind, live)  # made by a pass that this one has not seen: decide again on it
            raise
        self._cache.put(kind, written)
        key = ServiceKey(service.namespace, service.name)
        self._memory(key, service.uid).versions[kind, name] = _version(written)

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None:
        await self._write_status(ServiceKey(service.namespace, service.name), CONFIG, name, status)

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None:
        key = ServiceKey(service.namespace, service.name)
        before = self._cache.get(ROLLOUT, service.namespace, name)
        was_finished = before is not None and status_from_manifest(RolloutStatus, before).finished
        await self._write_status(key, ROLLOUT, name, status)
        if status.finished and not was_finished:
            self._observer.rollout_finished(key, status.verdict or status.phase)

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None:
        url = status.url or manifests.service_url(service)
        await self._write_status(
            ServiceKey(service.namespace, service.name), SERVICE, service.name, replace(status, url=url)
        )

    async def _write_status(
        self, key: ServiceKey, kind: Kind, name: str, status: ServiceStatus | ConfigStatus | RolloutStatus
    ) -> None:
        """Apply a status on exactly the version that was decided on: an old leader, or a pass on stale reads, gets a conflict."""
        live = self._cache.get(kind, key.namespace, name)
        if live is None:
            raise ConflictError(f"{kind.name} {key.namespace}/{name} is gone")
        if same_status(live, status):
            return
        memory = self._memory(key, uid_of(live) if kind is SERVICE else None)
        version = memory.versions.get((kind, name), _version(live))
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": key.namespace, "uid": uid_of(live), "resourceVersion": version},
            "status": status_json(status),
        }
        written = await self._swap(kind, body, subresource="status")
        memory.versions[kind, name] = _version(written)

    async def _swap(self, kind: Kind, body: Object, *, subresource: str | None = None) -> Object:
        """Apply on exactly the version in the body. After a conflict the cache has what is there, so the next pass need not wait for the watch."""
        try:
            written = await self._client.apply(kind, body, subresource=subresource)
        except GoneError as error:
            raise ConflictError(str(error)) from error
        except ConflictError:
            live = await self._client.get(kind, namespace_of(body), name_of(body))
            if live is not None:
                self._cache.put(kind, live)
            raise
        self._cache.put(kind, written)
        return written

    async def delete_config(self, service: Service, name: str) -> None:
        await self._delete(service, CONFIG, name)

    async def delete_rollout(self, service: Service, name: str) -> None:
        await self._delete(service, ROLLOUT, name)

    async def _delete(self, service: Service, kind: Kind, name: str) -> None:
        obj = self._cache.get(kind, service.namespace, name)
        if obj is None or not pods.controls(service.uid, obj):
            return
        await self._client.delete(kind, obj)
        self._cache.remove(kind, uid_of(obj))

    # --- plan and events ---------------------------------------------------------------------------

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        """Store the document only on the ConfigMap that holds ``previous_epoch`` (0: none is stored).

        Raises
        ------
        NameTakenError
            The ConfigMap's name belongs to somebody else.
        """
        stored = self._plan(service)
        if stored is None:
            await self._look_for_hidden_plan(service)
        published = _document(stored)
        epoch = published.epoch if published is not None else 0
        if epoch != previous_epoch:
            raise ConflictError(f"epoch {epoch} is published, not {previous_epoch}")
        text = msgspec.json.encode(signed).decode()
        body = manifests.plan_config_map(service, document=text, epoch=document.epoch)
        if stored is None:
            written = await self._client.create(CONFIG_MAP, body)
        else:
            body["metadata"] |= {"uid": uid_of(stored), "resourceVersion": _version(stored)}
            await self._swap(CONFIG_MAP, body)
            return
        self._cache.put(CONFIG_MAP, written)

    async def _look_for_hidden_plan(self, service: Service) -> None:
        """Watches see only what carries our label: before a plan is created, make sure that none hides from them."""
        live = await self._client.get(CONFIG_MAP, service.namespace, manifests.plan_name(service.name))
        if live is None:
            return
        _check_owner(live, service.uid, CONFIG_MAP)
        body = manifests.plan_config_map(service, document="", epoch=0) | {"data": live.get("data") or {}}
        body["metadata"] |= {"uid": uid_of(live), "resourceVersion": _version(live)}
        self._cache.put(CONFIG_MAP, await self._client.apply(CONFIG_MAP, body))
        raise ConflictError(f"ConfigMap {service.namespace}/{name_of(live)} had lost its labels")

    async def emit(self, service: Service, event: Event) -> None:
        """Post an Event. Events are for people; one that is lost is told in the log and changes nothing."""
        now = self._clock()
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{service.name}.{int(now * 1e6):x}.{event.reason.lower()}", "namespace": service.namespace},
            "involvedObject": {
                "apiVersion": GROUP_VERSION, "kind": SERVICE.name, "name": service.name, "namespace": service.namespace, "uid": service.uid,
            },
            "reason": event.reason,
            "message": event.message[:EVENT_MESSAGE_LIMIT],
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }  # fmt: skip
        try:
            await self._client.create(EVENT, body)
        except (OfframpError, ConflictError) as error:
            message = f"{service.namespace}/{service.name}: Event {event.reason} was not posted: {error}"
            log_event("event-lost", message, level=logging.WARNING)

    # --- memory ------------------------------------------------------------------------------------

    def _memory(self, key: ServiceKey, uid: str | None = None) -> _Memory:
        """The service's memory; a service of the same name but another uid starts anew."""
        memory = self._memories.get(key)
        if memory is None or (uid is not None and memory.uid != uid):
            memory = self._memories[key] = _Memory(uid or "")
        return memory

    def _forget(self, key: ServiceKey) -> None:
        self._memories.pop(key, None)
        self._observer.service_gone(key)


def fingerprint(obj: Object) -> str:
    """What somebody could change of a child that must be changed back: everything but bookkeeping and status."""
    meta = obj["metadata"]
    kept = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind", "metadata", "status")}
    return _digest(kept | {"labels": meta.get("labels"), "ownerReferences": meta.get("ownerReferences")})


def invalid_spec_status(
    before: ServiceStatus, error: InvalidSpecError, *, generation: int, now: float
) -> ServiceStatus:
    """The status that tells of a spec that cannot be parsed; everything about plans and tuning stays as it was."""
    told = {c.type: c for c in before.conditions if c.type not in ("Reconciling", "Stalled")}
    was_stalled = next((c for c in before.conditions if c.type == "Stalled"), None)
    told.setdefault("Ready", Condition("Ready", "False", "InvalidSpec", str(error), generation, now))
    since = was_stalled.last_transition_at if was_stalled is not None else now
    told["Stalled"] = Condition("Stalled", "True", "InvalidSpec", str(error), generation, since)
    conditions = tuple(replace(c, observed_generation=generation) for c in told.values())
    return replace(before, observed_generation=generation, phase="Stalled", message=str(error), conditions=conditions)


def _failed_endpoint(service: Service, reason: str, message: str) -> WorkerEndpoint:
    return WorkerEndpoint(
        f"deployment {service.name}", service.uid, ready=False, current=False, failure=message, failure_reason=reason
    )


def _check_owner(live: Object, uid: str, kind: Kind) -> None:
    if pods.controls(uid, live):
        return
    name = f"{kind.name} {namespace_of(live)}/{name_of(live)}"
    owner = owner_of(live)
    if owner is not None and owner["kind"] == SERVICE.name:
        raise ConflictError(f"{name} belongs to an earlier service of that name and is about to be collected")
    raise NameTakenError(
        f"{name} exists and does not belong to this service; delete it or give the service another name"
    )


def _document(config_map: Object | None) -> PlanDocument | None:
    """The document a ConfigMap carries; None where it carries none that can be read, so that it is published anew."""
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(manifests.PLAN_KEY, "")
    try:
        signed = msgspec.json.decode(text, type=SignedDocument)
        return msgspec.json.decode(signed.payload, type=PlanDocument)
    except msgspec.MsgspecError as error:
        log_event(
            "plan-unreadable",
            f"ConfigMap {namespace_of(config_map)}/{name_of(config_map)}: {error}",
            level=logging.WARNING,
        )
        return None


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
