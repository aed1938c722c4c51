"""What each page shows, as values. Pure: a view and a time in, one context out; the same context is the JSON of the
API."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from offramp_core.control.codec import camel, format_time
from offramp_core.control.objects import Rollout, RouteUse
from offramp_core.control.served import Served, served_by
from offramp_core.control.spec import parse_duration
from offramp_core.errors import OfframpError
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import ArmCounts
from offramp_core.reasons import ConditionType, Tone, condition_tone
from offramp_operator.explain.capacity import capacity_facts
from offramp_operator.explain.family import Family
from offramp_operator.explain.health import Verdict, health
from offramp_operator.explain.latency import LatencyFacts, latency
from offramp_operator.explain.network import NetworkFacts, network
from offramp_operator.explain.plans import about
from offramp_operator.explain.pools import PoolRow, plan_facts, pool_rows
from offramp_operator.explain.progress import Attempt, attempts, figures, progress, workers_ready
from offramp_operator.explain.why import GateReading, about_rollout, cooling, pin, readings, serving, tuning, wrong
from offramp_operator.explain.words import ago, milliseconds, share
from offramp_operator.web.board import STALE_SECONDS, View
from offramp_operator.web.curves import CurvePoint

PAGE_SIZE = 50
_WORST_FIRST = {"Degraded": 0, "Progressing": 1, "Healthy": 2}
CANARY_PHASES = ("Progressing", "Paused", "AwaitingPromotion", "Promoting")


@dataclass(frozen=True, slots=True)
class Goal:
    """A promise beside what was measured. ``used`` is the measured share of what is allowed: 1 is the limit, None is
    not known yet."""

    measured: str
    allowed: str
    used: float | None
    state: str

    @property
    def broken(self) -> bool:
        return self.state == "False"


@dataclass(frozen=True, slots=True)
class NamedGoal:
    """A promise by the name that people know it by."""

    name: str
    goal: Goal


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step of a rollout: ``done``, ``now`` or ``ahead``."""

    weight: int
    state: str
    note: str


