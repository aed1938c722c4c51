"""Who says how many workers of which column there should be: the product's planner, and rivals by their published
rules.

| policy | what it knows |
|---|---|
| planned | all columns, or those that it is given: the planner of core |
| hpa-cpu, hpa-in-flight | one column; Kubernetes' HorizontalPodAutoscaler with its defaults |
| infaas | all columns; INFaaS (ATC 2021): the cheapest to add or to change to, each second, 5 % to spare |
| proteus | all columns, as many workers at all times; Proteus (ASPLOS 2024): the most accurate that keeps up |
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from offramp_core.fleet import (
    HOUR_SECONDS,
    Caution,
    Column,
    EarlierDays,
    Key,
    Pool,
    Service,
    Workers,
    expected_rate,
    next_days,
    plan_fleet,
    predicted_rate,
    usual_rate,
)
from offramp_lab.fleet.parts import Decision, Policy, Seen
from offramp_lab.fleet.world import WINDOW_SECONDS

Chosen = Callable[[Column], bool]
FIRST_SHARE = 0.7  # of what its workers can do is asked of them where an autoscaler begins


def anything(_column: Column) -> bool:
    """Every column."""
    return True


def within_budget(seen: Seen) -> list[Column]:
    """What may serve by its certificate and has time for a batch."""
    return [
        column
        for column in seen.columns
        if column.certified_disagreement <= seen.max_disagreement and column.batch_seconds <= seen.latency_seconds
    ]


@dataclass
class Planned(Policy):
    """The planner of core, of the columns that ``chosen`` says."""

    name: str = "offramp"
    chosen: Chosen = anything
    caution: Caution = field(default_factory=Caution)
    interval_seconds: int = WINDOW_SECONDS

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:
        services = [self._service(one, now) for one in seen]
        known = {s.name: {c.key for c in s.columns} for s in services}
        current = {one.task: [w for w in one.planned if w.key in known[one.task]] for one in seen}
        plan = plan_fleet(services, pools, current=current, caution=self.caution)
        return {one.service: one.workers for one in plan.services}

    def _service(self, seen: Seen, now: float) -> Service:
        columns = tuple(filter(self.chosen, seen.columns))
        lead = max(column.startup_seconds for column in columns) + self.interval_seconds
        rate = self._expected(seen, now, lead)
        return Service(
            name=seen.task,
            rate=rate,
            predicted_rate=rate,
            arrival_variation=seen.arrival_variation,
            latency_seconds=seen.latency_seconds,
            late_share=seen.late_share,
            max_disagreement=seen.max_disagreement,
            columns=columns,
        )

    def _expected(self, seen: Seen, now: float, lead_seconds: float) -> float:
        return predicted_rate(seen.windows, now=now, lead_seconds=lead_seconds)


@dataclass
class LikeTheOperator(Planned):
    """The planner of core with what the operator knows: the windows of the last hour and, of tasks that stand in
    ``asked``, what it remembers of earlier days."""

    asked: dict[str, EarlierDays] = field(default_factory=dict)
    expecting: set[str] = field(default_factory=set)  # tasks whose plan is for more than the recent past asks

    def _expected(self, seen: Seen, now: float, lead_seconds: float) -> float:
        hour = tuple(w for w in seen.windows if w.ended_at > now - HOUR_SECONDS)
        recent = predicted_rate(hour, now=now, lead_seconds=lead_seconds)
        if seen.task not in self.asked:
            return recent
        known = self.asked[seen.task] = next_days(self.asked[seen.task], hour, now=now, spread=0)
        usual = usual_rate(known, now=now, lead_seconds=lead_seconds)
        expected = expected_rate(recent, usual, begun=seen.task in self.expecting)
        (self.expecting.add if expected > recent else self.expecting.discard)(seen.task)
        return expected


@dataclass
class HorizontalPodAutoscaler(Policy):
    """Kubernetes' own (autoscaling/v2), of one column for each task.

    Every 15 s: workers x metric / target, unless that is within 10 %; at most twice as many or four more each time (the
    larger), and as few as the highest number asked for within 300 s.
    """

    name: str
    columns: Mapping[str, Key]
    metric: Callable[[Seen, Key], float]  # over its target; 1 is as wanted
    interval_seconds: int = 15
    tolerance: float = 0.1
    stabilization_seconds: float = 300.0
    asked: dict[str, deque[tuple[float, int]]] = field(default_factory=lambda: defaultdict(deque))

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:
        free = {pool.name: pool.max_workers for pool in pools}
        decided = {}
        for one in seen:
            key = self.columns[one.task]
            count = min(self._wanted(one, key, now), free[key.pool])
            free[key.pool] -= count
            decided[one.task] = (Workers(key=key, count=count),) if count else ()
        return decided

    def _wanted(self, seen: Seen, key: Key, now: float) -> int:
        have = sum(w.count for w in seen.planned)
        ready = sum(w.count for w in seen.present.ready)
        if not have:  # the first time: as many as its rate takes
            column = next(c for c in seen.columns if c.key == key)
            return max(1, math.ceil(seen.rate / FIRST_SHARE / column.worker_rate))
        off = self.metric(seen, key)
        wanted = have if abs(off - 1) <= self.tolerance else max(1, math.ceil(ready * off))
        if off > 1:  # those that start count as idle, and never make it fewer
            wanted = max(wanted, have)
        wanted = min(wanted, max(2 * have, have + 4))
        asked = self.asked[seen.task]
        asked.append((now, wanted))
        while asked[0][0] < now - self.stabilization_seconds:
            asked.popleft()
        return max(wanted, min(have, max(n for _, n in asked)))


def cpu(target: float = 0.8) -> Callable[[Seen, Key], float]:
    """Share of the processor that ready workers use; 80 % is what Kubernetes takes where nothing is said."""
    return lambda seen, _key: seen.busy_share / target


def in_flight(target: float = 0.7) -> Callable[[Seen, Key], float]:
    """Requests that wait or are in work by worker, of its batch size; 70 % is Knative's share."""

    def metric(seen: Seen, key: Key) -> float:
        ready = max(sum(w.count for w in seen.present.ready), 1)
        return seen.in_flight / ready / (target * key.batch_size)

    return metric


