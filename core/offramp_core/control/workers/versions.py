"""Two versions of a model side by side: the newer one on trial beside the one that serves, by a share of the workers.

With ``spec.updatePolicy.sideBySide`` a changed model starts workers of its own. Both versions answer requests, the new
one with exits off, until it is promoted (the others are then updated to it, one by one, while it goes on serving) or
rejected (its workers go, and nobody else was touched). Which version a request meets follows from the numbers of
workers, or, where it comes through a Gateway, from the weight alone.

Without labels a version can be seen to fail, to refuse and to be late, and no more; whether its answers are better is
for people to know. Plans never cross models: those of the version that serves stay with its workers, and nothing is
learned for the new one before it serves alone.

Sources: the two load orders are TensorFlow Serving's availability- and resource-preserving policies; that the trial has
workers of its own and the others follow after it has passed is Flagger's canary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import (
    GateState,
    GateStatus,
    ModelSource,
    Service,
    UpdateStatus,
    VersionStatus,
    VersionTally,
)
from offramp_core.control.snapshot import Event, Worker, seconds_since
from offramp_core.control.spec import SideBySide
from offramp_core.control.workers.delivery import STALLING
from offramp_core.control.workers.update import UpdateView, failures_allowed, next_update, resting_strategy
from offramp_core.evidence.exposure import audits_needed, reached
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.protocol import TimeName
from offramp_core.reasons import AnyReason, ConditionType, MaybeReason, Reason
from offramp_core.sketch import bucket_index

PROMOTE, ABORT = "promote", "abort"  # requests by annotation, as VERB/TIME
ON_TRIAL = frozenset({"Starting", "Comparing", "AwaitingPromotion", "Promoting"})
SERVES_BESIDE = frozenset({"Starting", "Comparing", "AwaitingPromotion"})
HARMFUL_FACTOR = 3.0  # a version at three times a bound is what a gate must be able to notice
WORSE = 1.5  # a version may miss so many times what the other one misses, as both have the same load
MOST_MISSED = 0.9  # above it there is nothing to compare
MIN_REQUESTS = 100  # of the other version, before its share says anything
POWER = 0.95
GATES_READ_EVERY_SECONDS = 10.0  # a status that changed with every request would be written with every pull
REJECTIONS: Mapping[str, Reason] = {  # by gate
    "failures": Reason.FAILURES_REJECTED,
    "objective": Reason.OBJECTIVE_REJECTED,
}
N_GATES = len(REJECTIONS)
# A version that waits for a person is judged by the last hour: evidence of a good week would hide a bad minute.
WINDOW_SECONDS = 3600.0


# --- who runs what ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """``main`` is the service as its main workers are made, which during a trial is with the model that serves; how
    many there are, and how many on trial."""

    main: Service
    n_main: int
    n_trial: int = 0


def split_in_force(service: Service, desired: int, *, scaled: bool) -> Split:
    """What the platform must apply. The status is one pass old, so it only counts where it is about the model that the
    spec asks for now.

    With ``scaled``, an autoscaler decides on the number of main workers, and none of them is taken away for the trial.
    """
    source = serving_source(service)
    main = service if source is None else replace(service, spec=source.put(service.spec))
    if not desired or not on_trial(service):
        return Split(main, desired)
    replaces = service.status.version.strategy == "Replace" and desired >= 2 and not scaled
    n_trial = trial_workers(desired, _policy(service).weight, replaces=replaces)
    return Split(main, desired - n_trial if replaces else desired, n_trial)


def trial_workers(desired: int, weight: int, *, replaces: bool) -> int:
    """How many workers run the version on trial so that it has about ``weight`` percent of all: in place of others, or
    besides ``desired`` of them."""
    if replaces:
        return min(max(1, round(desired * weight / 100)), desired - 1)
    return max(1, round(desired * weight / (100 - weight)))


def request_share(service: Service, *, main_ready: bool, trial_ready: bool) -> int:
    """Percent of the requests through a Gateway that the version on trial answers: its weight from the comparison to
    the end of its promotion.

    The weight does not rise when it is promoted: its few workers could not carry more, and the others lose none while
    they follow one by one. A version that nobody can answer for gets nothing, whatever its weight: a Gateway refuses
    such requests instead of passing them on.
    """
    if not (trial_ready and on_trial(service)) or service.status.version.phase == "Starting":
        return 0
    return _policy(service).weight if main_ready else 100


def serving_source(service: Service) -> ModelSource | None:
    """The model of the main workers where it is not the spec's."""
    status, asked = service.status.version, ModelSource.of(service.spec)
    promoted = status.phase == "Promoting" and status.candidate == asked
    if service.spec.update_policy.side_by_side is None or not status.serving.uri or promoted:
        return None
    return None if _same_version(service, status.serving, asked) else status.serving


