"""What the operator makes of services and classes in its cache: who may have which worker, and who is woken."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from offramp_core.control.objects import Service
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import (
    CLASS_LABEL,
    DEPLOYMENT,
    POD,
    POOL_LABEL,
    SERVICE,
    SERVICE_LABEL,
    WORKER_CLASS,
    Kind,
    Object,
    uid_of,
)
from offramp_operator.kube.managed import forever
from offramp_operator.kube.platform.shares import ClassShares
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.platform import ConflictError, ServiceKey

VERSIONS = itertools.count(1)
SPEC = {
    "model": {"uri": "oci://offramp/digits:1"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
}


def made(kind: Kind, name: str, namespace: str = "default", **content: Any) -> Object:
    metadata = {"name": name, "uid": f"{kind.name}-{name}", "resourceVersion": str(next(VERSIONS)), "generation": 1}
    if not kind.cluster_scoped:
        metadata["namespace"] = namespace
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content}


class World:
    """A cache, and the shares that are read from it."""

    def __init__(self, most: int | None, **has: int) -> None:
        self.cache = ObjectCache()
        self.limit(most)
        for name, workers in has.items():
            self.put(name, workers)
        self.shares = ClassShares(self.cache)
        assert self.shares.woken() == set()

    def limit(self, most: int | None) -> None:
        self.cache.put(WORKER_CLASS, made(WORKER_CLASS, "large", spec={} if most is None else {"maxWorkers": most}))

    def put(self, name: str, workers: int, *, demand: float = 30.0) -> None:
        pool = {"name": "fast", "desired": workers, "ready": workers, "workerRate": 10.0, "planned": workers}
        status = {"pools": [pool | {"batchSize": 1, "batchSeconds": 0.005}], "poolPlan": {"demand": demand}}
        pools = [{"name": "fast", "className": "large", "costPerHour": "1", "maxWorkers": 9}]
        self.cache.put(SERVICE, made(SERVICE, name, spec={**SPEC, "pools": pools}, status=status))

    def odd(self, name: str, *, demand: float = 30.0, **pool: float) -> None:
        """A service with a status that no plan follows from."""
        obj = self.cache.get(SERVICE, "default", name)
        assert obj is not None
        status = {"pools": [obj["status"]["pools"][0] | pool], "poolPlan": {"demand": demand}}
        self.cache.put(SERVICE, made(SERVICE, name, spec=obj["spec"], status=status))

    def deploy(self, name: str, replicas: int, *, of_class: str = "large") -> None:
        owner = {"kind": "EarlyExitService", "name": name, "uid": f"EarlyExitService-{name}", "controller": True}
        template = {"metadata": {"labels": {CLASS_LABEL: of_class, POOL_LABEL: "fast"}}}
        obj = made(DEPLOYMENT, f"{name}-fast", spec={"replicas": replicas, "template": template})
        obj["metadata"]["ownerReferences"] = [owner]
        self.cache.put(DEPLOYMENT, obj)

    def pod(self, name: str, n: int, **status: str) -> str:
        """A pod of a service's; its uid."""
        obj = made(POD, f"{name}-fast-{n}", status={"phase": "Running", **status})
        obj["metadata"]["labels"] = {CLASS_LABEL: "large", POOL_LABEL: "fast", SERVICE_LABEL: name}
        self.cache.put(POD, obj)
        return uid_of(obj)

    def spec(self, name: str, *pools: dict[str, str]) -> None:
        """Other pools, with the status that there is."""
        obj = self.cache.get(SERVICE, "default", name)
        assert obj is not None
        spec = {**SPEC, "pools": [{"costPerHour": "1", "maxWorkers": 9, **pool} for pool in pools]}
        self.cache.put(SERVICE, made(SERVICE, name, spec=spec, status=obj["status"]))

    def service(self, name: str) -> Service:
        obj = self.cache.get(SERVICE, "default", name)
        assert obj is not None
        return service_from_manifest(obj)

    def of(self, name: str) -> tuple[int, int]:
        """What it may plan, and what it may ask for now."""
        share = self.shares.of(self.service(name))["fast"]
        return share.most, share.now


