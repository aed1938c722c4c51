"""What workers look like in a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offramp_core.control.objects import ModelStatus, Service, ServiceStatus
from offramp_core.control.spec import Route, parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.manifests import (
    ADMIN_PORT,
    IN_FLIGHT_METRIC,
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
    template_digest,
    version_service,
    version_weights,
)
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.platform import WorkerIdentity
from offramp_worker.fetch.command import _parser
from offramp_worker.generate.settings import generation_settings
from offramp_worker.metrics import Metrics as WorkerMetrics
from offramp_worker.settings import settings_from_env

SETTINGS = WorkerSettings("offramp/worker:1")
IDENTITY = WorkerIdentity("public", "token")
OPERATOR_PODS = OperatorPods("offramp-system", {"app.kubernetes.io/component": "operator"})
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
        deployment(service, IDENTITY, SETTINGS, replicas=2),
        network_service(service),
        disruption_budget(service),
        network_policy(service, OPERATOR_PODS, allow_egress=False),
        version_service(service, trial=False),
        version_service(service, trial=True),
        http_route(service, Route(((("name", "public"),),)), weights=version_weights(service, share=0)),
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
            "name": "digits",
            "namespace": "default",
            "uid": "uid-1",
            "generation": 1,
            "labels": {mark: mark},
            "annotations": {mark: mark},
        },
        "spec": {
            "model": {"uri": "oci://offramp/digits:1"},
            "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
        },
    }
    for child in _children(service_from_manifest(obj)):
        assert mark not in json.dumps(child)


def test_the_administrators_credentials_are_for_services_that_name_none() -> None:
    settings = WorkerSettings("offramp/worker:1", pull_secrets=("registry",))
    own = {"worker": {"imagePullSecrets": [{"name": "mine"}]}}
    for spec, wanted in (({}, [{"name": "registry"}]), (own, [{"name": "mine"}])):
        assert _pod(_service(**spec), settings)["imagePullSecrets"] == wanted
    assert "imagePullSecrets" not in _pod(_service(), SETTINGS)


def test_pods_are_restricted() -> None:
    pod = deployment(_service(), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod and "hostNetwork" not in pod
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_the_operator_reaches_admin_ports_and_workers_connect_to_nothing() -> None:
    spec = network_policy(_service(protocols=["HTTP", "GRPC"]), OPERATOR_PODS, allow_egress=False)["spec"]
    pod = deployment(_service(protocols=["HTTP", "GRPC"]), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]
    assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    public, admin = spec["ingress"]
    assert "from" not in public and [port["port"] for port in public["ports"]] == ["http", "grpc"]
    assert [port["port"] for port in admin["ports"]] == [ADMIN_PORT], (
        "by number: while a bundle is fetched no port has a name"
    )
    assert admin["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "offramp-system"}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
        }
    ]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and "egress" not in spec
    named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {"http", "grpc", "admin"} == named, "the policy speaks of public ports by name"
    open_egress = network_policy(_service(), OPERATOR_PODS, allow_egress=True)["spec"]
    assert open_egress["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in open_egress["ingress"][0]["ports"]] == ["http"]


def _selects(chosen: dict[str, str], pod: dict[str, Any]) -> bool:
    return chosen.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize(
    "worker", [{}, {"labels": {"app.kubernetes.io/instance": "digits-next", "earlyexit.dev/version": "next"}}]
)
def test_versions_are_told_apart_by_labels_of_the_trial_alone(worker: dict[str, Any]) -> None:
    """Main workers carry what they always did: none is replaced for a trial, nor for the option."""
    service = _service(worker=worker)
    main = deployment(service, IDENTITY, SETTINGS, replicas=2)["spec"]
    trial = deployment(service, IDENTITY, SETTINGS, replicas=1, trial=True)["spec"]
    assert FIXED_LABELS.items() <= main["template"]["metadata"]["labels"].items()
    services = {
        "both": network_service(service),
        "main": version_service(service, trial=False),
        "next": version_service(service, trial=True),
    }
    reached = {
        name: [_selects(found["spec"]["selector"], own["template"]) for own in (main, trial)]
        for name, found in services.items()
    }
    assert reached == {"both": [True, True], "main": [True, False], "next": [False, True]}
    for other in (
        disruption_budget(service)["spec"]["selector"],
        network_policy(service, OPERATOR_PODS, allow_egress=False)["spec"]["podSelector"],
    ):
        assert all(_selects(other["matchLabels"], own["template"]) for own in (main, trial))
    for own, other in ((main, trial), (trial, main)):
        assert _selects(own["selector"]["matchLabels"], own["template"])
        assert not _selects(own["selector"]["matchLabels"], other["template"]), "nor counted by its autoscaler"


@pytest.mark.parametrize(("share", "weights"), [(0, [100, 0]), (25, [75, 25]), (100, [0, 100])])
def test_a_route_always_names_both_versions_and_not_what_is_for_the_operator(share: int, weights: list[int]) -> None:
    route = Route(((("name", "public"), ("namespace", "infra")),), ("models.example.com",))
    spec = http_route(_service(), route, weights=version_weights(_service(), share=share))["spec"]
    assert spec["parentRefs"] == [{"name": "public", "namespace": "infra"}]
    assert spec["hostnames"] == ["models.example.com"]
    (rule,) = spec["rules"]
    assert [(ref["name"], ref["weight"]) for ref in rule["backendRefs"]] == list(
        zip(["digits-main", "digits-next"], weights, strict=True)
    )
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v2"}}], "not /metrics"
    ports = [port["port"] for port in version_service(_service(), trial=True)["spec"]["ports"]]
    assert {ref["port"] for ref in rule["backendRefs"]} <= set(ports)


def test_only_the_allow_list_of_the_worker_template_passes() -> None:
    """The API server prunes the rest; this is the second lock."""
    forbidden = {
        "serviceAccountName": "admin",
        "hostNetwork": True,
        "securityContext": {"privileged": True},
        "volumes": [{"hostPath": {"path": "/"}}],
        "command": ["sh"],
        "initContainers": [{}],
    }
    plain = deployment(_service(), IDENTITY, SETTINGS, replicas=2)
    assert deployment(_service(worker=forbidden), IDENTITY, SETTINGS, replicas=2) == plain


def test_the_worker_template_is_used() -> None:
    worker = {
        "image": "mine:2",
        "resources": {"limits": {"cpu": "2"}},
        "nodeSelector": {"gpu": "yes"},
        "priorityClassName": "high",
        "labels": {"team": "vision"},
        "annotations": {"note": "x"},
        "env": [{"name": "OMP_PROC_BIND", "value": "true"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    }
    template = deployment(_service(worker=worker), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]
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
    template = deployment(_service(worker=worker), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]
    env = [(e["name"], e.get("value")) for e in template["spec"]["containers"][0]["env"]]
    assert [value for name, value in env if name == "OFFRAMP_PUBLIC_KEY"] == ["public"]
    assert template["metadata"]["labels"] == FIXED_LABELS


def test_a_worker_is_told_what_it_serves_and_where() -> None:
    digest = "sha256:" + "a" * 64
    service = Service(
        "default",
        "digits",
        "uid-1",
        1,
        parse_spec(
            {
                "model": {"uri": "oci://offramp/digits:1", "digest": digest},
                "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
            }
        ),
    )
    pod = deployment(service, IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"]
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
        deployment(_service("file:///models/digits"), IDENTITY, SETTINGS, replicas=2)


def test_the_admin_port_is_not_offered_to_clients() -> None:
    (port,) = network_service(_service())["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")


def test_grpc_has_a_port_of_its_own_where_the_spec_asks_for_it() -> None:
    service = _service(protocols=["HTTP", "GRPC"])
    (container,) = deployment(service, IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    offered = {port["name"]: port for port in network_service(service)["spec"]["ports"]}
    assert {"name": "OFFRAMP_GRPC_PORT", "value": str(ports["grpc"])} in container["env"]
    assert len(set(ports.values())) == 3 and set(offered) == {"http", "grpc"}
    assert offered["grpc"]["targetPort"] == "grpc" and offered["grpc"]["appProtocol"] == "kubernetes.io/h2c"


def test_options_of_the_spec_reach_the_worker_and_defaults_are_not_named() -> None:
    def options(**spec: Any) -> dict[str, str]:
        (container,) = deployment(_service(**spec), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"][
            "containers"
        ]
        names = ("OFFRAMP_CACHE_BYTES", "OFFRAMP_DEADLINE_ANSWERS", "OFFRAMP_FEEDBACK_ROWS", "OFFRAMP_GRPC_PORT")
        return {e["name"]: e["value"] for e in container["env"] if e["name"] in names}

    assert options() == options(batching={"policy": "Offramp"}, deadlineAnswers="OnRequest", protocols=["HTTP"]) == {}
    spec = {"deadlineAnswers": "Always", "predictionCache": {"sizeLimit": "1Mi"}, "feedback": {"maxAnswers": 1_000_000}}
    given = options(**spec)
    assert given == {
        "OFFRAMP_CACHE_BYTES": "1048576",
        "OFFRAMP_DEADLINE_ANSWERS": "always",
        "OFFRAMP_FEEDBACK_ROWS": "1000000",
    }
    # The worker's own parser takes them.
    settings = settings_from_env({"OFFRAMP_BUNDLE": "/b", "OFFRAMP_LATENCY_SECONDS": "0.04", **given})
    assert (settings.cache_bytes, settings.always_in_time) == (2**20, True)
    assert settings.feedback_rows == 1_000_000


def test_a_worker_that_generates_is_told_the_times_that_the_objective_names_and_no_others() -> None:
    def times(**latency: str) -> dict[str, str]:
        objective = {"latency": latency, "accuracy": {"output": "RougeL", "maxLoss": "0.05"}}
        pod = deployment(_service(objective=objective), IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"]
        env = {e["name"]: e.get("value", "") for e in pod["containers"][0]["env"]}
        return {name: value for name, value in env.items() if name.endswith("_SECONDS") or name == "OFFRAMP_OUTPUT"}

    assert times(threshold="30s") == {"OFFRAMP_LATENCY_SECONDS": "30", "OFFRAMP_OUTPUT": "RougeL"}
    given = times(timeToFirstToken="2s", timePerToken="50ms")
    assert "OFFRAMP_LATENCY_SECONDS" not in given
    parsed = generation_settings(given)  # the worker's own parser takes them
    assert (parsed.first_token_seconds, parsed.token_seconds, parsed.output) == (2.0, 0.05, "RougeL")


@pytest.mark.parametrize(
    ("strategy", "surge", "unavailable"), [("Surge", 1, 0), ("Replace", 0, 1)], ids=["one ahead", "in place"]
)
def test_one_new_pod_is_ready_before_the_next_old_one_goes(strategy: Any, surge: int, unavailable: int) -> None:
    spec = deployment(_service(replicas=4), IDENTITY, SETTINGS, replicas=4, strategy=strategy)["spec"]
    expected = {"maxSurge": surge, "maxUnavailable": unavailable}
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": expected}
    assert spec["minReadySeconds"] > 0


def test_where_an_autoscaler_decides_the_number_of_workers_is_not_applied() -> None:
    scaled = {"minReplicas": 2, "maxReplicas": 9, "targetInFlight": 8}
    service = _service(autoscaling=scaled)
    assert "replicas" not in deployment(service, IDENTITY, SETTINGS, replicas=None)["spec"]
    assert service.spec.autoscaling is not None
    spec = autoscaler(service, service.spec.autoscaling, fewest=2, frozen=False)["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"], spec["scaleTargetRef"]["name"]) == (2, 9, "digits")
    assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "8"}


def test_the_metric_of_the_autoscaler_is_one_that_workers_expose() -> None:
    names = {family.name for family in WorkerMetrics().registry.collect()}
    assert IN_FLIGHT_METRIC in names


@pytest.mark.parametrize(("frozen", "policy"), [(True, "Disabled"), (False, "Max")])
def test_a_frozen_autoscaler_takes_no_workers_away(frozen: bool, policy: str) -> None:
    service = _service(autoscaling={"maxReplicas": 9, "targetInFlight": 8})
    assert service.spec.autoscaling is not None
    spec = autoscaler(service, service.spec.autoscaling, fewest=2, frozen=frozen)["spec"]
    assert spec["behavior"]["scaleDown"]["selectPolicy"] == policy


def test_the_template_digest_follows_what_the_pods_run_and_nothing_else() -> None:
    plain = template_digest(_service(), SETTINGS)
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.05"}}
    same = (
        _service(replicas=5),
        _service(ramps={"mode": "Disabled"}),
        _service(objective=objective),
        _service(suspend=True),
        _service(batching={"policy": "Clockwork"}),  # without effect
    )
    other = (
        _service("oci://offramp/digits:2"),
        _service(worker={"labels": {"a": "b"}}),
        _service(worker={"image": "x"}),
        _service(protocols=["HTTP", "GRPC"]),
        _service(feedback={"maxAnswers": 100}),
        _service(feedback={"maxAnswers": 101}),
    )
    assert {template_digest(s, SETTINGS) for s in same} == {plain}
    assert len({template_digest(s, SETTINGS) for s in other} | {plain}) == len(other) + 1
    assert template_digest(_service(), WorkerSettings("offramp/worker:2")) != plain


# --- bundles that are not images -------------------------------------------------------------------

MIB = 2**20


def _model(**model: Any) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    limits = {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": 1}
    worker = {
        "image": "theirs/worker:1",
        "resources": {"limits": limits},
        "env": [{"name": "HTTPS_PROXY", "value": "x"}],
    }
    return Service(
        "default", "digits", "uid-1", 3, parse_spec({"model": model, "objective": objective, "worker": worker})
    )


def _pod(service: Service, settings: WorkerSettings = SETTINGS) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(service, IDENTITY, settings, replicas=2)["spec"]["template"]["spec"]
    return spec


def test_a_claim_is_mounted_read_only_and_nothing_is_fetched() -> None:
    pod = _pod(_model(uri="pvc://models/digits/v1/"))
    assert "initContainers" not in pod
    assert pod["volumes"][0] == {"name": "bundle", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    mount = pod["containers"][0]["volumeMounts"][0]
    assert mount == {"name": "bundle", "mountPath": "/bundle", "readOnly": True, "subPath": "digits/v1"}
    assert "subPath" not in _pod(_model(uri="pvc://models"))["containers"][0]["volumeMounts"][0]


def test_an_archive_is_fetched_by_the_administrators_image_and_only_that_sees_the_credentials() -> None:
    service = _model(uri="s3://models/d.tar", endpoint="https://s.example", region="eu-1", secretRef={"name": "models"})
    pod = _pod(service, WorkerSettings("offramp/worker:1", delivery=DeliverySettings(size_bytes=100 * MIB, seconds=60)))
    (init,), (worker,) = pod["initContainers"], pod["containers"]
    assert (init["image"], worker["image"]) == ("offramp/worker:1", "theirs/worker:1")
    (secret,) = (v["secret"] for v in pod["volumes"] if "secret" in v)
    assert secret["secretName"] == "models" and secret["optional"] is True
    assert {"key": "host", "path": "host"} in secret["items"], "only keys that are for this can be mounted"
    assert [m["name"] for m in init["volumeMounts"]] == ["bundle", "credentials"]
    assert "credentials" not in [m["name"] for m in worker["volumeMounts"]]
    assert worker["volumeMounts"][0]["readOnly"] is True
    assert pod["volumes"][0] == {"name": "bundle", "emptyDir": {"sizeLimit": "264Mi"}}
    assert init["resources"] == {"limits": {"cpu": "2", "memory": "1Gi"}}, "a device is of no use to a download"
    assert init["securityContext"] == worker["securityContext"]
    options = _parser().parse_args(init["command"][2:])
    assert (options.uri, options.endpoint, options.region) == ("s3://models/d.tar", "https://s.example", "eu-1")
    assert (options.max_bytes, options.seconds, options.allow_private_networks) == (100 * MIB, 60.0, False)
    env = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert env["OFFRAMP_BUNDLE"] == str(options.to)
    assert "HTTPS_PROXY" not in {entry["name"] for entry in init["env"]}


def test_a_uri_is_never_taken_for_an_option() -> None:
    command = _pod(_model(uri="https://a.example/--to"))["initContainers"][0]["command"]
    assert command[-2:] == ["--", "https://a.example/--to"]


def test_private_networks_are_for_the_administrator_to_allow() -> None:
    allowed = WorkerSettings("offramp/worker:1", delivery=DeliverySettings(allow_private_networks=True))
    assert (
        "--allow-private-networks" in _pod(_model(uri="https://a.example/b"), allowed)["initContainers"][0]["command"]
    )


def test_workers_that_fetch_may_connect_to_public_addresses_alone() -> None:
    service = _model(uri="https://a.example/b.tar")
    dns, there = network_policy(service, OPERATOR_PODS, allow_egress=False)["spec"]["egress"]
    assert {p["port"] for p in dns["ports"]} == {53}
    four, six = (peer["ipBlock"] for peer in there["to"])
    assert {"10.0.0.0/8", "192.168.0.0/16", "169.254.0.0/16", "127.0.0.0/8"} <= set(four["except"])
    assert set(six["except"]) == {"fe80::/10", "fc00::/7"}
    private = DeliverySettings(allow_private_networks=True)
    policy = network_policy(service, OPERATOR_PODS, allow_egress=False, delivery=private)
    assert policy["spec"]["egress"][1]["to"][0]["ipBlock"]["except"] == ["169.254.0.0/16"]
    assert "egress" not in network_policy(service, OPERATOR_PODS, allow_egress=True)["spec"]


def test_the_digest_of_a_proven_bundle_reaches_later_workers_without_replacing_those_that_serve() -> None:
    unproven = _model(uri="https://a.example/b.tar")
    status = ServiceStatus(models=(ModelStatus(unproven.spec.model_uri, "sha256:" + "1" * 64),))
    proven = Service("default", "digits", "uid-1", 3, unproven.spec, status)
    assert template_digest(proven, SETTINGS) == template_digest(unproven, SETTINGS)
    data = model_config_map(proven)["data"]  # type: ignore[index]
    for container in (_pod(proven)["containers"][0], _pod(proven)["initContainers"][0]):
        (given,) = (e["valueFrom"]["configMapKeyRef"] for e in container["env"] if e["name"] == "OFFRAMP_MODEL_DIGEST")
        assert given["name"] == "digits-model" and given["optional"] is True
        assert data[given["key"]] == "sha256:" + "1" * 64
    assert model_config_map(unproven) is None


def test_a_digest_of_the_spec_needs_no_proof() -> None:
    env = _pod(_model(uri="https://a.example/b.tar", digest="sha256:" + "2" * 64))["initContainers"][0]["env"]
    assert {"name": "OFFRAMP_MODEL_DIGEST", "value": "sha256:" + "2" * 64} in env


def test_a_slow_download_is_no_failed_update() -> None:
    seconds = [
        deployment(_model(uri=uri), IDENTITY, SETTINGS, replicas=1)["spec"]["progressDeadlineSeconds"]
        for uri in ("oci://a/b:1", "https://a.example/b")
    ]
    assert seconds[1] - seconds[0] == SETTINGS.delivery.seconds


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        (None, "limits.cpu"),
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "2"}}, "limits.cpu"),
        ({"limits": {"cpu": "500m"}}, "limits.cpu"),
        ({"requests": {"cpu": "2"}}, "requests.cpu"),
        ({"requests": {"cpu": "250m"}, "limits": {"memory": "1Gi"}}, "requests.cpu"),
        ({"requests": {"cpu": "0"}}, "limits.cpu"),  # which would read as no threads at all
        ({"requests": {"memory": "1Gi"}, "limits": None}, "limits.cpu"),
    ],
    ids=[
        "nothing",
        "both",
        "a limit",
        "a request",
        "a request and a limit of memory",
        "a request of nothing",
        "memory",
    ],
)
def test_a_worker_has_threads_for_its_limit_or_for_what_it_asks_where_it_has_none(resources: Any, says: str) -> None:
    """Without either, a limit reads as the node's processors."""
    service = _service(worker={"resources": resources} if resources else {})
    (container,) = deployment(service, IDENTITY, SETTINGS, replicas=2)["spec"]["template"]["spec"]["containers"]
    (threads,) = [entry for entry in container["env"] if entry["name"] == "OFFRAMP_THREADS"]
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == says


