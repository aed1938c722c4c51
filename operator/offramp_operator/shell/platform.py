"""What a shell must be able to do: the seam between decisions and the world they are carried out in.

Two platforms exist: Kubernetes (:mod:`offramp_operator.kube`) and this machine
(:mod:`offramp_operator.local`). Everything above this seam is the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offramp_core.control.objects import ConfigStatus, RolloutStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Event, Gathered, NewConfig, NewRollout, TrainingOrder
from offramp_core.protocol import PlanDocument, SignedDocument


@dataclass(frozen=True, slots=True, order=True)
class ServiceKey:
    """Which service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker needs to know whom to trust: raw Ed25519 public key (base64), SHA-256 (hex) of the admin token."""

    public_key: str
    token_sha256: str


class ConflictError(Exception):
    """Somebody else wrote first; the pass is abandoned and run again from fresh reads."""


class Platform(Protocol):
    """Side effects of one decision. Every method is idempotent; ``ConflictError`` abandons the pass."""

    async def gather(self, key: ServiceKey) -> Gathered | None:
        """Read a service and what it owns; None when it is gone (children go by owner reference)."""

    def changes(self, key: ServiceKey) -> int:
        """A number that differs whenever what :meth:`gather` would read may differ; a platform that cannot tell counts
        upwards."""

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        """Bring the workers to what ``service.spec`` asks for. Writes nothing when nothing differs."""

    async def create_config(self, service: Service, config: NewConfig) -> None:
        """Create a RampConfig; one of the same name is the same plan, so it is left alone."""

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None: ...

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None: ...

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None: ...

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None: ...

    async def delete_config(self, service: Service, name: str) -> None: ...

    async def delete_rollout(self, service: Service, name: str) -> None: ...

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        """Store the document where workers read it, only if the stored epoch is still ``previous_epoch`` (0: none)."""

    async def train(self, service: Service, order: TrainingOrder) -> None:
        """Begin training number ``order.attempt``, unless it has begun; :attr:`Gathered.training` tells what becomes of
        it.

        Asked only of platforms that can (:attr:`Gathered.can_train`).
        """

    async def emit(self, service: Service, event: Event) -> None: ...
