"""The simulator against the worker's own batcher and stage loop, with a clock that the stages turn: equal to the last
digit.

What a test on a real machine cannot tell apart (neighbours, the scheduler) is left out here; what is left must agree
exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offramp_core.admission import Pace, QueueAdmission
from offramp_core.batching import BATCHING, Batching, TfServingBatching, batching, exact_seconds
from offramp_core.bundle import BatchProfile, Profile
from offramp_core.costs import CostTable
from offramp_core.execution import Regrouping
from offramp_core.task import task_of
from offramp_lab.policies import NO_EXIT, PlanInForce, Trace
from offramp_lab.simulate import ANSWERED, MAX_BATCH, OfframpBatching, serve_stream
from offramp_lab.simulate.arrivals import bursts, poisson
from offramp_worker.engine.execution.execute import run_stages
from offramp_worker.engine.queue.batcher import Batcher
from offramp_worker.engine.queue.tickets import OverloadedError, Ticket, new_ticket

pytestmark = pytest.mark.slow

RAMPS = 5
ACTIVE = (0, 1, 3)  # ramps 0 and 1 share a place
Array = npt.NDArray[Any]


def profile(seed: int) -> Profile:
    """Times that grow with the batch, not quite in proportion."""
    rng = np.random.default_rng(seed)
    batches = []
    for size in (1, 2, 4, 8, 16, 32):
        segments = rng.uniform(0.5, 1.5, RAMPS + 1) * (0.3 + size**0.9)
        segments[1] = 0.0
        ramps = rng.uniform(0.02, 0.1, RAMPS) * (1 + 0.2 * size)
        batches.append(BatchProfile(size, float(segments.sum()), tuple(segments), tuple(ramps), 0.01 * size))
    return Profile("test", 1, tuple(batches))


@dataclass
class Clock:
    """Virtual seconds, and whom to tell of time that has passed."""

    now: float = 0.0
    passed: Callable[[], None] = lambda: None

    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.passed()


@dataclass(frozen=True)
class TimedStage:
    """A stage that turns the clock instead of computing; a row's features are the ramp where it wants to leave."""

    clock: Clock
    seconds: list[float]
    regroup: list[float]
    ramps: tuple[int, ...]

    reads_input = pads = False

    def run(self, features: Array, _x: Array, rows: Array | None = None) -> tuple[Array, list[tuple[Array, Array]]]:
        if rows is not None:
            self.clock.turn(self.regroup[len(features)])
            features = features[rows]
        self.clock.turn(self.seconds[len(features)])
        return features, [(features, features[:, 0]) for _ in self.ramps]


@dataclass(frozen=True)
class WantsToLeave:
    """Rows leave at the ramp where they want to."""

    ramp: int

    def leaves(self, _: Array, wanted: Array) -> Array:
        return wanted == self.ramp


