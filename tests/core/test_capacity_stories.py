"""A fleet whose workers are scaled by their load: what a rollback does to it, and what becomes of a service at zero."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from fleet import MANIFEST, Fleet, SimWorker, changed, pool

from offramp_core.control.decide import decide
from offramp_core.control.objects import CapacityStatus
from offramp_core.control.snapshot import Decision, Load, Scaling, Snapshot
from offramp_core.control.workers.capacity import QUIET_SECONDS, floor_in_force
from offramp_core.protocol import PlanDocument

CLEAN, RECKLESS = pool(8000, seed=1), pool(8000, seed=2, confusion=0.5)
DEMAND = 54.0  # requests per second
OFF_SECONDS, ON_SECONDS = 0.1, 0.04  # engine seconds of a request with exits off and on
START_SECONDS = 40
STABILIZATION = 300
BUSY = 0.8  # what the autoscaler aims at


@dataclass
class ScaledFleet(Fleet):
    """Workers that are added and taken away as a HorizontalPodAutoscaler would; counts the seconds in which they had
    more work than time.

    The requests that are simulated stand for ``DEMAND``.
    """

    requests_per_second: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: deque[tuple[float, int]] = deque()
        self.overloaded, self.replicas, self.made, self.alarmed = 0.0, 9, 0, False
        self.born: dict[str, float] = {}
        self.workers = []
        self._add(9)
        for worker in self.workers:
            worker.ready = True

    def _add(self, n: int) -> None:
        for _ in range(n):
            self.workers.append(SimWorker(f"w{self.made}", self.made, ready=False))
            self.born[self.workers[-1].name] = self.now
            self.made += 1

    @property
    def work(self) -> float:
        """Engine seconds that come in a second."""
        doc = self.published
        weight = doc.weight_percent / 100 if doc is not None and doc.canary is not None else 0.0
        on = doc is not None and bool(doc.stable.plan["ramps"]) and not self.alarmed
        return DEMAND * (weight * ON_SECONDS + (1 - weight) * (ON_SECONDS if on else OFF_SECONDS))

    def step(self, seconds: float = 1.0) -> Decision:
        self._scale()
        everyone, self.workers = self.workers, [w for w in self.workers if w.ready]
        self.overloaded += seconds * (self.work > len(self.workers))
        try:
            return super().step(seconds)
        finally:
            self.workers = everyone

    def pass_time(self, seconds: float, *, stride: float = 5.0) -> None:
        """In which little is simulated of the traffic."""
        usual, self.requests_per_second = self.requests_per_second, 9
        for _ in range(round(seconds / stride)):
            self.step(stride)
        self.requests_per_second = usual

    def _scale(self) -> None:
        """Up at once, down to the highest number asked for lately; the limits of the object go before."""
        scaled = self.service.spec.autoscaling
        assert scaled is not None
        self.asked.append((self.now, math.ceil(self.work / BUSY)))
        while self.asked[0][0] < self.now - STABILIZATION:
            self.asked.popleft()
        steady = max(self.replicas, self.asked[-1][1]), max(n for _, n in self.asked)
        wanted = max(min(steady), floor_in_force(scaled, self.status.capacity))
        self.replicas = min(wanted, scaled.max_replicas)
        del self.workers[self.replicas :]
        self._add(self.replicas - len(self.workers))
        for worker in self.workers:
            if not worker.ready and self.now - self.born[worker.name] >= START_SECONDS:
                worker.ready = True
                if self.published is not None:
                    worker.configure(self.published)

    def snapshot(self) -> Snapshot:
        slow = {"batch_size": [1], "segment_seconds": [[0.025] * 4], "ramp_seconds": [[0.001] * 3]}
        seen = super().snapshot()
        workers = tuple(replace(w, state=replace(w.state, costs=slow)) for w in seen.workers if w.state is not None)
        load = Load(DEMAND, 0.2, DEMAND)
        return changed(seen, workers=workers, load=load, scaling=Scaling("HorizontalPodAutoscaler sim", self.replicas))


def scaled_by(floor: str) -> dict[str, Any]:
    return {"minReplicas": 1, "maxReplicas": 20, "targetInFlight": 8, "noExitFloor": floor}


def scaled() -> ScaledFleet:
    manifest = {name: value for name, value in MANIFEST.items() if name != "replicas"}
    manifest["objective"] = {"latency": {"threshold": "2s"}, "accuracy": {"maxDisagreement": "0.02"}}
    return ScaledFleet(CLEAN, {**manifest, "autoscaling": scaled_by("Reserve")})


@cache
def _half_canaried() -> ScaledFleet:
    fleet = scaled()
    fleet.run(lambda f: any(r.status.weight == 50 for r in f.rollouts.values()), limit=1500)
    name = next(iter(fleet.rollouts))
    fleet.rollouts[name] = replace(fleet.rollouts[name], paused=True)
    return fleet


def rolled_back(floor: str) -> ScaledFleet:
    """A canary with half of the batches rests for so long that the autoscaler gets used to what it saves; then the
    inputs change."""
    fleet = copy.deepcopy(_half_canaried())
    fleet.edit(autoscaling=scaled_by(floor))
    fleet.pass_time(STABILIZATION + 60)
    assert [r.status.phase for r in fleet.rollouts.values()] == ["Paused"]
    assert fleet.overloaded == 0
    fleet.drift(RECKLESS)
    fleet.run(lambda f: "RolledBack" in f.verdicts(), limit=200)
    fleet.pass_time(120)
    assert fleet.stable.exits_off
    return fleet


@pytest.mark.slow
@pytest.mark.parametrize("floor", ["PreScale", "Reserve"])
def test_a_canary_that_is_rolled_back_finds_the_workers_that_it_needs(floor: str) -> None:
    assert rolled_back(floor).overloaded == 0


@pytest.mark.slow
def test_without_a_floor_the_autoscaler_gets_used_to_what_a_canary_saves_and_a_rollback_overloads() -> None:
    """So the two above can fail."""
    assert rolled_back("None").overloaded >= START_SECONDS / 2


@cache
def _promoted() -> ScaledFleet:
    fleet = scaled()
    fleet.run(lambda f: "Succeeded" in f.verdicts(), limit=3000)
    return fleet


@pytest.mark.slow
@pytest.mark.parametrize(
    ("floor", "workers", "overloaded"), [("Reserve", (7, 9), (0, 0)), ("PreScale", (2, 4), (20, 90))]
)
def test_an_abrupt_alarm_finds_reserved_workers_and_outruns_those_that_are_yet_to_start(
    floor: str, workers: tuple[int, int], overloaded: tuple[int, int]
) -> None:
    fleet = copy.deepcopy(_promoted())
    fleet.edit(autoscaling=scaled_by(floor), suspend=True)
    fleet.pass_time(QUIET_SECONDS + STABILIZATION + 60, stride=10.0)
    assert workers[0] <= fleet.replicas <= workers[1]
    assert (fleet.overloaded, fleet.stable.exits_off) == (0, False)
    fleet.alarmed = True
    for worker in fleet.workers:
        worker.breaker_open = True
    fleet.step()
    fleet.pass_time(120)
    assert fleet.stable.exits_off
    assert overloaded[0] <= fleet.overloaded <= overloaded[1]


# --- zero ------------------------------------------------------------------------------------------


@dataclass
class Sleepy(Fleet):
    """Workers come and go as ``spec.replicas`` says, and keep what they were told first."""

    first: list[PlanDocument] = field(default_factory=list)

    def scale(self, replicas: int) -> None:
        self.edit(replicas=replicas)
        self.workers = [] if not replicas else self.workers

    def wake(self, replicas: int = 2) -> None:
        """What new workers find when they start is what was published."""
        self.edit(replicas=replicas)
        self.step()
        assert self.published is not None
        self.first = [self.published] * replicas
        self.workers = [SimWorker(f"again{i}", 50 + i) for i in range(replicas)]
        for worker in self.workers:
            worker.configure(self.published)


@cache
def _serving() -> Sleepy:
    fleet = Sleepy(CLEAN)
    fleet.run(lambda f: "Succeeded" in f.verdicts())
    return fleet


@cache
def _canarying() -> Sleepy:
    fleet = Sleepy(CLEAN)
    fleet.run(lambda f: f.published is not None and f.published.canary is not None)
    return fleet


def condition(fleet: Fleet, kind: str) -> tuple[str, str]:
    found = next(c for c in fleet.status.conditions if c.type == kind)
    return found.status, found.reason


class TestAtZero:
    def test_the_plan_its_proof_and_its_verdicts_are_kept_and_nothing_more_is_written(self) -> None:
        fleet = copy.deepcopy(_serving())
        stable, configs = fleet.status.stable_config, {name: c.status for name, c in fleet.configs.items()}
        fleet.scale(0)
        fleet.step()
        assert condition(fleet, "Ready") == ("False", "ScaledToZero")
        assert condition(fleet, "NoExitCapacity") == ("Unknown", "ScaledToZero")
        assert fleet.status.phase == "ScaledToZero"
        assert "Stalled" not in {c.type for c in fleet.status.conditions}
        writes, epoch = fleet.writes, fleet.published and fleet.published.epoch
        for _ in range(100):
            fleet.step()
        assert (fleet.writes, fleet.published and fleet.published.epoch) == (writes, epoch)
        assert fleet.status.stable_config == stable
        assert {name: c.status for name, c in fleet.configs.items()} == configs
        assert [e.reason for e in fleet.events].count("ScaledToZero") == 1

    def test_workers_start_again_under_the_plan_that_was_proven(self) -> None:
        fleet = copy.deepcopy(_serving())
        stable, tested = fleet.status.stable_config, fleet.status.tuning.tests_run
        fleet.scale(0)
        fleet.run(lambda f: f.status.phase == "ScaledToZero")
        fleet.wake()
        assert [e.reason for e in fleet.events].count("WakingUp") == 1
        assert fleet.status.phase == "Starting"
        assert stable in next(c.message for c in fleet.status.conditions if c.type == "Ready")
        assert all(doc.canary is None and doc.stable.plan["ramps"] for doc in fleet.first)
        fleet.run(lambda f: f.status.phase == "Ready", limit=5)
        assert (fleet.status.stable_config, fleet.status.tuning.tests_run) == (stable, tested)

    def test_a_canary_does_not_lie_in_wait_for_the_next_workers_and_begins_anew_with_them(self) -> None:
        fleet = copy.deepcopy(_canarying())
        name = next(iter(fleet.rollouts))
        fleet.scale(0)
        fleet.step()
        assert fleet.published is not None and fleet.published.canary is None
        status = fleet.rollouts[name].status
        assert (status.phase, status.weight, status.verdict) == ("Pending", 0, "")
        assert status.ledger.total.canary.audited == 0, (
            "audits of workers that are gone are no evidence against the plan"
        )
        fleet.wake()
        assert all(doc.canary is None for doc in fleet.first)
        fleet.run(lambda f: f.rollouts[name].status.phase == "Progressing")
        fleet.run(lambda f: f.rollouts[name].status.finished)
        assert fleet.rollouts[name].status.verdict == "Succeeded"

    def test_workers_that_are_still_ending_leave_the_canary_too(self) -> None:
        fleet = copy.deepcopy(_canarying())
        fleet.edit(replicas=0)
        fleet.step()
        assert all(w.document is not None and w.document.canary is None for w in fleet.workers)

    def test_a_plan_that_is_no_longer_allowed_does_not_serve_the_next_workers(self) -> None:
        fleet = copy.deepcopy(_serving())
        fleet.scale(0)
        fleet.step()
        assert fleet.published is not None and fleet.published.stable.plan["ramps"]
        fleet.edit(objective={"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.0001"}}, replicas=0)
        fleet.step()
        assert fleet.published is not None and fleet.published.stable.plan["ramps"] == []
        assert fleet.stable.exits_off
        assert "ExitsOff" in [e.reason for e in fleet.events]
        epoch = fleet.published.epoch
        fleet.step()
        assert fleet.published.epoch == epoch

    def test_what_an_autoscaler_asks_for_counts_as_well(self) -> None:
        fleet = copy.deepcopy(_canarying())
        asleep = changed(fleet.snapshot(), scaling=Scaling("KEDA", 0), workers=())
        decision = decide(asleep, fleet.now)
        assert decision.publish is not None and decision.publish.canary is None

    def test_a_service_that_never_had_workers_says_so_and_publishes_nothing(self) -> None:
        fleet = Sleepy(CLEAN, {**MANIFEST, "replicas": 0})
        fleet.step()
        assert (fleet.status.phase, fleet.published, fleet.rollouts) == ("ScaledToZero", None, {})


class TestToldInTheLoop:
    def test_a_fleet_that_needs_its_exits_says_so_with_the_next_step(self) -> None:
        fleet = copy.deepcopy(_serving())
        snapshot = changed(fleet.snapshot(), load=Load(200, 0.2, 200.0))
        status = decide(snapshot, fleet.now).status
        told = next(c for c in status.conditions if c.type == "NoExitCapacity")
        assert (told.status, told.reason) == ("False", "ExitsOffWouldOverload")
        assert "raise spec.replicas to 3" in told.message
        assert status.capacity == CapacityStatus(worker_rate=77.0, peak_rate=210.0, needed=3)

    def test_enough_workers_are_enough(self) -> None:
        fleet = copy.deepcopy(_serving())
        status = decide(changed(fleet.snapshot(), load=Load(100, 0.2, 100.0)), fleet.now).status
        told = next(c for c in status.conditions if c.type == "NoExitCapacity")
        assert (told.status, told.reason) == ("True", "Sufficient")

    def test_a_steady_fleet_writes_no_capacity(self) -> None:
        fleet = copy.deepcopy(_serving())
        rng, seen = np.random.default_rng(5), set()
        for _ in range(60):
            fleet.now += 1
            peak = 100 + float(rng.normal(0, 2))
            decision = decide(changed(fleet.snapshot(), load=Load(100, 0.2, peak)), fleet.now)
            fleet.store(decision)
            seen.add(decision.status.capacity)
        assert len(seen) <= 2


def test_a_suspicious_detector_counts_as_a_risk() -> None:
    fleet = copy.deepcopy(_serving())
    manifest = {k: v for k, v in fleet.manifest.items() if k != "replicas"}
    floor: dict[str, Any] = {
        "autoscaling": {"minReplicas": 1, "maxReplicas": 9, "targetInFlight": 8, "noExitFloor": "PreScale"}
    }
    fleet.manifest = manifest
    fleet.edit(**floor)
    fleet.rollouts = {}
    rested = CapacityStatus(77.0, 210.0, 3, 1, fleet.now - 2 * QUIET_SECONDS)
    fleet.service = replace(fleet.service, status=replace(fleet.status, capacity=rested))
    snapshot = changed(fleet.snapshot(), load=Load(200, 0.2, 200.0), scaling=Scaling("HorizontalPodAutoscaler sim", 2))
    assert decide(snapshot, fleet.now).status.capacity.floor == 1
    suspects = tuple(replace(w, state=replace(w.state, suspicion=0.6)) for w in snapshot.workers if w.state)
    assert decide(changed(snapshot, workers=suspects), fleet.now).status.capacity.floor == 3
