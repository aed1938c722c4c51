"""Open Inference Protocol against a real worker on loopback, with the real tritonclient."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from processes import START_SECONDS, WorkerProcess, document, eventually, infer_json, plan_for
from prometheus_client.parser import text_string_to_metric_families

from offramp_core.errors import InvalidArgumentError
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.settings import settings_from_env

ROW = bundles.CHANNELS * bundles.SIZE * bundles.SIZE


@pytest.fixture(scope="module")
def plain(bundle_dir: Path) -> Iterator[WorkerProcess]:
    """A worker without a control plane, shared by tests that leave no trace in it."""
    with WorkerProcess(bundle_dir, control_plane=False) as process:
        yield process


# --- tritonclient ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("binary_input", [True, False], ids=["binary-input", "json-input"])
@pytest.mark.parametrize("binary_output", [True, False], ids=["binary-output", "json-output"])
def test_tritonclient_gets_the_exact_answers(
    plain: WorkerProcess, sessions: Sessions, binary_input: bool, binary_output: bool
) -> None:
    x = bundles.inputs(5)
    with triton.InferenceServerClient(plain.address) as client:
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x, binary_data=binary_input)
        outputs = [triton.InferRequestedOutput(n, binary_data=binary_output) for n in ("label", "logits")]
        result = client.infer("tiny", [tensor], outputs=outputs, request_id="r-1")
    np.testing.assert_array_equal(result.as_numpy("logits"), sessions.exact(x))
    np.testing.assert_array_equal(result.as_numpy("label"), sessions.exact(x).argmax(axis=1))
    reply = result.get_response()
    assert reply["id"] == "r-1"
    assert reply["parameters"] == {
        "exit": "final,final,final,final,final",
        "config": "exits-off",
        "arm": "stable",
        "epoch": 0,
        "audited": False,
    }


def test_tritonclient_reads_health_and_metadata(plain: WorkerProcess) -> None:
    with triton.InferenceServerClient(plain.address) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("tiny")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        metadata = client.get_model_metadata("tiny")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 14, 14]}]
    assert [o["name"] for o in metadata["outputs"]] == ["logits", "label"]


@pytest.mark.slow
def test_many_clients_at_once_get_their_own_answers(plain: WorkerProcess, sessions: Sessions) -> None:
    x = bundles.inputs(160)
    expected = sessions.exact(x)
    wrong: list[int] = []

    def ask(rows: range) -> None:
        with httpx.Client(base_url=f"http://{plain.address}", timeout=60) as client:
            for row in rows:
                reply = client.post("/v2/models/tiny/infer", json=infer_json(x[row : row + 1])).json()
                if not np.allclose(reply["outputs"][0]["data"], expected[row], rtol=1e-4, atol=1e-4):
                    wrong.append(row)

    threads = [threading.Thread(target=ask, args=(range(i, 160, 8),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nested_json_unknown_fields_and_a_chosen_output_are_understood(
    plain: WorkerProcess, sessions: Sessions
) -> None:
    x = bundles.inputs(2)
    body = infer_json(
        x, surprise=1, parameters={"exit": "never", "priority": 3}, outputs=[{"name": "label", "extra": {}}]
    )
    body["inputs"][0]["data"] = x.tolist()
    reply = plain.public.post("/v2/models/tiny/infer", content=json.dumps(body)).json()  # no Content-Type
    assert reply["outputs"] == [
        {"name": "label", "datatype": "INT64", "shape": [2], "data": sessions.exact(x).argmax(axis=1).tolist()}
    ]


def test_a_request_with_a_deadline_is_told_whether_it_came(plain: WorkerProcess) -> None:
    body = infer_json(bundles.inputs(2), parameters={"deadline_ms": 60_000.5})
    reply = plain.public.post("/v2/models/tiny/infer", json=body)
    assert reply.status_code == 200 and reply.json()["parameters"]["deadline"] is False
    reply = plain.public.post("/v2/models/tiny/infer", json=infer_json(bundles.inputs(2)))
    assert "deadline" not in reply.json()["parameters"]


@pytest.mark.slow
def test_where_everyone_is_to_be_answered_in_time_a_late_row_gets_the_ramps_answer_and_is_told(
    bundle_dir: Path,
) -> None:
    in_time = {"OFFRAMP_DEADLINE_ANSWERS": "always", "OFFRAMP_LATENCY_SECONDS": "0.00001"}
    with WorkerProcess(bundle_dir, env=in_time) as process:
        nobody = plan_for(bundle_dir, {"r00-grid": "0.000001"})
        process.deliver(document(nobody, audit_rate=0.0)).raise_for_status()
        late = process.infer(bundles.inputs(3))["parameters"]
        assert (late["exit"], late["deadline"]) == ("r00-grid,r00-grid,r00-grid", True)
        exact = process.infer(bundles.inputs(3), parameters={"exit": "never"})["parameters"]
        assert exact["exit"] == "final,final,final" and "deadline" not in exact


@pytest.mark.parametrize("wish", [0, -1, True, "10", [], 1e12])
def test_a_deadline_that_is_no_time_gets_a_400(plain: WorkerProcess, wish: Any) -> None:
    reply = plain.public.post(
        "/v2/models/tiny/infer", json=infer_json(bundles.inputs(1), parameters={"deadline_ms": wish})
    )
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("parameters.deadline_ms: is ")


# --- bad input -------------------------------------------------------------------------------------


def _with(**fields: Any) -> dict[str, Any]:
    """A good request whose tensor has other fields; None leaves one out."""
    tensor = {**infer_json(bundles.inputs(1))["inputs"][0], **fields}
    return {"inputs": [{k: v for k, v in tensor.items() if v is not None}]}


NUMBERS = [0.5] * ROW
MALFORMED = {
    "no-json": (b"{", "body: is no JSON"),
    "empty": (b"", "body: is no JSON"),
    "no-object": ([], "body: must be a JSON object"),
    "no-inputs": ({}, "inputs: must be a list"),
    "two-inputs": ({"inputs": [{}, {}]}, "inputs: must be a list of exactly one"),
    "input-no-object": ({"inputs": [3]}, "inputs[0]: must be an object"),
    "other-name": (_with(name="y"), "inputs[0].name: is 'y'"),
    "no-name": (_with(name=None), "inputs[0].name: is None"),
    "other-datatype": (_with(datatype="INT8"), "inputs[0].datatype: is 'INT8'"),
    "no-shape": (_with(shape=None), "inputs[0].shape: must be a list"),
    "shape-of-text": (_with(shape=["1", 3, 14, 14]), "inputs[0].shape: must be a list"),
    "shape-of-booleans": (_with(shape=[True, 3, 14, 14]), "inputs[0].shape: must be a list"),
    "shape-too-short": (_with(shape=[3, 14, 14]), "inputs[0].shape: is [3, 14, 14]"),
    "shape-other-size": (_with(shape=[1, 3, 14, 15]), "inputs[0].shape: is [1, 3, 14, 15]"),
    "no-rows": (_with(shape=[0, 3, 14, 14], data=[]), "inputs[0].shape: has 0 rows"),
    "negative-rows": (_with(shape=[-1, 3, 14, 14]), "inputs[0].shape: has -1 rows"),
    "huge-rows": (_with(shape=[10**15, 3, 14, 14]), "inputs[0].shape: has 1000000000000000 rows"),
    "no-data": (_with(data=None), "inputs[0].data: must be a list"),
    "data-no-list": (_with(data="0.5"), "inputs[0].data: must be a list"),
    "data-too-short": (_with(data=NUMBERS[1:]), "inputs[0].data: does not match"),
    "data-ragged": (_with(data=[[NUMBERS[: ROW // 3], NUMBERS[: ROW // 3], [0.5]]]), "inputs[0].data: does not match"),
    "data-text": (_with(data=["x" * 1_000_000, *NUMBERS[1:]]), "inputs[0].data: has a value of type string"),
    "data-null": (_with(data=[None, *NUMBERS[1:]]), "inputs[0].data: has a value of type null"),
    "data-boolean": (_with(data=[True, *NUMBERS[1:]]), "inputs[0].data: has a value of type boolean"),
    "data-object": (_with(data=[{}, *NUMBERS[1:]]), "inputs[0].data: has a value of type object"),
    "binary-size-without-binary": (
        _with(data=None, parameters={"binary_data_size": ROW * 4}),
        "inputs[0]: 0 bytes follow",
    ),
    "binary-size-wrong": (_with(parameters={"binary_data_size": 3}), "inputs[0].parameters.binary_data_size: is 3"),
    "binary-size-text": (_with(parameters={"binary_data_size": "3"}), "inputs[0].parameters.binary_data_size: is '3'"),
    "tensor-parameters-no-object": (_with(parameters=[]), "inputs[0].parameters: must be an object"),
    "parameters-no-object": (_with() | {"parameters": 3}, "parameters: must be an object"),
    "unknown-exit": (_with() | {"parameters": {"exit": "always"}}, "parameters.exit: is 'always'"),
    "id-no-text": (_with() | {"id": 3}, "id: must be a string"),
    "outputs-no-list": (_with() | {"outputs": {}}, "outputs: must be a list"),
    "output-no-object": (_with() | {"outputs": [3]}, "outputs[0]: must be an object"),
    "unknown-output": (_with() | {"outputs": [{"name": "label"}, {"name": "p"}]}, "outputs[1].name: is 'p'"),
    "binary-flag-no-boolean": (
        _with() | {"outputs": [{"name": "label", "parameters": {"binary_data": 1}}]},
        "outputs[0].parameters.binary_data: must",
    ),
    "classification": (
        _with() | {"outputs": [{"name": "label", "parameters": {"classification": 3}}]},
        "outputs[0].parameters.classification",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_a_400_that_names_the_field(plain: WorkerProcess, name: str) -> None:
    body, message = MALFORMED[name]
    reply = plain.public.post("/v2/models/tiny/infer", content=body if isinstance(body, bytes) else json.dumps(body))
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("length", "extra", "message"),
    [
        ("abc", b"", "Inference-Header-Content-Length: is 'abc'"),
        ("0", b"", "Inference-Header-Content-Length: is 0"),
        ("99999999", b"", "Inference-Header-Content-Length: is 99999999"),
        (None, b"\0" * (4 * ROW - 1), f"inputs[0]: {4 * ROW - 1} bytes follow"),
        (None, b"\0" * (4 * ROW + 1), f"inputs[0]: {4 * ROW + 1} bytes follow"),
    ],
    ids=["no-number", "zero", "beyond-the-body", "truncated", "too-long"],
)
def test_malformed_binary_data_gets_a_400(plain: WorkerProcess, length: str | None, extra: bytes, message: str) -> None:
    header = json.dumps(_with(data=None, parameters={"binary_data_size": 4 * ROW})).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(header))}
    reply = plain.public.post("/v2/models/tiny/infer", content=header + extra, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(message)


def test_binary_data_without_its_size_gets_a_400(plain: WorkerProcess) -> None:
    header = json.dumps(_with(data=None)).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    reply = plain.public.post("/v2/models/tiny/infer", content=header + b"\0" * 4 * ROW, headers=headers)
    assert reply.json()["error"].startswith("inputs[0].parameters.binary_data_size: is missing")


def test_an_unknown_model_is_404_and_a_body_that_claims_to_be_gzip_400(plain: WorkerProcess) -> None:
    for path, method in (("/v2/models/other/infer", "POST"), ("/v2/models/other", "GET"), ("/v3", "GET")):
        assert plain.public.request(method, path, json={}).status_code == 404
    reply = plain.public.post("/v2/models/tiny/infer", content=b"x", headers={"Content-Encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"][:17]) == (400, "Content-Encoding:")


def test_a_body_beyond_the_limit_is_413_before_it_is_read(plain: WorkerProcess) -> None:
    host, _, port = plain.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_not_finite_json_numbers_are_infinite_and_harm_nobody(plain: WorkerProcess) -> None:
    body = _with(data=[1e300, *NUMBERS[1:]])
    reply = plain.public.post("/v2/models/tiny/infer", json=body)
    assert reply.status_code == 200
    assert plain.is_ready()


# --- queue, failures of the bundle, draining -------------------------------------------------------


def test_more_rows_than_the_queue_holds_get_429_and_when_to_retry(plain: WorkerProcess) -> None:
    x = np.zeros((1024, *bundles.inputs(1).shape[1:]), dtype=np.float32)
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": x.nbytes}}
            ]
        }
    ).encode()
    content = header + x.tobytes()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    replies: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=f"http://{plain.address}", timeout=60) as client:
            replies.append(client.post("/v2/models/tiny/infer", content=content, headers=headers))

    def full_once() -> bool:
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return any(r.status_code == 429 for r in replies)

    eventually(full_once, what="a full queue")
    refused = next(r for r in replies if r.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "queue places" in refused.json()["error"]
    assert {r.status_code for r in replies} == {200, 429}


@pytest.mark.slow
def test_a_broken_bundle_leaves_the_worker_up_unready_and_telling_why(tmp_path: Path) -> None:
    folder = bundles.write_bundle(tmp_path / "b")
    (folder / "ramps.safetensors").write_bytes(b"tampered")
    with WorkerProcess(folder, wait_ready=False) as process:
        state = eventually(lambda: (s := process.state()).message and s, what="the reason")
        assert state.message.startswith("ramps.safetensors: ") and not state.ready
        assert state.message.endswith("pack what `offramp prepare` wrote once more and name it in spec.model.uri")
        ready = process.public.get("/v2/health/ready")
        assert (ready.status_code, ready.text) == (503, state.message)
        assert process.public.get("/v2/health/live").status_code == 200
        assert process.public.post("/v2/models/tiny/infer", json={}).status_code == 503
        assert process.deliver(document(plan_for(folder))).status_code == 503
    assert process.process.returncode == 0


@pytest.mark.slow
def test_a_worker_of_another_model_digest_stays_unready(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_MODEL_DIGEST": "sha256:" + "0" * 64}, wait_ready=False) as process:
        state = eventually(lambda: (s := process.state()).message and s, what="the reason")
        assert "this worker must serve sha256:000" in state.message
        assert state.message.endswith("set spec.model.digest to the one to serve from now on")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OFFRAMP_BUNDLE": ""}, "OFFRAMP_BUNDLE is not set"),
        ({"OFFRAMP_PORT": "http"}, "OFFRAMP_PORT is 'http'"),
        ({"OFFRAMP_THREADS": "0"}, "OFFRAMP_THREADS is '0'"),
        ({"OFFRAMP_LATENCY_SECONDS": "nan"}, "OFFRAMP_LATENCY_SECONDS is 'nan'"),
        (
            {"OFFRAMP_PUBLIC_KEY": "AAAA", "OFFRAMP_TOKEN_SHA256": "0" * 64},
            "OFFRAMP_PUBLIC_KEY must be base64 of 32 bytes",
        ),
        ({"OFFRAMP_TOKEN_SHA256": "0" * 64}, "OFFRAMP_PUBLIC_KEY is not set"),
        ({"OFFRAMP_TOKEN_SHA256": "secret"}, "OFFRAMP_TOKEN_SHA256 has 6 characters"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_settings_that_cannot_work_are_refused_by_name(bundle_dir: Path, env: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}") as caught:
        settings_from_env({"OFFRAMP_BUNDLE": str(bundle_dir), **env})
    assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_settings_that_cannot_work_end_the_process_with_code_2() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OFFRAMP_")}
    command = [sys.executable, "-m", "offramp_worker.main"]
    result = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert result.returncode == 2
    assert json.loads(result.stderr)["reason"].startswith("OFFRAMP_BUNDLE is not set")


@pytest.mark.slow
def test_draining_answers_what_is_in_flight_and_ends_with_code_0(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir) as process:
        process.deliver(document(plan_for(bundle_dir, {"r00-grid": "0.5"}), audit_rate=1.0)).raise_for_status()
        x = bundles.inputs(1000)
        answers: list[int] = []
        body = infer_json(x)
        thread = threading.Thread(
            target=lambda: answers.append(process.public.post("/v2/models/tiny/infer", json=body).status_code)
        )
        thread.start()
        eventually(
            lambda: (
                _metric(
                    process, "earlyexit_inflight", public=httpx.Client(base_url=f"http://{process.address}", timeout=60)
                )
                or answers
            ),
            what="a request in flight",
        )
        process.process.send_signal(signal.SIGTERM)
        thread.join(90)
        assert answers == [200]
    assert process.process.returncode == 0
    assert process.events("stopped") and not process.events("audits-abandoned")


# --- what replies and metrics say ------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_agree_with_the_replies(worker: WorkerProcess, bundle_dir: Path) -> None:
    worker.deliver(document(plan_for(bundle_dir, {"r02-linear": "0.5"}), audit_rate=1.0)).raise_for_status()
    replies = [worker.infer(x[None]) for x in bundles.inputs(40)]
    left = sum(r["parameters"]["exit"] == "r02-linear" for r in replies)
    eventually(lambda: _metric(worker, "earlyexit_audited_total", arm="stable") == 40, what="audits")
    assert _metric(worker, "earlyexit_requests_total", outcome="ok") == 40
    assert _metric(worker, "earlyexit_rows_total", arm="stable", outcome="ok") == 40
    assert _metric(worker, "earlyexit_responses_total", protocol="rest", code="200") == 40
    assert _metric(worker, "earlyexit_exits_total", ramp="r02-linear", arm="stable") == left > 0
    assert _metric(worker, "earlyexit_exits_total", ramp="final", arm="stable") == 40 - left
    assert _metric(worker, "earlyexit_row_duration_seconds_count", arm="stable") == 40
    assert _metric(worker, "earlyexit_batch_duration_seconds_count", arm="stable") == 40
    assert _metric(worker, "earlyexit_epoch") == 1
    assert (
        _metric(worker, "earlyexit_inflight")
        == _metric(worker, "earlyexit_audit_backlog")
        == _metric(worker, "earlyexit_breaker_open")
        == 0
    )


@pytest.mark.slow
def test_without_keys_the_admin_port_is_not_opened(plain: WorkerProcess) -> None:
    assert [line["name"] for line in plain.events("listening")] == ["public"]
    assert plain.public.get("/v1/state").status_code == 404


def _metric(process: WorkerProcess, name: str, *, public: httpx.Client | None = None, **labels: str) -> float:
    text = (public or process.public).get("/metrics").raise_for_status().text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name and s.labels == labels)
