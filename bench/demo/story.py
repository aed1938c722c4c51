"""The story that both demos tell, on whatever stage: this machine or a cluster.

exits off → a certified plan → canary steps → promoted → a reckless pin is refused from the records → exits go off
and on again, and the inputs drift under the canary that comes back → rolled back by evidence → tuned again on the
new inputs, with a looser budget. Traffic never stops, and every answer is compared with what the untouched model says.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from bench.load import OpenLoop, Traffic, percentile_ms, window

POLL_SECONDS = 0.5
LOAD = (
    0.4  # of what this machine answers right now, exits off: audits and neighbours need room, and no request may fail
)
P50_EXPECTED, P95_EXPECTED = 0.7, 1.05

Json = dict[str, Any]


def ended(problems: Sequence[str], console: Console, *, picture: Path, summary: Path) -> int:
    """Say what failed, if anything, and where to look; the exit code of a demo."""
    for problem in problems:
        console.print(f"[bold red]failed:[/] {problem}")
    console.print(f"picture: {picture} · summary: {summary}")
    return 1 if problems else 0


class Stage(Protocol):
    """Where the story plays."""

    async def apply(self, manifest: Json) -> None:
        """What the user does: ``kubectl apply``, or saving the file."""

    async def service(self) -> Json:
        """The EarlyExitService as stored."""

    async def rollouts(self) -> list[Json]: ...

    async def metrics(self) -> list[str]:
        """Each worker's ``/metrics`` page."""

    async def check(self) -> list[str]:
        """What must hold at every moment on this stage; a sentence per violation."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Pace and pool of one telling."""

    name: str
    model: str
    rate: float
    clean: Traffic
    drifted: Traffic
    reckless_ramp: str
    budget: str
    loose_budget: str
    measure_seconds: float
    input_name: str
    patience_seconds: float = 240.0
    bounds: bool = True
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Measured:
    """One stretch of undisturbed traffic: client latency, and engine time per request (audits left out)."""

    p50_ms: float
    p95_ms: float
    engine_ms: float
    requests: int


class StoryError(Exception):
    """The story took another turn than it must."""


