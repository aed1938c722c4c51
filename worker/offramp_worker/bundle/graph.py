"""Cutting the backbone between tensors and attaching heads.

A stage is the part of the graph between two cut tensors (or the model's input, or its output), with the heads
of the ramps at its end in the same session, so that one call yields the features and the ramp's logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from offramp_core.bundle import BACKBONE_FILE
from offramp_core.errors import InvalidBundleError
from offramp_worker.bundle.heads import HeadNodes

FLOAT = onnx.TensorProto.FLOAT
Array = npt.NDArray[Any]


def input_name(model: onnx.ModelProto, file: str = BACKBONE_FILE) -> str:
    """Name of the one input of the model in ``file`` (initialisers listed as inputs left out)."""
    constants = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in constants]
    if len(names) != 1:
        raise InvalidBundleError(f"{file} has the inputs {names}; exactly one is supported")
    return str(names[0])


def output_name(model: onnx.ModelProto, file: str = BACKBONE_FILE) -> str:
    """Name of the one output, the logits, of the model in ``file``."""
    names = [value.name for value in model.graph.output]
    if len(names) != 1:
        raise InvalidBundleError(f"{file} has the outputs {names}; exactly one (the logits) is supported")
    return str(names[0])


def feature_shapes(
    model: onnx.ModelProto, tensors: Iterable[str], sample: Array, file: str = BACKBONE_FILE
) -> dict[str, tuple[int, ...]]:
    """Shape without batch axis of each named tensor, found by running ``sample`` [n, ...] through the graph.

    Running is surer than shape inference, which gives up on exported graphs with computed reshapes.
    """
    names = sorted(set(tensors))
    if not names:
        return {}
    produced = {name for node in model.graph.node for name in node.output}
    unknown = [name for name in names if name not in produced]
    if unknown:
        raise InvalidBundleError(f"{file} has no tensor {unknown[0]!r} that a ramp of manifest.json names")
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    known = {value.name for value in probe.graph.output}
    probe.graph.output.extend(helper.make_tensor_value_info(n, FLOAT, None) for n in names if n not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = session.run(names, {input_name(model): sample})
    return {name: tuple(int(d) for d in value.shape[1:]) for name, value in zip(names, values, strict=True)}


def tapped_model(model: onnx.ModelProto, heads: Sequence[HeadNodes]) -> onnx.ModelProto:
    """The whole backbone with all heads. Outputs: the model's logits, then each head's in the order given."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    _attach(tapped.graph, heads)
    return tapped


def stage_model(
    model: onnx.ModelProto,
    *,
    source: str | None,
    target: str | None,
    heads: Sequence[HeadNodes],
    shapes: dict[str, tuple[int, ...]],
) -> onnx.ModelProto:
    """The graph between two tensors.

    Parameters
    ----------
    source, target : str or None
        Tensors where the stage begins and ends; None is the model's input or output.
    heads : sequence
        Heads fed from ``target``; empty for the last stage.
    shapes : dict
        Shape without batch axis of each cut tensor (:func:`feature_shapes`).

    Returns
    -------
    ModelProto
        Outputs: ``target``, then each head's logits in the order given.

    Raises
    ------
    InvalidBundleError
        ``source`` does not separate the input from ``target``.
    """
    begin = source or input_name(model)
    end = target or output_name(model)
    nodes, used = _between(model.graph, begin=begin, end=end)
    entry = input_name(model)
    if source is not None and entry in used:
        raise InvalidBundleError(
            f"backbone.onnx: tensor {source!r} does not separate the input from {end!r}; it is no cut vertex"
        )
    graph = onnx.GraphProto(name=f"{begin}..{end}")
    graph.node.extend(nodes)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in used)
    graph.input.append(_value(model, begin, shapes))
    graph.output.append(_value(model, end, shapes))
    _attach(graph, heads)
    stage = onnx.ModelProto(ir_version=model.ir_version, producer_name="offramp")
    stage.opset_import.extend(model.opset_import)
    stage.functions.extend(model.functions)
    stage.graph.CopyFrom(graph)
    return stage


def input_heads_model(model: onnx.ModelProto, heads: Sequence[HeadNodes]) -> onnx.ModelProto:
    """Heads that read the model's input, without any backbone. Outputs: each head's logits in the order given."""
    alone = onnx.ModelProto(ir_version=model.ir_version, producer_name="offramp")
    alone.opset_import.extend(model.opset_import)
    alone.graph.name = "input"
    alone.graph.input.extend(value for value in model.graph.input if value.name == input_name(model))
    _attach(alone.graph, heads)
    return alone


def _between(graph: onnx.GraphProto, *, begin: str, end: str) -> tuple[list[onnx.NodeProto], set[str]]:
    """Nodes that ``end`` needs beyond ``begin``, in graph order, and every tensor name they read."""
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    wanted: set[int] = set()
    used: set[str] = set()
    stack = [end]
    while stack:
        name = stack.pop()
        if name == begin or name not in producer or producer[name] in wanted:
            continue
        wanted.add(producer[name])
        reads = _reads(graph.node[producer[name]])
        used |= reads
        stack.extend(reads)
    return [graph.node[i] for i in sorted(wanted)], used


def _reads(node: onnx.NodeProto) -> set[str]:
    """Tensors a node reads, with those its subgraphs (If, Loop) capture from outside."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for sub in (attribute.g, *attribute.graphs):
            for inner in sub.node:
                names |= _reads(inner)
    return names


def _value(model: onnx.ModelProto, name: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ValueInfoProto:
    for value in (*model.graph.input, *model.graph.output):
        if value.name == name:
            return value
    return helper.make_tensor_value_info(name, FLOAT, ["batch", *shapes[name]])


def _attach(graph: onnx.GraphProto, heads: Sequence[HeadNodes]) -> None:
    for head in heads:
        graph.node.extend(head.nodes)
        graph.initializer.extend(head.initializers)
        graph.output.append(helper.make_tensor_value_info(head.output, FLOAT, ["batch", None]))
