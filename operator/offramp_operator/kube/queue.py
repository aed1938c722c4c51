"""A work queue of keys: each key at most once in the queue and at most once in work.

:class:`Schedule` decides what is due, purely; :class:`WorkQueue` runs it on asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 60.0

K = TypeVar("K", bound=Hashable)


class Schedule(Generic[K]):
    """Which key is due when. Time is an argument, so nothing here waits.

    A key that is added while it is in work is due again once the work is done. Of several times asked for one
    key the earliest counts.
    """

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()  # ties are served in the order they came
        self._running: dict[K, float] = {}
        self._failures: dict[K, int] = {}

    def add(self, key: K, *, at: float) -> None:
        """Make ``key`` due at time ``at``, unless it is due earlier already."""
        if at < self._due.get(key, math.inf):
            self._due[key] = at
            if key not in self._running:
                heapq.heappush(self._heap, (at, next(self._order), key))

    def take(self, now: float) -> K | None:
        """The key that has been due longest, now in work; None when nothing is due."""
        self._drop_superseded()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._running[key] = now
        return key

    def done(self, key: K) -> None:
        """The work on ``key`` has ended, well or not."""
        del self._running[key]
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], next(self._order), key))

    def succeeded(self, key: K) -> None:
        """Forget earlier failures."""
        self._failures.pop(key, None)

    def failed(self, key: K, *, now: float, jitter: float, at_least: float = 0.0) -> float:
        """Make a failed key due again; returns the seconds until then.

        Parameters
        ----------
        jitter : float
            In [0, 1); spreads keys that failed together over the upper half of the backoff.
        at_least : float
            Seconds that whoever refused asked for.
        """
        count = self._failures[key] = self._failures.get(key, 0) + 1
        backoff = min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(count - 1, 10))
        wait = max(at_least, backoff * (0.5 + 0.5 * jitter))
        self.add(key, at=now + wait)
        return wait

    def next_at(self) -> float | None:
        """When the next key becomes due; None when none waits (for anything but its own work)."""
        self._drop_superseded()
        return self._heap[0][0] if self._heap else None

    @property
    def n_running(self) -> int:
        """Keys in work."""
        return len(self._running)

    def longest_running_seconds(self, now: float) -> float:
        """Age of the oldest work under way; 0 when none is."""
        return max((now - since for since in self._running.values()), default=0.0)

    def __len__(self) -> int:
        return len(self._due)

    def _drop_superseded(self) -> None:
        while self._heap and (self._heap[0][2] in self._running or self._due.get(self._heap[0][2]) != self._heap[0][0]):
            heapq.heappop(self._heap)


class WorkQueue(Generic[K]):
    """Runs ``work`` for every key that is due, several keys at once but never the same.

    Parameters
    ----------
    work : callable
        Returns the seconds after which the key is due again, or None when it need not come back. What it raises means
        failed.
    on_failure : callable
        Told (key, error, seconds until the next attempt).
    workers : int
        Keys in work at once.
    clock : callable
        Seconds that never jump.
    jitter : callable
        Random numbers in [0, 1).
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        on_failure: Callable[[K, Exception, float], None],
        workers: int,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._work = work
        self._on_failure = on_failure
        self._workers = workers
        self._clock = clock
        self._jitter = jitter
        self._schedule: Schedule[K] = Schedule()
        self._changed = asyncio.Event()
        self._stopping = False

    def add(self, key: K) -> None:
        """Due now."""
        self.add_after(key, 0.0)

    def add_after(self, key: K, seconds: float) -> None:
        """Due in ``seconds``; an earlier time asked for before stays."""
        self._schedule.add(key, at=self._clock() + seconds)
        self._changed.set()

    def stop(self) -> None:
        """Start nothing more; :meth:`run` returns when the work under way has ended."""
        self._stopping = True
        self._changed.set()

    def longest_running_seconds(self) -> float:
        return self._schedule.longest_running_seconds(self._clock())

    def __len__(self) -> int:
        return len(self._schedule)

    async def run(self) -> None:
        """Work until :meth:`stop`. One place waits and gives the keys out: of many that wait, all but one would wake
        for nothing."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                self._changed.clear()
                while self._has_room() and (key := self._schedule.take(self._clock())) is not None:
                    group.create_task(self._process(key))
                await self._wait()

    def _has_room(self) -> bool:
        return self._schedule.n_running < self._workers

    async def _wait(self) -> None:
        """Until a key was added, its work has ended, or one is due that there is room for."""
        at = self._schedule.next_at() if self._has_room() else None
        timeout = None if at is None else max(0.0, at - self._clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    async def _process(self, key: K) -> None:
        try:
            again = await self._work(key)
        except Exception as error:
            at_least = getattr(error, "retry_after_seconds", None) or 0.0
            wait = self._schedule.failed(key, now=self._clock(), jitter=self._jitter(), at_least=at_least)
            self._on_failure(key, error, wait)
        else:
            self._schedule.succeeded(key)
            if again is not None:
                self._schedule.add(key, at=self._clock() + again)
        finally:
            self._schedule.done(key)
            self._changed.set()
