"""Bundles on a GPU: stages in its memory, a worker that serves from it, and a profile that is measured there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles  # type: ignore[import-not-found]
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from processes import WorkerProcess, document, eventually, plan_for  # type: ignore[import-not-found]

from offramp_core.columns import chain
from offramp_core.errors import InvalidBundleError
from offramp_core.precision import EXACT
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import CPU, CUDA, Device, open_session
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.precision import judging
from offramp_worker.prepare.precision.halving import half_model
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.report import PrepareReport

pytestmark = pytest.mark.gpu

CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}
THRESHOLD, NARROW = 0.5, 0.01  # rows whose uncertainty lies closer to the threshold may go either way by rounding


def test_whole_models_say_on_a_gpu_what_they_say_on_a_cpu(cpu: Sessions, gpu: Sessions) -> None:
    x = bundles.inputs(11, seed=3)
    np.testing.assert_allclose(gpu.exact(x), cpu.exact(x), **CLOSE)
    one, other = gpu.tapped(x), cpu.tapped(x)
    np.testing.assert_allclose(one.logits, other.logits, **CLOSE)
    np.testing.assert_allclose(one.uncertainty, other.uncertainty, atol=NARROW)


@pytest.mark.parametrize("kept", [(None, None), ((0, 2, 5), None), ((1, 2, 3, 6), (0, 3)), (None, (4,))])
def test_every_stage_says_on_a_gpu_what_it_says_on_a_cpu_whichever_rows_go_on(
    cpu: Sessions, gpu: Sessions, kept: Sequence[Sequence[int] | None]
) -> None:
    x = bundles.inputs(7, seed=5)
    active = (0, 2, 3)
    for one, other in zip(_through(gpu.stages(active), x, kept), _through(cpu.stages(active), x, kept), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_a_small_model_at_the_input_runs_on_the_gpu_too_and_ramp_sets_share_what_they_have_in_common(
    device: Device, tmp_path: Path
) -> None:
    bundle = load_bundle(bundles.write_wide_bundle(tmp_path / "wide"))
    cpu = Sessions(bundle, threads=1)
    profile = replace(bundle.profile, executor=device.executor)
    gpu = Sessions(replace(bundle, profile=profile), threads=1)
    again = Sessions(replace(bundle, profile=profile), threads=1, like=gpu)
    x, active = bundles.inputs(6, seed=13), range(3)
    expected = _through(cpu.stages(active), x, [(0, 1, 4), None, (1,)])
    for sessions in (gpu, again):
        for one, other in zip(_through(sessions.stages(active), x, [(0, 1, 4), None, (1,)]), expected, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)


def test_a_form_in_half_precision_says_stage_by_stage_what_it_says_in_one_piece(
    device: Device, cpu_dir: Path, tmp_path: Path
) -> None:
    whole = onnx.load(str(cpu_dir / "backbone.onnx"))
    half = half_model(whole, cuts=[f"c{i}" for i in range(3)])
    bundle = load_bundle(bundles.write_wide_bundle(tmp_path / "wide", int8_model=half))
    bundle = replace(bundle, profile=replace(bundle.profile, executor=device.executor))
    if not _computes_in_halves(device):
        assert device is not CUDA
        with pytest.raises(InvalidBundleError, match=r"^backbone\.int8\.onnx: "):
            Sessions(bundle, threads=1)
        return
    sessions, x = Sessions(bundle, threads=1), bundles.inputs(7, seed=5)
    said = sessions.tapped(x)
    active = chain([column.precision for column in bundle.columns], "int8")
    stages = sessions.stages(active, "int8")
    logits = _through(stages, x, [(0, 2, 5)])[-1]
    np.testing.assert_allclose(logits, said.logits[[0, 2, 5]], atol=2e-2 * np.abs(said.logits).max())
    assert (said.finals["int8"] == said.finals["fp32"]).mean() > 0.8


def test_features_stay_in_the_gpus_memory_from_stage_to_stage(gpu: Sessions) -> None:
    x = bundles.inputs(4, seed=5)
    first, second, last = gpu.stages((2, 3))
    features, _ = first.run(x, x)
    dropped, _ = second.run(features, x, np.array([1, 3]))
    logits, _ = last.run(dropped, x[[1, 3]])
    assert (features.rows, dropped.rows, len(np.asarray(logits))) == (4, 2, 2)
    assert {held.value.device_name().lower() for held in (features, dropped)}.isdisjoint({"cpu"})


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_a_worker_on_a_gpu_lets_the_same_rows_leave_with_the_same_answers(
    gpu_dir: Path, cpu: Sessions, cpu_bundle: Bundle, execution: str
) -> None:
    x = bundles.inputs(96, seed=7)
    ramp = next(j for j, column in enumerate(cpu_bundle.columns) if column.id == "r00-grid")
    said = cpu.tapped(x)
    leaves = said.uncertainty[:, ramp] < THRESHOLD
    clear = np.abs(said.uncertainty[:, ramp] - THRESHOLD) > NARROW
    answers = np.where(leaves, said.prediction[:, ramp], said.finals["fp32"])
    assert 10 < leaves.sum() < 86 and clear.sum() > 80

    with WorkerProcess(gpu_dir) as worker:
        plan = plan_for(gpu_dir, {"r00-grid": str(THRESHOLD)}, execution=execution)
        other = plan_for(gpu_dir, {"r02-linear": str(THRESHOLD)}, execution=execution)
        with ThreadPoolExecutor(8) as pool:  # so that batches of many sizes form
            exact = pool.map(lambda row: worker.infer(x[row : row + 1]), range(len(x)))
            for epoch, next_plan in ((1, other), (2, plan)):  # sessions are built and checked while others run
                assert (
                    worker.deliver(document(next_plan, epoch=epoch, audit_rate=1.0, accuracy_budget=0.99)).status_code
                    == 200
                )
            assert len(list(exact)) == len(x)
            replies = list(pool.map(lambda row: worker.infer(x[row : row + 1]), range(len(x))))
        counts = eventually(
            lambda: next((c for c in worker.observations().counts if c.epoch == 2 and c.audited >= len(x)), None),
            what="audits of all rows",
        )
    served = np.array([int(reply["label"][0]) for reply in replies])
    np.testing.assert_array_equal(served[clear], answers[clear])
    assert counts.failed_batches == 0
    left = [reply["parameters"]["exit"] == "r00-grid" for reply in replies]
    np.testing.assert_array_equal(np.array(left)[clear], leaves[clear])


def test_weights_of_equal_content_are_in_memory_once(device: Device) -> None:
    """On CUDA the GPU's, else the host's: ONNX Runtime shares them there."""
    device = device if device.is_cuda else CPU
    weights = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 64, 64]) for name in "xy")
    node, tensor = helper.make_node("Mul", ["x", "w"], ["y"]), numpy_helper.from_array(weights, "w")
    graph = helper.make_graph([node], "scaled", [x], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    one, other = (open_session(model, threads=1, device=device) for _ in range(2))
    assert one._weights.values[0][1] is other._weights.values[0][1]
    rows = np.random.default_rng(4).normal(size=(5, 64, 64)).astype(np.float32)
    for session in (one, other):
        np.testing.assert_allclose(session.run(None, {"x": rows})[0], rows * weights, **CLOSE)


@pytest.fixture(scope="module")
def request_(cpu_dir: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("prepared")
    np.savez(folder / "data.npz", x=bundles.inputs(700, seed=9))
    model = onnx.load(str(cpu_dir / "backbone.onnx"))
    # A fast GPU runs so small a model in the time of a head, and no exit would pay; one in software takes its time.
    onnx.save(deeper(model, blocks=24) if device is CUDA else model, str(folder / "model.onnx"))
    return PrepareRequest(
        model=str(folder / "model.onnx"),
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        name="tiny",
        device=device.name,
        head_share=0.5,
        profile_seconds=0.1,
        compile_limit=0,
    )


def deeper(model: onnx.ModelProto, *, blocks: int) -> onnx.ModelProto:
    """The tests' model with residual blocks behind its convolutions, which change its features little."""
    graph = model.graph
    kernel = numpy_helper.to_array(next(tensor for tensor in graph.initializer if tensor.name == "k2"))
    graph.initializer.append(numpy_helper.from_array(kernel * np.float32(0.05), "small"))
    pooling = next(node for node in graph.node if node.op_type == "GlobalAveragePool")
    source, nodes = pooling.input[0], []
    for i in range(blocks):
        nodes += [
            helper.make_node("Conv", [source, "small"], [f"conv{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Add", [source, f"conv{i}"], [f"sum{i}"]),
            helper.make_node("Relu", [f"sum{i}"], [f"block{i}"]),
        ]
        source = f"block{i}"
    pooling.input[0] = source
    before = list(graph.node)
    at = before.index(pooling)
    del graph.node[:]
    graph.node.extend([*before[:at], *nodes, *before[at:]])
    return model


@pytest.fixture(scope="module")
def report(request_: PrepareRequest) -> PrepareReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "WORTHWHILE", 1e9)  # on so small a model fp16 may save nothing
        return prepare_bundle(request_, Reporter())


