"""Places are read along the axes that runs and operators tell: networks with channels last, steps first or one axis of
positions are prepared and served like any other, and where it cannot be told the place is left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import onnx
import pytest
import texts
import torch
from onnx import TensorProto, helper, numpy_helper
from test_engine import Bench

from offramp_core.bundle import HeadKind
from offramp_core.errors import InvalidBundleError, ModelRefusedError
from offramp_worker.bundle.graph import feature_shapes
from offramp_worker.bundle.load import load_bundle
from offramp_worker.devices import open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare import pipeline
from offramp_worker.prepare.heads import plain
from offramp_worker.prepare.heads.features import candidate_ramps, collect_features
from offramp_worker.prepare.heads.objectives import softmax
from offramp_worker.prepare.heads.selection import CandidateVerdict, select_ramps
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.places import FoundPlaces, find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport
from offramp_worker.prepare.source.sources import load_backbone

pytestmark = pytest.mark.slow  # exports with torch

Array = np.ndarray[Any, Any]
CLASSES = 3


def node(operator: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    """The last name is the output's."""
    return helper.make_node(operator, list(names[:-1]), [names[-1]], **attributes)


def graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Array],
    *,
    row: Sequence[int | str],
    name: str = "x",
    kind: int = TensorProto.FLOAT,
) -> str:
    """A model from the input ``name`` [batch, *row] to ``y``."""
    made = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, kind, ["batch", *row])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            numpy_helper.from_array(value.astype(np.int64 if value.dtype.kind == "i" else np.float32), constant)
            for constant, value in constants.items()
        ],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return str(path)


def rows_of(*shape: int, n: int = 12) -> Array:
    return np.random.default_rng(5).normal(size=(n, *shape)).astype(np.float32)


def eye(n: int, m: int | None = None) -> Array:
    return np.eye(n, m)


def found_in(
    folder: Path, nodes: Sequence[onnx.NodeProto], constants: dict[str, Array], row: Sequence[int]
) -> FoundPlaces:
    x = rows_of(*row)
    return find_places(load_backbone(graph(folder / "m.onnx", nodes, constants, row=row), x), x)


def reasons(found: FoundPlaces) -> dict[str, str]:
    return {each.tensor: each.reason for each in found.unread}


# --- what is read ------------------------------------------------------------------------------------

LINE, STEPS = (16, 1, 24), (layouts.TIME, 16)
READ: dict[str, list[tuple[int, ...]]] = {
    "swin": [(12, 16, 16)] * 4 + [(48, 8, 8)] + [(24, 8, 8)] * 5,
    "convnext": [(12, 8, 8)] * 3 + [(24, 4, 4)] * 3,
    "vit": [(16, 4, 4)] + [(17, 16)] * 4,
    "mixer": [(16, 4, 4)] + [(16, 16)] * 4,
    "mobilenet": [],
    "resnet": [(64, 16, 16)] * 3 + [(128, 8, 8)] * 2 + [(256, 4, 4)] * 2 + [(512, 2, 2), (512, 1, 1)],
    "signal": [LINE, LINE, (16, 1, 12)],
    "lstm": [STEPS] * 2,
    "lstm-seq-first": [STEPS] * 2,
    "lstm-both-ways": [(layouts.TIME, 32)] * 2,
    "gru": [STEPS] * 2,
    "gru-seq-first": [STEPS] * 2,
    "encoder": [STEPS] * 5,
    "encoder-seq-first": [STEPS] * 5,
}


@pytest.mark.parametrize(("name", "suffix"), [*zip(READ, cycle([".pt2", ".onnx"])), ("swin", ".onnx")])
def test_every_place_is_read_along_its_own_axes_and_no_answer_changes(name: str, suffix: str, tmp_path: Path) -> None:
    model, shape = layouts.network(name), layouts.NETWORKS[name][1]
    x = rows_of(*shape, n=20)
    backbone = load_backbone(layouts.save(model, shape, tmp_path / f"m{suffix}"), x)
    found = find_places(backbone, x)
    if READ[name]:
        assert [place.shape for place in found.places] == READ[name]
    for rows in (x[:1], x[:7]):
        with torch.inference_mode():
            expected = model(torch.from_numpy(rows)).numpy()
        (said,) = open_session(found.backbone.model, threads=1).run(None, {backbone.input.name: rows})
        np.testing.assert_allclose(said, expected, atol=1e-4)


