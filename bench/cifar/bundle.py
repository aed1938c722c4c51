"""A CIFAR-10 ResNet as an exit bundle: ``python -m bench.cifar.bundle --out build/demo-cluster/cifar``.

    resnet56.safetensors  the checkpoint's tensors
    heads.npz             x: 4,000 test images for ``offramp prepare --data`` (heads and bootstrap records)
    head_data.npz         x: 10,000 images the backbone was trained on, for ``--head-data``: they only teach heads
    traffic.npz           x, ``reference``: the other 6,000 test images and the untouched PyTorch model's answers
    drifted.npz           the first 3,000 of these, blurred and noisy
    model.json            the --model URI and the content key
    bundle/               the exit bundle

A second run with the same code, checkpoint and arguments finds its own output and does nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin on shared cores

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn

from bench.cifar import data
from bench.cifar.data import FloatArray, load_checkpoint, load_images, missing_files, require_files
from bench.digits import drift as drift_module
from bench.digits.drift import drift
from offramp_core.bundle import MANIFEST_FILE
from offramp_worker.prepare import families
from offramp_worker.prepare.families import build_family

HEAD_ROWS = 4_000
DRIFTED_ROWS = 3_000
HEAD_SHARE = 0.5  # of those; the rest are bootstrap records
BLUR_PIXELS, NOISE = 0.6, 0.5  # noise in units of the normalised inputs
MAX_THREADS = 4


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="prepare a CIFAR-10 ResNet from OFFRAMP_DATA")
    parser.add_argument("--out", type=Path, default=Path("build/demo-cluster/cifar"))
    parser.add_argument("--depth", type=int, choices=sorted(data.CHECKPOINTS), default=56)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        facts = make_model(options.out, depth=options.depth, seed=options.seed)
    except data.DataMissingError as error:
        print(f"bench.cifar: {error}", file=sys.stderr)
        return 2
    prepare(options.out, facts)
    return 0


def available(*, depth: int = 56) -> bool:
    """Whether OFFRAMP_DATA holds the images and the checkpoint."""
    return not missing_files(depth=depth)


def make_model(out: Path, *, depth: int = 56, seed: int = 0) -> dict[str, object]:
    """Convert the checkpoint and divide the images, or return the facts of an earlier run with the same content key.

    Raises
    ------
    DataMissingError
        Names the first missing file.
    """
    require_files(depth=depth)
    key = _content_key(depth=depth, seed=seed)
    facts_file = out / "model.json"
    if facts_file.is_file():
        earlier: dict[str, object] = json.loads(facts_file.read_text())
        if earlier.get("key") == key:
            return earlier
    out.mkdir(parents=True, exist_ok=True)
    facts_file.unlink(missing_ok=True)  # written last: its presence says that the rest is complete
    weights = out / f"resnet{depth}.safetensors"
    tensors = load_checkpoint(depth)
    save_file(tensors, weights)
    model = build_family(f"cifar-resnet{depth}", {})
    model.load_state_dict(tensors)
    rows = _write_images(out, model, seed=seed)
    facts: dict[str, object] = {
        "key": key,
        "model": f"family:cifar-resnet{depth}?weights={weights}",
        "name": f"resnet{depth}",
        "head_data": str(out / "head_data.npz"),
        "head_share": HEAD_SHARE,
        "rows": rows,
    }
    facts_file.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def prepare(out: Path, facts: dict[str, object]) -> Path:
    """Run ``offramp prepare`` on what :func:`make_model` wrote, unless its bundle is there; returns the bundle's folder."""
    from rich.console import Console

    from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
    from offramp_worker.prepare.progress import Reporter
    from offramp_worker.prepare.report import print_report

    bundle, stamp = out / "bundle", out / "bundle.key"
    if stamp.is_file() and stamp.read_text() == facts["key"] and (bundle / MANIFEST_FILE).is_file():
        print(f"bundle: {bundle} (made earlier)")
        return bundle
    request = PrepareRequest(
        model=str(facts["model"]),
        data=str(out / "heads.npz"),
        out=bundle,
        name=str(facts["name"]),
        head_data=str(facts["head_data"]),
        head_share=HEAD_SHARE,
    )
    print_report(prepare_bundle(request, Reporter()), Console())
    stamp.write_text(str(facts["key"]))
    return bundle


def _write_images(out: Path, model: nn.Module, *, seed: int) -> dict[str, int]:
    """Write the four sets of images; returns their sizes. No image is in two sets (drifted ones are traffic's)."""
    images = load_images()
    order = np.random.default_rng(seed).permutation(len(images.test))
    heads, traffic = images.test[order[:HEAD_ROWS]], images.test[order[HEAD_ROWS:]]
    drifted = drift(traffic[:DRIFTED_ROWS], seed=seed, blur=BLUR_PIXELS, noise=NOISE)
    np.savez(out / "heads.npz", x=heads)
    np.savez(out / "head_data.npz", x=images.train)
    np.savez(out / "traffic.npz", x=traffic, reference=_answers(model, traffic))
    np.savez(out / "drifted.npz", x=drifted, reference=_answers(model, drifted))
    return {"heads": len(heads), "head_data": len(images.train), "traffic": len(traffic)}


def _answers(model: nn.Module, x: FloatArray) -> npt.NDArray[np.int64]:
    """What the untouched PyTorch model says."""
    torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    start = time.perf_counter()
    with torch.inference_mode():
        parts = [model(rows).argmax(dim=1) for rows in torch.from_numpy(x).split(100)]
    print(f"reference answers: {len(x)} in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return np.asarray(torch.cat(parts).numpy(), dtype=np.int64)


def _content_key(*, depth: int, seed: int) -> str:
    """Digest of everything the output depends on: code, arguments, and the checkpoint's name, which carries its hash."""
    sources = [
        Path(str(module)).read_bytes()
        for module in (__file__, data.__file__, drift_module.__file__, families.cifar.__file__)
    ]
    return hashlib.sha256(b"\0".join([*sources, data.CHECKPOINTS[depth].encode(), str(seed).encode()])).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
