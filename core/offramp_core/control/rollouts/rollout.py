"""One attempt to move from one plan to another, as a list of named rules.

Each pass the rules are asked in order and the first that has something to say decides. Rules that look for
harm come first and are armed whenever a canary serves, Paused included.

    Pending → Progressing(step) ⇄ Paused → AwaitingPromotion → Promoting → Succeeded
                  any of them → RollingBack → RolledBack | Aborted | Superseded
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from offramp_core.certify import allowance
from offramp_core.control.objects import (
    ArmTally,
    Config,
    Ending,
    GateStatus,
    Ledger,
    Phase,
    Rollout,
    RolloutStatus,
    Service,
    StepRecord,
)
from offramp_core.control.rollouts.gates import (
    WARY_ADVICE,
    GateInput,
    decided_by_audits,
    gate_level,
    proves,
    read_gates,
    rejection,
)
from offramp_core.control.rollouts.slowness import slowness_basis
from offramp_core.control.snapshot import Event, Load, Worker, seconds_since
from offramp_core.control.spec import Step
from offramp_core.control.stable.audit import eager_rate, worth_one
from offramp_core.evidence import detector
from offramp_core.evidence.one_arm import Counts
from offramp_core.evidence.slow import BatchShape
from offramp_core.protocol import Withdrawn
from offramp_core.reasons import AnyReason, MaybeReason, Reason, parse_reason
from offramp_core.sketch import SecondsSketch

AUDIT_WAIT_SECONDS = 120.0  # for the last audits of a step; a backlog is worked off much sooner
ACK_TIMEOUT_SECONDS = 120.0  # kubelet takes up to a minute and a half to show a changed ConfigMap when a poke is lost
CLOCKS_APART_SECONDS = 600.0  # two operators' clocks may differ by so much without a deadline ending early
MIN_STABLE_BATCHES = 50
# What is told when a rollout has ended so; by verdict.
ENDED: Mapping[str, Reason] = {
    "RolledBack": Reason.ROLLED_BACK,
    "Aborted": Reason.ABORTED,
    "Superseded": Reason.SUPERSEDED,
}
PASSING = frozenset({"Clear", "NotApplicable"})
CANARY_SERVES: frozenset[str] = frozenset({"Progressing", "Paused", "AwaitingPromotion"})


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What the rules of one rollout may look at.

    ``epoch`` is the published epoch when it carries exactly this step (else None: it is still to be published).
    ``workers`` are the ready ones. ``execution`` tells the stable plan's execution sketches by the shape of batches; it
    is asked only when a step may begin, because merging them is most of a pass. ``fell`` says why the plan that served
    was switched off in this very pass, as (reason, message), empty where it was not. ``returns_to`` is the promoted
    rollout of the same plan that the rollback window still covers. ``inputs_since`` is when the inputs last changed,
    and ``watched_since`` when this process began to look, both by its own clock. ``next_test`` is the number that a
    test would have which began now. ``fallen`` are workers that are not ready: they serve nobody, but may have died of
    the canary. ``withdrawn`` is how the attempt ended by a pass that took the canary away and could not store that.
    ``clustering`` measures on the newest records how much requests resemble each other (:func:`.audit.clustering`;
    None: nobody can say), following every sign of it where its argument says so; it is asked only when an uncertified
    plan is about to be accepted or rejected. ``looked_at`` tells how many records there are to look for scenes in, and
    how many it takes before such a plan may be accepted.
    """

    rollout: Rollout
    service: Service
    configs: Mapping[str, Config]
    workers: tuple[Worker, ...]
    epoch: int | None
    ledger: Ledger
    execution: Callable[[], Mapping[BatchShape, SecondsSketch]]
    clustering: Callable[[bool], float | None]
    looked_at: Callable[[], tuple[int, int]]
    load: Load
    stable_config: str
    now: float
    fell: tuple[MaybeReason, str] = ("", "")
    returns_to: str = ""
    inputs_since: float | None = None
    watched_since: float = 0.0
    fallen: tuple[Worker, ...] = ()
    next_test: int = 1
    withdrawn: Withdrawn | None = None

    @property
    def status(self) -> RolloutStatus:
        return self.rollout.status

    @property
    def to(self) -> Config:
        return self.configs[self.rollout.to_config]

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.service.spec.rollout.steps

    @property
    def acked(self) -> bool:
        """Whether every ready worker runs the published epoch."""
        return (
            self.epoch is not None
            and bool(self.workers)
            and all(w.state is not None and w.state.epoch == self.epoch for w in self.workers)
        )

    @property
    def upcoming(self) -> tuple[Step, ...]:
        """What is left of the steps, as the spec has them now: those above the present weight."""
        return tuple(step for step in self.steps if step.weight > self.status.weight)

    @property
    def n_steps(self) -> int:
        """Steps begun and still to come; editing them in mid-rollout changes what is to come alone."""
        return self.status.step + 1 + len(self.upcoming)

    @property
    def certified(self) -> bool:
        return is_certified(self.to, self.service, since=self.inputs_since)

    @property
    def pause_seconds(self) -> float:
        """How long to rest at the present weight after the step has passed; a plan that comes back need not."""
        if self.status.returns_to:
            return 0.0
        return next((step.pause_seconds for step in self.steps if step.weight == self.status.weight), 0.0)

    @property
    def late(self) -> list[str]:
        """Ready workers that do not run the published epoch."""
        return [w.endpoint.name for w in self.workers if w.state is None or w.state.epoch != self.epoch]

    def seconds_since(self, moment: float | None) -> float:
        """Seconds since a moment, which another operator's clock may have given."""
        return seconds_since(moment, now=self.now, watched_since=self.watched_since)

    def seconds_surely_since(self, moment: float | None) -> float:
        """What has passed since a moment also by a clock that was behind the one that told it: seen by this process, or
        beyond the difference."""
        elapsed = self.seconds_since(moment)
        return max(min(elapsed, self.now - self.watched_since), elapsed - CLOCKS_APART_SECONDS)

    @property
    def seconds_in_phase(self) -> float:
        return self.seconds_since(self.status.phase_started_at)

    @property
    def seconds_waited(self) -> float:
        """Seconds in this phase that this process has seen: a deadline of minutes must not end by two clocks that
        differ by ten."""
        return min(self.seconds_in_phase, max(0.0, self.now - self.watched_since))


