"""Workers that a node rejects as soon as they are placed there.

A platform that keeps a number of workers makes the next one at once. What made the node reject the last one is there as
it was, so that several a second are made without end. For a while no further ones are asked for, and the while doubles.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from offramp_core.control.snapshot import Event, Snapshot
from offramp_core.reasons import Reason

BORNE = 2  # a node that starts anew, or was promised to two, rejects one or two
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 600.0


def next_worker_at(rejected_at: Iterable[float]) -> float | None:
    """When the next worker may be asked for, after workers were rejected at these times; None where nothing keeps from
    it.

    The pause is as long as it has gone on. What lies further back than the next try after the longest pause was another
    trouble.
    """
    times = sorted(rejected_at)
    breaks = [after for before, after in pairwise(times) if after - before > 2 * LONGEST_PAUSE_SECONDS]
    series = [at for at in times if at >= max(breaks, default=-float("inf"))]
    if len(series) <= BORNE:
        return None
    return series[-1] + min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, series[-1] - series[0]))


def rejection_events(snapshot: Snapshot) -> tuple[Event, ...]:
    """One for each pause, which a condition tells from then on."""
    held = next((w.endpoint for w in snapshot.workers if w.endpoint.held_until is not None), None)
    if held is None or any(held.failure in c.message for c in snapshot.service.status.conditions):
        return ()
    return (Event(Reason.REJECTED_BY_NODE, f"{held.name}: {held.failure}", warning=True),)
