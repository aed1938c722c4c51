"""A plan as one ONNX graph, in which rows that leave are not computed any further.

Each stage of the plan is followed by an ``If``: where rows stay, their features are gathered, the rest of the plan runs
on them alone, in the branch, and its answers are scattered into those of the ramp. Where none stays, nothing runs. What
a worker decides by (:mod:`offramp_worker.engine.execution`) is decided here by the same heads and the same limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.compose import add_prefix_graph

from offramp_core.bundle import BACKBONE_FILE, TensorSpec
from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import Plan, canonical_json
from offramp_core.precision import EXACT
from offramp_core.scale import ScaleKind
from offramp_core.task import NO_ANSWER, Score, Task
from offramp_core.uncertainty import exit_test
from offramp_worker.bundle.confidence import Nodes
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.stages import StageGraph, plan_stages
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.plans.preparation import columns_of

EXIT = "exit"  # the output that says where a row left: the ramp's place in the plan
AT_THE_END = -1  # what it says of a row that left nowhere
EXITS_PROPERTY, PLAN_PROPERTY = "offramp.exits", "offramp.plan"
OLDEST_OPSET = 13
FLOAT, INT32, INT64, BOOL = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
    onnx.TensorProto.BOOL,
)
LARGEST = float(np.finfo(np.float32).max)
Stages = Sequence[tuple[tuple[int, ...], StageGraph]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Names of tensors of the rows that go on: the features, the model's input, and which may leave early. Empty where
    nobody reads one."""

    features: str
    entry: str
    usual: str


@dataclass(frozen=True, slots=True)
class _Answers:
    """Names of what is answered: outputs (n, width), labels (n, ...) and exits (n, 1). Empty where there is none."""

    outputs: str
    label: str
    exit: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.outputs, self.label, self.exit) if name)


def active_ramps(plan: Plan) -> tuple[str, ...]:
    """Ids of the ramps that some row can leave at; the output ``exit`` counts them from 0."""
    return tuple(ramp.id for ramp in plan.ramps if ramp.threshold > 0)


def outputs_of(bundle: Bundle) -> tuple[TensorSpec, ...]:
    """The outputs of :func:`exit_graph`, as clients see them: those of a worker's reply, and ``exit``. What is one
    number of each row is [1], as Triton knows no row without an axis."""
    replies = (TensorSpec(spec.name, spec.datatype, spec.shape or (1,)) for spec in bundle.manifest.replies)
    return (*replies, TensorSpec(EXIT, "INT64", (1,)))


def exit_graph(bundle: Bundle, plan: Plan) -> onnx.ModelProto:
    """The model with the exits of a plan.

    Parameters
    ----------
    plan : Plan
        One of this bundle (:func:`offramp_worker.plans.preparation.check_fits`), with at least one ramp that is active,
        or of another precision than the reference's.

    Returns
    -------
    ModelProto
        Its input is the model's, its outputs are :func:`outputs_of`. Tiers are left out. Its metadata has the plan and
        the ids of its exits, in JSON.

    Raises
    ------
    InvalidArgumentError
        The graphs that it is made of cannot be one.
    InvalidBundleError
        A head's tensor does not separate the input from the output.
    """
    return _Builder(bundle, plan).model()


