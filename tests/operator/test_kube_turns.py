"""A new worker image, or a changed WorkerClass, over many services on a real API server: who takes it, what stops it,
and what another operator finds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from offramp_core.control.snapshot import Trouble
from offramp_core.control.workers.pace import PROVEN_SECONDS
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, KubeClient
from offramp_operator.kube.kinds import DEPLOYMENT, SERVICE, WORKER_CLASS, Object
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

KEY = SigningKey(b"k" * 32)
START = 1_800_000_000.0
STATUS = "application/merge-patch+json"


@dataclass
class Services:
    """Services that are served, and an operator that looks at all of them in turn. Kubernetes is the test's."""

    api: Any
    namespace: str
    client: KubeClient
    names: list[str]
    now: float = START
    cache: ObjectCache = field(default_factory=ObjectCache)
    platform: Any = None
    turns: dict[str, Trouble | None] = field(default_factory=dict)

    def operator(self, image: str) -> None:
        """A new process, of a chart with this worker image."""
        self.cache = ObjectCache()
        self.platform = KubePlatform(
            self.client,
            self.cache,
            workers=WorkerSettings(image),
            instance="t",
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )

    async def look(self, *, rounds: int = 3) -> list[str]:
        """Passes over all services; who has which image after them, in the order of names."""
        for _ in range(rounds):
            self.now += 2
            await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))
            for name in self.names:
                gathered = await self.platform.gather(ServiceKey(self.namespace, name))
                self.turns[name] = gathered.turn
                await self.platform.ensure_workers(gathered.service, KEY.identity(gathered.service.uid))
        return [self.image(await self.deployment(name)) for name in self.names]

    async def deployment(self, name: str) -> Object:
        found = await self.client.get(DEPLOYMENT, self.namespace, name)
        assert found is not None
        return found

    def image(self, deployment: Object) -> str:
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"]).rpartition(":")[2]

    async def complete(self, *names: str) -> None:
        """What Kubernetes does: all pods are of the newest template and available, since now."""
        since = datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for name in names or self.names:
            live = await self.deployment(name)
            n = live["spec"]["replicas"]
            counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), n)
            progressing = {
                "type": "Progressing",
                "status": "True",
                "reason": "NewReplicaSetAvailable",
                "lastUpdateTime": since,
            }
            status = {**counts, "observedGeneration": live["metadata"]["generation"], "conditions": [progressing]}
            path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}/status"
            assert self.api.request("PATCH", path, {"status": status}, content_type=STATUS).status_code == 200

    async def keep(self, deployment: Object) -> None:
        """The ReplicaSet that Kubernetes keeps of a Deployment's earlier pods."""
        meta, spec = deployment["metadata"], deployment["spec"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        body = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": f"{meta['name']}-1", "labels": meta["labels"], "ownerReferences": [owner]},
            "spec": {"replicas": 0, "selector": spec["selector"], "template": spec["template"]},
        }
        path = f"/apis/apps/v1/namespaces/{self.namespace}/replicasets"
        assert self.api.request("POST", path, body).status_code == 201

    async def say(self, name: str, *, reason: str = "", **more: Any) -> None:
        """What a pass would have written: the spec is served, and perhaps the workers fail."""
        live = await self.client.get(SERVICE, self.namespace, name)
        assert live is not None
        failing = {
            "type": "WorkersUpdating",
            "status": "True",
            "reason": reason,
            "message": "it crashes",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        status = {
            "settledGeneration": live["metadata"]["generation"],
            "workers": {"desired": 2, "ready": 2},
            **more,
            "conditions": [failing] if reason else [],
        }
        path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{self.namespace}/earlyexitservices/{name}/status"
        answer = self.api.request("PATCH", path, {"status": status}, content_type=STATUS)
        assert answer.status_code == 200, answer.text

    def edit(self, name: str, **spec: Any) -> None:
        path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{self.namespace}/earlyexitservices/{name}"
        assert self.api.request("PATCH", path, {"spec": spec}, content_type=STATUS).status_code == 200

    def classed(self, **spec: Any) -> None:
        """Make or change the class that the services may ask for."""
        body = {
            "apiVersion": "earlyexit.dev/v1alpha1",
            "kind": "WorkerClass",
            "metadata": {"name": self.namespace},
            "spec": spec,
        }
        assert self.api.apply(body, manager="administrator").status_code in (200, 201)

    async def versions(self) -> dict[str, str]:
        found = [obj for kind in (DEPLOYMENT, SERVICE) for obj in (await self.client.list(kind, self.namespace))[0]]
        return {f"{obj['kind']}/{obj['metadata']['name']}": obj["metadata"]["resourceVersion"] for obj in found}


@pytest.fixture
def services(api: Any, manifests: Any, tools: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(n: int) -> AsyncIterator[Services]:
        namespace = f"turns-{os.urandom(4).hex()}"
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, keep=True)
        names = [f"s{i}" for i in range(n)]
        for name in names:
            manifest = manifests.service(name, replicas=2)
            manifest["metadata"]["namespace"] = namespace
            assert api.create(manifest, keep=True).status_code == 201
        async with tools.client_of(api.kubeconfig) as client:
            made = Services(api, namespace, client, names)
            made.operator("offramp/worker:1")
            assert await made.look(rounds=1) == ["1"] * n, "what is new waits for nobody"
            await made.complete()
            for name in names:
                await made.say(name)
            yield made

    return make


def test_one_service_takes_a_new_image_and_the_others_follow_as_it_is_proven(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(5) as s:
            s.operator("offramp/worker:2")
            assert await s.look() == ["2", "1", "1", "1", "1"]
            assert [s.turns[name].reason for name in s.names[1:]] == ["WaitingForTurn"] * 4
            assert s.turns["s0"] is None
            await s.complete("s0")
            assert await s.look() == ["2", "1", "1", "1", "1"], "available is not proven"
            assert s.platform.take_turns() == {ServiceKey(s.namespace, "s0")}
            s.now += PROVEN_SECONDS
            assert s.platform.take_turns() == {ServiceKey(s.namespace, "s1")}, "whose turn it is, is woken"
            assert s.platform.take_turns() == frozenset()
            assert await s.look() == ["2", "2", "1", "1", "1"]
            s.operator("offramp/worker:2")
            assert await s.look() == ["2", "2", "1", "1", "1"], "another process goes on where this one was"
            await s.complete("s1")
            s.now += PROVEN_SECONDS
            assert await s.look() == ["2", "2", "2", "2", "1"], "two are proven, so two may be under way"

    tools.run(story())


def test_a_failure_stops_it_says_why_and_is_the_first_to_take_what_mends_it(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(4) as s:
            s.operator("offramp/worker:2")
            await s.look()
            await s.say("s0", reason="NewWorkersFail")
            s.now += 10 * PROVEN_SECONDS
            assert await s.look() == ["2", "1", "1", "1"]
            told = s.turns["s1"]
            assert told.reason == "FleetUpdateStopped"
            assert f"{s.namespace}/s0 (it crashes)" in told.message and "spec.worker.image" in told.message
            s.operator("offramp/worker:2")
            assert await s.look() == ["2", "1", "1", "1"] and s.turns["s3"] == told, "also for another process"

            s.operator("offramp/worker:3")
            assert await s.look() == ["3", "1", "1", "1"]
            await s.say("s0")
            await s.complete("s0")
            s.now += PROVEN_SECONDS
            assert await s.look() == ["3", "3", "1", "1"]

    tools.run(story())


def test_a_service_that_went_back_to_the_old_image_stops_the_fleet_too(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(3) as s:
            for name in s.names:
                s.edit(name, updatePolicy={"type": "Recreate"})
                await s.say(name)
            before = await s.deployment("s0")
            s.operator("offramp/worker:2")
            assert await s.look() == ["2", "1", "1"]
            taken = (await s.deployment("s0"))["spec"]["template"]
            mark, earlier = (
                t["metadata"]["annotations"]["earlyexit.dev/template"] for t in (taken, before["spec"]["template"])
            )
            await s.keep(before)
            await s.say("s0", reason="RecreateFailed", update={"strategy": "Return", "asked": mark, "serving": earlier})
            s.now += 10 * PROVEN_SECONDS
            assert await s.look() == ["1", "1", "1"]
            assert s.turns["s1"].reason == "FleetUpdateStopped" and s.turns["s0"] is None

    tools.run(story())


def test_what_a_user_changes_is_made_at_once_with_the_image_that_the_others_have(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(3) as s:
            s.operator("offramp/worker:2")
            await s.look()
            await s.say("s0", reason="NewWorkersFail")
            s.edit("s2", worker={"env": [{"name": "MINE", "value": "1"}]}, replicas=3)
            assert await s.look() == ["2", "1", "1"]
            live = await s.deployment("s2")
            assert {"name": "MINE", "value": "1"} in live["spec"]["template"]["spec"]["containers"][0]["env"]
            assert live["spec"]["replicas"] == 3
            s.edit("s1", worker={"image": "offramp/worker:mine"})
            assert await s.look() == ["2", "mine", "1"], "and an image of one's own is the way around it"

    tools.run(story())


def test_what_another_release_makes_of_a_spec_waits_for_its_turn_as_well(
    services: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with services(3) as s:
            before = [(await s.deployment(name))["metadata"]["generation"] for name in s.names]
            monkeypatch.setattr("offramp_operator.kube.manifests.DRAIN_SECONDS", 7)
            s.operator("offramp/worker:1")
            await s.look()
            after = [(await s.deployment(name))["metadata"]["generation"] for name in s.names]
            assert sum(a != b for a, b in zip(after, before, strict=True)) == 1

    tools.run(story())


def test_a_restart_in_steady_state_writes_nothing_and_holds_nobody(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(4) as s:
            before = await s.versions()
            s.operator("offramp/worker:1")
            await s.look()
            assert await s.versions() == before and set(s.turns.values()) == {None}

    tools.run(story())


def test_a_changed_class_goes_from_service_to_service_as_a_new_image_does(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(3) as s:
            s.classed(image="offramp/worker:gpu1", nodeSelector={"accelerator": "l4"})
            for name in s.names:
                s.edit(name, worker={"className": s.namespace})
            assert await s.look() == ["gpu1"] * 3, "what users ask for waits for nobody"
            await s.complete()
            for name in s.names:
                await s.say(name)
            s.now += PROVEN_SECONDS
            s.classed(image="offramp/worker:gpu2", nodeSelector={"accelerator": "l4"})
            assert await s.look() == ["gpu2", "gpu1", "gpu1"]
            assert {name: turn.reason for name, turn in s.turns.items() if turn} == dict.fromkeys(
                ("s1", "s2"), "WaitingForTurn"
            )
            await s.say("s0", reason="NewWorkersFail")
            s.now += PROVEN_SECONDS
            assert await s.look() == ["gpu2", "gpu1", "gpu1"], "what fails at one goes no further"
            s.classed(image="offramp/worker:gpu2", nodeSelector={"accelerator": "l5"})
            await s.look()
            selectors = [(await s.deployment(name))["spec"]["template"]["spec"]["nodeSelector"] for name in s.names]
            assert [selector["accelerator"] for selector in selectors] == ["l5", "l4", "l4"], (
                "the one that fails takes what mends it"
            )

    tools.run(story())


def test_a_class_that_is_gone_changes_nothing_that_serves(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(1) as s:
            s.classed(image="offramp/worker:gpu1", serviceAccountName="models")
            s.edit("s0", worker={"className": s.namespace})
            assert await s.look() == ["gpu1"]
            before, key = await s.deployment("s0"), ServiceKey(s.namespace, "s0")
            assert before["spec"]["template"]["spec"]["serviceAccountName"] == "models"
            await s.say("s0")
            changes = s.platform.changes(key)
            s.api.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/workerclasses/{s.namespace}")
            assert await s.look() == ["gpu1"]
            assert s.platform.changes(key) > changes, "the service is looked at again"
            gathered = await s.platform.gather(key)
            assert gathered.class_trouble.reason == "WorkerClassNotFound"
            (refused,) = gathered.workers
            assert (refused.ready, refused.failure_reason) == (False, "WorkerClassNotFound")
            assert gathered.template == before["spec"]["template"]["metadata"]["annotations"]["earlyexit.dev/template"]
            s.edit("s0", replicas=5, worker={"className": f"{s.namespace}-2"})
            await s.look()
            after = await s.deployment("s0")
            assert after["metadata"]["generation"] == before["metadata"]["generation"]
            s.classed(image="offramp/worker:gpu2")
            s.edit("s0", worker={"className": s.namespace})
            assert await s.look() == ["gpu2"]
            assert (await s.deployment("s0"))["spec"]["replicas"] == 5

    tools.run(story())


def test_a_class_wakes_those_who_ask_for_it_and_nobody_else(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(3) as s:
            s.edit("s1", worker={"className": s.namespace})
            woken: list[ServiceKey] = []
            feed = Feed(s.cache, woken.append)
            await feed.relist(s.client, (s.namespace,))
            woken.clear()
            s.classed(image="offramp/worker:gpu1")
            await feed.relist(s.client, (s.namespace,))
            assert woken == [ServiceKey(s.namespace, "s1")]

    tools.run(story())


def test_an_operator_that_may_not_read_classes_says_so_and_changes_nothing(services: Any, tools: Any) -> None:
    async def story() -> None:
        async with services(2) as s:
            s.classed(image="offramp/worker:gpu1")
            s.edit("s1", worker={"className": s.namespace})
            before = await s.versions()
            read = s.client.pages

            def limited(kind: Any, namespace: Any) -> Any:
                if kind is WORKER_CLASS:
                    raise ApiError(403, "Forbidden", "workerclasses is forbidden")
                return read(kind, namespace)

            s.client.pages = limited
            assert await s.look() == ["1", "1"]
            assert await s.versions() == before
            for name, expected in (("s0", None), ("s1", "WorkerClassesUnreadable")):
                trouble = (await s.platform.gather(ServiceKey(s.namespace, name))).class_trouble
                assert (None if trouble is None else trouble.reason) == expected
            s.client.pages = read
            assert await s.look() == ["1", "gpu1"], "once it may, it goes on"

    tools.run(story())
