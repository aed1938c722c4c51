"""The objects of a service as a decision leaves them, once it has been carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offramp_core.control.objects import Config, Rollout, Service
from offramp_core.control.snapshot import Decision


@dataclass(frozen=True, slots=True)
class Objects:
    """A service and what belongs to it; rollouts in the order of their creation."""

    service: Service
    configs: Mapping[str, Config]
    rollouts: tuple[Rollout, ...]


def carried_out(before: Objects, decision: Decision, now: float) -> Objects:
    """What the platform stores after ``decision``: new objects, statuses, deletions."""
    configs = {
        **{new.name: Config(new.name, new.plan, new.status, now) for new in decision.new_configs},
        **before.configs,
    }
    configs = {
        name: replace(c, status=decision.config_statuses.get(name, c.status))
        for name, c in configs.items()
        if name not in decision.delete_configs
    }
    rollouts = {r.name: r for r in before.rollouts}
    if (new := decision.new_rollout) is not None and new.name not in rollouts:
        rollouts[new.name] = Rollout(
            new.name, new.from_config, new.to_config, new.cause, new.generation, created_at=now
        )
    return Objects(
        replace(before.service, status=decision.status),
        configs,
        tuple(
            replace(r, status=decision.rollout_statuses.get(name, r.status))
            for name, r in rollouts.items()
            if name not in decision.delete_rollouts
        ),
    )
