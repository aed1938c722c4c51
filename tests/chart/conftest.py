"""Render the chart with the real Helm."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "offramp"


@dataclass(frozen=True)
class Helm:
    """A client of one Helm binary."""

    path: str

    def template(
        self, *, namespace: str = "offramp-system", release: str = "offramp", **values: Any
    ) -> list[dict[str, Any]]:
        """The objects the chart renders to; ``values`` are keyed like ``signingKey={"existingSecret": "x"}``."""
        answer = self.try_template(values, namespace=namespace, release=release)
        assert answer.returncode == 0, answer.stderr
        return [document for document in yaml.load_all(answer.stdout, Loader=yaml.CSafeLoader) if document]

    def try_template(
        self,
        values: dict[str, Any],
        *,
        namespace: str = "offramp-system",
        release: str = "offramp",
        chart: Path = CHART,
    ) -> subprocess.CompletedProcess[str]:
        # JSON is YAML, so the values need no second writer.
        command = [
            self.path,
            "template",
            release,
            str(chart),
            "--namespace",
            namespace,
            "--kube-version",
            "1.34.0",
            "--values",
            "-",
        ]
        return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def built(*command: str) -> Path:
    """The folder that a build command of ``cluster/`` prints; a first build takes minutes."""
    answer = subprocess.run([ROOT / "cluster" / command[0], *command[1:]], check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        message = f"cluster/{' '.join(command)} failed: {answer.stderr[-2000:]}"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return Path(answer.stdout.strip())


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm 3."""
    return Helm(f"{built('build', 'helm')}/helm")


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """Helm 4."""
    return Helm(f"{built('tools', 'charts')}/helm")


@pytest.fixture(scope="session")
def kube_score() -> str:
    return f"{built('tools', 'kube-score')}/kube-score"
