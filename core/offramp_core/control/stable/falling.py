"""Why exits go off under a plan that was stable, as a list of named rules, and what follows from it.

A rule looks at the stable plan and says why it falls, or nothing. The rules are asked in order; the first that has
something to say decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offramp_core.control.document import switched_off
from offramp_core.control.draft import Draft
from offramp_core.control.objects import Config, Measured, RampSetStatus, Service, SliceStop
from offramp_core.control.rollouts.rollout import forbidden
from offramp_core.control.seen import Seen
from offramp_core.control.served import Served
from offramp_core.control.snapshot import Event, Worker
from offramp_core.control.stable.audit import worth_one
from offramp_core.control.stable.holdback import loss, update_measured
from offramp_core.control.stable.watch import Watch, watched
from offramp_core.control.trust import live_boots
from offramp_core.control.tuning.tuner import after_alarm, after_rollback
from offramp_core.plan import Plan
from offramp_core.protocol import PlanDocument, Withdrawn, tier_slice
from offramp_core.reasons import Reason

COOLDOWN_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class StableView:
    """What the rules may look at. ``fits`` says whether the plan is for the model and a ramp set of ``served``."""

    stable: Config
    service: Service
    workers: tuple[Worker, ...]
    published: PlanDocument | None
    served: Served
    ramp_sets: RampSetStatus
    fits: bool
    measured: Measured
    watch: Watch


@dataclass(frozen=True, slots=True)
class Fall:
    """Why a plan falls: a reason, and a sentence. ``event`` is what people hear of it; ``set_is_gone`` says that its
    ramp set goes with it."""

    reason: Reason
    message: str
    event: Event | None = None
    set_is_gone: bool = False


Rule = Callable[[StableView], Fall | None]


def settled(seen: Seen, draft: Draft) -> Draft:
    """The stable plan with its figures, or exits off where it does not apply any more."""
    draft = replace(draft, measured=_measured(seen, draft), watch=_watch(seen, draft))
    if seen.outvoted:
        draft = replace(draft, fell=(Reason.MODEL_CHANGED, "most workers serve another model or ramp set now"))
    view = StableView(
        stable=draft.stable,
        service=seen.service,
        workers=seen.snapshot.workers,
        published=seen.snapshot.gathered.published,
        served=seen.served,
        ramp_sets=draft.ramp_sets,
        fits=seen.fits(draft.stable.plan, draft.ramp_sets),
        measured=draft.measured,
        watch=draft.watch,
    )
    fall = next((fall for rule in RULES if (fall := rule(view)) is not None), None)
    return draft if fall is None else _fallen(seen, draft, fall)


# --- rules -----------------------------------------------------------------------------------------


def another_model_is_served(view: StableView) -> Fall | None:
    return None if view.fits else Fall(Reason.MODEL_CHANGED, "the workers serve another model or ramp set now")


def switched_off_already(view: StableView) -> Fall | None:
    """By a pass that could not store why: the workers run without it, so nothing of what spoke against it need be seen
    again."""
    note = switched_off(view.stable, view.published)
    if note is None:
        return None
    return (
        _by_cost(note.message, view.service.spec.off_now)
        if note.reason == Reason.EXITS_COST_TIME
        else _by_drift(note.message)
    )


def ramp_set_is_gone(view: StableView) -> Fall | None:
    """No worker can load the set that the plan needs: all of them serve without exits already.

    Workers without a store call every set but the bundle's own a mismatch.
    """
    plan, epoch = view.stable.plan, view.published.epoch if view.published else 0
    foreign = plan.ramp_set_digest != view.served.ramp_set_digest
    reasons = (Reason.RAMP_SET_NOT_HELD, Reason.DIGEST_MISMATCH) if foreign else (Reason.RAMP_SET_NOT_HELD,)
    refusals = [w.state.refused if w.state is not None else None for w in view.workers if w.endpoint.ready]
    refused = [r is not None and r.epoch == epoch and r.reason in reasons for r in refusals]
    if plan.exits_off or view.ramp_sets.candidate or not refused or not all(refused):
        return None
    message = f"{view.stable.name} needs {plan.ramp_set_digest[:19]}, which no worker can load from the ramp-set store"
    event = Event(Reason.RAMP_SET_GONE, f"{message}; {view.service.spec.off_now}", warning=True)
    return Fall(Reason.MODEL_CHANGED, message, event, set_is_gone=True)


def no_longer_allowed(view: StableView) -> Fall | None:
    why = "" if view.stable.plan.exits_off else forbidden(view.stable, view.service)
    return Fall(Reason.NEWER_INTENT, why, Event(Reason.EXITS_OFF, why)) if why else None


def a_detector_alarms(view: StableView) -> Fall | None:
    """A worker's own, over its own audits of this very plan."""
    plan, published = view.stable.plan, view.published
    if plan.exits_off or published is None or published.stable.plan != plan.to_mapping():
        return None
    states = ((w.endpoint.name, w.state) for w in view.workers if w.state is not None)
    alarmed = [name for name, state in states if state.breaker_open and state.stable_hash == plan.content_hash]
    return _by_drift(_over_budget(view, f"the detector of {', '.join(alarmed)} says")) if alarmed else None


