"""Workers that their node rejects as soon as they are placed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import Fleet, changed, pool, with_endpoint, worker_of  # type: ignore[import-not-found]

from offramp_core.control.decide import decide
from offramp_core.control.objects import Condition, Service, ServiceStatus
from offramp_core.control.snapshot import Decision, Worker
from offramp_core.control.workers.rejected import next_worker_at
from offramp_core.reasons import ConditionType, Reason


@pytest.mark.parametrize(
    ("rejected_at", "after"),
    [
        ([], None),
        ([100.0, 100.0], None),
        ([100.0, 100.2, 100.4], 110.4),
        ([100.0, 100.2, 100.4, 111.4], 122.8),
        ([100.0, 100.2, 100.4, 111.4, 124.4], 148.8),
        ([100.0, 100.2, 100.4, 4000.0, 4000.0], None),
        ([0.0, 0.0, 0.0, 900.0, 1800.0], 2400.0),
    ],
    ids=["none", "two are borne", "a third", "twice as long", "again", "of an earlier trouble", "ten minutes at most"],
)
def test_pauses_double_from_the_third_rejection_on(rejected_at: list[float], after: float | None) -> None:
    found = next_worker_at(reversed(rejected_at))
    assert found == (None if after is None else pytest.approx(after))


REJECTED: dict[str, Any] = {
    "failure_reason": Reason.REJECTED_BY_NODE,
    "failure": "node n1 rejected w-3; ask for 1; 3 pods were rejected, so the next one is made at 10:00",
    "held_until": 1_000_010.0,
}


def told(*workers: Worker) -> tuple[Decision, Service]:
    """What is decided of a new service with these workers."""
    fleet = Fleet(pool(2000, seed=1))
    service = replace(fleet.service, status=ServiceStatus())
    decision = decide(changed(fleet.snapshot(), service=service, workers=workers), 1_000_000.0)
    return decision, replace(service, status=decision.status)


def ready(service: Service) -> Condition:
    return next(c for c in service.status.conditions if c.type == ConditionType.READY)


def test_a_rejected_worker_is_told_before_one_that_merely_waits() -> None:
    waits = worker_of("w-2", ready=False, failure="no node has room", failure_reason=Reason.UNSCHEDULABLE)
    _, service = told(waits, worker_of("w-3", ready=False, **REJECTED))
    assert (ready(service).status, ready(service).reason) == ("False", "RejectedByNode")
    assert ready(service).message == f"w-3: {REJECTED['failure']}"


def test_each_pause_is_one_event() -> None:
    rejected = worker_of("w-3", ready=False, **REJECTED)
    decision, service = told(rejected)
    assert [(e.reason, e.warning) for e in decision.events] == [("RejectedByNode", True)]
    fleet = Fleet(pool(2000, seed=1))
    again = decide(changed(fleet.snapshot(), service=service, workers=(rejected,)), 1_000_001.0)
    assert again.events == ()
    later = with_endpoint(rejected, failure=f"{REJECTED['failure']}:20", held_until=1_000_020.0)
    assert len(decide(changed(fleet.snapshot(), service=service, workers=(later,)), 1_000_011.0).events) == 1
