"""The fleet's own detector: what all workers' audits say together about the stable plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from decimal import Decimal
from functools import cache

import numpy as np
import pytest
from fleet import BACKBONE, RAMP_SET, RAMPS, Fleet, pool  # type: ignore[import-not-found]

from offramp_core.control.watch import RUN_LENGTH, Watch, watched
from offramp_core.evidence import detector
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, Observations, RecordBlock

PLAN = Plan(BACKBONE, RAMP_SET, ramps=(RampThreshold(RAMPS[0], Decimal("0.5")),))
OTHER = Plan(BACKBONE, RAMP_SET, ramps=(RampThreshold(RAMPS[0], Decimal("0.4")),))
CLEAN, DRIFTED = pool(4000, seed=1), pool(4000, seed=2, confusion=0.35)


def told(boot: str, *audits: tuple[int, int], epoch: int = 1, plan: Plan = PLAN) -> Observations:
    """What a process has counted so far, by epoch from ``epoch`` on."""
    counts = tuple(
        ArmCounts(epoch + i, "stable", plan.content_hash, requests=10 * n, drawn=n, audited=n, disagreements=k, batches=n)
        for i, (n, k) in enumerate(audits)
    )  # fmt: skip
    return Observations(boot, boot, 0.0, counts, RecordBlock(0, 0, RAMP_SET))


def seeing(before: Watch | None, *reports: Observations, plan: Plan = PLAN, budget: float = 0.01) -> Watch:
    return watched(before, reports, boots=frozenset(o.boot_id for o in reports), plan=plan, budget=budget)


class TestWatched:
    def test_the_audits_of_all_workers_are_one_block(self) -> None:
        begun = seeing(None, told("a", (50, 0)), told("b", (50, 0)))
        now = seeing(begun, told("a", (70, 1)), told("b", (90, 2)))
        assert now.state == detector.update(detector.init(), 60, 3, p0=0.01)

    def test_a_pull_that_is_repeated_or_lost_changes_nothing(self) -> None:
        begun = seeing(None, told("a", (0, 0)), told("b", (0, 0)))
        once = seeing(begun, told("a", (10, 1)), told("b", (10, 0)))
        assert seeing(once, told("a", (10, 1)), told("b", (10, 0))).state == once.state

    def test_what_was_counted_before_this_process_looked_is_left_out_and_a_new_worker_counts_whole(self) -> None:
        begun = seeing(None, told("a", (500, 400)))
        assert begun.state == detector.init()
        assert seeing(begun, told("a", (500, 400)), told("b", (30, 1))).state.n == 30

    def test_a_new_epoch_goes_on_and_one_that_a_worker_forgot_takes_nothing_away(self) -> None:
        begun = seeing(None, told("a", (100, 0)))
        on = seeing(begun, told("a", (120, 0), (10, 0)))
        assert seeing(on, told("a", (15, 0), epoch=2)).state.n == 35
        assert len(seeing(on, told("a", (15, 0), epoch=2)).seen) == 1

    def test_one_that_was_not_believed_for_a_while_does_not_count_twice(self) -> None:
        begun = seeing(None, told("a", (100, 0)), told("b", (0, 0)))
        without = watched(begun, (told("b", (5, 0)),), boots=frozenset("ab"), plan=PLAN, budget=0.01)
        assert seeing(without, told("a", (110, 0)), told("b", (5, 0))).state.n == 15

    def test_another_plan_or_budget_begins_anew_and_a_plan_that_comes_back_counts_no_audit_twice(self) -> None:
        reports = (told("a", (40, 2)),)
        known = seeing(seeing(None, told("a", (0, 0))), *reports)
        assert known.state.n == 40
        assert seeing(known, *reports, budget=0.02).state == detector.init()
        other = seeing(known, *reports, plan=OTHER)
        assert other.state == detector.init()
        assert seeing(other, *reports).state == detector.init()

    @pytest.mark.slow
    def test_a_jump_to_five_budgets_is_noticed_within_the_audits_that_decision_11_says(self) -> None:
        """460 in nine of ten runs where a pass brings 20, over all workers together."""
        rng, needed = np.random.default_rng(5), []
        for _ in range(200):
            state, n = detector.update(detector.init(), 1000, 5, p0=0.01), 0
            while not detector.alarm(state, run_length=RUN_LENGTH):
                state = detector.update(state, 20, int(rng.binomial(20, 0.05)), p0=0.01)
                n += 20
            needed.append(n)
        assert np.quantile(needed, 0.9) <= 500


@cache
def _promoted() -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


@pytest.mark.parametrize("edit", [{}, {"suspend": True}], ids=["auto", "suspended"])
def test_exits_go_off_by_what_all_workers_say_where_no_worker_has_alarmed(edit: dict[str, bool]) -> None:
    """Their own breakers stay shut here; without the fleet's detector a suspended plan would go on for ever."""
    fleet = copy.deepcopy(_promoted())
    plan = fleet.status.stable_config
    fleet.edit(**edit)
    fleet.step()
    fleet.drift(DRIFTED)
    fleet.run(lambda f: f.stable.exits_off, limit=200)
    assert fleet.configs[plan].status.state == "Rejected"
    assert "the audits of all workers together say" in fleet.configs[plan].status.message
    assert fleet.published is not None and not fleet.published.stable.plan["ramps"]


def test_a_pass_that_was_cut_short_finds_the_same_again() -> None:
    fleet = copy.deepcopy(_promoted())
    fleet.edit(suspend=True)
    fleet.step()
    plan, service = fleet.stable, fleet.service
    assert fleet.watch is not None
    loud = replace(fleet.watch, state=detector.update(detector.init(), 400, 100, p0=0.02))
    for _ in range(2):
        fleet.watch, fleet.service = loud, service
        fleet.reconcile()
        assert fleet.stable.exits_off and fleet.watch.alarms
        assert fleet.configs[plan.name("sim")].status.rejections == 1
