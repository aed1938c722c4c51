"""Fixtures of the worker's tests. ``bundles`` and ``processes`` beside this file are imported by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bundles
from processes import WorkerProcess

from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions

if TYPE_CHECKING:
    from offramp_worker.prepare.source.sources import Backbone  # imports torch, which takes seconds


# Files whose tests look at the pictures of a report. To draw one takes as long as the rest of a small bundle.
DRAWN = ("test_prepare_bundle.py", "test_prepare_variants.py")


@pytest.fixture(scope="module", autouse=True)
def pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Elsewhere `offramp prepare` draws none."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in DRAWN:
            blank = SimpleNamespace(draw=lambda *_: None, draw_frontier=lambda *_: None)
            patch.setitem(sys.modules, "offramp_worker.prepare.picture", blank)
        yield


@pytest.fixture(scope="session")
def bundle_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def bundle(bundle_dir: Path) -> Bundle:
    return load_bundle(bundle_dir)


@pytest.fixture(scope="session")
def sessions(bundle: Bundle) -> Sessions:
    return Sessions(bundle, threads=1)


@pytest.fixture
def worker(bundle_dir: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A ready worker with a control plane (keys and token of the tests) and no plan."""
    with WorkerProcess(bundle_dir, env={"OFFRAMP_STATE_DIR": str(tmp_path / "state")}) as process:
        yield process


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """The tiny residual network of ``prepared``, as `offramp prepare` reads it."""
    import prepared

    from offramp_worker.prepare.source.sources import load_backbone

    return load_backbone(prepared.save_model(tmp_path_factory.mktemp("model")), prepared.images(16, seed=2)[0])


@pytest.fixture(scope="session")
def rows() -> np.ndarray:
    """Images for it."""
    import prepared

    return prepared.images(400, seed=4)[0]
