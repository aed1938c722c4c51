"""Tuning goes on and on; what users and their GitOps tools look at does not move. ``make soak-control`` does it for ten
minutes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from gitops import GitOps  # type: ignore[import-not-found]
from hard_inputs import inputs_on_which_a_ramp_is_wrong  # type: ignore[import-not-found]
from stage import NAME, PATIENCE_SECONDS, ROOT, Json, Stage, Traffic  # type: ignore[import-not-found]

SECONDS = float(os.environ.get("OFFRAMP_SOAK_SECONDS", "20"))
TUNE_EVERY_SECONDS, DIFF_EVERY_SECONDS = 5.0, 4.0
DRIFT_RATE = 50.0  # as much again as the usual traffic
FIGURES = ROOT / "build" / "bench" / "soak_control.json"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800 + 2 * SECONDS, func_only=True)]


def test_ready_and_kubectl_diff_do_not_move_while_tuning_never_rests(stage: Stage, tmp_path: Path) -> None:
    """Inputs change for the worse and back, so that plans fall and others are found and rolled out, over and over."""
    _, hard = inputs_on_which_a_ramp_is_wrong(tmp_path)
    stage.operate()
    stage.serve()
    stage.send()
    stage.until("a first plan", lambda: stage.phase("Succeeded") and stage.settled())
    git = GitOps(stage)
    since, known = len(stage.history.of("service")), {r["metadata"]["name"] for r in stage.rollouts()}
    promoted = lambda: {r["metadata"]["name"] for r in stage.rollouts() if verdict(r) == "Succeeded"} - known  # noqa: E731
    diffs: list[str] = []
    asked = falls = 0
    drift: Traffic | None = None
    known_at_drift, off = 0, stage.rollouts()[0]["spec"]["from"]
    began, tune_at, diff_at = time.monotonic(), 0.0, 0.0
    while (now := time.monotonic()) < began + SECONDS or not promoted():
        assert now < began + SECONDS + PATIENCE_SECONDS, f"no plan was rolled out\n{stage.state()}"
        if now >= tune_at:
            asked += 1  # what `kubectl offramp tune --now` does
            stage.api.merge(stage.path, {"metadata": {"annotations": {"earlyexit.dev/request": f"tune/{time.time()}"}}})
            tune_at = now + TUNE_EVERY_SECONDS
        if now >= diff_at:
            diffs.append(difference(stage))
            diff_at = now + DIFF_EVERY_SECONDS
        serving, found = stage.status()["stableConfig"], len(promoted())
        if drift is None and serving != off and stage.phase("Succeeded"):
            drift, known_at_drift = stage.send(DRIFT_RATE, rows=hard), found
        elif drift is not None and (serving == off or found > known_at_drift):
            drift.stop()
            drift, falls = None, falls + (serving == off)
        git.keep_up()
        time.sleep(0.5)
    seconds = time.monotonic() - began
    tuned = lambda: stage.status()["tuning"].get("handledRequest", "").startswith("tune/")  # noqa: E731
    stage.until("an answer to a request", tuned)
    states = [obj["status"] for obj in stage.history.of("service")[since:]]
    for status in states:
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert conditions["Ready"] == "True"
        assert not conditions.keys() & {"Reconciling", "Stalled"}, conditions
        assert status["observedGeneration"] == 1
    races = [seen for seen in diffs if seen]
    assert all(is_race(seen) for seen in races), races
    assert len(races) <= 1 + 0.1 * len(diffs), "most of the time nobody writes between kubectl's two readings"
    foreign = [f for f in live(stage)["metadata"]["managedFields"] if f["manager"] == "offramp-operator"]
    assert [f.get("subresource") for f in foreign] == ["status"], "the operator writes status and nothing else"
    assert asked >= SECONDS / TUNE_EVERY_SECONDS / 2
    git.check(seconds=SECONDS)
    stage.check()
    figures = {
        "seconds": round(seconds),
        "asked": asked,
        "promoted": len(promoted()),
        "falls": falls,
        "statuses": len(states),
        "diffs": len(diffs),
        "races": len(races),
        "requests": sum(t.summary["sent"] for t in stage.traffic),
        "failed": sum(len(t.summary["failures"]) for t in stage.traffic),
    }
    print(figures)
    if "OFFRAMP_SOAK_SECONDS" in os.environ:
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


def verdict(rollout: Json) -> str:
    return str((rollout.get("status") or {}).get("verdict", ""))


def is_race(seen: str) -> bool:
    """Whether the operator wrote the status between kubectl's two readings: they are then of two versions of one
    object."""
    changed = [line for line in seen.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return any(line[1:].strip().startswith("resourceVersion:") for line in changed)


def live(stage: Stage) -> dict[str, Any]:
    return stage.history.now("service")[NAME]


def difference(stage: Stage) -> str:
    """What a GitOps tool would see between the user's manifest and the cluster."""
    command = ["kubectl", "diff", "--server-side", "--force-conflicts", "--field-manager=user", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(stage.manifest), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
