"""Who runs a batch: the caller when that is short and the engine idle, else the engine's own thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import bundles
import numpy as np
import pytest
from engines import new_engine
from processes import DEADLINE_SECONDS, eventually
from stages import behind

from offramp_core.batching import rows_within
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.engine import INLINE_SECONDS
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.front import Front
from offramp_worker.http.tensors import InferRequest


class Watched:
    """An engine that notes which thread delivered what."""

    def __init__(self, bundle: Bundle, sessions: Sessions) -> None:
        self.by: dict[Ticket, int] = {}
        self.front: Front | None = None
        self.engine = new_engine(bundle, sessions, deliver=self._note)
        self.longest = rows_within(bundle.profile, seconds=INLINE_SECONDS)

    def submit(self, rows: int) -> Ticket:
        return self.engine.submit(bundles.inputs(rows), never_exit=False, wake=False)

    def _note(self, tickets: list[Ticket]) -> None:
        self.by.update(dict.fromkeys(tickets, threading.get_ident()))
        if self.front is not None:
            self.front.deliver(tickets)


@pytest.fixture
def watched(bundle: Bundle, sessions: Sessions) -> Iterator[Watched]:
    watched = Watched(bundle, sessions)
    watched.engine.start()
    # Before its first wait it would take what a test submits without waking it.
    eventually(lambda: watched.engine._batcher._changed._waiters, what="an engine that waits")  # type: ignore[attr-defined]
    yield watched
    watched.engine.close()
    assert watched.engine.join(90.0)


def test_a_short_batch_runs_in_the_thread_that_asks(watched: Watched, sessions: Sessions) -> None:
    assert 1 < watched.longest < 32
    tickets = [watched.submit(1) for _ in range(watched.longest)]
    assert not watched.by
    watched.engine.serve()
    assert watched.by == dict.fromkeys(tickets, threading.get_ident())
    np.testing.assert_array_equal(tickets[0].labels, sessions.exact(bundles.inputs(1)).argmax(axis=1))
    assert watched.engine.counters.snapshot()[0].batches == 1


def test_a_long_batch_runs_in_the_engines_thread(watched: Watched) -> None:
    ticket = watched.submit(watched.longest + 1)
    watched.engine.serve()
    eventually(lambda: ticket in watched.by, what="the reply")
    assert watched.by[ticket] != threading.get_ident()


def test_nobody_waits_for_a_busy_engine(watched: Watched) -> None:
    running, gate = threading.Event(), threading.Event()
    engine = watched.engine

    def hold() -> None:
        running.set()
        assert gate.wait(DEADLINE_SECONDS)

    engine._executor.exact_stage = behind(hold, engine._executor.exact_stage)
    first = engine.submit(bundles.inputs(1), never_exit=False)
    assert running.wait(DEADLINE_SECONDS)
    second = watched.submit(1)
    engine.serve()  # returns although the engine is held
    assert not watched.by
    gate.set()
    eventually(lambda: len(watched.by) == 2, what="both replies")
    assert watched.by[first] == watched.by[second] != threading.get_ident()


def test_audits_of_a_batch_that_ran_here_are_worked_off_by_the_engine(watched: Watched) -> None:
    engine = watched.engine
    engine.activate(replace(engine.active, off=replace(engine.active.off, audit_rate=1.0)))
    watched.submit(2)
    watched.engine.serve()
    eventually(lambda: engine.counters.snapshot()[0].audited == 2, what="audits")


def test_requests_of_one_turn_of_the_loop_share_a_batch(watched: Watched) -> None:
    async def ask() -> list[Ticket]:
        loop = asyncio.get_running_loop()
        watched.front = front = Front(loop)
        replies: list[asyncio.Future[Ticket]] = [loop.create_future() for _ in range(3)]
        for reply in replies:
            request = InferRequest(bundles.inputs(1), None, False, math.inf, (("label", False),))
            front.submit(watched.engine, request, done=reply.set_result)
        assert not any(reply.done() for reply in replies)
        return await asyncio.gather(*replies)

    tickets = asyncio.run(ask())
    assert set(watched.by) == set(tickets)
    assert watched.engine.counters.snapshot()[0].batches == 1


def test_a_reply_that_cannot_be_given_harms_no_other(watched: Watched) -> None:
    async def ask() -> Ticket:
        loop = asyncio.get_running_loop()
        watched.front = front = Front(loop)
        good: asyncio.Future[Ticket] = loop.create_future()
        request = InferRequest(bundles.inputs(1), None, False, math.inf, (("label", False),))

        def broken(_: Ticket) -> None:
            raise RuntimeError("no way to reply")

        front.submit(watched.engine, request, done=broken)
        front.submit(watched.engine, request, done=good.set_result)
        return await good

    assert asyncio.run(ask()).error is None
    assert watched.engine.counters.snapshot()[0].failed_batches == 0
