"""One pass of the control loop: a pure function of a snapshot and a time."""

from __future__ import annotations

from dataclasses import replace

from offramp_core.control.document import differs, drafted
from offramp_core.control.draft import Draft, begun
from offramp_core.control.objects import RolloutStatus, Service, ServiceStatus
from offramp_core.control.rollouts.attempts import advanced
from offramp_core.control.rollouts.rollout import awaits_approval, intent_key
from offramp_core.control.seen import Seen, see
from offramp_core.control.served import Served, served_by
from offramp_core.control.snapshot import Decision, Event, NewRollout, Snapshot, TrainingOrder, Worker
from offramp_core.control.stable.falling import settled
from offramp_core.control.stable.history import config_statuses, forgotten
from offramp_core.control.status import overload_reported, plan_reported, quarantine_reported, service_status
from offramp_core.control.tuning.proposals import audited, concluded, proposed, without_idle_ramps
from offramp_core.control.tuning.retraining import TrainingView, train_or_wait
from offramp_core.control.workers.absent import without_workers
from offramp_core.control.workers.recreate import interruption, recreated, recreates
from offramp_core.control.workers.rejected import rejection_events
from offramp_core.control.workers.update import Update, UpdateView, next_update
from offramp_core.control.workers.versions import Version, VersionView, next_version
from offramp_core.reasons import ConditionType, Reason

BUSY_REQUEUE_SECONDS = 1.0
QUIET_REQUEUE_SECONDS = 10.0
CANARY_LEASE_SECONDS = 60.0


def decide(snapshot: Snapshot, now: float) -> Decision:
    """What to do about one service.

    Steady state is a fixed point: deciding again on the same facts changes nothing.
    """
    # Whatever workers of a model on trial do is about that model: plans are decided for the others.
    version, trial = _version(snapshot, now), tuple(w for w in snapshot.workers if w.endpoint.trial)
    snapshot = snapshot.with_workers(tuple(w for w in snapshot.workers if not w.endpoint.trial))
    update = _update(snapshot, now)
    events = (*_update_events(snapshot.service, update), *version.events, *rejection_events(snapshot))
    under_way = any(not r.status.finished and r.status.phase != "Pending" for r in snapshot.gathered.rollouts)
    published, bundle = snapshot.gathered.published, snapshot.service.status.ramp_sets.bundle
    served = served_by(snapshot.workers, published, bundle=bundle, rollout_under_way=under_way)
    lease = CANARY_LEASE_SECONDS
    if served is None or snapshot.gathered.desired == 0:
        return without_workers(snapshot, trial, version, update, events=events, now=now, canary_lease_seconds=lease)
    snapshot = _judged_by_its_task(snapshot, served)
    seen = see(snapshot, served, trial=trial, version=version, update=update, now=now, canary_lease_seconds=lease)
    return _decided(seen, begun(seen, events))


def _judged_by_its_task(snapshot: Snapshot, served: Served) -> Snapshot:
    """The snapshot as it is where workers answer what the objective is about; else one in which no exits are wanted,
    since nothing proves them."""
    service = snapshot.service
    if service.spec.output == served.output:
        return snapshot
    why = (
        f"objective.accuracy.output is {service.spec.output}, and the bundle answers with {served.output}; set "
        "output to that, or serve another bundle"
    )
    judged = replace(service, spec=replace(service.spec, mode="Disabled", no_exits_because=why))
    return replace(snapshot, gathered=replace(snapshot.gathered, service=judged))


def _decided(seen: Seen, draft: Draft) -> Decision:
    """The steps of a pass over a service whose workers have reported their model, in their order."""
    draft = settled(seen, draft)
    draft = advanced(seen, draft)
    draft = _stopped_slices_reported(seen, draft)
    draft = without_idle_ramps(seen, draft)
    draft, order = _trained(seen, draft)
    draft, tuned, pin = proposed(seen, draft)
    draft, tuned = concluded(seen, draft, tuned)
    draft = audited(seen, draft, tuned.status)
    document = drafted(seen, draft)
    changed = differs(document, seen.snapshot.gathered.published)
    status = service_status(seen, draft, tuned=tuned, pin=pin, document_changed=changed)
    draft = plan_reported(seen, quarantine_reported(seen, draft), status)
    draft = overload_reported(seen, draft, status)
    delete_configs, delete_rollouts = forgotten(seen, draft, status)
    new_rollout = tuned.new_rollout or pin.new_rollout
    draft = _with_its_intent(seen, draft, new_rollout)
    busy = changed or new_rollout is not None or _busy(seen, draft, status, tuning=str(tuned.status.state))
    return Decision(
        status=status,
        new_configs=draft.new_configs,
        config_statuses=config_statuses(seen, draft),
        new_rollout=new_rollout,
        rollout_statuses=draft.rollout_statuses,
        delete_configs=delete_configs,
        delete_rollouts=delete_rollouts,
        publish=document if changed else None,
        tune=tuned.request,
        train=order,
        events=draft.events,
        requeue_after_seconds=BUSY_REQUEUE_SECONDS if busy else QUIET_REQUEUE_SECONDS,
        watch=draft.watch,
    )


# --- steps -----------------------------------------------------------------------------------------


def _stopped_slices_reported(seen: Seen, draft: Draft) -> Draft:
    before = {s.name for s in seen.service.status.measured.slices if s.stopped}
    for use in draft.measured_of_stable.slices:
        if use.stopped and use.name not in before:
            message = (
                f"{draft.stable.name}: {use.disagreements} of {use.audited} audits of {use.title} disagreed; "
                f"its budget is {use.budget:.2%}, so {use.consequence} under this plan"
            )
            draft = draft.with_events(Event(Reason.SLICE_STOPPED, message, warning=True))
    return draft


