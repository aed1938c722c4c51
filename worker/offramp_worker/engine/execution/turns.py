"""One executor for several engines: whoever has the turn runs. Whose turn is next says
:mod:`offramp_core.sharing.turns`; here are the lock, the clock and those who wait: threads of engines, and the event
loop's thread, which asks for several engines at once and must not sleep."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from offramp_core.sharing import Claim, Shares, Turn, next_turn

if TYPE_CHECKING:
    from offramp_worker.engine.in_turn import InTurn

Ask = Callable[[str, "InTurn"], None]
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
        self._asked: Mapping[str, Claim] = {}  # by the event loop
        #: Called, from any thread, once the event loop may ask again.
        self.on_free: Callable[[], None] = lambda: None
        self._holder: str | None = None
        self._since = self._behind = 0.0  # since when it runs, and what waits behind what it runs
        #: Since when the event loop reads and refuses though requests wait, and for whom. Where that is for nobody yet,
        #: the time counts for whoever is next.
        self._between: float | None = None
        self._reader: str | None = None
        #: How long each engine has had the executor.
        self.seconds = dict.fromkeys(weights, 0.0)

    def turn(self, name: str, *, ask: Ask | None = None) -> SharedTurn:
        """What the engine of this name takes before it runs anything."""
        return SharedTurn(self, name, ask=ask)

    def add(self, name: str, weight: float) -> None:
        """One engine more, or another share for one."""
        with self._lock:
            self._shares = replace(self._shares, weights={**self._shares.weights, name: weight})
            self.seconds.setdefault(name, 0.0)

    def read(self, name: str) -> None:
        """The event loop has a request for this engine, and does what it takes to admit or refuse it."""
        with self._lock:
            if self._between is not None:
                self._read_on()
                self._reader = name

    def turn_of(self, name: str) -> Turn:
        """What a batch of this engine, which has the turn, may take."""
        with self._lock:
            others_wait = any(other != name for other in (*self._waiting, *self._asked))
            return self._shares.turn_of(name, now=self._clock(), others_wait=others_wait, behind=self._behind)

    def take(self, name: str, claim: Claim) -> None:
        """Wait for a turn. Whom the event loop asks for may come first though nobody runs at the moment."""
        with self._lock:
            if self._holder is None and not self._asked:
                self._grant(name, claim)
                return
            granted = self._join(name, claim)
            loops = self._holder is None and self._loop_is_next()
        if loops:
            self.on_free()
        granted.wait()

    def again(self, name: str, claim: Claim) -> None:
        """The turn is over, and the engine has more to run: the others come first only where their turn it is."""
        with self._lock:
            granted = self._join(name, claim)
            loops = self._end(name)
        if loops:
            self.on_free()
        granted.wait()

    def try_take(self, name: str) -> bool:
        """A turn for the event loop's thread: if nobody runs, and hardly anybody has of late. Requests that the loop
        does not read while it runs one model wait in the order in which they came, whosever turn it is."""
        with self._lock:
            if self._holder is not None or self._asked or not self._shares.idles(now=self._clock()):
                return False
            self._grant(name, AT_ONCE)
            return True

    def begin(self, asked: Mapping[str, Claim]) -> str | None:
        """A turn for the event loop: the engine of these that runs now. None where another one comes first: ``on_free``
        is called when to ask again."""
        with self._lock:
            self._asked = asked
            if self._holder is not None:
                return None
            self._read_on()
            since, self._between = self._between, None
            chosen = self._chosen()
            if chosen is None or self._wakes(chosen):
                return None
            self._grant(chosen, asked[chosen])
            self._since = self._since if since is None else since
            return chosen

    def give(self, name: str, *, asked: Mapping[str, Claim] | None = None) -> None:
        """The turn is over: the next one begins. ``asked``: for whom the event loop, whose turn it was, asks now."""
        with self._lock:
            if asked is not None:
                self._asked = asked
            loops = self._end(name)
        if loops:
            self.on_free()

    def _end(self, name: str) -> bool:
        """Whether the event loop is next."""
        now = self._clock()
        self._count(name, now - self._since, now)
        self._holder, self._between = None, None
        if not self._loop_is_next():
            return False
        self._between, self._reader = now, None
        return True

    def _read_on(self) -> None:
        """What the event loop did until now counts for whose request it was."""
        if self._between is not None and self._reader is not None:
            now = self._clock()
            self._count(self._reader, now - self._between, now)
            self._between = now

    def _count(self, name: str, seconds: float, now: float) -> None:
        self.seconds[name] += seconds
        self._shares = self._shares.after(name, seconds, now=now)

    def _join(self, name: str, claim: Claim) -> threading.Event:
        """Wait in line; what tells that the turn has come."""
        mine = _Waiting(claim)
        self._waiting.setdefault(name, deque()).append(mine)
        return mine.granted

    def _loop_is_next(self) -> bool:
        """If not, the thread that is has its turn now, where there is one."""
        chosen = self._chosen()
        return chosen is not None and not self._wakes(chosen)

    def _chosen(self) -> str | None:
        claims = {**self._asked, **{name: line[0].claim for name, line in self._waiting.items()}}
        for name in self._asked.keys() & self._waiting.keys():  # a request comes before an audit
            claims[name] = min(self._asked[name], claims[name], key=lambda claim: claim.due)
        return next_turn(claims, self._shares, now=self._clock()) if claims else None

    def _wakes(self, name: str) -> bool:
        """Give the turn to the thread that waits for this engine; False where it is the event loop's."""
        line = self._waiting.get(name)
        if not line or (name in self._asked and self._asked[name].due <= line[0].claim.due):
            return False
        first = line.popleft()
        if not line:
            del self._waiting[name]
        self._grant(name, first.claim)
        first.granted.set()
        return True

    def _grant(self, name: str, claim: Claim) -> None:
        self._holder, self._since, self._behind, self._between = name, self._clock(), claim.behind, None


class SharedTurn:
    """The turns of one engine: a lock to whoever needs no more than that. ``ask`` has the event loop run batches."""

    def __init__(self, executor: SharedExecutor, name: str, *, ask: Ask | None = None) -> None:
        self._executor, self._name, self._ask = executor, name, ask

    @property
    def in_loop(self) -> bool:
        """Whether the event loop runs short batches, one by one."""
        return self._ask is not None

    def ask(self, engine: InTurn) -> None:
        """Have the event loop run what this engine has."""
        assert self._ask is not None
        self._ask(self._name, engine)

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

    def again(self, claim: Claim) -> None:
        """End this turn and wait for another one, with this claim."""
        self._executor.again(self._name, claim)

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
