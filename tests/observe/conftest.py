"""Prometheus' own programs, built from their pinned modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.needed import built


@pytest.fixture(scope="session")
def prometheus_tools() -> Path:
    """The folder with ``prometheus`` and ``promtool``."""
    return built("tools", "prometheus")


@pytest.fixture(scope="session")
def evaluate() -> Path:
    """Answers what Argo CD and Flux make of an object."""
    return built("tools", "gitops") / "evaluate"
