"""A network's own exits between whose blocks several tensors pass: packed into one, so that an exit can be taken there.

Networks in the manner of MSDNet (Huang et al., "Multi-Scale Dense Networks", ICLR 2018) hand features of several scales
from block to block. No single tensor separates the input from the output there, and a stage hands on one. So the
features that anything behind an exit's block still reads are laid side by side, [batch, all their numbers], and taken
apart again: no value changes, some bytes are copied, and what is between is a cut vertex. The profile prices the copies
like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp_worker.bundle.dataflow import GraphStep, captured, dependent_tensors, free_tensors, graph_steps
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.prepare.places.axes import ROWS, observed_shapes
from offramp_worker.prepare.places.cuts import WEIGHTED_OPERATORS, cut_vertices, exit_trunks, float_tensors
from offramp_worker.prepare.source.data import InputArray

FIRST_OPSET = 13  # whose Split reads its sizes as an input


def pack_exits(model: onnx.ModelProto, exits: Iterable[str], rows: InputArray) -> None:
    """Change the graph so that each of its own ``exits`` (tensors with logits, in network order) branches off one
    tensor near it.

    An exit that already does stays as it is, and so does one whose block hands on something other than float32 features
    of a fixed shape, row by row. ``rows`` (n, ...) are run to learn the shapes.
    """
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < FIRST_OPSET:
        return
    for number, exit_tensor in enumerate(exits, start=1):
        steps = graph_steps(model.graph)
        shared = _ancestors(steps, exit_tensor) & _ancestors(steps, output_name(model))
        if not shared or not _works_twice(model, steps, exit_tensor, shared):
            continue
        behind = max(shared) + 1
        features, readers = _frontier(model, steps, exit_tensor, behind)
        if len(float_tensors(model, features)) < len(features) or any(
            list(captured(model.graph.node[i])) for i in readers
        ):
            continue
        shapes = observed_shapes(model, np.resize(rows, (ROWS, *rows.shape[1:])), tokens=False, varies=False)
        if all(shapes.row_axis(name) == 0 for name in features):
            sizes = {name: shapes.three[name][1:] for name in features}
            _pack(model.graph, sizes, readers, at=behind, name=f"packed{number}")


def _works_twice(model: onnx.ModelProto, steps: Sequence[GraphStep], exit_tensor: str, shared: set[int]) -> bool:
    """Whether the exit, taken at the last cut vertex that it follows from, would do weighted work that the network
    behind does again."""
    source = input_name(model)
    cuts = cut_vertices(steps, source=source, sink=output_name(model))
    trunk = exit_trunks(steps, cuts, (exit_tensor,), source=source).get(exit_tensor, source)
    reached = {trunk}
    for number, step in enumerate(steps):
        if not reached.isdisjoint(step.inputs) and trunk not in step.outputs:
            reached.update(step.outputs)
            if number in shared and step.operator in WEIGHTED_OPERATORS:
                return True
    return False


def _ancestors(steps: Sequence[GraphStep], tensor: str) -> set[int]:
    """Numbers of the steps that ``tensor`` follows from."""
    wanted, found = {tensor}, set()
    for number in range(len(steps) - 1, -1, -1):
        if not wanted.isdisjoint(steps[number].outputs):
            wanted.update(steps[number].inputs)
            found.add(number)
    return found


def _frontier(
    model: onnx.ModelProto, steps: Sequence[GraphStep], exit_tensor: str, behind: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What the steps before number ``behind`` make and the exit or the output needs behind it, and the numbers of the
    steps that read it.

    What follows cheaply from the model's input is made again by the stage behind (:func:`free_tensors`).
    """
    source = input_name(model)
    needed = _ancestors(steps, exit_tensor) | _ancestors(steps, output_name(model))
    readers = tuple(number for number in range(behind, len(steps)) if number in needed)
    read = {name for number in readers for name in steps[number].inputs}
    costly = dependent_tensors(steps, source=source) - free_tensors(steps, source=source)
    made = (name for step in steps[:behind] for name in step.outputs)
    return tuple(name for name in made if name in costly and name in read), readers


def _pack(
    graph: onnx.GraphProto, shapes: dict[str, tuple[int, ...]], readers: Sequence[int], *, at: int, name: str
) -> None:
    """Lay the tensors of ``shapes`` (without batch axis) side by side before node number ``at``, and let ``readers``
    read copies."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    copies = {tensor: f"{name}/{tensor}" for tensor in shapes}
    nodes = [helper.make_node("Flatten", [tensor], [f"{name}/{tensor}/flat"], axis=1) for tensor in shapes]
    nodes += [
        helper.make_node("Concat", [f"{name}/{tensor}/flat" for tensor in shapes], [name], axis=1),
        helper.make_node("Split", [name, f"{name}/sizes"], [f"{name}/{tensor}/part" for tensor in shapes], axis=1),
    ]
    graph.initializer.append(numpy_helper.from_array(np.array(sizes, dtype=np.int64), f"{name}/sizes"))
    for tensor, shape in shapes.items():
        graph.initializer.append(
            numpy_helper.from_array(np.array([0, *shape], dtype=np.int64), f"{name}/{tensor}/shape")
        )
        nodes.append(helper.make_node("Reshape", [f"{name}/{tensor}/part", f"{name}/{tensor}/shape"], [copies[tensor]]))
    for number in readers:
        node = graph.node[number]
        node.input[:] = [copies.get(tensor, tensor) for tensor in node.input]
    following = list(graph.node[at:])
    del graph.node[at:]
    graph.node.extend([*nodes, *following])
