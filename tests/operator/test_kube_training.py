"""What a training's Job looks like, and what is made of what it and its pods tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import TrainingOrder, TrainingReport
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.manifests import (
    OperatorPods,
    WorkerSettings,
    deployment,
    network_policy,
    network_service,
    template_digest,
    training_job,
)
from offramp_operator.kube.training_jobs import WORDLESS_SECONDS, report, runs
from offramp_operator.shell.platform import WorkerIdentity
from offramp_worker.prepare.captured import MOST_ROWS
from offramp_worker.settings import settings_from_env

SETTINGS = WorkerSettings("offramp/worker:1")
IDENTITY = WorkerIdentity("public", "token")
OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
ORDER = TrainingOrder(3, OLD, 0.02, keep=(OLD,), since=1_700_000_000.0)
NOW = 1_700_001_000.0
LIVE = {"training": "LiveTraffic", "store": {"claimName": "ramps"}}


def service(uri: str = "oci://offramp/digits:1", **spec: Any) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    parsed = parse_spec({"model": {"uri": uri}, "objective": objective, "ramps": LIVE, **spec})
    return Service("default", "digits", "uid-1", 3, parsed)


def pod_of(obj: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = obj["spec"]["template"]["spec"]
    return found


def mounts(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {m["mountPath"]: (m.get("subPath", ""), m.get("readOnly", False)) for m in container["volumeMounts"]}


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_workers_read_ramp_sets_and_write_captures_and_nothing_else_of_the_store() -> None:
    pod = pod_of(deployment(service(), IDENTITY, SETTINGS, replicas=1))
    (worker,) = pod["containers"]
    seen = mounts(worker)
    assert seen["/ramp-sets"] == ("offramp/digits/ramp-sets", True)
    assert seen["/captures"] == ("offramp/digits/captures", False)
    settings = settings_from_env(variables(worker) | {"OFFRAMP_PUBLIC_KEY": "", "OFFRAMP_TOKEN_SHA256": ""})
    assert (str(settings.ramp_set_store), str(settings.capture_dir)) == ("/ramp-sets", "/captures")
    assert {"name": "store", "persistentVolumeClaim": {"claimName": "ramps"}} in pod["volumes"]


def test_a_store_without_live_training_is_only_read() -> None:
    (worker,) = pod_of(deployment(service(ramps={"store": LIVE["store"]}), IDENTITY, SETTINGS, replicas=1))[
        "containers"
    ]
    assert mounts(worker)["/ramp-sets"][1] is True
    assert "/captures" not in mounts(worker)
    assert "OFFRAMP_CAPTURE_DIR" not in variables(worker)


def test_without_a_store_workers_are_what_they_were() -> None:
    text = json.dumps(deployment(service(ramps={}), IDENTITY, SETTINGS, replicas=1))
    assert "store" not in text and "RAMP_SETS" not in text
    assert template_digest(service(ramps={}), SETTINGS) != template_digest(service(), SETTINGS)


def test_a_training_is_bounded_confined_owned_and_deleted_after() -> None:
    job = training_job(service(), ORDER, SETTINGS)
    spec, pod = job["spec"], pod_of(job)
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("uid-1", True)
    assert job["metadata"]["name"] == "digits-train-1700000000"
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 3600, 3600)
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False and "serviceAccountName" not in pod
    (trainer,) = pod["containers"]
    assert trainer["securityContext"]["readOnlyRootFilesystem"] is True
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert trainer["resources"]["limits"] and trainer["resources"]["requests"]
    assert {"/ramp-sets", "/captures", "/tmp", "/bundle"} == set(mounts(trainer))
    assert mounts(trainer)["/bundle"][1] is True
    assert "secret" not in json.dumps(pod) and "token" not in json.dumps(pod["containers"])


def test_a_training_runs_where_and_with_what_a_worker_does_but_without_its_devices() -> None:
    resources = {"limits": {"cpu": "2", "memory": "3Gi", "nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}}
    worker = {
        "nodeSelector": {"topology.kubernetes.io/zone": "a"},
        "imagePullSecrets": [{"name": "s"}],
        "imagePullPolicy": "Never",
        "resources": resources,
    }
    pod = pod_of(training_job(service(worker=worker), ORDER, SETTINGS))
    (trainer,) = pod["containers"]
    assert trainer["resources"] == {"limits": {"cpu": "2", "memory": "3Gi"}, "requests": {"cpu": "1"}}
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"topology.kubernetes.io/zone": "a"}, [{"name": "s"}])
    assert trainer["imagePullPolicy"] == "Never"


GPU_WORKER: dict[str, Any] = {
    "nodeSelector": {"nvidia.com/gpu.product": "A100", "kubernetes.io/arch": "amd64"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "Exists"}]}]
            }
        }
    },
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "schedulerName": "gpu-scheduler",
    "priorityClassName": "high",
}


@pytest.mark.parametrize("device", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "example.com/npu"])
@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_training_for_a_service_on_devices_goes_wherever_the_image_runs(device: str, kind: str) -> None:
    """It has no device: what leads workers to theirs would keep it waiting for a node that is full of them."""
    worker = {**GPU_WORKER, "resources": {kind: {"cpu": "2", device: 1}}}
    pod = pod_of(training_job(service(worker=worker), ORDER, SETTINGS))
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert {"affinity", "runtimeClassName", "schedulerName"}.isdisjoint(pod)
    assert pod["tolerations"] == GPU_WORKER["tolerations"], "they force nothing, and a store may be where workers are"
    assert pod["priorityClassName"] == "high"
    assert all(device not in c["resources"].get(k, {}) for c in pod["containers"] for k in ("limits", "requests"))


@pytest.mark.parametrize("resources", [{}, {"limits": {"cpu": "2", "hugepages-2Mi": "64Mi"}}], ids=str)
def test_training_for_a_service_without_devices_goes_where_its_workers_go(resources: dict[str, Any]) -> None:
    worker = {**GPU_WORKER, "resources": resources}
    pod = pod_of(training_job(service(worker=worker), ORDER, SETTINGS))
    assert {name: pod[name] for name in GPU_WORKER} == GPU_WORKER


def test_a_fetched_bundle_is_fetched_for_the_training_too() -> None:
    pod = pod_of(training_job(service("https://models.example.com/digits.tar.gz"), ORDER, SETTINGS))
    (fetching,) = pod["initContainers"]
    assert fetching["command"][:2] == ["offramp-worker", "fetch"]
    settings_from_env({**variables(fetching), "OFFRAMP_BUNDLE": "/bundle"})
    assert "/bundle/content" in pod["containers"][0]["command"]


def test_the_trainer_takes_every_option_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from offramp_worker.prepare import captured

    begun: list[captured.TrainingJob] = []

    def train(job: captured.TrainingJob, reporter: object) -> captured.TrainingResult:
        begun.append(job)
        return captured.TrainingResult(NEW, 10, 0.1, 0.2)

    told: list[bytes] = []
    monkeypatch.setattr(captured, "train_on_captures", train)
    monkeypatch.setattr(captured, "_write", lambda path, content: told.append(content))
    monkeypatch.setattr(captured.os, "nice", lambda n: 0)
    command = pod_of(training_job(service(), ORDER, SETTINGS))["containers"][0]["command"]
    assert command[:3] == ["python3", "-m", captured.__name__]
    assert captured.main(command[3:]) == 0
    assert (begun[0].made_from, begun[0].budget, begun[0].keep, begun[0].seed) == (OLD, 0.02, (OLD,), 3)
    assert MOST_ROWS >= 2000
    assert report(JOB, [pod(0, told[0].decode())], attempt=3, since=ORDER.since, now=NOW).state == "Succeeded"


def test_no_request_reaches_the_trainer_and_it_connects_to_nothing() -> None:
    labels = training_job(service(), ORDER, SETTINGS)["spec"]["template"]["metadata"]["labels"]
    chosen = network_service(service())["spec"]["selector"]
    assert not chosen.items() <= labels.items(), "the Service would send it requests"
    assert (
        not deployment(service(), IDENTITY, SETTINGS, replicas=1)["spec"]["selector"]["matchLabels"].items()
        <= labels.items()
    )
    policy = network_policy(service(), OperatorPods("o", {"a": "b"}), allow_egress=False)["spec"]
    selector = policy["podSelector"]
    (names,) = selector["matchExpressions"]
    assert selector["matchLabels"].items() <= labels.items() and labels[names["key"]] in names["values"]
    assert chosen["app.kubernetes.io/name"] in names["values"], "the workers stay guarded"
    assert "Egress" in policy["policyTypes"] and "egress" not in policy
    plain = network_policy(service(ramps={}), OperatorPods("o", {"a": "b"}), allow_egress=False)["spec"]["podSelector"]
    (guarded,) = plain["matchExpressions"]
    assert plain["matchLabels"].items() <= chosen.items() and guarded["key"] == names["key"]
    assert chosen["app.kubernetes.io/name"] in guarded["values"], "the workers are guarded without a training, too"
    assert labels[names["key"]] not in guarded["values"], "and nothing else is for a trainer that there is not"


def test_there_is_no_training_without_a_store() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.ramps\.store"):
        training_job(service(ramps={"training": "LiveTraffic"}), ORDER, SETTINGS)


# --- what is made of what is told ------------------------------------------------------------------

JOB: dict[str, Any] = {"metadata": {"name": "digits-train-1", "uid": "j"}, "status": {"active": 1}}
RESULT = json.dumps({"ramp_set_digest": NEW, "rows": 2000, "saving_before": 0.1, "saving_after": 0.3})


def finished(kind: str, reason: str = "", message: str = "", *, at: str = "2023-11-14T22:28:00Z") -> dict[str, Any]:
    told = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}
    return {**JOB, "status": {"conditions": [told]}}


def pod(code: int, message: str = "", *, reason: str = "Error", name: str = "p") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    phase = "Failed" if code else "Succeeded"
    return {
        "metadata": {"name": name},
        "status": {"phase": phase, "containerStatuses": [{"name": "train", "state": state}]},
    }


def told_of(job: dict[str, Any], *pods: dict[str, Any], now: float = NOW) -> TrainingReport:
    return report(job, pods, attempt=3, since=ORDER.since, now=now)


def test_the_last_words_of_the_pod_are_the_result() -> None:
    expected = TrainingReport(3, "Succeeded", NEW, 2000, 0.1, 0.3, since=ORDER.since)
    assert told_of(JOB, pod(0, RESULT)) == expected
    assert told_of(finished("Complete"), pod(143, "", name="drained"), pod(0, RESULT)) == expected


def test_a_training_that_runs_or_may_begin_again_elsewhere_is_waited_for() -> None:
    assert told_of(JOB) == TrainingReport(3, "Running", since=ORDER.since)
    assert told_of(JOB, pod(143, "", name="drained")).state == "Running"
    assert told_of(finished("Complete"), now=1_700_000_880.0 + WORDLESS_SECONDS).state == "Running"


@pytest.mark.parametrize(
    ("job", "pods", "said"),
    [
        (JOB, [pod(1, json.dumps({"error": "captures in /captures have 50 different inputs"}))], "50 different inputs"),
        (
            finished("Failed", "BackoffLimitExceeded"),
            [pod(137, "", reason="OOMKilled")],
            "raise spec.worker.resources.limits.memory",
        ),
        (
            finished("Failed", "BackoffLimitExceeded"),
            [pod(1, "Traceback\nValueError: no")],
            "exit code 1: ValueError: no",
        ),
        (finished("Failed", "DeadlineExceeded", "Job was active longer"), [], "took too long and was ended"),
        (finished("Complete"), [], "ended without a result; see kubectl logs"),
        (
            JOB,
            [pod(0, json.dumps({"ramp_set_digest": "../../etc", "rows": 1, "saving_before": 0, "saving_after": 1}))],
            "reported no result",
        ),
        (JOB, [pod(0, json.dumps({"rows": 1}))], "reported no result"),
    ],
    ids=["error", "memory", "crash", "deadline", "wordless", "no digest", "no result"],
)
def test_a_training_that_fails_says_why_and_what_to_do(job: Any, pods: list[Any], said: str) -> None:
    found = told_of(job, *pods)
    assert found.state == "Failed" and said in found.message
    assert (found.attempt, found.since, found.ramp_set_digest) == (3, ORDER.since, "")
    assert "\n" not in found.message


def test_a_pod_that_finds_no_node_says_so_while_it_waits() -> None:
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient memory.",
    }
    found = told_of(JOB, {"metadata": {"name": "p"}, "status": {"phase": "Pending", "conditions": [unscheduled]}})
    assert found.state == "Running" and "memory" in found.message


def test_a_training_is_over_when_its_job_says_so_or_its_pod_has_told_the_result() -> None:
    assert runs(JOB, []) and runs(JOB, [pod(143, "", name="drained")])
    assert not runs(JOB, [pod(0, RESULT)])
    assert not runs(finished("Complete"), []) and not runs(finished("Failed"), [])
