"""Cutting a plan's stages out of the graph as ONNX Runtime optimises it, so that a cut costs next to nothing.

ONNX Runtime optimises a session's graph as a whole: it fuses operators and, for convolutions, keeps features in a
blocked layout (NCHWc) of its own. Cut before that, every stage begins and ends in the plain layout, and the fusions
around the cut are lost: on ResNet-56 each residual addition behind a cut runs by itself, with two changes of layout,
because the features that came in were plain. So the backbone is optimised in one piece, with the plan's heads attached,
and the optimised graph is cut: at the tensor that the ramp reads, or at the one it was made of by nothing but a change
of layout or of type. What is handed from stage to stage is then what one session would hand from operator to operator,
and a row that leaves nowhere gets the exact session's answer bit for bit at the same batch size. The first axis is the
batch in every layout, so rows can be dropped as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import onnx
from onnx import helper

from offramp_core.errors import InvalidBundleError
from offramp_core.precision import Precision
from offramp_worker.bundle.confidence import DOUBLE, add_confidence
from offramp_worker.bundle.graph import (
    between,
    check_separates,
    input_heads_model,
    input_name,
    output_name,
    stage_model,
    tapped_model,
)
from offramp_worker.bundle.heads import HeadNodes, pool_by_one_product
from offramp_worker.bundle.load import Bundle
from offramp_worker.devices import optimised_graph

Groups = Sequence[Sequence[HeadNodes]]
FLOAT = onnx.TensorProto.FLOAT
# Operators that change the layout or the type of features and nothing else: the tensor they read says the same.
CHANGES_OF_FORM = frozenset({"DequantizeLinear", "Identity", "ReorderOutput", "Transpose"})


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage as a graph of its own, ready for a session."""

    #: Its outputs are ``target`` (unless empty) and then ``heads``.
    model: onnx.ModelProto
    #: The features it begins with; the model's input in the first stage.
    source: str
    #: The model's input where the stage makes something of it besides (a mask); else empty.
    entry: str
    #: The features it hands on. Empty where these are its source: heads that read the model's input need no backbone.
    target: str
    #: Of each head given, in order, the logits and the confidence: the largest softmax probability, (n,) float64.
    heads: tuple[str, ...]
    #: Whether the graph is optimised already, so that a session should leave it as it is.
    optimised: bool

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.target, *self.heads) if self.target else self.heads


def stage_graphs(
    model: onnx.ModelProto, groups: Groups, *, shapes: dict[str, tuple[int, ...]], optimise: bool = True
) -> tuple[StageGraph, ...]:
    """The stages of a plan.

    Parameters
    ----------
    groups : sequence of sequences of HeadNodes
        Of the plan's ramps, in network order; the heads of a group read the same tensor.
    shapes : dict
        Shape without batch axis of each tensor a head reads.
    optimise : bool
        Whether to cut the graph as this machine's CPU runs it. False for other devices, whose sessions optimise what
        they are given.

    Returns
    -------
    tuple of StageGraph
        One per group, and a last one without heads that runs to the model's output.

    Raises
    ------
    InvalidBundleError
        A head's tensor does not separate the input from the output.
    """
    heads, read = [head for group in groups for head in group], [group[0].source for group in groups]
    if optimise:
        # Optimised beyond recognition around a cut, the graph as it was given has all its tensors, or says what is
        # wrong.
        with contextlib.suppress(InvalidBundleError):
            return _cut_all(model, groups, _optimised_cutter(model, heads, read))
    return _cut_all(model, groups, _plain_cutter(model, shapes, on_device=not optimise))


def plan_stages(
    bundle: Bundle, active: Sequence[int], precision: Precision, *, optimise: bool
) -> tuple[tuple[tuple[int, ...], StageGraph], ...]:
    """The stages of the active columns at a precision, in network order, each with its columns; those whose model is at
    the input are first, and the last one runs to the output without any.

    Raises
    ------
    InvalidBundleError
        A head's tensor does not separate the input from the output.
    """
    entry, sides = input_name(bundle.backbone), list[tuple[tuple[int, ...], StageGraph]]()
    own, ramps = list[list[HeadNodes]](), list[tuple[int, ...]]()
    for place, columns in groupby(active, key=lambda j: head.source if (head := bundle.heads[j]) is not None else j):
        group = tuple(columns)
        if isinstance(place, int):
            side, name = bundle.side_models[place], bundle.columns[place].id
            sides.append((group, side_stage(side, name, entry=entry, optimise=optimise)))
        else:
            own.append([head for j in group if (head := bundle.heads[j]) is not None])
            ramps.append(group)
    graphs = stage_graphs(bundle.backbones[precision], own, shapes=bundle.shapes, optimise=optimise)
    stages = sorted([*sides, *zip(ramps, graphs[:-1], strict=True)], key=lambda item: item[0])
    return (*stages, ((), graphs[-1]))


