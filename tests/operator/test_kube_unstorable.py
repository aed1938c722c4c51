"""A harmful canary on a real API server that takes no status: its weight goes to 0 all the same, and the verdict of
then stands."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from offramp_core.control.objects import ConfigStatus, RolloutStatus, Service
from offramp_core.control.rollouts.rollout import intent_key
from offramp_core.control.snapshot import NewConfig, NewRollout, WorkerEndpoint
from offramp_core.errors import OfframpError
from offramp_core.plan import Plan, RampThreshold
from offramp_core.protocol import ArmCounts, PlanDocument

sys.path.insert(0, str(Path(__file__).parent))
from stub_worker import DIGEST_A, DIGEST_B, StubWorker

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, InvalidObjectError, KubeClient, TooLargeError
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

KEY = SigningKey(b"k" * 32)
BOLD = Plan(DIGEST_A, DIGEST_B, (RampThreshold("r00-linear", Decimal("0.5")),))
ROLLOUT = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "RampRollout"}
MERGE = "application/merge-patch+json"


class Obeying(StubWorker):
    """A worker that says which plans it runs."""

    def _configure(self, body: bytes) -> tuple[int, bytes]:
        answer = super()._configure(body)
        stable, canary = self.taken[-1].stable, self.taken[-1].canary
        hashes = [Plan.from_mapping(arm.plan).content_hash if arm is not None else "" for arm in (stable, canary)]
        self.state = replace(self.state, stable_hash=hashes[0], canary_hash=hashes[1])
        return answer


class Platform(KubePlatform):
    """Its worker is no pod."""

    worker: StubWorker

    def endpoints(self, service: Service, memory: Any) -> tuple[WorkerEndpoint, ...]:
        return (WorkerEndpoint(self.worker.state.uid, self.worker.state.uid, ready=True, admin_url=self.worker.url),)


class World:
    """A service with one worker under an operator that sees the cluster through lists."""

    def __init__(self, api: Any, namespace: str, client: KubeClient, worker: StubWorker, observer: Observer) -> None:
        self.api, self.namespace, self.client, self.worker = api, namespace, client, worker
        self.cache = ObjectCache()
        self.platform = Platform(client, self.cache, workers=WorkerSettings("offramp/worker:1"), instance="test")
        self.platform.worker = worker
        self.reconciler = Reconciler(self.platform, observer, KEY)
        self.key = ServiceKey(namespace, "digits")

    @property
    def rollout(self) -> dict[str, Any]:
        return {**ROLLOUT, "metadata": {"name": "digits-1", "namespace": self.namespace}}

    async def step(self) -> None:
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
        await self.reconciler.reconcile(self.key)

    async def published(self) -> PlanDocument:
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
        gathered = await self.platform.gather(self.key)
        assert gathered is not None and gathered.published is not None
        return gathered.published

    async def begin_canary(self) -> None:
        """As a tuning would have it: a plan is proposed, and takes 20 % of the batches."""
        for _ in range(3):
            await self.step()
        gathered = await self.platform.gather(self.key)
        assert gathered is not None
        service, now = gathered.service, time.time()
        name = BOLD.name("digits")
        await self.platform.create_config(service, NewConfig(name, BOLD, ConfigStatus()))
        await self.platform.create_rollout(
            service, NewRollout("digits-1", service.status.stable_config, name, "Tuned", 1)
        )
        status = RolloutStatus(
            "Progressing",
            weight=20,
            objective=intent_key(service),
            started_at=now,
            phase_started_at=now,
            audit_rate=1.0,
        )
        await self.platform.write_rollout_status(service, "digits-1", status)
        for _ in range(3):
            await self.step()
        assert self.worker.taken[-1].weight_percent == 20
        assert self.api.get(self.rollout)["status"]["message"] == "canary at 20 %"

    def harm(self) -> None:
        """Six of ten answers of the canary are not the model's."""
        epoch, hashes = (
            self.worker.state.epoch,
            {"canary": self.worker.state.canary_hash, "stable": self.worker.state.stable_hash},
        )
        self.worker.counts = tuple(
            ArmCounts(
                epoch,
                arm,
                plan,
                requests=500,
                drawn=500,
                audited=500,
                disagreements=300 * (arm == "canary"),
                batches=200,
            )
            for arm, plan in hashes.items()
        )


def _write_status(api: Any, rollout: dict[str, Any], status: dict[str, Any]) -> int:
    return int(api.merge(rollout, {"status": status}, subresource="status").status_code)


