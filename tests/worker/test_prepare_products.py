"""Matrix products on integers: each row by itself, and the answers change little."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from prepared import run

from offramp_core.bundle import TensorSpec
from offramp_worker.devices import open_session
from offramp_worker.prepare.precision.products import Activation, how_to_count, round_weights
from offramp_worker.prepare.precision.quantizing import quantized_models
from offramp_worker.prepare.source.sources import Backbone

SEEDS = st.integers(0, 2**32 - 1)


def perceptron(opset: int = 18) -> Backbone:
    """Three matrix products with random weights."""
    rng = np.random.default_rng(0)
    widths = [16, 32, 32, 4]
    nodes, weights, source = [], [], "x"
    for index, (a, b) in enumerate(pairwise(widths)):
        weights.append(numpy_helper.from_array(rng.normal(size=(a, b)).astype(np.float32), f"w{index}"))
        nodes.append(helper.make_node("MatMul", [source, f"w{index}"], [f"y{index}"]))
        nodes.append(helper.make_node("Relu", [f"y{index}"], [source := f"h{index}"]))
    graph = helper.make_graph(
        nodes[:-1],
        "mlp",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y2", onnx.TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return Backbone(model, "mlp", TensorSpec("x", "FP32", (16,)), TensorSpec("y2", "FP32", (4,)))


@pytest.mark.parametrize("opset", [17, 18])
def test_matrices_without_convolutions_are_quantised_dynamically(opset: int) -> None:
    mlp = perceptron(opset)
    model, x = mlp.model, np.random.default_rng(1).normal(size=(300, 16)).astype(np.float32)
    ((method, made),) = quantized_models(mlp, x[:32], cuts={"h0"}, threads=1)
    assert method == "dynamic"
    assert [node.op_type for node in made.graph.node].count("MatMulInteger") == 2  # the last product stays in float
    assert "h0" in {name for node in made.graph.node for name in node.output}
    assert (run(made, x).argmax(axis=1) != run(model, x).argmax(axis=1)).mean() < 0.05


def test_dynamic_ranges_are_a_rows_own_so_that_no_neighbour_changes_an_answer() -> None:
    mlp, x = perceptron(), np.random.default_rng(2).normal(size=(50, 16)).astype(np.float32)
    ((_, made),) = quantized_models(mlp, x[:32], cuts=(), threads=1)
    loud = np.concatenate([x, 1e4 * x[:1], np.zeros_like(x[:1]), np.full_like(x[:1], np.inf)])
    np.testing.assert_allclose(run(made, loud)[:50], run(made, x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([run(made, row[None]) for row in x]), run(made, x), rtol=1e-5, atol=1e-5)
    assert np.isfinite(run(made, loud)[50:52]).all()


def constant(model: onnx.ModelProto, name: str) -> np.ndarray:
    return next(numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer if t.name == name)


def test_an_integer_product_is_what_its_levels_say() -> None:
    """Against the definition in float64: no integer sum saturates, whatever the processor's kernels. The input has two
    sides, what a ReLU leaves has one."""
    mlp, x = perceptron(), np.random.default_rng(3).normal(size=(64, 16)).astype(np.float32)
    ((_, made),) = quantized_models(mlp, x[:32], cuts={"h0", "h1"}, threads=1)
    scaled = x * constant(made, "x/scale")
    row = np.abs(scaled).max(axis=1, keepdims=True) / 127
    y0 = np.rint(scaled / row) @ constant(made, "x/w0/levels") * row * constant(made, "x/w0/step")
    above = np.maximum(y0, 0) * constant(made, "h0/scale") - (floor := constant(made, "h0/floor"))
    row, levels, step = (
        above.max(axis=1, keepdims=True) / 255,
        constant(made, "h0/w1/levels"),
        constant(made, "h0/w1/step"),
    )
    y1 = (np.rint(above / row) * row + floor) @ (levels * step)
    expected, got = np.maximum(y1, 0) @ constant(made, "w2"), run(made, x)
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()  # ties may round the other way
    assert np.median(np.abs(got - expected)) < 1e-5
    assert max(np.abs(constant(made, name)).max() for name in ("x/w0/levels", "h0/w1/levels")) == 63


def test_an_input_with_outlying_channels_is_multiplied_more_exactly_than_by_rounding_alone() -> None:
    """Where one channel is thirty times as loud as the others, their levels would be few."""
    mlp, rng = perceptron(), np.random.default_rng(4)
    loud = np.where(np.arange(16) == 3, 30.0, 1.0)
    mixed = rng.normal(size=(16, 16))
    x = ((rng.normal(size=(400, 16)) @ mixed) * loud).astype(np.float32)
    ((_, made),) = quantized_models(mlp, x[:64], cuts=(), threads=1)
    values, weights = x[64:].astype(np.float64), constant(mlp.model, "w0")
    row, column = np.abs(values).max(axis=1, keepdims=True) / 127, np.abs(weights).max(axis=0) / 63
    alone = np.rint(values / row) @ np.rint(weights / column) * row * column
    made.graph.output.append(helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT, None))
    session = open_session(made, threads=1)
    (got,) = session.run(["y0"], {"x": x[64:]})
    error, error_alone = (np.abs(y - values @ weights).mean() for y in (got, alone))
    assert error < 0.7 * error_alone


@given(seed=SEEDS, k=st.integers(1, 150), m=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_inputs_that_do_not_go_together_leave_nothing_to_make_up_for(seed: int, k: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(k, m)).astype(np.float32)
    levels, step = round_weights(weights, np.diag(rng.uniform(0.1, 9.0, k)).astype(np.float32))
    np.testing.assert_allclose(step, np.abs(weights).max(axis=0) / 63, rtol=1e-6)
    assert np.abs(levels * step - weights).max() <= 0.5 * step.max() * (1 + 1e-4)


@given(seed=SEEDS, k=st.integers(130, 200))
@settings(max_examples=15, deadline=None)
def test_rounding_makes_up_for_its_errors_where_inputs_go_together(seed: int, k: int) -> None:
    """More weights than a block holds; the inputs have a tenth as many directions."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(400, k // 10)) @ rng.normal(size=(k // 10, k)) + 0.1 * rng.normal(size=(400, k))
    weights = rng.normal(size=(k, 16)).astype(np.float32)
    levels, step = round_weights(weights, (x.T @ x / len(x)).astype(np.float32))
    assert np.abs(levels).max() <= 63
    nearest = np.rint(weights / step) * step
    error, error_of_nearest = (np.square(x @ (w - weights)).mean() for w in (levels * step, nearest))
    assert error < 0.5 * error_of_nearest


