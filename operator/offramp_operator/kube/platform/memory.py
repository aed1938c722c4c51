"""What is remembered of a service between passes. All of it can be lost: then everything is applied once more."""

from __future__ import annotations

from dataclasses import dataclass, field

from offramp_core.control.objects import ModelSource, Service
from offramp_core.control.snapshot import Scaling, TrainingReport, Trouble
from offramp_core.reasons import AnyReason
from offramp_operator.kube.kinds import Kind, Object
from offramp_operator.kube.worker_class import WorkerClass
from offramp_operator.shell.platform import ServiceKey

REFUSED_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Applied:
    """What was last applied to a child, and what the API server made of it: its fingerprint."""

    desired: str
    live: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the workers, or the route to them, cannot be brought to a generation. ``unreadable`` is what kept routes from
    being read then."""

    generation: int
    reason: AnyReason
    message: str
    retry_at: float
    unreadable: str = ""


@dataclass(slots=True)
class Memory:
    """One service. ``versions`` are the resource versions that the present pass decided on; its writes go through only
    on those."""

    uid: str
    #: Digests of the pods that a spec and its class ask for, by (trial, pool, image).
    templates: dict[tuple[bool, str, str], tuple[tuple[int, ModelSource, str], str | None]] = field(
        default_factory=dict
    )
    #: The class that all pods are made of, those of pools by their names, and why one that the spec names cannot be
    #: used.
    worker_class: WorkerClass | None = None
    pool_classes: dict[str, WorkerClass] = field(default_factory=dict)
    class_trouble: Trouble | None = None
    applied: dict[str, Applied] = field(default_factory=dict)
    problem: Problem | None = None
    route_problem: Problem | None = None
    #: When Deployments were found that are to go as soon as no Gateway sends them requests, by name.
    leaving_since: dict[str, float] = field(default_factory=dict)
    #: By which strategy, and since when, new pods of a pool find no place.
    placeless_since: dict[str, tuple[str, float]] = field(default_factory=dict)
    #: The user's autoscaler that was last seen.
    scaler: Scaling | None = None
    scaler_seen_at: float = 0.0
    #: The last training whose Job could not be made.
    refused: TrainingReport | None = None
    #: The pods that were brought back, by their digest.
    earlier: tuple[str, Object] | None = None
    #: The administrator's image that the pods are to have now.
    image: str = ""
    #: Digests of pods that stay as they are until the service's turn comes, by pool; "" where there are none.
    kept: dict[str, str | None] = field(default_factory=dict)
    versions: dict[tuple[Kind, str], str] = field(default_factory=dict)

    @property
    def class_mark(self) -> str:
        """Differs for every content of the classes in use; empty without one."""
        of_all = () if self.worker_class is None else (self.worker_class.mark,)
        return " ".join((*of_all, *(found.mark for found in self.pool_classes.values())))


class Memories:
    """The memories of all services."""

    def __init__(self) -> None:
        self._by_key: dict[ServiceKey, Memory] = {}

    def of(self, key: ServiceKey, uid: str | None = None) -> Memory:
        """The service's memory; a service of the same name but another uid starts anew."""
        memory = self._by_key.get(key)
        if memory is None or (uid is not None and memory.uid != uid):
            memory = self._by_key[key] = Memory(uid or "")
        return memory

    def of_service(self, service: Service) -> Memory:
        return self.of(key_of(service), service.uid)

    def forget(self, key: ServiceKey) -> None:
        self._by_key.pop(key, None)


def key_of(service: Service) -> ServiceKey:
    return ServiceKey(service.namespace, service.name)
