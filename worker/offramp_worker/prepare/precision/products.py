"""Matrix products with constant weights on integers, prepared so that they change few answers.

Each row of an activation (each token) has a range of its own. ONNX Runtime's ``quantize_dynamic`` takes one range for
the whole batch, which makes an answer depend on the neighbours, and one outlier coarsen all (decision 25). Weights have
seven bits (decision 16). What that costs in answers is lessened on calibration rows, for one more pass over each
activation (decision 57):

    smoothing   loud channels are scaled down and the weights that read them up
    one side    an activation that hardly goes below zero (behind GELU or ReLU) has all of its levels above its least
    value rounding    what rounding a weight changes is made up for by the weights that are rounded after it
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.dataflow import graph_steps
from offramp_worker.bundle.graph import tensor_values, with_outputs
from offramp_worker.bundle.lengths import pad_rows
from offramp_worker.devices import open_session

WEIGHT_LEVELS = 63  # seven bits
ROW_LEVELS, MIDDLE_LEVEL = 127, 128  # of an activation with two sides: 1 to 255, symmetric around 128
ONE_SIDED_LEVELS = 255
MOST_BELOW_ZERO = 0.25  # of the largest value, for one side
SMOOTHING = 0.5  # share of what is hard to round that goes from activations to weights
MOST_SCALED = 100.0  # a channel that calibration hardly saw may be loud later
SMALLEST = 1e-5  # of a channel's largest value; an unused one has no scale
SMALLEST_STEP = 1e-12  # of a row or column of zeros
DAMPING = 0.01  # of the mean moment
BLOCK = 128  # weights of a column that are rounded before those behind them hear of it
OPSET_OF_AXES_AS_INPUT = 18
_OWN = "offramp/int8"

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Single = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Activation:
    """What products read, over all calibration tokens: each channel's least and largest value [k], and ``moments`` [k,
    k], the mean of x xᵀ."""

    low: Single
    high: Single
    moments: Single


@dataclass(frozen=True, slots=True)
class Counting:
    """How an activation becomes levels: channels are divided by ``scale`` [k]; with one side, level 0 stands for
    ``floor`` [k] of the result."""

    scale: Single
    floor: Single | None


def integer_products(
    model: onnx.ModelProto, x: Array, spec: TensorSpec, *, exclude: Collection[str], threads: int
) -> onnx.ModelProto:
    """A copy in which products with constant matrices run on integers. Tensors between them keep their names and stay
    float32.

    Parameters
    ----------
    x : (n, ...)
        Calibration rows of the model's input.
    spec : TensorSpec
        The model's input.
    exclude : collection of str
        Names of nodes that stay as they are.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = {tensor.name: tensor for tensor in graph.initializer if len(tensor.dims) == 2}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants and node.name not in exclude:
            readers.setdefault(node.input[0], []).append(node)
    read = collect_activations(model, list(readers), x, spec, threads=threads)
    opset = next(entry.version for entry in copy.opset_import if entry.domain in ("", "ai.onnx"))
    instead: dict[str, list[onnx.NodeProto]] = {}
    for name, products in readers.items():
        weights = {node.input[1]: numpy_helper.to_array(constants[node.input[1]]) for node in products}
        counting = how_to_count(read[name], list(weights.values()))
        graph.initializer.extend(_activation_constants(name, counting))
        graph.initializer.extend(_weight_constants(name, weights, counting, read[name].moments))
        for node in products:
            instead[node.output[0]] = _integer_product(node, one_sided=counting.floor is not None)
        instead[products[0].output[0]][:0] = _levels(name, one_sided=counting.floor is not None, opset=opset)
    nodes = list(chain.from_iterable(instead.get(node.output[0], [node]) for node in graph.node))
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for step in graph_steps(graph) for name in step.inputs}
    kept = [tensor for tensor in (*graph.initializer, *_shared_constants()) if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return copy


def collect_activations(
    model: onnx.ModelProto, names: Sequence[str], x: Array, spec: TensorSpec, *, threads: int
) -> dict[str, Activation]:
    """What the tensors ``names`` (..., k) hold on rows ``x`` (n, ...). Rows run one by one, since padding is nothing to
    learn from."""
    session = open_session(with_outputs(model, names), threads=threads)
    found: dict[str, Activation] = {}
    tokens = dict.fromkeys(names, 0)
    for index in range(len(x)):
        row = pad_rows([x[index : index + 1]], spec)
        for name, value in tensor_values(session, names, row, entry=spec.name).items():
            rows = value.reshape(-1, value.shape[-1])
            tokens[name] += len(rows)
            found[name] = _seen(rows, found.get(name))
    return {name: Activation(a.low, a.high, a.moments / np.float32(tokens[name])) for name, a in found.items()}


def _seen(rows: Single, before: Activation | None) -> Activation:
    low, high, moments = rows.min(axis=0), rows.max(axis=0), rows.T @ rows
    if before is None:
        return Activation(low, high, moments)
    return Activation(np.minimum(low, before.low), np.maximum(high, before.high), moments + before.moments)


def how_to_count(read: Activation, weights: Sequence[Array]) -> Counting:
    """Scales under which an activation and the weights ((k, m) each) that read it are about equally hard to round, and
    on which sides its levels lie.

    Source: Xiao et al. (2023), "SmoothQuant", equation 4. Its scales are folded into the layer before; here that
    layer's output is also read by the residual connection, so they are a multiplication.
    """
    loudest = np.maximum(np.maximum(-read.low, read.high), SMALLEST)
    heaviest = np.maximum(np.max([np.abs(w).max(axis=1) for w in weights], axis=0), SMALLEST)
    log = SMOOTHING * np.log(loudest) - (1 - SMOOTHING) * np.log(heaviest)
    scale = np.exp(log - log.mean()).clip(1 / MOST_SCALED, MOST_SCALED).astype(np.float32)
    floor = min(float(read.low.min()), 0.0) / scale
    one_sided = -floor.min() <= MOST_BELOW_ZERO * (read.high / scale).max()
    return Counting(scale, floor if one_sided else None)


def round_weights(
    weights: Array, moments: Array, *, levels: int = WEIGHT_LEVELS
) -> tuple[npt.NDArray[np.int8], Single]:
    """Levels (k, m) of weights in seven bits, at most ``levels`` in size, and what a level is worth in each column
    (m,).

    Weights are rounded one after the other, those that read the loudest channels first; those not yet rounded make up
    for the error, so that products with inputs of these second ``moments`` (k, k) change least. To the nearest level
    where the moments are zero or not finite.

    Source: Frantar et al. (2023), "GPTQ", section 3 (the order is the one of its published code, ``act-order``).
    """
    values = weights.astype(np.float64)
    step = np.maximum(np.abs(values).max(axis=0) / levels, SMALLEST_STEP)
    diagonal = np.diag(moments).astype(np.float64)
    damping = DAMPING * float(diagonal.mean())
    if not (np.isfinite(moments).all() and damping > 0):
        return _nearest(values, step, levels).astype(np.int8), step.astype(np.float32)
    order = np.argsort(-diagonal, kind="stable")
    values, rounded = values[order], np.empty_like(values)
    damped = moments[np.ix_(order, order)].astype(np.float64) + damping * np.eye(len(order))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = np.empty((end - start, values.shape[1]))
        for i in range(start, end):
            rounded[i] = _nearest(values[i], step, levels)
            errors[i - start] = (values[i] - rounded[i] * step) / upper[i, i]
            values[i + 1 : end] -= np.outer(upper[i, i + 1 : end], errors[i - start])
        values[end:] -= upper[start:end, end:].T @ errors
    return rounded[np.argsort(order)].astype(np.int8), step.astype(np.float32)


def _nearest(values: Floats, step: Floats, levels: int) -> Floats:
    return np.rint(values / step).clip(-levels, levels)


def _shared_constants() -> list[onnx.TensorProto]:
    values: Mapping[str, Array] = {
        "axis": np.array([-1], dtype=np.int64),
        "two-sided": np.array(1 / ROW_LEVELS, dtype=np.float32),
        "one-sided": np.array(1 / ONE_SIDED_LEVELS, dtype=np.float32),
        "least": np.array(SMALLEST_STEP, dtype=np.float32),
        "unit": np.array(1, dtype=np.float32),
        "middle": np.array(MIDDLE_LEVEL, dtype=np.uint8),
        "zero": np.array(0, dtype=np.uint8),
    }
    return [numpy_helper.from_array(value, f"{_OWN}/{name}") for name, value in values.items()]


def _activation_constants(name: str, counting: Counting) -> list[onnx.TensorProto]:
    values = {"scale": 1 / counting.scale} | ({} if counting.floor is None else {"floor": counting.floor})
    return [numpy_helper.from_array(value.astype(np.float32), f"{name}/{part}") for part, value in values.items()]


def _weight_constants(
    name: str, weights: Mapping[str, Array], counting: Counting, moments: Single
) -> list[onnx.TensorProto]:
    """Of all weights that read one activation, rounded together: a column never hears of another, and the moments are
    theirs in common."""
    scale, made = counting.scale, []
    levels, step = round_weights(np.hstack(list(weights.values())) * scale[:, None], moments / scale[:, None] / scale)
    ends = np.cumsum([values.shape[1] for values in weights.values()])[:-1]
    for weight, of, worth in zip(weights, np.hsplit(levels, ends), np.split(step, ends), strict=True):
        read = f"{name}/{weight}"
        made += [numpy_helper.from_array(of, f"{read}/levels"), numpy_helper.from_array(worth, f"{read}/step")]
        if counting.floor is not None:
            below = counting.floor.astype(np.float64) @ (of * worth.astype(np.float64))
            made.append(numpy_helper.from_array(below.astype(np.float32), f"{read}/below"))
    return made


def _levels(name: str, *, one_sided: bool, opset: int) -> list[onnx.NodeProto]:
    """A tensor (..., k) as levels, and what a level is worth in each row (..., 1)."""
    scaled, size, most, step = (f"{name}/{part}" for part in ("scaled", "size", "most", "step"))
    largest = (
        helper.make_node("ReduceMax", [size, f"{_OWN}/axis"], [most], keepdims=1)
        if opset >= OPSET_OF_AXES_AS_INPUT
        else helper.make_node("ReduceMax", [size], [most], axes=[-1], keepdims=1)
    )
    measured = (
        helper.make_node("Sub", [scaled, f"{name}/floor"], [size])
        if one_sided
        else helper.make_node("Abs", [scaled], [size])
    )
    side, zero = ("one-sided", "zero") if one_sided else ("two-sided", "middle")
    return [
        helper.make_node("Mul", [name, f"{name}/scale"], [scaled]),
        measured,
        largest,
        helper.make_node("Mul", [most, f"{_OWN}/{side}"], [f"{name}/any-step"]),
        helper.make_node("Max", [f"{name}/any-step", f"{_OWN}/least"], [step]),
        helper.make_node("Div", [size if one_sided else scaled, step], [f"{name}/steps"]),
        helper.make_node("QuantizeLinear", [f"{name}/steps", f"{_OWN}/unit", f"{_OWN}/{zero}"], [f"{name}/levels"]),
    ]


def _integer_product(node: onnx.NodeProto, *, one_sided: bool) -> list[onnx.NodeProto]:
    """The product of levels, times what they are worth."""
    (x, weight), y = node.input, node.output[0]
    read = f"{x}/{weight}"
    zero = "zero" if one_sided else "middle"
    nodes = [
        helper.make_node("MatMulInteger", [f"{x}/levels", f"{read}/levels", f"{_OWN}/{zero}"], [f"{y}/sum"]),
        helper.make_node("Cast", [f"{y}/sum"], [f"{y}/float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", [f"{y}/float", f"{x}/step"], [f"{y}/rows"]),
        helper.make_node("Mul", [f"{y}/rows", f"{read}/step"], [f"{y}/above" if one_sided else y]),
    ]
    if one_sided:
        nodes.append(helper.make_node("Add", [f"{y}/above", f"{read}/below"], [y]))
    return nodes
