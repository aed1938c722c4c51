"""Lists and watches of every kind: what they tell feeds the cache and wakes the service it belongs to.

Each kind is listed once and then watched from that list's version on, so nothing is missed and nothing is listed twice;
a watch that breaks goes on from the last version it saw, and lists again only when the server has forgotten it. One
that breaks, expires or ends again and again is tried ever more seldom. A regular list is the net below: it finds what a
watch that is silently dead does not tell. Nothing is ever written to an object. An optional kind that the cluster does
not have, or does not let us read, is asked for again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from offramp_core.errors import OfframpError, UnavailableError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, ExpiredError, KubeClient
from offramp_operator.kube.kinds import (
    AUTOSCALER,
    SERVICE,
    SERVICE_LABEL,
    WATCHED,
    WORKER_CLASS,
    WORKER_POOL,
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
RELIST_SOON_SECONDS = 2.0  # after another list has begun
RELIST_REST = 10.0  # times what a regular list took, before one that is asked for
RELIST_SHARE = 0.002  # of the time may go into regular lists: they become rarer where they take long
LATE_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.2, 30.0  # between attempts of a watch that breaks at once
FIRST_LIST_RETRY_SECONDS = 2.0  # at most, between attempts of a first list
REFUSED_LIST_RETRY_SECONDS = 30.0  # at most, where it is refused for good
ABSENT_SECONDS = 30.0  # between two searches for an optional kind that is not there
ABSENT_KIND = 404
ABSENT = (403, ABSENT_KIND)  # one that the operator's role does not name is as good as none
LASTED_SECONDS = 10.0  # a watch that lived this long was not broken from the start

Scope = tuple[Kind, str | None]
"""A kind, and the namespace it is watched in; None for all."""
Wake = Callable[[Any], object]
"""Takes what may have to be reconciled."""


class Whom(Protocol):
    """Whom a change wakes."""

    def woken(self, kind: Kind, obj: Object, cache: ObjectCache) -> Iterable[Any]: ...

    def everybody(self, cache: ObjectCache) -> Iterable[Any]: ...


class Services:
    """Services alone, by their keys."""

    def woken(self, kind: Kind, obj: Object, cache: ObjectCache) -> Iterable[ServiceKey]:
        key = service_key(obj)
        if key is None:
            return class_users(obj, cache)
        return (key,) if service_matters(kind, key, cache) else ()

    def everybody(self, cache: ObjectCache) -> Iterable[ServiceKey]:
        return (ServiceKey(*name) for name in cache.names(SERVICE))


def service_key(obj: Object) -> ServiceKey | None:
    """The service to wake for an object. Only a hint: what counts as a service's own is decided by owner references."""
    owner = owner_of(obj)
    if not namespace_of(obj):
        return None  # of the whole cluster
    if obj.get("kind") == AUTOSCALER.name and (owner is None or owner["kind"] != SERVICE.name):
        name = scale_target(obj)  # a user's; the Deployment is named like its service
    elif obj.get("kind") == SERVICE.name:
        name = name_of(obj)
    elif owner is not None and owner["kind"] == SERVICE.name:
        name = owner["name"]
    else:
        name = (obj["metadata"].get("labels") or {}).get(SERVICE_LABEL, "")
    return ServiceKey(namespace_of(obj), name) if name else None


def service_matters(kind: Kind, key: ServiceKey, cache: ObjectCache) -> bool:
    """Most autoscalers of a cluster are about something else, and each changes every few seconds."""
    return kind is not AUTOSCALER or cache.get(SERVICE, key.namespace, key.name) is not None


def class_users(obj: Object, cache: ObjectCache) -> list[ServiceKey]:
    """The services that ask for a class, or for a pool; none of anything else."""
    if obj.get("kind") == WORKER_POOL.name:
        members = cache.of_shared_pool(namespace_of(obj), name_of(obj))
        return [ServiceKey(namespace_of(member), name_of(member)) for member in members]
    is_class = obj.get("kind") == WORKER_CLASS.name
    return [ServiceKey(*name) for name in cache.of_class(name_of(obj))] if is_class else []


@dataclass(slots=True)
class Pauses:
    """How long to wait before what broke is tried again: twice as long each time, from the beginning once it has
    lasted."""

    last: float
    next_pause: float = FIRST_PAUSE_SECONDS

    def reset(self) -> None:
        self.next_pause = FIRST_PAUSE_SECONDS

    async def sleep(self, error: Exception | None = None) -> None:
        """Wait; a little less at random, so that watches that broke together do not come back together, and as long as
        the server asked for."""
        asked = getattr(error, "retry_after_seconds", None) or 0.0
        pause, self.next_pause = self.next_pause, min(self.last, 2 * self.next_pause)
        await asyncio.sleep(max(asked, pause * (0.5 + 0.5 * random.random())))  # noqa: S311 - spreads retries, hides nothing


