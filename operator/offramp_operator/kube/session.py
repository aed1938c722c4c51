"""The HTTP session that kopf asks the API server with: what a server has forgotten is begun anew, and what ends at once is begun ever more seldom.

kopf 1.45 ends where a watch or a page of a list is answered with 410, and asks without a rest where watches end at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import kopf

from offramp_operator.kube.watch import LAST_PAUSE_SECONDS, LASTED_SECONDS, Pauses
from offramp_operator.shell.log import log_event

FORGOTTEN = 410


@dataclass(slots=True)
class Rhythm:
    """Rests before what was begun short ago is begun again: twice as long each time, not at all once it has lasted."""

    clock: Callable[[], float] = time.monotonic
    begun_at: float = -math.inf
    pauses: Pauses = field(default_factory=lambda: Pauses(LAST_PAUSE_SECONDS))

    async def rest(self) -> None:
        if self.clock() - self.begun_at > LASTED_SECONDS:
            self.pauses.reset()
        else:
            await self.pauses.sleep()

    def begin(self) -> None:
        self.begun_at = self.clock()


class Manners:
    """A client middleware of aiohttp for lists and watches.

    Parameters
    ----------
    listed_anew : callable
        Called where a list begins that is not the first of its path, or a watch that goes on from the present: what was deleted meanwhile,
        neither tells.
    """

    def __init__(self, listed_anew: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._listed_anew = listed_anew
        self._clock = clock
        self._rhythms: dict[tuple[str, bool], Rhythm] = {}

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        watch = "watch" in request.url.query
        if not watch and "continue" in request.url.query:
            return _still_there(await handler(request))
        rhythm = self._rhythms.get((request.url.path, watch))
        if rhythm is None:
            rhythm = self._rhythms[request.url.path, watch] = Rhythm(self._clock)
        elif not watch:
            self._listed_anew()
        await rhythm.rest()
        response = await handler(request)
        while watch and response.status == FORGOTTEN:
            response.release()
            rhythm.begin()
            told = "the version is too old; watching from now on"
            log_event("watch-forgotten", told, level=logging.WARNING, path=request.url.path)
            self._listed_anew()
            await rhythm.rest()
            # Without a version, a watch tells of every object there is, then goes on.
            request.url = request.url.without_query_params("resourceVersion")
            response = await handler(request)
        if response.ok or response.status == FORGOTTEN:  # refusals are kopf's to repeat, with pauses of its own
            rhythm.begin()
        return _still_there(response)


def _still_there(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Raises where a page has expired what kopf takes for a connection that broke within a list: it begins anew."""
    if response.status != FORGOTTEN:
        return response
    response.release()
    raise aiohttp.ClientPayloadError("the list has expired between two pages")


def kopf_session(connection: kopf.ConnectionInfo, manners: Manners) -> kopf.AiohttpSession:
    """kopf's own session for these credentials, with manners."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
        headers=connection.as_http_headers(),
        middlewares=(manners,),
    )
    return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)
