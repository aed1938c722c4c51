"""The routes of the web page. Reading only: there is no way from here into the control loop."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from aiohttp import web

from offramp_core.control.codec import format_time
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web import pages
from offramp_operator.web.board import Board, View
from offramp_operator.web.guard import add_headers, guard
from offramp_operator.web.live import Shared, Streams
from offramp_operator.web.relay import RELAYED, Relay, Standby, UnreachableError
from offramp_operator.web.render import Renderer, Sections, static_files

SHUTDOWN_SECONDS = 2.0
MAX_QUERY = 100
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class WebPage:
    """The pages of one board.

    Parameters
    ----------
    names : collection of str
        Host names that are answered besides addresses and ``localhost``.
    clock : callable
        Seconds since the epoch.
    standby : callable
        Says who leads while this process does not; None while it does.
    streams : Streams, optional
        The live ones; an argument so that a test can have them beat faster.
    """

    def __init__(
        self,
        board: Board,
        *,
        names: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        standby: Callable[[], Standby | None] = lambda: None,
        streams: Streams | None = None,
    ) -> None:
        self._board, self._clock, self._standby = board, clock, standby
        self._renderer = Renderer()
        self._streams = streams or Streams(board)
        self._static = static_files()
        self._names = frozenset(names)
        self._relay = Relay()
        self._shared = Shared()

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[guard(self._names), self._guarded])
        app.on_response_prepare.append(add_headers)
        app.on_shutdown.append(self._end)
        app.router.add_get("/", self._overview)
        app.router.add_get("/live", self._overview_live)
        app.router.add_get("/services/{namespace}/{name}", self._service)
        app.router.add_get("/services/{namespace}/{name}/live", self._service_live)
        app.router.add_get("/api/v1/services", self._api_overview)
        app.router.add_get("/api/v1/services/{namespace}/{name}", self._api_service)
        app.router.add_get("/static/{file}", self._file)
        return app

    async def _end(self, _: web.Application) -> None:
        self._streams.close()
        await self._relay.close()

    # --- pages -------------------------------------------------------------------------------------

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        make, query = self._overview_context(request), request.query_string
        context = await asyncio.to_thread(make)
        sections = await asyncio.to_thread(
            lambda: {**self._renderer.search(context), **self._renderer.overview(context, fresh=_fresh(context.as_of))}
        )
        return self._page(sections, title="Services", live=_link("/live", query), api=_link("/api/v1/services", query))

    async def _overview_live(self, request: web.Request) -> web.StreamResponse:
        async def render() -> tuple[int, Sections]:
            return await self._shared.get(request.query_string, lambda: self._overview_sections(request))

        return await self._streams.serve(request, render, version=lambda: self._board.version)

    async def _overview_sections(self, request: web.Request) -> tuple[int, Sections]:
        version, make = self._board.version, self._overview_context(request)

        def sections() -> Sections:
            context = make()
            return self._renderer.overview(context, fresh=_fresh(context.as_of))

        return version, await asyncio.to_thread(sections)

    async def _service(self, request: web.Request) -> web.StreamResponse:
        view = self._view(request)
        context = await asyncio.to_thread(pages.service, view, self._clock(), since=self._board.since)
        sections = await asyncio.to_thread(self._renderer.service, context, fresh=_fresh(context.as_of))
        return self._page(
            sections,
            title=view.key.name,
            crumbs=[str(view.key)],
            live=f"{request.rel_url.raw_path}/live",
            api=f"/api/v1{request.rel_url.raw_path}",
        )

    async def _service_live(self, request: web.Request) -> web.StreamResponse:
        key = self._view(request).key

        async def render() -> tuple[int, Sections]:
            version, view = self._board.version_of(key), self._board.view(key)
            if view is None:
                return version, {"announce": "this service was deleted", "fresh": "deleted"}
            context = await asyncio.to_thread(pages.service, view, self._clock(), since=self._board.since)
            return version, await asyncio.to_thread(self._renderer.service, context, fresh=_fresh(context.as_of))

        return await self._streams.serve(request, render, version=lambda: self._board.version_of(key))

    def _page(self, sections: Sections, *, title: str, status: int = 200, **around: Any) -> web.Response:
        html = self._renderer.page(sections, title=title, since=format_time(self._board.since)[:19] + "Z", **around)
        return web.Response(
            text=html, status=status, content_type="text/html", charset="utf-8", headers={"Cache-Control": "no-store"}
        )

    # --- the same as JSON --------------------------------------------------------------------------

    async def _api_overview(self, request: web.Request) -> web.StreamResponse:
        return _json(pages.as_json(await asyncio.to_thread(self._overview_context(request))))

    async def _api_service(self, request: web.Request) -> web.StreamResponse:
        view = self._view(request)
        return _json(
            pages.as_json(await asyncio.to_thread(pages.service, view, self._clock(), since=self._board.since))
        )

    # --- parts -------------------------------------------------------------------------------------

    def _overview_context(self, request: web.Request) -> Callable[[], pages.OverviewPage]:
        """The page as it will be made of what is known now."""
        page = request.query.get("page", "1")
        query = request.query.get("q", "")[:MAX_QUERY].strip()
        number = int(page) if page.isascii() and page.isdigit() and len(page) < 7 else 1
        views, now, since = self._board.views(), self._clock(), self._board.since
        return lambda: pages.overview(views, now, since=since, query=query, page=number)

    def _view(self, request: web.Request) -> View:
        key = _key(request)
        view = self._board.view(key)
        if view is None:
            there = ", ".join(map(str, self._board.keys()[:10])) or "none yet"
            raise web.HTTPNotFound(text=f"No service {key} is known here; there is {there}.")
        return view

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        content = self._static.get(name)
        if content is None:
            raise web.HTTPNotFound(text=f"There is no file {name}.")
        return web.Response(
            body=content,
            headers={"Cache-Control": "public, max-age=31536000, immutable"},
            content_type=_TYPES[name.rpartition(".")[2]],
            charset="utf-8",
        )

    # --- what is wrong -----------------------------------------------------------------------------

    @property
    def _guarded(self) -> Any:
        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            standby = None if request.path.startswith("/static/") else self._standby()
            if standby is not None:
                return await self._ask_leader(request, standby)
            try:
                return await handler(request)  # type: ignore[no-any-return]
            except web.HTTPNotFound as error:
                known = "" if error.text is None or error.text.startswith("404") else error.text
                return self._wrong(request, 404, "Not found", known or f"There is no page {request.path}.")
            except (web.HTTPException, asyncio.CancelledError, ConnectionError):
                raise
            except Exception as error:
                log_event("page-failed", f"{request.path}: {error!r}", level=logging.ERROR, error=error)
                return self._wrong(request, 500, "This page could not be made", "The log of the operator says why.")

        return guarded

    async def _ask_leader(self, request: web.Request, standby: Standby) -> web.StreamResponse:
        if standby.url and RELAYED not in request.headers:
            try:
                return await self._relay.forward(request, standby.url)
            except UnreachableError as error:
                explanation = f"{error}. {standby.message}"
                return self._wrong(request, 503, "The leader does not answer", explanation, standby.command)
        return self._wrong(request, 503, "This replica stands by", standby.message, standby.command)

    def _wrong(
        self, request: web.Request, status: int, heading: str, message: str, command: str = ""
    ) -> web.StreamResponse:
        if request.path.startswith("/api/"):
            return _json({"error": f"{message} {command}".rstrip()}, status=status)
        return self._page(self._renderer.message(heading, message, command), title=heading, status=status)


async def serve_web(page: WebPage, *, host: str | None, port: int) -> web.AppRunner:
    """Listen until the returned runner is cleaned up; on every address where ``host`` is None.

    Raises
    ------
    OSError
        The port is taken or not allowed.
    """
    runner = web.AppRunner(
        page.application(),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_SECONDS,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner


def _key(request: web.Request) -> ServiceKey:
    return ServiceKey(request.match_info["namespace"], request.match_info["name"])


def _link(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path


def _fresh(as_of: float) -> str:
    return f"as of {format_time(as_of)[11:19]} UTC"


def _json(value: Any, *, status: int = 200) -> web.Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return web.Response(
        text=text + "\n",
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers={"Cache-Control": "no-store"},
    )
