"""Work in threads that end with the process, whatever they wait for: Python waits for all others when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """What ``work`` returns or raises, once it does. Nobody has to wait for that."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
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
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
