"""``traffic.py URL RATE [ROWS.npy]``: open-loop requests (Poisson arrivals) to the tiny model until SIGTERM, then a summary as JSON.

A connection that is refused or does not come about is tried again, as any client of a Kubernetes Service does: an ending pod may be chosen
for a moment after it is gone. What has been sent is never sent again: if no answer comes, that is a failure, with the time it was sent.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from identity_bundle import MODEL, inputs

ANSWER_SECONDS, CONNECT_ATTEMPTS = 45.0, 40


def body(row: np.ndarray) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", "parameters": {"binary_data_size": row.nbytes}}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + row.tobytes(), {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }


class Clients:
    def __init__(self, url: str) -> None:
        self.url = f"{url}/v2/models/{MODEL}/infer"
        self.sent = self.answered = self.reconnected = 0
        self.failures: list[dict[str, Any]] = []

    async def ask(self, session: aiohttp.ClientSession, content: bytes, headers: dict[str, str]) -> None:
        at, self.sent = time.time(), self.sent + 1
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                async with session.post(self.url, data=content, headers=headers) as reply:
                    text = await reply.read()
                    if reply.status == 200:
                        self.answered += 1
                    else:
                        self.failures.append({"at": at, "what": f"{reply.status} {text[:200]!r}"})
                    return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:  # nothing was sent
                self.reconnected += 1
                if attempt == CONNECT_ATTEMPTS - 1:
                    self.failures.append({"at": at, "what": repr(error)})
                await asyncio.sleep(0.1)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append({"at": at, "what": repr(error)})
                return


async def main(url: str, rate: float, rows: np.ndarray) -> None:
    bodies = [body(row) for row in rows]
    rng, clients, stop = np.random.default_rng(1), Clients(url), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=3.0)
    connector = aiohttp.TCPConnector(force_close=True, limit=0, ttl_dns_cache=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not stop.is_set():
            due += float(rng.exponential(1 / rate))
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            content, headers = bodies[int(rng.integers(len(bodies)))]
            task = asyncio.create_task(clients.ask(session, content, headers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)
    said = {name: getattr(clients, name) for name in ("sent", "answered", "reconnected", "failures")}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), np.load(sys.argv[3]) if len(sys.argv) > 3 else inputs(64)))
