"""Models with float16 inside, computed in float32.

Heads read float32, and ONNX Runtime has float16 kernels for few operators on CPUs: it puts casts around the others, and
takes pairs of them out again where it finds any, so that a graph's answers would change with every tensor that somebody
reads. Computed in float32 throughout, with the same weights, they do not. What clients send stays as it is: the graph
begins with a cast of its input.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

HALF, SINGLE = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
HALF_RTOL = 2e-2  # of the largest logit: each operation rounds to eleven bits, and many follow upon each other
TYPE_ATTRIBUTES = ("to", "dtype")


def has_halves(model: onnx.ModelProto) -> bool:
    """Whether anything of a model is float16."""
    return any(
        any(value.type.tensor_type.elem_type == HALF for value in (*graph.input, *graph.output))
        or any(tensor.data_type == HALF for tensor in graph.initializer)
        or _any_half(graph.node)
        for graph in _graphs(model.graph)
    ) or any(_any_half(function.node) for function in model.functions)


def in_single_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes in float32 what the model computes in float16; an input of float16 stays one."""
    single = onnx.ModelProto()
    single.CopyFrom(model)
    graph = single.graph
    constants = {tensor.name for tensor in graph.initializer}
    halves = [v for v in graph.input if v.type.tensor_type.elem_type == HALF and v.name not in constants]
    for inner in _graphs(graph):
        _widen(inner)
    for function in single.functions:
        _widen_nodes(function.node)
    for value in halves:
        wide = f"{value.name}/float32"
        read_instead(graph, value.name, wide)
        value.type.tensor_type.elem_type = HALF
        graph.node.insert(0, helper.make_node("Cast", [value.name], [wide], name=wide, to=SINGLE))
    return single


def read_instead(graph: onnx.GraphProto, name: str, other: str) -> None:
    """Let all nodes of a graph, and of those inside it, read ``other`` for ``name``."""
    for inner in _graphs(graph):
        for node in inner.node:
            node.input[:] = [other if read == name else read for read in node.input]


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _graphs(inner)


def _any_half(nodes: Iterator[onnx.NodeProto]) -> bool:
    return any(
        (attribute.name in TYPE_ATTRIBUTES and attribute.i == HALF)
        or (attribute.HasField("t") and attribute.t.data_type == HALF)
        for node in nodes
        for attribute in node.attribute
    )


def _widen(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == HALF:
            value.type.tensor_type.elem_type = SINGLE
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterator[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in TYPE_ATTRIBUTES and attribute.i == HALF:
                attribute.i = SINGLE
            elif attribute.HasField("t"):
                _widen_tensor(attribute.t)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == HALF:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
