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

from offramp_operator.kube.client import KubeClient

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
    for kind in ("earlyexitservices", "rampconfigs", "ramprollouts"):
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
