"""Lists and watches feed the cache from a real API server, also over its outages, and write nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client as kubernetes_client

from offramp_operator.kube import client as client_module
from offramp_operator.kube import runtime
from offramp_operator.kube import watch as watch_module
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import CHILDREN, CONFIG_MAP, HTTP_ROUTE, ROLLOUT, SERVICE, WATCHED
from offramp_operator.kube.watch import Feed, watch
from offramp_operator.shell.platform import ServiceKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


@dataclass
class Watching:
    cache: ObjectCache
    feed: Feed
    woken: list[ServiceKey]
    client: KubeClient

    def names(self, kind: Any, namespace: str) -> set[str]:
        return {o["metadata"]["name"] for o in self.cache.all(kind) if o["metadata"].get("namespace") == namespace}


async def nothing() -> None:
    """Nothing to end."""


@asynccontextmanager
async def _watching(tools: Any, api: Any, *, namespaces: tuple[str, ...]) -> AsyncIterator[Watching]:
    """The operator's watch, as its process runs it."""
    woken: list[ServiceKey] = []
    cache = ObjectCache()
    feed = Feed(cache, woken.append)
    stop = asyncio.Event()
    failed: list[bool] = []
    async with tools.client_of(api.kubeconfig) as client:
        handlers = runtime.registry(
            start=lambda: feed.begin(client, namespaces),
            on_event=feed.on_event,
            failed=lambda: failed.append(True),
            listed_anew=feed.relist_soon,
            end=nothing,
            login=lambda: tools.api_client(api.kubeconfig),
        )
        own = asyncio.create_task(runtime.run(handlers, namespaces=namespaces, stop=stop))
        children = asyncio.create_task(watch(feed, client, namespaces=namespaces, stop=stop, kinds=CHILDREN))
        try:
            yield Watching(cache, feed, woken, client)
        finally:
            stop.set()
            await asyncio.wait({own, children}, timeout=30)
        assert not failed


def _manifest(manifests: Any, kind: str, name: str, namespace: str) -> dict[str, Any]:
    manifest: dict[str, Any] = getattr(manifests, kind)(name)
    manifest["metadata"]["namespace"] = namespace
    return manifest


@pytest.mark.parametrize("scope", ["cluster", "namespaces"])
def test_what_happens_in_the_cluster_shows_in_the_cache(
    scope: str, api: Any, manifests: Any, namespace: str, tools: Any
) -> None:
    async def story() -> None:
        api.create(_manifest(manifests, "service", "before", namespace), keep=True)
        async with _watching(tools, api, namespaces=() if scope == "cluster" else (namespace,)) as w:
            await tools.eventually(lambda: "before" in w.names(SERVICE, namespace), what="the first list")
            created = api.create(_manifest(manifests, "service", "after", namespace), keep=True).json()
            await tools.eventually(lambda: "after" in w.names(SERVICE, namespace), what="an addition")
            assert ServiceKey(namespace, "after") in w.woken
            api.merge(created, {"spec": {"replicas": 3}})
            await tools.eventually(
                lambda: (w.cache.get(SERVICE, namespace, "after") or {})["spec"].get("replicas") == 3, what="a change"
            )
            api.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/earlyexitservices/after")
            await tools.eventually(lambda: w.names(SERVICE, namespace) == {"before"}, what="a deletion")

    tools.run(story())


def test_watching_leaves_no_trace_on_any_object(api: Any, manifests: Any, namespace: str, tools: Any) -> None:
    async def story() -> None:
        made = [
            api.create(_manifest(manifests, kind, name, namespace), keep=True).json()
            for kind, name in (("service", "digits"), ("config", "digits-0123456789"), ("rollout", "digits-1"))
        ]
        async with _watching(tools, api, namespaces=()) as w:
            await tools.eventually(lambda: w.names(ROLLOUT, namespace) == {"digits-1"}, what="the first list")
            api.create(_manifest(manifests, "service", "mark", namespace), keep=True)
            await tools.eventually(lambda: "mark" in w.names(SERVICE, namespace), what="an event after it")
            for obj in made:
                assert api.get(obj) == obj
        for obj in made:
            assert api.get(obj) == obj, "nor when it stops"

    tools.run(story())