def test_what_two_would_take_together_the_first_one_has() -> None:
    world = World(4, a=2, b=1)
    assert (world.of("a"), world.of("b")) == ((2, 3), (2, 2))
    world.shares.ask(world.service("a"), {"fast": 3})
    with pytest.raises(ConflictError, match="another service has just taken a worker of WorkerClass large"):
        world.shares.ask(world.service("b"), {"fast": 2})
    world.shares.ask(world.service("b"), {"fast": 1})
    assert world.of("a")[1] == 3, "what was not written is not taken any more"


def test_who_waits_is_woken_when_a_worker_is_given_back_and_not_before() -> None:
    world = World(4, a=4, b=0)
    world.deploy("a", 4)
    assert world.of("b") == (2, 0) and world.shares.woken() <= {ServiceKey("default", "a")}
    world.put("a", 2)
    assert world.of("b") == (2, 0) and world.shares.woken() == set(), "its Deployment still has them"
    world.deploy("a", 2)
    assert world.shares.woken() == {ServiceKey("default", "b")} and world.of("b") == (2, 2)


def test_a_service_that_asks_for_more_wakes_those_that_have_to_give_way() -> None:
    world = World(4, a=3, b=1)
    assert world.of("a")[0] == 2
    world.shares.woken()
    world.put("b", 1, demand=1.0)
    assert world.shares.woken() == {ServiceKey("default", "a")} and world.of("a") == (3, 3)


def test_a_limit_that_comes_changes_and_goes() -> None:
    world = World(None, a=3, b=1)
    assert world.shares.of(world.service("a")) == {}
    world.limit(4)
    assert world.of("a") == (2, 3)
    world.limit(8)
    assert world.of("a") == (4, 7)
    world.limit(None)
    assert world.shares.of(world.service("a")) == {}


def test_a_service_that_is_gone_has_no_worker_any_more() -> None:
    world = World(4, a=3, b=1)
    obj = world.cache.get(SERVICE, "default", "a")
    assert obj is not None and world.of("b") == (2, 1)
    world.cache.remove(SERVICE, uid_of(obj))
    assert world.of("b") == (4, 4)


def test_a_part_of_the_services_gives_away_its_part_of_the_limit() -> None:
    world = World(9, a=0, b=0)
    world.shares = ClassShares(world.cache, shards=lambda: (frozenset({1}), 2))
    assert world.of("a") == (2, 4) and sum(world.of(name)[0] for name in "ab") == 4
    assert world.shares.of(world.service("a"))["fast"].max_workers == 9, "messages tell the class's own number"


@pytest.mark.parametrize(("most", "shards"), [(1, 2), (3, 4), (9, 4)])
def test_the_parts_of_all_shards_are_the_limit(most: int, shards: int) -> None:
    world, parts = World(most, a=0), []
    for shard in range(shards):
        world.shares = ClassShares(world.cache, shards=lambda held=shard: (frozenset({held}), shards))
        parts.append(world.of("a")[1])
    assert sum(parts) == most and max(parts) - min(parts) <= 1


def test_two_pools_that_inherit_one_limited_class_stay_as_they_are() -> None:
    world = World(4, a=0)
    pools = [{"name": name, "costPerHour": "1", "maxWorkers": 9} for name in ("x", "y")]
    status = {"pools": [{"name": "x", "desired": 2, "ready": 2}, {"name": "y", "desired": 1}]}
    spec = {**SPEC, "worker": {"className": "large"}, "pools": pools}
    world.cache.put(SERVICE, made(SERVICE, "two", spec=spec, status=status))
    shares = world.shares.of(world.service("two"))
    assert {name: (share.most, share.now) for name, share in shares.items()} == {"x": (2, 2), "y": (1, 1)}
    with pytest.raises(ConflictError):
        world.shares.ask(world.service("two"), {"x": 9, "y": 9})


def test_a_spec_that_cannot_be_read_has_no_share_and_keeps_nobody_from_theirs() -> None:
    world = World(4, a=1)
    world.cache.put(SERVICE, made(SERVICE, "broken", spec={"pools": [{"name": "fast", "className": "large"}]}))
    assert world.of("a") == (4, 4)


