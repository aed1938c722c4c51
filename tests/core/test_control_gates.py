"""A gate is one entry: whatever reads, counts or tells of gates takes it from there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fleet import RAMPS, Fleet, pool

from offramp_core.control.objects import ArmTally, BothArms, GateStatus
from offramp_core.control.rollouts import gates
from offramp_core.control.rollouts.gates import GATES, N_GATES, Evidence, Gate, GateInput, gate_level, words
from offramp_core.evidence.two_arm import log_e_share
from offramp_core.reasons import Reason

DOCS = Path(__file__).parents[2] / "docs"
PIN = {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.02"}]}}
GIVEN = GateInput(
    BothArms(ArmTally(batches=100), ArmTally(batches=300)),
    weight=25,
    budget=0.02,
    confidence=0.99,
    n_steps=1,
    slow_needed=0,
    certified=True,
)


def _crowding(given: GateInput) -> Evidence:
    """A gate on counts that are there already: it minds every canary that has more than half of its share."""
    canary, share = given.tally.canary.batches, given.share / 2
    n = canary + given.tally.stable.batches
    return Evidence(n, canary, share, log_e_share(canary, n, share=share), given.log_limit)


CROWDING = Gate(
    "crowding",
    judge=_crowding,
    shares=1,
    reason=Reason.SLOWNESS_REJECTED,
    words=gates.Words("{k} of {n} batches were the canary's"),
)


@pytest.fixture
def with_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "GATES", (*GATES, CROWDING))
    monkeypatch.setattr(gates, "KNOWN", {gate.name: gate for gate in gates.GATES})


def test_levels_are_shared_by_as_many_as_the_entries_say() -> None:
    assert sum(gate.shares for gate in GATES) == N_GATES == 3
    assert gate_level(confidence=0.99, spent=0.0, n_steps=1, left=1) == pytest.approx(0.01 / N_GATES)


def test_a_new_entry_is_read_and_judged_like_the_others() -> None:
    reading = CROWDING(GIVEN)

    assert (reading.name, reading.state, reading.k, reading.n) == ("crowding", "Rejected", 100, 400)
    assert reading.log_limit == pytest.approx(math.log(N_GATES / 0.01), abs=1e-6)
    assert "100 of 400 against 0.125" in reading.message


@pytest.mark.usefixtures("with_a_new_one")
def test_a_new_entry_takes_a_plan_back_and_is_told_of_in_its_own_words() -> None:
    fleet = Fleet(pool(4000, seed=1))
    fleet.step()
    fleet.edit(ramps=PIN)
    fleet.run(lambda f: any(r.status.finished for r in f.rollouts.values()))
    rollout = fleet.rollouts["sim-1"]

    assert (rollout.status.verdict, rollout.status.reason) == ("RolledBack", CROWDING.reason)
    reading = next(reading for reading in rollout.status.gates if reading.name == "crowding")
    assert words(reading) == CROWDING.words


@pytest.mark.parametrize("gate", GATES, ids=[gate.name for gate in GATES])
def test_every_gate_is_documented_and_ends_a_rollout_with_a_registered_word(gate: Gate) -> None:
    assert f"\n| `{gate.name}` |" in (DOCS / "concepts" / "gates.md").read_text()
    assert (gate.reason is None) == gate.proves
    assert gate.reason is None or "rollout" in gate.reason.places


def test_a_gate_of_another_release_is_told_of_by_its_figures() -> None:
    unknown = GateStatus("heat", "Rejected", 10, 3, 0.1)

    assert words(unknown).counted.format(k=3, n=10) == "3 of 10"
    assert gates.rejection("heat") == "HeatRejected"
    assert not gates.proves("heat")