def on_trial(service: Service) -> bool:
    """Whether the model that the spec asks for has workers of its own beside the others."""
    status = service.status.version
    asked = ModelSource.of(service.spec)
    return (
        service.spec.update_policy.side_by_side is not None and status.phase in ON_TRIAL and status.candidate == asked
    )


def concerns_versions(service: Service) -> bool:
    """Whether what a person asks for by annotation is about a version on trial."""
    by_side = service.spec.update_policy.side_by_side is not None
    return by_side and service.request.partition("/")[0] in (PROMOTE, ABORT)


def _policy(service: Service) -> SideBySide:
    policy = service.spec.update_policy.side_by_side
    assert policy is not None, "asked only where versions serve side by side"
    return policy


def _same_version(service: Service, a: ModelSource, b: ModelSource) -> bool:
    """Whether two sources are known to be one model: it is the backbone that makes a version, not where it lies or how
    it is fetched."""
    if (a.uri, a.digest) == (b.uri, b.digest):
        return True
    proven = {m.uri: m.digest for m in service.status.models}
    known = a.digest or proven.get(a.uri, "")
    return bool(known) and known == (b.digest or (proven.get(b.uri, "") if b.uri != a.uri else known))


# --- the decision ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionView:
    """What the rules may look at. ``main`` are the workers of the version that serves, ``trial`` those of the new one.

    ``desired`` workers are wanted; with ``scaled`` an autoscaler says so. ``utilisation`` is the busy share of all in
    [0, 1].
    """

    service: Service
    main: tuple[Worker, ...]
    trial: tuple[Worker, ...]
    desired: int
    scaled: bool
    utilisation: float
    now: float
    watched_since: float = 0.0

    @property
    def status(self) -> VersionStatus:
        return self.service.status.version

    @property
    def asked(self) -> ModelSource:
        return ModelSource.of(self.service.spec)

    @property
    def policy(self) -> SideBySide:
        return _policy(self.service)

    @property
    def split(self) -> Split:
        return split_in_force(self.service, self.desired, scaled=self.scaled)

    @property
    def serves_beside(self) -> bool:
        """Whether all workers of the new version that there should be are ready."""
        return sum(w.endpoint.ready and w.endpoint.current for w in self.trial) >= self.split.n_trial > 0

    @property
    def request(self) -> str:
        """What a person asks for: a verb, or nothing new."""
        asked = self.service.request
        return "" if asked == self.status.handled_request else asked.partition("/")[0]

    def since(self, moment: float | None) -> float:
        """Seconds since a moment, which another operator's clock may have given."""
        return seconds_since(moment, now=self.now, watched_since=self.watched_since)

    def waited(self) -> float:
        """Seconds in this phase that this process has seen: a deadline must not end by clocks that differ."""
        return min(self.since(self.status.phase_started_at), max(0.0, self.now - self.watched_since))

    def with_status(self, status: VersionStatus) -> VersionView:
        return replace(self, service=replace(self.service, status=replace(self.service.status, version=status)))


@dataclass(frozen=True, slots=True)
class Version:
    """The next status, what people are told once, and (reason, message) of the condition VersionOnTrial; both empty
    where nothing is on trial."""

    status: VersionStatus = field(default_factory=VersionStatus)
    reason: MaybeReason = ""
    message: str = ""
    events: tuple[Event, ...] = ()

    @property
    def on_trial(self) -> bool:
        return self.status.phase in ON_TRIAL

    @property
    def held(self) -> bool:
        return self.reason == Reason.NO_ROOM_TO_SURGE

    @property
    def rejected(self) -> bool:
        return self.status.phase == "Rejected"


