"""The pools of a service: what the workers of each can do as they were measured there, and how requests are shared.

A profile is taken on the machine where the bundle was prepared. What a pool's workers make of it is measured in the
pool: each worker runs whole batches before it is ready and tells how much slower or faster than the profile it is, and
batches that ran with exits off tell it under traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from offramp_core.control.objects import PoolStatus, Service
from offramp_core.control.snapshot import ClassShare, Worker
from offramp_core.control.spec import WorkerPool
from offramp_core.control.workers.capacity import WorkerBatch, best_batch, impossible_pace, rate_anew
from offramp_core.control.workers.startup import next_startup

BATCH_SHARE = 0.25  # of the objective, which leaves half of it for waiting where two batches come before
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
            earlier = PoolStatus(pool.name, planned=earlier.planned, startup=earlier.startup)
        earlier = _measured(earlier, measured_batch([w for w in own if w.endpoint.name not in doubted], model))
        ready = sum(w.endpoint.ready for w in own)
        lacking = next((w.endpoint.failure for w in own if w.endpoint.finds_no_place), "")
        found.append(
            replace(
                earlier,
                desired=pool.replicas,
                ready=ready,
                model=(earlier.model if model is None else model.digest) if earlier.worker_rate else "",
                message=lacking if ready < pool.replicas else "",
                startup=next_startup(earlier.startup, (w.endpoint.startup for w in own)),
                planned=0 if pool.max_workers is None else _planned(pool, known.get(pool.name)),
            )
        )
    return tuple(found)


def _planned(pool: WorkerPool, before: PoolStatus | None) -> int:
    """What was planned so far: at first the user's number, or the fewest."""
    if before is not None:
        return before.planned
    return pool.replicas if pool.fixed else pool.min_workers


def _measured(before: PoolStatus, batch: WorkerBatch | None) -> PoolStatus:
    """The figures of a batch, rounded to the safe side; those of before while they are about right."""
    if batch is None or (rate := rate_anew(before.worker_rate, batch.rate)) == before.worker_rate:
        return before
    return replace(before, worker_rate=rate, batch_size=batch.rows, batch_seconds=float(f"{batch.seconds:.2g}"))


def with_place(workers: Iterable[Worker]) -> dict[str, int]:
    """How many workers of each pool answer or start."""
    return dict(Counter(w.endpoint.pool for w in workers if not (w.endpoint.finds_no_place or w.endpoint.ending)))


def measured_batch(workers: Sequence[Worker], model: Model | None) -> WorkerBatch | None:
    """In which batches one of the workers answers most in time with exits off, by what they measured themselves; None
    where none did. Their paces are times of the profile of the bundle that they have: the model's, or their pool's."""
    if model is None:
        return None
    measured = [w for w in workers if _pace(w, model) > 0]
    if not measured:
        return None
    # While the pool goes over to another bundle, what comes counts, and a pace only with the profile it is of.
    newest = next((w for w in measured if w.endpoint.current), measured[0])
    costs = _profile(newest, model)
    alike = [w for w in workers if _profile(w, model) == costs]
    paces = [pace for w in alike if (pace := _pace(w, model)) > 0]
    observed = [w.observations for w in alike if w.observations is not None]
    return best_batch(
        costs,
        (c for o in observed for c in (*o.counts, *o.held_back)),
        exits_off_hash=model.exits_off_hash,
        latency_seconds=model.latency_seconds,
        least_pace=median(paces),  # one that was held up as it measured does not speak for the others
        batch_share=BATCH_SHARE,
    )


def _pace(worker: Worker, model: Model) -> float:
    """What a worker of the model measured; 0 where it did not, or tells what cannot be."""
    state = worker.state
    if state is None or state.backbone_digest != model.digest or impossible_pace(state.pace):
        return 0.0
    return state.pace


def _profile(worker: Worker, model: Model) -> Mapping[str, Sequence[Any]]:
    """The costs that a worker's pace is a multiple of; empty of a bundle that was not told."""
    if not worker.endpoint.own_bundle:
        return model.costs
    return {} if worker.state is None else worker.state.costs


def with_numbers(service: Service, shares: Mapping[str, ClassShare] | None = None) -> Service:
    """The service with the numbers of workers that the operator decided on where the spec leaves them to it; before it
    has, one in each pool, which is measured. A pool that has more than it still may keeps them until the plan lowers
    the number: others answer first. What other services have of a pool's class, by ``shares``, is not asked for."""
    spec, known = service.spec, {pool.name: pool.desired for pool in service.status.pools}
    if all(pool.fixed for pool in spec.pools):
        return service
    most = {name: share.limit(known.get(name, 0)) for name, share in (shares or {}).items()}
    numbers = [max(pool.min_workers, known.get(pool.name, 1)) for pool in spec.pools]
    numbers = [min(n, most.get(pool.name, n)) for n, pool in zip(numbers, spec.pools, strict=True)]
    pools = tuple(replace(pool, replicas=n) for pool, n in zip(spec.pools, numbers, strict=True))
    return replace(service, spec=replace(spec, pools=pools, replicas=sum(numbers)))


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
    one something. Where nobody has any, all get as much: the first worker that comes is found at once.

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
    if most <= 0:
        return dict.fromkeys(able, MOST_WEIGHT)
    return {name: max(1, round(MOST_WEIGHT * can / most)) if can > 0 else 0 for name, can in able.items()}