@dataclass
class Storyteller:
    """Drives the user's side and the load, and keeps the record."""

    stage: Stage
    settings: Settings
    manifest: Json
    urls: list[str]
    out: Path
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.load = OpenLoop(
            self.urls,
            self.settings.model,
            self.settings.clean,
            self.settings.rate,
            self.settings.seed,
            self.settings.input_name,
        )
        self.marks: list[tuple[float, str]] = []
        self.violations: list[str] = []
        self.not_ready: list[str] = []
        self.seen_ready = False
        self.last: Json = {}
        self._told: tuple[str, ...] = ()

    # --- telling -----------------------------------------------------------------------------------

    def say(self, text: str, *, style: str = "") -> None:
        self.console.print(f"[dim]{time.perf_counter() - self.began:6.1f} s[/]  {text}", style=style, highlight=False)

    def mark(self, text: str) -> float:
        """A turn of the story; returns its time."""
        now = time.perf_counter()
        self.marks.append((now, text))
        self.say(f"[bold]{text}[/]")
        return now

    # --- watching ----------------------------------------------------------------------------------

    async def watch(self, stop: asyncio.Event) -> None:
        """Poll the stage, tell what changes, and note everything that must never happen."""
        while not stop.is_set():
            self.last = await self.stage.service()
            self._note_readiness()
            self._tell_progress()
            for violation in await self.stage.check():
                if violation not in self.violations:
                    self.violations.append(violation)
                    self.say(violation, style="red")
            await asyncio.sleep(POLL_SECONDS)

    def condition(self, kind: str) -> Json:
        conditions = self.last.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def _note_readiness(self) -> None:
        ready = self.condition("Ready").get("status")
        if ready == "True":
            self.seen_ready = True
        elif self.seen_ready:
            self.not_ready.append(f"Ready was {ready}: {self.condition('Ready').get('message')}")

    def _tell_progress(self) -> None:
        status = self.last.get("status", {})
        rollout, tuning = status.get("rollout", {}), status.get("tuning", {})
        now = (status.get("stableConfig", ""), rollout.get("summary", ""), tuning.get("state", ""))
        if now == self._told:
            return
        self._told = now
        recent = window(self.load.replies, time.perf_counter() - 5, math.inf)
        ok = [r for r in recent if r.ok]
        pace = (
            f"p50 {percentile_ms(ok, 50):5.1f} ms · exits {sum(r.exit != 'final' for r in ok) / len(ok):4.0%}"
            if len(ok) > 20
            else "p50    –"
        )
        self.say(
            f"stable [cyan]{now[0] or '–'}[/] · rollout [magenta]{now[1] or '–'}[/] · tuner {now[2] or '–'} · {pace}"
        )

    async def until(self, what: str, holds: Callable[[], Any]) -> None:
        """Wait for a turn; a story that gets stuck says what it last saw."""
        deadline = time.perf_counter() + self.patience
        while not holds():
            if time.perf_counter() > deadline:
                raise self.stuck(what)
            await asyncio.sleep(0.2)

    @property
    def patience(self) -> float:
        """Seconds to wait for a turn. Evidence comes by the request, so a slow machine gets more of them."""
        return self.settings.patience_seconds * max(1.0, self.settings.rate / self.load.rate)

    def stuck(self, what: str) -> StoryError:
        status = json.dumps(self.last.get("status", {}), indent=1)[:3000]
        return StoryError(f"waited {self.patience:.0f} s for: {what}\nlast status: {status}")

    # --- acting ------------------------------------------------------------------------------------

    async def user(self, text: str, **spec: Any) -> float:
        """The user changes the manifest."""
        at = self.mark(text)
        self.manifest = copy.deepcopy(self.manifest)
        for key, value in spec.items():
            self.manifest["spec"][key] = value
        await self.stage.apply(self.manifest)
        return at

    def generation_is_settled(self) -> bool:
        status = self.last.get("status", {})
        return bool(
            status.get("observedGeneration") == self.last.get("metadata", {}).get("generation")
        ) and not self.condition("Reconciling")

    def ramps(self, mode: str, **fields: Any) -> Json:
        """``spec.ramps`` in another mode, the overhead as it was."""
        before = self.manifest["spec"]["ramps"]
        return {**{k: v for k, v in before.items() if k == "maxOverhead"}, "mode": mode, **fields}

    def objective(self, budget: str) -> Json:
        objective: Json = copy.deepcopy(self.manifest["spec"]["objective"])
        objective["accuracy"]["maxDisagreement"] = budget
        return objective

    async def measure(self, what: str) -> Measured:
        """Let traffic flow for a while under what serves now."""
        requests, busy = engine_time(await self.stage.metrics())
        start = time.perf_counter()
        await asyncio.sleep(self.settings.measure_seconds)
        end = time.perf_counter()
        requests_then, busy_then = engine_time(await self.stage.metrics())
        seen = window(self.load.replies, start, end)
        per_request = (busy_then - busy) / max(1.0, requests_then - requests)
        measured = Measured(percentile_ms(seen, 50), percentile_ms(seen, 95), per_request * 1e3, len(seen))
        self.say(
            f"{what}: p50 {measured.p50_ms:.1f} ms, p95 {measured.p95_ms:.1f} ms, engine {measured.engine_ms:.2f} ms "
            "per request"
        )
        return measured

    def rollout_verdict(self, rollouts: list[Json], name: str) -> str:
        return next((r.get("status", {}).get("verdict", "") for r in rollouts if r["metadata"]["name"] == name), "")


async def tell(teller: Storyteller) -> Json:
    """The whole story; returns the summary.

    Raises
    ------
    StoryError
        It took another turn than it must.
    """
    stop, load_done = asyncio.Event(), None
    watcher = asyncio.create_task(teller.watch(stop))
    try:
        await teller.until(
            "the service to be ready",
            lambda: teller.condition("Ready").get("status") == "True" and teller.generation_is_settled(),
        )
        capacity = await teller.load.capacity()
        teller.load.rate = min(teller.settings.rate, LOAD * capacity)
        teller.mark(
            f"ready: exits are off, {teller.load.rate:.0f} requests a second begin ({teller.load.rate / capacity:.0%} "
            "of what comes back at most)"
        )
        load_done = asyncio.create_task(teller.load.run())
        return await _acts(teller)
    finally:
        teller.load.stop()
        if load_done is not None:
            await load_done
        stop.set()
        await watcher