def the_fleet_is_over_budget(view: StableView) -> Fall | None:
    """What all workers' audits say together, which may be long before any worker's own detector does."""
    if view.stable.plan.exits_off or not view.watch.alarms:
        return None
    lost = f", {view.watch.lost} of which were never reported," if view.watch.lost else ""
    return _by_drift(_over_budget(view, f"the audits of all workers together{lost} say"))


def it_costs_time(view: StableView) -> Fall | None:
    """The holdback shows that exits cost more than they save. A pin stays all the same, as it is the user's; a
    condition says so."""
    spec = view.service.spec
    why = "" if view.stable.plan.exits_off else loss(view.measured, max_overhead=spec.max_overhead, off=spec.off)
    if not why or spec.mode not in ("Auto", "Recommend"):
        return None
    return _by_cost(f"{view.stable.name}: compared with the batches held back from it, {why}", spec.off_now)


RULES: tuple[Rule, ...] = (
    another_model_is_served,
    switched_off_already,
    ramp_set_is_gone,
    no_longer_allowed,
    a_detector_alarms,
    the_fleet_is_over_budget,
    it_costs_time,
)


def _over_budget(view: StableView, who_says: str) -> str:
    spec = view.service.spec
    return f"{view.stable.name}: {who_says} that the budget of {spec.max_disagreement:.2%} is broken; {spec.off_now}"


def _by_drift(message: str) -> Fall:
    return Fall(Reason.DRIFT_DETECTED, message, Event(Reason.DRIFT_DETECTED, message, warning=True))


def _by_cost(message: str, off_now: str) -> Fall:
    event = Event(Reason.EXITS_COST_TIME, f"{message}; {off_now}", warning=True)
    return Fall(Reason.EXITS_COST_TIME, message, event)


# --- what follows ----------------------------------------------------------------------------------


def _fallen(seen: Seen, draft: Draft, fall: Fall) -> Draft:
    """Exits are off. What harmed is rejected; what merely does not apply any more makes way for another plan."""
    fallen, draft = draft.stable, replace(draft, stable=draft.baseline, fell=(fall.reason, fall.message))
    if fall.event is not None:
        draft = draft.with_events(fall.event)
    if fall.reason == Reason.DRIFT_DETECTED:
        draft = drifted(seen, draft, fallen, fall.message)
        return replace(draft, tuning=after_alarm(draft.tuning, now=seen.now))
    if fall.reason == Reason.EXITS_COST_TIME:
        draft = rejected(seen, draft, fallen.name, fall.message)
        cooldown = seen.spec.rollout.cooldown_seconds
        tuning = after_rollback(draft.tuning, reason=fall.reason, cooldown=cooldown, now=seen.now)
        return replace(draft, tuning=tuning, withdrawn=(Withdrawn(fallen.name, fall.reason, fall.message),))
    tuning = replace(draft.tuning, tuned_for="", next_attempt_at=None)
    if fall.set_is_gone:
        tuning = replace(tuning, labels_needed=0, remeasure_at=0, remeasure_by_at=None)
        return replace(draft, tuning=tuning, ramp_sets=replace(draft.ramp_sets, current=""))
    return replace(draft, tuning=tuning)


