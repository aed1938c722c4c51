"""Whose batch runs next: ours against round robin and first come first served, on one simulated executor.

Twelve models get Poisson requests by Zipf's popularity, 0.6 of what the executor can do. From a third of the time on
one of them gets ten times its share of the executor besides. A request is refused while the oldest one of its model has
waited for most of the objective. The oldest requests of the model that a policy picks run as one batch of
``FIXED + rows x ROW`` seconds: as long as ours says, or a quantum while others wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.sharing.services import OBJECTIVE_SECONDS, zipf
from offramp_core.sharing import QUANTUM_SECONDS, Claim, Shares, next_turn

MODELS, LOAD, FLOOD, SECONDS, RUNS = 12, 0.6, 10.0, 60.0, 5
FLOODING = f"m{MODELS // 2}"
FIXED, ROW, MOST_ROWS = 0.0005, 0.002, 32
BATCHES = [0.0, *(FIXED + ROW * rows for rows in range(1, MOST_ROWS + 1))]
REFUSED_AFTER = 0.8  # of the objective
#: Arrival times of the requests that wait, by model.
Queues = Mapping[str, deque[float]]
#: Who runs next at a time, and the seconds that the batch may take.
Policy = Callable[[Queues, float], tuple[str, float]]


def compared() -> dict[str, dict[str, float | None]]:
    """By policy, of all models but the flooding one: p95 in milliseconds without and with the flood, and the share of
    requests that are answered within the objective while there is one. None is a p95 that refusals made infinite."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(RUNS):
        calm, flooded = (_arrivals(np.random.default_rng(seed), flood=flood) for flood in (0.0, FLOOD))
        for name, make in POLICIES.items():
            found.setdefault(name, []).append((_run(make(), calm)[0], *_run(make(), flooded)))
    names = ("p95_ms", "flood_p95_ms", "flood_in_time")
    return {
        policy: {
            name: v if math.isfinite(v) else None for name, v in zip(names, np.mean(rows, axis=0).tolist(), strict=True)
        }
        for policy, rows in found.items()
    }


def _arrivals(rng: np.random.Generator, *, flood: float) -> list[tuple[float, str]]:
    times = []
    for i, share in enumerate(zipf(MODELS)):
        rate = LOAD / (FIXED + ROW) * share
        times += [(t, f"m{i}") for t in rng.uniform(0, SECONDS, rng.poisson(rate * SECONDS))]
    more = flood / MODELS / (FIXED + ROW)
    times += [(t, FLOODING) for t in rng.uniform(SECONDS / 3, SECONDS, rng.poisson(more * SECONDS * 2 / 3))]
    return sorted(times)


@dataclass
class Ours:
    """As the worker takes turns."""

    shares: Shares = field(default_factory=lambda: Shares({f"m{i}": 1.0 for i in range(MODELS)}))

    def __call__(self, waiting: Queues, now: float) -> tuple[str, float]:
        claims = {
            name: Claim(queue[0] + OBJECTIVE_SECONDS, FIXED + ROW, behind=ROW * (len(queue) - 1))
            for name, queue in waiting.items()
        }
        name = next_turn(claims, self.shares, now=now)
        turn = self.shares.turn_of(name, now=now, others_wait=len(waiting) > 1, behind=claims[name].behind)
        most = BATCHES[turn.rows(BATCHES)]
        seconds = _seconds(len(waiting[name]), most)
        self.shares = self.shares.after(name, seconds, now=now + seconds)
        return name, most


@dataclass
class RoundRobin:
    """One batch of each in turn."""

    last: str = ""

    def __call__(self, waiting: Queues, now: float) -> tuple[str, float]:  # noqa: ARG002 - a policy is told
        later = [name for name in sorted(waiting) if name > self.last]
        self.last = (later or sorted(waiting))[0]
        return self.last, _quantum(waiting)


def first_come(waiting: Queues, now: float) -> tuple[str, float]:  # noqa: ARG001 - a policy is told
    """Whose oldest request is the oldest."""
    return min(waiting, key=lambda name: waiting[name][0]), _quantum(waiting)


POLICIES: dict[str, Callable[[], Policy]] = {
    "ours": Ours,
    "round robin": RoundRobin,
    "first come": lambda: first_come,
}


def _quantum(waiting: Queues) -> float:
    return QUANTUM_SECONDS if len(waiting) > 1 else math.inf


def _seconds(rows: int, most: float) -> float:
    """Of a batch."""
    return FIXED + ROW * max(1, min(rows, MOST_ROWS, int(min(most, 1.0) / ROW - FIXED / ROW)))


def _run(policy: Policy, arrivals: Sequence[tuple[float, str]]) -> tuple[float, float]:
    waiting: dict[str, deque[float]] = {}
    waits: list[float] = []
    now, i = 0.0, 0
    while i < len(arrivals) or waiting:
        if not waiting:
            now = max(now, arrivals[i][0])
        while i < len(arrivals) and arrivals[i][0] <= now:
            _admit(waiting, *arrivals[i], now=now, refused=waits)
            i += 1
        name, most = policy(waiting, now)
        seconds = _seconds(len(waiting[name]), most)
        now += seconds
        answered = [now - waiting[name].popleft() for _ in range(round((seconds - FIXED) / ROW))]
        waits += answered if name != FLOODING else []
        if not waiting[name]:
            del waiting[name]
    late = np.array(waits)
    return float(np.percentile(late, 95, method="higher")) * 1e3, float(np.mean(late <= OBJECTIVE_SECONDS))


def _admit(waiting: dict[str, deque[float]], time: float, name: str, *, now: float, refused: list[float]) -> None:
    queue = waiting.setdefault(name, deque())
    if queue and now - queue[0] > REFUSED_AFTER * OBJECTIVE_SECONDS:
        if name != FLOODING:
            refused.append(math.inf)
        return
    queue.append(time)
