"""A real API server for these tests: etcd and kube-apiserver alone, on free ports, in a temporary folder."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from bench.ports import free_port
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.needed import built

DIGEST = f"sha256:{'1' * 64}"  # of the model: without one the first worker of a service starts alone
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("etcd", "helm", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
GROUP = "earlyexit.dev/v1alpha1"
START_DEADLINE_SECONDS = 300
PLURALS = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "ClusterServingRuntime": "clusterservingruntimes",
    "ConfigMap": "configmaps",
    "CustomResourceDefinition": "customresourcedefinitions",
    "Deployment": "deployments",
    "EarlyExitService": "earlyexitservices",
    "Event": "events",
    "HTTPRoute": "httproutes",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "Lease": "leases",
    "Namespace": "namespaces",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "RampConfig": "rampconfigs",
    "ResourceQuota": "resourcequotas",
    "RampRollout": "ramprollouts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "WorkerClass": "workerclasses",
    "WorkerPool": "workerpools",
}
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ClusterServingRuntime",
    "CustomResourceDefinition",
    "Namespace",
    "PersistentVolume",
    "WorkerClass",
}


def binary(name: str) -> str:
    return str(built("build", *PROGRAMS) / name)


def path_of(manifest: dict[str, Any], *, named: bool = True) -> str:
    """The REST path of an object, or of its collection."""
    api, metadata = manifest["apiVersion"], manifest["metadata"]
    parts = ["api" if api == "v1" else "apis", api]
    if manifest["kind"] not in CLUSTER_SCOPED:
        parts += ["namespaces", metadata.get("namespace", "default")]
    kind = manifest["kind"]
    parts.append(PLURALS.get(kind, f"{kind.lower()}s"))
    return "/" + "/".join([*parts, metadata["name"]] if named else parts)


@dataclass(frozen=True)
class ApiServer:
    """A client of the API server. Every write asks for strict field validation, as ``kubectl`` does."""

    client: httpx.Client
    kubeconfig: Path

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        content_type: str = "application/json",
        user: str | None = None,
    ) -> httpx.Response:
        headers = {"Content-Type": content_type, **({"Impersonate-User": user} if user else {})}
        content = None if body is None else json.dumps(body)
        return self.client.request(method, path, content=content, params=params, headers=headers)

    def create(self, manifest: dict[str, Any], *, keep: bool = False, user: str | None = None) -> httpx.Response:
        """POST; without ``keep`` only a dry run, which validates all the same."""
        params = {"fieldValidation": "Strict", **({} if keep else {"dryRun": "All"})}
        return self.request("POST", path_of(manifest, named=False), manifest, params=params, user=user)

    def merge(
        self, manifest: dict[str, Any], patch: dict[str, Any], *, subresource: str = "", user: str | None = None
    ) -> httpx.Response:
        path = path_of(manifest) + (f"/{subresource}" if subresource else "")
        params = {"fieldValidation": "Strict"}
        return self.request("PATCH", path, patch, params=params, content_type="application/merge-patch+json", user=user)

    def apply(
        self, manifest: dict[str, Any], *, manager: str, subresource: str = "", user: str | None = None
    ) -> httpx.Response:
        """Server-side apply."""
        path = path_of(manifest) + (f"/{subresource}" if subresource else "")
        params = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        return self.request(
            "PATCH", path, manifest, params=params, content_type="application/apply-patch+yaml", user=user
        )

    def get(self, manifest: dict[str, Any]) -> dict[str, Any]:
        answer = self.request("GET", path_of(manifest))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [binary("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)


def wait_for(condition: Callable[[], bool], *, what: str, seconds: float = 90, state: Callable[[], str] = str) -> None:
    """Poll until ``condition`` holds; on the deadline fail with the last state seen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s; last state: {state()}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The API server with the three kinds installed."""
    folder = tmp_path_factory.mktemp("apiserver")
    with ExitStack() as stack:
        server = _start(folder, stack)
        _install_crds(server)
        yield server


def _start(folder: Path, stack: ExitStack) -> ApiServer:
    etcd, peer, port = free_port(), free_port(), free_port()
    etcd_url, url, token = f"http://127.0.0.1:{etcd}", f"https://127.0.0.1:{port}", secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    _write_key(folder)
    peer_url = f"http://127.0.0.1:{peer}"
    # The data is thrown away, so waiting for the disk would only make the tests slower.
    _spawn(
        stack,
        folder,
        "etcd",
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",
        f"--listen-client-urls={etcd_url}",
        f"--advertise-client-urls={etcd_url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=default={peer_url}",
    )
    process = _spawn(
        stack,
        folder,
        "kube-apiserver",
        f"--etcd-servers={etcd_url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder}/certificates",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.0.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder}/key.pem",
        f"--service-account-signing-key-file={folder}/key.pem",
        "--disable-admission-plugins=ServiceAccount",
    )
    certificate = folder / "certificates" / "apiserver.crt"
    log = folder / "kube-apiserver.log"
    wait_for(
        certificate.exists, what="the API server's certificate", seconds=START_DEADLINE_SECONDS, state=log.read_text
    )
    client = stack.enter_context(
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=_trust(certificate), timeout=30)
    )
    wait_for(
        lambda: _ready(client, process),
        what="the API server's readiness",
        seconds=START_DEADLINE_SECONDS,
        state=lambda: log.read_text()[-3000:],
    )
    return ApiServer(client, _write_kubeconfig(folder, url, token))


def _trust(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def _ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "kube-apiserver ended"
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _spawn(stack: ExitStack, folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    # There is memory enough: to collect garbage less often saves a fifth of the API server's start.
    environment = {"GOGC": "400", **os.environ}
    process = subprocess.Popen([binary(name), *flags], env=environment, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _write_key(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(pem)


def _write_kubeconfig(folder: Path, url: str, token: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {
                "name": "test",
                "cluster": {"server": url, "certificate-authority": f"{folder}/certificates/apiserver.crt"},
            }
        ],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def _install_crds(api: ApiServer) -> None:
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        answer = api.create(crd, keep=True)
        assert answer.status_code == 201, f"{file.name}: {answer.text}"
    for plural in ("earlyexitservices", "rampconfigs", "ramprollouts", "workerpools"):
        path = f"/apis/{GROUP}/namespaces/default/{plural}"
        wait_for(lambda path=path: api.request("GET", path).status_code == 200, what=f"{plural} being served")  # type: ignore[misc]
    classes = f"/apis/{GROUP}/workerclasses"
    wait_for(lambda: api.request("GET", classes).status_code == 200, what="workerclasses being served")
    default = "/api/v1/namespaces/default"
    wait_for(lambda: api.request("GET", default).status_code == 200, what="the namespace default")


def gateway_api() -> dict[str, Any]:
    """Gateway API's own definition of HTTPRoute."""
    return definition("gateway", "sigs.k8s.io/gateway-api", "standard/gateway.networking.k8s.io_httproutes.yaml")


