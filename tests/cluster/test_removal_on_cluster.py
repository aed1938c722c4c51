"""The release is upgraded and removed under traffic; an operator of some namespaces comes and goes; people's roles come
and go with the chart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from kube import CHILDREN, RELEASE, SYSTEM, Chart, Clients, Namespace, infer, manifest, ready, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]

OF_THE_RELEASE = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/managed-by=Helm"
OPERATOR = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
# What the cluster's own roles let people do with our kinds, by the role that is the first to have it.
FIRST_WITH = {"view": "get earlyexitservices", "edit": "create earlyexitservices", "admin": "delete ramprollouts"}


def everything(*options: str) -> list[dict[str, Any]]:
    """All objects of all kinds that the options leave."""
    kinds = run("kubectl", "api-resources", "--verbs=list", "-o", "name").split()
    listed = run("kubectl", "get", ",".join(kinds), *options, "-o", "json")
    items: list[dict[str, Any]] = json.loads(listed)["items"]
    return items


def may(what: str, *, who: str, namespace: Namespace) -> bool:
    """Whether the API server lets somebody do what ``what`` (verb and kind) says."""
    command = ["kubectl", "auth", "can-i", *what.split(), "--as", who, "-n", namespace.name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "yes"


def bind(role: str, *, who: str, namespace: Namespace) -> None:
    run("kubectl", "create", "rolebinding", who, f"--clusterrole={role}", f"--user={who}", "-n", namespace.name)


def test_an_operator_is_upgraded_with_a_canary_in_mid_step_and_no_request_fails(
    alone: None, namespace: Namespace, good: str, installed: Chart
) -> None:
    # The slowness gate has no part in this story, whatever a ramp costs this tiny model on a shared machine.
    pinned = {"mode": "Pinned", "maxOverhead": "1", "pin": {"ramps": [{"id": "r02-linear", "threshold": "0.000001"}]}}
    steps = {"steps": [{"weight": 50, "pause": "1h"}]}
    namespace.apply(manifest(good, ramps={"mode": "Disabled"}))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    clients = Clients(namespace, 600)
    try:
        namespace.apply(manifest(good, ramps=pinned, rollout=steps))

        def status() -> dict[str, Any]:
            found = run("kubectl", "get", "ramprollouts", "-n", namespace.name, "-o", "json")
            items = json.loads(found)["items"]
            return dict(items[0].get("status", {})) if items else {}

        namespace.eventually(
            "the canary", lambda: status().get("weight") == 50 and status()["phase"] in ("Progressing", "Paused")
        )
        before = status()
        installed.upgrade("--set", f"podAnnotations.upgraded={namespace.name}")
        after = status()
        assert (after.get("weight"), after["startedAt"]) == (50, before["startedAt"]), after
        assert after["phase"] in ("Progressing", "Paused"), after
        run(
            "kubectl",
            "patch",
            "ramprollout",
            "tiny-1",
            "-n",
            namespace.name,
            "--type=merge",
            "-p",
            '{"spec":{"decision":"Abort"}}',
        )
        namespace.eventually("the new operator to abort it", lambda: status()["phase"] == "Aborted")
    finally:
        answers = clients.stop()
    assert len(answers) > 100
    assert set(answers) == {"200"}


def test_removing_the_release_leaves_workers_that_serve_and_nothing_that_is_stuck(
    alone: None, namespace: Namespace, good: str, chart: Chart
) -> None:
    namespace.apply(manifest(good))
    namespace.eventually("the service to be ready", lambda: ready(namespace))
    assert {item["kind"] for item in everything("-A", "-l", OF_THE_RELEASE)} >= {"Deployment", "Pod", "ClusterRole"}
    clients = Clients(namespace, 600)
    try:
        chart.uninstall()
        namespace.eventually("the operator to be gone", lambda: not everything("-A", "-l", OF_THE_RELEASE))
        for item in everything("-A"):
            metadata = item["metadata"]
            if metadata.get("namespace") not in (namespace.name, SYSTEM):
                continue
            held = metadata.keys() & {"finalizers", "deletionTimestamp"}
            assert not held, f"{item['kind']} {metadata['name']} has {held}"
        run("kubectl", "delete", "namespace", SYSTEM, "--timeout=120s")
        assert infer(namespace) == ["200"], "workers need no operator"
    finally:
        answers = clients.stop()
    assert set(answers) == {"200"}
    run("kubectl", "delete", "earlyexitservice", "tiny", "-n", namespace.name, "--timeout=60s")
    namespace.eventually("all children to go", lambda: namespace.list(CHILDREN) == ["configmap/kube-root-ca.crt"])


def test_an_operator_of_some_namespaces_serves_those_alone_for_people_with_the_clusters_own_roles(
    alone: None, chart: Chart, namespaces: Callable[[], Namespace], good: str
) -> None:
    mine, other = namespaces(), namespaces()
    chart.install(scope={"kind": "namespaces", "namespaces": [mine.name]})
    roles = list(FIRST_WITH)
    for role in roles:
        bind(role, who=role, namespace=mine)
    mine.eventually("the roles to be aggregated", lambda: may("delete ramprollouts", who="admin", namespace=mine))
    for who in roles:
        can = [may(what, who=who, namespace=mine) for what in FIRST_WITH.values()]
        assert can == [roles.index(first) <= roles.index(who) for first in roles], who
        assert not may("patch earlyexitservices --subresource=status", who=who, namespace=mine)
    mine.apply(manifest(good), who="edit")
    other.apply(manifest(good))
    mine.eventually("the service to be ready", lambda: ready(mine))
    assert infer(mine) == ["200"]
    assert mine.list(CHILDREN) != other.list(CHILDREN) == ["configmap/kube-root-ca.crt"]
    assert other.get("earlyexitservice", "tiny")["status"] == {"observedGeneration": 0}, "nobody looked at it"
    assert may("create deployments", who=OPERATOR, namespace=mine)
    assert not may("get pods", who=OPERATOR, namespace=other)

    chart.uninstall()
    mine.eventually("the roles to go", lambda: not may("get earlyexitservices", who="view", namespace=mine))
    assert infer(mine) == ["200"]
