"""``make demo-generate``: a model that generates through the whole loop on this machine, with real prompts and
open-loop traffic.

exits off, drafts that pay → a plan of few bits is certified → canary → promoted → the user turns exits off and on →
the plan's second canary → in mid-canary, content that few bits answer badly → rolled back by evidence. Every reply is a
stream, and every stream must end with a reason. The last line names the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.demo.embedded import EmbeddedStage
from bench.demo.picture import number_turns
from bench.demo.story import Json, StoryError, ended
from bench.generate.prepared import prompts_of, smollm2_bundle, stories_bundle
from bench.generate.recorded import recorded_answers
from bench.load import CLIENTS

BUILD = Path("build/demo-generate")
PATIENCE_SECONDS = 600.0
HOPELESS = 20  # requests, none of them answered
BEGUN = ("Progressing", "Promoting", "Succeeded")
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Setting:
    """What one model's telling needs: ``budget`` of ``output``, tokens of an answer, requests a second, ``asked``
    prompts of at most so many ``words``, and how many of the first ``tried`` make up the other content."""

    bundle: Callable[[], Path]
    prompts: str
    words: int
    output: str
    budget: str
    tokens: int
    rate: float
    asked: int
    tried: int
    worst: int
    replicas: int
    takes: str  # to prepare it


SETTINGS = {
    "stories": Setting(stories_bundle, "stories", 40, "TokenF1", "0.35", 12, 20.0, 400, 400, 40, 1, "seconds"),
    "smollm2": Setting(smollm2_bundle, "gsm8k", 10, "ExactAnswer", "0.3", 4, 6.0, 600, 96, 10, 2, "ten minutes"),
}


@dataclass(frozen=True, slots=True)
class Stream:
    """One reply: when it was sent and how long it took to its first and its last token; ``proposed`` tokens of a draft
    were verified, ``accepted`` kept; ``error`` of one that broke."""

    sent: float
    first: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
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

    async def alone(self, n: int) -> float:
        """The median seconds of ``n`` requests that each wait for the one before."""
        before = len(self.streams)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            for i in range(n):
                await self._one(session, self.prompts[i], client=i)
        if broken := [s.error for s in self.streams[before:] if s.error]:
            raise StoryError(f"a request alone was not answered: {broken[0]}")
        return statistics.median(s.seconds for s in self.streams[before:])

    async def run(self) -> None:
        draw, turn, open_ = random.Random(7), itertools.cycle(range(CLIENTS)), set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            while not self._stop.is_set():
                task = asyncio.create_task(self._one(session, draw.choice(self.prompts), client=next(turn)))
                open_.add(task)
                task.add_done_callback(open_.discard)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), draw.expovariate(self.rate))
            await asyncio.gather(*open_)

    def stop(self) -> None:
        self._stop.set()

    async def _one(self, session: aiohttp.ClientSession, prompt: str, *, client: int) -> None:
        sent, first, told = time.perf_counter(), 0.0, dict[str, Any]()
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        body["parameters"] = {"stream_name": f"client-{client}"}
        try:
            async with session.post(f"{self.url}/v1/completions", json=body | USAGE) as reply:
                if reply.status != 200:
                    raise StoryError(  # noqa: TRY301 - told like a broken stream
                        f"HTTP {reply.status}: {(await reply.text())[:200]}"
                    )
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        told |= {key: event[key] for key in ("offramp", "usage", "error") if event.get(key)}
                        told |= next((c for c in event.get("choices", []) if c.get("finish_reason")), {})
                        first = first or time.perf_counter() - sent
            self.streams.append(_stream(sent, first, time.perf_counter() - sent, told))
        except (aiohttp.ClientError, StoryError, TimeoutError) as error:
            self.streams.append(Stream(sent, error=repr(error)))


def _stream(sent: float, first: float, seconds: float, told: dict[str, Any]) -> Stream:
    usage, ours = told.get("usage", {}), told.get("offramp", {})
    drafted = usage.get("completion_tokens_details", {})
    accepted = drafted.get("accepted_prediction_tokens", 0)
    return Stream(
        sent,
        first,
        seconds,
        tokens=usage.get("completion_tokens", 0),
        proposed=accepted + drafted.get("rejected_prediction_tokens", 0),
        accepted=accepted,
        route=ours.get("route", ""),
        arm=ours.get("arm", ""),
        error="" if told.get("finish_reason") else f"ended without a reason: {told.get('error', 'no error either')}",
    )


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
            if len(self.traffic.streams) >= HOPELESS and all(s.error for s in self.traffic.streams):
                raise StoryError(f"no request is answered: {self.traffic.streams[0].error}")
            if time.perf_counter() > end:
                raise StoryError(
                    f"{what} did not happen within {seconds:.0f} s; status: "
                    f"{json.dumps((await self.stage.service()).get('status', {}))[:1500]}"
                )
            await asyncio.sleep(0.5)
        return found

    async def phase(self, *phases: str, number: int) -> Json | None:
        """The rollout of this number, once it is in one of these phases."""
        found = await self.stage.rollouts()
        if len(found) < number:
            return None
        return found[number - 1] if found[number - 1].get("status", {}).get("phase") in phases else None

    def plan(self, config: str) -> Json:
        """What a RampConfig says; nothing where there is none."""
        plans = {o["metadata"]["name"]: o["spec"] for o in self.stage._objects("RampConfig")}
        return plans.get(config, {})

    async def exits_are_off(self) -> bool:
        """Whether the model itself answers everybody."""
        status = (await self.stage.service()).get("status", {})
        plan = self.plan(status.get("stableConfig", ""))
        return not plan or (plan["precision"] == "fp32" and not plan["ramps"])

    def stretch(self, since: float, until: float) -> list[Stream]:
        return [s for s in self.traffic.streams if since <= s.sent < until and not s.error]


async def tell(
    teller: Teller, setting: Setting, manifest: Json, *, calm: Sequence[str], hostile: Sequence[str], measure: float
) -> Json:
    """The story; what it came to."""
    traffic = teller.traffic
    await teller.until(lambda: ready(teller), "a ready service")
    teller.mark("ready, exits off: the model itself answers, with drafts where they pay")
    sending = asyncio.create_task(traffic.run())
    await asyncio.sleep(measure)
    off = (teller.marks[-1][0], time.perf_counter())
    await turn(teller, manifest, "Auto")
    teller.mark(f"the user turns exits on: {setting.output} may lose {float(setting.budget):.0%}")
    first = await teller.until(lambda: teller.phase(*BEGUN, number=1), "a canary")
    teller.mark(f"a plan is certified; its canary begins: {first['spec']['to']}")
    await teller.until(lambda: teller.phase("Succeeded", number=1), "the promotion")
    teller.mark("promoted: fewer bits answer")
    await asyncio.sleep(measure)
    on = (teller.marks[-1][0], time.perf_counter())
    await turn(teller, manifest, "Disabled")
    await teller.until(teller.exits_are_off, "the end of exits")
    await turn(teller, manifest, "Auto")
    teller.mark("the user turns exits off and on again")
    second = await teller.until(lambda: teller.phase("Progressing", number=2), "a second canary")
    traffic.prompts = hostile
    teller.mark(f"its second canary: {second['spec']['to']}; at once other content, which fewer bits answer badly")
    ended = await teller.until(lambda: teller.phase("Succeeded", "RolledBack", "Failed", number=2), "its verdict")
    status = ended["status"]
    teller.mark(f"{status.get('verdict')}: {status.get('reason')}, {status.get('message')}")
    traffic.prompts = calm
    await asyncio.sleep(measure / 2)
    traffic.stop()
    await sending
    broken = [s.error for s in traffic.streams if s.error]
    times = [at for at, _ in teller.marks]
    return {
        "streams": len(traffic.streams),
        "broken": len(broken),
        "first_broken": broken[:3],
        "off": facts(teller.stretch(*off)),
        "on": facts(teller.stretch(*on)),
        "hostile": facts(teller.stretch(times[-2], times[-1])),
        "verdict": status.get("verdict"),
        "seconds": round(time.perf_counter() - teller.began, 1),
        "marks": [(round(at - teller.began, 1), text) for at, text in teller.marks],
    }


async def ready(teller: Teller) -> bool:
    conditions = (await teller.stage.service()).get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def turn(teller: Teller, manifest: Json, mode: str) -> None:
    manifest["spec"]["ramps"]["mode"] = mode
    await teller.stage.apply(manifest)


def facts(streams: Sequence[Stream]) -> Json:
    """Median times of a stretch."""

    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2] if values else 0.0

    return {
        "streams": len(streams),
        "p50_ms": 1e3 * middle([s.seconds for s in streams]),
        "first_token_p50_ms": 1e3 * middle([s.first for s in streams]),
        "accepted": accepted_share(streams),
        "routes": dict(Counter(s.route for s in streams).most_common(4)),
    }


def accepted_share(streams: Sequence[Stream]) -> float | None:
    """Share of the drafts' tokens that the model took."""
    proposed = sum(s.proposed for s in streams)
    return sum(s.accepted for s in streams) / proposed if proposed else None


