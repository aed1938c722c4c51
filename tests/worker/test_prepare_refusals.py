"""What ``offramp prepare`` refuses: foreign models, bad requests, bad commands; each with one line that says why."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import typer
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from typer.testing import CliRunner

from offramp_cli.prepare import prepare
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.prepare.families import build_family
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.source.sources import load_backbone
from offramp_worker.prepare.writing import check_target

ROWS = np.random.default_rng(0).normal(size=(24, 3, 8, 8)).astype(np.float32)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    value = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(value, name)


def save_graph(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: list[onnx.TensorProto],
    *,
    outputs: tuple[str, ...] = ("y",),
    inputs: tuple[str, ...] = ("x",),
    rank: int = 2,
) -> str:
    shape = ["batch", 3, 8, 8]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name in outputs],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return str(path)


def classifier(path: Path, **changes: object) -> str:
    """Convolution, pooling, linear: a model that would be taken."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    return save_graph(path, nodes, [weight("w", 4, 3, 3, 3), weight("v", 4, 5)], **changes)  # type: ignore[arg-type]


def image_output(folder: Path) -> str:
    return save_graph(
        folder / "m.onnx", [helper.make_node("Conv", ["x", "w"], ["y"])], [weight("w", 4, 3, 3, 3)], rank=4
    )


def two_outputs(folder: Path) -> str:
    return classifier(folder / "m.onnx", outputs=("y", "f"))


def with_labels(folder: Path, outputs: tuple[str, ...]) -> str:
    path = classifier(folder / "m.onnx")
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0))
    values = {"label": (TensorProto.INT64, ["batch"]), "y": (TensorProto.FLOAT, ["batch", 5])}
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, *values[name]) for name in outputs)
    onnx.save(model, path)
    return path


def labels_and_scores(folder: Path) -> str:
    return with_labels(folder, ("label", "y"))


def labels_alone(folder: Path) -> str:
    return with_labels(folder, ("label",))


def maps_of_scores(folder: Path) -> str:
    """As scikit-learn's classifiers are exported: a map from label to probability for each row."""
    path = classifier(folder / "m.onnx")
    model = onnx.load(path)
    zipmap = helper.make_node("ZipMap", ["y"], ["map"], domain="ai.onnx.ml", classlabels_int64s=list(range(5)))
    model.graph.node.append(zipmap)
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    del model.graph.output[:]
    scores = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output.append(helper.make_value_info("map", helper.make_sequence_type_proto(scores)))
    onnx.save(model, path)
    return path


