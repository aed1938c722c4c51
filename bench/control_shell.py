"""The control plane's shell without a platform: objects in memory, and decisions carried out in the order that they ask for."""

from __future__ import annotations

from dataclasses import replace

from offramp_core.control.objects import Config, Rollout, Service
from offramp_core.control.snapshot import Decision, Event
from offramp_core.protocol import PlanDocument


class MemoryShell:
    """A service, its objects and its published document, driven pass by pass. What delivers documents and tunes is up to the caller."""

    def __init__(self, service: Service, *, now: float = 1_000_000.0) -> None:
        self.service, self.now = service, now
        self.configs: dict[str, Config] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.published: PlanDocument | None = None
        self.events: list[Event] = []
        self.writes = 0  # of the service's status

    def store(self, decision: Decision) -> None:
        """Everything a decision asks for but delivery and tuning."""
        for new in decision.new_configs:
            self.configs.setdefault(new.name, Config(new.name, new.plan, new.status, self.now))
        for name, config_status in decision.config_statuses.items():
            self.configs[name] = replace(self.configs[name], status=config_status)
        if decision.new_rollout is not None:
            r = decision.new_rollout
            self.rollouts[r.name] = Rollout(
                r.name, r.from_config, r.to_config, r.cause, r.generation, created_at=self.now
            )
        for name, rollout_status in decision.rollout_statuses.items():
            self.rollouts[name] = replace(self.rollouts[name], status=rollout_status)
        self.writes += decision.status != self.service.status
        self.service = replace(self.service, status=decision.status)
        for name in decision.delete_configs:
            del self.configs[name]
        for name in decision.delete_rollouts:
            del self.rollouts[name]
        if decision.publish is not None:
            assert self.published is None or decision.publish.epoch > self.published.epoch
            self.published = decision.publish
        self.events += decision.events