class Waiting(threading.Condition):
    """Instead of sleeping, turns the clock to the next arrival or to the end of the wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.next_arrival: Callable[[], float | None] = lambda: None

    def wait(self, timeout: float | None = None) -> bool:
        coming = self.next_arrival()
        if coming is None or (timeout is not None and self.clock.now + timeout < coming):
            assert timeout is not None
            coming = self.clock.now + timeout
        self.clock.turn(coming - self.clock.now)
        self.clock.now = coming  # not a rounding error later
        self.clock.passed()
        return True


@dataclass
class VirtualWorker:
    """The engine's loop around the real batcher and the real stage loop: take what waits, run it, answer rows as they
    leave."""

    stages: tuple[TimedStage, ...]
    clock: Clock
    regrouping: Regrouping | None
    policy: Batching
    profile: Profile
    objective: float | None = None
    answered: dict[int, float] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    batches: int = 0

    def serve(self, arrivals: Array, exits: Array) -> None:
        numbers: dict[Ticket, int] = {}
        waiting = Waiting(self.clock)
        batcher = Batcher(
            policy=self.policy,
            door=QueueAdmission(self.objective, Pace(exact_seconds(self.profile, max_batch=self.policy.max_batch))),
            max_rows=10**6,
            clock=lambda: self.clock.now,
            changed=waiting,
        )

        def arrive() -> None:
            while (n := len(numbers)) < len(arrivals) and arrivals[n] <= self.clock.now:
                ticket = self._ticket(float(exits[n]), float(arrivals[n]))
                numbers[ticket] = n
                try:
                    batcher.put(ticket)
                except OverloadedError:
                    self.unanswered.add(n)

        self.clock.passed = arrive  # requests come while batches run
        waiting.next_arrival = lambda: float(arrivals[len(numbers)]) if len(numbers) < len(arrivals) else None
        while len(self.answered) + len(self.unanswered) < len(arrivals):
            batch = batcher.take(wait=True)
            self.unanswered.update(numbers[ticket] for ticket in batcher.given_up())
            if batch is None:
                continue
            self.batches += 1
            for leave in run_stages(
                self.stages,
                batch.x,
                tests={ramp: WantsToLeave(ramp) for ramp in ACTIVE},
                may_leave=None,
                regroups=self.regrouping,
            ):
                for row in leave.rows:
                    self.answered[numbers[batch.owners[row][0]]] = self.clock.now
            batcher.ended(batch)

    def _ticket(self, wanted: float, admitted: float) -> Ticket:
        x = np.array([[wanted]], dtype=np.float32)
        return new_ticket(
            x, never_exit=False, task=task_of(None, width=2), now=admitted, wall_time=0.0, draw=lambda: 1.0
        )


def stages(of: Profile, clock: Clock) -> tuple[TimedStage, ...]:
    """Places after segments 0-1 and 0-3, as a worker would cut for the active ramps."""
    table = CostTable(of, sizes=range(MAX_BATCH + 1))
    regroup = table.regroup.tolist()

    def stage(segments: slice, ramps: tuple[int, ...]) -> TimedStage:
        seconds = table.segment[:, segments].sum(axis=1) + table.ramp[:, list(ramps)].sum(axis=1)
        return TimedStage(clock, seconds.tolist(), regroup, ramps)

    return (stage(slice(0, 2), (0, 1)), stage(slice(2, 4), (3,)), stage(slice(4, None), ()))


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
@pytest.mark.parametrize("load", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("make", [poisson, bursts], ids=["poisson", "bursts"])
def test_every_answer_comes_when_the_workers_own_loop_gives_it(make: Any, load: float, execution: Any) -> None:
    rng = np.random.default_rng(int(10 * load))
    of = profile(3)
    n = 1500
    arrivals = make(n, load * 32 / of.batches[-1].exact_seconds, rng)
    exits = rng.choice([*ACTIVE, NO_EXIT], n, p=[0.2, 0.1, 0.3, 0.4])
    clock = Clock()
    policy = OfframpBatching(queue_rows=None)
    regrouping = regrouping_of(of) if execution == "ComputeSaving" else None
    worker = VirtualWorker(stages(of, clock), clock, regrouping, policy, of)
    worker.serve(arrivals, exits)
    out = serve_stream(arrivals, traced(exits), of, batching=policy, execution=execution)
    seen = np.array([worker.answered[i] for i in range(n)]) - arrivals
    np.testing.assert_allclose(out.latency, seen, rtol=1e-9, atol=1e-9)
    assert out.batches == worker.batches


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("slack", [1.0, 3.0], ids=["tight", "loose"])
@pytest.mark.parametrize("load", [0.7, 2.0])
@pytest.mark.parametrize("name", BATCHING)
def test_every_policy_and_the_door_decide_alike_in_both(name: str, load: float, slack: float, seed: int) -> None:
    """With an objective: adaptive limits, waiting to fill, drops, admission on credit, and refusals at the door while a
    batch runs."""
    rng = np.random.default_rng(seed)
    of = profile(4)
    n = 1500
    objective = (
        1.001 * slack * of.batches[-1].exact_seconds
    )  # no batch takes just as long: ties fall either way by rounding
    arrivals = bursts(n, load * 32 / of.batches[-1].exact_seconds, rng)
    exits = rng.choice([*ACTIVE, NO_EXIT], n, p=[0.2, 0.1, 0.3, 0.4])
    clock = Clock()
    policy = batching(name, profile=of, slo_seconds=objective)
    if isinstance(policy, TfServingBatching):
        policy = replace(policy, allowed_batch_sizes=())  # a worker has no need to pad
    worker = VirtualWorker(stages(of, clock), clock, regrouping_of(of), policy, of, objective)
    worker.serve(arrivals, exits)
    out = serve_stream(
        arrivals, traced(exits), of, batching=policy, execution="ComputeSaving", slo_seconds=objective, admission=True
    )
    assert set(np.flatnonzero(out.status != ANSWERED)) == worker.unanswered
    answered = np.flatnonzero(out.status == ANSWERED)
    seen = np.array([worker.answered[i] for i in answered]) - arrivals[answered]
    np.testing.assert_allclose(out.latency[answered], seen, rtol=1e-9, atol=1e-9)
    assert out.batches == worker.batches
    assert load < 1 or out.rejected > 100


def regrouping_of(of: Profile) -> Regrouping:
    table = CostTable(of, sizes=range(MAX_BATCH + 1))
    return Regrouping.of(table.stage_seconds([ACTIVE[:2], ACTIVE[2:]]), table.regroup.tolist())


def traced(exits: Array) -> Trace:
    return Trace(exits, (PlanInForce(0, ACTIVE, (0.5,) * 3),), np.ones(len(exits), dtype=bool))
