"""Whether sources take turns: gateways do, and independent sources seldom."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from offramp_core.records import IN_A_ROW

REMEMBERED = 500  # requests; longer turns show among the records as well, even if 2 % of the requests have one


class Turns:
    """By all requests of a worker, as records of few of them show no turns."""

    def __init__(self, *, draw: Callable[[], float] = random.random) -> None:
        self._draw, self._streams = draw, deque([""] * IN_A_ROW, maxlen=REMEMBERED)

    def repeats(self, stream: str) -> bool:
        """Whether the last requests before this one named the same stream, and one drawn from hundreds another.

        A client whose connection stays with this worker follows itself all the time, and takes no turns.
        """
        before = self._streams
        in_a_row = all(before[-i] == stream for i in range(1, IN_A_ROW + 1))
        found = in_a_row and before[int(len(before) * self._draw())] != stream
        before.append(stream)
        return found
