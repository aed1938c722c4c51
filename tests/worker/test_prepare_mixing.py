"""Which parts of a network of convolutions stay in float, and what that changes."""

from __future__ import annotations

import math
from itertools import chain, combinations, pairwise

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from prepared import run

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.stages import pieces
from offramp_worker.devices import open_session
from offramp_worker.prepare.places.cuts import cut_vertices, graph_steps
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.precision import judging, mixing, quantizing
from offramp_worker.prepare.precision.convolutions import patches, study_convolutions, with_even_channels, with_levels
from offramp_worker.prepare.precision.mixing import (
    Exits,
    Measure,
    Part,
    expected_disagreement,
    parts_of,
    promising,
    worth,
)
from offramp_worker.prepare.precision.products import round_weights
from offramp_worker.prepare.precision.quantizing import Static, choose_quantized, static_parts
from offramp_worker.prepare.source.sources import Backbone

pytestmark = pytest.mark.slow  # exports with torch

NONE = Exits({})
SOME = Exits({0.005: 0.15, 0.01: 0.25})
MARGINS = np.random.default_rng(0).exponential(2.0, 500)


# The choice


@settings(max_examples=60)
@given(
    base=st.tuples(st.floats(0.2, 0.9), st.floats(0.001, 0.3)),
    alone=st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 1.0)), min_size=1, max_size=4),
    exits=st.sampled_from([NONE, SOME]),
)
def test_the_most_promising_set_is_the_one_that_brute_force_finds(
    base: tuple[float, float], alone: list[tuple[float, float]], exits: Exits
) -> None:
    whole = Measure(*base)
    measured = {
        Part(f"p{i}", frozenset({f"n{i}"})): Measure(base[0] + more, base[1] * kept)
        for i, (more, kept) in enumerate(alone)
    }

    def forecast(mask: int) -> float:
        ratio, variance = base
        for bit, (more, kept) in enumerate(alone):
            if mask >> bit & 1:
                ratio, variance = ratio + more, variance - base[1] * (1 - kept)
        wrong = [0.5 * math.erfc(m / math.sqrt(2 * max(variance, 0.02 * base[1]))) for m in MARGINS]
        return worth(ratio, float(np.mean(wrong)), exits)

    found = promising(whole, measured, MARGINS, exits)
    masks = [sum(1 << list(measured).index(part) for part in some) for some in found]
    best = sorted((forecast(mask) for mask in range(1, 1 << len(alone))), reverse=True)
    assert len(set(masks)) == len(masks)
    np.testing.assert_allclose([forecast(mask) for mask in masks], best[: len(masks)], atol=1e-9)


@given(st.floats(0.1, 1.0), st.floats(0, 0.02), st.floats(0, 0.3), st.floats(0, 0.01), st.sampled_from([NONE, SOME]))
def test_less_time_and_less_disagreement_are_never_worth_less(
    ratio: float, disagreement: float, less_time: float, less: float, exits: Exits
) -> None:
    better = worth(max(0.0, ratio - less_time), max(0.0, disagreement - less), exits)
    assert better >= worth(ratio, disagreement, exits) - 1e-12


def test_what_no_certificate_allows_is_worth_nothing() -> None:
    assert worth(0.1, 0.03, SOME) < 1e-6
    assert worth(0.5, 0.0, NONE) == pytest.approx(0.5)


def test_exits_save_in_proportion_below_the_least_known_budget() -> None:
    assert [SOME.at(b) for b in (0.0, 0.0025, 0.005, 0.0075, 0.5)] == pytest.approx([0, 0.075, 0.15, 0.2, 0.25])


def test_expected_disagreement_is_the_rate_at_which_normal_errors_turn_answers() -> None:
    rng = np.random.default_rng(1)
    turned = (MARGINS + rng.normal(0, math.sqrt(0.05), (2_000, 500)) < 0).mean()
    assert expected_disagreement(0.05, MARGINS) == pytest.approx(turned, rel=0.02)


