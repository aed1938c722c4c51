"""The chart: what it renders, what it refuses, and that nothing generated from it is stale."""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import offramp_worker
from offramp_operator.settings import parse_settings

pytestmark = pytest.mark.slow  # real helm

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "offramp"
KINDS = [
    "earlyexitservices.earlyexit.dev",
    "rampconfigs.earlyexit.dev",
    "ramprollouts.earlyexit.dev",
    "workerclasses.earlyexit.dev",
    "workerpools.earlyexit.dev",
]

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one namespace": {"scope": {"kind": "namespaces", "namespaces": ["team-a"]}},
    "two namespaces": {"scope": {"kind": "namespaces", "namespaces": ["team-a", "team-b"]}},
    "no CRDs": {"crds": {"enabled": False}},
    "own key": {"signingKey": {"existingSecret": "my-key"}},
    "single replica": {"replicas": 1},
    "page for everybody": {"web": {"expose": True, "port": 9000, "hosts": ["offramp.example.com"]}},
    "no page": {"web": {"enabled": False}},
    "no budget": {"podDisruptionBudget": {"enabled": False}},
    "everything set": {
        "image": {"repository": "registry.example/operator", "tag": "1.2.3", "pullPolicy": "Always"},
        "commonLabels": {"cost-center": "42"},
        "commonAnnotations": {"example.com/owner": "ml"},
        "networkPolicies": {
            "operator": {
                "apiServerPorts": [6443],
                "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "extraEgress": [
                    {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 4317, "protocol": "TCP"}]}
                ],
            },
            "workers": {"allowEgress": True},
        },
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True},
            "rules": {"enabled": True},
            "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Offramp"}},
        },
        "workerImage": {"repository": "registry.example/worker", "tag": "4.5.6"},
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount": {"name": "brain", "annotations": {"example.com/role": "x"}},
        "podLabels": {"team": "ml"},
        "podAnnotations": {"example.com/note": "y"},
        "priorityClassName": "high",
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["system"]}]}
                    ]
                }
            },
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}},
                    }
                ]
            },
        },
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "resources": {"limits": {"cpu": 1}},
    },
}


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = of_kind(objects, kind)
    return found


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container(objects)["env"]}


# --- generated files -------------------------------------------------------------------------------


def test_the_charts_copy_of_the_crds_is_in_step() -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / "crds" / "sync.py", "--check"], check=False, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr


def test_the_drift_check_sees_a_changed_a_missing_and_a_leftover_copy(tmp_path: Path) -> None:
    crds, copy = tmp_path / "crds", tmp_path / "helm" / "offramp" / "files" / "crds"
    crds.mkdir()
    copy.mkdir(parents=True)
    script = crds / "sync.py"
    script.write_bytes((ROOT / "crds" / "sync.py").read_bytes())
    (crds / "a.yaml").write_text("a: 1")
    (crds / "b.yaml").write_text("b: 1")
    (copy / "a.yaml").write_text("a: 2")
    (copy / "c.yaml").write_text("c: 1")
    stale = subprocess.run([sys.executable, script, "--check"], check=False, capture_output=True, text=True)
    assert stale.returncode == 1
    assert [name for name in ("a.yaml", "b.yaml", "c.yaml") if name in stale.stderr] == ["a.yaml", "b.yaml", "c.yaml"]
    subprocess.run([sys.executable, script], check=True)
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0


def test_readme_and_install_manifest_are_in_step(helm: Any) -> None:
    command = [sys.executable, ROOT / "helm" / "docs.py", "--check", "--helm", helm.path]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_a_value_without_a_comment_is_found() -> None:
    specification = importlib.util.spec_from_file_location("chart_docs", ROOT / "helm" / "docs.py")
    assert specification and specification.loader
    docs = importlib.util.module_from_spec(specification)
    sys.modules["chart_docs"] = docs
    specification.loader.exec_module(docs)
    found = docs.documented_values(
        "a:\n  # -- First, over\n  # two lines.\n  b: 1\n  # not this one\n# -- Second.\nc: [1]\n"
    )
    assert [(item.path, item.default, item.text) for item in found] == [
        ("a.b", "1", "First, over two lines."),
        ("c", "[1]", "Second."),
    ]
    with pytest.raises(ValueError, match=r"a\.b has no comment"):
        docs.documented_values("a:\n  b: 1\n# -- Second.\nc: 2\n")


