"""A pass in which no worker has reported its model, or nobody wants workers: nothing is decided about plans, and all is
kept as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offramp_core.control.conditions import Facts, conditions, workers_status
from offramp_core.control.objects import Config, ConfigStatus
from offramp_core.control.snapshot import Decision, Event, Snapshot, Worker
from offramp_core.control.stable.audit import Audits
from offramp_core.control.status import capacity_of, summarised
from offramp_core.control.workers.pool_demand import asked_days
from offramp_core.control.workers.pool_plan import plan_event, with_plan
from offramp_core.control.workers.pools import next_pools, with_place
from offramp_core.control.workers.rest import Rest, at_rest
from offramp_core.control.workers.update import Update
from offramp_core.control.workers.versions import Version
from offramp_core.reasons import ConditionType, Reason

STARTING_REQUEUE_SECONDS = 1.0
WAITED_SHARE, MOST_REQUEUE_SECONDS = 0.25, 30.0  # of the time that a pod has waited for a node
AT_REST_REQUEUE_SECONDS = 10.0


def without_workers(
    snapshot: Snapshot,
    trial: tuple[Worker, ...],
    version: Version,
    update: Update,
    *,
    events: tuple[Event, ...],
    now: float,
    canary_lease_seconds: float,
) -> Decision:
    """Say what is known. At zero, see to what the next workers will start under. ``events`` were decided before."""
    service = snapshot.service
    rest = Rest(service.status, snapshot.gathered.configs.get(service.status.stable_config))
    if snapshot.gathered.desired == 0:
        rest = at_rest(snapshot, now, canary_lease_seconds=canary_lease_seconds)
    known = next_pools(service.spec.pools, snapshot.workers, before=service.status.pools, model=None)
    # Where the only pool that had workers is lost, another one has to start some.
    load, placed = snapshot.observed.load, with_place(snapshot.workers)
    shares, since = snapshot.gathered.shares, snapshot.watched_since
    saving = service.status.pool_plan.saving if service.spec.counts_exits else 0.0
    pools, plan = with_plan(
        service, known, load, placed=placed, shares=shares, now=now, watched_since=since, saving=saving
    )
    planned = plan_event(service, pools, plan, shares)
    facts = replace(_facts(snapshot, trial, version, update, stable=rest.stable, now=now), pools=pools)
    # Scaled to zero there is nobody to wait for: without this the generation would be reconciling for ever.
    settled = service.generation if not facts.desired and facts.settled else service.status.settled_generation
    status = replace(
        rest.status,
        observed_generation=service.generation,
        settled_generation=settled,
        workers=workers_status(facts),
        update=update.status,
        version=version.status,
        capacity=facts.capacity.status,
        pools=facts.pools,
        pool_plan=plan,
        asked=asked_days(service, load, now),
        conditions=conditions(facts, settled_generation=settled, observed=({}, Audits())),
    )
    return Decision(
        status=summarised(status),
        new_configs=rest.new_configs,
        config_statuses=_news(rest.config_statuses, snapshot.gathered.configs),
        rollout_statuses=rest.rollout_statuses,
        publish=rest.publish,
        events=(*events, *rest.events, *_wakes_up(facts), *((planned,) if planned is not None else ())),
        requeue_after_seconds=_next_pass(facts) if facts.desired else AT_REST_REQUEUE_SECONDS,
        watch=snapshot.watch,
    )


def _facts(
    snapshot: Snapshot,
    trial: tuple[Worker, ...],
    version: Version,
    update: Update,
    *,
    stable: Config | None,
    now: float,
) -> Facts:
    service, published = snapshot.service, snapshot.gathered.published
    epochs = [w.state.epoch for w in snapshot.workers if w.endpoint.ready and w.state is not None]
    return Facts(
        service=service,
        workers=(*snapshot.workers, *trial),
        acked=sum(published is not None and epoch == published.epoch for epoch in epochs),
        stable=stable,
        counts=(),
        pin=service.status.pin,
        rollout=None,
        now=now,
        update=update,
        scaling=snapshot.gathered.scaling,
        capacity=capacity_of(snapshot, now),
        version=version,
        route=snapshot.gathered.route,
        worker_class=snapshot.gathered.worker_class,
        class_trouble=snapshot.gathered.class_trouble,
        shares=snapshot.gathered.shares,
        turn=snapshot.gathered.turn,
    )


def _next_pass(facts: Facts) -> float:
    """Seconds until the next pass. A worker with an address may report its model at any moment. A pod without one tells
    of every change itself: of what time alone says, the longer it lasts, the less changes, and there may be thousands
    that wait for a node."""
    if facts.update.status.strategy or any(worker.endpoint.admin_url is not None for worker in facts.workers):
        return STARTING_REQUEUE_SECONDS
    since = max((c.last_transition_at for c in facts.service.status.conditions), default=facts.now)
    return min(MOST_REQUEUE_SECONDS, max(STARTING_REQUEUE_SECONDS, WAITED_SHARE * (facts.now - since)))


def _news(statuses: Mapping[str, ConfigStatus], known: Mapping[str, Config]) -> dict[str, ConfigStatus]:
    """Those that are not stored yet."""
    return {name: status for name, status in statuses.items() if known[name].status != status}


def _wakes_up(facts: Facts) -> tuple[Event, ...]:
    """Told once when workers are wanted again after there were none."""
    ready = next((c for c in facts.service.status.conditions if c.type == ConditionType.READY), None)
    if not facts.desired or ready is None or ready.reason != "ScaledToZero":
        return ()
    under = f" under {facts.stable.name}" if facts.stable is not None else ""
    return (Event(Reason.WAKING_UP, f"{facts.desired} workers start{under}"),)
