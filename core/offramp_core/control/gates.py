"""Gates: sequential tests that look for harm in a canary.

A gate never asks a plan to prove its worth again; the certificate did that. It rejects when the evidence of
harm is overwhelming, and it is *Undecided* until a harmful plan would have been noticed (minimum exposure).
An uncertified plan, a pin, has one gate more: it must earn acceptance. A canary may rest for days, paused or waiting for a person; evidence
that accumulated over them would be blind to a change today, so a restarting detector watches along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import BothArms, GateState, GateStatus
from offramp_core.evidence import detector
from offramp_core.evidence.exposure import audits_needed, reached
from offramp_core.evidence.one_arm import Counts, alternatives, log_average_ratio, log_e_value
from offramp_core.evidence.two_arm import log_e_share
from offramp_core.evidence.words import e_value
from offramp_core.reasons import Reason

HARMFUL_SLOWDOWN = 1.2  # beyond the allowed overhead
HARMFUL_FACTOR = 3.0  # a plan at three times its budget is what the accuracy gate must be able to notice
# Alternatives of its e-value, as multiples of the budget. Closer ones cannot show in the audits of a step, farther ones stop hardly sooner.
HARM_FACTORS = (2.0, 3.0, 5.0)
POWER = 0.95
WATCH_RUN_LENGTH = 1_000_000.0  # audits between false alarms of the detector over a canary at its budget; the workers' own has the same
FAILING = 0.001  # of batches, that may fail by a model's own fault; where a stable arm serves it tells better
N_GATES = 3  # slowness, failures, acceptance; accuracy has the confidence of its own budget


@dataclass(frozen=True, slots=True)
class GateInput:
    """What the gates of one step read.

    ``confidence`` is that of the whole rollout of ``n_steps`` steps, ``accuracy_confidence`` that of the accuracy budget. ``level`` is what
    was frozen when the step began (0: an even share), and ``slow_excluded`` the least slowdown that ``slow_needed`` judged batches exclude. ``watch`` is the detector over all audits of the canary so far, ``attempt`` their
    counts in all steps, this one included (None: there is no other), and ``acceptance_level`` what the test may spend that accepts a plan by them.
    ``design_effect`` audits are worth one.
    """

    tally: BothArms
    weight: int
    budget: float
    confidence: float
    n_steps: int
    slow_needed: int
    certified: bool
    slow_excluded: float | None = None
    accuracy_confidence: float = 0.95
    watch: detector.DetectorState = field(default_factory=detector.init)
    level: float = 0.0
    attempt: Counts | None = None
    acceptance_level: float = 1.0
    design_effect: float = 1.0

    @property
    def alpha(self) -> float:
        """False rejections allowed per gate and step, so that all together keep the rollout's confidence."""
        return self.level or gate_level(confidence=self.confidence, spent=0.0, n_steps=self.n_steps, left=self.n_steps)

    @property
    def log_limit(self) -> float:
        return math.log(1 / self.alpha)

    @property
    def share(self) -> float:
        return self.weight / 100


def gate_level(*, confidence: float, spent: float, n_steps: int, left: int) -> float:
    """What each gate of the next of ``left`` steps may spend, of ``n_steps`` in all of which the others have ``spent`` their part.

    An even share of what is left, so that editing the steps in mid-rollout leaves the sum as it is. Steps that are added when all of it is
    given out have a little more each: 1/n^2 of it, less than two thirds together.
    """
    whole = (1 - confidence) / N_GATES
    return max((whole - spent) / left, whole / n_steps**2)


def accuracy(given: GateInput) -> GateStatus:
    """Disagreements among the canary's audits since the step began against the budget (one arm), with the budget's own confidence.

    Earlier steps do not count: what was learnt before the inputs drifted would hide what they do now. The test of a step may be wrong
    5 % of the time about a plan *exactly at* its budget; a plan at half of it falls in 0.1 %. A level divided by gates and steps would
    protect the former at the price of 367 instead of 219 audits to stop a plan at five budgets.
    """
    arm, alpha = given.tally.canary, 1 - given.accuracy_confidence
    harmful = harmful_rates(given.budget)
    return _judge(
        "accuracy",
        n=arm.audited,
        k=arm.disagreements,
        bound=given.budget,
        evidence=log_average_ratio(
            arm.disagreements, arm.audited, p0=given.budget, grid=harmful, design_effect=given.design_effect
        ),
        limit=math.log(1 / alpha),
        seen=arm.audited,
        needed=math.ceil(
            given.design_effect
            * audits_needed(
                budget=given.budget, harmful=HARMFUL_FACTOR * given.budget, alpha=alpha, power=POWER, grid=harmful
            )
        ),
        of="audits",
    )


def drift(given: GateInput) -> GateStatus:
    """The restarting detector over the canary's audits: a change is noticed as soon after a quiet week as after a quiet minute."""
    evidence = math.log(max(1.0, detector.statistic(given.watch)))
    limit = math.log(WATCH_RUN_LENGTH)
    rejected = evidence >= limit
    return GateStatus(
        "drift", "Rejected" if rejected else "Clear", given.watch.n, 0, given.budget, round(evidence, 6), round(limit, 6),
        message="answers changed while the canary served" if rejected else "no change",
    )  # fmt: skip


def harmful_rates(budget: float) -> tuple[float, ...]:
    """Alternatives of the accuracy gate's e-value."""
    return alternatives(budget, harm_factors=HARM_FACTORS)


