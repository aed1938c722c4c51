"""Where exits can be attached: the cut vertices of an ONNX graph.

A tensor is a cut vertex when every path from the model's input to its output runs through it, so that the graph
falls into "before" and "after" there. They are found, never listed by hand: in a residual network the tensors
between blocks qualify and those inside a block do not, because the shortcut goes around them. Paths that carry
nothing but what follows cheaply from the input, such as an attention mask, do not count
(:func:`offramp_worker.bundle.dataflow.free_tensors`): the stage behind the cut makes it again.

Several cut vertices in a row can be one and the same *place*: convolution, normalisation and activation of one
layer are all cut vertices, but nothing worth an exit lies between them. Cut vertices belong to one place while no
weighted operator separates them, and the place is represented by the last tensor of them that a head can read: the last
map that still has 4x4 cells, else the last map (activated and pooled features serve a head better than raw sums, and at
most at the same price), else the last tensor of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from offramp_worker.bundle.dataflow import GraphStep, dependent_tensors, free_tensors, graph_steps
from offramp_worker.bundle.graph import feature_size

__all__ = ["Place", "GraphStep", "cut_vertices", "distinct_places", "float_tensors", "graph_steps", "place_groups"]

MIN_GRID_CELLS = 4
INPUT_POSITION = 0  # of ramps that read the model's input itself; places inside the network count from 1

# Operators that make new features of old ones. What lies between two of them is one place.
WEIGHTED_OPERATORS = frozenset(
    {
        "Attention",
        "Conv",
        "ConvInteger",
        "ConvTranspose",
        "DeformConv",
        "Einsum",
        "Gemm",
        "GRU",
        "If",
        "Loop",
        "LSTM",
        "MatMul",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "RNN",
        "Scan",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate for exits. ``position`` counts places in network order from 1; 0 is the model's input.

    ``shape`` is the tensor's without the batch axis: (channels, height, width) of a map, or (tokens, channels), where
    -1 tokens stands for a length that varies. What is not ``readable`` can only feed an exit of the network's own.
    """

    position: int
    tensor: str
    shape: tuple[int, ...]
    readable: bool = True

    @property
    def is_image(self) -> bool:
        """Whether the tensor is a map."""
        return self.readable and len(self.shape) == 3

    @property
    def is_tokens(self) -> bool:
        """Whether the tensor is a sequence of tokens; what is neither can only feed an exit of the network's own."""
        return self.readable and len(self.shape) == 2

    @property
    def channels(self) -> int:
        """Width of the features at a cell or token."""
        return feature_size(self.shape)[0]

    @property
    def height(self) -> int:
        """Rows of the map; 1 for tokens."""
        return feature_size(self.shape)[1]

    @property
    def width(self) -> int:
        """Columns of the map; for tokens their number (-1: it varies)."""
        return feature_size(self.shape)[2]


def cut_vertices(steps: Sequence[GraphStep], *, source: str, sink: str) -> tuple[str, ...]:
    """The tensors that every path from ``source`` to ``sink`` runs through, in network order, ends excluded.

    Parameters
    ----------
    steps : sequence of GraphStep
        Operators in topological order.

    Notes
    -----
    A tensor is on every path exactly when paths(source to tensor) x paths(tensor to sink) equals
    paths(source to sink). Python's integers keep the counts exact however many paths there are. Tensors that do
    not depend on the source (weights, constants) have no path from it and so never count. Paths along free tensors are
    left out: all paths begin at the steps that make something costly of free tensors alone.
    """
    paid = _costly(steps, source=source)
    ahead = _paths(paid, start=source)
    behind = _paths([GraphStep(s.operator, s.outputs, s.inputs) for s in reversed(paid)], start=sink)
    total = ahead[sink]
    if total == 0:
        return ()
    made = (name for step in paid for name in step.outputs)
    return tuple(name for name in made if name != sink and ahead[name] * behind[name] == total)


