"""A server that forgets, ends, refuses and empties: what lists and watches make of it, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from offramp_operator.kube import watch as watch_module
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import CONFIG_MAP, HTTP_ROUTE, SERVICE, Kind, Object
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.platform import ServiceKey

EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "The provided continue parameter is too old"}
FORBIDDEN = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no rights"}


def made(name: str, version: int, *, kind: Kind = CONFIG_MAP) -> Object:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "data": {}, "spec": {}}


def page(version: int, *items: Object, more: str = "") -> tuple[int, Any]:
    return 200, {"metadata": {"resourceVersion": str(version), "continue": more}, "items": list(items)}


class Scripted(ThreadingHTTPServer):
    """Answers lists and watches as its script says: the next answer in line, and the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lists: list[tuple[int, Any]] = [page(1)]
        self.watches: list[list[Any] | None] = [None]
        self.asked: list[str] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()

    def next_of(self, answers: list[Any]) -> Any:
        with self.lock:
            return answers.pop(0) if len(answers) > 1 else answers[0]


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.asked.append("watch" if "watch" in query else f"list {query.get('continue', '')}".rstrip())
        if "watch" in query:
            self._watch(self.server.next_of(self.server.watches))
            return
        status, value = self.server.next_of(self.server.lists)
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, events: list[Any] | None) -> None:
        """Tell the events and end; None stays open and tells nothing."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events or ():
            self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()
        if events is None:
            self.server.ended.wait(60)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


Condition = Callable[[], bool]


def follow(
    server: Scripted,
    tools: Any,
    feed: Feed,
    *,
    until: Condition | None = None,
    kind: Kind = CONFIG_MAP,
    seconds: float = 30.0,
) -> asyncio.Task[None]:
    """Follow a kind until a condition holds, or for ``seconds`` where there is none; the task as it was then."""

    async def story() -> asyncio.Task[None]:
        with tools.client_at(server.server_address[1]) as client:
            task = asyncio.create_task(feed.follow(client, kind, "default"))
            if until is None:
                await asyncio.wait({task}, timeout=seconds)
            else:
                await tools.eventually(
                    lambda: task.done() or until(),
                    what="what is waited for",
                    seconds=seconds,
                    state=lambda: server.asked[-20:],
                )
            stopped = task.done()
            task.cancel()
            await asyncio.wait({task})
            assert not stopped, f"following ended: {task}"
            return task

    return tools.run(story())  # type: ignore[no-any-return]


def test_a_list_that_expires_between_two_pages_is_begun_anew(server: Scripted, tools: Any) -> None:
    server.lists = [
        page(1, made("old", 1)),
        page(5, made("old", 1), more="second"),
        (410, EXPIRED),
        page(9, made("new", 7)),
    ]
    server.watches = [[{"type": "ERROR", "object": EXPIRED}], None]
    cache = ObjectCache()
    follow(
        server, tools, Feed(cache, lambda _: None), until=lambda: cache.get(CONFIG_MAP, "default", "new") is not None
    )
    assert cache.get(CONFIG_MAP, "default", "old") is None, "the list that was complete counts"
    assert server.asked[:5] == ["list", "watch", "list", "list second", "list"]


@pytest.mark.parametrize(
    "ends", [[{"type": "ERROR", "object": EXPIRED}], []], ids=["forgets every version", "ends every watch at once"]
)
def test_a_server_that_breaks_every_watch_at_once_is_asked_ever_more_seldom(
    ends: list[Any], server: Scripted, tools: Any
) -> None:
    server.watches = [ends]
    follow(server, tools, Feed(ObjectCache(), lambda _: None), seconds=2.0)
    assert server.asked.count("watch") < 12, "0.1 s at least before the second attempt, and twice as long each time"


def test_news_that_come_before_each_end_are_taken_all_the_same(server: Scripted, tools: Any) -> None:
    server.watches = [
        [{"type": "ADDED", "object": made("first", 3)}],
        [{"type": "ADDED", "object": made("second", 4)}],
        None,
    ]
    cache = ObjectCache()
    follow(server, tools, Feed(cache, lambda _: None), until=lambda: len(cache.names(CONFIG_MAP)) == 2)
    assert server.asked.count("list") == 1, "a watch that ended goes on from where it was"


def test_a_kind_that_may_not_be_read_for_a_while_is_kept_and_told_and_works_again(
    server: Scripted, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "ABSENT_SECONDS", 0.02)
    route = made("digits", 3, kind=HTTP_ROUTE)
    cache, woken, told = ObjectCache(), [], []
    cache.put(SERVICE, made("digits", 2, kind=SERVICE))
    feed = Feed(cache, woken.append)

    def forbidden() -> bool:
        if (problem := cache.unreadable(HTTP_ROUTE, "default")) and not told:
            told.append(problem)
            assert cache.get(HTTP_ROUTE, "default", "digits") is not None, "nobody said that it is gone"
            server.lists = [page(9, route)]
        return bool(told) and not cache.unreadable(HTTP_ROUTE, "default")

    server.lists = [page(3, route), (403, FORBIDDEN)]
    server.watches = [[{"type": "ERROR", "object": FORBIDDEN}], None]
    follow(server, tools, feed, until=forbidden, kind=HTTP_ROUTE)
    assert "no rights" in told[0]
    assert cache.get(HTTP_ROUTE, "default", "digits") is not None
    assert woken == [ServiceKey("default", "digits")] * 2, "to tell it, and to do what could not be done"


def test_a_kind_that_was_gone_for_a_while_is_found_again_as_it_was(
    server: Scripted, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a proxy whose answers are wrong for a moment: the same objects, of the same versions, are changed later
    on."""
    monkeypatch.setattr(watch_module, "ABSENT_SECONDS", 0.02)
    cache = ObjectCache()
    server.lists = [
        page(3, made("digits", 3, kind=HTTP_ROUTE)),
        (404, {"kind": "Status", "message": "gone"}),
        page(12, made("digits", 11, kind=HTTP_ROUTE)),
    ]
    server.watches = [[{"type": "ERROR", "object": EXPIRED}], None]

    def found() -> bool:
        obj = cache.get(HTTP_ROUTE, "default", "digits")
        return obj is not None and obj["metadata"]["resourceVersion"] == "11"

    follow(server, tools, Feed(cache, lambda _: None), until=found, kind=HTTP_ROUTE)


