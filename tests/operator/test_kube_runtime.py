"""kopf runs the operator's process: what of it fails is noticed, and the cache keeps nothing that is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes import client as kubernetes_client

from offramp_operator.kube import runtime
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import OWN, ROLLOUT, SERVICE, Kind, Object
from offramp_operator.kube.watch import LASTED_SECONDS, Feed
from offramp_operator.metrics import Metrics


async def nothing() -> None:
    """Nothing to begin or end."""


def registry(tools: Any, api: Any, **parts: Any) -> kopf.OperatorRegistry:
    chosen: dict[str, Any] = {"start": nothing, "end": nothing, "told": lambda *_: None, "failed": lambda: None}
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

    tools.run(running(tools, registry(tools, api, told=told, failed=metrics.event_failed), story))


@pytest.mark.slow
def test_a_watch_that_cannot_go_on_ends_the_process(restartable: Any, tools: Any) -> None:
    api = restartable.api
    listed = asyncio.Event()

    async def start() -> None:
        listed.set()

    async def story() -> None:
        task = asyncio.create_task(runtime.run(registry(tools, api, start=start), namespaces=(), stop=asyncio.Event()))
        await listed.wait()
        api.request(
            "DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{ROLLOUT.plural}.{ROLLOUT.group}"
        )
        with pytest.raises(Exception, match=r"404|could not find the requested resource"):
            await asyncio.wait_for(task, 120)

    tools.run(story())


@contextlib.asynccontextmanager
async def server_that_forgets(kind: Kind) -> AsyncIterator[kubernetes_client.ApiClient]:
    """An API server that has nothing, answers a watch of this kind with 410 once the others are asked for, and those never."""
    others = asyncio.Event()
    waiting: set[str] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        plural = request.path.rsplit("/", 1)[-1]
        if "watch" not in request.query:
            return web.json_response(
                discovered().get(request.path) or {"items": [], "metadata": {"resourceVersion": "1"}}
            )
        if plural != kind.plural:
            waiting.add(plural)
            if len(waiting) == len(OWN) - 1:
                others.set()
            await asyncio.Event().wait()
        await others.wait()
        return web.json_response({"kind": "Status", "code": 410, "reason": "Expired"}, status=410)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server:
        yield kubernetes_client.ApiClient(kubernetes_client.Configuration(host=str(server.make_url("/"))))


def discovered() -> dict[str, Any]:
    """The API server's discovery documents of our kinds, and of the one that kopf asks for before it watches any."""
    version = {"groupVersion": SERVICE.api_version, "version": SERVICE.version}
    group = {"name": SERVICE.group, "versions": [version], "preferredVersion": version}
    kinds = [{"name": kind.plural, "kind": kind.name, "singularName": "", "namespaced": True, "verbs": ["list", "watch"]} for kind in OWN]  # fmt: skip
    return {
        "/api": {"versions": ["v1"]},
        "/api/v1": {
            "resources": [{"name": "namespaces", "kind": "Namespace", "singularName": "", "namespaced": False}]
        },
        "/apis": {"groups": [group]},
        f"/apis/{SERVICE.api_version}": {"resources": kinds},
    }


@pytest.mark.parametrize("kind", OWN, ids=str)
def test_a_watch_that_cannot_go_on_ends_the_others_though_they_are_not_answered(kind: Kind) -> None:
    async def story() -> None:
        async with server_that_forgets(kind) as client:
            handlers = runtime.registry(
                start=nothing, end=nothing, told=lambda *_: None, failed=lambda: None, login=lambda: client
            )
            task = asyncio.create_task(runtime.run(handlers, namespaces=(), stop=asyncio.Event()))
            done, _ = await asyncio.wait({task}, timeout=60)
            ended = bool(done)
            while not task.done():  # a fault would hang the tests
                for left in asyncio.all_tasks() - {asyncio.current_task()}:
                    left.cancel()
                await asyncio.sleep(0.1)
            assert ended
            with pytest.raises(Exception, match="410"):
                task.result()

    asyncio.run(story())


def test_what_a_watch_lost_while_it_listed_again_is_looked_for_by_a_list_of_ours() -> None:
    now = [0.0]
    feed = Feed(ObjectCache(), lambda _: None, clock=lambda: now[0])

    def told(name: str, version: int) -> None:
        metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": str(version)}
        feed.told(SERVICE, None, {"metadata": metadata})

    lists: list[float] = []

    class Client:
        async def pages(self, kind: Kind, namespace: str | None) -> Any:
            if kind is SERVICE:
                lists.append(now[0])
            yield [], 9

    async def story() -> None:
        told("first", 1)
        relisting = asyncio.create_task(feed.relist_forever(Client(), (), tick=0.0))  # type: ignore[arg-type]
        now[0] = 5.0
        told("second", 2)  # of the first list, which takes a while
        await asyncio.sleep(0.05)
        assert not lists
        now[0] = LASTED_SECONDS + 1
        told("first", 1)
        now[0] += 3.0
        await asyncio.sleep(0.05)
        assert lists == [now[0]]
        relisting.cancel()

    asyncio.run(story())


def test_kopf_writes_nothing_by_its_settings() -> None:
    chosen = runtime.settings()
    assert not chosen.posting.enabled
    assert chosen.peering.standalone and chosen.scanning.disabled
    body = kopf.Body({"metadata": {"annotations": {"kopf.zalando.org/last-handled-configuration": "{}"}}})
    assert chosen.persistence.diffbase_storage.fetch(body=body) is None
    assert chosen.persistence.diffbase_storage.build(body=body) == {}


def test_kopf_watches_our_kinds_and_only_by_events() -> None:
    handlers = runtime.registry(start=nothing, told=lambda *_: None, failed=lambda: None, end=nothing)
    assert {s.any_name for s in handlers._watching.get_all_selectors()} == {kind.plural for kind in OWN}
    assert not handlers._changing.get_all_handlers() and not handlers._spawning.get_all_handlers()
    assert not handlers._indexing.get_all_handlers()