def exit_trunks(
    steps: Sequence[GraphStep], cuts: Sequence[str], exits: Iterable[str], *, source: str
) -> dict[str, str]:
    """Where a network's own exits branch off: from the tensor with an exit's logits to the last cut vertex that it
    follows from.

    An exit that follows from no cut vertex alone is left out.
    """
    trunks = {}
    for exit_tensor in exits:
        upon = [exit_tensor, *cut_vertices(steps, source=source, sink=exit_tensor)]
        shared = [name for name in cuts if name in upon]
        if shared:
            trunks[exit_tensor] = shared[-1]
    return trunks


def distinct_places(
    steps: Sequence[GraphStep],
    cuts: Iterable[str],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    trunks: Container[str] = (),
    turned: Container[str] = (),
) -> tuple[Place, ...]:
    """Reduce cut vertices to one tensor per place.

    Parameters
    ----------
    cuts : iterable of str
        Cut vertices in network order.
    shapes : mapping
        What a head reads of the cut vertices that it can read, without the batch axis: maps (channels, height, width)
        or tokens (tokens, channels).
    trunks : container of str
        Tensors that the network's own exits branch off; they represent their places.
    turned : container of str
        Tensors that are turned before a head reads them; one that lies as it is read is better.
    """
    groups = place_groups(steps, cuts)
    chosen = [tensor for group in groups if (tensor := _representative(group, shapes, trunks, turned)) is not None]
    return tuple(Place(i, name, shapes[name]) for i, name in enumerate(chosen, start=INPUT_POSITION + 1))


def place_groups(steps: Sequence[GraphStep], cuts: Iterable[str]) -> list[list[str]]:
    """Cut vertices (in network order) by place: no weighted operator lies between those of one."""
    groups: list[list[str]] = []
    order = {name: index for index, step in enumerate(steps) for name in step.outputs}
    previous: str | None = None
    for name in cuts:
        if previous is None or _is_separated(steps, order[previous], order[name], before=previous):
            groups.append([])
        groups[-1].append(name)
        previous = name
    return groups


def float_tensors(model: onnx.ModelProto, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the named tensors that are float32, as far as ONNX can infer; heads read nothing else."""
    inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in inferred}
    unknown = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT)
    return tuple(name for name in names if types.get(name, onnx.TensorProto.UNDEFINED) in unknown)


def _costly(steps: Sequence[GraphStep], *, source: str) -> list[GraphStep]:
    """The steps that are no free ones, each fed by the costly tensors it reads, or by ``source`` where it reads
    none."""
    free, dependent = free_tensors(steps, source=source), dependent_tensors(steps, source=source)
    paid = []
    for step in steps:
        made = tuple(name for name in step.outputs if name not in free)
        costly = tuple(name for name in step.inputs if name in dependent and name not in free)
        begins = not costly and not free.isdisjoint(step.inputs)
        if made and (costly or begins):
            paid.append(GraphStep(step.operator, costly or (source,), made))
    return paid


def _representative(
    group: Sequence[str], shapes: Mapping[str, tuple[int, ...]], trunks: Container[str], turned: Container[str]
) -> str | None:
    branching = [name for name in group if name in trunks]
    if branching:
        return branching[-1]
    read = [name for name in group if name in shapes]
    usable = [name for name in read if name not in turned] or read
    images = [name for name in usable if len(shapes[name]) == 3]
    grids = [name for name in images if min(shapes[name][1:]) >= MIN_GRID_CELLS]
    return next((names[-1] for names in (grids, images, usable) if names), None)


def _is_separated(steps: Sequence[GraphStep], first: int, last: int, *, before: str) -> bool:
    """Whether a weighted operator that depends on ``before`` lies in steps (first, last]."""
    reached = {before}
    for step in steps[first + 1 : last + 1]:
        if reached.isdisjoint(step.inputs):
            continue
        if step.operator in WEIGHTED_OPERATORS:
            return True
        reached.update(step.outputs)
    return False


def _paths(steps: Iterable[GraphStep], *, start: str) -> defaultdict[str, int]:
    """Number of paths from ``start`` to every tensor, for steps in an order that respects their direction."""
    counts: defaultdict[str, int] = defaultdict(int)
    counts[start] = 1
    for step in steps:
        arriving = sum(counts[name] for name in step.inputs)
        if arriving:
            for name in step.outputs:
                counts[name] += arriving
    return counts
