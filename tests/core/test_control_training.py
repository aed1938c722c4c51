"""Live training: when a ramp set is trained, how it comes to serve, and everything that makes it go away again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from fleet import (  # type: ignore[import-not-found]
    BACKBONE,
    RAMP_SET,
    RAMPS,
    Fleet,
    changed,
    pool,
    pooled,
    tuned,
    with_endpoint,
)

from offramp_core.control.decide import decide
from offramp_core.control.snapshot import Decision, Event, RecordStore, Snapshot, TrainingOrder, TrainingReport
from offramp_core.control.tuning.retraining import CAPTURES_NEEDED, REFRESH_SECONDS
from offramp_core.records import Records

NEW = "sha256:" + "c" * 64
OLD_HEADS = pool(4000, seed=1, confusion=0.1)  # agree too seldom for a plan
GOOD_HEADS = pool(4000, seed=2)
LIVE = {"training": "LiveTraffic"}
GAIN = TrainingReport(0, "Succeeded", NEW, CAPTURES_NEEDED, saving_before=0.05, saving_after=0.3)


@dataclass
class TrainingFleet(Fleet):
    """A fleet with a ramp-set store, in which :data:`NEW` appears when the training has ended with ``result``."""

    result: TrainingReport = GAIN
    able: bool = True
    heads: Records = field(default_factory=lambda: GOOD_HEADS)
    orders: list[TrainingOrder] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)
    scored: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    training: TrainingReport | None = None

    def step(self, seconds: float = 1.0) -> Decision:
        self.now += seconds
        for worker in self.workers:
            share = int(self.requests_per_second * seconds / len(self.workers))
            rows = np.array([row for row, _ in worker.serve(self.records, share, self.now)], dtype=np.intp)
            times = self.now + 1e-6 * (np.arange(len(rows)) + worker.seed)
            held = (worker.document.ramp_sets if worker.document else ()) or (RAMP_SET,)
            for digest in held if len(rows) else ():
                self.scored.setdefault(digest, []).append((rows, times))
        return self.reconcile()

    def snapshot(self) -> Snapshot:
        stores = {digest: self._store_of(digest, parts) for digest, parts in self.scored.items()}
        own = stores.pop(RAMP_SET, None)
        return changed(
            super().snapshot(), records=own, more_records=stores, can_train=self.able, training=self.training
        )

    def act(self, decision: Decision) -> None:
        self.store(decision)
        self.told += decision.events
        if decision.train is not None:
            self.orders.append(decision.train)
            self.training = replace(self.result, attempt=decision.train.attempt, since=decision.train.since)
            for worker in self.workers:
                worker.sets[NEW] = self.heads
        if self.published is not None:
            for worker in self.workers:
                worker.configure(self.published)
        if decision.tune is not None:
            digest = decision.tune.ramp_set_digest
            self.outcome = tuned(self._store_of(digest, self.scored[digest]).records, decision.tune)

    def _store_of(self, digest: str, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> RecordStore:
        heads = self.heads if digest == NEW else self.records
        parts = parts[-80:]
        time = np.concatenate([times for _, times in parts])
        return RecordStore(pooled([heads.take(rows) for rows, _ in parts], time), RAMPS, BACKBONE, digest)

    def reasons(self) -> list[str]:
        return [event.reason for event in self.told]


def started(**changes: Any) -> TrainingFleet:
    ramps = {**LIVE, **changes.pop("ramps", {})}
    fleet = TrainingFleet(OLD_HEADS, requests_per_second=100, **changes)
    fleet.edit(ramps=ramps)
    return fleet


def capture_enough(fleet: TrainingFleet) -> None:
    """Hours of traffic."""
    for worker in fleet.workers:
        worker.captures = CAPTURES_NEEDED


@cache
def _on_trial() -> TrainingFleet:
    fleet = started()
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    capture_enough(fleet)
    fleet.run(lambda f: f.status.ramp_sets.candidate == NEW, limit=20)
    return fleet


@cache
def _promoted() -> TrainingFleet:
    fleet = copy.deepcopy(_on_trial())
    fleet.run(lambda f: f.status.ramp_sets.current == NEW, limit=900)
    return fleet


def on_trial() -> TrainingFleet:
    return copy.deepcopy(_on_trial())


def promoted() -> TrainingFleet:
    return copy.deepcopy(_promoted())


def plan_sets(fleet: TrainingFleet) -> set[str]:
    return {config.plan.ramp_set_digest for config in fleet.configs.values() if config.plan.ramps}


def test_nothing_is_captured_or_trained_unless_the_spec_asks_for_it() -> None:
    fleet = TrainingFleet(OLD_HEADS)
    for _ in range(30):
        fleet.step()
    assert fleet.published is not None
    assert fleet.published.capture_since is None
    assert fleet.published.ramp_sets == ()
    assert fleet.orders == []
    assert fleet.status.ramp_sets == type(fleet.status.ramp_sets)()


def test_a_platform_without_a_store_is_told_once() -> None:
    fleet = started(able=False)
    for _ in range(5):
        fleet.step()
    assert fleet.status.ramp_sets.state == "NoRampStore"
    assert fleet.reasons().count("NoRampStore") == 1
    assert fleet.published is not None
    assert fleet.published.capture_since is None


def test_a_set_is_trained_once_enough_inputs_are_captured() -> None:
    fleet = on_trial()
    assert [order.attempt for order in fleet.orders] == [1]
    assert fleet.orders[0].ramp_set_digest == RAMP_SET
    assert sum(w.captures for w in fleet.workers) == 0, "the sample begins anew after a training"
    assert fleet.published is not None
    assert set(fleet.published.ramp_sets) == {RAMP_SET, NEW}, "audits are scored with both"


def test_where_no_plan_is_found_audits_are_eager_until_there_are_inputs_to_train_on() -> None:
    useless = TrainingFleet(pool(4000, seed=6, confusion=0.6), requests_per_second=100)
    useless.edit(ramps=LIVE)
    useless.run(lambda f: "NoBetterPlan" in f.reasons(), limit=100)
    for _ in range(3):
        useless.step()
    assert useless.stable.exits_off
    assert useless.status.tuning.audit == "Eager"
    useless.run(lambda f: len(f.orders) == 1, limit=40)


@pytest.mark.slow
def test_a_trained_set_is_certified_on_its_own_records_canaried_and_promoted() -> None:
    fleet = promoted()
    assert fleet.stable.ramp_set_digest == NEW
    certificate = next(c for c in fleet.configs.values() if c.plan == fleet.stable).status.certificates[0]
    assert certificate["rampSetDigest"] == NEW
    assert "Succeeded" in fleet.verdicts()
    fleet.step()
    assert fleet.published is not None
    assert fleet.published.ramp_sets == (NEW,), "the old set is not needed any more"
    for _ in range(60):
        capture_enough(fleet)
        fleet.step()
    assert fleet.stable.ramp_set_digest == NEW
    assert len(fleet.orders) == 1, "the next training is a day later"


def test_a_trained_set_outlives_a_pass_in_which_only_a_pool_with_other_exits_of_its_own_is_ready() -> None:
    fleet = promoted()
    fleet.step()
    gone, *others = fleet.snapshot().observed.workers
    gone = with_endpoint(replace(gone, state=None), ready=False)
    others = [with_endpoint(w, own_bundle=True) for w in others]
    others = [replace(w, state=replace(w.state, ramp_set_digest="sha256:other")) for w in others]
    decision = decide(changed(fleet.snapshot(), workers=(gone, *others)), fleet.now)
    assert decision.status.ramp_sets == fleet.status.ramp_sets
    assert decision.status.stable_config == fleet.status.stable_config
    assert decision.publish is None


def test_plans_of_a_set_on_trial_are_certified_on_records_that_are_younger_than_the_set() -> None:
    fleet = promoted()
    since = fleet.status.ramp_sets.trained_at
    assert since is not None
    certificates = [c.status.certificates[0] for c in fleet.configs.values() if c.plan.ramp_set_digest == NEW]
    assert certificates
    assert min(times.min() for _, times in fleet.scored[NEW]) > since


def test_labels_that_a_tuning_of_one_set_waits_for_are_not_waited_for_by_another() -> None:
    fleet = started()
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    waiting = replace(fleet.status.tuning, labels_needed=50_000, tuned_for="", state="CollectingLabels")
    fleet.service = replace(fleet.service, status=replace(fleet.status, tuning=waiting))
    capture_enough(fleet)
    fleet.run(lambda f: f.status.ramp_sets.candidate == NEW, limit=20)
    assert fleet.status.tuning.labels_needed < 5000
    for worker in fleet.workers:
        worker.sets.clear()
        worker.document = replace(fleet.published, epoch=fleet.published.epoch - 1, ramp_sets=())
        worker.configure(fleet.published)
    fleet.run(lambda f: f.status.ramp_sets.candidate == "", limit=20)
    assert fleet.status.tuning.labels_needed < 5000  # nor does it come back: the need is computed anew


def test_deciding_twice_on_the_same_facts_changes_nothing() -> None:
    fleet = promoted()
    fleet.step()
    snapshot = fleet.snapshot()
    first = decide(snapshot, fleet.now)
    again = decide(changed(snapshot, service=replace(snapshot.service, status=first.status)), fleet.now)
    assert again.status == first.status
    assert again.publish is None


def test_no_gain_on_held_out_captures_is_no_candidate_and_the_next_training_is_a_day_later() -> None:
    fleet = started(result=replace(GAIN, saving_after=0.055))
    fleet.step()
    capture_enough(fleet)
    fleet.run(lambda f: "NoBetterRamps" in f.reasons())
    began = fleet.now
    assert fleet.status.ramp_sets.candidate == ""
    capture_enough(fleet)
    for _ in range(5):
        fleet.step()
    assert len(fleet.orders) == 1
    fleet.now = began + REFRESH_SECONDS
    fleet.run(lambda f: len(f.orders) == 2, limit=150)


def test_a_failed_training_is_told_and_tried_again_later_each_time() -> None:
    fleet = started(result=TrainingReport(0, "Failed", message="the disk is full"))
    fleet.step()
    capture_enough(fleet)
    fleet.run(lambda f: "TrainingFailed" in f.reasons())
    assert "the disk is full" in fleet.status.ramp_sets.message
    first = (fleet.status.ramp_sets.next_attempt_at or 0.0) - fleet.now
    fleet.now += first
    capture_enough(fleet)
    fleet.run(lambda f: f.reasons().count("TrainingFailed") == 2, limit=150)
    second = (fleet.status.ramp_sets.next_attempt_at or 0.0) - fleet.now
    assert second == 2 * first > 0


def test_a_set_that_workers_cannot_hold_is_discarded_and_what_serves_goes_on() -> None:
    fleet = on_trial()
    for worker in fleet.workers:
        worker.sets.clear()
        worker.document = replace(fleet.published, epoch=fleet.published.epoch - 1, ramp_sets=())
        worker.configure(fleet.published)
    stable = fleet.stable
    fleet.run(lambda f: "RampSetDiscarded" in f.reasons(), limit=5)
    fleet.run(lambda f: all(w.document.epoch == f.published.epoch for w in f.workers), limit=5)
    assert fleet.stable == stable
    assert fleet.published.ramp_sets == ()
    assert NEW not in plan_sets(fleet)


def test_a_set_whose_plans_save_nothing_is_discarded_without_a_canary() -> None:
    fleet = started(heads=pool(4000, seed=3, confusion=0.4))
    fleet.step()
    capture_enough(fleet)
    fleet.run(lambda f: "RampSetDiscarded" in f.reasons(), limit=900)
    assert fleet.status.ramp_sets.current == ""
    assert NEW not in plan_sets(fleet)


def test_a_canary_that_is_rolled_back_takes_its_set_along() -> None:
    fleet = on_trial()
    stable = fleet.stable
    fleet.run(lambda f: f.published is not None and f.published.canary is not None, limit=900)
    assert fleet.published.canary.plan["rampSetDigest"] == NEW
    for worker in fleet.workers:
        worker.slowdown = 3.0
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=600)
    assert fleet.stable == stable
    assert fleet.status.ramp_sets.candidate == fleet.status.ramp_sets.current == ""
    assert (fleet.status.ramp_sets.next_attempt_at or 0.0) > fleet.now


def test_an_alarm_begins_the_captures_anew_and_brings_the_next_training_forward() -> None:
    fleet = promoted()
    for worker in fleet.workers:
        worker.sets[NEW] = pool(4000, seed=5, confusion=0.3)
        worker.breaker_open = True
    fleet.heads = pool(4000, seed=5, confusion=0.3)
    fleet.now += 700.0  # beyond the cool-down of ten minutes since the last training
    fleet.step()
    for worker in fleet.workers:
        worker.breaker_open = False
    drift = fleet.status.tuning.records_since_at
    assert drift is not None
    assert (fleet.status.ramp_sets.capture_since_at or 0.0) >= drift
    capture_enough(fleet)
    fleet.run(lambda f: len(f.orders) == 2, limit=100)
    assert fleet.orders[1].ramp_set_digest == NEW, "heads are trained further from those that served last"


def test_what_became_of_a_training_on_another_sample_is_not_taken_for_the_present_one() -> None:
    """A number of an attempt comes again after another bundle, or after an opt-out."""
    fleet = started()
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    fleet.training = replace(GAIN, attempt=1, since=1.0)
    capture_enough(fleet)
    fleet.run(lambda f: f.status.ramp_sets.state == "Training", limit=20)
    assert fleet.status.ramp_sets.candidate == ""
    assert [order.since for order in fleet.orders] == [fleet.status.ramp_sets.capture_since_at]
    fleet.run(lambda f: f.status.ramp_sets.candidate == NEW, limit=5)


def condition_of(fleet: TrainingFleet) -> tuple[str, str] | None:
    found = [(c.reason, c.message) for c in fleet.status.conditions if c.type == "RampTraining"]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.slow
def test_a_condition_says_what_keeps_ramps_from_being_trained_for_as_long_as_it_does() -> None:
    fleet = started()
    fleet.result = TrainingReport(0, "Running", message="no node has enough memory; add a node")
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    assert condition_of(fleet) is None
    capture_enough(fleet)
    fleet.run(lambda f: condition_of(f) is not None, limit=20)
    assert condition_of(fleet) == ("TrainingWaits", "no node has enough memory; add a node")
    fleet.training = replace(fleet.training or GAIN, message="")
    fleet.step()
    assert condition_of(fleet) is None
    fleet.training = replace(fleet.training or GAIN, state="Failed", message="it used more memory than its pod may")
    fleet.step()
    reason, message = condition_of(fleet) or ("", "")
    assert reason == "TrainingFailed"
    assert "it used more memory than its pod may; the next attempt is due at " in message
    fleet.result = GAIN
    capture_enough(fleet)
    fleet.run(lambda f: f.status.ramp_sets.candidate == NEW, limit=4000)
    assert condition_of(fleet) is None


def test_workers_that_lost_their_store_leave_the_promoted_set_for_exits_off() -> None:
    """A spec without the store replaces the workers by some that call the set a mismatch."""
    fleet = promoted()
    fleet.edit(ramps={})
    for worker in fleet.workers:
        worker.has_store = False
        worker.restart()
    fleet.run(lambda f: "RampSetGone" in f.reasons(), limit=5)
    assert fleet.stable.exits_off
    assert fleet.stable.ramp_set_digest == RAMP_SET


def test_without_the_opt_in_captures_end_and_a_promoted_set_goes_on_serving() -> None:
    fleet = promoted()
    fleet.edit(ramps={})
    for _ in range(3):
        fleet.step()
    assert fleet.published is not None
    assert fleet.published.capture_since is None
    assert fleet.stable.ramp_set_digest == NEW
    assert fleet.published.ramp_sets == (NEW,)


def test_a_set_that_no_worker_can_load_any_more_turns_exits_off_and_the_bundle_s_own_is_tuned_again() -> None:
    fleet = promoted()
    for worker in fleet.workers:
        worker.sets.clear()
        worker.restart()
    fleet.run(lambda f: "RampSetGone" in f.reasons(), limit=5)
    assert fleet.stable.exits_off
    assert fleet.status.ramp_sets.current == ""
    fleet.run(lambda f: all(w.document is not None for w in f.workers), limit=5)
