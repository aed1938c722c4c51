"""A WorkerPool as it was written, and as a service of the same workers would be: classes and templates are made for
those."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offramp_core.control.objects import Service
from offramp_core.control.shared_pool import SharedPoolSpec, SharedPoolStatus, parse_shared_pool
from offramp_core.control.spec import ServiceSpec
from offramp_operator.kube.kinds import Object, name_of, namespace_of, uid_of
from offramp_operator.shell.manifests import status_from_manifest


@dataclass(frozen=True, slots=True)
class SharedPool:
    """One pool."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: SharedPoolSpec
    status: SharedPoolStatus

    @classmethod
    def of(cls, obj: Object) -> SharedPool:
        """Raises :class:`InvalidSpecError` or :class:`InvalidArgumentError`; the message names the field."""
        spec, generation = parse_shared_pool(obj.get("spec")), int(obj["metadata"].get("generation", 1))
        return cls(
            namespace_of(obj), name_of(obj), uid_of(obj), generation, spec, status_from_manifest(SharedPoolStatus, obj)
        )

    @property
    def as_service(self) -> Service:
        spec = ServiceSpec(
            model_uri=f"pvc://{self.spec.claim}",
            latency_seconds=None,
            max_disagreement=0.0,
            protocols=("HTTP", "GRPC"),
            worker=self.spec.worker,
        )
        return Service(self.namespace, self.name, self.uid, self.generation, spec)

    def made_of(self, service: Service) -> SharedPool:
        """The pool with the workers of a service, to which a class may have added."""
        return replace(self, spec=replace(self.spec, worker=service.spec.worker))