@dataclass(frozen=True, slots=True)
class Change:
    """What a rule decided: the next status, and an event when people should hear of it.

    ``clustering`` is what was measured of how much requests resemble each other, None where nobody asked or nobody
    could say.
    """

    status: RolloutStatus
    event: Event | None = None
    clustering: float | None = None


Rule = Callable[[RolloutView], Change | None]

UNCLEAR = f"mistakes come together over so many requests that nobody can say what an audit is worth; {WARY_ADVICE}"

FEW_RECORDS = (
    "earned if requests are independent; to see scenes of many sources takes {needed:,} records of the canary and of "
    "the time before it, and there are {records:,}; where requests name their sources (parameters.stream) it takes none"
)


def advance(view: RolloutView) -> Change:
    """One pass over one unfinished rollout: read the gates, then let the first rule that applies decide."""
    view = replace(view, ledger=_with_overdue(view))
    status, clustering = replace(view.status, ledger=view.ledger), None
    if status.phase in CANARY_SERVES and status.objective == intent_key(view.service):
        status = replace(status, watch=_watched(view), restarts=_restarts(view), acceptance_test=_acceptance_test(view))
        status, clustering = _judged(replace(view, rollout=replace(view.rollout, status=status)))
    view = replace(view, rollout=replace(view.rollout, status=status))
    for rule in RULES:
        change = rule(view)
        if change is not None:
            return replace(change, clustering=clustering)
    return Change(status, clustering=clustering)


def gate_readings(view: RolloutView) -> tuple[GateStatus, ...]:
    """All gates on the evidence of the current step."""
    spec = view.service.spec
    return read_gates(
        GateInput(
            tally=view.ledger.total,
            weight=view.status.weight,
            budget=spec.max_disagreement,
            confidence=spec.rollout.confidence,
            n_steps=view.n_steps,
            slow_needed=view.status.slow_needed,
            slow_excluded=view.status.slow_excluded,
            certified=view.certified,
            accuracy_confidence=spec.confidence,
            watch=view.status.watch,
            level=view.status.gate_level,
            attempt=Counts(*view.status.audited),
            acceptance_level=acceptance_level(view.status, view.service),
            design_effect=_worth_one(view),
            acceptance_effect=_worth_one(view, view.status.acceptance_clustering),
            tiers={t.name: t.max_disagreement for t in spec.menu if t.name in tiers_served(view.to, view.service)},
        )
    )


