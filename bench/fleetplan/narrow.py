"""The operator's own rule for the pools of a service (decision 119) beside the planner of core: one plan, one batch
size for each pool, and room for Poisson arrivals alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from bench.fleetplan.scenes import EXACT
from offramp_core.control.workers.capacity import LARGEST_SHARE, OWN_TIMES, SMALLEST_SHARE
from offramp_core.control.workers.pools import BATCH_SHARE
from offramp_core.fleet import Column, Service
from offramp_lab.fleet import LikeTheOperator, Seen


@dataclass
class OperatorsRule(LikeTheOperator):
    """``plans`` by task; whether a pool answers in time is judged with the exact one."""

    plans: Mapping[str, str] = field(default_factory=dict)

    def _service(self, seen: Seen, now: float) -> Service:
        service = super()._service(seen, now)
        columns = tuple(one_for_each_pool(service, self.plans[seen.task]))
        return replace(service, columns=columns, arrival_variation=0.0)


def one_for_each_pool(service: Service, plan: str) -> Iterator[Column]:
    """The largest batch that takes a share of the objective, exactly, at the rate that Poisson arrivals leave."""
    by_key = {column.key: column for column in service.columns}
    exact = [column for column in service.columns if column.key.plan == EXACT]
    for pool in dict.fromkeys(column.key.pool for column in exact):
        alone, *sizes = sorted((c for c in exact if c.key.pool == pool), key=lambda c: c.key.batch_size)
        fits = [alone, *(c for c in sizes if c.batch_seconds <= BATCH_SHARE * service.latency_seconds)]
        share = min(LARGEST_SHARE, max(SMALLEST_SHARE, 1 - OWN_TIMES * alone.batch_seconds / service.latency_seconds))
        column = by_key[replace(fits[-1].key, plan=plan)]
        yield replace(column, worker_rate=share * column.worker_rate)
