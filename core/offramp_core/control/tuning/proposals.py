"""Looking for a better plan: what the tuner and the user's pin propose, and how many requests are audited for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from offramp_core.control.draft import Draft, as_decided
from offramp_core.control.objects import PinStatus, TuningStatus, ring
from offramp_core.control.rollouts.rollout import awaits_approval, withdrawn
from offramp_core.control.seen import Seen
from offramp_core.control.snapshot import Event
from offramp_core.control.stable.audit import eager_rate, followed_rate, quiet_rate
from offramp_core.control.stable.falling import drifted
from offramp_core.control.stable.history import known_good
from offramp_core.control.trust import live_boots
from offramp_core.control.tuning.tuner import PinJudged, Tuned, TunerView, judge_pin, pinned_plan, tune_or_wait
from offramp_core.evaluate import evaluate_plan
from offramp_core.reasons import Reason
from offramp_core.tuning import gain


def without_idle_ramps(seen: Seen, draft: Draft) -> Draft:
    """Have ramps placed anew, once for a plan: what audits recorded tells of all ramps, also of those that it does not
    use."""
    idle = [use.id for use in draft.measured.ramps if not use.pays]
    tunes = seen.spec.mode in ("Auto", "Recommend") and not seen.spec.suspend and draft.rollout is None
    stable = draft.stable
    measured = stable.plan.content_hash == draft.measured.plan_hash
    if not idle or not tunes or not measured or draft.tuning.unpaying == stable.name:
        return draft
    message = f"{stable.name}: {', '.join(idle)} costs more than it saves; looking for a better plan"
    tuning = replace(draft.tuning, unpaying=stable.name, tuned_for="", next_attempt_at=None)
    return replace(draft.with_events(Event(Reason.RAMP_DOES_NOT_PAY, message)), tuning=tuning)


def proposed(seen: Seen, draft: Draft) -> tuple[Draft, Tuned, PinJudged]:
    """What the tuner and the pin have to say, with the plans that they bring."""
    held = draft.rollout if draft.rollout is not None and awaits_approval(draft.rollout, seen.service) else None
    view = TunerView(
        as_decided(seen, draft),
        draft.tuning,
        draft.stable,
        None if held is not None else draft.rollout,
        seen.now,
        recommended=held,
        known=known_good(seen, draft),
        ramp_set=seen.working_set(draft.ramp_sets),
        saving_to_beat=_saving_to_beat(seen, draft),
    )
    tuned = tune_or_wait(view)
    if tuned.withdraw and held is not None:
        draft = draft.with_rollout_status(held.name, withdrawn(held, tuned.withdraw, now=seen.now))
    pin = _pin_judged(seen, draft)
    for new in (tuned.new_config, pin.new_config):
        if new is not None and new.name not in seen.snapshot.gathered.configs:
            draft = draft.with_config(new, seen.now)
        elif new is not None:
            draft = draft.with_config_status(new.name, new.status)
    return draft.with_events(*tuned.events, *pin.events), tuned, pin


def concluded(seen: Seen, draft: Draft, tuned: Tuned) -> tuple[Draft, Tuned]:
    """The attempt that was withdrawn is over; and records may say of the stable plan what the detector has not said
    yet.

    A plan that follows is then compared with the model itself, not with a plan that is fast because it disagrees.
    """
    if tuned.withdraw:
        draft = replace(draft, rollout=None)
    if tuned.stable_over_budget:
        draft = draft.with_events(Event(Reason.DRIFT_DETECTED, tuned.stable_over_budget, warning=True))
        draft = drifted(seen, draft, draft.stable, tuned.stable_over_budget)
    elif tuned.stable_not_allowed:
        draft = draft.with_events(Event(Reason.EXITS_OFF, tuned.stable_not_allowed))
    else:
        return draft, tuned
    draft = replace(draft, stable=draft.baseline)
    if tuned.new_rollout is None:
        return draft, tuned
    return draft, replace(tuned, new_rollout=replace(tuned.new_rollout, from_config=draft.baseline.name))


def audited(seen: Seen, draft: Draft, tuning: TuningStatus) -> Draft:
    """The draft with what the tuner remembers from now on, and the audit rate that follows."""
    draft = replace(draft, tuning=_with_rate(seen, draft, tuning))
    return _with_marks(seen, draft)


# --- plans -----------------------------------------------------------------------------------------


def _saving_to_beat(seen: Seen, draft: Draft) -> float:
    """What the stable plan is worth on the requests that the set on trial was scored on as well."""
    plan = draft.stable.plan
    store, tried = seen.stores.get(plan.ramp_set_digest), seen.records(draft.ramp_sets)
    if store is None or tried is None or plan.ramp_set_digest == tried.ramp_set_digest:
        return 0.0
    if store.records.time is None or tried.records.time is None or not len(tried.records):
        return 0.0
    rows = store.records.time >= tried.records.time[0]
    if not rows.any():
        return 0.0
    found = evaluate_plan(store.records.take(rows.nonzero()[0]), plan, store.ramp_ids)
    return gain(found, seen.snapshot.has_edges) if found.disagreement <= seen.spec.max_disagreement else 0.0


def _pin_judged(seen: Seen, draft: Draft) -> PinJudged:
    served = seen.served
    plan = pinned_plan(
        seen.snapshot,
        backbone_digest=served.backbone_digest,
        ramp_set_digest=served.ramp_set_digest,
        order=served.ramp_ids,
    )
    if plan is None:
        return PinJudged(PinStatus())
    now = as_decided(seen, draft)
    known = replace(now.service, status=replace(now.service.status, tuning=draft.tuning))
    return judge_pin(
        replace(now, gathered=replace(now.gathered, service=known)),
        plan=plan,
        stable=draft.stable,
        rollout=draft.rollout,
    )


# --- audits ----------------------------------------------------------------------------------------


def _with_rate(seen: Seen, draft: Draft, tuning: TuningStatus) -> TuningStatus:
    """The audit rate of the stable arm. It moves when its class does, and a quiet one with load far changed: every
    change is a new epoch.

    While a rollout is under way it stays, because a canary's evidence is of one epoch.
    """
    spec, load = seen.spec, seen.snapshot.observed.load
    wanted: Literal["Off", "Quiet", "Eager"] = "Quiet"
    if spec.mode == "Disabled" or (draft.stable.plan.exits_off and spec.suspend):
        wanted = "Off"
    elif draft.rollout is None and (tuning.state in ("CollectingLabels", "Tuning") or _waits_for_captures(seen, draft)):
        wanted = "Eager"
    if wanted == tuning.audit:
        follows = wanted == "Quiet" and draft.rollout is None
        return replace(tuning, audit_rate=followed_rate(tuning.audit_rate, load)) if follows else tuning
    rate = {"Off": 0.0, "Quiet": quiet_rate(load), "Eager": eager_rate(load)}[wanted]
    return replace(tuning, audit=wanted, audit_rate=rate, eager_since_at=seen.now if wanted == "Eager" else None)


def _waits_for_captures(seen: Seen, draft: Draft) -> bool:
    """Whether nothing leaves early and nothing will before ramps are trained: what audits draw is what there is to
    train on."""
    sets = draft.ramp_sets
    due = sets.next_attempt_at is None or seen.now >= sets.next_attempt_at
    return draft.stable.plan.exits_off and sets.state == "Capturing" and due


def _with_marks(seen: Seen, draft: Draft) -> Draft:
    """A test has used records, or the inputs have changed: which records these were must be known for good."""
    before = seen.service.status.tuning
    if draft.tuning.consumed_through_at != before.consumed_through_at:
        draft = replace(draft, tuning=replace(draft.tuning, used=_marks(seen, before.used)))
    if draft.tuning.records_since_at != before.records_since_at:
        tuning = replace(draft.tuning, stale=_marks(seen, before.stale))
        draft = replace(draft, tuning=tuning, measured=draft.measured.after_change(draft.stable.plan))
    return draft


def _marks(seen: Seen, known: Mapping[str, int]) -> dict[str, int]:
    """Where the rings of processes whose clocks run ahead stand now, and stood when those that are silent now were last
    heard."""
    boots = {key: key.partition("/")[0] for key in known}
    live = live_boots(seen.snapshot.workers, boots.values())
    now = {ring(boot, s.ramp_set_digest): number for s in seen.stores.values() for boot, number in s.ahead.items()}
    return {**{key: number for key, number in known.items() if boots[key] in live}, **now}
