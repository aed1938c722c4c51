"""Features in another order than heads read them, turned in the graph: batch, channels, height, width, or batch,
tokens, channels.

Swin keeps channels last, a convolution along time has one axis of positions, a recurrent network counts steps before
rows. Heads pool over fixed axes and a worker drops rows along the first one; rather than teach both every order, the
graph gets the tensor in theirs, and back: the two transpositions cancel out where no ramp reads between them, and no
value changes. So a bundle says nothing of orders, and any worker serves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp_worker.prepare.places.axes import Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor of the graph is brought into the order that heads read.

    ``order`` are its axes as they are to come, the one that counts rows first. ``shape`` is what a head reads of it,
    without the batch axis: (channels, height, width), or (tokens, channels) with -1 tokens where their number varies. A
    ``line`` of positions is a map of height 1.
    """

    order: tuple[int, ...]
    shape: Shape
    line: bool = False

    @property
    def as_it_lies(self) -> bool:
        """Whether heads read the tensor itself."""
        return not self.line and self._in_order

    @property
    def _in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def as_line(self) -> Layout:
        """Tokens as a line of positions, for heads that pool over any number of them."""
        rows, tokens, channels = self.order
        return replace(self, order=(rows, channels, tokens), shape=(self.shape[1], 1, self.shape[0]), line=True)

    def forth(self, source: str, target: str) -> list[onnx.NodeProto]:
        """Nodes from the tensor to what heads read."""
        turned = f"{target}/order" if self.line else target
        nodes = [] if self._in_order else [_transpose(source, turned, self.order)]
        if self.line:
            nodes.append(helper.make_node("Reshape", [source if self._in_order else turned, f"{target}/map"], [target]))
        return nodes

    def back(self, source: str, target: str) -> list[onnx.NodeProto]:
        """Nodes from what heads read to the tensor."""
        lying = f"{source}/line" if self.line and not self._in_order else target
        nodes = [helper.make_node("Reshape", [source, f"{source}/flat"], [lying])] if self.line else []
        if not self._in_order:
            inverse = tuple(self.order.index(axis) for axis in range(len(self.order)))
            nodes.append(_transpose(lying if self.line else source, target, inverse))
        return nodes

    def constants(self, name: str) -> list[onnx.TensorProto]:
        """What the nodes of the tensor that heads read, ``name``, need."""
        if not self.line:
            return []
        channels, height, width = self.shape
        shapes = {"map": (0, channels, height, width), "flat": (0, channels, width)}
        return [
            numpy_helper.from_array(np.array(shape, dtype=np.int64), f"{name}/{kind}") for kind, shape in shapes.items()
        ]


def turned_name(tensor: str, layout: Layout) -> str:
    """The tensor that heads read where they are to read ``tensor``."""
    return tensor if layout.as_it_lies else f"{tensor}/turned"


def turn(model: onnx.ModelProto, layouts: Mapping[str, Layout]) -> onnx.ModelProto:
    """A copy in which each tensor named passes through the order that heads read; the same model where all lie in
    it."""
    turning = {tensor: layout for tensor, layout in layouts.items() if not layout.as_it_lies}
    if not turning:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in changed.graph.node:
        nodes.append(node)
        for number, tensor in enumerate(node.output):
            if tensor in turning:
                layout, name = turning[tensor], turned_name(tensor, turning[tensor])
                node.output[number] = f"{tensor}/given"
                nodes += [*layout.forth(f"{tensor}/given", name), *layout.back(name, tensor)]
                changed.graph.initializer.extend(layout.constants(name))
    copies = [_copy(node) for node in nodes]
    del changed.graph.node[:]
    changed.graph.node.extend(copies)
    return changed


def _transpose(source: str, target: str, order: Sequence[int]) -> onnx.NodeProto:
    return helper.make_node("Transpose", [source], [target], perm=list(order))


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
