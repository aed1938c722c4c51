"""What users and administrators change in the middle of a rollout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stage import NAME, Stage  # type: ignore[import-not-found]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

STEP = {"steps": [{"weight": 100, "pause": "10s"}], "confidence": "0.9"}


def test_quota_for_exactly_the_running_pods(canary: Callable[..., Stage]) -> None:
    # No longer than it takes to run into the quota: once it is gone, Kubernetes waits as long again before it makes the
    # next pod.
    stage = canary(rollout={"steps": [{"weight": 100, "pause": "6s"}], "confidence": "0.9"})
    quotas = f"/api/v1/namespaces/{stage.namespace}/resourcequotas"
    stage.api.post(
        quotas,
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": {"pods": "2"}}},
    )
    before = {p["metadata"]["uid"] for p in stage.pods()}
    resources = {**stage.manifest["spec"]["worker"]["resources"], "requests": {"cpu": "11m", "memory": "64Mi"}}
    stage.apply(worker={**stage.manifest["spec"]["worker"], "resources": resources})
    told = lambda: "quota full is used up" in stage.condition("Reconciling").get("message", "")  # noqa: E731
    stage.until("the quota to be named", told)
    assert stage.condition("Ready")["status"] == "True"
    stage.until("the promotion all the same", lambda: stage.phase("Succeeded"))
    assert {p["metadata"]["uid"] for p in stage.pods()} == before, "no worker goes before its successor serves"
    stage.api.delete(f"{quotas}/full")
    stage.until(
        "the workers to be replaced",
        lambda: stage.settled() and not before & {p["metadata"]["uid"] for p in stage.pods()},
    )
    assert len(stage.rollouts()) == 1
    stage.check()


def test_spec_changed_mid_rollout(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=STEP)
    first = stage.rollout()["name"]
    stage.apply(objective={"latency": {"threshold": "5s"}, "accuracy": {"maxDisagreement": "0.06"}})
    verdict = lambda: (stage.rollouts()[0].get("status") or {}).get("verdict")  # noqa: E731
    stage.until("the first attempt to be superseded", lambda: verdict() == "Superseded")
    stage.until(
        "a plan for the new objective to be promoted",
        lambda: stage.rollout()["name"] != first and stage.phase("Succeeded"),
    )
    stage.until("the service to be settled", stage.settled)
    assert [r["status"]["verdict"] for r in stage.rollouts()] == ["Superseded", "Succeeded"]
    stage.check()


def test_service_deleted_and_recreated_mid_rollout(canary: Callable[..., Stage]) -> None:
    stage = canary(rollout=STEP)
    old = stage.history.now("service")[NAME]["metadata"]["uid"]
    stage.api.delete(stage.path, propagationPolicy="Background")
    stage.until("the service to be gone", lambda: NAME not in stage.history.now("service"))
    # Its pods are meant to go, and they answer what they have taken: clients are told no more than that nobody is
    # there.
    stage.until("its workers to end", lambda: not stage.history.now("pod"))
    sent = stage.traffic[0].stop()
    assert sent["sent"] == sent["answered"] + sent["withdrawn"], sent["failures"]
    stage.apply()
    new = lambda: stage.history.now("service").get(NAME, {"metadata": {"uid": old}})["metadata"]["uid"] != old  # noqa: E731
    stage.until("the new service to be settled", lambda: new() and stage.settled())
    owned = lambda: [r for r in stage.rollouts() if r["metadata"]["ownerReferences"][0]["uid"] == old]  # noqa: E731
    stage.until("what belonged to the old one to be gone", lambda: not owned())
    stage.send()
    stage.until("a plan of the new one to be promoted", lambda: stage.phase("Succeeded"))
    stage.until("the service to be settled", stage.settled)
    assert len(stage.rollouts()) == 1
    stage.check()
