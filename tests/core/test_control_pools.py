"""What is known of each pool, and how requests are shared among them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.objects import PoolStatus, Service
from offramp_core.control.served import served_by
from offramp_core.control.snapshot import Gathered, Observed, Snapshot, Worker, WorkerEndpoint
from offramp_core.control.spec import WorkerPool, parse_spec
from offramp_core.control.trust import foreign, quarantined, strangers
from offramp_core.control.tuning.retraining import bundle_identity
from offramp_core.control.workers.pools import MOST_WEIGHT, Model, next_pools, rate_of_all, request_weights, with_place
from offramp_core.errors import InvalidBundleError, InvalidSpecError
from offramp_core.protocol import ArmPlan, Observations, PlanDocument, RecordBlock, WorkerState
from offramp_core.reasons import Reason

COSTS: dict[str, list[Any]] = {"batch_size": [1, 4], "segment_seconds": [[0.004, 0.004], [0.01, 0.01]]}
MODEL = Model(COSTS, "sha256:a", "off", 0.1)
FAST, SLOW = WorkerPool("fast", 1, {}), WorkerPool("slow", 2, {})
SPEC = {
    "model": {"uri": "oci://offramp/digits:1"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
}


def worker(name: str, pool: str, *, pace: float = 0.0, ready: bool = True, **endpoint: Any) -> Worker:
    state = WorkerState(name, name, "", "digits", ready, "sha256:a", "sha256:b", (), COSTS, pace=pace)
    return Worker(WorkerEndpoint(name, name, ready, pool=pool, **endpoint), state)


def known(*workers: Worker, before: tuple[PoolStatus, ...] = (), model: Model | None = MODEL) -> dict[str, PoolStatus]:
    return {p.name: p for p in next_pools((FAST, SLOW), workers, before=before, model=model)}


def test_a_pool_is_known_by_what_its_own_workers_measured() -> None:
    found = known(worker("a", "fast", pace=1.0), worker("b", "slow", pace=3.0))
    assert found["fast"].worker_rate > 2.9 * found["slow"].worker_rate > 0
    assert (found["fast"].ready, found["slow"].ready, found["slow"].desired) == (1, 1, 2)


def test_nothing_is_said_of_a_pool_whose_workers_did_not_measure() -> None:
    assert known(worker("a", "fast"))["fast"].worker_rate == 0


def test_what_was_measured_outlives_the_workers_and_not_the_model() -> None:
    before = tuple(known(worker("a", "fast", pace=1.0)).values())
    rate = before[0].worker_rate
    assert known(before=before)["fast"].worker_rate == rate, "nobody is there"
    assert known(before=before, model=None)["fast"].worker_rate == rate, "nobody has reported"
    assert known(before=before, model=replace(MODEL, digest="sha256:c"))["fast"].worker_rate == 0


def test_a_worker_that_is_not_believed_says_nothing_of_its_pool() -> None:
    workers = [worker("a", "fast", pace=1.0), worker("b", "fast", pace=0.001)]
    honest = next_pools((FAST,), workers[:1], before=(), model=MODEL)
    assert (
        next_pools((FAST,), workers, before=(), model=MODEL, distrusted=["b"])[0].worker_rate == honest[0].worker_rate
    )


@pytest.mark.parametrize("pace", [1e-306, 1e-4, 2e3, 1e300, math.inf, math.nan, -1.0])
def test_a_pace_that_cannot_be_is_as_good_as_none_and_complained_of(pace: float) -> None:
    liar, honest = worker("a", "fast", pace=pace), worker("b", "fast", pace=1.0)
    assert known(liar)["fast"].worker_rate == 0
    assert known(liar, honest) == {**known(honest), "fast": replace(known(honest)["fast"], ready=2)}
    seen = Observations("", "boot", 0.0, (), RecordBlock(0, 0, "sha256:b"))
    heard = tuple(replace(w, observations=seen) for w in (liar, honest))
    complaints = quarantined(
        Snapshot(Gathered(Service("default", "digits", "uid", 1, parse_spec(SPEC))), Observed(heard))
    )
    assert set(complaints) == {"a"} and "times what the profile says" in complaints["a"]


def test_one_worker_that_was_held_up_as_it_measured_does_not_speak_for_its_pool() -> None:
    sound = [worker(name, "fast", pace=1.0) for name in "abcd"]
    held_up = worker("e", "fast", pace=120.0)
    assert known(*sound, held_up)["fast"].worker_rate == known(*sound)["fast"].worker_rate


ELSEWHERE: dict[str, list[Any]] = {"batch_size": [1, 4], "segment_seconds": [[0.001, 0.001], [0.001, 0.001]]}


def elsewhere(name: str, *, ramps: str = "sha256:b", ready: bool = True) -> Worker:
    """A worker of a pool with a bundle of its own, measured on a quicker device."""
    found = worker(name, "slow", pace=1.0, ready=ready, own_bundle=True, pool_field="spec.pools[1]")
    assert found.state is not None
    return replace(found, state=replace(found.state, ramp_set_digest=ramps, costs=ELSEWHERE))


def test_a_pool_with_a_bundle_of_its_own_is_known_by_the_profile_of_that() -> None:
    plain = worker("b", "slow", pace=1.0)
    assert known(elsewhere("a"))["slow"].worker_rate > 4 * known(plain)["slow"].worker_rate > 0


@given(st.lists(st.sampled_from(["sha256:a", "sha256:b", "sha256:c"]), max_size=6), st.integers(1, 2), st.randoms())
def test_what_is_served_and_what_it_costs_is_said_by_workers_with_the_bundle_of_the_spec(
    others: list[str], n: int, random: Random
) -> None:
    main = [worker(f"main-{i}", "fast") for i in range(n)]
    mixed = [*main, *(elsewhere(f"own-{i}", ramps=ramps) for i, ramps in enumerate(others))]
    random.shuffle(mixed)
    assert served_by(mixed, None) == served_by(main, None)


def test_a_pool_with_a_bundle_of_its_own_serves_on_alone() -> None:
    for gone in ([], [worker("d", "fast", ready=False)]):
        served = served_by([elsewhere("a"), *gone], None)
        assert served is not None and served.costs == ELSEWHERE


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_published_stands_while_only_strangers_with_a_bundle_of_their_own_are_ready(trained: bool) -> None:
    """Where ramps were trained on live traffic, the published plan is for another set than the bundle's own."""
    ramps, bundle = ("sha256:new", bundle_identity("sha256:a", "sha256:b")) if trained else ("sha256:b", "")
    plan = ArmPlan({"backboneDigest": "sha256:a", "rampSetDigest": ramps}, 0.0)
    document = PlanDocument("digits", "uid", 3, plan, None, 0, "", 0.02)
    gone, right, stranger = worker("d", "fast", ready=False), elsewhere("a"), elsewhere("b", ramps="sha256:other")
    assert stranger.state is not None
    stranger = replace(stranger, state=replace(stranger.state, ramp_sets=("sha256:other", "sha256:new")))
    for workers in ([gone, stranger], [stranger]):
        assert served_by(workers, document, bundle=bundle) is None
    served = served_by([gone, stranger, stranger, right], document, bundle=bundle)
    assert served is not None and served.ramp_set_digest == "sha256:b"


