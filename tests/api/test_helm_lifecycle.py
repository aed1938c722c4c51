"""Install, upgrade, uninstall and install again, by the real Helm on a real API server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

ROOT = Path(__file__).resolve().parents[2]
CHART = str(ROOT / "helm" / "offramp")
NAMESPACE = "helm-lifecycle"
NAMESPACED = (
    "deployments.apps",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "poddisruptionbudgets",
    "secrets",
    "configmaps",
)
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helm(api: Any, program: Callable[[str], str]) -> Iterator[Helm]:
    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [program("helm"), *arguments, f"--kubeconfig={api.kubeconfig}", f"--namespace={NAMESPACE}"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True)
        assert answer.returncode == 0 or not check, answer.stderr
        return answer

    yield run
    run("uninstall", "offramp", "--ignore-not-found")


def install(helm: Helm) -> str:
    # The CRDs are there already, put there by the fixture that all these tests share.
    return helm("install", "offramp", CHART, "--create-namespace", "--take-ownership").stdout


def signing_key(api: Any) -> str:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "offramp-signing-key", "namespace": NAMESPACE}}
    return str(api.get(secret)["data"]["signing-key"])


def left_over(api: Any) -> list[str]:
    """Everything in the namespace that Kubernetes itself did not put there."""
    listed = api.kubectl("get", ",".join(NAMESPACED), "-n", NAMESPACE, "-o", "name").stdout.split()
    own = api.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").stdout.split()
    return [name for name in listed if name not in ("serviceaccount/default", "configmap/kube-root-ca.crt")] + [
        name for name in own if NAMESPACE in name
    ]


def test_an_upgrade_keeps_the_signing_key(api: Any, helm: Helm) -> None:
    install(helm)
    key = signing_key(api)
    helm("upgrade", "offramp", CHART, "--set", "replicas=3")
    assert signing_key(api) == key
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "offramp", "namespace": NAMESPACE},
    }
    assert api.get(deployment)["spec"]["replicas"] == 3


def test_uninstalling_leaves_the_crds_and_the_services_and_nothing_else(clean: Any, manifests: Any, helm: Helm) -> None:
    install(helm)
    service = manifests.service("survivor")
    assert clean.create(service, keep=True).status_code == 201
    helm("uninstall", "offramp")
    assert left_over(clean) == []
    assert clean.get(service)["spec"]["execution"] == "Auto"
    install(helm)
    assert clean.get(service)["spec"]["execution"] == "Auto"


def test_an_upgrade_brings_new_rules(api: Any, helm: Helm) -> None:
    install(helm)
    crd: dict[str, Any] = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "earlyexitservices.earlyexit.dev"},
    }
    columns = len(api.get(crd)["spec"]["versions"][0]["additionalPrinterColumns"])
    drop = [{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns/0"}]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
    api.request("PATCH", path, drop, content_type="application/json-patch+json")
    assert len(api.get(crd)["spec"]["versions"][0]["additionalPrinterColumns"]) == columns - 1
    helm("upgrade", "offramp", CHART)
    assert len(api.get(crd)["spec"]["versions"][0]["additionalPrinterColumns"]) == columns


def test_the_notes_name_three_commands(api: Any, helm: Helm) -> None:
    notes = install(helm)
    commands = [line.strip() for line in notes.splitlines() if line.startswith("   ")]
    assert commands == [
        f"kubectl -n {NAMESPACE} rollout status deployment/offramp",
        "kubectl apply -f manifests/samples/digits.yaml",
        "kubectl get earlyexitservices --all-namespaces --watch",
    ]
    assert (ROOT / commands[1].split()[-1]).is_file()
    # Watching ends by itself only here.
    assert api.kubectl(*commands[2].split()[1:], "--request-timeout=10s").stderr in ("", "No resources found\n")


def test_the_notes_say_what_is_needed_and_what_stays(helm: Helm) -> None:
    notes = install(helm)
    for said in (
        "pull offramp/operator:",
        "makes a new key every time",
        "leaves the kinds, all services and their workers",
    ):
        assert said in notes
    own = helm("upgrade", "offramp", CHART, "--set", "signingKey.existingSecret=mine,crds.keep=false").stdout
    assert "key" not in own and "removes the kinds" in own
    helm("upgrade", "offramp", CHART, "--reset-values")  # so that the uninstall leaves the kinds to others
    for page in re.findall(r"docs/[\w/-]+\.md", notes):
        assert (ROOT / page).is_file(), page
