"""One address for all workers: clients do not notice when workers come, go or die between their requests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from offramp_core.errors import InvalidArgumentError
from offramp_operator.local import proxy as proxy_module
from offramp_operator.local.front import FrontProcess
from offramp_operator.local.proxy import Proxy

Answer = Callable[["Backend", asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class Backend:
    """A server that answers each line with its name, or does what ``answer`` says with a connection's line."""

    def __init__(self, name: str, answer: Answer | None = None) -> None:
        self.name, self.answer = name, answer
        self.lines: list[bytes] = []
        self.connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 24)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def stop(self) -> None:
        """Refuse connections and reset the open ones, as a process that dies does."""
        assert self._server is not None
        self._server.close()
        for writer in list(self.connections):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            while line := await reader.readline():
                self.lines.append(line)
                if self.answer is not None:
                    await self.answer(self, reader, writer, line)
                else:
                    writer.write(f"{self.name}\n".encode())
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, line: bytes = b"hello\n") -> bytes:
        self.writer.write(line)
        return await asyncio.wait_for(self.reader.readline(), 30)


class Bench:
    def __init__(self, proxy: Proxy, port: int, answers: list[Any]) -> None:
        self.proxy, self.port, self.answers = proxy, port, answers
        self.backends: dict[str, tuple[str, int]] = {}

    async def add(self, backend: Backend) -> Backend:
        self.backends[backend.name] = await backend.start()
        self.proxy.set_backends(self.backends)
        return backend

    def remove(self, backend: Backend) -> None:
        del self.backends[backend.name]
        self.proxy.set_backends(self.backends)

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    answers: list[Any] = []
    proxy = Proxy(answers.append)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    try:
        yield Bench(proxy, server.sockets[0].getsockname()[1], answers)
    finally:
        server.close()
        await proxy.drain_clients(0.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "QUIET_SECONDS", 0.4)
    monkeypatch.setattr(proxy_module, "NO_BACKEND_PATIENCE_SECONDS", 0.5)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 120))


async def until(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.01)


def test_connections_are_spread_evenly_and_a_connection_stays_where_it_is() -> None:
    async def story() -> None:
        async with bench() as made:
            for name in "abc":
                await made.add(Backend(name))
            clients = [await made.client() for _ in range(9)]
            first = [await client.ask() for client in clients]
            assert sorted(first) == [b"a\n"] * 3 + [b"b\n"] * 3 + [b"c\n"] * 3
            assert [await client.ask() for client in clients] == first

    run(story())


def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    async def story() -> None:
        async with bench() as made:
            dead = await made.add(Backend("dead"))
            await made.add(Backend("alive"))
            await dead.stop()
            clients = [await made.client() for _ in range(4)]
            assert [await client.ask() for client in clients] == [b"alive\n"] * 4

    run(story())


@pytest.mark.slow
def test_a_client_between_two_requests_does_not_notice_that_its_worker_ended() -> None:
    async def story() -> None:
        async with bench() as made:
            first = await made.add(Backend("first"))
            client = await made.client()
            assert await client.ask() == b"first\n"
            await made.add(Backend("second"))
            await asyncio.sleep(proxy_module.QUIET_SECONDS * 2)
            made.remove(first)
            await first.stop()
            assert await client.ask() == b"second\n"

    run(story())


