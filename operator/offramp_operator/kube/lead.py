"""What a leader does: one queue for all managed kinds, and a pass for whatever is due in it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from offramp_core.errors import UnavailableError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.managed import Item, Managed, ObjectKey, Reconcile, Registry, Seat
from offramp_operator.kube.queue import WorkQueue
from offramp_operator.kube.shards import Shards
from offramp_operator.metrics import Metrics
from offramp_operator.shell.log import log_event

WORKERS = 64  # passes under way; most of one is waiting for workers, which may hang
STOP_SECONDS = 15.0  # within the pod's grace period, with time left to release the Lease


class Lead:
    """Reconciles everything that belongs to the shards held here, for as long as :meth:`run` runs."""

    def __init__(
        self, registry: Registry, client: KubeClient, cache: ObjectCache, shards: Shards, metrics: Metrics
    ) -> None:
        self._registry = registry
        self._client = client
        self._cache = cache
        self._shards = shards
        self._metrics = metrics
        self._reconcile: dict[str, Reconcile] = {}
        self._catching_up: set[Item] = set()
        self._parts: set[asyncio.Task[None]] = set()
        self._queue: WorkQueue[Item] = WorkQueue(
            self._pass, on_failure=_log_failure, workers=WORKERS, clock=time.monotonic, jitter=random.random
        )

    def __len__(self) -> int:
        """How many objects wait for a pass."""
        return len(self._queue)

    def wake(self, item: Item) -> None:
        """Due now, if it belongs to a shard held here."""
        if item.kind in self._reconcile and self._shards.owns(item.key):
            self._queue.add(item)

    def longest_running_seconds(self) -> float:
        return self._queue.longest_running_seconds()

    async def run(self, stop: asyncio.Event, *, beside: Coroutine[Any, Any, None]) -> None:
        """Work until ``stop``, or until a part ends by itself: raises what it ended with. What is in hand is finished
        first."""
        async with AsyncExitStack() as closing:
            for entry in self._registry.entries:
                self._reconcile[entry.kind.name] = entry.begin(self._seat(entry, closing))
            self._begin_with_all()
            working = asyncio.create_task(self._queue.run(), name="queue")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            self._parts |= {working, asyncio.create_task(beside, name="beside")}
            await asyncio.wait({stopping, *self._parts}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in self._parts if task.done()]
            self._queue.stop()
            await asyncio.wait({working}, timeout=STOP_SECONDS)
            for task in (stopping, *self._parts):
                task.cancel()
            for task in ended:
                task.result()

    def _seat(self, entry: Managed, closing: AsyncExitStack) -> Seat:
        def wake(key: ObjectKey) -> None:
            self.wake(Item(entry.kind.name, key))

        def beside(work: Coroutine[Any, Any, None]) -> None:
            self._parts.add(asyncio.create_task(work, name=entry.kind.plural))

        return Seat(self._client, self._cache, wake, beside, closing)

    def _begin_with_all(self) -> None:
        self._catching_up = set(self._registry.everybody(self._cache))
        log_event("listed", f"{len(self._catching_up)} objects to reconcile", seconds=_process_seconds())
        for item in self._catching_up:
            self._queue.add(item)

    async def _pass(self, item: Item) -> float | None:
        started, failed = time.monotonic(), True
        try:
            again = await self._reconcile[item.kind](item.key)
            failed = False
            self._caught_up(item)
            return again
        finally:
            self._metrics.reconciled(time.monotonic() - started, failed=failed)

    def _caught_up(self, item: Item) -> None:
        """Log when everything of the first list has had its first pass: from then on this process knows how all of it
        stands."""
        if item in self._catching_up:
            self._catching_up.discard(item)
            if not self._catching_up:
                log_event("caught-up", "everything has had a pass", seconds=_process_seconds())
                _return_memory()


def _return_memory() -> None:
    """Give back what only the first passes needed: glibc keeps it in case somebody asks again."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _process_seconds() -> float:
    """Seconds since this process was started, imports included. Linux."""
    since_boot = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return round(since_boot - started / os.sysconf("SC_CLK_TCK"), 2)


def _log_failure(item: Item, error: Exception, wait: float) -> None:
    level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
    traceback = None if isinstance(error, UnavailableError) else error
    log_event(
        "reconcile-failed",
        f"{item}: {error}; next attempt in {wait:.1f} s",
        level=level,
        error=traceback,
        service=str(item),
    )
