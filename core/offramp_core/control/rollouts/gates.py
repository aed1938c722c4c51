"""Gates: sequential tests that look for harm in a canary.

A gate never asks a plan to prove its worth again; the certificate did that. It rejects when the evidence of
harm is overwhelming, and it is *Undecided* until a harmful plan would have been noticed (minimum exposure).
An uncertified plan, a pin, has one gate more: it must earn acceptance. A canary may rest for days, paused or waiting
for a person; evidence that accumulated over them would be blind to a change today, so a restarting detector watches
along.

A gate is one entry: what it judges, what its exposure is, its shares of the errors that a rollout may make, and its
words. Nothing else need know of it, but for its row in docs/concepts/gates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import BothArms, GateState, GateStatus, TierTally
from offramp_core.evidence import detector
from offramp_core.evidence.exposure import audits_needed, audits_to_earn, reached
from offramp_core.evidence.one_arm import Counts, alternatives, log_average_ratio, log_e_value
from offramp_core.evidence.two_arm import log_e_share
from offramp_core.evidence.words import e_value
from offramp_core.reasons import AnyReason, Reason, parse_reason

HARMFUL_SLOWDOWN = 1.2  # beyond the allowed overhead
HARMFUL_FACTOR = 3.0  # a plan at three times its budget is what the accuracy gate must be able to notice
# Alternatives of its e-value, as multiples of the budget. Closer ones cannot show in the audits of a step, farther ones
# stop hardly sooner.
HARM_FACTORS = (2.0, 3.0, 5.0)
POWER = 0.95
# Audits between false alarms of the detector over a canary at its budget; the workers' own has the same.
WATCH_RUN_LENGTH = 1_000_000.0
# What to do where requests resemble each other too much for a canary to accept a plan.
WARY_ADVICE = "name the sources of requests (parameters.stream) and pin it anew, or let ramps.mode: Auto certify a plan"
FAILING = 0.001  # of batches, that may fail by a model's own fault; where a stable arm serves it tells better


@dataclass(frozen=True, slots=True)
class GateInput:
    """What the gates of one step read.

    ``confidence`` is that of the whole rollout of ``n_steps`` steps, ``accuracy_confidence`` that of the accuracy
    budget. ``level`` is what was frozen when the step began (0: an even share), and ``slow_excluded`` the least
    slowdown that ``slow_needed`` judged batches exclude. ``watch`` is the detector over all audits of the canary so
    far, ``attempt`` their counts in all steps, this one included (None: there is no other), and ``acceptance_level``
    what the test may spend that accepts a plan by them. ``design_effect`` audits are worth one, in that test
    ``acceptance_effect`` if these are more. ``tiers`` are the budgets of those that take exits in the canary, by name.
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
    acceptance_effect: float = 1.0
    tiers: Mapping[str, float] = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True)
class Evidence:
    """``k`` of ``n`` events against ``bound``, and what that says: from ``log_limit`` on the gate decides."""

    n: int
    k: int
    bound: float
    log_e_value: float
    log_limit: float


@dataclass(frozen=True, slots=True)
class Exposure:
    """``seen`` of the ``needed`` observations, in the unit ``of``, with which a harmful plan would show itself."""

    seen: int
    needed: int
    of: str


