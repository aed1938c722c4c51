"""Train the demo's backbone and write its data: ``python -m bench.digits.train --out build/demo/model``.

    model.safetensors   weights of the family named in model.json
    heads.npz           x: inputs for ``offramp prepare`` (heads and bootstrap records)
    traffic.npz         x, y, and ``reference``: what the untouched PyTorch model answers
    model.json          the --model URI, accuracy, and the content key that a second run compares

A second run with the same code and arguments finds its own output and does nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads must not spin on shared cores

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench.digits import data
from bench.digits.data import DigitSet, DigitSets, FloatArray, LabelArray, load_digit_sets
from offramp_worker.prepare import families
from offramp_worker.prepare.families import build_family

PARAMETERS = {"blocks": "3", "width": "32", "channels": "1", "classes": "10"}
EPOCHS, BATCH_SIZE = 3, 32
LEARNING_RATE, WEIGHT_DECAY, MOMENTUM, SMOOTHING = 0.02, 5e-3, 0.9, 0.05
MAX_THREADS = 4


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train the demo's digits model")
    parser.add_argument("--out", type=Path, default=Path("build/demo/model"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    summary = make_model(options.out, seed=options.seed)
    print(describe(summary))


def make_model(out: Path, *, seed: int) -> dict[str, object]:
    """Train and write everything, or return the summary of an earlier run with the same content key."""
    key = content_key(seed)
    summary_file = out / "model.json"
    if summary_file.is_file():
        earlier: dict[str, object] = json.loads(summary_file.read_text())
        if earlier.get("key") == key:
            return {**earlier, "loaded": True}
    out.mkdir(parents=True, exist_ok=True)
    summary_file.unlink(missing_ok=True)  # written last: its presence says that the rest is complete
    sets = load_digit_sets(seed=seed)
    start = time.perf_counter()
    model = train(sets.backbone, seed=seed)
    seconds = time.perf_counter() - start
    save_file(model.state_dict(), out / "model.safetensors")
    reference = write_data(out, model, sets)
    summary = {
        "key": key,
        "model": model_uri(out),
        "rows": {"backbone": len(sets.backbone.x), "heads": len(sets.heads.x), "traffic": len(sets.traffic.x)},
        "accuracy": float((reference == sets.traffic.y).mean()),
        "seconds": round(seconds, 1),
    }
    summary_file.write_text(json.dumps(summary, indent=1) + "\n")
    return {**summary, "loaded": False}


def train(digits: DigitSet, *, seed: int) -> nn.Module:
    """Fit the residual network; returns it in evaluation mode.

    No augmentation: at three epochs, all that the demo's time allows, it costs more accuracy than it brings.
    """
    torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    torch.manual_seed(seed)
    model = build_family("resnet", PARAMETERS).train().to(memory_format=torch.channels_last)
    x, y = torch.from_numpy(digits.x), torch.from_numpy(digits.y)
    steps = len(x) // BATCH_SIZE
    optimiser = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, total_steps=EPOCHS * steps + 1, pct_start=0.25
    )
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x))[: steps * BATCH_SIZE].split(BATCH_SIZE):
            images = x[rows].to(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(model(images), y[rows], label_smoothing=SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        print(f"backbone: epoch {epoch + 1} of {EPOCHS}, last loss {loss.item():.3f}", flush=True)
    return model.eval().to(memory_format=torch.contiguous_format)


def write_data(out: Path, model: nn.Module, sets: DigitSets) -> LabelArray:
    """Write heads.npz and traffic.npz; returns the model's answers on the traffic."""
    reference = answers(model, sets.traffic.x)
    np.savez(out / "heads.npz", x=sets.heads.x)
    np.savez(out / "traffic.npz", x=sets.traffic.x, y=sets.traffic.y, reference=reference)
    return reference


def answers(model: nn.Module, x: FloatArray) -> LabelArray:
    """What the untouched PyTorch model says, (n, 1, 24, 24) → (n,)."""
    with torch.inference_mode():
        parts = [model(rows).argmax(dim=1) for rows in torch.from_numpy(x).split(64)]
    return np.asarray(torch.cat(parts).numpy(), dtype=np.int64)


def load_model(out: Path) -> nn.Module:
    """The trained model of an earlier run."""
    model = build_family("resnet", PARAMETERS)
    model.load_state_dict(load_file(out / "model.safetensors"))
    return model


def model_uri(out: Path) -> str:
    """The ``--model`` argument for ``offramp prepare``."""
    query = "&".join(f"{name}={value}" for name, value in PARAMETERS.items())
    return f"family:resnet?weights={out / 'model.safetensors'}&{query}"


def content_key(seed: int) -> str:
    """Digest of everything the output depends on: the code that makes it and its arguments."""
    parts = [Path(str(module)).read_bytes() for module in (__file__, data.__file__, families.cifar.__file__)]
    return hashlib.sha256(b"\0".join([*parts, str(seed).encode()])).hexdigest()


def describe(summary: dict[str, object]) -> str:
    """One paragraph for people."""
    rows = summary["rows"]
    assert isinstance(rows, dict)
    how = "loaded" if summary["loaded"] else f"trained in {summary['seconds']} s"
    return (
        f"digits model {how}: {100 * float(str(summary['accuracy'])):.1f} % right on traffic\n"
        f"disjoint sets: {rows['backbone']} images trained the backbone, {rows['heads']} are for heads and bootstrap "
        f"records, {rows['traffic']} are traffic\nmodel: {summary['model']}"
    )


if __name__ == "__main__":
    main()
