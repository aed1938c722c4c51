"""Audits that were drawn and are not there when somebody decides: late ones are waited for, lost ones count as
disagreements."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache

import pytest
from fleet import MANIFEST, Fleet, SimWorker, pool  # type: ignore[import-not-found]

from offramp_core.control.objects import ArmTally, BothArms, Ledger, Rollout
from offramp_core.control.rollouts.rollout import AUDIT_WAIT_SECONDS
from offramp_core.control.snapshot import Worker
from offramp_core.protocol import ArmCounts

CLEAN = pool(4000, seed=1)


@dataclass
class Retold:
    """Stands before a worker's reports and changes its counts of an arm."""

    worker: SimWorker
    arm: str
    n: int

    def __post_init__(self) -> None:
        self.tell, self.worker.view = self.worker.view, self.view

    def view(self, *, silent: bool = False) -> Worker:
        seen = self.tell(silent=silent)
        if seen.observations is None:
            return seen
        counts = tuple(self.retold(c) if c.arm == self.arm else c for c in seen.observations.counts)
        return replace(seen, observations=replace(seen.observations, counts=counts))

    def retold(self, c: ArmCounts) -> ArmCounts:
        """Always ``n`` audits are open: those that were drawn last."""
        audited = max(0, c.audited - self.n)
        return replace(c, audited=audited, disagreements=min(c.disagreements, audited))


@dataclass
class Backlog(Retold):
    """Audits of an epoch have come to stand still, ``n`` more than were drawn besides among them. Once they are
    ``told``, ``k`` of those disagree."""

    epoch: int = 0
    k: int = 0
    told: bool = False
    done: tuple[int, int] | None = None

    def retold(self, c: ArmCounts) -> ArmCounts:
        if c.epoch != self.epoch:
            return c
        self.done = self.done or (c.audited, c.disagreements)
        done = (c.audited + self.n, c.disagreements + self.k) if self.told else self.done
        return replace(c, requests=c.requests + self.n, drawn=c.drawn + self.n, audited=done[0], disagreements=done[1])


def last(fleet: Fleet) -> Rollout:
    return list(fleet.rollouts.values())[-1]


class TestSteps:
    """The last audits of a step belong to it, although its gates have seen enough without them."""

    @staticmethod
    def in_the_first_step(*, k: int, n: int = 60) -> tuple[Fleet, Backlog]:
        fleet = Fleet(CLEAN)
        fleet.run(lambda f: f.published is not None and f.published.canary is not None)
        assert fleet.published is not None
        return fleet, Backlog(fleet.workers[0], "canary", n, fleet.published.epoch, k)

    def test_audits_that_disagree_and_come_late_stop_the_step_that_had_passed_but_for_them(self) -> None:
        fleet, backlog = self.in_the_first_step(k=60)
        fleet.run(lambda f: "still to be reported" in last(f).status.message)
        assert last(fleet).status.step == 0 and last(fleet).status.ledger.awaited >= 60
        backlog.told = True
        fleet.run(lambda f: bool(last(f).status.verdict), limit=10)
        assert (last(fleet).status.verdict, last(fleet).status.reason) == ("RolledBack", "AccuracyRejected")
        assert last(fleet).status.history == ()

    def test_audits_that_come_late_and_agree_cost_the_wait_and_nothing_else(self) -> None:
        fleet, backlog = self.in_the_first_step(k=0)
        fleet.run(lambda f: "still to be reported" in last(f).status.message)
        backlog.told = True
        fleet.step()
        assert last(fleet).status.step == 1
        assert last(fleet).status.ledger == Ledger(), "the next step begins with nothing due"

    @pytest.mark.slow
    def test_audits_that_never_come_count_as_disagreements_once_they_were_waited_for(self) -> None:
        fleet, _ = self.in_the_first_step(k=0)
        fleet.run(lambda f: "still to be reported" in last(f).status.message)
        began = fleet.now
        fleet.run(lambda f: bool(last(f).status.verdict))
        assert fleet.now - began == pytest.approx(AUDIT_WAIT_SECONDS, abs=3)
        assert (last(fleet).status.verdict, last(fleet).status.reason) == ("RolledBack", "AccuracyRejected")

    def test_the_few_of_a_worker_that_is_scaled_away_are_written_down_and_cost_a_good_plan_nothing(self) -> None:
        fleet, _ = self.in_the_first_step(k=0, n=3)
        fleet.step()
        fleet.workers[0].serve = lambda *_: []  # type: ignore[method-assign]
        fleet.step()
        gone = fleet.workers.pop(0).view().observations
        assert gone is not None and any(c.arm == "canary" and c.drawn - c.audited >= 3 for c in gone.counts)
        fleet.run(lambda f: last(f).status.step == 1)
        assert last(fleet).name == "sim-1" and last(fleet).status.history[0].k >= 3

    def test_what_is_drawn_while_it_waits_is_not_waited_for(self) -> None:
        both = {"a": BothArms(ArmTally(drawn=50, audited=30)), "b": BothArms(ArmTally(drawn=10, audited=10))}
        ledger = Ledger(3, both, due={"a": 40}, due_since_at=1.0)
        assert ledger.awaited == 10
        assert replace(ledger, live={"a": BothArms(ArmTally(drawn=90, audited=40))}).awaited == 0
        assert replace(ledger, live={}).awaited == 0, "a worker that is gone has lost them, which its tally says"

    def test_a_person_s_promote_waits_for_them_as_well(self) -> None:
        fleet = Fleet(CLEAN, {**MANIFEST, "rollout": {**MANIFEST["rollout"], "promotion": "Manual"}})
        fleet.run(lambda f: bool(f.rollouts) and last(f).status.phase == "AwaitingPromotion")
        assert fleet.published is not None
        backlog = Backlog(fleet.workers[0], "canary", 90, fleet.published.epoch, k=90)
        fleet.step()
        fleet.rollouts[last(fleet).name] = replace(last(fleet), decision="Promote")
        fleet.step()
        assert last(fleet).status.phase == "AwaitingPromotion" and "still to be reported" in last(fleet).status.message
        backlog.told = True
        fleet.step()
        assert last(fleet).status.reason == "AccuracyRejected"


