"""What stands around the operator in ``bench.fleet``: controllers that make pods, and the workers in them. One process.

Every pod gets an address of its own in 127/8, all of which lead to the one port that this process listens on; the
address that a request came to says which worker is meant. Workers speak the admin protocol and serve nobody: no
traffic, no records.

``python -m bench.fleet.world`` prints a line with its figures for every line it reads on standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.fleet.api import connect
from offramp_core.plan import Plan
from offramp_core.protocol import (
    ArmCounts,
    Observations,
    PlanDocument,
    RampInfo,
    RecordBlock,
    SignedDocument,
    WorkerState,
)
from offramp_operator.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    MANAGED_SELECTOR,
    POD,
    REPLICA_SET,
    SERVICE_LABEL,
    Kind,
    Object,
    owner_of,
)
from offramp_operator.kube.manifests import ADMIN_PORT, PLAN_KEY

BACKBONE, RAMP_SET = "sha256:" + "a" * 64, "sha256:" + "b" * 64
N_RAMPS, BATCH_SIZES = 12, 6  # what a bundle of a small network offers; every worker tells it with its state
SECONDS_BETWEEN_LOOKS = 0.5
PODS_AT_ONCE = 16
FIRST_ADDRESS = 127 << 24 | 64 << 16
RAMPS = tuple(RampInfo(f"r{i:02}-linear", i, (i + 1) / N_RAMPS, "pooled-linear") for i in range(N_RAMPS))
COSTS: dict[str, list[Any]] = {
    "batch_size": [float(2**i) for i in range(BATCH_SIZES)],
    "segment_seconds": [[0.001] * (N_RAMPS + 1)] * BATCH_SIZES,
    "ramp_seconds": [[0.0001] * N_RAMPS] * BATCH_SIZES,
    "regroup_seconds": [0.0] * BATCH_SIZES,
}


@dataclass(slots=True)
class FakeWorker:
    """One worker: who it is and what is in force there."""

    uid: str
    service: str
    service_uid: str
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    epoch: int = 0
    stable_hash: str = ""

    def take(self, signed: SignedDocument) -> None:
        """Put a document in force, unless it is old."""
        document = msgspec.json.decode(signed.payload, type=PlanDocument)
        if document.epoch > self.epoch:
            self.epoch, self.stable_hash = document.epoch, Plan.from_mapping(document.stable.plan).content_hash

    def state(self) -> WorkerState:
        return WorkerState(
            self.uid,
            self.boot_id,
            self.service_uid,
            self.service,
            ready=True,
            backbone_digest=BACKBONE,
            ramp_set_digest=RAMP_SET,
            ramps=RAMPS,
            costs=COSTS,
            epoch=self.epoch,
            stable_hash=self.stable_hash,
        )

    def observations(self, now: float) -> bytes:
        counts = (ArmCounts(self.epoch, "stable", self.stable_hash),) if self.epoch else ()
        return msgspec.json.encode(
            Observations(self.uid, self.boot_id, now, counts, RecordBlock(0, 0, RAMP_SET), state=self.state())
        )


class World:
    """Pods by address, each with a port of its own there, and what they were asked."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}
        self.requests = 0
        self._ports: dict[str, asyncio.Server] = {}
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def add(self, pod: Object, *, service_uid: str) -> None:
        """A pod that runs."""
        meta, address = pod["metadata"], pod["status"]["podIP"]
        service = meta["labels"][SERVICE_LABEL]
        self.workers[address] = FakeWorker(meta["uid"], service, service_uid)
        # One address at a time: other processes of this machine may listen on the same port of 127.0.0.1.
        if address not in self._ports:
            self._ports[address] = await asyncio.get_running_loop().create_server(
                lambda: AdminPort(self), address, ADMIN_PORT
            )

    def close(self) -> None:
        """Stop listening."""
        for port in self._ports.values():
            port.close()


