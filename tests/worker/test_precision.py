"""A bundle with a second precision and a model at the input: what is served, what is counted, and what is refused."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from engines import new_engine
from onnx import helper
from processes import KEY, SERVICE_UID, document, eventually, manifest_of, plan_for, sign
from stages import broken

from offramp_core.bundle import column_arrays, profile_arrays
from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_core.plan import Plan
from offramp_core.records import records_from_arrays
from offramp_core.task import NO_ANSWER, top_labels
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.classifier import ClassifierPlans

EVERYONE = "1"


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.write_wide_bundle(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def wide(wide_dir: Path) -> Bundle:
    return load_bundle(wide_dir)


@pytest.fixture(scope="module")
def sessions(wide: Bundle) -> Sessions:
    return Sessions(wide, threads=1)


class Service:
    """An engine and the desk where plans arrive."""

    def __init__(self, folder: Path, bundle: Bundle, sessions: Sessions) -> None:
        self.folder, self.done, self.epoch = folder, list[Ticket](), 0
        self.engine = new_engine(bundle, sessions, uid="w", deliver=self.done.extend)
        public = KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.desk = PlanDesk(ClassifierPlans(self.engine), public_key=public, service_uid=SERVICE_UID)
        self.engine.start()

    def run(self, plan: Plan, *, audit_rate: float = 0.0) -> None:
        self.epoch += 1
        self.desk.deliver(sign(document(plan, epoch=self.epoch, audit_rate=audit_rate, accuracy_budget=0.99)))

    def plan(self, thresholds: dict[str, str] | None = None, **options: Any) -> Plan:
        return plan_for(self.folder, thresholds, **{"precision": "int8", **options})

    def serve(self, x: Any) -> Ticket:
        """One request of many rows, answered, audited and counted."""
        ticket = self.engine.submit(x, never_exit=False)
        eventually(lambda: ticket in self.done, what="replies")
        fence = self.engine.submit(x[:1], never_exit=True)
        eventually(lambda: fence in self.done, what="the fence")
        eventually(lambda: all(c.drawn == c.audited for c in self.engine.counters.snapshot()), what="audits")
        return ticket

    @property
    def counts(self) -> Any:
        return next(c for c in self.engine.counters.snapshot() if c.epoch == self.epoch)

    def records(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        block = eventually(lambda: b if (b := self.engine.ring.read(0)).next == n else None, what=f"{n} records")
        width = len(self.engine.bundle.columns)
        kinds = {
            "uncertainty": ("<f4", (n, width)),
            "prediction": ("<i4", (n, width)),
            "final": ("<i4", (n,)),
            "reference": ("<i4", (n,)),
        }
        return {
            name: np.frombuffer(base64.b64decode(getattr(block, name)), kind).reshape(shape)
            for name, (kind, shape) in kinds.items()
        }


@pytest.fixture
def service(wide_dir: Path, wide: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(wide_dir, wide, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def alone(folder: Path, file: str, x: Any) -> np.ndarray[Any, Any]:
    """What a graph of the bundle says by itself."""
    session = ort.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


# --- serving ---------------------------------------------------------------------------------------


def test_a_plan_of_int8_without_ramps_answers_with_int8(service: Service, wide_dir: Path) -> None:
    service.run(service.plan())
    x = bundles.inputs(60, seed=21)
    ticket = service.serve(x)
    int8, fp32 = (alone(wide_dir, name, x) for name in ("backbone.int8.onnx", "backbone.onnx"))
    np.testing.assert_allclose(ticket.logits, int8, rtol=1e-4, atol=1e-4)
    assert (top_labels(int8) != top_labels(fp32)).any()
    assert set(ticket.exits) == {"final"} and set(ticket.configs) == {service.plan().content_hash[:10]}


def test_a_plan_at_int8_leaves_at_int8_ramps_and_ends_with_int8(service: Service, sessions: Sessions) -> None:
    thresholds = {"int8/r00-grid": "0.4", "int8/r02-linear": "0.6"}
    service.run(service.plan(thresholds))
    x = bundles.inputs(200, seed=5)
    ticket, said = service.serve(x), sessions.tapped(x)
    ids = [c.id for c in sessions._bundle.columns]
    for row in range(len(x)):
        scores = {name: said.uncertainty[row, ids.index(name)] for name in thresholds}
        if min(abs(float(t) - scores[name]) for name, t in thresholds.items()) < 1e-4:
            continue  # another batch size may round to the other side
        left = next((name for name, t in thresholds.items() if scores[name] < np.float32(t)), "final")
        assert ticket.exits[row] == left
        column = ids.index("int8/final" if left == "final" else left)
        assert ticket.labels[row] == said.prediction[row, column]
    assert len(set(ticket.exits)) == 3


@pytest.mark.parametrize("execution", ["Auto", "ComputeSaving", "ResultsOnly"])
def test_a_precision_without_a_single_ramp_is_served(tmp_path: Path, execution: str) -> None:
    folder = bundles.write_wide_bundle(tmp_path / "bare", bare=True)
    bundle = load_bundle(folder)
    service = Service(folder, bundle, Sessions(bundle, threads=1))
    service.run(service.plan(execution=execution))
    x = bundles.inputs(20, seed=3)
    np.testing.assert_allclose(service.serve(x).logits, alone(folder, "backbone.int8.onnx", x), rtol=1e-4, atol=1e-4)
    service.engine.close()
    assert service.engine.join(30.0)


def test_a_row_that_overflows_at_a_lower_precision_is_answered_by_the_model(wide_dir: Path, tmp_path: Path) -> None:
    whole = onnx.load(wide_dir / "backbone.onnx")
    folder = bundles.write_wide_bundle(tmp_path / "wide", int8_model=overflowing(bundles.coarse(whole)), bare=True)
    bundle = load_bundle(folder)
    sessions = Sessions(bundle, threads=1)
    service = Service(folder, bundle, sessions)
    service.run(service.plan())
    x = bundles.inputs(20, seed=3)
    large = np.arange(20) % 4 == 0
    x[large, 0, 0, 0] = 100.0
    said, exact = alone(folder, "backbone.int8.onnx", x), alone(folder, "backbone.onnx", x)
    np.testing.assert_array_equal(np.isfinite(said).all(axis=1), ~large)
    expected = np.where(large[:, None], exact, said)
    np.testing.assert_allclose(service.serve(x).logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sessions.tapped(x).finals["int8"], top_labels(expected))
    service.engine.close()
    assert service.engine.join(30.0)


def overflowing(model: onnx.ModelProto) -> onnx.ModelProto:
    """A form of a model that says no numbers of inputs of about 100."""
    (output,) = model.graph.output
    model.graph.node[-1].output[0] = "finite"
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], axes=[2, 3], keepdims=0),
            helper.make_node("ReduceMax", ["most"], ["largest"], axes=[1], keepdims=1),
            helper.make_node("Exp", ["largest"], ["beyond"]),
            helper.make_node("Sub", ["beyond", "beyond"], ["nothing"]),
            helper.make_node("Add", ["finite", "nothing"], [output.name]),
        ]
    )
    return model


def test_exits_off_stays_the_exact_session_bit_for_bit(service: Service, sessions: Sessions) -> None:
    x = bundles.inputs(32, seed=2)
    service.run(service.plan({"int8/r00-grid": "0.5"}))
    service.serve(x)
    service.run(service.plan(precision="fp32"))
    np.testing.assert_array_equal(service.serve(x).logits, sessions.exact(x))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_at_the_input_answers_before_the_backbone_runs(
    service: Service, wide_dir: Path, precision: str
) -> None:
    service.run(service.plan({bundles.SMALL: EVERYONE}, precision=precision))
    runtime = service.engine.active.stable
    assert runtime is not None and runtime.stages[0].ramps == (0,)

    x = bundles.inputs(256, seed=1)[:40]  # the least certain of all that made the table does not leave; here nobody is
    x = x[service.engine.sessions.tapped(x).uncertainty[:, 0] < 0.99]
    stages = tuple(broken(stage, why="the backbone ran") if 0 not in stage.ramps else stage for stage in runtime.stages)
    service.engine.arms.active = replace(service.engine.active, stable=replace(runtime, stages=stages))
    ticket = service.serve(x)
    assert set(ticket.exits) == {bundles.SMALL} and service.counts.failed_batches == 0
    np.testing.assert_allclose(ticket.logits, alone(wide_dir, "ramp-in.small.onnx", x), rtol=1e-4, atol=1e-4)


def test_who_passes_the_model_at_the_input_goes_on_through_the_backbone(service: Service, sessions: Sessions) -> None:
    service.run(service.plan({bundles.SMALL: "0.5", "r00-grid": "0.3"}, precision="fp32"))
    x = bundles.inputs(200, seed=8)
    ticket, said = service.serve(x), sessions.tapped(x)
    assert {bundles.SMALL, "r00-grid", "final"} == set(ticket.exits)
    stayed = [i for i, name in enumerate(ticket.exits) if name == "final"]
    np.testing.assert_allclose(ticket.logits[stayed], said.logits[stayed], rtol=1e-4, atol=1e-4)


# --- audits and records ----------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_audits_count_where_int8_differs_from_the_model_as_it_was_given(
    service: Service, wide_dir: Path, execution: str
) -> None:
    service.run(service.plan({"int8/r00-grid": "0.3"}, execution=execution), audit_rate=1.0)
    x = bundles.inputs(150, seed=11)
    ticket = service.serve(x)
    reference = top_labels(alone(wide_dir, "backbone.onnx", x))
    at_the_end = np.array(ticket.exits) == "final"
    wrong = ticket.labels != reference
    assert (wrong & at_the_end).any()  # not only early exits may differ
    assert (service.counts.audited, service.counts.disagreements) == (150, int(wrong.sum()))


def test_results_only_at_int8_has_no_free_audits_because_its_end_is_not_the_reference(service: Service) -> None:
    service.run(service.plan({"int8/r00-grid": "0.3"}, execution="ResultsOnly"), audit_rate=0.0)
    ticket = service.serve(bundles.inputs(50, seed=3))
    assert (service.counts.drawn, service.counts.audited, set(ticket.audited)) == (0, 0, {False})


def test_one_pass_fills_all_columns_of_a_record(service: Service, wide_dir: Path, sessions: Sessions) -> None:
    service.run(service.plan({"int8/r00-grid": "0.3"}), audit_rate=1.0)
    x = bundles.inputs(64, seed=4)
    service.serve(x)
    kept, said = service.records(64), sessions.tapped(x)
    columns = [c.id for c in service.engine.bundle.columns]
    assert columns[0] == bundles.SMALL and columns[-1] == "int8/final"
    order = np.lexsort(kept["uncertainty"].T), np.lexsort(said.uncertainty.T)  # audits come in their own order
    np.testing.assert_allclose(kept["uncertainty"][order[0]], said.uncertainty[order[1]], atol=2e-4)
    for name, file in ((bundles.SMALL, "ramp-in.small.onnx"), ("int8/final", "backbone.int8.onnx")):
        expected = np.bincount(top_labels(alone(wide_dir, file, x)), minlength=5)
        assert np.bincount(kept["prediction"][:, columns.index(name)], minlength=5).tolist() == expected.tolist()
    assert (
        kept["final"] == kept["prediction"][:, -1]
    ).all()  # int8 served, so int8 has the last word, left early or not
    assert (kept["final"] != kept["reference"]).any()


def test_records_of_a_worker_are_a_records_file(service: Service) -> None:
    service.run(service.plan(precision="fp32"), audit_rate=1.0)
    service.serve(bundles.inputs(40, seed=6))
    bundle, kept = service.engine.bundle, service.records(40)
    records = records_from_arrays({**kept, **column_arrays(bundle.columns), **profile_arrays(bundle.profile)})
    assert records.at("int8").final_agrees.mean() == (kept["prediction"][:, -1] == kept["reference"]).mean() < 1
    assert records.final_agrees.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6], ids=str)
def test_a_row_that_is_not_finite_is_answered_by_the_exact_executor(
    service: Service, sessions: Sessions, value: float
) -> None:
    service.run(service.plan({bundles.SMALL: EVERYONE, "int8/r00-grid": EVERYONE}), audit_rate=1.0)
    x = bundles.inputs(8, seed=8)
    clean = service.serve(x)
    x[2, :, 0, 0] = value
    mixed = service.serve(x)
    np.testing.assert_array_equal(mixed.logits[2], sessions.exact(x[2:3])[0])
    assert mixed.exits[2] == "final"
    others = [i for i in range(8) if i != 2]
    np.testing.assert_allclose(mixed.logits[others], clean.logits[others], rtol=1e-4, atol=1e-4)
    alone_odd = service.serve(x[2:3])
    assert alone_odd.exits == ["final"]
    said = sessions.tapped(x[2:3])
    assert (said.uncertainty == 1.0).all()  # on records it leaves nowhere, as it does when served
    assert said.prediction[0, -1] == top_labels(said.logits)[0]


def test_a_row_of_nan_agrees_with_the_reference_that_has_no_answer_either(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0)
    x = np.full((3, *bundles.inputs(1).shape[1:]), np.nan, dtype=np.float32)
    ticket = service.serve(x)
    assert ticket.labels.tolist() == [NO_ANSWER] * 3
    assert (service.counts.audited, service.counts.disagreements) == (3, 0)


# --- what is refused -------------------------------------------------------------------------------


def test_a_ramp_of_another_precision_is_refused(service: Service) -> None:
    for thresholds, precision in (({"r00-grid": "0.5"}, "int8"), ({"int8/r00-grid": "0.5"}, "fp32")):
        with pytest.raises(PlanRefusedError, match=f"none of the loaded bundle's at {precision}") as refused:
            service.run(service.plan(thresholds, precision=precision))
        assert refused.value.reason == "UnknownRamp"
    with pytest.raises(PlanRefusedError, match="'int8/final' is none of") as refused:
        service.run(service.plan({"int8/final": "0.5"}))


def test_a_precision_that_the_bundle_does_not_have_is_refused(bundle_dir: Path, bundle: Bundle, tmp_path: Path) -> None:
    service = Service(bundle_dir, bundle, Sessions(bundle, threads=1))
    with pytest.raises(PlanRefusedError, match="precision int8 is not in the loaded bundle") as refused:
        service.run(service.plan())
    assert refused.value.reason == "Unsupported"
    service.engine.close()
    assert service.engine.join(30.0)


@pytest.fixture
def copy(wide_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide_dir, tmp_path / "copy"))


def rewritten(folder: Path, **changes: Any) -> None:
    """A manifest that fits the files as they are, but for some changes."""
    ramps, precisions = (changes.get("ramps", bundles.WIDE_RAMPS), changes.get("precisions", bundles.WIDE_PRECISIONS))
    bundles.write_manifest(folder, ramps, precisions)


def test_a_wide_bundle_has_the_columns_its_manifest_says(wide: Bundle) -> None:
    assert [c.id for c in wide.columns] == [
        "in.small",
        "r00-grid",
        "r00-linear",
        "r01-grid",
        "r02-linear",
        "int8/r00-grid",
        "int8/r02-linear",
        "int8/final",
    ]
    assert set(wide.backbones) == {"fp32", "int8"} and set(wide.side_models) == {0}
    assert wide.quantiles.shape[0] == 8


@pytest.mark.parametrize("name", ["backbone.int8.onnx", "ramp-in.small.onnx"])
def test_a_damaged_graph_is_refused_by_name(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(InvalidBundleError, match=f"^{name}: .*SHA-256"):
        load_bundle(copy)
    (copy / name).write_bytes(b"\x80\x04 not what it should be")
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match=f"^{name}: "):
        load_bundle(copy)


@pytest.mark.parametrize("name", ["backbone.int8.onnx", "ramp-in.small.onnx"])
def test_another_graph_is_another_ramp_set(copy: Path, wide: Bundle, name: str) -> None:
    model = onnx.load(copy / name)
    model.doc_string = "changed"
    (copy / name).write_bytes(model.SerializeToString())
    rewritten(copy)
    assert load_bundle(copy).manifest.ramp_set_digest != wide.manifest.ramp_set_digest
    bundles.edit_manifest(copy, ramp_set_digest=wide.manifest.ramp_set_digest)
    with pytest.raises(InvalidBundleError, match="ramp_set_digest is not the digest"):
        load_bundle(copy)


@pytest.mark.parametrize("name", ["backbone.int8.onnx", "ramp-in.small.onnx"])
def test_a_graph_with_another_input_or_output_is_refused_by_name(copy: Path, name: str) -> None:
    whole = onnx.load(copy / name)
    foreign = onnx.ModelProto()
    foreign.CopyFrom(whole)
    foreign.graph.input[0].name = "y"
    (copy / name).write_bytes(foreign.SerializeToString())
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match=f"^{name}: input is 'y'"):
        load_bundle(copy)
    weights = {t.name: t for t in whole.graph.initializer}
    last = onnx.numpy_helper.to_array(weights["w"])[:, :4]
    weights["w"].CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(last), "w"))
    weights["b"].CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.float32), "b"))
    del whole.graph.output[0].type.tensor_type.shape.dim[1:]
    whole.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 4
    (copy / name).write_bytes(whole.SerializeToString())
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match=rf"^{name}: its output on probe.npz is float32 \(8, 4\)"):
        Sessions(load_bundle(copy), threads=1)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, {"precision": "int8"}, "'in.small' is of precision 'int8'"),
        (0, {"tensor": "c0"}, "'in.small' is a model"),
        (1, {"id": "R00 Grid"}, "ramp id 'R00 Grid'"),
        (1, {"id": "r00-linear"}, "must be unique"),
        (1, {"precision": "int8"}, "must be sorted"),
        (5, {"position": 3}, "must be sorted"),
        (6, {"id": "int8/final"}, "none may be called like a final column"),
    ],
    ids=str,
)
def test_a_ramp_out_of_place_is_refused(copy: Path, number: int, change: dict[str, Any], message: str) -> None:
    ramps = list(bundles.WIDE_RAMPS)
    ramps[number] = replace(ramps[number], **change)
    rewritten(copy, ramps=tuple(ramps))
    with pytest.raises(InvalidBundleError, match=message):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../backbone.int8.onnx"}, "each needs one of its own in the bundle"),
        ({"file": "backbone.onnx"}, "each needs one of its own in the bundle"),
        ({"name": "fp32"}, "must differ"),
    ],
    ids=str,
)
def test_a_precision_out_of_place_is_refused(copy: Path, change: dict[str, Any], message: str) -> None:
    spec = replace(bundles.WIDE_PRECISIONS[0], **change)
    bundles.edit_manifest(copy, precisions=[{"name": spec.name, "file": spec.file, "method": spec.method}])
    with pytest.raises(InvalidBundleError, match=message):
        load_bundle(copy)


def test_missing_tables_costs_and_columns_are_named(copy: Path) -> None:
    tensors = dict(safetensors.numpy.load_file(copy / "ramps.safetensors"))
    assert "int8/r00-grid/w1" not in tensors  # it uses the weights of r00-grid
    saved = dict(tensors)
    del tensors["int8/final/quantiles"]
    safetensors.numpy.save_file(tensors, copy / "ramps.safetensors")
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match="tensor 'int8/final/quantiles' is missing"):
        load_bundle(copy)
    safetensors.numpy.save_file(saved, copy / "ramps.safetensors")
    profile = (copy / "profile.json").read_text()
    (copy / "profile.json").write_text(profile.replace('"int8"', '"int4"'))
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match=r"profile.json: does not price the precisions \['int8'\]"):
        load_bundle(copy)
    (copy / "profile.json").write_text(profile)
    with np.load(copy / "records.npz") as file:
        arrays = dict(file)
    arrays["ramp_id"] = np.array([name.replace("int8/r00-grid", "int8/r09-grid") for name in arrays["ramp_id"]])
    np.savez(copy / "records.npz", **arrays)
    rewritten(copy)
    with pytest.raises(InvalidBundleError, match=r"records.npz: does not have the int8 ramps"):
        load_bundle(copy)


def test_a_head_of_another_precision_may_have_weights_of_its_own(copy: Path, sessions: Sessions) -> None:
    tensors = dict(safetensors.numpy.load_file(copy / "ramps.safetensors"))
    for name in ("w1", "b1", "w2", "b2"):
        tensors[f"int8/r00-grid/{name}"] = -tensors[f"r00-grid/{name}"]
    safetensors.numpy.save_file(tensors, copy / "ramps.safetensors")
    rewritten(copy)
    x = bundles.inputs(50, seed=1)
    bundle = load_bundle(copy)
    column = [c.id for c in bundle.columns].index("int8/r00-grid")
    said, shared = Sessions(bundle, threads=1).tapped(x).prediction, sessions.tapped(x).prediction
    assert (said[:, column] != shared[:, column]).any()
    np.testing.assert_array_equal(np.delete(said, column, axis=1), np.delete(shared, column, axis=1))


@pytest.mark.slow
def test_a_graph_that_onnx_runtime_quantised_is_cut_and_served(tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Rows(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter([{"x": bundles.inputs(64, seed=9)}])

        def get_next(self) -> Any:
            return next(self.rows, None)

    source, target = bundles.write_bundle(tmp_path / "source") / "backbone.onnx", tmp_path / "int8.onnx"
    quantize_static(
        source,
        target,
        Rows(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )
    folder = bundles.write_wide_bundle(tmp_path / "wide", int8_model=onnx.load(target))
    bundle = load_bundle(folder)
    service = Service(folder, bundle, Sessions(bundle, threads=1))
    service.run(service.plan({"int8/r00-grid": "0.3", "int8/r02-linear": "0.3"}), audit_rate=1.0)
    x = bundles.inputs(200, seed=12)
    ticket, said = service.serve(x), service.engine.sessions.tapped(x)
    stayed = np.array(ticket.exits) == "final"
    assert 0 < stayed.sum() < 200
    assert (ticket.labels[stayed] == said.finals["int8"][stayed]).mean() > 0.98  # batch sizes round differently
    assert (said.finals["int8"] == said.finals["fp32"]).mean() > 0.9
    assert service.counts.audited == 200
    assert manifest_of(folder).precisions[0].name == "int8"
    service.engine.close()
    assert service.engine.join(30.0)
