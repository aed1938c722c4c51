"""``offramp prepare`` end to end on a tiny residual network: the bundle, its records, its seed, its sources."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import prepared
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from offramp_core.bundle import RampSpec, profile_arrays
from offramp_core.records import records_from_arrays
from offramp_core.uncertainty import uncertainty
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.heads import KINDS
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.heads.distillation import train_heads
from offramp_worker.prepare.heads.features import Features, feature_key
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Advance, Reporter
from offramp_worker.prepare.report import PrepareReport
from offramp_worker.prepare.source.sources import load_backbone

pytestmark = pytest.mark.slow  # trains heads

ROWS, HEAD_SHARE = 900, 0.4


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> PrepareRequest:
    folder = tmp_path_factory.mktemp("prepare")
    x, _ = prepared.images(ROWS, seed=2)
    x[-20:] = x[:20]  # copies of head rows, which must not become records
    np.savez(folder / "data.npz", x=x)
    return PrepareRequest(
        model=prepared.save_model(folder),
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        name="tiny",
        head_share=HEAD_SHARE,
        profile_seconds=0.3,
        precision="exact",  # whether int8 is faster is a matter of the machine: see test_prepare_precision
        compile_limit=0,
    )


class Terminal(io.StringIO):
    """Where a progress bar is drawn."""

    def isatty(self) -> bool:
        return True


@dataclass
class Watched(Reporter):
    """Notes how far every step came, of how much; in order."""

    steps: list[tuple[str, int, list[int]]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str, *, total: int) -> Iterator[Advance]:
        done: list[int] = []
        self.steps.append((name, total, done))
        with super().step(name, total=total) as advance:
            yield lambda n: (done.append(n), advance(n))[0]


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched(quiet=True)


@pytest.fixture(scope="module")
def report(request_: PrepareRequest, watched: Watched) -> PrepareReport:
    return prepare_bundle(request_, watched)


def test_every_step_is_announced_and_told_to_its_end(report: PrepareReport, watched: Watched) -> None:
    assert [(name, sum(done)) for name, _, done in watched.steps] == [(name, total) for name, total, _ in watched.steps]
    names = [name for name, _, _ in watched.steps]
    assert names[0] == "export the model" and names[-1] == "score the records"
    training = [(total, done) for name, total, done in watched.steps if name.startswith("train")]
    # It moves while heads are trained; of a kind that promises little on this machine, there may be a single one.
    assert max(total for total, _ in training) > 1
    assert all(len(done) > 1 for total, done in training if total > 1)


def test_on_a_terminal_a_bar_is_drawn_and_elsewhere_a_line_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, said in ((Terminal(), "3/3"), (io.StringIO(), "train heads: 3 in")):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with Reporter().step("train heads", total=3) as advance:
            for _ in range(3):
                advance(1)
        assert "train heads" in stream.getvalue()
        assert said in stream.getvalue()


@pytest.fixture(scope="module")
def bundle(report: PrepareReport) -> Bundle:
    return load_bundle(report.out)


@pytest.fixture(scope="module")
def doubled(request_: PrepareRequest, tmp_path_factory: pytest.TempPathFactory) -> PrepareReport:
    """The first share of the data, doubled for as long as that pays."""
    out = tmp_path_factory.mktemp("doubled") / "bundle"
    return prepare_bundle(replace(request_, out=out, head_share=None), Reporter(quiet=True))


def unseen(request_: PrepareRequest, report: PrepareReport) -> np.ndarray:
    """The rows that no head may have seen, by the report's own counts."""
    x = np.load(request_.data)["x"][: ROWS - 20]
    return x[report.data["head_training"] + report.data["head_validation"] :]


def test_a_worker_loads_the_bundle_and_it_says_what_it_is(bundle: Bundle, report: PrepareReport) -> None:
    assert bundle.manifest.name == "tiny"
    assert bundle.manifest.n_classes == prepared.CLASSES
    assert bundle.manifest.backbone_digest == report.backbone_digest
    assert bundle.manifest.ramp_set_digest == report.ramp_set_digest
    assert bundle.manifest.inputs[0].shape == (1, 16, 16)
    assert [r.id for r in bundle.ramps] == [line.verdict.spec.id for line in report.kept]
    assert {r.head for r in bundle.ramps} <= set(KINDS)
    assert "/" not in bundle.manifest.source  # no folders of this machine


