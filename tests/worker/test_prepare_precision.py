"""``offramp prepare`` with int8 and side models: what is kept, what is written, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import prepared
import pytest
import torch
from onnx import numpy_helper
from prepared import run
from safetensors.numpy import load_file
from torch import nn

from offramp_core.bundle import BACKBONE_FILE, Manifest, ramp_set_digest
from offramp_core.columns import chain
from offramp_core.errors import InvalidArgumentError
from offramp_core.records import records_from_arrays
from offramp_core.uncertainty import uncertainty
from offramp_worker.bundle.load import load_bundle
from offramp_worker.bundle.stages import pieces
from offramp_worker.devices import open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.heads.side import Side, load_side
from offramp_worker.prepare.measuring import executors
from offramp_worker.prepare.measuring.executors import compare_executors
from offramp_worker.prepare.measuring.pricing import Priced
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.places.cuts import cut_vertices, graph_steps
from offramp_worker.prepare.places.places import find_places
from offramp_worker.prepare.precision import judging, quantizing
from offramp_worker.prepare.precision.calibration import Histogram, collect_histograms, value_range
from offramp_worker.prepare.precision.quantizing import choose_quantized, quantized_models
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport
from offramp_worker.prepare.source.sources import Backbone, load_backbone

pytestmark = pytest.mark.slow  # quantises and trains

ANY_SPEED = 1e9  # whether int8 is faster than fp32 here is not what these tests are about


@pytest.fixture(scope="module")
def cuts(backbone: Backbone, rows: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {place.tensor: place.shape for place in find_places(backbone, rows).places}


@pytest.fixture(scope="module")
def static(backbone: Backbone, rows: np.ndarray, cuts: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    return dict(quantized_models(backbone, rows[:64], cuts=cuts, threads=1))["static-minmax"]


def test_every_static_method_answers_nearly_as_fp32_does(backbone: Backbone, rows: np.ndarray) -> None:
    models = dict(quantized_models(backbone, rows[:64], cuts=(), threads=1))
    assert list(models) == ["static-minmax", "static-percentile", "static-entropy"]
    expected = run(backbone.model, rows).argmax(axis=1)
    for model in models.values():
        operators = [node.op_type for node in model.graph.node]
        assert "QuantizeLinear" in operators
        assert (run(model, rows).argmax(axis=1) != expected).mean() < 0.05


def test_tensors_that_feed_ramps_are_cut_vertices_of_the_int8_graph(
    backbone: Backbone, static: onnx.ModelProto, cuts: dict[str, tuple[int, ...]], rows: np.ndarray
) -> None:
    onnx.checker.check_model(static)
    found = cut_vertices(graph_steps(static.graph), source=backbone.input.name, sink=backbone.output.name)
    assert cuts and set(cuts) <= set(found)
    priced = Priced(static, (), list(cuts), shapes=cuts, open_session=opened)
    assert len(priced.at(rows[:8]).segments) == len(cuts) + 1


def test_between_stages_of_the_int8_graph_go_levels_not_floats(
    backbone: Backbone, static: onnx.ModelProto, cuts: dict[str, tuple[int, ...]], rows: np.ndarray
) -> None:
    value, graphs = rows[:8], pieces(static, (), list(cuts), shapes=cuts).segments
    for graph in graphs:
        if graph is not graphs[0]:
            assert value.dtype == np.uint8
        (value,) = opened(graph.model, graph.optimised).run([graph.target], {graph.source: value})
    np.testing.assert_allclose(value, run(static, rows[:8]), atol=1e-4)


def opened(model: onnx.ModelProto, optimised: bool) -> ort.InferenceSession:
    return open_session(model, threads=1, optimised=optimised)


def test_weights_have_seven_bits_so_that_no_processor_overflows(static: onnx.ModelProto) -> None:
    weights = [numpy_helper.to_array(t) for t in static.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    weights = [w for w in weights if w.ndim == 4]
    assert weights
    assert max(int(np.abs(w.astype(int)).max()) for w in weights) == 64


def test_logits_are_not_rounded(backbone: Backbone, static: onnx.ModelProto, rows: np.ndarray) -> None:
    (last,) = [node for node in static.graph.node if backbone.output.name in node.output]
    assert last.op_type == "Gemm"
    assert len(np.unique(run(static, rows))) > 0.9 * len(rows) * backbone.n_classes


def test_a_model_that_int8_makes_no_faster_stays_at_fp32_and_says_so(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "WORTHWHILE", 0.0)
    chosen = choose_quantized(backbone, rows, seed=0, threads=1, seconds=0.1)
    assert chosen.model is None
    assert "of the fp32 time at best" in chosen.refused


def test_an_int8_model_that_answers_differently_is_refused(
    backbone: Backbone, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "WORTHWHILE", ANY_SPEED)
    monkeypatch.setattr(judging, "MAX_DISAGREEMENT", -1.0)
    assert "of the rows differently" in choose_quantized(backbone, rows, seed=0, threads=1, seconds=0.1).refused


def test_the_bytes_depend_on_the_seed_alone(backbone: Backbone, rows: np.ndarray, tmp_path: Path) -> None:
    """In processes of their own, because the order of Python's sets differs between them."""
    onnx.save(backbone.model, tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", rows[:120])
    script = (
        "import sys, hashlib, numpy as np; from offramp_worker.prepare.precision import judging, quantizing as q\n"
        "from offramp_worker.prepare.source.sources import load_backbone\n"
        f"judging.WORTHWHILE = {ANY_SPEED}; x = np.load(sys.argv[2]); b = load_backbone(sys.argv[1], x)\n"
        "c = q.choose_quantized(b, x, cuts=['relu'], seed=3, threads=1, seconds=0.1)\n"
        "print(c.method, hashlib.sha256(c.model.SerializeToString(deterministic=True)).hexdigest())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.onnx"), str(tmp_path / "x.npy")]
    said = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        said.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(said) == 1
    assert said.pop().startswith("static-")


