"""What a service does, where a rollout stands, and how earlier ones ended."""

from __future__ import annotations

from dataclasses import dataclass

from offramp_core.control.objects import Rollout
from offramp_operator.explain.family import Family
from offramp_operator.explain.generation import token_rates
from offramp_operator.explain.savings import measured, saves
from offramp_operator.explain.words import duration, milliseconds, share


def figures(family: Family) -> str:
    """What the service is asked for and does, in one line."""
    spec, seen = family.service.spec, family.service.status.observed
    facts = [
        spec.mode + (", suspended" if spec.suspend else ""),
        *_times(family),
        f"budget {share(spec.max_disagreement)}",
        f"{seen.agreement} agree" if seen.agreement else "",
        token_rates(family),
        _left_early(family),
        f"saves {saves(family)}" if saves(family) else "",
        f"measured {measured(family)}" if measured(family) else "",
    ]
    return ", ".join(filter(None, facts))


def _left_early(family: Family) -> str:
    """How many requests were answered before the model's end; a model that generates has variants in the place of
    exits."""
    rate = family.service.status.observed.exit_rate
    if not rate:
        return ""
    return f"{rate} kept the first variant's answer" if family.service.spec.generates else f"{rate} leave early"


def _times(family: Family) -> list[str]:
    """Each time that was measured, and what is asked of it."""
    spec, seen = family.service.spec, family.service.status.observed
    asked = {goal.counted_as: goal.seconds for goal in spec.time_goals}
    p95s = {"latency": ("", seen.p95)}
    p95s |= {"first_token": ("first token ", seen.first_token_p95), "per_token": ("per token ", seen.per_token_p95)}
    parts = []
    for name, (of, p95) in p95s.items():
        goal = f"objective p{spec.latency_percentile:g} {milliseconds(asked[name])}" if name in asked else ""
        if p95 or goal:
            parts.append(of + ", ".join(filter(None, (f"p95 {p95}" if p95 else "", goal))))
    return parts


def workers_ready(family: Family) -> str:
    """How many workers are ready, and how many run what was published last."""
    workers = family.service.status.workers
    desired = workers.desired if workers.scaled_by else family.service.spec.replicas
    summary = f"{workers.ready} of {desired} ready, {workers.acked} run the newest plan"
    if workers.scaled_by:
        summary += f"; scaled by {workers.scaled_by}"
    return summary if family.workers is not None else f"{summary}; you may not list pods"


def progress(rollout: Rollout, family: Family) -> str:
    """Where a rollout stands: the step, its weight, and the audits of the canary."""
    status, steps = rollout.status, family.service.spec.rollout.steps
    if status.phase not in ("Progressing", "Paused", "AwaitingPromotion"):
        return status.message
    n, k = status.audited
    step = f"step {status.step + 1}/{len(steps)} at {status.weight}%"
    return f"{step}; {k} of {n:,} audits disagreed; {status.message}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rollout as a line of the history. ``audits`` is disagreements/audits, ``took`` how long it took so far."""

    name: str
    from_config: str
    to_config: str
    cause: str
    verdict: str
    reason: str
    audits: str
    took: str
    created_at: float
    message: str


def attempts(family: Family, now: float) -> list[Attempt]:
    """All rollouts that are remembered, newest first."""
    return [_attempt(rollout, now) for rollout in reversed(family.rollouts)]


def _attempt(rollout: Rollout, now: float) -> Attempt:
    status = rollout.status
    n, k = status.audited
    took = duration((status.finished_at or now) - status.started_at) if status.started_at is not None else ""
    return Attempt(
        rollout.name,
        rollout.from_config,
        rollout.to_config,
        rollout.cause,
        status.verdict or status.phase,
        status.reason,
        f"{k}/{n}",
        took,
        rollout.created_at,
        status.message,
    )
