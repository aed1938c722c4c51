"""Cut vertices: against brute force on random graphs, and on graphs whose answer is plain to see."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from offramp_worker.prepare.places.cuts import GraphStep, cut_vertices, distinct_places, graph_steps


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphStep]:
    """A random graph in topological order: source "x", some constants "c*", the last step makes the sink "y"."""
    known = ["x", "c0"]
    steps: list[GraphStep] = []
    n_steps = draw(st.integers(1, 9))
    for index in range(n_steps):
        recent = known[-4:] if draw(st.booleans()) else known  # recent ones give long thin graphs, which have cuts
        inputs = draw(st.lists(st.sampled_from(recent), min_size=1, max_size=3))
        outputs = [f"t{index}", f"u{index}"][: draw(st.integers(1, 2))] if index < n_steps - 1 else ["y"]
        operator = draw(st.sampled_from(["Relu", "Conv", "Equal"]))
        steps.append(GraphStep(operator, tuple(inputs), tuple(outputs), cheap=operator == "Equal"))
        known += outputs
    return steps


def costly_without(steps: Sequence[GraphStep], *, tensor: str) -> bool:
    """Whether the sink needs a costly tensor that does not follow from ``tensor``: what a stage begun there would have
    to do again."""
    depends, behind, cheap = {"x"}, {tensor}, {"x"}
    for step in steps:
        if depends & set(step.inputs):
            depends |= set(step.outputs)
            if step.cheap and all(name in cheap or name not in depends for name in step.inputs):
                cheap |= set(step.outputs)
        if behind & set(step.inputs):
            behind |= set(step.outputs)
    needed, stack = set(), ["y"]
    makers = {name: step for step in steps for name in step.outputs}
    while stack:
        name = stack.pop()
        if name not in needed and name != tensor and name not in cheap and name in depends:
            needed.add(name)
            stack += makers[name].inputs
    return tensor not in depends - cheap or "y" not in behind or not needed <= behind


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(graphs())
def test_cut_vertices_are_the_tensors_behind_which_nothing_costly_has_to_be_done_again(steps: list[GraphStep]) -> None:
    made = [name for step in steps for name in step.outputs if name != "y"]
    expected = [name for name in made if not costly_without(steps, tensor=name)]
    assert list(cut_vertices(steps, source="x", sink="y")) == expected


def test_a_mask_made_of_the_input_goes_around_no_cut_unless_it_takes_a_product_of_matrices() -> None:
    def network(operator: str) -> list[GraphStep]:
        cheap = operator != "MatMul"
        return [
            GraphStep("Gather", ("table", "x"), ("h0",)),
            GraphStep(operator, ("x", "pad"), ("mask",), cheap=cheap),
            GraphStep("Attention", ("h0", "mask"), ("h1",)),
            GraphStep("Attention", ("h1", "mask"), ("h2",)),
            GraphStep("Gemm", ("h2", "v"), ("y",)),
        ]

    assert cut_vertices(network("Equal"), source="x", sink="y") == ("h0", "h1", "h2")
    assert cut_vertices(network("MatMul"), source="x", sink="y") == ("h2",)


def residual_chain(blocks: int) -> list[GraphStep]:
    steps = [GraphStep("Conv", ("x", "w"), ("stem",)), GraphStep("Relu", ("stem",), ("out0",))]
    for i in range(blocks):
        steps += [
            GraphStep("Conv", (f"out{i}", "w"), (f"a{i}",)),
            GraphStep("Relu", (f"a{i}",), (f"b{i}",)),
            GraphStep("Conv", (f"b{i}", "w"), (f"c{i}",)),
            GraphStep("Add", (f"c{i}", f"out{i}"), (f"sum{i}",)),
            GraphStep("Relu", (f"sum{i}",), (f"out{i + 1}",)),
        ]
    return [
        *steps,
        GraphStep("GlobalAveragePool", (f"out{blocks}",), ("pooled",)),
        GraphStep("Gemm", ("pooled", "v"), ("y",)),
    ]


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
        GraphStep("Conv", ("x", "w"), ("conv",)),
        GraphStep("Relu", ("conv",), ("relu",)),
        GraphStep("MaxPool", ("relu",), ("pool",)),
        GraphStep("Conv", ("pool", "w"), ("conv2",)),
        GraphStep("Relu", ("conv2",), ("relu2",)),
        GraphStep("MaxPool", ("relu2",), ("tiny",)),
        GraphStep("Flatten", ("tiny",), ("flat",)),
        GraphStep("Gemm", ("flat", "v"), ("y",)),
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
    assert [(p.position, p.tensor) for p in places] == [(1, "pool"), (2, "relu2")]


def test_a_dense_block_that_feeds_everything_onwards_has_no_place_inside() -> None:
    steps = [
        GraphStep("Conv", ("x", "w"), ("a",)),
        GraphStep("Conv", ("a", "w"), ("b",)),
        GraphStep("Conv", ("b", "w"), ("c",)),
        GraphStep("Concat", ("a", "b", "c"), ("cat",)),
        GraphStep("Conv", ("cat", "w"), ("y",)),
    ]
    assert cut_vertices(steps, source="x", sink="y") == ("a", "cat")


def test_an_output_that_does_not_depend_on_the_input_has_no_cut_vertices() -> None:
    assert cut_vertices([GraphStep("Relu", ("c0",), ("y",))], source="x", sink="y") == ()


@pytest.mark.parametrize("captures", ["a", "b"])
def test_a_tensor_that_a_branch_captures_is_a_way_around(captures: str) -> None:
    inner = helper.make_node("Relu", [captures], ["r"])
    branch = helper.make_graph(
        [inner], "branch", [], [helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Cast", ["b"], ["flag"], to=onnx.TensorProto.BOOL),
            helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch),
        ],
        "g",
        [],
        [],
    )
    assert cut_vertices(graph_steps(graph), source="x", sink="y") == (("a",) if captures == "a" else ("a", "b"))