def test_histograms_hold_every_value_of_every_row(backbone: Backbone, rows: np.ndarray) -> None:
    found = collect_histograms(backbone.model, [backbone.input.name, "relu"], rows[:50], backbone.input, threads=1)
    assert found[backbone.input.name].counts.sum() == rows[:50].size
    assert (found[backbone.input.name].low, found[backbone.input.name].high) == (rows[:50].min(), rows[:50].max())
    assert found["relu"].low == 0.0


def test_a_percentile_range_leaves_out_a_ten_thousandth_at_either_end() -> None:
    values = np.random.default_rng(0).normal(size=1_000_000)
    low, high = value_range(histogram_of(values), "percentile")
    assert low == pytest.approx(np.quantile(values, 1e-4), abs=0.01)
    assert high == pytest.approx(np.quantile(values, 1 - 1e-4), abs=0.01)


def test_an_entropy_range_clips_outliers_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    uniform = rng.uniform(0, 1, 100_000)
    assert value_range(histogram_of(uniform), "entropy")[1] == pytest.approx(1.0, abs=0.02)
    outliers = np.concatenate([rng.exponential(0.1, 100_000), [20.0]])
    low, high = value_range(histogram_of(outliers), "entropy")
    assert low >= 0
    assert 0.5 < high < 10


def test_a_constant_activation_has_a_range() -> None:
    for method in ("minmax", "percentile", "entropy"):
        assert value_range(Histogram(np.array([5, 0]), 1.5, 1.5), method) == (1.5, 1.5)  # type: ignore[arg-type]


def histogram_of(values: np.ndarray) -> Histogram:
    counts, edges = np.histogram(values, 16_384)
    return Histogram(counts, float(edges[0]), float(edges[-1]))


