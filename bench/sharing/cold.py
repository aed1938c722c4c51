"""A service that is not in memory: what its first request waits for, and whether ``Retry-After`` was kept.

One worker has memory for a part of the services. Clients draw services by popularity, one request after the other; each
that finds its model away either waits for it, or is refused with ``Retry-After`` and asks once more after that time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from bench.sharing.services import Service, shared_worker, zipf
from bench.validate_simulator import LoopbackWorker

ROOM = 0.4
CLIENTS = 3
WAITED, PROMISES = 60, 100
GIVE_UP_SECONDS = 900.0
BYTES = re.compile(r"^earlyexit_model_bytes\{[^}]*\} (\S+)", re.MULTILINE)
LOADS = re.compile(r'^earlyexit_model_(loads|load_seconds)_total\{model="([^"]+)"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: how long it took, its status, and the seconds after which it was to be sent again."""

    seconds: float
    status: int
    retry_after: float


def measured(of: Sequence[Service], *, console: Console, waits: int = WAITED, promises: int = PROMISES) -> Any:
    """Plain numbers: of ``waits`` requests that wait, and ``promises`` that come back."""
    with shared_worker(of) as worker:
        sizes = [float(size) for size in BYTES.findall(httpx.get(f"{worker.url}/metrics").text)]
    room = int(max(ROOM * sum(sizes), 1.5 * max(sizes)))
    with _worker(of, room, wait=10.0) as worker:
        steps = _waited(worker, of, waits)
    with _worker(of, room, wait=0.01) as worker:
        kept = _promised(worker, of, promises)
    console.print(f"Retry-After: {kept['kept']} of {kept['promises']} kept")
    return {"room": room / sum(sizes), **steps, **kept}


def _worker(of: Sequence[Service], room: int, *, wait: float) -> LoopbackWorker:
    return shared_worker(of, settings={"OFFRAMP_LOAD_WAIT_SECONDS": str(wait)}, room=room)


def _ask(client: httpx.Client, service: Service) -> Asked:
    body = service.requests[0]
    head, _, content = body.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if not line.startswith(("Host", "Content-Length")))
    began = time.perf_counter()
    reply = client.post(lines[0].split(" ")[1], content=content, headers=headers)
    return Asked(time.perf_counter() - began, reply.status_code, float(reply.headers.get("retry-after", 0)))


def _waited(worker: LoopbackWorker, of: Sequence[Service], n: int) -> dict[str, Any]:
    """One client: seconds of cold requests, and of them the load; what is left is what had to leave, and the answer."""
    rng, shares = np.random.default_rng(0), zipf(len(of))
    total, load = [], []
    end = time.monotonic() + GIVE_UP_SECONDS
    with httpx.Client(base_url=worker.url, timeout=60) as client:
        while len(total) < n:
            _give_up(end)
            service = of[rng.choice(len(of), p=shares)]
            before = _loads(client, service.name)
            asked = _ask(client, service)
            after = _loads(client, service.name)
            if asked.status == 200 and after[0] > before[0]:
                total.append(asked.seconds)
                load.append(after[1] - before[1])
        warm = [_ask(client, service).seconds for service in of[:1] for _ in range(50)][10:]
    return {
        "cold_seconds": _median_and_p95(total),
        "load_seconds": _median_and_p95(load),
        "leave_seconds": _median_and_p95([max(0.0, t - b) for t, b in zip(total, load, strict=True)]),
        "warm_seconds": _median_and_p95(warm),
    }


def _give_up(end: float) -> None:
    if time.monotonic() > end:
        raise SystemExit("hardly any request found its model away; the services are too small for the memory")


def _loads(client: httpx.Client, name: str) -> tuple[float, float]:
    found = {kind: float(value) for kind, model, value in LOADS.findall(client.get("/metrics").text) if model == name}
    return found["loads"], found["load_seconds"]


def _promised(worker: LoopbackWorker, of: Sequence[Service], n: int) -> dict[str, Any]:
    """Several clients at once: of those that were refused and came back in time, who was answered then."""
    results: list[bool] = []
    end = time.monotonic() + GIVE_UP_SECONDS
    promised: list[float] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        rng, shares = np.random.default_rng(seed), zipf(len(of))
        with httpx.Client(base_url=worker.url, timeout=60) as client:
            while len(results) < n:
                _give_up(end)
                service = of[rng.choice(len(of), p=shares)]
                first = _ask(client, service)
                if first.status == 200:
                    time.sleep(0.02)
                    continue
                time.sleep(first.retry_after)
                again = _ask(client, service)
                with lock:
                    results.append(again.status == 200)
                    promised.append(first.retry_after)

    _all_at_once(client)
    return {"promises": len(results), "kept": sum(results), "promised_seconds": _median_and_p95(promised)}


def _all_at_once(client: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        for each in [pool.submit(client, seed) for seed in range(CLIENTS)]:
            each.result()


def _median_and_p95(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(seconds)), "p95": float(np.percentile(seconds, 95))}
