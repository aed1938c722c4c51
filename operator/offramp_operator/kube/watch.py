"""kopf as the watcher, and nothing else: its events feed the cache and wake the service they belong to.

Only ``on.event`` handlers are used: kopf then writes nothing to any object, neither a finalizer nor an annotation.
What watches cannot tell (deletions while a connection was down) a regular list finds out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import kopf

from offramp_core.errors import OfframpError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import (
    SERVICE,
    SERVICE_LABEL,
    WATCHED,
    Kind,
    Object,
    name_of,
    namespace_of,
    owner_of,
    uid_of,
    version_of,
)
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

RELIST_SECONDS = 120.0
RELIST_RETRY_SECONDS = 10.0
SETTLE_SECONDS = 3.0  # after the last object that a watch listed; the watches of all kinds list together
LATE_SECONDS = 60.0
SERVER_TIMEOUT_SECONDS = 600


def service_key(obj: Object) -> ServiceKey | None:
    """The service to wake for an object. Only a hint: what counts as a service's own is decided by owner references."""
    owner = owner_of(obj)
    if obj.get("kind") == SERVICE.name:
        name = name_of(obj)
    elif owner is not None and owner["kind"] == SERVICE.name:
        name = owner["name"]
    else:
        name = (obj["metadata"].get("labels") or {}).get(SERVICE_LABEL, "")
    return ServiceKey(namespace_of(obj), name) if name else None


@dataclass(slots=True)
class Freshness:
    """Whether the watches keep up: what a list has seen, the watch must see soon after.

    ``seen`` is the newest version a watch delivered, ``awaited`` the newest a list found and since when it is missing; by kind and
    namespace, because one namespace's watch may be dead while another's lives.
    """

    seen: dict[tuple[Kind, str], int] = field(default_factory=dict)
    awaited: dict[tuple[Kind, str], tuple[int, float]] = field(default_factory=dict)

    def watched(self, kind: Kind, namespace: str, version: int) -> None:
        """The watch delivered an event."""
        stream = kind, namespace
        self.seen[stream] = max(version, self.seen.get(stream, 0))
        if stream in self.awaited and self.seen[stream] >= self.awaited[stream][0]:
            del self.awaited[stream]

    def listed(self, kind: Kind, items: Iterable[Object], now: float) -> None:
        """A list found these objects."""
        for obj in items:
            stream, version = (kind, namespace_of(obj)), version_of(obj)
            if version > self.seen.get(stream, 0):
                awaited, since = self.awaited.get(stream, (0, now))
                self.awaited[stream] = max(version, awaited), since

    def late_seconds(self, now: float) -> float:
        """For how long the most delayed watch has been behind; 0 when all keep up."""
        return max((now - since for _, since in self.awaited.values()), default=0.0)


class Feed:
    """Puts what is seen into the cache, and wakes services.

    Parameters
    ----------
    wake : callable
        Called with the key of every service that may have to be looked at.
    """

    def __init__(
        self, cache: ObjectCache, wake: Callable[[ServiceKey], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._wake = wake
        self._clock = clock
        self._freshness = Freshness()
        self._relist_at = math.inf

    def event(self, kind: Kind, kind_of_event: str | None, obj: Object) -> None:
        """One watch event; None as its kind means that the watch listed the object."""
        obj = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        version = version_of(obj)
        if kind_of_event is None:
            self._relist_at = self._clock() + SETTLE_SECONDS
        if kind_of_event == "DELETED":
            changed = self._cache.remove(kind, uid_of(obj), version=version)
        else:
            changed = self._cache.put(kind, obj)
        self._freshness.watched(kind, namespace_of(obj), version)
        if changed:
            self._wake_for(obj)

    async def relist(self, client: KubeClient, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> None:
        """List everything once, so that the cache is complete and free of ghosts."""
        for kind in kinds:
            for namespace in namespaces or (None,):
                items, version = await client.list(kind, namespace)
                for obj in self._cache.replace(kind, items, version=version, namespace=namespace):
                    self._wake_for(obj)
                self._freshness.listed(kind, items, self._clock())

    async def relist_forever(
        self, client: KubeClient, namespaces: tuple[str, ...], *, every: float = RELIST_SECONDS, tick: float = 1.0
    ) -> None:
        """List regularly, and soon after a watch had to list: what was deleted before that list is reported by nobody."""
        last = self._clock()
        while True:
            await asyncio.sleep(tick)
            if self._clock() < min(last + every, self._relist_at):
                continue
            last, self._relist_at = self._clock(), math.inf
            try:
                await self.relist(client, namespaces)
            except OfframpError as error:
                self._relist_at = self._clock() + RELIST_RETRY_SECONDS
                log_event("relist-failed", str(error), level=logging.WARNING)

    def late_seconds(self) -> float:
        return self._freshness.late_seconds(self._clock())

    def _wake_for(self, obj: Object) -> None:
        if (key := service_key(obj)) is not None:
            self._wake(key)


def registry(feed: Feed, kinds: Iterable[Kind] = WATCHED) -> kopf.OperatorRegistry:
    """kopf's handlers: one per kind, all alike."""
    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers, id="login")(_login)
    for kind in kinds:
        decorator = kopf.on.event(
            group=kind.group, version=kind.version, plural=kind.plural, registry=handlers, id=f"cache-{kind}"
        )
        decorator(_handler(feed, kind))
    return handlers


def settings(*, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> kopf.OperatorSettings:
    """kopf's settings: no Events of its own, no peers, no deadline for our shutdown, and label selectors at the server."""
    result = kopf.OperatorSettings()
    result.posting.enabled = False
    result.peering.standalone = True
    result.process.ultimate_exiting_timeout = None
    result.scanning.disabled = bool(namespaces)
    result.networking.request_timeout = 30
    result.networking.connect_timeout = 10
    result.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    result.watching.connect_timeout = 10
    for kind in kinds:
        if kind.selector:
            result.watching.label_selectors[_is(kind)] = kind.selector
    return result


async def watch(
    feed: Feed, *, namespaces: tuple[str, ...], stop: asyncio.Event, after_start: Callable[[], None] = lambda: None
) -> None:
    """Watch until ``stop``; raises what made kopf give up.

    ``after_start`` runs once kopf has taken over the process's signals, so that they can be taken back.
    """
    existing = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry(feed),
        settings=settings(namespaces=namespaces),
        namespaces=namespaces,
        clusterwide=not namespaces,
        standalone=True,
        stop_flag=stop,
    )
    after_start()
    await kopf.run_tasks(tasks, ignored=existing)


def _is(kind: Kind) -> Callable[[Any], bool]:
    return lambda resource: (
        (resource.group, resource.version, resource.plural) == (kind.group, kind.version, kind.plural)
    )


def _handler(feed: Feed, kind: Kind) -> Callable[..., Any]:
    async def cache_event(event: Any, **_: Any) -> None:
        feed.event(kind, event["type"], event["object"])

    return cache_event


def _login(**arguments: Any) -> Any:
    """The pod's credentials, else the kubeconfig's; asked again whenever the API server says 401."""
    account = kopf.login_with_service_account(**arguments)
    if account is None:
        return kopf.login_with_kubeconfig(**arguments)
    # By address, as the other client does: the operator must work while the cluster's DNS does not.
    address = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    return dataclasses.replace(account, server=in_cluster_url(*address)) if address[0] else account


def in_cluster_url(host: str, port: str) -> str:
    """The API server as a pod's environment names it."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
