"""The registry of reasons: every entry is whole, and means the same everywhere."""

from __future__ import annotations

import json
import re

import pytest

from offramp_core.reasons import AnyReason, ConditionType, PassedOn, Reason, RequestOutcome, Tone, condition_tone

PLACES = {"worker", "kubelet", "fetch", "rollout", "refusal", "tuning", "event"}
CONDITIONS = {f"{kind}={status}" for kind in ConditionType for status in ("True", "False", "Unknown")}


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_named_like_its_word_and_says_what_it_means_and_where(reason: Reason) -> None:
    assert re.fullmatch(r"[A-Z][A-Za-z0-9]{1,62}", reason)
    assert reason.name.replace("_", "").lower() == reason.lower(), "the member is named like its word"
    assert reason.meaning[0] in "`ABCDEFGHIJKLMNOPQRSTUVWXYZ" and reason.meaning.endswith(".")
    assert not reason.next_step.endswith("."), "it stands inside a sentence"
    assert reason.places and reason.places <= PLACES | CONDITIONS
    assert reason.next_step or reason.tone is not Tone.BAD or reason.places & {"rollout"}, "who must act is told how"


def test_a_reason_is_its_word_wherever_words_are_written_and_read() -> None:
    assert f"{Reason.ACK_TIMEOUT}" == "AckTimeout" and {Reason.ACK_TIMEOUT: 1}["AckTimeout"] == 1
    assert json.dumps({"reason": Reason.ACK_TIMEOUT}) == '{"reason": "AckTimeout"}'
    assert Reason.of("AckTimeout") is Reason.ACK_TIMEOUT and Reason.of("OfAnotherRelease") is None


def test_a_plan_can_be_refused_for_ten_reasons() -> None:
    assert len(Reason.at("refusal")) == 10


@pytest.mark.parametrize(
    ("kind", "status", "reason", "tone"),
    [
        ("ExitsCostTime", "True", Reason.MEASURED_BY_HOLDBACK, Tone.WARNING),
        ("Ready", "True", Reason.SERVING, Tone.GOOD),
        ("Ready", "False", Reason.STARTING, Tone.NEUTRAL),
        ("Reconciling", "True", Reason.PROGRESSING, Tone.WARNING),
        ("WorkersAvailable", "False", PassedOn("ContainerCannotRun"), Tone.BAD),
        ("WorkersQuarantined", "True", PassedOn("OfAnotherRelease"), Tone.BAD),
        ("AutoscalingActive", "False", PassedOn("FailedGetPodsMetric"), Tone.BAD),
        ("OfAnotherRelease", "False", PassedOn("OfAnotherRelease"), Tone.NEUTRAL),
    ],
)
def test_a_condition_has_the_tone_of_its_reason_or_else_of_its_status(
    kind: str, status: str, reason: AnyReason, tone: Tone
) -> None:
    assert condition_tone(kind, status, reason) is tone


def test_a_condition_can_be_well_and_not_well() -> None:
    for kind in ConditionType:
        said = {place.partition("=")[2] for r in Reason for place in r.places if place.startswith(f"{kind}=")}
        assert said or kind is ConditionType.AUTOSCALING_ACTIVE, f"{kind}: no reason says anything of it"


def test_no_outcome_of_a_request_is_without_meaning() -> None:
    assert all(outcome.meaning for outcome in RequestOutcome)
