"""The kinds that the operator reconciles. One entry says all about one: what is watched, whom a change wakes, what a
pass does, and which rights that takes.

The process watches, queues, elects and fences for all of them alike (:mod:`offramp_operator.kube.lead`). Services are
one entry (:mod:`offramp_operator.kube.services`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import Kind, Object, name_of, namespace_of, owner_of
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey

ObjectKey = ServiceKey
"""Namespace and name of an object of a managed kind."""

Reconcile = Callable[[ObjectKey], Awaitable[float | None]]
"""One pass over one object: seconds until the next one, or None where nothing but a change asks for one. What it raises
is tried again."""


@dataclass(frozen=True, slots=True)
class Right:
    """Verbs on a kind, or on a subresource of it."""

    kind: Kind
    verbs: str
    subresource: str = ""

    @property
    def rule(self) -> tuple[str, str, frozenset[str]]:
        """API group, resource, verbs: as a role has it."""
        resource = f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural
        return self.kind.group, resource, frozenset(self.verbs.split())


@dataclass(frozen=True, slots=True)
class Seat:
    """What a leader gives to the passes of one kind.

    ``wake`` makes an object due now. ``beside`` runs for as long as this process leads; what ends by itself ends the
    process. ``closing`` is closed once it leads no more.
    """

    client: KubeClient
    cache: ObjectCache
    wake: Callable[[ObjectKey], object]
    beside: Callable[[Coroutine[Any, Any, None]], object]
    closing: AsyncExitStack


@dataclass(frozen=True, slots=True, eq=False)
class Managed:
    """One managed kind.

    Parameters
    ----------
    kind : Kind
        What users write. kopf watches it.
    begin : callable
        Called once this process leads; returns the function that reconciles.
    rights : tuple of Right
        All that watching and passes need; the chart's role grants exactly that.
    own : tuple of Kind
        Further kinds of ours that belong to an object of it. kopf watches them.
    children : tuple of Kind
        Kinds that it is carried out with. Informers watch them, as they are many.
    belongs : callable
        Which object a seen one belongs to; by owner reference where nothing is given. A hint alone: passes check
        owners.
    matters : callable
        Whether a seen object is worth a pass over what it belongs to; always where nothing is given.
    users : callable
        Which objects use one that belongs to nobody, such as a class that several name.
    """

    kind: Kind
    begin: Callable[[Seat], Reconcile]
    rights: tuple[Right, ...]
    own: tuple[Kind, ...] = ()
    children: tuple[Kind, ...] = ()
    belongs: Callable[[Object], ObjectKey | None] | None = None
    matters: Callable[[Kind, ObjectKey, ObjectCache], bool] | None = None
    users: Callable[[Object, ObjectCache], Iterable[ObjectKey]] | None = None

    @property
    def ours(self) -> tuple[Kind, ...]:
        return (self.kind, *self.own)

    @property
    def watched(self) -> tuple[Kind, ...]:
        return (*self.ours, *self.children)

    def owner(self, obj: Object) -> ObjectKey | None:
        """The object that another one, or itself, belongs to."""
        return self.belongs(obj) if self.belongs is not None else owned_by(self.kind, obj)

    def woken(self, kind: Kind, obj: Object, cache: ObjectCache) -> Iterator[ObjectKey]:
        """Whom a change of an object wakes."""
        if kind not in self.watched:
            return
        key = self.owner(obj)
        if key is not None and (self.matters is None or self.matters(kind, key, cache)):
            yield key
        if self.users is not None:
            yield from self.users(obj, cache)

    def everybody(self, cache: ObjectCache) -> list[ObjectKey]:
        return [ObjectKey(*name) for name in cache.names(self.kind)]


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """What the queue is of: an object of a managed kind."""

    kind: str
    key: ObjectKey

    def __str__(self) -> str:
        return str(self.key)


class Registry:
    """All managed kinds of one process."""

    def __init__(self, *entries: Managed) -> None:
        self.entries = entries

    @property
    def ours(self) -> tuple[Kind, ...]:
        """What kopf watches."""
        return tuple(dict.fromkeys(kind for entry in self.entries for kind in entry.ours))

    @property
    def children(self) -> tuple[Kind, ...]:
        """What informers watch."""
        return tuple(dict.fromkeys(kind for entry in self.entries for kind in entry.children))

    @property
    def watched(self) -> tuple[Kind, ...]:
        return (*self.ours, *self.children)

    def admits(self, obj: Object, owns: Callable[[ObjectKey], bool]) -> bool:
        """Whether an object is to be kept by a process that ``owns`` some of what is reconciled. What belongs to nobody
        is for all."""
        owners = [key for entry in self.entries if (key := entry.owner(obj)) is not None]
        return not owners or any(map(owns, owners))

    def woken(self, kind: Kind, obj: Object, cache: ObjectCache) -> list[Item]:
        return [Item(entry.kind.name, key) for entry in self.entries for key in entry.woken(kind, obj, cache)]

    def everybody(self, cache: ObjectCache) -> list[Item]:
        return [Item(entry.kind.name, key) for entry in self.entries for key in entry.everybody(cache)]


def owned_by(kind: Kind, obj: Object) -> ObjectKey | None:
    """The object of a kind that is the object itself, or controls it."""
    if obj.get("kind") == kind.name:
        return ObjectKey(namespace_of(obj), name_of(obj))
    owner = owner_of(obj)
    return ObjectKey(namespace_of(obj), owner["name"]) if owner is not None and owner["kind"] == kind.name else None


async def forever(seconds: float, work: Callable[[], object]) -> None:
    """Call ``work`` again and again, ``seconds`` apart. What it raises is told once and ends nothing: one object must
    not keep the process from all others."""
    last = ""
    while True:
        try:
            work()
            last = ""
        except Exception as error:
            if repr(error) != last:
                last = repr(error)
                log_event("background-failed", f"{error!r}; tried again", level=logging.ERROR, error=error)
        await asyncio.sleep(seconds)
