"""Tasks beyond the top label, from a model to certified exits: `offramp prepare`, a worker, its audits, a certificate,
and what replies say."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import prepared
import pytest
import tasks
from exported import Repository
from onnx import helper
from processes import WorkerProcess, document, eventually
from scipy import stats

from offramp_core.certify import METHOD, METHOD_LOSSES, verify_certificate
from offramp_core.errors import InvalidBundleError
from offramp_core.records import Records, records_from_arrays
from offramp_core.task import Task, task_of
from offramp_core.tuning import Proposed, TuningRequest, tune
from offramp_core.uncertainty import exit_test, quantile_table, uncertainty
from offramp_worker.bundle.confidence import add_confidence
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.prepare.heads.objectives import objective_of, targets_of
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter

KINDS = ("top-k", "multi-label", "binary", "regression", "embedding")
ROWS = 1_500
BUDGET = 0.2
COPIES = 4
LABELS = {"top-k": [-1, 2], "multi-label": [-1, 4], "hamming": [-1, 4], "binary": [-1]}


@dataclass(frozen=True)
class Prepared:
    """A bundle of one task, and rows that it has never seen."""

    kind: str
    folder: Path
    bundle: Bundle
    x: np.ndarray

    @property
    def outputs(self) -> np.ndarray:
        """What the model itself says of the rows."""
        session = open_session(self.bundle.backbone, threads=1)
        return session.run(None, {self.bundle.manifest.inputs[0].name: self.x})[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bundles by kind, each prepared once."""

    @cache
    def make(kind: str) -> Prepared:
        folder = tmp_path_factory.mktemp(kind)
        np.savez(folder / "data.npz", x=prepared.images(ROWS, seed=3)[0])
        prepare_bundle(
            PrepareRequest(
                tasks.save_model(folder, kind),
                str(folder / "data.npz"),
                folder / "bundle",
                name="tiny",
                head_share=0.3,
                profile_seconds=0.3,
                compile_limit=0,
                task=tasks.SPECS[kind],
            ),
            Reporter(io.StringIO()),
        )
        return Prepared(kind, folder / "bundle", load_bundle(folder / "bundle"), prepared.images(400, seed=9)[0])

    return make


def cheap(folder: Path) -> Records:
    """The bundle's records, at the prices of a large model: what a head costs is then next to nothing.

    They stand there more than once: which heads a bundle has depends on what took how long, and a budget that a very
    good one would break takes 2,000 labels to certify.
    """
    arrays = dict(np.load(folder / "records.npz"))
    rows = len(arrays["uncertainty"])
    arrays = {
        name: np.concatenate([value] * COPIES) if value.ndim and len(value) == rows else value
        for name, value in arrays.items()
    }
    prices = {"batch_size", "segment_seconds", "ramp_seconds", "regroup_seconds"}
    n = arrays["uncertainty"].shape[1]
    own = {name: value for name, value in arrays.items() if name not in prices}
    return records_from_arrays({**own, "segment_seconds": np.ones(n + 1), "ramp_seconds": np.full(n, 1e-3)})


def tuned(made: Prepared, records: Records) -> Proposed:
    manifest = made.bundle.manifest
    assert records.loss is not None
    # Less than any exit loses on every row: some rows must go on.
    budget = min(BUDGET, 0.7 * float(records.loss.mean(axis=0).min()))
    request = TuningRequest(
        budget, 0.05, 1, records.ramp_ids, manifest.backbone_digest, manifest.ramp_set_digest, execution="ComputeSaving"
    )
    found = tune(replace(records, time=np.arange(len(records), dtype=np.float64)), request)
    assert isinstance(found, Proposed), found
    return found