async def _acts(teller: Storyteller) -> Json:
    settings, stage = teller.settings, teller.stage
    await asyncio.sleep(2.0)  # connections and caches of the load client, not of the service
    off = await teller.measure("exits off")

    await teller.user(f"the user turns ramps on: budget {settings.budget}", ramps=teller.ramps("Auto"))
    await teller.until("a certified plan to be promoted", lambda: _promoted_names(teller))
    first = (await stage.rollouts())[-1]["metadata"]["name"]
    teller.mark(f"promoted: {teller.last['status']['stableConfig']}")
    on = await teller.measure("with exits")

    await teller.user(
        "the user pins reckless thresholds",
        ramps=teller.ramps("Pinned", pin={"ramps": [{"id": settings.reckless_ramp, "threshold": "1"}]}),
    )
    pinned_generation = teller.last["metadata"]["generation"]
    await teller.until("the pin to be refused", lambda: teller.condition("Stalled").get("reason") == "PinRejected")
    refusal = teller.condition("Stalled")["message"]
    teller.say(f"refused: {refusal}")
    rollouts_of_pin = [r for r in await stage.rollouts() if r["spec"].get("cause") == "Pinned"]

    await teller.user("the user takes the pin back and turns exits off", ramps=teller.ramps("Disabled"))
    await teller.until("exits to be off", lambda: teller.condition("AccuracyWithinBudget").get("reason") == "ExitsOff")
    await teller.user("the user turns ramps on again", ramps=teller.ramps("Auto"))
    await teller.until(
        "a second canary to serve", lambda: "Step" in teller.last["status"].get("rollout", {}).get("summary", "")
    )
    second = teller.last["status"]["rollout"]["name"]
    await asyncio.sleep(2.0)
    drift_at = teller.mark("the inputs drift in mid-canary")
    teller.load.traffic = settings.drifted
    rollouts: list[Json] = []

    async def refresh() -> None:
        nonlocal rollouts
        rollouts = await stage.rollouts()

    await _until_async(
        teller, "the canary to be rolled back", refresh, lambda: teller.rollout_verdict(rollouts, second)
    )
    verdict = next(r for r in rollouts if r["metadata"]["name"] == second)["status"]
    teller.mark(f"{verdict['verdict']}: {verdict.get('reason')} – {verdict.get('message')}")

    await teller.user(
        f"the user loosens the budget to {settings.loose_budget}", objective=teller.objective(settings.loose_budget)
    )

    def promoted_on_new_inputs() -> bool:
        later = [r for r in rollouts if r["metadata"]["name"] not in (first, second)]
        return any(r.get("status", {}).get("verdict") == "Succeeded" for r in later)

    def found_nothing_better() -> bool:
        """The tuner proposed nothing on the new records; a proposal that was rolled back is no conclusion."""
        tuning = teller.last["status"].get("tuning", {})
        proposed = any(r["metadata"]["name"] not in (first, second) for r in rollouts)
        return not proposed and tuning.get("state") == "Idle" and bool(tuning.get("tunedFor"))

    await _until_async(
        teller,
        "the tuner to conclude on the new inputs",
        refresh,
        lambda: promoted_on_new_inputs() or found_nothing_better(),
    )
    retuned = {"promoted": promoted_on_new_inputs(), "message": teller.last["status"]["tuning"].get("message", "")}
    teller.mark(
        f"tuned again on the new inputs: {teller.last['status']['stableConfig']}"
        if retuned["promoted"]
        else f"tuned again on the new inputs: {retuned['message']}"
    )
    await teller.measure("after the drift")
    teller.load.stop()
    await asyncio.sleep(1.0)
    await refresh()
    return _summary(
        teller,
        off=off,
        on=on,
        drift_at=drift_at,
        retuned=retuned,
        rollouts=rollouts,
        pin={"refused": True, "generation": pinned_generation, "message": refusal, "rollouts": len(rollouts_of_pin)},
    )


def _promoted_names(teller: Storyteller) -> bool:
    status = teller.last.get("status", {})
    return (
        status.get("tuning", {}).get("state") == "Idle"
        and bool(status.get("tuning", {}).get("testsRun"))
        and not status.get("rollout")
    )


async def _until_async(teller: Storyteller, what: str, refresh: Callable[[], Any], holds: Callable[[], Any]) -> None:
    deadline = time.perf_counter() + teller.patience
    while True:
        await refresh()
        if holds():
            return
        if time.perf_counter() > deadline:
            raise teller.stuck(what)
        await asyncio.sleep(POLL_SECONDS)


# --- the end ---------------------------------------------------------------------------------------


def _summary(
    teller: Storyteller, *, off: Measured, on: Measured, drift_at: float, rollouts: list[Json], retuned: Json, pin: Json
) -> Json:
    replies = teller.load.replies
    answered = [r for r in replies if r.ok]
    before = [r for r in answered if r.sent_at < drift_at]
    return {
        "requests": len(replies),
        "failed": len(replies) - len(answered),
        "errors": sorted({r.error for r in replies if not r.ok})[:5],
        "budget": float(teller.settings.budget),
        "agreement": round(sum(r.agrees for r in before) / max(1, len(before)), 6),
        "agreement_all": round(sum(r.agrees for r in answered) / max(1, len(answered)), 6),
        "compute_saving": round(1 - on.engine_ms / off.engine_ms, 4),
        "p50_ratio": round(on.p50_ms / off.p50_ms, 4),
        "p95_ratio": round(on.p95_ms / off.p95_ms, 4),
        "exits_off": asdict(off),
        "with_exits": asdict(on),
        "rollouts": [_rollout_row(r) for r in rollouts],
        "pin": pin,
        "retuned": retuned,
        "not_ready": teller.not_ready,
        "violations": teller.violations,
        "seconds": round(time.perf_counter() - teller.began, 1),
    }


