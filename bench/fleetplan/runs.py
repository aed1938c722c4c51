"""All policies on a scene."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.fleetplan.narrow import OperatorsRule
from bench.fleetplan.scenes import BOLD, EXACT, Scene, certified
from offramp_core.fleet import Column
from offramp_lab.fleet import (
    HorizontalPodAutoscaler,
    Infaas,
    Measured,
    Outcome,
    Planned,
    Policy,
    Proteus,
    Task,
    cpu,
    in_flight,
    simulate,
)

OURS, LARGEST = "offramp", "largest variant only"
BEST_SINGLE, BEST_PLAN = "best single certified variant", "best certified plan on all pools"
OPERATOR, OPERATOR_OFF = "the operator's rule, exits counted", "the operator's rule, exits off"
HPA_CPU, HPA_IN_FLIGHT, INFAAS, PROTEUS = "HPA on CPU", "HPA on in-flight requests", "INFaaS", "Proteus"
MOST_MISSED = 0.01
BINS = 288  # of the picture
UNCERTIFIED = 1.0


def with_certificates(scene: Scene) -> Scene:
    """All plans but the bold one have a certificate that shows their measured disagreement."""
    return replace(scene, tasks=tuple(replace(task, menu=_certified(task)) for task in scene.tasks))


def _certified(task: Task) -> tuple[Measured, ...]:
    truths = {m.column.key.plan: m.true_disagreement for m in task.menu}
    return certified(task.menu, {**truths, BOLD: UNCERTIFIED})


def policies(scene: Scene) -> Iterator[tuple[str, Policy]]:
    """Names of the table, several policies of one name where the best of them counts, those first that pay least for an
    answer."""
    yield OURS, Planned()
    yield LARGEST, Planned(name=LARGEST, chosen=lambda column: column.key.plan == EXACT)
    plans = _plans(scene)
    for plan in sorted(plans, key=lambda plan: _price(scene, _is(plan, None))):
        yield BEST_PLAN, Planned(name=f"{plan} on all pools", chosen=_is(plan, None))
    single = [(plan, pool.name) for plan in plans for pool in scene.pools]
    for plan, pool in sorted(single, key=lambda one: _price(scene, _is(*one))):
        yield BEST_SINGLE, Planned(name=f"{plan} on {pool}", chosen=_is(plan, pool))
    columns = {task.name: cheapest_column(task, scene).key for task in scene.tasks}
    yield OPERATOR, OperatorsRule(name=OPERATOR, plans={name: key.plan for name, key in columns.items()})
    yield OPERATOR_OFF, OperatorsRule(name=OPERATOR_OFF, plans=dict.fromkeys(columns, EXACT))
    yield HPA_CPU, HorizontalPodAutoscaler(name=HPA_CPU, columns=columns, metric=cpu())
    yield HPA_IN_FLIGHT, HorizontalPodAutoscaler(name=HPA_IN_FLIGHT, columns=columns, metric=in_flight())
    yield INFAAS, Infaas()
    yield PROTEUS, Proteus(devices=devices(scene))


def _plans(scene: Scene) -> list[str]:
    kept: dict[str, None] = {}
    for task in scene.tasks:
        for m in task.menu:
            if m.column.certified_disagreement <= task.max_disagreement and m.column.key.plan != EXACT:
                kept[m.column.key.plan] = None
    return list(kept)


def _price(scene: Scene, chosen: Callable[[Column], bool]) -> float:
    """Of an answer of each task by the cheapest of its columns."""
    cost = {pool.name: pool.cost_per_hour for pool in scene.pools}
    columns = [[m.column for m in task.menu if chosen(m.column)] for task in scene.tasks]
    return sum(min(cost[c.key.pool] / c.worker_rate for c in some) for some in columns)


def _is(plan: str, pool: str | None) -> Callable[[Column], bool]:
    """Columns of a plan; of a task that has no such plan, those of the exact one."""
    return lambda column: column.key.plan in (plan, EXACT) and pool in (None, column.key.pool)


def cheapest_column(task: Task, scene: Scene, among: Sequence[str] | None = None) -> Column:
    """What costs least for each answer and is certified, in batches of which two fit the objective."""
    cost = {pool.name: pool.cost_per_hour for pool in scene.pools}
    fit = [
        m.column
        for m in task.menu
        if m.column.certified_disagreement <= task.max_disagreement
        and 2 * m.column.batch_seconds <= task.latency_seconds
        and (among is None or m.column.key.pool in among)
    ]
    return min(fit, key=lambda column: cost[column.key.pool] / column.worker_rate)


def devices(scene: Scene) -> dict[str, dict[str, int]]:
    """Of each task as many workers as its busiest minute takes with the cheapest columns that are left, so that every
    pool suffices: Proteus adds none."""
    left = {pool.name: pool.max_workers for pool in scene.pools}
    found: dict[str, dict[str, int]] = {}
    for task in scene.tasks:
        minutes = task.counts[: len(task.counts) // 60 * 60].reshape(-1, 60).mean(axis=1)
        missing, mine = max(1.05 * float(minutes.max()), 1.0), found.setdefault(task.name, {})
        while missing > 0 and any(left.values()):
            column = cheapest_column(task, scene, among=[pool for pool, n in left.items() if n])
            count = min(max(1, math.ceil(missing / column.worker_rate)), left[column.key.pool])
            left[column.key.pool] -= count
            mine[column.key.pool] = mine.get(column.key.pool, 0) + count
            missing -= count * column.worker_rate
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A policy of the table."""

    policy: str
    said: str  # which of those that share the name
    cost: float
    missed: float
    disagreement: float
    kept: bool
    workers: float
    seconds: float  # of processor
    series: Mapping[str, list[float]]


def row(name: str, said: str, found: Outcome, scene: Scene, seconds: float) -> Row:
    """Sums, and the series of the picture."""
    sums = {
        field: sum(getattr(task, field) for task in found.tasks)
        for field in ("requests", "missed", "disagreed", "answered", "cost", "workers")
    }
    n = len(sums["requests"]) // BINS * BINS or len(sums["requests"])
    bins = {k: np.asarray(v)[:n].reshape(min(BINS, n), -1).sum(axis=1) for k, v in sums.items()}
    width = n / len(bins["requests"])
    return Row(
        policy=name,
        said=said,
        cost=found.cost,
        missed=found.missed,
        disagreement=found.disagreement,
        kept=found.keeps_budgets(scene.tasks),
        workers=float(np.mean(sums["workers"])),
        seconds=seconds,
        series={
            "cost": [round(float(v), 4) for v in bins["cost"] * 3600 / width],
            "missed": [round(float(v), 5) for v in bins["missed"] / np.maximum(bins["requests"], 1)],
            "disagreement": [round(float(v), 5) for v in bins["disagreed"] / np.maximum(bins["answered"], 1)],
            "rate": [round(float(v), 1) for v in bins["requests"] / width],
        },
    )


def run(scene: Scene) -> Iterator[Row]:
    """Every policy; of those that share a name the first one that misses little, else the one that misses least."""
    scene = with_certificates(scene)
    found: dict[str, list[Row]] = {}
    for name, policy in policies(scene):
        if any(r.missed <= MOST_MISSED for r in found.get(name, ())):
            continue
        began = time.process_time()
        outcome = simulate(scene.tasks, scene.pools, policy)
        found.setdefault(name, []).append(row(name, policy.name, outcome, scene, time.process_time() - began))
    for rows in found.values():
        yield min(rows, key=lambda r: r.missed)  # where one misses little, it is the last, and the others miss more
