"""Kept connections against a server that does what a test wants, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from offramp_worker.edge.kept import HEAD_BYTES, Answered, KeptConnections

Story = Callable[[KeptConnections, list[int]], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nX-Name: Value\r\ncontent-length: 2\r\n\r\nok"
LATE, SOON = 30.0, 0.05


def against(says: Callable[[int, int], bytes | None], story: Story) -> None:
    """``says`` gets the number of a connection and of the request on it; None closes the connection. The story gets the
    numbers of the connections as well."""
    opened = list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, request = len(opened), 0
        opened.append(number)
        while await reader.read(65536):
            reply = says(number, request)
            if reply is None:
                break
            writer.write(reply)
            request += 1
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        kept = KeptConnections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", most=2)
        await story(kept, opened)
        kept.close()
        server.close()

    asyncio.run(main())


def request_to(kept: KeptConnections) -> bytes:
    return kept.head("/x", {"a": "b"}, length=0)


async def sent(kept: KeptConnections, *, most: int = 100, seconds: float = LATE) -> Answered | str:
    reply = asyncio.get_running_loop().create_future()
    kept.send(request_to(kept), most=most, seconds=seconds, done=reply.set_result)
    return await reply


@pytest.mark.parametrize("way", ["send", "post"])
def test_a_connection_is_kept_and_one_that_the_core_has_just_closed_costs_no_request(way: str) -> None:
    async def story(kept: KeptConnections, opened: list[int]) -> None:
        for _ in range(4):
            reply = await (sent(kept) if way == "send" else kept.post(request_to(kept), most=100))
            assert isinstance(reply, Answered), reply
            assert (reply.status, bytes(reply.body), reply.headers["x-name"]) == (200, b"ok", "Value")
        assert opened == [0, 1]

    against(lambda connection, request: None if (connection, request) == (0, 2) else OK, story)


def test_a_reply_that_is_none_is_told_in_words() -> None:
    async def story(kept: KeptConnections, _: list[int]) -> None:
        assert "larger than 1 bytes" in str(await sent(kept, most=1))
        with pytest.raises(ConnectionError, match="larger than 1 bytes"):
            await kept.post(request_to(kept), most=1)

    against(lambda *_: OK, story)
    for wrong, words in (
        (b"SMTP\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + bytes(2 * HEAD_BYTES), "no HTTP|larger"),
    ):

        async def told(kept: KeptConnections, _: list[int], words: str = words) -> None:
            with pytest.raises(ConnectionError, match=words):
                await kept.post(request_to(kept), most=1)

        against(lambda *_, wrong=wrong: wrong, told)


def test_time_runs_out_and_the_next_request_gets_its_own_answer() -> None:
    async def story(kept: KeptConnections, opened: list[int]) -> None:
        assert "no answer within" in str(await sent(kept, seconds=SOON))
        late = asyncio.create_task(kept.post(request_to(kept), most=100))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late, SOON)
        reply = await sent(kept)
        assert isinstance(reply, Answered) and bytes(reply.body) == b"ok"
        assert opened == [0, 1, 2]

    against(lambda connection, _: OK if connection == 2 else b"", story)


def test_word_of_what_comes_is_no_reply_and_a_connection_is_free_once() -> None:
    async def story(kept: KeptConnections, opened: list[int]) -> None:
        for reply in [await sent(kept), *await asyncio.gather(sent(kept), sent(kept))]:
            assert isinstance(reply, Answered) and (reply.status, bytes(reply.body)) == (200, b"ok")
        assert opened == [0, 1]

    against(lambda *_: b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK, story)


@pytest.mark.parametrize("more", [OK, OK[:20], b"x", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
def test_what_comes_behind_the_end_of_a_reply_ends_the_connection_and_is_nobodys_reply(more: bytes) -> None:
    async def story(kept: KeptConnections, opened: list[int]) -> None:
        assert "no HTTP/1.1" in str(await sent(kept))
        for reply in await asyncio.gather(sent(kept), sent(kept)):
            assert isinstance(reply, Answered) and bytes(reply.body) == b"ok"
        assert opened == [0, 1, 2]

    against(lambda connection, _: OK + (b"" if connection else more), story)


def test_nobody_is_there() -> None:
    async def story() -> None:
        kept = KeptConnections("http://127.0.0.1:1", most=2)
        assert kept.room and isinstance(await sent(kept), str)
        with pytest.raises(OSError):
            await kept.post(request_to(kept), most=100)

    asyncio.run(story())
