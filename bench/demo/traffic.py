"""Steady traffic for trying things out: ``python -m bench.demo.traffic --data traffic.npz --url http://127.0.0.1:8080
--model digits``.

The file has ``x``, and ``reference``: what the untouched model answers. Requests leave at random times, whatever the
server does; a line every few seconds tells how they fared. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from bench.load import OpenLoop, Reply, Traffic, percentile_ms

LINE_SECONDS = 5.0


def line(replies: Sequence[Reply], *, seconds: float) -> str:
    """What a stretch of replies says, in one line."""
    ok = [reply for reply in replies if reply.ok]
    if not ok:
        return f"{len(replies)} requests, none answered" + (f": {replies[-1].error}" if replies else "")
    early, agree = (sum(reply.exit != "final" for reply in ok) / len(ok), sum(reply.agrees for reply in ok) / len(ok))
    text = (
        f"{len(ok) / seconds:.0f} a second, p50 {percentile_ms(ok, 50):.1f} ms, p95 {percentile_ms(ok, 95):.1f} "
        f"ms, {early:.0%} leave early, {agree:.1%} agree"
    )
    return text + (f", {len(replies) - len(ok)} failed" if len(ok) < len(replies) else "")


async def input_name(url: str, model: str, *, patience_seconds: float = 60.0) -> str:
    """The model's one input, as its metadata names it; waits for a server that is only starting."""
    deadline = time.monotonic() + patience_seconds
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/v2/models/{model}") as response:
                    if response.status == 200:
                        return str((await response.json())["inputs"][0]["name"])
            if time.monotonic() > deadline:
                raise SystemExit(f"{url}/v2/models/{model} does not answer; is the service ready?")
            await asyncio.sleep(0.5)


async def run(options: argparse.Namespace) -> None:
    with np.load(options.data) as data:
        traffic = Traffic(data["x"], data["reference"])
    load = OpenLoop(
        [options.url], options.model, traffic, options.rate, input_name=await input_name(options.url, options.model)
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, load.stop)
    if options.seconds:
        asyncio.get_running_loop().call_later(options.seconds, load.stop)
    sending, told = asyncio.create_task(load.run()), time.perf_counter()
    while not sending.done():
        await asyncio.wait([sending], timeout=LINE_SECONDS)
        now = time.perf_counter()
        if load.replies or not sending.done():  # it may be told to end just after a line
            print(line(load.replies, seconds=now - told), flush=True)
        load.replies, told = [], now
    await sending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="npz with x and reference")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="the model's name")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=0.0, help="end by itself; 0 (default) goes on until Ctrl-C")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
