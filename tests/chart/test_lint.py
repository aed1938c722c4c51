"""Rendered manifests against Kubernetes' own schemas and against kube-score, under Helm 3 and Helm 4."""

from __future__ import annotations

import json
import subprocess
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

pytestmark = pytest.mark.slow  # real linters

VALUES = Path(__file__).parent / "values"
FILES = sorted(VALUES.glob("*.yaml"))

# kube-score's findings that stay, and why.
ACCEPTED = {
    "container-image-pull-policy": "tags of releases never move and digests cannot; Always would need the registry at every start",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints do this, and let two pods share the only node",
    "container-resources": "",  # the details are in ACCEPTED_DETAILS: only the processor's limit is left out
    "container-ephemeral-storage-request-and-limit": "",
}
ACCEPTED_DETAILS = {
    "CPU limit is not set": "a limit would throttle the start, when Python is imported, and a fast takeover; the request reserves a share",
}
# What a user leaves out of spec.worker.resources is theirs to say: nobody else knows how large the model is.
ACCEPTED_OF_WORKERS = ACCEPTED_DETAILS | {
    "CPU request is not set": "spec.worker.resources",
    "Memory limit is not set": "spec.worker.resources",
    "Memory request is not set": "spec.worker.resources",
    "Ephemeral Storage limit is not set": "spec.worker.resources; the root file system is read-only and the state folder is limited",
    "Ephemeral Storage request is not set": "spec.worker.resources",
}


def rendered(helm: Any, file: Path) -> list[dict[str, Any]]:
    return list(helm.template(**(yaml.safe_load(file.read_text()) or {})))


def workers() -> list[dict[str, Any]]:
    """What the operator makes for a service, as it would be applied."""
    spec = {
        "model": {"uri": "oci://registry.example/digits:1"},
        "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
        "protocols": ["HTTP", "GRPC"],
        "replicas": 2,
    }
    service = Service("default", "digits", "0d0d0d0d-0000-0000-0000-000000000000", 1, parse_spec(spec))
    settings = WorkerSettings("registry.example/offramp/worker:1.2.3")
    operator = OperatorPods("offramp-system", {"app.kubernetes.io/name": "offramp"})
    return [
        deployment(service, WorkerIdentity("key", "token"), settings, replicas=2),
        network_service(service),
        disruption_budget(service),
        network_policy(service, operator, allow_egress=False),
        plan_config_map(service, document="{}", epoch=1),
    ]


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


def test_kube_score_finds_nothing_unexplained_in_a_services_workers(kube_score: str) -> None:
    assert unexplained(findings(kube_score, workers()), ACCEPTED_OF_WORKERS) == []


def test_kube_score_would_see_a_pod_that_may_write_its_root(helm: Any, kube_score: str) -> None:
    objects = rendered(helm, VALUES / "defaults.yaml")
    (pods,) = [item for item in objects if item["kind"] == "Deployment"]
    pods["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False
    ids = [check for _, check, _ in unexplained(findings(kube_score, objects), ACCEPTED_DETAILS)]
    assert ids == ["container-security-context-readonlyrootfilesystem"]


def test_no_explanation_is_out_of_date(helm: Any, kube_score: str) -> None:
    seen = {check for file in FILES for _, check, _ in findings(kube_score, rendered(helm, file))}
    seen |= {check for _, check, _ in findings(kube_score, workers())}
    assert set(ACCEPTED) - seen == set()
