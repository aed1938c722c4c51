"""The workers of a pool are asked how their models stand, and told which they are to hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp
import msgspec

from offramp_core.errors import UnavailableError
from offramp_core.protocol import HeldModels, SignedDocument
from offramp_operator.shell.bounded import refuse_unbounded
from offramp_operator.shell.log import log_event

SECONDS = 3.0  # for one call
PATH = "/v1/models"


class Calls:
    """Connections are kept; :meth:`close` it on the loop that used it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, urls: Mapping[str, str], token: str) -> dict[str, HeldModels]:
        """What the workers at these addresses hold, by uid; of those that do not answer, nothing."""
        answers = await asyncio.gather(*(self._call(uid, url, token, None) for uid, url in urls.items()))
        return {held.uid: held for held in answers if isinstance(held, HeldModels)}

    async def send(self, uid: str, url: str, token: str, signed: SignedDocument) -> HeldModels | str | None:
        """Hand a worker its list; None where it does not answer, and why where it refuses. The next pass does it
        again."""
        return await self._call(uid, url, token, msgspec.json.encode(signed))

    async def _call(self, uid: str, url: str, token: str, body: bytes | None) -> HeldModels | str | None:
        if self._session is None:
            headers = {"Accept-Encoding": "identity"}
            # A worker closes what idles; a connection for each call costs nothing that shows here.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, headers=headers)
        bearer = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        verb = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(SECONDS),
                self._session.request(verb, url + PATH, data=body, headers=bearer, allow_redirects=False) as reply,
            ):
                refuse_unbounded(url, reply.headers)
                text = await reply.read()
                if HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    return _refusal(reply.status, text)
                held = _held(reply.status, text)
        except (aiohttp.ClientError, ValueError, OSError, UnavailableError, TimeoutError) as error:
            log_event("pool-worker-silent", f"{url}: {error!r}", level=logging.DEBUG, worker=uid)
            return None
        return held if held.uid == uid else None  # the address may have passed to another pod


def _held(status: int, text: bytes) -> HeldModels:
    if status != HTTPStatus.OK:
        raise UnavailableError(f"{PATH} answered {status}: {text[:300]!r}")
    return msgspec.json.decode(text, type=HeldModels)


def _refusal(status: int, text: bytes) -> str:
    try:
        message = msgspec.json.decode(text, type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        message = text.decode(errors="replace")
    return f"{status}: {message[:300]}"
