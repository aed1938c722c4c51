"""``make demo-generate``: a model that generates through the whole loop on this machine, with real prompts and
open-loop traffic.

exits off, drafts that pay → a plan of few bits is certified → canary → promoted → content it answers badly → taken back
by evidence. Every reply is a stream, and every stream must end with a reason. The last line names the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.demo.embedded import EmbeddedStage
from bench.demo.story import Json, StoryError
from bench.generate.prepared import prompts_of, smollm2_bundle, stories_bundle
from bench.generate.recorded import recorded_answers

BUILD = Path("build/demo-generate")
PATIENCE_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What one model's telling needs: ``budget`` of ``output``, tokens of an answer, requests a second, ``asked``
    prompts, and how many of them make up the other content."""

    bundle: Callable[[], Path]
    prompts: str
    output: str
    budget: str
    tokens: int
    rate: float
    asked: int
    worst: int


SETTINGS = {
    "stories": Setting(stories_bundle, "stories", "TokenF1", "0.12", 12, 20.0, 400, 40),
    "smollm2": Setting(smollm2_bundle, "gsm8k", "TokenF1", "0.3", 8, 1.5, 160, 16),
}


@dataclass(frozen=True, slots=True)
class Stream:
    """One reply: when it was sent and how long it took to its first and its last token; ``error`` of one that broke."""

    sent: float
    first: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    route: str = ""
    arm: str = ""
    error: str = ""


@dataclass
class Traffic:
    """Open-loop clients: requests leave at random times, whatever the server does."""

    url: str
    model: str
    rate: float
    tokens: int
    prompts: Sequence[str]
    streams: list[Stream] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        draw, open_ = random.Random(7), set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            while not self._stop.is_set():
                task = asyncio.create_task(self._one(session, draw.choice(self.prompts)))
                open_.add(task)
                task.add_done_callback(open_.discard)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), draw.expovariate(self.rate))
            await asyncio.gather(*open_)

    def stop(self) -> None:
        self._stop.set()

    async def _one(self, session: aiohttp.ClientSession, prompt: str) -> None:
        sent, first, pieces, last = time.perf_counter(), 0.0, 0, dict[str, Any]()
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise StoryError(  # noqa: TRY301 - told like a broken stream
                        f"HTTP {reply.status}: {(await reply.text())[:200]}"
                    )
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        last, pieces = json.loads(line[6:]), pieces + 1
                        first = first or time.perf_counter() - sent
            ours, reason = last.get("offramp", {}), (last.get("choices") or [{}])[0].get("finish_reason")
            error = "" if reason else f"ended without a reason after {pieces} pieces"
            self.streams.append(
                Stream(
                    sent, first, time.perf_counter() - sent, pieces, ours.get("route", ""), ours.get("arm", ""), error
                )
            )
        except (aiohttp.ClientError, StoryError, TimeoutError) as error:
            self.streams.append(Stream(sent, error=repr(error)))


class Teller:
    """Waits for the turns of the story and notes when they came."""

    def __init__(self, stage: EmbeddedStage, traffic: Traffic, console: Console) -> None:
        self.stage, self.traffic, self.console = stage, traffic, console
        self.began = time.perf_counter()
        self.marks: list[tuple[float, str]] = []

    def mark(self, text: str) -> None:
        now = time.perf_counter()
        self.marks.append((now, text))
        self.console.print(f"[dim]{now - self.began:6.1f} s[/]  {text}")

    async def until(self, condition: Callable[[], Any], what: str, *, seconds: float = PATIENCE_SECONDS) -> Any:
        end = time.perf_counter() + seconds
        while not (found := await condition()):
            if time.perf_counter() > end:
                raise StoryError(
                    f"{what} did not happen within {seconds:.0f} s; status: "
                    f"{json.dumps((await self.stage.service()).get('status', {}))[:1500]}"
                )
            await asyncio.sleep(0.5)
        return found

    async def phase(self, *phases: str) -> Json | None:
        """The newest rollout, once it is in one of these phases."""
        found = await self.stage.rollouts()
        return found[-1] if found and found[-1].get("status", {}).get("phase") in phases else None

    async def serves_lossy(self) -> bool:
        status = (await self.stage.service()).get("status", {})
        plans = {o["metadata"]["name"]: o["spec"] for o in self.stage._objects("RampConfig")}
        plan = plans.get(status.get("stableConfig", ""), {})
        return bool(plan) and (plan["precision"] != "fp32" or bool(plan["ramps"]))

    def stretch(self, since: float, until: float) -> list[Stream]:
        return [s for s in self.traffic.streams if since <= s.sent < until and not s.error]


