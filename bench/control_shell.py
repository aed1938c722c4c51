"""The control plane's shell without a platform: objects in memory, and decisions carried out in the order that they ask
for."""

from __future__ import annotations

from offramp_core.control.objects import Config, Rollout, Service
from offramp_core.control.outcome import Objects, carried_out
from offramp_core.control.snapshot import Decision, Event
from offramp_core.control.stable.watch import Watch
from offramp_core.protocol import PlanDocument


class MemoryShell:
    """A service, its objects and its published document, driven pass by pass. What delivers documents and tunes is up
    to the caller."""

    def __init__(self, service: Service, *, now: float = 1_000_000.0) -> None:
        self.service, self.now = service, now
        self.configs: dict[str, Config] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.published: PlanDocument | None = None
        self.watch: Watch | None = None
        self.events: list[Event] = []
        self.writes = 0  # of the service's status

    def store(self, decision: Decision) -> None:
        """Everything a decision asks for but delivery and tuning."""
        self.watch = decision.watch
        after = carried_out(Objects(self.service, self.configs, tuple(self.rollouts.values())), decision, self.now)
        self.writes += after.service.status != self.service.status
        self.service, self.configs = after.service, dict(after.configs)
        self.rollouts = {rollout.name: rollout for rollout in after.rollouts}
        if decision.publish is not None:
            assert self.published is None or decision.publish.epoch > self.published.epoch
            self.published = decision.publish
        self.events += decision.events
