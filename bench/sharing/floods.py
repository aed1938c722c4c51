"""What a flood of one service does to the others in its worker: ``python -m bench.sharing.floods``.

The worker has the core to itself and gets 0.6 of what it can do; then one of its services asks for ten times its share
besides. The same with the second worker beside it on the core, which takes its time of the core as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.front import CLIENT_CORE, find_capacities, on_core
from bench.provenance import provenance
from bench.sharing.load import LOAD, finite, in_turn, p95_ms, share
from bench.sharing.services import OBJECTIVE_SECONDS, ROWS, Arm, Floats, Service, homes, kinds, services, shared, zipf

OUT = Path("build/bench/floods.json")
FLOOD = 10.0
LEAST_RATE = 50.0  # requests a second; taken where not even these were in time


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked of an arm without a flood: the share of each service, and requests a second."""

    arm: Arm
    shares: Floats
    rate: float


def measured(of: Sequence[Service], arm: Arm, *, rounds: int, seconds: float, console: Console) -> Any:
    """The floods of some services, each of their worker alone and beside the other one."""
    held = max(homes(of), key=len)
    worker = arm.workers[homes(of).index(held)]
    own = zipf(len(of)) * [service in held for service in of]
    found: dict[str, list[Any]] = {}
    for traffic in (
        _traffic(replace(arm, name="alone", workers=[worker]), own / own.sum(), seconds=seconds),
        _traffic(replace(arm, name="beside"), zipf(len(of)), seconds=seconds),
    ):
        console.print(f"{traffic.arm.name}: {traffic.rate:,.0f} requests/s")
        found[traffic.arm.name] = [
            under(by, of, held, traffic, rounds=rounds, seconds=seconds)
            for by in track(chosen(held), description=traffic.arm.name, console=console)
        ]
    return found


def _traffic(arm: Arm, shares: Floats, *, seconds: float) -> Traffic:
    with arm.awake():
        capacity = find_capacities(
            lambda _, rate, seed: arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares),
            [arm.name],
            objective=OBJECTIVE_SECONDS,
            low=LEAST_RATE,
            high=4000.0,
        )
    return Traffic(arm, shares, LOAD * max(capacity[arm.name], LEAST_RATE))


def chosen(held: Sequence[Service]) -> list[Service]:
    """Of those in one worker a popular one of each kind of model, and one in the middle."""
    by_kind = {service.seconds: service for service in reversed(held[: len(held) // 2])}
    return list({service.name: service for service in (*by_kind.values(), held[len(held) // 2])}.values())


def under(
    by: Service, of: Sequence[Service], held: Sequence[Service], traffic: Traffic, *, rounds: int, seconds: float
) -> Any:
    """The p95 of the others in its worker without and with a service that asks for ten times its share."""
    index = of.index(by)
    flooded = traffic.shares * traffic.rate
    flooded[index] *= FLOOD
    beside = [i for i, service in enumerate(of) if service in held and i != index]
    cases = {"without": (traffic.shares, traffic.rate), "with": (flooded / flooded.sum(), float(flooded.sum()))}
    p95: dict[str, list[float]] = {name: [] for name in cases}
    refusals: dict[str, list[float]] = {name: [] for name in cases}
    answered = []
    with traffic.arm.awake():
        for seed, name in in_turn(range(rounds), list(cases)):
            shares, rate = cases[name]
            trial = traffic.arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares)
            owner = trial.row // ROWS
            of_others = np.isin(owner, beside)
            p95[name].append(p95_ms(np.where(trial.ok, trial.seconds, np.inf)[of_others]))
            refusals[name].append(share((~trial.ok)[of_others]))
            if name == "with":
                answered.append(share(trial.ok[owner == index]))
    with np.errstate(divide="ignore", invalid="ignore"):  # where nobody else asked, or all were refused
        ratios = np.array(p95["with"]) / np.array(p95["without"])
    return {
        "service": by.name,
        "model_ms": by.seconds * 1e3,
        "rate": float(flooded[index]),
        "answered": float(np.mean(answered)),
        "p95_ms": {name: finite(float(np.median(each))) for name, each in p95.items()},
        "ratio": finite(float(np.median(ratios))),
        "others_refused": {name: float(np.mean(each)) for name, each in refusals.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.sharing.floods", description="one service at ten times its share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of every trial")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console()
    of = services(kinds(console))
    with shared(of) as arm, on_core(CLIENT_CORE):
        found = measured(of, arm, rounds=options.rounds, seconds=options.seconds, console=console)
    console.print(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"measured": provenance(), **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
