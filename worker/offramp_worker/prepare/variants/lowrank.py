"""Low rank by energy: a layer becomes two thinner ones where that computes less.

A weight is divided by a singular value decomposition of what it makes of the data's inputs, so that what is left out is
what changes outputs least. The first of the two is a convolution of the same kernel with fewer outputs, the second one
of 1x1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp_worker.prepare.variants.layers import Floats, copied, damped, layers_of, rounded_up

RANKS_OF = 8  # ranks are multiples, which kernels like
PAYS = 0.75  # of a layer's multiplications, at most, or it stays whole


def low_rank(model: onnx.ModelProto, moments: Mapping[str, Floats], *, energy: float) -> tuple[onnx.ModelProto, int]:
    """A copy in which each layer keeps the ``energy`` of its outputs, and how many layers became two."""
    copy = copied(model)
    layers, graph = layers_of(copy), copy.graph
    nodes: list[onnx.NodeProto] = []
    divided = 0
    for node in graph.node:
        layer = layers.get(node.name)
        halves = None if layer is None else divide(layer.matrix, moments.get(node.name), energy=energy)
        if layer is None or halves is None:
            nodes.append(node)
            continue
        divided += 1
        first, second = halves
        thin = f"{node.output[0]}/low-rank"
        names = f"{node.name}/first", f"{node.name}/second"
        if layer.is_convolution:
            inner = helper.make_node("Conv", [node.input[0], names[0]], [thin], name=names[0])
            inner.attribute.extend(node.attribute)
            outer = helper.make_node("Conv", [thin, names[1], *node.input[2:]], node.output, name=names[1])
            last = np.ascontiguousarray(second.T)[:, :, None, None]
        else:
            inner = helper.make_node(node.op_type, [node.input[0], names[0]], [thin], name=names[0])
            outer = helper.make_node(node.op_type, [thin, names[1], *node.input[2:]], node.output, name=names[1])
            outer.attribute.extend(a for a in node.attribute if a.name == "beta")
            last = second
        weight = layer.weights_of(first) if layer.is_convolution else first
        for name, value in zip(names, (weight, last), strict=True):
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype=np.float32), name))
        nodes += [inner, outer]
    del graph.node[:]
    graph.node.extend(nodes)
    return copy, divided


def divide(matrix: Floats, moments: Floats | None, *, energy: float) -> tuple[Floats, Floats] | None:
    """Two matrices (inputs, rank) and (rank, outputs) whose product keeps the energy; None where that computes hardly
    less."""
    known = moments is not None and len(moments) == len(matrix)  # not where channels have gone
    root = np.linalg.cholesky(damped(moments)) if moments is not None and known else np.eye(len(matrix))
    left, values, right = np.linalg.svd(root.T @ matrix, full_matrices=False)
    kept = np.cumsum(values**2) / max(float((values**2).sum()), np.finfo(np.float64).tiny)
    rank = rounded_up(int(np.searchsorted(kept, energy)) + 1, to=RANKS_OF)
    inputs, outputs = matrix.shape
    if rank * (inputs + outputs) > PAYS * inputs * outputs:
        return None
    scale = np.sqrt(values[:rank])
    first = np.linalg.solve(root.T, left[:, :rank] * scale)
    return first, scale[:, None] * right[:rank]