class _Builder:
    def __init__(self, bundle: Bundle, plan: Plan) -> None:
        self._bundle, self._plan, self._task = bundle, plan, bundle.task
        columns = columns_of(plan, bundle.columns)
        active = [columns[name] for name in active_ramps(plan)]
        self._stages: Stages = plan_stages(bundle, sorted(active), plan.precision, optimise=False)
        self._places = {column: place for place, column in enumerate(active)}
        self._above = {
            columns[ramp.id]: exit_test(
                float(ramp.threshold), bundle.quantiles[columns[ramp.id]], score=bundle.task.raw_score
            ).leave_above
            for ramp in plan.ramps
            if ramp.threshold > 0
        }
        self._graphs = [stage.model for _, stage in self._stages]
        if plan.precision != EXACT:
            self._graphs.append(bundle.backbone)
        self._opsets = _opsets(self._graphs)
        self._last = len(self._stages) - 1

    def model(self) -> onnx.ModelProto:
        entry = input_name(self._bundle.backbone)
        nodes = self._nodes("offramp/plan")
        usual = self._usual(nodes, entry)
        answers = self._from(0, _Rows(entry, entry, usual), nodes)
        if self._plan.precision != EXACT:
            answers = self._again(answers, _Rows("", entry, usual), nodes)
        exits = answers.exit or _everywhere(nodes, AT_THE_END, like=answers.outputs)
        for name, spec in zip(
            (*_Answers(answers.outputs, answers.label, "").names, exits), outputs_of(self._bundle), strict=True
        ):
            nodes.add("Identity", name, name=spec.name)
        row = self._bundle.manifest.inputs[0]
        (given,) = [value for value in self._bundle.backbone.graph.input if value.name == entry]
        dims = ["batch", *(f"axis{axis}" if size < 0 else size for axis, size in enumerate(row.shape, start=1))]
        graph = helper.make_graph(
            nodes.nodes,
            self._bundle.manifest.name,
            [helper.make_tensor_value_info(entry, given.type.tensor_type.elem_type, dims)],
            [
                helper.make_tensor_value_info(
                    spec.name, FLOAT if spec.datatype == "FP32" else INT64, ["batch", *spec.shape]
                )
                for spec in outputs_of(self._bundle)
            ],
            nodes.constants,
        )
        model = helper.make_model(graph, producer_name="offramp", ir_version=max(m.ir_version for m in self._graphs))
        del model.opset_import[:]
        model.opset_import.extend(helper.make_opsetid(*each) for each in self._opsets.items())
        known = {(f.domain, f.name): f for m in self._graphs for f in m.functions}
        model.functions.extend(known.values())
        exits = json.dumps(list(active_ramps(self._plan)))
        helper.set_model_props(
            model, {EXITS_PROPERTY: exits, PLAN_PROPERTY: canonical_json(self._plan.to_mapping()).decode()}
        )
        return model

    def _nodes(self, prefix: str) -> Nodes:
        return Nodes(prefix, self._opsets[""])

    def _usual(self, nodes: Nodes, entry: str) -> str:
        """Which rows of the input may leave early (n,); empty where all may. :class:`UsualInputs` says which."""
        usual = UsualInputs(self._bundle.manifest.inputs[0], self._bundle.probe_x)
        if self._bundle.input_dtype.kind == "f":
            flat = nodes.add("Flatten", nodes.add("Cast", entry, to=FLOAT), axis=1)
            return _within(nodes, flat, usual.most)
        if usual.pad is None:
            return ""
        pad = nodes.constant(np.array(usual.pad, dtype=self._bundle.input_dtype))
        return _any(nodes, nodes.add("Not", nodes.add("Equal", entry, pad)))

    def _from(self, number: int, rows: _Rows, nodes: Nodes) -> _Answers:
        """What is answered from the stage ``number`` on."""
        columns, stage = self._stages[number]
        prefix = f"stage{number}/"
        _put(nodes, stage.model, prefix, {stage.source: rows.features, stage.entry: rows.entry})
        if number == self._last:
            outputs = f"{prefix}{stage.target}"
            return _Answers(outputs, _last_label(nodes, outputs, self._task), "")
        answers, left = self._at_ramps(columns, [f"{prefix}{name}" for name in stage.heads], rows.usual, nodes)
        features = f"{prefix}{stage.target}" if stage.target else rows.features
        entry = rows.entry if self._reads_entry(number + 1) else ""
        return self._behind(number, answers, left, _Rows(features, entry, rows.usual), nodes)

    def _reads_entry(self, number: int) -> bool:
        return any(stage.entry for _, stage in self._stages[number:])

    def _at_ramps(self, columns: Sequence[int], heads: Sequence[str], usual: str, nodes: Nodes) -> tuple[_Answers, str]:
        """What the ramps of a stage answer, and who left (n,). ``heads`` are logits and confidence of each."""
        answers, left = _Answers("", "", ""), ""
        for column, logits, confidence in zip(columns, heads[::2], heads[1::2], strict=True):
            sure = nodes.add("Greater", confidence, nodes.constant(np.array(self._above[column])))
            leaves = nodes.add("And", sure, _within(nodes, logits, LARGEST))
            if usual:
                leaves = nodes.add("And", leaves, usual)
            if left:
                leaves = nodes.add("And", leaves, nodes.add("Not", left))
            outputs = _scaled(nodes, logits, self._task)
            place = nodes.constant(np.array([[self._places[column]]], dtype=np.int64))
            new = _Answers(outputs, _exit_label(nodes, logits, outputs, self._task), place)
            chosen = nodes.add("Reshape", leaves, nodes.constant(np.array([-1, 1], dtype=np.int64)))
            nowhere = nodes.constant(np.array([[AT_THE_END]], dtype=np.int64))
            answers = (
                _Answers(
                    nodes.add("Where", chosen, new.outputs, answers.outputs),
                    nodes.add("Where", chosen, new.label, answers.label) if new.label else "",
                    nodes.add("Where", chosen, new.exit, answers.exit),
                )
                if left
                else _Answers(new.outputs, new.label, nodes.add("Where", chosen, new.exit, nowhere))
            )
            left = nodes.add("Or", left, leaves) if left else leaves
        return answers, left

    def _behind(self, number: int, answers: _Answers, left: str, rows: _Rows, nodes: Nodes) -> _Answers:
        """Let the rows that stay go on, and put what is answered behind in their places."""

        def rest(inner: Nodes, at: str) -> _Answers:
            def of(name: str) -> str:
                return inner.add("Gather", name, at, axis=0) if name else ""

            return self._from(number + 1, _Rows(of(rows.features), of(rows.entry), of(rows.usual)), inner)

        return self._where(nodes.add("Not", left), answers, rest, nodes)

    def _again(self, answers: _Answers, rows: _Rows, nodes: Nodes) -> _Answers:
        """Rows that a lower precision must not answer are answered by the model itself."""
        wrong = nodes.add("Not", _within(nodes, answers.outputs, LARGEST))
        if rows.usual:
            wrong = nodes.add("Or", wrong, nodes.add("Not", rows.usual))

        def exact(inner: Nodes, at: str) -> _Answers:
            backbone = self._bundle.backbone
            _put(inner, backbone, "exact/", {rows.entry: inner.add("Gather", rows.entry, at, axis=0)})
            outputs = f"exact/{output_name(backbone)}"
            return _Answers(outputs, _last_label(inner, outputs, self._task), "")

        return self._where(wrong, answers, exact, nodes)

    def _where(self, mask: str, answers: _Answers, rest: Callable[[Nodes, str], _Answers], nodes: Nodes) -> _Answers:
        """``answers``, and for the rows of ``mask`` (n,) what the branch ``rest`` says of them; it runs where there are
        any."""
        at = nodes.add("Transpose", nodes.add("NonZero", mask))
        some = nodes.add("Greater", nodes.add("Size", at), nodes.constant(np.array(0, dtype=np.int64)))
        prefix = f"{nodes.prefix}/{len(nodes.nodes)}"
        one, none = self._nodes(f"{prefix}/rest"), self._nodes(f"{prefix}/done")
        flat = one.constant(np.array([-1], dtype=np.int64))
        found = rest(one, one.add("Reshape", at, flat))
        pairs = [(answers.outputs, found.outputs), (answers.label, found.label), (answers.exit, found.exit)]
        placed = [
            one.add("ScatterND", all_, at, own) if own else one.add("Identity", all_) for all_, own in pairs if all_
        ]
        kept = [none.add("Identity", name) for name in answers.names]
        outputs = [f"{prefix}/answer{i}" for i in range(len(kept))]
        types = [FLOAT] + [INT64] * (len(kept) - 1)
        branches = {
            f"{name}_branch": helper.make_graph(
                each.nodes,
                each.prefix,
                [],
                [helper.make_tensor_value_info(o, t, None) for o, t in zip(ends, types, strict=True)],
                each.constants,
            )
            for name, each, ends in (("then", one, placed), ("else", none, kept))
        }
        nodes.nodes.append(helper.make_node("If", [some], outputs, name=f"{prefix}/if", **branches))
        placed_at = iter(outputs)
        return _Answers(*(next(placed_at) if name else "" for name in (answers.outputs, answers.label, answers.exit)))


