"""Writes to the objects of a service: each on exactly what was seen, and only where something differs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from offramp_core.control.objects import Service
from offramp_core.errors import OfframpError
from offramp_operator.kube import pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import GoneError, KubeClient, Lane
from offramp_operator.kube.fields import adopted
from offramp_operator.kube.kinds import (
    APPLIED_ANNOTATION,
    CONFIG,
    DEPLOYMENT,
    FIELD_MANAGER,
    HANDOVER_MANAGER,
    ROLLOUT,
    SERVICE,
    Kind,
    Object,
    made,
    name_of,
    namespace_of,
    owner_of,
    uid_of,
)
from offramp_operator.kube.platform.memory import Applied, Memory
from offramp_operator.kube.scaling import holds_replicas_alone
from offramp_operator.kube.trim import content, trim
from offramp_operator.shell.platform import ConflictError


class NameTakenError(OfframpError):
    """An object of the name that a child needs exists and belongs to somebody else."""


class Children:
    """Reads and writes objects of any kind; what the API server answers goes straight to the cache."""

    def __init__(self, client: KubeClient, cache: ObjectCache) -> None:
        self._client = client
        self._cache = cache

    async def live(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The cache has only what carries our label; a foreign object of that name must not be taken over."""
        live = self._cache.get(kind, namespace, name)
        return live if live is not None else await self._client.get(kind, namespace, name)

    async def ensure(self, memory: Memory, kind: Kind, desired: Object, *, hands_over: int | None = None) -> None:
        """Apply an object where it differs. ``hands_over`` is the number of workers with which an autoscaler begins."""
        digest = _digest(desired)
        notes = (desired["metadata"].get("annotations") or {}) | {APPLIED_ANNOTATION: digest}
        marked = desired | {"metadata": desired["metadata"] | {"annotations": notes}}
        live = await self.live(kind, namespace_of(desired), name_of(desired))
        if live is None:
            # Never an apply: one that was held up would change what a newer leader has made meanwhile.
            written = await self._client.create(kind, marked)
        else:
            live = trim(kind, live)
            check_owner(live, memory.uid, kind)
            known, seen = memory.applied.get(uid_of(live)), Applied(digest, fingerprint(live, desired))
            if known == seen or (known is None and _stands(live, desired, digest)):
                memory.applied[uid_of(live)] = seen
                return
            written = await self._change(kind, marked, live, hands_over=hands_over)
        self._cache.put(kind, written)
        memory.applied[uid_of(written)] = Applied(digest, fingerprint(trim(kind, written), desired))

    async def create_or_change(self, kind: Kind, desired: Object, live: Object | None) -> None:
        """Write an object that is known to differ from what was seen."""
        if live is None:
            written = await self._client.create(kind, desired)
        else:
            written = await self._change(kind, desired, live)
        self._cache.put(kind, written)

    async def swap(self, kind: Kind, body: Object, *, lane: Lane, subresource: str | None = None) -> Object:
        """Apply on exactly the version in the body: what was decided on an older one is decided again."""
        async with self._as_seen(kind, body, lane=lane):
            written = await self._client.apply(kind, body, subresource=subresource, lane=lane)
        self._cache.put(kind, written)
        return written

    async def delete(self, service: Service, kind: Kind, name: str) -> None:
        """Remove an object of the service, if there is one."""
        obj = self._cache.get(kind, service.namespace, name)
        if obj is None or not pods.controls(service.uid, obj):
            return
        await self.remove(kind, obj)

    async def remove(self, kind: Kind, obj: Object) -> None:
        lane = Lane.STATUSES if kind in (CONFIG, ROLLOUT) else Lane.BULK
        async with self._as_seen(kind, obj, lane=lane):
            await self._client.delete(kind, obj, lane=lane)
        self._cache.remove(kind, uid_of(obj))

    async def _change(self, kind: Kind, body: Object, seen: Object, *, hands_over: int | None = None) -> Object:
        """Apply to a child as it was seen, and to nothing that somebody has made of it since."""
        async with self._as_seen(kind, seen):
            live = await self._client.get(kind, namespace_of(seen), name_of(seen))
            if live is None or version_text(live) != version_text(seen):
                raise ConflictError(f"{kind.name} {namespace_of(seen)}/{name_of(seen)} has changed")
            live = await self._adopt(kind, live)
            if hands_over is not None and holds_replicas_alone(live):
                live = await self._hand_over(live, hands_over)
            return await self._client.apply(kind, on_version_of(live, body))

    async def _adopt(self, kind: Kind, live: Object) -> Object:
        """Own by apply what was made by a create: fields of another operation would stay when they are asked for no
        more.

        Source: "Upgrading from client-side apply" in the Kubernetes documentation of server-side apply, and client-go's
        csaupgrade.
        """
        entries = adopted(live["metadata"].get("managedFields") or ())
        if entries is None:
            return live
        patch = {"metadata": {"uid": uid_of(live), "resourceVersion": version_text(live), "managedFields": entries}}
        return await self._client.merge(kind, namespace_of(live), name_of(live), patch, manager=FIELD_MANAGER)

    async def _hand_over(self, live: Object, replicas: int) -> Object:
        """Let another manager hold the number of workers until an autoscaler takes it.

        What nobody but the operator holds would vanish with its next apply, and the default is one worker. Source:
        "Transferring ownership" in the Kubernetes documentation of server-side apply.
        """
        about = {"name": name_of(live), "namespace": namespace_of(live)}
        body = made(DEPLOYMENT, metadata=about, spec={"replicas": replicas})
        return await self._client.apply(DEPLOYMENT, on_version_of(live, body), manager=HANDOVER_MANAGER)

    @asynccontextmanager
    async def _as_seen(self, kind: Kind, obj: Object, *, lane: Lane = Lane.BULK) -> AsyncIterator[None]:
        """Around a write that goes through on what was seen alone. After a conflict the cache has what is there, so the
        next pass need not wait for the watch."""
        try:
            yield
        except GoneError as error:
            raise ConflictError(str(error)) from error
        except ConflictError:
            live = await self._client.get(kind, namespace_of(obj), name_of(obj), lane=lane)
            if live is not None:
                self._cache.put(kind, live)
            raise


