"""What a standby does with a question: it has seen no worker itself, so it asks the leader and passes the answer on as it comes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import httpx
from aiohttp import web

RELAYED = "X-Offramp-Relayed"
MAX_RELAYED = 64
_PASSED_ON = ("Content-Type", "Cache-Control", "Retry-After")
_TIMEOUT = httpx.Timeout(10.0, connect=2.0)
_LIVE_TIMEOUT = httpx.Timeout(40.0, connect=2.0)  # longer than two heartbeats


@dataclass(frozen=True, slots=True)
class Standby:
    """That this process does not lead: who does, in a sentence with what to do next, and the leader's page where it can be reached."""

    told: str
    url: str = ""


class UnreachableError(Exception):
    """The leader does not answer, or too many pages are relayed already."""


class Relay:
    """Passes questions on. Only reads, only to the leader, and never twice."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None
        self._open = 0

    async def forward(self, request: web.Request, url: str) -> web.StreamResponse:
        """The leader's answer, piece by piece. Raises :class:`UnreachableError` before anything was answered."""
        if self._open >= MAX_RELAYED:
            raise UnreachableError(f"{self._open} pages are relayed already")
        client = self._client = self._client or httpx.AsyncClient(trust_env=False, follow_redirects=False)
        live = request.path.endswith("/live")
        asked = client.build_request(
            request.method, f"{url}{request.rel_url.raw_path_qs}", headers={RELAYED: "1"},
            timeout=_LIVE_TIMEOUT if live else _TIMEOUT,
        )  # fmt: skip
        self._open += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    answer = await client.send(asked, stream=True)
                except httpx.HTTPError as error:
                    raise UnreachableError(str(error) or type(error).__name__) from error
                stack.push_async_callback(answer.aclose)
                return await _pass_on(request, answer)
        finally:
            self._open -= 1

    async def close(self) -> None:
        """Let go of the connections to the leader."""
        if self._client is not None:
            await self._client.aclose()


async def _pass_on(request: web.Request, answer: httpx.Response) -> web.StreamResponse:
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    response = web.StreamResponse(status=answer.status_code, headers=headers)
    await response.prepare(request)
    with contextlib.suppress(httpx.HTTPError, ConnectionError):
        async for piece in answer.aiter_bytes():
            await response.write(piece)
    return response
