"""ResNet-20 and ResNet-56 on CIFAR-10: an exit after every residual block, and ResNet-20 in front of ResNet-56.

The checkpoints were trained on the images of ``train0`` and answer all of them correctly, so those can only teach
heads. The test images, which no checkpoint has seen, are shuffled: the first 1,000 stand for a stream that heads may
learn from, the other 9,000 are the pool.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.torch import save_file

from bench.cifar.data import CHECKPOINTS, DEVIATION, MEAN, SIDE, data_folder, load_checkpoint, load_images
from bench.record.network import Recording, Rows, record_network, running_macs
from bench.record.scores import (
    COSTS,
    UNCERTAINTY,
    FloatArray,
    LabelArray,
    Ramp,
    accuracy,
    cost_arrays,
    judged,
    ramp_facts,
    record_arrays,
)
from bench.record.store import RecordSet
from offramp_core.bundle import HeadKind, RampSpec
from offramp_worker.prepare.data import remove_repeats
from offramp_worker.prepare.profiling import Job, time_jobs
from offramp_worker.prepare.progress import Advance, Reporter
from offramp_worker.prepare.sources import Backbone, load_backbone, open_session

STREAM_ROWS, VALIDATION_ROWS = 1_000, 200  # validation is the end of the stream
SHIFT = 4  # pixels, as when the checkpoints were trained
KINDS: dict[str, HeadKind] = {"mx4": "grid-mlp", "gap": "pooled-linear"}
CASCADE_SECONDS = 30.0
SOURCES = {
    "data": "CIFAR-10 (Krizhevsky 2009), free to use, no formal licence; github.com/cyizhuo/CIFAR-10-dataset @ a828d74",
    "model": "checkpoints of github.com/akamaster/pytorch_resnet_cifar10 @ d5489e8, BSD-2-Clause",
}


@dataclass(frozen=True, slots=True)
class _Images:
    """Rows of one recording, with the mosaic's index and the true class of each pool image."""

    rows: Rows
    index: LabelArray
    label: LabelArray


def data_files(*depths: int) -> list[Path]:
    """What the recordings read, of ResNets of these depths."""
    images, checkpoints = data_folder() / "img_cifar10", data_folder() / "ckpt_resnet_cifar10"
    mosaics = [images / name for name in ("cifar10_test.webp", "cifar10_test_labels.csv.gz", "cifar10_train0.webp")]
    return [*mosaics, *(checkpoints / CHECKPOINTS[depth] for depth in depths)]


