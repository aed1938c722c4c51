"""Passes of services that have no worker yet, of which a full cluster may have thousands."""

from __future__ import annotations

from dataclasses import replace

from fleet import Fleet, pool  # type: ignore[import-not-found]

from offramp_core.control.decide import decide
from offramp_core.control.snapshot import Decision, Worker, WorkerEndpoint

NO_NODE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


class Waiting:
    """A service whose only pod waits from its first pass on; ``address`` is that of its pod."""

    def __init__(self) -> None:
        self.fleet = Fleet(pool(50, seed=1))
        self.began = self.fleet.now
        self.after(0.0)

    def after(self, seconds: float, *, address: str | None = None) -> Decision:
        pod = WorkerEndpoint("w", "u", False, failure=NO_NODE, failure_reason="Unschedulable", admin_url=address)
        seen = self.fleet.snapshot()
        seen = replace(
            seen,
            gathered=replace(seen.gathered, workers=(pod,)),
            observed=replace(seen.observed, workers=(Worker(pod),)),
        )
        self.fleet.now = self.began + seconds
        decision = decide(seen, self.fleet.now)
        self.fleet.store(decision)
        return decision


def test_a_pod_that_waits_for_a_node_is_looked_at_less_the_longer_it_waits() -> None:
    waiting = Waiting()
    waits = [waiting.after(seconds).requeue_after_seconds for seconds in (1.0, 8.0, 40.0, 80.0, 3600.0)]
    assert waits == [1.0, 2.0, 10.0, 20.0, 30.0]


def test_a_pod_that_runs_is_asked_for_its_model_every_second_however_long_it_waited() -> None:
    waiting = Waiting()
    assert waiting.after(3600.0, address="http://10.0.0.1:9000").requeue_after_seconds == 1.0
