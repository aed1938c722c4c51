"""The fleet's own detector: what all workers' audits say together about the stable plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from decimal import Decimal
from functools import cache

import numpy as np
import pytest
from fleet import BACKBONE, RAMP_SET, RAMPS, Fleet, pool  # type: ignore[import-not-found]

from offramp_core.control.stable.watch import RUN_LENGTH, Reported, Watch, watched
from offramp_core.evidence import detector
from offramp_core.evidence.losses import LostAudits, count
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, Observations, RecordBlock

PLAN = Plan(BACKBONE, RAMP_SET, ramps=(RampThreshold(RAMPS[0], Decimal("0.5")),))
OTHER = Plan(BACKBONE, RAMP_SET, ramps=(RampThreshold(RAMPS[0], Decimal("0.4")),))
CLEAN, DRIFTED = pool(4000, seed=1), pool(4000, seed=2, confusion=0.35)


def told(boot: str, *audits: tuple[int, int], epoch: int = 1, plan: Plan = PLAN) -> Observations:
    """What a process has counted so far, by epoch from ``epoch`` on."""
    counts = tuple(
        ArmCounts(
            epoch + i, "stable", plan.content_hash, requests=10 * n, drawn=n, audited=n, disagreements=k, batches=n
        )
        for i, (n, k) in enumerate(audits)
    )
    return Observations(boot, boot, 0.0, counts, RecordBlock(0, 0, RAMP_SET))


def seeing(
    before: Watch | None,
    *reports: Observations,
    plan: Plan = PLAN,
    budget: float = 0.01,
    after: float = 1.0,
    silent: str = "",
) -> Watch:
    """The next pass, ``after`` seconds; processes that are ``silent`` still run."""
    boots = frozenset(o.boot_id for o in reports) | frozenset(silent)
    now = after if before is None else before.at + after
    return watched(before, reports, boots=boots, plan=plan, budget=budget, now=now)


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
        without = seeing(begun, told("b", (5, 0)), silent="a")
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


def opened(boot: str, drawn: int, n: int, k: int = 0, *, epoch: int = 1) -> Observations:
    """A process that has compared ``n`` of what it drew."""
    (counts,) = told(boot, (n, k), epoch=epoch).counts
    return replace(told(boot), counts=(replace(counts, drawn=drawn),))


def quiet(rng: np.random.Generator, budget: float = 0.01) -> detector.DetectorState:
    """The detector after a day of a plan at half its budget."""
    return detector.watch(detector.init(), rng.random(5_000) < budget / 2, p0=budget, run_length=RUN_LENGTH).state


def lost_at_once(n: int, state: detector.DetectorState, budget: float) -> Watch:
    """A fleet of two of which one was just scaled away, with ``n`` open audits."""
    seen = {("a", 1, PLAN.content_hash): Reported(500, 500 - n), ("b", 1, PLAN.content_hash): Reported()}
    return seeing(Watch(PLAN.content_hash, budget, state, seen), told("b", (0, 0)), budget=budget)


def after_audits(now: Watch, n: int, k: int) -> Watch:
    last = now.seen["b", 1, PLAN.content_hash]
    return seeing(now, told("b", (last.audited + n, last.disagreements + k)), budget=now.budget)


class TestLostAudits:
    def test_fifteen_hundred_of_two_thousand_draws_that_are_never_compared_are_an_alarm(self) -> None:
        now = seeing(None, opened("a", 0, 0))
        for minute in range(1, 21):
            now = seeing(now, opened("a", 100 * minute, 25 * minute), after=60.0)
        assert now.alarms and now.lost > 200

    def test_workers_that_die_of_what_they_audit_are_an_alarm_within_six_hundred_draws(self) -> None:
        """Each process draws 20 and takes 15 along."""
        now, draws = seeing(None, opened("p0", 0, 0)), 0
        while not now.alarms:
            now, draws = seeing(now, opened(f"p{draws}", 20, 5)), draws + 20
        assert draws <= 600

    @pytest.mark.parametrize("share", [0.03, 0.1])
    def test_losses_that_go_on_are_noticed_like_disagreements_that_go_on(self, share: float) -> None:
        rng, needed = np.random.default_rng(9), []
        for _ in range(60):
            state, losses, n = quiet(rng), LostAudits(), 0
            while not detector.alarm(state, run_length=RUN_LENGTH):
                lost = int(rng.binomial(20, share))
                losses, counted = count(losses, lost=lost, seen=20, budget=0.01)
                wrong = int(rng.binomial(20 - lost, 0.005))
                state, n = detector.update(state, 20 - lost + counted, wrong + counted, p0=0.01), n + 20
            needed.append(n)
        assert np.quantile(needed, 0.9) <= 1_600

    def test_those_of_a_process_that_is_gone_count_at_once_and_once(self) -> None:
        begun = seeing(seeing(None, opened("a", 0, 0), told("b", (0, 0))), opened("a", 40, 30), told("b", (10, 0)))
        gone = seeing(begun, told("b", (12, 0)))
        assert (gone.lost, gone.losses.owed) == (10, 9)
        assert gone.state == detector.update(begun.state, 2 + 1, 1, p0=0.01), "the first of them at once"
        for audits in range(100, 1_000, 100):  # the others as fast as two budgets
            gone = seeing(gone, told("b", (audits, 0)), after=100.0)
        assert (gone.state.n, gone.lost, gone.losses, {boot for boot, _, _ in gone.seen}) == (
            940,
            10,
            LostAudits(),
            {"b"},
        )

    def test_a_process_that_was_only_out_of_sight_counts_nothing_twice(self) -> None:
        begun = seeing(seeing(None, opened("a", 0, 0)), opened("a", 40, 30))
        gone = seeing(begun, told("b", (0, 0)))
        back = seeing(gone, opened("a", 50, 44, 1), told("b", (0, 0)))
        assert (gone.lost, back.lost, back.state.n + back.losses.owed) == (10, 10, 44)

    def test_audits_that_are_merely_late_count_as_what_they_say(self) -> None:
        now, drawn = seeing(None, opened("a", 0, 0)), 0
        for _ in range(400):  # always 25 open, for hours
            drawn += 20
            now = seeing(now, opened("a", drawn, max(0, drawn - 25)), after=60.0)
        assert (now.lost, now.state.n, now.alarms) == (0, drawn - 25, False)

    def test_one_that_comes_after_it_was_given_up_is_not_counted_again(self) -> None:
        now = seeing(seeing(None, opened("a", 0, 0)), opened("a", 30, 20))
        while now.lost == 0:
            now = seeing(now, opened("a", 30, 20), after=200.0)
        assert (now.lost, now.state.n + now.losses.owed) == (10, 30)
        late = seeing(now, opened("a", 35, 33, 1))
        assert late.state == detector.update(now.state, 3, 1, p0=0.01)

    def test_a_clock_that_leaps_makes_nothing_overdue(self) -> None:
        now = seeing(seeing(None, opened("a", 0, 0)), opened("a", 30, 20))
        assert seeing(now, opened("a", 30, 20), after=86_400.0).lost == 0
        assert seeing(now, opened("a", 30, 20), after=-86_400.0).lost == 0

    def test_an_operator_that_restarts_begins_with_nothing_lost(self) -> None:
        begun = seeing(None, opened("a", 5_000, 4_800))
        assert seeing(begun, opened("a", 5_000, 5_000), after=30.0).lost == 0

    def test_a_worker_that_drains_loses_nothing(self) -> None:
        begun = seeing(seeing(None, opened("a", 0, 0)), opened("a", 40, 30))
        drained = seeing(begun, opened("a", 44, 44))
        assert (seeing(drained, told("b", (0, 0))).lost, seeing(drained, told("b", (0, 0))).state.n) == (0, 44)

    @pytest.mark.slow
    @pytest.mark.parametrize("budget", [0.05, 0.01, 0.001])
    def test_a_scale_down_that_loses_a_handful_turns_no_exits_off(self, budget: float) -> None:
        """Eight audits at once, from plans at half their budget whose statistic may stand anywhere: 3 of 200 at the
        most."""
        rng, alarms = np.random.default_rng(7), 0
        for _ in range(200):
            now = lost_at_once(8, quiet(rng, budget), budget)
            while now.losses.owed and not now.alarms:
                now = after_audits(now, 20, int(rng.binomial(20, budget / 2)))
            alarms += now.alarms
        assert alarms <= 3

    def test_draws_of_an_epoch_that_a_worker_no_longer_tells_of_are_lost_and_those_of_another_plan_are_nobody_s(
        self,
    ) -> None:
        begun = seeing(seeing(None, opened("a", 0, 0)), opened("a", 40, 30))
        assert seeing(begun, told("a", (5, 0), epoch=9)).lost == 10
        assert seeing(begun, told("b", (5, 0)), plan=OTHER).lost == 0


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
