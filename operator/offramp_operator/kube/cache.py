"""What is known of the cluster: plain objects by kind and uid, fed by watches, lists and our own writes.

The three sources race, so the resource version decides: an object never goes back to an older one, and one that
was deleted does not come back. What the operator wrote itself is put here from the API server's answer, hence a
pass never sees less than the passes before it have written.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from offramp_operator.kube.kinds import (
    AUTOSCALER,
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
from offramp_operator.kube.slim import slim

K = TypeVar("K")
REMEMBERED_DELETIONS = 10_000  # far more than can be under way between a write and its echo on the watch


class ObjectCache:
    """Objects of the watched kinds, slimmed (see :mod:`slim`). Callers must not change what they are given.

    Parameters
    ----------
    admits : callable
        Which objects are kept at all; what belongs to another process's services need not be.
    """

    def __init__(self, kinds: Iterable[Kind] = WATCHED, *, admits: Callable[[Object], bool] = lambda _: True) -> None:
        self._admits = admits
        self._changed: Callable[[Object], None] = lambda _: None
        self._objects: dict[Kind, dict[str, Object]] = {kind: {} for kind in kinds}
        self._named: dict[Kind, dict[tuple[str, str], str]] = {kind: {} for kind in kinds}
        self._owned: dict[Kind, dict[str, set[str]]] = {kind: {} for kind in kinds}
        self._scaling: dict[tuple[str, str], set[str]] = {}
        self._deleted: OrderedDict[str, float] = OrderedDict()

    def tell(self, changed: Callable[[Object], None]) -> None:
        """Call ``changed`` with every object that is added, changed or dropped, whoever brings the news."""
        self._changed = changed

    def put(self, kind: Kind, obj: Object) -> bool:
        """Take an object unless a newer one is known or it was deleted; whether anything changed."""
        uid, version = uid_of(obj), version_of(obj)
        known = self._objects[kind].get(uid)
        if known is None and not self._admits(obj):
            return False
        if version <= self._deleted.get(uid, 0) or (known is not None and version_of(known) >= version):
            return False
        self._forget(kind, uid)
        obj = self._objects[kind][uid] = slim(kind, obj)
        self._named[kind][namespace_of(obj), name_of(obj)] = uid
        if (owner := owner_of(obj)) is not None:
            self._owned[kind].setdefault(owner["uid"], set()).add(uid)
        if kind is AUTOSCALER:
            self._scaling.setdefault((namespace_of(obj), scale_target(obj)), set()).add(uid)
        self._changed(obj)
        return True

    def remove(self, kind: Kind, uid: str, *, version: float = math.inf) -> bool:
        """Drop an object that was deleted, or ceased to match the selector, at ``version``; whether it was known."""
        known = self._objects[kind].get(uid)
        if known is not None and version_of(known) > version:
            return False
        self._deleted[uid] = version
        if len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        if known is not None:
            self._changed(known)
        return self._forget(kind, uid)

    def replace(
        self, kind: Kind, items: Iterable[Object], *, version: int, namespace: str | None = None
    ) -> list[Object]:
        """Take a list that was complete at ``version``: what it lacks and is not newer has been deleted.

        Watches alone do not suffice: what is deleted while a watch is down is never reported.

        Returns
        -------
        list
            Objects that changed or vanished.
        """
        items = list(items)
        changed = [obj for obj in items if self.put(kind, obj)]
        present = {uid_of(obj) for obj in items}
        ghosts = [
            obj
            for uid, obj in self._objects[kind].items()
            if uid not in present and version_of(obj) <= version and namespace in (None, namespace_of(obj))
        ]
        for obj in ghosts:
            self.remove(kind, uid_of(obj), version=version)
        return changed + ghosts

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        uid = self._named[kind].get((namespace, name))
        return None if uid is None else self._objects[kind][uid]

    def by_uid(self, kind: Kind, uid: str) -> Object | None:
        return self._objects[kind].get(uid)

    def owned(self, kind: Kind, owner_uid: str) -> list[Object]:
        """Objects controlled by the owner, by name."""
        uids = self._owned[kind].get(owner_uid, ())
        return sorted((self._objects[kind][uid] for uid in uids), key=name_of)

    def autoscalers(self, namespace: str, deployment: str) -> list[Object]:
        """What scales a Deployment, by name."""
        uids = self._scaling.get((namespace, deployment), ())
        return sorted((self._objects[AUTOSCALER][uid] for uid in uids), key=name_of)

    def all(self, kind: Kind) -> Iterator[Object]:
        return iter(list(self._objects[kind].values()))

    def _forget(self, kind: Kind, uid: str) -> bool:
        obj = self._objects[kind].pop(uid, None)
        if obj is None:
            return False
        name = namespace_of(obj), name_of(obj)
        if self._named[kind].get(name) == uid:  # an object of the same name may have followed already
            del self._named[kind][name]
        owner = owner_of(obj)
        if owner is not None:
            _drop(self._owned[kind], owner["uid"], uid)
        if kind is AUTOSCALER:
            _drop(self._scaling, (namespace_of(obj), scale_target(obj)), uid)
        return True


def _drop(index: dict[K, set[str]], key: K, uid: str) -> None:
    index[key].discard(uid)
    if not index[key]:
        del index[key]
