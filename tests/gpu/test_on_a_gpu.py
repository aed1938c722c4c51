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
from processes import WorkerProcess, document, eventually, plan_for  # type: ignore[import-not-found]

from offramp_core.errors import ModelRefusedError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import Device
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter

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


def test_weights_of_equal_content_are_in_the_gpus_memory_once(gpu: Sessions, gpu_dir: Path, device: Device) -> None:
    if not device.is_cuda:
        pytest.skip("ONNX Runtime shares weights in CUDA's memory alone")
    again = Sessions(load_bundle(gpu_dir), threads=1)
    x = bundles.inputs(3, seed=2)
    np.testing.assert_array_equal(again.exact(x), gpu.exact(x))
    one, other = (dict(s._exact._open.args[1].values) for s in (gpu, again))
    assert one and {name: value.data_ptr() for name, value in one.items()} == {
        n: v.data_ptr() for n, v in other.items()
    }


def test_prepare_measures_where_the_bundle_will_be_served(cpu_dir: Path, device: Device, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=bundles.inputs(700, seed=9))
    onnx.save(onnx.load(str(cpu_dir / "backbone.onnx")), str(tmp_path / "model.onnx"))
    request = PrepareRequest(
        model=str(tmp_path / "model.onnx"),
        data=str(tmp_path / "data.npz"),
        out=tmp_path / "bundle",
        device=device.name,
        head_share=0.5,
        profile_seconds=0.1,
        compile_limit=0,
    )
    if device.is_cuda:  # where so small a model is done before a head could say anything
        with pytest.raises(ModelRefusedError, match="the head costs more than leaving here could save"):
            prepare_bundle(request, Reporter())
        return
    report = prepare_bundle(request, Reporter())
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.profile.executor == device.executor and bundle.device == device
    assert not bundle.manifest.precisions  # int8 is for CPUs
    depths = [ramp.depth for ramp in bundle.ramps if ramp.tensor != bundle.manifest.inputs[0].name]
    # Segments that nobody waits for seem to take no time, and all depths are 0.
    assert depths == sorted(depths) and depths[0] > 0.03 and depths[-1] < 1.0
    assert device.name in report.executors.missing["torch-eager"]
    x = bundles.inputs(5, seed=11)
    sessions = Sessions(bundle, threads=1)
    stages = sessions.stages(range(len(bundle.columns)))
    np.testing.assert_allclose(_through(stages, x, [None] * len(stages))[-1], sessions.exact(x), **CLOSE)


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
