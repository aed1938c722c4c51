"""kopf runs the operator's process: what of it fails is noticed, and the cache keeps nothing that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes import client as kubernetes_client

from offramp_operator.kube import runtime
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import OWN, ROLLOUT, SERVICE, Kind, Object
from offramp_operator.kube.watch import RELIST_SECONDS, Feed, Freshness
from offramp_operator.metrics import Metrics


async def nothing() -> None:
    """Nothing to begin or end."""


def registry(tools: Any, api: Any, **parts: Any) -> kopf.OperatorRegistry:
    chosen: dict[str, Any] = {
        "start": nothing,
        "end": nothing,
        "on_event": lambda *_: None,
        "failed": lambda: None,
        "listed_anew": lambda: None,
    }
    return runtime.registry(**chosen | parts, login=lambda: tools.api_client(api.kubeconfig))


async def running(tools: Any, handlers: kopf.OperatorRegistry, story: Callable[[], Awaitable[None]]) -> None:
    """Run kopf beside a story, and end it after."""
    stop = asyncio.Event()
    task = asyncio.create_task(runtime.run(handlers, namespaces=(), stop=stop))
    try:
        await story()
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=60)
    assert task.exception() is None


@pytest.mark.slow
def test_an_event_that_cannot_be_taken_is_counted_and_the_next_one_is(
    api: Any, manifests: Any, namespace: str, tools: Any
) -> None:
    taken: list[str] = []
    metrics = Metrics()

    def told(_: Kind, __: str | None, obj: Object) -> None:
        if obj["metadata"]["namespace"] != namespace:
            return
        if obj["metadata"]["name"] == "poison":
            raise ValueError("a fault of ours")
        taken.append(obj["metadata"]["name"])

    async def story() -> None:
        for name in ("poison", "digits"):
            manifest = manifests.service(name)
            manifest["metadata"]["namespace"] = namespace
            api.create(manifest, keep=True)
        await tools.eventually(lambda: "digits" in taken, what="the event after")
        counted = b"earlyexit_operator_event_errors_total 1.0"
        await tools.eventually(lambda: counted in metrics.text(), what="the failed one is counted")

    tools.run(running(tools, registry(tools, api, on_event=told, failed=metrics.event_failed), story))


@pytest.mark.slow
def test_a_watch_that_cannot_go_on_ends_the_process(restartable: Any, manifests: Any, tools: Any) -> None:
    api = restartable.api
    listed = asyncio.Event()

    def told(*_: object) -> None:
        """Something was listed, so kopf has asked which kinds there are: before that a missing one may still come."""
        listed.set()

    async def story() -> None:
        api.create(manifests.service(), keep=True)
        task = asyncio.create_task(
            runtime.run(registry(tools, api, on_event=told), namespaces=(), stop=asyncio.Event())
        )
        await listed.wait()
        api.request(
            "DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{ROLLOUT.plural}.{ROLLOUT.group}"
        )
        with pytest.raises(Exception, match=r"404|could not find the requested resource"):
            await asyncio.wait_for(task, 120)

    tools.run(story())


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def refused(status: int) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "code": status, "reason": "Expired"}, status=status)

    return answer


def raw(body: bytes, status: int = 200, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def listed(*names: str, more: str = "") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"items": [made(n) for n in names], "metadata": {"resourceVersion": "9", "continue": more}}
        )

    return answer


def streamed(*events: tuple[str, Object], ends: bool = False) -> Answer:
    """A watch that tells this, then ends or is silent."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for happened, obj in events:
            await response.write(json.dumps({"type": happened, "object": obj}).encode() + b"\n")
        if not ends:
            await asyncio.Event().wait()
        return response

    return answer


def made(name: str, version: int = 5) -> Object:
    return {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version)}}


@dataclass
class ScriptedServer:
    """An API server of which one kind's lists and watches are answered as told, the last answer for ever; the others
    are empty and silent."""

    kind: Kind = SERVICE
    lists: list[Answer] = field(default_factory=lambda: [listed()])
    watches: list[Answer] = field(default_factory=lambda: [never])
    undiscovered: dict[str, Answer] = field(default_factory=dict)  # what is answered to the first look at these paths
    others: Answer = never  # to watches of the other kinds
    tokens: tuple[str, ...] = ()  # that are taken; any where there is none
    asked: list[str] = field(default_factory=list)
    client: kubernetes_client.ApiClient = field(init=False)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.tokens and request.headers.get("Authorization") not in self.tokens:
            return await refused(401)(request)
        found = discovered().get(request.path)
        if found is not None:
            return await self.undiscovered.pop(
                request.path, raw(json.dumps(found).encode(), Content_Type="application/json")
            )(request)
        watch = "watch" in request.query
        if request.path.rsplit("/", 1)[-1] != self.kind.plural:
            return await (self.others if watch else listed())(request)
        self.asked.append(
            "watch" + request.query.get("resourceVersion", " now")
            if watch
            else f"list {request.query.get('continue', '')}".rstrip()
        )
        answers = self.watches if watch else self.lists
        return await (answers.pop(0) if len(answers) > 1 else answers[0])(request)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedServer]:
        application = web.Application()
        application.router.add_get("/{path:.*}", self.answer)
        async with TestServer(application) as server:
            self.client = kubernetes_client.ApiClient(kubernetes_client.Configuration(host=str(server.make_url("/"))))
            yield self


