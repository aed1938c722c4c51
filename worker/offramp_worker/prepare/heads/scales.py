"""One meaning for the scores of all exits: ramps speak logits, and these are as sure as the model is.

A graph that ends in probabilities is made to end in their logarithms, which are logits with the same softmax. What a
trained head or a side model says is divided by a temperature (Guo et al., "On Calibration of Modern Neural Networks",
ICML 2017). The worker says the result in the model's scale (:mod:`offramp_core.scale`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.scale import SMALLEST, Scale
from offramp_core.task import Lesson
from offramp_worker.bundle.graph import output_name
from offramp_worker.prepare.source.data import FloatArray

MOST = 16.0  # a head that is sure of nothing, or of everything, has no best temperature; 1 / MOST is the least
MOST_ROWS = 2_000  # one number needs no more
MOST_LOGIT = 40.0  # of a label: its probability is 1 in double precision, whatever it is divided by
HALVINGS = 24  # of the range of logarithms, to seven digits


def temperature(logits: FloatArray, distribution: FloatArray, *, of: Lesson = "classes") -> float:
    """What logits (n, n_classes) are to be divided by so that their softmax says least wrongly what the model's
    ``distribution`` (n, n_classes) says; ``of`` labels the logistic function of each in the place of the softmax.

    The loss is cross entropy. Rows that are not finite do not count; without any it is 1. (The worker image, which
    trains as well, has no SciPy.)
    """
    finite = np.isfinite(logits).all(axis=1)
    z = logits[finite][-MOST_ROWS:].astype(np.float64)
    if not len(z):
        return 1.0
    if of == "classes":
        z -= z.max(axis=1, keepdims=True)
    wanted = (distribution[finite][-MOST_ROWS:] * z).sum(axis=1)
    # The loss is convex in 1 / T, so that its slope says on which side of a value the best one lies.
    low, high = -math.log(MOST), math.log(MOST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if of == "classes":
            weights = np.exp(math.exp(middle) * z)
            given = (weights * z).sum(axis=1) / weights.sum(axis=1)
        else:
            given = (z / (1 + np.exp(-math.exp(middle) * np.clip(z, -MOST_LOGIT, MOST_LOGIT)))).sum(axis=1)
        slope = float((given - wanted).mean())
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


def tempered(parameters: Mapping[str, FloatArray], by: float) -> dict[str, FloatArray]:
    """A head's parameters with the temperature in its last layer, where it costs nothing."""
    last = str(max(int(name[1:]) for name in parameters if name[0] == "w"))
    scaled = {f"w{last}", f"b{last}"}
    return {name: (value / np.float32(by) if name in scaled else value) for name, value in parameters.items()}


def add_logits(model: onnx.ModelProto, tensor: str, scale: Scale) -> str:
    """Add to the graph what makes logits of a ``tensor`` in some scale; returns the tensor that has them."""
    if scale.kind != "probabilities":
        return tensor
    smallest, above, logits = (f"{tensor}/{part}" for part in ("smallest", "above", "logits"))
    model.graph.initializer.append(_number(smallest, SMALLEST))
    model.graph.node.extend(
        [helper.make_node("Max", [tensor, smallest], [above]), helper.make_node("Log", [above], [logits])]
    )
    return logits


def ending_in_logits(model: onnx.ModelProto, scale: Scale) -> onnx.ModelProto:
    """A whole model whose answers are in some scale, with logits at its end."""
    changed = _copy(model)
    changed.graph.output[0].name = add_logits(changed, output_name(changed), scale)
    return changed


def with_temperature(model: onnx.ModelProto, by: float) -> onnx.ModelProto:
    """A whole model with its logits divided by a temperature."""
    changed, end = _copy(model), output_name(model)
    gain, cooled = f"{end}/gain", f"{end}/cooled"
    changed.graph.initializer.append(_number(gain, 1 / by))
    changed.graph.node.append(helper.make_node("Mul", [end, gain], [cooled]))
    changed.graph.output[0].name = cooled
    return changed


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _number(name: str, value: float) -> Any:
    constant: npt.NDArray[np.float32] = np.array(value, dtype=np.float32)
    return numpy_helper.from_array(constant, name)