def test_a_pool_that_goes_over_to_a_bundle_of_its_own_is_known_by_the_workers_that_have_it() -> None:
    old = [worker(name, "slow", pace=300.0, current=False) for name in "ab"]
    replaced = replace(elsewhere("c"), endpoint=replace(elsewhere("c").endpoint, current=False))
    assert replaced.state is not None
    another = replace(replaced, state=replace(replaced.state, costs=COSTS, pace=300.0))
    rate = known(elsewhere("d"))["slow"].worker_rate
    assert known(*old, elsewhere("d"))["slow"].worker_rate == rate
    assert known(elsewhere("d"), *old)["slow"].worker_rate == rate
    assert known(another, another, elsewhere("d"))["slow"].worker_rate == rate, "from one of its own to the next"


def test_a_bundle_of_a_pool_with_another_model_is_told_how_to_get_one_of_the_right_model() -> None:
    error = InvalidBundleError.foreign("this worker must serve sha256:a")
    refusing = elsewhere("a", ready=False)
    assert refusing.state is not None
    state = replace(refusing.state, ready=False, message=f"{error}; {error.remedy}")
    _, told = replace(refusing, state=state).trouble
    assert told == (
        "spec.pools[1].model.uri: this worker must serve sha256:a; put that bundle there, made from the one of "
        "spec.model.uri with `offramp prepare --remeasure`"
    )


