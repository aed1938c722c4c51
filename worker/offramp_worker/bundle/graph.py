"""Cutting the backbone between tensors and attaching heads.

A stage is the part of the graph between two cut tensors (or the model's input, or its output), with the heads
of the ramps at its end in the same session, so that one call yields the features and the ramp's logits. A stage may
read the model's input besides its source, for what follows cheaply from it: masks
(:mod:`offramp_worker.bundle.dataflow`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from offramp_core.bundle import BACKBONE_FILE
from offramp_core.errors import InvalidBundleError
from offramp_worker.bundle.dataflow import captured, dependent_tensors, free_tensors, graph_steps
from offramp_worker.bundle.heads import HeadNodes
from offramp_worker.bundle.tensors import closed_options

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


def feature_size(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of a tensor: a map (channels, height, width), tokens (tokens, channels) in one line,
    or a vector.

    >>> feature_size((64, 8, 8)), feature_size((-1, 384)), feature_size((128,))
    ((64, 8, 8), (384, 1, -1), (128, 1, 1))
    """
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return shape[-1], 1, shape[0] if len(shape) == 2 else 1


def feature_shapes(
    model: onnx.ModelProto, tensors: Iterable[str], sample: Array, file: str = BACKBONE_FILE
) -> dict[str, tuple[int, ...]]:
    """Shape without batch axis of each named tensor, found by running ``sample`` [n, ...] through the graph.

    Running is surer than shape inference, which gives up on exported graphs with computed reshapes. Where the length of
    token rows may vary, a shorter sample is run too, and axes that change with it are -1.

    Raises
    ------
    InvalidBundleError
        There is no such tensor, or its first axis does not count rows, along which a worker drops them.
    """
    names = sorted(set(tensors))
    if not names:
        return {}
    known = {name for node in model.graph.node for name in node.output} | {input_name(model)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidBundleError(f"{file} has no tensor {unknown[0]!r} that a ramp of manifest.json names")
    values = _shapes_of(model, names, sample, file)
    if not _length_varies(model) or sample.shape[1] < 2:
        return values
    shorter = _shapes_of(model, names, np.ascontiguousarray(sample[:, : (sample.shape[1] + 1) // 2]), file)
    return {
        name: tuple(a if a == b else -1 for a, b in zip(shape, shorter[name], strict=True))
        for name, shape in values.items()
    }


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy that also answers the float32 tensors ``names``; inputs and outputs among them stay what they are."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    known = {value.name for value in (*probe.graph.output, *probe.graph.input)}
    probe.graph.output.extend(helper.make_tensor_value_info(name, FLOAT, None) for name in names if name not in known)
    return probe


def tensor_values(session: Any, names: Sequence[str], rows: Array, *, entry: str) -> dict[str, Array]:
    """What a session of :func:`with_outputs` says of the tensors ``names`` on rows of the model's input ``entry``,
    which may be among them."""
    computed = [name for name in names if name != entry]
    values = session.run(computed, {entry: rows}) if computed else []
    found = {entry: rows, **dict(zip(computed, values, strict=True))}
    return {name: found[name] for name in names}


def plain_session(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session that runs a graph as it is written, to look into it."""
    options = closed_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _shapes_of(model: onnx.ModelProto, names: Sequence[str], sample: Array, file: str) -> dict[str, tuple[int, ...]]:
    session = plain_session(with_outputs(model, names))
    values = tensor_values(session, names, sample, entry=input_name(model))
    for name, value in values.items():
        if value.shape[:1] != sample.shape[:1]:
            raise InvalidBundleError(
                f"{file}: tensor {name!r} is {list(value.shape)} for a batch of {len(sample)}; the first axis of what "
                "a ramp reads must count rows"
            )
    return {name: tuple(int(d) for d in value.shape[1:]) for name, value in values.items()}


def _length_varies(model: onnx.ModelProto) -> bool:
    """Whether rows are tokens whose number the graph leaves open."""
    (value,) = [v for v in model.graph.input if v.name == input_name(model)]
    dims = value.type.tensor_type.shape.dim
    return (
        value.type.tensor_type.elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
        and len(dims) == 2
        and not dims[1].HasField("dim_value")
    )


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
        Inputs: ``source``, and the model's input where the stage makes something cheap of it. Outputs: ``target``, then
        each head's logits in the order given.

    Raises
    ------
    InvalidBundleError
        ``source`` does not separate the input from ``target``.
    """
    entry = input_name(model)
    begin = source or entry
    end = target or output_name(model)
    read = [name for head in heads for name in _read_by_head(head) if name != end]
    nodes, used = between(model.graph, begin=begin, ends=[end, *read])
    if source is not None:
        check_separates(model, begin=begin, end=end, used=used)
    graph = onnx.GraphProto(name=f"{begin}..{end}")
    graph.node.extend(nodes)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in used)
    graph.input.append(_value(model, begin, shapes))
    if entry != begin and entry in used:
        graph.input.append(_value(model, entry, shapes))
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


def between(graph: onnx.GraphProto, *, begin: str, ends: Sequence[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Nodes that ``ends`` need beyond ``begin``, in graph order, and every tensor name they read."""
    producer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    wanted: set[int] = set()
    used: set[str] = set(ends)
    stack = list(ends)
    while stack:
        name = stack.pop()
        if name == begin or name not in producer or producer[name] in wanted:
            continue
        wanted.add(producer[name])
        node = graph.node[producer[name]]
        reads = {name for name in node.input if name} | set(captured(node))
        used |= reads
        stack.extend(reads)
    return [graph.node[i] for i in sorted(wanted)], used


def check_separates(model: onnx.ModelProto, *, begin: str, end: str, used: set[str]) -> None:
    """Refuse a stage that would have to compute anything costly of the model's input besides what comes through
    ``begin``."""
    steps, entry = graph_steps(model.graph), input_name(model)
    behind = dependent_tensors(steps, source=begin)
    around = (used & dependent_tensors(steps, source=entry)) - behind - free_tensors(steps, source=entry)
    if around or end not in behind:
        raise InvalidBundleError(
            f"backbone.onnx: tensor {begin!r} does not separate the input from {end!r}; it is no cut vertex"
        )


def _read_by_head(head: HeadNodes) -> set[str]:
    """Tensors of the backbone that a head reads."""
    own = {name for node in head.nodes for name in node.output} | {tensor.name for tensor in head.initializers}
    return {name for node in head.nodes for name in node.input if name} - own


def _value(model: onnx.ModelProto, name: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ValueInfoProto:
    for value in (*model.graph.input, *model.graph.output):
        if value.name == name:
            return value
    dims = [f"{name}.{axis}" if size < 0 else size for axis, size in enumerate(shapes[name], start=1)]
    return helper.make_tensor_value_info(name, FLOAT, ["batch", *dims])


def _attach(graph: onnx.GraphProto, heads: Sequence[HeadNodes]) -> None:
    for head in heads:
        graph.node.extend(head.nodes)
        graph.initializer.extend(head.initializers)
        graph.output.append(helper.make_tensor_value_info(head.output, FLOAT, ["batch", None]))
