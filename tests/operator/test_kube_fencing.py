"""A write of an old leader that was held up on its way meets what the new leader has made, and changes nothing of
it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from offramp_core.control.objects import ServiceStatus
from offramp_core.plan import Plan
from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_operator.kube import client as client_module
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.fields import adopted
from offramp_operator.kube.kinds import AUTOSCALER, DEPLOYMENT, DISRUPTION_BUDGET, FIELD_MANAGER, Kind, Object
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.platform import ConflictError, ServiceKey
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

KEY = SigningKey(b"k" * 32)


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the API server; the first one that ``holds`` picks waits until ``go``, whoever gave it up
    meanwhile."""

    daemon_threads = True

    def __init__(self, kubeconfig: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        cluster, user = kubeconfig["clusters"][0]["cluster"], kubeconfig["users"][0]["user"]
        self.upstream, self.token = urlsplit(cluster["server"]), user["token"]
        self.trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self.holds: Callable[[str, str], bool] = lambda _method, _path: False
        self.only_first = True  # of those that are picked
        self.held, self.go = threading.Event(), threading.Event()
        self.answers: list[tuple[str, int]] = []  # of what was held


class _Passing(BaseHTTPRequestHandler):
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        picked = self.server.holds(self.command, self.path)
        held = picked and not (self.server.only_first and self.server.held.is_set())
        if held:
            self.server.held.set()
            self.server.go.wait(120)
        upstream = HTTPSConnection(self.server.upstream.netloc, context=self.server.trust, timeout=60)
        headers = {"Authorization": f"Bearer {self.server.token}"}
        headers |= {name: self.headers[name] for name in ("Content-Type", "Accept") if self.headers[name]}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if held:
            self.server.answers.append((self.command, answer.status))
        try:
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # nobody waits any more

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _pass  # noqa: N815 the names http.server calls

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def proxy(api: Any) -> Iterator[Proxy]:
    server = Proxy(yaml.safe_load(Path(api.kubeconfig).read_text()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Leader:
    """What one process knows, through lists alone, and does about one service."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client, self.namespace, self.cache = client, namespace, ObjectCache()
        self.platform = KubePlatform(client, self.cache, workers=WorkerSettings("offramp/worker:1"), instance="leader")

    async def look(self) -> None:
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))

    async def ensure(self) -> None:
        gathered = await self.platform.gather(ServiceKey(self.namespace, "digits"))
        assert gathered is not None
        await self.platform.ensure_workers(gathered.service, KEY.identity(gathered.service.uid))

    async def live(self, kind: Kind) -> Object:
        found = await self.client.get(kind, self.namespace, "digits")
        assert found is not None
        return found


@contextmanager
def both(api: Any, proxy: Proxy, tools: Any, namespace: str) -> Iterator[Callable[[], Any]]:
    """Two leaders, one after the other: the old one's calls go through the proxy."""
    with ExitStack() as stack:
        old = stack.enter_context(tools.client_at(proxy.server_address[1]))

        async def leaders(story: Callable[[Leader, Leader], Any]) -> None:
            async with tools.client_of(api.kubeconfig) as new:
                await story(Leader(old, namespace), Leader(new, namespace))

        yield lambda story: tools.run(leaders(story))  # type: ignore[misc]


def service(manifests: Any, namespace: str, **spec: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = manifests.service(replicas=1, **spec)
    manifest["metadata"]["namespace"] = namespace
    return manifest


async def too_late(proxy: Proxy, tools: Any, writing: asyncio.Task[None], instead: Callable[[], Any]) -> int:
    """Let what is held up go on after ``instead`` has happened; the API server's answer to it."""
    await tools.eventually(proxy.held.is_set, what="a write on its way", state=lambda: writing)
    await asyncio.wait({writing}, timeout=30)  # who sent it has given up
    await instead()
    proxy.go.set()
    await tools.eventually(lambda: bool(proxy.answers), what="the API server's answer")
    return proxy.answers[0][1]


def test_a_change_of_an_old_leader_that_was_held_up_is_refused_and_decided_again(
    api: Any, proxy: Proxy, tools: Any, manifests: Any, namespace: str
) -> None:
    made = api.create(service(manifests, namespace), keep=True).json()

    async def story(old: Leader, new: Leader) -> None:
        await old.look()
        await old.ensure()
        api.merge(made, {"spec": {"replicas": 2}})
        await old.look()
        proxy.holds = lambda method, path: method == "PATCH" and "deployments/digits" in path
        writing = asyncio.create_task(old.ensure())

        async def newer() -> None:
            api.merge(made, {"spec": {"replicas": 5}})
            await new.look()
            await new.ensure()
            assert (await new.live(DEPLOYMENT))["spec"]["replicas"] == 5

        assert await too_late(proxy, tools, writing, newer) == 409
        assert (await new.live(DEPLOYMENT))["spec"]["replicas"] == 5
        proxy.holds = lambda _method, _path: False
        with pytest.raises(ConflictError):  # as another write of its own would have been told
            await old.ensure()
        await old.look()
        await old.ensure()
        assert (await new.live(DEPLOYMENT))["spec"]["replicas"] == 5, "decided again, on what is there"

    with both(api, proxy, tools, namespace) as run:
        run(story)


def test_a_child_that_an_old_leader_was_about_to_make_does_not_overwrite_the_new_leaders(
    api: Any, proxy: Proxy, tools: Any, manifests: Any, namespace: str
) -> None:
    made = api.create(service(manifests, namespace, worker={"env": [{"name": "A", "value": "old"}]}), keep=True).json()

    async def story(old: Leader, new: Leader) -> None:
        await old.look()
        proxy.holds = lambda method, path: method in ("POST", "PATCH") and "/deployments" in path
        writing = asyncio.create_task(old.ensure())

        async def newer() -> None:
            api.merge(made, {"spec": {"worker": {"env": [{"name": "A", "value": "new"}]}}})
            await new.look()
            await new.ensure()

        assert await too_late(proxy, tools, writing, newer) == 409
        told = json.dumps((await new.live(DEPLOYMENT))["spec"]["template"])
        assert '"new"' in told and '"old"' not in told

    with both(api, proxy, tools, namespace) as run:
        run(story)


def test_a_deletion_of_an_old_leader_that_was_held_up_spares_what_the_new_leader_has_changed(
    api: Any, proxy: Proxy, tools: Any, manifests: Any, namespace: str
) -> None:
    scaled = service(manifests, namespace)
    del scaled["spec"]["replicas"]
    scaled["spec"]["autoscaling"] = {"minReplicas": 1, "maxReplicas": 3, "targetInFlight": 4}
    made = api.create(scaled, keep=True).json()

    async def story(old: Leader, new: Leader) -> None:
        await old.look()
        await old.ensure()
        await old.look()
        await old.ensure()
        api.merge(made, {"spec": {"autoscaling": None, "replicas": 1}})
        await old.look()
        proxy.holds = lambda method, path: method == "DELETE" and "horizontalpodautoscalers" in path
        writing = asyncio.create_task(old.ensure())

        async def newer() -> None:
            api.merge(
                made,
                {"spec": {"autoscaling": {"minReplicas": 2, "maxReplicas": 4, "targetInFlight": 4}, "replicas": None}},
            )
            await new.look()
            await new.ensure()

        assert await too_late(proxy, tools, writing, newer) == 409
        assert (await new.live(AUTOSCALER))["spec"]["maxReplicas"] == 4

    with both(api, proxy, tools, namespace) as run:
        run(story)


def test_a_write_that_is_held_up_is_given_up_before_another_may_lead(
    proxy: Proxy, tools: Any, manifests: Any, namespace: str, api: Any
) -> None:
    api.create(service(manifests, namespace), keep=True)
    budget = client_module.WRITE_CONNECT_SECONDS + client_module.WRITE_SECONDS

    async def story(old: Leader, _: Leader) -> None:
        await old.look()
        proxy.holds = lambda method, _path: method == "POST"
        writing = asyncio.create_task(old.ensure())
        await tools.eventually(proxy.held.is_set, what="a write on its way")
        done, _pending = await asyncio.wait({writing}, timeout=3 * budget)
        assert done and isinstance(writing.exception(), client_module.ApiUnavailableError)

    with both(api, proxy, tools, namespace) as run:
        run(story)


def test_a_rollback_is_written_and_published_while_applies_fill_every_thread_of_theirs(
    api: Any, proxy: Proxy, tools: Any, manifests: Any, namespace: str
) -> None:
    api.create(service(manifests, namespace), keep=True)
    arm = ArmPlan(Plan("sha256:" + "a" * 64, "sha256:" + "b" * 64).to_mapping(), 0.1)

    async def story(old: Leader, _: Leader) -> None:
        await old.look()
        gathered = await old.platform.gather(ServiceKey(namespace, "digits"))
        assert gathered is not None
        proxy.holds, proxy.only_first = lambda method, path: method == "PATCH" and "/deployments/" in path, False
        body = {
            "apiVersion": DEPLOYMENT.api_version,
            "kind": DEPLOYMENT.name,
            "metadata": {"name": "slow", "namespace": namespace},
        }
        slow = [asyncio.create_task(old.client.apply(DEPLOYMENT, body)) for _ in range(5 * client_module.THREADS)]
        await tools.eventually(proxy.held.is_set, what="an apply on its way")
        document = PlanDocument("digits", gathered.service.uid, 1, arm, None, 0, "", 0.02)
        await old.platform.publish(gathered.service, document, KEY.sign(document), previous_epoch=0)
        await old.platform.write_service_status(gathered.service, ServiceStatus(phase="Ready"))
        assert not all(task.done() for task in slow), "they are still waited for"
        for task in slow:
            task.cancel()

    with both(api, proxy, tools, namespace) as run:
        run(story)


# --- what is made by a create is owned as by an apply ----------------------------------------------


def test_a_field_of_a_child_goes_when_it_is_asked_for_no_more(
    api: Any, tools: Any, manifests: Any, namespace: str
) -> None:
    made = api.create(service(manifests, namespace, worker={"nodeSelector": {"gpu": "a100"}}), keep=True).json()

    async def story() -> None:
        async with tools.client_of(api.kubeconfig) as client:
            leader = Leader(client, namespace)
            await leader.look()
            await leader.ensure()
            assert (await leader.live(DEPLOYMENT))["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "a100"}
            api.merge(made, {"spec": {"worker": None}})
            await leader.look()
            await leader.ensure()
            live = await leader.live(DEPLOYMENT)
            assert "nodeSelector" not in live["spec"]["template"]["spec"]
            own = [e for e in live["metadata"]["managedFields"] if e["manager"] == FIELD_MANAGER]
            assert [e["operation"] for e in own] == ["Apply"]
            unchanged = await leader.live(DISRUPTION_BUDGET)
            await leader.ensure()
            assert await leader.live(DISRUPTION_BUDGET) == unchanged

    tools.run(story())


def test_what_is_owned_by_both_operations_is_owned_by_one() -> None:
    def entry(operation: str, fields: Object, **more: str) -> Object:
        return {"manager": FIELD_MANAGER, "operation": operation, "fieldsV1": fields} | more

    theirs = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:c": {}}}}
    status = entry("Update", {"f:status": {}}, subresource="status")
    made, applied = entry("Update", {"f:spec": {"f:a": {}}}), entry("Apply", {"f:spec": {"f:b": {}}})
    assert adopted([theirs, applied, status]) is None
    assert adopted([made, theirs, status]) == [theirs, status, made | {"operation": "Apply"}]
    (one,) = adopted([made, applied]) or ()
    assert (one["operation"], one["fieldsV1"]) == ("Apply", {"f:spec": {"f:a": {}, "f:b": {}}})