def check_owner(live: Object, uid: str, kind: Kind) -> None:
    """Raises where an object belongs to somebody else than the service with this uid."""
    if pods.controls(uid, live):
        return
    name = f"{kind.name} {namespace_of(live)}/{name_of(live)}"
    owner = owner_of(live)
    if owner is not None and owner["kind"] == SERVICE.name:
        raise ConflictError(f"{name} belongs to an earlier service of that name and is about to be collected")
    raise NameTakenError(
        f"{name} exists and does not belong to this service; delete it or give the service another name"
    )


def fingerprint(obj: Object, desired: Object) -> str:
    """What somebody could change of a child that must be changed back: everything but bookkeeping, status and what an
    autoscaler decides."""
    meta, kept = obj["metadata"], content(obj)
    if "replicas" not in desired["spec"]:
        spec = msgspec.json.decode(kept)
        kept = msgspec.json.encode({name: value for name, value in spec.items() if name != "replicas"})
    about = msgspec.json.encode((meta.get("labels"), meta.get("ownerReferences")), order="sorted")
    return hashlib.sha256(kept + about).hexdigest()


def on_version_of(live: Object, body: Object) -> Object:
    """A body that is applied only to exactly what was seen: an older leader's write that was held up meets what a newer
    one has made of it."""
    return body | {"metadata": body["metadata"] | {"uid": uid_of(live), "resourceVersion": version_text(live)}}


def version_text(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])


def _stands(live: Object, desired: Object, digest: str) -> bool:
    """Whether a child that an earlier process applied is still as it was, so that a restarted operator need not apply
    everything again.

    The annotation says what was asked for, fields that are asked for no more included; the comparison, that nobody has
    changed it since.
    """
    meta = live["metadata"]
    if (meta.get("annotations") or {}).get(APPLIED_ANNOTATION) != digest:
        return False
    return _contains(meta.get("labels"), desired["metadata"]["labels"]) and _contains(
        msgspec.json.decode(content(live)), desired["spec"]
    )


def _contains(live: object, wanted: object) -> bool:
    """Whether an object has all that was asked for; the API server's defaults come on top. A doubt is a no: applying
    again is harmless."""
    if live == wanted:  # most of an object, compared at the speed of C
        return True
    if isinstance(wanted, dict):
        return (not wanted and live is None) or (
            isinstance(live, dict) and all(_contains(live.get(name), value) for name, value in wanted.items())
        )
    if isinstance(wanted, list):
        if not wanted and live is None:
            return True
        return isinstance(live, list) and len(live) == len(wanted) and all(map(_contains, live, wanted))
    return (live is None and wanted in (False, 0, "")) or str(live) == str(wanted)


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
