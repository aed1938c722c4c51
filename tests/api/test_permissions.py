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
    ("get list watch", EARLYEXIT, "workerpools"),
    ("get patch", EARLYEXIT, "workerpools/status"),
    ("create delete get list patch update watch", EARLYEXIT, "rampconfigs"),
    ("create delete get list patch update watch", EARLYEXIT, "ramprollouts"),
    ("get patch update", EARLYEXIT, "rampconfigs/status"),
    ("get patch update", EARLYEXIT, "ramprollouts/status"),
    ("create delete get list patch watch", "apps", "deployments"),
    ("create delete get list patch watch", "", "services"),
    ("create delete get list patch watch", "", "configmaps"),
    ("create delete get list patch watch", "policy", "poddisruptionbudgets"),
    ("create delete get list patch watch", "networking.k8s.io", "networkpolicies"),
    ("create delete get list patch watch", "autoscaling", "horizontalpodautoscalers"),
    ("create delete get list watch", "batch", "jobs"),
    ("create delete get list patch watch", "gateway.networking.k8s.io", "httproutes"),
    ("get list patch watch", "", "pods"),
    ("create", "events.k8s.io", "events"),
    ("get list watch", EARLYEXIT, "workerclasses"),
]
DENIED: list[tuple[str, str, str]] = [
    ("create delete deletecollection patch update", EARLYEXIT, "earlyexitservices"),
    ("patch update", EARLYEXIT, "earlyexitservices/finalizers"),
    ("create delete deletecollection patch update", EARLYEXIT, "workerclasses"),
    ("get list watch create patch delete", "", "secrets"),
    ("create delete", "", "pods"),
    ("create delete deletecollection patch update", EARLYEXIT, "workerpools"),
    ("patch update deletecollection", "batch", "jobs"),
    ("get list create", "batch", "cronjobs"),
    ("patch update", "gateway.networking.k8s.io", "httproutes/status"),
    ("get list watch create patch delete", "gateway.networking.k8s.io", "gateways"),
    ("create patch delete", "gateway.networking.k8s.io", "referencegrants"),
    ("get list watch create patch delete", "", "persistentvolumeclaims"),
    ("create get", "", "pods/exec"),
    ("create get", "", "pods/proxy"),
    ("get", "", "pods/log"),
    ("create", "", "serviceaccounts/token"),
    ("create patch delete", "", "serviceaccounts"),
    ("get list watch create patch delete", "", "namespaces"),
    ("get list", "", "nodes"),
    ("create patch update escalate bind", "rbac.authorization.k8s.io", "clusterroles"),
    ("create patch update", "rbac.authorization.k8s.io", "rolebindings"),
    ("get list watch create patch delete update", "apiextensions.k8s.io", "customresourcedefinitions"),
    ("create patch", "admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("impersonate", "", "users"),
]

AGGREGATED = ("view", "edit", "admin")
READ, WRITE = "get list watch", "create delete deletecollection patch update"
# What each role may do with each resource of ours; everything that is not listed is denied.
PEOPLE: dict[str, dict[str, str]] = {
    "view": {"earlyexitservices": READ, "rampconfigs": READ, "ramprollouts": READ},
    "edit": {"earlyexitservices": f"{READ} {WRITE}", "rampconfigs": READ, "ramprollouts": f"{READ} patch update"},
    "admin": {
        "earlyexitservices": f"{READ} {WRITE}",
        "rampconfigs": f"{READ} delete deletecollection",
        "ramprollouts": f"{READ} patch update delete deletecollection",
    },
    "release-manager": {"earlyexitservices": READ, "rampconfigs": READ, "ramprollouts": f"{READ} patch update"},
}


@pytest.fixture(scope="module")
def installed(api: Any, chart: Any, eventually: Any) -> Any:
    """The API server with the chart's objects, twice: for the whole cluster, and for one namespace."""
    for name in (NAMESPACE, TENANT_NAMESPACE, "restricted"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"} if name == "restricted" else {}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        assert api.create(namespace, keep=True).status_code in (201, 409)
    tenant = chart(scope={"kind": "namespaces", "namespaces": [TENANT_NAMESPACE]}, serviceAccount={"name": "tenant"})
    for manifest in [*chart(), *(item for item in tenant if item["metadata"].get("namespace") == TENANT_NAMESPACE)]:
        answer = api.apply(manifest, manager="helm")
        assert answer.status_code in (200, 201), f"{manifest['kind']}: {answer.text}"

    for level in AGGREGATED:
        for role in chart():
            labels = role["metadata"]["labels"]
            if (
                role["kind"] == "ClusterRole"
                and labels.get(f"rbac.authorization.k8s.io/aggregate-to-{level}") == "true"
            ):
                bind(api, level, role["metadata"]["name"])
    bind(api, "release-manager", "offramp-release-manager")
    eventually(lambda: in_force(api), what="every role in force")
    return api


def in_force(api: Any) -> bool:
    """The authorizer learns of roles and bindings by watching them, a moment after they are made."""
    people = [
        can(api, user, verb, group=EARLYEXIT, resource=resource, namespace="default")
        for user, allowed in PEOPLE.items()
        for resource, verbs in allowed.items()
        for verb in verbs.split()
    ]
    lease = {"group": "coordination.k8s.io", "resource": "leases", "namespace": NAMESPACE, "name": "offramp-leader"}
    tenants = {"group": "apps", "resource": "deployments", "namespace": TENANT_NAMESPACE}
    operators = [
        can(api, OPERATOR, "list", group="", resource="pods"),
        can(api, OPERATOR, "get", **lease),
        can(api, TENANT_OPERATOR, "patch", **tenants),
    ]
    return all(people + operators)


def bind(api: Any, user: str, role: str) -> None:
    """What the controller for aggregated roles does is done by binding: there is only an API server here."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{user}-{role}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
    assert api.create(binding, keep=True).status_code in (201, 409)


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
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
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
        own = user == OPERATOR or not kind.cluster_scoped  # the whole cluster's are optional, and not a tenant's
        for verb in ("list", "watch"):
            assert can(installed, user, verb, group=kind.group, resource=kind.plural, namespace=namespace) is own
        assert own or kind.optional


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


@pytest.mark.usefixtures("clean")
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
    assert "replicas" not in answer.json()["spec"]


@pytest.mark.parametrize("user", PEOPLE)
def test_what_people_may_and_may_not_do(installed: Any, user: str) -> None:
    for resource in ("earlyexitservices", "rampconfigs", "ramprollouts"):
        allowed = set(PEOPLE[user][resource].split())
        for verb in (READ + " " + WRITE).split():
            answer = can(installed, user, verb, group=EARLYEXIT, resource=resource, namespace="default")
            assert answer is (verb in allowed), f"{verb} {resource}"
        for verb in ("create", "patch", "update", "delete"):
            assert not can(installed, user, verb, group=EARLYEXIT, resource=f"{resource}/status", namespace="default")
    for verb, group, resource in (
        ("get", "", "secrets"),
        ("create", "", "pods"),
        ("patch", "apps", "deployments"),
        ("patch", "", "configmaps"),
        ("bind", "rbac.authorization.k8s.io", "clusterroles"),
        ("escalate", "rbac.authorization.k8s.io", "clusterroles"),
    ):
        assert not can(installed, user, verb, group=group, resource=resource, namespace="default"), f"{verb} {resource}"


def test_people_read_classes_and_only_the_clusters_administrators_write_them(installed: Any) -> None:
    classes = {"group": EARLYEXIT, "resource": "workerclasses"}
    assert all(can(installed, user, "list", **classes) for user in AGGREGATED)
    assert not [user for user in PEOPLE for verb in WRITE.split() if can(installed, user, verb, **classes)]


@pytest.mark.usefixtures("clean")
def test_a_release_manager_decides_and_writes_nothing_else(installed: Any, manifests: Any) -> None:
    service, rollout, config = manifests.service("guarded"), manifests.rollout(), manifests.config()
    for manifest in (service, rollout, config):
        assert installed.create(manifest, keep=True).status_code == 201
    user = "release-manager"
    assert installed.merge(rollout, {"spec": {"paused": True}}, user=user).status_code == 200
    assert installed.merge(rollout, {"spec": {"decision": "Abort"}}, user=user).status_code == 200
    # The rest of a rollout's spec is closed by the kind's own rules, whoever asks.
    refused = installed.merge(rollout, {"spec": {"to": "guarded-0000000000"}}, user=user)
    assert refused.status_code == 422
    assert "only spec.paused and spec.decision of a RampRollout may change" in refused.json()["message"]
    for manifest, patch, subresource in (
        (service, {"spec": {"replicas": 5}}, ""),
        (service, {"metadata": {"annotations": {"earlyexit.dev/request": "tune/x"}}}, ""),
        (config, {"metadata": {"labels": {"a": "b"}}}, ""),
        (rollout, {"status": {"phase": "Succeeded"}}, "status"),
        (service, {"status": {"phase": "Ready"}}, "status"),
    ):
        assert installed.merge(manifest, patch, subresource=subresource, user=user).status_code == 403, patch


def test_the_operator_cannot_give_itself_more(installed: Any) -> None:
    """Escalation: through a role, a binding, a pod with another account, or a token of one."""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "more"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "more"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "offramp", "namespace": NAMESPACE}],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "more", "namespace": "default"},
        "spec": {"serviceAccountName": "offramp", "containers": [{"name": "x", "image": "x"}]},
    }
    for manifest in (role, binding, pod):
        assert installed.create(manifest, user=OPERATOR).status_code == 403, manifest["kind"]
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/offramp/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    assert installed.request("POST", account, request, user=OPERATOR).status_code == 403
    assert installed.request("GET", "/api/v1/secrets", user=OPERATOR).status_code == 403


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
            "monitoring": {"dashboards": {"enabled": True}},
            "networkPolicies": {"operator": {"from": [{"podSelector": {}}]}},
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
