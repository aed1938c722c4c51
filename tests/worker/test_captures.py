"""Inputs kept for training: asked for, bounded, uniform, private, and deleted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import bundles
import numpy as np
import numpy.typing as npt
import pytest
from desks import Service

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.ramp_sets import input_digest
from offramp_worker.engine.accounts.captures import ABANDONED_SECONDS, Captures
from offramp_worker.engine.execution.sessions import Sessions

SPEC = TensorSpec("x", "FP32", (4,))
ROWS = 300
NEVER = 3600.0


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[Captures]:
    kept = Captures(tmp_path / "w", SPEC, max_bytes=ROWS * 16, seed=1, flush_seconds=NEVER)
    yield kept
    kept.close()


def offer(captures: Captures, n: int, *, first: int = 0) -> None:
    for i in range(first, first + n):
        captures.offer(np.full(4, i, dtype=np.float32), at=100.0 + i, digest=i)


def stored(folder: Path) -> dict[str, npt.NDArray[np.generic]]:
    shards = [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
    return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]} if shards else {}


def test_nothing_is_kept_before_it_is_asked_for(captures: Captures, tmp_path: Path) -> None:
    offer(captures, 5)
    captures.flush()
    assert captures.count == 0
    assert not (tmp_path / "w").exists()


def test_shards_hold_inputs_times_and_digests_and_are_private(captures: Captures, tmp_path: Path) -> None:
    captures.ask(50.0)
    offer(captures, 200)
    captures.flush()
    kept = stored(tmp_path / "w")
    np.testing.assert_array_equal(kept["x"][:, 0], np.arange(200))
    np.testing.assert_array_equal(kept["digest"], np.arange(200))
    np.testing.assert_array_equal(kept["time"], 100.0 + np.arange(200))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "w").iterdir()} == {0o600}
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700


def test_the_sample_is_uniform_and_bounded(captures: Captures, tmp_path: Path) -> None:
    captures.ask(0.0)
    offer(captures, 3000)
    captures.flush()
    kept = stored(tmp_path / "w")["digest"].astype(np.int64)
    assert captures.count == len(kept) == len(set(kept.tolist())) == ROWS
    early = int((kept < 1500).sum())  # binomial(300, 1/2): 8.7 standard deviations
    assert abs(early - ROWS / 2) < 75


def test_a_later_since_begins_anew_and_older_inputs_are_not_taken(captures: Captures, tmp_path: Path) -> None:
    captures.ask(0.0)
    offer(captures, 150)
    captures.flush()
    captures.ask(200.0)
    assert captures.count == 0
    assert not list((tmp_path / "w").glob("*"))
    offer(captures, 120)  # admitted up to 219
    captures.flush()
    assert (stored(tmp_path / "w")["time"] > 200.0).all()
    assert captures.count == 19


def test_none_deletes_what_was_kept(captures: Captures, tmp_path: Path) -> None:
    captures.ask(0.0)
    offer(captures, 10)
    captures.flush()
    captures.ask(None)
    assert not (tmp_path / "w").exists()
    offer(captures, 10)
    assert captures.count == 0


def test_a_worker_that_ends_leaves_no_input_behind(captures: Captures, tmp_path: Path) -> None:
    captures.ask(0.0)
    offer(captures, 10)
    captures.flush()
    captures.close()
    assert not (tmp_path / "w").exists()


def test_what_a_worker_left_in_a_shared_folder_that_could_not_clean_up_is_removed_with_the_next_sample(
    captures: Captures, tmp_path: Path
) -> None:
    for name, age in (("lost", ABANDONED_SECONDS + 60), ("alive", ABANDONED_SECONDS / 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00000.npz").write_bytes(b"inputs")
        at = time.time() - age
        os.utime(tmp_path / name, (at, at))
    captures.ask(50.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "w"]


def test_inputs_count_once_they_can_be_read_from_the_files(tmp_path: Path) -> None:
    captures = Captures(tmp_path / "w", SPEC, max_bytes=100_000, flush_seconds=NEVER)
    captures.ask(0.0)
    offer(captures, 10)
    assert captures.count == 0, "a training that began now would find nothing"
    captures.flush()
    assert captures.count == 10
    captures.close()


def test_a_disk_that_cannot_be_written_costs_the_captures_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    captures = Captures(tmp_path / "file" / "w", SPEC, max_bytes=1000, flush_seconds=NEVER)
    captures.ask(0.0)
    offer(captures, 10)
    captures.flush()
    assert captures.count == 0, "what is not in a file cannot be trained on"
    captures.close()


def test_a_worker_captures_what_it_audits_while_a_document_asks_for_it(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions, tmp_path: Path
) -> None:
    captures = Captures(tmp_path / "w", bundle.manifest.inputs[0], max_bytes=10**6, flush_seconds=NEVER)
    service = Service(bundle_dir, bundle, sessions, captures=captures)
    service.run(service.plan({}), audit_rate=1.0)
    service.serve(3)
    assert captures.count == 0
    service.run(service.plan({}), audit_rate=1.0, capture_since=0.0)
    service.serve(6, seed=4)
    captures.flush()
    x, kept = bundles.inputs(6, seed=4), stored(tmp_path / "w")
    np.testing.assert_array_equal(kept["x"], x)
    assert kept["digest"].tolist() == [input_digest(row, bundle.manifest.inputs[0]) for row in x]
    service.run(service.plan({}), audit_rate=1.0)
    assert not (tmp_path / "w").exists()
    captures.close()
