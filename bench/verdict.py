"""From the verdict to the last batch under the bad plan: ``offramp up`` with twenty real workers. Writes
build/bench/verdict.json.

In every round a plan that lets nearly everybody leave at the first ramp is put on trial with a certificate that lies:
it is written into the state folder as the tuner would have written it. The control loop canaries it, its own accuracy
gate rejects it on audited requests, and the rollback goes the way that every rollback goes: verdict persisted, plan
published, workers poked. Nothing here tells the operator.

Three moments are read from three sides. *Verdict*: the operator's log line that follows the persisted status. *In
force*: the worker's own line when a batch can no longer run under the bad plan. *Last reply*: when the client got the
last answer that says it came from the canary. The last batch lies before both of the latter, so the later of them is
reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench.demo.embedded import EmbeddedStage
from bench.demo.pools import Pool, prepare_digits
from bench.load import OpenLoop, Reply
from bench.provenance import provenance
from offramp_core.control.codec import to_json
from offramp_core.control.objects import ConfigStatus, Prediction
from offramp_core.plan import Plan, RampThreshold
from offramp_operator.local.store import ObjectStore
from offramp_operator.shell.manifests import CONFIG_KIND, ROLLOUT_KIND

WORKERS, ROUNDS, RATE = 20, 5, 60.0
GOAL_SECONDS = 2.0
BUDGET = (
    "0.005"  # no certificate comes from the few records of such a run, so nothing but the bad plans is ever canaried
)
WEIGHT = 50
START_SECONDS, CANARY_SECONDS, VERDICT_SECONDS, AFTER_SECONDS = 600.0, 180.0, 180.0, 4.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds after the verdict was persisted: of the publication, of every worker's last canary batch at the latest,
    and of the last reply from the canary.

    ``canary_replies`` are those before the verdict; without them there would be nothing to end.
    """

    published: float
    in_force: tuple[float, ...]
    last_reply: float
    canary_replies: int
    reason: str

    @property
    def last_batch(self) -> float:
        """No batch ran under the bad plan later than this."""
        return max(*self.in_force, self.last_reply)

    def to_mapping(self) -> Json:
        return {
            "published": self.published,
            "in_force_first": min(self.in_force),
            "in_force_last": max(self.in_force),
            "workers": len(self.in_force),
            "last_reply": self.last_reply,
            "last_batch": self.last_batch,
            "canary_replies": self.canary_replies,
            "reason": self.reason,
        }


