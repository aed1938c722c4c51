"""Shallow students: blocks between cut vertices of one shape are left out, those that change answers least."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import onnx

from offramp_worker.prepare.places.cuts import WEIGHTED_OPERATORS, Place
from offramp_worker.prepare.variants.layers import copied, without_unused

Block = tuple[str, str]  # the tensors before and behind it


def blocks_of(model: onnx.ModelProto, places: Sequence[Place]) -> tuple[Block, ...]:
    """Blocks that can be left out: between neighboring places whose features have one shape and come from one kind of
    operator."""
    maker = {name: node.op_type for node in model.graph.node for name in node.output}
    found = []
    for before, behind in pairwise(places):
        same = before.shape == behind.shape and before.readable and behind.readable
        alike = maker.get(before.tensor) == maker.get(behind.tensor) not in WEIGHTED_OPERATORS
        if same and alike and before.tensor in maker:
            found.append((before.tensor, behind.tensor))
    return tuple(found)


def without_blocks(model: onnx.ModelProto, blocks: Collection[Block]) -> onnx.ModelProto:
    """A copy in which whatever reads the tensor behind a block reads the one before it."""
    copy = copied(model)
    instead = {behind: before for before, behind in blocks}
    outputs = {value.name for value in copy.graph.output}
    assert outputs.isdisjoint(instead)
    for node in copy.graph.node:
        for number, name in enumerate(node.input):
            while name in instead:
                name = instead[name]  # noqa: PLW2901 - blocks in a row
            node.input[number] = name
    return without_unused(copy)