PREPARED = [
    ("swin", ".pt2"),
    ("signal", ".onnx"),
    ("lstm", ".pt2"),
    ("gru-seq-first", ".onnx"),
    ("encoder-seq-first", ".pt2"),
]


def prepared(model: str, x: Array, folder: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareReport:
    """A bundle with every ramp that was tried: with random weights it is chance what pays."""

    def all_of_them(merits: Any) -> list[CandidateVerdict]:
        return [replace(verdict, refused="") for verdict in select_ramps(merits)]

    monkeypatch.setattr(pipeline, "select_ramps", all_of_them)
    np.savez(folder / "data.npz", x=x)
    request = PrepareRequest(
        model=model,
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        name="tiny",
        head_share=0.3,
        profile_seconds=0.1,
        precision="exact",
        compile_limit=0,
    )
    return prepare_bundle(request, Reporter(quiet=True))


@pytest.mark.parametrize(("name", "suffix"), PREPARED, ids=[name for name, _ in PREPARED])
def test_rows_of_any_layout_leave_and_are_dropped_as_each_of_them_would_be_alone(
    name: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shape = layouts.network(name), layouts.NETWORKS[name][1]
    x = rows_of(*shape, n=160)
    report = prepared(layouts.save(model, shape, tmp_path / f"m{suffix}"), x, tmp_path, monkeypatch)
    inside = [line.verdict.spec for line in report.kept if line.verdict.spec.position]
    assert {spec.position for spec in inside} and any("turned" in spec.tensor for spec in inside)
    bundle = load_bundle(tmp_path / "bundle")
    sessions = Sessions(bundle, threads=1)
    with torch.inference_mode():
        expected = model(torch.from_numpy(x[:40])).numpy()
    alone = [sessions.tapped(x[row : row + 1]) for row in range(40)]
    uncertainty = np.concatenate([scores.uncertainty for scores in alone])
    ids = [ramp.id for ramp in bundle.ramps]
    active = sorted(ids.index(spec.id) for spec in {spec.position: spec for spec in inside}.values())[:6]
    limits = {j: round(float(np.quantile(uncertainty[:, j], 0.4)), 3) for j in active}
    bench = Bench(bundle, sessions)
    bench.engine.start()
    try:
        for n in (1, 5, 40):
            np.testing.assert_allclose(bench.serve(x[:n], one_by_one=False)[0].logits, expected[:n], atol=1e-4)
        for epoch, execution in enumerate(("ComputeSaving", "ResultsOnly"), start=1):
            bench.activate(
                tmp_path / "bundle", {ids[j]: str(v) for j, v in limits.items()}, execution=execution, epoch=epoch
            )
            ticket = bench.serve(x[:40], one_by_one=False)[0]
            left = 0
            for row in range(40):
                if np.abs(uncertainty[row, active] - [limits[j] for j in active]).min() < 1e-3:
                    continue  # another batch size may round to the other side
                exits = next((j for j in active if uncertainty[row, j] < limits[j]), None)
                assert ticket.exits[row] == ("final" if exits is None else ids[exits])
                if exits is None:
                    np.testing.assert_allclose(ticket.logits[row], expected[row], atol=1e-4)
                else:
                    assert ticket.logits[row].argmax() == alone[row].prediction[0, exits]
                left += exits is not None
            assert 5 < left < 40
    finally:
        bench.engine.close()
        assert bench.engine.join(30.0)


# --- pooling over the right axis ---------------------------------------------------------------------

SIDE = 8


def channel_rows(n: int, *sides: int, seed: int) -> Array:
    """(n, 4, *sides): one of three channels is higher; all channels sum up to nothing at every position, so that a mean
    over channels says nothing."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.3, (n, 4, *sides))
    x[np.arange(n), rng.integers(0, CLASSES, n)] += 1.0
    return (x - x.mean(axis=1, keepdims=True)).astype(np.float32)


def along_time() -> tuple[list[onnx.NodeProto], dict[str, Array], tuple[int, ...]]:
    nodes = [
        node("Conv", "x", "k", "a"),
        node("Conv", "a", "k", "b"),
        node("ReduceMean", "b", "last", "m", keepdims=0),
        node("MatMul", "m", "v", "y"),
    ]
    return nodes, {"k": eye(4)[:, :, None], "last": np.array([2])}, (SIDE,)


def steps_first() -> tuple[list[onnx.NodeProto], dict[str, Array], tuple[int, ...]]:
    nodes = [
        node("Transpose", "x", "t", perm=[2, 0, 1]),
        node("MatMul", "t", "w", "a"),
        node("MatMul", "a", "w", "b"),
        node("ReduceMean", "b", "first", "m", keepdims=0),
        node("MatMul", "m", "v", "y"),
    ]
    return nodes, {"w": eye(4), "first": np.array([0])}, (SIDE,)


def channels_last() -> tuple[list[onnx.NodeProto], dict[str, Array], tuple[int, ...]]:
    nodes = [
        node("Transpose", "x", "t", perm=[0, 2, 3, 1]),
        node("MatMul", "t", "w", "a"),
        node("MatMul", "a", "w", "b"),
        node("ReduceMean", "b", "inner", "m", keepdims=0),
        node("MatMul", "m", "v", "y"),
    ]
    return nodes, {"w": eye(4), "inner": np.array([1, 2])}, (4, 4)


@pytest.mark.parametrize("network", [along_time, steps_first, channels_last])
def test_a_head_learns_what_only_a_mean_over_positions_can_say(network: Any, tmp_path: Path) -> None:
    nodes, constants, sides = network()
    x = channel_rows(300, *sides, seed=1)
    uri = graph(tmp_path / "m.onnx", nodes, constants | {"v": 9 * eye(4, CLASSES)}, row=(4, *sides))
    found = find_places(load_backbone(uri, x), x)
    assert [place.tensor for place in found.places if "turned" in place.tensor] == ["a/turned", "b/turned"]
    for place in found.places:
        kind: HeadKind = "mean-linear" if place.is_tokens else "pooled-linear"
        (ramp,) = candidate_ramps([place], kinds=(kind,))
        features = collect_features(found.backbone, [ramp], [place], x, threads=1, advance=lambda _: None)
        targets = softmax(features.logits)
        pooled = features.of(ramp)
        head = plain.train_head(ramp, (pooled[:150], targets[:150]), (pooled[150:200], targets[150:200]), seed=0)
        said = plain.head_logits(head, pooled[200:])
        assert (said.argmax(axis=1) == targets[200:].argmax(axis=1)).mean() > 0.9


# --- what is left out --------------------------------------------------------------------------------

CONV = [node("Conv", "x", "k", "a"), node("Relu", "a", "ok")]
END = [
    node("Conv", "last", "k", "c"),
    node("GlobalAveragePool", "c", "p"),
    node("Flatten", "p", "f"),
    node("MatMul", "f", "v", "y"),
]
ROW = (3, 4, 4)


def between(*nodes: onnx.NodeProto, **constants: Array) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """A network of convolutions with ``nodes`` from ``ok`` to ``last`` inside."""
    kernel = np.random.default_rng(2).normal(size=(3, 3, 1, 1))
    return [*CONV, *nodes, *END], {"k": kernel, "v": eye(3, CLASSES), **constants}


def reversed_batch() -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    whole = {"start": np.array([-1]), "stop": np.array([-99]), "axis": np.array([0]), "step": np.array([-1])}
    turn = ("start", "stop", "axis", "step")
    return between(
        node("Slice", "ok", *turn, "mixed"),
        node("Conv", "mixed", "k", "odd"),
        node("Conv", "odd", "k", "more"),
        node("Slice", "more", *turn, "last"),
        **whole,
    )


def windows() -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """[batch * 4 windows, channels, 2, 2], as Swin has them inside a block."""
    return between(
        node("Reshape", "ok", "split", "s"),
        node("Transpose", "s", "t", perm=[0, 2, 4, 1, 3, 5]),
        node("Reshape", "t", "flat", "w"),
        node("Conv", "w", "k", "odd"),
        node("Conv", "odd", "k", "more"),
        node("Reshape", "more", "back", "u"),
        node("Transpose", "u", "o", perm=[0, 3, 1, 4, 2, 5]),
        node("Reshape", "o", "whole", "last"),
        split=np.array([-1, 3, 2, 2, 2, 2]),
        flat=np.array([-1, 3, 2, 2]),
        back=np.array([-1, 2, 2, 3, 2, 2]),
        whole=np.array([-1, 3, 4, 4]),
    )


def crossed() -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """A product along channels, then one along positions: nothing says which of them a head should pool over."""
    return between(
        node("Reshape", "ok", "line", "l"),
        node("Transpose", "l", "t", perm=[0, 2, 1]),
        node("MatMul", "t", "w", "odd"),
        node("Transpose", "odd", "o", perm=[0, 2, 1]),
        node("MatMul", "o", "z", "q"),
        node("Reshape", "q", "map", "last"),
        line=np.array([0, 3, 16]),
        w=eye(3),
        z=eye(16),
        map=np.array([0, 3, 4, 4]),
    )


LEFT_OUT = {
    "rows in reversed order": (reversed_batch, "odd", "what it holds of a row depends on the other rows of the batch"),
    "windows beside rows": (
        windows,
        "odd",
        "its axis 0 has 12 entries for 3 rows and 8 for 2, so that no row can be dropped",
    ),
    "products along two axes": (
        crossed,
        "o",
        "operators around it disagree on which of its axes 1, 2 holds its channels",
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_place_that_cannot_be_read_is_left_out_by_name_and_the_others_stay(case: str, tmp_path: Path) -> None:
    make, tensor, reason = LEFT_OUT[case]
    found = found_in(tmp_path, *make(), ROW)
    assert reason in reasons(found)[tensor]
    assert {"ok", "c"} <= {place.tensor for place in found.places}


def test_the_report_of_a_bundle_names_the_places_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, constants = windows()
    report = prepared(graph(tmp_path / "m.onnx", nodes, constants, row=ROW), rows_of(*ROW, n=80), tmp_path, monkeypatch)
    assert "no row can be dropped" in report.to_mapping()["unread"][0]["reason"]


def test_a_model_without_a_place_that_can_be_read_says_why_of_each(tmp_path: Path) -> None:
    nodes = [
        node("Flatten", "x", "f"),
        node("MatMul", "f", "w", "a"),
        node("Relu", "a", "b"),
        node("MatMul", "b", "v", "y"),
    ]
    with pytest.raises(
        ModelRefusedError,
        match=r"no exit can be attached: .* none of them is a map or tokens .*; b: it is a single vector for each row",
    ):
        found_in(tmp_path, nodes, {"w": eye(48, 8), "v": eye(8, CLASSES)}, ROW)


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_axes_as_long_as_a_batch_are_not_mixed_up_with_it(n: int, tmp_path: Path) -> None:
    """As many steps and channels as there are rows in a run."""
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("MatMul", "t", "w", "a"),
        node("MatMul", "a", "w", "b"),
        node("ReduceMean", "b", "first", "m", keepdims=0),
        node("MatMul", "m", "v", "y"),
    ]
    weight = np.random.default_rng(n).normal(size=(n, n))
    found = found_in(tmp_path, nodes, {"w": weight, "v": np.ones((n, CLASSES)), "first": np.array([0])}, (n, n))
    assert [(place.tensor, place.shape) for place in found.places] == [("a/turned", (n, n)), ("b/turned", (n, n))]
    x = rows_of(n, n)
    session = open_session(found.backbone.model, threads=1)
    wanted = np.stack([row @ weight.astype(np.float32) for row in x])
    probe = onnx.ModelProto()
    probe.CopyFrom(found.backbone.model)
    probe.graph.output.append(helper.make_tensor_value_info("a/turned", TensorProto.FLOAT, None))
    np.testing.assert_allclose(open_session(probe, threads=1).run(["a/turned"], {"x": x})[0], wanted, atol=1e-4)
    assert len(session.run(None, {"x": x})[0]) == len(x)


def test_an_input_with_channels_last_is_no_place_and_the_network_behind_it_is(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "x", "t", perm=[0, 3, 1, 2]),
        node("Conv", "t", "k", "a"),
        node("Relu", "a", "last"),
        *END,
    ]
    kernel = np.random.default_rng(2).normal(size=(3, 3, 1, 1))
    found = found_in(tmp_path, nodes, {"k": kernel, "v": eye(3, CLASSES)}, (8, 8, 3))
    assert found.entry is None and "its channels lie on axis 3" in reasons(found)["x"]
    assert [place.shape for place in found.places] == [(3, 8, 8), (3, 8, 8)]


def test_tokens_of_another_number_are_read_as_a_line(tmp_path: Path) -> None:
    """A network that merges tokens in pairs: a mean over eight of them has other weights than one over sixteen."""
    nodes = [
        node("MatMul", "x", "w", "a"),
        node("MatMul", "a", "w", "a2"),
        node("Reshape", "a2", "pairs", "r"),
        node("MatMul", "r", "u", "b"),
        node("ReduceMean", "b", "axis", "m", keepdims=0),
        node("MatMul", "m", "v", "y"),
    ]
    constants = {
        "w": eye(6),
        "pairs": np.array([0, 8, 12]),
        "u": eye(12, 6),
        "axis": np.array([1]),
        "v": eye(6, CLASSES),
    }
    found = found_in(tmp_path, nodes, constants, (16, 6))
    assert [(place.tensor, place.shape) for place in found.places] == [
        ("a", (16, 6)),
        ("r/turned", (12, 1, 8)),
        ("b/turned", (6, 1, 8)),
    ]


def test_a_ramp_at_a_tensor_whose_rows_lie_elsewhere_is_refused_at_the_workers_door(tmp_path: Path) -> None:
    """Bundles that were made before layouts were told may have one: a worker would drop steps in place of rows."""
    nodes, constants, sides = steps_first()
    uri = graph(tmp_path / "m.onnx", nodes, constants | {"v": 9 * eye(4, CLASSES)}, row=(4, *sides))
    with pytest.raises(
        InvalidBundleError, match=r"'a' is \[8, 1, 4\] for a batch of 1; the first axis .* must count rows"
    ):
        feature_shapes(onnx.load(uri), ["a"], channel_rows(1, *sides, seed=3))


TEXT_ORDERS = {
    "steps first": [
        node("Transpose", "h", "t", perm=[1, 0, 2]),
        node("MatMul", "t", "w", "a"),
        node("MatMul", "a", "w", "b"),
        node("Transpose", "b", "z", perm=[1, 0, 2]),
    ],
    "channels first": [
        node("Transpose", "h", "t", perm=[0, 2, 1]),
        node("Conv", "t", "k", "a"),
        node("Conv", "a", "k", "b"),
        node("Transpose", "b", "z", perm=[0, 2, 1]),
    ],
}


@pytest.mark.parametrize("length", ["length", 24], ids=["of any length", "of one length"])
@pytest.mark.parametrize("order", TEXT_ORDERS)
def test_the_tokens_of_a_text_are_found_on_any_axis_as_many_as_there_are_channels(
    order: str, length: str | int, tmp_path: Path
) -> None:
    rng, width = np.random.default_rng(0), 24
    nodes = [
        node("Equal", "input_ids", "pad", "unseen"),
        node("Not", "unseen", "seen"),
        node("Cast", "seen", "float", to=TensorProto.FLOAT),
        node("Unsqueeze", "float", "last", "column"),
        node("Gather", "table", "input_ids", "words"),
        node("Mul", "words", "column", "h"),
        *TEXT_ORDERS[order],
        node("Mul", "z", "column", "kept"),
        node("ReduceSum", "kept", "axis", "sum", keepdims=0),
        node("ReduceSum", "column", "axis", "count", keepdims=0),
        node("Div", "sum", "count", "mean"),
        node("MatMul", "mean", "v", "y"),
    ]
    weights = {
        "table": rng.normal(size=(texts.WORDS, width)),
        "v": eye(width, CLASSES),
        "w": eye(width),
        "k": eye(width)[:, :, None],
    }
    whole = {"pad": np.array(0), "last": np.array([2]), "axis": np.array([1])}
    uri = graph(tmp_path / "m.onnx", nodes, weights | whole, row=[length], name="input_ids", kind=TensorProto.INT64)
    x = texts.texts(20, seed=1, longest=24)
    found = find_places(load_backbone(uri, x), x)
    tokens = -1 if length == "length" else 24
    assert {place.tensor: place.shape for place in found.places}["a/turned"] == (tokens, width)
    assert not found.unread
