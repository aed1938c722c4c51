"""The control loop's error rates on simulated fleets; `python -m bench.control` does the same on recorded scores,
thousands of times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.control import judged, summary
from bench.control_fleet import MANIFEST, Arm, Fleet, service_of
from bench.control_rollouts import SCENARIOS, Scenario, attempt
from bench.control_world import BUDGET, MAX_BATCH, Traffic, World
from bench.control_year import YearScenario, year
from bench.promise import Drift
from fleet import RAMPS, pool  # type: ignore[import-not-found]

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.control.objects import GateStatus
from offramp_core.control.rollouts import gates
from offramp_core.control.rollouts.gates import GateInput
from offramp_core.evidence.slow import BatchShape
from offramp_worker.engine.accounts.counters import ArmCounter

SIZES = (1, 8, 32)


@pytest.fixture(scope="module")
def world() -> World:
    """A made-up pool of 9,000 rows and three ramps; a batch of n takes 2 + 0.5 n times as long as its rows would
    alone."""
    records = pool(9000, seed=1)
    segments, ramps = records.costs.segment_seconds, records.costs.ramp_seconds
    batches = tuple(
        BatchProfile(n, float(segments.sum()), tuple(segments * (0.5 + 0.5 * n)), tuple(ramps * (0.5 + 0.5 * n)), 0.0)
        for n in SIZES
    )
    return World(replace(records, time=None, profile=Profile("test", 1, batches)), RAMPS)


def scenario(name: str) -> Scenario:
    return next(s for s in SCENARIOS if s.name == name)


class TestTheSimulation:
    def test_plans_have_the_disagreement_that_was_asked_for(self, world: World) -> None:
        for rate in (0.003, 0.005, 0.05):
            assert world.served(world.plan_at(rate)).disagreement == pytest.approx(rate, rel=0.05)

    def test_traffic_comes_at_the_stated_rate_and_utilisation_in_batches_of_1_to_32(self, world: World) -> None:
        seen = Traffic(world, np.random.default_rng(1), rate=400, utilisation=0.3, workers=4, now=0.0).until(1000.0)
        assert seen.size.min() == 1 and seen.size.max() == MAX_BATCH
        assert seen.size.sum() / 1000 == pytest.approx(400, rel=0.1)
        whole = np.asarray(world.served(world.exits_off).stages.seconds[-1])
        assert (whole[seen.size] * seen.slowness).sum() / 4000 == pytest.approx(0.3, rel=0.25)  # stalls come on top

    def test_it_counts_as_the_worker_does_batch_by_batch(self, world: World) -> None:
        rng, n, served = np.random.default_rng(3), 200, world.served(world.plan_at(0.005))
        size, seconds = rng.integers(1, 33, n), rng.lognormal(-4, 0.5, n)
        failed, limits = rng.random(n) < 0.1, np.where(np.arange(MAX_BATCH + 1) % 3, 0.02, np.nan)
        stages = len(served.exit_names)
        leaves = np.array([rng.multinomial(s, np.full(stages, 1 / stages)) for s in size])
        drawn = rng.binomial(size, 0.3)
        arm, one_by_one = (
            Arm(served, ArmCounter(1, "canary", served.hash), 0.3, limits),
            ArmCounter(1, "canary", served.hash),
        )
        arm.count(size, seconds, failed, leaves, drawn)
        for b in range(n):
            limit = limits[size[b]]
            one_by_one.count_batch(
                shape=BatchShape(int(size[b])),
                seconds=float(seconds[b]),
                slow_above=None if np.isnan(limit) else float(limit),
                failed=bool(failed[b]),
            )
            for i, left in enumerate([] if failed[b] else leaves[b].tolist()):
                took = [float(seconds[b])] * left
                one_by_one.count_replies(
                    exit_name=served.exit_names[i], latencies=took, drawn=0 if i else int(drawn[b])
                )
        expected = one_by_one.freeze()
        assert replace(arm.counter.freeze(), busy_seconds=0.0) == replace(expected, busy_seconds=0.0)
        assert arm.counter.busy_seconds == pytest.approx(expected.busy_seconds)

    def test_the_canary_gets_its_weight_of_batches_and_audits_read_the_truth(self, world: World) -> None:
        fleet = Fleet(world, service_of(MANIFEST), seed=5, rate=800, utilisation=0.2)
        for _ in range(2):
            fleet.step(20.0)
        fleet.begin(fleet.add_config(world.plan_at(0.5 * BUDGET)))
        while not fleet.rollouts["sim-1"].status.finished:
            fleet.step()
        assert fleet.rollouts["sim-1"].status.verdict == "Succeeded"
        arms = [c for w in fleet.workers for c in w.counters if c.epoch == fleet.workers[0].counters[-2].epoch]
        canary, stable = (sum(c.batches for c in arms if c.arm == arm) for arm in ("canary", "stable"))
        assert canary / (canary + stable) == pytest.approx(0.5, abs=4 * 0.5 / (canary + stable) ** 0.5)

    def test_without_the_gates_that_read_audits_the_loop_promotes_a_harmful_plan(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The figures are those of the control plane's own gates: take them away and they break."""

        def blind(_: GateInput) -> GateStatus:
            return GateStatus("accuracy", "Clear")

        others = [gate for gate in gates.GATES if gate not in (gates.accuracy, gates.drift)]
        monkeypatch.setattr(gates, "GATES", (blind, *others))
        harmful = replace(scenario("harmful"), request_rate=800.0)
        assert attempt(world, harmful, 1).verdict == "Succeeded"


class TestJudging:
    def test_a_share_that_noise_can_explain_holds(self) -> None:
        assert judged(60, 5000, allowed=0.01)["holds"]

    def test_a_share_that_it_cannot_is_refuted(self) -> None:
        assert judged(80, 5000, allowed=0.01)["holds"] is False

    def test_nothing_seen_says_nothing(self) -> None:
        assert judged(0, 0, allowed=0.01)["holds"] is None


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.parametrize(
    ("name", "runs"), [("half", 40), ("harmful", 200), ("equal", 40), ("slow", 60), ("healthy", 40)]
)
def test_the_loop_keeps_its_promises(world: World, name: str, runs: int) -> None:
    """At the allowed share a run of this test refutes in at most 1 of 1,000 choices of seeds."""
    row = summary(scenario(name), [attempt(world, scenario(name), seed) for seed in range(runs)])
    assert row["n"] > 0.8 * runs
    assert row["holds"], row


class TestOverTime:
    """Forty days of strong drift: the inputs get harder by jumps."""

    STRONG = YearScenario("strong", "", Drift(walk=0.0, season=0.0, jumps_per_year=60.0, jump=2.0), days=40)

    @pytest.mark.slow
    @pytest.mark.simulation
    def test_breakers_and_tuning_keep_the_budget_which_a_fleet_without_breakers_exceeds_more(
        self, world: World
    ) -> None:
        watched = [year(world, self.STRONG, seed) for seed in range(3)]
        blind = [year(world, replace(self.STRONG, watched=False), seed) for seed in range(3)]
        assert all(y.disagreement <= BUDGET for y in watched)
        assert sum(y.alarms for y in watched) > 0
        assert np.mean([y.disagreement for y in blind]) > np.mean([y.disagreement for y in watched])
        assert np.mean([y.saving for y in watched]) > 0.05  # by plans, not by exits off