@pytest.mark.parametrize(
    "odd",
    [{"batchSize": 0}, {"workerRate": 1e308}, {"workerRate": 5e-324}, {"demand": 1e308}],
    ids=" ".join,
)
def test_a_status_that_no_plan_follows_from_keeps_what_it_has_and_nobody_else_from_theirs(
    odd: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(9, odd=2, **{f"s{i}": 1 for i in range(4)})
    world.odd("odd", **odd)
    world.shares = ClassShares(world.cache)  # as after a restart
    world.shares.woken()
    most = [world.of(f"s{i}")[0] for i in range(4)]
    assert sum(most) <= 7 and min(most) >= 1, "each is read, and what the odd one has is not given away"
    assert world.of("odd")[1] >= 2
    with pytest.raises(ConflictError):
        world.shares.ask(world.service("odd"), {"fast": 9})
    for _ in range(3):
        world.odd("odd", **odd)
        world.shares.woken()
    assert len([record for record in caplog.records if "default/odd" in record.getMessage()]) <= 1


def test_what_could_not_be_read_is_read_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(9, **{f"s{i}": 1 for i in range(4)})
    world.shares = ClassShares(world.cache)
    get, failures = world.cache.get, iter([RuntimeError("once")])

    def fails_once(kind: Kind, namespace: str, name: str) -> Object | None:
        if kind is SERVICE and (error := next(failures, None)) is not None:
            raise error
        return get(kind, namespace, name)

    monkeypatch.setattr(world.cache, "get", fails_once)
    with pytest.raises(RuntimeError):
        world.shares.woken()
    world.shares.woken()
    assert sum(world.of(f"s{i}")[0] for i in range(4)) == 9, "nobody was forgotten"


def test_work_beside_the_passes_goes_on_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def beside() -> None:
        calls, ran = itertools.count(), asyncio.Event()

        def work() -> None:
            if next(calls) == 3:
                ran.set()
            raise ValueError("odd")

        running = asyncio.create_task(forever(0.0, work))
        enough = asyncio.create_task(ran.wait())
        await asyncio.wait({running, enough}, return_when=asyncio.FIRST_COMPLETED)
        assert ran.is_set() and not running.done()
        running.cancel()

    asyncio.run(beside())
    assert len([record for record in caplog.records if "odd" in record.getMessage()]) == 1


def test_workers_of_a_spec_that_cannot_be_read_count_until_they_are_gone() -> None:
    world = World(4, a=3, b=1)
    world.deploy("a", 3)
    assert world.of("b") == (2, 1)
    world.cache.put(SERVICE, made(SERVICE, "a", spec={"pools": [{"name": "fast", "className": "large"}]}))
    assert world.of("b") == (1, 1)
    world.deploy("a", 0)
    assert world.shares.woken() == {ServiceKey("default", "b")} and world.of("b") == (4, 4)


@pytest.mark.parametrize("restarts", [False, True])
def test_workers_of_a_service_that_is_gone_count_until_they_have_ended(restarts: bool) -> None:
    world = World(4, a=3, b=1)
    world.deploy("a", 3)
    pods = [world.pod("a", n) for n in range(3)]
    world.cache.remove(SERVICE, "EarlyExitService-a")
    if restarts:
        world.shares = ClassShares(world.cache)
    assert world.of("b") == (1, 1)
    world.cache.remove(DEPLOYMENT, "Deployment-a-fast")
    assert world.of("b") == (1, 1), "its pods still end"
    world.cache.remove(POD, pods[0])
    world.pod("a", 1, phase="Failed")
    assert world.of("b") == (3, 3)
    world.cache.remove(POD, pods[2])
    assert world.of("b") == (4, 4)


def test_workers_of_a_pool_that_has_another_class_or_name_now_count_until_they_are_gone() -> None:
    for pool in ({"name": "fast", "className": "other"}, {"name": "new", "className": "large"}, {"name": "fast"}):
        world = World(4, a=3, b=1)
        world.deploy("a", 3)
        world.spec("a", pool)
        assert world.of("b")[1] == 1, pool
        world.deploy("a", 1)
        assert world.of("b")[1] == 3, pool
        world.deploy("a", 1, of_class="other")
        assert world.of("b")[1] == 4, pool


def test_a_renamed_pool_may_have_what_the_earlier_one_has() -> None:
    world = World(3, a=3)
    world.deploy("a", 3)
    world.spec("a", {"name": "new", "className": "large"})
    assert world.shares.of(world.service("a"))["new"].now == 3, "else neither would ever go or come"
    world.shares.ask(world.service("a"), {"new": 3})