def _rollout_row(rollout: Json) -> Json:
    from offramp_core.control.codec import from_json, parse_time
    from offramp_core.control.objects import RolloutStatus

    status = from_json(RolloutStatus, rollout.get("status", {}))
    n, k = status.audited
    began = parse_time(rollout["metadata"]["creationTimestamp"])
    return {
        "name": rollout["metadata"]["name"],
        "to": rollout["spec"]["to"],
        "verdict": status.verdict,
        "reason": status.reason,
        "seconds": round((status.finished_at or began) - began, 1),
        "n": n,
        "k": k,
    }


def engine_time(pages: list[str]) -> tuple[float, float]:
    """Requests answered and seconds the engines spent serving them, over all workers."""
    requests = busy = 0.0
    for page in pages:
        for line in page.splitlines():
            if line.startswith('earlyexit_requests_total{outcome="ok"}'):
                requests += float(line.rsplit(" ", 1)[1])
            elif line.startswith("earlyexit_batch_duration_seconds_sum"):
                busy += float(line.rsplit(" ", 1)[1])
    return requests, busy


def problems(summary: Json) -> list[str]:
    """What makes the telling a failure: correctness, never timing."""
    verdicts = [r["verdict"] for r in summary["rollouts"]]
    checks = {
        f"{summary['failed']} requests failed: {summary['errors']}": summary["failed"] == 0,
        f"agreement {summary['agreement']:.4f} is below 1 - {summary['budget']}": summary["agreement"]
        >= 1 - summary["budget"],
        f"the first certified plan was not promoted ({verdicts})": verdicts[:1] == ["Succeeded"],
        f"the canary under drifting inputs was not rolled back ({verdicts})": verdicts[1:2] == ["RolledBack"],
        "the tuner did not conclude on the new inputs": bool(
            summary["retuned"]["promoted"] or summary["retuned"]["message"]
        ),
        "the reckless pin was rolled out": summary["pin"]["rollouts"] == 0,
        f"Ready left True: {summary['not_ready'][:3]}": not summary["not_ready"],
        f"{summary['violations'][:3]}": not summary["violations"],
    }
    return [text for text, fine in checks.items() if not fine]


def print_summary(summary: Json, console: Console) -> None:
    """The closing table."""
    table = Table(title="What happened", title_justify="left")
    for column in ("rollout", "to", "verdict", "why", "seconds", "audited n", "disagreed k"):
        table.add_column(column, justify="right" if column in ("seconds", "audited n", "disagreed k") else "left")
    for row in summary["rollouts"]:
        table.add_row(
            row["name"], row["to"], row["verdict"], row["reason"], f"{row['seconds']:.0f}", str(row["n"]), str(row["k"])
        )
    console.print(table)
    facts = Table(show_header=False, box=None)
    off, on = summary["exits_off"], summary["with_exits"]
    for name, value in (
        ("requests", f"{summary['requests']}, failed {summary['failed']}"),
        ("agreement before the drift", f"{summary['agreement']:.4f} (budget {1 - summary['budget']:.2f})"),
        ("agreement over all", f"{summary['agreement_all']:.4f}"),
        (
            "p50",
            f"{off['p50_ms']:.1f} → {on['p50_ms']:.1f} ms (ratio {summary['p50_ratio']:.2f}; expected ≤ "
            f"{P50_EXPECTED})",
        ),
        (
            "p95",
            f"{off['p95_ms']:.1f} → {on['p95_ms']:.1f} ms (ratio {summary['p95_ratio']:.2f}; expected ≤ "
            f"{P95_EXPECTED})",
        ),
        (
            "engine time per request",
            f"{off['engine_ms']:.2f} → {on['engine_ms']:.2f} ms (saved {summary['compute_saving']:.0%})",
        ),
        ("pin", summary["pin"]["message"]),
        ("took", f"{summary['seconds']:.0f} s"),
    ):
        facts.add_row(name, value)
    console.print(facts)


def write(teller: Storyteller, summary: Json) -> None:
    """summary.json, replies.jsonl for whoever wants to look closer, and the picture."""
    from bench.demo.picture import draw

    teller.out.mkdir(parents=True, exist_ok=True)
    (teller.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    with (teller.out / "replies.jsonl").open("w") as f:
        for reply in teller.load.replies:
            f.write(json.dumps(asdict(reply)) + "\n")
    draw(teller.load.replies, teller.marks, title=teller.settings.name, path=teller.out / "story.png")
