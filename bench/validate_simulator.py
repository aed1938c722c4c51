"""Is the serving simulator right? ``python -m bench.validate_simulator``: one real worker against a simulation of the
same requests.

A worker (``offramp serve``) on a core of its own is loaded with Poisson traffic at some shares of its capacity, exits
on and off in turn, several pairs a load; both runs of a pair have the same arrival times and inputs. The simulator gets
those arrival times, the exits the worker chose and the bundle's profile. Compared is the ratio on/off of p50 and p95; a
simulated ratio passes within 10 % of the median measured one or inside the spread of the pairs.

Two constants come from exits-off runs alone: the time a request spends outside the engine (HTTP, client), from one run
at low load, and in each pair how much slower batches ran than when the profile was measured (neighbours, the engine's
own work around the model). Loads are shares of the requests that come back with exits off when twice as many are sent
as single ones could be answered.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from rich.console import Console

from bench.demo.pools import prepare_cluster_pool
from bench.front import CLIENT_CORE, SERVER_CORE, on_core
from bench.load import Traffic
from bench.openloop import OpenLoopClient, Target, infer
from bench.provenance import provenance
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.columns import chain
from offramp_core.costs import CostTable
from offramp_core.execution import carries_on
from offramp_core.plan import Execution, Plan, RampThreshold
from offramp_core.precision import EXACT
from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_core.records import ExitCosts, Records
from offramp_core.search.placement import best_plan
from offramp_core.task import top_labels
from offramp_lab.policies import NO_EXIT, PlanInForce, Trace
from offramp_lab.simulate import MAX_BATCH, OfframpBatching, SimulatedRun, serve_stream
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions

BUDGET, MAX_OVERHEAD, MAX_RAMPS = 0.02, 0.1, 3
LOW_LOAD = 0.1
TRAFFIC_ROWS = 1000  # inputs to draw from; the plan is made on their scores
WARM_UP_SECONDS, CAPACITY_SECONDS = 1.0, 3.0
FLOOD = 2.0  # times what single requests could be answered
TOLERANCE = 0.10
QUANTILES = {"p50": 0.5, "p95": 0.95}
SERVICE_UID, TOKEN = "simulator", "a-token-for-a-loopback-worker"
START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Run:
    """One stretch of load: arrival times from 0 on, latencies, and the ramp index where each request left (-1:
    none)."""

    arrivals: npt.NDArray[np.float64]
    latency: npt.NDArray[np.float64]
    exits: npt.NDArray[np.intp]
    failed: int

    def quantile(self, q: float) -> float:
        return float(np.quantile(self.latency, q))


def slowed(profile: Profile, factor: float) -> Profile:
    """The profile of a machine that takes ``factor`` times as long for everything."""
    return replace(
        profile,
        batches=tuple(
            BatchProfile(
                batch.batch_size,
                factor * batch.exact_seconds,
                tuple(factor * s for s in batch.segment_seconds),
                tuple(factor * s for s in batch.ramp_seconds),
                factor * batch.regroup_seconds,
            )
            for batch in profile.batches
        ),
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: a bundle under its traffic, and a plan with the ramp indices it makes active."""

    bundle: Bundle
    traffic: Traffic
    plan: Plan
    active: tuple[int, ...]

    @property
    def off(self) -> Plan:
        return Plan(self.bundle.manifest.backbone_digest, self.bundle.manifest.ramp_set_digest)


