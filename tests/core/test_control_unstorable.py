"""A store that takes no writes: what harms goes all the same, why is not forgotten, and nothing is given before it can
be stored."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from fleet import BACKBONE, RAMP_SET, Fleet, pool  # type: ignore[import-not-found]

from offramp_core.control.document import differs, only_takes_away
from offramp_core.control.snapshot import Decision
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmPlan, PlanDocument, Withdrawn

CLEAN = pool(4000, seed=1)
DRIFTED = pool(4000, seed=2, confusion=0.35)


class Refused(Fleet):  # type: ignore[misc]
    """A fleet whose store may refuse everything but documents; the shell's order is that of :class:`Decision`."""

    refuses = False

    def store(self, decision: Decision) -> None:
        if not self.refuses:
            super().store(decision)
        elif decision.publish is not None and only_takes_away(decision.publish, self.published):
            self.published = decision.publish

    @property
    def canary(self) -> ArmPlan | None:
        return self.published.canary if self.published is not None else None  # type: ignore[no-any-return]


@pytest.fixture
def fleet() -> Refused:
    return Refused(CLEAN)


@pytest.fixture
def canaried(fleet: Refused) -> Refused:
    fleet.run(lambda f: f.canary is not None)
    return fleet


@pytest.fixture
def promoted(fleet: Refused) -> Refused:
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


def test_a_harmful_canary_goes_although_its_verdict_cannot_be_stored(canaried: Refused) -> None:
    canaried.refuses = True
    canaried.drift(DRIFTED)
    canaried.run(lambda f: f.canary is None, limit=60)
    (note,) = canaried.published.withdrawn
    assert (note.rollout, note.outcome, note.reason) == ("sim-1", "RolledBack", "AccuracyRejected")
    assert canaried.rollouts["sim-1"].status.phase == "Progressing", "as it is stored"


def test_a_verdict_that_could_not_be_stored_stands_when_it_can_be_although_its_evidence_is_gone(
    canaried: Refused,
) -> None:
    canaried.refuses = True
    canaried.drift(DRIFTED)
    canaried.run(lambda f: f.canary is None, limit=60)
    canaried.drift(CLEAN)
    for worker in canaried.workers:
        worker.restart()  # nobody remembers what the canary did
    for _ in range(20):
        canaried.step()
        assert canaried.canary is None
    canaried.refuses = False
    canaried.run(lambda f: "RolledBack" in f.verdicts() or f.canary is not None, limit=60)
    bad = canaried.rollouts["sim-1"]
    assert (bad.status.verdict, bad.status.reason) == ("RolledBack", "AccuracyRejected")
    assert canaried.configs[bad.to_config].status.state == "Rejected"


def test_exits_that_an_alarm_switched_off_stay_off_until_that_is_stored(promoted: Refused) -> None:
    fallen = promoted.status.stable_config
    promoted.refuses = True
    promoted.workers[0].breaker_open = True
    promoted.step()
    assert Plan.from_mapping(promoted.published.stable.plan).exits_off
    promoted.workers[0].breaker_open = False  # the plan that alarmed is gone, and with it the alarm
    for _ in range(10):
        promoted.step()
        assert Plan.from_mapping(promoted.published.stable.plan).exits_off
    promoted.refuses = False
    promoted.step()
    assert promoted.stable.exits_off and promoted.configs[fallen].status.state == "Rejected"
    assert promoted.events[-1].reason == "DriftDetected" and "the detector of w0 says" in promoted.events[-1].message


def test_a_verdict_that_could_not_be_stored_stands_for_the_next_workers_of_a_service_at_zero(canaried: Refused) -> None:
    canaried.refuses = True
    canaried.drift(DRIFTED)
    canaried.run(lambda f: f.canary is None, limit=60)
    canaried.drift(CLEAN)
    workers, canaried.workers = canaried.workers, []
    canaried.edit(replicas=0)
    canaried.step()
    canaried.refuses = False
    canaried.step()
    assert canaried.rollouts["sim-1"].status.phase == "RollingBack"
    for worker in workers:
        worker.restart()
    canaried.workers = workers
    canaried.edit(replicas=2)
    canaried.run(lambda f: "RolledBack" in f.verdicts() or f.canary is not None, limit=60)
    assert canaried.rollouts["sim-1"].status.reason == "AccuracyRejected"


def test_a_plan_that_an_alarm_switched_off_does_not_lie_in_wait_for_the_next_workers(promoted: Refused) -> None:
    fallen = promoted.status.stable_config
    promoted.refuses = True
    promoted.workers[0].breaker_open = True
    promoted.step()
    promoted.workers = []
    promoted.edit(replicas=0)
    promoted.step()
    promoted.refuses = False
    promoted.step()
    assert promoted.stable.exits_off and Plan.from_mapping(promoted.published.stable.plan).exits_off
    assert promoted.configs[fallen].status.state == "Rejected"


def test_nothing_is_given_before_it_can_be_stored(fleet: Refused) -> None:
    fleet.run(lambda f: any(r.status.phase == "Pending" for r in f.rollouts.values()))
    fleet.refuses = True
    for _ in range(20):
        fleet.step()
        assert fleet.canary is None
    fleet.refuses = False
    fleet.run(lambda f: f.canary is not None)


# --- what only takes away --------------------------------------------------------------------------

OFF = Plan(BACKBONE, RAMP_SET)
BOLD, CAUTIOUS = (
    Plan(BACKBONE, RAMP_SET, (RampThreshold("r00-grid", Decimal(threshold)),)) for threshold in ("0.5", "0.1")
)


