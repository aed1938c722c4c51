"""Small models of every task on one trained trunk, for the tests that prepare and serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prepared
import torch
from torch import Tensor, nn

from offramp_core.task import TaskSpec

#: What each is declared as.
SPECS = {
    "top-k": TaskSpec("TopK", k=2),
    "multi-label": TaskSpec("MultiLabel", thresholds=(0.5, 0.5, 0.4, 0.6)),
    "binary": TaskSpec("Binary"),
    "regression": TaskSpec("Regression", measure="absolute", tolerance=0.25),
    "embedding": TaskSpec("Embedding", measure="cosine", tolerance=0.05),
    "hamming": TaskSpec("MultiLabel", loss="Hamming"),
}


class Ends(nn.Module):
    """The trunk's scores of four classes, made into another task's output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trunk, self.kind = prepared.trained_model(), kind

    def forward(self, x: Tensor) -> Tensor:
        z = self.trunk(x)
        if self.kind in ("multi-label", "hamming"):
            return torch.sigmoid(z - z.mean(dim=1, keepdim=True))
        if self.kind == "binary":
            return z[:, 0] + z[:, 1] - z[:, 2] - z[:, 3]
        if self.kind == "regression":
            return torch.softmax(z, dim=1)[:, :2]
        return nn.functional.normalize(z, dim=1) if self.kind == "embedding" else z


def save_model(folder: Path, kind: str) -> str:
    """Write the model as a program of torch.export; returns its path."""
    batch, x = torch.export.Dim("batch"), torch.from_numpy(prepared.images(2, seed=1)[0])
    program = torch.export.export(Ends(kind).eval(), (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / f"{kind}.pt2")
    return str(folder / f"{kind}.pt2")


def losses(kind: str, given: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """What outputs (n, width) lose against the reference's, worked out row by row and apart from the code under
    test."""
    spec, out = SPECS[kind], []
    for a, b in zip(given.astype(np.float64), reference.astype(np.float64), strict=True):
        if kind == "top-k":
            out.append(float({*np.argsort(-a)[:2]} != {*np.argsort(-b)[:2]}))
        elif kind in ("multi-label", "hamming"):
            limits = np.array(spec.thresholds or [0.5] * len(a))
            differ = [bool(p > t) != bool(q > t) for p, q, t in zip(a, b, limits, strict=True)]
            out.append(sum(differ) / len(differ) if kind == "hamming" else float(any(differ)))
        elif kind == "binary":
            out.append(float((a[0] > 0) != (b[0] > 0)))
        elif kind == "regression":
            out.append(float(max(abs(a - b)) > spec.tolerance))
        else:
            out.append(float(1 - a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) > spec.tolerance))
    return np.array(out)