class LoopbackWorker:
    """One worker process with an admin port of its own."""

    def __init__(
        self,
        bundle: Path,
        *,
        settings: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        """``settings`` are further environment variables; ``command`` is a module that serves what they say, with its
        arguments, in the place of ``offramp serve``. ``within`` is a command that runs the rest of its line, in the
        network that has the address ``host`` or with a share of a processor."""
        self._host = host
        self._key = Ed25519PrivateKey.generate()
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".jsonl")  # noqa: SIM115 - lives as long as the worker
        env = {
            **os.environ,
            "OFFRAMP_ADMIN_PORT": "0",
            "OFFRAMP_SERVICE_UID": SERVICE_UID,
            "OFFRAMP_UID": "worker-1",
            "OFFRAMP_THREADS": "1",
            "OFFRAMP_PUBLIC_KEY": base64.b64encode(public).decode(),
            "OFFRAMP_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            **(settings or {}),
        }
        self._process = subprocess.Popen(
            [
                *within,
                sys.executable,
                "-m",
                *(command or ("offramp_cli", "serve", str(bundle), "--port", "0", "--host", host)),
            ],
            env=env,
            stderr=self._log,
        )
        self._epoch = 0

    def __enter__(self) -> LoopbackWorker:
        self.url = f"http://{self._host}:{self._port('public')}"
        self._admin = httpx.Client(
            base_url=f"http://{self._host}:{self._port('admin')}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=30,
        )
        end = time.monotonic() + START_SECONDS
        while httpx.get(f"{self.url}/v2/health/ready", timeout=START_SECONDS).status_code != 200:
            self._check(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def put_in_force(self, plan: Plan, *, audit_rate: float = 0.0) -> int:
        """Deliver a plan and wait until it serves; its epoch."""
        self._epoch += 1
        document = PlanDocument(
            service="simulator",
            service_uid=SERVICE_UID,
            epoch=self._epoch,
            stable=ArmPlan(plan.to_mapping(), audit_rate),
            canary=None,
            weight_percent=0,
            salt="",
            accuracy_budget=0.5,
        )
        payload = json.dumps(asdict(document))
        signature = base64.b64encode(self._key.sign(payload.encode())).decode()
        self._admin.post("/v1/config", json={"payload": payload, "signature": signature}).raise_for_status()
        end = time.monotonic() + START_SECONDS
        while self._admin.get("/v1/state").json()["epoch"] != self._epoch:
            self._check(end)
        return self._epoch

    def counts(self, epoch: int) -> dict[str, Any]:
        """The worker's own account of an epoch."""
        reply = self._admin.get("/v1/observations", params={"after": 0}).raise_for_status().json()
        return next(dict(counts) for counts in reply["counts"] if counts["epoch"] == epoch)

    def _port(self, name: str) -> int:
        end = time.monotonic() + START_SECONDS
        while True:
            for line in Path(self._log.name).read_text().splitlines():
                event = json.loads(line) if line.startswith("{") else {}
                if event.get("event") == "listening" and event.get("name") == name:
                    return int(event["port"])
            self._check(end)

    def _check(self, end: float) -> None:
        if self._process.poll() is not None or time.monotonic() > end:
            self._process.kill()
            raise SystemExit(f"the worker did not start: {Path(self._log.name).read_text()[-1000:]}")
        time.sleep(0.05)


def traffic_records(bundle: Bundle, traffic: Traffic) -> Records:
    """Scores of the fp32 network's ramps on the traffic, priced at batch size 1."""
    scores = Sessions(bundle, threads=1).tapped(traffic.x)
    reference = top_labels(scores.logits)
    batch = bundle.profile.batches[0]
    columns = chain([column.precision for column in bundle.columns], EXACT)
    return Records(
        uncertainty=scores.uncertainty[:, columns],
        agrees=scores.prediction[:, columns] == reference[:, None],
        final_agrees=np.ones(len(reference), dtype=np.bool_),
        costs=ExitCosts(np.array(batch.segment_seconds), np.array(batch.ramp_seconds)),
        profile=bundle.profile,
    )


def make_subject(bundle: Bundle, traffic: Traffic, execution: Execution) -> Subject:
    """With the plan that saves most on the traffic itself: the question here is about time, not about agreement."""
    records = traffic_records(bundle, traffic)
    found = best_plan(records, max_disagreement=BUDGET, max_ramps=MAX_RAMPS, max_overhead=MAX_OVERHEAD).plan
    ramps = tuple(RampThreshold(bundle.ramps[i].id, t) for i, t in zip(found.active, found.thresholds, strict=True))
    manifest = bundle.manifest
    plan = Plan(manifest.backbone_digest, manifest.ramp_set_digest, ramps, execution=execution)
    return Subject(bundle, traffic, plan, found.active)


def chosen_subject(path: Path | None, traffic_file: Path | None, *, execution: Execution, console: Console) -> Subject:
    """The bundle and inputs that a user names; without a bundle those of the demo."""
    if path is None:
        pool = prepare_cluster_pool(Path("build/demo-cluster"), console)
        path, traffic = pool.bundle, pool.clean
    elif traffic_file is None:
        raise SystemExit("--bundle needs --traffic: an npz with x and reference, the inputs to send")
    else:
        with np.load(traffic_file) as archive:
            traffic = Traffic(archive["x"], archive["reference"])
    traffic = Traffic(traffic.x[:TRAFFIC_ROWS], traffic.reference[:TRAFFIC_ROWS])
    return make_subject(load_bundle(path), traffic, execution)


def target_of(worker: LoopbackWorker, subject: Subject) -> Target:
    """Requests for single inputs; a reply's label and exit come back as one number, see :func:`labels_and_exits`."""
    manifest = subject.bundle.manifest
    index = {ramp.id: i for i, ramp in enumerate(manifest.ramps)}

    def request(x: npt.NDArray[np.float32]) -> bytes:
        return infer(x[None], model=manifest.name, input_name=manifest.inputs[0].name)

    def label_and_exit(body: bytes) -> int:
        reply = json.loads(body)
        label = next(o for o in reply["outputs"] if o["name"] == "label")["data"][0]
        return int(label) + manifest.n_classes * (1 + index.get(reply["parameters"]["exit"], NO_EXIT))

    port = int(worker.url.rpartition(":")[2])
    return Target("offramp", port, [request(x) for x in subject.traffic.x], label_and_exit)


def labels_and_exits(
    codes: npt.NDArray[np.int64], subject: Subject
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What the codes of answered requests say: the labels, and the ramp index where each left (-1: none)."""
    n_classes = subject.bundle.manifest.n_classes
    return codes % n_classes, codes // n_classes + NO_EXIT


def load_run(client: OpenLoopClient, subject: Subject, *, rate: float, seconds: float, seed: int) -> Run:
    """Poisson load for some seconds; the first one only warms up and is not counted."""
    trial = client.run(rate=rate, seconds=WARM_UP_SECONDS + seconds, seed=seed)
    counted = trial.due >= WARM_UP_SECONDS
    due, ok = trial.due[counted], trial.ok[counted]
    return Run(
        arrivals=due - due[0],
        latency=trial.seconds[counted],
        exits=np.where(ok, labels_and_exits(trial.label[counted], subject)[1], NO_EXIT).astype(np.intp),
        failed=int((~ok).sum()),
    )


def simulated(
    run: Run, active: tuple[int, ...], profile: Profile, execution: Execution, *, front_seconds: float
) -> SimulatedRun:
    """The same requests in the simulator."""
    plan = PlanInForce(0, active, (0.0,) * len(active))
    trace = Trace(run.exits, (plan,), np.ones(len(run.exits), dtype=np.bool_))
    return serve_stream(
        run.arrivals, trace, profile, batching=OfframpBatching(), execution=execution, front_seconds=front_seconds
    )


def slowdown(counts: dict[str, Any], profile: Profile) -> float:
    """Seconds that exits-off batches took, over what the profile says of their sizes."""
    table = CostTable(profile, sizes=range(MAX_BATCH + 1)).segment.sum(axis=1)
    promised = sum(table[int(size)] * sum(sketch.values()) for size, sketch in counts["execution"].items())
    return float(counts["busy_seconds"] / promised)


def capacity_now(worker: LoopbackWorker, client: OpenLoopClient, subject: Subject) -> float:
    """Requests a second that come back with exits off when more are sent than that."""
    worker.put_in_force(subject.off)
    flood = FLOOD / subject.bundle.profile.batches[0].exact_seconds
    trial = client.run(rate=flood, seconds=CAPACITY_SECONDS, seed=0)
    return float(trial.ok.sum() / (trial.due + trial.seconds)[trial.ok].max())


def fit_front(
    worker: LoopbackWorker, client: OpenLoopClient, subject: Subject, *, rate: float, seconds: float
) -> float:
    """Median seconds of a request outside the engine, from one exits-off run at low load; not negative."""
    epoch = worker.put_in_force(subject.off)
    run = load_run(client, subject, rate=rate, seconds=seconds, seed=1000)
    profile = subject.bundle.profile
    now = slowed(profile, slowdown(worker.counts(epoch), profile))
    return max(0.0, run.quantile(0.5) - simulated(run, (), now, "Auto", front_seconds=0.0).quantile(0.5))


def one_pair(
    worker: LoopbackWorker,
    client: OpenLoopClient,
    subject: Subject,
    front_seconds: float,
    *,
    rate: float,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Exits on and off under the same arrivals (which comes first alternates), measured and simulated."""
    arms = {"off": (subject.off, ()), "on": (subject.plan, subject.active)}
    runs: dict[str, Run] = {}
    counts: dict[str, dict[str, Any]] = {}
    for name in sorted(arms, reverse=bool(seed % 2)):
        epoch = worker.put_in_force(arms[name][0])
        runs[name] = load_run(client, subject, rate=rate, seconds=seconds, seed=seed)
        counts[name] = worker.counts(epoch)
    factor = slowdown(counts["off"], subject.bundle.profile)
    now = slowed(subject.bundle.profile, factor)
    out: dict[str, Any] = {"seed": seed, "slowdown": factor}
    for name, (plan, active) in arms.items():
        served = simulated(runs[name], active, now, plan.execution, front_seconds=front_seconds)
        out[name] = _account(runs[name], served, counts[name])
    return out


def _account(run: Run, served: SimulatedRun, counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests": len(run.latency),
        "failed": run.failed,
        "left_early": float((run.exits >= 0).mean()),
        "mean_batch": counts["requests"] / max(1, counts["batches"]),
        "busy_per_request": counts["busy_seconds"] / max(1, counts["requests"]),
        "simulated_mean_batch": served.mean_batch,
        "simulated_busy_per_request": served.busy_seconds / max(1, served.answered),
        **{f"{q}_ms": 1e3 * run.quantile(level) for q, level in QUANTILES.items()},
        **{f"simulated_{q}_ms": 1e3 * served.quantile(level) for q, level in QUANTILES.items()},
    }


def judge(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios on/off: median and range of the measured ones, median of the simulated ones, and whether they meet."""
    out = {}
    for q in QUANTILES:
        measured = np.array([pair["on"][f"{q}_ms"] / pair["off"][f"{q}_ms"] for pair in pairs])
        simulated_ratios = np.array(
            [pair["on"][f"simulated_{q}_ms"] / pair["off"][f"simulated_{q}_ms"] for pair in pairs]
        )
        middle, guess = float(np.median(measured)), float(np.median(simulated_ratios))
        low, high = (
            min(float(measured.min()), middle * (1 - TOLERANCE)),
            max(float(measured.max()), middle * (1 + TOLERANCE)),
        )
        out[q] = {
            "measured": middle,
            "measured_low": float(measured.min()),
            "measured_high": float(measured.max()),
            "simulated": guess,
            "error": guess / middle - 1,
            "passed": low <= guess <= high,
        }
    return out


def validate(subject: Subject, *, loads: list[float], pairs: int, seconds: float, console: Console) -> dict[str, Any]:
    """Everything; returns what goes into the JSON file."""
    bundle, execution = subject.bundle, subject.plan.execution
    results: list[dict[str, Any]] = []
    with on_core(SERVER_CORE):
        process = LoopbackWorker(bundle.path)
    with process as worker, on_core(CLIENT_CORE), OpenLoopClient(target_of(worker, subject)) as client:
        top = capacity_now(worker, client, subject)
        front = fit_front(worker, client, subject, rate=LOW_LOAD * top, seconds=max(8.0, seconds))
        console.print(f"capacity {top:.0f}/s; front {1e3 * front:.2f} ms")
        for load in loads:
            done = [
                one_pair(worker, client, subject, front, rate=load * top, seconds=seconds, seed=seed)
                for seed in range(pairs)
            ]
            verdict = judge(done)
            console.print(f"load {load}: {_line(verdict)}")
            results.append({"load": load, "rate": load * top, "verdict": verdict, "pairs": done})
    return {
        "bundle": bundle.manifest.name,
        "capacity": top,
        "execution": execution,
        "carries_on": carries_on(execution, bundle.profile),
        "plan": subject.plan.to_mapping(),
        "front_seconds": front,
        "slowdown": float(np.median([pair["slowdown"] for each in results for pair in each["pairs"]])),
        "pairs": pairs,
        "seconds": seconds,
        "tolerance": TOLERANCE,
        "load_average": os.getloadavg()[0],
        "loads": results,
        "passed": all(verdict["passed"] for each in results for verdict in each["verdict"].values()),
    }


def _line(verdict: dict[str, Any]) -> str:
    return "; ".join(
        f"{q} on/off measured {v['measured']:.3f} ({v['measured_low']:.3f} to {v['measured_high']:.3f}), simulated "
        f"{v['simulated']:.3f} "
        f"{'ok' if v['passed'] else 'OFF'}"
        for q, v in verdict.items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when a ratio is off."""
    parser = argparse.ArgumentParser(prog="bench.validate_simulator", description="the simulator against a real worker")
    parser.add_argument(
        "--bundle",
        type=Path,
        help="an exit bundle; left out, ResNet-56 on CIFAR-10 where OFFRAMP_DATA has it, else the demo's digits",
    )
    parser.add_argument("--traffic", type=Path, help="npz with x and reference, the inputs to send")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--execution", choices=["Auto", "ResultsOnly", "ComputeSaving"], default="Auto")
    parser.add_argument("--out", type=Path, default=Path("build/bench/simulator.json"))
    options = parser.parse_args(arguments)
    console = Console()
    subject = chosen_subject(options.bundle, options.traffic, execution=options.execution, console=console)
    result = validate(subject, loads=options.loads, pairs=options.pairs, seconds=options.seconds, console=console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "measured": provenance()}, indent=1) + "\n")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
