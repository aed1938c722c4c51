"""``make demo-fleet``: a day of Twitter's trace in five minutes, on two pools of a real Kubernetes whose workers have
unequal CPU limits.

The service is ResNet-56 on CIFAR-10 where OFFRAMP_DATA has it, else the digits. The operator decides how many workers
each pool has, and counts on what the certified plan saves (``poolPlan.noExitFloor: None``). Measured: every reply, the
workers that there were, and the audits. Computed: what the same planner would have had to pay for the largest variant
alone, from the same ten-second counts and the same measured rates. A promise that is not kept makes the exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.client import ApiException
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from urllib3.exceptions import HTTPError

from bench.arrivals import MissingTraceError, twitter_counts
from bench.demo.cluster import BUILD as BUNDLES
from bench.demo.cluster import GROUP, NAMESPACE, VERSION, ClusterStage, enter, image_of, kubectl
from bench.demo.fleet_day import (
    WINDOW_SECONDS,
    Day,
    Floats,
    Sample,
    as_json,
    broken,
    closing_table,
    day_shape,
    draw,
    largest_only,
    price,
    rate_at,
    summary_of,
    windows_of,
)
from bench.demo.pools import prepare_cluster_pool
from bench.demo.story import Json, StoryError, ended
from bench.load import OpenLoop, percentile_ms, window
from offramp_core.control.codec import from_json
from offramp_core.control.objects import PoolStatus
from offramp_core.control.spec import parse_spec

BUILD = Path("build/demo-fleet")
DAY_SECONDS, TRACE_DAY = 300.0, 12
SAMPLE_SECONDS, TOLD_HOURS = 2.0, 2.0
PATIENCE_SECONDS = 480.0
CONNECTION_SECONDS = 3.0  # fewer than an ending worker still answers
BEFORE = 0.25  # of what a small worker answers with exits off: while every request is audited, for the first plan
NIGHT = 0.65  # of what one small worker answers with its plan: asked in the quietest hour
BUDGET = 0.02
POOLS = {"small": ("0.04", "300m", 3), "large": ("0.09", "750m", 2)}  # cost an hour, limit, most workers
PRICES = {name: float(cost) for name, (cost, _, _) in POOLS.items()}


def manifest_of(image: str) -> Json:
    """What a user would write, with a canary sized for a demo's patience."""
    memory = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "EarlyExitService",
        "metadata": {"name": "demo", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": f"oci://{image}"},
            "objective": {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": f"{BUDGET}"}},
            "ramps": {"maxOverhead": "0.1"},
            "rollout": {"steps": [{"weight": 100}]},
            "poolPlan": {"noExitFloor": "None"},
            "pools": [
                {
                    "name": name,
                    "costPerHour": cost,
                    "maxWorkers": most,
                    "resources": {**memory, "limits": {**memory["limits"], "cpu": limit}},
                }
                for name, (cost, limit, most) in POOLS.items()
            ],
            "worker": {"imagePullPolicy": "Never", "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
        },
    }


@dataclass
class Watcher:
    """Looks at the service, its pods and their audits, again and again."""

    stage: ClusterStage
    console: Console
    began: float = field(default_factory=time.perf_counter)
    status: Json = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    audits: dict[str, tuple[int, int]] = field(default_factory=dict)  # by pod, those that are gone included

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.perf_counter() - self.began:6.1f} s[/]  {text}", highlight=False)

    async def watch(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SAMPLE_SECONDS)) as session:
            while True:
                with contextlib.suppress(ApiException, HTTPError):  # a busy API server: the next look tells
                    await self._look(session)
                await asyncio.sleep(SAMPLE_SECONDS)

    async def _look(self, session: aiohttp.ClientSession) -> None:
        self.status = (await self.stage.service()).get("status", {})
        pods = await self.stage.pods()
        for pod in pods:
            if pod.status.pod_ip:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it starts, or has gone
                    await self._read_audits(session, pod)
        n, k = (sum(part) for part in zip((0, 0), *self.audits.values(), strict=True))
        plan = self.status.get("poolPlan", {})
        workers = dict(Counter(pod.metadata.labels["earlyexit.dev/pool"] for pod in pods))
        sample = Sample(time.perf_counter(), workers, n, k, plan.get("demand", 0.0), plan.get("answered", 0.0))
        if self.samples and self.samples[-1].workers != workers:
            self.say(f"workers: {told(workers)}; {plan.get('demand', 0):g} requests/s asked; {plan.get('reason', '')}")
        self.samples.append(sample)

    async def _read_audits(self, session: aiohttp.ClientSession, pod: Any) -> None:
        async with session.get(f"http://{pod.status.pod_ip}:8080/metrics") as response:
            page = await response.text()
        found = Counter[str]()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name] += int(sample.value) if sample.name.endswith("_total") else 0
        audited, disagreed = found["earlyexit_audited_total"], found["earlyexit_disagreements_total"]
        self.audits[pod.metadata.uid] = (audited, disagreed)

    def pools(self) -> dict[str, PoolStatus]:
        return {one["name"]: from_json(PoolStatus, one) for one in self.status.get("pools", ())}

    async def until(self, what: str, holds: Any) -> None:
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not holds():
            if time.perf_counter() > deadline:
                raise StoryError(f"waited {PATIENCE_SECONDS:.0f} s for {what}; {json.dumps(self.status)[:3000]}")
            await asyncio.sleep(0.5)

    # --- turns ---------------------------------------------------------------------------------------

    def measured(self) -> bool:
        return bool(self.pools()) and all(pool.worker_rate and pool.ready for pool in self.pools().values())

    def planned_with_exits(self) -> bool:
        """A certified plan serves and is counted on, and all others than one worker have gone."""
        alone = sum(self.samples[-1].workers.values()) == sum(pool.ready for pool in self.pools().values()) == 1
        return bool(self.status.get("poolPlan", {}).get("saving")) and not self.status.get("rollout") and alone


