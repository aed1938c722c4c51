"""The Kubernetes platform: reads from the cache, writes by server-side apply, and only where something differs."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from offramp_core.control.capacity import floor_in_force
from offramp_core.control.objects import Condition, ConfigStatus, ModelSource, RolloutStatus, Service, ServiceStatus
from offramp_core.control.pace import Member, Standing
from offramp_core.control.snapshot import (
    Event,
    NewConfig,
    NewRollout,
    RouteTrouble,
    Scaling,
    TrainingOrder,
    TrainingReport,
    Turn,
)
from offramp_core.control.spec import Gateway
from offramp_core.control.update import brought_back, strategy_in_force
from offramp_core.control.versions import Split, request_share, split_in_force
from offramp_core.errors import InvalidSpecError, OfframpError
from offramp_core.protocol import PlanDocument, SignedDocument
from offramp_core.reasons import AnyReason, ConditionType, Reason, as_said
from offramp_operator.kube import manifests, pods, routes, training
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, GoneError, InvalidObjectError, KubeClient, Lane
from offramp_operator.kube.fields import adopted
from offramp_operator.kube.kinds import (
    APPLIED_ANNOTATION,
    AUTOSCALER,
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    FIELD_MANAGER,
    GROUP_VERSION,
    HANDOVER_MANAGER,
    HTTP_ROUTE,
    JOB,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    SERVICE_LABEL,
    TEMPLATE_ANNOTATION,
    Kind,
    Object,
    name_of,
    namespace_of,
    owner_of,
    uid_of,
)
from offramp_operator.kube.scaling import Scalers, handed_over, holds_replicas_alone, scalers, scaling
from offramp_operator.kube.slim import content, slim
from offramp_operator.kube.turns import TurnKeeper, administrators_image, member
from offramp_operator.kube.watch import service_key
from offramp_operator.shell.log import log_event
from offramp_operator.shell.manifests import (
    OBJECT_LIMIT_BYTES,
    bounded,
    config_from_manifest,
    rollout_from_manifest,
    rollout_spec,
    same_status,
    service_from_manifest,
    status_from_manifest,
    status_json,
)
from offramp_operator.shell.platform import ConflictError, Gathered, ServiceKey, WorkerEndpoint, WorkerIdentity

REFUSED_RETRY_SECONDS = 30.0
SCALER_GONE_SECONDS = 60.0  # a user's autoscaler that is replaced must not cost workers in between
LET_GO_SECONDS = 30.0  # a Gateway that has not taken in a route after so long is not waited for
EVENT_MESSAGE_LIMIT = 1024
SAME_EVENT_SECONDS = 60.0
REPORTER = "earlyexit.dev/offramp"

S = TypeVar("S", ServiceStatus, ConfigStatus, RolloutStatus)


class NameTakenError(OfframpError):
    """An object of the name that a child needs exists and belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was last applied to a child, and what the API server made of it: its fingerprint."""

    desired: str
    live: str


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why the workers, or the route to them, cannot be brought to a generation. ``unreadable`` is what kept routes from being read then."""

    generation: int
    reason: AnyReason
    message: str
    retry_at: float
    unreadable: str = ""


@dataclass(slots=True)
class _Memory:
    """What is remembered of one service between passes. All of it can be lost: then everything is applied once more.

    ``scaler`` is the user's autoscaler that was last seen. ``refused`` is the last training whose Job could not be made.
    ``versions`` are the resource versions that the present pass decided on; its writes go through only on those. ``leaving_since`` is when workers
    on trial were found that are to go as soon as no Gateway sends them requests. ``earlier`` are the pods that were brought back, by their digest.
    ``image`` is the administrator's image that the pods are to have now, and ``kept`` the digest of pods that stay as they are until the service's turn comes.
    """

    uid: str
    templates: dict[tuple[bool, str], tuple[tuple[int, ModelSource], str | None]] = field(default_factory=dict)
    applied: dict[str, _Applied] = field(default_factory=dict)
    problem: _Problem | None = None
    route_problem: _Problem | None = None
    leaving_since: float | None = None
    scaler: Scaling | None = None
    scaler_seen_at: float = 0.0
    refused: TrainingReport | None = None
    earlier: tuple[str, Object] | None = None
    image: str = ""
    kept: str | None = None
    versions: dict[tuple[Kind, str], str] = field(default_factory=dict)