def _judged(view: RolloutView) -> tuple[RolloutStatus, float | None]:
    """The status with its gates read, and the clustering that was measured for it.

    No tuning may ever have measured what a label is worth where a plan is pinned: before audits decide about it, the
    records that came with them tell. What follows every sign of scenes is for the gate alone that accepts it: by such a
    measure detectors and rejections would notice harm late.
    """
    status = replace(view.status, gates=gate_readings(view))
    if view.certified or not any(map(decided_by_audits, status.gates)):
        return status, None
    clustering, tuning = view.clustering(False), view.service.status.tuning
    if clustering is None:
        return _doubted(status, UNCLEAR), None
    if clustering > tuning.clustering:
        known = replace(view.service.status, tuning=replace(tuning, clustering=clustering))
        view = replace(view, service=replace(view.service, status=known))
        arm = view.ledger.total.canary
        status = replace(status, watch=_updated(detector.init(), view, n=arm.audited, k=arm.disagreements))
        status = _read(view, status)
    if not any(proves(g.name) and decided_by_audits(g) for g in status.gates):
        return status, clustering
    records, needed = view.looked_at()
    if records < needed:
        return _doubted(status, FEW_RECORDS.format(records=records, needed=needed)), clustering
    wary = view.clustering(True)
    if wary is None:
        return _doubted(status, UNCLEAR), clustering
    wary = max(wary, status.acceptance_clustering)
    return _read(view, replace(status, acceptance_clustering=wary)), clustering


def _read(view: RolloutView, status: RolloutStatus) -> RolloutStatus:
    return replace(status, gates=gate_readings(replace(view, rollout=replace(view.rollout, status=status))))


def _doubted(status: RolloutStatus, why: str) -> RolloutStatus:
    """Nobody can say what an audit is worth, so none accepts a plan."""
    gates = (replace(g, state="Undecided", message=why) if proves(g.name) else g for g in status.gates)
    return replace(status, gates=tuple(gates))


def _worth_one(view: RolloutView, clustering: float = 0.0) -> float:
    """So many audits of the canary are worth one in this step, if requests resemble each other at least by
    ``clustering``."""
    tuning = view.service.status.tuning
    return worth_one(replace(tuning, clustering=max(tuning.clustering, clustering)), rate=view.status.audit_rate)


# --- rules: reasons to stop ------------------------------------------------------------------------


def superseded_by_newer_intent(view: RolloutView) -> Change | None:
    """The user's objective, mode or pin changed: what was begun for the old one is no longer wanted.

    A plan that is being promoted was decided upon already. It goes only where it may not serve as things are now, which
    includes an edit that came after the promotion was written down and before the service's status said so: then
    nothing serves yet that could fall.
    """
    begun_for, wanted = view.status.objective, intent_key(view.service)
    if view.status.phase == "RollingBack" or begun_for == wanted:
        return None
    if view.status.phase == "Promoting":
        why = forbidden(view.to, view.service)
        return _stop(view, "Superseded", Reason.NEWER_INTENT, why) if why else None
    if not begun_for and view.rollout.generation == view.service.generation:
        return Change(
            replace(view.status, objective=wanted)
        )  # made by a pass that was cut short before it could say so
    return _stop(view, "Superseded", Reason.NEWER_INTENT, "the service's objective, mode or pin changed")


def another_model_is_served(view: RolloutView) -> Change | None:
    """Plans never cross models."""
    served = {w.state.backbone_digest for w in view.workers if w.state is not None}
    if view.status.phase == "RollingBack" or not served or view.to.plan.backbone_digest in served:
        return None
    return _stop(view, "Aborted", Reason.MODEL_CHANGED, "the workers serve another model now")


def stable_plan_fell(view: RolloutView) -> Change | None:
    """The plan that serves was switched off: the canary it is compared with, or the one that is being promoted, goes as
    well.

    After drift, because it was tuned on the old inputs; after an edit, because the edit was about it.
    """
    if view.status.phase == "RollingBack":
        return None
    reason, message = view.fell
    if reason:
        outcomes: dict[str, Ending] = {Reason.DRIFT_DETECTED: "RolledBack", Reason.MODEL_CHANGED: "Aborted"}
        return _stop(view, outcomes.get(reason, "Superseded"), reason, message)
    if view.status.phase == "Promoting" or view.stable_config == view.rollout.from_config:
        return None
    return _stop(view, "Aborted", Reason.STABLE_CHANGED, f"{view.rollout.from_config} is no longer the stable plan")


