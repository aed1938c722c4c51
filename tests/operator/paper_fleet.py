"""A service under Kubernetes' own controllers: API server, controller manager and scheduler are real; the nodes exist
on paper, and a few lines stand for their kubelets. A bundle whose name contains ``broken`` never becomes ready.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    POD,
    REPLICA_SET,
    SERVICE,
    Object,
)
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

CONTROLLERS = (
    "deployment-controller,replicaset-controller,resourcequota-controller,garbage-collector-controller,"
    "resourceclaim-controller"
)
GPU = "nvidia.com/gpu"
ONE_GPU = {"resources": {"limits": {GPU: 1}}}
GOOD, BETTER, BROKEN = "oci://offramp/digits:1", "oci://offramp/digits:2", "oci://offramp/digits:broken"
WELL_AGO = "2026-01-01T00:00:00Z"  # so that a pod has been ready for as long as the Deployment wants to see
DEADLINE = {"surgeDeadline": "1s"}


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
    others: tuple[str, ...] = ()  # services beside the one

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
        return [pod for pod in await self.all_pods() if not ending(pod)]

    async def all_pods(self) -> list[Object]:
        """With those that are ending."""
        return (await self.client.list(POD, self.namespace))[0]

    async def bundles(self) -> list[str]:
        """What the ready pods serve."""
        return sorted(bundle_of(pod) for pod in await self.pods() if is_ready(pod))

    async def look(self) -> list[Object]:
        """Note what there is; returns all pods, with those that are ending."""
        found = await self.all_pods()
        pods = [pod for pod in found if not ending(pod)]
        asked = sum(made["spec"]["replicas"] for made in (await self.client.list(REPLICA_SET, self.namespace))[0])
        self.seen.append((sum(map(is_ready, pods)), asked))
        if self.onlooker is not None:
            await self.onlooker(pods)
        return found

    async def tick(self) -> None:
        """The kubelets look, the operator looks."""
        # What the kubelets are about to make ready is noted as it is before: between two looks a pod could be replaced.
        for pod in await self.look():
            if ending(pod):
                self.api.request("DELETE", f"{path_of(pod)}?gracePeriodSeconds=0")
            elif pod["spec"].get("nodeName") and not pod["status"].get("podIP"):
                status = {"status": running(works="broken" not in bundle_of(pod), since=self.ready_since())}
                self.api.request("PATCH", f"{path_of(pod)}/status", status, content_type="application/merge-patch+json")
        await self.look()
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
        for name in ("digits", *self.others):
            await self.reconciler.reconcile(ServiceKey(self.namespace, name))

    async def until(self, condition: Callable[[], Any], *, what: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while True:
            await self.tick()
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            if time.monotonic() > deadline:
                places = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in await self.all_pods()}
                raise AssertionError(f"{what} did not happen; {self.told()}; pods {self.seen[-5:]} on {places}")
            await asyncio.sleep(0.05)

    async def restart(self) -> dict[str, str]:
        """Another operator, which knows what is stored and no more; resource versions of what it finds."""
        platform = KubePlatform(self.client, self.cache, workers=WorkerSettings("offramp/worker:1"), instance="t2")
        self.reconciler = Reconciler(platform, Observer(deadline_seconds=0.5), SigningKey(b"k" * 32))
        return await self.versions()

    async def versions(self) -> dict[str, str]:
        found = [obj for kind in (SERVICE, DEPLOYMENT) for obj in (await self.client.list(kind, self.namespace))[0]]
        return {f"{obj['kind']}/{obj['metadata']['name']}": obj["metadata"]["resourceVersion"] for obj in found}

    async def serve(self, *bundles: str, recreated: bool = False) -> None:
        """Until exactly these serve and no update is under way."""
        wanted = sorted(uri.removeprefix("oci://") for uri in bundles)

        async def there() -> bool:
            return (await self.bundles()) == wanted == sorted(bundle_of(p) for p in await self.pods())

        await self.until(there, what=f"serving {wanted}")
        over = ("False", "Recreated") if recreated else None
        await self.until(lambda: self.told().get("WorkersUpdating") == over, what="the end of the update")

    async def rest(self, ticks: int = 20) -> None:
        for _ in range(ticks):
            await self.tick()
            await asyncio.sleep(0.05)

    def told(self, name: str = "digits") -> dict[str, tuple[str, str]]:
        """Status and reason of each condition."""
        service = self.cache.get(SERVICE, self.namespace, name) or {}
        conditions = (service.get("status") or {}).get("conditions") or ()
        return {c["type"]: (c["status"], c["reason"]) for c in conditions}

    def message(self, kind: str, name: str = "digits") -> str:
        service = self.cache.get(SERVICE, self.namespace, name) or {}
        return next((c["message"] for c in service["status"]["conditions"] if c["type"] == kind), "")

    def since(self) -> list[tuple[int, int]]:
        """What was seen since the last call."""
        seen, self.seen = self.seen, []
        return seen


def add_node(api: Any, name: str, of: str, *, pool: str = "") -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"of": of, "pool": pool}}}
    api.request("POST", "/api/v1/nodes", node)
    merge = "application/merge-patch+json"
    # Admission taints a new node until its kubelet reports.
    api.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, content_type=merge)
    room = {"cpu": "8", "memory": "32Gi", "pods": "10", GPU: "1"}
    status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
    answer = api.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, content_type=merge)
    assert answer.status_code == 200, answer.text


def running(*, works: bool, since: str) -> Object:
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


def bundle_of(pod: Object) -> str:
    return str(next(v["image"]["reference"] for v in pod["spec"]["volumes"] if v["name"] == "bundle"))


def is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())


def ending(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def path_of(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
