"""A service with everything that belongs to it, as one value that the renderers and decisions read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offramp_core.control.codec import parse_time
from offramp_core.control.objects import Condition, Config, Rollout, Service
from offramp_core.control.rollouts.rollout import awaits_approval
from offramp_operator.shell.manifests import config_from_manifest, rollout_from_manifest, service_from_manifest

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """One worker as its platform shows it: a pod, or a process."""

    name: str
    kind: str
    state: str
    detail: str = ""
    created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """``rollouts`` are oldest first. ``workers`` is None where they may not be read; ``note`` says what a reader must
    know of the source.

    ``manifests`` are the objects as stored, under the keys ``service``, ``configs`` and ``rollouts``.
    """

    service: Service
    configs: Mapping[str, Config]
    rollouts: tuple[Rollout, ...]
    workers: tuple[WorkerSeen, ...] | None = None
    created_at: float = 0.0
    note: str = ""
    manifests: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def stable(self) -> Config | None:
        return self.configs.get(self.service.status.stable_config)

    @property
    def active(self) -> Rollout | None:
        """The rollout under way."""
        return next((r for r in self.rollouts if not r.status.finished), None)

    @property
    def newest(self) -> Rollout | None:
        return self.rollouts[-1] if self.rollouts else None

    @property
    def candidate(self) -> Config | None:
        """What may become stable next: the canary, or a recommendation."""
        return self.configs.get(self.active.to_config) if self.active is not None else None

    @property
    def recommended(self) -> Rollout | None:
        """The rollout that waits for approval in mode Recommend."""
        active = self.active
        return active if active is not None and awaits_approval(active, self.service) else None

    def condition(self, kind: str) -> Condition | None:
        return next((c for c in self.service.status.conditions if c.type == kind), None)


def family(
    service: Manifest,
    *,
    configs: Iterable[Manifest],
    rollouts: Iterable[Manifest],
    workers: tuple[WorkerSeen, ...] | None = None,
    note: str = "",
) -> Family:
    """Parse a service and those of the objects that it owns.

    Raises
    ------
    InvalidSpecError, InvalidArgumentError
        An object cannot be understood; the message names the field.
    """
    uid = service["metadata"]["uid"]
    own_configs = [m for m in configs if _owned(m, uid)]
    own_rollouts = sorted((m for m in rollouts if _owned(m, uid)), key=_order)
    parsed = [config_from_manifest(m) for m in own_configs]
    return Family(
        service_from_manifest(service),
        {config.name: config for config in parsed},
        tuple(rollout_from_manifest(m) for m in own_rollouts),
        workers,
        created_at(service) or 0.0,
        note,
        {"service": service, "configs": own_configs, "rollouts": own_rollouts},
    )


def created_at(manifest: Mapping[str, Any]) -> float | None:
    """Seconds since the epoch."""
    text = manifest["metadata"].get("creationTimestamp")
    return parse_time(text) if isinstance(text, str) else None


def _owned(manifest: Manifest, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in manifest["metadata"].get("ownerReferences") or [])


def _order(manifest: Manifest) -> tuple[float, int, str]:
    """Kubernetes keeps whole seconds; the number at the end of the name decides between equals."""
    name = str(manifest["metadata"]["name"])
    number = name.rpartition("-")[2]
    return created_at(manifest) or 0.0, int(number) if number.isdigit() else 0, name
