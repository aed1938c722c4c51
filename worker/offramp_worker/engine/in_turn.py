"""An engine that shares its executor: what its thread does when a turn has come, or the event loop in its place.

A batch is cut once its turn has come, not when it is asked for, and is a short one where others use the executor.
Audits are work that nobody waits for.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from offramp_core.batching import WAITING, exact_seconds
from offramp_core.sharing import Claim, Turn
from offramp_worker.devices import CPU
from offramp_worker.engine.execution.turns import SharedTurn

if TYPE_CHECKING:
    from offramp_worker.engine.engine import Engine

AUDITS = Claim(due=math.inf)
CLOSING_SECONDS = 0.05  # between two looks whether the event loop has run what was left


class InTurn:
    """See the module. ``run`` is the thread's; where ``in_loop``, the event loop asks for turns and takes them."""

    def __init__(self, engine: Engine, turn: SharedTurn, batching: str, *, loop_rows: int) -> None:
        """``loop_rows``: the most rows that may keep the event loop; the processor that they run on is the loop's.
        By the name of its ``batching`` requests may wait for a batch to fill, which the loop does not come back for."""
        self._engine, self._turn, self._loop_rows = engine, turn, loop_rows
        seconds = exact_seconds(engine.bundle.profile)
        self._most = {each: each.rows(seconds) for each in Turn}
        here = engine.bundle.device.name == CPU.name and not engine.at_edge and batching not in WAITING
        self.in_loop = turn.in_loop and loop_rows > 0 and here
        #: What broke the engine in the event loop.
        self.error: Exception | None = None

    def run(self) -> None:
        """Until the engine has been closed, and all is done."""
        if self.in_loop:
            self._run_beside_loop()
        else:
            self._run()

    def _run(self) -> None:
        engine, batcher, desk = self._engine, self._engine._batcher, self._engine.desk
        while True:
            idle = len(desk) == 0 or engine._audits_wait
            claim = self.claim(wait=idle)
            if claim is None and (idle or engine._abandon_audits):
                if batcher.finished:
                    return
                continue
            with self._turn.claimed(claim or AUDITS):
                self._take(audit=not idle and not engine._abandon_audits)
                while (claim := self.claim()) is not None:  # who has more to run asks before the turn is over
                    self._turn.again(claim)
                    self._take(audit=False)

    def _take(self, *, audit: bool) -> None:
        """Run a batch, or an audit where there is none, and an audit as well where too many wait."""
        engine, desk = self._engine, self._engine.desk
        batch = engine._batcher.take(wait=False, most=self._most[self._turn.now])
        if batch is not None:
            engine._run_batch(batch)
        elif audit:
            desk.step()
        self._audit_if_pressed()

    def _audit_if_pressed(self) -> None:
        if self._engine.desk.pressing and not self._engine._audits_wait:
            self._engine.desk.step()

    def _run_beside_loop(self) -> None:
        """Audits, and requests that came back from elsewhere."""
        engine, batcher, desk = self._engine, self._engine._batcher, self._engine.desk
        while True:
            if self.error is not None:
                raise self.error  # the thread's end tells that the engine is of no use
            if len(desk) and not engine._audits_wait and not engine._abandon_audits:
                with self._turn.claimed(AUDITS):
                    desk.step()
                continue
            if batcher.finished:
                return
            batcher.rest()
            if batcher.rows:
                self.ask()
            if batcher.closed:
                time.sleep(CLOSING_SECONDS)

    def ask(self) -> None:
        """There are requests for the event loop to run. From any thread."""
        self._turn.ask(self)

    def claim(self, *, wait: bool = False) -> Claim | None:
        """What the next batch asks for; None where nothing is queued."""
        engine = self._engine
        claim = engine._batcher.claim(wait=wait)
        engine._replies.give_up(engine._batcher.given_up())
        return claim

    def take(self) -> None:
        """Run a batch in the event loop's thread, which has the turn."""
        engine = self._engine
        batch = engine._batcher.take(wait=False, most=min(self._most[self._turn.now], self._loop_rows))
        if batch is not None:
            engine._run_batch(batch)
        self._audit_if_pressed()
        if len(engine.desk):
            engine.wake()

    def fail(self, error: Exception) -> None:
        """The engine is broken. From the event loop."""
        self.error = error
        self._engine.wake()