Rule = Callable[[VersionView], Version | None]


def next_version(view: VersionView) -> Version:
    """Whether to try a new model, to go on, to promote or to reject it: the first rule that has something to say
    decides.

    Deciding again on the same facts changes nothing.
    """
    if view.service.spec.update_policy.side_by_side is None:
        return Version()
    if view.status.candidate == view.asked and view.status.phase in SERVES_BESIDE:
        view = view.with_status(_read(view))
    return next(version for rule in RULES if (version := rule(view)) is not None)


def nothing_to_try(view: VersionView) -> Version | None:
    """The spec asks for what serves, or nothing has served yet; without workers there is nobody to be careful for."""
    serving = view.status.serving
    if view.desired and serving.uri and not _same_version(view.service, serving, view.asked):
        return None
    workers = [w for w in view.main if not w.endpoint.ending]
    proven = bool(workers) and all(w.endpoint.current and w.endpoint.ready for w in workers)
    known = view.asked if serving.uri or proven or not view.desired else ModelSource()
    return Version(VersionStatus(serving=known, handled_request=view.status.handled_request))


def begin(view: VersionView) -> Version | None:
    """A model that has not been tried. What was asked for before is about another one."""
    if view.status.candidate == view.asked and view.status.phase:
        return None
    policy = view.service.spec.update_policy
    strategy = "Surge" if view.scaled else resting_strategy(policy, view.desired)
    status = VersionStatus(
        view.status.serving,
        view.asked,
        "Starting",
        strategy,
        started_at=view.now,
        phase_started_at=view.now,
        handled_request=view.service.request,
    )
    shares = "the workers" if view.service.spec.route is None else "the workers and of the requests through the Gateway"
    message = f"{view.asked.uri} is tried beside {view.status.serving.uri}, by {view.policy.weight} % of {shares}"
    return Version(status, Reason.STARTING, message, (Event(Reason.VERSION_ON_TRIAL, message),))


def stays_rejected(view: VersionView) -> Version | None:
    """Until the spec asks for another model."""
    return Version(view.status) if view.status.phase == "Rejected" else None


def aborted_by_a_person(view: VersionView) -> Version | None:
    """Also while it is being promoted."""
    return _reject(view, Reason.DECISION_ABORT, "a person has aborted it") if view.request == ABORT else None


def is_the_same_model(view: VersionView) -> Version | None:
    """Two addresses of one model, as its first worker has found."""
    old, new = _digests(view.main), _digests(view.trial)
    if view.status.phase not in SERVES_BESIDE or len(new) != 1 or old != new:
        return None
    return _promote(view, "it is the model that serves already, at another address")


def a_worker_cannot_serve_it(view: VersionView) -> Version | None:
    """Waiting will not help where the bundle itself is at fault."""
    if view.status.phase not in SERVES_BESIDE:
        return None
    for worker in view.trial:
        reason, message = worker.trouble
        if reason and worker.endpoint.current and reason in STALLING:
            return _reject(view, reason, f"{worker.endpoint.name}: {message}")
    return None


def a_worker_restarted(view: VersionView) -> Version | None:
    """One that has served and then died: of the model, as nothing else is new about it."""
    if view.status.phase not in SERVES_BESIDE:
        return None
    for worker in view.trial:
        if worker.endpoint.restarts > view.status.restarts.get(worker.endpoint.uid, worker.endpoint.restarts):
            return _reject(view, Reason.WORKER_RESTARTED, f"{worker.endpoint.name} restarted after it had served")
    return None


def a_gate_rejects(view: VersionView) -> Version | None:
    if view.status.phase not in SERVES_BESIDE:
        return None
    rejected = next((gate for gate in view.status.gates if gate.state == "Rejected"), None)
    if rejected is None:
        return None
    return _reject(view, REJECTIONS.get(rejected.name, Reason.FAILURES_REJECTED), rejected.message)


