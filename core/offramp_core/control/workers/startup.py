"""How long a new worker of a pool takes until it answers, as the last ones did."""

from __future__ import annotations

from collections.abc import Iterable

from offramp_core.control.objects import StartUpTimes
from offramp_core.control.snapshot import StartUp

LAST = 8  # workers that count, the newest ones
SHARE = 0.75  # of them that were at most as slow as what is planned with
TOLERANCE, LEAST_SECONDS = 0.25, 2.0  # within which the figure of before stands
MOST_SECONDS = 1800.0  # beyond which a worker waited for a node, and did not start


def next_startup(before: StartUpTimes, seen: Iterable[StartUp | None]) -> StartUpTimes:
    """The times of one of the last workers, slower than most of them; those of before while they are about right.

    Of two the quicker one, of three the one in the middle: a pod tells when it last became ready, and one that was not
    ready for a moment must not stand for all.
    """
    known = (one for one in seen if one is not None and 0 < one.times.seconds <= MOST_SECONDS)
    last = sorted(known, key=lambda one: one.created_at)[-LAST:]
    if not last:
        return before
    slower = sorted((one.times for one in last), key=lambda times: times.seconds)[int(SHARE * (len(last) - 1))]
    off = abs(slower.seconds - before.seconds)
    return before if off <= max(LEAST_SECONDS, TOLERANCE * before.seconds) and before.seconds else slower