@pytest.mark.parametrize("moment", [0.0, np.inf, np.nan])
def test_weights_go_to_the_nearest_level_where_nothing_is_known_of_their_inputs(moment: float) -> None:
    weights = np.random.default_rng(5).normal(size=(8, 3)).astype(np.float32)
    levels, step = round_weights(weights, np.full((8, 8), moment, dtype=np.float32))
    np.testing.assert_array_equal(levels, np.rint(weights / step))


def read(low: list[float], high: list[float]) -> Activation:
    return Activation(np.float32(low), np.float32(high), np.eye(len(low), dtype=np.float32))


def test_loud_channels_are_scaled_down_by_the_geometric_mean_of_what_is_hard_on_either_side() -> None:
    counting = how_to_count(read([-16.0, -1.0], [4.0, 1.0]), [np.float32([[1.0], [-1.0]]), np.float32([[0.5], [0.5]])])
    np.testing.assert_allclose(counting.scale, [2.0, 0.5])  # sqrt(16) and sqrt(1), divided by their geometric mean
    assert counting.floor is None


def test_only_an_activation_that_hardly_goes_below_zero_has_one_side() -> None:
    weights = [np.float32([[1.0], [1.0]])]
    counting = how_to_count(read([-0.17, -0.1], [5.0, 5.0]), weights)
    assert counting.floor is not None
    np.testing.assert_allclose(counting.floor, [-0.17, -0.17], rtol=1e-5)
    assert how_to_count(read([-2.0, -0.1], [5.0, 5.0]), weights).floor is None


def test_a_channel_that_calibration_did_not_see_is_neither_lost_nor_the_only_one() -> None:
    counting = how_to_count(read([0.0, -1.0], [0.0, 1.0]), [np.float32([[1.0], [1.0]])])
    assert np.isfinite(counting.scale).all()
    assert counting.scale.min() >= 0.01 and counting.scale.max() <= 100.0