def test_a_fleet_whose_pulls_always_lack_the_last_audits_rolls_out_as_fast() -> None:
    """Under load there is always something open; it is not what was open a moment ago."""
    seconds = []
    for open_audits in (0, 25):
        fleet = Fleet(CLEAN)
        for worker in fleet.workers:
            Retold(worker, "canary", open_audits)
        fleet.run(lambda f: "Succeeded" in f.verdicts())
        seconds.append(fleet.now)
    assert seconds[1] - seconds[0] < 30


@cache
def _promoted() -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "replicas": 4})
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


@pytest.mark.slow
class TestTheStablePlan:
    def test_workers_that_are_killed_with_a_few_audits_each_turn_no_exits_off(self) -> None:
        fleet = copy.deepcopy(_promoted())
        plan, fleet.requests_per_second = fleet.status.stable_config, 80
        for worker in fleet.workers[:2]:
            Retold(worker, "stable", 4)
        for _ in range(20):
            fleet.step()
        del fleet.workers[:2]
        for _ in range(100):
            fleet.step()
        assert fleet.status.stable_config == plan
        assert fleet.watch is not None and (fleet.watch.lost, fleet.watch.losses.owed) == (8, 0)

    def test_workers_that_die_of_their_audits_again_and_again_do(self) -> None:
        fleet = copy.deepcopy(_promoted())
        plan = fleet.status.stable_config
        lose = [Retold(worker, "stable", 10**9) for worker in fleet.workers]
        for second in range(600):
            fleet.step()
            if second % 5 == 4:
                lose[second // 5 % 4].worker.restart()
            if fleet.stable.exits_off:
                break
        assert fleet.stable.exits_off
        assert "of which were never reported, say" in fleet.configs[plan].status.message

    def test_the_last_audits_of_every_pull_being_late_changes_nothing(self) -> None:
        fleet = copy.deepcopy(_promoted())
        plan, fleet.requests_per_second = fleet.status.stable_config, 12
        for worker in fleet.workers:
            Retold(worker, "stable", 6)
        for _ in range(60):
            fleet.step(30.0)
        assert fleet.status.stable_config == plan
        assert fleet.watch is not None and fleet.watch.lost == 0
