"""What is played: a menu of plans of real models on pools of unequal speed and cost, and real traces.

Times of plans on one core are those that `bench.engine` and `bench.served` measured (docs/benchmarks.md: MiniLM on
SST-2 and ResNet-56). The other pools are declared: how much faster a worker is, what a precision is worth there, and
what it costs. A worker on processors starts in the time that `make demo-fleet` measured on a real cluster
(`status.pools[].startup`); that of a GPU is declared. Truths of disagreement are the measured ones; the bold plan's is
what its second half said, and in the replays it is beyond its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bench.arrivals import SecondsArray, azure_functions_by_name, load_trace, twitter_counts
from offramp_core.fleet import Column, Key, Pool
from offramp_lab.fleet import LEAD_SECONDS, Counts, Measured, Task

GIB = 1 << 30
DAY = 86_400
EXACT = "exact"
BOLD = "bold"
BATCHES = (1, 4, 16)
SPREAD_SECONDS = 15.0
CPU_STARTUP, GPU_STARTUP = 14.0, 45.0  # seconds


@dataclass(frozen=True, slots=True)
class Hardware:
    """A pool, how many times faster than one measured core its worker takes a batch's first row and each further one,
    and what int8 is worth there, of fp32's time."""

    pool: Pool
    first: float
    more: float
    int8: float
    startup_seconds: float


@dataclass(frozen=True, slots=True)
class Model:
    """Seconds of one row alone and of each further one on a core, exactly; plans with their ratio by batch size and
    disagreement."""

    name: str
    first_seconds: float
    more_seconds: float
    latency_seconds: float
    plans: Mapping[str, tuple[tuple[float, float, float], float]]


MINILM = Model(
    "minilm",
    0.0088,
    0.0080,
    0.088,
    {
        EXACT: ((1.0, 1.0, 1.0), 0.0),
        "exits": ((0.671, 0.645, 0.613), 0.0020),
        "int8": ((0.498, 0.455, 0.466), 0.0035),
        "int8-exits": ((0.388, 0.346, 0.347), 0.0045),
        BOLD: ((0.338, 0.285, 0.258), 0.0100),
    },
)
RESNET = Model(
    "resnet56",
    0.0040,
    0.0026,
    0.050,
    {
        EXACT: ((1.0, 1.0, 1.0), 0.0),
        "exits": ((0.813, 0.813, 0.785), 0.0067),
        "int8": ((0.425, 0.404, 0.393), 0.0053),
        BOLD: ((0.335, 0.298, 0.298), 0.0097),
    },
)
HARDWARE = (
    Hardware(
        Pool(name="core", cost_per_hour=0.04, max_workers=12, worker_memory_bytes=2 * GIB), 1.0, 1.0, 1.0, CPU_STARTUP
    ),
    Hardware(
        Pool(name="quad", cost_per_hour=0.17, max_workers=24, worker_memory_bytes=8 * GIB), 2.6, 3.8, 1.6, CPU_STARTUP
    ),
    Hardware(
        Pool(name="gpu", cost_per_hour=0.90, max_workers=6, worker_memory_bytes=16 * GIB), 3.0, 30.0, 2.2, GPU_STARTUP
    ),
)
BUDGET = 0.01


def menu(model: Model, hardware: tuple[Hardware, ...] = HARDWARE) -> tuple[Measured, ...]:
    """Every plan on every pool in every batch size, with its measured disagreement for a certificate."""
    return tuple(
        _measured(model, plan, where, i, size)
        for plan in model.plans
        for where in hardware
        for i, size in enumerate(BATCHES)
    )


def _measured(model: Model, plan: str, where: Hardware, i: int, size: int) -> Measured:
    ratios, disagreement = model.plans[plan]
    less = where.int8 if plan.startswith("int8") or plan == BOLD else 1.0
    alone = model.first_seconds / where.first
    batch = (alone + model.more_seconds / where.more * (size - 1)) * ratios[i] * less
    column = Column(
        key=Key(plan=plan, pool=where.pool.name, batch_size=size),
        batch_seconds=batch,
        worker_rate=size / batch,
        certified_disagreement=disagreement,
        memory_bytes=GIB // 4,
        startup_seconds=where.startup_seconds,
    )
    return Measured(column=column, first_seconds=alone * ratios[0] * less, true_disagreement=disagreement)


def certified(columns: tuple[Measured, ...], shown: Mapping[str, float]) -> tuple[Measured, ...]:
    """The same columns with the disagreement that a certificate shows for each plan."""
    return tuple(replace(m, column=replace(m.column, certified_disagreement=shown[m.column.key.plan])) for m in columns)


# --- traces ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """Services that share pools for a while."""

    tasks: tuple[Task, ...]
    pools: tuple[Pool, ...]


