"""What workers look like in a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offramp_core.control.objects import Service
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.manifests import (
    WorkerSettings,
    deployment,
    disruption_budget,
    network_service,
    plan_config_map,
    template_digest,
)
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.platform import WorkerIdentity
from offramp_worker.settings import settings_from_env

SETTINGS = WorkerSettings("offramp/worker:1")
IDENTITY = WorkerIdentity("public", "token")
FIXED_LABELS = {
    "app.kubernetes.io/name": "offramp-worker",
    "app.kubernetes.io/instance": "digits",
    "app.kubernetes.io/managed-by": "offramp",
    "earlyexit.dev/service": "digits",
}


def _service(uri: str = "oci://offramp/digits:1", **spec: Any) -> Service:
    return Service("default", "digits", "uid-1", 3, _spec(uri, **spec))


def _spec(uri: str, **spec: Any) -> Any:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    return parse_spec({"model": {"uri": uri}, "objective": objective, **spec})


def _children(service: Service) -> list[dict[str, Any]]:
    return [
        deployment(service, IDENTITY, SETTINGS),
        network_service(service),
        disruption_budget(service),
        plan_config_map(service, document="{}", epoch=4),
    ]


def test_every_child_is_owned_by_the_service_and_carries_the_fixed_labels() -> None:
    for child in _children(_service()):
        assert child["metadata"]["labels"] == FIXED_LABELS
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-1", True, False)
        assert "finalizers" not in child["metadata"]


def test_nothing_of_the_users_metadata_reaches_a_child() -> None:
    mark = "argocd-tracking-mark"
    obj = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {
            "name": "digits", "namespace": "default", "uid": "uid-1", "generation": 1,
            "labels": {mark: mark}, "annotations": {mark: mark},
        },
        "spec": {"model": {"uri": "oci://offramp/digits:1"},
                 "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}},
    }  # fmt: skip
    for child in _children(service_from_manifest(obj)):
        assert mark not in json.dumps(child)


def test_pods_are_restricted() -> None:
    pod = deployment(_service(), IDENTITY, SETTINGS)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod and "hostNetwork" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_the_allow_list_of_the_worker_template_passes() -> None:
    """The API server prunes the rest; this is the second lock."""
    forbidden = {
        "serviceAccountName": "admin", "hostNetwork": True, "securityContext": {"privileged": True},
        "volumes": [{"hostPath": {"path": "/"}}], "command": ["sh"], "initContainers": [{}],
    }  # fmt: skip
    plain = deployment(_service(), IDENTITY, SETTINGS)
    assert deployment(_service(worker=forbidden), IDENTITY, SETTINGS) == plain


def test_the_worker_template_is_used() -> None:
    worker = {
        "image": "mine:2", "resources": {"limits": {"cpu": "2"}}, "nodeSelector": {"gpu": "yes"}, "priorityClassName": "high",
        "labels": {"team": "vision"}, "annotations": {"note": "x"}, "env": [{"name": "OMP_PROC_BIND", "value": "true"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    }  # fmt: skip
    template = deployment(_service(worker=worker), IDENTITY, SETTINGS)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == "mine:2" and container["resources"] == {"limits": {"cpu": "2"}}
    assert template["spec"]["nodeSelector"] == {"gpu": "yes"} and template["spec"]["priorityClassName"] == "high"
    assert template["metadata"]["labels"] == {"team": "vision", **FIXED_LABELS}
    assert template["metadata"]["annotations"]["note"] == "x"
    assert {"name": "OMP_PROC_BIND", "value": "true"} in container["env"]
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "digits"


def test_nobody_but_the_operator_says_whom_a_worker_trusts() -> None:
    worker = {
        "env": [{"name": "OFFRAMP_PUBLIC_KEY", "value": "mine"}],
        "labels": {"app.kubernetes.io/instance": "other", "earlyexit.dev/service": "other"},
    }
    template = deployment(_service(worker=worker), IDENTITY, SETTINGS)["spec"]["template"]
    env = [(e["name"], e.get("value")) for e in template["spec"]["containers"][0]["env"]]
    assert [value for name, value in env if name == "OFFRAMP_PUBLIC_KEY"] == ["public"]
    assert template["metadata"]["labels"] == FIXED_LABELS


def test_a_worker_is_told_what_it_serves_and_where() -> None:
    digest = "sha256:" + "a" * 64
    service = Service("default", "digits", "uid-1", 1, parse_spec({
        "model": {"uri": "oci://offramp/digits:1", "digest": digest},
        "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
    }))  # fmt: skip
    pod = deployment(service, IDENTITY, SETTINGS)["spec"]["template"]["spec"]
    env = {e["name"]: e.get("value") or e["valueFrom"] for e in pod["containers"][0]["env"]}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert env["OFFRAMP_BUNDLE"] == mounts["bundle"] and volumes["bundle"]["image"]["reference"] == "offramp/digits:1"
    assert env["OFFRAMP_PLAN_FILE"] == f"{mounts['plan']}/plan.json"
    assert volumes["plan"]["configMap"] == {
        "name": plan_config_map(service, document="", epoch=1)["metadata"]["name"],
        "optional": True,
    }
    assert env["OFFRAMP_STATE_DIR"] == mounts["state"]
    assert env["OFFRAMP_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert (env["OFFRAMP_SERVICE"], env["OFFRAMP_SERVICE_UID"]) == ("digits", "uid-1")
    assert (env["OFFRAMP_LATENCY_SECONDS"], env["OFFRAMP_MODEL_DIGEST"]) == ("0.04", digest)


def test_a_path_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.model\.uri.*oci://"):
        deployment(_service("file:///models/digits"), IDENTITY, SETTINGS)


def test_the_admin_port_is_not_offered_to_clients() -> None:
    (port,) = network_service(_service())["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")


def test_grpc_has_a_port_of_its_own_where_the_spec_asks_for_it() -> None:
    service = _service(protocols=["HTTP", "GRPC"])
    (container,) = deployment(service, IDENTITY, SETTINGS)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    offered = {port["name"]: port for port in network_service(service)["spec"]["ports"]}
    assert {"name": "OFFRAMP_GRPC_PORT", "value": str(ports["grpc"])} in container["env"]
    assert len(set(ports.values())) == 3 and set(offered) == {"http", "grpc"}
    assert offered["grpc"]["targetPort"] == "grpc" and offered["grpc"]["appProtocol"] == "kubernetes.io/h2c"


def test_options_of_the_spec_reach_the_worker_and_defaults_are_not_named() -> None:
    def options(**spec: Any) -> dict[str, str]:
        (container,) = deployment(_service(**spec), IDENTITY, SETTINGS)["spec"]["template"]["spec"]["containers"]
        names = ("OFFRAMP_BATCHING", "OFFRAMP_CACHE_BYTES", "OFFRAMP_DEADLINE_ANSWERS", "OFFRAMP_GRPC_PORT")
        return {e["name"]: e["value"] for e in container["env"] if e["name"] in names}

    assert options() == options(batching={"policy": "Offramp"}, deadlineAnswers="OnRequest", protocols=["HTTP"]) == {}
    spec = {"batching": {"policy": "TFServing"}, "deadlineAnswers": "Always", "predictionCache": {"sizeLimit": "1Mi"}}
    given = options(**spec)
    assert given == {
        "OFFRAMP_BATCHING": "tf-serving",
        "OFFRAMP_CACHE_BYTES": "1048576",
        "OFFRAMP_DEADLINE_ANSWERS": "always",
    }
    # The worker's own parser takes them.
    settings = settings_from_env({"OFFRAMP_BUNDLE": "/b", "OFFRAMP_LATENCY_SECONDS": "0.04", **given})
    assert (settings.batching, settings.cache_bytes, settings.always_in_time) == ("tf-serving", 2**20, True)


def test_one_new_pod_is_ready_before_an_old_one_goes() -> None:
    strategy = deployment(_service(replicas=4), IDENTITY, SETTINGS)["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_the_template_digest_follows_what_the_pods_run_and_nothing_else() -> None:
    plain = template_digest(_service(), SETTINGS)
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.05"}}
    same = (
        _service(replicas=5),
        _service(ramps={"mode": "Disabled"}),
        _service(objective=objective),
        _service(suspend=True),
    )
    other = (
        _service("oci://offramp/digits:2"),
        _service(worker={"labels": {"a": "b"}}),
        _service(worker={"image": "x"}),
        _service(batching={"policy": "Clockwork"}),
        _service(protocols=["HTTP", "GRPC"]),
    )
    assert {template_digest(s, SETTINGS) for s in same} == {plain}
    assert len({template_digest(s, SETTINGS) for s in other} | {plain}) == 6
    assert template_digest(_service(), WorkerSettings("offramp/worker:2")) != plain
