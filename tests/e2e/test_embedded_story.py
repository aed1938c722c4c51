"""The whole loop on one machine, with restarts in the middle of it: certified, canaried, promoted, and never a failed
request."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Up = Any
BUDGET = 0.05


def step_audits(service: Up) -> int:
    """Audits of the canary that the rollout's status knows of, finished steps included."""
    status = service.rollout()["status"]
    ledger = status.get("ledger", {})
    arms = [*ledger.get("live", {}).values(), ledger.get("retired", {})]
    now = sum(arm.get("canary", {}).get("audited", 0) for arm in arms)
    return int(now + sum(step["n"] for step in status.get("history", [])))


def ledger_of(service: Up) -> dict[str, Any]:
    return dict(service.rollout()["status"].get("ledger", {}))


@pytest.mark.timeout(900)
def test_a_plan_is_certified_canaried_and_promoted_across_restarts_of_everything(
    up: Callable[..., Up], tools: Any, bundle: Path
) -> None:
    service = up(
        objective={"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": str(BUDGET)}},
        ramps={"maxOverhead": "0.5"},  # a shared machine makes batches slow for reasons of its own
        rollout={"steps": [{"weight": 30}, {"weight": 60}], "confidence": "0.9", "cooldown": "20s"},
    )
    rows = tools.inputs(600, seed=77)
    traffic = tools.Traffic(lambda: service.url, rows, tools.answers(bundle, rows), rate=60.0, together=4)
    service.start()
    service.await_ready(2)
    traffic.start()

    # Exits off → labels → a certified plan → its canary begins.
    def canary_serves() -> bool:
        return service.rollout()["status"].get("phase") == "Progressing" and step_audits(service) >= 10

    tools.eventually(canary_serves, what="the canary", seconds=180, state=lambda: (service.status(), service.tail()))
    name = service.rollout()["metadata"]["name"]
    audits, tests_run = step_audits(service), service.status()["tuning"]["testsRun"]

    # A clean restart in the middle of a step.
    traffic.stop()
    assert service.stop() == 0
    before = ledger_of(service)
    assert step_audits(service) >= audits
    audits = step_audits(service)
    service.start()
    service.await_ready(2)
    assert service.rollout()["metadata"]["name"] == name
    assert service.status()["tuning"]["testsRun"] == tests_run
    traffic.start()

    def goes_on() -> bool:
        return step_audits(service) > audits or service.rollout()["status"].get("phase") != "Progressing"

    tools.eventually(goes_on, what="further evidence", seconds=120, state=lambda: (service.rollout(), service.tail()))
    after = ledger_of(service)
    if after.get("epoch") == before.get("epoch"):
        lost = after.get("retired", {}).get("canary", {})
        assert lost.get("drawn", 0) == sum(
            b["canary"].get("drawn", 0) for b in before["live"].values() if "canary" in b
        ) + before.get("retired", {}).get("canary", {}).get("drawn", 0), "what earlier processes did is kept, once"

    def succeeded() -> bool:
        return any(r.get("status", {}).get("verdict") == "Succeeded" for r in service.objects("RampRollout"))

    tools.eventually(succeeded, what="the promotion", seconds=480, state=lambda: (service.rollout(), service.tail()))
    stable = service.status()["stableConfig"]
    config = next(c for c in service.objects("RampConfig") if c["metadata"]["name"] == stable)
    assert config["spec"]["ramps"], "the promoted plan has exits"
    assert config["status"]["certificates"]
    tools.eventually(
        lambda: sum(v for k, v in traffic.exits.items() if k != "final") > 20,
        what="early exits",
        state=lambda: traffic.exits,
    )

    # A crash: no goodbye to anybody. The plan serves again as soon as workers do.
    traffic.stop()
    service.stop(signal.SIGKILL)
    service.start()
    service.await_ready(2)
    assert service.status()["stableConfig"] == stable
    exits = {str(service.infer(rows[i : i + 1])["parameters"]["exit"]) for i in range(30)}
    assert exits - {"final"}, "the stable plan is in force without anybody deciding anew"
    assert service.condition("Ready")["status"] == "True"

    assert traffic.failures == []
    assert traffic.agreed / traffic.answered >= 1 - BUDGET
    assert service.stop() == 0
