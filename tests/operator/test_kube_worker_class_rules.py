"""How a WorkerClass and a service's own words about its workers are put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import TrainingOrder, Trouble
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.kinds import Object
from offramp_operator.kube.manifests import WorkerSettings, deployment, training_job
from offramp_operator.kube.worker_class import WorkerClass, with_class
from offramp_operator.shell.platform import WorkerIdentity

CLASS = {
    "image": "offramp/worker-cuda:1",
    "serviceAccountName": "models",
    "runtimeClassName": "nvidia",
    "resources": {"limits": {"nvidia.com/gpu": "1"}},
    "nodeSelector": {"accelerator": "l4"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "gpu-registry"}],
}


def service(**worker: Any) -> Service:
    spec = {
        "model": {"uri": "oci://offramp/digits:1"},
        "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
        "worker": worker,
    }
    return Service("default", "digits", "uid-1", 1, parse_spec(spec))


def klass(**spec: Any) -> WorkerClass:
    return WorkerClass.of({"metadata": {"name": "gpu", "uid": "uid-2", "generation": 3}, "spec": spec})


def together(given: WorkerClass | None, **worker: Any) -> dict[str, Any]:
    made = with_class(service(**worker), given)
    assert isinstance(made, Service), made
    return dict(made.spec.worker)


def pod_of(given: WorkerClass | None, **worker: Any) -> Object:
    made = with_class(service(**worker), given)
    assert isinstance(made, Service), made
    settings = WorkerSettings("offramp/worker:1")
    if given is not None:
        settings = replace(settings, image=given.image or settings.image, service_account=given.service_account)
    template: Object = deployment(made, WorkerIdentity("key", "token"), settings, replicas=1)["spec"]["template"]
    return template


def test_what_only_one_of_both_says_counts() -> None:
    pod = pod_of(klass(**CLASS), className="gpu", schedulerName="volcano")["spec"]
    assert (pod["runtimeClassName"], pod["schedulerName"]) == ("nvidia", "volcano")
    assert pod["containers"][0]["image"] == "offramp/worker-cuda:1"


def test_maps_and_lists_add_up() -> None:
    made = together(
        klass(**CLASS),
        className="gpu",
        resources={"limits": {"memory": "4Gi"}, "requests": {"cpu": "2"}},
        nodeSelector={"zone": "a"},
        tolerations=[{"key": "gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}],
        imagePullSecrets=[{"name": "mine"}],
    )
    assert made["resources"] == {"limits": {"memory": "4Gi", "nvidia.com/gpu": "1"}, "requests": {"cpu": "2"}}
    assert made["nodeSelector"] == {"zone": "a", "accelerator": "l4"}
    assert [toleration["key"] for toleration in made["tolerations"]] == ["gpu", "spot"]
    assert [secret["name"] for secret in made["imagePullSecrets"]] == ["gpu-registry", "mine"]


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ({"image": "mine:1"}, "image"),
        ({"runtimeClassName": "gvisor"}, "runtimeClassName"),
        ({"nodeSelector": {"accelerator": "a100"}}, "nodeSelector.accelerator"),
        ({"resources": {"limits": {"nvidia.com/gpu": "2"}}}, "resources.limits.nvidia.com/gpu"),
        ({"nodeSelector": "everywhere"}, "nodeSelector"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_contradiction_is_told_with_the_fields_path(worker: dict[str, Any], path: str) -> None:
    made = with_class(service(className="gpu", **worker), klass(**CLASS))
    assert isinstance(made, Trouble)
    assert made.reason == "WorkerClassContradicted"
    assert made.message.startswith(f"spec.worker.{path} says something else than WorkerClass gpu")


def test_two_claims_of_one_name_contradict_each_other() -> None:
    given = klass(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "l4"}])
    made = with_class(service(className="gpu", resourceClaims=[{"name": "gpu", "resourceClaimName": "mine"}]), given)
    assert isinstance(made, Trouble) and "spec.worker.resourceClaims[gpu]" in made.message


def test_saying_the_same_twice_contradicts_nothing() -> None:
    given = {name: value for name, value in CLASS.items() if name not in ("image", "serviceAccountName")}
    assert together(klass(**given), className="gpu", **given) == {"className": "gpu", **given}


@pytest.mark.parametrize("given", [None, klass(runtimeClassName="nvidia")], ids=["no class", "a class"])
def test_no_service_gives_itself_a_service_account(given: WorkerClass | None) -> None:
    """The definition prunes the field; should it ever not, the operator does."""
    pod = pod_of(given, className="gpu", serviceAccountName="cluster-admin")["spec"]
    assert "serviceAccountName" not in pod
    assert pod["automountServiceAccountToken"] is False


def test_a_class_gives_a_service_account_without_its_token() -> None:
    pod = pod_of(klass(**CLASS), className="gpu")["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("models", False)


def test_pods_are_labeled_with_their_class_which_no_user_can_do() -> None:
    label = "earlyexit.dev/worker-class"
    assert pod_of(klass(), className="gpu")["metadata"]["labels"][label] == "gpu"
    assert label not in pod_of(None)["metadata"]["labels"]


def test_every_claim_of_the_pod_is_the_workers_and_none_the_trainers() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "l4"}]
    pod = pod_of(klass(resourceClaims=claims), className="gpu")["spec"]
    assert pod["resourceClaims"] == claims
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}


def test_the_root_is_read_only_and_tmp_is_not() -> None:
    pod = pod_of(None)["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert volumes[mounts["/tmp"]]["emptyDir"] == {"sizeLimit": "64Mi"}
    assert "/dev/shm" not in mounts


def test_sizes_of_tmp_and_of_shared_memory_are_the_users_or_the_classs() -> None:
    pod = pod_of(klass(sharedMemory={"sizeLimit": "1Gi"}), className="gpu", tmp={"sizeLimit": "2Gi"})["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/tmp"]]["emptyDir"] == {"sizeLimit": "2Gi"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


@pytest.mark.parametrize(("deadline", "failures"), [(None, 300), ("90s", 45), ("1h30m", 2700)])
def test_a_worker_has_until_its_deadline_to_start(deadline: str | None, failures: int) -> None:
    pod = pod_of(klass(startupDeadline=deadline) if deadline else None)["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (2, failures)


@pytest.mark.parametrize("name", [3, "", "Gpu", "gpu nodes", ["gpu"]], ids=repr)
def test_a_class_that_cannot_exist_is_refused_by_name(name: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.worker\.className"):
        service(className=name)


def test_a_training_has_no_claims_of_devices() -> None:
    given = klass(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "l4"}], runtimeClassName="nvidia")
    made = with_class(service(className="gpu"), given)
    assert isinstance(made, Service)
    made = replace(made, spec=replace(made.spec, store_claim="ramps", training="LiveTraffic"))
    pod = training_job(made, TrainingOrder(1, "", 0.01), WorkerSettings("w"))["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod and "runtimeClassName" not in pod
