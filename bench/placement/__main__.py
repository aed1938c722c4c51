"""A thousand GPUs of several kinds and twice as many services. ``python -m bench.placement [--share 1]``. Writes
build/bench/placement.json.

API server, controllers and scheduler are Kubernetes' own; kwok plays the kubelets of nodes that exist on paper, with
whole, time-sliced and cut GPUs (:mod:`bench.placement.paper`); the operator is the real process. Services name
WorkerClasses that ask for more than there is, for what no node offers, and for a product that no node has.

*Placed* is a service that serves; every other must say in its condition Ready what it waits for, and no pod may wait
although a node that it may go to has what it asks for. In *steady state* nothing may be written. Then services that
serve are deleted, and others must get what they leave.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.fleet.api import connect, load_starter
from bench.fleet.processes import NAMESPACE, Cluster, Json, OperatorProcess, World, cluster_in, concluded
from bench.placement import kubelets
from bench.placement.paper import Asked, could_be_placed, node, scaled, service, worker_class

SHARE, SECONDS, REST_SECONDS = 1.0, 120.0, 90.0
DEADLINE_SECONDS = 3600.0
LEAVE = 0.1  # of the services that serve
AT_ONCE = 16
SCHEDULER = "default-scheduler"
SERVICES = f"/apis/earlyexit.dev/v1alpha1/namespaces/{NAMESPACE}/earlyexitservices"


def listed(cluster: Cluster, path: str) -> list[Json]:
    return list(cluster.api.request("GET", path, params={"resourceVersion": "0"}).json()["items"])


def ready_condition(found: Json) -> Json:
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next((dict(c) for c in conditions if c["type"] == "Ready"), {})


def serves(found: Json) -> bool:
    status = found.get("status") or {}
    return status.get("phase") == "Ready" and (status.get("workers") or {}).get("acked") == 1


def explains(found: Json, told: str) -> bool:
    """Whether a service that waits says what for and what to do next."""
    ready = ready_condition(found)
    message = str(ready.get("message", ""))
    return ready.get("reason") == "Unschedulable" and told in message and "; " in message.partition(told)[2]


class Operator:
    """The operator, started again where a starved machine lets it lose its Lease."""

    def __init__(self, cluster: Cluster, folder: Path, stack: ExitStack) -> None:
        self._cluster, self._folder, self._stack = cluster, folder, stack
        self._starts = 0
        self._process = self._start()

    def keep(self) -> None:
        if self._process.process.poll() is not None:
            self._process = self._start()

    def cpu(self) -> float:
        """Processor seconds of the process that runs now."""
        return self._process.cpu()

    def running(self) -> int:
        """The id of the process; 0 where it has ended."""
        return self._process.process.pid if self._process.process.poll() is None else 0

    def events(self) -> dict[str, int]:
        return self._process.events() | {"starts": self._starts}

    def _start(self) -> OperatorProcess:
        self._starts += 1
        port = load_starter().free_port()
        process = OperatorProcess(self._cluster, self._folder, name=f"operator-{self._starts}", port=port)
        self._stack.callback(process.stop)
        return process


class Fleet:
    """All services as they are now, beside what each class must say."""

    def __init__(self, cluster: Cluster, world: World, asked: Sequence[Asked]) -> None:
        self._cluster, self._world = cluster, world
        self._told = {a.name: a.told for a in asked}

    def look(self) -> Json:
        """How many serve and how many say why not, by class; who says nothing, and which pods could be placed."""
        services = listed(self._cluster, SERVICES)
        placed, waiting, unexplained = Counter[str](), Counter[str](), []
        for found in services:
            name = found["metadata"]["name"].rpartition("-")[0]
            if serves(found):
                placed[name] += 1
            elif explains(found, self._told[name]):
                waiting[name] += 1
            else:
                unexplained.append(f"{found['metadata']['name']}: {ready_condition(found).get('message', 'nothing')}")
        nodes = listed(self._cluster, "/api/v1/nodes")
        pods = listed(self._cluster, f"/api/v1/namespaces/{NAMESPACE}/pods")
        return {
            "services": len(services),
            "pods": len(pods),
            "bound": sum(1 for pod in pods if pod["spec"].get("nodeName")),
            "placed": dict(placed),
            "waiting": dict(waiting),
            "unexplained": unexplained,
            "could_be_placed": could_be_placed(nodes, pods),
        }

    def settle(self, operator: Operator, console: Console) -> Json:
        """Until every service serves or explains itself, and nobody waits for what is free. Who has a node must serve:
        what it says may be of before."""
        began, said = time.monotonic(), -1
        while True:
            operator.keep()
            self._world.ask()  # which ends this where the workers have ended
            seen = self.look()
            left = len(seen["unexplained"])
            settled = seen["pods"] == seen["services"] and seen["bound"] == sum(seen["placed"].values())
            if settled and not left and not seen["could_be_placed"]:
                return {**seen, "seconds": time.monotonic() - began}
            if time.monotonic() - began > DEADLINE_SECONDS:
                raise SystemExit(f"stuck: {seen['unexplained'][:5]}; could be placed: {seen['could_be_placed'][:5]}")
            if left != said:
                console.print(f"{left} of {seen['services']} neither serve nor explain, e.g. {seen['unexplained'][:1]}")
                said = left
            time.sleep(2.0)

    def leave(self, share: float) -> int:
        """Delete a share of the services that serve, of each class."""
        names: dict[str, list[str]] = {}
        for found in listed(self._cluster, SERVICES):
            if serves(found):
                name = found["metadata"]["name"]
                names.setdefault(name.rpartition("-")[0], []).append(name)
        gone = [name for own in names.values() for name in own[: max(1, round(share * len(own)))]]
        for name in gone:
            self._cluster.api.request("DELETE", f"{SERVICES}/{name}")
        return len(gone)


async def create(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """All services, those of different classes in turn."""
    at_once = asyncio.Semaphore(AT_ONCE)
    numbered = sorted((number / a.services, a.name, number, a) for a in asked for number in range(a.services))
    async with connect(cluster.server, cluster.token) as session:

        async def one(a: Asked, number: int) -> None:
            async with at_once, session.post(SERVICES, json=service(a, number, NAMESPACE)) as answer:
                if answer.status != 201:
                    raise SystemExit(f"a service was refused: {await answer.text()}")

        await asyncio.gather(*(one(a, number) for _, _, number, a in numbered))


def reporters(cluster: Cluster) -> Counter[str]:
    """Events that there are, by who reported them."""
    counts: Counter[str] = Counter()
    after = ""
    while True:
        page = cluster.api.request("GET", f"/apis/events.k8s.io/v1/events?limit=500&continue={after}").json()
        counts.update(event["reportingController"] for event in page["items"])
        after = page["metadata"].get("continue", "")
        if not after:
            return counts


def without_schedulers(written: Mapping[str, int], reporters: Mapping[str, int]) -> int:
    """Writes less the reports of Kubernetes' scheduler, which tries pods that wait again every five minutes: events
    that it made, and events that were counted on. The operator makes events, and changes none."""
    counted_on = sum(n for what, n in written.items() if what == "PATCH events")
    return sum(written.values()) - counted_on - reporters.get(SCHEDULER, 0)


def measure(share: float, *, seconds: float, rest: float, console: Console, folder: Path) -> Json:
    """Everything; returns what goes into the JSON file."""
    nodes, asked = scaled(share)
    with cluster_in(folder) as cluster, ExitStack() as stack:
        kubelets.start(cluster, folder, stack)
        kubelets.add_nodes(cluster, (node(kind, number) for kind in nodes for number in range(kind.n)))
        for a in asked:
            answer = cluster.api.create(worker_class(a), keep=True)
            if answer.status_code != 201:
                raise SystemExit(f"class {a.name} was refused: {answer.text}")
        world = World(cluster, "bench.placement.world")
        stack.callback(world.stop)
        asyncio.run(create(cluster, asked))
        operator = Operator(cluster, folder, stack)
        fleet = Fleet(cluster, world, asked)
        placed = fleet.settle(operator, console) | {"cpu_seconds": operator.cpu()}
        console.print(f"placed: {json.dumps(placed)}")
        time.sleep(rest)
        operator.keep()
        runs = operator.running()
        written, told, cpu = cluster.written(), reporters(cluster), operator.cpu()
        time.sleep(seconds)
        steady = {
            "seconds": seconds,
            "operator_ran": operator.running() == runs,
            "cpu_share": (operator.cpu() - cpu) / seconds,
            "written": dict(cluster.written() - written),
            "reporters": dict(reporters(cluster) - told),
        }
        steady["writes"] = without_schedulers(steady["written"], steady["reporters"])
        steady["changed"] = {what: now for what, now in fleet.look().items() if now != placed[what]}
        console.print(f"steady: {json.dumps(steady)}")
        gone = fleet.leave(LEAVE)
        moved = fleet.settle(operator, console) | {"deleted": gone}
        console.print(f"after {gone} were deleted: {json.dumps(moved)}")
        events = operator.events()
    return {
        "gpus": sum(kind.n * kind.gpus for kind in nodes),
        "nodes": sum(kind.n for kind in nodes),
        "asked": [asdict(a) for a in asked],
        "placed": placed,
        "steady": steady,
        "moved": moved,
        "events": events,
        "load_average": os.getloadavg()[0],
    }


def verdict(result: Json) -> dict[str, bool]:
    """What was asked, and whether it held."""
    placed, steady, moved = result["placed"], result["steady"], result["moved"]
    serving = sum(placed["placed"].values()), sum(moved["placed"].values())
    return {
        "every service serves or explains what it waits for": not placed["unexplained"] and not moved["unexplained"],
        "nobody waits for what is free": not placed["could_be_placed"] and not moved["could_be_placed"],
        "nothing changes and nothing is written in steady state": (
            steady["operator_ran"] and not steady["changed"] and steady["writes"] == 0
        ),
        "others take what is given back": serving[1] > serving[0] - moved["deleted"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when something asked did not hold."""
    parser = argparse.ArgumentParser(prog="bench.placement", description="services on GPUs of many kinds, on paper")
    parser.add_argument("--share", type=float, default=SHARE, help="of 1,000 GPUs and 2,000 services")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of steady state")
    parser.add_argument("--rest", type=float, default=REST_SECONDS, help="seconds before the steady state")
    parser.add_argument("--out", type=Path, default=Path("build/bench/placement.json"))
    options = parser.parse_args(arguments)
    console = Console(width=200)
    folder = Path("build/placement")
    result = measure(options.share, seconds=options.seconds, rest=options.rest, console=console, folder=folder)
    return concluded(result, verdict(result), out=options.out, console=console)


if __name__ == "__main__":
    sys.exit(main())
