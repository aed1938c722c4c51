"""The chart on a real API server: what its role allows and denies, and that its objects and pods are taken."""

from __future__ import annotations

from typing import Any

import pytest

from offramp_operator.kube.kinds import WATCHED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

NAMESPACE = "offramp-system"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:offramp"
TENANT_NAMESPACE = "team-a"
TENANT_OPERATOR = f"system:serviceaccount:{NAMESPACE}:tenant"
EARLYEXIT = "earlyexit.dev"

# verbs, API group, resource
ALLOWED: list[tuple[str, str, str]] = [
    ("get list watch", EARLYEXIT, "earlyexitservices"),
    ("get patch", EARLYEXIT, "earlyexitservices/status"),
    ("create delete get list patch update watch", EARLYEXIT, "rampconfigs"),
    ("create delete get list patch update watch", EARLYEXIT, "ramprollouts"),
    ("get patch update", EARLYEXIT, "rampconfigs/status"),
    ("get patch update", EARLYEXIT, "ramprollouts/status"),
    ("create delete get list patch watch", "apps", "deployments"),
    ("create delete get list patch watch", "", "services"),
    ("create delete get list patch watch", "", "configmaps"),
    ("create delete get list patch watch", "policy", "poddisruptionbudgets"),
    ("get list watch", "", "pods"),
    ("create patch", "", "events"),
    ("get list watch", "", "namespaces"),
    ("get list watch", "apiextensions.k8s.io", "customresourcedefinitions"),
]
DENIED: list[tuple[str, str, str]] = [
    ("create delete deletecollection patch update", EARLYEXIT, "earlyexitservices"),
    ("patch update", EARLYEXIT, "earlyexitservices/finalizers"),
    ("get list watch create patch delete", "", "secrets"),
    ("create delete patch", "", "pods"),
    ("create get", "", "pods/exec"),
    ("create get", "", "pods/proxy"),
    ("get", "", "pods/log"),
    ("create", "", "serviceaccounts/token"),
    ("create patch delete", "", "serviceaccounts"),
    ("create patch delete", "", "namespaces"),
    ("get list", "", "nodes"),
    ("create patch update escalate bind", "rbac.authorization.k8s.io", "clusterroles"),
    ("create patch update", "rbac.authorization.k8s.io", "rolebindings"),
    ("create patch delete update", "apiextensions.k8s.io", "customresourcedefinitions"),
    ("create patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("impersonate", "", "users"),
]


@pytest.fixture(scope="module")
def installed(api: Any, chart: Any) -> Any:
    """The API server with the chart's objects, twice: for the whole cluster, and for one namespace."""
    for name in (NAMESPACE, TENANT_NAMESPACE, "restricted"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"} if name == "restricted" else {}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        assert api.create(namespace, keep=True).status_code in (201, 409)
    tenant = chart(scope={"kind": "namespaces", "namespaces": [TENANT_NAMESPACE]}, serviceAccount={"name": "tenant"})
    for manifest in [*chart(), *(item for item in tenant if item["metadata"].get("namespace") == TENANT_NAMESPACE)]:
        answer = api.apply(manifest, manager="helm")
        assert answer.status_code in (200, 201), f"{manifest['kind']}: {answer.text}"
    return api


def can(api: Any, user: str, verb: str, *, group: str, resource: str, namespace: str = "", name: str = "") -> bool:
    resource, _, subresource = resource.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
              "spec": {"user": user, "resourceAttributes": attributes}}  # fmt: skip
    answer = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer.json()["status"]["allowed"])


@pytest.mark.parametrize(("verbs", "group", "resource"), ALLOWED, ids=lambda item: item.replace(" ", ","))
def test_the_operator_may_do_its_work(installed: Any, verbs: str, group: str, resource: str) -> None:
    assert [verb for verb in verbs.split() if not can(installed, OPERATOR, verb, group=group, resource=resource)] == []


@pytest.mark.parametrize(("verbs", "group", "resource"), DENIED, ids=lambda item: item.replace(" ", ","))
def test_the_operator_may_do_nothing_else(installed: Any, verbs: str, group: str, resource: str) -> None:
    assert [verb for verb in verbs.split() if can(installed, OPERATOR, verb, group=group, resource=resource)] == []