@dataclass
class Seen:
    """What kopf's handlers were called with."""

    names: list[str] = field(default_factory=list)
    listed_anew: int = 0

    def told(self, _: Kind, __: str | None, obj: Object) -> None:
        self.names.append(obj["metadata"]["name"])

    def anew(self) -> None:
        self.listed_anew += 1


async def following(
    server: ScriptedServer, seen: Seen, until: Callable[[], object], *, seconds: float = 30.0, login: Any = None
) -> bool:
    """Run kopf against the server until a condition holds; whether it held before the time was up. kopf may not end by
    itself."""
    handlers = runtime.registry(
        start=nothing,
        end=nothing,
        on_event=seen.told,
        failed=lambda: None,
        listed_anew=seen.anew,
        login=login or (lambda: server.client),
    )
    stop = asyncio.Event()
    task = asyncio.create_task(runtime.run(handlers, namespaces=(), stop=stop))
    began = time.monotonic()
    while not until() and time.monotonic() < began + seconds:
        assert not task.done(), task
        await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait({task}, timeout=60)
    assert task.done() and task.exception() is None
    return bool(until())


def test_a_version_that_is_forgotten_before_a_watch_begins_is_no_end() -> None:
    async def story() -> None:
        server = ScriptedServer(watches=[refused(410), refused(410), streamed(("ADDED", made("news")))])
        seen = Seen()
        async with server.serving():
            assert await following(server, seen, lambda: "news" in seen.names)
        assert server.asked == ["list", "watch9", "watch now", "watch now"]
        assert seen.listed_anew == 1, "a watch from now on does not tell what was deleted"

    asyncio.run(story())


def test_a_list_that_expires_between_two_pages_is_begun_anew() -> None:
    async def story() -> None:
        server = ScriptedServer(lists=[listed("first", more="second"), refused(410), listed("first", "other")])
        seen = Seen()
        async with server.serving():
            assert await following(server, seen, lambda: "other" in seen.names)
        assert server.asked[:3] == ["list", "list second", "list"]
        assert seen.listed_anew == 1

    asyncio.run(story())


EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


@pytest.mark.slow  # waits
@pytest.mark.parametrize(
    "answer",
    [streamed(ends=True), streamed(("ERROR", EXPIRED), ends=True), refused(410)],
    ids=["ends every watch at once", "forgets every version", "says so before it begins"],
)
def test_a_server_that_breaks_every_watch_at_once_is_asked_ever_more_seldom(answer: Answer) -> None:
    async def story() -> None:
        server, seen = ScriptedServer(watches=[answer]), Seen()
        async with server.serving():
            await following(server, seen, lambda: False, seconds=2.0)
        assert 2 <= sum(asked.startswith("watch") for asked in server.asked) < 12
        assert server.asked.count("list") < 12

    asyncio.run(story())


FAULT = {"kind": "Status", "code": 500, "message": "etcdserver: no leader"}