def definition(group: str, module: str, file: str) -> dict[str, Any]:
    """Somebody else's own definition of a kind, from the Go module that ``cluster/go/GROUP`` pins."""
    command = ["go", "mod", "download", "-json", module]
    pins = ROOT / "cluster" / "go" / group
    answer = subprocess.run(command, cwd=pins, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return dict(yaml.safe_load((Path(json.loads(answer.stdout)["Dir"]) / "config" / "crd" / file).read_text()))


# --- manifests -------------------------------------------------------------------------------------


def service(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """A valid EarlyExitService; keyword arguments replace fields of its spec."""
    return {
        "apiVersion": GROUP,
        "kind": "EarlyExitService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"uri": "oci://offramp/digits:1", "digest": DIGEST},
            "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
            **spec,
        },
    }


def config(name: str = "digits-0123456789", **spec: Any) -> dict[str, Any]:
    """A valid RampConfig."""
    return {
        "apiVersion": GROUP,
        "kind": "RampConfig",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "backboneDigest": "sha256:" + "a" * 64,
            "rampSetDigest": "sha256:" + "b" * 64,
            "ramps": [{"id": "r04-grid", "threshold": "0.25"}],
            "precision": "fp32",
            "execution": "Auto",
            **spec,
        },
    }


def rollout(name: str = "digits-1", **spec: Any) -> dict[str, Any]:
    """A valid RampRollout."""
    return {
        "apiVersion": GROUP,
        "kind": "RampRollout",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "serviceName": "digits",
            "from": "digits-0123456789",
            "to": "digits-abcdef0123",
            "generation": 1,
            "cause": "Tuned",
            **spec,
        },
    }


def worker_pool(name: str = "shared", **spec: Any) -> dict[str, Any]:
    """A valid WorkerPool."""
    return {
        "apiVersion": GROUP,
        "kind": "WorkerPool",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"memory": "1Gi", "bundles": {"claimName": "bundles"}, **spec},
    }


def worker_class(name: str = "gpu", **spec: Any) -> dict[str, Any]:
    """A valid WorkerClass."""
    return {"apiVersion": GROUP, "kind": "WorkerClass", "metadata": {"name": name}, "spec": spec}


def changed(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path replaced; ``...`` removes it. Missing objects on the way are made."""
    copy = json.loads(json.dumps(manifest))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = copy
    for part in parents:
        target = target.setdefault(part, {}) if isinstance(target, dict) else target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return dict(copy)


class Manifests:
    """The builders above, as a fixture: pytest imports test modules without a package around them."""

    service, config, rollout, worker_class, worker_pool, changed = (
        staticmethod(service),
        staticmethod(config),
        staticmethod(rollout),
        staticmethod(worker_class),
        staticmethod(worker_pool),
        staticmethod(changed),
    )


@pytest.fixture
def manifests() -> type[Manifests]:
    return Manifests


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """The path of a program that ``cluster/build`` makes, by its name."""
    return binary


@pytest.fixture(scope="session")
def tool() -> Callable[[str, str], str]:
    """The path of a program that ``cluster/tools`` makes, by its group and its name."""

    def path(group: str, name: str) -> str:
        return str(built("tools", group) / name)

    return path


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """:func:`wait_for`, for test modules."""
    return wait_for


@pytest.fixture(scope="session")
def chart() -> Callable[..., list[dict[str, Any]]]:
    """The chart, rendered; ``values`` are keyed like ``signingKey={"existingSecret": "x"}``."""

    def render(**values: Any) -> list[dict[str, Any]]:
        command = [
            binary("helm"),
            "template",
            "offramp",
            str(ROOT / "helm" / "offramp"),
            "--namespace",
            "offramp-system",
            "--kube-version",
            "1.34.0",
            "--values",
            "-",
        ]
        answer = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
        return [document for document in yaml.safe_load_all(answer.stdout) if document]

    return render


def clear(api: ApiServer) -> None:
    """Delete every object of our kinds in the default namespace."""
    for plural in ("earlyexitservices", "rampconfigs", "ramprollouts"):
        api.request("DELETE", f"/apis/{GROUP}/namespaces/default/{plural}")


@pytest.fixture
def clean(api: ApiServer) -> Iterator[ApiServer]:
    """The API server, with nothing of ours left in it afterwards."""
    yield api
    clear(api)
