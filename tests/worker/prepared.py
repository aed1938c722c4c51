"""A tiny trained residual network and data for the tests of ``offramp prepare``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch
from safetensors.torch import save_file
from torch import nn

from offramp_worker.devices import open_session
from offramp_worker.prepare.families import build_family

SIZE, CLASSES = 16, 4
PARAMETERS = {"blocks": "1", "width": "8", "channels": "1", "classes": str(CLASSES)}


def images(n: int, *, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Noisy images (n, 1, 16, 16) whose class is the quadrant that is brighter."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n)
    x = rng.normal(0, 1, (n, 1, SIZE, SIZE)).astype(np.float32)
    half = SIZE // 2
    for i, label in enumerate(y):
        top, left = half * (label // 2), half * (label % 2)
        x[i, :, top : top + half, left : left + half] += rng.uniform(0.2, 1.0)
    return x, y


@cache
def trained_model() -> nn.Module:
    """A small ResNet that has learned something, so that its answers depend on the input."""
    x, y = images(512, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny layers only lose time to waiting for each other
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_family("resnet", PARAMETERS).train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(3):
            for rows in torch.randperm(512).split(32):
                loss = nn.functional.cross_entropy(model(torch.from_numpy(x)[rows]), torch.from_numpy(y)[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    torch.set_num_threads(threads)
    return model.eval()


def save_model(folder: Path) -> str:
    """Write the model's weights; returns its URI."""
    save_file(trained_model().state_dict(), folder / "tiny.safetensors")
    query = "&".join(f"{key}={value}" for key, value in PARAMETERS.items())
    return f"family:resnet?weights={folder / 'tiny.safetensors'}&{query}"


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """What an ONNX model says of rows."""
    session = open_session(model, threads=1)
    return session.run(None, {session.get_inputs()[0].name: x})[0]
