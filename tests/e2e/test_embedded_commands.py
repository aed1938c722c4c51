"""The day-two commands on a service that ``offramp up`` serves, while it serves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # real workers

MakeUp = Callable[..., Any]
BUDGET = {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.05"}}


def offramp(service: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offramp_cli", *arguments, "--state", str(service.state)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_recommendation_is_approved_paused_and_resumed_by_hand(up: MakeUp, tools: Any, bundle: Any) -> None:
    rollout = {"steps": [{"weight": 50}], "confidence": "0.9"}
    ramps = {"mode": "Recommend", "maxOverhead": "0.5"}  # a shared machine makes batches slow for reasons of its own
    service = up(replicas=1, objective=BUDGET, ramps=ramps, rollout=rollout)
    service.start()
    waited = offramp(service, "status", "tiny", "--wait", "--timeout", "240s")
    assert waited.returncode == 0, waited.stderr
    rows = tools.inputs(200)
    traffic = tools.Traffic(lambda: service.url, rows, tools.answers(bundle, rows), rate=60, together=4)
    traffic.start()

    def told(*arguments: str) -> str:
        return offramp(service, *arguments).stdout

    def phase() -> str:
        return str(service.rollout()["status"].get("phase"))

    tools.eventually(lambda: phase() == "Pending", what="a recommendation", seconds=120, state=lambda: told("why"))
    why = told("why")
    assert "offramp approve" in why and "(Tuned), Pending" in why
    traffic.stop()  # without requests there is no evidence: the step waits for the commands, however slow they are
    approved = offramp(service, "approve", "tiny")
    assert approved.returncode == 0, approved.stderr
    tools.eventually(lambda: phase() == "Progressing", what="the canary", state=lambda: told("why"))
    assert offramp(service, "pause", "tiny").returncode == 0
    tools.eventually(lambda: phase() == "Paused", what="the pause", state=lambda: told("why"))
    assert offramp(service, "resume", "tiny").returncode == 0
    traffic.start()
    tools.eventually(lambda: phase() == "Succeeded", what="the promotion", seconds=180, state=lambda: told("why"))
    assert "leave early" in told("get") or "Stable" in told("get")

    pin = offramp(service, "pin", "tiny", "--config", service.status()["stableConfig"], "--dry-run")
    assert pin.returncode == 0 and "certified for 5%" in pin.stdout
    tests_run = service.status()["tuning"]["testsRun"]
    assert offramp(service, "tune", "tiny", "--now").returncode == 0
    request = service.service()["metadata"]["annotations"]["earlyexit.dev/request"]
    tools.eventually(
        lambda: (
            service.status()["tuning"].get("state") == "CollectingLabels"
            or service.status()["tuning"].get("handledRequest") == request
        ),
        what="an answer to the request",
        seconds=120,
        state=lambda: told("why"),
    )
    assert service.status()["tuning"]["testsRun"] >= tests_run
    traffic.stop()
    assert traffic.failures == []
    assert service.stop() == 0
    after = json.loads(offramp(service, "get", "--json").stdout)["services"][0]
    verdicts = {r["metadata"]["name"]: r["status"].get("verdict", "") for r in after["rollouts"]}
    assert verdicts["tiny-1"] == "Succeeded"
    assert set(verdicts.values()) <= {"Succeeded", "", "Superseded"}, (
        "a tuning that was asked for may recommend another plan"
    )
    assert offramp(service, "status").returncode == 1, "nothing runs any more"
