"""Values: every wrong one is refused by `helm template` with its path, under Helm 3 and Helm 4, before anything is
rendered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow  # real helm

CHART = Path(__file__).resolve().parents[2] / "helm" / "offramp"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
REQUIREMENT = "matchExpressions.0"
SELECTOR = {
    "matchLabels.a": "b c",
    f"{REQUIREMENT}.key": "-a",
    f"{REQUIREMENT}.operator": "Gt",
    f"{REQUIREMENT}.values.0": "!",
}
POD_TERM = {
    "topologyKey": "a b",
    "namespaces.0": "No Name",
    "matchLabelKeys.0": "a/b/c",
    "mismatchLabelKeys.0": 1,
    **{f"labelSelector.{k}": v for k, v in SELECTOR.items()},
    **{f"namespaceSelector.{k}": v for k, v in SELECTOR.items()},
}
PEER = {
    "ipBlock.cidr": "abc",
    "ipBlock.except.0": "10.0.0.0/33",
    **{f"podSelector.{k}": v for k, v in SELECTOR.items()},
    **{f"namespaceSelector.{k}": v for k, v in SELECTOR.items()},
}
NODE_TERM = {
    f"{group}.0.{name}": value
    for group in ("matchExpressions", "matchFields")
    for name, value in {"key": "a b", "operator": "Maybe", "values.0": "two words"}.items()
}
SOFT, HARD = "preferredDuringSchedulingIgnoredDuringExecution", "requiredDuringSchedulingIgnoredDuringExecution"
MONITOR = {"enabled": "yes", "interval": "often", "labels.a": "my prometheus"}

# One wrong value for each field there is; a test below sees to it that none is left out.
WRONG: dict[str, Any] = {
    "crds.enabled": "true",
    "crds.keep": 1,
    "scope.kind": "galaxy",
    "scope.namespaces.0": "Team_A",
    "scope.workerClasses": "yes",
    "fullnameOverride": "9 lives",
    "userRoles.enabled": "no",
    "rbac.httpRoutes": "some",
    "replicas": -1,
    "shards": 0,
    "image.repository": "https://registry.example/operator",
    "image.tag": "not a tag",
    "image.digest": "sha256:1234",
    "image.pullPolicy": "Sometimes",
    "workerImage.repository": "",
    "workerImage.tag": "a:b",
    "workerImage.digest": "latest",
    "workerImage.pullSecrets.0": "Registry",
    "imagePullSecrets.0.name": "My Registry",
    "signingKey.existingSecret": "a..b",
    "serviceAccount.create": "yes",
    "serviceAccount.name": "Brain!",
    "serviceAccount.annotations.a": 1,
    "web.enabled": "yes",
    "web.expose": 1,
    "web.port": 80,
    "web.hosts.0": "Offramp.Example",
    "networkPolicies.operator.enabled": "on",
    "networkPolicies.operator.apiServerPorts.0": 70000,
    **{f"networkPolicies.operator.from.0.{k}": v for k, v in PEER.items()},
    **{f"networkPolicies.operator.extraEgress.0.to.0.{k}": v for k, v in PEER.items()},
    "networkPolicies.operator.extraEgress.0.ports.0.protocol": "HTTP",
    "networkPolicies.operator.extraEgress.0.ports.0.port": "http!",
    "networkPolicies.operator.extraEgress.0.ports.0.endPort": 0,
    "networkPolicies.workers.enabled": 0,
    "networkPolicies.workers.allowEgress": "some",
    "delivery.allowPrivateNetworks": "yes",
    "delivery.sizeLimit": "16GB",
    "delivery.timeout": "soon",
    **{f"monitoring.serviceMonitor.{k}": v for k, v in MONITOR.items()},
    **{f"monitoring.podMonitor.{k}": v for k, v in MONITOR.items()},
    "monitoring.rules.enabled": [],
    "monitoring.rules.namespace": "Monitoring",
    "monitoring.rules.runbookUrl": "the wiki",
    "monitoring.rules.labels.a": "a!",
    "monitoring.dashboards.enabled": "all",
    "monitoring.dashboards.namespace": "a.b",
    "monitoring.dashboards.labels.a": 1,
    "monitoring.dashboards.annotations.a": 1,
    "podDisruptionBudget.enabled": 1,
    "logLevel": "loud",
    "extraEnv.0.name": "OFFRAMP_PORT",
    "extraEnv.0.value": 1,
    "resources.requests.cpu": "much",
    "resources.limits.memory": "1ki",
    "commonLabels.a": "two words",
    "commonAnnotations.a": 1,
    "podLabels.a": "x" * 64,
    "podAnnotations.a": {},
    "priorityClassName": "High Class",
    "nodeSelector.a": "ssd!",
    "tolerations.0.key": "a b",
    "tolerations.0.operator": "Maybe",
    "tolerations.0.value": True,
    "tolerations.0.effect": "NoBeer",
    "tolerations.0.tolerationSeconds": "10s",
    **{f"affinity.nodeAffinity.{HARD}.nodeSelectorTerms.0.{k}": v for k, v in NODE_TERM.items()},
    f"affinity.nodeAffinity.{SOFT}.0.weight": 101,
    **{f"affinity.nodeAffinity.{SOFT}.0.preference.{k}": v for k, v in NODE_TERM.items()},
    **{
        f"affinity.{kind}.{path}.{k}": v
        for kind in ("podAffinity", "podAntiAffinity")
        for path in (f"{HARD}.0", f"{SOFT}.0.podAffinityTerm")
        for k, v in POD_TERM.items()
    },
    f"affinity.podAffinity.{SOFT}.0.weight": 0,
    f"affinity.podAntiAffinity.{SOFT}.0.weight": "1",
    "topologySpreadConstraints.0.maxSkew": 0,
    "topologySpreadConstraints.0.topologyKey": "",
    "topologySpreadConstraints.0.whenUnsatisfiable": "Never",
    "topologySpreadConstraints.0.minDomains": 0,
    **{f"topologySpreadConstraints.0.labelSelector.{k}": v for k, v in SELECTOR.items()},
    "topologySpreadConstraints.0.matchLabelKeys.0": 1,
    "topologySpreadConstraints.0.nodeAffinityPolicy": "Maybe",
    "topologySpreadConstraints.0.nodeTaintsPolicy": "Maybe",
}


def port(**given: Any) -> dict[str, Any]:
    return {"networkPolicies": {"operator": {"extraEgress": [{"ports": [given]}]}}}


# What is wrong only together, of the wrong shape as a whole, or has no place: values and the path that the error names.
COMBINATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no namespace to watch": ({"scope": {"kind": "namespaces", "namespaces": []}}, "/scope/namespaces"),
    "namespaces of the whole cluster": ({"scope": {"kind": "cluster", "namespaces": ["team-a"]}}, "/scope/namespaces"),
    "a namespace twice": ({"scope": {"kind": "namespaces", "namespaces": ["a", "a"]}}, "/scope/namespaces"),
    "the page on the port of health": ({"web": {"port": 8080}}, "/web/port"),
    "no port of the API server": (
        {"networkPolicies": {"operator": {"apiServerPorts": []}}},
        "/networkPolicies/operator/apiServerPorts",
    ),
    "an account of somebody else without a name": ({"serviceAccount": {"create": False}}, "/serviceAccount/name"),
    "a name instead of an object": ({"imagePullSecrets": ["registry"]}, "/imagePullSecrets/0"),
    "a label that is the chart's": ({"podLabels": {"app.kubernetes.io/name": "mine"}}, "/podLabels"),
    "a label of Helm's": ({"commonLabels": {"helm.sh/chart": "mine"}}, "/commonLabels"),
    "a label that would aggregate": (
        {"commonLabels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}},
        "/commonLabels",
    ),
    "a label without a valid key": ({"podLabels": {"my key": "x"}}, "/podLabels"),
    "a node label without a valid key": ({"nodeSelector": {"Example.Com/disk": "ssd"}}, "/nodeSelector"),
    "an annotation without a valid key": ({"commonAnnotations": {"a/b/c": "x"}}, "/commonAnnotations"),
    "a range of ports from a name": (
        port(port="http", endPort=90),
        "/networkPolicies/operator/extraEgress/0/ports/0/port",
    ),
    "a port beyond the last": (port(port=65536), "/networkPolicies/operator/extraEgress/0/ports/0/port"),
    "half a constraint": ({"topologySpreadConstraints": [{"maxSkew": 1}]}, "/topologySpreadConstraints/0"),
    "nothing where something must be": ({"replicas": None}, "replicas"),
}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Values with one field set; a number in the path is the only element of a list."""
    result = value
    for part in reversed(path.split(".")):
        result = [result] if part == "0" else {part: result}
    return dict(result)


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return SCHEMA["definitions"][reference.rsplit("/", 1)[1]] if reference else node