def test_a_namespace_that_is_empty_after_the_list_that_follows_a_lost_watch_is_not_late(
    server: Scripted, tools: Any
) -> None:
    now = [0.0]
    feed = Feed(ObjectCache(), lambda _: None, clock=lambda: now[0])

    async def story() -> None:
        with tools.client_at(server.server_address[1]) as client:
            server.lists = [page(20, made("short-lived", 20))]
            await feed.relist(client, ("default",), kinds=(CONFIG_MAP,))
            now[0] = 50.0
            assert feed.late_seconds() == 50.0, "no watch has told it"
            server.lists, server.watches = [page(30)], [None]
            task = asyncio.create_task(feed.follow(client, CONFIG_MAP, "default"))
            await tools.eventually(lambda: "watch" in server.asked, what="a new beginning")
            now[0] = 500.0
            assert feed.late_seconds() == 0.0, (
                "what was awaited came and went before the list that the watch begins with"
            )
            task.cancel()
            await asyncio.wait({task})

    tools.run(story())


def test_a_bookmark_tells_that_nothing_was_missed(server: Scripted, tools: Any) -> None:
    now = [0.0]
    feed = Feed(ObjectCache(), lambda _: None, clock=lambda: now[0])
    server.watches = [[{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "25"}}}], None]
    follow(server, tools, feed, until=lambda: server.asked.count("watch") == 2)

    async def relist() -> None:
        with tools.client_at(server.server_address[1]) as client:
            server.lists = [page(30, made("seen", 20))]
            await feed.relist(client, ("default",), kinds=(CONFIG_MAP,))

    tools.run(relist())
    now[0] = 70.0
    assert feed.late_seconds() == 0.0


def test_what_was_never_listed_is_named_and_a_later_list_does_not_make_it_missing_again(
    server: Scripted, tools: Any
) -> None:
    feed = Feed(ObjectCache(), lambda _: None)
    assert feed.missing() == "every kind"
    server.lists = [(403, FORBIDDEN)]

    async def story() -> None:
        with tools.client_at(server.server_address[1]) as client:
            task = asyncio.create_task(feed.begin(client, ("default",), kinds=(CONFIG_MAP,)))
            await tools.eventually(lambda: "no rights" in feed.missing(), what="the reason", state=feed.missing)
            assert feed.missing().startswith("configmaps in default (")
            server.lists = [page(3)]
            await tools.eventually(task.done, what="the list", seconds=60)
            assert feed.missing() == ""
            server.lists = [(503, {"kind": "Status", "message": "down"})]
            again = asyncio.create_task(feed.begin(client, ("default",), kinds=(CONFIG_MAP,)))
            await tools.eventually(lambda: server.asked.count("list") > 4, what="a list that fails later")
            assert feed.missing() == "", "what was listed once is known"
            again.cancel()
            await asyncio.wait({again})

    tools.run(story())