# The whole of prepare


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("precision")
    np.savez(folder / "data.npz", x=prepared.images(500, seed=2)[0])
    uri = prepared.save_model(folder)
    return PrepareRequest(
        model=uri,
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        name="tiny",
        head_share=0.4,
        profile_seconds=0.3,
        sides=(uri,),  # the model in front of itself answers everything right
        compile_limit=0,
    )


@pytest.fixture(scope="module")
def report(request_: PrepareRequest) -> PrepareReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "WORTHWHILE", ANY_SPEED)
        patch.setattr("offramp_worker.prepare.precision.precisions.cannot_pay", lambda _worth: "")
        return prepare_bundle(request_, Reporter(quiet=True))


@pytest.fixture(scope="module")
def manifest(report: PrepareReport) -> Manifest:
    return msgspec.json.decode((report.out / "manifest.json").read_bytes(), type=Manifest)


@pytest.fixture(scope="module")
def stored(report: PrepareReport) -> dict[str, np.ndarray]:
    with np.load(report.out / "records.npz") as arrays:
        return dict(arrays)


def test_the_manifest_says_what_the_bundle_holds(manifest: Manifest, report: PrepareReport) -> None:
    assert [(p.name, p.file) for p in manifest.precisions] == [("int8", "backbone.int8.onnx")]
    assert manifest.precisions[0].method.startswith("static-")
    assert {"backbone.int8.onnx", "ramp-side-resnet.onnx"} <= set(manifest.files)
    assert manifest.ramp_set_digest == ramp_set_digest(manifest.ramps, manifest.files, manifest.precisions)
    (side,) = [r for r in manifest.ramps if r.head == "model"]
    assert (side.tensor, side.position, side.precision) == (manifest.inputs[0].name, 0, "")
    int8 = [r for r in manifest.ramps if r.precision == "int8"]
    assert int8 and {r.id for r in int8} <= {f"int8/{r.id}" for r in manifest.ramps if not r.precision}
    assert report.ramp_set_digest == manifest.ramp_set_digest


def test_records_have_the_columns_of_the_contract_scored_as_a_worker_scores_them(
    manifest: Manifest, stored: dict[str, np.ndarray], report: PrepareReport, request_: PrepareRequest
) -> None:
    assert tuple(stored["ramp_id"]) == tuple(c.id for c in manifest.columns)
    assert tuple(stored["ramp_precision"]) == tuple(c.precision for c in manifest.columns)
    x = np.load(request_.data)["x"][-report.data["records"] :]
    tensors = load_file(report.out / "ramps.safetensors")
    assert {f"{c.id}/quantiles" for c in manifest.columns} <= set(tensors)
    assert not [name for name in tensors if name.startswith("int8/") and not name.endswith("quantiles")]
    graphs = {"int8/final": "backbone.int8.onnx", "side-resnet": "ramp-side-resnet.onnx"}
    for column, file in graphs.items():
        at = list(stored["ramp_id"]).index(column)
        model = onnx.load(report.out / file)
        assert [value.name for value in model.graph.input] == [manifest.inputs[0].name]
        logits = run(model, x)
        np.testing.assert_array_equal(stored["prediction"][:, at], logits.argmax(axis=1))
        scores = uncertainty(logits, tensors[f"{column}/quantiles"])
        np.testing.assert_allclose(stored["uncertainty"][:, at], scores, atol=1e-4)
    reference = run(onnx.load(report.out / BACKBONE_FILE), x).argmax(axis=1)
    np.testing.assert_array_equal(stored["final"], reference)
    np.testing.assert_array_equal(stored["reference"], reference)


