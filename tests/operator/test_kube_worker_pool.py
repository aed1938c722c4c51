"""Services that share the workers of a WorkerPool, with real worker processes under Kubernetes' own controllers."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import add_node
from pool_fleet import PoolFleet, write_bundle

from offramp_operator.kube.kinds import DEPLOYMENT, SERVICE, WORKER_POOL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


@pytest.fixture
def fleet(controlled: Any, tools: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    namespace = f"pool-{os.urandom(4).hex()}"
    controlled.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, keep=True)
    (tmp_path / "claim").mkdir()

    @asynccontextmanager
    async def make(**spec: Any) -> AsyncIterator[PoolFleet]:
        add_node(controlled, f"{namespace}-0", namespace)
        async with tools.client_of(controlled.kubeconfig) as client:
            f = PoolFleet(controlled, namespace, client, tmp_path)
            f.bind_claim()
            f.create(
                {
                    "apiVersion": "earlyexit.dev/v1alpha1",
                    "kind": "WorkerPool",
                    "metadata": {"name": "shared"},
                    "spec": {
                        "memory": "1Gi",
                        "bundles": {"claimName": "bundles"},
                        "worker": {"nodeSelector": {"of": namespace}},
                        **spec,
                    },
                }
            )
            try:
                yield f
            finally:
                await f.close()

    yield make
    for kind in ("earlyexitservices", "workerpools"):
        controlled.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/{kind}")
    controlled.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments")


def service(manifests: Any, name: str, **spec: Any) -> Any:
    model = {"uri": f"pvc://bundles/{name}"}
    return manifests.service(name, **{"model": model, "sharing": {"pool": "shared"}, **spec})


def uid_of(f: PoolFleet, name: str) -> str:
    obj = f.cache.get(SERVICE, f.namespace, name)
    assert obj is not None
    return str(obj["metadata"]["uid"])


def test_services_of_a_pool_serve_under_their_own_addresses_and_come_and_go_alone(
    fleet: Any, manifests: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet() as f:
            for seed, name in enumerate(("a", "b", "c")):
                write_bundle(f.claim, name, seed=seed)
                assert f.create(service(manifests, name)).status_code == 201
            await f.until(lambda: f.is_ready("a", "b", "c"), what="three services being ready")
            await f.until(lambda: f.condition("shared", of=WORKER_POOL).get("status") == "True", what="a ready pool")
            [worker] = f.processes.values()
            for name in ("a", "b", "c"):
                assert await f.behind(name) == [worker]
                assert worker.infer(name) == 200
            status = f.cache.get(SERVICE, f.namespace, "a")["status"]
            assert status["url"] == f"http://a.{f.namespace}.svc"
            assert status["models"][0]["uri"] == "pvc://bundles/a", "proven as in a worker of its own"
            deployments = (await f.client.list(DEPLOYMENT, f.namespace))[0]
            assert [d["metadata"]["name"] for d in deployments] == ["shared-workers"]
            before = {name: worker.boot_id(uid_of(f, name), name) for name in ("a", "b")}
            pods = await f.names_of_pods()

            f.api.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/{f.namespace}/earlyexitservices/c")
            await f.until(lambda: worker.infer("c") == 404, what="the end of c")
            write_bundle(f.claim, "d", seed=5)
            f.create(service(manifests, "d"))
            await f.until(lambda: f.is_ready("d"), what="another service")
            assert {name: worker.boot_id(uid_of(f, name), name) for name in ("a", "b")} == before
            assert await f.names_of_pods() == pods

    tools.run(story())


def test_what_finds_no_place_says_why_and_what_serves_goes_on(fleet: Any, manifests: Any, tools: Any) -> None:
    def message(f: PoolFleet, name: str) -> str:
        return str(f.condition(name, "Stalled").get("message") or f.condition(name).get("message") or "")

    async def story() -> None:
        async with fleet() as f:
            write_bundle(f.claim, "a", seed=0)
            write_bundle(f.claim, "twin", seed=1, calls="a")
            f.create(service(manifests, "a"))
            await f.until(lambda: f.is_ready("a"), what="the first service being ready")
            for name, spec in {
                "twin": {},
                "nowhere": {},
                "elsewhere": {"model": {"uri": "pvc://others/a"}},
                "lost": {"sharing": {"pool": "missing"}},
            }.items():
                assert f.create(service(manifests, name, **spec)).status_code == 201
            for name, part in {
                "twin": "as that of service a in WorkerPool shared does",
                "nowhere": "there is no bundle at 'nowhere' of the pool's claim",
                "elsewhere": "spec.model.uri names claim others, and the workers of WorkerPool shared have bundles",
                "lost": f"there is no WorkerPool missing in namespace {f.namespace}",
            }.items():
                await f.until(lambda n=name, p=part: p in message(f, n), what=f"what is said of {name}")
            assert f.is_ready("a")
            [worker] = f.processes.values()
            assert worker.infer("a") == 200
            assert "twin: " in f.condition("shared", of=WORKER_POOL)["message"]

            f.api.merge({**_pool(f)}, {"spec": {"memory": "1Ki"}})
            await f.until(
                lambda: f.condition("shared", of=WORKER_POOL).get("reason") == "MemoryTooSmall",
                what="too little memory",
            )
            assert (
                "spec.memory is 1024 bytes; the smallest bundle, of a, takes"
                in (f.condition("shared", of=WORKER_POOL)["message"])
            )

    tools.run(story())


def test_workers_are_replaced_with_no_service_left_out(fleet: Any, manifests: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet(minWorkers=2, maxWorkers=2) as f:
            names = ("a", "b")
            for seed, name in enumerate(names):
                write_bundle(f.claim, name, seed=seed)
                f.create(service(manifests, name, replicas=2 if name == "a" else 1))
            await f.until(lambda: f.is_ready(*names), what="both services being ready")
            assert len(await f.behind("a")) == 2
            old = set(f.processes)
            f.api.merge(_pool(f), {"spec": {"worker": {"labels": {"team": "blue"}}}})
            answered = set[int]()

            async def renewed() -> bool:
                await f.tick()
                for name in names:
                    ready = [worker for worker in await f.behind(name) if worker.ready]
                    assert ready, f"nobody is behind {name}"
                    answered.update(worker.infer(name) for worker in ready)
                return not old & set(f.processes) and len(f.processes) == 2

            while not await renewed():
                pass
            assert answered == {200}
            await f.until(lambda: f.is_ready(*names), what="both services being ready again")

    tools.run(story())


def test_a_service_that_nobody_asks_for_leaves_memory_and_stays_ready_and_another_operator_loses_nothing(
    fleet: Any, manifests: Any, tools: Any
) -> None:
    """``spec.sharing.unloadAfterSeconds``, at its least."""
    sharing = {"pool": "shared", "unloadAfterSeconds": 10}

    def standing(f: PoolFleet) -> dict[str, str]:
        return {s["name"]: s["standing"] for worker in f.pool()["workers"] for s in worker["services"]}

    async def story() -> None:
        async with fleet() as f:
            for seed, name in enumerate(("a", "b")):
                write_bundle(f.claim, name, seed=seed)
            f.create(service(manifests, "a", sharing=sharing))
            f.create(service(manifests, "b"))
            await f.until(lambda: f.is_ready("a", "b"), what="both services being ready")
            [worker] = f.processes.values()
            assert worker.infer("a") == 200
            before = worker.state(uid_of(f, "a"), "a")
            assert before["epoch"] > 0
            await f.until(lambda: standing(f) == {"a": "Unloaded", "b": "Serving"}, what="the end of a in memory")
            await f.until(lambda: f.condition("a").get("reason") == "Unloaded", what="what is said of that")
            assert f.is_ready("a", "b")
            assert f.condition("a")["message"].startswith("Unloaded, loads on the next request in about 1 s, under a-")
            known = next(s for s in f.pool()["services"] if s["name"] == "a")
            assert (known["workers"], known["unloaded"]) == (1, 1) and known["bytes"] > 0
            told = f.condition("shared", of=WORKER_POOL)
            assert (told["status"], told["reason"]) == ("True", "PoolReady") and "1 are unloaded" in told["message"]

            f.another_operator()
            for _ in range(5):
                await f.tick()
            assert standing(f)["a"] == "Unloaded", "watching does not load it"
            assert f.condition("a").get("reason") == "Unloaded"
            assert await f.behind("a") == [worker]
            assert worker.infer("a") == 200
            await f.until(lambda: f.condition("a").get("reason") == "Serving", what="a serving again")
            after = worker.state(uid_of(f, "a"), "a")
            assert (after["boot_id"], after["epoch"]) == (before["boot_id"], before["epoch"])
            assert worker.infer("b") == 200

    tools.run(story())


def _pool(f: PoolFleet) -> dict[str, Any]:
    metadata = {"name": "shared", "namespace": f.namespace}
    return {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "WorkerPool", "metadata": metadata}
