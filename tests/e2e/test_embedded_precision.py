"""A bundle with a faster graph of the same model: it serves once it is certified, and never where the user asks for
exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Up = Any


def stable_plan(service: Up) -> dict[str, Any]:
    name = service.status().get("stableConfig")
    return next((dict(o["spec"]) for o in service.objects("RampConfig") if o["metadata"]["name"] == name), {})


@pytest.mark.timeout(900)
def test_a_lower_precision_is_certified_and_promoted_and_goes_off_when_the_user_asks_for_exact(
    up: Callable[..., Up], tools: Any, tmp_path: Path
) -> None:
    bundle = tools.write_bundle(tmp_path / "wide", with_int8=True)
    spec = {
        "model": {"uri": f"file://{bundle}"},
        "objective": {"latency": {"threshold": "500ms"}, "accuracy": {"maxDisagreement": "0.05"}},
        "rollout": {"steps": [{"weight": 50}], "confidence": "0.9", "cooldown": "20s"},
        "replicas": 1,
    }
    service = up(**spec, ramps={"maxOverhead": "0.5"})  # a shared machine makes batches slow for reasons of its own
    rows = tools.inputs(600, seed=77)
    traffic = tools.Traffic(lambda: service.url, rows, tools.answers(bundle, rows), rate=60.0, together=4)
    service.start()
    service.await_ready(1)
    traffic.start()

    def seen() -> object:
        return service.status(), service.rollout(), service.tail()

    tools.eventually(lambda: stable_plan(service).get("precision") == "int8", what="int8", seconds=300, state=seen)
    certified = next(o for o in service.objects("RampConfig") if o["spec"]["precision"] == "int8")
    assert certified["status"]["certificates"][0]["planHash"]
    before = traffic.answered
    tools.eventually(lambda: traffic.answered > before + 300, what="traffic at int8", seconds=120, state=seen)

    service.write({**spec, "ramps": {"maxOverhead": "0.5", "precision": "Exact"}})
    tools.eventually(lambda: stable_plan(service).get("precision") == "fp32", what="fp32", seconds=60, state=seen)
    tools.eventually(
        lambda: stable_plan(service).get("precision") == "fp32" and stable_plan(service)["ramps"],
        what="a certified plan at fp32",
        seconds=300,
        state=seen,
    )
    traffic.stop()
    assert not traffic.failures, traffic.failures[:3]
    assert traffic.agreed / traffic.answered > 0.93
    assert set(traffic.exits) > {"final"}
    assert service.stop() == 0
