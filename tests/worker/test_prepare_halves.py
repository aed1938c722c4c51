"""fp16 as a precision of the backbone: what the graph is, when it is refused, and a bundle that has it.

GPUs are where it is tried. Its graph runs on CPUs as well, where ONNX Runtime computes in float32 between casts, so
what is made, cut, recorded and served is tested here, and what a GPU says of it in ``tests/gpu``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bundles
import inputs
import numpy as np
import onnx
import prepared
import pytest
from onnx import TensorProto, helper
from prepared import run
from rich.console import Console
from tests.worker.texts import PAD, text_model, texts

from offramp_core.columns import chain
from offramp_core.errors import InvalidBundleError
from offramp_core.records import records_from_arrays
from offramp_worker.bundle.graph import with_outputs
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.bundle.stages import stage_graphs
from offramp_worker.bundle.tensors import computes_in_halves
from offramp_worker.devices import DEVICES, open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.heads.features import blank_heads, candidate_ramps
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.cuts import Place, cut_vertices, graph_steps
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.precision import halving, judging, precisions
from offramp_worker.prepare.precision.halving import choose_half, half_model
from offramp_worker.prepare.precision.judging import Lowered
from offramp_worker.prepare.precision.quantizing import choose_quantized
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport, print_report
from offramp_worker.prepare.source.sources import Backbone, load_backbone

pytestmark = pytest.mark.slow  # exports and trains

ANY_SPEED = 1e9  # on a CPU it is slower than fp32, which is not what these tests are about


@pytest.fixture(scope="module")
def places(backbone: Backbone, rows: np.ndarray) -> tuple[Place, ...]:
    return find_places(backbone, rows).places


@pytest.fixture(scope="module")
def half(backbone: Backbone, places: Sequence[Place]) -> onnx.ModelProto:
    return half_model(backbone.model, cuts={place.tensor for place in places})


def test_weights_are_stored_in_half_of_the_bytes_and_the_answers_are_nearly_those_of_fp32(
    backbone: Backbone, half: onnx.ModelProto, rows: np.ndarray
) -> None:
    onnx.checker.check_model(half)
    assert {t.data_type for t in half.graph.initializer} <= {TensorProto.FLOAT16, TensorProto.INT64}
    assert len(half.SerializeToString()) < 0.6 * len(backbone.model.SerializeToString())
    expected = run(backbone.model, rows)
    np.testing.assert_allclose(run(half, rows), expected, atol=2e-2 * np.abs(expected).max())


def test_clients_see_no_other_types(backbone: Backbone, half: onnx.ModelProto) -> None:
    for values, theirs in (
        (half.graph.input, backbone.model.graph.input),
        (half.graph.output, backbone.model.graph.output),
    ):
        assert [(v.name, v.type.tensor_type.elem_type) for v in values] == [
            (v.name, v.type.tensor_type.elem_type) for v in theirs
        ]


def test_tensors_that_feed_ramps_are_float32_and_cut_vertices(
    backbone: Backbone, half: onnx.ModelProto, places: Sequence[Place], rows: np.ndarray
) -> None:
    tensors = [place.tensor for place in places]
    found = cut_vertices(graph_steps(half.graph), source=backbone.input.name, sink=backbone.output.name)
    assert tensors and set(tensors) <= set(found)
    ours, theirs = (
        open_session(with_outputs(model, tensors), threads=1).run(tensors, {backbone.input.name: rows[:20]})
        for model in (half, backbone.model)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=2e-2 * np.abs(other).max())


@pytest.mark.parametrize("optimise", [True, False])  # as on CPUs, and as on GPUs
def test_stages_say_together_what_the_whole_graph_says(
    backbone: Backbone, half: onnx.ModelProto, places: Sequence[Place], rows: np.ndarray, optimise: bool
) -> None:
    ramps = candidate_ramps(places, kinds=["pooled-linear"])
    heads = blank_heads(ramps, places, task=backbone.task)
    shapes = {place.tensor: place.shape for place in places}
    stages = stage_graphs(half, [[head] for head in heads], shapes=shapes, optimise=optimise)
    assert len(stages) == len(places) + 1
    features = x = rows[:20]
    for stage in stages:
        feed = {stage.source: features} | ({stage.entry: x} if stage.entry else {})
        features = open_session(stage.model, threads=1, optimised=stage.optimised).run([stage.target], feed)[0]
    whole = run(half, x)
    np.testing.assert_allclose(features, whole, atol=2e-3 * np.abs(whole).max())


def test_the_bytes_depend_on_the_model_alone(
    backbone: Backbone, half: onnx.ModelProto, places: Sequence[Place]
) -> None:
    again = half_model(backbone.model, cuts=[place.tensor for place in reversed(places)])
    assert again.SerializeToString(deterministic=True) == half.SerializeToString(deterministic=True)


def test_an_encoder_of_texts_can_be_cut_where_its_ramps_read(tmp_path: Path) -> None:
    x = texts(60, seed=1)
    encoder = load_backbone(str(text_model(tmp_path / "encoder.onnx")), x, pad=PAD)
    found = find_places(encoder, x)
    cuts = {place.tensor for place in found.places}
    half = half_model(found.backbone.model, cuts=cuts)
    assert cuts <= set(cut_vertices(graph_steps(half.graph), source=encoder.input.name, sink=encoder.output.name))
    expected = run(found.backbone.model, x)
    np.testing.assert_allclose(run(half, x), expected, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("datatype", ["FP16", "UINT8"])
def test_inputs_of_other_types_stay_what_they_are(tmp_path: Path, datatype: str) -> None:
    x = inputs.rows(datatype, 40, seed=1)
    model = load_backbone(inputs.save_model(tmp_path, datatype, "pt2"), x).model
    half = half_model(model, cuts=[])
    assert half.graph.input[0].type == model.graph.input[0].type
    expected = run(model, x)
    np.testing.assert_allclose(run(half, x), expected, atol=2e-2 * np.abs(expected).max())


# Which stay


def chosen(backbone: Backbone, rows: np.ndarray) -> Lowered:
    return choose_half(backbone, rows, seed=0, threads=1, seconds=0.1)


def test_a_form_that_is_no_faster_is_refused_with_its_time(backbone: Backbone, rows: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "WORTHWHILE", 0.0)
        found = chosen(backbone, rows)
    assert found.model is None
    assert found.refused.startswith("float16: it takes ") and "of the fp32 time at best" in found.refused


def test_a_form_that_answers_otherwise_is_refused_with_its_share(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "WORTHWHILE", ANY_SPEED)
    monkeypatch.setattr(halving, "half_model", lambda model, cuts: instead(model, "Neg"))
    found = chosen(backbone, rows)
    assert found.model is None and "100.0% of the rows differently; at most 5% may be" in found.refused


def test_a_form_that_overflows_is_refused_with_its_share(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "WORTHWHILE", ANY_SPEED)
    monkeypatch.setattr(halving, "half_model", lambda model, cuts: instead(model, "Sqrt"))
    found = chosen(backbone, rows)  # every row has a logit below 0
    assert found.model is None and "of 100.0% of the rows is no finite number" in found.refused


def test_a_form_that_does_not_run_on_the_device_is_refused_with_what_the_device_says(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, "half_model", lambda model, cuts: instead(model, "NoSuchOperator"))
    found = chosen(backbone, rows)
    assert found.model is None and not found.tried
    assert found.refused.startswith("it does not run on cpu: ") and "NoSuchOperator" in found.refused


def instead(model: onnx.ModelProto, operator: str) -> onnx.ModelProto:
    """A model whose output goes through one more operator."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    (value,) = other.graph.output
    for node in other.graph.node:
        node.output[:] = ["before" if name == value.name else name for name in node.output]
    other.graph.node.append(helper.make_node(operator, ["before"], [value.name]))
    return other


