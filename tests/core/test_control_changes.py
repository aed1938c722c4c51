"""What a change in mid-rollout does: edits of the spec, decisions of people, alarms, clocks, and workers that cannot be
believed."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from fleet import BACKBONE, MANIFEST, RAMP_SET, RAMPS, Fleet, SimWorker, pool  # type: ignore[import-not-found]

from offramp_core.control.codec import from_json, to_json
from offramp_core.control.decide import decide
from offramp_core.control.objects import ArmTally, BothArms, Rollout, TuningStatus, ring
from offramp_core.control.rollouts.gates import N_GATES, GateInput, gate_level, read_gates
from offramp_core.control.rollouts.rollout import ACK_TIMEOUT_SECONDS
from offramp_core.control.snapshot import Decision, RecordStore
from offramp_core.evidence import detector
from offramp_core.tuning import NeedsLabels, NoGain

CLEAN = pool(4000, seed=1)
DRIFTED = pool(4000, seed=2, confusion=0.35)
PIN = {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.02"}]}}
OTHER_PIN = {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.03"}]}}


def objective(budget: str, *, latency: str = "100ms", **more: str) -> dict[str, Any]:
    return {"latency": {"threshold": latency}, "accuracy": {"maxDisagreement": budget, **more}}


def last(fleet: Fleet) -> Rollout:
    return max(fleet.rollouts.values(), key=lambda r: r.number)


def phase(fleet: Fleet) -> str:
    return last(fleet).status.phase if fleet.rollouts else ""


def say(fleet: Fleet, **changes: Any) -> None:
    """A person changes the newest rollout."""
    fleet.rollouts[last(fleet).name] = replace(last(fleet), **changes)


@cache
def _until(wanted: str) -> Fleet:
    fleet = Fleet(CLEAN)
    fleet.run(lambda f: phase(f) == wanted)
    return fleet


def at(wanted: str) -> Fleet:
    """A fleet whose first rollout has just come to a phase."""
    return copy.deepcopy(_until(wanted))


def exits_off_at_workers(fleet: Fleet) -> bool:
    return fleet.published is not None and not fleet.published.stable.plan["ramps"] and fleet.published.canary is None


@cache
def _torn(pinned: bool) -> Fleet:
    fleet = Fleet(CLEAN, {**MANIFEST, "ramps": PIN} if pinned else MANIFEST)
    whole = fleet.store

    def store(decision: Decision) -> None:
        promotes = any(status.phase == "Promoting" for status in decision.rollout_statuses.values())
        whole(replace(decision, status=fleet.service.status, publish=None) if promotes else decision)

    fleet.store = store
    fleet.run(lambda f: phase(f) == "Promoting")
    del fleet.store
    return fleet


def torn(*, pinned: bool) -> Fleet:
    """A fleet that serves without exits, whose promoting pass wrote the rollout and nothing after it: the service had
    been edited meanwhile, or the operator died."""
    return copy.deepcopy(_torn(pinned))


def fleet_limits(fleet: Fleet) -> dict[str, float]:
    return {gate.name: gate.log_limit for gate in last(fleet).status.gates}


class TestSteps:
    @pytest.mark.slow
    def test_steps_that_become_fewer_in_mid_rollout_are_taken_from_the_present_weight_on(self) -> None:
        fleet = at("Progressing")
        fleet.run(lambda f: last(f).status.weight == 50)
        fleet.edit(rollout={**MANIFEST["rollout"], "steps": [{"weight": 60}]})
        fleet.step()
        assert fleet.status.rollout.summary == "Step 2/3 50%"
        fleet.run(lambda f: last(f).status.weight == 60)
        fleet.run(lambda f: phase(f) == "Succeeded")
        assert [s.weight for s in last(fleet).status.history] == [20, 50]

    def test_with_no_higher_step_left_the_present_one_must_still_pass(self) -> None:
        fleet = at("Progressing")
        fleet.edit(rollout={**MANIFEST["rollout"], "steps": [{"weight": 5}, {"weight": 10}]})
        fleet.step()
        assert phase(fleet) == "Progressing"
        fleet.run(lambda f: phase(f) == "Promoting")
        gates = {g.name: g.state for g in last(fleet).status.gates}
        assert gates["accuracy"] == gates["slowness"] == "Clear"

    def test_an_edit_of_the_steps_leaves_the_level_of_the_present_one_and_the_sum_of_all(self) -> None:
        fleet = at("Progressing")
        fleet.run(lambda f: bool(fleet_limits(f)))
        before, known = fleet_limits(fleet), last(fleet).status.gate_level
        fleet.edit(rollout={**MANIFEST["rollout"], "steps": [{"weight": w} for w in (20, 30, 40, 50, 60, 70)]})
        fleet.step()
        assert fleet_limits(fleet) == before and last(fleet).status.gate_level == known
        fleet.run(lambda f: last(f).status.step == 1)
        assert last(fleet).status.level_spent == pytest.approx(known)
        assert known + 5 * last(fleet).status.gate_level == pytest.approx(0.01 / N_GATES)

    def test_however_often_steps_are_edited_the_gates_spend_hardly_more_than_the_rollout_may(self) -> None:
        rng, whole = np.random.default_rng(1), 0.01 / N_GATES
        for edits in (0.0, 0.2, 0.5):
            for _ in range(200):
                spent, step, left = 0.0, 0, int(rng.integers(1, 12))
                while left and step < 200:
                    spent += gate_level(confidence=0.99, spent=spent, n_steps=step + left, left=left)
                    step, left = step + 1, int(rng.integers(0, 12)) if rng.random() < edits else left - 1
                assert spent <= (1.65 if edits else 1.0) * whole * (1 + 1e-9)

    def test_a_changed_latency_objective_alone_leaves_the_canary(self) -> None:
        fleet = at("Progressing")
        fleet.edit(objective=objective("0.02", latency="50ms"))
        fleet.step()
        assert phase(fleet) == "Progressing"


class TestIntent:
    @pytest.mark.parametrize(
        "change",
        [
            {"objective": objective("0.01")},
            {"objective": objective("0.02", confidence="0.99")},
            {"ramps": {"maxOverhead": "0.04"}},
            {"ramps": PIN},
            {"ramps": {"mode": "Disabled"}},
            {"execution": "ResultsOnly"},
        ],
        ids=["budget", "confidence", "overhead", "pin", "disabled", "execution"],
    )
    def test_another_intent_supersedes_the_canary_at_once(self, change: dict[str, Any]) -> None:
        fleet = at("Progressing")
        fleet.edit(**change)
        fleet.step()
        assert fleet.published is not None and fleet.published.canary is None
        fleet.step()
        assert fleet.rollouts["sim-1"].status.verdict == "Superseded"

    def test_a_newer_pin_supersedes_an_older_one(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(ramps=PIN)
        fleet.run(lambda f: phase(f) == "Progressing", limit=5)
        fleet.edit(ramps=OTHER_PIN)
        fleet.run(lambda f: last(f).number == 3, limit=5)
        assert fleet.rollouts["sim-2"].status.verdict == "Superseded"
        assert str(fleet.configs[last(fleet).to_config].plan.ramps[0].threshold) == "0.03"

    def test_an_edit_between_proposal_and_first_pass_is_noticed(self) -> None:
        fleet = Fleet(CLEAN)
        fleet.run(lambda f: bool(f.rollouts))
        fleet.edit(ramps={"mode": "Disabled"})
        fleet.step()
        assert phase(fleet) == "Superseded" and exits_off_at_workers(fleet)

    def test_a_confidence_that_no_certificate_has_switches_the_plan_off(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(objective=objective("0.02", confidence="0.99"))
        fleet.step()
        assert exits_off_at_workers(fleet)

    def test_a_limit_that_the_stable_plan_breaks_is_met_by_a_new_plan_or_by_none(self) -> None:
        fleet = at("Succeeded")
        old = fleet.status.stable_config
        fleet.edit(execution="ResultsOnly")
        fleet.step()
        assert fleet.status.stable_config == old  # nothing is unsafe about it: it serves until there is better
        fleet.outcome = NoGain("NothingSaves", 0.0, 900, current_allowed=False)
        fleet.service = replace(
            fleet.service,
            status=replace(fleet.status, tuning=replace(fleet.status.tuning, requested_for=objective_of(fleet))),
        )
        fleet.reconcile()
        assert exits_off_at_workers(fleet)
        assert fleet.configs[old].status.state != "Rejected"


def objective_of(fleet: Fleet) -> str:
    plan = fleet.stable
    return f"{fleet.service.spec.objective_key}/{plan.backbone_digest[-12:]}/{plan.ramp_set_digest[-12:]}"


class TestPromoting:
    """The plan is decided upon, and not every worker runs it yet."""

    def test_disabled_while_promoting_switches_exits_off_at_once(self) -> None:
        fleet = at("Promoting")
        fleet.edit(ramps={"mode": "Disabled"})
        fleet.step()
        assert exits_off_at_workers(fleet)
        fleet.step()
        assert last(fleet).status.verdict == "Superseded"

    def test_an_alarm_while_promoting_takes_the_promotion_back(self) -> None:
        fleet = at("Promoting")
        fleet.workers[0].breaker_open = True
        fleet.step()
        assert exits_off_at_workers(fleet)
        fleet.workers[0].breaker_open = False
        fleet.step()
        assert (last(fleet).status.verdict, last(fleet).status.reason) == ("RolledBack", "DriftDetected")
        assert fleet.configs[last(fleet).to_config].status.rejections == 1

    def test_an_abort_while_promoting_gives_back_what_served_before(self) -> None:
        fleet = at("Promoting")
        say(fleet, decision="Abort")
        fleet.step()
        assert fleet.status.stable_config == last(fleet).from_config
        fleet.step()
        assert last(fleet).status.verdict == "Aborted"

    @pytest.mark.parametrize("pinned", [False, True])
    def test_cut_short_and_left_alone_it_is_carried_on(self, pinned: bool) -> None:
        fleet = torn(pinned=pinned)
        fleet.step()
        assert fleet.status.stable_config == last(fleet).to_config
        fleet.run(lambda f: phase(f) == "Succeeded", limit=5)

    @pytest.mark.parametrize(
        "edit",
        [
            {"ramps": {"mode": "Disabled"}},
            {"objective": objective("0.001")},
            {"objective": objective("0.02", confidence="0.999")},
        ],
        ids=["disabled", "budget", "confidence"],
    )
    @pytest.mark.parametrize("pinned", [False, True])
    def test_an_edit_that_comes_between_its_two_writes_ends_it(self, edit: dict[str, Any], *, pinned: bool) -> None:
        """What the canary showed was about the old objective: it proves nothing for the new one, and the plan never
        serves as stable."""
        fleet = torn(pinned=pinned)
        name, config = last(fleet).name, last(fleet).to_config
        proven = fleet.configs[config].status.certificates
        fleet.edit(**edit)
        fleet.step()
        assert exits_off_at_workers(fleet) and fleet.stable.exits_off
        fleet.step()
        ended = fleet.rollouts[name].status
        assert (ended.verdict, ended.reason) == ("Superseded", "NewerIntent")
        assert fleet.configs[config].status.certificates == proven

    def test_a_looser_budget_between_its_two_writes_leaves_it(self) -> None:
        fleet = torn(pinned=True)
        fleet.edit(objective=objective("0.03"))
        fleet.run(lambda f: phase(f) == "Succeeded", limit=5)
        assert [c["budget"] for c in fleet.configs[last(fleet).to_config].status.certificates] == ["0.02"]

    def test_a_worker_that_does_not_acknowledge_is_named(self) -> None:
        fleet = at("Progressing")
        fleet.run(lambda f: last(f).status.weight == 50)
        fleet.workers[1].configure = lambda document: (
            document.canary and SimWorker.configure(fleet.workers[1], document)
        )  # type: ignore[method-assign]
        fleet.run(lambda f: phase(f) == "Promoting")
        fleet.requests_per_second = 0
        fleet.step(ACK_TIMEOUT_SECONDS + 5)
        assert phase(fleet) == "Promoting"
        assert "still waiting for w1" in last(fleet).status.message


class TestWaiting:
    @pytest.mark.parametrize("by", ["spec.paused", "spec.suspend"])
    def test_a_rollout_that_was_paused_before_it_began_does_not_begin(self, by: str) -> None:
        fleet = Fleet(CLEAN)
        fleet.run(lambda f: bool(f.rollouts))
        say(fleet, paused=True) if by == "spec.paused" else fleet.edit(suspend=True)
        for _ in range(5):
            fleet.step()
        assert phase(fleet) == "Pending" and by in last(fleet).status.message
        say(fleet, paused=False) if by == "spec.paused" else fleet.edit(suspend=False)
        fleet.step()
        assert phase(fleet) == "Progressing"

    def test_a_pause_counts_neither_as_rest_nor_towards_the_deadline(self) -> None:
        fleet = at("Progressing")
        fleet.requests_per_second = 4
        fleet.step()
        fleet.step()
        say(fleet, paused=True)
        fleet.step()
        fleet.now += 3 * 3600.0
        fleet.step()
        say(fleet, paused=False)
        fleet.step()
        fleet.step()
        assert phase(fleet) == "Progressing"
        fleet.now += 3600.0
        fleet.run(lambda f: phase(f) == "Aborted", limit=3)
        assert last(fleet).status.reason == "Inconclusive"

    def test_the_stable_plans_alarm_ends_a_paused_canary(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(ramps=PIN)
        fleet.run(lambda f: phase(f) == "Progressing", limit=5)
        say(fleet, paused=True)
        fleet.step()
        assert phase(fleet) == "Paused"
        fleet.workers[0].breaker_open = True
        fleet.step()
        assert exits_off_at_workers(fleet)
        fleet.step()
        assert fleet.rollouts["sim-2"].status.reason == "DriftDetected"
        assert (
            fleet.configs[fleet.rollouts["sim-2"].to_config].status.rejections == 0
        )  # it was not the canary that failed

    def test_a_canary_that_rested_for_long_is_watched_by_a_detector_that_restarts(self) -> None:
        """After 200,000 good audits the accumulated evidence is blind for as long again; the detector is not."""
        quiet, bad = (200_000, 1000), (600, 30)
        watch = detector.update(detector.init(), *quiet, p0=0.01)
        watch = detector.update(watch, *bad, p0=0.01)
        tally = ArmTally(audited=quiet[0] + bad[0], disagreements=quiet[1] + bad[1])
        gates = read_gates(
            GateInput(BothArms(tally), 20, 0.01, 0.99, 2, 0, certified=True, accuracy_confidence=0.95, watch=watch)
        )
        states = {g.name: g.state for g in gates}
        assert (states["accuracy"], states["drift"]) == ("Clear", "Rejected")

    def test_promote_overrules_no_gate_and_the_rollout_says_so(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(ramps=PIN)
        fleet.run(lambda f: phase(f) == "Progressing", limit=5)
        say(fleet, decision="Promote")
        for _ in range(3):
            fleet.step()
        assert phase(fleet) == "Progressing"
        assert "Promote overrules no gate: the plan is uncertified" in last(fleet).status.message
        assert "acceptance" in last(fleet).status.message

    @pytest.mark.slow
    def test_held_past_its_deadline_the_canary_goes_on_when_there_is_traffic_again(self) -> None:
        fleet = Fleet(
            CLEAN, {**MANIFEST, "rollout": {**MANIFEST["rollout"], "stepDeadline": "30s", "onInconclusive": "Hold"}}
        )
        fleet.run(lambda f: phase(f) == "Progressing")
        fleet.requests_per_second = 4
        for _ in range(60):
            fleet.step()
        assert "holding past the step deadline" in last(fleet).status.message
        fleet.requests_per_second = 200
        fleet.run(lambda f: phase(f) == "Succeeded")


class TestRecommend:
    @staticmethod
    def recommended() -> Fleet:
        fleet = Fleet(CLEAN, {**MANIFEST, "ramps": {"mode": "Recommend"}})
        fleet.run(lambda f: f.status.candidate_config != "")
        for _ in range(5):
            fleet.step()
        return fleet

    def test_a_recommendation_serves_nobody_until_a_person_says_promote(self) -> None:
        fleet = self.recommended()
        assert phase(fleet) == "Pending" and fleet.stable.exits_off
        assert fleet.configs[fleet.status.candidate_config].status.state == "Certified"
        assert "spec.decision: Promote" in fleet.status.tuning.message
        say(fleet, decision="Promote")
        fleet.run(lambda f: phase(f) == "Promoting")
        assert fleet.status.candidate_config != fleet.status.stable_config
        fleet.run(lambda f: phase(f) == "Succeeded")
        assert not fleet.stable.exits_off and fleet.status.candidate_config == ""

    def test_abort_declines_it_and_it_cools_down(self) -> None:
        fleet = self.recommended()
        name = fleet.status.candidate_config
        say(fleet, decision="Abort")
        fleet.step()
        assert phase(fleet) == "Aborted" and fleet.status.candidate_config == ""
        assert fleet.configs[name].status.rejected_until_at == pytest.approx(fleet.now + 600)

    @pytest.mark.slow
    def test_one_that_newer_records_do_not_bear_out_goes_away(self) -> None:
        fleet = self.recommended()
        fleet.now += 3700.0
        fleet.run(lambda f: f.outcome is not None)
        fleet.outcome = NoGain("NothingSaves", 0.0, 900)
        fleet.step()
        assert (phase(fleet), last(fleet).status.reason) == ("Superseded", "Withdrawn")
        assert fleet.status.candidate_config == ""

    def test_a_drift_of_the_objective_withdraws_it_and_auto_lets_it_begin(self) -> None:
        fleet = self.recommended()
        other = copy.deepcopy(fleet)
        fleet.edit(objective=objective("0.005"))
        fleet.step()
        assert phase(fleet) == "Superseded"
        other.edit(ramps={"mode": "Auto"})
        other.step()
        assert phase(other) == "Progressing"

    def test_while_one_waits_nothing_is_written(self) -> None:
        fleet = self.recommended()
        fleet.requests_per_second = 0
        for _ in range(40):
            fleet.step()
        decision = decide(fleet.snapshot(), fleet.now)
        assert decision.status == fleet.service.status and not decision.rollout_statuses and decision.publish is None
        assert decision.requeue_after_seconds > 5


class TestComingBack:
    def test_a_plan_that_was_stable_lately_returns_by_the_last_step_alone(self) -> None:
        fleet = at("Succeeded")
        name = fleet.status.stable_config
        fleet.edit(ramps={"mode": "Disabled"})
        fleet.step()
        assert fleet.stable.exits_off
        fleet.edit(ramps={"mode": "Auto"})
        fleet.run(lambda f: last(f).status.weight > 0, limit=10)
        assert (last(fleet).to_config, last(fleet).status.weight, last(fleet).status.returns_to) == (name, 50, "sim-1")
        assert fleet.status.rollout.summary == "Step 1/1 50%"
        fleet.run(lambda f: phase(f) == "Succeeded")
        assert last(fleet).status.history == () and fleet.status.stable_config == name

    def test_without_a_window_it_takes_every_step(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(ramps={"mode": "Disabled"}, rollout={**MANIFEST["rollout"], "rollbackWindow": 0})
        fleet.step()
        pin = {
            "ramps": [
                {"id": r.id, "threshold": str(r.threshold)} for r in fleet.configs[last(fleet).to_config].plan.ramps
            ]
        }
        fleet.edit(ramps={"mode": "Pinned", "pin": pin})
        fleet.run(lambda f: last(f).status.weight > 0, limit=10)
        assert (last(fleet).status.weight, last(fleet).status.returns_to) == (20, "")

    def test_a_pin_of_a_certified_plan_keeps_its_certificates(self) -> None:
        fleet = at("Succeeded")
        name = fleet.status.stable_config
        pin = {"ramps": [{"id": r.id, "threshold": str(r.threshold)} for r in fleet.stable.ramps]}
        fleet.edit(ramps={"mode": "Disabled"})
        fleet.step()
        fleet.edit(ramps={"mode": "Pinned", "pin": pin})
        fleet.run(lambda f: last(f).status.weight > 0, limit=10)
        assert last(fleet).status.returns_to == "sim-1" and fleet.configs[name].status.certificates

    def test_what_fell_by_drift_does_not_come_back_by_itself(self) -> None:
        fleet = at("Succeeded")
        fleet.workers[0].breaker_open = True
        fleet.step()
        for worker in fleet.workers:
            worker.breaker_open = False
        for _ in range(3):
            fleet.step()
        assert set(fleet.rollouts) == {"sim-1"} and fleet.stable.exits_off


class TestCoolingDown:
    def test_each_failure_cools_down_twice_as_long_and_drift_ends_it(self) -> None:
        fleet = at("Succeeded")
        stable, rejected = fleet.status.stable_config, "sim-ffffffffff"
        old = fleet.configs[stable]
        bad = replace(
            old,
            name=rejected,
            status=replace(old.status, state="Rejected", rejections=2, rejected_until_at=fleet.now + 1e6),
        )
        fleet.configs[rejected] = bad
        fleet.workers[0].breaker_open = True
        fleet.step()
        assert (fleet.configs[rejected].status.rejections, fleet.configs[rejected].status.rejected_until_at) == (
            0,
            None,
        )
        first = fleet.configs[stable].status
        assert first.rejected_until_at == pytest.approx(fleet.now + 600)
        fleet.service = replace(fleet.service, status=replace(fleet.status, stable_config=stable))
        fleet.configs[stable] = replace(fleet.configs[stable], status=replace(first, state="Stable"))
        fleet.published = replace(fleet.published, stable=replace(fleet.published.stable, plan=old.plan.to_mapping()))
        for worker in fleet.workers:
            worker.document, worker.breaker_open = fleet.published, True
        fleet.reconcile()
        assert fleet.configs[stable].status.rejected_until_at == pytest.approx(fleet.now + 1200)

    def test_a_pass_that_is_made_again_counts_a_failure_once(self) -> None:
        fleet = at("Succeeded")
        fleet.workers[0].breaker_open = True
        before = fleet.service
        fleet.step()
        fleet.service = before  # the status write was lost
        fleet.reconcile()
        assert fleet.configs[before.status.stable_config].status.rejections == 1


class TestPins:
    def test_an_edit_of_something_else_does_not_try_a_rejected_pin_again(self) -> None:
        fleet = at("Succeeded")
        fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [{"id": "r99-grid", "threshold": "0.1"}]}})
        fleet.run(lambda f: f.status.pin.verdict == "Rejected", limit=20)
        tried = set(fleet.rollouts)
        assert tried == {"sim-1", "sim-2"}
        fleet.edit(suspend=False, rollout={**MANIFEST["rollout"], "cooldown": "5m"})
        for _ in range(5):
            fleet.step()
        assert set(fleet.rollouts) == tried
        assert (fleet.status.pin.verdict, fleet.status.pin.generation) == ("Rejected", fleet.service.generation)
        fleet.edit(ramps={"mode": "Auto"})
        fleet.step()
        fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [{"id": "r99-grid", "threshold": "0.1"}]}})
        fleet.run(lambda f: set(f.rollouts) != tried, limit=5)  # set again on purpose, it is tried again

    def test_a_tighter_budget_is_not_kept_by_an_acceptance_at_the_old_one(self) -> None:
        fleet = at("Succeeded")
        pin = {"ramps": [{"id": r.id, "threshold": str(r.threshold)} for r in fleet.stable.ramps]}
        fleet.edit(ramps={"mode": "Pinned", "pin": pin})
        fleet.step()
        assert fleet.status.pin.verdict == "Accepted"
        fleet.edit(objective=objective("0.005"))
        fleet.step()
        assert fleet.stable.exits_off and fleet.status.pin.verdict != "Accepted"

    def test_a_pinned_plan_that_the_inputs_broke_is_rejected_and_not_tried_again(self) -> None:
        fleet = at("Succeeded")
        pin = {"ramps": [{"id": r.id, "threshold": str(r.threshold)} for r in fleet.stable.ramps]}
        fleet.edit(ramps={"mode": "Pinned", "pin": pin})
        fleet.step()
        fleet.workers[0].breaker_open = True
        fleet.step()
        for _ in range(3):
            fleet.step()
        conditions = {c.type: c for c in fleet.status.conditions}
        assert conditions["Stalled"].reason == "PinRejected" and "detector" in conditions["Stalled"].message
        assert conditions["Ready"].status == "True" and set(fleet.rollouts) == {"sim-1"}


class Ahead(Fleet):
    """The clock of its first worker runs ahead: the pool says how many of its records there are."""

    def _store(self) -> RecordStore | None:
        store = super()._store()
        return store and replace(store, ahead={self.workers[0].boot: len(store.records)})


class TestRecords:
    def test_where_a_clock_runs_ahead_the_status_knows_which_records_a_test_has_used_and_an_alarm_made_stale(
        self,
    ) -> None:
        fleet = Ahead(CLEAN)
        fleet.run(lambda f: f.status.tuning.consumed_through_at is not None)
        tuning, key = fleet.status.tuning, ring(fleet.workers[0].boot, RAMP_SET)
        assert set(tuning.used) == {key} and tuning.stale == {}
        assert tuning.used[key] >= tuning.labels
        fleet.run(lambda f: phase(f) == "Succeeded")
        assert fleet.status.tuning.used == tuning.used, "written once for each test"
        fleet.workers[0].breaker_open = True
        fleet.step()
        store = fleet._store()
        assert store is not None and fleet.status.tuning.stale == {key: len(store.records)}
        assert from_json(TuningStatus, to_json(fleet.status.tuning)) == fleet.status.tuning

    def test_where_all_clocks_are_right_nothing_is_written_down(self) -> None:
        tuning = at("Succeeded").status.tuning
        assert tuning.tests_run > 0 and (tuning.used, tuning.stale) == ({}, {})

    def test_too_few_labels_for_a_test_may_still_be_enough_to_switch_the_stable_plan_off(self) -> None:
        fleet = at("Succeeded")
        bold = fleet.status.stable_config
        fleet.edit(objective=objective("0.03"))
        fleet.run(lambda f: f.outcome is not None)
        fleet.outcome = NeedsLabels(600, 5000, current_over_budget=True)
        fleet.reconcile()
        assert fleet.stable.exits_off and fleet.configs[bold].status.state == "Rejected"
        assert fleet.status.tuning.state == "CollectingLabels"


class TestHistory:
    def test_only_so_many_finished_rollouts_are_kept_and_those_of_the_window_besides(self) -> None:
        fleet = at("Succeeded")
        done = last(fleet)
        for number in range(2, 9):
            name = f"sim-{number}"
            failed = replace(done.status, phase="Aborted", verdict="Aborted")
            fleet.rollouts[name] = replace(done, name=name, status=failed)
        fleet.edit(rollout={**MANIFEST["rollout"], "historyLimit": 2})
        fleet.step()
        assert set(fleet.rollouts) == {"sim-1", "sim-7", "sim-8"}
        fleet.edit(rollout={**MANIFEST["rollout"], "historyLimit": 2, "rollbackWindow": 0})
        fleet.step()
        assert set(fleet.rollouts) == {"sim-7", "sim-8"}


class TestClocks:
    @pytest.mark.parametrize("skew", [-600.0, 600.0])
    def test_an_operator_whose_clock_differs_by_ten_minutes_ends_no_attempt_early(self, skew: float) -> None:
        fleet = Fleet(CLEAN)
        fleet.run(lambda f: phase(f) == "Pending")
        fleet.deliver = False
        fleet.step()
        assert phase(fleet) == "Progressing"
        now = fleet.now + skew
        decision = decide(replace(fleet.snapshot(), watched_since=now), now)
        assert not decision.rollout_statuses or all(
            s.phase == "Progressing" for s in decision.rollout_statuses.values()
        )
        late = now + ACK_TIMEOUT_SECONDS + 1
        decision = decide(replace(fleet.snapshot(), watched_since=now), late)
        assert decision.rollout_statuses["sim-1"].reason == "AckTimeout"

    def test_the_deadline_of_a_step_does_not_end_by_two_clocks_that_differ(self) -> None:
        fleet = Fleet(CLEAN, {**MANIFEST, "rollout": {**MANIFEST["rollout"], "stepDeadline": "2m"}})
        fleet.run(lambda f: phase(f) == "Progressing")
        fleet.requests_per_second = 0
        fleet.run(lambda f: last(f).status.step_started_at is not None)
        ahead = fleet.now + 600.0
        decision = decide(replace(fleet.snapshot(), watched_since=ahead), ahead + 60.0)
        assert not decision.rollout_statuses or decision.rollout_statuses["sim-1"].phase == "Progressing"
        decision = decide(replace(fleet.snapshot(), watched_since=ahead), ahead + 121.0)
        assert decision.rollout_statuses["sim-1"].reason == "Inconclusive", "a process that saw all of it"
        much_later = fleet.now + 121.0 + 600.0
        decision = decide(replace(fleet.snapshot(), watched_since=much_later), much_later)
        assert decision.rollout_statuses["sim-1"].reason == "Inconclusive", (
            "leaders that change put it off for ten minutes"
        )

    def test_an_older_document_that_somebody_put_back_is_replaced_by_a_newer_epoch(self) -> None:
        fleet = at("Progressing")
        old = fleet.published
        fleet.run(lambda f: phase(f) == "Succeeded")
        newest, fleet.published = fleet.published, old
        assert newest is not None
        fleet.step()
        assert fleet.published is not None and fleet.published.epoch > newest.epoch
        assert fleet.published.stable == newest.stable


class TestQuarantine:
    @pytest.mark.parametrize("lie", ["k above n", "epoch", "foreign plan"])
    def test_a_worker_that_cannot_be_believed_is_named_and_not_pooled(self, lie: str) -> None:
        fleet = at("Succeeded")
        fleet.step()
        liar = fleet.workers[0]
        assert fleet.published is not None
        key = max(liar.counts)
        if lie == "k above n":
            liar.counts[key]["disagreements"] = liar.counts[key]["audited"] + 1
        elif lie == "epoch":
            liar.counts[fleet.published.epoch + 5, "stable"] = liar.counts[key]
        else:
            liar.counts[fleet.published.epoch, "stable"]["hash"] = "f" * 64
        fleet.reconcile()
        conditions = {c.type: c for c in fleet.status.conditions}
        assert conditions["WorkersQuarantined"].status == "True" and "w0" in conditions["WorkersQuarantined"].message
        assert fleet.status.workers.quarantined == ("w0",)
        assert [e.reason for e in fleet.events].count("WorkerQuarantined") == 1
        fleet.reconcile()
        assert [e.reason for e in fleet.events].count("WorkerQuarantined") == 1
        liar.restart()
        fleet.step()
        assert "WorkersQuarantined" not in {c.type for c in fleet.status.conditions}

    def test_a_lie_about_another_epoch_costs_a_worker_its_say_in_the_canary(self) -> None:
        fleet = at("Progressing")
        fleet.step()
        liar = fleet.workers[0]
        oldest = min(liar.counts)
        liar.counts[oldest]["failed"] = liar.counts[oldest]["batches"] + 1
        fleet.step()
        ledger = last(fleet).status.ledger
        assert ledger.quarantined == (liar.boot,) and liar.boot not in ledger.live

    def test_a_worker_of_another_model_is_named_and_left_out_while_the_others_decide_on(self) -> None:
        fleet = Fleet(CLEAN, {**MANIFEST, "replicas": 3})
        fleet.run(lambda f: phase(f) == "Progressing")
        fleet.step()
        stranger = fleet.workers[0]
        stranger.restart()
        stranger.restarts, stranger.backbone = 0, "sha256:" + "c" * 64
        fleet.step()
        told = {c.type: c for c in fleet.status.conditions}["WorkersQuarantined"]
        assert told.reason == "ForeignModel" and "w0: it serves sha256:" in told.message
        fleet.run(lambda f: phase(f) == "Succeeded")
        assert stranger.boot not in last(fleet).status.ledger.live
        assert fleet.status.stable_config == last(fleet).to_config
        stranger.restart()
        stranger.restarts, stranger.backbone = 0, BACKBONE
        fleet.step()
        fleet.step()
        assert "WorkersQuarantined" not in {c.type for c in fleet.status.conditions}
        assert fleet.status.workers.acked == 3

    def test_while_workers_of_a_new_model_replace_the_old_ones_nobody_is_quarantined_and_the_majority_decides(
        self,
    ) -> None:
        fleet = Fleet(CLEAN, {**MANIFEST, "replicas": 3})
        fleet.run(lambda f: phase(f) == "Succeeded")
        other = "sha256:" + "c" * 64
        for number, worker in enumerate(fleet.workers):
            worker.current = False
            if number == 0:
                new = SimWorker("n0", 7, backbone=other)
                fleet.workers = [new, *fleet.workers]
                fleet.step()
                assert not fleet.stable.exits_off, "the old model's plan serves until most workers have the new model"
        fleet.workers = [SimWorker("n0", 7, backbone=other), SimWorker("n1", 8, backbone=other), fleet.workers[-1]]
        fleet.workers[-1].current = False
        fleet.step()
        assert fleet.stable.exits_off and fleet.stable.backbone_digest == other
        assert "WorkersQuarantined" not in {t for seen in fleet.conditions_seen for t in seen}

    def test_an_absurd_epoch_does_not_drag_the_published_one_along(self) -> None:
        fleet = at("Succeeded")
        liar = fleet.workers[0]
        assert liar.document is not None and fleet.published is not None
        liar.document = replace(liar.document, epoch=2**62)
        fleet.deliver = False
        fleet.edit(ramps={"mode": "Disabled"})
        fleet.step()
        assert fleet.published.epoch < 1000


def test_counts_of_a_canary_that_a_stale_report_repeats_are_not_pooled_twice() -> None:
    fleet = at("Progressing")
    fleet.step()
    before = last(fleet).status.ledger
    fleet.reconcile()
    assert last(fleet).status.ledger == before