def test_prepare_measures_where_the_bundle_will_be_served(report: PrepareReport, device: Device) -> None:
    bundle = load_bundle(report.out)
    assert bundle.profile.executor == device.executor and bundle.device == device
    depths = [r.depth for r in bundle.ramps if r.tensor != bundle.manifest.inputs[0].name and r.precision != "fp16"]
    # Segments that nobody waits for seem to take no time, and all depths are 0.
    assert depths == sorted(depths) and depths[0] > 0.01 and depths[-1] < 1.0
    assert device.name in report.executors.missing["torch-eager"]
    x = bundles.inputs(5, seed=11)
    sessions = Sessions(bundle, threads=1)
    stages = sessions.stages(chain([column.precision for column in bundle.columns], EXACT))
    np.testing.assert_allclose(_through(stages, x, [None] * len(stages))[-1], sessions.exact(x), **CLOSE)


def test_fp16_is_a_precision_where_the_gpu_computes_in_it_and_refused_by_name_elsewhere(
    report: PrepareReport, request_: PrepareRequest, device: Device
) -> None:
    bundle = load_bundle(report.out)
    (fp16,) = report.approximations
    assert fp16.name == "fp16"
    if not _computes_in_halves(device):
        assert device is not CUDA
        assert not bundle.manifest.precisions
        assert fp16.refused.startswith(f"it does not run on {device.name}: ")
        return
    assert [spec.name for spec in bundle.manifest.precisions] == ["fp16"], fp16.refused
    assert fp16.disagreement is not None and fp16.disagreement < 0.05
    sessions, x = Sessions(bundle, threads=1), np.load(request_.data)["x"][-64:]
    said = sessions.tapped(x)
    with np.load(report.out / "records.npz") as records:
        np.testing.assert_allclose(said.uncertainty, records["uncertainty"][-64:], atol=5 * NARROW)
        assert (said.prediction == records["prediction"][-64:]).mean() > 0.98
    own = chain([column.precision for column in bundle.columns], "fp16")
    stages = sessions.stages(own, "fp16")
    answers = _through(stages, x, [None] * len(stages))[-1].argmax(axis=1)
    assert (answers == said.finals["fp16"]).mean() > 0.98
    with WorkerProcess(report.out) as worker:
        plan = plan_for(report.out, precision="fp16")
        assert worker.deliver(document(plan, accuracy_budget=0.99)).status_code == 200
        served = [int(worker.infer(row[None])["label"][0]) for row in x]
    assert (np.array(served) == said.finals["fp16"]).mean() > 0.95


def _computes_in_halves(device: Device) -> bool:
    half = onnx.TensorProto.FLOAT16
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 8]) for name in "xy")
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=half),
        helper.make_node("MatMul", ["narrow", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float16), "w")
    graph = helper.make_graph(nodes, "product", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    try:
        with device.turn:
            session = open_session(model, threads=1, device=device)
            return bool(session.run(None, {"x": np.ones((2, 8), np.float32)})[0].all())
    except Exception:  # ONNX Runtime raises bare exceptions of its C++ side
        return False


def _through(stages: Sequence[Runnable], x: Any, kept: Sequence[Sequence[int] | None]) -> list[Any]:
    """Everything that is said on the way; ``kept`` are the rows that go on behind each stage but the last one, None for
    all."""
    said: list[Any] = []
    features, rows = x, None
    for number, stage in enumerate(stages):
        features, heads = stage.run(features, x, rows)
        said += [np.array(part) for head in heads for part in head]
        wanted = kept[number] if number < len(kept) and number < len(stages) - 1 else None
        rows = None if wanted is None else np.array(wanted)
        x = x if rows is None else x[rows]
    return [*said, np.array(features)]
