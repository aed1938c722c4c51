"""The operator dies, is cut off, or has another idea of the time. Whoever goes on decides the same, once."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hard_inputs import inputs_on_which_a_ramp_is_wrong  # type: ignore[import-not-found]
from stage import Json, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]


STEPS = [{"weight": 50, "pause": "2s"}, {"weight": 100, "pause": "2s"}]  # an outage in the first, or between them


def kill_in(stage: Stage, phase: str) -> None:
    """As soon as the phase shows: often between two writes of the pass that began it. Nothing ends these phases but
    time or a person."""
    stage.until(phase, lambda: stage.phase(phase))
    stage.operators[0].kill()


@contextmanager
def killed_when_about_to_end(stage: Stage, phase: str) -> Iterator[None]:
    """What is done within brings the phase about; the write that would end it is held until another process has made it
    as well."""
    held = f"held {phase}"
    stage.broken(held)
    yield
    stage.until(f"an operator about to end {phase}", lambda: stage.phase(phase) and stage.struck(held))
    stage.operators[0].kill()
    killed = stage.struck(held)
    stage.until("the next one to come to the same", lambda: stage.struck(held) > killed)
    assert stage.phase(phase)
    stage.broken()


def test_operator_killed_in_every_phase(stage: Stage) -> None:
    operator = stage.operate()
    stage.serve(
        ramps={"mode": "Recommend", "maxOverhead": "1"},
        rollout={"steps": [{"weight": 100, "pause": "10s"}], "promotion": "Manual", "confidence": "0.9"},
    )
    stage.send()
    looking = lambda: stage.status().get("tuning", {}).get("state") in ("CollectingLabels", "Tuning")  # noqa: E731
    stage.until("labels to be collected", looking)
    operator.kill()
    kill_in(stage, "Pending")
    name = stage.rollout()["name"]
    stage.tell(name, decision="Promote")
    kill_in(stage, "Progressing")
    stage.tell(name, paused=True)
    kill_in(stage, "Paused")
    with killed_when_about_to_end(stage, "Promoting"):
        stage.tell(name, paused=False)
    stage.until("the promotion to be over", lambda: stage.phase("Succeeded"))
    promoted = stage.rollouts()[0]["spec"]["to"]
    stage.until("the promoted plan to be stable", lambda: stage.status().get("stableConfig") == promoted)
    stage.until("the service to be settled", stage.settled)
    assert [r["metadata"]["name"] for r in stage.rollouts()] == [name]
    stage.until("every kill to be answered by a start", lambda: operator.starts >= 6)
    stage.check(operators_alive=False)


def test_operator_killed_while_a_person_decides_and_while_rolling_back(stage: Stage) -> None:
    operator = stage.operate()
    stage.serve(rollout={"steps": [{"weight": 100, "pause": "1s"}], "promotion": "Manual", "confidence": "0.9"})
    stage.send()
    kill_in(stage, "AwaitingPromotion")
    name = stage.rollout()["name"]
    stage.tell(name, decision="Promote")
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    promoted = stage.rollouts()[0]["spec"]["to"]
    stage.until("the promoted plan to be stable", lambda: stage.status().get("stableConfig") == promoted)
    # Off by intent, and back: the plan returns, rests before its promotion, and a person takes it back.
    stage.apply(ramps={"mode": "Disabled"})
    stage.until("exits off", lambda: stage.settled() and stage.status()["stableConfig"] != promoted)
    stage.apply(ramps={"mode": "Auto", "maxOverhead": "1"})
    stage.until("the plan to come back", lambda: stage.rollout()["name"] != name)
    second = stage.rollout()["name"]
    stage.until("the rest before its promotion", lambda: stage.phase("AwaitingPromotion"))
    with killed_when_about_to_end(stage, "RollingBack"):
        stage.tell(second, decision="Abort")
    aborted = lambda: (stage.rollouts()[1].get("status") or {}).get("verdict") == "Aborted"  # noqa: E731
    stage.until("the abort", aborted)
    stage.apply(ramps={"mode": "Disabled"})
    stage.until("exits off again", lambda: stage.settled() and stage.status()["stableConfig"] != promoted)
    assert [r["metadata"]["name"] for r in stage.rollouts()][:2] == [name, second]
    stage.until("every kill to be answered by a start", lambda: operator.starts >= 3)
    stage.check(operators_alive=False)


def test_operator_killed_while_a_gate_takes_a_plan_back(stage: Stage, tmp_path: Path) -> None:
    ramp, hard = inputs_on_which_a_ramp_is_wrong(tmp_path)
    operator = stage.operate()
    stage.serve(suspend=True)
    stage.send()
    pin = {"ramps": [{"id": ramp, "threshold": "1"}]}
    stage.apply(
        ramps={"mode": "Pinned", "maxOverhead": "1", "pin": pin},
        rollout={"steps": [{"weight": 100, "pause": "5m"}], "confidence": "0.9"},
        suspend=False,
    )
    stage.until("the pin's canary", lambda: stage.phase("Progressing") and stage.rollout().get("stepStartedAt"))
    with killed_when_about_to_end(stage, "RollingBack"):
        stage.send(rows=hard)
    stage.until("the verdict", lambda: stage.phase("RolledBack"))
    assert stage.rollout()["reason"] in ("AccuracyRejected", "DriftRejected")
    stage.until("the pin to be refused", lambda: stage.condition("Stalled").get("reason") == "PinRejected")
    first = stage.rollouts()[0]["spec"]["from"]
    stage.until("the plan before to serve", lambda: stage.status().get("stableConfig") == first)
    assert stage.condition("Ready")["status"] == "True"
    assert len(stage.rollouts()) == 1
    stage.until("the kill to be answered by a start", lambda: operator.starts >= 2)
    stage.check(operators_alive=False)


def test_leader_partitioned_away_while_a_second_takes_over(canary: Callable[..., Stage], images: Any) -> None:
    stage = canary(rollout={"steps": STEPS, "confidence": "0.9"}, standby_image=images.worker)
    first, second = stage.operators
    stage.broken("away", channel=0)
    lease = lambda: (stage.history.now("lease").get("offramp") or {"spec": {}})["spec"]  # noqa: E731
    holder = lambda: lease().get("holderIdentity")  # noqa: E731
    stage.until("the second to lead", lambda: holder() == "operator-1")
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    to_the_second = len("2026-01-01T00:00:00")
    assert stage.rollout()["finishedAt"][:to_the_second] >= lease()["acquireTime"][:to_the_second], (
        "the second decided it"
    )
    assert stage.steps() == [50, 100]
    stage.broken(channel=0)
    stage.until("the first to be back as a standby", lambda: first.process.poll() is None)
    stage.until("the service to be settled", stage.settled)
    assert first.starts > 1, "a leader that cannot renew its Lease ends"
    assert holder() == "operator-1" and second.starts == 1
    assert len(stage.rollouts()) == 1
    stage.check(operators_alive=False)


def test_clock_skew_of_ten_minutes(canary: Callable[..., Stage], faketime: Callable[[str], dict[str, str]]) -> None:
    stage = canary(rollout={"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9", "stepDeadline": "2m"})
    name = stage.rollout()["name"]
    stage.operators[0].stop(signal.SIGTERM)  # which hands its Lease over at once
    before = stage.rollout()
    ahead = stage.operate(1, **faketime("+10m"))
    gone_on = lambda: _leads(stage, "operator-1") and stage.rollout() != before  # noqa: E731
    stage.until("an operator ten minutes ahead to go on", gone_on)
    ahead.stop(signal.SIGTERM)
    stage.operate(0, **faketime("-10m"))
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    assert stage.rollout()["name"] == name
    stage.until("the service to be settled", stage.settled)
    assert len(stage.rollouts()) == 1
    skews = {holder: skews_of(stage, holder) for holder in ("operator-1", "operator-0")}
    assert skews["operator-1"] and all(540 < skew < 660 for skew in skews["operator-1"]), skews
    # The first operator of this name had the right time.
    assert any(-660 < skew < -540 for skew in skews["operator-0"]), skews
    stage.check()


def skews_of(stage: Stage, holder: str) -> list[float]:
    """What a holder's clock was ahead of this machine's whenever it renewed the Lease."""
    renewals = [(at, obj["spec"]) for at, kind, _, obj in stage.history.seen if kind == "lease"]
    return [
        datetime.fromisoformat(spec["renewTime"]).timestamp() - at
        for at, spec in renewals
        if spec.get("holderIdentity") == holder and spec.get("renewTime")
    ]


def _leads(stage: Stage, holder: str) -> bool:
    lease = stage.history.now("lease").get("offramp", {"spec": {}})["spec"]
    return lease.get("holderIdentity") == holder


def test_operator_upgraded_mid_rollout(canary: Callable[..., Stage], images: Any) -> None:
    """The release before, its operator and its workers, gives way to this one in the middle of a step."""
    code = f"{images.previous_code}/core:{images.previous_code}/operator"
    first = {"image": images.previous, "PYTHONPATH": code}
    stage = canary(rollout={"steps": STEPS, "confidence": "0.9"}, first=first, standby_image=images.worker)
    assert {image(pod) for pod in stage.pods()} == {images.previous}
    assert f"PYTHONPATH={code}" in Path(f"/proc/{stage.operators[0].process.pid}/environ").read_text()
    name = stage.rollout()["name"]
    stage.operators[0].stop(signal.SIGTERM)
    assert re.search("leadership-released", stage.operators[0].log.read_text())
    stage.until("workers of the new image", lambda: [image(pod) for pod in stage.pods()] == 2 * [images.worker])
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert stage.steps() == [50, 100]
    assert [r["metadata"]["name"] for r in stage.rollouts()] == [name]
    stage.check()


def test_workers_of_the_release_before_run_the_canary_of_an_upgraded_operator_until_they_are_replaced_under_it(
    canary: Callable[..., Stage], images: Any
) -> None:
    """Who keeps the worker image keeps old workers. They take the new operator's epochs and are counted by it, first
    alone and then beside new ones."""
    code = f"{images.previous_code}/core:{images.previous_code}/operator"
    stage = canary(
        rollout={"steps": STEPS, "promotion": "Manual", "confidence": "0.9"},
        first={"image": images.previous, "PYTHONPATH": code},
        standby_image=images.previous,
    )
    name, before = stage.rollout()["name"], stage.published()
    stage.operators[0].stop(signal.SIGTERM)
    stage.until("the rest before its promotion", lambda: stage.phase("AwaitingPromotion"))
    assert _leads(stage, "operator-1") and stage.published() > before and stage.steps() == [50, 100]
    assert {image(pod) for pod in stage.history.of("pod")} == {images.previous}
    stage.operators[1].stop(signal.SIGTERM)
    stage.operate(0)
    stage.until("workers of both releases", lambda: _ready(stage) == {images.previous, images.worker})
    stage.until("workers of the new image", lambda: [image(pod) for pod in stage.pods()] == 2 * [images.worker])
    stage.until("both of them to be counted", lambda: _counted(stage) == 2)
    assert stage.phase("AwaitingPromotion")
    stage.tell(name, decision="Promote")
    stage.until("the promotion", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert [r["metadata"]["name"] for r in stage.rollouts()] == [name]
    stage.check()


def _ready(stage: Stage) -> set[str]:
    """Images of the workers that serve."""
    return {
        image(pod)
        for pod in stage.pods()
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
    }


def _counted(stage: Stage) -> int:
    """Workers that run and whose canary audits stand in the rollout's ledger."""
    live = (stage.rollout().get("ledger") or {}).get("live") or {}
    return sum((arms.get("canary") or {}).get("audited", 0) > 0 for arms in live.values())


def image(pod: Json) -> str:
    return str(pod["spec"]["containers"][0]["image"])