@pytest.mark.parametrize(
    "answer",
    [
        streamed(("ERROR", FAULT), ends=True),
        raw(b'{"type": "ADDED", "obj'),
        raw(b'{"type": "ADDED", "object": "\xc3'),
        refused(408),
        refused(503),
        raw(b"\xff", 503),
        raw(b"{}", 429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
        raw(b"{}", 429, Retry_After="1"),
    ],
    ids=[
        "a fault within",
        "cut in a line",
        "cut in a character",
        "408",
        "503",
        "503 of a balancer",
        "429 till a date",
        "429",
    ],
)
def test_what_a_busy_or_broken_server_answers_to_a_watch_is_no_end(answer: Answer) -> None:
    async def story() -> None:
        server, seen = ScriptedServer(watches=[streamed(("ADDED", made("news")))]), Seen()
        server.watches.insert(0, answer)
        async with server.serving():
            assert await following(server, seen, lambda: "news" in seen.names)

    asyncio.run(story())


@pytest.mark.parametrize(
    "answer", [refused(408), raw(b"\xff", 503), raw(b"[]", 500), refused(410)], ids=["408", "503", "500", "410"]
)
def test_nor_is_what_it_answers_to_a_list(answer: Answer) -> None:
    async def story() -> None:
        server, seen = ScriptedServer(lists=[answer, listed("there")]), Seen()
        async with server.serving():
            assert await following(server, seen, lambda: "there" in seen.names)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/apis", raw(b'{"groups": []}', Content_Type="application/json")),
        (f"/apis/{SERVICE.api_version}", raw(b'{"resources": []}', Content_Type="application/json")),
        (f"/apis/{SERVICE.api_version}", refused(404)),
    ],
    ids=["no group", "no kind", "no version"],
)
def test_kinds_that_a_server_tells_of_a_moment_late_are_watched(path: str, answer: Answer) -> None:
    async def story() -> None:
        server, seen = ScriptedServer(watches=[streamed(("ADDED", made("news")))], undiscovered={path: answer}), Seen()
        async with server.serving():
            assert await following(server, seen, lambda: "news" in seen.names)

    asyncio.run(story())


@pytest.mark.slow  # waits
def test_a_token_that_is_replaced_while_a_watch_rests_is_no_end() -> None:
    async def story() -> None:
        server, seen = (
            ScriptedServer(watches=[refused(410)], others=streamed(ends=True), tokens=("Bearer first",)),
            Seen(),
        )
        began = time.monotonic()

        def login() -> kubernetes_client.ApiClient:
            configuration = kubernetes_client.Configuration(host=server.client.configuration.host)
            configuration.api_key = {"BearerToken": server.tokens[0]}
            return kubernetes_client.ApiClient(configuration)

        def over() -> bool:
            if time.monotonic() > began + 2.0 and server.tokens == ("Bearer first",):
                server.tokens, server.watches = ("Bearer second",), [streamed(("ADDED", made("news")))]
            return "news" in seen.names

        async with server.serving():
            assert await following(server, seen, over, login=login)

    asyncio.run(story())


@pytest.mark.slow  # waits
def test_a_login_that_fails_once_is_tried_again_soon() -> None:
    async def story() -> None:
        server, seen = ScriptedServer(watches=[streamed(("ADDED", made("news")))]), Seen()
        failures = [OSError("no such file, for a moment")]

        def login() -> kubernetes_client.ApiClient:
            if failures:
                raise failures.pop()
            return server.client

        async with server.serving():
            assert await following(server, seen, lambda: "news" in seen.names, login=login)

    asyncio.run(story())


@pytest.mark.slow  # waits
def test_a_token_that_was_replaced_is_read_again_and_one_that_is_refused_for_ever_is_shown_seldom() -> None:
    async def story() -> None:
        server, seen = ScriptedServer(tokens=("Bearer second",), watches=[streamed(("ADDED", made("news")))]), Seen()
        shown: list[str] = []

        def login(*tokens: str) -> Callable[[], kubernetes_client.ApiClient]:
            def read() -> kubernetes_client.ApiClient:
                shown.append(tokens[min(len(shown), len(tokens) - 1)])
                configuration = kubernetes_client.Configuration(host=server.client.configuration.host)
                configuration.api_key = {"BearerToken": f"Bearer {shown[-1]}"}
                return kubernetes_client.ApiClient(configuration)

            return read

        async with server.serving():
            assert await following(server, seen, lambda: "news" in seen.names, login=login("first", "second"))
            assert shown == ["first", "second"]
            shown.clear()
            await following(server, Seen(), lambda: False, seconds=2.0, login=login("stolen"))
        assert 2 <= len(shown) < 12

    asyncio.run(story())


def discovered() -> dict[str, Any]:
    """The API server's discovery documents of our kinds, and of the one that kopf asks for before it watches any."""
    version = {"groupVersion": SERVICE.api_version, "version": SERVICE.version}
    group = {"name": SERVICE.group, "versions": [version], "preferredVersion": version}
    kinds = [
        {"name": kind.plural, "kind": kind.name, "singularName": "", "namespaced": True, "verbs": ["list", "watch"]}
        for kind in OWN
    ]
    return {
        "/api": {"versions": ["v1"]},
        "/api/v1": {
            "resources": [{"name": "namespaces", "kind": "Namespace", "singularName": "", "namespaced": False}]
        },
        "/apis": {"groups": [group]},
        f"/apis/{SERVICE.api_version}": {"resources": kinds},
    }


