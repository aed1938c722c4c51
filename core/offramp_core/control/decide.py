"""One pass of the control loop: a pure function of a snapshot and a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from offramp_core.columns import EXACT, chain
from offramp_core.control.audit import eager_rate, quiet_rate
from offramp_core.control.conditions import Facts, conditions, observe, workers_status
from offramp_core.control.ledger import BootReport, fold, impossible
from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    Ledger,
    PinStatus,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    ServiceStatus,
    TuningStatus,
)
from offramp_core.control.rollout import (
    CANARY_SERVES,
    RolloutView,
    advance,
    awaits_approval,
    intent_key,
    is_certified,
    withdrawn,
)
from offramp_core.control.snapshot import Decision, Event, NewConfig, NewRollout, Snapshot, Worker
from offramp_core.control.spec import Step
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
from offramp_core.plan import Plan, Precision, exits_off_plan
from offramp_core.protocol import ArmCounts, ArmPlan, PlanDocument, RampInfo
from offramp_core.records import ExitCosts
from offramp_core.sketch import SecondsSketch, merge_sketches
from offramp_core.tuning import OVERHEAD_SLACK, TuningRequest

BUSY_REQUEUE_SECONDS = 1.0
QUIET_REQUEUE_SECONDS = 10.0
IDLE_CONFIGS_KEPT = 10
CANARY_LEASE_SECONDS = 60.0
COOLDOWN_DOUBLINGS = 6
MAX_EPOCH_LEAP = 1_000_000  # a worker that claims to be further ahead of what is published is not believed


def decide(snapshot: Snapshot, now: float) -> Decision:
    """What to do about one service.

    Steady state is a fixed point: deciding again on the same facts changes nothing.
    """
    served = _served(snapshot)
    if served is None:
        return _without_workers(snapshot, now)
    return _Pass(snapshot, served, now).decision()


@dataclass(frozen=True, slots=True)
class _Served:
    """What the workers serve: the digests they agree on, the columns of their records, and their costs."""

    backbone_digest: str
    ramp_set_digest: str
    columns: tuple[RampInfo, ...]
    costs: Mapping[str, list[Any]]

    @property
    def ramp_ids(self) -> tuple[str, ...]:
        return tuple(column.id for column in self.columns)

    def chain(self, precision: Precision) -> tuple[tuple[str, ...], ExitCosts]:
        """Names and costs (at the smallest batch) of the ramps that a plan of this precision may use."""
        prefix = f"{precision}_"
        if f"{prefix}segment_seconds" not in self.costs:
            precision, prefix = EXACT, ""
        segment, ramp, whole = (
            np.asarray(self.costs[name][0], float)
            for name in (f"{prefix}segment_seconds", f"{prefix}ramp_seconds", "segment_seconds")
        )
        ids = tuple(self.columns[j].id for j in chain([c.precision for c in self.columns], precision))
        return ids, ExitCosts(segment, ramp, None if precision == EXACT else float(whole.sum()))


def _served(snapshot: Snapshot) -> _Served | None:
    """None until a ready worker has told, or while workers of two models serve side by side."""
    states = [w.state for w in snapshot.workers if w.ready and w.state is not None and w.state.ready]
    if len({(s.backbone_digest, s.ramp_set_digest) for s in states}) != 1:
        return None
    first = states[0]
    return _Served(first.backbone_digest, first.ramp_set_digest, first.ramps, first.costs)


def _without_workers(snapshot: Snapshot, now: float) -> Decision:
    """Nothing can be decided about plans; say what is known and keep everything as it is."""
    service = snapshot.service
    stable = snapshot.configs.get(service.status.stable_config)
    acked = sum(
        w.ready and w.state is not None and snapshot.published is not None and w.state.epoch == snapshot.published.epoch
        for w in snapshot.workers
    )
    facts = Facts(service, snapshot.workers, acked, stable, (), service.status.pin, None, now)
    status = replace(
        service.status,
        observed_generation=service.generation,
        workers=workers_status(facts),
        conditions=conditions(
            facts, settled_generation=service.status.settled_generation, observed=(SecondsSketch(), 0, 0)
        ),
    )
    return Decision(status=_summarise(status), requeue_after_seconds=BUSY_REQUEUE_SECONDS)


class _Pass:
    """The steps of one pass over a service whose workers are known. Holds no state beyond the pass."""

    def __init__(self, snapshot: Snapshot, served: _Served, now: float) -> None:
        self.snapshot, self.served, self.now = snapshot, served, now
        self.service, self.spec = snapshot.service, snapshot.service.spec
        self.events: list[Event] = []
        self.config_statuses: dict[str, ConfigStatus] = {}
        self.rollout_statuses: dict[str, RolloutStatus] = {}
        self.new_configs: list[NewConfig] = []
        self.quarantined = _quarantined(snapshot)
        self.counts = tuple(
            c
            for w in snapshot.workers
            if w.observations is not None and w.name not in self.quarantined
            for c in w.observations.counts
        )
        self.fell = ("", "")  # why the stable plan was switched off in this pass
        self.configs: dict[str, Config] = dict(snapshot.configs)
        self.tuning = self.service.status.tuning

    def decision(self) -> Decision:
        baseline = self._ensure_baseline()
        stable = self._stable(baseline)
        rollout, stable = self._advance_rollout(stable)
        tuned, pin = self._look_for_a_plan(stable, rollout)
        if tuned.withdraw:
            rollout = None
        if tuned.stable_over_budget or tuned.stable_not_allowed:
            tuned = self._switch_off(tuned, stable, baseline)
            stable = baseline
        self.tuning = self._audit(tuned.status, rollout, stable)
        document = self._document(stable, rollout)
        published = self.snapshot.published
        changed = (
            published is None
            or replace(document, epoch=published.epoch) != published
            or document.epoch > published.epoch + 1  # an older document was put back; workers refuse it
        )
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
            or status.phase != "Ready"
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
            events=tuple(self.events),
            requeue_after_seconds=BUSY_REQUEUE_SECONDS if busy or new_rollout is not None else QUIET_REQUEUE_SECONDS,
        )

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
        """The stable plan, or exits off where it does not apply: another model, Disabled, or an alarm."""
        stable = self.configs.get(self.service.status.stable_config, baseline)
        if not self._fits(stable):
            self.tuning = replace(self.tuning, tuned_for="", next_attempt_at=None)
            self.fell = ("ModelChanged", "the workers serve another model or ramp set now")
            return baseline
        if stable.plan.exits_off:
            return stable
        forbidden = self._forbidden(stable)
        if forbidden:
            self.events.append(Event("ExitsOff", forbidden))
            self.tuning = replace(self.tuning, tuned_for="", next_attempt_at=None)
            self.fell = ("NewerIntent", forbidden)
            return baseline
        alarmed = self._alarmed(stable.plan)
        if alarmed:
            message = f"{stable.name}: the detector of {', '.join(alarmed)} says that the budget of {self.spec.max_disagreement:.2%} is broken; exits are off"
            self._drifted(stable, message)
            self.tuning = after_alarm(self.tuning, now=self.now)
            self.fell = ("DriftDetected", message)
            return baseline
        return stable

    def _fits(self, config: Config) -> bool:
        plan = config.plan
        return (plan.backbone_digest, plan.ramp_set_digest) == (
            self.served.backbone_digest,
            self.served.ramp_set_digest,
        )

    def _forbidden(self, config: Config) -> str:
        """Why the spec, as it is now, does not let a plan serve; empty where it does."""
        if self.spec.mode == "Disabled":
            return "ramps.mode is Disabled"
        if config.plan.precision not in self.spec.precisions:
            return f"{config.name} runs at {config.plan.precision}; ramps.precision is {self.spec.precision}"
        if not is_certified(config, self.service):
            return f"{config.name} is not certified for a budget of {self.spec.max_disagreement:.2%} with confidence {self.spec.confidence:g}"
        return ""

    def _drifted(self, stable: Config, message: str) -> None:
        """The inputs changed under the stable plan: it is rejected, and what was rejected on the old inputs may be tried again."""
        self.events.append(Event("DriftDetected", message, warning=True))
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
            self.events.append(Event("ExitsOff", tuned.stable_not_allowed))
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
                extra.status, phase="Superseded", verdict="Superseded", reason="AnotherIsActive", finished_at=self.now
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
                reason="ConfigGone",
                message=f"{rollout.to_config} does not exist",
                finished_at=self.now,
            )
            return None, stable
        change = advance(self._rollout_view(rollout, stable))
        if change.event is not None:
            self.events.append(change.event)
        if change.status != rollout.status:
            self.rollout_statuses[rollout.name] = change.status
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
        """An uncertified plan that is promoted has earned it; that is written down before it serves as stable."""
        config = self.configs[rollout.to_config]
        if is_certified(config, self.service):
            return
        n, k = rollout.status.audited
        earned = {
            "method": "canary-acceptance", "budget": repr(self.spec.max_disagreement), "delta": repr(1 - self.spec.confidence),
            "n": n, "k": k, "recordsThrough": repr(self.now),
        }  # fmt: skip
        certificates = (*config.status.certificates, earned)[-CERTIFICATES_KEPT:]
        self._write(config, replace(config.status, certificates=certificates))

    def _rollback_target(self, name: str) -> Config:
        """What serves after a promotion was taken back: what served before, where that may serve, else exits off."""
        before = self.configs.get(name)
        if before is not None and self._fits(before) and (before.plan.exits_off or not self._forbidden(before)):
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
            load=self.snapshot.load,
            stable_config=stable.name,
            now=self.now,
            fell=self.fell,
            returns_to=self._promoted_lately(self.configs[rollout.to_config]),
            inputs_since=self.tuning.records_since_at,
            watched_since=self.snapshot.watched_since,
        )

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
        if not self._fits(config) or self._forbidden(config) or not {r.id for r in plan.ramps} <= set(ids):
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
        gone_only_when_known = _live_boots(self.snapshot.workers, rollout.status.ledger)
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
        return judge_pin(self._snapshot_now(), plan=plan, stable=stable, rollout=rollout)

    def _snapshot_now(self) -> Snapshot:
        """What was seen, with what this pass has decided so far: an attempt that ends in it has ended."""
        rollouts = tuple(replace(r, status=self.rollout_statuses.get(r.name, r.status)) for r in self.snapshot.rollouts)
        return replace(self.snapshot, configs=self.configs, rollouts=rollouts)

    def _audit(self, tuning: TuningStatus, rollout: Rollout | None, stable: Config) -> TuningStatus:
        """The audit rate of the stable arm. It moves only when its class does: every change is a new epoch."""
        wanted: Literal["Off", "Quiet", "Eager"] = "Quiet"
        if self.spec.mode == "Disabled" or (stable.plan.exits_off and self.spec.suspend):
            wanted = "Off"
        elif rollout is None and tuning.state in ("CollectingLabels", "Tuning"):
            wanted = "Eager"
        if wanted == tuning.audit:
            return tuning
        rate = {"Off": 0.0, "Quiet": quiet_rate(self.snapshot.load), "Eager": eager_rate(self.snapshot.load)}[wanted]
        return replace(tuning, audit=wanted, audit_rate=rate)

    # --- what workers should run -------------------------------------------------------------------

    def _document(self, stable: Config, rollout: Rollout | None) -> PlanDocument:
        canary, weight, salt, slow = None, 0, "", {}
        if rollout is not None and rollout.status.phase in CANARY_SERVES:
            status = rollout.status
            canary = ArmPlan(self.configs[rollout.to_config].plan.to_mapping(), status.audit_rate)
            weight, slow, salt = status.weight, status.slow_seconds, f"{rollout.name}/{status.step}/{status.renewals}"
        return PlanDocument(
            service=self.service.name,
            service_uid=self.service.uid,
            epoch=self._last_epoch() + 1,
            stable=ArmPlan(stable.plan.to_mapping(), self.tuning.audit_rate),
            canary=canary,
            weight_percent=weight,
            salt=salt,
            accuracy_budget=self.spec.max_disagreement,
            slow_seconds=slow,
            max_overhead=self.spec.max_overhead if canary is not None else 0.0,
            canary_lease_seconds=CANARY_LEASE_SECONDS,
        )

    def _last_epoch(self) -> int:
        """The newest epoch anybody knows: workers refuse older ones, also when the published document was lost."""
        published = self.snapshot.published
        seen = [w.state.epoch for w in self.snapshot.workers if w.state is not None and w.name not in self.quarantined]
        canaried = [r.status.ledger.epoch for r in self.snapshot.rollouts]
        newest = max([published.epoch if published is not None else 0, *canaried])
        return max([newest, *(e for e in seen if e <= newest + MAX_EPOCH_LEAP)])

    # --- what people see ---------------------------------------------------------------------------

    def _status(
        self, stable: Config, rollout: Rollout | None, tuned: Tuned, pin: PinJudged, *, document_changed: bool
    ) -> ServiceStatus:
        before, published = self.service.status, self.snapshot.published
        ready = [w for w in self.snapshot.workers if w.ready]
        acked = sum(published is not None and w.state is not None and w.state.epoch == published.epoch for w in ready)
        quarantined = self._all_quarantined(rollout)
        facts = Facts(
            self.service, self.snapshot.workers, acked, stable, self.counts, pin.status, rollout, self.now, quarantined
        )
        observed, latency, n, k = observe(facts, *self.served.chain(stable.plan.precision))
        settled = before.settled_generation
        if facts.settled and not document_changed:
            settled = self.service.generation
        candidate = self._candidate(rollout, tuned)
        status = replace(
            before,
            observed_generation=self.service.generation,
            settled_generation=settled,
            stable_config=stable.name,
            candidate_config=candidate,
            rollout=_rollout_summary(rollout, self.spec.rollout.steps),
            workers=workers_status(facts),
            observed=observed if stable.name == before.stable_config else replace(observed, taken_at=None),
            tuning=self.tuning,
            pin=pin.status,
            conditions=conditions(facts, settled_generation=settled, observed=(latency, n, k)),
        )
        return _summarise(status)

    def _candidate(self, rollout: Rollout | None, tuned: Tuned) -> str:
        """What may become stable: the canary, or a recommendation that waits for the user."""
        if tuned.new_rollout is not None:
            return tuned.new_rollout.to_config
        return rollout.to_config if rollout is not None and not tuned.withdraw else ""

    def _all_quarantined(self, rollout: Rollout | None) -> dict[str, str]:
        """Why workers are not pooled, by name: what they say now, or said earlier in this step."""
        found = dict(self.quarantined)
        boots = rollout.status.ledger.quarantined if rollout is not None else ()
        for worker in self.snapshot.workers:
            if worker.observations is not None and worker.observations.boot_id in boots:
                found.setdefault(worker.name, "its counts of this step went backwards or could not be true")
        for name in sorted(set(found) - set(self.service.status.workers.quarantined)):
            self.events.append(Event("WorkerQuarantined", f"{name}: {found[name]}; it is not pooled", warning=True))
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


def _same_plans(a: PlanDocument, b: PlanDocument) -> bool:
    """Whether two documents make workers run the same thing; epoch and stable audit rate aside."""
    return replace(a, epoch=0, stable=replace(a.stable, audit_rate=0.0)) == replace(
        b, epoch=0, stable=replace(b.stable, audit_rate=0.0)
    )


def _live_boots(workers: tuple[Worker, ...], ledger: Ledger) -> frozenset[str]:
    """Boots that may still report: each worker's last known one. While a worker was never heard, any might be its own."""
    known = [w.state or w.observations for w in workers]
    boots = {seen.boot_id for seen in known if seen is not None}
    if None in known:
        boots |= set(ledger.live)
    return frozenset(boots)


