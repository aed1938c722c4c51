"""Structured pruning: whole channels inside of blocks, in multiples that kernels like.

Channels between two layers can go where nothing but element-wise operators and depthwise convolutions lies between
them: then only the two know how many there are. Widths that additions share, such as a residual stream's, stay. Those
go that contribute least to what the next layer makes of the data, whose weights are fitted again to what is left (least
squares; He et al. 2017, arXiv:1707.06168).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.variants.layers import (
    Array,
    Floats,
    Layer,
    copied,
    damped,
    layers_of,
    rounded_up,
    set_weights,
)

ELEMENT_WISE = frozenset(
    {"Add", "Clip", "Div", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Pow", "Relu", "Sigmoid"}
    | {"Sub", "Tanh", "Identity", "Dropout"}
)
WIDE = 64  # channels, from which on multiples of 16 are kept
MULTIPLES = (8, 16)


@dataclass(frozen=True, slots=True)
class Inner:
    """Channels that two layers alone share: who makes and who reads them, the constants in between that have one value
    for each, and depthwise convolutions by name with their weights."""

    maker: Layer
    readers: tuple[Layer, ...]
    constants: tuple[tuple[str, int], ...]
    depthwise: tuple[str, ...]

    @property
    def channels(self) -> int:
        return int(self.maker.matrix.shape[1])


def inner_channels(model: onnx.ModelProto, *, keep: Collection[str]) -> tuple[Inner, ...]:
    """Where channels can go; tensors in ``keep``, which ramps read, keep theirs."""
    layers = layers_of(model)
    graph = _Readers(model, layers)
    fixed = {*keep, *(value.name for value in model.graph.output)}
    found = (graph.behind(layer, fixed) for layer in layers.values())
    return tuple(inner for inner in found if inner is not None)


def pruned(
    model: onnx.ModelProto, moments: Mapping[str, Floats], *, share: float, keep: Collection[str]
) -> tuple[onnx.ModelProto, int]:
    """A copy without about ``share`` of the channels inside of blocks, and of how many pairs of layers some went.

    Raises
    ------
    InvalidArgumentError
        There are none that can go.
    """
    copy = copied(model)
    places = inner_channels(copy, keep=keep)
    if not places:
        raise InvalidArgumentError(
            "no two of its layers share channels that nothing else needs: additions, reshapes and groups fix all widths"
        )
    thinner = 0
    sizes = {t.name: numpy_helper.to_array(t) for t in copy.graph.initializer}
    changed: dict[str, Array] = {}
    matrices: dict[str, Floats] = {}
    for inner in places:
        stay = _staying(inner, moments, share=share)
        if len(stay) == inner.channels:
            continue
        thinner += 1
        maker = inner.maker
        matrices[maker.node.name] = matrices.get(maker.node.name, maker.matrix)[:, stay]
        changed[maker.weight] = maker.weights_of(matrices[maker.node.name])
        for name, axis in inner.constants:
            changed[name] = np.ascontiguousarray(np.take(changed.get(name, sizes[name]), stay, axis=axis))
        for node in copy.graph.node:
            if node.name in inner.depthwise:
                next(a for a in node.attribute if a.name == "group").i = len(stay)
        for reader in inner.readers:
            fitted = _fitted(matrices.get(reader.node.name, reader.matrix), reader, moments.get(reader.node.name), stay)
            matrices[reader.node.name] = fitted
            changed[reader.weight] = reader.weights_of(fitted)
    set_weights(copy.graph, changed)
    return copy, thinner


def _staying(inner: Inner, moments: Mapping[str, Floats], *, share: float) -> npt.NDArray[np.intp]:
    """Channels in their order, those that matter most to the readers."""
    multiple = MULTIPLES[inner.channels >= WIDE]
    number = min(inner.channels, rounded_up(inner.channels * (1 - share), to=multiple))
    weight = np.zeros(inner.channels)
    for reader in inner.readers:
        seen = moments.get(reader.node.name)
        energy = np.diag(seen) if seen is not None else np.ones(len(reader.matrix))
        weight += (energy * (reader.matrix**2).sum(axis=1)).reshape(inner.channels, -1).sum(axis=1)
    return np.sort(np.argsort(-weight, kind="stable")[:number])


def _fitted(matrix: Floats, reader: Layer, moments: Floats | None, stay: npt.NDArray[np.intp]) -> Floats:
    """The reader's matrix for the channels that stay, which makes up for the others as far as the data's inputs tell
    them."""
    each = len(reader.matrix) // reader.channels
    rows = (stay[:, None] * each + np.arange(each)).ravel()
    if moments is None:
        return np.asarray(matrix[rows])
    every = damped(moments)
    fitted: Floats = np.linalg.solve(every[np.ix_(rows, rows)], every[rows] @ matrix)
    return fitted


class _Readers:
    """Who reads what in a graph."""

    def __init__(self, model: onnx.ModelProto, layers: Mapping[str, Layer]) -> None:
        self._layers = layers
        self._constants = {t.name: tuple(t.dims) for t in model.graph.initializer}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def behind(self, maker: Layer, fixed: Collection[str]) -> Inner | None:
        """What shares the channels that a layer makes; None where more than element-wise operators and layers do."""
        derived, waiting = {maker.node.output[0]}, [maker.node.output[0]]
        readers: dict[str, Layer] = {}
        inside: dict[str, onnx.NodeProto] = {}
        while waiting:
            name = waiting.pop()
            if name in fixed or name not in self._readers:
                return None
            for node in self._readers[name]:
                if node.name in self._layers and node.input[0] == name:
                    readers[node.name] = self._layers[node.name]
                elif node.op_type in ELEMENT_WISE or self._is_depthwise(node, name):
                    inside[node.name] = node
                    waiting += [output for output in node.output if output not in derived]
                    derived |= set(node.output)
                else:
                    return None
        if any(reader.is_convolution != maker.is_convolution for reader in readers.values()):
            return None  # a matrix behind a convolution multiplies the last axis, not the channels
        constants = self._constants_of(maker, inside.values(), derived)
        weights = [
            maker.weight,
            *(reader.weight for reader in readers.values()),
            *(name for name, _ in constants or ()),
        ]
        if not readers or constants is None or any(len(self._readers[name]) > 1 for name in weights):
            return None
        depthwise = tuple(node.name for node in inside.values() if node.op_type == "Conv")
        return Inner(maker, tuple(readers.values()), tuple(constants), depthwise)

    def _constants_of(
        self, maker: Layer, nodes: Iterable[onnx.NodeProto], derived: Collection[str]
    ) -> list[tuple[str, int]] | None:
        """Constants with one value for each channel, and its axis; None where something else comes in."""
        width = maker.matrix.shape[1]
        behind = len(maker.shape) - 2 if maker.is_convolution else 0  # axes behind that of the channels
        found = []
        for node in (maker.node, *nodes):
            own = node.input[2:] if node is maker.node else [name for name in node.input if name not in derived]
            for name in filter(None, own):
                dims = self._constants.get(name)
                if dims is None:
                    return None
                axis = 0 if node.op_type == "Conv" else len(dims) - 1 - behind
                if axis >= 0 and dims[axis] == width > 1:
                    found.append((name, axis))
                elif any(size != 1 for size in dims):
                    return None
        return found

    def _is_depthwise(self, node: onnx.NodeProto, name: str) -> bool:
        if node.op_type != "Conv" or node.input[0] != name or node.input[1] not in self._constants:
            return False
        dims = self._constants[node.input[1]]
        return dims[1] == 1 and any(a.name == "group" and a.i == dims[0] > 1 for a in node.attribute)
