"""Layers with constant weights, as matrices: what low rank and pruning change, and what rows of the data say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.graph import tensor_values, with_outputs
from offramp_worker.bundle.lengths import by_length, pad_rows
from offramp_worker.devices import open_session
from offramp_worker.prepare.precision.calibration import MAX_CHUNK_ROWS, rows_at_once
from offramp_worker.prepare.precision.convolutions import MOST_PATCHES, is_plain, patches

WIDEST = 2_304  # inputs of a matrix whose moments are taken; they take room in its square
DAMPING = 1e-3  # of the mean moment

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, or a product with a constant, as ``matrix`` (inputs, outputs); an input of a convolution is one of
    a channel's kernel."""

    node: onnx.NodeProto
    weight: str
    matrix: Floats
    shape: tuple[int, ...]

    @property
    def is_convolution(self) -> bool:
        return str(self.node.op_type) == "Conv"

    @property
    def channels(self) -> int:
        """Of what it reads."""
        return self.shape[1] if self.is_convolution else len(self.matrix)

    @property
    def transposed(self) -> bool:
        """Whether the weight lies as (outputs, inputs)."""
        return self.is_convolution or any(a.name == "transB" and a.i for a in self.node.attribute)

    def weights_of(self, matrix: Floats) -> Array:
        """A matrix of other sizes, laid out as the node takes it."""
        laid = matrix.T if self.transposed else matrix
        if self.is_convolution:
            laid = laid.reshape(len(laid), -1, *self.shape[2:])
        return np.ascontiguousarray(laid, dtype=np.float32)


def layers_of(model: onnx.ModelProto) -> dict[str, Layer]:
    """The layers of a graph by the names of their nodes; grouped and dilated convolutions are left out."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type not in ("Conv", "MatMul", "Gemm") or node.input[1] not in weights:
            continue
        value = numpy_helper.to_array(weights[node.input[1]])
        if value.dtype != np.float32 or not (
            is_plain(node, value) if node.op_type == "Conv" else _is_product(node, value)
        ):
            continue
        flat = value.reshape(len(value), -1).T if node.op_type == "Conv" else value
        matrix = flat.T if any(a.name == "transB" and a.i for a in node.attribute) else flat
        found[node.name] = Layer(node, node.input[1], matrix.astype(np.float64), value.shape)
    return found


def _is_product(node: onnx.NodeProto, weight: Array) -> bool:
    of = {a.name: a for a in node.attribute}
    plain = ("transA" not in of or of["transA"].i == 0) and ("alpha" not in of or of["alpha"].f == 1.0)
    return weight.ndim == 2 and plain


def input_moments(
    model: onnx.ModelProto, layers: Mapping[str, Layer], x: Array, spec: TensorSpec, *, threads: int
) -> dict[str, Floats]:
    """The mean of x xᵀ (inputs, inputs) of what each layer reads, from rows ``x`` of the input ``spec``; very wide
    layers are left out."""
    read = {name: layer for name, layer in layers.items() if len(layer.matrix) <= WIDEST}
    tensors = list(dict.fromkeys(layer.node.input[0] for layer in read.values() if layer.node.input[0] != spec.name))
    session = open_session(with_outputs(model, tensors), threads=threads)
    step: int = min(
        MAX_CHUNK_ROWS, rows_at_once(tensor_values(session, tensors, pad_rows([x[:1]], spec), entry=spec.name))
    )
    sums = {name: np.zeros((len(layer.matrix),) * 2) for name, layer in read.items()}
    counts: dict[str, int] = {}
    for chunk in by_length(x, spec, size=step):
        rows = pad_rows([x[chunk]], spec)
        values = {**tensor_values(session, tensors, rows, entry=spec.name), spec.name: rows}
        share = MOST_PATCHES * len(chunk) // len(x)
        for name, layer in read.items():
            seen = _columns(values[layer.node.input[0]], layer, most=share)
            sums[name] += seen.T @ seen
            counts[name] = counts.get(name, 0) + len(seen)
    return {name: total / counts[name] for name, total in sums.items()}


def _columns(value: Array, layer: Layer, *, most: int) -> Array:
    if layer.is_convolution:
        return patches(value, layer.node, layer.shape[2:], most=most)
    return np.ascontiguousarray(value.reshape(-1, value.shape[-1]), dtype=np.float32)


def damped(moments: Floats) -> Floats:
    """Moments whose inverse exists."""
    level = DAMPING * max(float(np.trace(moments)) / len(moments), 1e-30)
    return moments + level * np.eye(len(moments))


def rounded_up(number: float, *, to: int) -> int:
    """The next multiple."""
    return int(-(-number // to) * to)


def set_weights(graph: onnx.GraphProto, values: Mapping[str, Array]) -> None:
    """Put weights of other sizes in the place of those of the same names."""
    for tensor in graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy to edit, without notes of shapes, which an edit makes stale."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    return copy


def without_unused(model: onnx.ModelProto, keep: Sequence[str] = ()) -> onnx.ModelProto:
    """Drop nodes and weights that nothing needs any more, in place."""
    graph = model.graph
    needed = {value.name for value in graph.output} | set(keep)
    nodes = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            nodes.append(node)
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(tensors)
    return model
