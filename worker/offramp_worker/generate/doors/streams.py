"""From a request on ASGI to its reply: whole, or a stream of server-sent events. Whoever goes away stops the
computing."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offramp_core.generation.admission import Closed, Refused
from offramp_worker.generate.answers import Piece
from offramp_worker.generate.desk import GenerationDesk
from offramp_worker.generate.doors.forms import STILL_THERE, ErrorReply, FormOfReplies, Reply, error_of
from offramp_worker.generate.requests import Asked, RequestError, Wanted, tokenized
from offramp_worker.generate.tickets import ClosedError, Ticket
from offramp_worker.http.bodies import (
    BodyTooLargeError,
    DisconnectedError,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    send_bytes,
)
from offramp_worker.http.budget import ByteBudget
from offramp_worker.http.refusals import JSON_TYPE

if TYPE_CHECKING:
    from offramp_worker.generate.worker import GenerationWorker

QUIET_SECONDS = 15.0  # a stream that has nothing to say shows that it is there
INLINE_BYTES = 2048  # of a body; longer ones are made tokens of in a thread
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class NoMemoryError(Exception):
    """Bodies of other requests fill the memory that there is for them."""


@dataclass(slots=True, eq=False)
class Open:
    """A request whose answers are being written. ``wake`` is set when there is something new: pieces, or that the
    client has ``gone``."""

    tickets: list[Ticket]
    pieces: deque[tuple[int, Piece]] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False
    unfinished: int = 0


class Hub:
    """The event loop's side of the desk: who waits for which ticket. Make it in the thread of its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[Ticket, tuple[Open, int]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, tickets: list[Ticket]) -> Open:
        one = Open(tickets, unfinished=len(tickets))
        for i, ticket in enumerate(tickets):
            self._open[ticket] = one, i
        return one

    def remove(self, one: Open) -> None:
        for ticket in one.tickets:
            self._open.pop(ticket, None)

    def deliver(self, pieces: list[tuple[Ticket, Piece]]) -> None:
        """From the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, pieces)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _take(self, pieces: list[tuple[Ticket, Piece]]) -> None:
        for ticket, piece in pieces:
            found = self._open.get(ticket)
            if found is not None:
                one, i = found
                one.pieces.append((i, piece))
                one.unfinished -= piece.last
                one.wake.set()


@dataclass(slots=True)
class Door:
    """What every request for generation goes through. Make it in the thread of its loop."""

    worker: GenerationWorker
    hub: Hub
    budget: ByteBudget
    max_body_bytes: int
    _readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="prompts"))

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        form: FormOfReplies,
        read: Callable[[bytes], Wanted],
        model: str | None,
    ) -> None:
        """Answer one request. ``model`` is the one that its path names, if it does."""
        held = _Held(self.budget)
        try:
            desk, asked = await self._asked(scope, receive, held, read=read, model=model)
            one = self.hub.add(desk.submit(asked))
        except (RequestError, ClosedError) as error:
            await self._refuse(send, form, error_of(error))
            return
        except BodyTooLargeError:
            message = f"body: is larger than {self.max_body_bytes} bytes, more than any prompt that fits the context"
            await self._refuse(send, form, ErrorReply(413, message, "body"))
            return
        except NoMemoryError as error:
            await self._refuse(send, form, ErrorReply(503, str(error), None, Closed.QUEUE, 1))
            return
        except DisconnectedError:
            return
        finally:
            held.release()
        watcher = asyncio.create_task(self._watch(receive, desk, one))
        try:
            await self._reply(send, form, self._named(desk, asked), one)
        finally:
            watcher.cancel()
            self.hub.remove(one)
            for ticket in one.tickets:
                desk.cancel(ticket)
                desk.taken(ticket)

    async def _asked(
        self, scope: Scope, receive: Receive, held: _Held, *, read: Callable[[bytes], Wanted], model: str | None
    ) -> tuple[GenerationDesk, Asked]:
        desk = self.worker.desk
        if desk is None:
            raise ClosedError(Refused(Closed.NOT_READY, self.worker.reason, 1), status=503)
        self._check_model(desk, model)
        body = await _read_within(scope, receive, limit=self.max_body_bytes, held=held)
        if len(body) <= INLINE_BYTES:
            wanted = read(body)
            self._check_model(desk, wanted.model)
            return desk, self._tokens(wanted, desk)
        loop = asyncio.get_running_loop()
        wanted = await loop.run_in_executor(self._readers, read, body)
        self._check_model(desk, wanted.model)
        return desk, await loop.run_in_executor(self._readers, self._tokens, wanted, desk)

    def _tokens(self, wanted: Wanted, desk: GenerationDesk) -> Asked:
        return tokenized(wanted, desk.bundle, self.worker.tokenizer, longest_token=self.worker.longest_token)

    @staticmethod
    def _check_model(desk: GenerationDesk, model: str | None) -> None:
        if model is not None and model != desk.bundle.name:
            message = f"{model[:80]!r} is unknown; this worker serves {desk.bundle.name!r}"
            raise RequestError("model", message, code="model_not_found", status=404)

    def _named(self, desk: GenerationDesk, asked: Asked) -> Reply:
        prefix = "chatcmpl-" if asked.wanted.form == "chat" else "cmpl-"
        fingerprint = "fp_" + desk.bundle.digest.removeprefix("sha256:")[:16]
        return Reply(
            prefix + uuid.uuid4().hex,
            int(time.time()),
            desk.bundle.name,
            asked.wanted,
            self.worker.tokenizer,
            fingerprint,
        )

    async def _watch(self, receive: Receive, desk: GenerationDesk, one: Open) -> None:
        """The moment a client goes away, its answers are worth nothing."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        one.gone = True
        for ticket in one.tickets:
            desk.cancel(ticket)
        one.wake.set()

    async def _refuse(self, send: Send, form: FormOfReplies, error: ErrorReply) -> None:
        headers = [JSON_TYPE]
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
            self.worker.accounts.refused()
            self.worker.accounts.metrics.refused(error.code or Closed.NOT_READY).inc()
        self.worker.accounts.metrics.responses(str(error.status)).inc()
        body = form.error(error.message, status=error.status, param=error.param, code=error.code)
        await send_bytes(send, error.status, body, headers)

    async def _reply(self, send: Send, form: FormOfReplies, reply: Reply, one: Open) -> None:
        if reply.wanted.stream:
            await self._stream(send, form, reply, one)
        else:
            await self._whole(send, form, reply, one)

    async def _whole(self, send: Send, form: FormOfReplies, reply: Reply, one: Open) -> None:
        pieces: list[list[Piece]] = [[] for _ in one.tickets]
        while one.unfinished and not one.gone:
            await _woken(one, None)
            error = next((p.error for _, p in one.pieces if p.error), "")
            while one.pieces:
                i, piece = one.pieces.popleft()
                pieces[i].append(piece)
            if error:
                await self._refuse(send, form, ErrorReply(500, error))
                return
        if one.gone:
            return
        self.worker.accounts.metrics.responses("200").inc()
        await send_bytes(send, 200, form.whole(reply, one.tickets, pieces), [JSON_TYPE])

    async def _stream(self, send: Send, form: FormOfReplies, reply: Reply, one: Open) -> None:
        """Events as they come; what came while the client was slow goes out together. An error before the first event
        is an error reply."""
        began: set[int] = set()
        started = False
        while not one.gone:
            came = await _woken(one, QUIET_SECONDS)
            if one.gone:
                return
            pieces = list(one.pieces)
            one.pieces.clear()
            error = next((p.error for _, p in pieces if p.error), "")
            if error and not started:
                await self._refuse(send, form, ErrorReply(500, error))
                return
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                self.worker.accounts.metrics.responses("200").inc()
            events = [] if came else [STILL_THERE]
            for i, piece in pieces:
                if piece.error:
                    break
                events.append(form.event(reply, i, piece, one.tickets[i], first=i not in began))
                began.add(i)
            over = bool(error) or one.unfinished == 0
            if over:
                events.append(form.error_event(error) if error else form.end(reply, one.tickets))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": not over})
            if over:
                return


class _Held:
    """What one request takes of the budget of all bodies."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._size = budget, 0

    def take(self, size: int) -> None:
        if not self._budget.fits(size) or self._budget.full:
            raise NoMemoryError(
                "the bodies of other requests fill the memory that there is for them; come again, or elsewhere"
            )
        self._budget.take(size)
        self._size += size

    def release(self) -> None:
        size, self._size = self._size, 0
        self._budget.give(size)


async def _read_within(scope: Scope, receive: Receive, *, limit: int, held: _Held) -> bytes:
    """The whole body, as far as the budget of all of them has room.

    Raises
    ------
    BodyTooLargeError, NoMemoryError, DisconnectedError
    """
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > limit:
        raise BodyTooLargeError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > limit:
            raise BodyTooLargeError
        held.take(len(chunk))
        body += chunk
        if not message.get("more_body", False):
            return bytes(body)


async def _woken(one: Open, seconds: float | None) -> bool:
    """Wait for something new; False where nothing came in time."""
    try:
        await asyncio.wait_for(one.wake.wait(), seconds)
    except TimeoutError:
        return False
    one.wake.clear()
    return True