def test_other_exits_in_the_bundle_of_a_pool_are_complained_of_with_the_next_step() -> None:
    workers = [worker("a", "fast"), elsewhere("b", ramps="sha256:other")]
    told = foreign(workers, strangers(workers, ("sha256:a", "sha256:b")))
    assert set(told) == {"b"}
    assert "bundle of spec.pools[1].model.uri" in told["b"] and "offramp prepare --remeasure" in told["b"]


@pytest.mark.parametrize(
    ("own", "message", "device", "field"),
    [
        (True, "a file is missing; name it in spec.model.uri", "", "in spec.pools[1].model.uri"),
        (True, "this worker must serve sha256:a", "", "spec.pools[1].model.uri: this worker must serve sha256:a"),
        (False, "a file is missing; name it in spec.model.uri", "", "in spec.model.uri"),
        (False, "measured with cuda; or name a bundle in spec.model.uri", "cuda", "in spec.pools[1].model.uri"),
        (False, "measured with cuda", "cuda", "name one in spec.pools[1].resources.limits"),
    ],
)
def test_what_a_worker_says_of_its_bundle_names_the_fields_of_its_pool(
    own: bool, message: str, device: str, field: str
) -> None:
    refusing = worker("a", "slow", ready=False, own_bundle=own, pool_field="spec.pools[1]", devices=())
    assert refusing.state is not None
    state = replace(refusing.state, ready=False, message=message, missing_device=device)
    reason, told = replace(refusing, state=state).trouble
    assert reason == Reason.INVALID_BUNDLE and field in told


def test_workers_that_answer_or_start_have_a_place() -> None:
    pods = [
        worker("a", "fast"),
        worker("b", "fast", ready=False),
        worker("c", "fast", ready=False, failure="no node", failure_reason=Reason.UNSCHEDULABLE),
        worker("d", "fast", ready=False, ending=True),
    ]
    assert with_place(pods) == {"fast": 2}


def test_a_pool_says_why_its_workers_find_no_place() -> None:
    lost = worker("a", "fast", ready=False, failure="no node", failure_reason=Reason.UNSCHEDULABLE)
    failing = worker("b", "slow", ready=False, failure="it ends", failure_reason=Reason.CRASH_LOOP_BACK_OFF)
    found = known(lost, failing)
    assert (found["fast"].message, found["slow"].message) == ("no node", "")


RATES = st.floats(0.001, 1e6)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 100), RATES), min_size=1))
def test_shares_follow_what_the_available_workers_can_do(pools: dict[str, tuple[int, float]]) -> None:
    statuses = [PoolStatus(name, worker_rate=rate) for name, (_, rate) in pools.items()]
    weights = request_weights(statuses, {name: n for name, (n, _) in pools.items()})
    able = {name: n * rate for name, (n, rate) in pools.items()}
    most = max(able.values())
    if not most:
        assert set(weights.values()) == {MOST_WEIGHT}, "whoever comes first is found"
        return
    assert all((weights[name] == 0) == (can == 0) for name, can in able.items()), "nobody who serves gets nothing"
    assert all(abs(weights[name] - MOST_WEIGHT * can / most) <= 1 for name, can in able.items() if can)


@given(st.lists(st.tuples(st.integers(1, 50), RATES), min_size=1, max_size=8))
def test_shared_by_numbers_no_pool_gets_more_than_it_can_do(pools: list[tuple[int, float]]) -> None:
    statuses = [PoolStatus(str(i), ready=n, worker_rate=rate) for i, (n, rate) in enumerate(pools)]
    each = rate_of_all(statuses, by_weight=False)
    assert all(each <= pool.worker_rate for pool in statuses)
    together = sum(n * rate for n, rate in pools)
    assert math.isclose(rate_of_all(statuses, by_weight=True) * sum(n for n, _ in pools), together, rel_tol=1e-9)


