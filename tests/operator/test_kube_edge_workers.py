"""An edge and its core as real worker processes that the operator made under Kubernetes' own controllers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
import bundles
from paper_fleet import add_node
from pool_fleet import PoolFleet, Process
from processes import decoded, infer_json

from offramp_operator.kube.kinds import Object

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

RAMP, THRESHOLD = "r02-linear", "0.5"


class EdgeFleet(PoolFleet):
    """A few lines stand for the cluster's DNS: a Service's name is the address of the first pod that was made for
    it."""

    core = ""

    def _start(self, pod: Object) -> Process:
        [container] = pod["spec"]["containers"]
        env = {entry["name"]: entry for entry in container["env"]}
        env["OFFRAMP_BUNDLE"]["value"] = str(self.claim / "tiny")
        if "OFFRAMP_CORE" in env:
            assert env["OFFRAMP_CORE"]["value"] == f"http://digits.{self.namespace}.svc"
            env["OFFRAMP_CORE"]["value"] = f"http://{self.core}:8080"
        process = super()._start(pod)
        self.core = self.core or process.address
        return process


@pytest.fixture
def fleet(controlled: Any, tools: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    namespace = f"edge-{os.urandom(4).hex()}"
    controlled.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, keep=True)
    bundles.write_bundle(tmp_path / "claim" / "tiny")

    @asynccontextmanager
    async def make() -> AsyncIterator[EdgeFleet]:
        add_node(controlled, f"{namespace}-0", namespace)
        async with tools.client_of(controlled.kubeconfig) as client:
            f = EdgeFleet(controlled, namespace, client, tmp_path)
            f.bind_claim()
            try:
                yield f
            finally:
                await f.close()

    yield make
    controlled.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/earlyexitservices/digits")
    controlled.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments")


def service(manifests: Any) -> Any:
    """Every request is audited and the budget is wide, so that a pinned plan serves within seconds."""
    return manifests.service(
        model={"uri": "pvc://bundles/tiny"},
        objective={"latency": {"threshold": "2s"}, "accuracy": {"maxDisagreement": "0.4"}},
        ramps={"mode": "Pinned", "maxOverhead": "1", "pin": {"ramps": [{"id": RAMP, "threshold": THRESHOLD}]}},
        rollout={"steps": [{"weight": 100}], "confidence": "0.9"},
        pools=[{"name": "core", "replicas": 1}, {"name": "box", "replicas": 1}],
        edge={"pool": "box", "residue": "Input", "offline": "Answer"},
    )


def ask(worker: Process, rows: Any) -> Any:
    reply = httpx.post(f"http://{worker.address}:8080/v2/models/tiny/infer", json=infer_json(rows), timeout=30)
    assert reply.status_code == 200, reply.text
    return decoded(reply.json())


def test_an_edge_answers_with_its_core_and_without_it(fleet: Any, manifests: Any, tools: Any) -> None:
    async def story() -> None:
        async with fleet() as f:
            assert f.create(service(manifests)).status_code == 201

            def both() -> bool:
                return len(f.processes) == 2 and all(process.ready for process in f.processes.values())

            await f.until(both, what="a core and an edge")
            [core] = await f.behind("digits")
            [edge] = await f.behind("digits-edges")
            assert core.address == f.core != edge.address
            x = bundles.inputs(40, seed=3)

            def leaves() -> bool:
                told = str(ask(edge, x)["parameters"]["exit"]).split(",")
                ask(core, x)
                return {RAMP, "final"} <= set(told)

            await f.until(leaves, what="the plan at the edge", seconds=120)
            core.process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(offline, edge, x)
            finally:
                core.process.send_signal(signal.SIGCONT)
            await f.until(lambda: "offline" not in ask(edge, x)["parameters"], what="the core's return")

    tools.run(story())


def offline(edge: Process, x: Any) -> None:
    """Nothing is lost, and each answer that the core would have given is told."""
    told = str(ask(edge, x)["parameters"]["offline"]).split(",")
    assert len(told) == len(x) and set(told) == {"true", "false"}
