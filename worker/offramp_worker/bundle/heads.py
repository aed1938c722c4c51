"""Heads as ONNX nodes: the one place that says what a ramp's parameters compute.

``prepare`` trains heads and the engine serves them; both build them here, so what was calibrated is what runs.

    pooled-linear   mean over H, W → w1 [C, n_classes], b1
    grid-mlp        concat(4x4 average pooling, 4x4 maximum pooling), each flattened channel first (C, 4, 4),
                    average first → w1 [2 * 16 * C, hidden], b1 → relu → w2 [hidden, n_classes], b2

Weights are stored [in, out], float32; input standardisation is folded into ``w1`` and ``b1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import RampSpec
from offramp_core.errors import InvalidArgumentError

GRID = 4
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class HeadNodes:
    """One ramp as a piece of ONNX graph: reads the tensor ``source``, writes ``output`` [n, n_classes] float32."""

    ramp_id: str
    source: str
    output: str
    nodes: tuple[Any, ...]
    initializers: tuple[Any, ...]


def grid_window(size: int) -> tuple[int, int]:
    """Kernel and stride that pool an axis of ``size`` >= 4 cells to exactly 4.

    Windows overlap where ``size`` is no multiple of 4, which plain AveragePool and MaxPool can express.

    >>> grid_window(8), grid_window(7), grid_window(4)
    ((2, 2), (4, 1), (1, 1))
    """
    if size < GRID:
        raise InvalidArgumentError(f"feature map axis is {size}; a grid-mlp head needs at least {GRID} cells")
    stride = size // GRID
    return size - (GRID - 1) * stride, stride


def head_inputs(spec: RampSpec) -> int:
    """Width of the vector that the head's first layer reads."""
    return spec.channels if spec.head == "pooled-linear" else 2 * GRID * GRID * spec.channels


def parameter_shapes(spec: RampSpec, *, n_classes: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of the head's parameters, as they stand in ``ramps.safetensors`` after ``<id>/``."""
    if spec.head == "pooled-linear":
        return {"w1": (head_inputs(spec), n_classes), "b1": (n_classes,)}
    return {
        "w1": (head_inputs(spec), spec.hidden),
        "b1": (spec.hidden,),
        "w2": (spec.hidden, n_classes),
        "b2": (n_classes,),
    }


def head_nodes(spec: RampSpec, tensors: Mapping[str, Array], *, height: int, width: int) -> HeadNodes:
    """The nodes of one head.

    Parameters
    ----------
    spec : RampSpec
        ``spec.tensor`` is the (n, channels, height, width) tensor the head reads.
    tensors : mapping
        ``w1``, ``b1`` and for grid-mlp ``w2``, ``b2``; float32, weights [in, out].
    height, width : int
        Size of the feature map; both >= 4 for grid-mlp.

    Raises
    ------
    InvalidArgumentError
        A parameter is missing or has another shape; or the map is too small for the head.
    """
    n_classes = int(tensors["b1" if spec.head == "pooled-linear" else "b2"].shape[0])
    _check_shapes(spec, tensors, n_classes=n_classes)
    prefix = f"offramp/{spec.id}"
    pooled = _pool_mean(spec, prefix) if spec.head == "pooled-linear" else _pool_grid(spec, prefix, height, width)
    output = f"{prefix}/logits"
    layers = _linear(prefix, source=f"{prefix}/pooled", target=output, layer=1)
    if spec.head == "grid-mlp":
        layers = [
            *_linear(prefix, source=f"{prefix}/pooled", target=f"{prefix}/hidden", layer=1),
            helper.make_node("Relu", [f"{prefix}/hidden"], [f"{prefix}/active"], name=f"{prefix}/relu"),
            *_linear(prefix, source=f"{prefix}/active", target=output, layer=2),
        ]
    initializers = tuple(
        numpy_helper.from_array(np.ascontiguousarray(tensors[name], dtype=np.float32), f"{prefix}/{name}")
        for name in parameter_shapes(spec, n_classes=n_classes)
    )
    return HeadNodes(spec.id, spec.tensor, output, (*pooled, *layers), initializers)


def _check_shapes(spec: RampSpec, tensors: Mapping[str, Array], *, n_classes: int) -> None:
    for name, shape in parameter_shapes(spec, n_classes=n_classes).items():
        if name not in tensors:
            raise InvalidArgumentError(f"{spec.id}/{name} is missing; a {spec.head} head needs it")
        if tensors[name].shape != shape:
            raise InvalidArgumentError(f"{spec.id}/{name} has shape {tensors[name].shape}; it needs {shape}")


def _pool_mean(spec: RampSpec, prefix: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("GlobalAveragePool", [spec.tensor], [f"{prefix}/mean"], name=f"{prefix}/gap"),
        helper.make_node("Flatten", [f"{prefix}/mean"], [f"{prefix}/pooled"], name=f"{prefix}/flat", axis=1),
    ]


def _pool_grid(spec: RampSpec, prefix: str, height: int, width: int) -> list[onnx.NodeProto]:
    (kernel_h, stride_h), (kernel_w, stride_w) = grid_window(height), grid_window(width)
    window = {"kernel_shape": [kernel_h, kernel_w], "strides": [stride_h, stride_w]}
    nodes = []
    for op, name in (("AveragePool", "avg"), ("MaxPool", "max")):
        nodes.append(helper.make_node(op, [spec.tensor], [f"{prefix}/{name}4"], name=f"{prefix}/{name}pool", **window))
        nodes.append(
            helper.make_node(
                "Flatten", [f"{prefix}/{name}4"], [f"{prefix}/{name}"], name=f"{prefix}/{name}flat", axis=1
            )
        )
    sources = [f"{prefix}/avg", f"{prefix}/max"]
    nodes.append(helper.make_node("Concat", sources, [f"{prefix}/pooled"], name=f"{prefix}/concat", axis=1))
    return nodes


def _linear(prefix: str, *, source: str, target: str, layer: int) -> list[onnx.NodeProto]:
    inputs = [source, f"{prefix}/w{layer}", f"{prefix}/b{layer}"]
    return [helper.make_node("Gemm", inputs, [target], name=f"{prefix}/gemm{layer}")]
