"""A WorkerPool: what its spec says, and what its status tells, to people and to the services that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import Condition
from offramp_core.control.spec import parse_size
from offramp_core.errors import InvalidSpecError
from offramp_core.protocol import ModelStanding

MOST_WORKERS = 64
MOST_SERVICES = 1000  # of a pool; a worker takes no longer list, and the status has room for no more


@dataclass(frozen=True, slots=True)
class SharedPoolSpec:
    """``worker`` is the template of its workers, as that of a service. Each has ``memory_bytes`` for models, whose
    bundles lie in ``claim``."""

    memory_bytes: int
    claim: str
    worker: Mapping[str, Any]
    min_workers: int = 1
    max_workers: int = 1


@dataclass(frozen=True, slots=True)
class HeldService:
    """How a service stands in one worker. ``mark`` is of what serves, ``message`` why something does not,
    ``load_millis`` what its last load took."""

    name: str
    uid: str
    standing: ModelStanding
    model: str = ""
    mark: str = ""
    message: str = ""
    load_millis: int = 0


@dataclass(frozen=True, slots=True)
class SharedWorker:
    """One worker. ``slot`` is its place among those that the pool needs; -1 where it is not needed."""

    name: str
    uid: str
    slot: int = -1
    ready: bool = False
    services: tuple[HeldService, ...] = ()


@dataclass(frozen=True, slots=True)
class PooledService:
    """A service of the pool: how many workers hold it and serve, in how many of those it is ``unloaded`` until a
    request comes, what it takes in memory (0 before that is known) and of an executor's time, and why it has no place.
    ``mark`` is of what that is known of."""

    name: str
    uid: str
    workers: int = 0
    unloaded: int = 0
    bytes: int = 0
    busy_millis: int = 0
    model: str = ""
    mark: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class SharedPoolStatus:
    """``epoch`` is that of the newest lists of models, ``lists`` a digest of what they say."""

    observed_generation: int = 0
    epoch: int = 0
    lists: str = ""
    slots: int = 0
    summary: str = ""
    placed: str = ""
    workers: tuple[SharedWorker, ...] = ()
    services: tuple[PooledService, ...] = ()
    conditions: tuple[Condition, ...] = ()


def parse_shared_pool(value: Any) -> SharedPoolSpec:
    """``WorkerPool.spec``; the CRD refuses the same mistakes before.

    Raises
    ------
    InvalidSpecError
        ``field`` is the JSON path of the first mistake.
    """
    if not isinstance(value, Mapping):
        raise InvalidSpecError("spec", f"must be an object, got {value!r}")
    bundles, worker = value.get("bundles"), value.get("worker") or {}
    claim = bundles.get("claimName") if isinstance(bundles, Mapping) else None
    if not isinstance(claim, str) or not claim:
        raise InvalidSpecError("spec.bundles.claimName", "name the PersistentVolumeClaim that the bundles lie in")
    if not isinstance(worker, Mapping):
        raise InvalidSpecError("spec.worker", f"must be an object, got {worker!r}")
    fewest = _number(value, "minWorkers", 1, low=1)
    return SharedPoolSpec(
        memory_bytes=parse_size(value.get("memory"), "spec.memory"),
        claim=claim,
        worker=worker,
        min_workers=fewest,
        max_workers=_number(value, "maxWorkers", fewest, low=fewest),
    )


def _number(value: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    given = value.get(name, default)
    if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= MOST_WORKERS:
        raise InvalidSpecError(f"spec.{name}", f"must be a whole number from {low} to {MOST_WORKERS}; got {given!r}")
    return given