@dataclass(slots=True)
class Freshness:
    """Whether the watches keep up: what a list has seen, the watch must reach soon after.

    ``position`` is the version up to which a watch, or the list it begins with, has delivered everything; ``awaited``
    the newest version that a regular list found beyond it, and since when it is missing.
    """

    position: dict[Scope, int] = field(default_factory=dict)
    awaited: dict[Scope, tuple[int, float]] = field(default_factory=dict)

    def reached(self, scope: Scope, version: int) -> None:
        """All that happened up to ``version`` is known."""
        self.position[scope] = max(version, self.position.get(scope, 0))
        if scope in self.awaited and self.position[scope] >= self.awaited[scope][0]:
            del self.awaited[scope]

    def lost(self, scope: Scope) -> None:
        """The watch cannot go on from where it was: only a list can tell what there is. What is awaited stays so."""
        self.position.pop(scope, None)

    def listed(self, scope: Scope, newest: int, now: float) -> None:
        """The newest version that a regular list found; what was awaited beyond it is gone again."""
        if newest > self.position.get(scope, 0):
            awaited, since = self.awaited.get(scope, (0, now))
            self.awaited[scope] = max(newest, awaited), since
        else:
            self.awaited.pop(scope, None)

    def gone(self, scope: Scope) -> None:
        """The kind is not there any more: nothing of it is to come."""
        self.lost(scope)
        self.awaited.pop(scope, None)

    def late_seconds(self, now: float) -> float:
        """For how long the most delayed watch has been behind; 0 when all keep up."""
        return max((now - since for _, since in self.awaited.values()), default=0.0)


