"""Inputs of eight bits and of half precision, from `offramp prepare` to what every door takes, tells and refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import onnx
import prepared
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from processes import WorkerProcess, document, eventually, plan_for
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from offramp_core.bundle import TensorSpec
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.prepare.captured import read_captures
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import refresh_bundle
from offramp_worker.prepare.source.halves import has_halves, in_single_precision
from offramp_worker.prepare.source.sources import load_backbone

FORMS = {"UINT8": "onnx", "FP16": "pt2"}


@dataclass(frozen=True)
class Served:
    """A worker, and everything about it."""

    datatype: str
    bundle: Bundle
    process: WorkerProcess
    captures: Path
    epochs: Iterator[int]

    def deliver(self, *, audit_rate: float) -> int:
        """A plan that lets some rows leave; its epoch."""
        ids = [ramp.id for ramp in self.bundle.ramps if not ramp.precision]
        plan, epoch = plan_for(self.bundle.path, {ids[0]: "0.3", ids[-1]: "0.5"}), next(self.epochs)
        asked = document(plan, epoch=epoch, audit_rate=audit_rate, capture_since=0.0)
        self.process.deliver(asked).raise_for_status()
        return epoch

    def rows(self, n: int, *, seed: int) -> np.ndarray:
        return inputs.rows(self.datatype, n, seed=seed)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """What the model itself says of rows."""
        return open_session(self.bundle.backbone, threads=1).run(None, {self.bundle.manifest.inputs[0].name: x})[0]

    def tensor(self, x: np.ndarray, **fields: Any) -> dict[str, Any]:
        name = self.bundle.manifest.inputs[0].name
        return {"name": name, "datatype": self.datatype, "shape": list(x.shape), **fields}

    def send(self, tensor: dict[str, Any], binary: bytes = b"", **fields: Any) -> Any:
        """One request over REST, with binary data behind its JSON."""
        header = json.dumps({"inputs": [tensor], **fields}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))} if binary else {}
        return self.process.public.post("/v2/models/tiny/infer", content=header + binary, headers=headers)

    def send_binary(self, x: np.ndarray, **fields: Any) -> Any:
        return self.send(self.tensor(x, parameters={"binary_data_size": x.nbytes}), x.tobytes(), **fields)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models by datatype and form, each exported once."""
    return cache(lambda datatype, form: inputs.save_model(tmp_path_factory.mktemp("model"), datatype, form))


