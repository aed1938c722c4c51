"""What is known of the cluster: plain objects by kind and uid, fed by watches, lists and our own writes.

The three sources race, so the resource version decides: an object never goes back to an older one, and one that
was deleted does not come back. What the operator wrote itself is put here from the API server's answer, hence a
pass never sees less than the passes before it have written.

Objects are kept packed (MessagePack, which has bytes) and unpacked for whoever asks: that takes microseconds, and a
third of the memory of the dictionaries. It also means that nobody can change what others are given.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from sys import intern
from typing import Any, TypeVar, cast

import msgspec

from offramp_operator.kube.kinds import (
    AUTOSCALER,
    SERVICE,
    WATCHED,
    Kind,
    Object,
    classes_of,
    name_of,
    namespace_of,
    owner_of,
    scale_target,
    shared_pool_of,
    uid_of,
    version_of,
)
from offramp_operator.kube.trim import trim

K = TypeVar("K")
LEAST_WHOLE, MOST_WHOLE, LARGEST = -(2**63), 2**64 - 1, 1e308  # what MessagePack has of whole numbers, and of any
REMEMBERED_DELETIONS = 10_000  # far more than can be under way between a write and its echo on the watch


@dataclass(frozen=True, slots=True)
class _Packed:
    """An object, and what it is found by. A service's name and uid are in a dozen objects, so there is one of each
    text."""

    version: int
    namespace: str
    name: str
    owner: str  # uid; empty without one
    targets: tuple[str, ...]  # Deployment that an autoscaler scales; classes and pool that a service asks for
    body: bytes

    @classmethod
    def of(cls, kind: Kind, obj: Object) -> _Packed:
        owner = owner_of(obj)
        return cls(
            version_of(obj),
            intern(namespace_of(obj)),
            intern(name_of(obj)),
            owner="" if owner is None else intern(owner["uid"]),
            targets=_targets(kind, obj),
            body=_packed(obj),
        )

    def unpacked(self) -> Object:
        return cast(Object, msgspec.msgpack.decode(self.body))


def _packed(obj: Object) -> bytes:
    """MessagePack, whose whole numbers have 64 bits. Larger ones are floats at the API server, which writes those below
    1e21 without an exponent: one such number must not keep the operator from all objects."""
    try:
        return msgspec.msgpack.encode(obj)
    except OverflowError:
        return msgspec.msgpack.encode(_with_floats(obj))


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(item) for item in value]
    beyond = isinstance(value, int) and not LEAST_WHOLE <= value <= MOST_WHOLE
    return float(min(max(value, -LARGEST), LARGEST)) if beyond else value


class ObjectCache:
    """Objects of the watched kinds, trimmed (see :mod:`trim`).

    Parameters
    ----------
    admits : callable
        Which objects are kept at all; what belongs to another process's services need not be.
    """

    def __init__(self, kinds: Iterable[Kind] = WATCHED, *, admits: Callable[[Object], bool] = lambda _: True) -> None:
        self._admits = admits
        self._listeners: list[Callable[[Object], None]] = []
        self._objects: dict[Kind, dict[str, _Packed]] = {kind: {} for kind in kinds}
        self._named: dict[Kind, dict[tuple[str, str], str]] = {kind: {} for kind in kinds}
        # Tuples: nearly all have one member, of which a set takes four times the memory.
        self._owned: dict[Kind, dict[str, tuple[str, ...]]] = {kind: {} for kind in kinds}
        self._targeting: dict[tuple[Kind, str], tuple[str, ...]] = {}
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._unreadable: dict[tuple[Kind, str | None], str] = {}

    def subscribe(self, changed: Callable[[Object], None]) -> None:
        """Call ``changed`` with every object that is added, changed or dropped, whoever brings the news."""
        self._listeners.append(changed)

    def _changed(self, obj: Object) -> None:
        for listener in self._listeners:
            listener(obj)

    def put(self, kind: Kind, obj: Object) -> bool:
        """Take an object unless a newer one is known or it was deleted; whether anything changed."""
        uid, version = intern(uid_of(obj)), version_of(obj)
        known = self._objects[kind].get(uid)
        if known is None and not self._admits(obj):
            return False
        if version <= self._deleted.get(uid, 0) or (known is not None and known.version >= version):
            return False
        self._forget(kind, uid)
        obj = trim(kind, obj)
        kept = self._objects[kind][uid] = _Packed.of(kind, obj)
        self._named[kind][kept.namespace, kept.name] = uid
        if kept.owner:
            _add(self._owned[kind], kept.owner, uid)
        for target in kept.targets:
            _add(self._targeting, (kind, target), uid)
        self._changed(obj)
        return True

    def remove(self, kind: Kind, uid: str, *, version: float = math.inf) -> bool:
        """Drop an object that was deleted, or ceased to match the selector, at ``version``; whether it was known."""
        known = self._objects[kind].get(uid)
        if known is not None and known.version > version:
            return False
        self._deleted[uid] = version
        if len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        if known is not None:
            self._changed(known.unpacked())
        return self._forget(kind, uid)

    def sweep(self, kind: Kind, present: Set[str], *, version: int, namespace: str | None = None) -> list[Object]:
        """Drop what a list that was complete at ``version`` lacked and is not newer; returns it.

        Watches alone do not suffice: what is deleted while a watch is down is never reported.
        """
        ghosts = [
            (uid, kept.unpacked())
            for uid, kept in self._objects[kind].items()
            if uid not in present and kept.version <= version and namespace in (None, kept.namespace)
        ]
        for uid, _ in ghosts:
            self.remove(kind, uid, version=version)
        return [obj for _, obj in ghosts]

    def drop(self, kind: Kind, *, namespace: str | None = None) -> list[Object]:
        """Forget the objects of a kind that the cluster does not have any more; returns them. Should they come back,
        they are newer."""
        gone = [(uid, kept) for uid, kept in self._objects[kind].items() if namespace in (None, kept.namespace)]
        for uid, kept in gone:
            self.remove(kind, uid, version=kept.version)
        return [kept.unpacked() for _, kept in gone]

    def note_unreadable(self, kind: Kind, namespace: str | None, problem: str) -> bool:
        """Note why a kind cannot be read now, or with an empty text that it can; whether that is news. What is known of
        it stays.

        News are a change of every service: what could not be done about it can be tried again, or has to be reported.
        """
        if self._unreadable.get((kind, namespace), "") == problem:
            return False
        self._unreadable[kind, namespace] = problem
        for service in self.all(SERVICE):
            self._changed(service)
        return True

    def unreadable(self, kind: Kind, namespace: str) -> str:
        """Why a kind cannot be read in a namespace; empty where it can."""
        return self._unreadable.get((kind, namespace), "") or self._unreadable.get((kind, None), "")

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        uid = self._named[kind].get((namespace, name))
        return None if uid is None else self._objects[kind][uid].unpacked()

    def owned(self, kind: Kind, owner_uid: str) -> list[Object]:
        """Objects controlled by the owner, by name."""
        return self._by_name(kind, self._owned[kind].get(owner_uid, ()))

    def autoscalers(self, namespace: str, deployment: str) -> list[Object]:
        """What scales a Deployment, by name."""
        return self._by_name(AUTOSCALER, self._targeting.get((AUTOSCALER, f"{namespace}/{deployment}"), ()))

    def of_class(self, name: str) -> list[tuple[str, str]]:
        """Namespace and name of every service that asks for a WorkerClass."""
        found = (self._objects[SERVICE][uid] for uid in self._targeting.get((SERVICE, name), ()))
        return sorted((kept.namespace, kept.name) for kept in found)

    def of_shared_pool(self, namespace: str, name: str) -> list[Object]:
        """The services that a WorkerPool serves, by name."""
        return self._by_name(SERVICE, self._targeting.get((SERVICE, f"{namespace}/{name}"), ()))

    def all(self, kind: Kind) -> Iterator[Object]:
        return (kept.unpacked() for kept in list(self._objects[kind].values()))

    def names(self, kind: Kind) -> list[tuple[str, str]]:
        """Namespace and name of every object."""
        return list(self._named[kind])

    def _by_name(self, kind: Kind, uids: Iterable[str]) -> list[Object]:
        found = sorted((self._objects[kind][uid] for uid in uids), key=lambda kept: kept.name)
        return [kept.unpacked() for kept in found]

    def _forget(self, kind: Kind, uid: str) -> bool:
        kept = self._objects[kind].pop(uid, None)
        if kept is None:
            return False
        name = kept.namespace, kept.name
        if self._named[kind].get(name) == uid:  # an object of the same name may have followed already
            del self._named[kind][name]
        if kept.owner:
            _drop(self._owned[kind], kept.owner, uid)
        for target in kept.targets:
            _drop(self._targeting, (kind, target), uid)
        return True


def _targets(kind: Kind, obj: Object) -> tuple[str, ...]:
    """What an object is about besides its owner: an autoscaler's Deployment, a service's class and pool."""
    name = scale_target(obj) if kind is AUTOSCALER else shared_pool_of(obj) if kind is SERVICE else ""
    classes = classes_of(obj) if kind is SERVICE else ()
    return (*classes, f"{namespace_of(obj)}/{name}") if name else classes


def _add(index: dict[K, tuple[str, ...]], key: K, uid: str) -> None:
    index[key] = (*index.get(key, ()), uid)


def _drop(index: dict[K, tuple[str, ...]], key: K, uid: str) -> None:
    index[key] = tuple(other for other in index[key] if other != uid)
    if not index[key]:
        del index[key]