def test_a_bundle_whose_ramps_would_read_float16_is_refused_by_the_file(tmp_path: Path) -> None:
    whole = onnx.load(bundles.write_wide_bundle(tmp_path / "fp32") / "backbone.onnx")
    cuts = [f"c{i}" for i in range(3)]
    folder = bundles.write_wide_bundle(tmp_path / "fp16", int8_model=half_model(whole, cuts=cuts))
    assert load_bundle(folder).shapes.keys() >= set(cuts)
    (folder / "backbone.int8.onnx").write_bytes(half_model(whole, cuts=cuts[:1]).SerializeToString())
    bundles.write_manifest(folder, bundles.WIDE_RAMPS, bundles.WIDE_PRECISIONS)
    with pytest.raises(InvalidBundleError, match=r"^backbone\.int8\.onnx: .*float16"):
        load_bundle(folder)


def test_gpus_try_fp16_and_cpus_int8() -> None:
    assert {name: list(made) for name, made in precisions.LOWER.items()} == {
        "cpu": ["int8"],
        "cuda": ["fp16"],
        "cuda-tf32": ["fp16"],
        "webgpu": ["fp16"],
    }
    assert set(precisions.LOWER) == set(DEVICES)


# The whole of prepare


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("halves")
    np.savez(folder / "data.npz", x=prepared.images(500, seed=2)[0])
    return PrepareRequest(
        model=prepared.save_model(folder),
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        head_share=0.4,
        profile_seconds=0.3,
        compile_limit=0,
    )


