"""What a connection holds against its client, and what not: time in which the worker itself did not read. The clock is
turned by hand."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from offramp_worker import main
from offramp_worker.http.budget import ByteBudget
from offramp_worker.http.connection import SEND_SECONDS, Connection
from offramp_worker.http.inference import Reply
from offramp_worker.http.refusals import Refusals, Response

REQUEST = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n\r\nbody"
IN_ITS_HEAD, IN_ITS_BODY = 20, len(REQUEST) - 2
RECEIVE_SECONDS = 3.0


class Line:
    """A connection of a socket, an engine and a clock that do what the test says."""

    def __init__(self) -> None:
        self.now, self.sent = 0.0, b""
        self.replies: list[Reply] = []
        self.budget = ByteBudget(1000)
        self.transport = Mock(asyncio.Transport, write=self._write, get_extra_info=lambda *_: None)
        self.transport.is_closing.return_value = False
        loop: Any = SimpleNamespace(time=lambda: self.now, call_soon=lambda call, *args: call(*args), call_later=Mock())
        inference: Any = SimpleNamespace(
            max_body_bytes=1000, answer=lambda path, headers, body, reply: self.replies.append(reply)
        )
        self.connection = Connection(
            inference=inference,
            refusals=Refusals(),
            budget=self.budget,
            idle_seconds=75.0,
            receive_seconds=RECEIVE_SECONDS,
            config=uvicorn.Config(_app, log_config=None),
            server_state=ServerState(),
            app_state={},
            _loop=loop,
        )
        self.connection.connection_made(self.transport)

    def _write(self, data: bytes) -> None:
        self.sent += data

    def pass_seconds(self, seconds: float) -> None:
        """As :func:`main._sweep` looks, once a second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.connection.expire(self.now, stood_still=False)

    def answer(self) -> None:
        self.replies.pop(0)(Response(200, b"", []))

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.sent.split(b"HTTP/1.1 ")[1:]]


async def _app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("only inference is asked for")


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_request_that_waits_unread_behind_a_slow_one_has_its_time_afterwards(line: Line) -> None:
    line.connection.data_received(REQUEST + REQUEST[:IN_ITS_BODY])
    line.pass_seconds(40)
    line.answer()
    line.pass_seconds(2)
    assert line.statuses == [200]
    line.connection.data_received(REQUEST[IN_ITS_BODY:])
    line.answer()
    assert line.statuses == [200, 200]


def test_a_connection_that_says_nothing_is_closed_when_others_would_be_idle(line: Line) -> None:
    line.pass_seconds(75)
    assert not line.transport.close.called
    line.pass_seconds(1)
    assert line.transport.close.called and not line.sent


@pytest.mark.parametrize("received", [IN_ITS_HEAD, IN_ITS_BODY])
def test_so_has_one_behind_replies_that_were_not_taken(line: Line, received: int) -> None:
    line.connection.data_received(REQUEST)
    line.connection.data_received(REQUEST[:received])
    line.connection.pause_writing()
    line.answer()
    line.pass_seconds(20)
    line.connection.resume_writing()
    line.pass_seconds(2)
    assert line.statuses == [200]
    line.connection.data_received(REQUEST[received:])
    line.answer()
    assert line.statuses == [200, 200]


def test_a_request_that_is_complete_waits_for_no_room_and_gets_one_answer(line: Line) -> None:
    line.budget.take(line.budget.limit)
    line.connection.data_received(REQUEST)
    line.pass_seconds(10)
    line.answer()
    assert line.statuses == [200]


def test_one_that_is_not_is_told_to_come_again(line: Line) -> None:
    line.budget.take(line.budget.limit)
    line.connection.data_received(REQUEST[:IN_ITS_BODY])
    line.pass_seconds(3)
    assert line.statuses == [503]
    assert line.budget.used == line.budget.limit


@pytest.mark.parametrize("received", [IN_ITS_HEAD, IN_ITS_BODY])
def test_a_loop_that_stood_still_reads_first(line: Line, received: int) -> None:
    line.connection.data_received(REQUEST[:received])
    line.now += 40.0
    line.connection.expire(line.now, stood_still=True)
    line.pass_seconds(2)
    assert line.statuses == []
    line.pass_seconds(2)
    assert line.statuses == [408], "the rest has not come although it was read for"


def test_a_loop_that_stood_still_sends_first(line: Line) -> None:
    line.connection.data_received(REQUEST)
    line.connection.pause_writing()
    line.answer()
    line.now += SEND_SECONDS + 1.0
    line.connection.expire(line.now, stood_still=True)
    line.transport.abort.assert_not_called()
    line.pass_seconds(SEND_SECONDS + 1.0)
    line.transport.abort.assert_called()


def test_whoever_looks_after_the_connections_tells_them_that_the_loop_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "SWEEP_SECONDS", 0.05)
    told: list[bool] = []
    connection = Mock(Connection, expire=lambda now, *, stood_still: told.append(stood_still))
    server: Any = SimpleNamespace(server_state=SimpleNamespace(connections={connection}))

    async def stand_still() -> None:
        sweeper = asyncio.create_task(main._sweep(server))
        await asyncio.sleep(0)
        time.sleep(0.3)
        while True not in told or False not in told:
            await asyncio.sleep(0.01)
        sweeper.cancel()

    asyncio.run(asyncio.wait_for(stand_still(), 60))
    assert told[0] is True
