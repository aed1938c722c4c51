"""From what is known of a pool to what is to be: who holds what, and what the status says. Pure."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from offramp_core.control.objects import Condition
from offramp_core.control.shared_pool import HeldService, PooledService, SharedPoolStatus, SharedWorker
from offramp_core.plan import canonical_json
from offramp_core.protocol import HeldModels, ModelList, PlacedModel
from offramp_core.reasons import ConditionType, Reason
from offramp_core.sharing.packing import Demand, Size, pack
from offramp_core.sharing.placing import Orders, PoolWorker, orders
from offramp_operator.kube.shared.members import Member
from offramp_operator.kube.shared.pool import SharedPool

MOST_BUSY = 0.7  # of a worker's executor; above it requests wait long


@dataclass(frozen=True, slots=True)
class PodOfPool:
    """A worker's pod as the cluster has it, and what the worker itself said last."""

    name: str
    uid: str
    current: bool
    ready: bool
    url: str | None = None
    failure: str = ""
    held: HeldModels | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """All that a plan is made of. ``busy`` is seconds of an executor a second by service, ``drained`` as of
    :func:`offramp_core.sharing.placing.orders`, ``fewest`` workers are kept whatever would do."""

    pool: SharedPool
    members: Sequence[Member]
    pods: Sequence[PodOfPool]
    busy: Mapping[str, float]
    drained: Collection[tuple[str, str]]
    fewest: int
    placed: Mapping[str, PlacedModel]
    trouble: Condition | None = None


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What follows: the status (whose ``slots`` is the number of workers), and what each pod is told."""

    status: SharedPoolStatus
    orders: Mapping[str, Orders]
    lists: Mapping[str, ModelList]


def plan_pool(view: PoolView, now: float) -> PoolPlan:
    """One decision."""
    before = view.pool.status
    services = _known(view)
    without = _without_place(view, services)
    demands = [
        Demand(m.name, view.busy.get(m.name, 0.0), services[m.name].bytes, copies=m.service.spec.replicas)
        for m in view.members
        if m.name not in without
    ]
    spec = view.pool.spec
    size = Size(
        MOST_BUSY, spec.memory_bytes, min(max(spec.min_workers, view.fewest), spec.max_workers), spec.max_workers
    )
    packing = pack(demands, size, held=_held_before(before))
    slots = _needed(packing.workers, at_least=size.min_workers)
    packed = [packing.workers[i] if i < len(packing.workers) else frozenset[str]() for i in slots]
    without |= {name: _in_fields(why, view.pool) for name, why in packing.unplaced.items()}
    given = orders(_workers(view, slots), packed, members=[m.name for m in view.members], drained=view.drained)
    lists = _lists(view, given)
    digest = hashlib.sha256(canonical_json(msgspec.to_builtins(sorted(lists.items())))).hexdigest()[:16]
    epoch = before.epoch if digest == before.lists else before.epoch + 1
    lists = {uid: replace(listed, epoch=epoch) for uid, listed in lists.items()}
    status = _status(view, given, services, without)
    status = replace(status, epoch=epoch, lists=digest, slots=len(slots))
    return PoolPlan(replace(status, conditions=(_ready(view, status, now),)), given, lists)


def _known(view: PoolView) -> dict[str, PooledService]:
    """What is known of each service: by its workers, else from before."""
    earlier = {service.uid: service for service in view.pool.status.services}
    reported = {held.service_uid: held for pod in view.pods if pod.held is not None for held in pod.held.models}
    found = {}
    for member in view.members:
        uid, mark = member.service.uid, view.placed[member.name].mark
        known, held = earlier.get(uid), reported.get(uid)
        if known is None or known.mark != mark:
            known = PooledService(member.name, uid, mark=mark)
        if held is not None and held.model:
            known = replace(known, bytes=held.bytes, model=held.model)
        found[member.name] = replace(known, message="", workers=0)
    return found


def _without_place(view: PoolView, services: Mapping[str, PooledService]) -> dict[str, str]:
    """Services that no worker may hold, whatever room there is: the oldest of a model's name has it."""
    found, owners = dict[str, str](), dict[str, str]()
    for member in view.members:
        model = services[member.name].model
        if member.trouble:
            found[member.name] = member.trouble
        elif model and model in owners:
            found[member.name] = (
                f"its bundle calls the model {model!r}, as that of service {owners[model]} in WorkerPool "
                f"{view.pool.name} does; prepare it with another --name, or use another pool"
            )
        elif model:
            owners[model] = member.name
    return found


def _held_before(status: SharedPoolStatus) -> list[frozenset[str]]:
    held = [frozenset[str]() for _ in range(status.slots)]
    for worker in status.workers:
        if 0 <= worker.slot < status.slots:
            held[worker.slot] |= {service.name for service in worker.services}
    return held


def _needed(packed: Sequence[frozenset[str]], *, at_least: int) -> list[int]:
    """Which of the slots that there were, and of new ones, are needed; those without services only to be enough."""
    full = [i for i, services in enumerate(packed) if services]
    empty = (i for i in itertools.count() if i not in full)
    return sorted([*full, *itertools.islice(empty, max(0, at_least - len(full)))])


