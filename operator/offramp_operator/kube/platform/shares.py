"""Who has how many of the workers of a WorkerClass that limits them, and what each service may plan of them.

All of it is read from the cache and kept until something there changes: a service at rest asks for nothing. What a
service is about to ask for counts from the moment of the write on, so that two never take the last worker together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import ClassShare
from offramp_core.control.workers.class_shares import ClassUse, next_shares, uses_of
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import (
    CLASS_LABEL,
    DEPLOYMENT,
    POD,
    POOL_LABEL,
    SERVICE,
    WORKER_CLASS,
    Kind,
    Object,
    classes_of,
    name_of,
    namespace_of,
)
from offramp_operator.kube.manifests import pool_name
from offramp_operator.kube.platform.memory import key_of
from offramp_operator.kube.pools import replicas_of
from offramp_operator.kube.shards import part_of
from offramp_operator.kube.trim import content
from offramp_operator.kube.watch import class_users, service_key
from offramp_operator.kube.worker_class import WorkerClass
from offramp_operator.shell.log import log_event
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.platform import ConflictError, ServiceKey

ENDED = ("Succeeded", "Failed")  # phases of pods that hold nothing any more


@dataclass(slots=True)
class _Limited:
    """A class with a limit: how each service uses it, and what follows, None where something has changed since."""

    most: int
    uses: dict[str, ClassUse] = field(default_factory=dict)
    shares: dict[str, ClassShare] | None = None
    before: Mapping[str, ClassShare] = field(default_factory=dict)
    #: Deployments and pods of each service that are labeled with the class, whatever the spec is now.
    marked: dict[ServiceKey, set[tuple[Kind, str]]] = field(default_factory=dict)


class ClassShares:
    """The shares of all services that this process knows.

    Parameters
    ----------
    shards : callable
        The shards that this process holds, and how many there are: others have services, and parts of every limit, of
        their own.
    """

    def __init__(
        self,
        cache: ObjectCache,
        *,
        shards: Callable[[], tuple[frozenset[int], int]] = lambda: (frozenset({0}), 1),
    ) -> None:
        self._cache = cache
        self._shards, self._known_shards = shards, shards()
        self._classes: dict[str, _Limited] = {}
        self._users: dict[ServiceKey, tuple[str, ...]] = {}
        self._asks: dict[ServiceKey, dict[str, int]] = {}
        self._failures: dict[str, str] = {}  # services and classes whose share cannot be computed, and why
        self._changed_classes = {name for _, name in cache.names(WORKER_CLASS)}
        self._changed = {ServiceKey(*user) for name in self._changed_classes for user in cache.of_class(name)}
        cache.subscribe(self._note)

    def _note(self, obj: Object) -> None:
        """Something has changed; most of it is about no class."""
        if obj.get("kind") == WORKER_CLASS.name:
            self._changed_classes.add(name_of(obj))
            self._changed.update(class_users(obj, self._cache))
        elif obj.get("kind") == SERVICE.name and (classes_of(obj) or service_key(obj) in self._users):
            self._changed.add(ServiceKey(namespace_of(obj), name_of(obj)))
        elif obj.get("kind") in (DEPLOYMENT.name, POD.name) and (key := service_key(obj)) is not None:
            had = any(key in limited.marked for limited in self._classes.values())
            if had or (obj["kind"] == DEPLOYMENT.name and key in self._users):
                self._changed.add(key)
            self._mark(key, obj)

    def _mark(self, key: ServiceKey, obj: Object) -> None:
        """Note what has workers of a class with a limit, or is one."""
        kind = DEPLOYMENT if obj["kind"] == DEPLOYMENT.name else POD
        limited = self._classes.get(_marks(obj).get(CLASS_LABEL, "")) if self._classes else None
        if limited is not None:
            limited.marked.setdefault(key, set()).add((kind, name_of(obj)))
            self._changed.add(key)

    # --- what a pass asks for ------------------------------------------------------------------------

    def of(self, service: Service) -> dict[str, ClassShare]:
        """What a service may have, by the pool; nothing of pools whose class has no limit."""
        key = key_of(service)
        if self._asks.pop(key, None) is not None:  # what was written is in the cache, and what was not is no more
            self._changed.add(key)
        self._refresh()
        found, has = dict[str, ClassShare](), {pool.name: pool.desired for pool in service.status.pools}
        for pool in service.spec.pools:
            if pool.class_name in self._classes and not pool.fixed:
                share = self._shares(pool.class_name).get(str(key))
                found[pool.name] = share or self._as_it_is(pool.class_name, has.get(pool.name, 0))
        return found

    def ask(self, service: Service, pools: Mapping[str, int]) -> None:
        """Take what a service is about to ask for, by pool.

        Raises
        ------
        ConflictError
            Another service has taken it since the pass began.
        """
        key, asked = key_of(service), dict[str, int]()
        for pool in service.spec.pools:
            if pool.class_name in self._classes and not pool.fixed:
                asked[pool.class_name] = asked.get(pool.class_name, 0) + pools.get(pool.name, 0)
        if not asked:
            return
        self._refresh()
        for name, n in asked.items():
            share = self._shares(name).get(str(key))
            has = self._classes[name].uses.get(str(key), ClassUse("", 0)).holds
            if n > max(has, 0 if share is None else share.now):
                raise ConflictError(f"another service has just taken a worker of WorkerClass {name}")
        self._asks[key] = {pool.name: pools.get(pool.name, 0) for pool in service.spec.pools}
        self._changed.add(key)

    def woken(self) -> set[ServiceKey]:
        """Whose share is another one than at the last call."""
        self._refresh()
        found = set()
        for name, limited in self._classes.items():
            shares = self._shares(name)
            if shares is not limited.before:
                for user, share in shares.items():
                    if _matters(limited.before.get(user), share, limited.uses[user]):
                        found.add(ServiceKey(*user.split("/", 1)))
                limited.before = shares
        return found

    # --- what is known -------------------------------------------------------------------------------

    def _shares(self, name: str) -> dict[str, ClassShare]:
        limited = self._classes[name]
        if limited.shares is None:
            most = part_of(limited.most, *self._known_shards)
            try:
                shares = next_shares(name, most, limited.uses.values())
            except Exception as error:
                self._log_failure(f"WorkerClass {name}", error)
                limited.shares = {user: self._as_it_is(name, use.holds) for user, use in limited.uses.items()}
            else:
                limited.shares = {user: replace(share, max_workers=limited.most) for user, share in shares.items()}
                self._failures.pop(f"WorkerClass {name}", None)
        return limited.shares

    def _as_it_is(self, name: str, holds: int) -> ClassShare:
        """The share of who has to stay as it is."""
        most = self._classes[name].most
        return ClassShare(class_name=name, max_workers=most, wanted=holds, most=holds, now=holds)

    def _refresh(self) -> None:
        """Read again what has changed."""
        if self._known_shards != self._shards():
            self._known_shards = self._shards()
            for limited in self._classes.values():
                limited.shares = None
        known = set(self._classes)
        for name in tuple(self._changed_classes):
            obj = self._cache.get(WORKER_CLASS, "", name)
            most = None if obj is None else WorkerClass.of(obj).max_workers
            if most is None:
                self._classes.pop(name, None)
            elif name not in self._classes:
                self._classes[name] = _Limited(most)
                self._changed.update(ServiceKey(*user) for user in self._cache.of_class(name))
            else:
                self._classes[name].most, self._classes[name].shares = most, None
            self._changed_classes.discard(name)
        if not known.issuperset(self._classes):
            for kind in (DEPLOYMENT, POD):
                for obj in self._cache.all(kind):
                    if (key := service_key(obj)) is not None:
                        self._mark(key, obj)
        for key in tuple(self._changed):
            self._read(key)
            self._changed.discard(key)  # only now: what cannot be read now is read at the next call

    def _read(self, key: ServiceKey) -> None:
        obj = self._cache.get(SERVICE, key.namespace, key.name)
        named = () if obj is None else classes_of(obj)
        self._users.pop(key, None)
        if named:
            self._users[key] = named
        else:
            self._asks.pop(key, None)
            self._failures.pop(str(key), None)
        uses = self._uses(key, obj if named else None)
        for name, known in self._classes.items():
            if known.uses.get(str(key)) != uses.get(name):
                known.shares = None
                known.uses.pop(str(key), None)
                if name in uses:
                    known.uses[str(key)] = uses[name]

    def _uses(self, key: ServiceKey, obj: Object | None) -> dict[str, ClassUse]:
        service = None
        try:
            if obj is not None and not obj["metadata"].get("deletionTimestamp"):
                service = service_from_manifest(obj)
        except (InvalidSpecError, InvalidArgumentError):  # its pass says so
            pass
        except Exception as error:
            self._log_failure(str(key), error)
        if service is None:  # what it has may still run
            return {name: ClassUse(str(key), n) for name in self._classes if (n := self._running(key, name))}
        holds = {pool.name: pool.desired for pool in service.status.pools} or {"": service.status.workers.desired}
        for pool in ("", *(pool.name for pool in service.spec.pools)):
            name = pool_name(key.name, pool) if pool else key.name
            there = self._cache.get(DEPLOYMENT, key.namespace, name)
            holds[pool] = max(holds.get(pool, 0), replicas_of(there), self._asks.get(key, {}).get(pool, 0))
        # Workers of an earlier spec: those that come in their place are the surge of an update.
        of_class, earlier = _classes_of_pools(service), dict[str, ClassUse]()
        for name in self._classes:
            pools = [pool for pool, class_name in of_class.items() if class_name == name]
            running = self._running(key, name, but=pools)
            more = running - sum(holds[pool] for pool in pools)
            if more > 0 and pools:
                holds[pools[0]] += more
            elif more > 0:
                earlier[name] = ClassUse(str(key), running)
        try:
            uses = uses_of(service, holds=holds, limited=self._classes)
        except Exception as error:
            self._log_failure(str(key), error)
            uses = _held(service, holds, self._classes)
        else:
            self._failures.pop(str(key), None)
        return {**earlier, **uses}

    def _running(self, key: ServiceKey, name: str, *, but: Collection[str] = ()) -> int:
        """Workers of a class that a service's Deployments ask for or that have not ended, by their labels, but those of
        some pools."""
        asked, there, marked = dict[str, int](), dict[str, int](), self._classes[name].marked
        for kind, called in tuple(marked.get(key, ())):
            obj = self._cache.get(kind, key.namespace, called)
            marks = {} if obj is None else _marks(obj)
            if obj is None or service_key(obj) != key or marks.get(CLASS_LABEL) != name:
                marked[key].discard((kind, called))
            elif (pool := marks.get(POOL_LABEL, "")) in but:
                continue
            elif kind is DEPLOYMENT:
                asked[pool] = asked.get(pool, 0) + replicas_of(obj)
            elif (obj.get("status") or {}).get("phase") not in ENDED:
                there[pool] = there.get(pool, 0) + 1
        if key in marked and not marked[key]:
            del marked[key]
        return sum(max(asked.get(pool, 0), there.get(pool, 0)) for pool in {*asked, *there})

    def _log_failure(self, name: str, error: Exception) -> None:
        """Log once that the share of one cannot be computed; all others go on."""
        if self._failures.get(name) != str(error):
            self._failures[name] = str(error)
            message = f"{name} keeps the workers that it has: its share cannot be computed: {error}"
            log_event("class-share-failed", message, level=logging.ERROR, error=error)


def _marks(obj: Object) -> Mapping[str, str]:
    """The labels of a pod, or of the pods of a Deployment where it has any of a class."""
    if obj.get("kind") == POD.name:
        return obj["metadata"].get("labels") or {}
    spec = content(obj)
    if CLASS_LABEL.encode() not in spec:  # most have none, and every change of each comes by here
        return {}
    return ((msgspec.json.decode(spec).get("template") or {}).get("metadata") or {}).get("labels") or {}


def _classes_of_pools(service: Service) -> dict[str, str]:
    """The class of each pool's workers; "" is where there are no pools."""
    return {pool.name: pool.class_name for pool in service.spec.pools} or {"": service.spec.class_name}


def _held(service: Service, holds: Mapping[str, int], limited: Collection[str]) -> dict[str, ClassUse]:
    """What a service has of each class, and would do nothing else with."""
    name, found = str(key_of(service)), dict[str, int]()
    for pool, class_name in _classes_of_pools(service).items():
        found[class_name] = found.get(class_name, 0) + holds[pool]
    return {class_name: ClassUse(name, n) for class_name, n in found.items() if class_name in limited}


def _matters(before: ClassShare | None, now: ClassShare, use: ClassUse) -> bool:
    """Whether a service has to be planned again: it has to give workers back, or may have those that it waits for."""
    if before is None:
        return False  # its pass has just begun
    may = min(now.most, use.taken) != min(before.most, use.taken)
    waits = use.holds < min(now.most, use.taken) and now.now > before.now
    return may or waits or (now.waited_for and not before.waited_for)