def _opsets(models: Sequence[onnx.ModelProto]) -> dict[str, int]:
    """Versions of the operator sets of a graph that is made of all of them, by domain."""
    found: dict[str, int] = {}
    for model in models:
        for each in model.opset_import:
            domain = "" if each.domain == "ai.onnx" else each.domain
            if found.setdefault(domain, each.version) != each.version:
                raise InvalidArgumentError(
                    f"the bundle's graphs have versions {found[domain]} and {each.version} of the operators "
                    f"{domain or 'of ONNX'}, and one graph has one; export them alike and prepare the bundle again"
                )
    if found[""] < OLDEST_OPSET:
        raise InvalidArgumentError(
            f"{BACKBONE_FILE} has opset {found['']}; exits in a graph need {OLDEST_OPSET} or newer: export the model "
            "again and prepare its bundle"
        )
    return found


def _put(nodes: Nodes, model: onnx.ModelProto, prefix: str, inputs: Mapping[str, str]) -> None:
    """A graph among other nodes, all of its names behind a prefix. Its inputs are what ``inputs`` names."""
    graph = add_prefix_graph(model.graph, prefix)
    for name, source in inputs.items():
        if name:
            nodes.add("Identity", source, name=f"{prefix}{name}")
    nodes.nodes.extend(graph.node)
    nodes.constants.extend(graph.initializer)


