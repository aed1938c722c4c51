"""A changed model is tried beside the one that serves, under traffic: one that is well takes over, one that fails
goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage import Json, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

# One worker more than the two that serve, so a third of the requests.
RATE = 50.0  # of the traffic
BESIDE: Json = {"type": "Availability", "sideBySide": {"weight": 33, "pause": "3s", "deadline": "2m"}}


def test_a_changed_model_that_is_well_is_promoted_and_the_other_workers_follow(stage: Stage, images: Any) -> None:
    stage.operate()
    stage.serve(ramps={"mode": "Disabled"}, updatePolicy=BESIDE)
    stage.until("what serves to be known", lambda: serving(stage) == f"oci://{images.bundle}")
    before = workers(stage)
    stage.send()
    stage.apply(model={"uri": f"oci://{images.changed}"})
    stage.until("both versions to be compared", lambda: version(stage).get("phase") == "Comparing")
    assert serving(stage) == f"oci://{images.bundle}" and workers(stage) == before
    trial = workers(stage, on_trial=True)
    assert len(trial) == 1
    stage.until("the promotion", lambda: stage.events("VersionPromoted"), seconds=120)
    assert answered_on_trial(stage) >= 50, "the new version answered requests beside the other before it was promoted"
    assert not touched(stage, before, until="Promoting")
    stage.until("the trial to be over", lambda: not workers(stage, on_trial=True) and stage.settled())
    assert serving(stage) == f"oci://{images.changed}" and not version(stage).get("phase")
    after = workers(stage)
    assert len(after) == 2 and not after & (before | trial), "the trial's worker has gone as well"
    assert len(stage.events("VersionOnTrial")) == len(stage.events("VersionPromoted")) == 1
    assert not conditions_seen(stage) & {("Ready", "False"), ("Stalled", "True")}
    stage.check()


def test_a_changed_model_whose_batches_fail_goes_and_nobody_else_is_touched(stage: Stage, images: Any) -> None:
    stage.operate()
    stage.serve(updatePolicy=BESIDE, rollout={"steps": [{"weight": 100}], "confidence": "0.9"})
    stage.send()
    stage.until("a plan", lambda: stage.phase("Succeeded") and stage.settled())
    before, plan = workers(stage), stage.status()["stableConfig"]
    stage.apply(model={"uri": f"oci://{images.failing}"})
    stage.until("the rejection", lambda: stage.condition("Stalled").get("reason") == "VersionRejected")
    assert version(stage)["reason"] == "FailuresRejected"
    told = stage.condition("Stalled")["message"]
    assert "batches failed" in told and f"oci://{images.bundle} goes on serving" in told
    stage.until("the trial's worker to go", lambda: not workers(stage, on_trial=True))
    stage.apply(model={"uri": f"oci://{images.bundle}"})  # as `git revert` would
    stage.until("the service to be settled", lambda: stage.settled() and not stage.condition("Stalled"))
    assert workers(stage) == before and not touched(stage, before)
    assert stage.status()["stableConfig"] == plan and len(stage.rollouts()) == 1
    assert len(stage.events("VersionRejected")) == 1
    assert ("Ready", "False") not in conditions_seen(stage)
    times = [at for at, kind, _, obj in stage.history.seen if kind == "pod" and is_on_trial(obj)]
    share = BESIDE["sideBySide"]["weight"] / 100
    stage.check(lost=failed_by_the_trial(stage), at_most=1.5 * share * RATE * (max(times) - min(times)))


# --- helpers ----------------------------------------------------------------------------------------


def version(stage: Stage) -> Json:
    return dict(stage.status().get("version", {}))


def serving(stage: Stage) -> str:
    return str(version(stage).get("serving", {}).get("uri", ""))


def is_on_trial(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get("earlyexit.dev/version") == "next")


def workers(stage: Stage, *, on_trial: bool = False) -> set[str]:
    """Uids of those that run, of the version that serves or of the one on trial."""
    return {p["metadata"]["uid"] for p in stage.pods() if is_on_trial(p) == on_trial}


def statuses(stage: Stage) -> Iterator[Json]:
    """Of the service, from the first time that it was ready on."""
    seen = (obj.get("status") or {} for obj in stage.history.of("service"))
    began = False
    for status in seen:
        began = began or any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
        if began:
            yield status


def conditions_seen(stage: Stage) -> set[tuple[str, str]]:
    return {(c["type"], c["status"]) for status in statuses(stage) for c in status["conditions"]}


def answered_on_trial(stage: Stage) -> int:
    """Requests that the new version was judged by when it was promoted."""
    promoted = next(s["version"] for s in statuses(stage) if s.get("version", {}).get("phase") == "Promoting")
    return next(int(gate["n"]) for gate in promoted["gates"] if gate["name"] == "objective")


def touched(stage: Stage, uids: set[str], *, until: str = "never") -> set[str]:
    """Which of some pods were told to end before the trial came to a phase."""
    ended: set[str] = set()
    for _, kind, event, obj in stage.history.seen:
        if kind == "service" and (obj.get("status") or {}).get("version", {}).get("phase") == until:
            break
        if kind == "pod" and (event == "DELETED" or obj["metadata"].get("deletionTimestamp")):
            ended.add(obj["metadata"]["uid"])
    return ended & uids


def failed_by_the_trial(stage: Stage) -> Callable[[Json], bool]:
    """Requests whose batch failed on a worker on trial."""
    trial = {o["status"].get("podIP") for _, kind, _, o in stage.history.seen if kind == "pod" and is_on_trial(o)}
    return lambda failure: (
        failure["what"].startswith("500 ")
        and "batch of this request failed" in failure["what"]
        and (failure["pod"] is None or failure["pod"] in trial)
    )
