"""Bundles are served on the device that they were measured on: what happens where it is not here, and how its stages
run."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from processes import WorkerProcess, eventually

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import CPU, CUDA, DEVICES, missing, why_not
from offramp_worker.engine.execution.device_stages import DeviceStage
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.kept_stages import KeptStage
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.stages import StageSession
from offramp_worker.padded import WHOLE_ROWS, Padded, filled, padded_rows, plans_for_sizes
from offramp_worker.prepare.measuring.pricing import Runs
from offramp_worker.prepare.measuring.profiling import jobs_of
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter

ELSEWHERE = [name for name in DEVICES if missing(DEVICES[name])]


def test_the_cpu_is_always_there() -> None:
    assert not missing(CPU)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_device_that_is_not_here_is_refused_with_what_would_help(bundle: Bundle, name: str) -> None:
    elsewhere = replace(bundle, profile=replace(bundle.profile, executor=DEVICES[name].executor))
    with pytest.raises(InvalidBundleError, match=rf"profile\.json: .*{re.escape(missing(DEVICES[name]))}") as caught:
        Sessions(elsewhere, threads=1)
    assert DEVICES[name].package in str(caught.value) and "spec.model.uri" in caught.value.remedy


def test_an_error_of_cuda_is_told_without_the_names_of_functions_before_it() -> None:
    error = "CUDA failure 100: no CUDA-capable device is detected"
    message = why_not(f"cuda_call.cc:154 Status CudaCall(ERRTYPE) {error} ; GPU=-1 ; hostname=n1\nand more", CUDA)
    assert message.startswith(f"{error}; are a GPU, its driver") and message.endswith("handed to this container?")
    assert why_not("no room\nand where", CUDA).startswith("no room; are")


@pytest.mark.slow
@pytest.mark.skipif(not missing(CUDA), reason="there is one here")
def test_a_worker_without_the_bundles_gpu_stays_up_unready_and_tells_why(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle", executor=CUDA.executor)
    with WorkerProcess(folder, wait_ready=False) as worker:
        state = eventually(lambda: s if (s := worker.state()).message else None, what="the reason")
        assert not state.ready and "onnxruntime-gpu" in state.message
        assert state.missing_device == "cuda"
        assert worker.public.get("/v2/health/live").status_code == 200
        assert worker.public.get("/v2/health/ready").status_code == 503


def test_an_executor_that_nobody_knows_is_refused_by_the_files_name(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle", executor="tensorrt")
    with pytest.raises(
        InvalidBundleError, match=r"profile\.json: executor is 'tensorrt'; it must be one of onnxruntime-cpu"
    ):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("device", "said"),
    [*((name, re.escape(missing(DEVICES[name]))) for name in ELSEWHERE), ("tpu", "use cpu, cuda, cuda-tf32, webgpu")],
)
def test_prepare_refuses_a_device_before_it_reads_anything(tmp_path: Path, device: str, said: str) -> None:
    request = PrepareRequest(model="no.onnx", data="no.npz", out=tmp_path / "bundle", device=device)
    with pytest.raises(InvalidArgumentError, match=rf"device .*{said}"):
        prepare_bundle(request, Reporter())


@given(
    st.integers(1, 9),
    st.sets(st.sampled_from((0, 1, 2, 3)), min_size=1),
    st.lists(st.none() | st.integers(0, 2**16 - 1), min_size=4, max_size=4),
)
def test_stages_that_hand_on_in_a_devices_memory_say_what_those_say_that_share_buffers(
    sessions: Sessions, n: int, active: set[int], kept: list[int | None]
) -> None:
    x = bundles.inputs(n, seed=n)
    shared = sessions.stages(sorted(active))
    own = [stage._session for stage in shared]  # type: ignore[attr-defined]
    expected = _through(shared, x, kept)
    for apart in (_apart(DeviceStage, own), _apart(KeptStage, own)):
        for found in (_through(apart, x, kept), _through(apart, x, kept)):  # the second time as it was kept
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_array_equal(one, other)


@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(1, 2**9 - 1)), min_size=2, max_size=6))
def test_stages_that_keep_their_memory_say_the_same_whatever_ran_before(
    sessions: Sessions, batches: list[tuple[int, int | None]]
) -> None:
    """Memory grows with larger batches, and smaller ones lie in it. Nothing of a batch itself is kept."""
    shared = sessions.stages((0, 2))
    apart = _apart(KeptStage, [stage._session for stage in shared])  # type: ignore[attr-defined]
    for n, kept in batches:
        x = bundles.inputs(n, seed=n)
        for one, other in zip(_through(shared, x, [kept, None]), _through(apart, x, [kept, None]), strict=True):
            np.testing.assert_array_equal(one, other)
    assert all(stage._kept for stage in apart)  # type: ignore[attr-defined]


def test_a_batch_whose_memory_cannot_be_kept_is_answered_all_the_same(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(KeptStage, "_memory", full)
    shared, x = sessions.stages((0, 2)), bundles.inputs(4, seed=4)
    apart = _apart(KeptStage, [stage._session for stage in shared])  # type: ignore[attr-defined]
    expected = _through(shared, x, [None, None])
    for found in (_through(apart, x, [None, None]), _through(apart, x, [None, None])):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_nothing_of_a_batch_is_kept_when_its_rows_have_gone_on(sessions: Sessions) -> None:
    """Batches lie in page-locked memory, of which there is little; what each shape of batch kept would be all of it."""
    (stage,) = _apart(KeptStage, [sessions.stages((0, 2))[0]._session])  # type: ignore[attr-defined]
    for _ in range(3):
        x = bundles.inputs(3, seed=1)
        gone = weakref.ref(x)
        stage.run(x, x)
        del x
    assert gone() is None


def test_an_array_between_two_batches_from_the_same_memory_is_not_run_again(sessions: Sessions) -> None:
    first, second, _ = _apart(KeptStage, [s._session for s in sessions.stages((0, 2))])  # type: ignore[attr-defined]
    x, y = bundles.inputs(3, seed=1), bundles.inputs(3, seed=2)
    other = np.asarray(first.run(y, y)[0].value.numpy())[:3].copy()
    for _ in range(2):
        features, _ = first.run(x, x)
        expected = [np.array(part) for head in second.run(features, x)[1] for part in head]
        second.run(other, y)
    found = [np.array(part) for head in second.run(features, x)[1] for part in head]
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, two)


@given(
    st.integers(1, 9),
    st.sets(st.sampled_from((0, 1, 2, 3)), min_size=1),
    st.lists(st.none() | st.integers(0, 2**16 - 1), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_stages_that_fill_batches_up_say_the_same_wherever_in_the_chain_they_stand(
    sessions: Sessions, n: int, active: set[int], kept: list[int | None], fill: list[bool]
) -> None:
    x = bundles.inputs(n, seed=n)
    shared = sessions.stages(sorted(active))
    own = [stage._session for stage in shared]  # type: ignore[attr-defined]
    padded = [
        replace(s, session=Padded(lambda one=s.session: one)) if wanted else s
        for s, wanted in zip(own, fill, strict=False)
    ]
    for kind in (DeviceStage, KeptStage):
        apart = _apart(kind, padded)
        for found in (_through(apart, x, kept), _through(apart, x, kept)):
            for one, other in zip(_through(shared, x, kept), found, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [[None, None], [5, None], [None, 6]])
@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_a_small_model_at_the_input_that_fills_batches_up_hands_on_the_rows_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, n: int, kept: list[int | None]
) -> None:
    sessions = Sessions(load_bundle(bundles.write_wide_bundle(tmp_path_factory.mktemp("wide"))), threads=1)
    shared, x = sessions.stages((0, 1, 3)), bundles.inputs(n, seed=n)
    own = [stage._session for stage in shared]  # type: ignore[attr-defined]
    padded = [replace(s, session=Padded(lambda one=s.session: one)) for s in own]
    bits = [None if b is None or not any(b >> row & 1 for row in range(n)) else b for b in (*kept, None, None)]
    for kind in (DeviceStage, KeptStage):
        apart = _apart(kind, padded)
        for found in (_through(apart, x, bits), _through(apart, x, bits)):
            for one, other in zip(_through(shared, x, bits), found, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_device_that_rounds_is_asked_what_the_reference_says_and_any_other_leaves_that_to_the_cpu() -> None:
    assert {device.name: device.reference.name for device in DEVICES.values()} == {
        "cpu": "cpu",
        "cuda": "cpu",
        "cuda-tf32": "cuda-tf32",
        "webgpu": "cpu",
    }


def _apart(kind: type[DeviceStage], sessions: Sequence[StageSession]) -> list[DeviceStage]:
    """The CPU's memory stands in for a device's, with the same calls of ONNX Runtime. tests/gpu has devices with memory
    of their own."""
    return [kind(session, CPU, last=k == len(sessions) - 1) for k, session in enumerate(sessions)]


def _through(stages: Any, x: Any, kept: list[int | None]) -> list[Any]:
    """Everything that is said on the way; ``kept`` are bits of the rows that go on behind each stage, None for all."""
    said: list[Any] = []
    features, rows = x, None
    stage: Runnable
    for stage, bits in zip(stages, [*kept, None], strict=False):
        features, heads = stage.run(features, x, rows)
        said += [np.array(part) for head in heads for part in head]
        rows = None
        if bits is not None and stage is not stages[-1]:
            carried = len(heads[0][0])
            rows = np.array([row for row in range(carried) if bits >> row & 1] or [0])
            x = x[rows]
    return [*said, np.array(features)]


@given(st.integers(1, 40), st.integers(1, 6))
def test_a_whole_model_runs_in_pieces_of_one_size_whatever_the_batch(n: int, seed: int) -> None:
    sizes: list[int] = []

    class Doubling:
        def run(self, outputs: Any, feed: dict[str, Any]) -> list[Any]:
            sizes.append(len(feed["x"]))
            return [2 * feed["x"], feed["x"].sum(axis=1)]

    x = np.random.default_rng(seed).normal(size=(n, 3))
    twice, total = Padded(Doubling).run(None, {"x": x})
    np.testing.assert_array_equal(twice, 2 * x)
    np.testing.assert_allclose(total, x.sum(axis=1))
    assert set(sizes) == {WHOLE_ROWS}


@given(st.integers(1, 300))
def test_batches_are_filled_up_to_the_next_power_of_two_with_their_last_row(n: int) -> None:
    rows = padded_rows(n)
    assert n <= rows < 2 * n and rows & (rows - 1) == 0
    full = filled(np.arange(n), rows)
    assert len(full) == rows and (full[:n] == np.arange(n)).all() and (full[n:] == n - 1).all()


def test_each_size_of_batch_has_one_session_which_is_opened_when_it_comes() -> None:
    opened: list[object] = []

    def session() -> object:
        opened.append(object())
        return opened[-1]

    padded = Padded(session)
    assert len(opened) == 1  # a graph that cannot run is refused at once
    assert padded.at(2) is padded.at(2) is not padded.at(4)
    assert len(opened) == 3


@pytest.mark.parametrize(
    ("attributes", "plans"),
    [
        ({"kernel_shape": [16, 16], "strides": [16, 16]}, False),
        ({"kernel_shape": [16, 16], "strides": [16, 16], "pads": [0, 0, 0, 0]}, False),
        ({"kernel_shape": [16, 16], "strides": [8, 8]}, True),
        ({"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 1, 1, 1]}, True),
        ({"kernel_shape": [1, 1], "strides": [1, 1]}, True),
        ({"kernel_shape": [3, 3]}, True),
        ({}, True),
    ],
)
def test_batches_are_filled_up_for_convolutions_but_not_for_the_patches_of_a_transformer(
    attributes: dict[str, list[int]], plans: bool
) -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    graph = helper.make_graph([node], "g", [value("x", 1, ["n", 3, 32, 32])], [value("y", 1, None)])
    assert plans_for_sizes(helper.make_model(graph)) is plans


def test_waiting_for_a_gpu_is_charged_to_heads_and_not_to_segments() -> None:
    def run() -> None: ...

    heads = {"at the input": (run, None), "inside": (run, 1)}
    on_cpu = Runs(exact=run, segments=(run,) * 3, heads=heads, regroups=(run,) * 2, wait=None)
    assert {(job.beyond, job.but) for name, job in jobs_of(on_cpu).items() if "segment" in name} == {("", "")}
    jobs = jobs_of(replace(on_cpu, wait=run))
    assert [jobs[f"segment {k}"].beyond for k in range(3)] == ["wait", "wait", ""]  # the last one's logits come back
    assert [jobs[f"regroup {k}"].beyond for k in range(2)] == ["wait", "wait"]
    assert (jobs["head inside"].beyond, jobs["head inside"].but) == ("segment 1", "wait")
    assert (jobs["head at the input"].beyond, jobs["head at the input"].but) == ("", "")
