"""A changed bundle or image under Kubernetes' own controllers: what serves meanwhile, and what it says.

API server, controller manager and scheduler are real; the nodes exist on paper, and a few lines stand for their
kubelets. A bundle whose name contains ``broken`` never becomes ready.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_observer import PaperObserver

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    EVENT,
    HTTP_ROUTE,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    SERVICE,
    Object,
)
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform import gateway as gateway_room
from offramp_operator.kube.platform import memory as memory_room
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

CONTROLLERS = "deployment-controller,replicaset-controller,resourcequota-controller,garbage-collector-controller"
GPU = "nvidia.com/gpu"
ONE_GPU = {"resources": {"limits": {GPU: 1}}}
GOOD, BETTER, BROKEN = "oci://offramp/digits:1", "oci://offramp/digits:2", "oci://offramp/digits:broken"
WELL_AGO = "2026-01-01T00:00:00Z"  # so that a pod has been ready for as long as the Deployment wants to see
DEADLINE = {"surgeDeadline": "1s"}


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Iterator[Any]:
    """An API server of its own, with the controllers that run Deployments and quotas, and a scheduler."""
    folder = tmp_path_factory.mktemp("controllers")
    with ExitStack() as stack:
        api = server._start(folder, stack)
        server._install_crds(api)
        flags = (f"--kubeconfig={api.kubeconfig}", "--leader-elect=false", "--secure-port=0")
        server._spawn(stack, folder, "kube-controller-manager", *flags, f"--controllers={CONTROLLERS}")
        server._spawn(stack, folder, "kube-scheduler", *flags)
        yield api


@dataclass
class Fleet:
    """A service under an operator, with the kubelets of its nodes. ``seen`` has (ready pods, pods asked for) after
    every look.

    What is asked for is the sum of the ReplicaSets' sizes: their pods come and go in whatever order their controller
    gets to them.
    """

    api: Any
    namespace: str
    client: KubeClient
    reconciler: Reconciler
    cache: ObjectCache
    seen: list[tuple[int, int]] = field(default_factory=list)
    onlooker: Callable[[list[Object]], Awaitable[None]] | None = None
    ready_since: Callable[[], str] = lambda: WELL_AGO

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.namespace, "digits")

    @property
    def manifest(self) -> Object:
        metadata = {"name": "digits", "namespace": self.namespace}
        return {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "EarlyExitService", "metadata": metadata}

    async def edit(self, **spec: Any) -> None:
        assert self.api.merge(self.manifest, {"spec": spec}).status_code == 200

    async def ask(self, what: str) -> None:
        annotations = {"earlyexit.dev/request": f"{what}/{time.time_ns()}"}
        assert self.api.merge(self.manifest, {"metadata": {"annotations": annotations}}).status_code == 200

    async def pods(self) -> list[Object]:
        return [pod for pod in await self.all_pods() if not _ending(pod)]

    async def all_pods(self) -> list[Object]:
        """With those that are ending."""
        return (await self.client.list(POD, self.namespace))[0]

    async def bundles(self) -> list[str]:
        """What the ready pods serve."""
        return sorted(_bundle(pod) for pod in await self.pods() if _is_ready(pod))

    async def look(self) -> list[Object]:
        """Note what there is; returns all pods, with those that are ending."""
        found = await self.all_pods()
        pods = [pod for pod in found if not _ending(pod)]
        asked = sum(made["spec"]["replicas"] for made in (await self.client.list(REPLICA_SET, self.namespace))[0])
        self.seen.append((sum(map(_is_ready, pods)), asked))
        if self.onlooker is not None:
            await self.onlooker(pods)
        return found

    async def tick(self) -> None:
        """The kubelets look, the operator looks."""
        # What the kubelets are about to make ready is noted as it is before: between two looks a pod could be replaced.
        for pod in await self.look():
            if _ending(pod):
                self.api.request("DELETE", f"{_path(pod)}?gracePeriodSeconds=0")
            elif pod["spec"].get("nodeName") and not pod["status"].get("podIP"):
                status = {"status": _running(works="broken" not in _bundle(pod), since=self.ready_since())}
                self.api.request("PATCH", f"{_path(pod)}/status", status, content_type="application/merge-patch+json")
        await self.look()
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
        await self.reconciler.reconcile(self.key)

    async def until(self, condition: Callable[[], Any], *, what: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while True:
            await self.tick()
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            assert time.monotonic() < deadline, f"{what} did not happen; {self.told()}; pods {self.seen[-5:]}"
            await asyncio.sleep(0.05)

    async def restart(self) -> dict[str, str]:
        """Another operator, which knows what is stored and no more; resource versions of what it finds."""
        platform = KubePlatform(self.client, self.cache, workers=WorkerSettings("offramp/worker:1"), instance="t2")
        self.reconciler = Reconciler(platform, Observer(deadline_seconds=0.5), SigningKey.from_seed(b"k" * 32))
        return await self.versions()

    async def versions(self) -> dict[str, str]:
        found = [obj for kind in (SERVICE, DEPLOYMENT) for obj in (await self.client.list(kind, self.namespace))[0]]
        return {f"{obj['kind']}/{obj['metadata']['name']}": obj["metadata"]["resourceVersion"] for obj in found}

    async def serve(self, *bundles: str, recreated: bool = False) -> None:
        """Until exactly these serve and no update is under way."""
        wanted = sorted(uri.removeprefix("oci://") for uri in bundles)

        async def there() -> bool:
            return (await self.bundles()) == wanted == sorted(_bundle(p) for p in await self.pods())

        await self.until(there, what=f"serving {wanted}")
        over = ("False", "Recreated") if recreated else None
        await self.until(lambda: self.told().get("WorkersUpdating") == over, what="the end of the update")

    async def rest(self, ticks: int = 20) -> None:
        for _ in range(ticks):
            await self.tick()
            await asyncio.sleep(0.05)

    def told(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition."""
        service = self.cache.get(SERVICE, self.namespace, "digits") or {}
        conditions = (service.get("status") or {}).get("conditions") or ()
        return {c["type"]: (c["status"], c["reason"]) for c in conditions}

    def message(self, kind: str) -> str:
        service = self.cache.get(SERVICE, self.namespace, "digits") or {}
        return next((c["message"] for c in service["status"]["conditions"] if c["type"] == kind), "")

    def since(self) -> list[tuple[int, int]]:
        """What was seen since the last call."""
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def fleet(controlled: Any, manifests: Any, tools: Any) -> Iterator[Callable[..., Any]]:
    """``async with fleet(nodes=2) as f``: a service in a namespace of its own, on nodes with one GPU each that nobody
    else may use.

    With ``answering``, ready pods say which model they serve and how well.
    """
    namespace = f"update-{os.urandom(4).hex()}"
    controlled.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, keep=True)

    @asynccontextmanager
    async def make(*, nodes: int, answering: bool = False, **spec: Any) -> AsyncIterator[Fleet]:
        for number in range(nodes):
            add_node(controlled, f"{namespace}-{number}", namespace)
        worker = {**ONE_GPU, "nodeSelector": {"of": namespace}, **spec.pop("worker", {})}
        manifest = manifests.service(worker=worker, **spec)
        manifest["metadata"]["namespace"] = namespace
        assert controlled.create(manifest, keep=True).status_code == 201
        async with tools.client_of(controlled.kubeconfig) as client:
            cache = ObjectCache()
            platform = KubePlatform(client, cache, workers=WorkerSettings("offramp/worker:1"), instance="t")
            observer = PaperObserver(cache) if answering else Observer(deadline_seconds=0.5)
            reconciler = Reconciler(platform, observer, SigningKey.from_seed(b"k" * 32))
            yield Fleet(controlled, namespace, client, reconciler, cache)
            await observer.close()

    yield make
    path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/earlyexitservices/digits"
    controlled.request("DELETE", path)
    controlled.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments")


