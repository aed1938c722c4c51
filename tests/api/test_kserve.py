"""The examples for KServe, against its own definitions on a real API server, and the container as KServe starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.api.conftest import ROOT, ApiServer, definition, path_of, wait_for

sys.path.append(str(ROOT / "tests" / "worker"))

import bundles  # type: ignore[import-not-found]
from fixed_plans import certified  # type: ignore[import-not-found]
from processes import WorkerProcess, decoded, infer_json  # type: ignore[import-not-found]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server

FOLDER = ROOT / "manifests" / "kserve"
KINDS = ("clusterservingruntimes", "servingruntimes", "inferenceservices")
RUNTIME, SERVICE = (yaml.safe_load((FOLDER / name).read_text()) for name in ("runtime.yaml", "digits.yaml"))
SERVICE["metadata"]["namespace"] = "default"


@pytest.fixture(scope="module")
def kserve(api: ApiServer) -> ApiServer:
    """The API server with KServe's kinds."""
    for kind in KINDS:
        crd = definition("kserve", "github.com/kserve/kserve", f"full/serving.kserve.io_{kind}.yaml")
        crd["spec"].pop("conversion", None)  # by a webhook of KServe's controller
        answer = api.create(crd, keep=True)
        assert answer.status_code == 201, f"{kind}: {answer.text}"
    for manifest in (RUNTIME, as_namespaced(RUNTIME), SERVICE):
        path = path_of(manifest, named=False)
        wait_for(lambda path=path: api.request("GET", path).status_code == 200, what=f"{path} being served")  # type: ignore[misc]
    return api


def as_namespaced(runtime: dict[str, Any]) -> dict[str, Any]:
    return runtime | {"kind": "ServingRuntime", "metadata": runtime["metadata"] | {"namespace": "default"}}


@pytest.mark.parametrize("manifest", [RUNTIME, as_namespaced(RUNTIME), SERVICE], ids=lambda m: m["kind"])
def test_an_example_is_taken_as_it_stands(kserve: ApiServer, manifest: dict[str, Any]) -> None:
    answer = kserve.create(manifest)
    assert answer.status_code == 201, answer.text


def test_a_field_that_kserve_does_not_know_is_refused(kserve: ApiServer) -> None:
    wrong = json.loads(json.dumps(RUNTIME))
    wrong["spec"]["containers"][0]["environment"] = []
    answer = kserve.create(wrong)
    assert answer.status_code == 400
    assert "environment" in answer.text


def test_the_service_names_a_format_and_a_protocol_that_the_runtime_has() -> None:
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["modelFormat"]["name"] in [each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]


def started_by_kserve(storage: Path, state: Path) -> dict[str, str]:
    """The container's environment as KServe fills it in, and its folders as they lie here."""
    (container,) = RUNTIME["spec"]["containers"]
    assert container["name"] == "kserve-container"  # the one whose model KServe fetches
    assert "command" not in container and "args" not in container  # the image's own
    places = {"{{.Name}}": SERVICE["metadata"]["name"], "/mnt/models": str(storage), "/state": str(state)}
    env = {entry["name"]: str(entry["value"]) for entry in container["env"]}
    for place, here in places.items():
        env = {name: value.replace(place, here) for name, value in env.items()}
    return env


def probe(name: str) -> str:
    return str(RUNTIME["spec"]["containers"][0][name]["httpGet"]["path"])


def test_a_worker_that_kserve_starts_serves_the_plan_under_the_services_name(tmp_path: Path) -> None:
    storage = bundles.write_bundle(tmp_path / "models")
    (storage / "plan.json").write_text(json.dumps(certified(storage, {"r00-grid": "0.3", "r02-linear": "0.5"})))
    (tmp_path / "state").mkdir()
    env = started_by_kserve(storage, tmp_path / "state")
    with WorkerProcess(storage, control_plane=False, env=env) as worker:
        assert worker.public.get(probe("readinessProbe")).status_code == 200
        assert worker.public.get(probe("livenessProbe")).status_code == 200
        assert worker.public.get("/v2/models/digits").json()["name"] == "digits"
        reply = worker.public.post("/v2/models/digits/infer", json=infer_json(bundles.inputs(64, seed=9)))
        assert worker.public.get("/v2/models/tiny").status_code == 404
    told = decoded(reply.json())
    assert set(told["parameters"]["exit"].split(",")) == {"r00-grid", "r02-linear", "final"}
    assert told["model_name"] == "digits"
    assert np.isfinite(told["logits"]).all()


def test_storage_without_a_plan_keeps_the_pod_unready_and_says_what_to_put_there(tmp_path: Path) -> None:
    storage = bundles.write_bundle(tmp_path / "models")
    (tmp_path / "state").mkdir()
    env = started_by_kserve(storage, tmp_path / "state")
    with WorkerProcess(storage, control_plane=False, env=env, wait_ready=False) as worker:
        wait_for(lambda: bool(worker.events("bundle-refused")), what="a refusal")
        answer = worker.public.get(probe("readinessProbe"))
        assert worker.public.get(probe("livenessProbe")).status_code == 200
    assert answer.status_code == 503
    assert answer.text.startswith(f"OFFRAMP_FIXED_PLAN is {storage}/plan.json: it cannot be read (No such file")
    assert answer.text.endswith("`kubectl get rampconfig NAME -o json` prints one")


def test_a_bundle_and_its_plan_may_lie_behind_links_as_a_models_image_has_them(tmp_path: Path) -> None:
    """KServe's modelcars: /mnt/models is a link into another container's files."""
    storage = bundles.write_bundle(tmp_path / "image" / "models")
    (storage / "plan.json").write_text(json.dumps(certified(storage, {"r01-grid": "0.5"})))
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt" / "models").symlink_to(storage, target_is_directory=True)
    (tmp_path / "state").mkdir()
    env = started_by_kserve(tmp_path / "mnt" / "models", tmp_path / "state")
    with WorkerProcess(storage, control_plane=False, env=env) as worker:
        reply = worker.public.post("/v2/models/digits/infer", json=infer_json(bundles.inputs(40, seed=9)))
    assert "r01-grid" in reply.json()["parameters"]["exit"]