def serves(stable: Plan, canary: Plan | None = None, weight: int = 0, **fields: Any) -> PlanDocument:
    arm = ArmPlan(canary.to_mapping(), 1.0) if canary is not None else None
    salt = "sim-1/0/0" if canary is not None else ""
    return replace(PlanDocument("sim", "uid", 1, ArmPlan(stable.to_mapping(), 0.1), arm, weight, salt, 0.02), **fields)


def with_tiers(document: PlanDocument, *, stable: tuple[str, ...] = (), canary: tuple[str, ...] = ()) -> PlanDocument:
    arm = replace(document.canary, tiers=canary) if document.canary is not None else None
    return replace(document, stable=replace(document.stable, tiers=stable), canary=arm)


@pytest.mark.parametrize(
    ("published", "document", "takes"),
    [
        pytest.param(serves(OFF, BOLD, 20), serves(OFF), True, id="a canary ends"),
        pytest.param(serves(OFF, BOLD, 50), serves(OFF, BOLD, 20), True, id="a canary gets less"),
        pytest.param(serves(OFF, BOLD, 20), serves(OFF, BOLD, 50), False, id="a canary gets more"),
        pytest.param(serves(OFF), serves(OFF, BOLD, 20), False, id="a canary begins"),
        pytest.param(serves(OFF, BOLD, 20), serves(OFF, BOLD, 20, salt="sim-1/0/1"), False, id="a step begins again"),
        pytest.param(serves(OFF, BOLD, 50), serves(OFF, CAUTIOUS, 20), False, id="another canary takes its place"),
        pytest.param(serves(OFF, BOLD, 50), serves(BOLD), False, id="a canary is promoted"),
        pytest.param(serves(BOLD), serves(OFF), True, id="exits go off"),
        pytest.param(serves(BOLD, CAUTIOUS, 20), serves(OFF), True, id="everything goes off"),
        pytest.param(serves(BOLD), serves(OFF, CAUTIOUS, 20), False, id="exits go off and a canary begins"),
        pytest.param(serves(BOLD), serves(CAUTIOUS), False, id="another plan becomes stable"),
        pytest.param(
            serves(BOLD),
            serves(CAUTIOUS, withdrawn=(Withdrawn(BOLD.name("sim"), "DecisionAbort", "m", "sim-1", "Aborted"),)),
            True,
            id="a promotion is taken back",
        ),
        pytest.param(
            serves(BOLD, slices=("a", "b")),
            serves(BOLD, slices=("a", "b"), stopped_slices=("a",)),
            True,
            id="a slice is stopped",
        ),
        pytest.param(
            serves(BOLD, slices=("a", "b"), stopped_slices=("a",)),
            serves(BOLD, slices=("a", "b")),
            False,
            id="a slice is freed",
        ),
        pytest.param(
            serves(BOLD, slices=("a",), stopped_slices=("a",)),
            serves(BOLD, slices=("a",), stopped_slices=("a",), capture_since=5.0),
            False,
            id="only captures begin",
        ),
        pytest.param(
            serves(BOLD, CAUTIOUS, 50, tiers={"strict": 0.001}),
            with_tiers(serves(BOLD, CAUTIOUS, 20, tiers={"strict": 0.001}), canary=("strict",)),
            False,
            id="a canary gets less, and a tier",
        ),
        pytest.param(
            with_tiers(serves(BOLD, CAUTIOUS, 20, tiers={"strict": 0.001}), canary=("strict",)),
            serves(BOLD, CAUTIOUS, 20, tiers={"strict": 0.001}),
            True,
            id="a canary loses a tier",
        ),
        pytest.param(
            with_tiers(serves(BOLD, CAUTIOUS, 50, tiers={"strict": 0.001}), stable=("strict",)),
            with_tiers(serves(BOLD, CAUTIOUS, 20, tiers={"strict": 0.002}), stable=("strict",)),
            False,
            id="a canary gets less, and the stable plan's tier a larger budget",
        ),
        pytest.param(
            with_tiers(serves(BOLD, CAUTIOUS, 50, tiers={"strict": 0.001}), canary=("strict",)),
            with_tiers(serves(BOLD, CAUTIOUS, 20, tiers={"strict": 0.002}), canary=("strict",)),
            False,
            id="a canary gets less, and its tier a larger budget",
        ),
        pytest.param(
            with_tiers(serves(BOLD, tiers={"strict": 0.002}), stable=("strict",)),
            serves(BOLD, tiers={"strict": 0.001}),
            True,
            id="a tier is tightened and takes no exits",
        ),
        pytest.param(
            with_tiers(serves(BOLD, tiers={"strict": 0.001}), stable=("strict",)),
            serves(BOLD, tiers={"strict": 0.002}),
            True,
            id="a tier takes no exits, whatever its budget",
        ),
        pytest.param(
            serves(BOLD, CAUTIOUS, 20),
            serves(BOLD, accuracy_budget=0.05),
            False,
            id="a canary ends, and everybody's budget is larger",
        ),
        pytest.param(
            serves(BOLD, CAUTIOUS, 20),
            serves(BOLD, accuracy_budget=0.01),
            True,
            id="a canary ends, and everybody's budget is smaller",
        ),
        pytest.param(
            serves(BOLD, CAUTIOUS, 20),
            serves(OFF, accuracy_budget=0.05),
            True,
            id="everything goes off, whatever the budget",
        ),
        pytest.param(None, serves(OFF), False, id="the first document"),
    ],
)
def test_what_only_takes_away_is_told_from_what_gives(
    published: PlanDocument | None, document: PlanDocument, takes: bool
) -> None:
    assert only_takes_away(document, published) is takes


def test_a_note_alone_makes_no_difference() -> None:
    noted = replace(serves(OFF), withdrawn=(Withdrawn("sim-1", "DriftDetected", "m"),))
    assert not differs(replace(serves(OFF), epoch=2), noted)