@cache
def _twitter() -> Counts:
    return twitter_counts()


def twitter_task(model: Model, *, day: float, seconds: int, times: int, name: str = "") -> Task:
    """A stretch of the trace from a day on, after the seven days before it, so many times as many requests."""
    begin = int(day * DAY)
    first = max(begin - 7 * DAY - LEAD_SECONDS, 0)
    counts = _twitter()[first : begin + seconds] * times
    return Task(
        name=name or f"{model.name}-twitter",
        latency_seconds=model.latency_seconds,
        max_disagreement=BUDGET,
        menu=menu(model),
        counts=counts[begin - first :],
        past=counts[: begin - first],
    )


def recorded_task(model: Model, name: str, times: SecondsArray, *, rate: float, seconds: int, seed: int) -> Task:
    """A short trace stretched to ``seconds``, each request for as many as make ``rate`` a second; they are spread over
    the half minute that its moment stands in."""
    rng = np.random.default_rng(seed)
    stretched = times / times[-1] * seconds
    many = max(1, round(rate * seconds / len(times)))
    moments = np.repeat(stretched, many) + rng.uniform(-SPREAD_SECONDS, SPREAD_SECONDS, many * len(times))
    counts = np.bincount(np.clip(moments, 0, seconds - 1).astype(np.int64), minlength=seconds)
    return _without_past(model, name, counts)


def minutes_task(model: Model, name: str, times: SecondsArray, *, rate: float, seconds: int, seed: int) -> Task:
    """The beginning of a trace that was recorded by the minute, with ``rate`` requests a second on average in minutes
    in which any came."""
    minutes = np.bincount((times / 60).astype(np.int64), minlength=DAY // 60)
    asked = np.repeat(minutes * (rate / minutes[minutes > 0].mean()), 60)[:seconds]
    return _without_past(model, name, np.random.default_rng(seed).poisson(asked))


def _without_past(model: Model, name: str, counts: Counts) -> Task:
    """What came before is not recorded: its beginning, once more."""
    return Task(
        name=name,
        latency_seconds=model.latency_seconds,
        max_disagreement=BUDGET,
        menu=menu(model),
        counts=counts,
        past=counts[: 10 * 15],
    )


def twitter(hours: float = 3.0) -> Scene:
    """One service on Twitter's trace."""
    task = twitter_task(MINILM, day=9.4, seconds=int(hours * 3600), times=8)
    return Scene((task,), pools(1.0))


def functions(hours: float = 1.0) -> Scene:
    """One service on all functions of Azure together."""
    every = np.sort(np.concatenate(list(azure_functions_by_name().values())))
    task = recorded_task(RESNET, "resnet56-functions", every, rate=6000.0, seconds=int(3600 * hours), seed=1)
    return Scene((task,), pools(1.0))


def functions_day() -> Scene:
    """One service on the four functions of which Azure recorded a day: after 230 minutes nothing is asked."""
    times = load_trace("azure-functions-minutes")
    task = minutes_task(RESNET, "resnet56-minutes", times, rate=1500.0, seconds=DAY, seed=2)
    return Scene((task,), pools(1.0))


def fleet(hours: float = 1.0) -> Scene:
    """Ten services on as few fast cores as do not suffice."""
    seconds = int(3600 * hours)
    traces = list(azure_functions_by_name().items())[:6]
    tasks = [
        recorded_task((MINILM, RESNET)[i % 2], f"function-{i}", times, rate=60.0 * (i + 1), seconds=seconds, seed=i)
        for i, (_, times) in enumerate(traces)
    ]
    for i, name in enumerate(("azure-llm-code", "azure-llm-conv")):
        tasks.append(
            recorded_task((RESNET, MINILM)[i], name, load_trace(name), rate=400.0, seconds=seconds, seed=10 + i)
        )
    tasks += [
        twitter_task(model, day=9.5, seconds=seconds, times=4, name=f"{model.name}-twitter")
        for model in (MINILM, RESNET)
    ]
    return Scene(tuple(tasks), pools(1.5))


def pools(times: float) -> tuple[Pool, ...]:
    """All pools, with so many times their workers."""
    return tuple(replace(h.pool, max_workers=round(times * h.pool.max_workers)) for h in HARDWARE)


SCENES: Mapping[str, tuple[str, Callable[[], Scene]]] = {
    "twitter": ("MiniLM, three hours of Twitter, 8 requests for each", twitter),
    "functions-day": ("ResNet-56, four functions of Azure Functions, a day as recorded", functions_day),
    "functions": ("ResNet-56, five minutes of Azure Functions in an hour", functions),
    "fleet": ("Ten services share the pools for an hour (Azure Functions, Azure LLM, Twitter)", fleet),
}
