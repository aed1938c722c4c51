"""``make demo-vllm``: a model that vLLM computes, through the whole loop on this machine, with open-loop traffic.

the reference alone → a configuration with fewer layers is certified → canary with an exact share → promoted → the user
pins one whose draft costs more than it saves → its canary is rolled back by evidence, and what served goes on. Three
configurations of vLLM run behind one worker. Every reply is a stream, and every stream must end with a reason. The last
line names the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from bench.demo.embedded import EmbeddedStage
from bench.demo.generate import BEGUN, Stream, Teller, Traffic, draw_picture, facts, ready, turn
from bench.demo.story import Json, StoryError, ended
from bench.generate.prepared import model_of, prompts_of
from bench.vllm.environment import TORCH, VLLM, vllm_python
from bench.vllm.stories import write_stories

BUILD = Path("build/demo-vllm")
PROMPTS, PREPARED, TOKENS, WEIGHT, BUDGET = 2000, 24, 4, 50, "0.3"
ALONE = 8  # answers, by which the rate is chosen
# Written side by side on average, if each takes as long as one alone: few at first, to leave room for audits.
IN_FLIGHT, IN_FLIGHT_OF_CANARY, FASTEST = 0.5, 1.0, 16.0
GOOD, WORSE = "short", "drafted"
CONFIGURATIONS: Json = {
    "context_length": 256,
    "enforce_eager": True,  # starts sooner, and a model of this size gains nothing by graphs
    "configurations": [
        {"name": "fp32", "dtype": "float32"},  # vLLM itself would round to bfloat16 here, and ties decide then
        {"name": GOOD, "dtype": "float32", "model": "short"},
        {"name": WORSE, "dtype": "float32", "draft": {"kind": "model", "model": "draft", "tokens": 4}},
    ],
}
LAYERS, SHORT_LAYERS, DRAFT_LAYERS = 24, 5, 2  # of which the first five are all that adds anything
KINDS = {
    "the reference": ("#7f7f7f", lambda s: s.route == "fp32"),
    f"{GOOD}: certified": ("#2ca02c", lambda s: s.route == GOOD),
    f"{WORSE}: pinned": ("#d62728", lambda s: s.route == WORSE),
}
ENDS = ("Succeeded", "RolledBack", "Failed")


def vllm_bundle(python: Path) -> Path:
    """stories260K in all configurations, prepared as a user would and kept by content."""
    weights, prompts = model_of("stories"), prompts_of("stories", PREPARED)
    made_of = json.dumps([VLLM, TORCH, LAYERS, SHORT_LAYERS, DRAFT_LAYERS, TOKENS, CONFIGURATIONS, prompts])
    digest = hashlib.sha256(made_of.encode() + Path(weights).read_bytes()).hexdigest()[:12]
    folder = BUILD / f"stories-{digest}"
    if (folder / "bundle").is_dir():
        return folder / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    for name, layers in (("stories", LAYERS), ("short", SHORT_LAYERS), ("draft", DRAFT_LAYERS)):
        write_stories(weights, folder / name, layers=layers)
    (folder / "vllm.yaml").write_text(yaml.safe_dump(CONFIGURATIONS, sort_keys=False))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    asked = {
        "task": "generate",
        "model": folder / "stories",
        "vllm": folder / "vllm.yaml",
        "data": folder / "prompts.jsonl",
        "out": folder / "bundle",
        "name": "stories",
        "answer-tokens": TOKENS,
    }
    options = [part for name, value in asked.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "OFFRAMP_VLLM_PYTHON": str(python), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "offramp_cli", "prepare", *options], check=True, env=environment)
    return folder / "bundle"


def manifest_of(bundle: Path) -> Json:
    """What a user would write, with a step sized for a demo's patience."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "assistant"},
        "spec": {
            "model": {"uri": f"file://{bundle.resolve()}"},
            "objective": {
                "latency": {"threshold": "60s"},
                "accuracy": {"output": "ExactAnswer", "maxLoss": BUDGET},
            },
            "ramps": {"mode": "Disabled", "maxOverhead": "0.3"},
            "rollout": {"steps": [{"weight": WEIGHT}], "confidence": "0.8"},
            "replicas": 1,
        },
    }


