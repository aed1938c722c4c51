"""The tutorial, executed: on this machine under ``offramp up``, and on a real cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench.ports import free_port

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import identity_bundle  # type: ignore[import-not-found]  # noqa: E402
from blocks import ROOT  # noqa: E402
from tutorial import Shell, missing, steps  # noqa: E402

from offramp_worker.bundle.load import load_bundle  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NOT_SHARED = {
    "build",
    ".git",
    ".offramp",
    ".cache",
    ".venv",
    "Makefile",
}  # nothing here may set the environment up again

RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
# The operator's namespace and the service's admit confined pods only, as a careful administrator has it.
CONFINE = f"""eval "$(cluster/env)"
kubectl get namespace offramp-system > /dev/null 2>&1 || kubectl create namespace offramp-system
kubectl label --overwrite namespace offramp-system default {RESTRICTED}
"""
REPLACED = {
    "make cluster\n": "cluster/up\n",  # without the set-up that make does first
    "--rate 50": "--rate 100",  # evidence comes by the request
    "threshold: 200ms": "threshold: 5s",  # a shared machine is slow for reasons of its own, and refuses nobody for them
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, set up and with nothing built."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_SHARED:
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ":".join(str(ROOT / p) for p in ("core", "operator", "worker", "cli", "lab", ".")))
    return tmp_path


@pytest.fixture
def reader(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout with a tiny bundle where the tutorial's own would be: the first block takes minutes, and has a test
    of its own."""
    work = checkout / "build" / "tutorial"
    monkeypatch.setattr(identity_bundle, "MODEL", "digits")
    bundle = identity_bundle.write_bundle(work / "bundle")
    x = identity_bundle.inputs(400, seed=77)
    np.savez(work / "traffic.npz", x=x, reference=identity_bundle.answers(bundle, x))
    x = drifted(bundle, 60)
    np.savez(work / "drifted.npz", x=x, reference=identity_bundle.answers(bundle, x))
    return checkout


def drifted(bundle: Path, n: int) -> np.ndarray:
    """Inputs on which the ramps are sure and differ from the model: what leaves early is then wrong."""
    model = identity_bundle._backbone(np.random.default_rng(0))
    own = {t.name: identity_bundle.numpy_helper.to_array(t) for t in model.graph.initializer}
    tensors = {f"{r.id}/{name}": own[t].copy() for r in identity_bundle.RAMPS for name, t in (("w1", "w"), ("b1", "b"))}
    found, margins = [], []
    for seed in range(100, 112):
        x = identity_bundle.inputs(500, seed=seed)
        logits, heads = identity_bundle._run_tapped(model, tensors, x)
        differ = heads[0].argmax(axis=1) != logits.argmax(axis=1)
        best = np.sort(heads[0][differ], axis=1)
        found.append(x[differ])
        margins.append(best[:, -1] - best[:, -2])
    order = np.argsort(-np.concatenate(margins))
    return np.concatenate(found)[order][:n]


@pytest.fixture
def shell(reader: Path) -> Iterator[Shell]:
    made = Shell(reader, REPLACED | {"8080": str(free_port())})
    yield made
    made.close()


@pytest.fixture
def trained(checkout: Path) -> Path:
    """Where the tutorial's network is kept under the digest of what makes it; it lies in the checkout if it is there,
    as for a reader who comes back."""
    from bench.digits.train import content_key

    kept = ROOT / "build" / "tests" / f"digits-{content_key(0)[:16]}"
    if kept.is_dir():
        shutil.copytree(kept, checkout / "build" / "tutorial", dirs_exist_ok=True)
    return kept


def keep(work: Path, kept: Path) -> None:
    """Keep what training wrote, whole or not at all."""
    if kept.is_dir():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=kept.parent))
    for name in ("model.safetensors", "heads.npz", "traffic.npz", "model.json"):
        shutil.copy(work / name, new)
    try:
        new.rename(kept)
    except OSError:  # another run was sooner
        shutil.rmtree(new)


def play(shell: Shell, who: set[str]) -> None:
    for step in steps():
        if step.who in who:
            try:
                shell.step(step, seconds=float(os.environ.get("PATIENCE", "240")))
            except AssertionError as error:
                told = [p.read_text()[-3000:] for p in (shell.folder / "build" / "tutorial").glob("*.log")]
                raise AssertionError("\n".join([str(error), *told])) from error


def test_the_first_block_makes_the_bundle_and_the_traffic_that_the_rest_uses(checkout: Path, trained: Path) -> None:
    """As written, but for the copies of images that only make heads better: trains a network, where none is kept, and
    its exits, a minute of computing."""
    (prepare,) = [step for step in steps() if step.who == "prepare"]
    shell = Shell(checkout, {"make setup\n": "", "--variations 3": "--variations 0"})
    try:
        shell.step(prepare, seconds=800)
    finally:
        shell.close()
    work = checkout / "build" / "tutorial"
    keep(work, trained)
    bundle = load_bundle(work / "bundle")
    assert bundle.manifest.name == "digits" and len(bundle.manifest.ramps) > 1
    assert (work / "bundle" / "report.png").stat().st_size > 10_000
    share = {}
    for name in ("traffic", "drifted"):
        with np.load(work / f"{name}.npz") as rows:
            assert len(rows["x"]) == len(rows["reference"]) > 400
            share[name] = float((rows["reference"] == rows["y"]).mean())
    assert share["traffic"] > 0.9 and share["drifted"] < share["traffic"] - 0.02, (
        "the drift of the tutorial does no harm"
    )


def test_the_tutorial_on_this_machine(shell: Shell) -> None:
    play(shell, {"both", "machine"})
    before_the_drift = (shell.folder / "build" / "tutorial" / "traffic.log").read_text()
    assert not re.search(r"\d failed|none answered", before_the_drift), before_the_drift


def test_shown_output_is_compared_loosely_but_in_order() -> None:
    output = "├─ digits-1   RampRollout  Progressing  12s  step 1/2 at 30%; canary at 30 %\n└─ workers\n"
    assert missing(["├─ digits-1 RampRollout Progressing … canary at", "workers"], output) == ""
    assert missing(["workers", "digits-1"], output) == "digits-1"
    assert missing(["digits-1 RampRollout Succeeded"], output) == "digits-1 RampRollout Succeeded"


@pytest.mark.cluster
def test_the_tutorial_on_a_real_cluster(shell: Shell) -> None:
    for line in subprocess.run(
        ["cluster/env"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        name, value = line.removeprefix("export ").split("=", 1)
        os.environ[name] = os.path.expandvars(" ".join(shlex.split(value)))
    code, said = shell.run(CONFINE, seconds=120)
    assert code == 0, said
    try:
        play(shell, {"both", "cluster-install", "cluster", "cluster-clean"})
    finally:
        shell.run(f"kubectl label namespace default {RESTRICTED.partition('=')[0]}-", seconds=60)
