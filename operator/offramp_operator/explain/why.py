"""What a rollout has seen, gate by gate, and why plans are or are not certified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offramp_core.control.objects import Condition, GateStatus, Rollout
from offramp_core.control.rollouts.gates import not_excluded, proves, words
from offramp_core.evidence.words import e_value
from offramp_core.reasons import Reason, Tone, condition_tone
from offramp_operator.explain.capacity import capacity_data
from offramp_operator.explain.family import Family
from offramp_operator.explain.plans import about, ramps
from offramp_operator.explain.progress import progress
from offramp_operator.explain.savings import savings_data
from offramp_operator.explain.version import gate_data, version_data
from offramp_operator.explain.words import duration, share

_WAITS = {Reason.COLLECTING_LABELS, Reason.TUNING, Reason.ROLLING_OUT}


# --- plans -----------------------------------------------------------------------------------------


def serving(family: Family) -> list[str]:
    """Which plan serves, what proves it, and where none does, why."""
    stable, spec, status = family.stable, family.service.spec, family.service.status
    budget = f"a budget of {share(spec.max_disagreement)} at {share(spec.confidence)} confidence"
    if stable is None:
        return [f"{family.name} serves no plan yet: {status.message or 'no worker has described its model'}"]
    if not stable.plan.exits_off:
        return [f"{family.name} serves {stable.name}: {about(stable, spec)} ({budget})"]
    if family.service.spec.generates:
        return [f"{family.name} is answered by the model itself, {_because(family)} ({budget})"]
    return [f"{family.name} serves with exits off, {_because(family)} ({budget})"]


def _because(family: Family) -> str:
    spec, status = family.service.spec, family.service.status
    active, recommended = family.active, family.recommended
    reasons = (
        (status.tuning.state == Reason.ANOTHER_TASK, f"because {status.tuning.message}"),
        (spec.mode == "Disabled", "because spec.ramps.mode is Disabled"),
        (
            recommended is not None,
            f"because {recommended and recommended.to_config} waits for approval: `offramp approve {family.name}`",
        ),
        (active is not None, f"while {active and active.to_config} earns its place in {active and active.name}"),
        (
            spec.mode == "Pinned",
            f"because the pin is {status.pin.verdict or 'still being judged'}: {status.pin.message}",
        ),
        (spec.suspend, "because spec.suspend stops tuning"),
        (status.tuning.state == Reason.COLLECTING_LABELS, "because nothing is certified yet"),
        (True, f"because {status.tuning.message or 'nothing has been certified'}"),
    )
    return next(reason for applies, reason in reasons if applies)


# --- rollout ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateReading:
    """What one gate has seen, in words; the middle is empty where the gate does not apply."""

    gate: str
    state: str
    seen: str
    against: str
    e_value: str
    limit: str
    exposure: str
    meaning: str


def about_rollout(family: Family, rollout: Rollout) -> list[tuple[str, str]]:
    """Named facts of a rollout, empty ones left out."""
    status = rollout.status
    to = family.configs.get(rollout.to_config)
    facts = (
        ("plan", ramps(to.plan, family.service.spec) if to is not None else ""),
        ("reason", status.reason),
        ("status", status.message if status.finished else progress(rollout, family)),
        (
            "person",
            ", ".join(
                filter(
                    None,
                    ("paused" if rollout.paused else "", f"decision {rollout.decision}" if rollout.decision else ""),
                )
            ),
        ),
        ("passed", "; ".join(f"{s.weight}%: {s.k} of {s.n} audits disagreed" for s in status.history)),
        (
            "audits",
            f"{share(status.audit_rate)} of the canary's requests" if status.audit_rate and not status.finished else "",
        ),
    )
    return [(name, value) for name, value in facts if value]


NO_READING = "no gate has been read yet: a step begins when every ready worker runs it"


def readings(rollout: Rollout, now: float) -> list[GateReading]:
    """Every gate in words; empty before the first step has begun."""
    return [_reading(gate, rollout, now) for gate in rollout.status.gates]


def _reading(gate: GateStatus, rollout: Rollout, now: float) -> GateReading:
    if gate.state == "NotApplicable":
        return GateReading(gate.name, gate.state, "-", "-", "-", "-", "-", gate.message)
    phrases = words(gate)
    return GateReading(
        gate=gate.name,
        state=gate.state,
        seen=phrases.counted.format(k=gate.k, n=gate.n),
        against=phrases.against.format(bound=share(gate.bound)),
        e_value=e_value(gate.log_e_value),
        limit=e_value(gate.log_limit),
        exposure="-" if gate.exposure is None else f"{math.floor(100 * gate.exposure)}%",
        meaning=meaning(gate, rollout, now),
    )


def meaning(gate: GateStatus, rollout: Rollout, now: float) -> str:
    """What a gate's reading says, and how long an undecided one will take at the pace of this step."""
    if gate.state == "Rejected":
        return "the evidence of harm passed its limit: the canary goes"
    if gate.state == "Clear":
        if proves(gate.name):
            return "earned: surely below the budget"
        if cut_off := not_excluded(gate, rollout.status.slow_excluded):
            return f"no evidence of harm; {cut_off}"
        return "no evidence of harm" + (", and harm would have shown by now" if gate.needed else "")
    left = _seconds_left(gate.exposure or 0.0, rollout, now)
    return gate.message if left is None else f"{gate.message}; about {duration(left)} more"


