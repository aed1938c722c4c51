"""From what is known of a pool to what is to be: who holds what, and what the status says. Pure."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from offramp_core.control.objects import Condition
from offramp_core.control.shared_pool import MOST_SERVICES, HeldService, PooledService, SharedPoolStatus, SharedWorker
from offramp_core.plan import canonical_json
from offramp_core.protocol import HeldModel, HeldModels, ModelList, ModelStanding, PlacedModel
from offramp_core.reasons import ConditionType, Reason
from offramp_core.sharing.packing import Demand, Packing, Size, pack
from offramp_core.sharing.placing import Orders, PoolWorker, orders
from offramp_operator.kube.shared.members import Member
from offramp_operator.kube.shared.pool import SharedPool

ANSWERS: tuple[ModelStanding, ...] = ("Serving", "Unloaded")  # whom requests are sent to
MOST_BUSY = 0.7  # of a worker's executor; above it requests wait long
LIST_BYTES = 800_000  # of the MiB that a worker takes as its list; the rest is for what is on its way
MOST_EPOCH = 2**53  # what a worker says above it is no epoch that an operator gave


@dataclass(frozen=True, slots=True)
class PodOfPool:
    """A worker's pod as the cluster has it, and what the worker itself said in this pass. ``failure`` keeps it from
    running, ``unheard`` says that its list was refused, or that it answers nothing."""

    name: str
    uid: str
    current: bool
    ready: bool
    url: str | None = None
    failure: str = ""
    held: HeldModels | None = None
    unheard: str = ""


@dataclass(frozen=True, slots=True)
class PoolView:
    """All that a plan is made of. ``busy`` is seconds of an executor a second by service, ``drained`` as of
    :func:`offramp_core.sharing.placing.orders`, ``fewest`` workers are kept whatever would do. The pool has no room
    for ``left_out`` further services."""

    pool: SharedPool
    members: Sequence[Member]
    pods: Sequence[PodOfPool]
    busy: Mapping[str, float]
    drained: Collection[tuple[str, str]]
    fewest: int
    placed: Mapping[str, PlacedModel]
    trouble: Condition | None = None
    left_out: int = 0


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
    spec = view.pool.spec
    size = Size(
        MOST_BUSY, spec.memory_bytes, min(max(spec.min_workers, view.fewest), spec.max_workers), spec.max_workers
    )
    packing, at_rest, crowded = _packed(view, services, size, without)
    slots = _needed(packing.workers, at_least=size.min_workers)
    packed = [packing.workers[i] if i < len(packing.workers) else frozenset[str]() for i in slots]
    without |= crowded
    without |= {name: _in_fields(why, view.pool) for name, why in packing.unplaced.items()}
    given = orders(_workers(view, slots), packed, members=[m.name for m in view.members], drained=view.drained)
    lists = _lists(view, given, at_rest)
    digest = hashlib.sha256(canonical_json(msgspec.to_builtins(sorted(lists.items())))).hexdigest()[:16]
    # A status that was restored or lost is behind its workers, which take nothing older than they have.
    newest = max([before.epoch, *(p.held.epoch for p in view.pods if p.held is not None and p.held.epoch < MOST_EPOCH)])
    epoch = newest if (digest, newest) == (before.lists, before.epoch) else newest + 1
    lists = {uid: replace(listed, epoch=epoch) for uid, listed in lists.items()}
    status = _status(view, given, services, without)
    status = replace(status, epoch=epoch, lists=digest, slots=len(slots))
    return PoolPlan(replace(status, conditions=(_ready(view, status, now),)), given, lists)


def workers_to_have(plan: PoolPlan, pods: Sequence[PodOfPool], *, there: int, marked: Collection[str]) -> int:
    """Replicas of the Deployment, which has ``there`` now: fewer only once those who go are known to be the right ones.

    Whoever has no slot holds nothing any more and is ``marked``: no requests are sent to it, and it is the first to be
    deleted. While workers are replaced or not ready, Kubernetes would choose by that instead.
    """
    wanted = plan.status.slots

    def settled(pod: PodOfPool) -> bool:
        order = plan.orders[pod.uid]
        empty = not order.holds and (pod.held is None or not pod.held.models)
        return pod.current and (pod.ready if order.slot is not None else empty and pod.uid in marked)

    return wanted if wanted >= there or all(settled(pod) for pod in pods) else there


def _known(view: PoolView) -> dict[str, PooledService]:
    """What is known of each service: by its workers, else from before."""
    earlier = {service.uid: service for service in view.pool.status.services}
    reported = {held.service_uid: held for pod in view.pods if pod.held is not None for held in pod.held.models}
    found = {}
    for member in view.members:
        uid, mark = member.service.uid, view.placed[member.name].mark
        before, held = earlier.get(uid, PooledService(member.name, uid, mark=mark)), reported.get(uid)
        known = before
        if known.mark != mark:
            known = PooledService(member.name, uid, mark=mark, model="" if before.message else before.model)
        if held is not None and held.model:
            known = replace(known, bytes=held.bytes or known.bytes, model=held.model)
        busy = _in_millis(view.busy.get(member.name), before.busy_millis)
        found[member.name] = replace(known, message="", workers=0, busy_millis=busy)
    return found


def _in_millis(busy: float | None, before: int) -> int:
    """What is stored of a rate: what was, unless it is another by a tenth, or another number of workers follows."""
    if busy is None:
        return before
    millis = round(busy * 1000)
    same = math.ceil(millis / MOST_BUSY / 1000) == math.ceil(before / MOST_BUSY / 1000)
    return before if same and abs(millis - before) <= max(10, before // 10) else millis


def _packed(
    view: PoolView, services: Mapping[str, PooledService], size: Size, without: Mapping[str, str]
) -> tuple[Packing, frozenset[str], dict[str, str]]:
    """Who holds what; which services need no memory for now, since nobody asks for them; and which of these do not get
    it though somebody asks, and why: what is in memory is not pushed out for them."""
    members = {m.name: m for m in view.members if m.name not in without}
    resting = {name: wanted for name, wanted in _at_rest(view).items() if name in members}
    waking = [name for name in members if resting.get(name)]

    def packed(at_rest: Collection[str]) -> Packing:
        demands = [_demand(view, m, services[name], at_rest=name in at_rest) for name, m in members.items()]
        return pack(demands, size, held=_held_before(view.pool.status))

    awake, crowded = set[str](), dict[str, str]()
    if waking:
        least = packed(resting).unplaced.keys()
        for name in waking:
            if packed(resting.keys() - awake - {name}).unplaced.keys() <= least:
                awake.add(name)
            else:
                need = f"it is asked for, and no worker has {services[name].bytes} bytes left to load it into"
                crowded[name] = _in_fields(f"{need}; raise maxWorkers or the memory for models", view.pool)
    return packed(resting.keys() - awake), frozenset(resting.keys() - awake), crowded


def _at_rest(view: PoolView) -> dict[str, bool]:
    """Services that are in no worker's memory, as they are to be served now, and whether somebody has asked for them
    since."""
    heard, found = _heard(view), dict[str, bool]()
    for member in view.members:
        uid, mark = member.service.uid, view.placed[member.name].mark
        held = [model for models in heard.values() for model in models if model.service_uid == uid]
        placed = [model for model in held if model.standing != "Loading" or model.mark]
        if placed and all((model.standing, model.mark) == ("Unloaded", mark) for model in placed):
            found[member.name] = any(model.wanted for model in placed)
    return found


def _demand(view: PoolView, member: Member, known: PooledService, *, at_rest: bool) -> Demand:
    """A rate that this operator has not measured yet is that of the one before it. Memory is at least such a part of
    the worker's as its entry has of what a list may be, so that no list is longer than a worker takes."""
    entry = len(msgspec.json.encode(msgspec.json.encode(view.placed[member.name]).decode()))
    least = -(-view.pool.spec.memory_bytes * entry // LIST_BYTES)
    busy = view.busy.get(member.name, known.busy_millis / 1000)
    return Demand(member.name, busy, least if at_rest else max(known.bytes, least), copies=member.service.spec.replicas)


def _without_place(view: PoolView, services: Mapping[str, PooledService]) -> dict[str, str]:
    """Services that no worker may hold, whatever room there is. A model's name is of the service that has it already,
    else of the oldest."""
    found, owners = dict[str, str](), dict[str, str]()
    for member in sorted(view.members, key=lambda m: not _has_name(view, services[m.name])):
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


def _has_name(view: PoolView, known: PooledService) -> bool:
    """Whether a service was called as it is now, and had a place or serves."""
    before = next((s for s in view.pool.status.services if s.uid == known.uid), None)
    if before is None or before.model != known.model:
        return False
    held = (s for worker in view.pool.status.workers for s in worker.services if s.uid == known.uid)
    return not before.message or any(s.standing in ANSWERS and s.model == known.model for s in held)


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
    heard, found = _heard(view), []
    for pod in view.pods:
        models = heard[pod.uid]
        found.append(
            PoolWorker(
                pod.uid,
                current=pod.current,
                ready=pod.ready,
                slot=slots.get(pod.uid),
                holds=frozenset(names[m.service_uid] for m in models if m.service_uid in names),
                serves=frozenset(
                    names[m.service_uid] for m in models if m.service_uid in names and m.standing in ANSWERS
                ),
            )
        )
    return found


def _heard(view: PoolView) -> dict[str, tuple[HeldModel, ...]]:
    """What each worker holds, by uid: as it says, else as it said last. One that the operator does not reach may well
    serve; whether requests can be sent there is the kubelet's to say."""
    found = {
        worker.uid: tuple(
            HeldModel(
                held.uid,
                held.standing,
                mark=held.mark,
                model=held.model,
                message=held.message,
                load_seconds=held.load_millis / 1000,
            )
            for held in worker.services
        )
        for worker in view.pool.status.workers
    }
    return {pod.uid: found.get(pod.uid, ()) if pod.held is None else pod.held.models for pod in view.pods}


def _lists(view: PoolView, given: Mapping[str, Orders], at_rest: Collection[str]) -> dict[str, ModelList]:
    """What workers are told, by uid; of no epoch yet."""
    return {
        uid: ModelList(
            view.pool.uid,
            uid,
            0,
            tuple(
                replace(view.placed[name], leaving=name in order.leaving, at_rest=name in at_rest)
                for name in sorted(order.holds)
            ),
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
    heard, workers = _heard(view), []
    for pod in view.pods:
        order, by_uid = given[pod.uid], {model.service_uid: model for model in heard[pod.uid]}
        standing = []
        for name in sorted(order.holds):
            uid = view.placed[name].service_uid
            model = by_uid.get(uid)
            entry = HeldService(name, uid, "Loading")
            if model is not None:
                load = round(1000 * model.load_seconds)
                entry = HeldService(name, uid, model.standing, model.model, model.mark, model.message, load)
            standing.append(entry)
        slot = -1 if order.slot is None else order.slot
        workers.append(SharedWorker(pod.name, pod.uid, slot, pod.ready, tuple(standing)))
    counted = Counter[tuple[str, ModelStanding]]((s.name, s.standing) for w in workers if w.ready for s in w.services)
    known = [
        replace(
            services[m.name],
            message=without.get(m.name, ""),
            workers=sum(counted[m.name, standing] for standing in ANSWERS),
            unloaded=counted[m.name, "Unloaded"],
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
    if failing := next((pod for pod in view.pods if pod.failure or pod.unheard), None):
        why_not = failing.failure or failing.unheard
        return Condition(ready, "False", Reason.WORKER_FAILED, f"{failing.name}: {why_not}"[:1000])
    failed = {s.name: s.message for worker in status.workers for s in worker.services if s.standing == "Failed"}
    why = {s.name: s.message or failed.get(s.name, "") or _asks_too_much(view, s.name) for s in status.services}
    lacking = [f"{name}: {message}" for name, message in why.items() if message]
    if view.left_out:
        young = f"the {view.left_out} youngest have no place"
        lacking.insert(0, f"the pool takes {MOST_SERVICES} services, and {young}; use another pool")
    if lacking:
        return Condition(ready, "False", Reason.SERVICES_WITHOUT_PLACE, "; ".join(lacking)[:1000])
    wanted = {member.name: member.service.spec.replicas for member in view.members}
    waiting = [service.name for service in status.services if service.workers < wanted[service.name]]
    if waiting or sum(worker.ready for worker in status.workers) < status.slots:
        what = f"waiting for {', '.join(waiting[:10])}" if waiting else "waiting for workers"
        return Condition(ready, "False", Reason.PLACING, f"{status.summary} workers ready; {what}")
    resting = sum(0 < service.unloaded == service.workers for service in status.services)
    unloaded = f"; {resting} are unloaded until somebody asks" if resting else ""
    served = f"{status.placed} services served by {status.summary} workers{unloaded}"
    return Condition(ready, "True", Reason.POOL_READY, served)
