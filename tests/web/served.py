"""The page's server on a loop and a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from boards import SINCE  # type: ignore[import-not-found]

from offramp_operator.web.board import Board
from offramp_operator.web.live import Streams
from offramp_operator.web.server import WebPage, serve_web

T = TypeVar("T")


@dataclass
class Site:
    """A page that is being served. The board belongs to another thread's loop: change it through :meth:`call`."""

    loop: asyncio.AbstractEventLoop
    board: Board
    url: str = ""
    now: list[float] = field(default_factory=lambda: [SINCE])
    streams: Streams | None = None

    def call(self, work: Callable[[], T]) -> T:
        """Run a function on the loop of the server."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(30)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def serving(**options: Any) -> Iterator[Site]:
    """Serve an empty board on a free port; ``options`` go to the streams, ``page`` to the page."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    site = Site(loop, Board(worker_kind="Pod", since=SINCE))
    page_options = options.pop("page", {})

    async def start() -> Any:
        site.streams = Streams(site.board, **{"min_interval_seconds": 0.05, **options})
        page = WebPage(site.board, clock=lambda: site.now[0], streams=site.streams, **page_options)
        return await serve_web(page, host="127.0.0.1", port=0)

    runner = site.wait(start())
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        site.wait(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