def _everywhere(nodes: Nodes, value: int, *, like: str) -> str:
    """(n, 1) of one number, n as of ``like``."""
    n = nodes.add("Gather", nodes.add("Shape", like), nodes.constant(np.array([0], dtype=np.int64)), axis=0)
    shape = nodes.add("Concat", n, nodes.constant(np.array([1], dtype=np.int64)), axis=0)
    return nodes.add("Expand", nodes.constant(np.array([[value]], dtype=np.int64)), shape)


def _any(nodes: Nodes, mask: str) -> str:
    """(n, c) → (n,): rows with a true column."""
    return nodes.add("Cast", nodes.reduced("ReduceMax", nodes.add("Cast", mask, to=INT32)), to=BOOL)


def _within(nodes: Nodes, values: str, most: float) -> str:
    """(n, c) float32 → (n,): rows all of whose numbers are numbers, and at most so large."""
    limit = nodes.constant(np.array(min(most, LARGEST), dtype=np.float32))
    near = nodes.add("LessOrEqual", nodes.add("Abs", values), limit)
    return nodes.add("Not", _any(nodes, nodes.add("Not", near)))


def _scaled(nodes: Nodes, logits: str, task: Task) -> str:
    """What a head says (n, head_width) as the model would have said it (n, width): :meth:`Task.exit_outputs`."""
    if task.head_width > task.width:
        ends = [nodes.constant(np.array([i], dtype=np.int64)) for i in (0, task.width, 1)]
        return nodes.add("Slice", logits, *ends)
    return SCALES[task.scale.kind](nodes, logits, task)


def _percentages(nodes: Nodes, logits: str, task: Task) -> str:
    total = nodes.constant(np.array(task.scale.total, dtype=np.float32))
    return nodes.add("Mul", nodes.add("Softmax", logits, axis=1), total)


SCALES: Mapping[ScaleKind, Callable[[Nodes, str, Task], str]] = {
    "logits": lambda nodes, logits, _task: nodes.add("Identity", logits),
    "probabilities": _percentages,
    "log-probabilities": lambda nodes, logits, _task: nodes.add("LogSoftmax", logits, axis=1),
    "independent-probabilities": lambda nodes, logits, _task: nodes.add("Sigmoid", logits),
}


def _top(nodes: Nodes, values: str, _task: Task) -> str:
    return nodes.add("ArgMax", values, axis=1, keepdims=1)


def _top_k(nodes: Nodes, values: str, task: Task) -> str:
    k, place = nodes.constant(np.array([task.spec.k], dtype=np.int64)), f"{nodes.prefix}/place{len(nodes.nodes)}"
    nodes.nodes.append(helper.make_node("TopK", [values, k], [f"{place}/value", place], name=place, axis=1))
    return place


def _above(nodes: Nodes, values: str, task: Task) -> str:
    limits: Any = task.limits
    return nodes.add("Cast", nodes.add("Greater", values, nodes.constant(limits)), to=INT64)


#: Answers of outputs (n, width), by how exits of the task say how sure they are; a task that is not here has no label.
LABELS: Mapping[Score, Callable[[Nodes, str, Task], str]] = {"softmax": _top, "gap": _top_k, "labels": _above}


def _exit_label(nodes: Nodes, logits: str, outputs: str, task: Task) -> str:
    """:meth:`Task.exit_answers`: classes are told from logits, since probabilities may tie where these do not."""
    if task.score not in LABELS:
        return ""
    return LABELS[task.score](nodes, outputs if task.score == "labels" else logits, task)


def _last_label(nodes: Nodes, outputs: str, task: Task) -> str:
    """:meth:`Task.answers`: a row with a number that is none has no answer."""
    if task.score not in LABELS:
        return ""
    odd = _any(nodes, nodes.add("Not", nodes.add("Equal", outputs, outputs)))
    odd = nodes.add("Reshape", odd, nodes.constant(np.array([-1, 1], dtype=np.int64)))
    none = nodes.constant(np.array([[NO_ANSWER]], dtype=np.int64))
    return nodes.add("Where", odd, none, LABELS[task.score](nodes, outputs, task))
