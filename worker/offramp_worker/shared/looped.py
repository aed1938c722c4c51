"""The event loop's own turns, in a worker with one processor: it runs one short batch at a time, and reads and replies
between two of them.

A thread for each engine would hand every request over and every answer back on a processor that is taken, and wait for
it each time. Whose batch is next is decided as everywhere, among all requests that have been read by then. Threads of
engines have audits left, which take turns like anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from offramp_core.sharing import Claim
from offramp_worker.engine.execution.turns import SharedExecutor
from offramp_worker.engine.in_turn import InTurn


class LoopTurns:
    """See the module. Make it in the thread of its event loop."""

    def __init__(self, executor: SharedExecutor) -> None:
        self._executor, self._loop, self._thread = executor, asyncio.get_running_loop(), threading.get_ident()
        self._claims: dict[InTurn, Claim] = {}  # of those that have requests
        self._changed: dict[InTurn, str] = {}  # whose claim is to be asked for, and its name
        self._names: dict[InTurn, str] = {}
        self._due = False
        executor.on_free = self._come

    def ask(self, name: str, engine: InTurn) -> None:
        """An engine has requests. From any thread."""
        if threading.get_ident() != self._thread:
            self._from_elsewhere(name, engine)
            return
        if engine.error is None:
            self._changed[engine] = name
            self._come()

    def _from_elsewhere(self, name: str, engine: InTurn) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.ask, name, engine)

    def _come(self) -> None:
        """Run a batch at the end of the loop's turn. From any thread."""
        if threading.get_ident() != self._thread:
            try:
                self._loop.call_soon_threadsafe(self._come)
            except RuntimeError:  # the loop is closed: only threads run
                self._executor.begin({})
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        while self._changed:  # of those who have had a turn or a request since the last time
            self._renew(*self._changed.popitem())
        first = self._first()
        chosen = self._executor.begin(self._asked(first))
        if chosen is None:
            return
        try:
            first[chosen].take()
        except Exception as error:
            self._drop(first[chosen], error)
        else:
            self._renew(first[chosen], chosen)
        self._executor.give(chosen, asked=self._asked(self._first()))

    def _first(self) -> dict[str, InTurn]:
        """Of one name there are two engines where one takes over from the other: the one that is due first."""
        first: dict[str, InTurn] = {}
        for engine in sorted(self._claims, key=lambda engine: self._claims[engine].due):
            first.setdefault(self._names[engine], engine)
        return first

    def _asked(self, first: dict[str, InTurn]) -> dict[str, Claim]:
        return {name: self._claims[engine] for name, engine in first.items()}

    def _renew(self, engine: InTurn, name: str) -> None:
        """What the engine asks for now."""
        try:
            claim = engine.claim()
        except Exception as error:
            self._drop(engine, error)
            return
        if claim is None:
            self._forget(engine)
        else:
            self._claims[engine], self._names[engine] = claim, name

    def _drop(self, engine: InTurn, error: Exception) -> None:
        """An engine is broken; the others go on."""
        self._forget(engine)
        engine.fail(error)

    def _forget(self, engine: InTurn) -> None:
        self._claims.pop(engine, None)
        self._names.pop(engine, None)
