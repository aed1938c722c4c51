"""What the user is told: conditions (kstatus style), figures, and one-line summaries.

Ready is always present. Reconciling and Stalled speak of user generations only and are absent otherwise, so
background tuning never disturbs GitOps health.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from offramp_core.control.objects import (
    Condition,
    ConditionStatus,
    Config,
    Observed,
    PinStatus,
    Rollout,
    Service,
    WorkersStatus,
)
from offramp_core.control.snapshot import Worker
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.protocol import ArmCounts
from offramp_core.records import ExitCosts
from offramp_core.sketch import SecondsSketch, merge_sketches

OBSERVED_EVERY_SECONDS = 30.0
MIN_SAMPLES = 100
STALLING = frozenset(
    {"InvalidBundle", "InvalidModel", "DigestMismatch", "InvalidSpec", "NameTaken"}
)  # waiting will not help


@dataclass(frozen=True, slots=True)
class Facts:
    """What the conditions are derived from. ``quarantined`` says why workers are not pooled, by name."""

    service: Service
    workers: tuple[Worker, ...]
    acked: int
    stable: Config | None
    counts: tuple[ArmCounts, ...]
    pin: PinStatus
    rollout: Rollout | None
    now: float
    quarantined: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> tuple[Worker, ...]:
        return tuple(w for w in self.workers if w.ready)

    @property
    def failure(self) -> tuple[str, str]:
        """(reason, message) of the first worker that cannot run, or empty."""
        for worker in self.workers:
            if not worker.ready and worker.failure:
                return worker.failure_reason or "WorkerFailed", f"{worker.name}: {worker.failure}"
            if not worker.ready and worker.state is not None and not worker.state.ready and worker.state.message:
                return "InvalidBundle", f"{worker.name}: {worker.state.message}"
        return "", ""

    @property
    def settled(self) -> bool:
        """Whether the current user generation is served as asked: all workers current, ready and acknowledged, the pin judged."""
        spec = self.service.spec
        serving = len(self.ready) == len(self.workers) == spec.replicas and all(w.current for w in self.workers)
        return serving and self.acked == len(self.ready) and self.pin_judged

    @property
    def pin_judged(self) -> bool:
        return self.service.spec.mode != "Pinned" or (
            self.pin.generation == self.service.generation and self.pin.verdict != ""
        )

    @property
    def pin_rejected(self) -> bool:
        return self.service.spec.mode == "Pinned" and self.pin_judged and self.pin.verdict == "Rejected"


def workers_status(facts: Facts) -> WorkersStatus:
    desired, ready = facts.service.spec.replicas, len(facts.ready)
    return WorkersStatus(desired, ready, facts.acked, f"{ready}/{desired}", tuple(sorted(facts.quarantined)))


def conditions(
    facts: Facts, *, settled_generation: int, observed: tuple[SecondsSketch, int, int]
) -> tuple[Condition, ...]:
    """All conditions, transition times carried over where the status did not change."""
    wanted = [
        _ready(facts),
        _workers_available(facts),
        _latency(facts, observed[0]),
        _accuracy(facts, n=observed[1], k=observed[2]),
        *_quarantined(facts),
        *_user_generation(facts, settled_generation),
    ]
    before = {c.type: c for c in facts.service.status.conditions}
    return tuple(_carry(before.get(c.type), c, facts) for c in wanted)


def _carry(before: Condition | None, now: Condition, facts: Facts) -> Condition:
    since = before.last_transition_at if before is not None and before.status == now.status else facts.now
    return replace(now, observed_generation=facts.service.generation, last_transition_at=since)


def _condition(kind: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(kind, status, reason, message)


def _ready(facts: Facts) -> Condition:
    if facts.service.spec.replicas == 0:
        return _condition("Ready", "False", "ScaledToZero", "replicas is 0")
    if facts.ready and facts.stable is not None:
        return _condition("Ready", "True", "Serving", f"serving under {facts.stable.name}")
    reason, message = facts.failure
    return _condition("Ready", "False", reason or "Starting", message or "no worker is ready yet")


def _workers_available(facts: Facts) -> Condition:
    desired, ready = facts.service.spec.replicas, len(facts.ready)
    if ready >= desired:
        return _condition("WorkersAvailable", "True", "AllReady", f"{ready} of {desired} workers ready")
    reason, message = facts.failure
    return _condition(
        "WorkersAvailable",
        "False",
        reason or "Starting",
        f"{ready} of {desired} workers ready" + (f"; {message}" if message else ""),
    )


def _latency(facts: Facts, latency: SecondsSketch) -> Condition:
    spec = facts.service.spec
    if latency.n < MIN_SAMPLES:
        return _condition(
            "LatencyObjectiveMet",
            "Unknown",
            "InsufficientSamples",
            f"{MIN_SAMPLES} requests are needed for a statement",
        )
    seconds = latency.quantile(spec.latency_percentile / 100) or 0.0
    met = seconds <= spec.latency_seconds
    text = f"p{spec.latency_percentile} against an objective of {format_seconds(spec.latency_seconds)}"
    return _condition(
        "LatencyObjectiveMet", "True" if met else "False", "WithinObjective" if met else "ObjectiveMissed", text
    )


def _accuracy(facts: Facts, *, n: int, k: int) -> Condition:
    spec = facts.service.spec
    if facts.stable is not None and facts.stable.plan.exits_off:
        return _condition("AccuracyWithinBudget", "True", "ExitsOff", "every request is answered by the model itself")
    if n < MIN_SAMPLES:
        return _condition(
            "AccuracyWithinBudget",
            "Unknown",
            "InsufficientSamples",
            f"{MIN_SAMPLES} audited requests are needed for a statement",
        )
    broken = log_e_value(k, n, p0=spec.max_disagreement) >= np.log(1 / (1 - spec.confidence))
    text = f"budget {spec.max_disagreement:.2%}"
    return _condition(
        "AccuracyWithinBudget", "False" if broken else "True", "BudgetExceeded" if broken else "WithinBudget", text
    )


def _quarantined(facts: Facts) -> list[Condition]:
    """Said only while there is one, like other conditions that are bad news."""
    if not facts.quarantined:
        return []
    said = "; ".join(f"{name}: {why}" for name, why in sorted(facts.quarantined.items()))
    return [_condition("WorkersQuarantined", "True", "ImpossibleCounts", f"{said}; what they report is not pooled")]


def _user_generation(facts: Facts, settled_generation: int) -> list[Condition]:
    if facts.pin_rejected:
        return [_condition("Stalled", "True", "PinRejected", facts.pin.message)]
    reason, message = facts.failure
    if settled_generation != facts.service.generation:
        pending = [] if facts.pin_judged else ["the pin is being judged"]
        if not (len(facts.ready) == facts.service.spec.replicas and all(w.current for w in facts.workers)):
            pending.append(
                message or f"{len(facts.ready)} of {facts.service.spec.replicas} workers are ready with this generation"
            )
        stalled = (
            [_condition("Stalled", "True", reason, message)]
            if reason in ("InvalidBundle", "InvalidModel", "DigestMismatch")
            else []
        )
        return [
            _condition(
                "Reconciling", "True", "Progressing", "; ".join(pending) or "waiting for every worker to acknowledge"
            ),
            *stalled,
        ]
    return []


def observe(facts: Facts, ramp_ids: tuple[str, ...], costs: ExitCosts) -> tuple[Observed, SecondsSketch, int, int]:
    """Figures of the stable plan, and the raw numbers behind them: (observed, latency sketch, audits, disagreements).

    ``ramp_ids`` and ``costs`` are those of the plan's precision.
    """
    if facts.stable is None:
        return Observed(), SecondsSketch(), 0, 0
    mine = [c for c in facts.counts if c.plan_hash == facts.stable.plan.content_hash]
    latency = merge_sketches(SecondsSketch({int(i): n for i, n in c.latency.items()}) for c in mine)
    audited, disagreed = sum(c.audited for c in mine), sum(c.disagreements for c in mine)
    before = facts.service.status.observed
    if before.taken_at is not None and facts.now - before.taken_at < OBSERVED_EVERY_SECONDS:
        return before, latency, audited, disagreed
    requests = sum(c.requests for c in mine)
    exits = {ramp: sum(c.exits.get(ramp, 0) for c in mine) for ramp in ramp_ids}
    figures = Observed(
        p50=format_seconds(latency.quantile(0.5)),
        p95=format_seconds(latency.quantile(0.95)),
        agreement=f"{1 - disagreed / audited:.1%}" if audited >= MIN_SAMPLES else "",
        exit_rate=f"{sum(exits.values()) / requests:.0%}" if requests else "",
        savings=_saved(facts.stable, exits, requests, costs, ramp_ids),
        samples=audited,
        taken_at=facts.now,
    )
    unchanged = replace(figures, taken_at=before.taken_at, samples=before.samples) == before
    return (before if unchanged else figures), latency, audited, disagreed


def _saved(stable: Config, exits: dict[str, int], requests: int, costs: ExitCosts, ramp_ids: tuple[str, ...]) -> str:
    """Compute saved: measured exit shares at profiled seconds, against the fp32 model without ramps."""
    active = [ramp.id for ramp in stable.plan.ramps if ramp.id in ramp_ids]
    if not requests or len(active) != len(stable.plan.ramps):
        return ""
    leave = costs.leave_seconds([ramp_ids.index(r) for r in active])
    left = np.array([exits[r] for r in active], dtype=np.float64)
    mean = (left @ leave[:-1] + (requests - left.sum()) * leave[-1]) / requests
    return f"{1 - mean / costs.baseline_seconds:.0%}"


def format_seconds(seconds: float | None) -> str:
    """Two significant digits with a unit: ``12ms``, ``1.3s``; empty for None."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.2g}s"
    return f"{seconds * 1e3:.2g}ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f}ms"
