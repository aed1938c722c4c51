"""Bundles from a store that needs a token and from a claim, fetched and mounted by a real kubelet; and the web page of
the operator."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
ENDLESS = 2**40  # bytes, which no node of these tests has free
# What lies in /state says what the store does: which file it gives, and whether it stops in the middle of it.
SERVER = f"""
import http.server, pathlib, ssl, time

state, files = pathlib.Path("/state"), pathlib.Path("/files")

class Store(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Bearer {TOKEN}":
            return self.send_error(401)
        endless = self.path.startswith("/endless")
        content = (files / ("second" if (state / "replaced").exists() else "first")).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str({ENDLESS} if endless else len(content)))
        self.end_headers()
        half = 0 if endless else (len(content) + 1) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        while (state / "held").exists():
            time.sleep(0.1)
        if not endless:
            self.wfile.write(content[half:])

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tls/pair.pem")
server = http.server.ThreadingHTTPServer(("", {PORT}), Store)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
"""


@dataclass(frozen=True)
class Store:
    """A store in the cluster that wants a token; the Secret ``store`` has what it asks for."""

    namespace: Namespace
    address: str

    def model(self, path: str = "bundle.tar.gz", **fields: Any) -> dict[str, Any]:
        """What a service says of a bundle that lies here."""
        return {"uri": f"https://{self.address}/{path}", "secretRef": {"name": "store"}, **fields}

    def replace(self) -> None:
        """Another bundle at every address from now on."""
        self._do("touch /state/replaced")

    def hold(self) -> None:
        """Stop in the middle of every bundle."""
        self._do("touch /state/held")

    def go_on(self) -> None:
        self._do("rm /state/held")

    def _do(self, what: str) -> None:
        run("kubectl", "exec", "store", "-n", self.namespace.name, "--", "sh", "-c", what)


def packed(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(folder, arcname=".")
    return content.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = bundles.write_bundle(tmp_path_factory.mktemp("delivered") / "bundle")
    return found


@pytest.fixture(scope="module")
def archive(folder: Path) -> bytes:
    return packed(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The archive of another model."""
    return packed(bundles.write_bundle(tmp_path_factory.mktemp("other") / "bundle", seed=5))


@pytest.fixture
def store(namespace: Namespace, archive: bytes, other: bytes) -> Store:
    host = f"store.{namespace.name}.svc.cluster.local"
    authority = trustme.CA()
    pair = authority.issue_cert(host).private_key_and_cert_chain_pem.bytes()
    secret = {"host": f"{host}:{PORT}", "bearerToken": TOKEN, "ca.crt": authority.cert_pem.bytes().decode()}
    files = {name: base64.b64encode(content).decode() for name, content in (("first", archive), ("second", other))}
    worker = {
        "name": "store",
        "image": "localhost/offramp/worker:test",
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", SERVER],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in ("tls", "files", "state")],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "tls", "secret": {"secretName": "tls"}},
        {"name": "files", "configMap": {"name": "files"}},
        {"name": "state", "emptyDir": {}},
    ]
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
    return Store(namespace, f"{host}:{PORT}")


def worker_pods(namespace: Namespace) -> list[dict[str, Any]]:
    found = run("kubectl", "get", "pods", "-n", namespace.name, "-l", "app!=store", "-o", "json")
    pods: list[dict[str, Any]] = json.loads(found)["items"]
    return pods


def told(namespace: Namespace, *parts: str) -> str:
    """What the condition says of the newest generation, once it has all these parts."""

    def said() -> str:
        conditions = (namespace.condition("tiny", kind) for kind in ("Stalled", "Reconciling"))
        sentences = (f"{c.get('reason')}: {c.get('message')}" for c in conditions if c)
        return next((sentence for sentence in sentences if all(part in sentence for part in parts)), "")

    found: str = namespace.eventually(f"to be told {parts}", said)
    return found


def test_a_bundle_from_a_store_serves_and_goes_on_serving_whatever_is_wrong_with_the_next_one(
    namespace: Namespace, store: Store, archive: bytes
) -> None:
    digest = "sha256:" + hashlib.sha256(archive).hexdigest()
    model = store.model(archiveDigest=digest)
    service = manifest("unused")
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
    before = {pod["metadata"]["uid"] for pod in worker_pods(namespace)}

    wrong = "sha256:" + "0" * 64
    trouble: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "an address that is never allowed": (
            {"uri": "https://169.254.169.254/bundle.tar.gz"},
            ("AddressRefused: ", "169.254.169.254", "; "),
        ),
        "another archive": (
            store.model(archiveDigest=wrong),
            ("DigestMismatch: ", f"has digest {digest}, not {wrong}; correct spec.model.archiveDigest"),
        ),
        "another model": (
            store.model(digest=wrong),
            ("DigestMismatch: ", f"must serve {wrong}; put that bundle back there, or set spec.model.digest"),
        ),
        "an archive larger than the node's disk": (
            store.model("endless.tar.gz"),
            (f"no disk space left for the {ENDLESS / 2**30:.1f} GiB of ", "; free disk space there or add a node"),
        ),
    }
    for name, (asked, parts) in trouble.items():
        service["spec"]["model"] = asked
        namespace.apply(service)
        assert "\n" not in told(namespace, *parts), name
        assert namespace.condition("tiny", "Ready")["status"] == "True", name
        assert infer(namespace) == ["200"], name
    assert before <= {pod["metadata"]["uid"] for pod in worker_pods(namespace)}, "what served before is still there"


def test_a_download_is_seen_and_a_bundle_that_is_replaced_behind_its_address_is_never_served_beside_the_first(
    namespace: Namespace, store: Store, archive: bytes
) -> None:
    store.hold()
    service = manifest("unused")
    service["spec"]["model"] = store.model()
    namespace.apply(service)

    def downloading() -> str:
        condition = namespace.condition("tiny", "Ready")
        return str(condition["message"]) if condition.get("reason") == "FetchingBundle" else ""

    half = f"of {len(archive) / 1024:.1f} KiB (50 %)"
    namespace.eventually("the bytes to be told", lambda: half in downloading())
    store.go_on()
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    first = worker_pods(namespace)[0]["metadata"]["name"]

    store.replace()
    service["spec"]["replicas"] = 2
    namespace.apply(service)
    [proven] = namespace.get("earlyexitservice", "tiny")["status"]["models"]
    told(
        namespace,
        "DigestMismatch: ",
        f"must serve {proven['digest']}; put that bundle back there, or set spec.model.digest",
    )
    serving = {
        pod["metadata"]["name"]
        for pod in worker_pods(namespace)
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
    }
    assert serving == {first}
    assert infer(namespace) == ["200"]


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
def page(namespace: Namespace) -> Iterator[str]:
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
