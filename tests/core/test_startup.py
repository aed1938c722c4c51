"""How long a new worker takes until it answers: what is planned with, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.objects import PoolPlanStatus, PoolStatus, Service, ServiceStatus, StartUpTimes
from offramp_core.control.snapshot import Load, StartUp
from offramp_core.control.spec import parse_spec
from offramp_core.control.workers.pool_demand import demand_of
from offramp_core.control.workers.pool_plan import plan_event, startup_seconds, with_plan
from offramp_core.control.workers.startup import next_startup
from offramp_core.fleet import Window

NOTHING = StartUpTimes()


def took(seconds: float, *, at: float = 0.0) -> StartUp:
    return StartUp(at, StartUpTimes(1.0, 0.0, 1.0, seconds - 2.0))


def after(*seconds: float, before: StartUpTimes = NOTHING) -> float:
    return next_startup(before, [took(s, at=float(i)) for i, s in enumerate(seconds)]).seconds


def test_the_slower_ones_of_the_last_eight_count_and_no_single_one() -> None:
    assert after(10, 11, 12, 13, 14, 15, 16, 300) == 15
    assert after(10, 300) == 10 and after(10, 12, 300) == 12
    assert after(100, 100, *[20] * 8) == 20, "older ones are forgotten"


def test_what_waited_for_a_node_for_an_hour_did_not_start() -> None:
    assert after(3600.0) == 0.0 and next_startup(NOTHING, [None]) == NOTHING


@given(st.floats(10.0, 600.0), st.lists(st.floats(0.91, 1.09), min_size=10, max_size=10))
def test_noise_of_a_tenth_changes_nothing(seconds: float, noise: list[float]) -> None:
    known = next_startup(NOTHING, [took(seconds)])
    for factor in noise:
        assert next_startup(known, [took(seconds * factor)]) is known


def test_what_was_measured_stands_without_workers_and_a_real_change_is_taken() -> None:
    known = next_startup(NOTHING, [took(20.0)])
    assert next_startup(known, []) is known and after(40.0, before=known) == 40.0
    assert (startup_seconds(PoolStatus("a", startup=known)), startup_seconds(PoolStatus("a"))) == (20.0, 30.0)


def test_workers_that_start_slowly_are_asked_for_earlier() -> None:
    """Demand has begun to rise; it has come up to 200 before."""
    rates = [200.0, *[10.0] * 30, 20.0]
    windows = tuple(Window(ended_at=10.0 * i, seconds=10.0, rate=rate) for i, rate in enumerate(rates))
    now, load = windows[-1].ended_at, Load(windows=windows)
    assert [demand_of(load, now, lead_seconds=lead) for lead in (20.0, 120.0)] == [40.0, 140.0]


def test_an_event_tells_how_long_a_burst_hurts() -> None:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    pools = [{"name": "a", "costPerHour": "1", "maxWorkers": 9}]
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": pools})
    known = PoolStatus("a", desired=2, ready=2, planned=2, worker_rate=10.0, batch_size=1, batch_seconds=0.01)
    known = replace(known, startup=StartUpTimes(1.0, 4.0, 1.0, 8.0))
    plan = PoolPlanStatus(demand=18.0, answered=20.0, cost_per_hour=2.0, reason="the cheapest")
    service = Service("default", "digits", "uid", 1, spec, ServiceStatus(pools=(known,), pool_plan=plan))
    load = Load(windows=(Window(ended_at=1000.0, seconds=10.0, rate=72.0),))
    after_it, planned = with_plan(service, (known,), load, placed={"a": 2}, shares={}, now=1000.0, watched_since=0.0)
    event = plan_event(service, after_it, planned, {})
    assert event is not None
    assert event.message.endswith("new workers answer after about 14 s, and until then those of before 20")