@contextmanager
def refused_by_a_policy(world: World, eventually: Callable[..., None]) -> Iterator[None]:
    """An administrator's ValidatingAdmissionPolicy."""
    name, path = f"no-status-{world.namespace}", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    rule = {
        "apiGroups": ["earlyexit.dev"],
        "apiVersions": ["*"],
        "operations": ["UPDATE"],
        "resources": ["ramprollouts/status", "earlyexitservices/status", "rampconfigs/status"],
    }
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "false", "message": "no status may be written here"}],
        },
    }
    selector = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    binding = policy | {
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": selector}},
    }
    for plural, body in (("ies", policy), ("ybindings", binding)):
        answer = world.api.request("POST", path + plural, body)
        assert answer.status_code == 201, answer.text
    try:
        eventually(lambda: _write_status(world.api, world.rollout, {"message": "x"}) == 422, what="the policy")
        yield
    finally:
        for plural in ("ybindings", "ies"):
            world.api.request("DELETE", f"{path}{plural}/{name}")
    eventually(lambda: _write_status(world.api, world.rollout, {"message": "x"}) == 200, what="the policy's end")


@contextmanager
def refused_by_older_definitions(world: World, eventually: Callable[..., None]) -> Iterator[None]:
    """CRDs of a release before a field of the status came."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ramprollouts.earlyexit.dev"
    versions = yaml.safe_load((Path(__file__).parents[2] / "crds" / "ramprollouts.yaml").read_text())["spec"][
        "versions"
    ]
    older = copy.deepcopy(versions)
    del older[0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["reason"]
    told = {"reason": "Told"}  # which every status of a rollback has, whoever answers

    def define(what: list[Any], answer: int) -> None:
        assert world.api.request("PATCH", path, {"spec": {"versions": what}}, content_type=MERGE).status_code == 200
        eventually(
            lambda: (_write_status(world.api, world.rollout, told) == 200) == (answer == 200), what="the definition"
        )

    define(older, 400)
    try:
        yield
    finally:
        define(versions, 200)


def _largest(fits: Callable[[int], bool], low: int, high: int, step: int) -> int:
    assert not fits(high), "there is a limit"
    while high - low > step:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@contextmanager
def refused_for_its_size(world: World, _: Callable[..., None]) -> Iterator[None]:
    """Somebody else has filled the object to the last bytes that etcd takes."""
    api, rollout = world.api, world.rollout

    def fills(size: int) -> bool:
        restarts = {f"{i:04d}-{'x' * size}": 0 for i in range(2000)}
        return (
            _write_status(api, rollout, {"restarts": None})
            == 200
            == _write_status(api, rollout, {"restarts": restarts})
        )

    def notes(size: int) -> bool:
        return bool(api.merge(rollout, {"metadata": {"annotations": {"note": "x" * size}}}).status_code == 200)

    assert fills(_largest(fills, 100, 1500, 8))
    assert notes(_largest(notes, 0, 200_000, 16))
    try:
        yield
    finally:
        notes(0)
        assert _write_status(api, rollout, {"restarts": None}) == 200


REFUSALS = {
    "a policy": (refused_by_a_policy, ApiError),
    "older definitions": (refused_by_older_definitions, InvalidObjectError),
    "its size": (refused_for_its_size, TooLargeError),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_harmful_canary_gets_nothing_more_although_its_status_is_refused_by(
    why: str, api: Any, namespace: str, tools: Any, server: Any
) -> None:
    refusal: Callable[..., AbstractContextManager[None]] = REFUSALS[why][0]
    manifest = server.service(replicas=1)
    manifest["metadata"]["namespace"] = namespace
    uid = api.create(manifest, keep=True).json()["metadata"]["uid"]
    worker, observer = Obeying("w1", token=KEY.admin_token(uid)), Observer(deadline_seconds=20.0)

    async def story() -> None:
        async with tools.client_of(api.kubeconfig) as client:
            world = World(api, namespace, client, worker, observer)
            await world.begin_canary()
            with refusal(world, server.wait_for):
                world.harm()
                with pytest.raises(REFUSALS[why][1]):
                    await world.step()
                assert (await world.published()).canary is None
                assert worker.taken[-1].canary is None, "delivered as well"
                stored = api.get(world.rollout)["status"]
                assert stored["phase"] == "Progressing", "the verdict could not be stored"
                worker.restart("another")  # what the canary did is known to nobody any more
                for _ in range(3):
                    worker.asked.clear()
                    with pytest.raises(OfframpError):
                        await world.step()
                    assert all("renew=0" in asked for asked in worker.asked if "observations" in asked)
                    assert (await world.published()).canary is None
            for _ in range(8):
                await world.step()
                assert (await world.published()).canary is None
            stored = api.get(world.rollout)["status"]
            assert (stored["phase"], stored["reason"]) == ("RolledBack", "AccuracyRejected")
            await observer.close()

    try:
        tools.run(story())
    finally:
        worker.close()
