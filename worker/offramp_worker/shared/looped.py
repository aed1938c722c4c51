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
        self._changed[engine] = name
        self._come()

    def _from_elsewhere(self, name: str, engine: InTurn) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.ask, name, engine)

    def _come(self) -> None:
        """Run a batch at the end of the loop's turn. From any thread."""
        if threading.get_ident() != self._thread:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._come)
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        self._renew_claims()
        first: dict[str, InTurn] = {}  # of one name there are two where one takes over from the other
        for engine in sorted(self._claims, key=lambda engine: self._claims[engine].due):
            first.setdefault(self._names[engine], engine)
        chosen = self._executor.begin({name: self._claims[engine] for name, engine in first.items()})
        if chosen is None:
            return
        self._changed[first[chosen]] = chosen
        try:
            first[chosen].take()
        finally:
            self._executor.give(chosen)

    def _renew_claims(self) -> None:
        """What those ask for now who have had a turn or a request since the last time."""
        for engine, name in self._changed.items():
            claim = engine.claim()
            if claim is None:
                self._claims.pop(engine, None)
                self._names.pop(engine, None)
            else:
                self._claims[engine], self._names[engine] = claim, name
        self._changed.clear()
