"""Open Inference Protocol over gRPC against a real worker on loopback, with the real tritonclient."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from processes import WorkerProcess, document, eventually, plan_for
from tritonclient.grpc import service_pb2 as standard
from tritonclient.utils import InferenceServerException

from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.grpc import messages
from offramp_worker.grpc.service import read_request
from offramp_worker.http.tensors import parse_request

pytestmark = pytest.mark.slow  # real workers


@pytest.fixture(scope="module")
def worker_process(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """Under a plan that lets some rows leave early."""
    with WorkerProcess(bundle_dir, env={"OFFRAMP_GRPC_PORT": "0"}) as process:
        process.deliver(document(plan_for(bundle_dir, {"r02-linear": "0.5"}), audit_rate=1.0)).raise_for_status()
        yield process


@pytest.fixture
def client(worker_process: WorkerProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(worker_process)) as client:
        yield client


@pytest.fixture
def rest(worker_process: WorkerProcess) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(f"127.0.0.1:{worker_process.port('public')}") as client:
        yield client


def address(process: WorkerProcess) -> str:
    return f"127.0.0.1:{process.port('grpc')}"


def tensor(x: np.ndarray[Any, Any]) -> triton.InferInput:
    value = triton.InferInput("x", list(x.shape), "FP32")
    value.set_data_from_numpy(x)
    return value


@pytest.mark.parametrize("name", messages.MESSAGES)
def test_messages_have_the_fields_of_the_standard(name: str) -> None:
    theirs: Any = standard
    for part in name.split("."):
        theirs = getattr(theirs, part)
    assert _fields(messages.message(name)) == _fields(theirs)


def _fields(message: Any) -> dict[str, Any]:
    return {
        f.name: (
            f.number,
            f.type,
            f.is_repeated,
            f.message_type and f.message_type.full_name,
            f.containing_oneof is None,
        )
        for f in message.DESCRIPTOR.fields
    }


def test_tritonclient_gets_the_exact_answers_when_it_asks_for_them(
    client: triton.InferenceServerClient, sessions: Sessions
) -> None:
    x = bundles.inputs(5)
    result = client.infer("tiny", [tensor(x)], model_version="1", request_id="r-1", parameters={"exit": "never"})
    np.testing.assert_array_equal(result.as_numpy("logits"), sessions.exact(x))
    np.testing.assert_array_equal(result.as_numpy("label"), sessions.exact(x).argmax(axis=1))
    reply = result.get_response()
    assert (reply.id, reply.model_name, reply.model_version) == ("r-1", "tiny", "1")
    assert reply.parameters["exit"].string_param == "final,final,final,final,final"
    assert reply.parameters["config"].string_param == "exits-off"


def test_a_reply_tells_exit_config_arm_epoch_and_audit(
    client: triton.InferenceServerClient, worker_process: WorkerProcess
) -> None:
    for row in bundles.inputs(12, seed=5):
        over_rest = worker_process.infer(row[None])["parameters"]
        said = client.infer("tiny", [tensor(row[None])]).get_response().parameters
        assert {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in said.items()} == over_rest


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "id": {"request_id": "r-7"},
    "exit": {"parameters": {"exit": "never"}},
    "deadline": {"parameters": {"deadline_ms": 60_000}},
    "deadline-of-a-fraction": {"parameters": {"deadline_ms": 59_999.5}},
    "priority": {"priority": 3},
    "timeout": {"timeout": 20_000_000},
    "all": {
        "request_id": "r-8",
        "priority": 2**32 - 1,
        "timeout": 30_000_000,
        "parameters": {"exit": "never", "deadline_ms": 1e4},
    },
}
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "exit": {"parameters": {"exit": "early"}},
    "no-deadline": {"parameters": {"deadline_ms": 0}},
    "deadline-as-text": {"parameters": {"deadline_ms": "10"}},
    "deadline-beyond-a-day": {"parameters": {"deadline_ms": 1e12}},
    "priority": {"priority": 2**32},
    "negative-timeout": {"timeout": -5},
    "timeout-beyond-a-day": {"timeout": 2**62},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_third_partys_requests_mean_the_same_over_grpc_and_rest(bundle: Bundle, name: str) -> None:
    options = {"request_id": "", "priority": 0, "timeout": None, "parameters": None} | OPTIONS[name]
    x = bundles.inputs(2)
    over_grpc = read_request(_as_triton_asks(x, options), spec=bundle.manifest.inputs[0], max_rows=8)
    value = triton_http.InferInput("x", list(x.shape), "FP32")
    value.set_data_from_numpy(x)
    body, length = triton_http.InferenceServerClient.generate_request_body([value], **options)
    over_rest = parse_request(body, header_length=length, spec=bundle.manifest.inputs[0], max_rows=8)
    np.testing.assert_array_equal(over_grpc.x, over_rest.x)
    blank = np.empty(0)
    # The binary form of outputs is said in the request over REST, and by the form of the input over gRPC.
    assert replace(over_grpc, x=blank, outputs=()) == replace(over_rest, x=blank, outputs=())
    if name == "all":
        assert (over_grpc.priority, over_grpc.timeout_seconds, over_grpc.deadline_seconds) == (2**32 - 1, 30.0, 10.0)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_third_party_is_told_the_same_over_grpc_and_rest(
    client: triton.InferenceServerClient, rest: triton_http.InferenceServerClient, name: str
) -> None:
    x = bundles.inputs(3, seed=4)
    value = triton_http.InferInput("x", list(x.shape), "FP32")
    value.set_data_from_numpy(x)
    over_rest = rest.infer("tiny", [value], **OPTIONS[name])
    over_grpc = client.infer("tiny", [tensor(x)], **OPTIONS[name])
    np.testing.assert_allclose(over_grpc.as_numpy("logits"), over_rest.as_numpy("logits"), rtol=1e-5, atol=1e-5)
    said = over_grpc.get_response()
    told = {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in said.parameters.items()}
    assert told == over_rest.get_response()["parameters"] and said.id == over_rest.get_response().get("id", "")
    assert ("deadline" in told) == ("deadline_ms" in (OPTIONS[name].get("parameters") or {}))


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_third_party_is_refused_in_the_same_words_over_grpc_and_rest(
    client: triton.InferenceServerClient, rest: triton_http.InferenceServerClient, name: str
) -> None:
    x = bundles.inputs(1)
    value = triton_http.InferInput("x", list(x.shape), "FP32")
    value.set_data_from_numpy(x)
    with pytest.raises(InferenceServerException) as over_rest:
        rest.infer("tiny", [value], **BAD_OPTIONS[name])
    with pytest.raises(InferenceServerException) as over_grpc:
        client.infer("tiny", [tensor(x)], **BAD_OPTIONS[name])
    assert over_grpc.value.message() == over_rest.value.message()
    assert over_grpc.value.message().startswith("parameters.")
    assert (over_rest.value.status(), over_grpc.value.status()) == ("400", "StatusCode.INVALID_ARGUMENT")


def _as_triton_asks(x: np.ndarray[Any, Any], options: dict[str, Any]) -> Any:
    """What tritonclient puts on the wire, caught by a server that answers nothing."""
    caught: list[Any] = []

    def infer(request: Any, context: Any) -> Any:
        caught.append(request)
        context.abort(grpc.StatusCode.CANCELLED, "caught")

    handler = grpc.unary_unary_rpc_method_handler(
        infer, request_deserializer=messages.message("ModelInferRequest").FromString
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, {"ModelInfer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client, pytest.raises(InferenceServerException):
            client.infer("tiny", [tensor(x)], **options)
    finally:
        server.stop(None).wait()
    return caught[0]


def test_health_and_metadata_are_those_of_the_rest_port(
    client: triton.InferenceServerClient, worker_process: WorkerProcess
) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
    assert client.get_server_metadata(as_json=True) == worker_process.public.get("/v2").json()
    over_rest = worker_process.public.get("/v2/models/tiny").json()
    metadata = client.get_model_metadata("tiny")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", "FP32", [-1, 3, 14, 14])]
    assert [t.name for t in metadata.outputs] == [t["name"] for t in over_rest["outputs"]]


def test_typed_contents_are_answered_in_typed_contents(worker_process: WorkerProcess, sessions: Sessions) -> None:
    x = bundles.inputs(2)
    request = _request(x)
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(x.reshape(-1).tolist())
    request.outputs.add(name="label")
    reply = _call(worker_process, request)
    assert list(reply.outputs[0].contents.int64_contents) == sessions.exact(x).argmax(axis=1).tolist()
    assert not reply.raw_output_contents


def _mended(**changes: Any) -> Any:
    """A good request with one thing wrong."""
    request = _request(bundles.inputs(1))
    for path, value in changes.items():
        holder: Any = request
        *parents, last = path.split("__")
        for name in parents:
            holder = holder[0] if name == "first" else getattr(holder, name)
        if isinstance(value, list):
            del getattr(holder, last)[:]
            getattr(holder, last).extend(value)
        else:
            setattr(holder, last, value)
    return request


def _with_parameter(key: str, **value: Any) -> Any:
    request = _request(bundles.inputs(1))
    for kind, content in value.items():
        setattr(request.parameters[key], kind, content)
    if not value:
        request.parameters[key].SetInParent()
    return request


def _two_inputs() -> Any:
    request = _request(bundles.inputs(1))
    request.inputs.add(name="y")
    return request


def _without_values() -> Any:
    request = _mended(raw_input_contents=[])
    request.inputs[0].contents.fp32_contents.extend([0.5] * 10)
    return request


BAD = {
    "two-inputs": (_two_inputs, "inputs: must be a list of exactly one"),
    "other-name": (lambda: _mended(inputs__first__name="y"), "inputs[0].name: is 'y'"),
    "other-datatype": (lambda: _mended(inputs__first__datatype="INT8"), "inputs[0].datatype: is 'INT8'"),
    "other-shape": (lambda: _mended(inputs__first__shape=[1, 3, 14, 15]), "inputs[0].shape: is [1, 3, 14, 15]"),
    "no-rows": (lambda: _mended(inputs__first__shape=[0, 3, 14, 14]), "inputs[0].shape: has 0 rows"),
    "huge": (lambda: _mended(inputs__first__shape=[2**62, 3, 14, 14]), "inputs[0].shape: has 4611686018427387904 rows"),
    "too-few-bytes": (lambda: _mended(raw_input_contents=[b"123"]), "raw_input_contents[0]: has 3 bytes"),
    "two-tensors": (lambda: _mended(raw_input_contents=[b"", b""]), "raw_input_contents: must have one entry"),
    "no-values": (lambda: _mended(raw_input_contents=[]), "inputs[0].contents.fp32_contents: has 0 values"),
    "too-few-values": (_without_values, "inputs[0].contents.fp32_contents: has 10 values"),
    "unknown-exit": (lambda: _with_parameter("exit", string_param="maybe"), "parameters.exit: is 'maybe'"),
    "empty-parameter": (lambda: _with_parameter("exit"), "parameters.exit: has no value"),
    "unknown-output": (
        lambda: _mended(outputs=[standard.ModelInferRequest.InferRequestedOutputTensor(name="p")]),
        "outputs[0].name: is 'p'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_request_is_an_invalid_argument_that_names_the_field(
    worker_process: WorkerProcess, name: str
) -> None:
    build, message = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        _call(worker_process, build())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(message)


def test_unknown_models_versions_and_methods_are_told_as_such(
    worker_process: WorkerProcess, client: triton.InferenceServerClient
) -> None:
    for arguments in (("other",), ("tiny", "2")):
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_metadata(*arguments)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException) as caught:
        client.get_cuda_shared_memory_status()
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_bytes_that_are_no_message_harm_nobody(worker_process: WorkerProcess) -> None:
    with grpc.insecure_channel(address(worker_process)) as channel:
        method = channel.unary_unary(f"/{messages.SERVICE}/ModelInfer")
        for junk in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b""):
            with pytest.raises(grpc.RpcError):
                method(junk, timeout=10)
    with socket.create_connection(("127.0.0.1", worker_process.port("grpc")), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.recv(100)
    assert worker_process.is_ready()


def test_many_grpc_and_rest_clients_at_once_get_their_own_answers(
    worker_process: WorkerProcess, sessions: Sessions
) -> None:
    x = bundles.inputs(80)
    expected = sessions.exact(x).argmax(axis=1)
    wrong: list[int] = []

    def ask(rows: range) -> None:
        with triton.InferenceServerClient(address(worker_process)) as client:
            for row in rows:
                over_grpc = client.infer("tiny", [tensor(x[row : row + 1])], parameters={"exit": "never"})
                over_rest = worker_process.infer(x[row : row + 1], parameters={"exit": "never"})
                if not over_grpc.as_numpy("label")[0] == over_rest["label"][0] == expected[row]:
                    wrong.append(row)

    threads = [threading.Thread(target=ask, args=(range(i, 80, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_broken_bundle_is_unavailable(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "b")
    (folder / "ramps.safetensors").write_bytes(b"tampered")
    with WorkerProcess(folder, env={"OFFRAMP_GRPC_PORT": "0"}, wait_ready=False) as process:
        eventually(lambda: process.state().message, what="the reason")
        with pytest.raises(grpc.RpcError) as caught:
            _call(process, _request(bundles.inputs(1)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details().startswith("ramps.safetensors: ")
        with triton.InferenceServerClient(address(process)) as client:
            assert client.is_server_live() and not client.is_server_ready()
    assert process.process.returncode == 0


def test_without_a_grpc_port_the_library_is_not_even_loaded(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        maps = Path(f"/proc/{process.process.pid}/maps").read_text()
        assert "cygrpc" not in maps
        assert [line["name"] for line in process.events("listening")] == ["public"]


def _request(x: np.ndarray[Any, Any]) -> Any:
    request = standard.ModelInferRequest(model_name="tiny", raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    return request


def _call(process: WorkerProcess, request: Any) -> Any:
    with grpc.insecure_channel(address(process)) as channel:
        method = channel.unary_unary(
            f"/{messages.SERVICE}/ModelInfer",
            request_serializer=standard.ModelInferRequest.SerializeToString,
            response_deserializer=standard.ModelInferResponse.FromString,
        )
        return method(request, timeout=30)


def test_what_cannot_be_taken_or_runs_out_of_time_is_told_with_its_own_code(
    worker_process: WorkerProcess, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("tiny", [tensor(bundles.inputs(1))], timeout=1)  # microseconds
    assert caught.value.status() in (
        "StatusCode.UNAVAILABLE",
        "StatusCode.RESOURCE_EXHAUSTED",
        "StatusCode.DEADLINE_EXCEEDED",
    )
    many = np.zeros((1024, *bundles.inputs(1).shape[1:]), dtype=np.float32)
    codes: list[grpc.StatusCode] = []

    def ask() -> None:
        try:
            _call(worker_process, _request(many))
        except grpc.RpcError as error:
            codes.append(error.code())

    def full_once() -> bool:
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return bool(codes)

    eventually(full_once, what="a full queue")
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
