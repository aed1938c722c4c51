"""What an ONNX graph computes from what: its steps, and the tensors that any stage can afford to compute again.

An attention mask is made of the token ids by a few comparisons and is read by every layer, so that in the plain sense
no tensor between two layers separates input from output. But a stage can make the mask again from the ids for next
to nothing. Tensors of that kind are *free*: they follow from the model's input (and constants) by cheap
operators alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx

# Comparisons, casts, shapes and element-wise arithmetic. Nothing here multiplies matrices or makes features.
CHEAP_OPERATORS = frozenset(
    {
        "Abs",
        "Add",
        "And",
        "Cast",
        "Clip",
        "Concat",
        "ConstantOfShape",
        "CumSum",
        "Div",
        "Equal",
        "Expand",
        "Flatten",
        "Gather",
        "GatherND",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Range",
        "Reciprocal",
        "ReduceSum",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
        "Xor",
    }
)
GATHERS = frozenset({"Gather", "GatherND"})
SMALL_TABLE = 1_024  # elements; picking rows of a larger constant is an embedding, not a mask


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One operator of a graph: what it is, the tensors it reads and makes, and whether doing it again costs next to
    nothing."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cheap: bool = False


def graph_steps(graph: onnx.GraphProto) -> tuple[GraphStep, ...]:
    """The operators of a graph in its (topological) order, with the tensors that subgraphs of control flow capture."""
    tables = {tensor.name for tensor in graph.initializer if _size(tensor.dims) > SMALL_TABLE}
    return tuple(
        GraphStep(
            operator=node.op_type,
            inputs=(*filter(None, node.input), *captured(node)),
            outputs=tuple(filter(None, node.output)),
            cheap=node.op_type in CHEAP_OPERATORS and not (node.op_type in GATHERS and node.input[0] in tables),
        )
        for node in graph.node
    )


def dependent_tensors(steps: Iterable[GraphStep], *, source: str) -> set[str]:
    """Tensors that depend on ``source``, itself included. Weights and constants are not among them."""
    found = {source}
    for step in steps:
        if not found.isdisjoint(step.inputs):
            found.update(step.outputs)
    return found


def free_tensors(steps: Sequence[GraphStep], *, source: str) -> set[str]:
    """Tensors that follow from the model's input ``source`` by cheap steps alone, the input included."""
    dependent = dependent_tensors(steps, source=source)
    free = {source}
    for step in steps:
        if step.cheap and all(name in free for name in step.inputs if name in dependent):
            free.update(name for name in step.outputs if name in dependent)
    return free


def captured(node: onnx.NodeProto) -> Iterable[str]:
    """Outer tensors that the subgraphs of a control-flow operator read."""
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
        for graph in graphs:
            inner = {value.name for value in (*graph.input, *graph.initializer)}
            for step in graph_steps(graph):
                yield from (name for name in step.inputs if name not in inner)
                inner.update(step.outputs)


def _size(dims: Iterable[int]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size
