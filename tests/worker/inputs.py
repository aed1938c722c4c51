"""The tiny trained network behind other inputs than float32, for the tests that prepare and serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prepared
import torch
from torch import Tensor, nn

TYPES = {"UINT8": np.uint8, "FP16": np.float16}


class Bytes(nn.Module):
    """Reads pixels of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = prepared.trained_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk((x.to(torch.float32) - 128) / 32)


class Halves(nn.Module):
    """Computes in half precision from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        state = {name: value.half() for name, value in prepared.trained_model().state_dict().items()}
        self.trunk = prepared.build_family("resnet", prepared.PARAMETERS).half().eval()
        self.trunk.load_state_dict(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


def rows(datatype: str, n: int, *, seed: int) -> np.ndarray:
    """Images as a model of this input takes them."""
    x = prepared.images(n, seed=seed)[0]
    if datatype == "FP16":
        return x.astype(np.float16)
    return np.clip(np.rint(x * 32 + 128), 0, 255).astype(np.uint8)


def save_model(folder: Path, datatype: str, form: str) -> str:
    """Write the model as a program of torch.export or as ONNX; returns its path."""
    model = (Bytes() if datatype == "UINT8" else Halves()).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.from_numpy(rows(datatype, 2, seed=1)),), dynamic_shapes=shapes)
    path = folder / f"model.{form}"
    if form == "pt2":
        torch.export.save(program, path)
    else:
        torch.onnx.export(program, dynamo=True, input_names=["pixels"], output_names=["scores"]).save(str(path))
    return str(path)
