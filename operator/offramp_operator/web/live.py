"""Sections that changed, sent as they change (server-sent events).

Nothing is queued for a client: each has one task that waits for a pass, renders, and sends what differs from what it
sent before. A slow client therefore costs one unsent answer and is let go when that takes too long; what it missed in
between it never needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from offramp_operator.shell.log import log_event
from offramp_operator.web.board import Board
from offramp_operator.web.render import Sections

MAX_CLIENTS = 64
HEARTBEAT_SECONDS = 15.0
MIN_INTERVAL_SECONDS = 1.0
SEND_SECONDS = 10.0
RETRY_MS = 3000

Render = Callable[[], Awaitable[tuple[int, Sections]]]
"""The sections, and the version that they are of: several clients may be given the same ones."""
Version = Callable[[], int]
"""Rises whenever what is rendered may have changed."""


class Shared:
    """What many look at is made once for all of them, and not more often than every ``seconds``: the overview of
    thousands of services costs a tenth of a second.
    """

    def __init__(self, *, seconds: float = MIN_INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._made: OrderedDict[str, tuple[float, asyncio.Task[tuple[int, Sections]]]] = OrderedDict()

    async def get(
        self, key: str, make: Callable[[], Coroutine[Any, Any, tuple[int, Sections]]]
    ) -> tuple[int, Sections]:
        """What was made for ``key`` lately, or is being made, else what ``make`` gives."""
        at, task = self._made.get(key, (0.0, None))
        if task is None or self._clock() - at >= self._seconds:
            task = asyncio.create_task(make())
            self._made[key] = self._clock(), task
            self._made.move_to_end(key)
            while len(self._made) > MAX_CLIENTS:
                self._made.popitem(last=False)
        return await asyncio.shield(task)  # one client that goes must not end what others wait for


class Streams:
    """The open streams of one server."""

    def __init__(
        self,
        board: Board,
        *,
        max_clients: int = MAX_CLIENTS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        min_interval_seconds: float = MIN_INTERVAL_SECONDS,
    ) -> None:
        self._board = board
        self._max, self._heartbeat, self._interval = max_clients, heartbeat_seconds, min_interval_seconds
        self._open = 0
        self._closing = asyncio.Event()

    @property
    def open(self) -> int:
        """How many clients listen now."""
        return self._open

    def close(self) -> None:
        """End every stream soon; browsers come back by themselves."""
        self._closing.set()

    async def serve(self, request: web.Request, render: Render, *, version: Version) -> web.StreamResponse:
        """Stream until the client goes, is too slow, or the server ends."""
        if self._closing.is_set() or self._open >= self._max:
            raise web.HTTPServiceUnavailable(
                headers={"Retry-After": "10"}, text=f"{self._open} pages are live already; reload instead"
            )
        self._open += 1
        try:
            return await self._stream(request, render, version)
        finally:
            self._open -= 1

    async def _stream(self, request: web.Request, render: Render, version: Version) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._send(response, f"retry: {RETRY_MS}\n\n")
            await self._follow(response, render, version)
        return response

    async def _follow(self, response: web.StreamResponse, render: Render, version: Version) -> None:
        sent: dict[str, str] = {}
        while not self._closing.is_set():
            try:
                shown, now = await render()
            except Exception as error:
                log_event(
                    "page-failed", f"a live page could not be made: {error!r}", level=logging.WARNING, error=error
                )
                return
            changed = {name: html for name, html in now.items() if sent.get(name) != html}
            if changed:
                sent.update(changed)
                await self._send(response, f"event: sections\ndata: {json.dumps(changed, ensure_ascii=False)}\n\n")
            await self._pause(self._interval)
            while version() == shown and not self._closing.is_set():
                if not await self._wait(self._board.changed(), self._heartbeat):
                    await self._send(response, ": still here\n\n")

    async def _send(self, response: web.StreamResponse, text: str) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await response.write(text.encode())

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _wait(self, event: Awaitable[None], seconds: float) -> bool:
        """Whether ``event`` came (or the end) within ``seconds``."""
        tasks = {asyncio.ensure_future(event), asyncio.ensure_future(self._closing.wait())}
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        return bool(done)
