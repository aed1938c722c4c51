"""Helpers of the cluster tests: commands, and a namespace as a user sees it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SYSTEM, RELEASE = "offramp-system", "offramp"  # the demo's: CRDs that a release leaves belong to its name
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CHILDREN = (
    "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,networkpolicies,rampconfigs,ramprollouts"
)


def run(*command: str, stdin: str | None = None) -> str:
    """A command that must succeed; its standard output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}"
    )
    return done.stdout


@contextmanager
def locked(file: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Wait for other sessions of pytest-xdist; with ``LOCK_SH`` only for those that want it alone."""
    with file.open("a") as lock:
        fcntl.flock(lock, how)
        yield


@dataclass(frozen=True)
class Namespace:
    """A namespace that enforces restricted pod security."""

    name: str

    def apply(self, manifest: dict[str, Any], *, who: str = "") -> None:
        options = ["--server-side", "--field-manager=user", *(["--as", who] if who else [])]
        run("kubectl", "apply", *options, "-n", self.name, "-f", "-", stdin=yaml.safe_dump(manifest))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("kubectl", "get", kind, name, "-n", self.name, "-o", "json"))
        return found

    def list(self, kinds: str) -> list[str]:
        return run("kubectl", "get", kinds, "-n", self.name, "-o", "name").split()

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.get("earlyexitservice", name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def eventually(self, what: str, holds: Callable[[], Any], *, seconds: float = 300.0) -> Any:
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


def resources(cpu: str, memory: str) -> dict[str, dict[str, str]]:
    """Limits; and so small a request that the node has room for the workers of several tests."""
    return {"limits": {"cpu": cpu, "memory": memory}, "requests": {"cpu": "50m"}}


def manifest(image: str, **spec: Any) -> dict[str, Any]:
    """What a user writes for the tiny model in an image."""
    return {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"oci://{image}", **spec.pop("model", {})},
            "objective": {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": "0.05"}},
            "worker": {"imagePullPolicy": "Never", "resources": resources("500m", "512Mi")},
            **spec,
        },
    }


def ready(namespace: Namespace, name: str = "tiny") -> bool:
    """Whether what was asked for last serves."""
    return bool(
        namespace.condition(name, "Ready").get("status") == "True" and not namespace.condition(name, "Reconciling")
    )


def says(namespace: Namespace, name: str, kind: str, *parts: str) -> Callable[[], str]:
    """What a condition says once it has all the parts."""

    def said() -> str:
        message = str(namespace.condition(name, kind).get("message", ""))
        return message if all(part in message for part in parts) else ""

    return said


class Clients:
    """Requests from inside the cluster's network, one after another, for so many seconds."""

    def __init__(self, namespace: Namespace, seconds: float, *, service: str = "tiny", model: str = "") -> None:
        url = f"http://{service}.{namespace.name}.svc.cluster.local"
        named = [model] if model else []
        command = ["cluster/exec-in-node", sys.executable, "tests/cluster/traffic.py", url, str(seconds), *named]
        self._answers = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this object; a pipe would fill up
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._answers)

    def end(self) -> list[str]:
        """What each request was answered with; they go to their end by themselves, unless they are stopped."""
        self._process.wait(180)
        self._answers.seek(0)
        return self._answers.read().split()

    def stop(self) -> list[str]:
        self._process.terminate()
        return self.end()


def infer(namespace: Namespace, service: str = "tiny") -> list[str]:
    """One request, and what it was answered with."""
    return Clients(namespace, 0, service=service).end()


class Chart:
    """The release as Helm 4 installs, upgrades and removes it; each time it waits as kstatus tells it to. Sessions of
    pytest-xdist share it: ``state`` is the file in which they keep how it is installed."""

    def __init__(self, helm: str, values: dict[str, Any], state: Path) -> None:
        self._helm, self._values, self._state = helm, values, state

    def install(self, **other: Any) -> None:
        """Install it with these values besides the tests' own; nothing happens where it is installed so."""
        values = json.dumps(self._values | other)
        with self._locked():
            if values != self._installed():
                # CRDs that an earlier run left are another manager's where Helm 3 or kubectl wrote them.
                command = ("upgrade", "--install", RELEASE, "helm/offramp", "--create-namespace", "--force-conflicts")
                self._run(*command, "--timeout", "600s", "-f", "-", stdin=values)
                self._state.write_text(values)

    def upgrade(self, *options: str) -> None:
        """Another revision with the values it has and what the options set."""
        self._run("upgrade", RELEASE, "helm/offramp", "--reuse-values", *options, "--timeout", "600s")

    def uninstall(self) -> None:
        with self._locked():
            if self._installed():
                self._run("uninstall", RELEASE, "--timeout", "180s")
                self._state.unlink()

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self._state.with_suffix(".lock"))

    def _installed(self) -> str:
        return self._state.read_text() if self._state.exists() else ""

    def _run(self, *command: str, stdin: str | None = None) -> None:
        run(self._helm, *command, "--namespace", SYSTEM, "--wait=watcher", stdin=stdin)
