"""The capacity without exits: what a worker is said to answer, what is asked of it, and the floor that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.batching import offramp_batching
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.control.objects import CapacityStatus
from offramp_core.control.snapshot import Scaling
from offramp_core.control.spec import Autoscaling
from offramp_core.control.workers.capacity import (
    MIN_BATCHES,
    PEAK_SECONDS,
    QUIET_SECONDS,
    CapacityView,
    floor_in_force,
    next_capacity,
    worker_rate,
)
from offramp_core.protocol import ArmCounts
from offramp_core.sketch import bucket_index
from offramp_lab.policies import PlanInForce
from offramp_lab.simulate import ANSWERED, serve_stream
from offramp_lab.simulate.arrivals import poisson

NOW = 1_000_000.0
OWN = Scaling("HorizontalPodAutoscaler digits", 4)
RATES = st.floats(min_value=0.05, max_value=1e6)


def scaled(floor: Any = "Reserve", *, fewest: int = 2, most: int = 20) -> Autoscaling:
    return Autoscaling(max_replicas=most, target_in_flight=8, min_replicas=fewest, no_exit_floor=floor)


def view(**changes: Any) -> CapacityView:
    facts: dict[str, Any] = {
        "before": CapacityStatus(),
        "worker_rate": 100.0,
        "peak_rate": 500.0,
        "ready": 4,
        "exits_on": True,
        "at_risk": False,
        "now": NOW,
        "watched_since": NOW - 2 * PEAK_SECONDS,
        "autoscaling": scaled(),
        "scaling": OWN,
    }
    return CapacityView(**(facts | changes))


# --- what a worker can do --------------------------------------------------------------------------


def costs(fixed: float, per_row: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> dict[str, Any]:
    return {"batch_size": list(sizes), "segment_seconds": [[fixed, per_row * size] for size in sizes]}


def served(sizes: dict[int, int], seconds: float, *, plan: str = "off", arm: Any = "holdback") -> ArmCounts:
    execution = {str(size): {str(bucket_index(seconds)): n} for size, n in sizes.items()}
    n = sum(sizes.values())
    return ArmCounts(3, arm, plan, batches=n, busy_seconds=n * seconds, execution=execution)


def rate(costs_: dict[str, Any], *counts: ArmCounts, latency: float = 0.1) -> float:
    return worker_rate(costs_, counts, exits_off_hash="off", latency_seconds=latency)


@pytest.mark.parametrize("slack", [3.0, 4.0, 8.0, 20.0])
@pytest.mark.parametrize(("fixed", "per_row"), [(4.0, 0.8), (1.0, 1.0), (8.0, 0.2)])
def test_a_worker_answers_in_time_what_it_is_said_to_answer_without_exits(
    fixed: float, per_row: float, slack: float
) -> None:
    """Against the queue simulator with the worker's own batching and admission."""
    found = costs(fixed * 1e-3, per_row * 1e-3)
    latency = slack * (fixed + per_row) * 1e-3
    batches = [
        BatchProfile(size, sum(row), tuple(row), (0.0,), 0.0)
        for size, row in zip(found["batch_size"], found["segment_seconds"], strict=True)
    ]
    profile = Profile("test", 1, tuple(batches))
    arrivals = poisson(8000, rate(found, latency=latency), np.random.default_rng(7))

    class Stays:
        exit = np.full(len(arrivals), -1)
        plans = (PlanInForce(0, (), ()),)

    done = serve_stream(
        arrivals,
        Stays(),
        profile,
        batching=offramp_batching(profile, latency_seconds=latency),
        slo_seconds=latency,
        admission=True,
    )
    answered = done.status == ANSWERED
    assert answered.mean() >= 0.95
    assert np.quantile(done.latency[answered], 0.95) <= latency


def test_batches_with_exits_off_say_how_fast_this_machine_is() -> None:
    profiled = rate(costs(0.004, 0.001))
    twice_as_slow = served({1: 2 * MIN_BATCHES}, 0.010)
    assert rate(costs(0.004, 0.001), twice_as_slow) < 0.55 * profiled
    twice_as_fast = served({1: 2 * MIN_BATCHES}, 0.0025)
    assert rate(costs(0.004, 0.001), twice_as_fast) > 1.8 * profiled


def test_a_few_batches_or_batches_with_exits_say_nothing_about_it() -> None:
    profiled = rate(costs(0.004, 0.001))
    assert rate(costs(0.004, 0.001), served({1: MIN_BATCHES - 1}, 0.5)) == profiled
    assert rate(costs(0.004, 0.001), served({1: 500}, 0.001, plan="with exits", arm="stable")) == profiled


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"batch_size": [1]},
        {"batch_size": [1, 2], "segment_seconds": [[0.1]]},
        {"batch_size": [1], "segment_seconds": [[0.0]]},
    ],
)
def test_costs_that_say_nothing_are_no_capacity(bad: dict[str, Any]) -> None:
    assert rate(bad) == 0.0


