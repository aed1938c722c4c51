"""kubeconform on every rendered manifest, by the schemas that a real API server publishes for its kinds and ours."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

ROOT = Path(__file__).resolve().parents[2]
CHART_TESTS = ROOT / "tests" / "chart"
FILES = sorted((CHART_TESTS / "values").glob("*.yaml"))
# But for those that only kubectl kustomize reads, and refuses by itself.
GITOPS = sorted(f for f in (ROOT / "gitops").rglob("*.yaml") if "kustomize.config.k8s.io" not in f.read_text())
NAMES = "#/components/schemas/"
GROUPS = (
    "api/v1",
    "apis/apps/v1",
    "apis/policy/v1",
    "apis/networking.k8s.io/v1",
    "apis/rbac.authorization.k8s.io/v1",
    "apis/apiextensions.k8s.io/v1",
    "apis/earlyexit.dev/v1alpha1",
)

Check = Callable[[list[dict[str, Any]]], list[str]]


def closed(node: Any) -> Any:
    """What kubeconform calls strict: nothing but what a schema lists."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {name: closed(value) for name, value in node.items() if not name.startswith("x-kubernetes")}
    if "properties" in node:  # the names in it are fields, even where they read like words of a schema
        result["properties"] = {name: closed(value) for name, value in node["properties"].items()}
        result.setdefault("additionalProperties", False)
    return result


def write_schemas(api: Any, folder: Path) -> None:
    """One file per kind, with everything it refers to."""
    for path in GROUPS:
        published = published_schemas(api, path)
        schemas = {name: closed(node) for name, node in published.items()}
        for name, node in published.items():
            for kind in node.get("x-kubernetes-group-version-kind", ()):
                group = kind["group"].split(".")[0]
                version = f"{group}-{kind['version']}" if group else kind["version"]
                wanted = {other: schemas[other] for other in needed(schemas, name)}
                text = json.dumps(schemas[name] | {"components": {"schemas": wanted}})
                (folder / f"{kind['kind'].lower()}-{version}.json").write_text(text)


def published_schemas(api: Any, path: str) -> dict[str, Any]:
    """A young API server is ready before it has collected the schemas of every group."""
    deadline = time.monotonic() + 60
    while (answer := api.request("GET", f"/openapi/v3/{path}")).status_code != 200:
        assert time.monotonic() < deadline, f"no schemas of {path}: {answer.status_code} {answer.text[:200]}"
        time.sleep(0.2)
    schemas: dict[str, Any] = answer.json()["components"]["schemas"]
    return schemas


def needed(definitions: dict[str, Any], name: str) -> set[str]:
    """Names of all definitions that one refers to, also through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        text = json.dumps(definitions[waiting.pop()])
        found = {part.split('"', 1)[0] for part in text.split(NAMES)[1:]} - seen
        seen |= found
        waiting += found
    return seen


@pytest.fixture(scope="module")
def conform(api: Any, tool: Callable[[str, str], str], tmp_path_factory: pytest.TempPathFactory) -> Check:
    """What kubeconform has against objects, one line each."""
    folder = tmp_path_factory.mktemp("schemas")
    write_schemas(api, folder)
    for file in (CHART_TESTS / "schemas").glob("*.json"):  # kinds of others, who are not installed here
        (folder / file.name).write_text(file.read_text())

    def check(objects: list[dict[str, Any]]) -> list[str]:
        location = str(folder) + "/{{ .ResourceKind }}{{ .KindSuffix }}.json"
        command = [tool("charts", "kubeconform"), "-strict", "-output", "json", "-schema-location", location, "-"]
        answer = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True, check=False)
        found = json.loads(answer.stdout)["resources"]
        return [f"{item['kind']} {item['name']}: {item['status']} {item['msg']}" for item in found]

    return check


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_rendered_manifest_conforms(conform: Check, chart: Any, file: Path) -> None:
    assert conform(chart(**yaml.safe_load(file.read_text()))) == []


@pytest.mark.parametrize(
    "file",
    [ROOT / "manifests" / "install.yaml", *sorted((ROOT / "manifests" / "samples").glob("*.yaml")), *GITOPS],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_every_file_to_apply_conforms(conform: Check, file: Path) -> None:
    assert conform(list(yaml.safe_load_all(file.read_text()))) == []


def test_what_does_not_conform_is_found(conform: Check, manifests: Any) -> None:
    stray = manifests.changed(manifests.service(), "spec.modle", 1)
    unknown = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": "x"},
        "spec": {"endpoint": []},
    }
    release = {
        "apiVersion": "helm.toolkit.fluxcd.io/v2",
        "kind": "HelmRelease",
        "metadata": {"name": "x"},
        "spec": {"chrt": {}},
    }
    of_service, of_release, of_monitor = sorted(conform([stray, unknown, release]))
    assert "modle" in of_service and "chrt" in of_release and "endpoint" in of_monitor