def promotion_is_complete(view: VersionView) -> Version | None:
    """Once every main worker serves the new version, those of the trial are needed no more."""
    if view.status.phase != "Promoting":
        return None
    workers = [w for w in view.main if not w.endpoint.ending]
    done = sum(w.endpoint.ready and w.endpoint.current for w in workers)
    if done < len(workers) or done < view.split.n_main:
        return Version(view.status, Reason.PROMOTING, f"{done} of {view.split.n_main} workers follow {view.asked.uri}")
    message = f"{view.asked.uri} serves all traffic ({view.status.message})"
    status = VersionStatus(view.asked, handled_request=view.status.handled_request)
    return Version(status, events=(Event(Reason.VERSION_PROMOTED, message),))


def wait_for_its_workers(view: VersionView) -> Version | None:
    """Besides the others, or in place of some where there is no room and the others can do without."""
    status = view.status
    if status.phase != "Starting":
        return None
    if view.serves_beside:
        base = _tallies(view)
        status = replace(
            status, phase="Comparing", phase_started_at=view.now, no_room_at=None, base=base, compared_since_at=view.now
        )
        return Version(status, Reason.COMPARING, _progress(view.with_status(status)))
    return _wait_for_room(view)


def rest_and_compare(view: VersionView) -> Version | None:
    """For the pause at least, and until a harmful version would have shown itself."""
    if view.status.phase != "Comparing":
        return None
    passed = all(gate.state == "Clear" for gate in view.status.gates)
    if passed and view.serves_beside and view.since(view.status.phase_started_at) >= view.policy.pause_seconds:
        if view.policy.promotion == "Automatic" or view.request == PROMOTE:
            return _promote(view, _figures(view.status.gates))
        status = replace(
            view.status,
            phase="AwaitingPromotion",
            phase_started_at=view.now,
            base=_tallies(view),
            compared_since_at=view.now,
        )
        message = (
            f"passed ({_figures(view.status.gates)}); `offramp promote {view.service.name}` promotes it, `offramp "
            "abort` rejects it"
        )
        return Version(replace(status, message=message), Reason.AWAITING_PROMOTION, message)
    if view.waited() > view.policy.pause_seconds + view.policy.deadline_seconds:
        return _reject(
            view,
            Reason.INCONCLUSIVE,
            f"not proven {view.policy.deadline_seconds:g} s after its pause: {_progress(view)}",
        )
    return Version(view.status, Reason.COMPARING, _progress(view))


def wait_for_a_person(view: VersionView) -> Version | None:
    if view.status.phase != "AwaitingPromotion":
        return None
    if view.request == PROMOTE:
        return _promote(view, "a person has promoted it")
    status = view.status
    if view.since(status.compared_since_at) >= WINDOW_SECONDS:
        status = replace(status, base=_tallies(view), compared_since_at=view.now)
    return Version(status, Reason.AWAITING_PROMOTION, status.message)


RULES: tuple[Rule, ...] = (
    nothing_to_try,
    begin,
    stays_rejected,
    aborted_by_a_person,
    is_the_same_model,
    a_worker_cannot_serve_it,
    a_worker_restarted,
    a_gate_rejects,
    promotion_is_complete,
    wait_for_its_workers,
    rest_and_compare,
    wait_for_a_person,
)


def _reject(view: VersionView, reason: AnyReason, message: str) -> Version:
    status = VersionStatus(
        view.status.serving,
        view.asked,
        "Rejected",
        gates=view.status.gates,
        reason=reason,
        message=message,
        started_at=view.status.started_at,
        phase_started_at=view.now,
        handled_request=view.service.request,
    )
    event_message = f"{view.asked.uri}: {message}; {view.status.serving.uri} goes on serving"
    return Version(status, events=(Event(Reason.VERSION_REJECTED, event_message, warning=True),))


def _promote(view: VersionView, why: str) -> Version:
    status = replace(
        view.status,
        phase="Promoting",
        phase_started_at=view.now,
        message=why,
        no_room_at=None,
        base={},
        restarts={},
        compared_since_at=None,
        handled_request=view.service.request,
    )
    return Version(status, Reason.PROMOTING, f"the other workers follow {view.asked.uri}: {why}")


