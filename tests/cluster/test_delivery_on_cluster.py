"""Bundles from a store that needs a token and from a claim, fetched and mounted by a real kubelet; and the web page of the operator."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import httpx
import pytest
import trustme
from kube import RESTRICTED, ROOT, Namespace, infer, manifest, ready, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

PORT = 8443
TOKEN = "let-me-in"
SERVER = f"""
import http.server, ssl

class Store(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Bearer {TOKEN}":
            return self.send_error(401)
        super().do_GET()

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tls/pair.pem")
server = http.server.ThreadingHTTPServer(("", {PORT}), lambda *a: Store(*a, directory="/store"))
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = bundles.write_bundle(tmp_path_factory.mktemp("delivered") / "bundle")
    return found


@pytest.fixture
def archive(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, arcname=".")
    return packed.getvalue()


@pytest.fixture
def store(namespace: Namespace, archive: bytes) -> str:
    """Host and port of a store in the cluster; the Secret ``store`` has what it asks for."""
    host = f"store.{namespace.name}.svc.cluster.local"
    authority = trustme.CA()
    pair = authority.issue_cert(host).private_key_and_cert_chain_pem.bytes()
    secret = {"host": f"{host}:{PORT}", "bearerToken": TOKEN, "ca.crt": authority.cert_pem.bytes().decode()}
    files = {"bundle.tar.gz": base64.b64encode(archive).decode()}
    worker = {
        "name": "store",
        "image": "localhost/offramp/worker:test",
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SERVER],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}, {"name": "files", "mountPath": "/store"}],
    }
    volumes = [{"name": "tls", "secret": {"secretName": "tls"}}, {"name": "files", "configMap": {"name": "files"}}]
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store"}, "stringData": secret},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "stringData": {"pair.pem": pair.decode()}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"}, "binaryData": files},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "store"},
            "spec": {"selector": {"app": "store"}, "ports": [{"port": PORT}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "store", "labels": {"app": "store"}},
            "spec": {"containers": [worker], "volumes": volumes, "automountServiceAccountToken": False},
        },
    ]
    for item in objects:
        namespace.apply(item)
    run("kubectl", "wait", "pod/store", "--for=condition=Ready", "--timeout=240s", "-n", namespace.name)
    return f"{host}:{PORT}"


def worker_pods(namespace: Namespace) -> list[dict[str, Any]]:
    found = run("kubectl", "get", "pods", "-n", namespace.name, "-l", "app!=store", "-o", "json")
    pods: list[dict[str, Any]] = json.loads(found)["items"]
    return pods


def test_a_bundle_from_a_store_serves_and_goes_on_serving_when_the_next_address_is_refused(
    namespace: Namespace, store: str, archive: bytes
) -> None:
    digest = "sha256:" + hashlib.sha256(archive).hexdigest()
    model = {"uri": f"https://{store}/bundle.tar.gz", "archiveDigest": digest, "secretRef": {"name": "store"}}
    service = manifest("unused") | {}
    service["spec"] |= {"model": model, "replicas": 2}
    namespace.apply(service)
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert infer(namespace) == ["200"]
    assert namespace.get("earlyexitservice", "tiny")["status"]["models"][0]["uri"] == model["uri"]
    for pod in worker_pods(namespace):
        secret = {v["name"] for v in pod["spec"]["volumes"] if v.get("secret", {}).get("secretName") == "store"}
        seen_by = {
            c["name"]
            for c in pod["spec"]["initContainers"] + pod["spec"]["containers"]
            if secret & {m["name"] for m in c["volumeMounts"]}
        }
        assert seen_by == {c["name"] for c in pod["spec"]["initContainers"]}
        assert TOKEN not in run("kubectl", "logs", pod["metadata"]["name"], "-n", namespace.name, "--all-containers")

    metadata = "https://169.254.169.254/bundle.tar.gz"
    service["spec"]["model"] = {"uri": metadata}
    namespace.apply(service)
    stalled = namespace.eventually("the address to be refused", lambda: namespace.condition("tiny", "Stalled"))
    assert stalled["reason"] == "AddressRefused", stalled
    assert "169.254.169.254" in stalled["message"]
    assert namespace.condition("tiny", "Ready")["status"] == "True"
    assert infer(namespace) == ["200"]


def test_an_archive_with_another_digest_is_told_with_both(namespace: Namespace, store: str, archive: bytes) -> None:
    found = hashlib.sha256(archive).hexdigest()
    service = manifest("unused")
    wrong = "sha256:" + "0" * 64
    service["spec"]["model"] = {
        "uri": f"https://{store}/bundle.tar.gz",
        "archiveDigest": wrong,
        "secretRef": {"name": "store"},
    }
    namespace.apply(service)

    def told() -> bool:
        condition = namespace.condition("tiny", "Ready")
        return condition.get("reason") == "DigestMismatch" and found in condition["message"]

    namespace.eventually("the mismatch to be told", told)


@pytest.fixture
def claim(namespace: Namespace, folder: Path) -> Iterator[str]:
    """A claim, bound to a volume that is the folder above the bundle."""
    folder.parent.chmod(0o755)
    volume = f"models-{namespace.name}"
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    spec = common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder.parent), "type": "Directory"}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    asked = common | {"volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": asked}
    )
    yield "models"
    run("kubectl", "delete", "persistentvolume", volume, "--wait=false")


def test_a_bundle_from_a_claim_serves(namespace: Namespace, claim: str) -> None:
    service = manifest("unused")
    service["spec"]["model"] = {"uri": f"pvc://{claim}/bundle"}
    namespace.apply(service)
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert infer(namespace) == ["200"]


@pytest.fixture
def page(release: Callable[[Path, str], str]) -> Iterator[str]:
    """The address of the operator's page on this machine, by ``kubectl port-forward``."""
    command = ["kubectl", "-n", "offramp-system", "port-forward", "deployment/offramp", ":8082"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"Forwarding from (127\.0\.0\.1:\d+)", line)
    assert found, line + process.stdout.read()
    yield f"http://{found[1]}"
    process.terminate()
    process.wait(30)


def test_the_operators_page_is_read_through_a_forwarded_port(
    namespace: Namespace, release: Callable[[Path, str], str], folder: Path, page: str
) -> None:
    namespace.apply(manifest(release(folder, "tiny-paged")))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    with httpx.Client(base_url=page, timeout=60.0, trust_env=False) as client:
        facts = client.get(f"/api/v1/services/{namespace.name}/tiny").json()
        assert facts["row"]["namespace"] == namespace.name
        assert [worker["state"] for worker in facts["workers"]] == ["Ready"]
        listed = client.get("/", params={"q": namespace.name})
        assert listed.status_code == 200
        assert "tiny" in listed.text
        assert client.post("/").status_code == 405
