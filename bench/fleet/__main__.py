"""One operator and thousands of services. ``python -m bench.fleet [--services 2000]``. Writes build/bench/fleet.json.

A real API server on a real etcd holds the objects; one process plays the controllers, the kubelets and the workers'
admin ports (:mod:`bench.fleet.world`); the operator is the real process. It first makes everything that the services
need (*cold start*), is stopped, and is started again on objects that are all as they should be: *restart* is from the
start of that process, imports and election included, to the moment when every service has had its first pass. Then
services go to rest, and *steady state* is a stretch of that.

The machine is shared, so every time is also given as processor time of the operator. What pulls cost is measured apart
and taken off where a figure says *beyond the pulls*: right after that stretch, the operator's own code pulls the same
workers in the same rhythm and does nothing else. (A pull that comes alone costs twice what one of many in a row does,
and the machine's own speed changes by a quarter within minutes.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop
from rich.console import Console

from bench.fleet.api import connect, load_starter
from bench.fleet.processes import NAMESPACE, Cluster, Json, OperatorProcess, World, cluster_in, concluded
from offramp_core.control.snapshot import WorkerEndpoint
from offramp_operator.shell.observe import KEEP_ALIVE_SECONDS, Observer
from offramp_operator.shell.platform import ServiceKey

SERVICES, REPLICAS, SECONDS = 2000, 2, 120.0
RESTART_GOAL_SECONDS, SHARE_GOAL, MEMORY_GOAL = 9.0, 0.02, 260 * 2**20
COLD_SECONDS, RESTART_SECONDS = 3600.0, 600.0
REST_SECONDS = 60.0  # until the waits of idle services have grown to their longest
CREATES_AT_ONCE = 16
SLOT_SECONDS = 0.1  # of the rhythm of pulls


def manifest(number: int, *, replicas: int) -> Json:
    """One service of the fleet."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": f"service-{number:05}", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "oci://registry.example/models/digits:1", "digest": f"sha256:{0:064}"},
            "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
            "replicas": replicas,
            "worker": {
                "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}
            },
        },
    }


async def create(cluster: Cluster, n: int, *, replicas: int) -> None:
    """All services."""
    path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{NAMESPACE}/earlyexitservices"
    at_once = asyncio.Semaphore(CREATES_AT_ONCE)
    async with connect(cluster.server, cluster.token) as session:

        async def one(number: int) -> None:
            async with at_once, session.post(path, json=manifest(number, replicas=replicas)) as answer:
                if answer.status != 201:
                    raise SystemExit(f"a service was refused: {await answer.text()}")

        await asyncio.gather(*(one(number) for number in range(n)))


def services(cluster: Cluster) -> list[Json]:
    """All services as stored."""
    path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{NAMESPACE}/earlyexitservices"
    return list(cluster.api.request("GET", path, params={"resourceVersion": "0"}).json()["items"])


def settled(cluster: Cluster, replicas: int) -> int:
    """Services whose status says that everything is as asked."""
    found = (s.get("status", {}) for s in services(cluster))
    return sum(
        s.get("phase") == "Ready" and s.get("workers", {}).get("acked") == replicas and bool(s.get("settledGeneration"))
        for s in found
    )


def addresses(cluster: Cluster) -> dict[ServiceKey, list[WorkerEndpoint]]:
    """Where the workers of every service answer."""
    from offramp_operator.kube.kinds import SERVICE_LABEL
    from offramp_operator.kube.pods import endpoint

    found: dict[ServiceKey, list[WorkerEndpoint]] = {}
    pods = cluster.api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", params={"resourceVersion": "0"}).json()[
        "items"
    ]
    for pod in pods:
        key = ServiceKey(NAMESPACE, pod["metadata"]["labels"][SERVICE_LABEL])
        found.setdefault(key, []).append(endpoint(pod, current=True))
    return found


async def replay(workers: dict[ServiceKey, list[WorkerEndpoint]], rhythm: Sequence[int]) -> float:
    """Processor seconds that this process needs for pulls on which nothing is new: so many of one worker in each slot
    of ``SLOT_SECONDS``."""
    observer = Observer()
    services = itertools.cycle(workers.items())
    try:
        for key, own in workers.items():
            await observer.poll(key, own, token="any")
        await asyncio.sleep(KEEP_ALIVE_SECONDS)
        began, at = time.process_time(), time.monotonic()
        owed = 0
        async with asyncio.TaskGroup() as looks:
            for pulls in rhythm:
                owed += pulls
                while owed > 0:
                    key, own = next(services)
                    looks.create_task(observer.poll(key, own, token="any"))
                    owed -= len(own)
                at += SLOT_SECONDS
                await asyncio.sleep(max(0.0, at - time.monotonic()))
        return time.process_time() - began
    finally:
        await observer.close()