class KubePlatform:
    """Implements :class:`offramp_operator.shell.platform.Platform` on a cluster.

    Parameters
    ----------
    client, cache
        The API server, and what the watches know of it; answers to writes go straight to the cache.
    workers : WorkerSettings
        What the administrator decided about workers.
    instance : str
        Name of this process in Events.
    clock, monotonic : callable
        Seconds since the epoch; seconds that never jump.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        *,
        workers: manifests.WorkerSettings,
        instance: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._cache = cache
        self._workers = workers
        self._instance = instance
        self._clock = clock
        self._monotonic = monotonic
        self._memories: dict[ServiceKey, _Memory] = {}
        self._changes: dict[ServiceKey, int] = {}
        self._turns = TurnKeeper(clock=clock, monotonic=monotonic)
        cache.tell(self._note)

    def _note(self, obj: Object) -> None:
        if (key := service_key(obj)) is not None:
            self._changes[key] = self._changes.get(key, 0) + 1

    # --- reading -----------------------------------------------------------------------------------

    def changes(self, key: ServiceKey) -> int:
        """How many changes of objects that belong to a service have been seen."""
        return self._changes.get(key, 0)

    async def gather(self, key: ServiceKey) -> Gathered | None:
        """Read from the cache. A service that is being deleted counts as gone: nothing may be made for it any more."""
        obj = self._cache.get(SERVICE, key.namespace, key.name)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        memory = self._memory(key, uid_of(obj))
        memory.versions = {(SERVICE, key.name): _version(obj)}
        self._turns.note(key, Member(counts=False))  # one that cannot be read must not keep the others waiting
        try:
            service = service_from_manifest(obj)
        except InvalidSpecError as error:
            await self._report_invalid_spec(obj, error)
            raise
        turn = self._turn(key, service, memory)
        configs = self._children(memory, CONFIG)
        rollouts = tuple(rollout_from_manifest(child) for child in self._children(memory, ROLLOUT))
        return Gathered(
            service=service,
            configs={name_of(child): config_from_manifest(child) for child in configs},
            rollouts=rollouts,
            workers=self._endpoints(service, memory),
            published=_document(self._plan(service)),
            url=manifests.service_url(service),
            scaling=self._scaling(service, memory),
            can_train=service.spec.store_claim is not None,
            training=self._training(service, memory),
            route=self._route_trouble(service, memory),
            template=self._template(service, memory, trial=False) or "",
            turn=turn,
        )

    def _training(self, service: Service, memory: _Memory) -> TrainingReport | None:
        """What became of the training that the status speaks of."""
        sets, refused = service.status.ramp_sets, memory.refused
        if sets.state != "Training" or sets.capture_since_at is None:
            return None
        if refused is not None and (refused.attempt, refused.since) == (sets.attempt, sets.capture_since_at):
            return refused
        job = self._cache.get(JOB, service.namespace, manifests.training_name(service.name, sets.capture_since_at))
        if job is None or not pods.controls(service.uid, job):
            return None
        own = self._cache.owned(POD, uid_of(job))
        return training.report(job, own, attempt=sets.attempt, since=sets.capture_since_at, now=self._clock())

    def _children(self, memory: _Memory, kind: Kind) -> list[Object]:
        found = [obj for obj in self._cache.owned(kind, memory.uid) if not obj["metadata"].get("deletionTimestamp")]
        memory.versions.update({(kind, name_of(obj)): _version(obj) for obj in found})
        return found

    def _plan(self, service: Service) -> Object | None:
        obj = self._cache.get(CONFIG_MAP, service.namespace, manifests.plan_name(service.name))
        return obj if obj is not None and pods.controls(service.uid, obj) else None

    def _endpoints(self, service: Service, memory: _Memory) -> tuple[WorkerEndpoint, ...]:
        found: tuple[WorkerEndpoint, ...] = ()
        for deployment in self._cache.owned(DEPLOYMENT, service.uid):
            trial = name_of(deployment) == manifests.trial_name(service.name)
            replica_sets = self._cache.owned(REPLICA_SET, uid_of(deployment))
            by_owner = {uid_of(rs): self._cache.owned(POD, uid_of(rs)) for rs in replica_sets}
            template = self._template(service, memory, trial=trial)
            seen = pods.endpoints(deployment, replica_sets, by_owner, template=template)
            found += tuple(replace(endpoint, trial=True) for endpoint in seen) if trial else seen
        problem = self._problem(service, memory)
        return found if problem is None else (*found, problem)

    def _scalers(self, service: Service) -> Scalers:
        return scalers(service, self._cache.autoscalers(service.namespace, service.name))

    def _scaling(self, service: Service, memory: _Memory) -> Scaling | None:
        """What decides on the number of workers. A user's autoscaler that has just gone may be on its way back."""
        found = self._scalers(service)
        owned = self._cache.owned(DEPLOYMENT, service.uid)
        decides = scaling(service, found, next((obj for obj in owned if name_of(obj) == service.name), None))
        if found.others:
            memory.scaler, memory.scaler_seen_at = decides, self._monotonic()
        elif decides is None and memory.scaler is not None:
            if self._monotonic() - memory.scaler_seen_at < SCALER_GONE_SECONDS:
                return memory.scaler
            memory.scaler = None
        return decides

    def _split(self, service: Service, memory: _Memory) -> tuple[Scaling | None, int, Split]:
        """What decides on the number of workers, how many it wants, and how they are shared between two versions."""
        decides = self._scaling(service, memory)
        desired = service.spec.replicas if decides is None else decides.desired
        return decides, desired, split_in_force(service, desired, scaled=decides is not None)

    def _template(self, service: Service, memory: _Memory, *, trial: bool) -> str | None:
        """Digest of the pods that the main Deployment, or that of the trial, should have now."""
        if not trial and memory.kept is not None:
            return memory.kept
        return self._digest_with(memory.image, service, memory, trial=trial)

    def _digest_with(self, image: str, service: Service, memory: _Memory, *, trial: bool) -> str | None:
        if not trial:
            service = split_in_force(service, 0, scaled=False).main
        made_of = service.generation, ModelSource.of(service.spec)
        known = memory.templates.get((trial, image))
        if known is None or known[0] != made_of:
            try:
                settings = replace(self._workers, image=image)
                known = made_of, manifests.template_digest(service, settings, trial=trial)
            except InvalidSpecError:
                known = made_of, None
            memory.templates[trial, image] = known
        return known[1]

    # --- whose turn it is to be changed by the administrator ---------------------------------------------

    def take_turns(self) -> frozenset[ServiceKey]:
        """Look whose turn it is; returns the services that are to be woken for it."""
        if not self._turns.standing("Waiting"):
            return frozenset()
        woken = self._turns.woken(services=len(self._cache.names(SERVICE)))
        for key in woken:
            self._changes[key] = self._changes.get(key, 0) + 1
        return woken

    def standing(self, how: Standing) -> int:
        """How many services stand in one way with what the administrator asks for."""
        return self._turns.standing(how)

    def _turn(self, key: ServiceKey, service: Service, memory: _Memory) -> Turn | None:
        """Why the workers stay as they are, where they are not what the administrator asks for. Decides what they are to be until then.

        What differs although the user's spec has been served before is the administrator's change. While a spec is still to be served, its pods are made with the image that
        the others have.
        """
        live, asked = self._cache.get(DEPLOYMENT, service.namespace, service.name), self._workers.image
        memory.image, memory.kept = asked, None
        if live is None or not pods.controls(service.uid, live):
            return None
        deployed = msgspec.json.decode(content(live))
        mark, image = _template_mark(deployed), administrators_image(service, deployed)
        wanted = self._digest_with(asked, service, memory, trial=False)
        served = service.status.settled_generation == service.generation
        given_up = bool(wanted and brought_back(service, wanted))
        waits = wanted is not None and mark != wanted and not given_up and (served or image not in (None, asked))
        self._turns.note(key, member(service, live, waits=waits, counts=served and (image == asked or given_up)))
        if not waits or self._turns.may_go(key, services=len(self._cache.names(SERVICE))):
            return None
        memory.image, memory.kept = image or asked, mark if served else None
        return self._turns.told()

    def _problem(self, service: Service, memory: _Memory) -> WorkerEndpoint | None:
        """What keeps workers from being made at all, as a worker that does not come."""
        try:
            manifests.check_bundle(service)
        except InvalidSpecError as error:
            return _failed_endpoint(service, Reason.INVALID_MODEL, str(error))
        problem = memory.problem
        if problem is None or problem.generation != service.generation:
            return None
        return _failed_endpoint(service, problem.reason, problem.message)

    async def _report_invalid_spec(self, obj: Object, error: InvalidSpecError) -> None:
        """Say in the status what the API server let pass; what serves keeps serving."""
        before = status_from_manifest(ServiceStatus, obj)
        status = invalid_spec_status(before, error, generation=int(obj["metadata"]["generation"]), now=self._clock())
        key = ServiceKey(namespace_of(obj), name_of(obj))
        await self._write_status(key, uid_of(obj), SERVICE, key.name, status)

    # --- workers -----------------------------------------------------------------------------------

    async def ensure_workers(self, service: Service, identity: WorkerIdentity) -> None:
        """Apply Deployment, Service, PodDisruptionBudget, NetworkPolicy and autoscaler where they differ from the spec.

        A spec that cannot be carried out is no error here: :meth:`gather` reports it as a worker that cannot run,
        and the workers of the last good spec stay.
        """
        key = _key(service)
        memory = self._memory(key, service.uid)
        await self._ensure_route(memory, service)
        problem = memory.problem
        if problem is not None and problem.generation == service.generation and self._monotonic() < problem.retry_at:
            return
        try:
            await self._end_trainings(service)
            await self._ensure(memory, NETWORK_SERVICE, manifests.network_service(service))
            await self._ensure(memory, DISRUPTION_BUDGET, manifests.disruption_budget(service))
            await self._ensure_network_policy(memory, service)
            await self._ensure_digests(memory, service)
            await self._ensure_trial(memory, service, identity)
            await self._ensure_scaled(memory, service, identity)
        except InvalidSpecError as error:
            self._remember(key, service, Reason.INVALID_MODEL, str(error))
        except NameTakenError as error:
            self._remember(key, service, Reason.NAME_TAKEN, str(error))
        except InvalidObjectError as error:
            self._remember(key, service, Reason.INVALID_SPEC, error.message)
        except ApiError as error:
            self._remember(key, service, as_said(error.reason) if error.reason else Reason.REFUSED, error.message)
        else:
            memory.problem = None

    async def _end_trainings(self, service: Service) -> None:
        """A training that nobody waits for any more is ended; one that is over is left to be looked at."""
        sets = service.status.ramp_sets
        wanted = service.spec.training == "LiveTraffic" and sets.state == "Training"
        name = manifests.training_name(service.name, sets.capture_since_at or 0.0) if wanted else ""
        for job in self._cache.owned(JOB, service.uid):
            if name_of(job) != name and training.runs(job, self._cache.owned(POD, uid_of(job))):
                await self._remove(JOB, job)

    async def _ensure_network_policy(self, memory: _Memory, service: Service) -> None:
        operator = self._workers.admin_from
        if operator is None:
            # One that was made while they were wanted.
            await self._delete(service, NETWORK_POLICY, manifests.network_policy_name(service.name))
            return
        policy = manifests.network_policy(
            service, operator, allow_egress=self._workers.allow_egress, delivery=self._workers.delivery
        )
        await self._ensure(memory, NETWORK_POLICY, policy)

    async def _ensure_digests(self, memory: _Memory, service: Service) -> None:
        """Hand the digest that the bundle was proven with to workers to come. Before the Deployment, which may then have more of them."""
        desired = manifests.model_config_map(service)
        if desired is None or not service.spec.may_move:
            return
        live = await self._live(CONFIG_MAP, service.namespace, name_of(desired))
        if live is not None:
            _check_owner(live, memory.uid, CONFIG_MAP)
            if desired["data"].items() <= (live.get("data") or {}).items():
                return
        written = await (
            self._client.create(CONFIG_MAP, desired) if live is None else self._change(CONFIG_MAP, desired, live)
        )
        self._cache.put(CONFIG_MAP, written)

    async def _ensure_trial(self, memory: _Memory, service: Service, identity: WorkerIdentity) -> None:
        """Workers whose model is on trial. Before the others, so that those of a rejected model are gone when their room is asked for."""
        n = self._split(service, memory)[2].n_trial
        name = manifests.trial_name(service.name)
        if n == 0:
            if not self._is_sent_requests(memory, service, name):
                await self._delete(service, DEPLOYMENT, name)
            return
        memory.leaving_since = None
        live = await self._live(DEPLOYMENT, service.namespace, name)
        if service.spec.may_move and service.proven_digest is None:
            n = min(n, max(1, _replicas(live)))
        body = manifests.deployment(service, identity, self._settings(memory), replicas=n, trial=True)
        await self._ensure(memory, DEPLOYMENT, body)

    async def _ensure_scaled(self, memory: _Memory, service: Service, identity: WorkerIdentity) -> None:
        """The Deployment, and who scales it: the number of workers is applied only where no autoscaler decides on it."""
        found, wanted = self._scalers(service), service.spec.autoscaling
        if wanted is None or found.others:
            for obj in self._cache.owned(AUTOSCALER, service.uid):
                await self._remove(AUTOSCALER, obj)
        decides, desired, split = self._split(service, memory)
        live = await self._live(DEPLOYMENT, service.namespace, service.name)
        # Workers that started together could find different bundles at a URI without a digest: the first one goes ahead alone.
        unproven = split.main.spec.may_move and split.main.proven_digest is None
        at_most = max(1, _replicas(live)) if unproven else desired
        body = manifests.deployment(
            split.main,
            identity,
            self._settings(memory),
            replicas=min(split.n_main, at_most) if decides is None or live is None else None,
            strategy=strategy_in_force(service, desired),
        )
        if memory.kept is not None and _template_mark(body["spec"]) != memory.kept:
            return  # more than the image differs, such as what another release makes of a spec
        await self._bring_back(memory, service, live, body)
        changes = live is not None and _template_mark(msgspec.json.decode(content(live))) != _template_mark(
            body["spec"]
        )
        if live is not None and changes and _on_probation(live):
            return
        given = None if decides is None else handed_over(service, desired, found.others)
        own = None
        if wanted is not None and not found.others and not unproven:
            frozen = changes or service.status.update.strategy != "" or split.n_trial > 0
            own = manifests.autoscaler(
                service, wanted, fewest=floor_in_force(wanted, service.status.capacity), frozen=frozen
            )
        if own is not None and changes and found.own is not None:  # before the first worker is replaced
            await self._ensure(memory, AUTOSCALER, own)
        await self._ensure(memory, DEPLOYMENT, body, hands_over=given)
        if own is not None:
            await self._ensure(memory, AUTOSCALER, own)

    def _settings(self, memory: _Memory) -> manifests.WorkerSettings:
        """What the administrator decided, with the image that the service's turn has come for."""
        return replace(self._workers, image=memory.image or self._workers.image)

    async def _bring_back(self, memory: _Memory, service: Service, live: Object | None, body: Object) -> None:
        """Put the pods that served before into the Deployment where those that the spec asks for failed. Kubernetes keeps them in a ReplicaSet."""
        wanted = brought_back(service, self._template(service, memory, trial=False) or "")
        if not wanted or live is None:
            memory.earlier = None
            return
        if memory.earlier is None or memory.earlier[0] != wanted:
            memory.earlier = await self._earlier_pods(live, wanted)
        if memory.earlier is not None:
            body["spec"]["template"] = memory.earlier[1]

    async def _earlier_pods(self, deployment: Object, wanted: str) -> tuple[str, Object] | None:
        for known in self._cache.owned(REPLICA_SET, uid_of(deployment)):
            found = await self._client.get(REPLICA_SET, namespace_of(known), name_of(known))
            if found is not None and _template_mark(found["spec"]) == wanted:
                return wanted, manifests.pods_of(found)
        told = (
            f"{namespace_of(deployment)}/{name_of(deployment)}: no ReplicaSet has the pods {wanted} that served before"
        )
        log_event("earlier-pods-gone", told, level=logging.WARNING)
        return None

    async def _ensure(self, memory: _Memory, kind: Kind, desired: Object, *, hands_over: int | None = None) -> None:
        """Apply an object where it differs. ``hands_over`` is the number of workers with which an autoscaler begins."""
        digest = _digest(desired)
        notes = (desired["metadata"].get("annotations") or {}) | {APPLIED_ANNOTATION: digest}
        marked = desired | {"metadata": desired["metadata"] | {"annotations": notes}}
        live = await self._live(kind, namespace_of(desired), name_of(desired))
        if live is None:
            # Never an apply: one that was held up would change what a newer leader has made meanwhile.
            written = await self._client.create(kind, marked)
        else:
            live = slim(kind, live)
            _check_owner(live, memory.uid, kind)
            known, seen = memory.applied.get(uid_of(live)), _Applied(digest, fingerprint(live, desired))
            if known == seen or (known is None and _stands(live, desired, digest)):
                memory.applied[uid_of(live)] = seen
                return
            written = await self._change(kind, marked, live, hands_over=hands_over)
        self._cache.put(kind, written)
        memory.applied[uid_of(written)] = _Applied(digest, fingerprint(slim(kind, written), desired))

    async def _live(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The cache has only what carries our label; a foreign object of that name must not be taken over."""
        live = self._cache.get(kind, namespace, name)
        return live if live is not None else await self._client.get(kind, namespace, name)

    async def _change(self, kind: Kind, body: Object, seen: Object, *, hands_over: int | None = None) -> Object:
        """Apply to a child as it was seen, and to nothing that somebody has made of it since."""
        async with self._as_seen(kind, seen):
            live = await self._client.get(kind, namespace_of(seen), name_of(seen))
            if live is None or _version(live) != _version(seen):
                raise ConflictError(f"{kind.name} {namespace_of(seen)}/{name_of(seen)} has changed")
            live = await self._adopt(kind, live)
            if hands_over is not None and holds_replicas_alone(live):
                live = await self._hand_over(live, hands_over)
            return await self._client.apply(kind, _on(body, live))

    async def _adopt(self, kind: Kind, live: Object) -> Object:
        """Own by apply what was made by a create: fields of another operation would stay when they are asked for no more.

        Source: "Upgrading from client-side apply" in the Kubernetes documentation of server-side apply, and client-go's csaupgrade.
        """
        entries = adopted(live["metadata"].get("managedFields") or ())
        if entries is None:
            return live
        patch = {"metadata": {"uid": uid_of(live), "resourceVersion": _version(live), "managedFields": entries}}
        return await self._client.merge(kind, namespace_of(live), name_of(live), patch, manager=FIELD_MANAGER)

    async def _hand_over(self, live: Object, replicas: int) -> Object:
        """Let another manager hold the number of workers until an autoscaler takes it.

        What nobody but the operator holds would vanish with its next apply, and the default is one worker. Source: "Transferring
        ownership" in the Kubernetes documentation of server-side apply.
        """
        identity = {"name": name_of(live), "namespace": namespace_of(live)}
        body = {
            "apiVersion": DEPLOYMENT.api_version,
            "kind": DEPLOYMENT.name,
            "metadata": identity,
            "spec": {"replicas": replicas},
        }
        return await self._client.apply(DEPLOYMENT, _on(body, live), manager=HANDOVER_MANAGER)

    def _remember(self, key: ServiceKey, service: Service, reason: AnyReason, message: str) -> None:
        memory = self._memory(key, service.uid)
        if memory.problem is None or memory.problem.message != message:
            log_event("workers-refused", f"{key}: {message}", level=logging.WARNING, service=str(key), reason=reason)
        memory.problem = _Problem(service.generation, reason, message, self._monotonic() + REFUSED_RETRY_SECONDS)

    # --- the route through a Gateway ---------------------------------------------------------------

    async def _ensure_route(self, memory: _Memory, service: Service) -> None:
        """Share the requests through a Gateway. Before anything happens to workers: requests leave those that are to go, and then these go.

        What keeps a route from being made keeps nobody from serving.
        """
        gateway, names = _gateway(service), (manifests.main_name(service.name), manifests.trial_name(service.name))
        if gateway is None:
            memory.route_problem = None
            await self._delete(service, HTTP_ROUTE, service.name)
            for name in names:
                await self._delete(service, NETWORK_SERVICE, name)
            return
        problem = memory.route_problem
        unreadable = self._cache.unreadable(HTTP_ROUTE, service.namespace)
        if (
            problem is not None
            and (problem.generation, problem.unreadable) == (service.generation, unreadable)
            and self._monotonic() < problem.retry_at
        ):
            return
        share = request_share(
            service,
            main_ready=self._answers(service, service.name, "readyReplicas"),
            # Ready for some seconds, until every Gateway knows the pods' addresses.
            trial_ready=self._answers(service, manifests.trial_name(service.name), "availableReplicas"),
        )
        memory.route_problem = None
        try:
            for trial in (False, True):
                await self._ensure(memory, NETWORK_SERVICE, manifests.version_service(service, trial=trial))
            await self._ensure(memory, HTTP_ROUTE, manifests.http_route(service, gateway, share=share))
        except NameTakenError as error:
            self._remember_route(memory, service, Reason.ROUTE_NAME_TAKEN, str(error), before=problem)
        except GoneError:
            told = f"the cluster has no HTTPRoute of {HTTP_ROUTE.api_version}: install Gateway API, or remove updatePolicy.sideBySide.gateway"
            self._remember_route(memory, service, Reason.NO_GATEWAY_API, told, before=problem)
        except ApiError as error:
            self._remember_route(memory, service, Reason.ROUTE_REFUSED, error.message, before=problem)

    def _remember_route(
        self, memory: _Memory, service: Service, reason: Reason, message: str, *, before: _Problem | None
    ) -> None:
        if before is None or before.message != message:
            key = str(_key(service))
            log_event("route-refused", f"{key}: {message}", level=logging.WARNING, service=key, reason=reason)
        unreadable = self._cache.unreadable(HTTP_ROUTE, service.namespace)
        retry_at = self._monotonic() + REFUSED_RETRY_SECONDS
        memory.route_problem = _Problem(service.generation, reason, message, retry_at, unreadable)

    def _answers(self, service: Service, name: str, counted: str) -> bool:
        """Whether a Deployment of the service has pods that answer, by a count in its status."""
        live = self._cache.get(DEPLOYMENT, service.namespace, name)
        return live is not None and pods.controls(service.uid, live) and bool((live.get("status") or {}).get(counted))

    def _is_sent_requests(self, memory: _Memory, service: Service, name: str) -> bool:
        """Whether a Gateway may still send requests to the workers on trial, as far as that is worth waiting for."""
        route = self._route(service)
        if route is None or self._cache.get(DEPLOYMENT, service.namespace, name) is None:
            memory.leaving_since = None
            return False
        if memory.leaving_since is None:
            memory.leaving_since = self._monotonic()
        waited = self._monotonic() - memory.leaving_since
        return waited < LET_GO_SECONDS and not routes.has_let_go(route, name)

    def _route(self, service: Service) -> Object | None:
        obj = self._cache.get(HTTP_ROUTE, service.namespace, service.name)
        return obj if obj is not None and pods.controls(service.uid, obj) else None

    def _route_trouble(self, service: Service, memory: _Memory) -> RouteTrouble | None:
        if _gateway(service) is None:
            return None
        problem, route = memory.route_problem, self._route(service)
        if problem is not None:
            return RouteTrouble(problem.reason, problem.message)
        if route is None:
            return None
        if unreadable := self._cache.unreadable(HTTP_ROUTE, service.namespace):
            told = f"HTTPRoutes cannot be read, so nobody knows what Gateways make of {service.name}: {unreadable}"
            return RouteTrouble(Reason.ROUTES_UNREADABLE, told)
        return routes.trouble(route)

    # --- configs, rollouts, statuses ---------------------------------------------------------------

    async def create_config(self, service: Service, config: NewConfig) -> None:
        """Create a RampConfig and say what is known of it; one that exists is the same plan and is left alone."""
        existing = self._cache.get(CONFIG, service.namespace, config.name)
        if existing is None or not pods.controls(service.uid, existing):
            await self._create(service, CONFIG, config.name, config.plan.to_mapping())
        elif not same_status(existing, ConfigStatus()):
            return
        await self.write_config_status(service, config.name, config.status)

    async def create_rollout(self, service: Service, rollout: NewRollout) -> None:
        spec = rollout_spec(service.name, rollout)
        await self._create(service, ROLLOUT, rollout.name, spec)

    async def _create(self, service: Service, kind: Kind, name: str, spec: Mapping[str, object]) -> None:
        body = {
            "apiVersion": GROUP_VERSION,
            "kind": kind.name,
            "metadata": manifests.metadata(service, name)
            | {"labels": {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: service.name}},
            "spec": dict(spec),
        }
        # Never an apply: it would take over what an earlier service of that name left behind, with its status.
        try:
            written = await self._client.create(kind, body, lane=Lane.STATUSES)
        except ConflictError:
            live = await self._client.get(kind, service.namespace, name, lane=Lane.STATUSES)
            if live is not None and pods.controls(service.uid, live):
                self._cache.put(kind, live)  # made by a pass that this one has not seen: decide again on it
            raise
        self._cache.put(kind, written)
        self._memory(_key(service), service.uid).versions[kind, name] = _version(written)

    async def write_config_status(self, service: Service, name: str, status: ConfigStatus) -> None:
        await self._write_status(_key(service), service.uid, CONFIG, name, status)

    async def write_rollout_status(self, service: Service, name: str, status: RolloutStatus) -> None:
        await self._write_status(_key(service), service.uid, ROLLOUT, name, status)

    async def write_service_status(self, service: Service, status: ServiceStatus) -> None:
        url = status.url or manifests.service_url(service)
        await self._write_status(_key(service), service.uid, SERVICE, service.name, replace(status, url=url))

    async def _write_status(
        self,
        key: ServiceKey,
        uid: str,
        kind: Kind,
        name: str,
        status: S,
    ) -> None:
        """Apply a status on exactly the version that was decided on: an old leader, or a pass on stale reads, gets a conflict.

        So does a pass over a service that was deleted meanwhile: another one of its name must not inherit what was decided for it.
        """
        live = self._cache.get(kind, key.namespace, name)
        if live is None or not (uid_of(live) == uid if kind is SERVICE else pods.controls(uid, live)):
            raise ConflictError(f"{kind.name} {key.namespace}/{name} is gone")
        status = bounded(status, limit_bytes=OBJECT_LIMIT_BYTES - _bytes_beside_status(live))
        if same_status(live, status):
            return
        memory = self._memory(key, uid)
        version = memory.versions.get((kind, name), _version(live))
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": key.namespace, "uid": uid_of(live), "resourceVersion": version},
            "status": status_json(status),
        }
        written = await self._swap(kind, body, subresource="status", lane=Lane.STATUSES)
        memory.versions[kind, name] = _version(written)

    async def _swap(self, kind: Kind, body: Object, *, lane: Lane, subresource: str | None = None) -> Object:
        """Apply on exactly the version in the body: what was decided on an older one is decided again."""
        async with self._as_seen(kind, body, lane=lane):
            written = await self._client.apply(kind, body, subresource=subresource, lane=lane)
        self._cache.put(kind, written)
        return written

    @asynccontextmanager
    async def _as_seen(self, kind: Kind, obj: Object, *, lane: Lane = Lane.BULK) -> AsyncIterator[None]:
        """Around a write that goes through on what was seen alone. After a conflict the cache has what is there, so the next pass need not wait
        for the watch."""
        try:
            yield
        except GoneError as error:
            raise ConflictError(str(error)) from error
        except ConflictError:
            live = await self._client.get(kind, namespace_of(obj), name_of(obj), lane=lane)
            if live is not None:
                self._cache.put(kind, live)
            raise

    async def delete_config(self, service: Service, name: str) -> None:
        await self._delete(service, CONFIG, name)

    async def delete_rollout(self, service: Service, name: str) -> None:
        await self._delete(service, ROLLOUT, name)

    async def _delete(self, service: Service, kind: Kind, name: str) -> None:
        obj = self._cache.get(kind, service.namespace, name)
        if obj is None or not pods.controls(service.uid, obj):
            return
        await self._remove(kind, obj)

    async def _remove(self, kind: Kind, obj: Object) -> None:
        lane = Lane.STATUSES if kind in (CONFIG, ROLLOUT) else Lane.BULK
        async with self._as_seen(kind, obj, lane=lane):
            await self._client.delete(kind, obj, lane=lane)
        self._cache.remove(kind, uid_of(obj))

    # --- plan and events ---------------------------------------------------------------------------

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        """Store the document only on the ConfigMap that holds ``previous_epoch`` (0: none is stored).

        Raises
        ------
        NameTakenError
            The ConfigMap's name belongs to somebody else.
        """
        stored = self._plan(service)
        if stored is None:
            await self._look_for_hidden_plan(service)
        published = _document(stored)
        epoch = published.epoch if published is not None else 0
        if epoch != previous_epoch:
            raise ConflictError(f"epoch {epoch} is published, not {previous_epoch}")
        text = msgspec.json.encode(signed).decode()
        body = manifests.plan_config_map(service, document=text, epoch=document.epoch)
        if stored is None:
            self._cache.put(CONFIG_MAP, await self._client.create(CONFIG_MAP, body, lane=Lane.PLANS))
        else:
            await self._swap(CONFIG_MAP, _on(body, stored), lane=Lane.PLANS)

    async def _look_for_hidden_plan(self, service: Service) -> None:
        """Watches see only what carries our label: before a plan is created, make sure that none hides from them."""
        name = manifests.plan_name(service.name)
        live = await self._client.get(CONFIG_MAP, service.namespace, name, lane=Lane.PLANS)
        if live is None:
            return
        _check_owner(live, service.uid, CONFIG_MAP)
        body = manifests.plan_config_map(service, document="", epoch=0) | {"data": live.get("data") or {}}
        self._cache.put(CONFIG_MAP, await self._client.apply(CONFIG_MAP, _on(body, live), lane=Lane.PLANS))
        raise ConflictError(f"ConfigMap {service.namespace}/{name_of(live)} had lost its labels")

    async def train(self, service: Service, order: TrainingOrder) -> None:
        """Make the Job. What the API server refuses for good (a quota, an admission rule) is a training that failed."""
        try:
            main = split_in_force(service, 0, scaled=False).main  # ramps are trained for the model that serves
            await self._make_job(
                service, manifests.training_job(main, order, self._settings(self._memory(_key(service))))
            )
        except (InvalidSpecError, NameTakenError, ApiError) as error:
            said = error.message if isinstance(error, ApiError) else str(error)
            message = f"no Job could be made: {said}"
            memory = self._memory(_key(service), service.uid)
            memory.refused = TrainingReport(order.attempt, "Failed", message=message, since=order.since)

    async def _make_job(self, service: Service, job: Object) -> None:
        """Create it, or find the one that an earlier pass has made."""
        try:
            live: Object | None = await self._client.create(JOB, job)
        except ConflictError:
            live = await self._client.get(JOB, service.namespace, name_of(job))
        if live is not None:
            _check_owner(live, service.uid, JOB)
            self._cache.put(JOB, live)

    async def emit(self, service: Service, event: Event) -> None:
        """Post an Event about the service, and one about the rollout that it happened to. One that is lost is told in the log and changes nothing."""
        about = [_reference(SERVICE, service.namespace, service.name, service.uid)]
        rollout = self._cache.get(ROLLOUT, service.namespace, event.rollout) if event.rollout else None
        if rollout is not None:
            about.insert(0, _reference(ROLLOUT, service.namespace, event.rollout, uid_of(rollout)))
        for regarding in about:
            related = next((other for other in about if other is not regarding), None)
            await self._post(self._event(event, regarding, related))

    def _event(self, event: Event, regarding: Object, related: Object | None) -> Object:
        now = self._clock()
        # The same transition told by two processes, or again after a restart, has the same name and is there already.
        told = f"{regarding['uid']}/{event.reason}/{event.message}/{int(now // SAME_EVENT_SECONDS)}"
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {
                "name": f"{regarding['name']}.{hashlib.sha256(told.encode()).hexdigest()[:16]}",
                "namespace": regarding["namespace"],
            },
            "eventTime": datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": REPORTER,
            "reportingInstance": self._instance[:128],
            "action": event.reason,
            "reason": event.reason,
            "note": event.message[:EVENT_MESSAGE_LIMIT],
            "type": "Warning" if event.warning else "Normal",
            "regarding": regarding,
            **({"related": related} if related is not None else {}),
        }

    async def _post(self, body: Object) -> None:
        try:
            await self._client.create(EVENT, body, lane=Lane.STATUSES)
        except ConflictError:
            return  # it has been told
        except OfframpError as error:
            about = f"{body['regarding']['namespace']}/{body['regarding']['name']}"
            message = f"{about}: Event {body['reason']} was not posted: {error}"
            log_event("event-lost", message, level=logging.WARNING, service=about)

    # --- memory ------------------------------------------------------------------------------------

    def _memory(self, key: ServiceKey, uid: str | None = None) -> _Memory:
        """The service's memory; a service of the same name but another uid starts anew."""
        memory = self._memories.get(key)
        if memory is None or (uid is not None and memory.uid != uid):
            memory = self._memories[key] = _Memory(uid or "")
        return memory

    def _forget(self, key: ServiceKey) -> None:
        self._memories.pop(key, None)
        self._turns.forget(key)
        self._changes.pop(key, None)


def _gateway(service: Service) -> Gateway | None:
    side_by_side = service.spec.update_policy.side_by_side
    return None if side_by_side is None else side_by_side.gateway


def _key(service: Service) -> ServiceKey:
    return ServiceKey(service.namespace, service.name)


def _reference(kind: Kind, namespace: str, name: str, uid: str) -> Object:
    return {"apiVersion": GROUP_VERSION, "kind": kind.name, "name": name, "namespace": namespace, "uid": uid}


def fingerprint(obj: Object, desired: Object) -> str:
    """What somebody could change of a child that must be changed back: everything but bookkeeping, status and what an autoscaler decides."""
    meta, kept = obj["metadata"], content(obj)
    if "replicas" not in desired["spec"]:
        spec = msgspec.json.decode(kept)
        kept = msgspec.json.encode({name: value for name, value in spec.items() if name != "replicas"})
    told = msgspec.json.encode((meta.get("labels"), meta.get("ownerReferences")), order="sorted")
    return hashlib.sha256(kept + told).hexdigest()


def _on_probation(live: Object) -> bool:
    """Whether a pod has become ready just now, for which seconds no other pods must be asked for.

    To Kubernetes such a pod is as unavailable as one that never starts: where an update that hangs gives way to the next one, it is
    taken away with the rest, although it may be all that serves. Source: ``cleanupUnhealthyReplicas`` of the Deployment controller.
    """
    status = live.get("status") or {}
    return int(status.get("readyReplicas") or 0) > int(status.get("availableReplicas") or 0)


def _template_mark(spec: Object) -> str | None:
    notes = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    return notes.get(TEMPLATE_ANNOTATION)


def _stands(live: Object, desired: Object, digest: str) -> bool:
    """Whether a child that an earlier process applied is still as it was, so that a restarted operator need not apply everything again.

    The annotation says what was asked for, fields that are asked for no more included; the comparison, that nobody has changed it since.
    """
    meta = live["metadata"]
    if (meta.get("annotations") or {}).get(APPLIED_ANNOTATION) != digest:
        return False
    return _contains(meta.get("labels"), desired["metadata"]["labels"]) and _contains(
        msgspec.json.decode(content(live)), desired["spec"]
    )


def _contains(live: object, wanted: object) -> bool:
    """Whether an object has all that was asked for; the API server's defaults come on top. A doubt is a no: applying again is harmless."""
    if live == wanted:  # most of an object, and told at the speed of C
        return True
    if isinstance(wanted, dict):
        return (not wanted and live is None) or (
            isinstance(live, dict) and all(_contains(live.get(name), value) for name, value in wanted.items())
        )
    if isinstance(wanted, list):
        if not wanted and live is None:
            return True
        return isinstance(live, list) and len(live) == len(wanted) and all(map(_contains, live, wanted))
    return (live is None and wanted in (False, 0, "")) or str(live) == str(wanted)


def invalid_spec_status(
    before: ServiceStatus, error: InvalidSpecError, *, generation: int, now: float
) -> ServiceStatus:
    """The status that tells of a spec that cannot be parsed; everything about plans and tuning stays as it was."""
    told: dict[str, Condition] = {
        c.type: c for c in before.conditions if c.type not in (ConditionType.RECONCILING, ConditionType.STALLED)
    }
    was_stalled = next((c for c in before.conditions if c.type == ConditionType.STALLED), None)
    told.setdefault(
        ConditionType.READY, Condition(ConditionType.READY, "False", Reason.INVALID_SPEC, str(error), generation, now)
    )
    since = was_stalled.last_transition_at if was_stalled is not None else now
    told[ConditionType.STALLED] = Condition(
        ConditionType.STALLED, "True", Reason.INVALID_SPEC, str(error), generation, since
    )
    conditions = tuple(replace(c, observed_generation=generation) for c in told.values())
    return replace(before, observed_generation=generation, phase="Stalled", message=str(error), conditions=conditions)


def _failed_endpoint(service: Service, reason: AnyReason, message: str) -> WorkerEndpoint:
    return WorkerEndpoint(
        f"deployment {service.name}", service.uid, ready=False, current=False, failure=message, failure_reason=reason
    )


def _check_owner(live: Object, uid: str, kind: Kind) -> None:
    if pods.controls(uid, live):
        return
    name = f"{kind.name} {namespace_of(live)}/{name_of(live)}"
    owner = owner_of(live)
    if owner is not None and owner["kind"] == SERVICE.name:
        raise ConflictError(f"{name} belongs to an earlier service of that name and is about to be collected")
    raise NameTakenError(
        f"{name} exists and does not belong to this service; delete it or give the service another name"
    )


def _replicas(deployment: Object | None) -> int:
    return 0 if deployment is None else int((deployment.get("spec") or {}).get("replicas", 1))


def _document(config_map: Object | None) -> PlanDocument | None:
    """The document a ConfigMap carries; None where it carries none that can be read, so that it is published anew."""
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(manifests.PLAN_KEY, "")
    try:
        signed = msgspec.json.decode(text, type=SignedDocument)
        return msgspec.json.decode(signed.payload, type=PlanDocument)
    except msgspec.MsgspecError as error:
        log_event(
            "plan-unreadable",
            f"ConfigMap {namespace_of(config_map)}/{name_of(config_map)}: {error}",
            level=logging.WARNING,
        )
        return None


def _bytes_beside_status(live: Object) -> int:
    """What the rest of an object takes, about: tools may keep a second copy of its spec in an annotation."""
    return len(msgspec.json.encode((live["metadata"], live.get("spec"), live.get("spec"))))


def _on(body: Object, live: Object) -> Object:
    """A body that is applied only to exactly what was seen: an older leader's write that was held up meets what a newer one has made of it."""
    return body | {"metadata": body["metadata"] | {"uid": uid_of(live), "resourceVersion": _version(live)}}


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])


def _digest(value: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
