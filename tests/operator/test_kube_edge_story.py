"""An edge and its core under Kubernetes' own controllers: what changes when."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import BETTER, GOOD, Fleet, bundle_of, is_ready

from offramp_operator.kube.kinds import DEPLOYMENT, NETWORK_SERVICE, POD, Object, name_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

EDGE = {"pool": "box"}


def pools(**replicas: int) -> list[Object]:
    return [{"name": name, "replicas": n} for name, n in replicas.items()]


def of_pool(pods: list[Object], name: str) -> list[Object]:
    return [pod for pod in pods if pod["metadata"]["labels"]["earlyexit.dev/pool"] == name]


async def names(f: Fleet, kind: Any) -> set[str]:
    return {name_of(obj) for obj in (await f.client.list(kind, f.namespace))[0]}


async def found_by(f: Fleet, service: str) -> list[Object]:
    """The pods that a Service sends requests to."""
    obj = await f.client.get(NETWORK_SERVICE, f.namespace, service)
    if obj is None:
        return []
    chosen = obj["spec"]["selector"].items()
    return [p for p in (await f.client.list(POD, f.namespace))[0] if chosen <= p["metadata"]["labels"].items()]


def test_a_changed_bundle_reaches_the_edge_once_its_whole_core_has_it(fleet: Any, tools: Any) -> None:
    async def story() -> None:
        nodes = {"box": 2, "core": 2, "spot": 2}
        async with fleet(nodes=nodes, pools=pools(box=1, core=1, spot=1), edge=EDGE) as f:
            await f.serve(GOOD, GOOD, GOOD)
            early = []

            async def watch(pods: list[Object]) -> None:
                edge = any(bundle_of(pod) == bundle_of_uri(BETTER) for pod in of_pool(pods, "box"))
                early.append(edge and any(bundle_of(p) != bundle_of_uri(BETTER) for p in pods if is_core(p)))

            f.onlooker = watch
            await f.edit(model={"uri": BETTER})
            await f.serve(BETTER, BETTER, BETTER)
            assert not any(early)

    tools.run(story())


def bundle_of_uri(uri: str) -> str:
    return uri.removeprefix("oci://")


def is_core(pod: Object) -> bool:
    return not of_pool([pod], "box")


def test_a_pool_becomes_the_edge_and_a_plain_one_again_and_no_service_of_others_finds_an_edge(
    fleet: Any, tools: Any
) -> None:
    async def story() -> None:
        async with fleet(nodes={"box": 3, "core": 2}, pools=pools(box=1, core=1)) as f:
            await f.serve(GOOD, GOOD)

            async def watch(_: list[Object]) -> None:
                serving = [pod for pod in await found_by(f, "digits") if is_ready(pod)]
                assert serving, "somebody answers at any time"
                assert all(edge_variable(pod) is None for pod in serving)

            f.onlooker = watch
            await f.edit(edge=EDGE)

            async def edges() -> bool:
                ready = [pod for pod in await found_by(f, "digits-edges") if is_ready(pod)]
                return [edge_variable(p) for p in ready] == [f"http://digits.{f.namespace}.svc"]

            async def only(*wanted: str) -> bool:
                return await names(f, DEPLOYMENT) == set(wanted)

            await f.until(edges, what="an edge")
            await f.until(lambda: only("digits-core", "digits-box.edge"), what="the end of the pool's own workers")
            await f.rest()
            before = await f.restart()
            await f.rest(5)
            assert await f.versions() == before, "another operator has nothing to write"

            await f.edit(edge=None)
            await f.until(lambda: only("digits-core", "digits-box"), what="pools without an edge")
            await f.serve(GOOD, GOOD)
            assert await names(f, NETWORK_SERVICE) == {"digits"}

    tools.run(story())


def edge_variable(pod: Object) -> str | None:
    [container] = pod["spec"]["containers"]
    return next((e["value"] for e in container["env"] if e["name"] == "OFFRAMP_CORE"), None)
