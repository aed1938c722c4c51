"""``traffic.py URL RATE [ROWS.npy]``: open-loop requests (Poisson arrivals) to the tiny model until SIGTERM, then a
summary as JSON.

A connection that is refused or does not come about is tried again, as any client of a Kubernetes Service does: an
ending pod may be chosen for a moment after it is gone. What has been sent is never sent again: if no answer comes, that
is a failure. It is told with the times when it was sent and when it failed, with what became of it (``refused``: never
sent; ``broken``: the connection; ``late``: no answer in time; ``answered``: by another status than 200), and with the
address of the pod that the Service had chosen, as the kernel translated it. What could not be sent until SIGTERM has
not failed: it is ``withdrawn``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import socket
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from identity_bundle import MODEL, inputs

ANSWER_SECONDS, CONNECT_ATTEMPTS = 45.0, 40
LOOKS = 5
CONNECTIONS = Path("/proc/net/nf_conntrack")
connection: ContextVar[list[str]] = ContextVar("connection")  # the last one that a request had, as the kernel writes it


def body(row: np.ndarray, source: int) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", "parameters": {"binary_data_size": row.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"stream": f"client-{source}"}}).encode()
    return head + row.tobytes(), {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }


def numbered(address: Any) -> socket.socket:
    """A socket whose connection the request can name, also when it is gone."""
    made = socket.socket(*address[:3])
    made.setblocking(False)
    made.bind(("", 0))
    service, port = address[4][:2]
    connection.get()[:] = [f" dst={service} sport={made.getsockname()[1]} dport={port} "]
    return made


def pod_behind(line: str) -> str | None:
    """Whom the Service had chosen for a connection; None where the kernel does not tell.

    The kernel gives its table in pieces, and what other connections add or take between two of them can hide a line:
    one look is not enough.
    """
    with contextlib.suppress(OSError):
        for _ in range(LOOKS):
            if found := re.search(rf"{re.escape(line)}.*?src=(\S+)", CONNECTIONS.read_text()):
                return found.group(1)
        return ""
    return None


class Clients:
    def __init__(self, url: str, stop: asyncio.Event) -> None:
        self.url, self.stop = f"{url}/v2/models/{MODEL}/infer", stop
        self.sent = self.answered = self.reconnected = self.withdrawn = 0
        self.began: float | None = None  # when the first was sent
        self.eased = 0  # answered under overload
        self.eased_at: float | None = None  # the first of them
        self.failures: list[dict[str, Any]] = []

    async def ask(self, session: aiohttp.ClientSession, content: bytes, headers: dict[str, str]) -> None:
        connection.set(["not connected"])
        at, self.sent = time.time(), self.sent + 1
        self.began = self.began or at
        for _ in range(CONNECT_ATTEMPTS):
            try:
                async with session.post(self.url, data=content, headers=headers) as reply:
                    text = await reply.read()
                    if reply.status == 200:
                        self.answered += 1
                        if b'"overload":true' in text:
                            self.eased += 1
                            self.eased_at = self.eased_at or time.time()
                    else:
                        self.failed(at, "answered", f"{reply.status} {text[:200]!r}")
                    return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:  # nothing was sent
                if self.stop.is_set():
                    self.withdrawn += 1
                    return
                self.reconnected += 1
                refusal = repr(error)
                await asyncio.sleep(0.1)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed(at, "late" if isinstance(error, TimeoutError) else "broken", repr(error))
                return
        self.failed(at, "refused", refusal)

    def failed(self, at: float, how: str, what: str) -> None:
        pod = pod_behind(connection.get()[0])
        self.failures.append({"at": at, "ended": time.time(), "how": how, "what": what, "pod": pod})


async def main(url: str, rate: float, rows: np.ndarray) -> None:
    stop = asyncio.Event()
    rng, clients, source = np.random.default_rng(1), Clients(url, stop), itertools.count()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready to be told to stop", flush=True)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=3.0)
    connector = aiohttp.TCPConnector(force_close=True, limit=0, ttl_dns_cache=300, socket_factory=numbered)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not stop.is_set():
            due += float(rng.exponential(1 / rate))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            content, headers = body(rows[int(rng.integers(len(rows)))], next(source) % 8)
            task = asyncio.create_task(clients.ask(session, content, headers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)
    said = {
        name: getattr(clients, name)
        for name in ("sent", "answered", "reconnected", "withdrawn", "failures", "began", "eased", "eased_at")
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), np.load(sys.argv[3]) if len(sys.argv) > 3 else inputs(64)))