def _wait_for_room(view: VersionView) -> Version:
    """What an update of workers would do about room, asked as one: the main workers are the old ones."""
    status, policy = view.status, view.service.spec.update_policy
    if view.scaled:
        policy = replace(policy, type="Availability")
    asked = UpdateView(
        UpdateStatus(status.strategy, status.no_room_at),
        policy,
        (*(replace(w, endpoint=replace(w.endpoint, current=False)) for w in view.main), *view.trial),
        view.desired,
        view.utilisation,
        view.now,
        view.watched_since,
    )
    found = next_update(asked)
    refused, how = asked.refused, found.status.strategy
    status = replace(
        status,
        strategy=how if how == "Surge" or how == "Replace" else status.strategy,  # noqa: PLR1714 - narrows
        no_room_at=found.status.no_room_at,
        phase_started_at=view.now if status.no_room_at is not None and refused is None else status.phase_started_at,
    )
    ready = f"{sum(w.endpoint.ready for w in view.trial)} of {view.split.n_trial} workers of {view.asked.uri} are ready"
    if refused is not None and found.reason in (Reason.WAITING_FOR_ROOM, Reason.NO_ROOM_TO_SURGE):
        message = f"{ready}; no room: {refused.endpoint.name}: {refused.endpoint.failure}"
        if not found.held:
            return Version(status, Reason.WAITING_FOR_ROOM, message)
        message += "; free room, raise the quota, or go back to the old model"
        before = next(
            (c.reason for c in view.service.status.conditions if c.type == ConditionType.VERSION_ON_TRIAL), ""
        )
        events = () if before == Reason.NO_ROOM_TO_SURGE else (Event(Reason.NO_ROOM_TO_SURGE, message, warning=True),)
        return Version(status, Reason.NO_ROOM_TO_SURGE, message, events)
    if refused is None and view.with_status(status).waited() > view.policy.deadline_seconds:
        failure = next((f": {w.endpoint.name}: {w.trouble[1]}" for w in view.trial if w.trouble[1]), "")
        return _reject(view, Reason.START_TIMEOUT, f"not ready within {view.policy.deadline_seconds:g} s{failure}")
    return Version(status, Reason.STARTING, ready)


# --- the comparison --------------------------------------------------------------------------------


def _read(view: VersionView) -> VersionStatus:
    """The status with what the gates read now, and which workers of the new version have served."""
    status = view.status
    seen = {
        w.endpoint.uid: w.endpoint.restarts
        for w in view.trial
        if w.endpoint.ready and w.endpoint.uid not in status.restarts
    }
    status = replace(status, restarts={**status.restarts, **seen}) if seen else status
    if status.phase == "Starting":
        return status
    tallies = _tallies(view)
    shrunk = {boot: tally.at_most(tallies[boot]) if boot in tallies else tally for boot, tally in status.base.items()}
    status = replace(status, base=shrunk)
    gates = read_gates(
        view, old=_since(shrunk, tallies, _boots(view.main)), new=_since(shrunk, tallies, _boots(view.trial))
    )
    states = tuple(gate.state for gate in gates)
    news = (
        states != tuple(gate.state for gate in status.gates)
        or view.since(status.gates_read_at) >= GATES_READ_EVERY_SECONDS
    )
    # Where the gates stand still there is nothing to tell, however long ago they were told.
    return replace(status, gates=gates, gates_read_at=view.now) if news and gates != status.gates else status


