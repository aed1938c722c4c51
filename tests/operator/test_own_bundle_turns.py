"""Pools with a bundle of their own wait until a worker of the spec's bundle has told which model that is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paper_api import PaperService, bundle

from offramp_operator.kube.kinds import DEPLOYMENT, POD, REPLICA_SET, SERVICE, Object

FIRST, SECOND = bundle(1).removeprefix("oci://"), bundle(2).removeprefix("oci://")
OWN, OTHER = "offramp/digits-cuda:1", "offramp/digits-cuda:other"


def pools(gpu: str = OWN, **replicas: int) -> list[Object]:
    return [
        *({"name": name, "replicas": n} for name, n in replicas.items()),
        {"name": "gpu", "replicas": 1, "model": {"uri": f"oci://{gpu}"}},
    ]


def prove(s: PaperService, *models: str) -> None:
    """A worker has served each of them, and the operator has written that down."""
    known = [{"uri": uri, "digest": f"sha256:{str(n) * 64}"} for n, uri in enumerate(models, start=1)]
    s.api.store(SERVICE, {**s.api.objects[SERVICE, "digits"], "status": {"models": known}})


def served() -> PaperService:
    """By the workers of both pools."""
    s = PaperService(pools=pools(cpu=1))
    prove(s, bundle(1))
    for _ in range(3):
        s.step()
        s.settle_all()
    assert s.bundles() == {"digits-cpu": FIRST, "digits-gpu": OWN}
    return s


def change(s: PaperService, **spec: Any) -> None:
    """Edit both bundles at once."""
    s.edit(**{"model": {"uri": bundle(2)}, "pools": pools(OTHER, cpu=1), **spec})


def a_pod_is_on_probation(s: PaperService) -> None:
    s.api.objects[DEPLOYMENT, "digits-cpu"]["status"]["availableReplicas"] = 0


def no_pod_is_ready(s: PaperService) -> None:
    s.settle("digits-cpu", ready=0)


def the_own_pool_is_in_mid_change(s: PaperService) -> None:
    s.settle("digits-gpu", updated=0)


def all_is_well(s: PaperService) -> None:
    pass


@pytest.mark.parametrize(
    "disturbed", [all_is_well, a_pod_is_on_probation, no_pod_is_ready, the_own_pool_is_in_mid_change]
)
def test_no_pod_of_an_own_bundle_starts_before_the_new_model_is_known(disturbed: Any) -> None:
    s = served()
    change(s)
    disturbed(s)
    s.step(passes=2)
    s.settle("digits-cpu")
    s.step("digits-cpu", passes=3)
    assert s.bundles() == {"digits-cpu": SECOND, "digits-gpu": OWN}
    prove(s, bundle(1), bundle(2))
    s.settle_all()
    s.step()
    assert s.bundles() == {"digits-cpu": SECOND, "digits-gpu": OTHER} and not s.failures


@pytest.mark.parametrize("edge", [None, {"pool": "cpu"}], ids=["no-worker", "edge"])
def test_where_no_worker_can_tell_the_model_own_bundles_wait_and_it_is_said(edge: Object | None) -> None:
    asked = {"pools": pools(OTHER, cpu=0 if edge is None else 1), "edge": edge}
    s = PaperService(**asked)
    s.step(passes=2)
    assert "digits-gpu" not in s.names(DEPLOYMENT)
    assert [failure for failure in s.failures if "spec.model.digest" in failure]

    s.edit(model={"uri": bundle(1), "digest": f"sha256:{'1' * 64}"})
    s.step(passes=2)
    assert s.bundles()["digits-gpu"] == OTHER and not s.failures


def test_an_own_pool_whose_model_is_unknown_keeps_the_workers_that_it_has() -> None:
    s = served()
    change(s, pools=pools(cpu=0))
    s.step(passes=5)
    assert s.bundles()["digits-gpu"] == OWN and s.deployment("digits-gpu")["replicas"] == 1
    assert [failure for failure in s.failures if "spec.model.digest" in failure]


def test_a_pinned_bundle_starts_in_all_pools_that_have_it_though_one_has_no_nodes() -> None:
    s = PaperService(pools=pools(none=2, cpu=2))
    s.step()
    assert {name: s.deployment(name)["replicas"] for name in s.names(DEPLOYMENT)} == {"digits-none": 2, "digits-cpu": 2}


def test_the_worker_that_finds_out_what_a_tag_means_is_one_that_has_a_place() -> None:
    s = PaperService(pools=pools(none=2, cpu=2), model={"uri": "oci://offramp/digits:latest"})
    s.step()
    assert s.deployment("digits-none")["replicas"] == 1 and s.deployment("digits-cpu")["replicas"] == 0
    find_no_place(s, "digits-none")
    s.step(passes=2)
    assert s.deployment("digits-none")["replicas"] == 1 and s.deployment("digits-cpu")["replicas"] == 1


def find_no_place(s: PaperService, name: str) -> None:
    """The scheduler has no node for the pod that a Deployment asks for."""
    live = s.api.objects[DEPLOYMENT, name]
    template = live["spec"]["template"]

    def owned(own: str, owner: Object) -> Object:
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "name": owner["metadata"]["name"]}
        references = [reference | {"uid": owner["metadata"]["uid"], "controller": True}]
        return {"name": own, "ownerReferences": references, "annotations": template["metadata"]["annotations"]}

    made = s.api.store(REPLICA_SET, {"metadata": owned(f"{name}-1", live), "spec": {"template": template}})
    lacks = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cpu"}
    pod = {"metadata": owned(f"{name}-1-a", made), "spec": template["spec"]}
    s.api.store(POD, {**pod, "status": {"phase": "Pending", "conditions": [lacks]}})
