"""Objects of our own kinds: RampConfigs and RampRollouts are made, and statuses written on exactly what a pass has
decided on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from offramp_core.control.objects import Condition, ConfigStatus, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import NewConfig, NewRollout
from offramp_core.errors import InvalidSpecError
from offramp_core.reasons import ConditionType, Reason
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient, Lane
from offramp_operator.kube.kinds import (
    CONFIG,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLLOUT,
    SERVICE,
    SERVICE_LABEL,
    Kind,
    Object,
    made,
    name_of,
    namespace_of,
    uid_of,
)
from offramp_operator.kube.platform.children import Children, version_text
from offramp_operator.kube.platform.memory import Memories, key_of
from offramp_operator.shell.manifests import (
    OBJECT_LIMIT_BYTES,
    bounded,
    rollout_spec,
    same_status,
    status_from_manifest,
    status_json,
)
from offramp_operator.shell.platform import ConflictError, ServiceKey

S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus)


class Statuses:
    """Makes configs and rollouts, and writes statuses."""

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        children: Children,
        memories: Memories,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._cache = cache
        self._children = children
        self._memories = memories
        self._clock = clock

    async def create_config(self, service: Service, config: NewConfig) -> None:
        """Create a RampConfig and say what is known of it; one that exists is the same plan and is left alone."""
        existing = self._cache.get(CONFIG, service.namespace, config.name)
        if existing is None or not pods.controls(service.uid, existing):
            await self.create(service, CONFIG, config.name, config.plan.to_mapping())
        elif not same_status(existing, ConfigStatus()):
            return
        await self.write(service, CONFIG, config.name, config.status)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        await self.create(service, ROLLOUT, rollout.name, rollout_spec(service.name, rollout))

    async def create(self, service: Service, kind: Kind, name: str, spec: Mapping[str, object]) -> None:
        marks = {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: service.name}
        body = manifests.child(kind, service, name, marks=marks, spec=dict(spec))
        # Never an apply: it would take over what an earlier service of that name left behind, with its status.
        try:
            written = await self._client.create(kind, body, lane=Lane.STATUSES)
        except ConflictError:
            live = await self._client.get(kind, service.namespace, name, lane=Lane.STATUSES)
            if live is not None and pods.controls(service.uid, live):
                self._cache.put(kind, live)  # made by a pass that this one has not seen: decide again on it
            raise
        self._cache.put(kind, written)
        self._memories.of_service(service).versions[kind, name] = version_text(written)

    async def write(self, service: Service, kind: Kind, name: str, status: S) -> None:
        """Write the status of an object of the service, or its own."""
        await self._write(key_of(service), service.uid, kind, name, status)

    async def report_invalid_spec(self, obj: Object, error: InvalidSpecError) -> None:
        """Say in the status what the API server let pass; what serves keeps serving."""
        before = status_from_manifest(ServiceStatus, obj)
        status = invalid_spec_status(before, error, generation=int(obj["metadata"]["generation"]), now=self._clock())
        key = ServiceKey(namespace_of(obj), name_of(obj))
        await self._write(key, uid_of(obj), SERVICE, key.name, status)

    async def _write(self, key: ServiceKey, uid: str, kind: Kind, name: str, status: S) -> None:
        """Apply a status on exactly the version that was decided on: an old leader, or a pass on stale reads, gets a
        conflict.

        So does a pass over a service that was deleted meanwhile: another one of its name must not inherit what was
        decided for it.
        """
        live = self._cache.get(kind, key.namespace, name)
        if live is None or not (uid_of(live) == uid if kind is SERVICE else pods.controls(uid, live)):
            raise ConflictError(f"{kind.name} {key.namespace}/{name} is gone")
        status = bounded(status, limit_bytes=OBJECT_LIMIT_BYTES - _bytes_beside_status(live))
        if same_status(live, status):
            return
        memory = self._memories.of(key, uid)
        version = memory.versions.get((kind, name), version_text(live))
        about = {"name": name, "namespace": key.namespace, "uid": uid_of(live), "resourceVersion": version}
        body = made(kind, metadata=about, status=status_json(status))
        written = await self._children.swap(kind, body, subresource="status", lane=Lane.STATUSES)
        memory.versions[kind, name] = version_text(written)


def invalid_spec_status(
    before: ServiceStatus, error: InvalidSpecError, *, generation: int, now: float
) -> ServiceStatus:
    """The status for a spec that cannot be parsed; everything about plans and tuning stays as it was."""
    known: dict[str, Condition] = {
        c.type: c for c in before.conditions if c.type not in (ConditionType.RECONCILING, ConditionType.STALLED)
    }
    was_stalled = next((c for c in before.conditions if c.type == ConditionType.STALLED), None)
    known.setdefault(
        ConditionType.READY, Condition(ConditionType.READY, "False", Reason.INVALID_SPEC, str(error), generation, now)
    )
    since = was_stalled.last_transition_at if was_stalled is not None else now
    known[ConditionType.STALLED] = Condition(
        ConditionType.STALLED, "True", Reason.INVALID_SPEC, str(error), generation, since
    )
    conditions = tuple(replace(c, observed_generation=generation) for c in known.values())
    return replace(before, observed_generation=generation, phase="Stalled", message=str(error), conditions=conditions)


def _bytes_beside_status(live: Object) -> int:
    """What the rest of an object takes, about: tools may keep a second copy of its spec in an annotation."""
    return len(msgspec.json.encode((live["metadata"], live.get("spec"), live.get("spec"))))
