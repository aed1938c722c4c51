"""Relief: whether requests that name no budget are answered by the plan's thresholds for overload, and which of a batch
are. When, is :mod:`offramp_core.overload`; here are the queue's figures that it is asked with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from offramp_core.admission import Pace, QueueAdmission
from offramp_core.overload import LONGEST_SECONDS, Overload
from offramp_core.protocol import OVERLOAD
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.logs import log_event

if TYPE_CHECKING:
    from offramp_worker.engine.queue.batcher import Batch


class Relief:
    """One queue's. Use it under the queue's lock."""

    def __init__(self, pace: Pace, *, offered: Callable[[], bool], of_use: Callable[[Ticket], bool]) -> None:
        """``offered`` says whether the plan in force has thresholds for overload, ``of_use`` for which requests."""
        self._overload, self._offered, self._of_use = Overload(replace(pace, least=0.0)), offered, of_use
        self.timed_at = 0.0  # when a batch last told what everybody's plan takes

    @property
    def offered(self) -> bool:
        """Whether the plan in force has thresholds for overload; without, there is none any more."""
        if self._offered():
            return True
        if self.on:
            self._take(replace(self._overload, on=False))
        return False

    @property
    def on(self) -> bool:
        return self._overload.on

    @property
    def pace(self) -> Pace:
        """Of batches under overload."""
        return self._overload.pace

    @property
    def priority(self) -> int:
        """The most urgent one that has the larger budget."""
        return self._overload.priority

    @property
    def since(self) -> float:
        """When it began or ended last."""
        return self._overload.since

    def asked(self, door: QueueAdmission, ticket: Ticket, *, wait: float) -> bool:
        """A request would ``wait`` so long by the worst case of everybody's plan; whether there is overload."""
        if self._of_use(ticket):
            room, now = _room(door), ticket.admitted
            self._take(self._overload.asked(wait=wait, room=room, priority=ticket.priority, now=now))
        return self.on

    def came(self, door: QueueAdmission, *, rows: int, batch_rows: int, now: float) -> None:
        """A request of so many ``rows`` joins the queue."""
        usual = door.pace.average * door.pace.profile_seconds[batch_rows] / batch_rows
        self._overload = self._overload.came(rows * usual, now=now)

    def review(self, door: QueueAdmission, *, wait: float, now: float) -> QueueAdmission:
        """What waits and is no less urgent would take so long by the worst case of everybody's plan. The door from now
        on: what batches of that plan took is out of date after a while, and a stall may have spoiled it."""
        self._take(self._overload.judged(wait=wait, room=_room(door), now=now))
        if now - self.timed_at < LONGEST_SECONDS:
            return door
        return replace(door, pace=replace(door.pace, average=min(1.0, door.pace.average)))

    def after(self, *, rows: int, seconds: float) -> None:
        """A batch under the thresholds for overload kept the engine for so long."""
        self._overload = self._overload.after(rows=rows, seconds=seconds)

    def _take(self, overload: Overload) -> None:
        if overload.on != self._overload.on:
            log_event("overload-began" if overload.on else "overload-ended", level="warning")
        self._overload = overload


def may_have(ticket: Ticket, runtime: Runtime | None, active: Active) -> bool:
    """Whether the larger budget of overload will do for a request, and ``runtime`` has thresholds for it."""
    exits = None if runtime is None else runtime.tiers.get(OVERLOAD)
    if runtime is None or exits is None or exits.stopped or runtime.carry_on:
        return False
    promised = active.document.slices if active.document is not None else ()  # slices with a budget of their own
    return ticket.may_be_eased(budget=exits.budget) and ticket.slice_name not in promised


def ease(batch: Batch, runtime: Runtime, active: Active) -> bool:
    """Under overload, give the requests that begin in a batch the larger budget where that will do and they are not
    more urgent than those that had to wait; whether any row has it, from now or before.

    A request of several batches has one budget in all of them.
    """
    if batch.overload:
        for ticket, row in batch.owners:
            if row == 0 and ticket.priority >= batch.priority and may_have(ticket, runtime, active):
                ticket.tier = OVERLOAD
    return batch.eased


def _room(door: QueueAdmission) -> float:
    """How long an ordinary request may wait, of one row."""
    return door.room(door.pace.seconds[1])
