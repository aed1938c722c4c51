"""Which axis of a tensor holds its channels, told by the operators around it.

A convolution takes channels on axis 1, a layer norm or a product with a matrix of weights on the last axis; from a
tensor such operators are looked for in both directions, through whatever keeps the axes apart: element-wise arithmetic,
transpositions, reshapes that merge or split nothing of it. The operators that read a tensor decide. Those that made it
are asked where no reader says anything, and must not contradict it. Readers that disagree leave it open: a network of
products along both axes has no channels to pool over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp_worker.bundle.dataflow import captured, dependent_tensors, graph_steps

Shape = tuple[int, ...]
Axes = tuple[frozenset[int], ...]  # for each axis of a tensor, the axes of the one that is asked about that lie in it
Relation = Axes  # for each axis of an output, the axes of an input that lie in it

SECOND = frozenset(
    {
        "AveragePool",
        "BatchNormalization",
        "Conv",
        "ConvInteger",
        "ConvTranspose",
        "DeformConv",
        "DepthToSpace",
        "FusedConv",
        "GlobalAveragePool",
        "GlobalLpPool",
        "GlobalMaxPool",
        "GroupNormalization",
        "InstanceNormalization",
        "LRN",
        "LpPool",
        "MaxPool",
        "QLinearAveragePool",
        "QLinearConv",
        "QLinearGlobalAveragePool",
        "SpaceToDepth",
    }
)
NORMS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
# Products with a matrix, and which of their inputs are the factors.
PRODUCTS = {
    "DynamicQuantizeMatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "MatMul": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "MatMulNBits": (0, 1),
    "QLinearMatMul": (0, 3),
}
RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
WITH_A_VECTOR = frozenset({"Add", "BiasGelu", "Div", "Mul", "PRelu", "Pow", "Sub"})
REDUCTIONS = frozenset(
    {
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    }
)
RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
# Axes stay what they are, though their sizes may change: those of all inputs, or of the first one.
JOINING = (
    WITH_A_VECTOR | NORMS | frozenset({"Concat", "Max", "Mean", "Min", "QLinearAdd", "QLinearMul", "Sum", "Where"})
)
KEEPING = JOINING | frozenset(
    {
        "Abs",
        "Cast",
        "Ceil",
        "Celu",
        "Clip",
        "DequantizeLinear",
        "Dropout",
        "Elu",
        "Erf",
        "Exp",
        "Expand",
        "FastGelu",
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Log",
        "LogSoftmax",
        "LpNormalization",
        "MeanVarianceNormalization",
        "Mish",
        "Neg",
        "Pad",
        "QuantizeLinear",
        "QuickGelu",
        "Reciprocal",
        "Relu",
        "Resize",
        "Round",
        "Selu",
        "Sigmoid",
        "Sign",
        "Slice",
        "Softmax",
        "Softplus",
        "Softsign",
        "Split",
        "Sqrt",
        "Tanh",
        "ThresholdedRelu",
        "Upsample",
    }
)


@dataclass(frozen=True, slots=True)
class ChannelAxes:
    """What an operator says of its input number ``index`` and of its first output: the axes that hold channels."""

    read: Mapping[int, frozenset[int]] = field(default_factory=dict)
    made: frozenset[int] = frozenset()


class Channels:
    """A graph whose tensors have known ``shapes``; ``source`` is its input."""

    def __init__(self, graph: onnx.GraphProto, shapes: Mapping[str, Shape], *, source: str) -> None:
        self._constants = {t.name: t for t in graph.initializer}
        self._constants |= {
            n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
        }
        self._shapes = {name: tuple(t.dims) for name, t in self._constants.items()} | dict(shapes)
        self._dependent = dependent_tensors(graph_steps(graph), source=source)
        self._maker = {name: node for node in graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys((*node.input, *captured(node))):
                self._readers[name].append(node)

    def axis(self, tensor: str, *, rows: int) -> int | str:
        """The axis that holds the channels of a tensor whose axis ``rows`` counts rows, or why none can be told."""
        readers = set(self._votes(tensor, forward=True)) - {rows}
        makers = set(self._votes(tensor, forward=False)) - {rows}
        if len(readers) == 1 and (not makers or readers <= makers):
            return readers.pop()
        if not readers and len(makers) == 1:
            return makers.pop()
        if not readers and not makers:
            return "no operator around it tells which axis holds its channels"
        candidates = sorted(readers | makers)
        return f"operators around it disagree on which of its axes {', '.join(map(str, candidates))} holds its channels"

    def _votes(self, tensor: str, *, forward: bool) -> Iterator[int]:
        """The axes of ``tensor`` that the nearest operators on each way take for channels."""
        shape = self._shapes.get(tensor)
        if shape is None:
            return
        start: Axes = tuple(frozenset({axis}) for axis in range(len(shape)))
        waiting, seen = [(tensor, start)], {(tensor, start)}
        while waiting:
            name, axes = waiting.pop()
            for vote, onwards in self._steps(name, axes, forward=forward):
                if vote is not None:
                    yield vote
                for step in onwards:
                    if step not in seen and any(step[1]):
                        seen.add(step)
                        waiting.append(step)

    def _steps(self, name: str, axes: Axes, *, forward: bool) -> Iterator[tuple[int | None, list[tuple[str, Axes]]]]:
        """Per operator next to a tensor: its vote, or where to go on."""
        if not forward:
            node = self._maker.get(name)
            if node is None:
                return
            known = self._channel_axes(node)
            if known.made and name == node.output[0]:
                yield self._resolved(known.made, axes, self._shapes[name]), []
            elif not known.read:
                sources = [i for i, source in enumerate(node.input) if source in self._dependent]
                yield None, list(self._backwards(node, sources, name, axes))
            return
        for node in self._readers[name]:
            known = self._channel_axes(node)
            places = [i for i, source in enumerate(node.input) if source == name]
            votes = [self._resolved(known.read[i], axes, self._shapes[name]) for i in places if i in known.read]
            for vote in votes:
                yield vote, []
            if not votes and not known.made:
                yield None, list(self._onwards(node, places, axes))

    def _onwards(self, node: onnx.NodeProto, places: Iterable[int], axes: Axes) -> Iterator[tuple[str, Axes]]:
        for target in filter(None, node.output):
            for place in places:
                relation = self._relation(node, place, target)
                if relation is not None:
                    yield target, tuple(frozenset().union(*(axes[axis] for axis in part)) for part in relation)

    def _backwards(
        self, node: onnx.NodeProto, places: Iterable[int], target: str, axes: Axes
    ) -> Iterator[tuple[str, Axes]]:
        for place in places:
            relation = self._relation(node, place, target)
            if relation is not None:
                rank = len(self._shapes[node.input[place]])
                inverse = ((axes[o] for o, part in enumerate(relation) if axis in part) for axis in range(rank))
                yield node.input[place], tuple(frozenset().union(*parts) for parts in inverse)

    @staticmethod
    def _resolved(known: frozenset[int], axes: Axes, shape: Shape) -> int | None:
        """The one axis asked about that lies in the ``known`` axes of a tensor, and in no others."""
        large = {axis for axis in known if shape[axis] > 1} or set(known)
        meant = frozenset().union(*(axes[axis] for axis in large))
        if len(meant) != 1 or any(not axes[axis] for axis in large):
            return None
        (axis,) = meant
        holding = {place for place, part in enumerate(axes) if axis in part and (shape[place] > 1 or place in large)}
        return axis if holding == large else None

    def _channel_axes(self, node: onnx.NodeProto) -> ChannelAxes:
        operator = node.op_type
        if operator in PRODUCTS:
            return self._axes_of_product(node, *PRODUCTS[operator])
        if operator in WITH_A_VECTOR:
            return self._axes_of_vector(node)
        return self._axes_of_layer(node)

    def _axes_of_layer(self, node: onnx.NodeProto) -> ChannelAxes:
        read, known = self._shapes.get(node.input[0], ()) if node.input else (), ChannelAxes()
        last = frozenset({len(read) - 1})
        match node.op_type:
            case operator if operator in SECOND:
                known = ChannelAxes({0: frozenset({1})}, frozenset({1}))
            case operator if operator in NORMS:
                along = read[_attribute(node, "axis", -1) :]
                known = ChannelAxes({0: last, 1: last}, last) if along and max(along[:-1], default=1) == 1 else known
            case "Gemm" if not _attribute(node, "transA", 0) and self._is_constant(node, 1):
                known = ChannelAxes({0: last}, last)
            case operator if operator in RECURRENT:
                made = {0: {1, 3}, 1: {2, 3}}[_attribute(node, "layout", 0)]
                known = ChannelAxes({0: last}, frozenset(made) if node.output[0] else frozenset())
            case "Gather" if self._is_constant(node, 0):
                known = ChannelAxes(made=frozenset({len(self._shapes.get(node.output[0], ())) - 1}))
        return known

    def _axes_of_product(self, node: onnx.NodeProto, left: int, right: int) -> ChannelAxes:
        ranks = [len(self._shapes.get(node.input[place], ())) for place in (left, right)]
        made = len(self._shapes.get(node.output[0], ()))
        if self._is_constant(node, right):
            return ChannelAxes({left: frozenset({ranks[0] - 1})}, frozenset({made - 1}))
        if self._is_constant(node, left) and ranks[1] > 1 and made > 1:
            return ChannelAxes({right: frozenset({ranks[1] - 2})}, frozenset({made - 2}))
        return ChannelAxes()

    def _axes_of_vector(self, node: onnx.NodeProto) -> ChannelAxes:
        """Arithmetic with one constant for each channel: a bias, a scale."""
        constants = [place for place in range(min(2, len(node.input))) if self._is_constant(node, place)]
        made = self._shapes.get(node.output[0])
        if len(constants) != 1 or made is None or len(node.input) < 2:
            return ChannelAxes()
        shape = self._shapes.get(node.input[constants[0]], ())
        long = [
            axis - len(shape) for axis, size in enumerate(shape) if size > 1
        ]  # from the end, where shapes are aligned
        other = 1 - constants[0]
        read = self._shapes.get(node.input[other], ())
        if len(long) != 1 or len(read) + long[0] < 0 or read[long[0]] != made[long[0]]:
            return ChannelAxes()
        return ChannelAxes({other: frozenset({len(read) + long[0]})}, frozenset({len(made) + long[0]}))

    def _is_constant(self, node: onnx.NodeProto, place: int) -> bool:
        return place < len(node.input) and bool(node.input[place]) and node.input[place] not in self._dependent

    def _relation(self, node: onnx.NodeProto, place: int, target: str) -> Relation | None:
        """Which axes of an input lie in which of an output, as far as an operator keeps them apart; None: nothing is
        known."""
        read, made = self._shapes.get(node.input[place]), self._shapes.get(target)
        if read is None or made is None:
            return None
        if place == 0 and node.op_type in ("Gather", "GatherND"):
            return self._picked(node, read, made)
        if place == 0 and node.op_type in REDUCTIONS:
            return self._reduced(node, read, made)
        relation: Relation | None = None
        if node.op_type == "Transpose":
            relation = tuple(map(_one, _attribute(node, "perm", list(reversed(range(len(read)))))))
        elif place == 0 and node.op_type in RESHAPES:
            relation = _regrouped(read, made)
        elif node.op_type in (KEEPING if place == 0 else JOINING):
            relation = _aligned(read, made)
        return relation

    def _picked(self, node: onnx.NodeProto, read: Shape, made: Shape) -> Relation | None:
        """Of entries picked by indices, the axes that are not picked from."""
        if node.op_type == "Gather":
            axis, new = _attribute(node, "axis", 0) % len(read), len(made) - len(read) + 1
            within = [_one(axis) if new == 1 else frozenset[int]()] * new
            return (*map(_one, range(axis)), *within, *map(_one, range(axis + 1, len(read))))
        indices = self._shapes.get(node.input[1])
        if _attribute(node, "batch_dims", 0) or not indices:
            return None
        rest = len(read) - indices[-1]
        return (*[frozenset[int]()] * (len(made) - rest), *map(_one, range(len(read) - rest, len(read))))

    def _reduced(self, node: onnx.NodeProto, read: Shape, made: Shape) -> Relation | None:
        if len(made) == len(read):
            return _aligned(read, made)
        axes = _attribute(node, "axes", None)
        if axes is None and len(node.input) > 1:
            constant = self._constants.get(node.input[1])
            axes = None if constant is None else numpy_helper.to_array(constant).ravel().tolist()
        if axes is None:
            return None
        gone = {axis % len(read) for axis in axes}
        return tuple(map(_one, (axis for axis in range(len(read)) if axis not in gone)))


def _one(axis: int) -> frozenset[int]:
    return frozenset({axis})


def _aligned(read: Shape, made: Shape) -> Relation:
    """Axes from the end, as broadcasting aligns them; those that are spread or reduced hold nothing of the input's.

    >>> _aligned((16, 1), (4, 16, 8))
    (frozenset(), frozenset({0}), frozenset())
    """
    offset = len(made) - len(read)
    same = [axis >= 0 and (read[axis] > 1) == (made[axis + offset] > 1) for axis in range(-offset, len(read))]
    return tuple(frozenset({axis - offset}) if kept else frozenset() for axis, kept in enumerate(same))


def _regrouped(read: Shape, made: Shape) -> Relation:
    """Which axes of a reshaped tensor lie in which new ones: between two borders that both shapes have. Axes of one
    entry lie in none.

    >>> _regrouped((2, 3, 4, 1), (6, 2, 2))
    (frozenset({0, 1}), frozenset({2}), frozenset({2}))
    """
    borders = _borders(read) & _borders(made)
    groups = [_numbered(shape, borders) for shape in (read, made)]
    return tuple(
        frozenset(axis for axis, number in groups[0].items() if number == groups[1].get(place))
        if place in groups[1]
        else frozenset()
        for place in range(len(made))
    )


def _borders(shape: Shape) -> set[int]:
    return set(np.cumprod(np.array(shape, dtype=object)).tolist())


def _numbered(shape: Shape, borders: set[int]) -> dict[int, int]:
    """For each axis of more than one entry, the number of borders before it."""
    passed, size, numbers = 0, 1, {}
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        numbers[axis] = passed
        size *= length
        passed += size in borders
    return numbers


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)
