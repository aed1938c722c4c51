"""Services that compete for the workers of a WorkerClass, under Kubernetes' own controllers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import Fleet, is_ready

from offramp_core.control.workers import pool_plan
from offramp_core.fleet import Window
from offramp_operator.kube.kinds import DEPLOYMENT, EVENT, SERVICE, Object

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


@pytest.fixture(autouse=True)
def seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "WATCHED_SECONDS", 0.0)


@pytest.fixture
def scarce(controlled: Any) -> Iterator[Any]:
    """A class of its own: ``scarce.name``, and ``scarce(n)`` gives it so many workers."""
    name = f"scarce-{os.urandom(4).hex()}"
    path = f"/apis/earlyexit.dev/v1alpha1/workerclasses/{name}"

    def limit(most: int) -> None:
        made = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "WorkerClass", "metadata": {"name": name}}
        if controlled.request("GET", path).status_code == 404:
            assert controlled.create(made | {"spec": {"maxWorkers": most}}, keep=True).status_code == 201
        assert controlled.merge(made, {"spec": {"maxWorkers": most}}).status_code == 200

    limit.name = name  # type: ignore[attr-defined]
    yield limit
    controlled.request("DELETE", path)


def of_class(name: str) -> list[Object]:
    return [{"name": "fast", "className": name, "costPerHour": "1", "maxWorkers": 6}]


def beside(f: Fleet, name: str) -> None:
    """One more service like the first one."""
    service = f.api.request("GET", f"/apis/earlyexit.dev/v1alpha1/namespaces/{f.namespace}/earlyexitservices/digits")
    made = {key: service.json()[key] for key in ("apiVersion", "kind", "spec")}
    made["metadata"] = {"name": name, "namespace": f.namespace}
    assert f.api.create(made, keep=True).status_code == 201
    f.others = (*f.others, name)


def asked(f: Fleet, name: str, rate: float) -> None:
    now = time.time()
    windows = tuple(Window(ended_at=now - 10 * i, seconds=10.0, rate=rate) for i in range(30))
    f.reconciler._observer.windows_of[name] = windows


async def ready_of(f: Fleet) -> dict[str, int]:
    found: dict[str, int] = {}
    for pod in filter(is_ready, await f.pods()):
        name = pod["metadata"]["labels"]["earlyexit.dev/service"]
        found[name] = found.get(name, 0) + 1
    return found


async def until_ready(f: Fleet, **wanted: int) -> None:
    async def there() -> bool:
        asked = {name: _pool(f, name).get("desired", 0) for name in ("digits", *f.others)}
        return await ready_of(f) == {k: n for k, n in wanted.items() if n} and asked == wanted

    await f.until(there, what=f"workers {wanted}")


def _pool(f: Fleet, name: str) -> Object:
    status = (f.cache.get(SERVICE, f.namespace, name) or {}).get("status") or {}
    return dict(next(iter(status.get("pools", ())), {}))


def count_workers(f: Fleet, most: list[int]) -> None:
    """Note how many workers there are, at every look."""

    async def look(_: list[Object]) -> None:
        deployments = (await f.client.list(DEPLOYMENT, f.namespace))[0]
        most.append(sum(d["spec"]["replicas"] for d in deployments))

    f.onlooker = look


async def numbers(f: Fleet) -> dict[str, Object]:
    """What is written of pools and plans, and what their Deployments ask for."""
    found: dict[str, Object] = {}
    for service in (await f.client.list(SERVICE, f.namespace))[0]:
        found[service["metadata"]["name"]] = {name: service["status"][name] for name in ("pools", "poolPlan")}
    for deployment in (await f.client.list(DEPLOYMENT, f.namespace))[0]:
        found[f"of {deployment['metadata']['name']}"] = deployment["spec"]
    return found


def test_two_services_compete_for_the_last_workers_and_are_told_who_lacks_how_many(
    fleet: Any, tools: Any, scarce: Any
) -> None:
    scarce(4)

    async def story() -> None:
        async with fleet(nodes={"fast": 8}, pools=of_class(scarce.name), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0}
            asked(f, "digits", 200.0)
            await until_ready(f, digits=3)
            beside(f, "letters")
            asked(f, "letters", 200.0)
            seen: list[int] = []
            count_workers(f, seen)
            await until_ready(f, digits=2, letters=2)
            assert max(seen) == 4, "nobody starts a worker in the place of one that is still there"
            for name in ("digits", "letters"):
                assert f.told(name)["PoolsAvailable"] == ("False", "WorkerClassFull")
                told = f.message("PoolsAvailable", name)
                assert told.startswith("spec.pools[0] (fast) has 2 of the 3 workers that it needs: ")
                assert f"WorkerClass {scarce.name} has 4 for all services; raise its spec.maxWorkers" in told
                assert f.told(name)["Ready"][0] == "True"
            events = (await f.client.list(EVENT, f.namespace))[0]
            notes = [e["note"] for e in events if e["reason"] == "WorkerClassFull"]
            assert any("200 requests/s are asked for, these answer" in note for note in notes)
            await f.until(lambda: "Reconciling" not in f.told("letters"), what="the end of the change")
            asked(f, "digits", 190.0)
            before = await numbers(f)
            await f.rest()
            assert await numbers(f) == before, "noise moves nobody's share"
            scarce(6)
            await until_ready(f, digits=3, letters=3)
            await f.until(lambda: "PoolsAvailable" not in f.told("letters"), what="the end of the complaint")

    tools.run(story())


def test_a_service_for_which_no_worker_is_left_says_so_and_starts_when_another_one_goes(
    fleet: Any, tools: Any, scarce: Any
) -> None:
    scarce(1)

    async def story() -> None:
        async with fleet(nodes={"fast": 2}, pools=of_class(scarce.name), answering=True) as f:
            f.reconciler._observer.paces = {"fast": 1.0}
            asked(f, "digits", 10.0)
            await until_ready(f, digits=1)
            beside(f, "letters")
            await f.until(lambda: f.told("letters").get("Ready") == ("False", "WorkerClassFull"), what="the reason")
            assert "has 0 of the 1 workers that it needs" in f.message("Ready", "letters")
            assert await ready_of(f) == {"digits": 1}
            path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{f.namespace}/earlyexitservices/digits"
            assert f.api.request("DELETE", path).status_code == 200
            f.cache.drop(DEPLOYMENT)  # the garbage collector's part
            await f.until(lambda: f.told("letters").get("Ready", ("",))[0] == "True", what="its first worker")

    tools.run(story())


def test_a_class_that_the_spec_names_for_a_pool_must_be_there_and_be_about_that_pool_alone(
    fleet: Any, tools: Any, scarce: Any, controlled: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes={"fast": 2}, pools=of_class(scarce.name), answering=True) as f:
            await f.until(lambda: "WorkerClassUsable" in f.told(), what="the complaint")
            assert f"spec.pools[0].className: there is no WorkerClass {scarce.name}" in f.message("WorkerClassUsable")
            made = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "WorkerClass", "metadata": {"name": scarce.name}}
            assert controlled.create(made | {"spec": {"image": "other:1"}}, keep=True).status_code == 201
            said = f"spec.pools[0].className: WorkerClass {scarce.name} says image, which holds for all pools"
            await f.until(lambda: said in f.message("WorkerClassUsable"), what="what is wrong with it")
            assert controlled.merge(made, {"spec": {"image": None}}).status_code == 200
            await until_ready(f, digits=1)

    tools.run(story())
