"""What a flood of one service does to the others in its worker: ``python -m bench.sharing.floods``.

The worker has the core to itself and gets 0.6 of what it can do. Trials without a flood take turns with those in which
one of its services asks for ten times its share besides. p95 is over the others' requests of all rounds, and how sure
its growth is says a bootstrap over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from bench.front import CLIENT_CORE, find_capacities, on_core
from bench.openloop import Trial
from bench.provenance import provenance
from bench.sharing.load import LEAST_RATE, LOAD, finite, in_turn, p95_ms, share
from bench.sharing.services import OBJECTIVE_SECONDS, ROWS, Arm, Floats, Service, homes, kinds, services, shared, zipf

OUT = Path("build/bench/floods.json")
FLOOD = 10.0
CALM = "none"  # the trials without a flood
RESAMPLES, COVERED = 1000, (2.5, 97.5)


def measured(of: Sequence[Service], arm: Arm, *, rounds: int, seconds: float, console: Console) -> Any:
    """The floods of some services of the worker that holds the most."""
    held = max(homes(of), key=len)
    alone = replace(arm, name="alone", workers=[arm.workers[homes(of).index(held)]])
    rates = zipf(len(of)) * [service in held for service in of]
    rates *= _rate(alone, rates / rates.sum(), seconds=seconds) / rates.sum()
    console.print(f"{rates.sum():,.0f} requests/s")
    floods = {service.name: service for service in chosen(held)}
    asked = {CALM: rates} | {name: _flooded(rates, of.index(service)) for name, service in floods.items()}
    trials = trials_of(alone, asked, rounds=rounds, seconds=seconds, console=console)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "floods": [
            {
                "service": name,
                "model_ms": by.seconds * 1e3,
                "rate": float(asked[name][of.index(by)]),
                **compared(trials[CALM], trials[name], of.index(by)),
            }
            for name, by in floods.items()
        ],
    }


def _rate(arm: Arm, shares: Floats, *, seconds: float) -> float:
    """Requests a second without a flood."""
    with arm.awake():
        capacity = find_capacities(
            lambda _, rate, seed: arm.run(rate=rate, seconds=seconds, seed=seed, shares=shares),
            [arm.name],
            objective=OBJECTIVE_SECONDS,
            low=LEAST_RATE,
            high=4000.0,
        )
    return LOAD * max(capacity[arm.name], LEAST_RATE)


def chosen(held: Sequence[Service]) -> list[Service]:
    """Of those in one worker a popular one of each kind of model, and one in the middle."""
    by_kind = {service.seconds: service for service in reversed(held[: len(held) // 2])}
    return list({service.name: service for service in (*by_kind.values(), held[len(held) // 2])}.values())


def _flooded(rates: Floats, index: int) -> Floats:
    return np.where(np.arange(len(rates)) == index, FLOOD * rates, rates)


def trials_of(
    arm: Arm, asked: Mapping[str, Floats], *, rounds: int, seconds: float, console: Console
) -> dict[str, list[Trial]]:
    """A trial of each in each round, at these requests a second of each service."""
    trials: dict[str, list[Trial]] = {name: [] for name in asked}
    with arm.awake():
        for seed, name in in_turn(track(range(rounds), description="rounds", console=console), list(asked)):
            rate = float(asked[name].sum())
            trials[name].append(arm.run(rate=rate, seconds=seconds, seed=seed, shares=asked[name] / rate))
    return trials


def compared(calm: Sequence[Trial], flooded: Sequence[Trial], index: int) -> dict[str, Any]:
    """How the others fare while the service of this index is a flood, and without."""
    waits = {"without": [_of_others(t, index) for t in calm], "with": [_of_others(t, index) for t in flooded]}
    p95 = {name: p95_ms(np.concatenate(each)) for name, each in waits.items()}
    rng, n = np.random.default_rng(0), len(calm)
    drawn = [_growth(waits, rng.integers(n, size=n)) for _ in range(RESAMPLES)]
    return {
        "answered": share(np.concatenate([t.ok[t.row // ROWS == index] for t in flooded])),
        "p95_ms": {name: finite(each) for name, each in p95.items()},
        "ratio": finite(_growth(waits, np.arange(n))),
        "interval": [finite(float(each)) for each in np.percentile(drawn, COVERED, method="higher")],
        "others_refused": {name: share(np.concatenate(each) == np.inf) for name, each in waits.items()},
    }


def _of_others(trial: Trial, index: int) -> Floats:
    """Seconds; infinite where refused."""
    return np.where(trial.ok, trial.seconds, np.inf)[trial.row // ROWS != index]


def _growth(waits: Mapping[str, Sequence[Floats]], rounds: npt.NDArray[np.int64]) -> float:
    """Of the p95 over these rounds; infinite where refusals or nobody's requests leave none to compare."""
    without, with_it = (p95_ms(np.concatenate([waits[name][i] for i in rounds])) for name in ("without", "with"))
    return with_it / without if 0 < without < np.inf else np.inf


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.sharing.floods", description="one service at ten times its share")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0, help="of every trial")
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
