"""A model that generates, through the whole loop: learned from audits, certified, canaried, promoted and taken back,
with no stream broken; and every panel of the dashboards about it has data, of streams with drafts and without."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.ports import free_port

sys.path.insert(0, str(Path(__file__).parent))

from prometheus_beside import GENERATED, prometheus, queries, values, without_data
from streams import Readers

pytestmark = pytest.mark.slow

Up = Any
LATENCY = {"timeToFirstToken": "20s", "timePerToken": "5s"}  # which a machine of any pace keeps


def plan_in_force(service: Up) -> dict[str, Any]:
    name = service.status().get("stableConfig")
    return next((dict(o["spec"]) for o in service.objects("RampConfig") if o["metadata"]["name"] == name), {})


def is_lossy(plan: dict[str, Any]) -> bool:
    return bool(plan) and (plan["precision"] != "fp32" or bool(plan["ramps"]))


@pytest.mark.timeout(900)
def test_generated_answers_are_certified_canaried_promoted_and_exact_again_when_the_user_says_so(
    up: Callable[..., Up], tools: Any, tmp_path: Path
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
    importlib.import_module("story_bundles").write_story_bundle(tmp_path / "stories")
    spec = {
        "model": {"uri": f"file://{tmp_path / 'stories'}"},
        "objective": {"latency": LATENCY, "accuracy": {"output": "TokenF1", "maxLoss": "0.4"}},
        "rollout": {"steps": [{"weight": 50}], "confidence": "0.9", "cooldown": "20s"},
        "replicas": 1,
    }
    service = up(**spec, ramps={"maxOverhead": "0.5"})  # a shared machine is slow at times for reasons of its own
    port, began = free_port(), time.time()
    service.start("--metrics-port", str(port))
    service.await_ready(1)
    readers = Readers(service.url, n=3)
    with prometheus(tmp_path, operator=port) as client:
        readers.start()

        def seen() -> object:
            return service.status(), service.rollout(), readers.routes, service.tail()

        tools.eventually(lambda: is_lossy(plan_in_force(service)), what="a cheaper plan", seconds=300, state=seen)
        plan = plan_in_force(service)
        certified = next(o for o in service.objects("RampConfig") if o["spec"] == plan)
        assert certified["status"]["certificates"][0]["planHash"]
        tools.eventually(lambda: service.rollout()["status"]["phase"] == "Succeeded", what="the promotion", state=seen)
        before = sum(n for route, n in readers.routes.items() if not route.startswith("fp32"))
        tools.eventually(
            lambda: sum(n for route, n in readers.routes.items() if not route.startswith("fp32")) > before + 100,
            what="answers of the cheaper plan",
            seconds=120,
            state=seen,
        )

        def times() -> Any:
            told = {c["type"]: c for c in service.status()["conditions"]}["LatencyObjectiveMet"]
            return told["status"] == "True" and "time per token p95" in told["message"] and service.status()["observed"]

        tools.eventually(lambda: bool(times()), what="a verdict on the times of tokens", seconds=120, state=seen)
        seen_times = times()
        assert {"firstTokenP50", "firstTokenP95", "perTokenP50", "perTokenP95", "tokensPerSecond"} <= set(seen_times)
        assert any(not route["name"].startswith("fp32") for route in seen_times["routes"]), seen_times["routes"]

        panels = [query for query in queries() if query[0] == GENERATED]
        assert len({title for _, title, _ in panels}) >= 12

        def missing() -> dict[str, list[str]]:
            return without_data(client, panels, since=began)

        tools.eventually(lambda: not missing(), what="data in every panel", seconds=240, state=missing)
        answered = 'sum(earlyexit_generation_answers_total{outcome="ok"})'
        assert max(values(client, answered, since=began), default=0) > 0

    service.write({**spec, "ramps": {"mode": "Disabled"}})
    tools.eventually(lambda: not is_lossy(plan_in_force(service)), what="the reference alone", seconds=60, state=seen)
    exact_from = readers.ended + 20  # those under way end as they began
    tools.eventually(lambda: readers.ended > exact_from, what="what was under way", seconds=60, state=seen)
    readers.routes.clear()
    tools.eventually(lambda: readers.routes.total() > 50, what="exact answers", seconds=60, state=seen)
    readers.stop()
    assert readers.ended > 0
    assert all(route.startswith("fp32") for route in readers.routes), readers.routes
    assert not readers.broken, readers.broken[:3]
    assert service.stop() == 0