class AdminPort(asyncio.Protocol):
    """Just enough HTTP/1.1 for the operator: requests come one at a time on a connection, replies are small."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._address = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        if len(rest) >= length:
            self._received = rest[length:]
            self._transport.write(self._answer(head.split(b" ", 2)[1], rest[:length]))

    def _answer(self, path: bytes, body: bytes) -> bytes:
        self._world.requests += 1
        worker = self._world.workers.get(self._address)
        if worker is None:
            return _reply(404, b"{}")
        if path.startswith(b"/v1/observations"):
            return _reply(200, worker.observations(asyncio.get_running_loop().time()))
        if body:
            worker.take(msgspec.json.decode(body, type=SignedDocument))
        return _reply(200, msgspec.json.encode(worker.state()))


def _reply(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        body,
    )


class Controllers:
    """The Deployment and ReplicaSet controllers, the scheduler and the kubelet, as far as the operator can tell
    them."""

    def __init__(self, session: aiohttp.ClientSession, world: World) -> None:
        self._session, self._world = session, world
        self._seen: set[str] = set()
        self._next = FIRST_ADDRESS

    async def resume(self) -> None:
        """Take over the pods of an earlier run, with the plans that are published."""
        plans = {_owner_uid(o): o["data"].get(PLAN_KEY, "") for o in await self._list(CONFIG_MAP)}
        for pod in await self._list(POD):
            await self._world.add(pod, service_uid=_service_uid(pod))
            self._seen.add(_deployment_uid(pod))
            worker = self._world.workers[pod["status"]["podIP"]]
            if plans.get(worker.service_uid):
                worker.take(msgspec.json.decode(plans[worker.service_uid], type=SignedDocument))
        self._next = FIRST_ADDRESS + len(self._world.workers)

    async def run(self) -> None:
        """Make pods for every new Deployment, for ever."""
        at_once = asyncio.Semaphore(PODS_AT_ONCE)

        async def make(deployment: Object) -> None:
            async with at_once:
                await self._make_pods(deployment)

        while True:
            new = [d for d in await self._list(DEPLOYMENT) if d["metadata"]["uid"] not in self._seen]
            self._seen |= {d["metadata"]["uid"] for d in new}
            await asyncio.gather(*(make(deployment) for deployment in new))
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _make_pods(self, deployment: Object) -> None:
        meta, spec = deployment["metadata"], deployment["spec"]
        template = spec["template"]
        replica_set = await self._create(
            REPLICA_SET,
            {
                "metadata": {
                    "name": f"{meta['name']}-1",
                    "namespace": meta["namespace"],
                    "labels": template["metadata"]["labels"],
                    "annotations": {"deployment.kubernetes.io/revision": "1"},
                    "ownerReferences": [_owner(deployment, DEPLOYMENT)],
                },
                "spec": {"replicas": spec["replicas"], "selector": spec["selector"], "template": template},
            },
        )
        for number in range(spec["replicas"]):
            address = self._address()
            annotations = {
                **template["metadata"]["annotations"],
                "bench/deployment": meta["uid"],
                "bench/service": _owner_uid(deployment),
            }
            pod = await self._create(
                POD,
                {
                    "metadata": {
                        "name": f"{meta['name']}-1-{number}",
                        "namespace": meta["namespace"],
                        "labels": template["metadata"]["labels"],
                        "annotations": annotations,
                        "ownerReferences": [_owner(replica_set, REPLICA_SET)],
                    },
                    "spec": template["spec"],
                },
            )
            ready = {"status": "True", "lastTransitionTime": pod["metadata"]["creationTimestamp"]}
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [
                    {"type": name, **ready} for name in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
                ],
                "containerStatuses": [
                    {
                        "name": "worker",
                        "ready": True,
                        "started": True,
                        "restartCount": 0,
                        "image": "offramp/worker:1",
                        "imageID": "sha256:1",
                        "containerID": "containerd://1",
                        "state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}},
                    }
                ],
            }
            await self._world.add(await self._set_status(POD, pod, status), service_uid=_service_uid(pod))

    def _address(self) -> str:
        self._next += 1
        return ".".join(str(self._next >> shift & 255) for shift in (24, 16, 8, 0))

    # --- the API server ----------------------------------------------------------------------------

    async def _list(self, kind: Kind) -> list[Object]:
        async with self._session.get(_path(kind), params={"labelSelector": MANAGED_SELECTOR}) as answer:
            answer.raise_for_status()
            items: list[Object] = msgspec.json.decode(await answer.read())["items"]
            return items

    async def _create(self, kind: Kind, body: Object) -> Object:
        body = {"apiVersion": kind.api_version, "kind": kind.name, **body}
        async with self._session.post(_path(kind, body["metadata"]["namespace"]), json=body) as answer:
            if answer.status >= 300:
                raise SystemExit(f"{kind.name} {body['metadata']['name']} was refused: {await answer.text()}")
            made: Object = msgspec.json.decode(await answer.read())
            return made

    async def _set_status(self, kind: Kind, obj: Object, status: Object) -> Object:
        path = f"{_path(kind, obj['metadata']['namespace'])}/{obj['metadata']['name']}/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self._session.patch(path, data=json.dumps({"status": status}), headers=headers) as answer:
            answer.raise_for_status()
            made: Object = msgspec.json.decode(await answer.read())
            return made


def _path(kind: Kind, namespace: str = "") -> str:
    parts = ["apis" if kind.group else "api", kind.api_version, *(["namespaces", namespace] if namespace else [])]
    return "/" + "/".join([*parts, kind.plural])


def _owner(obj: Object, kind: Kind) -> Object:
    meta = obj["metadata"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _owner_uid(obj: Object) -> str:
    owner = owner_of(obj)
    return "" if owner is None else str(owner["uid"])


def _deployment_uid(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["bench/deployment"])


def _service_uid(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["bench/service"])


async def serve(server: str, token: str) -> None:
    """Until standard input ends."""
    world, loop = World(), asyncio.get_running_loop()
    async with connect(server, token) as session:
        controllers = Controllers(session, world)
        await controllers.resume()
        working = asyncio.create_task(controllers.run())
        print(json.dumps({"workers": len(world.workers), "requests": 0}), flush=True)
        while (line := await loop.run_in_executor(None, sys.stdin.readline)) and not working.done():
            if line.strip() == "rest":  # nothing new is to come: leave the API server alone
                working.cancel()
                working = loop.create_future()  # type: ignore[assignment]
            print(json.dumps({"workers": len(world.workers), "requests": world.requests}), flush=True)
        if working.done():
            working.result()
        working.cancel()
        world.close()


def run(serve: Callable[[str, str], Coroutine[Any, Any, None]], *, name: str) -> int:
    """Command line of a process that stands around the operator."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--server", required=True)
    parser.add_argument("--token", required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.server, options.token))
    return 0


if __name__ == "__main__":
    sys.exit(run(serve, name="bench.fleet.world"))
