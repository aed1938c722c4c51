"""Render the chart with the real Helm."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.needed import ROOT, built

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