Kinds = Mapping[str, tuple[str, Callable[[Stream], bool]]]
KINDS: Kinds = {
    "the model alone": ("#7f7f7f", lambda s: s.route == "fp32"),
    "the model with a draft": ("#2ca02c", lambda s: s.route.startswith("fp32+")),
    "fewer bits": ("#9467bd", lambda s: not s.route.startswith("fp32")),
}
BIN_SECONDS = 5.0


def draw_picture(
    teller: Teller,
    *,
    title: str,
    path: Path,
    kinds: Kinds = KINDS,
    share: Callable[[Sequence[Stream]], float | None] = accepted_share,
    of: str = "of drafts accepted",
) -> None:
    """Times of answers, shares of the ``kinds`` of them and a ``share``, of what is accepted of drafts or of something
    else, over the seconds of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    origin = teller.marks[0][0]
    streams = [s for s in teller.traffic.streams if not s.error]
    edges = [k * BIN_SECONDS for k in range(int((max(s.sent for s in streams) - origin) / BIN_SECONDS) + 1)]
    bins = [[s for s in streams if at <= s.sent - origin < at + BIN_SECONDS] for at in edges]
    middles = [at + BIN_SECONDS / 2 for at in edges]
    fig, axes = plt.subplots(3, 1, figsize=(12, 8), sharex=True, height_ratios=[3, 2, 2], layout="constrained")
    told = [facts(some) if some else {} for some in bins]
    for name, key, color in (("whole answer", "p50_ms", "#1f77b4"), ("first token", "first_token_p50_ms", "#ff7f0e")):
        axes[0].plot(middles, [one.get(key, math.nan) for one in told], label=name, color=color)
    axes[0].set_ylabel("ms, median")
    shares = [[100 * sum(map(mine, some)) / max(1, len(some)) for some in bins] for _, mine in kinds.values()]
    bottom = [0.0] * len(edges)
    for name, heights in zip(kinds, shares, strict=True):
        axes[1].bar(edges, heights, BIN_SECONDS, bottom, align="edge", label=name, color=kinds[name][0], alpha=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes[1].set_ylabel("answers by, %")
    found = [share(some) for some in bins]
    axes[2].plot(middles, [math.nan if one is None else 100 * one for one in found], ".-", color="#2ca02c")
    axes[2].set_ylabel(f"{of}, %")
    axes[2].set_xlabel("seconds since traffic began")
    for axis, top in zip(axes, (None, 100, 105), strict=True):
        axis.set_ylim(0, top)
        axis.set_xlim(0, edges[-1] + BIN_SECONDS)
    for axis in axes[:2]:
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    number_turns(fig, axes, [(when - origin, text) for when, text in teller.marks])
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
            "replicas": setting.replicas,
        },
    }


def require_fewer_bits(bundle: Path) -> None:
    """The story's plan answers in fewer bits.

    Raises
    ------
    StoryError
        Where none were worth their loss on this processor: then no plan is ever certified.
    """
    variants = json.loads((bundle / "report.json").read_text())["variants"]
    if not [v for v in variants[1:] if not v["refused"]]:
        why = "; ".join(f"{v['name']}: {v['refused']}" for v in variants[1:])
        raise StoryError(f"fewer bits of {bundle.name} do not pay on this processor ({why})")


def first_that_pays(console: Console) -> str:
    """The small model, or the large one where fewer bits of the small one do not pay."""
    small, large = SETTINGS
    try:
        require_fewer_bits(SETTINGS[small].bundle())
    except StoryError as error:
        console.print(f"{error}; so {large} tells the story")
        return large
    return small


async def run(console: Console, *, model: str, measure: float) -> int:
    setting = SETTINGS[model]
    console.print(f"the bundle of {model}: prepared once ({setting.takes}), then kept in build/generate by content")
    bundle = setting.bundle()
    require_fewer_bits(bundle)
    calm = [" ".join(prompt.split()[: setting.words]) for prompt in prompts_of(setting.prompts, setting.asked)]
    hostile = worst_answered(bundle, calm[: setting.tried], setting, console)
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
    draw_picture(
        teller, title=f"Offramp on {model}, workers on this machine: {setting.replicas}", path=BUILD / "story.png"
    )
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1))
    return _report(summary, console, code=code)


def _report(summary: Json, console: Console, *, code: int) -> int:
    table = Table("", "answers", "p50", "first token p50", "of drafts accepted", "routes")
    for name, title in (("off", "exits off"), ("on", "promoted"), ("hostile", "other content, in mid-canary")):
        row = summary[name]
        table.add_row(
            title,
            str(row["streams"]),
            f"{row['p50_ms']:.0f} ms",
            f"{row['first_token_p50_ms']:.0f} ms",
            "" if row["accepted"] is None else f"{row['accepted']:.0%}",
            ", ".join(f"{r} {n}" for r, n in row["routes"].items()),
        )
    console.print(table)
    console.print(f"{summary['streams']} streams, {summary['broken']} broken; told in {summary['seconds']:.0f} s")
    problems = [f"{summary['broken']} streams broke: {summary['first_broken']}"] if summary["broken"] else []
    if summary["verdict"] != "RolledBack":
        problems.append(f"the second canary ended with {summary['verdict']}, not rolled back")
    problems += [f"`offramp up` ended with exit code {code}"] if code else []
    return ended(problems, console, picture=BUILD / "story.png", summary=BUILD / "summary.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=list(SETTINGS),
        default=None,
        help="stories (seconds to prepare) or smollm2 (minutes, once); default: the first whose few bits pay here",
    )
    parser.add_argument("--measure", type=float, default=20.0, help="seconds of each undisturbed stretch")
    options = parser.parse_args()
    console = Console()
    try:
        model = options.model or first_that_pays(console)
        return asyncio.run(run(console, model=model, measure=options.measure))
    except StoryError as error:
        console.print(f"[bold red]the story took another turn:[/] {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
