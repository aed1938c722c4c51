"""Token models as graphs of one input: the ids.

A worker serves one input tensor, and rows of one batch are filled up to one length. So everything that a text model
wants to be told besides the ids is derived from them inside the graph: the attention mask (1 where an id is not the pad
id) and token types (1 behind the first separator, so that a pair of texts is told from a single one). Where heads take
a mean over tokens, its weights stand ready in the graph as :data:`~offramp_worker.bundle.heads.MEAN_WEIGHT`. All of it
follows cheaply from the ids, so that any stage can make it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import TensorSpec
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.bundle.dataflow import graph_steps
from offramp_worker.bundle.graph import Array
from offramp_worker.bundle.heads import MEAN_WEIGHT
from offramp_worker.bundle.lengths import BUCKETS, pad_rows
from offramp_worker.preprocess.texts import token_types

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
WHOLE = {onnx.TensorProto.INT64: "INT64", onnx.TensorProto.INT32: "INT32"}
DEFAULT_PAD = 0
# Operators that hand ids on as they are
_PASSING = frozenset({"Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})

Run = Callable[[onnx.ModelProto, Array], Array]


def takes_tokens(inputs: Sequence[onnx.ValueInfoProto]) -> bool:
    """Whether a model's inputs are token ids, alone or with a mask and token types."""
    return bool(inputs) and all(value.type.tensor_type.elem_type in WHOLE for value in inputs)


def ids_input(names: Sequence[str]) -> str:
    """Which of a token model's inputs are the ids.

    Raises
    ------
    ModelRefusedError
        There are inputs that cannot be derived from the ids.
    """
    rest = [name for name in names if name not in (MASK, TYPES)]
    if len(rest) != 1:
        raise ModelRefusedError(
            f"the model's inputs are {', '.join(names)}; a text model may take {IDS}, and besides it {MASK} and "
            f"{TYPES}, which are "
            "derived from it; export it with these inputs only"
        )
    return rest[0]


def torch_inputs(names: Sequence[str], ids: Array, *, pad: int, sep: int | None) -> list[Array]:
    """Values for a program's inputs, in the order of ``names``: what the graph will derive from the ids."""
    known = {MASK: (ids != pad).astype(np.int64), TYPES: token_types(ids, pad=pad, sep=sep)}
    return [known.get(name, ids) for name in names]


def derive_inputs(model: onnx.ModelProto, *, pad: int, sep: int | None) -> None:
    """Make the ids the model's only input, in place; mask and token types become tensors derived from them.

    Raises
    ------
    InvalidArgumentError
        The model reads token types, and ``sep`` is not known: a pair of texts would be answered as one.
    """
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in constants}
    ids = ids_input(list(inputs))
    kind = inputs[ids].type.tensor_type.elem_type
    graph.initializer.append(numpy_helper.from_array(np.array(pad, dtype=_dtype(kind)), "offramp/pad"))
    nodes = [
        helper.make_node("Equal", [ids, "offramp/pad"], ["offramp/is_pad"]),
        helper.make_node("Not", ["offramp/is_pad"], ["offramp/is_token"]),
        *_mean_weight(graph),
    ]
    for name in set(inputs) - {ids}:
        to = inputs[name].type.tensor_type.elem_type
        if name == MASK:
            nodes.append(helper.make_node("Cast", ["offramp/is_token"], [MASK], to=to))
        elif any(TYPES in step.inputs for step in graph_steps(graph)):
            nodes += _types(graph, ids, sep=sep, kind=kind, to=to)
        graph.input.remove(inputs[name])
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])


def add_constant_weight(model: onnx.ModelProto, *, tokens: int) -> onnx.ModelProto:
    """A copy with the weights of the plain mean over a fixed number of tokens without padding (patches of an image)."""
    weighted = onnx.ModelProto()
    weighted.CopyFrom(model)
    value = np.full((1, 1, tokens), 1 / tokens, dtype=np.float32)
    weighted.graph.initializer.append(numpy_helper.from_array(value, MEAN_WEIGHT))
    return weighted


def vocabulary(model: onnx.ModelProto, *, ids: str) -> int:
    """Rows of the embedding table that the ids pick from; 0 when there is none."""
    tables = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    same = {ids}
    sizes = []
    for node in model.graph.node:
        if node.op_type in _PASSING and node.input[0] in same:
            same.add(node.output[0])
        elif node.op_type == "Gather" and node.input[1] in same and len(tables.get(node.input[0], ())) == 2:
            sizes.append(int(tables[node.input[0]][0]))
    return min(sizes, default=0)