def _workers(view: PoolView, needed: Sequence[int]) -> list[PoolWorker]:
    """The workers, each with the place that its slot has now among the ``needed`` ones."""
    places = {slot: place for place, slot in enumerate(needed)}
    slots = {worker.uid: places.get(worker.slot) for worker in view.pool.status.workers}
    names = {member.service.uid: member.name for member in view.members}
    found = []
    for pod in view.pods:
        models = pod.held.models if pod.held is not None else ()
        found.append(
            PoolWorker(
                pod.uid,
                current=pod.current,
                ready=pod.ready,
                slot=slots.get(pod.uid),
                holds=frozenset(names[m.service_uid] for m in models if m.service_uid in names),
                serves=frozenset(
                    names[m.service_uid] for m in models if m.service_uid in names and m.standing == "Serving"
                ),
            )
        )
    return found


def _lists(view: PoolView, given: Mapping[str, Orders]) -> dict[str, ModelList]:
    """What workers are told, by uid; of no epoch yet."""
    return {
        uid: ModelList(
            view.pool.uid,
            uid,
            0,
            tuple(replace(view.placed[name], leaving=name in order.leaving) for name in sorted(order.holds)),
        )
        for uid, order in given.items()
    }


def _in_fields(why: str, pool: SharedPool) -> str:
    return (
        f"WorkerPool {pool.name} (spec.memory {pool.spec.memory_bytes} bytes, {pool.spec.max_workers} workers): {why}"
    )


def _status(
    view: PoolView, given: Mapping[str, Orders], services: Mapping[str, PooledService], without: Mapping[str, str]
) -> SharedPoolStatus:
    workers = []
    for pod in view.pods:
        order, held = given[pod.uid], pod.held.models if pod.held is not None else ()
        by_uid = {model.service_uid: model for model in held}
        standing = []
        for name in sorted(order.holds):
            uid = view.placed[name].service_uid
            model = by_uid.get(uid)
            entry = HeldService(name, uid, "Loading")
            if model is not None:
                entry = HeldService(name, uid, model.standing, model.model, model.mark, model.message)
            standing.append(entry)
        slot = -1 if order.slot is None else order.slot
        workers.append(SharedWorker(pod.name, pod.uid, slot, pod.ready, tuple(standing)))
    known = [
        replace(
            services[m.name],
            message=without.get(m.name, ""),
            workers=sum(
                w.ready and any(s.name == m.name and s.standing == "Serving" for s in w.services) for w in workers
            ),
        )
        for m in view.members
    ]
    placed = sum(service.workers > 0 for service in known)
    ready = sum(worker.ready for worker in workers)
    return SharedPoolStatus(
        observed_generation=view.pool.generation,
        summary=f"{ready} of {len(workers)}",
        placed=f"{placed} of {len(known)}",
        workers=tuple(workers),
        services=tuple(known),
    )


def _ready(view: PoolView, status: SharedPoolStatus, now: float) -> Condition:
    before = next((c for c in view.pool.status.conditions if c.type == ConditionType.READY), None)
    made = view.trouble or _standing(view, status)
    since = before.last_transition_at if before is not None and before.status == made.status else now
    return replace(made, observed_generation=view.pool.generation, last_transition_at=since)


def _asks_too_much(view: PoolView, name: str) -> str:
    wanted = next(member.service.spec.replicas for member in view.members if member.name == name)
    most = view.pool.spec.max_workers
    return (
        ""
        if wanted <= most
        else f"spec.replicas is {wanted}, and the pool's spec.maxWorkers {most}; change one of them"
    )


def _standing(view: PoolView, status: SharedPoolStatus) -> Condition:
    ready, memory = ConditionType.READY, view.pool.spec.memory_bytes
    sizes = {service.name: service.bytes for service in status.services if service.bytes}
    smallest = min(sizes, key=lambda name: sizes[name], default="")
    if smallest and sizes[smallest] > memory:
        need = f"the smallest bundle, of {smallest}, takes {sizes[smallest]}: give more than that"
        return Condition(ready, "False", Reason.MEMORY_TOO_SMALL, f"spec.memory is {memory} bytes; {need}")
    if failing := next((pod for pod in view.pods if pod.failure), None):
        return Condition(ready, "False", Reason.WORKER_FAILED, f"{failing.name}: {failing.failure}")
    failed = {s.name: s.message for worker in status.workers for s in worker.services if s.standing == "Failed"}
    why = {s.name: s.message or failed.get(s.name, "") or _asks_too_much(view, s.name) for s in status.services}
    if lacking := [f"{name}: {message}" for name, message in why.items() if message]:
        return Condition(ready, "False", Reason.SERVICES_WITHOUT_PLACE, "; ".join(lacking)[:1000])
    wanted = {member.name: member.service.spec.replicas for member in view.members}
    waiting = [service.name for service in status.services if service.workers < wanted[service.name]]
    if waiting or sum(worker.ready for worker in status.workers) < status.slots:
        what = f"waiting for {', '.join(waiting[:10])}" if waiting else "waiting for workers"
        return Condition(ready, "False", Reason.PLACING, f"{status.summary} workers ready; {what}")
    return Condition(ready, "True", Reason.POOL_READY, f"{status.placed} services served by {status.summary} workers")
