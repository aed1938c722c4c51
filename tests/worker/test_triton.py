"""``offramp triton``: what Triton's ONNX Runtime backend would serve answers like a worker with the same plan, and
computes no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported import Repository, export
from processes import WorkerProcess, document, plan_for
from typer.testing import CliRunner

from offramp_cli.main import app
from offramp_core.bundle import TensorSpec
from offramp_core.plan import Plan, TierRamps
from offramp_core.scale import Scale
from offramp_worker.triton.config import config_text

#: Thresholds and precision.
PLANS: Mapping[str, tuple[dict[str, str], str]] = {
    "one ramp": ({"r01-grid": "0.5"}, "fp32"),
    "two ramps at one place, and one behind": ({"r00-linear": "0.3", "r00-grid": "0.2", "r02-linear": "0.5"}, "fp32"),
    "one that nobody can leave at": ({"r00-grid": "0", "r02-linear": "0.5"}, "fp32"),
    "a model at the input": ({bundles.SMALL: "0.3", "r01-grid": "0.4"}, "fp32"),
    "int8": ({bundles.SMALL: "0.2", "int8/r00-grid": "0.4"}, "int8"),
    "int8 without exits": ({}, "int8"),
}
ENDS = {"logits": None, "percentages": Scale("probabilities", 100.0), "logarithms": Scale("log-probabilities")}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.write_wide_bundle(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module", params=ENDS)
def serving(request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A worker of a model that ends in one scale or another, and its bundle."""
    scale, folder = ENDS[request.param], wide
    if scale is not None:
        folder = bundles.answering_in(Path(shutil.copytree(wide, tmp_path_factory.mktemp("end") / "bundle")), scale)
    with WorkerProcess(folder) as worker:
        yield worker