def manifest_of(bundle: Path, *, workers: int) -> Json:
    """One service of many small workers whose canary goes to half of the batches at once."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "digits"},
        "spec": {
            "model": {"uri": f"file://{bundle.resolve()}"},
            "objective": {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": BUDGET}},
            "ramps": {"mode": "Auto", "maxOverhead": "1"},
            "rollout": {"steps": [{"weight": WEIGHT}]},
            "replicas": workers,
        },
    }


class Trials:
    """Puts bad plans on trial and reads what became of them."""

    def __init__(self, pool: Pool, stage: EmbeddedStage, work: Path, load: OpenLoop) -> None:
        self._pool, self._stage, self._load = pool, stage, load
        self._state, self._log = work / "state", work / "up.jsonl"

    async def round(self, number: int) -> Round:
        """One bad plan, from its creation until the last worker has left it."""
        plan = await self._create(number)
        name = f"digits-{number}"
        begun = time.time()
        await _until(lambda: self._canary(plan, since=begun), CANARY_SECONDS, "the canary serving")
        verdict = await _until(lambda: self._event("rollout-phase", name, "RollingBack"), VERDICT_SECONDS, "a verdict")
        await asyncio.sleep(AFTER_SECONDS)
        await _until(
            lambda: self._event("rollout-phase", name, "RolledBack"), VERDICT_SECONDS, "the end of the rollback"
        )
        at = _seconds(verdict["time"])
        published = next(e for e in self._events("published") if _seconds(e["time"]) >= at)
        replies = self._canary(plan, since=begun)
        status = next(r for r in await self._stage.rollouts() if r["metadata"]["name"] == name)["status"]
        return Round(
            _seconds(published["time"]) - at,
            tuple(seconds - at for seconds in self._switched(int(published["epoch"]))),
            max((done for done in replies if done > at), default=at) - at,
            sum(done <= at for done in replies),
            str(status["reason"]),
        )

    async def _create(self, number: int) -> Plan:
        """What the tuner writes after a test that a plan passed, with figures that no test gave."""
        service = await self._stage.service()
        owner = {"kind": service["kind"], "name": "digits", "uid": service["metadata"]["uid"]}
        metadata = {"namespace": service["metadata"]["namespace"], "ownerReferences": [owner]}
        store = ObjectStore(self._state / "objects")
        baseline = store.get(CONFIG_KIND, service["status"]["stableConfig"])
        assert baseline is not None
        spec = baseline["spec"]
        threshold = Decimal("0.999") - Decimal(number) / 1000  # another plan every time: a rejected one cools down
        plan = Plan(
            spec["backboneDigest"], spec["rampSetDigest"], (RampThreshold(self._pool.reckless_ramp, threshold),)
        )
        lie = {"method": "none", "budget": BUDGET, "delta": "0.05", "n": 10_000, "k": 0}
        status = ConfigStatus("Tuned", "Certified", (lie,), Prediction(0.5, 0.0))
        store.create(
            CONFIG_KIND, plan.name("digits"), spec=plan.to_mapping(), status=to_json(status), metadata=metadata
        )
        rollout = {
            "serviceName": "digits",
            "from": service["status"]["stableConfig"],
            "to": plan.name("digits"),
            "generation": service["metadata"]["generation"],
            "cause": "Tuned",
        }
        store.create(ROLLOUT_KIND, f"digits-{number}", spec=rollout, metadata=metadata)
        return plan

    def _canary(self, plan: Plan, *, since: float) -> list[float]:
        """When replies from the canary arrived, on the wall clock."""
        offset = time.time() - time.perf_counter()
        done = [offset + r.sent_at + r.seconds for r in self._load.replies if r.arm == "canary" and self._is(plan, r)]
        return [seconds for seconds in done if seconds >= since]

    def _is(self, plan: Plan, reply: Reply) -> bool:
        return bool(reply.config) and plan.content_hash.startswith(reply.config.rpartition("-")[2])

    def _switched(self, epoch: int) -> list[float]:
        """When each worker ended the canary that an epoch takes back."""
        times = []
        for log in sorted((self._state / "logs").glob("*.log")):
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"time"')]
            marks = [
                e
                for e in lines
                if (e["event"], e.get("epoch")) in (("canary-ended", epoch - 1), ("plan-in-force", epoch))
            ]
            if not marks:
                raise SystemExit(f"{log} does not tell when its worker left the canary of epoch {epoch - 1}")
            times.append(_seconds(marks[0]["time"]))
        return times

    def _events(self, name: str) -> list[Json]:
        lines = self._log.read_text().splitlines()
        return [event for line in lines if line.endswith("}") and (event := json.loads(line)).get("event") == name]

    def _event(self, name: str, rollout: str, phase: str) -> Json | None:
        found = (e for e in self._events(name) if e.get("rollout") == rollout and e.get("phase") == phase)
        return next(found, None)


async def _until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``condition`` gives something."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {seconds:.0f} s; see build/verdict/up.jsonl")
        await asyncio.sleep(0.1)
    return value


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def measure(*, workers: int, rounds: int, rate: float, console: Console) -> Json:
    """Everything; returns what goes into the JSON file."""
    pool = prepare_digits(Path("build/demo"), console)
    work = Path("build/verdict")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    stage = EmbeddedStage(work / "service.yaml", work / "state", work / "up.jsonl")
    await stage.apply(manifest_of(pool.bundle, workers=workers))
    stage.start()
    try:
        load = OpenLoop([await stage.url()], pool.model, pool.clean, rate, input_name=pool.input_name)
        trials = Trials(pool, stage, work, load)
        await _until(lambda: _ready(work / "up.jsonl") >= workers, START_SECONDS, f"{workers} workers")
        await _serving(stage)
        console.print(f"{workers} workers serve; {rate:g} requests a second")
        running = asyncio.create_task(load.run())
        done = []
        for number in range(1, rounds + 1):
            done.append(await trials.round(number))
            console.print(f"round {number}: {json.dumps({k: v for k, v in done[-1].to_mapping().items()})}")
        load.stop()
        await running
    finally:
        code = stage.stop()
    return {
        "workers": workers,
        "rate": rate,
        "weight": WEIGHT,
        "rounds": [each.to_mapping() for each in done],
        "last_batch": {"median": median(r.last_batch for r in done), "worst": max(r.last_batch for r in done)},
        "requests": len(load.replies),
        "failed": sum(not reply.ok for reply in load.replies),
        "load_average": os.getloadavg()[0],
        "exit_code": code,
    }


async def _serving(stage: EmbeddedStage) -> None:
    end = time.monotonic() + START_SECONDS
    while (await stage.service()).get("status", {}).get("phase") != "Ready":
        if time.monotonic() > end:
            raise SystemExit("the service did not become Ready; see build/verdict/up.jsonl")
        await asyncio.sleep(0.2)


def _ready(log: Path) -> int:
    return len(
        {e["worker"] for line in log.read_text().splitlines() if '"worker-ready"' in line for e in [json.loads(line)]}
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when the worst round took longer than the goal."""
    parser = argparse.ArgumentParser(
        prog="bench.verdict", description="from the verdict to the last batch under the bad plan"
    )
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second over all workers")
    parser.add_argument("--out", type=Path, default=Path("build/bench/verdict.json"))
    options = parser.parse_args(arguments)
    console = Console(width=200)
    result = asyncio.run(measure(workers=options.workers, rounds=options.rounds, rate=options.rate, console=console))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "measured": provenance()}, indent=1) + "\n")
    last = result["last_batch"]
    console.print(
        f"verdict to last batch: median {last['median']:.2f} s, worst {last['worst']:.2f} s; {result['failed']} failed"
    )
    return 0 if last["worst"] < GOAL_SECONDS and not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
