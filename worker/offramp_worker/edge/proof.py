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

from offramp_core.edge import Place, Residue, handed_on_at
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


class FeaturesProof:
    """Asked in the engine's turn; what was not proven yet is asked of the core, and does not hold meanwhile."""

    def __init__(self, link: Link, desk: EdgeDesk, bundle: Bundle, *, residue: Residue) -> None:
        self._link, self._desk, self._bundle, self._residue = link, desk, bundle, residue
        self._known: dict[tuple[str, str], bool] = {}

    def hands_on_at(self, active: Sequence[int], behind: Mapping[int, float], *, pace: float) -> int | None:
        """The column from which features are sent of rows that leave at none of the ``active`` ones, if that is a later
        one: this box takes ``pace`` times as long as the bundle says, which has the seconds ``behind`` each column of
        the chain. Where features were not asked for nothing is worth going on for: an input is sent as soon as it is
        known that it stays."""
        heads, shapes, last = self._bundle.heads, self._bundle.shapes, max(active)
        if self._residue != "Features" or heads[last] is None:
            return None
        sizes = {j: shapes[head.source] for j in behind if j >= last and (head := heads[j]) is not None}
        places = [Place(FEATURE_BYTES * math.prod(shape), behind[j]) for j, shape in sizes.items()]
        at = handed_on_at(places, bytes_per_second=self._link.uplink.bytes_per_second, pace=pace)
        found = list(sizes)[at]
        return found if found != last else None

    def may_send(self, runtime: Runtime) -> bool:
        """Whether features of a plan may be sent once they are proven: of the exact precision, and all that the rest
        reads. Where lengths vary nobody asks."""
        return (
            self._residue != "Input"
            and not self._link.away
            and self.core_takes_them
            and runtime.plan.precision == EXACT
            and not runtime.stages[-1].reads_input
            and not self._bundle.manifest.inputs[0].varies
        )

    @property
    def core_takes_them(self) -> bool:
        return self._link.takes_features and not self._link.rests(FEATURES)

    def holds(self, runtime: Runtime, ramp: int) -> bool:
        """Whether features at the last exit of this plan, ``ramp``, may be sent."""
        key = (self._link.boot, runtime.plan.content_hash)
        if key not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[key] = False
            self._desk.left()  # between two batches: stages keep what they hand on in buffers that a batch is using now
            self._desk.back(partial(self._ask, key, runtime, self._bundle.columns[ramp].id))
        return self._known[key]

    def held(self, runtime: Runtime, boot: str) -> bool:
        """Whether the process that has answered is one that was proven to understand them."""
        return self._known.get((boot, runtime.plan.content_hash), False)

    def _ask(self, key: tuple[str, str], runtime: Runtime, ramp: str) -> None:
        features = x = self._bundle.probe_x
        for stage in runtime.stages[:-1]:
            features, _ = stage.run(features, x)
        self._desk.left()
        self._link.send(
            features_path(ramp),
            FEATURES,
            np.asarray(features),
            sent="Nothing",
            within=math.inf,
            answered=lambda reply: self._desk.back(partial(self._came_back, key, ramp, reply)),
        )

    def _came_back(self, key: tuple[str, str], ramp: str, reply: Reply | None) -> None:
        if reply is None:
            if self._link.away or self._link.rests(FEATURES):  # it is asked again
                self._known.pop(key, None)
            return
        if reply.boot != key[0]:  # another process than was asked: this is known of that one
            self._known.pop(key, None)
            key = (reply.boot, key[1])
        logits = reply.arrays.get("logits")
        holds = logits is not None and reproduces(logits, self._bundle.probe_logits, self._bundle.task)
        self._known[key] = holds
        if not holds and not self._link.away:
            log_event("features-unlike", level="warning", core=self._link.core, ramp=ramp)


def last_ramp(runtime: Runtime) -> int:
    """Where the last stage before the output ends."""
    return runtime.stages[-2].ramps[-1]
