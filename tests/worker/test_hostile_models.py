"""ONNX models whose tensors name files: wherever such a tensor stands, no worker follows it, and ``prepare`` no further
than its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bundles
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.load import load_bundle
from offramp_worker.bundle.tensors import external_tensors
from offramp_worker.devices import open_session
from offramp_worker.prepare.source.sources import load_backbone

SECRET = "secret.bin"
WIDTH = 4
ROWS = np.random.default_rng(0).normal(size=(24, WIDTH)).astype(np.float32)


def elsewhere(name: str = "w", *, location: str = SECRET) -> TensorProto:
    """A tensor whose values are in a file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[WIDTH], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", str(4 * WIDTH))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def branch(tensor: TensorProto) -> onnx.GraphProto:
    value = helper.make_tensor_value_info("branch", TensorProto.FLOAT, [WIDTH])
    return helper.make_graph([helper.make_node("Identity", [tensor.name], ["branch"])], "b", [], [value], [tensor])


def an_initializer(tensor: TensorProto) -> onnx.ModelProto:
    return model([], [tensor])


def a_constant(tensor: TensorProto) -> onnx.ModelProto:
    return model([helper.make_node("Constant", [], ["w"], value=tensor)])


def a_branch(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("If", ["yes"], ["w"], then_branch=branch(tensor), else_branch=branch(tensor))
    return model([node], [numpy_helper.from_array(np.array(True), "yes")])


def a_branch_in_a_branch(tensor: TensorProto) -> onnx.ModelProto:
    outer = helper.make_graph(
        [helper.make_node("If", ["yes"], ["inner"], then_branch=branch(tensor), else_branch=branch(tensor))],
        "o",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [WIDTH])],
    )
    node = helper.make_node("If", ["yes"], ["w"], then_branch=outer, else_branch=outer)
    return model([node], [numpy_helper.from_array(np.array(True), "yes")])


def a_function(tensor: TensorProto) -> onnx.ModelProto:
    made = model([helper.make_node("F", [], ["w"], domain="local")])
    nodes = [helper.make_node("Constant", [], ["w"], value=tensor)]
    made.functions.append(helper.make_function("local", "F", [], ["w"], nodes, [helper.make_opsetid("", 18)]))
    return made


def a_sparse_tensor(tensor: TensorProto) -> onnx.ModelProto:
    indices = numpy_helper.from_array(np.arange(WIDTH), "indices")
    made = model([])
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [WIDTH]))
    return made


def training_information(tensor: TensorProto) -> onnx.ModelProto:
    made = model([helper.make_node("Constant", [], ["w"], value_floats=[1.0] * WIDTH)])
    made.training_info.add().initialization.CopyFrom(branch(tensor))
    return made


def model(nodes: list[onnx.NodeProto], tensors: list[TensorProto] | None = None) -> onnx.ModelProto:
    """Rows [batch, 4] plus ``w``."""
    graph = helper.make_graph(
        [*nodes, helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        tensors or [],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


PLACES: dict[str, tuple[Callable[[TensorProto], onnx.ModelProto], str]] = {
    "an initializer": (an_initializer, "graph.initializer[0]"),
    "a constant": (a_constant, "graph.node[0].attribute[0].t"),
    "a branch": (a_branch, "graph.node[0].attribute[0].g.initializer[0]"),
    "a branch in a branch": (
        a_branch_in_a_branch,
        "graph.node[0].attribute[0].g.node[0].attribute[0].g.initializer[0]",
    ),
    "a function": (a_function, "functions[0].node[0].attribute[0].t"),
    "a sparse tensor": (a_sparse_tensor, "graph.sparse_initializer[0].values"),
    "training information": (training_information, "training_info[0].initialization.initializer[0]"),
}


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the working directory, which is where ONNX Runtime looks by itself."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    np.arange(WIDTH, dtype=np.float32).tofile(folder / SECRET)
    return folder / SECRET


@pytest.mark.parametrize("case", PLACES)
def test_a_bundle_that_keeps_weights_in_other_files_is_refused_wherever_they_stand(
    case: str, tmp_path: Path, secret: Path
) -> None:
    make, place = PLACES[case]
    folder = bundles.write_wide_bundle(tmp_path / "bundle")
    for file in ("backbone.onnx", "backbone.int8.onnx", f"ramp-{bundles.SMALL}.onnx"):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(make(elsewhere()).SerializeToString())
        bundles.write_manifest(folder, bundles.WIDE_RAMPS, bundles.WIDE_PRECISIONS)
        with pytest.raises(InvalidBundleError) as caught:
            load_bundle(folder)
        assert str(caught.value).startswith(f"{file}: keeps weights in other files ({place})")
        (folder / file).write_bytes(whole)


@pytest.mark.parametrize("case", PLACES)
def test_no_session_follows_them_even_where_nobody_looked(case: str, secret: Path) -> None:
    make, _ = PLACES[case]
    try:
        (found,) = open_session(make(elsewhere()), threads=1).run(None, {"x": np.zeros((1, WIDTH), np.float32)})
    except Exception:  # what it should do; ONNX Runtime raises bare exceptions of its C++ side
        return
    assert case == "training information"  # which no session reads
    np.testing.assert_array_equal(found, np.ones((1, WIDTH)))


@pytest.mark.parametrize("case", [case for case in PLACES if case != "a sparse tensor"])  # no operator here takes one
def test_prepare_takes_in_weights_from_plain_files_beside_the_model(case: str, tmp_path: Path) -> None:
    make, _ = PLACES[case]
    np.ones(WIDTH, dtype=np.float32).tofile(tmp_path / SECRET)
    onnx.save(make(elsewhere()), tmp_path / "m.onnx")
    backbone = load_backbone(str(tmp_path / "m.onnx"), ROWS)
    assert not list(external_tensors(backbone.model))
    (found,) = open_session(backbone.model, threads=1).run(None, {"x": ROWS})
    np.testing.assert_array_equal(found, ROWS + 1)


LOCATIONS = {
    "a folder above": "../secret.bin",
    "an absolute path": "/etc/passwd",
    "a folder below": "below/secret.bin",
    "a link": "link.bin",
    "the folder itself": ".",
    "nothing": "",
    "no such file": "none.bin",
    "an address in memory": "*/_ORT_MEM_ADDR_/*",
}


@pytest.mark.parametrize("location", LOCATIONS.values(), ids=list(LOCATIONS))
@pytest.mark.parametrize("make", [an_initializer, a_constant, a_branch, a_function], ids=lambda make: make.__name__)
def test_prepare_reads_no_other_file_for_a_model(
    make: Callable[[TensorProto], onnx.ModelProto], location: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    for file in (tmp_path / SECRET, folder / "below" / SECRET):
        np.arange(WIDTH, dtype=np.float32).tofile(file)
    (folder / "link.bin").symlink_to(tmp_path / SECRET)
    (folder / "m.onnx").write_bytes(make(elsewhere(location=location)).SerializeToString())
    with pytest.raises(
        InvalidArgumentError, match=r"keeps the weights of .* only plain files in the model's own folder"
    ):
        load_backbone(str(folder / "m.onnx"), ROWS)