def drifted(seen: Seen, draft: Draft, fallen: Config, message: str) -> Draft:
    """The inputs changed under a plan: it is rejected, and what was rejected on the old inputs may be tried again."""
    draft = replace(draft, withdrawn=(Withdrawn(fallen.name, Reason.DRIFT_DETECTED, message),))
    forgiven = "the inputs changed since it was rejected"
    for name, config in draft.configs.items():
        status = config.status
        if name != fallen.name and (status.rejections or status.rejected_until_at is not None):
            status = replace(status, state="Superseded", rejections=0, rejected_until_at=None, message=forgiven)
            draft = draft.with_config_status(name, status)
    return rejected(seen, draft, fallen.name, message)


def rejected(seen: Seen, draft: Draft, name: str, message: str) -> Draft:
    """Let a plan cool down, longer after each failure. One failure counts once, also when a pass was cut short and is
    made again."""
    status = draft.configs[name].status
    if status.state == "Rejected" and status.message == message and (status.rejected_until_at or 0.0) > seen.now:
        return draft
    rejections = status.rejections + 1
    until = seen.now + seen.spec.rollout.cooldown_seconds * 2 ** min(rejections - 1, COOLDOWN_DOUBLINGS)
    return draft.with_config_status(
        name, replace(status, state="Rejected", rejections=rejections, rejected_until_at=until, message=message)
    )


# --- what is known of the stable plan --------------------------------------------------------------


def _measured(seen: Seen, draft: Draft) -> Measured:
    """What the stable plan saves, by comparison with the batches that are held back from it."""
    spec, plan = seen.spec, draft.stable.plan
    before = _with_stops_of_workers(seen.service.status.measured, seen, plan)
    if plan.exits_off or not seen.fits(plan, draft.ramp_sets):
        return Measured(stops=before.all_stops)
    ids, costs = seen.served.chain(plan.precision)
    return update_measured(
        before,
        ((o.boot_id, counts) for o in seen.trusted for counts in o.plans),
        plan=plan,
        share=spec.holdback,
        live_boots=live_boots(seen.snapshot.workers, before.live),
        ramp_ids=ids,
        costs=costs,
        alpha=1 - spec.rollout.confidence,
        now=seen.now,
        slices=spec.watched,
        slice_alpha=1 - spec.confidence,
        design_effect=worth_one(draft.tuning, rate=draft.tuning.audit_rate),
    )


def _with_stops_of_workers(before: Measured, seen: Seen, plan: Plan) -> Measured:
    """A tier that one worker's detector has stopped is stopped everywhere: a change shows there first, where all that
    was counted before would hide it."""
    states = (w.state for w in seen.snapshot.workers if w.state is not None)
    alarmed = {name for s in states if s.stable_hash == plan.content_hash for name in s.stopped_tiers}
    if not alarmed:
        return before
    stops = {
        tier_slice(t.name): SliceStop(plan.content_hash, tier_slice(t.name), t.max_disagreement)
        for t in seen.spec.menu
        if t.name in alarmed
    }
    uses = before.slices
    if before.plan_hash == plan.content_hash:
        uses = tuple(replace(use, stopped=True) if use.name in stops else use for use in uses)
    known = before.all_stops
    new = tuple(stop for stop in stops.values() if stop not in known)
    return replace(before, slices=uses, stops=(*known, *new)) if new else before


def _watch(seen: Seen, draft: Draft) -> Watch:
    reporting = (w.observations for w in seen.snapshot.workers)
    return watched(
        seen.snapshot.watch,
        seen.trusted,
        boots=frozenset(o.boot_id for o in reporting if o is not None),
        plan=draft.stable.plan,
        budget=seen.spec.max_disagreement,
        now=seen.now,
        design_effect=worth_one(draft.tuning, rate=draft.tuning.audit_rate),
    )