def add_node(api: Any, name: str, of: str) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"of": of}}}
    api.request("POST", "/api/v1/nodes", node)
    merge = "application/merge-patch+json"
    # Admission taints a new node until its kubelet reports.
    api.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, content_type=merge)
    room = {"cpu": "8", "memory": "32Gi", "pods": "10", GPU: "1"}
    status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
    answer = api.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content_type=merge)
    assert answer.status_code == 200, answer.text


def _running(*, works: bool, since: str) -> Object:
    state = {"running": {"startedAt": WELL_AGO}} if works else {"waiting": {"reason": "CrashLoopBackOff"}}
    last = (
        {} if works else {"terminated": {"reason": "Error", "exitCode": 1, "message": "manifest.json: digest differs"}}
    )
    container = {
        "name": "worker",
        "image": "x",
        "imageID": "x",
        "ready": works,
        "restartCount": 0,
        "state": state,
        "lastState": last,
    }
    conditions = [
        {"type": kind, "status": str(works or kind == "PodScheduled"), "lastTransitionTime": since}
        for kind in ("Ready", "ContainersReady", "PodScheduled")
    ]
    address = "127.0.0.9"  # nothing answers there
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": conditions,
        "containerStatuses": [container],
    }


def _bundle(pod: Object) -> str:
    return str(next(v["image"]["reference"] for v in pod["spec"]["volumes"] if v["name"] == "bundle"))