def ids_spec(model: onnx.ModelProto, value: onnx.ValueInfoProto, x: Array, *, pad: int, run: Run) -> TensorSpec:
    """What the input of ids takes: its length, pad id and range of values.

    Parameters
    ----------
    value : ValueInfoProto
        The declared input; a second axis without a fixed size varies.
    x : (n, length)
        Sample rows, filled up with ``pad``.
    run : callable
        Runs the model on ids, raising ModelRefusedError where it cannot.

    Raises
    ------
    InvalidArgumentError
        The data does not fit.
    ModelRefusedError
        No embedding table is found.
    """
    dims = value.type.tensor_type.shape.dim
    fixed = int(dims[1].dim_value) if len(dims) == 2 and dims[1].HasField("dim_value") else 0
    size = vocabulary(model, ids=value.name)
    if not size:
        raise ModelRefusedError(
            f"no embedding table is looked up by input {value.name!r}, so the range of its values is unknown; "
            "exits for whole-number inputs need a text model"
        )
    if not 0 <= pad < size:
        raise InvalidArgumentError(f"pad-id is {pad}; it must lie in [0, {size - 1}], the model's vocabulary")
    if x.ndim != 2 or (fixed and x.shape[1] != fixed):
        raise InvalidArgumentError(
            f"data x has rows of shape {list(x.shape[1:])}; the model takes [{fixed or 'any length'}] token ids"
        )
    if x.min() < 0 or x.max() >= size:
        raise InvalidArgumentError(f"data x holds ids from {x.min()} to {x.max()}; the model knows 0 to {size - 1}")
    datatype = WHOLE[value.type.tensor_type.elem_type]
    longest = fixed or _longest(model, x, pad=pad, run=run)
    return TensorSpec(value.name, datatype, (fixed or -1,), pad=pad, longest=longest, values=size)


def check_padding(
    model: onnx.ModelProto, spec: TensorSpec, x: Array, *, run: Run, close: Callable[[Array, Array], bool]
) -> None:
    """Refuse a model whose answers change when a row is filled up.

    Raises
    ------
    ModelRefusedError
        They do.
    """
    if not spec.varies:
        return
    rows = x[: min(3, len(x))]
    alone = np.concatenate([run(model, _trimmed(row, spec)) for row in rows])
    wide = pad_rows([rows], spec)
    room = min(spec.longest, 2 * wide.shape[1])
    filled = np.full((len(rows), room), spec.pad, dtype=rows.dtype)
    filled[:, : wide.shape[1]] = wide
    if not close(run(model, filled), alone):
        raise ModelRefusedError(
            f"the answer to a row changes when it is filled up with id {spec.pad}; export the model with the input "
            f"{MASK}, or give its "
            "pad id with --pad-id, or export it with one fixed length"
        )


def _longest(model: onnx.ModelProto, x: Array, *, pad: int, run: Run) -> int:
    """The greatest bucket the model runs at (a table of positions ends somewhere), at least the data's length."""
    for length in sorted({*BUCKETS, x.shape[1]}, reverse=True):
        if length <= x.shape[1]:
            break
        row = np.full((1, length), pad, dtype=x.dtype)
        row[:, : x.shape[1]] = x[:1]
        try:
            run(model, row)
        except ModelRefusedError:
            continue
        return int(length)
    return int(x.shape[1])


def _trimmed(row: Array, spec: TensorSpec) -> Array:
    used = np.flatnonzero(row != spec.pad)
    return row[None, : max(2, int(used.max(initial=0)) + 1)]


def _mean_weight(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """[n, 1, tokens]: 1 over the number of tokens at tokens, 0 at padding; a row of nothing but padding is 0."""
    for name, value in (
        ("offramp/axis", np.array([1], dtype=np.int64)),
        ("offramp/one", np.array(1, dtype=np.float32)),
    ):
        graph.initializer.append(numpy_helper.from_array(value, name))
    float32 = onnx.TensorProto.FLOAT
    return [
        helper.make_node("Cast", ["offramp/is_token"], ["offramp/tokens"], to=float32),
        helper.make_node("ReduceSum", ["offramp/tokens", "offramp/axis"], ["offramp/count"], keepdims=1),
        helper.make_node("Max", ["offramp/count", "offramp/one"], ["offramp/some"]),
        helper.make_node("Div", ["offramp/tokens", "offramp/some"], ["offramp/share"]),
        helper.make_node("Unsqueeze", ["offramp/share", "offramp/axis"], [MEAN_WEIGHT]),
    ]


def _types(graph: onnx.GraphProto, ids: str, *, sep: int | None, kind: int, to: int) -> list[onnx.NodeProto]:
    """:func:`~offramp_worker.preprocess.texts.token_types` as operators."""
    if sep is None:
        raise InvalidArgumentError(
            f"the model reads {TYPES}, and which id separates two texts is not known; put its tokenizer.json beside "
            "it or give "
            "--sep-id (102 for BERT's own vocabulary)"
        )
    graph.initializer.append(numpy_helper.from_array(np.array(sep, dtype=_dtype(kind)), "offramp/sep"))
    return [
        helper.make_node("Equal", [ids, "offramp/sep"], ["offramp/is_sep"]),
        helper.make_node("Cast", ["offramp/is_sep"], ["offramp/seps"], to=onnx.TensorProto.INT32),
        helper.make_node("CumSum", ["offramp/seps", "offramp/axis"], ["offramp/ended"], exclusive=1),
        helper.make_node("Cast", ["offramp/ended"], ["offramp/behind"], to=onnx.TensorProto.BOOL),
        helper.make_node("And", ["offramp/behind", "offramp/is_token"], ["offramp/second"]),
        helper.make_node("Cast", ["offramp/second"], [TYPES], to=to),
    ]


def _dtype(kind: int) -> np.dtype[Any]:
    return np.dtype(np.int64 if kind == onnx.TensorProto.INT64 else np.int32)
