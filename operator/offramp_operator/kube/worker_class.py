"""What a WorkerClass adds to a service's workers: the administrator's image, devices and places, under a name that
services ask for.

Class and service never contradict each other: maps and lists add up, and a field that both have must say the same. What
cannot be had (no such class, no right to read classes, a contradiction) is a :class:`Refusal`; the workers that serve
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Trouble
from offramp_core.reasons import Reason
from offramp_operator.kube.kinds import Object, name_of, uid_of
from offramp_operator.kube.manifests import WorkerSettings

ADMINISTRATORS = ("image", "serviceAccountName")
"""What takes the place of the operator's own settings, and is never taken from a service's words."""
FIELDS = (
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "resources",
    "resourceClaims",
    "nodeSelector",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "tmp",
    "sharedMemory",
    "startupDeadline",
    "serviceAccountName",
)


@dataclass(frozen=True, slots=True)
class WorkerClass:
    """One class; ``mark`` differs for every content that it has had. ``max_workers`` is of all services together."""

    name: str
    mark: str
    fields: Mapping[str, Any]
    max_workers: int | None = None

    @classmethod
    def of(cls, obj: Object) -> WorkerClass:
        given = obj.get("spec") or {}
        mark = f"{uid_of(obj)}/{obj['metadata'].get('generation', 0)}"
        return cls(
            name_of(obj), mark, {name: given[name] for name in FIELDS if given.get(name)}, given.get("maxWorkers")
        )

    @property
    def image(self) -> str:
        return str(self.fields.get("image", ""))

    @property
    def service_account(self) -> str:
        return str(self.fields.get("serviceAccountName", ""))


def settings_for(found: WorkerClass | None, settings: WorkerSettings) -> WorkerSettings:
    """What the administrator decided about workers of a class, or of none."""
    if found is None:
        return settings
    return replace(settings, image=found.image or settings.image, service_account=found.service_account)


class ContradictionError(ValueError):
    """Class and service say two things about one field; the message is its path."""


def with_class(
    service: Service, found: WorkerClass | None, of_pools: Mapping[str, WorkerClass] | None = None
) -> Service | Trouble:
    """The service with what its class adds to ``spec.worker`` and to that of each pool, and what those of pools (by
    their names) add there."""
    spec, of_pools = service.spec, of_pools or {}
    if found is None and not of_pools:
        return service
    workers = {"spec.worker": spec.worker, **{f"spec.pools[{i}]": pool.worker for i, pool in enumerate(spec.pools)}}
    other_image = next((f"{where}.image" for where, worker in workers.items() if worker.get("image")), "")
    if found is not None and found.image and other_image:
        return _contradiction(found.name, other_image)
    if found is not None and found.max_workers is not None and _shared_by_pools(service):
        return _several_pools(found.name)
    where, of_all = "spec.worker", _for_services(found)
    try:
        worker, pools = _both(of_all, spec.worker), []
        for i, pool in enumerate(spec.pools):
            where, own = f"spec.pools[{i}]", of_pools.get(pool.name)
            if own is not None and (field := next((name for name in ADMINISTRATORS if own.fields.get(name)), "")):
                return _only_for_all(own.name, where, field)
            pools.append(replace(pool, worker=_both(_for_services(own), _both(of_all, pool.worker))))
    except ContradictionError as error:
        return _contradiction(" or ".join(c.name for c in (found, *of_pools.values()) if c), f"{where}.{error}")
    return replace(service, spec=replace(spec, worker=worker, pools=tuple(pools)))


def _for_services(found: WorkerClass | None) -> dict[str, Any]:
    given = {} if found is None else found.fields
    return {name: value for name, value in given.items() if name not in ADMINISTRATORS}


def _both(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**own, **{name: _sum(value, own.get(name), name) for name, value in fields.items()}}


def _sum(given: Any, own: Any, path: str) -> Any:
    if own is None or own == given:
        return given
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        both = {key: _sum(value, own.get(key), f"{path}.{key}") for key, value in given.items()}
        return {**own, **both}
    if isinstance(given, list) and isinstance(own, list):
        return [*given, *(_new(entry, given, path) for entry in own if entry not in given)]
    raise ContradictionError(path)


def _new(entry: Any, given: list[Any], path: str) -> Any:
    """An entry of the service's that the class does not have. Names are there once: two entries of one name contradict
    each other."""
    name = entry.get("name") if isinstance(entry, Mapping) else None
    if name is not None and any(isinstance(other, Mapping) and other.get("name") == name for other in given):
        raise ContradictionError(f"{path}[{name}]")
    return entry


def _contradiction(name: str, path: str) -> Trouble:
    message = f"{path} says something else than WorkerClass {name}; remove it, or have the class changed"
    return Trouble(Reason.WORKER_CLASS_CONTRADICTED, message)


def _only_for_all(name: str, where: str, field: str) -> Trouble:
    message = (
        f"{where}.className: WorkerClass {name} says {field}, which holds for all pools; name a class that says it in "
        "spec.worker.className, and one without it here"
    )
    return Trouble(Reason.WORKER_CLASS_CONTRADICTED, message)


def _shared_by_pools(service: Service) -> bool:
    """Whether several pools that the operator plans are of the class of ``spec.worker``."""
    own = [pool for pool in service.spec.pools if pool.class_name == service.spec.class_name and not pool.fixed]
    return len(own) > 1


def _several_pools(name: str) -> Trouble:
    message = (
        f"spec.worker.className: WorkerClass {name} has maxWorkers, and several pools would share them; name a class "
        "of its own in the className of each of spec.pools"
    )
    return Trouble(Reason.WORKER_CLASS_CONTRADICTED, message)
