"""What a service may say about its workers is what a Deployment takes: nothing slips through one door to be stopped at
the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from offramp_core.control.objects import Service
from offramp_core.control.spec import parse_spec
from offramp_operator.kube.manifests import (
    OperatorPods,
    WorkerSettings,
    deployment,
    disruption_budget,
    network_policy,
    network_service,
    plan_config_map,
)
from offramp_operator.shell.platform import WorkerIdentity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

WORKERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "resources": {
        "resources": {
            "requests": {"cpu": 1, "memory": "512Mi"},
            "limits": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": 1},
        }
    },
    "drained by more than one": {"disruptionBudget": {"maxUnavailable": "25%"}},
    "drained by a quoted number": {"disruptionBudget": {"maxUnavailable": "3"}},
    "scheduling": {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [
            {"operator": "Exists"},
            {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
            {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
        ],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}},
                    }
                ]
            }
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "zone",
                "whenUnsatisfiable": "DoNotSchedule",
                "minDomains": 2,
                "nodeTaintsPolicy": "Honor",
            }
        ],
        "schedulerName": "volcano",
    },
    "identity": {
        "image": "registry.example/worker:1",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "OMP_PROC_BIND", "value": "true"}],
        "labels": {"team": "vision", "kueue.x-k8s.io/queue-name": "gpu"},
        "annotations": {"example.com/note": "two words"},
    },
}


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS.keys())
def test_a_worker_template_that_a_service_takes_makes_a_deployment(
    api: Any, manifests: Any, worker: dict[str, Any]
) -> None:
    answer = api.create(manifests.service(worker=worker))
    assert answer.status_code == 201, answer.json()["message"]
    spec = parse_spec(answer.json()["spec"])
    service = Service("default", "digits", "0d0d0d0d-0000-0000-0000-000000000000", 1, spec)
    identity, settings = WorkerIdentity("key", "token"), WorkerSettings("offramp/worker:1")
    for child in (
        deployment(service, identity, settings, replicas=1),
        network_service(service),
        disruption_budget(service),
        network_policy(service, OperatorPods("offramp-system", {"a": "b"}), allow_egress=False),
        plan_config_map(service, document="{}", epoch=1),
    ):
        taken = api.create(child)
        assert taken.status_code == 201, taken.json()["message"]


MODELS = {
    "image": {"uri": "oci://offramp/digits:1"},
    "claim": {"uri": "pvc://models/digits/v1"},
    "https": {"uri": "https://models.example/digits.tar", "secretRef": {"name": "models"}},
    "s3": {
        "uri": "s3://models/digits.tar",
        "endpoint": "https://minio.example",
        "region": "eu-1",
        "secretRef": {"name": "models"},
    },
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_workers_pod_is_admitted_where_only_restricted_pods_are(
    api: Any, manifests: Any, model: dict[str, Any]
) -> None:
    name = f"restricted-{model['uri'].partition(':')[0]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}, keep=True)
    service = Service(
        name, "digits", "0d0d0d0d-0000-0000-0000-000000000000", 1, parse_spec(manifests.service(model=model)["spec"])
    )
    policy = network_policy(service, OperatorPods("offramp-system", {"a": "b"}), allow_egress=False)
    assert api.create(policy).status_code == 201
    template = deployment(service, WorkerIdentity("key", "token"), WorkerSettings("offramp/worker:1"), replicas=1)[
        "spec"
    ]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "worker", "namespace": name},
        "spec": template["spec"],
    }
    answer = api.create(pod)
    assert answer.status_code == 201, answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.objective.latency.threshold", "1.5s"),
        ("spec.objective.accuracy.maxDisagreement", "0.000001"),
        ("spec.ramps", {"mode": "Pinned", "pin": {"ramps": [{"id": "r04-grid", "threshold": "1.0"}]}}),
        ("spec.rollout.stepDeadline", "1.5h"),
        ("spec.rollout.cooldown", "0s"),
        ("spec.rollout.steps", [{"weight": 1, "pause": "500ms"}, {"weight": 100}]),
        ("spec.ramps.maxOverhead", "1"),
        ("spec.replicas", 0),
    ],
    ids=str,
)
def test_what_the_api_server_takes_the_operator_can_read(api: Any, manifests: Any, path: str, value: Any) -> None:
    answer = api.create(manifests.changed(manifests.service(), path, value))
    assert answer.status_code == 201, answer.json()["message"]
    parse_spec(answer.json()["spec"])


def test_a_service_of_vllm_has_its_image_its_device_and_an_hour_to_start(api: Any) -> None:
    """As the page about vLLM declares it."""
    page = (Path(__file__).parents[2] / "docs/how-to/vllm.md").read_text()
    (declared,) = (text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "EarlyExitService" in text)
    answer = api.create(yaml.safe_load(declared))
    assert answer.status_code == 201, answer.json()["message"]
    service = Service(
        "default", "assistant", "0d0d0d0d-0000-0000-0000-000000000000", 1, parse_spec(answer.json()["spec"])
    )
    child = api.create(
        deployment(service, WorkerIdentity("key", "token"), WorkerSettings("offramp/worker:1"), replicas=1)
    )
    assert child.status_code == 201, child.json()["message"]
    spec = child.json()["spec"]
    pod = spec["template"]["spec"]
    (worker,), volumes = pod["containers"], {v["name"]: v.get("emptyDir") for v in pod["volumes"]}
    assert worker["image"] == "registry.example.com/offramp/worker-vllm:1"
    assert worker["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/gpu": "1"}
    assert {e["name"]: e.get("value") for e in worker["env"]}.items() >= {
        ("HOME", "/tmp"),
        ("OFFRAMP_OUTPUT", "TokenF1"),
    }
    assert volumes["tmp"] == {"sizeLimit": "8Gi"} and volumes["shared-memory"]["sizeLimit"] == "2Gi"
    probe = worker["startupProbe"]
    assert min(probe["periodSeconds"] * probe["failureThreshold"], spec["progressDeadlineSeconds"]) >= 3600
    assert worker["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready", "which waits for all configurations"