async def tell(
    teller: Teller, setting: Setting, manifest: Json, *, calm: Sequence[str], hostile: Sequence[str], measure: float
) -> Json:
    """The story; what it came to."""
    stage, traffic = teller.stage, teller.traffic

    async def ready() -> bool:
        conditions = (await stage.service()).get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    await teller.until(ready, "a ready service")
    teller.mark("ready, exits off: the reference answers, with drafts where they pay")
    sending = asyncio.create_task(traffic.run())
    await asyncio.sleep(measure)
    off = (teller.marks[-1][0], time.perf_counter())
    manifest["spec"]["ramps"]["mode"] = "Auto"
    await stage.apply(manifest)
    teller.mark(f"ramps.mode Auto: budget {setting.budget} of {setting.output}")
    rollout = await teller.until(lambda: teller.phase("Progressing", "Promoting", "Succeeded"), "a canary")
    teller.mark(f"certified; its canary begins: {rollout['metadata']['name']}")
    await teller.until(lambda: teller.phase("Succeeded"), "the promotion")
    teller.mark("promoted")
    await asyncio.sleep(measure)
    on = (teller.marks[-1][0], time.perf_counter())
    traffic.prompts = hostile
    teller.mark("other content: prompts that few bits answer badly")

    async def off_again() -> bool:
        return not await teller.serves_lossy()

    await teller.until(off_again, "the plan's end")
    teller.mark("taken back: audits show more loss than the budget allows")
    traffic.prompts = calm
    await asyncio.sleep(measure / 2)
    traffic.stop()
    await sending
    broken = [s.error for s in traffic.streams if s.error]
    return {
        "streams": len(traffic.streams),
        "broken": len(broken),
        "first_broken": broken[:3],
        "off": _facts(teller.stretch(*off)),
        "on": _facts(teller.stretch(*on)),
        "marks": [(round(at - teller.began, 1), text) for at, text in teller.marks],
    }


def _facts(streams: Sequence[Stream]) -> Json:
    """Median times of a stretch."""

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2] if values else 0.0

    return {
        "streams": len(streams),
        "p50_ms": 1e3 * middle([s.seconds for s in streams]),
        "first_token_p50_ms": 1e3 * middle([s.first for s in streams]),
        "routes": dict(Counter(s.route for s in streams).most_common(4)),
    }


