"""Whether a model does the task that exits are made for: the top label of a classifier, or another one that was
declared.

A ramp answers early when its answer is likely the model's. An embedding, the labels of a multi-label model and the
corners of a box have an argmax as well, and nobody who serves them means it. The judgment reads the end of the graph
and the answers to sample inputs. It refuses what it can name; what logits and another task have in common (a linear
layer at the end) is taken for logits, and :meth:`Found.assumed` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_core.scale import Scale
from offramp_core.task import LABEL, Output, Task, TaskSpec, task_of
from offramp_worker.prepare.source.data import FloatArray

# What hands values on, or moves them to another place; of several inputs the first has the values.
CARRIERS = frozenset(
    {
        "Cast",
        "CastLike",
        "Clip",
        "DequantizeLinear",
        "Dropout",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "QuantizeLinear",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
SCALINGS = frozenset({"Add", "Div", "Mul", "Sub"})  # carriers where one side is a constant
INDEPENDENT = frozenset({"HardSigmoid", "Sigmoid"})
QUANTITIES = frozenset({"Abs", "Exp", "Relu", "Softplus", "Sqrt", "ThresholdedRelu"})
NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
NAMES = {
    "an embedding": frozenset(
        {
            "embedding",
            "embeddings",
            "image_embeds",
            "last_hidden_state",
            "pooler_output",
            "sentence_embedding",
            "text_embeds",
            "token_embeddings",
        }
    ),
    "boxes": frozenset({"bbox", "bboxes", "box", "boxes", "detection_boxes", "pred_boxes"}),
}
FEWEST_ROWS = 8  # that show a regularity which is none of chance
TOLERANCE = 1e-3  # of sums and lengths; half precision has 1e-3
LOOSE = 0.05  # of sums behind a softmax, whose results may have been rounded to 8 bits
CORNERS = 4

TAKEN: dict[Output, str] = {
    "Top1": "it must be [batch, classes] with at least two classes, logits or softmax probabilities, of which the "
    "largest is the answer",
    "TopK": "TopK takes [batch, classes], logits or softmax probabilities, with more classes than an answer names",
    "MultiLabel": "MultiLabel takes [batch, labels] with at least two labels, a logit or a sigmoid's probability for "
    "each",
    "Binary": "Binary takes [batch] or [batch, 1], one logit or a sigmoid's probability",
    "Regression": "Regression takes [batch] or [batch, numbers], float32",
    "Embedding": "Embedding takes [batch, width] with a width of at least two, float32",
}


@dataclass(frozen=True, slots=True)
class FoundTask:
    """What a model was found to do: ``task``, None for the top label. ``operators`` are those that the output ends in;
    ``scale`` says what its numbers are taken for."""

    output: str
    operators: tuple[str, ...]
    scale: Scale
    task: Task | None = None

    def assumed(self, answers: FloatArray) -> tuple[str, ...]:
        """What the scores (n, classes) are taken for, and what speaks against it without proving it."""
        found = f"{_found(self.output, self.operators, answers)} on {len(answers)} rows"
        if self.task is not None:
            return (
                f"{self.task.title}: output {found}, taken for "
                f"{self.scale.kind if self.task.lesson != 'values' else 'numbers'}",
                *self._sameness(answers),
            )
        return (
            f"top label of {answers.shape[1]} classes: output {found}, taken for {self.scale.kind}",
            *self._doubts(answers),
        )

    def _sameness(self, answers: FloatArray) -> list[str]:
        assert self.task is not None
        served = self.task.answers(answers)
        alike = self.task.losses(served, np.broadcast_to(served[:1], served.shape)).max() == 0
        return [f"all {len(answers)} rows have the same answer: exits learn nothing of others"] if alike else []

    def _doubts(self, answers: FloatArray) -> list[str]:
        labels = answers.argmax(axis=1)
        doubts = []
        if (labels == labels[0]).all():
            doubts.append(
                f"all {len(answers)} rows are answered with class {labels[0]}: exits learn nothing of the others"
            )
        if self.scale.kind != "logits":
            return doubts
        if answers.min() >= 0:
            doubts.append("no score is below 0, as in a regression; logits mostly are on both sides")
        if answers.shape[1] == CORNERS and (answers[:, 2:] >= answers[:, :2]).all():
            doubts.append("columns 2 and 3 are never below 0 and 1, as corners of boxes")
        if "Tanh" in self.operators:
            doubts.append("Tanh bounds the scores, as those of an embedding or a regression")
        return doubts


def declared_task(
    model: onnx.ModelProto, output: str, answers: FloatArray, *, n_rows: int, spec: TaskSpec | None = None
) -> FoundTask:
    """The task of a model by the end of its graph and its ``answers`` to ``n_rows`` sample inputs; ``spec`` is the one
    that was declared, None for the top label.

    Raises
    ------
    ModelRefusedError
        It does another task. Names the output, its shape, the operators it ends in and its range, what it looks like,
        and what would be taken.
    """
    operators = last_operators(model, output)
    kind: Output = "Top1" if spec is None else spec.output
    if kind in ("Top1", "TopK"):
        reason = _other_shape(answers, n_rows) or _other_name(output) or _other_scores(answers, operators)
    else:
        reason = _not_of(kind, answers, operators, n_rows)
    if reason or spec is None:
        refused = f"output {_found(output, operators, answers, shape=True)}: {reason}; {TAKEN[kind]}"
        if reason:
            raise ModelRefusedError(refused)
        return FoundTask(output, operators, found_scale(answers, operators))
    scale = _scale_of(kind, answers, operators)
    try:
        task = task_of(spec, width=answers.shape[1], scale=scale)
    except InvalidArgumentError as error:
        raise ModelRefusedError(
            f"output {_found(output, operators, answers, shape=True)}: {error}; {TAKEN[kind]}"
        ) from error
    if output == LABEL and task.label_shape is not None:
        raise ModelRefusedError(
            f"output {output!r} is called as the labels that replies have beside it; export the model with another "
            "name for it"
        )
    return FoundTask(output, operators, scale, task)


def add_column_axis(model: onnx.ModelProto) -> None:
    """Make [batch, 1] of an output [batch], under the same name: what exits say has columns."""
    output = model.graph.output[0]
    name, flat = output.name, f"{output.name}/flat"
    for node in model.graph.node:
        node.input[:] = [flat if read == name else read for read in node.input]
        node.output[:] = [flat if made == name else made for made in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 1], dtype=np.int64), f"{name}/shape"))
    model.graph.node.append(helper.make_node("Reshape", [flat, f"{name}/shape"], [name], name=f"{name}/column"))
    output.CopyFrom(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 1]))


def _not_of(kind: Output, answers: FloatArray, operators: Sequence[str], n_rows: int) -> str:
    """Why answers cannot be those of a task that is not about classes; empty where they can."""
    if answers.ndim != 2 or len(answers) != n_rows:
        several = answers.ndim > 2 and len(answers) == n_rows
        return "several rows for each input, as of tokens, boxes or pixels" if several else "no row for each input"
    width = answers.shape[1]
    if kind == "Binary" and width != 1:
        return f"{width} numbers for each input"
    if kind in ("MultiLabel", "Embedding") and width == 1:
        return "one number for each input"
    if width > 1 and kind != "Embedding" and _adds_up(answers, operators) and not _many_sigmoids(answers, operators):
        return "a distribution over classes, one of which is right: declare Top1 or TopK"
    if kind in ("MultiLabel", "Binary") and set(operators) <= INDEPENDENT and operators and not _unit(answers):
        return "a sigmoid that is scaled afterwards, as coordinates are"
    return ""


def _scale_of(kind: Output, answers: FloatArray, operators: Sequence[str]) -> Scale:
    if kind == "TopK":
        return found_scale(answers, operators)
    if kind in ("MultiLabel", "Binary"):
        sigmoid = bool(operators) and set(operators) <= INDEPENDENT
        return Scale("independent-probabilities" if sigmoid or _unit(answers) else "logits")
    return Scale("logits")


def _unit(answers: FloatArray) -> bool:
    """Whether all numbers may be probabilities."""
    return bool(answers.min() >= 0 and answers.max() <= 1)


def found_scale(answers: FloatArray, operators: Sequence[str] = ()) -> Scale:
    """The scale of a classifier's ``answers`` (n, n_classes) to some rows, where it ends in ``operators``."""
    if _adds_up(answers, operators):
        total = float(np.median(answers.sum(axis=1, dtype=np.float64)))
        return Scale("probabilities", 1.0 if abs(total - 1) <= LOOSE else float(f"{total:.4g}"))
    sums = np.exp(answers.astype(np.float64)).sum(axis=1) if answers.max() <= TOLERANCE else np.zeros(1)
    tolerance = LOOSE if set(operators) == {"LogSoftmax"} else TOLERANCE
    return Scale("log-probabilities" if np.abs(sums - 1).max() <= tolerance else "logits")


