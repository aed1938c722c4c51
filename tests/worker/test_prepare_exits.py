"""Networks that bring exits of their own, and dense blocks: what the graph becomes, and that no answer changes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from scipy.special import log_softmax, softmax

from offramp_core.bundle import RampSpec, ramp_set_digest
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.bundle.graph import stage_model
from offramp_worker.devices import open_session
from offramp_worker.prepare.heads.features import heads_of, tapped_logits
from offramp_worker.prepare.heads.fitting import candidate_rungs
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import print_report
from offramp_worker.prepare.source.sources import load_backbone

ROWS = np.random.default_rng(0).normal(size=(24, 3, 8, 8)).astype(np.float32)


def save(path: Path, nodes: list[onnx.NodeProto], shapes: dict[str, tuple[int, ...]], outputs: tuple[str, ...]) -> Path:
    rng = np.random.default_rng(1)
    weights = [numpy_helper.from_array(rng.normal(0, 0.3, s).astype(np.float32), name) for name, s in shapes.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", None]) for name in outputs],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def conv(source: str, weight: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Conv", [source, weight], [f"{target}_sum"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [f"{target}_sum"], [target]),
    ]


def classifier(source: str, weight: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("GlobalAveragePool", [source], [f"{target}_pool"]),
        helper.make_node("Flatten", [f"{target}_pool"], [f"{target}_flat"]),
        helper.make_node("MatMul", [f"{target}_flat", weight], [target]),
    ]


def branching(path: Path) -> Path:
    """Three convolutions; an exit after the first and one after the second, the second with a convolution of its
    own."""
    nodes = [
        *conv("x", "k0", "a"),
        *classifier("a", "w0", "early"),
        *conv("a", "k1", "b"),
        *conv("b", "k3", "side"),
        *classifier("side", "w1", "late"),
        *conv("b", "k2", "c"),
        *classifier("c", "w2", "final"),
    ]
    shapes = {"k0": (6, 3, 3, 3), "k1": (6, 6, 3, 3), "k2": (6, 6, 3, 3), "k3": (4, 6, 3, 3)}
    return save(path, nodes, shapes | {"w0": (6, 3), "w1": (4, 3), "w2": (6, 3)}, ("early", "late", "final"))


def test_a_networks_own_exits_become_ramps_that_say_what_its_outputs_said(tmp_path: Path) -> None:
    path = branching(tmp_path / "m.onnx")
    backbone = load_backbone(str(path), ROWS, own_exits=("early", "late"))
    assert [value.name for value in backbone.model.graph.output] == ["final"]
    found = find_places(backbone, ROWS)
    places, exits = found.places, found.exits
    assert exits == {"early": "a", "late": "b"}
    rungs = candidate_rungs(places, entry=None, exits=exits)
    assert [(ramp.head, ramp.tensor, ramp.output) for ramp in rungs.own] == [
        ("own", "a", "early"),
        ("own", "b", "late"),
    ]
    heads = heads_of(rungs.own, places, tensors={ramp.id: {} for ramp in rungs.own})
    logits, said = tapped_logits(backbone, heads, ROWS, threads=1, advance=lambda _: None)
    expected = ort.InferenceSession(str(path)).run(None, {"x": ROWS})
    for got, wanted in zip([*said, logits], expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_two_tasks_of_as_many_classes_are_refused_until_one_is_named_an_exit_of_the_other(tmp_path: Path) -> None:
    path = branching(tmp_path / "m.onnx")
    with pytest.raises(ModelRefusedError) as caught:
        load_backbone(str(path), ROWS)
    said = str(caught.value)
    assert "3 outputs: 'early' [16, 3], 'late' [16, 3], 'final' [16, 3]" in said
    assert "--own-exits" in said and "onnx.utils.extract_model" in said
    assert load_backbone(str(path), ROWS, own_exits=("early", "late")).exits == ("early", "late")


def test_the_output_that_is_no_exit_is_served_wherever_it_stands(tmp_path: Path) -> None:
    path = branching(tmp_path / "m.onnx")
    model = onnx.load(path)
    early = model.graph.output.pop(0)
    model.graph.output.append(early)
    onnx.save(model, path)
    backbone = load_backbone(str(path), ROWS, own_exits=("late", "early"))
    assert (backbone.output.name, backbone.exits) == ("final", ("late", "early"))
    (logits,) = open_session(backbone.model, threads=1).run(None, {"x": ROWS})
    np.testing.assert_array_equal(logits, ort.InferenceSession(str(path)).run(["final"], {"x": ROWS})[0])


OWN_EXITS = {
    "a name that is no output": (("early", "lat"), "own-exits names 'lat'"),
    "a name twice": (("early", "early", "late"), "own-exits names 'early' twice"),
    "an output that is neither": (("early",), r"leaves 2 outputs: 'late' \[16, 3\], 'final'"),
    "nothing left to serve": (("early", "late", "final"), "leaves no output"),
}


@pytest.mark.parametrize("case", OWN_EXITS)
def test_own_exits_are_all_outputs_but_the_one_that_is_served(case: str, tmp_path: Path) -> None:
    names, message = OWN_EXITS[case]
    with pytest.raises(InvalidArgumentError, match=message):
        load_backbone(str(branching(tmp_path / "m.onnx")), ROWS, own_exits=names)


def ending(path: Path, ends: dict[str, str]) -> Path:
    """The branching network with an operator behind some of its outputs, whose names stay."""
    model = onnx.load(branching(path))
    for node in model.graph.node:
        node.output[:] = [f"{name}_raw" if name in ends else name for name in node.output]
    for name, operator in ends.items():
        model.graph.node.append(
            helper.make_node(operator, [f"{name}_raw"], [name], **({} if operator == "Sigmoid" else {"axis": 1}))
        )
    onnx.save(model, path)
    return path


ENDS = {
    "probabilities everywhere": {"early": "Softmax", "late": "Softmax", "final": "Softmax"},
    "logits at an exit, probabilities at the end": {"late": "Softmax", "final": "Softmax"},
    "probabilities at an exit, logits at the end": {"early": "Softmax", "late": "LogSoftmax"},
    "logarithms at the end": {"early": "Softmax", "final": "LogSoftmax"},
}


@pytest.mark.parametrize("case", ENDS)
def test_what_a_networks_own_exits_say_is_said_in_the_scale_of_its_end(case: str, tmp_path: Path) -> None:
    names = ("early", "late")
    path = ending(tmp_path / "m.onnx", ENDS[case])
    backbone = load_backbone(str(path), ROWS, own_exits=names)
    found = find_places(backbone, ROWS)
    places, exits = found.places, found.exits
    own = candidate_rungs(places, entry=None, exits=exits).own
    heads = heads_of(own, places, tensors={ramp.id: {} for ramp in own})
    _, said = tapped_logits(backbone, heads, ROWS, threads=1, advance=lambda _: None)
    raw = dict(
        zip(names, ort.InferenceSession(str(branching(tmp_path / "raw.onnx"))).run(names, {"x": ROWS}), strict=True)
    )
    scaled = {"Softmax": softmax, "LogSoftmax": log_softmax}.get(ENDS[case].get("final", ""))
    for name, logits in zip(names, said, strict=True):
        answered = backbone.scale.from_logits(logits)
        if scaled is not None:
            np.testing.assert_allclose(answered, scaled(raw[name], axis=1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(softmax(logits, axis=1), softmax(raw[name], axis=1), rtol=1e-5)


def test_an_exit_that_answers_another_kind_of_question_is_refused_by_name(tmp_path: Path) -> None:
    path = ending(tmp_path / "m.onnx", {"early": "Sigmoid"})
    with pytest.raises(ModelRefusedError, match=r"output 'early' .* ends in Sigmoid .* a probability for each label"):
        load_backbone(str(path), ROWS, own_exits=("early", "late"))


def test_a_stage_with_an_own_exit_computes_the_exit_and_goes_on(tmp_path: Path) -> None:
    path = branching(tmp_path / "m.onnx")
    backbone = load_backbone(str(path), ROWS, own_exits=("early", "late"))
    found = find_places(backbone, ROWS)
    places, exits = found.places, found.exits
    (_, late) = heads_of(
        own := candidate_rungs(places, entry=None, exits=exits).own, places, tensors={ramp.id: {} for ramp in own}
    )
    shapes = {place.tensor: place.shape for place in places}
    front = stage_model(backbone.model, source=None, target="b", heads=[late], shapes=shapes)
    rest = stage_model(backbone.model, source="b", target=None, heads=(), shapes=shapes)
    features, said = open_session(front, threads=1).run(None, {"x": ROWS})
    (logits,) = open_session(rest, threads=1).run(None, {"b": features})
    _, wanted, final = ort.InferenceSession(str(path)).run(None, {"x": ROWS})
    np.testing.assert_allclose(said, wanted, atol=1e-6)
    np.testing.assert_allclose(logits, final, atol=1e-6)


def test_which_exit_a_ramp_is_belongs_to_the_digest_and_costs_other_ramps_nothing() -> None:
    files = {"ramps.safetensors": "0" * 64}
    first = RampSpec("r01-own", "a", 1, 0.2, "own", 6, output="early")
    second = RampSpec("r01-own", "a", 1, 0.2, "own", 6, output="late")
    assert ramp_set_digest((first,), files) != ramp_set_digest((second,), files)


def multi_scale(path: Path, *, classifiers_last: bool) -> Path:
    """Two scales through three blocks; an exit after the first and the second block reads both, and so does the
    answer."""
    nodes = [*conv("x", "k0", "a0"), *conv("x", "k1", "b0")]
    exits = []
    for block in (1, 2, 3):
        nodes += [*conv(f"a{block - 1}", f"ka{block}", f"a{block}"), *conv(f"b{block - 1}", f"kb{block}", f"b{block}")]
        pair = f"ab{block}"
        exit_nodes = [helper.make_node("Concat", [f"a{block}", f"b{block}"], [pair], axis=1)]
        exit_nodes += classifier(pair, f"w{block}", f"exit{block}")
        (exits if classifiers_last else nodes).extend(exit_nodes)
    shapes = {"k0": (4, 3, 3, 3), "k1": (2, 3, 3, 3)}
    shapes |= {f"ka{block}": (4, 4, 3, 3) for block in (1, 2, 3)} | {f"kb{block}": (2, 2, 3, 3) for block in (1, 2, 3)}
    shapes |= {f"w{block}": (6, 3) for block in (1, 2, 3)}
    return save(path, [*nodes, *exits], shapes, ("exit1", "exit2", "exit3"))


@pytest.mark.parametrize("classifiers_last", [False, True])
def test_exits_between_blocks_that_hand_on_several_scales_are_taken_where_these_are_packed(
    tmp_path: Path, classifiers_last: bool
) -> None:
    path = multi_scale(tmp_path / "m.onnx", classifiers_last=classifiers_last)
    backbone = load_backbone(str(path), ROWS, own_exits=("exit1", "exit2"))
    found = find_places(backbone, ROWS)
    places, exits = found.places, found.exits
    assert exits == {"exit1": "packed1", "exit2": "packed2"}
    own = candidate_rungs(places, entry=None, exits=exits).own
    heads = heads_of(own, places, tensors={ramp.id: {} for ramp in own})
    logits, said = tapped_logits(backbone, heads, ROWS, threads=1, advance=lambda _: None)
    expected = ort.InferenceSession(str(path)).run(None, {"x": ROWS})
    for got, wanted in zip([*said, logits], expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_what_is_behind_packed_scales_needs_nothing_from_before_them(tmp_path: Path) -> None:
    path = multi_scale(tmp_path / "m.onnx", classifiers_last=True)
    backbone = load_backbone(str(path), ROWS, own_exits=("exit1", "exit2"))
    found = find_places(backbone, ROWS)
    places, exits = found.places, found.exits
    shapes = {place.tensor: place.shape for place in places}
    (first, _) = heads_of(
        own := candidate_rungs(places, entry=None, exits=exits).own, places, tensors={ramp.id: {} for ramp in own}
    )
    front = stage_model(backbone.model, source=None, target="packed1", heads=[first], shapes=shapes)
    rest = stage_model(backbone.model, source="packed1", target=None, heads=(), shapes=shapes)
    features, said = open_session(front, threads=1).run(None, {"x": ROWS})
    (logits,) = open_session(rest, threads=1).run(None, {"packed1": features})
    wanted, _, final = ort.InferenceSession(str(path)).run(None, {"x": ROWS})
    assert features.shape == (len(ROWS), (4 + 2) * 8 * 8)
    np.testing.assert_allclose(said, wanted, atol=1e-6)
    np.testing.assert_allclose(logits, final, atol=1e-6)


def test_a_dense_block_has_a_place_after_every_layer_and_the_same_answers(tmp_path: Path) -> None:
    nodes, parts = [*conv("x", "k0", "f0")], ["f0"]
    for i in range(1, 4):
        source = parts[0] if len(parts) == 1 else f"cat{i}"
        if len(parts) > 1:
            nodes.append(helper.make_node("Concat", parts, [source], axis=1))
        nodes += conv(source, f"k{i}", f"f{i}")
        parts.append(f"f{i}")
    nodes += [helper.make_node("Concat", parts, ["all"], axis=1), *classifier("all", "w", "y")]
    shapes = {"k0": (4, 3, 3, 3), "k1": (4, 4, 3, 3), "k2": (4, 8, 3, 3), "k3": (4, 12, 3, 3), "w": (16, 3)}
    path = save(tmp_path / "m.onnx", nodes, shapes, ("y",))
    backbone = load_backbone(str(path), ROWS)
    places = find_places(backbone, ROWS).places
    assert [place.tensor for place in places] == ["f0", "cat2", "cat3", "all"]
    (logits,) = open_session(backbone.model, threads=1).run(None, {"x": ROWS})
    np.testing.assert_array_equal(logits, ort.InferenceSession(str(path)).run(None, {"x": ROWS})[0])


@pytest.mark.slow
@pytest.mark.parametrize("scales", [1, 2])
def test_a_network_with_its_own_exits_is_prepared_with_them_among_the_candidates(tmp_path: Path, scales: int) -> None:
    model = tmp_path / "m.onnx"
    model = branching(model) if scales == 1 else multi_scale(model, classifiers_last=False)
    x = np.random.default_rng(2).normal(size=(400, 3, 8, 8)).astype(np.float32)
    x += np.random.default_rng(3).normal(0, 1.5, size=(400, 3, 1, 1)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x)
    names = [value.name for value in onnx.load(str(model)).graph.output]
    request = PrepareRequest(
        model=str(model),
        own_exits=tuple(names[:-1]),
        data=str(tmp_path / "d.npz"),
        out=tmp_path / "b",
        profile_seconds=0.1,
        precision="exact",
        compile_limit=0,
    )
    report = prepare_bundle(request, Reporter(quiet=True))
    assert {"r01-own", "r02-own"} <= {line.verdict.spec.id for line in report.lines}
    told = report.to_mapping()
    assert [*told["own_exits"], told["served_output"]] == names
    with io.StringIO() as out:
        print_report(report, Console(file=out, width=400))
        said = out.getvalue()
    assert f"task: top label of 3 classes: output {names[-1]!r} ends in MatMul" in said
    assert told["assumed"][0] in said
    assert f"outputs: {names[-1]} is served; {', '.join(names[:-1])}" in said
    assert "r01-own" in said[said.index("outputs:") :].partition("\n")[0]