@dataclass(frozen=True, slots=True)
class Words:
    """How a reading is put into words: what was ``counted`` and what it is held ``against``, and the message of each
    state."""

    counted: str = "{k} of {n}"
    against: str = "{bound}"
    rejected: str = "{k} of {n} against {bound:.3g}: e-value {e_value} passes the limit {limit}"
    waiting: str = "{seen} of {needed} {of} with which a harmful plan would show itself"
    clear: str = "{k} of {n} against {bound:.3g}: no evidence of harm"


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate; called with what is given it reads the step.

    ``judge`` weighs the evidence, or says why the gate does not apply. ``shares`` are those of the false rejections
    that a rollout may make, of which a gate with a level of its own has none. ``reason`` is the reason with which it
    ends a rollout. A gate that ``proves`` looks for evidence of the good: it is Clear once that is overwhelming, and
    rejects nothing. ``reads_audits`` says that audits decide, so that what one of them is worth must be known.
    ``remark`` adds to the message. ``alone`` are the words of a step without a stable arm.
    """

    name: str
    judge: Callable[[GateInput], Evidence | str]
    exposure: Callable[[GateInput], Exposure] | None = None
    shares: int = 0
    reason: Reason | None = None
    words: Words = Words()
    alone: Words | None = None
    reads_audits: bool = False
    proves: bool = False
    remark: Callable[[GateStatus, GateInput], str] | None = None

    def __call__(self, given: GateInput) -> GateStatus:
        found = self.judge(given)
        if isinstance(found, str):
            return GateStatus(self.name, "NotApplicable", message=found)
        reading = self._of_good(found) if self.proves else self._of_harm(found, given)
        more = self.remark(reading, given) if self.remark is not None else ""
        return replace(reading, message=f"{reading.message}; {more}") if more else reading

    def decided_by_audits(self, reading: GateStatus) -> bool:
        """Whether audits have brought about what this reading says."""
        return self.reads_audits and reading.state == ("Clear" if self.proves else "Rejected")

    def _of_harm(self, found: Evidence, given: GateInput) -> GateStatus:
        asked = self.exposure(given) if self.exposure is not None else Exposure(0, 0, "")
        state: GateState
        if found.log_e_value >= found.log_limit:
            state, message = "Rejected", self._message(self.words.rejected, found)
        elif asked.seen < asked.needed:
            state = "Undecided"
            message = self.words.waiting.format(seen=asked.seen, needed=asked.needed, of=asked.of)
        else:
            state, message = "Clear", self._message(self.words.clear, found)
        return GateStatus(
            self.name,
            state,
            found.n,
            found.k,
            found.bound,
            round(found.log_e_value, 6),
            round(found.log_limit, 6),
            asked.needed,
            message,
            exposure=reached(asked.seen, asked.needed),
        )

    def _of_good(self, found: Evidence) -> GateStatus:
        earned = found.log_e_value >= found.log_limit
        return GateStatus(
            self.name,
            "Clear" if earned else "Undecided",
            found.n,
            found.k,
            found.bound,
            found.log_e_value,
            found.log_limit,
            message=self.words.clear if earned else self.words.waiting,
            exposure=reached(found.log_e_value, found.log_limit),
        )

    @staticmethod
    def _message(words: str, found: Evidence) -> str:
        e, limit = e_value(found.log_e_value), e_value(found.log_limit)
        return words.format(k=found.k, n=found.n, bound=found.bound, e_value=e, limit=limit)


# --- accuracy --------------------------------------------------------------------------------------


def harmful_rates(budget: float) -> tuple[float, ...]:
    """Alternatives of the accuracy gate's e-value."""
    return alternatives(budget, harm_factors=HARM_FACTORS)


def _accuracy(given: GateInput) -> Evidence:
    """Disagreements among the canary's audits since the step began against the budget (one arm), with the budget's own
    confidence.

    Earlier steps do not count: what was learnt before the inputs drifted would hide what they do now. The test of a
    step may be wrong 5 % of the time about a plan *exactly at* its budget; a plan at half of it falls in 0.1 %. A level
    divided by gates and steps would protect the former at the price of 367 instead of 219 audits to stop a plan at five
    budgets.
    """
    arm, budget = given.tally.canary, given.budget
    evidence = log_average_ratio(
        arm.disagreements, arm.audited, p0=budget, grid=harmful_rates(budget), design_effect=given.design_effect
    )
    return Evidence(arm.audited, arm.disagreements, budget, evidence, math.log(1 / (1 - given.accuracy_confidence)))


def _audits(given: GateInput) -> Exposure:
    budget, alpha = given.budget, 1 - given.accuracy_confidence
    needed = audits_needed(
        budget=budget, harmful=HARMFUL_FACTOR * budget, alpha=alpha, power=POWER, grid=harmful_rates(budget)
    )
    return Exposure(given.tally.canary.audited, math.ceil(given.design_effect * needed), "audits")


accuracy = Gate(
    "accuracy",
    judge=_accuracy,
    exposure=_audits,
    reason=Reason.ACCURACY_REJECTED,
    words=Words("{k} of {n} audits disagreed", "budget {bound}"),
    reads_audits=True,
)


# --- tiers ----------------------------------------------------------------------------------------