def test_what_a_pool_says_stands_in_the_place_of_what_is_said_of_all() -> None:
    pools = [
        {"name": "plain", "replicas": 1},
        {"name": "gpu", "replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}, "nodeSelector": {"a": "b"}},
    ]
    spec = parse_spec({**SPEC, "pools": pools, "worker": {"resources": {"limits": {"cpu": 2}}, "image": "mine"}})
    plain, gpu = spec.pools
    assert plain.worker == spec.worker and spec.replicas == 3
    assert gpu.worker == {"image": "mine", "resources": {"limits": {"nvidia.com/gpu": 1}}, "nodeSelector": {"a": "b"}}


PLAIN: dict[str, Any] = {"name": "a", "replicas": 1}
OWN: dict[str, Any] = {"name": "b", "replicas": 1, "model": {"uri": "oci://offramp/digits-cuda:1"}}
PRICE = {"maxWorkers": 3, "costPerHour": "1"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pools": []}, "spec.pools"),
        ({"pools": [{"name": "a", "replicas": 1}] * 2}, "spec.pools"),
        ({"pools": [{"name": "next", "replicas": 1}]}, "spec.pools[0].name"),
        ({"pools": [{"name": "a\n", "replicas": 1}]}, "spec.pools[0].name"),
        *(
            ({"pools": [{"name": "a", "maxWorkers": 1, "costPerHour": cost}]}, "spec.pools[0].costPerHour")
            for cost in ("1_0", "\u0663", " 1", "1\n", "1e1", "NaN", 1)
        ),
        ({"pools": [{"name": "a"}]}, "spec.pools[0].replicas"),
        ({"pools": [{"name": "a", "maxWorkers": 3}]}, "spec.pools[0].costPerHour"),
        ({"pools": [{"name": "a", "replicas": 3, "costPerHour": "0.1"}]}, "spec.pools[0].maxWorkers"),
        ({"pools": [{"name": "a", "replicas": 3, "minWorkers": 1}]}, "spec.pools[0].maxWorkers"),
        ({"pools": [{"name": "a", "maxWorkers": 3, "costPerHour": "cheap"}]}, "spec.pools[0].costPerHour"),
        ({"pools": [{"name": "a", "maxWorkers": 3, "costPerHour": "0"}]}, "spec.pools[0].costPerHour"),
        ({"pools": [{"name": "a", "maxWorkers": 3, "minWorkers": 4, "costPerHour": "1"}]}, "spec.pools[0].maxWorkers"),
        (
            {"pools": [{"name": "a", "replicas": 1}, {"name": "b", "maxWorkers": 3, "costPerHour": "1"}]},
            "spec.pools",
        ),
        ({"pools": [{"name": "a", "replicas": 1}], "replicas": 1}, "spec.pools"),
        ({"pools": [OWN]}, "spec.pools"),
        ({"pools": [PLAIN, OWN | {"model": {}}]}, "spec.pools[1].model.uri"),
        ({"pools": [PLAIN, OWN | {"model": {"uri": "file:///bundle"}}]}, "spec.pools[1].model.uri"),
        ({"pools": [PLAIN, OWN | {"model": {"uri": "pvc://c/../d"}}]}, "spec.pools[1].model.uri"),
        (
            {"pools": [PLAIN, OWN | {"model": {"uri": "oci://a:1", "digest": "sha256:" + 64 * "0"}}]},
            "spec.pools[1].model.digest",
        ),
        (
            {"pools": [PLAIN, OWN | {"model": {"uri": "oci://a:1", "secretRef": {"name": "a"}}}]},
            "spec.pools[1].model.secretRef",
        ),
        (
            {
                "pools": [
                    {"name": "a", **PRICE},
                    {"name": "b", "model": {"uri": "oci://a:1"}, **PRICE},
                ],
                "poolPlan": {"noExitFloor": "None"},
            },
            "spec.poolPlan.noExitFloor",
        ),
        (
            {
                "pools": [PLAIN, OWN],
                "objective": {
                    "latency": {"threshold": "1s"},
                    "accuracy": {"maxLoss": "0.02", "output": "ExactAnswer"},
                },
            },
            "spec.pools[1].model",
        ),
        ({"pools": [{"name": "a", "replicas": 1}], "updatePolicy": {"type": "Recreate"}}, "spec.pools"),
        ({"pools": [{"name": "a", "replicas": 1}], "updatePolicy": {"sideBySide": {}}}, "spec.pools"),
    ],
)
def test_pools_that_cannot_be_are_refused_with_their_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        parse_spec({**SPEC, **changes})
    assert refused.value.field == field
