"""The WorkerClass that a service asks for: found, and put together with what the service itself says of its workers."""

from __future__ import annotations

import logging

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Trouble
from offramp_core.reasons import Reason
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import WORKER_CLASS
from offramp_operator.kube.platform.memory import Memory, key_of
from offramp_operator.kube.worker_class import WorkerClass, with_class
from offramp_operator.shell.log import log_event


class Classes:
    """Reads classes from the cache; writes nothing."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache

    def applied(self, service: Service, memory: Memory) -> Service:
        """The service with what its class adds. Where that cannot be had, the service alone, and ``memory`` says
        why."""
        found = self._found(service.spec.class_name, "spec.worker")
        of_pools = self._of_pools(service)
        troubles = [each for each in (found, *of_pools.values()) if isinstance(each, Trouble)]
        classes = {name: each for name, each in of_pools.items() if isinstance(each, WorkerClass)}
        of_all = found if isinstance(found, WorkerClass) else None
        made = troubles[0] if troubles else with_class(service, of_all, classes)
        before, mark = memory.class_trouble, memory.class_mark
        memory.class_trouble = made if isinstance(made, Trouble) else None
        memory.worker_class = of_all if memory.class_trouble is None else None
        memory.pool_classes = classes if memory.class_trouble is None else {}
        if memory.class_mark != mark:
            memory.problem = None  # what was refused is not what is asked for now
        if memory.class_trouble is not None and memory.class_trouble != before:
            key, trouble = str(key_of(service)), memory.class_trouble
            log_event(
                "worker-class-refused",
                f"{key}: {trouble.message}",
                level=logging.WARNING,
                service=key,
                reason=trouble.reason,
            )
        return service if isinstance(made, Trouble) else made

    def _of_pools(self, service: Service) -> dict[str, WorkerClass | Trouble | None]:
        """The classes that pools name themselves, by the pool."""
        spec = service.spec
        return {
            pool.name: self._found(pool.class_name, f"spec.pools[{i}]")
            for i, pool in enumerate(spec.pools)
            if pool.class_name != spec.class_name
        }

    def _found(self, name: str, where: str) -> WorkerClass | Trouble | None:
        if not name:
            return None
        if unreadable := self._cache.unreadable(WORKER_CLASS, ""):
            message = f"{where}.className: WorkerClass {name} cannot be read: {unreadable}"
            return Trouble(Reason.WORKER_CLASSES_UNREADABLE, message)
        obj = self._cache.get(WORKER_CLASS, "", name)
        if obj is None:
            message = f"{where}.className: there is no WorkerClass {name}; make it, or name another one"
            return Trouble(Reason.WORKER_CLASS_NOT_FOUND, message)
        return WorkerClass.of(obj)
