"""The executor: a batch runs as its runtime says, and what an exit or a lower precision must not answer goes through
the exact stage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.precision import EXACT
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.arms.tiers import MixedTests
from offramp_worker.engine.execution.execute import (
    GoOn,
    Leave,
    among,
    run_again,
    run_apart,
    run_exact,
    run_stages,
    whole,
)
from offramp_worker.engine.execution.ramp_sets import HeldSets
from offramp_worker.engine.execution.sessions import reproduces
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.engine.queue.batcher import Batch
from offramp_worker.engine.queue.deadlines import Deadlines

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]


class Executor:
    """Runs a batch under a runtime and yields rows as they leave; one batch at a time, since stages keep their
    buffers."""

    def __init__(self, sets: HeldSets, *, deadlines: Deadlines) -> None:
        """Batches of the exact executor have a stage with buffers of its own; whichever set is held answers single rows
        exactly."""
        sessions = sets.held[0].sessions
        self.exact_stage = sessions.exact_stage()
        self._bundle, self._usual, self._sets, self._deadlines = sets.own, sessions.usual, sets, deadlines

    def run(self, batch: Batch, runtime: Runtime, go_on: GoOn | None = None) -> Iterator[Leave]:
        """Rows of a batch as they leave. ``go_on`` takes those that leave at no exit, where an edge has a core."""
        if runtime.exits_off:
            sent = go_on is not None and go_on(whole(batch.x))
            return iter(()) if sent else run_exact(self.exact_stage, batch.x)
        deadlines = self._deadlines.of(batch, runtime)
        may_leave = _may_leave(batch, runtime, self._usual)
        mixed = _mixed(batch, runtime)
        run = partial(
            run_stages, runtime.stages, tests=runtime.tests, regroups=runtime.regrouping, further=runtime.further
        )
        if runtime.plan.precision == EXACT:
            withheld = runtime.stopped_classes
            return run(batch.x, may_leave=may_leave, deadlines=deadlines, withheld=withheld, mixed=mixed, go_on=go_on)
        if may_leave is None:
            leaves = run(batch.x, may_leave=None, deadlines=deadlines, mixed=mixed, go_on=go_on)
            return self._withheld(batch.x, runtime, leaves)
        return run_apart(
            batch.x,
            may_leave,
            exact=self._sets.held[0].sessions.exact,
            run=lambda x: self._withheld(
                x,
                runtime,
                run(
                    x,
                    may_leave=None,
                    deadlines=None if deadlines is None else deadlines.of(may_leave),
                    mixed=None if mixed is None else mixed.take(may_leave),
                    go_on=None if go_on is None else among(np.flatnonzero(may_leave), go_on),
                ),
            ),
        )

    def probe(self, rows: int) -> None:
        """Run the exact stage on the bundle's probe, as many rows as a batch that failed had; raise unless it answers
        as it should."""
        bundle = self._bundle
        at = np.arange(max(rows, len(bundle.probe_x))) % len(bundle.probe_x)
        logits, _ = self.exact_stage.run(bundle.probe_x[at], bundle.probe_x[at])
        if not reproduces(logits, bundle.probe_logits[at], bundle.task):
            raise RuntimeError("its answers to the probe are not the model's")

    def _withheld(self, x: Array, runtime: Runtime, leaves: Iterator[Leave]) -> Iterator[Leave]:
        """Answers at a lower precision, none of which names a stopped class or overflows unless the exact executor does
        so too."""
        return run_again(x, leaves, exact=self._sets.held[0].sessions.exact, withheld=runtime.stopped_classes)


def _may_leave(batch: Batch, runtime: Runtime, usual_inputs: UsualInputs) -> BoolArray | None:
    """Rows that may leave early (n,): usual ones whose slice was not stopped, and whose tier has a plan; None where all
    may."""
    usual = usual_inputs.rows(batch.x)
    if not runtime.stopped and not any(ticket.has_own_budget for ticket, _ in batch.owners):
        return usual
    going = np.array([ticket.may_leave_under(runtime) for ticket, _ in batch.owners])
    if going.all():
        return usual
    return going if usual is None else usual & going


def _mixed(batch: Batch, runtime: Runtime) -> MixedTests | None:
    """Who leaves where in a batch with requests of tiers; None where all rows have everybody's budget."""
    tiers = [ticket.tier for ticket, _ in batch.owners]
    if not any(tiers):
        return None
    named = np.array(tiers)
    everybody = [(named == "", runtime.tests)]
    return MixedTests(everybody + [(named == name, exits.tests) for name, exits in runtime.tiers.items()])