class Feed:
    """Puts what is seen into the cache, and wakes whom it matters to.

    Parameters
    ----------
    wake : callable
        Called with everything that may have to be reconciled.
    whom : Whom
        Who that is.
    """

    def __init__(
        self, cache: ObjectCache, wake: Wake, *, whom: Whom | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._wake = wake
        self._whom = whom or Services()
        self._clock = clock
        self._freshness = Freshness()
        self._missing: dict[Scope, str] | None = None  # before anything has been asked for
        self._relist_at = math.inf
        self._relist_from = -math.inf

    async def begin(self, client: KubeClient, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> None:
        """List everything, so that the cache is complete; watches go on from there.

        Each list is tried until it is answered, and no other is thrown away for it: a server that turns every third
        request away would hardly ever answer all of them at once.
        """
        keys: dict[Any, None] = {}  # woken when all is there: half of a service is no service

        def wake(key: Any) -> None:
            keys[key] = None

        wanted = scopes(namespaces, kinds)
        if self._missing is None:
            self._missing = {scope: "" for scope in wanted}
        await asyncio.gather(*(self._begin_for_good(client, scope, wake) for scope in wanted))
        for key in keys:
            self._wake(key)

    async def relist(self, client: KubeClient, namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> None:
        """List everything once more, beside the watches: what they have not delivered must come soon, or is late."""
        for scope in scopes(namespaces, kinds):
            listed = await self._list(client, scope, self._wake)
            if listed is not None:
                self._freshness.listed(scope, listed[0], self._clock())

    async def relist_forever(
        self,
        client: KubeClient,
        namespaces: tuple[str, ...],
        kinds: Iterable[Kind] = WATCHED,
        *,
        every: float = RELIST_SECONDS,
        tick: float = 1.0,
    ) -> None:
        """List regularly, every ``every`` seconds or more seldom where a list takes long."""
        self._relist_at = self._clock() + every
        while True:
            await asyncio.sleep(tick)
            started = self._clock()
            if started < self._relist_at:
                continue
            self._relist_at = math.inf  # what is asked for from here on is the next one
            try:
                await self.relist(client, namespaces, kinds)
                due = started + max(every, (self._clock() - started) / RELIST_SHARE)
            except OfframpError as error:
                due = started + min(every, RELIST_RETRY_SECONDS)
                log_event("relist-failed", str(error), level=logging.WARNING)
            self._relist_from = self._clock() + max(RELIST_RETRY_SECONDS, RELIST_REST * (self._clock() - started))
            self._relist_at = min(max(self._relist_at, self._relist_from), due)

    async def follow(self, client: KubeClient, kind: Kind, namespace: str | None) -> None:
        """Watch a kind for ever, over everything that may happen to a connection."""
        scope, pauses = (kind, namespace), Pauses(LAST_PAUSE_SECONDS)
        while True:
            broken: OfframpError | None = None
            watching_since = math.inf
            try:
                if scope not in self._freshness.position:
                    await self._begin_at(client, scope, self._wake)
                if scope not in self._freshness.position:
                    await asyncio.sleep(ABSENT_SECONDS)
                    continue
                watching_since, version = self._clock(), self._freshness.position[scope]
                await client.watch(kind, namespace, version=version, deliver=partial(self._take, scope))
            except OfframpError as error:
                broken = error
                if kind.optional or isinstance(error, ExpiredError):
                    self._freshness.lost(scope)  # a list tells what is there, and whether the kind still is
                log_event("watch-broken", f"{error}; watching again", level=logging.WARNING, kind=str(kind))
            if self._clock() - watching_since > LASTED_SECONDS:
                pauses.reset()
                if broken is None or isinstance(broken, ExpiredError):
                    continue  # as watches end after a while, and versions are forgotten
            await pauses.sleep(broken)

    def on_event(self, kind: Kind, happened: str | None, obj: Object) -> None:
        """One event of a watch that kopf keeps; None stands for an object that its list found."""
        scope = (kind, None if (kind, None) in self._freshness.position else namespace_of(obj))
        self._take(scope, [(happened or "ADDED", obj)])

    def relist_soon(self) -> None:
        """What was deleted may have gone untold: the regular list comes now."""
        self._relist_at = min(self._relist_at, max(self._clock() + RELIST_SOON_SECONDS, self._relist_from))

    def event(self, kind: Kind, kind_of_event: str, obj: Object) -> None:
        """One event of a watch."""
        obj = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        if kind_of_event == "DELETED":
            changed = self._cache.remove(kind, uid_of(obj), version=version_of(obj))
        else:
            changed = self._cache.put(kind, obj)
        if changed:
            self._wake_for(kind, obj, self._wake)

    def late_seconds(self) -> float:
        return self._freshness.late_seconds(self._clock())

    def missing(self) -> str:
        """What has never been listed to its end, and why where a list has failed; empty once all has. What is listed
        anew later is not missing."""
        if self._missing is None:
            return "every kind"
        places = (
            (f"{kind} in {namespace}" if namespace else str(kind), why)
            for (kind, namespace), why in self._missing.items()
        )
        return ", ".join(f"{place} ({why})" if why else place for place, why in places)

    def _take(self, scope: Scope, events: list[tuple[str, Object]]) -> None:
        for happened, obj in events:
            if happened != "BOOKMARK":
                self.event(scope[0], happened, obj)
            self._freshness.reached(scope, version_of(obj))

    async def _begin_for_good(self, client: KubeClient, scope: Scope, wake: Wake) -> None:
        pauses, missing = Pauses(FIRST_LIST_RETRY_SECONDS), self._missing or {}
        while True:
            try:
                await self._begin_at(client, scope, wake)
            except OfframpError as error:
                log_event("first-list-failed", str(error), level=logging.WARNING, kind=str(scope[0]))
                if scope in missing:
                    missing[scope] = str(error)
                if not isinstance(error, UnavailableError | ExpiredError):
                    pauses.last = REFUSED_LIST_RETRY_SECONDS  # somebody has to change something first
                await pauses.sleep(error)
            else:
                missing.pop(scope, None)
                return

    async def _begin_at(self, client: KubeClient, scope: Scope, wake: Wake) -> None:
        listed = await self._list(client, scope, wake)
        if listed is None:
            self._freshness.gone(scope)
        else:
            self._freshness.reached(scope, listed[1])

    async def _list(self, client: KubeClient, scope: Scope, wake: Wake) -> tuple[int, int] | None:
        """Take a whole list, page by page; returns the newest version of an object in it, and the list's own.

        None of an optional kind that the cluster does not have, or does not let us read.
        """
        kind, namespace = scope
        present: set[str] = set()
        newest = version = 0
        try:
            async for objects, at in client.pages(kind, namespace):
                version = at
                for obj in objects:
                    present.add(uid_of(obj))
                    newest = max(newest, version_of(obj))
                    if self._cache.put(kind, obj):
                        self._wake_for(kind, obj, wake)
        except ApiError as error:
            if not (kind.optional and error.status in ABSENT):
                raise
            self._freshness.gone(scope)
            if error.status == ABSENT_KIND:
                for obj in self._cache.drop(kind, namespace=namespace):
                    self._wake_for(kind, obj, wake)
            self._note_readable(scope, str(error), wake)
            return None
        for obj in self._cache.sweep(kind, present, version=version, namespace=namespace):
            self._wake_for(kind, obj, wake)
        self._note_readable(scope, "", wake)
        return newest, version

    def _note_readable(self, scope: Scope, problem: str, wake: Wake) -> None:
        """Every service may have waited for that, or has to say so: nothing else would wake those whose objects are as
        they were."""
        if scope[0].optional and self._cache.note_unreadable(*scope, problem):
            for key in self._whom.everybody(self._cache):
                wake(key)

    def _wake_for(self, kind: Kind, obj: Object, wake: Wake) -> None:
        for key in self._whom.woken(kind, obj, self._cache):
            wake(key)


def scopes(namespaces: tuple[str, ...], kinds: Iterable[Kind] = WATCHED) -> list[Scope]:
    """What is listed and watched: every kind in every namespace, or once in all of them."""
    everywhere: tuple[str | None, ...] = (None,)
    return [
        (kind, namespace)
        for kind in kinds
        for namespace in (everywhere if kind.cluster_scoped else namespaces or everywhere)
    ]


async def watch(
    feed: Feed, client: KubeClient, *, namespaces: tuple[str, ...], stop: asyncio.Event, kinds: Iterable[Kind] = WATCHED
) -> None:
    """Watch everything of these kinds until ``stop``; raises what no watch can go on after."""
    async with asyncio.TaskGroup() as group:
        following = [group.create_task(feed.follow(client, *scope)) for scope in scopes(namespaces, kinds)]
        await stop.wait()
        for task in following:
            task.cancel()
