"""What stands between the operator and the cluster breaks: the API server, watches, answers, pokes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from stage import SLOWNESS, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

LONGER_THAN_EVERY_TIMEOUT = 25.0 * SLOWNESS  # the Lease and the acknowledgement have 15 s in operator_process.py


def test_api_server_away_for_longer_than_every_timeout(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout={"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9"})
    name = stage.rollout()["name"]
    stage.broken("away")
    time.sleep(LONGER_THAN_EVERY_TIMEOUT)
    assert stage.phase("Progressing"), "nobody decides what cannot be written"
    stage.broken()
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert stage.rollout()["name"] == name
    assert stage.rollout().get("renewals", 0) >= 1, "workers left the canary by themselves while nobody pulled them"
    assert stage.operators[0].starts > 1, "the leadership was lost meanwhile"
    stage.check(operators_alive=False)


def test_watch_silently_stalled(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout={"steps": [{"weight": 100, "pause": "30s"}], "confidence": "0.9"})
    stage.broken("stalled-watch")
    # What a person says now reaches the operator by its regular list alone.
    stage.tell(stage.rollout()["name"], decision="Abort")
    stage.until("the abort", lambda: stage.phase("Aborted"))
    stage.apply(ramps={"mode": "Disabled"})
    stage.until("the edit to be observed", lambda: stage.settled() and stage.status()["observedGeneration"] == 2)
    operator = stage.operators[0]
    late = lambda: stage.health(operator).startswith("a watch has been")  # noqa: E731
    stage.until("the liveness probe to tell", late)
    stage.broken()
    operator.kill()  # as the kubelet would
    stage.until("an operator that is well", lambda: stage.health(operator) == "ok")
    assert len(stage.rollouts()) == 1
    stage.check()


def test_storm_of_409_410_429_and_lost_answers(canary: Callable[..., Stage]) -> None:
    stage = canary(
        rollout={"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9"}, ramps={"maxOverhead": "1"}
    )
    name = stage.rollout()["name"]
    stage.broken("conflict", "gone", "throttled", "lost-answers")
    long_enough = time.monotonic() + 20.0
    stage.until("the storm to have raged", lambda: stage.phase("Succeeded") or time.monotonic() > long_enough)
    stage.apply(replicas=1)
    time.sleep(5.0)
    stage.broken()
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until(
        "the service to be settled with one worker", lambda: stage.settled() and stage.status()["workers"]["ready"] == 1
    )
    assert [r["metadata"]["name"] for r in stage.rollouts()] == [name]
    stage.check(operators_alive=False)


def test_poke_lost_and_config_map_late(stage: Stage) -> None:
    stage.operate()
    stage.serve(
        ramps={"mode": "Recommend", "maxOverhead": "1"},
        rollout={"steps": [{"weight": 100, "pause": "5s"}], "confidence": "0.9"},
    )
    stage.send()
    stage.until("a recommendation", lambda: stage.phase("Pending"))
    stage.broken("pokes-lost")
    stage.tell(stage.rollout()["name"], decision="Promote")
    stage.until("the canary to be published", lambda: stage.phase("Progressing"))
    time.sleep(4.0)
    # The kubelet may have brought the ConfigMap to one worker or both by now: the step begins when both run its epoch.
    if stage.rollout().get("stepStartedAt"):
        stage.until("both to have acknowledged", lambda: stage.status()["workers"].get("acked") == 2)
    stage.broken()
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert len(stage.rollouts()) == 1
    stage.check()
