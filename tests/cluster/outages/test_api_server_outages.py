"""What stands between the operator and the cluster breaks: the API server, watches, answers, pokes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from stage import SLOWNESS, Stage, delivered  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

LONGER_THAN_EVERY_TIMEOUT = 25.0 * SLOWNESS  # the Lease and the acknowledgement have 15 s in operator_process.py


def test_api_server_away_for_longer_than_every_timeout(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout={"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9"})
    name = stage.rollout()["name"]
    stage.broken("away")
    time.sleep(LONGER_THAN_EVERY_TIMEOUT)
    assert stage.phase("Progressing"), "nobody decides what cannot be written"
    assert stage.struck("away") >= 2, "the operator asked, and was not answered"
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
    assert stage.struck("stalled-watch") >= 2, "of services and rollouts at least"
    stage.broken()
    operator.kill()  # as the kubelet would
    stage.until("an operator that is well", lambda: stage.health(operator) == "ok")
    assert len(stage.rollouts()) == 1
    stage.check()


def test_storm_of_409_410_429_and_lost_answers(canary: Callable[..., Stage]) -> None:
    stage = canary(
        rollout={"steps": [{"weight": 50, "pause": "3s"}, {"weight": 100, "pause": "3s"}], "confidence": "0.9"},
        ramps={"maxOverhead": "1"},
    )
    to = stage.rollouts()[0]["spec"]["to"]
    stage.broken("conflict", "gone", "throttled", "lost-answers")
    long_enough = time.monotonic() + 20.0
    stage.until("the storm to have raged", lambda: stage.phase("Succeeded") or time.monotonic() > long_enough)
    stage.apply(replicas=1)
    kinds = ("conflict", "gone", "throttled", "lost-answers")
    stage.until("each kind to have struck", lambda: min(stage.struck(kind) for kind in kinds) >= 3)
    stage.broken()
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until(
        "the service to be settled with one worker",
        lambda: stage.settled() and stage.status()["workers"].get("ready") == 1,
    )
    assert stage.steps() == [50, 100]
    assert [r["spec"]["to"] for r in stage.rollouts()].count(to) == 1, "one attempt for a plan"
    stage.check(operators_alive=False)


def test_poke_lost_and_config_map_late(stage: Stage) -> None:
    stage.operate()
    stage.serve(
        ramps={"mode": "Recommend", "maxOverhead": "1"},
        rollout={"steps": [{"weight": 100, "pause": "5s"}], "confidence": "0.9"},
    )
    stage.send()
    stage.until("a recommendation", lambda: stage.phase("Pending"))
    workers = stage.pods()
    stage.refresh_volumes()
    time.sleep(1.0)  # for the kubelet to look; if it does so later, the ConfigMap is not late below
    stage.broken("pokes-lost")
    stage.tell(stage.rollout()["name"], decision="Promote")
    stage.until("the canary to be published", lambda: stage.phase("Progressing"))
    lost = lambda: all(stage.struck(f"pokes-lost {pod['status']['podIP']}") for pod in workers)  # noqa: E731
    stage.until("the poke of each worker to be lost", lost)
    time.sleep(4.0)
    canary = stage.published()
    assert max(map(delivered, workers)) < canary, "the kubelet's copies are late"
    assert not stage.rollout().get("stepStartedAt"), "a step begins when its epoch runs on every worker"

    # Not one poke comes through to the end: every epoch is brought by the kubelet alone.
    def brought() -> bool:
        if min(map(delivered, workers)) < stage.published():
            stage.refresh_volumes()
            return False
        return True

    stage.until("the step to begin", lambda: brought() and stage.rollout().get("stepStartedAt"))
    assert min(map(delivered, workers)) >= canary
    stage.until("the promotion", lambda: brought() and stage.phase("Succeeded"))
    acked = lambda: stage.status()["workers"].get("acked") == 2  # noqa: E731
    stage.until(
        "both workers to tell that they run what was promoted", lambda: brought() and stage.settled() and acked()
    )
    assert stage.published() > canary
    assert len(stage.rollouts()) == 1
    stage.check()