def measure(
    n: int, *, replicas: int, seconds: float, rest: float, console: Console, folder: Path = Path("build/fleet")
) -> Json:
    """Everything; returns what goes into the JSON file."""
    with cluster_in(folder) as cluster, ExitStack() as stack:
        free_port = load_starter().free_port
        world = World(cluster)
        stack.callback(world.stop)
        asyncio.run(create(cluster, n, replicas=replicas))
        console.print(f"{n} services created")
        cold = _cold_start(cluster, world, folder, n, replicas=replicas, port=free_port(), console=console, stack=stack)
        console.print(f"cold start: {json.dumps(cold)}")
        writes = cluster.writes()
        operator = OperatorProcess(cluster, folder, name="restarted", port=free_port())
        stack.callback(operator.stop)
        listed = operator.wait_for("listed", RESTART_SECONDS)
        caught_up = operator.wait_for("caught-up", RESTART_SECONDS)
        restart = {
            "seconds": caught_up["seconds"],
            "listed_seconds": listed["seconds"],
            "cpu_seconds": operator.cpu(),
            "writes": cluster.writes() - writes,
            "memory": operator.memory(),
        }
        console.print(f"restart: {json.dumps(restart)}")
        time.sleep(rest)
        rhythm, steady = _steady(cluster, world, operator, seconds=seconds)
        events = operator.events()
        operator.stop()
        steady |= _beyond_pulls(steady["cpu_share"], uvloop.run(replay(addresses(cluster), rhythm)), rhythm)
        console.print(f"steady: {json.dumps(steady)}")
    return {
        "services": n,
        "workers": n * replicas,
        "cold": cold,
        "restart": restart,
        "steady": steady,
        "events": events,
        "load_average": os.getloadavg()[0],
    }


def _cold_start(
    cluster: Cluster,
    world: World,
    folder: Path,
    n: int,
    *,
    replicas: int,
    port: int,
    console: Console,
    stack: ExitStack,
) -> Json:
    """From nothing but services to all of them settled."""
    began, writes, cpu, starts = time.monotonic(), cluster.writes(), 0.0, 0
    operator: OperatorProcess | None = None
    done = 0
    while done < n:
        if (
            operator is None or operator.process.poll() is not None
        ):  # it ends when a starved machine lets it lose its Lease
            operator, starts = OperatorProcess(cluster, folder, name=f"cold-{starts}", port=port), starts + 1
            stack.callback(operator.stop)
        if time.monotonic() - began > COLD_SECONDS:
            raise SystemExit(f"{done} of {n} services are settled; see {folder}/cold-*.log")
        time.sleep(5.0)
        done = settled(cluster, replicas)
        console.print(f"{done} of {n} settled after {time.monotonic() - began:.0f} s")
    assert operator is not None
    seconds, cpu = time.monotonic() - began, operator.cpu()
    world.ask("rest")
    operator.stop()
    return {"seconds": seconds, "cpu_seconds": cpu, "writes": cluster.writes() - writes, "starts": starts}


def _steady(cluster: Cluster, world: World, operator: OperatorProcess, *, seconds: float) -> tuple[list[int], Json]:
    """A stretch in which nothing happens: the pulls in each slot of it, and its figures."""
    passes = _passes(operator)  # before the stretch: making the figures for a scrape takes the operator a while
    pulls, writes, cpu = world.ask()["requests"], cluster.writes(), operator.cpu()
    began, seen, rhythm = time.monotonic(), pulls, []
    for slot in range(1, round(seconds / SLOT_SECONDS) + 1):
        time.sleep(max(0.0, began + slot * SLOT_SECONDS - time.monotonic()))
        now = world.ask()["requests"]
        rhythm.append(now - seen)
        seen = now
    passed, spent = time.monotonic() - began, operator.cpu() - cpu
    return rhythm, {
        "seconds": passed,
        "writes": cluster.writes() - writes,
        "cpu_share": spent / passed,
        "passes": _passes(operator) - passes,
        "pulls": seen - pulls,
        "memory": operator.memory(),
    }


def _beyond_pulls(cpu_share: float, pulls_cpu: float, rhythm: Sequence[int]) -> Json:
    pulls_share = pulls_cpu / (len(rhythm) * SLOT_SECONDS)
    return {
        "pulls_share": pulls_share,
        "pull_cpu_seconds": pulls_cpu / max(1, sum(rhythm)),
        "beyond_pulls_share": cpu_share - pulls_share,
    }


def _passes(operator: OperatorProcess) -> float:
    return operator.metric("earlyexit_operator_reconcile_total")


def verdict(result: Json) -> dict[str, bool]:
    """What was asked, and whether it held."""
    return {
        "restart to all services reconciled": result["restart"]["seconds"] < RESTART_GOAL_SECONDS,
        "no writes by a restart": result["restart"]["writes"] == 0,
        "no writes in steady state": result["steady"]["writes"] == 0,
        "processor beyond the pulls": result["steady"]["beyond_pulls_share"] < SHARE_GOAL,
        "memory": result["steady"]["memory"]["now"] < MEMORY_GOAL,
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when something asked did not hold."""
    parser = argparse.ArgumentParser(prog="bench.fleet", description="one operator and thousands of services")
    parser.add_argument("--services", type=int, default=SERVICES)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of steady state")
    parser.add_argument(
        "--rest", type=float, default=REST_SECONDS, help="seconds between the restart and the steady state"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench/fleet.json"))
    options = parser.parse_args(arguments)
    console = Console(width=200)
    result = measure(
        options.services, replicas=options.replicas, seconds=options.seconds, rest=options.rest, console=console
    )
    return concluded(result, verdict(result), out=options.out, console=console)


if __name__ == "__main__":
    sys.exit(main())
