"""A release of Offramp on the real cluster of ``make cluster``, installed with the chart, and namespaces to try it in.
Sessions of pytest-xdist share all three: ``pytest -n 3 tests/cluster``."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "worker")]

import bundles  # type: ignore[import-not-found]  # noqa: E402
from kube import Chart, Namespace, locked, run  # noqa: E402

TAG = "test"


@pytest.fixture(scope="session")
def kubeconfig() -> None:
    """The cluster must be up: a missing one is a failure, never a skip."""
    for line in run("cluster/env").splitlines():
        name, value = line.removeprefix("export ").split("=", 1)
        os.environ[name] = os.path.expandvars(" ".join(shlex.split(value)))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all sessions that run these tests together."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def load(kubeconfig: None, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function that builds an image and loads it into the cluster, once for all sessions."""
    images = tmp_path_factory.mktemp("images")

    def load(part: str, *arguments: str, name: str) -> str:
        image, loaded = f"localhost/offramp/{name}:{TAG}", shared / f"{name}.loaded"
        with locked(shared / "images.lock"):
            if not loaded.exists():
                archive = run("images/build", part, *arguments, image, "--output", str(images / f"{name}.tar"))
                run("cluster/load-image", archive.splitlines()[-1])
                loaded.touch()
        return image

    return load


@pytest.fixture(scope="session")
def chart(load: Callable[..., str], shared: Path) -> Iterator[Chart]:
    """The chart and what tests set in it; no release is left when the last session ends."""
    values = {
        "replicas": 1,
        "image": {"repository": load("operator", name="operator").rsplit(":", 1)[0], "tag": TAG, "pullPolicy": "Never"},
        "workerImage": {"repository": load("worker", name="worker").rsplit(":", 1)[0], "tag": TAG},
        # A store in the cluster, and archives that only a disk can be too small for.
        "delivery": {"allowPrivateNetworks": True, "sizeLimit": "1024Gi"},
    }
    made = Chart(f"{run('cluster/tools', 'charts').strip()}/helm", values, shared / "release.json")
    users = shared / "users.lock"
    with locked(users, fcntl.LOCK_SH):
        yield made
    with suppress(BlockingIOError), locked(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
        made.uninstall()


@pytest.fixture
def held(request: pytest.FixtureRequest, shared: Path) -> Iterator[None]:
    """The release for the time of a test: beside other tests, unless it asks to be ``alone`` with it."""
    with locked(shared / "held.lock", fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH):
        yield


@pytest.fixture
def alone(held: None) -> None:
    """For tests that replace or remove the release."""


@pytest.fixture
def installed(held: None, chart: Chart) -> Chart:
    """The operator of every namespace, installed: also where the story before removed it."""
    chart.install()
    return chart


@pytest.fixture(scope="session")
def release(load: Callable[..., str]) -> Callable[[Path, str], str]:
    """A function that makes a bundle folder an image of the cluster."""
    return lambda folder, name: load("bundle", str(folder), name=name)


@pytest.fixture(scope="session")
def good(release: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a tiny bundle."""
    return release(bundles.write_bundle(tmp_path_factory.mktemp("good") / "bundle"), "tiny-good")


@pytest.fixture(scope="session")
def broken(release: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same bundle with one byte of its ramps changed after it was written."""
    folder = bundles.write_bundle(tmp_path_factory.mktemp("broken") / "bundle", seed=1)
    ramps = folder / "ramps.safetensors"
    content = bytearray(ramps.read_bytes())
    content[-1] ^= 1
    ramps.write_bytes(bytes(content))
    return release(folder, "tiny-broken")


@pytest.fixture
def namespaces(kubeconfig: None) -> Iterator[Callable[[], Namespace]]:
    """A function that makes a namespace; each goes at the end."""
    made: list[Namespace] = []

    def make() -> Namespace:
        made.append(Namespace(f"test-{uuid.uuid4().hex[:8]}"))
        run("kubectl", "create", "namespace", made[-1].name)
        run("kubectl", "label", "namespace", made[-1].name, "pod-security.kubernetes.io/enforce=restricted")
        return made[-1]

    yield make
    run("kubectl", "delete", "namespace", "--wait=false", *(namespace.name for namespace in made))


@pytest.fixture
def namespace(installed: Chart, namespaces: Callable[[], Namespace]) -> Namespace:
    return namespaces()