def _is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())


def _ending(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


# --- stories ---------------------------------------------------------------------------------------


def test_with_room_for_one_more_no_worker_goes_before_its_successor_serves(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            seen = f.since()
            assert min(ready for ready, _ in seen) == 2 and max(pods for _, pods in seen) == 3

    tools.run(story())


def test_a_broken_bundle_with_room_costs_nothing_and_going_back_recovers_at_once(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD, GOOD)
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_worker_that_has_just_become_ready_outlives_two_broken_edits(fleet: Any, tools: Any) -> None:
    """To the Deployment controller it is not available yet, and it takes away what is not when one update gives way to
    another."""

    async def story() -> None:
        async with fleet(nodes=3, replicas=1) as f:
            f.ready_since = lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            await f.until(lambda: f.seen[-1][0] == 1, what="a worker that is ready")
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.rest(ticks=5)
            await f.edit(model={"uri": BROKEN + "-again"})
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            assert min(ready for ready, _ in f.since()) == 1
            assert await f.bundles() == [GOOD.removeprefix("oci://")]

    tools.run(story())


def test_without_room_workers_are_replaced_in_place_and_a_broken_bundle_costs_one(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, replicas=2, updatePolicy=DEADLINE) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "WaitingForRoom"), what="the wait")
            assert f.seen[-1][0] == 2
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "Replacing"), what="the replacement")
            await f.until(lambda: "digest differs" in f.message("Reconciling"), what="the reason")
            await f.rest()
            assert await f.bundles() == [GOOD.removeprefix("oci://")], (
                "the second is not touched before the first serves"
            )
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD, GOOD)
            assert min(ready for ready, _ in f.since()) == 1
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 1
            live = await f.client.get(DEPLOYMENT, f.namespace, "digits")
            assert live is not None
            assert live["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, "for this update only"

    tools.run(story())


def test_availability_holds_with_the_reason_and_goes_on_by_itself_when_there_is_room(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, replicas=2, updatePolicy={**DEADLINE, "type": "Availability"}) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "NoRoomToSurge"), what="the hold")
            assert f.told()["Reconciling"] == f.told()["Stalled"] == ("True", "NoRoomToSurge")
            assert "no node has a free nvidia.com/gpu" in f.message("Stalled") and "updatePolicy.type" in f.message(
                "Stalled"
            )
            await f.rest()
            add_node(f.api, f"{f.namespace}-more", f.namespace)
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_resource_aware_never_asks_for_a_pod_more(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2, updatePolicy={"type": "ResourceAware"}) as f:
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            seen = f.since()
            assert max(pods for _, pods in seen) == 2 and min(ready for ready, _ in seen) == 1

    tools.run(story())