@dataclass(frozen=True, slots=True)
class Share:
    """Of ``answers`` while a canary had its weight, those that were the canary's."""

    answers: int
    canary: int

    @property
    def percent(self) -> float:
        return 100 * self.canary / max(1, self.answers)

    def fits(self, weight: int) -> bool:
        """Whether they are as many as a draw with this weight, in percent, makes them: within four deviations."""
        share = weight / 100
        return abs(self.canary - share * self.answers) <= 4 * math.sqrt(share * (1 - share) * self.answers)


def share_of(streams: Sequence[Stream], *, until: float) -> Share:
    """Of what was sent after the first answer of a canary, and until a moment at which its weight still stood."""
    began = min((s.sent for s in streams if s.arm == "canary"), default=math.inf)
    counted = [s for s in streams if began < s.sent <= until and not s.error]
    return Share(len(counted), sum(s.arm == "canary" for s in counted))


def canary_percent(streams: Sequence[Stream]) -> float | None:
    return sum(s.arm == "canary" for s in streams) / len(streams) if streams else None


def precision(teller: Teller, config: str) -> str:
    """The configuration that a plan names."""
    return str(teller.plan(config).get("precision", ""))


async def followed(teller: Teller, number: int) -> tuple[Json, float]:
    """A rollout that has ended, and the last moment at which it was seen at its weight."""
    last = 0.0

    async def over() -> Json | None:
        nonlocal last
        now = time.perf_counter()
        if await teller.phase("Progressing", number=number):
            last = now
        return await teller.phase(*ENDS, number=number)

    return await teller.until(over, f"the end of rollout {number}"), last


async def tell(teller: Teller, manifest: Json, *, measure: float) -> Json:
    """The story; what it came to."""
    traffic = teller.traffic
    await teller.until(lambda: ready(teller), "a ready service")
    alone = await traffic.alone(ALONE)
    traffic.rate = min(FASTEST, IN_FLIGHT / alone)
    teller.mark(
        f"ready: the reference alone answers, one alone in {1e3 * alone:.0f} ms; {traffic.rate:.1f} requests a second"
    )
    sending = asyncio.create_task(traffic.run())
    await asyncio.sleep(measure)
    reference = (teller.marks[-1][0], time.perf_counter())
    await turn(teller, manifest, "Auto")
    teller.mark(f"the user allows other configurations: {float(BUDGET):.0%} of answers may differ")
    begun = await teller.until(lambda: teller.phase(*BEGUN, number=1), "a canary")
    found = precision(teller, begun["spec"]["to"])
    traffic.rate = min(FASTEST, IN_FLIGHT_OF_CANARY / alone)
    teller.mark(
        f"the plan {found!r} is certified; its canary begins with a weight of {WEIGHT} %, at {traffic.rate:.1f} "
        "requests a second"
    )
    first, until = await followed(teller, 1)
    share = share_of(traffic.streams, until=until)
    teller.mark(
        f"{first['status']['verdict']}; the canary had {share.percent:.1f} % of {share.answers} answers at {WEIGHT} %"
    )
    await asyncio.sleep(measure)
    promoted = (teller.marks[-1][0], time.perf_counter())
    manifest["spec"]["ramps"]["pin"] = {"precision": WORSE, "ramps": []}
    await turn(teller, manifest, "Pinned")
    teller.mark(f"the user pins {WORSE!r}, which drafts 4 tokens at a time with {DRAFT_LAYERS} of its layers")
    await teller.until(lambda: teller.phase(*BEGUN, number=2), "the canary of the pin")
    teller.mark("recorded answers do not speak against it; its canary begins")
    second, _ = await followed(teller, 2)
    teller.mark(f"{second['status'].get('verdict')}: {second['status'].get('reason')}, {second['status']['message']}")
    await asyncio.sleep(measure)
    traffic.stop()
    await sending
    times = [at for at, _ in teller.marks]
    stretches = {
        "reference": reference,
        "canary": (times[2], times[3]),
        "promoted": promoted,
        "worse": (times[5], times[6]),
        "after": (times[6], math.inf),
    }
    broken = [s.error for s in traffic.streams if s.error]
    return {
        "streams": len(traffic.streams),
        "broken": len(broken),
        "first_broken": broken[:3],
        "certified": found,
        "verdicts": [str(one["status"].get("verdict")) for one in (first, second)],
        "why": str(second["status"].get("reason")),
        "share": {"weight": WEIGHT, "answers": share.answers, "canary": share.canary},
        "stretches": {name: facts(teller.stretch(*stretch)) for name, stretch in stretches.items()},
        "seconds": round(time.perf_counter() - teller.began, 1),
        "marks": [(round(at - teller.began, 1), text) for at, text in teller.marks],
    }