def rows() -> np.ndarray:
    """Inputs, some of which no exit may answer: larger than all that is known."""
    x = bundles.inputs(96, seed=9)
    x[[7, 40]] = 1e9
    x[11, 1, 2, 3] = -3e8
    return x


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_answers_and_exits_are_those_of_a_worker_with_the_same_plan(
    serving: WorkerProcess, plan: str, tmp_path: Path
) -> None:
    thresholds, precision = PLANS[plan]
    wanted, x = plan_for(serving.bundle, thresholds, precision=precision), rows()
    reply = serving.deliver(document(wanted, epoch=serving.state().epoch + 1))
    assert reply.status_code == 200, reply.text
    outputs, exits = Repository.of(serving.bundle, wanted, tmp_path / "models").answer(x)
    served = [serving.infer(part) for part in np.array_split(x, 4)]
    told = [exit_ for reply in served for exit_ in _exits(reply, len(x) // 4)]
    assert exits == told
    assert 0 < sum(exit_ != "final" for exit_ in exits) < len(x) or not thresholds
    np.testing.assert_array_equal(outputs["label"][:, 0], np.concatenate([reply["label"] for reply in served]))
    logits = np.concatenate([reply["logits"] for reply in served])
    np.testing.assert_allclose(outputs["logits"], logits, rtol=1e-4, atol=1e-4)


def _exits(reply: dict[str, Any], n: int) -> list[str]:
    told = str(reply["parameters"]["exit"]).split(",")
    return told * n if len(told) == 1 else told


def test_a_row_that_is_no_number_is_answered_by_the_model_with_no_answer(wide: Path, tmp_path: Path) -> None:
    for name in ("two ramps at one place, and one behind", "int8"):
        thresholds, precision = PLANS[name]
        x = bundles.inputs(4, seed=2)
        x[1, 0, 0, 0], x[2, 0, 0, 0] = np.nan, np.inf
        plan = plan_for(wide, thresholds, precision=precision)
        outputs, exits = Repository.of(wide, plan, tmp_path / precision).answer(x)
        assert (exits[1], exits[2]) == ("final", "final")
        assert outputs["label"][1, 0] == -1 and np.isnan(outputs["logits"][1]).any()


def test_rows_that_leave_are_not_computed_any_further(wide: Path, tmp_path: Path) -> None:
    """By the shapes that ONNX Runtime's own profile has of every operator."""
    plan = plan_for(wide, {"r00-linear": "0.5", "r02-linear": "0.5"})
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    repository, x = Repository.of(wide, plan, tmp_path / "models", options=options), bundles.inputs(64, seed=5)
    _, exits = repository.answer(x)
    first, second = (exits.count(name) for name in ("r00-linear", "r02-linear"))
    assert first and second and exits.count("final")
    sure = x[[name == "r00-linear" for name in exits]]
    repository.answer(sure)
    events = json.loads(Path(repository.session.end_profiling()).read_text())
    convolutions = [
        event["args"]["input_type_shape"][0]["float"][0]
        for event in events
        if event.get("args", {}).get("op_name") == "Conv"
    ]
    # Three convolutions: one before the first ramp, two before the second; then one call in which all leave at once.
    assert convolutions == [64, 64 - first, 64 - first, len(sure)]


def test_the_batch_that_triton_may_make_is_the_largest_that_was_measured(wide: Path, tmp_path: Path) -> None:
    plan = plan_for(wide, {"r01-grid": "0.5"})
    repository = Repository.of(wide, plan, tmp_path / "models")
    config = repository.config
    assert (config.name, config.max_batch_size, config.HasField("dynamic_batching")) == ("tiny", 32, True)
    assert Plan.from_mapping(repository.told("plan")) == plan
    assert [group.kind for group in config.instance_group] == [2]  # KIND_CPU, where the bundle was measured


def test_a_bundle_for_a_gpu_asks_for_one(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle", executor="onnxruntime-cuda")
    config = Repository.of(folder, plan_for(folder, {"r01-grid": "0.5"}), tmp_path / "models").config
    assert [group.kind for group in config.instance_group] == [1]  # KIND_GPU


def test_a_better_plan_is_another_version_of_the_model(wide: Path, tmp_path: Path) -> None:
    out, better = tmp_path / "models", plan_for(wide, {"r00-grid": "0.1"})
    assert export(wide, plan_for(wide, {"r01-grid": "0.5"}), out).exit_code == 0
    before = {file: (out / "tiny" / file).read_bytes() for file in ("1/model.onnx", "config.pbtxt")}
    refused = export(wide, better, out)
    assert refused.exit_code == 2
    assert "exists; give another --version" in refused.stderr
    told = export(wide, better, out, "--version", "2")
    assert told.exit_code == 0
    assert told.stdout.startswith(f"{out / 'tiny' / '2'}: r00-grid < 0.1 at fp32\n")
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "tiny/1/model.onnx",
        "tiny/2/model.onnx",
        "tiny/config.pbtxt",
    ]
    # So going back is deleting a folder: each graph says what it holds, and the configuration says nothing of it.
    assert {file: (out / "tiny" / file).read_bytes() for file in before} == before
    assert [_exits_in(out / "tiny" / version / "model.onnx") for version in "12"] == [["r01-grid"], ["r00-grid"]]
    assert "r0" not in (out / "tiny" / "config.pbtxt").read_text()


def _exits_in(file: Path) -> list[str]:
    (told,) = [json.loads(p.value) for p in onnx.load(file).metadata_props if p.key == "offramp.exits"]
    return list(told)


def test_an_edited_configuration_stays_and_what_it_does_not_say_is_told(wide: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "models", plan_for(wide, {"r01-grid": "0.5"})
    assert "stays as it is" not in export(wide, plan, out).stdout
    file = out / "tiny" / "config.pbtxt"
    edited = file.read_text().replace("max_batch_size: 32", "max_batch_size: 8").replace("  name", "\tname")
    file.write_text(edited + "version_policy { all { } }\n")
    told = export(wide, plan, out, "--version", "2").stdout
    assert f"{file} stays as it is; it does not say max_batch_size: 32\n" in told
    assert file.read_text().startswith(edited) and file.read_text().endswith("version_policy { all { } }\n")


def test_a_version_with_other_outputs_is_refused_and_nothing_changes(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    assert export(wide, plan_for(wide, {"r01-grid": "0.5"}), out).exit_code == 0
    file = out / "tiny" / "config.pbtxt"
    file.write_text(file.read_text().replace('name: "logits"', 'name: "scores"'))
    before = file.read_bytes()
    refused = export(wide, plan_for(wide, {"r00-grid": "0.1"}), out, "--version", "2")
    assert refused.exit_code == 2
    assert "does not have the inputs and outputs of this version" in refused.stderr
    assert "give another --name" in refused.stderr and refused.stderr.count("\n") == 1
    assert file.read_bytes() == before and sorted(p.name for p in file.parent.iterdir()) == ["1", "config.pbtxt"]


def test_a_plan_by_which_every_row_leaves_is_written(wide: Path, tmp_path: Path) -> None:
    told = export(wide, plan_for(wide, {"r02-linear": "1"}), tmp_path / "models")
    assert told.exit_code == 0, told.output
    n = len(np.load(wide / "probe.npz")["x"])
    assert f"{n} of the bundle's {n} probe rows leave early" in told.stdout


@pytest.mark.parametrize("version", ["1", "2"])
def test_whoever_looks_at_any_moment_sees_whole_versions_only(
    version: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what an export that ends at that moment leaves: the next one cleans it up."""
    out, plan = tmp_path / "models", plan_for(wide, {"r00-grid": "0.1"})
    if version == "2":
        assert export(wide, plan_for(wide, {"r01-grid": "0.5"}), out).exit_code == 0
    seen, rename = [], Path.replace

    def watched(source: Path, target: Path) -> Path:
        seen.append(shutil.copytree(out, tmp_path / f"before{len(seen)}" / "models"))
        done = rename(source, target)
        seen.append(shutil.copytree(out, tmp_path / f"before{len(seen)}" / "models"))
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", watched)
        assert export(wide, plan, out, "--version", version).exit_code == 0
    config = (out / "tiny" / "config.pbtxt").read_bytes()
    assert seen
    for models in seen:
        assert [path.name for path in models.iterdir()] == ["tiny"]
        numbers = [path for path in (models / "tiny").iterdir() if path.name[0].isdigit()]
        assert all((path / "model.onnx").is_file() for path in numbers)
        assert not numbers or (models / "tiny" / "config.pbtxt").read_bytes() == config
        again = export(wide, plan, models, "--version", version)
        if len(numbers) == int(version):
            assert "exists; give another --version" in again.stderr
        else:
            assert again.exit_code == 0, again.output
            assert [path.name for path in sorted((models / "tiny").iterdir())] == [
                *"12"[: int(version)],
                "config.pbtxt",
            ]


def test_names_and_shapes_of_any_model_can_be_written() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    specs = [TensorSpec('in "1"\\ü\n', "INT32", (-1, 4)), TensorSpec("one", "FP32", ())]
    text = config_text(name="m", inputs=specs, outputs=(), max_batch=1, on_gpu=False)
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert [(i.name, list(i.dims), i.HasField("reshape")) for i in config.input] == [
        (specs[0].name, [-1, 4], False),
        ("one", [1], True),
    ]


REFUSED: Mapping[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "another model's": ({"backboneDigest": "sha256:" + "0" * 64}, (), "backboneDigest is sha256:0000"),
    "trained heads": ({"rampSetDigest": "sha256:" + "0" * 64}, (), "heads that were trained on live traffic"),
    "no exits": ({"ramps": []}, (), "Triton serves the bundle's backbone.onnx as it is"),
    "an unknown ramp": ({"ramps": [{"id": "r99", "threshold": "0.1"}]}, (), "ramp 'r99' is none of"),
    "an unknown precision": ({"precision": "int4"}, (), "precision int4 is not in the loaded bundle"),
    "a threshold of 2": ({"ramps": [{"id": "r01-grid", "threshold": "2"}]}, (), "threshold of ramp 'r01-grid' is 2"),
    "a name that leads elsewhere": ({}, ("--name", "../elsewhere"), "cannot be a folder of a model repository"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exported_is_refused_in_a_line_and_nothing_is_written(
    wide: Path, what: str, tmp_path: Path
) -> None:
    changes, options, message = REFUSED[what]
    plan = plan_for(wide, {"r01-grid": "0.5"}).to_mapping() | changes
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    arguments = ["triton", str(wide), "--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "models")]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "models").exists()


def test_a_model_of_old_operators_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "bundle")
    model = onnx.load(str(folder / "backbone.onnx"))
    model.opset_import[0].version = 12
    (folder / "backbone.onnx").write_bytes(model.SerializeToString())
    bundles.write_manifest(folder)
    result = export(folder, plan_for(folder, {"r01-grid": "0.5"}), tmp_path / "models")
    assert result.exit_code == 2
    assert "backbone.onnx has opset 12; exits in a graph need 13 or newer: export the model again" in result.stderr


def test_tiers_are_left_out_and_that_is_told(wide: Path, tmp_path: Path) -> None:
    plan = plan_for(wide, {"r01-grid": "0.5"})
    plan = replace(plan, tiers=(TierRamps("careful", ()),))
    assert "tiers are left out: careful" in export(wide, plan, tmp_path / "models").stdout


def test_a_folder_that_cannot_be_written_is_told(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "plan.json").write_text(json.dumps(plan_for(wide, {"r01-grid": "0.5"}).to_mapping()))
    arguments = ["triton", str(wide), "--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "file" / "models")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Not a directory" in result.stderr
