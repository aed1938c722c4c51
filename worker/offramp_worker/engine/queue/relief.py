"""Relief: whether requests that name no budget are answered by the plan's thresholds for overload, and which of a batch
are. When, is :mod:`offramp_core.overload`; here are the queue's figures that it is asked with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from offramp_core.admission import Forecast, Pace, QueueAdmission
from offramp_core.overload import Overload
from offramp_core.protocol import OVERLOAD
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.logs import log_event

if TYPE_CHECKING:
    from offramp_worker.engine.queue.batcher import Batch


class Relief:
    """One queue's. Use it under the queue's lock."""

    def __init__(self, pace: Pace, *, offered: Callable[[], bool]) -> None:
        """``offered`` says whether the plan in force has thresholds for overload."""
        self._overload, self._offered = Overload(replace(pace, least=0.0)), offered

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
    def since(self) -> float:
        """When it began or ended last."""
        return self._overload.since

    def asked(self, door: QueueAdmission, seen: Forecast, *, rows: int, batch_rows: int, now: float) -> bool:
        """A request of so many ``rows`` has come, with ``seen`` before it by the worst case of everybody's plan;
        whether there is overload."""
        usual = door.pace.average * door.pace.profile_seconds[batch_rows] / batch_rows
        came = self._overload.came(rows * usual, now=now)
        self._take(came.judged(wait=seen.wait, room=door.room(seen.own), now=now))
        return self.on

    def review(self, door: QueueAdmission, *, wait: float, now: float) -> None:
        """Nobody asks; the queue would take so long by the worst case of everybody's plan."""
        self._take(self._overload.judged(wait=wait, room=door.room(0.0), now=now))

    def after(self, *, rows: int, seconds: float) -> None:
        """A batch under the thresholds for overload kept the engine for so long."""
        self._overload = self._overload.after(rows=rows, seconds=seconds)

    def _take(self, overload: Overload) -> None:
        if overload.on != self._overload.on:
            log_event("overload-began" if overload.on else "overload-ended", level="warning")
        self._overload = overload


def ease(batch: Batch, runtime: Runtime, *, promised: Collection[str]) -> bool:
    """Give the requests that begin in a batch the larger budget of overload where that will do; whether any row has it.

    A request of several batches has one budget in all of them. ``promised`` are slices with a budget of their own.
    """
    exits = runtime.tiers.get(OVERLOAD)
    if exits is None or exits.stopped or runtime.carry_on:
        return False
    for ticket, row in batch.owners:
        if row == 0 and ticket.may_be_eased(budget=exits.budget) and ticket.slice_name not in promised:
            ticket.tier = OVERLOAD
    return any(ticket.eased for ticket, _ in batch.owners)
