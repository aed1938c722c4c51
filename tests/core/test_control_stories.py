"""The control loop on a simulated fleet: what an operator lives through, pass by pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, RAMPS, Fleet, SimWorker, pool  # type: ignore[import-not-found]
from scores import with_int8

from offramp_core.control.codec import from_json, to_json
from offramp_core.control.decide import decide
from offramp_core.control.objects import Ledger, RolloutStatus, ServiceStatus

CLEAN = pool(4000, seed=1)
DRIFTED = pool(4000, seed=2, confusion=0.35)


def promoted(fleet: Fleet) -> bool:
    return "Succeeded" in fleet.verdicts()


def canary_serves(fleet: Fleet) -> bool:
    return fleet.published is not None and fleet.published.canary is not None


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(CLEAN)


def test_a_certified_plan_is_canaried_and_promoted_without_a_user_doing_anything(fleet: Fleet) -> None:
    fleet.run(promoted)
    assert not fleet.stable.exits_off
    assert [e.reason for e in fleet.events] == ["RampProposed", "CanaryStarted", "StepAdvanced", "Promoted"]
    certificate = fleet.configs[fleet.status.stable_config].status.certificates[0]
    assert float(certificate["budget"]) == pytest.approx(0.02)


class TestPrecision:
    """A bundle that has the backbone at int8 as well: twice as fast, and wrong in 0.4 % of answers."""

    WIDE = with_int8(CLEAN, wrong=0.004, speed=0.5)

    @pytest.mark.slow
    def test_auto_finds_a_plan_at_int8_and_promotes_it(self) -> None:
        fleet = Fleet(self.WIDE)
        fleet.run(promoted)
        assert fleet.stable.precision == "int8"
        assert float(str(fleet.status.observed.savings).rstrip("%")) > 50
        assert "certified at int8" in fleet.events[0].message

    @pytest.mark.slow
    def test_exact_never_proposes_int8(self) -> None:
        fleet = Fleet(self.WIDE, {**MANIFEST, "ramps": {"precision": "Exact"}})
        fleet.run(promoted)
        assert {config.plan.precision for config in fleet.configs.values()} == {"fp32"}

    @pytest.mark.slow
    def test_a_plan_at_int8_goes_off_at_once_when_the_user_asks_for_exact(self) -> None:
        fleet = Fleet(self.WIDE)
        fleet.run(promoted)
        fleet.edit(ramps={"precision": "Exact"})
        fleet.step()
        assert fleet.stable.exits_off and fleet.published is not None
        assert fleet.published.stable.plan["precision"] == "fp32"
        assert "ramps.precision is Exact" in fleet.events[-1].message
        fleet.run(lambda f: f.verdicts().count("Succeeded") == 2)
        assert fleet.stable.precision == "fp32" and not fleet.stable.exits_off

    @pytest.mark.slow
    @pytest.mark.parametrize(("wrong", "verdict"), [(0.004, "Accepted"), (0.2, "Rejected")])
    def test_int8_alone_can_be_pinned_and_is_judged_like_any_pin(self, wrong: float, verdict: str) -> None:
        fleet = Fleet(with_int8(CLEAN, wrong=wrong, speed=0.5), {**MANIFEST, "ramps": {"mode": "Disabled"}})
        fleet.run(lambda f: f.published is not None)
        fleet.edit(ramps={"precision": "Auto"})
        fleet.run(lambda f: f._store() is not None and len(f._store().records) > 600)
        fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [], "precision": "int8"}})
        fleet.run(lambda f: f.status.pin.verdict != "", limit=900)
        assert fleet.status.pin.verdict == verdict
        assert (fleet.stable.precision == "int8") == (verdict == "Accepted")


@pytest.mark.slow
def test_ready_never_leaves_true_once_the_service_serves(fleet: Fleet) -> None:
    fleet.run(promoted)
    ready = [c["Ready"] for c in fleet.conditions_seen]
    assert "False" not in ready[ready.index("True") :]


@pytest.mark.slow
def test_background_tuning_never_shows_reconciling_or_stalled(fleet: Fleet) -> None:
    fleet.run(lambda f: f.status.settled_generation == 1)
    before = len(fleet.conditions_seen)
    fleet.run(promoted)
    assert not any({"Reconciling", "Stalled"} & set(c) for c in fleet.conditions_seen[before:])


@pytest.mark.slow
def test_drift_in_mid_canary_rolls_back_and_a_new_plan_is_found_on_the_new_inputs(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.edit(objective={"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.05"}})
    fleet.run(canary_serves)
    fleet.drift(DRIFTED)
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=60)
    bad = next(r for r in fleet.rollouts.values() if r.status.verdict == "RolledBack")
    assert bad.status.reason == "AccuracyRejected"
    assert fleet.configs[bad.to_config].status.rejected_until_at > fleet.now


@pytest.mark.slow
def test_records_that_show_the_stable_plan_over_budget_switch_it_off_before_a_more_cautious_one_is_compared(
    fleet: Fleet,
) -> None:
    fleet.run(promoted)
    bold = fleet.status.stable_config
    fleet.edit(objective={"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.05"}})
    fleet.run(canary_serves)
    fleet.drift(DRIFTED)
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=60)
    seen = set(fleet.rollouts)
    fleet.run(lambda f: f.status.stable_config != bold, limit=120)
    assert fleet.stable.exits_off
    assert not any(w.breaker_open for w in fleet.workers)  # no detector said so
    assert any(e.reason == "DriftDetected" and bold in e.message for e in fleet.events)
    assert all(fleet.configs[r.from_config].plan.exits_off for name, r in fleet.rollouts.items() if name not in seen)


def test_a_breaker_alarm_switches_exits_off_and_forgets_the_old_records(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.drift(DRIFTED)
    fleet.workers[0].breaker_open = True
    fleet.step()
    assert fleet.stable.exits_off
    assert fleet.status.tuning.records_since_at == fleet.now
    assert any(e.reason == "DriftDetected" and e.warning for e in fleet.events)


def test_a_reckless_pin_is_refused_from_the_records_and_serves_nobody(fleet: Fleet) -> None:
    fleet.run(promoted)
    stable, rollouts = fleet.status.stable_config, set(fleet.rollouts)
    fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[0], "threshold": "0.9"}]}})
    fleet.step()
    conditions = {c.type: c for c in fleet.status.conditions}
    assert conditions["Stalled"].reason == "PinRejected"
    assert conditions["Ready"].status == "True"
    assert fleet.status.stable_config == stable
    assert set(fleet.rollouts) == rollouts
    assert fleet.published is not None and fleet.published.canary is None


@pytest.mark.parametrize("pinned_first", [False, True], ids=["after the alarm", "in the pass of the alarm"])
def test_a_pin_is_not_judged_by_records_from_before_an_alarm(fleet: Fleet, pinned_first: bool) -> None:
    fleet.run(promoted)
    pin = {"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.3"}]}}
    for part in range(len(fleet.labels)):  # what was recorded so far contradicts any pin
        fleet.labels[part] = replace(fleet.labels[part], agrees=np.zeros_like(fleet.labels[part].agrees))
    fleet.workers[0].breaker_open, fleet.now = True, fleet.now + 1
    if not pinned_first:
        fleet.reconcile()
        assert fleet.stable.exits_off
    fleet.edit(ramps=pin)
    fleet.reconcile()
    assert fleet.status.pin.verdict == "" and fleet.status.pin.message.endswith("is being judged")


@pytest.mark.slow
def test_a_harmless_pin_shows_reconciling_until_it_has_earned_its_place(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [{"id": RAMPS[2], "threshold": "0.02"}]}})
    fleet.step()
    assert "Reconciling" in fleet.conditions_seen[-1]
    fleet.run(lambda f: f.status.pin.verdict == "Accepted", limit=600)
    fleet.run(lambda f: "Reconciling" not in f.conditions_seen[-1], limit=5)
    assert [r.id for r in fleet.stable.ramps] == [RAMPS[2]]


@pytest.mark.slow
def test_a_pin_of_an_unknown_ramp_is_refused_by_workers_and_rolled_back(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.edit(ramps={"mode": "Pinned", "pin": {"ramps": [{"id": "r99-grid", "threshold": "0.1"}]}})
    fleet.run(lambda f: f.status.pin.verdict == "Rejected", limit=20)
    last = list(fleet.rollouts.values())[-1].status
    assert (last.verdict, last.reason) == ("RolledBack", "UnknownRamp")
    assert "r99-grid" in fleet.status.message


def test_disabled_switches_exits_off_at_once_and_stops_auditing(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.edit(ramps={"mode": "Disabled"})
    fleet.step()
    assert fleet.published is not None
    assert fleet.published.stable.plan["ramps"] == [] and fleet.published.stable.audit_rate == 0.0


@pytest.mark.slow
def test_manual_promotion_waits_for_a_decision_with_the_canary_serving(fleet: Fleet) -> None:
    fleet = Fleet(CLEAN, manifest={**MANIFEST, "rollout": {**MANIFEST["rollout"], "promotion": "Manual"}})
    fleet.run(lambda f: any(r.status.phase == "AwaitingPromotion" for r in f.rollouts.values()))
    fleet.step()
    assert canary_serves(fleet)
    name = next(iter(fleet.rollouts))
    fleet.rollouts[name] = replace(fleet.rollouts[name], decision="Promote")
    fleet.run(promoted, limit=10)


def test_gates_stay_armed_while_a_person_paused_the_rollout(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    name = next(iter(fleet.rollouts))
    fleet.rollouts[name] = replace(fleet.rollouts[name], paused=True)
    fleet.step()
    assert fleet.rollouts[name].status.phase == "Paused"
    fleet.drift(DRIFTED)
    fleet.run(lambda f: f.verdicts() == ["RolledBack"], limit=60)


def test_a_canary_that_is_twice_as_slow_is_rolled_back(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.slowdown = 2.0
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=120)
    assert next(iter(fleet.rollouts.values())).status.reason == "SlownessRejected"


def test_a_canary_whose_batches_fail_is_rolled_back(fleet: Fleet) -> None:
    for worker in fleet.workers:
        worker.failing = 0.2
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=120)
    assert next(iter(fleet.rollouts.values())).status.reason == "FailuresRejected"


@pytest.mark.parametrize("ready_again", [True, False])
def test_a_worker_that_restarts_in_the_canary_rolls_it_back(fleet: Fleet, ready_again: bool) -> None:
    fleet.run(canary_serves)
    fleet.step()
    fleet.workers[1].restart()
    fleet.workers[1].ready = ready_again
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=10)
    assert next(iter(fleet.rollouts.values())).status.reason == "WorkerRestarted"


def test_a_worker_that_came_during_the_canary_and_restarts_rolls_it_back_as_well(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    fleet.workers.append(SimWorker("late", 9, ready=False, restarts=2))
    fleet.step()
    fleet.workers[-1].restart()
    fleet.step()
    assert canary_serves(fleet), "it has served nobody yet, so what it died of was not the canary"
    fleet.workers[-1].ready = True
    fleet.step()
    fleet.workers[-1].restart()
    fleet.workers[-1].ready = False
    fleet.step()
    (rollout,) = fleet.rollouts.values()
    assert (rollout.status.phase, rollout.status.reason) == ("RollingBack", "WorkerRestarted")
    assert "late" in rollout.status.message


def test_workers_that_are_gone_are_not_remembered_by_the_step(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    fleet.workers[1] = SimWorker("instead", 9)
    fleet.step()
    (rollout,) = fleet.rollouts.values()
    assert set(rollout.status.restarts) == {"w0", "instead"}


@pytest.mark.slow
def test_a_worker_that_never_acknowledges_aborts_the_attempt(fleet: Fleet) -> None:
    fleet.run(lambda f: bool(f.rollouts))
    fleet.workers[1].configure = lambda document: None  # type: ignore[method-assign]
    fleet.run(
        lambda f: "Aborted" in f.verdicts() or "RollingBack" in [r.status.phase for r in f.rollouts.values()], limit=200
    )
    assert next(iter(fleet.rollouts.values())).status.reason == "AckTimeout"


def test_too_little_traffic_is_never_a_pass(fleet: Fleet) -> None:
    fleet = Fleet(CLEAN, manifest={**MANIFEST, "rollout": {**MANIFEST["rollout"], "stepDeadline": "30s"}})
    fleet.run(canary_serves)
    fleet.requests_per_second = 4
    fleet.run(lambda f: "Aborted" in f.verdicts(), limit=120)
    assert next(iter(fleet.rollouts.values())).status.reason == "Inconclusive"


def test_a_tighter_budget_switches_an_uncovered_plan_off_at_once(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.edit(objective={"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.005"}})
    fleet.step()
    assert fleet.stable.exits_off


def test_a_changed_objective_supersedes_a_rollout_but_changed_replicas_do_not(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    fleet.edit(replicas=3)
    fleet.step()
    assert fleet.verdicts() == [""]
    fleet.edit(objective={"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.05"}})
    fleet.run(lambda f: f.verdicts()[0] == "Superseded", limit=5)


@pytest.mark.slow
def test_an_operator_that_restarts_at_every_pass_decides_the_same(fleet: Fleet) -> None:
    """Everything a pass needs is in the stored statuses: they go through JSON between any two passes."""
    straight = Fleet(CLEAN)
    straight.run(promoted)

    def restart(f: Fleet) -> bool:
        f.service = replace(f.service, status=from_json(ServiceStatus, to_json(f.service.status)))
        f.rollouts = {n: replace(r, status=from_json(RolloutStatus, to_json(r.status))) for n, r in f.rollouts.items()}
        return promoted(f)

    fleet.run(restart)
    assert fleet.status.stable_config == straight.status.stable_config
    assert [r.status.history for r in fleet.rollouts.values()] == [r.status.history for r in straight.rollouts.values()]


@pytest.mark.slow
def test_a_crash_between_any_two_writes_of_a_pass_loses_no_decision(fleet: Fleet) -> None:
    """Each pass is cut short after its n-th write; the next one must carry on to the same end."""
    cut = 0

    def act_partly(decision: Any) -> None:
        nonlocal cut
        cut += 1
        keep = cut % 5
        partial = replace(
            decision,
            new_rollout=decision.new_rollout if keep != 1 else None,
            rollout_statuses=decision.rollout_statuses if keep != 1 else {},
            status=decision.status if keep not in (1, 2) else fleet.service.status,
            publish=decision.publish if keep not in (1, 2, 3) else None,
        )
        Fleet.act(fleet, partial)

    fleet.act = act_partly  # type: ignore[method-assign]
    fleet.run(promoted)
    assert not fleet.stable.exits_off
    assert [r.status.verdict for r in fleet.rollouts.values()].count("Succeeded") == 1


@pytest.mark.slow
def test_steady_state_is_a_fixed_point_without_writes(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.requests_per_second = 0
    for _ in range(40):
        fleet.step()
    decision = decide(fleet.snapshot(), fleet.now)
    assert decision.status == fleet.service.status
    assert decision.publish is None and not decision.events
    assert not decision.new_configs and not decision.config_statuses and not decision.rollout_statuses


def test_an_impossible_worker_is_quarantined_and_never_pooled(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    fleet.step()
    liar = fleet.workers[0]
    key = next(k for k in liar.counts if k[1] == "canary")
    liar.counts[key]["disagreements"] = liar.counts[key]["audited"] + 10_000
    fleet.step()
    ledger = next(iter(fleet.rollouts.values())).status.ledger
    assert ledger.quarantined == (liar.boot,)
    assert liar.boot not in ledger.live


@pytest.mark.slow
def test_only_one_rollout_is_ever_active(fleet: Fleet) -> None:
    seen = []
    fleet.run(lambda f: seen.append(sum(not r.status.finished for r in f.rollouts.values())) or promoted(f))
    assert max(seen) == 1


@pytest.mark.slow
def test_a_lost_plan_document_is_published_again_under_a_newer_epoch(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.step()
    assert fleet.published is not None
    lost, fleet.published = fleet.published, None
    fleet.step()
    assert fleet.published is not None and fleet.published.epoch > lost.epoch
    assert all(w.document is not None and w.document.epoch == fleet.published.epoch for w in fleet.workers)


@pytest.mark.slow
def test_workers_that_restarted_without_the_lost_document_are_told_a_newer_epoch_than_they_remember(
    fleet: Fleet,
) -> None:
    fleet.run(promoted)
    assert fleet.published is not None
    newest, fleet.published = fleet.published.epoch, None
    for worker in fleet.workers:
        worker.restart()
    fleet.rollouts = {name: replace(r, status=replace(r.status, ledger=Ledger())) for name, r in fleet.rollouts.items()}
    fleet.step()
    assert fleet.published is not None and fleet.published.epoch == newest + 1
    assert all(w.document is not None and w.refused is None for w in fleet.workers)


def test_replaying_a_plan_that_workers_hold_is_not_a_change(fleet: Fleet) -> None:
    fleet.run(promoted)
    fleet.requests_per_second = 0
    for _ in range(40):
        fleet.step()
    epoch = fleet.published.epoch if fleet.published else 0
    for _ in range(5):
        fleet.step()
    assert fleet.published is not None and fleet.published.epoch == epoch


def test_the_quiet_audit_rate_follows_traffic_far_without_a_tuning_but_never_in_mid_rollout(fleet: Fleet) -> None:
    fleet.run(canary_serves)
    rate = fleet.status.tuning.audit_rate
    busy, fleet.requests_per_second = fleet.requests_per_second, 2
    for _ in range(5):
        fleet.step()
    assert (fleet.status.tuning.audit, fleet.status.tuning.audit_rate) == ("Quiet", rate)
    fleet.requests_per_second = busy
    fleet.run(promoted)
    fleet.edit(suspend=True)
    fleet.requests_per_second = 2
    fleet.run(lambda f: f.status.tuning.audit_rate == 0.5, limit=3)
    fleet.requests_per_second = busy
    fleet.run(lambda f: f.status.tuning.audit_rate == 0.02, limit=3)
    assert fleet.published is not None and fleet.published.stable.audit_rate == 0.02
    epoch = fleet.published.epoch
    for _ in range(5):
        fleet.step()
    assert fleet.published.epoch == epoch
