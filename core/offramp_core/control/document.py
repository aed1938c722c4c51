"""What workers should run, as one document."""

from __future__ import annotations

from dataclasses import replace

from offramp_core.control.draft import Draft
from offramp_core.control.objects import Config, Measured, Rollout, Service, TuningStatus
from offramp_core.control.rollouts.rollout import CANARY_SERVES, tiers_served
from offramp_core.control.seen import Seen
from offramp_core.control.stable.audit import worth_one
from offramp_core.control.trust import last_epoch
from offramp_core.plan import Plan
from offramp_core.protocol import ArmPlan, PlanDocument, Withdrawn, tier_slice

MAX_HELD_SETS = 2  # that a worker holds


def drafted(seen: Seen, draft: Draft) -> PlanDocument:
    """What workers should run as a pass has decided so far."""
    snapshot = seen.snapshot
    newest = last_epoch(
        seen.everybody, seen.quarantined, published=snapshot.gathered.published, rollouts=snapshot.gathered.rollouts
    )
    return plan_document(
        seen.service,
        draft.stable,
        epoch=newest + 1,
        canary_lease_seconds=seen.canary_lease_seconds,
        tuning=draft.tuning,
        measured=draft.measured_of_stable,
        rollout=draft.rollout,
        canary=draft.canary,
        ramp_sets=_held_sets(seen, draft),
        capture_since=draft.ramp_sets.capture_since_at,
        withdrawn=(*draft.withdrawn, *_stopped(draft.rollout)),
    )


def plan_document(
    service: Service,
    stable: Config,
    *,
    epoch: int,
    canary_lease_seconds: float,
    tuning: TuningStatus,
    measured: Measured,
    rollout: Rollout | None = None,
    canary: Config | None = None,
    ramp_sets: tuple[str, ...] = (),
    capture_since: float | None = None,
    withdrawn: tuple[Withdrawn, ...] = (),
) -> PlanDocument:
    """The document of ``epoch``. ``measured`` are the figures of the stable plan; ``canary`` is the plan of a rollout,
    in force while its phase says so.

    ``ramp_sets`` are those to hold besides what the plans name.
    """
    spec = service.spec
    arm, weight, salt, slow, slow_by_length = None, 0, "", {}, {}
    if rollout is not None and canary is not None and rollout.status.phase in CANARY_SERVES:
        status = rollout.status
        effect = worth_one(tuning, rate=status.audit_rate)
        arm = ArmPlan(canary.plan.to_mapping(), status.audit_rate, effect, tiers_served(canary, service))
        slow, slow_by_length = status.slow_seconds, status.slow_seconds_by_length
        weight, salt = status.weight, f"{rollout.name}/{status.step}/{status.renewals}"
    return PlanDocument(
        service=service.name,
        service_uid=service.uid,
        epoch=epoch,
        stable=ArmPlan(
            stable.plan.to_mapping(),
            tuning.audit_rate,
            worth_one(tuning, rate=tuning.audit_rate),
            going_tiers(stable, service, measured),
        ),
        canary=arm,
        weight_percent=weight,
        salt=salt,
        accuracy_budget=spec.max_disagreement,
        slow_seconds=slow,
        slow_seconds_by_length=slow_by_length,
        max_overhead=spec.max_overhead if arm is not None else 0.0,
        canary_lease_seconds=canary_lease_seconds,
        holdback_share=0.0 if stable.plan.exits_off else spec.holdback,
        slices=() if stable.plan.exits_off else tuple(s.name for s in spec.slices),
        stopped_slices=tuple(
            s.name for s in spec.slices if measured.stopped(stable.plan.content_hash, s.name, s.max_disagreement)
        ),
        ramp_sets=ramp_sets,
        capture_since=capture_since,
        withdrawn=withdrawn,
        tiers={t.name: t.max_disagreement for t in spec.menu},
    )


def going_tiers(stable: Config, service: Service, measured: Measured) -> tuple[str, ...]:
    """Tiers whose requests take exits of the stable plan: certified, and not stopped for what they are promised."""
    plan_hash, budgets = stable.plan.content_hash, {t.name: t.max_disagreement for t in service.spec.menu}
    served = tiers_served(stable, service)
    return tuple(n for n in served if not measured.stopped(plan_hash, tier_slice(n), budgets[n]))


