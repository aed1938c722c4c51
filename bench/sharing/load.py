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
        "floods": [
            under(by, of, arms["shared"], rate=rate, rounds=rounds, seconds=seconds)
            for by in track(floods(max(homes(of), key=len)), description="floods", console=console)
        ],
    }


def capacities(arms: Mapping[str, Arm], shares: Floats, *, seconds: float) -> dict[str, float]:
    """The highest rate of each whose p95 over all requests meets the objective."""

    def trial(name: str, rate: float, seed: int) -> Trial:
        with arms[name].awake() as arm:
            return arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares)

    return find_capacities(trial, arms, objective=OBJECTIVE_SECONDS, low=50.0, high=4000.0)


def floods(held: Sequence[Service]) -> list[Service]:
    """Of those in one worker a popular one of each kind of model, and one in the middle."""
    kinds = {service.seconds: service for service in reversed(held[: len(held) // 2])}
    return list({service.name: service for service in (*kinds.values(), held[len(held) // 2])}.values())


def under(by: Service, of: Sequence[Service], arm: Arm, *, rate: float, rounds: int, seconds: float) -> Any:
    """The p95 of the others in its worker without and with a service that asks for ten times its share."""
    shares = zipf(len(of))
    index = of.index(by)
    flooded = shares * rate
    flooded[index] *= FLOOD
    held = next(held for held in homes(of) if by in held)
    beside = [i for i, service in enumerate(of) if service in held and i != index]
    cases = [("without", shares, rate), ("with", flooded / flooded.sum(), float(flooded.sum()))]
    p95: dict[str, list[float]] = {"without": [], "with": []}
    refusals: dict[str, list[float]] = {"without": [], "with": []}
    with arm.awake():
        for seed in range(rounds):
            for name, asked, total in cases[:: 1 if seed % 2 else -1]:
                trial = arm.run(rate=total, seconds=seconds, seed=seed, shares=asked)
                of_others = np.isin(trial.row // ROWS, beside)
                p95[name].append(_p95_ms(np.where(trial.ok, trial.seconds, np.inf)[of_others]))
                refusals[name].append(float((~trial.ok)[of_others].mean()))
    return {
        "service": by.name,
        "model_ms": by.seconds * 1e3,
        "rate": float(flooded[index]),
        "p95_ms": {name: _finite(float(np.median(each))) for name, each in p95.items()},
        "ratio": _finite(float(np.median(np.array(p95["with"]) / np.array(p95["without"])))),
        "others_refused": {name: float(np.mean(each)) for name, each in refusals.items()},
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
