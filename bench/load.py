"""An open-loop load client for Open Inference Protocol servers.

Requests leave at times drawn beforehand (Poisson), whatever the server does, and latency counts from the
*intended* send time, so a stalled server cannot hide by slowing its client down (coordinated omission). Every
answer is compared with the reference answer of its input.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

DEADLINE_SECONDS = 10.0
CLIENTS = 8  # that name themselves and ask in turn, each for any of the images


@dataclass(frozen=True, slots=True)
class Reply:
    """One request as the client saw it. ``arm`` and ``exit`` are what the server says about itself."""

    sent_at: float
    seconds: float
    ok: bool
    agrees: bool
    exit: str = ""
    arm: str = ""
    config: str = ""
    error: str = ""


@dataclass
class Traffic:
    """The pool inputs are drawn from, with replacement, and the reference answers. Swapped when the inputs drift."""

    x: npt.NDArray[np.float32]
    reference: npt.NDArray[np.int64]


@dataclass
class OpenLoop:
    """Send ``rate`` requests a second to the ``urls`` in turn until stopped; replies collect in ``replies``."""

    urls: Sequence[str]
    model: str
    traffic: Traffic
    rate: float
    seed: int = 0
    input_name: str = "x"
    on_reply: Callable[[Reply], None] | None = None
    #: After which new connections are made, as by new clients: a Service of Kubernetes shares connections.
    connection_seconds: float = math.inf
    replies: list[Reply] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def capacity(self, *, seconds: float = 3.0, connections: int = 8) -> float:
        """Requests a second that come back when ``connections`` clients each wait for their answer; none is kept in
        ``replies``."""
        trial = replace(self, replies=[], on_reply=None)
        rng = np.random.default_rng(self.seed)
        end = time.perf_counter() + seconds

        async def client(session: aiohttp.ClientSession, url: str) -> None:
            while (now := time.perf_counter()) < end:
                await trial._one(session, url, int(rng.integers(len(self.traffic.x))), now, client=0)

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS)) as session:
            await asyncio.gather(*(client(session, self.urls[i % len(self.urls)]) for i in range(connections)))
        return sum(reply.ok for reply in trial.replies) / seconds

    def stop(self) -> None:
        """No more requests; those in flight are still answered."""
        self._stop.set()

    async def run(self) -> None:
        """Generate load until :meth:`stop`, then wait for what is in flight."""
        rng, due = np.random.default_rng(self.seed), time.perf_counter()
        n, ending = 0, set[asyncio.Task[None]]()
        while not self._stop.is_set():
            session, pending = self._session(), set[asyncio.Task[None]]()
            until = time.perf_counter() + self.connection_seconds
            while not self._stop.is_set() and time.perf_counter() < until:
                due += float(rng.exponential(1 / self.rate))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                url, row = self.urls[n % len(self.urls)], int(rng.integers(len(self.traffic.x)))
                task = asyncio.create_task(self._one(session, url, row, due, client=n % CLIENTS))
                pending.add(task)
                task.add_done_callback(pending.discard)
                n += 1
            end = asyncio.create_task(_end(session, pending))
            ending.add(end)
            end.add_done_callback(ending.discard)
        await asyncio.gather(*ending)

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS), connector=connector)

    async def _one(self, session: aiohttp.ClientSession, url: str, row: int, due: float, *, client: int) -> None:
        traffic = self.traffic
        body, header = encode(traffic.x[row : row + 1], self.input_name, stream=f"client-{client}")
        headers = {"Inference-Header-Content-Length": str(header), "Content-Type": "application/octet-stream"}
        try:
            async with session.post(f"{url}/v2/models/{self.model}/infer", data=body, headers=headers) as response:
                raw = await response.read()
                reply = self._judge(response.status, raw, int(traffic.reference[row]), due)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reply = Reply(due, time.perf_counter() - due, ok=False, agrees=False, error=repr(error))
        self.replies.append(reply)
        if self.on_reply is not None:
            self.on_reply(reply)

    def _judge(self, status: int, raw: bytes, reference: int, due: float) -> Reply:
        seconds = time.perf_counter() - due
        if status != 200:
            return Reply(due, seconds, ok=False, agrees=False, error=f"HTTP {status}: {raw[:200]!r}")
        answer = json.loads(raw)
        label = next(o for o in answer["outputs"] if o["name"] == "label")["data"][0]
        said = answer.get("parameters", {})
        return Reply(
            due,
            seconds,
            ok=True,
            agrees=label == reference,
            exit=str(said.get("exit", "")),
            arm=str(said.get("arm", "")),
            config=str(said.get("config", "")),
        )


async def _end(session: aiohttp.ClientSession, pending: Collection[asyncio.Task[None]]) -> None:
    """Close the connections once all is answered."""
    await asyncio.gather(*pending)
    await session.close()


def encode(x: npt.NDArray[Any], input_name: str, *, stream: str = "") -> tuple[bytes, int]:
    """An OIP v2 body with one binary input (token ids, or float32) and JSON outputs: (body, length of its JSON
    header)."""
    tokens = x.dtype == np.int64
    tensor = np.ascontiguousarray(x, dtype=np.int64 if tokens else np.float32).tobytes()
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": input_name,
                    "shape": list(x.shape),
                    "datatype": "INT64" if tokens else "FP32",
                    "parameters": {"binary_data_size": len(tensor)},
                }
            ],
            "outputs": [{"name": "label", "parameters": {"binary_data": False}}],
            **({"parameters": {"stream": stream}} if stream else {}),
        }
    ).encode()
    return header + tensor, len(header)


def window(replies: Sequence[Reply], start: float, end: float) -> list[Reply]:
    """The replies whose requests were due between two times (``time.perf_counter`` seconds)."""
    return [r for r in replies if start <= r.sent_at < end]


def percentile_ms(replies: Sequence[Reply], q: float) -> float:
    """Latency percentile in milliseconds over answered requests."""
    return float(np.percentile([r.seconds for r in replies if r.ok], q)) * 1e3
