"""What a user of the real cluster lives through when something is wrong with what they asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kube import CHILDREN, RESTRICTED, Clients, Namespace, infer, manifest, ready, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

ENDED = ("Succeeded", "Failed")
# Asks a worker's ports for what only the operator may have, and prints each answer's status.
STRANGER = """
import json, urllib.error, urllib.request

def status(path, method="GET", token="", port=8081):
    headers = {{"Authorization": "Bearer " + token}} if token else {{}}
    data = b"{{}}" if method == "POST" else None
    request = urllib.request.Request(f"http://{address}:{{port}}{{path}}", data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code

told = {{"GET /v2/health/ready, public": status("/v2/health/ready", port=8080)}}
told["GET /v1/state, no token"] = status("/v1/state")
told["GET /v1/state, another token"] = status("/v1/state", token="guessed")
told["GET /v1/observations, another token"] = status("/v1/observations?after=0", token="guessed")
told["POST /v1/config, no token"] = status("/v1/config", "POST")
told["POST /v1/config, another token"] = status("/v1/config", "POST", token="guessed")
print(json.dumps(told))
"""


@pytest.fixture
def clients(namespace: Namespace) -> Iterator[None]:
    """Requests for as long as the test lasts, at most ten minutes."""
    sending = Clients(namespace, 600)
    yield
    sending.stop()


def test_a_tampered_bundle_is_named_in_the_condition_while_the_older_one_goes_on_serving(
    namespace: Namespace, good: str, broken: str
) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert infer(namespace) == ["200"]
    namespace.apply(manifest(broken))
    stalled = namespace.eventually("the tampered bundle to be reported", lambda: namespace.condition("tiny", "Stalled"))
    assert stalled["reason"] == "InvalidBundle"
    assert "ramps.safetensors" in stalled["message"]
    assert "; pack what `offramp prepare` wrote once more" in stalled["message"]
    assert namespace.condition("tiny", "Ready")["status"] == "True"
    assert infer(namespace) == ["200"]
    namespace.apply(manifest(good))
    namespace.eventually(
        "the service to settle again", lambda: ready(namespace) and not namespace.condition("tiny", "Stalled")
    )


def test_a_plan_of_an_unknown_ramp_is_refused_by_workers_and_rolled_back(
    namespace: Namespace, good: str, clients: None
) -> None:
    namespace.apply(manifest(good, ramps={"mode": "Disabled"}))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    namespace.apply(
        manifest(good, ramps={"mode": "Pinned", "pin": {"ramps": [{"id": "r99-grid", "threshold": "0.1"}]}})
    )
    stalled = namespace.eventually("the pin to be refused", lambda: namespace.condition("tiny", "Stalled"))
    assert stalled["reason"] == "PinRejected"
    assert "r99-grid" in stalled["message"]
    rollout = namespace.get("ramprollouts", "tiny-1")["status"]
    assert (rollout["verdict"], rollout["reason"]) == ("RolledBack", "UnknownRamp")
    assert namespace.condition("tiny", "Ready")["status"] == "True"


def stranger(namespace: Namespace, program: str) -> str:
    """What a program prints in a pod that is nobody's worker, as anybody may run who may run pods."""
    container = {
        "name": "stranger",
        "image": "localhost/offramp/worker:test",  # any image with Python
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", program],
        "securityContext": RESTRICTED,
    }
    spec = {"containers": [container], "restartPolicy": "Never", "automountServiceAccountToken": False}
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": spec})
    namespace.eventually("the stranger to end", lambda: namespace.get("pod", "stranger")["status"]["phase"] in ENDED)
    return run("kubectl", "logs", "stranger", "-n", namespace.name)


def test_a_stranger_pod_is_refused_at_the_admin_port_for_its_missing_token(namespace: Namespace, good: str) -> None:
    """The NetworkPolicy would not let it get so far where one is enforced; here none is, and the token is the lock."""
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    pods = json.loads(run("kubectl", "get", "pods", "-n", namespace.name, "-o", "json"))["items"]
    address = pods[0]["status"]["podIP"]
    answered = json.loads(stranger(namespace, STRANGER.format(address=address)))
    assert answered == {
        "GET /v2/health/ready, public": 200,
        "GET /v1/state, no token": 401,
        "GET /v1/state, another token": 401,
        "GET /v1/observations, another token": 401,
        "POST /v1/config, no token": 401,
        "POST /v1/config, another token": 401,
    }
    assert infer(namespace) == ["200"]


def test_an_edge_answers_at_its_own_address_while_its_core_is_away(namespace: Namespace, good: str) -> None:
    pools = [{"name": "box", "replicas": 1}, {"name": "core", "replicas": 1}]
    namespace.apply(manifest(good, pools=pools, edge={"pool": "box", "offline": "Answer"}))
    available = "WorkersAvailable"
    namespace.eventually("core and edge", lambda: namespace.condition("tiny", available).get("status") == "True")
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert namespace.list("deployments") == ["deployment.apps/tiny-box.edge", "deployment.apps/tiny-core"]
    assert infer(namespace) == infer(namespace, "tiny-edges") == ["200"]
    at_edge = Clients(namespace, 600, service="tiny-edges")
    try:
        run("kubectl", "delete", "pods", "-l", "earlyexit.dev/pool=core", "-n", namespace.name, "--timeout=60s")
        namespace.eventually("another core", lambda: infer(namespace) == ["200"])
    finally:
        answers = at_edge.stop()
    assert set(answers) == {"200"} and len(answers) > 100


def test_deleting_a_service_leaves_no_child(namespace: Namespace, good: str) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    run("kubectl", "delete", "earlyexitservice", "tiny", "-n", namespace.name)
    namespace.eventually("all children to go", lambda: namespace.list(CHILDREN) == ["configmap/kube-root-ca.crt"])
