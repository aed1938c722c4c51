"""What both arms can take, the p95 of every service at a part of that, and what a flood of one does to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.front import find_capacities
from bench.openloop import Trial
from bench.sharing.services import OBJECTIVE_SECONDS, ROWS, Arm, Floats, Service, homes, zipf

LOAD = 0.6
FLOOD = 10.0


def measured(of: Sequence[Service], arms: Mapping[str, Arm], *, rounds: int, seconds: float, console: Console) -> Any:
    """Everything that is measured under load, as plain numbers."""
    shares = zipf(len(of))
    memory = {name: arm.proportional_bytes() for name, arm in arms.items()}
    console.print({name: f"{size / 2**20:,.0f} MiB" for name, size in memory.items()})
    capacity = capacities(arms, shares, seconds=seconds)
    console.print({name: f"{rate:,.0f} requests/s" for name, rate in capacity.items()})
    rate = LOAD * capacity["separate"]
    trials: dict[str, list[Trial]] = {name: [] for name in arms}
    order = list(arms)
    for seed in track(range(rounds), description="0.6 of it", console=console):
        for name in order[seed % 2 :] + order[: seed % 2]:
            with arms[name].awake() as arm:
                trials[name].append(arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares))
    return {
        "memory": memory,
        "capacity": capacity,
        "rate": rate,
        "p95_ms": {name: by_service(found, of) for name, found in trials.items()},
        "refused": {name: refused(found) for name, found in trials.items()},
        "flood": flood(of, arms["shared"], rate=rate, rounds=rounds, seconds=seconds, console=console),
    }


def capacities(arms: Mapping[str, Arm], shares: Floats, *, seconds: float) -> dict[str, float]:
    """The highest rate of each whose p95 over all requests meets the objective."""

    def trial(name: str, rate: float, seed: int) -> Trial:
        with arms[name].awake() as arm:
            return arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares)

    return find_capacities(trial, arms, objective=OBJECTIVE_SECONDS, low=50.0, high=4000.0)


def flood(of: Sequence[Service], arm: Arm, *, rate: float, rounds: int, seconds: float, console: Console) -> Any:
    """The others' p95 with and without one that asks for ten times its guaranteed share of the shared worker."""
    shares = zipf(len(of))
    held = max(homes(of), key=len)
    flooding = held[len(held) // 2]
    index = next(i for i, service in enumerate(of) if service.name == flooding.name)
    more = shares.copy()
    more[index] = FLOOD / len(held) / flooding.seconds / rate
    beside = [i for i, service in enumerate(of) if service in held and i != index]
    p95: dict[str, list[float]] = {"without": [], "with": []}
    lost = {"without": 0.0, "with": 0.0}
    cases = [("without", shares, rate), ("with", more / more.sum(), rate * float(more.sum()))]
    with arm.awake():
        for seed in track(range(rounds), description="a flood", console=console):
            for name, asked, total in cases[:: 1 if seed % 2 else -1]:
                trial = arm.run(rate=total, seconds=seconds, seed=seed, shares=asked)
                of_others = np.isin(trial.row // ROWS, beside)
                p95[name].append(_p95_ms(np.where(trial.ok, trial.seconds, np.inf)[of_others]))
                lost[name] += float((~trial.ok)[of_others].mean()) / rounds
    return {
        "service": flooding.name,
        "asked": FLOOD / len(held),
        "p95_ms": {name: _finite(float(np.median(each))) for name, each in p95.items()},
        "ratio": _finite(float(np.median(np.array(p95["with"]) / np.array(p95["without"])))),
        "others_refused": lost,
    }


def by_service(trials: Sequence[Trial], of: Sequence[Service]) -> dict[str, float | None]:
    """p95 of each service over all its requests of all rounds, in milliseconds; refused ones are infinitely late, and
    None says that there were too many of them."""
    seconds = np.concatenate([np.where(trial.ok, trial.seconds, np.inf) for trial in trials])
    owner = np.concatenate([trial.row // ROWS for trial in trials])
    p95 = [_p95_ms(seconds[owner == i]) for i in range(len(of))]
    return {service.name: _finite(ms) for service, ms in zip(of, p95, strict=True)}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _p95_ms(seconds: Floats) -> float:
    return float(np.percentile(seconds, 95, method="higher")) * 1e3 if len(seconds) else 0.0


def refused(trials: Sequence[Trial]) -> float:
    """Share of all requests."""
    return float(np.mean(np.concatenate([~trial.ok for trial in trials])))
