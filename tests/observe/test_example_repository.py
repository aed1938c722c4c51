"""The example repository holds together: everything that one of its files names is there, and what it needs is applied
before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
GITOPS = ROOT / "gitops"
EXAMPLE = GITOPS / "example-repository"
CHART = ROOT / "helm" / "offramp"
CLUSTER_SCOPED = {"Namespace"}
BOOTSTRAPPED = {"flux-system"}  # by `flux bootstrap`: a namespace, and a GitRepository of that name
Json = dict[str, Any]
pytestmark = pytest.mark.slow


def program(name: str) -> str:
    built = subprocess.run([ROOT / "cluster" / "build", name], capture_output=True, text=True, check=True)
    return f"{built.stdout.strip()}/{name}"


def kustomize(folder: Path) -> list[Json]:
    done = subprocess.run([program("kubectl"), "kustomize", folder], capture_output=True, text=True, check=True)
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def files(folder: Path) -> Iterator[Json]:
    for path in sorted(folder.rglob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def render(values: Json) -> list[Json]:
    command = [program("helm"), "template", "offramp", str(CHART), "--kube-version", "1.34.0", "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def allows_the_chart(versions: str) -> bool:
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] in SpecifierSet(versions.replace(" ", ","))


def named(kind: str, items: list[Json]) -> set[str]:
    return {item["metadata"]["name"] for item in items if item["kind"] == kind}


def homeless(items: list[Json], namespaces: set[str]) -> list[Json]:
    return [i for i in items if i["kind"] not in CLUSTER_SCOPED and i["metadata"].get("namespace") not in namespaces]


def test_flux_finds_everything_that_it_is_told_to_apply() -> None:
    steps = list(files(EXAMPLE / "clusters" / "production"))
    assert {step["apiVersion"].split("/")[0] for step in steps} == {"kustomize.toolkit.fluxcd.io"}, (
        "Argo CD's are elsewhere"
    )
    assert homeless(steps, BOOTSTRAPPED) == []
    by_name = {step["metadata"]["name"]: step["spec"] for step in steps}
    assert set(by_name) == {"offramp-operator", "early-exit-services"}
    applied = {name: kustomize(EXAMPLE / spec["path"]) for name, spec in by_name.items()}
    for name, spec in by_name.items():
        assert spec["sourceRef"]["name"] in BOOTSTRAPPED
        before = {need["name"] for need in spec.get("dependsOn", ())}
        assert before <= set(by_name)
        namespaces = set().union(*(named("Namespace", applied[step]) for step in {name, *before}))
        assert homeless(applied[name], namespaces) == []
    assert by_name["offramp-operator"]["wait"], "its kinds must be there before services are"
    assert by_name["early-exit-services"]["dependsOn"] == [{"name": "offramp-operator"}]
    assert named("EarlyExitService", applied["early-exit-services"]) == {"digits"}


def test_flux_gets_the_operator_from_a_chart_of_this_release() -> None:
    objects = {item["kind"]: item for item in kustomize(EXAMPLE / "infrastructure" / "offramp")}
    source, release = objects["OCIRepository"], objects["HelmRelease"]
    wanted = release["spec"]["chartRef"]
    assert (wanted["kind"], wanted["name"]) == ("OCIRepository", source["metadata"]["name"])
    assert wanted.get("namespace", release["metadata"]["namespace"]) == source["metadata"]["namespace"]
    assert allows_the_chart(source["spec"]["ref"]["semver"])
    assert "Deployment" in {item["kind"] for item in render(release["spec"]["values"])}


def test_argo_cd_gets_the_operator_and_the_services() -> None:
    apps = {app["metadata"]["name"]: app["spec"] for app in files(EXAMPLE / "argocd")}
    operator, services = apps["offramp-operator"], apps["early-exit-services"]
    assert allows_the_chart(operator["source"]["targetRevision"])
    assert "CreateNamespace=true" in operator["syncPolicy"]["syncOptions"]
    rendered = render(operator["source"]["helm"]["valuesObject"])
    assert named("Secret", rendered) == set(), "Argo CD would make a new signing key at every rendering"
    objects = kustomize(EXAMPLE / services["source"]["path"])
    assert homeless(objects, named("Namespace", objects)) == []
    # Nothing makes one Application wait for another: it is tried again.
    assert "SkipDryRunOnMissingResource=true" in services["syncPolicy"]["syncOptions"]
    assert services["syncPolicy"]["retry"]["limit"] == -1


def test_what_stands_alone_is_what_the_example_uses() -> None:
    alone = (GITOPS / "flux" / "kustomization.yaml").read_text()
    assert alone == (EXAMPLE / "clusters" / "production" / "services.yaml").read_text()