def read_gates(view: VersionView, *, old: VersionTally, new: VersionTally) -> tuple[GateStatus, ...]:
    """What may be held against the new version.

    *Failures*: batches that fail, against 1 % or twice the other version's share. *Objective*: requests that were
    refused or late, against what the latency objective allows or 1.5 times the other version's share, because both have
    the same load: a burst that nobody could serve is not the new version's fault.

    Notes
    -----
    Requests of a batch are late together, so they count as so many independent ones as there are batches of the size
    that a request meets (the design effect of clusters; Kish, Survey Sampling, 1965).
    """
    alpha = (1 - view.service.spec.rollout.confidence) / N_GATES
    failing = failures_allowed(old.batches, old.failed)
    allowed = 1 - view.service.spec.latency_share
    missing = min(MOST_MISSED, max(allowed, WORSE * old.missed / old.came if old.came >= MIN_REQUESTS else 0.0))
    together = max(1.0, new.squares / new.rows) if new.rows else 1.0
    n = int(new.came / together)
    needed = audits_needed(
        budget=_rounded(missing), harmful=HARMFUL_FACTOR * _rounded(missing), alpha=alpha, power=POWER
    )
    return (
        _gate("failures", new.batches, new.failed, p0=failing, alpha=alpha, needed=0, what="batches failed"),
        _gate(
            "objective",
            n,
            min(n, round(new.missed / together)),
            p0=missing,
            alpha=alpha,
            needed=needed,
            what="requests were refused or late",
        ),
    )


def _rounded(rate: float) -> float:
    """Two digits: the exposure is a search, and is remembered by its arguments."""
    return float(f"{rate:.2g}")


def _gate(name: str, n: int, k: int, *, p0: float, alpha: float, needed: int, what: str) -> GateStatus:
    evidence, limit = log_e_value(k, n, p0=p0), math.log(1 / alpha)
    message = f"{k} of {n} {what}, {p0:.2%} are allowed"
    state: GateState = "Rejected" if evidence >= limit else "Undecided" if n < needed else "Clear"
    return GateStatus(
        name, state, n, k, round(p0, 6), round(evidence, 6), round(limit, 6), needed, message, reached(n, needed)
    )


def _since(base: Mapping[str, VersionTally], now: Mapping[str, VersionTally], boots: Iterable[str]) -> VersionTally:
    """What some processes did since the comparison began; one that started later did all of it since."""
    return sum((now[boot] - base.get(boot, VersionTally()) for boot in boots), VersionTally())


def _boots(workers: Iterable[Worker]) -> list[str]:
    return [w.observations.boot_id for w in workers if w.observations is not None and not w.distrusted]


def _tallies(view: VersionView) -> dict[str, VersionTally]:
    """What each worker process has done until now, both versions."""
    limits = {goal.counted_as: bucket_index(goal.seconds) for goal in view.service.spec.time_goals}
    return {
        w.observations.boot_id: _tally(w, limits)
        for w in (*view.main, *view.trial)
        if w.observations is not None and not w.distrusted
    }


def _tally(worker: Worker, limits: Mapping[TimeName, int]) -> VersionTally:
    """``limits`` are the buckets of the objective's times: what lies above one is late. Of several times the one counts
    that most were late for, for nobody knows which requests were late for two."""
    seen = worker.observations
    assert seen is not None
    tally = VersionTally(came=seen.refused, missed=seen.refused)
    for c in (*seen.counts, *seen.held_back):
        sizes = {int(size): sum(buckets.values()) for size, buckets in c.execution.items()}
        tally += VersionTally(
            c.requests,
            max(_above(getattr(c, name), limit) for name, limit in limits.items()),
            c.batches,
            c.failed_batches,
            sum(size * n for size, n in sizes.items()),
            sum(size**2 * n for size, n in sizes.items()),
        )
    return tally


def _above(histogram: Mapping[str, int], limit: int) -> int:
    return sum(n for bucket, n in histogram.items() if int(bucket) > limit)


# --- words -----------------------------------------------------------------------------------------


def _progress(view: VersionView) -> str:
    undecided = [g for g in view.status.gates if g.state == "Undecided"]
    parts = [f"{view.split.n_trial} workers serve {view.asked.uri} beside {view.status.serving.uri}"]
    if view.status.gates:
        parts.append(_figures(view.status.gates))
    parts += [f"{g.n} of {g.needed} with which a harmful version would show itself" for g in undecided]
    return "; ".join(parts)


def _figures(gates: Iterable[GateStatus]) -> str:
    return "; ".join(gate.message for gate in gates)


def _digests(workers: Iterable[Worker]) -> set[str]:
    """Backbones that ready workers serve."""
    return {w.state.backbone_digest for w in workers if w.endpoint.ready and w.state is not None and w.state.ready}