# Graphs


@pytest.fixture(scope="module")
def cuts(backbone: Backbone, rows: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {place.tensor: place.shape for place in find_places(backbone, rows).places}


@pytest.fixture(scope="module")
def static(backbone: Backbone, rows: np.ndarray, cuts: dict[str, tuple[int, ...]]) -> Static:
    made = static_parts(backbone, rows[:64], cuts=cuts, threads=1)
    assert made is not None
    return made


def all_sets(static: Static) -> list[tuple[Part, ...]]:
    parts = parts_of(static.prepared, exclude=static.exclude)
    return list(chain.from_iterable(combinations(parts, size) for size in (0, 1, len(parts))))


def test_parts_are_the_stem_the_additions_and_the_other_convolutions(static: Static) -> None:
    parts = parts_of(static.prepared, exclude=static.exclude)
    kinds = {node.name: node.op_type for node in static.prepared.graph.node}
    assert parts[0].name == "first convolution" and len(parts[0].nodes) == 1
    assert {kinds[name] for part in parts for name in part.nodes if part.name.startswith("additions")} == {"Add"}
    every = [name for part in parts for name in part.nodes]
    assert len(every) == len(set(every)) and not set(every) & set(static.exclude)
    assert sum(kinds[name] == "Conv" for name in every) == list(kinds.values()).count("Conv")


def test_every_mixture_answers_nearly_as_fp32_and_can_be_cut_where_ramps_are(
    backbone: Backbone, static: Static, rows: np.ndarray, cuts: dict[str, tuple[int, ...]]
) -> None:
    expected = run(backbone.model, rows)
    for parts in all_sets(static):
        model = static.model("minmax", parts)
        onnx.checker.check_model(model)
        assert (run(model, rows).argmax(axis=1) != expected.argmax(axis=1)).mean() < 0.05
        found = cut_vertices(graph_steps(model.graph), source=backbone.input.name, sink=backbone.output.name)
        assert set(cuts) <= set(found)


def test_a_row_that_leaves_nowhere_gets_the_whole_graphs_answer_bit_for_bit(
    static: Static, rows: np.ndarray, cuts: dict[str, tuple[int, ...]]
) -> None:
    for parts in all_sets(static):
        model, value = static.model("minmax", parts), rows[:8]
        for graph in pieces(model, (), list(cuts), shapes=cuts).segments:
            session = open_session(graph.model, threads=1, optimised=graph.optimised)
            (value,) = session.run([graph.target], {graph.source: value})
        np.testing.assert_array_equal(value, run(model, rows[:8]))


def test_a_neighbour_changes_no_answer_of_a_mixture(static: Static, rows: np.ndarray) -> None:
    """Results-only and compute-saving execution regroup batches, so an answer must be the row's own."""
    for parts in all_sets(static):
        session = open_session(static.model("minmax", parts), threads=1)
        alone = np.concatenate([session.run(None, {session.get_inputs()[0].name: row[None]})[0] for row in rows[:20]])
        together = session.run(None, {session.get_inputs()[0].name: rows[:20]})[0]
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_a_residual_stream_in_float_is_not_rounded_from_block_to_block_and_comes_closer_to_fp32(
    backbone: Backbone, static: Static, rows: np.ndarray
) -> None:
    stream = [p for p in parts_of(static.prepared, exclude=static.exclude) if not p.name.startswith("convolution")]
    model = static.model("minmax", stream)
    producer = {name: node for node in model.graph.node for name in node.output}
    for name in (name for node in model.graph.node if node.op_type == "Add" for name in node.input):
        # A convolution's result comes in by way of the scales of its channels, the stream as it is but for where it is
        # made smaller.
        if producer[name].op_type == "DequantizeLinear":
            rounded = producer[producer[name].input[0]].input[0]
            assert producer[rounded].op_type == "Pad"
    expected = run(backbone.model, rows)
    error = [float(((run(some, rows) - expected) ** 2).mean()) for some in (static.model("minmax"), model)]
    assert error[1] < 0.9 * error[0]


def test_even_channels_change_nothing_in_float(static: Static, rows: np.ndarray) -> None:
    parts = [p for p in parts_of(static.prepared, exclude=static.exclude) if p.name.startswith("additions")]
    names = frozenset().union(*(part.nodes for part in parts))
    even, ranges = with_even_channels(static.prepared, names, static.studied.channels)
    assert ranges
    assert [n.op_type for n in even.graph.node].count("Mul") == len(ranges)
    np.testing.assert_allclose(run(even, rows), run(static.prepared, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("stride", "pads"), [(1, [1, 1, 1, 1]), (2, [0, 1, 1, 0])])
def test_patches_times_weights_are_the_convolution(stride: int, pads: list[int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 9, 9)).astype(np.float32)
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="c", pads=pads, strides=[stride, stride])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3, 9, 9])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    seen = patches(x, node, (3, 3), most=10_000) @ weight.reshape(4, -1).T
    np.testing.assert_allclose(seen, expected.transpose(0, 2, 3, 1).reshape(-1, 4), rtol=1e-4, atol=1e-4)
    assert len(patches(x, node, (3, 3), most=len(seen) // 4)) < len(seen)


def test_levels_of_a_convolution_change_its_results_less_than_the_nearest_ones() -> None:
    """Neighboring pixels and channels resemble each other, as in pictures; judged on inputs of its own."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(16, 8, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="c")],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 8, 12, 12])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 16, 10, 10])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    coarse = rng.normal(size=(60, 2, 6, 6)).repeat(2, axis=2).repeat(2, axis=3)
    x = (np.tensordot(coarse, rng.normal(size=(2, 8)), axes=(1, 0)).transpose(0, 3, 1, 2)).astype(np.float32)
    x += 0.1 * rng.normal(size=x.shape).astype(np.float32)
    levels = study_convolutions(model, x[:40], TensorSpec("x", "FP32", (8, 12, 12)), threads=1).levels["w"]
    matrix = weight.reshape(16, -1).T
    nearest, step = round_weights(matrix, np.zeros((72, 72), dtype=np.float32), levels=64)
    seen = patches(x[40:], graph.node[0], weight.shape[2:], most=10**6)
    ours = levels.reshape(16, -1).T
    error = [float((((seen @ (some * step)) - seen @ matrix) ** 2).mean()) for some in (nearest, ours)]
    assert np.abs(levels.astype(int)).max() <= 64
    assert error[1] < 0.8 * error[0], error


def test_grouped_convolutions_are_left_to_the_nearest_level(rows: np.ndarray) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 1, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="c", group=4)],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4, 9, 9])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4, 7, 7])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = np.random.default_rng(1).normal(size=(20, 4, 9, 9)).astype(np.float32)
    studied = study_convolutions(model, x, TensorSpec("x", "FP32", (4, 9, 9)), threads=1)
    assert not studied.levels
    assert studied.channels["y"][0].shape == (4,)


def test_levels_of_other_steps_are_left_alone() -> None:
    """ONNX Runtime's quantizer widens the steps of a channel whose bias would not fit into 32 bits: its loudest weight
    is then below the last level."""
    rng = np.random.default_rng(0)
    theirs = rng.integers(-30, 31, (2, 3, 3, 3)).astype(np.int8)
    theirs[0, 0, 0, 0], theirs[1, 0, 0, 0] = 32, -64
    ours = rng.integers(-64, 65, theirs.shape).astype(np.int8)
    model = onnx.ModelProto()
    model.graph.initializer.append(numpy_helper.from_array(theirs, "w_quantized"))
    with_levels(model, {"w": ours})
    (made,) = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    np.testing.assert_array_equal(made, np.stack([theirs[0], ours[1]]))


# A network with one sensitive layer


SENSITIVE_ROWS = (
    np.random.default_rng(1).normal(size=(600, 3, 8, 8)) * np.random.default_rng(2).uniform(0.2, 2, (600, 3, 1, 1))
).astype(np.float32)


def sensitive_network() -> Backbone:
    """Four convolutions. The third reads a channel that is always zero with weights so large that seven bits leave
    nothing of the others."""
    rng = np.random.default_rng(0)
    widths = [3, 8, 8, 8, 8]
    nodes, constants, source = [], [], "x"
    for index, (a, b) in enumerate(pairwise(widths)):
        weight = rng.normal(0, (2 / (9 * a)) ** 0.5, (b, a, 3, 3)).astype(np.float32)
        bias = np.full(b, 0.1, dtype=np.float32)
        if index == 1:
            bias[0], weight[0] = -100.0, 0.0
        if index == 2:
            weight[:, 0] = 500.0
        constants += [numpy_helper.from_array(weight, f"w{index}"), numpy_helper.from_array(bias, f"b{index}")]
        nodes += [
            helper.make_node("Conv", [source, f"w{index}", f"b{index}"], [f"c{index}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{index}"], [source := f"r{index}"]),
        ]
    constants += [
        numpy_helper.from_array(rng.normal(size=(8, 4)).astype(np.float32), "w"),
        numpy_helper.from_array(np.array([2, 3], dtype=np.int64), "axes"),
    ]
    nodes += [
        helper.make_node("ReduceMean", [source, "axes"], ["mean"], keepdims=0),
        helper.make_node("Gemm", ["mean", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "sensitive",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    usual = run(model, SENSITIVE_ROWS).mean(axis=0)
    model.graph.initializer.append(numpy_helper.from_array(-usual, "b"))  # so that all classes occur
    model.graph.node[-1].input.append("b")
    return Backbone(model, "sensitive", TensorSpec("x", "FP32", (3, 8, 8)), TensorSpec("y", "FP32", (4,)))


def test_a_layer_that_integers_spoil_stays_in_float_and_the_rest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given: what a tiny network takes on integers is not what this is about."""
    monkeypatch.setattr(judging, "time_jobs", lambda jobs, **_: {n: 1.0 if n == "fp32" else 0.5 for n in jobs})
    network = sensitive_network()
    x = SENSITIVE_ROWS
    without = choose_quantized(network, x, seed=0, threads=1, seconds=0.1)
    assert without.model is None
    assert "of the rows differently" in without.refused
    chosen = choose_quantized(network, x, exits=SOME, seed=0, threads=1, seconds=0.1)
    assert chosen.model is not None
    names = chosen.method.partition(quantizing.IN_FLOAT)[2].split(", ")
    assert "convolution 3" in names
    operators = {n.output[0]: n for n in chosen.model.graph.node}
    weights = {n.input[1] for n in operators.values() if n.op_type == "Conv"}
    assert "w2" in weights  # as it was given, not levels
    pure = min(c.expected for c in chosen.tried if quantizing.IN_FLOAT not in c.method)
    best = next(c for c in chosen.tried if c.method == chosen.method)
    assert best.expected < pure
    assert best.disagreement < judging.MAX_DISAGREEMENT


def test_what_is_chosen_is_never_worth_less_than_integers_alone(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "WORTHWHILE", 1e9)
    for exits in (NONE, SOME):
        chosen = choose_quantized(backbone, rows, exits=exits, seed=0, threads=1, seconds=0.1)
        value = {c.method: worth(c.time, c.expected, exits) for c in chosen.tried}
        fastest = [c for c in chosen.tried if quantizing.IN_FLOAT not in c.method]
        pure = min(fastest, key=lambda c: c.expected)
        assert value[chosen.method] >= value[pure.method]
        assert len(chosen.tried) <= 3 + mixing.MADE