def side_stage(model: onnx.ModelProto, name: str, *, entry: str, optimise: bool = True) -> StageGraph:
    """A whole model at the input, called ``name``, as a stage: it looks at the backbone's input ``entry`` and hands it
    on."""
    side = onnx.ModelProto()
    side.CopyFrom(model)
    head = HeadNodes(name, entry, output_name(model), (), ())
    _add_confidence(side, [head], by_sums=not optimise)
    return StageGraph(side, input_name(model), "", "", (head.output, _confidence(head)), optimised=False)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A backbone in pieces to be timed. ``segments`` lie between ``tensors``, in order; the last one runs to the
    output.

    ``heads`` has per head its id, the segment it ends (None: it reads the model's input) and the stage of that segment
    with the head.
    """

    tensors: tuple[str, ...]
    segments: tuple[StageGraph, ...]
    heads: tuple[tuple[str, int | None, StageGraph], ...]


def pieces(
    model: onnx.ModelProto,
    heads: Sequence[HeadNodes],
    tensors: Sequence[str],
    *,
    shapes: dict[str, tuple[int, ...]],
    optimise: bool = True,
) -> Pieces:
    """The segments between ``tensors`` (cut vertices in network order) and each head with its segment, cut as a worker
    cuts them.

    Raises
    ------
    InvalidBundleError
        A tensor does not separate the input from the output.
    """
    cut = _plain_cutter(model, shapes, on_device=not optimise)
    if optimise:
        with contextlib.suppress(InvalidBundleError):
            cut = _optimised_cutter(model, heads, tensors)
    ends = [input_name(model), *tensors, output_name(model)]
    segments = tuple(cut(source, target, ()) for source, target in pairwise(ends))
    stages: list[tuple[str, int | None, StageGraph]] = []
    for head in heads:
        number = ends.index(head.source) - 1
        source = head.source if number < 0 else ends[number]
        stages.append((head.ramp_id, None if number < 0 else number, cut(source, head.source, (head,))))
    return Pieces(tuple(tensors), segments, tuple(stages))


Cut = Callable[[str, str, Sequence[HeadNodes]], StageGraph]  # from a tensor, to a tensor, with heads there


def _optimised_cutter(model: onnx.ModelProto, heads: Sequence[HeadNodes], tensors: Sequence[str]) -> Cut:
    """Cuts the optimised graph, at the forms of ``tensors`` that are handed on."""
    entry, end = input_name(model), output_name(model)
    whole = _optimised_with(model, heads, tensors)
    forms = {tensor: _form_handed_on(whole, tensor, end) for tensor in tensors if tensor != entry}
    forms |= {entry: (entry, FLOAT), end: (end, FLOAT)}

    def cut(source: str, target: str, group: Sequence[HeadNodes]) -> StageGraph:
        outputs = [value for head in group for value in _head_outputs(head)]
        if target != source:
            outputs.insert(0, _value(*forms[target]))
        return _extract(whole, source=_value(*forms[source]), outputs=outputs, heads=2 * len(group))

    return cut


def _plain_cutter(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], *, on_device: bool) -> Cut:
    """Cuts the graph as it was given; what is attached to it is what runs well ``on_device`` or else on the CPU."""
    entry, end = input_name(model), output_name(model)

    def cut(source: str, target: str, group: Sequence[HeadNodes]) -> StageGraph:
        if target == source:
            stage = input_heads_model(model, group)
        else:
            ends = (None if source == entry else source, None if target == end else target)
            stage = stage_model(model, source=ends[0], target=ends[1], heads=group, shapes=shapes)
        if on_device:
            pool_by_one_product(stage.graph)
        _add_confidence(stage, group, by_sums=on_device)
        outputs = tuple(name for head in group for name in (head.output, _confidence(head)))
        reads_entry = source != entry and any(value.name == entry for value in stage.graph.input)
        handed_on = "" if target == source else target
        return StageGraph(stage, source, entry if reads_entry else "", handed_on, outputs, optimised=False)

    return cut


def _cut_all(model: onnx.ModelProto, groups: Groups, cut: Cut) -> tuple[StageGraph, ...]:
    ends = [input_name(model), *(group[0].source for group in groups), output_name(model)]
    return tuple(
        cut(source, target, group) for (source, target), group in zip(pairwise(ends), [*groups, ()], strict=True)
    )


def _optimised_with(model: onnx.ModelProto, heads: Sequence[HeadNodes], tensors: Sequence[str]) -> onnx.ModelProto:
    """The optimised graph with heads and their confidence, in which each of ``tensors`` still exists."""
    tapped = tapped_model(model, heads)
    _add_confidence(tapped, heads)
    known = {value.name for value in (*tapped.graph.input, *tapped.graph.output)}
    # As an output a tensor outlives all fusions.
    tapped.graph.output.extend(_value(tensor, FLOAT) for tensor in dict.fromkeys(tensors) if tensor not in known)
    return optimised(tapped)


def _head_outputs(head: HeadNodes) -> list[onnx.ValueInfoProto]:
    return [_value(head.output, FLOAT), _value(_confidence(head), DOUBLE)]


def _form_handed_on(whole: onnx.ModelProto, tensor: str, end: str) -> tuple[str, int]:
    """The form of a tensor that everything behind it can be computed from, and its element type."""
    producer = {name: node for node in whole.graph.node for name in node.output}
    constants = {constant.name: constant for constant in whole.graph.initializer}
    name, kind = tensor, int(FLOAT)
    while True:
        try:
            check_separates(whole, begin=name, end=end, used=between(whole.graph, begin=name, ends=[end])[1])
        except InvalidBundleError:
            node = producer.get(name)
            if node is None or not _only_changes_form(node):
                raise
            if node.op_type == "DequantizeLinear":
                zero = constants.get(node.input[2]) if len(node.input) > 2 else None
                kind = zero.data_type if zero is not None else int(onnx.TensorProto.UINT8)
            name = node.input[0]
        else:
            return name, kind


def _only_changes_form(node: onnx.NodeProto) -> bool:
    """Whether a node says what it reads in another layout or type, row by row."""
    if node.op_type == "Transpose":
        return any(attribute.name == "perm" and attribute.ints[0] == 0 for attribute in node.attribute)
    return node.op_type in CHANGES_OF_FORM


def _extract(
    whole: onnx.ModelProto, *, source: onnx.ValueInfoProto, outputs: Sequence[onnx.ValueInfoProto], heads: int
) -> StageGraph:
    entry = input_name(whole)
    names = [value.name for value in outputs]
    nodes, used = between(whole.graph, begin=source.name, ends=names)
    if source.name != entry:
        check_separates(whole, begin=source.name, end=names[0], used=used)
    reads_entry = source.name != entry and entry in used
    graph = onnx.GraphProto(name=f"{source.name}..{names[0]}")
    graph.node.extend(nodes)
    graph.initializer.extend(t for t in whole.graph.initializer if t.name in used)
    graph.input.extend(v for v in whole.graph.input if v.name == entry and (reads_entry or source.name == entry))
    if source.name != entry:
        graph.input.insert(0, source)
    graph.output.extend(outputs)
    model = onnx.ModelProto(ir_version=whole.ir_version, producer_name="offramp")
    model.opset_import.extend(whole.opset_import)
    model.functions.extend(whole.functions)
    model.graph.CopyFrom(graph)
    split = len(names) - heads
    return StageGraph(
        model, source.name, entry if reads_entry else "", "".join(names[:split]), tuple(names[split:]), True
    )


def _confidence(head: HeadNodes) -> str:
    return f"offramp/{head.ramp_id}/confidence"


def _add_confidence(model: onnx.ModelProto, heads: Sequence[HeadNodes], *, by_sums: bool = False) -> None:
    """What :class:`offramp_core.uncertainty.ExitTest` reads."""
    for head in heads:
        add_confidence(model, output=head.output, task=head.task, name=_confidence(head), by_sums=by_sums)


def optimised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that ONNX Runtime runs for ``model`` on this machine. It names operators of ONNX Runtime's own.

    Raises
    ------
    InvalidBundleError
        ONNX Runtime refuses the model.
    """
    try:
        return optimised_graph(model)
    except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
        raise InvalidBundleError(
            f"backbone.onnx: ONNX Runtime refuses it: {str(error).partition(chr(10))[0]}"
        ) from error


def _value(name: str, kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None)
