"""How many workers each pool of a service is to have: against trying everything, under noise, and on the way there."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace
from decimal import Decimal

import pytest
from fleet import MANIFEST, Fleet, changed
from fleet import pool as recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp_core.control.decide import BUSY_REQUEUE_SECONDS, QUIET_REQUEUE_SECONDS, decide
from offramp_core.control.objects import (
    Config,
    ConfigStatus,
    PoolPlanStatus,
    PoolStatus,
    Prediction,
    Saving,
    Service,
    ServiceStatus,
)
from offramp_core.control.snapshot import ClassShare, Load
from offramp_core.control.spec import TierObjective, WorkerPool, parse_spec
from offramp_core.control.workers.pool_demand import asked_days, demand_of
from offramp_core.control.workers.pool_plan import (
    LEAST_RATE,
    PoolsView,
    counted_saving,
    next_numbers,
    plan_event,
    plan_pools,
    with_plan,
)
from offramp_core.control.workers.pools import with_numbers
from offramp_core.fleet import DAY_SECONDS, EarlierDays, Window, next_days
from offramp_core.plan import Plan, RampThreshold

SPARE = 1.10  # what a new plan answers of the demand


def a_pool(name: str, cost: float, *, most: int = 5, least: int = 0) -> WorkerPool:
    return WorkerPool(name, 0, {}, cost_per_hour=cost, min_workers=least, max_workers=most)


def figures(name: str, rate: float, *, planned: int = 0, ready: int = 0, message: str = "") -> PoolStatus:
    return PoolStatus(
        name, ready, ready, worker_rate=rate, batch_size=1, batch_seconds=0.5 / rate, planned=planned, message=message
    )


def view_of(
    pools: dict[str, tuple[float, float]], demand: float, *, by_weight: bool = False, most: int = 5, **before: int
) -> PoolsView:
    """``pools`` are (cost, rate) by name."""
    return PoolsView(
        tuple(a_pool(name, cost, most=most) for name, (cost, _) in pools.items()),
        tuple(
            figures(name, rate, planned=before.get(name, 0), ready=before.get(name, 0))
            for name, (_, rate) in pools.items()
        ),
        demand,
        latency_seconds=10.0,
        late_share=0.05,
        by_weight=by_weight,
    )


def able(view: PoolsView, planned: dict[str, int] | tuple[int, ...]) -> float:
    """Requests a second that workers answer."""
    counts = list(planned.values()) if isinstance(planned, dict) else list(planned)
    rates = [pool.worker_rate for pool in view.known]
    used = [(n, rate) for n, rate in zip(counts, rates, strict=True) if n]
    if not used:
        return 0.0
    if view.by_weight:
        return sum(n * rate for n, rate in used)
    return sum(n for n, _ in used) * min(rate for _, rate in used)


POOLS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(st.floats(0.01, 2.0), st.floats(5.0, 200.0)),
    min_size=1,
)


@settings(deadline=None)
@given(POOLS, st.floats(0.0, 500.0), st.booleans())
def test_no_other_numbers_of_workers_answer_it_for_less(
    pools: dict[str, tuple[float, float]], demand: float, by_weight: bool
) -> None:
    view = view_of(pools, demand, by_weight=by_weight, most=4)
    plan = plan_pools(view)
    asked = max(demand, LEAST_RATE)
    costs = [cost for cost, _ in pools.values()]
    all_of_them = list(itertools.product(range(5), repeat=len(pools)))
    enough = [
        sum(n * c for n, c in zip(each, costs, strict=True))
        for each in all_of_them
        if able(view, each) >= SPARE * asked * (1 - 1e-9)
    ]
    if enough:
        assert able(view, dict(plan.planned)) >= SPARE * asked * (1 - 1e-6)
        assert math.isclose(plan.cost_per_hour, min(enough), rel_tol=1e-6)
    elif by_weight:
        most = max(able(view, each) for each in all_of_them)
        assert able(view, dict(plan.planned)) >= min(asked, most) * (1 - 1e-6), "they answer what can be answered"


@settings(deadline=None)
@given(POOLS, st.floats(1.0, 300.0), st.lists(st.floats(0.91, 1.09), min_size=10, max_size=10), st.booleans())
def test_noise_of_a_tenth_changes_nothing(
    pools: dict[str, tuple[float, float]], demand: float, noise: list[float], by_weight: bool
) -> None:
    planned = dict(plan_pools(view_of(pools, demand, by_weight=by_weight, most=200)).planned)
    for factor in noise:
        again = plan_pools(view_of(pools, demand * factor, by_weight=by_weight, most=200, **planned))
        assert dict(again.planned) == planned


@settings(deadline=None)
@given(
    POOLS,
    st.floats(0.0, 500.0),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=3, max_size=3),
)
def test_nothing_is_planned_that_cannot_be_started(
    pools: dict[str, tuple[float, float]], demand: float, by_weight: bool, present: list[tuple[int, int, bool]]
) -> None:
    view = view_of(pools, demand, by_weight=by_weight)
    known, asked = [], []
    for pool, old, (least, ready, lost) in zip(view.pools, view.known, present, strict=False):
        asked.append(replace(pool, min_workers=least))
        known.append(replace(old, ready=ready, planned=ready + 1, message="no node" if lost else ""))
    view = replace(view, pools=tuple(asked), known=tuple(known))
    planned = plan_pools(view).planned
    for pool, (least, ready, lost) in zip(view.pools, present, strict=False):
        if planned:
            assert min(least, ready if lost else 5) <= planned[pool.name] <= (ready if lost else 5)


def test_a_pool_without_a_place_is_left_and_asked_for_one_more_worker_that_tells_when_there_is_one() -> None:
    pools = {"cheap": (0.1, 50.0), "dear": (0.3, 50.0)}
    before = dict(plan_pools(view_of(pools, 90.0)).planned)
    assert before == {"cheap": 2, "dear": 0}
    view = view_of(pools, 90.0, **before)
    lost = replace(view, known=(replace(view.known[0], ready=0, message="no node"), view.known[1]))
    planned = plan_pools(lost).planned
    assert planned == {"cheap": 0, "dear": 2}
    assert next_numbers(lost, planned) == {"cheap": 1, "dear": 2}


def test_a_price_that_changes_moves_workers_and_a_price_that_hardly_does_does_not() -> None:
    def planned(dear: float, **before: int) -> dict[str, int]:
        return dict(plan_pools(view_of({"a": (0.2, 50.0), "b": (dear, 50.0)}, 90.0, **before)).planned)

    assert planned(0.3) == {"a": 2, "b": 0}
    assert planned(0.19, a=2) == {"a": 2, "b": 0}, "starting workers would cost more than it saves"
    assert planned(0.05, a=2) == {"a": 0, "b": 2}


def test_shared_by_numbers_a_slow_worker_is_no_help_beside_fast_ones() -> None:
    pools = {"fast": (1.0, 100.0), "slow": (0.05, 10.0)}
    assert plan_pools(view_of(pools, 130.0)).planned == {"fast": 2, "slow": 0}
    assert plan_pools(view_of(pools, 130.0, by_weight=True)).planned["slow"] > 0


def test_a_service_that_nobody_asks_keeps_one_worker() -> None:
    assert sum(plan_pools(view_of({"a": (0.2, 50.0), "b": (0.1, 10.0)}, 0.0)).planned.values()) == 1


def test_no_worker_is_taken_away_before_enough_was_seen() -> None:
    view = replace(view_of({"a": (0.2, 50.0)}, 10.0, a=4), may_lower=False)
    assert plan_pools(view).planned == {"a": 4}
    assert plan_pools(replace(view, may_lower=True)).planned == {"a": 1}


def test_nothing_is_planned_before_a_worker_was_measured_and_one_is_started_to_be() -> None:
    view = view_of({"a": (0.2, 50.0)}, 10.0)
    unknown = replace(view, known=(PoolStatus("a"),))
    assert plan_pools(unknown).planned == {} and next_numbers(unknown, {}) == {"a": 1}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=4).filter(
        lambda counts: any(b for b, _ in counts) and any(a for _, a in counts)
    ),
    st.randoms(use_true_random=False),
)
def test_on_the_way_new_workers_answer_before_old_ones_go(counts: list[tuple[int, int]], luck: object) -> None:
    names = [f"p{i}" for i in range(len(counts))]
    pools = tuple(a_pool(name, 1.0) for name in names)
    planned = {name: after for name, (_, after) in zip(names, counts, strict=True)}
    ready = {name: before for name, (before, _) in zip(names, counts, strict=True)}
    asked = dict(ready)
    for _ in range(50):
        known = tuple(replace(figures(n, 10.0, ready=ready[n], planned=planned[n]), desired=asked[n]) for n in names)
        view = PoolsView(pools, known, 1.0, latency_seconds=10.0, late_share=0.05, by_weight=True)
        asked = next_numbers(view, planned)
        assert all(0 <= asked[n] <= 5 for n in names)
        if any(ready[n] < planned[n] for n in names):
            assert all(asked[n] >= ready[n] for n in names), "nobody goes while somebody is waited for"
        for n in names:
            ready[n] = min(asked[n], ready[n] + (luck.random() < 0.5)) if ready[n] < asked[n] else asked[n]  # type: ignore[attr-defined]
        if ready == planned == asked:
            return
    raise AssertionError(f"{ready} after 50 steps on the way to {planned}")


def going_through(demand: float, *, answered: float) -> PoolsView:
    """The workers of ``a`` serve a model that those of ``b`` do not serve yet."""
    view = view_of({"a": (0.2, 50.0), "b": (0.1, 50.0)}, demand, a=2, b=1)
    return replace(view, known=(view.known[0], replace(view.known[1], worker_rate=0.0)), answered=answered)


def test_while_a_model_goes_through_the_pools_the_numbers_stay() -> None:
    for demand in (10.0, 200.0):
        view = going_through(demand, answered=220.0)
        plan = plan_pools(view)
        assert plan.planned == {} and next_numbers(view, plan.planned) == {"a": 2, "b": 1}


def test_what_is_asked_beyond_the_plan_is_added_although_a_pool_that_serves_was_not_measured() -> None:
    view = going_through(200.0, answered=150.0)
    plan = plan_pools(view)
    assert plan.planned == {"a": 4, "b": 1} and next_numbers(view, plan.planned) == plan.planned
    assert plan.answered == 250.0 and "those of b serve and are not measured" in plan.reason
    assert plan_pools(replace(view, answered=plan.answered)).planned == {}, "and then they stay"
    nothing_known = plan_pools(replace(view, answered=0.0))
    assert nothing_known.planned == {"a": 5, "b": 1}, "all that there are"


def test_a_lost_share_is_added_although_a_pool_that_serves_was_not_measured() -> None:
    view = view_of({"a": (0.2, 50.0), "b": (0.1, 50.0), "c": (0.3, 50.0)}, 140.0, a=2, b=1)
    lost = replace(view.known[0], ready=0, message="no node")
    view = replace(view, known=(lost, replace(view.known[1], worker_rate=0.0), view.known[2]), answered=150.0)
    assert plan_pools(view).planned == {"a": 0, "b": 1, "c": 2}


def test_a_pool_that_cannot_be_measured_keeps_no_worker_of_another_one() -> None:
    view = view_of({"a": (0.2, 50.0), "b": (5.0, 50.0)}, 40.0, a=4)
    view = replace(view, known=(view.known[0], PoolStatus("b", desired=1)))
    planned = plan_pools(view).planned
    assert planned == {"a": 1, "b": 0} and next_numbers(view, planned) == {"a": 1, "b": 1}


@given(nodes=st.integers(1, 8), seconds=st.integers(1, 6), may_lower=st.booleans())
def test_a_pool_that_grows_beyond_its_nodes_keeps_the_workers_that_start(
    nodes: int, seconds: int, may_lower: bool
) -> None:
    """Each pod takes some passes to start. One without a node is the first to be taken away, as Kubernetes has it."""
    pools, ages, waiting = (a_pool("spot", 1.0, most=8),), [seconds], 0
    known = figures("spot", 100.0, planned=1, ready=1)
    asked, made = [1], 1
    for _ in range(10 * seconds):
        ages = [age + 1 for age in ages]
        wanted = asked[-1] - len(ages) - waiting
        assert wanted >= -waiting, "only pods that wait for a node are taken away"
        made += max(0, wanted)
        placed = min(max(0, wanted + waiting), nodes - len(ages))
        waiting += wanted - placed
        ages += [0] * placed
        ready = sum(age >= seconds for age in ages)
        message = "no node" if waiting and ready < asked[-1] else ""
        known = replace(known, desired=asked[-1], ready=ready, message=message)
        view = PoolsView(pools, (known,), 700.0, 10.0, 0.05, by_weight=False, may_lower=may_lower)
        view = replace(view, placed={"spot": len(ages)})
        planned = plan_pools(view).planned
        known = replace(known, planned=planned["spot"])
        asked.append(next_numbers(view, planned)["spot"])
    assert len(ages) == nodes == ready and asked[-1] == min(nodes + 1, 8) and made <= 8


def test_workers_of_another_pool_go_when_those_that_start_answer_and_not_before() -> None:
    view = view_of({"cheap": (0.1, 50.0), "dear": (1.0, 50.0)}, 90.0, cheap=2, dear=2)
    for ready, dear in ((0, 2), (1, 2), (2, 0)):
        cheap = replace(view.known[0], desired=4, ready=ready, message="no node")
        now = replace(view, known=(cheap, view.known[1]), placed={"cheap": 2})
        assert next_numbers(now, {"cheap": 2, "dear": 0}) == {"cheap": 3, "dear": dear}


def test_where_no_pool_answers_in_time_the_numbers_stay_and_the_plan_says_why() -> None:
    view = replace(view_of({"a": (0.2, 50.0)}, 90.0, a=2), latency_seconds=0.015)
    plan = plan_pools(view)
    assert plan.planned == {} and "no pool answers in time" in plan.reason
    assert next_numbers(view, plan.planned) == {"a": 2}


def test_what_came_lately_is_told_by_a_clock_that_may_be_set_back() -> None:
    windows = [Window(ended_at=1000.0 + end, seconds=10.0, rate=rate) for end, rate in ((0.0, 5.0), (-10.0, 7.0))]
    assert demand_of(Load(windows=tuple(windows)), 1001.0, lead_seconds=30.0) == 7.0
    ahead = Window(ended_at=1000.0 + 3600.0, seconds=10.0, rate=500.0)
    assert demand_of(Load(windows=(*windows, ahead)), 1001.0, lead_seconds=30.0) == 7.0, (
        "it ended before the clock was set back"
    )


def test_workers_are_there_before_the_hour_that_was_busy_on_three_earlier_days() -> None:
    pools = [{"name": "a", "costPerHour": "1", "maxWorkers": 9}]
    objective = {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": pools})
    service = Service("default", "digits", "uid", 1, spec, ServiceStatus())
    windows = deque[Window](maxlen=360)
    nine = 20_000 * DAY_SECONDS + 9 * 3600.0
    for i in range(int((3 * DAY_SECONDS + 3600.0) / 30)):
        now = nine - 3 * DAY_SECONDS - 3600.0 + 30.0 * i
        windows.append(Window(ended_at=now, seconds=10.0, rate=60.0 if (now - nine) % DAY_SECONDS < 600.0 else 10.0))
        asked = asked_days(service, Load(windows=tuple(windows)), now)
        service = replace(service, status=replace(service.status, asked=asked))

    def planned_at(now: float) -> tuple[int, str]:
        known = (figures("a", 10.0, planned=2, ready=2),)
        load = Load(windows=tuple(Window(ended_at=now - 10.0 * i, seconds=10.0, rate=10.0) for i in range(30)))
        told = with_plan(service, known, load, placed={"a": 2}, shares={}, now=now, watched_since=0.0)
        return told[0][0].planned, told[1].reason

    assert planned_at(nine - 600.0)[0] == 2
    workers, why = planned_at(nine - 20.0)  # they take 30 s to start
    assert workers == 7 and why.endswith("requests/s are expected, as came at this time on 3 of 3 earlier days")


def with_pools(*pools: dict[str, object], asked: EarlierDays) -> Service:
    objective = {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": list(pools)})
    return Service("default", "digits", "uid", 1, spec, ServiceStatus(asked=asked))


def days_of_a_peak(noon: float) -> EarlierDays:
    """10/s, and 100/s for an hour from noon, on each of three days."""
    asked, windows = EarlierDays(), deque[Window](maxlen=120)
    for i in range(-120, int(3 * DAY_SECONDS / 30)):
        now = noon - 3 * DAY_SECONDS + 30.0 * i
        rate = 100.0 if 0 <= 30 * i % DAY_SECONDS < 3600 else 10.0
        windows.append(Window(ended_at=now, seconds=10.0, rate=rate))
        asked = next_days(asked, windows, now=now, spread=0)
    return asked


def test_no_worker_is_taken_away_while_what_is_expected_comes() -> None:
    noon = 20_000 * DAY_SECONDS + 12 * 3600.0
    service = with_pools({"name": "a", "costPerHour": "1", "maxWorkers": 40}, asked=days_of_a_peak(noon))
    known, windows, numbers = figures("a", 10.0, planned=2, ready=2), deque[Window](maxlen=360), list[int]()
    service, told = replace(service, status=replace(service.status, pools=(known,))), list[str]()
    for i in range(-15, 240):
        now, climbed = noon + 10.0 * i, min(85.0, 10.0 + 75.0 * max(i, 0) / 24)
        windows.append(Window(ended_at=now, seconds=10.0, rate=climbed * (1.1 if i % 7 else 0.9)))
        (pool,) = service.status.pools
        ready = (replace(pool, ready=pool.desired),)
        load, placed = Load(windows=tuple(windows)), {"a": pool.desired}
        pools, plan = with_plan(service, ready, load, placed=placed, shares={}, now=now, watched_since=0.0)
        event = plan_event(service, pools, plan, {})
        told += [event.message] if event else []
        numbers.append(pools[0].planned)
        service = replace(service, status=replace(service.status, pools=pools, pool_plan=plan))
    assert numbers[0] == 2 and numbers[-1] >= 10 and numbers == sorted(numbers)
    assert any("requests/s are expected, these answer" in message for message in told)


def planned_with(saving: float, *, workers: int, before: PoolPlanStatus | None = None) -> tuple[int, PoolPlanStatus]:
    """What a service plans for 100 requests a second, of workers that answer 10 each with exits off."""
    service = with_pools({"name": "a", "costPerHour": "1", "maxWorkers": 20}, asked=EarlierDays())
    service = replace(service, status=replace(service.status, pool_plan=before or PoolPlanStatus()))
    known = (figures("a", 10.0, planned=workers, ready=workers),)
    load = Load(windows=(Window(ended_at=1e6, seconds=10.0, rate=100.0),))
    pools, plan = with_plan(
        service, known, load, placed={"a": workers}, shares={}, now=1e6, watched_since=0.0, saving=saving
    )
    assert pools[0].worker_rate == 10.0, "what is told of a worker is what it does with exits off"
    return pools[0].planned, plan


def test_exits_that_are_counted_spare_workers_and_those_come_back_with_the_end_of_exits() -> None:
    workers, without = planned_with(0.0, workers=1)
    assert workers == 11 and without.saving == 0.0
    fewer, with_them = planned_with(0.5, workers=workers, before=without)
    assert fewer == 6 and with_them.saving == 0.5 and with_them.answered == 120.0
    again, told = planned_with(0.0, workers=fewer, before=with_them)
    assert again == 11 and told.saving == 0.0


def counting(*pools: dict[str, object]) -> Service:
    service = with_pools(*({"costPerHour": "1", "maxWorkers": 200, **pool} for pool in pools), asked=EarlierDays())
    return replace(service, spec=replace(service.spec, counts_exits=True))


def after_a_pass(service: Service, *known: PoolStatus, saving: float, now: float = 1e6) -> Service:
    """A pass while 100 requests come a second; whoever was asked for answers."""
    load = Load(windows=(Window(ended_at=now, seconds=10.0, rate=100.0),))
    placed = {pool.name: pool.ready for pool in known}
    pools, plan = with_plan(service, known, load, placed=placed, shares={}, now=now, watched_since=0.0, saving=saving)
    pools = tuple(replace(pool, ready=pool.desired) for pool in pools)
    return replace(service, status=replace(service.status, pools=pools, pool_plan=plan))


def test_exits_count_for_what_a_worker_carries_and_never_for_whether_it_answers_in_time() -> None:
    """Else no ready worker would answer in time once exits go off."""
    fast, slow = figures("fast", 20.0, planned=1, ready=1), figures("slow", 20.0, planned=1, ready=1)
    fast = replace(fast, batch_seconds=0.045)  # with exits off it could not carry what it does with them
    slow = replace(slow, batch_seconds=0.6)  # two batches take longer than the objective of a second
    service = counting({"name": "fast", "costPerHour": "9"}, {"name": "slow"})
    for _ in range(3):
        service = after_a_pass(service, *(service.status.pools or (fast, slow)), saving=0.5)
    assert [pool.planned for pool in service.status.pools] == [3, 0]
    service = after_a_pass(service, *service.status.pools, saving=0.0)
    assert [pool.planned for pool in service.status.pools] == [6, 0]
    alone = after_a_pass(counting({"name": "slow"}), slow, saving=0.5)
    assert alone.status.pools[0].planned == 1 and not alone.status.pool_plan.answered


def test_what_workers_of_a_model_of_before_answer_is_told_with_the_exits_of_now() -> None:
    """The new model has no certificate yet, and not all its workers are measured."""
    service = after_a_pass(
        counting({"name": "a"}, {"name": "b"}), figures("a", 10.0, ready=1), PoolStatus("b"), saving=0.5
    )
    a, _ = service.status.pools
    assert a.planned == 6
    b = PoolStatus("b", 1, 1, planned=1)
    service = after_a_pass(service, a, b, saving=0.0)
    assert service.status.pools[0].planned >= 10
    assert after_a_pass(service, *service.status.pools, saving=0.0).status == service.status


def test_exits_that_go_off_now_and_then_start_workers_once_and_stop_none() -> None:
    service, numbers, since = counting({"name": "a"}), list[int](), list[float | None]()
    known = (figures("a", 10.0, planned=6, ready=6),)
    for i in range(150):
        off = i % 6 == 1 and i < 70
        service = after_a_pass(service, *known, saving=0.0 if off else 0.5, now=1e6 + 10 * i)
        known = service.status.pools
        numbers.append(known[0].desired)
        since.append(service.status.pool_plan.exits_off_at)
    last = 1e6 + 10 * 67
    assert numbers[:2] == [6, 11] and set(numbers[1:97]) == {11} and numbers[-1] == 6
    assert last - 300 <= max(at for at in since if at is not None) <= last and since[-1] is None
    assert len(set(since)) <= 4, "the status is seldom written for it"


def test_an_event_says_by_which_figures_workers_are_planned() -> None:
    service = with_pools({"name": "a", "costPerHour": "1", "maxWorkers": 20}, asked=EarlierDays())
    _, plan = planned_with(0.5, workers=1)
    event = plan_event(service, (figures("a", 10.0, planned=6),), plan, {})
    assert event is not None and "these answer 120 with exits that save 50%" in event.message


@pytest.mark.parametrize(
    ("counted", "promised", "measured", "expected"),
    [
        pytest.param(True, Prediction(saving=0.6, audits=0.02), None, 0.56, id="what the certificate promises, net"),
        pytest.param(True, Prediction(saving=0.6), Saving(0.5, 0.3, 0.7), 0.58, id="measured, and it may be so"),
        pytest.param(True, Prediction(saving=0.6), Saving(0.3, 0.2, 0.4), 0.39, id="measured, and it surely is less"),
        pytest.param(True, Prediction(saving=0.6), Saving(-0.3, -0.4, -0.2), 0.0, id="exits that cost time"),
        pytest.param(True, None, None, 0.0, id="no certificate"),
        pytest.param(False, Prediction(saving=0.6), None, 0.0, id="the user reserves for exits off"),
    ],
)
def test_exits_are_counted_for_what_their_certificate_promises_and_no_more(
    counted: bool, promised: Prediction | None, measured: Saving | None, expected: float
) -> None:
    spec = with_pools({"name": "a", "costPerHour": "1", "maxWorkers": 20}, asked=EarlierDays()).spec
    digests = (f"sha256:{'a' * 64}", f"sha256:{'b' * 64}")
    plan = Plan(*digests, ramps=(RampThreshold("r0", Decimal("0.5")),))
    stable = Config("digits-1", plan, ConfigStatus(prediction=promised))
    assert counted_saving(replace(spec, counts_exits=counted), stable, measured) == pytest.approx(expected)
    off = replace(stable, plan=Plan(*digests))
    assert counted_saving(replace(spec, counts_exits=counted), off, measured) == 0.0


@pytest.mark.parametrize(
    ("holdback", "tiers", "expected"),
    [
        pytest.param(0.5, {}, 0.3, id="half of the batches run with exits off"),
        pytest.param(0.0, {"strict": 0.1}, 0.1, id="all may name the tier that saves least"),
        pytest.param(0.0, {}, 0.6, id="nothing is held back"),
        pytest.param(0.2, {"strict": 0.1}, 0.08, id="both"),
    ],
)
def test_exits_are_counted_for_no_batch_that_has_none(
    holdback: float, tiers: dict[str, float], expected: float
) -> None:
    pools = with_pools({"name": "a", "costPerHour": "1", "maxWorkers": 20}, asked=EarlierDays())
    strict = tuple(TierObjective(name, 0.01) for name in tiers)
    spec = replace(pools.spec, counts_exits=True, holdback=holdback, tiers=strict)
    digests = (f"sha256:{'a' * 64}", f"sha256:{'b' * 64}")
    plan = Plan(*digests, ramps=(RampThreshold("r0", Decimal("0.5")),))

    def counted(promised: Prediction) -> float:
        return counted_saving(spec, Config("digits-1", plan, ConfigStatus(prediction=promised)), None)

    assert counted(Prediction(saving=0.6, tiers={**tiers, "of before": 0.0})) == pytest.approx(expected)
    assert not tiers or counted(Prediction(saving=0.6)) == 0.0, "a tier without a plan leaves nowhere"


def test_the_reason_of_a_plan_fits_into_the_status() -> None:
    pools = [{"name": f"{'p' * 19}{i}", "costPerHour": "1", "maxWorkers": 9} for i in range(8)]
    service = with_pools(*pools, asked=EarlierDays())
    known = tuple(figures(str(pool["name"]), 10.0) for pool in pools)
    shares = {
        pool.name: ClassShare(class_name="c" * 63, max_workers=9, wanted=9, most=0, now=0, waited_for=False)
        for pool in known
    }
    load = Load(windows=(Window(ended_at=1e6, seconds=10.0, rate=1e3),))
    _, plan = with_plan(service, known, load, placed={}, shares=shares, now=1e6, watched_since=0.0)
    assert len(plan.reason) == 1024 and plan.reason.endswith("…")


def test_a_week_outlasts_a_pool_whose_workers_a_person_counts_for_a_while() -> None:
    asked = EarlierDays(1e6, "ZGRk")
    assert asked_days(with_pools({"name": "a", "replicas": 2}, asked=asked), Load(), 1e6) == asked


def test_nothing_is_remembered_where_the_operator_plans_no_workers() -> None:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "replicas": 2})
    service = Service("default", "digits", "uid", 1, spec, ServiceStatus(asked=EarlierDays(1e6, "ZGRk")))
    assert asked_days(service, Load(), 1e6) == EarlierDays()


def test_a_plan_is_told_against_the_workers_that_there_were() -> None:
    pools = [{"name": name, "costPerHour": "1", "maxWorkers": 5} for name in ("a", "b")]
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": pools})
    now = [PoolStatus("a", planned=3), PoolStatus("b", planned=2)]
    plan = PoolPlanStatus(demand=1.0, answered=2.0, cost_per_hour=5.0, reason="the cheapest")

    def told(before: PoolPlanStatus, *known: PoolStatus) -> str:
        status = ServiceStatus(pools=known, pool_plan=before)
        event = plan_event(Service("default", "digits", "uid", 1, spec, status), now, plan, {})
        assert event is not None
        return event.message

    replicas = PoolStatus("a", desired=3), PoolStatus("b", desired=1)
    assert "planned: a 3, b 2 (was 1);" in told(PoolPlanStatus(), *replicas), "no plan was before"
    earlier = replace(plan, reason="these stay")
    assert "planned: a 3 (was 4), b 2 (was 0);" in told(earlier, PoolStatus("a", desired=3, planned=4)), "b is new"


def test_workers_that_more_traffic_needs_are_started_a_second_after_it_is_seen() -> None:
    """They are brought to what the pass before decided, and a service at rest has one every ten seconds."""
    fleet = Fleet(recorded(4000, seed=1), {**MANIFEST, "replicas": 1, "ramps": {"mode": "Disabled"}})
    spec = {name: value for name, value in fleet.manifest.items() if name != "replicas"}
    planned = parse_spec({**spec, "pools": [{"name": "a", "costPerHour": "1", "maxWorkers": 5}]})
    fleet.service = with_numbers(replace(fleet.service, spec=planned))

    def passed(rate: float) -> tuple[list[int], float]:
        fleet.now += 1.0
        seen = fleet.snapshot()
        workers = tuple(
            replace(w, endpoint=replace(w.endpoint, pool="a"), state=replace(w.state, pace=1.0))
            for w in seen.workers
            if w.state is not None
        )
        load = Load(rate, 0.1, rate, windows=(Window(ended_at=fleet.now, seconds=10.0, rate=rate),))
        decision = decide(changed(seen, workers=workers, load=load), fleet.now)
        fleet.act(decision)
        return [pool.desired for pool in decision.status.pools], decision.requeue_after_seconds

    assert [passed(20.0) for _ in range(3)][-1] == ([1], QUIET_REQUEUE_SECONDS)
    assert passed(2000.0) == ([5], BUSY_REQUEUE_SECONDS)
    assert passed(2000.0) == ([5], QUIET_REQUEUE_SECONDS)
