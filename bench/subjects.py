"""The models that timings are taken on, each as an exit bundle and inputs that ``offramp prepare`` has not seen. Made
once, kept by content.

    resnet56   ResNet-56 on CIFAR-10, with ResNet-20 as a model at the input; the digits where there is no CIFAR-10
    sst2       MiniLM-L6 fine-tuned on SST-2: sentences of up to 64 tokens
    video      ResNet-56 with a probe on the tiles of a surveillance camera; heads from the 600 frames before the inputs

The first half of the inputs finds and certifies plans, the other half is served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.demo.pools import prepare, prepare_cluster_pool

BLOCK_FRAMES = 25  # one second
VIDEO_HEAD_SHARE = 0.8  # of the 300 frames, and no more is allowed; what is left are the bundle's records
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A bundle's folder and inputs [n, ...]."""

    bundle: Path
    x: Array


def resnet56(console: Console) -> Subject:
    """The bundle of the cluster's demo."""
    pool = prepare_cluster_pool(Path("build/demo-cluster"), console)
    return Subject(pool.bundle, np.ascontiguousarray(pool.clean.x, dtype=np.float32))


def sst2(console: Console) -> Subject:
    """Heads learn from the texts that the classifier was fine-tuned on and from half of the stream's."""
    from bench.sst2 import make_model, prepare_options, token_rows

    folder = Path("build/sst2")
    program = make_model(folder)
    options = prepare_options(folder)
    texts = folder / "texts.jsonl"
    prepare(folder / "bundle", model=str(program), data=texts, options=options, key=_digest(program), console=console)
    return Subject(folder / "bundle", token_rows(folder, "held-out.jsonl"))


def video(console: Console) -> Subject:
    """Seconds of video take turns: even ones come first, odd ones after them, so that both halves have seen the same
    light."""
    from bench.record.video import FIRST, HEADS_END, LAST, PROBE_END, exported, load_tiles, probed_model

    folder = Path("build/video")
    folder.mkdir(parents=True, exist_ok=True)
    tiles = load_tiles()
    probed, heads, pool = (
        tiles.between(a, b) for a, b in ((FIRST, PROBE_END), (PROBE_END, HEADS_END), (HEADS_END, LAST + 1))
    )
    model = folder / "video-resnet56.pt2"
    if not model.is_file():
        exported(probed_model(probed), probed.x, model)
    data, known = folder / "heads.npz", folder / "known.npz"
    np.savez(data, x=heads.x)
    np.savez(known, x=probed.x)  # what the probe learned from, too: heads may, records may not
    options = ["--name", "video", "--head-share", str(VIDEO_HEAD_SHARE), "--head-data", str(known)]
    prepare(folder / "bundle", model=str(model), data=data, options=options, key=_digest(data), console=console)
    odd = (pool.frame - HEADS_END) // BLOCK_FRAMES % 2
    return Subject(folder / "bundle", np.concatenate([pool.x[odd == 0], pool.x[odd == 1]]))


SUBJECTS: Mapping[str, Callable[[Console], Subject]] = {"resnet56": resnet56, "sst2": sst2, "video": video}


def make_subject(name: str, console: Console) -> Subject:
    """One of :data:`SUBJECTS`."""
    return SUBJECTS[name](console)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
