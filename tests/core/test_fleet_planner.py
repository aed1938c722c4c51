"""The fleet planner: never more than there is, never dearer than need be, and no change that does not pay."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seeds import seeds  # type: ignore[import-not-found]

from offramp_core.errors import InvalidArgumentError
from offramp_core.fleet import (
    Caution,
    Column,
    FleetPlan,
    Key,
    Pool,
    Service,
    Window,
    Workers,
    exact,
    headroom_rate,
    plan_fleet,
    predicted_rate,
)

EXACTLY = Caution(spare=0.0, slack=0.0)
GIB = 1 << 30


def pool(name: str = "cpu", cost: float = 1.0, most: int = 100) -> Pool:
    return Pool(name=name, cost_per_hour=cost, max_workers=most, worker_memory_bytes=GIB)


def column(plan: str = "exits", where: str = "cpu", rate: float = 100.0, batch: int = 1, **other: float) -> Column:
    given = {"certified_disagreement": 0.01, "memory_bytes": 1 << 20, "startup_seconds": 20.0, **other}
    return Column(
        key=Key(plan=plan, pool=where, batch_size=batch),
        batch_seconds=batch / rate,
        worker_rate=rate,
        **given,  # type: ignore[arg-type]
    )


def service(*columns: Column, rate: float = 250.0, name: str = "images", **other: float) -> Service:
    given = {"arrival_variation": 1.0, "latency_seconds": 0.2, "max_disagreement": 0.02, **other}
    return Service(
        name=name,
        rate=rate,
        predicted_rate=given.pop("predicted_rate", rate),
        columns=columns or (column(),),
        **given,
    )


def random_fleet(seed: int, *, services: int, room: tuple[int, int, int]) -> tuple[list[Service], list[Pool]]:
    """Three pools, and for each service five variants on each in two batch sizes."""
    rng = np.random.default_rng(seed)
    pools = [pool(name, cost, most) for name, cost, most in zip("abc", (1.0, 2.5, 6.0), room, strict=True)]
    return [random_service(rng, f"s{i}") for i in range(services)], pools


def random_service(rng: np.random.Generator, name: str) -> Service:
    base, speeds = rng.uniform(20, 100), np.array([1, 2.7, 7.0]) * rng.uniform(0.7, 1.3, 3)
    columns = [
        column(f"v{v}", where, base * faster * speed * batch / (0.5 + 0.5 * batch), batch)
        for v, faster in enumerate(np.sort(rng.uniform(0.8, 2.5, 5)))
        for where, speed in zip("abc", speeds, strict=True)
        for batch in (1, 4)
    ]
    variation = rng.uniform(1, 4)
    return service(*columns, rate=rng.lognormal(5, 1.2), name=name, arrival_variation=variation)


def workers(plan: FleetPlan) -> dict[str, tuple[Workers, ...]]:
    return {one.service: one.workers for one in plan.services}


# --- the cheapest ----------------------------------------------------------------------------------


@st.composite
def small_services(draw: st.DrawFn, name: str) -> Service:
    rates = draw(st.lists(st.floats(20, 200), min_size=1, max_size=3))
    columns = [column(f"v{i}", draw(st.sampled_from("ab")), rate) for i, rate in enumerate(rates)]
    variation = draw(st.floats(0, 8))
    return service(*columns, rate=draw(st.floats(1, 600)), name=name, arrival_variation=variation)


@st.composite
def small_pools(draw: st.DrawFn) -> list[Pool]:
    return [pool(name, draw(st.floats(0.5, 4)), draw(st.integers(0, 4))) for name in "ab"]


def every_choice(one: Service, pools: list[Pool]) -> list[tuple[float, tuple[int, ...], float]]:
    """(cost, workers by pool, answered rate) of all counts, as the definitions of a column and of head-room say."""
    found = []
    most = {p.name: p.max_workers for p in pools}
    for counts in itertools.product(*(range(most[c.key.pool] + 1) for c in one.columns)):
        used = tuple(sum(n for n, c in zip(counts, one.columns, strict=True) if c.key.pool == p.name) for p in pools)
        if all(n <= p.max_workers for n, p in zip(used, pools, strict=True)):
            able = [n * c.worker_rate - headroom_rate(one, c) for n, c in zip(counts, one.columns, strict=True) if n]
            cost = sum(n * p.cost_per_hour for n, p in zip(used, pools, strict=True))
            found.append((cost, used, sum(max(0.0, rate) for rate in able)))
    return found


A_WORKER_DEARER_THAN_WHAT_IT_ANSWERS_COUNTS = service(
    *(column(f"v{i}", where, rate) for i, (where, rate) in enumerate([("a", 20.0), ("a", 20.0), ("b", 27.0)])),
    rate=13.0,
    arrival_variation=0.84375,
)


@settings(max_examples=40)
@given(small_services("one"), small_pools())
@example(A_WORKER_DEARER_THAN_WHAT_IT_ANSWERS_COUNTS, [pool("a", most=1), pool("b", most=1)])
def test_one_service_gets_what_trying_all_finds_and_is_told_the_least_that_stays_unanswered(
    one: Service, pools: list[Pool]
) -> None:
    tried = every_choice(one, pools)
    plan = plan_fleet([one], pools, caution=EXACTLY)
    enough = [cost for cost, _, rate in tried if rate >= one.demand * (1 + 1e-5)]
    if enough:
        assert plan.unmet_rate == 0
        assert plan.cost_per_hour <= min(enough) * (1 + 1e-6)
        assert min(cost for cost, _, rate in tried if rate >= one.demand * (1 - 1e-5)) <= plan.cost_per_hour * (
            1 + 1e-6
        )
    elif all(rate < one.demand * (1 - 1e-5) for _, _, rate in tried):
        assert plan.unmet_rate == pytest.approx(one.demand - max(rate for *_, rate in tried), rel=1e-3, abs=1e-3)


def cheapest_of_two(one: Service, two: Service, pools: list[Pool], *, share: float) -> float:
    """Of all counts of both that answer such a share of each demand: a solver may be off by a little of it."""
    best = math.inf
    choices = [[c for c in every_choice(s, pools) if c[2] >= s.demand * share] for s in (one, two)]
    for (cost, used, _), (cost_two, used_two, _) in itertools.product(*choices):
        if all(a + b <= p.max_workers for a, b, p in zip(used, used_two, pools, strict=True)):
            best = min(best, cost + cost_two)
    return best


BARELY_MORE_THAN_A_WORKER_ANSWERS = service(
    column("v0", "a", 81.0), rate=81.0, name="two", arrival_variation=6.103515625e-05
)


@settings(max_examples=40)
@given(small_services("one"), small_services("two"), small_pools())
@example(
    service(column("v0", "a", 20.0), rate=1.0, name="one", arrival_variation=0.0),
    BARELY_MORE_THAN_A_WORKER_ANSWERS,
    [pool("a", most=3), pool("b", most=0)],
)
def test_the_bound_of_two_services_is_below_what_trying_all_finds_and_their_plan_is_not(
    one: Service, two: Service, pools: list[Pool]
) -> None:
    plan = plan_fleet([one, two], pools, caution=EXACTLY)
    if plan.bound_per_hour is not None:
        assert plan.bound_per_hour <= cheapest_of_two(one, two, pools, share=1 + 1e-5) * (1 + 1e-6)
        assert cheapest_of_two(one, two, pools, share=1 - 1e-5) <= plan.cost_per_hour * (1 + 1e-6)
    assert all(plan.workers_by_pool[p.name] <= p.max_workers for p in pools)


@pytest.mark.parametrize("seed", seeds(6, quick=2))
def test_scarce_pools_are_shared_within_three_percent_of_the_bound(seed: int) -> None:
    services, pools = random_fleet(seed, services=40, room=(1000, 1000, 1000))
    free = plan_fleet(services, pools)
    tight = [replace(p, max_workers=int(0.8 * free.workers_by_pool[p.name])) for p in pools[:1]] + pools[1:]
    plan = plan_fleet(services, tight)
    assert plan.unmet_rate == 0
    assert plan.bound_per_hour is not None
    assert plan.bound_per_hour * (1 - 1e-9) <= plan.cost_per_hour <= 1.03 * plan.bound_per_hour
    assert free.cost_per_hour < plan.cost_per_hour
    assert plan.worth_per_hour["a"] > 0 == plan.worth_per_hour["c"]


@given(small_services("one"), st.floats(1, 3))
def test_more_demand_and_a_shorter_objective_never_cost_less(one: Service, times: float) -> None:
    pools = [pool("a", 1.0), pool("b", 1.7)]
    cost = plan_fleet([one], pools).cost_per_hour
    more = replace(one, rate=one.rate * times, predicted_rate=one.rate * times)
    assert plan_fleet([more], pools).cost_per_hour >= cost * (1 - 1e-9)
    sooner = replace(one, latency_seconds=one.latency_seconds / times)
    plan = plan_fleet([sooner], pools)
    assert plan.unmet_rate > 0 or plan.cost_per_hour >= cost * (1 - 1e-9)


@given(small_services("one"), small_pools())
def test_more_room_never_costs_more_nor_answers_less(one: Service, pools: list[Pool]) -> None:
    before = plan_fleet([one], pools, caution=EXACTLY)
    after = plan_fleet([one], [replace(p, max_workers=p.max_workers + 3) for p in pools], caution=EXACTLY)
    assert after.unmet_rate <= before.unmet_rate + 1e-3
    if before.unmet_rate == 0:
        assert after.cost_per_hour <= before.cost_per_hour * (1 + 1e-9)


# --- only what can be started ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_is_too_small_is_used_up_and_says_what_is_missing(seed: int) -> None:
    services, pools = random_fleet(seed, services=30, room=(8, 4, 2))
    plan = plan_fleet(services, pools)
    assert plan.workers_by_pool == {"a": 8, "b": 4, "c": 2}
    assert plan.bound_per_hour is None
    assert 0 < plan.unmet_rate < sum(one.demand for one in services)
    for one in plan.services:
        assert one.answered_rate + one.unmet_rate >= one.demand * (1 - 1e-5)
        assert not one.unmet_rate or "stay unanswered" in one.reason


def test_two_services_that_compete_for_the_last_workers_both_get_some() -> None:
    both = [service(name=name, rate=400.0) for name in ("one", "two")]
    plan = plan_fleet(both, [pool(most=6)])
    assert [one.workers[0].count for one in plan.services] == [3, 3]


@pytest.mark.parametrize("asked", [1e6, 1e7, 1e9])
def test_one_service_that_asks_for_more_than_all_pools_takes_nothing_from_small_ones_beside_it(asked: float) -> None:
    fleet, pools = random_fleet(3, services=20, room=(400, 200, 100))
    greedy = replace(fleet[0], rate=asked, predicted_rate=asked)
    plan = plan_fleet([greedy, *fleet[1:]], pools)
    assert [one.service for one in plan.services if one.unmet_rate > 0] == [greedy.name]
    assert plan.services[0].answered_rate > 1000, "what is left of the pools is still used"
    assert plan.services[0].unmet_rate == pytest.approx(asked - plan.services[0].answered_rate)


def test_one_service_that_nobody_can_serve_leaves_the_others_what_they_have_to_spare() -> None:
    fleet, pools = random_fleet(3, services=20, room=(400, 200, 100))
    calm = plan_fleet(fleet, pools)
    greedy = replace(fleet[0], rate=1e6, predicted_rate=1e6)
    plan = plan_fleet([greedy, *fleet[1:]], pools)
    for before, after, one in zip(calm.services[1:], plan.services[1:], fleet[1:], strict=True):
        assert after.answered_rate >= 1.1 * one.demand * (1 - 1e-5)
        assert after.reason == before.reason


def test_where_all_ask_too_much_nobody_has_to_spare_before_everybody_has_what_is_asked() -> None:
    both = [service(name=name, rate=rate) for name, rate in (("small", 80.0), ("large", 900.0))]
    head = headroom_rate(both[0], both[0].columns[0])
    fewest = [math.ceil((one.rate + head) / 100) for one in both]
    plan = plan_fleet(both, [pool(most=sum(fewest))])
    assert [one.workers[0].count for one in plan.services] == fewest
    assert plan.unmet_rate == 0
    short = plan_fleet(both, [pool(most=sum(fewest) - 1)])
    assert short.unmet_rate > 0


@pytest.mark.parametrize("turned", [False, True])
def test_workers_left_over_go_to_what_is_asked_before_anybody_has_to_spare(turned: bool) -> None:
    quick, slow = column("quick", "x", 110.0), column("slow", "y", 1.0)
    both = [
        replace(service(quick, slow, rate=1000.0, name=n, arrival_variation=0.0), latency_seconds=10.0) for n in "ab"
    ]
    plan = plan_fleet(both[::-1] if turned else both, [pool("x", 0.01, 18), pool("y", 10.0, 15)])
    assert plan.unmet_rate == pytest.approx(5.0)


@pytest.mark.parametrize("turned", [False, True])
def test_workers_left_over_go_where_most_more_is_answered_whoever_stands_first(turned: bool) -> None:
    little, much = (
        service(column("quick", "x", 110.0), column("slow", "y", rate), rate=asked, name=name, arrival_variation=0.0)
        for name, rate, asked in (("a", 1.0, 995.0), ("b", 10.0, 1040.0))
    )
    both = [replace(one, latency_seconds=10.0) for one in (little, much)]
    pools = [pool("x", 0.01, 18), pool("y", 10.0, 5)]
    plan = plan_fleet(both[::-1] if turned else both, pools, caution=EXACTLY)
    assert plan.unmet_rate == pytest.approx(5.0, abs=0.5)


def test_a_program_that_is_stopped_still_gives_workers_that_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PAIRS", 0)
    monkeypatch.setattr(exact, "_program", lambda *_args, **_kwargs: None)
    columns = [column("a", "a", 60.0), column("b", "b", 90.0), column("c", "c", 30.0), column("d", "a", 55.0)]
    pools = [pool("a", 1.0, 2), pool("b", 2.0, 2), pool("c", 0.7, 3)]
    one = service(*columns, rate=250.0)
    plan = plan_fleet([one], pools, caution=EXACTLY)
    assert plan.unmet_rate == 0
    assert all(plan.workers_by_pool[p.name] <= p.max_workers for p in pools)
    more = plan_fleet([replace(one, rate=1000.0)], pools, caution=EXACTLY)
    assert more.workers_by_pool == {"a": 2, "b": 2, "c": 3}


def test_one_service_that_asks_too_much_takes_nothing_from_those_on_other_pools() -> None:
    greedy, modest = service(rate=1e6, name="greedy"), service(column(where="gpu"), name="modest")
    plan = plan_fleet([greedy, modest], [pool(most=5), pool("gpu", 4.0)])
    assert plan.services[0].workers[0].count == 5
    assert plan.services[0].unmet_rate > 9e5
    assert plan.services[1].unmet_rate == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (column("bold", certified_disagreement=0.03, rate=900.0), "above the budget"),
        (column("large", memory_bytes=2 * GIB, rate=900.0), "bytes"),
        (column("slow", batch=100, rate=900.0), "of the objective"),
        (column("away", where="gone", rate=900.0), "has no workers"),
        (column("weak", rate=80.0), "answers as much or more"),
    ],
)
def test_what_may_not_serve_is_a_row_with_its_reason(bad: Column, reason: str) -> None:
    plan = plan_fleet([service(column(), bad)], [pool(), pool("gone", 0.01, 0)])
    good, refused = plan.services[0].considered
    assert good.workers > 0
    assert refused.workers == 0
    assert (refused.workers_alone is None) == (bad.key.plan != "weak")
    assert reason in refused.reason


def test_the_more_accurate_of_two_equally_fast_plans_serves() -> None:
    careful, bold = column("careful", certified_disagreement=0.002), column("bold")
    for columns in ((careful, bold), (bold, careful)):
        assert plan_fleet([service(*columns)], [pool()]).services[0].workers[0].key.plan == "careful"


def test_a_service_without_columns_or_without_demand_has_no_workers_and_says_why() -> None:
    silent = service(rate=0.0, name="silent")
    lost = service(column(certified_disagreement=0.5), name="lost")
    plan = plan_fleet([silent, lost], [pool()])
    assert [one.workers for one in plan.services] == [(), ()]
    assert [one.unmet_rate for one in plan.services] == [0, 250]
    assert "nothing is asked" in plan.services[0].reason
    assert "no column may serve" in plan.services[1].reason
    assert plan_fleet([], []).cost_per_hour == 0


# --- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(5, quick=1))
def test_ten_percent_noise_changes_nothing_over_ten_windows(seed: int) -> None:
    check_that_noise_changes_nothing(seed, *random_fleet(seed, services=20, room=(400, 100, 40)))


@pytest.mark.parametrize("seed", [7, 13])  # of 13 a small saving would take the workers of a service that pays more
def test_nor_does_it_where_a_pool_is_shared_to_its_last_worker(seed: int) -> None:
    services, pools = random_fleet(seed, services=20, room=(400, 100, 40))
    used = plan_fleet(services, pools).workers_by_pool["a"]
    check_that_noise_changes_nothing(seed, services, [replace(pools[0], max_workers=int(0.8 * used)), *pools[1:]])


def contested(seed: int) -> tuple[list[Service], list[Pool], dict[str, tuple[Workers, ...]]]:
    """Three services that serve, and a pool with fewer workers than they would like: to save, s0 would push another
    one to dearer workers."""
    services, pools = random_fleet(seed, services=3, room=(400, 100, 40))
    used = plan_fleet(services, pools).workers_by_pool["a"]
    pools[0] = replace(pools[0], max_workers=int(0.7 * used))
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, 3)
    noisy = [replace(s, rate=s.rate * f, predicted_rate=s.rate * f) for s, f in zip(services, noise, strict=True)]
    return noisy, pools, workers(plan_fleet(services, pools))


LOSES, PAYS = 2, 130  # seeds: all together would pay 0.05 more for what s0 saves, or save 0.28


def renamed(name: str) -> str:
    return f"{name}, of others"


def of_others(seed: int) -> tuple[list[Service], list[Pool], dict[str, tuple[Workers, ...]]]:
    """The same with other names of services and pools."""
    services, pools, current = contested(seed)

    def moved(key: Key) -> Key:
        return replace(key, pool=renamed(key.pool))

    columns = [tuple(replace(c, key=moved(c.key)) for c in one.columns) for one in services]
    return (
        [replace(s, name=renamed(s.name), columns=c) for s, c in zip(services, columns, strict=True)],
        [replace(p, name=renamed(p.name)) for p in pools],
        {renamed(name): tuple(replace(w, key=moved(w.key)) for w in ws) for name, ws in current.items()},
    )


def test_a_saving_that_pays_for_those_who_make_room_pays_for_nobody_on_other_pools() -> None:
    services, pools, current = contested(LOSES)
    others, theirs, now = of_others(PAYS)
    alone, apart = plan_fleet(services, pools, current=current), plan_fleet(others, theirs, current=now)
    assert not any(one.changed for one in alone.services) and any(one.changed for one in apart.services)
    both = plan_fleet([*services, *others], [*pools, *theirs], current=current | now)
    assert workers(both) == workers(alone) | workers(apart)


@pytest.mark.parametrize("dear", [1.2, 4.0])
@pytest.mark.parametrize("shared", [False, True])  # "True" leaves a worker of the full pool that s0 would like more of
def test_a_change_for_which_nobody_makes_room_is_made_and_pays_for_no_other(dear: float, shared: bool) -> None:
    services, pools, current = contested(LOSES)
    old = "a" if shared else "dear"
    if shared:
        pools[0] = replace(pools[0], max_workers=pools[0].max_workers + 1)
    pools += [pool("cheap", 1.0 / dear), pool("dear", 1.0)]
    mine = service(column(where=old), column(where="cheap"), rate=40.0, name="mine")
    now = {"mine": (Workers(key=column(where=old).key, count=1),)}
    plan = plan_fleet([*services, mine], pools, current=current | now)
    assert workers(plan) == current | {"mine": (Workers(key=column(where="cheap").key, count=1),)}


def check_that_noise_changes_nothing(seed: int, services: Sequence[Service], pools: Sequence[Pool]) -> None:
    rng = np.random.default_rng(seed)
    noisy = {s.name: s.rate * (1 + rng.uniform(-0.1, 0.1, 30)) for s in services}
    current: dict[str, tuple[Workers, ...]] = {}
    changes = []
    for now in range(20, 30):
        seen = []
        for one in services:
            windows = [Window(ended_at=60.0 * i, seconds=60.0, rate=noisy[one.name][i]) for i in range(now)]
            rate = predicted_rate(windows, now=60.0 * now, lead_seconds=60.0)
            seen.append(replace(one, rate=rate, predicted_rate=rate))
        plan = plan_fleet(seen, pools, current=current)
        changes.append(sum(one.changed for one in plan.services))
        current = workers(plan)
    assert changes == [20] + [0] * 9


def test_workers_that_no_longer_suffice_are_joined_by_others_at_once() -> None:
    first = plan_fleet([service()], [pool()])
    second = plan_fleet([service(rate=1000.0)], [pool()], current=workers(first))
    assert second.services[0].changed
    assert second.unmet_rate == 0


def test_workers_go_when_demand_falls_far_and_stay_when_it_falls_a_little() -> None:
    first = plan_fleet([service(rate=2000.0)], [pool()])
    little = plan_fleet([service(rate=1850.0)], [pool()], current=workers(first))
    far = plan_fleet([service(rate=900.0)], [pool()], current=workers(first))
    assert workers(little) == workers(first)
    assert far.cost_per_hour < 0.6 * first.cost_per_hour


def test_a_change_must_earn_its_start_up_within_the_horizon() -> None:
    quick, slow = column(startup_seconds=5.0), column(startup_seconds=900.0)
    for col, moves in ((quick, True), (slow, False)):
        now = {"images": [Workers(key=col.key, count=9)]}
        plan = plan_fleet([service(col)], [pool()], current=now)
        assert plan.services[0].changed is moves
    assert "a change would cost" in plan.services[0].reason


def test_another_plan_on_the_same_workers_starts_nothing_and_has_to_earn_nothing() -> None:
    slow, fast = column("slow", startup_seconds=900.0), column("fast", rate=140.0, startup_seconds=900.0)
    now = {"images": [Workers(key=slow.key, count=3)]}
    tight = service(slow, fast, rate=220.0)
    plan = plan_fleet([tight], [pool()], current={"images": [Workers(key=slow.key, count=4)]}).services[0]
    assert plan.workers[0].key.plan == "slow", "fewer workers would have to be started again"
    burst = plan_fleet([replace(tight, rate=300.0)], [pool()], current=now).services[0]
    assert [(w.key.plan, w.count) for w in burst.workers] == [("fast", 3)]


@pytest.mark.parametrize("lost", ["a pool that is gone", "a plan that lost its certificate", "a column nobody knows"])
def test_workers_that_may_no_longer_serve_are_replaced(lost: str) -> None:
    cheap, dear = column("cheap", where="spot"), column("dear")
    first = plan_fleet([service(cheap, dear)], [pool(), pool("spot", 0.2)])
    assert {w.key.plan for w in first.services[0].workers} == {"cheap"}
    spot = pool("spot", 0.2, 0 if lost == "a pool that is gone" else 100)
    if lost == "a plan that lost its certificate":
        cheap = replace(cheap, certified_disagreement=1.0)
    columns = (dear,) if lost == "a column nobody knows" else (cheap, dear)
    second = plan_fleet([service(*columns)], [pool(), spot], current=workers(first))
    assert {w.key.plan for w in second.services[0].workers} == {"dear"}
    assert second.unmet_rate == 0


@pytest.mark.parametrize("seed", seeds(4, quick=2))
def test_a_pool_that_shrinks_under_serving_workers_is_never_overdrawn(seed: int) -> None:
    services, pools = random_fleet(seed, services=20, room=(200, 60, 20))
    first = plan_fleet(services, pools)
    less = [replace(p, max_workers=first.workers_by_pool[p.name] * 2 // 3) for p in pools[:1]] + pools[1:]
    second = plan_fleet(services, less, current=workers(first))
    assert all(second.workers_by_pool[p.name] <= p.max_workers for p in less)
    assert 0 < sum(one.changed for one in second.services) < len(services)


def test_the_order_of_services_and_pools_does_not_matter_for_the_cost() -> None:
    services, pools = random_fleet(7, services=15, room=(400, 100, 40))
    there, back = plan_fleet(services, pools), plan_fleet(services[::-1], pools[::-1])
    assert there.cost_per_hour == pytest.approx(back.cost_per_hour, rel=0.01)


# --- head-room -------------------------------------------------------------------------------------


def late_share(arrivals: np.ndarray, *, count: int, batch: int, seconds: float, latency: float) -> float:
    """Of workers that start a batch of what waits as soon as they are free; each batch takes as long as a full one."""
    free, i, late = [0.0] * count, 0, 0
    while i < len(arrivals):
        begin = max(heapq.heappop(free), arrivals[i])
        end = min(i + batch, int(np.searchsorted(arrivals, begin, "right")))
        late += int((begin + seconds - arrivals[i:end] > latency).sum())
        heapq.heappush(free, begin + seconds)
        i = max(end, i + 1)
    return late / len(arrivals)


@pytest.mark.parametrize("variation", [1.0, 5.0])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rate", [30.0, pytest.param(300.0, marks=pytest.mark.slow), 1500.0])
def test_the_head_room_keeps_the_share_of_late_requests(variation: float, batch: int, rate: float) -> None:
    """Arrivals are renewals: the squared variation of their gaps is the dispersion of their counts."""
    one = service(column(batch=batch), rate=rate, arrival_variation=variation)
    plan = plan_fleet([one], [pool()], caution=EXACTLY).services[0]
    rng = np.random.default_rng(3)
    often = 0.5 * (1 + math.sqrt((variation - 1) / (variation + 1)))
    scale = np.where(rng.random(40_000) < often, 1 / (2 * often), 1 / (2 * (1 - often) if often < 1 else 1))
    arrivals = np.cumsum(rng.exponential(scale / rate))
    count = plan.workers[0].count
    late = late_share(arrivals, count=count, batch=batch, seconds=batch / 100, latency=one.latency_seconds)
    assert late <= one.late_share
    fewest = math.ceil(rate / 100)
    assert count <= max(1.5 * fewest, fewest + 3)


# --- demand ----------------------------------------------------------------------------------------


def windows(rates: list[float], *, until: float = 0.0) -> list[Window]:
    return [Window(ended_at=until - 60.0 * i, seconds=60.0, rate=rate) for i, rate in enumerate(reversed(rates))]


def test_a_burst_is_believed_at_once_and_chance_is_not() -> None:
    assert predicted_rate(windows([100.0] * 9 + [400.0]), now=0, lead_seconds=60) == 400
    assert predicted_rate(windows([100.0] * 7 + [120.0] * 3), now=0, lead_seconds=60) == 120
    assert predicted_rate(windows([100.0] * 9 + [110.0]), now=0, lead_seconds=60) == 101
    assert predicted_rate(windows([0.1] * 9 + [0.2]), now=0, lead_seconds=60) == pytest.approx(0.11)
    assert predicted_rate([], now=0, lead_seconds=60) == 0


def test_what_came_at_this_time_of_earlier_days_is_expected_again_but_one_special_day_is_not() -> None:
    day = 86400.0
    calm = windows([10.0] * 10)
    usual = [Window(ended_at=-d * day + 120, seconds=60.0, rate=50.0) for d in (1, 2, 3)]
    assert predicted_rate(calm + usual, now=0, lead_seconds=180) == 50
    assert predicted_rate(calm + usual, now=0, lead_seconds=30) == 10
    special = [replace(usual[0], rate=900.0), replace(usual[1], rate=10.0), replace(usual[2], rate=12.0)]
    assert predicted_rate(calm + special, now=0, lead_seconds=180) == 12


def by_the_clock(hours: int, *, rises: int, high: float = 400.0) -> list[Window]:
    """Windows of 15 s at 100 a second, and two minutes from the second minute on of the newest ``rises`` full hours."""
    ends = [-3600.0 * hours + 15.0 * i for i in range(1, 240 * hours + 1)]
    return [Window(ended_at=e, seconds=15.0, rate=high if _rises(e, rises) else 100.0) for e in ends]


def _rises(end: float, rises: int) -> bool:
    return -3600.0 * rises < end <= 0 and 120 < end % 3600 <= 240


def test_a_rise_that_often_comes_at_this_minute_is_expected_just_before_it_and_not_afterwards() -> None:
    often, seldom = by_the_clock(8, rises=3), by_the_clock(8, rises=2)
    just_before, long_before, afterwards = 90.0, 3000.0, 600.0

    def at(past: list[Window], seconds: float) -> float:
        shifted = [replace(w, ended_at=w.ended_at - seconds) for w in past]
        quiet = [Window(ended_at=15.0 * i - seconds, seconds=15.0, rate=100.0) for i in range(1, int(seconds / 15) + 1)]
        return predicted_rate(shifted + quiet, now=0, lead_seconds=45)

    assert at(often, just_before) == pytest.approx(400)
    assert at(seldom, just_before) == pytest.approx(100)
    assert at(often, long_before) == at(often, afterwards) == pytest.approx(100)


def test_demand_that_rose_three_times_within_the_hour_is_expected_to_rise_again() -> None:
    calm = [100.0] * 12
    restless = windows([*calm, 300.0, 310.0, *calm, 320.0, 320.0, *calm, 330.0, *calm])
    assert predicted_rate(restless, now=0, lead_seconds=30) == 300
    calmer = windows([*calm, *calm, 320.0, 320.0, *calm, 330.0, *calm])
    assert predicted_rate(calmer, now=0, lead_seconds=30) == 100


def test_a_jump_is_followed_no_further_than_demand_ever_came() -> None:
    known = windows([900.0] + [100.0] * 70 + [400.0])
    assert predicted_rate(known, now=0, lead_seconds=60) == 700
    assert predicted_rate(known, now=0, lead_seconds=600) == 900
    assert predicted_rate(windows([100.0] * 70 + [400.0]), now=0, lead_seconds=60) == 400


def test_a_silent_service_is_kept_warm_for_an_hour() -> None:
    assert 0 < predicted_rate(windows([100.0] * 40 + [0.0] * 15), now=0, lead_seconds=60) < 1
    assert predicted_rate(windows([100.0] * 40 + [0.0] * 61), now=0, lead_seconds=60) == 0


def test_of_workers_that_cost_as_much_those_that_answer_most_serve() -> None:
    one = service(column("small", batch=1), column("large", rate=130.0, batch=2), rate=60.0)
    assert plan_fleet([one], [pool()]).services[0].workers[0].key.plan == "large"


def test_the_future_and_the_order_of_windows_change_nothing() -> None:
    past = windows([100.0, 90.0, 110.0, 100.0])
    later = Window(ended_at=60.0, seconds=60.0, rate=1e6)
    level = predicted_rate(past, now=0, lead_seconds=60)
    assert predicted_rate([later, *reversed(past)], now=0, lead_seconds=60) == level


# --- bad input -------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (pool(), "name", ""),
        (pool(), "cost_per_hour", 0),
        (pool(), "cost_per_hour", NAN),
        (pool(), "cost_per_hour", "1"),
        (pool(), "max_workers", -1),
        (pool(), "max_workers", 10**9),
        (service(), "rate", 1e300),
        (pool(), "max_workers", 1.5),
        (pool(), "max_workers", True),
        (pool(), "worker_memory_bytes", 0),
        (column(), "batch_seconds", 0.0),
        (column(), "worker_rate", math.inf),
        (column(), "worker_rate", 100.1),
        (column(), "certified_disagreement", 1.1),
        (column(), "certified_disagreement", None),
        (column(), "memory_bytes", -1),
        (column(), "startup_seconds", -1.0),
        (column(), "batch_variation", NAN),
        (column().key, "plan", ""),
        (column().key, "pool", 3),
        (column().key, "batch_size", 0),
        (service(), "rate", -1.0),
        (service(), "predicted_rate", NAN),
        (service(), "arrival_variation", -1.0),
        (service(), "latency_seconds", 0.0),
        (service(), "late_share", 0.0),
        (service(), "late_share", 1.0),
        (service(), "max_disagreement", -0.1),
        (service(), "columns", (column(), column())),
        (Workers(key=column().key, count=1), "count", 0),
        (Caution(), "spare", -0.1),
        (Caution(), "slack", 0.05),
        (Caution(), "horizon_seconds", 0.0),
        (windows([1.0])[0], "rate", NAN),
        (windows([1.0])[0], "seconds", 0.0),
        (windows([1.0])[0], "ended_at", math.inf),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(part: object, field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{type(part).__name__}\.{field}\b"):
        replace(part, **{field: value})  # type: ignore[type-var]


def test_names_that_stand_twice_or_lead_nowhere_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="services names images twice"):
        plan_fleet([service(), service()], [pool()])
    with pytest.raises(InvalidArgumentError, match="pools names cpu twice"):
        plan_fleet([service()], [pool(), pool()])
    with pytest.raises(InvalidArgumentError, match=r"services\['images'\].columns names the pool 'cpu'"):
        plan_fleet([service()], [pool("gpu")])
    with pytest.raises(InvalidArgumentError, match="current names the service 'other'"):
        plan_fleet([service()], [pool()], current={"other": []})
    with pytest.raises(InvalidArgumentError, match="lead_seconds"):
        predicted_rate([], now=0, lead_seconds=NAN)
