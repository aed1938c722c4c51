"""The Kubernetes platform against a real API server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import yaml

from offramp_core.control.objects import (
    ArmTally,
    BothArms,
    Condition,
    ConfigStatus,
    GateStatus,
    Ledger,
    Observed,
    PinStatus,
    Prediction,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    ServiceStatus,
    StepRecord,
    TuningStatus,
    WorkersStatus,
)  # fmt: skip
from offramp_core.control.snapshot import Event, NewConfig, NewRollout
from offramp_core.errors import InvalidSpecError
from offramp_core.evidence.detector import DetectorState
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiUnavailableError, InvalidObjectError, KubeClient
from offramp_operator.kube.kinds import (
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    WATCHED,
    Object,
)  # fmt: skip
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform import KubePlatform, NameTakenError
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.platform import ConflictError, Gathered, ServiceKey
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

DIGEST_A, DIGEST_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
PLAN = exits_off_plan(backbone_digest=DIGEST_A, ramp_set_digest=DIGEST_B)
CONFIG_NAME = PLAN.name("digits")
KEY = SigningKey.from_seed(b"k" * 32)
CHILDREN = (DEPLOYMENT, NETWORK_SERVICE, DISRUPTION_BUDGET)

SERVICE_STATUS = ServiceStatus(
    observed_generation=1, settled_generation=1, phase="Ready", message="serving", stable_config=CONFIG_NAME,
    candidate_config="digits-abcdef0123", url="http://digits.default.svc", rollout=RolloutSummary("digits-1", "Step 1/3 5%"),
    workers=WorkersStatus(2, 2, 1, "2/2", ("w0",)), observed=Observed("12ms", "31ms", "99.4%", "38%", "31%", 1000, 1_700_000_000.25),
    tuning=TuningStatus(state="CollectingLabels", message="400 of 900", tests_run=3, consumed_through_at=1_700_000_000.5,
                        records_since_at=1_700_000_100.0, tuned_for="0.02/0.95", next_attempt_at=1_700_000_200.0, labels=400,
                        labels_needed=900, failures=1),
    pin=PinStatus(1, "Accepted", "fine"),
    conditions=(Condition("Ready", "True", "Serving", "serving", 1, 1_700_000_000.123456),),
)  # fmt: skip
TALLY = ArmTally(900, 90, 80, 3, 100, 95, 7, 1)
ROLLOUT_STATUS = RolloutStatus(
    phase="Progressing", step=1, weight=25, verdict="Fine", outcome="RolledBack", objective="0.02", reason="Step", message="m",
    started_at=1_700_000_000.5, step_started_at=1_700_000_001.5, phase_started_at=1_700_000_002.5, finished_at=1_700_000_003.5,
    audit_rate=0.25, slow_seconds={"1": 0.01, "32": 0.125}, slow_needed=7, restarts={"uid-1": 2},
    gates=(GateStatus("accuracy", "Undecided", 10, 1, 0.02, -0.5, 4.5, 90, "wait"),),
    ledger=Ledger(3, {"boot": BothArms(TALLY, TALLY)}, BothArms(TALLY, ArmTally()), ("bad",)),
    history=(StepRecord(5, 100, 1, 1_700_000_001.25),), watch=DetectorState((0.5, 1e300), 12),
)  # fmt: skip
CONFIG_STATUS = ConfigStatus(
    "Tuned", "Certified", ({"budget": 0.02, "n": 900, "k": 4},), Prediction(0.25, 0.015), 2, 1_700_000_000.5, "good"
)


def _filled(status: Any) -> Any:
    """Give fields that were added later a value, so that a status field which the CRD lacks cannot go unnoticed."""
    values = {}
    for f in dataclasses.fields(status):
        if getattr(status, f.name) == f.default:
            values[f.name] = {int: 5, float: 0.5, str: "x"}[type(f.default)]
    return dataclasses.replace(status, **values)


@dataclass
class Told:
    """What the platform told about rollouts."""

    seen: list[tuple[Rollout, ...]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    gone: list[ServiceKey] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)

    def rollouts_seen(self, key: ServiceKey, rollouts: tuple[Rollout, ...]) -> None:
        self.seen.append(rollouts)

    def quarantined_seen(self, key: ServiceKey, workers: int) -> None:
        self.quarantined.append(workers)

    def rollout_finished(self, key: ServiceKey, verdict: str) -> None:
        self.finished.append(verdict)

    def service_gone(self, key: ServiceKey) -> None:
        self.gone.append(key)


@dataclass
class World:
    """A service on the API server, and an operator that sees it through lists alone."""

    api: Any
    namespace: str
    manifest: Object
    client: KubeClient
    cache: ObjectCache
    platform: KubePlatform
    told: Told
    time: float = 1_700_000_000.0

    @property
    def path(self) -> str:
        return f"/apis/earlyexit.dev/v1alpha1/namespaces/{self.namespace}/earlyexitservices/digits"

    @property
    def key(self) -> ServiceKey:
        return ServiceKey(self.namespace, "digits")

    async def look(self) -> None:
        """What the watches would have delivered by now."""
        await Feed(self.cache, lambda _: None).relist(self.client, (self.namespace,))

    async def gathered(self) -> Gathered:
        found = await self.platform.gather(self.key)
        assert found is not None
        return found

    async def ensure(self) -> None:
        service = (await self.gathered()).service
        await self.platform.ensure_workers(service, KEY.identity(service.uid))

    async def live(self, kind: Any, name: str = "digits") -> Object:
        found = await self.client.get(kind, self.namespace, name)
        assert found is not None, f"{kind} {name} does not exist"
        return found

    async def versions(self) -> dict[str, str]:
        """Resource versions of everything the operator may write in the namespace."""
        objects = [obj for kind in WATCHED for obj in (await self.client.list(kind, self.namespace))[0]]
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in objects}


@pytest.fixture
def world(api: Any, namespace: str, manifests: Any, tools: Any) -> Callable[..., Any]:
    """``async with world() as w``: the service is applied as a user would, server-side."""

    @asynccontextmanager
    async def make(**spec: Any) -> AsyncIterator[World]:
        manifest = manifests.service(**spec)
        manifest["metadata"] |= {"namespace": namespace, "labels": {"team": "vision"}, "annotations": {"note": "mine"}}
        answer = api.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifest))
        assert answer.returncode == 0, answer.stderr
        async with tools.client_of(api.kubeconfig) as client:
            cache, told = ObjectCache(), Told()
            result = World(api, namespace, manifest, client, cache, None, told)  # type: ignore[arg-type]
            result.platform = KubePlatform(
                client, cache, workers=WorkerSettings("offramp/worker:1"), instance="test", observer=told,
                clock=lambda: result.time, monotonic=lambda: result.time,
            )  # fmt: skip
            await result.look()
            yield result

    return make


def _document(service_uid: str, epoch: int) -> PlanDocument:
    return PlanDocument("digits", service_uid, epoch, ArmPlan(PLAN.to_mapping(), 0.5), None, 0, "salt", 0.02)


# --- statuses --------------------------------------------------------------------------------------


def test_every_field_of_every_status_survives_the_api_server(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            rollout_status = _filled(ROLLOUT_STATUS)
            tuning = _filled(dataclasses.replace(SERVICE_STATUS.tuning, audit="Quiet"))
            service_status = dataclasses.replace(SERVICE_STATUS, tuning=tuning)
            await w.platform.create_config(service, NewConfig(CONFIG_NAME, PLAN, CONFIG_STATUS))
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            await w.platform.write_rollout_status(service, "digits-1", rollout_status)
            await w.platform.write_service_status(service, service_status)
            fresh = ObjectCache()
            await Feed(fresh, lambda _: None).relist(w.client, (w.namespace,))
            reader = KubePlatform(w.client, fresh, workers=WorkerSettings("x"), instance="t", observer=Told())
            found = await reader.gather(w.key)
            assert found is not None
            assert found.service.status == service_status
            assert found.configs[CONFIG_NAME].status == CONFIG_STATUS
            assert found.configs[CONFIG_NAME].plan == PLAN
            (rollout,) = found.rollouts
            assert rollout.status == rollout_status
            assert (rollout.from_config, rollout.to_config, rollout.cause) == (
                CONFIG_NAME,
                "digits-abcdef0123",
                "Tuned",
            )
            assert found.url == f"http://digits.{w.namespace}.svc"

    tools.run(story())


def test_the_operator_is_seen_under_status_only_and_the_users_manifest_never_differs(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.write_service_status(service, SERVICE_STATUS)
            managed = (await w.live(SERVICE))["metadata"]["managedFields"]
            ours = [entry for entry in managed if entry["manager"] == "offramp-operator"]
            assert [(e["subresource"], e["operation"], list(e["fieldsV1"])) for e in ours] == [
                ("status", "Apply", ["f:status"])
            ]
            difference = w.api.kubectl("diff", "--server-side", "-f", "-", stdin=yaml.safe_dump(w.manifest))
            assert difference.returncode == 0, difference.stdout

    tools.run(story())


def test_a_field_that_falls_silent_is_removed(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.write_service_status(service, SERVICE_STATUS)
            await w.platform.write_service_status(service, ServiceStatus(observed_generation=1, url="http://x"))
            assert (await w.live(SERVICE))["status"] == {"observedGeneration": 1, "url": "http://x"}

    tools.run(story())


def test_a_status_decided_on_old_reads_is_refused(world: Any, tools: Any) -> None:
    """Somebody pauses the rollout after it was gathered; an old leader is caught in the same way."""

    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            service = (await w.gathered()).service
            pause = w.api.kubectl(
                "patch", "ramprollout", "digits-1", "-n", w.namespace, "--type=merge", "-p", '{"spec":{"paused":true}}'
            )
            assert pause.returncode == 0, pause.stderr
            with pytest.raises(ConflictError):
                await w.platform.write_rollout_status(service, "digits-1", ROLLOUT_STATUS)
            await w.look()
            # The watch has delivered it, but this pass decided without it.
            with pytest.raises(ConflictError):
                await w.platform.write_rollout_status(service, "digits-1", ROLLOUT_STATUS)
            found = await w.gathered()
            assert found.rollouts[0].paused
            await w.platform.write_rollout_status(found.service, "digits-1", ROLLOUT_STATUS)
            assert (await w.gathered()).rollouts[0].paused, "what people wrote stays"

    tools.run(story())


def test_a_finished_rollout_is_counted_once(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            done = dataclasses.replace(ROLLOUT_STATUS, phase="RolledBack", verdict="RolledBack")
            await w.platform.write_rollout_status(service, "digits-1", ROLLOUT_STATUS)
            await w.platform.write_rollout_status(service, "digits-1", done)
            await w.platform.write_rollout_status(service, "digits-1", dataclasses.replace(done, message="again"))
            assert w.told.finished == ["RolledBack"]

    tools.run(story())


# --- a steady state writes nothing -----------------------------------------------------------------


def test_a_steady_state_writes_nothing(world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            document = _document(service.uid, 1)

            async def everything() -> None:
                now = (await w.gathered()).service
                await w.platform.ensure_workers(now, KEY.identity(now.uid))
                await w.platform.create_config(now, NewConfig(CONFIG_NAME, PLAN, CONFIG_STATUS))
                await w.platform.write_config_status(now, CONFIG_NAME, CONFIG_STATUS)
                await w.platform.write_service_status(now, SERVICE_STATUS)

            await everything()
            await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            before = await w.versions()
            calls: list[str] = []
            original = w.client._write

            async def counting(verb: str, *arguments: Any, **more: Any) -> Any:
                calls.append(verb)
                return await original(verb, *arguments, **more)

            monkeypatch.setattr(w.client, "_write", counting)
            await everything()
            await w.look()
            await everything()
            assert calls == [], "the second and third time nothing was even sent"
            # A new process remembers nothing: it applies once, and the API server finds nothing to change.
            restarted = KubePlatform(
                w.client, w.cache, workers=WorkerSettings("offramp/worker:1"), instance="t", observer=Told()
            )
            found = await restarted.gather(w.key)
            assert found is not None
            await restarted.ensure_workers(found.service, KEY.identity(found.service.uid))
            assert len(calls) == len(CHILDREN)
            assert await w.versions() == before

    tools.run(story())


def test_what_somebody_changes_or_deletes_of_the_workers_is_restored(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=2) as w:
            await w.ensure()
            edits = {
                DEPLOYMENT: {"spec": {"replicas": 7}},
                NETWORK_SERVICE: {"spec": {"selector": {"app.kubernetes.io/instance": "other"}}},
                DISRUPTION_BUDGET: {"metadata": {"labels": {"earlyexit.dev/service": "other"}}},
            }
            before = {kind: await w.live(kind) for kind in CHILDREN}
            for kind, edit in edits.items():
                answer = w.api.merge(before[kind], edit)
                assert answer.status_code == 200, answer.text
            await w.look()
            await w.ensure()
            for kind in CHILDREN:
                after = await w.live(kind)
                assert after["spec"] == before[kind]["spec"]
                assert after["metadata"]["labels"] == before[kind]["metadata"]["labels"]
            w.api.request("DELETE", f"/api/v1/namespaces/{w.namespace}/services/digits")
            await w.look()
            await w.ensure()
            assert (await w.live(NETWORK_SERVICE))["metadata"]["uid"] != before[NETWORK_SERVICE]["metadata"]["uid"]

    tools.run(story())


def test_a_child_that_lost_our_label_is_found_again(world: Any, tools: Any) -> None:
    """Watches no longer see it then, which must not be taken for a deletion."""

    async def story() -> None:
        async with world() as w:
            await w.ensure()
            service = (await w.gathered()).service
            document = _document(service.uid, 1)
            await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            unlabel = {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}
            for kind, name in ((DEPLOYMENT, "digits"), (CONFIG_MAP, "digits-plan")):
                live = await w.live(kind, name)
                assert w.api.merge(live, unlabel).status_code == 200
            await w.look()
            found = await w.gathered()
            assert found.published is None
            await w.ensure()
            with pytest.raises(ConflictError):
                await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            await w.look()
            assert (await w.gathered()).published == document
            labels = (await w.live(DEPLOYMENT))["metadata"]["labels"]
            assert labels["app.kubernetes.io/managed-by"] == "offramp"

    tools.run(story())


# --- a spec that cannot be carried out ---------------------------------------------------------------


def test_a_bundle_that_is_a_path_is_told_and_the_old_workers_stay(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            await w.ensure()
            before = await w.live(DEPLOYMENT)
            answer = w.api.merge(await w.live(SERVICE), {"spec": {"model": {"uri": "file:///models/digits"}}})
            assert answer.status_code == 200, answer.text
            await w.look()
            (worker,) = (await w.gathered()).workers
            assert (worker.ready, worker.failure_reason) == (False, "InvalidModel")
            assert "spec.model.uri" in worker.failure and "oci://" in worker.failure
            await w.ensure()
            assert (await w.live(DEPLOYMENT))["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]

    tools.run(story())


def test_a_deployment_the_api_server_refuses_is_told_until_the_spec_changes(world: Any, tools: Any) -> None:
    async def story() -> None:
        affinity: Object = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
        }
        async with world(worker={"affinity": affinity}) as w:
            assert (await w.gathered()).workers == ()
            await w.ensure()
            (worker,) = (await w.gathered()).workers
            assert worker.failure_reason == "InvalidSpec" and "nodeSelectorTerms" in worker.failure
            answer = w.api.merge(await w.live(SERVICE), {"spec": {"worker": {"affinity": None}}})
            assert answer.status_code == 200, answer.text
            await w.look()
            assert (await w.gathered()).workers == (), "the message is about the generation before"
            await w.ensure()
            await w.live(DEPLOYMENT)

    tools.run(story())


def test_an_object_that_belongs_to_somebody_else_is_never_taken_over(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "digits", "namespace": w.namespace},
                       "spec": {"selector": {"app": "bank"}, "ports": [{"port": 80}]}}  # fmt: skip
            plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "digits-plan", "namespace": w.namespace},
                    "data": {"mine": "yes"}}  # fmt: skip
            for obj in (foreign, plan):
                assert w.api.create(obj, keep=True).status_code == 201
            await w.ensure()
            (worker,) = (await w.gathered()).workers
            assert worker.failure_reason == "NameTaken" and "does not belong" in worker.failure
            assert (await w.live(NETWORK_SERVICE))["spec"]["selector"] == {"app": "bank"}
            service = (await w.gathered()).service
            document = _document(service.uid, 1)
            with pytest.raises(NameTakenError):
                await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            assert (await w.live(CONFIG_MAP, "digits-plan"))["data"] == {"mine": "yes"}
            w.api.request("DELETE", f"/api/v1/namespaces/{w.namespace}/services/digits")
            w.time += 60
            await w.ensure()
            assert (await w.gathered()).workers == ()

    tools.run(story())


def test_children_of_an_earlier_service_of_the_same_name_are_awaited_and_not_adopted(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            await w.ensure()
            w.api.request("DELETE", w.path)
            assert w.api.create(w.manifest, keep=True).status_code == 201
            await w.look()
            with pytest.raises(ConflictError, match="earlier service"):
                await w.ensure()
            w.api.request("DELETE", f"/api/v1/namespaces/{w.namespace}/services/digits")
            await w.look()
            with pytest.raises(ConflictError, match="PodDisruptionBudget"):
                await w.ensure()
            live = await w.live(NETWORK_SERVICE)
            assert live["metadata"]["ownerReferences"][0]["uid"] == (await w.live(SERVICE))["metadata"]["uid"]

    tools.run(story())


def test_a_spec_that_only_the_operator_refuses_is_told_and_nothing_else_changes(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schema should refuse first; if it is older than the operator, people must still be told."""

    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.write_service_status(service, SERVICE_STATUS)

            def refuse(value: Any) -> Any:
                raise InvalidSpecError("spec.ramps.maxActive", "must be smaller")

            monkeypatch.setattr("offramp_operator.shell.manifests.parse_spec", refuse)
            for _ in range(2):
                with pytest.raises(InvalidSpecError):
                    await w.platform.gather(w.key)
            status = (await w.live(SERVICE))["status"]
            told = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
            assert told == {"Ready": ("True", "Serving"), "Stalled": ("True", "InvalidSpec")}
            assert status["tuning"]["testsRun"] == SERVICE_STATUS.tuning.tests_run
            version = (await w.live(SERVICE))["metadata"]["resourceVersion"]
            w.time += 30
            with pytest.raises(InvalidSpecError):
                await w.platform.gather(w.key)
            assert (await w.live(SERVICE))["metadata"]["resourceVersion"] == version
            monkeypatch.undo()
            await w.gathered()

    tools.run(story())