def aborted_by_a_person(view: RolloutView) -> Change | None:
    """Also while the plan is being promoted: what served before serves again."""
    if view.rollout.decision != "Abort" or view.status.phase == "RollingBack":
        return None
    return _stop(view, "Aborted", Reason.DECISION_ABORT, "spec.decision is Abort")


def taken_away_already(view: RolloutView) -> Change | None:
    """Workers have left the canary, and what they had counted by then may be known to nobody any more: the verdict of
    then stands."""
    withdrawn = view.withdrawn
    if withdrawn is None or view.status.phase in ("Pending", "RollingBack"):
        return None
    outcome: Ending = "RolledBack"
    for known in get_args(Ending):  # a document of another release may know others
        outcome = known if known == withdrawn.outcome else outcome
    return _stop(view, outcome, parse_reason(withdrawn.reason), withdrawn.message)


def refused_by_a_worker(view: RolloutView) -> Change | None:
    """A worker that cannot run the plan says so; the plan goes, the worker stays."""
    if view.status.phase not in CANARY_SERVES or view.epoch is None:
        return None
    for worker in view.workers:
        refused = worker.state.refused if worker.state else None
        if refused is not None and refused.epoch == view.epoch:
            return _stop(
                view,
                "RolledBack",
                parse_reason(refused.reason),
                f"worker {worker.endpoint.name} refused the plan: {refused.message}",
            )
    return None


def worker_died_in_the_canary(view: RolloutView) -> Change | None:
    """A marker left by a worker that died executing a canary batch, or more restarts than when the step began or it
    first was ready.

    It is not waited for until it is ready again: the others might have promoted the plan by then.
    """
    if view.status.phase not in CANARY_SERVES or view.epoch is None:
        return None
    for worker in (*view.workers, *view.fallen):
        if worker.state is not None and worker.state.crashed_epoch == view.epoch:
            return _stop(
                view,
                "RolledBack",
                Reason.WORKER_CRASHED,
                f"worker {worker.endpoint.name} died while executing a canary batch",
            )
        if worker.endpoint.restarts > view.status.restarts.get(worker.endpoint.uid, worker.endpoint.restarts):
            return _stop(
                view,
                "RolledBack",
                Reason.WORKER_RESTARTED,
                f"worker {worker.endpoint.name} restarted during the canary",
            )
    return None


def a_gate_rejects(view: RolloutView) -> Change | None:
    if view.status.phase not in CANARY_SERVES:
        return None
    rejected = next((gate for gate in view.status.gates if gate.state == "Rejected"), None)
    if rejected is None:
        return None
    return _stop(view, "RolledBack", rejection(rejected.name), rejected.message)


# --- rules: endings --------------------------------------------------------------------------------


def rollback_is_complete(view: RolloutView) -> Change | None:
    """Over once every ready worker left the canary; without ready workers nothing serves it either."""
    if view.status.phase != "RollingBack":
        return None
    if not (view.acked or (view.epoch is not None and not view.workers)):
        return _say_who_is_late(view)
    status = _finish(view, view.status.outcome)
    return Change(
        status,
        Event(
            parse_reason(status.verdict),
            f"{view.rollout.to_config}: {status.message}",
            warning=status.verdict != "Superseded",
        ),
    )


def promotion_is_complete(view: RolloutView) -> Change | None:
    if view.status.phase != "Promoting":
        return None
    if not view.acked or view.service.status.stable_config != view.rollout.to_config:
        return _say_who_is_late(view)
    n, k = view.status.audited
    status = replace(_finish(view, "Succeeded"), message=f"promoted after {n} audited requests with {k} disagreements")
    return Change(
        status,
        Event(Reason.PROMOTED, f"{view.rollout.to_config} serves all traffic ({k} of {n} audited requests disagreed)"),
    )


# --- rules: going on -------------------------------------------------------------------------------


def wait_for_approval(view: RolloutView) -> Change | None:
    """In mode Recommend a tuned plan serves nobody before a person has said yes."""
    if not awaits_approval(view.rollout, view.service):
        return None
    return Change(
        replace(
            view.status, message="recommended; spec.decision: Promote starts the canary, spec.decision: Abort declines"
        )
    )


