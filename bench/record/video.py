"""A surveillance camera: is something moving in this part of the road? (CDnet 2012, baseline/highway)

Twelve tiles of every frame, where most moves, are classified one by one in time order: neighbours in time and place
resemble each other, traffic comes and goes, and the light drifts. The label is the share of moving pixels in the
ground truth. The full model is ResNet-56 as it was trained on CIFAR-10, frozen, with a logistic probe on its last
features, fitted on the first 300 frames. Heads learn the model's outputs on the 300 frames after them; the rest of
the video is the pool.
"""

from __future__ import annotations

import io
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from bench.cifar.data import CHECKPOINTS, DEVIATION, MEAN, SIDE, data_folder, load_checkpoint
from bench.record.costs import Costs, network_costs
from bench.record.network import Recording, Rows, record_network
from bench.record.scores import UNCERTAINTY, FloatArray, LabelArray, accuracy, ramp_facts, record_arrays
from bench.record.store import RecordSet
from offramp_core.bundle import HeadKind
from offramp_worker.prepare.families import build_family
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.data import remove_repeats

FIRST, LAST = 470, 1_700  # frames with a ground truth
PROBE_END, HEADS_END, VALIDATION_FRAMES = 770, 1_070, 30
TILE, TILES = 64, 12
BLOCKS = 27
CORNERS = [(top, left) for top in range(36, 180, 36) for left in range(20, 256, 44)]
MOVING, MOVING_SHARE = 255, 0.04  # a mask's value; label 1 above this share of a tile's pixels
FRAMES_PER_SECOND = 25.0  # the data set states no rate
PROBE_PENALTY = 0.02  # inverse strength: 256 features, 3,600 tiles that resemble each other
KINDS: dict[str, HeadKind] = {"grid": "grid-mlp", "gap": "pooled-linear"}
SOURCES = {
    "data": "CDnet 2012 baseline/highway (changedetection.net), research use; github.com/ZZZZZZZJJHHH/FrameDifference "
    "@ 07919e2",
    "model": "resnet56 of github.com/akamaster/pytorch_resnet_cifar10 @ d5489e8, BSD-2-Clause, with a probe of our own",
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles in time order, all of a frame together: inputs (n, 3, 32, 32), labels, frame numbers, tile numbers."""

    x: FloatArray
    label: LabelArray
    frame: LabelArray
    tile: LabelArray

    def between(self, first: int, last: int) -> Tiles:
        """Tiles of frames [first, last)."""
        rows = (self.frame >= first) & (self.frame < last)
        return Tiles(self.x[rows], self.label[rows], self.frame[rows], self.tile[rows])


class ProbedResNet(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """ResNet-56's last features, averaged to 2x2 cells, and a linear probe."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = build_family("cifar-resnet56", {})
        self.backbone.load_state_dict(load_checkpoint(56))
        self.probe = nn.Linear(4 * self.backbone.linear.in_features, 2)

    def features(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, 256)."""
        net = self.backbone
        x = nn.functional.relu(net.bn1(net.conv1(x)))
        x = net.layer3(net.layer2(net.layer1(x)))
        return nn.functional.avg_pool2d(x, 4).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> logits (B, 2)."""
        logits: Tensor = self.probe(self.features(x))
        return logits


def data_files() -> list[Path]:
    """What the recording reads."""
    return [_archive(), data_folder() / "ckpt_resnet_cifar10" / CHECKPOINTS[56]]


def record_video(reporter: Reporter, *, seed: int) -> list[RecordSet]:
    """Sets ``video-grid`` (4x4 average and maximum pooling, MLP) and ``video-gap`` (global average, linear)."""
    start = time.perf_counter()
    with reporter.step("read the video", total=1) as advance:
        tiles = load_tiles()
        advance(1)
    pool, heads = tiles.between(HEADS_END, LAST + 1), tiles.between(PROBE_END, HEADS_END)
    learned = heads.between(PROBE_END, HEADS_END - VALIDATION_FRAMES)
    held_out = heads.between(HEADS_END - VALIDATION_FRAMES, HEADS_END)
    rows = Rows(remove_repeats(learned.x, of=pool.x), remove_repeats(held_out.x, of=pool.x), pool.x)
    with reporter.step("fit the probe", total=1) as advance:
        model = probed_model(tiles.between(FIRST, PROBE_END))
        advance(1)
    with TemporaryDirectory() as folder:
        uri = exported(model, rows.pool, Path(folder) / "probed-resnet56.pt2")
        recording = record_network(uri, rows, reporter, blocks=BLOCKS, seed=seed)
    return [
        _video_set(f"video-{short}", recording, pool, len(rows.training), kind=kind, start=start)
        for short, kind in KINDS.items()
    ]


def video_costs(reporter: Reporter) -> dict[str, Costs]:
    """Costs of both sets."""
    x = load_tiles().between(HEADS_END, HEADS_END + 3).x
    with TemporaryDirectory() as folder:
        model = exported(ProbedResNet().eval(), x, Path(folder) / "probed-resnet56.pt2")
        costs = network_costs(model, x, reporter, blocks=BLOCKS)
    return {f"video-{short}": costs[kind] for short, kind in KINDS.items()}


def load_tiles() -> Tiles:
    """The twelve tiles with most movement in the probe's frames, cut from every frame."""
    with tarfile.open(_archive()) as archive:
        masks = {n: _image(archive, f"groundtruth/gt{n:06d}.png", "L") for n in range(FIRST, LAST + 1)}
        busy = np.mean([masks[n] == MOVING for n in range(FIRST, PROBE_END)], axis=0)
        corners = sorted(CORNERS, key=lambda corner: -float(_cut(busy, corner).mean()))[:TILES]
        x, label = [], []
        for number, mask in masks.items():
            frame = _image(archive, f"input/in{number:06d}.jpg", "RGB")
            x += [_small(_cut(frame, corner)) for corner in corners]
            label += [int((_cut(mask, corner) == MOVING).mean() > MOVING_SHARE) for corner in corners]
    return Tiles(
        np.stack(x),
        np.array(label, dtype=np.int64),
        np.repeat(np.arange(FIRST, LAST + 1), TILES),
        np.tile(np.arange(TILES), len(masks)),
    )


def probed_model(tiles: Tiles) -> ProbedResNet:
    """ResNet-56 with a logistic regression of the tiles' labels on its last features, their standardisation folded
    in."""
    from sklearn.linear_model import LogisticRegression

    model = ProbedResNet()
    model.eval()
    with torch.inference_mode():
        parts = [model.features(part) for part in torch.from_numpy(tiles.x).split(100)]
    features = torch.cat(parts).double().numpy()
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-3
    fitted = LogisticRegression(C=PROBE_PENALTY, max_iter=500).fit((features - mean) / deviation, tiles.label)
    weight = fitted.coef_[0] / deviation
    bias = float(fitted.intercept_[0]) - float(weight @ mean)
    with torch.no_grad():
        model.probe.weight.copy_(torch.from_numpy(np.stack([-weight / 2, weight / 2])))
        model.probe.bias.copy_(torch.tensor([-bias / 2, bias / 2]))
    return model


def _video_set(
    name: str, recording: Recording, pool: Tiles, n_training: int, *, kind: HeadKind, start: float
) -> RecordSet:
    ramps = recording.of_kind(kind)
    answers = recording.reference.argmax(axis=1).reshape(-1, TILES)
    arrays = {
        **record_arrays(ramps, recording.reference),
        "slice": pool.label,
        "time": pool.frame / FRAMES_PER_SECOND,
        "stream": pool.tile,
        "row": pool.frame,
    }
    facts = {
        "model": "ResNet-56 (CIFAR-10 weights, frozen) and a logistic probe, highway video",
        "sources": SOURCES,
        "head": kind,
        "pool": f"frames {HEADS_END} to {LAST}, {TILES} tiles each, in time order; stream is the tile, row the frame, "
        f"time frame / {FRAMES_PER_SECOND:g}",
        "slice": f"true class: more than {MOVING_SHARE:.0%} of the tile's pixels move",
        "trained": (
            f"probe on frames {FIRST} to {PROBE_END - 1} (ground truth); heads on {n_training} tiles of frames "
            f"{PROBE_END} to "
            f"{HEADS_END - VALIDATION_FRAMES - 1} (the model's probabilities); the {VALIDATION_FRAMES} frames after "
            "them stop the training and make "
            "the quantile tables. Everything lies before the pool; the tiles were chosen by the probe's frames."
        ),
        "accuracy": accuracy(recording.reference, pool.label),
        "positive_answers": round(float(answers.mean()), 4),
        "answers_changed_per_frame": round(float((answers[1:] != answers[:-1]).mean()), 4),
        "uncertainty": UNCERTAINTY,
        "ramps": ramp_facts(ramps, recording.reference, macs=recording.macs),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return RecordSet(name, arrays, facts)


def exported(model: ProbedResNet, x: FloatArray, path: Path) -> str:
    """Write the model as a torch.export program; its URI."""
    rows = torch.from_numpy(x[:2])
    program = torch.export.export(model, (rows,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    return str(path)


def _archive() -> Path:
    return data_folder() / "vid_cdnet_highway" / "highway.tar"


def _image(archive: tarfile.TarFile, name: str, mode: str) -> npt.NDArray[np.uint8]:
    member = archive.extractfile(f"highway/{name}")
    assert member is not None
    with Image.open(io.BytesIO(member.read())) as image:
        return np.asarray(image.convert(mode))


def _cut(frame: npt.NDArray[np.generic], corner: tuple[int, int]) -> npt.NDArray[np.generic]:
    top, left = corner
    return frame[top : top + TILE, left : left + TILE]


def _small(tile: npt.NDArray[np.generic]) -> FloatArray:
    """(64, 64, 3) -> (3, 32, 32), halved by averaging and normalised as CIFAR-10 images are."""
    step = TILE // SIDE
    halved = tile.reshape(SIDE, step, SIDE, step, 3).mean(axis=(1, 3)) / 255
    return np.asarray((halved.transpose(2, 0, 1) - MEAN) / DEVIATION, dtype=np.float32)
