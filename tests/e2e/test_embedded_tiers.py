"""Two budgets in one service: each has its own thresholds, and the tier whose exits break its budget is stopped while
everybody else's go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

pytestmark = pytest.mark.slow

Up = Any
Array = npt.NDArray[Any]
BUDGET, STRICT = "0.1", "0.03"


def answers_to(service: Up, rows: Array, **parameters: Any) -> tuple[Array, Array]:
    """What the service says to each row, and whether an exit said it."""
    labels: list[int] = []
    exits: list[str] = []
    for few in np.array_split(rows, max(1, len(rows) // 20)):
        reply = service.infer(few, **parameters)
        labels += next(o["data"] for o in reply["outputs"] if o["name"] == "label")
        exits += reply["parameters"]["exit"].split(",")
    return np.array(labels), np.array(exits) != "final"


def tier(service: Up) -> dict[str, Any]:
    return next(iter(service.status().get("tiers", [])), {})


@pytest.mark.timeout(900)
def test_two_tiers_get_different_plans_and_the_one_that_breaks_its_budget_is_stopped_alone(
    up: Callable[..., Up], tools: Any, bundle: Any
) -> None:
    objective = {
        "latency": {"threshold": "2s"},
        "accuracy": {"maxDisagreement": BUDGET},
        "tiers": [{"name": "strict", "maxDisagreement": STRICT}],
    }
    service = up(
        replicas=1,
        objective=objective,
        execution="ResultsOnly",  # every request is compared: it takes seconds
        ramps={"maxOverhead": "1", "holdback": "0"},
        rollout={"steps": [{"weight": 100}], "confidence": "0.9"},
    )
    rows = tools.inputs(3000, seed=77)
    truth = tools.answers(bundle, rows)
    traffic = tools.Traffic(lambda: service.url, rows, truth, rate=50.0, together=4)
    service.start()
    service.await_ready(1)
    traffic.start()

    def seen() -> object:
        return service.status(), service.rollout(), service.tail()

    tools.eventually(lambda: tier(service).get("state") == "Exits", what="the menu", seconds=300, state=seen)
    name = service.status()["stableConfig"]
    plan = next(c for c in service.objects("RampConfig") if c["metadata"]["name"] == name)
    own = plan["spec"]["tiers"][0]
    assert own["name"] == "strict" and own["ramps"] != plan["spec"]["ramps"], "two budgets, two plans"
    claims = [c["tiers"] for c in plan["status"]["certificates"] if "tiers" in c]
    assert claims[-1][0]["tier"] == "strict" and float(claims[-1][0]["budget"]) == float(STRICT)

    labels, left = answers_to(service, rows, tier="strict")
    _, all_left = answers_to(service, rows[:600])
    assert 0 < left.mean() <= all_left.mean()
    wrong = rows[left & (labels != truth)]
    assert 0 < len(wrong) < 0.1 * len(rows)
    refused = httpx.post(
        f"{service.url}/v2/models/tiny/infer",
        json={
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, *rows.shape[1:]], "data": rows[0].ravel().tolist()}
            ],
            "parameters": {"tier": "best"},
        },
        trust_env=False,
    )
    assert refused.status_code == 400 and "parameters.tier: is 'best'; this service has default, strict" in refused.text

    def stopped() -> bool:
        """The inputs that ask for it change: exits are wrong about all of them."""
        answers_to(service, np.repeat(wrong, 2 + 40 // len(wrong), axis=0), tier="strict")
        return tier(service).get("state") == "Stopped"

    tools.eventually(stopped, what="the stop", seconds=180, state=seen)
    tools.eventually(
        lambda: not answers_to(service, wrong, tier="strict")[1].any(), what="the stop at the worker", state=seen
    )
    labels, _ = answers_to(service, rows[:200], tier="strict")
    np.testing.assert_array_equal(labels, truth[:200])
    assert answers_to(service, rows[:600])[1].mean() > 0.5, "everybody else's go on"
    traffic.stop()
    assert traffic.failures == []
    assert service.status()["stableConfig"] == name
    assert service.condition("Ready")["status"] == "True"
    events = [json.loads(line) for line in (service.state / "events.jsonl").read_text().splitlines()]
    told = [event["message"] for event in events if event["reason"] == "SliceStopped"]
    assert len(told) == 1 and "audits of tier strict disagreed; its budget is 3.00%" in told[0]
    why = [sys.executable, "-m", "offramp_cli", "why", "tiny", "--state", str(service.state)]
    explained = subprocess.run(why, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "tier strict: budget 3%; stopped: its requests take no exits under this plan" in explained
    assert service.stop() == 0
