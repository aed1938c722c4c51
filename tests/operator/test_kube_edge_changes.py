"""A service with an edge while its spec changes: what is replaced when, who answers meanwhile, and what stands beside
workers that are about to go."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_api import NAMESPACE, PaperService, bundle

from offramp_operator.kube.kinds import (
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    HTTP_ROUTE,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    Object,
)

EDGE = {"pool": "box"}
FIRST, SECOND, THIRD = (bundle(number).removeprefix("oci://") for number in (1, 2, 3))


def pools(**replicas: int) -> list[Object]:
    return [{"name": name, "replicas": n} for name, n in replicas.items()]


def served(core: int = 2, box: int = 2, **spec: Any) -> PaperService:
    """By all its workers."""
    s = PaperService(**{"pools": pools(core=core, box=box), "edge": EDGE, **spec})
    s.step()
    s.settle_all()
    s.step()
    return s


@pytest.mark.parametrize(
    ("second_pools", "edge"),
    [(pools(core=2, shop=2), {"pool": "shop"}), (pools(core=2, box=2), {"pool": "core"})],
    ids=["renamed", "exchanged"],
)
def test_another_pool_becomes_the_edge_and_requests_to_edges_find_ready_ones_all_the_time(
    second_pools: list[Object], edge: Object
) -> None:
    s = served()
    s.edit(pools=second_pools, edge=edge)
    for _ in range(10):
        s.step()
        assert any(s.api.objects[DEPLOYMENT, name].get("status") for name in s.behind("digits-edges"))
        assert s.ready >= 2
        s.settle_all()
    assert s.behind("digits-edges") == {f"digits-{edge['pool']}.edge"}
    assert len(s.names(DEPLOYMENT)) == 2


def test_a_plain_pool_called_edges_may_be_renamed_and_become_the_edge_in_one_edit() -> None:
    s = PaperService(pools=pools(core=2, edges=2), route={"parentRefs": [{"name": "public"}]})
    s.step()
    s.settle_all()
    s.edit(pools=pools(core=2, box=2), edge=EDGE)
    for _ in range(10):
        s.step()
        assert "digits-edges" not in s.behind("digits-edges")
        s.settle_all()
    assert s.names(DEPLOYMENT) == {"digits-core", "digits-box.edge"}
    assert s.behind("digits-edges") == {"digits-box.edge"}


def test_a_bundle_that_changes_again_goes_to_the_core_first_though_the_edge_is_in_the_middle_of_the_last_change() -> (
    None
):
    s = served()
    s.edit(model={"uri": bundle(2)})
    s.step("digits-core", passes=2)
    assert s.bundles() == {"digits-core": SECOND, "digits-box.edge": SECOND}
    s.settle("digits-box.edge", ready=1, updated=1)
    s.edit(model={"uri": bundle(3)})
    s.step()
    assert s.bundles() == {"digits-core": THIRD, "digits-box.edge": SECOND}
    s.settle("digits-core")
    s.step()
    assert s.bundles() == {"digits-core": THIRD, "digits-box.edge": THIRD}


def core_pods(s: PaperService, name: str, **status: Any) -> None:
    """A ReplicaSet of the core as it is asked for now, and three pods of it."""
    live = s.api.objects[DEPLOYMENT, "digits-core"]
    template = live["spec"]["template"]
    now = datetime.fromtimestamp(s.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def owned(own: str, owner: Object) -> Object:
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "name": owner["metadata"]["name"]}
        references = [reference | {"uid": owner["metadata"]["uid"], "controller": True}]
        notes = template["metadata"]["annotations"]
        return {"name": own, "ownerReferences": references, "annotations": notes, "creationTimestamp": now}

    made = s.api.store(REPLICA_SET, {"metadata": owned(name, live), "spec": {"template": template}})
    for number in range(3):
        pod = {"metadata": owned(f"{name}-{number}", made), "spec": {**template["spec"], "nodeName": "n1"}}
        s.api.store(POD, {**pod, "status": status})


def ready_pods(s: PaperService) -> None:
    core_pods(s, "old", phase="Running", conditions=[{"type": "Ready", "status": "True"}])


def test_the_edge_waits_while_nodes_reject_the_new_pods_of_its_core() -> None:
    s = served()
    ready_pods(s)
    s.edit(model={"uri": bundle(2)})
    s.step()
    why = {"reason": "UnexpectedAdmissionError", "message": "Pod was rejected: no device of that kind today"}
    core_pods(s, "new", phase="Failed", **why)
    s.settle("digits-core", updated=0)
    s.step("digits-core", passes=2, seconds=2)
    assert s.bundles() == {"digits-core": FIRST, "digits-box.edge": FIRST}


def test_the_edge_waits_while_its_core_finds_no_room_however_long() -> None:
    s = served()
    ready_pods(s)
    s.edit(model={"uri": bundle(2)})
    s.step()
    lacks = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cpu"}
    core_pods(s, "new", phase="Pending", conditions=[lacks])
    s.settle("digits-core", updated=1)
    s.step(passes=20)
    assert s.bundles() == {"digits-core": SECOND, "digits-box.edge": FIRST}


def test_edges_are_no_spare_workers_of_the_core() -> None:
    policy = {"type": "ResourceAware"}
    s = served(core=1, box=3, updatePolicy=policy)
    assert s.deployment("digits-core")["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert s.deployment("digits-box.edge")["strategy"]["rollingUpdate"]["maxUnavailable"] == 1
    s = served(core=2, box=1, updatePolicy=policy)
    assert s.deployment("digits-core")["strategy"]["rollingUpdate"]["maxUnavailable"] == 1
    assert s.deployment("digits-box.edge")["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_a_large_pool_that_becomes_the_edge_answers_until_there_are_edges() -> None:
    s = served(core=1, box=5, edge=None)
    s.edit(edge=EDGE)
    for _ in range(5):
        s.step("digits-core")
        assert s.ready == 6
    s.step("digits-box.edge", passes=3)
    assert s.names(DEPLOYMENT) == {"digits-core", "digits-box.edge"}


def test_edges_that_are_about_to_go_keep_fence_budget_and_service_and_get_nothing_from_a_gateway() -> None:
    s = served(route={"parentRefs": [{"name": "public"}]})
    s.edit(edge=None)
    s.step("digits-core", passes=5)
    assert s.behind("digits-edges") == {"digits-box.edge"}
    [rule] = s.api.objects[HTTP_ROUTE, "digits"]["spec"]["rules"]
    assert {each["name"] for each in rule["backendRefs"]} == {"digits-core", "digits-box"}
    budget = s.api.objects[DISRUPTION_BUDGET, "digits-edges"]["spec"]["selector"]["matchLabels"]
    assert s.found_by(budget) == {"digits-box.edge"}
    assert s.names(NETWORK_POLICY) == {"digits-workers", "digits-edges"}
    s.step("digits-box", passes=4)
    assert s.names(DEPLOYMENT) == {"digits-core", "digits-box"}
    for kind in (NETWORK_SERVICE, DISRUPTION_BUDGET):
        assert "digits-edges" not in s.names(kind)
    assert s.names(NETWORK_POLICY) == {"digits-workers"}


def test_somebody_elses_service_of_the_edges_name_keeps_no_worker_from_being_changed() -> None:
    s = served(edge=None)
    s.api.store(NETWORK_SERVICE, {"metadata": {"name": "digits-edges"}, "spec": {"selector": {"app": "mine"}}})
    s.edit(model={"uri": bundle(2)}, edge=EDGE, pools=pools(core=4, box=2))
    s.step("digits-core", passes=4)
    assert s.bundles()["digits-core"] == s.bundles()["digits-box.edge"] == SECOND
    assert s.deployment("digits-core")["replicas"] == 4
    [failure] = s.failures
    assert failure.startswith(f"Service {NAMESPACE}/digits-edges exists and does not belong to this service")
