"""What a plan was predicted to save, what traffic makes of it, and what the batches held back from it show."""

from __future__ import annotations

from typing import Any

from offramp_core.control.codec import to_json
from offramp_core.control.objects import Measured, RampUse, Saving, SliceUse, TierUse
from offramp_core.protocol import OVERLOAD, tier_of
from offramp_operator.explain.family import Family
from offramp_operator.explain.plans import predicted
from offramp_operator.explain.words import share

_SHOWN = (
    "requests",
    "batches",
    "heldBack",
    "holdbackShare",
    "answerTime",
    "engineTime",
    "audits",
    "ramps",
    "slices",
    "previousSinceAt",
)


def measured(family: Family) -> str:
    """``22% (18% to 25%)`` of the time to an answer; empty before enough batches were held back."""
    saving = family.service.status.measured.answer_time
    return "" if saving is None else _interval(saving)


def saves(family: Family) -> str:
    """``24% (audits take 3%)`` of the model's time, audits paid for; empty before anything is known."""
    seen = family.service.status.observed
    return f"{seen.savings} (audits take {seen.audits})" if seen.savings and seen.audits else seen.savings


def sentences(family: Family) -> list[str]:
    """Predicted, expected and measured savings, then every active ramp; nothing with exits off."""
    stable, seen = family.stable, family.service.status.measured
    if stable is None or stable.plan.exits_off:
        return []
    prediction, observed = stable.status.prediction, family.service.status.observed
    audits = f"less {observed.audits} for audits" if observed.audits else "without audits"
    return [
        *([f"predicted {predicted(prediction)} of the model's time, by its certificate"] if prediction else []),
        *(
            [f"expected  {observed.savings}, by who leaves where and the profile's seconds, {audits}"]
            if observed.savings
            else []
        ),
        *_compared(seen, confidence=family.service.spec.rollout.confidence),
        *(_ramp(use) for use in seen.ramps),
        *(_slice(use) for use in seen.slices if not tier_of(use.name)),
        *(_tier(use) for use in family.service.status.tiers),
    ]


def _compared(seen: Measured, *, confidence: float) -> list[str]:
    if not seen.holdback_share:
        return ["measured  nothing: ramps.holdback is 0"] if seen.plan_hash else []
    if seen.answer_time is None or seen.engine_time is None:
        return [
            f"measured  nothing yet: {seen.held_back} batches held back so far, {share(seen.holdback_share)} of all"
        ]
    counted = (
        f"{seen.batches:,} batches, {seen.held_back:,} of them held back; the interval holds at all times with "
        f"{share(confidence)}"
    )
    return [
        f"measured  {_interval(seen.answer_time)} of the time to an answer ({counted})",
        f"measured  {_interval(seen.engine_time)} of the engine's time, without audits{_taken(seen)}",
    ]


def _taken(seen: Measured) -> str:
    return "" if seen.audits is None else f", which take {share(seen.audits)}"


def _interval(saving: Saving) -> str:
    return f"{share(saving.share)} ({share(saving.low)} to {share(saving.high)})"


def _ramp(use: RampUse) -> str:
    doubt = "" if use.pays else "; it costs more than it saves"
    return f"{use.id}: {share(use.exit_share)} leave, {use.utility_seconds * 1e6:+.3g} us per request{doubt}"


def _slice(use: SliceUse) -> str:
    does = f"stopped: {use.consequence} under this plan" if use.stopped else "takes exits"
    return f"{use.title}: {use.disagreements} of {use.audited:,} audits disagreed, budget {share(use.budget)}; {does}"


_TIERS = {
    "NoPlan": "no plan is certified for it, so its requests take no exits",
    "Stopped": "stopped: its requests take no exits under this plan",
    "Waiting": "exits are off",
}


def _tier(use: TierUse) -> str:
    """``tier strict: budget 0.5%; predicted to save 12%, certified with 1 of 1,500; 0 of 80 audits disagreed``."""
    seen = f"; {use.disagreements} of {use.audited:,} audits disagreed" if use.audited else ""
    if use.name == OVERLOAD:
        return f"{_overload(use)}{seen}"
    return f"tier {use.name}: budget {share(use.budget)}; {_TIERS.get(use.state) or _proof(use)}{seen}"


def _proof(use: TierUse) -> str:
    return f"predicted to save {share(use.saving)}, certified with {use.certified_k} of {use.certified_n:,}"


def _overload(use: TierUse) -> str:
    """``overload: budget 5%; predicted to save 60%, certified with 9 of 1,500; 3,400 requests answered so; now on 1
    worker``."""
    if use.state in _NO_OVERLOAD:
        return f"overload: budget {share(use.budget)}; {_NO_OVERLOAD[use.state]}"
    now = f"now on {use.workers} worker{'s' * (use.workers != 1)}" if use.workers else "now on none"
    return f"overload: budget {share(use.budget)}; {_proof(use)}; {use.requests:,} requests answered so; {now}"


_NO_OVERLOAD = {
    "NoPlan": "no plan that saves more is certified for it, so requests have everybody's budget at any time",
    "Stopped": "stopped: requests have everybody's budget at any time under this plan",
    "Waiting": "exits are off",
}


def savings_data(family: Family) -> dict[str, Any]:
    """The same for machines, without the counters that only the operator reads."""
    status = family.service.status
    stored = to_json(status.measured)
    tiers = {"tiers": to_json(status.tiers)} if status.tiers else {}
    return {key: stored[key] for key in _SHOWN if key in stored} | tiers
