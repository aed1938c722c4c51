"""The simulator against the worker's own batcher and stage loop, with a clock that the stages turn: equal to the last digit.

What a test on a real machine cannot tell apart (neighbours, the scheduler) is left out here; what is left must agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offramp_core.bundle import BatchProfile, Profile
from offramp_core.execution import Regrouping
from offramp_core.policies import NO_EXIT, PlanInForce, Trace
from offramp_core.simulate import MAX_BATCH, OfframpBatching, serve_stream
from offramp_core.simulate.arrivals import bursts, poisson
from offramp_core.simulate.costs import CostTable
from offramp_worker.engine.batcher import Batcher, Ticket, new_ticket
from offramp_worker.engine.execute import run_stages

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
    """Virtual seconds."""

    now: float = 0.0


@dataclass(frozen=True)
class TimedStage:
    """A stage that turns the clock instead of computing; a row's features are the ramp where it wants to leave."""

    clock: Clock
    seconds: list[float]
    regroup: list[float]
    ramps: tuple[int, ...]

    reads_input = False

    def run(self, features: Array, _x: Array, rows: Array | None = None) -> tuple[Array, list[tuple[Array, Array]]]:
        if rows is not None:
            self.clock.now += self.regroup[len(features)]
            features = features[rows]
        self.clock.now += self.seconds[len(features)]
        return features, [(features, features[:, 0]) for _ in self.ramps]


@dataclass(frozen=True)
class WantsToLeave:
    """Rows leave at the ramp where they want to."""

    ramp: int

    def leaves(self, _: Array, wanted: Array) -> Array:
        return wanted == self.ramp


@dataclass
class VirtualWorker:
    """The engine's loop around the real batcher and the real stage loop: take what waits, run it, answer rows as they leave."""

    stages: tuple[TimedStage, ...]
    clock: Clock
    regrouping: Regrouping | None
    answered: dict[int, float] = field(default_factory=dict)
    batches: int = 0

    def serve(self, arrivals: Array, exits: Array) -> None:
        batcher, coming = Batcher(max_rows=10**6, max_batch=MAX_BATCH), 0
        numbers: dict[int, int] = {}
        while len(self.answered) < len(arrivals):
            while coming < len(arrivals) and arrivals[coming] <= self.clock.now:
                ticket = self._ticket(float(exits[coming]), float(arrivals[coming]))
                numbers[id(ticket)] = coming
                batcher.put(ticket)
                coming += 1
            batch = batcher.take(wait=False)
            if batch is None:
                self.clock.now = float(arrivals[coming])
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
                    self.answered[numbers[id(batch.owners[row][0])]] = self.clock.now

    def _ticket(self, wanted: float, admitted: float) -> Ticket:
        x = np.array([[wanted]], dtype=np.float32)
        return new_ticket(x, never_exit=False, n_classes=1, now=admitted, wall_time=0.0, draw=lambda: 1.0)


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
    regrouping = None
    if execution == "ComputeSaving":
        table = CostTable(of, sizes=range(MAX_BATCH + 1))
        regrouping = Regrouping.of(table.stage_seconds([ACTIVE[:2], ACTIVE[2:]]), table.regroup.tolist())
    worker = VirtualWorker(stages(of, clock), clock, regrouping)
    worker.serve(arrivals, exits)
    trace = Trace(exits, (PlanInForce(0, ACTIVE, (0.5,) * 3),), np.ones(n, dtype=bool))
    out = serve_stream(arrivals, trace, of, batching=OfframpBatching(queue_rows=None), execution=execution)
    seen = np.array([worker.answered[i] for i in range(n)]) - arrivals
    np.testing.assert_allclose(out.latency, seen, rtol=1e-9, atol=1e-9)
    assert out.batches == worker.batches
