"""How many workers a pool has, and which holds what, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offramp_core.control.objects import Service
from offramp_core.control.shared_pool import SharedPoolSpec, SharedPoolStatus
from offramp_core.control.spec import ServiceSpec
from offramp_core.protocol import HeldModel, HeldModels
from offramp_operator.kube.shared.members import Member
from offramp_operator.kube.shared.plan import PodOfPool, PoolPlan, PoolView, plan_pool
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.shell.signing import SigningKey

KEY = SigningKey.from_seed(b"k" * 32)
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
        name, f"uid-{name}", True, True, "http://x", held=HeldModels(f"uid-{name}", "boot", 1, 1.0, tuple(held))
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


def test_lists_keep_their_epoch_while_they_say_the_same() -> None:
    a = member("a")
    first = plan_pool(view(SharedPoolStatus(), [pod("w0", serves={})], a), 0.0)
    again = plan_pool(view(first.status, [pod("w0", serves={"a": 10})], a), 1.0)
    other = plan_pool(view(again.status, [pod("w0", serves={"a": 10})], a, member("b")), 2.0)
    assert (first.status.epoch, again.status.epoch, other.status.epoch) == (1, 1, 2)
    assert {listed.epoch for listed in other.lists.values()} == {2}


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