def draw_picture(teller: Teller, *, title: str, path: Path) -> None:
    """Time of an answer and shares of routes over the seconds of the run."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    origin, streams = (
        teller.marks[0][0],
        [s for s in teller.traffic.streams if not s.error and s.sent >= teller.marks[0][0]],
    )
    at = np.array([s.sent - origin for s in streams])
    edges = np.arange(0, at.max(), 3)
    which = np.digitize(at, edges) - 1
    kinds = {
        "reference": lambda s: s.route == "fp32",
        "reference with a draft": lambda s: s.route.startswith("fp32+"),
        "fewer bits": lambda s: not s.route.startswith("fp32"),
    }
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    for name, key, color in (("answer, p50", "seconds", "#1f77b4"), ("first token, p50", "first", "#ff7f0e")):
        values = np.array([getattr(s, key) for s in streams]) * 1e3
        top.plot(
            edges,
            [np.median(values[which == i]) if (which == i).any() else np.nan for i in range(len(edges))],
            label=name,
            color=color,
        )
    top.set_ylabel("ms")
    top.set_ylim(bottom=0)
    top.legend(loc="upper right")
    shares = [
        [
            np.mean([bool(of(s)) for s, w in zip(streams, which, strict=True) if w == i] or [0]) * 100
            for i in range(len(edges))
        ]
        for of in kinds.values()
    ]
    bottom.stackplot(edges, shares, labels=list(kinds), colors=["#7f7f7f", "#2ca02c", "#9467bd"], alpha=0.7)
    bottom.set_ylabel("answers, %")
    bottom.set_xlabel("seconds since traffic began")
    bottom.legend(loc="upper right")
    for i, (when, text) in enumerate(teller.marks):
        for axis in (top, bottom):
            axis.axvline(when - origin, color="#888888", linewidth=0.8, linestyle=":")
        top.annotate(f"{i + 1}", (when - origin, 1.01), xycoords=("data", "axes fraction"), fontsize=8, ha="center")
        fig.text(0.01, -0.02 - 0.024 * i, f"{i + 1}  {when - origin:5.1f} s  {text}", fontsize=8, va="top")
    fig.suptitle(title)
    fig.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(fig)


def worst_answered(bundle: Path, prompts: Sequence[str], setting: Setting, console: Console) -> list[str]:
    """The prompts whose answers by fewer bits lose most: what traffic looks like when it moves to where the plan is
    weak. Kept beside the bundle, by content."""
    asked = json.dumps([setting.output, setting.tokens, *prompts])
    kept = bundle.parent / f"{bundle.name}-worst-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json"
    if not kept.is_file():
        with Progress(console=console) as progress:
            task = progress.add_task("what fewer bits answer badly", total=len(prompts))
            found = recorded_answers(bundle, prompts, tokens=setting.tokens, tick=lambda: progress.advance(task))
        each = found["losses"][setting.output].values()
        lost = {prompt: sum(of[i] for of in each) for i, prompt in enumerate(prompts)}
        kept.write_text(json.dumps(sorted(prompts, key=lambda prompt: -lost[prompt])))
    worst: list[str] = json.loads(kept.read_text())
    return worst[: setting.worst]


def manifest_of(bundle: Path, setting: Setting) -> Json:
    """What a user would write, with steps sized for a demo's patience."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "assistant"},
        "spec": {
            "model": {"uri": f"file://{bundle.resolve()}"},
            "objective": {
                "latency": {"threshold": "60s"},
                "accuracy": {"output": setting.output, "maxLoss": setting.budget},
            },
            "ramps": {"mode": "Disabled", "maxOverhead": "0.5"},
            "rollout": {"steps": [{"weight": 50}], "confidence": "0.9"},
            "replicas": 1,
        },
    }


async def run(console: Console, *, model: str, measure: float) -> int:
    setting = SETTINGS[model]
    console.print(f"preparing {model} (kept by content)")
    bundle = setting.bundle()
    calm = prompts_of(setting.prompts, setting.asked)
    hostile = worst_answered(bundle, calm, setting, console)
    work = BUILD / "run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    manifest = manifest_of(bundle, setting)
    stage = EmbeddedStage(work / "service.yaml", work / "state", work / "up.jsonl")
    await stage.apply(manifest)
    stage.start()
    try:
        traffic = Traffic(await stage.url(), model, setting.rate, setting.tokens, calm)
        teller = Teller(stage, traffic, console)
        summary = await tell(teller, setting, manifest, calm=calm, hostile=hostile, measure=measure)
    finally:
        code = stage.stop()
    draw_picture(teller, title=f"Offramp on {model}: one worker on this machine", path=BUILD / "story.png")
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1))
    return _report(summary, console, code=code)


def _report(summary: Json, console: Console, *, code: int) -> int:
    table = Table("", "answers", "p50", "first token p50", "routes")
    for name, title in (("off", "exits off"), ("on", "promoted")):
        row = summary[name]
        table.add_row(
            title,
            str(row["streams"]),
            f"{row['p50_ms']:.0f} ms",
            f"{row['first_token_p50_ms']:.0f} ms",
            ", ".join(f"{r} {n}" for r, n in row["routes"].items()),
        )
    console.print(table)
    console.print(f"{summary['streams']} streams, {summary['broken']} broken")
    problems = [f"{summary['broken']} streams broke: {summary['first_broken']}"] if summary["broken"] else []
    problems += [f"`offramp up` ended with exit code {code}"] if code else []
    for problem in problems:
        console.print(f"[bold red]failed:[/] {problem}")
    console.print(f"picture: {BUILD / 'story.png'} · summary: {BUILD / 'summary.json'}")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=list(SETTINGS),
        default="stories",
        help="stories (seconds to prepare) or smollm2 (minutes, once)",
    )
    parser.add_argument("--measure", type=float, default=20.0, help="seconds of each undisturbed stretch")
    options = parser.parse_args()
    console = Console()
    try:
        return asyncio.run(run(console, model=options.model, measure=options.measure))
    except StoryError as error:
        console.print(f"[bold red]the story took another turn:[/] {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