@pytest.fixture(scope="module")
def report(request_: PrepareRequest) -> PrepareReport:
    """Of a bundle with two lower precisions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "WORTHWHILE", ANY_SPEED)
        patch.setitem(precisions.LOWER, "cpu", {"int8": choose_quantized, "fp16": choose_half})
        return prepare_bundle(request_, Reporter(quiet=True))


@pytest.fixture(scope="module")
def bundle(report: PrepareReport) -> Bundle:
    return load_bundle(report.out)


def test_the_bundle_has_both_with_ramps_of_their_own(bundle: Bundle, report: PrepareReport) -> None:
    manifest = bundle.manifest
    assert [(p.name, p.file) for p in manifest.precisions] == [
        ("int8", "backbone.int8.onnx"),
        ("fp16", "backbone.fp16.onnx"),
    ]
    assert manifest.precisions[1].method == "float16"
    assert computes_in_halves(bundle.backbones["fp16"]) and not computes_in_halves(bundle.backbone)
    files = report.out / "backbone.onnx", report.out / "backbone.fp16.onnx"
    assert files[1].stat().st_size < 0.6 * files[0].stat().st_size
    own = [ramp for ramp in manifest.ramps if ramp.precision == "fp16"]
    assert own and {ramp.id for ramp in own} <= {f"fp16/{ramp.id}" for ramp in manifest.ramps}
    assert [column.id for column in bundle.columns][-1] == "fp16/final"


def test_a_worker_serves_its_stages_and_its_audits_say_what_the_records_say(
    bundle: Bundle, report: PrepareReport, request_: PrepareRequest
) -> None:
    with np.load(report.out / "records.npz") as arrays:
        stored = dict(arrays)
    sessions = Sessions(bundle, threads=1)
    x = np.load(request_.data)["x"][-report.data["records"] :][:64]
    scores = sessions.tapped(x)
    assert tuple(stored["ramp_id"]) == tuple(column.id for column in bundle.columns)
    np.testing.assert_array_equal(scores.prediction, stored["prediction"][:64])
    np.testing.assert_allclose(scores.uncertainty, stored["uncertainty"][:64], atol=1e-3)
    for precision in ("int8", "fp16"):
        active = chain([column.precision for column in bundle.columns], precision)
        features = x
        for stage in sessions.stages(active, precision):
            features, _ = stage.run(features, x)
        np.testing.assert_array_equal(features.argmax(axis=1), scores.finals[precision])
    agree = (scores.finals["fp16"] == scores.finals["fp32"]).mean()
    assert agree > 0.95


def test_records_and_profile_price_every_chain(bundle: Bundle, report: PrepareReport) -> None:
    with np.load(report.out / "records.npz") as arrays:
        stored = dict(arrays)
    of_columns = [column.precision for column in bundle.columns]
    for batch in bundle.profile.batches:
        assert set(batch.precisions) == {"int8", "fp16"}
        records = records_from_arrays(stored, batch_size=batch.batch_size)
        assert set(records.others) == {"int8", "fp16"}
        for precision, priced in batch.precisions.items():
            own = records.at(precision)
            assert own.n_ramps == len(chain(of_columns, precision)) == len(priced.ramp_seconds)
            assert own.costs.baseline_seconds == pytest.approx(batch.exact_seconds)


def test_the_report_tells_what_was_tried_at_each_and_how_fast_it_is(report: PrepareReport) -> None:
    mapping = json.loads(json.dumps(report.to_mapping()))
    int8, fp16 = mapping["approximations"]
    assert (int8["name"], fp16["name"], fp16["method"]) == ("int8", "fp16", "float16")
    assert 0 <= fp16["disagreement"] < 0.05
    assert [tried["refused"] for tried in fp16["tried"]] == [""]
    assert {"onnxruntime-int8", "onnxruntime-fp16"} <= set(mapping["executors"]["seconds"])


def test_at_exact_precision_there_is_none(request_: PrepareRequest, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "WORTHWHILE", ANY_SPEED)
        patch.setitem(precisions.LOWER, "cpu", {"fp16": choose_half})
        exact = prepare_bundle(replace(request_, out=tmp_path / "b", precision="exact"), Reporter(quiet=True))
    assert not exact.approximations and not list(exact.out.glob("*fp16*"))


def test_why_it_is_not_there_stands_in_the_report_for_people(
    request_: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, "half_model", lambda model, cuts: instead(model, "NoSuchOperator"))
    monkeypatch.setitem(precisions.LOWER, "cpu", {"fp16": choose_half})
    refused = prepare_bundle(replace(request_, out=tmp_path / "b"), Reporter(quiet=True))
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(refused, console)
    assert "fp16 refused: it does not run on cpu: " in console.export_text()
    assert not load_bundle(refused.out).manifest.precisions
