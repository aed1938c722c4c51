"""``offramp prepare --remeasure``: another profile for the same model and exits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import bundles
import numpy as np
import pytest
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_core.bundle import profile_arrays
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare import remeasure
from offramp_worker.prepare.pipeline import PrepareRequest
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.remeasure import remeasure_bundle
from offramp_worker.prepare.writing import write_remeasured


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    """Of a bundle with a model at the input and a second precision."""
    folder = tmp_path_factory.mktemp("remeasure")
    bundle = bundles.write_wide_bundle(folder / "bundle")
    np.savez(folder / "inputs.npz", x=bundles.inputs(40))
    data = str(folder / "inputs.npz")
    return PrepareRequest(model=str(bundle), data=data, out=folder / "there", threads=2, profile_seconds=0.1)


def test_the_model_and_the_exits_stay_and_the_profile_is_that_of_here(request_: PrepareRequest) -> None:
    report = remeasure_bundle(request_, Reporter(quiet=True))
    before, after = load_bundle(Path(request_.model)), load_bundle(report.out)
    new = {name for name, digest in after.manifest.files.items() if before.manifest.files[name] != digest}
    assert new == {"profile.json", "records.npz"}
    for digest in ("backbone_digest", "ramp_set_digest"):
        assert getattr(before.manifest, digest) == getattr(after.manifest, digest) == getattr(report, digest)
    assert (before.profile.threads, after.profile.threads) == (1, 2)
    assert after.profile == report.now
    for name in profile_arrays(before.profile):  # of every chain
        there, here = (profile_arrays(bundle.profile)[name] for bundle in (before, after))
        assert here.shape[1:] == there.shape[1:] and (here >= 0).all()
    with np.load(report.out / "records.npz") as records:
        np.testing.assert_array_equal(records["segment_seconds"], profile_arrays(after.profile)["segment_seconds"])
    assert len(Sessions(after, threads=1).stages((0, 1))) == len(Sessions(before, threads=1).stages((0, 1)))


def test_records_of_any_name_are_kept(tmp_path: Path, request_: PrepareRequest) -> None:
    bundle = load_bundle(Path(request_.model))
    with np.load(bundle.path / "records.npz") as stored:
        records = {**stored, "file": np.arange(3), "allow_pickle": np.zeros(1)}
    write_remeasured(bundle.path, tmp_path / "out", bundle.manifest, profile=bundle.profile, records=records)
    with np.load(tmp_path / "out" / "records.npz") as written:
        assert {name: array.tolist() for name, array in written.items()} == {k: v.tolist() for k, v in records.items()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a machine that has every device."""
    monkeypatch.setattr(remeasure, "missing", lambda device: "")
    return tmp_path


@pytest.mark.parametrize(
    ("device", "executor", "why"),
    [
        ("cuda", "onnxruntime-cpu", "int8, made for cpu; prepare the model with --precision exact"),
        ("cuda-tf32", "onnxruntime-cpu", "cuda-tf32 rounds products"),
        ("cpu", "onnxruntime-cuda-tf32", "cuda-tf32 rounds products"),
    ],
)
def test_what_answers_otherwise_on_the_device_is_refused(
    device: str, executor: str, why: str, request_: PrepareRequest, here: Path
) -> None:
    bundle = Path(request_.model)
    if executor != "onnxruntime-cpu":
        bundle = bundles.write_bundle(here / "bundle", executor=executor)
    asked = PrepareRequest(model=str(bundle), data=request_.data, out=here / "out", device=device)
    with pytest.raises(InvalidArgumentError, match=why):
        remeasure_bundle(asked, Reporter(quiet=True))
    assert not (here / "out").exists()


def test_a_device_that_is_not_here_is_refused(tmp_path: Path, request_: PrepareRequest) -> None:
    asked = PrepareRequest(model=request_.model, data=request_.data, out=tmp_path / "out", device="cuda")
    with pytest.raises(InvalidArgumentError, match=r"device cuda: .*onnxruntime-gpu"):
        remeasure_bundle(asked, Reporter(quiet=True))


def test_a_machine_that_does_not_reproduce_the_probe_gets_no_bundle(tmp_path: Path, request_: PrepareRequest) -> None:
    bundle = bundles.write_bundle(tmp_path / "bundle")
    with np.load(bundle / "probe.npz") as probe:
        np.savez(bundle / "probe.npz", x=probe["x"], logits=probe["logits"] + 1)
    bundles.write_manifest(bundle)
    asked = PrepareRequest(model=str(bundle), data=request_.data, out=tmp_path / "out", profile_seconds=0.1)
    with pytest.raises(InvalidBundleError, match="probe"):
        remeasure_bundle(asked, Reporter(quiet=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--model", "m.onnx"], "--model belongs to other tasks"), (["--device", "abacus"], "device 'abacus' is unknown")],
)
def test_the_command_refuses_by_option(options: list[str], why: str, tmp_path: Path, request_: PrepareRequest) -> None:
    asked = ["--remeasure", request_.model, "--data", request_.data, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["prepare", *asked, *options])
    assert result.exit_code == 2 and why in result.stderr


def test_the_command_says_what_was_measured_and_the_next_step(tmp_path: Path, request_: PrepareRequest) -> None:
    asked = ["--remeasure", request_.model, "--data", request_.data, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["prepare", *asked])
    assert result.exit_code == 0, result.stderr
    assert "onnxruntime-cpu, --threads 1" in result.stdout and "model.uri of a pool" in result.stdout
