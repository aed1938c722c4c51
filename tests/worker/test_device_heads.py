"""What heads are made of on a GPU says what they say on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper
from scipy.special import softmax

from offramp_worker.bundle.confidence import add_confidence
from offramp_worker.bundle.heads import MEAN_WEIGHT, TOP_LABEL_TASK, pool_by_one_product

FLOAT = onnx.TensorProto.FLOAT
Array = npt.NDArray[Any]
BETWEEN = st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1e-30, 1e-3, 5.0, np.nextafter(np.float32(5), 6), 3e38])


def _model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    constants: dict[str, Array],
    *,
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def _run(model: onnx.ModelProto, outputs: list[str], **feed: Array) -> list[Array]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(outputs, feed)]


def _confident(opset: int = 17) -> ort.InferenceSession:
    nodes = [helper.make_node("Identity", ["x"], ["said"])]
    model = _model(nodes, {"x": ["n", 7]}, {"said": ["n", 7]}, {}, opset=opset)
    for by_sums in (False, True):
        add_confidence(model, output="said", task=TOP_LABEL_TASK, name=f"confidence/{by_sums}", by_sums=by_sums)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


CONFIDENT = _confident()


@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.just(7)), elements=BETWEEN))
def test_the_largest_probability_is_the_same_by_sums_as_by_a_maximum(logits: Array) -> None:
    """Equal logits, neighboring ones and the largest that there are, too."""
    largest, by_sums = CONFIDENT.run(["confidence/False", "confidence/True"], {"x": logits})
    np.testing.assert_allclose(by_sums, largest, rtol=1e-10)
    np.testing.assert_allclose(largest, softmax(logits.astype(np.float64), axis=1).max(axis=1), rtol=1e-12)


@pytest.mark.parametrize("opset", [9, 11, 12, 13, 17, 18])
def test_models_of_every_opset_have_both(opset: int) -> None:
    logits = np.random.default_rng(opset).normal(size=(3, 7)).astype(np.float32)
    largest, by_sums = _confident(opset).run(["confidence/False", "confidence/True"], {"x": logits})
    np.testing.assert_allclose(by_sums, largest, rtol=1e-10)


def test_a_row_without_numbers_has_no_confidence_either_way() -> None:
    logits = np.array([[np.nan, *[0.0] * 6], [np.inf, *[0.0] * 6]], np.float32)
    assert all(np.isnan(found).all() for found in CONFIDENT.run(["confidence/False", "confidence/True"], {"x": logits}))


def _pooling(weight: Array | None) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", [MEAN_WEIGHT, "x"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["pooled"], name="flat", axis=1),
    ]
    given_: dict[str, list[int | str]] = {"x": ["n", 5, 3]} | ({MEAN_WEIGHT: ["n", 1, 5]} if weight is None else {})
    return _model(nodes, given_, {"pooled": ["n", 3]}, {} if weight is None else {MEAN_WEIGHT: weight})


def test_constant_weights_pool_tokens_with_one_product_of_the_same_value() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    model = _pooling(np.array([[[0.25, 0.25, 0.25, 0.25, 0.0]]], np.float32))
    (before,) = _run(model, ["pooled"], x=x)
    pool_by_one_product(model.graph)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Transpose", "MatMul", "Flatten"]
    np.testing.assert_allclose(_run(model, ["pooled"], x=x)[0], before, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(before, x[:, :4].mean(axis=1), rtol=1e-6, atol=1e-7)


def test_weights_of_each_row_stay_as_they_are() -> None:
    model = _pooling(None)
    before = model.SerializeToString(deterministic=True)
    pool_by_one_product(model.graph)
    assert model.SerializeToString(deterministic=True) == before
