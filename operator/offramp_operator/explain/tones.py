"""The tone of a word that tells a state, for the page and the command line alike. Reasons have theirs in the registry;
phases and verdicts here."""

from __future__ import annotations

from collections.abc import Mapping

from offramp_core.reasons import Reason, Tone

_STATES: Mapping[str, Tone] = {
    **dict.fromkeys(
        ("Healthy", "Ready", "Running", "Succeeded", "Clear", "Certified", "Stable", "Accepted"), Tone.GOOD
    ),
    **dict.fromkeys(("Degraded", "Stalled", "NotReady", "Rejected", "TimedOut"), Tone.BAD),
    # On the way: not yet as it should be.
    **dict.fromkeys(
        (
            "Progressing",
            "Reconciling",
            "Starting",
            "Pending",
            "Paused",
            "AwaitingPromotion",
            "Promoting",
            "RollingBack",
            "Canary",
            "Proposed",
            "Undecided",
            "Tuning",
            "CollectingLabels",
            "RollingOut",
            "Recommended",
        ),
        Tone.WARNING,
    ),
}


def state_tone(word: str) -> Tone:
    """How to take a phase, a verdict or a worker's state; somebody else's word is neutral."""
    known = Reason.of(word)
    return _STATES.get(word) or (known.tone if known is not None else Tone.NEUTRAL)
