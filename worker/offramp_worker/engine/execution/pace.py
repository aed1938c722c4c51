"""What whole batches of the exact model take on this hardware, in times of what the bundle's profile says of them."""

from __future__ import annotations

import time

import numpy as np

from offramp_core.protocol import LONGEST_PACE, SHORTEST_PACE
from offramp_worker.bundle.lengths import typical_batch
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.execution.execute import Runnable

FEWEST_RUNS = 3


def measured_pace(stage: Runnable, bundle: Bundle, *, most: int, seconds: float) -> float:
    """Of the largest batch in the profile that has at most ``most`` rows, or the smallest one.

    The mean over ``seconds``, and not the quickest run: a processor limit lets the first runs pass and holds up later
    ones.
    """
    profiled = {b.batch_size: float(np.sum(b.segment_seconds)) for b in bundle.profile.batches}
    size = max((n for n in profiled if n <= most), default=min(profiled))
    batch = typical_batch(bundle.probe_x, bundle.manifest.inputs[0], size=size)
    began, runs = time.perf_counter(), 0
    while runs < FEWEST_RUNS or time.perf_counter() - began < seconds:
        stage.run(batch, batch)
        runs += 1
    pace = (time.perf_counter() - began) / runs / profiled[size]
    return min(max(pace, SHORTEST_PACE), LONGEST_PACE)