@pytest.mark.parametrize(("given", "surge"), [(None, 1), (3, 3), ("3", 3), ("10%", "10%")])
def test_as_many_start_ahead_as_the_user_wants_and_none_goes_before_one_serves(given: Any, surge: int | str) -> None:
    service = _service(updatePolicy={} if given is None else {"maxSurge": given})

    def rolling(strategy: Any) -> Any:
        made = deployment(service, IDENTITY, SETTINGS, replicas=20, strategy=strategy)
        return made["spec"]["strategy"]["rollingUpdate"]

    assert rolling("Surge") == {"maxSurge": surge, "maxUnavailable": 0}
    assert rolling("Replace") == {"maxSurge": 0, "maxUnavailable": 1}
    assert template_digest(service, SETTINGS) == template_digest(_service(), SETTINGS), "it replaces nobody"


def test_a_drain_takes_as_many_as_the_user_allows_and_that_replaces_nobody() -> None:
    service = _service(worker={"disruptionBudget": {"maxUnavailable": "10%"}})
    assert disruption_budget(service)["spec"]["maxUnavailable"] == "10%"
    assert disruption_budget(_service())["spec"]["maxUnavailable"] == 1
    quoted = _service(worker={"disruptionBudget": {"maxUnavailable": "3"}})
    assert disruption_budget(quoted)["spec"]["maxUnavailable"] == 3
    assert template_digest(service, SETTINGS) == template_digest(_service(), SETTINGS)
