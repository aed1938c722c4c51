"""Stages for outages. Sessions of pytest-xdist share one cluster and its images: ``pytest -n 3
tests/cluster/outages``."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "e2e")]

from identity_bundle import inputs, write_bundle  # noqa: E402
from kube import run  # noqa: E402
from stage import SLOWNESS, Stage  # noqa: E402

STORY = "seconds of the story"
STORY_SECONDS, LONGEST_SECONDS = 60.0, 120.0  # what each may take, and what none may take on whatever machine
PREVIOUS = Path(__file__).parent / "previous-0.1.0.tar.xz"  # its core, operator and worker
SYSTEM, RELEASE, TAG = "offramp-system", "offramp", "outages"


class Images(NamedTuple):
    """``elsewhere`` is the bundle measured again. ``previous`` is the worker of the release before, whose code lies in
    the folder ``previous_code``. ``changed`` is another model, ``failing`` one that fails on some inputs, ``deep`` one
    that takes long with exits off, ``unsure`` a deep one whose ramps err."""

    bundle: str
    elsewhere: str
    worker: str
    previous: str
    previous_code: str
    changed: str
    failing: str
    deep: str
    unsure: str


@pytest.fixture(scope="session")
def images(kubeconfig: None, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """The worker of this release and of the one before, and tiny bundles, in the cluster; its CRDs; and no operator but
    the stages'."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    shared = Path("build/outages") / session
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = shared / "images.json"
        if not made.exists():
            for crd in sorted(Path("crds").glob("*.yaml")):
                run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(crd))
            _let_helm_adopt_crds()
            _stop_release()
            folders, archives = tmp_path_factory.mktemp("bundles"), tmp_path_factory.mktemp("images")

            def loaded(folder: Path) -> str:
                return _load(archives, "bundle", str(folder), name=f"{folder.name}-outages")

            def bundle(name: str, **options: Any) -> str:
                return loaded(write_bundle(folders / name, **options))

            release = _previous_release(shared)
            images = Images(
                bundle=bundle("tiny"),
                elsewhere=loaded(_remeasured(folders / "tiny", folders / "elsewhere")),
                worker=_load(archives, "worker", name="worker-outages"),
                previous=_load(archives, "worker", name="worker-previous", builder=release / "images" / "build"),
                previous_code=str(release),
                changed=bundle("changed", seed=3),
                failing=bundle("failing", seed=4, failing_share=0.3),
                deep=bundle("deep", layers_behind=12),
                unsure=bundle("unsure", layers_behind=12, confused=1.3),
            )
            made.write_text(json.dumps(images._asdict()))
        return Images(**json.loads(made.read_text()))


def _remeasured(bundle: Path, out: Path) -> Path:
    """The bundle as ``offramp prepare --remeasure`` makes it, for workers with two threads."""
    from offramp_worker.prepare.pipeline import PrepareRequest  # imports torch, which takes seconds
    from offramp_worker.prepare.progress import Reporter
    from offramp_worker.prepare.remeasure import remeasure_bundle

    rows = out.with_suffix(".npz")
    np.savez(rows, x=inputs(64))
    request = PrepareRequest(model=str(bundle), data=str(rows), out=out, threads=2, profile_seconds=0.1)
    return remeasure_bundle(request, Reporter(quiet=True)).out


def _previous_release(folder: Path) -> Path:
    """The release before, as a tree that its operator runs in and its images are built in: its own code, and today's
    means to build."""
    tree = folder.resolve() / "previous"
    with tarfile.open(PREVIOUS) as archive:
        archive.extractall(tree, filter="data")
    shutil.copytree("images", tree / "images", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".venv", "cluster", "pyproject.toml", "requirements.lock"):
        (tree / name).symlink_to(Path(name).absolute())
    return tree


def _load(archives: Path, part: str, *arguments: str, name: str, builder: Path = Path("images/build")) -> str:
    image = f"localhost/offramp/{name}:{TAG}"
    archive = run(str(builder), part, *arguments, image, "--output", str(archives / f"{name}.tar")).splitlines()[-1]
    run("cluster/load-image", archive)
    return image


def _let_helm_adopt_crds() -> None:
    """Other tests install the chart on this cluster, before or after: Helm takes over only what is marked as its
    release's."""
    crds = [f"crd/{path.stem}.earlyexit.dev" for path in sorted(Path("crds").glob("*.yaml"))]
    release = (f"meta.helm.sh/release-name={RELEASE}", f"meta.helm.sh/release-namespace={SYSTEM}")
    run("kubectl", "label", "--overwrite", *crds, "app.kubernetes.io/managed-by=Helm")
    run("kubectl", "annotate", "--overwrite", *crds, *release)


def _stop_release() -> None:
    """An installed operator that watches every namespace would decide here as well."""
    if "deployment.apps" in run("kubectl", "get", "deployments", "-n", SYSTEM, "-o", "name"):
        run("kubectl", "scale", "deployment", "--all", "--replicas=0", "-n", SYSTEM)


@pytest.fixture
def stage(images: Images, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """An empty namespace with one operator, and a clock on the story that is told in it."""
    began = time.monotonic()
    made = Stage(
        namespace=f"outage-{uuid.uuid4().hex[:8]}", folder=tmp_path, bundle=images.bundle, worker=images.worker
    )
    try:
        yield made
    finally:
        took = time.monotonic() - began
        request.node.user_properties.append((STORY, took))
        made.close()
    longest = LONGEST_SECONDS * SLOWNESS
    assert took <= longest or "OFFRAMP_SOAK_SECONDS" in os.environ, f"{took:.0f} s; no story may take {longest:.0f}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each story took, the longest first."""
    reports = [r for kind in ("passed", "failed", "error", "") for r in terminalreporter.stats.get(kind, ())]
    took = {
        r.nodeid.rsplit("::", 1)[-1]: seconds for r in reports for name, seconds in r.user_properties if name == STORY
    }
    if took:
        terminalreporter.section(
            f"outages: seconds of each story, {STORY_SECONDS:.0f} at most on a machine that does nothing else"
        )
    for story, seconds in sorted(took.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{seconds:6.1f} {'  ' if seconds <= STORY_SECONDS else '! '}{story}")


@pytest.fixture
def canary(stage: Stage) -> Callable[..., Stage]:
    """A stage whose operator (``first``: how it is started) has a tuned plan in its canary, under traffic; with another
    operator that stands by, where asked for."""

    def make(*, standby_image: str = "", first: dict[str, str] | None = None, **spec: object) -> Stage:
        stage.operate(**(first or {}))
        stage.serve(**spec)
        if standby_image:
            second = stage.operate(1, image=standby_image)
            stage.until("a standby", lambda: stage.health(second) == "ok")
        stage.send()
        stage.until("a canary that is audited", lambda: stage.phase("Progressing") and stage.audited() > 0)
        return stage

    return make


@pytest.fixture(scope="session")
def faketime() -> Callable[[str], dict[str, str]]:
    """The environment of a process whose clock is wrong; clocks that only measure stay right."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        run("bash", "-c", "source cluster/lib/common.sh; source cluster/lib/packages.sh; install_packages libfaketime")
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return lambda offset: {
        "LD_PRELOAD": str(library),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
