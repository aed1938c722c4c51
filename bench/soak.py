"""``make soak``: one worker at twice its capacity for ten minutes, exits off and on by turns. Writes
build/bench/soak.json.

Asked are: is every accepted answer right, is the p95 of the accepted within the latency objective, are the others
refused at once, and does memory stay flat? An answer is right when its label is the model's own (exits off, or nothing
left early) or that of the ramp that the reply names, and that ramp may be left at the plan's threshold; scores are
computed here, by the same bundle. Inputs so close to a tie or to the threshold that another batch size may round them
to the other side are not judged.

Requests are single inputs at Poisson times, whatever the worker does; latency counts from the intended time. Capacity
is the most that came back within the objective, over a ladder of rates. Memory is the worker's resident set: the end
against the end of the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.openloop import OpenLoopClient, Trial
from bench.provenance import provenance
from bench.validate_simulator import LoopbackWorker, Subject, chosen_subject, labels_and_exits, target_of
from offramp_core.batching import exact_seconds
from offramp_core.task import top_labels
from offramp_lab.policies import NO_EXIT
from offramp_worker.engine.execution.sessions import Sessions

SECONDS, SLO_SECONDS, OVERLOAD = 600.0, 0.05, 2.0
AUDIT_RATE = 0.02
LOWEST, STEP = 0.1, 1.3  # of what the profile promises at the best batch size, and from rate to rate
ENOUGH = 0.9  # of the requests come back in time, or the rate is too much
STEP_SECONDS, STEP_SHARE = 3.0, 0.05  # at most, and of the whole soak
ROUNDS = 4  # of exits off and exits on
WARM_UP_SHARE, EDGE_SHARE = 0.2, 0.1
MAX_GROWTH = 0.05
REFUSED_WITHIN = 0.5  # of the objective, for 95 % of the refusals
TIE, NEAR = 1e-3, 1e-3
OK, REFUSED = 200, 429


@dataclass(frozen=True, slots=True)
class Expected:
    """What the bundle says of every input: ``final`` [n] labels, ``tied`` [n], and of every ramp ``said`` [n, R] and
    ``uncertainty`` [n, R]."""

    final: npt.NDArray[np.int64]
    tied: npt.NDArray[np.bool_]
    said: npt.NDArray[np.int64]
    uncertainty: npt.NDArray[np.float64]


def expect(subject: Subject) -> Expected:
    """Scores of all inputs."""
    scores = Sessions(subject.bundle, threads=1).tapped(subject.traffic.x)
    top = np.sort(scores.logits, axis=1)[:, -2:]
    return Expected(
        top_labels(scores.logits),
        np.asarray(top[:, 1] - top[:, 0] <= TIE),
        scores.prediction.astype(np.int64),
        scores.uncertainty.astype(np.float64),
    )


def wrong_answers(trial: Trial, subject: Subject, expected: Expected, *, exits: bool) -> int:
    """Accepted answers that are not what the model, or the ramp that the reply names, says of this input."""
    row = trial.row[trial.ok]
    label, left = labels_and_exits(trial.label[trial.ok], subject)
    limits = np.full(len(subject.bundle.ramps), -np.inf)
    if exits:
        limits[list(subject.active)] = [float(ramp.threshold) for ramp in subject.plan.ramps]
    at_end = left == NO_EXIT
    wrong = at_end & (label != expected.final[row]) & ~expected.tied[row]
    ramp = np.where(at_end, 0, left)
    allowed = expected.uncertainty[row, ramp] < limits[ramp] + NEAR
    wrong |= ~at_end & ((label != expected.said[row, ramp]) | ~allowed)
    return int(wrong.sum())


@dataclass
class Memory:
    """The resident set of a process, sampled once a second. Linux."""

    pid: int
    samples: list[int] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample as long as the context lasts."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(1.0):
                self.samples.append(self.now())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def now(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def growth(self) -> tuple[float, int, int]:
        """Share that the end is above what followed the warm-up, and both in bytes (medians)."""
        n = len(self.samples)
        edge, warm = max(1, round(EDGE_SHARE * n)), round(WARM_UP_SHARE * n)
        first, last = np.median(self.samples[warm : warm + edge]), np.median(self.samples[n - edge :])
        return float(last / first - 1), int(first), int(last)


def capacity(
    client: OpenLoopClient, subject: Subject, *, slo_seconds: float, step_seconds: float
) -> tuple[float, list[dict[str, float]]]:
    """Requests a second answered within the objective, at best; and the ladder of rates, up to one that is too much."""
    seconds = exact_seconds(subject.bundle.profile)
    rate = LOWEST * max(n / seconds[n] for n in range(1, len(seconds)))
    ladder: list[dict[str, float]] = []
    while not ladder or ladder[-1]["goodput"] >= ENOUGH * ladder[-1]["rate"]:
        goodput = 0.0
        for seed in (len(ladder), 1000 + len(ladder)):  # one stall of the machine is no limit of the worker's
            if goodput < ENOUGH * rate:
                trial = client.run(rate=rate, seconds=step_seconds, seed=seed)
                goodput = max(goodput, trial.goodput(slo_seconds))
        ladder.append({"rate": rate, "goodput": goodput})
        rate *= STEP
    return max(each["goodput"] for each in ladder), ladder


def account(trial: Trial, subject: Subject, expected: Expected, *, exits: bool, slo_seconds: float) -> dict[str, Any]:
    """One stretch of load."""
    accepted, refused = trial.seconds[trial.ok], trial.seconds[trial.status == REFUSED]
    codes, counts = np.unique(trial.status, return_counts=True)
    return {
        "exits": exits,
        "requests": len(trial.status),
        "statuses": {str(code): int(n) for code, n in zip(codes, counts, strict=True)},
        "accepted_share": float(trial.ok.mean()),
        "left_early": float((trial.label[trial.ok] >= subject.bundle.manifest.n_classes).mean())
        if trial.ok.any()
        else 0.0,
        "wrong": wrong_answers(trial, subject, expected, exits=exits),
        "late_share": float((accepted > slo_seconds).mean()) if len(accepted) else 1.0,
        "accepted_ms": _quantiles(accepted),
        "refused_ms": _quantiles(refused),
    }


def _quantiles(seconds: npt.NDArray[np.float64]) -> dict[str, float | None]:
    return {
        f"p{round(100 * q)}": 1e3 * float(np.quantile(seconds, q)) if len(seconds) else None for q in (0.5, 0.95, 0.99)
    }


def soak(subject: Subject, *, seconds: float, slo_seconds: float, overload: float, console: Console) -> dict[str, Any]:
    """Everything; returns what goes into the JSON file."""
    expected = expect(subject)
    settings = {"OFFRAMP_LATENCY_SECONDS": f"{slo_seconds:g}"}
    stretches: list[dict[str, Any]] = []
    with (
        LoopbackWorker(subject.bundle.path, settings=settings) as worker,
        OpenLoopClient(target_of(worker, subject)) as client,
    ):
        worker.put_in_force(subject.off)
        step_seconds = min(STEP_SECONDS, STEP_SHARE * seconds)
        top, ladder = capacity(client, subject, slo_seconds=slo_seconds, step_seconds=step_seconds)
        if top == 0:
            raise SystemExit(
                f"nothing came back within {1e3 * slo_seconds:g} ms at any rate; is the machine busy? --slo-ms"
            )
        console.print(f"capacity {top:.0f}/s within {1e3 * slo_seconds:g} ms; load {overload * top:.0f}/s")
        memory = Memory(worker.pid)
        with memory.watched():
            for number in range(2 * ROUNDS):
                exits = number % 2 == 1
                worker.put_in_force(subject.plan if exits else subject.off, audit_rate=AUDIT_RATE if exits else 0.0)
                trial = client.run(rate=overload * top, seconds=seconds / (2 * ROUNDS), seed=100 + number)
                stretches.append(account(trial, subject, expected, exits=exits, slo_seconds=slo_seconds))
                console.print(_line(stretches[-1]))
    growth, first, last = memory.growth()
    result = {
        "bundle": subject.bundle.manifest.name,
        "seconds": seconds,
        "slo_ms": 1e3 * slo_seconds,
        "overload": overload,
        "capacity": top,
        "ladder": ladder,
        "plan": subject.plan.to_mapping(),
        "stretches": stretches,
        "memory": {"growth": growth, "after_warm_up_bytes": first, "end_bytes": last, "samples": memory.samples},
        "load_average": os.getloadavg()[0],
        "measured": provenance(),
    }
    return {**result, "passed": verdict(stretches, growth=growth, slo_seconds=slo_seconds)}


def verdict(stretches: list[dict[str, Any]], *, growth: float, slo_seconds: float) -> dict[str, bool]:
    """What was asked, and whether it held in every stretch."""
    slo_ms = 1e3 * slo_seconds
    return {
        "every accepted answer is right": all(s["wrong"] == 0 and s["statuses"].get(str(OK), 0) > 0 for s in stretches),
        "every request is answered or refused": all(set(s["statuses"]) <= {str(OK), str(REFUSED)} for s in stretches),
        "p95 of the accepted is within the objective": all(
            (s["accepted_ms"]["p95"] or slo_ms) <= slo_ms for s in stretches
        ),
        "the others are refused at once": all(
            (s["refused_ms"]["p95"] or 0.0) <= REFUSED_WITHIN * slo_ms for s in stretches
        ),
        "memory is flat": growth < MAX_GROWTH,
    }


def _line(stretch: dict[str, Any]) -> str:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    return (
        f"exits {'on ' if stretch['exits'] else 'off'}: {stretch['accepted_share']:.0%} accepted, {stretch['wrong']} "
        "wrong, "
        f"p50/p95/p99 {'/'.join(ms(v) for v in stretch['accepted_ms'].values())} ms; "
        f"refused p50/p95/p99 {'/'.join(ms(v) for v in stretch['refused_ms'].values())} ms; statuses "
        f"{stretch['statuses']}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when something asked did not hold."""
    parser = argparse.ArgumentParser(prog="bench.soak", description="one worker at twice its capacity")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--slo-ms", type=float, default=1e3 * SLO_SECONDS)
    parser.add_argument("--overload", type=float, default=OVERLOAD, help="load as a multiple of the capacity measured")
    parser.add_argument(
        "--bundle",
        type=Path,
        help="an exit bundle; left out, ResNet-56 on CIFAR-10 where OFFRAMP_DATA has it, else the demo's digits",
    )
    parser.add_argument("--traffic", type=Path, help="npz with x and reference, the inputs to send")
    parser.add_argument("--out", type=Path, default=Path("build/bench/soak.json"))
    options = parser.parse_args(arguments)
    console = Console(width=200)
    subject = chosen_subject(options.bundle, options.traffic, execution="Auto", console=console)
    result = soak(
        subject, seconds=options.seconds, slo_seconds=options.slo_ms / 1e3, overload=options.overload, console=console
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for asked, held in result["passed"].items():
        console.print(f"{'yes' if held else 'NO '} {asked}")
    return 0 if all(result["passed"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
