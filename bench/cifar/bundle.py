"""A CIFAR-10 ResNet and its images, as ``offramp prepare`` takes them.

    resnet56.safetensors  the checkpoint's tensors; resnet20.safetensors those of a smaller one, for the input
    heads.npz             x: 4,000 test images for ``offramp prepare --data`` (heads and bootstrap records)
    head_data.npz         x: 10,000 images the backbone was trained on, for ``--head-data``: they only teach heads
    traffic.npz           x, ``reference``: the other 6,000 test images and the untouched PyTorch model's answers
    drifted.npz           the first 3,000 of these, blurred and noisy
    model.json            the --model URI, --side URI and the content key

A second run with the same code, checkpoint and arguments finds its own output and does nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin on shared cores

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from scipy.ndimage import gaussian_filter
from torch import nn

from bench.cifar import data
from bench.cifar.data import FloatArray, load_checkpoint, load_images, missing_files, require_files
from offramp_worker.prepare import families
from offramp_worker.prepare.families import build_family

HEAD_ROWS = 4_000
SIDE_DEPTH = 20
DRIFTED_ROWS = 3_000
BLUR_PIXELS, NOISE = 0.6, 0.5  # noise in units of the normalised inputs
MAX_THREADS = 4


def available(*, depth: int = 56) -> bool:
    """Whether OFFRAMP_DATA holds the images and the checkpoint."""
    return not (missing_files(depth=depth) or missing_files(depth=SIDE_DEPTH))


def make_model(out: Path, *, depth: int = 56, seed: int = 0) -> dict[str, object]:
    """Convert the checkpoint and divide the images, or return the facts of an earlier run with the same content key.

    Raises
    ------
    DataMissingError
        Names the first missing file.
    """
    require_files(depth=depth)
    require_files(depth=SIDE_DEPTH)
    key = _content_key(depth=depth, seed=seed)
    facts_file = out / "model.json"
    if facts_file.is_file():
        earlier: dict[str, object] = json.loads(facts_file.read_text())
        if earlier.get("key") == key:
            return earlier
    out.mkdir(parents=True, exist_ok=True)
    facts_file.unlink(missing_ok=True)  # written last: its presence says that the rest is complete
    tensors = load_checkpoint(depth)
    model = build_family(f"cifar-resnet{depth}", {})
    model.load_state_dict(tensors)
    rows = _write_images(out, model, seed=seed)
    facts: dict[str, object] = {
        "key": key,
        "model": _uri(out, depth),
        "side": _uri(out, SIDE_DEPTH),
        "name": f"resnet{depth}",
        "head_data": str(out / "head_data.npz"),
        "rows": rows,
    }
    facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _uri(out: Path, depth: int) -> str:
    """Write a checkpoint's tensors; what ``--model`` and ``--side`` take."""
    weights = out / f"resnet{depth}.safetensors"
    save_file(load_checkpoint(depth), weights)
    return f"family:cifar-resnet{depth}?weights={weights}"


def _write_images(out: Path, model: nn.Module, *, seed: int) -> dict[str, int]:
    """Write the four sets of images; returns their sizes. No image is in two sets (drifted ones are traffic's)."""
    images = load_images()
    order = np.random.default_rng(seed).permutation(len(images.test))
    heads, traffic = images.test[order[:HEAD_ROWS]], images.test[order[HEAD_ROWS:]]
    drifted = blur_with_noise(traffic[:DRIFTED_ROWS], seed=seed)
    np.savez(out / "heads.npz", x=heads)
    np.savez(out / "head_data.npz", x=images.train)
    np.savez(out / "traffic.npz", x=traffic, reference=_answers(model, traffic))
    np.savez(out / "drifted.npz", x=drifted, reference=_answers(model, drifted))
    return {"heads": len(heads), "head_data": len(images.train), "traffic": len(traffic)}


def blur_with_noise(x: FloatArray, *, seed: int) -> FloatArray:
    """Images (n, C, H, W) out of focus, with noise; the same seed gives the same images."""
    noise = NOISE * np.random.default_rng(seed).standard_normal(x.shape)
    return np.asarray(gaussian_filter(x, sigma=(0, 0, BLUR_PIXELS, BLUR_PIXELS)) + noise, dtype=np.float32)


def _answers(model: nn.Module, x: FloatArray) -> npt.NDArray[np.int64]:
    """What the untouched PyTorch model says."""
    torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    start = time.perf_counter()
    with torch.inference_mode():
        parts = [model(rows).argmax(dim=1) for rows in torch.from_numpy(x).split(100)]
    print(f"reference answers: {len(x)} in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return np.asarray(torch.cat(parts).numpy(), dtype=np.int64)


def _content_key(*, depth: int, seed: int) -> str:
    """Digest of everything the output depends on: code, arguments, and the checkpoint's name, which carries its
    hash."""
    sources = [Path(str(module)).read_bytes() for module in (__file__, data.__file__, families.cifar.__file__)]
    return hashlib.sha256(b"\0".join([*sources, data.CHECKPOINTS[depth].encode(), str(seed).encode()])).hexdigest()
