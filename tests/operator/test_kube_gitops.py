"""A service in Git, applied again and again while the controller tunes, canaries and promotes: nobody finds a
difference, ever.

Real: the API server, the Kubernetes platform, the reconciler and its decisions. Simulated: workers, and time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("core", "cli")]

from fleet import MANIFEST, Fleet  # noqa: E402
from states import CLEAN  # noqa: E402

from offramp_core.control.snapshot import Gathered, Load, Observed, WorkerEndpoint  # noqa: E402
from offramp_core.protocol import PlanDocument, SignedDocument  # noqa: E402
from offramp_operator.kube.cache import ObjectCache  # noqa: E402
from offramp_operator.kube.kinds import SERVICE  # noqa: E402
from offramp_operator.kube.manifests import WorkerSettings  # noqa: E402
from offramp_operator.kube.platform.service_platform import KubePlatform  # noqa: E402
from offramp_operator.kube.watch import Feed  # noqa: E402
from offramp_operator.shell import wire  # noqa: E402
from offramp_operator.shell.observe import Observer  # noqa: E402
from offramp_operator.shell.platform import ServiceKey  # noqa: E402
from offramp_operator.shell.reconcile import Reconciler  # noqa: E402
from offramp_operator.shell.signing import SigningKey  # noqa: E402

pytestmark = pytest.mark.slow

GIT = "argocd-controller"
PASSES = 300


class SimulatedWorkers(Observer):
    """Pulls a simulated fleet instead of pods; a second of traffic passes with every pull."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet

    async def observe(self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], **_: Any) -> Observed:
        self.fleet.serve_for(1.0)
        return Observed(tuple(w.view() for w in self.fleet.workers), self.fleet._store(), load=Load(200.0, 0.2))

    async def poke(
        self, key: ServiceKey, endpoints: Sequence[WorkerEndpoint], *, token: str, signed: SignedDocument
    ) -> None:
        document = wire.decode(signed.payload, PlanDocument)
        for worker in self.fleet.workers:
            worker.configure(document)

    def forget(self, key: ServiceKey) -> None: ...


class Waiting(Fleet):
    """A fleet that serves without deciding: the reconciler does that."""

    def serve_for(self, seconds: float) -> None:
        self.reconcile = lambda: None  # type: ignore[assignment,method-assign,return-value]
        self.step(seconds)


class WithWorkers(KubePlatform):
    """Nothing runs pods here; the simulated workers stand in for them."""

    async def gather(self, key: ServiceKey) -> Gathered | None:
        gathered = await super().gather(key)
        pods = tuple(WorkerEndpoint(f"w{i}", f"w{i}", ready=True, admin_url="http://simulated") for i in range(2))
        return gathered and replace(gathered, workers=pods)


@pytest.mark.timeout(1200)
def test_a_service_applied_from_git_over_and_over_never_differs_while_the_controller_works(
    api: Any, namespace: str, tools: Any
) -> None:
    spec = {**MANIFEST, "model": {"uri": "oci://registry.example.com/digits:1"}}
    manifest = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "digits", "namespace": namespace, "labels": {"team": "vision"}, "annotations": {"a": "b"}},
        "spec": spec,
    }
    key, fleet = ServiceKey(namespace, "digits"), Waiting(CLEAN)
    phases: set[str] = set()

    async def story() -> None:
        api.apply(manifest, manager=GIT).raise_for_status()
        async with tools.client_of(api.kubeconfig) as client:
            cache = ObjectCache()
            platform = WithWorkers(
                client, cache, workers=WorkerSettings("offramp/worker:1"), instance="test", clock=lambda: fleet.now
            )
            reconciler = Reconciler(platform, SimulatedWorkers(fleet), SigningKey(bytes(32)), lambda: fleet.now)
            feed = Feed(cache, lambda _: None)
            for number in range(PASSES):
                await feed.relist(client, (namespace,))
                await reconciler.reconcile(key)
                live = api.get(manifest)
                applied = api.apply(manifest, manager=GIT).raise_for_status().json()
                assert applied["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"], "nothing to write"
                assert applied["metadata"]["generation"] == 1
                if number % 20 == 0:
                    _check_no_difference(api, manifest)
                told = live.get("status", {})
                phases.update(r.get("status", {}).get("phase", "") for r in _rollouts(api, namespace))
                if "Succeeded" in phases and told.get("phase") == "Ready":
                    break
                tuning = reconciler._tunings.of(key).running
                if tuning is not None:  # it takes real time: passes go on meanwhile, but are not used up
                    await asyncio.wait([asyncio.wrap_future(tuning)], timeout=2.0)
        _check_no_difference(api, manifest)
        _check_ownership(api.get(manifest))

    async def bounded() -> None:
        await asyncio.wait_for(story(), 800)

    asyncio.run(bounded())
    assert {"Progressing", "Succeeded"} <= phases, yaml.safe_dump(api.get(manifest)["status"])
    assert _rollouts(api, namespace) and SERVICE.name == "EarlyExitService"


def _rollouts(api: Any, namespace: str) -> list[dict[str, Any]]:
    return list(api.request("GET", f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/ramprollouts").json()["items"])


def _check_no_difference(api: Any, manifest: dict[str, Any]) -> None:
    """As Argo CD with server-side diff, Flux's dry run and `kubectl diff` see it."""
    answer = api.kubectl("diff", "--server-side", f"--field-manager={GIT}", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stdout + answer.stderr


def _check_ownership(live: dict[str, Any]) -> None:
    """The operator owns the status and nothing else of the user's object."""
    assert live["metadata"]["labels"] == {"team": "vision"} and "finalizers" not in live["metadata"]
    for entry in live["metadata"]["managedFields"]:
        owned = set(entry["fieldsV1"])
        assert owned == {"f:status"} if entry["manager"] != GIT else "f:status" not in owned, entry
