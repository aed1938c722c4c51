"""The HTTP session that kopf asks the API server with: what a server has forgotten is begun anew, and what ends at once
is begun ever more seldom.

kopf 1.45 ends where a watch or a page of a list is answered with 410, where a watch tells of a server's fault or is cut
within a line, and at answers of busy servers that it does not know; and it asks without a rest where watches end at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from offramp_operator.kube.kinds import Kind
from offramp_operator.kube.watch import LASTED_SECONDS, Pauses
from offramp_operator.shell.log import log_event

FORGOTTEN, UNKNOWN = 410, 404
BUSY = (408, 429)  # and 5xx
LAST_PAUSE_SECONDS = 10.0  # at most, which is how late the first change after an outage may be seen


@dataclass(slots=True)
class Backoff:
    """Rests before what was begun short ago is begun again: twice as long each time, not at all once it has lasted."""

    begun_at: float = -math.inf
    pauses: Pauses = field(default_factory=lambda: Pauses(LAST_PAUSE_SECONDS))

    async def rest(self) -> None:
        if time.monotonic() - self.begun_at > LASTED_SECONDS:
            self.pauses.reset()
        else:
            await self.pauses.sleep()

    def begin(self) -> None:
        self.begun_at = time.monotonic()


class ListWatchMiddleware:
    """A client middleware of aiohttp for lists and watches.

    Parameters
    ----------
    listed_anew : callable
        Called once a list has begun that is not the first of its path, or a watch that goes on from the present: what
        was deleted meanwhile, neither tells.
    kinds : tuple of Kind
        What is watched: an API server must have all of it before kopf is answered which kinds there are.
    """

    def __init__(self, listed_anew: Callable[[], object], *, kinds: tuple[Kind, ...]) -> None:
        self._listed_anew = listed_anew
        self._kinds = kinds
        self._discovery = {"/apis", *(f"/apis/{kind.api_version}" for kind in kinds)}
        self._backoffs: dict[tuple[str, bool], Backoff] = {}

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if request.url.path in self._discovery:
            return await _discovered(request, handler, self._kinds)
        watch = "watch" in request.url.query
        if not watch and "continue" in request.url.query:
            return _still_there(await _ask(request, handler))
        known = (request.url.path, watch) in self._backoffs
        backoff = self._backoffs.setdefault((request.url.path, watch), Backoff())
        await backoff.rest()
        response, anew = await _ask(request, handler), known and not watch
        while watch and response.status == FORGOTTEN:
            response.release()
            backoff.begin()
            message = "the version is too old; watching from now on"
            log_event("watch-forgotten", message, level=logging.WARNING, path=request.url.path)
            await backoff.rest()
            # Without a version, a watch tells of every object there is, then goes on.
            request.url = request.url.without_query_params("resourceVersion")
            response, anew = await _ask(request, handler), True
        if response.ok or response.status == FORGOTTEN:  # refusals are kopf's to repeat, with pauses of its own
            backoff.begin()
        if response.ok and anew:
            self._listed_anew()
        if response.ok and watch:
            response.content = _Lines(response.content)  # type: ignore[assignment]
        return _still_there(response)


async def _ask(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """The answer; a server that is busy or broken is a connection that broke, which kopf tries again for ever.

    Raises
    ------
    RuntimeError
        The session was closed while this rested: kopf logs in again.
    """
    if request.session.closed:
        raise RuntimeError("Session is closed")
    response = await handler(request)
    if response.status < 500 and response.status not in BUSY:
        return response
    response.release()
    with contextlib.suppress(ValueError):  # may be a date
        await asyncio.sleep(min(float(response.headers.get("Retry-After", 0.0)), LAST_PAUSE_SECONDS))
    raise aiohttp.ClientConnectionError(f"answered {response.status}")


async def _discovered(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, kinds: tuple[Kind, ...]
) -> aiohttp.ClientResponse:
    """kopf asks once which kinds there are, and would never watch one that an API server which has just started does
    not tell of yet."""
    response = await _ask(request, handler)
    if response.status == UNKNOWN or (
        response.ok and not _has_every_kind(await response.json(), request.url.path, kinds)
    ):
        response.release()
        raise aiohttp.ClientConnectionError("the API server does not tell of every kind yet")
    return response


def _has_every_kind(document: dict[str, Any], path: str, kinds: tuple[Kind, ...]) -> bool:
    """Whether a list of groups, or of one group version, has all that is watched."""
    if path == "/apis":
        versions = {version["groupVersion"] for group in document.get("groups") or () for version in group["versions"]}
        return all(kind.api_version in versions for kind in kinds)
    names = {resource["name"] for resource in document.get("resources") or ()}
    return all(kind.plural in names for kind in kinds if path == f"/apis/{kind.api_version}")


def _still_there(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Raises where a page has expired what kopf takes for a connection that broke within a list: it begins anew."""
    if response.status != FORGOTTEN:
        return response
    response.release()
    raise aiohttp.ClientPayloadError("the list has expired between two pages")


class _Lines:
    """What kopf reads of a watch: whole lines. A rest without an end, and an error that is no 410, are a connection
    that broke."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            for line in whole.split(b"\n"):
                _check(line)
            if newline:
                yield whole + newline
        if rest:
            raise aiohttp.ClientPayloadError("a watch was cut within a line")


def _check(line: bytes) -> None:
    if b'"ERROR"' in line[:32] and json.loads(line)["object"].get("code") != FORGOTTEN:
        raise aiohttp.ClientPayloadError(f"a watch ended in {line[:500].decode(errors='replace')}")


def kopf_session(connection: kopf.ConnectionInfo, middleware: ListWatchMiddleware) -> kopf.AiohttpSession:
    """kopf's own session for these credentials, with our middleware."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
        headers=connection.as_http_headers(),
        middlewares=(middleware,),
    )
    return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)
