"""What is left out of a status that a store would not take, in which order, and what never is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from offramp_core.control.objects import (
    ArmTally,
    BothArms,
    Condition,
    ConfigStatus,
    GateStatus,
    Ledger,
    Measured,
    RolloutStatus,
    ServiceStatus,
    SliceUse,
    StepRecord,
)
from offramp_core.protocol import PlanCounts
from offramp_operator.shell.manifests import OBJECT_LIMIT_BYTES, bounded, status_json

COUNTS = {f"boot-{i}": PlanCounts("hash", 0.02, requests=1000 + i, batches=100) for i in range(50)}
LONG = "nobody knows why. " * 200
STOPPED = (SliceUse("night", 0.02, 900, 60, stopped=True),)
SERVICE = ServiceStatus(
    phase="Ready",
    message=LONG,
    measured=Measured("hash", 0.02, requests=10, live=COUNTS, base=COUNTS, slices=STOPPED),
    conditions=(Condition("Ready", "True", "Serving", LONG),),
)
ROLLOUT = RolloutStatus(
    phase="Progressing",
    message=LONG,
    gates=(GateStatus("accuracy", "Undecided", 10, 1, message=LONG),),
    ledger=Ledger(3, {"boot": BothArms(ArmTally(900, 90, 80, 3, 100, 95, 7, 1))}),
    history=tuple(StepRecord(step, 100, 1, 1_700_000_000.0) for step in range(100)),
)


def size(status: Any) -> int:
    return len(msgspec.json.encode(status_json(status)))


@pytest.mark.parametrize("status", [SERVICE, ROLLOUT, ConfigStatus(message=LONG)], ids=["service", "rollout", "config"])
def test_a_status_that_fits_is_left_as_it_is(status: Any) -> None:
    assert bounded(status, limit_bytes=OBJECT_LIMIT_BYTES) is status
    assert bounded(status, limit_bytes=size(status)) is status


def test_what_can_be_counted_again_goes_before_any_text_is_cut() -> None:
    told = bounded(SERVICE, limit_bytes=size(SERVICE) - 1)
    assert (told.measured.live, told.measured.base) == ({}, {})
    assert told.measured.slices == STOPPED, "what is stopped stays stopped"
    assert told.message == LONG and told.conditions == SERVICE.conditions


def test_texts_are_cut_last_and_say_that_they_are() -> None:
    told = bounded(SERVICE, limit_bytes=3000)
    assert len(told.message) == 1000 and told.message.endswith("…")
    assert all(len(c.message) == 1000 for c in told.conditions)
    assert (told.phase, told.conditions[0].reason) == ("Ready", "Serving")


def test_the_evidence_of_a_canary_is_never_left_out() -> None:
    told = bounded(ROLLOUT, limit_bytes=1)
    assert told.ledger == ROLLOUT.ledger and told.watch == ROLLOUT.watch
    assert told.history == ROLLOUT.history[-16:], "the steps before these are history"
    assert [(g.state, g.n, g.k) for g in told.gates] == [("Undecided", 10, 1)]
