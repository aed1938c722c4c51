"""The simulated fleet: what is asked, answered, missed and paid adds up, and policies do what their rules say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet import Column, Key, Pool, Present, Workers
from offramp_lab.fleet import (
    Decision,
    HorizontalPodAutoscaler,
    Infaas,
    Measured,
    Planned,
    Proteus,
    Seen,
    Task,
    cpu,
    in_flight,
    simulate,
)
from offramp_lab.fleet.compiled import ANSWERED, BUSY, FIGURES, MISSED, SOJOURN, serve_until

HOUR = 3600


def pool(name: str = "core", cost: float = 3600.0, most: int = 50) -> Pool:
    """By default a worker costs 1 a second."""
    return Pool(name=name, cost_per_hour=cost, max_workers=most, worker_memory_bytes=1 << 30)


def plan(name: str = "exact", where: str = "core", seconds: float = 0.01, **other: Any) -> Measured:
    given = {"disagreement": 0.0, "startup": 20.0, "size": 1, "true": None, **other}
    column = Column(
        key=Key(plan=name, pool=where, batch_size=given["size"]),
        batch_seconds=seconds * given["size"],
        worker_rate=1 / seconds,
        certified_disagreement=given["disagreement"],
        memory_bytes=0,
        startup_seconds=given["startup"],
    )
    true = given["disagreement"] if given["true"] is None else given["true"]
    return Measured(column=column, first_seconds=seconds, true_disagreement=true)


def task(counts: Sequence[int], *menu: Measured, name: str = "one", **other: Any) -> Task:
    given = {"latency_seconds": 0.2, "max_disagreement": 0.01, "past": [counts[0]] * 150, **other}
    arrays = {"counts": np.array(counts, dtype=np.int64), "past": np.array(given.pop("past"), dtype=np.int64)}
    return Task(name=name, menu=menu or (plan(),), **arrays, **given)


@dataclass
class Fixed:
    """A script: (second, workers)."""

    script: Sequence[tuple[int, tuple[Workers, ...]]]
    name: str = "fixed"
    interval_seconds: int = 1

    def decide(self, seen: Sequence[Seen], pools: Sequence[Pool], *, now: float) -> Decision:
        self.seen = seen
        return {one.task: workers for at, workers in self.script for one in seen if at == now}


def some(count: int, *, of: Measured | None = None) -> tuple[Workers, ...]:
    return (Workers(key=(of or plan()).column.key, count=count),)


# --- the queue ---------------------------------------------------------------------------------------


def served(arrivals: Sequence[float], workers: int, *, size: int = 1, latency: float = 9.0) -> tuple[int, Any, Any]:
    free, sums = np.zeros(workers), np.zeros((10, FIGURES))
    done = serve_until(np.array(arrivals, dtype=float), free, 0, 1.0, 0.5, size, latency, sums)
    return done, free, sums.sum(axis=0)


def test_a_free_worker_takes_what_waits_in_one_batch_the_oldest_first() -> None:
    done, free, sums = served([0.0, 0.2, 0.4], 1, size=4)
    assert done == 3
    assert free.tolist() == [2.5]  # one alone, then two together
    assert sums[ANSWERED] == 3 and sums[BUSY] == 2.5
    assert sums[SOJOURN] == pytest.approx(1.0 + 2.3 + 2.1)


def test_two_workers_answer_side_by_side() -> None:
    _, free, sums = served([0.0, 0.0, 0.5], 2)
    assert sorted(free.tolist()) == [1.0, 2.0]
    assert sums[MISSED] == 0


def test_what_cannot_be_in_time_is_given_up_and_costs_no_time() -> None:
    done, free, sums = served([0.0, 0.0, 0.0], 1, latency=2.0)
    assert done == 3
    assert (sums[ANSWERED], sums[MISSED]) == (2, 1)
    assert free.tolist() == [2.0]


def test_what_comes_when_all_are_busy_until_the_end_waits_for_the_next_stretch() -> None:
    done, _, sums = served([float(i) / 100 for i in range(20)], 1, latency=99.0)
    assert done == 10 and sums[ANSWERED] == 10


# --- the world ---------------------------------------------------------------------------------------


def test_requests_are_answered_or_missed_and_workers_are_paid_by_the_second() -> None:
    out = simulate([task([50] * 60)], [pool()], Fixed([(0, some(2))]))
    (one,) = out.tasks
    assert one.requests.sum() == 3000
    assert one.answered.sum() == pytest.approx(3000, abs=3)
    assert out.missed == 0
    assert out.cost == pytest.approx(2 * 60)


def test_without_workers_all_is_missed_and_nothing_paid() -> None:
    out = simulate([task([50] * 60)], [pool()], Fixed([]))
    assert out.missed > 0.97 and out.cost == 0


def test_a_worker_answers_after_its_start_up_and_is_paid_from_its_start() -> None:
    quick = plan(startup=5.0)
    out = simulate([task([50] * 60, quick)], [pool()], Fixed([(10, some(1))]))
    (one,) = out.tasks
    assert one.answered[:15].sum() == 0 and one.answered[15:17].sum() > 0
    assert one.cost[:10].sum() == 0 and one.cost[10:].sum() == 50


def test_another_plan_takes_over_in_a_moment_and_starts_nothing() -> None:
    slow, fast = plan("slow", seconds=0.02, startup=900.0), plan("fast", seconds=0.005, disagreement=0.004)
    out = simulate([task([100] * 60, slow, fast)], [pool()], Fixed([(0, some(1, of=slow)), (30, some(1, of=fast))]))
    (one,) = out.tasks
    assert one.missed[10:30].mean() > 30 and one.missed[32:].sum() == 0
    assert out.cost == pytest.approx(60)
    assert one.disagreed[:29].sum() == 0
    assert one.disagreed[31:].sum() == pytest.approx(0.004 * one.answered[31:].sum())


def test_old_workers_answer_until_those_of_another_pool_do() -> None:
    here, there = plan(), plan(where="other")
    script = [(0, some(1, of=here)), (10, some(1, of=there))]
    out = simulate([task([50] * 60, here, there)], [pool(), pool("other", 7200.0)], Fixed(script))
    assert out.missed == 0
    assert out.tasks[0].cost[[5, 20, 45]].tolist() == [1, 3, 2]


def test_a_policy_sees_what_was_and_nothing_of_what_comes() -> None:
    script = Fixed([(0, some(2))])
    simulate([task([40] * 31 + [1000] * 9, past=[10] * 150)], [pool()], replace(script, interval_seconds=30))
    watching = Fixed([(0, some(2))], interval_seconds=30)
    simulate([task([40] * 31 + [1000] * 9, past=[10] * 150)], [pool()], watching)
    (seen,) = watching.seen
    assert seen.rate == 40 == seen.last_rate
    assert seen.busy_share == pytest.approx(0.2, abs=0.01)
    assert seen.in_flight == pytest.approx(40 * 0.01, rel=0.2)
    assert {w.rate for w in seen.windows} == {10, 40}
    assert seen.present == Present(ready=some(2))


def test_bursts_count_once_they_made_requests_late() -> None:
    """Seconds of none and of 400: enough workers for all of them see a calm service, too few a bursty one."""
    seen = []
    bursty = list(np.random.default_rng(1).choice([0, 400], 150))
    for counts, workers in (([200] * 150, 9), (bursty, 9), (bursty, 3)):
        policy = Fixed([(0, some(workers))], interval_seconds=149)
        simulate([task(counts)], [pool()], policy)
        seen.append(policy.seen[0].arrival_variation)
    steady, enough, too_few = seen
    assert steady < 1.5
    assert max(steady, enough) < 3
    assert too_few > 50


# --- policies ----------------------------------------------------------------------------------------


def step_up(low: int, high: int) -> list[int]:
    return [low] * 300 + [high] * 300 + [low] * 900


@pytest.mark.parametrize("metric", [cpu(), in_flight()])
def test_the_pod_autoscaler_grows_at_once_and_shrinks_after_five_minutes(metric: Any) -> None:
    key = plan().column.key
    hpa = HorizontalPodAutoscaler(name="hpa", columns={"one": key}, metric=metric)
    (one,) = simulate([task(step_up(100, 500))], [pool()], hpa).tasks
    assert one.workers[290] < one.workers[400]
    assert one.workers[600 + 200] >= 6, "the highest of five minutes counts"
    assert one.workers[-1] <= 2


@pytest.mark.slow
def test_the_planner_follows_demand_and_takes_the_cheapest_certified_plan() -> None:
    menu = (plan(), plan("exits", seconds=0.005, disagreement=0.005), plan("bold", seconds=0.002, disagreement=0.02))
    both = [task(step_up(200, 800), *menu, name=name) for name in ("one", "two")]
    out = simulate(both, [pool()], Planned())
    alone = simulate(both, [pool()], Planned(chosen=lambda column: column.key.plan == "exact"))
    assert out.cost < 0.7 * alone.cost
    assert out.missed < 0.05
    assert out.keeps_budgets(both) and out.disagreement == pytest.approx(0.005)


@pytest.mark.slow
def test_infaas_adds_in_a_second_and_takes_away_after_ten_quiet_ones() -> None:
    (one,) = simulate([task(step_up(100, 500))], [pool()], Infaas()).tasks
    assert one.workers[302] >= 6 > one.workers[299]
    assert one.workers[-1] < one.workers[500]


def test_infaas_goes_by_the_profile_and_breaks_the_budget_where_the_profile_was_lucky() -> None:
    lucky = plan("lucky", seconds=0.002, disagreement=0.009, true=0.02)
    careful = replace(lucky, column=replace(lucky.column, certified_disagreement=1.0))
    tasks = [task([400] * 120, plan(), lucky)]
    assert not simulate(tasks, [pool()], Infaas()).keeps_budgets(tasks)
    tasks = [task([400] * 120, plan(), careful)]
    assert simulate(tasks, [pool()], Planned()).keeps_budgets(tasks)


def test_proteus_answers_exactly_while_it_can_and_less_so_when_it_has_to() -> None:
    menu = (plan(), plan("exits", seconds=0.004, disagreement=0.008))
    out = simulate([task(step_up(150, 500), *menu)], [pool()], Proteus(devices={"one": {"core": 3}}))
    (one,) = out.tasks
    assert set(one.workers.tolist()) == {3}
    assert one.disagreed[100:290].sum() == 0 < one.disagreed[400:590].sum()
    assert one.missed[400:590].mean() < 10


def test_counts_that_are_no_counts_and_empty_menus_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Task\.counts"):
        replace(task([1, 2]), counts=np.array([0.5]))
    with pytest.raises(InvalidArgumentError, match=r"Task\.menu"):
        replace(task([1, 2]), menu=())
