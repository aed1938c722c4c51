"""One pass of the control loop: a pure function of a snapshot and a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Literal

import numpy as np

from offramp_core.certify import dependence
from offramp_core.control.audit import DENSE, clustering, eager_rate, followed_rate, quiet_rate, worth_one
from offramp_core.control.capacity import SUSPICIOUS, Capacity, CapacityView, next_capacity, worker_rate
from offramp_core.control.conditions import Facts, conditions, observe, workers_status
from offramp_core.control.delivery import proven_models
from offramp_core.control.document import differs, plan_document, switched_off
from offramp_core.control.holdback import look, loss
from offramp_core.control.ledger import BootReport, fold
from offramp_core.control.objects import (
    Condition,
    Config,
    ConfigStatus,
    Ledger,
    Measured,
    PinStatus,
    RampSetStatus,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    Service,
    ServiceStatus,
    TuningStatus,
    ring,
)
from offramp_core.control.recreate import interruption, recreated, recreates
from offramp_core.control.rest import Rest, at_rest
from offramp_core.control.rollout import (
    CANARY_SERVES,
    RolloutView,
    acceptance_level,
    advance,
    awaits_approval,
    forbidden,
    has_earned_acceptance,
    intent_key,
    is_certified,
    withdrawn,
)
from offramp_core.control.served import Served, served_by, votes
from offramp_core.control.snapshot import (
    Decision,
    Event,
    NewConfig,
    NewRollout,
    RecordStore,
    Snapshot,
    TrainingOrder,
    Worker,
)
from offramp_core.control.spec import Step
from offramp_core.control.training import TrainingView, after_rollout, bundle_identity, train_or_wait, working_set
from offramp_core.control.trust import foreign, last_epoch, live_boots, not_pooled, quarantined, strangers
from offramp_core.control.tuner import (
    CERTIFICATES_KEPT,
    PinJudged,
    Tuned,
    TunerView,
    after_alarm,
    after_rollback,
    judge_pin,
    pinned_plan,
    tune_or_wait,
)  # fmt: skip
from offramp_core.control.update import Update, UpdateView, next_update
from offramp_core.control.versions import Version, VersionView, next_version, serving_source
from offramp_core.control.watch import Watch, watched
from offramp_core.evaluate import evaluate_plan
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.evidence.slow import BatchShape, by_shape
from offramp_core.plan import Plan, exits_off_plan
from offramp_core.protocol import ArmCounts, Observations, PlanDocument, Withdrawn
from offramp_core.reasons import ConditionType, MaybeReason, Reason
from offramp_core.sketch import SecondsSketch
from offramp_core.tuning import OVERHEAD_SLACK, TuningRequest

BUSY_REQUEUE_SECONDS = 1.0
QUIET_REQUEUE_SECONDS = 10.0
IDLE_CONFIGS_KEPT = 10
CANARY_LEASE_SECONDS = 60.0
COOLDOWN_DOUBLINGS = 6
CLUSTERING_RECORDS = 5000  # newest ones, that tell how much requests resemble each other beside a pin
MAX_HELD_SETS = 2  # that a worker holds


def decide(snapshot: Snapshot, now: float) -> Decision:
    """What to do about one service.

    Steady state is a fixed point: deciding again on the same facts changes nothing.
    """
    # Whatever workers of a model on trial do is about that model: plans are decided for the others.
    trial = _Trial(_version(snapshot, now), tuple(w for w in snapshot.workers if w.trial))
    snapshot = replace(snapshot, workers=tuple(w for w in snapshot.workers if not w.trial))
    under_way = any(not r.status.finished and r.status.phase != "Pending" for r in snapshot.rollouts)
    served = served_by(snapshot.workers, snapshot.published, rollout_under_way=under_way)
    if served is None or snapshot.desired == 0:
        return _without_workers(snapshot, trial, now)
    return _Pass(snapshot, served, trial, now).decision()


@dataclass(frozen=True, slots=True)
class _Trial:
    """What was decided about a version on trial, and its workers."""

    version: Version
    workers: tuple[Worker, ...]


def _version(snapshot: Snapshot, now: float) -> Version:
    main, trial = ([w for w in snapshot.workers if w.trial == asked] for asked in (False, True))
    return next_version(
        VersionView(
            service=snapshot.service,
            main=tuple(main),
            trial=tuple(trial),
            desired=snapshot.desired,
            scaled=snapshot.scaling is not None,
            utilisation=snapshot.load.utilisation,
            now=now,
            watched_since=snapshot.watched_since,
        )
    )


def _update(snapshot: Snapshot, now: float) -> Update:
    service = snapshot.service
    before, version = service.status.update, service.status.version
    if version.phase == "Promoting" and version.strategy == "Replace":  # there was no room for one more before
        before = replace(before, strategy="Replace")
    view = UpdateView(
        before=before,
        policy=service.spec.update_policy,
        workers=snapshot.workers,
        desired=snapshot.desired,
        utilisation=snapshot.load.utilisation,
        now=now,
        watched_since=snapshot.watched_since,
        asked=snapshot.template,
    )
    return recreated(view) if recreates(view) else next_update(view)


def _update_events(service: Service, update: Update) -> tuple[Event, ...]:
    """One when an update is held, one when it goes on in place, and those of an interruption: its beginning and its end."""
    told = next((c.reason for c in service.status.conditions if c.type == ConditionType.WORKERS_UPDATING), "")
    if update.held and told != update.reason:
        failed = update.reason == Reason.RECREATE_FAILED
        reason = Reason.RECREATE_FAILED if failed else Reason.NO_ROOM_TO_SURGE
        return (Event(reason, update.message, warning=True),)
    if update.reason == Reason.NEW_WORKERS_FAIL and told != update.reason:
        return (Event(Reason.NEW_WORKERS_FAIL, update.message, warning=True),)
    if update.reason == Reason.RECREATING and told != update.reason:
        return (Event(Reason.RECREATING, update.message, warning=True),)
    if told == Reason.RECREATING and update.status.silent_seconds and not update.reason:
        return (Event(Reason.RECREATED, interruption(update.status)),)
    if update.reason == Reason.REPLACING and told not in ("", update.reason):
        return (Event(Reason.REPLACING_IN_PLACE, f"no room for one worker more; {update.message}"),)
    return ()


def _without_workers(snapshot: Snapshot, trial: _Trial, now: float) -> Decision:
    """Nothing can be decided about plans; say what is known and keep everything as it is. At zero, see to what the next workers will start under."""
    service = snapshot.service
    rest = Rest(service.status, snapshot.configs.get(service.status.stable_config))
    if snapshot.desired == 0:
        rest = at_rest(snapshot, now, canary_lease_seconds=CANARY_LEASE_SECONDS)
    acked = sum(
        w.ready and w.state is not None and snapshot.published is not None and w.state.epoch == snapshot.published.epoch
        for w in snapshot.workers
    )
    update = _update(snapshot, now)
    facts = Facts(
        service,
        (*snapshot.workers, *trial.workers),
        acked,
        rest.stable,
        (),
        service.status.pin,
        None,
        now,
        update=update,
        scaling=snapshot.scaling,
        capacity=_capacity(snapshot, now),
        version=trial.version,
        route=snapshot.route,
        turn=snapshot.turn,
    )
    # Scaled to zero there is nobody to wait for: without this the generation would be reconciling for ever.
    settled = service.generation if not facts.desired and facts.settled else service.status.settled_generation
    status = replace(
        rest.status,
        observed_generation=service.generation,
        settled_generation=settled,
        workers=workers_status(facts),
        update=update.status,
        version=trial.version.status,
        capacity=facts.capacity.status,
        conditions=conditions(facts, settled_generation=settled, observed=(SecondsSketch(), 0, 0)),
    )
    return Decision(
        status=_summarise(status),
        new_configs=rest.new_configs,
        config_statuses=_news(rest.config_statuses, snapshot.configs),
        rollout_statuses=rest.rollout_statuses,
        publish=rest.publish,
        events=(*_update_events(service, update), *trial.version.events, *rest.events, *_wakes_up(facts)),
        requeue_after_seconds=BUSY_REQUEUE_SECONDS if facts.desired else QUIET_REQUEUE_SECONDS,
        watch=snapshot.watch,
    )


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


def _capacity(
    snapshot: Snapshot, now: float, *, worker_rate: float = 0.0, exits_on: bool = False, at_risk: bool = False
) -> Capacity:
    """What is known of the capacity with exits off; nothing new without workers that have told of themselves."""
    service = snapshot.service
    was = next((c.status for c in service.status.conditions if c.type == ConditionType.NO_EXIT_CAPACITY), "")
    return next_capacity(
        CapacityView(
            before=service.status.capacity,
            worker_rate=worker_rate,
            peak_rate=snapshot.load.peak_rate,
            ready=sum(w.ready for w in snapshot.workers),
            exits_on=exits_on,
            at_risk=at_risk,
            now=now,
            watched_since=snapshot.watched_since,
            autoscaling=service.spec.autoscaling,
            scaling=snapshot.scaling,
            was_short=was == "False",
        )
    )


class _Pass:
    """The steps of one pass over a service whose workers are known. Holds no state beyond the pass."""

    def __init__(self, snapshot: Snapshot, served: Served, trial: _Trial, now: float) -> None:
        leading = (served.backbone_digest, served.ramp_set_digest)
        others = strangers(snapshot.workers, leading)
        self.trial, self.version = trial.workers, trial.version
        self.everybody = (*snapshot.workers, *trial.workers)
        # Whatever a worker of another model says is about other answers: nothing of it is looked at.
        members = tuple(w for w in snapshot.workers if w.name not in others)
        self.ramp_sets = self._sets_of(snapshot.service, leading)
        self.ramp_set = working_set(self.ramp_sets, served.ramp_set_digest)
        self.stores = _stores(snapshot, served.backbone_digest)
        self.snapshot = replace(snapshot, workers=members, records=self.stores.get(self.ramp_set))
        self.served, self.now = served, now
        ready = votes(snapshot.workers)
        self.outvoted = max(ready.values()) > ready[leading]
        self.foreign = foreign(snapshot.workers, others)
        self.service, self.spec = snapshot.service, snapshot.service.spec
        self.events: list[Event] = []
        self.config_statuses: dict[str, ConfigStatus] = {}
        self.rollout_statuses: dict[str, RolloutStatus] = {}
        self.new_configs: list[NewConfig] = []
        self.quarantined = quarantined(self.snapshot)
        self.counts = tuple(c for o in self._trusted() for c in o.counts)
        self.update = _update(snapshot, now)
        self.events += [*_update_events(self.service, self.update), *self.version.events]
        self.fell: tuple[MaybeReason, str] = ("", "")  # why the stable plan was switched off in this pass
        # where that follows from evidence, which may be gone with the next pass
        self.withdrawn: tuple[Withdrawn, ...] = ()
        self.measured = Measured()
        self.watch = Watch()
        self.configs: dict[str, Config] = dict(snapshot.configs)
        self.tuning = self.service.status.tuning
        self.clustering: float | None = None  # where this pass has measured it

    def decision(self) -> Decision:
        baseline = self._ensure_baseline()
        stable = self._stable(baseline)
        rollout, stable = self._advance_rollout(stable)
        self._tell_of_stopped_slices(stable)
        self._notice_ramps_that_do_not_pay(stable, rollout)
        order = self._train(rollout)
        tuned, pin = self._look_for_a_plan(stable, rollout)
        if tuned.withdraw:
            rollout = None
        if tuned.stable_over_budget or tuned.stable_not_allowed:
            tuned = self._switch_off(tuned, stable, baseline)
            stable = baseline
        self.tuning = self._audit(tuned.status, rollout, stable)
        self._mark_records(stable)
        document = self._document(stable, rollout)
        changed = differs(document, self.snapshot.published)
        status = self._status(stable, rollout, tuned, pin, document_changed=changed)
        delete_configs, delete_rollouts = self._history(status, rollout)
        new_rollout = tuned.new_rollout or pin.new_rollout
        if new_rollout is not None:  # an edit before its first pass must be noticed
            self.rollout_statuses[new_rollout.name] = RolloutStatus(
                objective=intent_key(self.service), started_at=self.now
            )
        busy = (
            (rollout is not None and not awaits_approval(rollout, self.service))
            or changed
            or tuned.status.state in ("Tuning", "CollectingLabels")
            or self.ramp_sets.state == "Training"
            or status.phase != "Ready"
            or status.update.strategy != ""
        )
        return Decision(
            status=status,
            new_configs=tuple(self.new_configs),
            config_statuses=self._changed_configs(stable, rollout),
            new_rollout=new_rollout,
            rollout_statuses=self.rollout_statuses,
            delete_configs=delete_configs,
            delete_rollouts=delete_rollouts,
            publish=document if changed else None,
            tune=tuned.request,
            train=order,
            events=tuple(self.events),
            requeue_after_seconds=BUSY_REQUEUE_SECONDS if busy or new_rollout is not None else QUIET_REQUEUE_SECONDS,
            watch=self.watch,
        )

    def _mark_records(self, stable: Config) -> None:
        """A test has used records, or the inputs have changed: which records these were must be known for good."""
        before = self.service.status.tuning
        if self.tuning.consumed_through_at != before.consumed_through_at:
            self.tuning = replace(self.tuning, used=self._marks(before.used))
        if self.tuning.records_since_at != before.records_since_at:
            self.tuning = replace(self.tuning, stale=self._marks(before.stale))
            self.measured = self.measured.after_change(stable.plan)

    def _marks(self, known: Mapping[str, int]) -> dict[str, int]:
        """Where the rings of processes whose clocks run ahead stand now, and stood when those that are silent now were last heard."""
        boots = {key: key.partition("/")[0] for key in known}
        live = live_boots(self.snapshot.workers, boots.values())
        now = {
            ring(boot, store.ramp_set_digest): seq
            for store in self.stores.values()
            for boot, seq in store.ahead.items()
        }
        return {**{key: seq for key, seq in known.items() if boots[key] in live}, **now}

    # --- ramp sets -----------------------------------------------------------------------------------

    @staticmethod
    def _sets_of(service: Service, bundle: tuple[str, str]) -> RampSetStatus:
        """What is known of sets besides the bundle's own; those of another bundle are none of this one's."""
        known = service.status.ramp_sets
        return known if known.bundle in ("", bundle_identity(*bundle)) else RampSetStatus()

    def _train(self, rollout: Rollout | None) -> TrainingOrder | None:
        published = self.snapshot.published
        trained = train_or_wait(
            TrainingView(
                service=self.service,
                status=self.ramp_sets,
                bundle=(self.served.backbone_digest, self.served.ramp_set_digest),
                workers=self.snapshot.workers,
                rollout=rollout,
                configs=self.configs.values(),
                concluded=self._concluded(),
                inputs_since=self.tuning.records_since_at,
                published_epoch=published.epoch if published is not None else 0,
                report=self.snapshot.training,
                able=self.snapshot.can_train,
                now=self.now,
            )
        )
        self._use_sets(trained.status)
        self.events += trained.events
        return trained.order

    def _use_sets(self, sets: RampSetStatus) -> None:
        """From now on plans are looked for in what these sets say."""
        self.ramp_sets = sets
        self.ramp_set = working_set(self.ramp_sets, self.served.ramp_set_digest)
        self.snapshot = replace(self.snapshot, records=self.stores.get(self.ramp_set))

    def _concluded(self) -> str:
        """How the tuning on records of the set on trial ended, if it ended without a plan."""
        tuning, key = self.tuning, self.ramp_sets.candidate[-12:]
        mine = bool(key) and tuning.tuned_for.endswith(f"/{key}") and self.snapshot.tuning_outcome is None
        return (tuning.message or "no plan was found") if mine and tuning.state == "Idle" else ""

    def _named_sets(self, stable: Config, rollout: Rollout | None) -> tuple[str, ...]:
        """What workers hold besides the sets of their arms: at most two in all, the one on trial first."""
        sets, own = self.ramp_sets, self.served.ramp_set_digest
        if not sets.current and not sets.candidate:
            return ()
        canary = self.configs[rollout.to_config] if rollout is not None else None
        arms = [c.plan.ramp_set_digest for c in (stable, canary) if c is not None and not c.plan.exits_off]
        tuned = (sets.candidate, sets.current or own) if self.spec.mode in ("Auto", "Recommend") else ()
        wanted = dict.fromkeys([*arms, *filter(None, tuned)])
        return tuple(sorted(list(wanted)[:MAX_HELD_SETS]))

    def _saving_to_beat(self, stable: Config) -> float:
        """What the stable plan saves on the requests that the set on trial was scored on as well."""
        store, tried = self.stores.get(stable.plan.ramp_set_digest), self.snapshot.records
        if store is None or tried is None or stable.plan.ramp_set_digest == tried.ramp_set_digest:
            return 0.0
        if store.records.time is None or tried.records.time is None or not len(tried.records):
            return 0.0
        rows = store.records.time >= tried.records.time[0]
        if not rows.any():
            return 0.0
        seen = evaluate_plan(store.records.take(rows.nonzero()[0]), stable.plan, store.ramp_ids)
        return seen.saving if seen.disagreement <= self.spec.max_disagreement else 0.0

    # --- which plan is stable ----------------------------------------------------------------------

    def _ensure_baseline(self) -> Config:
        plan = exits_off_plan(backbone_digest=self.served.backbone_digest, ramp_set_digest=self.served.ramp_set_digest)
        name = plan.name(self.service.name)
        if name not in self.configs:
            new = NewConfig(name, plan, ConfigStatus("Baseline", "Certified", message="exits off"))
            self.new_configs.append(new)
            self.configs[name] = Config(name, plan, new.status, self.now)
        return self.configs[name]

    def _stable(self, baseline: Config) -> Config:
        """The stable plan, or exits off where it does not apply any more: the first rule that has something to say decides."""
        stable = self.configs.get(self.service.status.stable_config, baseline)
        self.measured, self.watch = self._measure(stable), self._watch(stable)
        if self.outvoted:
            self.fell = (Reason.MODEL_CHANGED, "most workers serve another model or ramp set now")
        return baseline if any(falls(self, stable) for falls in _REASONS_TO_FALL) else stable

    # --- rules: why the stable plan falls; each says whether it does, and in ``fell`` why ---

    def _another_model_is_served(self, stable: Config) -> bool:
        if self._fits(stable):
            return False
        self.tuning = replace(self.tuning, tuned_for="", next_attempt_at=None)
        self.fell = (Reason.MODEL_CHANGED, "the workers serve another model or ramp set now")
        return True

    def _its_ramp_set_is_gone(self, stable: Config) -> bool:
        """No worker can load the set that the plan needs: all of them serve without exits already.

        Workers without a store call every set but the bundle's own a mismatch.
        """
        published = self.snapshot.published
        foreign = stable.plan.ramp_set_digest != self.served.ramp_set_digest
        reasons = (Reason.RAMP_SET_NOT_HELD, Reason.DIGEST_MISMATCH) if foreign else (Reason.RAMP_SET_NOT_HELD,)
        refused = [
            w.state is not None
            and w.state.refused is not None
            and (w.state.refused.epoch, w.state.refused.reason)
            in [(published.epoch if published else 0, reason) for reason in reasons]
            for w in self.snapshot.workers
            if w.ready
        ]
        if stable.plan.exits_off or self.ramp_sets.candidate or not refused or not all(refused):
            return False
        message = (
            f"{stable.name} needs {stable.plan.ramp_set_digest[:19]}, which no worker can load from the ramp-set store"
        )
        self.events.append(Event(Reason.RAMP_SET_GONE, f"{message}; exits are off", warning=True))
        self._use_sets(replace(self.ramp_sets, current=""))
        self.tuning = replace(self.tuning, tuned_for="", next_attempt_at=None, labels_needed=0)
        self.fell = (Reason.MODEL_CHANGED, message)
        return True

    def _it_was_switched_off_already(self, stable: Config) -> bool:
        """By a pass that could not store why: the workers run without it, so nothing of what spoke against it need be seen again."""
        told = switched_off(stable, self.snapshot.published)
        if told is None:
            return False
        if told.reason == Reason.EXITS_COST_TIME:
            self._fell_by_cost(stable, told.message)
        else:
            self._fell_by_drift(stable, told.message)
        return True

    def _no_longer_allowed(self, stable: Config) -> bool:
        why = "" if stable.plan.exits_off else forbidden(stable, self.service)
        if not why:
            return False
        self.events.append(Event(Reason.EXITS_OFF, why))
        self.tuning = replace(self.tuning, tuned_for="", next_attempt_at=None)
        self.fell = (Reason.NEWER_INTENT, why)
        return True

    def _a_detector_alarms(self, stable: Config) -> bool:
        alarmed = [] if stable.plan.exits_off else self._alarmed(stable.plan)
        if not alarmed:
            return False
        self._fell_by_drift(stable, self._over_budget(stable, f"the detector of {', '.join(alarmed)} says"))
        return True

    def _the_fleet_is_over_budget(self, stable: Config) -> bool:
        """What all workers' audits say together, which may be long before any worker's own detector does."""
        if stable.plan.exits_off or not self.watch.alarms:
            return False
        lost = f", {self.watch.lost} of which were never reported," if self.watch.lost else ""
        self._fell_by_drift(stable, self._over_budget(stable, f"the audits of all workers together{lost} say"))
        return True

    def _over_budget(self, stable: Config, who_says: str) -> str:
        return f"{stable.name}: {who_says} that the budget of {self.spec.max_disagreement:.2%} is broken; exits are off"

    def _fell_by_drift(self, stable: Config, message: str) -> None:
        self._drifted(stable, message)
        self.tuning = after_alarm(self.tuning, now=self.now)
        self.fell = (Reason.DRIFT_DETECTED, message)

    def _it_costs_time(self, stable: Config) -> bool:
        """The holdback shows that exits cost more than they save. A pin stays all the same, as it is the user's; a condition says so."""
        why = "" if stable.plan.exits_off else loss(self.measured, max_overhead=self.spec.max_overhead)
        if not why or self.spec.mode not in ("Auto", "Recommend"):
            return False
        self._fell_by_cost(stable, f"{stable.name}: compared with the batches held back from it, {why}")
        return True

    def _fell_by_cost(self, stable: Config, message: str) -> None:
        self.events.append(Event(Reason.EXITS_COST_TIME, f"{message}; exits are off", warning=True))
        self._reject(stable, message)
        self.tuning = after_rollback(
            self.tuning, reason=Reason.EXITS_COST_TIME, cooldown=self.spec.rollout.cooldown_seconds, now=self.now
        )
        self.fell = (Reason.EXITS_COST_TIME, message)
        self.withdrawn = (Withdrawn(stable.name, *self.fell),)

    def _measure(self, stable: Config) -> Measured:
        """What the stable plan saves, by comparison with the batches that are held back from it."""
        if stable.plan.exits_off or not self._fits(stable):
            return Measured(stops=self.service.status.measured.all_stops)
        before, trusted = self.service.status.measured, self._trusted()
        ids, costs = self.served.chain(stable.plan.precision)
        return look(
            before,
            ((o.boot_id, counts) for o in trusted for counts in o.plans),
            plan=stable.plan,
            share=self.spec.holdback,
            live_boots=live_boots(self.snapshot.workers, before.live),
            ramp_ids=ids,
            costs=costs,
            alpha=1 - self.spec.rollout.confidence,
            now=self.now,
            slices=self.spec.slices,
            slice_alpha=1 - self.spec.confidence,
            design_effect=worth_one(self.tuning, rate=self.tuning.audit_rate),
        )

    def _watch(self, stable: Config) -> Watch:
        reporting = (w.observations for w in self.snapshot.workers)
        return watched(
            self.snapshot.watch,
            self._trusted(),
            boots=frozenset(o.boot_id for o in reporting if o is not None),
            plan=stable.plan,
            budget=self.spec.max_disagreement,
            now=self.now,
            design_effect=worth_one(self.tuning, rate=self.tuning.audit_rate),
        )

    def _tell_of_stopped_slices(self, stable: Config) -> None:
        before = {s.name for s in self.service.status.measured.slices if s.stopped}
        for use in self._measured_of(stable).slices:
            if use.stopped and use.name not in before:
                told = f"{stable.name}: {use.disagreements} of {use.audited} audits of slice {use.name} disagreed; its budget is {use.budget:.2%}, so {use.consequence} under this plan"
                self.events.append(Event(Reason.SLICE_STOPPED, told, warning=True))

    def _trusted(self) -> tuple[Observations, ...]:
        return tuple(
            w.observations
            for w in self.snapshot.workers
            if w.observations is not None and w.name not in self.quarantined
        )

    def _fits(self, config: Config) -> bool:
        plan, sets, pin = config.plan, self.ramp_sets, self.spec.pin
        pinned = pin.ramp_set_digest if pin is not None else None
        known = (self.served.ramp_set_digest, sets.current, sets.candidate, pinned)
        return plan.backbone_digest == self.served.backbone_digest and plan.ramp_set_digest in known

    def _drifted(self, stable: Config, message: str) -> None:
        """The inputs changed under the stable plan: it is rejected, and what was rejected on the old inputs may be tried again."""
        self.withdrawn = (Withdrawn(stable.name, Reason.DRIFT_DETECTED, message),)
        self.events.append(Event(Reason.DRIFT_DETECTED, message, warning=True))
        for config in self.configs.values():
            status = self.config_statuses.get(config.name, config.status)
            if config.name != stable.name and (status.rejections or status.rejected_until_at is not None):
                told = "the inputs changed since it was rejected"
                self._write(
                    config, replace(status, state="Superseded", rejections=0, rejected_until_at=None, message=told)
                )
        self._reject(stable, message)

    def _write(self, config: Config, status: ConfigStatus) -> None:
        self.config_statuses[config.name] = status
        self.configs[config.name] = replace(config, status=status)

    def _switch_off(self, tuned: Tuned, stable: Config, baseline: Config) -> Tuned:
        """The records say what the detector has not said yet. A plan that follows is then compared with the model itself, not with a plan
        that is fast because it disagrees."""
        if tuned.stable_over_budget:
            self._drifted(stable, tuned.stable_over_budget)
        else:
            self.events.append(Event(Reason.EXITS_OFF, tuned.stable_not_allowed))
        if tuned.new_rollout is None:
            return tuned
        return replace(tuned, new_rollout=replace(tuned.new_rollout, from_config=baseline.name))

    def _alarmed(self, plan: Plan) -> list[str]:
        published = self.snapshot.published
        if published is None or published.stable.plan != plan.to_mapping():
            return []
        states = ((w.name, w.state) for w in self.snapshot.workers if w.state is not None)
        return [name for name, state in states if state.breaker_open and state.stable_hash == plan.content_hash]

    def _reject(self, config: Config, message: str) -> None:
        """Let a plan cool down, longer after each failure. One failure counts once, also when a pass was cut short and is made again."""
        status = self.configs[config.name].status
        if status.state == "Rejected" and status.message == message and (status.rejected_until_at or 0.0) > self.now:
            return
        rejections = status.rejections + 1
        cooldown = self.spec.rollout.cooldown_seconds * 2 ** min(rejections - 1, COOLDOWN_DOUBLINGS)
        rejected = replace(
            status, state="Rejected", rejections=rejections, rejected_until_at=self.now + cooldown, message=message
        )
        self._write(config, rejected)

    # --- the rollout -------------------------------------------------------------------------------

    def _advance_rollout(self, stable: Config) -> tuple[Rollout | None, Config]:
        unfinished = sorted((r for r in self.snapshot.rollouts if not r.status.finished), key=lambda r: r.number)
        for extra in unfinished[1:]:
            done = replace(
                extra.status,
                phase="Superseded",
                verdict="Superseded",
                reason=Reason.ANOTHER_IS_ACTIVE,
                finished_at=self.now,
            )
            self.rollout_statuses[extra.name] = done
        if not unfinished:
            return None, stable
        rollout = unfinished[0]
        if rollout.to_config not in self.configs:
            self.rollout_statuses[rollout.name] = replace(
                rollout.status,
                phase="Aborted",
                verdict="Aborted",
                reason=Reason.CONFIG_GONE,
                message=f"{rollout.to_config} does not exist",
                finished_at=self.now,
            )
            return None, stable
        change = advance(self._rollout_view(rollout, stable))
        if change.event is not None:
            self.events.append(replace(change.event, rollout=rollout.name))
        if change.status != rollout.status:
            self.rollout_statuses[rollout.name] = change.status
        tests = max(self.tuning.tests_run, change.status.acceptance_test)
        known = self.tuning.clustering if self.clustering is None else self.clustering
        self.tuning = replace(self.tuning, tests_run=tests, clustering=known)
        rollout = replace(rollout, status=change.status)
        if change.status.phase == "Promoting":
            self._accept(rollout)
            stable = self.configs[rollout.to_config]
        elif change.status.phase == "RollingBack" and stable.name == rollout.to_config:
            stable = self._rollback_target(rollout.from_config)
        if change.status.finished:
            self._learn_from(rollout)
            return None, stable
        return rollout, stable

    def _accept(self, rollout: Rollout) -> None:
        """An uncertified plan that is promoted has earned it; that is written down before it serves as stable.

        It is a proof for the objective that the canary was judged by, and for no other: the test of the gate ``acceptance``, one of those
        that share the service's allowance.
        """
        config = self.configs[rollout.to_config]
        if is_certified(config, self.service) or not has_earned_acceptance(rollout.status, self.service):
            return
        n, k = rollout.status.audited
        earned = {
            "method": "canary-acceptance", "budget": repr(self.spec.max_disagreement), "delta": repr(1 - self.spec.confidence),
            "testIndex": rollout.status.acceptance_test, "level": repr(acceptance_level(rollout.status, self.service)),
            "n": n, "k": k, "recordsThrough": repr(self.now),
        }  # fmt: skip
        certificates = (*config.status.certificates, earned)[-CERTIFICATES_KEPT:]
        self._write(config, replace(config.status, certificates=certificates))

    def _rollback_target(self, name: str) -> Config:
        """What serves after a promotion was taken back: what served before, where that may serve, else exits off."""
        before = self.configs.get(name)
        if before is not None and self._fits(before) and (before.plan.exits_off or not forbidden(before, self.service)):
            return before
        return self._ensure_baseline()

    def _rollout_view(self, rollout: Rollout, stable: Config) -> RolloutView:
        published = self.snapshot.published
        serving = self.configs[rollout.to_config] if rollout.status.phase == "Promoting" else stable
        carried = published is not None and _same_plans(published, self._document(serving, rollout))
        epoch = published.epoch if published is not None and carried else None
        ledger = (
            rollout.status.ledger
        )  # kept while the epoch is unknown: a late read must not lose what vanished workers had counted
        if rollout.status.phase in CANARY_SERVES and epoch is not None:
            ledger = self._fold(rollout, epoch, serving)
        return RolloutView(
            rollout=rollout,
            service=self.service,
            configs=self.configs,
            workers=tuple(w for w in self.snapshot.workers if w.ready),
            epoch=epoch,
            ledger=ledger,
            execution=partial(_execution, self.counts, stable.plan.content_hash),
            clustering=self._measured_clustering,
            load=self.snapshot.load,
            stable_config=stable.name,
            now=self.now,
            fell=self.fell,
            returns_to=self._promoted_lately(self.configs[rollout.to_config]),
            inputs_since=self.tuning.records_since_at,
            watched_since=self.snapshot.watched_since,
            fallen=tuple(w for w in self.snapshot.workers if not w.ready),
            next_test=self._next_test(),
            withdrawn=next((note for note in published.withdrawn if note.rollout == rollout.name), None)
            if published
            else None,
        )

    def _measured_clustering(self) -> float | None:
        """How much requests resemble each other, by the newest records; None where these cannot say."""
        store, known = self.snapshot.records, self.tuning.clustering
        if store is None:
            return known
        newest = store.records.take(slice(max(0, len(store.records) - CLUSTERING_RECORDS), None))
        for sample in (newest.dense(DENSE), newest.equal_weight()):
            records = newest.take(np.flatnonzero(sample))
            seen = dependence(records, budget=self.spec.max_disagreement)
            if seen is None:
                return None
            known = max(known, clustering(known, design_effect=seen.design_effect, sampled=records.sampled()))
        self.clustering = known
        return known

    def _next_test(self) -> int:
        """The number of a test that begins now; those of a tuning that has not been digested are taken."""
        pending = self.snapshot.tuning_running or self.snapshot.tuning_outcome is not None
        return self.tuning.tests_run + 1 + pending * len(self.spec.precisions)

    def _promoted_lately(self, config: Config) -> str:
        """The rollout within the rollback window that promoted a plan, if the plan is still proven for what is asked and what comes in."""
        window, since = self.spec.rollout.rollback_window, self.tuning.records_since_at
        promoted = sorted(
            (r for r in self.snapshot.rollouts if r.status.verdict == "Succeeded"), key=lambda r: r.number
        )
        mine = [r for r in promoted[len(promoted) - window if window else len(promoted):] if r.to_config == config.name]  # fmt: skip
        proven = is_certified(config, self.service, since=since) and config.status.rejections == 0
        if not mine or not proven or config.plan.exits_off or not self._may_return(config):
            return ""
        return mine[-1].name if (mine[-1].status.finished_at or 0.0) >= (since or 0.0) else ""

    def _may_return(self, config: Config) -> bool:
        """Whether the spec would let a plan be found anew: that includes the limits that a stable plan does not fall for."""
        plan, (ids, costs) = config.plan, self.served.chain(config.plan.precision)
        if (
            not self._fits(config)
            or plan.ramp_set_digest != self.ramp_set
            or forbidden(config, self.service)
            or not {r.id for r in plan.ramps} <= set(ids)
        ):
            return False
        overhead = costs.overhead([ids.index(ramp.id) for ramp in plan.ramps])
        within = overhead <= self.spec.max_overhead * (1 + OVERHEAD_SLACK) and len(plan.ramps) <= self.spec.max_active
        return within and plan.execution == self.spec.execution

    def _fold(self, rollout: Rollout, epoch: int, stable: Config) -> Ledger:
        reports = [
            BootReport(w.observations.boot_id, w.observations.counts)
            for w in self.snapshot.workers
            if w.observations is not None
        ]
        hashes = {"stable": stable.plan.content_hash, "canary": self.configs[rollout.to_config].plan.content_hash}
        gone_only_when_known = live_boots(self.snapshot.workers, rollout.status.ledger.live)
        distrusted = frozenset(
            w.observations.boot_id
            for w in self.snapshot.workers
            if w.observations is not None and w.name in self.quarantined
        )
        return fold(
            rollout.status.ledger, reports, epoch=epoch, live_boots=gone_only_when_known, plan_hashes=hashes, distrusted=distrusted,
        )  # fmt: skip

    def _learn_from(self, rollout: Rollout) -> None:
        """A verdict changes what is proposed next and when."""
        status, config = rollout.status, self.configs[rollout.to_config]
        sets = after_rollout(
            self.ramp_sets, ramp_set=config.plan.ramp_set_digest, verdict=status.verdict,
            cooldown=self.spec.rollout.cooldown_seconds, now=self.now,
        )  # fmt: skip
        self._use_sets(sets)
        if status.verdict == "Succeeded":
            self._write(config, replace(config.status, state="Stable", rejections=0, rejected_until_at=None))
            self.tuning = replace(self.tuning, failures=0)
            return
        drifted = (
            status.reason == "DriftDetected"
        )  # of the plan it was compared with, or of itself while promoted: then it is rejected already
        if (status.verdict == "RolledBack" and not drifted) or status.reason == "DecisionAbort":
            self._reject(config, status.message)
        if status.verdict in ("RolledBack", "Aborted"):
            self.tuning = after_rollback(
                self.tuning, reason=status.reason, cooldown=self.spec.rollout.cooldown_seconds, now=self.now
            )

    # --- looking for a plan ------------------------------------------------------------------------

    def _notice_ramps_that_do_not_pay(self, stable: Config, rollout: Rollout | None) -> None:
        """Have ramps placed anew, once for a plan: what audits recorded tells of all ramps, also of those that it does not use."""
        idle = [use.id for use in self.measured.ramps if not use.pays]
        tunes = self.spec.mode in ("Auto", "Recommend") and not self.spec.suspend and rollout is None
        if (
            not idle
            or not tunes
            or stable.plan.content_hash != self.measured.plan_hash
            or self.tuning.unpaying == stable.name
        ):
            return
        self.events.append(
            Event(
                Reason.RAMP_DOES_NOT_PAY,
                f"{stable.name}: {', '.join(idle)} costs more than it saves; looking for a better plan",
            )
        )
        self.tuning = replace(self.tuning, unpaying=stable.name, tuned_for="", next_attempt_at=None)

    def _look_for_a_plan(self, stable: Config, rollout: Rollout | None) -> tuple[Tuned, PinJudged]:
        held = rollout if rollout is not None and awaits_approval(rollout, self.service) else None
        view = TunerView(
            self._snapshot_now(),
            self.tuning,
            stable,
            None if held is not None else rollout,
            self.now,
            recommended=held,
            known=self._known_good(stable),
            ramp_set=self.ramp_set,
            saving_to_beat=self._saving_to_beat(stable),
        )
        tuned = tune_or_wait(view)
        if tuned.withdraw and held is not None:
            self.rollout_statuses[held.name] = withdrawn(held, tuned.withdraw, now=self.now)
        pin = self._judge_pin(stable, rollout)
        for new in (tuned.new_config, pin.new_config):
            if new is not None and new.name not in self.snapshot.configs:
                self.new_configs.append(new)
                self.configs[new.name] = Config(new.name, new.plan, new.status, self.now)
            elif new is not None:
                self._write(self.configs[new.name], new.status)
        self.events += [*tuned.events, *pin.events]
        return tuned, pin

    def _known_good(self, stable: Config) -> str:
        """A plan of the rollback window that could serve where exits are off: nothing new need be found and certified."""
        if not stable.plan.exits_off:
            return ""
        lately = sorted((r for r in self.snapshot.rollouts if r.status.verdict == "Succeeded"), key=lambda r: -r.number)
        names = (r.to_config for r in lately if r.to_config in self.configs)
        return next((name for name in names if self._promoted_lately(self.configs[name])), "")

    def _judge_pin(self, stable: Config, rollout: Rollout | None) -> PinJudged:
        plan = pinned_plan(
            self.snapshot,
            backbone_digest=self.served.backbone_digest,
            ramp_set_digest=self.served.ramp_set_digest,
            order=self.served.ramp_ids,
        )
        if plan is None:
            return PinJudged(PinStatus())
        now = self._snapshot_now()
        known = replace(now.service, status=replace(now.service.status, tuning=self.tuning))
        return judge_pin(replace(now, service=known), plan=plan, stable=stable, rollout=rollout)

    def _snapshot_now(self) -> Snapshot:
        """What was seen, with what this pass has decided so far: an attempt that ends in it has ended."""
        rollouts = tuple(replace(r, status=self.rollout_statuses.get(r.name, r.status)) for r in self.snapshot.rollouts)
        return replace(self.snapshot, configs=self.configs, rollouts=rollouts)

    def _audit(self, tuning: TuningStatus, rollout: Rollout | None, stable: Config) -> TuningStatus:
        """The audit rate of the stable arm. It moves when its class does, and a quiet one with load far changed: every change is a new epoch.

        While a rollout is under way it stays, because a canary's evidence is of one epoch.
        """
        wanted: Literal["Off", "Quiet", "Eager"] = "Quiet"
        if self.spec.mode == "Disabled" or (stable.plan.exits_off and self.spec.suspend):
            wanted = "Off"
        elif rollout is None and (tuning.state in ("CollectingLabels", "Tuning") or self._waits_for_captures(stable)):
            wanted = "Eager"
        if wanted == tuning.audit:
            follows = wanted == "Quiet" and rollout is None
            return (
                replace(tuning, audit_rate=followed_rate(tuning.audit_rate, self.snapshot.load)) if follows else tuning
            )
        rate = {"Off": 0.0, "Quiet": quiet_rate(self.snapshot.load), "Eager": eager_rate(self.snapshot.load)}[wanted]
        return replace(tuning, audit=wanted, audit_rate=rate, eager_since_at=self.now if wanted == "Eager" else None)

    def _waits_for_captures(self, stable: Config) -> bool:
        """Whether nothing leaves early and nothing will before ramps are trained: what audits draw is what there is to train on."""
        sets = self.ramp_sets
        due = sets.next_attempt_at is None or self.now >= sets.next_attempt_at
        return stable.plan.exits_off and sets.state == "Capturing" and due

    # --- what workers should run -------------------------------------------------------------------

    def _document(self, stable: Config, rollout: Rollout | None) -> PlanDocument:
        return plan_document(
            self.service,
            stable,
            epoch=1
            + last_epoch(
                self.everybody,
                self.quarantined,
                published=self.snapshot.published,
                rollouts=self.snapshot.rollouts,
            ),
            canary_lease_seconds=CANARY_LEASE_SECONDS,
            tuning=self.tuning,
            measured=self._measured_of(stable),
            rollout=rollout,
            canary=self.configs[rollout.to_config] if rollout is not None else None,
            ramp_sets=self._named_sets(stable, rollout),
            capture_since=self.ramp_sets.capture_since_at,
            withdrawn=(*self.withdrawn, *self._stopped(rollout)),
        )

    @staticmethod
    def _stopped(rollout: Rollout | None) -> tuple[Withdrawn, ...]:
        """The canary that is being rolled back."""
        if rollout is None or rollout.status.phase != "RollingBack":
            return ()
        status = rollout.status
        return (Withdrawn(rollout.to_config, status.reason, status.message, rollout.name, status.outcome),)

    # --- what people see ---------------------------------------------------------------------------

    def _status(
        self, stable: Config, rollout: Rollout | None, tuned: Tuned, pin: PinJudged, *, document_changed: bool
    ) -> ServiceStatus:
        before, published = self.service.status, self.snapshot.published
        ready = [w for w in self.everybody if w.ready]
        acked = sum(published is not None and w.state is not None and w.state.epoch == published.epoch for w in ready)
        distrusted = self._all_quarantined(rollout)
        facts = Facts(
            self.service,
            self.everybody,
            acked,
            stable,
            self.counts,
            pin.status,
            rollout,
            self.now,
            distrusted,
            frozenset(self.foreign),
            self._said_of_a_pin(stable),
            self.update,
            self.snapshot.scaling,
            ramp_sets=self.ramp_sets,
            version=self.version,
            route=self.snapshot.route,
            turn=self.snapshot.turn,
        )
        chain, audits = self.served.chain(stable.plan.precision), self._measured_of(stable).audits
        observed, latency, n, k = observe(facts, *chain, audits=audits)
        facts = replace(facts, capacity=self._capacity(stable, rollout, n=n, k=k))
        settled = before.settled_generation
        if facts.settled and not document_changed:
            settled = self.service.generation
        candidate = self._candidate(rollout, tuned)
        if candidate == stable.name:  # it is being promoted: what serves is no candidate any more
            candidate = ""
        status = replace(
            before,
            observed_generation=self.service.generation,
            settled_generation=settled,
            stable_config=stable.name,
            candidate_config=candidate,
            rollout=_rollout_summary(rollout, self.spec.rollout.steps),
            workers=workers_status(facts),
            update=self.update.status,
            version=self.version.status,
            capacity=facts.capacity.status,
            observed=observed if stable.name == before.stable_config else replace(observed, taken_at=None),
            measured=self._measured_of(stable),
            tuning=self.tuning,
            ramp_sets=self.ramp_sets,
            pin=pin.status,
            models=proven_models(before.models, self.spec, self._workers_of_the_spec()),
            conditions=conditions(facts, settled_generation=settled, observed=(latency, n, k)),
        )
        return _summarise(status)

    def _workers_of_the_spec(self) -> tuple[Worker, ...]:
        """Those that were made with the model that the spec asks for."""
        main = () if serving_source(self.service) is not None else (*self.snapshot.workers, *self.everybody)
        return (*main, *self.trial)

    def _capacity(self, stable: Config, rollout: Rollout | None, *, n: int, k: int) -> Capacity:
        """``k`` of ``n`` audits of the stable plan disagreed."""
        off = exits_off_plan(backbone_digest=self.served.backbone_digest, ramp_set_digest=self.served.ramp_set_digest)
        counts = (c for o in self._trusted() for c in (*o.counts, *o.held_back))
        rate = worker_rate(
            self.served.costs, counts, exits_off_hash=off.content_hash, latency_seconds=self.spec.latency_seconds
        )
        effect = worth_one(self.tuning, rate=self.tuning.audit_rate)
        evidence = log_e_value(k, n, p0=self.spec.max_disagreement, design_effect=effect)
        evidence /= log(1 / (1 - self.spec.confidence))
        suspicion = max((w.state.suspicion for w in self.everybody if w.ready and w.state is not None), default=0.0)
        under_way = rollout is not None and rollout.status.phase != "Pending" and not rollout.status.finished
        return _capacity(
            replace(self.snapshot, workers=self.everybody),
            self.now,
            worker_rate=rate,
            exits_on=not stable.plan.exits_off,
            at_risk=under_way or max(evidence, suspicion) >= SUSPICIOUS,
        )

    def _measured_of(self, stable: Config) -> Measured:
        """The figures of the plan that is stable now; it may have become so in this pass."""
        return self.measured.of(stable.plan)

    def _said_of_a_pin(self, stable: Config) -> str:
        """How a plan that the user insists on costs time, or empty."""
        why = loss(self._measured_of(stable), max_overhead=self.spec.max_overhead)
        return f"{stable.name}: compared with the batches held back from it, {why}" if why else ""

    def _candidate(self, rollout: Rollout | None, tuned: Tuned) -> str:
        """What may become stable: the canary, or a recommendation that waits for the user."""
        if tuned.new_rollout is not None:
            return tuned.new_rollout.to_config
        return rollout.to_config if rollout is not None and not tuned.withdraw else ""

    def _all_quarantined(self, rollout: Rollout | None) -> dict[str, str]:
        """Why workers are not pooled, by name: what they say now, or said earlier in this step."""
        found = not_pooled(self.snapshot.workers, {**self.foreign, **self.quarantined}, rollout)
        for name in sorted(set(found) - set(self.service.status.workers.quarantined)):
            self.events.append(
                Event(Reason.WORKER_QUARANTINED, f"{name}: {found[name]}; it is not pooled", warning=True)
            )
        return found

    def _changed_configs(self, stable: Config, rollout: Rollout | None) -> Mapping[str, ConfigStatus]:
        """Statuses that differ from what is stored, with the states of stable and canary kept true."""
        statuses = dict(self.config_statuses)
        for name, config in self.snapshot.configs.items():
            status = statuses.get(name, config.status)
            if name == stable.name and not config.plan.exits_off:
                status = replace(status, state="Stable")
            elif rollout is not None and name == rollout.to_config and rollout.status.phase != "Pending":
                status = replace(status, state="Canary")
            elif status.state in ("Stable", "Canary"):
                status = replace(status, state="Superseded")
            statuses[name] = status
        return {
            name: s
            for name, s in statuses.items()
            if name not in self.snapshot.configs or s != self.snapshot.configs[name].status
        }

    def _history(self, status: ServiceStatus, rollout: Rollout | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Old rollouts and the configs that nothing refers to any more; one that is cooling down stays remembered."""
        policy = self.spec.rollout
        finished = sorted((r for r in self.snapshot.rollouts if r.status.finished), key=lambda r: r.number)
        promoted = [r.name for r in finished if r.status.verdict == "Succeeded"]
        window = set(promoted[-policy.rollback_window :] if policy.rollback_window else [])
        old = [r for r in finished[: -policy.history_limit] if r.name not in window]
        kept = [r for r in self.snapshot.rollouts if r not in old]
        used = {
            status.stable_config,
            status.candidate_config,
            *(r.to_config for r in kept),
            *(r.from_config for r in kept),
        }
        if rollout is not None:
            used.add(rollout.to_config)
        written = {*self.rollout_statuses, *self.config_statuses, *(new.name for new in self.new_configs)}
        idle = sorted((c for c in self.snapshot.configs.values() if c.name not in used), key=lambda c: c.created_at)
        stale = [
            c
            for c in idle
            if (c.status.rejected_until_at or 0.0) <= self.now
            and c.status.source != "Baseline"
            and c.name not in written
        ]
        return (
            tuple(c.name for c in stale[: max(0, len(idle) - IDLE_CONFIGS_KEPT)]),
            tuple(r.name for r in old if r.name not in written),
        )


# Why exits go off under a plan that was stable; asked in this order, and the first that applies decides.
_REASONS_TO_FALL: tuple[Callable[[_Pass, Config], bool], ...] = (
    _Pass._another_model_is_served,
    _Pass._it_was_switched_off_already,
    _Pass._its_ramp_set_is_gone,
    _Pass._no_longer_allowed,
    _Pass._a_detector_alarms,
    _Pass._the_fleet_is_over_budget,
    _Pass._it_costs_time,
)


def _stores(snapshot: Snapshot, backbone_digest: str) -> dict[str, RecordStore]:
    """Records of the model that is served, by ramp set."""
    found = [store for store in (snapshot.records, *snapshot.more_records.values()) if store is not None]
    return {store.ramp_set_digest: store for store in found if store.backbone_digest == backbone_digest}


def _same_plans(a: PlanDocument, b: PlanDocument) -> bool:
    """Whether two documents make workers run the same thing; epoch, captures, stable audit rate and notes aside."""
    return _plans_alone(a) == _plans_alone(b)


def _plans_alone(document: PlanDocument) -> PlanDocument:
    stable = replace(document.stable, audit_rate=0.0, design_effect=1.0)
    return replace(document, epoch=0, capture_since=None, stable=stable, withdrawn=())


def _execution(counts: tuple[ArmCounts, ...], plan_hash: str) -> dict[BatchShape, SecondsSketch]:
    """Execution sketches of one plan by the shape of batches, over all workers and recent epochs; a worker that is older than lengths tells sizes alone."""
    return by_shape(c.execution_by_length or c.execution for c in counts if c.plan_hash == plan_hash)


def _rollout_summary(rollout: Rollout | None, steps: tuple[Step, ...]) -> RolloutSummary:
    if rollout is None:
        return RolloutSummary()
    status = rollout.status
    if status.phase not in CANARY_SERVES:
        return RolloutSummary(rollout.name, status.phase)
    still = sum(step.weight > status.weight for step in steps)
    return RolloutSummary(rollout.name, f"Step {status.step + 1}/{status.step + 1 + still} {status.weight}%")


def _summarise(status: ServiceStatus) -> ServiceStatus:
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


__all__ = ["NewConfig", "NewRollout", "TuningRequest", "decide"]