@pytest.mark.parametrize("kind", tasks.SPECS)
def test_a_session_and_the_definition_are_equally_sure(kind: str) -> None:
    task = task_of(tasks.SPECS[kind], width=1 if kind == "binary" else 4)
    rng = np.random.default_rng(3)
    said = (rng.normal(0, 1, (400, task.head_width)) * rng.choice([0.1, 3, 300], (400, 1))).astype(np.float32)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["in"], ["said"])], "g", [info("in", task)], [info("said", task)]
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=9,
    )
    add_confidence(model, output="said", task=task, name="sure")
    _, sure = open_session(model, threads=1).run(None, {"in": said})
    raw = task.raw_score(said)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(sure, 1 / (1 + np.exp(raw)), rtol=0, atol=1e-12)
    table = quantile_table(raw)
    for threshold in (0.000001, 0.25, 0.5, 0.999999, 1.0):
        expected = uncertainty(said, table, score=task.raw_score) < np.float32(threshold)
        leaves = exit_test(threshold, table, score=task.raw_score).leaves(said, sure)
        np.testing.assert_array_equal(np.zeros(400, bool) if leaves is None else leaves, expected)


def info(name: str, task: Task) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", task.head_width])


@pytest.mark.parametrize("kind", tasks.SPECS)
def test_both_trainers_descend_along_the_slope_of_the_loss(kind: str) -> None:
    """Against differences of the loss; of values the error counts as given, so that only the last column moves with
    it."""
    task = task_of(tasks.SPECS[kind], width=1 if kind == "binary" else 4)
    rng = np.random.default_rng(5)
    reference = rng.normal(0, 2, (6, task.width)).astype(np.float32)
    targets = targets_of(task, reference)
    objective, said = objective_of(task, targets), rng.normal(0, 1, (6, task.head_width))
    slope, step = objective.slope(said.astype(np.float32), targets), 1e-4
    for column in [task.width] if task.lesson == "values" else range(task.width):
        moved = [said + step * sign * np.eye(task.head_width)[column] for sign in (1, -1)]
        up, down = (objective.losses(m, targets) for m in moved)
        np.testing.assert_allclose(slope[:, column] * len(said), (up - down) / (2 * step), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_records_hold_what_every_exit_loses_against_the_model(made: Any, kind: str) -> None:
    it = made(kind)
    stored = np.load(it.folder / "records.npz")
    assert ("prediction" in stored, "loss" in stored) == (False, True)
    sessions = Sessions(it.bundle, threads=1)
    task, said = it.bundle.task, sessions.tapped(it.x)
    answers = task.recorded(said.prediction, final=said.finals["fp32"], reference=task.answers(said.logits))
    np.testing.assert_allclose(said.logits, it.outputs, atol=1e-5)
    heads = sessions._run(sessions._taps["fp32"].session, it.x)[1:]
    for column, values in enumerate(heads):
        np.testing.assert_array_equal(
            answers["loss"][:, column], tasks.losses(kind, task.exit_outputs(values), it.outputs)
        )
    assert not answers["final_loss"].any()
    assert 0 < stored["loss"].mean() < 0.9, "exits that are always right, or never, show nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_more_uncertain_is_more_often_wrong(made: Any, kind: str) -> None:
    stored = np.load(made(kind).folder / "records.npz")
    deepest = stored["uncertainty"].shape[1] - 1
    order = np.argsort(stored["uncertainty"][:, deepest], kind="stable")
    lost = stored["loss"][order, deepest]
    sure, unsure = lost[: len(lost) // 3].mean(), lost[-len(lost) // 3 :].mean()
    assert sure < unsure


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "hamming"])
def test_a_worker_serves_the_task_with_certified_exits(made: Any, kind: str, tmp_path: Path) -> None:
    it = made(kind)
    found, spec = tuned(it, cheap(it.folder)), it.bundle.manifest.inputs[0]
    assert found.certificate.method == (METHOD_LOSSES if kind == "hamming" else METHOD)
    assert verify_certificate(found.certificate, found.plan, records=cheap_in_time(it.folder)) is None
    own = it.bundle.manifest.outputs[0].name
    with WorkerProcess(it.folder) as worker:
        assert worker.state().output == tasks.SPECS[kind].output
        metadata = worker.public.get("/v2/models/tiny").json()["outputs"]
        told = {o["name"]: (o["datatype"], o["shape"]) for o in metadata}
        assert told[own] == ("FP32", [-1, it.outputs.shape[1]])
        assert told.get("label") == (("INT64", LABELS[kind]) if kind in LABELS else None)
        reply = worker.deliver(document(found.plan, audit_rate=1.0, accuracy_budget=0.5))
        assert reply.status_code == 200, reply.text
        served, exits = infer(worker, it.x, spec.name, own)
        seen = eventually(lambda: audited(worker, len(it.x)), what="audits")
        block = worker.observations().records
    left = np.array([name != "final" for name in exits])
    assert 0 < left.mean() < 1
    np.testing.assert_allclose(served[own][~left], it.outputs[~left], rtol=1e-4, atol=1e-4)
    wrong = tasks.losses(kind, served[own], it.outputs)
    assert block.zero_one is (kind != "hamming")
    if kind == "hamming":  # each counts as an error with the probability of what it lost
        assert (wrong % 1 > 0).sum() > 0
        assert stats.binomtest(seen.disagreements, len(wrong), wrong.mean()).pvalue > 1e-4
    else:
        assert seen.disagreements == int(wrong.sum())
    loss = np.frombuffer(base64.b64decode(block.loss), "<f4").reshape(len(it.x), -1)
    assert (block.prediction, loss.shape[1]) == ("", len(it.bundle.columns))
    if kind == "multi-label":
        limits = np.array(tasks.SPECS[kind].thresholds)
        np.testing.assert_array_equal(served["label"], served[own] > limits)
    if kind == "top-k":
        np.testing.assert_array_equal(served["label"][:, 0], served[own].argmax(axis=1))
    exported, left_there = Repository.of(it.folder, found.plan, tmp_path / "models").answer(it.x)
    assert left_there == exits
    for name, values in served.items():
        same = exported[name].reshape(values.shape)  # a label of one number has an axis in Triton
        np.testing.assert_allclose(same, values, rtol=1e-4, atol=1e-4)


