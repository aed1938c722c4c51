"""Exits carry a burst that one worker could not carry without them: the autoscaler is told, and exits may go off."""

from __future__ import annotations

from typing import Any

import identity_bundle  # type: ignore[import-not-found]
import pytest
from stage import NAME, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

QUIET_RATE = 12.0  # one worker carries it without exits on a machine that is busy with much else, too
BURST = 1.25  # times what one worker answers without exits, quiet traffic included
PIN = {"ramps": [{"id": identity_bundle.RAMPS[-1].id, "threshold": "1"}]}


def test_workers_for_a_burst_without_exits_are_there_before_exits_go_off(stage: Stage, images: Any) -> None:
    """The autoscaler is the cluster's own. What it cannot see here is in-flight work, for want of a metrics adapter:
    `minReplicas` is what it keeps. Nor is the burst sent again with exits off: workers of one node share its cores, so
    two carry no more than one. ``tests/core/test_capacity_stories.py`` has both, simulated.
    """
    stage.operate()
    stage.serve(
        model={"uri": f"oci://{images.deep}"},
        objective={"latency": {"threshold": "5s"}, "accuracy": {"maxDisagreement": "0.2"}},
        execution="ComputeSaving",
        ramps={"mode": "Disabled", "maxOverhead": "1"},
        rollout={"steps": [{"weight": 100}], "confidence": "0.9"},
        replicas=None,
        autoscaling={"minReplicas": 1, "maxReplicas": 4, "targetInFlight": 8},
    )
    stage.send(QUIET_RATE)
    stage.until("many batches with exits off", lambda: stage.condition("LatencyObjectiveMet")["status"] == "True")
    stage.apply(ramps={"mode": "Pinned", "maxOverhead": "1", "pin": PIN})
    stage.until("exits", lambda: stage.phase("Succeeded") and stage.settled())
    assert capacity(stage) == ("True", "Sufficient") and floor(stage) == len(stage.pods()) == 1

    burst = stage.send(BURST * stage.status()["capacity"]["workerRate"] - QUIET_RATE)
    stage.until("the shortage to be told", lambda: capacity(stage) == ("False", "ExitsOffWouldOverload"))
    stage.until("the workers that it takes", lambda: capacity(stage) == ("True", "Sufficient"))
    reserved = {p["metadata"]["uid"] for p in stage.pods()}
    assert floor(stage) > 1 and len(reserved) > 1
    burst.stop()

    plan = stage.status()["stableConfig"]
    stage.apply(ramps={"mode": "Disabled", "maxOverhead": "1"})
    stage.until("exits off", lambda: stage.settled() and stage.status()["stableConfig"] != plan)
    stage.until("the workers to be enough", lambda: capacity(stage) == ("True", "Sufficient"))
    assert reserved <= {p["metadata"]["uid"] for p in stage.pods()}, "no worker has gone with the exits or the burst"
    assert floor(stage) > 1
    stage.check()


# --- helpers ----------------------------------------------------------------------------------------


def capacity(stage: Stage) -> tuple[str, str]:
    found = stage.condition("NoExitCapacity")
    return found["status"], found["reason"]


def floor(stage: Stage) -> int:
    """The fewest workers that the cluster's autoscaler may leave."""
    path = f"/apis/autoscaling/v2/namespaces/{stage.namespace}/horizontalpodautoscalers/{NAME}"
    return int(stage.api.get(path)["spec"]["minReplicas"])
