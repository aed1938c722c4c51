"""An engine without HTTP whose plans arrive at a real desk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import bundles
import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from engines import new_engine
from processes import KEY, SERVICE_UID, document, eventually, plan_for, sign

from offramp_core.plan import Plan
from offramp_core.protocol import PlanCounts
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.classifier import ClassifierPlans
from offramp_worker.plans.memory import PlanMemory

SHARE = 0.25
EVERYBODY_LEAVES = {"r00-grid": "1"}


class Service:
    """An engine and the desk where plans arrive; every reading of the clock is a millisecond later."""

    def __init__(
        self, folder: Path, bundle: Bundle, sessions: Sessions, *, memory: PlanMemory | None = None, **options: Any
    ) -> None:
        self.folder, self.done, ticks, self.fences = folder, list[Ticket](), itertools.count(), 9.0
        self.engine = new_engine(
            bundle,
            sessions,
            uid="w",
            boot_id="boot",
            deliver=self.done.extend,
            **{"clock": lambda: next(ticks) * 1e-3, **options},
        )
        public = KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.desk = PlanDesk(ClassifierPlans(self.engine), public_key=public, service_uid=SERVICE_UID, memory=memory)
        self.engine.start()

    def run(self, stable: Plan, **fields: Any) -> None:
        fields = {"holdback_share": SHARE, "accuracy_budget": 0.99, "epoch": self.engine.active.epoch + 1, **fields}
        self.engine.renew_lease()  # the control plane has spoken to this process
        self.desk.deliver(sign(document(stable, **fields)))

    def plan(self, thresholds: dict[str, str] | None = None, **options: Any) -> Plan:
        return plan_for(self.folder, EVERYBODY_LEAVES if thresholds is None else thresholds, **options)

    def serve(self, n: int, *, seed: int = 1, **asked: Any) -> list[Ticket]:
        """``n`` batches of one row, answered, audited and counted."""
        tickets = []
        for row in bundles.inputs(n, seed=seed):
            ticket = self.engine.submit(row[None], **{"never_exit": False, **asked})
            eventually(lambda t=ticket: t.cached or t in self.done, what="a reply")
            tickets.append(ticket)
        self.fences += 1  # another input each time: no cache knows it
        fence = self.engine.submit(np.full_like(tickets[0].x, self.fences), never_exit=True)
        eventually(lambda: fence in self.done, what="the fence")
        counters = self.engine.counters
        eventually(
            lambda: all(c.drawn == c.audited for c in (*counters.snapshot(), *counters.held_back())), what="audits"
        )
        return tickets

    def counts(self, arm: str, epoch: int = 1) -> Any:
        found = (*self.engine.counters.snapshot(), *self.engine.counters.held_back())
        return next(c for c in found if (c.epoch, c.arm) == (epoch, arm))

    @property
    def measured(self) -> PlanCounts:
        return self.engine.counters.plans()[-1]
