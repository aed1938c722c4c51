"""What ``offramp prepare`` takes for a classifier's top label, and what it refuses by name because it is another
task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_prepare_refusals import ROWS, classifier, weight

from offramp_core.errors import ModelRefusedError
from offramp_core.task import TaskSpec
from offramp_worker.devices import open_session
from offramp_worker.prepare.source.sources import load_backbone
from offramp_worker.prepare.source.task import declared_task

Array = npt.NDArray[np.float32]
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(0, 3, (200, 5)).astype(np.float32)


def whole(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def number(name: str, value: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype=np.float32), name)


def ending(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    *weights: onnx.TensorProto,
    output: str = "end",
    classes: int = 5,
    rank: int = 2,
) -> str:
    """A small network with logits ``y`` of ``classes``, and what ``nodes`` make of them."""
    path = classifier(folder / "m.onnx")
    model = onnx.load(path)
    graph = model.graph
    kept = [tensor for tensor in graph.initializer if tensor.name != "v"]
    del graph.initializer[:]
    graph.initializer.extend([*kept, weight("v", 4, classes), *weights])
    graph.node.extend(nodes)
    graph.output[0].CopyFrom(helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * rank))
    onnx.save(model, path)
    return path


def chain(*operators: str, source: str = "y", target: str = "end") -> list[onnx.NodeProto]:
    """Operators of one input, one after the other."""
    names = [source, *(f"{target}{i}" for i in range(1, len(operators))), target]
    kinds = {
        "Cast": {"to": TensorProto.FLOAT},
        "Softmax": {"axis": 1},
        "LogSoftmax": {"axis": 1},
        "Flatten": {"axis": 1},
    }
    return [
        helper.make_node(operator, [names[i]], [names[i + 1]], **kinds.get(operator, {}))
        for i, operator in enumerate(operators)
    ]


def multi_label(folder: Path) -> str:
    return ending(folder, chain("Sigmoid"))


def multi_label_dressed_up(folder: Path) -> str:
    nodes = [*chain("Sigmoid", "Identity", "Cast", target="s"), helper.make_node("Reshape", ["s", "shape"], ["end"])]
    return ending(folder, nodes, whole("shape", -1, 5))


def one_sigmoid_for_each_label(folder: Path) -> str:
    parts = [f"part{i}" for i in range(5)]
    nodes = [helper.make_node("Split", ["y"], parts, axis=1, num_outputs=5)]
    nodes += [helper.make_node("Sigmoid", [part], [f"p{part}"]) for part in parts]
    return ending(folder, [*nodes, helper.make_node("Concat", [f"p{part}" for part in parts], ["end"], axis=1)])


def boxes_in_pixels(folder: Path) -> str:
    nodes = [*chain("Sigmoid", target="s"), helper.make_node("Mul", ["s", "size"], ["end"])]
    return ending(folder, nodes, number("size", 640.0), classes=4)


def sigmoid_in_a_function(folder: Path) -> str:
    path = ending(folder, [helper.make_node("squash", ["y"], ["end"], domain="local")])
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    body = [helper.make_node("Sigmoid", ["a"], ["b"])]
    model.functions.append(helper.make_function("local", "squash", ["a"], ["b"], body, [helper.make_opsetid("", 18)]))
    onnx.save(model, path)
    return path


def embedding(folder: Path) -> str:
    return ending(folder, [helper.make_node("LpNormalization", ["y"], ["end"], axis=1, p=2)], classes=32)


def embedding_normalized_by_hand(folder: Path) -> str:
    nodes = [
        helper.make_node("ReduceL2", ["y", "axis"], ["length"], keepdims=1),
        helper.make_node("Div", ["y", "length"], ["end"]),
    ]
    return ending(folder, nodes, whole("axis", 1), classes=32)


def embedding_behind_a_layer_norm(folder: Path) -> str:
    nodes = [helper.make_node("LayerNormalization", ["y", "scale"], ["end"], axis=1)]
    return ending(folder, nodes, weight("scale", 32), classes=32)


REFUSED = {
    "multi-label": (multi_label, r"'end' \[16, 5\] ends in Sigmoid and lies in \[.*\]: a probability for each label"),
    "multi-label behind casts and reshapes": (multi_label_dressed_up, "ends in Sigmoid .* probability for each label"),
    "a sigmoid for each label": (one_sigmoid_for_each_label, "ends in Sigmoid .* probability for each label"),
    "a sigmoid in a function": (sigmoid_in_a_function, "ends in Sigmoid .* probability for each label"),
    "boxes in pixels": (boxes_in_pixels, "ends in Sigmoid .* probability for each label, or coordinates"),
    "rows of length 1": (embedding, r"'end' \[16, 32\] ends in LpNormalization .*: rows of one length, an embedding"),
    "rows of length 1, by hand": (embedding_normalized_by_hand, "ends in Div .*: rows of one length, an embedding"),
    "a layer norm at the end": (embedding_behind_a_layer_norm, "ends in LayerNormalization .* an embedding"),
    "a rectified regression": (
        lambda d: ending(d, chain("Relu"), classes=4),
        "ends in Relu .*: quantities of at least 0",
    ),
    "rates": (lambda d: ending(d, chain("Exp")), "ends in Exp .*: quantities of at least 0"),
    "scales": (lambda d: ending(d, chain("Softplus")), "ends in Softplus .*: quantities of at least 0"),
    "distances": (lambda d: ending(d, chain("Abs", "Sqrt")), "ends in Sqrt .*: quantities of at least 0"),
    "one column": (lambda d: ending(d, chain("Identity"), classes=1), r"'end' \[16, 1\] .*: one number for each input"),
    "named as boxes": (lambda d: ending(d, chain("Identity", target="pred_boxes"), output="pred_boxes"), "by its name"),
    "named as embedding": (
        lambda d: ending(d, chain("Identity", target="sentence_embedding"), output="sentence_embedding"),
        "'sentence_embedding' .* by its name an embedding",
    ),
    "scores for each token": (
        lambda d: ending(d, [helper.make_node("Unsqueeze", ["y", "one"], ["end"])], whole("one", 1), rank=3),
        r"'end' \[16, 1, 5\] .*: several rows for each input",
    ),
    "no axis of classes": (
        lambda d: ending(
            d, [helper.make_node("ReduceSum", ["y", "one"], ["end"], keepdims=0)], whole("one", 1), rank=1
        ),
        r"'end' \[16\] .*: one number for each input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_classifier_is_refused_with_what_was_found_and_what_is_taken(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ModelRefusedError, match=message) as caught:
        load_backbone(make(tmp_path), ROWS)
    said = str(caught.value)
    assert "must be [batch, classes] with at least two classes, logits or softmax probabilities" in said
    assert "\n" not in said


def two_classes_from_one_sigmoid(folder: Path) -> str:
    nodes = [
        *chain("Sigmoid", target="s"),
        helper.make_node("Sub", ["one", "s"], ["q"]),
        helper.make_node("Concat", ["q", "s"], ["end"], axis=1),
    ]
    return ending(folder, nodes, number("one", 1.0), classes=1)


def two_classes_that_both_end_in_a_sigmoid(folder: Path) -> str:
    nodes = [
        helper.make_node("Neg", ["y"], ["minus"]),
        helper.make_node("Concat", ["minus", "y"], ["z"], axis=1),
        *chain("Sigmoid", source="z"),
    ]
    return ending(folder, nodes, classes=1)


def softmax_by_hand(folder: Path) -> str:
    nodes = [
        *chain("Exp", target="e"),
        helper.make_node("ReduceSum", ["e", "one"], ["sum"], keepdims=1),
        helper.make_node("Div", ["e", "sum"], ["end"]),
    ]
    return ending(folder, nodes, whole("one", 1))


def probabilities_from_a_log_softmax(folder: Path) -> str:
    return ending(folder, chain("LogSoftmax", "Exp"))


def class_maps_averaged(folder: Path) -> str:
    """As SqueezeNet ends: a convolution with a map for each class, rectified, averaged."""
    nodes = [
        helper.make_node("Conv", ["c", "k"], ["maps"]),
        *chain("Relu", "GlobalAveragePool", "Flatten", source="maps"),
    ]
    return ending(folder, nodes, weight("k", 5, 4, 1, 1))


def similarities(folder: Path) -> str:
    """As a zero-shot classifier ends: cosines of the picture with texts, all of them above 0, times 100."""
    nodes = [
        helper.make_node("Tanh", ["y"], ["t"]),
        helper.make_node("Add", ["t", "up"], ["cosines"]),
        helper.make_node("Mul", ["cosines", "hundred"], ["end"]),
    ]
    return ending(folder, nodes, number("up", 1.5), number("hundred", 100.0))


ACCEPTED = {
    "logits": (lambda d: ending(d, chain("Identity")), "logits"),
    "logits of two classes": (lambda d: ending(d, chain("Identity"), classes=2), "logits"),
    "logits of a thousand classes": (lambda d: ending(d, chain("Identity"), classes=1_000), "logits"),
    "a softmax": (lambda d: ending(d, chain("Softmax")), "probabilities"),
    "a softmax of a thousand classes": (lambda d: ending(d, chain("Softmax"), classes=1_000), "probabilities"),
    "a softmax of two classes": (lambda d: ending(d, chain("Softmax", "Cast"), classes=2), "probabilities"),
    "a softmax by hand": (softmax_by_hand, "probabilities"),
    "a log-softmax": (lambda d: ending(d, chain("LogSoftmax")), "log-probabilities"),
    "the exponent of a log-softmax": (probabilities_from_a_log_softmax, "probabilities"),
    "one sigmoid and its complement": (two_classes_from_one_sigmoid, "probabilities"),
    "two sigmoids that add up to 1": (two_classes_that_both_end_in_a_sigmoid, "probabilities"),
    "rectified class maps, averaged": (class_maps_averaged, "logits"),
    "similarities above 0": (similarities, "logits"),
    "a leaky rectifier": (lambda d: ending(d, chain("LeakyRelu")), "logits"),
    "a swish": (
        lambda d: ending(d, [*chain("Sigmoid", target="g"), helper.make_node("Mul", ["y", "g"], ["end"])]),
        "logits",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_classifiers_are_taken_however_they_end(case: str, tmp_path: Path) -> None:
    make, scale = ACCEPTED[case]
    assert load_backbone(make(tmp_path), ROWS).task.scale.kind == scale


def test_confident_probabilities_are_no_embedding_although_their_rows_have_length_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["y", "sure"], ["z"]), *chain("Softmax", source="z")]
    backbone = load_backbone(ending(tmp_path, nodes, number("sure", 1e6)), ROWS)
    assert backbone.task.scale.kind == "probabilities"


def task_of(answers: Array, *operators: str, folder: Path) -> tuple[str, ...]:
    """What is assumed of a network that ends in ``operators`` when it gives ``answers``."""
    model = onnx.load(ending(folder, chain(*(operators or ("Identity",)))))
    return declared_task(model, "end", answers, n_rows=len(answers)).assumed(answers)


def test_the_report_says_what_the_scores_are_taken_for(tmp_path: Path) -> None:
    (said,) = task_of(LOGITS, folder=tmp_path)
    low, high = LOGITS.min(), LOGITS.max()
    assert said == (
        f"top label of 5 classes: output 'end' ends in MatMul and lies in [{low:.3g}, {high:.3g}] on 200 rows, taken "
        "for logits"
    )


BOXES = np.concatenate([low := RNG.uniform(0, 300, (200, 2)), low + RNG.uniform(1, 300, (200, 2))], axis=1).astype(
    np.float32
)
DOUBTS = {
    "always the same label": (
        LOGITS + np.array([40, 0, 0, 0, 0], np.float32),
        "all 200 rows are answered with class 0",
    ),
    "nothing below 0": (LOGITS - LOGITS.min(), "no score is below 0, as in a regression"),
    "corners": (BOXES, "columns 2 and 3 are never below 0 and 1, as corners of boxes"),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_what_cannot_be_told_is_assumed_and_said(case: str, tmp_path: Path) -> None:
    answers, message = DOUBTS[case]
    first, *doubts = task_of(answers, folder=tmp_path)
    assert first.startswith(f"top label of {answers.shape[1]} classes")
    assert any(message in doubt for doubt in doubts), doubts


def test_bounded_scores_are_assumed_to_be_logits_and_said(tmp_path: Path) -> None:
    (_, doubt) = task_of(np.tanh(LOGITS), "Tanh", folder=tmp_path)
    assert "Tanh bounds the scores, as those of an embedding" in doubt


# --- other tasks, declared -------------------------------------------------------------------------


def one_number(folder: Path) -> str:
    return ending(folder, [helper.make_node("ReduceSum", ["y", "one"], ["end"], keepdims=0)], whole("one", 1), rank=1)


def sigmoid_in_pixels(folder: Path) -> str:
    nodes = [*chain("Sigmoid", target="s"), helper.make_node("Mul", ["s", "size"], ["end"])]
    return ending(folder, nodes, number("size", 640.0))


LABELS, YES, TOP2 = TaskSpec("MultiLabel"), TaskSpec("Binary"), TaskSpec("TopK", k=2)
NUMBERS = TaskSpec("Regression", measure="absolute", tolerance=0.1)
VECTOR = TaskSpec("Embedding", measure="cosine", tolerance=0.1)
DECLARED = {
    "labels by sigmoids": (multi_label, LABELS, "independent-probabilities", (5,)),
    "labels by logits": (lambda d: ending(d, chain("Identity")), LABELS, "logits", (5,)),
    "yes or no without an axis of columns": (one_number, YES, "logits", (1,)),
    "yes or no by a sigmoid": (
        lambda d: ending(d, chain("Sigmoid"), classes=1),
        YES,
        "independent-probabilities",
        (1,),
    ),
    "two of five classes": (lambda d: ending(d, chain("Softmax")), TOP2, "probabilities", (5,)),
    "one number": (one_number, NUMBERS, "logits", (1,)),
    "boxes": (boxes_in_pixels, NUMBERS, "logits", (4,)),
    "an embedding": (embedding, VECTOR, "logits", (32,)),
    "an embedding behind a layer norm": (embedding_behind_a_layer_norm, VECTOR, "logits", (32,)),
}


@pytest.mark.parametrize("case", DECLARED)
def test_a_declared_task_is_taken_with_the_outputs_own_name_and_shape(case: str, tmp_path: Path) -> None:
    make, spec, scale, shape = DECLARED[case]
    backbone = load_backbone(make(tmp_path), ROWS, task=spec)
    assert backbone.task.spec == spec
    assert (backbone.scale.kind, backbone.output.name, backbone.output.shape) == (scale, "end", shape)
    assert backbone.found is not None
    assert backbone.found.assumed(run_rows(backbone.model))[0].startswith(backbone.task.title)


def run_rows(model: onnx.ModelProto) -> Array:
    return open_session(model, threads=1).run(None, {model.graph.input[0].name: ROWS})[0]


NOT_DECLARED = {
    "labels of a softmax": (
        lambda d: ending(d, chain("Softmax")),
        LABELS,
        "a distribution over classes.*declare Top1 or TopK; MultiLabel takes",
    ),
    "labels in pixels": (
        sigmoid_in_pixels,
        LABELS,
        r"'end' \[16, 5\].*a sigmoid that is scaled afterwards.*MultiLabel takes \[batch, labels\]",
    ),
    "one label of several": (one_number, LABELS, r"'end' \[16, 1\].*one number for each input; MultiLabel takes"),
    "yes or no in five columns": (
        multi_label,
        YES,
        r"'end' \[16, 5\].*5 numbers for each input; Binary takes \[batch\]",
    ),
    "more classes than there are": (
        lambda d: ending(d, chain("Softmax")),
        TaskSpec("TopK", k=5),
        r"k is 5; it must lie in \[2, 4\].*TopK takes",
    ),
    "classes of a multi-label model": (multi_label, TOP2, "a probability for each label.*TopK takes"),
    "numbers of a softmax": (
        lambda d: ending(d, chain("Softmax")),
        NUMBERS,
        "a distribution over classes.*Regression takes",
    ),
    "a vector for each token": (
        lambda d: ending(d, [helper.make_node("Unsqueeze", ["y", "one"], ["end"])], whole("one", 1), rank=3),
        VECTOR,
        r"'end' \[16, 1, 5\].*several rows for each input.*Embedding takes \[batch, width\]",
    ),
    "a vector of one": (one_number, VECTOR, "one number for each input; Embedding takes"),
    "labels called label": (
        lambda d: ending(d, chain("Sigmoid", target="label"), output="label"),
        LABELS,
        "called as the labels that replies have",
    ),
}


@pytest.mark.parametrize("case", NOT_DECLARED)
def test_a_model_that_cannot_do_the_declared_task_is_refused_with_what_would_be_taken(
    case: str, tmp_path: Path
) -> None:
    make, spec, message = NOT_DECLARED[case]
    with pytest.raises(ModelRefusedError, match=message) as caught:
        load_backbone(make(tmp_path), ROWS, task=spec)
    assert "\n" not in str(caught.value)


def test_every_refusal_of_another_task_names_the_one_to_declare(tmp_path: Path) -> None:
    for make, task in (
        (multi_label, "MultiLabel"),
        (one_number, "Binary"),
        (one_number, "Regression"),
        (embedding, "Embedding"),
    ):
        with pytest.raises(ModelRefusedError, match=f"--task {task}"):
            load_backbone(make(tmp_path), ROWS)
