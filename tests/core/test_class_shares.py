"""Services that compete for the workers of one WorkerClass: against trying everything, in any order, under noise, and
on the way there."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offramp_core.control.objects import PoolPlanStatus, PoolStatus, Service, ServiceStatus
from offramp_core.control.snapshot import ClassShare, Load
from offramp_core.control.spec import parse_spec
from offramp_core.control.workers.class_shares import ClassUse, next_shares, uses_of
from offramp_core.control.workers.pool_plan import plan_event, steady_demand, with_plan
from offramp_core.control.workers.pools import with_numbers
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.fleet import Claim, Window, divide

NOW = 1e6


def claim(name: str, *, rate: float = 10.0, demand: float = 50.0, most: int = 9, **more: Any) -> Claim:
    given = {"present": 0, "least": 0, "spare": 0.1 * demand, **more}
    return Claim(name=name, worker_rate=rate, demand=demand, most=most, **given)


CLAIMS = st.lists(
    st.tuples(st.floats(1, 50), st.floats(1, 200), st.integers(0, 5), st.integers(0, 5), st.floats(0, 100)),
    min_size=1,
    max_size=4,
)


def claims_of(drawn: list[tuple[float, float, int, int, float]]) -> list[Claim]:
    return [
        claim(f"s{i}", rate=rate, demand=demand, most=most, least=min(least, most), elsewhere=elsewhere)
        for i, (rate, demand, most, least, elsewhere) in enumerate(drawn)
    ]


@settings(deadline=None)
@given(CLAIMS, st.integers(0, 12))
def test_no_other_division_is_worth_more(drawn: list[tuple[float, float, int, int, float]], room: int) -> None:
    claims = [replace(c, least=0) for c in claims_of(drawn)]
    found = divide(claims, room)
    assert sum(found.values()) <= room and all(found[c.name] <= c.most for c in claims)
    every = itertools.product(*(range(c.most + 1) for c in claims))
    best = max(sum(c.worth(n) for c, n in zip(claims, n_each, strict=True)) for n_each in every if sum(n_each) <= room)
    assert math.isclose(sum(c.worth(found[c.name]) for c in claims), best, rel_tol=1e-9, abs_tol=1e-9)


@settings(deadline=None)
@given(CLAIMS, st.integers(0, 25), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.randoms())
def test_what_is_had_of_a_least_stays_and_the_order_of_services_does_not_matter(
    drawn: list[tuple[float, float, int, int, float]], room: int, present: list[int], luck: Random
) -> None:
    claims = [replace(c, present=n) for c, n in zip(claims_of(drawn), present, strict=False)]
    found = divide(claims, room)
    kept = {c.name: min(c.least, c.present) for c in claims}
    if sum(kept.values()) <= room:
        assert all(found[name] >= n for name, n in kept.items())
    if sum(c.least for c in claims) <= room:
        assert all(found[c.name] >= c.least for c in claims)
    assert sum(found.values()) == min(room, sum(c.most for c in claims)), "no worker stays unused that somebody uses"
    shuffled = [*claims]
    luck.shuffle(shuffled)
    assert divide(shuffled, room) == found


def test_a_large_demand_takes_nothing_from_a_small_one_beside_it() -> None:
    small, large = claim("small", demand=9.0, most=1), claim("large", demand=5000.0, most=550)
    assert divide([large, small], 10) == {"large": 9, "small": 1}


def test_who_can_be_answered_elsewhere_comes_after_who_cannot_and_then_it_goes_to_where_it_saves() -> None:
    alone, other = claim("alone", most=5), claim("other", most=5, elsewhere=100.0, saving=0.1)
    dear = claim("dear", most=5, elsewhere=100.0, saving=0.3)
    assert divide([alone, other, dear], 8) == {"alone": 5, "dear": 3, "other": 0}


def test_two_claims_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="claims names a twice"):
        divide([claim("a"), claim("a")], 3)


# --- several services, pass by pass ------------------------------------------------------------------


def a_service(name: str, *pools: dict[str, Any]) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    spec = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, "pools": list(pools)})
    return Service("default", name, f"uid-{name}", 1, spec)


def of_class(name: str = "large", pool: str = "fast", cost: str = "1", **more: Any) -> dict[str, Any]:
    return {"name": pool, "className": name, "costPerHour": cost, "maxWorkers": 20, **more}


@dataclass
class Cluster:
    """Services that are looked at one after another; whoever is asked for answers at the next look."""

    limits: dict[str, int]
    services: dict[str, Service]
    demand: dict[str, float]
    rates: dict[str, float] = field(default_factory=lambda: {"fast": 10.0, "own": 10.0, "slow": 5.0})
    savings: dict[str, float] = field(default_factory=dict)  # of exits, where services have them counted

    def uses(self) -> list[tuple[str, ClassUse]]:
        found = []
        for service in self.services.values():
            holds = {pool.name: pool.desired for pool in service.status.pools}
            uses = uses_of(service, holds=holds, limited=self.limits)
            found += [(name, use) for name, use in uses.items()]
        return found

    def shares(self, service: Service) -> dict[str, ClassShare]:
        by_class = {
            limit: next_shares(limit, most, [use for name, use in self.uses() if name == limit])
            for limit, most in self.limits.items()
        }
        key = f"{service.namespace}/{service.name}"
        return {p.name: by_class[p.class_name][key] for p in service.spec.pools if p.class_name in by_class}

    def look(self, name: str, factor: float = 1.0) -> list[str]:
        """One pass; what people are told."""
        shares = self.shares(self.services[name])
        service = with_numbers(self.services[name], shares)
        before = {pool.name: pool for pool in service.status.pools}
        known = tuple(
            replace(
                before.get(pool.name, PoolStatus(pool.name)),
                desired=pool.replicas,
                ready=pool.replicas,
                worker_rate=self.rates[pool.name] if pool.replicas or pool.name in before else 0.0,
                batch_size=1,
                batch_seconds=0.005,
            )
            for pool in service.spec.pools
        )
        load = Load(
            windows=tuple(
                Window(ended_at=NOW - 10 * i, seconds=10.0, rate=self.demand[name] * factor) for i in range(12)
            )
        )
        placed = {pool.name: pool.ready for pool in known}
        saving = self.savings.get(name, 0.0)
        pools, plan = with_plan(
            service, known, load, placed=placed, shares=shares, now=NOW, watched_since=0.0, saving=saving
        )
        event = plan_event(service, pools, plan, shares)
        status = replace(service.status, pools=pools, pool_plan=plan)
        self.services[name] = replace(service, status=status)
        self.check()
        return [] if event is None else [f"{event.reason}: {event.message}"]

    def check(self) -> None:
        for limit, most in self.limits.items():
            held = sum(use.holds for name, use in self.uses() if name == limit)
            assert held <= most, f"{held} workers of {limit}, which has {most}"

    def settle(self, luck: Random, rounds: int = 60) -> dict[str, dict[str, int]]:
        for _ in range(rounds):
            before = dict(self.services)
            for name in luck.sample(sorted(self.services), len(self.services)):
                self.look(name)
            if all(self.services[name].status == before[name].status for name in before):
                return self.numbers()
        raise AssertionError(f"no rest after {rounds} rounds: {self.numbers()}")

    def numbers(self) -> dict[str, dict[str, int]]:
        return {n: {p.name: p.desired for p in s.status.pools} for n, s in sorted(self.services.items())}


def a_cluster(limit: int, **demand: float) -> Cluster:
    return Cluster({"large": limit}, {name: a_service(name, of_class()) for name in demand}, demand)


DEMANDS = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 120), min_size=2)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(DEMANDS, st.integers(1, 15), st.integers(0, 9), st.integers(0, 9))
def test_services_come_to_the_same_numbers_in_any_order_and_never_have_more_than_there_are(
    demand: dict[str, float], limit: int, one: int, other: int
) -> None:
    settled = a_cluster(limit, **demand).settle(Random(one))
    again = a_cluster(limit, **demand).settle(Random(other))
    needs = {name: max(1, math.ceil(float(f"{rate:.3g}") / 10.0 - 1e-6)) for name, rate in demand.items()}
    if limit >= len(
        demand
    ):  # else who came first keeps its last worker; and whether one to spare pays is its own plan's
        assert all(min(again[name]["fast"], n) == min(settled[name]["fast"], n) for name, n in needs.items())
    assert min(limit, sum(needs.values())) <= sum(n["fast"] for n in settled.values()) <= limit
    asked = [name for name, rate in demand.items() if rate > 0.01]
    assert sum(settled[name]["fast"] > 0 for name in asked) == min(limit, len(asked)), "before those nobody asks"


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(DEMANDS, st.integers(1, 15), st.randoms(), st.integers(0, 9))
def test_noise_of_a_tenth_moves_nobodys_share_over_ten_windows(
    demand: dict[str, float], limit: int, luck: Random, seed: int
) -> None:
    cluster = a_cluster(limit, **demand)
    settled = cluster.settle(Random(seed))
    for _ in range(10):
        for name in demand:
            cluster.look(name, 1.0 + luck.uniform(-0.09, 0.09))
    assert cluster.numbers() == settled


def test_a_service_whose_demand_grows_takes_workers_that_others_can_do_without_and_gives_them_back() -> None:
    cluster = a_cluster(6, a=40.0, b=20.0)
    assert cluster.settle(Random(0)) == {"a": {"fast": 4}, "b": {"fast": 2}}, (
        "each answers what is asked, without spare"
    )
    cluster.demand["b"] = 200.0
    grown = cluster.settle(Random(1))
    assert grown == {"a": {"fast": 3}, "b": {"fast": 3}}
    status = cluster.services["b"].status
    assert status.pools[0].wanted == 20 and status.pool_plan.answered < status.pool_plan.demand == 200.0
    assert "WorkerClass large has 6 for all services; raise its spec.maxWorkers" in status.pool_plan.reason
    cluster.demand["b"] = 5.0
    assert cluster.settle(Random(2)) == {"a": {"fast": 5}, "b": {"fast": 1}}
    assert cluster.services["b"].status.pools[0].wanted == 0


def test_a_service_that_counts_on_exits_leaves_to_others_what_they_spare_and_takes_it_back_without_them() -> None:
    cluster = a_cluster(6, a=40.0, b=40.0)
    assert cluster.settle(Random(0)) == {"a": {"fast": 3}, "b": {"fast": 3}}
    cluster.savings["a"] = 0.5
    assert cluster.settle(Random(1)) == {"a": {"fast": 2}, "b": {"fast": 4}}
    cluster.savings["a"] = 0.0
    assert cluster.settle(Random(2)) == {"a": {"fast": 3}, "b": {"fast": 3}}


def test_what_is_only_expected_comes_after_what_others_ask() -> None:
    def claim_of(name: str, plan: PoolPlanStatus, holds: int) -> Claim:
        pool = PoolStatus("fast", desired=holds, worker_rate=10.0, batch_size=1, batch_seconds=0.005)
        service = replace(a_service(name, of_class()), status=ServiceStatus(pools=(pool,), pool_plan=plan))
        found = uses_of(service, holds={"fast": holds}, limited=["large"])["large"].claim
        assert found is not None
        return found

    busy = claim_of("b", PoolPlanStatus(demand=80.0), 9)
    for demand in (80.0, 3000.0):
        ghost = claim_of("a", PoolPlanStatus(demand=demand, asked=1.0, expected=demand), 1)
        assert divide([ghost, busy], 10) == {"default/a": 1, "default/b": 9}
        assert divide([ghost, busy], 12) == {"default/a": 3, "default/b": 9}, "what others leave"
        asked = claim_of("a", PoolPlanStatus(demand=demand), 1)
        assert divide([asked, busy], 10)["default/a"] > 1


def test_nobody_is_pressed_below_its_fewest() -> None:
    cluster = a_cluster(4, a=1.0, b=500.0)
    cluster.services["a"] = a_service("a", of_class(minWorkers=2))
    assert cluster.settle(Random(0)) == {"a": {"fast": 2}, "b": {"fast": 2}}


def test_a_service_that_answers_keeps_its_last_worker_when_another_one_comes() -> None:
    cluster = a_cluster(1, a=50.0)
    cluster.settle(Random(0))
    cluster.services["b"], cluster.demand["b"] = a_service("b", of_class()), 5.0
    assert cluster.settle(Random(1)) == {"a": {"fast": 1}, "b": {"fast": 0}}
    plan = cluster.services["b"].status.pool_plan
    assert (plan.demand, plan.answered) == (5.0, 0.0) and "has 0 of the 1 workers that it needs" in plan.reason
    cluster.demand["a"] = 0.0
    settled = cluster.settle(Random(2))
    assert settled == {"a": {"fast": 0}, "b": {"fast": 1}}, "nobody asks a any more"
    assert cluster.services["a"].status.pool_plan.demand == 0.0


def test_who_loses_its_last_worker_to_a_lower_limit_is_told_with_the_numbers() -> None:
    cluster = a_cluster(3, a=30.0, b=30.0, d=30.0)
    cluster.settle(Random(0))
    cluster.limits["large"] = 2
    cluster.services["d"] = replace(  # it lacked workers before, and was told so
        cluster.services["d"],
        status=replace(cluster.services["d"].status, pools=(replace(cluster.services["d"].status.pools[0], wanted=4),)),
    )
    (told,) = cluster.look("d")
    assert told.startswith("WorkerClassFull: workers planned: fast 0 (was 1)")
    assert "30 requests/s are asked for, these answer 0" in told and "WorkerClass large has 2 for all" in told
    status = cluster.services["d"].status
    assert (status.pool_plan.answered, status.pools[0].wanted) == (0.0, 4)


@pytest.mark.parametrize("limit", [12, 7])
def test_workers_that_serve_stay_while_a_new_model_is_not_measured(limit: int) -> None:
    cluster = a_cluster(12, a=100.0, b=100.0)
    assert cluster.settle(Random(0)) == {"a": {"fast": 6}, "b": {"fast": 6}}
    cluster.check = lambda: None  # type: ignore[method-assign]
    cluster.limits["large"] = limit
    status = cluster.services["a"].status
    forgotten = replace(status.pools[0], worker_rate=0.0)
    cluster.services["a"] = replace(cluster.services["a"], status=replace(status, pools=(forgotten,)))
    rates, unknown = cluster.rates, {**cluster.rates, "fast": 0.0}
    for _ in range(8):
        cluster.rates = unknown
        cluster.look("a")
        cluster.rates = rates
        cluster.look("b")
    assert cluster.numbers() == {"a": {"fast": 6}, "b": {"fast": limit - 6}}
    assert sum(n["fast"] for n in cluster.settle(Random(1)).values()) == limit


def test_a_service_that_can_go_elsewhere_makes_way() -> None:
    cluster = a_cluster(4, a=30.0, b=30.0)
    cluster.services["b"] = a_service("b", of_class(), {"name": "own", "costPerHour": "2", "maxWorkers": 9})
    settled = cluster.settle(Random(0))
    assert settled["a"] == {"fast": 4} and settled["b"]["fast"] + settled["b"]["own"] == 4


def test_services_that_hold_each_others_workers_change_places() -> None:
    cluster = Cluster({"large": 3, "small": 3}, {}, {"a": 25.0, "b": 25.0}, {"fast": 10.0, "slow": 10.0})
    for name, wants in (("a", "fast"), ("b", "slow")):
        costs = {pool: "0.1" if pool == wants else "1" for pool in ("fast", "slow")}
        service = a_service(name, of_class("large", "fast", costs["fast"]), of_class("small", "slow", costs["slow"]))
        has = "slow" if wants == "fast" else "fast"
        pools = tuple(
            PoolStatus(
                p, desired=3 * (p == has), planned=3 * (p == has), worker_rate=10.0, batch_size=1, batch_seconds=0.005
            )
            for p in ("fast", "slow")
        )
        plan = PoolPlanStatus(demand=25.0, answered=30.0, cost_per_hour=3.0, reason="as before")
        cluster.services[name] = replace(service, status=ServiceStatus(pools=pools, pool_plan=plan))
    assert cluster.settle(Random(0)) == {"a": {"fast": 3, "slow": 0}, "b": {"fast": 0, "slow": 3}}


def test_a_service_that_gets_none_of_a_full_class_has_a_worker_of_the_other_one() -> None:
    costs = {"a": ("1", "0.5", 60.0), "b": ("3", "0.5", 25.0), "c": ("3", "0.5", 5.0), "d": ("1", "0.5", 120.0)}
    cluster = Cluster({"large": 4, "small": 3}, {}, {})
    for name, (fast, slow, demand) in costs.items():
        fewest = 2 if name in "bd" else 0
        pools = of_class("large", "fast", fast, minWorkers=fewest), of_class("small", "slow", slow)
        cluster.services[name], cluster.demand[name] = a_service(name, *pools), demand
    settled = cluster.settle(Random(0))
    assert all(sum(n.values()) for n in settled.values()), settled


def test_workers_whose_number_a_person_decides_on_count() -> None:
    fixed, planned = ClassUse("default/fixed", 3), ClassUse("default/a", 0, claim("default/a", most=5))
    shares = next_shares("large", 4, [fixed, planned])
    assert (shares["default/a"].most, shares["default/a"].now) == (1, 1) and shares.keys() == {"default/a"}


def test_more_services_than_workers_leave_some_without_any_and_say_so() -> None:
    cluster = a_cluster(1, a=5.0, b=5.0)
    settled = cluster.settle(Random(0))
    assert sorted(n["fast"] for n in settled.values()) == [0, 1]
    (without,) = [cluster.services[name] for name, n in settled.items() if not n["fast"]]
    assert without.status.pools[0].wanted == 1


def test_a_shortage_is_told_once_as_a_warning_with_its_numbers() -> None:
    cluster = a_cluster(3, a=20.0, b=100.0)
    told = [line for _ in range(9) for name in ("a", "b") for line in cluster.look(name) if "WorkerClassFull" in line]
    assert [line for line in told if "100 requests/s are asked for" in line]
    again = [line for _ in range(5) for name in ("a", "b") for line in cluster.look(name)]
    assert again == []


def test_what_is_asked_stands_while_the_plan_would_be_the_same() -> None:
    assert [steady_demand(100.0, d, may_lower=True) for d in (109.9, 110.1, 80.1, 79.0)] == [100.0, 110.0, 100.0, 79.0]
    assert steady_demand(100.0, 5.0, may_lower=False) == 100.0 and steady_demand(0.0, 3.0, may_lower=False) == 3.0


def test_two_pools_of_one_class_are_refused_with_the_field() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.pools.*two name one className"):
        a_service("a", of_class(), of_class(pool="own"))
    with pytest.raises(InvalidSpecError, match=r"spec\.pools\[0\]\.className.*must name a WorkerClass"):
        a_service("a", of_class("Not A Name"))


def test_a_service_that_lacks_some_of_its_fewest_says_so_although_the_others_answer_what_is_asked() -> None:
    cluster = a_cluster(3, a=1.0, b=1.0)
    for name in "ab":
        cluster.services[name] = a_service(name, of_class(minWorkers=2))
    settled = cluster.settle(Random(0))
    lacking = {name: s.status.pools[0].wanted for name, s in cluster.services.items()}
    assert sorted((settled[name]["fast"], lacking[name]) for name in settled) == [(1, 2), (2, 0)]