def test_a_worker_that_ends_right_after_its_answer_costs_the_next_request_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_module, "QUIET_SECONDS", 30.0)  # the next request comes in time, however slow we are

    async def last(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.write(b"last\n")
        await writer.drain()
        writer.close()

    async def story() -> None:
        async with bench() as made:
            ending = await made.add(Backend("ending", last))
            client = await made.client()
            assert await client.ask() == b"last\n"
            await until(lambda: not ending.connections, what="the end of the worker's connection")
            await made.add(Backend("next"))
            made.remove(ending)
            assert [await client.ask() for _ in range(2)] == [b"next\n"] * 2

    run(story())


def test_a_request_whose_worker_dies_before_answering_is_answered_by_another() -> None:
    async def die(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.transport.abort()

    async def story() -> None:
        async with bench() as made:
            dying = await made.add(Backend("dying", die))
            client = await made.client()
            client.writer.write(b"a ")
            await until(lambda: bool(dying.connections), what="the first connection")
            await made.add(Backend("other"))
            made.remove(dying)
            assert await client.ask(b"request\n") == b"other\n"
            assert dying.lines == [b"a request\n"]

    run(story())


def test_a_request_that_kills_one_worker_is_not_sent_round_to_kill_them_all() -> None:
    async def die(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.transport.abort()

    async def story() -> None:
        async with bench() as made:
            backends = [await made.add(Backend(name, die)) for name in "abcd"]
            client = await made.client()
            assert await client.ask(b"poison\n") == b""
            assert sum(len(backend.lines) for backend in backends) == 2

    run(story())


def test_an_answer_that_breaks_off_ends_the_connection_instead_of_hanging() -> None:
    async def half(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.write(b"half an ans")
        await writer.drain()
        writer.close()

    async def story() -> None:
        async with bench() as made:
            await made.add(Backend("a", half))
            client = await made.client()
            assert await client.ask() == b"half an ans"
            assert await asyncio.wait_for(client.reader.read(), 30) == b""

    run(story())


@pytest.mark.slow
def test_draining_waits_for_a_request_and_then_moves_the_client_without_closing_it() -> None:
    release = asyncio.Event()

    async def slow(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        await release.wait()
        writer.write(b"slow\n")

    async def story() -> None:
        async with bench() as made:
            old = await made.add(Backend("old", slow))
            busy = await made.client()
            asking = asyncio.create_task(busy.ask())
            await until(lambda: old.lines == [b"hello\n"], what="the request")
            await made.add(Backend("new"))
            made.remove(old)
            draining = asyncio.create_task(made.proxy.drain("old"))
            await asyncio.sleep(proxy_module.QUIET_SECONDS * 3)
            assert not draining.done(), "a request is under way"
            release.set()
            assert await asking == b"slow\n"
            await asyncio.wait_for(draining, 30)
            assert made.answers == [{"drained": "old"}]
            await old.stop()
            assert await busy.ask() == b"new\n"

    run(story())


def test_without_a_worker_clients_wait_a_little_and_are_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with bench() as made, httpx.AsyncClient(trust_env=False) as http:
            reply = await http.get(f"http://127.0.0.1:{made.port}/v2", timeout=60)
            assert reply.status_code == 503
            assert "no worker is ready" in reply.json()["error"]
            monkeypatch.setattr(proxy_module, "NO_BACKEND_PATIENCE_SECONDS", 30.0)
            client = await made.client()
            asking = asyncio.create_task(client.ask())
            await asyncio.sleep(0.05)
            await made.add(Backend("late"))
            assert await asking == b"late\n"

    run(story())


def test_large_requests_and_answers_pass_whole_in_both_directions() -> None:
    payload = os.urandom(3_000_000).replace(b"\n", b"x") + b"\n"

    async def echo(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.write(line[::-1].lstrip(b"\n") + b"\n")

    async def story() -> None:
        async with bench() as made:
            await made.add(Backend("a", echo))
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=1 << 24)
            for _ in range(3):
                writer.write(payload)
                assert await asyncio.wait_for(reader.readline(), 20) == payload[:-1][::-1] + b"\n"

    run(story())


def test_a_client_that_stops_sending_still_gets_its_answer() -> None:
    async def late(backend: Backend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> None:
        await asyncio.sleep(0.3)
        writer.write(b"late\n")

    async def story() -> None:
        async with bench() as made:
            await made.add(Backend("a", late))
            client = await made.client()
            client.writer.write(b"hello\n")
            client.writer.write_eof()
            assert await asyncio.wait_for(client.reader.read(), 30) == b"late\n"

    run(story())


# --- the process -----------------------------------------------------------------------------------


@asynccontextmanager
async def front(backend: Backend) -> AsyncIterator[FrontProcess]:
    address = await backend.start()
    made = FrontProcess(0)
    made.start()
    await made.serve({backend.name: address})
    try:
        yield made
    finally:
        await made.close(grace_seconds=1.0)
        await backend.stop()


async def ask_at(url: str) -> bytes:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    client = Client(reader, writer)
    try:
        return await client.ask()
    finally:
        writer.close()


@pytest.mark.slow
def test_the_front_serves_from_a_process_of_its_own_and_keeps_its_address_when_that_dies() -> None:
    async def story() -> None:
        async with front(Backend("a")) as made:
            assert await ask_at(made.url) == b"a\n"
            assert made._process is not None
            os.kill(made._process.pid, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while True:  # a connection that the dead process had taken is reset; new ones are served again
                try:
                    if await ask_at(made.url) == b"a\n":
                        break
                except OSError:
                    pass
                assert time.monotonic() < deadline, "the front did not come back"

    run(story())


@pytest.mark.slow
def test_the_front_drains_a_worker_that_nobody_uses_at_once() -> None:
    async def story() -> None:
        async with front(Backend("a")) as made:
            assert await ask_at(made.url) == b"a\n"
            await asyncio.wait_for(made.drain("a"), 30)

    run(story())


@pytest.mark.slow
def test_closing_the_front_frees_the_port() -> None:
    async def story() -> None:
        async with front(Backend("a")) as made:
            assert await ask_at(made.url) == b"a\n"
            port = int(made.url.rpartition(":")[2])
        again = FrontProcess(port)
        await again.close()

    run(story())


def test_a_port_in_use_is_refused_with_the_next_step() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=rf"port {port} cannot be used.*--port"):
            FrontProcess(port)
