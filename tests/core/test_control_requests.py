"""What a user asks for once, by annotation: a tuning now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import MANIFEST, Fleet, pool  # type: ignore[import-not-found]

CLEAN = pool(4000, seed=1)


def ask(fleet: Fleet, text: str) -> None:
    fleet.service = replace(fleet.service, request=text)


def test_what_nobody_knows_is_told_once_and_changes_nothing() -> None:
    fleet = Fleet(CLEAN)
    ask(fleet, "dance")
    for _ in range(3):
        fleet.step()
    told = [event for event in fleet.events if event.reason == "RequestRefused"]
    assert len(told) == 1 and "asks for nothing known" in told[0].message and told[0].warning
    assert not fleet.rollouts


@pytest.mark.slow
def test_asking_to_tune_starts_the_attempt_that_was_due_in_an_hour_and_only_one() -> None:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    fleet.step()
    due = fleet.status.tuning.next_attempt_at
    assert fleet.status.tuning.state == "Idle" and due is not None and due > fleet.now + 3000
    ask(fleet, "tune/t1")
    fleet.run(lambda f: f.status.tuning.handled_request == "tune/t1")
    assert fleet.status.tuning.next_attempt_at is not None and fleet.status.tuning.next_attempt_at > due
    fleet.step()
    assert fleet.status.tuning.state in ("Idle", "RollingOut")


def test_asking_to_tune_never_runs_a_test_on_too_few_labels() -> None:
    fleet = Fleet(CLEAN, requests_per_second=20)
    ask(fleet, "tune/t1")
    for _ in range(8):
        fleet.step()
    assert fleet.status.tuning.state == "CollectingLabels"
    assert (fleet.status.tuning.tests_run, fleet.status.tuning.handled_request) == (0, "")


def test_the_wait_for_labels_is_told_at_the_pace_of_the_last_ones_and_rarely() -> None:
    fleet = Fleet(
        CLEAN,
        {
            **MANIFEST,
            "replicas": 1,
            "objective": {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.002"}},
        },
        requests_per_second=10,
    )
    messages = []
    for _ in range(120):
        fleet.step()
        messages.append(fleet.status.tuning.message)
    assert "of 5000 labels; about 6 min more at today's traffic" in messages[-1]
    assert len(set(messages[10:])) <= 120 * 10 // 100 + 1
