"""A class whose exits break its own budget: no exit names it any more, while the whole keeps its budget and the others
go on leaving."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytestmark = pytest.mark.slow

Up = Any
Array = npt.NDArray[Any]
RAMP, BAD = "r02-linear", 4  # of all that it answers 4 % are not the model's, of those that it calls 4 nearly a third
BUDGET, BUDGET_OF_BAD, BUDGET_OF_EACH = 0.1, 0.05, 0.25


def stopped(service: Up) -> list[str]:
    """Classes and slices that the status calls stopped."""
    return [s["name"] for s in service.status().get("measured", {}).get("slices", []) if s.get("stopped")]


def answers_to(service: Up, rows: Array) -> tuple[Array, Array]:
    """What the service says to each row, and whether an exit said it."""
    labels: list[int] = []
    exits: list[str] = []
    for few in np.array_split(rows, len(rows) // 20):
        reply = service.infer(few)
        labels += next(o["data"] for o in reply["outputs"] if o["name"] == "label")
        exits += reply["parameters"]["exit"].split(",")
    return np.array(labels), np.array(exits) != "final"


@pytest.mark.timeout(600)
def test_a_class_whose_exits_break_its_budget_is_named_by_none_while_the_others_go_on(
    up: Callable[..., Up], tools: Any, bundle: Path
) -> None:
    # What is tuned would be certified for the class and keep its budget, so a person pins. Every request is audited: it
    # takes seconds.
    accuracy = {
        "maxDisagreement": str(BUDGET),
        "classes": [{"class": BAD, "maxDisagreement": str(BUDGET_OF_BAD)}],
        "everyClass": {"count": tools.n_classes, "maxDisagreement": str(BUDGET_OF_EACH)},
    }
    service = up(
        replicas=1,
        objective={"latency": {"threshold": "2s"}, "accuracy": accuracy},
        execution="ResultsOnly",
        ramps={"mode": "Pinned", "maxOverhead": "1", "pin": {"ramps": [{"id": RAMP, "threshold": "1"}]}},
        rollout={"steps": [{"weight": 100}], "confidence": "0.9"},
    )
    rows = tools.inputs(600, seed=77)
    truth = tools.answers(bundle, rows)
    traffic = tools.Traffic(lambda: service.url, rows, truth, rate=50.0, together=4)
    service.start()
    service.await_ready(1)
    traffic.start()

    def seen() -> object:
        return service.status(), service.rollout(), service.tail()

    def no_exit_names_it() -> Any:
        labels, left = answers_to(service, rows)
        return not left[labels == BAD].any() and (labels, left)

    tools.eventually(lambda: stopped(service), what="the stop", seconds=120, state=seen)
    labels, left = tools.eventually(no_exit_names_it, what="the stop at the worker", state=seen)
    traffic.stop()
    assert traffic.failures == []
    assert traffic.agreed / traffic.answered >= 1 - BUDGET, "the whole has kept its budget"
    assert left[labels != BAD].mean() > 0.8, "the others leave as before"
    np.testing.assert_array_equal(labels[~left], truth[~left])

    assert stopped(service) == [f"class/{BAD}"]
    assert service.condition("Ready")["status"] == "True"
    plan = next(c for c in service.objects("RampConfig") if c["metadata"]["name"] == service.status()["stableConfig"])
    assert [ramp["id"] for ramp in plan["spec"]["ramps"]] == [RAMP]
    events = [json.loads(line) for line in (service.state / "events.jsonl").read_text().splitlines()]
    told = [event["message"] for event in events if event["reason"] == "SliceStopped"]
    assert len(told) == 1 and f"slice class/{BAD} disagreed; its budget is 5.00%" in told[0]
    why = [sys.executable, "-m", "offramp_cli", "why", "tiny", "--state", str(service.state)]
    explained = subprocess.run(why, capture_output=True, text=True, check=True, timeout=120).stdout
    assert f"slice class/{BAD}: " in explained and "stopped: no exit gives such an answer under this plan" in explained
    assert service.stop() == 0
