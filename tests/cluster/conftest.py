"""A release of Offramp on the real cluster of ``make cluster``, installed with the chart, and namespaces to try it in."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "worker")]

from kube import Namespace, run  # noqa: E402

SYSTEM, RELEASE, TAG = "offramp-system", "offramp", "test"  # the demo's: CRDs that a release leaves belong to its name


@pytest.fixture(scope="session")
def kubeconfig() -> None:
    """The cluster must be up: a missing one is a failure, never a skip."""
    for line in run("cluster/env").splitlines():
        name, value = line.removeprefix("export ").split("=", 1)
        os.environ[name] = os.path.expandvars(" ".join(shlex.split(value)))


@pytest.fixture(scope="session")
def release(kubeconfig: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], str]]:
    """The operator, installed; a function that makes a bundle folder an image of the cluster."""
    images = tmp_path_factory.mktemp("images")

    def load(part: str, *arguments: str, name: str) -> str:
        image = f"localhost/offramp/{name}:{TAG}"
        archive = run("images/build", part, *arguments, image, "--output", str(images / f"{name}.tar")).splitlines()[-1]
        run("cluster/load-image", archive)
        return image

    values = {
        "replicas": 1,
        "image": {"repository": load("operator", name="operator").rsplit(":", 1)[0], "tag": TAG, "pullPolicy": "Never"},
        "workerImage": {"repository": load("worker", name="worker").rsplit(":", 1)[0], "tag": TAG},
        "delivery": {"allowPrivateNetworks": True},  # a store in the cluster
    }
    install = ("helm", "upgrade", "--install", RELEASE, "helm/offramp", "--namespace", SYSTEM, "--create-namespace")
    run(*install, "--wait", "--timeout", "600s", "-f", "-", stdin=yaml.safe_dump(values))
    yield lambda folder, name: load("bundle", str(folder), name=name)
    run("helm", "uninstall", RELEASE, "--namespace", SYSTEM, "--wait")


@pytest.fixture
def namespace(release: object) -> Iterator[Namespace]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    run("kubectl", "create", "namespace", name)
    run("kubectl", "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield Namespace(name)
    run("kubectl", "delete", "namespace", name, "--wait=false")