def test_a_worker_loads_the_bundle_and_its_audits_say_what_the_records_say(
    stored: dict[str, np.ndarray], report: PrepareReport, request_: PrepareRequest
) -> None:
    bundle = load_bundle(report.out)
    sessions = Sessions(bundle, threads=1)
    x = np.load(request_.data)["x"][-report.data["records"] :][:64]
    scores = sessions.tapped(x)
    assert tuple(stored["ramp_id"]) == tuple(column.id for column in bundle.columns)
    np.testing.assert_array_equal(scores.prediction, stored["prediction"][:64])
    np.testing.assert_allclose(scores.uncertainty, stored["uncertainty"][:64], atol=1e-3)
    chain_of_int8 = chain([column.precision for column in bundle.columns], "int8")
    assert len(sessions.stages(chain_of_int8, "int8")) > 1  # they reproduce the probe, or this is refused


def test_records_and_profile_price_both_chains(
    manifest: Manifest, stored: dict[str, np.ndarray], report: PrepareReport
) -> None:
    profile = json.loads((report.out / "profile.json").read_text())
    of_columns = [c.precision for c in manifest.columns]
    for index, batch in enumerate(profile["batches"]):
        records = records_from_arrays(stored, batch_size=batch["batch_size"])
        int8 = records.at("int8")
        assert records.at("fp32").n_ramps == len(chain(of_columns, "fp32"))
        assert int8.n_ramps == len(chain(of_columns, "int8"))
        assert int8.costs.baseline_seconds == pytest.approx(batch["exact_seconds"])
        chain8 = batch["precisions"]["int8"]
        np.testing.assert_allclose(stored["int8_segment_seconds"][index], chain8["segment_seconds"])
        assert chain8["segment_seconds"][0] == 0.0  # the side model sits at the input
        assert chain8["ramp_seconds"][0] == batch["ramp_seconds"][0] > 0
    assert (records.at("int8").final_agrees.mean()) > 0.95


def test_the_report_tells_what_was_tried_and_how_fast_executors_are(report: PrepareReport) -> None:
    mapping = json.loads(json.dumps(report.to_mapping()))
    int8, side = mapping["approximations"]
    assert (int8["name"], side["name"]) == ("int8", "side-resnet")
    whole = {c["method"] for c in int8["tried"] if quantizing.IN_FLOAT not in c["method"]}
    assert whole == {"static-minmax", "static-percentile", "static-entropy"}
    assert len(int8["tried"]) > len(whole)  # and with parts in float
    assert 0 <= int8["disagreement"] < 0.05
    seconds = mapping["executors"]["seconds"]
    assert set(seconds) == {"onnxruntime-fp32", "onnxruntime-int8", "torch-eager"}
    assert all(set(times) == {"1", "4", "16", "32"} for times in seconds.values())
    assert mapping["executors"]["missing"] == {"torch-compile": "not asked for"}
    assert json.loads((report.out / "profile.json").read_text())["executors"] == seconds


@pytest.mark.slow
def test_at_exact_precision_there_is_no_int8_and_a_slow_side_model_is_refused_with_the_reason(
    request_: PrepareRequest, tmp_path: Path
) -> None:
    uri = untrained(tmp_path, blocks="3", width="16")
    report = prepare_bundle(
        replace(request_, out=tmp_path / "b", precision="exact", sides=(uri,)), Reporter(quiet=True)
    )
    assert not list(report.out.glob("*int8*"))
    with np.load(report.out / "records.npz") as arrays:
        assert set(arrays["ramp_precision"]) <= {"", "fp32"}
        assert not [name for name in arrays.files if name.startswith("int8")]
    (line,) = [line for line in report.lines if line.verdict.spec.head == "model"]
    assert "of the inputs could leave with it, and it takes" in line.verdict.refused
    assert not list(report.out.glob("ramp-*.onnx"))


def test_a_side_model_for_other_classes_is_refused(backbone: Backbone, rows: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="7 classes apart, the model 4"):
        side_of(untrained(tmp_path, classes="7"), backbone, rows)


def test_two_side_models_of_one_name_get_different_ids(backbone: Backbone, rows: np.ndarray, tmp_path: Path) -> None:
    uri = untrained(tmp_path)
    assert side_of(uri, backbone, rows).spec.id == "side-resnet"
    assert side_of(uri, backbone, rows, taken={"side-resnet"}).spec.id == "side-resnet-2"


