"""Inputs of the tiny model for which a plan is bad that is good for all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import identity_bundle  # type: ignore[import-not-found]
import numpy as np


def inputs_on_which_a_ramp_is_wrong(folder: Path) -> tuple[str, Path]:
    """A ramp that nearly always agrees with the model, and rows on which it does not."""
    from onnx import load

    bundle = identity_bundle.write_bundle(folder / "hard")
    model = load(bundle / "backbone.onnx")
    tensors = {
        f"{r.id}/{n}": v
        for r in identity_bundle.RAMPS
        for n, v in (("w1", weight(model, "w")), ("b1", weight(model, "b")))
    }
    rows = identity_bundle.inputs(6000, seed=5)
    logits, heads = identity_bundle._run_tapped(model, tensors, rows)
    wrong = rows[heads[-1].argmax(axis=1) != logits.argmax(axis=1)]
    assert 20 <= len(wrong) <= 0.03 * len(rows), len(wrong)  # the plan is good on the inputs that all workers get
    path = folder / "hard.npy"
    np.save(path, wrong)
    return identity_bundle.RAMPS[-1].id, path


def weight(model: Any, name: str) -> Any:
    from onnx import numpy_helper

    return next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)