def begin(view: RolloutView) -> Change | None:
    """The first step begins when the stable arm's pace is known, so that there is something to compare with.

    A plan that was stable lately begins with the last one: it has passed the others on these inputs.
    """
    if view.status.phase != "Pending":
        return None
    status = replace(view.status, started_at=view.status.started_at or view.now, returns_to=view.returns_to)
    view = replace(view, rollout=replace(view.rollout, status=status))
    measured = sum(sketch.n for sketch in view.execution().values())
    if not view.workers or measured < MIN_STABLE_BATCHES:
        return Change(
            replace(
                status,
                message=f"waiting for {MIN_STABLE_BATCHES} batches of the stable plan to compare with ({measured} so "
                "far)",
            )
        )
    started = _begin_step(view, view.steps[-1 if view.returns_to else 0])
    again = f"; it was stable after {view.returns_to}, so only the last step is taken" if view.returns_to else ""
    return Change(
        started, Event(Reason.CANARY_STARTED, f"{view.rollout.to_config} takes {started.weight} % of batches{again}")
    )


def wait_for_acknowledgement(view: RolloutView) -> Change | None:
    """A step's clock starts when every ready worker runs its epoch; one that never does ends the attempt."""
    if view.status.phase != "Progressing" or view.status.step_started_at is not None:
        return None
    if view.acked:
        return Change(replace(view.status, step_started_at=view.now, message=f"canary at {view.status.weight} %"))
    if view.seconds_waited > ACK_TIMEOUT_SECONDS:
        late = ", ".join(view.late) or "any worker"
        return _stop(
            view, "Aborted", Reason.ACK_TIMEOUT, f"not acknowledged within {ACK_TIMEOUT_SECONDS:.0f} s by {late}"
        )
    return Change(view.status)


def renew_a_lapsed_lease(view: RolloutView) -> Change | None:
    """Workers left the canary by themselves while nobody pulled them: begin the step again, with fresh evidence."""
    if view.status.phase not in CANARY_SERVES or not view.acked:
        return None
    if all(w.state is not None and w.state.canary_hash for w in view.workers):
        return None
    lapsed, arm = view.status.lapsed, view.ledger.total.canary
    renewed = replace(
        view.status,
        renewals=view.status.renewals + 1,
        phase="Progressing",
        phase_started_at=view.now,
        step_started_at=None,
        gates=(),
        ledger=Ledger(),
        lapsed=Counts(lapsed.n + arm.audited, lapsed.k + arm.disagreements),
        watch=detector.init(),
        message="the canary's lease lapsed; beginning the step again",
    )
    return Change(
        renewed,
        Event(
            Reason.CANARY_RENEWED,
            f"{view.rollout.to_config}: the canary's lease lapsed while nobody pulled the workers",
        ),
    )


def promote_on_decision(view: RolloutView) -> Change | None:
    """A person's Promote ends waiting, but never overrules a gate that has not seen enough, such as after its counts
    began anew."""
    if view.status.phase != "AwaitingPromotion" or view.rollout.decision != "Promote":
        return None
    if not _passed(view.status.gates):
        return Change(replace(view.status, message=_not_overruled(view)))
    return _read_what_is_due(view) or _promote(view)


def stay_paused(view: RolloutView) -> Change | None:
    """A canary rests at its weight with the gates armed; one that has not begun does not begin."""
    if not (view.rollout.paused or view.service.spec.suspend):
        return None
    by = "spec.paused" if view.rollout.paused else "the service's spec.suspend"
    if view.status.phase == "Pending":
        return Change(replace(view.status, message=f"{by} is true; the canary has not begun"))
    if view.status.phase not in CANARY_SERVES:
        return None
    first = view.status.phase != "Paused"
    note = "; spec.decision: Promote waits for its end" if view.rollout.decision == "Promote" else ""
    return Change(
        replace(
            view.status,
            phase="Paused",
            phase_started_at=view.now if first else view.status.phase_started_at,
            message=f"{by} is true; the gates stay armed{note}",
        )
    )


def resume(view: RolloutView) -> Change | None:
    """The time of the pause counts neither towards the step's deadline nor towards its rest."""
    status = view.status
    if status.phase != "Paused":
        return None
    begun = None if status.step_started_at is None else min(view.now, status.step_started_at + view.seconds_in_phase)
    return Change(
        replace(
            status,
            phase="Progressing",
            phase_started_at=view.now,
            step_started_at=begun,
            message=f"canary at {status.weight} %",
        )
    )


