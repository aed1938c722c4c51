"""How many workers a pool has, and which holds what, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from offramp_core.control.objects import Service
from offramp_core.control.shared_pool import SharedPoolSpec, SharedPoolStatus
from offramp_core.control.spec import ServiceSpec
from offramp_core.protocol import HeldModel, HeldModels
from offramp_operator.kube.shared.members import Member
from offramp_operator.kube.shared.plan import PodOfPool, PoolPlan, PoolView, plan_pool, workers_to_have
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.kube.shared.rates import Rates
from offramp_operator.shell.signing import SigningKey

KEY = SigningKey(b"k" * 32)
SPEC = SharedPoolSpec(memory_bytes=100, claim="bundles", worker={}, min_workers=1, max_workers=3)


def member(name: str, *, model: str = "") -> Member:
    spec = ServiceSpec(
        model_uri=f"pvc://bundles/{name}", latency_seconds=1.0, max_disagreement=0.1, shared_pool="shared"
    )
    return Member(Service("default", name, f"uid-{name}", 1, spec), created=name)


def pod(name: str, *, serves: Mapping[str, int]) -> PodOfPool:
    """A ready worker that serves services of so many bytes."""
    held = [HeldModel(f"uid-{s}", "Serving", model=s, mark="m", bytes=size) for s, size in serves.items()]
    return PodOfPool(
        name, f"uid-{name}", True, True, "http://x", held=HeldModels(f"uid-{name}", "boot", 0, 1.0, tuple(held))
    )


def view(
    status: SharedPoolStatus,
    pods: Sequence[PodOfPool],
    *members: Member,
    busy: Mapping[str, float] | None = None,
    fewest: int = 0,
) -> PoolView:
    pool = SharedPool("default", "shared", "uid-pool", 1, SPEC, status)
    placed = {m.name: m.placed(KEY) for m in members}
    return PoolView(pool, members, pods, busy or {}, frozenset(), fewest, placed)


def holds(plan: PoolPlan, uid: str) -> set[str]:
    return {model.service for model in plan.lists[uid].models}


def test_a_pool_grows_where_its_services_do_not_fit_and_shrinks_again_without_losing_a_place() -> None:
    a, b = member("a"), member("b")
    first = plan_pool(view(SharedPoolStatus(), [pod("w0", serves={})], a, b), 0.0)
    assert first.status.slots == 1 and holds(first, "uid-w0") == {"a", "b"}  # nothing is known of their bytes

    grown = plan_pool(view(first.status, [pod("w0", serves={"a": 70, "b": 60})], a, b), 1.0)
    assert grown.status.slots == 2 and grown.status.epoch == first.status.epoch
    assert holds(grown, "uid-w0") == {"a", "b"}, "what has nowhere else to go yet stays"

    both = [pod("w0", serves={"a": 70, "b": 60}), pod("w1", serves={})]
    split = plan_pool(view(grown.status, both, a, b), 2.0)
    moved, stays = sorted(("a", "b"), key=lambda name: name not in holds(split, "uid-w1"))
    both = [pod("w0", serves={stays: 70, moved: 60}), pod("w1", serves={moved: 60})]
    done = plan_pool(view(split.status, both, a, b), 3.0)
    assert holds(done, "uid-w1") == {moved} and moved not in done.orders["uid-w0"].routed

    last = member(moved)
    kept = plan_pool(view(done.status, both, last, fewest=2), 4.0)
    assert kept.status.slots == 2
    less = plan_pool(view(done.status, both, last), 5.0)
    assert less.status.slots == 1 and less.orders["uid-w1"].slot == 0 and less.orders["uid-w0"].slot is None
    assert holds(less, "uid-w1") == {moved}


def test_time_alone_makes_a_pool_grow_up_to_its_most() -> None:
    names = [member(name) for name in "abcd"]
    found = plan_pool(view(SharedPoolStatus(), [], *names, busy=dict.fromkeys("abcd", 0.5)), 0.0)
    assert found.status.slots == 3  # four would be needed
    assert not any(service.message for service in found.status.services)


def test_a_service_that_asks_for_more_workers_than_there_may_be_has_as_many_as_there_are_and_is_named() -> None:
    a = member("a")
    a = replace(a, service=replace(a.service, spec=replace(a.service.spec, replicas=4)))
    pods = [pod(f"w{i}", serves={"a": 10}) for i in range(3)]
    found = plan_pool(view(SharedPoolStatus(), pods, a), 0.0)
    assert all(holds(found, f"uid-w{i}") == {"a"} for i in range(3))
    [condition] = found.status.conditions
    assert condition.message == "a: spec.replicas is 4, and the pool's spec.maxWorkers 3; change one of them"


def settled(*members: Member, pods: Sequence[PodOfPool], **more: Any) -> PoolPlan:
    """What a few passes come to."""
    plan = plan_pool(view(SharedPoolStatus(), pods, *members, **more), 0.0)
    for _ in range(3):
        plan = plan_pool(view(plan.status, pods, *members, **more), 0.0)
    return plan


def test_a_ready_worker_that_does_not_answer_keeps_what_it_served_last_and_its_list() -> None:
    a, b = member("a"), member("b")
    before = settled(a, b, pods=[pod("w0", serves={"a": 10, "b": 20})])
    silent = replace(pod("w0", serves={}), held=None)
    after = plan_pool(view(before.status, [silent], a, b), 1.0)
    assert after.orders["uid-w0"].routed == {"a", "b"}
    assert after.status == before.status
    other = plan_pool(view(before.status, [replace(silent, uid="uid-other")], a, b), 1.0)
    assert not other.orders["uid-other"].routed, "a pod that never answered serves nothing"


def test_a_silent_worker_is_not_emptied_before_its_services_serve_elsewhere() -> None:
    a, b = member("a"), member("b")
    before = settled(a, b, pods=[pod("w0", serves={"a": 70}), pod("w1", serves={"b": 60})])
    small = [pod("w0", serves={"a": 30}), replace(pod("w1", serves={}), held=None)]
    status = replace(before.status, services=tuple(replace(s, bytes=30) for s in before.status.services))
    fewer = plan_pool(view(status, small, a, b), 1.0)
    spare = next(uid for uid, order in fewer.orders.items() if order.slot is None)
    assert fewer.status.slots == 1 and fewer.orders[spare].routed


def test_a_worker_goes_only_once_its_services_serve_elsewhere_and_it_is_the_first_to_be_deleted() -> None:
    a, b = member("a"), member("b")
    before = settled(a, b, pods=[pod("w0", serves={"a": 70}), pod("w1", serves={"b": 60})])
    both = [pod("w0", serves={"a": 30}), pod("w1", serves={"b": 30})]
    moving = plan_pool(view(before.status, both, a, b), 1.0)
    [spare] = [uid for uid, order in moving.orders.items() if order.slot is None]
    assert moving.status.slots == 1
    assert workers_to_have(moving, both, there=2, marked={spare}) == 2, "it still serves"

    both = [pod(p.name, serves={} if p.uid == spare else {"a": 30, "b": 30}) for p in both]
    done = plan_pool(view(moving.status, both, a, b), 2.0)
    assert workers_to_have(done, both, there=2, marked=()) == 2
    assert workers_to_have(done, both, there=2, marked={spare}) == 1
    for change in ({"ready": False}, {"current": False}):  # Kubernetes would delete that one first
        other = [p if p.uid == spare else replace(p, **change) for p in both]
        assert workers_to_have(done, other, there=2, marked={spare}) == 2
    assert workers_to_have(done, both, there=0, marked=()) == 1


def test_lists_keep_their_epoch_while_they_say_the_same() -> None:
    a = member("a")
    first = plan_pool(view(SharedPoolStatus(), [pod("w0", serves={})], a), 0.0)
    again = plan_pool(view(first.status, [pod("w0", serves={"a": 10})], a), 1.0)
    other = plan_pool(view(again.status, [pod("w0", serves={"a": 10})], a, member("b")), 2.0)
    assert (first.status.epoch, again.status.epoch, other.status.epoch) == (1, 1, 2)
    assert {listed.epoch for listed in other.lists.values()} == {2}


def test_a_status_that_is_older_than_its_workers_catches_up() -> None:
    a = member("a")
    first = plan_pool(view(SharedPoolStatus(), [pod("w0", serves={"a": 10})], a), 0.0)
    ahead = pod("w0", serves={"a": 10})
    assert ahead.held is not None
    ahead = replace(ahead, held=replace(ahead.held, epoch=7))
    assert plan_pool(view(first.status, [ahead], a), 1.0).status.epoch == 8
    absurd = replace(ahead, held=replace(ahead.held, epoch=2**63 - 1))
    assert plan_pool(view(first.status, [absurd], a), 1.0).status.epoch == 1


def test_a_worker_that_refuses_its_list_is_named() -> None:
    a = member("a")
    refusing = replace(pod("w0", serves={"a": 10}), unheard="it refuses its list of models: 413: too large")
    [condition] = settled(a, pods=[refusing]).status.conditions
    assert (condition.status, condition.message) == ("False", f"w0: {refusing.unheard}")


def test_another_operator_drops_no_copy_of_a_busy_service() -> None:
    a, b = member("a"), member("b")
    pods = [pod("w0", serves={"a": 10, "b": 10}), pod("w1", serves={"a": 10}), pod("w2", serves={"a": 10})]
    before = settled(a, b, pods=pods, busy={"a": 1.9, "b": 0.1})
    first = plan_pool(view(before.status, pods, a, b, fewest=3), 1.0)
    assert first.orders == before.orders and all("a" in order.routed for order in first.orders.values())

    rates = Rates()
    for second in range(3):
        heard = [replace(p, held=replace(p.held, now=1.0 + second)) for p in pods if p.held is not None]
        rates.measure(first.status, heard)
        assert second == 0 or 1.8 < rates.busy["a"] <= 1.9, "idle for seconds, it goes on from what was stored"


def test_rates_are_stored_when_they_matter() -> None:
    a = member("a")
    before = settled(a, pods=[pod("w0", serves={"a": 10})], busy={"a": 0.5})
    for busy, stored in ((0.52, 500), (0.6, 600), (0.0, 0), (0.705, 705)):
        after = plan_pool(view(before.status, [pod("w0", serves={"a": 10})], a, busy={"a": busy}), 1.0)
        assert after.status.services[0].busy_millis == stored
    before = settled(a, pods=[pod("w0", serves={"a": 10})], busy={"a": 0.699})
    after = plan_pool(view(before.status, [pod("w0", serves={"a": 10})], a, busy={"a": 0.701}), 1.0)
    assert after.status.services[0].busy_millis == 701, "it asks for two workers now"


def test_no_list_is_longer_than_a_worker_takes() -> None:
    options = {f"OFFRAMP_OPTION_{i}": "x" * 100 for i in range(20)}
    names = [member(f"s{i:03d}") for i in range(600)]
    seen = view(SharedPoolStatus(), [], *names)
    placed = {name: replace(entry, options=options) for name, entry in seen.placed.items()}
    seen = replace(seen, placed=placed, pods=[pod(f"w{i}", serves={}) for i in range(3)])
    plan = plan_pool(seen, 0.0)
    assert plan.status.slots == 3
    signed = [msgspec.json.encode(KEY.sign(listed)) for listed in plan.lists.values()]
    assert max(len(text) for text in signed) < 2**20


def test_services_beyond_what_a_pool_takes_are_told() -> None:
    [condition] = plan_pool(replace(view(SharedPoolStatus(), [], member("a")), left_out=2), 0.0).status.conditions
    assert condition.message == "the pool takes 1000 services, and the 2 youngest have no place; use another pool"


def test_who_serves_under_a_name_keeps_it_from_an_older_one_that_takes_it_later() -> None:
    old, young = member("a"), member("young")
    pods = [pod("w0", serves={"a": 70}), pod("w1", serves={"young": 60})]
    plan = settled(old, young, pods=pods)
    assert pods[0].held is not None
    renamed = HeldModel("uid-a", "Serving", model="young", mark="m2", bytes=70)
    pods[0] = replace(pods[0], held=replace(pods[0].held, models=(renamed,)))
    for _ in range(3):
        plan = plan_pool(view(plan.status, pods, old, young), 1.0)
        assert plan.orders["uid-w1"].routed == {"young"} and not plan.orders["uid-w0"].holds
        assert "as that of service young" in plan.status.services[0].message
    loading = HeldModel("uid-young", "Loading")  # its worker starts again
    pods = [pod("w0", serves={}), replace(pods[1], ready=False)]
    assert pods[1].held is not None
    pods[1] = replace(pods[1], held=replace(pods[1].held, models=(loading,)))
    for _ in range(2):
        plan = plan_pool(view(plan.status, pods, old, young), 2.0)
        assert holds(plan, "uid-w1") == {"young"}


def test_the_older_of_two_services_keeps_the_name_of_their_model() -> None:
    a, twin = member("a"), member("twin")
    told = pod("w0", serves={"a": 10})
    assert told.held is not None
    clash = HeldModel("uid-twin", "Failed", model="a", message="taken")
    told = replace(told, held=replace(told.held, models=(*told.held.models, clash)))
    found = plan_pool(view(SharedPoolStatus(), [told], a, twin), 0.0)
    [_, second] = found.status.services
    assert "as that of service a in WorkerPool shared does" in second.message
    assert holds(found, "uid-w0") == {"a"}
    [condition] = found.status.conditions
    assert (condition.reason, condition.message.partition(":")[0]) == ("ServicesWithoutPlace", "twin")


def resting(name: str, size: int, *, wanted: bool = False) -> HeldModel:
    """A service that its worker has out of memory, as it is to be served now."""
    mark = member(name).placed(KEY).mark
    return HeldModel(f"uid-{name}", "Unloaded", model=name, mark=mark, bytes=size, load_seconds=1.5, wanted=wanted)


def held(told: PodOfPool, *models: HeldModel) -> PodOfPool:
    assert told.held is not None
    return replace(told, held=replace(told.held, models=(*told.held.models, *models)))


def test_what_nobody_asks_for_takes_no_memory_and_gets_requests_as_before() -> None:
    a, b, c = member("a"), member("b"), member("c")
    worker = held(pod("w0", serves={"b": 60}), resting("a", 70))
    plan = settled(a, b, pods=[worker])
    assert plan.status.slots == 1 and plan.orders["uid-w0"].routed == {"a", "b"}
    [listed] = [model for model in plan.lists["uid-w0"].models if model.service == "a"]
    assert listed.at_rest, "another worker need not load it either"
    [known, _] = plan.status.services
    assert (known.workers, known.unloaded, known.bytes) == (1, 1, 70)
    [condition] = plan.status.conditions
    assert condition.status == "True" and "1 are unloaded until somebody asks" in condition.message
    assert plan.status.workers[0].services[0].load_millis == 1500

    more = settled(a, b, c, pods=[held(pod("w0", serves={"b": 60, "c": 35}), resting("a", 70))])
    assert more.status.slots == 1, "its room is another's"
    again = plan_pool(
        view(more.status, [held(pod("w0", serves={"b": 60, "c": 35}), resting("a", 70, wanted=True))], a, b, c), 1.0
    )
    assert again.status.slots == 2 and not again.status.services[0].message, "and somewhere else it gets room again"
    assert "a" in again.orders["uid-w0"].routed, "until then it is asked for where it is"


def test_what_is_in_memory_is_not_pushed_out_by_what_comes_back_and_that_is_told() -> None:
    names = "abcd"
    members = [member(name) for name in names]
    pods = [
        pod("w0", serves={"b": 80}),
        pod("w1", serves={"c": 80}),
        held(pod("w2", serves={"d": 80}), resting("a", 70)),
    ]
    before = settled(*members, pods=pods)
    assert before.status.slots == 3
    pods[2] = held(pod("w2", serves={"d": 80}), resting("a", 70, wanted=True))
    plan = before
    for _ in range(3):
        plan = plan_pool(view(plan.status, pods, *members), 1.0)
        assert {name for order in plan.orders.values() for name in order.routed} == set(names)
        assert plan.orders == before.orders
    told = plan.status.services[0].message
    assert "it is asked for, and no worker has 70 bytes left to load it into" in told and "raise maxWorkers" in told
    [condition] = plan.status.conditions
    assert (condition.status, condition.reason) == ("False", "ServicesWithoutPlace")
    pods[0] = held(pod("w0", serves={}), resting("b", 80))
    plan = plan_pool(view(plan.status, pods, *members), 2.0)
    assert not plan.status.services[0].message, "once another is at rest there is room"


def test_a_service_that_changes_or_is_loaded_somewhere_is_not_at_rest() -> None:
    a = member("a")
    older = replace(resting("a", 70), mark="older")
    for pods in (
        [held(pod("w0", serves={}), older)],
        [held(pod("w0", serves={}), resting("a", 70)), pod("w1", serves={"a": 70})],
    ):
        plan = settled(a, pods=pods)
        assert not any(model.at_rest for listed in plan.lists.values() for model in listed.models)
