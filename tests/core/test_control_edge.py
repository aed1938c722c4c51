"""Workers at the edge as the spec has them: what is refused, and what they count for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import MANIFEST, Fleet, changed, pool, with_endpoint

from offramp_core.control.decide import decide
from offramp_core.control.objects import CapacityStatus, Condition, PoolStatus, ServiceStatus, WorkersStatus
from offramp_core.control.snapshot import Load
from offramp_core.control.spec import Edge, parse_spec
from offramp_core.control.workers.capacity import headroom
from offramp_core.errors import InvalidSpecError

POOLS = [{"name": "core", "replicas": 1}, {"name": "box", "replicas": 1}]
WITHOUT_NUMBER = {key: value for key, value in MANIFEST.items() if key != "replicas"}
SPEC: dict[str, Any] = {**WITHOUT_NUMBER, "pools": POOLS, "edge": {"pool": "box"}}
PRICED = [{"name": name, "costPerHour": "1", "maxWorkers": 2} for name in ("core", "box")]
UNSCHEDULABLE = "Unschedulable"
GENERATED = {"latency": {"threshold": "5s"}, "accuracy": {"maxLoss": "0.05", "output": "RougeL"}}


def test_an_edge_measures_its_uplink_and_refuses_offline_unless_it_is_told_otherwise() -> None:
    assert parse_spec(SPEC).edge == Edge("box", uplink="", residue="Auto", offline="Refuse")
    told = {"pool": "box", "uplink": "10Mbit", "residue": "Input", "offline": "Answer"}
    assert parse_spec({**SPEC, "edge": told}).edge == Edge("box", "10Mbit", "Input", "Answer")
    assert parse_spec(WITHOUT_NUMBER).edge is None


@pytest.mark.parametrize(
    ("changes", "field", "next_step"),
    [
        ({"edge": {"pool": "shop"}}, "spec.edge.pool", r"names no pool of spec.pools \(it has core, box\); add shop"),
        ({"edge": {}}, "spec.edge.pool", "name one of spec.pools"),
        ({"pools": POOLS[1:]}, "spec.edge.pool", "is the only pool; add another one, whose workers are the core"),
        ({"pools": [*POOLS, {"name": "edges", "replicas": 1}]}, "spec.pools", "use another name"),
        ({"pools": PRICED}, "spec.edge", "remove costPerHour and maxWorkers"),
        ({"objective": GENERATED}, "spec.edge", "one that generates has none, remove it"),
        *(
            ({"edge": {"pool": "box", "uplink": rate}}, "spec.edge.uplink", "a rate above 0 such as 500kbit")
            for rate in ("0bit", "0.0Mbit", "-1Mbit", "fast", "", 10, "10Mbit\n")
        ),
        ({"edge": {"pool": "box", "residue": "Logits"}}, "spec.edge.residue", "one of Auto, Input, Features"),
        ({"edge": {"pool": "box", "offline": "Maybe"}}, "spec.edge.offline", "one of Refuse, Answer"),
    ],
)
def test_an_edge_that_cannot_be_is_refused_with_field_and_next_step(
    changes: dict[str, Any], field: str, next_step: str
) -> None:
    with pytest.raises(InvalidSpecError, match=next_step) as refused:
        parse_spec({**SPEC, **changes})
    assert refused.value.field == field


def test_an_edge_without_pools_and_one_of_shared_workers_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.edge\.pool.*there are none"):
        parse_spec({**WITHOUT_NUMBER, "edge": {"pool": "box"}})
    with pytest.raises(InvalidSpecError, match=r"spec\.edge: .*WorkerPool shared"):
        parse_spec({**WITHOUT_NUMBER, "edge": {"pool": "box"}, "sharing": {"pool": "shared"}})


def told(*, core: bool) -> dict[str, Condition]:
    """What is said of a core that is ready or not, and an edge that is, with a peak of 200 requests a second."""
    fleet = Fleet(pool(4000, seed=1), SPEC)
    for _ in range(3):
        fleet.step()
    snapshot = fleet.snapshot()
    workers = tuple(
        replace(
            worker,
            endpoint=replace(worker.endpoint, pool=name, at_edge=name == "box", ready=ready),
            state=replace(worker.state, pace=1.0),
        )
        for worker, name, ready in zip(snapshot.workers, ("core", "box"), (core, True), strict=True)
        if worker.state is not None
    )
    status = decide(changed(snapshot, load=Load(200, 0.2, 200.0), workers=workers), fleet.now).status
    return {c.type: c for c in status.conditions}


def test_what_comes_to_edges_is_asked_of_the_core_once_exits_go_off() -> None:
    condition = told(core=True)["NoExitCapacity"]
    assert condition.status == "False"
    assert condition.message.startswith("exits are off: 1 ready workers of the core answer about ")
    assert condition.message.endswith(" in all beside box")


def test_edges_alone_do_not_make_a_service_ready() -> None:
    assert told(core=True)["Ready"].status == "True"
    assert told(core=False)["Ready"].status == "False"


def test_a_core_of_no_workers_says_so_and_what_to_raise() -> None:
    fleet = Fleet(pool(4000, seed=1), SPEC)
    nobody = [{"name": "core", "replicas": 0}, {"name": "box", "replicas": 2}]
    snapshot = fleet.snapshot()
    service = replace(snapshot.service, spec=parse_spec({**SPEC, "pools": nobody}))
    workers = tuple(with_endpoint(worker, pool="box", at_edge=True) for worker in snapshot.workers)
    status = decide(changed(snapshot, service=service, workers=workers), fleet.now).status
    [ready] = [c for c in status.conditions if c.type == "Ready"]
    assert (ready.status, ready.reason) == ("False", "ScaledToZero")
    assert (
        ready.message == "replicas is 0 in every pool but box, the edge, whose core they are: raise it in one of them"
    )


@pytest.mark.parametrize(("pools", "strategy"), [((1, 1), "Surge"), ((1, 5), "Surge"), ((2, 1), "Replace")])
def test_no_edge_stands_in_for_a_worker_of_the_core_that_finds_no_room(pools: tuple[int, int], strategy: str) -> None:
    core, box = pools
    fleet = Fleet(pool(500, seed=1), SPEC)
    snapshot = fleet.snapshot()
    spec = {**SPEC, "pools": [{"name": "core", "replicas": core}, {"name": "box", "replicas": box}]}
    service = replace(snapshot.service, spec=parse_spec(spec))
    one, another = snapshot.workers
    waits = {"ready": False, "no_room": True, "failure": "0/3 nodes: Insufficient cpu", "failure_reason": UNSCHEDULABLE}
    workers = (
        with_endpoint(one, pool="core", current=False),
        with_endpoint(another, name="new", uid="new", pool="core", **waits),
        with_endpoint(another, pool="box", at_edge=True, current=False),
    )
    for seconds in (0, 3600):
        asked = changed(snapshot, service=service, workers=workers, load=Load(10, 0.1, 10.0))
        service = replace(service, status=decide(asked, fleet.now + seconds).status)
    assert service.status.update.strategy == strategy


def test_edges_are_replaced_by_their_own_number_once_the_core_is_done() -> None:
    fleet = Fleet(pool(500, seed=1), SPEC)
    snapshot = fleet.snapshot()
    one, another = snapshot.workers
    workers = (with_endpoint(one, pool="core"), with_endpoint(another, pool="box", at_edge=True, current=False))
    status = decide(changed(snapshot, workers=workers), fleet.now).status
    [updating] = [c for c in status.conditions if c.type == "WorkersUpdating"]
    assert updating.message.startswith("0 of 1 workers run what the spec asks for")


def test_plans_are_priced_for_edges_whoever_answers_just_now() -> None:
    snapshot = Fleet(pool(500, seed=1), SPEC).snapshot()
    silent = tuple(replace(worker, state=None) for worker in snapshot.workers)
    assert changed(snapshot, workers=silent).has_edges
    assert not Fleet(pool(500, seed=1), WITHOUT_NUMBER).snapshot().has_edges


def test_headroom_counts_no_edges() -> None:
    pools = (PoolStatus("core", desired=2, ready=2), PoolStatus("box", desired=5, ready=5))
    capacity = CapacityStatus(worker_rate=10.0, peak_rate=10.0)
    status = ServiceStatus(workers=WorkersStatus(desired=7, ready=7), pools=pools, capacity=capacity)
    assert headroom(parse_spec(SPEC), status) == 2.0