def _tier_evidence(given: GateInput) -> dict[str, Evidence]:
    """The accuracy gate's evidence of each tier, from the audits of its own requests; they share the level evenly."""
    limit = math.log(len(given.tiers) / (1 - given.accuracy_confidence)) if given.tiers else 0.0
    found = {}
    for name, budget in given.tiers.items():
        seen = given.tally.tiers.get(name, TierTally())
        rates = harmful_rates(budget)
        evidence = log_average_ratio(
            seen.disagreements, seen.audited, p0=budget, grid=rates, design_effect=given.design_effect
        )
        found[name] = Evidence(seen.audited, seen.disagreements, budget, evidence, limit)
    return found


def _tiers(given: GateInput) -> Evidence | str:
    """The tier with most evidence against it. None is waited for: few requests may ask for it, and its certificate and
    its audits under the stable plan stand guard as well."""
    found = _tier_evidence(given)
    return max(found.values(), key=lambda e: e.log_e_value) if found else "no tier takes exits"


def _which_tier(_: GateStatus, given: GateInput) -> str:
    found = _tier_evidence(given)
    return f"tier {max(found, key=lambda name: found[name].log_e_value)}" if found else ""


tiers = Gate(
    "tiers",
    judge=_tiers,
    reason=Reason.ACCURACY_REJECTED,
    words=Words("{k} of {n} audits of a tier disagreed", "its budget {bound}"),
    reads_audits=True,
    remark=_which_tier,
)


# --- drift -----------------------------------------------------------------------------------------


def _drift(given: GateInput) -> Evidence:
    """The restarting detector over the canary's audits: a change is noticed as soon after a quiet week as after a quiet
    minute."""
    evidence = math.log(max(1.0, detector.statistic(given.watch)))
    return Evidence(given.watch.n, 0, given.budget, evidence, math.log(WATCH_RUN_LENGTH))


drift = Gate(
    "drift",
    judge=_drift,
    reason=Reason.DRIFT_REJECTED,
    words=Words(
        "{n} audits watched for a change", rejected="answers changed while the canary served", clear="no change"
    ),
    reads_audits=True,
)


# --- slowness --------------------------------------------------------------------------------------


def _slowness(given: GateInput) -> Evidence | str:
    """Of the slow batches, the canary's share against its weight (two arms).

    The stable arm's are those above its frozen p90, the canary's those above (1 + max overhead) times that, so the
    overhead that the user allows is no harm.

    At weight 100 nothing is said: a burst or a noisy neighbour slows whole seconds of batches, and only another arm at
    the same time tells that from the plan. What a plan then costs is found by the holdback once it serves.

    The unit is the batch: requests of one batch are slow together, so counting requests would reject an identical
    canary.
    """
    if given.weight >= 100:
        return "no stable arm to compare with at weight 100"
    canary, slow = given.tally.canary, given.tally.canary.slow + given.tally.stable.slow
    evidence = log_e_share(canary.slow, slow, share=given.share)
    return Evidence(slow, canary.slow, given.share, evidence, given.log_limit)


def _judged_batches(given: GateInput) -> Exposure:
    return Exposure(given.tally.canary.judged + given.tally.stable.judged, given.slow_needed, "judged batches")