def test_a_broken_first_bundle_on_the_only_gpu_gives_way_to_its_correction(fleet: Any, tools: Any) -> None:
    """One ahead would wait for ever for the GPU that the broken one holds."""

    async def story() -> None:
        async with fleet(nodes=1, replicas=1, model={"uri": BROKEN}) as f:
            await f.until(lambda: "digest differs" in f.message("Ready"), what="the reason")
            await f.edit(model={"uri": GOOD})
            await f.serve(GOOD)

    tools.run(story())


def test_the_only_worker_is_never_taken_away_for_one_that_finds_no_room(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=1, replicas=1, updatePolicy={**DEADLINE, "type": "ResourceAware"}) as f:
            await f.serve(GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "NoRoomToSurge"), what="the hold")
            await f.rest()
            assert min(ready for ready, _ in f.since()) == 1
            assert "set updatePolicy.type to Recreate" in f.message("WorkersUpdating")
            await f.edit(updatePolicy={"type": "Recreate"})
            await f.serve(BETTER, recreated=True)
            assert f.told()["WorkersUpdating"] == ("False", "Recreated")
            assert "no request was answered for about" in f.message("WorkersUpdating")
            assert max(pods for _, pods in f.since()) == 2, "the one that waits for room, and none besides"

    tools.run(story())


def test_with_recreate_a_broken_bundle_on_the_only_gpu_gives_way_to_what_served_before(fleet: Any, tools: Any) -> None:
    """Pods, image and bundle, as they were; and a restarted operator leaves it at that."""

    async def story() -> None:
        policy = {"type": "Recreate", "recreateDeadline": "5s"}
        async with fleet(nodes=1, replicas=1, updatePolicy=policy) as f:
            await f.serve(GOOD)
            before = (await f.pods())[0]["spec"]
            await f.edit(model={"uri": BROKEN}, worker={"env": [{"name": "CHANGED", "value": "too"}]})
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "Recreating"), what="the interruption")
            await f.until(lambda: f.told().get("WorkersUpdating") == ("True", "RecreateFailed"), what="the verdict")
            assert f.told()["Reconciling"] == f.told()["Stalled"] == ("True", "RecreateFailed")

            async def back() -> bool:
                return await f.bundles() == [GOOD.removeprefix("oci://")] and "for about" in f.message("Stalled")

            await f.until(back, what="the return")
            after = (await f.pods())[0]["spec"]
            assert [after[part] for part in ("containers", "volumes")] == [
                before[part] for part in ("containers", "volumes")
            ]
            assert {"Recreating", "RecreateFailed"} <= {e["reason"] for e in await events_of(f)}
            versions = await f.restart()
            await f.rest(ticks=10)
            assert await f.versions() == versions, "nothing is written anew"
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, recreated=True)

    tools.run(story())


def test_a_quota_for_exactly_the_running_pods_does_not_stop_an_update(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, replicas=2, updatePolicy=DEADLINE) as f:
            quota = {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "two", "namespace": f.namespace},
                "spec": {"hard": {"pods": "2"}},
            }
            path = f"/api/v1/namespaces/{f.namespace}/resourcequotas"
            assert f.api.request("POST", path, quota).status_code == 201
            await f.serve(GOOD, GOOD)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: "quota two is used up" in f.message("WorkersUpdating"), what="the reason")
            await f.serve(BETTER, BETTER)
            assert min(ready for ready, _ in f.since()) == 1

    tools.run(story())


# --- two versions side by side ---------------------------------------------------------------------

LATE = "oci://offramp/digits:late"
SIDE = {"weight": 25, "pause": "1s", "deadline": "10m"}


def beside(kind: str = "Availability", **side: Any) -> dict[str, Any]:
    policy = {**DEADLINE, "type": kind, "sideBySide": {**SIDE, **side}}
    plain = {"model": {"uri": GOOD}, "ramps": {"mode": "Disabled"}}  # without a digest: it is the workers that prove it
    return {**plain, "replicas": 2, "updatePolicy": policy, "answering": True}


