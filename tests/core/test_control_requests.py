"""What a user asks for once, by annotation: a tuning now, the approval of a recommendation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import MANIFEST, Fleet, pool  # type: ignore[import-not-found]

CLEAN = pool(4000, seed=1)


def recommending() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"mode": "Recommend"}})
    fleet.run(lambda f: f.status.candidate_config != "")
    return fleet


def ask(fleet: Fleet, text: str) -> None:
    fleet.service = replace(fleet.service, request=text)


def reasons(fleet: Fleet) -> list[str]:
    return [event.reason for event in fleet.events]


def test_a_recommendation_stays_one_until_it_is_approved_and_then_rolls_out_in_steps() -> None:
    fleet = recommending()
    name = fleet.status.candidate_config
    for _ in range(5):
        fleet.step()
    assert not fleet.rollouts and fleet.stable.exits_off
    ask(fleet, f"approve/{name}/t1")
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    assert fleet.status.stable_config == name
    assert fleet.status.tuning.handled_request == f"approve/{name}/t1"
    assert [r for r in reasons(fleet) if r in ("RampApproved", "CanaryStarted", "Promoted")] == ["RampApproved", "CanaryStarted", "Promoted"]  # fmt: skip


def test_one_approval_is_one_attempt() -> None:
    fleet = recommending()
    ask(fleet, f"approve/{fleet.status.candidate_config}/t1")
    fleet.run(lambda f: bool(f.rollouts))
    (name,) = fleet.rollouts
    fleet.rollouts[name] = replace(fleet.rollouts[name], decision="Abort")
    fleet.run(lambda f: "Aborted" in f.verdicts())
    for _ in range(30):
        fleet.step()
    assert len(fleet.rollouts) == 1


@pytest.mark.parametrize(
    ("request_text", "reason"),
    [("approve/sim-0000000000/t1", "does not exist"), ("approve/STABLE/t1", "serves already"), ("dance", "asks for nothing known")],
)  # fmt: skip
def test_what_cannot_be_done_is_told_once_and_changes_nothing(request_text: str, reason: str) -> None:
    fleet = recommending()
    ask(fleet, request_text.replace("STABLE", fleet.status.stable_config))
    for _ in range(3):
        fleet.step()
    told = [e for e in fleet.events if e.reason == "RequestRefused"]
    assert len(told) == 1 and reason in told[0].message and told[0].warning
    assert not fleet.rollouts


def test_other_modes_wait_for_no_approval() -> None:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    baseline = next(name for name, c in fleet.configs.items() if c.plan.exits_off)
    ask(fleet, f"approve/{baseline}/t1")
    fleet.step()
    assert reasons(fleet)[-1] == "RequestRefused" and "mode is Auto" in fleet.events[-1].message


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
    fleet = Fleet(CLEAN, {**MANIFEST, "replicas": 1, "objective": {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.002"}}}, requests_per_second=10)  # fmt: skip
    messages = []
    for _ in range(120):
        fleet.step()
        messages.append(fleet.status.tuning.message)
    assert "of 5000 labels; about 6 min more at today's traffic" in messages[-1]
    assert len(set(messages[10:])) <= 120 * 10 // 100 + 1


def test_a_request_in_a_suspended_service_waits() -> None:
    fleet = recommending()
    name = fleet.status.candidate_config
    fleet.edit(suspend=True)
    ask(fleet, f"approve/{name}/t1")
    fleet.step()
    assert not fleet.rollouts and fleet.status.tuning.handled_request == ""
    fleet.edit(suspend=False)
    fleet.run(lambda f: bool(f.rollouts), limit=5)