def not_excluded(gate: GateStatus, excluded: float | None) -> str:
    """What a slowness gate that passes does not say, because saying it would have taken too many batches; empty where
    it says all it should.

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


slowness = Gate(
    "slowness",
    judge=_slowness,
    exposure=_judged_batches,
    shares=1,
    reason=Reason.SLOWNESS_REJECTED,
    words=Words("{k} of {n} slow batches were the canary's", "its weight, {bound}"),
    remark=lambda reading, given: not_excluded(reading, given.slow_excluded),
)


# --- failures --------------------------------------------------------------------------------------


def _failures(given: GateInput) -> Evidence:
    """Of the failed batches, the canary's share against its weight (two arms).

    At weight 100 there is no stable arm: then all that can be said is whether more fail than any model that serves may.
    """
    canary, stable = given.tally.canary, given.tally.stable
    if given.weight >= 100:
        evidence = log_e_value(canary.failed, canary.batches, p0=FAILING)
        return Evidence(canary.batches, canary.failed, FAILING, evidence, given.log_limit)
    failed = canary.failed + stable.failed
    evidence = log_e_share(canary.failed, failed, share=given.share)
    return Evidence(failed, canary.failed, given.share, evidence, given.log_limit)


failures = Gate(
    "failures",
    judge=_failures,
    shares=1,
    reason=Reason.FAILURES_REJECTED,
    words=Words("{k} of {n} failed batches were the canary's", "its weight, {bound}"),
    alone=Words("{k} of {n} batches failed", "what a model may fail, {bound}"),
)


# --- acceptance ------------------------------------------------------------------------------------


def _acceptance(given: GateInput) -> Evidence | str:
    """An uncertified plan must show that its disagreement is below the budget before it may be promoted.

    One test for the whole attempt: evidence of the plan's audits in all steps, so that a further step is no further
    chance, at a level of its own among all tests of the service, so that a further attempt is none either. What it
    gives is as good as a certificate.
    """
    if given.certified:
        return "the plan is certified"
    arm = given.tally.canary
    seen = given.attempt or Counts(arm.audited, arm.disagreements)
    effect = max(given.design_effect, given.acceptance_effect)
    evidence = log_e_value(seen.k, seen.n, p0=given.budget, alternative="less", design_effect=effect)
    limit = max(given.log_limit, -math.log(min(given.acceptance_level, 1 - given.accuracy_confidence)))
    return Evidence(seen.n, seen.k, given.budget, evidence, limit)


def _held(reading: GateStatus, given: GateInput) -> str:
    """How long signs of scenes will hold the plan up, and what to do; empty where they do not."""
    effect = given.acceptance_effect
    if reading.state != "Undecided" or effect <= given.design_effect:
        return ""
    n, k, limit = reading.n, reading.k, reading.log_limit
    needed = audits_to_earn(n, k, budget=reading.bound, log_limit=limit, design_effect=effect)
    more = f"about {needed - n:,} more audits like these are needed" if needed else "audits like these will not do"
    what = "mistakes come together, in scenes or by the hour, so that"
    return f"{what} {effect:.1f} audits are worth one: {more}; {WARY_ADVICE}"


acceptance = Gate(
    "acceptance",
    judge=_acceptance,
    shares=1,
    words=Words(
        "{k} of {n} audits disagreed",
        "budget {bound}",
        waiting="uncertified: its e-value must reach the limit before it may be promoted",
        clear="earned",
    ),
    reads_audits=True,
    proves=True,
    remark=_held,
)


# --- all of them -----------------------------------------------------------------------------------

GATES: tuple[Gate, ...] = (accuracy, tiers, drift, slowness, failures, acceptance)
N_GATES = sum(gate.shares for gate in GATES)
KNOWN: Mapping[str, Gate] = {gate.name: gate for gate in GATES}


def read_gates(given: GateInput) -> tuple[GateStatus, ...]:
    """Every gate's reading of one step; that of tiers where there are any."""
    return tuple(gate(given) for gate in GATES if gate is not tiers or given.tiers)


def gate_level(*, confidence: float, spent: float, n_steps: int, left: int) -> float:
    """What each gate of the next of ``left`` steps may spend, of ``n_steps`` in all of which the others have ``spent``
    their part.

    An even share of what is left, so that editing the steps in mid-rollout leaves the sum as it is. Steps that are
    added when all of it is given out have a little more each: 1/n^2 of it, less than two thirds together.
    """
    whole = (1 - confidence) / N_GATES
    return max((whole - spent) / left, whole / n_steps**2)


def decided_by_audits(reading: GateStatus) -> bool:
    """Whether audits have brought about what a reading says."""
    return reading.name in KNOWN and KNOWN[reading.name].decided_by_audits(reading)


def proves(name: str) -> bool:
    """Whether the evidence of the gate of this name is of the good, and not of harm."""
    return name in KNOWN and KNOWN[name].proves


def rejection(name: str) -> AnyReason:
    """The reason with which a gate ends a rollout; a gate of another release has a word of its own."""
    reason = KNOWN[name].reason if name in KNOWN else None
    return reason or parse_reason(f"{name.capitalize()}Rejected")


def words(reading: GateStatus) -> Words:
    """The words for a reading, which a gate of another release may have made."""
    gate = KNOWN.get(reading.name)
    if gate is None:
        return Words()
    return gate.alone if gate.alone is not None and reading.bound == FAILING else gate.words