@pytest.fixture(scope="module")
def bundle_of(model_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bundles by datatype, each prepared once."""

    @cache
    def make(datatype: str) -> Bundle:
        folder = tmp_path_factory.mktemp(datatype)
        np.savez(folder / "data.npz", x=inputs.rows(datatype, 800, seed=3))
        request = PrepareRequest(
            model_of(datatype, FORMS[datatype]),
            str(folder / "data.npz"),
            folder / "bundle",
            name="tiny",
            head_share=0.3,
            profile_seconds=0.3,
            compile_limit=0,
            precision="auto" if datatype == "UINT8" else "exact",
        )
        prepare_bundle(request, Reporter(io.StringIO()))
        return load_bundle(folder / "bundle")

    return make


@pytest.fixture(scope="module", params=FORMS)
def served(
    request: pytest.FixtureRequest, bundle_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    bundle, captures = bundle_of(request.param), tmp_path_factory.mktemp("captures")
    env = {"OFFRAMP_GRPC_PORT": "0", "OFFRAMP_CACHE_BYTES": "1000000", "OFFRAMP_CAPTURE_DIR": str(captures)}
    with WorkerProcess(bundle.path, env=env) as process:
        yield Served(request.param, bundle, process, captures, count(1))


@pytest.mark.slow
class TestServed:
    def test_metadata_tells_the_type_on_both_ports(self, served: Served) -> None:
        name = served.bundle.manifest.inputs[0].name
        told = {"name": name, "datatype": served.datatype, "shape": [-1, 1, prepared.SIZE, prepared.SIZE]}
        assert served.process.public.get("/v2/models/tiny").json()["inputs"] == [told]
        with client(served) as grpc:
            (tensor,) = grpc.get_model_metadata("tiny").inputs
        assert {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} == told

    def test_rows_are_answered_and_audited_as_the_model_answers_them(self, served: Served) -> None:
        x, epoch = served.rows(200, seed=9), served.deliver(audit_rate=1.0)
        said, exits = [], []
        for rows in np.array_split(x, 5):
            reply = served.send_binary(rows)
            assert reply.status_code == 200, reply.text
            said.append(np.array(output(reply, "logits")).reshape(len(rows), -1))
            exits += reply.json()["parameters"]["exit"].split(",")
        logits, left = np.concatenate(said), np.array([name != "final" for name in exits])
        assert 0 < left.mean() < 1
        np.testing.assert_allclose(logits[~left], served.outputs(x)[~left], rtol=1e-4, atol=1e-4)
        wrong = int((logits.argmax(axis=1) != served.outputs(x).argmax(axis=1)).sum())

        def audited() -> Any:
            (counts,) = [c for c in served.process.observations().counts if c.epoch == epoch and c.arm == "stable"]
            return counts if counts.audited == len(x) else None

        assert eventually(audited, what="audits").disagreements == wrong

        def captured() -> np.ndarray | None:
            kept = read_captures(served.captures, served.bundle).x
            return kept if len(kept) >= len(x) else None

        kept = eventually(lambda: captured() is not None, what="captures") and captured()
        assert kept.dtype == x.dtype
        assert {row.tobytes() for row in x} <= {row.tobytes() for row in kept}

    def test_every_door_gives_the_same_answer(self, served: Served) -> None:
        x = served.rows(3, seed=11)
        answers = [output(served.send_binary(x, parameters={"exit": "never"}), "logits"), raw(served, x)]
        if served.datatype == "UINT8":
            for data in (x.tolist(), x.reshape(-1).tolist()):
                reply = served.send(served.tensor(x, data=data), parameters={"exit": "never"})
                answers.append(output(reply, "logits"))
            answers.append(typed(served, x.reshape(-1).tolist()))
        for answer in answers:
            np.testing.assert_allclose(np.array(answer).reshape(3, -1), served.outputs(x), rtol=1e-5, atol=1e-5)

    def test_a_large_request_in_json_is_read_in_pieces(self, served: Served) -> None:
        x = served.rows(400, seed=17)
        reply = served.send(
            served.tensor(x, data=x.astype(float).tolist() if served.datatype == "FP16" else x.tolist())
        )
        if served.datatype == "FP16":
            assert reply.status_code == 400
            assert "inputs[0].data: the protocol has no JSON form of FP16" in reply.json()["error"]
        else:
            assert reply.status_code == 200, reply.text

    def test_an_input_that_was_seen_is_answered_from_the_cache(self, served: Served) -> None:
        x = served.rows(1, seed=13)
        served.deliver(audit_rate=0.0)  # drawn audits run
        first = served.send_binary(x)
        assert "cached" not in first.json()["parameters"]

        def again() -> Any:  # an answer of the plan before is forgotten when the next one comes into force
            reply = served.send_binary(x)
            return reply if "cached" in reply.json()["parameters"] else None

        second = eventually(again, what="an answer from the cache")
        assert second.json()["parameters"]["cached"] is True
        assert output(first, "logits") == output(second, "logits")

    def test_what_the_input_does_not_hold_is_refused_with_its_field(self, served: Served) -> None:
        x, name = served.rows(2, seed=15), served.bundle.manifest.inputs[0].name
        wide = x.astype(np.float32)
        cases = [
            (served.tensor(x) | {"datatype": "FP32"}, wide.tobytes(), f"inputs[0].datatype: is 'FP32'; {name!r} takes"),
            (served.tensor(x[:, :, :8]), b"", f"inputs[0].shape: is [2, 1, 8, 16]; {name!r} takes [n, 1, 16, 16]"),
            (served.tensor(x), wide.tobytes(), "inputs[0].parameters.binary_data_size: is 2048; shape and datatype"),
        ]
        for tensor, binary, error in cases:
            size = {"parameters": {"binary_data_size": len(binary)}} if binary else {"data": []}
            reply = served.send(tensor | size, binary)
            assert reply.status_code == 400
            assert reply.json()["error"].startswith(error)

    def test_numbers_in_json_are_of_the_type_or_refused(self, served: Served) -> None:
        x = np.zeros((1, 1, 16, 16))
        refused = {"FP16": dict.fromkeys([0.5, 1], "the protocol has no JSON form of FP16; send binary data")}
        refused["UINT8"] = {
            256: "has a value outside of uint8",
            -1: "has a value outside of uint8",
            0.5: "has a value of type fraction; the tensor holds uint8",
            True: "has a value of type boolean",
            "a": "has a value of type string",
        }
        for value, error in refused[served.datatype].items():
            data = [value, *x.reshape(-1)[1:].astype(int).tolist()]
            reply = served.send(served.tensor(x, data=data))
            assert reply.status_code == 400
            assert f"inputs[0].data: {error}" in reply.json()["error"]

    def test_contents_over_grpc_are_of_the_type_or_refused(self, served: Served) -> None:
        values = {"UINT8": [256], "FP16": [0]}[served.datatype] + [0] * 255
        error = {"UINT8": r"uint_contents: has a value outside of UINT8", "FP16": r"cannot hold FP16; send raw_input"}
        with pytest.raises(InferenceServerException, match=error[served.datatype]):
            typed(served, values)


def client(served: Served) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(f"127.0.0.1:{served.process.port('grpc')}")


def raw(served: Served, x: np.ndarray) -> np.ndarray:
    value = triton.InferInput(served.bundle.manifest.inputs[0].name, list(x.shape), served.datatype)
    value.set_data_from_numpy(x)
    with client(served) as grpc:
        return grpc.infer("tiny", [value], parameters={"exit": "never"}).as_numpy("logits")


def typed(served: Served, values: list[int]) -> list[float]:
    """A request whose values stand in the typed field; what its reply says likewise."""
    request = service_pb2.ModelInferRequest(model_name="tiny")
    request.parameters["exit"].string_param = "never"
    shape = [len(values) // 256, 1, 16, 16]
    tensor = request.inputs.add(name=served.bundle.manifest.inputs[0].name, datatype=served.datatype, shape=shape)
    tensor.contents.uint_contents.extend(values)
    with client(served) as grpc:
        try:
            reply = grpc._client_stub.ModelInfer(request)
        except triton.grpc.RpcError as error:
            raise InferenceServerException(error.details()) from error
    return list(reply.outputs[0].contents.fp32_contents)


def output(reply: Any, name: str) -> list[float]:
    assert reply.status_code == 200, reply.text
    return next(o["data"] for o in reply.json()["outputs"] if o["name"] == name)


@pytest.mark.slow
@pytest.mark.parametrize("datatype", FORMS)
def test_heads_are_trained_again_on_inputs_of_the_type_alone(bundle_of: Any, datatype: str, tmp_path: Path) -> None:
    bundle = bundle_of(datatype)
    np.savez(tmp_path / "data.npz", x=inputs.rows(datatype, 600, seed=21))
    request = PrepareRequest(str(bundle.path), str(tmp_path / "data.npz"), tmp_path / "new", head_share=0.3)
    report = refresh_bundle(request, Reporter(io.StringIO()))
    assert report.ramp_set_digest != bundle.manifest.ramp_set_digest
    assert load_bundle(tmp_path / "new").input_dtype == inputs.TYPES[datatype]
    np.savez(tmp_path / "data.npz", x=np.ones((600, 1, 16, 16), np.int64))
    with pytest.raises(InvalidArgumentError, match=rf"has rows of int64 .* takes {datatype} \[1, 16, 16\]"):
        refresh_bundle(request, Reporter(io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("datatype", FORMS)
def test_data_of_another_kind_than_the_models_input_is_refused(model_of: Any, datatype: str) -> None:
    for form in ("onnx", "pt2"):
        model, other = model_of(datatype, form), "FP16" if datatype == "UINT8" else "UINT8"
        held, taken = np.dtype(inputs.TYPES[other]), np.dtype(inputs.TYPES[datatype])
        with pytest.raises(InvalidArgumentError, match=f"data x holds {held}; the model takes {taken}"):
            load_backbone(model, inputs.rows(other, 20, seed=1))
    if datatype == "FP16":
        found = load_backbone(model, prepared.images(20, seed=1)[0])  # floats of another width are rounded
        assert found.input.datatype == "FP16"
        with pytest.raises(InvalidArgumentError, match="data x holds numbers beyond 65504"):
            load_backbone(model, np.full((20, 1, 16, 16), 1e5, np.float32))


@pytest.mark.slow
def test_a_float32_model_takes_halves_and_no_bytes(tmp_path: Path) -> None:
    model = prepared.save_model(tmp_path)
    assert load_backbone(model, prepared.images(20, seed=1)[0].astype(np.float16)).input.datatype == "FP32"
    with pytest.raises(InvalidArgumentError, match="data x holds uint8; the model takes float32"):
        load_backbone(model, inputs.rows("UINT8", 20, seed=1))


def test_an_input_that_the_protocol_cannot_carry_is_refused_by_its_name(tmp_path: Path) -> None:
    model = inputs.scores(TensorProto.INT8)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelRefusedError, match=r"input 'x' is int8; supported are float32, float16, uint8 and token"):
        load_backbone(str(tmp_path / "m.onnx"), np.ones((20, 4), np.float32))


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_a_graph_of_halves_is_computed_in_float32_and_keeps_its_input(kind: int) -> None:
    model = inputs.scores(kind)
    single = in_single_precision(model)
    onnx.checker.check_model(single, full_check=True)
    assert single.graph.input[0].type.tensor_type.elem_type == kind
    assert single.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert has_halves(single) == (kind == TensorProto.FLOAT16)
    x = np.random.default_rng(2).normal(0, 1, (5, 4)).astype(np.float16).astype(helper.tensor_dtype_to_np_dtype(kind))
    weight = np.linspace(-1, 1, 12, dtype=np.float16).reshape(4, 3).astype(np.float32)
    expected = (x.astype(np.float32) + 1) @ weight
    np.testing.assert_allclose(prepared.run(single, x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(prepared.run(model, x), expected, rtol=1e-2, atol=1e-2)


def test_rows_of_halves_that_are_not_finite_never_leave() -> None:
    known = np.full((2, 4), 900, np.float16)  # a thousand times as much is more than a half can hold
    x = np.zeros((4, 4), np.float16)
    x[1, 2], x[2, 0], x[3, 3] = np.inf, np.nan, 65504
    usual = UsualInputs(TensorSpec("x", "FP16", (4,)), known).rows(x)
    assert usual is not None
    assert usual.tolist() == [True, False, False, True]
