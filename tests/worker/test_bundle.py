"""A bundle is verified file by file; heads and stages compute what they say."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import helper, numpy_helper
from scipy.special import softmax

from offramp_core.bundle import RampSpec
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.graph import stage_model
from offramp_worker.bundle.heads import grid_window, head_nodes
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.bundle.stages import stage_graphs
from offramp_worker.engine.execution.sessions import Sessions

FILES = ("backbone.onnx", "ramps.safetensors", "records.npz", "profile.json", "probe.npz")


@pytest.fixture
def copy(bundle_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_dir, tmp_path / "copy"))


@pytest.mark.parametrize("name", FILES)
def test_a_tampered_file_is_refused_by_name(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(InvalidBundleError, match=f"^{name}: .*SHA-256"):
        load_bundle(copy)


@pytest.mark.parametrize("name", (*FILES, "manifest.json"))
def test_a_missing_file_is_refused_by_name(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(InvalidBundleError, match=f"^{name}: cannot be read"):
        load_bundle(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_with_a_fitting_manifest_is_still_refused_by_name(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"\x80\x04 not what it should be")
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=f"^{name}: "):
        load_bundle(copy)


def test_a_manifest_that_could_fill_the_memory_is_not_read(copy: Path) -> None:
    with (copy / "manifest.json").open("ab") as file:
        file.truncate(2**34)  # sparse: it takes no disk
    with pytest.raises(InvalidBundleError, match=r"^manifest.json: has 17179869184 bytes; at most 16777216 are read"):
        load_bundle(copy)


def test_pickled_arrays_are_refused(copy: Path) -> None:
    np.savez(copy / "probe.npz", x=np.array([{"a": 1}], dtype=object), logits=np.zeros((1, 5)))
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=r"^probe.npz: .*plain arrays"):
        load_bundle(copy)


def _truncated(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def _with_a_wrong_checksum(raw: bytes) -> bytes:
    """A byte of the first array's numbers is another one; the archive's own list of contents is whole."""
    at = raw.index(b"\x93NUMPY") + 200
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def _not_an_array(_: bytes) -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x", b"no array")
            archive.writestr("logits", b"no array")
        return file.getvalue()


def _array_alone(_: bytes) -> bytes:
    with io.BytesIO() as file:
        np.save(file, np.zeros(3))
        return file.getvalue()


@pytest.mark.parametrize("name", ["probe.npz", "records.npz"])
@pytest.mark.parametrize(
    "damage",
    [_truncated, _with_a_wrong_checksum, _not_an_array, _array_alone, lambda _: b"PK\x03\x04", lambda _: b""],
    ids=["truncated", "checksum", "no-array", "npy", "header-alone", "empty"],
)
def test_a_damaged_archive_with_a_fitting_manifest_is_refused_by_name(
    copy: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    (copy / name).write_bytes(damage((copy / name).read_bytes()))
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=f"^{name}: is no npz archive of plain arrays"):
        load_bundle(copy)


def test_weights_outside_of_the_model_file_are_refused(copy: Path) -> None:
    model = onnx.load(copy / "backbone.onnx")
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    (copy / "backbone.onnx").write_bytes(model.SerializeToString())
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=r"^backbone.onnx: keeps weights in other files"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"backbone_digest": "sha256:" + "0" * 64}, "backbone_digest"),
        ({"ramp_set_digest": "sha256:" + "0" * 64}, "ramp_set_digest"),
        ({"inputs": []}, "inputs"),
        ({"n_classes": "five"}, "n_classes"),
        ({"name": "a/b"}, "name 'a/b'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_manifest_field_is_named(copy: Path, fields: dict[str, Any], message: str) -> None:
    bundles.edit_manifest(copy, **fields)
    with pytest.raises(InvalidBundleError, match=rf"^manifest.json: .*{message}"):
        load_bundle(copy)


def test_a_kind_of_head_that_is_not_known_is_refused_with_those_that_are(copy: Path) -> None:
    ramps = json.loads((copy / "manifest.json").read_bytes())["ramps"]
    bundles.edit_manifest(copy, ramps=[*ramps[:-1], ramps[-1] | {"head": "zigzag"}])
    known = r"has head 'zigzag'; this worker knows pooled-linear, .*, own and model"
    with pytest.raises(InvalidBundleError, match=rf"^manifest.json: ramp 'r02-linear' {known}"):
        load_bundle(copy)


def test_a_bundle_of_another_model_than_expected_is_refused(copy: Path) -> None:
    with pytest.raises(InvalidBundleError, match="this worker must serve sha256:11"):
        load_bundle(copy, expected_digest="sha256:" + "1" * 64)


def test_head_weights_of_a_wrong_shape_are_refused(copy: Path) -> None:
    tensors = safetensors.numpy.load_file(copy / "ramps.safetensors")
    tensors["r01-grid/w1"] = tensors["r01-grid/w1"][:-1].copy()
    safetensors.numpy.save_file(tensors, copy / "ramps.safetensors")
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=r"^ramps.safetensors: r01-grid/w1 is"):
        load_bundle(copy)


def test_a_model_that_does_not_reproduce_its_probe_is_refused(copy: Path) -> None:
    with np.load(copy / "probe.npz") as probe:
        np.savez(copy / "probe.npz", x=probe["x"], logits=probe["logits"] + 0.05)
    bundles.write_manifest(copy)
    with pytest.raises(InvalidBundleError, match=r"^backbone.onnx: does not reproduce"):
        Sessions(load_bundle(copy), threads=1)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 11, 14, 32, 56])
def test_grid_windows_cover_an_axis_in_four_steps(size: int) -> None:
    kernel, stride = grid_window(size)
    assert (size - kernel) % stride == 0
    assert (size - kernel) // stride + 1 == 4


def test_a_map_smaller_than_the_grid_has_no_grid_head() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 4"):
        grid_window(3)


@pytest.mark.parametrize("height,width", [(8, 8), (7, 5), (4, 4)])
def test_heads_compute_the_documented_formula(height: int, width: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 2, height, width)).astype(np.float32)
    grid = RampSpec("g", "x", 0, 0.1, "grid-mlp", 2, hidden=3)
    linear = RampSpec("l", "x", 0, 0.1, "pooled-linear", 2)
    w1, b1 = rng.normal(size=(64, 3)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    w2, b2 = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    wl = rng.normal(size=(2, 5)).astype(np.float32)
    pooled = np.concatenate([_grid(x, np.mean), _grid(x, np.max)], axis=1)
    expected = np.maximum(pooled @ w1 + b1, 0) @ w2 + b2
    np.testing.assert_allclose(_run(grid, {"w1": w1, "b1": b1, "w2": w2, "b2": b2}, x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        _run(linear, {"w1": wl, "b1": b2}, x), x.mean(axis=(2, 3)) @ wl + b2, rtol=1e-4, atol=1e-5
    )


def test_stages_of_any_active_ramps_equal_the_tapped_model(bundle: Bundle, sessions: Sessions) -> None:
    x = bundles.inputs(20, seed=7)
    reference = sessions._taps["fp32"].session.run(None, {"x": x})
    for active in [(0,), (1,), (3,), (0, 1), (0, 2), (1, 2, 3), (0, 1, 2, 3)]:
        value: Any = x
        for stage in sessions.stages(active):
            value, heads = stage.run(value, x)
            for ramp, (logits, confidence) in zip(stage.ramps, heads, strict=True):
                np.testing.assert_allclose(logits, reference[1 + ramp], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(
                    confidence, softmax(logits.astype(np.float64), axis=1).max(axis=1), rtol=1e-13
                )
        np.testing.assert_allclose(value, reference[0], rtol=1e-4, atol=1e-4)


def _quantised() -> onnx.ModelProto:
    """Two convolutions between rounded tensors, as static quantisation writes them; ``c0`` is the first one's rounded
    output."""
    rng = np.random.default_rng(0)
    constants = {"scale": np.float32(0.05), "zero": np.uint8(20), "weight_zero": np.int8(0)}
    constants |= {f"k{i}": rng.integers(-90, 90, (8, n, 3, 3)).astype(np.int8) for i, n in enumerate((3, 8))}
    constants["w"] = rng.normal(size=(8, 5)).astype(np.float32)

    def rounded(name: str, target: str) -> list[onnx.NodeProto]:
        levels = helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{target}/levels"])
        return [levels, helper.make_node("DequantizeLinear", [f"{target}/levels", "scale", "zero"], [target])]

    nodes = rounded("x", "x/rounded")
    for i, source in enumerate(("x/rounded", "c0")):
        nodes.append(helper.make_node("DequantizeLinear", [f"k{i}", "scale", "weight_zero"], [f"k{i}/float"]))
        nodes.append(helper.make_node("Conv", [source, f"k{i}/float"], [f"a{i}"], pads=[1, 1, 1, 1]))
        nodes += rounded(f"a{i}", f"c{i}")
    nodes += [
        helper.make_node("GlobalAveragePool", ["c1"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "w"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3, 14, 14])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_stages_of_a_quantised_graph_hand_levels_on_and_end_with_its_very_answer(bundle: Bundle) -> None:
    model, head = _quantised(), bundle.heads[0]
    assert head is not None and head.source == "c0"
    graphs = stage_graphs(model, [[head]], shapes={"c0": (8, 14, 14)})
    handed_on = graphs[0].model.graph.output[0].type.tensor_type.elem_type
    assert graphs[0].optimised and handed_on == onnx.TensorProto.UINT8
    x = bundles.inputs(6, seed=3)
    features = x
    for graph in graphs:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        features = session.run(graph.outputs, {graph.source: features})[0]
    whole = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(features, whole.run(None, {"x": x})[0])


def test_a_graph_without_a_cut_after_optimisation_is_cut_as_it_was_given(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise InvalidBundleError("no cut")

    monkeypatch.setattr("offramp_worker.bundle.stages._optimised_cutter", refuse)
    x = bundles.inputs(9, seed=4)
    plain = Sessions(bundle, threads=1)
    reference = plain._taps["fp32"].session.run(None, {"x": x})
    features: Any = x
    for stage in plain.stages((0, 1, 3)):
        features, heads = stage.run(features, x)
        for ramp, (logits, _) in zip(stage.ramps, heads, strict=True):
            np.testing.assert_allclose(logits, reference[1 + ramp], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(features, reference[0], rtol=1e-4, atol=1e-4)


def test_a_tensor_that_other_paths_go_around_is_no_place_to_cut() -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", 2])], [value("y", 1, ["n", 2])])
    with pytest.raises(InvalidBundleError, match="'b' does not separate"):
        stage_model(helper.make_model(graph), source="b", target=None, heads=(), shapes={"b": (2,)})


def _grid(x: Any, reduce: Any) -> Any:
    (kernel_h, stride_h), (kernel_w, stride_w) = grid_window(x.shape[2]), grid_window(x.shape[3])
    cells = [
        reduce(x[:, :, i * stride_h : i * stride_h + kernel_h, j * stride_w : j * stride_w + kernel_w], axis=(2, 3))
        for i in range(4)
        for j in range(4)
    ]
    return np.stack(cells, axis=2).reshape(len(x), -1)


def _run(spec: RampSpec, tensors: dict[str, Any], x: Any) -> Any:
    head = head_nodes(spec, tensors, height=x.shape[2], width=x.shape[3])
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(head.nodes),
        "head",
        [info("x", 1, ["n", *x.shape[1:]])],
        [info(head.output, 1, ["n", 5])],
        list(head.initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bundles.ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )[0]
