"""``proxy.py KUBECONFIG CHANNELS``: what stands between operators and the rest of the cluster, and can break.

Each channel has one port for the API server and one forward proxy for the workers' admin ports; both are printed as one
line of JSON. Lines of JSON on stdin (``{"channel": 0, "faults": ["away"]}``) say what is broken from now on; a line
without ``faults`` changes nothing. Each is answered by one line: how often each fault has struck so far in that
channel.

- ``away``: the API server takes connections and never answers; streams that are open fall silent.
- ``stalled-watch``: watches stay open and say nothing any more; everything else works.
- ``conflict``, ``gone``, ``throttled``: many writes are answered 409, watches end in 410, many requests are
  answered 429.
- ``lost-answers``: some writes are carried out, and the connection breaks before the answer.
- ``pokes-lost``: what is posted to workers never arrives. Told for each address as well (``pokes-lost 10.1.2.3``).
- ``held Promoting``: whatever would end that phase of a rollout waits, and is forgotten when the operator dies
  meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import ssl
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

HOP_BY_HOP = {
    "host",
    "connection",
    "transfer-encoding",
    "content-length",
    "keep-alive",
    "proxy-connection",
    "authorization",
}
WRITES = {"POST", "PUT", "PATCH", "DELETE"}
STORM = 0.4  # share of the requests that a storm hits
HELD = "held "


class Channel:
    """One operator's view of the cluster."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession, phases: dict[str, str], seed: int) -> None:
        self.upstream, self.session = upstream, session
        self.phases = phases  # of rollouts, as any operator wrote them last
        self.faults: set[str] = set()
        self.struck: Counter[str] = Counter()
        self.changed = asyncio.Event()
        self.dice = random.Random(seed)

    def set_faults(self, faults: list[str]) -> None:
        self.faults = set(faults)
        self.changed.set()
        self.changed = asyncio.Event()

    async def while_broken(self, fault: str) -> None:
        while fault in self.faults:
            await self.changed.wait()

    # --- the API server ----------------------------------------------------------------------------

    async def api(self, request: web.BaseRequest) -> web.StreamResponse:
        if "away" in self.faults:
            self.struck["away"] += 1
            await self.while_broken("away")
            return hung_up(request)
        watch = request.query.get("watch") in ("true", "1")
        refusal = self.storm(request, watch=watch)
        if refusal is not None:
            return refusal
        body = await request.read()
        phase = phase_written(request, body)
        if phase and not await self.may_end(request, phase):
            return hung_up(request)
        url = URL(self.upstream + str(request.rel_url), encoded=True)
        async with self.session.request(
            request.method, url, headers=kept(request.headers), data=body or None
        ) as answer:
            if phase and answer.ok:
                self.phases[request.path] = phase
            if request.method in WRITES and "lost-answers" in self.faults and self.dice.random() < STORM / 2:
                self.struck["lost-answers"] += 1
                return hung_up(request)
            response = web.StreamResponse(status=answer.status, headers=kept(answer.headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self.while_broken("away")
                if watch and "stalled-watch" in self.faults:
                    self.struck["stalled-watch"] += 1
                    await asyncio.Event().wait()  # this stream has died silently, for good
                await response.write(chunk)
                if watch and "gone" in self.faults and chunk.endswith(b"\n"):
                    self.struck["gone"] += 1
                    await response.write(
                        json.dumps({"type": "ERROR", "object": status(410, "Expired")}).encode() + b"\n"
                    )
                    break
            await response.write_eof()
            return response

    def storm(self, request: web.BaseRequest, *, watch: bool) -> web.Response | None:

        def hit() -> bool:
            return (
                self.dice.random() < STORM
            )  # for each kind by itself: with one throw for all, only the first kind would ever strike

        if "throttled" in self.faults and hit():
            self.struck["throttled"] += 1
            return web.json_response(status(429, "TooManyRequests"), status=429, headers={"Retry-After": "1"})
        if "gone" in self.faults and watch and hit():
            self.struck["gone"] += 1
            return web.json_response(status(410, "Expired"), status=410)
        if "conflict" in self.faults and request.method in WRITES and hit():
            self.struck["conflict"] += 1
            return web.json_response(status(409, "Conflict"), status=409)
        return None

    async def may_end(self, request: web.BaseRequest, phase: str) -> bool:
        """Wait while the rollout's present phase is held; whether the one who wants to end it still lives."""
        hold = HELD + self.phases.get(request.path, "")
        if hold == HELD + phase or hold not in self.faults:
            return True
        self.struck[hold] += 1
        await self.while_broken(hold)
        return request.transport is not None and not request.transport.is_closing()

    # --- workers -----------------------------------------------------------------------------------

    async def worker(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST" and "pokes-lost" in self.faults:
            self.struck["pokes-lost"] += 1
            self.struck[f"pokes-lost {request.url.host}"] += 1
            return hung_up(request)
        headers = {**kept(request.headers), "Authorization": request.headers.get("Authorization", "")}
        try:
            async with self.session.request(
                request.method, request.url, headers=headers, data=await request.read() or None
            ) as answer:
                return web.Response(body=await answer.read(), status=answer.status, headers=kept(answer.headers))
        except aiohttp.ClientError:
            return web.Response(status=502)


def hung_up(request: web.BaseRequest) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def phase_written(request: web.BaseRequest, body: bytes) -> str:
    """The phase that a rollout has after this request; empty for every other request."""
    if request.method not in WRITES or "/ramprollouts/" not in request.path or not request.path.endswith("/status"):
        return ""
    return str(json.loads(body).get("status", {}).get("phase", ""))


def kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def status(code: int, reason: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": "a storm",
    }


def credentials(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Address of the API server, and the administrator's client certificate."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    context = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(
            base64.b64decode(user["client-certificate-data"]) + b"\n" + base64.b64decode(user["client-key-data"])
        )
        file.flush()
        context.load_cert_chain(file.name)
    return cluster["server"], context


async def listen(handler: Any) -> int:
    runner = web.ServerRunner(web.Server(handler, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return int(runner.addresses[0][1])


async def main(kubeconfig: Path, n_channels: int) -> None:
    server, context = credentials(kubeconfig)
    connector = aiohttp.TCPConnector(ssl=context, limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        skip_auto_headers=("Content-Type", "User-Agent"),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        phases: dict[str, str] = {}
        channels = [Channel(server, session, phases, seed) for seed in range(n_channels)]
        ports = [{"api": await listen(c.api), "workers": await listen(c.worker)} for c in channels]
        print(json.dumps(ports), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told = json.loads(line)
            channel = channels[told["channel"]]
            if "faults" in told:
                channel.set_faults(told["faults"])
            print(json.dumps(channel.struck), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
