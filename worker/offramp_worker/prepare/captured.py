"""Training on captured inputs: the shards of workers become a ramp set in the store, and are deleted.

Run by the control plane as ``python -m offramp_worker.prepare.captured``, on one machine or in a pod of its own; what
came of it is a JSON file. The newest quarter of the inputs trains nothing: it tells what plans could save with the
earlier heads and with the new ones. Live records of every input that was here are kept out of the new set's pool by its
digest, so that none of them tunes or certifies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import MANIFEST_FILE, RAMPS_FILE
from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_core.npz import read_npz
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.bundle.ramp_sets import DIGEST, load_ramp_set, write_ramp_set
from offramp_worker.prepare.measuring.outlook import Outlook
from offramp_worker.prepare.pipeline import PrepareRequest
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import refresh_bundle
from offramp_worker.prepare.report import PrepareReport

HEAD_SHARE = 0.75
FEWEST_ROWS = 200
MOST_ROWS = 20_000  # a large fleet captures more than heads need; this bounds the memory
MAX_SHARD_BYTES = 2 * 1024 * 1024 * 1024
NICE = 10  # workers on the same machine come first
FAILED = 1


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What to train: the bundle, the folder below which shards lie, the store, and the set whose heads are trained
    further.

    ``budget`` is the disagreement at which savings are told; sets that are not in ``keep`` are removed from the store.
    """

    bundle: Path
    captures: Path
    store: Path
    made_from: str
    budget: float = 0.01
    keep: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The new set, how many inputs it was made of, and what plans could save on those that trained nothing."""

    ramp_set_digest: str
    rows: int
    saving_before: float
    saving_after: float


@dataclass(frozen=True, slots=True)
class Captured:
    """Inputs of all workers, oldest first, without repeats: ``x`` [n, ...] and ``digest`` [n]. ``files`` are the shards
    they were read from."""

    x: npt.NDArray[Any]
    digest: npt.NDArray[np.uint64]
    files: tuple[Path, ...]


def train_on_captures(job: TrainingJob, reporter: Reporter) -> TrainingResult:
    """Train, put the new set into the store, and delete the captures that were read, whatever comes of it.

    Raises
    ------
    InvalidBundleError
        The bundle, or the set to begin with, is damaged or missing.
    InvalidArgumentError
        There are too few captures, or they do not fit the model.
    """
    bundle = load_bundle(job.bundle)
    captured = read_captures(job.captures, bundle)
    try:
        if len(captured.x) < FEWEST_ROWS:
            raise InvalidArgumentError(
                f"captures in {job.captures} have {len(captured.x)} different inputs; at least {FEWEST_ROWS} are needed"
            )
        with tempfile.TemporaryDirectory(prefix="offramp-training-") as work:
            return _train(job, bundle, captured, Path(work), reporter)
    finally:
        for file in captured.files:
            file.unlink(missing_ok=True)


def read_captures(folder: Path, bundle: Bundle) -> Captured:
    """All shards below ``folder``; one that cannot be read, or is of another model, costs its rows and nothing else.

    Of more than :data:`MOST_ROWS` different inputs so many are drawn, each with the same probability.
    """
    spec = bundle.manifest.inputs[0]
    files, parts, times, digests = [], [], [], []
    for file in sorted(folder.rglob("shard-*.npz")):
        files.append(file)
        shard = _read_shard(file)
        if shard is None or not spec.fits(shard["x"].shape[1:]) or shard["x"].dtype != bundle.input_dtype:
            print(f"{file}: is no shard of inputs of {bundle.manifest.name}; it is left out", file=sys.stderr)
            continue
        parts.append(shard["x"])
        times.append(shard["time"])
        digests.append(shard["digest"])
    if not parts:
        return Captured(np.zeros((0, 1)), np.zeros(0, dtype=np.uint64), tuple(files))
    x, digest = pad_rows(parts, spec), np.concatenate(digests)
    order = np.argsort(np.concatenate(times), kind="stable")
    _, first = np.unique(digest[order], return_index=True)
    if len(first) > MOST_ROWS:
        first = np.random.default_rng(len(first)).choice(first, MOST_ROWS, replace=False)
    kept = order[np.sort(first)]
    finite = np.isfinite(x[kept].reshape(len(kept), -1)).all(axis=1)
    return Captured(x[kept[finite]], digest[kept[finite]], tuple(files))


def prune(store: Path, keep: Sequence[str]) -> None:
    """Remove the sets of a store that nothing refers to."""
    kept = {match[1] for digest in keep if (match := DIGEST.fullmatch(digest))}
    for folder in store.iterdir() if store.is_dir() else ():
        if DIGEST.fullmatch(f"sha256:{folder.name}") and folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _train(job: TrainingJob, bundle: Bundle, captured: Captured, work: Path, reporter: Reporter) -> TrainingResult:
    base = _base(job, bundle, work / "base")
    np.savez(work / "inputs.npz", x=captured.x)
    request = PrepareRequest(
        model=str(base), data=str(work / "inputs.npz"), out=work / "refreshed", head_share=HEAD_SHARE, seed=job.seed
    )
    report = refresh_bundle(request, reporter, written_report=False)
    content = (report.out / RAMPS_FILE).read_bytes()
    new = write_ramp_set(job.store, content, captured.digest, bundle=bundle)
    prune(job.store, (*job.keep, job.made_from, new.digest))
    before, after = savings(report, job.budget)
    return TrainingResult(new.digest, len(captured.x), before, after)


def _base(job: TrainingJob, bundle: Bundle, folder: Path) -> Path:
    """The bundle with the heads to begin with: its own, or those of a set in the store."""
    if job.made_from in ("", bundle.manifest.ramp_set_digest):
        return job.bundle
    started = load_ramp_set(job.store, job.made_from, bundle)
    shutil.copytree(job.bundle, folder)
    shutil.copyfile(
        job.store / started.digest.removeprefix("sha256:") / RAMPS_FILE, folder / RAMPS_FILE
    )  # verified just now
    text = json.dumps(asdict(started.bundle.manifest), indent=1, sort_keys=True)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return folder


def savings(report: PrepareReport, budget: float) -> tuple[float, float]:
    """What plans could save with the earlier heads and with the new ones, at the largest budget told that is within
    ``budget`` (else the smallest) and the smallest batch, whatever ramps may add."""

    def saved(outlooks: Sequence[Outlook]) -> float:
        size = min(outlook.batch_size for outlook in outlooks)
        within = [outlook.budget for outlook in outlooks if outlook.budget <= budget + 1e-12]
        wanted = max(within, default=min(outlook.budget for outlook in outlooks))
        return max(o.saving for o in outlooks if (o.batch_size, o.budget) == (size, wanted))

    return saved(report.outlooks_before), saved(report.outlooks)


def _read_shard(file: Path) -> dict[str, npt.NDArray[Any]] | None:
    try:
        if file.stat().st_size > MAX_SHARD_BYTES:
            return None
        with file.open("rb") as opened:
            shard = read_npz(opened, names=("x", "time", "digest"))
    except (ValueError, OSError):
        return None
    if len(shard) < 3 or any(array.ndim < 1 for array in shard.values()):
        return None
    n = len(shard["x"])
    fits = shard["time"].shape == shard["digest"].shape == (n,) and shard["digest"].dtype == np.uint64
    return shard if fits and shard["x"].ndim >= 2 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="offramp-train", description=__doc__)
    for name in ("bundle", "captures", "store", "result"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--from", dest="made_from", default="")
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--keep", default="")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.nice(NICE)
    job = TrainingJob(
        given.bundle,
        given.captures,
        given.store,
        given.made_from,
        given.budget,
        tuple(filter(None, given.keep.split(","))),
        given.seed,
    )
    try:
        result: dict[str, Any] = asdict(train_on_captures(job, Reporter(quiet=True)))
    except (OfframpError, OSError) as error:
        result = {"error": str(error)}
    except ImportError as error:
        result = {"error": f"{error}; training needs the extra offramp[prepare]"}
    except MemoryError:
        result = {"error": "the memory does not suffice; raise spec.worker.resources.limits.memory"}
    _write(given.result, json.dumps(result).encode())
    return FAILED if "error" in result else 0


def _write(path: Path, content: bytes) -> None:
    if path.exists():  # a pod's termination log is a mounted file, which nothing can replace
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