def _held_sets(seen: Seen, draft: Draft) -> tuple[str, ...]:
    """What workers hold besides the sets of their arms: at most two in all, the one on trial first."""
    sets, own = draft.ramp_sets, seen.served.ramp_set_digest
    if not sets.current and not sets.candidate:
        return ()
    arms = [c.plan.ramp_set_digest for c in (draft.stable, draft.canary) if c is not None and not c.plan.exits_off]
    tuned = (sets.candidate, sets.current or own) if seen.spec.mode in ("Auto", "Recommend") else ()
    wanted = dict.fromkeys([*arms, *filter(None, tuned)])
    return tuple(sorted(list(wanted)[:MAX_HELD_SETS]))


def _stopped(rollout: Rollout | None) -> tuple[Withdrawn, ...]:
    """The canary that is being rolled back."""
    if rollout is None or rollout.status.phase != "RollingBack":
        return ()
    status = rollout.status
    return (Withdrawn(rollout.to_config, status.reason, status.message, rollout.name, status.outcome),)


def differs(document: PlanDocument, published: PlanDocument | None) -> bool:
    """Whether a document that is one epoch ahead must be published: what is published says something else, or is older
    than workers take.

    What was taken away is said by the document that takes it away; that it is said no more is nothing that workers must
    hear of.
    """
    if published is None or document.epoch > published.epoch + 1:
        return True
    return replace(document, epoch=published.epoch, withdrawn=published.withdrawn) != published


def switched_off(stable: Config, published: PlanDocument | None) -> Withdrawn | None:
    """Why a plan that is stored as stable was switched off, by a pass that could not store that; None where it was
    not."""
    if published is None or stable.plan.exits_off:
        return None
    arms = [Plan.from_mapping(arm.plan) for arm in (published.stable, published.canary) if arm is not None]
    notes = (note for note in published.withdrawn if note.config == stable.name and not note.rollout)
    return None if stable.plan in arms else next(notes, None)


def only_takes_away(document: PlanDocument, published: PlanDocument | None) -> bool:
    """Whether a document gives no plan more requests than what is published and judges none by a larger budget, and
    gives some plan fewer.

    Such a one may be delivered before what it follows from is stored: that exits harm is no reason to wait for, that
    they do not is. A stable plan that is withdrawn may give way to the one before it, whose proof is stored.
    """
    if published is None:
        return False
    canary, was = document.canary, published.canary
    more = canary is not None and (
        was is None
        or (canary.plan, document.salt) != (was.plan, published.salt)
        or document.weight_percent > published.weight_percent
    )
    fewer = was is not None and (canary is None or document.weight_percent < published.weight_percent)
    if canary is not None and was is not None:
        more = more or not set(canary.tiers) <= set(was.tiers)
        fewer = fewer or not set(canary.tiers) >= set(was.tiers)
    more = more or _loosened(document, published)
    stable, stood = Plan.from_mapping(document.stable.plan), Plan.from_mapping(published.stable.plan)
    if stable != stood:
        withdrawn = any(note.config == stood.name(document.service) for note in document.withdrawn)
        more, fewer = more or not (stable.exits_off or withdrawn), True
    else:
        more = more or not set(document.stopped_slices) >= set(published.stopped_slices) & set(document.slices)
        more = more or not set(document.stable.tiers) <= set(published.stable.tiers)
        fewer = fewer or not set(document.stopped_slices) <= set(published.stopped_slices)
        fewer = fewer or not set(document.stable.tiers) >= set(published.stable.tiers)
    return fewer and not more


def _loosened(document: PlanDocument, published: PlanDocument) -> bool:
    """Whether exits that a document leaves in force are guarded by a larger budget than before, everybody's or that of
    a tier."""
    arms = [arm for arm in (document.stable, document.canary) if arm is not None]
    if all(Plan.from_mapping(arm.plan).exits_off for arm in arms):
        return False
    going = {name for arm in arms for name in arm.tiers}
    tiers = ((budget, published.tiers.get(name, budget)) for name, budget in document.tiers.items() if name in going)
    return document.accuracy_budget > published.accuracy_budget or any(now > before for now, before in tiers)