def record_resnet(reporter: Reporter, *, depth: int, seed: int) -> list[RecordSet]:
    """Sets ``resnetN-mx4`` (4x4 average and maximum pooling, MLP) and ``resnetN-gap`` (global average, linear)."""
    start = time.perf_counter()
    images = _load(seed=seed)
    with TemporaryDirectory() as folder:
        model = _model(Path(folder), depth)
        recording = record_network(model, images.rows, reporter, blocks=(depth - 2) // 2, seed=seed)
    return [
        _resnet_set(f"resnet{depth}-{short}", recording, images, kind=kind, depth=depth, start=start)
        for short, kind in KINDS.items()
    ]


def record_cascade(reporter: Reporter, *, seed: int, mx4: RecordSet) -> RecordSet:
    """Set ``resnet56-cascade``: ResNet-20 as a ramp at the input, then the ramps of ``resnet56-mx4`` (same pool, same order)."""
    start = time.perf_counter()
    images = _load(seed=seed)
    with TemporaryDirectory() as folder:
        small, large = (load_backbone(_model(Path(folder), depth), images.rows.pool) for depth in (20, 56))
    session = open_session(small.model, threads=1)

    def answers(x: FloatArray) -> FloatArray:
        return np.concatenate([session.run(None, {small.input.name: x[i : i + 64]})[0] for i in range(0, len(x), 64)])

    with reporter.step("ResNet-20's answers", total=1) as advance:
        ramp = Ramp(_input_ramp(small.input.name), answers(images.rows.pool), answers(images.rows.validation))
        advance(1)
    sizes = [int(size) for size in mx4.arrays["batch_size"]]
    with reporter.step("measure the costs", total=len(sizes)) as advance:
        shares = _time_shares(session, open_session(large.model, threads=1), images.rows.pool, sizes, advance=advance)
    macs = _total_macs(small, images.rows.pool) / _total_macs(large, images.rows.pool)
    return _cascade_set(ramp, mx4, shares, macs=macs, seconds=time.perf_counter() - start)


def augmented(x: FloatArray, *, seed: int) -> FloatArray:
    """One variation of each image (n, 3, 32, 32): shifted by up to 4 pixels over black borders, half of them mirrored."""
    rng = np.random.default_rng(seed)
    black = (-MEAN / DEVIATION)[None]
    padded = np.broadcast_to(black, (len(x), 3, SIDE + 2 * SHIFT, SIDE + 2 * SHIFT)).copy()
    padded[:, :, SHIFT:-SHIFT, SHIFT:-SHIFT] = x
    out = np.empty_like(x)
    offsets, mirrored = rng.integers(0, 2 * SHIFT + 1, (len(x), 2)), rng.random(len(x)) < 0.5
    for i, (top, left) in enumerate(offsets):
        window = padded[i, :, top : top + SIDE, left : left + SIDE]
        out[i] = window[:, :, ::-1] if mirrored[i] else window
    return out


def _load(*, seed: int) -> _Images:
    images, labels = load_images(), _labels()
    order = np.random.default_rng(seed).permutation(len(images.test))
    stream, pool = images.test[order[:STREAM_ROWS]], images.test[order[STREAM_ROWS:]]
    learned = remove_repeats(np.concatenate([images.train, stream[:-VALIDATION_ROWS]]), of=pool)
    fresh_train = len(learned) - (STREAM_ROWS - VALIDATION_ROWS)
    training = np.concatenate([learned, augmented(learned[:fresh_train], seed=seed)])
    return _Images(
        Rows(training, remove_repeats(stream[-VALIDATION_ROWS:], of=pool), pool),
        index=order[STREAM_ROWS:].astype(np.int64),
        label=labels[order[STREAM_ROWS:]],
    )


def _labels() -> LabelArray:
    with gzip.open(data_folder() / "img_cifar10" / "cifar10_test_labels.csv.gz", "rt", encoding="utf-8") as file:
        return np.array([int(row["label"]) for row in csv.DictReader(file)], dtype=np.int64)


def _model(folder: Path, depth: int) -> str:
    weights = folder / f"resnet{depth}.safetensors"
    save_file(load_checkpoint(depth), weights)
    return f"family:cifar-resnet{depth}?weights={weights}"


def _resnet_set(
    name: str, recording: Recording, images: _Images, *, kind: HeadKind, depth: int, start: float
) -> RecordSet:
    ramps = recording.of_kind(kind)
    arrays = {
        **record_arrays(ramps, recording.reference),
        "slice": images.label,
        "row": images.index,
        **cost_arrays(ramps, recording.measured),
    }
    facts = {
        "model": f"ResNet-{depth}, CIFAR-10",
        "sources": SOURCES,
        "head": kind,
        "pool": f"{len(images.index)} test images in shuffled order; row is the image's index in cifar10_test.webp",
        "slice": "true class",
        "trained": (
            f"heads on {len(images.rows.training)} images: 10,000 the model was trained on, a shifted or mirrored copy of each, and "
            f"{STREAM_ROWS - VALIDATION_ROWS} test images; targets are the model's own probabilities. {VALIDATION_ROWS} more test images stop the "
            "training and make the quantile tables. None of them is in the pool, exact copies of pool images were removed."
        ),
        "accuracy": accuracy(recording.reference, images.label),
        "uncertainty": UNCERTAINTY,
        "costs": COSTS,
        "ramps": ramp_facts(ramps, recording.reference, recording.measured, macs=recording.macs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return RecordSet(name, arrays, facts)


def _cascade_set(ramp: Ramp, mx4: RecordSet, shares: FloatArray, *, macs: float, seconds: float) -> RecordSet:
    arrays = mx4.arrays
    total = arrays["segment_seconds"].sum(axis=1)
    own = record_arrays([ramp], _one_hot(arrays["reference"]))
    merged = dict(arrays)
    for name in ("uncertainty", "one_minus_max", "prediction"):
        merged[name] = np.concatenate([own[name], arrays[name]], axis=1)
    merged["segment_seconds"] = np.concatenate([np.zeros((len(total), 1)), arrays["segment_seconds"]], axis=1)
    merged["ramp_seconds"] = np.concatenate([(shares * total)[:, None], arrays["ramp_seconds"]], axis=1)
    at_input = {
        "id": ramp.spec.id,
        "place": 0,
        "depth": 0.0,
        "cost": round(float(shares[0]), 5),
        "macs_depth": 0.0,
        "macs_cost": round(macs, 5),
        **judged(ramp.pool, arrays["reference"]),
    }
    facts = {
        **mx4.facts,
        "model": "ResNet-56, CIFAR-10, with ResNet-20 as a ramp at the input",
        "head": f"{ramp.spec.id}, then {mx4.facts['head']}",
        "costs": f"{COSTS} ResNet-20 is its share of ResNet-56's time, both timed in interleaved rounds, times the sum of the segments.",
        "ramps": [at_input, *mx4.facts["ramps"]],
        "seconds": round(seconds, 1),
    }
    return RecordSet("resnet56-cascade", merged, facts)


def _total_macs(backbone: Backbone, x: FloatArray) -> int:
    return running_macs(backbone, x)[backbone.output.name]


def _input_ramp(tensor: str) -> RampSpec:
    """The head kind says what the answers are: logits of a linear layer on a global average, with a network before it."""
    return RampSpec(id="r00-resnet20", tensor=tensor, position=0, depth=0.0, head="pooled-linear", channels=3)


def _one_hot(answers: LabelArray) -> FloatArray:
    return np.eye(int(answers.max()) + 1, dtype=np.float32)[answers]


def _time_shares(small: Any, large: Any, x: FloatArray, sizes: Sequence[int], *, advance: Advance) -> FloatArray:
    """Time of the small model over the large one's, by batch size."""

    def job(session: Any, rows: FloatArray) -> Job:
        feed = {session.get_inputs()[0].name: rows}
        return Job(lambda: session.run(None, feed))

    shares = []
    for size in sizes:
        jobs = {"small": job(small, x[:size]), "large": job(large, x[:size])}
        medians = time_jobs(jobs, threads=1, seconds=CASCADE_SECONDS / len(sizes))
        shares.append(medians["small"] / medians["large"])
        advance(1)
    return np.array(shares)
