"""What a connection says when it cannot take a request: the same words on both ports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from offramp_core.reasons import RequestOutcome
from offramp_worker.http.bodies import Headers

JSON_TYPE = (b"content-type", b"application/json")
Count = Callable[[RequestOutcome, int], None]


@dataclass(frozen=True, slots=True)
class Response:
    """A whole reply. ``close`` ends the connection after it."""

    status: int
    body: bytes
    headers: Headers
    close: bool = False


def no_count(_: RequestOutcome, __: int) -> None:
    """For a port whose requests nobody counts."""


class Refusals:
    """Error replies; ``count`` gets the outcome and the status of each."""

    def __init__(self, count: Count = no_count) -> None:
        self._count = count

    def refusal(
        self,
        status: int,
        error: str,
        *,
        outcome: RequestOutcome = RequestOutcome.INVALID,
        retry_after: int | None = None,
        close: bool = False,
        headers: Headers | None = None,
    ) -> Response:
        """A counted error reply."""
        self._count(outcome, status)
        sent = [JSON_TYPE, *(headers or [])]
        if retry_after is not None:
            sent.append((b"retry-after", str(retry_after).encode()))
        return Response(status, orjson.dumps({"error": error}), sent, close)

    def body_too_large(self, limit: int) -> Response:
        """What is left of the body is not read."""
        error = (
            f"body: is larger than {limit} bytes, the most that this model's largest request takes; send fewer "
            "rows at a time"
        )
        return self.refusal(413, error, close=True)

    def head_too_large(self, limit: int) -> Response:
        return self.refusal(431, f"the headers are larger than the limit of {limit} bytes", close=True)

    def unreadable(self, reason: str) -> Response:
        return self.refusal(400, reason, close=True)

    def too_slow(self, seconds: float) -> Response:
        return self.refusal(408, f"the request did not arrive within {seconds:g} s", close=True)

    def unknown_transfer_coding(self) -> Response:
        return self.refusal(501, "Transfer-Encoding: only chunked is understood", close=True)

    def no_tunnel(self) -> Response:
        return self.refusal(
            405, "CONNECT: this is no proxy", close=True, headers=[(b"allow", b"GET, HEAD, POST, OPTIONS")]
        )

    def no_memory(self) -> Response:
        return self.refusal(
            503,
            "the bodies of other requests fill the memory that there is for them; come again, or elsewhere",
            outcome=RequestOutcome.REJECTED,
            retry_after=1,
            close=True,
        )
