"""How long the planner takes for many services, how near the bound it comes where a pool is scarce, and whether it
changes its mind for noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.fleetplan.runs import UNCERTIFIED
from bench.fleetplan.scenes import BOLD, BUDGET, HARDWARE, MINILM, RESNET, certified, menu
from offramp_core.fleet import FleetPlan, Pool, Service, Window, Workers, plan_fleet, predicted_rate

SECONDS_GOAL, BOUND_GOAL = 2.0, 1.03
SCARCE = 0.8  # of the workers of a pool that would be used if there were enough
WINDOWS, HISTORY, WINDOW_SECONDS, NOISE = 10, 20, 60.0, 0.1
PLENTY = 100_000
Current = Mapping[str, Sequence[Workers]]


@dataclass(frozen=True, slots=True)
class Planning:
    """Processor seconds by what is planned, and cost over the bound with a scarce pool."""

    services: int
    seconds: Mapping[str, float]
    over_bound: float


def planning(count: int, *, seed: int = 0) -> Planning:
    """Services on menus of measured plans, with demands that differ a hundredfold."""
    services = _services(count, np.random.default_rng(seed))
    free = _pools([PLENTY] * len(HARDWARE))
    seconds, plenty = _timed(lambda: plan_fleet(services, free))
    used = [plenty.workers_by_pool[pool.name] for pool in free]
    tight = _tight(used)
    scarce_seconds, scarce = _timed(lambda: plan_fleet(services, tight))
    short = _pools([n // 2 for n in used])
    short_seconds, _ = _timed(lambda: plan_fleet(services, short))
    again_seconds, _ = _timed(lambda: plan_fleet(services, tight, current=_workers(scarce)))
    assert scarce.bound_per_hour is not None
    return Planning(
        count,
        {
            "room for all": seconds,
            "one pool scarce": scarce_seconds,
            "the same again": again_seconds,
            "half of the workers": short_seconds,
        },
        scarce.cost_per_hour / scarce.bound_per_hour,
    )


def noise(count: int, fleets: int) -> list[int]:
    """Of each of so many fleets, the services that have other workers in any of ten windows of noise, a pool scarce."""
    found = []
    for seed in range(fleets):
        rng = np.random.default_rng(seed)
        services = _services(count, rng)
        plenty = plan_fleet(services, _pools([PLENTY] * len(HARDWARE)))
        tight = _tight([plenty.workers_by_pool[where.pool.name] for where in HARDWARE])
        found.append(_changed(services, tight, rng))
    return found


def _services(count: int, rng: np.random.Generator) -> list[Service]:
    return [_service(rng, i) for i in range(count)]


def _tight(used: Sequence[int]) -> list[Pool]:
    """Fewer workers than would be used of the pool on which most is spent, and plenty of all others."""
    dearest = int(np.argmax([n * where.pool.cost_per_hour for n, where in zip(used, HARDWARE, strict=True)]))
    return _pools([int(SCARCE * n) if i == dearest else PLENTY for i, n in enumerate(used)])


def _service(rng: np.random.Generator, i: int) -> Service:
    model = (MINILM, RESNET)[i % 2]
    shown = {plan: BUDGET * float(rng.uniform(0, 1)) for plan in model.plans} | {BOLD: UNCERTIFIED}
    rate = float(rng.lognormal(5.0, 1.2))
    return Service(
        name=f"service-{i}",
        rate=rate,
        predicted_rate=rate,
        arrival_variation=float(rng.uniform(1, 4)),
        latency_seconds=model.latency_seconds,
        late_share=0.01,
        max_disagreement=BUDGET,
        columns=tuple(m.column for m in certified(menu(model), shown)),
    )


def _pools(most: Sequence[int]) -> list[Pool]:
    return [replace(h.pool, max_workers=n) for h, n in zip(HARDWARE, most, strict=True)]


def _timed(plan: Callable[[], FleetPlan]) -> tuple[float, FleetPlan]:
    began = time.process_time()
    found = plan()
    return time.process_time() - began, found


def _workers(plan: FleetPlan) -> Current:
    return {one.service: one.workers for one in plan.services}


def _changed(services: Sequence[Service], pools: Sequence[Pool], rng: np.random.Generator) -> int:
    """Services whose workers change after the first of some windows in which demand is off by up to a tenth."""
    rates = {one.name: one.rate * (1 + rng.uniform(-NOISE, NOISE, HISTORY + WINDOWS)) for one in services}
    current: Current = {}
    changed: set[str] = set()
    for now in range(HISTORY, HISTORY + WINDOWS):
        plan = plan_fleet([_as_seen(one, rates[one.name][:now]) for one in services], pools, current=current)
        if current:
            changed |= {one.service for one in plan.services if one.changed}
        current = _workers(plan)
    return len(changed)


def _as_seen(service: Service, rates: Sequence[float]) -> Service:
    windows = [
        Window(ended_at=WINDOW_SECONDS * (i + 1), seconds=WINDOW_SECONDS, rate=float(rate))
        for i, rate in enumerate(rates)
    ]
    rate = predicted_rate(windows, now=windows[-1].ended_at, lead_seconds=WINDOW_SECONDS)
    return replace(service, rate=rate, predicted_rate=rate)
