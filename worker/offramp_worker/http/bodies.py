"""Reading request bodies and writing replies straight on ASGI, without the cost of a framework's request objects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class BodyTooLargeError(Exception):
    """The body is larger than allowed."""


class DisconnectedError(Exception):
    """The client went away before its request was complete."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a request header; ``name`` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body.

    Raises
    ------
    BodyTooLargeError
        Before more than ``limit`` bytes are kept.
    DisconnectedError
        The client went away.
    """
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > limit:  # the server has checked that it is a number
        raise BodyTooLargeError
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """One complete response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, headers: Headers | None = None) -> None:
    """A JSON response."""
    await send_bytes(send, status, orjson.dumps(value), [(b"content-type", b"application/json"), *(headers or [])])
