"""The operator process, with the chart's permissions, against a real API server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from offramp_core.errors import InvalidArgumentError
from offramp_operator import main
from offramp_operator.kube import runtime
from offramp_operator.settings import WebSettings, parse_settings, read_signing_key

ENVIRONMENT = {
    "OFFRAMP_LEASE_NAMESPACE": "offramp-system",
    "OFFRAMP_LEASE_NAME": "offramp-leader",
    "OFFRAMP_WORKER_IMAGE": "offramp/worker:1",
    "OFFRAMP_SIGNING_KEY_FILE": "/var/run/offramp/signing-key",
}


# --- settings ----------------------------------------------------------------------------------------


def test_the_environment_is_read_once_into_settings() -> None:
    settings = parse_settings(ENVIRONMENT | {"OFFRAMP_NAMESPACES": "a, b,", "POD_NAME": "offramp-0"})
    assert settings.namespaces == ("a", "b")
    assert (settings.identity, settings.port, settings.lease_name) == ("offramp-0", 8080, "offramp-leader")
    assert parse_settings(ENVIRONMENT).namespaces == ()


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        parse_settings({key: value for key, value in ENVIRONMENT.items() if key != name})


def test_the_network_policy_of_workers_is_read() -> None:
    assert parse_settings(ENVIRONMENT).workers.admin_from is None
    chosen = ENVIRONMENT | {"OFFRAMP_OPERATOR_INSTANCE": "offramp", "OFFRAMP_WORKER_NETWORK_POLICY": "IngressAndEgress"}
    workers = parse_settings(chosen).workers
    assert workers.admin_from is not None and not workers.allow_egress
    assert workers.admin_from.namespace == "offramp-system"
    assert workers.admin_from.labels["app.kubernetes.io/instance"] == "offramp"
    assert parse_settings(chosen | {"OFFRAMP_WORKER_NETWORK_POLICY": "Ingress"}).workers.allow_egress
    with pytest.raises(InvalidArgumentError, match="OFFRAMP_OPERATOR_INSTANCE"):
        parse_settings(ENVIRONMENT | {"OFFRAMP_WORKER_NETWORK_POLICY": "Ingress"})
    with pytest.raises(
        InvalidArgumentError, match="OFFRAMP_WORKER_NETWORK_POLICY is 'Some'; choose from None, Ingress"
    ):
        parse_settings(chosen | {"OFFRAMP_WORKER_NETWORK_POLICY": "Some"})


def test_the_level_of_the_log_is_read() -> None:
    assert parse_settings(ENVIRONMENT).log_level == logging.INFO
    assert parse_settings(ENVIRONMENT | {"OFFRAMP_LOG_LEVEL": "debug"}).log_level == logging.DEBUG
    with pytest.raises(InvalidArgumentError, match="OFFRAMP_LOG_LEVEL is 'loud'; choose from debug, info"):
        parse_settings(ENVIRONMENT | {"OFFRAMP_LOG_LEVEL": "loud"})


def test_credentials_for_workers_images_are_read_with_and_without_a_network_policy() -> None:
    told = ENVIRONMENT | {"OFFRAMP_WORKER_PULL_SECRETS": "registry,models"}
    guarded = told | {"OFFRAMP_OPERATOR_INSTANCE": "offramp", "OFFRAMP_WORKER_NETWORK_POLICY": "Ingress"}
    assert (
        parse_settings(told).workers.pull_secrets
        == parse_settings(guarded).workers.pull_secrets
        == ("registry", "models")
    )


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1"])
def test_a_bad_port_is_refused(port: str) -> None:
    with pytest.raises(InvalidArgumentError, match="OFFRAMP_PORT"):
        parse_settings(ENVIRONMENT | {"OFFRAMP_PORT": port})


def test_the_page_is_off_without_a_port_and_on_the_loopback_without_an_address() -> None:
    assert parse_settings(ENVIRONMENT).web is None
    assert parse_settings(ENVIRONMENT | {"OFFRAMP_WEB_PORT": "8082"}).web == WebSettings(8082)
    told = {"OFFRAMP_WEB_PORT": "9", "OFFRAMP_WEB_ADDRESS": "10.0.0.7", "OFFRAMP_WEB_HOSTS": "a.svc, b"}
    assert parse_settings(ENVIRONMENT | told).web == WebSettings(9, "10.0.0.7", ("a.svc", "b"))


@pytest.mark.parametrize(("name", "value"), [("OFFRAMP_WEB_PORT", "no"), ("OFFRAMP_WEB_ADDRESS", "pod.example")])
def test_a_bad_setting_of_the_page_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        parse_settings(ENVIRONMENT | {"OFFRAMP_WEB_PORT": "8082"} | {name: value})


def test_the_key_is_read_raw_or_as_base64(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\n" * 32)
    (tmp_path / "text").write_text("CgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgo=\n")
    assert read_signing_key(tmp_path / "raw").public_key == read_signing_key(tmp_path / "text").public_key
    (tmp_path / "short").write_bytes(b"k" * 31)
    for name in ("short", "absent"):
        with pytest.raises(InvalidArgumentError, match=name):
            read_signing_key(tmp_path / name)


def test_a_process_that_cannot_end_in_order_is_ended_by_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        forced = threading.Event()
        monkeypatch.setattr(runtime, "run", hang)
        monkeypatch.setattr(main, "END_SECONDS", 0.05)
        (tmp_path / "key").write_bytes(b"k" * 32)
        operator = main.Operator(parse_settings(ENVIRONMENT), read_signing_key(tmp_path / "key"), on_lost=forced.set)
        running = asyncio.create_task(operator.run())
        operator.stop()
        assert await asyncio.to_thread(forced.wait, 60)
        assert not running.done()
        running.cancel()

    asyncio.run(story())


# --- the process -------------------------------------------------------------------------------------


@dataclass
class Process:
    """A running operator."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    web: int

    def get(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(self.url + path, timeout=60)
        except httpx.TransportError:
            return None

    @property
    def page(self) -> str:
        """Its web page."""
        return f"http://127.0.0.1:{self.web}"

    def answers(self, path: str) -> bool:
        answer = self.get(path)
        return answer is not None and answer.status_code == 200

    def metric(self, line: str) -> bool:
        answer = self.get("/metrics")
        return answer is not None and line in answer.text.splitlines()

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines() if line.startswith("{")]

    def ended(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


def _wait(condition: Any, *, what: str, seconds: float = 180, state: Any = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s; last state: {state()}"
        time.sleep(0.1)


@pytest.fixture
def installed(api: Any, chart: Any, tmp_path: Path) -> Path:
    """The chart's accounts and roles; a kubeconfig with the operator's own, least permissions."""
    system = "offramp-system"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}, keep=True)
    for obj in chart(signingKey={"existingSecret": "key"}):
        if obj["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
            answer = api.create(obj, keep=True)
            assert answer.status_code in (201, 409), answer.text
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = api.request("POST", f"/api/v1/namespaces/{system}/serviceaccounts/offramp/token", request)
    assert answer.status_code == 201, answer.text
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": answer.json()["status"]["token"]}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    (tmp_path / "signing-key").write_bytes(b"k" * 32)
    return path


@pytest.fixture
def start(installed: Path, tmp_path: Path, free_port: Any) -> Iterator[Any]:
    with ExitStack() as stack:

        def run(name: str, *, lease: str, **environment: str) -> Process:
            port, page = free_port(), free_port()
            log = tmp_path / f"{name}.log"
            process = subprocess.Popen(
                [sys.executable, "-m", "offramp_operator.main"],
                stderr=stack.enter_context(log.open("wb")),
                env=os.environ
                | ENVIRONMENT
                | {
                    "KUBECONFIG": str(installed),
                    "POD_NAME": name,
                    "OFFRAMP_PORT": str(port),
                    "OFFRAMP_LEASE_NAME": lease,
                    "OFFRAMP_SIGNING_KEY_FILE": str(tmp_path / "signing-key"),
                    "OFFRAMP_WEB_PORT": str(page),
                    **environment,
                },
            )
            stack.callback(_end, process)
            return Process(process, f"http://127.0.0.1:{port}", log, page)

        yield run


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


LEASE = "offramp-leader"  # the only Lease that the chart's role admits


@pytest.fixture(autouse=True)
def _no_lease(request: pytest.FixtureRequest) -> None:
    if "start" in request.fixturenames:
        api = request.getfixturevalue("api")
        api.request("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/offramp-system/leases/{LEASE}")


def _holder(api: Any) -> str:
    answer = api.request("GET", f"/apis/coordination.k8s.io/v1/namespaces/offramp-system/leases/{LEASE}")
    return str(answer.json().get("spec", {}).get("holderIdentity", "")) if answer.status_code == 200 else ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_gets_its_workers_and_a_standby_takes_over_at_once(
    api: Any, start: Any, manifests: Any, namespace: str, browser: Any
) -> None:
    exposed = {"OFFRAMP_WEB_ADDRESS": "127.0.0.1"}
    first = start("first", lease=LEASE, **exposed)
    _wait(lambda: _holder(api) == "first", what="leadership", state=first.log.read_text)
    second = start("second", lease=LEASE, **exposed)
    _wait(lambda: first.answers("/readyz") and second.answers("/readyz"), what="readiness", state=second.log.read_text)
    _wait(
        lambda: first.metric("earlyexit_operator_leader 1.0") and second.metric("earlyexit_operator_leader 0.0"),
        what="one leader told by both",
    )

    manifest = manifests.service()
    manifest["metadata"]["namespace"] = namespace
    applied = api.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert applied.returncode == 0, applied.stderr
    paths = [
        f"/apis/apps/v1/namespaces/{namespace}/deployments/digits",
        f"/api/v1/namespaces/{namespace}/services/digits",
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/digits",
    ]
    _wait(
        lambda: all(api.request("GET", path).status_code == 200 for path in paths),
        what="children",
        state=first.log.read_text,
    )
    _wait(lambda: _conditions(api, manifest).get("Ready") == "False", what="a status", state=lambda: api.get(manifest))
    difference = api.kubectl("diff", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert difference.returncode == 0, difference.stdout
    assert "reconcile-failed" not in first.events()

    _look_at_both_pages(browser, first, second, f"/services/{namespace}/digits")

    # Steady state: passes go on, nothing is written once what was last seen has been digested.
    passes = _passes(first)
    _wait(lambda: _passes(first) >= passes + 2, what="two more passes")
    settled = api.get(manifest)["metadata"]["resourceVersion"]
    passes = _passes(first)
    _wait(lambda: _passes(first) >= passes + 3, what="three more passes")
    assert api.get(manifest)["metadata"]["resourceVersion"] == settled

    first.process.send_signal(signal.SIGTERM)
    assert first.ended(60) == 0
    assert "leadership-released" in first.events()
    _wait(lambda: _holder(api) == "second", what="the standby's turn", state=second.log.read_text)
    _wait(
        lambda: second.metric("earlyexit_operator_leader 1.0") and second.answers("/readyz"),
        what="the standby's readiness",
    )
    api.request("DELETE", paths[1])
    _wait(
        lambda: api.request("GET", paths[1]).status_code == 200,
        what="the new leader restoring the Service",
        state=second.log.read_text,
    )
    second.process.send_signal(signal.SIGTERM)
    assert second.ended(60) == 0


def _look_at_both_pages(browser: Any, leader: Process, standby: Process, path: str) -> None:
    """Whichever replica a browser reaches, it shows what the leader sees, and follows it."""
    shown = []
    for replica in (leader, standby):
        page = browser.new_page()
        page.set_default_timeout(90_000)
        complaints: list[str] = []
        page.on("pageerror", lambda error, told=complaints: told.append(str(error)))
        page.goto(replica.page)
        page.get_by_role("link", name="digits").click()
        page.wait_for_url(f"**{path}")
        page.get_by_text("live", exact=True).wait_for()
        page.locator("#state tbody tr", has_text="WorkersAvailable").get_by_text("False").wait_for()
        shown.append(page.locator("h1").inner_text())
        assert complaints == []
        page.close()
    assert shown[0] == shown[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_replica_is_ready_before_it_has_listed_everything_and_each_says_what_is_missing(
    api: Any, start: Any, chart: Any
) -> None:
    roles = [obj for obj in chart(signingKey={"existingSecret": "key"}) if obj["kind"] == "ClusterRole"]
    (role,) = (role for role in roles if any("pods" in rule["resources"] for rule in role["rules"]))
    without = [rule | {"resources": [r for r in rule["resources"] if r != "pods"]} for rule in role["rules"]]
    path = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role['metadata']['name']}"

    def allow(rules: list[dict[str, Any]]) -> None:
        answer = api.request("PATCH", path, {"rules": rules}, content_type="application/merge-patch+json")
        assert answer.status_code == 200, answer.text

    def waits_for_pods(replica: Process) -> bool:
        answer = replica.get("/readyz")
        return (
            answer is not None and answer.status_code == 503 and "not listed to the end yet: pods (403" in answer.text
        )

    allow([rule for rule in without if rule["resources"]])
    try:
        replicas = [start(name, lease=LEASE) for name in ("first", "second")]
        for replica in replicas:
            _wait(lambda r=replica: waits_for_pods(r), what="what is missing", state=replica.log.read_text)
            assert replica.answers("/healthz"), "a restart would not help"
        _wait(lambda: _holder(api) in ("first", "second"), what="leadership")
    finally:
        allow(role["rules"])
    for replica in replicas:
        _wait(lambda r=replica: r.answers("/readyz"), what="readiness", state=replica.log.read_text)


@pytest.mark.slow
def test_a_standby_of_a_page_that_only_its_own_pod_reaches_names_the_leader(api: Any, start: Any) -> None:
    leader = start("first", lease=LEASE)
    _wait(lambda: _holder(api) == "first", what="leadership", state=leader.log.read_text)
    standby = start("second", lease=LEASE)
    _wait(lambda: standby.answers("/readyz"), what="readiness", state=standby.log.read_text)
    answer = httpx.get(standby.page, timeout=60, trust_env=False)
    command = f"kubectl -n offramp-system port-forward pod/first {standby.web}"
    assert answer.status_code == 503 and f"<code>{command}</code>" in answer.text
    assert httpx.get(leader.page, timeout=60, trust_env=False).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_loses_its_lease_ends_at_once(api: Any, start: Any) -> None:
    operator = start("first", lease=LEASE)
    _wait(
        lambda: _holder(api) == "first" and operator.answers("/readyz"), what="leadership", state=operator.log.read_text
    )
    path = f"/apis/coordination.k8s.io/v1/namespaces/offramp-system/leases/{LEASE}"
    theft = {"spec": {"holderIdentity": "thief"}}
    assert api.request("PATCH", path, theft, content_type="application/merge-patch+json").status_code == 200
    assert operator.ended(60) == 1
    assert "leadership-lost" in operator.events()
    assert _holder(api) == "thief"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_spec_only_the_operator_refuses_is_told_in_the_status(
    api: Any, start: Any, manifests: Any, namespace: str
) -> None:
    manifest = manifests.service(model={"uri": "file:///models/digits"})
    manifest["metadata"]["namespace"] = namespace
    api.create(manifest, keep=True)
    operator = start("first", lease=LEASE)
    _wait(lambda: _conditions(api, manifest).get("Stalled") == "True", what="Stalled", state=operator.log.read_text)
    told = next(c for c in api.get(manifest)["status"]["conditions"] if c["type"] == "Stalled")
    assert told["reason"] == "InvalidModel" and "oci://" in told["message"]


@pytest.mark.slow
def test_a_bad_environment_ends_with_its_reason(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OFFRAMP_")}
    answer = subprocess.run(
        [sys.executable, "-m", "offramp_operator.main"], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "OFFRAMP_LEASE_NAMESPACE" in json.loads(answer.stderr.splitlines()[-1])["message"]


def _conditions(api: Any, manifest: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["status"] for c in api.get(manifest).get("status", {}).get("conditions", [])}


def _passes(operator: Process) -> float:
    while (answer := operator.get("/metrics")) is None:
        assert operator.process.poll() is None, operator.log.read_text()
    lines = answer.text.splitlines()
    return next(
        (float(line.split()[1]) for line in lines if line.startswith("earlyexit_operator_reconcile_total ")), 0.0
    )
