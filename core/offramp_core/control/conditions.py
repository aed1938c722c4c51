"""What the user is told: conditions (kstatus style), figures, and one-line summaries.

Ready is always present. Reconciling and Stalled speak of user generations only and are absent otherwise, so
background tuning never disturbs GitOps health.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from offramp_core.control.codec import format_time
from offramp_core.control.objects import (
    Condition,
    ConditionStatus,
    Config,
    ObservedFigures,
    PinStatus,
    PoolStatus,
    RampSetStatus,
    Rollout,
    Service,
    VersionStatus,
    WorkersStatus,
)
from offramp_core.control.routes import alone, rate, route_uses
from offramp_core.control.snapshot import ClassShare, Scaling, Trouble, Worker
from offramp_core.control.spec import Autoscaling
from offramp_core.control.stable.audit import Audits, at_one_rate, worth_one
from offramp_core.control.workers.capacity import Capacity
from offramp_core.control.workers.delivery import STALLING, fetching
from offramp_core.control.workers.pool_plan import in_short
from offramp_core.control.workers.recreate import interruption
from offramp_core.control.workers.update import Update
from offramp_core.control.workers.versions import Version
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.protocol import TIMES, ArmCounts, RouteCounts, TimeName
from offramp_core.reasons import AnyReason, ConditionType, MaybeReason, Reason
from offramp_core.records import ExitCosts
from offramp_core.sketch import SecondsSketch, merge_reports

OBSERVED_EVERY_SECONDS = 30.0
MIN_SAMPLES = 100
Times = Mapping[TimeName, SecondsSketch]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions are derived from. ``quarantined`` says why workers are not pooled, by name; ``foreign`` are
    those of another model. ``costs_time`` says how the stable plan costs more time than it saves, where it serves all
    the same."""

    service: Service
    workers: tuple[Worker, ...]
    acked: int
    stable: Config | None
    counts: tuple[ArmCounts, ...]
    pin: PinStatus
    rollout: Rollout | None
    now: float
    quarantined: Mapping[str, str] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    costs_time: str = ""
    update: Update = field(default_factory=Update)
    scaling: Scaling | None = None
    capacity: Capacity = field(default_factory=Capacity)
    ramp_sets: RampSetStatus = field(default_factory=RampSetStatus)
    version: Version = field(default_factory=Version)
    route: Trouble | None = None
    worker_class: str = ""
    class_trouble: Trouble | None = None
    turn: Trouble | None = None
    routes: tuple[RouteCounts, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    shares: Mapping[str, ClassShare] = field(default_factory=dict)

    @property
    def desired(self) -> int:
        return self.service.spec.replicas if self.scaling is None else self.scaling.desired

    @property
    def ready(self) -> tuple[Worker, ...]:
        return tuple(w for w in self.workers if w.endpoint.ready)

    @property
    def core(self) -> tuple[Worker, ...]:
        """Ready workers that the service's Service sends requests to: all but those at the edge."""
        return tuple(w for w in self.ready if not w.endpoint.at_edge)

    @property
    def failure(self) -> tuple[MaybeReason, str]:
        """(reason, message) of the first worker that cannot run, or empty. One that merely waits comes after those that
        nodes rejected."""
        for worker in sorted(self.workers, key=lambda w: w.endpoint.failure_reason != Reason.REJECTED_BY_NODE):
            reason, message = worker.trouble
            if reason:
                return reason, f"{worker.endpoint.name}: {message}"
        return "", ""

    @property
    def fetching(self) -> str:
        """How far a worker is that fetches its bundle, or empty."""
        return fetching(self.workers)

    @property
    def settled(self) -> bool:
        """Whether the current user generation is served as asked: all workers current, ready and acknowledged, the pin
        judged. Those of a pool that has no place for them are not waited for, as long as others serve."""
        without = [w for w in self.workers if w.endpoint.pool and w.endpoint.finds_no_place] if self.ready else []
        n, asked = len(self.workers) - len(without), self.desired - len(without)
        serving = len(self.ready) == n == asked and all(w.endpoint.current for w in self.workers)
        return serving and self.acked == len(self.ready) and self.pin_judged and not self.version.on_trial

    @property
    def pin_judged(self) -> bool:
        return self.service.spec.mode != "Pinned" or (
            self.pin.generation == self.service.generation and self.pin.verdict != ""
        )

    @property
    def pin_rejected(self) -> bool:
        return self.service.spec.mode == "Pinned" and self.pin_judged and self.pin.verdict == "Rejected"


def workers_status(facts: Facts) -> WorkersStatus:
    desired, ready = facts.desired, len(facts.ready)
    scaled_by = "" if facts.scaling is None else facts.scaling.by
    return WorkersStatus(
        desired,
        ready,
        facts.acked,
        f"{ready}/{desired}",
        scaled_by,
        tuple(sorted(facts.quarantined)),
        class_name=facts.worker_class,
    )


def conditions(facts: Facts, *, settled_generation: int, observed: tuple[Times, Audits]) -> tuple[Condition, ...]:
    """All conditions, transition times carried over where the status did not change."""
    wanted = [
        _ready(facts),
        _workers_available(facts),
        _latency(facts, observed[0]),
        _accuracy(facts, observed[1]),
        _no_exit_capacity(facts),
        *_quarantined(facts),
        *_devices(facts),
        *_costs_time(facts),
        *_training(facts),
        *_updating(facts),
        *_on_trial(facts),
        *_routed(facts),
        *_classed(facts),
        *_pooled(facts),
        *_deprecated(facts),
        *_autoscaling(facts),
        *_user_generation(facts, settled_generation),
    ]
    before = {c.type: c for c in facts.service.status.conditions}
    return tuple(_carry(before.get(c.type), c, facts) for c in wanted)


def _carry(before: Condition | None, now: Condition, facts: Facts) -> Condition:
    since = before.last_transition_at if before is not None and before.status == now.status else facts.now
    return replace(now, observed_generation=facts.service.generation, last_transition_at=since)


def _condition(kind: ConditionType, status: ConditionStatus, reason: AnyReason, message: str) -> Condition:
    return Condition(kind, status, reason, message)


def _ready(facts: Facts) -> Condition:
    if facts.desired == 0 and facts.shares:
        lacking = "; ".join(in_short(facts.service, facts.pools, facts.shares))
        still = "other services still have the workers of its WorkerClass"
        return _condition(ConditionType.READY, "False", Reason.WORKER_CLASS_FULL, lacking or still)
    if facts.desired == 0:
        by = "replicas is 0" if facts.scaling is None else f"{facts.scaling.by} asks for none"
        kept = f"; workers will start under {facts.stable.name}" if facts.stable is not None else ""
        return _condition(ConditionType.READY, "False", Reason.SCALED_TO_ZERO, by + kept)
    if facts.core and facts.stable is not None:
        if message := _unloaded(facts.core):
            return _condition(ConditionType.READY, "True", Reason.UNLOADED, f"{message}, under {facts.stable.name}")
        return _condition(ConditionType.READY, "True", Reason.SERVING, f"serving under {facts.stable.name}")
    return _condition(ConditionType.READY, "False", *_not_ready(facts))


def _not_ready(facts: Facts) -> tuple[AnyReason, str]:
    """Why nobody serves though workers are asked for."""
    edge = facts.service.spec.edge
    if edge is not None and facts.desired == facts.service.spec.edge_replicas:
        why = f"replicas is 0 in every pool but {edge.pool}, the edge, whose core they are: raise it in one of them"
        return Reason.SCALED_TO_ZERO, why
    reason, message = facts.failure
    if not reason and facts.fetching:
        return Reason.FETCHING_BUNDLE, facts.fetching
    under = f"; workers start under {facts.stable.name}" if facts.stable is not None else ""
    return reason or Reason.STARTING, message or f"no worker is ready yet{under}"


def _unloaded(workers: Sequence[Worker]) -> str:
    """Where the bundle is in no worker's memory, when the next request would have it."""
    loads = [worker.endpoint.loads_in for worker in workers]
    known = [seconds for seconds in loads if seconds is not None]
    if len(known) < len(loads):
        return ""
    within = f" in about {math.ceil(max(known))} s" if any(known) else ""
    return f"Unloaded, loads on the next request{within}"


def _workers_available(facts: Facts) -> Condition:
    desired, ready = facts.desired, len(facts.ready)
    if ready >= desired:
        return _condition(
            ConditionType.WORKERS_AVAILABLE, "True", Reason.ALL_READY, f"{ready} of {desired} workers ready"
        )
    reason, message = facts.failure
    message = message or facts.fetching
    return _condition(
        ConditionType.WORKERS_AVAILABLE,
        "False",
        reason or (Reason.FETCHING_BUNDLE if facts.fetching else Reason.STARTING),
        f"{ready} of {desired} workers ready" + (f"; {message}" if message else ""),
    )


def _latency(facts: Facts, times: Times) -> Condition:
    """Whether each time of the objective is kept. One that is not is named first, and one missed time is enough."""
    spec = facts.service.spec
    needed = max(MIN_SAMPLES, math.ceil(round(1 / (1 - spec.latency_share), 6)))  # one beyond the percentile
    missed, unknown, met = list[str](), list[str](), list[str]()
    for goal in spec.time_goals:
        seen = times.get(goal.counted_as, SecondsSketch())
        text = f"{goal.of} p{spec.latency_percentile:g} against an objective of {format_seconds(goal.seconds)}".strip()
        if seen.n < needed:
            unknown.append(f"{needed} requests are needed for a statement" + (f" on {goal.of}" if goal.of else ""))
        elif (seen.quantile(spec.latency_share) or 0.0) <= goal.seconds:
            met.append(text)
        else:
            missed.append(text)
    kind = ConditionType.LATENCY_OBJECTIVE_MET
    if missed:
        message = f"{', '.join(missed)}; the other times are kept" if met else ", ".join(missed)
        return _condition(kind, "False", Reason.OBJECTIVE_MISSED, message)
    if unknown:
        return _condition(kind, "Unknown", Reason.INSUFFICIENT_SAMPLES, ", ".join(unknown))
    return _condition(kind, "True", Reason.WITHIN_OBJECTIVE, ", ".join(met))


def _accuracy(facts: Facts, audits: Audits) -> Condition:
    spec = facts.service.spec
    if facts.stable is not None and facts.stable.plan.exits_off:
        return _condition(
            ConditionType.ACCURACY_WITHIN_BUDGET,
            "True",
            Reason.EXITS_OFF,
            "every request is answered by the model itself",
        )
    if audits.n < MIN_SAMPLES:
        return _condition(
            ConditionType.ACCURACY_WITHIN_BUDGET,
            "Unknown",
            Reason.INSUFFICIENT_SAMPLES,
            f"{MIN_SAMPLES} audited requests are needed for a statement",
        )
    effect = worth_one(facts.service.status.tuning, rate=audits.rate)
    evidence = log_e_value(audits.k, audits.n, p0=spec.max_disagreement, design_effect=effect)
    broken = evidence >= np.log(1 / (1 - spec.confidence))
    text = f"budget {spec.max_disagreement:.2%}"
    return _condition(
        ConditionType.ACCURACY_WITHIN_BUDGET,
        "False" if broken else "True",
        Reason.BUDGET_EXCEEDED if broken else Reason.WITHIN_BUDGET,
        text,
    )


def _no_exit_capacity(facts: Facts) -> Condition:
    """Whether the ready workers carry the peak of the last hour when exits go off."""
    kind, capacity = ConditionType.NO_EXIT_CAPACITY, facts.capacity.status
    if facts.desired == 0:
        return _condition(kind, "Unknown", Reason.SCALED_TO_ZERO, "no worker is wanted")
    if facts.capacity.enough is None:
        return _condition(
            kind, "Unknown", Reason.CAPACITY_UNKNOWN, "no worker has reported yet how long its model takes"
        )
    spec = facts.service.spec
    n, whose = len(facts.core), "" if spec.edge is None else " of the core"
    carried = (
        f"{n} ready workers{whose} answer about {format_rate(n * capacity.worker_rate)} "
        f"requests/s {'with the model alone' if spec.generates else 'without exits'}"
    )
    if capacity.peak_rate <= 0:
        return _condition(kind, "True", Reason.SUFFICIENT, f"{carried}; none came in the last hour")
    peak = f"the peak of the last hour was about {format_rate(capacity.peak_rate)}"
    if facts.capacity.enough:
        return _condition(kind, "True", Reason.SUFFICIENT, f"{carried}; {peak}")
    if facts.stable is not None and facts.stable.plan.exits_off:
        return _condition(
            kind, "False", Reason.OVERLOADED, f"{spec.off_now}: {carried}, and {peak}; {_more_workers(facts)}"
        )
    return _condition(
        kind,
        "False",
        Reason.EXITS_OFF_WOULD_OVERLOAD,
        f"{carried}, but {peak}: if {'the model has to answer alone' if spec.generates else 'exits go off'}, requests "
        f"wait or are refused; {_more_workers(facts)}",
    )


def _more_workers(facts: Facts) -> str:
    """The next step towards as many workers as the peak needs."""
    spec, needed = facts.service.spec, max(facts.capacity.status.needed, len(facts.core) + 1)
    desired, wanted = facts.desired - spec.edge_replicas, spec.autoscaling
    if desired >= needed:
        return f"{desired} are wanted, see WorkersAvailable for those that are missing"
    if facts.pools and not spec.pools[0].fixed:
        return "the plan of the pools adds workers up to their maxWorkers"
    if facts.pools:
        beside = "" if spec.edge is None else f" beside {spec.edge.pool}"
        return f"raise replicas in spec.pools, to {needed} in all{beside}"
    if facts.scaling is None:
        return f"raise spec.replicas to {needed}"
    if wanted is None or facts.scaling.failure_reason == Reason.ANOTHER_AUTOSCALER:
        return f"raise minReplicas of {facts.scaling.by} to {needed}"
    return _more_by_own_autoscaler(wanted, needed, facts.capacity.status.floor)


def _more_by_own_autoscaler(wanted: Autoscaling, needed: int, floor: int) -> str:
    if needed > wanted.max_replicas:
        return f"raise autoscaling.maxReplicas to {needed}"
    if wanted.no_exit_floor == "None":
        return "set autoscaling.noExitFloor to Reserve or PreScale, or raise autoscaling.minReplicas"
    if wanted.no_exit_floor == "PreScale" and floor < needed:
        return (
            "PreScale adds workers when a rollout begins or evidence comes near its bound; Reserve keeps them at "
            "all times"
        )
    return f"the autoscaler is to keep {floor} at least"


def _quarantined(facts: Facts) -> list[Condition]:
    """Said only while there is one, like other conditions that are bad news."""
    if not facts.quarantined:
        return []
    listed = "; ".join(f"{name}: {why}" for name, why in sorted(facts.quarantined.items()))
    reason = Reason.FOREIGN_MODEL if set(facts.quarantined) <= facts.foreign else Reason.IMPOSSIBLE_COUNTS
    return [_condition(ConditionType.WORKERS_QUARANTINED, "True", reason, f"{listed}; what they report is not pooled")]


def _devices(facts: Facts) -> list[Condition]:
    """Said only while the platform reports devices of workers as unhealthy, whether these still serve or not."""
    found = [w.endpoint for w in facts.workers if w.endpoint.unhealthy]
    if not found:
        return []
    unhealthy = (f"{e.name} {'serves' if e.ready else 'does not serve'} with {e.unhealthy}" for e in found)
    remedy = "see to the device, its driver and its plugin there, or delete the pod where another device is free"
    message = f"{'; '.join(unhealthy)}; {remedy}"
    return [_condition(ConditionType.DEVICES_HEALTHY, "False", Reason.DEVICE_UNHEALTHY, message)]


def _costs_time(facts: Facts) -> list[Condition]:
    """A pinned plan that the holdback shows to be a loss."""
    if not facts.costs_time:
        return []
    message = f"{facts.costs_time}; it is pinned, so it stays"
    return [_condition(ConditionType.EXITS_COST_TIME, "True", Reason.MEASURED_BY_HOLDBACK, message)]


def _training(facts: Facts) -> list[Condition]:
    """Said only while ramps cannot be trained on live traffic although the spec asks for it."""
    sets = facts.ramp_sets
    if not sets.failure:
        return []
    if sets.state == "NoRampStore":
        return [_condition(ConditionType.RAMP_TRAINING, "False", Reason.NO_RAMP_STORE, sets.failure)]
    if sets.state == "Training":
        return [_condition(ConditionType.RAMP_TRAINING, "False", Reason.TRAINING_WAITS, sets.failure)]
    due = sets.next_attempt_at
    again = f"; the next attempt is due at {format_time(due)}" if due is not None else ""
    return [_condition(ConditionType.RAMP_TRAINING, "False", Reason.TRAINING_FAILED, sets.failure + again)]


def _updating(facts: Facts) -> list[Condition]:
    """Said while workers are being replaced, also where the operator's administrator changed what they run, and after
    an interruption how long it was."""
    update = facts.update
    if update.reason:
        return [_condition(ConditionType.WORKERS_UPDATING, "True", update.reason, update.message)]
    if facts.turn is not None:
        return [_condition(ConditionType.WORKERS_UPDATING, "True", facts.turn.reason, facts.turn.message)]
    if update.status.silent_seconds:
        message = interruption(update.status)
        return [_condition(ConditionType.WORKERS_UPDATING, "False", Reason.RECREATED, message)]
    return []


def _on_trial(facts: Facts) -> list[Condition]:
    """Said only while two versions of the model serve side by side."""
    version = facts.version
    if not (version.on_trial and version.reason):
        return []
    return [_condition(ConditionType.VERSION_ON_TRIAL, "True", version.reason, version.message)]


def _routed(facts: Facts) -> list[Condition]:
    """Said only while requests through a Gateway are not shared by weight although the spec asks for it."""
    trouble = facts.route
    return (
        [] if trouble is None else [_condition(ConditionType.ROUTE_ACCEPTED, "False", trouble.reason, trouble.message)]
    )


def _classed(facts: Facts) -> list[Condition]:
    """Said only while the WorkerClass that the spec names cannot be used."""
    trouble = facts.class_trouble
    if trouble is None:
        return []
    return [_condition(ConditionType.WORKER_CLASS_USABLE, "False", trouble.reason, trouble.message)]


def _pooled(facts: Facts) -> list[Condition]:
    """Said only while workers of a pool find no place, or other services have those that are needed."""
    spec = facts.service.spec
    index = {pool.name: i for i, pool in enumerate(spec.pools)}
    lacking = [
        f"spec.pools[{index[pool.name]}] ({pool.name}): {pool.ready} of {pool.desired} workers ready; {pool.message}"
        for pool in facts.pools
        if pool.message
    ]
    reason = Reason.POOL_WITHOUT_PLACE if lacking else Reason.WORKER_CLASS_FULL
    lacking += in_short(facts.service, facts.pools, facts.shares)
    return [_condition(ConditionType.POOLS_AVAILABLE, "False", reason, "; ".join(lacking))] if lacking else []


def _deprecated(facts: Facts) -> list[Condition]:
    """Said only while the spec has fields that the next release will not read."""
    found = "; ".join(facts.service.spec.deprecated)
    return [_condition(ConditionType.DEPRECATED_FIELDS, "True", Reason.FIELD_DEPRECATED, found)] if found else []


def _autoscaling(facts: Facts) -> list[Condition]:
    """Said only while an autoscaler cannot do its work."""
    scaling = facts.scaling
    if scaling is None or not scaling.failure_reason:
        return []
    return [_condition(ConditionType.AUTOSCALING_ACTIVE, "False", scaling.failure_reason, scaling.failure)]


def _user_generation(facts: Facts, settled_generation: int) -> list[Condition]:
    if facts.pin_rejected:
        return [_condition(ConditionType.STALLED, "True", Reason.PIN_REJECTED, facts.pin.message)]
    if facts.version.rejected:
        return [_condition(ConditionType.STALLED, "True", Reason.VERSION_REJECTED, _rejection(facts.version.status))]
    reason, message = facts.failure
    if settled_generation != facts.service.generation:
        pending = [] if facts.pin_judged else ["the pin is being judged"]
        blocked: Update | Version = facts.version if facts.version.on_trial else facts.update
        held = blocked.held
        if held or facts.version.on_trial:
            pending.append(blocked.message)
        elif not (len(facts.ready) == facts.desired and all(w.endpoint.current for w in facts.workers)):
            pending.append(
                message
                or facts.fetching
                or f"{len(facts.ready)} of {facts.desired} workers are ready with this generation"
            )
        why = "; ".join(pending) or "waiting for every worker to acknowledge"
        failed = blocked.reason == Reason.RECREATE_FAILED
        stopped = Reason.RECREATE_FAILED if failed else Reason.NO_ROOM_TO_SURGE
        reconciling = _condition(ConditionType.RECONCILING, "True", stopped if held else Reason.PROGRESSING, why)
        if reason and reason in STALLING:
            return [reconciling, _condition(ConditionType.STALLED, "True", reason, message)]
        return [reconciling, *([_condition(ConditionType.STALLED, "True", stopped, why)] if held else [])]
    return []


def _rejection(status: VersionStatus) -> str:
    """Why the version that the spec asks for does not serve, and what to do."""
    return (
        f"{status.candidate.uri}: {status.message}; {status.serving.uri} goes on serving. Ask for another model or "
        "for that one again; "
        "without updatePolicy.sideBySide this one serves all the same"
    )


def observe(
    facts: Facts, ramp_ids: tuple[str, ...], costs: ExitCosts, *, audits: float | None = None
) -> tuple[ObservedFigures, Times, Audits]:
    """Figures of the stable plan, and the numbers behind them.

    ``ramp_ids`` and ``costs`` are those of the plan's precision, ``audits`` what audits took, as a share of the model's
    own time.
    """
    if facts.stable is None:
        return ObservedFigures(), {}, Audits()
    mine = [c for c in facts.counts if c.plan_hash == facts.stable.plan.content_hash]
    times = {name: merge_reports(getattr(c, name) for c in mine) for name in TIMES}
    seen = at_one_rate(mine)
    before = facts.service.status.observed
    if before.taken_at is not None and facts.now - before.taken_at < OBSERVED_EVERY_SECONDS:
        return before, times, seen
    requests = sum(c.requests for c in mine)
    exits = {ramp: sum(c.exits.get(ramp, 0) for c in mine) for ramp in ramp_ids}
    figures = ObservedFigures(
        p50=format_seconds(times["latency"].quantile(0.5)),
        p95=format_seconds(times["latency"].quantile(0.95)),
        first_token_p50=format_seconds(times["first_token"].quantile(0.5)),
        first_token_p95=format_seconds(times["first_token"].quantile(0.95)),
        per_token_p50=format_seconds(times["per_token"].quantile(0.5)),
        per_token_p95=format_seconds(times["per_token"].quantile(0.95)),
        tokens_per_second=rate(facts.routes),
        model_tokens_per_second=alone(facts.routes),
        routes=route_uses(facts.routes),
        agreement=f"{1 - seen.k / seen.n:.1%}" if seen.n >= MIN_SAMPLES else "",
        exit_rate=f"{sum(exits.values()) / requests:.0%}" if requests else "",
        savings=_saved(facts.stable, exits, requests, costs, ramp_ids, audits=audits or 0.0),
        audits="" if audits is None else f"{audits:.0%}",
        samples=seen.n,
        taken_at=facts.now,
    )
    unchanged = replace(figures, taken_at=before.taken_at, samples=before.samples) == before
    return (before if unchanged else figures), times, seen


def _saved(
    stable: Config, exits: dict[str, int], requests: int, costs: ExitCosts, ramp_ids: tuple[str, ...], *, audits: float
) -> str:
    """Compute saved: measured exit shares at profiled seconds, against the fp32 model without ramps, less what
    ``audits`` took."""
    active = [ramp.id for ramp in stable.plan.ramps if ramp.id in ramp_ids]
    if not requests or len(active) != len(stable.plan.ramps):
        return ""
    leave = costs.leave_seconds([ramp_ids.index(r) for r in active])
    left = np.array([exits[r] for r in active], dtype=np.float64)
    mean = (left @ leave[:-1] + (requests - left.sum()) * leave[-1]) / requests
    return f"{1 - mean / costs.baseline_seconds - audits:.0%}"


def format_rate(rate: float) -> str:
    """Requests per second with two significant digits, of which more are not known."""
    digits = float(f"{rate:.2g}")
    return f"{digits:,.0f}" if digits >= 10 else f"{digits:g}"


def format_seconds(seconds: float | None) -> str:
    """Two significant digits with a unit: ``12ms``, ``1.3s``; empty for None."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2g}s"
    return f"{seconds * 1e3:.2g}ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f}ms"