def problems(summary: Json) -> list[str]:
    """What of the story was not seen."""
    told, share = summary["stretches"], Share(summary["share"]["answers"], summary["share"]["canary"])

    def part(stretch: str, route: str) -> float:
        return float(told[stretch]["routes"].get(route, 0) / max(1, told[stretch]["streams"]))

    checks = {
        f"{summary['broken']} streams broke: {summary['first_broken']}": not summary["broken"],
        f"{summary['certified']!r} was certified, not {GOOD!r}": summary["certified"] == GOOD,
        f"the rollouts ended with {summary['verdicts']}": summary["verdicts"] == ["Succeeded", "RolledBack"],
        f"the worse plan fell by {summary['why']}": summary["why"] == "SlownessRejected",
        f"the canary had {share.percent:.1f} % of {share.answers} answers": share.answers > 0
        and share.fits(summary["share"]["weight"]),
        f"at first others than the reference answered: {told['reference']['routes']}": part("reference", "fp32") == 1,
        f"{GOOD!r} did not answer once it was promoted: {told['promoted']['routes']}": part("promoted", GOOD) > 0.9,
        f"{GOOD!r} did not go on after the rollback: {told['after']['routes']}": part("after", GOOD) > 0.9,
        f"{GOOD!r} saved no time": told["promoted"]["p50_ms"] < told["reference"]["p50_ms"],
    }
    return [text for text, fine in checks.items() if not fine]


def _report(summary: Json, console: Console, *, code: int) -> int:
    table = Table("", "answers", "p50", "first token p50", "answered by")
    titles = {
        "reference": "the reference",
        "canary": f"canary of {GOOD!r}",
        "promoted": "promoted",
        "worse": f"canary of {WORSE!r}",
        "after": "rolled back",
    }
    for name, title in titles.items():
        row = summary["stretches"][name]
        routes = ", ".join(f"{route} {n}" for route, n in row["routes"].items())
        table.add_row(
            title, str(row["streams"]), f"{row['p50_ms']:.0f} ms", f"{row['first_token_p50_ms']:.0f} ms", routes
        )
    console.print(table)
    console.print(f"{summary['streams']} streams, {summary['broken']} broken; told in {summary['seconds']:.0f} s")
    found = problems(summary) + ([f"`offramp up` ended with exit code {code}"] if code else [])
    return ended(found, console, picture=BUILD / "story.png", summary=BUILD / "summary.json")


async def run(console: Console, *, measure: float) -> int:
    python = vllm_python()
    console.print(f"{VLLM} in {python.parent.parent}; the bundle is prepared once (two minutes), then kept by content")
    bundle = vllm_bundle(python)
    work = BUILD / "run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ |= {"OFFRAMP_VLLM_PYTHON": str(python), "OFFRAMP_AUDIT_SHARE": "0.9"}  # a demo's patience
    manifest = manifest_of(bundle)
    stage = EmbeddedStage(work / "service.yaml", work / "state", work / "up.jsonl")
    await stage.apply(manifest)
    stage.start()
    try:
        traffic = Traffic(await stage.url(), "stories", 1.0, TOKENS, prompts_of("stories", PROMPTS, skip=PREPARED))
        teller = Teller(stage, traffic, console)
        summary = await tell(teller, manifest, measure=measure)
    finally:
        code = stage.stop()
    draw_picture(
        teller,
        title=f"Offramp on stories260K by {VLLM.replace('==', ' ')}, three configurations behind one worker",
        path=BUILD / "story.png",
        kinds=KINDS,
        share=canary_percent,
        of="of answers the canary's",
    )
    (BUILD / "summary.json").write_text(json.dumps(summary, indent=1))
    return _report(summary, console, code=code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=float, default=20.0, help="seconds of each undisturbed stretch")
    options = parser.parse_args()
    console = Console()
    try:
        return asyncio.run(run(console, measure=options.measure))
    except StoryError as error:
        console.print(f"[bold red]the story took another turn:[/] {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