def next_step(view: RolloutView) -> Change | None:
    """A step passes when nothing rejected, the minimum exposure is reached and its pause is over."""
    status = view.status
    if status.phase != "Progressing" or not _passed(status.gates) or status.step_started_at is None:
        return None
    if view.seconds_since(status.step_started_at) < view.pause_seconds:
        return Change(replace(status, message=f"step {status.step + 1} passed; pausing as asked"))
    unread = _read_what_is_due(view)
    if unread is not None:
        return unread
    if view.upcoming and not status.returns_to:
        started = _begin_step(view, view.upcoming[0])
        return Change(
            started, Event(Reason.STEP_ADVANCED, f"{view.rollout.to_config} takes {started.weight} % of batches")
        )
    if view.service.spec.rollout.promotion == "Manual" and view.rollout.decision != "Promote":
        waiting = replace(
            status,
            phase="AwaitingPromotion",
            phase_started_at=view.now,
            ledger=replace(view.ledger, due={}, due_since_at=None),
            message="every step passed; set spec.decision: Promote",
        )
        return Change(
            waiting,
            Event(
                Reason.AWAITING_PROMOTION,
                f"{view.rollout.to_config} passed every step; promote it by spec.decision: Promote",
            ),
        )
    return _promote(view)


def inconclusive(view: RolloutView) -> Change | None:
    """Too little traffic to tell: never a pass. Abort, or hold with the gates armed, as the user chose."""
    status, policy = view.status, view.service.spec.rollout
    waited = view.seconds_surely_since(status.step_started_at)
    if status.phase != "Progressing" or waited < policy.step_deadline_seconds:
        return None
    open_gates = "; ".join(f"{g.name}: {g.message}" for g in status.gates if g.state == "Undecided")
    if policy.on_inconclusive == "Hold":
        return Change(replace(status, message=f"holding past the step deadline ({open_gates})"))
    return _stop(view, "Aborted", Reason.INCONCLUSIVE, f"undecided at the step deadline ({open_gates})")


def wait_for_evidence(view: RolloutView) -> Change | None:
    """A decision that came before the gates have seen enough is kept, and told so."""
    if view.status.phase != "Progressing" or view.rollout.decision != "Promote":
        return None
    return Change(replace(view.status, message=_not_overruled(view)))


RULES: tuple[Rule, ...] = (
    superseded_by_newer_intent,
    another_model_is_served,
    stable_plan_fell,
    aborted_by_a_person,
    taken_away_already,
    refused_by_a_worker,
    worker_died_in_the_canary,
    a_gate_rejects,
    rollback_is_complete,
    promotion_is_complete,
    renew_a_lapsed_lease,
    stay_paused,
    wait_for_approval,
    begin,
    wait_for_acknowledgement,
    promote_on_decision,
    resume,
    next_step,
    inconclusive,
    wait_for_evidence,
)


# --- pieces ----------------------------------------------------------------------------------------


def intent_key(service: Service) -> str:
    """What a rollout was begun for; a change supersedes it.

    Replicas, the latency objective and the steps are left out on purpose. Auto and Recommend want the same plan: they
    differ in who says yes.
    """
    spec = service.spec
    if spec.pin is None:
        return f"{spec.objective_key}/{'Tuned' if spec.mode in ('Auto', 'Recommend') else spec.mode}"
    ramps = ",".join(f"{r.id}<{r.threshold}" for r in spec.pin.ramps)
    pin = f"{ramps}@{spec.pin.precision}@{spec.pin.ramp_set_digest}"
    return f"{spec.objective_key}/{spec.mode}/{hashlib.sha256(pin.encode()).hexdigest()[:16]}"


def is_certified(config: Config, service: Service, *, since: float | None = None) -> bool:
    """Whether a plan is proven for what the user asks now; ``since`` leaves out proofs on inputs that have changed."""
    return config.certified_for(service.spec.max_disagreement, confidence=service.spec.confidence, since=since)


def forbidden(config: Config, service: Service) -> str:
    """Why the spec, as it is now, does not let a plan serve; empty where it does."""
    spec = service.spec
    if spec.mode == "Disabled":
        return spec.no_exits_because or "ramps.mode is Disabled"
    if spec.precisions is not None and config.plan.precision not in spec.precisions:
        return f"{config.name} runs at {config.plan.precision}; ramps.precision is {spec.precision}"
    if not is_certified(config, service):
        return (
            f"{config.name} is not certified for a budget of {spec.max_disagreement:.2%} with confidence "
            f"{spec.confidence:g}"
        )
    return ""