def cheap_in_time(folder: Path) -> Records:
    records = cheap(folder)
    return replace(records, time=np.arange(len(records), dtype=np.float64))


def audited(worker: WorkerProcess, rows: int) -> Any:
    (counts,) = [c for c in worker.observations().counts if c.epoch == 1 and c.arm == "stable"]
    return counts if counts.audited == rows else None


def infer(worker: WorkerProcess, x: np.ndarray, name: str, own: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """Outputs by name, and where each row left."""
    outputs: dict[str, list[np.ndarray]] = {}
    exits: list[str] = []
    for rows in np.array_split(x, len(x) // 40):
        tensor = {"name": name, "datatype": "FP32", "shape": list(rows.shape), "data": rows.reshape(-1).tolist()}
        reply = worker.public.post("/v2/models/tiny/infer", json={"inputs": [tensor]})
        assert reply.status_code == 200, reply.text
        for o in reply.json()["outputs"]:
            outputs.setdefault(o["name"], []).append(np.array(o["data"]).reshape(o["shape"]))
        exits += reply.json()["parameters"]["exit"].split(",")
    return {name: np.concatenate(parts) for name, parts in outputs.items()}, exits


@pytest.mark.slow
def test_workers_of_before_refuse_a_bundle_of_another_task(made: Any, tmp_path: Path) -> None:
    """They would serve its largest number as a label: the schema version, which they know, keeps them from it."""
    it = made("multi-label")
    raw = (it.folder / "manifest.json").read_bytes()
    assert msgspec.json.decode(raw)["schema_version"] == 2
    for file in it.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    document = {**msgspec.json.decode(raw), "schema_version": 1}
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(document))
    with pytest.raises(InvalidBundleError, match="schema_version is 1"):
        load_bundle(tmp_path)
    without = {name: value for name, value in document.items() if name != "task"}
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(without))
    with pytest.raises(InvalidBundleError, match="ramp_set_digest"):
        load_bundle(tmp_path)