def two_inputs(folder: Path) -> str:
    nodes = [
        helper.make_node("Add", ["x", "x2"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    return save_graph(folder / "m.onnx", nodes, [weight("v", 192, 5)], inputs=("x", "x2"))


def depends_on_the_batch(folder: Path) -> str:
    nodes = [
        helper.make_node("ReduceMean", ["x", "axis"], ["m"], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["s"]),
        helper.make_node("Flatten", ["s"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    axis = numpy_helper.from_array(np.array([0], dtype=np.int64), "axis")
    return save_graph(folder / "m.onnx", nodes, [axis, weight("v", 192, 5)])


def fixed_batch(folder: Path) -> str:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["f"]), helper.make_node("MatMul", ["f", "v"], ["y"])]
    shape = numpy_helper.from_array(np.array([1, 192], dtype=np.int64), "shape")
    return save_graph(folder / "m.onnx", nodes, [shape, weight("v", 192, 5)])


def pickled_program(folder: Path) -> str:
    with zipfile.ZipFile(folder / "m.pt2", "w") as archive:
        archive.writestr("m/data/constants/custom_obj_0", b"\x80\x04.")
    return str(folder / "m.pt2")


MODELS = {
    "an image as output": (image_output, ModelRefusedError, r"must be \[batch, classes\]"),
    "two outputs": (two_outputs, ModelRefusedError, r"2 outputs: 'y' \[16, 5\], 'f' \[16, 4\]; a bundle serves one"),
    "labels beside their scores": (
        labels_and_scores,
        ModelRefusedError,
        r"2 outputs: 'label' int64 \[16\], 'y' \[16, 5\]",
    ),
    "labels alone": (labels_alone, ModelRefusedError, r"output 'label' is int64 \[16\], not scores"),
    "a map for each row": (maps_of_scores, ModelRefusedError, r"output 'map' is a list, not scores"),
    "two inputs": (two_inputs, ModelRefusedError, "2 inputs and 1 outputs"),
    "training mode": (depends_on_the_batch, ModelRefusedError, "depends on the other inputs of its batch"),
    "a fixed batch": (fixed_batch, ModelRefusedError, "batch axis fixed"),
    "a pickled object": (pickled_program, ModelRefusedError, "holds a pickled object"),
    "no such file": (lambda d: str(d / "m.onnx"), InvalidArgumentError, r"m\.onnx does not exist"),
    "another format": (lambda d: str(d / "m.pth"), InvalidArgumentError, "is none of family:NAME"),
    "no weights": (lambda _: "family:resnet?blocks=1", InvalidArgumentError, "names no weights"),
    "unknown family": (lambda _: "family:vgg?weights=w", InvalidArgumentError, "'vgg' is unknown; choose one of"),
    "unknown parameter": (
        lambda _: "family:resnet?weights=w&blocks=1&depth=3",
        InvalidArgumentError,
        "'depth' is unknown; this family takes blocks",
    ),
    "missing parameter": (lambda _: "family:resnet?weights=w", InvalidArgumentError, "add blocks=N"),
    "bad number": (lambda _: "family:resnet?weights=w&blocks=0", InvalidArgumentError, "blocks is '0'"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_served_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, error, message = MODELS[case]
    with pytest.raises(error, match=message) as caught:
        load_backbone(make(tmp_path), ROWS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".safetensors"])
def test_a_file_of_rubbish_is_refused_with_its_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rubbish{suffix}"
    path.write_bytes(b"rubbish" * 100)
    uri = f"family:resnet?weights={path}&blocks=1" if suffix == ".safetensors" else str(path)
    with pytest.raises(InvalidArgumentError, match=rf"rubbish\{suffix} (is|are) not a"):
        load_backbone(uri, ROWS)


def test_weights_of_another_architecture_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(16, 3, 3, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(InvalidArgumentError, match="do not fit family resnet: Missing key"):
        load_backbone(f"family:resnet?weights={tmp_path / 'w.safetensors'}&blocks=1", ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["family", "onnx"])
def test_rows_of_another_shape_than_the_model_takes_are_refused(source: str, tmp_path: Path) -> None:
    uri = classifier(tmp_path / "m.onnx")
    if source == "family":
        save_file(build_family("resnet", {"blocks": "1"}).state_dict(), tmp_path / "w.safetensors")
        uri = f"family:resnet?weights={tmp_path / 'w.safetensors'}&blocks=1"
    with pytest.raises(InvalidArgumentError, match=r"rows of shape \[2, 8, 8\]"):
        load_backbone(uri, ROWS[:, :2])


def test_a_model_that_is_bypassed_everywhere_has_no_exit_and_says_so(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("Flatten", ["d"], ["g"]),
        helper.make_node("Concat", ["f", "g"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "v"], ["y"]),
    ]
    uri = save_graph(
        tmp_path / "m.onnx", nodes, [weight("w", 4, 3, 3, 3), weight("w2", 4, 3, 3, 3), weight("v", 512, 5)]
    )
    backbone = load_backbone(uri, ROWS)
    with pytest.raises(
        ModelRefusedError, match=r"no exit can be attached: .* 1 cut vertices, and none of them is a map"
    ):
        find_places(backbone, ROWS)


@pytest.mark.slow
def test_a_model_whose_answers_no_head_foresees_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(60, 3, 8, 8)).astype(np.float32))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["d"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    random_weights = [weight("w", 64, 3, 3, 3), weight("w2", 64, 64, 3, 3), weight("v", 64 * 64, 50)]
    uri = save_graph(tmp_path / "m.onnx", nodes, random_weights)
    request = PrepareRequest(model=uri, data=str(tmp_path / "d.npz"), out=tmp_path / "b", profile_seconds=0.1)
    with pytest.raises(ModelRefusedError, match="ramps tried would pay for this model and data"):
        prepare_bundle(request, Reporter(quiet=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.npz", "m.onnx"]


def test_whole_number_tensors_between_the_blocks_are_no_place(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Cast", ["c"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Cast", ["whole"], ["back"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["back", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["d"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    uri = save_graph(
        tmp_path / "m.onnx", nodes, [weight("w", 4, 3, 3, 3), weight("w2", 4, 4, 3, 3), weight("v", 256, 5)]
    )
    found = find_places(load_backbone(uri, ROWS), ROWS)
    assert found.n_cuts == 5
    assert [place.tensor for place in found.places] == ["back", "d"]


REQUESTS = {
    "head share": ({"head_share": 0.9}, r"head-share is 0\.9; it must lie in \(0, 0\.8\]"),
    "split": ({"split": "thirds"}, "split 'thirds' is unknown; use default"),
    "name": ({"name": "Not OK"}, "name 'Not OK' must be lower-case"),
    "threads": ({"threads": 0}, "threads is 0"),
    "variations": ({"variations": -1}, "variations is -1"),
    "seed": ({"seed": -1}, "seed is -1"),
    "few rows": ({"data": "few.npz"}, "data has 3 rows; at least 40"),
    "other rows": ({"head_data": "other.npz"}, r"head-data .*other\.npz has rows of shape \[2\]"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_bad_requests_are_refused_before_any_work(case: str, tmp_path: Path) -> None:
    changes, message = REQUESTS[case]
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(50, 3, 8, 8)))
    np.savez(tmp_path / "few.npz", x=np.ones((3, 3, 8, 8)))
    np.savez(tmp_path / "other.npz", x=np.ones((3, 2)))
    paths = {k: str(tmp_path / v) for k, v in changes.items() if k in ("data", "head_data")}
    request = PrepareRequest(model="m.onnx", data=str(tmp_path / "data.npz"), out=tmp_path / "b")
    with pytest.raises(InvalidArgumentError, match=message):
        prepare_bundle(replace(request, **{**changes, **paths}), Reporter(quiet=True))  # type: ignore[arg-type]


def test_a_target_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear diary")
    with pytest.raises(InvalidArgumentError, match="is a folder that holds no bundle"):
        check_target(tmp_path)
    with pytest.raises(InvalidArgumentError, match="is a file"):
        check_target(tmp_path / "letter.txt")
    with pytest.raises(InvalidArgumentError, match="lies inside a file"):
        check_target(tmp_path / "letter.txt" / "bundle")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (["--own-exits", "early"], "give --own-exits with --model; --refresh keeps the bundle's exits"),
        (["--variants"], "give --variants with --model; --refresh keeps the bundle's"),
    ],
    ids=["own exits", "variants"],
)
def test_the_command_says_what_belongs_to_a_model(tmp_path: Path, option: list[str], why: str) -> None:
    app = typer.Typer()
    app.command()(prepare)
    given = ["--refresh", str(tmp_path), *option, "--data", "d.npz", "--out", str(tmp_path / "b")]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert result.stderr == f"offramp prepare: {why}\n"


def test_the_command_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(prepare)
    arguments = ["--model", "m.onnx", "--data", str(tmp_path / "none.npz"), "--out", str(tmp_path / "b")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"offramp prepare: data {tmp_path / 'none.npz'} does not exist; give an .npz with x [N, ...], a folder of "
        "images, or a .jsonl file of texts"
    ]
