"""Prometheus' own programs, built from their pinned modules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tools(group: str) -> Path:
    made = subprocess.run([ROOT / "cluster" / "tools", group], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def prometheus_tools() -> Path:
    """The folder with ``prometheus`` and ``promtool``."""
    return tools("prometheus")


@pytest.fixture(scope="session")
def evaluate() -> Path:
    """Answers what Argo CD and Flux make of an object."""
    return tools("gitops") / "evaluate"
