"""Convolutions on integers, prepared so that they change few answers (decision 79).

rounding        what rounding a weight changes is made up for by the weights that are rounded after it, as
in :mod:`.products` even channels   a convolution whose result is added in float has all levels in each of its channels:
the scales of the channels go into its
                weights, which costs these nothing, and out again in one multiplication before the addition
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.graph import tensor_values, with_outputs
from offramp_worker.devices import open_session
from offramp_worker.prepare.precision.calibration import rows_at_once
from offramp_worker.prepare.precision.products import round_weights

STATIC_LEVELS = 64  # of seven bits, as ONNX Runtime's static quantizer counts them
MOST_PATCHES = 16_384  # of an activation, for its moments: many times the weights of a column
LONGEST_COLUMN = 4_608  # of weights that are rounded together; it takes time in its third power
SCALING = "/scaled-back"  # how the name of a node ends that takes a convolution's scales out again
QUIETEST = 1e-3  # of the loudest channel's range

Array = npt.NDArray[Any]
Single = npt.NDArray[np.float32]
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Studied:
    """What calibration rows say: ``levels`` [out, in, ...] by the name of a weight, and each output channel's least and
    largest value by tensor."""

    levels: Mapping[str, npt.NDArray[np.int8]]
    channels: Mapping[str, tuple[Single, Single]]


def study_convolutions(model: onnx.ModelProto, x: Array, spec: TensorSpec, *, threads: int) -> Studied:
    """Levels for the weights of plain convolutions over images, and the ranges of what they give, from rows ``x`` (n,
    ...) of the input ``spec``.

    Grouped, dilated and very large ones round to the nearest level.
    """
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [n for n in model.graph.node if n.op_type == "Conv" and n.input[1] in weights]
    plain = [node for node in nodes if is_plain(node, weights[node.input[1]])]
    read = dict.fromkeys([*(n.input[0] for n in plain if n.input[0] != spec.name), *(n.output[0] for n in nodes)])
    if not read:
        return Studied({}, {})
    session = open_session(with_outputs(model, list(read)), threads=threads)
    moments: dict[str, Single] = {}
    channels: dict[str, tuple[Single, Single]] = {}
    step = rows_at_once(tensor_values(session, list(read), x[:1], entry=spec.name))
    for start in range(0, len(x), step):
        rows = x[start : start + step]
        values = {**tensor_values(session, list(read), rows, entry=spec.name), spec.name: rows}
        for node in nodes:
            axes = (0, *range(2, values[node.output[0]].ndim))
            low, high = values[node.output[0]].min(axis=axes), values[node.output[0]].max(axis=axes)
            before = channels.get(node.output[0], (low, high))
            channels[node.output[0]] = np.minimum(low, before[0]), np.maximum(high, before[1])
        for node in plain:
            seen = patches(
                values[node.input[0]], node, weights[node.input[1]].shape[2:], most=MOST_PATCHES * len(rows) // len(x)
            )
            moments[node.name] = moments.get(node.name, np.float32(0)) + seen.T @ seen
    levels = {}
    for node in plain:
        weight = weights[node.input[1]]
        rounded, _ = round_weights(weight.reshape(len(weight), -1).T, moments[node.name], levels=STATIC_LEVELS)
        levels[node.input[1]] = rounded.T.reshape(weight.shape)
    return Studied(levels, channels)


def patches(x: Single, node: onnx.NodeProto, kernel: tuple[int, ...], *, most: int) -> Single:
    """What a convolution's columns of weights read of images (n, channels, height, width): (patches, channels *
    kernel), about ``most`` at most."""
    of = {a.name: list(a.ints) for a in node.attribute}
    (top, left, bottom, right), strides = of.get("pads", [0] * 4), of.get("strides", [1, 1])
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))[:, :, :: strides[0], :: strides[1]]
    thinned = max(1, math.isqrt(math.ceil(len(x) * windows.shape[2] * windows.shape[3] / max(1, most))))
    some = windows[:, :, ::thinned, ::thinned]
    return np.ascontiguousarray(some.transpose(0, 2, 3, 1, 4, 5)).reshape(-1, x.shape[1] * math.prod(kernel))


def is_plain(node: onnx.NodeProto, weight: Array) -> bool:
    of = {attribute.name: attribute for attribute in node.attribute}
    grouped = "group" in of and of["group"].i != 1
    dilated = "dilations" in of and set(of["dilations"].ints) != {1}
    padded_by_rule = "auto_pad" in of and of["auto_pad"].s not in (b"", b"NOTSET")
    return weight.ndim == 4 and weight[0].size <= LONGEST_COLUMN and not (grouped or dilated or padded_by_rule)


def with_levels(model: onnx.ModelProto, levels: Mapping[str, npt.NDArray[np.int8]]) -> None:
    """Put levels in the place of those that the static quantizer rounded to; the step between two of them stays."""
    for tensor in model.graph.initializer:
        weight = tensor.name.removesuffix("_quantized")
        if weight != tensor.name and weight in levels:
            nearest, ours = numpy_helper.to_array(tensor), levels[weight]
            # The quantizer widens the steps of a channel whose bias would not fit into 32 bits; levels of other steps
            # mean nothing there.
            loudest = np.abs(nearest.astype(np.int16)).reshape(len(nearest), -1).max(axis=1)
            same = (loudest == STATIC_LEVELS).reshape(-1, *[1] * (nearest.ndim - 1))
            tensor.CopyFrom(numpy_helper.from_array(np.where(same, ours, nearest), tensor.name))


def with_even_channels(
    model: onnx.ModelProto, floats: Collection[str], channels: Mapping[str, tuple[Single, Single]]
) -> tuple[onnx.ModelProto, dict[str, Range]]:
    """A copy in which convolutions that only additions among the nodes ``floats`` read give channels of one range; the
    ranges of their new outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    ranges: dict[str, Range] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        result = node.output[0]
        even = (
            node.op_type == "Conv"
            and node.name not in floats
            and result in channels
            and result not in outputs
            and result in readers
            and all(reader.op_type == "Add" and reader.name in floats for reader in readers[result])
            and all(name in constants and len(readers[name]) == 1 for name in node.input[1:] if name)
        )
        if even:
            low, high = np.minimum(channels[result][0], 0), np.maximum(channels[result][1], 0)
            scale = (high - low) / max(float((high - low).max()), np.finfo(np.float32).tiny)
            scale = np.maximum(scale, QUIETEST).astype(np.float32)
            for name in (name for name in node.input[1:] if name):
                value = numpy_helper.to_array(constants[name])
                constants[name].CopyFrom(
                    numpy_helper.from_array(value / scale.reshape(-1, *[1] * (value.ndim - 1)), name)
                )
            node.output[0] = f"{result}/even"
            ranges[node.output[0]] = float((low / scale).min()), float((high / scale).max())
            rank = len(numpy_helper.to_array(constants[node.input[1]]).shape)
            graph.initializer.append(
                numpy_helper.from_array(scale.reshape(1, -1, *[1] * (rank - 2)), f"{result}/scale")
            )
            nodes.append(
                helper.make_node("Mul", [node.output[0], f"{result}/scale"], [result], name=f"{node.name}{SCALING}")
            )
    ordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(ordered)
    return copy, ranges


