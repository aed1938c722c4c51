"""What a standby does with a question: it has seen no worker itself, so it asks the leader and passes the answer on as
it comes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

RELAYED = "X-Offramp-Relayed"
MAX_RELAYED = 64
_PASSED_ON = ("Content-Type", "Cache-Control", "Retry-After")
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=10.0)
_LIVE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=40.0)  # longer than two heartbeats


@dataclass(frozen=True, slots=True)
class Standby:
    """That this process does not lead: who does, the command that reaches it, and the leader's page where it can be
    reached from here."""

    message: str
    url: str = ""
    command: str = ""


def standing_by(leader: str, url: str, *, namespace: str, port: int) -> Standby:
    """What a standby says while ``leader`` leads; nobody does where it is empty."""
    if not leader:
        return Standby("Nobody leads yet; ask again in some seconds.")
    command = f"kubectl -n {namespace} port-forward pod/{leader} {port}"
    return Standby(f"{leader} leads and sees the workers. Forward its port instead of this one's:", url, command)


class UnreachableError(Exception):
    """The leader does not answer, or too many pages are relayed already."""


class Relay:
    """Passes questions on. Only reads, only to the leader, and never twice."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._open = 0

    async def forward(self, request: web.Request, url: str) -> web.StreamResponse:
        """The leader's answer, piece by piece. Raises :class:`UnreachableError` before anything was answered."""
        if self._open >= MAX_RELAYED:
            raise UnreachableError(f"{self._open} pages are relayed already")
        session = self._session = self._session or aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        live = request.path.endswith("/live")
        asked = URL(f"{url}{request.rel_url.raw_path_qs}", encoded=True)
        self._open += 1
        try:
            try:
                answer = await session.request(
                    request.method,
                    asked,
                    headers={RELAYED: "1"},
                    allow_redirects=False,
                    timeout=_LIVE_TIMEOUT if live else _TIMEOUT,
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                raise UnreachableError(str(error) or type(error).__name__) from error
            async with answer:
                return await _pass_on(request, answer)
        finally:
            self._open -= 1

    async def close(self) -> None:
        """Let go of the connections to the leader."""
        if self._session is not None:
            await self._session.close()


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
        async for piece in answer.content.iter_any():
            await response.write(piece)
    return response
