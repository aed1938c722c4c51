"""A plan without a control plane: ``offramp serve --plan``, and a worker that is told a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from fixed_plans import certified
from processes import START_SECONDS, WorkerProcess, eventually, infer_json
from prometheus_client.parser import text_string_to_metric_families

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.plans.fixed import read_fixed_plan
from offramp_worker.settings import settings_from_env
from offramp_worker.worker import InferenceWorker

Config = dict[str, Any]


def serving(bundle: Path, config: Config, folder: Path, **env: str) -> WorkerProcess:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(config))
    env = {"OFFRAMP_FIXED_PLAN": str(folder / "plan.json"), "OFFRAMP_STATE_DIR": str(folder), **env}
    return WorkerProcess(bundle, control_plane=False, env=env)


def exits(worker: WorkerProcess, x: np.ndarray, *, model: str = "tiny") -> list[str]:
    reply = worker.public.post(f"/v2/models/{model}/infer", json=infer_json(x))
    assert reply.status_code == 200, reply.text
    told = str(reply.json()["parameters"]["exit"]).split(",")
    return told * len(x) if len(told) == 1 else told


def audits(worker: WorkerProcess) -> float:
    families = text_string_to_metric_families(worker.public.get("/metrics").text)
    return sum(s.value for family in families for s in family.samples if s.name == "earlyexit_audited_total")


@pytest.mark.slow
def test_exits_are_on_from_the_first_request_and_stay_on_and_answers_are_audited(
    bundle_dir: Path, tmp_path: Path
) -> None:
    with serving(bundle_dir, certified(bundle_dir, {"r02-linear": "0.5"}), tmp_path) as worker:
        assert "r02-linear" in exits(worker, bundles.inputs(40, seed=3))
        for seed in range(30):
            exits(worker, bundles.inputs(64, seed=seed))
        eventually(lambda: audits(worker) > 0, what="an audit")
        assert "r02-linear" in exits(worker, bundles.inputs(40, seed=3))


@pytest.mark.slow
def test_a_plan_that_answers_otherwise_than_promised_is_switched_off_and_stays_off(
    bundle_dir: Path, tmp_path: Path
) -> None:
    """r00-grid knows nothing, so most of what leaves there is wrong."""
    config = certified(bundle_dir, {"r00-grid": "1"})
    with serving(bundle_dir, config, tmp_path) as worker:
        assert set(exits(worker, bundles.inputs(32, seed=1))) == {"r00-grid"}

        def off() -> bool:
            return set(exits(worker, bundles.inputs(64, seed=2))) == {"final"}

        eventually(off, what="exits off")
    with serving(bundle_dir, config, tmp_path) as again:
        assert set(exits(again, bundles.inputs(32, seed=1))) == {"final"}
        assert again.events("breaker-stays-open")


def test_of_several_certificates_the_smallest_budget_is_watched(bundle_dir: Path, tmp_path: Path) -> None:
    config = certified(bundle_dir, {"r01-grid": "0.5"}, budgets=(0.05, 0.01, 0.02))
    config["status"]["certificates"].append({"method": "canary-acceptance", "budget": "0.001"})
    (tmp_path / "plan.json").write_text(json.dumps(config))
    plan, budget = read_fixed_plan(tmp_path / "plan.json")
    assert (budget, [ramp.id for ramp in plan.ramps]) == (0.01, ["r01-grid"])


REFUSED: Mapping[str, tuple[Callable[[Config], Any], str]] = {
    "no JSON": (lambda _: "kind: RampConfig", "is no RampConfig in JSON"),
    "another kind": (lambda c: c | {"kind": "RampRollout"}, "is no RampConfig in JSON"),
    "no spec": (lambda c: {k: v for k, v in c.items() if k != "spec"}, "is no RampConfig in JSON"),
    "a threshold of 2": (
        lambda c: c | {"spec": c["spec"] | {"ramps": [{"id": "r01-grid", "threshold": "2"}]}},
        "threshold of ramp 'r01-grid' is 2",
    ),
    "no certificate": (lambda c: c | {"status": {}}, "has none that holds for this plan"),
    "another plan's certificate": (
        lambda c: c | {"spec": c["spec"] | {"ramps": [{"id": "r01-grid", "threshold": "0.9"}]}},
        "has none that holds for this plan",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_proves_nothing_is_refused_with_its_name(case: str, bundle_dir: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    changed = change(certified(bundle_dir, {"r01-grid": "0.5"}))
    (tmp_path / "plan.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(InvalidBundleError) as caught:
        read_fixed_plan(tmp_path / "plan.json")
    assert str(caught.value).startswith(f"OFFRAMP_FIXED_PLAN is {tmp_path / 'plan.json'}: ")
    assert message in str(caught.value)


def test_a_plan_that_comes_later_is_taken_when_the_worker_tries_again(bundle_dir: Path, tmp_path: Path) -> None:
    """Images of models lie in a container that may start after the worker's."""
    file = tmp_path / "plan.json"
    settings = settings_from_env({"OFFRAMP_BUNDLE": str(bundle_dir), "OFFRAMP_FIXED_PLAN": str(file)})
    worker = InferenceWorker(settings, deliver=lambda _: None)
    with pytest.raises(InvalidBundleError, match="cannot be read"):
        worker.load()
    assert (worker.phase, worker.ready) == ("broken", False)
    file.write_text(json.dumps(certified(bundle_dir, {"r01-grid": "0.5"})))
    worker.load()
    assert worker.ready and worker.engine is not None
    assert worker.engine.active.stable is not None
    worker.drain()
    worker.finish(seconds=30)


@pytest.mark.slow
def test_a_plan_of_another_model_is_one_line_and_exit_code_2(bundle_dir: Path, tmp_path: Path) -> None:
    other = bundles.write_bundle(tmp_path / "other", seed=5)
    (tmp_path / "plan.json").write_text(json.dumps(certified(other, {"r01-grid": "0.5"})))
    command = [sys.executable, "-m", "offramp_cli", "serve", str(bundle_dir), "--port", "0"]
    result = subprocess.run(
        [*command, "--plan", str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: OFFRAMP_FIXED_PLAN is ")
    assert "backboneDigest is" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"OFFRAMP_MODEL_NAME": "a/b"}, "OFFRAMP_MODEL_NAME is 'a/b'; it stands in paths"),
        ({"OFFRAMP_MODEL_NAME": ".."}, "OFFRAMP_MODEL_NAME is '..'; it stands in paths"),
        (
            {
                "OFFRAMP_FIXED_PLAN": "/plan.json",
                "OFFRAMP_PUBLIC_KEY": "A" * 43 + "=",
                "OFFRAMP_TOKEN_SHA256": "0" * 64,
                "OFFRAMP_SERVICE_UID": "u",
            },
            "OFFRAMP_FIXED_PLAN is set and so is OFFRAMP_PUBLIC_KEY",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        settings_from_env({"OFFRAMP_BUNDLE": "/bundle", **env})
