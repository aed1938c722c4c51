"""One executor for several engines: whoever has the turn runs. Whose turn is next says
:mod:`offramp_core.sharing.turns`; here are the lock, the clock and those who wait."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from offramp_core.sharing import Claim, Shares, Turn, next_turn

AT_ONCE = Claim(due=-math.inf)  # of a probe, which tells whether an engine still works


@dataclass(slots=True, eq=False)
class _Waiting:
    claim: Claim
    granted: threading.Event = field(default_factory=threading.Event)


class SharedExecutor:
    """The turns of all engines. Safe for threads."""

    def __init__(self, weights: Mapping[str, float], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``weights`` are the shares of the engines by name."""
        self._lock, self._clock = threading.Lock(), clock
        self._shares = Shares(weights)
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._holder: str | None = None
        self._since = 0.0
        #: How long each engine has had the executor.
        self.seconds = dict.fromkeys(weights, 0.0)

    def turn(self, name: str) -> SharedTurn:
        """What the engine of this name takes before it runs anything."""
        return SharedTurn(self, name)

    def add(self, name: str, weight: float) -> None:
        """One engine more, or another share for one."""
        with self._lock:
            self._shares = replace(self._shares, weights={**self._shares.weights, name: weight})
            self.seconds.setdefault(name, 0.0)

    def turn_of(self, name: str) -> Turn:
        """What a batch of this engine, which has the turn, may take."""
        with self._lock:
            others_wait = any(other != name for other in self._waiting)
            return self._shares.turn_of(name, now=self._clock(), others_wait=others_wait)

    def take(self, name: str, claim: Claim) -> None:
        """Wait for a turn."""
        with self._lock:
            if self._holder is None:
                self._grant(name)
                return
            mine = _Waiting(claim)
            self._waiting.setdefault(name, deque()).append(mine)
        mine.granted.wait()

    def try_take(self, name: str) -> bool:
        """A turn for the event loop's thread: if nobody runs, and hardly anybody has of late. Requests that the loop
        does not read while it runs one model wait in the order in which they came, whosever turn it is."""
        with self._lock:
            if self._holder is not None or not self._shares.idles(now=self._clock()):
                return False
            self._grant(name)
            return True

    def give(self, name: str) -> None:
        """The turn is over: the next one begins."""
        with self._lock:
            now = self._clock()
            self.seconds[name] += now - self._since
            self._shares = self._shares.after(name, now - self._since, now=now)
            self._holder = None
            if not self._waiting:
                return
            claims = {name: line[0].claim for name, line in self._waiting.items()}
            chosen = next_turn(claims, self._shares, now=now)
            line = self._waiting[chosen]
            granted = line.popleft().granted
            if not line:
                del self._waiting[chosen]
            self._grant(chosen)
            granted.set()

    def _grant(self, name: str) -> None:
        self._holder, self._since = name, self._clock()


class SharedTurn:
    """The turns of one engine: a lock to whoever needs no more than that."""

    def __init__(self, executor: SharedExecutor, name: str) -> None:
        self._executor, self._name = executor, name

    @property
    def now(self) -> Turn:
        """What a batch may take now that this engine has the turn."""
        return self._executor.turn_of(self._name)

    @contextmanager
    def claimed(self, claim: Claim) -> Iterator[None]:
        """A turn, waited for with this claim."""
        self._executor.take(self._name, claim)
        try:
            yield
        finally:
            self._executor.give(self._name)

    def acquire(self, blocking: bool = True) -> bool:
        """As of a lock."""
        if not blocking:
            return self._executor.try_take(self._name)
        self._executor.take(self._name, AT_ONCE)
        return True

    def release(self) -> None:
        """As of a lock."""
        self._executor.give(self._name)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> Literal[False]:
        self.release()
        return False
