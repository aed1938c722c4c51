"""Where exits can be attached: the cut vertices of an ONNX graph.

A tensor is a cut vertex when every path from the model's input to its output runs through it, so that the graph
falls into "before" and "after" there. They are found, never listed by hand: in a residual network the tensors
between blocks qualify and those inside a block do not, because the shortcut goes around them.

Several cut vertices in a row can be one and the same *place*: convolution, normalisation and activation of one
layer are all cut vertices, but nothing worth an exit lies between them. Cut vertices belong to one place while no
weighted operator separates them, and the place is represented by the last tensor of them whose map still has
4x4 cells (activated and pooled features serve a head better than raw sums, and at most at the same price).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

MIN_GRID_CELLS = 4

# Operators that make new features of old ones. What lies between two of them is one place.
WEIGHTED_OPERATORS = frozenset(
    {
        "Attention", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum", "Gemm", "GRU", "If", "Loop", "LSTM",
        "MatMul", "MatMulInteger", "QLinearConv", "QLinearMatMul", "RNN", "Scan",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a graph: what it is, the tensors it reads and the tensors it makes."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate for exits. ``position`` counts places in network order; channels, height and width are the map's."""

    position: int
    tensor: str
    channels: int
    height: int
    width: int

    @property
    def has_grid(self) -> bool:
        """Whether the map is large enough to be pooled to 4x4 cells."""
        return min(self.height, self.width) >= MIN_GRID_CELLS


def graph_steps(graph: onnx.GraphProto) -> tuple[Step, ...]:
    """The operators of a graph in its (topological) order, with the tensors that subgraphs of control flow capture."""
    return tuple(
        Step(node.op_type, (*filter(None, node.input), *_captured(node)), tuple(filter(None, node.output)))
        for node in graph.node
    )


def cut_vertices(steps: Sequence[Step], *, source: str, sink: str) -> tuple[str, ...]:
    """The tensors that every path from ``source`` to ``sink`` runs through, in network order, ends excluded.

    Parameters
    ----------
    steps : sequence of Step
        Operators in topological order.

    Notes
    -----
    A tensor is on every path exactly when paths(source to tensor) x paths(tensor to sink) equals
    paths(source to sink). Python's integers keep the counts exact however many paths there are. Tensors that do
    not depend on the source (weights, constants) have no path from it and so never count.
    """
    ahead = _paths(steps, start=source)
    behind = _paths([Step(s.operator, s.outputs, s.inputs) for s in reversed(steps)], start=sink)
    total = ahead[sink]
    if total == 0:
        return ()
    made = (name for step in steps for name in step.outputs)
    return tuple(name for name in made if name != sink and ahead[name] * behind[name] == total)


def distinct_places(
    steps: Sequence[Step], cuts: Iterable[str], *, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Place, ...]:
    """Reduce cut vertices to one tensor per place.

    Parameters
    ----------
    cuts : iterable of str
        Cut vertices in network order.
    shapes : mapping
        (channels, height, width) of the cut vertices that are image-like activations; others are left out.
    """
    groups: list[list[str]] = []
    order = {name: index for index, step in enumerate(steps) for name in step.outputs}
    previous: str | None = None
    for name in cuts:
        if previous is None or _is_separated(steps, order[previous], order[name], before=previous):
            groups.append([])
        groups[-1].append(name)
        previous = name
    chosen = [tensor for group in groups if (tensor := _representative(group, shapes)) is not None]
    return tuple(Place(i, name, *shapes[name]) for i, name in enumerate(chosen))


def float_tensors(model: onnx.ModelProto, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the named tensors that are float32, as far as ONNX can infer; heads read nothing else."""
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in inferred}
    unknown = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT)
    return tuple(name for name in names if types.get(name, onnx.TensorProto.UNDEFINED) in unknown)


def _representative(group: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    images = [name for name in group if len(shapes.get(name, ())) == 3]
    grids = [name for name in images if min(shapes[name][1:]) >= MIN_GRID_CELLS]
    usable = grids or images
    return usable[-1] if usable else None


def _is_separated(steps: Sequence[Step], first: int, last: int, *, before: str) -> bool:
    """Whether a weighted operator that depends on ``before`` lies in steps (first, last]."""
    reached = {before}
    for step in steps[first + 1 : last + 1]:
        if reached.isdisjoint(step.inputs):
            continue
        if step.operator in WEIGHTED_OPERATORS:
            return True
        reached.update(step.outputs)
    return False


def _paths(steps: Iterable[Step], *, start: str) -> defaultdict[str, int]:
    """Number of paths from ``start`` to every tensor, for steps in an order that respects their direction."""
    counts: defaultdict[str, int] = defaultdict(int)
    counts[start] = 1
    for step in steps:
        arriving = sum(counts[name] for name in step.inputs)
        if arriving:
            for name in step.outputs:
                counts[name] += arriving
    return counts


def _captured(node: onnx.NodeProto) -> Iterable[str]:
    """Outer tensors that the subgraphs of a control-flow operator read."""
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        for graph in graphs:
            inner = {value.name for value in (*graph.input, *graph.initializer)}
            for step in graph_steps(graph):
                yield from (name for name in step.inputs if name not in inner)
                inner.update(step.outputs)