@given(st.floats(0.02, 2.0), st.floats(0.02, 2.0))
def test_a_longer_objective_never_lowers_the_capacity(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert rate(costs(0.004, 0.001), latency=low) <= rate(costs(0.004, 0.001), latency=high) * (1 + 1e-9)


# --- the floor -------------------------------------------------------------------------------------


@given(RATES, RATES, RATES, st.integers(1, 9), st.integers(0, 30))
def test_the_floor_rises_with_the_demand_and_keeps_to_the_limits(
    one: float, other: float, can: float, fewest: int, more: int
) -> None:
    low, high = sorted((one, other))
    limits = scaled(fewest=fewest, most=fewest + more)
    floors = [
        next_capacity(view(worker_rate=can, peak_rate=peak, autoscaling=limits)).status.floor for peak in (low, high)
    ]
    assert fewest <= floors[0] <= floors[1] <= fewest + more


@given(RATES, RATES, RATES, RATES)
def test_the_floor_carries_the_peak_whatever_was_told_before(
    peak: float, can: float, told: float, could: float
) -> None:
    before = next_capacity(view(worker_rate=could, peak_rate=told)).status
    limits = scaled(most=1000)
    status = next_capacity(view(before=before, worker_rate=can, peak_rate=peak, autoscaling=limits)).status
    assert status.worker_rate <= can and status.peak_rate >= peak
    assert status.floor == 1000 or status.floor * can >= peak * (1 - 1e-9)


@given(RATES, RATES, st.sampled_from(["Reserve", "PreScale", "None"]), st.booleans(), st.integers(0, 40))
def test_deciding_again_on_the_same_facts_changes_nothing(
    peak: float, can: float, floor: str, risk: bool, ready: int
) -> None:
    facts = view(peak_rate=peak, worker_rate=can, autoscaling=scaled(floor), at_risk=risk, ready=ready)
    first = next_capacity(facts)
    again = next_capacity(replace(facts, before=first.status, was_short=first.enough is False))
    assert again.status == first.status


def test_figures_that_wander_by_a_tenth_are_told_once() -> None:
    rng, told, seen = np.random.default_rng(1), CapacityStatus(), []
    for _ in range(500):
        wander = rng.uniform(0.95, 1.05, 2)
        told = next_capacity(view(before=told, worker_rate=100 * wander[0], peak_rate=500 * wander[1])).status
        seen.append(told)
    assert len(set(seen)) <= 4
    assert len(set(seen[20:])) == 1


def test_capacity_that_is_just_enough_does_not_flap() -> None:
    enough = next_capacity(view(peak_rate=388.0, ready=4, worker_rate=104.0))
    assert (enough.status.worker_rate, enough.status.peak_rate, enough.enough) == (100.0, 400.0, True)
    short = replace(view(peak_rate=388.0, worker_rate=104.0), before=enough.status, was_short=True)
    assert next_capacity(short).enough is False, "once short, it must be well below again"
    assert next_capacity(replace(short, ready=5)).enough is True


def test_without_traffic_nothing_is_needed_and_without_a_profile_nothing_is_known() -> None:
    idle = next_capacity(view(peak_rate=0.0))
    assert (idle.status.needed, idle.status.floor, idle.enough) == (0, 2, True)
    assert next_capacity(view(worker_rate=0.0)).enough is None


def test_workers_that_fall_silent_leave_the_figures_and_the_floor_alone() -> None:
    before = next_capacity(view()).status
    assert before.floor == 6
    silent = next_capacity(view(before=before, worker_rate=0.0, peak_rate=0.0, watched_since=NOW - 60, ready=0))
    assert silent.status == before


def test_a_restarted_operator_keeps_the_peak_for_an_hour_and_then_believes_its_own_eyes() -> None:
    before = next_capacity(view()).status
    restarted = view(before=before, peak_rate=50.0, watched_since=NOW)
    assert next_capacity(restarted).status == before
    assert next_capacity(replace(restarted, now=NOW + PEAK_SECONDS)).status.peak_rate < 60


def test_a_floor_is_for_the_autoscaler_of_the_spec_alone() -> None:
    assert next_capacity(view(autoscaling=None, scaling=None)).status.floor == 0
    assert next_capacity(view(autoscaling=scaled("None"))).status.floor == 0
    other = Scaling("HorizontalPodAutoscaler mine", 4, "both", "AnotherAutoscaler")
    assert next_capacity(view(scaling=other)).status.floor == 0


def test_an_old_status_never_goes_beyond_the_limits_of_now() -> None:
    assert floor_in_force(scaled(most=5), CapacityStatus(floor=9)) == 5
    assert floor_in_force(scaled(fewest=3), CapacityStatus(floor=1)) == 3
    assert floor_in_force(scaled("None", fewest=1), CapacityStatus(floor=9)) == 1


# --- PreScale --------------------------------------------------------------------------------------


def test_workers_are_spared_only_after_a_proven_plan_was_quiet_for_a_while() -> None:
    status, floors = CapacityStatus(), {}
    for second in range(0, 2 * int(QUIET_SECONDS), 10):
        status = next_capacity(view(before=status, autoscaling=scaled("PreScale"), now=NOW + second)).status
        floors[second] = status.floor
    assert {floors[s] for s in floors if s < QUIET_SECONDS} == {6}
    assert {floors[s] for s in floors if s >= QUIET_SECONDS} == {2}


@pytest.mark.parametrize("change", [{"at_risk": True}, {"exits_on": False}], ids=["risk", "exits off"])
def test_the_floor_rises_at_once_when_exits_may_go_off_or_are_off(change: dict[str, Any]) -> None:
    resting = CapacityStatus(97.0, 520.0, 6, 2, NOW - 2 * QUIET_SECONDS)
    assert next_capacity(view(before=resting, autoscaling=scaled("PreScale"))).status.floor == 2
    raised = next_capacity(view(before=resting, autoscaling=scaled("PreScale"), **change)).status
    assert raised.floor == 6
    calm = next_capacity(view(before=raised, autoscaling=scaled("PreScale"), now=NOW + 60)).status
    assert calm.floor == 6, "one quiet look is not enough"


def test_a_moment_from_a_clock_that_is_ahead_does_not_keep_the_floor_up_for_ever() -> None:
    ahead = CapacityStatus(97.0, 520.0, 6, 6, NOW + 10_000)
    facts = view(before=ahead, autoscaling=scaled("PreScale"), watched_since=NOW - 10)
    assert next_capacity(facts).status.floor == 6
    assert next_capacity(replace(facts, now=NOW + QUIET_SECONDS)).status.floor == 2