def _execution(counts: tuple[ArmCounts, ...], plan_hash: str) -> dict[int, SecondsSketch]:
    """Execution sketches of one plan by batch size, over all workers and recent epochs."""
    by_size: dict[int, list[SecondsSketch]] = {}
    for c in counts:
        if c.plan_hash == plan_hash:
            for size, buckets in c.execution.items():
                by_size.setdefault(int(size), []).append(SecondsSketch({int(i): n for i, n in buckets.items()}))
    return {size: merge_sketches(sketches) for size, sketches in by_size.items()}


def _rollout_summary(rollout: Rollout | None, steps: tuple[Step, ...]) -> RolloutSummary:
    if rollout is None:
        return RolloutSummary()
    status = rollout.status
    if status.phase not in CANARY_SERVES:
        return RolloutSummary(rollout.name, status.phase)
    still = sum(step.weight > status.weight for step in steps)
    return RolloutSummary(rollout.name, f"Step {status.step + 1}/{status.step + 1 + still} {status.weight}%")


def _quarantined(snapshot: Snapshot) -> dict[str, str]:
    """Why a worker's counts cannot be true, by its name."""
    published = snapshot.published
    plans = {}
    if published is not None:
        arms = {"stable": published.stable, "canary": published.canary}
        plans = {
            (published.epoch, arm): Plan.from_mapping(a.plan).content_hash for arm, a in arms.items() if a is not None
        }
    found = {}
    for worker in snapshot.workers:
        if worker.observations is None:
            continue
        why = impossible(worker.observations.counts, newest_epoch=_newest(snapshot, worker), plans=plans)
        if why:
            found[worker.name] = why
    return found


def _newest(snapshot: Snapshot, worker: Worker) -> int | None:
    """The newest epoch that a worker can have counted for: what is published, unless workers hold a newer one whose document was lost."""
    if snapshot.published is None:
        return None
    holds = worker.state.epoch if worker.state is not None else 0
    published = snapshot.published.epoch
    return max(published, holds) if holds <= published + MAX_EPOCH_LEAP else published


def _summarise(status: ServiceStatus) -> ServiceStatus:
    """Phase and message: the first condition that a person should look at."""
    by_type = {c.type: c for c in status.conditions}
    ready, stalled, reconciling = by_type["Ready"], by_type.get("Stalled"), by_type.get("Reconciling")
    if stalled is not None:
        return replace(status, phase="Stalled", message=stalled.message)
    if ready.status != "True":
        return replace(status, phase="Starting" if ready.reason == "Starting" else ready.reason, message=ready.message)
    if reconciling is not None:
        return replace(status, phase="Reconciling", message=reconciling.message)
    return replace(status, phase="Ready", message=ready.message)


__all__ = ["NewConfig", "NewRollout", "TuningRequest", "decide"]
