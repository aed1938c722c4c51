"""When workers that the spec does not ask for any more may go, and whose pods a Service finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offramp_core.control.objects import PoolStatus, Service, ServiceStatus
from offramp_core.control.spec import parse_spec
from offramp_core.control.workers.pools import with_numbers
from offramp_operator.kube.kinds import Object
from offramp_operator.kube.manifests import WorkerSettings, deployment, version_service
from offramp_operator.kube.pools import in_pools, take_over
from offramp_operator.shell.platform import WorkerIdentity

PRICED = {"costPerHour": "1", "minWorkers": 0, "maxWorkers": 4}


def service(*known: PoolStatus, name: str = "digits", **spec: Any) -> Service:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    parsed = parse_spec({"model": {"uri": "oci://offramp/digits:1"}, "objective": objective, **spec})
    return with_numbers(Service("default", name, "uid-1", 2, parsed, status=ServiceStatus(pools=known)))


def fixed(**replicas: int) -> dict[str, Any]:
    return {"pools": [{"name": name, "replicas": n} for name, n in replicas.items()]}


def planned(*names: str) -> dict[str, Any]:
    return {"pools": [{"name": name, **PRICED} for name in names]}


def has(available: int, *, asks: int = 0, seen: bool = True) -> Object:
    status = {"observedGeneration": int(seen), "readyReplicas": available, "availableReplicas": available}
    return {"metadata": {"generation": 1}, "spec": {"replicas": asks or available}, "status": status}


SLOW = PoolStatus("slow", worker_rate=20.0)


@pytest.mark.parametrize(
    ("asked", "wanted", "may_go"),
    [
        (service(**fixed(fast=1)), {"fast": has(0, asks=1)}, False),
        (service(**fixed(fast=1)), {"fast": None}, False),
        (service(**fixed(fast=1)), {"fast": has(1, seen=False)}, False),
        (service(**fixed(fast=1)), {"fast": has(1)}, True),
        (service(**fixed(a=3, c=3)), {"a": has(1), "c": has(1)}, False),  # each waits for its turn to be scaled
        (service(**fixed(a=3, c=3)), {"a": has(6), "c": has(1)}, False),
        (service(**fixed(a=3, c=3)), {"a": has(3), "c": has(3)}, True),
        (service(**fixed(a=0)), {"a": has(0)}, True),  # nobody is asked for
        (service(replicas=4), {"": has(1)}, False),  # one goes ahead where the URI has no digest
        (service(replicas=4), {"": has(4)}, True),
        (service(SLOW, **planned("slow")), {"slow": has(0)}, False),  # the plan of before had none there
        (service(replace(SLOW, desired=1, planned=2), **planned("slow")), {"slow": has(1)}, False),
        (service(replace(SLOW, desired=2, planned=2), **planned("slow")), {"slow": has(2)}, True),
        (service(replace(SLOW, desired=1, worker_rate=0.0), **planned("slow")), {"slow": has(1)}, False),  # unmeasured
        (
            service(
                replace(SLOW, desired=2, ready=2),
                PoolStatus("lost", desired=1, worker_rate=9.0, message="no node"),
                **planned("slow", "lost"),
            ),
            {"slow": has(2), "lost": has(0, asks=1)},
            True,
        ),
    ],
)
def test_what_goes_goes_when_as_many_are_available_as_are_asked_for(
    asked: Service, wanted: dict[str, Object | None], may_go: bool
) -> None:
    assert take_over(asked, wanted, None) is may_go


def test_workers_on_trial_stand_in_the_place_of_main_ones() -> None:
    assert take_over(service(replicas=4), {"": has(3)}, has(1))
    assert not take_over(service(replicas=4), {"": has(2)}, has(1))


def test_a_maximum_that_was_lowered_takes_no_worker_away_at_once() -> None:
    (pool,) = service(PoolStatus("fast", desired=6, worker_rate=20.0), **planned("fast")).spec.pools
    assert (pool.most, pool.replicas) == (4, 6)


def test_no_service_finds_the_pods_of_a_pool_whose_name_it_has() -> None:
    settings, identity = WorkerSettings("offramp/worker:1"), WorkerIdentity("public", "token")
    pool = deployment(in_pools(service(**fixed(fast=1)))[0], identity, settings, replicas=1)
    other = service(name="digits-fast", replicas=1)
    found = pool["spec"]["template"]["metadata"]["labels"].items()
    assert pool["metadata"]["name"] == other.name
    assert not version_service(other, trial=False)["spec"]["selector"].items() <= found
    assert not deployment(other, identity, settings, replicas=1)["spec"]["selector"]["matchLabels"].items() <= found