def slowness(given: GateInput) -> GateStatus:
    """Of the slow batches, the canary's share against its weight (two arms).

    The stable arm's are those above its frozen p90, the canary's those above (1 + max overhead) times that, so the overhead that the
    user allows is no harm.

    At weight 100 nothing is said: a burst or a noisy neighbour slows whole seconds of batches, and only another arm at the same time tells that
    from the plan. What a plan then costs is found by the holdback once it serves.

    The unit is the batch: requests of one batch are slow together, so counting requests would reject an identical canary.
    """
    if given.weight >= 100:
        return GateStatus("slowness", "NotApplicable", message="no stable arm to compare with at weight 100")
    canary, stable = given.tally.canary, given.tally.stable
    slow = canary.slow + stable.slow
    evidence = log_e_share(canary.slow, slow, share=given.share)
    reading = _judge(
        "slowness",
        n=slow,
        k=canary.slow,
        bound=given.share,
        evidence=evidence,
        limit=given.log_limit,
        seen=canary.judged + stable.judged,
        needed=given.slow_needed,
        of="judged batches",
    )
    left = not_excluded(reading, given.slow_excluded)
    return replace(reading, message=f"{reading.message}; {left}") if left else reading


def not_excluded(gate: GateStatus, excluded: float | None) -> str:
    """What a slowness gate that passes does not say, because saying it would have taken too many batches; empty where it says all it should.

    ``excluded`` is what a step's ``slow_excluded`` says.

    Examples
    --------
    >>> not_excluded(GateStatus("slowness", "Clear", needed=2000), 1.5)
    'cap of 2,000 batches reached: 1.2 x slower is not excluded, 1.5 x is'
    >>> not_excluded(GateStatus("slowness", "Clear", needed=1415), 1.2)
    ''
    """
    if gate.name != "slowness" or gate.state not in ("Clear", "Undecided"):
        return ""
    if excluded is None or 0 < excluded <= HARMFUL_SLOWDOWN:
        return ""
    ahead = gate.state == "Undecided"
    cap = f"cap of {gate.needed:,} batches" + ("" if ahead else " reached")
    left = f"{cap}: {HARMFUL_SLOWDOWN:g} x slower {'will not be' if ahead else 'is not'} excluded"
    return f"{left}, {excluded:g} x {'will' if ahead else 'is'}" if excluded else f"{left}, nor is any other slowdown"


def failures(given: GateInput) -> GateStatus:
    """Of the failed batches, the canary's share against its weight (two arms).

    At weight 100 there is no stable arm: then all that can be said is whether more fail than any model that serves may.
    """
    canary, stable = given.tally.canary, given.tally.stable
    if given.weight >= 100:
        return _judge(
            "failures",
            n=canary.batches,
            k=canary.failed,
            bound=FAILING,
            evidence=log_e_value(canary.failed, canary.batches, p0=FAILING),
            limit=given.log_limit,
        )
    evidence = log_e_share(canary.failed, canary.failed + stable.failed, share=given.share)
    return _judge(
        "failures",
        n=canary.failed + stable.failed,
        k=canary.failed,
        bound=given.share,
        evidence=evidence,
        limit=given.log_limit,
    )


def acceptance(given: GateInput) -> GateStatus:
    """An uncertified plan must show that its disagreement is below the budget before it may be promoted.

    One test for the whole attempt: evidence of the plan's audits in all steps, so that a further step is no further chance, at a level of its
    own among all tests of the service, so that a further attempt is none either. What it gives is as good as a certificate.
    """
    if given.certified:
        return GateStatus("acceptance", "NotApplicable", message="the plan is certified")
    arm = given.tally.canary
    seen = given.attempt or Counts(arm.audited, arm.disagreements)
    evidence = log_e_value(seen.k, seen.n, p0=given.budget, alternative="less", design_effect=given.design_effect)
    limit = max(given.log_limit, -math.log(min(given.acceptance_level, 1 - given.accuracy_confidence)))
    accepted = evidence >= limit
    return GateStatus(
        "acceptance", "Clear" if accepted else "Undecided", seen.n, seen.k, given.budget, evidence, limit,
        message="earned" if accepted else "uncertified: its e-value must reach the limit before it may be promoted",
        exposure=reached(evidence, limit),
    )  # fmt: skip


GATES: tuple[Callable[[GateInput], GateStatus], ...] = (accuracy, drift, slowness, failures, acceptance)


# What a rollout is told to have ended with; acceptance is earned or not, and rejects nothing.
REJECTIONS: Mapping[str, Reason] = {
    "accuracy": Reason.ACCURACY_REJECTED,
    "drift": Reason.DRIFT_REJECTED,
    "slowness": Reason.SLOWNESS_REJECTED,
    "failures": Reason.FAILURES_REJECTED,
}


def read_gates(given: GateInput) -> tuple[GateStatus, ...]:
    """Every gate's reading of one step."""
    return tuple(gate(given) for gate in GATES)


def _judge(
    name: str, *, n: int, k: int, bound: float, evidence: float, limit: float, seen: int = 0, needed: int = 0, of: str = ""
) -> GateStatus:  # fmt: skip
    """A reading. ``seen`` of ``needed`` observations are the exposure, in the unit ``of``."""
    state: GateState
    if evidence >= limit:
        state, message = (
            "Rejected",
            f"{k} of {n} against {bound:.3g}: e-value {e_value(evidence)} passes the limit {e_value(limit)}",
        )
    elif seen < needed:
        state, message = (
            "Undecided",
            f"{seen} of {needed} {of} with which a harmful plan would show itself",
        )
    else:
        state, message = "Clear", f"{k} of {n} against {bound:.3g}: no evidence of harm"
    exposure = reached(seen, needed)
    return GateStatus(name, state, n, k, bound, round(evidence, 6), round(limit, 6), needed, message, exposure)
