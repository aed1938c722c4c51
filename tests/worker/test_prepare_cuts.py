"""Cut vertices: against brute force on random graphs, and on graphs whose answer is plain to see."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from offramp_worker.prepare.cuts import Step, cut_vertices, distinct_places, graph_steps


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    """A random graph in topological order: source "x", some constants "c*", the last step makes the sink "y"."""
    known = ["x", "c0"]
    steps: list[Step] = []
    n_steps = draw(st.integers(1, 9))
    for index in range(n_steps):
        recent = known[-4:] if draw(st.booleans()) else known  # recent ones give long thin graphs, which have cuts
        inputs = draw(st.lists(st.sampled_from(recent), min_size=1, max_size=3))
        outputs = [f"t{index}", f"u{index}"][: draw(st.integers(1, 2))] if index < n_steps - 1 else ["y"]
        steps.append(Step(draw(st.sampled_from(["Relu", "Conv", "Add"])), tuple(inputs), tuple(outputs)))
        known += outputs
    return steps


def reaches(steps: Sequence[Step], *, without: str) -> bool:
    """Whether the sink can be reached from the source when one tensor is gone."""
    reached = {"x"} - {without}
    for step in steps:
        if reached & set(step.inputs):
            reached |= set(step.outputs) - {without}
    return "y" in reached


@settings(max_examples=400, deadline=None)
@given(graphs())
def test_cut_vertices_are_the_tensors_whose_removal_separates_input_from_output(steps: list[Step]) -> None:
    made = [name for step in steps for name in step.outputs if name != "y"]
    connected = reaches(steps, without="")
    expected = [name for name in made if connected and not reaches(steps, without=name)]
    assert list(cut_vertices(steps, source="x", sink="y")) == expected


def residual_chain(blocks: int) -> list[Step]:
    steps = [Step("Conv", ("x", "w"), ("stem",)), Step("Relu", ("stem",), ("out0",))]
    for i in range(blocks):
        steps += [
            Step("Conv", (f"out{i}", "w"), (f"a{i}",)),
            Step("Relu", (f"a{i}",), (f"b{i}",)),
            Step("Conv", (f"b{i}", "w"), (f"c{i}",)),
            Step("Add", (f"c{i}", f"out{i}"), (f"sum{i}",)),
            Step("Relu", (f"sum{i}",), (f"out{i + 1}",)),
        ]
    return [*steps, Step("GlobalAveragePool", (f"out{blocks}",), ("pooled",)), Step("Gemm", ("pooled", "v"), ("y",))]


def test_a_residual_network_has_one_place_per_block_and_one_after_the_stem() -> None:
    steps = residual_chain(5)
    cuts = cut_vertices(steps, source="x", sink="y")
    assert not {name for name in cuts if name[0] in "abc"}  # nothing inside a block
    shapes = {name: (16, 8, 8) for name in cuts} | {"pooled": (16, 1, 1)}
    assert [p.tensor for p in distinct_places(steps, cuts, shapes=shapes)] == [f"out{i}" for i in range(6)]


def test_thousands_of_millions_of_paths_are_counted_exactly() -> None:
    cuts = cut_vertices(residual_chain(200), source="x", sink="y")  # 2**200 paths
    assert len([name for name in cuts if name.startswith("out")]) == 201


def test_a_place_is_the_last_tensor_before_new_weights_that_still_has_a_grid() -> None:
    steps = [
        Step("Conv", ("x", "w"), ("conv",)),
        Step("Relu", ("conv",), ("relu",)),
        Step("MaxPool", ("relu",), ("pool",)),
        Step("Conv", ("pool", "w"), ("conv2",)),
        Step("Relu", ("conv2",), ("relu2",)),
        Step("MaxPool", ("relu2",), ("tiny",)),
        Step("Flatten", ("tiny",), ("flat",)),
        Step("Gemm", ("flat", "v"), ("y",)),
    ]
    shapes = {
        "conv": (8, 16, 16),
        "relu": (8, 16, 16),
        "pool": (8, 8, 8),
        "conv2": (8, 4, 4),
        "relu2": (8, 4, 4),
        "tiny": (8, 2, 2),
    }
    places = distinct_places(steps, cut_vertices(steps, source="x", sink="y"), shapes=shapes)
    assert [(p.position, p.tensor) for p in places] == [(0, "pool"), (1, "relu2")]


def test_a_dense_block_that_feeds_everything_onwards_has_no_place_inside() -> None:
    steps = [
        Step("Conv", ("x", "w"), ("a",)),
        Step("Conv", ("a", "w"), ("b",)),
        Step("Conv", ("b", "w"), ("c",)),
        Step("Concat", ("a", "b", "c"), ("cat",)),
        Step("Conv", ("cat", "w"), ("y",)),
    ]
    assert cut_vertices(steps, source="x", sink="y") == ("a", "cat")


def test_an_output_that_does_not_depend_on_the_input_has_no_cut_vertices() -> None:
    assert cut_vertices([Step("Relu", ("c0",), ("y",))], source="x", sink="y") == ()


@pytest.mark.parametrize("captures_input", [True, False], ids=["captured", "not captured"])
def test_a_tensor_that_a_branch_captures_is_a_way_around(captures_input: bool) -> None:
    inner = helper.make_node("Relu", ["x" if captures_input else "a"], ["r"])
    branch = helper.make_graph(
        [inner], "branch", [], [helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch),
        ],
        "g", [], [],
    )  # fmt: skip
    assert cut_vertices(graph_steps(graph), source="x", sink="y") == (() if captures_input else ("a",))
