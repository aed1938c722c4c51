"""The pools of a service: what the workers of each can do as they were measured there, and how requests are shared.

A profile is taken on the machine where the bundle was prepared. What a pool's workers make of it is measured in the
pool: each worker runs whole batches before it is ready and tells how much slower or faster than the profile it is, and
batches that ran with exits off tell it under traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import PoolStatus
from offramp_core.control.snapshot import Worker
from offramp_core.control.spec import WorkerPool
from offramp_core.control.workers.capacity import rate_anew, worker_rate

MOST_WEIGHT = 1000  # of a pool among those that a Gateway shares requests among


@dataclass(frozen=True, slots=True)
class Model:
    """What is served: its cost arrays, digest and hash of the plan with exits off, and within how many seconds its
    answers are wanted."""

    costs: Mapping[str, Sequence[Any]]
    digest: str
    exits_off_hash: str
    latency_seconds: float


def next_pools(
    pools: Iterable[WorkerPool],
    workers: Sequence[Worker],
    *,
    before: Iterable[PoolStatus],
    model: Model | None,
    distrusted: Iterable[str] = (),
) -> tuple[PoolStatus, ...]:
    """How each pool stands. Figures of before stand while nobody tells better ones of the same model.

    Parameters
    ----------
    workers : sequence of Worker
        Of all pools. Of those that are ``distrusted``, by name, nothing is believed.
    model : Model or None
        None where no worker has reported one.
    """
    known, doubted = {pool.name: pool for pool in before}, frozenset(distrusted)
    found = []
    for pool in pools:
        own = [w for w in workers if w.endpoint.pool == pool.name]
        earlier = known.get(pool.name, PoolStatus(pool.name))
        if model is not None and earlier.model != model.digest:
            earlier = PoolStatus(pool.name)
        rate = measured_rate([w for w in own if w.endpoint.name not in doubted], model)
        kept = rate_anew(earlier.worker_rate, rate) if rate > 0 else earlier.worker_rate
        ready = sum(w.endpoint.ready for w in own)
        lacking = next((w.endpoint.failure for w in own if w.endpoint.finds_no_place), "")
        found.append(
            PoolStatus(
                pool.name,
                pool.replicas,
                ready,
                worker_rate=kept,
                model=(earlier.model if model is None else model.digest) if kept else "",
                message=lacking if ready < pool.replicas else "",
            )
        )
    return tuple(found)


def measured_rate(workers: Sequence[Worker], model: Model | None) -> float:
    """Requests per second that one of the workers answers in time with exits off, by what they measured themselves; 0
    where none did."""
    if model is None:
        return 0.0
    states = (w.state for w in workers if w.state is not None and w.state.backbone_digest == model.digest)
    paces = [state.pace for state in states if state.pace > 0]
    if not paces:
        return 0.0
    observed = [w.observations for w in workers if w.observations is not None]
    return worker_rate(
        model.costs,
        (c for o in observed for c in (*o.counts, *o.held_back)),
        exits_off_hash=model.exits_off_hash,
        latency_seconds=model.latency_seconds,
        least_pace=sum(paces) / len(paces),
    )


def rate_of_all(pools: Iterable[PoolStatus], *, by_weight: bool) -> float:
    """What a ready worker of all pools adds on average to what they answer together; 0 while a pool with ready workers
    was not measured.

    Requests that are shared ``by_weight`` go where they can be answered. Shared by numbers of workers, the slowest pool
    is late as soon as each worker gets more than one of its own can do.

    Examples
    --------
    >>> pools = (PoolStatus("slow", ready=2, worker_rate=20.0), PoolStatus("fast", ready=2, worker_rate=60.0))
    >>> rate_of_all(pools, by_weight=True), rate_of_all(pools, by_weight=False)
    (40.0, 20.0)
    """
    ready = [pool for pool in pools if pool.ready]
    if not ready or any(pool.worker_rate <= 0 for pool in ready):
        return 0.0
    if not by_weight:
        return min(pool.worker_rate for pool in ready)
    return sum(pool.ready * pool.worker_rate for pool in ready) / sum(pool.ready for pool in ready)


def request_weights(pools: Iterable[PoolStatus], available: Mapping[str, int]) -> dict[str, int]:
    """How requests are shared among pools: by what their available workers can do.

    A pool that was not measured yet counts as the slowest that was. One without workers gets nothing, and every other
    one something.

    Examples
    --------
    >>> slow, fast = PoolStatus("slow", worker_rate=20.0), PoolStatus("fast", worker_rate=60.0)
    >>> request_weights((slow, fast), {"slow": 2, "fast": 1, "new": 1, "gone": 0})
    {'slow': 667, 'fast': 1000, 'new': 333, 'gone': 0}
    """
    rates = {pool.name: pool.worker_rate for pool in pools if pool.worker_rate > 0}
    slowest = min((rates[name] for name in available if name in rates), default=1.0)
    able = {name: n * rates.get(name, slowest) for name, n in available.items()}
    most = max(able.values(), default=0.0)
    return {name: max(1, round(MOST_WEIGHT * can / most)) if can > 0 else 0 for name, can in able.items()}
