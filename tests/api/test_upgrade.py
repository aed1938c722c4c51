"""Upgrade, downgrade, removal and restoring of a release, by both Helms, on an API server of their own.

``previous/`` holds what an earlier release was: its packaged chart, and the objects of a canary in mid-step as its
operator wrote them. Only an API server and etcd run, so Deployments come true by a stand-in for their controller.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from offramp_core.control.objects import ServiceStatus
from offramp_operator.shell.manifests import (
    config_from_manifest,
    rollout_from_manifest,
    service_from_manifest,
    status_json,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "offramp"
PREVIOUS = Path(__file__).parent / "previous"
PREVIOUS_CHART = PREVIOUS / "offramp-0.1.0.tgz"
BEFORE_ROUTES = PREVIOUS / "offramp-0.2.0.tgz"  # 0.2.0 as it was before spec.route and WorkerClass
NAMESPACE, OPERATOR = "offramp-system", "offramp-operator"
KINDS = ("earlyexitservices", "rampconfigs", "ramprollouts", "workerclasses")
# The documented commands (docs/upgrade.md): intent only, without what belongs to the cluster it came from.
BACKUP = "get earlyexitservices --all-namespaces -o yaml"
NOT_INTENT = ("    resourceVersion:", "    uid:")

Helm = Callable[..., subprocess.CompletedProcess[str]]


def _servers() -> Any:
    """The API server's fixtures, as a module: pytest imports test modules without a package around them."""
    specification = importlib.util.spec_from_file_location("offramp_api_server", Path(__file__).parent / "conftest.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


SERVERS = _servers()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An API server of this module's own: kinds come and go here."""
    with ExitStack() as stack:
        started = SERVERS._start(tmp_path_factory.mktemp("cluster"), stack)
        default = "/api/v1/namespaces/default"
        SERVERS.wait_for(lambda: started.request("GET", default).status_code == 200, what="the namespace default")
        yield started


@pytest.fixture
def blank(server: Any, program: Callable[[str], str]) -> Iterator[Any]:
    """That server without our kinds, and so without any object of theirs: a fresh cluster."""
    yield server
    wipe(server, program("helm"))


def wipe(api: Any, helm: str) -> None:
    helm_of(api, helm)("uninstall", "offramp", "--ignore-not-found")
    for plural in KINDS:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.earlyexit.dev"
        api.request("DELETE", path)
        wait_until_gone(api, path)
    for kind in ("deployments", "replicasets"):
        api.request("DELETE", f"/apis/apps/v1/namespaces/{NAMESPACE}/{kind}")


def wait_until_gone(api: Any, path: str) -> None:
    """Where its storage has just changed, the server tries a kind again after ever longer pauses; a change wakes it."""
    gone = lambda: api.request("GET", path).status_code == 404  # noqa: E731
    for attempt in range(5):
        with suppress(AssertionError):
            return SERVERS.wait_for(gone, what="a kind gone", seconds=20)
        wake = {"metadata": {"annotations": {"attempt": str(attempt)}}}
        api.request("PATCH", path, wake, content_type="application/merge-patch+json")
    return SERVERS.wait_for(gone, what=f"{path} gone", state=lambda: api.request("GET", path).text)


def helm_of(api: Any, path: str) -> Helm:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [path, *arguments, f"--kubeconfig={api.kubeconfig}", f"--namespace={NAMESPACE}"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        assert answer.returncode == 0, answer.stderr
        return answer

    return run


@pytest.fixture
def helm(blank: Any, program: Callable[[str], str]) -> Helm:
    return helm_of(blank, program("helm"))


@pytest.fixture
def helm4(blank: Any, tool: Callable[[str, str], str]) -> Helm:
    return helm_of(blank, tool("charts", "helm"))


@contextmanager
def deployments_come_true(api: Any) -> Iterator[None]:
    """What the Deployment controller and the kubelets would report, for as long as the block lasts."""
    stop = threading.Event()

    def report() -> None:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}"
        while not stop.wait(0.3):
            for item in api.request("GET", f"{path}/deployments").json().get("items", []):
                if (item.get("status") or {}).get("observedGeneration") != item["metadata"]["generation"]:
                    _come_true(api, path, item)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def _come_true(api: Any, path: str, deployment: dict[str, Any]) -> None:
    """A ReplicaSet of the newest template with all of its pods ready; Helm 3 looks at it, Helm 4 at the Deployment."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas"), spec["replicas"])
    owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    template = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
    name = f"{metadata['name']}-{template}"
    replica_set = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "ownerReferences": [owner],
            "labels": spec["template"]["metadata"]["labels"],
        },
        "spec": {key: spec[key] for key in ("replicas", "selector", "template")},
    }
    patch = {"content_type": "application/merge-patch+json"}
    if api.request("POST", f"{path}/replicasets", replica_set).status_code == 409:  # scaled, with the same template
        api.request("PATCH", f"{path}/replicasets/{name}", {"spec": {"replicas": spec["replicas"]}}, **patch)
    generation = api.request("GET", f"{path}/replicasets/{name}").json()["metadata"]["generation"]
    status = counts | {"observedGeneration": generation}
    api.request("PATCH", f"{path}/replicasets/{name}/status", {"status": status}, **patch)
    conditions = [
        {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"},
        {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
    ]
    status = counts | {
        "updatedReplicas": spec["replicas"],
        "observedGeneration": metadata["generation"],
        "conditions": conditions,
    }
    api.request("PATCH", f"{path}/deployments/{metadata['name']}/status", {"status": status}, **patch)


def in_flight() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((PREVIOUS / "in-flight.yaml").read_text()))


def create(api: Any, manifest: dict[str, Any]) -> None:
    """As soon as its kind is served as the chart has it: Helm without ``--wait`` does not wait for that."""
    SERVERS.wait_for(
        lambda: api.create(manifest, keep=True).status_code == 201,
        what=f"{manifest['metadata']['name']} created",
        state=lambda: api.create(manifest).text,
    )


def write_in_flight(api: Any) -> None:
    for manifest in in_flight():
        create(api, {k: v for k, v in manifest.items() if k != "status"})
        answer = api.apply(manifest, manager=OPERATOR, subresource="status")
        assert answer.status_code == 200, answer.text


def live(api: Any) -> dict[str, dict[str, Any]]:
    return {manifest["metadata"]["name"]: api.get(manifest) for manifest in in_flight()}


def versions(api: Any) -> dict[str, str]:
    return {name: obj["metadata"]["resourceVersion"] for name, obj in live(api).items()}


def test_a_canary_in_mid_step_survives_upgrade_and_downgrade(blank: Any, helm: Helm, helm4: Helm) -> None:
    """Made by Helm 3 with the earlier chart, upgraded by Helm 4 (both waiting), taken back by Helm 3, upgraded
    again."""
    with deployments_come_true(blank):
        helm("install", "offramp", str(PREVIOUS_CHART), "--create-namespace", "--wait", "--timeout", "240s")
        write_in_flight(blank)
        before, kept = live(blank), versions(blank)
        key = f"/api/v1/namespaces/{NAMESPACE}/secrets/offramp-signing-key"
        signing_key = blank.request("GET", key).json()["data"]

        helm4("upgrade", "offramp", str(CHART), "--wait", "--timeout", "240s")
        assert versions(blank) == kept, "an upgrade writes none of these objects"
        assert blank.request("GET", key).json()["data"] == signing_key, "workers go on trusting the same key"
        found = live(blank)
        service = service_from_manifest(found["digits"])
        rollout = rollout_from_manifest(found["digits-1"])
        assert (rollout.status.phase, rollout.status.step, rollout.status.weight) == ("Progressing", 1, 25)
        assert rollout.status.ledger.live["boot-1"].canary.audited == 290
        assert rollout.status.gates[0].n == 290 and not rollout.status.finished
        assert config_from_manifest(found[rollout.to_config]).status.certificates == (
            {"budget": 0.02, "n": 900, "k": 4},
        )
        assert service.status.stable_config == rollout.from_config
        # The new operator goes on from there: what it writes is what it read, in the new schema.
        status = {key: found["digits-1"][key] for key in ("apiVersion", "kind")} | {
            "metadata": {"name": "digits-1", "namespace": "default"},
            "status": status_json(rollout.status),
        }
        written = blank.apply(status, manager=OPERATOR, subresource="status")
        assert written.status_code == 200, written.text
        assert rollout_from_manifest(written.json()).status == rollout.status
        assert blank.merge(found["digits-1"], {"spec": {"paused": True}}).status_code == 200

        helm("rollback", "offramp", "1", "--wait", "--timeout", "240s")
        after = live(blank)
        assert after["digits"]["spec"] == before["digits"]["spec"]
        assert after["digits-1"]["status"]["ledger"] == before["digits-1"]["status"]["ledger"]
        # The earlier operator can write its statuses, and people can decide.
        old_status = {k: v for k, v in in_flight()[3].items() if k != "spec"}
        assert blank.apply(old_status, manager=OPERATOR, subresource="status").status_code == 200
        assert blank.merge(after["digits-1"], {"spec": {"paused": False}}).status_code == 200

        helm4("upgrade", "offramp", str(CHART), "--wait", "--timeout", "240s")
        assert rollout_from_manifest(live(blank)["digits-1"]).status.weight == 25


def test_a_field_of_the_newer_release_does_not_lock_its_object_after_a_downgrade(
    blank: Any, helm: Helm, manifests: Any
) -> None:
    helm("install", "offramp", str(PREVIOUS_CHART), "--create-namespace")
    helm("upgrade", "offramp", str(CHART))
    newer = manifests.service("newer", rollout={"rollbackWindow": 5}, protocols=["HTTP", "GRPC"])
    create(blank, newer)
    helm("rollback", "offramp", "1")
    SERVERS.wait_for(
        lambda: "protocols" not in blank.merge(newer, {"spec": {"replicas": 3}}).json().get("spec", {"protocols": 1}),
        what="the earlier schema in force",
    )
    assert blank.get(newer)["spec"]["replicas"] == 3
    assert blank.request("DELETE", SERVERS.path_of(newer)).status_code == 200


GATEWAY = {"parentRefs": [{"name": "public", "namespace": "infra"}], "hostnames": ["digits.example.com"]}
OF_BEFORE = {
    "objective": {"latency": {"threshold": "40ms", "percentile": 99}, "accuracy": {"maxDisagreement": "0.02"}},
    "rollout": {"stepDeadline": "1.5h", "steps": [{"weight": 5, "pause": "90s"}, {"weight": 50}]},
    "batching": {"policy": "Clockwork"},
    "updatePolicy": {"sideBySide": {"weight": 10, "gateway": GATEWAY}},
    "worker": {"image": "registry.example/worker:1", "runtimeClassName": "nvidia"},
}


def test_a_service_with_the_fields_of_before_means_the_same_and_can_be_moved_to_those_of_now(
    blank: Any, helm: Helm, manifests: Any
) -> None:
    helm("install", "offramp", str(BEFORE_ROUTES), "--create-namespace")
    service = manifests.service("digits", **OF_BEFORE)
    create(blank, service)
    stored = blank.get(service)["spec"]
    helm("upgrade", "offramp", str(CHART))
    new = manifests.service("new", route=GATEWAY)
    create(blank, new)  # the kinds of now are served
    assert blank.get(service)["spec"] == stored, "an upgrade writes no service"
    read = service_from_manifest(blank.get(service)).spec
    assert read.route == service_from_manifest(blank.get(new)).spec.route
    assert read.update_policy.side_by_side is not None and read.update_policy.side_by_side.weight == 10
    assert (read.latency_percentile, read.rollout.step_deadline_seconds) == (99.0, 5400.0)
    assert [said.split(" ", 1)[0] for said in read.deprecated] == [
        "spec.batching.policy",
        "spec.updatePolicy.sideBySide.gateway",
    ]
    changed = blank.merge(service, {"spec": {"replicas": 3}})
    assert changed.status_code == 200, changed.text
    both = blank.merge(service, {"spec": {"route": GATEWAY}})
    assert both.status_code == 422 and "route takes the place of" in both.json()["message"]
    moved = {"route": GATEWAY, "updatePolicy": {"sideBySide": {"gateway": None}}, "batching": None}
    assert blank.merge(service, {"spec": moved}).status_code == 200
    now = service_from_manifest(blank.get(service)).spec
    assert now.deprecated == () and now.route == read.route


@pytest.mark.parametrize("version", ["helm", "helm4"])
def test_install_and_upgrade_wait_until_the_operator_runs(
    version: str, blank: Any, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(version)
    with deployments_come_true(blank):
        run("install", "offramp", str(CHART), "--create-namespace", "--wait", "--timeout", "240s")
        run("upgrade", "offramp", str(CHART), "--set", "replicas=3", "--wait", "--timeout", "240s")
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "offramp", "namespace": NAMESPACE},
    }
    assert blank.get(deployment)["status"]["readyReplicas"] == 3
    run("uninstall", "offramp", "--wait", "--timeout", "240s")
    path = "/apis/earlyexit.dev/v1alpha1/earlyexitservices"
    SERVERS.wait_for(lambda: blank.request("GET", path).status_code == 200, what="the kinds, which are kept")


def test_waiting_ends_with_an_error_where_the_operator_does_not_come_up(
    blank: Any, tool: Callable[[str, str], str]
) -> None:
    """Without it a wait that waits for nothing would pass the test above."""
    command = [
        tool("charts", "helm"),
        "install",
        "offramp",
        str(CHART),
        "--create-namespace",
        "--wait",
        "--timeout",
        "20s",
        f"--kubeconfig={blank.kubeconfig}",
        f"--namespace={NAMESPACE}",
    ]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)
    assert answer.returncode != 0
    assert "Deployment" in answer.stderr


def test_removing_the_release_with_its_kinds_leaves_nothing_stuck(blank: Any, helm: Helm) -> None:
    helm("install", "offramp", str(CHART), "--create-namespace", "--set", "crds.keep=false")
    write_in_flight(blank)
    for obj in live(blank).values():
        assert "finalizers" not in obj["metadata"]
    helm("uninstall", "offramp")
    for plural in KINDS:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.earlyexit.dev"
        wait_until_gone(blank, path)
    assert blank.kubectl("get", "clusterroles", "-o", "name").stdout.count("offramp") == 0


def test_intent_is_restored_on_a_fresh_cluster(blank: Any, helm: Helm, program: Callable[[str], str]) -> None:
    """Statuses and tuned plans are lost, on purpose: the model serves without exits until a plan is certified there."""
    helm("install", "offramp", str(CHART), "--create-namespace")
    write_in_flight(blank)
    before = blank.get(in_flight()[0])
    saved = blank.kubectl(*BACKUP.split())
    assert saved.returncode == 0, saved.stderr
    text = "".join(line for line in saved.stdout.splitlines(keepends=True) if not line.startswith(NOT_INTENT))
    wipe(blank, program("helm"))
    helm("install", "offramp", str(CHART), "--create-namespace")
    apply = lambda: blank.kubectl("apply", "-f", "-", stdin=text)  # noqa: E731
    SERVERS.wait_for(lambda: apply().returncode == 0, what="the intent restored", state=lambda: apply().stderr)
    service = blank.get(before)
    assert service["spec"] == before["spec"] and "status" in before
    assert service["status"] == {"observedGeneration": 0}
    assert service_from_manifest(service).status == ServiceStatus()
    assert blank.kubectl("get", "rampconfigs,ramprollouts", "--all-namespaces", "-o", "name").stdout == ""


def test_the_manifest_without_helm_is_installed_by_the_commands_in_its_head(
    blank: Any, program: Callable[[str], str], tmp_path: Path
) -> None:
    manifest = tmp_path / "install.yaml"
    manifest.write_bytes((ROOT / "manifests" / "install.yaml").read_bytes())
    head = manifest.read_text().split("---", 1)[0]
    script = "\n".join(line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   "))
    assert script.count("kubectl") == 3
    # It may be there from a test before this one: nothing removes namespaces here.
    script = script.replace(f"create namespace {NAMESPACE}", f"create namespace {NAMESPACE} || true")

    def run(script: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(program('kubectl')).parent}:{os.environ['PATH']}"
        command = ["bash", "-euo", "pipefail", "-c", script]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": path, "KUBECONFIG": str(blank.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
        )

    try:
        done = run(script)
        assert done.returncode == 0, done.stderr
        applied = [item for item in yaml.safe_load_all(manifest.read_text()) if item]
        assert done.stdout.count(" serverside-applied") == len(applied)
        pods = blank.get(next(item for item in applied if item["kind"] == "Deployment"))["spec"]["template"]["spec"]
        (container,) = pods["containers"]
        env = {item["name"]: item.get("value") for item in container["env"]}
        for image, part in ((container["image"], "operator"), (env["OFFRAMP_WORKER_IMAGE"], "worker")):
            assert image.startswith(f"registry.example.com/offramp/{part}:")
        (secret,) = (volume["secret"]["secretName"] for volume in pods["volumes"] if "secret" in volume)
        assert run(f"kubectl -n {NAMESPACE} get secret {secret}").returncode == 0
        again = run(script.splitlines()[-1])
        assert again.returncode == 0, again.stderr
        SERVERS.wait_for(lambda: blank.create(in_flight()[0]).status_code == 201, what="a service admitted")
    finally:
        run(
            f"kubectl delete --ignore-not-found --wait=false -f install.yaml; kubectl -n {NAMESPACE} delete "
            "--ignore-not-found secret offramp-signing-key"
        )


def test_the_documented_commands_are_those_that_are_tested() -> None:
    text = (ROOT / "docs" / "upgrade.md").read_text()
    assert f"kubectl {BACKUP} | sed '/^    \\(resourceVersion\\|uid\\):/d' >services.yaml" in text
