"""Every rule of WorkerClass, on a real API server, and that what a class and a service say together is taken as a
Deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from offramp_cli.daytwo.lint import lint_text
from offramp_core.control.objects import Service
from offramp_core.control.spec import parse_spec
from offramp_operator.kube.manifests import WorkerSettings, deployment
from offramp_operator.kube.worker_class import FIELDS, WorkerClass, with_class
from offramp_operator.shell.platform import WorkerIdentity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

CRDS = Path(__file__).resolve().parents[2] / "crds"
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "l4"}


# path, a value that is taken, one that is refused, part of the sentence
class Rule(NamedTuple):
    path: str
    good: Any
    bad: Any
    sentence: str


RULES: list[Rule] = [
    Rule("spec", {}, ..., "spec: Required value"),
    Rule("metadata.name", "gpu.l4-small", "g" * 64, "metadata.name must have at most 63 characters"),
    Rule("spec.maxWorkers", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.maxWorkers", 100_000, 2.5, "must be of type integer"),
    Rule("spec.image", "offramp/worker-cuda:1", "", "spec.image"),
    Rule("spec.imagePullPolicy", "Always", "Sometimes", "Unsupported value"),
    Rule("spec.imagePullSecrets", [{"name": "registry"}], [{"name": "a b"}], "name must be the name of a Secret"),
    Rule("spec.serviceAccountName", "models", "Models", "must be the name of an object"),
    Rule(
        "spec.resources",
        {"limits": {"nvidia.com/gpu": 1}},
        {"limits": {"cpu": "-1"}},
        "every resource must be a quantity",
    ),
    Rule(
        "spec.resources",
        {"requests": {"cpu": 1}, "limits": {"cpu": 2}},
        {"requests": {"cpu": 2}, "limits": {"cpu": 1}},
        "requests must not exceed limits",
    ),
    Rule(
        "spec.resources",
        {"limits": {"nvidia.com/gpu": 2, "nvidia.com/gpu.shared": "1"}},
        {"limits": {"nvidia.com/gpu.shared": "2"}},
        "a share of a GPU (a resource that ends in .shared) must be 1",
    ),
    Rule("spec.resourceClaims", [CLAIM], [{"name": "gpu"}], "a claim needs resourceClaimTemplateName"),
    Rule(
        "spec.resourceClaims",
        [{"name": "gpu", "resourceClaimName": "shared"}],
        [CLAIM | {"resourceClaimName": "shared"}],
        "and not both",
    ),
    Rule("spec.resourceClaims", [CLAIM], [CLAIM | {"name": "GPU"}], "name of a claim must have lower-case letters"),
    Rule(
        "spec.nodeSelector",
        {"accelerator": "l4"},
        {"accelerator": "l4 or l5"},
        "every entry of nodeSelector must be a label",
    ),
    Rule(
        "spec.tolerations",
        [{"key": "gpu", "operator": "Exists"}],
        [{"key": "gpu", "operator": "Exists", "value": "x"}],
        "must not have a value",
    ),
    Rule("spec.runtimeClassName", "nvidia", "nvidia!", "must be the name of an object"),
    Rule("spec.tmp", {"sizeLimit": "1Gi"}, {"sizeLimit": "0"}, "sizeLimit must be a whole number from 1 on"),
    Rule(
        "spec.sharedMemory", {"sizeLimit": "512Mi"}, {"sizeLimit": "2Ti"}, "sizeLimit must be a whole number from 1 on"
    ),
    Rule("spec.startupDeadline", "1h30m", "1h30", "startupDeadline must be a duration from 10s to 24h"),
    Rule("spec.startupDeadline", "24h", "25h", "startupDeadline must be a duration from 10s to 24h"),
    Rule("spec.startupDeadline", "10s", "500ms", "startupDeadline must be a duration from 10s to 24h"),
    Rule("spec.env", ..., [{"name": "A", "value": "b"}], 'unknown field "spec.env"'),
    Rule("status", ..., {"services": 1}, 'unknown field "status"'),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_every_rule_takes_what_is_right_and_says_what_is_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    sound = manifests.worker_class()
    good = sound if rule.good is ... else manifests.changed(sound, rule.path, rule.good)
    bad = manifests.changed(sound, rule.path, rule.bad)
    answer = api.create(good)
    assert answer.status_code == 201, answer.json()["message"]
    refused = api.create(bad)
    assert refused.status_code in (400, 422) and rule.sentence in refused.json()["message"], refused.json()["message"]
    assert lint_text(yaml.safe_dump(good), "good.yaml")[0] == []
    assert [mistake.field for mistake in lint_text(yaml.safe_dump(bad), "bad.yaml")[0]]


OF_SERVICES = [
    Rule("className", "gpu", "GPU", "className must be the name of a WorkerClass"),
    Rule("resourceClaims", [CLAIM], [{"name": "gpu"}], "a claim needs resourceClaimTemplateName"),
    Rule("tmp", {"sizeLimit": "1Gi"}, {}, "spec.worker.tmp.sizeLimit: Required value"),
    Rule("sharedMemory", {"sizeLimit": "1Gi"}, {"sizeLimit": "1.5Gi"}, "sizeLimit must be a whole number"),
    Rule("startupDeadline", "20m", "20", "startupDeadline must be a duration"),
    Rule("serviceAccountName", ..., "default", 'unknown field "spec.worker.serviceAccountName"'),
]


@pytest.mark.parametrize("rule", OF_SERVICES, ids=lambda rule: rule.path)
def test_a_service_may_say_the_same_of_its_workers_but_for_the_account(api: Any, manifests: Any, rule: Rule) -> None:
    if rule.good is not ...:
        assert api.create(manifests.service(worker={rule.path: rule.good})).status_code == 201
    refused = api.create(manifests.service(worker={rule.path: rule.bad}))
    assert refused.status_code in (400, 422) and rule.sentence in refused.json()["message"], refused.json()["message"]


def test_class_and_service_together_are_taken_as_a_deployment(api: Any, manifests: Any) -> None:
    given = {
        "image": "offramp/worker-cuda:1",
        "serviceAccountName": "models",
        "runtimeClassName": "nvidia",
        "resourceClaims": [CLAIM],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"accelerator": "l4"},
        "tmp": {"sizeLimit": "1Gi"},
        "sharedMemory": {"sizeLimit": "1Gi"},
        "startupDeadline": "1h30m",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    klass = api.create(manifests.worker_class(**given)).json()
    worker = {"className": "gpu", "resources": {"limits": {"memory": "4Gi"}}, "nodeSelector": {"zone": "a"}}
    answer = api.create(manifests.service(worker=worker)).json()
    service = Service("default", "digits", "0d0d0d0d-0000-0000-0000-000000000000", 1, parse_spec(answer["spec"]))
    made = with_class(service, WorkerClass.of(klass))
    assert isinstance(made, Service)
    child = api.create(
        deployment(
            made,
            WorkerIdentity("key", "token"),
            WorkerSettings("offramp/worker-cuda:1", service_account="models"),
            replicas=1,
        )
    )
    assert child.status_code == 201, child.json()["message"]
    pod = child.json()["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert pod["serviceAccountName"] == "models"


@pytest.mark.usefixtures("clean")
def test_people_list_services_and_rollouts_by_what_they_look_for(api: Any, manifests: Any) -> None:
    for name, spec in (("plain", {}), ("classed", {"worker": {"className": "gpu"}}), ("asleep", {"suspend": True})):
        assert api.create(manifests.service(name, **spec), keep=True).status_code == 201
    assert api.create(manifests.rollout(serviceName="classed"), keep=True).status_code == 201

    def listed(plural: str, selector: str) -> list[str]:
        path = f"/apis/earlyexit.dev/v1alpha1/{plural}"
        answer = api.request("GET", path, params={"fieldSelector": selector})
        assert answer.status_code == 200, answer.text
        return [item["metadata"]["name"] for item in answer.json()["items"]]

    assert listed("earlyexitservices", "spec.worker.className=gpu") == ["classed"]
    assert listed("earlyexitservices", "spec.suspend=true") == ["asleep"]
    assert listed("earlyexitservices", "spec.ramps.mode=Auto,spec.suspend=false") == ["classed", "plain"]
    assert listed("earlyexitservices", "spec.model.uri=oci://elsewhere:1") == []
    assert listed("ramprollouts", "spec.serviceName=classed") == ["digits-1"]
    assert listed("rampconfigs", "status.state=Stable") == []


def test_what_both_may_say_has_one_schema() -> None:
    """Down to the sentences, but for whose namespace a Secret is in."""

    def properties(name: str, *path: str) -> dict[str, Any]:
        (version,) = yaml.safe_load((CRDS / name).read_text())["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for part in path:
            schema = schema["properties"][part]
        return dict(schema["properties"])

    of_class, of_service = properties("workerclasses.yaml"), properties("earlyexitservices.yaml", "worker")
    assert of_class.pop("maxWorkers"), "which is about no worker"
    assert set(of_class) == set(FIELDS)
    assert set(of_class) - set(of_service) == {"serviceAccountName"}
    told = {
        name: str(of_service[name]).replace("this namespace", "the service's namespace").replace('"', "'")
        for name in of_class
        if name in of_service
    }
    assert told == {name: str(of_class[name]).replace('"', "'") for name in told}
