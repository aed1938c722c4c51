"""A pool of shared workers under Kubernetes' own controllers: API server, controllers and scheduler are real, and so
are the worker processes; a few lines stand for the kubelet that starts them, each on a loopback address of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

import bundles
from paper_fleet import WELL_AGO, ending, path_of

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import NETWORK_SERVICE, POD, SERVICE, WORKER_POOL, Object, name_of, uid_of
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.shared.calls import Calls
from offramp_operator.kube.shared.reconcile import PoolReconciler
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

KEY = SigningKey(b"k" * 32)
WORKERS = WorkerSettings("offramp/worker:1")
ADDRESSES = itertools.count(1)


def write_bundle(claim: Path, name: str, *, seed: int, calls: str = "") -> None:
    """A bundle in the claim whose model is called ``calls``, or as its folder."""
    made = bundles.write_bundle(claim / name, seed=seed)
    manifest = json.loads((made / "manifest.json").read_bytes())
    (made / "manifest.json").write_text(json.dumps(manifest | {"name": calls or name}))


@dataclass
class Process:
    """A worker, and where it listens."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}:8080/v2/health/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def infer(self, model: str) -> int:
        row = bundles.inputs(1)
        tensor = {"name": "x", "shape": list(row.shape), "datatype": "FP32", "data": row.ravel().tolist()}
        url = f"http://{self.address}:8080/v2/models/{model}/infer"
        return httpx.post(url, json={"inputs": [tensor]}, timeout=30).status_code

    def boot_id(self, service_uid: str, model: str) -> str:
        return str(self.state(service_uid, model)["boot_id"])

    def state(self, service_uid: str, model: str) -> dict[str, Any]:
        """As a service's control plane sees its model."""
        headers = {"Authorization": f"Bearer {KEY.admin_token(service_uid)}"}
        state = httpx.get(f"http://{self.address}:8081/models/{model}/v1/state", headers=headers, timeout=5)
        found: dict[str, Any] = state.raise_for_status().json()
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@dataclass
class PoolFleet:
    """One namespace with a pool, its services and an operator. ``clock`` may be moved ahead."""

    api: Any
    namespace: str
    client: KubeClient
    folder: Path
    ahead: float = 0.0
    processes: dict[str, Process] = field(default_factory=dict)
    used: list[Observer | Calls] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = ObjectCache()
        self.another_operator()

    def another_operator(self) -> None:
        """One that remembers nothing."""
        platform = KubePlatform(self.client, self.cache, workers=WORKERS, instance="t")
        self.observer, self.calls = Observer(), Calls()
        self.used += [self.observer, self.calls]
        self.services = Reconciler(platform, self.observer, KEY)
        self.pools = PoolReconciler(
            self.client,
            self.cache,
            KEY,
            workers=WORKERS,
            calls=self.calls,
            monotonic=lambda: time.monotonic() + self.ahead,
        )

    @property
    def claim(self) -> Path:
        return self.folder / "claim"

    def bind_claim(self) -> None:
        """The claim of the bundles, bound as the volume controller would have it, which does not run here."""
        spec = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        volume = f"bundles-{self.namespace}"
        meta = {"name": "bundles", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}}
        size = {"storage": "1Gi"}
        claim = self.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": meta,
                "spec": spec | {"volumeName": volume, "resources": {"requests": size}},
            }
        ).json()
        bound = {"kind": "PersistentVolumeClaim", "namespace": self.namespace, "name": "bundles", "uid": uid_of(claim)}
        self.api.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": spec | {"capacity": size, "hostPath": {"path": str(self.claim)}, "claimRef": bound},
            },
            keep=True,
        )

    def create(self, manifest: Object) -> Any:
        manifest["metadata"]["namespace"] = self.namespace
        return self.api.create(manifest, keep=True)

    async def tick(self) -> None:
        """The kubelet looks, the operator looks."""
        for pod in (await self.client.list(POD, self.namespace))[0]:
            self._kubelet(pod)
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
        for kind, reconcile in ((WORKER_POOL, self.pools.reconcile), (SERVICE, self.services.reconcile)):
            for name in self.cache.names(kind):
                await reconcile(ServiceKey(*name))

    def _kubelet(self, pod: Object) -> None:
        uid = uid_of(pod)
        if ending(pod):
            if uid in self.processes:
                self.processes.pop(uid).end()
            self.api.request("DELETE", f"{path_of(pod)}?gracePeriodSeconds=0")
            return
        if not pod["spec"].get("nodeName"):
            return
        if uid not in self.processes:
            self.processes[uid] = self._start(pod)
        running = self.processes[uid]
        ready = str(running.ready)
        known = {c["type"]: c["status"] for c in pod["status"].get("conditions") or ()}
        if pod["status"].get("podIP") != running.address or known.get("Ready") != ready:
            conditions = [
                {"type": kind, "status": status, "lastTransitionTime": WELL_AGO}
                for kind, status in (("Ready", ready), ("ContainersReady", ready), ("PodScheduled", "True"))
            ]
            status = {
                "phase": "Running",
                "podIP": running.address,
                "podIPs": [{"ip": running.address}],
                "conditions": conditions,
            }
            merge = "application/merge-patch+json"
            self.api.request("PATCH", f"{path_of(pod)}/status", {"status": status}, content_type=merge)

    def _start(self, pod: Object) -> Process:
        number = next(ADDRESSES)
        address = f"127.{os.getpid() % 200 + 20}.{number // 250}.{number % 250 + 1}"
        [container] = pod["spec"]["containers"]
        env = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        state = self.folder / uid_of(pod)
        state.mkdir()
        own = {
            "OFFRAMP_UID": uid_of(pod),
            "OFFRAMP_HOST": address,
            "OFFRAMP_THREADS": "1",
            "OFFRAMP_BUNDLES": str(self.claim),
            "OFFRAMP_STATE_DIR": str(state),
        }
        plain = {k: v for k, v in os.environ.items() if not k.startswith("OFFRAMP_")}
        command = [sys.executable, "-m", "offramp_worker.main"]
        with (self.folder / f"{uid_of(pod)}.log").open("wb") as log:
            return Process(address, subprocess.Popen(command, env={**plain, **env, **own}, stderr=log, stdout=log))

    async def close(self) -> None:
        for process in self.processes.values():
            process.process.kill()
            process.process.wait()
        for used in self.used:
            await used.close()

    async def until(self, condition: Callable[[], Any], *, what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            await self.tick()
            assert time.monotonic() < deadline, f"{what} did not happen; {json.dumps(self.pool(), default=str)[:3000]}"
            await asyncio.sleep(0.05)

    # --- what there is --------------------------------------------------------------------------------

    def pool(self, name: str = "shared") -> Object:
        return (self.cache.get(WORKER_POOL, self.namespace, name) or {}).get("status") or {}

    def condition(self, name: str, kind: str = "Ready", of: Any = SERVICE) -> Object:
        obj = self.cache.get(of, self.namespace, name) or {}
        return next((c for c in (obj.get("status") or {}).get("conditions") or () if c["type"] == kind), {})

    def is_ready(self, *names: str) -> bool:
        return all(
            self.condition(name).get("status") == "True" and not self.condition(name, "Reconciling") for name in names
        )

    async def behind(self, name: str) -> list[Process]:
        """The workers that requests for a service are sent to."""
        service = await self.client.get(NETWORK_SERVICE, self.namespace, name)
        assert service is not None
        chosen = service["spec"]["selector"].items()
        pods = (await self.client.list(POD, self.namespace))[0]
        found = [uid_of(pod) for pod in pods if chosen <= (pod["metadata"]["labels"] or {}).items()]
        return [self.processes[uid] for uid in found if uid in self.processes]

    async def names_of_pods(self) -> list[str]:
        return sorted(name_of(pod) for pod in (await self.client.list(POD, self.namespace))[0] if not ending(pod))
