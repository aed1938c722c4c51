"""Streams: what they send, how many there may be, how they end, and that a slow reader holds nobody up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from boards import SINCE, seen  # type: ignore[import-not-found]
from served import serving  # type: ignore[import-not-found]

from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.live import Shared

KEY = ServiceKey("default", "sim")


def eventually(condition: Callable[[], Any], *, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def lines_of(response: httpx.Response) -> Iterator[str]:
    return response.iter_lines()


def sections(lines: Iterator[str]) -> dict[str, str]:
    found = next(line for line in lines if line.startswith("data: "))
    return dict(json.loads(found.removeprefix("data: ")))


def tell(site: Any, watched: Any, number: int = -1, *, name: str = "sim") -> None:
    snapshot, decision, now = watched.passes[number]
    site.now[0] = now
    site.call(lambda: site.board.passed(ServiceKey("default", name), seen(snapshot, decision, now, name=name)))


def test_a_stream_sends_everything_first_and_then_only_what_changed(site: Any, states: Any) -> None:
    watched = states["promoted_once"]
    for number in range(10):
        tell(site, watched, number)
    with httpx.stream("GET", f"{site.url}/services/default/sim/live", timeout=90, trust_env=False) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = lines_of(stream)
        assert next(lines) == "retry: 3000"
        first = sections(lines)
        assert {"head", "rollout", "network", "latency", "why", "history", "state", "events"} < set(first)
        tell(site, watched, 11)
        assert 0 < len(sections(lines)) < len(first)


def test_a_quiet_stream_beats(states: Any) -> None:
    with serving(heartbeat_seconds=0.05) as site:
        tell(site, states["disabled"])
        with httpx.stream("GET", f"{site.url}/live", timeout=90, trust_env=False) as stream:
            lines = lines_of(stream)
            sections(lines)
            assert [next(line for line in lines if line.startswith(":")) for _ in range(3)] == [": still here"] * 3


def test_passes_of_other_services_do_not_wake_a_stream(states: Any) -> None:
    with serving(heartbeat_seconds=60) as site:
        tell(site, states["disabled"])
        with httpx.stream("GET", f"{site.url}/services/default/sim/live", timeout=90, trust_env=False) as stream:
            lines = lines_of(stream)
            sections(lines)
            for _ in range(5):
                tell(site, states["promoted_once"], name="other")
            site.call(lambda: site.board.gone(KEY))
            assert sections(lines) == {"announce": "this service was deleted", "fresh": "deleted"}


def test_streams_are_counted_and_one_too_many_is_refused(states: Any) -> None:
    with serving(max_clients=2) as site:
        tell(site, states["disabled"])
        first = httpx.Client(trust_env=False, timeout=90)
        with first.stream("GET", f"{site.url}/live") as one, first.stream("GET", f"{site.url}/live") as two:
            for stream in (one, two):
                assert stream.status_code == 200
            eventually(lambda: site.streams.open == 2)
            refused = httpx.get(f"{site.url}/live", trust_env=False, timeout=90)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "10"
        first.close()
        eventually(lambda: site.streams.open == 0)


def test_the_end_of_the_server_ends_every_stream_soon(states: Any) -> None:
    with serving(heartbeat_seconds=60) as site:
        tell(site, states["disabled"])
        client = httpx.Client(trust_env=False, timeout=90)
        stream = client.send(client.build_request("GET", f"{site.url}/live"), stream=True)
        lines = lines_of(stream)
        sections(lines)
        ended = threading.Event()

        def drain() -> None:
            list(lines)
            ended.set()

        threading.Thread(target=drain, daemon=True).start()
    assert ended.wait(60)
    client.close()


def test_a_reader_that_reads_nothing_holds_nobody_up(states: Any) -> None:
    """Its socket fills up; passes go on in the time that they take, and others are answered."""
    with serving(heartbeat_seconds=60, min_interval_seconds=0.0) as site:
        watched = states["rolled_back"]
        host, port = site.url.removeprefix("http://").split(":")
        deaf = socket.create_connection((host, int(port)))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /services/default/sim/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        tell(site, watched, 0)
        for number in range(60):
            tell(site, watched, number % len(watched.passes))
        answer = httpx.get(f"{site.url}/api/v1/services/default/sim", trust_env=False, timeout=90)
        assert answer.status_code == 200
        assert site.call(lambda: site.board.version) == 61
        deaf.close()
        assert site.now[0] >= SINCE


@pytest.mark.slow
def test_many_readers_of_the_overview_share_one_rendering_and_none_misses_the_last_pass(states: Any) -> None:
    async def story() -> None:
        made, now = [0], [0.0]
        shared = Shared(seconds=1.0, clock=lambda: now[0])

        async def make() -> tuple[int, dict[str, str]]:
            made[0] += 1
            await asyncio.sleep(0.01)
            return made[0], {"services": str(made[0])}

        answers = await asyncio.gather(*(shared.get("q=a", make) for _ in range(20)))
        assert made == [1] and {version for version, _ in answers} == {1}
        assert (await shared.get("q=b", make))[0] == 2
        now[0] = 1.5
        assert (await shared.get("q=a", make))[0] == 3
        for number in range(200):
            await shared.get(str(number), make)
        assert len(shared._made) <= 64

    asyncio.run(story())
    with serving(min_interval_seconds=0.0) as site:
        tell(site, states["disabled"])
        with httpx.stream("GET", f"{site.url}/live", timeout=90, trust_env=False) as stream:
            lines = lines_of(stream)
            sections(lines)
            tell(site, states["promoted_once"], name="late")  # within the second in which the rendering is shared
            assert "late" in sections(lines)["services"]