def test_the_backbone_answers_as_the_torch_model_does(bundle: Bundle) -> None:
    x, _ = prepared.images(50, seed=3)
    with torch.inference_mode():
        expected = prepared.trained_model()(torch.from_numpy(x)).numpy()
    (logits,) = open_session(bundle.backbone, threads=1).run(None, {bundle.manifest.inputs[0].name: x})
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_heads_learned_the_models_answers(report: PrepareReport) -> None:
    assert max(line.verdict.merit.agreement for line in report.kept) > 0.7  # chance is 0.25
    assert max(line.verdict.merit.exits[0.05] for line in report.kept) > 0.2


@pytest.mark.parametrize("made", ["report", "doubled"])
def test_records_are_the_unseen_rows_scored_as_a_worker_scores_them(
    made: str, request_: PrepareRequest, request: pytest.FixtureRequest
) -> None:
    report: PrepareReport = request.getfixturevalue(made)
    bundle = load_bundle(report.out)
    x = unseen(request_, report)
    session = open_session(tapped_model(bundle.backbone, bundle.heads), threads=1)
    reference, *logits = session.run(None, {bundle.manifest.inputs[0].name: x})
    with np.load(report.out / "records.npz") as stored:
        assert len(stored["final"]) == len(x) == report.data["records"]
        np.testing.assert_array_equal(stored["final"], reference.argmax(axis=1))
        for column, (values, table) in enumerate(zip(logits, bundle.quantiles, strict=True)):
            np.testing.assert_array_equal(stored["prediction"][:, column], values.argmax(axis=1))
            np.testing.assert_allclose(stored["uncertainty"][:, column], uncertainty(values, table), atol=1e-4)


def test_without_a_share_heads_take_two_hundred_rows_and_at_most_half(doubled: PrepareReport) -> None:
    heads = doubled.data["head_training"] + doubled.data["head_validation"]
    assert heads in (200, 400)
    assert heads + doubled.data["records"] == ROWS - 20


def test_copies_of_head_rows_are_dropped_from_the_records(report: PrepareReport) -> None:
    assert report.data["repeats_dropped"] == 20
    used = report.data["head_training"] + report.data["head_validation"] + report.data["records"]
    assert used == ROWS - 20


def test_records_and_profile_agree_on_costs(bundle: Bundle, report: PrepareReport) -> None:
    with np.load(report.out / "records.npz") as stored:
        arrays = dict(stored)
    for batch in bundle.profile.batches:
        assert sum(batch.segment_seconds) == pytest.approx(batch.exact_seconds)
        records = records_from_arrays(arrays, batch_size=batch.batch_size)
        assert records.costs.total_seconds == pytest.approx(batch.exact_seconds)
    np.testing.assert_array_equal(arrays["ramp_seconds"], profile_arrays(bundle.profile)["ramp_seconds"])
    assert [b.batch_size for b in bundle.profile.batches] == [1, 2, 4, 8, 16, 32]


def test_uncertainties_resolve_the_certain_end(report: PrepareReport) -> None:
    with np.load(report.out / "records.npz") as stored:
        for column in stored["uncertainty"].T:
            assert len(np.unique(column)) > 0.9 * len(column)


@pytest.fixture(scope="module")
def again(request_: PrepareRequest, report: PrepareReport, tmp_path_factory: pytest.TempPathFactory) -> PrepareReport:
    """The same request, but for the name, over a folder that holds an earlier bundle."""
    out = tmp_path_factory.mktemp("again") / "bundle"
    shutil.copytree(report.out, out)
    (out / "stale").touch()
    return prepare_bundle(replace(request_, out=out, name="renamed"), Reporter(quiet=True))


