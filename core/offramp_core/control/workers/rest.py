"""A service that nobody wants workers of: what is kept, and what workers will start under when they are wanted again.

Decisions about plans wait, as there is nothing to see. Only what must not lie in wait for the next workers is put right
at once: a canary (unproven, and no evidence of its step would be left), and a stable plan that the spec has ceased to
allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.document import differs, plan_document, switched_off
from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    Service,
    ServiceStatus,
)
from offramp_core.control.rollouts.rollout import CANARY_SERVES, begun_anew, forbidden
from offramp_core.control.snapshot import Event, NewConfig, Snapshot
from offramp_core.control.tuning.tuner import after_alarm
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import PlanDocument, Withdrawn
from offramp_core.reasons import ConditionType, Reason, parse_reason


@dataclass(frozen=True, slots=True)
class Rest:
    """What changes. ``status`` has no conditions yet; ``stable`` is what workers will start under, None before the
    first plan."""

    status: ServiceStatus
    stable: Config | None = None
    new_configs: tuple[NewConfig, ...] = ()
    config_statuses: Mapping[str, ConfigStatus] = field(default_factory=dict)
    rollout_statuses: Mapping[str, RolloutStatus] = field(default_factory=dict)
    publish: PlanDocument | None = None
    events: tuple[Event, ...] = ()


def at_rest(snapshot: Snapshot, now: float, *, canary_lease_seconds: float) -> Rest:
    """The pass over a service at zero. Once carried out it is a fixed point."""
    service = snapshot.service
    before = snapshot.gathered.configs.get(service.status.stable_config)
    if before is None:
        return Rest(service.status, events=_scaled_to_zero(snapshot, ""))
    fallen = switched_off(before, snapshot.gathered.published)
    why = "" if before.plan.exits_off else fallen.message if fallen is not None else forbidden(before, service)
    stable, made = _baseline(snapshot, before, now) if why else (before, ())
    rollouts = {
        r.name: _stops(r, snapshot, now) or _waits(r)
        for r in snapshot.gathered.rollouts
        if r.status.phase in CANARY_SERVES
    }
    status = replace(service.status, stable_config=stable.name)
    statuses: dict[str, ConfigStatus] = {}
    if fallen is not None:
        status = replace(status, tuning=after_alarm(status.tuning, now=now))
        statuses[before.name] = _rejected(before, fallen, service, now)
    elif why:
        status = replace(status, tuning=replace(status.tuning, tuned_for="", next_attempt_at=None))
        statuses[before.name] = replace(before.status, state="Superseded")
    for rollout in (r for r in snapshot.gathered.rollouts if r.name in rollouts):
        status = replace(status, rollout=RolloutSummary(rollout.name, rollouts[rollout.name].phase))
        if (canary := snapshot.gathered.configs.get(rollout.to_config)) is not None:
            statuses[canary.name] = replace(canary.status, state="Superseded")
    document = plan_document(
        service,
        stable,
        epoch=_next_epoch(snapshot),
        canary_lease_seconds=canary_lease_seconds,
        tuning=status.tuning,
        measured=status.measured.of(stable.plan),
        capture_since=status.ramp_sets.capture_since_at,
    )
    return Rest(
        status,
        stable,
        made,
        statuses,
        rollouts,
        document if differs(document, snapshot.gathered.published) else None,
        (*([Event(Reason.EXITS_OFF, why)] if why else []), *_scaled_to_zero(snapshot, stable.name)),
    )


def _stops(rollout: Rollout, snapshot: Snapshot, now: float) -> RolloutStatus | None:
    """An attempt whose canary went before that could be stored is being rolled back; the next workers end it."""
    notes = snapshot.gathered.published.withdrawn if snapshot.gathered.published is not None else ()
    withdrawn = next((note for note in notes if note.rollout == rollout.name), None)
    if withdrawn is None:
        return None
    return replace(
        rollout.status,
        phase="RollingBack",
        phase_started_at=now,
        weight=0,
        outcome=withdrawn.outcome,
        reason=parse_reason(withdrawn.reason),
        message=withdrawn.message,
    )


def _rejected(config: Config, withdrawn: Withdrawn, service: Service, now: float) -> ConfigStatus:
    until, before = now + service.spec.rollout.cooldown_seconds, config.status
    return replace(
        before, state="Rejected", rejections=before.rejections + 1, rejected_until_at=until, message=withdrawn.message
    )


def _waits(rollout: Rollout) -> RolloutStatus:
    return begun_anew(rollout, "no worker is left to run the canary; it begins anew when workers serve again")


def _baseline(snapshot: Snapshot, stable: Config, now: float) -> tuple[Config, tuple[NewConfig, ...]]:
    """Exits off for the model that served last."""
    plan = exits_off_plan(backbone_digest=stable.plan.backbone_digest, ramp_set_digest=stable.plan.ramp_set_digest)
    name = plan.name(snapshot.service.name)
    known = snapshot.gathered.configs.get(name)
    if known is not None:
        return known, ()
    new = NewConfig(name, plan, ConfigStatus("Baseline", "Certified", message=snapshot.service.spec.off))
    return Config(name, plan, new.status, now), (new,)


def _next_epoch(snapshot: Snapshot) -> int:
    """No worker is there that may know of a newer one."""
    published = snapshot.gathered.published.epoch if snapshot.gathered.published is not None else 0
    return 1 + max([published, *(r.status.ledger.epoch for r in snapshot.gathered.rollouts)])


def _scaled_to_zero(snapshot: Snapshot, stable: str) -> tuple[Event, ...]:
    ready = next((c for c in snapshot.service.status.conditions if c.type == ConditionType.READY), None)
    if snapshot.gathered.shares or (ready is not None and ready.reason == "ScaledToZero"):
        return ()  # where others have all workers of a class, that is told
    kept = f"; {stable}, its proof and its records are kept" if stable else ""
    return (Event(Reason.SCALED_TO_ZERO, f"no worker is wanted any more{kept}"),)
