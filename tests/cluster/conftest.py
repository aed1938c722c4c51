"""A release of Offramp on the real cluster of ``make cluster``, installed with the chart, and namespaces to try it in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SYSTEM, RELEASE, TAG = "offramp-test", "offramp-test", "test"
sys.path.insert(0, str(ROOT / "tests" / "worker"))


def run(*command: str, stdin: str | None = None) -> str:
    """A command that must succeed; its standard output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}"
    )
    return done.stdout


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
    }
    install = ("helm", "upgrade", "--install", RELEASE, "helm/offramp", "--namespace", SYSTEM, "--create-namespace")
    run(*install, "--wait", "--timeout", "180s", "-f", "-", stdin=yaml.safe_dump(values))
    yield lambda folder, name: load("bundle", str(folder), name=name)
    run("helm", "uninstall", RELEASE, "--namespace", SYSTEM, "--wait")


@dataclass(frozen=True)
class Namespace:
    """A namespace that enforces restricted pod security."""

    name: str

    def apply(self, manifest: dict[str, Any]) -> None:
        run(
            "kubectl",
            "apply",
            "--server-side",
            "--field-manager=user",
            "-n",
            self.name,
            "-f",
            "-",
            stdin=yaml.safe_dump(manifest),
        )

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("kubectl", "get", kind, name, "-n", self.name, "-o", "json"))
        return found

    def list(self, kinds: str) -> list[str]:
        return run("kubectl", "get", kinds, "-n", self.name, "-o", "name").split()

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.get("earlyexitservice", name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def eventually(self, what: str, holds: Callable[[], Any], *, seconds: float = 120.0) -> Any:
        """Poll until it holds; says what was last seen when it never does."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            if time.monotonic() > deadline:
                seen = run(
                    "kubectl", "get", "earlyexitservices,rampconfigs,ramprollouts,pods", "-n", self.name, "-o", "yaml"
                )
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{seen[-6000:]}")
            time.sleep(1.0)
        return found


@pytest.fixture
def namespace(release: object) -> Iterator[Namespace]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    run("kubectl", "create", "namespace", name)
    run("kubectl", "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield Namespace(name)
    run("kubectl", "delete", "namespace", name, "--wait=false")