@dataclass(frozen=True, slots=True)
class LiveRollout:
    """The rollout under way, in a line."""

    name: str
    phase: str
    weight: int
    summary: str
    steps: tuple[StepFacts, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One service at a glance. ``saves`` is less by what ``audits`` take, where that is known; the last
    four are of models that generate."""

    namespace: str
    name: str
    verdict: Verdict
    message: str
    figures: str
    latency: Goal
    disagreement: Goal
    leave_early: str
    saves: str
    audits: str
    workers: str
    rollout: LiveRollout | None
    token_times: tuple[NamedGoal, ...] = ()
    generates: bool = False
    tokens_per_second: str = ""
    model_tokens_per_second: str = ""


@dataclass(frozen=True, slots=True)
class OverviewPage:
    """All services, worst first. ``found`` counts those that match ``query``; ``rows`` are those of one page."""

    since: str
    as_of: float
    total: int
    found: int
    healthy: int
    progressing: int
    degraded: int
    query: str
    page: int
    pages: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class GateFacts:
    """One gate: its reading in words, and its curve since the operator started."""

    reading: GateReading
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """A rollout and what it has seen; ``headline`` is its entry in the history."""

    headline: Attempt
    age: str
    facts: tuple[tuple[str, str], ...]
    gates: tuple[GateFacts, ...]
    steps: tuple[StepFacts, ...]
    started_at: float | None
    finished: bool


@dataclass(frozen=True, slots=True)
class ConditionFacts:
    type: str
    status: str
    reason: str
    message: str
    age: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    name: str
    kind: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class EventFacts:
    at: str
    age: str
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class ServicePage:
    """Everything of one service. Sections are empty where there is nothing to say; ``latency`` is None until workers
    reported."""

    row: Row
    since: str
    as_of: float
    serving: tuple[str, ...]
    plan: str
    candidate: str
    networks: tuple[NetworkFacts, ...]
    rollout: RolloutFacts | None
    latency: LatencyFacts | None
    tuning: tuple[str, ...]
    pin: tuple[str, ...]
    cooling_down: tuple[str, ...]
    wrong: tuple[str, ...]
    history: tuple[RolloutFacts, ...]
    conditions: tuple[ConditionFacts, ...]
    workers: tuple[WorkerFacts, ...]
    events: tuple[EventFacts, ...]
    capacity: tuple[str, ...] = ()
    pools: tuple[PoolRow, ...] = ()
    pool_plan: tuple[str, ...] = ()
    routes: tuple[RouteUse, ...] = ()


# --- overview --------------------------------------------------------------------------------------


def overview(views: Sequence[View], now: float, *, since: float, query: str = "", page: int = 1) -> OverviewPage:
    """All services whose namespace/name contains ``query``, worst first, one page of them."""
    rows = [row(view, now) for view in views if query.casefold() in str(view.key).casefold()]
    rows.sort(key=lambda r: (_WORST_FIRST[r.verdict], r.rollout is None, r.namespace, r.name))
    pages = max(1, -(-len(rows) // PAGE_SIZE))
    page = min(max(1, page), pages)
    verdicts = [r.verdict for r in rows]
    return OverviewPage(
        since=_moment(since),
        as_of=max((view.at for view in views), default=now),
        total=len(views),
        found=len(rows),
        healthy=verdicts.count("Healthy"),
        progressing=verdicts.count("Progressing"),
        degraded=verdicts.count("Degraded"),
        query=query,
        page=page,
        pages=pages,
        rows=tuple(rows[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]),
    )


def row(view: View, now: float) -> Row:
    """One service at a glance; one that was never understood says why."""
    family = _aged(view, now)
    if family is None:
        unknown = Goal("", "", None, "Unknown")
        return Row(
            view.key.namespace, view.key.name, "Degraded", view.problem, "", unknown, unknown, "", "", "", "", None
        )
    found, seen = health(family), family.service.status.observed
    return Row(
        namespace=view.key.namespace,
        name=view.key.name,
        verdict=found.verdict,
        message=found.message,
        figures=figures(family),
        latency=_latency_goal(family),
        disagreement=_disagreement_goal(family),
        leave_early=seen.exit_rate,
        saves=seen.savings,
        audits=seen.audits,
        workers=workers_ready(family),
        rollout=_live(family),
        token_times=_token_times(family),
        generates=family.service.spec.generates,
        tokens_per_second=seen.tokens_per_second,
        model_tokens_per_second=seen.model_tokens_per_second,
    )


def _aged(view: View, now: float) -> Family | None:
    """The family, with a note where nothing was heard of it for a while."""
    family = view.family
    if family is None or family.note or now - view.at < STALE_SECONDS:
        return family
    note = f"not reconciled for {ago(view.at, now)}: the operator is late, see its log"
    return replace(family, note=note)


def _latency_goal(family: Family) -> Goal:
    """The whole reply's p95 that the status tells, against the objective where there is one for it."""
    spec, seen = family.service.spec, family.service.status.observed
    if spec.latency_seconds is None:
        return Goal(f"p95 {seen.p95}" if seen.p95 else "", "", None, "Unknown")
    return _time_goal(family, spec.latency_seconds, seen.p95)


def _token_times(family: Family) -> tuple[NamedGoal, ...]:
    """Times of generated answers' tokens. Without an objective they are shown where they are known."""
    spec, seen = family.service.spec, family.service.status.observed
    times = (
        ("First token", spec.first_token_seconds, seen.first_token_p95),
        ("Time per token", spec.token_seconds, seen.per_token_p95),
    )
    return tuple(
        NamedGoal(name, _time_goal(family, goal, p95) if goal else Goal(f"p95 {p95}", "", None, "Unknown"))
        for name, goal, p95 in times
        if goal or p95
    )


def _time_goal(family: Family, seconds: float, p95: str) -> Goal:
    """A p95 that the status tells against one of the objective's times. Whether all are kept is the condition's word,
    at the objective's percentile; which of several is missed shows where that is the p95 as well."""
    spec, state = family.service.spec, _status(family, ConditionType.LATENCY_OBJECTIVE_MET)
    measured = _number(p95, lambda text: parse_duration(text, "p95"))
    used = measured / seconds if measured is not None else None
    percentile = (
        "" if spec.latency_percentile == 95 else f"p{spec.latency_percentile:g} "
    )  # shown once where both are the p95
    kept = used is not None and used <= 1 and not percentile
    if state == "False" and len(spec.time_goals) > 1 and kept:
        state = "True"
    return Goal(f"p95 {p95}" if p95 else "", f"{percentile}≤ {milliseconds(seconds)}", used, state)


def _disagreement_goal(family: Family) -> Goal:
    """The agreement that the status tells, and how much of the budget the rest of it is."""
    spec, seen = family.service.spec, family.service.status.observed
    agreement = _number(seen.agreement, lambda text: float(text.rstrip("%")) / 100)
    used = max(0.0, 1 - agreement) / spec.max_disagreement if agreement is not None else None
    allowed = f"≥ {share(1 - spec.max_disagreement)}"
    return Goal(seen.agreement, allowed, used, _status(family, ConditionType.ACCURACY_WITHIN_BUDGET))


def _number(text: str, parse: Callable[[str], float]) -> float | None:
    """What a text of the status says; None where it says nothing that can be drawn."""
    try:
        value = parse(text)
    except (OfframpError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _status(family: Family, kind: ConditionType) -> str:
    condition = family.condition(kind)
    return condition.status if condition is not None else "Unknown"


def _live(family: Family) -> LiveRollout | None:
    active = family.active
    if active is None:
        return None
    summary = progress(active, family) or "waits for its turn"
    return LiveRollout(active.name, active.status.phase, active.status.weight, summary, _steps(active, family))


def _steps(rollout: Rollout, family: Family) -> tuple[StepFacts, ...]:
    """Steps that ended as they were recorded, then the present one, then those that the spec still has."""
    status = rollout.status
    steps = [StepFacts(s.weight, "done", f"{s.k} of {s.n:,} audits disagreed") for s in status.history]
    if status.phase in CANARY_PHASES:
        n, k = status.ledger.total.canary.audited, status.ledger.total.canary.disagreements
        steps.append(StepFacts(status.weight, "now", f"{k} of {n:,} audits disagreed so far"))
    if not status.finished and status.phase != "RollingBack":
        reached = status.weight if status.phase != "Pending" else 0
        steps += [StepFacts(s.weight, "ahead", "") for s in family.service.spec.rollout.steps if s.weight > reached]
    return tuple(steps)


# --- one service -----------------------------------------------------------------------------------


def service(view: View, now: float, *, since: float) -> ServicePage:
    """Everything of one service."""
    family, glance = _aged(view, now), row(view, now)
    if family is None:
        return ServicePage(
            glance, _moment(since), view.at, (), "", "", (), None, None, (), (), (), (view.problem,), (), (), (), ()
        )
    served = served_by(view.workers, view.published, bundle=family.service.status.ramp_sets.bundle)
    counts = _pooled(view)
    active = family.active
    history = [
        _rollout(r, headline, view, family, now)
        for r, headline in zip(reversed(family.rollouts), attempts(family, now), strict=True)
    ]
    return ServicePage(
        row=glance,
        since=_moment(since),
        as_of=view.at,
        serving=tuple(serving(family)),
        plan=about(family.stable, family.service.spec) if family.stable is not None else "",
        candidate=about(family.candidate, family.service.spec) if family.candidate is not None else "",
        networks=_networks(family, served, counts),
        rollout=next((r for r in history if active is not None and r.headline.name == active.name), None),
        latency=_latency(family, served, counts),
        tuning=tuple(tuning(family, now)),
        pin=tuple(pin(family)),
        cooling_down=tuple(cooling(family, now)),
        wrong=tuple(wrong(family)),
        history=tuple(r for r in history if r.finished),
        conditions=_conditions(family, now),
        workers=tuple(WorkerFacts(w.name, w.kind, w.state, w.detail) for w in family.workers or ()),
        events=tuple(
            EventFacts(_moment(e.at), ago(e.at, now), e.event.reason, e.event.message, e.event.warning)
            for e in reversed(view.events)
        ),
        capacity=tuple(capacity_facts(family)),
        pools=tuple(pool_rows(family)),
        pool_plan=tuple(plan_facts(family)),
        routes=family.service.status.observed.routes,
    )


def _pooled(view: View) -> tuple[ArmCounts, ...]:
    """What workers counted, but for those whose counts are not believed."""
    family = view.family
    quarantined = family.service.status.workers.quarantined if family is not None else ()
    return tuple(
        count
        for worker in view.workers
        if worker.observations is not None and worker.endpoint.name not in quarantined
        for count in (*worker.observations.counts, *worker.observations.held_back)
    )


def _networks(family: Family, served: Served | None, counts: Sequence[ArmCounts]) -> tuple[NetworkFacts, ...]:
    if served is None:
        return ()
    active = family.active
    serves = active is not None and active.status.phase in CANARY_PHASES
    plans = [("stable", family.stable), ("canary", family.candidate if serves else None)]
    return tuple(network(config, role, served, counts) for role, config in plans if config is not None)


def _latency(family: Family, served: Served | None, counts: Sequence[ArmCounts]) -> LatencyFacts | None:
    """The canary, or else the stable plan, where either has exits, against whatever served without."""
    if not counts:
        return None
    active = family.active
    canary = family.candidate if active is not None and active.status.phase in CANARY_PHASES else None
    shown = next((c for c in (canary, family.stable) if c is not None and not c.plan.exits_off), None)
    off = {c.plan.content_hash for c in family.configs.values() if c.plan.exits_off}
    if served is not None:
        off.add(
            exits_off_plan(backbone_digest=served.backbone_digest, ramp_set_digest=served.ramp_set_digest).content_hash
        )
    spec = family.service.spec
    on = {shown.plan.content_hash} if shown is not None else set()
    names = ("cheaper variants", "the model alone") if family.service.spec.generates else ("exits on", "exits off")
    return latency(
        counts, on=on, off=off, slo_seconds=spec.latency_seconds, percentile=spec.latency_percentile, names=names
    )


def _rollout(rollout: Rollout, headline: Attempt, view: View, family: Family, now: float) -> RolloutFacts:
    curves = view.curves.get(rollout.name, {})
    return RolloutFacts(
        headline=headline,
        age=ago(rollout.status.finished_at or rollout.created_at, now),
        facts=tuple(about_rollout(family, rollout)),
        gates=tuple(GateFacts(reading, curves.get(reading.gate, ())) for reading in readings(rollout, now)),
        steps=_steps(rollout, family),
        started_at=rollout.status.started_at,
        finished=rollout.status.finished,
    )


def _conditions(family: Family, now: float) -> tuple[ConditionFacts, ...]:
    return tuple(
        ConditionFacts(
            c.type,
            c.status,
            c.reason,
            c.message,
            ago(c.last_transition_at, now),
            condition_tone(c.type, c.status, c.reason),
        )
        for c in family.service.status.conditions
    )


def _moment(seconds: float) -> str:
    """RFC 3339, to the second."""
    return format_time(math.floor(seconds))[:19] + "Z"


# --- as JSON ---------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """A context as plain JSON: camelCase names, tuples as lists, times as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        return {camel(f.name): as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