def add_channels_last(graph: onnx.GraphProto, name: str, *, readers: Collection[str]) -> None:
    """Let the nodes ``readers``, by name, read a tensor that was channels last for a moment: the same values, in the
    layout that convolutions on integers have.

    ONNX Runtime moves a change of layout along the additions that follow to where it meets its inverse. A float
    convolution has its channels first, so without this every addition behind it has one change of layout, or two, for
    the results of integers. The flat tensor in the middle keeps the two changes from being taken for nothing at once.
    """
    last, flat, rows = f"{name}/channels-last", f"{name}/flat", f"{name}/rows"
    nodes = list(graph.node)
    at = next(index for index, node in enumerate(nodes) if name in node.output)
    for node in nodes:
        if node.name in readers:
            node.input[:] = [f"{name}/again" if read == name else read for read in node.input]
    graph.initializer.append(numpy_helper.from_array(np.array([0, -1], dtype=np.int64), f"{name}/one-row"))
    nodes[at + 1 : at + 1] = [
        helper.make_node("Transpose", [name], [last], name=last, perm=[0, 2, 3, 1]),
        helper.make_node("Shape", [last], [f"{name}/shape"], name=f"{name}/shape"),
        helper.make_node("Reshape", [last, f"{name}/one-row"], [flat], name=flat),
        helper.make_node("Reshape", [flat, f"{name}/shape"], [rows], name=rows),
        helper.make_node("Transpose", [rows], [f"{name}/again"], name=f"{name}/again", perm=[0, 3, 1, 2]),
    ]
    ordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(ordered)