def told(workers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {workers.get(name, 0)}" for name in POOLS)


async def play(watcher: Watcher, load: OpenLoop, shape: Floats, *, peak: float) -> float:
    """The day; when it began."""
    began, hours_told = time.perf_counter(), -1.0
    while (passed := time.perf_counter() - began) < DAY_SECONDS:
        load.rate = rate_at(shape, passed / DAY_SECONDS, peak=peak)
        hours = 24 * passed / DAY_SECONDS
        if hours >= hours_told + TOLD_HOURS:
            hours_told = hours
            recent = window(load.replies, time.perf_counter() - 5, math.inf)
            pace = f"p95 {percentile_ms(recent, 95):.0f} ms" if any(r.ok for r in recent) else "no answers"
            pace += f", {sum(not r.ok for r in recent)} not answered"
            workers = watcher.samples[-1].workers
            cost = f"{told(workers)}, {price(workers, PRICES):.2f} an hour"
            watcher.say(f"hour {hours:2.0f}: {load.rate:3.0f} requests/s, {pace}; {cost}")
        await asyncio.sleep(0.25)
    return began


async def inside(console: Console, *, digits: bool) -> int:
    pool = prepare_cluster_pool(BUNDLES, console, digits=digits)
    counts = twitter_counts()[TRACE_DAY * 86_400 :]
    manifest = manifest_of(image_of("bundle"))
    stage = ClusterStage(manifest)
    await stage.apply(manifest)
    console.print(yaml.safe_dump(manifest, sort_keys=False))
    watcher = Watcher(stage, console)
    watching = asyncio.create_task(watcher.watch())
    sending = None
    try:
        await watcher.until("both pools to be measured", watcher.measured)
        rates = {name: known.worker_rate for name, known in watcher.pools().items()}
        watcher.say(f"a worker answers, exits off: {', '.join(f'{n} {r:g}/s' for n, r in rates.items())}")
        load = OpenLoop([stage.url], pool.model, pool.clean, BEFORE * rates["small"], 7, pool.input_name)
        load.connection_seconds = CONNECTION_SECONDS
        first = time.perf_counter()
        sending = asyncio.create_task(load.run())
        await watcher.until("a certified plan, and one worker for the night", watcher.planned_with_exits)
        saving, shape = float(watcher.status["poolPlan"]["saving"]), day_shape(counts)
        quietest = NIGHT * watcher.pools()["small"].worker_rate / (1 - saving)
        peak = quietest * float(shape.max() / shape.min())
        watcher.say(
            f"[bold]a certified plan saves {saving:.0%}; the day begins: {quietest:.0f} to {peak:.0f} requests/s[/]"
        )
        began = await play(watcher, load, shape, peak=peak)
    finally:
        if sending is not None:
            load.stop()
            await sending
        watching.cancel()
    known = tuple(watcher.pools().values())
    before = WINDOW_SECONDS * math.floor((began - first) / WINDOW_SECONDS)  # the last minutes are remembered
    sent = [reply.sent_at for reply in load.replies]
    windows = windows_of(sent, began=began - before, seconds=before + DAY_SECONDS)
    planned = largest_only(parse_spec(manifest["spec"]), known, windows)[round(before / WINDOW_SECONDS) :]
    day = Day(
        began=began,
        seconds=DAY_SECONDS,
        budget=BUDGET,
        objective_seconds=0.5,
        prices=PRICES,
        replies=window(load.replies, began, began + DAY_SECONDS),
        samples=[sample for sample in watcher.samples if began <= sample.at < began + DAY_SECONDS],
        planned=planned,
    )
    console.print(kubectl("get", "events", "--namespace", NAMESPACE, "--field-selector", "reason=PoolsPlanned"))
    return report(day, console, title=f"{pool.title}: a day of Twitter on two pools, planned by Offramp")


def report(day: Day, console: Console, *, title: str) -> int:
    """The picture, the figures and the table; 1 where a promise was not kept."""
    BUILD.mkdir(parents=True, exist_ok=True)
    summary = summary_of(day)
    picture = draw(day, BUILD / "day.png", title=title)
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (BUILD / "day.json").write_text(json.dumps(as_json(day)) + "\n")
    console.print(closing_table(summary))
    return ended(broken(summary), console, picture=picture, summary=BUILD / "summary.json")


def main() -> int:
    try:
        twitter_counts()  # what is missing is told before anything is built
    except MissingTraceError as error:
        print(f"demo-fleet: {error}", file=sys.stderr)
        return 1
    return enter("bench.demo.fleet", __doc__, inside)


if __name__ == "__main__":
    sys.exit(main())