@pytest.mark.slow  # waits
@pytest.mark.parametrize("kind", OWN, ids=str)
def test_a_watch_that_cannot_go_on_ends_the_others_though_they_are_not_answered(kind: Kind) -> None:
    async def story() -> None:
        async with ScriptedServer(kind, watches=[refused(404)]).serving() as server:
            handlers = runtime.registry(
                start=nothing,
                end=nothing,
                on_event=lambda *_: None,
                failed=lambda: None,
                listed_anew=lambda: None,
                login=lambda: server.client,
            )
            task = asyncio.create_task(runtime.run(handlers, namespaces=(), stop=asyncio.Event()))
            done, _ = await asyncio.wait({task}, timeout=60)
            ended = bool(done)
            while not task.done():  # a fault would hang the tests
                for left in asyncio.all_tasks() - {asyncio.current_task()}:
                    left.cancel()
                await asyncio.sleep(0.1)
            assert ended
            with pytest.raises(Exception, match="404"):
                task.result()

    asyncio.run(story())


class Regular:
    """The regular list on a clock that the test moves; each list takes ``takes`` seconds, in which ``during`` is
    called."""

    def __init__(self, takes: float = 0.0, during: Callable[[Feed], object] = lambda _: None) -> None:
        self.now, self.takes, self.during = 0.0, takes, during
        self.at: list[float] = []
        self.feed = Feed(ObjectCache(), lambda _: None, clock=lambda: self.now)

    async def pages(self, kind: Kind, namespace: str | None) -> Any:
        if kind is SERVICE:
            self.at.append(self.now)
            self.now += self.takes
            if len(self.at) == 1:
                self.during(self.feed)
        yield [], 9

    async def go_to(self, now: float) -> None:
        self.now = max(now, self.now)
        await self.turns()

    async def turns(self) -> None:
        """As many turns of the loop as the list needs; it waits for nothing else."""
        for _ in range(50):
            await asyncio.sleep(0)

    def tell(self, story: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            relisting = asyncio.create_task(self.feed.relist_forever(self, (), tick=0.0))  # type: ignore[arg-type]
            await self.turns()
            await story()
            relisting.cancel()

        asyncio.run(run())


def test_what_was_listed_anew_is_listed_by_us_soon_after() -> None:
    regular = Regular()

    async def story() -> None:
        await regular.go_to(5.0)
        assert not regular.at
        regular.feed.relist_soon()
        await regular.go_to(8.0)
        assert regular.at == [8.0]

    regular.tell(story)


def test_what_is_asked_for_during_a_regular_list_is_not_forgotten_when_that_ends() -> None:
    regular = Regular(takes=1.0, during=lambda feed: feed.relist_soon())

    async def story() -> None:
        await regular.go_to(RELIST_SECONDS + 1)
        assert len(regular.at) == 1
        await regular.go_to(regular.now + 15.0)
        assert len(regular.at) == 2

    regular.tell(story)


def test_lists_that_are_asked_for_again_and_again_rest_for_ten_times_what_one_takes() -> None:
    regular = Regular(takes=3.0)

    async def story() -> None:
        for second in range(1, 100):
            regular.feed.relist_soon()
            await regular.go_to(float(second))

    regular.tell(story)
    assert 2 <= len(regular.at) <= 4


def test_an_object_that_was_gone_before_the_watch_told_of_it_is_not_awaited() -> None:
    freshness, scope = Freshness(), (SERVICE, None)
    freshness.reached(scope, 5)
    freshness.listed(scope, 7, 100.0)
    assert freshness.late_seconds(103.0) == 3.0
    freshness.listed(scope, 4, 110.0)
    assert freshness.late_seconds(200.0) == 0.0


def test_kopf_writes_nothing_by_its_settings() -> None:
    chosen = runtime.settings()
    assert not chosen.posting.enabled
    assert chosen.peering.standalone and chosen.scanning.disabled
    body = kopf.Body({"metadata": {"annotations": {"kopf.zalando.org/last-handled-configuration": "{}"}}})
    assert chosen.persistence.diffbase_storage.fetch(body=body) is None
    assert chosen.persistence.diffbase_storage.build(body=body) == {}


def test_kopf_watches_our_kinds_and_only_by_events() -> None:
    handlers = runtime.registry(
        start=nothing, on_event=lambda *_: None, failed=lambda: None, listed_anew=lambda: None, end=nothing
    )
    assert {s.any_name for s in handlers._watching.get_all_selectors()} == {kind.plural for kind in OWN}
    assert not handlers._changing.get_all_handlers() and not handlers._spawning.get_all_handlers()
    assert not handlers._indexing.get_all_handlers()