def tiers_served(config: Config, service: Service) -> tuple[str, ...]:
    """Tiers of a plan that are certified for what is promised now."""
    budgets = {t.name: t.max_disagreement for t in service.spec.menu}
    return config.tiers_for(budgets, confidence=service.spec.confidence)


def earns_its_place(rollout: Rollout, configs: Mapping[str, Config], service: Service) -> bool:
    """Whether a plan without a certificate serves as a canary."""
    config = configs.get(rollout.to_config)
    return config is not None and rollout.status.phase in CANARY_SERVES and not is_certified(config, service)


def acceptance_level(status: RolloutStatus, service: Service) -> float:
    """What the test that accepts an uncertified plan may spend: its own share of the service's allowance, like every
    certificate's."""
    return allowance(1 - service.spec.confidence, max(1, status.acceptance_test))


def has_earned_acceptance(status: RolloutStatus, service: Service) -> bool:
    """Whether a canary showed that its plan keeps to the budget, for what is asked now."""
    cleared = any(proves(gate.name) and gate.state == "Clear" for gate in status.gates)
    return cleared and status.objective == intent_key(service)


def awaits_approval(rollout: Rollout, service: Service) -> bool:
    """Whether the attempt is a recommendation that nobody has answered yet."""
    asked = service.spec.mode == "Recommend" and rollout.cause == "Tuned"
    return asked and rollout.status.phase == "Pending" and rollout.decision == ""


def withdrawn(rollout: Rollout, message: str, *, now: float) -> RolloutStatus:
    """A recommendation that no longer holds; nobody had answered it."""
    return closed(rollout.status, "Superseded", Reason.WITHDRAWN, message=message, now=now)


def closed(status: RolloutStatus, verdict: Ending, reason: AnyReason, *, message: str, now: float) -> RolloutStatus:
    """An attempt that ends where it stands, with nothing to roll back."""
    return replace(status, phase=verdict, verdict=verdict, reason=reason, message=message, finished_at=now)


def _watched(view: RolloutView) -> detector.DetectorState:
    """The detector with the audits that came since the last pass; a ledger of another epoch counts from its
    beginning."""
    before, now = view.status.ledger, view.ledger.total.canary
    seen = before.total.canary if before.epoch == view.ledger.epoch else ArmTally()
    n = max(0, now.audited - seen.audited)  # a worker that was quarantined took its counts along
    k = min(n, max(0, now.disagreements - seen.disagreements))
    return _updated(view.status.watch, view, n=n, k=k)


def _updated(state: detector.DetectorState, view: RolloutView, *, n: int, k: int) -> detector.DetectorState:
    budget = view.service.spec.max_disagreement
    return detector.update(state, n, k, p0=budget, design_effect=_worth_one(view))


def _acceptance_test(view: RolloutView) -> int:
    """The number of the attempt's test: a new one when its gates are read for the first time. Where the number was lost
    later, because the cluster's schema is older than this operator or another one began, it is the last that was given
    out."""
    status = view.status
    if status.acceptance_test or view.certified:
        return status.acceptance_test
    first = not (status.gates or status.history or status.renewals)
    return view.next_test if first else max(1, view.next_test - 1)


def _with_overdue(view: RolloutView) -> Ledger:
    """The ledger, with the audits of a step that were waited for in vain."""
    ledger = view.ledger
    late = ledger.due_since_at is not None and view.seconds_surely_since(ledger.due_since_at) >= AUDIT_WAIT_SECONDS
    return replace(ledger, overdue=ledger.awaited if late else 0)


def _read_what_is_due(view: RolloutView) -> Change | None:
    """Whoever passes a step has read all of it: audits that were drawn before the gates had seen enough are waited for.

    What a worker does not tell in time counts as disagreements, and the gates look once more.
    """
    ledger, status = view.ledger, view.status
    if ledger.due_since_at is None:
        arms = ((boot, both.canary) for boot, both in ledger.live.items())
        ledger = replace(
            ledger, due={boot: arm.drawn for boot, arm in arms if arm.drawn > arm.audited}, due_since_at=view.now
        )
    if ledger.awaited == ledger.overdue:
        return None
    message = f"step {status.step + 1} passed but for {ledger.awaited} audits that are still to be reported"
    return Change(replace(status, ledger=ledger, message=message))


def _restarts(view: RolloutView) -> dict[str, int]:
    """Those by which the step is judged, with workers that came since, once they served; those that are gone do not
    come again."""
    known = view.status.restarts
    present = (*view.workers, *view.fallen)
    return {
        w.endpoint.uid: known.get(w.endpoint.uid, w.endpoint.restarts)
        for w in present
        if w.endpoint.ready or w.endpoint.uid in known
    }


