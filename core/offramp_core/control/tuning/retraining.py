"""Live training of ramps: when to train, on what, and what becomes of a ramp set that was trained.

    capture → train → judge (tune and certify on records of the new set) → canary → current, or discarded

Workers keep inputs; a platform trains, once per attempt; the new set is held beside the current one and scored on the
same audits, so that its certificate is made of its own records. Its canary is a rollout like any other. One set at a
time is on trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from offramp_core.control.objects import Config, RampSetStatus, Rollout, Service
from offramp_core.control.snapshot import Event, TrainingOrder, TrainingReport, Worker
from offramp_core.reasons import Reason

CAPTURES_NEEDED = 2000
MIN_GAIN = 0.01  # of the backbone's time, on inputs that trained nothing; less is not worth a canary
REFRESH_SECONDS = 24 * 3600.0  # between trainings, while the inputs do not change
JUDGE_SECONDS = 6 * 3600.0  # audits score two sets as long as one is on trial
MAX_DOUBLINGS = 6
CAPTURES_STEP = 100  # captures are told in steps, so that the status is not written for every one


@dataclass(frozen=True, slots=True)
class TrainingView:
    """``bundle`` names the model and its own ramp set; ``rollout`` is an unfinished attempt, if any.

    ``concluded`` says that a tuning on records of the set on trial has ended without a plan. ``inputs_since`` is when
    the inputs last changed. ``report`` is what the platform tells of the last training; ``able`` whether it can train
    at all.
    """

    service: Service
    status: RampSetStatus
    bundle: tuple[str, str]
    workers: tuple[Worker, ...]
    rollout: Rollout | None
    configs: Iterable[Config]
    concluded: str
    inputs_since: float | None
    published_epoch: int
    report: TrainingReport | None
    able: bool
    now: float

    @property
    def asked(self) -> bool:
        spec = self.service.spec
        return spec.training == "LiveTraffic" and spec.mode in ("Auto", "Recommend") and not spec.suspend

    @property
    def identity(self) -> str:
        return bundle_identity(*self.bundle)

    @property
    def captures(self) -> int:
        """Inputs that workers have kept since the sample began."""
        since = self.status.capture_since_at
        states = [w.state for w in self.workers if w.state is not None]
        return sum(state.captures for state in states if state.capture_since == since)


@dataclass(frozen=True, slots=True)
class Trained:
    """What comes of a pass: the status, a training to start, events."""

    status: RampSetStatus
    order: TrainingOrder | None = None
    events: tuple[Event, ...] = ()


def train_or_wait(view: TrainingView) -> Trained:
    """One pass. The first rule that has something to say decides."""
    status = view.status
    if status.bundle != view.identity:
        status = RampSetStatus(bundle=view.identity) if view.asked or status != RampSetStatus() else status
        view = replace(view, status=status)
    if not view.asked:
        return _not_asked(view)
    if not view.able:
        message = "there is no ramp-set store; ramps are not trained on live traffic"
        events = () if status.state == "NoRampStore" else (Event(Reason.NO_RAMP_STORE, message, warning=True),)
        waiting = replace(_ended(status), state="NoRampStore", message=message, failure=message)
        return Trained(waiting, events=events)
    if view.rollout is not None:
        return Trained(status)
    if status.state == "Training":
        return _training(view)
    if status.candidate:
        return _judging(view)
    return _capturing(view)


def after_rollout(status: RampSetStatus, *, ramp_set: str, verdict: str, cooldown: float, now: float) -> RampSetStatus:
    """A rollout of a plan of ``ramp_set`` has ended: the set on trial is the current one, or is gone."""
    if not status.candidate or ramp_set != status.candidate:
        return status
    if verdict == "Succeeded":
        return replace(
            status,
            current=status.candidate,
            candidate="",
            candidate_since_at=None,
            state="Capturing",
            failures=0,
            message="",
        )
    return _discarded(status, f"the canary of its plan ended with {verdict}", cooldown=cooldown, now=now)


def bundle_identity(backbone_digest: str, ramp_set_digest: str) -> str:
    """Names a model with the ramp set it came with, for :attr:`RampSetStatus.bundle`."""
    return f"{backbone_digest[-12:]}/{ramp_set_digest[-12:]}"


def working_set(status: RampSetStatus, own: str) -> str:
    """Digest of the set that plans are looked for in."""
    return status.candidate or status.current or own


# --- rules -----------------------------------------------------------------------------------------


def _not_asked(view: TrainingView) -> Trained:
    """A set that was promoted goes on serving; one on trial goes, unless its canary is under way."""
    status = view.status
    if status == RampSetStatus() or view.rollout is not None:
        return Trained(status)
    ended = _ended(status)
    return Trained(ended if ended.current else RampSetStatus())


def _ended(status: RampSetStatus) -> RampSetStatus:
    """Nothing but the set that serves."""
    return RampSetStatus(bundle=status.bundle, current=status.current, attempt=status.attempt)


def _training(view: TrainingView) -> Trained:
    status, report = view.status, view.report
    if report is None or (report.attempt, report.since) != (status.attempt, status.capture_since_at):
        return Trained(status, order=_order(view, status))
    if report.state == "Running":
        return Trained(replace(status, failure=report.message))
    status = replace(
        status,
        trained_at=view.now,
        capture_since_at=_begin(view.now),
        captures=0,
        next_attempt_at=view.now + REFRESH_SECONDS,
        failure="",
    )
    cooldown = view.service.spec.rollout.cooldown_seconds
    if report.state == "Failed":
        failed = _discarded(
            status, f"training {report.attempt} failed: {report.message}", cooldown=cooldown, now=view.now
        )
        events = (Event(Reason.TRAINING_FAILED, failed.message, warning=True),)
        return Trained(replace(failed, failure=failed.message), events=events)
    outcome = (
        f"{report.rows} inputs; on those that trained nothing plans could save {report.saving_after:.0%}, before "
        f"{report.saving_before:.0%}"
    )
    gains = report.saving_after >= report.saving_before + MIN_GAIN
    if not gains or report.ramp_set_digest in ("", status.current or view.bundle[1]):
        message = f"no better ramps from {outcome}"
        rested = replace(status, state="Capturing", message=message)
        return Trained(rested, events=(Event(Reason.NO_BETTER_RAMPS, message),))
    message = f"{_short(report.ramp_set_digest)} is on trial, from {outcome}"
    candidate = replace(
        status, state="Judging", candidate=report.ramp_set_digest, candidate_since_at=view.now, message=message
    )
    return Trained(candidate, events=(Event(Reason.RAMPS_TRAINED, message),))


def _judging(view: TrainingView) -> Trained:
    """The set on trial goes when workers cannot hold it, when no plan of it is found, or when that takes too long."""
    status, why = view.status, ""
    refused = [
        state.refused.message
        for w in view.workers
        if w.endpoint.ready and (state := w.state) is not None and state.refused is not None
        if state.refused.epoch == view.published_epoch
        and state.refused.reason in (Reason.RAMP_SET_NOT_HELD, Reason.DIGEST_MISMATCH)
    ]
    if refused:
        why = f"a worker cannot hold it: {refused[0]}"
    elif view.concluded:
        why = view.concluded
    elif view.now - (status.candidate_since_at or view.now) > JUDGE_SECONDS:
        why = f"no plan of it was certified within {JUDGE_SECONDS / 3600:.0f} h"
    if not why:
        return Trained(replace(status, state="Judging"))
    gone = _discarded(status, why, cooldown=view.service.spec.rollout.cooldown_seconds, now=view.now)
    return Trained(gone, events=(Event(Reason.RAMP_SET_DISCARDED, gone.message, warning=bool(refused)),))


def _capturing(view: TrainingView) -> Trained:
    status, spec = view.status, view.service.spec
    since, drift = status.capture_since_at, view.inputs_since
    if since is None:
        status = replace(status, capture_since_at=_begin(view.now), captures=0)
    elif drift is not None and drift > since:
        earliest = (status.trained_at or -math.inf) + spec.rollout.cooldown_seconds
        due = max(earliest, view.now) if earliest > view.now else None
        status = replace(status, capture_since_at=_begin(drift), captures=0, next_attempt_at=due)
    view = replace(view, status=status)
    enough = view.captures >= CAPTURES_NEEDED
    if enough and (status.next_attempt_at is None or view.now >= status.next_attempt_at):
        begun = replace(
            status,
            state="Training",
            attempt=status.attempt + 1,
            captures=_step(view.captures),
            message=f"on {_step(view.captures)} inputs",
        )
        return Trained(begun, order=_order(view, begun), events=(Event(Reason.TRAINING_STARTED, begun.message),))
    shown = min(_step(view.captures), CAPTURES_NEEDED)
    return Trained(replace(status, state="Capturing", captures=shown))


def _order(view: TrainingView, status: RampSetStatus) -> TrainingOrder:
    sets = {config.plan.ramp_set_digest for config in view.configs if config.plan.ramps}
    return TrainingOrder(
        attempt=status.attempt,
        ramp_set_digest=status.current or view.bundle[1],
        max_disagreement=view.service.spec.max_disagreement,
        keep=tuple(sorted(sets | {view.bundle[1]})),
        since=status.capture_since_at or 0.0,
    )


def _discarded(status: RampSetStatus, why: str, *, cooldown: float, now: float) -> RampSetStatus:
    """Try again later, ever later after each failure."""
    pause = cooldown * 2.0 ** min(status.failures, MAX_DOUBLINGS)
    subject = f"{_short(status.candidate)} was discarded: {why}" if status.candidate else why
    return replace(
        status,
        candidate="",
        candidate_since_at=None,
        state="Capturing",
        failures=status.failures + 1,
        next_attempt_at=now + pause,
        message=subject,
    )


def _begin(moment: float) -> float:
    """A whole second, so that what workers are told is what a status stores."""
    return float(math.ceil(moment))


def _step(captures: int) -> int:
    return captures - captures % CAPTURES_STEP


def _short(digest: str) -> str:
    return f"ramp set {digest.removeprefix('sha256:')[:12]}"
