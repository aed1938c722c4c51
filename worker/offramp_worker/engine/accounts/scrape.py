"""The engine's state as Prometheus reads it: computed when somebody scrapes, so that no request pays for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from offramp_core.columns import chain
from offramp_core.plan import Plan
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.accounts.counters import Counters
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.queue.batcher import Batcher

KNOWN_PLANS = 64


@dataclass(frozen=True, slots=True)
class RampPrice:
    """Seconds of a row, from the profile of the smallest batch, as the control plane prices plans.

    ``saves`` is the backbone behind the ramp, spared to a row that leaves there; ``costs`` the ramp itself, paid by
    every row that reaches it.
    """

    id: str
    saves: float
    costs: float


@dataclass(frozen=True, slots=True)
class PlanPrices:
    """``exact`` is the fp32 backbone, which every row would take with exits off; ``executor`` what the plan's precision
    spares of it."""

    exact: float
    executor: float
    ramps: tuple[RampPrice, ...]


def prices(bundle: Bundle, plan: Plan) -> PlanPrices:
    """Of the ramps of a plan that some row can leave at, in the network's order."""
    columns = chain([c.precision for c in bundle.columns], plan.precision)
    batch, exact = bundle.profile.of(plan.precision).batches[0], sum(bundle.profile.batches[0].segment_seconds)
    active = {ramp.id for ramp in plan.ramps if ramp.threshold > 0}
    ramps = tuple(
        RampPrice(bundle.columns[column].id, sum(batch.segment_seconds[j + 1 :]), batch.ramp_seconds[j])
        for j, column in enumerate(columns)
        if bundle.columns[column].id in active
    )
    return PlanPrices(exact, exact - sum(batch.segment_seconds), ramps)


class RampUtility(Collector):
    """Seconds that every ramp has saved and cost, by arm. Their difference is its utility; the sum over all, as a share
    of the exact executor's time, is what a plan saves before audits, whose seconds are counted as they pass
    (``earlyexit_audit_seconds_total``).

    It follows the counters of the epochs, which are dropped after a while, and adds up what is new at each scrape.
    Answers by a deadline and to requests that must not exit are not counted there, so they are no part of it.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._prices: dict[str, PlanPrices] = {}
        self._seen: dict[tuple[int, str], Mapping[str, int]] = {}
        self._saved: dict[tuple[str, ...], float] = {}
        self._cost: dict[tuple[str, ...], float] = {}
        self._exact: dict[tuple[str, ...], float] = {}

    def know(self, plan: Plan, bundle: Bundle) -> None:
        """A plan of a bundle is about to serve."""
        with self._lock:
            self._prices.pop(plan.content_hash, None)
            self._prices[plan.content_hash] = prices(bundle, plan)
            while len(self._prices) > KNOWN_PLANS:
                del self._prices[next(iter(self._prices))]

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "earlyexit_ramp_saved_seconds",
            "Backbone seconds spared to rows that left at the ramp, at the profile's prices for one row; final: what "
            "the plan's precision "
            "spares of the fp32 backbone.",
            labels=("arm", "ramp"),
        )
        yield CounterMetricFamily(
            "earlyexit_ramp_overhead_seconds",
            "Seconds that the ramp itself took of all rows that reached it, at the profile's prices. "
            "Saved less overhead is the ramp's utility.",
            labels=("arm", "ramp"),
        )
        yield CounterMetricFamily(
            "earlyexit_exact_seconds",
            "Seconds that the same rows would have taken with exits off, at the profile's prices.",
            labels=("arm",),
        )

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._follow()
            saved, cost, exact = families = tuple(self.describe())
            for family, values in ((saved, self._saved), (cost, self._cost), (exact, self._exact)):
                assert isinstance(family, CounterMetricFamily)
                for labels, seconds in sorted(values.items()):
                    family.add_metric(labels, seconds)
        yield from families

    def _follow(self) -> None:
        """Price what has been answered since the last scrape."""
        now = self._counters.exits()
        for (epoch, arm, plan_hash), (requests, exits) in now.items():
            before = self._seen.get((epoch, arm), {})
            new = {name: count - before.get(name, 0) for name, count in exits.items()}
            plan, reaching = self._prices.get(plan_hash), requests - sum(before.values())
            if plan is None:
                continue
            _add(self._exact, (arm,), reaching * plan.exact)
            if plan.executor:
                _add(self._saved, (arm, "final"), reaching * plan.executor)
            for ramp in plan.ramps:
                left = new.get(ramp.id, 0)
                _add(self._saved, (arm, ramp.id), left * ramp.saves)
                _add(self._cost, (arm, ramp.id), reaching * ramp.costs)
                reaching -= left
        self._seen = {(epoch, arm): exits for (epoch, arm, _), (_, exits) in now.items()}


def _add(totals: dict[Any, float], labels: tuple[str, ...], seconds: float) -> None:
    totals[labels] = totals.get(labels, 0.0) + seconds


class EngineState(Collector):
    """Queue, plans and the detector. A series is there only while there is what it tells of: a plan that left takes its
    series along."""

    def __init__(self, arms: Arms, queue: Batcher) -> None:
        self._arms, self._queue = arms, queue

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("earlyexit_queue_rows", "Rows that wait for a batch.")
        yield GaugeMetricFamily("earlyexit_batch_limit_rows", "The most rows that may run together now.")
        yield GaugeMetricFamily(
            "earlyexit_exits_active",
            "1 while batches of the stable arm may leave early; 0 where the plan, the breaker or a lease keeps the "
            "exits off.",
        )
        yield InfoMetricFamily(
            "earlyexit_plan",
            "The plans in force: config is the hash in the RampConfig's name (exits-off: the exact executor).",
            labels=("arm", "config", "precision", "execution"),
        )
        yield GaugeMetricFamily(
            "earlyexit_overload",
            "1 while requests that name no budget are answered by the thresholds for overload.",
        )
        yield GaugeMetricFamily(
            "earlyexit_detector_statistic",
            "The drift detector over the stable plan's audits (Shiryaev-Roberts); exits go off when it reaches the "
            "limit. "
            "No series while the exits are off by plan.",
        )
        yield GaugeMetricFamily(
            "earlyexit_detector_limit",
            "The statistic at which the detector alarms: the audits between two false alarms.",
        )

    def collect(self) -> Iterator[Metric]:
        active = self._arms.active
        queue, limit, exits, plan, overload, statistic, bound = self.describe()
        assert isinstance(queue, GaugeMetricFamily) and isinstance(limit, GaugeMetricFamily)
        assert isinstance(exits, GaugeMetricFamily) and isinstance(plan, InfoMetricFamily)
        assert isinstance(statistic, GaugeMetricFamily) and isinstance(bound, GaugeMetricFamily)
        assert isinstance(overload, GaugeMetricFamily)
        queue.add_metric((), self._queue.rows)
        limit.add_metric((), self._queue.batch_rows)
        exits.add_metric((), 0.0 if self._arms.exits_off else 1.0)
        overload.add_metric((), 0.0 if self._queue.overload_seconds() is None else 1.0)
        for runtime in (active.stable, active.canary):
            if runtime is not None:
                execution = "ResultsOnly" if runtime.carry_on else "ComputeSaving"
                plan.add_metric((runtime.counter.arm, runtime.config, runtime.plan.precision, execution), {})
        breaker = active.stable.breaker if active.stable is not None else None
        if breaker is not None:
            statistic.add_metric((), breaker.statistic)
            bound.add_metric((), breaker.limit)
        yield from (queue, limit, exits, plan, overload, statistic, bound)
