"""The status of a service as a pass leaves it: what people and the next pass read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, log
from typing import Any

from offramp_core.control.conditions import Facts, conditions, observe, workers_status
from offramp_core.control.document import going_tiers
from offramp_core.control.draft import Draft
from offramp_core.control.objects import (
    Condition,
    Config,
    PoolPlanStatus,
    PoolStatus,
    Rollout,
    RolloutSummary,
    ServiceStatus,
    TierState,
    TierUse,
)
from offramp_core.control.rollouts.rollout import CANARY_SERVES, tiers_served
from offramp_core.control.routes import pooled
from offramp_core.control.seen import Seen
from offramp_core.control.snapshot import Event, Snapshot, Worker
from offramp_core.control.spec import Step
from offramp_core.control.stable.audit import Audits, worth_one
from offramp_core.control.stable.holdback import loss
from offramp_core.control.trust import not_pooled
from offramp_core.control.tuning.tuner import PinJudged, Tuned
from offramp_core.control.workers.capacity import SUSPICIOUS, Capacity, CapacityView, next_capacity, worker_rate
from offramp_core.control.workers.delivery import proven_models
from offramp_core.control.workers.pool_demand import asked_days
from offramp_core.control.workers.pool_plan import counted_saving, plan_event, with_plan
from offramp_core.control.workers.pools import Model, next_pools, rate_of_all, with_place
from offramp_core.control.workers.versions import serving_source
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import OVERLOAD, tier_slice
from offramp_core.reasons import ConditionType, Reason

MOST_OVERLOAD_SECONDS = 86_400.0 * 365  # that a worker is believed


def service_status(seen: Seen, draft: Draft, *, tuned: Tuned, pin: PinJudged, document_changed: bool) -> ServiceStatus:
    """Everything that the service tells of itself after this pass."""
    before, service, stable = seen.service.status, seen.service, draft.stable
    facts = _facts(seen, draft, pin)
    ids, costs = seen.served.chain(stable.plan.precision)
    observed, times, audits = observe(facts, ids, costs, audits=draft.measured_of_stable.audits)
    pools, pool_plan = _pools(seen, draft)
    facts = replace(facts, pools=pools)
    facts = replace(facts, capacity=_capacity(seen, draft, facts.pools, audits))
    settled = before.settled_generation
    if facts.settled and not document_changed:
        settled = service.generation
    status = replace(
        before,
        observed_generation=service.generation,
        settled_generation=settled,
        stable_config=stable.name,
        candidate_config=_candidate(draft, tuned),
        rollout=_rollout_summary(draft.rollout, seen.spec.rollout.steps),
        workers=workers_status(facts),
        update=seen.update.status,
        version=seen.version.status,
        capacity=facts.capacity.status,
        pools=facts.pools,
        pool_plan=pool_plan,
        asked=asked_days(service, seen.snapshot.observed.load, seen.now),
        observed=observed if stable.name == before.stable_config else replace(observed, taken_at=None),
        measured=draft.measured_of_stable,
        tiers=_tiers(seen, draft),
        tuning=draft.tuning,
        ramp_sets=draft.ramp_sets,
        pin=pin.status,
        models=proven_models(before.models, seen.spec, _workers_of_the_spec(seen)),
        conditions=conditions(facts, settled_generation=settled, observed=(times, audits)),
    )
    return summarised(status)


def plan_reported(seen: Seen, draft: Draft, status: ServiceStatus) -> Draft:
    """An event where other workers are planned for the pools than before."""
    event = plan_event(seen.service, status.pools, status.pool_plan, seen.snapshot.gathered.shares)
    return draft if event is None else draft.with_events(event)


def quarantine_reported(seen: Seen, draft: Draft) -> Draft:
    """An event for each worker that is not pooled any more, once."""
    found = _not_pooled(seen, draft)
    for name in sorted(set(found) - set(seen.service.status.workers.quarantined)):
        message = f"{name}: {found[name]}; it is not pooled"
        draft = draft.with_events(Event(Reason.WORKER_QUARANTINED, message, warning=True))
    return draft


def summarised(status: ServiceStatus) -> ServiceStatus:
    """Phase and message: the first condition that a person should look at."""
    by_type: dict[str, Condition] = {c.type: c for c in status.conditions}
    ready, stalled, reconciling = by_type["Ready"], by_type.get("Stalled"), by_type.get("Reconciling")
    if stalled is not None:
        return replace(status, phase="Stalled", message=stalled.message)
    if ready.status != "True":
        return replace(status, phase=str(ready.reason), message=ready.message)
    if reconciling is not None:
        return replace(status, phase="Reconciling", message=reconciling.message)
    return replace(status, phase="Ready", message=ready.message)


def capacity_of(
    snapshot: Snapshot, now: float, *, worker_rate: float = 0.0, exits_on: bool = False, at_risk: bool = False
) -> Capacity:
    """What is known of the capacity with exits off; nothing new without workers that have reported."""
    service = snapshot.service
    was = next((c.status for c in service.status.conditions if c.type == ConditionType.NO_EXIT_CAPACITY), "")
    return next_capacity(
        CapacityView(
            before=service.status.capacity,
            worker_rate=worker_rate,
            peak_rate=snapshot.observed.load.peak_rate,
            ready=sum(w.endpoint.ready and not w.endpoint.at_edge for w in snapshot.workers),
            exits_on=exits_on,
            at_risk=at_risk,
            now=now,
            watched_since=snapshot.watched_since,
            autoscaling=service.spec.autoscaling,
            scaling=snapshot.gathered.scaling,
            was_short=was == "False",
        )
    )


# --- pieces ----------------------------------------------------------------------------------------


def _tiers(seen: Seen, draft: Draft) -> tuple[TierUse, ...]:
    """Each tier under the stable plan: whether its requests leave early, by what proof, and what came of it."""
    stable, measured = draft.stable, draft.measured_of_stable
    going, served = going_tiers(stable, seen.service, measured), tiers_served(stable, seen.service)
    claims = {t["tier"]: t for c in stable.status.certificates for t in c.get("tiers", ())}
    savings = stable.status.prediction.tiers if stable.status.prediction is not None else {}
    counted = {use.name: use for use in measured.slices}
    uses = []
    for tier in seen.spec.menu:
        name, use = tier.name, counted.get(tier_slice(tier.name))
        known = TierUse(name, tier.max_disagreement, _tier_state(name, stable, going=going, served=served))
        if use is not None:
            known = replace(known, audited=use.audited, disagreements=use.disagreements, requests=use.requests)
        if name == OVERLOAD:
            known = replace(known, **_overload_now(seen))
        if name in served:
            claim = claims[name]
            known = replace(
                known, saving=savings.get(name, 0.0), certified_n=int(claim["n"]), certified_k=int(claim["k"])
            )
        uses.append(known)
    return tuple(uses)


def _overload_now(seen: Seen) -> dict[str, Any]:
    """How many workers answer under overload, and since when the first of them does. The moment stands: it is not
    computed anew from each report, which is a little older or younger each time."""
    states = [w.state for w in seen.snapshot.workers if w.state is not None]
    lasting = [s.overload_seconds for s in states if s.overload_seconds is not None and s.overload_seconds >= 0]
    if not lasting:
        return {}
    before = next((t.since_at for t in seen.service.status.tiers if t.name == OVERLOAD), None)
    since = seen.now - min(max(lasting), MOST_OVERLOAD_SECONDS)
    return {"workers": len(lasting), "since_at": since if before is None else before}


def overload_reported(seen: Seen, draft: Draft, status: ServiceStatus) -> Draft:
    """An event where overload has begun or ended."""
    before = next((t for t in seen.service.status.tiers if t.name == OVERLOAD), TierUse(OVERLOAD))
    use = next((t for t in status.tiers if t.name == OVERLOAD), TierUse(OVERLOAD))
    if bool(use.workers) == bool(before.workers):
        return draft
    if use.workers:
        message = (
            f"{use.workers} of {len(seen.snapshot.workers)} workers could not answer in time otherwise: requests that "
            f"name no budget have {use.budget:.2%} in the place of {seen.spec.max_disagreement:.2%}; "
            f"predicted to save {use.saving:.0%}"
        )
        return draft.with_events(Event(Reason.OVERLOAD_BEGAN, message, warning=True))
    message = (
        f"requests have {seen.spec.max_disagreement:.2%} again; under {draft.stable.name} {use.requests} were answered "
        f"for {before.budget:.2%}, {use.disagreements} of {use.audited} audits of them disagreed"
    )
    return draft.with_events(Event(Reason.OVERLOAD_ENDED, message))


def _tier_state(name: str, stable: Config, *, going: Sequence[str], served: Sequence[str]) -> TierState:
    if stable.plan.exits_off:
        return "Waiting"
    return "Exits" if name in going else "Stopped" if name in served else "NoPlan"


def _facts(seen: Seen, draft: Draft, pin: PinJudged) -> Facts:
    """What the conditions are derived from, but for the capacity, which follows from what they observe."""
    published = seen.snapshot.gathered.published
    ready = [w for w in seen.everybody if w.endpoint.ready]
    acked = sum(published is not None and w.state is not None and w.state.epoch == published.epoch for w in ready)
    return Facts(
        service=seen.service,
        workers=seen.everybody,
        acked=acked,
        stable=draft.stable,
        counts=seen.counts,
        pin=pin.status,
        rollout=draft.rollout,
        now=seen.now,
        quarantined=_not_pooled(seen, draft),
        foreign=frozenset(seen.foreign),
        costs_time=_costs_time(seen, draft),
        update=seen.update,
        scaling=seen.snapshot.gathered.scaling,
        ramp_sets=draft.ramp_sets,
        version=seen.version,
        route=seen.snapshot.gathered.route,
        worker_class=seen.snapshot.gathered.worker_class,
        class_trouble=seen.snapshot.gathered.class_trouble,
        shares=seen.snapshot.gathered.shares,
        turn=seen.snapshot.gathered.turn,
        routes=pooled(route for o in seen.trusted for route in o.routes),
    )


def _not_pooled(seen: Seen, draft: Draft) -> dict[str, str]:
    return not_pooled(seen.snapshot.workers, {**seen.foreign, **seen.quarantined}, draft.rollout)


def _costs_time(seen: Seen, draft: Draft) -> str:
    """How a plan that the user insists on costs time, or empty."""
    why = loss(draft.measured_of_stable, max_overhead=seen.spec.max_overhead, off=seen.spec.off)
    return f"{draft.stable.name}: compared with the batches held back from it, {why}" if why else ""


def _candidate(draft: Draft, tuned: Tuned) -> str:
    """What may become stable: the canary, or a recommendation that waits for the user. What is being promoted is no
    candidate any more."""
    name = draft.rollout.to_config if draft.rollout is not None else ""
    if tuned.new_rollout is not None:
        name = tuned.new_rollout.to_config
    return "" if name == draft.stable.name else name


def _rollout_summary(rollout: Rollout | None, steps: tuple[Step, ...]) -> RolloutSummary:
    if rollout is None:
        return RolloutSummary()
    status = rollout.status
    if status.phase not in CANARY_SERVES:
        return RolloutSummary(rollout.name, status.phase)
    still = sum(step.weight > status.weight for step in steps)
    return RolloutSummary(rollout.name, f"Step {status.step + 1}/{status.step + 1 + still} {status.weight}%")


def _workers_of_the_spec(seen: Seen) -> tuple[Worker, ...]:
    """Those that were made with the model that the spec asks for."""
    main = () if serving_source(seen.service) is not None else (*seen.snapshot.workers, *seen.everybody)
    return (*(w for w in main if not w.endpoint.own_bundle), *seen.trial)


def _pools(seen: Seen, draft: Draft) -> tuple[tuple[PoolStatus, ...], PoolPlanStatus]:
    served, spec = seen.served, seen.spec
    off = exits_off_plan(backbone_digest=served.backbone_digest, ramp_set_digest=served.ramp_set_digest)
    model = Model(served.costs, served.backbone_digest, off.content_hash, spec.latency_seconds or inf)
    before, doubted = seen.service.status.pools, {*seen.foreign, *seen.quarantined}
    known = next_pools(spec.pools, seen.everybody, before=before, model=model, distrusted=doubted)
    load, since = seen.snapshot.observed.load, seen.snapshot.watched_since
    placed, shares = with_place(seen.everybody), seen.snapshot.gathered.shares
    alarmed = any(w.state is not None and w.state.breaker_open for w in seen.everybody)
    saving = 0.0 if alarmed else counted_saving(spec, draft.stable, draft.measured_of_stable.engine_time)
    return with_plan(
        seen.service, known, load, placed=placed, shares=shares, now=seen.now, watched_since=since, saving=saving
    )


def _capacity(seen: Seen, draft: Draft, pools: Sequence[PoolStatus], audits: Audits) -> Capacity:
    """``audits`` are those of the stable plan."""
    served, spec, rollout = seen.served, seen.spec, draft.rollout
    off = exits_off_plan(backbone_digest=served.backbone_digest, ramp_set_digest=served.ramp_set_digest)
    counts = (c for o in seen.trusted for c in (*o.counts, *o.held_back))
    rate = worker_rate(
        served.costs, counts, exits_off_hash=off.content_hash, latency_seconds=spec.latency_seconds or inf
    )
    core = [pool for pool in pools if not spec.at_edge(pool.name)]
    rate = rate_of_all(core, by_weight=spec.route is not None) if pools else rate
    effect = worth_one(draft.tuning, rate=audits.rate)
    evidence = log_e_value(audits.k, audits.n, p0=spec.max_disagreement, design_effect=effect)
    evidence /= log(1 / (1 - spec.confidence))
    suspicion = max(
        (w.state.suspicion for w in seen.everybody if w.endpoint.ready and w.state is not None), default=0.0
    )
    under_way = rollout is not None and rollout.status.phase != "Pending" and not rollout.status.finished
    return capacity_of(
        seen.snapshot.with_workers(seen.everybody),
        seen.now,
        worker_rate=rate,
        exits_on=not draft.stable.plan.exits_off,
        at_risk=under_way or max(evidence, suspicion) >= SUSPICIOUS,
    )
