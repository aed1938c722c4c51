"""The Kubernetes platform against a real API server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import pytest
import yaml

from offramp_core.control.objects import (
    ArmTally,
    BothArms,
    CapacityStatus,
    Condition,
    ConfigStatus,
    GateStatus,
    Ledger,
    Measured,
    ModelStatus,
    ObservedFigures,
    PinStatus,
    Prediction,
    RampSetStatus,
    RolloutStatus,
    RolloutSummary,
    ServiceStatus,
    StepRecord,
    TuningStatus,
    UpdateStatus,
    WorkersStatus,
)
from offramp_core.control.snapshot import Event, Gathered, NewConfig, NewRollout, TrainingOrder, TrainingReport
from offramp_core.errors import InvalidSpecError
from offramp_core.evidence.detector import DetectorState
from offramp_core.plan import exits_off_plan
from offramp_core.protocol import ArmPlan, PlanCounts, PlanDocument
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiUnavailableError, InvalidObjectError, KubeClient
from offramp_operator.kube.kinds import (
    AUTOSCALER,
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    WATCHED,
    Object,
    name_of,
)
from offramp_operator.kube.manifests import OperatorPods, WorkerSettings
from offramp_operator.kube.platform.children import NameTakenError
from offramp_operator.kube.platform.fleet import SCALER_GONE_SECONDS
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.platform.templates import template_mark
from offramp_operator.kube.watch import Feed
from offramp_operator.shell.platform import ConflictError, ServiceKey
from offramp_operator.shell.signing import SigningKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

DIGEST_A, DIGEST_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
PLAN = exits_off_plan(backbone_digest=DIGEST_A, ramp_set_digest=DIGEST_B)
CONFIG_NAME = PLAN.name("digits")
KEY = SigningKey(b"k" * 32)
CHILDREN = (DEPLOYMENT, NETWORK_SERVICE, DISRUPTION_BUDGET)

SERVICE_STATUS = ServiceStatus(
    observed_generation=1,
    settled_generation=1,
    phase="Ready",
    message="serving",
    stable_config=CONFIG_NAME,
    candidate_config="digits-abcdef0123",
    url="http://digits.default.svc",
    rollout=RolloutSummary("digits-1", "Step 1/3 5%"),
    workers=WorkersStatus(2, 2, 1, "2/2", "HorizontalPodAutoscaler mine", ("w0",)),
    update=UpdateStatus("Replace", 1_700_000_050.5),
    observed=ObservedFigures(
        p50="12ms",
        p95="31ms",
        agreement="99.4%",
        exit_rate="38%",
        savings="31%",
        audits="2%",
        samples=1000,
        taken_at=1_700_000_000.25,
    ),
    tuning=TuningStatus(
        state="CollectingLabels",
        message="400 of 900",
        tests_run=3,
        consumed_through_at=1_700_000_000.5,
        records_since_at=1_700_000_100.0,
        tuned_for="0.02/0.95",
        next_attempt_at=1_700_000_200.0,
        labels=400,
        labels_needed=900,
        failures=1,
    ),
    pin=PinStatus(1, "Accepted", "fine"),
    conditions=(Condition("Ready", "True", "Serving", "serving", 1, 1_700_000_000.123456),),
)
TALLY = ArmTally(900, 90, 80, 3, 100, 95, 7, 1)
ROLLOUT_STATUS = RolloutStatus(
    phase="Progressing",
    step=1,
    weight=25,
    verdict="Fine",
    outcome="RolledBack",
    objective="0.02",
    reason="Step",
    message="m",
    started_at=1_700_000_000.5,
    step_started_at=1_700_000_001.5,
    phase_started_at=1_700_000_002.5,
    finished_at=1_700_000_003.5,
    audit_rate=0.25,
    slow_seconds={"1": 0.01, "32": 0.125},
    slow_seconds_by_length={"4x128": 0.5},
    slow_needed=7,
    slow_excluded=1.5,
    restarts={"uid-1": 2},
    gates=(GateStatus("accuracy", "Undecided", 10, 1, 0.02, -0.5, 4.5, 90, "wait"),),
    ledger=Ledger(3, {"boot": BothArms(TALLY, TALLY)}, BothArms(TALLY, ArmTally()), ("bad",)),
    history=(StepRecord(5, 100, 1, 1_700_000_001.25),),
    watch=DetectorState((0.5, 1e300), 12),
)
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
class World:
    """A service on the API server, and an operator that sees it through lists alone."""

    api: Any
    namespace: str
    manifest: Object
    client: KubeClient
    cache: ObjectCache
    platform: KubePlatform
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
        there = [kind for kind in WATCHED if not kind.optional]
        objects = [obj for kind in there for obj in (await self.client.list(kind, self.namespace))[0]]
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
            cache = ObjectCache()
            result = World(api, namespace, manifest, client, cache, None)  # type: ignore[arg-type]
            result.platform = KubePlatform(
                client,
                cache,
                workers=WorkerSettings("offramp/worker:1"),
                instance="test",
                clock=lambda: result.time,
                monotonic=lambda: result.time,
            )
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
            times = {"eager_since_at": 1_700_000_000.5, "remeasure_by_at": 1_700_000_300.0}
            tuning = _filled(dataclasses.replace(SERVICE_STATUS.tuning, audit="Quiet", **times))
            service_status = dataclasses.replace(SERVICE_STATUS, tuning=tuning)
            await w.platform.create_config(service, NewConfig(CONFIG_NAME, PLAN, CONFIG_STATUS))
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            await w.platform.write_rollout_status(service, "digits-1", rollout_status)
            await w.platform.write_service_status(service, service_status)
            fresh = ObjectCache()
            await Feed(fresh, lambda _: None).relist(w.client, (w.namespace,))
            reader = KubePlatform(w.client, fresh, workers=WorkerSettings("x"), instance="t")
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


def test_a_status_of_more_workers_than_etcd_takes_is_written_without_what_can_be_counted_again(
    world: Any, tools: Any
) -> None:
    counts = {f"boot-{i:036d}": PlanCounts("hash", 0.02, requests=10**9 + i, batches=10**8) for i in range(8000)}
    measured = Measured("hash", 0.02, requests=7, live=counts, base=counts)

    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.write_service_status(service, ServiceStatus(phase="Ready", measured=measured))
            told = (await w.live(SERVICE))["status"]
            assert told["phase"] == "Ready" and told["measured"]["requests"] == 7
            assert "live" not in told["measured"]
            before = await w.versions()
            await w.platform.write_service_status(service, ServiceStatus(phase="Ready", measured=measured))
            assert await w.versions() == before, "nothing new, nothing written"

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
            # A new process remembers nothing, but sees that everything stands as it was asked for.
            restarted = KubePlatform(w.client, w.cache, workers=WorkerSettings("offramp/worker:1"), instance="t")
            found = await restarted.gather(w.key)
            assert found is not None
            await restarted.ensure_workers(found.service, KEY.identity(found.service.uid))
            assert calls == []
            assert await w.versions() == before

    tools.run(story())


@pytest.mark.parametrize(
    ("kind", "patch"),
    [
        (DEPLOYMENT, {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 99}}}}),
        (DEPLOYMENT, {"metadata": {"annotations": {"earlyexit.dev/applied": None}}}),
        (NETWORK_SERVICE, {"spec": {"selector": {"earlyexit.dev/service": "other"}}}),
        (DISRUPTION_BUDGET, {"spec": {"maxUnavailable": 2}}),
        (DISRUPTION_BUDGET, {"metadata": {"annotations": {"earlyexit.dev/applied": "of an older spec"}}}),
    ],
    ids=["a pod template", "a child of an earlier release", "a selector", "a budget", "a field asked for no more"],
)
def test_what_was_changed_while_no_operator_ran_is_changed_back(
    world: Any, tools: Any, kind: Any, patch: dict[str, Any]
) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.ensure()
            await w.look()
            asked = w.cache.get(kind, w.namespace, "digits")
            await w.client.merge(kind, w.namespace, "digits", patch, manager="somebody")
            await w.look()
            restarted = KubePlatform(w.client, w.cache, workers=WorkerSettings("offramp/worker:1"), instance="t")
            await restarted.ensure_workers(service, KEY.identity(service.uid))
            await w.look()
            restored = w.cache.get(kind, w.namespace, "digits")
            assert asked is not None and restored is not None
            assert restored["content"] == asked["content"]
            assert (
                restored["metadata"]["annotations"]["earlyexit.dev/applied"]
                == asked["metadata"]["annotations"]["earlyexit.dev/applied"]
            )

    tools.run(story())


def test_what_somebody_changes_or_deletes_of_the_workers_is_restored(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=2) as w:
            await w.ensure()
            edits = {
                DEPLOYMENT: {"spec": {"replicas": 7}},
                NETWORK_SERVICE: {"spec": {"selector": {"earlyexit.dev/service": "other"}}},
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


def test_network_policies_come_and_go_with_the_administrators_wish(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            for operator in (OperatorPods("offramp-system", {"app.kubernetes.io/component": "operator"}), None):
                settings = WorkerSettings("offramp/worker:1", admin_from=operator)
                w.platform = KubePlatform(w.client, w.cache, workers=settings, instance="test")
                await w.ensure()
                await w.look()
                found = await w.client.get(NETWORK_POLICY, w.namespace, "digits-workers")
                assert (found is not None) is (operator is not None)

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
            foreign = {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "digits", "namespace": w.namespace},
                "spec": {"selector": {"app": "bank"}, "ports": [{"port": 80}]},
            }
            plan = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "digits-plan", "namespace": w.namespace},
                "data": {"mine": "yes"},
            }
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
            old_leader = KubePlatform(w.client, old_cache, workers=WorkerSettings("x"), instance="old")
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
            other = KubePlatform(w.client, ObjectCache(), workers=WorkerSettings("x"), instance="other")
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
    """Its phase and evidence are about workers that are gone; the new service's first attempt waits until it is
    collected."""

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


def test_what_was_decided_for_a_deleted_service_is_not_written_on_the_next_one_of_its_name(
    world: Any, tools: Any
) -> None:
    """A pass takes as long as its workers take to answer; a user may have deleted and applied the service again
    meanwhile."""

    async def story() -> None:
        async with world() as w:
            new = NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            before = (await w.gathered()).service
            w.api.request("DELETE", w.path)
            assert w.api.create(w.manifest, keep=True).status_code == 201
            await w.look()
            with pytest.raises(ConflictError, match="gone"):
                await w.platform.write_service_status(before, ServiceStatus(phase="Ready"))
            after = (await w.gathered()).service
            assert (after.uid != before.uid, after.status) == (True, ServiceStatus())
            await w.platform.create_rollout(after, new)
            with pytest.raises(ConflictError, match="gone"):
                await w.platform.write_rollout_status(before, "digits-1", ROLLOUT_STATUS)
            (rollout,) = (await w.gathered()).rollouts
            assert rollout.status == RolloutStatus()

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
            await w.platform._statuses.create(service, CONFIG, CONFIG_NAME, PLAN.to_mapping())
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


def test_rejected_pods_are_asked_for_again_after_a_pause_and_those_that_serve_stay(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=2) as w:
            await w.ensure()
            first = await w.live(DEPLOYMENT)
            serves = await _make_replica_set(w, first, "digits-1")
            await _make_pod(w, first, "serves", owner=serves)
            await asyncio.sleep(1.0)  # as creation has whole seconds, and a pod that serves ends a series
            await _reject(w, first, serves)
            await w.look()
            found = {worker.name: worker for worker in (await w.gathered()).workers}
            assert found["serves"].ready and found["digits-1-2"].failure_reason == "RejectedByNode"
            assert "no such share" in found["digits-1-2"].failure
            await w.ensure()
            assert await _replicas(w) == 1
            w.time += 11.0
            await w.ensure()
            assert await _replicas(w) == 2

            answer = w.api.merge(await w.live(SERVICE), {"spec": {"worker": {"env": [{"name": "A", "value": "b"}]}}})
            assert answer.status_code == 200
            await w.look()
            await w.ensure()
            second = await w.live(DEPLOYMENT)
            assert _mark(second) != _mark(first)
            await _reject(w, second, await _make_replica_set(w, second, "digits-2"))
            await w.look()
            await w.ensure()
            held = await w.live(DEPLOYMENT)
            assert (_mark(held), held["spec"]["replicas"]) == (_mark(first), 2)
            w.time += 11.0
            await w.ensure()
            assert _mark(await w.live(DEPLOYMENT)) == _mark(second)

    tools.run(story())


def test_an_autoscaler_that_comes_in_a_pause_does_not_begin_at_zero(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=2) as w:
            await w.ensure()
            first = await w.live(DEPLOYMENT)
            await _reject(w, first, await _make_replica_set(w, first, "digits-1"))
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 0
            assert w.api.create(_hpa(w.namespace), keep=True).status_code == 201
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 1, "which zero would switch off for good"
            await _scale(w, 0)
            await w.ensure()
            assert await _replicas(w) == 0, "what somebody else chose stays"

    tools.run(story())


async def _reject(w: World, deployment: Object, replica_set: Object) -> None:
    """Three pods that the kubelet did not admit, just now."""
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Pod was rejected: no such share"}
    for number in range(3):
        pod = await _make_pod(w, deployment, f"{name_of(replica_set)}-{number}", owner=replica_set, **status)
        w.time = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def _mark(deployment: Object) -> str | None:
    return template_mark(deployment["spec"])


async def _make_replica_set(w: World, deployment: Object, name: str) -> Object:
    template = deployment["spec"]["template"]
    body = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": name,
            "namespace": w.namespace,
            "labels": template["metadata"]["labels"],
            "annotations": {"deployment.kubernetes.io/revision": "1"},
            "ownerReferences": [_owner(deployment)],
        },
        "spec": {"replicas": 0, "selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
    }
    return await w.client.create(REPLICA_SET, body)


async def _make_pod(w: World, deployment: Object, name: str, *, owner: Object | None, **status: Any) -> Object:
    template = deployment["spec"]["template"]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": template["metadata"]
        | {"name": name, "namespace": w.namespace, **({"ownerReferences": [_owner(owner)]} if owner else {})},
        "spec": template["spec"],
    }
    created = await w.client.create(POD, body)
    serves = {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "podIPs": [{"ip": "10.0.0.9"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    answer = w.api.merge(created, {"status": status or serves}, subresource="status")
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


def _events(w: World) -> list[Object]:
    answer = w.api.request("GET", f"/apis/events.k8s.io/v1/namespaces/{w.namespace}/events")
    return list(answer.raise_for_status().json()["items"])


def test_transitions_are_told_as_events_of_the_service_and_of_its_rollout(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            await w.platform.create_rollout(
                service, NewRollout("digits-1", CONFIG_NAME, "digits-abcdef0123", "Tuned", 1)
            )
            await w.platform.emit(service, Event("CanaryStarted", "digits-1 begins", rollout="digits-1"))
            await w.platform.emit(service, Event("DriftDetected", "x" * 5000, warning=True))
            told = sorted((e["regarding"]["kind"], e["reason"], e["type"], len(e["note"])) for e in _events(w))
            assert told == [
                ("EarlyExitService", "CanaryStarted", "Normal", len("digits-1 begins")),
                ("EarlyExitService", "DriftDetected", "Warning", 1024),
                ("RampRollout", "CanaryStarted", "Normal", len("digits-1 begins")),
            ]
            for kind, name in (("ees", "digits"), ("rro", "digits-1")):
                assert "CanaryStarted" in w.api.kubectl("describe", kind, name, "-n", w.namespace).stdout

    tools.run(story())


def test_a_transition_told_again_by_a_restarted_operator_is_one_event(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            service = (await w.gathered()).service
            event = Event("Promoted", "digits-abcdef0123 serves all traffic")
            other = KubePlatform(
                w.client, w.cache, workers=WorkerSettings("x"), instance="restarted", clock=lambda: w.time + 1.0
            )
            for platform in (w.platform, other, w.platform):
                await platform.emit(service, event)
            assert [e["reason"] for e in _events(w)] == ["Promoted"]
            w.time += 3600.0
            await w.platform.emit(service, event)
            assert len(_events(w)) == 2, "an hour later it is news"

    tools.run(story())


# --- the client --------------------------------------------------------------------------------------


def test_a_status_field_the_schema_does_not_know_is_refused_and_not_dropped(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            body = {
                "apiVersion": "earlyexit.dev/v1alpha1",
                "kind": "EarlyExitService",
                "metadata": {"name": "digits", "namespace": w.namespace},
                "status": {"evidence": 1},
            }
            with pytest.raises(Exception, match="evidence"):
                await w.client.apply(SERVICE, body, subresource="status")
            bad = {**body, "status": {"observedGeneration": -1}}
            with pytest.raises(InvalidObjectError):
                await w.client.apply(SERVICE, bad, subresource="status")

    tools.run(story())


def test_a_process_that_lost_the_leadership_writes_nothing(world: Any, api: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w, tools.client_of(api.kubeconfig, may_write=lambda: False) as deposed:
            platform = KubePlatform(deposed, w.cache, workers=WorkerSettings("x"), instance="t")
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


# --- who decides how many workers there are ------------------------------------------------------------

SCALED = {"minReplicas": 2, "maxReplicas": 9, "targetInFlight": 8}


def _hpa(namespace: str, name: str = "mine", target: str = "digits") -> Object:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicas": 1,
            "maxReplicas": 10,
        },
    }


async def _scale(w: World, replicas: int) -> None:
    """What an autoscaler writes, and nothing else."""
    answer = w.api.merge(await w.live(DEPLOYMENT), {"spec": {"replicas": replicas}}, subresource="scale")
    assert answer.status_code == 200, answer.text
    await w.look()


async def _replicas(w: World) -> int:
    return int((await w.live(DEPLOYMENT))["spec"]["replicas"])


def test_what_a_users_autoscaler_decides_is_never_fought_over(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with world(replicas=3) as w:
            await w.ensure()
            assert w.api.create(_hpa(w.namespace), keep=True).status_code == 201
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 3, "an autoscaler that has decided nothing yet finds what there was"
            found = (await w.gathered()).scaling
            assert found is not None and (found.by, found.desired) == ("HorizontalPodAutoscaler mine", 3)
            writes: list[str] = []
            original = w.client._write

            async def counting(verb: str, *arguments: Any, **more: Any) -> Any:
                writes.append(verb)
                return await original(verb, *arguments, **more)

            monkeypatch.setattr(w.client, "_write", counting)
            for wanted in (7, 6, 2, 9, 1, 8, 3, 5, 0, 4):
                await _scale(w, wanted)
                await w.ensure()
                await w.ensure()
                assert await _replicas(w) == wanted
                scaling = (await w.gathered()).scaling
                assert scaling is not None and scaling.desired == wanted
            assert writes == []
            # Everything else of the Deployment is still the operator's.
            live = await w.live(DEPLOYMENT)
            w.api.merge(live, {"spec": {"minReadySeconds": 0, "replicas": 6}})
            await w.look()
            await w.ensure()
            restored = await w.live(DEPLOYMENT)
            assert (restored["spec"]["minReadySeconds"], restored["spec"]["replicas"]) == (5, 6)

    tools.run(story())


def test_a_new_process_does_not_take_from_an_autoscaler_what_it_decided(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=3) as w:
            await w.ensure()
            w.api.create(_hpa(w.namespace), keep=True)
            await _scale(w, 6)
            for _ in range(2):
                restarted = KubePlatform(w.client, w.cache, workers=WorkerSettings("offramp/worker:1"), instance="t")
                found = await restarted.gather(w.key)
                assert found is not None
                await restarted.ensure_workers(found.service, KEY.identity(found.service.uid))
                assert await _replicas(w) == 6

    tools.run(story())


def test_replicas_come_back_when_a_users_autoscaler_has_been_gone_for_a_while(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=3) as w:
            await w.ensure()
            w.api.create(_hpa(w.namespace), keep=True)
            await _scale(w, 7)
            await w.ensure()
            path = f"/apis/autoscaling/v2/namespaces/{w.namespace}/horizontalpodautoscalers/mine"
            assert w.api.request("DELETE", path).status_code == 200
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 7, "it may be on its way back"
            w.time += SCALER_GONE_SECONDS
            await w.ensure()
            assert await _replicas(w) == 3
            assert (await w.gathered()).scaling is None
            w.api.merge(await w.live(DEPLOYMENT), {"spec": {"replicas": 9}})
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 3, "and are defended as before"

    tools.run(story())


def test_an_autoscaler_of_something_else_changes_nothing(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=3) as w:
            w.api.create(_hpa(w.namespace, target="other"), keep=True)
            of_a_set = _hpa(w.namespace, name="set")
            of_a_set["spec"]["scaleTargetRef"]["kind"] = "StatefulSet"
            w.api.create(of_a_set, keep=True)
            await w.look()
            await w.ensure()
            assert (await w.gathered()).scaling is None
            assert await _replicas(w) == 3

    tools.run(story())


def test_autoscaling_of_the_spec_makes_an_autoscaler_and_removing_it_gives_replicas_back(
    world: Any, tools: Any
) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            await w.ensure()
            own = await w.live(AUTOSCALER)
            assert own["spec"]["metrics"][0]["pods"]["metric"]["name"] == "earlyexit_inflight"
            assert own["metadata"]["ownerReferences"][0]["uid"] == (await w.gathered()).service.uid
            assert await _replicas(w) == 2, "it begins with the fewest"
            for wanted in (5, 3, 8, 2, 9, 4, 6, 7, 3, 5):
                await _scale(w, wanted)
                await w.ensure()
                assert await _replicas(w) == wanted
            scaling = (await w.gathered()).scaling
            assert scaling is not None and (scaling.by, scaling.failure) == ("HorizontalPodAutoscaler digits", "")
            before = await w.versions()
            await w.ensure()
            assert await w.versions() == before
            assert w.api.merge(w.manifest, {"spec": {"autoscaling": None, "replicas": 2}}).status_code == 200
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 2
            assert await w.client.get(AUTOSCALER, w.namespace, "digits") is None
            assert (await w.gathered()).scaling is None

    tools.run(story())


def test_while_workers_are_replaced_the_autoscaler_takes_none_away(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            await w.ensure()
            default = (await w.live(AUTOSCALER))["spec"]["behavior"]
            assert default["scaleDown"]["selectPolicy"] == "Max"
            service = (await w.gathered()).service
            status = dataclasses.replace(SERVICE_STATUS, update=UpdateStatus("Surge"))
            await w.platform.write_service_status(service, status)
            await w.ensure()
            assert (await w.live(AUTOSCALER))["spec"]["behavior"]["scaleDown"]["selectPolicy"] == "Disabled"
            await w.gathered()
            await w.platform.write_service_status(service, dataclasses.replace(SERVICE_STATUS, update=UpdateStatus()))
            await w.ensure()
            assert (await w.live(AUTOSCALER))["spec"]["behavior"] == default

    tools.run(story())


async def _told(w: World, **capacity: Any) -> None:
    """What a pass found out about the capacity."""
    service = (await w.gathered()).service
    status = dataclasses.replace(service.status, capacity=CapacityStatus(**capacity))
    await w.platform.write_service_status(service, status)


async def _fewest(w: World) -> int:
    return int((await w.live(AUTOSCALER))["spec"]["minReplicas"])


def test_the_autoscaler_keeps_the_workers_that_the_demand_needs_without_exits(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            assert (await w.gathered()).service.spec.autoscaling.no_exit_floor == "Reserve", "the schema's default"
            await w.ensure()
            await w.ensure()  # the autoscaler has taken over
            assert await _fewest(w) == 2
            for floor, expected in ((5, 5), (7, 7), (40, 9), (3, 3), (1, 2), (0, 2)):
                await _told(w, worker_rate=100.0, peak_rate=500.0, needed=floor, floor=floor)
                await w.ensure()
                assert await _fewest(w) == expected
                assert await _replicas(w) == 2, "the number of workers stays the autoscaler's"
                before = await w.versions()
                await w.ensure()
                assert await w.versions() == before

    tools.run(story())


def test_no_floor_is_kept_where_the_user_wants_none(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED | {"noExitFloor": "None"}) as w:
            await w.ensure()
            await _told(w, worker_rate=100.0, peak_rate=500.0, needed=5, floor=5)
            await w.ensure()
            assert await _fewest(w) == 2

    tools.run(story())


def test_an_autoscaler_takes_over_with_the_workers_that_the_floor_asks_for(world: Any, tools: Any) -> None:
    """Between the last pass with replicas and the first with an autoscaler nobody may be taken away."""

    async def story() -> None:
        async with world(replicas=3) as w:
            await w.ensure()
            await _told(w, worker_rate=100.0, peak_rate=500.0, needed=5, floor=5)
            assert w.api.merge(w.manifest, {"spec": {"autoscaling": SCALED, "replicas": None}}).status_code == 200
            await w.look()
            await w.ensure()
            assert (await _replicas(w), await _fewest(w)) == (5, 5)

    tools.run(story())


def test_scale_down_is_frozen_before_the_first_worker_is_replaced(
    world: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            await w.ensure()
            await w.ensure()  # the autoscaler has taken over
            frozen_at: list[str] = []
            original = w.client.apply

            async def watching(kind: Any, body: Any, **more: Any) -> Any:
                if kind is DEPLOYMENT:
                    live = await w.live(AUTOSCALER)
                    frozen_at.append(live["spec"]["behavior"]["scaleDown"]["selectPolicy"])
                return await original(kind, body, **more)

            monkeypatch.setattr(w.client, "apply", watching)
            image = {"spec": {"worker": {"image": "offramp/worker:2"}}}
            assert w.api.merge(w.manifest, image).status_code == 200
            await w.look()
            await w.ensure()
            assert frozen_at == ["Disabled"]
            await w.ensure()
            restored = (await w.live(AUTOSCALER))["spec"]["behavior"]["scaleDown"]["selectPolicy"]
            assert restored == "Max", "what says that workers are being replaced is the status from then on"

    tools.run(story())


def test_a_users_autoscaler_goes_before_the_one_of_the_spec_and_the_service_says_so(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            await w.ensure()
            w.api.create(_hpa(w.namespace), keep=True)
            await _scale(w, 6)
            await w.ensure()
            assert await w.client.get(AUTOSCALER, w.namespace, "digits") is None
            assert await _replicas(w) == 6
            scaling = (await w.gathered()).scaling
            assert scaling is not None and scaling.failure_reason == "AnotherAutoscaler"
            assert "delete one of the two" in scaling.failure

    tools.run(story())


def test_a_service_at_zero_wakes_up_with_autoscaling(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=0) as w:
            await w.ensure()
            assert await _replicas(w) == 0
            assert w.api.merge(w.manifest, {"spec": {"autoscaling": SCALED, "replicas": None}}).status_code == 200
            await w.look()
            await w.ensure()
            assert await _replicas(w) == 2, "an autoscaler leaves alone what is at zero"

    tools.run(story())


def test_an_autoscaler_that_has_no_metric_is_told_with_the_next_step(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(autoscaling=SCALED) as w:
            await w.ensure()
            condition = {
                "type": "ScalingActive",
                "status": "False",
                "reason": "FailedGetPodsMetric",
                "message": "no metrics",
                "lastTransitionTime": "2026-11-21T12:00:00Z",
            }
            status = {"status": {"currentReplicas": 2, "desiredReplicas": 2, "conditions": [condition]}}
            answer = w.api.merge(await w.live(AUTOSCALER), status, subresource="status")
            assert answer.status_code == 200, answer.text
            await w.look()
            scaling = (await w.gathered()).scaling
            assert scaling is not None and scaling.failure_reason == "FailedGetPodsMetric"
            assert "no metrics" in scaling.failure and "earlyexit_inflight" in scaling.failure

    tools.run(story())


def test_the_strategy_that_was_decided_is_applied(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=2) as w:
            await w.ensure()
            service = (await w.gathered()).service
            for strategy, surge in (("Replace", 0), ("Surge", 1), ("", 1)):
                status = dataclasses.replace(SERVICE_STATUS, update=UpdateStatus(strategy))  # type: ignore[arg-type]
                await w.platform.write_service_status(service, status)
                await w.ensure()
                rolling = (await w.live(DEPLOYMENT))["spec"]["strategy"]["rollingUpdate"]
                assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (surge, 1 - surge)

    tools.run(story())


# --- bundles without a digest ----------------------------------------------------------------------

MOVABLE = {"uri": "https://models.example/digits.tar"}
PROVEN = "sha256:" + "7" * 64


async def prove(w: World) -> None:
    """What the pass does that sees the first ready worker."""
    service = (await w.gathered()).service
    models = (ModelStatus(MOVABLE["uri"], PROVEN),)
    await w.platform.write_service_status(service, dataclasses.replace(service.status, models=models))
    await w.look()


def test_the_first_worker_goes_ahead_alone_until_its_bundle_is_proven(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(replicas=3, model=MOVABLE) as w:
            await w.ensure()
            alone = await w.live(DEPLOYMENT)
            assert alone["spec"]["replicas"] == 1
            assert await w.client.get(CONFIG_MAP, w.namespace, "digits-model") is None
            await prove(w)
            await w.ensure()
            known, together = await w.live(CONFIG_MAP, "digits-model"), await w.live(DEPLOYMENT)
            assert list(known["data"].values()) == [PROVEN]
            assert together["spec"]["replicas"] == 3
            assert together["spec"]["template"] == alone["spec"]["template"], "who serves is not replaced for it"
            await w.look()
            before = await w.versions()
            await w.ensure()
            assert await w.versions() == before

    tools.run(story())


def test_workers_that_serve_are_never_taken_away_for_want_of_a_proof(world: Any, tools: Any) -> None:
    """A service of an earlier release has all its workers and no digest in its status."""

    async def story() -> None:
        async with world(replicas=3) as w:
            await w.ensure()
            assert (
                w.api.merge(await w.live(SERVICE), {"spec": {"model": {**MOVABLE, "digest": None}}}).status_code == 200
            )
            await w.look()
            await w.ensure()
            assert (await w.live(DEPLOYMENT))["spec"]["replicas"] == 3

    tools.run(story())


def test_an_autoscaler_waits_for_the_proof(world: Any, tools: Any) -> None:
    async def story() -> None:
        scaled = {"minReplicas": 2, "maxReplicas": 4, "targetInFlight": 8}
        async with world(autoscaling=scaled, model=MOVABLE) as w:
            await w.ensure()
            assert (await w.live(DEPLOYMENT))["spec"]["replicas"] == 1
            assert await w.client.get(AUTOSCALER, w.namespace, "digits") is None
            await w.look()
            await prove(w)
            await w.ensure()
            assert (await w.live(AUTOSCALER))["spec"]["minReplicas"] == 2

    tools.run(story())


def test_a_digest_that_somebody_changes_is_put_back(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(model=MOVABLE) as w:
            await prove(w)
            await w.ensure()
            known = await w.live(CONFIG_MAP, "digits-model")
            w.api.merge(known, {"data": dict.fromkeys(known["data"], "sha256:other") | {"theirs": "kept"}})
            await w.look()
            await w.ensure()
            assert (await w.live(CONFIG_MAP, "digits-model"))["data"] == known["data"] | {"theirs": "kept"}
            await w.look()
            before = await w.versions()
            await w.ensure()
            assert await w.versions() == before, "what others add is no reason to write again and again"

    tools.run(story())


def test_a_config_map_of_that_name_that_is_somebody_elses_is_left_alone(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(model=MOVABLE) as w:
            foreign = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "digits-model", "namespace": w.namespace},
            }
            assert w.api.create(foreign | {"data": {"mine": "yes"}}, keep=True).status_code == 201
            await prove(w)
            await w.ensure()
            assert (await w.live(CONFIG_MAP, "digits-model"))["data"] == {"mine": "yes"}
            (told,) = (worker for worker in (await w.gathered()).workers if worker.failure)
            assert told.failure_reason == "NameTaken"

    tools.run(story())


# --- training --------------------------------------------------------------------------------------

LIVE = {"training": "LiveTraffic", "store": {"claimName": "ramps"}}
SINCE = 1_700_000_500.0
ORDER = TrainingOrder(1, DIGEST_B, 0.02, keep=(DIGEST_B,), since=SINCE)
TRAINING = RampSetStatus(bundle="b/b", state="Training", attempt=1, capture_since_at=SINCE)
JOB_NAME = f"digits-train-{SINCE:.0f}"


async def _trains(w: World) -> Gathered:
    """The pass that decides to train: status first, then the order."""
    service = (await w.gathered()).service
    await w.platform.write_service_status(service, dataclasses.replace(service.status, ramp_sets=TRAINING))
    service = (await w.gathered()).service
    await w.platform.train(service, ORDER)
    return await w.gathered()


def _report(api: Any, job: Object, result: Object) -> None:
    """What kubelet and Job controller would do: a pod that ended with these last words."""
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
    }
    template = job["spec"]["template"]
    meta = {
        "name": "trainer-0",
        "namespace": job["metadata"]["namespace"],
        "labels": template["metadata"]["labels"],
        "ownerReferences": [owner],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
    assert api.create(pod, keep=True).status_code == 201
    ended = {"exitCode": 0, "reason": "Completed", "message": json.dumps(result)}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [
            {
                "name": "train",
                "state": {"terminated": ended},
                "image": "x",
                "imageID": "x",
                "ready": False,
                "restartCount": 0,
                "lastState": {},
            }
        ],
    }
    answer = api.merge(pod, {"status": status}, subresource="status")
    assert answer.status_code == 200, answer.text


def test_a_training_is_one_job_whose_pod_tells_the_result(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(ramps=LIVE) as w:
            assert (await w.gathered()).can_train
            assert (await _trains(w)).training == TrainingReport(1, "Running", since=SINCE)
            await w.platform.train((await w.gathered()).service, ORDER)
            w.platform = KubePlatform(w.client, ObjectCache(), workers=WorkerSettings("x"), instance="t")  # a restart
            w.platform.cache.put(SERVICE, await w.live(SERVICE))
            await w.platform.train((await w.gathered()).service, ORDER)
            jobs = (await w.client.list(JOB, w.namespace))[0]
            assert [job["metadata"]["name"] for job in jobs] == [JOB_NAME]
            _report(
                w.api, jobs[0], {"ramp_set_digest": DIGEST_A, "rows": 2000, "saving_before": 0.1, "saving_after": 0.3}
            )
            await Feed(w.platform.cache, lambda _: None).relist(w.client, (w.namespace,))
            told = (await w.gathered()).training
            assert told == TrainingReport(1, "Succeeded", DIGEST_A, 2000, 0.1, 0.3, since=SINCE)
            assert (await w.gathered()).workers == (), "a trainer is no worker"
            service = (await w.gathered()).service
            rested = dataclasses.replace(service.status, ramp_sets=dataclasses.replace(TRAINING, state="Judging"))
            await w.platform.write_service_status(service, rested)
            await w.ensure()
            assert await w.client.get(JOB, w.namespace, JOB_NAME) is not None, (
                "it can be looked at until its time is up"
            )

    tools.run(story())


def test_a_training_that_nobody_waits_for_any_more_is_ended(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(ramps=LIVE) as w:
            await _trains(w)
            await w.ensure()
            assert await w.client.get(JOB, w.namespace, JOB_NAME) is not None
            answer = w.api.merge(await w.live(SERVICE), {"spec": {"ramps": {"training": "Prepared"}}})
            assert answer.status_code == 200, answer.text
            await w.look()
            await w.ensure()
            left = await w.client.get(JOB, w.namespace, JOB_NAME)
            assert left is None or left["metadata"].get("deletionTimestamp")

    tools.run(story())


def test_a_job_that_the_api_server_refuses_is_a_training_that_failed(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world(ramps=LIVE) as w:
            quota = {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "none", "namespace": w.namespace},
                "spec": {"hard": {"count/jobs.batch": "0"}},
            }
            assert w.api.create(quota, keep=True).status_code == 201
            used = {"status": {"hard": quota["spec"]["hard"], "used": {"count/jobs.batch": "0"}}}
            assert w.api.merge(quota, used, subresource="status").status_code == 200
            told = (await _trains(w)).training
            assert told is not None and told.state == "Failed"
            assert "exceeded quota" in told.message and (told.attempt, told.since) == (1, SINCE)

    tools.run(story())


def test_without_a_store_nothing_is_trained(world: Any, tools: Any) -> None:
    async def story() -> None:
        async with world() as w:
            assert not (await w.gathered()).can_train
            assert (await w.gathered()).training is None

    tools.run(story())
