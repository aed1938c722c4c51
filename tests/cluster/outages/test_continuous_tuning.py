"""Tuning goes on and on; what users and their GitOps tools look at does not move. ``make soak-control`` does it for ten minutes."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import pytest
import yaml
from gitops import GitOps  # type: ignore[import-not-found]
from stage import NAME, Stage  # type: ignore[import-not-found]

SECONDS = float(os.environ.get("OFFRAMP_SOAK_SECONDS", "30"))
TUNE_EVERY_SECONDS, DIFF_EVERY_SECONDS = 5.0, 4.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1800 + 2 * SECONDS, func_only=True),
]


def test_ready_and_kubectl_diff_do_not_move_while_tuning_never_rests(stage: Stage) -> None:
    stage.operate()
    stage.serve()
    stage.send()
    stage.until("a first plan", lambda: stage.phase("Succeeded") and stage.settled())
    git = GitOps(stage)
    since, asked = len(stage.history.of("service")), 0
    end, tune_at, diff_at = time.monotonic() + SECONDS, 0.0, 0.0
    while time.monotonic() < end:
        if time.monotonic() >= tune_at:
            asked += 1  # what `kubectl offramp tune --now` does
            stage.api.merge(stage.path, {"metadata": {"annotations": {"earlyexit.dev/request": f"tune/{time.time()}"}}})
            tune_at = time.monotonic() + TUNE_EVERY_SECONDS
        if time.monotonic() >= diff_at:
            # The operator may write the status between kubectl's two readings; a drift is there each time.
            assert any((seen := difference(stage)) == "" for _ in range(5)), seen
            diff_at = time.monotonic() + DIFF_EVERY_SECONDS
        git.keep_up()
        time.sleep(0.5)
    tuned = lambda: stage.status()["tuning"].get("handledRequest", "").startswith("tune/")  # noqa: E731
    stage.until("an answer to a request", tuned)
    states = [obj["status"] for obj in stage.history.of("service")[since:]]
    assert {s["tuning"].get("state") for s in states} & {"Tuning"}, "tuning has gone on"
    for status in states:
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert conditions["Ready"] == "True"
        assert not conditions.keys() & {"Reconciling", "Stalled"}, conditions
        assert status["observedGeneration"] == 1
    foreign = [f for f in live(stage)["metadata"]["managedFields"] if f["manager"] == "offramp-operator"]
    assert [f.get("subresource") for f in foreign] == ["status"], "the operator writes status and nothing else"
    assert asked >= SECONDS / TUNE_EVERY_SECONDS / 2
    git.check(seconds=SECONDS)
    stage.check()


def live(stage: Stage) -> dict[str, Any]:
    return stage.history.now("service")[NAME]


def difference(stage: Stage) -> str:
    """What a GitOps tool would see between the user's manifest and the cluster."""
    command = ["kubectl", "diff", "--server-side", "--force-conflicts", "--field-manager=user", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(stage.manifest), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