def _seconds_left(exposure: float, rollout: Rollout, now: float) -> float | None:
    began = rollout.status.step_started_at
    if rollout.status.finished or began is None or not 0 < exposure < 1 or now <= began:
        return None
    return (1 - exposure) * (now - began) / exposure


# --- everything else -------------------------------------------------------------------------------


def tuning(family: Family, now: float) -> list[str]:
    """What the tuner does, what it waits for and until when."""
    status = family.service.status.tuning
    if not status.state:
        return ["has not begun: no worker has described its model yet"]
    lines = [f"{status.state}: {status.message}".rstrip(": ")]
    if status.state == Reason.COLLECTING_LABELS and status.labels == 0:
        lines.append("labels come from audited requests: no traffic, no labels")
    if (
        status.state not in _WAITS
        and status.next_attempt_at is not None
        and family.service.spec.mode in ("Auto", "Recommend")
    ):
        when = f"in {duration(status.next_attempt_at - now)}" if status.next_attempt_at > now else "with the next pass"
        lines.append(f"next attempt {when}; `offramp tune {family.name} --now` does not wait for it")
    if status.tests_run:
        lines.append(f"{status.tests_run} held-out tests so far; every one spends a part of the error allowance")
    if status.audit:
        taken = family.service.status.measured.audits
        price = "" if taken is None else f"; they took {share(taken)} of the model's time under this plan"
        lines.append(f"audits {share(status.audit_rate)} of requests ({status.audit.lower()}){price}")
    if family.service.request and family.service.request != status.handled_request:
        lines.append(f"asked by annotation and not answered yet: {family.service.request}")
    return lines


def pin(family: Family) -> list[str]:
    """The verdict on the user's own thresholds."""
    spec, status = family.service.spec, family.service.status.pin
    if spec.mode != "Pinned" or spec.pin is None:
        return []
    stale = status.generation != family.service.generation or not status.verdict
    return [f"{'being judged' if stale else status.verdict}: {status.message}".rstrip(": ")]


def cooling(family: Family, now: float) -> list[str]:
    """Plans that were rejected lately."""
    return [
        f"{c.name} for {duration((c.status.rejected_until_at or 0) - now)} (rejection {c.status.rejections}): "
        f"{c.status.message}"
        for c in family.configs.values()
        if (c.status.rejected_until_at or 0) > now
    ]


def wrong(family: Family) -> list[str]:
    """Conditions that a person should look at."""
    conditions = family.service.status.conditions
    bad = [c for c in conditions if condition_tone(c.type, c.status, c.reason) in (Tone.WARNING, Tone.BAD)]
    return [*([family.note] if family.note else []), *map(_wrong, bad)]


def _wrong(condition: Condition) -> str:
    """With the next step, where the message does not end with it: what keeps a worker from running does."""
    text = f"{condition.type} is {condition.status} ({condition.reason}): {condition.message}"
    known = Reason.of(condition.reason)
    return (
        text if known is None or not known.next_step or "worker" in known.places else f"{text}; next: {known.next_step}"
    )


def why_data(family: Family, rollout: Rollout | None, now: float) -> dict[str, Any]:
    """The same for machines."""
    return {
        "service": family.name,
        "serving": " ".join(serving(family)),
        "rollout": None if rollout is None else _rollout_data(rollout, now),
        "version": version_data(family),
        "savings": savings_data(family),
        "capacity": capacity_data(family),
        "tuning": tuning(family, now),
        "pin": pin(family),
        "coolingDown": cooling(family, now),
        "wrong": wrong(family),
    }


def _rollout_data(rollout: Rollout, now: float) -> Mapping[str, Any]:
    status = rollout.status
    return {
        "name": rollout.name,
        "from": rollout.from_config,
        "to": rollout.to_config,
        "cause": rollout.cause,
        "phase": status.phase,
        "weight": status.weight,
        "slowExcluded": status.slow_excluded,
        "verdict": status.verdict,
        "reason": status.reason,
        "message": status.message,
        "gates": [
            {**gate_data(g), "meaning": g.message if g.state == "NotApplicable" else meaning(g, rollout, now)}
            for g in status.gates
        ],
    }
