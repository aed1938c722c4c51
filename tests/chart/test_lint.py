"""Rendered manifests against Kubernetes' own schemas and against kube-score, under Helm 3 and Helm 4."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import TrainingOrder
from offramp_core.control.spec import Route, parse_spec
from offramp_operator.kube.manifests import (
    DeliverySettings,
    OperatorPods,
    WorkerSettings,
    autoscaler,
    deployment,
    disruption_budget,
    http_route,
    model_config_map,
    network_policy,
    network_service,
    plan_config_map,
    training_job,
    version_service,
)
from offramp_operator.shell.platform import WorkerIdentity

pytestmark = pytest.mark.slow  # real linters

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "offramp"
VALUES = Path(__file__).parent / "values"
FILES = sorted(VALUES.glob("*.yaml"))

# kube-score's findings that stay, and why.
ACCEPTED = {
    "container-image-pull-policy": "tags of releases never move and digests cannot; Always would need the registry at "
    "every start",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints do this, and let two pods share the only node",
    "deployment-replicas": "a version on trial has as few workers as its share asks for; what serves stands beside it",
    "container-resources": "",  # the details are in ACCEPTED_DETAILS: only the processor's limit is left out
    "container-ephemeral-storage-request-and-limit": "",
}
ACCEPTED_DETAILS = {
    "CPU limit is not set": "a limit would throttle the start, when Python is imported, and a fast takeover; the "
    "request reserves a share"
}
# What a user leaves out of spec.worker.resources is theirs to say: nobody else knows how large the model is.
ACCEPTED_OF_WORKERS = ACCEPTED_DETAILS | {
    "CPU request is not set": "spec.worker.resources",
    "Memory limit is not set": "spec.worker.resources",
    "Memory request is not set": "spec.worker.resources",
    "Ephemeral Storage limit is not set": "spec.worker.resources; the root file system is read-only and the state "
    "folder is limited",
    "Ephemeral Storage request is not set": "spec.worker.resources",
}


def rendered(helm: Any, file: Path) -> list[dict[str, Any]]:
    return list(helm.template(**(yaml.safe_load(file.read_text()) or {})))


SPEC: dict[str, Any] = {
    "model": {"uri": "oci://registry.example/digits:1"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    "protocols": ["HTTP", "GRPC"],
    "replicas": 2,
}
SETTINGS = WorkerSettings("registry.example/offramp/worker:1.2.3")
IDENTITY = WorkerIdentity("key", "token")
OPERATOR = OperatorPods("offramp-system", {"app.kubernetes.io/name": "offramp"})


def of_spec(spec: dict[str, Any], name: str = "digits") -> Service:
    return Service("default", name, "0d0d0d0d-0000-0000-0000-000000000000", 1, parse_spec(spec))


def service(**spec: Any) -> Service:
    return of_spec({**SPEC, **spec})


def of_service(asked: Service) -> list[dict[str, Any]]:
    """What the operator makes for a service, as it would be applied."""
    made = [
        deployment(asked, IDENTITY, SETTINGS, replicas=None if asked.spec.autoscaling else 2),
        network_service(asked),
        disruption_budget(asked),
        network_policy(asked, OPERATOR, allow_egress=False, delivery=DeliverySettings()),
        plan_config_map(asked, document="{}", epoch=1),
        model_config_map(asked),
    ]
    return [item for item in made if item is not None]


def trained() -> list[dict[str, Any]]:
    """With a store, and the Job that trains on what it holds."""
    asking = service(ramps={"training": "LiveTraffic", "store": {"claimName": "ramps"}})
    digest = f"sha256:{'a' * 64}"
    order = TrainingOrder(1, digest, 0.02, keep=(digest,), since=1_700_000_000.0)
    return [*of_service(asking), training_job(asking, order, SETTINGS)]


def scaled() -> list[dict[str, Any]]:
    spec = {name: value for name, value in SPEC.items() if name != "replicas"}
    asking = of_spec({**spec, "autoscaling": {"maxReplicas": 4, "targetInFlight": 8}})
    wanted = asking.spec.autoscaling
    assert wanted is not None
    return [*of_service(asking), autoscaler(asking, wanted, fewest=2, frozen=False)]


def side_by_side() -> list[dict[str, Any]]:
    route = Route(((("name", "public"), ("namespace", "infra")),), ("models.example.com",))
    return [
        *of_service(service()),
        deployment(service(), IDENTITY, SETTINGS, replicas=1, trial=True),
        version_service(service(), trial=False),
        version_service(service(), trial=True),
        http_route(service(), route, weights={"digits-main": 80, "digits-next": 20}),
    ]


def of_samples() -> list[dict[str, Any]]:
    """kube-score knows nothing of the samples' own kind, but what is made for them is pods."""
    files = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
    items = [item for file in files for item in yaml.safe_load_all(file.read_text())]
    return [made for item in items for made in of_service(of_spec(item["spec"], item["metadata"]["name"]))]


