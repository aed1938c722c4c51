"""Whether and where features may be sent: a core must understand them, so those of the bundle's probe must lead to the
probe's answers.

What a stage hands on is as this machine's processor likes it: convolutions keep channels in blocks whose size differs
from processor to processor, in arrays of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from offramp_core.edge import Place, Residue, goes_on, handed_on_at
from offramp_core.precision import EXACT
from offramp_worker.bundle.load import Bundle
from offramp_worker.edge.desk import EdgeDesk
from offramp_worker.edge.link import Link
from offramp_worker.edge.wire import FEATURES, Reply, features_path
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.execution.sessions import reproduces
from offramp_worker.logs import log_event

MOST_KEPT = 8  # plans
FEATURE_BYTES = 4  # of a number

Key = tuple[str, str, int]  # the core's process, the plan, and the ramp: which one that is may change with the pace


class FeaturesProof:
    """Asked in the engine's turn; what was not proven yet is asked of the core, and does not hold meanwhile."""

    def __init__(self, link: Link, desk: EdgeDesk, bundle: Bundle, *, residue: Residue) -> None:
        self._link, self._desk, self._bundle, self._residue = link, desk, bundle, residue
        self._known: dict[Key, bool] = {}

    def hands_on_at(self, active: Sequence[int], behind: Mapping[int, float], *, pace: float) -> int | None:
        """The column from which features are sent of rows that leave at none of the ``active`` ones, if that is a later
        one: this box takes ``pace`` times as long as the bundle says, which has the seconds ``behind`` each column of
        the chain. Where features were not asked for nothing is worth going on for: an input is sent as soon as it is
        known that it stays."""
        heads, last = self._bundle.heads, max(active)
        if self._residue != "Features" or heads[last] is None:
            return None
        columns = [j for j in behind if j >= last and heads[j] is not None]
        places = [Place(self._row_bytes(j), behind[j]) for j in columns]
        found = columns[handed_on_at(places, bytes_per_second=self._link.uplink.bytes_per_second, pace=pace)]
        return found if found != last else None

    def goes_on(self, runtime: Runtime, ramp: int, *, rows: int, now: Place, pace: float) -> bool:
        """Whether so many rows that have come to the exit ``ramp`` are to go on here, to the last ramp, and features
        are sent from there: that is proven, and no later than what may be sent ``now``. The place was chosen when the
        plan was prepared, perhaps before anything was known of this box and the uplink."""
        last = last_ramp(runtime)
        if ramp == last or not self.may_send(runtime, last):
            return False
        seconds = [stage[min(rows, len(stage) - 1)] for stage in runtime.stage_seconds]
        between = pace * sum(seconds[number_of(runtime, ramp) + 1 : -1])
        later, rate = Place(rows * self._row_bytes(last), seconds[-1]), self._link.uplink.bytes_per_second
        return goes_on(now, later, between_seconds=between, bytes_per_second=rate) and self.holds(runtime, last)

    def _row_bytes(self, ramp: int) -> int:
        head = self._bundle.heads[ramp]
        assert head is not None
        return FEATURE_BYTES * math.prod(self._bundle.shapes[head.source])

    def may_send(self, runtime: Runtime, ramp: int) -> bool:
        """Whether features of a plan may be sent from a ramp once they are proven: of the exact precision, and all that
        the rest reads. Where lengths vary nobody asks."""
        return (
            self._residue != "Input"
            and not self._link.away
            and self.core_takes_them
            and runtime.plan.precision == EXACT
            and not any(stage.reads_input for stage in runtime.stages[number_of(runtime, ramp) + 1 :])
            and not self._bundle.manifest.inputs[0].varies
        )

    @property
    def core_takes_them(self) -> bool:
        return self._link.takes_features and not self._link.rests(FEATURES)

    def holds(self, runtime: Runtime, ramp: int) -> bool:
        """Whether features of this plan at ``ramp``, which ends a stage, may be sent."""
        key = (self._link.boot, runtime.plan.content_hash, ramp)
        if key not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[key] = False
            self._desk.left()  # between two batches: stages keep what they hand on in buffers that a batch is using now
            self._desk.back(partial(self._ask, key, runtime))
        return self._known[key]

    def held(self, runtime: Runtime, ramp: int, boot: str) -> bool:
        """Whether the process that has answered is one that was proven to understand them."""
        return self._known.get((boot, runtime.plan.content_hash, ramp), False)

    def _ask(self, key: Key, runtime: Runtime) -> None:
        features = x = self._bundle.probe_x
        for stage in runtime.stages[: number_of(runtime, key[2]) + 1]:
            features, _ = stage.run(features, x)
        self._desk.left()
        self._link.send(
            features_path(self._bundle.columns[key[2]].id),
            FEATURES,
            np.asarray(features),
            sent="Nothing",
            within=math.inf,
            answered=lambda reply: self._desk.back(partial(self._came_back, key, reply)),
        )

    def _came_back(self, key: Key, reply: Reply | None) -> None:
        if reply is None:
            if self._link.away or self._link.rests(FEATURES):  # it is asked again
                self._known.pop(key, None)
            return
        if reply.boot != key[0]:  # another process than was asked: this is known of that one
            self._known.pop(key, None)
            key = (reply.boot, *key[1:])
        logits = reply.arrays.get("logits")
        holds = logits is not None and reproduces(logits, self._bundle.probe_logits, self._bundle.task)
        self._known[key] = holds
        if not holds and not self._link.away:
            ramp = self._bundle.columns[key[2]].id
            log_event("features-unlike", level="warning", core=self._link.core, ramp=ramp)


def last_ramp(runtime: Runtime) -> int:
    """Where the last stage before the output ends."""
    return runtime.stages[-2].ramps[-1]


def number_of(runtime: Runtime, ramp: int) -> int:
    """Of the stage that ends at a ramp."""
    return next(number for number, stage in enumerate(runtime.stages) if stage.ramps[-1:] == (ramp,))
