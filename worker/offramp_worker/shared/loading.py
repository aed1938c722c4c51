"""Loads of models have a time, in threads that end with the process: Python waits for all others when it ends. A thread
cannot be ended: a load that takes longer is left to itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from offramp_worker.shared.model import Model
from offramp_worker.shared.room import AUDIT_SECONDS

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """What ``work`` returns or raises, once it does. Nobody has to wait for that."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # whatever it is, it belongs to who waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@dataclass(frozen=True, slots=True)
class WithinTime:
    """Work on bundles that is not waited for longer than ``seconds``, nor once ``ended`` is done."""

    seconds: float
    ended: asyncio.Future[None]

    async def __call__(self, model: Model, work: Callable[[], T]) -> T:
        """What ``work`` returns.

        Raises
        ------
        TimeoutError
            It goes on; until it ends the model is ``hung``.
        """
        working = in_background(work, name=f"load-{model.name}")
        either: set[asyncio.Future[Any]] = {working, self.ended}
        await asyncio.wait(either, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        model.hung = asyncio.create_task(self._clear_up(model, working))
        limit = f"within {self.seconds:g} s (OFFRAMP_LOAD_SECONDS)"
        if self.ended.done():
            limit = "before the worker shut down"
        raise TimeoutError(f"its load has not ended {limit}; it is tried again once that ends")

    async def _clear_up(self, model: Model, working: asyncio.Future[Any]) -> None:
        """It has ended after all, in whatever way: nobody wants it any more."""
        await asyncio.wait({working})
        working.exception()
        if not self.ended.done():
            await asyncio.to_thread(model.doors.worker.unload, seconds=AUDIT_SECONDS)
        model.hung = None