def test_only_what_carries_our_label_is_watched(api: Any, namespace: str, tools: Any) -> None:
    def config_map(name: str, labels: dict[str, str]) -> dict[str, Any]:
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}

    async def story() -> None:
        async with _watching(tools, api, namespaces=()) as w:
            api.create(config_map("theirs", {"a": "b"}), keep=True)
            api.create(config_map("ours", {"app.kubernetes.io/managed-by": "offramp"}), keep=True)
            await tools.eventually(lambda: "ours" in w.names(CONFIG_MAP, namespace), what="our ConfigMap")
            assert w.names(CONFIG_MAP, namespace) == {"ours"}

    tools.run(story())


def test_the_watch_goes_on_after_the_api_server_was_killed(restartable: Any, manifests: Any, tools: Any) -> None:
    async def story() -> None:
        api = restartable.api
        for name in ("stays", "goes"):
            api.create(_manifest(manifests, "service", name, "default"), keep=True)
        async with _watching(tools, api, namespaces=()) as w:
            await tools.eventually(lambda: w.names(SERVICE, "default") == {"stays", "goes"}, what="the first list")
            restartable.kill()
            await asyncio.to_thread(restartable.start)
            new = _manifest(manifests, "service", "new", "default")
            goes = "/apis/earlyexit.dev/v1alpha1/namespaces/default/earlyexitservices/goes"
            # An API server that has just started says that it is ready before it serves every kind.
            await tools.eventually(lambda: api.create(new, keep=True).status_code == 201, what="a new service")
            await tools.eventually(lambda: api.request("DELETE", goes).status_code == 200, what="a deletion")
            # Whether the watch was up again in time to see the deletion is chance; a list finds what it missed.
            await tools.eventually(lambda: "new" in w.names(SERVICE, "default"), what="news after the restart")
            await w.feed.relist(w.client, ())
            assert w.names(SERVICE, "default") == {"stays", "new"}
            await tools.eventually(
                lambda: w.feed.late_seconds() == 0.0,
                what="a watch that keeps up",
                state=lambda: w.feed._freshness.awaited,
            )

    tools.run(story())


def test_a_list_shows_that_no_watch_delivers(api: Any, manifests: Any, namespace: str, tools: Any) -> None:
    async def story() -> None:
        now = [0.0]
        feed = Feed(ObjectCache(), lambda _: None, clock=lambda: now[0])
        api.create(_manifest(manifests, "service", "digits", namespace), keep=True)
        async with tools.client_of(api.kubeconfig) as client:
            await feed.relist(client, (namespace,), kinds=WATCHED[:1])
            now[0] = 70.0
            assert feed.late_seconds() == 70.0

    tools.run(story())


def test_an_optional_kind_is_found_when_it_comes_and_forgotten_when_it_goes(
    restartable: Any, server: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "ABSENT_SECONDS", 0.1)
    api, crd = restartable.api, server.gateway_api()
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    metadata = {"name": "digits", "namespace": "default", "labels": {"app.kubernetes.io/managed-by": "offramp"}}
    route = {"apiVersion": HTTP_ROUTE.api_version, "kind": "HTTPRoute", "metadata": metadata, "spec": {}}

    async def story() -> None:
        feed = Feed(ObjectCache(), lambda _: None)
        async with tools.client_of(api.kubeconfig) as client:
            await feed.begin(client, ())
        async with _watching(tools, api, namespaces=()) as w:
            assert api.request("POST", definitions, crd).status_code == 201
            await tools.eventually(lambda: api.create(route, keep=True).status_code == 201, what="its definition")
            await tools.eventually(lambda: w.names(HTTP_ROUTE, "default") == {"digits"}, what="a route")
            assert api.request("DELETE", f"{definitions}/{crd['metadata']['name']}").status_code == 200
            await tools.eventually(lambda: w.names(HTTP_ROUTE, "default") == set(), what="its end")
            await w.feed.relist(w.client, ())
            assert w.feed.late_seconds() == 0.0

    tools.run(story())


