"""One pass over one pool: see its workers, decide once, and act so that nobody is without a service on the way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import Condition
from offramp_core.control.shared_pool import MOST_SERVICES, SharedPoolStatus
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.protocol import HeldModels, ModelList
from offramp_core.reasons import AnyReason, ConditionType, Reason
from offramp_operator.kube import manifests as service_manifests
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, KubeClient, Lane
from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    FIELD_MANAGER,
    NETWORK_POLICY,
    POD,
    WORKER_POOL,
    Object,
    made,
    name_of,
    uid_of,
)
from offramp_operator.kube.managed import ObjectKey
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.children import Children, NameTakenError, version_text
from offramp_operator.kube.platform.classes import Classes
from offramp_operator.kube.platform.holds import Holds
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.platform.templates import template_mark
from offramp_operator.kube.shared import manifests
from offramp_operator.kube.shared.calls import Calls
from offramp_operator.kube.shared.holders import pods_of
from offramp_operator.kube.shared.members import members
from offramp_operator.kube.shared.plan import PodOfPool, PoolPlan, PoolView, plan_pool, workers_to_have
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.kube.shared.rates import Rates
from offramp_operator.kube.worker_class import settings_for
from offramp_operator.shell.log import log_event
from offramp_operator.shell.manifests import status_from_manifest, status_json
from offramp_operator.shell.platform import ConflictError
from offramp_operator.shell.signing import SigningKey

MOVING_SECONDS, QUIET_SECONDS = 1.0, 10.0  # between two passes
CONFLICT_SECONDS = 0.2
DRAIN_SECONDS = 10.0  # after a service's requests have ceased to be sent to a worker, before it leaves there
SHRINK_SECONDS = 600.0  # fewer workers must have done for so long before one goes
SILENT_SECONDS = 60.0  # before a ready worker that does not answer is named
FIRST_TO_GO = "-2"
SILENT = (
    f"it is ready, and has not answered the operator for {SILENT_SECONDS:.0f} seconds; it serves what it was told "
    "last. Look at its log, and at NetworkPolicies for its admin port"
)
COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass(slots=True)
class _Known:
    """What is remembered of one pool between passes; all of it can be lost."""

    memory: Memory
    rates: Rates = field(default_factory=Rates)
    #: Since when requests are not sent any more, by worker and service.
    unrouted: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Since when fewer workers would do.
    spare_since: float | None = None
    #: The list that each worker took last.
    delivered: dict[str, tuple[str, ModelList]] = field(default_factory=dict)
    #: Why a worker did not take its list, and since when one has not answered.
    refused: dict[str, str] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)


class PoolReconciler:
    """Runs passes over pools."""

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        key: SigningKey,
        *,
        workers: WorkerSettings,
        calls: Calls,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._cache, self._key, self._settings = client, cache, key, workers
        self._children, self._classes, self._calls = Children(client, cache), Classes(cache), calls
        self._holds, self._monotonic = Holds(client, cache, clock=time.time), monotonic
        self._known: dict[ObjectKey, _Known] = {}

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Seconds until the next pass; None for a pool that is gone."""
        obj = self._cache.get(WORKER_POOL, key.namespace, key.name)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._known.pop(key, None)
            return None
        if key not in self._known or self._known[key].memory.uid != uid_of(obj):
            self._known[key] = _Known(Memory(uid_of(obj)))
        try:
            pool = SharedPool.of(obj)
        except (InvalidSpecError, InvalidArgumentError) as error:
            await self._report(obj, Condition(ConditionType.READY, "False", Reason.INVALID_SPEC, str(error)))
            return None
        try:
            return await self._pass(pool, obj, self._known[key])
        except ConflictError as conflict:
            log_event("conflict", f"{key}: {conflict}; trying again", level=logging.DEBUG)
            return CONFLICT_SECONDS

    async def _pass(self, pool: SharedPool, obj: Object, known: _Known) -> float:
        pods = await self._pods(pool, known)
        known.rates.measure(pool.status, pods)
        view = self._view(pool, pods, known)
        plan = plan_pool(view, time.time())
        replicas = self._replicas(pool, plan, pods)
        trouble = await self._ensure_workers(pool, replicas, known)
        if trouble is not None:
            view = replace(view, trouble=trouble)
            plan = plan_pool(view, time.time())
        await self._write(obj, plan.status)  # before anybody is told: an older leader's lists are refused from then on
        known.spare_since = self._spare_since(view, plan, known)
        await self._route(pool, plan, known)
        moving = await self._send_lists(pool, pods, plan, known) or replicas > plan.status.slots
        moving |= any(held.standing == "Loading" for worker in plan.status.workers for held in worker.services)
        return MOVING_SECONDS if moving or plan.status.conditions[0].reason == Reason.PLACING else QUIET_SECONDS

    # --- seeing ------------------------------------------------------------------------------------

    async def _pods(self, pool: SharedPool, known: _Known) -> list[PodOfPool]:
        """The workers, and what they say. Those that end are left alone: their clients are told by Kubernetes."""
        found = [pod for pod in pods_of(self._cache, pool.uid).values() if not pod.ending]
        urls = {pod.uid: pod.admin_url for pod in found if pod.admin_url is not None}
        held = await self._calls.ask(urls, self._key.admin_token(pool.uid))
        now = self._monotonic()
        known.silent = {p.uid: known.silent.get(p.uid, now) for p in found if p.ready and p.uid not in held}
        unheard = {uid: f"it refuses its list of models: {why}" for uid, why in known.refused.items()}
        unheard |= {uid: SILENT for uid, since in known.silent.items() if now - since >= SILENT_SECONDS}
        return [
            PodOfPool(
                p.name,
                p.uid,
                p.current,
                p.ready,
                p.admin_url,
                p.failure.replace("spec.model.uri", "spec.bundles.claimName"),
                held.get(p.uid),
                unheard.get(p.uid, ""),
            )
            for p in sorted(found, key=lambda pod: pod.name)
        ]

    def _view(self, pool: SharedPool, pods: list[PodOfPool], known: _Known) -> PoolView:
        found, now = members(self._cache, pool), self._monotonic()
        enough = known.spare_since is not None and now - known.spare_since >= SHRINK_SECONDS
        return PoolView(
            pool=pool,
            members=found[:MOST_SERVICES],
            left_out=len(found[MOST_SERVICES:]),
            pods=pods,
            busy=known.rates.busy,
            drained={place for place, since in known.unrouted.items() if now - since >= DRAIN_SECONDS},
            fewest=0 if enough else pool.status.slots,
            placed={member.name: member.placed(self._key) for member in found},
        )

    def _spare_since(self, view: PoolView, plan: PoolPlan, known: _Known) -> float | None:
        """Since when fewer workers would do than there are."""
        if plan_pool(replace(view, fewest=0), 0.0).status.slots >= plan.status.slots:
            return None
        return self._monotonic() if known.spare_since is None else known.spare_since

    # --- acting ------------------------------------------------------------------------------------

    def _replicas(self, pool: SharedPool, plan: PoolPlan, pods: list[PodOfPool]) -> int:
        deployment = self._cache.get(DEPLOYMENT, pool.namespace, manifests.workers_name(pool.name)) or {}
        there = int((deployment.get("spec") or {}).get("replicas") or 0)
        seen = ((pod, self._cache.get(POD, pool.namespace, pod.name)) for pod in pods)
        marked = {pod.uid for pod, obj in seen if obj is not None and _cost_of(obj) == FIRST_TO_GO and not _routed(obj)}
        return workers_to_have(plan, pods, there=there, marked=marked)

    async def _ensure_workers(self, pool: SharedPool, replicas: int, known: _Known) -> Condition | None:
        """Bring Deployment and what stands beside it to the spec; what keeps them from it otherwise."""
        memory = known.memory
        made = pool.made_of(self._classes.applied(pool.as_service, memory))
        if memory.class_trouble is not None:  # the workers that there are stay
            return _not_ready(memory.class_trouble.reason, memory.class_trouble.message)
        settings = settings_for(memory.worker_class, self._settings)
        identity = self._key.identity(pool.uid)
        try:
            policy = manifests.network_policy(made, settings)
            if policy is not None:
                await self._children.ensure(memory, NETWORK_POLICY, policy)
            await self._children.ensure(memory, DISRUPTION_BUDGET, manifests.disruption_budget(made))
            body = manifests.deployment(made, identity, settings, replicas=replicas)
            asked, live = template_mark(body["spec"]), self._cache.get(DEPLOYMENT, pool.namespace, name_of(body))
            await self._holds.hold(live, body)
            await self._children.ensure(memory, DEPLOYMENT, body)
            rejected = None if live is None else self._holds.endpoint(live, asked, wanted=replicas)
        except NameTakenError as error:
            return _not_ready(Reason.NAME_TAKEN, str(error))
        except ApiError as error:
            return _not_ready(Reason.REFUSED, error.message)
        return None if rejected is None else _not_ready(Reason.REJECTED_BY_NODE, f"{rejected.name}: {rejected.failure}")

    async def _write(self, obj: Object, status: SharedPoolStatus) -> None:
        if status_from_manifest(SharedPoolStatus, obj) == status:
            return
        meta = obj["metadata"]
        about = {n: meta[n] for n in ("name", "namespace", "uid")} | {"resourceVersion": version_text(obj)}
        body = made(WORKER_POOL, metadata=about, status=status_json(status))
        await self._children.swap(WORKER_POOL, body, subresource="status", lane=Lane.STATUSES)

    async def _report(self, obj: Object, condition: Condition) -> None:
        """Say what is wrong with a spec; the workers stay as they are."""
        before = status_from_manifest(SharedPoolStatus, obj)
        now = time.time()
        known = next((c for c in before.conditions if c.status == condition.status), None)
        since = known.last_transition_at if known is not None else now
        generation = int(obj["metadata"].get("generation", 1))
        condition = replace(condition, observed_generation=generation, last_transition_at=since)
        await self._write(obj, replace(before, observed_generation=generation, conditions=(condition,)))

    async def _route(self, pool: SharedPool, plan: PoolPlan, known: _Known) -> None:
        """Have requests sent to who serves, by the labels that the Services of services select."""
        uids = {service.name: service.uid for service in plan.status.services}
        workers = {worker.uid: worker for worker in plan.status.workers}
        now, unrouted = self._monotonic(), dict[tuple[str, str], float]()
        for uid, order in plan.orders.items():
            wanted = {service_manifests.holds_label(name): uids[name] for name in order.routed}
            unrouted |= {
                (uid, name): known.unrouted.get((uid, name), now) for name in order.holds if name not in order.routed
            }
            pod = self._cache.get(POD, pool.namespace, workers[uid].name)
            if pod is not None and uid_of(pod) == uid:
                await self._label(pod, wanted, cost=_cost(plan, uid))
        known.unrouted = unrouted

    async def _label(self, pod: Object, wanted: Mapping[str, str], *, cost: str) -> None:
        ours = _routed(pod)
        if ours == wanted and _cost_of(pod) == cost:
            return
        changed: dict[str, str | None] = {**dict.fromkeys(ours), **wanted}
        meta = {"uid": uid_of(pod), "labels": changed, "annotations": {COST: cost}}
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        written = await self._client.merge(POD, namespace, name, {"metadata": meta}, manager=FIELD_MANAGER)
        self._cache.put(POD, written)

    async def _send_lists(self, pool: SharedPool, pods: list[PodOfPool], plan: PoolPlan, known: _Known) -> bool:
        """Hand out lists that are not in force; whether anybody lacks his."""
        token, lacking = self._key.admin_token(pool.uid), []
        for pod in pods:
            wanted = plan.lists[pod.uid]
            boot = pod.held.boot_id if pod.held is not None else ""
            in_force = pod.held is not None and known.delivered.get(pod.uid) == (boot, wanted)
            if pod.url is not None and not in_force:
                lacking.append((pod, wanted))
        signed = [self._key.sign(wanted) for _, wanted in lacking]
        answers: list[HeldModels | str | None] = await asyncio.gather(
            *(self._calls.send(p.uid, str(p.url), token, doc) for (p, _), doc in zip(lacking, signed, strict=True))
        )
        known.delivered = {uid: taken for uid, taken in known.delivered.items() if uid in plan.lists}
        for (pod, wanted), answer in zip(lacking, answers, strict=True):
            if isinstance(answer, HeldModels):
                known.delivered[pod.uid] = (answer.boot_id, wanted)
        answered = {pod.uid: answer for (pod, _), answer in zip(lacking, answers, strict=True)}
        known.refused = {uid: answer for uid, answer in answered.items() if isinstance(answer, str)}
        return bool(lacking) or bool(known.unrouted)


def _routed(pod: Object) -> dict[str, str]:
    """The labels by which requests are sent to it."""
    labels = pod["metadata"].get("labels") or {}
    return {name: value for name, value in labels.items() if name.startswith(service_manifests.holds_label(""))}


def _cost_of(pod: Object) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(COST, "0"))


def _cost(plan: PoolPlan, uid: str) -> str:
    """What Kubernetes takes away first: who has no place, then who has a successor."""
    slot = plan.orders[uid].slot
    if slot is None:
        return FIRST_TO_GO
    return "-1" if sum(order.slot == slot for order in plan.orders.values()) > 1 else "0"


def _not_ready(reason: AnyReason, message: str) -> Condition:
    return Condition(ConditionType.READY, "False", reason, message)
