"""What exits save, measured: the meter of one worker, the pooled figures, and what the control loop does about them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet import BACKBONE, MANIFEST, RAMP_SET, RAMPS, Fleet, pool  # type: ignore[import-not-found]
from metering import PLAN, looked, metered
from scipy.stats import binom

from offramp_core.control.codec import from_json, to_json
from offramp_core.control.objects import Measured, Saving, ServiceStatus
from offramp_core.control.stable import holdback
from offramp_core.control.stable.holdback import loss
from offramp_core.evidence.meter import BOUND, CALIBRATION_BATCHES, HoldbackMeter
from offramp_core.plan import Plan
from offramp_core.protocol import PlanCounts, TimeSums


def audited(*, seconds: float, meter: HoldbackMeter | None = None) -> HoldbackMeter:
    """1,000 requests in batches that would take 0.1 s each with exits off, where each is audited for ``seconds``."""
    meter = meter or HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0)
    meter.count_replies("final", 1000)
    for _ in range(1000):
        meter.count_audited_batch(expected_seconds=0.1)
        meter.count_audit_time(seconds)
    return meter


class TestMeter:
    def test_the_interval_of_a_plan_that_saves_a_third_holds_it_and_tells_it_from_nothing(self) -> None:
        measured = looked(metered(30_000, share=0.05, take=2 / 3, seed=1))
        for saving in (measured.answer_time, measured.engine_time):
            assert saving is not None
            assert 0.1 < saving.low < 1 / 3 < saving.high < 0.5

    def test_a_machine_five_times_slower_than_the_profile_is_measured_in_its_own_pace(self) -> None:
        slow, quick = (metered(20_000, share=0.05, take=0.7, seed=2, unit=u).counts() for u in (0.05, 0.01))
        assert slow.engine_time.saved == pytest.approx(quick.engine_time.saved, rel=1e-9)

    def test_answers_may_come_sooner_while_the_engine_works_longer(self) -> None:
        meter, rng = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.2), np.random.default_rng(3)
        for held_back in (rng.random(20_000) < 0.2).tolist():
            answer, engine = (1.0, 1.0) if held_back else (0.5, 1.04)
            meter.count_batch(held_back=held_back, expected_seconds=1.0, answer_seconds=answer, engine_seconds=engine)
        measured = looked(meter)
        assert measured.answer_time is not None and measured.engine_time is not None
        assert measured.answer_time.low > 0.4
        assert measured.engine_time.high < 0
        assert loss(measured, max_overhead=0.05) == "", "results-only execution may take what ramps.maxOverhead allows"
        assert "engine time" in loss(measured, max_overhead=0.01)

    def test_it_counts_exits_and_compares_nothing_without_a_holdback(self) -> None:
        meter = HoldbackMeter(plan_hash="p", share=0.0)
        meter.count_replies("r0", 3)
        meter.count_batch(held_back=False, expected_seconds=1.0, answer_seconds=1.0, engine_seconds=1.0)
        assert meter.counts() == PlanCounts("p", 0.0, requests=3, exits={"r0": 3})

    def test_asking_often_changes_nothing(self) -> None:
        once, often = (HoldbackMeter(plan_hash="p", share=0.3) for _ in range(2))
        rng = np.random.default_rng(4)
        for held_back, seconds in zip((rng.random(400) < 0.3).tolist(), rng.random(400).tolist(), strict=True):
            for meter in (once, often):
                meter.count_batch(
                    held_back=held_back, expected_seconds=0.5, answer_seconds=seconds, engine_seconds=seconds
                )
            often.counts()
        assert often.counts() == once.counts()

    def test_a_stall_counts_as_the_bound_and_the_batches_that_set_the_unit_count_not_at_all(self) -> None:
        meter = HoldbackMeter(plan_hash="p", share=0.5)
        for _ in range(CALIBRATION_BATCHES):
            meter.count_batch(held_back=True, expected_seconds=1.0, answer_seconds=2.0, engine_seconds=2.0)
        assert meter.counts().batches == 0
        meter.count_batch(held_back=False, expected_seconds=1.0, answer_seconds=1e6, engine_seconds=1e6)
        assert meter.counts().engine_time.spent == pytest.approx(1.0 + (BOUND - 1.0) / 0.5)

    def test_audits_are_told_beside_what_their_batches_take_here_and_not_by_the_profile(self) -> None:
        meter = HoldbackMeter(plan_hash="p", share=0.5)
        for _ in range(CALIBRATION_BATCHES):
            meter.count_batch(held_back=True, expected_seconds=1.0, answer_seconds=2.0, engine_seconds=2.0)
            meter.count_audited_batch(expected_seconds=1.0)
        meter.count_audit_time(0.5)
        told = meter.counts()
        assert (told.audit_seconds, told.exact_seconds) == (0.5, 2.0 * CALIBRATION_BATCHES)


class TestLook:
    def test_workers_pool_and_one_that_is_gone_keeps_its_counts(self) -> None:
        both = looked(*(metered(4000, share=0.2, take=0.6, seed=s) for s in (5, 6)))
        assert both.batches > 7_800 and both.answer_time is not None
        alone = looked(metered(6000, share=0.2, take=0.6, seed=5), before=both, now=60.0)
        assert set(alone.live) == {"boot-0"}
        assert alone.retired.batches == both.live["boot-1"].batches
        assert alone.batches > both.batches

    def test_it_looks_again_only_when_there_is_a_tenth_more(self) -> None:
        meter = metered(4000, share=0.2, take=0.6, seed=7)
        first = looked(meter)
        assert looked(metered(200, share=0.2, take=0.6, seed=8, meter=meter), before=first) is first
        assert looked(metered(600, share=0.2, take=0.6, seed=9, meter=meter), before=first).batches > first.batches

    def test_a_restart_of_the_operator_loses_nothing(self) -> None:
        meter = metered(4000, share=0.2, take=0.6, seed=10)
        first = looked(meter)
        stored = from_json(ServiceStatus, to_json(ServiceStatus(measured=first))).measured
        assert stored == first
        metered(4000, share=0.2, take=0.6, seed=11, meter=meter)
        assert looked(meter, before=stored) == looked(meter, before=first)

    def test_a_report_that_went_backwards_or_is_of_another_plan_or_share_changes_nothing(self) -> None:
        first = looked(metered(4000, share=0.2, take=0.6, seed=12))
        other = HoldbackMeter(plan_hash="other", share=0.2)
        metered(9000, share=0.2, take=3.0, seed=12, meter=other)
        for liar in (metered(10, share=0.2, take=0.6, seed=12), other, metered(9000, share=0.1, take=3.0, seed=12)):
            assert looked(liar, before=first, share=0.2) is first

    def test_what_was_saved_the_day_before_yesterday_is_forgotten(self) -> None:
        meter = metered(8_000, share=0.2, take=0.5, seed=13)
        day, seen = holdback.WINDOW_SECONDS, looked(meter)
        assert seen.answer_time is not None and seen.answer_time.low > 0.3
        for days in (1.0, 2.0, 3.0):
            metered(8_000, share=0.2, take=1.5, seed=14 + int(days), meter=meter)
            seen = looked(meter, before=seen, now=days * day)
            assert seen.answer_time is not None
        assert seen.answer_time.high < 0 and "later" in loss(seen, max_overhead=0.05)
        assert seen.batches < 17_000, "only the last two windows"

    def test_another_plan_or_share_begins_anew_and_exits_off_has_no_figures(self) -> None:
        meter = metered(4000, share=0.2, take=0.6, seed=15)
        first = looked(meter)
        assert looked(meter, before=first, share=0.1).batches == 0
        assert looked(meter, before=first, plan=Plan(BACKBONE, RAMP_SET)) == Measured()

    @pytest.mark.parametrize(
        "lie",
        [
            {"held_back": 5, "batches": 4},
            {"requests": -1},
            {"requests": 1, "exits": {"r": 2}},
            {"engine_time": TimeSums(saved=math.inf)},
            {"answer_time": TimeSums(saved_surprise=-1.0)},
            {"audit_seconds": -1.0},
            {"exact_seconds": math.nan},
            {"audit_seconds": 1e300},
        ],
        ids=lambda lie: next(iter(lie)),
    )
    def test_counts_that_cannot_be_are_told(self, lie: dict[str, Any]) -> None:
        assert holdback.impossible_counts(PlanCounts("p", **lie))
        assert not holdback.impossible_counts(PlanCounts("p"))

    @pytest.mark.parametrize("workers", [1, 3])
    def test_what_audits_take_is_a_share_of_the_time_of_exits_off(self, workers: int) -> None:
        measured = looked(*(audited(seconds=0.003) for _ in range(workers)))
        assert measured.audits == pytest.approx(0.03)
        assert looked(audited(seconds=0.0)).audits == 0.0

    def test_workers_of_before_tell_of_no_audits_and_thin_out_nothing(self) -> None:
        older = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0)
        older.count_replies("final", 5000)
        assert looked(audited(seconds=0.003), older).audits == pytest.approx(0.03)
        assert looked(older).audits is None

    def test_counts_of_a_worker_of_before_and_a_status_of_before_say_nothing_of_audits(self) -> None:
        stored = to_json(ServiceStatus(measured=looked(audited(seconds=0.003))))["measured"]
        assert stored.pop("audits") == pytest.approx(0.03)
        for counts in stored["live"].values():
            del counts["auditSeconds"], counts["exactSeconds"]
        before = from_json(Measured, stored)
        assert before.audits is None
        meter = audited(seconds=0.003, meter=audited(seconds=0.003))
        assert looked(meter, before=before).audits == pytest.approx(0.03)

    def test_a_status_can_hold_whatever_a_worker_says_that_may_be(self) -> None:
        meter = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0)
        meter.count_replies("final", 1000)
        meter.count_audit_time(1e10)
        meter.count_audited_batch(expected_seconds=1e-300)
        assert not holdback.impossible_counts(meter.counts())
        took = looked(meter).audits
        assert took is not None and len(f"{-took:.0%}") <= 32

    def test_a_day_with_many_audits_is_forgotten(self) -> None:
        day, meter = holdback.WINDOW_SECONDS, audited(seconds=0.01)
        seen = looked(meter)
        for days in (1.0, 2.0, 3.0):
            seen = looked(audited(seconds=0.001, meter=meter), before=seen, now=days * day)
        assert seen.audits == pytest.approx(0.01)

    def test_figures_fit_into_json_before_they_mean_anything(self) -> None:
        measured = looked(metered(200, share=0.2, take=0.6, seed=16))
        assert measured.answer_time is not None
        assert -10 < measured.answer_time.low < measured.answer_time.share < measured.answer_time.high <= 1


class TestUtility:
    """r00 spares 8 ms of 10 and costs 0.1 ms, so it must catch 1.25 % of what reaches it; r02 spares 4 ms: 2.5 %."""

    def use(self, *, first: int, last: int, of: int = 10_000) -> dict[str, Any]:
        meter = HoldbackMeter(plan_hash=PLAN.content_hash, share=0.0)
        for name, rows in ((RAMPS[0], first), (RAMPS[2], last), ("final", of - first - last)):
            meter.count_replies(name, rows)
        return {use.id: use for use in looked(meter).ramps}

    def test_it_is_what_those_who_leave_save_less_what_it_costs_those_who_pass(self) -> None:
        uses = self.use(first=3000, last=1000)
        assert uses[RAMPS[0]].utility_seconds == pytest.approx(0.3 * 0.008 - 0.0001)
        assert uses[RAMPS[2]].utility_seconds == pytest.approx(0.1 * 0.004 - 0.7 * 0.0001)
        assert uses[RAMPS[0]].exit_share == 0.3
        assert all(use.pays for use in uses.values())

    def test_a_ramp_that_hardly_anybody_takes_is_told_and_its_neighbour_is_not(self) -> None:
        uses = self.use(first=3000, last=50)
        assert uses[RAMPS[2]].utility_seconds < 0
        assert (uses[RAMPS[0]].pays, uses[RAMPS[2]].pays) == (True, False)

    def test_below_break_even_by_chance_is_no_evidence(self) -> None:
        uses = self.use(first=3000, last=160)
        assert uses[RAMPS[2]].utility_seconds < 0
        assert uses[RAMPS[2]].pays


@pytest.mark.slow
class TestErrorRates:
    """Whole lives of a plan, looked at whenever there is a tenth more; bursts and a wandering pace are in them."""

    RUNS = 200

    def losses(self, take: float, *, batches: int, share: float = 0.05) -> int:
        called = 0
        for seed in range(self.RUNS):
            meter, seen = HoldbackMeter(plan_hash=PLAN.content_hash, share=share), Measured()
            for part in range(5):
                metered(batches // 5, share=share, take=take, seed=1000 * seed + part, meter=meter)
                seen = looked(meter, before=seen)
                if loss(seen, max_overhead=0.0):
                    called += 1
                    break
        return called

    def test_a_plan_that_just_breaks_even_is_hardly_ever_called_a_loss(self) -> None:
        allowed = int(binom.isf(1e-3, self.RUNS, 0.01))
        assert self.losses(1.0, batches=5000) <= allowed

    def test_a_plan_that_takes_half_as_long_again_is_called_a_loss_within_fifteen_thousand_batches(self) -> None:
        assert self.losses(1.5, batches=15_000) >= int(binom.isf(1 - 1e-3, self.RUNS, 0.95))


HELD = {**MANIFEST, "ramps": {"holdback": "0.2"}}


@pytest.fixture(scope="module")
def served() -> Fleet:
    fleet = Fleet(pool(4000, seed=1), HELD)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


@pytest.fixture
def fleet(served: Fleet) -> Fleet:
    return copy.deepcopy(served)


def measured(fleet: Fleet) -> Measured:
    return fleet.status.measured


def told(*, batches: int) -> Callable[[Fleet], bool]:
    return lambda f: measured(f).answer_time is not None and measured(f).batches >= batches


class TestInTheLoop:
    def test_no_batch_is_held_back_before_a_plan_serves_and_its_share_is_afterwards(self, fleet: Fleet) -> None:
        assert fleet.published is not None and fleet.published.holdback_share == 0.2
        first = Fleet(pool(400, seed=1), HELD)
        first.run(lambda f: f.published is not None)
        assert first.published is not None and first.published.holdback_share == 0.0

    @pytest.mark.slow
    def test_savings_come_to_stand_in_the_status_and_are_written_seldom(self, fleet: Fleet) -> None:
        fleet.run(told(batches=4000))
        saving = measured(fleet).engine_time
        assert saving is not None
        assert saving.low < 0.2 < saving.high and saving.low > 0
        assert {use.id for use in measured(fleet).ramps} == {ramp.id for ramp in fleet.stable.ramps}
        before, looks = measured(fleet), 0
        for _ in range(40):
            fleet.step()
            looks += measured(fleet) is not before
            before = measured(fleet)
        assert looks <= 9

    @pytest.mark.slow
    def test_what_the_status_says_is_saved_is_less_by_what_audits_took(self, fleet: Fleet) -> None:
        free = copy.deepcopy(fleet)
        for worker in fleet.workers:
            worker.audit_seconds = 0.01
        for each in (free, fleet):
            for _ in range(60):
                each.step()
        assert measured(free).audits == 0.0
        took, without, saves = measured(fleet).audits, free.status.observed, fleet.status.observed
        assert took is not None and took > 0.02
        assert saves.audits == f"{took:.0%}" and without.audits == "0%"
        percent = [int(told.savings.rstrip("%")) for told in (without, saves)]
        assert percent[0] - percent[1] == pytest.approx(100 * took, abs=1)

    @pytest.mark.slow
    def test_audits_are_no_reason_to_switch_exits_off_as_exits_off_would_be_audited_too(self, fleet: Fleet) -> None:
        name = fleet.status.stable_config
        for worker in fleet.workers:
            worker.audit_seconds = 1.0
        for _ in range(60):
            fleet.step()
        assert (measured(fleet).audits or 0.0) > 1
        assert fleet.status.stable_config == name and fleet.status.observed.savings.startswith("-")

    def test_a_plan_that_costs_time_is_switched_off_and_cools_down(self, fleet: Fleet) -> None:
        name = fleet.status.stable_config
        for worker in fleet.workers:
            worker.exits_take = 1.6
        fleet.run(lambda f: f.stable.exits_off, limit=300)
        event = next(e for e in fleet.events if e.reason == "ExitsCostTime")
        assert "answers come later" in event.message and event.warning
        assert fleet.configs[name].status.state == "Rejected"
        assert (fleet.configs[name].status.rejected_until_at or 0) > fleet.now
        assert (fleet.status.tuning.next_attempt_at or 0) > fleet.now
        assert measured(fleet) == Measured()
        fleet.step()
        assert fleet.published is not None and fleet.published.holdback_share == 0.0

    def test_a_pinned_plan_that_costs_time_stays_and_a_condition_says_so(self, fleet: Fleet) -> None:
        ramps = [{"id": r.id, "threshold": str(r.threshold)} for r in fleet.stable.ramps]
        fleet.edit(ramps={"mode": "Pinned", "holdback": "0.2", "pin": {"ramps": ramps}})
        for worker in fleet.workers:
            worker.exits_take = 1.6
        fleet.run(lambda f: any(c.type == "ExitsCostTime" for c in f.status.conditions), limit=400)
        assert not fleet.stable.exits_off
        condition = next(c for c in fleet.status.conditions if c.type == "ExitsCostTime")
        assert condition.status == "True" and "it is pinned, so it stays" in condition.message

    @pytest.mark.slow
    def test_a_worker_that_claims_the_impossible_is_quarantined_and_not_pooled(self, fleet: Fleet) -> None:
        fleet.run(told(batches=2000))
        meter = next(iter(fleet.workers[0].meters.values()))
        meter._held_back = meter._batches + 1000
        before = measured(fleet)
        for _ in range(3):
            fleet.step()
        assert fleet.status.workers.quarantined == ("w0",)
        assert measured(fleet).held_back - before.held_back < 900

    @pytest.mark.slow
    def test_a_ramp_that_does_not_pay_has_the_plan_looked_over_once(self, fleet: Fleet) -> None:
        fleet.run(lambda f: f.status.tuning.state == "Idle")
        tested = fleet.status.tuning.tuned_for
        assert tested
        for worker in fleet.workers:  # nobody leaves there any more
            for meter in worker.meters.values():
                meter._exits, meter._requests = {"final": 10**6}, 10**6
        fleet.records = replace(fleet.records, uncertainty=np.ones_like(fleet.records.uncertainty))
        fleet.run(lambda f: any(e.reason == "RampDoesNotPay" for e in f.events), limit=5)
        assert fleet.status.tuning.unpaying == fleet.status.stable_config
        fleet.run(lambda f: f.status.tuning.tuned_for == tested, limit=60)
        for _ in range(30):
            fleet.step()
        assert sum(e.reason == "RampDoesNotPay" for e in fleet.events) == 1


def test_no_saving_is_told_of_a_plan_before_enough_batches_were_held_back() -> None:
    assert looked(metered(60, share=0.05, take=0.5, seed=20)).answer_time is None
    assert loss(Measured(answer_time=Saving(-0.5, -0.9, 0.01)), max_overhead=0.0) == ""
