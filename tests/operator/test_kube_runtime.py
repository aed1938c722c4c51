"""kopf runs the operator's process: what of it fails is noticed, and the cache keeps nothing that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest

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
