"""What graded losses cost and save against counted errors: ``python -m bench.graded [--runs 400] [--json]``.

Losses of one mean come in three sizes: whole answers, about a third of one, about a tenth. Two questions, in labels:

- *certificate*: with how many held-out labels a plan at a fifth of its budget passes in four of five draws, by bets on
  the losses, and by counting each loss as an error with its probability;
- *alarm*: how many audits it takes in the middle until evidence of harm at 3 budgets reaches 20, by the same two.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from offramp_core.certify import Losses, allowance
from offramp_core.evidence.graded import counted_errors
from offramp_core.evidence.one_arm import alternatives, log_mixture

BUDGETS = (0.01, 0.05, 0.1)
SIZES = {"whole": 1.0, "a third": 0.35, "a tenth": 0.1}
CLEAN, HARM, POWER, DELTA = 0.2, 3.0, 0.8, 0.05
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """Labels and audits that it takes, bet on and counted."""

    budget: float
    size: str
    certified_bets: int
    certified_counts: int
    alarm_bets: float
    alarm_counts: float


def losses(rng: np.random.Generator, shape: tuple[int, ...], *, mean: float, size: float) -> Floats:
    """Losses with this mean: of ``size`` each where it is 1, else spread evenly from half of it to one and a half."""
    amount = np.ones(shape) if size == 1 else rng.uniform(0.5 * size, 1.5 * size, shape)
    return np.where(rng.random(shape) < mean / size, amount, 0.0)


def labels_needed(rng: np.random.Generator, *, budget: float, size: float, runs: int, counted: bool) -> int:
    """The least of a grid of 5 % steps with which ``POWER`` of the draws pass."""
    level, n = allowance(DELTA, 1), 50
    while True:
        drawn = losses(rng, (runs, n), mean=CLEAN * budget, size=size)
        if counted:
            drawn = counted_errors(drawn, rng.random(drawn.shape)).astype(np.float64)
        passed = sum(Losses(row, graded=not counted).p_value(budget=budget) <= level for row in drawn)
        if passed >= POWER * runs:
            return n
        n = math.ceil(1.05 * n)


def alarm_after(rng: np.random.Generator, *, budget: float, size: float, runs: int, counted: bool) -> float:
    """Median audits until evidence passes 20; the grid of alternatives is that of the gates."""
    n, grid = math.ceil(60 / budget), alternatives(budget)
    drawn = losses(rng, (runs, n), mean=min(HARM * budget, 0.9 * size), size=size)
    trials = np.arange(1, n + 1)
    if counted:
        errors = np.cumsum(counted_errors(drawn, rng.random(drawn.shape)), axis=1)
        evidence = log_mixture(errors, np.broadcast_to(trials, errors.shape), p0=budget, grid=grid)
    else:
        bets = [(q - budget) / (budget * (1 - budget)) for q in grid]
        evidence = np.logaddexp.reduce(
            [np.cumsum(np.log1p(b * (drawn - budget)), axis=1) for b in bets], axis=0
        ) - math.log(len(bets))
    over = evidence >= math.log(20)
    return float(np.median(np.where(over.any(axis=1), over.argmax(axis=1) + 1, n)))


def measure(runs: int, *, seed: int = 1) -> list[Row]:
    """One row for each budget and size."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            budget,
            name,
            labels_needed(rng, budget=budget, size=size, runs=runs, counted=False),
            labels_needed(rng, budget=budget, size=size, runs=runs, counted=True),
            alarm_after(rng, budget=budget, size=size, runs=runs, counted=False),
            alarm_after(rng, budget=budget, size=size, runs=runs, counted=True),
        )
        for budget in BUDGETS
        for name, size in SIZES.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.runs)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("budget", "a loss is of", "certificate: bets", "counted", "alarm: bets", "counted")
    for row in rows:
        table.add_row(
            f"{row.budget:.0%}",
            row.size,
            str(row.certified_bets),
            str(row.certified_counts),
            f"{row.alarm_bets:.0f}",
            f"{row.alarm_counts:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
