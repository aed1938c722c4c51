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
        found = self._found(service)
        made = found if isinstance(found, Trouble) else with_class(service, found)
        before, mark = memory.class_trouble, memory.class_mark
        memory.class_trouble = made if isinstance(made, Trouble) else None
        memory.worker_class = found if isinstance(found, WorkerClass) and memory.class_trouble is None else None
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

    def _found(self, service: Service) -> WorkerClass | Trouble | None:
        name = service.spec.class_name
        if not name:
            return None
        if unreadable := self._cache.unreadable(WORKER_CLASS, ""):
            message = f"spec.worker.className: WorkerClass {name} cannot be read: {unreadable}"
            return Trouble(Reason.WORKER_CLASSES_UNREADABLE, message)
        obj = self._cache.get(WORKER_CLASS, "", name)
        if obj is None:
            message = f"spec.worker.className: there is no WorkerClass {name}; make it, or name another one"
            return Trouble(Reason.WORKER_CLASS_NOT_FOUND, message)
        return WorkerClass.of(obj)
