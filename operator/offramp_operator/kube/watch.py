"""Lists and watches of every kind: what they tell feeds the cache and wakes the service it belongs to.

Each kind is listed once and then watched from that list's version on, so nothing is missed and nothing is listed twice; a watch that breaks
goes on from the last version it saw, and lists again only when the server has forgotten it. A regular list is the net below: it finds
what a watch that is silently dead does not tell. Nothing is ever written to an object. An optional kind that the cluster does not have is asked
for again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from offramp_core.errors import OfframpError, UnavailableError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, ExpiredError, KubeClient
from offramp_operator.kube.kinds import (
    AUTOSCALER,
    SERVICE,
    SERVICE_LABEL,
    WATCHED,
    Kind,
    Object,
    name_of,
    namespace_of,
    owner_of,
    scale_target,
    uid_of,
    version_of,
)
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

RELIST_SECONDS = 120.0
RELIST_RETRY_SECONDS = 10.0
RELIST_SHARE = 0.002  # of the time may go into regular lists: they become rarer where they take long
LATE_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.2, 30.0  # between attempts of a watch that breaks at once
FIRST_LIST_RETRY_SECONDS = 2.0  # at most, between attempts of a first list
ABSENT_SECONDS = 30.0  # between two looks for an optional kind that is not there
ABSENT = (403, 404)  # one that the operator's role does not name is as good as none
LASTED_SECONDS = 10.0  # a watch that lived this long was not broken from the start

Scope = tuple[Kind, str | None]
"""A kind, and the namespace it is watched in; None for all."""
Wake = Callable[[ServiceKey], object]
"""Told which service may have to be looked at."""


def service_key(obj: Object) -> ServiceKey | None:
    """The service to wake for an object. Only a hint: what counts as a service's own is decided by owner references."""
    owner = owner_of(obj)
    if obj.get("kind") == AUTOSCALER.name and (owner is None or owner["kind"] != SERVICE.name):
        name = scale_target(obj)  # a user's; the Deployment is named like its service
    elif obj.get("kind") == SERVICE.name:
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

    def listed(self, kind: Kind, newest: Mapping[str, int], now: float) -> None:
        """The newest version that a list found in each namespace."""
        for namespace, version in newest.items():
            stream = kind, namespace
            if version > self.seen.get(stream, 0):
                awaited, since = self.awaited.get(stream, (0, now))
                self.awaited[stream] = max(version, awaited), since

    def gone(self, kind: Kind) -> None:
        """The kind is not there any more: nothing of it is to come."""
        self.awaited = {stream: known for stream, known in self.awaited.items() if stream[0] is not kind}

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
        self._position: dict[Scope, int] = {}

    async def begin(self, client: KubeClient, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> None:
        """List everything, so that the cache is complete; watches go on from there.

        Each list is tried until it is answered, and no other is thrown away for it: a server that turns every third request
        away would hardly ever answer all of them at once.
        """
        keys: dict[ServiceKey, None] = {}  # woken when all is there: half of a service is no service

        def wake(key: ServiceKey) -> None:
            keys[key] = None

        await asyncio.gather(*(self._begin_for_good(client, scope, wake) for scope in scopes(namespaces, kinds)))
        for key in keys:
            self._wake(key)

    async def relist(self, client: KubeClient, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> None:
        """List everything once more, beside the watches: what they have not told must come soon, or they are late."""
        for kind, namespace in scopes(namespaces, kinds):
            listed = await self._list(client, (kind, namespace), self._wake)
            if listed is None:
                continue
            covered = self._position.get((kind, namespace), 0)
            news = {where: version for where, version in listed[0].items() if version > covered}
            self._freshness.listed(kind, news, self._clock())

    async def relist_forever(
        self, client: KubeClient, namespaces: tuple[str, ...], *, every: float = RELIST_SECONDS, tick: float = 1.0
    ) -> None:
        """List regularly, every ``every`` seconds or more seldom where a list takes long."""
        at = self._clock() + every
        while True:
            await asyncio.sleep(tick)
            started = self._clock()
            if started < at:
                continue
            try:
                await self.relist(client, namespaces)
                at = started + max(every, (self._clock() - started) / RELIST_SHARE)
            except OfframpError as error:
                at = started + min(every, RELIST_RETRY_SECONDS)
                log_event("relist-failed", str(error), level=logging.WARNING)

    async def follow(self, client: KubeClient, kind: Kind, namespace: str | None) -> None:
        """Watch a kind for ever, over everything that may happen to a connection."""
        scope, pause = (kind, namespace), FIRST_PAUSE_SECONDS
        while True:
            started = self._clock()
            try:
                if scope not in self._position:
                    await self._begin_at(client, scope, self._wake)
                if scope not in self._position:
                    await asyncio.sleep(ABSENT_SECONDS)
                    continue
                await client.watch(kind, namespace, version=self._position[scope], deliver=partial(self._take, scope))
                pause = FIRST_PAUSE_SECONDS
            except ExpiredError:
                del self._position[scope]
            except OfframpError as error:
                if kind.optional:
                    self._position.pop(scope, None)  # a list tells whether it is still there
                log_event("watch-broken", f"{error}; watching again", level=logging.WARNING, kind=str(kind))
                if self._clock() - started > LASTED_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                await asyncio.sleep(pause * (0.5 + 0.5 * random.random()))  # noqa: S311 - spreads retries, hides nothing
                pause = min(LAST_PAUSE_SECONDS, 2 * pause)

    def event(self, kind: Kind, kind_of_event: str, obj: Object) -> None:
        """One event of a watch."""
        obj = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        if kind_of_event == "DELETED":
            changed = self._cache.remove(kind, uid_of(obj), version=version_of(obj))
        else:
            changed = self._cache.put(kind, obj)
        self._freshness.watched(kind, namespace_of(obj), version_of(obj))
        if changed:
            self._wake_for(obj, self._wake)

    def late_seconds(self) -> float:
        return self._freshness.late_seconds(self._clock())

    def _take(self, scope: Scope, events: list[tuple[str, Object]]) -> None:
        for happened, obj in events:
            if happened != "BOOKMARK":
                self.event(scope[0], happened, obj)
            self._position[scope] = max(version_of(obj), self._position.get(scope, 0))

    async def _begin_for_good(self, client: KubeClient, scope: Scope, wake: Wake) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._begin_at(client, scope, wake)
            except (UnavailableError, ExpiredError) as error:
                log_event("first-list-failed", str(error), level=logging.WARNING, kind=str(scope[0]))
                asked = getattr(error, "retry_after_seconds", None) or 0.0
            await asyncio.sleep(max(asked, pause))
            pause = min(FIRST_LIST_RETRY_SECONDS, 2 * pause)

    async def _begin_at(self, client: KubeClient, scope: Scope, wake: Wake) -> None:
        listed = await self._list(client, scope, wake)
        if listed is None:
            self._position.pop(scope, None)
            return
        newest, self._position[scope] = listed
        for namespace, version in newest.items():
            self._freshness.watched(scope[0], namespace, version)

    async def _list(self, client: KubeClient, scope: Scope, wake: Wake) -> tuple[dict[str, int], int] | None:
        """Take a whole list, page by page; returns the newest version in each namespace, and the list's own.

        None of an optional kind that the cluster does not have.
        """
        kind, namespace = scope
        present: set[str] = set()
        newest: dict[str, int] = {}
        version = 0
        try:
            async for objects, at in client.pages(kind, namespace):
                version = at
                for obj in objects:
                    present.add(uid_of(obj))
                    newest[namespace_of(obj)] = max(version_of(obj), newest.get(namespace_of(obj), 0))
                    if self._cache.put(kind, obj):
                        self._wake_for(obj, wake)
        except ApiError as error:
            if not (kind.optional and error.status in ABSENT):
                raise
            self._freshness.gone(kind)
            for obj in self._cache.sweep(kind, frozenset(), version=sys.maxsize, namespace=namespace):
                self._wake_for(obj, wake)
            return None
        for obj in self._cache.sweep(kind, present, version=version, namespace=namespace):
            self._wake_for(obj, wake)
        return newest, version

    def _wake_for(self, obj: Object, wake: Wake) -> None:
        key = service_key(obj)
        if key is None or (obj.get("kind") == AUTOSCALER.name and not self._is_known(key)):
            return  # most autoscalers of a cluster are about something else, and each changes every few seconds
        wake(key)

    def _is_known(self, key: ServiceKey) -> bool:
        return self._cache.get(SERVICE, key.namespace, key.name) is not None


def scopes(namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> list[Scope]:
    """What is listed and watched: every kind in every namespace, or once in all of them."""
    return [(kind, namespace) for kind in kinds for namespace in namespaces or (None,)]


async def watch(feed: Feed, client: KubeClient, *, namespaces: tuple[str, ...], stop: asyncio.Event) -> None:
    """Watch everything until ``stop``; raises what no watch can go on after."""
    async with asyncio.TaskGroup() as group:
        following = [group.create_task(feed.follow(client, kind, namespace)) for kind, namespace in scopes(namespaces)]
        await stop.wait()
        for task in following:
            task.cancel()