def _not_overruled(view: RolloutView) -> str:
    """Why a person's Promote does not promote yet."""
    waiting = [gate.name for gate in view.status.gates if gate.state not in PASSING]
    uncertified = "the plan is uncertified, and " if any(map(proves, waiting)) else ""
    return f"spec.decision: Promote overrules no gate: {uncertified}{', '.join(waiting) or 'the step'} must pass first"


def _say_who_is_late(view: RolloutView) -> Change | None:
    """Name the workers that keep an ending from being over."""
    if view.seconds_waited <= ACK_TIMEOUT_SECONDS or not view.late:
        return None
    message = view.status.message.split("; still waiting for ")[0]
    return Change(replace(view.status, message=f"{message}; still waiting for {', '.join(view.late)}"))


def _passed(gates: tuple[GateStatus, ...]) -> bool:
    return bool(gates) and all(gate.state in PASSING for gate in gates)


def _begin_step(view: RolloutView, step: Step) -> RolloutStatus:
    """Freeze what the step is judged by, and put the evidence of the last one into the history."""
    status, weight, number = view.status, step.weight, 0
    history = status.history
    if status.phase == "Progressing":
        arm, number = status.ledger.total.canary, status.step + 1
        history = (*history, StepRecord(status.weight, arm.audited, arm.disagreements, view.now))
    policy = view.service.spec.rollout
    status = replace(status, step=number, weight=weight)
    begun = replace(view, rollout=replace(view.rollout, status=status))
    spent = status.level_spent + status.gate_level
    level = gate_level(confidence=policy.confidence, spent=spent, n_steps=begun.n_steps, left=1 + len(begun.upcoming))
    slow = slowness_basis(view.execution(), request_rate=view.load.request_rate, weight=weight, level=level)
    return replace(
        status,
        gate_level=level,
        level_spent=spent,
        phase="Progressing",
        phase_started_at=view.now,
        step_started_at=None,
        audit_rate=eager_rate(view.load, share=weight / 100),
        slow_seconds={str(rows): seconds for rows, seconds in slow.limits.by_rows.items()},
        slow_seconds_by_length={str(shape): seconds for shape, seconds in slow.limits.by_shape.items()},
        slow_needed=slow.needed,
        slow_excluded=slow.excluded,
        restarts={w.endpoint.uid: w.endpoint.restarts for w in view.workers},
        gates=(),
        ledger=Ledger(),
        history=history,
        reason="",
        message=f"waiting for every worker to run the canary at {weight} %",
    )


def begun_anew(rollout: Rollout, message: str) -> RolloutStatus:
    """Back to before the first step, with fresh evidence: nobody is left who could run the canary, and nothing speaks
    against its plan."""
    return replace(
        rollout.status,
        phase="Pending",
        step=0,
        weight=0,
        gate_level=0.0,
        level_spent=0.0,
        reason="",
        message=message,
        step_started_at=None,
        phase_started_at=None,
        gates=(),
        ledger=Ledger(),
        lapsed=Counts(*rollout.status.audited),
        watch=detector.init(),
        history=(),
    )


def _stop(view: RolloutView, outcome: Ending, reason: AnyReason, message: str) -> Change:
    """Begin to roll back; the weight is 0 from the next published epoch on."""
    status = view.status
    if status.phase == "Pending":
        done = _finish(view, outcome)
        return Change(
            replace(done, reason=reason, message=message), Event(ENDED[outcome], f"{view.rollout.to_config}: {message}")
        )
    stopping = replace(
        status,
        phase="RollingBack",
        phase_started_at=view.now,
        weight=0,
        outcome=outcome,
        reason=reason,
        message=message,
    )
    return Change(
        stopping, Event(Reason.ROLLING_BACK, f"{view.rollout.to_config}: {message}", warning=outcome != "Superseded")
    )


def _promote(view: RolloutView) -> Change:
    return Change(
        replace(
            view.status,
            phase="Promoting",
            phase_started_at=view.now,
            weight=100,
            message="waiting for every worker to run the plan as stable",
        )
    )


def _finish(view: RolloutView, verdict: str) -> RolloutStatus:
    phase: Phase = verdict  # type: ignore[assignment]
    return replace(view.status, phase=phase, verdict=verdict, finished_at=view.now, weight=0)