@dataclass
class Infaas(Policy):
    """INFaaS (Romero et al., ATC 2021), its rule of scaling.

    Each second: where the load with 5 % to spare is more than what the workers can answer, the cheapest of adding
    workers of any column and of changing over to another one; after ten seconds in which one worker less, or another
    column, would have done, that. A column may serve where its profile keeps the accuracy and a batch the latency.
    """

    name: str = "infaas"
    interval_seconds: int = 1
    spare: float = 0.05
    slots: int = 10
    quiet: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:  # noqa: ARG002
        free = {pool.name: pool.max_workers for pool in pools}
        for one in seen:
            for w in one.planned:
                free[w.key.pool] -= w.count
        cost = {pool.name: pool.cost_per_hour for pool in pools}
        return {one.task: self._one(one, free, cost) for one in seen}

    def _one(self, seen: Seen, free: dict[str, int], cost: Mapping[str, float]) -> tuple[Workers, ...]:
        columns = {c.key: c for c in within_budget(seen)}
        counts = {w.key: w.count for w in seen.planned if w.key in columns}
        group = _Group(columns, counts, seen.last_rate * (1 + self.spare), free, cost)
        if group.load > group.able or not counts:
            self.quiet[seen.task], counts = 0, group.more()
        elif less := group.less():
            self.quiet[seen.task] += 1
            if self.quiet[seen.task] >= self.slots:
                self.quiet[seen.task], counts = 0, less
        else:
            self.quiet[seen.task] = 0
        for w in seen.planned:
            free[w.key.pool] += w.count
        for key, n in counts.items():
            free[key.pool] -= n
        return tuple(Workers(key=key, count=n) for key, n in counts.items() if n)