def test_a_side_model_answers_as_it_did_alone_under_the_backbones_name_for_the_input(
    backbone: Backbone, rows: np.ndarray, tmp_path: Path
) -> None:
    uri = untrained(tmp_path)
    side = side_of(uri, replace(backbone, input=replace(backbone.input, name="pixels")), rows)
    assert [value.name for value in side.model.graph.input] == ["pixels"]
    np.testing.assert_allclose(run(side.model, rows[:20]), run(load_backbone(uri, rows).model, rows[:20]), atol=1e-5)


def untrained(folder: Path, **changes: str) -> str:
    """URI of a ResNet that has learned nothing."""
    from safetensors.torch import save_file

    from offramp_worker.prepare.families import build_family

    parameters = {**prepared.PARAMETERS, **changes}
    save_file(build_family("resnet", parameters).state_dict(), folder / "untrained.safetensors")
    query = "&".join(f"{key}={value}" for key, value in parameters.items())
    return f"family:resnet?weights={folder / 'untrained.safetensors'}&{query}"


def side_of(uri: str, backbone: Backbone, rows: np.ndarray, taken: Collection[str] = ()) -> Side:
    return load_side(
        uri, backbone, rows, taken=taken, quantize=False, seed=0, threads=1, seconds=0.1, reporter=Reporter(quiet=True)
    )


def test_an_unknown_precision_is_refused(request_: PrepareRequest) -> None:
    with pytest.raises(InvalidArgumentError, match="precision 'fp16' is unknown"):
        prepare_bundle(replace(request_, precision="fp16"), Reporter(quiet=True))  # type: ignore[arg-type]


# Executors


def test_a_compiler_that_is_not_done_in_time_is_stopped_and_said_so(backbone: Backbone, rows: np.ndarray) -> None:
    compared = compared_in_torch(backbone, rows, compile_limit=0.01)
    assert "torch-compile" not in compared.seconds
    assert compared.missing["torch-compile"].startswith("not done within")


def test_a_model_that_came_as_onnx_is_not_timed_in_torch(backbone: Backbone, rows: np.ndarray) -> None:
    compared = compare_executors(
        {"onnxruntime-fp32": backbone.model}, None, rows, backbone.input, threads=1, seconds=0.1, compile_limit=10
    )
    assert set(compared.missing) == {"torch-eager", "torch-compile"}


def test_the_report_says_when_torch_is_faster() -> None:
    seconds = {"onnxruntime-fp32": {"1": 1.0, "32": 1.0}, "torch-eager": {"1": 2.0, "32": 0.8}}
    assert "torch-eager takes 0.80 of ONNX Runtime's time at batch size 32" in executors.Executors(seconds, {}).faster
    assert executors.Executors(seconds | {"torch-eager": {"1": 0.95}}, {}).faster == ""


@pytest.mark.slow
def test_torch_compile_is_timed_in_a_process_of_its_own(backbone: Backbone, rows: np.ndarray) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(prepared.SIZE**2, 4)).eval()  # kernels of convolutions take a minute
    batch = {0: torch.export.Dim("batch")}
    small = replace(
        backbone, program=torch.export.export(module, (torch.from_numpy(rows[:2]),), dynamic_shapes=(batch,))
    )
    compared = compared_in_torch(small, rows, compile_limit=240)
    assert set(compared.seconds.get("torch-compile", {})) == {"1", "4", "16", "32"} or compared.missing["torch-compile"]


def compared_in_torch(backbone: Backbone, rows: np.ndarray, *, compile_limit: float) -> executors.Executors:
    models = {"onnxruntime-fp32": backbone.model}
    return compare_executors(
        models, backbone.program, rows, backbone.input, threads=1, seconds=0.1, compile_limit=compile_limit
    )