def _trained(seen: Seen, draft: Draft) -> tuple[Draft, TrainingOrder | None]:
    """The training of the next ramp set."""
    snapshot, published = seen.snapshot, seen.snapshot.gathered.published
    trained = train_or_wait(
        TrainingView(
            service=seen.service,
            status=draft.ramp_sets,
            bundle=(seen.served.backbone_digest, seen.served.ramp_set_digest),
            workers=snapshot.workers,
            rollout=draft.rollout,
            configs=draft.configs.values(),
            concluded=_tuned_in_vain(seen, draft),
            inputs_since=draft.tuning.records_since_at,
            published_epoch=published.epoch if published is not None else 0,
            report=snapshot.gathered.training,
            able=snapshot.gathered.can_train,
            now=seen.now,
        )
    )
    return replace(draft, ramp_sets=trained.status).with_events(*trained.events), trained.order


def _tuned_in_vain(seen: Seen, draft: Draft) -> str:
    """How the tuning on records of the set on trial ended, if it ended without a plan."""
    tuning, key = draft.tuning, draft.ramp_sets.candidate[-12:]
    mine = bool(key) and tuning.tuned_for.endswith(f"/{key}") and seen.snapshot.tuning_outcome is None
    return (tuning.message or "no plan was found") if mine and tuning.state == "Idle" else ""


def _with_its_intent(seen: Seen, draft: Draft, new: NewRollout | None) -> Draft:
    """A new attempt says from the beginning what it is for: an edit before its first pass must be noticed."""
    if new is None:
        return draft
    return draft.with_rollout_status(new.name, RolloutStatus(objective=intent_key(seen.service), started_at=seen.now))


def _busy(seen: Seen, draft: Draft, status: ServiceStatus, *, tuning: str) -> bool:
    """Whether something is under way that the next pass should see soon."""
    return (
        (draft.rollout is not None and not awaits_approval(draft.rollout, seen.service))
        or tuning in ("Tuning", "CollectingLabels")
        or draft.ramp_sets.state == "Training"
        or status.phase != "Ready"
        or status.update.strategy != ""
        or _numbers(status) != _numbers(seen.service.status)  # workers come to what a pass before decided
    )


def _numbers(status: ServiceStatus) -> list[int]:
    """Of workers that pools are asked for."""
    return [pool.desired for pool in status.pools]


# --- versions and updates --------------------------------------------------------------------------


def _version(snapshot: Snapshot, now: float) -> Version:
    main, trial = ([w for w in snapshot.workers if w.endpoint.trial == asked] for asked in (False, True))
    return next_version(
        VersionView(
            service=snapshot.service,
            main=tuple(main),
            trial=tuple(trial),
            desired=snapshot.gathered.desired,
            scaled=snapshot.gathered.scaling is not None,
            utilisation=snapshot.observed.load.utilisation,
            now=now,
            watched_since=snapshot.watched_since,
        )
    )


def _update(snapshot: Snapshot, now: float) -> Update:
    service = snapshot.service
    before, version = service.status.update, service.status.version
    if version.phase == "Promoting" and version.strategy == "Replace":  # there was no room for one more before
        before = replace(before, strategy="Replace")
    workers, desired = _to_update(snapshot)
    view = UpdateView(
        before=before,
        policy=service.spec.update_policy,
        workers=workers,
        desired=desired,
        utilisation=snapshot.observed.load.utilisation,
        now=now,
        watched_since=snapshot.watched_since,
        asked=snapshot.gathered.template,
    )
    return recreated(view) if recreates(view) else next_update(view)


def _to_update(snapshot: Snapshot) -> tuple[tuple[Worker, ...], int]:
    """The workers that are replaced now, and how many are wanted: those of the core, and then those at the edge.
    Neither stand in for the others."""
    spec, desired = snapshot.service.spec, snapshot.gathered.desired
    if spec.edge is None:
        return snapshot.workers, desired
    core, edges = (tuple(w for w in snapshot.workers if w.endpoint.at_edge is at_edge) for at_edge in (False, True))
    if any(not w.endpoint.current and not w.endpoint.ending for w in core):
        return core, desired - spec.edge_replicas
    return edges, spec.edge_replicas


def _update_events(service: Service, update: Update) -> tuple[Event, ...]:
    """One when an update is held, one when it goes on in place, and those of an interruption: its beginning and its
    end."""
    reported = next((c.reason for c in service.status.conditions if c.type == ConditionType.WORKERS_UPDATING), "")
    if update.held and reported != update.reason:
        failed = update.reason == Reason.RECREATE_FAILED
        reason = Reason.RECREATE_FAILED if failed else Reason.NO_ROOM_TO_SURGE
        return (Event(reason, update.message, warning=True),)
    if update.reason == Reason.NEW_WORKERS_FAIL and reported != update.reason:
        return (Event(Reason.NEW_WORKERS_FAIL, update.message, warning=True),)
    if update.reason == Reason.RECREATING and reported != update.reason:
        return (Event(Reason.RECREATING, update.message, warning=True),)
    if reported == Reason.RECREATING and update.status.silent_seconds and not update.reason:
        return (Event(Reason.RECREATED, interruption(update.status)),)
    if update.reason == Reason.REPLACING and reported not in ("", update.reason):
        return (Event(Reason.REPLACING_IN_PLACE, f"no room for one worker more; {update.message}"),)
    return ()