def test_the_install_manifest_carries_no_key_and_no_word_of_helm() -> None:
    text = (ROOT / "manifests" / "install.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    assert not of_kind(objects, "Secret")
    assert "helm.sh" not in text
    assert "managed-by: Helm" not in text


def test_the_first_sample_has_ten_lines_and_every_sample_is_one_service() -> None:
    samples = {path.name: path.read_text() for path in (ROOT / "manifests" / "samples").glob("*.yaml")}
    assert len(samples["digits.yaml"].splitlines()) == 10
    for name, text in samples.items():
        (manifest,) = list(yaml.safe_load_all(text))
        assert manifest["kind"] == "EarlyExitService", name


# --- rendering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_renders_objects_with_the_fixed_labels(helm: Any, values: dict[str, Any]) -> None:
    objects = helm.template(**values)
    names = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names), "two objects of the same name"
    for item in objects:
        assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "offramp"
    selector = only(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()


def test_the_crds_are_those_of_the_source_and_are_kept(helm: Any) -> None:
    rendered = of_kind(helm.template(), "CustomResourceDefinition")
    assert sorted(crd["metadata"]["name"] for crd in rendered) == KINDS
    sources = {
        crd["metadata"]["name"]: crd
        for crd in map(yaml.safe_load, (p.read_text() for p in (ROOT / "crds").glob("*.yaml")))
    }
    for crd in rendered:
        assert crd["spec"] == sources[crd["metadata"]["name"]]["spec"]
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_crds_can_be_left_to_uninstall_or_out(helm: Any) -> None:
    for crd in of_kind(helm.template(crds={"enabled": True, "keep": False}), "CustomResourceDefinition"):
        assert "annotations" not in crd["metadata"]
    assert not of_kind(helm.template(crds={"enabled": False}), "CustomResourceDefinition")


def test_a_namespaced_operator_needs_nothing_that_is_the_clusters(helm: Any) -> None:
    scope = {"kind": "namespaces", "namespaces": ["team-a", "team-b"]}
    everything = helm.template(scope=scope)
    assert not of_kind(everything, "ClusterRoleBinding")
    assert {
        role["metadata"]["labels"]["app.kubernetes.io/component"] for role in of_kind(everything, "ClusterRole")
    } == {"users"}
    objects = helm.template(scope=scope, crds={"enabled": False}, userRoles={"enabled": False})
    assert all("namespace" in item["metadata"] for item in objects)
    assert {role["metadata"]["namespace"] for role in of_kind(objects, "Role")} == {
        "team-a",
        "team-b",
        "offramp-system",
    }
    assert environment(objects)["OFFRAMP_NAMESPACES"] == "team-a,team-b"
    assert environment(helm.template())["OFFRAMP_NAMESPACES"] == ""


def test_a_namespaced_operator_may_be_let_read_worker_classes_and_nothing_else_of_the_cluster(helm: Any) -> None:
    scope = {"kind": "namespaces", "namespaces": ["team-a"], "workerClasses": True}
    objects = helm.template(scope=scope, userRoles={"enabled": False})
    (role,), (binding,) = of_kind(objects, "ClusterRole"), of_kind(objects, "ClusterRoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["earlyexit.dev"], "resources": ["workerclasses"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    everywhere = [rule for role in of_kind(objects, "Role") for rule in role["rules"]]
    assert not [rule for rule in everywhere if "workerclasses" in rule["resources"]]


@pytest.mark.parametrize("values", [VARIANTS["defaults"], VARIANTS["two namespaces"]], ids=["cluster", "namespaces"])
def test_no_rule_has_a_wildcard_reads_secrets_or_writes_a_service(helm: Any, values: dict[str, Any]) -> None:
    objects = helm.template(**values)
    roles = of_kind(objects, "ClusterRole") + of_kind(objects, "Role")
    own = [role for role in roles if role["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"]
    rules = [rule for role in own for rule in role["rules"]]
    assert rules
    for rule in rules:
        for words in rule.values():
            assert not any("*" in word for word in words), rule
        assert "secrets" not in rule["resources"]
        assert not any(resource.startswith("pods/") for resource in rule["resources"])
        if "earlyexitservices" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "list", "watch"}
        if "earlyexitservices/status" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "patch"}
    kinds = [word for rule in rules for word in rule["resources"]]
    assert "roles" not in kinds
    assert "clusterroles" not in kinds


def test_every_binding_names_the_operators_account(helm: Any) -> None:
    objects = helm.template(serviceAccount={"name": "brain"})
    assert only(objects, "ServiceAccount")["metadata"]["name"] == "brain"
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "brain"
    for binding in of_kind(objects, "ClusterRoleBinding") + of_kind(objects, "RoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("brain", "offramp-system")


def test_the_lease_it_may_write_is_the_lease_it_is_told(helm: Any) -> None:
    objects = helm.template(release="canary")
    (role,) = of_kind(objects, "Role")
    named = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [rule["resourceNames"] for rule in named] == [[environment(objects)["OFFRAMP_LEASE_NAME"]]]
    assert environment(objects)["OFFRAMP_LEASE_NAMESPACE"] == role["metadata"]["namespace"] == "offramp-system"


def test_the_operator_is_told_everything_it_needs(helm: Any) -> None:
    objects = helm.template(workerImage={"repository": "registry.example/worker", "tag": "4.5.6"})
    assert environment(objects) == {
        "OFFRAMP_NAMESPACES": "",
        "OFFRAMP_LEASE_NAMESPACE": "offramp-system",
        "OFFRAMP_LEASE_NAME": "offramp-leader",
        "OFFRAMP_SIGNING_KEY_FILE": "/var/run/offramp/signing-key",
        "OFFRAMP_WORKER_IMAGE": "registry.example/worker:4.5.6",
        "OFFRAMP_WORKER_NETWORK_POLICY": "IngressAndEgress",
        "OFFRAMP_OPERATOR_INSTANCE": "offramp",
        "OFFRAMP_DELIVERY_ALLOW_PRIVATE_NETWORKS": "false",
        "OFFRAMP_DELIVERY_SIZE_LIMIT": "16Gi",
        "OFFRAMP_DELIVERY_TIMEOUT": "1h",
        "OFFRAMP_LOG_LEVEL": "info",
        "OFFRAMP_WEB_PORT": "8082",
        "OFFRAMP_WEB_HOSTS": ",".join(
            f"offramp-web{tail}"
            for tail in ("", ".offramp-system", ".offramp-system.svc", ".offramp-system.svc.cluster.local")
        ),
        "POD_NAME": "",
    }
    assert container(objects)["command"] == ["offramp-operator"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(objects)["image"] == f"offramp/operator:{version}"


def test_another_name_is_the_name_of_everything(helm: Any) -> None:
    values = yaml.safe_load((Path(__file__).parent / "values" / "everything-on.yaml").read_text())
    own = [o for o in helm.template(release="x", **values) if o["kind"] != "CustomResourceDefinition"]
    others = {"offramp-view", "offramp-edit", "offramp-admin", "offramp-release-manager"}
    names = {o["metadata"]["name"].removeprefix("offramp-system-") for o in own} - others
    assert {name for name in names if not name.startswith("brain")} == set()


def test_what_the_operator_is_told_besides(helm: Any) -> None:
    told = {
        "logLevel": "debug",
        "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/ca"}],
        "workerImage": {"pullSecrets": ["a", "b"]},
    }
    env = {entry["name"]: entry.get("value") for entry in container(helm.template(**told))["env"]}
    assert (env["OFFRAMP_LOG_LEVEL"], env["SSL_CERT_FILE"], env["OFFRAMP_WORKER_PULL_SECRETS"]) == (
        "debug",
        "/ca",
        "a,b",
    )
    settings = parse_settings({name: value or "x" for name, value in env.items()} | {"OFFRAMP_WEB_ADDRESS": ""})
    assert (settings.log_level, settings.workers.pull_secrets) == (logging.DEBUG, ("a", "b"))


def operators_resources(helm: Any, **values: Any) -> set[str]:
    (role,) = (
        o
        for o in helm.template(**values)
        if o["kind"] == "ClusterRole" and o["metadata"]["name"] == "offramp-system-offramp"
    )
    return {resource.split("/")[0] for rule in role["rules"] for resource in rule["resources"]}


def test_the_right_to_routes_can_be_withheld(helm: Any) -> None:
    assert operators_resources(helm) - operators_resources(helm, rbac={"httpRoutes": False}) == {"httproutes"}


def test_the_readme_explains_every_right_of_the_operator(helm: Any) -> None:
    table = (CHART / "README.md").read_text().split("## What the operator may do", 1)[1].split("\n## ", 1)[0]
    explained = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert explained == operators_resources(helm) | {"leases"}


def test_an_account_that_is_there_is_used_and_not_made(helm: Any) -> None:
    objects = helm.template(serviceAccount={"create": False, "name": "theirs"})
    assert [o for o in objects if o["kind"] == "ServiceAccount"] == []
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "theirs"
    bound = {s["name"] for o in objects if o["kind"].endswith("Binding") for s in o["subjects"]}
    assert bound == {"theirs"}


def test_rules_and_dashboards_go_where_they_are_looked_for(helm: Any) -> None:
    objects = helm.template(
        monitoring={
            "rules": {"enabled": True, "namespace": "prometheus", "runbookUrl": "https://wiki.example/a"},
            "dashboards": {"enabled": True, "namespace": "grafana"},
        }
    )
    rules = [o for o in objects if o["kind"] == "PrometheusRule"]
    assert {o["metadata"]["namespace"] for o in rules} == {"prometheus"}
    links = {
        r["annotations"]["runbook_url"].split("#")[0]
        for o in rules
        for g in o["spec"]["groups"]
        for r in g["rules"]
        if "alert" in r
    }
    assert links == {"https://wiki.example/a"}
    boards = [o for o in objects if "-dashboard-" in o["metadata"]["name"]]
    assert len(boards) == 2 and {o["metadata"]["namespace"] for o in boards} == {"grafana"}


def test_alerts_without_a_page_to_link_to_have_no_link(helm: Any) -> None:
    objects = helm.template(monitoring={"rules": {"enabled": True}})
    groups = [group for o in objects if o["kind"] == "PrometheusRule" for group in o["spec"]["groups"]]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 20
    assert {key for rule in alerts for key in rule["annotations"]} == {"summary", "description", "action"}


def test_the_signing_key_is_32_bytes_where_the_operator_looks(helm: Any) -> None:
    objects = helm.template()
    secret = only(objects, "Secret")
    assert len(base64.b64decode(secret["data"]["signing-key"])) == 32
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    (mount,) = [mount for mount in container(objects)["volumeMounts"] if mount["name"] == volume["name"]]
    assert mount["readOnly"] is True
    (item,) = volume["secret"]["items"]
    assert f"{mount['mountPath']}/{item['path']}" == environment(objects)["OFFRAMP_SIGNING_KEY_FILE"]


def test_an_existing_key_is_mounted_and_none_is_made(helm: Any) -> None:
    objects = helm.template(signingKey={"existingSecret": "my-key"})
    assert not of_kind(objects, "Secret")
    volumes = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if "secret" in volume] == ["my-key"]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_operator_runs_restricted_with_a_read_only_root(helm: Any, values: dict[str, Any]) -> None:
    objects = helm.template(**values)
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_probes_and_metrics_share_the_one_port(helm: Any) -> None:
    operator = container(helm.template())
    assert [port["containerPort"] for port in operator["ports"]] == [8080, 8082]
    paths = {probe: operator[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe in paths:
        assert operator[probe]["httpGet"]["port"] == operator["ports"][0]["name"]


def test_a_budget_exists_only_where_a_drain_can_respect_it(helm: Any) -> None:
    assert only(helm.template(), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert not of_kind(helm.template(replicas=1), "PodDisruptionBudget")
    assert not of_kind(helm.template(podDisruptionBudget={"enabled": False}), "PodDisruptionBudget")


def test_a_long_release_name_makes_valid_names(helm: Any) -> None:
    for item in helm.template(release="r" * 53):
        assert len(item["metadata"]["name"]) <= 63


# --- values ----------------------------------------------------------------------------------------


def test_the_page_stays_on_the_pods_loopback_unless_it_is_exposed(helm: Any) -> None:
    hidden = helm.template()
    assert environment(hidden)["OFFRAMP_WEB_PORT"] == "8082"
    assert "OFFRAMP_WEB_ADDRESS" not in environment(hidden) and not of_kind(hidden, "Service")
    shown = helm.template(**VARIANTS["page for everybody"])
    service = only(shown, "Service")
    address = next(e for e in container(shown)["env"] if e["name"] == "OFFRAMP_WEB_ADDRESS")
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert service["spec"]["ports"][0] == {"name": "http", "port": 9000, "targetPort": "web", "protocol": "TCP"}
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert environment(shown)["OFFRAMP_WEB_HOSTS"].split(",") == [
        name,
        f"{name}.{namespace}",
        f"{name}.{namespace}.svc",
        f"{name}.{namespace}.svc.cluster.local",
        "offramp.example.com",
    ]
    gone = helm.template(**VARIANTS["no page"])
    assert not [name for name in environment(gone) if "WEB" in name]
    assert [port["name"] for port in container(gone)["ports"]] == ["http"]


def test_the_operators_network_policy_knows_the_page_only_where_it_is_exposed(helm: Any) -> None:
    def ports(objects: list[dict[str, Any]], way: str) -> list[Any]:
        rules = only(objects, "NetworkPolicy")["spec"][way]
        return [port["port"] for rule in rules for port in rule["ports"]]

    assert ports(helm.template(), "ingress") == ["http"]
    assert ports(helm.template(), "egress") == [53, 53, 443, 6443, 8443, 16443, 8081]
    shown = helm.template(**VARIANTS["page for everybody"])
    assert ports(shown, "ingress") == ["http", "web"]
    assert 9000 in ports(shown, "egress"), "a standby asks the leader"
    assert not of_kind(helm.template(networkPolicies={"operator": {"enabled": False}}), "NetworkPolicy")


def test_rules_and_dashboards_are_those_of_the_files(helm: Any) -> None:
    on = {"enabled": True}
    rules_on = on | {"runbookUrl": "https://offramp.example/docs/reference/alerts.html"}  # as the files have it
    objects = helm.template(monitoring={"rules": rules_on, "dashboards": on, "serviceMonitor": on, "podMonitor": on})
    rules = {item["metadata"]["name"]: item["spec"]["groups"] for item in of_kind(objects, "PrometheusRule")}
    files = {
        f"offramp-{path.stem}": yaml.safe_load(path.read_text())["groups"]
        for path in (CHART / "files" / "rules").iterdir()
    }
    assert rules == files and files
    shown = {name: text for item in of_kind(objects, "ConfigMap") for name, text in item["data"].items()}
    assert {name: json.loads(text) for name, text in shown.items()} == {
        path.name: json.loads(path.read_text()) for path in (CHART / "files" / "dashboards").iterdir()
    }
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in of_kind(objects, "ConfigMap"))
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"][0]["targetLabel"] == "service"
    assert not of_kind(helm.template(), "PrometheusRule") and not of_kind(helm.template(), "PodMonitor")


def test_what_a_catalogue_shows_is_true() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert base64.b64decode(meta["icon"].split(",")[1]) == (ROOT / "docs" / "images" / "favicon.svg").read_bytes()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert meta["annotations"]["artifacthub.io/license"] == project["license"]
    listed = yaml.safe_load(meta["annotations"]["artifacthub.io/crds"])
    definitions = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    assert [(one["name"], one["kind"], one["version"]) for one in listed] == [
        (crd["metadata"]["name"], crd["spec"]["names"]["kind"], version["name"])
        for crd in definitions
        for version in crd["spec"]["versions"]
    ]


def test_everything_is_of_one_version() -> None:
    """Of the chart, too: were it newer than its images, an upgrade would go on running the old ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert {meta["version"], meta["appVersion"], offramp_worker.__version__, newest} == {project}
    named = {
        tag
        for file in (
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("helm/**/*.md"),
            *ROOT.glob("images/*"),
            ROOT / "README.md",
        )
        if file.is_file()
        for tag in re.findall(r"offramp/(?:operator|worker):([\w.]*\w)", file.read_text())
    }
    assert named == {project}
