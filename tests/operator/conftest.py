"""A cluster's API server for the Kubernetes shell: the one of tests/api, seen through the operator's own client."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from bench import ports
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

sys.path.insert(0, str(Path(__file__).parent))
from paper_fleet import CONTROLLERS, ONE_GPU, Fleet, add_node
from paper_observer import PaperObserver

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

T = TypeVar("T")


def _load_api_fixtures() -> Any:
    path = Path(__file__).resolve().parents[1] / "api" / "conftest.py"
    spec = importlib.util.spec_from_file_location("offramp_api_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


server = _load_api_fixtures()
api = server.api
manifests = server.manifests
chart = server.chart


class RestartableServer:
    """An API server that can be killed and started again on its data."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._process: subprocess.Popen[bytes] | None = None
        self._flags: tuple[str, ...] = ()
        self.api = self._first_start()

    def _first_start(self) -> Any:
        spawn = server._spawn

        def remembering(stack: ExitStack, folder: Path, name: str, *flags: str) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = spawn(stack, folder, name, *flags)
            if name == "kube-apiserver":
                self._process, self._flags = process, flags
            return process

        server._spawn = remembering
        try:
            started = server._start(self._folder, self._stack)
        finally:
            server._spawn = spawn
        server._install_crds(started)
        return started

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        process = self._process = server._spawn(self._stack, self._folder, "kube-apiserver", *self._flags)
        server.wait_for(lambda: server._ready(self.api.client, process), what="the API server's return", seconds=300)


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[RestartableServer]:
    with ExitStack() as stack:
        yield RestartableServer(tmp_path, stack)


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """A namespace of its own for each test."""
    name = f"test-{os.urandom(4).hex()}"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, keep=True)
    yield name
    for kind in ("earlyexitservices", "rampconfigs", "ramprollouts", "workerpools"):
        api.request("DELETE", f"/apis/{server.GROUP}/namespaces/{name}/{kind}")


def api_client(kubeconfig: Path) -> kubernetes_client.ApiClient:
    """Credentials and address, as the kubeconfig says."""
    configuration = kubernetes_client.Configuration()
    kubernetes_config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    configuration.retries = False
    return kubernetes_client.ApiClient(configuration)


@asynccontextmanager
async def client_of(kubeconfig: Path, **arguments: Any) -> AsyncIterator[KubeClient]:
    """The operator's client, as the kubeconfig says."""
    client = KubeClient(api_client(kubeconfig), **arguments)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def client_at(port: int, **arguments: Any) -> Iterator[KubeClient]:
    """The operator's client of a server on this machine that plays the API server."""
    configuration = kubernetes_client.Configuration(host=f"http://127.0.0.1:{port}")
    configuration.retries = False
    client = KubeClient(kubernetes_client.ApiClient(configuration), **arguments)
    try:
        yield client
    finally:
        client.close()


async def eventually(
    condition: Callable[[], bool], *, what: str, seconds: float = 90.0, state: Callable[[], object] = str
) -> None:
    """Poll on the running loop until ``condition`` holds; on the deadline fail with the last state seen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s; last state: {state()}"
        await asyncio.sleep(0.02)


class Tools:
    """The helpers above, as a fixture: pytest imports test modules without a package around them."""

    api_client = staticmethod(api_client)
    client_at = staticmethod(client_at)
    client_of = staticmethod(client_of)
    eventually = staticmethod(eventually)

    @staticmethod
    def run(work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine with a deadline of its own."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, 600)

        return asyncio.run(bounded())


@pytest.fixture
def free_port() -> Callable[[], int]:
    return ports.free_port


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session", name="server")
def _server() -> Any:
    """What starts API servers, for tests that need one of their own."""
    return server


@pytest.fixture(scope="session")
def controlled(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Iterator[Any]:
    """An API server of its own, with the controllers that run Deployments and quotas, and a scheduler."""
    folder = tmp_path_factory.mktemp("controllers")
    with ExitStack() as stack:
        api = server._start(folder, stack)
        server._install_crds(api)
        flags = (f"--kubeconfig={api.kubeconfig}", "--leader-elect=false", "--secure-port=0")
        server._spawn(stack, folder, "kube-controller-manager", *flags, f"--controllers={CONTROLLERS}")
        server._spawn(stack, folder, "kube-scheduler", *flags)
        yield api


@pytest.fixture
def fleet(controlled: Any, manifests: Any, tools: Any) -> Iterator[Callable[..., Any]]:
    """``async with fleet(nodes=2) as f``: a service in a namespace of its own, on nodes with one GPU each that nobody
    else may use. With ``nodes={"fast": 2}`` they carry the name of a pool.

    With ``answering``, ready pods say which model they serve and how well.
    """
    namespace = f"update-{os.urandom(4).hex()}"
    controlled.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, keep=True)

    @asynccontextmanager
    async def make(*, nodes: int | dict[str, int], answering: bool = False, **spec: Any) -> AsyncIterator[Fleet]:
        for pool, count in nodes.items() if isinstance(nodes, dict) else [("", nodes)]:
            for number in range(count):
                add_node(controlled, f"{namespace}-{pool}{number}", namespace, pool=pool)
        for asked in spec.get("pools", ()):
            asked["nodeSelector"] = {"of": namespace, "pool": asked["name"]}
        # Workers of no pool keep to the nodes of none where there are any, so that they take no pool's place.
        own = {"of": namespace, **({"pool": ""} if isinstance(nodes, dict) and "" in nodes else {})}
        worker = {**ONE_GPU, "nodeSelector": own, **spec.pop("worker", {})}
        manifest = manifests.service(worker=worker, **spec)
        manifest["metadata"]["namespace"] = namespace
        assert controlled.create(manifest, keep=True).status_code == 201
        async with tools.client_of(controlled.kubeconfig) as client:
            cache = ObjectCache()
            platform = KubePlatform(client, cache, workers=WorkerSettings("offramp/worker:1"), instance="t")
            observer = PaperObserver(cache) if answering else Observer(deadline_seconds=0.5)
            reconciler = Reconciler(platform, observer, SigningKey(b"k" * 32))
            yield Fleet(controlled, namespace, client, reconciler, cache)
            await observer.close()

    yield make
    path = f"/apis/earlyexit.dev/v1alpha1/namespaces/{namespace}/earlyexitservices/digits"
    controlled.request("DELETE", path)
    controlled.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments")
