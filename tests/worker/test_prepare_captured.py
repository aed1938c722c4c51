"""Captured shards become a ramp set in the store: what trains it, what it is compared on, and that nothing of the
captures stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bundles
import numpy as np
import numpy.typing as npt
import pytest

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.bundle.ramp_sets import input_digest, load_ramp_set, set_folder
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.captured import TrainingJob, TrainingResult, main, prune, read_captures, train_on_captures
from offramp_worker.prepare.progress import Reporter

ROWS = 500
pytestmark = pytest.mark.slow  # training
OLD = "sha256:" + "0" * 64
# What the worker image trains with: everything that only preparing, showing and searching need is absent.
BARE = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        heavy = {"torch", "torchvision", "scipy", "rich", "matplotlib", "PIL", "tokenizers", "onnxscript"}
        if name.split(".")[0] in heavy:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
runpy.run_module("offramp_worker.prepare.captured", run_name="__main__")
"""


def recent(seed: int = 7) -> npt.NDArray[np.float32]:
    """Inputs that are not those of the bundle: paler, and a little brighter."""
    return (0.8 * bundles.inputs(ROWS, seed=seed) + 0.2).astype(np.float32)


def capture(folder: Path, bundle: Bundle, x: npt.NDArray[np.float32], *, first: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    spec = bundle.manifest.inputs[0]
    digest = np.array([input_digest(row, spec) for row in x], dtype=np.uint64)
    np.savez(folder / "shard-00000.npz", x=x, time=first + np.arange(len(x)), digest=digest, answer=np.zeros(len(x)))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(bundles.write_bundle(tmp_path_factory.mktemp("captured") / "bundle"))


@pytest.fixture(scope="module")
def job(small: Bundle, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    folder = tmp_path_factory.mktemp("job")
    capture(folder / "captures" / "w1" / "captures" / "uid", small, recent()[: ROWS // 2])
    capture(folder / "captures" / "w2" / "captures" / "uid", small, recent()[ROWS // 2 :], first=ROWS)
    (set_folder(folder / "store", OLD)).mkdir(parents=True)
    return TrainingJob(small.path, folder / "captures", folder / "store", small.manifest.ramp_set_digest, budget=0.05)


@pytest.fixture(scope="module")
def result(job: TrainingJob) -> TrainingResult:
    return train_on_captures(job, Reporter(quiet=True))


def test_the_new_set_is_in_the_store_and_agrees_more_with_the_model_on_fresh_inputs(
    job: TrainingJob, result: TrainingResult, small: Bundle
) -> None:
    new = load_ramp_set(job.store, result.ramp_set_digest, small)
    x = recent(seed=8)
    before, after = (Sessions(b, threads=1).tapped(x) for b in (small, new.bundle))
    column = [c.id for c in small.columns].index("r01-grid")
    answers = after.logits.argmax(axis=1)
    assert (after.prediction[:, column] == answers).mean() > (before.prediction[:, column] == answers).mean() + 0.05
    np.testing.assert_array_equal(after.logits, before.logits)
    assert result.rows == ROWS
    assert 0 <= result.saving_before <= 1
    assert 0 <= result.saving_after <= 1


def test_the_worker_image_trains_as_well_without_pytorch(result: TrainingResult, small: Bundle, tmp_path: Path) -> None:
    capture(tmp_path / "w", small, recent())
    told = tmp_path / "termination-log"
    told.touch()
    arguments = {
        "bundle": small.path,
        "captures": tmp_path / "w",
        "store": tmp_path / "store",
        "result": told,
        "budget": 0.05,
    }
    command = [
        sys.executable,
        "-c",
        BARE,
        *(part for name, value in arguments.items() for part in (f"--{name}", str(value))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr + told.read_text()
    plain = json.loads(told.read_text())
    new = load_ramp_set(tmp_path / "store", plain["ramp_set_digest"], small)
    assert len(new.trained_on) == plain["rows"] == ROWS
    assert plain["saving_before"] == pytest.approx(result.saving_before)
    assert plain["saving_after"] > result.saving_after - 0.05


def test_every_input_that_was_here_is_known_to_the_set(job: TrainingJob, result: TrainingResult, small: Bundle) -> None:
    new, spec = load_ramp_set(job.store, result.ramp_set_digest, small), small.manifest.inputs[0]
    digests = np.array([input_digest(row, spec) for row in recent()], dtype=np.uint64)
    assert new.has_seen(digests).all()
    others = np.array([input_digest(row, spec) for row in recent(seed=8)], dtype=np.uint64)
    assert not new.has_seen(others).any()


def test_captures_are_deleted_and_sets_that_nothing_keeps_are_removed(job: TrainingJob, result: TrainingResult) -> None:
    assert not list(job.captures.rglob("*.npz"))
    assert [folder.name for folder in job.store.iterdir()] == [result.ramp_set_digest.removeprefix("sha256:")]


def test_training_goes_on_from_the_set_that_serves(
    job: TrainingJob, result: TrainingResult, small: Bundle, tmp_path: Path
) -> None:
    capture(tmp_path / "w", small, recent(seed=9))
    again = TrainingJob(small.path, tmp_path, job.store, result.ramp_set_digest, budget=0.05, keep=(OLD,))
    told = train_on_captures(again, Reporter(quiet=True))
    load_ramp_set(job.store, told.ramp_set_digest, small)
    assert set_folder(job.store, result.ramp_set_digest).is_dir(), "the set it was made from stays"


def test_a_shard_of_another_model_or_a_damaged_one_costs_its_rows_alone(small: Bundle, tmp_path: Path) -> None:
    capture(tmp_path / "a", small, recent())
    capture(tmp_path / "repeats", small, recent()[:5], first=9999.0)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "shard-00000.npz").write_bytes(b"no archive")
    np.savez(
        tmp_path / "b" / "shard-00001.npz",
        x=np.zeros((3, 2), np.float32),
        time=np.zeros(3),
        digest=np.zeros(3, np.uint64),
    )
    captured = read_captures(tmp_path, small)
    assert len(captured.x) == ROWS
    assert len(captured.files) == 4


def test_of_more_inputs_than_training_needs_a_share_is_drawn(
    small: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offramp_worker.prepare.captured.MOST_ROWS", 300)
    capture(tmp_path / "w", small, recent())
    captured = read_captures(tmp_path, small)
    spec = small.manifest.inputs[0]
    places = {input_digest(row, spec): i for i, row in enumerate(recent())}
    drawn = [places[int(digest)] for digest in captured.digest]
    assert len(drawn) == 300
    assert drawn == sorted(drawn), "oldest first, as the newest quarter is compared on"
    assert 100 < len([i for i in drawn if i < ROWS / 2]) < 200


def test_too_few_captures_are_refused_and_deleted(small: Bundle, tmp_path: Path) -> None:
    capture(tmp_path / "w", small, recent()[:50])
    with pytest.raises(InvalidArgumentError, match="50 different inputs; at least 200"):
        train_on_captures(TrainingJob(small.path, tmp_path, tmp_path / "store", ""), Reporter(quiet=True))
    assert not list(tmp_path.rglob("*.npz"))


def test_a_set_to_begin_with_that_is_gone_is_an_error(small: Bundle, tmp_path: Path) -> None:
    capture(tmp_path / "w", small, recent())
    with pytest.raises(InvalidBundleError, match="no such set"):
        train_on_captures(TrainingJob(small.path, tmp_path, tmp_path / "store", OLD), Reporter(quiet=True))


def test_the_command_writes_an_error_as_its_result(
    small: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(os, "nice", lowered.append)  # what runs here afterwards keeps its priority
    arguments = ["--bundle", str(small.path), "--captures", str(tmp_path / "none"), "--store", str(tmp_path / "store")]
    assert main([*arguments, "--result", str(tmp_path / "result.json")]) == 1
    assert "at least 200 are needed" in json.loads((tmp_path / "result.json").read_text())["error"]
    assert len(lowered) == 1 and lowered[0] > 0


def test_pruning_leaves_what_is_no_ramp_set_alone(tmp_path: Path) -> None:
    for name in ("0" * 64, "1" * 64, "notes"):
        (tmp_path / name).mkdir()
    prune(tmp_path, ["sha256:" + "1" * 64, "nonsense"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1" * 64, "notes"]
