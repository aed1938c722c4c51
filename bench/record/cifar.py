"""ResNet-20 and ResNet-56 on CIFAR-10: an exit after every residual block.

The checkpoints were trained on the images of ``train0`` and answer all of them correctly, so those can only teach
heads. The test images, which no checkpoint has seen, are shuffled: the first 1,000 stand for a stream that heads may
learn from, the other 9,000 are the pool.
"""

from __future__ import annotations

import csv
import gzip
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.torch import save_file

from bench.cifar.data import CHECKPOINTS, DEVIATION, MEAN, SIDE, data_folder, load_checkpoint, load_images
from bench.record.costs import Costs, network_costs
from bench.record.network import Recording, Rows, record_network
from bench.record.scores import UNCERTAINTY, FloatArray, LabelArray, accuracy, ramp_facts, record_arrays
from bench.record.store import RecordSet
from offramp_core.bundle import HeadKind
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import remove_repeats

STREAM_ROWS, VALIDATION_ROWS = 1_000, 200  # validation is the end of the stream
SHIFT = 4  # pixels, as when the checkpoints were trained
KINDS: dict[str, HeadKind] = {"mx4": "grid-mlp", "gap": "pooled-linear"}
SOURCES = {
    "data": "CIFAR-10 (Krizhevsky 2009), free to use, no formal licence; github.com/cyizhuo/CIFAR-10-dataset @ a828d74",
    "model": "checkpoints of github.com/akamaster/pytorch_resnet_cifar10 @ d5489e8, BSD-2-Clause",
}


@dataclass(frozen=True, slots=True)
class Images:
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
    images = load_rows(seed=seed)
    with TemporaryDirectory() as folder:
        model = model_uri(Path(folder), depth)
        recording = record_network(model, images.rows, reporter, blocks=(depth - 2) // 2, seed=seed)
    return [
        _resnet_set(f"resnet{depth}-{short}", recording, images, kind=kind, depth=depth, start=start)
        for short, kind in KINDS.items()
    ]


def resnet_costs(reporter: Reporter, *, depth: int, seed: int) -> dict[str, Costs]:
    """Costs of both sets of a ResNet."""
    images = load_rows(seed=seed)
    with TemporaryDirectory() as folder:
        costs = network_costs(model_uri(Path(folder), depth), images.rows.pool, reporter, blocks=(depth - 2) // 2)
    return {f"resnet{depth}-{short}": costs[kind] for short, kind in KINDS.items()}


def augmented(x: FloatArray, *, seed: int) -> FloatArray:
    """One variation of each image (n, 3, 32, 32): shifted by up to 4 pixels over black borders, half of them
    mirrored."""
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


def load_rows(*, seed: int) -> Images:
    """Divide the images; copies of pool images among the others are removed."""
    images, labels = load_images(), _labels()
    order = np.random.default_rng(seed).permutation(len(images.test))
    stream, pool = images.test[order[:STREAM_ROWS]], images.test[order[STREAM_ROWS:]]
    learned = remove_repeats(np.concatenate([images.train, stream[:-VALIDATION_ROWS]]), of=pool)
    fresh_train = len(learned) - (STREAM_ROWS - VALIDATION_ROWS)
    training = np.concatenate([learned, augmented(learned[:fresh_train], seed=seed)])
    return Images(
        Rows(training, remove_repeats(stream[-VALIDATION_ROWS:], of=pool), pool),
        index=order[STREAM_ROWS:].astype(np.int64),
        label=labels[order[STREAM_ROWS:]],
    )


def _labels() -> LabelArray:
    with gzip.open(data_folder() / "img_cifar10" / "cifar10_test_labels.csv.gz", "rt", encoding="utf-8") as file:
        return np.array([int(row["label"]) for row in csv.DictReader(file)], dtype=np.int64)


def model_uri(folder: Path, depth: int) -> str:
    """Write a checkpoint's tensors into ``folder``; the model's URI."""
    weights = folder / f"resnet{depth}.safetensors"
    save_file(load_checkpoint(depth), weights)
    return f"family:cifar-resnet{depth}?weights={weights}"


def _resnet_set(
    name: str, recording: Recording, images: Images, *, kind: HeadKind, depth: int, start: float
) -> RecordSet:
    ramps = recording.of_kind(kind)
    arrays = {**record_arrays(ramps, recording.reference), "slice": images.label, "row": images.index}
    facts = {
        "model": f"ResNet-{depth}, CIFAR-10",
        "sources": SOURCES,
        "head": kind,
        "pool": f"{len(images.index)} test images in shuffled order; row is the image's index in cifar10_test.webp",
        "slice": "true class",
        "trained": (
            f"heads on {len(images.rows.training)} images: 10,000 the model was trained on, a shifted or mirrored "
            "copy of each, and "
            f"{STREAM_ROWS - VALIDATION_ROWS} test images; targets are the model's own probabilities. "
            f"{VALIDATION_ROWS} more test images stop the "
            "training and make the quantile tables. None of them is in the pool, exact copies of pool images were "
            "removed."
        ),
        "accuracy": accuracy(recording.reference, images.label),
        "uncertainty": UNCERTAINTY,
        "ramps": ramp_facts(ramps, recording.reference, macs=recording.macs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return RecordSet(name, arrays, facts)