async def settled(f: Fleet) -> None:
    await f.until(lambda: "Reconciling" not in f.told() and "VersionOnTrial" not in f.told(), what="the end")


def test_a_model_is_tried_beside_the_others_in_the_same_service_and_followed_when_a_person_says_so(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes=4, **beside(promotion="Manual")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            assert await f.bundles() == sorted(uri.removeprefix("oci://") for uri in (GOOD, GOOD, BETTER))
            service = await f.client.get(NETWORK_SERVICE, f.namespace, "digits")
            assert service is not None
            chosen = [
                p for p in await f.pods() if service["spec"]["selector"].items() <= p["metadata"]["labels"].items()
            ]
            assert len(chosen) == 3, "requests reach both versions by their numbers"
            await f.ask("promote")
            await f.serve(BETTER, BETTER)
            await settled(f)
            assert await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


def test_a_model_that_answers_late_goes_and_the_others_were_never_touched(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=4, **beside()) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            before = {p["metadata"]["uid"] for p in await f.pods()}
            await f.edit(model={"uri": LATE})
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            assert "requests were refused or late" in f.message("Stalled")

            async def alone() -> bool:
                return {p["metadata"]["uid"] for p in await f.pods()} == before

            await f.until(alone, what="the end of the trial")
            assert f.told()["Ready"] == ("True", "Serving")
            await f.edit(model={"uri": GOOD})
            await settled(f)
            assert "Stalled" not in f.told() and {p["metadata"]["uid"] for p in await f.pods()} == before

    tools.run(story())


def test_on_exactly_two_gpus_a_trial_takes_the_place_of_one_worker(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=2, **beside("ResourceAware")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER)
            await settled(f)
            seen = f.since()
            assert min(ready for ready, _ in seen) == 1
            assert "VersionPromoted" in [e["reason"] for e in await events_of(f)]

    tools.run(story())


def test_a_broken_model_on_trial_is_given_up_and_costs_nothing(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(nodes=3, **beside(deadline="1s")) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            f.since()
            await f.edit(model={"uri": BROKEN})
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            assert "not ready within 1 s" in f.message("Stalled")
            assert min(ready for ready, _ in f.since()) == 2

    tools.run(story())


async def events_of(f: Fleet) -> list[Object]:
    return (await f.client.list(EVENT, f.namespace))[0]


# --- requests through a Gateway, by weight ---------------------------------------------------------

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ROUTES = f"/apis/{HTTP_ROUTE.api_version}/httproutes"
PUBLIC = {"parentRefs": [{"name": "public"}], "hostnames": ["digits.example.com"]}


@dataclass
class PaperGateway:
    """Takes a route in only at every ``every``-th look, and says then which generation it has seen.

    ``wrong`` are looks at which it would have sent requests to a version that nobody answers for.
    """

    fleet: Fleet
    every: int
    looks: int = 0
    weights: dict[str, int] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def look(self, pods: list[Object]) -> None:
        self.looks += 1
        if self.every and self.looks % self.every == 0:
            await self.take_in()
        for name, weight in self.weights.items():
            chosen = await self._chosen(name)
            if weight and not any(_is_ready(p) and chosen.items() <= p["metadata"]["labels"].items() for p in pods):
                self.wrong.append(f"look {self.looks}: {weight} % to {name}, where nobody is ready")

    async def take_in(self) -> None:
        route = await self.fleet.client.get(HTTP_ROUTE, self.fleet.namespace, "digits")
        if route is None:
            self.weights = {}
            return
        (rule,) = route["spec"]["rules"]
        self.weights = {ref["name"]: ref["weight"] for ref in rule["backendRefs"]}
        if self.passed[-1:] != [self.weights["digits-next"]]:
            self.passed.append(self.weights["digits-next"])
        self.say("True", generation=route["metadata"]["generation"], parents=route["spec"]["parentRefs"])

    def say(self, accepted: str, *, generation: int, parents: list[Object]) -> None:
        now = {"lastTransitionTime": WELL_AGO, "observedGeneration": generation, "message": "no listener admits it"}
        told = [
            {"type": "Accepted", "status": accepted, "reason": "NotAllowedByListeners", **now},
            {"type": "ResolvedRefs", "status": "True", "reason": "ResolvedRefs", **now},
        ]
        status = [{"parentRef": p, "controllerName": "example.dev/paper", "conditions": told} for p in parents]
        answer = self.fleet.api.merge(route_of(self.fleet), {"status": {"parents": status}}, subresource="status")
        assert answer.status_code == 200, answer.text

    async def _chosen(self, name: str) -> dict[str, str]:
        service = await self.fleet.client.get(NETWORK_SERVICE, self.fleet.namespace, name)
        assert service is not None, f"a route names {name}, which is not there"
        return dict(service["spec"]["selector"])


def route_of(f: Fleet) -> Object:
    metadata = {"name": "digits", "namespace": f.namespace}
    return {"apiVersion": HTTP_ROUTE.api_version, "kind": "HTTPRoute", "metadata": metadata}


def path_of_route(f: Fleet) -> str:
    return f"/apis/{HTTP_ROUTE.api_version}/namespaces/{f.namespace}/httproutes/digits"


async def weights_of(f: Fleet) -> list[int]:
    route = await f.client.get(HTTP_ROUTE, f.namespace, "digits")
    return [] if route is None else [ref["weight"] for ref in route["spec"]["rules"][0]["backendRefs"]]


def watched_by_a_gateway(f: Fleet, *, every: int = 7) -> PaperGateway:
    gateway = PaperGateway(f, every)
    f.onlooker = gateway.look
    return gateway


@dataclass(frozen=True)
class GatewayApi:
    """Gateway API in the cluster, or not."""

    api: Any
    server: Any

    def install(self) -> None:
        def there() -> bool:
            self.api.request("POST", CRD, self.server.gateway_api())
            return bool(self.api.request("GET", ROUTES).status_code == 200)

        self.server.wait_for(there, what="Gateway API")

    def remove(self) -> None:
        definition = f"{CRD}/httproutes.gateway.networking.k8s.io"

        def gone() -> bool:
            self.api.request("DELETE", definition)
            return {self.api.request("GET", path).status_code for path in (ROUTES, definition)} == {404}

        self.server.wait_for(gone, what="the end of Gateway API")


@pytest.fixture
def gateway_api(controlled: Any, server: Any) -> GatewayApi:
    return GatewayApi(controlled, server)


@pytest.mark.parametrize("every", [1, 7], ids=["prompt", "slow"])
def test_with_a_gateway_exactly_the_weight_is_sent_to_the_model_on_trial_and_no_request_to_nobody(
    every: int, fleet: Any, gateway_api: GatewayApi, tools: Any
) -> None:
    gateway_api.install()

    async def story() -> None:
        async with fleet(nodes=4, **beside(promotion="Manual", weight=10), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            gateway = watched_by_a_gateway(f, every=every)
            before = {p["metadata"]["uid"] for p in await f.pods()}
            await f.until(lambda: gateway.weights == {"digits-main": 100, "digits-next": 0}, what="the route at rest")
            await f.until(lambda: "RouteAccepted" not in f.told(), what="the end of the complaint")
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            await f.until(lambda: gateway.weights == {"digits-main": 90, "digits-next": 10}, what="the shares")
            assert before < {p["metadata"]["uid"] for p in await f.pods()}, "no worker is replaced for it"
            await f.ask("promote")
            await f.serve(BETTER, BETTER)
            await settled(f)
            assert await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None
            await f.until(lambda: gateway.weights == {"digits-main": 100, "digits-next": 0}, what="the route at rest")
            assert gateway.passed == [0, 10, 0] and gateway.wrong == []

    tools.run(story())


@pytest.mark.parametrize("answers", [True, False], ids=["a Gateway that answers", "one that does not"])
def test_workers_that_were_on_trial_stay_until_the_gateway_sends_them_nothing(
    answers: bool, fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.install()
    monkeypatch.setattr(gateway_room, "LET_GO_SECONDS", 600.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(promotion="Manual"), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            gateway = watched_by_a_gateway(f)
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: gateway.weights.get("digits-next") == 25, what="the shares")
            gateway.every = 0
            await f.ask("abort")
            await f.until(lambda: f.told().get("Stalled") == ("True", "VersionRejected"), what="the verdict")
            await f.rest(ticks=5)
            assert await weights_of(f) == [100, 0], "at once"
            assert len(await f.bundles()) == 3 and gateway.wrong == []
            if answers:
                await gateway.take_in()
            else:
                monkeypatch.setattr(gateway_room, "LET_GO_SECONDS", 0.0)

            async def alone() -> bool:
                return await f.client.get(DEPLOYMENT, f.namespace, "digits-next") is None

            await f.until(alone, what="the end of the trial")
            assert f.told()["Ready"] == ("True", "Serving")

    tools.run(story())


def test_without_gateway_api_a_trial_goes_on_by_the_numbers_of_pods_until_it_is_installed(
    fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.remove()
    monkeypatch.setattr(memory_room, "REFUSED_RETRY_SECONDS", 1.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(promotion="Manual"), route=PUBLIC) as f:
            await f.serve(GOOD, GOOD)
            await settled(f)
            assert f.told()["RouteAccepted"] == ("False", "NoGatewayAPI")
            assert "install Gateway API, or remove spec.route" in f.message("RouteAccepted")
            assert f.told()["Ready"] == ("True", "Serving")
            await f.edit(model={"uri": BETTER})
            await f.until(lambda: f.told().get("VersionOnTrial") == ("True", "AwaitingPromotion"), what="the question")
            service = await f.client.get(NETWORK_SERVICE, f.namespace, "digits")
            assert service is not None
            chosen = service["spec"]["selector"].items()
            assert sum(chosen <= p["metadata"]["labels"].items() for p in await f.pods()) == 3
            gateway_api.install()
            gateway = watched_by_a_gateway(f)
            await f.until(lambda: gateway.weights == {"digits-main": 75, "digits-next": 25}, what="the shares")
            await f.until(lambda: "RouteAccepted" not in f.told(), what="the end of the complaint")

    tools.run(story())


def test_a_route_of_somebody_else_is_left_alone_and_our_own_goes_with_the_option(
    fleet: Any, gateway_api: GatewayApi, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway_api.install()
    monkeypatch.setattr(memory_room, "REFUSED_RETRY_SECONDS", 1.0)

    async def story() -> None:
        async with fleet(nodes=3, **beside(), route=PUBLIC) as f:
            theirs = route_of(f) | {"spec": {"parentRefs": [{"name": "theirs"}]}}
            assert f.api.create(theirs, keep=True).status_code == 201
            await f.serve(GOOD, GOOD)
            assert f.told()["RouteAccepted"] == ("False", "RouteNameTaken")
            assert f.api.get(theirs)["spec"]["parentRefs"][0]["name"] == "theirs"
            assert f.api.request("DELETE", path_of_route(f)).status_code == 200

            async def made() -> bool:
                return await weights_of(f) == [100, 0]

            await f.until(made, what="a route of our own")
            await f.until(lambda: "no Gateway has taken it" in f.message("RouteAccepted"), what="the next step")
            PaperGateway(f, every=0).say("False", generation=1, parents=PUBLIC["parentRefs"])
            told = "Gateway public: NotAllowedByListeners: no listener admits it"
            await f.until(lambda: told in f.message("RouteAccepted"), what="the Gateway's words")
            assert f.told()["RouteAccepted"] == ("False", "RouteNotAccepted")
            assert f.api.request("DELETE", path_of_route(f)).status_code == 200
            await f.until(made, what="its return")
            await f.edit(route=None)
            await f.until(lambda: "RouteAccepted" not in f.told(), what="silence")
            left = [await f.client.get(NETWORK_SERVICE, f.namespace, f"digits-{which}") for which in ("main", "next")]
            assert await weights_of(f) == [] and left == [None, None]

    tools.run(story())