def test_the_same_seed_gives_the_same_bytes(report: PrepareReport, again: PrepareReport) -> None:
    first, second = (load_file(r.out / "ramps.safetensors") for r in (report, again))
    shared = first.keys() & second.keys()  # which ramps pay is measured, so a borderline one may come and go
    assert shared
    assert all(first[name].tobytes() == second[name].tobytes() for name in shared)
    assert again.backbone_digest == report.backbone_digest


def test_another_seed_gives_other_heads() -> None:
    rng = np.random.default_rng(0)
    spec = RampSpec("r00-grid", "t", 0, 0.5, "grid-mlp", channels=1, hidden=8)
    pooled = {feature_key(spec): rng.normal(size=(80, 32)).astype(np.float32)}
    rows = Features(pooled, rng.normal(size=(80, 3)).astype(np.float32))
    heads = [
        train_heads((spec,), rows.rows(0, 60), rows.rows(60, 80), seed=seed, threads=1, advance=lambda _: None)
        for seed in (0, 0, 1)
    ]
    first, same, other = (head["r00-grid"]["w1"] for head in heads)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_an_earlier_bundle_is_replaced_and_nothing_stays_beside_it(again: PrepareReport) -> None:
    assert load_bundle(again.out).manifest.name == "renamed"
    assert [p.name for p in again.out.parent.iterdir()] == ["bundle"]
    assert not (again.out / "stale").exists()


def test_the_report_for_machines_is_json_with_disjoint_counts(report: PrepareReport) -> None:
    value = json.loads(json.dumps(report.to_mapping()))
    assert value["ramps"][0].keys() >= {"id", "depth", "cost", "agreement", "exit_share", "head"}
    assert value["ramps"][0]["exit_share"].keys() == {"0.005", "0.01", "0.02", "0.05"}
    assert value["ramps"][0]["cost_by_batch"].keys() == {"1", "2", "4", "8", "16", "32"}
    assert value["next"].startswith("offramp serve ")
    assert {each["budget"] for each in value["outlook"]} == {0.005, 0.01, 0.02, 0.05}
    saving = [each["saving"] for each in value["outlook"] if (each["batch_size"], each["max_overhead"]) == (16, 1.0)]
    assert saving == sorted(saving)  # a larger budget never saves less
    assert json.loads((report.out / "report.json").read_text()) == value


def test_every_candidate_is_accounted_for_with_its_reason(report: PrepareReport) -> None:
    value = report.to_mapping()
    fates = [each["id"] for part in ("ramps", "refused", "untrained") for each in value[part]]
    assert len(fates) == len(set(fates))
    assert {"r00-cells", "r00-conv32", "r01-linear", "r01-conv32"} <= set(fates)  # at the input and inside
    assert all(each["refused"] for part in ("refused", "untrained") for each in value[part])


def test_the_bundle_comes_with_a_picture(report: PrepareReport) -> None:
    with Image.open(report.out / "report.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 600


class Vgg(torch.nn.Module):
    """A foreign architecture: plain convolutions, pooling and a flattening view."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Conv2d
        self.features = torch.nn.Sequential(
            layer(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            layer(8, 8, 3, padding=1),
            torch.nn.ReLU(),
        )
        self.last = torch.nn.Linear(8 * 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.last(x.view(x.size(0), -1))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_exported_programs_and_onnx_files_become_the_same_kind_of_backbone(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Vgg().eval()
    x, _ = prepared.images(20, seed=4)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.from_numpy(x[:2]),), dynamic_shapes=({0: batch},))
    path = str(tmp_path / f"foreign{suffix}")
    if suffix == ".pt2":
        torch.export.save(program, path)
    else:
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        onnx.save(exported.model_proto, path)
    backbone = load_backbone(path, x)
    (logits,) = open_session(backbone.model, threads=1).run(None, {backbone.input.name: x})
    with torch.inference_mode():
        np.testing.assert_allclose(logits, model(torch.from_numpy(x)).numpy(), atol=1e-4)
    assert backbone.name == "foreign"
    assert not any(node.metadata_props or node.doc_string for node in backbone.model.graph.node)
