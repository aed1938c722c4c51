"""What both arms can take, and the p95 of every service at a part of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from bench.front import find_capacities
from bench.openloop import Trial
from bench.sharing.services import OBJECTIVE_SECONDS, ROWS, Arm, Floats, Service, zipf

LOAD = 0.6
LEAST_RATE = 50.0  # requests a second; taken where not even these were in time


def measured(of: Sequence[Service], arms: Mapping[str, Arm], *, rounds: int, seconds: float, console: Console) -> Any:
    """Everything that is measured under load, as plain numbers."""
    shares = zipf(len(of))
    memory = {name: arm.proportional_bytes() for name, arm in arms.items()}
    console.print({name: f"{size / 2**20:,.0f} MiB" for name, size in memory.items()})
    capacity = capacities(arms, shares, seconds=seconds)
    console.print({name: f"{rate:,.0f} requests/s" for name, rate in capacity.items()})
    rate = LOAD * max(capacity["separate"], LEAST_RATE)
    trials: dict[str, list[Trial]] = {name: [] for name in arms}
    for seed, name in in_turn(track(range(rounds), description="0.6 of it", console=console), list(arms)):
        with arms[name].awake() as arm:
            trials[name].append(arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares))
    return {
        "memory": memory,
        "capacity": capacity,
        "rate": rate,
        "p95_ms": {name: by_service(found, of) for name, found in trials.items()},
        "refused": {name: refused(found) for name, found in trials.items()},
    }


def in_turn(rounds: Iterable[int], names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each round all of them; who begins changes."""
    for number in rounds:
        for name in names[:: -1 if number % 2 else 1]:
            yield number, name


def capacities(arms: Mapping[str, Arm], shares: Floats, *, seconds: float) -> dict[str, float]:
    """The highest rate of each whose p95 over all requests meets the objective."""

    def trial(name: str, rate: float, seed: int) -> Trial:
        with arms[name].awake() as arm:
            return arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares)

    return find_capacities(trial, arms, objective=OBJECTIVE_SECONDS, low=LEAST_RATE, high=4000.0)


def by_service(trials: Sequence[Trial], of: Sequence[Service]) -> dict[str, float | None]:
    """p95 of each service over all its requests of all rounds, in milliseconds; refused ones are infinitely late, and
    None says that there were too many of them."""
    seconds = np.concatenate([np.where(trial.ok, trial.seconds, np.inf) for trial in trials])
    owner = np.concatenate([trial.row // ROWS for trial in trials])
    p95 = [p95_ms(seconds[owner == i]) for i in range(len(of))]
    return {service.name: finite(ms) for service, ms in zip(of, p95, strict=True)}


def finite(value: float) -> float | None:
    """For JSON, which knows no infinity."""
    return value if np.isfinite(value) else None


def p95_ms(seconds: Floats) -> float:
    """In milliseconds."""
    return float(np.percentile(seconds, 95, method="higher")) * 1e3 if len(seconds) else 0.0


def refused(trials: Sequence[Trial]) -> float:
    """Share of all requests."""
    return share(np.concatenate([~trial.ok for trial in trials]))


def share(of: npt.NDArray[np.bool_]) -> float:
    """Of requests, those that are true; 0 where there are none, as in a short trial of a service that few ask for."""
    return float(of.mean()) if len(of) else 0.0
