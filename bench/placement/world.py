"""The workers in the pods that kwok runs, for ``bench.placement``: as in :mod:`bench.fleet.world` they speak the admin
protocol at the pods' addresses and serve nobody.

``python -m bench.placement.world`` prints a line with its figures for every line it reads on standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
import msgspec

from bench.fleet.api import connect
from bench.fleet.processes import NAMESPACE, Json
from bench.fleet.world import World, run
from offramp_operator.kube.kinds import MANAGED_SELECTOR, SERVICE_LABEL

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SERVICES = f"/apis/earlyexit.dev/v1alpha1/namespaces/{NAMESPACE}/earlyexitservices"


class Workers:
    """A worker for every pod that has an address."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.world = World()
        self._session = session
        self._service_uids: dict[str, str] = {}

    async def run(self, version: str) -> None:
        """Watch pods for ever; those of before ``version`` are none."""
        query = {"watch": "1", "labelSelector": MANAGED_SELECTOR, "resourceVersion": version}
        while True:
            unlimited = aiohttp.ClientTimeout(total=None)
            async with self._session.get(PODS, params=query, timeout=unlimited) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        raise SystemExit(f"the watch of pods ended: {event['object']}")
                    query["resourceVersion"] = event["object"]["metadata"]["resourceVersion"]
                    await self._see(event["object"])

    async def _see(self, pod: Json) -> None:
        address = (pod.get("status") or {}).get("podIP")
        known = self.world.workers.get(address) if address else None
        if address and (known is None or known.uid != pod["metadata"]["uid"]):
            await self.world.add(pod, service_uid=await self._uid_of(pod["metadata"]["labels"][SERVICE_LABEL]))

    async def _uid_of(self, service: str) -> str:
        if service not in self._service_uids:
            async with self._session.get(f"{SERVICES}/{service}") as answer:
                answer.raise_for_status()
                self._service_uids[service] = (await answer.json())["metadata"]["uid"]
        return self._service_uids[service]


async def serve(server: str, token: str) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    async with connect(server, token) as session:
        workers = Workers(session)
        async with session.get(PODS, params={"limit": "1"}) as answer:
            version = (await answer.json())["metadata"]["resourceVersion"]
        watching = asyncio.create_task(workers.run(version))
        print(json.dumps({"workers": 0}), flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline) and not watching.done():
            print(json.dumps({"workers": len(workers.world.workers)}), flush=True)
        if watching.done():
            watching.result()
        watching.cancel()
        workers.world.close()


if __name__ == "__main__":
    sys.exit(run(serve, name="bench.placement.world"))
