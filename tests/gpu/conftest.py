"""A GPU for these tests: CUDA's where there is one, else WebGPU's in the environment of ``scripts/gpu``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

import bundles  # type: ignore[import-not-found]

from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import CUDA, WEBGPU, Device, missing
from offramp_worker.engine.execution.sessions import Sessions

NEEDED = "OFFRAMP_NEEDS_GPU"  # set where a missing one is a failure


def pytest_report_header() -> str:
    here = [device.name for device in (CUDA, WEBGPU) if not missing(device)]
    return f"GPU: {here[0] if here else 'none'}"


@pytest.fixture(scope="session")
def device() -> Device:
    reasons = {device.name: missing(device) for device in (CUDA, WEBGPU)}
    for device in (CUDA, WEBGPU):
        if not reasons[device.name]:
            return device
    if os.environ.get(NEEDED):
        pytest.fail(f"no GPU: {reasons}")
    pytest.skip(f"no GPU ({reasons}); `make test-gpu` has a software one")


@pytest.fixture(scope="session")
def cpu_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(bundles.write_bundle(tmp_path_factory.mktemp("cpu")))


@pytest.fixture(scope="session")
def gpu_dir(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same bundle, but for where it was measured."""
    return Path(bundles.write_bundle(tmp_path_factory.mktemp("gpu"), executor=device.executor))


@pytest.fixture(scope="session")
def cpu_bundle(cpu_dir: Path) -> Bundle:
    return load_bundle(cpu_dir)


@pytest.fixture(scope="session")
def cpu(cpu_bundle: Bundle) -> Sessions:
    return Sessions(cpu_bundle, threads=1)


@pytest.fixture(scope="session")
def gpu(gpu_dir: Path) -> Sessions:
    return Sessions(load_bundle(gpu_dir), threads=1)
