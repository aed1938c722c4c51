"""What it is worth to remember earlier days: the same planner with less and with more of the past, in one run.

Twitter's trace is the only one here of more than a day. Each stretch comes after seven days of it. Room to spare is the
other way to buy fewer misses, so that the recent past alone is played with more of it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.fleetplan.runs import with_certificates
from bench.fleetplan.scenes import DAY, MINILM, Scene, pools, twitter_task
from offramp_core.fleet import Caution, EarlierDays, Window, next_days
from offramp_lab.fleet import WINDOW_SECONDS, LikeTheOperator, Planned, Policy, Task, simulate

HOURS = 3.0
FIRST_DAY, LAST_DAY = 8.0, 21.0
RECENT, DAYS, EVERYTHING = "last hour", "last hour and earlier days", "every window of earlier days"
SPARES = (0.25, 0.5, 1.0)  # in place of the planner's tenth
SLACK = Caution().slack - Caution().spare


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy costs and misses over all stretches, and its worst stretch."""

    policy: str
    cost: float
    missed: float
    worst: float


def remembered(task: Task) -> EarlierDays:
    """What an operator knows that has seen all that came before."""
    whole = len(task.past) // WINDOW_SECONDS
    rates = task.past[len(task.past) - whole * WINDOW_SECONDS :].reshape(whole, WINDOW_SECONDS).mean(axis=1)
    windows = [
        Window(ended_at=float((i + 1 - whole) * WINDOW_SECONDS), seconds=float(WINDOW_SECONDS), rate=float(rate))
        for i, rate in enumerate(rates)
    ]
    return next_days(EarlierDays(), windows, now=0.0, spread=0)


def policies(task: Task) -> Iterator[Policy]:
    """New ones for each stretch."""
    yield LikeTheOperator(name=RECENT)
    for spare in SPARES:
        yield LikeTheOperator(name=f"{RECENT}, {spare:.0%} to spare", caution=Caution(spare=spare, slack=spare + SLACK))
    yield LikeTheOperator(name=DAYS, asked={task.name: remembered(task)})
    yield Planned(name=EVERYTHING)


def forecasts(stretches: int, *, hours: float = HOURS) -> list[Forecast]:
    """Stretches spread evenly over the days of the trace and over the hours of the day."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for begin in np.linspace(FIRST_DAY, LAST_DAY - hours * 3600 / DAY, stretches):
        plain = Scene((twitter_task(MINILM, day=float(begin), seconds=int(hours * 3600), times=8),), pools(1.0))
        scene = with_certificates(plain)
        for policy in policies(scene.tasks[0]):
            out = simulate(scene.tasks, scene.pools, policy)
            requests = float(sum(task.requests.sum() for task in out.tasks))
            found.setdefault(policy.name, []).append((out.cost, out.missed * requests, requests))
    return [_summed(name, rows) for name, rows in found.items()]


def relative_costs(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By policy, against the last hour alone."""
    costs = {row["policy"]: row["cost"] for row in rows}
    return {policy: cost / costs[RECENT] for policy, cost in costs.items()}


def _summed(name: str, rows: Sequence[tuple[float, float, float]]) -> Forecast:
    cost, missed, requests = (np.array(column) for column in zip(*rows, strict=True))
    return Forecast(name, float(cost.sum()), float(missed.sum() / requests.sum()), float((missed / requests).max()))
