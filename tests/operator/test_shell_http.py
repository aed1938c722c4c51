"""The client that asks workers, against servers that say exactly what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from offramp_core.errors import UnavailableError
from offramp_operator.shell import http
from offramp_operator.shell.bounded import AnswerRefusedError
from offramp_operator.shell.http import Answer, HungUpError, WorkerClient

FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"
FINE_ANSWER = Answer(200, b"fine")


class Worker:
    """Answers the n-th request with the n-th piece of ``script``, the last one for ever. None says nothing, and ``hangs_up`` closes after answering."""

    def __init__(self, *script: bytes | None, hangs_up: bool = False, slowly: bool = False) -> None:
        self._script, self._hangs_up, self._slowly = list(script), hangs_up, slowly
        self.requests: list[bytes] = []
        self.connections = self.open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                said = self._script.pop(0) if len(self._script) > 1 else self._script[0]
                for piece in [said[i : i + 1] for i in range(len(said or b""))] if self._slowly else [said or b""]:  # type: ignore[index]
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._hangs_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def listening(worker: Worker) -> AsyncIterator[tuple[Worker, WorkerClient]]:
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = WorkerClient()
    try:
        yield worker, client
    finally:
        client.close()
        server.close()


async def get(client: WorkerClient, worker: Worker, **query: str) -> Answer:
    return await client.get(f"{worker.url}/v1/observations", query=query, headers={"Authorization": "Bearer t"})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: Any) -> Callable[[Coroutine[Any, Any, None]], None]:
    """On the loop of the tests, and on that of the operator."""

    def run(story: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(story, 60))

    return run


def test_a_connection_serves_one_request_after_the_other(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE)) as (worker, client):
            assert [await get(client, worker) for _ in range(3)] == [FINE_ANSWER] * 3
            assert worker.connections == 1
            assert await client.post(f"{worker.url}/v1/config", body=b"", headers={}) == FINE_ANSWER
            assert worker.connections == 1

    run(story())


def test_requests_at_the_same_time_have_a_connection_each(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE)) as (worker, client):
            assert await asyncio.gather(*(get(client, worker) for _ in range(5))) == [FINE_ANSWER] * 5
            assert worker.connections == 5

    run(story())


def test_an_answer_may_come_byte_by_byte(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE, slowly=True)) as (worker, client):
            assert [await get(client, worker) for _ in range(2)] == [FINE_ANSWER] * 2

    run(story())


def test_a_connection_that_the_worker_closed_meanwhile_is_made_anew(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE, hangs_up=True)) as (worker, client):
            assert [await get(client, worker) for _ in range(3)] == [FINE_ANSWER] * 3
            assert worker.connections == 3

    run(story())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfine",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nfine",
        FINE + b"and something nobody asked for",
    ],
    ids=["told to close", "HTTP/1.0", "more than told"],
)
def test_a_connection_is_not_used_again_where_it_does_not_stay_in_step(run: Any, answer: bytes) -> None:
    async def story() -> None:
        async with listening(Worker(answer)) as (worker, client):
            assert [await get(client, worker) for _ in range(2)] == [FINE_ANSWER] * 2
            assert worker.connections == 2
            await until(lambda: worker.open == 0)

    run(story())


def test_connections_are_kept_for_a_while_and_never_too_many(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_KEPT", 2)
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.5)

    async def story() -> None:
        async with listening(Worker(FINE)) as (worker, client):
            await asyncio.gather(*(get(client, worker) for _ in range(5)))
            await until(lambda: worker.open <= 2)
            await until(lambda: worker.open == 0)
            assert await get(client, worker) == FINE_ANSWER

    run(story())


def test_a_request_that_is_given_up_closes_its_connection(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(None, FINE)) as (worker, client):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await get(client, worker)
            await until(lambda: worker.open == 0)
            assert await get(client, worker) == FINE_ANSWER

    run(story())


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nfine\r\n0\r\n\r\n", AnswerRefusedError, "unknown length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nfine", AnswerRefusedError, "unknown length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 9\r\n\r\nfine", AnswerRefusedError, "4, 9 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\nfine", AnswerRefusedError, "-4 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length : 4\r\n\r\nfine", ValueError, "header cannot be read"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000, ValueError, "endless head"),
        (b"220 mail.example ESMTP\r\n\r\n", ValueError, "does not speak HTTP"),
        (b"\r\n\r\n", ValueError, "does not speak HTTP"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_for_sure_is_refused_and_the_connection_with_it(
    run: Any, answer: bytes, error: type[Exception], said: str
) -> None:
    async def story() -> None:
        async with listening(Worker(answer)) as (worker, client):
            with pytest.raises(error, match=said):
                await get(client, worker)
            await until(lambda: worker.open == 0)

    run(story())


def test_an_answer_that_is_cut_short_is_none(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE[:-1], hangs_up=True)) as (worker, client):
            with pytest.raises(HungUpError, match="hung up before its answer was complete"):
                await get(client, worker)
            assert worker.connections == 1, "it was heard, so it is not asked again"

    run(story())


def test_nobody_there_is_an_os_error_and_another_scheme_none_of_our_business(run: Any) -> None:
    async def story() -> None:
        worker = Worker(FINE)
        async with listening(worker):
            pass
        for url, error in ((worker.url, OSError), ("https://127.0.0.1", ValueError), ("http:///v1", ValueError)):
            with pytest.raises(error):
                await WorkerClient().get(url, query={}, headers={})

    run(story())
    assert issubclass(HungUpError, UnavailableError)


def test_what_a_worker_told_cannot_add_to_a_request(run: Any) -> None:
    async def story() -> None:
        async with listening(Worker(FINE)) as (worker, client):
            await get(client, worker, boot="a b&c=d\r\nX-Other: 1", also="sha256:0=5,sha256:1=6")
            first, *headers = worker.requests[0].decode().split("\r\n")
            query = "boot=a%20b%26c%3Dd%0D%0AX-Other%3A%201&also=sha256%3A0%3D5%2Csha256%3A1%3D6"
            assert first == f"GET /v1/observations?{query} HTTP/1.1"
            assert [h.partition(":")[0] for h in headers if h] == ["Host", "Accept-Encoding", "Authorization"]

    run(story())
