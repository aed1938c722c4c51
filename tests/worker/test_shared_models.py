"""One process with several models: each is served, controlled and counted as if it were alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles
import httpx
import numpy as np
import pytest
import tritonclient.http
from processes import WorkerProcess, document, eventually, plan_for
from shared import SharedProcess, key, shared, write_models

from offramp_core.errors import InvalidArgumentError
from offramp_worker.shared.settings import shared_settings

pytestmark = pytest.mark.slow
OWN_TOKEN = "a-token-of-b-alone"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of three models with other weights, all called tiny by their manifests."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "c")):
        bundles.write_bundle(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[SharedProcess]:
    file = write_models(
        folder,
        [
            {"name": "a", "bundle": "a", "serviceUid": "uid-a"},
            {
                "name": "b",
                "bundle": "b",
                "serviceUid": "uid-b",
                "publicKey": key(),
                "tokenSha256": hashlib.sha256(OWN_TOKEN.encode()).hexdigest(),
            },
            {"name": "c", "bundle": "c"},
        ],
    )
    with shared(file, env={"OFFRAMP_GRPC_PORT": "0"}) as process:
        yield process


def test_each_model_answers_under_its_name_as_it_does_alone(worker: SharedProcess, folder: Path) -> None:
    x = bundles.inputs(7)
    for name in ("a", "b", "c"):
        with WorkerProcess(folder / name, control_plane=False) as alone:
            expected = alone.infer(x)
        found = worker.answer(name, x)
        assert found["model_name"] == name
        np.testing.assert_array_equal(found["label"], expected["label"])
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        assert worker.public.get(f"/v2/models/{name}").json()["name"] == name
        assert worker.public.get(f"/v2/models/{name}/ready").status_code == 200
    assert worker.public.post("/v2/models/a/versions/1/infer", json={}).status_code == 400


def test_an_unknown_model_is_404_with_those_that_there_are(worker: SharedProcess) -> None:
    for reply in (worker.ask("d", bundles.inputs(1)), worker.public.get("/v2/models/d")):
        assert reply.status_code == 404
        assert reply.json() == {"error": "model 'd' is unknown; this worker serves a, b, c"}


def test_grpc_routes_by_name_and_tells_the_health_of_each(worker: SharedProcess) -> None:
    import grpc
    from google.protobuf.wrappers_pb2 import Int32Value, StringValue

    from offramp_worker.grpc.messages import SERVICE, message

    channel = grpc.insecure_channel(f"127.0.0.1:{worker.port('grpc')}")

    def call(method: str, request: Any, reply: str) -> Any:
        send = channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=message(reply).FromString,
        )
        return send(request, timeout=60)

    x = bundles.inputs(3)
    for name in ("a", "c"):
        request = message("ModelInferRequest")(model_name=name)
        request.inputs.add(name="x", datatype="FP32", shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
        reply = call("ModelInfer", request, "ModelInferResponse")
        logits = np.frombuffer(reply.raw_output_contents[0], dtype=np.float32).reshape(3, -1)
        assert reply.model_name == name
        np.testing.assert_allclose(logits, worker.answer(name, x)["logits"], rtol=1e-5, atol=1e-5)
    with pytest.raises(grpc.RpcError) as unknown:
        call("ModelReady", message("ModelReadyRequest")(name="d"), "ModelReadyResponse")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    health = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=lambda m: m.SerializeToString(),
        response_deserializer=Int32Value.FromString,
    )
    assert [health(StringValue(value=name), timeout=60).value for name in ("", SERVICE, "a")] == [1, 1, 1]


def test_plans_epochs_and_audits_are_each_models_own(worker: SharedProcess, folder: Path) -> None:
    plan = plan_for(folder / "a", {"r00-grid": "1"})
    sent = document(plan, service_uid="uid-a", epoch=3, audit_rate=1.0, accuracy_budget=0.9)
    worker.deliver_to("a", sent).raise_for_status()
    assert worker.answer("a", bundles.inputs(4))["parameters"]["epoch"] == 3
    assert worker.answer("c", bundles.inputs(4))["parameters"]["epoch"] == 0
    assert (worker.state_of("a").epoch, worker.state_of("a").model) == (3, "a")

    def audited() -> float | None:
        return worker.series("earlyexit_audited_total", model="a", arm="stable")

    eventually(lambda: audited() == 4, what="the audits of a")
    assert worker.metric("earlyexit_epoch", model="a") == 3
    assert worker.metric("earlyexit_epoch", model="b") == 0
    foreign = worker.deliver_to("a", document(plan, service_uid="uid-b", epoch=4))
    assert foreign.status_code == 409 and foreign.json()["reason"] == "ForeignService"


def test_the_door_of_a_model_opens_to_its_own_token_alone(worker: SharedProcess, folder: Path) -> None:
    other = httpx.Client(base_url=worker.admin.base_url, headers={"Authorization": f"Bearer {OWN_TOKEN}"}, timeout=60)
    assert worker.admin.get("/models/b/v1/state").status_code == 401, "the worker's token is not b's"
    assert other.get("/models/b/v1/state").json()["service_uid"] == "uid-b"
    for method, path in (
        ("GET", "/models/a/v1/state"),
        ("POST", "/v2/repository/index"),
        ("GET", "/models/d/v1/state"),
    ):
        assert other.request(method, path).status_code == 401, "b's token opens nothing else"
    assert worker.admin.get("/models/c/v1/state").status_code == 401, "c has no control plane"
    assert worker.admin.get("/models/d/v1/state").status_code == 404
    sent = document(plan_for(folder / "b"), service_uid="uid-b", epoch=9)
    assert worker.deliver_to("b", sent).status_code == 401


def test_metrics_have_the_model_as_a_label_and_the_process_once(worker: SharedProcess) -> None:
    text = worker.public.get("/metrics").text
    assert text.count("\nprocess_resident_memory_bytes ") == 1
    assert text.count("# TYPE earlyexit_requests_total ") == 1
    before = worker.metric("earlyexit_requests_total", model="b", outcome="ok")
    of_a = worker.metric("earlyexit_requests_total", model="a", outcome="ok")
    worker.answer("b", bundles.inputs(1))
    assert worker.metric("earlyexit_requests_total", model="b", outcome="ok") == before + 1
    assert worker.metric("earlyexit_requests_total", model="a", outcome="ok") == of_a
    assert worker.metric("earlyexit_model_turn_seconds_total", model="b") > 0


def test_the_repository_needs_the_token_and_another_client_can_use_it(worker: SharedProcess) -> None:
    stranger = httpx.Client(base_url=worker.admin.base_url, timeout=60)
    for path in ("index", "models/a/load", "models/a/unload"):
        assert stranger.post(f"/v2/repository/{path}").status_code == 401
        public = worker.public.post(f"/v2/repository/{path}")
        assert public.status_code == 404 and "admin port" in public.json()["error"]
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{worker.port('admin')}")
    header = {"Authorization": worker.admin.headers["Authorization"]}
    states = {entry["name"]: entry["state"] for entry in client.get_model_repository_index(headers=header)}
    assert states == {"a": "READY", "b": "READY", "c": "READY"}
    client.unload_model("c", headers=header)
    refused = worker.ask("c", bundles.inputs(1))
    assert refused.status_code == 503 and "/v2/repository/models/c/load" in refused.json()["error"]
    assert worker.index()["c"]["state"] == "UNAVAILABLE"
    assert worker.answer("a", bundles.inputs(1)), "the others go on"
    client.load_model("c", headers=header)
    worker.answer("c", bundles.inputs(1))
    for path in ("load", "unload"):
        assert worker.admin.post(f"/v2/repository/models/d/{path}").status_code == 404
    assert worker.admin.post("/v2/repository/index", content=b"{").status_code == 400
    assert worker.admin.post("/v2/repository/index", json={"ready": 1}).status_code == 400


def _settings(folder: Path, models: list[dict[str, Any]], env: dict[str, str]) -> Any:
    return shared_settings({"OFFRAMP_MODELS": str(write_models(folder, models)), **env})


@pytest.mark.parametrize(
    ("models", "env", "names"),
    [
        ([], {}, "models: there are 0"),
        ([{"name": "a", "bundle": "a"}, {"name": "a", "bundle": "b"}], {}, r"models\[1\].name: 'a' is there twice"),
        ([{"name": "a/b", "bundle": "a"}], {}, r"models\[0\].name: is 'a/b'"),
        ([{"name": "a", "bundle": "a", "share": 0}], {}, r"models\[0\].share: is 0"),
        ([{"name": "a", "bundle": "a", "share": 1e30}], {}, r"models\[0\].share: is 1e\+30; .* from 0.001 to 1000"),
        ([{"name": "a"}], {}, "missing required field `bundle`"),
        ([{"name": "a", "bundle": "a", "sahre": 1}], {}, "unknown field `sahre`"),
        ([{"name": "a", "bundle": "a", "publicKey": "x"}], {}, "'a' has no serviceUid"),
        ([{"name": "a", "bundle": "a", "serviceUid": "u", "publicKey": "x"}], {}, "'a': OFFRAMP_PUBLIC_KEY must be"),
        ([{"name": "a", "bundle": "a", "latencySeconds": -1}], {}, "'a': OFFRAMP_LATENCY_SECONDS is '-1.0'"),
        ([{"name": "a", "bundle": "a"}], {"OFFRAMP_BUNDLE": "a"}, "OFFRAMP_BUNDLE and OFFRAMP_MODELS are both set"),
        ([{"name": "a", "bundle": "a"}], {"OFFRAMP_SERVICE_UID": "u"}, "OFFRAMP_SERVICE_UID is set"),
        ([{"name": "a", "bundle": "a"}], {"OFFRAMP_FIXED_PLAN": "p"}, "OFFRAMP_FIXED_PLAN is set; it is for a worker"),
        ([{"name": "a", "bundle": "a"}], {"OFFRAMP_MODELS_BYTES": "1000"}, "the smallest bundle, of 'a', has"),
        (
            [{"name": n, "bundle": n, "keepLoaded": True} for n in "abc"],
            {"OFFRAMP_MODELS_BYTES": "150000"},
            "models with keepLoaded have bundles of",
        ),
        ([{"name": "a", "bundle": "a\0b"}], {}, "no path has a NUL"),
        ([{"name": "a", "bundle": "a"}], {"OFFRAMP_LOAD_WAITING": "0"}, "OFFRAMP_LOAD_WAITING is '0'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_field(
    folder: Path, tmp_path: Path, models: list[dict[str, Any]], env: dict[str, str], names: str
) -> None:
    for name in "abc":
        (tmp_path / name).symlink_to(folder / name)
    with pytest.raises(InvalidArgumentError, match=names):
        _settings(tmp_path, models, env)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"OFFRAMP_MODELS: .*cannot be read"):
        shared_settings({"OFFRAMP_MODELS": str(tmp_path / "nothing.json")})