def objects(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema that lists its properties, with its path."""
    node = resolved(node)
    if "properties" in node:
        yield path, node
        for name, child in node["properties"].items():
            yield from objects(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from objects(node["items"], f"{path}.0")


def leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of every field that holds a plain value, a list or a map of them."""
    for where, found in objects(node, path):
        for name, child in found["properties"].items():
            inner = resolved(child)
            if "properties" not in inner and "properties" not in resolved(inner.get("items", {})) and name != "global":
                yield f"{where}.{name}".lstrip(".")


@pytest.mark.parametrize("version", ["helm", "helm4"])
def test_every_wrong_value_is_refused_by_its_path(version: str, request: pytest.FixtureRequest) -> None:
    """All at once, for the error has a line for each: what is named among the others would be named alone."""
    values: dict[str, Any] = {}
    for path, value in WRONG.items():
        merge(values, nested(path, value))
    answer = request.getfixturevalue(version).try_template(values)
    assert answer.returncode != 0
    unnamed = [path for path in WRONG if f"at '/{path.replace('.', '/')}'" not in answer.stderr]
    assert unnamed == []


@pytest.mark.parametrize("path", ["replicas", "networkPolicies.operator.from.0.ipBlock.cidr", "commonLabels.a"])
def test_one_wrong_value_is_enough(helm: Any, path: str) -> None:
    answer = helm.try_template(nested(path, WRONG[path]))
    assert answer.returncode != 0
    assert [line for line in answer.stderr.splitlines() if line.startswith("- at ")] == [
        line for line in answer.stderr.splitlines() if f"'/{path.replace('.', '/')}'" in line
    ]


@pytest.mark.parametrize(("values", "where"), COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_what_does_not_go_together_is_refused(helm: Any, values: dict[str, Any], where: str) -> None:
    answer = helm.try_template(values)
    assert answer.returncode != 0
    assert where in answer.stderr
    assert "values don't meet the specifications of the schema" in answer.stderr


def resources(request: Any, limit: Any, name: str = "memory") -> dict[str, Any]:
    return {"resources": {"requests": {name: request}, "limits": {name: limit}}}


COMPARED = {
    "a range of ports that ends before it begins": (
        port(port=443, endPort=80),
        "networkPolicies.operator.extraEgress.0.ports.0.endPort: 80 is below port 443",
    ),
    "more requested than allowed": (
        resources("2Gi", "2G"),
        "resources.requests.memory: 2Gi is more than resources.limits.memory, 2G",
    ),
    "a whole number against thousandths": (resources(1, "900m", "cpu"), "resources.requests.cpu: 1 is more"),
    "a bundle larger than the operator takes": (
        {"delivery": {"sizeLimit": "1025Gi"}},
        "delivery.sizeLimit: 1025Gi is more than 1024Gi",
    ),
    "large numbers": (resources(2000000000, "1e9"), "resources.requests.memory: 2e+09 is more"),
}


@pytest.mark.parametrize(("values", "sentence"), COMPARED.values(), ids=COMPARED.keys())
def test_two_values_that_contradict_each_other_are_refused(helm: Any, values: dict[str, Any], sentence: str) -> None:
    answer = helm.try_template(values)
    assert answer.returncode != 0
    assert sentence in answer.stderr


@pytest.mark.parametrize(
    "values",
    [
        resources("1e3", "2E3"),
        resources("1Ki", "1.5k"),
        resources("0.5", 0.5, "cpu"),
        resources(".5", "1.", "cpu"),
        resources("100u", "1m", "cpu"),
        resources(1000000000, "1Gi"),
        port(port=80, endPort=80),
        port(port="grpc-otlp"),
        port(),
        {
            "networkPolicies": {
                "operator": {
                    "from": [
                        {"ipBlock": {"cidr": c}}
                        for c in ("0.0.0.0/0", "10.1.2.3/32", "::/0", "fd00:10::/64", "2001:db8:0:0:0:0:0:1/128")
                    ]
                }
            }
        },
        {"commonLabels": {"a.b-c/D_e.f": "X_y.z-1", "empty": ""}, "commonAnnotations": {"a/b": "any text, äöü!"}},
    ],
    ids=str,
)
def test_what_kubernetes_takes_is_taken(helm: Any, values: dict[str, Any]) -> None:
    assert helm.try_template(values).stderr == ""


def test_every_field_has_a_wrong_value_in_the_table() -> None:
    tried = list(WRONG)
    missing = [
        leaf for leaf in leaves(SCHEMA) if not any(path == leaf or path.startswith(f"{leaf}.") for path in tried)
    ]
    assert missing == []


def test_every_object_is_closed(helm: Any) -> None:
    """One stray key in each object, all at once: the error names every place."""
    places = [path for path, _ in objects(SCHEMA) if path]
    values: dict[str, Any] = {"stray": 1}
    for path in places:
        merge(values, nested(f"{path}.stray", 1))
    error = helm.try_template(values).stderr
    unnamed = [p for p in places if f"at '/{p.replace('.', '/')}'" not in error]
    assert unnamed == []
    assert error.count("additional properties 'stray' not allowed") == len(places) + 1


def merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, list) and name in into:
            merge(into[name][0], value[0])
        elif isinstance(value, dict) and name in into:
            merge(into[name], value)
        else:
            into[name] = value


def test_every_value_is_in_the_schema_and_every_schema_entry_is_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = ("resources", "affinity", "networkPolicies.operator.from", "networkPolicies.operator.extraEgress")
    for path, node in objects(SCHEMA):
        if path.endswith(".0") or ".0." in path or path.startswith(free):
            continue
        value = values
        for name in path.split(".") if path else ():
            value = value[name]
        assert set(value) == set(node["properties"]) - {"global"}, path
        assert node["additionalProperties"] is False, path
        assert set(node["required"]) == set(value), path


def test_every_value_is_used_by_a_template() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def used(leaf: str) -> bool:
        parts = leaf.split(".")
        parents = [re.escape(".".join(parts[:n])) for n in range(1, len(parts))]
        whole = any(re.search(rf"(toYaml|with) \.Values\.{parent}\s", templates) for parent in parents)
        passed = any(re.search(rf"\.Values\.{parent}[ )]", templates) for parent in parents)
        return (
            f"Values.{leaf}" in templates or (passed and f".{parts[-1]}" in templates) or (whole and parts[0] in WHOLE)
        )

    assert [leaf for leaf in leaves(SCHEMA) if ".0." not in leaf and not used(leaf)] == []


WHOLE = ("resources", "affinity")  # written out as they are