def test_rights_on_routes_that_are_taken_away_and_given_back_bury_no_route(
    restartable: Any, server: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "ABSENT_SECONDS", 0.1)
    monkeypatch.setattr(client_module, "WATCH_SECONDS", 1)  # rights are looked at when a watch begins
    api = restartable.api
    rbac, account = "/apis/rbac.authorization.k8s.io/v1", "/api/v1/namespaces/default/serviceaccounts"
    role = {"apiGroups": ["gateway.networking.k8s.io"], "resources": ["httproutes"], "verbs": ["get", "list", "watch"]}
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "routes"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": "default"}],
    }
    metadata = {"name": "digits", "namespace": "default", "labels": {"app.kubernetes.io/managed-by": "offramp"}}
    route = {"apiVersion": HTTP_ROUTE.api_version, "kind": "HTTPRoute", "metadata": metadata, "spec": {}}

    def make(path: str, name: str, **body: Any) -> Any:
        answer = api.request("POST", path, {"metadata": {"name": name}, **body})
        assert answer.status_code == 201, answer.text
        return answer.json()

    api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", server.gateway_api())
    server.wait_for(lambda: api.create(route, keep=True).status_code == 201, what="a route")
    make(account, "reader")
    make(f"{rbac}/clusterroles", "routes", rules=[role])
    make(f"{rbac}/clusterrolebindings", "routes", **binding)
    token = api.request("POST", f"{account}/reader/token", {"spec": {"expirationSeconds": 3600}}).json()["status"][
        "token"
    ]
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))

    async def story() -> None:
        cache = ObjectCache()
        async with tools.client_of(tmp_path / "kubeconfig") as client:
            task = asyncio.create_task(Feed(cache, lambda _: None).follow(client, HTTP_ROUTE, None))
            await tools.eventually(lambda: cache.get(HTTP_ROUTE, "default", "digits") is not None, what="the route")
            api.request("DELETE", f"{rbac}/clusterrolebindings/routes")
            await tools.eventually(lambda: "forbidden" in cache.unreadable(HTTP_ROUTE, "default"), what="the refusal")
            assert cache.get(HTTP_ROUTE, "default", "digits") is not None, "nobody said that it is gone"
            make(f"{rbac}/clusterrolebindings", "routes", **binding)
            await tools.eventually(lambda: cache.unreadable(HTTP_ROUTE, "default") == "", what="the right")
            api.merge(route, {"metadata": {"labels": {"new": "label"}}})
            await tools.eventually(
                lambda: "new" in cache.get(HTTP_ROUTE, "default", "digits")["metadata"]["labels"],
                what="news of the route",
            )
            task.cancel()
            await asyncio.wait({task})

    tools.run(story())


class _Refusing(BaseHTTPRequestHandler):
    """Answers every fourth request for a kind, and turns the others away for a moment."""

    asked: Counter[str]

    def do_GET(self) -> None:
        kind = self.path.partition("?")[0]
        self.asked[kind] += 1
        refused = self.asked[kind] % 4 != 0
        body = b'{"kind": "Status"}' if refused else b'{"metadata": {"resourceVersion": "7"}, "items": []}'
        self.send_response(429 if refused else 200)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


def test_a_first_list_that_is_turned_away_is_tried_again_and_no_other_with_it(tools: Any) -> None:
    handler = type("_Handler", (_Refusing,), {"asked": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    async def story() -> None:
        configuration = kubernetes_client.Configuration(host=f"http://127.0.0.1:{server.server_address[1]}")
        configuration.retries = False
        client = KubeClient(kubernetes_client.ApiClient(configuration))
        try:
            await asyncio.wait_for(Feed(ObjectCache(), lambda _: None).begin(client, ("default",)), 60)
        finally:
            client.close()

    try:
        tools.run(story())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(handler.asked) == len(WATCHED)
    assert set(handler.asked.values()) == {4}, "a kind that was listed is not listed again"