@pytest.mark.parametrize("kind", WATCHED, ids=str)
def test_everything_the_operator_watches_may_be_watched(installed: Any, kind: Any) -> None:
    for user, namespace in ((OPERATOR, ""), (TENANT_OPERATOR, TENANT_NAMESPACE)):
        assert can(installed, user, "list", group=kind.group, resource=kind.plural, namespace=namespace)
        assert can(installed, user, "watch", group=kind.group, resource=kind.plural, namespace=namespace)


def test_a_namespaced_operator_stays_in_its_namespace(installed: Any) -> None:
    assert can(installed, TENANT_OPERATOR, "patch", group="apps", resource="deployments", namespace=TENANT_NAMESPACE)
    for namespace in ("default", NAMESPACE, ""):
        assert not can(installed, TENANT_OPERATOR, "get", group="apps", resource="deployments", namespace=namespace)
        assert not can(
            installed, TENANT_OPERATOR, "list", group=EARLYEXIT, resource="earlyexitservices", namespace=namespace
        )


def test_only_its_own_lease_is_writable(installed: Any) -> None:
    def may(verb: str, namespace: str, name: str) -> bool:
        return can(
            installed, OPERATOR, verb, group="coordination.k8s.io", resource="leases", namespace=namespace, name=name
        )

    for verb in ("get", "patch", "update"):
        assert may(verb, NAMESPACE, "offramp-leader")
        assert not may(verb, NAMESPACE, "somebody-else")
        assert not may(verb, "kube-system", "offramp-leader")
    assert may("create", NAMESPACE, "")
    assert not may("delete", NAMESPACE, "offramp-leader")


def test_the_operator_writes_a_services_status_and_is_refused_its_spec(installed: Any, manifests: Any) -> None:
    service = manifests.service("guarded")
    assert installed.create(service, keep=True).status_code == 201
    status = {key: service[key] for key in ("apiVersion", "kind", "metadata")} | {"status": {"phase": "Serving"}}
    assert installed.apply(status, manager="offramp-operator", subresource="status", user=OPERATOR).status_code == 200
    for patch in (
        {"spec": {"replicas": 5}},
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"finalizers": ["a/b"]}},
    ):
        answer = installed.merge(service, patch, user=OPERATOR)
        assert answer.status_code == 403, patch
    # Writing the spec through the status subresource is allowed by RBAC and ignored by the API server.
    answer = installed.merge(service, {"spec": {"replicas": 5}}, subresource="status", user=OPERATOR)
    assert answer.json()["spec"]["replicas"] == 1


def test_the_operator_is_refused_the_key_it_signs_with(installed: Any) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/offramp-signing-key"
    assert installed.request("GET", path).status_code == 200
    assert installed.request("GET", path, user=OPERATOR).status_code == 403


def test_the_operators_pod_is_admitted_where_only_restricted_pods_are(installed: Any, chart: Any) -> None:
    (deployment,) = [item for item in chart() if item["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": "restricted"},
        "spec": template["spec"],
    }
    answer = installed.create(pod)
    assert answer.status_code == 201, answer.json()["message"]
    template["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert "violates PodSecurity" in installed.create(pod).json()["message"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"scope": {"kind": "namespaces", "namespaces": [TENANT_NAMESPACE]}},
        {
            "replicas": 1,
            "priorityClassName": "high",
            "tolerations": [{"operator": "Exists"}],
            "resources": {"limits": {"cpu": 1}},
        },
    ],
    ids=["defaults", "one namespace", "more values"],
)
def test_the_api_server_takes_every_object_of_the_chart(installed: Any, chart: Any, values: dict[str, Any]) -> None:
    for manifest in chart(**values):
        copy = {**manifest, "metadata": {**manifest["metadata"], "name": f"{manifest['metadata']['name']}-again"}}
        subject = manifest if manifest["kind"] == "CustomResourceDefinition" else copy
        answer = installed.create(subject)
        assert answer.status_code == (409 if subject is manifest else 201), answer.json()["message"]
