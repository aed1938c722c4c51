"""``offramp prepare --refresh``: new heads on the same backbone, and what is refused."""

from __future__ import annotations

from pathlib import Path

import bundles
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.records import records_from_arrays
from offramp_core.uncertainty import uncertainty
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.load import load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.pipeline import PrepareRequest
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import cost_in_profile, refresh_bundle
from offramp_worker.prepare.report import PrepareReport

pytestmark = pytest.mark.slow  # trains heads

ROWS = 700


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("refresh")
    bundle = bundles.write_bundle(folder / "bundle")
    np.savez(folder / "recent.npz", x=recent())
    return PrepareRequest(model=str(bundle), data=str(folder / "recent.npz"), out=folder / "refreshed", head_share=0.6)


def recent() -> npt.NDArray[np.float32]:
    """Inputs that are not those of the bundle: paler, and a little brighter."""
    return (0.8 * bundles.inputs(ROWS, seed=7) + 0.2).astype(np.float32)


@pytest.fixture(scope="module")
def report(request_: PrepareRequest) -> PrepareReport:
    return refresh_bundle(request_, Reporter(quiet=True))


def test_the_backbone_and_the_places_stay_and_the_ramp_set_is_new(
    request_: PrepareRequest, report: PrepareReport
) -> None:
    before, after = load_bundle(Path(request_.model)).manifest, load_bundle(report.out).manifest
    assert after.backbone_digest == before.backbone_digest == report.backbone_digest
    assert after.ramp_set_digest != before.ramp_set_digest
    assert after.ramp_set_digest == report.ramp_set_digest
    assert after.ramps == before.ramps
    assert (after.data or {})["refreshed_from"] == before.ramp_set_digest
    for name in ("backbone.onnx", "profile.json", "probe.npz"):
        assert after.files[name] == before.files[name]


def test_the_new_heads_agree_more_with_the_model_on_rows_they_have_not_seen(report: PrepareReport) -> None:
    lines = {line.verdict.spec.id: line for line in report.kept}
    for ramp in ("r00-grid", "r00-linear", "r01-grid"):  # random weights before
        before = lines[ramp].before
        assert before is not None
        assert lines[ramp].verdict.merit.agreement > before.agreement + 0.05


def test_a_head_that_cannot_get_better_is_kept_as_it_was(request_: PrepareRequest, report: PrepareReport) -> None:
    """r02-linear is the model's own classifier."""
    before, after = (load_file(path / "ramps.safetensors") for path in (Path(request_.model), report.out))
    np.testing.assert_array_equal(after["r02-linear/w1"], before["r02-linear/w1"])
    assert not np.array_equal(after["r00-linear/w1"], before["r00-linear/w1"])


def test_records_are_the_rows_that_trained_nothing_scored_as_a_worker_scores_them(report: PrepareReport) -> None:
    bundle = load_bundle(report.out)
    unseen = recent()[report.data["head_training"] + report.data["head_validation"] :]
    session = open_session(tapped_model(bundle.backbone, [h for h in bundle.heads if h is not None]), threads=1)
    reference, *logits = session.run(None, {"x": unseen})
    with np.load(report.out / "records.npz") as stored:
        arrays = dict(stored)
    assert len(unseen) == len(arrays["final"]) == report.data["records"]
    np.testing.assert_array_equal(arrays["final"], reference.argmax(axis=1))
    for column, (values, table) in enumerate(zip(logits, bundle.quantiles, strict=True)):
        np.testing.assert_array_equal(arrays["prediction"][:, column], values.argmax(axis=1))
        np.testing.assert_allclose(arrays["uncertainty"][:, column], uncertainty(values, table), atol=1e-4)
    exact = bundle.profile.at(8).exact_seconds
    assert records_from_arrays(arrays, batch_size=8).costs.total_seconds == pytest.approx(exact)


def test_costs_are_those_of_the_bundles_profile(request_: PrepareRequest) -> None:
    profile = load_bundle(Path(request_.model)).profile
    first, last = cost_in_profile(profile, 0), cost_in_profile(profile, 3)
    assert first.depth[1] == pytest.approx(0.2)  # 0.2 of 1.0 ms
    assert last.depth[1] == pytest.approx(0.8)
    assert first.head[1] == pytest.approx(1e-5 / 1e-3)


@pytest.mark.slow
def test_a_bundle_can_be_refreshed_in_place_and_the_same_seed_gives_the_same_ramp_set(
    request_: PrepareRequest, report: PrepareReport, tmp_path: Path
) -> None:
    bundle = bundles.write_bundle(tmp_path / "bundle")
    again = PrepareRequest(model=str(bundle), data=request_.data, out=bundle, head_share=request_.head_share)
    assert refresh_bundle(again, Reporter(quiet=True)).ramp_set_digest == report.ramp_set_digest
    assert load_bundle(bundle).manifest.ramp_set_digest == report.ramp_set_digest
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_inputs_of_another_model_are_refused(request_: PrepareRequest, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "other.npz", x=np.zeros((100, 1, 28, 28), dtype=np.float32) + np.arange(100)[:, None, None, None]
    )
    other = PrepareRequest(model=request_.model, data=str(tmp_path / "other.npz"), out=tmp_path / "out")
    with pytest.raises(
        InvalidArgumentError, match=r"rows of float32 \[1, 28, 28\]; the bundle's model tiny takes FP32 \[3, 14, 14\]"
    ):
        refresh_bundle(other, Reporter(quiet=True))
    assert not other.out.exists()


def test_a_damaged_bundle_is_refused_by_the_files_name(request_: PrepareRequest, tmp_path: Path) -> None:
    bundle = bundles.write_bundle(tmp_path / "bundle")
    with (bundle / "ramps.safetensors").open("ab") as file:
        file.write(b"x")
    damaged = PrepareRequest(model=str(bundle), data=request_.data, out=tmp_path / "out")
    with pytest.raises(InvalidBundleError, match=r"ramps\.safetensors"):
        refresh_bundle(damaged, Reporter(quiet=True))


@pytest.mark.parametrize("arguments", [[], ["--model", "m.onnx", "--refresh", "bundle"]])
def test_the_command_takes_a_model_or_a_bundle_to_refresh(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["prepare", *arguments, "--data", "x.npz", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "give --model or --refresh, and not both" in result.output