MADE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "workers": lambda: of_service(service()),
    "fetched over https": lambda: of_service(
        service(model={"uri": "https://models.example/digits.tar", "secretRef": {"name": "models"}})
    ),
    "fetched from s3": lambda: of_service(
        service(model={"uri": "s3://models/digits.tar", "secretRef": {"name": "models"}})
    ),
    "on a claim": lambda: of_service(service(model={"uri": "pvc://models/digits"})),
    "trained on live traffic": trained,
    "scaled": scaled,
    "two versions through a gateway": side_by_side,
    "samples": of_samples,
}


def findings(kube_score: str, objects: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(object, check, comment) of everything kube-score does not like."""
    command = [kube_score, "score", "--output-format", "json", "--kubernetes-version", "v1.34", "-"]
    text = yaml.safe_dump_all(objects)
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    found = []
    for scored in json.loads(answer.stdout):
        for check in scored["checks"]:
            if check["skipped"] or check["grade"] >= 10:
                continue
            comments = check["comments"] or [{"summary": ""}]
            found += [(scored["object_name"], check["check"]["id"], comment["summary"]) for comment in comments]
    return found


def unexplained(found: list[tuple[str, str, str]], details: dict[str, str]) -> list[tuple[str, str, str]]:
    return [item for item in found if not (ACCEPTED.get(item[1]) or item[2] in details)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_helm_3_and_helm_4_render_the_same(helm: Any, helm4: Any, file: Path) -> None:
    first, second = rendered(helm, file), rendered(helm4, file)

    def key(item: dict[str, Any]) -> tuple[str, str, str]:
        return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]

    assert sorted(map(key, first)) == sorted(map(key, second))
    assert sorted(first, key=key) == sorted(second, key=key)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kube_score_finds_nothing_that_is_not_explained(helm: Any, kube_score: str, file: Path) -> None:
    assert unexplained(findings(kube_score, rendered(helm, file)), ACCEPTED_DETAILS) == []


@pytest.mark.parametrize("made", MADE)
def test_kube_score_finds_nothing_unexplained_in_what_the_operator_makes(kube_score: str, made: str) -> None:
    assert unexplained(findings(kube_score, MADE[made]()), ACCEPTED_OF_WORKERS) == []


@pytest.mark.parametrize("version", ["helm", "helm4"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_helm_lint_has_nothing_to_say(request: pytest.FixtureRequest, version: str, file: Path) -> None:
    program = request.getfixturevalue(version).path
    command = [program, "lint", "--strict", "--kube-version", "1.34.0", "--values", file, CHART]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 chart(s) linted, 0 chart(s) failed" in done.stdout, done.stdout


def test_kube_score_would_see_a_pod_that_may_write_its_root(helm: Any, kube_score: str) -> None:
    objects = rendered(helm, VALUES / "defaults.yaml")
    (pods,) = [item for item in objects if item["kind"] == "Deployment"]
    pods["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False
    ids = [check for _, check, _ in unexplained(findings(kube_score, objects), ACCEPTED_DETAILS)]
    assert ids == ["container-security-context-readonlyrootfilesystem"]


def test_no_explanation_is_out_of_date(helm: Any, kube_score: str) -> None:
    seen = {check for file in FILES for _, check, _ in findings(kube_score, rendered(helm, file))}
    seen |= {check for made in MADE.values() for _, check, _ in findings(kube_score, made())}
    assert set(ACCEPTED) - seen == set()