def last_operators(model: onnx.ModelProto, output: str) -> tuple[str, ...]:
    """Types of the operators that an output's values come from, behind all that only carries, scales or joins them."""
    graph = inliner.inline_local_functions(model).graph if model.functions else model.graph
    makers = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {name for name, node in makers.items() if node.op_type == "Constant"}
    seen: set[str] = set()
    found: set[str] = set()
    waiting = [output]
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if name in seen or node is None:
            continue
        seen.add(name)
        before = _carried(node, constants)
        waiting += before
        found |= set() if before else {node.op_type}
    return tuple(sorted(found))


def _carried(node: onnx.NodeProto, constants: set[str]) -> list[str]:
    """The inputs whose values a node hands on as they are or scaled; none where it makes values of its own."""
    if node.op_type == "Concat":
        return list(node.input)
    if node.op_type in CARRIERS:
        return list(node.input[:1])
    varying = [name for name in node.input if name not in constants]
    return varying if node.op_type in SCALINGS and len(varying) == 1 else []


def _found(output: str, operators: Sequence[str], answers: FloatArray, *, shape: bool = False) -> str:
    """An output in words: its name, what it ends in, where its values lie."""
    sizes = f" {list(answers.shape)}" if shape else ""
    end = f" ends in {' and '.join(operators)} and" if operators else ""
    span = f" lies in [{answers.min():.3g}, {answers.max():.3g}]" if answers.size else " is empty"
    return f"{output!r}{sizes}{end}{span}"


