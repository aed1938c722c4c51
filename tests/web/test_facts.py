"""The network under a plan and the latency with exits on and off, from counts worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from offramp_core.control.objects import Config, PoolPlanStatus, PoolStatus, Service, ServiceStatus, StartUpTimes
from offramp_core.control.served import Served
from offramp_core.control.spec import parse_spec
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, RampInfo
from offramp_core.sketch import bucket_index
from offramp_operator.explain.family import Family
from offramp_operator.explain.latency import APART, SIDE_BY_SIDE, latency
from offramp_operator.explain.network import network
from offramp_operator.explain.pools import PoolRow, pool_rows

COLUMNS = (
    RampInfo("in", 0, 0.0, "model"),
    RampInfo("a", 1, 0.5, "grid-mlp"),
    RampInfo("b", 1, 0.5, "conv"),
    RampInfo("c", 2, 0.75, "conv"),
)
COSTS: dict[str, list[Any]] = {
    "segment_seconds": [[0.0, 0.004, 0.0, 0.002, 0.002]],
    "ramp_seconds": [[0.001, 0.0005, 0.0005, 0.0005]],
    "batch_size": [1],
}
SERVED = Served("sha256:b", "sha256:r", COLUMNS, COSTS)


def config(**thresholds: str) -> Config:
    ramps = tuple(RampThreshold(name, Decimal(x)) for name, x in thresholds.items())
    return Config("net-1", Plan("sha256:b", "sha256:r", ramps))


def counted(plan: Config, epoch: int = 1, **more: Any) -> ArmCounts:
    return ArmCounts(epoch, "stable", plan.plan.content_hash, **more)


def test_the_network_under_a_plan_tells_shares_utility_and_saving() -> None:
    plan = config(a="0.5", c="0.2")
    facts = network(
        plan,
        "stable",
        SERVED,
        [
            counted(plan, requests=60, exits={"a": 30}),
            counted(plan, epoch=2, requests=40, exits={"a": 20, "c": 10, "final": 10}),
        ],
    )
    assert facts.blocks == pytest.approx((0.5, 0.25, 0.25)) and facts.requests == 100
    by_id = {ramp.id: ramp for ramp in facts.ramps}
    assert [r.place for r in facts.ramps] == pytest.approx([0, 0.5, 0.5, 0.75])
    assert [r.id for r in facts.ramps if r.active] == ["a", "c"]
    assert by_id["a"].exit_share == 0.5 and by_id["c"].exit_share == 0.1 and facts.stay_share == pytest.approx(0.4)
    # 50 of 100 spare the 4 ms behind it, 100 pay 0.5 ms; then 10 spare 2 ms, 50 pay 0.5 ms
    assert by_id["a"].utility_seconds == pytest.approx((50 * 0.004 - 100 * 0.0005) / 100)
    assert by_id["c"].utility_seconds == pytest.approx((10 * 0.002 - 50 * 0.0005) / 100)
    assert facts.saving == pytest.approx(sum(r.utility_seconds or 0.0 for r in facts.ramps) / 0.008)
    assert by_id["b"].utility_seconds is None and by_id["b"].exit_share is None


def test_a_network_that_served_nobody_knows_no_shares() -> None:
    plan = config(a="0.5")
    other = counted(config(), requests=7)
    facts = network(plan, "canary", SERVED, [other])
    assert (facts.requests, facts.stay_share, facts.saving) == (0, None, None)
    assert [r.threshold for r in facts.ramps] == ["", "0.5", "", ""]
    assert facts.ramps[1].exit_share is None and facts.ramps[1].utility_seconds is None


def test_a_threshold_of_zero_is_not_in_use() -> None:
    assert not any(r.active for r in network(config(a="0"), "stable", SERVED, []).ramps)


def seconds(rng: np.random.Generator, median: float, n: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in rng.lognormal(np.log(median), 0.3, n):
        key = str(bucket_index(float(value)))
        found[key] = found.get(key, 0) + 1
    return found


def test_arms_of_one_epoch_are_compared_and_others_left_out() -> None:
    rng, on, off = np.random.default_rng(1), config(a="0.5"), config()
    counts = [
        counted(off, epoch=1, latency=seconds(rng, 0.5, 500)),  # long before, under another load
        counted(on, epoch=2, latency=seconds(rng, 0.004, 4000)),
        counted(off, epoch=2, latency=seconds(rng, 0.008, 4000)),
    ]
    facts = latency(counts, on={on.plan.content_hash}, off={off.plan.content_hash}, slo_seconds=0.1, percentile=95)
    assert facts.how == SIDE_BY_SIDE and facts.on is not None and facts.off is not None
    assert (
        facts.off.n == 4000
        and facts.off.at(0.5) == pytest.approx(0.008, rel=0.03)
        and facts.on.at(0.5) == pytest.approx(0.004, rel=0.03)
    )
    for distribution in (facts.on, facts.off):
        x, y = np.array(distribution.points).T
        assert (np.diff(x) > 0).all() and (np.diff(y) >= 0).all() and y[-1] == 1.0 and len(x) <= 121


def test_what_was_counted_at_different_times_is_said_to_be() -> None:
    rng, on, off = np.random.default_rng(2), config(a="0.5"), config()
    counts = [
        counted(off, epoch=1, latency=seconds(rng, 0.01, 200)),
        counted(on, epoch=2, latency=seconds(rng, 0.01, 200)),
    ]
    facts = latency(counts, on={on.plan.content_hash}, off={off.plan.content_hash}, slo_seconds=0.1, percentile=95)
    assert facts.how == APART and facts.on is not None and facts.off is not None


def test_too_few_requests_are_no_distribution() -> None:
    rng, on = np.random.default_rng(3), config(a="0.5")
    facts = latency(
        [counted(on, latency=seconds(rng, 0.01, 99))],
        on={on.plan.content_hash},
        off=set(),
        slo_seconds=0.1,
        percentile=95,
    )
    assert facts.on is None and facts.off is None and "100 requests" in facts.how


def test_a_pool_says_what_was_considered_of_it_and_why_it_has_so_many_workers() -> None:
    pools = [{"name": name, "costPerHour": "1", "maxWorkers": 3} for name in ("cheap", "few", "slow", "new", "far")]
    pools[1]["maxWorkers"], pools[2]["costPerHour"] = 1, "9"
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.01"}}
    spec = parse_spec({"model": {"uri": "oci://a/b:1"}, "objective": objective, "pools": pools})
    figures = {"worker_rate": 50.0, "batch_size": 1, "batch_seconds": 0.01}
    status = ServiceStatus(
        pools=(
            PoolStatus("cheap", 2, 2, planned=2, startup=StartUpTimes(1.0, 0.0, 2.0, 6.0), **figures),
            PoolStatus("few", **figures),
            PoolStatus("slow", **figures),
            PoolStatus("new", 1, 0),
            PoolStatus("far", **{**figures, "batch_seconds": 0.06}),
        ),
        pool_plan=PoolPlanStatus(demand=90.0, answered=100.0, cost_per_hour=2.0, reason="the cheapest"),
    )
    rows = {row.name: row for row in pool_rows(Family(Service("ns", "s", "uid", 1, spec, status=status), {}, ()))}
    cheap = rows["cheap"]
    assert (cheap.workers, cheap.planned, cheap.rate, cheap.price) == ("2 of 2 ready", "2", "50", "1")
    assert (cheap.alone, cheap.startup) == (
        "2 for 2 an hour",
        "9 s (1 s to a node, 2 s for its container, 6 s to load and warm up)",
    )
    assert {name: row.why for name, row in rows.items()} == {
        "cheap": "chosen",
        "few": "has 1 at most; alone 2 would be needed",
        "slow": "alone it would cost 18 an hour, what is chosen 2",
        "new": "not measured yet",
        "far": "two batches take 0.12 s of the objective of 0.1 s",
    }


def two_pools(plan: PoolPlanStatus, *, planned: int, rate: float = 50.0, least: int = 0) -> list[PoolRow]:
    """Of a pool with so many workers planned, and a dearer one with none."""
    pools = [{"name": name, "costPerHour": cost, "maxWorkers": 3} for name, cost in (("one", "1"), ("two", "2"))]
    pools[0]["minWorkers"] = least
    objective = {"latency": {"threshold": "100ms"}, "accuracy": {"maxDisagreement": "0.01"}}
    spec = parse_spec({"model": {"uri": "oci://a/b:1"}, "objective": objective, "pools": pools})
    known = PoolStatus("one", planned, planned, rate, planned=planned), PoolStatus("two", worker_rate=60.0)
    status = ServiceStatus(pools=known, pool_plan=plan)
    return pool_rows(Family(Service("ns", "s", "uid", 1, spec, status=status), {}, ()))


PLANNED = PoolPlanStatus(demand=90.0, answered=100.0, cost_per_hour=2.0, reason="the cheapest")


def test_a_pool_without_workers_says_that_nothing_is_asked() -> None:
    one, two = two_pools(replace(PLANNED, demand=0.0, cost_per_hour=1.0), planned=1, least=1)
    assert (one.why, two.why, two.alone) == ("its minWorkers", "nothing is asked", "")


@pytest.mark.parametrize(("demand", "why"), [(90.0, "chosen"), (30.0, "its minWorkers")])
def test_workers_that_what_is_asked_takes_are_chosen_though_min_workers_are_as_many(demand: float, why: str) -> None:
    assert two_pools(replace(PLANNED, demand=demand), planned=2, least=2)[0].why == why


@pytest.mark.parametrize(
    ("plan", "rate"), [(replace(PLANNED, demand=math.inf), 50.0), (PLANNED, 1e-320), (replace(PLANNED, saving=1.0), 50)]
)
def test_figures_beyond_what_can_be_planned_have_rows_as_well(plan: PoolPlanStatus, rate: float) -> None:
    one = two_pools(plan, planned=2, rate=rate)[0]
    assert one.why == "chosen" and one.alone == ("1 for 1 an hour" if plan.saving else "100000 for 100000 an hour")