@dataclass(frozen=True, slots=True)
class _Group:
    """Workers of one task, the load with what is to spare, and what pools have left and cost."""

    columns: Mapping[Key, Column]
    counts: Mapping[Key, int]
    load: float
    free: Mapping[str, int]
    cost: Mapping[str, float]

    @property
    def able(self) -> float:
        return sum(self.columns[key].worker_rate * n for key, n in self.counts.items())

    @property
    def price(self) -> float:
        return sum(self.cost[key.pool] * n for key, n in self.counts.items())

    def more(self) -> dict[Key, int]:
        """Replicate, or change over; a pool that is full gives what it has."""
        options = []
        for key, column in self.columns.items():
            more = min(max(1, math.ceil((self.load - self.able) / column.worker_rate)), self.free[key.pool])
            if more > 0:
                short = self.able + more * column.worker_rate < self.load
                counts = {**self.counts, key: self.counts.get(key, 0) + more}
                options.append((short, self.price + more * self.cost[key.pool], counts))
        options += [(False, price, other) for price, other in self._alone()]
        return dict(min(options, key=lambda o: o[:2])[2]) if options else dict(self.counts)

    def less(self) -> dict[Key, int] | None:
        """One worker less, or another column, where that suffices and costs less."""
        options = [
            (self.price - self.cost[key.pool], {**self.counts, key: n - 1})
            for key, n in self.counts.items()
            if self.able - self.columns[key].worker_rate >= self.load and sum(self.counts.values()) > 1
        ]
        options += [o for o in self._alone() if o[0] < self.price]
        return dict(min(options, key=lambda o: o[0])[1]) if options else None

    def _alone(self) -> list[tuple[float, dict[Key, int]]]:
        """(price, workers) of each column by itself, where its pool has room."""
        found = []
        for key, column in self.columns.items():
            n = max(1, math.ceil(self.load / column.worker_rate))
            mine = sum(count for k, count in self.counts.items() if k.pool == key.pool)
            if n <= self.free[key.pool] + mine:
                found.append((n * self.cost[key.pool], {key: n}))
        return found


@dataclass
class Proteus(Policy):
    """Proteus (Ahmad et al., ASPLOS 2024), its integer program for one task.

    A number of workers of each pool that never changes; every 30 s, with 5 % more than the load, the variants and batch
    sizes on them that answer all of it (or most) with the highest mean accuracy. A batch may take half the objective.
    """

    devices: Mapping[str, Mapping[str, int]]  # task -> pool -> workers
    name: str = "proteus"
    interval_seconds: int = 30
    spare: float = 0.05

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:  # noqa: ARG002
        return {one.task: self._solved(one) for one in seen}

    def _solved(self, seen: Seen) -> tuple[Workers, ...]:
        from scipy.optimize import Bounds, LinearConstraint, milp

        columns = [c for c in within_budget(seen) if 2 * c.batch_seconds <= seen.latency_seconds]
        devices = self.devices[seen.task]
        load = max(max((w.rate for w in seen.windows[-2:]), default=0.0) * (1 + self.spare), 1e-3)
        n = len(columns)
        able = np.array([c.worker_rate for c in columns]) / load
        wrong = np.array([c.certified_disagreement for c in columns])
        # counts, then shares of the load that columns answer, then the share that nobody does
        held = np.array([[c.key.pool == pool for c in columns] + [0.0] * (n + 1) for pool in devices], dtype=float)
        rows = np.vstack(
            [held, np.hstack([-np.diag(able), np.eye(n), np.zeros((n, 1))]), np.r_[np.zeros(n), np.ones(n + 1)][None]]
        )
        upper = np.r_[[float(d) for d in devices.values()], np.zeros(n), 1.0]
        lower = np.r_[[float(d) for d in devices.values()], np.full(n, -np.inf), 1.0]
        result = milp(
            np.r_[1e-3 * wrong, wrong, 10.0],
            constraints=LinearConstraint(rows, lower, upper),
            integrality=np.r_[np.ones(n), np.zeros(n + 1)],
            bounds=Bounds(0.0, np.r_[np.full(n, np.inf), np.ones(n + 1)]),
            options={"node_limit": 200, "mip_rel_gap": 1e-3},
        )
        if result.x is None:
            return seen.planned
        counts = np.round(result.x[:n]).astype(int)
        return tuple(Workers(key=c.key, count=int(k)) for c, k in zip(columns, counts, strict=True) if k)