# --- plan ------------------------------------------------------------------------------------------


def test_a_plan_is_published_only_on_the_epoch_it_was_decided_on(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            first, second, third = (_document(service.uid, epoch) for epoch in (1, 2, 3))
            await w.platform.publish(service, first, KEY.sign(first), previous_epoch=0)
            assert (await w.gathered()).published == first, "our own write is seen before the watch tells"
            old_cache = ObjectCache()
            await Feed(old_cache, lambda _: None).relist(w.client, (w.namespace,))
            old_leader = KubePlatform(w.client, old_cache, workers=WorkerSettings("x"), instance="old", observer=Told())
            await w.platform.publish(service, second, KEY.sign(second), previous_epoch=1)
            with pytest.raises(ConflictError):
                await w.platform.publish(service, third, KEY.sign(third), previous_epoch=1)
            with pytest.raises(ConflictError):
                await old_leader.publish(service, third, KEY.sign(third), previous_epoch=1)
            stored = await w.live(CONFIG_MAP, "digits-plan")
            assert stored["data"]["epoch"] == "2"
            assert json.loads(stored["data"]["plan.json"]) == msgspec.to_builtins(KEY.sign(second))

    tools.run(story())


def test_two_first_plans_cannot_both_be_published(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            other = KubePlatform(
                w.client, ObjectCache(), workers=WorkerSettings("x"), instance="other", observer=Told()
            )
            document = _document(service.uid, 1)
            await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            with pytest.raises(ConflictError):
                await other.publish(service, document, KEY.sign(document), previous_epoch=0)

    tools.run(story())


def test_a_plan_that_somebody_garbled_is_published_anew(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            document = _document(service.uid, 1)
            await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            w.api.merge(await w.live(CONFIG_MAP, "digits-plan"), {"data": {"plan.json": "{}"}})
            await w.look()
            assert (await w.gathered()).published is None
            await w.platform.publish(service, document, KEY.sign(document), previous_epoch=0)
            assert (await w.gathered()).published == document

    tools.run(story())


def test_a_rollout_of_an_earlier_service_of_the_same_name_is_never_taken_over(world: Any, tools: Any) -> None:
    """Its phase and evidence are about workers that are gone; the new service's first attempt waits until it is collected."""

    async def story() -> None:
        async with world() as w:
            new = NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            before = (await w.gathered()).service
            await w.platform.create_rollout(before, new)
            await w.platform.write_rollout_status(before, "digits-1", ROLLOUT_STATUS)
            w.api.request("DELETE", w.path)
            assert w.api.create(w.manifest, keep=True).status_code == 201
            await w.look()
            gathered = await w.gathered()
            assert gathered.service.uid != before.uid and not gathered.rollouts
            with pytest.raises(ConflictError):
                await w.platform.create_rollout(gathered.service, new)
            assert not (await w.gathered()).rollouts
            w.api.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/{w.namespace}/ramprollouts/digits-1")
            await w.look()
            await w.platform.create_rollout((await w.gathered()).service, new)
            (made,) = (await w.gathered()).rollouts
            assert made.status == RolloutStatus()

    tools.run(story())


def test_a_rollout_that_a_late_pass_makes_again_keeps_its_status(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            new = NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            service = (await w.gathered()).service
            await w.platform.create_rollout(service, new)
            await w.platform.write_rollout_status(service, "digits-1", ROLLOUT_STATUS)
            with pytest.raises(ConflictError):
                await w.platform.create_rollout(service, new)
            (kept,) = (await w.gathered()).rollouts
            assert kept.status == ROLLOUT_STATUS

    tools.run(story())


# --- configs, rollouts, pods, events -----------------------------------------------------------------


def test_a_config_that_was_made_without_its_status_gets_it_and_one_that_has_it_keeps_it(world: Any, tools: Any) -> None:
    """The operator may die between the two writes; a plan must not lose its certificate by that."""

    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform._create(service, CONFIG, CONFIG_NAME, PLAN.to_mapping())
            await w.platform.create_config(service, NewConfig(CONFIG_NAME, PLAN, CONFIG_STATUS))
            assert (await w.gathered()).configs[CONFIG_NAME].status == CONFIG_STATUS
            await w.platform.create_config(service, NewConfig(CONFIG_NAME, PLAN, ConfigStatus()))
            assert (await w.gathered()).configs[CONFIG_NAME].status == CONFIG_STATUS

    tools.run(story())


def test_what_is_deleted_is_gone_for_the_next_pass_at_once(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.create_config(service, NewConfig(CONFIG_NAME, PLAN, CONFIG_STATUS))
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            await w.platform.delete_config(service, CONFIG_NAME)
            await w.platform.delete_rollout(service, "digits-1")
            await w.platform.delete_rollout(service, "digits-1")
            found = await w.gathered()
            assert (found.configs, found.rollouts) == ({}, ())
            assert await w.client.get(CONFIG, w.namespace, CONFIG_NAME) is None
            assert await w.client.get(ROLLOUT, w.namespace, "digits-1") is None

    tools.run(story())


def test_a_service_that_is_gone_or_going_is_left_alone(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            held = {"metadata": {"finalizers": ["example.com/hold"]}}
            w.api.merge(await w.live(SERVICE), held)
            w.api.kubectl("delete", "ees", "digits", "-n", w.namespace, "--wait=false")
            await w.look()
            assert await w.platform.gather(w.key) is None
            w.api.merge(await w.live(SERVICE), {"metadata": {"finalizers": None}})
            await w.look()
            assert await w.platform.gather(w.key) is None
            assert w.told.gone == [w.key, w.key]

    tools.run(story())


def test_pods_are_counted_by_owner_and_not_by_label(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            await w.ensure()
            deployment = await w.live(DEPLOYMENT)
            replica_set = await _make_replica_set(w, deployment, "digits-1")
            real = await _make_pod(w, deployment, "real", owner=replica_set)
            await _make_pod(w, deployment, "impostor", owner=None)
            await w.look()
            (worker,) = (await w.gathered()).workers
            assert (worker.name, worker.uid) == ("real", real["metadata"]["uid"])
            assert (worker.ready, worker.current, worker.admin_url) == (True, True, "http://10.0.0.9:8081")
            answer = w.api.merge(await w.live(SERVICE), {"spec": {"model": {"uri": "oci://offramp/digits:2"}}})
            assert answer.status_code == 200
            await w.look()
            (worker,) = (await w.gathered()).workers
            assert not worker.current, "known before the Deployment has been told"

    tools.run(story())


async def _make_replica_set(w: World, deployment: Object, name: str) -> Object:
    template = deployment["spec"]["template"]
    body = {
        "apiVersion": "apps/v1", "kind": "ReplicaSet",
        "metadata": {
            "name": name, "namespace": w.namespace, "labels": template["metadata"]["labels"],
            "annotations": {"deployment.kubernetes.io/revision": "1"}, "ownerReferences": [_owner(deployment)],
        },
        "spec": {"replicas": 0, "selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
    }  # fmt: skip
    return await w.client.create(REPLICA_SET, body)


async def _make_pod(w: World, deployment: Object, name: str, *, owner: Object | None) -> Object:
    template = deployment["spec"]["template"]
    body = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": template["metadata"] | {"name": name, "namespace": w.namespace, **({"ownerReferences": [_owner(owner)]} if owner else {})},
        "spec": template["spec"],
    }  # fmt: skip
    created = await w.client.create(POD, body)
    status = {
        "phase": "Running", "podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }  # fmt: skip
    answer = w.api.merge(created, {"status": status}, subresource="status")
    assert answer.status_code == 200, answer.text
    return created


def _owner(obj: Object) -> Object:
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "name": obj["metadata"]["name"],
        "uid": obj["metadata"]["uid"],
        "controller": True,
    }


def test_transitions_are_told_as_events_of_the_service(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.emit(service, Event("CanaryStarted", "digits-1 begins"))
            await w.platform.emit(service, Event("GateRejected", "x" * 5000, warning=True))
            items = w.api.request("GET", f"/api/v1/namespaces/{w.namespace}/events").json()["items"]
            told = {e["reason"]: (e["type"], e["involvedObject"]["uid"], len(e["message"])) for e in items}
            assert told == {
                "CanaryStarted": ("Normal", service.uid, len("digits-1 begins")),
                "GateRejected": ("Warning", service.uid, 1024),
            }
            assert "CanaryStarted" in w.api.kubectl("describe", "ees", "digits", "-n", w.namespace).stdout

    tools.run(story())


# --- the client --------------------------------------------------------------------------------------


def test_a_status_field_the_schema_does_not_know_is_refused_and_not_dropped(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            body = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "EarlyExitService",
                    "metadata": {"name": "digits", "namespace": w.namespace}, "status": {"evidence": 1}}  # fmt: skip
            with pytest.raises(Exception, match="evidence"):
                await w.client.apply(SERVICE, body, subresource="status")
            bad = {**body, "status": {"observedGeneration": -1}}
            with pytest.raises(InvalidObjectError):
                await w.client.apply(SERVICE, bad, subresource="status")

    tools.run(story())


def test_a_process_that_lost_the_leadership_writes_nothing(world: Any, api: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w, tools.client_of(api.kubeconfig, may_write=lambda: False) as deposed:
            platform = KubePlatform(deposed, w.cache, workers=WorkerSettings("x"), instance="t", observer=Told())
            service = (await w.gathered()).service
            with pytest.raises(ApiUnavailableError, match="leadership"):
                await platform.ensure_workers(service, KEY.identity(service.uid))
            with pytest.raises(ApiUnavailableError, match="leadership"):
                await platform.write_service_status(service, SERVICE_STATUS)
            assert await w.client.get(DEPLOYMENT, w.namespace, "digits") is None

    tools.run(story())


def test_lists_longer_than_a_page_are_complete(world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp_operator.kube.client.LIST_PAGE", 2)

    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            for number in range(5):
                await w.platform.create_rollout(
                    service, NewRollout(f"digits-{number}", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
                )
            items, version = await w.client.list(ROLLOUT, w.namespace)
            assert [o["metadata"]["name"] for o in items] == [f"digits-{n}" for n in range(5)]
            assert version >= max(int(o["metadata"]["resourceVersion"]) for o in items)

    tools.run(story())
