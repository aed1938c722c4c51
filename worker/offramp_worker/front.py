"""The event loop's side of the engine: requests in, finished tickets back to whoever asked. REST and gRPC share it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.arms.tiers import tier_within, unknown_tier
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.feedback import Feedback
from offramp_worker.http.tensors import BadRequestError, InferRequest, shown
from offramp_worker.logs import log_event

Done = Callable[[Ticket], None]


class _Waiting(NamedTuple):
    """Who waits for a ticket, and what its client calls the request."""

    engine: Engine
    done: Done
    request_id: str | None


class Front:
    """Make it in the thread of its event loop.

    Requests are served at the end of the loop's turn in which they arrived, so that all sockets that were readable
    share a batch. That may be done right here, see :meth:`offramp_worker.engine.engine.Engine.serve`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.feedback: Feedback | None = None
        self._loop, self._thread = loop, threading.get_ident()
        self._waiting: dict[Ticket, _Waiting] = {}
        self._due = False

    def named(self, request: InferRequest) -> InferRequest:
        """The request as its reply is to name it."""
        return request if self.feedback is None else self.feedback.named(request)

    def submit(self, engine: Engine, request: InferRequest, *, done: Done) -> Ticket:
        """Admit a request; ``done`` is called in the event loop once all its rows are answered, never before this
        returns.

        Raises
        ------
        OverloadedError
            It was not taken.
        BadRequestError
            It asks for a tier that the service does not have.
        """
        tier = _tier(engine, request)
        ticket = engine.submit(
            request.x,
            never_exit=request.never_exit or tier is None,
            tier=tier or "",
            max_disagreement=math.inf if request.max_disagreement is None else request.max_disagreement,
            deadline_seconds=request.deadline_seconds,
            priority=request.priority,
            timeout_seconds=request.timeout_seconds,
            slice_name=request.slice_name,
            stream=request.stream,
            plan=request.plan,
            wake=False,
        )
        self._waiting[ticket] = _Waiting(engine, done, request.id)
        if ticket.cached:
            self._loop.call_soon(self._resolve, [ticket])
        elif engine.in_loop:
            engine.serve()  # not at the turn's end, when the next batch has been chosen already
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._serve, engine)
        return ticket

    def cancel(self, engine: Engine, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more."""
        if self._waiting.pop(ticket, None) is not None:
            engine.metrics.requests[RequestOutcome.CANCELLED].inc()
            engine.cancel(ticket)

    def deliver(self, tickets: list[Ticket]) -> None:
        """Tickets are done. Called by the engine, in its thread or in this one."""
        if threading.get_ident() == self._thread:
            self._resolve(tickets)
            return
        try:
            self._loop.call_soon_threadsafe(self._resolve, tickets)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _serve(self, engine: Engine) -> None:
        self._due = False
        engine.serve()

    def _resolve(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            waiting = self._waiting.pop(ticket, None)
            if waiting is None:
                continue
            try:
                waiting.done(ticket)
                if self.feedback is not None and ticket.outcome is RequestOutcome.OK:
                    self.feedback.remember(waiting.request_id, ticket)
            except Exception as error:  # the engine may be our caller, and other requests share its batch
                log_event("reply-failed", level="error", error=repr(error))
                waiting.engine.metrics.requests[RequestOutcome.FAILED].inc()
            else:
                waiting.engine.accounts.replied(ticket)


def _tier(engine: Engine, request: InferRequest) -> str | None:
    """The tier whose plan serves a request, empty without one; None where only the model itself is good enough."""
    if request.max_disagreement is not None:
        return tier_within(request.max_disagreement, engine.active.document)
    if request.tier and (known := unknown_tier(request.tier, engine.active.document)):
        raise BadRequestError(f"parameters.tier: is {shown(request.tier)}; this service has {', '.join(known)}")
    return request.tier