def _other_shape(answers: FloatArray, n_rows: int) -> str:
    if answers.shape in ((n_rows,), (n_rows, 1)):
        return (
            "one number for each input, a regression or the answer to yes or no: declare --task Regression or --task "
            "Binary "
            "(a classifier of two classes has two columns)"
        )
    if answers.ndim > 2 and len(answers) == n_rows:
        return "several rows for each input, as of tokens, boxes or pixels"
    return "" if answers.ndim == 2 and len(answers) == n_rows and answers.shape[1] > 1 else "no row for each input"


def _other_name(output: str) -> str:
    return next((f"by its name {what}" for what, names in NAMES.items() if output.lower() in names), "")


def _other_scores(answers: FloatArray, operators: Sequence[str]) -> str:
    """Which other task scores that are no distribution over classes belong to; empty where that cannot be told."""
    kinds = set(operators)
    if _adds_up(answers, operators) and not _many_sigmoids(answers, operators):
        return ""
    before = f"the tensor before {' and '.join(operators)}"
    if kinds and kinds <= INDEPENDENT:
        return (
            "a probability for each label, or coordinates, independent of each other "
            f"(declare --task MultiLabel; if exactly one label is right for every input, export {before})"
        )
    if kinds and kinds <= QUANTITIES and answers.min() >= 0:
        return (
            "quantities of at least 0, such as boxes, counts or distances (if these are scores of classes, export "
            f"{before})"
        )
    if kinds and kinds <= NORMALIZATIONS:
        return "normalized features, an embedding: declare --task Embedding"
    return "rows of one length, an embedding: declare --task Embedding" if _one_length(answers) else ""


def _adds_up(answers: FloatArray, operators: Sequence[str]) -> bool:
    """Whether every row is a distribution over classes: shares, or votes of a fixed number."""
    sums = answers.sum(axis=1, dtype=np.float64)
    tolerance = LOOSE if set(operators) == {"Softmax"} else TOLERANCE
    return bool(answers.min() >= 0 and sums.min() > 0 and np.ptp(sums) <= tolerance * sums.max())


def _many_sigmoids(answers: FloatArray, operators: Sequence[str]) -> bool:
    """Sigmoids of more than two labels add up by chance alone; those of z and -z always do."""
    return bool(operators) and set(operators) <= INDEPENDENT and answers.shape[1] > 2


def _one_length(answers: FloatArray) -> bool:
    """Whether all rows have one length although they differ."""
    lengths = np.linalg.norm(answers.astype(np.float64), axis=1)
    differ = bool(np.ptp(answers, axis=0).max() > TOLERANCE * lengths.max())
    return len(answers) >= FEWEST_ROWS and differ and bool(np.ptp(lengths) <= TOLERANCE * lengths.max())
